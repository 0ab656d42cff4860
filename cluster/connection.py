"""The launcher's connection to the agent on a host."""

from __future__ import annotations

import contextlib
import json
import os
import queue
import shlex
import signal
import subprocess
import sys
import threading
import time
from typing import Any

from cluster.hosts import Host
from cluster.ranks import Rank
from cluster.ssh import NO_FOLDER, connecting


class Connection:
    """An ssh to the agent, and the threads that write to it and listen.

    Args:
        events: gets (self, what the agent says), and at last that it is "gone".
        connects: whether we hold `connecting`, which is released once it has connected.
        order: the agent's first line: what it is to start.
    """

    def __init__(
        self, host: Host, members: list[Rank], events: queue.Queue, connects: bool,
        order: dict[str, Any],
    ) -> None:  # fmt: skip
        self.host, self.members, self._connects = host, members, connects
        self._events = events
        folder, python = shlex.quote(os.getcwd()), shlex.quote(sys.executable)
        script = f"cd {folder} 2>/dev/null || exit {NO_FOLDER}; exec {python} -m cluster.agent"
        script = f"echo; {script}"  # ends what a login shell may print; see _hear
        self.process = subprocess.Popen(
            host.command(script), start_new_session=True,  # Ctrl-C is for us alone
            stdin=subprocess.PIPE, stdout=subprocess.PIPE, stderr=subprocess.PIPE,
        )  # fmt: skip
        # Written by a thread: while a login hangs nobody reads, and the pipe to ssh may be small.
        self._orders: queue.SimpleQueue[dict[str, Any] | None] = queue.SimpleQueue()
        threading.Thread(target=self._write, daemon=True).start()
        self.send(**order)
        self.listening_since = time.monotonic()
        self._holds = False
        self._words, self._heard = b"", False  # the last ones on stderr; whether the agent spoke
        self._hearing_ssh = threading.Thread(target=self._hear_ssh, daemon=True)
        self._hearing_ssh.start()  # first, as the other thread waits for it at its end
        threading.Thread(target=self._hear, daemon=True).start()

    def send(self, **what: Any) -> None:
        """Send a line to the agent, without waiting."""
        self._orders.put(what)

    def hold(self, holds: bool) -> None:
        """Have the agent hold back what its ranks print, or go on. Left unread, it could not report
        ended ranks."""
        if holds != self._holds:
            self._holds = holds
            self.send(hold=holds)

    def close(self) -> None:
        """Close the agent's input, upon which it ends what it started."""
        self._orders.put(None)

    def _write(self) -> None:
        assert self.process.stdin is not None
        with contextlib.suppress(OSError), self.process.stdin as stdin:
            while (what := self._orders.get()) is not None:
                stdin.write(json.dumps(what).encode() + b"\n")
                stdin.flush()

    def kill(self) -> None:
        with contextlib.suppress(ProcessLookupError):
            if self.process.poll() is None:
                os.killpg(self.process.pid, signal.SIGKILL)

    def silent_for(self) -> float:
        """Seconds since the agent was last heard, while we listened."""
        return time.monotonic() - self.listening_since

    def _hear(self) -> None:
        assert self.process.stdout is not None
        self.process.stdout.readline()  # the connection is made, or has ended
        if self._connects:
            connecting.release()
        for line in self.process.stdout:
            self.listening_since = float("inf")  # not listening while `put` waits
            if line.startswith(b"{") and line.endswith(b"\n"):  # whole; a login shell may greet
                with contextlib.suppress(ValueError):
                    event = json.loads(line)
                    if not self._heard:  # what ssh said before that is not why it ends
                        self._heard, self._words = True, b""
                    self._events.put((self, event))
            self.listening_since = time.monotonic()
        self._hearing_ssh.join(timeout=2)
        errors = self._words.decode(errors="replace")
        self._events.put((self, {"gone": self.process.wait(), "said": errors}))

    def _hear_ssh(self) -> None:
        assert self.process.stderr is not None
        while data := os.read(self.process.stderr.fileno(), 1 << 12):
            self._words = (self._words + data)[-4000:]

"""What is kept of a job, while it runs and after it: a folder for each run, in logs/launches.

    run.json          the job and its state
    rank-0.log ...    what each rank printed, of jobs that `make launch` started
    launcher.log      what their launcher said

Other jobs print to their terminal instead, and their folder is removed when they end.
"""

from __future__ import annotations

import contextlib
import datetime
import errno
import itertools
import json
import os
import queue
import select
import shlex
import shutil
import signal
import sys
import threading
import time
from pathlib import Path
from typing import IO, Any

from cluster.hosts import Refusal
from cluster.ranks import Rank

FOLDER = Path("logs/launches")
ALIVE = ("waiting", "starting", "running")
MOST_WAITING = 1 << 20  # bytes that may wait for a reader who pauses; then ranks hold back
PAUSE_SECONDS = 5  # without reading, after which a job that ends early no longer waits


def new_folder() -> Path:
    """Make a folder named after this second, with a number behind it where the name is taken.

    Raises:
        Refusal: when it cannot be made, as where logs is a file.
    """
    now = datetime.datetime.now().strftime("%Y-%m-%d_%H-%M-%S")
    for number in itertools.count():
        folder = FOLDER / (f"{now}_{number}" if number else now)
        try:
            FOLDER.mkdir(parents=True, exist_ok=True)
            folder.mkdir()
            return folder
        except FileExistsError as error:
            if (path := Path(error.filename)) != folder:
                what = f"a link to {os.readlink(path)}" if path.is_symlink() else "no folder"
                fix = "make that folder" if path.is_symlink() else "move it away"
                raise Refusal(f"{path} is {what}: {fix}") from None
        except OSError as error:
            raise Refusal(f"{error.filename}: {error.strerror}: runs are noted there") from None
    raise AssertionError("unreachable")


def place() -> str:
    """Where process ids mean what they mean here: this host, or a container, which may have the
    same name as its host but has a pid namespace other than the kernel's first."""
    name = os.uname().nodename
    try:
        space = os.readlink("/proc/self/ns/pid")
    except OSError:  # a kernel without namespaces
        return name
    return name if space == "pid:[4026531836]" else f"{name} (container {space[5:-1]})"


def birth(pid: int) -> str | None:
    """When a process began, in clock ticks since boot; None if it has ended.

    Ids are used again; id and birth together name one process for good.
    """
    try:
        text = Path(f"/proc/{pid}/stat").read_text(errors="replace")
    except OSError:
        return None
    state, *fields = text.rpartition(")")[2].split()
    return None if state in "ZX" else fields[18]


def begun(
    folder: Path, members: list[Rank], command: list[str], stop_seconds: float, pid: int,
    detached: bool = True,
) -> dict[str, Any]:  # fmt: skip
    """The first state of a run whose launcher is the process `pid`."""
    return {
        "id": folder.name, "command": shlex.join(command), "folder": os.getcwd(),
        "hosts": {member.host.name: member.host.slots for member in members},
        "ranks": len(members), "detached": detached, "stop_seconds": stop_seconds,
        "launcher": place(), "pid": pid, "birth": birth(pid),
        "began": datetime.datetime.now().isoformat(timespec="seconds"), "state": "starting",
    }  # fmt: skip


class Writer:
    """Writes to a descriptor, in order, by a thread of its own, as the reader there may pause."""

    def __init__(self, descriptor: int, encoding: str) -> None:
        self._descriptor, self._encoding = descriptor, encoding
        self._queue: queue.SimpleQueue[bytes | None] = queue.SimpleQueue()
        self._lock = threading.Lock()
        self._given = self._written = 0
        self._open = ""  # the `begin` of a line that has not ended yet
        self._moved = time.monotonic()
        self._in_foreground = bool(_in_foreground())
        self.thread = threading.Thread(target=self._write, daemon=True)
        self.thread.start()

    @property
    def waiting(self) -> int:
        return self._given - self._written

    @property
    def stalls(self) -> bool:
        return self.waiting > 0 and time.monotonic() - self._moved > PAUSE_SECONDS

    def put(self, begin: str, text: str, part: bool = False) -> None:
        """Queue a line that starts with `begin` or, with `part`, a piece that does not end it."""
        with self._lock:
            goes_on = self._open == begin
            before = "" if goes_on else f"\n{begin}" if self._open else begin
            self._open = begin if part else ""
            # What the terminal's encoding cannot show becomes "?", and is no error.
            data = f"{before}{text}".encode(self._encoding, "replace")
            self._moved = self._moved if self.waiting else time.monotonic()
            self._given += len(data)
            self._queue.put(data)

    def close(self) -> None:
        """Have the thread end when all is written."""
        self._queue.put(None)

    def _write(self) -> None:
        while (data := self._queue.get()) is not None:
            while data:
                # Not by sys.stdout, as Python would wait for its lock when it exits.
                count = len(data)
                try:
                    count = os.write(self._descriptor, data[: 1 << 16])
                    if (now := _in_foreground()) is not None:  # None: the terminal has just gone
                        self._in_foreground = now  # may change, by Ctrl-Z, bg and disown
                except BlockingIOError:  # another program has set O_NONBLOCK on what we share
                    select.select([], [self._descriptor], [])
                    continue
                except OSError as error:
                    # The reader is gone: `| tee`, or the terminal. That sends SIGHUP to the first
                    # process of its session only, which may be a make that waits for us.
                    if error.errno == errno.EIO and self._in_foreground:
                        self._in_foreground = False
                        os.kill(os.getpid(), signal.SIGHUP)
                data = data[count:]
                self._moved = time.monotonic()
                self._written += count


class Record:
    """The run that this process launches.

    Args:
        folder: of a detached run, made by `make launch`; None: the job prints to the terminal.
        members: the processes of the job.
        command: what each runs.
        stop_seconds: time for a checkpoint when the job is told to stop.
    """

    def __init__(
        self, folder: Path | None, members: list[Rank], command: list[str], stop_seconds: float
    ) -> None:
        self._detached = folder is not None
        self.hurries = False  # the job ends early: a reader who pauses is not waited for
        self._behind = False
        self.folder = folder or new_folder()
        self.id = self.folder.name
        self._files: dict[int, IO[str]] = {}
        self._state = begun(
            self.folder, members, command, stop_seconds, os.getpid(), self._detached
        )
        try:
            write(self.folder, self._state)
        except OSError as error:
            if not self._detached:  # the folder of a detached run keeps the reason
                shutil.rmtree(self.folder, ignore_errors=True)
            raise Refusal(f"{self.folder}: runs are noted there: {error.strerror}") from None
        self._writers: dict[str, Writer] = {}
        if not self._detached:
            stdout = Writer(1, sys.stdout.encoding)
            same = os.path.sameopenfile(1, 2)  # then one writer keeps the order of both
            stderr = stdout if same else Writer(2, sys.stderr.encoding)
            self._writers = {"stdout": stdout, "stderr": stderr}

    def __enter__(self) -> Record:
        return self

    def __exit__(self, kind: object, error: BaseException | None, traceback: object) -> None:
        self.hurries |= error is not None
        self._wait_for_readers()
        for file in self._files.values():
            with contextlib.suppress(OSError):  # a full disk
                file.close()
        if not self._detached:
            with contextlib.suppress(OSError):  # a disk that has become read-only
                (self.folder / "run.json").unlink(missing_ok=True)
                self.folder.rmdir()
        elif error is not None:
            self.update(state="failed", reason=str(error))

    def update(self, **what: Any) -> None:
        """Change the state, and write it anew."""
        self._state |= what
        if self._state["state"] not in ALIVE:
            self._state["ended"] = datetime.datetime.now().isoformat(timespec="seconds")
        with contextlib.suppress(OSError):  # a full disk
            write(self.folder, self._state)

    def line(self, rank: int, stream: str, line: str, part: bool = False) -> None:
        """Print or keep a line of a rank or, with `part`, a piece that does not end its line. The
        job goes on where that cannot be written."""
        end = "" if part or line.endswith(("\r", "\n")) else "\n"
        if not self._detached:
            if not self._abandons(self._writers[stream]):
                self._writers[stream].put(f"[{rank}]<{stream}>:", f"{line}{end}", part)
            return
        with contextlib.suppress(OSError):  # a full disk
            if rank not in self._files:
                # Open for the whole run; each line is one write, so that it can be followed.
                file = self.folder / f"rank-{rank}.log"
                self._files[rank] = file.open("a", buffering=1, encoding="utf-8")
            print(line, end=end, file=self._files[rank])

    def tell(self, text: str) -> None:
        """Print or keep a line of the launcher's own."""
        if not self._detached:
            self._writers["stderr"].put("horovodrun: ", f"{text}\n")
            return
        with contextlib.suppress(OSError):  # a full disk
            print(f"horovodrun: {text}", file=sys.stderr, flush=True)

    def is_behind(self) -> bool:
        """Whether ranks must hold back what they print, until half of what waits has been read."""
        most = MOST_WAITING // 2 if self._behind else MOST_WAITING
        writers = self._writers.values()
        self._behind = any(w.waiting > most and not self._abandons(w) for w in writers)
        return self._behind

    def _abandons(self, writer: Writer) -> bool:
        return self.hurries and writer.stalls

    def _wait_for_readers(self) -> None:
        for writer in self._writers.values():
            writer.close()
            while writer.thread.is_alive() and not self._abandons(writer):
                writer.thread.join(timeout=0.1)


def _in_foreground() -> bool | None:
    """Whether the terminal's Ctrl-C comes to us, as it does not behind `&`; None where there is no
    terminal, or none any more."""
    try:
        return os.tcgetpgrp(1) == os.getpgrp()
    except OSError:
        return None


def note_end(folder: Path, how: str, reason: str) -> None:
    """Note the end of a detached run that did not do so itself: killed, or still without Record."""
    with contextlib.suppress(OSError):  # a full disk
        state = json.loads((folder / "run.json").read_text())
        if state["state"] in (*ALIVE, "lost"):
            now = datetime.datetime.now().isoformat(timespec="seconds")
            write(folder, state | {"state": how, "reason": reason, "ended": now})


def write(folder: Path, state: dict[str, Any]) -> None:
    """Write run.json; nobody sees it half written."""
    staged = folder / ".run.json"
    try:
        staged.write_text(json.dumps(state, indent=1))
        staged.replace(folder / "run.json")
    except OSError:  # a full disk
        staged.unlink(missing_ok=True)
        raise

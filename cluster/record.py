"""What is known of a job while it runs and after it: a folder a run, in logs/launches.

    run.json          the job and its state, written by its launcher only
    rank-0.log ...    what each rank printed, of jobs that `make launch` started
    launcher.log      what the launcher said

An attached job prints to the terminal instead, and its folder goes when it ends.
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
from types import TracebackType
from typing import IO, Any

from cluster.hosts import Rank, Refusal

FOLDER = Path("logs/launches")
ALIVE = ("waiting", "starting", "running")
MOST_WAITING = 1 << 20  # bytes for a reader who pauses, beside what is under way by then
PAUSE_SECONDS = 5  # of a reader, after which a job that ends early ends without it


def new_folder() -> Path:
    """A folder named after this second, with a number behind it where another run took it.

    Raises:
        Refusal: when logs, or the folder in it, is something else.
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
                mend = "make that folder" if path.is_symlink() else "move it away"
                raise Refusal(f"{path} is {what}: {mend}") from None
        except OSError as error:
            raise Refusal(f"{error.filename}: {error.strerror}: runs are noted there") from None
    raise AssertionError("unreachable")


def place() -> str:
    """Where process ids mean what they do here: this host, or a container that shares its name and
    has not the first pid namespace, which is the kernel's."""
    name = os.uname().nodename
    try:
        space = os.readlink("/proc/self/ns/pid")
    except OSError:  # a kernel that has one
        return name
    return name if space == "pid:[4026531836]" else f"{name} (container {space[5:-1]})"


def birth(pid: int) -> str | None:
    """When a process began, in clock ticks since boot: with it an id names one process for good.

    None for one that has ended.
    """
    try:
        state, *fields = Path(f"/proc/{pid}/stat").read_text().rpartition(")")[2].split()
    except OSError:
        return None
    return None if state in "ZX" else fields[18]


def begun(
    folder: Path, members: list[Rank], command: list[str], stop_seconds: float, pid: int
) -> dict[str, Any]:
    """The first state of a detached run that the process `pid` launches."""
    return {
        "id": folder.name, "command": shlex.join(command), "folder": os.getcwd(),
        "hosts": {member.host.name: member.host.slots for member in members},
        "ranks": len(members), "detached": True, "stop_seconds": stop_seconds,
        "launcher": place(), "pid": pid, "birth": birth(pid),
        "began": datetime.datetime.now().isoformat(timespec="seconds"), "state": "starting",
    }  # fmt: skip


class Writer:
    """Writes to a descriptor, in order, by a thread: who reads there may pause."""

    def __init__(self, descriptor: int, encoding: str) -> None:
        self._descriptor, self._encoding = descriptor, encoding
        self._queue: queue.SimpleQueue[bytes | None] = queue.SimpleQueue()
        self._lock = threading.Lock()
        self._given = self._written = 0
        self._open = ""  # how the line began that is not ended yet
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
        """A line or, with `part`, a piece that does not end it. Not waited for."""
        with self._lock:
            goes_on = self._open == begin
            before = "" if goes_on else f"\n{begin}" if self._open else begin
            self._open = begin if part else ""
            # A job survives what a terminal cannot show.
            data = f"{before}{text}".encode(self._encoding, "replace")
            self._moved = self._moved if self.waiting else time.monotonic()
            self._given += len(data)
            self._queue.put(data)

    def close(self) -> None:
        """No more comes: the thread ends when all is written."""
        self._queue.put(None)

    def _write(self) -> None:
        while (data := self._queue.get()) is not None:
            while data:
                # Not by sys.stdout, whose lock Python would wait for at its end.
                count = len(data)
                try:
                    count = os.write(self._descriptor, data[: 1 << 16])
                    if (now := _in_foreground()) is not None:  # else it is gone since then
                        self._in_foreground = now  # Ctrl-Z, bg and disown take it out
                except BlockingIOError:  # as another program has left what we both write to
                    select.select([], [self._descriptor], [])
                    continue
                except OSError as error:  # who read it is gone: `| tee`, or the terminal, which
                    # tells only the first process of its session; that may be a make that waits.
                    if error.errno == errno.EIO and self._in_foreground:
                        self._in_foreground = False
                        os.kill(os.getpid(), signal.SIGHUP)
                data = data[count:]
                self._moved = time.monotonic()
                self._written += count


class Record:
    """The run that this process launches.

    Args:
        folder: of a detached run, which `make launch` has made; None: attached to a terminal.
        members: the processes of the job.
        command: what each runs.
        stop_seconds: that it is given for a checkpoint, when it is told to stop.
    """

    def __init__(
        self, folder: Path | None, members: list[Rank], command: list[str], stop_seconds: float
    ) -> None:
        self._detached = folder is not None
        self.hurries = False  # the job ends early: who stalls is not waited for
        self._behind = False
        self.folder = folder or new_folder()
        self.id = self.folder.name
        self._files: dict[int, IO[str]] = {}
        self._state = begun(self.folder, members, command, stop_seconds, os.getpid())
        self._state["detached"] = self._detached
        try:
            write(self.folder, self._state)
        except OSError as error:
            if not self._detached:  # else who launched it tells of it there
                shutil.rmtree(self.folder, ignore_errors=True)
            raise Refusal(f"{self.folder}: runs are noted there: {error.strerror}") from None
        self._writers: dict[str, Writer] = {}
        if not self._detached:
            stdout = Writer(1, sys.stdout.encoding)
            same = os.path.sameopenfile(1, 2)  # then what stands in both keeps its order
            stderr = stdout if same else Writer(2, sys.stderr.encoding)
            self._writers = {"stdout": stdout, "stderr": stderr}

    def __enter__(self) -> Record:
        return self

    def __exit__(
        self, kind: type[BaseException] | None, error: BaseException | None,
        traceback: TracebackType | None,
    ) -> None:  # fmt: skip
        self.hurries |= error is not None
        self._wait_for_readers()
        for file in self._files.values():
            with contextlib.suppress(OSError):  # a full disk
                file.close()
        if not self._detached:
            (self.folder / "run.json").unlink(missing_ok=True)
            with contextlib.suppress(OSError):
                self.folder.rmdir()
        elif error is not None:
            self.update(state="failed", reason=str(error))

    def update(self, **what: Any) -> None:
        """Write the state anew, whole at any moment."""
        self._state |= what
        if self._state["state"] not in ALIVE:
            self._state["ended"] = datetime.datetime.now().isoformat(timespec="seconds")
        with contextlib.suppress(OSError):  # a full disk
            write(self.folder, self._state)

    def line(self, rank: int, stream: str, line: str, part: bool = False) -> None:
        """Something that a rank printed, with its end, if it has one: a line or, with `part`, a
        piece that does not end it. A job goes on where it cannot be written."""
        end = "" if part or line.endswith(("\r", "\n")) else "\n"
        if not self._detached:
            if not self._without(self._writers[stream]):
                self._writers[stream].put(f"[{rank}]<{stream}>:", f"{line}{end}", part)
            return
        with contextlib.suppress(OSError):  # a full disk
            if rank not in self._files:
                # Open for the whole run; one line, one write, so that it can be followed.
                file = self.folder / f"rank-{rank}.log"
                self._files[rank] = file.open("a", buffering=1, encoding="utf-8")
            print(line, end=end, file=self._files[rank])

    def tell(self, text: str) -> None:
        """A line of the launcher's own."""
        if not self._detached:
            self._writers["stderr"].put("horovodrun: ", f"{text}\n")
            return
        with contextlib.suppress(OSError):  # a full disk
            print(f"horovodrun: {text}", file=sys.stderr, flush=True)

    def is_behind(self) -> bool:
        """Whether ranks are to print no more, until half of what waits has been read."""
        most = MOST_WAITING // 2 if self._behind else MOST_WAITING
        writers = self._writers.values()
        self._behind = any(w.waiting > most and not self._without(w) for w in writers)
        return self._behind

    def _without(self, writer: Writer) -> bool:
        return self.hurries and writer.stalls

    def _wait_for_readers(self) -> None:
        for writer in self._writers.values():
            writer.close()
            while writer.thread.is_alive() and not self._without(writer):
                writer.thread.join(timeout=0.1)


def _in_foreground() -> bool | None:
    """Whether this is what the terminal's Ctrl-C is for; not behind `&`. None without a terminal,
    or when it is gone."""
    try:
        return os.tcgetpgrp(1) == os.getpgrp()
    except OSError:
        return None


def end(folder: Path, how: str, reason: str) -> None:
    """Of a detached run that has noted none itself: it had no Record yet, or was killed."""
    with contextlib.suppress(OSError):  # a full disk
        state = json.loads((folder / "run.json").read_text())
        if state["state"] in (*ALIVE, "lost"):
            now = datetime.datetime.now().isoformat(timespec="seconds")
            write(folder, state | {"state": how, "reason": reason, "ended": now})


def write(folder: Path, state: dict[str, Any]) -> None:
    """run.json, never seen half written."""
    staged = folder / ".run.json"
    try:
        staged.write_text(json.dumps(state, indent=1))
        staged.replace(folder / "run.json")
    except OSError:  # a full disk
        staged.unlink(missing_ok=True)
        raise

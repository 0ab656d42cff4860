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
import shlex
import shutil
import signal
import sys
from pathlib import Path
from types import TracebackType
from typing import IO, Any

from cluster.hosts import Rank, Refusal

FOLDER = Path("logs/launches")
ALIVE = ("waiting", "starting", "running")


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


def birth(pid: int) -> str | None:
    """When a process began, in clock ticks since boot: with it an id names one process for good.

    None for one that has ended.
    """
    try:
        state, *fields = Path(f"/proc/{pid}/stat").read_text().rpartition(")")[2].split()
    except OSError:
        return None
    return None if state in "ZX" else fields[18]


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
        for stream in (sys.stdout, sys.stderr):  # a job survives what a terminal cannot show
            stream.reconfigure(errors="replace")  # type: ignore[union-attr]
        self._detached = folder is not None
        self._in_foreground = _in_foreground()
        self.folder = folder or new_folder()
        self.id = self.folder.name
        self._files: dict[int, IO[str]] = {}
        self._state: dict[str, Any] = {
            "id": self.id,
            "command": shlex.join(command),
            "folder": os.getcwd(),
            "hosts": {host.name: host.slots for host in (m.host for m in members)},
            "ranks": len(members),
            "detached": self._detached,
            "stop_seconds": stop_seconds,
            "launcher": os.uname().nodename,
            "pid": os.getpid(),
            "birth": birth(os.getpid()),
            "began": datetime.datetime.now().isoformat(timespec="seconds"),
        }
        self._state["state"] = "starting"
        try:
            write(self.folder, self._state)
        except OSError as error:
            if not self._detached:  # else who launched it tells of it there
                shutil.rmtree(self.folder, ignore_errors=True)
            raise Refusal(f"{self.folder}: runs are noted there: {error.strerror}") from None

    def __enter__(self) -> Record:
        return self

    def __exit__(
        self, kind: type[BaseException] | None, error: BaseException | None,
        traceback: TracebackType | None,
    ) -> None:  # fmt: skip
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

    def line(self, rank: int, stream: str, line: str) -> None:
        """Something that a rank printed, with its end, if it has one; a job goes on where it
        cannot be written."""
        end = "" if line.endswith(("\r", "\n")) else "\n"
        if not self._detached:
            out = sys.stdout if stream == "stdout" else sys.stderr
            try:
                print(f"[{rank}]<{stream}>:{line}", end=end, file=out, flush=True)
                self._in_foreground = _in_foreground()  # Ctrl-Z, bg and disown take it out
            except OSError as error:  # who read it is gone: `| tee`, or the terminal, which tells
                # only the first process of its session; that may be a make that waits for us.
                if error.errno == errno.EIO and self._in_foreground:
                    self._in_foreground = False
                    os.kill(os.getpid(), signal.SIGHUP)
            return
        with contextlib.suppress(OSError):  # a full disk
            if rank not in self._files:
                # Open for the whole run; one line, one write, so that it can be followed.
                file = self.folder / f"rank-{rank}.log"
                self._files[rank] = file.open("a", buffering=1, encoding="utf-8")
            print(line, end=end, file=self._files[rank])


def _in_foreground() -> bool:
    """Whether this is what the terminal's Ctrl-C is for; not behind `&`, or without a terminal."""
    try:
        return os.tcgetpgrp(1) == os.getpgrp()
    except OSError:
        return False


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

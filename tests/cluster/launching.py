"""Jobs of tests: what starts them, what their ranks say, and that none is left."""

from __future__ import annotations

import contextlib
import json
import os
import signal
import subprocess
import time
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import pytest

from tests.cluster.conftest import PYTHON
from tests.conftest import ROOT, wait_for_words

# With our id: two suites on one machine must not take each other's ranks for their own.
SLEEP = f"import time; print('ready', flush=True); time.sleep(600)  # of {os.getpid()}"


STUBBORN = "import signal; [signal.signal(n, signal.SIG_IGN) for n in (10, 15)]; " + SLEEP


@pytest.fixture(autouse=True)
def nothing_left() -> Iterator[None]:
    yield
    deadline = time.monotonic() + 30
    while found := sleepers():
        if time.monotonic() > deadline:
            for pid in found:  # else each test behind this one would be blamed for them
                with contextlib.suppress(ProcessLookupError):
                    os.kill(int(pid), signal.SIGKILL)
            pytest.fail(f"left behind: {found}")
        time.sleep(0.1)


def sleepers() -> list[str]:
    """The ranks that run SLEEP, on all hosts: they are processes of this machine."""
    found = []
    for entry in Path("/proc").glob("[0-9]*/cmdline"):
        line = command_line(entry)
        if line[1:2] == ["-c"] and line[2] in (SLEEP, STUBBORN):
            found.append(entry.parent.name)
    return found


def command_line(entry: Path) -> list[str]:
    """Of a command line; none of a process that has ended."""
    try:
        return entry.read_bytes().decode(errors="replace").split("\0")[:-1]
    except OSError:
        return []


def horovodrun(*arguments: str) -> list[str]:
    return [PYTHON, "-m", "cluster.horovodrun", *arguments]


def script(folder: Path, code: str) -> list[str]:
    """The command that runs it on each rank; imports above its line `# preload:` are shared."""
    file = folder / "job.py"
    file.write_text(code)
    return [PYTHON, str(file)]


def told(output: str) -> list[dict[str, Any]]:
    """The line of JSON that each rank prints, by rank."""
    lines = [line.partition(">:")[2] for line in output.splitlines() if ">:{" in line]
    return sorted((json.loads(line) for line in lines), key=lambda rank: rank["rank"])


def started(command: list[str], log: Path, ranks: int, **environment: str) -> subprocess.Popen:
    """The launcher, once all ranks of SLEEP run."""
    with open(log, "w") as file:
        process = subprocess.Popen(
            command, cwd=ROOT, stdout=file, stderr=file, start_new_session=True,
            env={**os.environ, **environment},
        )  # fmt: skip
    wait_for_words(process, log, "ready", 60, ranks)
    return process

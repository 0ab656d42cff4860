"""The files of results: written whole, continued after an interrupt, one measurement at a time; and
the tables in them."""

from __future__ import annotations

import contextlib
import fcntl
import json
import os
import re
import sys
import tempfile
from collections import Counter
from collections.abc import Iterator
from pathlib import Path
from typing import Any

from cluster.environment import ROOT
from cluster.hosts import Refusal

RESULTS = ROOT / "benchmarks" / "results"
_LOCKED: dict[Path, int] = {}  # folder: its lock, held as long as this process lives


def write_json(results: dict[str, Any], file: Path) -> None:
    write_text(file, json.dumps(results, indent=1) + "\n")


def write_text(file: Path, text: str) -> None:
    with whole(file) as unfinished:
        unfinished.write_text(text)


@contextlib.contextmanager
def whole(file: Path) -> Iterator[Path]:
    """Where to write a file, all or nothing: who reads it meanwhile sees the old or the new.

    Raises:
        SystemExit: when it cannot be written, as on a full disk.
    """
    unfinished = file.with_name(f".{file.name}")  # the suffix stays: it tells a plot its format
    try:
        file.parent.mkdir(parents=True, exist_ok=True)
        yield unfinished
        unfinished.replace(file)
    except OSError as error:
        raise SystemExit(
            f"error: {file}: {error.strerror}; what was written of it before is kept"
        ) from None
    finally:
        with contextlib.suppress(OSError):
            unfinished.unlink()


def markdown(head: list[str], lines: list[list[str]]) -> str:
    """A table in Markdown; columns without any entry are left out."""
    kept = [index for index in range(len(head)) if any(line[index] for line in lines)]
    shown = [[line[index] for index in kept] for line in [head, ["---"] * len(head), *lines]]
    return "\n".join(f"| {' | '.join(line)} |" for line in shown)


def continued(
    results: dict[str, Any], folder: Path, name: str, *measured: str
) -> tuple[Path, dict[str, Any]]:
    """The file of the same measurement if one was interrupted, and what is in it; else a new file
    name, and `results`. Locks the folder, as `measure_alone` does.

    Args:
        results: all that is known before the first measurement.
        folder, name: of the file; the date is appended to the name.
        measured: keys that do not tell measurements apart, as they hold what is measured; all
            others, except the time and the other load, must be equal.
    """
    measure_alone(folder)
    results = {**json.loads(json.dumps(results)), "finished": False}
    ignored = {*measured, "date", "busy_before"}
    for file in sorted(folder.glob(f"{name}_*.json")):
        try:
            previous = json.loads(file.read_text())
        except ValueError:
            continue  # half copied
        if not isinstance(previous, dict):
            continue  # of something else
        if all(previous.get(key) == results[key] for key in results.keys() - ignored):
            print(f"going on with {file}, of {previous['date']}", file=sys.stderr)
            return file, previous
    return unused(folder / f"{name}_{results['date'][:10]}.json"), results


def measure_alone(folder: Path) -> None:
    """Makes the folder and tries to write to it, before hours are measured for nothing. Until this
    process ends, no other one can measure for it: both would disturb each other."""
    try:
        folder.mkdir(parents=True, exist_ok=True)
        tempfile.TemporaryFile(dir=folder).close()
        try:  # a file open for writing: NFS locks neither folders nor files open for reading
            lock = os.open(folder / ".lock", os.O_WRONLY | os.O_CREAT, 0o666)
        except PermissionError:  # another user's, such as root's; enough on a local disk
            lock = os.open(folder / ".lock", os.O_RDONLY)
    except OSError as error:
        told = f"{folder}: {error.strerror}: results are written there, fix that"
        raise Refusal(told) from None
    if folder in _LOCKED:
        os.close(lock)
        return
    _LOCKED[folder] = lock
    try:
        fcntl.flock(lock, fcntl.LOCK_EX | fcntl.LOCK_NB)
    except BlockingIOError:
        raise Refusal(
            f"another measurement writes to {folder} now: wait for its end, as both would disturb "
            "each other"
        ) from None
    except OSError:  # a file system without locks
        pass


def whole_repeats(runs: list[dict[str, Any]], jobs: int) -> list[dict[str, Any]]:
    """The runs of repeats that have a run of each of so many `jobs`. The runs of a repeat are
    compared as neighbours in time; of one that was interrupted and completed later they are not."""
    counts = Counter(run["repeat"] for run in runs)
    return [run for run in runs if counts[run["repeat"]] == jobs]


def unused(file: Path) -> Path:
    """The first of this name, and this name with _2, _3, ..., that does not exist yet."""
    candidate, number = file, 1
    while candidate.exists():
        number += 1
        candidate = file.with_stem(f"{file.stem}_{number}")
    return candidate


def slug(text: str) -> str:
    """Letters, digits and dashes of a text, for a part of a file's name."""
    return re.sub(r"\W+", "-", text).strip("-").lower()

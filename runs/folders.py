"""Where runs and sweeps go, how their files are written, and how their paths are shown."""

from __future__ import annotations

import contextlib
import datetime
import itertools
import os
import re
from collections.abc import Iterator
from pathlib import Path
from typing import IO

from runs.refusal import Refusal

ROOT = Path(__file__).resolve().parent.parent


def task_folder(log_dir: Path, task: str | None, model: str) -> Path:
    """That of a task, which bears the model's name if it has none, for its runs and sweeps. It lies
    directly in `log_dir` for a model=mine/small too."""
    return log_dir / str(task or model).replace("/", "_")


def new_folder(parent: Path) -> Path:
    """Make a folder named after this second, with a number behind it if another run took it."""
    parent.mkdir(parents=True, exist_ok=True)  # FileExistsError: a link to what is not there
    now = datetime.datetime.now().strftime("%Y-%m-%d_%H-%M-%S")
    for number in itertools.count():
        folder = parent / (f"{now}_{number}" if number else now)
        with contextlib.suppress(FileExistsError):
            folder.mkdir()
            return folder
    raise AssertionError("unreachable")


@contextlib.contextmanager
def whole(file: Path) -> Iterator[IO[bytes]]:
    """Write a file, in a folder that is made if needed, so that it is never seen half written.

    Whenever this is interrupted, the whole new file is there or the one before it. It is on the
    disk before it has its name, as a host may go down just after.

    Raises:
        Refusal: when it cannot be written.
    """
    unfinished = file.with_name(f"{file.name}.part")
    try:
        file.parent.mkdir(parents=True, exist_ok=True)
        with unfinished.open("wb") as part:
            yield part
            part.flush()
            os.fsync(part.fileno())
        unfinished.replace(file)
    except (OSError, RuntimeError) as error:
        # After an error of writing torch closes its archive, and raises one of its own.
        reason = error if isinstance(error, OSError) else error.__context__
        if not isinstance(reason, OSError):
            raise
        raise Refusal(
            f"{file}: cannot be written: {reason.strerror}; what was there before is whole"
        ) from error
    finally:
        with contextlib.suppress(OSError):
            unfinished.unlink()


def quoted(path: Path) -> str:
    """As Hydra reads a path on a command line, behind `=`."""
    if re.fullmatch(r"[\w./@+-]+", str(path), re.ASCII):
        return str(path)
    return "'" + str(path).replace("'", r"\'") + "'"


def shown(path: Path) -> str:
    """A path as messages show it: relative to the repository if it is in there."""
    return str(path.relative_to(ROOT)) if path.is_relative_to(ROOT) else str(path)

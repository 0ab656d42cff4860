"""Downloads the files of a data set if they are missing; several hosts may share the folder."""

from __future__ import annotations

import os
import shutil
import socket
from collections.abc import Callable
from pathlib import Path


def download(name: str, root: Path, folder: Path, files: list[str], fetch: Callable) -> None:
    """Have all `files` in a folder. Call it on one rank of each host, while the others wait.

    Files are downloaded beside the folder and moved into it when complete, over those that another
    host or an interrupted copy has left there.

    Args:
        name: of the data set, for the error.
        root: the data folder that `folder` is in.
        folder: of the files.
        files: their names.
        fetch: a data set of torchvision, or what is called as one: fetch(root, download=True)
            downloads into a root.

    Raises:
        FileNotFoundError: when files are missing and cannot be downloaded.
    """

    def complete() -> bool:
        return all((folder / file).is_file() for file in files)

    if complete():
        return
    unfinished = root / f"{folder.name}.{socket.gethostname()}.{os.getpid()}"
    try:
        fetch(str(unfinished), download=True)
        folder.mkdir(parents=True, exist_ok=True)
        for file in (unfinished / folder.relative_to(root)).iterdir():
            file.replace(folder / file.name)
    except (OSError, RuntimeError) as error:
        if not complete():
            reason = str(error).strip().rpartition("\n")[2]
            raise FileNotFoundError(
                f"{name} is not in {folder} and cannot be downloaded ({reason}); put there: "
                f"{', '.join(files)}"
            ) from error
    finally:
        shutil.rmtree(unfinished, ignore_errors=True)

"""Files that are downloaded where they are missing, once for all who share the folder."""

from __future__ import annotations

import os
import shutil
import socket
from collections.abc import Callable
from pathlib import Path


def download(name: str, root: Path, folder: Path, files: list[str], fetch: Callable) -> None:
    """Have all `files` in a folder; to be called on one rank a host, while the others wait.

    Hosts may share the folder. A file is put there when it is complete, over one that another host
    has put there, or over what an interrupted copy has left.

    Args:
        name: of the data set, for the error.
        root: what `folder` lies in.
        folder: of the files.
        fetch: fetch(root, download=True) downloads into another root, as torchvision's do.

    Raises:
        FileNotFoundError: when they are missing and cannot be downloaded.
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

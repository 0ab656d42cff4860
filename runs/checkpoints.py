"""How checkpoints are written, which ones ckpt_path=last and best name, whether one can be read.

A run writes last.ckpt after each epoch, stopped.ckpt when it was asked to end, and the best by
callbacks.best_checkpoint, whose path is in summary.json.
"""

from __future__ import annotations

import json
import re
import zipfile
from collections.abc import Mapping
from pathlib import Path
from typing import Any

import torch
from lightning_fabric.plugins.io.torch_io import TorchCheckpointIO

from runs.folders import whole

OBJECT = r"Unsupported global: GLOBAL (\S+)"  # torch says so of what could run code
HELD = (
    "it holds a {}, which torch does not load: keep it out of the hyperparameters "
    "(save_hyperparameters(ignore=[...])), of on_save_checkpoint and of the state_dict of "
    "callbacks; or if you trust the file, call torch.serialization.add_safe_globals([...]) in "
    "template.py"
)
RESUMABLE = ("last.ckpt", "stopped.ckpt")  # of callbacks/default.yaml


class WholeFiles(TorchCheckpointIO):
    """Writes a checkpoint so that its file is whole, or the one before it still there.

    Lightning copies it from /tmp: a full disk, or an end meanwhile, leaves a part of a file where
    the last good one was.
    """

    def save_checkpoint(
        self, checkpoint: dict[str, Any], path: Any, storage_options: Any = None
    ) -> None:
        """Raises Refusal when it cannot be written."""
        if "://" in str(path):  # storage without folders
            return super().save_checkpoint(checkpoint, path, storage_options)
        with whole(Path(path)) as part:
            torch.save(checkpoint, part)


def last(runs: Path, run: str = "*") -> Path | None:
    """The checkpoint to go on from that was written last, by any of a task's runs, or by one.

    It is the best if last.ckpt could not be written after that, as on a full disk.
    """
    files = sorted(_files(runs, "checkpoints/**/*.ckpt", run), key=_written, reverse=True)
    going_on = (f for f in files if f.name in RESUMABLE or unreadable(f, train=True) is None)
    return next(going_on, None)


def best(runs: Path) -> Path | None:
    """The best checkpoint of a task's newest finished training that has one.

    Raises:
        ValueError: when a newer summary.json cannot be read.
    """
    for file in sorted(_files(runs, "summary.json"), key=_written, reverse=True):
        try:
            summary = json.loads(file.read_text())
            kept = summary["train"] and summary["checkpoint"]
        except (ValueError, TypeError, KeyError):
            raise ValueError(f"{file} is not a summary of a run: fix it or delete it") from None
        if kept:
            return moved(Path(kept), file.parent / "checkpoints") or Path(kept)
    return None


def moved(recorded: Path, folder: Path) -> Path | None:
    """Where a checkpoint is if what was recorded lies in this folder now. It may lie below it: a
    metric's name has a slash, so `{epoch}-{val/loss:.2f}` names a file in a folder."""
    ends = (recorded.parts[-names:] for names in range(1, len(recorded.parts) + 1))
    return next((file for end in ends if (file := folder.joinpath(*end)).is_file()), None)


NAMED = {
    "last": (last, "a checkpoint to go on from"),
    "best": (best, "been trained to its end with a best checkpoint"),
}


def _files(runs: Path, name: str, run: str = "*") -> list[Path]:
    """The files of this name in all runs, except those with debug= and those of `make profile`."""
    files = []
    for file in runs.glob(f"{run}/{name}"):
        overrides = runs / file.relative_to(runs).parts[0] / ".hydra" / "overrides.yaml"
        text = overrides.read_text() if overrides.is_file() else ""
        if "- debug=" not in text and "- profiler=trace" not in text:
            files.append(file)
    return files


def _written(file: Path) -> int:
    return file.stat().st_mtime_ns


def unreadable(file: Path, train: bool) -> str | None:
    """Why a checkpoint cannot be trained on from (`train`) or evaluated; None if it can."""
    if not file.is_file():
        return f"ckpt_path={file}: there is no such file; see logs/*/runs/*/checkpoints/"
    try:
        file.open("rb").close()
    except OSError as error:
        return f"ckpt_path={file}: {error.strerror}"
    try:
        if not zipfile.is_zipfile(file):
            raise ValueError("torch.save has not written it")
        with zipfile.ZipFile(file) as archive:  # torch itself does not look at the checksums
            if torch.serialization.get_crc32_options() and (part := archive.testzip()):
                return f"ckpt_path={file}: it is damaged, in its part {part}: take another one"
        # Only the structure is read here, not the weights.
        checkpoint = torch.load(file, map_location="meta", mmap=True, weights_only=True)
    except Exception as error:  # of a damaged file it may be any
        if held := re.search(OBJECT, str(error)):
            return f"ckpt_path={file}: {HELD.format(held[1])}"
        reason = (str(error).splitlines() or [type(error).__name__])[0][:120]
        return f"ckpt_path={file}: it cannot be read as a checkpoint: {reason}"
    if not isinstance(checkpoint, Mapping) or "state_dict" not in checkpoint:
        return f"ckpt_path={file}: it is not a checkpoint of Lightning: it has no state_dict"
    if train and "optimizer_states" not in checkpoint:
        return (
            f"ckpt_path={file}: it has weights alone (save_weights_only), and training goes on "
            "with the optimizer's state too; train=false evaluates it"
        )
    return None

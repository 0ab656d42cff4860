"""Checkpoints: how they are written; which of earlier runs ckpt_path=last and best name, and
whether one can be read.

A run leaves last.ckpt after each epoch, stopped.ckpt when it was ended, the best by
callbacks.best_checkpoint, and the path of that one in summary.json.
"""

from __future__ import annotations

import json
import pickle
import re
import zipfile
from collections.abc import Mapping
from pathlib import Path
from typing import Any

import torch
from lightning_fabric.plugins.io.torch_io import TorchCheckpointIO

from runs.folders import whole

UNREADABLE = (OSError, RuntimeError, EOFError, pickle.UnpicklingError, zipfile.BadZipFile)
RESUMABLE = ["last.ckpt", "stopped.ckpt"]  # of callbacks/default.yaml


class WholeFiles(TorchCheckpointIO):
    """A file is whole, or what was there before.

    Lightning copies from /tmp: a full disk, or an end meanwhile, leaves a part of a file where
    the last good one was.
    """

    def save_checkpoint(
        self, checkpoint: dict[str, Any], path: Any, storage_options: Any = None
    ) -> None:
        """Raises Refusal where it cannot be written."""
        if "://" in str(path):  # no folder
            return super().save_checkpoint(checkpoint, path, storage_options)
        file = Path(path)
        with whole(file) as part:
            torch.save(checkpoint, part)


def last(runs: Path) -> Path | None:
    """Of those to go on from in the folders of a task's runs, the one written last."""
    files = [file for name in RESUMABLE for file in _files(runs, f"checkpoints/{name}")]
    return max(files, key=_written, default=None)


def best(runs: Path) -> Path | None:
    """The best of the newest finished training of a task that has kept one.

    ValueError: a newer summary.json cannot be read.
    """
    for file in sorted(_files(runs, "summary.json"), key=_written, reverse=True):
        try:
            summary = json.loads(file.read_text())
            kept = summary["train"] and summary["checkpoint"]
        except (ValueError, TypeError, KeyError):
            raise ValueError(f"{file} is no summary of a run: mend it or delete it") from None
        if kept:
            recorded = Path(kept)
            here = file.parent / "checkpoints" / recorded.name  # also where the folder was moved to
            return here if here.is_file() else recorded
    return None


NAMED = {
    "last": (last, "a checkpoint to go on from"),
    "best": (best, "been trained to its end with a best checkpoint"),
}


def _files(runs: Path, name: str) -> list[Path]:
    """Those of all runs but the ones with debug= and of `make profile`."""
    files = []
    for file in runs.glob(f"*/{name}"):
        overrides = runs / file.relative_to(runs).parts[0] / ".hydra" / "overrides.yaml"
        text = overrides.read_text() if overrides.is_file() else ""
        if "- debug=" not in text and "- profiler=trace" not in text:
            files.append(file)
    return files


def _written(file: Path) -> int:
    return file.stat().st_mtime_ns


def unreadable(file: Path, train: bool) -> str | None:
    """Why a checkpoint cannot be taken, to train on from it or to evaluate it; None if it can."""
    if not file.is_file():
        return f"ckpt_path={file}: there is no such file; see logs/*/runs/*/checkpoints/"
    try:
        # Only the structure is read, not the weights.
        checkpoint = torch.load(file, map_location="meta", mmap=True, weights_only=True)
    except UNREADABLE as error:
        if held := re.search(r"Unsupported global: GLOBAL (\S+)", str(error)):
            return (
                f"ckpt_path={file}: it holds a {held[1]}, which is not loaded from a file; keep it "
                "out: save_hyperparameters(ignore=[...])"
            )
        reason = str(error).splitlines()[0][:120]
        return f"ckpt_path={file}: it cannot be read as a checkpoint: {reason}"
    if not isinstance(checkpoint, Mapping) or "state_dict" not in checkpoint:
        return f"ckpt_path={file}: it is no checkpoint of Lightning: no state_dict in it"
    if train and "optimizer_states" not in checkpoint:
        return (
            f"ckpt_path={file}: it has weights alone (save_weights_only), and training goes on "
            "with the optimizer's state too; train=false evaluates it"
        )
    return None

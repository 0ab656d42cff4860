"""The progress of a training: a line for each epoch, and how far it has come inside one.

On a terminal the latter is a line that changes in place. Under horovodrun, in a file and in a batch
job's output each change would be a line of its own: there it is printed every ten seconds.
"""

from __future__ import annotations

import math
import os
import shutil
import sys
import time
from collections.abc import Mapping
from typing import Any

import pytorch_lightning as pl
from pytorch_lightning.callbacks import Checkpoint, ProgressBar
from torch import Tensor

from runs.refusal import RANK_VARIABLES


class Progress(ProgressBar):
    """The lines, printed by rank 0: epoch, steps or seconds, and the metrics so far."""

    def __init__(self) -> None:
        super().__init__()
        # mpirun gives its ranks a terminal, and puts its prefix before each line of it.
        launched = any(name in os.environ for name in RANK_VARIABLES)
        self._moving = sys.stdout.isatty() and not launched
        self.is_enabled = True
        self._epoch_began = self._epoch_took = self._last_line = 0.0
        self._validated = False  # in this epoch

    def enable(self) -> None:  # called by Lightning after a search of the learning rate, on all
        self.is_enabled = self._trainer is None or self._trainer.is_global_zero

    def disable(self) -> None:  # called by Lightning's setup, on all ranks but 0
        self.is_enabled = False

    def setup(self, trainer: pl.Trainer, pl_module: pl.LightningModule, stage: str) -> None:
        super().setup(trainer, pl_module, stage)
        if not any(isinstance(callback, EpochEnd) for callback in trainer.callbacks):  # type: ignore[attr-defined]
            trainer.callbacks = [*trainer.callbacks, EpochEnd(self)]  # type: ignore[attr-defined]

    def on_train_start(self, trainer: pl.Trainer, *arguments: Any) -> None:
        super().on_train_start(trainer, *arguments)
        # on_train_epoch_start is left out when a run resumes within an epoch.
        self._epoch_began = self._last_line = time.monotonic()

    def on_train_epoch_start(self, trainer: pl.Trainer, *arguments: Any) -> None:
        super().on_train_epoch_start(trainer, *arguments)
        self._epoch_began = self._last_line = time.monotonic()
        self._validated = False

    def on_validation_end(self, trainer: pl.Trainer, module: pl.LightningModule) -> None:
        self._validated = not trainer.sanity_checking

    def on_train_batch_end(
        self, trainer: pl.Trainer, module: pl.LightningModule, outputs: Any, batch: Any, index: int
    ) -> None:
        if time.monotonic() - self._last_line > (0.2 if self._moving else 10):
            line = self._line(trainer, f"step {index + 1}{_last_batch(trainer, index + 1)}")
            self._print(line, end="" if self._moving else "\n")

    def on_train_epoch_end(self, trainer: pl.Trainer, module: pl.LightningModule) -> None:
        self._epoch_took = time.monotonic() - self._epoch_began

    def on_exception(self, *_: Any) -> None:
        self.print(end="")  # what comes of it begins a line

    def print_epoch(self, trainer: pl.Trainer) -> None:
        self._print(self._line(trainer, f"{self._epoch_took:.1f} s"))

    def _line(self, trainer: pl.Trainer, where: str) -> str:
        # All ranks come here, not rank 0 alone: reading a metric may reduce it over them.
        last = "" if trainer.max_epochs in (None, -1) else f"/{trainer.max_epochs}"
        named = plain(trainer.callback_metrics)
        metrics = "  ".join(
            f"{name} {value:.4g}"
            for name, value in named.items()
            if (self._validated or not name.startswith("val/"))  # of an earlier epoch
            # A metric that is logged on_step and on_epoch is there three times.
            and not (name.endswith(("_step", "_epoch")) and name.rpartition("_")[0] in named)
        )
        return f"epoch {trainer.current_epoch + 1}{last}  {where}  {metrics}"

    def print(self, *arguments: Any, **options: Any) -> None:
        """For `self.print` of modules: clears the moving line first."""
        if self._moving:
            print("\r\x1b[K", end="")
        print(*arguments, **options)

    def _print(self, line: str, end: str = "\n") -> None:
        self._last_line = time.monotonic()
        if self._moving and not end:  # one that the terminal wraps would stay there
            line = line[: shutil.get_terminal_size().columns - 1]
        if self.is_enabled:
            # Back to the start of the line, and clear what a longer one left behind it.
            print(f"\r{line}\x1b[K" if self._moving else line, end=end, flush=True)


def _last_batch(trainer: pl.Trainer, done: int) -> str:
    """Of the epoch, as "/8"; "" where that is unknown. (Lightning's total_train_batches counts down
    towards max_steps.)

    Args:
        done: batches of the epoch so far.
    """
    last = trainer.num_training_batches
    if trainer.max_steps > 0:  # which counts the steps of all optimizers, each of one a batch
        windows = trainer.accumulate_grad_batches
        left = (trainer.max_steps - trainer.global_step) // max(1, len(trainer.optimizers))
        last = min(last, max(done, done + left * windows - done % windows))
    return f"/{last}" if math.isfinite(last) else ""


def plain(metrics: Mapping[str, Tensor]) -> dict[str, float]:
    """Those that are one number, not one for each class."""
    return {name: float(value) for name, value in metrics.items() if value.numel() == 1}


class EpochEnd(Checkpoint):
    """Prints an epoch's line after the module has logged at its end: Checkpoints come last."""

    def __init__(self, progress: Progress) -> None:
        self.progress = progress

    def on_train_epoch_end(self, trainer: pl.Trainer, pl_module: pl.LightningModule) -> None:
        self.progress.print_epoch(trainer)

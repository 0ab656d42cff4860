"""Progress that can be read: a bar on a terminal, else a line every ten seconds and an epoch.

Under horovodrun, in a file and in a batch job's output a bar would leave a thousand lines.
"""

from __future__ import annotations

import sys
import time
from typing import Any

import pytorch_lightning as pl
from pytorch_lightning.callbacks import ProgressBar, TQDMProgressBar

SECONDS_BETWEEN_LINES = 10


def progress_bar() -> ProgressBar:
    """Lightning's bar when someone looks at a terminal, else lines."""
    return TQDMProgressBar() if sys.stdout.isatty() else ProgressLines()


class ProgressLines(ProgressBar):
    """One line an epoch with its metrics, and one every ten seconds inside it. Rank 0 only."""

    def __init__(self) -> None:
        super().__init__()
        self._enabled = True
        self._epoch_began = self._last_line = 0.0

    def enable(self) -> None:
        self._enabled = True

    def disable(self) -> None:
        self._enabled = False

    def setup(self, trainer: pl.Trainer, pl_module: pl.LightningModule, stage: str) -> None:
        super().setup(trainer, pl_module, stage)
        if not trainer.is_global_zero:
            self.disable()

    def on_train_epoch_start(self, trainer: pl.Trainer, *_: Any) -> None:
        super().on_train_epoch_start(trainer, *_)
        self._epoch_began = self._last_line = time.monotonic()

    def on_train_batch_end(
        self, trainer: pl.Trainer, module: pl.LightningModule, outputs: Any, batch: Any, index: int
    ) -> None:
        if time.monotonic() - self._last_line > SECONDS_BETWEEN_LINES:
            self._line(trainer, f"step {index + 1}/{self.total_train_batches}")

    def on_train_epoch_end(self, trainer: pl.Trainer, module: pl.LightningModule) -> None:
        self._line(trainer, f"{time.monotonic() - self._epoch_began:.1f} s")

    def _line(self, trainer: pl.Trainer, what: str) -> None:
        self._last_line = time.monotonic()
        if self._enabled:
            last = "" if trainer.max_epochs in (None, -1) else f"/{trainer.max_epochs}"
            metrics = "  ".join(
                f"{name} {float(value):.4g}" for name, value in trainer.callback_metrics.items()
            )
            print(f"epoch {trainer.current_epoch + 1}{last}  {what}  {metrics}", flush=True)

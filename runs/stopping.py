"""Stop when asked to (SIGUSR1), with a checkpoint to go on from: make stop, Ctrl-C, a time limit.

The signal reaches ranks at different moments, and a checkpoint in the middle of an epoch needs all
of them at the same batch. So once a second they ask each other; how many batches that is, they
agree on too. During an evaluation nobody asks: it ends first.
"""

from __future__ import annotations

import signal
import time
from pathlib import Path
from typing import Any

import pytorch_lightning as pl
import torch
from pytorch_lightning.callbacks import Callback

SIGNAL = signal.SIGUSR1
SECONDS = 1.0  # between questions


class Stopped(Exception):
    """Raised on all ranks when the checkpoint is written."""


class StopOnSignal(Callback):
    """Write a checkpoint and end, on all ranks, when one of them got the signal.

    Args:
        checkpoint: where to.
    """

    def __init__(self, checkpoint: str) -> None:
        self.checkpoint = Path(checkpoint)
        self.asked = False
        self._batches = 1  # from one question to the next
        self._left = 1
        self._since = 0.0
        self._before: Any = None

    def on_fit_start(self, trainer: pl.Trainer, pl_module: pl.LightningModule) -> None:
        self._before = signal.signal(SIGNAL, self._ask)
        self._batches = self._left = 1
        self._since = time.monotonic()

    def _ask(self, *_: Any) -> None:
        self.asked = True

    def on_train_batch_end(self, trainer: pl.Trainer, *_: Any) -> None:
        self._left -= 1
        if self._left:
            return
        now = time.monotonic()
        pace = (now - self._since) / self._batches
        mine = torch.tensor([float(self.asked), pace], device=trainer.strategy.root_device)
        asked, seconds = trainer.strategy.reduce(mine, reduce_op="max").tolist()
        self._since = now
        self._batches = self._left = max(1, int(SECONDS / max(seconds, 1e-6)))
        if asked:
            trainer.save_checkpoint(self.checkpoint)
            raise Stopped(str(self.checkpoint))

    def teardown(self, trainer: pl.Trainer, pl_module: pl.LightningModule, stage: str) -> None:
        if self._before is not None:
            signal.signal(SIGNAL, self._before)
            self._before = None

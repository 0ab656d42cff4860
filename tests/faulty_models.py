"""Classifiers that warn on every rank or on one, cannot be tested, break on rank 1, or see NaN."""

import warnings
from typing import Any

from pytorch_lightning import LightningModule
from torch import Tensor

from models.classifier import Classifier


class Warns(Classifier):
    def on_fit_start(self) -> None:
        warnings.warn("everybody says this", stacklevel=1)
        if self.global_rank == 1:
            warnings.warn("only rank 1 says this", stacklevel=1)


class HasNoTest(Classifier):
    test_step = LightningModule.test_step


class Breaks(Classifier):
    def training_step(self, batch: Any, batch_idx: int) -> Tensor:
        if self.global_rank == 1 and batch_idx == 3:
            raise RuntimeError("broken in training")
        return super().training_step(batch, batch_idx)


class Vanishes(Classifier):
    def training_step(self, batch: Any, batch_idx: int) -> Tensor:
        # The logarithm of 0 times 0: finite on the way to the loss, NaN on the way back.
        gone = 0 * self(batch[0]).sum()
        return super().training_step(batch, batch_idx) + 0 * (gone.log() * 0).nan_to_num()

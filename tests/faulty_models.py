"""Classifiers that warn, on every rank and on rank 1 alone, or break on rank 1 in training."""

import warnings
from typing import Any

from torch import Tensor

from models.classifier import Classifier


class Warns(Classifier):
    def on_fit_start(self) -> None:
        warnings.warn("everybody says this", stacklevel=1)
        if self.global_rank == 1:
            warnings.warn("only rank 1 says this", stacklevel=1)


class Breaks(Classifier):
    def training_step(self, batch: Any, batch_idx: int) -> Tensor:
        if self.global_rank == 1 and batch_idx == 3:
            raise RuntimeError("broken in training")
        return super().training_step(batch, batch_idx)

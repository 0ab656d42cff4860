"""Evaluation on several ranks, which may have different buffers and unequal numbers of batches."""

from __future__ import annotations

import math
from collections.abc import Mapping, Sequence
from typing import Any
from weakref import WeakKeyDictionary

import pytorch_lightning as pl
import torch
from lightning_fabric.utilities.data import sized_len
from pytorch_lightning.callbacks import Callback
from pytorch_lightning.trainer.states import TrainerFn
from pytorch_lightning.utilities.combined_loader import CombinedLoader
from torch import nn
from torch.utils.data import DataLoader

from .buffers import shared_buffers
from .collectives import World


class Evaluation(Callback):
    """What ranks share before they validate, test or predict, and check before each step.

    As a callback it comes after all others, which may have put averaged weights in.
    """

    def __init__(self, world: World) -> None:
        self.world = world
        self._fewest: WeakKeyDictionary[DataLoader, int] = WeakKeyDictionary()
        self._share_again = False  # buffers, in the next step

    def count_batches(self, dataloader: DataLoader) -> None:
        """Find the fewest batches that any rank has of this loader, if it has a length."""
        length = sized_len(dataloader)
        if length is not None and self.world.size > 1:
            self._fewest[dataloader] = int(self.world.reduce(torch.tensor(length), "min"))

    def on_validation_epoch_start(self, trainer: pl.Trainer, pl_module: pl.LightningModule) -> None:
        """Within training: all ranks get the buffers of rank 0."""
        if trainer.state.fn != TrainerFn.FITTING:
            return
        self._share_buffers(pl_module)
        combined = trainer._evaluation_loop._combined_loader
        assert combined is not None
        batches = batches_of_all(combined, 0, self._fewest)
        # Again in the first step, if all ranks have it: the module's own hook, which comes after
        # this one, may put averaged weights in, too.
        self._share_again = batches not in (0, math.inf)

    def _share_buffers(self, module: nn.Module) -> None:
        """Buffers (running means of batch normalization) differ between ranks. A checkpoint has
        those of rank 0, so these are evaluated, as under DDP."""
        self._share_again = False
        self.world.broadcast(shared_buffers(module, self.world))

    def before_step(
        self, trainer: pl.Trainer, batch: Any, batch_idx: int | None = None, dataloader_idx: int = 0
    ) -> None:
        """Have collectives refused in a batch that not all ranks have, from now until it is over,
        `on_*_batch_end` included. Those in its `on_*_batch_start` are not noticed.

        Args:
            batch, batch_idx, dataloader_idx: arguments of the step.
        """
        loop = trainer.predict_loop if trainer.predicting else trainer._evaluation_loop
        assert loop._combined_loader is not None
        now, total = loop.batch_progress.current, loop.batch_progress.total
        if batch_idx is None:  # a step that does not ask for it
            batch_idx = now.ready - 1
            if loop._combined_loader._mode == "sequential":
                dataloader_idx, batch_idx = of_loader(batch_idx, loop.max_batches)
        of_all = batches_of_all(loop._combined_loader, dataloader_idx, self._fewest)
        assert trainer.state.stage is not None
        limit = getattr(trainer, f"limit_{trainer.state.stage.dataloader_prefix}_batches")
        if isinstance(limit, float) and of_all != math.inf:
            of_all = int(of_all * limit)  # as Lightning cuts them, on each rank its own
        if batch_idx >= of_all:
            kind = "prediction" if trainer.predicting else "evaluation"
            name, number = f"batch {batch_idx} of the {kind}", total.ready
            sanity = trainer.sanity_checking  # after which batches are counted anew

            def uneven_batch() -> str:
                same = total.ready == number and trainer.sanity_checking == sanity
                return name if same and now.completed < now.ready else ""

            self.world.uneven_batch = uneven_batch
        if self._share_again:
            self._share_buffers(trainer.lightning_module)


def of_loader(batch: int, batches: Sequence[float]) -> tuple[int, int]:
    """Which loader's batch it is, and which of its own; `batches`: of each loader, in turn."""
    for index, count in enumerate(batches):
        if batch < count:
            return index, batch
        batch -= int(count)
    raise IndexError(f"a batch after the last of {batches}")


def batches_of_all(
    combined: CombinedLoader, dataloader_idx: int, fewest: Mapping[DataLoader, int]
) -> float:
    """How many batches of an evaluation all ranks have; infinite where that is not known.

    Args:
        dataloader_idx: of the loader that is asked about, where loaders take turns.
        fewest: batches of each loader on the rank that has fewest.
    """
    counts = [
        fewest.get(loader, math.inf) if isinstance(loader, DataLoader) else math.inf
        for loader in combined.flattened
    ]
    if combined._mode == "sequential":
        return counts[dataloader_idx]
    # A batch is one of each loader.
    return min(counts) if combined._mode == "min_size" else max(counts)

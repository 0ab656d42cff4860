"""Lightning's own strategy for one device, with samples in the order that several ranks have.

benchmarks/losses.py trains with it in place of `strategy=single`, which draws the order of samples
from another generator and so would have other global batches. Only the order of the training
samples differs from Lightning's: nothing else is HorovodStrategy's.
"""

from __future__ import annotations

import os
from typing import Any

import torch
from pytorch_lightning.strategies import SingleDeviceStrategy
from pytorch_lightning.trainer.states import RunningStage
from torch.utils.data import (
    BatchSampler,
    DataLoader,
    DistributedSampler,
    IterableDataset,
    RandomSampler,
    SequentialSampler,
)
from typing_extensions import override

from strategies.samplers import SeededOrder


class SingleInOrder(SingleDeviceStrategy):
    """With the sampler that Lightning gives to each of several ranks, here for a single one."""

    @override
    def process_dataloader(self, dataloader: object) -> object:
        assert self.lightning_module is not None
        stage = self.lightning_module.trainer.state.stage
        if (
            stage == RunningStage.TRAINING
            and isinstance(dataloader, DataLoader)
            and not isinstance(dataloader.dataset, IterableDataset)
            and not isinstance(dataloader.sampler, (SequentialSampler, DistributedSampler))
        ):
            one: dict[str, Any] = {"num_replicas": 1, "rank": 0}
            one["seed"] = int(os.environ["PL_GLOBAL_SEED"])  # as Lightning seeds it
            order: DistributedSampler = (
                DistributedSampler(dataloader.dataset, shuffle=True, **one)
                if isinstance(dataloader.sampler, RandomSampler)
                else SeededOrder(dataloader.sampler, shuffle=False, **one)
            )
            assert dataloader.batch_size is not None
            batches = BatchSampler(order, dataloader.batch_size, dataloader.drop_last)
            # A DataLoader refuses plain assignment of this attribute.
            object.__setattr__(dataloader, "batch_sampler", batches)
        return dataloader


def single_in_order(accelerator: str = "auto") -> SingleInOrder:
    """On the first GPU if there is one, unless the accelerator is "cpu"."""
    gpu = accelerator != "cpu" and torch.cuda.is_available()
    return SingleInOrder("cuda:0" if gpu else "cpu")

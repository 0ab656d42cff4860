"""Which samples a rank trains and evaluates: together, the ranks evaluate each sample once."""

from __future__ import annotations

import copy
import os
import random
from collections.abc import Callable, Iterator, Sequence
from functools import partial
from typing import Any

import numpy as np
import torch
from lightning_fabric.utilities.distributed import DistributedSamplerWrapper
from pytorch_lightning.utilities.exceptions import MisconfigurationException
from pytorch_lightning.utilities.rank_zero import rank_zero_warn
from pytorch_lightning.utilities.seed import isolate_rng
from torch.utils.data import BatchSampler, DataLoader, DistributedSampler, Sampler

from .collectives import World

Order = Callable[[], Sequence[int]]


class EvenBatches(Sampler[list[int]]):
    """Batches for evaluation: each sample once, and on all ranks the same number of batches.

    No sample is repeated to make shares equal, which would falsify metrics, and no rank runs out
    of batches before the others, which would wait for it in a collective. Rank r has samples r,
    r + ranks, ... Its batches are full, except the last ones, which share what is left. Only if
    batches are of one sample and the samples do not divide, some ranks have one batch less.

    Args:
        samples: in the whole data set, at least one for each rank.
        order: draws the order of the samples for each evaluation, the same on all ranks; None
            keeps that of the data set.
    """

    def __init__(
        self, samples: int, ranks: int, rank: int, batch_size: int, order: Order | None = None
    ) -> None:
        self.order = order
        self.indices = range(rank, samples, ranks)
        self.batch_size = batch_size
        self.batches = min(-(-samples // (ranks * batch_size)), len(self.indices))

    def __len__(self) -> int:
        return self.batches

    def __iter__(self) -> Iterator[list[int]]:
        taken, order = 0, self.order() if self.order else None
        for after_this in reversed(range(self.batches)):
            size = min(self.batch_size, len(self.indices) - taken - after_this)
            batch = self.indices[taken : taken + size]
            yield list(batch) if order is None else [order[index] for index in batch]
            taken += size


class SeededOrder(DistributedSamplerWrapper):
    """Lightning's, around a user's own sampler for training, which draws a new order each epoch.

    Here that depends on the seed and the epoch alone, as with torch's DistributedSampler. Ranks may
    draw different random numbers by now, outside of steps, and with different orders some samples
    would come twice and others never. (A sampler with a generator of its own uses that, but for the
    one that torchdata's RandomSampler makes for itself, in a StatefulDataLoader.)

    Nor is the order shuffled once more, as Lightning's does against its own docstring: the ranks
    together have the batches of one process.
    """

    def __iter__(self) -> Iterator[Any]:
        with isolate_rng(include_cuda=False):
            seed = self.seed + self.epoch
            torch.default_generator.manual_seed(seed)
            random.seed(seed)
            np.random.seed(seed % 2**32)
            sampler = self.dataset._sampler  # type: ignore[attr-defined]
            if type(sampler).__module__.startswith("torchdata."):
                sampler.generator.manual_seed(seed)
            return super().__iter__()


def seed_order(dataloader: DataLoader) -> None:
    sampler = getattr(dataloader.batch_sampler, "sampler", dataloader.sampler)
    if isinstance(sampler, DistributedSamplerWrapper):
        sampler.__class__ = SeededOrder
        sampler.shuffle = False


def shuffled(sampler: DistributedSampler) -> list[int]:
    """The order of all samples, of which each rank's sampler takes its share."""
    whole = copy.copy(sampler)
    whole.num_replicas, whole.rank = 1, 0
    whole.num_samples = whole.total_size = len(sampler.dataset)  # type: ignore[arg-type]
    return list(whole)


def replace_batches(dataloader: DataLoader, batches: Sampler[list[int]]) -> None:
    """Give a DataLoader other batches; once made, it refuses plain assignment."""
    object.__setattr__(dataloader, "batch_sampler", batches)
    if dataloader._iterator is not None:  # of persistent workers, which have the old ones
        dataloader._iterator._index_sampler = batches


def sharing(loader: DataLoader, world: World) -> DistributedSampler | None:
    """The sampler that takes this rank's share of the data set; None where there is none, or where
    the user has another way: each rank evaluates all, say."""
    batches = loader.batch_sampler
    sampler = loader.sampler if batches is None else getattr(batches, "sampler", None)
    if not isinstance(sampler, DistributedSampler):
        return None
    ours = (sampler.num_replicas, sampler.rank) == (world.size, world.rank)
    return sampler if ours else None


def refuse_other_lengths(loader: DataLoader, world: World) -> None:
    """Ranks would take overlapping shares of data sets that differ, and miss samples: where a host
    has part of the files, or each rank has taken its share before. Called on all ranks.

    Raises:
        MisconfigurationException: when the data sets that are shared out differ in their length.
    """
    sampler = sharing(loader, world)
    samples = len(sampler.dataset) if sampler else None  # type: ignore[arg-type]
    (first, _), *others = world.gather_objects((samples, os.uname().nodename))
    for rank, (count, host) in enumerate(others, start=1):
        if None not in (first, count) and count != first:
            raise MisconfigurationException(
                f"rank {rank} on {host} has {count} samples, rank 0 has {first}, of data that are "
                "split over the ranks: give each rank all of them (is a copy incomplete, or did "
                "you split them, too?), or split them alone: Trainer(use_distributed_sampler=False)"
            )


def each_sample_once(loader: DataLoader, world: World, stage: str) -> DataLoader:
    """A loader for evaluation that gives this rank its share, no sample padded or left out.

    Args:
        loader: with a DistributedSampler for this world; one with another sampler, or with
            one whose class deals samples out in its own way, is returned as it is.
        stage: "validate" or "test", for the message.

    Raises:
        MisconfigurationException: for fewer samples than ranks.
    """
    sampler, batches = sharing(loader, world), loader.batch_sampler
    if sampler is None:
        return loader
    samples = len(sampler.dataset)  # type: ignore[arg-type]
    # Lightning wraps the user's own sampler, which is not distributed.
    wrapped = isinstance(sampler, DistributedSamplerWrapper)
    if not wrapped and type(sampler).__iter__ is not DistributedSampler.__iter__:
        if sampler.total_size != samples:
            rank_zero_warn(
                f"{type(sampler).__name__} has {sampler.total_size} samples to {stage} on "
                f"{world.size} ranks, of a data set of {samples}: some are left out, or count twice"
            )
        return loader
    # None for a user's own class of batches, or of DistributedSampler: these are kept.
    known = wrapped or type(sampler) is DistributedSampler
    plain = batches if known and type(batches) is BatchSampler else None
    samples = _without_the_rest(samples, world, plain, stage)
    once = copy.copy(loader)  # which may be that of training too
    once._iterator = None
    if plain is None:
        _give_share(once, sampler, samples, world)
        return once
    order: Order | None = None
    if wrapped:
        order = partial(draw, sampler.dataset, world)
    elif sampler.shuffle:
        order = partial(shuffled, sampler)
    replace_batches(once, EvenBatches(samples, world.size, world.rank, plain.batch_size, order))
    return once


def _without_the_rest(samples: int, world: World, batches: BatchSampler | None, stage: str) -> int:
    """How many of the samples are shared out: all, unless the last batches are dropped."""
    whole = samples
    if batches is not None and batches.drop_last:
        samples -= samples % (world.size * batches.batch_size)
        if whole >= world.size and not samples:
            raise MisconfigurationException(
                f"drop_last=True leaves none of {whole} samples to {stage}: {world.size} batches "
                f"of {batches.batch_size}, one for each rank, are more; leave it out"
            )
    if samples < world.size:
        raise MisconfigurationException(
            f"{samples} samples to {stage} on {world.size} ranks: each rank needs one; use fewer "
            "ranks or more samples"
        )
    return samples


def _give_share(
    loader: DataLoader, sampler: DistributedSampler, samples: int, world: World
) -> None:
    """Keep the loader's own batches and sampler, as copies that do not pad this rank's share;
    training may use the originals."""
    share = copy.copy(sampler)
    share.total_size = samples
    share.num_samples = len(range(world.rank, samples, world.size))
    if loader.batch_sampler is None:
        object.__setattr__(loader, "sampler", share)
    else:  # which may refer to the sampler in several places
        memo = {id(sampler): share, id(sampler.dataset): sampler.dataset}
        batches: Any = copy.deepcopy(loader.batch_sampler, memo)
        replace_batches(loader, batches)


def draw(order: Any, world: World) -> list[int]:
    """Rank 0's order, as ranks may draw different random numbers by now."""
    order.reset()
    return world.broadcast_object([order[index] for index in range(len(order))])

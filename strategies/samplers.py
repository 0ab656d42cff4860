"""Which samples a rank sees: each once in evaluation, none twice after a resume."""

from __future__ import annotations

import copy
from collections.abc import Callable, Iterator, Sequence
from typing import Any

from torch.utils.data import BatchSampler, DataLoader, DistributedSampler, Sampler

Order = Callable[[], Sequence[int]]


class EvenBatches(Sampler[list[int]]):
    """Batches for evaluation: each sample once, and on all ranks the same number of batches.

    No sample is repeated to make shares equal, which would falsify metrics, and no rank runs out
    of batches before the others, which would wait for it in a collective. Rank r has samples r,
    r + ranks, ...; its batches are full but for the last ones, which share what is left. Only
    where batches are of one sample and the samples do not divide, some ranks have one batch less.

    Args:
        samples: of the whole data set, at least one a rank.
        order: draws which sample is the i-th, anew for each evaluation and on all ranks the same;
            None: i.
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


class WithoutFirst(Sampler[list[int]]):
    """The batches of a seeded sampler; the first time without those that were trained already."""

    def __init__(self, batches: BatchSampler, trained: int) -> None:
        self.batches, self.trained = batches, trained

    def __getattr__(self, name: str) -> Any:
        return getattr(self.batches, name)  # sampler, batch_size

    def __len__(self) -> int:
        return len(self.batches)

    def __iter__(self) -> Iterator[list[int]]:
        trained, self.trained = self.trained, 0
        for index, batch in enumerate(self.batches):
            if index >= trained:
                yield batch


def shuffled(sampler: DistributedSampler) -> list[int]:
    """The order of all samples of which each rank's sampler takes its share."""
    whole = copy.copy(sampler)
    whole.num_replicas, whole.rank = 1, 0
    whole.num_samples = whole.total_size = len(sampler.dataset)  # type: ignore[arg-type]
    return list(whole)


def replace_batches(dataloader: DataLoader, batches: Sampler[list[int]]) -> None:
    """Give a DataLoader other batches; it refuses plain assignment once it is made."""
    object.__setattr__(dataloader, "batch_sampler", batches)
    if dataloader._iterator is not None:  # of persistent workers, asked for the old ones already
        dataloader._iterator._index_sampler = batches

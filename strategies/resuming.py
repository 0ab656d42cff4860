"""A resumed epoch goes on after the samples that were trained: none is seen twice."""

from __future__ import annotations

from collections.abc import Iterator, Sequence
from itertools import islice
from typing import Any

from lightning_fabric.utilities.data import _set_sampler_epoch
from lightning_fabric.utilities.distributed import DistributedSamplerWrapper
from pytorch_lightning.loops.fit_loop import _FitLoop
from pytorch_lightning.utilities.rank_zero import rank_zero_warn
from torch.utils.data import (
    BatchSampler,
    DataLoader,
    DistributedSampler,
    IterableDataset,
    Sampler,
    SequentialSampler,
)

from .samplers import SeededOrder, replace_batches


def resume(loop: _FitLoop, then: int, ranks: int, states: list[Any]) -> None:
    """Have the epoch in which the checkpoint was written go on where it was.

    Horovod: loaders may be made before the checkpoint is read, when configure_optimizers asks how
    many steps there are. By now their workers have begun with the order of the first epoch.

    Args:
        loop: nothing is done if it is not restarting.
        then: global batch size when the checkpoint was written; 0 where it does not say.
        states: in the checkpoint, of loaders that go on by themselves. Lightning has given these to
            them, but the iterator that it made then has used them up.
    """
    if not loop.restarting or loop._combined_loader is None or loop._data_fetcher is None:
        return
    loaders = loop._combined_loader.flattened
    progress: Any = loop.epoch_loop.batch_progress
    if progress.current.processed < progress.current.ready:  # saved as a step of it failed
        progress.is_last_batch = False
    # A validation that failed begins anew: its means are of all batches.
    loop.epoch_loop.val_loop.batch_progress.current.reset()
    if not progress.is_last_batch:
        now = global_batch_size(loop, ranks)
        cycles = loop._combined_loader._mode == "max_size_cycle"
        leave_out_trained(loaders, progress, then or now, now, cycles)
    elif isinstance(loop.max_batches, int):  # which may be others than then
        move(progress, loop.max_batches - progress.current.ready)
    for dataloader in loaders:
        epoch = loop.epoch_progress.current.processed  # type: ignore[attr-defined]
        _set_sampler_epoch(dataloader, epoch)
    if states:
        loop._combined_loader._load_state_dicts(states)
    iter(loop._data_fetcher)


def global_batch_size(loop: _FitLoop, ranks: int) -> int:
    """Of the first training loader that has a batch size; 0 where none has."""
    loaders = loop._combined_loader.flattened if loop._combined_loader is not None else []
    batches = [getattr(loader, "batch_sampler", None) for loader in loaders]
    sizes = [getattr(each, "batch_size", None) or 0 for each in batches]
    return next(filter(None, sizes), 0) * ranks


def drawn_anew(batches: Any) -> str:
    """The class of the sampler, if a resume may not find its order again; "" if the order follows
    from a seed and the epoch, or is that of the data set or of a list."""
    sampler = getattr(batches, "sampler", batches)
    if isinstance(sampler, DistributedSamplerWrapper):
        seeded = isinstance(sampler, SeededOrder)
        sampler = getattr(sampler.dataset, "_sampler", None)
        if seeded and getattr(sampler, "generator", "none") is None:
            return ""  # torch's, without a generator of its own
    repeatable = isinstance(sampler, (DistributedSampler, SequentialSampler, Sequence))
    return "" if repeatable else type(sampler).__name__


def warn_of_order(batches: Any) -> None:
    if order := drawn_anew(batches):
        rank_zero_warn(
            f"the resumed epoch draws its samples anew, by a {order}: of those that were trained "
            "some come again; shuffle=True without a sampler of one's own leaves them out"
        )
    elif getattr(type(batches), "__iter__", None) is not BatchSampler.__iter__:
        rank_zero_warn(
            f"the resumed epoch leaves out the first batches, of its {type(batches).__name__}: if "
            "it draws them anew in each pass, some samples come again and others never"
        )


def leave_out_trained(
    dataloaders: list[Any], progress: Any, then: int, now: int, cycles: bool
) -> None:
    """Have a resumed epoch go on after the batches that were trained.

    Their number is rounded up: where the batch size has changed, some samples may be left out of
    this epoch, but none is seen twice.

    Args:
        progress: Lightning's, of the batches in this epoch; afterwards it counts batches of `now`.
        then: global batch size when the checkpoint was written.
        now: global batch size of the first loader.
        cycles: whether shorter loaders begin again until the longest one ends.
    """
    # Where a step failed and the checkpoint was written then (OnExceptionCheckpoint), Lightning has
    # its batch come again.
    done, moved = progress.current.processed, 0
    if not done:  # LearningRateFinder leaves the loop restarting, too
        return
    for dataloader in dataloaders:
        if hasattr(dataloader, "load_state_dict"):  # it goes on by itself
            continue
        batches = getattr(dataloader, "batch_sampler", None)
        if (
            not isinstance(dataloader, DataLoader)
            or isinstance(dataloader.dataset, IterableDataset)
            or not isinstance(getattr(batches, "batch_size", None), int)
        ):
            rank_zero_warn(
                f"the resumed epoch goes on at batch {done}, but with the first samples: trained "
                "ones can be left out of a DataLoader with batch_size and a data set of known "
                f"length, not of this {type(dataloader).__name__}"
            )
            continue
        warn_of_order(batches)
        trained = -(-done * then // now)
        length = len(batches)  # type: ignore[arg-type]
        # Where loaders cycle, a shorter one is in another of its rounds; else it may have ended.
        of_round = trained % length if cycles and trained > length else trained
        replace_batches(dataloader, WithoutFirst(batches, of_round))  # type: ignore[arg-type]
        moved = trained - done
    move(progress, moved)


def move(progress: Any, batches: int) -> None:
    """Have Lightning's progress in an epoch count this many batches more."""
    for count in ("ready", "started", "processed", "completed"):
        setattr(progress.current, count, getattr(progress.current, count) + batches)


class WithoutFirst(Sampler[list[int]]):
    """The batches of a seeded sampler; the first pass leaves out those already trained."""

    def __init__(self, batches: BatchSampler, trained: int) -> None:
        self.batches, self.trained = batches, trained

    def __getattr__(self, name: str) -> Any:
        if name == "batches":  # copy and pickle ask before it is set
            raise AttributeError(name)
        return getattr(self.batches, name)  # sampler, batch_size

    def __len__(self) -> int:
        return len(self.batches)

    def __iter__(self) -> Iterator[list[int]]:
        trained, self.trained = self.trained, 0
        yield from islice(self.batches, trained, None)

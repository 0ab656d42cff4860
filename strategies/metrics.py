"""Metrics and logged values of all ranks together."""

from __future__ import annotations

from collections.abc import Iterator
from functools import partial
from typing import Any

import pytorch_lightning as pl
import torch
from pytorch_lightning.callbacks import Callback
from pytorch_lightning.utilities.rank_zero import WarningCache
from torch import Tensor, nn
from torchmetrics import Metric, MetricCollection
from torchmetrics.metric import jit_distributed_available
from torchmetrics.utilities.data import dim_zero_cat

from .collectives import World

warning_cache = WarningCache()


def metrics_of(module: nn.Module) -> Iterator[Metric]:
    """Its submodules, and those in plain dicts and lists, which torch does not look into."""
    seen: set[int] = set()  # containers may contain themselves
    for part in module.modules():
        if isinstance(part, Metric):
            yield part
            continue
        for name, value in vars(part).items():
            if name != "_modules":
                yield from _held(value, seen)


def _held(value: object, seen: set[int]) -> Iterator[Metric]:
    if isinstance(value, (Metric, MetricCollection)):
        yield from metrics_of(value)
    elif isinstance(value, (dict, list, tuple)) and id(value) not in seen:
        seen.add(id(value))
        for each in value.values() if isinstance(value, dict) else value:
            yield from _held(each, seen)


def synchronize_metrics(module: nn.Module, world: World) -> None:
    """Have every torchmetrics metric of `module` computed over all ranks.

    torchmetrics asks torch.distributed for other ranks, which under Horovod knows of none: each
    rank would report its own share as everyone's.
    """
    for metric in metrics_of(module):
        earlier = getattr(metric.dist_sync_fn, "__self__", None)  # a World, of another strategy
        if metric.dist_sync_fn is None or isinstance(earlier, World):
            metric.dist_sync_fn = world.gather
            metric.distributed_available_fn = world.has_several_ranks
            metric._sync_dist = partial(sync, metric, world)  # type: ignore[method-assign]
            if hasattr(metric, "_gather_tuple_list"):  # MeanAveragePrecision's, of masks
                metric._gather_tuple_list = partial(gather_lists, world)


def leave_metrics(module: nn.Module, world: World) -> None:
    """Undo it, so that a single process can evaluate the module without waiting for others."""
    for metric in metrics_of(module):
        if metric.dist_sync_fn == world.gather:
            metric.dist_sync_fn = None
            metric.distributed_available_fn = jit_distributed_available
            for name in ("_sync_dist", "_gather_tuple_list"):
                metric.__dict__.pop(name, None)


def compute_the_rest(module: nn.Module, world: World) -> None:
    """Compute what an evaluation has updated and nobody has computed. When the Trainer has returned
    a program may ask for it, and gets the value of all ranks, which torchmetrics keeps."""
    if world.size == 1:
        return
    for part in module.modules():
        if isinstance(part, MetricCollection):
            part.values(copy_state=False)  # gives those that share states what one has updated
    metrics = [m for m in metrics_of(module) if m.dist_sync_fn == world.gather]
    left = [(type(m).__name__, m.update_called and m._computed is None) for m in metrics]
    ranks = world.gather_objects(left)
    if len({tuple(name for name, _ in rank) for rank in ranks}) > 1:
        return  # some are there on some ranks only
    for metric, *of_ranks in zip(metrics, *ranks):
        # One that only some ranks have updated is computed by all.
        if any(is_left for _, is_left in of_ranks):
            try:
                metric.compute()
            except Exception:  # too few values, say: nobody has asked for it yet
                if metric._is_synced:
                    metric.unsync()


def sync(metric: Metric, world: World, _: Any = None, process_group: Any = None) -> None:
    """Replaces Metric._sync_dist, which metric.sync() calls with torch.distributed's gather.

    It gathers the tensors of a list one by one, unless it concatenates them before. All ranks must
    gather equally many, so ranks with fewer add empty ones, which are dropped before the metric's
    own reduction. DDP needs none of this: it repeats samples to make shares equal.
    """
    counts = _tensors_of_ranks(metric, world)
    device = "cpu" if metric.compute_on_cpu else metric.device
    for name, lengths in counts.items():
        missing = max(lengths) - lengths[world.rank]
        empty = [torch.zeros(0, device=device)] * missing
        setattr(metric, name, [*getattr(metric, name), *empty])
    reductions = {name: metric._reductions[name] for name in counts}
    try:
        metric._reductions.update(dict.fromkeys(counts))
        type(metric)._sync_dist(metric, world.gather, process_group)
    finally:
        metric._reductions.update(reductions)
    for name, lengths in counts.items():
        kept: Any = _without_empty(getattr(metric, name), lengths)
        if callable(reduce := reductions[name]) and kept:
            kept = reduce(kept)
        setattr(metric, name, kept)


def _tensors_of_ranks(metric: Metric, world: World) -> dict[str, list[int]]:
    """How many tensors each rank has in each list that is gathered one by one. Where a metric has
    no such list, ranks are not asked."""
    lists = {
        name: getattr(metric, name)
        for name, reduction in metric._reductions.items()
        if reduction is not dim_zero_cat and isinstance(metric._defaults[name], list)
    }
    if not lists:
        return {}
    mine = {
        name: len(tensors)
        for name, tensors in lists.items()
        if all(isinstance(tensor, Tensor) for tensor in tensors)
    }
    ranks = world.gather_objects(mine)
    return {
        name: [other[name] for other in ranks]
        for name in mine
        if all(name in other for other in ranks)
    }


def _without_empty(gathered: list[Tensor], lengths: list[int]) -> list[Tensor]:
    """Of the first tensor of each rank, then the second of each, ..., those that ranks had."""
    ranks = len(lengths)
    return [tensor for i, tensor in enumerate(gathered) if i // ranks < lengths[i % ranks]]


def gather_lists(world: World, mine: list[Any], process_group: Any = None) -> list[Any]:
    """The first element of each rank's list, then the second of each, ..."""
    ranks = world.gather_objects(mine)
    longest = max(len(items) for items in ranks)
    return [items[index] for index in range(longest) for items in ranks if index < len(items)]


def keep_wide(module: nn.Module) -> None:
    """Have metrics add up in float32 where a precision such as bf16-true made their states 16 bits
    wide: such a sum stops growing after some hundred batches."""
    for metric in metrics_of(module):
        metric.set_dtype(torch.float32)


class ReadByAll(Callback):
    """Reads the epoch's metrics on all ranks before another callback does. Reading reduces them: a
    callback that reads on rank 0 alone, such as a progress bar, would wait for the others, or
    receive what they reduce next.

    Args:
        world: whose ranks' values are then compared; None: they are not.
    """

    def __init__(self, world: World | None = None) -> None:
        self.world = world

    def on_train_epoch_end(self, trainer: pl.Trainer, pl_module: pl.LightningModule) -> None:
        _ = trainer.progress_bar_metrics
        if self.world is not None:
            warn_of_own_values(trainer, self.world)


def read_by_all(trainer: pl.Trainer, world: World) -> None:
    """Put ReadByAll before each callback, as the one before may have logged, and after the last, as
    some ranks may have no callback that reads."""
    callbacks = trainer.callbacks  # type: ignore[attr-defined]
    others = [callback for callback in callbacks if not isinstance(callback, ReadByAll)]
    read = ReadByAll()
    callbacks[:] = [each for other in others for each in (read, other)] + [ReadByAll(world)]


def warn_of_own_values(trainer: pl.Trainer, world: World) -> None:
    """Name the values that differ between ranks and were logged without sync_dist=True.

    Lightning warns of them only under torch.distributed.
    """
    if world.size == 1:
        return
    unsynced = {
        result.meta.name
        for result in (trainer._results or {}).values()
        if result.meta.on_epoch and result.is_tensor
        if not (result.meta.sync.should or result.meta.sync.rank_zero_only)
    }
    own = {
        name: repr(float(value))
        for name, value in trainer.callback_metrics.items()
        if name.partition("/dataloader_idx_")[0] in unsynced
    }
    ranks = world.gather_objects(own)
    for name in own:
        if len({values[name] for values in ranks if name in values}) > 1:
            warning_cache.warn(
                f"{name} differs between ranks, and rank 0's alone is shown and saved: "
                f"self.log({name!r}, ..., sync_dist=True) gives that of all"
            )

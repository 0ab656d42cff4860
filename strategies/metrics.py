"""Metrics and logged values that are to be those of all ranks."""

from __future__ import annotations

import pytorch_lightning as pl
import torch
from pytorch_lightning.utilities.rank_zero import WarningCache
from torch import nn
from torchmetrics import Metric
from torchmetrics.metric import jit_distributed_available

from strategies.collectives import World

warning_cache = WarningCache()


def synchronize_metrics(module: nn.Module, world: World) -> None:
    """Have every torchmetrics metric of `module` computed over all ranks.

    torchmetrics asks torch.distributed whether there are others, which under Horovod says no: each
    rank would report its own share as everyone's.
    """
    for metric in module.modules():
        if not isinstance(metric, Metric):
            continue
        others = getattr(metric.dist_sync_fn, "__self__", None)  # of an earlier strategy
        if metric.dist_sync_fn is None or isinstance(others, World):
            metric.dist_sync_fn = world.gather
            metric.distributed_available_fn = world.has_several_ranks


def keep_wide(module: nn.Module) -> None:
    """Have metrics add up in float32 where a precision as bf16-true made their states 16 bits wide:
    such a sum grows no more after some hundred batches."""
    for metric in module.modules():
        if isinstance(metric, Metric):
            metric.set_dtype(torch.float32)


def leave_metrics(module: nn.Module, world: World) -> None:
    """Undo it, lest a single process that evaluates the module waits for others."""
    for metric in module.modules():
        if isinstance(metric, Metric) and metric.dist_sync_fn == world.gather:
            metric.dist_sync_fn = None
            metric.distributed_available_fn = jit_distributed_available


def warn_of_own_values(trainer: pl.Trainer, world: World) -> None:
    """Name the values that differ between ranks and were logged without sync_dist=True.

    Lightning does so only where torch.distributed runs.
    """
    if world.size == 1:
        return
    unsynced = {
        result.meta.name
        for result in (trainer._results or {}).values()
        if result.meta.on_epoch and result.is_tensor and not result.meta.sync.should
    }
    own = {
        name: repr(float(value))
        for name, value in trainer.callback_metrics.items()
        if name.partition("/dataloader_idx_")[0] in unsynced
    }
    ranks = world.gather_objects(own)
    for name in own:
        if len({found[name] for found in ranks if name in found}) > 1:
            warning_cache.warn(
                f"{name} is what each rank has by itself, rank 0's is shown and saved: "
                f"self.log({name!r}, ..., sync_dist=True) gives that of all"
            )

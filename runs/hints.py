"""What a run was likely meant to do and did not: why, and what to do about it.

Functions return what to print; most of them an empty text if all is well.
"""

from __future__ import annotations

from datetime import timedelta
from typing import Any

import pytorch_lightning as pl
from omegaconf import DictConfig
from pytorch_lightning.callbacks import Timer
from pytorch_lightning.callbacks.early_stopping import EarlyStoppingReason
from pytorch_lightning.trainer.connectors.logger_connector.result import _Metadata
from torch.utils._pytree import tree_leaves
from torch.utils.data import DataLoader, DistributedSampler, IterableDataset

from runs.mistakes import no_metric
from runs.ranks import same_on_all

NO_STEP = "no step was made: training_step has to return the loss, and batches must not be None"


def missing_metrics(trainer: pl.Trainer, callbacks: Any) -> list[str]:
    """What callbacks watch that the sanity check did not log. All ranks must call it.

    Args:
        callbacks: the group of the configuration.
    """
    logged = list(trainer.callback_metrics)  # reading them may reduce them over the ranks
    # Where there are several loaders, Lightning does not show what the sanity check logs of each.
    results = trainer.fit_loop.epoch_loop.val_loop._results.values()
    logged += [_name_of(result.meta) for result in results]
    members = [member for member in callbacks.values() if isinstance(member, DictConfig)]
    watched = dict.fromkeys(str(member.get("monitor")) for member in members)
    missing = [metric for metric in watched if metric.startswith("val") and metric not in logged]
    return [no_metric(metric, logged, callbacks) for metric in missing]


def divided_batches(asked: int | None, batch_size: int | None, ranks: int) -> str:
    """Whether the data module divides data.batch_size by the ranks, as many do."""
    if not asked or ranks == 1 or batch_size != asked // ranks:
        return ""
    return (
        f"data.batch_size={asked}, but the loader's batches have {batch_size}: if the data module "
        "divides it by the ranks, let it not, as data.batch_size is per process here"
    )


def long_windows(asked: int, batches: int) -> str:
    """Whether an epoch has fewer batches than are to be accumulated for a step."""
    if batches >= asked:
        return ""
    return (
        f"trainer.accumulate_grad_batches={asked}: an epoch ends after {batches} batches, with a "
        f"step whose loss is divided by {asked} all the same; give at most {batches}"
    )


def same_batches(trainer: pl.Trainer, batch: Any) -> str:
    """Whether all ranks begin with the same batch: Lightning splits data sets over ranks, but no
    streams, and no samplers of one's own with use_distributed_sampler=false. All ranks must call
    it."""
    loaders = [x for x in tree_leaves(trainer.train_dataloader) if isinstance(x, DataLoader)]
    whole = [loader for loader in loaders if not _is_share(loader)]
    if not whole or trainer.world_size == 1 or not same_on_all(trainer.strategy, batch):
        return ""
    stream = isinstance(whole[0].dataset, IterableDataset)
    source = whole[0].dataset if stream else whole[0].batch_sampler or whole[0].sampler
    return (
        f"all {trainer.world_size} ranks were given the same first batch: {type(source).__name__} "
        "has to yield each rank's share itself, by trainer.global_rank (README, Put your data in)"
    )


def no_validation(trainer: pl.Trainer, trained: int, epochs: int) -> str:
    """An epoch of a stream, whose length is unknown, may be shorter than the validation interval.

    Args:
        trained: how many batches this run trained.
        epochs: how many.
    """
    every, batches = trainer.check_val_every_n_epoch, trainer.val_check_interval
    if not (trainer.enable_validation and isinstance(batches, int) and trained >= batches):
        return ""
    if not (every and epochs >= every):
        return ""
    return (
        f"nothing was validated: no epoch has as many batches as trainer.val_check_interval="
        f"{batches}; check_val_every_n_epoch=null has them counted over epochs"
    )


def no_curves(trainer: pl.Trainer, first: int) -> str:
    """Loggers got no step of training. They count one for each batch, also where several optimizers
    step.

    Args:
        first: how many were counted before this run.
    """
    every = trainer.log_every_n_steps  # type: ignore[attr-defined]
    if not (every and trainer.loggers) or trainer.fast_dev_run:  # type: ignore[attr-defined]
        return ""
    last = trainer.fit_loop.epoch_loop._batches_that_stepped
    if last // every != first // every:
        return ""
    return (
        f"show no step of training: {counted(last - first, 'step')}, and "
        f"trainer.log_every_n_steps is {every}; give a smaller one"
    )


def uncounted_steps(trainer: pl.Trainer, module: pl.LightningModule, first: int) -> str:
    """Steps by hand that Lightning did not see: it writes a checkpoint only if it counted a step.

    Args:
        first: how many were counted before this run.
    """
    keeps = trainer.checkpoint_callbacks and not trainer.fast_dev_run  # type: ignore[attr-defined]
    if module.automatic_optimization or trainer.global_step > first or not keeps:
        return ""
    return (
        "Lightning counted no step in this epoch, and while it counts none it writes no new "
        "checkpoints and trainer.max_steps ends nothing; if there were steps, make them by "
        "self.optimizers(), not by the optimizer inside (.optimizer, use_pl_optimizer=False)"
    )


def not_trained(trainer: pl.Trainer, resumed: bool) -> str:
    """Why no batch was trained, for a run in which none was."""
    if resumed:
        return (
            f"the checkpoint has {trainer.current_epoch} of {trainer.max_epochs} epochs, "
            f"{trainer.global_step} steps; to continue, give a larger trainer.max_epochs (or "
            "max_steps or max_time, if that ended it)"
        )
    return (
        f"trainer.max_epochs is {trainer.max_epochs}, max_steps {trainer.max_steps}, "
        f"limit_train_batches {trainer.limit_train_batches}; the weights are those that the model "
        "began with"
    )


def stopped_early(trainer: pl.Trainer) -> list[str]:
    """For each EarlyStopping that ended the training: its metric, and what became of it; for each
    Timer (trainer.max_time): its limit."""
    reasons = []
    for callback in trainer.early_stopping_callbacks if trainer.should_stop else []:
        if callback.stopping_reason == EarlyStoppingReason.PATIENCE_EXHAUSTED:
            best = float(callback.best_score)
            told = f"has not improved for {callback.patience} validations (best {best:.4g})"
        elif callback.stopping_reason == EarlyStoppingReason.NON_FINITE_METRIC:
            told = "is no finite number any more; debug=anomaly finds where that begins"
        elif callback.stopping_reason != EarlyStoppingReason.NOT_STOPPED:
            told = f"has reached its end: {callback.stopping_reason_message}"
        else:
            continue
        reasons.append(f"{callback.monitor} {told}")
    for callback in trainer.callbacks if trainer.should_stop else []:  # type: ignore[attr-defined]
        limit = callback._duration if isinstance(callback, Timer) else None
        if limit is not None and callback.time_elapsed() >= limit:
            reasons.append(f"its time limit of {timedelta(seconds=limit)} is reached")
    return reasons


def counted(number: int, what: str) -> str:
    """E.g. "1 step", "2 steps", "2 classes"."""
    ending = "" if number == 1 else "es" if what.endswith("s") else "s"
    return f"{number} {what}{ending}"


def _name_of(logged: _Metadata) -> str:
    """The name by which callbacks know it."""
    indexed = logged.dataloader_idx is not None and logged.add_dataloader_idx
    return f"{logged.name}/dataloader_idx_{logged.dataloader_idx}" if indexed else logged.name


def _is_share(loader: DataLoader) -> bool:
    samplers = loader.sampler, getattr(loader.batch_sampler, "sampler", None)
    return any(isinstance(sampler, DistributedSampler) for sampler in samplers)

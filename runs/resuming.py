"""What a run resumed from a checkpoint needs beyond Lightning: it has a folder and settings of its
own, and goes on as the run before would have; and what a test of averaged weights (EMA, SWA) needs.

ModelCheckpoint has the name of Lightning's: checkpoints keep the state of callbacks by name, so a
Trainer without this package can take it, and the other way round.
"""

from __future__ import annotations

import inspect
import math
from collections.abc import Callable
from functools import partial
from pathlib import Path
from typing import Any

import pytorch_lightning as pl
from pytorch_lightning import callbacks
from pytorch_lightning.trainer.states import TrainerFn
from pytorch_lightning.utilities.rank_zero import rank_zero_warn
from torch import nn
from torch.nn.modules.batchnorm import _BatchNorm
from torch.optim.lr_scheduler import OneCycleLR

from runs.checkpoints import moved
from runs.refusal import Refusal

# Not told as kept from the checkpoint: rates have a line of their own, the rest chooses an
# implementation.
NO_SETTINGS = ("params", "lr", "initial_lr", "foreach", "fused", "capturable", "differentiable")
SEARCHES = (callbacks.LearningRateFinder, callbacks.BatchSizeFinder)
BEGIN_WITH_EPOCHS = (callbacks.GradientAccumulationScheduler, callbacks.StochasticWeightAveraging)


class ModelCheckpoint(callbacks.ModelCheckpoint):
    """Lightning's, but for two things that a resume needs.

    It remembers what was best before the resume. Lightning's forgets it in another folder, and
    takes the best of the epochs since then, which may be worse.

    With every_n_train_steps, Lightning's writes as soon as a batch is trained. A resume from there
    passes over the validation that follows this batch, and may end the epoch again if it was the
    last one. So without a monitor, this one writes when that validation is done or, after an
    epoch's last batch, when the epoch has ended.
    """

    _put_off = False  # whether on_train_batch_end of the last batch is still to come

    def setup(self, trainer: pl.Trainer, pl_module: pl.LightningModule, stage: str) -> None:
        super().setup(trainer, pl_module, stage)
        # One that a module's configure_callbacks returns for the same, which comes later, replaces
        # this, as checkpoints keep one state of a key; not the one that a resume needs.
        alike = [c for c in trainer.checkpoint_callbacks if c.state_key == self.state_key]
        if self.monitor and alike[-1] is not self:
            all_ = trainer.callbacks  # type: ignore[attr-defined]
            trainer.callbacks = [c for c in all_ if c is not self]  # type: ignore[attr-defined]

    def on_train_batch_end(
        self, trainer: pl.Trainer, pl_module: pl.LightningModule, *batch: Any
    ) -> None:
        loop, fetcher = trainer.fit_loop.epoch_loop, trainer.fit_loop._data_fetcher
        assert fetcher is not None
        empty = trainer.val_dataloaders is not None and loop.val_loop.skip  # no batch to validate
        validates = loop._should_check_val_fx(fetcher) and not empty
        self._put_off = self.monitor is None and validates
        if not self._put_off:
            super().on_train_batch_end(trainer, pl_module, *batch)

    def on_validation_end(self, trainer: pl.Trainer, pl_module: pl.LightningModule) -> None:
        super().on_validation_end(trainer, pl_module)
        if not trainer.fit_loop.epoch_loop._num_ready_batches_reached():
            self._do_what_was_put_off(trainer, pl_module)

    def on_train_epoch_end(self, trainer: pl.Trainer, pl_module: pl.LightningModule) -> None:
        super().on_train_epoch_end(trainer, pl_module)
        self._do_what_was_put_off(trainer, pl_module)

    def _do_what_was_put_off(self, trainer: pl.Trainer, pl_module: pl.LightningModule) -> None:
        if self._put_off:
            self._put_off = False
            super().on_train_batch_end(trainer, pl_module, None, None, 0)

    def on_load_checkpoint(
        self, trainer: pl.Trainer, pl_module: pl.LightningModule, checkpoint: dict[str, Any]
    ) -> None:
        state = checkpoint["callbacks"].get(self.state_key)
        if state is None:
            return
        if trainer.state.fn != TrainerFn.FITTING:  # what this run's training found stays
            del checkpoint["callbacks"][self.state_key]
            return
        # If the folder was moved, the best still lies beside the checkpoint, or beside its folder.
        beside = Path(str(trainer.ckpt_path)).parent
        places: dict[str, str] = {}
        for file in state.get("best_k_models", ()):
            path = Path(file)
            found = path if path.is_file() else moved(path, beside.parent) or moved(path, beside)
            places[file] = str(found or "")
        places = trainer.strategy.broadcast(places)
        if missing := [file for file, place in places.items() if not place]:
            del checkpoint["callbacks"][self.state_key]
            if self.monitor:
                rank_zero_warn(
                    f"the best of before is gone ({missing[0]}): best is now that of the epochs "
                    "from here on"
                )
            return
        state["dirpath"] = self.dirpath
        state["best_k_models"] = {places[file]: v for file, v in state["best_k_models"].items()}
        for key in ("best_model_path", "kth_best_model_path"):
            state[key] = places.get(state[key], state[key])


class LeavesOutSearches(callbacks.Callback):
    """A resumed run goes on with the learning rate that was found: a search at the start of a fit
    takes the checkpoint's place, and Lightning then begins anew, with nothing but its weights."""

    def setup(self, trainer: pl.Trainer, pl_module: pl.LightningModule, stage: str) -> None:
        all_ = trainer.callbacks  # type: ignore[attr-defined]
        searches = [c for c in all_ if isinstance(c, SEARCHES) and searches_at_start(c)]
        if stage == "fit" and searches:
            trainer.callbacks = [c for c in all_ if c not in searches]  # type: ignore[attr-defined]
            names = ", ".join(type(search).__name__ for search in searches)
            rank_zero_warn(
                f"{names} left out, as this run goes on from a checkpoint: it keeps the learning "
                "rate found before; a batch size found before has to be given, as data.batch_size"
            )


def searches_at_start(callback: callbacks.Callback) -> bool:
    """Not a subclass that searches later, as in certain epochs."""
    kinds = [kind for kind in SEARCHES if isinstance(callback, kind)]
    return any(type(callback).on_fit_start is kind.on_fit_start for kind in kinds)


class KeepsPatience(callbacks.Callback):
    """An EarlyStopping has the patience that it is given now, where Lightning takes that of the
    checkpoint. Warns when there is no validation after which one could stop.

    No subclass of EarlyStopping: one in a module's configure_callbacks would not replace it.
    """

    def on_train_start(self, trainer: pl.Trainer, pl_module: pl.LightningModule) -> None:
        for stop in trainer.early_stopping_callbacks:
            if not stop._check_on_train_epoch_end and not trainer.enable_validation:
                rank_zero_warn(
                    f"nothing is validated, so {stop.monitor} stops nothing: "
                    "~callbacks.early_stopping leaves it out"
                )

    def on_load_checkpoint(
        self, trainer: pl.Trainer, pl_module: pl.LightningModule, checkpoint: dict[str, Any]
    ) -> None:
        for stop in trainer.early_stopping_callbacks:
            if state := checkpoint["callbacks"].get(stop.state_key):
                state["patience"] = stop.patience


class TellsOfAnotherSplit(callbacks.Callback):
    """Warns where `data.split_seed` is not the checkpoint's: samples that it trained may be among
    those to validate and to test then."""

    def on_load_checkpoint(
        self, trainer: pl.Trainer, pl_module: pl.LightningModule, checkpoint: dict[str, Any]
    ) -> None:
        data = trainer.datamodule  # type: ignore[attr-defined]
        then = checkpoint.get("datamodule_hyper_parameters", {}).get("split_seed")
        now = data.hparams.get("split_seed", then) if data is not None else then
        if then is not None and then != now:
            rank_zero_warn(
                f"data.split_seed={now}: the checkpoint was trained with {then}: of the samples "
                "that it trained, some may be among those to validate and to test now"
            )


class EvaluatesAverages(callbacks.Callback):
    """Tests and predicts with the averages in a checkpoint of Lightning's WeightAveraging (EMA),
    which itself, after a training, loads those weights that training would go on with."""

    def on_load_checkpoint(
        self, trainer: pl.Trainer, pl_module: pl.LightningModule, checkpoint: dict[str, Any]
    ) -> None:
        if "current_model_state" in checkpoint and trainer.state.fn != TrainerFn.FITTING:
            strict = pl_module.strict_loading
            trainer.strategy.load_model_state_dict(checkpoint, strict=strict)


class GoesOnInItsEpoch(callbacks.Callback):
    """A resume begins where the run before ended, by the checkpoint's counts of epochs and batches.

    After the end of an epoch that is the next epoch. With max_steps Lightning comes to that end
    again (`FitLoop.restarting`): schedules step twice, or a batch too many is trained.

    Within an epoch that max_steps, max_time or a callback has cut short, that is its next batch.
    Lightning takes the last checkpoint for that of a whole epoch, and leaves out what is left.
    """

    def on_load_checkpoint(
        self, trainer: pl.Trainer, pl_module: pl.LightningModule, checkpoint: dict[str, Any]
    ) -> None:
        if trainer.state.fn != TrainerFn.FITTING:
            return
        if not (loop := checkpoint.get("loops", {}).get("fit_loop")):
            return  # it says nothing of epochs
        epochs, batches = loop["epoch_progress"], loop["epoch_loop.batch_progress"]
        if epochs["current"]["processed"] != epochs["current"]["started"]:
            return  # written within an epoch, where Lightning goes on
        cut_short = batches["current"]["ready"] and not batches["is_last_batch"]
        if cut_short:  # it has not ended
            for counts in (epochs["total"], epochs["current"]):
                counts["processed"] -= 1
        elif trainer.max_steps != -1:  # it has, and no batch of the next one was trained
            for counts in (epochs["total"], epochs["current"]):
                counts["completed"] = counts["processed"]
            batches["current"] = dict.fromkeys(batches["current"], 0)
            batches["is_last_batch"] = False


class BeginsWithinEpochs(callbacks.Callback):
    """Calls on_train_epoch_start of some callbacks where a run goes on within an epoch: Lightning
    calls it only where one starts. There GradientAccumulationScheduler says how many batches are
    accumulated, and SWA puts its schedule in, or begins its pass that only measures means for
    batch norm."""

    def on_train_start(self, trainer: pl.Trainer, pl_module: pl.LightningModule) -> None:
        if trainer.fit_loop.restarted_mid_epoch:
            self.__dict__.pop("on_train_batch_start", None)  # the method again
        else:
            self._leave_out_batches()

    def on_train_batch_start(
        self, trainer: pl.Trainer, pl_module: pl.LightningModule, *_: Any
    ) -> None:
        # Only now: behind an epoch's last batch, Lightning has first to begin another epoch.
        self._leave_out_batches()
        for callback in trainer.callbacks:  # type: ignore[attr-defined]
            if isinstance(callback, BEGIN_WITH_EPOCHS):
                callback.on_train_epoch_start(trainer, pl_module)

    def _leave_out_batches(self) -> None:
        self.__dict__["on_train_batch_start"] = None  # as runs/hooks.py does


class KeepsUnfrozen(callbacks.Callback):
    """What a BackboneFinetuning has unfrozen stays so after a resume, and its running means move.
    Lightning freezes it in `setup` and unfreezes it as one certain epoch begins, which a run
    resumed after that never reaches."""

    def on_save_checkpoint(
        self, trainer: pl.Trainer, pl_module: pl.LightningModule, checkpoint: dict[str, Any]
    ) -> None:
        if _finetunes(trainer):
            named = pl_module.named_parameters()
            checkpoint["frozen"] = [name for name, p in named if not p.requires_grad]
            checkpoint["untracked"] = [
                name for name, layer in _norms(pl_module) if not layer.track_running_stats
            ]

    def on_load_checkpoint(
        self, trainer: pl.Trainer, pl_module: pl.LightningModule, checkpoint: dict[str, Any]
    ) -> None:
        # Without the callback, nothing was frozen in `setup`.
        if "frozen" in checkpoint and _finetunes(trainer):
            for name, parameter in pl_module.named_parameters():
                parameter.requires_grad = name not in checkpoint["frozen"]
            for name, layer in _norms(pl_module):
                layer.track_running_stats = name not in checkpoint["untracked"]


def _finetunes(trainer: pl.Trainer) -> bool:
    others = trainer.callbacks  # type: ignore[attr-defined]
    return any(isinstance(callback, callbacks.BaseFinetuning) for callback in others)


def _norms(module: nn.Module) -> list[tuple[str, _BatchNorm]]:
    named = module.named_modules()
    return [(name, layer) for name, layer in named if isinstance(layer, _BatchNorm)]


class StepsPlateausFirst(callbacks.Callback):
    """ReduceLROnPlateau steps before the checkpoints of an epoch's end are written, and also in an
    epoch that was resumed within. Lightning steps it after them, and in such an epoch not at all:
    a resumed run would train on with other rates.
    """

    def on_train_start(self, trainer: pl.Trainer, pl_module: pl.LightningModule) -> None:
        # With the first that keeps checkpoints: they come last, when the module's own hook has
        # logged, too. A callback of ours there would be what trainer.checkpoint_callback is.
        if (first := trainer.checkpoint_callback) is not None:
            then = partial(type(first).on_train_epoch_end, first)
            first.on_train_epoch_end = partial(_step_plateaus, then)  # type: ignore[method-assign]


def _step_plateaus(then: Callable, trainer: pl.Trainer, pl_module: pl.LightningModule) -> None:
    loop = trainer.fit_loop
    monitored = [
        config.monitor
        for config in trainer.lr_scheduler_configs
        if config.reduce_on_plateau and config.interval == "epoch"
    ]
    # Where a metric is missing, Lightning says so; or the checkpoint was written when all were
    # there.
    there = set(monitored) <= trainer.callback_metrics.keys()
    if monitored and there and loop.epoch_loop._num_ready_batches_reached():
        loop.epoch_loop.update_lr_schedulers("epoch", update_plateau_schedulers=True)
        loop._restarting = True  # until this epoch is left: Lightning does not step again
    then(trainer, pl_module)


OF_EACH_RUN = (
    TellsOfAnotherSplit, EvaluatesAverages, BeginsWithinEpochs, GoesOnInItsEpoch, KeepsPatience,
    KeepsUnfrozen, StepsPlateausFirst,
)  # fmt: skip


def keeping(trainer: pl.Trainer) -> callbacks.ModelCheckpoint | None:
    """The first callback that keeps the best, else the first that keeps checkpoints.
    Trainer.checkpoint_callback may be one of ours that only want a turn after all others."""
    keepers = (c for c in trainer.checkpoint_callbacks if isinstance(c, callbacks.ModelCheckpoint))
    return min(keepers, key=lambda keeper: keeper.monitor is None, default=None)


def save_average(trainer: pl.Trainer) -> str | None:
    """Write averaged.ckpt, of the weights that StochasticWeightAveraging leaves, which no other
    checkpoint has; None without it, or if training ended before the average was made."""
    checkpointer = keeping(trainer)
    averaging = [
        callback
        for callback in trainer.callbacks  # type: ignore[attr-defined]
        if isinstance(callback, callbacks.StochasticWeightAveraging)
    ]
    if not averaging or not checkpointer or not checkpointer.dirpath:
        return None
    swa = averaging[0]
    begun = swa.n_averaged is not None or swa._init_n_averaged  # the latter: by the checkpoint
    end = swa.swa_end  # infinite where no number of epochs was given
    if not begun or not (end == math.inf or trainer.current_epoch > end):
        return None
    assert swa._average_model is not None
    swa.transfer_weights(swa._average_model, trainer.lightning_module)  # if nothing was left to do
    file = Path(checkpointer.dirpath) / "averaged.ckpt"
    trainer.save_checkpoint(file, weights_only=True)
    return str(file)


def settings(trainer: pl.Trainer) -> dict[str, list[Any]]:
    """What optimizers and schedulers were made with and checkpoints keep, e.g. {"SGD.momentum":
    [0.9]}: a value for each group of parameters."""
    by_name: dict[str, list[Any]] = {}
    for optimizer in trainer.optimizers:
        for group in optimizer.param_groups:
            scheduled = ("betas", "momentum") if "max_momentum" in group else ()  # OneCycleLR's
            for key, value in group.items():
                if key not in (*NO_SETTINGS, *scheduled, "max_momentum", "base_momentum"):
                    by_name.setdefault(f"{type(optimizer).__name__}.{key}", []).append(value)
    for config in trainer.lr_scheduler_configs:
        scheduler = config.scheduler
        takes = inspect.signature(type(scheduler)).parameters.keys() - {"last_epoch", "optimizer"}
        for key, value in scheduler.state_dict().items():
            if key in takes:
                by_name.setdefault(f"{type(scheduler).__name__}.{key}", []).append(value)
    return by_name


def kept_settings(trainer: pl.Trainer, asked: dict[str, list[Any]]) -> str:
    """Those settings that are the checkpoint's and not as `asked`, in words; "" if there are none.

    Raises:
        Refusal: for a checkpoint of another kind of optimizer, which would fail in its first step.
    """
    for optimizer in trainer.optimizers:
        for group in optimizer.param_groups:
            defaults = getattr(optimizer, "defaults", {})  # what wraps another may have none
            if missing := [key for key in defaults if key not in (*group, *NO_SETTINGS)]:
                raise Refusal(
                    f"ckpt_path: the checkpoint is of another optimizer than "
                    f"{type(optimizer).__name__}: it has no {', '.join(missing)}; go on with the "
                    "one that it was trained with"
                )
    current = settings(trainer)
    return ", ".join(
        f"{name} {_told(current[name])} (not {_told(values)})"
        for name, values in asked.items()
        if name in current and _told(current[name]) != _told(values)
    )


def warn_of_short_schedules(trainer: pl.Trainer) -> None:
    """Tell at once of a OneCycleLR that the checkpoint has made too short, as that of a run with a
    larger global batch: torch fails when its steps are over."""
    epochs, steps = trainer.max_epochs or -1, trainer.max_steps
    per_epoch = trainer.num_training_batches / trainer.accumulate_grad_batches
    # At least so many steps are left: what is left of an epoch that has begun does not count.
    progress = trainer.fit_loop.epoch_loop.batch_progress
    begun = progress.current.ready > 0 and not progress.is_last_batch
    by_epochs = (epochs - trainer.current_epoch - begun) * per_epoch if epochs != -1 else math.inf
    by_steps = steps - trainer.global_step if steps != -1 else math.inf
    left = min(by_epochs, by_steps)
    for config in trainer.lr_scheduler_configs:
        schedule = config.scheduler
        if not isinstance(schedule, OneCycleLR) or config.interval != "step" or math.isinf(left):
            continue
        if schedule.last_epoch + left / config.frequency > schedule.total_steps:
            rank_zero_warn(
                f"OneCycleLR has {schedule.total_steps} steps, as the checkpoint has it, and this "
                "training makes more: it would fail after them; give the global batch size and "
                f"epochs of before, or trainer.max_steps={schedule.total_steps}"
            )


def _told(values: list[Any]) -> str:
    return ", ".join(dict.fromkeys(map(str, values)))

"""What a run says at its start and end, and the summary that it leaves."""

from __future__ import annotations

import contextlib
import importlib.metadata
import json
import math
import socket
import subprocess
import time
from collections import Counter
from pathlib import Path
from typing import Any

import pytorch_lightning as pl
import torch
from omegaconf import DictConfig
from pytorch_lightning.callbacks import EarlyStopping
from pytorch_lightning.callbacks.early_stopping import EarlyStoppingReason
from pytorch_lightning.loggers import TensorBoardLogger
from pytorch_lightning.trainer.connectors.logger_connector.result import _Metadata
from torch import Tensor
from torch.utils._pytree import tree_leaves
from torch.utils.data import DataLoader, DistributedSampler, IterableDataset

from runs.anatomy import Anatomy
from runs.beforehand import (
    classes_of,
    is_sized,
    refuse_batch_sampler,
    refuse_clashes,
    refuse_classes,
    refuse_model,
    refuse_shares,
)
from runs.folders import ROOT, shown
from runs.mistakes import no_metric
from runs.predictions import Predictions
from runs.ranks import gather_texts, same_on_all
from runs.resuming import kept_settings, settings

PACKAGES = ["torch", "torchvision", "pytorch-lightning", "torchmetrics", "horovod", "hydra-core"]

SLOW = ("advanced", "pytorch", "trace")  # profilers that steps take longer with


class Report(pl.Callback):
    """Tells what runs and how it ended, on rank 0; counts samples and the seconds they took.

    Args:
        config: of the whole job.
        choices: which file of each group of conf/ was taken.

    Attributes:
        started: whether a batch was trained or evaluated, be it to check the validation.
        trained: whether a batch was trained.
    """

    def __init__(self, config: DictConfig, choices: dict[str, str]) -> None:
        self.config = config
        self.choices = choices
        self.started = self.trained = False
        self.hosts: dict[str, int] = {}
        self._asked: dict[str, list[Any]] = {}  # settings of optimizers and schedulers
        self.metrics: dict[str, float] = {}
        self.samples = self.epochs = self.steps = self.first_step = self.first_epoch = 0
        self.batches = 0
        self._first_logged = 0
        self._validated = self._has_loss = False
        self.seconds = 0.0
        self.train_samples: int | None = None
        self.classes: list[str] = []
        self.drop_last = False
        self._lr = ""
        self._clock: float | None = None
        self._epoch_began = (0, 0.0)  # samples and seconds until then

    # ---------------------------------------------------------------- before the first batch

    def setup(self, trainer: pl.Trainer, pl_module: pl.LightningModule, stage: str) -> None:
        profiler = trainer.profiler  # type: ignore[attr-defined]
        if profiler.dirpath:  # under DDP it is only now that ranks hear of the run's folder
            profiler.dirpath = trainer.strategy.broadcast(profiler.dirpath)
        data = trainer.datamodule  # type: ignore[attr-defined]
        if data is None:
            return
        refuse_clashes(trainer, pl_module, data)
        if stage != "fit":
            return
        refuse_model(trainer, pl_module, data, self.config.test, self.choices["model"])
        loader = data.train_dataloader()
        refuse_shares(trainer, data, loader, self.config.test, self.choices["data"])
        refuse_batch_sampler(trainer, loader, self.choices["data"])
        self.classes = classes_of(loader)
        refuse_classes(pl_module, self.classes, self.choices["data"])
        if is_sized(loader):
            self.train_samples, self.drop_last = len(loader.dataset), loader.drop_last
        else:  # a stream may know how many it has for all ranks
            self.train_samples = getattr(getattr(loader, "dataset", None), "samples", None)

    def on_sanity_check_end(self, trainer: pl.Trainer, pl_module: pl.LightningModule) -> None:
        """Warn of a metric whose lack would end the run an epoch later; some are not logged yet."""
        logged = list(trainer.callback_metrics)  # on all ranks: it may be reduced over them
        # What a sanity check logs of each of several loaders Lightning keeps to itself.
        results = trainer.fit_loop.epoch_loop.val_loop._results.values()
        logged += [_name_of(result.meta) for result in results]
        callbacks = self.config.get("callbacks") or {}
        members = [member for member in callbacks.values() if isinstance(member, DictConfig)]
        for metric in dict.fromkeys(str(member.get("monitor")) for member in members):
            if metric.startswith("val") and metric not in logged and trainer.is_global_zero:
                problem = no_metric(metric, logged, callbacks)
                print(f"warning {problem}; as it is, the run ends with an epoch", flush=True)

    def _announce(self, trainer: pl.Trainer, pl_module: pl.LightningModule) -> None:
        if self.hosts:
            return
        strategy = trainer.strategy
        self._lr, self._asked = _lr(pl_module), settings(trainer)
        self.hosts = dict(Counter(gather_texts(strategy, socket.gethostname())))
        if not trainer.is_global_zero:
            return
        ranks = trainer.world_size
        batch, windows = self.config.data.get("batch_size"), trainer.accumulate_grad_batches
        parameters = sum(parameter.numel() for parameter in pl_module.parameters())
        samples = ""
        if self.train_samples:
            names = ", ".join(self.classes[:3]) + (", ..." if len(self.classes) > 3 else "")
            of = f" of {_counted(len(self.classes), 'class')} ({names})" if self.classes else ""
            samples = f", {self.train_samples:,} samples{of} to train"
        hosts = ", ".join(f"{count} on {host}" for host, count in self.hosts.items())
        operations = getattr(strategy, "operations", None)
        over = f" over {operations}" if operations and ranks > 1 else ""
        device = str(strategy.root_device)
        if strategy.root_device.type == "cuda":
            device = f"{torch.cuda.get_device_name(strategy.root_device)} ({device})"
        whole = ""
        if batch:
            accumulated = f" x {windows} accumulated" if windows > 1 else ""
            whole = f"{batch} a process x {_counted(ranks, 'rank')}{accumulated}"
            whole += f" = {batch * ranks * windows} global"
        lr = f", lr {self._lr}" if trainer.optimizers else ""  # none where nothing is trained
        _tell(
            {
                "model": f"{self.choices['model']}, {parameters:,} parameters{lr}",
                "data": f"{self.choices['data']}{samples}",
                "ranks": f"{ranks}: {hosts}; strategy {self.choices['strategy']}{over}",
                "device": f"{device}, precision {trainer.precision}",
                "batch": whole,
                "from": shown(Path(self.config.ckpt_path)) if self.config.ckpt_path else "",
                "run": shown(Path(self.config.run_dir)),
                "look": "make tensorboard" if self.config.train and _has_curves(trainer) else "",
            }
        )

    on_fit_start = on_test_start = on_predict_start = _announce

    # ---------------------------------------------------------------- counting

    def on_train_start(self, trainer: pl.Trainer, pl_module: pl.LightningModule) -> None:
        self.first_step, self.first_epoch = trainer.global_step, trainer.current_epoch
        self._first_logged = trainer.fit_loop.epoch_loop._batches_that_stepped
        self._begin_epoch()  # on_train_epoch_start is left out when a run resumes within an epoch
        if self.config.ckpt_path and trainer.is_global_zero and _lr(pl_module) != self._lr:
            print(f"lr      {_lr(pl_module)}, as the checkpoint has it", flush=True)
        kept = kept_settings(trainer, self._asked) if self.config.ckpt_path else ""
        if kept and trainer.is_global_zero:
            print(f"kept    {kept}, as the checkpoint has it", flush=True)

    def _start(self, *_: Any, **__: Any) -> None:
        self.started = True

    on_train_batch_start = on_validation_batch_start = _start
    on_test_batch_start = on_predict_batch_start = _start

    def on_train_epoch_start(self, trainer: pl.Trainer, pl_module: pl.LightningModule) -> None:
        self._begin_epoch()

    def _begin_epoch(self) -> None:
        self._clock = time.monotonic()
        self._epoch_began = self.samples, self.seconds

    def on_train_batch_end(self, trainer: pl.Trainer, *arguments: Any) -> None:
        self.batches += 1
        _, outputs, batch, *_ = arguments
        self._has_loss |= isinstance(outputs, Tensor) or bool(outputs)
        tensors = [leaf for leaf in tree_leaves(batch) if isinstance(leaf, Tensor) and leaf.dim()]
        self.samples += len(tensors[0]) if tensors else 0
        if not self.trained:
            self.trained = True
            self._compare_first(trainer, batch)

    def _compare_first(self, trainer: pl.Trainer, batch: Any) -> None:
        """The first batches of all ranks: Lightning splits data sets over ranks, and no stream, nor
        what has a sampler of its own with use_distributed_sampler=false."""
        loaders = [x for x in tree_leaves(trainer.train_dataloader) if isinstance(x, DataLoader)]
        whole = [loader for loader in loaders if not _is_share(loader)]
        if not whole or trainer.world_size == 1:
            return
        if same_on_all(trainer.strategy, batch) and trainer.is_global_zero:
            stream = isinstance(whole[0].dataset, IterableDataset)
            source = whole[0].dataset if stream else whole[0].batch_sampler or whole[0].sampler
            print(
                f"warning data={self.choices['data']}: all {trainer.world_size} ranks were given "
                f"the same first batch: {type(source).__name__} has to yield each rank's share "
                "itself, by trainer.global_rank (README, Put your data in)",
                flush=True,
            )

    def on_validation_start(self, trainer: pl.Trainer, pl_module: pl.LightningModule) -> None:
        self._stop_clock()
        self._validated |= not trainer.sanity_checking

    def on_validation_end(self, trainer: pl.Trainer, pl_module: pl.LightningModule) -> None:
        if trainer.state.fn == "fit" and not trainer.sanity_checking:
            self._clock = time.monotonic()

    def on_train_epoch_end(self, trainer: pl.Trainer, pl_module: pl.LightningModule) -> None:
        self._stop_clock()
        samples, seconds = self.samples - self._epoch_began[0], self.seconds - self._epoch_began[1]
        last_step = trainer.fit_loop.epoch_loop._batches_that_stepped - 1
        for logger in trainer.loggers:
            rate = {"samples_per_second": samples * trainer.world_size / seconds}
            logger.log_metrics(rate, step=last_step)

    def _stop_clock(self) -> None:
        if self._clock is not None:
            self.seconds += time.monotonic() - self._clock
            self._clock = None

    def on_train_end(self, trainer: pl.Trainer, pl_module: pl.LightningModule) -> None:
        self._stop_clock()
        total = torch.tensor(self.samples, device=trainer.strategy.root_device)
        self.samples = int(trainer.strategy.reduce(total, reduce_op="sum"))
        self.epochs, self.steps = trainer.current_epoch, trainer.global_step
        self.metrics |= _plain(trainer.callback_metrics)
        stepped = self._has_loss and self.steps > self.first_step
        stepped |= not pl_module.automatic_optimization  # by hand, perhaps past the Trainer
        if trainer.is_global_zero and self.trained and not stepped:
            print(
                "warning no step was made: training_step has to return the loss, and batches must "
                "not be None",
                flush=True,
            )
        elif trainer.is_global_zero and trainer.loggers and self.trained:
            self._tell_of_no_curves(trainer)
        if trainer.is_global_zero and not self._validated:
            self._tell_of_no_validation(trainer)
        if trainer.is_global_zero and trainer.should_stop:
            for callback in trainer.early_stopping_callbacks:
                if callback.stopping_reason != EarlyStoppingReason.NOT_STOPPED:
                    reason = _why_stopped(callback)
                    print(f"stopped early: {callback.monitor} {reason}", flush=True)

    def _tell_of_no_validation(self, trainer: pl.Trainer) -> None:
        """A stream of unknown length has an epoch that may be shorter than what was asked for."""
        every, batches = trainer.check_val_every_n_epoch, trainer.val_check_interval
        trained = trainer.fit_loop.epoch_loop._batches_that_stepped - self._first_logged
        if not (trainer.enable_validation and isinstance(batches, int) and trained >= batches):
            return
        if every and self.epochs - self.first_epoch >= every:
            print(
                "nothing was validated: no epoch has as many batches as trainer.val_check_interval="
                f"{batches}; check_val_every_n_epoch=null has them counted over epochs",
                flush=True,
            )

    def _tell_of_no_curves(self, trainer: pl.Trainer) -> None:
        every = trainer.log_every_n_steps  # type: ignore[attr-defined]
        if not every or trainer.fast_dev_run:  # type: ignore[attr-defined]
            return
        # Loggers count a step for each batch, also where several optimizers step.
        last = trainer.fit_loop.epoch_loop._batches_that_stepped
        if last // every == self._first_logged // every:
            print(
                f"curves  have no step of training: {_counted(last - self._first_logged, 'step')}, "
                f"and trainer.log_every_n_steps is {every}; give a smaller one",
                flush=True,
            )

    def on_fit_end(self, trainer: pl.Trainer, pl_module: pl.LightningModule) -> None:
        if self.trained or not trainer.is_global_zero:
            return
        if self.config.ckpt_path:
            why = (
                f"the checkpoint has {trainer.current_epoch} of {trainer.max_epochs} epochs, "
                f"{trainer.global_step} steps; to go on give a larger trainer.max_epochs, or "
                "max_steps or max_time where that ended it"
            )
        else:
            why = (
                f"trainer.max_epochs is {trainer.max_epochs}, max_steps {trainer.max_steps}, "
                f"limit_train_batches {trainer.limit_train_batches}; the weights are those that "
                "the model began with"
            )
        print(f"nothing was trained: {why}", flush=True)

    def on_test_end(self, trainer: pl.Trainer, pl_module: pl.LightningModule) -> None:
        self.metrics |= _plain(trainer.callback_metrics)

    # ---------------------------------------------------------------- the end

    def on_exception(
        self, trainer: pl.Trainer, pl_module: pl.LightningModule, exception: BaseException
    ) -> None:
        # What was trained, and tested, before is told all the same.
        trained, tested = self.config.train, self.config.test and trainer.predicting
        if trainer.state.fn != "fit" and (trained or tested):
            self.finish(trainer, trainer.ckpt_path)  # type: ignore[arg-type]

    def finish(self, trainer: pl.Trainer, checkpoint: str | None) -> None:
        """Print the last lines and write summary.json; on rank 0.

        Args:
            checkpoint: what was tested; None: the weights as training left them.
        """
        if not trainer.is_global_zero:
            return
        callbacks = trainer.callbacks  # type: ignore[attr-defined]
        anatomy = next((c.found for c in callbacks if isinstance(c, Anatomy)), None)
        predicted = next((c for c in callbacks if isinstance(c, Predictions)), None)
        predictions = predicted.file if predicted else None
        file = Path(self.config.run_dir) / "summary.json"
        unfinished = file.with_suffix(".part")
        summary = self._summary(trainer, checkpoint, anatomy, predictions)
        unfinished.write_text(json.dumps(summary, indent=2) + "\n")
        unfinished.rename(file)
        tests = [f"{k} {v:.4g}" for k, v in self.metrics.items() if k.startswith("test/")]
        predict, speed, step, limit = "", "", "", ""
        if predicted and predictions:
            predict = f"{shown(predictions)}: {predicted.samples:,} samples"
            predict += "; their files in predictions.csv" if predicted.names_files else ""
        if self.samples:
            speed = (
                f"{self._rate:,.0f} samples/s: {_counted(self.steps - self.first_step, 'step')}, "
                f"{_counted(self.epochs - self.first_epoch, 'epoch')} in {self.seconds:.1f} s of "
                f"training on {_counted(trainer.world_size, 'rank')}"
            )
        if anatomy and self.choices.get("profiler") not in SLOW:
            parts = [f"{k} {share:.0%}" for k, share in anatomy["shares"].items() if share >= 0.01]
            ms = f"{anatomy['step_ms']['median']:.1f} ms"
            if self.batches != self.steps - self.first_step:  # the median one may make no step
                ms = f"{anatomy['step_ms']['mean']:.1f} ms a batch"
            step = f"{ms}: {', '.join(parts)}".replace("_", "-")
            limit = anatomy["verdict"]
        _tell(
            {
                "test": "  ".join(tests),
                "predict": predict,
                "speed": speed,
                "step": step,
                "limit": limit,
                "profile": _tables(trainer),
                "summary": shown(file),
            }
        )

    @property
    def _rate(self) -> float:
        """Samples a second."""
        return self.samples / self.seconds if self.seconds else 0.0

    def _summary(
        self, trainer: pl.Trainer, checkpoint: str | None, anatomy: dict[str, Any] | None,
        predictions: Path | None,
    ) -> dict[str, Any]:  # fmt: skip
        """What summary.json holds."""
        batch, windows = self.config.data.get("batch_size"), trainer.accumulate_grad_batches
        return {
            "world_size": trainer.world_size,
            "hosts": self.hosts,
            "strategy": self.choices["strategy"],
            "model": self.choices["model"],
            "data": self.choices["data"],
            "train": self.config.train,
            "epochs": self.epochs,
            "steps": self.steps,
            "global_batch_size": batch and batch * trainer.world_size * windows,
            "accumulate_grad_batches": windows,
            "train_samples": self.train_samples,
            "classes": self.classes or None,
            "drop_last": self.drop_last,
            "operations": getattr(trainer.strategy, "operations", None),
            "train_seconds": round(self.seconds, 3),
            "samples_per_second": round(self._rate, 1),
            "anatomy": anatomy,
            # JSON has no NaN.
            "metrics": {k: v if math.isfinite(v) else None for k, v in self.metrics.items()},
            "checkpoint": checkpoint,
            "predictions": str(predictions) if predictions else None,
            "versions": _versions(),
            "git": _git(),
        }


def _tell(lines: dict[str, str]) -> None:
    """A line for each that has something to say, its name before it."""
    for name, text in lines.items():
        if text:
            print(f"{name:<7} {text}", flush=True)


def _tables(trainer: pl.Trainer) -> str:
    """Where the profiler has left its tables; "" without."""
    profiler = trainer.profiler  # type: ignore[attr-defined]
    if not (profiler.dirpath and profiler.filename):
        return ""
    tables = sorted(Path(profiler.dirpath).glob(f"*-{profiler.filename}*.txt"))
    names = ", ".join(table.name for table in tables)
    return f"{shown(Path(profiler.dirpath))}: {names}" if tables else ""


def _why_stopped(callback: EarlyStopping) -> str:
    if callback.stopping_reason == EarlyStoppingReason.PATIENCE_EXHAUSTED:
        best = float(callback.best_score)
        return f"has not improved for {callback.patience} validations (best {best:.4g})"
    if callback.stopping_reason == EarlyStoppingReason.NON_FINITE_METRIC:
        return "is no finite number any more; debug=anomaly finds where that begins"
    return f"has reached its end: {callback.stopping_reason_message}"


def _name_of(logged: _Metadata) -> str:
    """What callbacks call it."""
    indexed = logged.dataloader_idx is not None and logged.add_dataloader_idx
    return f"{logged.name}/dataloader_idx_{logged.dataloader_idx}" if indexed else logged.name


def _is_share(loader: DataLoader) -> bool:
    samplers = loader.sampler, getattr(loader.batch_sampler, "sampler", None)
    return any(isinstance(sampler, DistributedSampler) for sampler in samplers)


def _lr(module: pl.LightningModule) -> str:
    groups = [group for o in module.trainer.optimizers for group in o.param_groups]
    # A schedule may begin lower, to warm up; it leaves the rate itself in initial_lr, OneCycleLR in
    # max_lr.
    rates = dict.fromkeys(g.get("max_lr", g.get("initial_lr", g.get("lr"))) for g in groups)
    # Of an optimizer that finds its own, as Adafactor with relative steps, it is None.
    return ", ".join("none" if lr is None else f"{lr:g}" for lr in rates) or "none"


def _counted(number: int, what: str) -> str:
    ending = "" if number == 1 else "es" if what.endswith("s") else "s"
    return f"{number} {what}{ending}"


def _has_curves(trainer: pl.Trainer) -> bool:
    return any(isinstance(logger, TensorBoardLogger) for logger in trainer.loggers)


def _plain(metrics: Any) -> dict[str, float]:
    return {name: float(value) for name, value in metrics.items() if value.numel() == 1}


def _versions() -> dict[str, str]:
    installed = {}
    for name in PACKAGES:
        with contextlib.suppress(importlib.metadata.PackageNotFoundError):
            installed[name] = importlib.metadata.version(name)
    return installed


def _git() -> str | None:
    """The commit, with -dirty behind it when files differ from it; None outside a repository."""
    # In a container the checkout may be another user's.
    command = ["git", "-c", "safe.directory=*", "-C", str(ROOT), "describe", "--always"]
    command += ["--dirty", "--abbrev=40", "--exclude=*"]  # a tag would take the commit's place
    try:
        result = subprocess.run(command, capture_output=True, text=True)
    except OSError:
        return None
    return result.stdout.strip() or None

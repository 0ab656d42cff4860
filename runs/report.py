"""The lines that a run prints at its start and end, and summary.json."""

from __future__ import annotations

import copy
import json
import math
import shlex
import socket
import time
from collections import Counter
from collections.abc import Sized
from pathlib import Path
from typing import Any

import pytorch_lightning as pl
import torch
from omegaconf import DictConfig
from pytorch_lightning.callbacks import BatchSizeFinder
from pytorch_lightning.loggers import TensorBoardLogger
from torch import Tensor
from torch.utils.data import BatchSampler

from runs import beforehand, hints
from runs.anatomy import Anatomy
from runs.folders import ROOT, shown, whole
from runs.hints import counted
from runs.predictions import Predictions
from runs.progress import plain
from runs.ranks import gather_objects, leaves
from runs.refusal import Refusal
from runs.resuming import (
    kept_settings,
    searches_at_start,
    settings,
    warn_of_short_schedules,
)
from runs.versions import commit, versions

MOST_HOSTS = 4  # that are named; summary.json has all
SLOW = ("advanced", "pytorch", "trace")  # profilers that make steps longer


class Report(pl.Callback):
    """Prints on rank 0 what runs and how it ended; counts samples and the seconds they took.

    Args:
        config: of the whole job.
        choices: which file of each group of conf/ was taken.

    Attributes:
        started: whether a batch was trained or evaluated, be it in the sanity check.
        trained: whether a batch was trained.
        batch_size: of a process: the loader's, else data.batch_size.
        samples: trained in this run, by this rank; when training has ended, by all.
        seconds: that their training took, without evaluations.
        epochs, steps: of the training so far, with those before a resume.
    """

    def __init__(self, config: DictConfig, choices: dict[str, str]) -> None:
        self.config = config
        self.choices = choices
        self.started = self.trained = False
        self.hosts: dict[str, int] = {}  # and how many ranks each has
        self.metrics: dict[str, float] = {}
        self.samples = self.batches = self.epochs = self.steps = 0
        self.seconds = 0.0
        self.batch_size: int | None = None
        self.train_samples: int | None = None
        self.classes: list[str] = []
        self.drop_last = False
        # Where this run began: in steps of optimizers, epochs, and batches as loggers count them.
        self._first_step = self._first_epoch = self._first_batch = 0
        # Before a checkpoint replaces them: settings of optimizers and schedulers, learning rates.
        self._asked: dict[str, list[Any]] = {}
        self._lr = ""
        self._validated = self._has_loss = False
        self._clock: float | None = None  # when training went on last
        self._epoch_began = (0, 0.0)  # samples and seconds until then

    # ---------------------------------------------------------------- before the first batch

    def setup(self, trainer: pl.Trainer, pl_module: pl.LightningModule, stage: str) -> None:
        profiler = trainer.profiler  # type: ignore[attr-defined]
        if profiler.dirpath:  # under DDP only now can ranks hear of the run's folder
            profiler.dirpath = trainer.strategy.broadcast(profiler.dirpath)
        data = trainer.datamodule  # type: ignore[attr-defined]
        if data is None:
            return
        beforehand.refuse_clashes(trainer, pl_module, data)
        if stage != "fit":
            return
        beforehand.refuse_model(trainer, pl_module, data, self.config.test, self.choices["model"])
        data = copy.copy(data)  # one that counts how often it is asked counts Lightning's calls
        loader = data.train_dataloader()
        beforehand.refuse_shares(trainer, data, loader, self.config.test, self.choices["data"])
        beforehand.refuse_batch_sampler(trainer, loader, self.choices["data"])
        self.batch_size = beforehand.batch_size_of(loader)
        self.classes = beforehand.classes_of(loader)
        beforehand.refuse_classes(pl_module, self.classes, self.choices["data"])
        if beforehand.is_sized(loader):
            self.train_samples = beforehand.samples_of(loader)
            self.drop_last = beforehand.drops_last(loader)
        else:  # a stream may know how many it has for all ranks
            samples = getattr(getattr(loader, "dataset", None), "samples", None)
            self.train_samples = samples if isinstance(samples, int) else None

    def on_sanity_check_end(self, trainer: pl.Trainer, pl_module: pl.LightningModule) -> None:
        """Warn of a missing metric, which would end the run an epoch later; it may still come."""
        problems = hints.missing_metrics(trainer, self.config.get("callbacks") or {})
        if trainer.is_global_zero:
            for problem in problems:
                _tell({"warning": f"{problem}; without it, the run fails after an epoch"})

    def _announce(self, trainer: pl.Trainer, pl_module: pl.LightningModule) -> None:
        if self.hosts:
            return  # already, before training
        self._lr, self._asked = _lr(pl_module), settings(trainer)
        self.hosts = dict(Counter(gather_objects(trainer.strategy, socket.gethostname())))
        asked, ranks = self.config.data.get("batch_size"), trainer.world_size
        self.batch_size = _found_batch_size(trainer) or self.batch_size or asked
        if not trainer.is_global_zero:
            return
        lr = f", lr {self._lr}" if trainer.optimizers else ""  # none where nothing is trained
        operations = getattr(trainer.strategy, "operations", None)
        over = f" over {operations}" if operations and ranks > 1 else ""
        strategy = f"{self.choices['strategy']}{over}"
        curves = any(isinstance(logger, TensorBoardLogger) for logger in trainer.loggers)
        _tell(
            {
                "model": f"{self.choices['model']}, {_size(pl_module)}{lr}",
                "data": f"{self.choices['data']}{self._samples_to_train()}",
                "ranks": f"{ranks}: {_places(self.hosts)}; strategy {strategy}",
                "device": f"{_named(trainer.strategy.root_device)}, precision {trainer.precision}",
                "batch": self._global_batch(trainer),
                "warning": hints.divided_batches(asked, self.batch_size, ranks)
                or hints.long_windows(trainer.accumulate_grad_batches, self._windows(trainer)),
                "from": shown(Path(self.config.ckpt_path)) if self.config.ckpt_path else "",
                "run": shown(Path(self.config.run_dir)),
                "look": _look(Path(self.config.run_dir)) if self.config.train and curves else "",
            }
        )

    on_fit_start = on_test_start = on_predict_start = _announce

    def _samples_to_train(self) -> str:
        if not self.train_samples:
            return ""
        names = ", ".join(self.classes[:3]) + (", ..." if len(self.classes) > 3 else "")
        of = f" of {counted(len(self.classes), 'class')} ({names})" if self.classes else ""
        return f", {self.train_samples:,} samples{of} to train"

    def _global_batch(self, trainer: pl.Trainer) -> str:
        batch, ranks = self.batch_size, trainer.world_size
        if not batch:
            return ""
        windows = self._windows(trainer)
        accumulated = f" x {windows} accumulated" if windows > 1 else ""
        factors = f"{batch} a process x {counted(ranks, 'rank')}{accumulated}"
        return f"{factors} = {batch * ranks * windows} global"

    def _windows(self, trainer: pl.Trainer) -> int:
        """Batches that are accumulated for a step, of which an epoch may have fewer."""
        asked = trainer.accumulate_grad_batches
        if not self.train_samples or not self.batch_size:
            return asked
        limit = trainer.limit_train_batches
        share = -(-self.train_samples // trainer.world_size)
        batches = share // self.batch_size if self.drop_last else -(-share // self.batch_size)
        batches = min(batches, limit) if isinstance(limit, int) else int(batches * limit)
        return min(asked, batches) or asked

    # ---------------------------------------------------------------- counting

    def on_train_start(self, trainer: pl.Trainer, pl_module: pl.LightningModule) -> None:
        self._first_step, self._first_epoch = trainer.global_step, trainer.current_epoch
        self._first_batch = trainer.fit_loop.epoch_loop._batches_that_stepped
        self._begin_epoch()  # on_train_epoch_start is left out when a run resumes within an epoch
        if not self.config.ckpt_path:
            return
        lr, kept = _lr(pl_module), kept_settings(trainer, self._asked)
        warn_of_short_schedules(trainer)
        changed = {"lr": lr if lr != self._lr else "", "kept": kept}
        if trainer.is_global_zero:
            _tell({k: f"{text}, as the checkpoint has it" for k, text in changed.items() if text})

    def _start(self, *_: Any, **__: Any) -> None:
        self.started = True

    on_train_batch_start = on_validation_batch_start = _start
    on_test_batch_start = on_predict_batch_start = _start

    def _begin_epoch(self, *_: Any, **__: Any) -> None:
        self._clock = time.monotonic()
        self._epoch_began = self.samples, self.seconds

    on_train_epoch_start = _begin_epoch

    def on_train_batch_end(
        self, trainer: pl.Trainer, module: pl.LightningModule, outputs: Any, batch: Any, index: int
    ) -> None:
        self.batches += 1
        self._has_loss |= isinstance(outputs, Tensor) or bool(outputs)
        self.samples += _samples(trainer.train_dataloader, batch, index)
        if not self.trained:
            self.trained = True
            if (problem := hints.same_batches(trainer, batch)) and trainer.is_global_zero:
                _tell({"warning": f"data={self.choices['data']}: {problem}"})

    def on_validation_start(self, trainer: pl.Trainer, pl_module: pl.LightningModule) -> None:
        self._stop_clock()
        self._validated |= not trainer.sanity_checking

    def on_validation_end(self, trainer: pl.Trainer, pl_module: pl.LightningModule) -> None:
        self._clock = time.monotonic()  # anew, where training only begins after a sanity check

    def on_train_epoch_end(self, trainer: pl.Trainer, pl_module: pl.LightningModule) -> None:
        self._stop_clock()
        if trainer.is_global_zero and trainer.current_epoch == self._first_epoch:
            _tell({"warning": hints.uncounted_steps(trainer, pl_module, self._first_step)})
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
        self.metrics |= plain(trainer.callback_metrics)
        if not trainer.is_global_zero:
            return
        stepped = self._has_loss and self.steps > self._first_step
        stepped |= not pl_module.automatic_optimization  # by hand, perhaps past the Trainer
        if self.trained and not stepped:
            _tell({"warning": hints.NO_STEP})
        elif self.trained:
            _tell({"curves": hints.no_curves(trainer, self._first_batch)})
        if not self._validated:
            epochs = self.epochs - self._first_epoch
            _tell({"warning": hints.no_validation(trainer, self.batches, epochs)})
        for reason in hints.stopped_early(trainer):
            print(f"stopped early: {reason}", flush=True)

    def on_fit_end(self, trainer: pl.Trainer, pl_module: pl.LightningModule) -> None:
        if not self.trained and trainer.is_global_zero:
            resumed = bool(self.config.ckpt_path)
            print(f"nothing was trained: {hints.not_trained(trainer, resumed)}", flush=True)

    def on_test_end(self, trainer: pl.Trainer, pl_module: pl.LightningModule) -> None:
        self.metrics |= plain(trainer.callback_metrics)

    # ---------------------------------------------------------------- the end

    def on_exception(
        self, trainer: pl.Trainer, pl_module: pl.LightningModule, exception: BaseException
    ) -> None:
        # What was trained or tested before the error is not lost.
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
        tests = [f"{k} {v:.4g}" for k, v in self.metrics.items() if k.startswith("test/")]
        lines = {"test": "  ".join(tests)}
        if predicted and predictions:
            also = "; their files in predictions.csv" if predicted.names_files else ""
            lines["predict"] = f"{shown(predictions)}: {predicted.samples:,} samples{also}"
        if self.samples:
            lines["speed"] = self._speed(trainer.world_size)
        if anatomy and self.choices.get("profiler") not in SLOW:
            lines |= {"step": self._step(anatomy), "limit": anatomy["verdict"]}
        lines["profile"] = _tables(trainer)
        summary = self._summary(trainer, checkpoint, anatomy, predictions)
        text = json.dumps(summary, indent=2) + "\n"
        file = Path(self.config.run_dir) / "summary.json"
        try:  # before the lines, which may find nobody who reads them
            with whole(file) as part:
                part.write(text.encode())
        except Refusal:  # whoever has no space left reads what came of the run
            _tell(lines)
            raise
        _tell({**lines, "summary": shown(file)})

    def _speed(self, ranks: int) -> str:
        return (
            f"{self._rate:,.0f} samples/s: {counted(self.steps - self._first_step, 'step')}, "
            f"{counted(self.epochs - self._first_epoch, 'epoch')} in {self.seconds:.1f} s of "
            f"training on {counted(ranks, 'rank')}"
        )

    def _step(self, anatomy: dict[str, Any]) -> str:
        parts = [f"{k} {share:.0%}" for k, share in anatomy["shares"].items() if share >= 0.01]
        unit = "ms" if self.batches == self.steps - self._first_step else "ms a batch"
        mean = anatomy["step_ms"]["mean"]  # as the shares are of all steps
        return f"{mean:.1f} {unit}: {', '.join(parts)}".replace("_", "-")

    @property
    def _rate(self) -> float:
        """Samples a second."""
        return self.samples / self.seconds if self.seconds else 0.0

    def _summary(
        self, trainer: pl.Trainer, checkpoint: str | None, anatomy: dict[str, Any] | None,
        predictions: Path | None,
    ) -> dict[str, Any]:  # fmt: skip
        """What summary.json holds."""
        batch, windows = self.batch_size, self._windows(trainer)
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
            "versions": versions(),
            "git": commit(),
        }


def _samples(loader: Any, batch: Any, index: int) -> int:
    """How many this rank's batch has, by the sampler of a DataLoader that makes batches as torch
    does; else by the first tensor, which is wrong where that holds tokens, or an image of a list.
    """
    batches = getattr(loader, "batch_sampler", None)
    batches = getattr(batches, "batches", batches)  # of a resumed epoch
    size, sampler = getattr(batches, "batch_size", None), getattr(batches, "sampler", None)
    plain = getattr(type(batches), "__iter__", None) is BatchSampler.__iter__
    if plain and isinstance(size, int) and isinstance(sampler, Sized):
        return min(size, max(0, len(sampler) - index * size))
    tensors = [leaf for leaf in leaves(batch) if isinstance(leaf, Tensor) and leaf.dim()]
    return len(tensors[0]) if tensors else 0


def _tell(lines: dict[str, str]) -> None:
    """Print those lines that are not empty, each behind its name."""
    for name, text in lines.items():
        if text:
            print(f"{name:<7} {text}", flush=True)


def _size(module: pl.LightningModule) -> str:
    """How many parameters it has, and how many of them are trained where some are not."""
    sizes: Counter[bool] = Counter()
    for parameter in module.parameters():
        sizes[parameter.requires_grad] += parameter.numel()
    some = module.trainer.optimizers and sizes[False]
    return f"{sizes.total():,} parameters" + (f" ({sizes[True]:,} trained)" if some else "")


def _named(device: torch.device) -> str:
    gpu = torch.cuda.get_device_name(device) if device.type == "cuda" else ""
    return f"{gpu} ({device})" if gpu else str(device)


def _found_batch_size(trainer: pl.Trainer) -> int | None:
    """What a BatchSizeFinder has found for this training; None without one."""
    all_ = trainer.callbacks if trainer.state.fn == "fit" else []  # type: ignore[attr-defined]
    searches = [c for c in all_ if isinstance(c, BatchSizeFinder) and searches_at_start(c)]
    return next((search.optimal_batch_size for search in searches), None)


def _places(hosts: dict[str, int]) -> str:
    """How many ranks are on each host; of many hosts the first and the last."""
    places = [f"{count} on {host}" for host, count in hosts.items()]
    if len(places) > MOST_HOSTS:
        places[2:-1] = ["..."]
    return ", ".join(places)


def _look(folder: Path) -> str:
    """The command that shows a run's curves; alone it shows those in logs/."""
    if folder.is_relative_to(ROOT / "logs"):
        return "make tensorboard"
    return f'make tensorboard ARGS="--logdir {shlex.quote(shown(folder))}"'


def _tables(trainer: pl.Trainer) -> str:
    """Where the profiler has left its tables; "" if it has none."""
    profiler = trainer.profiler  # type: ignore[attr-defined]
    if not (profiler.dirpath and profiler.filename):
        return ""
    tables = sorted(Path(profiler.dirpath).glob(f"*-{profiler.filename}*.txt"))
    names = ", ".join(table.name for table in tables)
    return f"{shown(Path(profiler.dirpath))}: {names}" if tables else ""


def _lr(module: pl.LightningModule) -> str:
    groups = [group for o in module.trainer.optimizers for group in o.param_groups]
    # A schedule that warms up begins lower and keeps the full rate in initial_lr, OneCycleLR in
    # max_lr.
    rates = dict.fromkeys(g.get("max_lr", g.get("initial_lr", g.get("lr"))) for g in groups)
    # An optimizer that finds its own rate, as Adafactor with relative steps, has None.
    return ", ".join("none" if lr is None else f"{lr:g}" for lr in rates) or "none"

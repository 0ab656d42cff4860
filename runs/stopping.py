"""Stop when asked to, with a checkpoint to go on from: make stop, Ctrl-C, a time limit.

A launcher asks by SIGUSR1, and Slurm, when it ends a job, by SIGTERM to all of its processes.
Without a launcher SIGTERM or Ctrl-C does; a second Ctrl-C ends at once. (A loader's workers get
what a terminal or Slurm sends as well: torch's go on if they were forked; others end, and with them
the run, without a checkpoint.)

The signal reaches ranks at different moments, and a checkpoint in the middle of an epoch needs all
of them at the same batch. So about once a second the ranks ask each other whether one was asked;
they also agree on how many batches lie between two questions. With accumulated gradients, which no
checkpoint holds, they ask only when a step is done; before a validation, only when it is done. An
evaluation is not interrupted: they ask after it. A test or a prediction, which changes no weights,
ends at once, as by Ctrl-C, and the run tells what is known until then.
"""

from __future__ import annotations

import atexit
import contextlib
import os
import signal
import time
from multiprocessing import active_children
from multiprocessing.util import register_after_fork
from pathlib import Path
from typing import Any

import pytorch_lightning as pl
import torch
from pytorch_lightning.callbacks import Checkpoint
from pytorch_lightning.trainer.states import TrainerFn
from pytorch_lightning.utilities.exceptions import SIGTERMException
from torch.utils.data._utils import signal_handling

from runs.refusal import launched_size

SIGNAL = signal.SIGUSR1
SECONDS = 1.0  # between questions
WORKER_SECONDS = 30  # that a loader's worker lives on after SIGTERM, as Slurm's KillWait


class Stopped(Exception):
    """Raised on all ranks when the checkpoint is written: its path, and the signal's number."""


def sigterm_asks() -> bool:
    """Whether SIGTERM asks for a checkpoint. A launcher ends ranks by it. Within Slurm it may come
    from the launcher or from Slurm, and both kill what is left some seconds later."""
    return launched_size() is None or "SLURM_JOB_ID" in os.environ


def outlive_signals(_: object) -> None:
    """A worker of torch's loaders, without which no step ends, passes over a terminal's Ctrl-C, and
    SIGTERM ends it only later."""

    def set_handlers() -> None:
        torchs()
        signal.signal(signal.SIGINT, signal.SIG_IGN)
        signal.signal(signal.SIGTERM, lambda *_: signal.alarm(WORKER_SECONDS))

    # torch: a worker sets its handlers after this, and has no other way to set ours behind them.
    torchs = signal_handling._set_worker_signal_handlers
    signal_handling._set_worker_signal_handlers = set_handlers  # of this process, a child


def end_workers() -> None:
    """At exit, before multiprocessing sends SIGTERM to those that are left, and waits for them."""
    signal.signal(signal.SIGCHLD, signal.SIG_DFL)  # torch's handler raises an error for each
    for process in active_children():
        with contextlib.suppress(OSError):  # it has just ended
            name = Path(f"/proc/{process.pid}/comm").read_bytes()
            if name == b"pt_data_worker\n":  # torch's
                process.kill()


class StopOnSignal(Checkpoint):
    """Write `checkpoint` and end, on all ranks, when one of them got the signal.

    It is a Checkpoint to come after the module's own hook at an epoch's end, which may log the
    metrics that other callbacks save by.
    """

    def __init__(self, checkpoint: str) -> None:
        self.checkpoint = Path(checkpoint)
        self.asked = 0  # the signal's number
        self._batches = 1  # from one question to the next
        self._left = 1
        self._since = 0.0
        self._before: dict[int, Any] = {}  # the handlers of signals that ours replace
        self._process = 0

    def setup(self, trainer: pl.Trainer, pl_module: pl.LightningModule, stage: str) -> None:
        # After the other checkpoints: a resumed run does not come to this epoch's end again.
        others = [c for c in trainer.callbacks if c is not self]  # type: ignore[attr-defined]
        trainer.callbacks = [*others, self]  # type: ignore[attr-defined]
        # Ranks wait for each other after setup: once one goes on, all have this handler.
        asked = self._ask if stage == "fit" else signal.default_int_handler
        self._before = {SIGNAL: signal.signal(SIGNAL, asked)}
        self._process = os.getpid()
        if stage == "fit":
            register_after_fork(self, outlive_signals)
            atexit.register(end_workers)

    def on_fit_start(self, trainer: pl.Trainer, pl_module: pl.LightningModule) -> None:
        alone = launched_size() is None
        if alone and signal.getsignal(signal.SIGINT) is signal.default_int_handler:
            self._before[signal.SIGINT] = signal.signal(signal.SIGINT, self._ask)
        self._batches = self._left = 1
        self._since = time.monotonic()

    def on_train_start(self, trainer: pl.Trainer, pl_module: pl.LightningModule) -> None:
        if sigterm_asks():
            # Only now: Lightning sets its own after on_fit_start. It is not in _before: Lightning
            # restores what was there before both, before teardown.
            signal.signal(signal.SIGTERM, self._ask)

    def on_predict_start(self, trainer: pl.Trainer, pl_module: pl.LightningModule) -> None:
        signal.signal(signal.SIGTERM, self._end)  # Lightning's, set before, no prediction looks at

    def _end(self, *_: Any) -> None:
        if os.getpid() == self._process:
            raise SIGTERMException

    def _ask(self, number: int, _: Any) -> None:
        if os.getpid() != self._process:
            return  # a worker of a loader, forked with this handler
        self.asked = number if launched_size() is None else SIGNAL  # launchers know its status
        if number == signal.SIGINT:
            signal.signal(signal.SIGINT, signal.default_int_handler)
            # Not print, in the middle of which the signal may have come.
            os.write(2, b"\nstopping, with a checkpoint; Ctrl-C again ends at once\n")

    def on_train_batch_end(self, trainer: pl.Trainer, *_: Any) -> None:
        self._left -= 1
        loop = trainer.fit_loop
        within = loop._should_accumulate() or loop.epoch_loop.batch_progress.is_last_batch
        # A validation that comes next would be passed over by a resume.
        assert loop._data_fetcher is not None
        within |= loop.epoch_loop._should_check_val_fx(loop._data_fetcher)
        if self._left <= 0 and not within:
            self._ask_all(trainer)

    def on_validation_end(self, trainer: pl.Trainer, pl_module: pl.LightningModule) -> None:
        # A validation may follow each step.
        if self._left > 0 or trainer.state.fn != TrainerFn.FITTING:
            return
        loop = trainer.fit_loop
        if not (loop._should_accumulate() or loop.epoch_loop.batch_progress.is_last_batch):
            self._ask_all(trainer)

    def on_train_epoch_end(self, trainer: pl.Trainer, pl_module: pl.LightningModule) -> None:
        if self._left <= 0:
            self._ask_all(trainer)

    def _ask_all(self, trainer: pl.Trainer) -> None:
        now = time.monotonic()
        pace = (now - self._since) / (self._batches - self._left)
        seconds = self._stop_if_asked(trainer, pace)
        self._since = now
        self._batches = self._left = max(1, int(SECONDS / max(seconds, 1e-6)))

    def on_train_end(self, trainer: pl.Trainer, pl_module: pl.LightningModule) -> None:
        self._stop_if_asked(trainer, 0)  # meanwhile, as in the last evaluation

    def _stop_if_asked(self, trainer: pl.Trainer, pace: float) -> float:
        """Stop all ranks if one was asked to; else the pace of the slowest, in seconds a batch."""
        mine = torch.tensor([float(self.asked), pace], device=trainer.strategy.root_device)
        asked, slowest = trainer.strategy.reduce(mine, reduce_op="max").tolist()
        if asked:
            trainer.save_checkpoint(self.checkpoint)
            raise Stopped(str(self.checkpoint), int(asked))
        return slowest

    def teardown(self, trainer: pl.Trainer, pl_module: pl.LightningModule, stage: str) -> None:
        for number, handler in self._before.items():
            signal.signal(number, handler)
        self._before = {}

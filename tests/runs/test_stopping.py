"""A stop waits for what a checkpoint can hold, writes one, and puts signals back."""

from __future__ import annotations

import contextlib
import multiprocessing
import os
import signal
import time
from pathlib import Path
from types import SimpleNamespace
from typing import Any

import pytest
import torch
from pytorch_lightning import Callback, Trainer
from pytorch_lightning.callbacks import ModelCheckpoint
from pytorch_lightning.utilities.exceptions import SIGTERMException
from torch import Tensor
from torch.utils.data import DataLoader

from runs.stopping import SIGNAL, StopOnSignal, Stopped, end_workers
from tests.runs.trainings import Times, quiet_trainer, train


class StopsAt(Times):
    """Is asked to stop in one of its batches, counted from 0 over epochs."""

    def __init__(self, batch: int) -> None:
        super().__init__()
        self.batch, self.batches, self.validations = batch, 0, 0

    def training_step(self, batch: Tensor, batch_idx: int) -> Tensor:
        if self.batches == self.batch:
            os.kill(os.getpid(), SIGNAL)
        self.batches += 1
        return super().training_step(batch, batch_idx)

    def validation_step(self, batch: Tensor, batch_idx: int) -> None:
        self.validations += 1


@pytest.mark.usefixtures("handlers")
@pytest.mark.parametrize(
    "accumulate, asked, batches, steps", [(1, 4, 5, 5), (4, 4, 8, 2), (1, 9, 10, 10), (4, 8, 10, 3)]
)
def test_a_stop_waits_for_the_step_and_for_the_epochs_validation(
    monkeypatch: pytest.MonkeyPatch, tmp_path: Path,
    accumulate: int, asked: int, batches: int, steps: int,
) -> None:  # fmt: skip
    """10 batches and a validation an epoch; then a resume, to the end of the second."""
    monkeypatch.setattr("runs.stopping.SECONDS", 0.0)
    ones, one = DataLoader(torch.ones(10)), DataLoader(torch.ones(1))

    def trainer(*callbacks: Callback) -> Trainer:
        return quiet_trainer(
            *callbacks, max_epochs=2, num_sanity_val_steps=0, accumulate_grad_batches=accumulate
        )

    stopped, resumed = StopsAt(asked), StopsAt(-1)
    with pytest.raises(Stopped):
        trainer(StopOnSignal(str(tmp_path / "s.ckpt"))).fit(stopped, ones, one)
    assert (stopped.batches, stopped.validations) == (batches, batches // 10)
    assert torch.load(tmp_path / "s.ckpt")["global_step"] == steps
    run = trainer()
    run.fit(resumed, ones, one, ckpt_path=tmp_path / "s.ckpt")
    assert resumed.batches == 20 - batches and run.global_step == 2 * -(-10 // accumulate)
    assert stopped.validations + resumed.validations == 2


@pytest.mark.usefixtures("handlers")
def test_a_stop_waits_for_a_validation_within_the_epoch(
    monkeypatch: pytest.MonkeyPatch, tmp_path: Path
) -> None:
    """Of batch 5, which a resume would pass over."""
    monkeypatch.setattr("runs.stopping.SECONDS", 0.0)
    ones, one = DataLoader(torch.ones(10)), DataLoader(torch.ones(1))
    validations = []
    for batch, path in ((4, None), (-1, tmp_path / "s.ckpt")):
        model = StopsAt(batch)
        trainer = quiet_trainer(
            StopOnSignal(str(tmp_path / "s.ckpt")), max_epochs=1, val_check_interval=5,
            num_sanity_val_steps=0, default_root_dir=tmp_path,
        )  # fmt: skip
        with pytest.raises(Stopped) if path is None else contextlib.nullcontext():
            trainer.fit(model, ones, one, ckpt_path=path)
        validations.append((model.batches, model.validations))
    assert validations == [(5, 1), (5, 1)]


@pytest.mark.usefixtures("handlers")
@pytest.mark.parametrize("every", [1, 2, 4])
def test_a_stop_comes_where_a_validation_follows_each_step(
    every: int, monkeypatch: pytest.MonkeyPatch, tmp_path: Path
) -> None:
    """Behind the validation of batch 8, at which a window of 4 ends."""
    monkeypatch.setattr("runs.stopping.SECONDS", 0.0)
    ones, one = DataLoader(torch.ones(16)), DataLoader(torch.ones(1))
    counts = []
    for batch, path in ((4, None), (-1, tmp_path / "s.ckpt")):
        model = StopsAt(batch)
        trainer = quiet_trainer(
            StopOnSignal(str(tmp_path / "s.ckpt")), max_epochs=1, val_check_interval=every,
            accumulate_grad_batches=4, default_root_dir=tmp_path,
            num_sanity_val_steps=1 if path is None else 0,
        )  # fmt: skip
        with pytest.raises(Stopped) if path is None else contextlib.nullcontext():
            trainer.fit(model, ones, one, ckpt_path=path)
        counts.append((model.batches, model.validations - (path is None)))
    assert counts == [(8, 8 // every), (8, 8 // every)] and trainer.global_step == 4


@pytest.mark.usefixtures("handlers")
def test_a_stop_in_the_last_batch_ends_the_epoch_where_nothing_is_validated(
    monkeypatch: pytest.MonkeyPatch, tmp_path: Path
) -> None:
    monkeypatch.setattr("runs.stopping.SECONDS", 0.0)
    model, ended = StopsAt(3), []
    model.on_train_epoch_end = lambda: ended.append(model.batches)
    trainer = quiet_trainer(StopOnSignal(str(tmp_path / "s.ckpt")), max_epochs=2)
    with pytest.raises(Stopped):
        trainer.fit(model, DataLoader(torch.ones(4)))
    assert ended == [4]


class PredictsForLong(Times):
    predicted = 0

    def predict_step(self, batch: Tensor, batch_idx: int) -> Tensor:
        if batch_idx == 1:
            os.kill(os.getpid(), signal.SIGTERM)
        self.predicted += 1
        return batch


@pytest.mark.usefixtures("handlers")
def test_sigterm_ends_a_prediction(tmp_path: Path) -> None:
    model = PredictsForLong()
    trainer = quiet_trainer(StopOnSignal(str(tmp_path / "s.ckpt")), default_root_dir=tmp_path)
    before = signal.getsignal(signal.SIGTERM)
    with pytest.raises(SIGTERMException):
        trainer.predict(model, DataLoader(torch.ones(4)))
    assert model.predicted == 1 and signal.getsignal(signal.SIGTERM) == before


@pytest.mark.usefixtures("handlers")
def test_ranks_ask_each_other_once_a_second(monkeypatch: pytest.MonkeyPatch) -> None:
    now, asked = 0.0, []

    def reduce(mine: Tensor, reduce_op: str) -> Tensor:
        assert reduce_op == "max"  # of the signals' numbers, and of the seconds a batch
        asked.append(now)
        return mine

    strategy = SimpleNamespace(root_device=torch.device("cpu"), reduce=reduce)
    loop = SimpleNamespace(
        _should_accumulate=lambda: False,
        epoch_loop=SimpleNamespace(
            batch_progress=SimpleNamespace(is_last_batch=False),
            _should_check_val_fx=lambda _: False,
        ),
        _data_fetcher=0,
    )
    trainer: Any = SimpleNamespace(strategy=strategy, fit_loop=loop)
    monkeypatch.setattr("runs.stopping.time.monotonic", lambda: now)
    module: Any = None
    stop = StopOnSignal("stopped.ckpt")
    stop.on_fit_start(trainer, module)
    for seconds in [0.125] * 20 + [0.5] * 10:
        now += seconds
        stop.on_train_batch_end(trainer)
    # After the first batch, then each 8th as they take an eighth of a second, then each 2nd.
    assert asked == [0.125, 1.125, 2.125, 5.0, 6.0, 7.0]


@pytest.mark.usefixtures("handlers")
@pytest.mark.parametrize("job", ["", "7"])
def test_of_launched_ranks_sigterm_asks_only_those_of_slurm(
    job: str, monkeypatch: pytest.MonkeyPatch
) -> None:
    """And they end with the status that the launcher takes for an answer to its own request."""
    monkeypatch.setattr("runs.stopping.launched_size", lambda: 2)
    if job:
        monkeypatch.setenv("SLURM_JOB_ID", job)  # tests have none
    stop, nobody, reached = StopOnSignal("stopped.ckpt"), Any, []
    signal.signal(signal.SIGTERM, lambda *_: reached.append("as it was"))
    stop.setup(SimpleNamespace(callbacks=[]), nobody, "fit")
    stop.on_train_start(nobody, nobody)
    os.kill(os.getpid(), signal.SIGTERM)
    assert (stop.asked, reached) == ((SIGNAL, []) if job else (0, ["as it was"]))


def test_workers_that_are_left_at_the_end_are_not_waited_for() -> None:
    before = signal.getsignal(signal.SIGCHLD)
    left = iter(DataLoader(torch.ones(4), num_workers=1))
    next(left)
    other = multiprocessing.Process(target=time.sleep, args=[600], daemon=True)
    other.start()
    try:
        end_workers()
        (worker,) = left._workers
        worker.join(60)
        assert worker.exitcode == -signal.SIGKILL and other.is_alive()
    finally:
        other.kill()
        signal.signal(signal.SIGCHLD, before)


@pytest.mark.usefixtures("handlers")
def test_a_second_ctrl_c_ends_at_once() -> None:
    stop, nobody = StopOnSignal("stopped.ckpt"), Any
    stop.setup(SimpleNamespace(callbacks=[]), nobody, "fit")
    stop.on_fit_start(nobody, nobody)
    os.kill(os.getpid(), signal.SIGINT)
    assert stop.asked == signal.SIGINT
    with pytest.raises(KeyboardInterrupt):
        os.kill(os.getpid(), signal.SIGINT)


@pytest.mark.usefixtures("handlers")
def test_signals_are_as_they_were_when_training_has_ended() -> None:
    stop, nobody = StopOnSignal("stopped.ckpt"), Any
    signal.signal(signal.SIGINT, signal.SIG_IGN)  # as of a job in the background
    before = signal.getsignal(SIGNAL)
    stop.setup(SimpleNamespace(callbacks=[]), nobody, "fit")
    stop.on_fit_start(nobody, nobody)
    assert signal.getsignal(signal.SIGINT) == signal.SIG_IGN
    assert signal.getsignal(SIGNAL) != before
    stop.teardown(nobody, nobody, "fit")
    assert signal.getsignal(SIGNAL) == before


@pytest.mark.usefixtures("handlers")
def test_a_stop_ends_a_test_as_ctrl_c_does() -> None:
    stop, nobody = StopOnSignal("stopped.ckpt"), Any
    before = signal.getsignal(SIGNAL)
    stop.setup(SimpleNamespace(callbacks=[]), nobody, "test")
    with pytest.raises(KeyboardInterrupt):
        os.kill(os.getpid(), SIGNAL)
    stop.teardown(nobody, nobody, "test")
    assert signal.getsignal(SIGNAL) == before


class SignalsEarly(Callback):
    def on_fit_start(self, *_: Any) -> None:
        os.kill(os.getpid(), SIGNAL)


@pytest.mark.usefixtures("handlers")
def test_a_stop_before_the_first_batch_has_a_checkpoint_too(tmp_path: Path) -> None:
    """A rank that is not as far as another has one, and does not end by the signal."""
    missed: list[int] = []
    signal.signal(SIGNAL, lambda number, _: missed.append(number))
    trainer = quiet_trainer(SignalsEarly(), StopOnSignal(str(tmp_path / "s.ckpt")), max_epochs=2)
    with pytest.raises(Stopped):
        trainer.fit(Times(), DataLoader(torch.ones(3)))
    assert not missed and torch.load(tmp_path / "s.ckpt")["global_step"] == 1


class StopsInTheFirst(Times):
    """Is asked to stop in the validation of the first epoch, which is the best."""

    def validation_step(self, batch: Tensor, batch_idx: int) -> None:
        if self.current_epoch == 0:
            os.kill(os.getpid(), SIGNAL)
        self.log("val/loss", float(self.current_epoch))

    def on_train_epoch_end(self) -> None:
        self.log("end/loss", float(self.current_epoch))


@pytest.mark.usefixtures("handlers")
@pytest.mark.parametrize("monitor", ["val/loss", "end/loss"])
def test_a_stop_in_a_validation_keeps_the_epochs_checkpoint(
    monitor: str, monkeypatch: pytest.MonkeyPatch, tmp_path: Path
) -> None:
    monkeypatch.setattr("runs.stopping.SECONDS", 0.0)
    ones = DataLoader(torch.ones(4))
    best = ModelCheckpoint(tmp_path, "best", monitor=monitor)
    run = quiet_trainer(
        StopOnSignal(str(tmp_path / "s.ckpt")), best, max_epochs=3, num_sanity_val_steps=0
    )
    with pytest.raises(Stopped):
        run.fit(StopsInTheFirst(), ones, ones)
    assert best.best_model_path == str(tmp_path / "best.ckpt") and run.current_epoch == 0
    (state,) = [
        s for s in torch.load(tmp_path / "s.ckpt")["callbacks"].values() if "best_k_models" in s
    ]
    assert list(state["best_k_models"]) == [best.best_model_path]


@pytest.mark.usefixtures("handlers")
def test_after_training_sigterm_is_what_it_was_before(tmp_path: Path) -> None:
    before = signal.getsignal(signal.SIGTERM)
    train(tmp_path, StopOnSignal(str(tmp_path / "s.ckpt")))
    assert signal.getsignal(signal.SIGTERM) == before


class StopsInEvaluation(Times):
    def validation_step(self, batch: Tensor, batch_idx: int) -> None:
        if not self.trainer.sanity_checking:
            os.kill(os.getpid(), SIGNAL)


@pytest.mark.usefixtures("handlers")
def test_a_stop_in_the_last_evaluation_leaves_a_checkpoint(tmp_path: Path) -> None:
    trainer = quiet_trainer(StopOnSignal(str(tmp_path / "s.ckpt")), max_epochs=1)
    ones = DataLoader(torch.ones(4))
    with pytest.raises(Stopped):
        trainer.fit(StopsInEvaluation(), ones, ones)
    assert torch.load(tmp_path / "s.ckpt")["global_step"] == 4

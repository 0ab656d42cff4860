"""The lines of progress: one an epoch, and where training is within it."""

from __future__ import annotations

import itertools
import re
from types import SimpleNamespace
from typing import Any

import pytest
import torch
from torch.utils.data import DataLoader
from torchmetrics.classification import MulticlassAccuracy

from runs.progress import Progress
from tests.runs.trainings import Loses, Stream, Times, TimesTwo, quiet_trainer


def test_an_epochs_line_has_no_validation_of_another(capsys: pytest.CaptureFixture[str]) -> None:
    trainer = quiet_trainer(Progress(), max_epochs=5, check_val_every_n_epoch=2)
    ones = DataLoader(torch.ones(2))
    trainer.fit(Loses(5, 4, 3, 2, 1), ones, ones)
    lines = [line for line in capsys.readouterr().out.splitlines() if line.startswith("epoch ")]
    assert [line.partition("val/loss ")[2] for line in lines] == ["", "4", "", "2", ""]


@pytest.mark.parametrize("first", [True, False])
def test_other_ranks_stay_silent_after_a_search_of_the_rate(first: bool) -> None:
    progress: Any = Progress()
    progress._trainer = SimpleNamespace(is_global_zero=first)
    progress.disable()
    progress.enable()  # as Lightning's LearningRateFinder does on all ranks
    assert progress.is_enabled == first


class Prints(Times):
    def training_step(self, batch: torch.Tensor, batch_idx: int) -> torch.Tensor:
        self.print("batch", batch_idx, sep="|")
        return super().training_step(batch, batch_idx)


@pytest.mark.parametrize("moving", [False, True])
def test_what_a_module_prints_has_a_line_of_its_own(
    moving: bool, capsys: pytest.CaptureFixture[str]
) -> None:
    progress = Progress()
    progress._moving = moving
    trainer = quiet_trainer(progress, max_epochs=1)
    trainer.fit(Prints(), DataLoader(torch.ones(2)))
    printed = capsys.readouterr().out
    assert ("\r\x1b[Kbatch|1\n" if moving else "batch|0\nbatch|1\n") in printed


def test_what_is_logged_of_steps_and_epochs_is_told_once() -> None:
    names = ["loss_step", "loss_epoch", "loss", "first_step", "val/loss"]
    metrics = dict(zip(names, map(torch.tensor, range(5))))
    trainer: Any = SimpleNamespace(callback_metrics=metrics, current_epoch=0, max_epochs=1)
    assert Progress()._line(trainer, "1 s") == "epoch 1/1  1 s  loss 2  first_step 3"


def test_within_an_epoch_a_line_comes_every_ten_seconds(
    monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    now = 100.0
    monkeypatch.setattr("runs.progress.time.monotonic", lambda: now)
    metrics = {"val/loss": torch.tensor(1.5), "train/loss": torch.tensor(0.5)}
    trainer: Any = SimpleNamespace(
        callback_metrics=metrics, current_epoch=0, max_epochs=-1, sanity_checking=True,
        num_training_batches=8, max_steps=-1,
    )  # fmt: skip
    progress, nobody = Progress(), Any
    progress.on_validation_end(trainer, nobody)  # whose val/loss is not this epoch's
    progress.on_train_start(trainer, nobody)  # of no epoch, as where one is resumed within
    for batch in range(8):
        now += 4
        progress.on_train_batch_end(trainer, nobody, None, None, batch)
    lines = capsys.readouterr().out.splitlines()
    assert lines == ["epoch 1  step 3/8  train/loss 0.5", "epoch 1  step 6/8  train/loss 0.5"]
    progress.on_train_epoch_end(trainer, nobody)
    progress.print_epoch(trainer)
    assert capsys.readouterr().out == "epoch 1  32.0 s  train/loss 0.5\n"
    progress.disable()  # as on all ranks but 0
    now += 11
    progress.on_train_batch_end(trainer, nobody, None, None, 0)
    assert not capsys.readouterr().out


class LogsClasses(Times):
    """A metric with a value for each class, which Lightning takes."""

    def __init__(self) -> None:
        super().__init__()
        self.of_classes = MulticlassAccuracy(num_classes=2, average=None)

    def validation_step(self, batch: torch.Tensor, batch_idx: int) -> None:
        self.of_classes.update(torch.tensor([1, 0]), torch.tensor([1, 1]))
        self.log("val/of_classes", self.of_classes, logger=False)
        self.log("val/loss", 2.0)


class Steps(TimesTwo):
    """By hand, or in windows of 3 batches with one optimizer."""

    def __init__(self, by_hand: bool) -> None:
        super().__init__()
        self.automatic_optimization = not by_hand

    def training_step(self, batch: torch.Tensor, batch_idx: int) -> Any:
        if self.automatic_optimization:
            return Times.training_step(self, batch, batch_idx)
        return super().training_step(batch, batch_idx)

    def configure_optimizers(self) -> Any:
        both = super().configure_optimizers()
        return both[0] if self.automatic_optimization else both


@pytest.mark.parametrize(
    ("by_hand", "windows", "epochs", "batches", "steps", "of"),
    [
        (False, 1, 1, 9, -1, ["/9"] * 9),
        (False, 1, -1, 9, 4, ["/4"] * 4),
        (False, 3, -1, 99, 3, ["/9"] * 9),
        (False, 3, 2, 7, 4, ["/7"] * 7 + ["/3"] * 3),  # an epoch's last window is short
        (False, 3, 1, 7, 3, ["/7"] * 7),
        (True, 1, 9, 4, 12, ["/4"] * 4 + ["/2"] * 2),
        (False, 1, -1, None, 4, ["/4"] * 4),
        (False, 1, 1, None, -1, [""] * 7),
    ],
)
def test_a_step_is_told_with_the_epochs_last(
    by_hand: bool, windows: int, epochs: int, batches: int | None, steps: int, of: list[str],
    capsys: pytest.CaptureFixture[str],
) -> None:  # fmt: skip
    progress = Progress()
    progress._moving = True
    trainer = quiet_trainer(
        progress, max_epochs=epochs, max_steps=steps, accumulate_grad_batches=windows
    )
    data: Any = Stream() if batches is None else torch.ones(batches)
    with pytest.MonkeyPatch.context() as patch:
        clock = itertools.count()
        patch.setattr("runs.progress.time.monotonic", lambda: next(clock))
        trainer.fit(Steps(by_hand), DataLoader(data))
    found = re.findall(r"  step (\d+)(/\w+|)  ", capsys.readouterr().out)
    assert [last for _, last in found] == of
    number, last = found[-1]
    assert last in ("", f"/{number}")


class Fails(Times):
    def training_step(self, batch: torch.Tensor, batch_idx: int) -> torch.Tensor:
        if batch_idx == 2:
            raise ValueError("no more")
        self.log("a_metric_with_a_name_that_is_longer_than_the_rest_of_the_line", 1.0)
        return super().training_step(batch, batch_idx)


def test_a_moving_line_fits_and_is_gone_when_training_fails(
    monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    monkeypatch.setenv("COLUMNS", "40")
    clock = itertools.count()
    monkeypatch.setattr("runs.progress.time.monotonic", lambda: next(clock))
    progress = Progress()
    progress._moving = True
    trainer = quiet_trainer(progress, max_epochs=1)
    with pytest.raises(ValueError, match="no more"):
        trainer.fit(Fails(), DataLoader(torch.ones(4)))
    lines = capsys.readouterr().out.split("\r")
    assert lines[-2].startswith("epoch 1/1  step 2/4  a_metric") and lines[-1] == "\x1b[K"
    assert len(lines[-2].removesuffix("\x1b[K")) == 39


def test_an_epochs_line_has_metrics_of_one_number(capsys: pytest.CaptureFixture[str]) -> None:
    trainer = quiet_trainer(Progress(), max_epochs=1)
    ones = DataLoader(torch.ones(2))
    trainer.fit(LogsClasses(), ones, ones)
    assert re.search(r"epoch 1/1  [\d.]+ s  val/loss 2\n", capsys.readouterr().out)


@pytest.mark.parametrize("rank, moving", [(None, True), ("0", False)])
def test_a_line_moves_on_a_terminal_alone(
    monkeypatch: pytest.MonkeyPatch, rank: str | None, moving: bool
) -> None:
    """And not in that of a launcher, which begins each line with the rank."""
    monkeypatch.setattr("runs.progress.sys.stdout", SimpleNamespace(isatty=lambda: True))
    if rank:
        monkeypatch.setenv("HOROVOD_RANK", rank)
    assert Progress()._moving == moving


class LogsAtTheEnd(Times):
    def on_train_epoch_end(self) -> None:
        self.log("end", float(self.current_epoch))


def test_an_epochs_line_has_what_the_module_logs_at_its_end(
    capsys: pytest.CaptureFixture[str],
) -> None:
    trainer = quiet_trainer(Progress(), max_epochs=2)
    trainer.fit(LogsAtTheEnd(), DataLoader(torch.ones(2)))
    trainer.fit_loop.max_epochs = 3
    trainer.fit(LogsAtTheEnd(), DataLoader(torch.ones(2)))
    lines = [line for line in capsys.readouterr().out.splitlines() if line.startswith("epoch ")]
    assert [line.partition("  end ")[2] for line in lines] == ["0", "1", "2"]

"""Curves beside the losses, and what is said where there are none."""

from __future__ import annotations

import csv
from pathlib import Path
from typing import Any

import pytest
import torch
from pytorch_lightning.callbacks import ModelCheckpoint
from pytorch_lightning.loggers import CSVLogger
from torch import Tensor
from torch.utils.data import DataLoader

from runs.anatomy import Anatomy
from runs.curves import Curves
from tests.runs.trainings import Times, TimesTwo, quiet_trainer, report_of, train


def test_curves_of_two_optimizers_stand_beside_the_losses(tmp_path: Path) -> None:
    trainer = quiet_trainer(
        Curves(), Anatomy(warmup=0), report_of(), logger=CSVLogger(tmp_path, "", ""),
        log_every_n_steps=5, max_epochs=2,
    )  # fmt: skip
    trainer.fit(TimesTwo(), DataLoader(torch.ones(20, 1), batch_size=2))
    rows = list(csv.DictReader((tmp_path / "metrics.csv").open()))
    steps = {key: [int(row["step"]) for row in rows if row[key]] for key in rows[0]}
    for key in ("train/loss", "lr", "lr_1", "grad_norm", "grad_norm_1"):
        assert steps[key] == [4, 9, 14, 19], key
    for key in ("time/step_ms", "samples_per_second"):
        assert steps[key] == [9, 19], key


class InGroups(Times):
    def __init__(self) -> None:
        super().__init__()
        self.other = torch.nn.Parameter(torch.ones(()))
        self.third = torch.nn.Parameter(torch.ones(()))

    def configure_optimizers(self) -> torch.optim.Optimizer:
        groups = [{"params": [self.weight]}, {"params": [self.other], "weight_decay": 0.1}]
        return torch.optim.SGD([*groups, {"params": [self.third], "lr": 0.01}], lr=0.1)


def test_groups_with_a_rate_of_their_own_have_a_curve(tmp_path: Path) -> None:
    train(tmp_path, Curves(), model=InGroups)
    rows = list(csv.DictReader((tmp_path / "metrics.csv").open()))
    assert {key: rows[0][key] for key in rows[0] if key.startswith("lr")} == {
        "lr": "0.1", "lr_group_2": "0.01",
    }  # fmt: skip


class RateOfItsOwn(torch.optim.SGD):
    """Has None for a rate, as Adafactor with relative steps, and works it out in each step."""

    def __init__(self, parameters: Any) -> None:
        super().__init__(parameters, lr=0.1)
        self.param_groups[0]["lr"] = None

    def step(self, closure: Any = None) -> Any:
        self.param_groups[0]["lr"] = 0.1
        loss = super().step(closure)
        self.param_groups[0]["lr"] = None
        return loss


def test_an_optimizer_that_finds_its_own_rate(
    tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    model = Times()
    model.configure_optimizers = lambda: RateOfItsOwn(model.parameters())
    trainer = quiet_trainer(
        Curves(), report_of(), logger=CSVLogger(tmp_path, "", ""), log_every_n_steps=1, max_epochs=1
    )
    trainer.fit(model, DataLoader(torch.ones(2)))
    assert "lr none" in capsys.readouterr().out
    assert "grad_norm" in (tmp_path / "metrics.csv").read_text()
    assert float(model.weight.detach()) == pytest.approx(0.8)


class Looks(Times):
    """A table of which batches ask for rows, by gradients that are rows too; one is for all."""

    def __init__(self) -> None:
        super().__init__()
        self.table = torch.nn.Embedding(3, 1, sparse=True)

    def training_step(self, batch: Tensor, batch_idx: int) -> Tensor:
        return (self.weight * self.table(batch)).mean()


def test_rows_of_gradients_have_no_norm_in_the_curves(tmp_path: Path) -> None:
    trainer = quiet_trainer(
        Curves(), logger=CSVLogger(tmp_path, "", ""), log_every_n_steps=1, max_epochs=1
    )
    trainer.fit(Looks(), DataLoader(torch.tensor([1, 1, 2])))
    rows = list(csv.DictReader((tmp_path / "metrics.csv").open()))
    assert [row["lr"] for row in rows] == ["0.1"] * 3 and "grad_norm" not in rows[0]


def test_curves_of_a_model_with_a_part_that_gets_no_gradient(tmp_path: Path) -> None:
    model = Times()
    model.unused = torch.nn.Parameter(torch.ones(()))
    trainer = quiet_trainer(
        Curves(), logger=CSVLogger(tmp_path, "", ""), log_every_n_steps=1, max_epochs=1
    )
    trainer.fit(model, DataLoader(torch.ones(1)))
    (row,) = csv.DictReader((tmp_path / "metrics.csv").open())
    assert float(row["grad_norm"]) == 1


def test_no_curves_where_no_step_is_logged(tmp_path: Path) -> None:
    train(tmp_path, Curves(), log_every_n_steps=0)
    assert "grad_norm" not in (tmp_path / "metrics.csv").read_text()


def test_one_batch_that_is_not_logged_has_no_curves_to_miss(
    tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    train(tmp_path, log_every_n_steps=10, fast_dev_run=True)
    output = capsys.readouterr().out
    assert "epoch 1/1" in output and "curves" not in output


@pytest.mark.parametrize("model", [Times, TimesTwo])  # whose loggers count a step a batch, too
@pytest.mark.parametrize(("every", "told"), [(0, False), (10, False), (11, True)])
def test_curves_without_a_step_of_training_are_told(
    every: int, told: bool, model: type[Times], tmp_path: Path,
    capsys: pytest.CaptureFixture[str],
) -> None:  # fmt: skip
    train(tmp_path, log_every_n_steps=every, model=model)
    line = "curves  show no step of training: 10 steps, and trainer.log_every_n_steps is 11;"
    assert (line in capsys.readouterr().out) == told


@pytest.mark.parametrize(("every", "told"), [(16, True), (15, False)])
def test_a_resumed_run_misses_curves_of_its_own_steps(
    every: int, told: bool, tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    train(tmp_path / "first", ModelCheckpoint(tmp_path, "last"), max_epochs=2)
    last = str(tmp_path / "last.ckpt")
    train(tmp_path / "second", ckpt_path=last, max_epochs=3, log_every_n_steps=every)
    line = "curves  show no step of training: 10 steps, and trainer.log_every_n_steps is 16;"
    assert (line in capsys.readouterr().out) == told


class NoSteps(Times):
    def configure_optimizers(self) -> Any:
        pass


class ReturnsNothing(Times):
    def training_step(self, batch: Tensor, batch_idx: int) -> Any:
        pass


@pytest.mark.parametrize("what", ["optimizer", "batch", "loss"])
def test_a_training_without_steps(
    what: str, tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    trainer = quiet_trainer(
        Curves(), report_of(), logger=CSVLogger(tmp_path, "", ""), log_every_n_steps=1, max_epochs=1
    )
    model = {"optimizer": NoSteps, "batch": Times, "loss": ReturnsNothing}[what]()
    collate = (lambda batch: None) if what == "batch" else None
    ones: Any = torch.ones(2)
    model.validation_step = lambda batch: None
    trainer.fit(model, DataLoader(ones, collate_fn=collate), DataLoader(ones))
    message = "warning no step was made: training_step has to return the loss, and batches"
    assert (message in capsys.readouterr().out) == (what != "optimizer")
    if what == "optimizer":
        assert "grad_norm" not in (tmp_path / "metrics.csv").read_text()

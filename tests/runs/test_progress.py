"""The lines of progress: one an epoch, and where training is within it."""

from __future__ import annotations

from types import SimpleNamespace
from typing import Any

import pytest
import torch
from pytorch_lightning import Trainer
from torch.utils.data import DataLoader

from runs.progress import Progress
from tests.runs.trainings import Loses, Times


def test_an_epochs_line_has_no_validation_of_another(capsys: pytest.CaptureFixture[str]) -> None:
    trainer = Trainer(
        accelerator="cpu", logger=False, callbacks=[Progress()], enable_model_summary=False,
        enable_checkpointing=False, max_epochs=5, check_val_every_n_epoch=2,
    )  # fmt: skip
    ones = DataLoader(torch.ones(2))
    trainer.fit(Loses(5, 4, 3, 2, 1), ones, ones)
    lines = [line for line in capsys.readouterr().out.splitlines() if line.startswith("epoch ")]
    assert [line.partition("val/loss ")[2] for line in lines] == ["", "4", "", "2", ""]


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
    trainer = Trainer(
        accelerator="cpu", logger=False, callbacks=[progress], enable_model_summary=False,
        enable_checkpointing=False, max_epochs=1,
    )  # fmt: skip
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
    now = 0.0
    monkeypatch.setattr("runs.progress.time.monotonic", lambda: now)
    monkeypatch.setattr(Progress, "total_train_batches", 8)
    metrics = {"val/loss": torch.tensor(1.5), "train/loss": torch.tensor(0.5)}
    trainer: Any = SimpleNamespace(
        callback_metrics=metrics, current_epoch=0, max_epochs=-1, sanity_checking=True
    )
    progress, nobody = Progress(), Any
    progress.on_validation_end(trainer, nobody)  # whose val/loss is not this epoch's
    for batch in range(8):
        now += 4
        progress.on_train_batch_end(trainer, nobody, None, None, batch)
    lines = capsys.readouterr().out.splitlines()
    assert lines == ["epoch 1  step 3/8  train/loss 0.5", "epoch 1  step 6/8  train/loss 0.5"]
    progress.disable()  # as on all ranks but 0
    now += 11
    progress.on_train_batch_end(trainer, nobody, None, None, 0)
    assert not capsys.readouterr().out


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
    trainer = Trainer(
        accelerator="cpu", logger=False, callbacks=[Progress()], enable_model_summary=False,
        enable_checkpointing=False, max_epochs=2,
    )  # fmt: skip
    trainer.fit(LogsAtTheEnd(), DataLoader(torch.ones(2)))
    trainer.fit_loop.max_epochs = 3
    trainer.fit(LogsAtTheEnd(), DataLoader(torch.ones(2)))
    lines = [line for line in capsys.readouterr().out.splitlines() if line.startswith("epoch ")]
    assert [line.partition("  end ")[2] for line in lines] == ["0", "1", "2"]

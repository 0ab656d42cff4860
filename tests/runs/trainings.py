"""Modules and data of a few numbers, and trainings of them in this process."""

from __future__ import annotations

from pathlib import Path
from typing import Any

import torch
from omegaconf import OmegaConf
from pytorch_lightning import Callback, LightningDataModule, LightningModule, Trainer
from pytorch_lightning.callbacks import Checkpoint, ProgressBar
from pytorch_lightning.loggers import CSVLogger
from torch import Tensor
from torch.utils.data import DataLoader, IterableDataset

from runs.progress import Progress
from runs.refusal import Refusal
from runs.report import Report


class Sums(LightningModule):
    def predict_step(self, batch: Tensor, batch_idx: int) -> Any:
        return batch.sum()


class Numbers(LightningDataModule):
    """0 to 6, there only after setup("test")."""

    def setup(self, stage: str) -> None:
        if stage == "test":
            self.numbers = torch.arange(7)

    def test_dataloader(self) -> DataLoader:
        return DataLoader(self.numbers, batch_size=3)


class Stream(IterableDataset):
    def __iter__(self) -> Any:
        return iter(torch.arange(7))


class Times(LightningModule):
    def __init__(self) -> None:
        super().__init__()
        self.weight = torch.nn.Parameter(torch.ones(()))

    def training_step(self, batch: Tensor, batch_idx: int) -> Tensor:
        return (self.weight * batch).mean()

    def configure_optimizers(self) -> torch.optim.Optimizer:
        return torch.optim.SGD(self.parameters(), lr=0.1)


class TimesTwo(Times):
    """Two optimizers, the second of which steps first."""

    def __init__(self) -> None:
        super().__init__()
        self.automatic_optimization = False
        self.other = torch.nn.Parameter(torch.ones(()))

    def training_step(self, batch: Tensor, batch_idx: int) -> None:
        loss = (self.weight * self.other * batch).mean()
        self.log("train/loss", loss)
        self.manual_backward(loss)
        for optimizer in self.optimizers()[::-1]:
            optimizer.step()
            optimizer.zero_grad()

    def configure_optimizers(self) -> Any:
        return [torch.optim.SGD([p], lr=0.1) for p in (self.weight, self.other)]


class TrainsAndTests(Numbers):
    """Each stage's data is there after its own setup alone."""

    def setup(self, stage: str) -> None:
        super().setup(stage)
        if stage == "fit":
            self.ones = torch.ones(4)

    def train_dataloader(self) -> DataLoader:
        return DataLoader(self.ones, drop_last=True)


class TrainsAndPredicts(Times):
    def predict_step(self, batch: Tensor, batch_idx: int) -> Tensor:
        return 2 * batch


class OneAtATime(Numbers):
    """Holds the data of the stage that it was set up for last."""

    def setup(self, stage: str) -> None:
        self.numbers = torch.ones(4) if stage == "fit" else torch.arange(7)

    def train_dataloader(self) -> DataLoader:
        return DataLoader(self.numbers)


class Fails(TrainsAndPredicts):
    """In the stage that it is given."""

    predict_step = Sums.predict_step

    def __init__(self, stage: str) -> None:
        super().__init__()
        self.stage = stage

    def validation_step(self, batch: Tensor, batch_idx: int) -> None:
        if self.stage == "validation":
            raise Refusal("no validation today")

    def test_step(self, batch: Tensor, batch_idx: int) -> None:
        self.log("test/loss", 3.0)
        if self.stage == "test":
            raise Refusal("no test today")


def quiet_trainer(*callbacks: Callback, **arguments: Any) -> Trainer:
    """On the CPU, without what a test has not asked for."""
    options = {
        "accelerator": "cpu", "logger": False, "enable_model_summary": False,
        "enable_checkpointing": any(isinstance(each, Checkpoint) for each in callbacks),
        "enable_progress_bar": any(isinstance(each, ProgressBar) for each in callbacks),
    }  # fmt: skip
    return Trainer(callbacks=[*callbacks], **{**options, **arguments})


def report_of(run_dir: Path = Path("x"), **config: Any) -> Report:
    """Of a run of one process, with as much of the configuration as it reads."""
    all_ = {"data": {}, "ckpt_path": None, "run_dir": str(run_dir), "train": True, "test": False}
    choices = {"model": "m", "data": "d", "strategy": "single"}
    return Report(OmegaConf.create({**all_, **config}), choices)


def train(
    folder: Path, *callbacks: Callback, ckpt_path: str | None = None, max_epochs: int = 1,
    log_every_n_steps: int = 1, fast_dev_run: bool = False, model: type[Times] = Times,
    loader: DataLoader | None = None,
) -> Report:  # fmt: skip
    report = report_of(data={"batch_size": 2}, ckpt_path=ckpt_path)
    trainer = Trainer(
        accelerator="cpu", logger=CSVLogger(folder, name="", version=""),
        log_every_n_steps=log_every_n_steps, callbacks=[report, Progress(), *callbacks],
        enable_model_summary=False, max_epochs=max_epochs, fast_dev_run=fast_dev_run,
    )  # fmt: skip
    twenty, one = DataLoader(torch.ones(20), batch_size=2), DataLoader(torch.ones(1))
    trainer.fit(model(), twenty if loader is None else loader, one, ckpt_path=ckpt_path)
    return report


class IsValidated(Times):
    def validation_step(self, batch: Tensor, batch_idx: int) -> None:
        pass


class Loses(Times):
    """Its validations have these losses, the first that of epoch 0."""

    def __init__(self, *losses: float) -> None:
        super().__init__()
        self.losses = losses

    def validation_step(self, batch: Tensor, batch_idx: int) -> None:
        self.log("val/loss", self.losses[self.trainer.current_epoch])

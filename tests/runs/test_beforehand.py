"""What is refused before the first batch: shares, samplers, hyperparameters."""

from __future__ import annotations

import contextlib
from functools import partial
from pathlib import Path
from types import SimpleNamespace
from typing import Any

import pytest
import torch
from omegaconf import OmegaConf
from pytorch_lightning import LightningDataModule, LightningModule, Trainer
from pytorch_lightning.callbacks import ModelCheckpoint
from pytorch_lightning.loggers import CSVLogger
from pytorch_lightning.loggers.utilities import _log_hyperparams
from torch.utils.data import BatchSampler, DataLoader, IterableDataset, WeightedRandomSampler

from runs.beforehand import (
    refuse_batch_sampler,
    refuse_clashes,
    refuse_classes,
    refuse_model,
    refuse_shares,
)
from runs.refusal import Refusal
from runs.report import Report
from tests.runs.trainings import Fails, Numbers, OneAtATime, Times


class Validates(Numbers):
    def val_dataloader(self) -> DataLoader:
        return DataLoader(torch.arange(4))


def test_a_sample_and_a_batch_for_each_rank_are_enough() -> None:
    def refused(samples: int, batch: int, ranks: int, sampler: Any = None) -> str:
        trainer: Any = SimpleNamespace(world_size=ranks, limit_val_batches=1, limit_test_batches=1)
        loader: DataLoader = DataLoader(range(samples), batch, sampler=sampler)
        try:
            refuse_shares(trainer, Validates(), loader, test=True, choice="own")
        except Refusal as refusal:
            return str(refusal)
        return ""

    assert not refused(samples=4, batch=1, ranks=4)
    assert not refused(samples=13, batch=4, ranks=4)  # the rank that has fewest begins anew
    assert refused(samples=12, batch=4, ranks=4).startswith("data.batch_size=4: a rank's share is")
    assert refused(samples=3, batch=1, ranks=4).startswith("data=own: 3 samples for 4 ranks; use")
    drawn: Any = WeightedRandomSampler([1.0] * 12, 40)
    assert not refused(samples=12, batch=10, ranks=4, sampler=drawn)
    assert refused(samples=12, batch=11, ranks=4, sampler=drawn).endswith("give at most 10")
    validates = "data=own: 4 samples to validate on 5 ranks; use fewer ranks"
    assert refused(samples=9, batch=1, ranks=5).startswith(validates)


def test_an_output_for_each_class_is_enough() -> None:
    model: Any = SimpleNamespace(hparams={"classes": 3})
    refuse_classes(model, ["a", "b", "c"], "own")
    with pytest.raises(Refusal, match="data=own has 4 classes; give model.classes=4"):
        refuse_classes(model, ["a", "b", "c", "d"], "own")


class OwnShare(IterableDataset):
    def __len__(self) -> int:
        return 3

    def __iter__(self) -> Any:
        return iter(torch.arange(3))


def test_a_stream_may_tell_the_length_of_its_share() -> None:
    trainer: Any = SimpleNamespace(world_size=4, limit_val_batches=0, limit_test_batches=0)
    loader: DataLoader = DataLoader(OwnShare(), batch_size=2)
    refuse_shares(trainer, Validates(), loader, test=False, choice="own")


def test_batches_of_a_sampler_of_ones_own_have_no_size_to_refuse() -> None:
    trainer: Any = SimpleNamespace(world_size=2, limit_val_batches=0, limit_test_batches=0)
    batches = BatchSampler(range(8), 4, drop_last=False)
    loader: DataLoader = DataLoader(range(8), batch_sampler=batches)
    refuse_shares(trainer, Validates(), loader, test=False, choice="own")


def test_a_plain_batch_sampler_that_lightning_would_take_apart_is_refused() -> None:
    def check(loader: DataLoader, split: bool = True) -> None:
        connector = SimpleNamespace(_requires_distributed_sampler=lambda _: split)
        trainer: Any = SimpleNamespace(_data_connector=connector)
        refuse_batch_sampler(trainer, loader, "own")

    data: Any = range(8)
    plain: DataLoader = DataLoader(data, batch_sampler=BatchSampler(data, 4, False))
    with pytest.raises(Refusal, match="data=own: Lightning would make batches of one sample"):
        check(plain)
    check(plain, split=False)
    check(DataLoader(data, batch_size=4))
    check(DataLoader(data, batch_sampler=OwnBatches(data, 4, False)))


class OwnBatches(BatchSampler):
    pass


@pytest.mark.parametrize("whose", ["model", "data"])
def test_objects_that_no_checkpoint_gives_back_are_refused(whose: str) -> None:
    parts: dict[str, Any] = {"model": LightningModule(), "data": LightningDataModule()}
    objects = {"transform": partial(torch.add, 1), "width": 3, "net": torch.nn.Identity()}
    parts[whose].save_hyperparameters(objects)
    trainer: Any = SimpleNamespace(checkpoint_callbacks=[])
    refuse_model(trainer, **parts, test=False, choice="own")  # keeps none
    trainer.checkpoint_callbacks = [ModelCheckpoint()]
    held = (
        r" would hold transform, net and not load; write save_hyperparameters\(ignore="
        r"\['transform', 'net'\]\), and, as they are not in self.hparams then, "
        "self.transform = transform; self.net = net"
    )
    with pytest.raises(Refusal, match=f"^{type(parts[whose]).__name__}: checkpoints{held}"):
        refuse_model(trainer, **parts, test=False, choice="own")


def test_a_test_without_a_loader_is_refused() -> None:
    trainer: Any = SimpleNamespace(checkpoint_callbacks=[], limit_test_batches=1.0)
    with pytest.raises(
        Refusal, match="^LightningDataModule has no test_dataloader; .* or test=false"
    ):
        refuse_model(trainer, Fails("test"), LightningDataModule(), test=True, choice="own")
    refuse_model(trainer, Fails("test"), LightningDataModule(), test=False, choice="own")
    refuse_model(trainer, Fails("test"), NothingHeldOut(), test=True, choice="own")
    trainer.limit_test_batches = 0
    refuse_model(trainer, Fails("test"), LightningDataModule(), test=True, choice="own")


def test_a_look_at_what_will_be_tested_leaves_the_training_set() -> None:
    trainer: Any = SimpleNamespace(world_size=2, limit_val_batches=0, limit_test_batches=1.0)
    data = OneAtATime()
    data.setup("fit")
    refuse_shares(trainer, data, data.train_dataloader(), test=True, choice="own")
    assert torch.equal(data.numbers, torch.ones(4))


@pytest.mark.parametrize(
    ("ours", "theirs", "logs", "refused"),
    [({"size": 1}, {"size": 1}, True, False), ({"size": 1}, {"other": 2}, True, False),
     ({"size": 1}, {"size": 2}, True, True), ({"size": 1}, {"size": True}, True, True),
     ({"size": 1}, {"size": 2}, False, False)],
)  # fmt: skip
def test_what_loggers_would_refuse_is_refused_before(
    ours: dict[str, Any], theirs: dict[str, Any], logs: bool, refused: bool, tmp_path: Path
) -> None:
    model, data = Times(), LightningDataModule()
    model.save_hyperparameters(ours)
    data.save_hyperparameters(theirs)
    logger = logs and CSVLogger(tmp_path)
    trainer = Trainer(accelerator="cpu", logger=logger, enable_checkpointing=False)
    trainer.strategy.connect(model)
    trainer.datamodule = data
    outcomes: list[str] = []
    for refuse in (_log_hyperparams, lambda trainer: refuse_clashes(trainer, model, data)):
        with contextlib.suppress(RuntimeError, Refusal):
            refuse(trainer)
            outcomes.append("nothing")
    assert outcomes == ([] if refused else ["nothing"] * 2)
    trainer.enable_autolog_hparams = False
    refuse_clashes(trainer, model, data)


class HasLoaders(Fails):
    def train_dataloader(self) -> DataLoader:
        return DataLoader(range(1))

    test_dataloader = train_dataloader


def test_loaders_of_a_model_that_lightning_would_not_take_are_refused() -> None:
    trainer: Any = SimpleNamespace(checkpoint_callbacks=[], limit_test_batches=1.0)
    for data in (LightningDataModule(), NothingHeldOut()):
        instead = f"and Lightning would use only those of {type(data).__name__}: move"
        for test, more in ((True, ", test_dataloader"), (False, "")):
            told = f"^model=own has its own train_dataloader{more}, {instead}"
            with pytest.raises(Refusal, match=told):
                refuse_model(trainer, HasLoaders("test"), data, test=test, choice="own")


class NothingHeldOut(LightningDataModule):
    def train_dataloader(self) -> DataLoader:
        return DataLoader(range(8), batch_size=2)

    def val_dataloader(self) -> DataLoader:
        return DataLoader(range(1), batch_size=2)

    test_dataloader = val_dataloader


def test_too_little_to_validate_or_test_is_told_before_training() -> None:
    trainer = SimpleNamespace(
        profiler=SimpleNamespace(dirpath=None), datamodule=NothingHeldOut(), world_size=2,
        checkpoint_callbacks=[], limit_val_batches=1.0, limit_test_batches=1.0,
        loggers=[],
    )  # fmt: skip
    report = Report(OmegaConf.create({"test": True}), {"data": "mine", "model": "mine"})
    model = Fails("test")  # which has a test
    with pytest.raises(Refusal, match="data=mine: 1 samples to validate on 2 ranks"):
        report.setup(trainer, model, "fit")
    trainer.limit_val_batches = 0
    with pytest.raises(Refusal, match="data=mine: 1 samples to test on 2 ranks.* or test=false"):
        report.setup(trainer, model, "fit")
    trainer.limit_test_batches = 0
    report.setup(trainer, model, "fit")
    assert report.train_samples == 8

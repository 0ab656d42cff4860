"""What watches a metric that nothing logs says so; averaged weights are those that are tested."""

from __future__ import annotations

import json
import math
from datetime import timedelta
from pathlib import Path
from types import SimpleNamespace
from typing import Any

import pytest
import torch
from hydra.utils import instantiate
from omegaconf import OmegaConf
from pytorch_lightning import Callback, Trainer
from pytorch_lightning.callbacks import (
    EarlyStopping,
    EMAWeightAveraging,
    ModelCheckpoint,
    StochasticWeightAveraging,
    Timer,
)
from pytorch_lightning.callbacks.early_stopping import EarlyStoppingReason
from pytorch_lightning.utilities.exceptions import MisconfigurationException
from torch import Tensor
from torch.utils.data import DataLoader

from runs import resuming
from runs.config import CONF
from runs.hints import stopped_early
from runs.mistakes import mistake
from runs.progress import Progress
from runs.run import Run
from runs.stopping import StopOnSignal
from tests.runs.trainings import Loses, Times, quiet_trainer, report_of, train


class TimesIsTested(Times):
    def test_step(self, batch: Tensor, batch_idx: int) -> None:
        self.log("test/weight", self.weight)


def test_averaged_weights_are_tested(tmp_path: Path) -> None:
    trainer = quiet_trainer(
        EMAWeightAveraging(decay=0.5), resuming.EvaluatesAverages(), max_epochs=1,
        default_root_dir=tmp_path, enable_checkpointing=True,
    )  # fmt: skip
    ones, model = DataLoader(torch.ones(2)), TimesIsTested()
    trainer.fit(model, ones)  # steps to 0.9, where averaging begins, and to 0.8
    trainer.test(model, ones, ckpt_path="best", verbose=False)
    assert float(trainer.callback_metrics["test/weight"]) == pytest.approx(0.85)
    trainer.fit_loop.max_epochs = 2
    trainer.fit(model, ones, ckpt_path=trainer.checkpoint_callback.best_model_path)
    assert float(model.weight.detach()) == pytest.approx(0.6875)  # goes on from 0.8


@pytest.mark.parametrize(
    ("length", "last", "tested"),
    [
        ({"max_epochs": 4}, None, "averaged.ckpt"),
        ({"max_epochs": 4}, 0, None),
        ({"max_epochs": 4}, 2, None),  # of three epochs that are to be averaged, two were
        ({"max_epochs": -1, "max_steps": 8}, None, "averaged.ckpt"),
    ],
)
def test_the_average_of_swa_is_tested_once_it_is_made(
    length: dict[str, int], last: int | None, tested: str | None, tmp_path: Path
) -> None:
    trainer = quiet_trainer(
        StochasticWeightAveraging(swa_lrs=0.1, swa_epoch_start=1), default_root_dir=tmp_path,
        enable_checkpointing=True, **length,
    )  # fmt: skip
    ones, model = DataLoader(torch.ones(2)), TimesIsTested()
    model.on_train_epoch_end = lambda: setattr(
        trainer, "should_stop", trainer.current_epoch == last
    )
    trainer.fit(model, ones)
    weight, file = float(model.weight.detach()), resuming.save_average(trainer)
    assert (Path(file).name if file else None) == tested
    if file:
        trainer.test(model, ones, ckpt_path=file, verbose=False)
        assert float(trainer.callback_metrics["test/weight"]) == weight
        trainer.test(model, ones, ckpt_path="best", verbose=False)
        assert float(trainer.callback_metrics["test/weight"]) < weight  # that of the last step


def test_a_run_tests_the_average_rather_than_the_best(tmp_path: Path) -> None:
    trainer = quiet_trainer(
        StochasticWeightAveraging(swa_lrs=0.1, swa_epoch_start=1), max_epochs=4,
        default_root_dir=tmp_path, enable_checkpointing=True,
    )  # fmt: skip
    trainer.fit(TimesIsTested(), DataLoader(torch.ones(2)))
    run = Run.__new__(Run)
    run.config = OmegaConf.create({"train": True})
    assert Path(str(run.checkpoint(trainer))).name == "averaged.ckpt"


class Rates(Callback):
    def __init__(self) -> None:
        self.rates: list[float] = []

    def on_train_batch_start(self, trainer: Trainer, *_: Any) -> None:
        self.rates.append(trainer.optimizers[0].param_groups[0]["lr"])


@pytest.mark.parametrize(
    ("step", "at"), [(6, "batch"), (8, "epoch"), (18, "batch"), (20, "batch"), (20, "epoch")]
)
def test_a_resumed_average_is_that_of_a_run_that_was_never_interrupted(
    step: int, at: str, tmp_path: Path
) -> None:
    """Also where nothing is left to train."""
    rates, weights = [], []
    for path in (None, tmp_path / f"{at}-step={step}.ckpt"):
        swa = StochasticWeightAveraging(swa_lrs=0.5, swa_epoch_start=2, annealing_epochs=3)
        always: Any = {"save_top_k": -1, "enable_version_counter": False}
        keep = [
            ModelCheckpoint(tmp_path, "batch-{step}", every_n_train_steps=2, **always),
            ModelCheckpoint(tmp_path, "epoch-{step}", every_n_epochs=1, **always),
        ]
        ours = [resuming.GoesOnInItsEpoch(), resuming.BeginsWithinEpochs()]
        trainer = quiet_trainer(*ours, swa, seen := Rates(), *keep, max_epochs=5)
        trainer.fit(Times(), DataLoader(torch.ones(4)), ckpt_path=path)
        rates.append(seen.rates)
        weights.append(torch.load(str(resuming.save_average(trainer)))["state_dict"]["weight"])
    assert rates[1] == rates[0][step:] and len(rates[0]) == 20
    assert len(set(rates[0])) == 4 and weights[0] == pytest.approx(weights[1])


class Normed(Times):
    def __init__(self) -> None:
        super().__init__()
        self.norm = torch.nn.BatchNorm1d(1)

    def training_step(self, batch: Tensor, batch_idx: int) -> Tensor:
        return super().training_step(self.norm(batch.unsqueeze(1)), batch_idx)


@pytest.mark.parametrize(
    ("step", "at"), [(9, "batch"), (12, "batch"), (12, "epoch"), (14, "batch")]
)
def test_a_resume_measures_batch_norm_for_the_average(step: int, at: str, tmp_path: Path) -> None:
    """In a pass behind the last epoch, which Lightning begins once; also from within that pass."""
    averages = []
    for path in (None, tmp_path / f"{at}-{step}.ckpt"):
        ours = [resuming.GoesOnInItsEpoch(), resuming.BeginsWithinEpochs()]
        trainer = quiet_trainer(
            *ours, StochasticWeightAveraging(swa_lrs=0.1), keeps := Callback(), max_epochs=3,
            default_root_dir=tmp_path, enable_checkpointing=True,
        )  # fmt: skip

        def keep(trainer: Trainer, *of: Any, path: Any = path) -> None:
            if path is None:
                seen = trainer.fit_loop.epoch_loop.batch_progress.total.ready
                trainer.save_checkpoint(tmp_path / f"{'batch' if of[1:] else 'epoch'}-{seen}.ckpt")

        keeps.on_train_batch_end = keeps.on_train_epoch_end = keep  # type: ignore[method-assign]
        model = Normed()
        trainer.fit(model, DataLoader(torch.arange(8.0), batch_size=2), ckpt_path=path)
        averages.append(torch.load(str(resuming.save_average(trainer)))["state_dict"])
        assert (model.norm.momentum, trainer.accumulate_grad_batches) == (0.1, 1)
    for name in ("weight", "norm.bias", *(["norm.running_mean"] if step < 14 else [])):
        assert averages[0][name] == pytest.approx(averages[1][name])


def test_who_keeps_checkpoints_is_not_who_only_has_their_turn(tmp_path: Path) -> None:
    """Else the average of SWA has no folder to go to, and the best is not tested."""
    for keeps in ([], [resuming.ModelCheckpoint(tmp_path)]):
        swa = StochasticWeightAveraging(swa_lrs=0.1, swa_epoch_start=1)
        trainer = quiet_trainer(StopOnSignal("stopped.ckpt"), Progress(), swa, *keeps, max_epochs=4)
        trainer.fit(Times(), DataLoader(torch.ones(2)))
        assert trainer.checkpoint_callback is not None
        assert resuming.keeping(trainer) is (keeps[0] if keeps else None)
        assert bool(resuming.save_average(trainer)) == bool(keeps)


def test_what_stops_early_says_when_nothing_is_validated(tmp_path: Path) -> None:
    stop = EarlyStopping("val/loss", check_on_train_epoch_end=False)
    with pytest.warns(UserWarning, match="nothing is validated, so val/loss stops nothing") as told:
        of_training = EarlyStopping("train/loss", strict=False, check_on_train_epoch_end=True)
        train(tmp_path, stop, of_training, resuming.KeepsPatience())
    assert not any("train/loss stops nothing" in str(each.message) for each in told)


@pytest.mark.parametrize("first", ["early_stopping", "best_checkpoint"])
def test_all_that_watch_a_metric_that_is_not_logged_are_told_at_once(
    first: str, tmp_path: Path
) -> None:
    """Else each would end a run of its own, an epoch later."""
    stop = EarlyStopping("val/los", check_on_train_epoch_end=False)
    best = resuming.ModelCheckpoint(tmp_path, monitor="val/los")
    trainer = quiet_trainer(*([stop, best] if first == "early_stopping" else [best]), max_epochs=1)
    ones = DataLoader(torch.ones(2))
    with pytest.raises((RuntimeError, MisconfigurationException)) as error:
        trainer.fit(Loses(3), ones, ones)
    config = OmegaConf.load(CONF / "callbacks" / "default.yaml")
    config.early_stopping.monitor = config.best_checkpoint.monitor = "val/los"
    assert mistake(error.value, started=True, callbacks=config) == (
        "callbacks.early_stopping.monitor=val/los callbacks.best_checkpoint.monitor=val/los: "
        "nothing is logged by this name; there are: val/loss (did you mean val/loss?)"
    )


@pytest.mark.filterwarnings("error:nothing is validated")
def test_what_stops_early_waits_for_a_validation_in_a_later_epoch(tmp_path: Path) -> None:
    stop = EarlyStopping("val/loss", check_on_train_epoch_end=False)
    trainer = quiet_trainer(
        stop, resuming.KeepsPatience(), num_sanity_val_steps=0, max_epochs=2,
        check_val_every_n_epoch=2,
    )  # fmt: skip
    ones = DataLoader(torch.ones(2))
    trainer.fit(Loses(2, 1), ones, ones)
    assert stop.best_score == 1


def test_a_loss_that_is_no_number_ends_a_run_which_is_told(tmp_path: Path) -> None:
    stop = instantiate(OmegaConf.load(CONF / "callbacks" / "default.yaml").early_stopping)
    report, ones = report_of(tmp_path), DataLoader(torch.ones(2))
    trainer = quiet_trainer(stop, report, num_sanity_val_steps=0, max_epochs=4)
    trainer.fit(Loses(math.nan), ones, ones)
    told = "val/loss is no finite number any more; debug=anomaly finds where that begins"
    assert stopped_early(trainer) == [told] and trainer.current_epoch == 1
    report.finish(trainer, None)
    metrics = json.loads((tmp_path / "summary.json").read_text())["metrics"]
    assert metrics == {"val/loss": None}  # JSON has no NaN


def test_why_training_stopped_early() -> None:
    patient, never, bound = (EarlyStopping(name, patience=2) for name in "abc")
    patient.stopping_reason = EarlyStoppingReason.PATIENCE_EXHAUSTED
    patient.best_score = torch.tensor(0.12345)
    bound.stopping_reason = EarlyStoppingReason.STOPPING_THRESHOLD
    bound.stopping_reason_message = "c = 1 < 2"
    watching = [patient, never, bound]
    short, long, endless = Timer(timedelta(hours=2)), Timer("01:00:00:00"), Timer()
    for timer in (short, long, endless):
        timer._offset = 7200  # seconds, as of a training that was resumed
    trainer = SimpleNamespace(
        should_stop=True, early_stopping_callbacks=watching, callbacks=[short, long, endless, bound]
    )
    assert stopped_early(trainer) == [
        "a has not improved for 2 validations (best 0.1235)",
        "c has reached its end: c = 1 < 2",
        "its time limit of 2:00:00 is reached",
    ]
    assert not stopped_early(SimpleNamespace(**{**vars(trainer), "should_stop": False}))

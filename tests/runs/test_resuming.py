"""A resumed run has the epochs, rates, best and patience of one that was never stopped."""

from __future__ import annotations

import contextlib
import warnings
from pathlib import Path
from types import SimpleNamespace
from typing import Any

import pytest
import torch
from hydra.utils import instantiate
from omegaconf import OmegaConf
from pytorch_lightning import Callback, LightningDataModule, LightningModule, Trainer
from pytorch_lightning.callbacks import (
    BaseFinetuning,
    EarlyStopping,
    GradientAccumulationScheduler,
    LearningRateFinder,
    ModelCheckpoint,
)
from torch import Tensor
from torch.utils.data import DataLoader

from runs import resuming
from runs.config import CONF
from runs.mistakes import mistake
from runs.refusal import Refusal
from runs.resuming import KeepsUnfrozen
from tests.runs.trainings import Loses, Stream, Times, quiet_trainer


class Logs(Times):
    """What comes when: batches, validations, epochs' beginnings and ends."""

    def __init__(self) -> None:
        super().__init__()
        self.events: list[Any] = []

    ends_after = 0  # steps, if not 0

    def training_step(self, batch: Tensor, batch_idx: int) -> Tensor:
        self.events.append((self.current_epoch, batch_idx, batch.tolist()))
        self.trainer.should_stop |= self.global_step + 1 == self.ends_after
        return super().training_step(batch, batch_idx)

    def validation_step(self, batch: Tensor, batch_idx: int) -> None:
        self.events.append(f"validation at {self.global_step}")

    def on_train_epoch_start(self) -> None:
        self.events.append(f"begin {self.current_epoch}")

    def on_train_epoch_end(self) -> None:
        self.events.append(f"end {self.current_epoch}")


def events(folder: Path, ckpt_path: str | None = None, **options: Any) -> list[Any]:
    model, saved = Logs(), ModelCheckpoint(folder, "last", save_on_train_epoch_end=True)
    trainer = quiet_trainer(saved, resuming.GoesOnInItsEpoch(), num_sanity_val_steps=0, **options)
    batches: Any = DataLoader(torch.arange(8.0), 2)
    held_out: Any = DataLoader(torch.ones(1))
    trainer.fit(model, batches, held_out, ckpt_path=ckpt_path)
    return model.events


@pytest.mark.parametrize(
    "options",
    [{}, {"val_check_interval": 2}, {"accumulate_grad_batches": 3}, {"limit_val_batches": 0}],
)
def test_with_a_number_of_steps_an_epochs_end_comes_once(
    options: dict[str, Any], tmp_path: Path
) -> None:
    whole = events(tmp_path / "whole", max_steps=6, **options)
    first = events(tmp_path / "first", max_epochs=1, **options)
    last = str(tmp_path / "first" / "last.ckpt")
    assert first + events(tmp_path / "rest", last, max_steps=6, **options) == whole


def test_an_epoch_that_is_resumed_within_accumulates_as_before(tmp_path: Path) -> None:
    """8 batches an epoch, of which each 4 are a step in the first and each 2 in the second."""

    class Counts(Times):
        def __init__(self) -> None:
            super().__init__()
            self.steps: list[int] = []  # batches before each

        def on_before_optimizer_step(self, optimizer: Any) -> None:
            self.steps.append(self.trainer.fit_loop.epoch_loop.total_batch_idx + 1)

    def steps(folder: Path, ckpt_path: Path | None = None, **options: Any) -> list[int]:
        model, within = Counts(), ModelCheckpoint(folder, "{step}", every_n_train_steps=1)
        within.save_top_k = -1
        schedule = GradientAccumulationScheduler({0: 4, 1: 2})
        trainer = quiet_trainer(within, schedule, begins, max_epochs=2, **options)
        trainer.fit(model, DataLoader(torch.ones(8)), ckpt_path=ckpt_path)
        return model.steps

    begins = resuming.BeginsWithinEpochs()  # may serve several trainings
    whole = steps(tmp_path)
    assert whole == [4, 8, 10, 12, 14, 16]
    for done in (1, 4):
        file = tmp_path / f"step={done}.ckpt"
        assert steps(tmp_path / str(done), file) == whole[done:]


@pytest.mark.parametrize("length", [{"max_steps": 10}, {"max_epochs": 3}])
@pytest.mark.parametrize("by", ["max_steps", "a callback"])
@pytest.mark.parametrize("steps", [1, 6])
def test_a_run_that_ended_within_an_epoch_goes_on_within_it(
    by: str, steps: int, length: dict[str, Any], tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """As by max_time; 4 batches an epoch. Other strategies go on with the epoch's first samples."""
    whole = events(tmp_path / "whole", strategy="horovod", **length)
    if by == "max_steps":
        first = events(tmp_path / "first", strategy="horovod", max_steps=steps)
    else:
        with monkeypatch.context() as patch:
            patch.setattr(Logs, "ends_after", steps)
            first = events(tmp_path / "first", strategy="horovod", max_epochs=9)
    assert sum(isinstance(event, tuple) for event in first) == steps
    last = str(tmp_path / "first" / "last.ckpt")
    rest = events(tmp_path / "rest", last, strategy="horovod", **length)
    ended = f"end {steps // 4}"  # of which the first run has told, too
    assert ended in first
    told = [event for event in first + rest if not str(event).startswith("validation")]
    told.remove(ended)
    assert told == [event for event in whole if not str(event).startswith("validation")]
    assert rest[-1] == whole[-1]


class Wavers(Times):
    """Its losses go up and down, so that a rate is lowered in some epochs."""

    def validation_step(self, batch: Tensor, batch_idx: int) -> None:
        self.log("val/loss", float(self.current_epoch % 3))

    def configure_optimizers(self) -> Any:
        optimizer = torch.optim.SGD(self.parameters(), lr=1.0)
        plateau = torch.optim.lr_scheduler.ReduceLROnPlateau(optimizer, factor=0.5, patience=0)
        schedule = {"scheduler": plateau, "monitor": "val/loss"}
        return {"optimizer": optimizer, "lr_scheduler": schedule}


class WaversTwice(Wavers):
    """A second plateau is of each step, and what it watches is never logged."""

    def configure_optimizers(self) -> Any:
        schedule = super().configure_optimizers()["lr_scheduler"]
        optimizer = schedule["scheduler"].optimizer
        other = torch.optim.lr_scheduler.ReduceLROnPlateau(optimizer)
        of_steps = {"scheduler": other, "monitor": "?", "interval": "step", "strict": False}
        return [optimizer], [schedule, of_steps]


def rates(
    folder: Path, ckpt_path: Path | None = None, model: type[Wavers] = Wavers, **options: Any
) -> list[float]:
    """That of each step."""
    seen: list[float] = []

    class Looks(Callback):
        def on_train_batch_start(self, trainer: Any, *_: Any) -> None:
            seen.append(trainer.optimizers[0].param_groups[0]["lr"])

    end = ModelCheckpoint(folder, "end", save_on_train_epoch_end=True)
    validated = ModelCheckpoint(
        folder, "validated-{step}", "val/loss", save_top_k=-1, save_on_train_epoch_end=False
    )
    within = ModelCheckpoint(folder, "step={step}", every_n_train_steps=6, save_top_k=-1)
    trainer = quiet_trainer(
        end, validated, within, Looks(), resuming.GoesOnInItsEpoch(), resuming.StepsPlateausFirst(),
        num_sanity_val_steps=0, **options,
    )  # fmt: skip
    ones: Any = DataLoader(torch.ones(4))
    trainer.fit(model(), ones, ones, ckpt_path=ckpt_path)
    return seen


@pytest.mark.parametrize(
    "whole",
    [{"max_epochs": 6}, {"max_steps": 24}, {"max_epochs": 6, "model": WaversTwice}],
)
def test_a_resumed_run_has_the_rates_of_a_plateau(whole: dict[str, Any], tmp_path: Path) -> None:
    expected = rates(tmp_path / "whole", **whole)
    assert len(expected) == 24 and expected[0] == 1 and len(set(expected)) == 5
    model = whole.get("model", Wavers)
    for epochs, name, steps in ((2, "end", 8), (3, "end", 12), (2, "step=step=6", 6)):
        folder = tmp_path / f"{epochs} {name}"
        first = rates(folder, max_epochs=epochs, model=model)
        assert first == expected[: 4 * epochs]
        rest = rates(folder / "rest", folder / f"{name}.ckpt", **whole)
        assert rest == expected[steps:], (epochs, name)
    first = rates(tmp_path / "within", max_steps=14, model=model)  # of 16
    assert first + rates(tmp_path / "rest", tmp_path / "within" / "end.ckpt", **whole) == expected


def test_a_checkpoint_of_a_validation_is_gone_on_from(tmp_path: Path) -> None:
    """Its epoch ends once more, without the metrics that plateaus watch."""
    rates(tmp_path, max_epochs=2)
    assert len(rates(tmp_path / "rest", tmp_path / "validated-step=8.ckpt", max_epochs=6)) == 16


@pytest.mark.parametrize("wanted", [True, False])
def test_a_trainer_without_callbacks_keeps_lightnings_checkpoint(
    wanted: bool, tmp_path: Path
) -> None:
    """What steps plateaus adds none of the kind that keeps them, which would be found first."""
    trainer = quiet_trainer(
        resuming.StepsPlateausFirst(), default_root_dir=tmp_path, max_epochs=1,
        enable_checkpointing=wanted,
    )  # fmt: skip
    ones: Any = DataLoader(torch.ones(4))
    trainer.fit(Wavers(), ones, ones)
    assert len(list(tmp_path.rglob("*.ckpt"))) == wanted
    assert [type(callback) for callback in trainer.checkpoint_callbacks] == [
        ModelCheckpoint
    ] * wanted


def train_to_the_best(
    folder: Path,
    *losses: float,
    patience: int = 9,
    ckpt_path: Path | None = None,
    name: str = "{epoch}",
    top: int = 1,
) -> tuple[Path, int]:
    """The file of the best, and how many epochs there were; leaves last.ckpt."""
    best = resuming.ModelCheckpoint(folder, name, monitor="val/loss", save_top_k=top)
    stop = EarlyStopping("val/loss", patience=patience)
    trainer = quiet_trainer(
        stop, best, resuming.KeepsPatience(), num_sanity_val_steps=0, max_epochs=len(losses)
    )
    ones = DataLoader(torch.ones(2))
    trainer.fit(Loses(*losses), ones, ones, ckpt_path=ckpt_path)
    trainer.save_checkpoint(folder / "last.ckpt")
    return Path(best.best_model_path), trainer.current_epoch


def test_a_resumed_run_knows_the_best_of_before(tmp_path: Path) -> None:
    first, second, third = (tmp_path / name for name in ("first", "second", "third"))
    last = first / "last.ckpt"
    assert train_to_the_best(first, 3, 1)[0] == first / "epoch=1.ckpt"
    worse = train_to_the_best(second, 3, 1, 2, ckpt_path=last)[0]
    assert worse == first / "epoch=1.ckpt" and worse.is_file()
    better = train_to_the_best(third, 3, 1, 2, 0, ckpt_path=second / "last.ckpt")[0]
    assert better == third / "epoch=3.ckpt" and better.is_file() and worse.is_file()
    last = first.rename(tmp_path / "moved") / "last.ckpt"
    worse = train_to_the_best(tmp_path / "5", 3, 1, 2, ckpt_path=last)[0]
    assert worse == last.with_name("epoch=1.ckpt")
    worse.unlink()
    with warnings.catch_warnings(record=True) as told:
        warnings.simplefilter("always")
        best = resuming.ModelCheckpoint(tmp_path / "5", "{epoch}", monitor="val/loss")
        quiet_trainer(best).validate(Loses(3, 1), DataLoader(torch.ones(2)), ckpt_path=last)
    assert not any("best" in str(each.message) for each in told)  # no epochs follow
    with pytest.warns(UserWarning, match="the best of before is gone .*epoch=1.ckpt"):
        assert train_to_the_best(tmp_path / "4", 3, 1, 2, ckpt_path=last)[0].name == "epoch=2.ckpt"
    with pytest.warns(UserWarning, match="the best of before is gone"):  # nothing is left to train
        assert train_to_the_best(tmp_path / "6", 3, 1, ckpt_path=last)[0] == Path()


class NeedsBatches(Loses):
    """Its epochs end with what their batches left."""

    def on_train_epoch_start(self) -> None:
        self.left: list[Tensor] = []

    def training_step(self, batch: Tensor, batch_idx: int) -> Tensor:
        self.left.append(super().training_step(batch, batch_idx))
        return self.left[-1]

    def on_train_epoch_end(self) -> None:
        torch.stack(self.left).sum()


@pytest.mark.parametrize("interval", [4, 1.0])
def test_a_checkpoint_of_a_step_knows_the_validation_of_its_batch(
    interval: float, tmp_path: Path
) -> None:
    """Of the last batch, too, where the best is written at the epoch's end; it is gone on from."""

    def keeping() -> list[Any]:
        best = resuming.ModelCheckpoint(tmp_path, "best_{step}", monitor="val/loss")
        every = {"every_n_train_steps": 2, "save_top_k": -1}
        return [best, resuming.ModelCheckpoint(tmp_path, "every_{step}", **every)]  # type: ignore[arg-type]

    def trained(epochs: int, path: Path | None = None) -> tuple[Trainer, Any]:
        trainer = quiet_trainer(
            *(both := keeping()), num_sanity_val_steps=0, max_epochs=epochs,
            val_check_interval=interval,
        )  # fmt: skip
        ones = DataLoader(torch.ones(8)), DataLoader(torch.ones(1))
        trainer.fit(NeedsBatches(1, 2), *ones, ckpt_path=path)
        return trainer, both[0]

    _, best = trained(1)
    known = []
    for step in (2, 4, 6, 8):
        state = torch.load(tmp_path / f"every_step={step}.ckpt", weights_only=False)
        known.append(Path(state["callbacks"][best.state_key]["best_model_path"]).name)
    step = 4 if interval == 4 else 8
    assert known == ["" if each < step else f"best_step={step}.ckpt" for each in (2, 4, 6, 8)]
    trainer, best = trained(2, tmp_path / "every_step=8.ckpt")
    assert trainer.global_step == 16 and trainer.current_epoch == 2
    assert Path(best.best_model_path).name == f"best_step={step}.ckpt"


def test_where_nothing_can_be_validated_a_checkpoint_is_written_all_the_same(
    tmp_path: Path,
) -> None:
    every = resuming.ModelCheckpoint(tmp_path, "{step}", every_n_train_steps=2, save_top_k=-1)
    trainer = quiet_trainer(every, max_epochs=1, val_check_interval=2)
    trainer.fit(Loses(1), DataLoader(torch.ones(4)), [])
    assert sorted(path.name for path in tmp_path.iterdir()) == ["step=2.ckpt", "step=4.ckpt"]


@pytest.mark.parametrize(
    "gone_on_from", ["last.ckpt", "epoch=1-val/loss=1.ckpt", "epoch=0-val/loss=3.ckpt"]
)
def test_the_best_may_be_named_by_a_metric_with_a_slash(gone_on_from: str, tmp_path: Path) -> None:
    name = "{epoch}-{val/loss:.0f}"
    train_to_the_best(tmp_path / "first", 3, 1, name=name)
    there = (tmp_path / "first").rename(tmp_path / "moved")
    if gone_on_from.startswith("epoch=0"):  # as save_top_k=2 keeps it, in another folder
        (there / gone_on_from).parent.mkdir(exist_ok=True)
        (there / "last.ckpt").rename(there / gone_on_from)
    best, _ = train_to_the_best(
        tmp_path / "second", 3, 1, 2, ckpt_path=there / gone_on_from, name=name
    )
    assert best == there / "epoch=1-val" / "loss=1.ckpt"


def test_bests_of_one_name_in_folders_of_their_own_are_told_apart(tmp_path: Path) -> None:
    name = "{epoch}-{val/loss:.0f}"
    train_to_the_best(tmp_path / "first", 1, 1.4, name=name, top=2)
    there = (tmp_path / "first").rename(tmp_path / "moved")
    path = there / "epoch=1-val" / "loss=1.ckpt"
    best, _ = train_to_the_best(tmp_path / "2", 1, 1.4, 3, ckpt_path=path, name=name, top=2)
    assert best == there / "epoch=0-val" / "loss=1.ckpt"


class HasCallbacks(Loses):
    """Of its own, for what conf/ has callbacks for."""

    def configure_callbacks(self) -> Any:
        keeps = ModelCheckpoint(monitor="val/loss"), ModelCheckpoint(save_top_k=-1)
        return [EarlyStopping("val/loss", patience=50), *keeps]


def test_a_modules_own_callbacks_replace_those_of_conf(tmp_path: Path) -> None:
    """All but the one that keeps last.ckpt."""
    conf: Any = OmegaConf.load(CONF / "callbacks" / "default.yaml")
    conf.run_dir = str(tmp_path)
    names = ("early_stopping", "best_checkpoint", "last_checkpoint")
    of_conf = [instantiate(conf[name]) for name in names]
    trainer = quiet_trainer(
        *of_conf, num_sanity_val_steps=0, max_epochs=8, default_root_dir=tmp_path
    )
    ones = DataLoader(torch.ones(2))
    trainer.fit(HasCallbacks(*range(8)), ones, ones)
    assert [stop.patience for stop in trainer.early_stopping_callbacks] == [50]
    assert trainer.current_epoch == 8
    assert [each in trainer.callbacks for each in of_conf] == [False, False, True]
    best = resuming.keeping(trainer)
    assert best is not None and Path(best.best_model_path).name == "epoch=0-step=2.ckpt"
    assert best not in of_conf and (tmp_path / "checkpoints" / "last.ckpt").is_file()


class Searched(Times):
    lr = 0.1

    def configure_optimizers(self) -> torch.optim.Optimizer:
        return torch.optim.SGD(self.parameters(), lr=self.lr)


class SearchesLater(LearningRateFinder):
    def on_fit_start(self, trainer: Trainer, pl_module: LightningModule) -> None:
        pass


def test_a_resumed_run_searches_no_learning_rate(tmp_path: Path) -> None:
    """Which would have Lightning begin anew."""
    search, later = LearningRateFinder(num_training_steps=5), SearchesLater()
    checkpoint = tmp_path / "a.ckpt"
    for epochs, more in ((1, []), (2, [search, later, resuming.LeavesOutSearches()])):
        trainer = quiet_trainer(*more, max_epochs=epochs, default_root_dir=tmp_path)
        model, path = Searched(), checkpoint if more else None
        with warnings.catch_warnings(record=True) as told:
            warnings.simplefilter("always")
            trainer.fit(model, DataLoader(torch.ones(3)), ckpt_path=path)
        trainer.save_checkpoint(checkpoint)
    assert trainer.global_step == 6 and model.weight.item() == pytest.approx(1 - 6 * 0.1)
    kept: list[Any] = trainer.callbacks  # type: ignore[attr-defined]
    assert later in kept and search not in kept
    assert sum("LearningRateFinder left out" in str(each.message) for each in told) == 1
    tests = Trainer(accelerator="cpu", logger=False, callbacks=[search])
    resuming.LeavesOutSearches().setup(tests, model, "test")
    assert search in tests.callbacks  # type: ignore[attr-defined]


class Unfreezes(BaseFinetuning):
    """As Lightning's BackboneFinetuning: frozen in `setup`, unfrozen as epoch 1 begins."""

    def freeze_before_training(self, pl_module: LightningModule) -> None:
        self.freeze(pl_module.backbone, train_bn=False)

    def finetune_function(self, pl_module: LightningModule, epoch: int, optimizer: Any) -> None:
        if epoch == 1:
            self.unfreeze_and_add_param_group(pl_module.backbone, optimizer)


class HasABackbone(Times):
    def __init__(self) -> None:
        super().__init__()
        self.backbone = torch.nn.Sequential(torch.nn.Linear(1, 1), torch.nn.BatchNorm1d(1))

    def training_step(self, batch: Tensor, batch_idx: int) -> Tensor:
        return (self.weight * self.backbone(batch.unsqueeze(1))).mean()

    def configure_optimizers(self) -> torch.optim.Optimizer:
        return torch.optim.SGD([self.weight], lr=0.1)


def test_what_was_unfrozen_is_trained_after_a_resume(tmp_path: Path) -> None:
    weights, alike = [], DataLoader(torch.arange(8) % 2.0, batch_size=2)  # batches
    for resumed in (False, True):
        torch.manual_seed(0)
        keep = ModelCheckpoint(tmp_path, filename="{step}", every_n_train_steps=6, save_top_k=-1)
        model = HasABackbone()
        trainer = quiet_trainer(keep, Unfreezes(), KeepsUnfrozen(), max_epochs=3)
        file = tmp_path / "step=6.ckpt" if resumed else None
        trainer.fit(model, alike, ckpt_path=file)
        weights.append([value.clone() for value in model.state_dict().values()])
    assert weights[0] == weights[1] and model.backbone[0].weight.requires_grad
    model = HasABackbone()  # which another run trains whole
    trainer = quiet_trainer(KeepsUnfrozen(), max_epochs=3)
    file = tmp_path / "frozen.ckpt"
    content = torch.load(tmp_path / "step=6.ckpt", weights_only=True)
    torch.save(content | {"frozen": ["backbone.0.weight"], "untracked": ["backbone.1"]}, file)
    with contextlib.suppress(ValueError):  # its optimizer has fewer groups, which comes later
        trainer.fit(model, alike, ckpt_path=file)
    assert model.backbone[0].weight.requires_grad and model.backbone[1].track_running_stats


class Settings(Times):
    """An optimizer and a scheduler with settings that checkpoints keep."""

    def __init__(self, kind: type[torch.optim.Optimizer], epochs: int, **settings: Any) -> None:
        super().__init__()
        self.kind, self.epochs, self.settings = kind, epochs, settings
        self.told: list[str] = []

    def on_fit_start(self) -> None:
        self.asked = resuming.settings(self.trainer)

    def on_train_start(self) -> None:
        self.told.append(resuming.kept_settings(self.trainer, self.asked))

    def configure_optimizers(self) -> Any:
        optimizer = self.kind(self.parameters(), lr=0.1, **self.settings)
        return [optimizer], [torch.optim.lr_scheduler.CosineAnnealingLR(optimizer, self.epochs)]


class Cycles(Settings):
    """Its schedule sets the momentum too, or the first of betas."""

    def configure_optimizers(self) -> Any:
        (optimizer,), _ = super().configure_optimizers()
        return [optimizer], [torch.optim.lr_scheduler.OneCycleLR(optimizer, 0.1, self.epochs)]


def test_settings_that_a_checkpoint_brings_are_told(tmp_path: Path) -> None:
    ones = DataLoader(torch.ones(2))

    def fit(model: Settings, ckpt_path: Path | None) -> Settings:
        trainer = quiet_trainer(max_epochs=1 if ckpt_path is None else 2)
        trainer.fit(model, ones, ckpt_path=ckpt_path)
        if ckpt_path is None:
            trainer.save_checkpoint(tmp_path / "last.ckpt")
        return model

    last, adamw = tmp_path / "last.ckpt", torch.optim.AdamW
    assert fit(Settings(adamw, 3, weight_decay=0.01), None).told == [""]
    assert fit(Settings(adamw, 3, weight_decay=0.01), last).told == [""]
    assert fit(Settings(adamw, 6, weight_decay=0.5), last).told == [
        "AdamW.weight_decay 0.01 (not 0.5), CosineAnnealingLR.T_max 3 (not 6)"
    ]
    with pytest.raises(Refusal, match="another optimizer than SGD: it has no momentum, dampening"):
        fit(Settings(torch.optim.SGD, 3, momentum=0.9), last)
    for kind in (adamw, torch.optim.SGD):
        fit(Cycles(kind, 3, weight_decay=0.01), None)
        assert fit(Cycles(kind, 3, weight_decay=0.01), last).told == [""]
        assert fit(Cycles(kind, 3, weight_decay=0.5), last).told == [
            f"{kind.__name__}.weight_decay 0.01 (not 0.5)"
        ]


class OneCycle(Times):
    every = 1  # steps

    def on_train_start(self) -> None:
        resuming.warn_of_short_schedules(self.trainer)

    def configure_optimizers(self) -> Any:
        optimizer = torch.optim.SGD(self.parameters(), lr=0.1)
        steps = int(self.trainer.estimated_stepping_batches)  # -1 for a stream
        steps = steps // self.every if steps > 0 else 99
        schedule = torch.optim.lr_scheduler.OneCycleLR(optimizer, 0.1, steps)
        return [optimizer], [{"scheduler": schedule, "interval": "step", "frequency": self.every}]


class EachSecond(OneCycle):
    every = 2


class EachEpoch(OneCycle):
    def configure_optimizers(self) -> Any:
        optimizers, (schedule,) = super().configure_optimizers()
        return optimizers, [schedule | {"interval": "epoch"}]


def test_a_schedule_of_too_few_steps_is_told_before_it_ends(tmp_path: Path) -> None:
    """Of a checkpoint after 2 of 3 epochs with half the batches."""

    def fit(
        batches: int, stream: bool = False, model: type[OneCycle] = OneCycle, **options: Any
    ) -> None:
        folder = tmp_path / model.__name__ / str(batches)
        keep = ModelCheckpoint(folder, "{epoch}", save_top_k=-1)
        within = ModelCheckpoint(folder, "{step}", every_n_train_steps=3, save_top_k=-1)
        trainer = quiet_trainer(keep, within, max_epochs=3, **options)
        data: Any = Stream() if stream else torch.ones(batches)
        trainer.fit(model(), DataLoader(data), ckpt_path=resume)

    resume: Path | None = None
    fit(2)
    fit(2, model=EachSecond)
    fit(2, model=EachEpoch)
    resume = tmp_path / "OneCycle" / "2" / "epoch=1.ckpt"
    with warnings.catch_warnings():
        warnings.filterwarnings("error", "OneCycleLR has")
        fit(2)
        fit(4, max_steps=6)
        fit(4, accumulate_grad_batches=2)
        with contextlib.suppress(ValueError):  # who knows before that there are 7 batches?
            fit(7, stream=True)
        resume = tmp_path / "OneCycle" / "2" / "step=3.ckpt"  # within the second epoch
        fit(2)
        resume = tmp_path / "EachSecond" / "2" / "epoch=1.ckpt"
        fit(2, model=EachSecond)
        resume = tmp_path / "EachEpoch" / "2" / "epoch=1.ckpt"
        fit(8, model=EachEpoch)  # more steps, and as many epochs
    resume = tmp_path / "OneCycle" / "2" / "epoch=1.ckpt"
    with (
        pytest.warns(UserWarning, match="OneCycleLR has 6 steps, .* or trainer.max_steps=6"),
        pytest.raises(ValueError, match="Tried to step 7 times") as ended,
    ):
        fit(4)
    told = mistake(ended.value, started=True)
    assert told and told.startswith("the schedule of the learning rate has 6 steps, and this")


def test_a_checkpoint_of_a_torch_without_a_newer_argument_is_gone_on_from() -> None:
    optimizer = torch.optim.AdamW([torch.nn.Parameter(torch.ones(()))])
    for name in ("fused", "differentiable"):  # as if it had been loaded from such a file
        del optimizer.param_groups[0][name]
    trainer: Any = SimpleNamespace(optimizers=[optimizer], lr_scheduler_configs=[])
    assert resuming.kept_settings(trainer, resuming.settings(trainer)) == ""


def test_a_resumed_run_has_the_patience_that_it_is_given(tmp_path: Path) -> None:
    assert train_to_the_best(tmp_path / "first", 1, 2)[1] == 2
    resumed = {"patience": 2, "ckpt_path": tmp_path / "first" / "last.ckpt"}
    assert train_to_the_best(tmp_path / "second", 1, 2, 3, 4, 5, **resumed)[1] == 3


class Divided(LightningDataModule):
    def __init__(self, split_seed: int) -> None:
        super().__init__()
        self.save_hyperparameters()

    def train_dataloader(self) -> DataLoader:
        return DataLoader(torch.ones(2))

    def test_dataloader(self) -> DataLoader:
        return DataLoader(torch.ones(2))


def test_a_split_by_another_seed_than_the_checkpoints_is_told(tmp_path: Path) -> None:
    trainer = quiet_trainer(resuming.TellsOfAnotherSplit(), ModelCheckpoint(tmp_path), max_epochs=1)
    model = Times()
    model.test_step = lambda batch: None
    trainer.fit(model, Divided(0))
    path = trainer.checkpoint_callback.best_model_path
    with pytest.warns(UserWarning, match="data.split_seed=1: the checkpoint was trained with 0: "):
        trainer.test(model, Divided(1), ckpt_path=path)
    with warnings.catch_warnings():
        warnings.filterwarnings("error", "data.split_seed")
        trainer.test(model, Divided(0), ckpt_path=path)
        content = torch.load(path)
        del content["datamodule_hyper_parameters"]  # as of other data
        torch.save(content, path)
        trainer.test(model, Divided(0), ckpt_path=path)

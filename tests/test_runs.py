"""The newest checkpoint, predictions, what a resumed run tells of its time; in one process."""

from __future__ import annotations

import contextlib
import csv
import inspect
import json
import os
import re
import resource
import shlex
import signal
import subprocess
import sys
import time
import warnings
from collections.abc import Callable, Iterator
from functools import partial
from pathlib import Path
from types import SimpleNamespace
from typing import Any

import fsspec
import pytest
import torch
from horovod.common.exceptions import HorovodInternalError
from omegaconf import OmegaConf
from pytorch_lightning import Callback, LightningDataModule, LightningModule, Trainer
from pytorch_lightning.callbacks import (
    EMAWeightAveraging,
    ModelCheckpoint,
    StochasticWeightAveraging,
)
from pytorch_lightning.loggers import CSVLogger
from pytorch_lightning.loggers.utilities import _log_hyperparams
from pytorch_lightning.loops.optimization import automatic
from pytorch_lightning.utilities.data import _get_dataloader_init_args_and_kwargs
from pytorch_lightning.utilities.exceptions import MisconfigurationException
from torch import Tensor
from torch.nn.functional import cross_entropy
from torch.utils.data import (
    BatchSampler,
    DataLoader,
    Dataset,
    DistributedSampler,
    IterableDataset,
    RandomSampler,
    Sampler,
    SequentialSampler,
    Subset,
)

from benchmarks import hardware
from runs import checkpoints, resuming
from runs.anatomy import Anatomy
from runs.beforehand import refuse_batch_sampler, refuse_clashes, refuse_model, refuse_shares
from runs.config import CONF, parse
from runs.curves import Curves
from runs.folders import new_folder
from runs.mistakes import BY_POSITION, NO_LOSS, mistake, no_metric
from runs.predictions import Predictions
from runs.progress import Progress
from runs.ranks import gather_texts
from runs.refusal import Refusal
from runs.report import Report, _lr
from runs.run import Run, to_go_on
from runs.stopping import SIGNAL, StopOnSignal, Stopped
from runs.versions import commit
from strategies import HorovodStrategy


@pytest.mark.timeout(10)  # it tried for ever
def test_no_folder_is_made_behind_a_link_to_what_is_not_there(tmp_path: Path) -> None:
    (tmp_path / "logs").symlink_to(tmp_path / "disk")
    with pytest.raises(FileExistsError, match="logs"):
        new_folder(tmp_path / "logs" / "classifier" / "runs")


def test_the_last_checkpoint_is_the_one_written_last(tmp_path: Path) -> None:
    assert checkpoints.last(tmp_path / "nothing") is None
    written = ["b/checkpoints/last.ckpt", "a/checkpoints/last.ckpt", "a/checkpoints/stopped.ckpt",
               "b/checkpoints/epoch_003.ckpt", "b/last.ckpt"]  # fmt: skip
    for second, name in enumerate(written):
        file = tmp_path / name
        file.parent.mkdir(parents=True, exist_ok=True)
        file.touch()
        os.utime(file, (second, second))
    assert checkpoints.last(tmp_path) == tmp_path / "a/checkpoints/stopped.ckpt"
    (tmp_path / "a/checkpoints/stopped.ckpt").unlink()
    assert checkpoints.last(tmp_path) == tmp_path / "a/checkpoints/last.ckpt"
    (tmp_path / "a" / ".hydra").mkdir()
    (tmp_path / "a" / ".hydra" / "overrides.yaml").write_text("- model.lr=1\n- debug=limit\n")
    assert checkpoints.last(tmp_path) == tmp_path / "b/checkpoints/last.ckpt"


def test_the_best_is_that_of_the_newest_training_that_has_one(tmp_path: Path) -> None:
    assert checkpoints.best(tmp_path) is None
    ends = {"a": (True, "a.ckpt"), "b": (True, "b.ckpt"), "c": (False, "a.ckpt"), "d": (True, None)}
    for second, (name, (train, checkpoint)) in enumerate(ends.items()):
        file = tmp_path / name / "summary.json"
        file.parent.mkdir()
        file.write_text(json.dumps({"train": train, "checkpoint": checkpoint}))
        os.utime(file, (second, second))
    assert checkpoints.best(tmp_path) == Path("b.ckpt")
    (tmp_path / "b" / ".hydra").mkdir()
    (tmp_path / "b" / ".hydra" / "overrides.yaml").write_text("- debug=overfit\n")
    assert checkpoints.best(tmp_path) == Path("a.ckpt")
    (tmp_path / "b" / ".hydra" / "overrides.yaml").write_text("- profiler=trace\n")
    assert checkpoints.best(tmp_path) == Path("a.ckpt")
    moved = tmp_path / "a" / "checkpoints" / "a.ckpt"
    moved.parent.mkdir()
    moved.touch()
    assert checkpoints.best(tmp_path) == moved
    for text in ("", "[]", "{}"):
        (tmp_path / "d" / "summary.json").write_text(text)
        with pytest.raises(ValueError, match="d/summary.json is no summary of a run"):
            checkpoints.best(tmp_path)


@pytest.mark.parametrize("launched", [None, "", "horovodrun -np 2 'my python' -u"])
@pytest.mark.parametrize("name", ["logs/last.ckpt", "my logs/epoch=1,µ.ckpt", "it's/last.ckpt"])
def test_the_line_to_go_on_can_be_pasted(
    name: str, launched: str | None, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    asked = ["model.lr=0.1", "~callbacks.early_stopping", "ckpt_path=last", "run_dir=x"]
    hydra = SimpleNamespace(overrides=SimpleNamespace(task=asked))
    monkeypatch.setattr("runs.run.HydraConfig", SimpleNamespace(get=lambda: hydra))
    monkeypatch.setattr("runs.run.launched_size", lambda: None if launched is None else 2)
    line = f"{launched} template.py model.lr=9" if launched else "mine.sh"
    monkeypatch.setenv("HOROVOD_LAUNCHED", line)
    monkeypatch.setattr("sys.argv", ["template.py"])
    monkeypatch.chdir(tmp_path)
    words = shlex.split(to_go_on(tmp_path / name))
    start = {None: [sys.executable], "": ["..."]}.get(launched) or shlex.split(launched)
    assert words[: len(start)] == start
    typed = words[len(start) :]
    assert typed[:3] == ["template.py", "model.lr=0.1", "~callbacks.early_stopping"]
    command = to_go_on(tmp_path / "my logs" / "a.ckpt")
    assert command.endswith(" \"ckpt_path='my logs/a.ckpt'\"")
    assert len(typed) == 4 and parse(typed[3]).value() == name
    assert parse(typed[3]).key_or_group == "ckpt_path"


def test_a_checkpoint_goes_to_storage_that_has_no_folders() -> None:
    checkpoints.WholeFiles().save_checkpoint({"state_dict": {}}, "memory://run/last.ckpt")
    with fsspec.open("memory://run/last.ckpt") as file:
        assert torch.load(file) == {"state_dict": {}}
    assert not Path("memory:").exists()


@pytest.mark.parametrize(
    ("content", "train", "why"),
    [
        ({"state_dict": {}, "optimizer_states": []}, True, ""),
        ({"state_dict": {}}, True, "it has weights alone"),
        ({"state_dict": {}}, False, ""),
        ({"weight": torch.ones(2)}, False, "no state_dict in it"),
        (3, False, "no state_dict in it"),
    ],
)
def test_what_can_be_gone_on_from(tmp_path: Path, content: Any, train: bool, why: str) -> None:
    torch.save(content, tmp_path / "a.ckpt")
    error = checkpoints.unreadable(tmp_path / "a.ckpt", train)
    assert error is None if not why else why in str(error)


def test_a_checkpoint_that_cannot_be_written_leaves_the_one_before(tmp_path: Path) -> None:
    file, io = tmp_path / "new" / "last.ckpt", checkpoints.WholeFiles()
    io.save_checkpoint({"weights": torch.ones(10)}, file)
    soft, hard = resource.getrlimit(resource.RLIMIT_FSIZE)
    failing: list[tuple[int, Any]] = [(300, torch.ones(10)), (9000, torch.ones(90_000))]
    failing.append((soft, lambda: 0))  # which pickle cannot keep
    try:
        for size, weights in failing:
            resource.setrlimit(resource.RLIMIT_FSIZE, (size, hard))
            expected = AttributeError if size == soft else Refusal
            with pytest.raises(expected, match="lambda|last.ckpt: .* cannot be written: File too"):
                io.save_checkpoint({"weights": weights}, file)
    finally:
        resource.setrlimit(resource.RLIMIT_FSIZE, (soft, hard))
    assert [f.name for f in file.parent.iterdir()] == ["last.ckpt"]
    assert torch.equal(io.load_checkpoint(file)["weights"], torch.ones(10))
    io.save_checkpoint({"weights": torch.zeros(10)}, file)
    assert not io.load_checkpoint(file)["weights"].any()


class Forward(LightningModule):
    def forward(self, batch: Tensor) -> Tensor:
        return batch


class Doubles(LightningModule):
    def predict_step(self, batch: Tensor, batch_idx: int, dataloader_idx: int = 0) -> Any:
        return {"twice": 2 * batch, "both": (batch, -batch.unsqueeze(1))}


class Sums(LightningModule):
    def predict_step(self, batch: Tensor, batch_idx: int) -> Any:
        return batch.sum()


class LeavesOneOut(LightningModule):
    def predict_step(self, batch: Tensor, batch_idx: int) -> Any:
        return {"twice": 2 * batch, "steps": batch[1:]}


class Names(LightningModule):
    def predict_step(self, batch: Tensor, batch_idx: int) -> Any:
        return {"twice": 2 * batch, "names": [f"ü {number}" for number in batch.tolist()]}


class NamesThree(LightningModule):
    def predict_step(self, batch: Tensor, batch_idx: int) -> Any:
        return ["a", "b", "c"]


class NamesOnce(LightningModule):
    def predict_step(self, batch: Tensor, batch_idx: int) -> Any:
        return {"names": "cat"}


class Numbers(LightningDataModule):
    """0 to 6, there only after setup("test")."""

    def setup(self, stage: str) -> None:
        if stage == "test":
            self.numbers = torch.arange(7)

    def test_dataloader(self) -> DataLoader:
        return DataLoader(self.numbers, batch_size=3)  # type: ignore[arg-type]


def predict(model: LightningModule, data: LightningDataModule, folder: Path) -> Predictions:
    predictions = Predictions()
    trainer = Trainer(
        accelerator="cpu", logger=False, default_root_dir=folder, callbacks=[predictions],
        enable_progress_bar=False, enable_model_summary=False, enable_checkpointing=False,
    )  # fmt: skip
    trainer.predict(model, data, return_predictions=False)
    return predictions


def test_predictions_keep_their_form_and_come_from_the_test_set(tmp_path: Path) -> None:
    written = predict(Doubles(), Numbers(), tmp_path)
    predictions, numbers = torch.load(tmp_path / "predictions.pt"), torch.arange(7)
    assert written.samples == 7 and list(predictions) == ["twice", "both"]
    assert torch.equal(predictions["twice"], 2 * numbers)
    assert torch.equal(predictions["both"][1], -numbers.unsqueeze(1))


def predicted_by(model: LightningModule, folder: str) -> Any:
    trainer = Trainer(
        accelerator="cpu", strategy=HorovodStrategy(), logger=False, default_root_dir=folder,
        callbacks=[Predictions()], enable_progress_bar=False, enable_model_summary=False,
        enable_checkpointing=False,
    )  # fmt: skip
    trainer.predict(model, Numbers(), return_predictions=False)
    trainer.strategy.barrier()
    return torch.load(Path(folder) / "predictions.pt")


def names_of_ranks(folder: str) -> Any:
    return predicted_by(Names(), folder)


def test_predictions_may_be_texts(launch: Callable, tmp_path: Path) -> None:
    for predicted in launch(names_of_ranks, 2, folder=str(tmp_path)):
        assert predicted["names"] == [f"ü {number}" for number in range(7)]
        assert torch.equal(predicted["twice"], 2 * torch.arange(7))


class Ragged(LightningModule):
    """Samples as wide as the largest of their batch is high."""

    def predict_step(self, batch: Tensor, batch_idx: int) -> Any:
        return {"wide": batch.unsqueeze(1).expand(-1, int(batch.max()) + 1), "twice": 2 * batch}


def widths_of_ranks(folder: str) -> Any:
    return predicted_by(Ragged(), folder)


def test_predictions_may_be_of_several_shapes(launch: Callable, tmp_path: Path) -> None:
    widths = {1: [3, 3, 3, 6, 6, 6, 7], 2: [5, 6, 5, 6, 5, 6, 7]}  # rank 0 has 0, 2, 4 and 6
    for ranks, expected in widths.items():
        (folder := tmp_path / str(ranks)).mkdir()
        for predicted in launch(widths_of_ranks, ranks, folder=str(folder)):
            assert [row.tolist() for row in predicted["wide"]] == [
                [number] * width for number, width in enumerate(expected)
            ]
            assert torch.equal(predicted["twice"], 2 * torch.arange(7))


class Validates(Numbers):
    def val_dataloader(self) -> DataLoader:
        return DataLoader(torch.arange(4))  # type: ignore[arg-type]


def test_a_sample_and_a_batch_for_each_rank_are_enough() -> None:
    def refused(samples: int, batch: int, ranks: int) -> str:
        trainer: Any = SimpleNamespace(world_size=ranks, limit_val_batches=1, limit_test_batches=1)
        loader: DataLoader = DataLoader(range(samples), batch)  # type: ignore[arg-type]
        try:
            refuse_shares(trainer, Validates(), loader, test=True, choice="own")
        except Refusal as refusal:
            return str(refusal)
        return ""

    assert not refused(samples=4, batch=1, ranks=4)
    assert not refused(samples=13, batch=4, ranks=4)  # the rank that has fewest begins anew
    assert refused(samples=12, batch=4, ranks=4).startswith("data.batch_size=4: a rank's share is")
    assert refused(samples=3, batch=1, ranks=4).startswith("data=own: 3 samples for 4 ranks; use")
    validates = "data=own: 4 samples to validate on 5 ranks; use fewer ranks"
    assert refused(samples=9, batch=1, ranks=5).startswith(validates)


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
    loader: DataLoader = DataLoader(range(8), batch_sampler=batches)  # type: ignore[arg-type]
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
    parts[whose].save_hyperparameters({"transform": partial(torch.add, 1)})
    trainer: Any = SimpleNamespace(checkpoint_callbacks=[])
    refuse_model(trainer, **parts, test=False, choice="own")  # keeps none
    trainer.checkpoint_callbacks = [ModelCheckpoint()]
    held = f"{type(parts[whose]).__name__}: .* hold transform \\(partial\\) and"
    with pytest.raises(Refusal, match=held):
        refuse_model(trainer, **parts, test=False, choice="own")


class Shuffled(Numbers):
    def predict_dataloader(self) -> DataLoader:
        return DataLoader(torch.arange(7), batch_size=3, shuffle=True)  # type: ignore[arg-type]


def test_predictions_are_in_the_order_of_the_data_set(tmp_path: Path) -> None:
    predict(Doubles(), Shuffled(), tmp_path)
    assert torch.load(tmp_path / "predictions.pt")["twice"].tolist() == [0, 2, 4, 6, 8, 10, 12]


class OfFiles(LightningDataModule):
    """Seven of ten files, of two classes."""

    def test_dataloader(self) -> DataLoader:
        return DataLoader(Subset(Files(), [9, 0, 1, 2, 3, 4, 5]), batch_size=3, shuffle=True)


class Files(Dataset):
    def __init__(self) -> None:
        self.class_to_idx = {"cat": 0, "dog": 1}
        self.samples = [(f"{number}.png", 0) for number in range(10)]

    def __len__(self) -> int:
        return len(self.samples)

    def __getitem__(self, index: int) -> Tensor:
        return torch.tensor(index)


class Labels(LightningModule):
    def predict_step(self, batch: Tensor, batch_idx: int) -> Tensor:
        return batch % 2


class Scores(LightningModule):
    def predict_step(self, batch: Tensor, batch_idx: int) -> Tensor:
        return batch / 2


class Logits(LightningModule):
    def predict_step(self, batch: Tensor, batch_idx: int) -> Tensor:
        return batch.unsqueeze(1).expand(-1, 2)


@pytest.mark.parametrize(
    ("model", "head"),
    [
        (Labels, ["file,prediction,class", "9.png,1,dog", "0.png,0,cat", "1.png,1,dog"]),
        (Scores, ["file,prediction", "9.png,4.5", "0.png,0.0", "1.png,0.5"]),
        (Doubles, ["file", "9.png", "0.png", "1.png"]),
        (Logits, ["file", "9.png", "0.png", "1.png"]),
    ],
)
def test_files_have_their_names_beside_the_predictions(
    model: type[LightningModule], head: list[str], tmp_path: Path
) -> None:
    assert predict(model(), OfFiles(), tmp_path).names_files
    rows = (tmp_path / "predictions.csv").read_text().splitlines()
    assert rows[:4] == head and len(rows) == 8
    (tmp_path / "predictions.csv").unlink()
    assert not predict(Doubles(), Numbers(), tmp_path).names_files
    assert not (tmp_path / "predictions.csv").exists()


class Changes(LightningModule):
    def predict_step(self, batch: Tensor, batch_idx: int) -> Any:
        return {"score": batch / 2} if batch_idx == 2 else {"label": batch}


class Several(Numbers):
    def predict_dataloader(self) -> Any:
        return [DataLoader(torch.arange(7)), DataLoader(torch.arange(7))]  # type: ignore[arg-type]


class Stream(IterableDataset):
    def __iter__(self) -> Any:
        return iter(torch.arange(7))


class Streams(Numbers):
    def predict_dataloader(self) -> DataLoader:
        return DataLoader(Stream(), batch_size=3)


class StreamsItsTest(LightningDataModule):
    def test_dataloader(self) -> DataLoader:
        return DataLoader(Stream(), batch_size=3)


class OneByOne(Numbers):
    def predict_dataloader(self) -> DataLoader:
        return DataLoader(torch.arange(7), batch_size=None)  # type: ignore[arg-type]


class Endless(Numbers):
    def predict_dataloader(self) -> DataLoader:
        return DataLoader(Squares(), batch_size=3, sampler=range(7))


class Squares(Dataset):
    def __getitem__(self, index: int) -> int:
        return index**2


@pytest.mark.parametrize(
    ("model", "data", "message"),
    [
        (Doubles, Several, "there are several loaders"),
        (Doubles, Streams, "one DataLoader"),
        (Sums, Numbers, r"predict_step returned shape \(\) for a batch of 3 samples"),
        (Changes, Numbers, r"returned {'label': 'int64'} for a batch and {'score': 'float32'} for"),
        (LeavesOneOut, Numbers, r"predict_step returned shape \(2,\) for a batch of 3 samples"),
        (NamesOnce, Numbers, "predict_step returned 'cat' for a batch of 3 samples"),
        (NamesThree, Numbers, r"returned \['a', 'b', 'c'\] for a batch of 1 samples"),
    ],
)
def test_predictions_refused(model: Any, data: Any, message: str, tmp_path: Path) -> None:
    with pytest.raises(Refusal, match=f"predict=true: .*{message}"):
        predict(model(), data(), tmp_path)
    assert not (tmp_path / "predictions.pt").exists()


@pytest.mark.parametrize(
    ("model", "data", "message"),
    [
        (Forward, Numbers, "Forward has no predict_step"),
        (Doubles, LightningDataModule, "has neither predict_dataloader nor test_dataloader"),
        (Doubles, Streams, "one DataLoader with a data set of known length is needed"),
        (Doubles, StreamsItsTest, "one DataLoader with a data set of known length is needed"),
        (Doubles, Numbers, "7 samples to predict on 8 ranks; use fewer ranks, or more data"),
        (Doubles, Several, "there are several loaders to predict: return one, as of a Concat"),
        (Doubles, OneByOne, "one DataLoader with a data set of known length is needed"),
        (Doubles, Endless, "one DataLoader with a data set of known length is needed"),
    ],
)
def test_predictions_refused_before_training(model: Any, data: Any, message: str) -> None:
    for stage in ("fit", "test"):  # also where nothing is trained
        trainer: Any = SimpleNamespace(datamodule=data(), world_size=8, limit_predict_batches=1.0)
        with pytest.raises(Refusal, match=f"predict=true: .*{message}"):
            Predictions().setup(trainer, model(), stage)


def test_a_sample_for_each_rank_is_enough_to_predict() -> None:
    trainer: Any = SimpleNamespace(datamodule=Numbers(), world_size=7, limit_predict_batches=1.0)
    Predictions().setup(trainer, Doubles(), "fit")


class ByPosition(Numbers):
    def test_dataloader(self) -> DataLoader:
        return DataLoader(self.numbers, 3)  # type: ignore[arg-type]


def test_predictions_of_a_loader_that_lightning_cannot_make_are_refused_before_training() -> None:
    trainer: Any = SimpleNamespace(datamodule=ByPosition(), world_size=2, limit_predict_batches=1.0)
    with pytest.raises(MisconfigurationException, match=BY_POSITION):
        Predictions().setup(trainer, Doubles(), "fit")


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

    def training_step(self, batch: Tensor, batch_idx: int) -> None:  # type: ignore[override]
        loss = (self.weight * self.other * batch).mean()
        self.log("train/loss", loss)
        self.manual_backward(loss)
        for optimizer in self.optimizers()[::-1]:  # type: ignore[union-attr]
            optimizer.step()
            optimizer.zero_grad()

    def configure_optimizers(self) -> Any:
        return [torch.optim.SGD([p], lr=0.1) for p in (self.weight, self.other)]


def test_curves_of_two_optimizers_stand_beside_the_losses(tmp_path: Path) -> None:
    config = OmegaConf.create(
        {"data": {"batch_size": 2}, "ckpt_path": None, "run_dir": "x", "train": True}
    )
    report = Report(config, {"model": "m", "data": "d", "strategy": "single"})
    trainer = Trainer(
        accelerator="cpu", logger=CSVLogger(tmp_path, "", ""), log_every_n_steps=5, max_epochs=2,
        callbacks=[Curves(), Anatomy(warmup=0), report], enable_progress_bar=False,
        enable_model_summary=False, enable_checkpointing=False,
    )  # fmt: skip
    trainer.fit(TimesTwo(), DataLoader(torch.ones(20, 1), batch_size=2))
    rows = list(csv.DictReader((tmp_path / "metrics.csv").open()))
    steps = {key: [int(row["step"]) for row in rows if row[key]] for key in rows[0]}
    for key in ("train/loss", "lr", "lr_1", "grad_norm", "grad_norm_1"):
        assert steps[key] == [4, 9, 14, 19], key
    for key in ("time/step_ms", "samples_per_second"):
        assert steps[key] == [9, 19], key


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
    config = OmegaConf.create({"data": {}, "ckpt_path": None, "run_dir": "x", "train": True})
    report = Report(config, {"model": "m", "data": "d", "strategy": "single"})
    model = Times()
    model.configure_optimizers = lambda: RateOfItsOwn(model.parameters())  # type: ignore
    trainer = Trainer(
        accelerator="cpu", logger=CSVLogger(tmp_path, "", ""), log_every_n_steps=1, max_epochs=1,
        callbacks=[Curves(), report], enable_progress_bar=False, enable_model_summary=False,
        enable_checkpointing=False,
    )  # fmt: skip
    trainer.fit(model, DataLoader(torch.ones(2)))  # type: ignore[arg-type]
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
    trainer = Trainer(
        accelerator="cpu", logger=CSVLogger(tmp_path, "", ""), log_every_n_steps=1, max_epochs=1,
        callbacks=[Curves()], enable_progress_bar=False, enable_model_summary=False,
        enable_checkpointing=False,
    )  # fmt: skip
    trainer.fit(Looks(), DataLoader(torch.tensor([1, 1, 2])))  # type: ignore[arg-type]
    rows = list(csv.DictReader((tmp_path / "metrics.csv").open()))
    assert [row["lr"] for row in rows] == ["0.1"] * 3 and "grad_norm" not in rows[0]


def test_curves_of_a_model_with_a_part_that_gets_no_gradient(tmp_path: Path) -> None:
    model = Times()
    model.unused = torch.nn.Parameter(torch.ones(()))
    trainer = Trainer(
        accelerator="cpu", logger=CSVLogger(tmp_path, "", ""), log_every_n_steps=1, max_epochs=1,
        callbacks=[Curves()], enable_progress_bar=False, enable_model_summary=False,
        enable_checkpointing=False,
    )  # fmt: skip
    trainer.fit(model, DataLoader(torch.ones(1)))  # type: ignore[arg-type]
    (row,) = csv.DictReader((tmp_path / "metrics.csv").open())
    assert float(row["grad_norm"]) == 1


def test_no_curves_where_no_step_is_logged(tmp_path: Path) -> None:
    train(tmp_path, Curves(), log_every_n_steps=0)
    assert "grad_norm" not in (tmp_path / "metrics.csv").read_text()


class TrainsAndTests(Numbers):
    """Each stage's data is there after its own setup alone."""

    def setup(self, stage: str) -> None:
        super().setup(stage)
        if stage == "fit":
            self.ones = torch.ones(4)

    def train_dataloader(self) -> DataLoader:
        return DataLoader(self.ones, drop_last=True)  # type: ignore[arg-type]


class TrainsAndPredicts(Times):
    def predict_step(self, batch: Tensor, batch_idx: int) -> Tensor:
        return 2 * batch


def test_predictions_of_the_test_set_after_a_training_without_a_test(tmp_path: Path) -> None:
    trainer = Trainer(
        accelerator="cpu", logger=False, default_root_dir=tmp_path, callbacks=[Predictions()],
        enable_progress_bar=False, enable_checkpointing=False, max_epochs=1,
    )  # fmt: skip
    model, data = TrainsAndPredicts(), TrainsAndTests()
    trainer.fit(model, data)
    trainer.predict(model, data, return_predictions=False)
    assert torch.load(tmp_path / "predictions.pt").tolist() == [0, 2, 4, 6, 8, 10, 12]


class WithoutNames(Numbers):
    def predict_dataloader(self) -> DataLoader:
        return DataLoader(torch.arange(7), 3)  # type: ignore[arg-type]


def test_a_loader_that_lightning_cannot_make_anew_is_told(tmp_path: Path) -> None:
    with pytest.raises(MisconfigurationException) as error:
        predict(Doubles(), WithoutNames(), tmp_path)
    message = mistake(error.value, started=True)
    assert message and "write DataLoader(data, batch_size=...)" in message


class OneAtATime(Numbers):
    """Holds the data of the stage that it was set up for last."""

    def setup(self, stage: str) -> None:
        self.numbers = torch.ones(4) if stage == "fit" else torch.arange(7)

    def train_dataloader(self) -> DataLoader:
        return DataLoader(self.numbers)  # type: ignore[arg-type]


def test_a_look_at_what_will_be_predicted_leaves_the_training_set(tmp_path: Path) -> None:
    trainer = Trainer(
        accelerator="cpu", logger=False, default_root_dir=tmp_path, callbacks=[Predictions()],
        enable_progress_bar=False, enable_checkpointing=False, max_epochs=1,
    )  # fmt: skip
    trainer.fit(TrainsAndPredicts(), OneAtATime())
    assert trainer.global_step == 4


def test_a_look_at_what_will_be_tested_leaves_the_training_set() -> None:
    trainer: Any = SimpleNamespace(world_size=2, limit_val_batches=0, limit_test_batches=1.0)
    data = OneAtATime()
    data.setup("fit")
    refuse_shares(trainer, data, data.train_dataloader(), test=True, choice="own")
    assert torch.equal(data.numbers, torch.ones(4))


class PreparesForEach(TrainsAndTests):
    """What it predicts is there after setup("predict") alone."""

    def setup(self, stage: str) -> None:
        super().setup(stage)
        if stage == "predict":
            self.wanted = torch.arange(3)

    def predict_dataloader(self) -> DataLoader:
        return DataLoader(self.wanted)  # type: ignore[arg-type]


def test_what_is_predicted_is_looked_at_when_it_is_set_up(tmp_path: Path) -> None:
    trainer = Trainer(
        accelerator="cpu", logger=False, default_root_dir=tmp_path, callbacks=[Predictions()],
        enable_progress_bar=False, enable_checkpointing=False, max_epochs=1,
    )  # fmt: skip
    model, data = TrainsAndPredicts(), PreparesForEach()
    trainer.fit(model, data)
    trainer.predict(model, data, return_predictions=False)
    assert torch.load(tmp_path / "predictions.pt").tolist() == [0, 2, 4]


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


@pytest.mark.parametrize("stage", ["validation", "test", "predict"])
def test_what_was_done_before_a_failure_is_told(
    stage: str, tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    config = {"data": {}, "ckpt_path": None, "train": True, "test": True, "run_dir": str(tmp_path)}
    report = Report(OmegaConf.create(config), {"model": "m", "data": "d", "strategy": "single"})
    trainer = Trainer(
        accelerator="cpu", logger=False, default_root_dir=tmp_path, max_epochs=1,
        callbacks=[report, Predictions()], enable_progress_bar=False, enable_checkpointing=False,
    )  # fmt: skip
    model, data = Fails(stage), TrainsAndTests()
    data.val_dataloader = data.train_dataloader
    with pytest.raises(Refusal, match=stage):
        trainer.fit(model, data)
        trainer.test(model, data, verbose=False)
        trainer.predict(model, data, return_predictions=False)
    file = tmp_path / "summary.json"
    assert file.is_file() == (stage != "validation")
    tested = stage == "predict"
    assert ("test    test/loss 3\n" in capsys.readouterr().out) == tested
    if file.is_file():
        summary = json.loads(file.read_text())
        assert summary["steps"] == 4 and summary["predictions"] is None
        assert (summary["train_samples"], summary["drop_last"]) == (4, True)
        assert summary["metrics"] == ({"test/loss": 3} if tested else {})


def test_the_commit_in_a_summary_tells_of_files_that_differ(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr("runs.versions.ROOT", tmp_path)
    file, me = tmp_path / "a.py", ["-c", "user.name=me", "-c", "user.email=me@here"]
    file.touch()
    for words in (["init", "-q"], ["add", "."], [*me, "commit", "-q", "-m", "first"]):
        subprocess.run(["git", "-C", str(tmp_path), *words], check=True)
    subprocess.run(["git", "-C", str(tmp_path), *me, "tag", "-m", "of mine", "v1"], check=True)
    assert re.fullmatch("[0-9a-f]{40}", str(commit()))
    file.write_text("changed")
    assert re.fullmatch("[0-9a-f]{40}-dirty", str(commit()))
    if os.geteuid() == 0:  # of another user, as in a container
        for path in (tmp_path, tmp_path / ".git"):
            os.chown(path, 12345, 12345)
        assert re.fullmatch("[0-9a-f]{40}-dirty", str(commit()))
        monkeypatch.setattr(hardware, "ROOT", tmp_path)
        assert hardware._git("rev-parse", "HEAD")


def texts_of_ranks(texts: list[list[str]]) -> list[list[str]]:
    strategy = HorovodStrategy()
    strategy.parallel_devices = [torch.device("cpu")]
    return [gather_texts(strategy, each[strategy.global_rank]) for each in texts]


def test_each_rank_has_a_text_also_where_it_is_empty(launch: Callable) -> None:
    texts = [["a host", "ü\nlonger"], ["", "one"], ["", ""]]
    assert launch(texts_of_ranks, 2, texts=texts) == [texts, texts]


@pytest.mark.parametrize(
    ("loaders", "others", "told"),
    [
        (DataLoader(Stream()), 0, "Stream"),
        (DataLoader(Stream()), 1, ""),
        ({"a": DataLoader(Stream()), "b": [DataLoader(Stream())]}, 0, "Stream"),
        (DataLoader(range(4), batch_sampler=[[0, 1], [2, 3]]), 0, "list"),  # type: ignore[arg-type]
        (DataLoader(range(4), sampler=RandomSampler(range(4))), 0, "BatchSampler"),  # type: ignore[arg-type]
        (DataLoader(range(4), sampler=DistributedSampler(range(4), 2, 0)), 0, None),  # type: ignore[arg-type]
        (
            DataLoader(
                range(4),  # type: ignore[arg-type]
                batch_sampler=BatchSampler(DistributedSampler(range(4), 2, 0), 2, False),  # type: ignore[arg-type]
            ),
            0,
            None,
        ),
        (range(4), 0, None),
    ],
)
def test_ranks_that_train_on_the_same_batches_are_told(
    loaders: Any, others: int, told: str | None,
    monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str],
) -> None:  # fmt: skip
    """Of what Lightning has not split over them; a second rank's batch is `others` larger."""
    texts: list[str] = []
    monkeypatch.setattr("runs.ranks.gather_texts", lambda _, text: texts.append(text) or texts)
    trainer = SimpleNamespace(
        world_size=2, is_global_zero=True, strategy=None, train_dataloader=loaders
    )
    for number in (0, others):
        capsys.readouterr()
        report = Report(OmegaConf.create({}), {"data": "mine"})
        for _ in range(2):  # only the first batch is looked at
            report.on_train_batch_end(trainer, None, None, [number + torch.arange(2), "a"], 0)
    assert len(texts) == (0 if told is None else 2)
    printed = capsys.readouterr().out
    assert bool(printed) == bool(told)
    assert (
        not told
        or f"warning data=mine: all 2 ranks were given the same first batch: {told} has" in printed
    )


def train(
    folder: Path, *callbacks: Callback, ckpt_path: str | None = None, max_epochs: int = 1,
    log_every_n_steps: int = 1, fast_dev_run: bool = False, model: type[Times] = Times,
) -> Report:  # fmt: skip
    config = OmegaConf.create(
        {"data": {"batch_size": 2}, "ckpt_path": ckpt_path, "run_dir": "x", "train": True}
    )
    report = Report(config, {"model": "m", "data": "d", "strategy": "single"})
    trainer = Trainer(
        accelerator="cpu", logger=CSVLogger(folder, name="", version=""),
        log_every_n_steps=log_every_n_steps, callbacks=[report, Progress(), *callbacks],
        enable_model_summary=False, max_epochs=max_epochs, fast_dev_run=fast_dev_run,
    )  # fmt: skip
    twenty, one = DataLoader(torch.ones(20), batch_size=2), DataLoader(torch.ones(1))  # type: ignore[arg-type]
    trainer.fit(model(), twenty, one, ckpt_path=ckpt_path)
    return report


def test_a_run_resumed_within_an_epoch_tells_its_own_time(
    tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    saved = ModelCheckpoint(tmp_path, "last", every_n_train_steps=8)
    train(tmp_path / "first", saved)
    capsys.readouterr()
    began = time.monotonic()
    report = train(tmp_path / "second", ckpt_path=str(tmp_path / "last.ckpt"))
    passed = time.monotonic() - began
    assert report.samples == 4 and 0 < report.seconds < passed
    (seconds,) = re.findall(r"epoch 1/1  ([\d.]+) s", capsys.readouterr().out)
    assert float(seconds) <= passed + 0.1
    with open(tmp_path / "second" / "metrics.csv") as file:
        (rate,) = [r for row in csv.DictReader(file) if (r := row["samples_per_second"])]
    assert float(rate) == pytest.approx(report.samples / report.seconds)


class TakesTime(Times):
    """A second for a batch of training, a hundred for one of validation."""

    now = 0.0

    def training_step(self, batch: Tensor, batch_idx: int) -> Tensor:
        self.now += 1
        return super().training_step(batch, batch_idx)

    def validation_step(self, batch: Tensor, batch_idx: int) -> None:
        self.now += 100


def test_speed_is_of_training_alone_also_beside_validations_within_an_epoch(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    model, ones = TakesTime(), DataLoader(torch.ones(5))  # type: ignore[arg-type]
    monkeypatch.setattr("runs.report.time", SimpleNamespace(monotonic=lambda: model.now))
    config = OmegaConf.create({"data": {}, "ckpt_path": None, "run_dir": "x", "train": True})
    report = Report(config, {"model": "m", "data": "d", "strategy": "single"})
    trainer = Trainer(
        accelerator="cpu", logger=CSVLogger(tmp_path, "", ""), val_check_interval=2, max_epochs=2,
        callbacks=[report], enable_progress_bar=False, enable_model_summary=False,
        enable_checkpointing=False,
    )  # fmt: skip
    trainer.fit(model, ones, ones)
    assert (report.samples, report.seconds) == (10, 10)


@pytest.mark.parametrize(
    "optimizers, accumulate, told",
    [(1, 1, "20.0 ms: "), (1, 2, "30.0 ms a batch: "), (2, 1, "30.0 ms a batch: ")],
)
def test_where_a_batch_is_no_step_the_mean_of_batches_is_told(
    optimizers: int, accumulate: int, told: str, tmp_path: Path,
    capsys: pytest.CaptureFixture[str],
) -> None:  # fmt: skip
    config = {"data": {}, "ckpt_path": None, "run_dir": str(tmp_path), "train": True}
    report = Report(OmegaConf.create(config), {"model": "m", "data": "d", "strategy": "single"})
    anatomy = Anatomy(warmup=0)
    trainer = Trainer(
        accelerator="cpu", logger=False, callbacks=[report, anatomy], enable_progress_bar=False,
        enable_model_summary=False, enable_checkpointing=False, max_epochs=2,
        accumulate_grad_batches=accumulate,
    )  # fmt: skip
    model = Times() if optimizers == 1 else TimesTwo()
    trainer.fit(model, DataLoader(torch.ones(6)))  # type: ignore[arg-type]
    assert anatomy.found is not None
    anatomy.found["step_ms"] |= {"median": 20.0, "mean": 30.0}
    report.finish(trainer, None)
    assert f"\nstep    {told}" in capsys.readouterr().out


def test_the_curve_of_the_speed_is_that_of_all_ranks(monkeypatch: pytest.MonkeyPatch) -> None:
    clock, logged = iter([0.0, 2.0]), list[Any]()
    monkeypatch.setattr("runs.report.time", SimpleNamespace(monotonic=lambda: next(clock)))
    logger = SimpleNamespace(log_metrics=lambda metrics, step: logged.append((metrics, step)))
    loop = SimpleNamespace(epoch_loop=SimpleNamespace(_batches_that_stepped=5))
    trainer: Any = SimpleNamespace(world_size=4, loggers=[logger], fit_loop=loop)
    report, nobody = Report(OmegaConf.create({}), {}), Any
    report.on_train_epoch_start(trainer, nobody)
    report.samples += 10  # of this rank
    report.on_train_epoch_end(trainer, nobody)
    assert logged == [({"samples_per_second": 20}, 4)]


class Logs(Times):
    """What comes when: batches, validations, epochs' beginnings and ends."""

    def __init__(self) -> None:
        super().__init__()
        self.events: list[Any] = []

    def training_step(self, batch: Tensor, batch_idx: int) -> Tensor:
        self.events.append((self.current_epoch, batch_idx, batch.tolist()))
        return super().training_step(batch, batch_idx)

    def validation_step(self, batch: Tensor, batch_idx: int) -> None:
        self.events.append(f"validation at {self.global_step}")

    def on_train_epoch_start(self) -> None:
        self.events.append(f"begin {self.current_epoch}")

    def on_train_epoch_end(self) -> None:
        self.events.append(f"end {self.current_epoch}")


def events(folder: Path, ckpt_path: str | None = None, **options: Any) -> list[Any]:
    model, saved = Logs(), ModelCheckpoint(folder, "last", save_on_train_epoch_end=True)
    trainer = Trainer(
        accelerator="cpu", logger=False, enable_progress_bar=False, num_sanity_val_steps=0,
        enable_model_summary=False, callbacks=[saved, resuming.EndsEpochsOnce()], **options,
    )  # fmt: skip
    batches: Any = DataLoader(torch.arange(8.0), 2)  # type: ignore[arg-type]
    held_out: Any = DataLoader(torch.ones(1))  # type: ignore[arg-type]
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


class Wavers(Times):
    """Its losses go up and down, so that a rate is lowered in some epochs."""

    def validation_step(self, batch: Tensor, batch_idx: int) -> None:
        self.log("val/loss", float(self.current_epoch % 3))

    def configure_optimizers(self) -> Any:
        optimizer = torch.optim.SGD(self.parameters(), lr=1.0)
        plateau = torch.optim.lr_scheduler.ReduceLROnPlateau(optimizer, factor=0.5, patience=0)
        schedule = {"scheduler": plateau, "monitor": "val/loss"}
        return {"optimizer": optimizer, "lr_scheduler": schedule}


def rates(folder: Path, ckpt_path: Path | None = None, **options: Any) -> list[float]:
    """That of each step."""
    seen: list[float] = []

    class Looks(Callback):
        def on_train_batch_start(self, trainer: Any, *_: Any) -> None:
            seen.append(trainer.optimizers[0].param_groups[0]["lr"])

    end = ModelCheckpoint(folder, "end", save_on_train_epoch_end=True)
    within = ModelCheckpoint(folder, "step={step}", every_n_train_steps=6, save_top_k=-1)
    trainer = Trainer(
        accelerator="cpu", logger=False, enable_progress_bar=False, num_sanity_val_steps=0,
        enable_model_summary=False,
        callbacks=[end, within, Looks(), resuming.EndsEpochsOnce(), resuming.StepsPlateausFirst()],
        **options,
    )  # fmt: skip
    ones: Any = DataLoader(torch.ones(4))  # type: ignore[arg-type]
    trainer.fit(Wavers(), ones, ones, ckpt_path=ckpt_path)
    return seen


@pytest.mark.parametrize("whole", [{"max_epochs": 6}, {"max_steps": 24}])
def test_a_resumed_run_has_the_rates_of_a_plateau(whole: dict[str, int], tmp_path: Path) -> None:
    expected = rates(tmp_path / "whole", **whole)
    assert len(expected) == 24 and expected[0] == 1 and len(set(expected)) == 5
    for epochs, name, steps in ((2, "end", 8), (3, "end", 12), (2, "step=step=6", 6)):
        folder = tmp_path / f"{epochs} {name}"
        first = rates(folder, max_epochs=epochs)
        assert first == expected[: 4 * epochs]
        rest = rates(folder / "rest", folder / f"{name}.ckpt", **whole)
        assert rest == expected[steps:], (epochs, name)


@pytest.mark.parametrize("wanted", [True, False])
def test_a_trainer_without_callbacks_keeps_lightnings_checkpoint(
    wanted: bool, tmp_path: Path
) -> None:
    """What steps plateaus is of the kind of those that keep them, and is none."""
    trainer = Trainer(
        accelerator="cpu", logger=False, enable_progress_bar=False, enable_model_summary=False,
        callbacks=[resuming.StepsPlateausFirst()], default_root_dir=tmp_path, max_epochs=1,
        enable_checkpointing=wanted,
    )  # fmt: skip
    ones: Any = DataLoader(torch.ones(4))  # type: ignore[arg-type]
    trainer.fit(Wavers(), ones, ones)
    assert len(list(tmp_path.rglob("*.ckpt"))) == wanted


class IsValidated(Times):
    def validation_step(self, batch: Tensor, batch_idx: int) -> None:
        pass


def test_a_run_that_is_done_says_that_it_trains_nothing(
    tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    train(tmp_path / "first", ModelCheckpoint(tmp_path, "last"))
    assert "nothing was trained" not in capsys.readouterr().out
    train(tmp_path / "second", ckpt_path=str(tmp_path / "last.ckpt"))
    output = capsys.readouterr().out
    assert "nothing was trained: the checkpoint has 1 of 1 epochs, 10 steps; to go on" in output
    assert "a larger trainer.max_epochs, or max_steps or max_time where that ended it" in output
    train(tmp_path / "third", max_epochs=0, model=IsValidated)  # as it does, to begin with
    output = capsys.readouterr().out
    assert "nothing was trained: trainer.max_epochs is 0, max_steps -1, limit_" in output


class TenBatches(IterableDataset):
    def __iter__(self) -> Any:
        return iter(torch.ones(10, 2))


@pytest.mark.parametrize(
    ("options", "told"),
    [
        ({"val_check_interval": 13, "max_epochs": 2}, True),
        ({"val_check_interval": 13, "max_epochs": 1}, False),  # nobody knows: it ended before
        ({"val_check_interval": 10, "max_epochs": 2}, False),
        ({"max_steps": 5}, False),
        ({"val_check_interval": 13, "check_val_every_n_epoch": None, "max_epochs": 2}, False),
    ],
)
def test_a_validation_that_never_came_is_told(
    options: dict[str, Any], told: bool, tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    config = OmegaConf.create({"data": {}, "ckpt_path": None, "run_dir": "x", "train": True})
    report = Report(config, {"model": "m", "data": "d", "strategy": "single"})
    trainer = Trainer(
        accelerator="cpu", logger=False, callbacks=[report], enable_progress_bar=False,
        enable_model_summary=False, enable_checkpointing=False, **options,
    )  # fmt: skip
    batches = DataLoader(TenBatches(), batch_size=None)
    trainer.fit(IsValidated(), batches, DataLoader(torch.ones(1)))  # type: ignore[arg-type]
    line = "nothing was validated: no epoch has as many batches as trainer.val_check_interval=13;"
    assert (line in capsys.readouterr().out) == told


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
    line = "curves  have no step of training: 10 steps, and trainer.log_every_n_steps is 11;"
    assert (line in capsys.readouterr().out) == told


class Loses(Times):
    """Its validations have these losses, the first that of epoch 0."""

    def __init__(self, *losses: float) -> None:
        super().__init__()
        self.losses = losses

    def validation_step(self, batch: Tensor, batch_idx: int) -> None:
        self.log("val/loss", self.losses[self.trainer.current_epoch])


def train_to_the_best(
    folder: Path, *losses: float, patience: int = 9, ckpt_path: Path | None = None
) -> tuple[Path, int]:
    """The file of the best, and how many epochs there were; leaves last.ckpt."""
    best = resuming.ModelCheckpoint(folder, "{epoch}", monitor="val/loss")
    stop = resuming.EarlyStopping("val/loss", patience=patience)
    trainer = Trainer(
        accelerator="cpu", logger=False, enable_progress_bar=False, num_sanity_val_steps=0,
        enable_model_summary=False, callbacks=[stop, best], max_epochs=len(losses),
    )  # fmt: skip
    ones = DataLoader(torch.ones(2))  # type: ignore[arg-type]
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
        Trainer(
            accelerator="cpu", logger=False, enable_progress_bar=False,
            callbacks=resuming.ModelCheckpoint(tmp_path / "5", "{epoch}", monitor="val/loss"),
        ).validate(Loses(3, 1), DataLoader(torch.ones(2)), ckpt_path=last)  # type: ignore[arg-type]  # fmt: skip
    assert not any("best" in str(each.message) for each in told)  # no epochs follow
    with pytest.warns(UserWarning, match="the best of before is gone .*epoch=1.ckpt"):
        assert train_to_the_best(tmp_path / "4", 3, 1, 2, ckpt_path=last)[0].name == "epoch=2.ckpt"


@pytest.mark.parametrize(
    ("ours", "theirs", "refused"),
    [({"size": 1}, {"size": 1}, False), ({"size": 1}, {"other": 2}, False),
     ({"size": 1}, {"size": 2}, True), ({"size": 1}, {"size": True}, True)],
)  # fmt: skip
def test_what_loggers_would_refuse_is_refused_before(
    ours: dict[str, Any], theirs: dict[str, Any], refused: bool, tmp_path: Path
) -> None:
    model, data = Times(), LightningDataModule()
    model.save_hyperparameters(ours)
    data.save_hyperparameters(theirs)
    trainer = Trainer(accelerator="cpu", logger=CSVLogger(tmp_path), enable_checkpointing=False)
    trainer.strategy.connect(model)
    trainer.datamodule = data  # type: ignore[attr-defined]
    outcomes: list[str] = []
    for refuse in (_log_hyperparams, lambda trainer: refuse_clashes(trainer, model, data)):
        with contextlib.suppress(RuntimeError, Refusal):
            refuse(trainer)
            outcomes.append("nothing")
    assert outcomes == ([] if refused else ["nothing"] * 2)


class TimesIsTested(Times):
    def test_step(self, batch: Tensor, batch_idx: int) -> None:
        self.log("test/weight", self.weight)


def test_averaged_weights_are_tested(tmp_path: Path) -> None:
    trainer = Trainer(
        accelerator="cpu", logger=False, enable_progress_bar=False, enable_model_summary=False,
        callbacks=[EMAWeightAveraging(decay=0.5), resuming.EvaluatesAverages()], max_epochs=1,
        default_root_dir=tmp_path,
    )  # fmt: skip
    ones, model = DataLoader(torch.ones(2)), TimesIsTested()  # type: ignore[arg-type]
    trainer.fit(model, ones)  # steps to 0.9, where averaging begins, and to 0.8
    trainer.test(model, ones, ckpt_path="best", verbose=False)
    assert float(trainer.callback_metrics["test/weight"]) == pytest.approx(0.85)
    trainer.fit_loop.max_epochs = 2
    trainer.fit(model, ones, ckpt_path=trainer.checkpoint_callback.best_model_path)
    assert float(model.weight.detach()) == pytest.approx(0.6875)  # goes on from 0.8


@pytest.mark.parametrize(("stops", "tested"), [(False, "averaged.ckpt"), (True, None)])
def test_the_average_of_swa_is_tested_once_it_is_made(
    stops: bool, tested: str | None, tmp_path: Path
) -> None:
    trainer = Trainer(
        accelerator="cpu", logger=False, enable_progress_bar=False, enable_model_summary=False,
        callbacks=[StochasticWeightAveraging(swa_lrs=0.1, swa_epoch_start=1)], max_epochs=4,
        default_root_dir=tmp_path,
    )  # fmt: skip
    ones, model = DataLoader(torch.ones(2)), TimesIsTested()  # type: ignore[arg-type]
    if stops:
        model.on_train_epoch_end = lambda: setattr(trainer, "should_stop", True)  # type: ignore
    trainer.fit(model, ones)
    weight, file = float(model.weight.detach()), resuming.save_average(trainer)
    assert (Path(file).name if file else None) == tested
    if file:
        trainer.test(model, ones, ckpt_path=file, verbose=False)
        assert float(trainer.callback_metrics["test/weight"]) == weight
        trainer.test(model, ones, ckpt_path="best", verbose=False)
        assert float(trainer.callback_metrics["test/weight"]) < weight  # that of the last step


def test_a_run_tests_the_average_rather_than_the_best(tmp_path: Path) -> None:
    trainer = Trainer(
        accelerator="cpu", logger=False, enable_progress_bar=False, enable_model_summary=False,
        callbacks=[StochasticWeightAveraging(swa_lrs=0.1, swa_epoch_start=1)], max_epochs=4,
        default_root_dir=tmp_path,
    )  # fmt: skip
    trainer.fit(TimesIsTested(), DataLoader(torch.ones(2)))  # type: ignore[arg-type]
    run = Run.__new__(Run)
    run.config = OmegaConf.create({"train": True})
    assert Path(str(run.checkpoint(trainer))).name == "averaged.ckpt"


def test_who_keeps_checkpoints_is_not_who_only_has_their_turn(tmp_path: Path) -> None:
    """Else the average of SWA has no folder to go to, and the best is not tested."""
    for keeps in ([], [resuming.ModelCheckpoint(tmp_path)]):
        swa = StochasticWeightAveraging(swa_lrs=0.1, swa_epoch_start=1)
        trainer = Trainer(
            accelerator="cpu", logger=False, enable_model_summary=False, max_epochs=4,
            callbacks=[StopOnSignal("stopped.ckpt"), Progress(), swa, *keeps],
        )  # fmt: skip
        trainer.fit(Times(), DataLoader(torch.ones(2)))  # type: ignore[arg-type]
        assert trainer.checkpoint_callback is not None
        assert resuming.keeping(trainer) is (keeps[0] if keeps else None)
        assert bool(resuming.save_average(trainer)) == bool(keeps)


def test_what_stops_early_says_when_nothing_is_validated(tmp_path: Path) -> None:
    stop = resuming.EarlyStopping("val/loss", check_on_train_epoch_end=False)
    with pytest.warns(UserWarning, match="nothing is validated, so val/loss stops nothing"):
        train(tmp_path, stop)


@pytest.mark.parametrize("first", ["early_stopping", "best_checkpoint"])
def test_all_that_watch_a_metric_that_is_not_logged_are_told_at_once(
    first: str, tmp_path: Path
) -> None:
    """Else each would end a run of its own, an epoch later."""
    stop = resuming.EarlyStopping("val/los", check_on_train_epoch_end=False)
    best = resuming.ModelCheckpoint(tmp_path, monitor="val/los")
    trainer = Trainer(
        accelerator="cpu", logger=False, enable_progress_bar=False, enable_model_summary=False,
        callbacks=[stop, best] if first == "early_stopping" else [best], max_epochs=1,
    )  # fmt: skip
    ones = DataLoader(torch.ones(2))  # type: ignore[arg-type]
    with pytest.raises((RuntimeError, MisconfigurationException)) as error:
        trainer.fit(Loses(3), ones, ones)
    config = OmegaConf.load(CONF / "callbacks" / "default.yaml")
    config.early_stopping.monitor = config.best_checkpoint.monitor = "val/los"
    assert mistake(error.value, started=True, callbacks=config) == (
        "callbacks.early_stopping.monitor=val/los callbacks.best_checkpoint.monitor=val/los: "
        "nothing is logged by this name; there are: val/loss (did you mean val/loss?)"
    )


class OfTwoLoaders(Times):
    def validation_step(self, batch: Tensor, batch_idx: int, dataloader_idx: int) -> None:
        self.log("val/loss", batch.mean())
        self.log(f"val/of_{dataloader_idx}", batch.mean(), add_dataloader_idx=False)


@pytest.mark.parametrize(
    ("monitor", "warned"),
    [("val/loss/dataloader_idx_1", ""), ("val/of_1", ""),
     ("val/loss", " (did you mean val/loss/dataloader_idx_0?)")],
)  # fmt: skip
def test_what_several_loaders_log_is_known_before_training(
    monitor: str, warned: str, capsys: pytest.CaptureFixture[str]
) -> None:
    config = OmegaConf.create({"callbacks": {"best": {"monitor": monitor}}})
    hook = Callback()
    hook.on_sanity_check_end = Report(config, {}).on_sanity_check_end  # type: ignore[method-assign]
    trainer = Trainer(
        accelerator="cpu", logger=False, enable_progress_bar=False, enable_model_summary=False,
        enable_checkpointing=False, max_epochs=1, callbacks=hook,
    )  # fmt: skip
    ones = DataLoader(torch.ones(2))  # type: ignore[arg-type]
    trainer.fit(OfTwoLoaders(), ones, [ones, ones])
    output = capsys.readouterr().out
    names = "val/loss/dataloader_idx_0, val/of_0, val/loss/dataloader_idx_1, val/of_1"
    first = f"warning callbacks.best.monitor={monitor}: nothing is logged by this name; there are: "
    assert output == (
        f"{first}{names}{warned}; as it is, the run ends with an epoch\n" * bool(warned)
    )


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


def test_settings_that_a_checkpoint_brings_are_told(tmp_path: Path) -> None:
    ones = DataLoader(torch.ones(2))  # type: ignore[arg-type]

    def fit(model: Settings, ckpt_path: Path | None) -> Settings:
        trainer = Trainer(
            accelerator="cpu", logger=False, enable_progress_bar=False, enable_model_summary=False,
            enable_checkpointing=False, max_epochs=1 if ckpt_path is None else 2,
        )  # fmt: skip
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


def test_a_checkpoint_of_a_torch_without_a_newer_argument_is_gone_on_from() -> None:
    optimizer = torch.optim.AdamW([torch.nn.Parameter(torch.ones(()))])
    for name in ("fused", "differentiable"):  # as if it had been loaded from such a file
        del optimizer.param_groups[0][name]
    trainer: Any = SimpleNamespace(optimizers=[optimizer], lr_scheduler_configs=[])
    assert resuming.kept_settings(trainer, resuming.settings(trainer)) == ""


@pytest.mark.filterwarnings("error:nothing is validated")
def test_what_stops_early_waits_for_a_validation_in_a_later_epoch(tmp_path: Path) -> None:
    stop = resuming.EarlyStopping("val/loss", check_on_train_epoch_end=False)
    trainer = Trainer(
        accelerator="cpu", logger=False, enable_progress_bar=False, num_sanity_val_steps=0,
        enable_model_summary=False, enable_checkpointing=False, callbacks=[stop], max_epochs=2,
        check_val_every_n_epoch=2,
    )  # fmt: skip
    ones = DataLoader(torch.ones(2))  # type: ignore[arg-type]
    trainer.fit(Loses(2, 1), ones, ones)
    assert stop.best_score == 1


def test_an_epochs_line_has_no_validation_of_another(capsys: pytest.CaptureFixture[str]) -> None:
    trainer = Trainer(
        accelerator="cpu", logger=False, callbacks=[Progress()], enable_model_summary=False,
        enable_checkpointing=False, max_epochs=5, check_val_every_n_epoch=2,
    )  # fmt: skip
    ones = DataLoader(torch.ones(2))  # type: ignore[arg-type]
    trainer.fit(Loses(5, 4, 3, 2, 1), ones, ones)
    lines = [line for line in capsys.readouterr().out.splitlines() if line.startswith("epoch ")]
    assert [line.partition("val/loss ")[2] for line in lines] == ["", "4", "", "2", ""]


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
    trainer.fit(LogsAtTheEnd(), DataLoader(torch.ones(2)))  # type: ignore[arg-type]
    trainer.fit_loop.max_epochs = 3
    trainer.fit(LogsAtTheEnd(), DataLoader(torch.ones(2)))  # type: ignore[arg-type]
    lines = [line for line in capsys.readouterr().out.splitlines() if line.startswith("epoch ")]
    assert [line.partition("  end ")[2] for line in lines] == ["0", "1", "2"]


def test_a_resumed_run_has_the_patience_that_it_is_given(tmp_path: Path) -> None:
    assert train_to_the_best(tmp_path / "first", 1, 2)[1] == 2
    resumed = {"patience": 2, "ckpt_path": tmp_path / "first" / "last.ckpt"}
    assert train_to_the_best(tmp_path / "second", 1, 2, 3, 4, 5, **resumed)[1] == 3


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


@pytest.mark.parametrize(
    "accumulate, asked, batches, steps", [(1, 4, 5, 5), (4, 4, 8, 2), (1, 9, 10, 10), (4, 8, 10, 3)]
)
def test_a_stop_waits_for_the_step_and_for_the_epochs_validation(
    monkeypatch: pytest.MonkeyPatch, tmp_path: Path,
    accumulate: int, asked: int, batches: int, steps: int,
) -> None:  # fmt: skip
    """10 batches and a validation an epoch; then a resume, to the end of the second."""
    monkeypatch.setattr("runs.stopping.SECONDS", 0.0)
    before = signal.getsignal(SIGNAL)
    ones, one = DataLoader(torch.ones(10)), DataLoader(torch.ones(1))  # type: ignore[arg-type]

    def trainer(*callbacks: Callback) -> Trainer:
        return Trainer(
            accelerator="cpu", logger=False, enable_checkpointing=bool(callbacks), max_epochs=2,
            enable_progress_bar=False, enable_model_summary=False, num_sanity_val_steps=0,
            accumulate_grad_batches=accumulate, callbacks=list(callbacks),
        )  # fmt: skip

    stopped, resumed = StopsAt(asked), StopsAt(-1)
    try:
        with pytest.raises(Stopped):
            trainer(StopOnSignal(str(tmp_path / "s.ckpt"))).fit(stopped, ones, one)
    finally:
        signal.signal(SIGNAL, before)
    assert (stopped.batches, stopped.validations) == (batches, batches // 10)
    assert torch.load(tmp_path / "s.ckpt")["global_step"] == steps
    run = trainer()
    run.fit(resumed, ones, one, ckpt_path=tmp_path / "s.ckpt")
    assert resumed.batches == 20 - batches and run.global_step == 2 * -(-10 // accumulate)
    assert stopped.validations + resumed.validations == 2


@pytest.fixture
def handlers() -> Iterator[None]:
    """The signal handlers of this process, put back."""
    numbers = (SIGNAL, signal.SIGINT, signal.SIGTERM)
    before = {number: signal.getsignal(number) for number in numbers}
    signal.signal(signal.SIGINT, signal.default_int_handler)
    yield
    for number, handler in before.items():
        signal.signal(number, handler)


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
        epoch_loop=SimpleNamespace(batch_progress=SimpleNamespace(is_last_batch=False)),
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
def test_a_second_ctrl_c_ends_at_once() -> None:
    stop, nobody = StopOnSignal("stopped.ckpt"), Any
    stop.setup(SimpleNamespace(callbacks=[]), nobody, "fit")  # type: ignore[arg-type]
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
    stop.setup(SimpleNamespace(callbacks=[]), nobody, "fit")  # type: ignore[arg-type]
    stop.on_fit_start(nobody, nobody)
    assert signal.getsignal(signal.SIGINT) == signal.SIG_IGN
    assert signal.getsignal(SIGNAL) != before
    stop.teardown(nobody, nobody, "fit")
    assert signal.getsignal(SIGNAL) == before


@pytest.mark.usefixtures("handlers")
def test_a_stop_ends_a_test_as_ctrl_c_does() -> None:
    stop, nobody = StopOnSignal("stopped.ckpt"), Any
    before = signal.getsignal(SIGNAL)
    stop.setup(SimpleNamespace(callbacks=[]), nobody, "test")  # type: ignore[arg-type]
    with pytest.raises(KeyboardInterrupt):
        os.kill(os.getpid(), SIGNAL)
    stop.teardown(nobody, nobody, "test")
    assert signal.getsignal(SIGNAL) == before


class SignalsEarly(Callback):
    def on_fit_start(self, *_: Any) -> None:
        os.kill(os.getpid(), SIGNAL)


@pytest.mark.parametrize("started", [False, True])
def test_a_file_that_cannot_be_read_is_told_in_one_line(started: bool) -> None:
    text = "my images/003.png cannot be read: cannot identify image file"
    of_worker = f"Caught RuntimeError in DataLoader worker process 0.\nOriginal Traceback:\n{text}"
    assert mistake(RuntimeError(text), started) == text
    worker = of_worker.replace(text, f"RuntimeError: {text}").replace("back:", "back (most):")
    assert mistake(RuntimeError(worker), started) == text


def test_an_interval_longer_than_a_ranks_epoch_is_told() -> None:
    trainer = Trainer(
        accelerator="cpu", logger=False, enable_checkpointing=False, val_check_interval=50,
        enable_progress_bar=False, enable_model_summary=False, num_sanity_val_steps=0,
    )  # fmt: skip
    ones: Any = DataLoader(torch.ones(13))  # type: ignore[arg-type]
    with pytest.raises(ValueError, match="val_check_interval") as caught:
        trainer.fit(IsValidated(), ones, ones)
    told = mistake(caught.value, started=True)
    assert told and told.startswith("trainer.val_check_interval=50: a rank has 13 batches an epoch")


def test_srun_gets_the_way_that_this_repository_has(monkeypatch: pytest.MonkeyPatch) -> None:
    text = "srun started 2 processes, each of which would train alone as rank 0: start them with"
    assert mistake(MisconfigurationException(text), started=False) == text
    monkeypatch.setenv("SLURM_STEP_NUM_TASKS", "2")
    told = mistake(MisconfigurationException(text), started=False)
    assert told and "alone: sbatch cluster/slurm/horovod.sbatch" in told
    monkeypatch.delenv("SLURM_STEP_NUM_TASKS")
    torchrun = MisconfigurationException(text.replace("srun", "torchrun"))
    told = mistake(torchrun, started=False)
    assert told and told.startswith("torchrun is for strategy=ddp, with trainer.devices=")


class ForgetsItsHyperparameters(LightningModule):
    def __init__(self, lr: float) -> None:
        super().__init__()

    def configure_optimizers(self) -> Any:
        return torch.optim.SGD(self.parameters(), lr=self.hparams["lr"])


def test_what_one_forgets_in_a_module_is_told() -> None:
    with pytest.raises(KeyError) as caught:
        ForgetsItsHyperparameters(0.1).configure_optimizers()
    told = mistake(caught.value, started=False)
    assert told and told.startswith(f"{__file__}, line ")
    assert "the hyperparameters have no 'lr': call self.save_hyperparameters()" in told
    with pytest.raises(KeyError) as other:
        {}["lr"]
    assert mistake(other.value, started=True) is None
    with pytest.raises(RuntimeError) as cut:
        torch.ones(1).sum().backward()
    told = mistake(cut.value, started=True)
    assert told and told.startswith("the loss has no gradient: leave out what cuts it off")
    assert NO_LOSS in inspect.getsource(automatic)  # Lightning's, where it raises it
    told = mistake(RuntimeError(f"Skipping the `training_step` {NO_LOSS}."), started=True)
    assert told and told.startswith("training_step returned None: it has to return the loss")


def test_a_loss_of_training_is_no_guess_for_one_of_validation() -> None:
    lacks = "nothing is logged by this name; there are: "
    told = no_metric("val/loss", ["train/loss"], {})
    assert told == (
        f'val/loss: {lacks}train/loss; self.log("val/loss", ..., sync_dist=True) in '
        "validation_step does"
    )
    told = no_metric("val_loss", ["train/loss", "val/loss"], {})
    assert told == f"val_loss: {lacks}train/loss, val/loss (did you mean val/loss?)"
    told = no_metric("train_loss", ["train/loss"], {})
    assert told == f"train_loss: {lacks}train/loss (did you mean train/loss?)"


def test_a_label_that_the_model_has_no_output_for_is_told() -> None:
    with pytest.raises(IndexError) as caught:
        cross_entropy(torch.zeros(1, 10), torch.tensor([11]))
    told = mistake(caught.value, started=True)
    assert told and told.startswith("a label is 11, for which the model has no output")
    assert mistake(IndexError("list index out of range"), started=True) is None


def test_a_sampler_that_asks_torch_for_the_ranks_is_told() -> None:
    with pytest.raises(ValueError, match="process group") as caught:
        DistributedSampler(range(3))  # type: ignore[arg-type]
    message = mistake(caught.value, started=False)
    assert message and "DistributedSampler(data) asks torch.distributed for the ranks" in message
    other = mistake(RuntimeError(str(caught.value)), started=False)
    assert other is None


def test_a_logger_without_its_service_is_told_in_one_line() -> None:
    class UsageError(Exception):
        pass

    UsageError.__module__ = "wandb.errors.errors"  # as without `wandb login`
    error = UsageError("No API key configured.\n Use `wandb login`")
    assert mistake(error, started=False) == (
        "logger=wandb: No API key configured. Use `wandb login`"
    )
    assert mistake(error, started=True) is None


def test_an_error_in_training_is_no_mistake_to_tell_in_one_line() -> None:
    for error in (ValueError("batch sizes differ"), FileNotFoundError("no such picture")):
        assert mistake(error, started=True) is None  # its traceback says where
        assert mistake(error, started=False) == f"{error} (HYDRA_FULL_ERROR=1 shows where)"


def test_an_error_of_a_loaders_worker_is_told_by_its_last_line() -> None:
    text = "Caught OSError in DataLoader worker process 0.\nOriginal Traceback (most recent call "
    text += 'last):\n  File "mine.py", line 1, in read\nOSError: cannot identify cat.png\n'
    message = mistake(OSError(text), started=False)
    assert message == "OSError: cannot identify cat.png (HYDRA_FULL_ERROR=1 shows where)"


def test_the_traceback_of_a_mistake_can_be_asked_for(
    monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    run = Run.__new__(Run)
    run.config, run.folder, run._show = OmegaConf.create({}), None, warnings.showwarning
    run.report = Report(run.config, {})
    mistake = Refusal("no such thing")
    with pytest.raises(SystemExit, match="2"):
        run.__exit__(Refusal, mistake, None)
    assert capsys.readouterr().err == "error: no such thing\n"
    monkeypatch.setenv("HYDRA_FULL_ERROR", "1")
    run.__exit__(Refusal, mistake, None)  # which Python raises then
    assert not capsys.readouterr().err


def test_a_rank_that_anothers_end_has_ended_is_not_to_be_blamed() -> None:
    run = Run.__new__(Run)
    run.config, run.folder, run._show = OmegaConf.create({}), None, warnings.showwarning
    run.report = Report(run.config, {})
    gloo = "[third_party/gloo/gloo/transport/tcp/pair.cc:547] Connection closed by peer [::1]:43750"
    for error, status in (
        (HorovodInternalError("peer closed"), os.EX_TEMPFAIL),
        (HorovodInternalError("CUDA out of memory"), None),
        (RuntimeError(gloo), os.EX_TEMPFAIL),
        (RuntimeError("mine"), None),
    ):
        code = None
        try:
            run.__exit__(type(error), error, None)
        except SystemExit as end:
            code = end.code
        assert code == status


@pytest.mark.usefixtures("handlers")
def test_a_stop_before_the_first_batch_has_a_checkpoint_too(tmp_path: Path) -> None:
    """A rank that is not as far as another has one, and does not end by the signal."""
    missed: list[int] = []
    signal.signal(SIGNAL, lambda number, _: missed.append(number))
    trainer = Trainer(
        accelerator="cpu", logger=False, enable_progress_bar=False, enable_model_summary=False,
        callbacks=[SignalsEarly(), StopOnSignal(str(tmp_path / "s.ckpt"))], max_epochs=2,
    )  # fmt: skip
    with pytest.raises(Stopped):
        trainer.fit(Times(), DataLoader(torch.ones(3)))  # type: ignore[arg-type]
    assert not missed and torch.load(tmp_path / "s.ckpt")["global_step"] == 1


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
    config = OmegaConf.create({"data": {}, "ckpt_path": None, "run_dir": "x", "train": True})
    report = Report(config, {"model": "m", "data": "d", "strategy": "single"})
    trainer = Trainer(
        accelerator="cpu", logger=CSVLogger(tmp_path, "", ""), log_every_n_steps=1, max_epochs=1,
        callbacks=[Curves(), report], enable_progress_bar=False, enable_model_summary=False,
        enable_checkpointing=False,
    )  # fmt: skip
    model = {"optimizer": NoSteps, "batch": Times, "loss": ReturnsNothing}[what]()
    collate = (lambda batch: None) if what == "batch" else None
    ones: Any = torch.ones(2)
    model.validation_step = lambda batch: None  # type: ignore
    trainer.fit(model, DataLoader(ones, collate_fn=collate), DataLoader(ones))
    message = "warning no step was made: training_step has to return the loss, and batches"
    assert (message in capsys.readouterr().out) == (what != "optimizer")


class StopsInTheFirst(Times):
    """Is asked to stop in the validation of the first epoch, which is the best."""

    def validation_step(self, batch: Tensor, batch_idx: int) -> None:
        if self.current_epoch == 0:
            os.kill(os.getpid(), SIGNAL)
        self.log("val/loss", float(self.current_epoch))

    def on_train_epoch_end(self) -> None:
        self.log("end/loss", float(self.current_epoch))


@pytest.mark.parametrize("monitor", ["val/loss", "end/loss"])
def test_a_stop_in_a_validation_keeps_the_epochs_checkpoint(
    monitor: str, monkeypatch: pytest.MonkeyPatch, tmp_path: Path
) -> None:
    monkeypatch.setattr("runs.stopping.SECONDS", 0.0)
    before, ones = signal.getsignal(SIGNAL), DataLoader(torch.ones(4))  # type: ignore[arg-type]
    best = ModelCheckpoint(tmp_path, "best", monitor=monitor)
    run = Trainer(
        accelerator="cpu", logger=False, enable_progress_bar=False, enable_model_summary=False,
        max_epochs=3, num_sanity_val_steps=0,
        callbacks=[StopOnSignal(str(tmp_path / "s.ckpt")), best],
    )  # fmt: skip
    try:
        with pytest.raises(Stopped):
            run.fit(StopsInTheFirst(), ones, ones)
    finally:
        signal.signal(SIGNAL, before)
    assert best.best_model_path == str(tmp_path / "best.ckpt") and run.current_epoch == 0
    (state,) = [
        s for s in torch.load(tmp_path / "s.ckpt")["callbacks"].values() if "best_k_models" in s
    ]
    assert list(state["best_k_models"]) == [best.best_model_path]


def test_after_training_sigterm_is_what_it_was_before(tmp_path: Path) -> None:
    before = signal.getsignal(signal.SIGTERM)
    train(tmp_path, StopOnSignal(str(tmp_path / "s.ckpt")))
    assert signal.getsignal(signal.SIGTERM) == before


class StopsInEvaluation(Times):
    def validation_step(self, batch: Tensor, batch_idx: int) -> None:
        if not self.trainer.sanity_checking:
            os.kill(os.getpid(), SIGNAL)


def test_a_stop_in_the_last_evaluation_leaves_a_checkpoint(tmp_path: Path) -> None:
    before = signal.getsignal(SIGNAL)
    trainer = Trainer(
        accelerator="cpu", logger=False, enable_progress_bar=False,
        enable_model_summary=False, max_epochs=1,
        callbacks=[StopOnSignal(str(tmp_path / "s.ckpt"))],
    )  # fmt: skip
    ones = DataLoader(torch.ones(4))  # type: ignore[arg-type]
    try:
        with pytest.raises(Stopped):
            trainer.fit(StopsInEvaluation(), ones, ones)
    finally:
        signal.signal(SIGNAL, before)  # the Trainer leaves it where training ends by an error
    assert torch.load(tmp_path / "s.ckpt")["global_step"] == 4


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


class Pairs(Sampler):
    def __init__(self) -> None: ...

    def __iter__(self) -> Iterator[list[int]]:
        return iter([[0, 1], [2, 3]])

    def __len__(self) -> int:
        return 2


def test_a_batch_sampler_that_lightning_cannot_split_is_told() -> None:
    loader: DataLoader = DataLoader(range(4), batch_sampler=Pairs())  # type: ignore[arg-type]
    with pytest.raises(TypeError) as caught:
        _get_dataloader_init_args_and_kwargs(loader, SequentialSampler(range(4)))
    message = mistake(caught.value, started=False)
    assert message and message.startswith("a batch_sampler is split over the ranks only if it is a")


def test_a_rate_that_a_schedule_warms_up_is_told_as_it_is_written() -> None:
    module = Times()
    optimizer = torch.optim.SGD(module.parameters(), lr=0.01)
    module.trainer = SimpleNamespace(optimizers=[optimizer])  # type: ignore[assignment]
    torch.optim.lr_scheduler.OneCycleLR(optimizer, max_lr=0.01, total_steps=10)
    assert optimizer.param_groups[0]["lr"] < 0.001 and _lr(module) == "0.01"


@pytest.mark.parametrize("profiler, told", [("none", True), ("simple", True), ("pytorch", False)])
def test_steps_that_a_profiler_made_longer_have_no_limit(
    profiler: str, told: bool, tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    anatomy = Anatomy()
    anatomy.found = {"shares": {"forward": 1.0}, "step_ms": {"median": 5.0}, "verdict": "compute"}
    trainer = SimpleNamespace(
        is_global_zero=True, callbacks=[anatomy], world_size=1, strategy=None,
        accumulate_grad_batches=1, profiler=SimpleNamespace(dirpath=None),
    )  # fmt: skip
    choices = {"model": "m", "data": "d", "strategy": "single", "profiler": profiler}
    config = OmegaConf.create({"data": {}, "train": True, "run_dir": str(tmp_path)})
    Report(config, choices).finish(trainer, None)
    assert ("limit   compute\n" in capsys.readouterr().out) == told
    assert json.loads((tmp_path / "summary.json").read_text())["anatomy"] == anatomy.found

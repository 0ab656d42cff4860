"""What a run tells of its speed, its data and what it did not do; in one process."""

from __future__ import annotations

import contextlib
import csv
import io
import json
import os
import re
import shlex
import subprocess
import time
from collections import UserDict
from collections.abc import Callable
from dataclasses import dataclass
from pathlib import Path
from types import SimpleNamespace
from typing import Any

import pytest
import torch
from omegaconf import OmegaConf
from pytorch_lightning import Callback, LightningDataModule, LightningModule, Trainer
from pytorch_lightning.callbacks import BatchSizeFinder, ModelCheckpoint
from pytorch_lightning.loggers import CSVLogger
from tensorboard import default, program
from torch import Tensor
from torch.utils.data import (
    BatchSampler,
    DataLoader,
    DistributedSampler,
    IterableDataset,
    RandomSampler,
    SubsetRandomSampler,
)

from benchmarks import hardware
from runs import hints
from runs.anatomy import Anatomy
from runs.folders import ROOT
from runs.predictions import Predictions
from runs.ranks import gather_objects, leaves
from runs.refusal import Refusal
from runs.report import Report, _look, _lr, _places
from runs.versions import commit
from tests.matrix import trainings as matrix
from tests.matrix.trainings import RANK
from tests.runs.trainings import (
    Fails,
    IsValidated,
    Stream,
    Times,
    TimesTwo,
    TrainsAndTests,
    quiet_trainer,
    report_of,
    train,
)


def test_a_run_elsewhere_is_looked_at_there(tmp_path: Path) -> None:
    assert _look(ROOT / "logs" / "gpt" / "runs" / "a") == "make tensorboard"
    folder = tmp_path / "my logs"
    make, target, arguments = shlex.split(_look(folder))
    assert [make, target] == ["make", "tensorboard"]
    tensorboard = program.TensorBoard(default.get_plugins())
    words = shlex.split(arguments.removeprefix("ARGS="))
    tensorboard.configure(["", "--logdir", "logs", *words])  # as the Makefile does
    assert tensorboard.flags.logdir == str(folder)


def test_of_many_hosts_the_first_and_the_last_are_named() -> None:
    assert _places({"a": 2, "b": 1}) == "2 on a, 1 on b"
    assert _places(dict.fromkeys("abcd", 1)) == "1 on a, 1 on b, 1 on c, 1 on d"
    assert _places(dict.fromkeys("abcdef", 8)) == "8 on a, 8 on b, ..., 8 on f"


@pytest.mark.parametrize(
    ("stage", "trains", "tests", "told"),
    [("validation", True, True, False), ("test", True, True, True), ("test", False, True, False),
     ("predict", True, True, True), ("predict", False, True, True),
     ("predict", False, False, False)],
)  # fmt: skip
def test_what_was_done_before_a_failure_is_told(
    stage: str, trains: bool, tests: bool, told: bool, tmp_path: Path,
    capsys: pytest.CaptureFixture[str],
) -> None:  # fmt: skip
    report = report_of(tmp_path, train=trains, test=tests)
    trainer = quiet_trainer(report, Predictions(), default_root_dir=tmp_path, max_epochs=1)
    model, data = Fails(stage), TrainsAndTests()
    data.val_dataloader = data.train_dataloader
    with pytest.raises(Refusal, match=stage):
        if trains:
            trainer.fit(model, data)
        if tests:
            trainer.test(model, data, verbose=False)
        trainer.predict(model, data, return_predictions=False)
    file = tmp_path / "summary.json"
    assert file.is_file() == told
    tested, output = tests and stage == "predict", capsys.readouterr().out
    assert ("test    test/loss 3\n" in output) == tested
    assert output.count("model   m, 1 parameters") == 1  # not again before a test or a prediction
    if file.is_file():
        summary = json.loads(file.read_text())
        assert summary["steps"] == 4 * trains and summary["predictions"] is None
        of_data = (4, True) if trains else (None, False)
        assert (summary["train_samples"], summary["drop_last"]) == of_data
        assert summary["metrics"] == ({"test/loss": 3} if tested else {})


class TimesPartlyFrozen(Times):
    def __init__(self) -> None:
        super().__init__()
        self.frozen = torch.nn.Parameter(torch.ones(3), requires_grad=False)

    def test_step(self, batch: Tensor, batch_idx: int) -> None:
        pass


def test_parameters_that_are_trained_are_told_where_others_are_not(
    tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    report = train(tmp_path, model=TimesPartlyFrozen)
    assert "model   m, 4 parameters (1 trained), lr 0.1\n" in capsys.readouterr().out
    report.hosts = {}  # as in a run of its own
    trainer = Trainer(accelerator="cpu", logger=False, callbacks=[report])
    trainer.test(TimesPartlyFrozen(), DataLoader(torch.ones(1)), verbose=False)
    assert "model   m, 4 parameters\n" in capsys.readouterr().out


def test_a_summary_that_cannot_be_written_is_told_behind_the_results(
    tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    (tmp_path / "file").touch()
    report = report_of(tmp_path / "file")
    report.metrics = {"test/loss": 3.0}
    with pytest.raises(Refusal, match=r"file/summary.json: cannot be written: File exists"):
        report.finish(Trainer(accelerator="cpu", logger=False, default_root_dir=tmp_path), None)
    assert capsys.readouterr().out == "test    test/loss 3\n"


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
        monkeypatch.setenv("GIT_CONFIG_COUNT", "0")
        for path in (tmp_path, tmp_path / ".git"):
            os.chown(path, 12345, 12345)
        assert re.fullmatch("[0-9a-f]{40}-dirty", str(commit()))
        monkeypatch.setattr(hardware, "ROOT", tmp_path)
        assert hardware._git("rev-parse", "HEAD")


OF_RANKS = [("", [0]), ("ü\nlonger", [0, 1])]


def objects_under(strategy: str) -> list[tuple[str, list[int]]]:
    class Gathers(Callback):
        def on_fit_start(self, trainer: Trainer, pl_module: LightningModule) -> None:
            text, rows = OF_RANKS[RANK]
            objects = gather_objects(trainer.strategy, (text, torch.tensor(rows)))
            self.objects = [(text, rows.tolist()) for text, rows in objects]

    gathers = Gathers()
    matrix.trainer(strategy, callbacks=[gathers]).fit(matrix.Net(), matrix.loader())
    return gathers.objects


@pytest.mark.parametrize("strategy", ["horovod", "ddp"])
def test_objects_of_ranks_may_differ_in_size(strategy: str, launch_anew: Callable) -> None:
    assert launch_anew(objects_under, 2, strategy=strategy) == [OF_RANKS] * 2


@pytest.mark.parametrize(
    ("loaders", "others", "told"),
    [
        (DataLoader(Stream()), 0, "Stream"),
        (DataLoader(Stream()), 1, ""),
        ({"a": DataLoader(Stream()), "b": [DataLoader(Stream())]}, 0, "Stream"),
        (DataLoader(range(4), batch_sampler=[[0, 1], [2, 3]]), 0, "list"),
        (DataLoader(range(4), sampler=RandomSampler(range(4))), 0, "BatchSampler"),
        (DataLoader(range(4), sampler=DistributedSampler(range(4), 2, 0)), 0, None),
        (
            DataLoader(
                range(4),
                batch_sampler=BatchSampler(DistributedSampler(range(4), 2, 0), 2, False),
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
    monkeypatch.setattr("runs.ranks.gather_objects", lambda _, text: texts.append(text) or texts)
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


class Fold(LightningDataModule):
    def train_dataloader(self) -> DataLoader:
        return DataLoader(torch.ones(20), batch_size=2, sampler=SubsetRandomSampler(range(8)))


class WholeBatches(LightningDataModule):
    def train_dataloader(self) -> DataLoader:
        batches = BatchSampler(SubsetRandomSampler(range(8)), 2, drop_last=True)
        return DataLoader(torch.ones(20), sampler=batches, batch_size=None)


class Listed(Stream):
    samples = ("a", "b")  # not their number for all ranks


class OfAStream(LightningDataModule):
    def train_dataloader(self) -> DataLoader:
        return DataLoader(Listed())


@pytest.mark.parametrize(
    ("data", "told", "trained"),
    [
        (Fold, ", 8 samples to train", 8),
        (WholeBatches, ", 8 samples to train", 8),
        (OfAStream, "", 7),
    ],
)
def test_samples_to_train_are_those_that_are_drawn(
    data: type[LightningDataModule], told: str, trained: int, tmp_path: Path,
    capsys: pytest.CaptureFixture[str],
) -> None:  # fmt: skip
    report = report_of(tmp_path)
    trainer = quiet_trainer(report, max_epochs=1)
    trainer.fit(Times(), data())
    assert report.train_samples == (trained if told else None) and report.samples == trained
    assert report.drop_last == (data is WholeBatches)
    assert report.batch_size == (1 if data is OfAStream else 2)
    output = capsys.readouterr().out
    assert f"\ndata    d{told}\n" in output and "same first batch" not in output


def tokens(texts: list[Tensor]) -> tuple[Tensor, Tensor]:
    """As EmbeddingBag takes them: all tokens of a batch, and where each text begins."""
    lengths = torch.tensor([0, *map(len, texts[:-1])])
    return torch.cat(texts), lengths.cumsum(0)


class TakesFirst(Times):
    def training_step(self, batch: Any, batch_idx: int) -> Tensor:
        return super().training_step(batch[0], batch_idx)


@dataclass
class Sentences:
    ids: Tensor


class TakesIds(Times):
    def training_step(self, batch: Any, batch_idx: int) -> Tensor:
        ids = batch["ids"] if isinstance(batch, UserDict) else batch.ids
        return super().training_step(ids, batch_idx)


@pytest.mark.parametrize("kind", [UserDict, Sentences])
def test_samples_of_a_stream_are_counted_by_the_first_tensor(kind: Any, tmp_path: Path) -> None:
    """A UserDict is what transformers' BatchEncoding is."""
    loader = DataLoader(Stream(), 2, collate_fn=lambda ids: kind(ids=torch.stack(ids).float()))
    assert train(tmp_path, model=TakesIds, loader=loader).samples == 7


def test_what_a_batch_holds() -> None:
    batch = [{"a": 1}, UserDict(b=(2, UserDict(c=3))), Sentences(torch.tensor(4)), Sentences, "5"]
    assert [*leaves(batch)] == [1, 2, 3, 4, Sentences, "5"]


@pytest.mark.parametrize("collate", [tokens, list])
def test_samples_are_counted_whatever_a_batch_looks_like(collate: Callable, tmp_path: Path) -> None:
    texts: Any = [torch.ones(3, 2)] * 7
    loader = DataLoader(texts, batch_size=2, collate_fn=collate)
    report = train(tmp_path, model=TakesFirst, loader=loader)
    assert report.samples == 7


class Samples(LightningDataModule):
    """80 samples; with `divides`, the batch size is shared among the ranks."""

    def __init__(self, batch_size: int, divides: bool, batches: bool) -> None:
        super().__init__()
        self.batch_size, self.divides, self.batches = batch_size, divides, batches

    def train_dataloader(self) -> DataLoader:
        size = self.batch_size // (self.trainer.world_size if self.divides else 1)
        data = matrix.samples(80)
        if self.batches:
            return DataLoader(data, batch_sampler=OwnBatches(range(80), size, drop_last=False))
        return DataLoader(data, batch_size=size)


class OwnBatches(BatchSampler):
    pass


def batches_told() -> list[tuple[str, int]]:
    told = []
    config = {"data": {"batch_size": 8}, "ckpt_path": None, "run_dir": "x", "train": True}
    for divides, batches, accumulated in ((0, 0, 1), (1, 0, 1), (1, 1, 1), (0, 0, 9)):
        report = Report(
            OmegaConf.create(config | {"test": False}),
            {"model": "m", "data": "d", "strategy": "horovod"},
        )
        trainer = matrix.trainer(
            "horovod", max_epochs=1, callbacks=[report], accumulate_grad_batches=accumulated
        )
        with contextlib.redirect_stdout(io.StringIO()) as output:
            trainer.fit(matrix.Net(), datamodule=Samples(8, bool(divides), bool(batches)))
        lines = [line for line in output.getvalue().splitlines() if re.match("batch|warn", line)]
        summary = report._summary(trainer, None, None, None)
        told.append(("\n".join(lines), summary["global_batch_size"]))
    return told


def test_the_batch_that_is_told_is_the_loaders(launch: Callable) -> None:
    """Also where a data module divides data.batch_size by the ranks, or an epoch of 5 batches ends
    before as many are accumulated."""
    divided = (
        "batch   4 a process x 2 ranks = 8 global\nwarning data.batch_size=8, but the loader's "
        "batches have 4: if the data module divides it by the ranks, let it not, as "
        "data.batch_size is per process here"
    )
    told, others = launch(batches_told, 2)
    short = (
        "batch   8 a process x 2 ranks x 5 accumulated = 80 global\nwarning "
        "trainer.accumulate_grad_batches=9: an epoch ends after 5 batches, with a step whose loss "
        "is divided by 9 all the same; give at most 5"
    )
    whole = "batch   8 a process x 2 ranks = 16 global"
    assert told == [(whole, 16), *[(divided, 8)] * 2, (short, 80)]
    assert others == [("", 16), ("", 8), ("", 8), ("", 80)]
    assert not hints.divided_batches(8, 8, ranks=1)


@pytest.mark.parametrize(
    ("drop_last", "limit", "windows"),
    [(False, 1.0, 3), (True, 1.0, 2), (False, 2, 2), (False, 0.5, 1), (False, 0, 9)],
)
def test_no_more_batches_are_accumulated_than_an_epoch_has(
    drop_last: bool, limit: float, windows: int
) -> None:
    report = Report(OmegaConf.create({}), {})
    report.train_samples, report.batch_size, report.drop_last = 10, 2, drop_last
    trainer: Any = SimpleNamespace(
        world_size=2, accumulate_grad_batches=9, limit_train_batches=limit
    )
    assert report._windows(trainer) == windows


class Sized(LightningDataModule):
    batch_size = 1

    def train_dataloader(self) -> DataLoader:
        return DataLoader(torch.ones(64), batch_size=self.batch_size)


def test_a_batch_size_that_was_searched_is_told(
    tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    report = report_of(data={"batch_size": 1})
    search = BatchSizeFinder(steps_per_trial=1, max_trials=2)
    quiet_trainer(search, report, max_epochs=1, default_root_dir=tmp_path).fit(Times(), Sized())
    assert search.optimal_batch_size == 4
    assert "batch   4 a process x 1 rank = 4 global" in capsys.readouterr().out


class Counts(TrainsAndTests):
    """Gives other data each time that it is asked, as one that loads a part after the other."""

    asked = 0

    def train_dataloader(self) -> DataLoader:
        self.asked += 1
        return super().train_dataloader()

    def val_dataloader(self) -> DataLoader:
        return self.train_dataloader()


def test_data_are_asked_for_their_loaders_as_often_as_by_lightning(tmp_path: Path) -> None:
    data, model = Counts(), IsValidated()
    quiet_trainer(report_of(), max_epochs=1, default_root_dir=tmp_path).fit(model, data)
    assert data.asked == 2


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
    model, ones = TakesTime(), DataLoader(torch.ones(5))
    monkeypatch.setattr("runs.report.time", SimpleNamespace(monotonic=lambda: model.now))
    report = report_of()
    trainer = quiet_trainer(
        report, logger=CSVLogger(tmp_path, "", ""), val_check_interval=2, max_epochs=2
    )
    trainer.fit(model, ones, ones)
    assert (report.samples, report.seconds) == (10, 10)


@pytest.mark.parametrize(
    "optimizers, accumulate, told",
    [(1, 1, "30.0 ms: "), (1, 2, "30.0 ms a batch: "), (2, 1, "30.0 ms a batch: ")],
)
def test_the_mean_is_told_of_a_step_or_where_a_batch_is_none_of_a_batch(
    optimizers: int, accumulate: int, told: str, tmp_path: Path,
    capsys: pytest.CaptureFixture[str],
) -> None:  # fmt: skip
    report = report_of(tmp_path)
    anatomy = Anatomy(warmup=0)
    trainer = quiet_trainer(report, anatomy, max_epochs=2, accumulate_grad_batches=accumulate)
    model = Times() if optimizers == 1 else TimesTwo()
    trainer.fit(model, DataLoader(torch.ones(6)))
    assert anatomy.found is not None
    anatomy.found["step_ms"] |= {"median": 20.0, "mean": 30.0}
    anatomy.found["shares"] = {"data": 0.004, "forward": 0.8, "all_reduce": 0.196}
    report.finish(trainer, None)
    assert f"\nstep    {told}forward 80%, all-reduce 20%\n" in capsys.readouterr().out


def test_a_resumed_run_tells_its_own_steps(
    tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    for epochs, ckpt_path in ((1, None), (3, tmp_path / "last.ckpt")):
        report = report_of(tmp_path)
        anatomy = Anatomy(warmup=0)
        trainer = quiet_trainer(report, anatomy, max_epochs=epochs)
        trainer.fit(Times(), DataLoader(torch.ones(6)), ckpt_path=ckpt_path)
        trainer.save_checkpoint(tmp_path / "last.ckpt")
    assert anatomy.found is not None
    anatomy.found["step_ms"] |= {"median": 20.0, "mean": 30.0}
    report.finish(trainer, None)
    output = capsys.readouterr().out
    assert "samples/s: 12 steps, 2 epochs in" in output and "\nstep    30.0 ms: " in output


def test_the_curve_of_the_speed_is_that_of_all_ranks(monkeypatch: pytest.MonkeyPatch) -> None:
    clock, logged = iter([0.0, 2.0]), list[Any]()
    monkeypatch.setattr("runs.report.time", SimpleNamespace(monotonic=lambda: next(clock)))
    logger = SimpleNamespace(log_metrics=lambda metrics, step: logged.append((metrics, step)))
    loop = SimpleNamespace(epoch_loop=SimpleNamespace(_batches_that_stepped=5))
    trainer: Any = SimpleNamespace(
        world_size=4, loggers=[logger], fit_loop=loop, is_global_zero=False
    )
    report, nobody = Report(OmegaConf.create({}), {}), Any
    report.on_train_epoch_start(trainer, nobody)
    report.samples += 10  # of this rank
    report.on_train_epoch_end(trainer, nobody)
    assert logged == [({"samples_per_second": 20}, 4)]


def test_a_run_that_is_done_says_that_it_trains_nothing(
    tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    train(tmp_path / "first", ModelCheckpoint(tmp_path, "last"))
    assert "nothing was trained" not in capsys.readouterr().out
    train(tmp_path / "second", ckpt_path=str(tmp_path / "last.ckpt"))
    output = capsys.readouterr().out
    assert "nothing was trained: the checkpoint has 1 of 1 epochs, 10 steps; to continue" in output
    assert "a larger trainer.max_epochs (or max_steps or max_time, if that ended it)" in output
    train(tmp_path / "third", max_epochs=0, model=IsValidated)  # as it does, to begin with
    output = capsys.readouterr().out
    assert "nothing was trained: trainer.max_epochs is 0, max_steps -1, limit_" in output


class StepsByHand(Times):
    """With what Lightning wraps around the optimizer, which counts steps."""

    counts = True

    def __init__(self) -> None:
        super().__init__()
        self.automatic_optimization = False

    def training_step(self, batch: Tensor, batch_idx: int) -> None:
        self.manual_backward(super().training_step(batch, batch_idx))
        self.optimizers(use_pl_optimizer=self.counts).step()  # type: ignore[union-attr]


class StepsPastLightning(StepsByHand):
    counts = False


@pytest.mark.parametrize("model", [StepsByHand, StepsPastLightning])
def test_steps_that_lightning_does_not_count_leave_no_checkpoint_which_is_told(
    model: type[StepsByHand], tmp_path: Path, capsys: pytest.CaptureFixture
) -> None:
    train(tmp_path, ModelCheckpoint(tmp_path / "kept"), model=model, max_epochs=2)
    assert (tmp_path / "kept").exists() is model.counts
    told = capsys.readouterr().out
    assert told.count("warning Lightning counted no step in this epoch") == (not model.counts)


@pytest.mark.parametrize(
    ("automatic", "first", "keeps", "fast", "told"),
    [
        (False, 8, True, False, True),  # of a resume, that has eight steps before
        (True, 8, True, False, False),
        (False, 7, True, False, False),
        (False, 8, False, False, False),
        (False, 8, True, True, False),
    ],
)
def test_steps_that_are_not_counted_are_told_where_checkpoints_are_missed(
    automatic: bool, first: int, keeps: bool, fast: bool, told: bool
) -> None:
    trainer: Any = SimpleNamespace(
        global_step=8, checkpoint_callbacks=["one"] * keeps, fast_dev_run=fast
    )
    module: Any = SimpleNamespace(automatic_optimization=automatic)
    assert bool(hints.uncounted_steps(trainer, module, first)) is told


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
        ({"val_check_interval": 13, "accumulate_grad_batches": 4, "max_epochs": 2}, True),
        ({"val_check_interval": 13, "check_val_every_n_epoch": None, "max_epochs": 2}, False),
        ({"val_check_interval": 13, "check_val_every_n_epoch": 3, "max_epochs": 2}, False),
    ],
)
def test_a_validation_that_never_came_is_told(
    options: dict[str, Any], told: bool, tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    trainer = quiet_trainer(report_of(), **options)
    batches = DataLoader(TenBatches(), batch_size=None)
    trainer.fit(IsValidated(), batches, DataLoader(torch.ones(1)))
    line = "nothing was validated: no epoch has as many batches as trainer.val_check_interval=13;"
    assert (line in capsys.readouterr().out) == told


@pytest.mark.parametrize(
    ("every", "epochs", "more", "told"),
    [(1, 1, 2, False), (1, 1, 3, True), (3, 3, 5, False), (3, 3, 6, True)],
)
def test_a_resumed_run_counts_its_own_epochs_without_a_validation(
    every: int, epochs: int, more: int, told: bool, tmp_path: Path,
    capsys: pytest.CaptureFixture[str],
) -> None:  # fmt: skip
    """It has to train as many batches as an interval has itself, and come to an epoch's turn."""
    for end, ckpt_path in ((epochs, None), (more, tmp_path / "last.ckpt")):
        capsys.readouterr()
        trainer = quiet_trainer(
            report_of(), max_epochs=end, val_check_interval=13, check_val_every_n_epoch=every
        )
        batches = DataLoader(TenBatches(), batch_size=None)
        trainer.fit(IsValidated(), batches, DataLoader(torch.ones(1)), ckpt_path=ckpt_path)
        trainer.save_checkpoint(tmp_path / "last.ckpt")
    assert ("nothing was validated" in capsys.readouterr().out) == told


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
    hook.on_sanity_check_end = Report(config, {}).on_sanity_check_end
    trainer = quiet_trainer(hook, max_epochs=1)
    ones = DataLoader(torch.ones(2))
    trainer.fit(OfTwoLoaders(), ones, [ones, ones])
    output = capsys.readouterr().out
    names = "val/loss/dataloader_idx_0, val/of_0, val/loss/dataloader_idx_1, val/of_1"
    first = f"warning callbacks.best.monitor={monitor}: nothing is logged by this name; there are: "
    assert output == (
        f"{first}{names}{warned}; without it, the run fails after an epoch\n" * bool(warned)
    )


def test_a_rate_that_a_schedule_warms_up_is_told_as_it_is_written() -> None:
    module = Times()
    optimizer = torch.optim.SGD(module.parameters(), lr=0.01)
    module.trainer = SimpleNamespace(optimizers=[optimizer])
    torch.optim.lr_scheduler.OneCycleLR(optimizer, max_lr=0.01, total_steps=10)
    assert optimizer.param_groups[0]["lr"] < 0.001 and _lr(module) == "0.01"


@pytest.mark.parametrize(
    "profiler, told",
    [("none", True), ("simple", True), ("advanced", False), ("pytorch", False), ("trace", False)],
)
def test_steps_that_a_profiler_made_longer_have_no_limit(
    profiler: str, told: bool, tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    anatomy = Anatomy()
    anatomy.found = {"shares": {"forward": 1.0}, "step_ms": {"mean": 5.0}, "verdict": "compute"}
    trainer = SimpleNamespace(
        is_global_zero=True, callbacks=[anatomy], world_size=1, strategy=None,
        accumulate_grad_batches=1, profiler=SimpleNamespace(dirpath=None),
    )  # fmt: skip
    choices = {"model": "m", "data": "d", "strategy": "single", "profiler": profiler}
    config = OmegaConf.create({"data": {}, "train": True, "run_dir": str(tmp_path)})
    Report(config, choices).finish(trainer, None)
    assert ("limit   compute\n" in capsys.readouterr().out) == told
    assert json.loads((tmp_path / "summary.json").read_text())["anatomy"] == anatomy.found

"""predict=true: what is written, in which order, and what is refused."""

from __future__ import annotations

import errno
import os
from collections.abc import Callable
from pathlib import Path
from types import SimpleNamespace
from typing import Any

import numpy as np
import pytest
import torch
from pytorch_lightning import LightningDataModule, LightningModule
from pytorch_lightning.strategies import SingleDeviceStrategy
from pytorch_lightning.utilities.exceptions import MisconfigurationException
from torch import Tensor
from torch.utils._pytree import tree_leaves
from torch.utils.data import DataLoader, Dataset, Subset

import runs.predictions
from runs.mistakes import mistake
from runs.predictions import Predictions
from runs.refusal import Refusal
from strategies import HorovodStrategy
from tests.runs.trainings import (
    Numbers,
    OneAtATime,
    Stream,
    Sums,
    TrainsAndPredicts,
    TrainsAndTests,
    quiet_trainer,
)


class Forward(LightningModule):
    def forward(self, batch: Tensor) -> Tensor:
        return batch


class Doubles(LightningModule):
    def predict_step(self, batch: Tensor, batch_idx: int, dataloader_idx: int = 0) -> Any:
        return {"twice": 2 * batch, "both": (batch, -batch.unsqueeze(1))}


class LeavesOneOut(LightningModule):
    def predict_step(self, batch: Tensor, batch_idx: int) -> Any:
        return {"twice": 2 * batch, "steps": batch[1:]}


class Names(LightningModule):
    def predict_step(self, batch: Tensor, batch_idx: int) -> Any:
        return {"twice": 2 * batch, "names": [f"ü {number}" for number in batch.tolist()]}


class Output(dict):
    """As models of some libraries return."""


class InAClassOfItsOwn(LightningModule):
    def predict_step(self, batch: Tensor) -> Any:
        return Output(doubled=2 * batch)


class NamesOfNumpy(LightningModule):
    def predict_step(self, batch: Tensor, batch_idx: int) -> Any:
        return [np.str_(number) for number in batch.tolist()]


class NamesThree(LightningModule):
    def predict_step(self, batch: Tensor, batch_idx: int) -> Any:
        return ["a", "b", "c"]


class NamesOnce(LightningModule):
    def predict_step(self, batch: Tensor, batch_idx: int) -> Any:
        return {"names": "cat"}


def predict(model: LightningModule, data: LightningDataModule, folder: Path) -> Predictions:
    predictions = Predictions()
    trainer = quiet_trainer(predictions, default_root_dir=folder)
    trainer.predict(model, data, return_predictions=False)
    return predictions


def test_predictions_keep_their_form_and_come_from_the_test_set(tmp_path: Path) -> None:
    written = predict(Doubles(), Numbers(), tmp_path)
    predictions, numbers = torch.load(tmp_path / "predictions.pt"), torch.arange(7)
    assert written.samples == 7 and list(predictions) == ["twice", "both"]
    assert torch.equal(predictions["twice"], 2 * numbers)
    assert torch.equal(predictions["both"][1], -numbers.unsqueeze(1))


def test_predictions_in_a_dict_of_a_class_of_its_own_are_kept_in_a_plain_one(
    tmp_path: Path,
) -> None:
    predict(InAClassOfItsOwn(), Numbers(), tmp_path)
    predicted = torch.load(tmp_path / "predictions.pt")
    assert type(predicted) is dict and list(predicted) == ["doubled"]
    assert len(predicted["doubled"]) == 7


def test_texts_of_numpy_are_plain_in_the_file(tmp_path: Path) -> None:
    """Which torch.load would refuse otherwise."""
    predict(NamesOfNumpy(), Numbers(), tmp_path)
    assert torch.load(tmp_path / "predictions.pt") == [*"0123456"]


def test_ranks_whose_predictions_have_another_form_are_told(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """Else those of one key would stand below another."""
    other = ["{'score': 'float32'}"]  # of a second rank
    monkeypatch.setattr(runs.predictions, "gather_objects", lambda _, mine: [mine, other])
    with pytest.raises(Refusal, match=r"returned {'score': 'float32'} for a batch and {'twice'"):
        predict(Doubles(), Numbers(), tmp_path)


def test_predictions_that_cannot_be_written_are_not_told_of(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    def fail(content: Any, file: Any) -> None:
        file.write(b"a part")
        raise OSError(errno.ENOSPC, os.strerror(errno.ENOSPC))

    callback = Predictions()
    trainer: Any = SimpleNamespace(
        is_global_zero=True, default_root_dir=tmp_path, strategy=SingleDeviceStrategy("cpu")
    )
    monkeypatch.setattr(torch, "save", fail)
    with pytest.raises(Refusal, match="predictions.pt: cannot be written: No space left"):
        callback.write_on_epoch_end(trainer, Doubles(), [torch.ones(1)], [[[0]]])
    assert callback.file is None and not list(tmp_path.iterdir())


def predicted_by(model: LightningModule, folder: str) -> Any:
    trainer = quiet_trainer(Predictions(), strategy=HorovodStrategy(), default_root_dir=folder)
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


class Views(LightningModule):
    """A column of a batch that is much larger."""

    def predict_step(self, batch: Tensor, batch_idx: int) -> Any:
        return batch.unsqueeze(1).repeat(1, 1000)[:, 0]


def test_views_do_not_send_what_they_look_at(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    sent: list[Any] = []
    monkeypatch.setattr(
        runs.predictions, "gather_objects", lambda _, mine: [sent.append(mine) or mine]
    )
    predict(Views(), Numbers(), tmp_path)
    tensors = [leaf for leaf in tree_leaves(sent) if isinstance(leaf, Tensor)]
    assert len(tensors) == 4  # indices, and three batches
    assert all(tensor.untyped_storage().nbytes() == tensor.nbytes for tensor in tensors)
    assert torch.load(tmp_path / "predictions.pt").tolist() == list(range(7))


class Shuffled(Numbers):
    def predict_dataloader(self) -> DataLoader:
        return DataLoader(torch.arange(7), batch_size=3, shuffle=True)


def test_predictions_are_in_the_order_of_the_data_set(tmp_path: Path) -> None:
    predict(Doubles(), Shuffled(), tmp_path)
    assert torch.load(tmp_path / "predictions.pt")["twice"].tolist() == [0, 2, 4, 6, 8, 10, 12]


class OfFiles(LightningDataModule):
    """Seven of ten files, of two classes."""

    def test_dataloader(self) -> DataLoader:
        part = Subset(Subset(Files(), range(9, -1, -1)), [0, 9, 8, 7, 6, 5, 4])  # 9, 0, 1, ...
        return DataLoader(part, batch_size=3, shuffle=True)


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
        return torch.where(batch == 1, -1, batch % 2)  # -1: of no class


class Scores(LightningModule):
    def predict_step(self, batch: Tensor, batch_idx: int) -> Tensor:
        return batch / 2


class Logits(LightningModule):
    def predict_step(self, batch: Tensor, batch_idx: int) -> Tensor:
        return batch.unsqueeze(1).expand(-1, 2)


@pytest.mark.parametrize(
    ("model", "head"),
    [
        (Labels, ["file,prediction,class", "9.png,1,dog", "0.png,0,cat", "1.png,-1,"]),
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


def test_names_of_files_need_not_be_utf_8(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    name = b"caf\xe9.png"
    files = Files()
    files.samples[9] = (os.fsdecode(name), 0)
    files.samples[0] = (Path("0.png"), 0)  # type: ignore[assignment]
    monkeypatch.setattr(f"{__name__}.Files", lambda: files)
    assert predict(Labels(), OfFiles(), tmp_path).names_files
    assert (tmp_path / "predictions.csv").read_bytes().splitlines()[1] == name + b",1,dog"


def test_samples_that_are_no_files_are_not_listed(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    files = Files()
    for samples in ([(torch.zeros(2), 0)] * 10, [()] * 10):
        files.samples = samples  # type: ignore[assignment]
        monkeypatch.setattr(f"{__name__}.Files", lambda: files)
        assert not predict(Labels(), OfFiles(), tmp_path).names_files
        assert not (tmp_path / "predictions.csv").exists()


class Changes(LightningModule):
    def predict_step(self, batch: Tensor, batch_idx: int) -> Any:
        return {"score": batch / 2} if batch_idx == 2 else {"label": batch}


class Several(Numbers):
    def predict_dataloader(self) -> Any:
        return [DataLoader(torch.arange(7)), DataLoader(torch.arange(7))]


class Streams(Numbers):
    def predict_dataloader(self) -> DataLoader:
        return DataLoader(Stream(), batch_size=3)


class StreamsItsTest(LightningDataModule):
    def test_dataloader(self) -> DataLoader:
        return DataLoader(Stream(), batch_size=3)


class OneByOne(Numbers):
    def predict_dataloader(self) -> DataLoader:
        return DataLoader(torch.arange(7), batch_size=None)


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
def test_what_cannot_be_predicted_is_refused(
    model: Any, data: Any, message: str, tmp_path: Path
) -> None:
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
        trainer.datamodule.setup(stage)  # as Lightning does, before the callbacks
        with pytest.raises(Refusal, match=f"predict=true: .*{message}"):
            Predictions().setup(trainer, model(), stage)


def test_a_limit_that_leaves_nothing_to_predict_is_refused_before_training() -> None:
    trainer: Any = SimpleNamespace(datamodule=Numbers(), world_size=1, limit_predict_batches=0)
    with pytest.raises(Refusal, match="limit_predict_batches=0 leaves nothing to predict"):
        Predictions().setup(trainer, Doubles(), "fit")


def test_a_sample_for_each_rank_is_enough_to_predict() -> None:
    trainer: Any = SimpleNamespace(datamodule=Numbers(), world_size=7, limit_predict_batches=1.0)
    Predictions().setup(trainer, Doubles(), "fit")


class ByPosition(Numbers):
    def test_dataloader(self) -> DataLoader:
        return DataLoader(self.numbers, 3)


def test_predictions_of_a_loader_that_lightning_cannot_make_are_refused_before_training() -> None:
    trainer: Any = SimpleNamespace(datamodule=ByPosition(), world_size=2, limit_predict_batches=1.0)
    with pytest.raises(MisconfigurationException, match="more than one `__init__` argument"):
        Predictions().setup(trainer, Doubles(), "fit")


def test_predictions_of_the_test_set_after_a_training_without_a_test(tmp_path: Path) -> None:
    trainer = quiet_trainer(Predictions(), default_root_dir=tmp_path, max_epochs=1)
    model, data = TrainsAndPredicts(), TrainsAndTests()
    trainer.fit(model, data)
    trainer.predict(model, data, return_predictions=False)
    assert torch.load(tmp_path / "predictions.pt").tolist() == [0, 2, 4, 6, 8, 10, 12]


class WithoutNames(Numbers):
    def predict_dataloader(self) -> DataLoader:
        return DataLoader(torch.arange(7), 3)


def test_a_loader_that_lightning_cannot_make_anew_is_told(tmp_path: Path) -> None:
    with pytest.raises(MisconfigurationException) as error:
        predict(Doubles(), WithoutNames(), tmp_path)
    message = mistake(error.value, started=True)
    assert message and "write DataLoader(data, batch_size=...)" in message


def test_a_look_at_what_will_be_predicted_leaves_the_training_set(tmp_path: Path) -> None:
    trainer = quiet_trainer(Predictions(), default_root_dir=tmp_path, max_epochs=1)
    trainer.fit(TrainsAndPredicts(), OneAtATime())
    assert trainer.global_step == 4


class PreparesForEach(TrainsAndTests):
    """What it predicts is there after setup("predict") alone."""

    def setup(self, stage: str) -> None:
        super().setup(stage)
        if stage == "predict":
            self.wanted = torch.arange(3)

    def predict_dataloader(self) -> DataLoader:
        return DataLoader(self.wanted)


def test_what_is_predicted_is_looked_at_when_it_is_set_up(tmp_path: Path) -> None:
    trainer = quiet_trainer(Predictions(), default_root_dir=tmp_path, max_epochs=1)
    model, data = TrainsAndPredicts(), PreparesForEach()
    trainer.fit(model, data)
    trainer.predict(model, data, return_predictions=False)
    assert torch.load(tmp_path / "predictions.pt").tolist() == [0, 2, 4]

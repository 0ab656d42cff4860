"""What `make export` writes computes what the model does, and nothing is written that does not."""

from __future__ import annotations

import errno
import os
import sys
from collections.abc import Callable
from pathlib import Path
from types import SimpleNamespace
from typing import Any
from unittest.mock import Mock

import numpy as np
import pytest
import torch
from hydra import compose, initialize_config_dir
from hydra.utils import instantiate
from omegaconf import OmegaConf
from pytorch_lightning import LightningDataModule, LightningModule
from torch import Tensor
from torch.export import ExportedProgram
from torch.utils.data import DataLoader

from datamodules.digits import Digits
from models.classifier import Classifier
from runs import export
from runs.config import CONF
from runs.refusal import Refusal


def trained(folder: Path, *overrides: str) -> tuple[Path, Any]:
    """A checkpoint in the folder of a run, and the model that is in it."""
    with initialize_config_dir(str(CONF), version_base="1.3"):
        config = compose("config", list(overrides))
    torch.manual_seed(1)
    model = instantiate(config.model, _convert_="all").eval()
    checkpoint = folder / "checkpoints" / "last.ckpt"
    checkpoint.parent.mkdir()
    (folder / ".hydra").mkdir()
    OmegaConf.save(config, folder / ".hydra" / "config.yaml")
    torch.save({"state_dict": model.state_dict()}, checkpoint)
    return checkpoint, model


def taking(folder: Path, **classes: str) -> None:
    """The run had those of this file as its model or data."""
    file = folder / ".hydra" / "config.yaml"
    config = OmegaConf.load(file)
    for group, name in classes.items():
        config[group] = {"_target_": f"{__name__}.{name}"}
    OmegaConf.save(config, file)


class MakesLayersLate(Classifier):
    def configure_model(self) -> None:
        self.extra = torch.nn.Linear(1, 1)


def test_layers_of_configure_model_are_made(tmp_path: Path) -> None:
    checkpoint, model = trained(tmp_path)
    extra = {"extra.weight": torch.ones(1, 1), "extra.bias": torch.ones(1)}
    torch.save({"state_dict": {**model.state_dict(), **extra}}, checkpoint)
    file = tmp_path / ".hydra" / "config.yaml"
    config = OmegaConf.load(file)
    config.model._target_ = f"{__name__}.MakesLayersLate"
    OmegaConf.save(config, file)
    assert "last.pt2" in export.export(checkpoint, "pt2")


class TakesWhatIsThere(Classifier):
    """Its last weights, a bias, are 7 unless others are loaded."""

    def configure_model(self) -> None:
        self.strict_loading = False
        torch.nn.init.constant_([*self.parameters()][-1], 7.0)


def test_weights_that_a_checkpoint_leaves_out_are_the_models(tmp_path: Path) -> None:
    checkpoint, model = trained(tmp_path)
    taking(tmp_path, model="TakesWhatIsThere")
    held = torch.load(checkpoint)
    _, bias = held["state_dict"].popitem()
    torch.save(held, checkpoint)
    export.export(checkpoint, "pt2")
    exported = torch.export.load(checkpoint.with_suffix(".pt2")).module()
    images = torch.rand(5, 1, 8, 8)
    with torch.no_grad():
        torch.testing.assert_close(exported(images), model(images) - bias + 7)


def test_the_file_computes_what_the_model_does(tmp_path: Path) -> None:
    checkpoint, model = trained(tmp_path)
    torch.manual_seed(2)  # weights come from the checkpoint, not from the seed
    message = export.export(checkpoint, "pt2")
    assert "last.pt2" in message and message.endswith("takes float32 (any batch, 1, 8, 8)")
    exported = torch.export.load(checkpoint.with_suffix(".pt2")).module()
    images = torch.rand(5, 1, 8, 8)
    with torch.no_grad():  # dropout is off in both
        torch.testing.assert_close(exported(images), model(images))


def compiles(graph: torch.fx.GraphModule, inputs: list[Tensor]) -> Callable:
    raise RuntimeError("this takes minutes")


class Compiled(Classifier):
    def __init__(self) -> None:
        super().__init__()
        self.network = torch.compile(self.network, backend=compiles)


def test_a_compiled_model_is_exported_without_compiling_it(tmp_path: Path) -> None:
    checkpoint, _ = trained(tmp_path)
    taking(tmp_path, model="Compiled")
    torch.save({"state_dict": Compiled().state_dict()}, checkpoint)  # of other names
    assert "any batch" in export.export(checkpoint, "pt2")


def test_a_checkpoint_may_lie_in_a_folder_of_checkpoints(tmp_path: Path) -> None:
    """As with filename={epoch}-{val/loss:.2f}."""
    checkpoint, _ = trained(tmp_path)
    deeper = checkpoint.with_name("epoch=3-val") / "loss=0.12.ckpt"
    deeper.parent.mkdir()
    checkpoint.rename(deeper)
    assert "loss=0.12.pt2" in export.export(deeper, "pt2")


class Normalizes(LightningModule):
    """By a deviation, which is 0 for the example."""

    def __init__(self) -> None:
        super().__init__()
        self.example_input_array = torch.zeros(4, 2)

    def forward(self, batch: Tensor) -> Tensor:
        return batch / batch.std(0)


def test_what_gives_no_number_for_its_example_is_exported(tmp_path: Path) -> None:
    checkpoint, _ = trained(tmp_path)
    taking(tmp_path, model="Normalizes")
    torch.save({"state_dict": {}}, checkpoint)
    assert export.export(checkpoint, "pt2").endswith("takes float32 (any batch, 2)")


class OfThree(LightningModule):
    example_input_array = torch.ones(2, 3, dtype=torch.int64)

    def forward(self, tokens: Tensor) -> Tensor:
        return tokens + torch.arange(3)


def test_a_length_that_forward_fixes_is_told(tmp_path: Path) -> None:
    checkpoint, _ = trained(tmp_path)
    taking(tmp_path, model="OfThree")
    torch.save({"state_dict": {}}, checkpoint)
    assert export.export(checkpoint, "pt2").endswith("takes int64 (any batch, 3)")


@pytest.mark.parametrize("right_from", [33, 32])
def test_another_computation_is_not_written(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, right_from: int
) -> None:
    """Of the batch, which has 32 samples, or only of a smaller one."""
    as_pt2 = export.as_pt2

    def wrong(program: ExportedProgram) -> tuple[bytes, Callable[[Tensor], Any]]:
        content, compute = as_pt2(program)
        return content, lambda batch: (1.01 if len(batch) < right_from else 1) * compute(batch)

    monkeypatch.setattr(export, "as_pt2", wrong)
    checkpoint, _ = trained(tmp_path)
    with pytest.raises(Refusal, match="computes something else"):
        export.export(checkpoint, "pt2")
    assert [file.name for file in checkpoint.parent.iterdir()] == ["last.ckpt"]


def test_a_file_that_cannot_be_written_is_told_and_leaves_the_one_before(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    checkpoint, _ = trained(tmp_path)
    checkpoint.with_suffix(".pt2").write_bytes(b"before")

    def full(descriptor: int) -> None:
        raise OSError(errno.ENOSPC, os.strerror(errno.ENOSPC))

    monkeypatch.setattr(os, "fsync", full)
    with pytest.raises(Refusal, match="last.pt2: cannot be written: No space left on device"):
        export.export(checkpoint, "pt2")
    assert checkpoint.with_suffix(".pt2").read_bytes() == b"before"
    assert len(list(checkpoint.parent.iterdir())) == 2


class GivesTwo(LightningModule):
    def forward(self, batch: Tensor) -> Any:
        return batch, {"twice": 2 * batch}


def test_all_outputs_are_compared() -> None:
    """What ONNX gives for a forward that returns more than a tensor is a plain list of them."""
    ones = torch.ones(3, 2)
    export.compare(GivesTwo(), lambda batch: [batch, 2 * batch], (ones,))
    with pytest.raises(Refusal, match="computes something else"):
        export.compare(GivesTwo(), lambda batch: [batch, 3 * batch], (ones,))


class TakesTwo(LightningModule):
    """A picture and a number for each sample."""

    example_input_array: Any = (torch.ones(4, 3, 2), torch.arange(4))

    def __init__(self) -> None:
        super().__init__()
        self.weight = torch.nn.Parameter(torch.full((2,), 3.0))

    def forward(self, pictures: Tensor, numbers: Tensor) -> Tensor:
        return (pictures * self.weight).sum((1, 2)) - numbers


@pytest.fixture
def takes_two(tmp_path: Path) -> Path:
    checkpoint, _ = trained(tmp_path)
    taking(tmp_path, model="TakesTwo")
    torch.save({"state_dict": TakesTwo().state_dict()}, checkpoint)
    return checkpoint


def test_a_forward_may_take_several_tensors(takes_two: Path) -> None:
    message = export.export(takes_two, "pt2")
    assert message.endswith("takes float32 (any batch, 3, 2) and int64 (any batch)")
    exported = torch.export.load(takes_two.with_suffix(".pt2")).module()
    inputs = torch.rand(7, 3, 2), torch.arange(7)
    torch.testing.assert_close(exported(*inputs), TakesTwo()(*inputs))


def test_onnx_has_the_tensors_of_forward_by_name(
    takes_two: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """With stubs of its packages, which give what torch.export does."""
    names, content, modules = ["pictures", "numbers"], b"as onnx writes it", []

    def convert(program: ExportedProgram, dynamo: bool, verbose: bool) -> Any:
        modules.append(program.module())
        return SimpleNamespace(model_proto=SimpleNamespace(SerializeToString=lambda: content))

    class Session:
        def __init__(self, read: bytes, providers: list[str]) -> None:
            assert (read, providers) == (content, ["CPUExecutionProvider"])

        def get_inputs(self) -> list[SimpleNamespace]:
            return [SimpleNamespace(name=name) for name in names]

        def run(self, outputs: None, feed: dict[str, np.ndarray]) -> list[np.ndarray]:
            assert sorted(feed) == sorted(names)
            inputs = (torch.from_numpy(feed[name]) for name in names)
            return [modules[0](*inputs).detach().numpy()]

    monkeypatch.setitem(sys.modules, "onnxruntime", SimpleNamespace(InferenceSession=Session))
    monkeypatch.setattr(export, "FORMATS", {"onnx": []})
    monkeypatch.setattr(torch.onnx, "export", convert)
    message = export.export(takes_two, "onnx")
    assert message.endswith("takes float32 (any batch, 3, 2) and int64 (any batch)")
    assert takes_two.with_suffix(".onnx").read_bytes() == content
    monkeypatch.setattr(torch.onnx, "export", Mock(side_effect=RuntimeError("no such\noperator")))
    with pytest.raises(Refusal, match="cannot convert it: no such operator; format pt2 may do"):
        export.export(takes_two, "onnx")


@pytest.mark.parametrize(
    ("example", "told"),
    [
        ({"pictures": torch.ones(4, 3, 2)}, "example_input_array of TakesTwo is no batch"),
        ((), "example_input_array of TakesTwo is no batch"),
        (torch.tensor(1.0), "example_input_array of TakesTwo is no batch"),
        (torch.ones(4, 3, 2), r"does not take \(4, 3, 2\), its example_input_array: fix that"),
    ],
)
def test_an_example_that_forward_does_not_take(
    takes_two: Path, monkeypatch: pytest.MonkeyPatch, example: Any, told: str
) -> None:
    monkeypatch.setattr(TakesTwo, "example_input_array", example)
    with pytest.raises(Refusal, match=told):
        export.export(takes_two, "pt2")


class Prepared(LightningDataModule):
    """Of bytes, which a hook makes floats, in a tuple in a list; there when they were prepared, one
    sample a batch, in two loaders."""

    ready = False

    def prepare_data(self) -> None:
        self.ready = True

    def val_dataloader(self) -> list[DataLoader]:
        assert self.ready
        images: Any = torch.zeros(3, 1, 8, 8, dtype=torch.uint8)
        return [DataLoader(images), DataLoader(images)]

    def on_before_batch_transfer(self, batch: Tensor, dataloader_idx: int) -> Any:
        return [(batch.float(), None), None]


def test_data_are_prepared_and_their_hooks_run(tmp_path: Path) -> None:
    checkpoint, _ = trained(tmp_path)
    taking(tmp_path, data="Prepared")
    assert export.export(checkpoint, "pt2").endswith("takes float32 (any batch, 1, 8, 8)")


class OfFour(LightningModule):
    samples = 4

    def __init__(self) -> None:
        super().__init__()
        self.example_input_array = torch.ones(self.samples, 2)

    def forward(self, batch: Tensor) -> Tensor:
        return batch.reshape(self.samples, 2) + 1


class OfOne(OfFour):
    samples = 1


@pytest.mark.parametrize("fixed", [OfFour, OfOne])
def test_a_batch_size_that_forward_fixes_is_told(tmp_path: Path, fixed: type[OfFour]) -> None:
    checkpoint, _ = trained(tmp_path)
    taking(tmp_path, model=fixed.__name__)
    torch.save({"state_dict": {}}, checkpoint)
    message = export.export(checkpoint, "pt2")
    assert message.endswith(f"takes float32 (batch {fixed.samples} only, 2)")


class Named(LightningDataModule):
    """Batches that are dicts, as those of many text data sets."""

    def val_dataloader(self) -> DataLoader:
        batches: Any = [{"images": torch.zeros(2, 1, 8, 8)}]
        return DataLoader(batches, batch_size=None)


def test_a_batch_that_begins_with_no_tensor_is_told_with_what_to_write(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    checkpoint, _ = trained(tmp_path)
    taking(tmp_path, data="Named")
    with pytest.raises(Refusal, match="batch of Named begins with a dict.*__init__ of Classifier"):
        export.export(checkpoint, "pt2")
    example = torch.zeros(2, 1, 8, 8)  # as it says
    monkeypatch.setattr(Classifier, "example_input_array", example)
    assert export.export(checkpoint, "pt2").endswith("(any batch, 1, 8, 8)")


class Empty(LightningDataModule):
    loaders: tuple[DataLoader, ...] = ()

    def val_dataloader(self) -> list[DataLoader]:
        return list(self.loaders)


@pytest.mark.parametrize("loaders", [(), (DataLoader([1.0], 2, drop_last=True),)])  # type: ignore[arg-type]
def test_data_without_a_batch_are_told(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, loaders: tuple[DataLoader, ...]
) -> None:
    checkpoint, _ = trained(tmp_path)
    taking(tmp_path, data="Empty")
    monkeypatch.setattr(Empty, "loaders", loaders)
    with pytest.raises(Refusal, match="Empty has no batch to validate.*no data are needed"):
        export.export(checkpoint, "pt2")


def test_what_cannot_be_exported_is_told(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    with pytest.raises(Refusal, match="there is no such file"):
        export.export(tmp_path / "none.ckpt", "pt2")
    checkpoint, _ = trained(tmp_path)
    with monkeypatch.context() as patch, pytest.raises(Refusal, match="no forward.*give it one"):
        patch.delattr(Classifier, "forward")
        export.export(checkpoint, "pt2")
    for error in (ValueError, AttributeError):  # as of self.trainer, which is None
        told = pytest.raises(Refusal, match="cannot be loaded: images")
        with monkeypatch.context() as patch, told:
            patch.setattr(Digits, "setup", Mock(side_effect=error("images moved away")))
            export.export(checkpoint, "pt2")
    with monkeypatch.context() as patch, pytest.raises(Refusal, match="forward cannot be traced: "):
        patch.setattr(Classifier, "forward", lambda _, batch: batch if batch.sum() > 0 else -batch)
        export.export(checkpoint, "pt2")
    torch.save({"weights": {}}, checkpoint)
    with pytest.raises(Refusal, match="cannot be loaded: 'state_dict'"):
        export.export(checkpoint, "pt2")
    for predictions in (torch.ones(3), ["cat"]):
        torch.save(predictions, checkpoint)
        with pytest.raises(Refusal, match="cannot be loaded: "):
            export.export(checkpoint, "pt2")
    checkpoint.write_bytes(b"no checkpoint")
    with pytest.raises(Refusal, match="cannot be loaded: "):
        export.export(checkpoint, "pt2")
    (tmp_path / ".hydra" / "config.yaml").unlink()
    with pytest.raises(Refusal, match="export it within its run's folder"):
        export.export(checkpoint, "pt2")
    monkeypatch.setattr(export, "FORMATS", {"onnx": ["no_such_package"]})
    with pytest.raises(Refusal, match="python -m pip install no_such_package"):
        export.export(checkpoint, "onnx")

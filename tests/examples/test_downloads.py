"""MNIST and CIFAR-10: downloaded once, read as they are written, refused where they are damaged."""

from __future__ import annotations

import os
import pickle
from itertools import chain
from pathlib import Path
from types import SimpleNamespace
from typing import Any
from urllib.error import URLError

import numpy as np
import pytest
import torch
from pytorch_lightning.plugins.precision import HalfPrecision, Precision

from datamodules import cifar10, mnist
from datamodules.cifar10 import Cifar10, InMemory, augmented
from datamodules.mnist import Mnist
from runs import export
from tests.pictures import write_cifar10, write_mnist
from tests.test_datamodules import among, assert_each_task_has_its_part
from tests.test_export import trained

DOWNLOADED = {
    "MNIST": (mnist, Mnist, lambda root: write_mnist(root / "MNIST" / "raw", 24, 4)),
    "CIFAR10": (cifar10, Cifar10, lambda root: write_cifar10(root / "cifar-10-batches-py", 4)),
}


@pytest.mark.parametrize("name", DOWNLOADED)
class TestDownload:
    def test_training_is_shuffled_and_each_task_has_its_part(
        self, name: str, tmp_path: Path
    ) -> None:
        _, kind, write = DOWNLOADED[name]
        write(tmp_path)
        assert_each_task_has_its_part(kind(str(tmp_path)))

    def test_without_internet_it_says_what_to_put_where(
        self, name: str, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
    ) -> None:
        module, kind, write = DOWNLOADED[name]

        def fail(root: str, download: bool) -> None:
            Path(root).mkdir(parents=True)
            raise RuntimeError("Error downloading it:\nTried there, got:\nno route to host\n")

        monkeypatch.setattr(module, name, fail)
        data = kind(str(tmp_path))
        with pytest.raises(FileNotFoundError, match=r"\(no route to host\)") as error:
            data.prepare_data()
        assert str(data.folder) in str(error.value) and "put there: " in str(error.value)
        assert not list(tmp_path.iterdir())

        def fail_beside_another_host(root: str, download: bool) -> None:
            write(tmp_path)
            raise URLError("no route to host")

        monkeypatch.setattr(module, name, fail_beside_another_host)
        data.prepare_data()

    def test_once_though_two_hosts_share_the_folder(
        self, name: str, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
    ) -> None:
        module, kind, write = DOWNLOADED[name]
        calls = []

        def download(root: str, download: bool) -> None:
            calls.append(root)
            write(Path(root))
            write(tmp_path)  # the other host, a moment earlier

        monkeypatch.setattr(module, name, download)
        data = kind(str(tmp_path))
        data.prepare_data()
        data.prepare_data()
        assert len(calls) == 1 and len(list(tmp_path.iterdir())) == 1
        data.setup("fit")
        assert len(data.train_dataloader().dataset) > 0

    def test_what_is_missing_is_put_beside_what_is_there(
        self, name: str, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
    ) -> None:
        module, kind, write = DOWNLOADED[name]
        monkeypatch.setattr(module, name, lambda root, download: write(Path(root)))
        data = kind(str(tmp_path))
        write(tmp_path / "other")
        files = sorted(file.name for file in (tmp_path / "other").rglob("*") if file.is_file())
        data.folder.mkdir(parents=True)
        for kept in ("notes.txt", files[0]):  # of a copy that was interrupted
            (data.folder / kept).write_bytes(b"")
        data.prepare_data()
        assert sorted(file.name for file in data.folder.iterdir()) == sorted([*files, "notes.txt"])
        assert all((data.folder / name).stat().st_size for name in files)


def test_mnist_is_read_as_it_is_written(tmp_path: Path) -> None:
    write_mnist(tmp_path / "MNIST" / "raw", train=60, test=12)
    drawn = []
    for seed in (1, 0, 0):
        data: Any = Mnist(str(tmp_path), batch_size=12, split_seed=seed)
        data.setup("fit")
        drawn.append([list(split.indices) for split in data.splits[:2]])
    assert drawn[0] != drawn[1] == drawn[2] and sorted(chain(*drawn[2])) == list(range(60))
    assert [len(split) for split in data.splits] == [55, 5, 12]
    images, labels = next(iter(data.test_dataloader()))
    written = (tmp_path / "MNIST" / "raw" / "t10k-images-idx3-ubyte").read_bytes()[16:]
    assert (images * 255).round().to(torch.uint8).numpy().tobytes() == written
    written = (tmp_path / "MNIST" / "raw" / "t10k-labels-idx1-ubyte").read_bytes()[8:]
    assert labels.to(torch.uint8).numpy().tobytes() == written


@pytest.mark.parametrize("name", ["train-images-idx3-ubyte", "t10k-labels-idx1-ubyte"])
@pytest.mark.parametrize("content", [b"", b"<html>no such file</html>", None])
def test_files_of_mnist_that_are_damaged_are_named(
    name: str, content: bytes | None, tmp_path: Path
) -> None:
    write_mnist(tmp_path / "MNIST" / "raw", train=60, test=12)
    file = tmp_path / "MNIST" / "raw" / name
    file.write_bytes(file.read_bytes()[:-5] if content is None else content)
    with pytest.raises(RuntimeError, match=rf"{name} cannot be read: .+: delete it") as told:
        Mnist(str(tmp_path)).setup("fit")
    assert "\n" not in str(told.value)


class TestCifar10:
    def test_its_files_run_nothing(self, tmp_path: Path) -> None:
        class Runs:
            def __reduce__(self) -> Any:
                return os.mkdir, (str(tmp_path / "ran"),)

        file = tmp_path / "test_batch"
        file.write_bytes(pickle.dumps({b"data": np.zeros((1, 3072), np.uint8), b"labels": Runs()}))
        with pytest.raises(RuntimeError, match=r"test_batch cannot be read: it holds posix.mkdir"):
            InMemory([file])
        assert not (tmp_path / "ran").exists()

    @pytest.mark.parametrize("protocol", range(pickle.HIGHEST_PROTOCOL + 1))
    def test_arrays_of_any_protocol_are_read(self, protocol: int, tmp_path: Path) -> None:
        """Python 2, which has written the files, has protocol 2."""
        images, file = np.arange(3072, dtype=np.uint8)[None], tmp_path / "test_batch"
        file.write_bytes(pickle.dumps({b"data": images, b"labels": [3]}, protocol))
        assert InMemory([file]).images.numpy().tobytes() == images.tobytes()

    @pytest.mark.parametrize(
        "content",
        [b"", b"<html>no such file</html>", b"]q.", None,
         pickle.dumps({b"data": np.zeros((2, 3072), np.uint8), b"labels": [1]})],
    )  # fmt: skip
    def test_a_damaged_file_is_named(self, content: bytes | None, tmp_path: Path) -> None:
        write_cifar10(tmp_path / "new", each=3)
        file = tmp_path / "new" / "test_batch"
        file.write_bytes(file.read_bytes()[:-5] if content is None else content)
        with pytest.raises(RuntimeError, match=r"test_batch cannot be read: .+: delete it"):
            InMemory([file])

    def test_a_batch_is_taken_at_once_and_made_float_on_the_device(self, tmp_path: Path) -> None:
        write_cifar10(tmp_path / "cifar-10-batches-py", each=12)
        data: Any = Cifar10(str(tmp_path), batch_size=6)
        data.setup("fit")
        train, val, test = data.splits
        assert (list(train.indices), list(val.indices)) == ([*range(54)], [*range(54, 60)])
        assert len(test) == 12
        batch = next(iter(data.test_dataloader()))
        assert batch[0].dtype == torch.uint8 and batch[0].shape == (6, 3, 32, 32)
        sample = InMemory([tmp_path / "cifar-10-batches-py" / "test_batch"])[5]
        assert torch.equal(batch[0][5], sample[0]) and batch[1][5] == sample[1]
        precision = HalfPrecision("bf16-true")
        data.trainer = SimpleNamespace(training=False, precision_plugin=precision)
        assert data.on_after_batch_transfer(batch, 0)[0].dtype == torch.bfloat16
        precision = Precision()
        data.trainer = SimpleNamespace(training=False, precision_plugin=precision)
        images, _ = data.on_after_batch_transfer(batch, 0)
        red = (np.asarray(sample[0][0], dtype=float) - 125.31) / 62.99
        assert images[5, 0].numpy() == pytest.approx(red, abs=1e-5)
        data.trainer = among(1, 0)
        assert not torch.equal(data.on_after_batch_transfer(batch, 0)[0], images)
        data.trainer = among(1, 0, overfit_batches=1)  # to learn it by heart
        assert torch.equal(data.on_after_batch_transfer(batch, 0)[0], images)

    def test_the_example_of_an_export_is_what_the_models_steps_get(self, tmp_path: Path) -> None:
        """Bytes of images, which a hook of the data module makes floats."""
        write_cifar10(tmp_path / "cifar-10-batches-py", each=12)
        recipe = ["experiment=cifar_resnet", f"data_dir={tmp_path}"]
        checkpoint, _ = trained(tmp_path, *recipe)
        assert export.export(checkpoint, "pt2").endswith("takes float32 (any batch, 3, 32, 32)")

    def test_augmented_images_are_shifted_and_mirrored_each_by_itself(self) -> None:
        torch.manual_seed(0)
        image = torch.arange(1.0, 1 + 2 * 5 * 6).view(2, 5, 6)  # no value twice; 0 comes in
        padded = torch.nn.functional.pad(image, [4] * 4)
        crops = [padded[:, y : y + 5, x : x + 6] for y in range(9) for x in range(9)]
        possible = {tuple(i.flatten().tolist()) for crop in crops for i in (crop, crop.flip(2))}
        drawn = {tuple(i.flatten().tolist()) for i in augmented(image.expand(2000, -1, -1, -1))}
        assert drawn == possible  # each of 162 is drawn in 2,000 but once in 10^3 runs; seeded

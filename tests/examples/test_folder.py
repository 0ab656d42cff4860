"""Image folders: read, divided and predicted; and what folders and shards have in common."""

from __future__ import annotations

import os
import re
import shutil
import warnings
from collections.abc import Callable
from pathlib import Path
from types import SimpleNamespace
from typing import Any

import numpy as np
import pytest
import torch
from hydra import compose, initialize_config_dir
from PIL import Image
from pytorch_lightning import Trainer
from pytorch_lightning.trainer.states import TrainerFn
from torch import Tensor
from torchvision.transforms.functional import to_pil_image

from datamodules import folder as of_folders
from datamodules import ranks
from datamodules.folder import Folder
from datamodules.pictures import read, split_by_name, view
from datamodules.shards import Shards
from runs.config import CONF
from runs.targets import make
from strategies import HorovodStrategy
from tests.pictures import write_folder, write_shards
from tests.test_datamodules import among, assert_each_task_has_its_part


class TestPictures:
    @pytest.mark.parametrize("suffix", ["png", "tif", "pgm"])
    def test_16_bits_are_scaled(self, suffix: str, tmp_path: Path) -> None:
        values = np.linspace(0, 65535, 64).astype(np.uint16).reshape(8, 8)
        file = tmp_path / f"ramp.{suffix}"
        if suffix == "pgm":
            file.write_bytes(b"P5 8 8 65535\n" + values.astype(">u2").tobytes())
        else:
            Image.fromarray(values).save(file)
        assert np.array_equal(np.asarray(read(str(file)))[..., 1], values >> 8)

    @pytest.mark.parametrize("dtype", [np.int32, np.float32])
    def test_of_32_bits_nobody_knows_what_white_is(self, dtype: Any, tmp_path: Path) -> None:
        Image.fromarray(np.ones((4, 4), dtype)).save(tmp_path / "x.tif")
        with pytest.raises(RuntimeError, match="x.tif cannot be read: its pixels have 32 bits"):
            read(str(tmp_path / "x.tif"))

    @pytest.mark.parametrize("damage", [b"Exif\0\0MM\0*", b"Exif\0\0XX\0*\0\0\0\x08", b"?"])
    def test_damaged_exif_is_passed_over(self, damage: bytes, tmp_path: Path) -> None:
        Image.new("RGB", (8, 4), "red").save(tmp_path / "phone.png", exif=damage)
        image = read(str(tmp_path / "phone.png"))
        assert image.size == (8, 4) and np.asarray(image)[0, 0, 0] > 250

    def test_damaged_pixels_are_an_error(self, tmp_path: Path) -> None:
        """Also where all bytes are there, and Pillow gives what it has read when asked again."""
        pixels = np.random.default_rng(0).integers(0, 256, (64, 64, 3), dtype=np.uint8)
        Image.fromarray(pixels).save(file := tmp_path / "phone.png")
        content = bytearray(file.read_bytes())
        content[len(content) // 2] ^= 255
        file.write_bytes(content)
        with pytest.raises(RuntimeError, match=r"phone[.]png cannot be read: "):
            read(str(file))

    def test_it_is_turned_as_its_exif_says(self, tmp_path: Path) -> None:
        exif = Image.Exif()
        exif[0x0112] = 6  # lies on its side
        Image.new("RGB", (8, 4)).save(tmp_path / "phone.jpg", exif=exif)
        assert read(str(tmp_path / "phone.jpg")).size == (4, 8)

    def test_what_is_transparent_is_white(self, tmp_path: Path) -> None:
        image = Image.new("RGBA", (2, 1), (255, 0, 0, 255))
        image.putpixel((1, 0), (255, 0, 0, 0))
        image.save(tmp_path / "icon.png")
        pixels = np.asarray(read(str(tmp_path / "icon.png"))).tolist()
        assert pixels == [[[255, 0, 0], [255, 255, 255]]]

    def test_one_that_is_too_large_is_named(
        self, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
    ) -> None:
        Image.new("RGB", (30, 30)).save(tmp_path / "wide.png")
        monkeypatch.setattr(Image, "MAX_IMAGE_PIXELS", 100)
        with pytest.raises(RuntimeError, match="wide.png cannot be read: Image size"):
            read(str(tmp_path / "wide.png"))


class TestFolder:
    def test_training_is_shuffled_and_each_task_has_its_part(self, tmp_path: Path) -> None:
        write_folder(tmp_path, each=5)
        assert_each_task_has_its_part(data := Folder(str(tmp_path)))
        parts = data.splits
        data.setup("test")  # files are not listed again
        assert data.splits is parts

    def test_pictures_of_any_size_become_squares(self, tmp_path: Path) -> None:
        write_folder(tmp_path / "images", each=10)
        for channels in (1, 3):
            data = Folder(str(tmp_path / "images"), 4, size=16, channels=channels, num_workers=0)
            data.setup("fit")
            assert [len(split) for split in data.splits] == [16, 2, 2]
            images, labels = next(iter(data.train_dataloader()))
            assert images.shape == (4, channels, 16, 16) and images.dtype == torch.float32
            assert images.min() >= 0 and images.max() <= 1 and labels.max() <= 1

    def test_train_and_val_are_the_split_where_they_are_there(self, tmp_path: Path) -> None:
        for split, each in (("train", 6), ("val", 3)):
            write_folder(tmp_path / split, each)
        data = Folder(str(tmp_path), 4, size=16, augment=True, num_workers=0)
        data.setup("fit")
        assert [len(split) for split in data.splits] == [12, 6, 6]
        (train, _), (val, _) = data.splits[0][0], data.splits[1][0]
        assert train.shape == val.shape == (3, 16, 16)
        assert not torch.equal(train, data.splits[0][0][0])  # another part of the same image
        assert torch.equal(val, data.splits[1][0][0])
        (tmp_path / "val" / "tower").rename(tmp_path / "val" / "spire")
        with pytest.raises(ValueError, match="same classes; only one has spire, tower"):
            Folder(str(tmp_path)).setup("fit")

    @pytest.mark.parametrize(("whole", "edge"), [(True, 0), (False, 16)])
    def test_a_view_is_of_the_whole_height_or_of_7_eighths(self, whole: bool, edge: int) -> None:
        ramp = torch.arange(256, dtype=torch.uint8).expand(3, 256, 256)
        pixels = 255 * view(28, whole=whole)(to_pil_image(ramp))[0, 0]
        width = (256 - 2 * edge) / 28  # of a pixel
        expected = [edge + width / 2 - 0.5, 255 - edge - width / 2 + 0.5]
        assert [float(pixels[0]), float(pixels[-1])] == pytest.approx(expected, abs=2)

    def test_a_view_to_train_is_mirrored_or_not(self) -> None:
        torch.manual_seed(0)
        image = Image.new("L", (32, 32))
        image.paste(255, (16, 0, 32, 32))  # its right half is white
        views = (view(8, augment=True)(image.convert("RGB"))[0] for _ in range(50))
        brighter = {float((seen[:, 4:] - seen[:, :4]).mean().sign()) for seen in views}
        assert {-1, 1} <= brighter

    def test_a_broken_image_is_named(self, tmp_path: Path) -> None:
        write_folder(tmp_path / "images", each=10)
        for file in (tmp_path / "images").rglob("*.png"):
            file.write_bytes(file.read_bytes()[:-40])
        data = Folder(str(tmp_path / "images"), num_workers=0)
        data.setup("fit")
        with pytest.raises(RuntimeError, match=r"/images/.*[.]png cannot be read: ") as error:
            next(iter(data.train_dataloader()))
        assert error.value.__cause__ is not None

    def test_a_class_without_images_is_named(self, tmp_path: Path) -> None:
        write_folder(tmp_path, 4)
        (tmp_path / "zebra").mkdir()
        with pytest.raises(FileNotFoundError, match="it holds no images of zebra; images are"):
            Folder(str(tmp_path)).setup("fit")

    def test_a_third_part_is_tested_and_other_names_of_parts_are_no_classes(
        self, tmp_path: Path
    ) -> None:
        for split, each in (("train", 6), ("val", 3), ("test", 2)):
            write_folder(tmp_path / split, each)
        data = Folder(str(tmp_path), 4, size=16, augment=True, num_workers=0)
        data.setup("fit")
        assert [len(split) for split in data.splits] == [12, 6, 4]
        first, again = (data.splits[2][0][0] for _ in range(2))
        assert first.shape == (3, 16, 16) and torch.equal(first, again)
        (tmp_path / "test" / "tower").rename(tmp_path / "test" / "spire")
        with pytest.raises(ValueError, match="train/ and test/ need the same classes"):
            Folder(str(tmp_path)).setup("fit")
        for name in ("train", "val", "test"):
            (tmp_path / name).rename(tmp_path / f"{name.title()}")
        with pytest.raises(ValueError, match="Test, Train, Val would be classes; rename"):
            Folder(str(tmp_path)).setup("fit")

    def test_few_change_sides_when_images_are_added(self, tmp_path: Path) -> None:
        write_folder(tmp_path / "images", each=50)

        def parts(seed: int = 0, folder: str = "images") -> list[set[str]]:
            data = Folder(str(tmp_path / folder), split_seed=seed)
            data.setup("fit")
            splits: Any = data.splits
            start = len(str(tmp_path / folder))
            return [{s.dataset.samples[i][0][start:] for i in s.indices} for s in splits]

        before = parts()
        assert [len(part) for part in before] == [80, 10, 10]
        assert not any(a == b for a, b in zip(before, parts(seed=1)))
        shutil.copytree(tmp_path / "images", tmp_path / "moved")
        assert parts(folder="moved") == before
        shutil.copy(
            tmp_path / "images" / "tower" / "0.png", tmp_path / "images" / "tower" / "a.png"
        )
        after = parts()
        assert sum(len(a & b) for a, b in zip(before, after)) >= 98
        assert len(set.union(*after)) == 101

    @pytest.mark.parametrize("count", range(6))
    def test_small_numbers_have_parts_too(self, count: int) -> None:
        images: Any = SimpleNamespace(root="/r", samples=[(f"/r/{i}", 0) for i in range(count)])
        parts = split_by_name(images, 0)
        assert sorted(index for part in parts for index in part) == list(range(count))
        assert count < 3 or min(map(len, parts)) == 1

    def test_hidden_names_are_passed_over_and_other_files_told(self, tmp_path: Path) -> None:
        write_folder(tmp_path / ".mine", each=2)  # above the folder a dot is nobody's business
        images = tmp_path / ".mine"
        for name in ("._0.png", "Thumbs.db", "a.gif", "b.gif", "notes"):
            (images / "tower" / name).write_text("no picture")
        for name in (".ipynb_checkpoints", "tower/.thumbnails", "__MACOSX"):
            (images / name).mkdir()
            (images / name / "1.png").write_text("no picture")
        (images / "tower" / "0.png").rename(images / "tower" / "IMG_0.PNG")
        data = Folder(str(images))
        with pytest.warns(UserWarning, match="left out: 2 .gif, 1 without a suffix"):
            data.setup("fit")
        assert data.classes == ["bedroom", "tower"]
        assert sum(map(len, data.splits)) == 4

    def test_other_images_are_predicted_in_the_order_of_their_names(
        self, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
    ) -> None:
        write_folder(tmp_path / "images", each=5)
        write_folder(tmp_path / "new" / "b", each=1)
        shutil.copy(tmp_path / "new" / "b" / "tower" / "0.png", tmp_path / "new" / "z.png")
        new = tmp_path / "new"
        data = Folder(str(tmp_path / "images"), size=8, num_workers=0, predict=str(new))
        compared: list[str] = []
        with monkeypatch.context() as patched:
            of_rank_0 = lambda _, where, __: compared.append(where)  # noqa: E731
            patched.setattr(of_folders, "refuse_other_files", of_rank_0)
            data.setup("predict")
        assert compared == [f"data.folder={tmp_path / 'images'}", f"data.predict={new}"]
        loader = data.predict_dataloader()
        names = ["b/bedroom/0.png", "b/tower/0.png", "z.png"]
        assert loader.dataset.samples == [(f"{new}/{name}", -1) for name in names]
        (images, labels), *_ = loader
        assert images.shape == (3, 3, 8, 8) and labels.tolist() == [-1] * 3
        assert torch.equal(images[1], images[2])
        trainer: Any = SimpleNamespace(state=SimpleNamespace(fn=TrainerFn.PREDICTING))
        data.trainer = trainer
        data.load_state_dict({"classes": ["attic", "tower"], "files": ""})  # before a bedroom came
        assert loader.dataset.class_to_idx == {"attic": 0, "tower": 1}
        data = Folder(str(tmp_path / "images"), predict=str(tmp_path / "none"))
        with pytest.raises(FileNotFoundError, match="data.predict=.*none: there are no images"):
            data.setup("predict")

    def test_a_checkpoint_of_other_classes_or_files_is_told(self, tmp_path: Path) -> None:
        write_folder(tmp_path / "images", each=10)
        for part in ("train", "val"):
            write_folder(tmp_path / "given" / part, each=2)

        def at(task: TrainerFn, folder: str = "images") -> Folder:
            data = Folder(str(tmp_path / folder))
            data.setup("fit")
            data.trainer = among(1, 0)
            data.trainer.state = SimpleNamespace(fn=task)
            return data

        kept = at(TrainerFn.FITTING).state_dict()
        with warnings.catch_warnings():
            warnings.simplefilter("error")
            at(TrainerFn.FITTING).load_state_dict(kept)
            at(TrainerFn.FITTING, "given").load_state_dict(kept)  # in parts that nothing moves
        (tmp_path / "images" / "tower" / "0.png").rename(tmp_path / "images" / "tower" / "a.png")
        with pytest.warns(UserWarning, match="other files than the checkpoint was trained with"):
            at(TrainerFn.TESTING).load_state_dict(kept)
        (tmp_path / "images" / "bedroom").rename(tmp_path / "images" / "zoo")
        with pytest.raises(ValueError, match="classes are bedroom, tower, these are tower, zoo"):
            at(TrainerFn.TESTING).load_state_dict(kept)
        at(TrainerFn.PREDICTING).load_state_dict(kept)

    def test_home_is_written_as_a_tilde(
        self, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
    ) -> None:
        monkeypatch.setenv("HOME", str(tmp_path))
        for part in ("train", "val"):
            write_folder(tmp_path / "images" / part, each=2)
        data = Folder("~/images", predict="~/images/val")
        data.setup("fit")
        assert [len(split) for split in data.splits] == [4, 4, 4, 4]

    def test_other_numbers_of_channels_are_refused(self) -> None:
        with pytest.raises(ValueError, match="channels=4: 3 for colours, 1 for grey"):
            Folder("images", channels=4)

    def test_two_images_cannot_be_divided(self, tmp_path: Path) -> None:
        write_folder(tmp_path / "images", each=1)
        with pytest.raises(ValueError, match="images: 2 images; a split needs 3 or more"):
            Folder(str(tmp_path / "images")).setup("fit")

    def test_half_a_split_is_no_class(self, tmp_path: Path) -> None:
        write_folder(tmp_path / "train", 2)
        with pytest.raises(FileNotFoundError, match="it has train/<class>/ alone"):
            Folder(str(tmp_path)).setup("fit")

    @pytest.mark.parametrize(("made", "reason"), [("", "no such folder"), ("a", "no images")])
    def test_a_missing_one_is_told(self, made: str, reason: str, tmp_path: Path) -> None:
        folder = tmp_path / "images"
        if made:
            (folder / made).mkdir(parents=True)
        with pytest.raises(FileNotFoundError, match=rf"data.folder={folder}: .*{reason}"):
            Folder(str(folder)).setup("fit")


def written(kind: str, folder: Path, trainer: Any = None, **options: Any) -> Any:
    """A Folder, or Shards, of a few pictures that are written for it."""
    if kind == "folder":
        write_folder(folder / "images", each=10)
        data: Any = Folder(str(folder / "images"), **options)
    else:
        write_shards(folder / "shards", train=[2] * 8, val=[2])
        data = Shards(
            *(f"{folder}/shards/{split}-*.tar" for split in ("train", "val")), 1, **options
        )
    data.trainer = trainer
    data.setup("fit")
    return data


def transform_of(loader: Any) -> Any:
    return getattr(loader.dataset, "dataset", loader.dataset).transform  # of a Subset, or a Share


def seen(kind: str, folder: Path, trainer: Any) -> list[Tensor]:
    """What three epochs show of the same image in training, without loader processes."""
    torch.manual_seed(0)
    pixels = torch.randint(256, (3, 32, 32), dtype=torch.uint8)
    data = written(kind, folder, trainer, size=8, augment=True, num_workers=0)
    transform = transform_of(data.train_dataloader())
    return [transform(to_pil_image(pixels)) for _ in range(3)]


@pytest.mark.parametrize("kind", ["folder", "shards"])
def test_each_rank_augments_by_draws_of_its_own(kind: str, tmp_path: Path) -> None:
    images, draws = [], []
    for rank in (0, 1):
        images.append(seen(kind, tmp_path / str(rank), among(2, rank)))
        draws.append(torch.rand(1))
    assert not any(torch.equal(one, other) for one, other in zip(*images))
    assert not torch.equal(*images[0][:2])
    assert torch.equal(*draws)  # what samplers draw


@pytest.mark.parametrize("kind", ["folder", "shards"])
def test_a_single_rank_augments_by_the_draws_of_torch(kind: str, tmp_path: Path) -> None:
    images = seen(kind, tmp_path, among(1, 0))
    torch.manual_seed(0)
    pixels, transform = torch.randint(256, (3, 32, 32), dtype=torch.uint8), view(8, augment=True)
    assert all(torch.equal(one, transform(to_pil_image(pixels))) for one in images)


@pytest.mark.parametrize("kind", ["folder", "shards"])
def test_a_batch_to_learn_by_heart_stays_as_it_is(kind: str, tmp_path: Path) -> None:
    first, *others = seen(kind, tmp_path / "fit", among(1, 0))
    assert not any(torch.equal(first, other) for other in others)
    first, *others = seen(kind, tmp_path / "overfit", among(1, 0, overfit_batches=1))
    assert all(torch.equal(first, other) for other in others)


@pytest.mark.parametrize("kind", ["folder", "shards"])
@pytest.mark.parametrize("augment", [True, False])
def test_who_trains_on_parts_validates_on_the_middle(
    kind: str, augment: bool, tmp_path: Path
) -> None:
    data = written(kind, tmp_path, size=16, augment=augment, num_workers=0)
    image = to_pil_image(torch.arange(3072, dtype=torch.uint8).view(3, 32, 32))
    shown = transform_of(data.val_dataloader())(image)
    assert torch.equal(shown, view(16, whole=not augment)(image))


def set_up_with_other_files(folder: str, kind: str) -> tuple[str, str]:
    """The errors of one with the folders that rank 0 has, and of one with each rank's own."""
    trainer = Trainer(strategy=HorovodStrategy(), accelerator="cpu", logger=False)
    errors = []
    for rank in (0, trainer.global_rank):
        root = f"{folder}/{rank}"
        data: Any = Folder(root) if kind == "folder" else Shards(f"{root}/train-*", f"{root}/val-*")
        data.trainer = trainer
        try:
            data.setup("fit")
            errors.append("")
        except ValueError as error:
            errors.append(str(error))
    return errors[0], errors[1]


@pytest.mark.parametrize("kind", ["folder", "shards"])
def test_hosts_with_other_files_are_refused_on_all_ranks(
    kind: str, tmp_path: Path, launch: Callable[..., list[Any]]
) -> None:
    for rank in (0, 1):  # a folder each, as on two hosts
        if kind == "folder":
            write_folder(tmp_path / str(rank), each=10)
        else:
            write_shards(tmp_path / str(rank), train=[4, 4 - rank], val=[2])
    if kind == "folder":
        (tmp_path / "1" / "tower" / "3.png").rename(tmp_path / "1" / "tower" / "30.png")
    for shared, own in launch(set_up_with_other_files, 2, folder=str(tmp_path), kind=kind):
        assert shared == ""
        assert re.search(r"^data.*/[01].*: the files on .* are not those of rank 0 on ", own)


@pytest.mark.usefixtures("one_thread")  # as under torchrun
@pytest.mark.parametrize(
    ("launched", "devices", "count"),
    [
        ({}, 1, 4),
        ({}, 3, 2),
        ({"HOROVOD_LOCAL_SIZE": "2"}, 1, 3),
        ({"LOCAL_WORLD_SIZE": "8"}, 8, 1),
        ({"OMPI_COMM_WORLD_LOCAL_SIZE": "2"}, 1, 3),  # mpirun
    ],
)
def test_the_ranks_of_a_host_share_its_cores(
    launched: dict[str, str],
    devices: int,
    count: int,
    tmp_path: Path,
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    for name in ranks.LOCAL_RANKS:
        monkeypatch.delenv(name, raising=False)
    for name, value in launched.items():
        monkeypatch.setenv(name, value)
    monkeypatch.setattr(os, "sched_getaffinity", lambda _: set(range(6)))
    trainer = among(1, 0)
    trainer.num_devices = devices
    for kind in ("folder", "shards"):
        data = written(kind, tmp_path, trainer)
        assert data.train_dataloader().num_workers == count


@pytest.mark.parametrize("data", ["folder", "shards"])
def test_imagenet_is_augmented(data: str) -> None:
    with initialize_config_dir(str(CONF), version_base="1.3"):
        config = compose("config", ["experiment=imagenet_resnet50", f"data={data}"])
    assert make(config.data).hparams["augment"]

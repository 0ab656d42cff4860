"""A few small pictures in the files that data sets come in, for tests without a network."""

from __future__ import annotations

import io
import pickle
import tarfile
from itertools import islice
from pathlib import Path

import numpy as np
from PIL import Image

DRAWN = np.random.default_rng(0)


def write_all(data_dir: Path) -> None:
    """Everything that conf/data reads from data_dir and that tests cannot download."""
    write_mnist(data_dir / "MNIST" / "raw", train=48, test=12)
    write_cifar10(data_dir / "cifar-10-batches-py", each=12)
    write_folder(data_dir / "images", each=20)
    write_shards(data_dir / "shards", train=[9, 5, 3, 7], val=[3, 8])


def write_mnist(folder: Path, train: int, test: int) -> None:
    """IDX: a magic number, the lengths of the dimensions, big-endian, then bytes."""
    folder.mkdir(parents=True)
    for split, count in (("train", train), ("t10k", test)):
        for name, magic, shape in (
            ("images-idx3", 2051, (count, 28, 28)),
            ("labels-idx1", 2049, (count,)),
        ):
            values = DRAWN.integers(0, 256 if len(shape) > 1 else 10, shape, dtype=np.uint8)
            header = np.array([magic, *shape], dtype=">i4").tobytes()
            (folder / f"{split}-{name}-ubyte").write_bytes(header + values.tobytes())


def write_cifar10(folder: Path, each: int) -> None:
    """Six pickled dictionaries, keys in bytes, images as rows of 3 x 32 x 32 bytes."""
    folder.mkdir(parents=True)
    for name in [f"data_batch_{number}" for number in range(1, 6)] + ["test_batch"]:
        images = DRAWN.integers(0, 256, (each, 3072), dtype=np.uint8)
        labels = DRAWN.integers(0, 10, each).tolist()
        (folder / name).write_bytes(pickle.dumps({b"data": images, b"labels": labels}))


def write_folder(folder: Path, each: int) -> None:
    """Two classes, pictures of different sizes."""
    for name in ("bedroom", "tower"):
        (folder / name).mkdir(parents=True)
        for number in range(each):
            height, width = DRAWN.integers(20, 40, 2)
            pixels = DRAWN.integers(0, 256, (height, width, 3), dtype=np.uint8)
            Image.fromarray(pixels).save(folder / name / f"{number}.png")


def write_shards(folder: Path, **splits: list[int]) -> None:
    """train-0.tar, ..., with so many samples each: <key>.png and <key>.cls.

    All pixels of a picture and its label are its number in the split.
    """
    folder.mkdir(parents=True)
    for split, counts in splits.items():
        numbers = iter(range(sum(counts)))
        for shard, count in enumerate(counts):
            with tarfile.open(folder / f"{split}-{shard}.tar", "w") as files:
                for number in islice(numbers, count):
                    picture = io.BytesIO()
                    Image.new("RGB", (20, 24), (number,) * 3).save(picture, "png")
                    for suffix, content in (("png", picture.getvalue()), ("cls", b"%d" % number)):
                        member = tarfile.TarInfo(f"pictures/{number:04}.{suffix}")
                        member.size = len(content)
                        files.addfile(member, io.BytesIO(content))

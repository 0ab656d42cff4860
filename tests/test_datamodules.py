"""The data modules read what lies there, refuse what does not, and leave nothing half done."""

from __future__ import annotations

import errno
from itertools import chain
from pathlib import Path
from types import SimpleNamespace
from typing import IO, Any

import numpy as np
import pytest
import torch
from pytorch_lightning.plugins.precision import Precision
from torch.utils.data import RandomSampler, SequentialSampler

from datamodules.digits import Digits
from datamodules.fake import Fake
from datamodules.noise import Noise


def among(count: int, rank: int, overfit_batches: float = 0.0) -> Any:
    """A Trainer, as far as data modules ask, of so many ranks."""
    strategy = SimpleNamespace(
        broadcast=lambda it, src=0: it, reduce_boolean_decision=lambda decision: decision
    )
    return SimpleNamespace(
        world_size=count, global_rank=rank, num_devices=1, strategy=strategy, training=True,
        precision_plugin=Precision(), overfit_batches=overfit_batches,
    )  # fmt: skip


def assert_each_task_has_its_part(data: Any) -> None:
    """And training alone is shuffled."""
    data.prepare_data()
    data.setup("fit")
    loaders = [data.train_dataloader(), data.val_dataloader(), data.test_dataloader()]
    parts = list(map(id, data.splits))
    assert [parts.index(id(loader.dataset)) for loader in loaders] == [0, 1, 2]
    assert [type(loader.sampler) for loader in loaders] == [RandomSampler] + [SequentialSampler] * 2


def test_training_is_shuffled_and_each_task_has_its_part(tmp_path: Path) -> None:
    for data in (Digits(), Fake(), Noise(str(tmp_path), count=8, size=4)):
        assert_each_task_has_its_part(data)


def test_digits_are_from_0_to_1_and_split_by_the_seed() -> None:
    splits = []
    for seed in (0, 0, 1):
        data = Digits(split_seed=seed)
        data.setup("fit")
        splits.append([list(split.indices) for split in data.splits])
        images = torch.cat([images for images, _ in data.train_dataloader()])
        assert (float(images.min()), float(images.max())) == (0, 1)
    assert splits[0] == splits[1] != splits[2]
    assert [len(split) for split in splits[2]] == [1257, 180, 360]
    assert sorted(chain(*splits[2])) == list(range(1797))


def test_images_that_are_made_up_differ_and_stay(tmp_path: Path) -> None:
    first, second = (Fake(count=5, size=4) for _ in range(2))
    images = [
        torch.stack([image for split in fake.splits for image, _ in split])
        for fake in (first, second)
    ]
    assert [len(split) for split in first.splits] == [5, 8, 8]
    assert torch.equal(*images) and len(images[0].unique(dim=0)) == 21
    noises, cleans = [], []
    for seed in (1, 1, 2):
        data = Noise(str(tmp_path), count=5, size=4, seed=seed)
        data.prepare_data()
        data.setup("fit")
        cleans.append(torch.stack([pair[2] for split in data.splits for pair in split]))
        noises.append(torch.stack([pair[0] - pair[2] for split in data.splits for pair in split]))
    assert torch.equal(*cleans[:2]) and not torch.equal(*cleans[1:])
    assert (
        torch.equal(*noises[:2])
        and len(torch.cat(noises[1:]).round(decimals=5).unique(dim=0)) == 42
    )


def test_both_noises_of_a_pair_are_as_large_as_asked_and_independent(tmp_path: Path) -> None:
    data = Noise(str(tmp_path), count=8, size=32, sigma=0.25)
    data.prepare_data()
    data.setup("fit")
    noisy, target, clean = map(torch.stack, zip(*data.splits[0]))
    both = torch.stack([noisy - clean, target - clean]).flatten(1)
    assert both.std(dim=1).tolist() == pytest.approx([0.25, 0.25], abs=0.01)
    assert abs(float(torch.corrcoef(both)[0, 1])) < 0.05


def test_pictures_are_drawn_once_and_kept_when_they_are_whole(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    def full(file: IO[bytes], _: np.ndarray) -> None:
        file.write(b"half")
        raise OSError(errno.ENOSPC, "No space left on device")

    data = Noise(str(tmp_path), count=8, size=4)
    with monkeypatch.context() as patched, pytest.raises(OSError, match="No space left"):
        patched.setattr(np, "save", full)
        data.prepare_data()
    assert not list(tmp_path.iterdir())
    data.prepare_data()
    monkeypatch.setattr(data, "draw", lambda: pytest.fail("they are there"))
    data.prepare_data()
    assert list(tmp_path.iterdir()) == [data.file]

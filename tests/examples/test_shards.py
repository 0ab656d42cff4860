"""Shards: each rank and loader process has samples of its own, all have equally many batches."""

from __future__ import annotations

import errno
import io
import json
import os
import tarfile
import warnings
from collections.abc import Callable
from itertools import chain, pairwise
from pathlib import Path
from typing import Any

import pytest
import torch
from pytorch_lightning import LightningModule, Trainer
from pytorch_lightning.callbacks import ModelCheckpoint
from torch import Tensor, nn

from datamodules import tars
from datamodules.folder import view
from datamodules.shards import Shards
from datamodules.tars import Share, count_samples
from runs.config import check
from strategies import HorovodStrategy
from tests.pictures import write_shards
from tests.test_datamodules import among
from tests.test_template import folders, job

TRAIN, VAL = [9, 5, 3, 7, 6, 4, 8, 2], [3, 10]  # samples: 44 and 13


@pytest.fixture(scope="module")
def folder(tmp_path_factory: pytest.TempPathFactory) -> Path:
    path = tmp_path_factory.mktemp("data") / "shards"
    write_shards(path, train=TRAIN, val=VAL)
    return path


def batches(share: Share, workers: int, monkeypatch: pytest.MonkeyPatch) -> list[list[int]]:
    """The labels of each batch, as a loader with so many processes takes them, in turns."""

    class Info:
        def __init__(self, place: int) -> None:
            self.id, self.num_workers = place, workers

    parts = []
    for place in range(workers):
        monkeypatch.setattr(tars, "get_worker_info", lambda place=place: Info(place))
        chunks = [labels for _, labels in share]
        if share.buffer:
            chunks = [chunks[start : start + 3] for start in range(0, len(chunks), 3)]
        parts.append([[int(label) for label in batch] for batch in chunks])
    turns = range(max(map(len, parts)))
    return [part[turn] for turn in turns for part in parts if turn < len(part)]


@pytest.mark.parametrize(("ranks", "workers"), [(1, 1), (2, 1), (2, 2), (3, 2), (1, 3)])
class TestShare:
    def test_an_epoch_has_each_sample_at_most_once_and_even_batches(
        self, ranks: int, workers: int, folder: Path, monkeypatch: pytest.MonkeyPatch
    ) -> None:
        shards = count_samples("train", f"{folder}/train-*.tar")
        assert list(shards.values()) == TRAIN
        orders = []
        for epoch in (0, 1):
            labels: list[int] = []
            for rank in range(ranks):
                share = Share(shards, 3, ranks, rank, view(8), buffer=5, seed=1)
                share.epoch = epoch
                drawn = batches(share, workers, monkeypatch)
                assert [len(batch) for batch in drawn] == [3] * (44 // (3 * ranks))
                assert drawn == batches(share, workers, monkeypatch)
                labels += chain(*drawn)
                for trained in (1, 2, share.steps, share.steps + 3):  # a resumed epoch has the rest
                    share.trained = trained
                    rest = batches(share, workers, monkeypatch)
                    assert rest == drawn[trained:]
            assert len(set(labels)) == len(labels) == 44 - 44 % (3 * ranks) == share.samples
            orders.append(labels)
        assert orders[0] != orders[1] and orders[0] != sorted(orders[0])

    def test_evaluation_has_each_sample_once(
        self, ranks: int, workers: int, folder: Path, monkeypatch: pytest.MonkeyPatch
    ) -> None:
        shards = count_samples("val", f"{folder}/val-*.tar")
        for batch_size in (1, 2, 4, 50):
            shares = [Share(shards, batch_size, ranks, rank, view(8)) for rank in range(ranks)]
            drawn = [batches(share, workers, monkeypatch) for share in shares]
            assert len({len(rank) for rank in drawn}) == 1
            assert sorted(chain(*chain(*drawn))) == list(range(13))
            sizes = [len(batch) for rank in drawn for batch in rank]
            assert min(sizes) > 0 and max(sizes) <= max(2, batch_size)


def test_the_shards_come_in_another_order_each_epoch(folder: Path) -> None:
    share = Share(count_samples("train", f"{folder}/train-*.tar"), 4, 1, 0, view(8), buffer=1)
    first = [label for _, label in share]
    share.epoch = 1
    second = [label for _, label in share]
    assert set(first) == set(second) == set(range(44)) and first != second
    assert sum(after - before != 1 for before, after in pairwise(first)) <= len(TRAIN) - 1


def test_samples_are_shuffled_anew_by_each_seed_epoch_and_rank(tmp_path: Path) -> None:
    write_shards(tmp_path / "one", train=[20])
    shards, orders = count_samples("train", f"{tmp_path}/one/train-*.tar"), set()
    for seed, epoch, rank in ((0, 0, 0), (1, 0, 0), (0, 1, 0), (0, 0, 1)):
        share = Share(shards, 5, 2, rank, view(8), buffer=10, seed=seed)
        share.epoch = epoch
        labels = [label - 10 * rank for _, label in share]
        assert sorted(labels) == list(range(10))
        orders.add(tuple(labels))
    assert len(orders) == 4
    assert max(first for first, *_ in orders) > 1  # the buffer is full before the first one


@pytest.mark.parametrize(
    ("changed", "held"), [("png", b"no image"), ("png", None), ("cls", b"bedroom")]
)
def test_a_broken_sample_is_named(changed: str, held: bytes | None, folder: Path) -> None:
    share = Share(count_samples("val", f"{folder}/val-*.tar"), 1, 1, 0, view(8))
    sample = next(share._read(4, 5))
    sample[changed] = sample[changed][:-40] if held is None else held
    with pytest.raises(RuntimeError, match=r"val-1.tar: pictures/0004 cannot be read: ") as error:
        share._decode(sample)
    assert error.value.__cause__ is not None


def test_hidden_files_are_no_samples_and_a_name_that_is_there_twice_is_told(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """As macOS writes the one, and tar -r leaves the other."""

    def write(*names: str) -> Share:
        with tarfile.open(tmp_path / "val-0.tar", "w") as files:
            for name in names:
                member = tarfile.TarInfo(f"t/{name}")
                member.size = 1
                files.addfile(member, io.BytesIO(b"7"))
        return Share(count_samples("val", "~/val-*.tar"), 1, 1, 0, view(8))

    monkeypatch.setenv("HOME", str(tmp_path))
    share = write("._1.png", "1.png", "._1.cls", "1.cls", "2.png", "2.cls")
    read = [{*sample} for sample in share._read(0, 2)]
    assert share.samples == 2 and all({"png", "cls"} <= names for names in read)
    with pytest.raises(RuntimeError, match=r"val-0.tar cannot be read: .*duplicate file name"):
        [*write("1.png", "1.png", "1.cls")._read(0, 1)]


class Seen(LightningModule):
    """Keeps the epoch and the labels of each batch."""

    def __init__(self) -> None:
        super().__init__()
        self.layer = nn.Linear(1, 1)
        self.trained: list[tuple[int, list[int]]] = []
        self.tested: list[int] = []

    def training_step(self, batch: list[Tensor], batch_idx: int) -> Tensor:
        self.trained.append((self.current_epoch, batch[1].tolist()))
        return self.layer(batch[1].float().unsqueeze(1)).mean()

    def validation_step(self, batch: list[Tensor], batch_idx: int) -> None:
        self.log("val/loss", batch[1].float().mean(), sync_dist=True)

    def test_step(self, batch: list[Tensor], batch_idx: int) -> None:
        self.tested += batch[1].tolist()

    def configure_optimizers(self) -> torch.optim.Optimizer:
        return torch.optim.SGD(self.parameters(), lr=0.0)


def fit(folder: Path, data: Shards, checkpoint: str = "", **options: Any) -> Seen:
    """Two epochs by Lightning alone; those from a checkpoint on."""
    model = Seen()
    trainer = Trainer(
        accelerator="cpu", max_epochs=2, logger=False, enable_progress_bar=False,
        enable_model_summary=False, num_sanity_val_steps=0, limit_val_batches=0,
        enable_checkpointing=not checkpoint, default_root_dir=folder, **options,
    )  # fmt: skip
    trainer.fit(model, data, ckpt_path=folder / checkpoint if checkpoint else None)
    return model


def shards(folder: Path, batch_size: int) -> Shards:
    train, val = (f"{folder}/{split}-*.tar" for split in ("train", "val"))
    return Shards(train, val, batch_size, size=8, buffer=5, num_workers=0)


@pytest.fixture(scope="module")
def checkpoints(folder: Path, tmp_path_factory: pytest.TempPathFactory) -> Path:
    """Of each of 14 steps of 3 samples, and of the end of each epoch."""
    path = tmp_path_factory.mktemp("checkpoints")
    steps = ModelCheckpoint(path, filename="{step}", save_top_k=-1, every_n_train_steps=1)
    ends = ModelCheckpoint(path, filename="end{epoch}", save_top_k=-1, every_n_epochs=1)
    fit(path, shards(folder, 3), callbacks=[steps, ends])
    return path


class TestGoingOn:
    @pytest.mark.parametrize(
        ("checkpoint", "batch_size", "rest"),
        [
            ("step=4", 3, 10),
            ("step=4", 6, 7 - 2),  # 12 samples are 2 batches of 6
            ("step=4", 2, 22 - 6),
            ("step=10", 6, 7 - 5),  # where Lightning, with 10 batches of 7, took it for ended
            ("step=9", 6, 7 - 5),  # 27 samples: rounded up
            ("step=13", 20, 1),  # 39 samples are 2 batches of 20: the last is trained
            ("step=14", 6, 0),
            ("endepoch=0", 6, 0),
            ("endepoch=0", 2, 0),
        ],
    )
    def test_as_many_samples_are_left_with_another_batch_size(
        self, checkpoint: str, batch_size: int, rest: int, folder: Path, checkpoints: Path
    ) -> None:
        model = fit(checkpoints, shards(folder, batch_size), f"{checkpoint}.ckpt")
        epochs = [epoch for epoch, _ in model.trained]
        assert [epochs.count(epoch) for epoch in (0, 1)] == [rest, 44 // batch_size]

    def test_a_batch_to_learn_by_heart_comes_in_each_epoch(
        self, tmp_path: Path, folder: Path
    ) -> None:
        model = fit(tmp_path, shards(folder, 3), overfit_batches=1)
        assert model.trained == [(epoch, model.trained[0][1]) for epoch in (0, 1)]

    def test_other_shards_are_told(self, tmp_path: Path, folder: Path, checkpoints: Path) -> None:
        write_shards(tmp_path / "more", train=[*TRAIN, 6], val=VAL)
        with pytest.warns(UserWarning, match="of 8 with 44 samples, these are 9 with 50"):
            fit(checkpoints, shards(tmp_path / "more", 3), "endepoch=0.ckpt")
        with warnings.catch_warnings(record=True) as caught:
            fit(checkpoints, shards(folder, 3), "endepoch=0.ckpt")
        assert not any("other shards" in str(warning.message) for warning in caught)


class TestIndex:
    def test_a_shard_is_counted_once_and_again_when_it_changes(
        self, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
    ) -> None:
        write_shards(tmp_path / "a", train=[4, 2])
        pattern = f"{tmp_path}/a/train-*.tar"
        assert list(count_samples("train", pattern).values()) == [4, 2]
        assert sorted(file.name for file in (tmp_path / "a").iterdir())[0] == "sample_counts.json"
        counted = []
        count = tars._count
        monkeypatch.setattr(tars, "_count", lambda shard: counted.append(shard) or count(shard))
        write_shards(tmp_path / "b", train=[40])
        (tmp_path / "b" / "train-0.tar").rename(tmp_path / "a" / "train-0.tar")
        assert list(count_samples("train", pattern).values()) == [40, 2]
        assert [shard.name for shard in counted] == ["train-0.tar"]
        size = (tmp_path / "a" / "train-1.tar").stat().st_size
        write_shards(tmp_path / "c", train=[3])
        (tmp_path / "c" / "train-0.tar").rename(tmp_path / "a" / "train-1.tar")
        assert (tmp_path / "a" / "train-1.tar").stat().st_size == size  # 10 KiB hold both
        assert list(count_samples("train", pattern).values()) == [40, 3]

    @pytest.mark.parametrize("content", ["[1, 2]", "3", '{"train-0.tar'])
    def test_files_that_are_something_else_are_left_or_replaced(
        self, content: str, tmp_path: Path
    ) -> None:
        """index.json is that of webdataset's wids."""
        write_shards(tmp_path / "a", train=[4, 2])
        for name in ("index.json", "sample_counts.json"):
            (tmp_path / "a" / name).write_text(content)
        assert list(count_samples("train", f"{tmp_path}/a/train-*.tar").values()) == [4, 2]
        assert (tmp_path / "a" / "index.json").read_text() == content
        assert "train-0.tar" in json.loads((tmp_path / "a" / "sample_counts.json").read_text())

    def test_where_it_cannot_be_written_counting_goes_on(
        self, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
    ) -> None:
        def fail(file: Path, name: Path) -> None:
            raise OSError(errno.ENOSPC, "No space left on device", str(file))

        write_shards(tmp_path / "a", train=[4, 2])
        monkeypatch.setattr(Path, "rename", fail)
        with pytest.warns(
            UserWarning, match=r"sample_counts.json cannot be written there \(No space left"
        ):
            counts = count_samples("train", f"{tmp_path}/a/train-*.tar")
        assert list(counts.values()) == [4, 2]
        assert sorted(file.name for file in (tmp_path / "a").iterdir()) == [
            "train-0.tar", "train-1.tar",
        ]  # fmt: skip

    def test_fewer_samples_than_it_says_are_an_error_not_a_wait(self, folder: Path) -> None:
        shards = dict.fromkeys(count_samples("val", f"{folder}/val-*.tar"), 11)
        with pytest.raises(RuntimeError, match="fewer than the 11 samples"):
            list(Share(shards, 2, 1, 0, view(8)))

    def test_a_file_that_is_no_tar_is_refused(self, tmp_path: Path) -> None:
        (tmp_path / "train-0.tar").write_bytes(b"no tar" * 200)
        with pytest.raises(ValueError, match="train-0.tar: it is no uncompressed tar file"):
            count_samples("train", f"{tmp_path}/*.tar")

    @pytest.mark.parametrize("left", [512 * 2 + 200, 512 * 4, 512 * 4 + 200])
    def test_a_file_that_is_cut_off_is_refused(self, tmp_path: Path, left: int) -> None:
        """Within a header or before one too, which tarfile takes for the end."""
        write_shards(tmp_path / "shards", train=[6])
        (shard,) = (tmp_path / "shards").glob("*.tar")
        shard.write_bytes(shard.read_bytes()[:left])
        with pytest.raises(ValueError, match="train-0.tar: it is no uncompressed tar file"):
            count_samples("train", str(shard))


class TestRefused:
    def test_no_shards(self, tmp_path: Path) -> None:
        with pytest.raises(FileNotFoundError, match=r"data.train=.*/none-\*.tar: .* no shards"):
            Shards(f"{tmp_path}/none-*.tar", f"{tmp_path}/none-*.tar").prepare_data()

    @pytest.mark.parametrize(
        ("options", "reason"),
        [
            ({"num_workers": 9}, "8 shards for 1 ranks x 9 loader processes"),
            ({"num_workers": 1, "batch_size": 45}, "44 samples for 1 ranks x 45"),
        ],
    )
    def test_too_few(self, options: dict[str, Any], reason: str, folder: Path) -> None:
        data = Shards(f"{folder}/train-*.tar", f"{folder}/val-*.tar", **options)
        data.setup("fit")
        with pytest.raises(ValueError, match=reason):
            data.train_dataloader()

    def test_of_16_ranks_with_as_many_cores_as_they_like(
        self, folder: Path, monkeypatch: pytest.MonkeyPatch
    ) -> None:
        """A loader process has a shard of its own, and a rank a sample to validate."""
        monkeypatch.setattr(os, "sched_getaffinity", lambda _: set(range(64)))
        data = Shards(f"{folder}/train-*.tar", f"{folder}/val-*.tar", batch_size=2)
        data.setup("fit")
        data.trainer = among(4, 0)
        assert data.train_dataloader().num_workers == 2  # of 8 shards
        data.trainer = among(16, 0)
        with pytest.raises(ValueError, match="fewer samples than 16 ranks"):
            data.val_dataloader()


# ------------------------------------------------------------------- two ranks


def train_on_shards(folder: str) -> dict[str, Any]:
    """Two epochs; the same from a checkpoint in the middle of the first, and from its end."""

    def run(**options: Any) -> Trainer:
        return Trainer(
            strategy=HorovodStrategy(), accelerator="cpu", max_epochs=2, logger=False,
            enable_progress_bar=False, enable_model_summary=False, num_sanity_val_steps=0,
            default_root_dir=folder, **options,
        )  # fmt: skip

    def data(workers: int = 2, batch_size: int = 3) -> Shards:
        train, val = (f"{folder}/shards/{split}-*.tar" for split in ("train", "val"))
        return Shards(train, val, batch_size, size=8, buffer=5, num_workers=workers)

    def keep(name: str, **when: Any) -> ModelCheckpoint:
        return ModelCheckpoint(folder, filename=name, save_top_k=-1, **when)

    steps = [keep("{step}", every_n_train_steps=3), keep("end{epoch}", every_n_epochs=1)]
    whole, trainer = Seen(), run(callbacks=steps)
    trainer.fit(whole, data())
    trainer.test(whole, data(), verbose=False)
    results: dict[str, Any] = {"whole": whole.trained, "tested": whole.tested}
    for name in ("step=3", "endepoch=0"):
        model = Seen()
        run(enable_checkpointing=False).fit(model, data(), ckpt_path=f"{folder}/{name}.ckpt")
        results[name] = model.trained
    other = Seen()
    with warnings.catch_warnings(record=True) as caught:
        run(enable_checkpointing=False).fit(other, data(1), ckpt_path=f"{folder}/step=3.ckpt")
    results["other"] = other.trained
    results["told"] = [str(warning.message) for warning in caught]
    for batch_size in (1, 6):
        model = Seen()
        again = data(batch_size=batch_size)
        run(enable_checkpointing=False).fit(model, again, ckpt_path=f"{folder}/step=3.ckpt")
        results[batch_size] = [epoch for epoch, _ in model.trained]
    return results


def test_two_ranks_share_an_epoch_and_go_on_in_it(
    tmp_path: Path, launch_anew: Callable[..., list[Any]]
) -> None:
    """On ranks of its own, as in use: it forks workers over and over."""
    write_shards(tmp_path / "shards", train=TRAIN, val=VAL)
    first, second = launch_anew(train_on_shards, 2, folder=str(tmp_path))
    for epoch in (0, 1):
        shares = [[b for e, b in rank["whole"] if e == epoch] for rank in (first, second)]
        assert [len(batch) for rank in shares for batch in rank] == [3] * 14
        labels = list(chain(*shares[0], *shares[1]))
        assert len(set(labels)) == len(labels) == 42
    assert sorted(first["tested"] + second["tested"]) == list(range(13))
    for rank in (first, second):
        assert rank["whole"][:7] != rank["whole"][7:]
        assert rank["step=3"] == rank["whole"][3:]
        assert rank["endepoch=0"] == rank["whole"][7:]
        # With another number of loader processes: the same number of batches, and it says so.
        assert [epoch for epoch, _ in rank["other"]] == [0] * 4 + [1] * 7
        assert any("drawn anew" in text for text in rank["told"])
        # With another batch size: of 22 or 3 batches those that 18 samples leave.
        assert rank[1] == [0] * (22 - 9) + [1] * 22
        assert rank[6] == [0] * (3 - 2) + [1] * 3


def test_missing_ones_are_told_in_one_line_though_the_other_rank_waits(tmp_path: Path) -> None:
    """Rank 0 looks for them; the other is in a collective meanwhile."""
    done = job(2, tmp_path / "logs", "data=shards", f"data_dir={tmp_path}")
    assert done.returncode != 0 and done.stdout.count("there are no shards") == 1, done.stdout
    assert "another rank ended" not in done.stdout and not folders(tmp_path / "logs")


def test_a_pattern_that_looks_like_a_number_is_text() -> None:
    check(["data=shards", "data.train='1'"])

"""What ranks draw: each for itself in its steps, all alike outside of them."""

from __future__ import annotations

import os
import random
import time
from collections import defaultdict
from collections.abc import Callable
from pathlib import Path
from typing import Any

import horovod.torch as hvd
import numpy as np
import pytest
import pytorch_lightning as pl
import torch
from lightning_fabric.utilities.distributed import DistributedSamplerWrapper
from pytorch_lightning.callbacks import ModelCheckpoint
from torch import Tensor, nn
from torch.utils.data import DataLoader, RandomSampler, Sampler, WeightedRandomSampler

from benchmarks.losses_worker import single_in_order
from strategies.randomness import OwnDraws
from strategies.samplers import seed_order
from tests.matrix.trainings import FEATURES, RANK, Net, samples, trainer


def test_parts_of_a_model_on_other_gpus_draw_for_their_rank_too(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    """seed_everything has given all generators of a host's GPUs the same seed on all ranks."""
    seeds: list[int] = []
    monkeypatch.setattr(torch.cuda, "manual_seed_all", seeds.append)
    for rank in range(2):
        torch.default_generator.manual_seed(0)
        OwnDraws(rank, torch.device("cuda", rank))
    assert len(set(seeds)) == 2


class Prepared(pl.LightningDataModule):
    """Files that rank 0 of the host takes a second to make, and batches that workers draw."""

    def __init__(self, folder: str) -> None:
        super().__init__()
        self.folder = Path(folder)

    def prepare_data(self) -> None:
        time.sleep(1)
        (self.folder / str(hvd.rank())).touch()

    def setup(self, stage: str) -> None:
        self.seen = sorted(path.name for path in self.folder.iterdir())

    def train_dataloader(self) -> DataLoader:
        return DataLoader(Random(), batch_size=2, num_workers=1)


class Random(torch.utils.data.Dataset):
    def __len__(self) -> int:
        return 8

    def __getitem__(self, index: int) -> Tensor:
        return torch.rand(FEATURES)


class Keeps(pl.LightningModule):
    def __init__(self) -> None:
        super().__init__()
        self.net = nn.Linear(FEATURES, 1)
        self.drawn: list[Tensor] = []

    def training_step(self, batch: Tensor, batch_idx: int) -> Tensor:
        self.drawn.append(batch)
        return self.net(batch).mean()

    def configure_optimizers(self) -> Any:
        return torch.optim.SGD(self.parameters(), lr=0.1)


def use_data(folder: str) -> dict[str, Any]:
    run = trainer("horovod", max_epochs=1)
    pl.seed_everything(3, workers=True)
    data, model = Prepared(folder), Keeps()
    run.fit(model, data)
    return {"seen": data.seen, "drawn": torch.cat(model.drawn)}


def test_data_is_prepared_once_and_workers_draw_apart(launch: Callable, tmp_path: Path) -> None:
    (tmp_path / "data").mkdir()
    first, second = launch(use_data, 2, folder=str(tmp_path / "data"))
    assert first["seen"] == second["seen"] == ["0"]
    assert first["drawn"].shape == second["drawn"].shape == (4, FEATURES)
    assert not torch.equal(first["drawn"], second["drawn"])


class DrawsAll(torch.utils.data.Dataset):
    def __len__(self) -> int:
        return 8

    def __getitem__(self, index: int) -> Tensor:
        drawn = torch.tensor([np.random.rand(), random.random()])
        return torch.cat([drawn, torch.rand(FEATURES - 2)])


def go_on_drawing(folder: str, workers: int) -> tuple[Tensor, Tensor]:
    """What data sets drew in two epochs, and in those that a new process goes on with."""
    keep = ModelCheckpoint(folder, "last", save_on_train_epoch_end=True)
    drawn, path = [], None
    for epochs in (2, 4):
        pl.seed_everything(7, workers=True)
        run = trainer("horovod", max_epochs=epochs, callbacks=[keep], enable_checkpointing=True)
        model = Keeps()
        run.fit(model, DataLoader(DrawsAll(), 2, num_workers=workers), ckpt_path=path)
        drawn.append(torch.cat(model.drawn))
        path = f"{folder}/last.ckpt"
    del os.environ["PL_GLOBAL_SEED"], os.environ["PL_SEED_WORKERS"]  # for other tests
    return drawn[0], drawn[1]


@pytest.mark.parametrize("workers", [0, 1])
def test_data_draw_other_numbers_after_a_resume(
    launch: Callable, tmp_path: Path, workers: int
) -> None:
    """Each of torch, NumPy and Python; without workers ranks draw alike, as before."""
    ranks = launch(go_on_drawing, 2, folder=str(tmp_path), workers=workers)
    for first, then in ranks:
        assert first.shape == then.shape == (8, FEATURES)
        assert not set(first.flatten().tolist()) & set(then.flatten().tolist())
    assert torch.equal(ranks[0][1], ranks[1][1]) == (workers == 0)


class Noisy(Net):
    """Keeps what its steps drew, what was drawn outside of them, and the labels it saw."""

    def __init__(self) -> None:
        super().__init__()
        self.drawn: dict[str, list[Tensor]] = defaultdict(list)

    def draw(self, where: str) -> None:
        self.drawn[where].append(torch.rand(1))

    def on_after_batch_transfer(self, batch: Any, dataloader_idx: int) -> Any:
        self.draw("transfer")
        return batch

    def training_step(self, batch: list[Tensor], batch_idx: int) -> Tensor:
        self.draw("train")
        self.drawn["alike"].append(torch.tensor([np.random.rand(), random.random()]))
        self.drawn["seen"].append(batch[0][:, 0])
        return super().training_step(batch, batch_idx)

    def validation_step(self, batch: list[Tensor], batch_idx: int) -> None:
        self.draw("val")

    def on_train_batch_end(self, *_: Any) -> None:
        self.draw("outside")


def draw_in_steps(strategy: str, folder: str) -> list[dict[str, list[float]]]:
    """In a first epoch, and in a second one of another Trainer, which goes on."""
    draws, path = [], None
    for epochs in (1, 2):
        model = Noisy()  # seeds torch by its rank
        torch.manual_seed(3), np.random.seed(3), random.seed(3)
        run = trainer(strategy, max_epochs=epochs, num_sanity_val_steps=0)
        run.fit(
            model, DataLoader(samples(16), 2), DataLoader(samples(7), batch_size=1), ckpt_path=path
        )
        path = f"{folder}/one.ckpt"
        run.save_checkpoint(path)
        draws.append({where: torch.cat(drawn).tolist() for where, drawn in model.drawn.items()})
    return draws


def test_each_rank_draws_for_itself_in_its_steps(launch: Callable, tmp_path: Path) -> None:
    """But not outside of them, also where ranks have unequally many batches to evaluate; nor from
    NumPy's and Python's generators."""
    ranks = launch(draw_in_steps, 2, strategy="horovod", folder=str(tmp_path))
    first, second = (rank[0] for rank in ranks)
    assert len(first["val"]) - len(second["val"]) == 1
    for where in ("transfer", "train", "val"):
        drawn = first[where] + second[where] + ranks[0][1][where] + ranks[1][1][where]
        assert len(set(drawn)) == len(drawn) > 12
    for epoch, other in zip(*ranks):
        assert epoch["outside"] == other["outside"] and epoch["alike"] == other["alike"]
        assert len(set(epoch["outside"])) == 4
        assert len(set(epoch["seen"] + other["seen"])) == 16


def test_draws_begin_elsewhere_each_time_and_move_nothing() -> None:
    torch.manual_seed(3)
    before, drawn = torch.get_rng_state(), []
    for _ in range(2):
        draws = OwnDraws(0, torch.device("cpu"))
        assert torch.equal(torch.get_rng_state(), before)
        with draws():
            drawn.append(float(torch.rand(1)))
    torch.rand(1)  # as a loader does
    with OwnDraws(0, torch.device("cpu"))():
        assert drawn == [drawn[0]] * 2 and float(torch.rand(1)) != drawn[0]


class OfTorchdata(RandomSampler):
    """As torchdata's RandomSampler: with a generator of its own, which no seed reaches."""

    def __init__(self, data: list[int]) -> None:
        super().__init__(data, generator=torch.Generator())


OfTorchdata.__module__ = "torchdata.stateful_dataloader.sampler"


def test_a_stateful_loader_has_the_same_order_when_its_epoch_is_gone_on_with() -> None:
    sampler = DistributedSamplerWrapper(OfTorchdata([*range(16)]), num_replicas=1, rank=0, seed=3)
    seed_order(DataLoader([*range(16)], sampler=sampler))
    first = [*sampler]
    assert [*sampler] == first and sorted(first) == [*range(16)]
    sampler.set_epoch(1)
    assert [*sampler] != first


class DrawsItsBatches(Net):
    """Asks the loader for its batches, whose sampler draws in the step then."""

    def __init__(self) -> None:
        super().__init__()
        self.seen: list[Tensor] = []

    def training_step(self, dataloader_iter: Any) -> Tensor:
        batch, _, _ = next(dataloader_iter)
        self.seen.append(batch[0][:, 0])
        return nn.functional.cross_entropy(self(batch[0]), batch[1])


class Deals(Sampler[list[int]]):
    """Draws batches for all ranks, and keeps its own."""

    def __iter__(self) -> Any:
        yield from torch.randperm(16).view(-1, 2)[hvd.rank() :: hvd.size()].tolist()

    def __len__(self) -> int:
        return 8 // hvd.size()


def train_on_an_iterator() -> list[float]:
    model = DrawsItsBatches()  # seeds torch by its rank
    torch.manual_seed(3)
    drawing = DataLoader(samples(16), batch_sampler=Deals())
    trainer("horovod", max_epochs=1, use_distributed_sampler=False).fit(model, drawing)
    return torch.cat(model.seen).tolist()


def test_a_step_that_asks_for_its_batches_draws_them_as_all_do(launch: Callable) -> None:
    first, second = launch(train_on_an_iterator, 2)
    assert sorted(first + second) == sorted(samples(16).tensors[0][:, 0].tolist())


class DrawsOnItsOwn(Noisy):
    """Rank 0 draws between epochs, as for a picture that it logs."""

    def on_train_epoch_end(self) -> None:
        if RANK == 0:
            torch.rand(1), np.random.rand(), random.random()


class AtRandom(Sampler[int]):
    """Draws with Python's and NumPy's generators."""

    def __len__(self) -> int:
        return 16

    def __iter__(self) -> Any:
        order = np.random.permutation(16).tolist()
        random.shuffle(order)
        return iter(order)


def train_with_samplers_of_ones_own(strategy: str) -> list[list[float]]:
    """For each, the samples of three epochs."""
    seen: list[list[float]] = []
    pl.seed_everything(3, verbose=False)
    at_random = WeightedRandomSampler([1.0] * 16, 16, replacement=False), AtRandom()
    for sampler in (*at_random, range(15, -1, -1)):
        model = DrawsOnItsOwn()
        run = trainer(single_in_order("cpu") if strategy == "single" else strategy, max_epochs=3)
        run.fit(model, DataLoader(samples(16), 4 // run.world_size, sampler=sampler))
        seen.append(torch.cat(model.drawn["seen"]).tolist())
    del os.environ["PL_GLOBAL_SEED"]  # other tests run on these ranks too
    return seen


def test_samplers_of_ones_own_draw_alike_where_ranks_have_gone_apart(
    launch: Callable, launch_anew: Callable
) -> None:
    """And in the global batches that DDP and the one process of make bench-losses have."""
    expected = sorted(samples(16).tensors[0][:, 0].tolist())
    (alone,) = launch(train_with_samplers_of_ones_own, 1, strategy="single")
    for strategy, start in (("horovod", launch), ("ddp", launch_anew)):
        first, second = start(train_with_samplers_of_ones_own, 2, strategy=strategy)
        for whole, mine, other in zip(alone, first, second, strict=True):
            assert whole[::2] == mine and whole[1::2] == other
            epochs = [whole[16 * epoch : 16 * epoch + 16] for epoch in range(3)]
            assert all(sorted(epoch) == expected for epoch in epochs)
            in_order = epochs[0] == samples(16).tensors[0][:, 0].flip(0).tolist()
            assert len({tuple(epoch) for epoch in epochs}) == (1 if in_order else 3)
        assert in_order


def train_seeded_by_rank() -> list[list[float]]:
    """The samples of two epochs."""
    run, model = trainer("horovod", max_epochs=2), Noisy()
    pl.seed_everything(3 + hvd.rank())
    run.fit(model, DataLoader(samples(16), 2, shuffle=True))
    del os.environ["PL_GLOBAL_SEED"]  # other tests run on these ranks too
    seen = model.drawn["seen"]
    return [torch.cat(epoch).tolist() for epoch in (seen[:4], seen[4:])]


def test_ranks_that_were_seeded_apart_have_shares_of_one_order(launch: Callable) -> None:
    first, second = launch(train_seeded_by_rank, 2)
    for one, other in zip(first, second):
        assert sorted(one + other) == sorted(samples(16).tensors[0][:, 0].tolist())
    assert first[0] != first[1]


def test_one_process_draws_as_without_horovod(launch: Callable, tmp_path: Path) -> None:
    (ours,), (single,) = (
        launch(draw_in_steps, 1, strategy=strategy, folder=str(tmp_path))
        for strategy in ("horovod", "single")
    )
    for where in ("transfer", "train", "val", "outside"):
        assert ours[0][where] == single[0][where]

"""HorovodStrategy under real horovodrun: what is not a number to compare (see test_matrix.py)."""

from __future__ import annotations

import math
import os
import re
import sys
import time
import warnings
from collections import defaultdict
from collections.abc import Callable
from concurrent.futures import ThreadPoolExecutor
from pathlib import Path
from types import SimpleNamespace
from typing import Any

import horovod.torch as hvd
import pytest
import pytorch_lightning as pl
import torch
from pytorch_lightning.accelerators import CPUAccelerator
from pytorch_lightning.callbacks import EMAWeightAveraging, ModelCheckpoint
from pytorch_lightning.plugins.environments import LightningEnvironment
from pytorch_lightning.strategies import SingleDeviceStrategy
from pytorch_lightning.utilities.combined_loader import CombinedLoader
from pytorch_lightning.utilities.exceptions import MisconfigurationException
from torch import Tensor, nn
from torch.utils.checkpoint import checkpoint
from torch.utils.data import (
    BatchSampler,
    DataLoader,
    Dataset,
    DistributedSampler,
    Sampler,
    SubsetRandomSampler,
    TensorDataset,
    WeightedRandomSampler,
)
from torchmetrics import MaxMetric, MeanMetric, SumMetric

from strategies import HorovodStrategy, buckets, ddp
from strategies.buckets import GradientBuckets
from strategies.collectives import longest_pause, on_own_gpu, wait_until
from strategies.metrics import synchronize_metrics
from strategies.randomness import OwnDraws
from strategies.reductions import adasum
from strategies.samplers import batches_of_all, drawn_anew
from tests.conftest import run
from tests.matrix import (
    CLASSES,
    FEATURES,
    GLOBAL_BATCH,
    RANK,
    SIZE,
    Counting,
    Measured,
    Net,
    Remembers,
    convolutions,
    everyones,
    loader,
    results,
    samples,
    trainer,
)
from tests.test_matrix import assert_same


class Evaluated(Net):
    def validation_step(self, batch: list[Tensor], batch_idx: int) -> None:
        loss = nn.functional.cross_entropy(self(batch[0]), batch[1])
        self.log("val_loss", loss, sync_dist=True)


def train_with_running_means(averaged: bool) -> dict[str, Any]:
    run = trainer("horovod", callbacks=[EMAWeightAveraging()] if averaged else [])
    model = Evaluated(convolutions(normalization=True))
    kept: list[Tensor] = []

    def keep(layer: Any, *_: Any) -> None:
        if not layer.training:
            kept.append(layer.running_mean.clone())

    model.net[2].register_forward_hook(keep)
    begins: list[Tensor] = []
    model.on_validation_epoch_start = lambda: begins.append(model.net[2].running_mean.clone())
    run.fit(model, loader(), DataLoader(samples(16), batch_size=8))
    loss = float(run.callback_metrics["val_loss"])
    return {"running": kept, "begins": begins, "loss": loss}


@pytest.mark.parametrize("averaged", [False, True])
def test_running_means_of_rank_0_are_evaluated(launch: Callable, averaged: bool) -> None:
    """Also those that a callback puts in their place for the time of an evaluation."""
    first, second = launch(train_with_running_means, 2, averaged=averaged)
    assert len(first["running"]) == 3  # the first is the sanity check
    assert first["running"][1].abs().sum() > 0
    for where in ("running",) if averaged else ("running", "begins"):
        for mine, other in zip(first[where], second[where], strict=True):
            assert torch.equal(mine, other)


def collectives() -> dict[str, Any]:
    """The strategy's collectives, under inference mode too, with ragged and empty tensors."""
    strategy = HorovodStrategy()
    rank = hvd.rank()
    with torch.inference_mode():
        inference = torch.tensor([1.0, 5.0]) * (rank + 1)
        gathered = strategy.all_gather(inference)
        reduced = {op: strategy.reduce(inference, reduce_op=op) for op in ("mean", "sum", "max")}
    odd = {
        str(dtype): strategy.all_gather(torch.tensor(rank, dtype=dtype))
        for dtype in (torch.bool, torch.bfloat16, torch.int16, torch.float64, torch.uint16,
                      torch.uint32, torch.uint64, torch.float8_e4m3fn, torch.float8_e5m2)
    }  # fmt: skip
    mine = torch.arange(20.0).half() * (rank + 1)
    with pytest.MonkeyPatch.context() as patch:
        patch.setattr("strategies.collectives.MOST_BYTES", 7)
        strategy.world.broadcast([mine], root=1)
        pieces = strategy.broadcast({"mine": mine, "of": f"rank {rank}"}, src=1)
    gradient = torch.ones(2, requires_grad=True)
    (strategy.all_gather(gradient * (rank + 1), sync_grads=True) ** 2).sum().backward()
    strided = torch.ones(2, 3, requires_grad=True)  # whose gradient comes back transposed
    weights = torch.arange(12.0).reshape(2, 2, 3)
    gathered_strided = strategy.all_gather(strided, sync_grads=True)
    (gathered_strided.transpose(0, 1) * weights).sum().backward()
    return {
        "gathered": gathered, "reduced": reduced, "odd": odd, "inference": inference,
        "ragged": strategy.world.gather(torch.full((rank, 2), rank)),
        "empty": [tuple(each.shape) for each in strategy.world.gather(torch.zeros(0, rank + 3))],
        "integer": strategy.reduce(torch.tensor(rank * 3), reduce_op="mean"),
        "broadcast": strategy.broadcast({"from": rank}, src=1),
        "all": strategy.reduce_boolean_decision(rank == 0, all=True),
        "any": strategy.reduce_boolean_decision(rank == 0, all=False),
        "transposed": strategy.reduce(torch.arange(6.0).reshape(2, 3).T, reduce_op="sum"),
        "gradient": gradient.grad, "ranks": [strategy.local_rank, strategy.node_rank],
        "pieces": pieces, "strided": strided.grad,
    }  # fmt: skip


def test_collectives(launch: Callable) -> None:
    ranks = launch(collectives, 2)
    for index, rank in enumerate(ranks):
        assert rank["gathered"].tolist() == [[1, 5], [2, 10]]
        assert rank["inference"].tolist() == [1.0 * (index + 1), 5.0 * (index + 1)]
        reduced = {op: value.tolist() for op, value in rank["reduced"].items()}
        assert reduced == {"mean": [1.5, 7.5], "sum": [3, 15], "max": [2, 10]}
        for dtype, value in rank["odd"].items():
            assert (str(value.dtype), value.double().tolist()) == (dtype, [0, 1])
        assert [t.shape for t in rank["ragged"]] == [(0, 2), (1, 2)]
        assert rank["empty"] == [(0, 3), (0, 4)]
        assert rank["integer"].item() == 1.5
        assert rank["broadcast"] == {"from": 1}
        assert rank["pieces"]["mine"].tolist() == [2.0 * value for value in range(20)]
        assert rank["pieces"]["of"] == "rank 1"
        assert (rank["all"], rank["any"]) == (False, True)
        assert rank["ranks"] == [index, 0]
        # d/dx of the sum over ranks of (x_r (r+1))^2, which both ranks compute: 2 * 2 x (r+1)^2
        assert rank["gradient"].tolist() == [4.0 * (index + 1) ** 2] * 2
        assert rank["transposed"].tolist() == [[0, 6], [2, 8], [4, 10]]
        # Of both ranks, from what stands at this rank's place.
        weights = torch.arange(12.0).reshape(2, 2, 3)
        assert torch.equal(rank["strided"], 2 * weights[:, index])


def barrier() -> float:
    """Rank 1 comes a second later; both leave together."""
    strategy = HorovodStrategy()
    strategy.barrier()
    started = time.monotonic()
    if hvd.rank() == 1:
        time.sleep(1)
    strategy.barrier()
    return time.monotonic() - started


def test_barrier_waits(launch: Callable) -> None:
    assert min(launch(barrier, 2)) >= 0.9


def test_who_is_waited_for_is_told() -> None:
    """Also over Gloo, and who is late goes on as if nothing were."""
    code = (
        "import time; from strategies import HorovodStrategy; strategy = HorovodStrategy(); "
        "time.sleep(4 * strategy.global_rank); strategy.barrier()"
    )
    launcher = [sys.executable, "-m", "cluster.horovodrun", "-np", "2", "-H", "localhost:2"]
    done = run([*launcher, sys.executable, "-c", code], HOROVOD_STALL_CHECK_TIME_SECONDS="1")
    told = "Missing ranks:\n[0]<stderr>:1: [allreduce.barrier]"
    assert done.returncode == 0 and told in done.stdout, done.stdout


def wake_ups(**environment: str) -> int:
    """How often Horovod's threads wake up in a second with nothing to do; then some work."""
    os.environ.update(environment)
    strategy = HorovodStrategy()
    strategy.barrier()

    def count() -> int:
        threads = Path("/proc/self/task").glob("[0-9]*")
        others = [thread / "status" for thread in threads if int(thread.name) != os.getpid()]
        found = [re.search(r"\nvoluntary_ctxt_switches:\s*(\d+)", s.read_text()) for s in others]
        return sum(int(number[1]) for number in found if number)

    before = count()
    time.sleep(1)
    idle = count() - before
    for _ in range(30):
        time.sleep(0.001)
        strategy.barrier()
    return idle


@pytest.mark.slow
def test_horovod_sleeps_while_there_is_nothing_to_do(launch_anew: Callable) -> None:
    asks_all_the_time = launch_anew(wake_ups, 2, HOROVOD_IDLE_TIME="0")
    # Were a call for work lost, each of the barriers would take ten seconds, and time runs out.
    sleeps = launch_anew(wake_ups, 2, HOROVOD_IDLE_TIME="10000")
    assert 2 * max(sleeps) < min(asks_all_the_time)
    by_default = launch_anew(wake_ups, 2)
    assert 2 * max(by_default) < min(asks_all_the_time)


@pytest.mark.parametrize("ranks, cores, longest", [(1, 4, 1e-4), (4, 4, 1e-4), (32, 2, 1.6e-3)])
def test_who_waits_leaves_a_shared_core_to_others(
    monkeypatch: pytest.MonkeyPatch, ranks: int, cores: int, longest: float
) -> None:
    pauses: list[float] = []
    done = iter([False] * 40 + [True])
    longest_pause.cache_clear()
    with monkeypatch.context() as patch:
        patch.setattr(hvd, "local_size", lambda: ranks)
        patch.setattr(os, "sched_getaffinity", lambda _: set(range(cores)))
        patch.setattr(time, "sleep", pauses.append)
        wait_until(lambda: next(done))
    longest_pause.cache_clear()
    assert len(pauses) == 40
    assert pauses[0] < 1e-4 and max(pauses) == pytest.approx(longest)


def save_and_go_on(strategy: str, folder: str, name: str, others: list[str]) -> list[Any]:
    """Leave a checkpoint after 5 of 10 batches; resume those of others to the second epoch's end.

    Batches are shuffled by a sampler of one's own, which Lightning leaves alone.
    """
    sampler = DistributedSampler(samples(), SIZE, RANK, seed=3)
    batches = DataLoader(samples(), batch_size=GLOBAL_BATCH // SIZE, sampler=sampler)
    keep = ModelCheckpoint(folder, filename=name, every_n_train_steps=5)
    run = trainer(strategy, max_steps=5, callbacks=[keep], enable_checkpointing=True)
    run.fit(Remembers(), batches)
    resumed = []
    for other in others:
        run, model = trainer(strategy, max_epochs=2), Remembers()
        run.fit(model, batches, ckpt_path=f"{folder}/{other}.ckpt")
        resumed.append(results(run, model, rest=everyones(run, model.seen[:5])))
    return resumed


def test_checkpoints_go_from_any_strategy_to_any(
    launch: Callable, launch_anew: Callable, tmp_path: Path
) -> None:
    """Weights, optimizer and schedule; and to Horovod the other half of the epoch's samples."""
    resumed = {}
    for strategy, ranks, others in [
        ("single", 1, []), ("horovod", 2, ["single1"]), ("horovod", 4, ["horovod2"]),
        ("ddp", 2, ["horovod4"]), ("horovod", 1, ["ddp2", "horovod4"]), ("single", 1, ["horovod4"]),
    ]:  # fmt: skip
        name = f"{strategy}{ranks}"
        arguments = {"strategy": strategy, "folder": str(tmp_path), "name": name}
        start = launch_anew if strategy == "ddp" else launch
        for rank in start(save_and_go_on, ranks, others=others, **arguments):
            resumed.update({(other, name): result for other, result in zip(others, rank)})
        saved, one = (
            torch.load(tmp_path / f"{n}.ckpt", weights_only=False) for n in (name, "single1")
        )
        for key in ("state_dict", "optimizer_states", "global_step", "epoch"):
            assert_same(saved[key], one[key], 1e-6, f"{name}.{key}")
        assert saved.keys() - {"horovod"} == one.keys()
    assert len(resumed) == 6
    order = torch.randperm(80, generator=torch.Generator().manual_seed(3))
    rest = sorted(samples().tensors[0][order[40:], 0].tolist())
    for (_, name), result in resumed.items():
        # Lightning's own strategies begin the epoch anew; they do take up all the rest.
        alike = ("single1", "horovod2") if "horovod" in name else ("horovod4", "single1")
        assert_same(result["weights"], resumed[alike]["weights"], 1e-6, name)
        if "horovod" in name:
            assert result["rest"] == pytest.approx(rest)


class Warm(Net):
    """Rank 0 brings an optimizer state along; the others must get it."""

    def configure_optimizers(self) -> Any:
        optimizer = super().configure_optimizers()
        if self.global_rank == 0:
            self(torch.ones(2, FEATURES)).sum().backward()
            optimizer.step()
            optimizer.zero_grad()
        return optimizer


def warm_optimizer() -> Any:
    run = trainer("horovod", limit_train_batches=0)
    run.fit(Warm(), loader())
    return run.optimizers[0].state_dict()["state"]


class Validates(Remembers):
    def __init__(self) -> None:
        super().__init__()
        self.validated: list[int] = []  # after so many epochs

    def on_validation_epoch_end(self) -> None:
        self.validated.append(self.current_epoch)

    def validation_step(self, batch: list[Tensor], batch_idx: int) -> None:
        pass


def end_an_epoch(folder: str, resumed: bool) -> dict[str, Any]:
    """One of a number of batches that follows from the number of ranks; a second after a resume."""
    keep = ModelCheckpoint(folder, filename="end", every_n_train_steps=80 // 4 // SIZE)
    saving: dict[str, Any] = {"callbacks": [keep], "enable_checkpointing": True}
    run = trainer(
        "horovod", max_epochs=1 + resumed, num_sanity_val_steps=0, **({} if resumed else saving)
    )
    model, path = Validates(), f"{folder}/end.ckpt" if resumed else None
    batches = DataLoader(samples(), batch_size=4)
    run.fit(model, batches, DataLoader(samples(16), batch_size=4), ckpt_path=path)
    seen = everyones(run, model.seen)
    return {"seen": seen, "validated": model.validated, "steps": run.global_step}


@pytest.mark.parametrize("then,now", [(1, 2), (2, 1)])
def test_a_resume_at_the_end_of_an_epoch_trains_the_next(
    launch: Callable, tmp_path: Path, then: int, now: int
) -> None:
    """On another number of ranks, which have another number of batches."""
    launch(end_an_epoch, then, folder=str(tmp_path), resumed=False)
    expected = sorted(samples().tensors[0][:, 0].tolist())
    for told in launch(end_an_epoch, now, folder=str(tmp_path), resumed=True):
        assert told["seen"] == expected and told["validated"][-1] == 1
        assert told["steps"] == 20 // then + 20 // now


class RemembersTwo(Net):
    """Which samples of two loaders were trained."""

    def __init__(self) -> None:
        super().__init__()
        self.seen: list[Tensor] = []

    def training_step(self, batch: dict[str, list[Tensor]], batch_idx: int) -> Tensor:
        self.seen += [batch["many"][0][:, 0], batch["few"][0][:, 0]]
        return super().training_step(batch["many"], batch_idx)


def resume_two_loaders(folder: str) -> tuple[list[float], list[float]]:
    """7 of 10 batches of 4 and of 2 samples a rank, and the rest after a resume."""

    def loaders() -> dict[str, DataLoader]:
        return {
            name: DataLoader(samples(20 * size), batch_size=size)
            for name, size in (("many", 4), ("few", 2))
        }

    keep = ModelCheckpoint(folder, filename="seven", every_n_train_steps=7)
    run = trainer("horovod", max_steps=7, callbacks=[keep], enable_checkpointing=True)
    first, second = RemembersTwo(), RemembersTwo()
    run.fit(first, loaders())
    run = trainer("horovod", max_epochs=1)
    run.fit(second, loaders(), ckpt_path=f"{folder}/seven.ckpt")
    seen = everyones(run, first.seen + second.seen)
    return seen, sorted(x for size in (4, 2) for x in samples(20 * size).tensors[0][:, 0].tolist())


class RemembersShort(Net):
    def __init__(self) -> None:
        super().__init__()
        self.seen: list[Tensor] = []

    def training_step(self, batch: list[list[Tensor]], batch_idx: int) -> Tensor:
        long, short = batch
        self.seen.append(short[0][:, 0])
        return super().training_step(long, batch_idx)


def resume_in_a_later_round(folder: str) -> dict[str, Any]:
    """After 5 of 10 batches, when a loader of 3 is in its second round."""

    def fit(**arguments: Any) -> list[Tensor]:
        pl.seed_everything(3)
        model, path = RemembersShort(), arguments.pop("ckpt_path", None)
        long, short = (
            DataLoader(samples(SIZE * 4 * count), batch_size=4, shuffle=True) for count in (10, 3)
        )
        loaders = CombinedLoader([long, short], "max_size_cycle")
        trainer("horovod", **arguments).fit(model, loaders, ckpt_path=path)
        return model.seen

    keep = ModelCheckpoint(folder, filename="five", every_n_train_steps=5)
    first = fit(max_steps=5, callbacks=[keep], enable_checkpointing=True)
    rest = fit(max_epochs=1, ckpt_path=f"{folder}/five.ckpt")
    return {"whole": torch.cat(fit(max_epochs=1)), "resumed": torch.cat(first + rest)}


def test_a_resume_in_a_later_round_of_a_short_loader(launch: Callable, tmp_path: Path) -> None:
    for rank in launch(resume_in_a_later_round, 2, folder=str(tmp_path)):
        assert rank["resumed"].tolist() == rank["whole"].tolist()


class AsksForSteps(Remembers):
    """Its loaders are made, and their workers begin, before a checkpoint is read."""

    def configure_optimizers(self) -> Any:
        assert self.trainer.estimated_stepping_batches > 0
        return super().configure_optimizers()


def resume_with_loaders_that_are_there(folder: str, persistent: bool) -> dict[str, Any]:
    """14 batches of two epochs of 10, the rest after a resume, and all without one."""
    sizes: dict[str, Any] = {"batch_size": 4, "shuffle": True, "num_workers": 1}
    sizes["persistent_workers"] = persistent
    pl.seed_everything(3)
    whole = AsksForSteps()
    trainer("horovod").fit(whole, DataLoader(samples(), **sizes))
    keep = ModelCheckpoint(folder, filename="fourteen", every_n_train_steps=14)
    first, second = AsksForSteps(), AsksForSteps()
    run = trainer("horovod", max_steps=14, callbacks=[keep], enable_checkpointing=True)
    run.fit(first, DataLoader(samples(), **sizes))
    trainer("horovod").fit(
        second, DataLoader(samples(), **sizes), ckpt_path=f"{folder}/fourteen.ckpt"
    )
    return {"whole": torch.cat(whole.seen), "resumed": torch.cat(first.seen + second.seen)}


@pytest.mark.parametrize("persistent", [False, True])
def test_a_resume_goes_on_where_loaders_were_made_before_it(
    launch: Callable, persistent: bool, tmp_path: Path
) -> None:
    arguments = {"folder": str(tmp_path), "persistent": persistent}
    for rank in launch(resume_with_loaders_that_are_there, 2, **arguments):
        assert torch.equal(rank["resumed"], rank["whole"])


def test_a_resume_with_two_loaders_sees_each_sample_once(launch: Callable, tmp_path: Path) -> None:
    for seen, expected in launch(resume_two_loaders, 2, folder=str(tmp_path)):
        assert seen == expected


class OwnLoader:
    def __iter__(self) -> Any:
        return iter(DataLoader(samples(20), batch_size=4))


class GoesOnByItself(DataLoader):
    """Lightning hands it its own state."""

    def state_dict(self) -> dict[str, Any]:
        return {}

    def load_state_dict(self, state_dict: dict[str, Any]) -> None:
        pass


def resume_streams(folder: str) -> dict[str, list[str]]:
    """What is said of loaders none of whose samples can be left out, after 3 of 5 batches."""
    loaders: dict[str, Any] = {
        "own": OwnLoader(),
        "stream": DataLoader(Counting(5), batch_size=GLOBAL_BATCH // SIZE),
        "stateful": GoesOnByItself(Counting(5), batch_size=GLOBAL_BATCH // SIZE),
        "sized": DataLoader(samples(40), batch_size=4),
        "drawn": DataLoader(samples(40), 4, sampler=SubsetRandomSampler(range(40))),
        "weighted": DataLoader(samples(40), 4, sampler=WeightedRandomSampler([1.0] * 40, 40)),
    }
    said = {}
    for name, batches in loaders.items():
        keep = ModelCheckpoint(folder, filename=name, every_n_train_steps=3)
        run = trainer("horovod", max_steps=3, callbacks=[keep], enable_checkpointing=True)
        run.fit(Net(), batches)
        with warnings.catch_warnings(record=True) as told:
            trainer("horovod", max_epochs=1).fit(Net(), batches, ckpt_path=f"{folder}/{name}.ckpt")
        said[name] = [text for w in told if "resumed epoch" in (text := str(w.message))]
    return said


def test_a_resume_says_which_loaders_begin_anew(launch: Callable, tmp_path: Path) -> None:
    first, second = launch(resume_streams, 2, folder=str(tmp_path))
    assert not any(second.values()) and not first["stateful"] and not first["sized"]
    for name, kind in (("drawn", "SubsetRandomSampler"), ("weighted", "WeightedRandomSampler")):
        assert first[name][0].startswith(f"the resumed epoch draws its samples anew, by a {kind}")
    for name, kind in (("own", "OwnLoader"), ("stream", "DataLoader")):
        (text,) = first[name]
        assert "goes on at batch 3, but with the first samples" in text and f"this {kind}" in text


def test_the_global_batch_is_of_the_first_loader_that_tells() -> None:
    strategy = HorovodStrategy()
    for loaders, size in (([OwnLoader(), DataLoader(samples(), 4)], 4), ([OwnLoader()], 0)):
        loop = SimpleNamespace(_combined_loader=CombinedLoader(loaders))
        trainer_of_it = SimpleNamespace(fit_loop=loop)
        strategy._lightning_module = SimpleNamespace(trainer=trainer_of_it)  # type: ignore[assignment]
        assert strategy._global_batch_size() == size


def test_orders_that_a_resume_finds_again() -> None:
    whole, seeded = samples(40), DistributedSampler(samples(40), 2, 0)
    assert drawn_anew(DataLoader(whole, 4, shuffle=True).batch_sampler) == "RandomSampler"
    assert drawn_anew(DataLoader(whole, 4).batch_sampler) == ""
    assert drawn_anew(DataLoader(whole, 4, sampler=seeded).batch_sampler) == ""


class Grows(pl.LightningDataModule):
    """Batches of 2, and of 8 from the second epoch on."""

    def train_dataloader(self) -> DataLoader:
        first = self.trainer.current_epoch == 0  # type: ignore[union-attr]
        return DataLoader(samples(96), batch_size=2 if first else 8, shuffle=True)


def resume_with_larger_batches(folder: str) -> list[float]:
    """What was trained of the second epoch, 3 batches before a resume and the others after it."""
    reload = {"reload_dataloaders_every_n_epochs": 1}
    first, second, small = Remembers(), Remembers(), 96 // 2 // SIZE
    pl.seed_everything(3)
    keep = ModelCheckpoint(folder, filename="grown", every_n_train_steps=small + 3)
    run = trainer(
        "horovod", max_steps=small + 3, callbacks=[keep], enable_checkpointing=True, **reload
    )
    run.fit(first, Grows())
    run = trainer("horovod", **reload)
    run.fit(second, Grows(), ckpt_path=f"{folder}/grown.ckpt")
    return everyones(run, first.seen[small:] + second.seen)


def test_a_resume_counts_in_the_batches_of_its_epoch(launch: Callable, tmp_path: Path) -> None:
    expected = sorted(samples(96).tensors[0][:, 0].tolist())
    assert launch(resume_with_larger_batches, 2, folder=str(tmp_path)) == [expected] * 2


class Codebook(Net):
    """Moves a buffer by its own batches, and keeps what each step begins with."""

    def __init__(self) -> None:
        super().__init__(convolutions(normalization=True))
        self.register_buffer("centre", torch.zeros(FEATURES))
        self.begins: list[Tensor] = []

    def training_step(self, batch: list[Tensor], batch_idx: int) -> Tensor:
        self.begins.append(self.centre.clone())
        self.centre.lerp_(batch[0].mean(0), 0.1)
        return super().training_step(batch, batch_idx)


class MovesItself(Net):
    """A weight that something else than averaged gradients moves, in the last of 20 steps."""

    def on_train_batch_end(self, *_: Any) -> None:
        if self.global_step == 20:
            with torch.no_grad():
                self.net[2].bias[1] += 1e-6 * RANK


def train_apart() -> dict[str, Any]:
    found = {}
    for name, model, options in (
        ("own", Codebook(), {}),
        ("alike", Codebook(), {"broadcast_buffers": True}),
        ("running", Net(convolutions(normalization=True)), {}),
        ("weight", MovesItself(), {}),
    ):
        validation = DataLoader(samples(16), batch_size=4)
        with warnings.catch_warnings(record=True) as told:
            trainer(HorovodStrategy(**options)).fit(model, loader(), validation)
        said = [str(warning.message) for warning in told]
        found[f"{name} told"] = [text for text in said if "differs between ranks" in text]
        if isinstance(model, Codebook):
            found[name] = torch.stack(model.begins)
    return found


def test_what_has_gone_apart_is_told_or_rank_0s(launch: Callable) -> None:
    first, second = launch(train_apart, 2)
    assert not torch.equal(first["own"], second["own"])
    assert torch.equal(first["alike"], second["alike"]) and first["alike"][-1].any()
    (text,) = first["own told"]
    assert text.startswith("the buffer centre differs between ranks, and checkpoints have that of")
    (text,) = first["weight told"]
    assert text.startswith("the parameter net.2.bias differs between ranks, and checkpoints have")
    assert not first["running told"] and not first["alike told"]
    assert not second["own told"] and not second["weight told"]


class Wraps(torch.optim.Optimizer):
    """An optimizer around another, made without Optimizer.__init__, as many are."""

    def __init__(self, inner: torch.optim.Optimizer) -> None:
        self.inner, self.param_groups, self.state = inner, inner.param_groups, inner.state
        self.defaults = inner.defaults

    def step(self, closure: Any = None) -> Any:
        return self.inner.step(closure)

    def zero_grad(self, set_to_none: bool = True) -> None:
        self.inner.zero_grad(set_to_none)


class IsWrapped(Net):
    def configure_optimizers(self) -> Any:
        return Wraps(torch.optim.SGD(self.parameters(), lr=0.05))


def train_wrapped() -> Any:
    model = IsWrapped()
    trainer("horovod").fit(model, loader())
    return model.state_dict()


def test_an_optimizer_around_another(launch: Callable) -> None:
    (alone,) = launch(train_wrapped, 1)
    for rank in launch(train_wrapped, 2):
        assert_same(rank, alone, 1e-6)


def test_optimizer_state_of_rank_0_is_everyones(launch: Callable) -> None:
    first, second = launch(warm_optimizer, 2)
    assert first and first.keys() == second.keys()
    for key in first:
        assert_same(first[key], second[key], 0)


class Boom(Net):
    def training_step(self, batch: list[Tensor], batch_idx: int) -> Tensor:
        if self.global_rank == 1 and batch_idx == 2:
            raise RuntimeError("boom on rank 1")
        return super().training_step(batch, batch_idx)


def explode(folder: str) -> None:
    keep = ModelCheckpoint(folder, save_on_exception=True)
    trainer("horovod", callbacks=[keep], enable_checkpointing=True).fit(Boom(), loader())


def test_an_exception_on_one_rank_ends_all(launch: Callable, tmp_path: Path) -> None:
    """Also where it saves a checkpoint, after which ranks wait for each other."""
    with pytest.raises(AssertionError, match="boom on rank 1"):
        launch(explode, 2, folder=str(tmp_path))


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
        self.drawn["seen"].append(batch[0][:, 0])
        return super().training_step(batch, batch_idx)

    def validation_step(self, batch: list[Tensor], batch_idx: int) -> None:
        self.draw("val")

    def on_train_batch_end(self, *_: Any) -> None:
        self.draw("outside")


def draw_in_steps(strategy: str, folder: str) -> list[dict[str, list[float]]]:
    """In a first epoch, and in a second one of another Trainer, which goes on."""
    told, path = [], None
    for epochs in (1, 2):
        model = Noisy()  # seeds torch by its rank
        torch.manual_seed(3)
        run = trainer(strategy, max_epochs=epochs, num_sanity_val_steps=0)
        drawing = DataLoader(samples(16), 2, sampler=SubsetRandomSampler(range(16)))
        run.fit(model, drawing, DataLoader(samples(7), batch_size=1), ckpt_path=path)
        path = f"{folder}/one.ckpt"
        run.save_checkpoint(path)
        told.append({where: torch.cat(drawn).tolist() for where, drawn in model.drawn.items()})
    return told


def test_each_rank_draws_for_itself_in_its_steps(launch: Callable, tmp_path: Path) -> None:
    """But not outside of them, also where ranks have unequally many batches to evaluate."""
    ranks = launch(draw_in_steps, 2, strategy="horovod", folder=str(tmp_path))
    first, second = (rank[0] for rank in ranks)
    assert len(first["val"]) - len(second["val"]) == 1
    for where in ("transfer", "train", "val"):
        drawn = first[where] + second[where] + ranks[0][1][where] + ranks[1][1][where]
        assert len(set(drawn)) == len(drawn) > 12
    for epoch, other in zip(*ranks):
        assert epoch["outside"] == other["outside"]
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


class DrawsItsBatches(Net):
    """Asks the loader for its batches, whose sampler draws in the step then."""

    def __init__(self) -> None:
        super().__init__()
        self.seen: list[Tensor] = []

    def training_step(self, dataloader_iter: Any) -> Tensor:
        batch, _, _ = next(dataloader_iter)
        self.seen.append(batch[0][:, 0])
        return nn.functional.cross_entropy(self(batch[0]), batch[1])


def train_on_an_iterator() -> list[float]:
    model = DrawsItsBatches()  # seeds torch by its rank
    torch.manual_seed(3)
    drawing = DataLoader(samples(16), 2, sampler=SubsetRandomSampler(range(16)))
    trainer("horovod", max_epochs=1).fit(model, drawing)
    return torch.cat(model.seen).tolist()


def test_a_step_that_asks_for_its_batches_draws_them_as_all_do(launch: Callable) -> None:
    first, second = launch(train_on_an_iterator, 2)
    assert sorted(first + second) == sorted(samples(16).tensors[0][:, 0].tolist())


def test_one_process_draws_as_without_horovod(launch: Callable, tmp_path: Path) -> None:
    (ours,), (single,) = (
        launch(draw_in_steps, 1, strategy=strategy, folder=str(tmp_path))
        for strategy in ("horovod", "single")
    )
    for where in ("transfer", "train", "val", "outside"):
        assert ours[0][where] == single[0][where]


class TestDevices:
    """Which GPU a rank takes, on machines that are made up."""

    def strategy(self, monkeypatch: pytest.MonkeyPatch, gpus: int, local_rank: int) -> Any:
        strategy = HorovodStrategy()
        strategy.parallel_devices = [torch.device("cuda", 0)]  # Trainer(devices=1)
        monkeypatch.delenv("CUDA_VISIBLE_DEVICES", raising=False)
        monkeypatch.setattr(torch.cuda, "device_count", lambda: gpus)
        monkeypatch.setattr(hvd, "local_rank", lambda: local_rank)
        return strategy

    def test_each_rank_takes_its_own(self, monkeypatch: pytest.MonkeyPatch) -> None:
        for rank in range(4):
            strategy = self.strategy(monkeypatch, 4, rank)
            strategy.world.local_rank = 0  # as the first of its process set
            assert strategy.root_device == torch.device("cuda", rank)

    def test_or_the_only_one_that_it_was_shown(self, monkeypatch: pytest.MonkeyPatch) -> None:
        strategy = self.strategy(monkeypatch, 1, 3)
        monkeypatch.setenv("CUDA_VISIBLE_DEVICES", "3")
        assert strategy.root_device == torch.device("cuda", 0)

    def test_so_does_ddp(self, monkeypatch: pytest.MonkeyPatch) -> None:
        monkeypatch.setenv("HOROVOD_LOCAL_SIZE", "2")
        monkeypatch.setattr(torch.cuda, "is_available", lambda: True)
        for visible, gpus, expected in ((None, 2, [0, 1]), ("3", 1, [0, 0]), ("1,3", 2, [0, 1])):
            monkeypatch.delenv("CUDA_VISIBLE_DEVICES", raising=False)
            if visible is not None:
                monkeypatch.setenv("CUDA_VISIBLE_DEVICES", visible)
            monkeypatch.setattr(torch.cuda, "device_count", lambda gpus=gpus: gpus)
            monkeypatch.setattr(ddp, "HorovodrunEnvironment", LightningEnvironment)
            devices = ddp.HorovodrunDDP().parallel_devices
            assert devices == [torch.device("cuda", index) for index in expected]

    def test_what_comes_from_another_ranks_gpu_is_put_on_its_own(self) -> None:
        storage = SimpleNamespace(cuda=lambda: "on mine")
        assert on_own_gpu(storage, "cuda:3") == "on mine" and on_own_gpu(storage, "cpu") is storage

    def test_a_model_on_several_has_one_gradient_at_a_time(
        self, monkeypatch: pytest.MonkeyPatch
    ) -> None:
        """Autograd has a thread for each GPU, and both come to the same operations."""
        now, most = [0], [0]

        def advance(_: Any) -> None:
            now[0] += 1
            most[0] = max(most[0], now[0])
            time.sleep(0.02)
            now[0] -= 1

        monkeypatch.setattr(buckets, "advance", advance)
        model = nn.Sequential(nn.Linear(2, 2), nn.Linear(2, 2))
        found = GradientBuckets(model, HorovodStrategy().world, adasum, 4, before=1, after=1)
        monkeypatch.setattr(found, "_launch", lambda bucket: None)
        found.start()
        with ThreadPoolExecutor(4) as pool:
            list(pool.map(found._gradient_is_there, model.parameters()))
        assert most == [1] and found._seen == set(model.parameters())

    def test_a_training_on_cpus_pins_no_memory(self, tmp_path: Path) -> None:
        """Which would make a context on the first GPU, in each rank."""
        run = trainer("horovod", max_steps=1)
        batches = DataLoader(samples(), batch_size=2, pin_memory=True)
        run.fit(Net(), batches)
        assert batches.pin_memory and not run.train_dataloader.pin_memory

    def test_and_is_told_when_there_is_none(self, monkeypatch: pytest.MonkeyPatch) -> None:
        strategy = self.strategy(monkeypatch, 2, 2)
        monkeypatch.setattr(hvd, "local_size", lambda: 3)
        with pytest.raises(MisconfigurationException, match="3 ranks on .*, which has 2 GPUs"):
            _ = strategy.root_device

    @pytest.mark.parametrize("nccl", [True, False])
    def test_gpus_without_nccl_are_refused(
        self, monkeypatch: pytest.MonkeyPatch, nccl: bool
    ) -> None:
        strategy = self.strategy(monkeypatch, 1, 0)
        strategy.accelerator = CPUAccelerator()
        monkeypatch.setattr(strategy.accelerator, "setup_device", lambda device: None)
        monkeypatch.setattr(hvd, "nccl_built", lambda: nccl)
        gpu = SimpleNamespace(uuid="GPU-a")
        monkeypatch.setattr(torch.cuda, "get_device_properties", lambda device: gpu)
        if nccl:
            strategy.setup_environment()
            assert strategy.operations == "NCCL"
            other = [("node1", "GPU-a"), ("node2", "GPU-a"), ("node1", "GPU-b")]
            monkeypatch.setattr(strategy.world, "gather_objects", lambda mine: other)
            strategy.setup_environment()
            other.append(("node2", "GPU-a"))
            with pytest.raises(MisconfigurationException, match="ranks 1 and 3 have the same GPU"):
                strategy.setup_environment()
        else:
            with pytest.raises(MisconfigurationException, match="HOROVOD HAS NO NCCL"):
                strategy.setup_environment()


class Adds(pl.LightningModule):
    def __init__(self) -> None:
        super().__init__()
        self.total = SumMetric()

    def validation_step(self, batch: Tensor, batch_idx: int) -> None:
        self.total.update(batch)
        self.log("total", self.total)


class TestOneProcess:
    """Without horovodrun: one process, and options that are refused."""

    def test_metrics_are_those_of_the_newest_strategy(self) -> None:
        module = Measured()
        for _ in range(2):
            world = HorovodStrategy().world
            synchronize_metrics(module, world)
            assert module.auroc.dist_sync_fn == world.gather

    def test_metrics_add_up_in_float32_under_bf16_true(self) -> None:
        module, ones = Adds(), DataLoader(torch.ones(1000))  # type: ignore[arg-type]
        run = trainer("horovod", precision="bf16-true")
        run.validate(module, ones, verbose=False)
        assert run.callback_metrics["total"] == 1000  # 256 in bf16

    def test_trains_alone(self) -> None:
        run = trainer("horovod", max_epochs=1)
        run.fit(Net(), loader(16))
        assert (run.world_size, run.global_rank, run.global_step) == (1, 0, 2)
        assert run.strategy.operations in ("Gloo", "MPI")

    @pytest.mark.parametrize(
        "options,message",
        [
            ({"bucket_mib": 0}, "bucket_mib=0: a size above 0"),
            ({"compression": "fp8"}, "compression=fp8: there are none, fp16, bf16"),
            ({"op": "mean"}, "op=mean: there are average, sum, adasum"),
            ({"gradient_predivide_factor": -1}, "gradient_predivide_factor=-1: a factor above 0"),
            ({"gradient_predivide_factor": 2, "op": "sum"}, "op=sum makes none"),
            ({"op": "adasum", "compression": "bf16"}, "compression=bf16 would spoil"),
            ({"process_sets": [[0, 1]]}, "knows no set|exactly one"),
        ],
    )
    def test_options_are_checked(self, options: dict[str, Any], message: str) -> None:
        with pytest.raises(MisconfigurationException, match=message):
            HorovodStrategy(**options)

    @pytest.mark.parametrize(
        "arguments,message",
        [({"devices": 3}, r"devices=3\) .* 1 processes"), ({"num_nodes": 2}, r"num_nodes=2\)")],
    )
    def test_trainer_may_not_contradict_horovodrun(
        self, arguments: dict[str, Any], message: str
    ) -> None:
        with pytest.raises(MisconfigurationException, match=message):
            trainer("horovod", **arguments).fit(Net(), loader(16))

    @pytest.mark.parametrize(
        "module,message",
        [
            ("raise ImportError('libnothing.so')", "Horovod cannot be imported .libnothing.so"),
            ("", "Horovod was built without PyTorch"),
        ],
    )
    def test_horovod_that_does_not_work(self, tmp_path: Path, module: str, message: str) -> None:
        (tmp_path / "horovod").mkdir()
        (tmp_path / "horovod" / "__init__.py").touch()
        (tmp_path / "horovod" / "torch.py").write_text(module)
        done = run([sys.executable, "-c", "import strategies"], PYTHONPATH=str(tmp_path))
        assert done.returncode == 1
        assert re.search(message, done.stdout.splitlines()[-1])


# ------------------------------------------------------------------- mistakes of several ranks


def refused(function: Callable[[], Any]) -> str:
    """What a mistake is called; every rank must be told, so that none waits for another."""
    with pytest.raises((MisconfigurationException, RuntimeError)) as error:
        function()
    return str(error.value)


def with_model(net: nn.Module, **arguments: Any) -> None:
    trainer("horovod", **arguments).fit(Net(net), loader())


def mistakes() -> dict[str, str]:
    """Several in one process, one after another: a refusal leaves nothing behind."""
    unequal = DataLoader(TensorDataset(*samples(80 - 8 * RANK).tensors), batch_size=4)
    unequal_batches = 6 - 2 * RANK
    sizes = nn.Sequential(nn.Linear(FEATURES, 4 + RANK), nn.Linear(4 + RANK, CLASSES))
    fewer = nn.Sequential(*[nn.Linear(FEATURES, FEATURES) for _ in range(2 - RANK)])
    kinds = nn.Linear(FEATURES, CLASSES, dtype=(torch.float32, torch.float64)[RANK])
    frozen = nn.Linear(FEATURES, CLASSES).requires_grad_(RANK == 0)
    strided = convolutions(normalization=False)
    graph = nn.Linear(FEATURES, CLASSES)
    graph.register_buffer("edges", torch.eye(3).to_sparse())
    if RANK == 1:
        strided.to(memory_format=torch.contiguous_format)
    found = {
        "sizes": refused(lambda: with_model(sizes)),
        "fewer": refused(lambda: with_model(fewer)),
        "kinds": refused(lambda: with_model(kinds)),
        "frozen": refused(lambda: with_model(frozen)),
        "hosts": refused(lambda: with_model(nn.Linear(FEATURES, CLASSES), num_nodes=2)),
        "devices": refused(lambda: with_model(nn.Linear(FEATURES, CLASSES), devices=3)),
        "batches": refused(lambda: trainer("horovod").fit(Net(), unequal)),
        "endless": refused(
            lambda: trainer("horovod").fit(Net(), DataLoader(Counting(unequal_batches), 4))
        ),
        "empty": refused(lambda: trainer("horovod").fit(Net(), DataLoader(Counting(1 - RANK), 4))),
        "few": refused(lambda: trainer("horovod").validate(Measured(), DataLoader(samples(1)))),
        "checkpoint": refused_file(),
        "twice": refused(lambda: trainer("horovod").fit(Reentered(), loader())),
        "complex": refused(lambda: trainer("horovod").fit(Complex(), loader())),
        "left out": refused(lambda: trainer("horovod").fit(LeavesOut(), loader())),
        "alone": refused(lambda: trainer("horovod").fit(CallsBackward("step"), loader())),
        "passed by": refused(
            lambda: trainer("horovod").fit(CallsBackward("step", bare=True), loader())
        ),
        "replaced": refused(lambda: trainer("horovod").fit(Replaces("step"), loader())),
        "elsewhere": refused(lambda: trainer("horovod").fit(BeginsElsewhere(), loader())),
        "by hand": refused(lambda: trainer("horovod").fit(SetsByHand(), loader())),
        "made": refused(lambda: trainer("horovod").fit(MadeApart(), loader())),
        "own forward": refused(
            lambda: with_model(nn.Sequential(Doubled(FEATURES)), sync_batchnorm=True)
        ),
        "penalty": refused(lambda: trainer("horovod", sync_batchnorm=True).fit(Slope(), loader())),
        "sparse": refused(lambda: trainer(HorovodStrategy(op="adasum")).fit(Embedded(), loader())),
        "strides": refused(lambda: with_model(strided)),
        "lazy": refused(lambda: with_model(nn.LazyLinear(CLASSES))),
        "graph": refused(lambda: trainer("horovod").fit(KeepsGraph(), loader())),
        "layout": refused(lambda: with_model(graph)),
        "hidden": refused(lambda: trainer("horovod").fit(Hides("at once"), loader())),
        "hidden later": refused(lambda: trainer("horovod").fit(Hides("later"), loader())),
        "rates": refused(lambda: trainer("horovod", max_epochs=3).fit(GoesByItsOwn(), loader())),
        "clock": refused(
            lambda: trainer("horovod", val_check_interval="00:00:00:01").fit(Net(), loader())
        ),
    }
    for then in ("none", "zeros"):
        trainer("horovod", max_epochs=1).fit(CallsBackward(then), loader())
    run, model = trainer("horovod", max_epochs=1), Net()
    run.fit(model, loader())
    found["goes on"] = f"{run.global_step} steps of {SIZE} ranks"
    return found


def refused_file() -> str:
    with pytest.raises(FileNotFoundError) as error:
        trainer("horovod").fit(Net(), loader(), ckpt_path="/nowhere/to/be/found.ckpt")
    return str(error.value)


class Reentered(Net):
    """A layer in two parts that are checkpointed in the reentrant way: two gradients for it."""

    def forward(self, x: Tensor) -> Tensor:
        x, layer = x.requires_grad_(), self.net[0]
        first = checkpoint(layer, x, use_reentrant=True)
        return self.net[2](first + checkpoint(layer, x * 2, use_reentrant=True))


class KeepsGraph(Net):
    def backward(self, loss: Tensor, *args: Any, **kwargs: Any) -> None:
        loss.backward(create_graph=True)


class LeavesOut(Net):
    """Rank 0 makes no backward of its fourth batch."""

    def __init__(self) -> None:
        super().__init__()
        self.automatic_optimization = False

    def training_step(self, batch: list[Tensor], batch_idx: int) -> None:
        if (RANK, batch_idx) != (0, 3):
            self.manual_backward(super().training_step(batch, batch_idx))


class CallsBackward(LeavesOut):
    """Makes each step of gradients of its own; or takes them away before those of all ranks."""

    def __init__(self, then: str, bare: bool = False) -> None:
        super().__init__()
        self.then, self.bare = then, bare

    def training_step(self, batch: list[Tensor], batch_idx: int) -> None:
        loss = Net.training_step(self, batch, batch_idx)
        optimizer = self.optimizers(use_pl_optimizer=not self.bare)
        loss.backward(retain_graph=True)
        if self.then != "step":
            optimizer.zero_grad(set_to_none=self.then == "none")  # type: ignore[union-attr]
            self.manual_backward(loss)
        optimizer.step()  # type: ignore[union-attr]


class Replaces(CallsBackward):
    def on_train_start(self) -> None:
        self.trainer.optimizers = [torch.optim.SGD(self.parameters(), lr=0.05)]


class BeginsElsewhere(Net):
    def backward(self, loss: Tensor, *args: Any, **kwargs: Any) -> None:
        sum(parameter.sum() for parameter in self.parameters()).backward()  # type: ignore[union-attr]


class SetsByHand(Net):
    def backward(self, loss: Tensor, *args: Any, **kwargs: Any) -> None:
        parameters = list(self.parameters())
        for parameter, gradient in zip(parameters, torch.autograd.grad(self.parts, parameters)):
            parameter.grad = gradient

    def training_step(self, batch: list[Tensor], batch_idx: int) -> Tensor:
        self.parts = super().training_step(batch, batch_idx)
        return self.parts * 2


class MadeApart(Net):
    """What configure_optimizers makes has another size on each rank."""

    def configure_optimizers(self) -> Any:
        self.late = nn.Linear(CLASSES, 2 + RANK)
        return super().configure_optimizers()


class Doubled(nn.BatchNorm1d):
    def forward(self, input: Tensor) -> Tensor:
        return 2 * super().forward(input)


class Slope(Net):
    """Has the gradient of a network with batch normalization in its loss."""

    def __init__(self) -> None:
        super().__init__(nn.Sequential(nn.BatchNorm1d(FEATURES), nn.Linear(FEATURES, CLASSES)))

    def training_step(self, batch: list[Tensor], batch_idx: int) -> Tensor:
        inputs = batch[0].clone().requires_grad_()
        outputs = self(inputs).square().sum()
        (slope,) = torch.autograd.grad(outputs, inputs, create_graph=True)
        return slope.square().mean()


class Hides(Net):
    """A layer that only its optimizer knows, and another that comes when training has begun."""

    def __init__(self, when: str) -> None:
        super().__init__()
        self.when, self.hidden = when, [nn.Linear(CLASSES, 3)]

    def on_train_start(self) -> None:
        if self.when == "later":
            self.layer = self.hidden[0]
            self.optimizers().add_param_group({"params": [*self.layer.parameters()]})  # type: ignore[union-attr]

    def configure_optimizers(self) -> Any:
        hidden = self.hidden[0].parameters() if self.when == "at once" else []
        return torch.optim.SGD([*self.parameters(), *hidden], lr=0.05)


class GoesByItsOwn(Net):
    """What it logs falls on rank 0 and rises on rank 1, whose learning rate falls."""

    def training_step(self, batch: list[Tensor], batch_idx: int) -> Tensor:
        own = self.current_epoch * (2.0 * RANK - 1)
        self.log("own", own, on_epoch=True, on_step=False)
        return nn.functional.cross_entropy(self(batch[0]), batch[1])

    def configure_optimizers(self) -> Any:
        optimizer = super().configure_optimizers()
        schedule = torch.optim.lr_scheduler.ReduceLROnPlateau(optimizer, patience=0)
        return {"optimizer": optimizer, "lr_scheduler": {"scheduler": schedule, "monitor": "own"}}


class Embedded(Net):
    def __init__(self) -> None:
        super().__init__()
        self.words = nn.Embedding(5, 3, sparse=True)


class Complex(Net):
    def __init__(self) -> None:
        super().__init__()
        self.phase = nn.Parameter(torch.ones(2, dtype=torch.complex64))


def test_mistakes_are_told_on_all_ranks(launch: Callable) -> None:
    host = os.uname().nodename
    for told in launch(mistakes, 2):
        rank_1 = f"rank 1 on {host} has another model than rank 0: "
        assert told["sizes"].startswith(f"{rank_1}net.0.weight (5, 12) float32 trained where rank")
        assert "rank 0 has net.0.weight (4, 12) float32 trained;" in told["sizes"]
        assert told["fewer"].startswith(f"{rank_1}nothing where rank 0 has net.1.weight")
        assert told["kinds"].startswith(f"{rank_1}net.weight (5, 12) float64 trained where")
        assert told["frozen"].startswith(f"{rank_1}net.weight (5, 12) float32 where")
        assert told["hosts"].startswith("Trainer(num_nodes=2), and horovodrun runs on 1;")
        assert told["devices"].startswith(f"Trainer(devices=3) on {host}, where horovodrun")
        assert told["batches"].startswith(f"rank 1 on {host} has 9 training batches an epoch")
        assert told["endless"].startswith(f"rank 1 on {host} has 4 training batches an epoch")
        assert told["empty"].startswith(f"rank 1 on {host} has 0 training batches an epoch, others")
        assert told["few"].startswith("1 samples to validate on 2 ranks")
        assert "/nowhere/to/be/found.ckpt" in told["checkpoint"]
        assert told["twice"].startswith("a parameter got a second gradient in one backward")
        assert told["complex"].startswith("Horovod adds no complex gradients")
        assert told["left out"].startswith("for some ranks the epoch ends with this backward")
        assert told["alone"].startswith("a step with gradients of loss.backward()")
        assert told["passed by"] == told["alone"]
        assert told["replaced"] == told["alone"]
        assert told["elsewhere"].startswith("a gradient of something else than the loss: begin")
        assert told["by hand"] == told["elsewhere"]
        assert told["made"].startswith(f"{rank_1}late.weight (3, 5) float32 trained where rank 0")
        assert told["own forward"].startswith("sync_batchnorm: net.0 is a Doubled with a forward")
        assert "once_differentiable" in told["penalty"]
        assert told["sparse"].startswith("op=adasum mixes dense gradients: make sparse=False of")
        assert "'words'" in told["sparse"]
        assert "strided (27, 1, 9, 3) trained;" in told["strides"]
        assert told["lazy"].startswith("net.weight has no shape before the first batch")
        assert told["graph"].startswith("backward(create_graph=True) gives gradients with a graph")
        assert told["layout"].startswith(
            "net.edges is torch.sparse_coo, which Horovod does not send"
        )
        hidden = "SGD has a parameter (3, 5) that the module has not, or not before training"
        assert told["hidden"].startswith(hidden) and told["hidden later"].startswith(hidden)
        assert told["rates"].startswith(f"rank 1 on {host} has the learning rates 0.005, rank 0")
        assert told["clock"].startswith("a val_check_interval of 1 s: by its own clock each rank")
        assert told["goes on"] == "10 steps of 2 ranks"


class LogsItsOwn(Evaluated):
    def validation_step(self, batch: list[Tensor], batch_idx: int) -> None:
        super().validation_step(batch, batch_idx)
        self.log("own", float(RANK))
        self.log("largest", MaxMetric()(torch.tensor(float(RANK))), sync_dist=True)

    test_step = validation_step


def evaluate_what_is_its_own() -> list[str]:
    batches = DataLoader(samples(16), batch_size=4)
    with warnings.catch_warnings(record=True) as told:
        warnings.simplefilter("always")
        trainer("horovod").validate(LogsItsOwn(), batches, verbose=False)
        trainer("horovod").test(LogsItsOwn(), batches, verbose=False)
        trainer("horovod").validate(LogsComputed(), batches, verbose=False)
    return [str(warning.message) for warning in told if "sync_dist" in str(warning.message)]


def test_what_a_rank_logs_by_itself_is_told_once(launch: Callable) -> None:
    (first, second), (alone,) = (
        launch(evaluate_what_is_its_own, 2),
        launch(evaluate_what_is_its_own, 1),
    )
    assert len(first) == 1 and first[0].startswith("own is what each rank has by itself")
    assert second == alone == []


def evaluate_single_samples() -> None:
    """3 samples in batches of one on 2 ranks: rank 0 has a batch that rank 1 has not."""
    trainer("horovod").validate(Measured(), DataLoader(samples(3), batch_size=1))


class WithoutIndex(Net):
    """Its step does not ask for the number of the batch, and the collective is a metric's own."""

    def __init__(self) -> None:
        super().__init__()
        self.metric = SumMetric(dist_sync_on_step=True)

    def validation_step(self, batch: list[Tensor]) -> None:
        self.log("sum", self.metric(batch[0].sum()))


def evaluate_single_samples_without_index() -> None:
    trainer("horovod").validate(WithoutIndex(), DataLoader(samples(3), batch_size=1))


class GathersPredictions(Net):
    def predict_step(self, batch: list[Tensor], batch_idx: int) -> Tensor:
        return self.all_gather(batch[0])


def predict_with_a_collective() -> None:
    """9 samples: 5 and 4 in batches of 4."""
    trainer("horovod").predict(GathersPredictions(), DataLoader(samples(9), batch_size=4))


@pytest.mark.parametrize(
    "evaluate",
    [evaluate_single_samples, evaluate_single_samples_without_index, predict_with_a_collective],
)
def test_a_collective_that_some_ranks_would_not_join(launch: Callable, evaluate: Callable) -> None:
    with pytest.raises(AssertionError, match="batch 1 of the .*tion is there on some ranks only"):
        launch(evaluate, 2)


class Sees(Net):
    """Keeps the first feature of what it evaluates and what it trains on."""

    def __init__(self) -> None:
        super().__init__()
        self.seen: list[Tensor] = []
        self.trained: list[Tensor] = []
        self.mean = MeanMetric()

    def training_step(self, batch: list[Tensor], batch_idx: int) -> Tensor:
        self.trained.append(batch[0][:, 0])
        return super().training_step(batch, batch_idx)

    def validation_step(self, batch: list[Tensor], batch_idx: int) -> None:
        self.seen.append(batch[0].reshape(-1, FEATURES)[:, 0])
        self.log("mean", self.mean(batch[0].mean()))


class Parts(DistributedSampler):
    """Gives rank r the r-th part, the last one filled up with the first sample."""

    def __iter__(self) -> Any:
        whole = [*range(len(self.dataset)), *range(self.total_size - len(self.dataset))]
        return iter(whole[self.rank * self.num_samples :][: self.num_samples])


def evaluate_with_samplers_of_its_own() -> dict[str, Any]:
    found = {}
    for name, sampler in (
        ("parts", Parts(samples(25), SIZE, RANK)),
        ("all", DistributedSampler(samples(8), 1, 0, shuffle=False)),
        ("named", type("Mine", (DistributedSampler,), {})(samples(25), SIZE, RANK, shuffle=False)),
    ):
        model = Sees()
        batches = DataLoader(sampler.dataset, batch_size=2, sampler=sampler)
        with warnings.catch_warnings(record=True) as told:
            run = trainer("horovod", use_distributed_sampler=False)
            run.validate(model, batches, verbose=False)
        found[name] = torch.cat(model.seen).tolist()
        found[f"{name} told"] = [str(w.message) for w in told if "count twice" in str(w.message)]
    return found


def test_a_sampler_that_deals_in_its_own_way_is_left_alone(launch: Callable) -> None:
    feature = samples(25).tensors[0][:, 0].tolist()
    first, second = launch(evaluate_with_samplers_of_its_own, 2)
    assert (first["parts"], second["parts"]) == (feature[:13], [*feature[13:], feature[0]])
    (text,) = first["parts told"]
    assert text.startswith("Parts has 26 samples to validate on 2 ranks, of a data set of 25")
    assert first["all"] == second["all"] == feature[:8]
    assert sorted(first["named"] + second["named"]) == sorted(feature)
    assert not first["named told"] and not first["all told"]


class InBuckets(Sampler[list[int]]):
    """Batches of one's own making, which has its sampler in two places."""

    def __init__(self, sampler: DistributedSampler) -> None:
        self.sampler, self.batch_size, self.drop_last = sampler, 2, False
        self.order = BatchSampler(sampler, 2, drop_last=False)

    def __iter__(self) -> Any:
        return iter(self.order)

    def __len__(self) -> int:
        return len(self.order)


def evaluate_in_buckets() -> list[float]:
    batches = InBuckets(DistributedSampler(samples(5), SIZE, RANK, shuffle=False))
    model, given = Sees(), DataLoader(samples(5), batch_sampler=batches)
    trainer("horovod", use_distributed_sampler=False).validate(model, given, verbose=False)
    assert len(batches.sampler) == 3  # as it was
    return torch.cat(model.seen).tolist()


def test_evaluation_in_batches_of_ones_own(launch: Callable) -> None:
    feature = samples(5).tensors[0][:, 0].tolist()
    assert launch(evaluate_in_buckets, 2) == [feature[::2], feature[1::2]]


class LogsSteps(Net):
    def validation_step(self, batch: Any, batch_idx: int) -> None:
        here = [part for part in batch.values() if part is not None]
        self.log("here", float(len(here)), on_step=True, on_epoch=True, sync_dist=True)


def evaluate_combined(mode: str, counts: list[int]) -> float:
    """Batches of 1, of two loaders with so many samples."""
    loaders = {f"{i}": DataLoader(samples(count)) for i, count in enumerate(counts)}
    run = trainer("horovod")
    run.validate(LogsSteps(), CombinedLoader(loaders, mode), verbose=False)
    return float(run.callback_metrics["here_epoch"])


@pytest.mark.parametrize(
    "mode,counts,expected",
    [
        ("max_size", [4, 10], 1.4),  # 2 and 5 batches a rank
        ("max_size_cycle", [4, 10], 2.0),
        ("min_size", [10, 4], 2.0),
    ],
)
def test_loaders_that_are_evaluated_beside_each_other(
    launch: Callable, mode: str, counts: list[int], expected: float
) -> None:
    first, second = launch(evaluate_combined, 2, mode=mode, counts=counts)
    assert first == second == pytest.approx(expected)


def test_batches_that_all_ranks_have_of_several_loaders() -> None:
    loaders = [DataLoader(samples()) for _ in range(2)]
    fewest = dict(zip(loaders, (4, 2)))
    for mode, expected in (("max_size", 4), ("max_size_cycle", 4), ("min_size", 2)):
        assert batches_of_all(CombinedLoader(loaders, mode), 0, fewest) == expected
    in_turn = CombinedLoader([*loaders, OwnLoader()], "sequential")
    assert [batches_of_all(in_turn, index, fewest) for index in range(3)] == [4, 2, math.inf]


class Pairs(Dataset):
    """Whole batches, of two equal samples."""

    def __len__(self) -> int:
        return 5

    def __getitem__(self, index: int) -> list[Tensor]:
        return [torch.full((2, FEATURES), float(index))]


def evaluate_in_orders_of_its_own() -> dict[str, Any]:
    def seen(batches: DataLoader, **arguments: Any) -> list[float]:
        model = Sees()
        run = trainer("horovod", **arguments)
        run.validate(model, batches, verbose=False)
        shares = run.strategy.world.gather_objects(torch.cat(model.seen).tolist())
        return sorted(value for share in shares for value in share)

    torch.manual_seed(RANK)  # as after training with random numbers of each rank's own
    some = SubsetRandomSampler(range(10))
    sampler = DistributedSampler(samples(67), SIZE, RANK, shuffle=True)
    both = DataLoader(samples(67), batch_size=8, sampler=sampler)
    model = Sees()
    trainer("horovod").fit(model, both, both)
    single, one_by_one = DataLoader(samples(67), None, sampler=sampler), Sees()
    trainer("horovod", max_epochs=1).fit(one_by_one, both, single)
    alone = None
    if RANK == 0:
        alone = pl.Trainer(
            strategy=SingleDeviceStrategy("cpu"), logger=False, enable_progress_bar=False
        ).validate(model, DataLoader(samples(4), batch_size=4), verbose=False)
    return {
        "drawn": seen(DataLoader(samples(), batch_size=2, sampler=some)),
        "pairs": seen(DataLoader(Pairs(), batch_size=None)),
        "shuffled": seen(
            DataLoader(samples(), batch_size=4, shuffle=True), limit_val_batches=1
        ),
        "one by one": [len(one_by_one.seen), sum(len(seen) for seen in one_by_one.trained)],
        "shares": [torch.cat(model.trained[at : at + 5]).tolist() for at in (0, 5)],
        "alone": alone,
    }  # fmt: skip


def test_evaluation_in_orders_of_its_own(launch: Callable) -> None:
    """Each sample once on all ranks together, and training goes on as it was."""
    feature = samples().tensors[0][:, 0]
    for rank, told in enumerate(launch(evaluate_in_orders_of_its_own, 2)):
        assert told["drawn"] == sorted(feature[:10].tolist())
        assert told["pairs"] == [0, 0, 1, 1, 2, 2, 3, 3, 4, 4]
        assert len(told["shuffled"]) == 8 and told["shuffled"] != sorted(feature[:8].tolist())
        expected = DistributedSampler(samples(67), 2, rank, shuffle=True)  # 34, one twice
        for epoch, share in enumerate(told["shares"]):
            expected.set_epoch(epoch)
            assert share == samples(67).tensors[0][list(expected), 0].tolist()
        # 34 and 33 validated beside two of the sanity check; of training one is there twice
        assert told["one by one"] == [2 + 34 - rank, 34]
        if rank == 0:  # after training, without rank 1
            assert told["alone"][0]["mean"] == pytest.approx(float(samples(4).tensors[0].mean()))


class LogsComputed(Sees):
    def validation_step(self, batch: list[Tensor], batch_idx: int) -> None:
        self.mean.update(batch[0].mean())

    def on_validation_epoch_end(self) -> None:
        self.log("computed", self.mean.compute())
        self.mean.reset()


class Words(Net):
    def __init__(self) -> None:
        super().__init__(convolutions(normalization=True))
        self.words = nn.Embedding(CLASSES, CLASSES, sparse=True)

    def training_step(self, batch: list[Tensor], batch_idx: int) -> Tensor:
        scores = self(batch[0]) + self.words(batch[1])
        return nn.functional.cross_entropy(scores, batch[1])

    def configure_optimizers(self) -> Any:
        return torch.optim.SGD(self.parameters(), lr=0.05)


def train_in_16_bits() -> dict[str, Tensor]:
    model = Words()
    trainer("horovod", precision="bf16-true", sync_batchnorm=True).fit(model, loader())
    return model.state_dict()


def test_sparse_gradients_and_statistics_in_16_bits(launch: Callable) -> None:
    first, second = launch(train_in_16_bits, 2)
    assert first["words.weight"].dtype == torch.bfloat16
    assert_same(first, second, 0)


# ---------------------------------------------------------------------------------- options


def reduce_gradients(op: str, gradients: list[list[float]]) -> list[float]:
    """One parameter whose gradient is `gradients[rank]`, and what becomes of it."""
    parameter = nn.Linear(len(gradients[0]), 1, bias=False)
    strategy = HorovodStrategy(op=op)
    strategy._lightning_module = parameter  # type: ignore[assignment]
    buckets = strategy._make_buckets()
    loss = parameter(torch.tensor(gradients[RANK])).sum()
    buckets.prepare(loss)
    buckets.start()
    loss.backward()
    assert buckets.finish()
    return parameter.weight.grad[0].tolist()


def reduce_each(op: str, of_ranks: list[list[list[float]]]) -> list[list[float]]:
    return [reduce_gradients(op, gradients) for gradients in of_ranks]


def test_adasum_adds_what_is_different_and_averages_what_is_alike(launch: Callable) -> None:
    orthogonal = [[3.0, 0, 0, 0], [0, 4.0, 0, 0], [0, 0, 5.0, 0], [0, 0, 0, 6.0]]
    two_pairs = [[2.0, 0], [1.0, 1.0]] * 2
    ranks = launch(reduce_each, 4, op="adasum", of_ranks=[orthogonal, two_pairs])
    assert len(ranks) == 4
    for added, mixed in ranks:
        assert added == [3, 4, 5, 6]
        # (1 - a.b / 2|a|^2) a + (1 - a.b / 2|b|^2) b, of a = (2, 0) and b = (1, 1): 0.75 a + 0.5 b;
        # both pairs get that, and of what is equal the average.
        assert mixed == pytest.approx([0.75 * 2 + 0.5, 0.5])


def two_groups() -> dict[str, Any]:
    """Ranks 0 and 2 train one model, 1 and 3 another: each as two ranks alone would."""
    strategy = HorovodStrategy(process_sets=[[0, 2], [1, 3]])
    run = pl.Trainer(
        strategy=strategy, accelerator="cpu", logger=False, max_epochs=1,
        enable_checkpointing=False, enable_progress_bar=False, enable_model_summary=False,
    )  # fmt: skip
    torch.manual_seed(hvd.rank())
    rank, model = run.global_rank, Measured()
    sampler = DistributedSampler(samples(), run.world_size, rank, shuffle=False)
    run.fit(model, DataLoader(samples(), batch_size=4, sampler=sampler))
    measured = run.validate(model, DataLoader(samples(9), batch_size=4), verbose=False)[0]
    own = strategy.broadcast(hvd.rank(), src=1)
    gathered = strategy.all_gather(torch.tensor(hvd.rank()))
    hvd.barrier()  # when one rank ends, Horovod ends for all
    return {
        "ranks": (run.world_size, rank, strategy.local_rank), "rows": measured["sum"],
        "weight": model.net[0].weight.detach(), "own": own, "all": gathered.tolist(),
    }  # fmt: skip


def test_process_sets_train_apart(launch_anew: Callable) -> None:
    ranks = launch_anew(two_groups, 4)
    assert [rank["ranks"] for rank in ranks] == [(2, 0, 0), (2, 0, 0), (2, 1, 1), (2, 1, 1)]
    assert [rank["all"] for rank in ranks] == [[0, 2], [1, 3], [0, 2], [1, 3]]
    assert [rank["own"] for rank in ranks] == [2, 3, 2, 3]
    assert [rank["rows"] for rank in ranks] == [9] * 4
    assert torch.equal(ranks[0]["weight"], ranks[2]["weight"])
    assert torch.equal(ranks[1]["weight"], ranks[3]["weight"])
    assert not torch.equal(ranks[0]["weight"], ranks[1]["weight"])


def shuffled() -> list[list[float]]:
    """The global batches of Lightning's own sampler, which shuffles."""
    pl.seed_everything(5)
    run, model = trainer("horovod", max_epochs=1), Remembers()
    run.fit(model, DataLoader(samples(), batch_size=GLOBAL_BATCH // SIZE, shuffle=True))
    return [everyones(run, [batch]) for batch in model.seen]


def test_global_batches_do_not_depend_on_the_number_of_ranks(launch: Callable) -> None:
    (one,), two = launch(shuffled, 1), launch(shuffled, 2)
    assert two[0] == two[1] == one
    assert one[0] != sorted(samples().tensors[0][:8, 0].tolist())

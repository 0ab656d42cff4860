"""HorovodStrategy under real horovodrun: the same numbers as one process."""

from __future__ import annotations

import time
import warnings
from collections.abc import Callable
from pathlib import Path
from typing import Any

import horovod.torch as hvd
import pytest
import pytorch_lightning as pl
import torch
from pytorch_lightning.accelerators import CPUAccelerator
from pytorch_lightning.utilities.exceptions import MisconfigurationException
from torch import Tensor, nn
from torch.utils.data import DataLoader, DistributedSampler, TensorDataset
from torchmetrics import CatMetric, MetricCollection
from torchmetrics.classification import MulticlassAccuracy

import strategies
from strategies import HorovodStrategy
from strategies.buckets import GradientBuckets

FEATURES, CLASSES = 12, 5


class Net(pl.LightningModule):
    """Several dtypes of buffers, a parameter nobody uses, metrics in a collection."""

    def __init__(self, seed: int = 1, lr: float = 0.05) -> None:
        super().__init__()
        torch.manual_seed(seed)
        self.net = nn.Sequential(nn.Linear(FEATURES, 16), nn.Tanh(), nn.Linear(16, CLASSES))
        self.unused = nn.Parameter(torch.ones(3))
        self.register_buffer("constant", torch.full((3,), seed))
        self.register_buffer("sixteen", torch.full((3,), float(seed), dtype=torch.bfloat16))
        self.metrics = MetricCollection({"acc": MulticlassAccuracy(CLASSES, average="micro")})
        self.values = CatMetric()
        self.lr = lr

    def loss(self, batch: list[Tensor]) -> Tensor:
        return nn.functional.cross_entropy(self.net(batch[0]), batch[1])

    def training_step(self, batch: list[Tensor], batch_idx: int) -> Tensor:
        loss = self.loss(batch)
        self.log("loss", loss, on_epoch=True, on_step=False, sync_dist=True)
        return loss

    def validation_step(self, batch: list[Tensor], batch_idx: int) -> None:
        self.metrics(self.net(batch[0]), batch[1])
        self.values(batch[0][:, 0])
        self.log("val_loss", self.loss(batch), sync_dist=True)
        self.log("val_max", batch[0].max(), reduce_fx="max", sync_dist=True)
        self.log("val_rows", float(len(batch[1])), reduce_fx="sum", sync_dist=True)
        self.log_dict(self.metrics)

    def on_validation_epoch_end(self) -> None:
        self.log("val_values", self.values.compute().sum())
        self.samples = len(self.values.compute())
        self.values.reset()

    test_step = validation_step

    def on_test_epoch_end(self) -> None:
        self.on_validation_epoch_end()

    def predict_step(self, batch: list[Tensor], batch_idx: int) -> Tensor:
        return self.net(batch[0])

    def configure_optimizers(self) -> Any:
        # Not Adam: to it, a sum of gradients is as good as their average. Weight decay moves a
        # parameter whose gradient is zero instead of None.
        return torch.optim.SGD(self.parameters(), lr=self.lr, momentum=0.9, weight_decay=0.1)


def samples(count: int) -> TensorDataset:
    generator = torch.Generator().manual_seed(7)
    inputs = torch.randn(count, FEATURES, generator=generator)
    return TensorDataset(inputs, torch.randint(CLASSES, (count,), generator=generator))


def loader(count: int, global_batch: int) -> DataLoader:
    """Batches whose union over the ranks is one batch of one process, in its order."""
    hvd.init()
    sampler = DistributedSampler(samples(count), hvd.size(), hvd.rank(), shuffle=False)
    return DataLoader(samples(count), batch_size=global_batch // hvd.size(), sampler=sampler)


def trainer(**arguments: Any) -> pl.Trainer:
    defaults = {
        "strategy": "horovod", "accelerator": "cpu", "logger": False,
        "enable_checkpointing": False, "enable_progress_bar": False, "enable_model_summary": False,
    }  # fmt: skip
    return pl.Trainer(**{**defaults, **arguments})


def weights(model: pl.LightningModule) -> dict[str, Tensor]:
    return {name: value.detach().clone() for name, value in model.state_dict().items()}


def train(alone: bool = False, **arguments: Any) -> dict[str, Any]:
    """Weights after 20 steps of a global batch of 8; `alone` takes the all-reduce out."""
    run = trainer(max_epochs=2, **{"accumulate_grad_batches": 1, **arguments})
    assert isinstance(run.strategy, HorovodStrategy)
    model = Net(seed=1 + run.global_rank)  # broadcast makes them equal
    if alone:
        run.strategy._average = False
    finish, reduced = GradientBuckets.finish, []
    GradientBuckets.finish = lambda buckets: (reduced.append(1), finish(buckets))  # type: ignore
    run.fit(model, loader(80, 8))
    return {
        "weights": weights(model), "steps": run.global_step, "world": run.world_size,
        "reduced": len(reduced), "loss": float(run.callback_metrics["loss"]),
    }  # fmt: skip


def assert_equal(a: dict[str, Tensor], b: dict[str, Tensor]) -> None:
    assert a.keys() == b.keys()
    for name in a:
        torch.testing.assert_close(a[name], b[name], rtol=1e-6, atol=1e-6, msg=name)


class TestGradients:
    @pytest.mark.parametrize(
        "arguments",
        [
            {},
            {"gradient_clip_val": 0.1},
            {"gradient_clip_val": 0.01, "gradient_clip_algorithm": "value"},
            {"accumulate_grad_batches": 3},  # 10 batches: the last window is short
        ],
        ids=lambda arguments: next(iter(arguments), "plain"),
    )
    def test_weights_are_those_of_one_process(
        self, launch: Callable, arguments: dict[str, Any]
    ) -> None:
        one = launch(train, 1, **arguments)[0]
        ranks = launch(train, 2, **arguments)
        assert [rank["world"] for rank in ranks] == [2, 2]
        assert ranks[0]["steps"] == one["steps"] == (8 if "accumulate" in str(arguments) else 20)
        for rank in ranks:
            assert_equal(rank["weights"], one["weights"])
            assert rank["loss"] == pytest.approx(one["loss"], rel=1e-6)
            assert rank["reduced"] == rank["steps"]  # not once a batch, when they accumulate
        assert torch.equal(ranks[0]["weights"]["unused"], torch.ones(3))

    def test_that_comparison_fails_without_the_all_reduce(self, launch: Callable) -> None:
        one = launch(train, 1)[0]
        for rank in launch(train, 2, alone=True):
            with pytest.raises(AssertionError):
                assert_equal(rank["weights"], one["weights"])

    def test_bf16_mixed_trains_alike_on_all_ranks(self, launch: Callable) -> None:
        one = launch(train, 1, precision="bf16-mixed")[0]
        first, second = launch(train, 2, precision="bf16-mixed")
        assert_equal(first["weights"], second["weights"])
        assert first["loss"] == pytest.approx(one["loss"], rel=2e-2)  # bfloat16 has 3 digits


class Convolutions(Net):
    """Channels last, batch normalization, and no parameter without a gradient."""

    def __init__(self, seed: int = 1) -> None:
        super().__init__(seed)
        del self.unused
        self.net = nn.Sequential(
            nn.Unflatten(1, (3, 2, 2)), nn.Conv2d(3, 8, 3, padding=1), nn.BatchNorm2d(8),
            nn.Conv2d(8, 4, 1), nn.Flatten(), nn.Linear(16, CLASSES),
        ).to(memory_format=torch.channels_last)  # fmt: skip


def train_convolutions(bucket_mib: float) -> dict[str, Any]:
    """Weights of a model in evaluation mode, so that batch normalization does not mix samples."""
    early: list[int] = []
    finish = GradientBuckets.finish

    def count_early(buckets: GradientBuckets) -> None:
        early.append(sum(bucket.handle is not None for bucket in buckets.buckets))
        finish(buckets)

    GradientBuckets.finish = count_early  # type: ignore[method-assign]
    run = trainer(max_epochs=1, strategy=HorovodStrategy(bucket_mib=bucket_mib))
    model = Convolutions(seed=1 + run.global_rank).eval()
    run.fit(model, loader(80, 8))
    strides = [parameter.grad.stride() == parameter.stride() for parameter in model.parameters()]
    return {"weights": weights(model), "early": early, "strides": all(strides)}


def test_many_buckets_leave_during_backward(launch: Callable) -> None:
    one = launch(train_convolutions, 1, bucket_mib=8)[0]
    for rank in launch(train_convolutions, 2, bucket_mib=1e-4):  # 26 numbers
        assert_equal(rank["weights"], one["weights"])
        assert len(rank["early"]) == 10 and min(rank["early"]) == 3
        assert rank["strides"]


def train_with_running_means() -> dict[str, Any]:
    run = trainer(max_epochs=2)
    model = Convolutions()
    kept: list[Tensor] = []
    model.on_validation_epoch_end = lambda: kept.append(model.net[2].running_mean.clone())
    run.fit(model, loader(80, 8), DataLoader(samples(16), batch_size=4))
    return {"running": kept, "loss": float(run.callback_metrics["val_loss"])}


def test_running_means_of_rank_0_are_evaluated(launch: Callable) -> None:
    first, second = launch(train_with_running_means, 2)
    assert len(first["running"]) == 3  # the first is the sanity check
    assert first["running"][1].abs().sum() > 0
    for mine, other in zip(first["running"], second["running"]):
        assert torch.equal(mine, other)


class Branches(pl.LightningModule):
    """Each rank uses another branch, and one is used by none, in manual optimization."""

    def __init__(self) -> None:
        super().__init__()
        torch.manual_seed(0)
        self.branches = nn.ModuleList(nn.Linear(FEATURES, 1) for _ in range(3))
        self.frozen = nn.Linear(2, 2).requires_grad_(False)
        self.automatic_optimization = False

    def training_step(self, batch: list[Tensor], batch_idx: int) -> None:
        optimizer = self.optimizers()
        optimizer.zero_grad()
        self.manual_backward(self.branches[self.global_rank](batch[0]).mean())
        self.gradients = [branch.weight.grad for branch in self.branches]
        optimizer.step()

    def configure_optimizers(self) -> Any:
        return torch.optim.SGD(self.parameters(), lr=0.1)


def train_branches() -> dict[str, Any]:
    run = trainer(max_epochs=1, limit_train_batches=1)
    model = Branches()
    batches = loader(8, 8)
    run.fit(model, batches)
    return {"gradients": model.gradients, "mean": next(iter(batches))[0].mean(dim=0)}


def test_parameters_that_some_ranks_do_not_use(launch: Callable) -> None:
    ranks = launch(train_branches, 2)
    for rank in ranks:
        first, second, third = rank["gradients"]
        torch.testing.assert_close(first[0], ranks[0]["mean"] / 2)
        torch.testing.assert_close(second[0], ranks[1]["mean"] / 2)
        assert third is None


def evaluate(count: int, batch: int) -> dict[str, Any]:
    """Validation and test through Lightning's own sampler, on `count` samples."""
    run = trainer()
    model = Net()
    batches = DataLoader(samples(count), batch_size=batch)
    validated = run.validate(model, batches, verbose=False)[0]
    visited = model.samples
    tested = run.test(model, batches, verbose=False)[0]
    return {"validate": validated, "test": tested, "visited": [visited, model.samples]}


@pytest.mark.parametrize("count", [2, 9, 33])
def test_metrics_are_those_of_one_process(launch: Callable, count: int) -> None:
    one = launch(evaluate, 1, count=count, batch=8)[0]
    assert one["visited"] == [count, count] and one["validate"]["val_rows"] == count
    for rank in launch(evaluate, 2, count=count, batch=4):
        assert rank["visited"] == [count, count]
        assert rank["validate"] == pytest.approx(one["validate"], rel=1e-6)
        assert rank["test"] == pytest.approx(one["test"], rel=1e-6)


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
        for dtype in (torch.bool, torch.bfloat16, torch.int16, torch.float64)
    }
    gradient = torch.ones(2, requires_grad=True)
    (strategy.all_gather(gradient * (rank + 1), sync_grads=True) ** 2).sum().backward()
    return {
        "gathered": gathered, "reduced": reduced, "odd": odd, "inference": inference,
        "ragged": strategies.collectives.gather_tensors(torch.full((rank, 2), rank)),
        "integer": strategy.reduce(torch.tensor(rank * 3), reduce_op="mean"),
        "broadcast": strategy.broadcast({"from": rank}, src=1),
        "all": strategy.reduce_boolean_decision(rank == 0, all=True),
        "any": strategy.reduce_boolean_decision(rank == 0, all=False),
        "gradient": gradient.grad, "ranks": [strategy.local_rank, strategy.node_rank],
    }  # fmt: skip


def test_collectives(launch: Callable) -> None:
    ranks = launch(collectives, 2)
    for index, rank in enumerate(ranks):
        assert rank["gathered"].tolist() == [[1, 5], [2, 10]]
        assert rank["inference"].tolist() == [1.0 * (index + 1), 5.0 * (index + 1)]
        reduced = {op: value.tolist() for op, value in rank["reduced"].items()}
        assert reduced == {"mean": [1.5, 7.5], "sum": [3, 15], "max": [2, 10]}
        assert {name: value.tolist() for name, value in rank["odd"].items()} == {
            "torch.bool": [False, True], "torch.bfloat16": [0, 1],
            "torch.int16": [0, 1], "torch.float64": [0, 1],
        }  # fmt: skip
        assert [t.shape for t in rank["ragged"]] == [(0, 2), (1, 2)]
        assert rank["integer"].item() == 1.5
        assert rank["broadcast"] == {"from": 1}
        assert (rank["all"], rank["any"]) == (False, True)
        assert rank["ranks"] == [index, 0]
        # d/dx of the sum over ranks of (x_r (r+1))^2, which both ranks compute: 2 * 2 x (r+1)^2
        assert rank["gradient"].tolist() == [4.0 * (index + 1) ** 2] * 2


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


def all_entry_points(checkpoint: str) -> dict[str, Any]:
    """Fit, validate, test, predict with one Trainer; resume with a second; then a third."""
    model, batches = Net(), loader(64, 8)
    run = trainer(max_epochs=1)
    run.fit(model, batches, DataLoader(samples(17), batch_size=4))
    run.validate(model, DataLoader(samples(17), batch_size=4), verbose=False)
    run.test(model, DataLoader(samples(17), batch_size=4), verbose=False)
    predictions = run.predict(model, DataLoader(samples(16), batch_size=4))
    run.save_checkpoint(checkpoint)
    # Rank 1 has no such file: rank 0 reads it for all.
    path = checkpoint if run.global_rank == 0 else "/nowhere/to/be/found.ckpt"
    resumed, again = trainer(max_epochs=2), Net(seed=5 + run.global_rank)
    resumed.fit(again, batches, ckpt_path=path)
    uninterrupted = Net()
    trainer(max_epochs=2).fit(uninterrupted, batches)
    return {
        "predicted": sum(len(part) for part in predictions), "steps": resumed.global_step,
        "resumed": weights(again), "uninterrupted": weights(uninterrupted),
        "hooks": run.strategy._buckets,
    }  # fmt: skip


def test_all_entry_points_and_resume(launch: Callable, tmp_path: Path) -> None:
    ranks = launch(all_entry_points, 2, checkpoint=str(tmp_path / "two.ckpt"))
    one = launch(all_entry_points, 1, checkpoint=str(tmp_path / "one.ckpt"))[0]
    for rank in ranks:
        assert rank["predicted"] == 8 and rank["steps"] == 16 and rank["hooks"] is None
        assert_equal(rank["resumed"], rank["uninterrupted"])
        assert_equal(rank["resumed"], one["resumed"])
    # A checkpoint of two ranks holds what one of one rank holds.
    two, one = (torch.load(tmp_path / f"{n}.ckpt", weights_only=False) for n in ("two", "one"))
    assert two.keys() == one.keys()
    assert_equal(two["state_dict"], one["state_dict"])
    for key, state in one["optimizer_states"][0]["state"].items():
        assert_equal(two["optimizer_states"][0]["state"][key], state)


class Warm(Net):
    """Rank 0 brings an optimizer state along; the others must get it."""

    def configure_optimizers(self) -> Any:
        optimizer = super().configure_optimizers()
        if self.global_rank == 0:
            self.loss([torch.ones(2, FEATURES), torch.zeros(2, dtype=torch.int64)]).backward()
            optimizer.step()
            optimizer.zero_grad()
        return optimizer


def warm_optimizer() -> Any:
    run = trainer(max_epochs=1, limit_train_batches=0)
    run.fit(Warm(), loader(8, 8))
    return run.optimizers[0].state_dict()["state"]


def test_optimizer_state_of_rank_0_is_everyones(launch: Callable) -> None:
    first, second = launch(warm_optimizer, 2)
    assert first and first.keys() == second.keys()
    for key in first:
        assert_equal(first[key], second[key])


class Boom(Net):
    def training_step(self, batch: list[Tensor], batch_idx: int) -> Tensor:
        if self.global_rank == 1 and batch_idx == 2:
            raise RuntimeError("boom on rank 1")
        return super().training_step(batch, batch_idx)


def explode() -> None:
    trainer(max_epochs=1).fit(Boom(), loader(80, 8))


def test_an_exception_on_one_rank_ends_all(launch: Callable) -> None:
    with pytest.raises(AssertionError, match="boom on rank 1"):
        launch(explode, 2)


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
    run = trainer(max_epochs=1)
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
            assert strategy.root_device == torch.device("cuda", rank)

    def test_or_the_only_one_that_it_was_shown(self, monkeypatch: pytest.MonkeyPatch) -> None:
        strategy = self.strategy(monkeypatch, 1, 3)
        monkeypatch.setenv("CUDA_VISIBLE_DEVICES", "3")
        assert strategy.root_device == torch.device("cuda", 0)

    def test_and_is_told_when_there_is_none(self, monkeypatch: pytest.MonkeyPatch) -> None:
        strategy = self.strategy(monkeypatch, 2, 2)
        monkeypatch.setattr(hvd, "local_size", lambda: 3)
        with pytest.raises(MisconfigurationException, match="3 ranks on .*, which has 2 GPUs"):
            _ = strategy.root_device

    @pytest.mark.parametrize("nccl", [True, False])
    def test_missing_nccl_is_loud(self, monkeypatch: pytest.MonkeyPatch, nccl: bool) -> None:
        strategy = self.strategy(monkeypatch, 1, 0)
        strategy.accelerator = CPUAccelerator()
        monkeypatch.setattr(strategy.accelerator, "setup_device", lambda device: None)
        monkeypatch.setattr(hvd, "nccl_built", lambda: nccl)
        with warnings.catch_warnings(record=True) as caught:
            warnings.simplefilter("always")
            strategy.setup_environment()
        assert any("HOROVOD HAS NO NCCL" in str(w.message) for w in caught) is not nccl
        assert strategy.operations == ("NCCL" if nccl else "Gloo")


class TestOneProcess:
    """Without horovodrun: one process, and arguments that are refused."""

    def test_trains_alone(self) -> None:
        run = trainer(max_epochs=1)
        run.fit(Net(), loader(16, 8))
        assert (run.world_size, run.global_rank, run.global_step) == (1, 0, 2)

    def test_sync_batchnorm_is_refused(self) -> None:
        with pytest.raises(MisconfigurationException, match="sync_batch"):
            trainer(max_epochs=1, sync_batchnorm=True).fit(Net(), loader(16, 8))

    def test_bucket_size_is_checked(self) -> None:
        with pytest.raises(MisconfigurationException, match="bucket_mib"):
            HorovodStrategy(bucket_mib=0)

    def test_operations_are_named(self) -> None:
        run = trainer()
        assert run.strategy.operations in ("Gloo", "MPI")

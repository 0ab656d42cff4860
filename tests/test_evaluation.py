"""Evaluation on several ranks: each sample once, rank 0's buffers, no collective alone."""

from __future__ import annotations

import math
import warnings
from collections.abc import Callable
from types import SimpleNamespace
from typing import Any

import pytest
import pytorch_lightning as pl
import torch
from lightning_fabric.utilities.distributed import DistributedSamplerWrapper
from pytorch_lightning.callbacks import EMAWeightAveraging
from pytorch_lightning.strategies import SingleDeviceStrategy
from pytorch_lightning.utilities.combined_loader import CombinedLoader
from torch import Tensor, nn
from torch.utils.data import (
    BatchSampler,
    DataLoader,
    Dataset,
    DistributedSampler,
    Sampler,
    SubsetRandomSampler,
)
from torchmetrics import MaxMetric, MeanMetric, SumMetric

from strategies import HorovodStrategy
from strategies.evaluation import batches_of_all
from strategies.metrics import warning_cache
from strategies.samplers import draw, each_sample_once
from tests.matrix.precision import convolutions
from tests.matrix.trainings import (
    FEATURES,
    RANK,
    SIZE,
    Measured,
    Net,
    Ragged,
    loader,
    samples,
    trainer,
)
from tests.test_resuming import OwnLoader, Shares


class Evaluated(Net):
    def validation_step(self, batch: list[Tensor], batch_idx: int) -> None:
        loss = nn.functional.cross_entropy(self(batch[0]), batch[1])
        self.log("val_loss", loss, sync_dist=True)


def train_with_running_means(averaged: bool, stream: bool) -> dict[str, Any]:
    callbacks = [EMAWeightAveraging()] if averaged else []
    run = trainer("horovod", callbacks=callbacks, limit_val_batches=1)
    model = Evaluated(convolutions(normalization=True))
    kept: list[Tensor] = []

    def keep(layer: Any, *_: Any) -> None:
        if not layer.training:
            kept.append(layer.running_mean.clone())

    model.net[2].register_forward_hook(keep)
    begins: list[Tensor] = []

    def begin() -> None:
        begins.append(model.net[2].running_mean.clone())
        if not stream:  # whose first step not all ranks may have
            model.net[2].running_mean += RANK  # as averages that the module puts in

    model.on_validation_epoch_start = begin
    run.fit(model, loader(), DataLoader(Shares() if stream else samples(16), batch_size=8))
    loss = float(run.callback_metrics["val_loss"])
    return {"running": kept, "begins": begins, "loss": loss}


@pytest.mark.parametrize("stream", [False, True])
@pytest.mark.parametrize("averaged", [False, True])
def test_running_means_of_rank_0_are_evaluated(
    launch: Callable, averaged: bool, stream: bool
) -> None:
    """Also those that a callback puts in their place for the time of an evaluation."""
    first, second = launch(train_with_running_means, 2, averaged=averaged, stream=stream)
    assert len(first["running"]) == 3  # the first is the sanity check
    assert first["running"][1].abs().sum() > 0
    for where in ("running", "begins"):
        for mine, other in zip(first[where], second[where], strict=True):
            assert torch.equal(mine, other)


class Caches(Evaluated):
    """Its steps let a mask grow with what the rank has seen, and register a buffer on some ranks;
    and a buffer that all have moves on each rank by itself."""

    def __init__(self) -> None:
        super().__init__()
        self.register_buffer("mask", torch.ones(2), persistent=False)
        self.register_buffer("moved", torch.zeros(1))
        self.evaluated: list[float] = []

    def training_step(self, batch: list[Tensor], batch_idx: int) -> Tensor:
        self.mask = torch.ones(3 + batch_idx + 7 * RANK)
        self.moved += 1 + RANK
        if (RANK == 0 or batch_idx > 5) and not hasattr(self, "late"):
            self.register_buffer("late", torch.ones(4), persistent=False)
        return super().training_step(batch, batch_idx)

    def validation_step(self, batch: list[Tensor], batch_idx: int) -> None:
        super().validation_step(batch, batch_idx)
        self.evaluated.append(float(self.moved))

    def test_step(self, batch: list[Tensor], batch_idx: int) -> None:
        self.log("test_loss", self(batch[0]).mean(), sync_dist=True)


def train_with_caches(each_batch: bool) -> dict[str, Any]:
    model, batches = Caches(), DataLoader(samples(16), batch_size=8)
    strategy = HorovodStrategy(broadcast_buffers=each_batch)
    run = trainer(strategy, max_epochs=1, val_check_interval=4)
    with warnings.catch_warnings(record=True) as caught:
        warnings.simplefilter("always")
        run.fit(model, loader(), batches)
        run.test(model, batches, verbose=False)
        run.fit_loop.max_epochs = 2
        run.fit(model, loader())
    texts = [str(warning.message) for warning in caught]
    return {
        "evaluated": model.evaluated, "mask": len(model.mask),
        "told": [text for text in texts if "on some ranks only" in text],
        "apart": [text.partition(" differs")[0] for text in texts if "differs between" in text],
    }  # fmt: skip


@pytest.mark.parametrize("each_batch", [False, True])
def test_buffers_that_steps_make_or_let_grow_are_not_waited_for(
    launch: Callable, each_batch: bool
) -> None:
    """Those that all ranks have alike are shared; warnings name the others. A rank has its own."""
    first, second = launch(train_with_caches, 2, each_batch=each_batch)
    assert first["evaluated"] == second["evaluated"] and max(first["evaluated"]) > 1
    assert "the buffers late, mask are there on some ranks only" in first["told"][0]
    assert "the buffers mask are there" in first["told"][-1]
    assert (first["mask"], second["mask"]) == (12, 19)
    assert set(first["apart"]) == (set() if each_batch else {"the buffer moved"})


class LogsItsOwn(Evaluated):
    def validation_step(self, batch: list[Tensor], batch_idx: int) -> None:
        super().validation_step(batch, batch_idx)
        self.log("own", float(RANK))
        self.log("of rank 0", float(RANK), rank_zero_only=True)
        self.log("largest", MaxMetric()(torch.tensor(float(RANK))), sync_dist=True)

    test_step = validation_step


class TrainsWithItsOwn(Net):
    def training_step(self, batch: list[Tensor], batch_idx: int) -> Tensor:
        self.log("steps", float(RANK), on_step=True, on_epoch=False)
        self.log("epochs", float(RANK), on_step=True, on_epoch=True)
        self.log("all", float(RANK), on_step=False, on_epoch=True, sync_dist=True)
        return super().training_step(batch, batch_idx)


class LogsItsOwnOfTwo(Net):
    def validation_step(self, batch: list[Tensor], batch_idx: int, dataloader_idx: int) -> None:
        self.log("of", float(RANK))


def evaluate_what_is_its_own() -> list[str]:
    batches = DataLoader(samples(16), batch_size=4)
    warning_cache.clear()  # other tests run on these ranks too
    with warnings.catch_warnings(record=True) as caught:
        warnings.simplefilter("always")
        trainer("horovod").validate(LogsItsOwn(), batches, verbose=False)
        trainer("horovod").test(LogsItsOwn(), batches, verbose=False)
        trainer("horovod").validate(LogsComputed(), batches, verbose=False)
        trainer("horovod").validate(LogsItsOwnOfTwo(), [batches, batches], verbose=False)
        trainer("horovod", max_epochs=2).fit(TrainsWithItsOwn(), loader())
    return [str(warning.message) for warning in caught if "sync_dist" in str(warning.message)]


def test_what_a_rank_logs_by_itself_is_told_once(launch: Callable) -> None:
    (first, second), (alone,) = (
        launch(evaluate_what_is_its_own, 2),
        launch(evaluate_what_is_its_own, 1),
    )
    names = [text.partition(" differs between ranks, and rank 0")[0] for text in first]
    assert names == ["own", "of/dataloader_idx_0", "of/dataloader_idx_1", "epochs"]
    assert second == alone == []


def evaluate_single_samples() -> None:
    """3 samples in batches of one on 2 ranks: rank 0 has a batch that rank 1 has not."""
    trainer("horovod").validate(Measured(), DataLoader(samples(3), batch_size=1))


class SynchronizesItself(Net):
    """Reads what all ranks have counted where nothing is logged."""

    def __init__(self) -> None:
        super().__init__()
        self.sum, self.ragged = SumMetric(), Ragged()
        self.read: list[tuple[float, int]] = []

    def validation_step(self, batch: list[Tensor], batch_idx: int) -> None:
        self.sum.update(batch[0][:, 0])
        self.ragged.update(batch[0][:, 0])

    def on_validation_epoch_end(self) -> None:
        with self.sum.sync_context(), self.ragged.sync_context():
            self.read.append((float(self.sum.sum_value), len(self.ragged.each)))
        self.read.append((float(self.sum.sum_value), len(self.ragged.each)))


def synchronize_in_a_hook() -> list[tuple[float, int]]:
    trainer("horovod").validate(model := SynchronizesItself(), DataLoader(samples(9), 2))
    return model.read


def test_metrics_may_be_synchronized_by_hand(launch: Callable) -> None:
    firsts = samples(9).tensors[0][:, 0]
    for rank, (all_, own) in enumerate(launch(synchronize_in_a_hook, 2)):
        assert all_ == (pytest.approx(float(firsts.sum()), rel=1e-6), 9)
        assert own[0] == pytest.approx(float(firsts[rank::2].sum()), rel=1e-6)


class WithoutIndex(Net):
    """Its step does not ask for the number of the batch, and the collective is a metric's own."""

    def __init__(self) -> None:
        super().__init__()
        self.metric = SumMetric(dist_sync_on_step=True)

    def validation_step(self, batch: list[Tensor]) -> None:
        self.log("sum", self.metric(batch[0].sum()))


def evaluate_single_samples_without_index() -> None:
    for count in (4, 3):  # all ranks have equally many batches of 4
        trainer("horovod").validate(WithoutIndex(), DataLoader(samples(count), batch_size=1))


class GathersPredictions(Net):
    def predict_step(self, batch: list[Tensor], batch_idx: int) -> Tensor:
        return self.all_gather(batch[0])


def predict_with_a_collective() -> None:
    """9 samples: 5 and 4 in batches of 4."""
    trainer("horovod").predict(GathersPredictions(), DataLoader(samples(9), batch_size=4))


class GathersInHooks(Evaluated):
    """With all ranks at the beginning of each evaluation; asked to, also behind a later batch."""

    def __init__(self, later: bool) -> None:
        super().__init__()
        self.later, self.gathered = later, 0

    def on_validation_batch_start(self, batch: list[Tensor], batch_idx: int) -> None:
        if batch_idx == 0:
            self.gathered += len(self.all_gather(batch[0]))

    def on_validation_batch_end(self, outputs: Any, batch: list[Tensor], batch_idx: int) -> None:
        if batch_idx == 0 or self.later:
            self.gathered += len(self.all_gather(batch[0]))


def gather_in_a_hook() -> None:
    trainer("horovod").validate(GathersInHooks(True), DataLoader(samples(3), batch_size=1))


def evaluate_a_part_of_single_samples() -> None:
    """5 and 4 batches, of which 3 and 2 are taken."""
    run = trainer("horovod", limit_val_batches=0.6)
    run.validate(GathersInHooks(True), DataLoader(samples(9), batch_size=1))


def gather_in_hooks_of_all() -> int:
    """Three validations, each of which ends with a batch of rank 0 alone."""
    model = GathersInHooks(False)
    trainer("horovod", max_epochs=3).fit(model, loader(), DataLoader(samples(3), batch_size=1))
    return model.gathered


def test_collectives_in_hooks_of_batches_that_all_ranks_have(launch: Callable) -> None:
    assert launch(gather_in_hooks_of_all, 2) == [16, 16]  # with those of the sanity check


class GathersOfTheFirst(Net):
    gathered = 0

    def validation_step(self, batch: list[Tensor], batch_idx: int, dataloader_idx: int = 0) -> None:
        if dataloader_idx == 0:
            self.gathered += len(self.all_gather(batch[0]))


class GathersByIterator(Net):
    gathered = 0

    def validation_step(self, dataloader_iter: Any) -> None:
        batch, _, _ = next(dataloader_iter)
        self.gathered += len(self.all_gather(batch[0]))


def gather_of_two_loaders(by_iterator: bool) -> int:
    """Also where a batch of the sanity check had the number that another has later, and was there
    on rank 0 alone."""
    model = GathersByIterator() if by_iterator else GathersOfTheFirst()
    loaders = [DataLoader(samples(count), batch_size=1) for count in (10, 4 if by_iterator else 3)]
    trainer("horovod", max_epochs=1).fit(model, loader(), loaders)
    return model.gathered


@pytest.mark.parametrize(("by_iterator", "batches"), [(False, 2 + 5), (True, 2 + 2 + 5 + 2)])
def test_collectives_in_batches_of_several_loaders(
    launch: Callable, by_iterator: bool, batches: int
) -> None:
    assert launch(gather_of_two_loaders, 2, by_iterator=by_iterator) == [2 * batches] * 2


def gather_by_iterator() -> None:
    loaders = [DataLoader(samples(count), batch_size=1) for count in (4, 3)]
    trainer("horovod").validate(GathersByIterator(), loaders)


@pytest.mark.parametrize(
    "evaluate",
    [
        gather_by_iterator,
        evaluate_single_samples,
        evaluate_single_samples_without_index,
        predict_with_a_collective,
        gather_in_a_hook,
        evaluate_a_part_of_single_samples,
    ],
)
def test_a_collective_that_some_ranks_would_not_join(
    launch_anew: Callable, evaluate: Callable
) -> None:
    batch = 2 if evaluate is evaluate_a_part_of_single_samples else 1
    told = f"batch {batch} of the .*tion is there on some ranks only"
    with pytest.raises(AssertionError, match=told):
        launch_anew(evaluate, 2)


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
    results = {}
    for name, sampler in (
        ("parts", Parts(samples(25), SIZE, RANK)),
        ("all", DistributedSampler(samples(8), 1, 0, shuffle=False)),
        ("named", type("Mine", (DistributedSampler,), {})(samples(25), SIZE, RANK, shuffle=False)),
    ):
        model = Sees()
        batches = DataLoader(sampler.dataset, batch_size=2, sampler=sampler)
        with warnings.catch_warnings(record=True) as caught:
            run = trainer("horovod", use_distributed_sampler=False)
            run.validate(model, batches, verbose=False)
        results[name] = torch.cat(model.seen).tolist()
        results[f"{name} told"] = [
            str(w.message) for w in caught if "count twice" in str(w.message)
        ]
    return results


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
    model, data = Sees(), DataLoader(samples(5), batch_sampler=batches)
    trainer("horovod", use_distributed_sampler=False).validate(model, data, verbose=False)
    assert len(batches.sampler) == 3  # as it was
    return torch.cat(model.seen).tolist()


def test_evaluation_in_batches_of_ones_own(launch: Callable) -> None:
    feature = samples(5).tensors[0][:, 0].tolist()
    assert launch(evaluate_in_buckets, 2) == [feature[::2], feature[1::2]]


def test_evaluation_in_batches_of_ones_own_copies_no_data() -> None:
    data = samples(5)
    world: Any = SimpleNamespace(size=2, rank=1)
    batches: Any = InBuckets(DistributedSampler(data, 2, 1, shuffle=False))
    batches.data = data  # as to sort them by their lengths
    once = each_sample_once(DataLoader(data, batch_sampler=batches), world, "validate")
    share: Any = once.batch_sampler
    assert share.sampler is not batches.sampler and share.data is share.sampler.dataset is data


class LogsSteps(Net):
    def validation_step(self, batch: Any, batch_idx: int) -> None:
        parts = [part for part in batch.values() if part is not None]
        self.log("here", float(len(parts)), on_step=True, on_epoch=True, sync_dist=True)


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


def test_a_loader_of_training_that_is_evaluated_too() -> None:
    """Each keeps workers of its own: training goes on with its samples, one of them twice."""
    sampler = DistributedSampler(samples(9), 2, 1, shuffle=False)
    workers = {"num_workers": 1, "persistent_workers": True}
    training = DataLoader(samples(9), batch_size=4, sampler=sampler, **workers)
    assert [len(x) for x, _ in training] == [4, 1]
    world: Any = SimpleNamespace(size=2, rank=1)
    evaluation = each_sample_once(training, world, "validate")
    for _ in range(2):
        assert [len(x) for x, _ in evaluation] == [3, 1]
        assert [len(x) for x, _ in training] == [4, 1]


def evaluate_in_orders_of_its_own() -> dict[str, Any]:
    def seen(batches: DataLoader, **arguments: Any) -> list[float]:
        model = Sees()
        run = trainer("horovod", **arguments)
        run.validate(model, batches, verbose=False)
        shares = run.strategy.world.gather_objects(torch.cat(model.seen).tolist())
        return sorted(value for share in shares for value in share)

    torch.manual_seed(RANK)  # as after training with random numbers of each rank's own
    subset = SubsetRandomSampler(range(10))
    sampler = DistributedSampler(samples(67), SIZE, RANK, shuffle=True)
    data = DataLoader(samples(67), batch_size=8, sampler=sampler)
    model = Sees()
    trainer("horovod").fit(model, data, data)
    single, one_by_one = DataLoader(samples(67), None, sampler=sampler), Sees()
    trainer("horovod", max_epochs=1).fit(one_by_one, data, single)
    alone, left = None, model.mean.dist_sync_fn is None
    if RANK == 0:
        alone = pl.Trainer(
            strategy=SingleDeviceStrategy("cpu"), logger=False, enable_progress_bar=False
        ).validate(model, DataLoader(samples(4), batch_size=4), verbose=False)
    return {
        "drawn": seen(DataLoader(samples(), batch_size=2, sampler=subset)),
        "pairs": seen(DataLoader(Pairs(), batch_size=None)),
        "shuffled": seen(
            DataLoader(samples(), batch_size=4, shuffle=True), limit_val_batches=1
        ),
        "one by one": [len(one_by_one.seen), sum(len(batch) for batch in one_by_one.trained)],
        "shares": [torch.cat(model.trained[start : start + 5]).tolist() for start in (0, 5)],
        "alone": alone, "left": left,
    }  # fmt: skip


def test_evaluation_in_orders_of_its_own(launch: Callable) -> None:
    """Each sample once on all ranks together, and training goes on as it was."""
    feature = samples().tensors[0][:, 0]
    for rank, result in enumerate(launch(evaluate_in_orders_of_its_own, 2)):
        assert result["drawn"] == sorted(feature[:10].tolist())
        assert result["pairs"] == [0, 0, 1, 1, 2, 2, 3, 3, 4, 4]
        assert len(result["shuffled"]) == 8 and result["shuffled"] != sorted(feature[:8].tolist())
        expected = DistributedSampler(samples(67), 2, rank, shuffle=True)  # 34, one twice
        for epoch, share in enumerate(result["shares"]):
            expected.set_epoch(epoch)
            assert share == samples(67).tensors[0][list(expected), 0].tolist()
        # 34 and 33 validated beside two of the sanity check; of training one is there twice
        assert result["one by one"] == [2 + 34 - rank, 34]
        assert result["left"]  # by the strategy: metrics wait for nobody
        if rank == 0:  # after training, without rank 1
            assert result["alone"][0]["mean"] == pytest.approx(float(samples(4).tensors[0].mean()))


def test_each_evaluation_draws_an_order_of_its_own() -> None:
    sampler = DistributedSamplerWrapper(SubsetRandomSampler(range(64)), num_replicas=1, rank=0)
    world: Any = SimpleNamespace(broadcast_object=lambda order: order)
    first, second = (draw(sampler.dataset, world) for _ in range(2))
    assert sorted(first) == sorted(second) == [*range(64)] and first != second


class LogsComputed(Sees):
    def validation_step(self, batch: list[Tensor], batch_idx: int) -> None:
        self.mean.update(batch[0].mean())

    def on_validation_epoch_end(self) -> None:
        self.log("computed", self.mean.compute())
        self.mean.reset()

"""Modules, data and trainings that cases share."""

from __future__ import annotations

import os
from collections.abc import Callable
from typing import Any

import pytorch_lightning as pl
import torch
from pytorch_lightning.strategies import SingleDeviceStrategy, Strategy
from pytorch_lightning.trainer.states import TrainerFn
from torch import Tensor, nn
from torch.utils.data import DataLoader, DistributedSampler, TensorDataset
from torchmetrics import CatMetric, MaxMetric, MeanMetric, Metric, MetricCollection, SumMetric
from torchmetrics.classification import BinaryAUROC, MulticlassAccuracy, MulticlassF1Score

RANK, SIZE = (int(os.environ.get(f"HOROVOD_{name}", default)) for name, default in
              (("RANK", 0), ("SIZE", 1)))  # fmt: skip
FEATURES, CLASSES, GLOBAL_BATCH = 12, 5, 8
# To be read and set as trainings.DEVICE: run_cases is asked for others.
DEVICE = "cpu"  # or cuda
BUCKETS_ALONE = False  # with one rank too, gradients go through buckets and Horovod


def make(strategy: str, **options: Any) -> Strategy:
    """The strategy itself; `options` are of HorovodStrategy and mean nothing to the others."""
    if strategy == "horovod":
        from strategies import HorovodStrategy

        chosen = HorovodStrategy(**options)
        return with_buckets(chosen) if BUCKETS_ALONE and SIZE == 1 else chosen
    if strategy == "ddp":
        from strategies.ddp import ddp

        return ddp("cpu", find_unused_parameters=True)
    return SingleDeviceStrategy("cuda:0" if DEVICE == "cuda" else "cpu")


def with_buckets(strategy: Any) -> Strategy:
    """One rank whose gradients travel all the same: what can be tested with a single GPU."""
    setup = strategy.setup

    def setup_with_buckets(run: pl.Trainer) -> None:
        setup(run)
        if run.state.fn == TrainerFn.FITTING:
            strategy._buckets = strategy._make_buckets()

    strategy.setup = setup_with_buckets
    return strategy


def trainer(strategy: str | Strategy, **arguments: Any) -> pl.Trainer:
    defaults = {
        "accelerator": DEVICE, "logger": False, "max_epochs": 2, "enable_checkpointing": False,
        "enable_progress_bar": False, "enable_model_summary": False,
    }  # fmt: skip
    strategy = make(strategy) if isinstance(strategy, str) else strategy
    run = pl.Trainer(strategy=strategy, **{**defaults, **arguments})
    assert (run.world_size, run.global_rank) == (SIZE, RANK)
    return run


def samples(count: int = 80) -> TensorDataset:
    generator = torch.Generator().manual_seed(7)
    inputs = torch.randn(count, FEATURES, generator=generator)
    return TensorDataset(inputs, torch.randint(CLASSES, (count,), generator=generator))


def loader(count: int = 80, global_batch: int = GLOBAL_BATCH) -> DataLoader:
    """Batches whose union over the ranks is one batch of one process, in its order."""
    sampler = DistributedSampler(samples(count), SIZE, RANK, shuffle=False)
    return DataLoader(samples(count), batch_size=global_batch // SIZE, sampler=sampler)


class Net(pl.LightningModule):
    """A small classifier. Its optimizer is SGD: to Adam, a sum of gradients is as good as their
    average. Weight decay moves a parameter whose gradient is zero instead of None."""

    def __init__(self, net: nn.Module | None = None) -> None:
        super().__init__()
        torch.manual_seed(1 + RANK)  # only broadcasting makes ranks equal
        self.net = net or nn.Sequential(
            nn.Linear(FEATURES, 16), nn.Tanh(), nn.Linear(16, CLASSES)
        )  # fmt: skip
        for layer in self.net.modules():  # made by the caller, or above, on this rank alone
            if hasattr(layer, "reset_parameters"):
                layer.reset_parameters()

    def forward(self, x: Tensor) -> Tensor:
        return self.net(x)

    def training_step(self, batch: list[Tensor], batch_idx: int) -> Tensor:
        loss = nn.functional.cross_entropy(self(batch[0]), batch[1])
        self.log("loss", loss, on_epoch=True, on_step=False, sync_dist=True)
        return loss

    def configure_optimizers(self) -> Any:
        return torch.optim.SGD(self.parameters(), lr=0.05, momentum=0.9, weight_decay=0.1)


def results(run: pl.Trainer, model: pl.LightningModule, **extra: Any) -> dict[str, Any]:
    """What a training is compared by. A gradient left out must not exist as zeros elsewhere."""
    return {
        "weights": {name: value.detach().clone() for name, value in model.state_dict().items()},
        "steps": run.global_step,
        "metrics": {name: float(value) for name, value in run.callback_metrics.items()},
        "missing": [name for name, p in model.named_parameters() if p.grad is None],
        "optimizers": [optimizer.state_dict() for optimizer in run.optimizers],
        "schedulers": [config.scheduler.state_dict() for config in run.lr_scheduler_configs],
        **extra,
    }


def fit(strategy: str | Strategy, model: pl.LightningModule | None = None, **arguments: Any) -> Any:
    run, model = trainer(strategy, **arguments), model or Net()
    run.fit(model, loader())
    return results(run, model)


class NobodyUses(Net):
    def __init__(self) -> None:
        super().__init__()
        self.nobody = nn.Parameter(torch.ones(3))


class Ragged(Metric):
    """A list state of another length on each rank, and a reduction of one's own."""

    def __init__(self) -> None:
        super().__init__()
        self.add_state("values", default=[], dist_reduce_fx=None)
        self.add_state(
            "each", default=[], dist_reduce_fx=lambda x: torch.cat(list(x)).sort().values
        )
        self.add_state("largest", default=torch.tensor(0.0), dist_reduce_fx=lambda x: x.max())
        self.add_state("smallest", default=torch.tensor(9.0), dist_reduce_fx="min")
        self.add_state("average", default=torch.tensor(3.0), dist_reduce_fx="mean")

    def update(self, values: Tensor) -> None:
        self.values.append(values[values > 0])
        self.each += values.split(1)  # with a tensor for each sample
        self.largest = torch.maximum(self.largest, values.max())
        self.smallest = torch.minimum(self.smallest, values.min())

    def compute(self) -> Tensor:
        values = torch.cat([part.reshape(-1) for part in self.values]).sort().values
        order = (
            torch.arange(len(values), device=values.device) + 1.0
        )  # so that a repeated or missing value shows
        each = torch.cat(list(self.each)) if isinstance(self.each, list) else self.each
        middle = each.sort().values[len(each) // 3]
        return (values * order).sum() + middle + self.largest + self.smallest + self.average


class EachSample(Metric):
    """Lists with a tensor for each sample, some of them empty, and one of tuples, as detection has
    them. Ranks with fewer samples have fewer of them."""

    def __init__(self) -> None:
        super().__init__()
        for name in ("boxes", "scores", "masks"):
            self.add_state(name, default=[], dist_reduce_fx=None)

    def update(self, values: Tensor) -> None:
        for row in values:
            self.boxes.append(row[row > 0.5].unsqueeze(1).repeat(1, 4))
            self.scores.append(row[:1])
            self.masks.append(tuple(row[:2].tolist()))

    def _apply(self, fn: Callable) -> nn.Module:
        return super()._apply(fn, exclude_state=("masks",))

    def _sync_dist(self, dist_sync_fn: Any = None, process_group: Any = None) -> None:
        super()._sync_dist(dist_sync_fn, process_group)
        self.masks = self._gather_tuple_list(self.masks, process_group)

    @staticmethod
    def _gather_tuple_list(mine: list[Any], process_group: Any = None) -> list[Any]:
        """As torchmetrics' MeanAveragePrecision does it."""
        ranks: list[Any] = [None] * torch.distributed.get_world_size(process_group)
        torch.distributed.all_gather_object(ranks, mine, process_group)
        return [one[index] for index in range(len(ranks[0])) for one in ranks]

    def compute(self) -> Tensor:
        # Those of one sample, or the sum is another.
        samples = zip(self.boxes, self.scores, self.masks, strict=True)
        values = [box.sum() * score + sum(mask) * len(box) for box, score, mask in samples]
        return torch.stack([value.reshape(()) for value in values]).sort().values.sum()


class Measured(Net):
    def __init__(self) -> None:
        super().__init__()
        self.each_sample = EachSample()
        accuracy = MulticlassAccuracy(CLASSES, average="micro")
        self.collection = MetricCollection({"acc": accuracy, "f1": MulticlassF1Score(CLASSES)})
        self.ragged, self.auroc = Ragged(), BinaryAUROC()
        self.several = nn.ModuleList([CatMetric(), SumMetric(), MaxMetric(), MeanMetric()])

    def validation_step(self, batch: list[Tensor], batch_idx: int) -> None:
        scores = self(batch[0])
        self.collection(scores, batch[1])
        self.log_dict(self.collection)  # as objects
        self.ragged(batch[0][:, 0])
        self.each_sample.update(batch[0])
        self.log("each sample", self.each_sample)
        self.auroc(scores[:, 0].sigmoid(), (batch[1] == 0).int())
        self.log("ragged", self.ragged)
        for metric in self.several:
            metric.update(batch[0][:, 1])
        loss = nn.functional.cross_entropy(scores, batch[1])
        self.log("mean", loss, sync_dist=True)
        self.log("sum", float(len(batch[1])), reduce_fx="sum", sync_dist=True)
        self.log("min", batch[0].min(), reduce_fx="min", sync_dist=True)
        self.log("max", batch[0].max(), reduce_fx="max", sync_dist=True)
        # a collective in each batch: ranks must have equally many
        self.log("each", loss, on_step=True, on_epoch=True, sync_dist=True)

    def on_validation_epoch_start(self) -> None:
        for metric in [*self.several, self.auroc]:
            metric.reset()

    def on_validation_epoch_end(self) -> None:
        for metric in [*self.several, self.auroc]:
            self.log(type(metric).__name__, metric.compute().sum())

    def predict_step(self, batch: list[Tensor], batch_idx: int) -> Tensor:
        return batch[0]

    test_step = validation_step

    def on_test_epoch_start(self) -> None:
        self.on_validation_epoch_start()

    def on_test_epoch_end(self) -> None:
        self.on_validation_epoch_end()

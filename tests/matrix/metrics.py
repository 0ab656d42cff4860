"""Cases of metrics and evaluation."""

from __future__ import annotations

from typing import Any

import pytorch_lightning as pl
from pytorch_lightning.callbacks import Callback
from torch import Tensor
from torch.utils.data import DataLoader
from torchmetrics import MeanMetric, SumMetric

from tests.matrix.cases import case
from tests.matrix.trainings import (
    GLOBAL_BATCH,
    RANK,
    SIZE,
    Measured,
    Net,
    fit,
    loader,
    results,
    samples,
    trainer,
)


def evaluated(strategy: str, count: int) -> dict[str, Any]:
    """Validation and test of `count` samples through Lightning's own sampler."""
    model, batches = Measured(), DataLoader(samples(count), batch_size=GLOBAL_BATCH // SIZE)
    run = trainer(strategy)
    return {
        "validated": run.validate(model, batches, verbose=False)[0],
        "tested": run.test(model, batches, verbose=False)[0],
    }


PADS = "it repeats samples to make shares equal"


@case()
def metrics_of_even_shares(strategy: str) -> dict[str, Any]:
    return evaluated(strategy, 32)


@case(without_ddp=PADS)
def metrics_of_9_samples(strategy: str) -> dict[str, Any]:
    return evaluated(strategy, 9)


@case(without_ddp=PADS)
def metrics_of_one_sample_a_rank(strategy: str) -> dict[str, Any]:
    return evaluated(strategy, 5)


@case(without_ddp=PADS)
def metrics_of_51_samples(strategy: str) -> dict[str, Any]:
    return evaluated(strategy, 51)


@case(without_ddp=PADS)
def metrics_of_a_sampler_of_ones_own(strategy: str) -> dict[str, Any]:
    """The last 9 of 20 samples, backwards."""
    order = list(range(19, 10, -1))
    batches = DataLoader(samples(20), batch_size=GLOBAL_BATCH // SIZE, sampler=order)
    return {"validated": trainer(strategy).validate(Measured(), batches, verbose=False)[0]}


class Summary(Net):
    """A metric logged, and another that is computed when the epoch ends."""

    def __init__(self) -> None:
        super().__init__()
        self.first, self.second = MeanMetric(), MeanMetric()

    def training_step(self, batch: list[Tensor], batch_idx: int) -> Tensor:
        self.first(batch[0][:, 0])
        self.log("first", self.first, on_step=False, on_epoch=True)
        self.second.update(100 + batch[0][:, 1])
        return super().training_step(batch, batch_idx)

    def on_train_epoch_end(self) -> None:
        self.log("second", self.second.compute())
        self.second.reset()


@case(without_ddp="rank 0 alone reduces what its bar shows: values get mixed up, or it hangs")
def metrics_with_a_progress_bar(strategy: str) -> dict[str, Any]:
    return fit(strategy, Summary(), enable_progress_bar=RANK == 0)


class LogsBehind(Callback):
    """Behind the bar's reading of what was logged before."""

    def on_train_epoch_end(self, trainer: pl.Trainer, pl_module: pl.LightningModule) -> None:
        pl_module.log("late", float(RANK < SIZE), prog_bar=True, sync_dist=True)


@case(without_ddp="as above")
def metrics_of_a_callback_with_a_progress_bar(strategy: str) -> dict[str, Any]:
    shown = {"callbacks": [LogsBehind()], "enable_progress_bar": RANK == 0}
    return fit(strategy, Summary(), **shown)


@case()
def validation_while_training(strategy: str) -> dict[str, Any]:
    run, model = trainer(strategy), Measured()
    run.fit(model, loader(), DataLoader(samples(32), batch_size=GLOBAL_BATCH // SIZE))
    return results(run, model)


class MakesMetrics(Net):
    """In the hooks in which Lightning says that a stage or an epoch starts."""

    def on_train_start(self) -> None:
        self.read: list[float] = []
        self.started = SumMetric()

    def on_train_epoch_start(self) -> None:
        self.started.update(1 / SIZE)
        self.read.append(float(self.started.compute()))
        self.epoch = MeanMetric()

    def training_step(self, batch: list[Tensor], batch_idx: int) -> Tensor:
        self.epoch.update(batch[0])
        return super().training_step(batch, batch_idx)

    def on_train_epoch_end(self) -> None:
        self.read.append(float(self.epoch.compute()))

    def on_validation_start(self) -> None:
        self.validated = MeanMetric()

    def validation_step(self, batch: list[Tensor], batch_idx: int) -> None:
        self.validated.update(batch[0])
        self.log("validated", self.validated)

    def on_test_start(self) -> None:
        self.tested = MeanMetric()

    def test_step(self, batch: list[Tensor], batch_idx: int) -> None:
        self.tested.update(batch[0])
        self.log("tested", self.tested)

    def on_predict_start(self) -> None:
        self.predicted = MeanMetric()

    def predict_step(self, batch: list[Tensor], batch_idx: int) -> None:
        self.predicted.update(batch[0])

    def on_predict_epoch_end(self) -> None:
        self.read.append(float(self.predicted.compute()))


@case()
def metrics_made_in_hooks(strategy: str) -> dict[str, Any]:
    run, model = trainer(strategy), MakesMetrics()
    batches = DataLoader(samples(32), batch_size=GLOBAL_BATCH // SIZE)
    run.fit(model, loader())
    validated = run.validate(model, batches, verbose=False)[0]
    tested = run.test(model, batches, verbose=False)[0]
    run.predict(model, batches, return_predictions=False)
    return {"validated": validated, "tested": tested, "read": model.read}

"""Classifiers that tell or warn, lack a test, end or break on ranks, see NaN, keep too much."""

import logging
import os
import signal
import time
import warnings
from functools import partial
from multiprocessing import active_children
from typing import Any

import horovod.torch as hvd
import torch
from pytorch_lightning import LightningModule
from pytorch_lightning.utilities.exceptions import MisconfigurationException
from torch import Tensor
from torch.optim import SGD

from models.classifier import Classifier
from runs import refusal


class Warns(Classifier):
    def on_fit_start(self) -> None:
        warnings.warn("everybody says this", stacklevel=1)
        if self.global_rank == 1:
            warnings.warn("only rank 1 says this", stacklevel=1)
        else:
            logging.getLogger("pytorch_lightning.tuner.lr_finder").error("found no rate")


class AsksForSteps(Classifier):
    """For which Lightning starts the loaders' workers before the training."""

    def configure_optimizers(self) -> torch.optim.Optimizer:
        assert self.trainer.estimated_stepping_batches > 0
        return super().configure_optimizers()


class TellsHowItMultiplies(Classifier):
    def on_fit_start(self) -> None:
        print("products of float32:", torch.get_float32_matmul_precision(), flush=True)


class HasNoTest(Classifier):
    test_step = LightningModule.test_step


class TakesItsTimeToTest(Classifier):
    def test_step(self, batch: Any, batch_idx: int) -> None:
        print("testing", flush=True)
        time.sleep(10)
        super().test_step(batch, batch_idx)


class RefusesItsTest(Classifier):
    def on_test_start(self) -> None:
        raise MisconfigurationException("no test today")


class Breaks(Classifier):
    def training_step(self, batch: Any, batch_idx: int) -> Tensor:
        if self.global_rank == 1 and batch_idx == 3:
            raise RuntimeError("broken in training")
        return super().training_step(batch, batch_idx)


class BreaksOnAllRanks(Classifier):
    def on_fit_start(self) -> None:
        refusal.TELL_SECONDS = 60  # rank 0 takes its time to end where others have the cores


class BreaksEverywhere(BreaksOnAllRanks):
    def training_step(self, batch: Any, batch_idx: int) -> Tensor:
        raise RuntimeError("broken on all ranks")


class BreaksInValidation(BreaksOnAllRanks):
    def validation_step(self, batch: Any, batch_idx: int) -> None:
        raise RuntimeError("broken in validation")


class IsToldToEnd(Classifier):
    def training_step(self, batch: Any, batch_idx: int) -> Tensor:
        os.kill(os.getpid(), signal.SIGTERM)
        return super().training_step(batch, batch_idx)


class IsKilled(Classifier):
    """Rank 1, in the second epoch."""

    def training_step(self, batch: Any, batch_idx: int) -> Tensor:
        if self.current_epoch == 1 and batch_idx == 3 and self.global_rank == 1:
            os.kill(os.getpid(), signal.SIGKILL)
        return super().training_step(batch, batch_idx)


class LosesAWorker(Classifier):
    """A loader's, of rank 0, in the second epoch."""

    def training_step(self, batch: Any, batch_idx: int) -> Tensor:
        if self.current_epoch == 1 and batch_idx == 3 and self.global_rank == 0:
            os.kill(active_children()[0].pid, signal.SIGKILL)
        return super().training_step(batch, batch_idx)


class FillsTheDisk(Classifier):
    """For TensorBoard, in the second epoch."""

    def on_train_epoch_start(self) -> None:
        if self.current_epoch == 1 and self.global_rank == 0:
            events = self.trainer.loggers[0].experiment.file_writer.event_writer
            events._general_file_writer.filename = "/dev/full"


class AsksForAnotherSum(BreaksOnAllRanks):
    def training_step(self, batch: Any, batch_idx: int) -> Tensor:
        hvd.allreduce(torch.zeros(2 + self.global_rank), name="mine")
        return super().training_step(batch, batch_idx)


class Vanishes(Classifier):
    def training_step(self, batch: Any, batch_idx: int) -> Tensor:
        # The logarithm of 0 times 0: finite on the way to the loss, NaN on the way back.
        zero = 0 * self(batch[0]).sum()
        return super().training_step(batch, batch_idx) + 0 * (zero.log() * 0).nan_to_num()


class KeepsAnObject(Classifier):
    def __init__(self, **arguments: Any) -> None:
        super().__init__(**arguments)
        self.hparams["optimizer"] = partial(SGD, momentum=0.9)

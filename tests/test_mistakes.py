"""Users' mistakes, each an error of one line on all ranks and never a hang."""

from __future__ import annotations

import contextlib
import os
import threading
from collections.abc import Callable
from functools import partial
from pathlib import Path
from typing import Any

import horovod.torch as hvd
import pytest
import pytorch_lightning as pl
import torch
from lightning_fabric.plugins import TorchCheckpointIO
from pytorch_lightning.utilities.exceptions import MisconfigurationException
from torch import Tensor, nn
from torch.utils.checkpoint import checkpoint
from torch.utils.data import DataLoader, TensorDataset

from strategies import HorovodStrategy
from strategies.batchnorm import SyncLayers
from tests.matrix.checkpoints import Counting
from tests.matrix.optimization import OneAccumulates
from tests.matrix.precision import convolutions
from tests.matrix.trainings import (
    CLASSES,
    FEATURES,
    RANK,
    SIZE,
    Measured,
    Net,
    loader,
    samples,
    trainer,
)


def refused(function: Callable[[], Any]) -> str:
    """What a mistake is called; every rank must be told, so that none waits for another."""
    with pytest.raises((MisconfigurationException, RuntimeError)) as error:
        function()
    return str(error.value)


def refusal(model: pl.LightningModule, batches: DataLoader | None = None, **arguments: Any) -> str:
    """What a training of the model is refused with."""
    data = loader() if batches is None else batches
    return refused(lambda: trainer("horovod", **arguments).fit(model, data))


def refused_file() -> str:
    with pytest.raises(FileNotFoundError) as error:
        trainer("horovod").fit(Net(), loader(), ckpt_path="/nowhere/to/be/found.ckpt")
    return str(error.value)


class LockedError(Exception):
    """Cannot be sent to other ranks."""

    def __init__(self, message: str) -> None:
        super().__init__(message)
        self.lock = threading.Lock()


class Locked(TorchCheckpointIO):
    def load_checkpoint(self, *_: Any, **__: Any) -> Any:
        raise LockedError("the bucket is gone")


def refused_service(folder: str) -> tuple[str, str]:
    file = Path(folder) / "x.ckpt"
    file.touch()
    with pytest.raises((LockedError, RuntimeError)) as error:
        trainer("horovod", plugins=[Locked()]).fit(Net(), loader(), ckpt_path=str(file))
    return error.type.__name__, str(error.value)


def test_an_error_that_cannot_be_sent_is_told_all_the_same(
    launch: Callable, tmp_path: Path
) -> None:
    assert launch(refused_service, 2, folder=str(tmp_path)) == [
        ("LockedError", "the bucket is gone"), ("RuntimeError", "LockedError: the bucket is gone"),
    ]  # fmt: skip


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
            optimizer.zero_grad(set_to_none=self.then == "none")
            self.manual_backward(loss)
        optimizer.step()


class StepsWithLocal(LeavesOut):
    """Accumulates three batches, and steps after the last one of the epoch, too."""

    def training_step(self, batch: list[Tensor], batch_idx: int) -> None:
        optimizer, whole = self.optimizers(), batch_idx % 3 == 2
        local = self.trainer.strategy.block_backward_sync
        with contextlib.nullcontext() if whole else local():
            self.manual_backward(Net.training_step(self, batch, batch_idx))
        if whole or self.trainer.is_last_batch:
            optimizer.step()
            optimizer.zero_grad()


class Forgets(torch.optim.SGD):
    """As some optimizers outside of torch do."""

    @torch.no_grad()
    def step(self, closure: Any = None) -> None:  # type: ignore[override]
        for parameter in self.param_groups[0]["params"]:
            parameter.sub_(0.05 * parameter.grad)


class StepsWithoutClosure(CallsBackward):
    def configure_optimizers(self) -> Any:
        return Forgets(self.parameters(), lr=0.05)


class AveragesTwice(Net):
    def configure_optimizers(self) -> Any:
        return hvd.DistributedOptimizer(super().configure_optimizers(), self.named_parameters())


class GoesOnAfterAnError(LeavesOut):
    """As after a batch for which memory was short."""

    def training_step(self, batch: list[Tensor], batch_idx: int) -> None:
        loss = Net.training_step(self, batch, batch_idx)
        with contextlib.suppress(ZeroDivisionError):
            handle = self.net[2].weight.register_hook(lambda gradient: gradient * (1 // 0))
            self.manual_backward(loss)
        handle.remove()
        self.manual_backward(Net.training_step(self, batch, batch_idx))


class Replaces(CallsBackward):
    def on_train_start(self) -> None:
        self.trainer.optimizers = [torch.optim.SGD(self.parameters(), lr=0.05)]


class StepsWithin(LeavesOut):
    """Steps each parameter as soon as its gradient is there, which then can go."""

    def configure_optimizers(self) -> Any:
        optimizers = []
        for parameter in self.parameters():
            optimizer = torch.optim.SGD([parameter], lr=0.05)
            parameter.register_post_accumulate_grad_hook(lambda _, step=optimizer.step: step())
            optimizers.append(optimizer)
        return optimizers


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
            self.optimizers().add_param_group({"params": [*self.layer.parameters()]})

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


class Doubles(nn.Module):
    def forward(self, weight: Tensor) -> Tensor:
        return 2 * weight


class EmbedsDoubled(Embedded):
    """Rows of a weight that is computed of the one that is trained."""

    def __init__(self) -> None:
        super().__init__()
        nn.utils.parametrize.register_parametrization(self.words, "weight", Doubles())

    def training_step(self, batch: list[Tensor], batch_idx: int) -> Tensor:
        return super().training_step(batch, batch_idx) + self.words(batch[1]).mean()


class OnlyEmbedded(Embedded):
    def training_step(self, batch: list[Tensor], batch_idx: int) -> Tensor:
        return self.words(batch[1]).square().sum()

    def configure_optimizers(self) -> Any:
        self.net.requires_grad_(False)
        return torch.optim.SGD(self.words.parameters(), lr=0.05)


class Complex(Net):
    def __init__(self) -> None:
        super().__init__()
        self.phase = nn.Parameter(torch.ones(2, dtype=torch.complex64))


class Ahead(HorovodStrategy):
    """Is told late whether ranks agree, as on a GPU."""

    def setup(self, run: pl.Trainer) -> None:
        super().setup(run)
        self._is_ahead = True


class LogsForAll(Net):
    def training_step(self, batch: list[Tensor], batch_idx: int) -> Tensor:
        loss = super().training_step(batch, batch_idx)
        self.log("mean", loss, on_step=True, sync_dist=True)
        return loss


class GoesBackTwice(Net):
    """Normalizes twice, and asks autograd for the second's gradients itself."""

    def __init__(self) -> None:
        super().__init__(convolutions(normalization=True))
        self.automatic_optimization = False

    def training_step(self, batch: list[Tensor], batch_idx: int) -> None:
        first, second = (nn.functional.cross_entropy(self(batch[0]), batch[1]) for _ in range(2))
        self.manual_backward(first)
        torch.autograd.grad(second, list(self.parameters()))


class LogsNothing(Net):
    def training_step(self, batch: list[Tensor], batch_idx: int) -> Tensor:
        return nn.functional.cross_entropy(self(batch[0]), batch[1])


def ends_apart() -> list[str]:
    """Rank 1 has fewer batches, and waits to tell it; rank 0 is on its way to the next one, with
    and without a collective before its backward is over."""
    normalized = Net(convolutions(normalization=True))
    messages = []
    for model, arguments in (
        (Net(), {}),
        (LogsForAll(), {}),
        (normalized, {"sync_batchnorm": True}),
        (Measured(), {"val_check_interval": 2}),
        (GoesBackTwice(), {"sync_batchnorm": True}),
    ):
        run = trainer(Ahead(), max_epochs=1, **arguments)
        loaders = DataLoader(Counting(6 - 2 * RANK), 4), DataLoader(samples(8), 4)
        messages.append(refused(partial(run.fit, model, *loaders)))
    # The training ends with the last batch of rank 1: nobody waits for another.
    for strategy in (Ahead(), HorovodStrategy()):
        run = trainer(strategy, max_steps=4)
        run.fit(LogsNothing(), DataLoader(Counting(6 - 2 * RANK), 4))
        messages.append(f"{run.global_step} steps")
    return messages


def test_ranks_that_end_apart_are_told_where_a_gpu_is_behind(launch: Callable) -> None:
    begin = f"rank 1 on {os.uname().nodename} has 4 training batches an epoch"
    for messages in launch(ends_apart, 2):
        assert [message[: len(begin)] for message in messages] == [begin] * 5 + ["4 steps"] * 2


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
    messages = {
        "sizes": refusal(Net(sizes)),
        "fewer": refusal(Net(fewer)),
        "kinds": refusal(Net(kinds)),
        "frozen": refusal(Net(frozen)),
        "hosts": refusal(Net(nn.Linear(FEATURES, CLASSES)), num_nodes=2),
        "devices": refusal(Net(nn.Linear(FEATURES, CLASSES)), devices=3),
        "samples": refusal(Net(), unequal),
        "samples to validate": refused(  # as many batches on both ranks
            lambda: trainer("horovod").validate(Measured(), DataLoader(samples(67 + RANK), 64))
        ),
        "endless": refusal(Net(), DataLoader(Counting(unequal_batches), 4)),
        "endless words": refusal(OnlyEmbedded(), DataLoader(Counting(unequal_batches), 4)),
        "empty": refusal(Net(), DataLoader(Counting(1 - RANK), 4)),
        "ragged": refused(lambda: trainer("horovod").strategy.all_gather(torch.ones(2 + RANK, 3))),
        "dropped": refused(
            lambda: trainer("horovod").validate(
                Measured(), DataLoader(samples(67), batch_size=64, drop_last=True)
            )
        ),
        "few": refused(lambda: trainer("horovod").validate(Measured(), DataLoader(samples(1)))),
        "checkpoint": refused_file(),
        "twice": refusal(Reentered()),
        "complex": refusal(Complex()),
        "left out": refusal(LeavesOut()),
        "alone": refusal(CallsBackward("step")),
        "passed by": refusal(CallsBackward("step", bare=True)),
        "replaced": refusal(Replaces("step")),
        "local": refusal(StepsWithLocal()),
        "share": refused(
            lambda: trainer(HorovodStrategy(op="sum")).fit(OneAccumulates(), loader())
        ),
        "forgotten": refusal(StepsWithoutClosure("step")),
        "went on": refusal(GoesOnAfterAnError()),
        "within": refusal(StepsWithin()),
        "made": refusal(MadeApart()),
        "own forward": refusal(Net(nn.Sequential(Doubled(FEATURES))), sync_batchnorm=True),
        "penalty": refusal(Slope(), sync_batchnorm=True),
        "sparse": refused(lambda: trainer(HorovodStrategy(op="adasum")).fit(Embedded(), loader())),
        "doubled": refusal(EmbedsDoubled()),
        "strides": refusal(Net(strided)),
        "lazy": refusal(Net(nn.LazyLinear(CLASSES))),
        "graph": refusal(KeepsGraph()),
        "layout": refusal(Net(graph)),
        "hidden": refusal(Hides("at once")),
        "hidden later": refusal(Hides("later")),
        "rates": refusal(GoesByItsOwn(), max_epochs=3),
        "averaged twice": refusal(AveragesTwice()),
        "clock": refusal(Net(), val_check_interval="00:00:00:01"),
    }
    layer = SyncLayers(HorovodStrategy().world).apply(nn.BatchNorm1d(3))
    with pytest.raises(ValueError, match="more than 1 value a channel"):
        layer(torch.ones(1 - RANK, 3))  # of both ranks together
    for then in ("none", "zeros"):
        trainer("horovod", max_epochs=1).fit(CallsBackward(then), loader())
    run, model = trainer("horovod", max_epochs=1), Net()
    run.fit(model, loader())
    messages["goes on"] = f"{run.global_step} steps of {SIZE} ranks"
    return messages


def test_mistakes_are_told_on_all_ranks(launch: Callable) -> None:
    host = os.uname().nodename
    for texts in launch(mistakes, 2):
        rank_1 = f"rank 1 on {host} has another model than rank 0: "
        assert texts["sizes"].startswith(f"{rank_1}net.0.weight (5, 12) float32 trained where rank")
        assert "rank 0 has net.0.weight (4, 12) float32 trained;" in texts["sizes"]
        assert texts["fewer"].startswith(f"{rank_1}nothing where rank 0 has net.1.weight")
        assert texts["kinds"].startswith(f"{rank_1}net.weight (5, 12) float64 trained where")
        assert texts["frozen"].startswith(f"{rank_1}net.weight (5, 12) float32 where")
        assert texts["hosts"].startswith("Trainer(num_nodes=2), and these ranks are on 1;")
        assert texts["devices"].startswith(f"Trainer(devices=3) on {host}, where horovodrun")
        assert texts["samples"].startswith(f"rank 1 on {host} has 72 samples, rank 0 has 80, of")
        assert texts["samples to validate"].startswith(f"rank 1 on {host} has 68 samples, rank 0")
        assert texts["endless"].startswith(f"rank 1 on {host} has 4 training batches an epoch")
        assert texts["endless"].endswith(" equally many, as by limit_train_batches=4")
        assert texts["endless words"] == texts["endless"]
        assert texts["empty"].startswith(
            f"rank 1 on {host} has 0 training batches an epoch, others"
        )
        assert texts["empty"].endswith(" equally many")
        assert texts["few"].startswith("1 samples to validate on 2 ranks")
        assert texts["ragged"].startswith(
            "all_gather takes one shape, and ranks have (2, 3), (3, 3):"
        )
        assert texts["dropped"].startswith("drop_last=True leaves none of 67 samples to validate:")
        assert "/nowhere/to/be/found.ckpt" in texts["checkpoint"]
        assert texts["twice"].startswith("a parameter got a second gradient in one backward")
        assert texts["complex"].startswith("Horovod adds no complex gradients")
        assert texts["left out"].startswith("for some ranks the epoch ends with this backward")
        assert texts["alone"].startswith("a step with gradients of loss.backward()")
        assert texts["passed by"] == texts["alone"]
        assert texts["replaced"] == texts["forgotten"] == texts["alone"]
        assert texts["local"] == texts["share"] == texts["alone"]
        assert texts["went on"].startswith("the backward before this one ended in an error")
        assert texts["within"].startswith("a step within backward, before the gradients of all")
        assert texts["made"].startswith(f"{rank_1}late.weight (3, 5) float32 trained where rank 0")
        assert texts["own forward"].startswith("sync_batchnorm: net.0 is a Doubled with a forward")
        assert "once_differentiable" in texts["penalty"]
        assert texts["sparse"].startswith("op=adasum mixes dense gradients: make sparse=False of")
        assert "'words'" in texts["sparse"]
        assert texts["doubled"].startswith("a sparse gradient that is not of the weight of an")
        assert "strided (27, 1, 9, 3) trained;" in texts["strides"]
        assert texts["lazy"].startswith("net.weight has no shape before the first batch")
        assert texts["graph"].startswith("backward(create_graph=True): averaging over ranks")
        assert texts["layout"].startswith(
            "net.edges is torch.sparse_coo, which Horovod does not send"
        )
        hidden = "SGD has a parameter (3, 5) that the module has not, or not before training"
        assert texts["hidden"].startswith(hidden) and texts["hidden later"].startswith(hidden)
        assert texts["rates"].startswith(f"rank 1 on {host} has the learning rates 0.005, rank 0")
        assert texts["averaged twice"].startswith("hvd.DistributedOptimizer averages gradients")
        assert texts["clock"].startswith("a val_check_interval of 1 s: by its own clock each rank")
        assert texts["goes on"] == "10 steps of 2 ranks"

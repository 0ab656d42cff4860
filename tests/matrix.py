"""What is trained with one process, with Horovod and with DDP, to be compared: see test_matrix.py.

Each case is a function of a strategy's name that returns numbers. Ranks share global batches of 8,
so that every strategy and every number of ranks sees the same samples in the same order. On GPUs
see test_gpu.py.
"""

from __future__ import annotations

import contextlib
import copy
import os
import pickle
import tempfile
import traceback
import warnings
from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytorch_lightning as pl
import torch
from lightning_fabric.utilities import move_data_to_device
from pytorch_lightning.callbacks import (
    BaseFinetuning,
    EMAWeightAveraging,
    GradientAccumulationScheduler,
    ModelCheckpoint,
    StochasticWeightAveraging,
)
from pytorch_lightning.plugins import MixedPrecision
from pytorch_lightning.strategies import SingleDeviceStrategy, Strategy
from pytorch_lightning.trainer.states import TrainerFn
from torch import Tensor, nn
from torch.utils.checkpoint import checkpoint
from torch.utils.data import DataLoader, DistributedSampler, IterableDataset, TensorDataset
from torchmetrics import CatMetric, MaxMetric, MeanMetric, Metric, MetricCollection, SumMetric
from torchmetrics.classification import BinaryAUROC, MulticlassAccuracy, MulticlassF1Score

RANK, SIZE = (int(os.environ.get(f"HOROVOD_{name}", default)) for name, default in
              (("RANK", 0), ("SIZE", 1)))  # fmt: skip
FEATURES, CLASSES, GLOBAL_BATCH = 12, 5, 8
DEVICE = "cpu"  # or cuda
BUCKETS_ALONE = False  # with one rank too, gradients go through buckets and Horovod

CASES: dict[str, Callable[[str], dict[str, Any]]] = {}
WITHOUT_DDP: dict[str, str] = {}  # why DDP has no such case
TOLERANCES: dict[str, float] = {}


def case(without_ddp: str = "", tolerance: float = 1e-6) -> Callable:
    """List a function as a case; the tolerance is relative, and absolute for numbers below 1."""

    def listed(function: Callable) -> Callable:
        name = function.__name__
        CASES[name], TOLERANCES[name] = function, tolerance
        if without_ddp:
            WITHOUT_DDP[name] = without_ddp
        return function

    return listed


def run_cases(
    strategy: str, names: list[str], device: str = "cpu", buckets_alone: bool = False
) -> dict[str, Any]:
    """The named cases; where one fails, the traceback takes the place of its numbers."""
    global DEVICE, BUCKETS_ALONE
    DEVICE, BUCKETS_ALONE = device, buckets_alone
    torch.backends.cudnn.allow_tf32 = False  # 10 bits would hide what is compared
    results: dict[str, Any] = {"size": SIZE, "strategy": type(make(strategy)).__name__}
    for name in names:
        if strategy == "ddp" and name in WITHOUT_DDP:
            continue
        try:
            results[name] = move_data_to_device(CASES[name](strategy), "cpu")
        except Exception:
            results[name] = traceback.format_exc()
            if SIZE > 1:  # the others may wait for this rank
                raise
    return results


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


# ------------------------------------------------------------------------------ optimization


@case()
def plain(strategy: str) -> dict[str, Any]:
    return fit(strategy)


@case()
def clip_by_norm(strategy: str) -> dict[str, Any]:
    return fit(strategy, gradient_clip_val=0.1)


@case()
def clip_by_value(strategy: str) -> dict[str, Any]:
    return fit(strategy, gradient_clip_val=0.01, gradient_clip_algorithm="value")


class Rescaled(Net):
    def on_after_backward(self) -> None:
        for parameter in self.parameters():
            assert parameter.grad is not None
            parameter.grad.mul_(parameter.grad.norm())


@case()
def gradients_changed_after_backward(strategy: str) -> dict[str, Any]:
    """What on_after_backward sees is the average: its norm is not the average of the norms."""
    return fit(strategy, Rescaled())


class SetsData(Net):
    """Has a clipping of its own that gives gradients other memory; from the second epoch on the
    weights have, and lie in it in another order."""

    def __init__(self, fused: bool = False) -> None:
        super().__init__()
        self.fused = fused

    def on_before_optimizer_step(self, optimizer: Any) -> None:
        for parameter in self.parameters():
            assert parameter.grad is not None
            if not self.fused:
                parameter.grad.data = parameter.grad.data.clamp(-0.02, 0.02)

    def on_train_epoch_start(self) -> None:
        if self.fused and self.current_epoch == 1:
            weight = self.net[0].weight
            weight.data = weight.data.t().contiguous().t()

    def configure_optimizers(self) -> Any:
        return torch.optim.SGD(self.parameters(), lr=0.05, fused=self.fused)


@case()
def gradients_with_other_memory(strategy: str) -> dict[str, Any]:
    return fit(strategy, SetsData())


@case(without_ddp="DDP keeps to the order that weights had at first")
def weights_with_other_strides(strategy: str) -> dict[str, Any]:
    """Fused optimizers go through the memory of weights and gradients alike."""
    return fit(strategy, SetsData(fused=True))


class ClippedByWeights(Net):
    """Has a clipping of its own, which autograd records, as of all that needs gradients."""

    def configure_gradient_clipping(self, *_: Any, **__: Any) -> None:
        for parameter in self.parameters():
            assert parameter.grad is not None
            most = 0.01 * parameter.norm().clamp(min=0.1)
            parameter.grad.mul_((most / parameter.grad.norm()).clamp(max=1))


@case()
def clip_by_weights(strategy: str) -> dict[str, Any]:
    return fit(strategy, ClippedByWeights())


class Clamped(Net):
    """Hooks clamp what a rank computes: of a loss of weights alone, what one process computes."""

    def __init__(self) -> None:
        super().__init__()
        for parameter in self.net.parameters():
            parameter.register_hook(lambda gradient: gradient.clamp(-0.02, 0.02))

    def training_step(self, batch: list[Tensor], batch_idx: int) -> Tensor:
        weights = sum(p.square().sum() for p in self.parameters())
        return 0.1 * weights + 0 * super().training_step(batch, batch_idx)  # type: ignore[operator]


@case()
def gradients_clamped_by_hooks(strategy: str) -> dict[str, Any]:
    """They see what a rank computes, not yet divided by the number of ranks."""
    return fit(strategy, Clamped())


class BeginsElsewhere(Net):
    def backward(self, loss: Tensor, *args: Any, **kwargs: Any) -> None:
        (loss + sum(p.square().sum() for p in self.parameters())).backward()


@case()
def backward_of_more_than_the_loss(strategy: str) -> dict[str, Any]:
    return fit(strategy, BeginsElsewhere())


class SetsByHand(Net):
    """Gradients of what the loss is made of: autograd never comes by the loss."""

    def training_step(self, batch: list[Tensor], batch_idx: int) -> Tensor:
        self.part = super().training_step(batch, batch_idx)
        return self.part * 2

    def backward(self, loss: Tensor, *args: Any, **kwargs: Any) -> None:
        parameters = list(self.parameters())
        for parameter, gradient in zip(parameters, torch.autograd.grad(self.part, parameters)):
            parameter.grad = gradient


@case(without_ddp="it has no hooks there")
def gradients_set_by_hand(strategy: str) -> dict[str, Any]:
    return fit(strategy, SetsByHand())


class Halved(Net):
    """Gradients that hooks replace, which come when training begins: after those that average."""

    def on_train_start(self) -> None:
        for parameter in self.parameters():
            parameter.register_post_accumulate_grad_hook(self.halve)

    @staticmethod
    def halve(parameter: Tensor) -> None:
        assert parameter.grad is not None
        parameter.grad = parameter.grad / 2


@case()
def gradients_replaced_by_hooks(strategy: str) -> dict[str, Any]:
    return fit(strategy, Halved())


def counted(strategy: str, **arguments: Any) -> dict[str, Any]:
    """Gradients are reduced once a step, not once a batch."""
    if strategy != "horovod":
        return {**fit(strategy, **arguments), "reductions": True}
    from strategies.buckets import GradientBuckets

    finish, count = GradientBuckets.finish, [0]

    def counting(buckets: GradientBuckets) -> Callable[[], bool]:
        count[0] += 1
        return finish(buckets)

    GradientBuckets.finish = counting  # type: ignore[method-assign]
    result = fit(strategy, **arguments)
    GradientBuckets.finish = finish  # type: ignore[method-assign]
    return {**result, "reductions": SIZE == 1 or count[0] == result["steps"]}


@case()
def accumulation(strategy: str) -> dict[str, Any]:
    return counted(strategy, accumulate_grad_batches=3)  # 10 batches: the last window is short


class Noisy(Net):
    def on_after_backward(self) -> None:
        """The same on all ranks, to what of an accumulation is there."""
        noise = torch.Generator().manual_seed(self.global_step)
        for parameter in self.parameters():
            assert parameter.grad is not None
            more = 0.1 * torch.randn(parameter.shape, generator=noise)
            parameter.grad.add_(more.to(parameter.device))


@case()
def accumulation_with_noise(strategy: str) -> dict[str, Any]:
    return fit(strategy, Noisy(), accumulate_grad_batches=3)


@case()
def accumulation_by_schedule(strategy: str) -> dict[str, Any]:
    return counted(strategy, callbacks=[GradientAccumulationScheduler({0: 1, 1: 4})])


class Scheduled(Net):
    def __init__(self, interval: str) -> None:
        super().__init__()
        self.interval = interval

    def configure_optimizers(self) -> Any:
        optimizer = super().configure_optimizers()
        schedule = torch.optim.lr_scheduler.StepLR(optimizer, 1, 0.9)
        return [optimizer], [{"scheduler": schedule, "interval": self.interval}]


@case()
def learning_rate_by_step(strategy: str) -> dict[str, Any]:
    return fit(strategy, Scheduled("step"))


@case()
def learning_rate_by_epoch(strategy: str) -> dict[str, Any]:
    return fit(strategy, Scheduled("epoch"))


class Plateau(Net):
    def configure_optimizers(self) -> Any:
        optimizer = super().configure_optimizers()
        schedule = torch.optim.lr_scheduler.ReduceLROnPlateau(optimizer, patience=0, threshold=9)
        return {"optimizer": optimizer, "lr_scheduler": {"scheduler": schedule, "monitor": "loss"}}


@case()
def learning_rate_by_metric(strategy: str) -> dict[str, Any]:
    return fit(strategy, Plateau(), max_epochs=4)


class Adversaries(pl.LightningModule):
    """Two optimizers, toggled by turns: parameters of the other one must stay as they are."""

    def __init__(self) -> None:
        super().__init__()
        torch.manual_seed(1 + RANK)
        self.automatic_optimization = False
        self.generator = nn.Linear(FEATURES, FEATURES)
        self.critic = nn.Linear(FEATURES, 1)

    def training_step(self, batch: list[Tensor], batch_idx: int) -> None:
        first, second = self.optimizers()
        self.toggle_optimizer(second)
        real, fake = self.critic(batch[0]), self.critic(self.generator(batch[0]).detach())
        second.zero_grad()
        self.manual_backward((fake - real).mean() + real.square().mean())
        second.step()
        self.untoggle_optimizer(second)
        self.toggle_optimizer(first)
        first.zero_grad()
        self.manual_backward(-self.critic(self.generator(batch[0])).mean())
        first.step()
        self.untoggle_optimizer(first)

    def configure_optimizers(self) -> Any:
        return [
            torch.optim.SGD(part.parameters(), lr=0.05, momentum=0.9, weight_decay=0.1)
            for part in (self.generator, self.critic)
        ]


@case()
def adversaries(strategy: str) -> dict[str, Any]:
    return fit(strategy, Adversaries())


class StepTogether(Adversaries):
    """Both backwards, each of parameters toggled on, before either step."""

    def training_step(self, batch: list[Tensor], batch_idx: int) -> None:
        first, second = self.optimizers()
        self.toggle_optimizer(second)
        real, fake = self.critic(batch[0]), self.critic(self.generator(batch[0]).detach())
        self.manual_backward((fake - real).mean() + real.square().mean())
        self.untoggle_optimizer(second)
        self.toggle_optimizer(first)
        self.manual_backward(-self.critic(self.generator(batch[0])).mean())
        self.untoggle_optimizer(first)
        for optimizer in (second, first):
            optimizer.step()
            optimizer.zero_grad()


@case()
def adversaries_that_step_together(strategy: str) -> dict[str, Any]:
    return fit(strategy, StepTogether())


class Interleaved(Adversaries):
    """Each accumulates, in windows of other lengths: backwards of one that stay local and of one
    that do not come between those of the other."""

    def training_step(self, batch: list[Tensor], batch_idx: int) -> None:
        first, second = self.optimizers()
        with second.toggle_model(sync_grad=batch_idx % 2 == 1):
            real, fake = self.critic(batch[0]), self.critic(self.generator(batch[0]).detach())
            self.manual_backward((fake - real).mean() + real.square().mean())
        with first.toggle_model(sync_grad=batch_idx % 4 != 2):
            self.manual_backward(-self.critic(self.generator(batch[0])).mean())
        for optimizer, window in ((second, 2), (first, 4)):
            if (batch_idx + 1) % window == 0:
                optimizer.step()
                optimizer.zero_grad()


@case(without_ddp="an option of ours")
def adversaries_that_accumulate(strategy: str) -> dict[str, Any]:
    return fit(make(strategy, gradient_predivide_factor=3.0), Interleaved())


class LossesFirst(Adversaries):
    """Both losses before either optimizer is toggled: autograd then also comes to parameters that
    are toggled off. The critic may have a part that only the rank with the first samples uses."""

    def __init__(self, seldom: bool) -> None:
        super().__init__()
        if seldom:
            self.critic.seldom = nn.Parameter(torch.ones(FEATURES))

    def training_step(self, batch: list[Tensor], batch_idx: int) -> None:
        first, second = self.optimizers()
        fake = self.generator(batch[0])
        of_critic = (self.critic(fake.detach()) - self.critic(batch[0])).mean()
        if RANK == 0 and hasattr(self.critic, "seldom"):
            index = GLOBAL_BATCH * batch_idx  # whose sample one process sees too, first of all
            of_critic = of_critic + (samples()[index][0].to(fake) @ self.critic.seldom) / (
                GLOBAL_BATCH // SIZE
            )
        of_generator = -self.critic(fake).mean()
        for optimizer, loss in ((second, of_critic), (first, of_generator)):
            self.toggle_optimizer(optimizer)
            optimizer.zero_grad()
            self.manual_backward(loss)
            self.untoggle_optimizer(optimizer)
        second.step()
        first.step()


@case()
def adversaries_whose_losses_come_first(strategy: str) -> dict[str, Any]:
    return {f"seldom {seldom}": fit(strategy, LossesFirst(seldom)) for seldom in (False, True)}


class Penalty(Net):
    """The gradient of a function of all ranks' outputs, in the loss."""

    def training_step(self, batch: list[Tensor], batch_idx: int) -> Tensor:
        inputs = batch[0].clone().requires_grad_()
        outputs = self.all_gather(self(inputs), sync_grads=True)
        (slope,) = torch.autograd.grad(outputs.square().sum(), inputs, create_graph=True)
        # Each rank has had the whole function, whose slope is then that of all of them.
        return outputs.square().mean() + (slope / SIZE).square().sum(1).mean()


@case()
def second_derivatives_through_all_gather(strategy: str) -> dict[str, Any]:
    return fit(strategy, Penalty(), precision="64-true", max_epochs=1)


class Twice(Net):
    """Manual optimization with two backwards in a step, the second one of a part of the model."""

    def __init__(self) -> None:
        super().__init__()
        self.automatic_optimization = False

    def training_step(self, batch: list[Tensor], batch_idx: int) -> None:
        optimizer = self.optimizers()
        optimizer.zero_grad()
        self.manual_backward(nn.functional.cross_entropy(self(batch[0]), batch[1]))
        self.manual_backward(self.net[:2](batch[0]).square().mean())
        optimizer.step()


@case()
def two_backwards_a_step(strategy: str) -> dict[str, Any]:
    return fit(strategy, Twice())


class AccumulatesByHand(Twice):
    """What DDP's model has no_sync() for; two batches a step."""

    def training_step(self, batch: list[Tensor], batch_idx: int) -> None:
        optimizer, steps = self.optimizers(), batch_idx % 2 == 1
        # A single device has none.
        local = getattr(self.trainer.strategy, "block_backward_sync", contextlib.nullcontext)
        with contextlib.nullcontext() if steps else local():
            self.manual_backward(nn.functional.cross_entropy(self(batch[0]), batch[1]) / 2)
        if steps:
            optimizer.step()
            optimizer.zero_grad()


@case()
def accumulation_by_hand(strategy: str) -> dict[str, Any]:
    return fit(strategy, AccumulatesByHand())


class OfASum:
    """Its losses are divided by the number of ranks: op=sum gives the gradients of one process."""

    def manual_backward(self, loss: Tensor) -> None:
        super().manual_backward(loss / SIZE)  # type: ignore[misc]


class TwiceOfASum(OfASum, Twice):
    pass


@case(without_ddp="an option of ours")
def two_backwards_of_a_sum(strategy: str) -> dict[str, Any]:
    return fit(make(strategy, op="sum"), TwiceOfASum())


class StepTogetherOfASum(OfASum, StepTogether):
    pass


@case(without_ddp="an option of ours")
def adversaries_of_a_sum(strategy: str) -> dict[str, Any]:
    return fit(make(strategy, op="sum"), StepTogetherOfASum())


class LossesFirstOfASum(OfASum, LossesFirst):
    pass


@case(without_ddp="an option of ours")
def adversaries_of_a_sum_whose_losses_come_first(strategy: str) -> dict[str, Any]:
    return fit(make(strategy, op="sum"), LossesFirstOfASum(seldom=False))


class InterleavedOfASum(OfASum, Interleaved):
    pass


@case(without_ddp="an option of ours")
def accumulations_of_a_sum(strategy: str) -> dict[str, Any]:
    return fit(make(strategy, op="sum"), InterleavedOfASum())


# ------------------------------------------------------------------------------- parameters


class NobodyUses(Net):
    def __init__(self) -> None:
        super().__init__()
        self.nobody = nn.Parameter(torch.ones(3))


@case()
def parameter_that_nobody_uses(strategy: str) -> dict[str, Any]:
    return fit(strategy, NobodyUses())


class Fused(Net):
    """Its optimizer goes through the memory of a parameter and of its gradient alike."""

    def __init__(self) -> None:
        super().__init__()
        self.net[0].weight = nn.Parameter(self.net[0].weight.detach().t().contiguous().t())

    def configure_optimizers(self) -> Any:
        return torch.optim.SGD(self.parameters(), lr=0.05, momentum=0.9, fused=True)


@case()
def fused_optimizer_of_a_transposed_parameter(strategy: str) -> dict[str, Any]:
    return fit(strategy, Fused())


class LineSearch(Net):
    def configure_optimizers(self) -> Any:
        return torch.optim.LBFGS(self.parameters(), 0.1, 3, line_search_fn="strong_wolfe")


@case(without_ddp="each rank's line search goes by its own loss")
def line_search(strategy: str) -> dict[str, Any]:
    """In 64 bits: the search turns other ways for a difference in the last of 32."""
    return fit(strategy, LineSearch(), max_epochs=1, precision="64-true")


class SearchesByHand(LineSearch):
    def __init__(self) -> None:
        super().__init__()
        self.automatic_optimization = False

    def training_step(self, batch: list[Tensor], batch_idx: int) -> None:
        optimizer = self.optimizers(use_pl_optimizer=False)

        def closure() -> Tensor:
            optimizer.zero_grad()
            loss = nn.functional.cross_entropy(self(batch[0]), batch[1])
            self.manual_backward(loss)
            return loss

        optimizer.step(closure)


@case(without_ddp="each rank's line search goes by its own loss")
def line_search_of_a_bare_optimizer(strategy: str) -> dict[str, Any]:
    return fit(strategy, SearchesByHand(), max_epochs=1, precision="64-true")


class Experts(Net):
    """Samples of each class take a way of their own, so that ranks use other parameters."""

    def __init__(self) -> None:
        super().__init__()
        self.experts = nn.ModuleList(nn.Linear(FEATURES, CLASSES) for _ in range(CLASSES + 1))

    def training_step(self, batch: list[Tensor], batch_idx: int) -> Tensor:
        total = torch.zeros(())
        for x, y in zip(*batch):
            total = total + nn.functional.cross_entropy(self.experts[int(y)](x), y)
        return total / len(batch[0])


@case()
def parameters_that_some_ranks_use(strategy: str) -> dict[str, Any]:
    return fit(strategy, Experts())


@case()
def frozen_parameters(strategy: str) -> dict[str, Any]:
    model = Net()
    model.net[0].requires_grad_(False)
    return fit(strategy, model)


class Expanded(Net):
    """A buffer whose rows are the same memory."""

    def __init__(self) -> None:
        super().__init__()
        self.register_buffer("rows", torch.full((1, CLASSES), RANK + 2.0).expand(3, CLASSES))

    def forward(self, x: Tensor) -> Tensor:
        return super().forward(x) * self.rows[1]


@case(without_ddp="torch writes no tensor whose elements share memory")
def expanded_buffer(strategy: str) -> dict[str, Any]:
    return fit(strategy, Expanded())


class FreezesWithin(Net):
    def training_step(self, batch: list[Tensor], batch_idx: int) -> Tensor:
        self.net[0].requires_grad_(batch_idx % 6 < 1)
        return super().training_step(batch, batch_idx)


@case()
def frozen_within_a_window(strategy: str) -> dict[str, Any]:
    """After the first batch of an accumulation, whose gradient is still averaged."""
    return {
        str(count): fit(strategy, FreezesWithin(), accumulate_grad_batches=count)
        for count in (2, 3)
    }


class FreezesAll(Net):
    def training_step(self, batch: list[Tensor], batch_idx: int) -> Tensor:
        self.requires_grad_(batch_idx % 3 != 1)
        loss = super().training_step(batch, batch_idx)
        return loss if loss.requires_grad else loss.requires_grad_()


@case(without_ddp="its reducer waits for gradients of what it was made with")
def nothing_trained_in_a_batch(strategy: str) -> dict[str, Any]:
    return fit(strategy, FreezesAll())


class MadeLate(Net):
    def configure_optimizers(self) -> Any:
        # On each rank with its own numbers.
        self.head = nn.Linear(CLASSES, CLASSES).to(self.device)
        return super().configure_optimizers()

    def forward(self, x: Tensor) -> Tensor:
        return self.head(super().forward(x))


@case(without_ddp="it broadcasts before")
def parameters_made_by_configure_optimizers(strategy: str) -> dict[str, Any]:
    return fit(strategy, MadeLate())


class Shared(Net):
    def __init__(self) -> None:
        super().__init__(nn.Sequential(nn.Linear(FEATURES, FEATURES), nn.Linear(FEATURES, CLASSES)))

    def forward(self, x: Tensor) -> Tensor:
        return self.net(torch.tanh(self.net[0](x)))


@case()
def shared_parameters(strategy: str) -> dict[str, Any]:
    return fit(strategy, Shared())


class Sparse(Net):
    def __init__(self) -> None:
        super().__init__()
        torch.manual_seed(1 + RANK)
        self.table = nn.Embedding(CLASSES, CLASSES, sparse=True)
        self.bag = nn.EmbeddingBag(CLASSES, CLASSES, sparse=True, mode="sum")

    def training_step(self, batch: list[Tensor], batch_idx: int) -> Tensor:
        scores = self(batch[0]) + self.table(batch[1]) + self.bag(batch[1].unsqueeze(1))
        # Transposed, so that the gradient's rows come back with other strides.
        return nn.functional.cross_entropy(scores.t().unsqueeze(0), batch[1].unsqueeze(0))

    def configure_optimizers(self) -> Any:
        return torch.optim.SGD(self.parameters(), lr=0.05)


@case()
def sparse_gradients(strategy: str) -> dict[str, Any]:
    return fit(strategy, Sparse())


class Tied(Net):
    """The weight of an embedding is that of a dense layer too, and has a momentum."""

    def __init__(self) -> None:
        super().__init__()
        torch.manual_seed(1 + RANK)
        self.table = nn.Embedding(CLASSES, CLASSES, sparse=True)
        self.dense = nn.Linear(CLASSES, CLASSES, bias=False)
        self.dense.weight = self.table.weight

    def training_step(self, batch: list[Tensor], batch_idx: int) -> Tensor:
        scores = self.dense(self(batch[0])) + self.table(batch[1])
        return nn.functional.cross_entropy(scores, batch[1])

    def configure_optimizers(self) -> Any:
        return torch.optim.SGD(self.parameters(), lr=0.05, momentum=0.9, weight_decay=0.01)


@case(without_ddp="it expects a sparse gradient, where autograd's sum of both is dense")
def sparse_weight_of_a_dense_layer(strategy: str) -> dict[str, Any]:
    return fit(strategy, Tied())


class SparseTwice(Sparse):
    """Two backwards a step: what the first left, all ranks have, and it counts once."""

    def __init__(self) -> None:
        super().__init__()
        self.automatic_optimization = False

    def training_step(self, batch: list[Tensor], batch_idx: int) -> None:
        optimizer = self.optimizers()
        for _ in range(2):
            self.manual_backward(super().training_step(batch, batch_idx))
        optimizer.step()
        optimizer.zero_grad()


@case(without_ddp="predivide is an option of ours")
def sparse_gradients_of_two_backwards(strategy: str) -> dict[str, Any]:
    return fit(make(strategy, gradient_predivide_factor=3.0), SparseTwice())


class Thaw(BaseFinetuning):
    """Trains the first layer from the second epoch on."""

    def freeze_before_training(self, pl_module: pl.LightningModule) -> None:
        self.freeze(pl_module.net[0])

    def finetune_function(self, pl_module: Any, epoch: int, optimizer: Any) -> None:
        if epoch == 1:
            self.unfreeze_and_add_param_group(pl_module.net[0], optimizer, lr=0.02)


class Thawed(Net):
    def configure_optimizers(self) -> Any:
        trained = [p for p in self.parameters() if p.requires_grad]
        return torch.optim.SGD(trained, lr=0.05, momentum=0.9, weight_decay=0.1)


@case(without_ddp="its reducer knows those of the start only: ranks silently drift apart")
def parameters_added_later(strategy: str) -> dict[str, Any]:
    return fit(strategy, Thawed(), callbacks=[Thaw()], max_epochs=3)


# ------------------------------------------------------------------- precision and execution


# bfloat16 has 8 bits: a sum of 8 samples and one of two sums of 4 differ in the last of them
@case(tolerance=0.1)
def bf16_mixed(strategy: str) -> dict[str, Any]:
    return fit(strategy, precision="bf16-mixed")


@case(tolerance=0.1)
def bf16_true(strategy: str) -> dict[str, Any]:
    return fit(strategy, precision="bf16-true")


class Overflows(Net):
    """Infinite gradients on the rank that has the global batch's first sample, now and then."""

    def training_step(self, batch: list[Tensor], batch_idx: int) -> Tensor:
        loss = super().training_step(batch, batch_idx)
        return loss * (1e30 if batch_idx == 4 and RANK == 0 else 1)


@case(tolerance=0.02)  # float16 has 11 bits
def fp16_mixed(strategy: str) -> dict[str, Any]:
    """With a scaler: all ranks skip the step that one of them cannot make."""
    scaler = torch.amp.GradScaler(DEVICE, init_scale=128.0)
    plugin = MixedPrecision("16-mixed", DEVICE, scaler)
    result = fit(strategy, Overflows(), plugins=[plugin])
    return {**result, "scaler": scaler.state_dict()}


@case()
def compiled(strategy: str) -> dict[str, Any]:
    model = Net()
    model.net = torch.compile(model.net, backend="aot_eager")
    result = fit(strategy, model)
    torch._dynamo.reset()
    return result


@case(without_ddp="torch's SyncBatchNorm is of GPUs alone")
def compiled_around_synchronized_normalization(strategy: str) -> dict[str, Any]:
    model = Net(convolutions(normalization=True))
    model.net = torch.compile(model.net, backend="aot_eager")
    with warnings.catch_warnings(record=True) as caught:
        warnings.simplefilter("always")
        result = fit(strategy, model, sync_batchnorm=SIZE > 1)
    torch._dynamo.reset()
    assert not [w for w in caught if "Dynamo" in str(w.message)]
    return result


class Checkpointed(Net):
    def __init__(self, reentrant: bool) -> None:
        super().__init__()
        self.reentrant = reentrant

    def forward(self, x: Tensor) -> Tensor:
        x = x.requires_grad_()  # which reentrant checkpointing asks for
        return checkpoint(self.net, x, use_reentrant=self.reentrant)


@case()
def activation_checkpointing(strategy: str) -> dict[str, Any]:
    return fit(strategy, Checkpointed(reentrant=False))


@case(without_ddp="its reducer refuses a second backward inside the first")
def reentrant_activation_checkpointing(strategy: str) -> dict[str, Any]:
    return fit(strategy, Checkpointed(reentrant=True))


# --------------------------------------------------------------------------------- options


def convolutions(normalization: bool) -> nn.Module:
    return nn.Sequential(
        nn.Unflatten(1, (3, 2, 2)), nn.Conv2d(3, 8, 3, padding=1),
        nn.BatchNorm2d(8) if normalization else nn.Identity(), nn.Tanh(),
        nn.Conv2d(8, 4, 1), nn.Flatten(), nn.Linear(16, CLASSES),
    ).to(memory_format=torch.channels_last)  # fmt: skip


@case(without_ddp="an option of ours")
def many_buckets(strategy: str) -> dict[str, Any]:
    """All but the last bucket leave during backward; gradients keep the parameters' strides."""
    early: list[int] = []
    if strategy == "horovod":
        from strategies.buckets import GradientBuckets

        finish = GradientBuckets.finish

        def watch(buckets: GradientBuckets) -> Callable[[], bool]:
            early.append(sum(bucket.work is not None for bucket in buckets.buckets))
            return finish(buckets)

        GradientBuckets.finish = watch  # type: ignore[method-assign]
    model = Net(convolutions(normalization=False))
    result = fit(make(strategy, bucket_mib=1e-4), model)  # 26 numbers: each layer its own
    if strategy == "horovod":
        GradientBuckets.finish = finish  # type: ignore[method-assign]
    strides = [p.grad.stride() == p.stride() for p in model.parameters() if p.grad is not None]
    left_early = SIZE == 1 or (len(early) == 20 and min(early) >= 3)
    return {**result, "strides": all(strides), "left early": left_early}


@case(without_ddp="an option of ours")
def gradient_predivide(strategy: str) -> dict[str, Any]:
    return fit(make(strategy, gradient_predivide_factor=3.0))


class Summed(Net):
    """The loss of one process times the ranks that others have: what op=sum gives them."""

    def training_step(self, batch: list[Tensor], batch_idx: int) -> Tensor:
        return super().training_step(batch, batch_idx) / SIZE


@case(without_ddp="an option of ours")
def sum_of_gradients(strategy: str) -> dict[str, Any]:
    result = fit(make(strategy, op="sum"), Summed(), accumulate_grad_batches=2)
    return {key: value for key, value in result.items() if key != "metrics"}


# Two roundings to 11 bits, of gradients that are small beside the weights.
@case(tolerance=2e-3, without_ddp="an option of ours")
def compression_fp16(strategy: str) -> dict[str, Any]:
    return fit(make(strategy, compression="fp16"), NobodyUses())


@case(tolerance=2e-2, without_ddp="an option of ours")  # to 8 bits
def compression_bf16(strategy: str) -> dict[str, Any]:
    return fit(make(strategy, compression="bf16"), NobodyUses())


@case(tolerance=2e-3, without_ddp="an option of ours")
def compression_in_pieces(strategy: str) -> dict[str, Any]:
    """Of 20 numbers each: a bucket is sent in several."""
    if strategy != "horovod":
        return fit(strategy, NobodyUses())
    from strategies import reductions

    piece, reductions.PIECE = reductions.PIECE, 20
    result = fit(make(strategy, compression="fp16"), NobodyUses())
    reductions.PIECE = piece
    return result


class SameEverywhere(Net):
    """Every rank has the whole batch, so that Adasum has nothing to add up: it is the average."""

    def training_step(self, batch: list[Tensor], batch_idx: int) -> Tensor:
        whole = samples().tensors
        rows = slice(batch_idx * GLOBAL_BATCH, (batch_idx + 1) * GLOBAL_BATCH)
        return super().training_step([part[rows].to(self.device) for part in whole], batch_idx)


@case(without_ddp="an option of ours")
def adasum_of_equal_gradients(strategy: str) -> dict[str, Any]:
    return fit(make(strategy, op="adasum"), SameEverywhere())


@case(without_ddp="torch's needs a GPU")
def sync_batchnorm(strategy: str) -> dict[str, Any]:
    return fit(strategy, Net(convolutions(normalization=True)), sync_batchnorm=SIZE > 1)


def squash(layer: nn.Module, inputs: Any, output: Tensor) -> Tensor:
    return output.tanh()


class Saves(Net):
    """Copies itself, and saves itself whole, while it is trained."""

    copies: list[nn.Module]

    def on_train_epoch_end(self) -> None:
        self.copies = [copy.deepcopy(self.net), pickle.loads(pickle.dumps(self.net))]


@case(without_ddp="torch's needs a GPU")
def sync_batchnorm_with_a_hook(strategy: str) -> dict[str, Any]:
    """It belongs to the layer that somebody made, and stays with it; copies are as it was made."""
    model = Saves(convolutions(normalization=True))
    layer = model.net[2]
    layer.register_forward_hook(squash)
    result = fit(strategy, model, sync_batchnorm=SIZE > 1)
    kinds = [type(net[2]).__name__ for net in (model.net, *model.copies)]
    weights = [net.state_dict() for net in model.copies]
    return {**result, "same": model.net[2] is layer, "kinds": kinds, "copies": weights}


@case(without_ddp="torch's needs a GPU")
def sync_batchnorm_of_torch(strategy: str) -> dict[str, Any]:
    """Layers that the model itself has made synchronous; the others stay as they are."""
    model = Net(convolutions(normalization=True))
    model.net = nn.SyncBatchNorm.convert_sync_batchnorm(model.net)
    return fit(strategy, model)


@case(without_ddp="torch's needs a GPU")
def sync_batchnorm_without_parameters(strategy: str) -> dict[str, Any]:
    outcomes = {}
    # torch's own fails in backward on a GPU where only one is missing: "invalid gradient".
    alone = [["weight"], ["bias"]] if DEVICE == "cpu" else []
    for missing in [["weight", "bias"], *alone]:
        layers = nn.Linear(FEATURES, FEATURES), nn.BatchNorm1d(FEATURES, momentum=None)
        model = Net(nn.Sequential(*layers, nn.Linear(FEATURES, CLASSES)))
        for name in missing:
            model.net[1].register_parameter(name, None)
        outcomes[" ".join(missing)] = fit(strategy, model, sync_batchnorm=SIZE > 1)
    return outcomes


# ------------------------------------------------------------------ metrics and evaluation


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

    def _apply(self, fn: Callable) -> nn.Module:  # type: ignore[override]
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


@case()
def validation_while_training(strategy: str) -> dict[str, Any]:
    run, model = trainer(strategy), Measured()
    run.fit(model, loader(), DataLoader(samples(32), batch_size=GLOBAL_BATCH // SIZE))
    return results(run, model)


# -------------------------------------------------------- samplers, checkpoints, callbacks


class Remembers(Net):
    """Which samples were trained, on which of all ranks does not matter."""

    def __init__(self) -> None:
        super().__init__()
        self.seen: list[Tensor] = []

    def training_step(self, batch: list[Tensor], batch_idx: int) -> Tensor:
        self.seen.append(batch[0][:, 0].detach())
        return super().training_step(batch, batch_idx)


def everyones(run: pl.Trainer, values: list[Tensor]) -> list[float]:
    """What all ranks have seen, sorted."""
    mine = torch.cat(values)
    gathered = run.strategy.all_gather(mine) if SIZE > 1 else mine
    return sorted(gathered.reshape(-1).tolist())


def checkpoints(strategy: str, folder: Path) -> dict[str, Any]:
    """Train 7 of 10 batches of 8, keep a checkpoint, and go on from it in another Trainer."""
    sizes = {"batch_size": GLOBAL_BATCH // SIZE, "shuffle": True}
    pl.seed_everything(3)
    keep = ModelCheckpoint(folder, every_n_train_steps=7, save_last=True, filename="{step}")
    run, model = trainer(strategy, callbacks=[keep], max_steps=7, enable_checkpointing=True), None
    model = Remembers()
    run.fit(model, DataLoader(samples(), **sizes))
    files = sorted(path.name for path in folder.iterdir()) if RANK == 0 else []
    # Rank 0 has written, and only it can read: the others need not see its files.
    path = folder / "last.ckpt" if RANK == 0 else "/nowhere/to/be/found.ckpt"
    resumed, again = trainer(strategy), Remembers()
    resumed.fit(again, DataLoader(samples(), **sizes), ckpt_path=path)
    seen = everyones(resumed, model.seen + again.seen[:3])
    return results(
        resumed, again, files=files if RANK == 0 else None, seen=seen,
        all_once=seen == sorted(samples().tensors[0][:, 0].tolist()), batches=len(again.seen),
    )  # fmt: skip


@case(without_ddp="a resumed epoch begins anew there")
def resume_within_an_epoch(strategy: str) -> dict[str, Any]:
    if strategy == "single":  # so does it; an uninterrupted training is what both must equal
        pl.seed_everything(3)
        run, model = trainer("single"), Remembers()
        sampler = DistributedSampler(samples(), 1, 0, shuffle=True, seed=3)
        run.fit(model, DataLoader(samples(), batch_size=8, sampler=sampler))
        seen = sorted(torch.cat(model.seen[:10]).tolist())
        files = ["last.ckpt", "step=7.ckpt"]
        extra = {"files": files, "seen": seen, "all_once": True, "batches": 13}
        return results(run, model, **extra)
    with tempfile.TemporaryDirectory() as folder:
        result = checkpoints(strategy, Path(folder))
    return result if RANK == 0 else {**result, "files": ["last.ckpt", "step=7.ckpt"]}


@case()
def averaged_weights_swa(strategy: str) -> dict[str, Any]:
    swa = StochasticWeightAveraging(swa_lrs=0.02, swa_epoch_start=1, annealing_epochs=1)
    return fit(strategy, callbacks=[swa], max_epochs=4)


@case()
def averaged_weights_ema(strategy: str) -> dict[str, Any]:
    return fit(strategy, callbacks=[EMAWeightAveraging(decay=0.8)])


@case()
def entry_points(strategy: str) -> dict[str, Any]:
    """All of them with one Trainer, in turns, and then another Trainer."""
    model, run = Measured(), trainer(strategy, max_epochs=1)
    batches = DataLoader(samples(32), batch_size=GLOBAL_BATCH // SIZE)
    before = run.validate(model, batches, verbose=False)[0]
    run.fit(model, loader(), batches)
    tested = run.test(model, batches, verbose=False)[0]
    predicted = everyones(run, [part[:, 0] for part in run.predict(model, batches)])
    run.fit_loop.max_epochs = 2
    run.fit(model, loader(), batches)
    again = trainer(strategy, max_epochs=1)
    again.fit(model, loader(), batches)
    return results(again, model, before=before, tested=tested, predicted=predicted)


class Counting(IterableDataset):
    """Batches without a length; some more on some ranks, if asked."""

    def __init__(self, batches: int) -> None:
        self.batches = batches

    def __iter__(self) -> Any:
        per_rank = GLOBAL_BATCH // SIZE
        inputs, targets = samples().tensors
        for batch in range(self.batches):
            for sample in range(per_rank):
                index = batch * GLOBAL_BATCH + sample * SIZE + RANK
                yield inputs[index], targets[index]


@case()
def data_without_a_length(strategy: str) -> dict[str, Any]:
    run, model = trainer(strategy), Net()
    run.fit(model, DataLoader(Counting(6), batch_size=GLOBAL_BATCH // SIZE))
    return results(run, model)

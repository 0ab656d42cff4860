"""Cases of steps: optimizers, accumulation, clipping, schedules."""

from __future__ import annotations

import contextlib
from collections.abc import Callable
from typing import Any

import pytorch_lightning as pl
import torch
from pytorch_lightning.callbacks import GradientAccumulationScheduler
from torch import Tensor, nn

from tests.matrix.cases import case
from tests.matrix.trainings import FEATURES, GLOBAL_BATCH, RANK, SIZE, Net, fit, make, samples


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
        return 0.1 * weights + 0 * super().training_step(batch, batch_idx)


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


class Explains(pl.Callback):
    """Asks between steps what the network looks at, as Grad-CAM does."""

    def on_train_batch_end(self, trainer: Any, pl_module: Any, *_: Any) -> None:
        pl_module.net(samples()[:4][0].requires_grad_())[:, 0].sum().backward()


@case()
def backwards_between_steps(strategy: str) -> dict[str, Any]:
    """They leave gradients of this rank alone, which the next step clears."""
    return fit(strategy, callbacks=[Explains()])


def counted(strategy: str, **arguments: Any) -> dict[str, Any]:
    """Gradients are reduced once a step, not once a batch."""
    if strategy != "horovod":
        return {**fit(strategy, **arguments), "reductions": True}
    from strategies.buckets import GradientBuckets

    finish, count = GradientBuckets.finish, [0]

    def counting(buckets: GradientBuckets) -> Callable[[], bool]:
        count[0] += 1
        return finish(buckets)

    GradientBuckets.finish = counting
    result = fit(strategy, **arguments)
    GradientBuckets.finish = finish
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


class OneAccumulates(Adversaries):
    """The critic steps while the generator has gradients that stay local. Nothing is toggled."""

    def training_step(self, batch: list[Tensor], batch_idx: int) -> None:
        first, second = self.optimizers()
        real, fake = self.critic(batch[0]), self.critic(self.generator(batch[0]).detach())
        self.manual_backward((fake - real).mean() + real.square().mean())
        local = getattr(self.trainer.strategy, "block_backward_sync", contextlib.nullcontext)
        with contextlib.nullcontext() if batch_idx % 2 else local():
            self.manual_backward((self.generator(batch[0]) - 1).square().mean())
        for optimizer, window in ((second, 1), (first, 2)):
            if (batch_idx + 1) % window == 0:
                optimizer.step()
                optimizer.zero_grad()


@case()
def adversaries_of_which_one_accumulates(strategy: str) -> dict[str, Any]:
    return fit(strategy, OneAccumulates())


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
        super().manual_backward(loss / SIZE)


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

"""Cases of precision, compilation and normalization, and of the strategy's options."""

from __future__ import annotations

import copy
import pickle
import warnings
from collections.abc import Callable
from typing import Any

import pytest
import torch
from pytorch_lightning.plugins import MixedPrecision
from torch import Tensor, nn
from torch.utils.checkpoint import checkpoint

from tests.matrix import trainings
from tests.matrix.cases import case
from tests.matrix.trainings import (
    CLASSES,
    FEATURES,
    GLOBAL_BATCH,
    RANK,
    SIZE,
    Net,
    NobodyUses,
    fit,
    make,
    samples,
)


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
    scaler = torch.amp.GradScaler(trainings.DEVICE, init_scale=128.0)
    plugin = MixedPrecision("16-mixed", trainings.DEVICE, scaler)
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

        GradientBuckets.finish = watch
    model = Net(convolutions(normalization=False))
    result = fit(make(strategy, bucket_mib=1e-4), model)  # 26 numbers: each layer its own
    if strategy == "horovod":
        GradientBuckets.finish = finish
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
    """Of 20 numbers each: a bucket is sent in several, by a Horovod that does not cut itself."""
    if strategy != "horovod":
        return fit(strategy, NobodyUses())
    from strategies import reductions

    with pytest.MonkeyPatch.context() as patch:
        patch.setattr(reductions, "PIECE", 20)
        patch.setattr(reductions, "cuts_itself", lambda: False)
        return fit(make(strategy, compression="fp16"), NobodyUses())


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


class Activates(nn.BatchNorm1d):
    """Has a forward of its own, as some layers of timm."""

    def forward(self, input: Tensor) -> Tensor:
        return super().forward(input).relu()


class Teaches(Net):
    """Its teacher, in train mode, is a copy of its network as it is when training begins."""

    def on_fit_start(self) -> None:
        self.teacher = copy.deepcopy(self.net).requires_grad_(False)
        self.frozen = Activates(FEATURES).requires_grad_(False).eval()  # may stay as it is

    def training_step(self, batch: list[Tensor], batch_idx: int) -> Tensor:
        distance = nn.functional.mse_loss(self.net(batch[0]), self.teacher(batch[0]))
        return super().training_step(batch, batch_idx) + distance


@case(without_ddp="torch's needs a GPU")
def sync_batchnorm_of_a_teacher(strategy: str) -> dict[str, Any]:
    return fit(strategy, Teaches(convolutions(normalization=True)), sync_batchnorm=SIZE > 1)


@case(without_ddp="torch's needs a GPU")
def sync_batchnorm_of_torch(strategy: str) -> dict[str, Any]:
    """Layers that the model itself has made synchronous; the others stay as they are."""
    model = Net(convolutions(normalization=True))
    model.net = nn.SyncBatchNorm.convert_sync_batchnorm(model.net)
    return fit(strategy, model)


@case(without_ddp="torch's needs a GPU")
def sync_batchnorm_that_keeps_its_statistics(strategy: str) -> dict[str, Any]:
    """As Lightning's BaseFinetuning.freeze(train_bn=False) leaves a layer."""
    model = Net(convolutions(normalization=True))
    model.net[2].track_running_stats = False
    return fit(strategy, model, sync_batchnorm=SIZE > 1)


@case(without_ddp="torch's needs a GPU")
def sync_batchnorm_without_parameters(strategy: str) -> dict[str, Any]:
    outcomes = {}
    # torch's own fails in backward on a GPU where only one is missing: "invalid gradient".
    alone = [["weight"], ["bias"]] if trainings.DEVICE == "cpu" else []
    for missing in [["weight", "bias"], *alone]:
        layers = nn.Linear(FEATURES, FEATURES), nn.BatchNorm1d(FEATURES, momentum=None)
        model = Net(nn.Sequential(*layers, nn.Linear(FEATURES, CLASSES)))
        for name in missing:
            model.net[1].register_parameter(name, None)
        outcomes[" ".join(missing)] = fit(strategy, model, sync_batchnorm=SIZE > 1)
    return outcomes

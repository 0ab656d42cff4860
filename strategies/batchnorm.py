"""Batch normalization over the global batch: Trainer(sync_batchnorm=True), on any device.

torch's own needs torch.distributed and a GPU, Horovod's a GPU.
"""

from __future__ import annotations

import copyreg
from functools import cache
from typing import Any

import horovod.torch as hvd
import torch
from pytorch_lightning.plugins.layer_sync import LayerSync
from pytorch_lightning.utilities.exceptions import MisconfigurationException
from torch import Tensor, nn
from torch.autograd.function import once_differentiable
from torch.nn.modules.batchnorm import _BatchNorm
from typing_extensions import override

from .collectives import World, wait


class SyncBatchNorm(_BatchNorm):
    """Batch normalization whose mean and variance, in training, are those of all ranks together.

    Input and output: (batch, channels, ...); the batch may differ between ranks. Costs an
    all-gather of 2 * channels + 1 numbers in forward and an all-reduce of 2 * channels in backward.
    Do not construct it: `SyncLayers` turns layers into it. Second derivatives (a gradient penalty)
    are an error.
    """

    sync_name: str
    sync_world: World

    def __reduce_ex__(self, protocol: Any) -> tuple[Any, ...]:
        """Copied or saved, it becomes a layer of its original class again."""
        state = {k: value for k, value in vars(self).items() if not k.startswith("sync_")}
        return copyreg._reconstructor, (type(self).__bases__[1], object, None), state  # type: ignore[attr-defined]

    @override
    def forward(self, input: Tensor) -> Tensor:
        if not self.training:
            return super().forward(input)
        self._check_input_dim(input)
        output, mean, variance, count = _normalize(
            input, self.weight, self.bias, self.eps, self.sync_name, self.sync_world
        )
        if self.track_running_stats and self.running_mean is not None:
            assert self.running_var is not None and self.num_batches_tracked is not None
            with torch.no_grad():
                self.num_batches_tracked.add_(1)
                momentum = self.momentum
                if momentum is None:  # the mean over all batches
                    momentum = 1 / float(self.num_batches_tracked)
                variance = variance * count / (count - 1)
                self.running_mean.lerp_(mean.to(self.running_mean.dtype), momentum)
                self.running_var.lerp_(variance.to(self.running_var.dtype), momentum)
        return output


class _Normalize(torch.autograd.Function):
    """x -> (x - mean) / sqrt(variance + eps) * weight + bias, statistics over batch and ranks."""

    @staticmethod
    def forward(
        ctx: Any, x: Tensor, weight: Tensor | None, bias: Tensor | None, eps: float, name: str,
        world: World,
    ) -> tuple[Tensor, Tensor, Tensor, Tensor]:  # fmt: skip
        wide = torch.float64 if x.dtype == torch.float64 else torch.float32
        inner = [d for d in range(x.dim()) if d != 1]
        shape = [1, -1] + [1] * (x.dim() - 2)
        values = x.to(wide)
        if values.numel():
            variance, mean = torch.var_mean(values, inner, correction=0)
        else:
            variance = mean = values.new_zeros(x.shape[1])
        mine = torch.cat([mean, variance, mean.new_full((1,), values.numel() / x.shape[1])])
        world.before_collective()
        handle = hvd.allgather_async(mine.unsqueeze(0), f"{name}.forward", world.process_set)
        gathered = wait(handle)
        means, variances, counts = gathered.split([x.shape[1], x.shape[1], 1], dim=1)
        count = counts.sum()
        # The second condition waits for a GPU; where the first one is false it is not asked.
        if values.numel() < 2 * x.shape[1] and count < 2:
            raise ValueError(f"batch normalization needs more than 1 value a channel: {x.shape}")
        # Chan et al. 1979: the variance of a union from those of its parts.
        mean = (counts * means).sum(0) / count
        variance = (counts * (variances + (means - mean) ** 2)).sum(0) / count
        inverse = (variance + eps).rsqrt()
        normalized = (values - mean.view(shape)) * inverse.view(shape)
        output = normalized if weight is None else normalized * weight.to(wide).view(shape)
        if bias is not None:
            output = output + bias.to(wide).view(shape)
        ctx.save_for_backward(normalized, inverse, weight, bias)
        ctx.name, ctx.world, ctx.count, ctx.inner, ctx.shape = name, world, count, inner, shape
        ctx.mark_non_differentiable(mean, variance, count)
        return output.to(x.dtype), mean, variance, count

    @staticmethod
    @once_differentiable
    def backward(ctx: Any, *gradients: Any) -> tuple[Tensor | None, ...]:
        normalized, inverse, weight, bias = ctx.saved_tensors
        gradient = gradients[0].to(normalized.dtype)
        grad_bias = gradient.sum(ctx.inner)
        grad_weight = (gradient * normalized).sum(ctx.inner)
        # The statistics depend on the values of all ranks, so grad_input needs sums over all. The
        # gradients of weight and bias stay this rank's: buckets average them with all others.
        sums = torch.stack([grad_bias, grad_weight])
        ctx.world.run_deferred_check()
        wait(
            hvd.allreduce_async_(
                sums, name=f"{ctx.name}.backward", op=hvd.Sum, process_set=ctx.world.process_set
            )
        )
        sums /= ctx.count
        grad_input = gradient - sums[0].view(ctx.shape) - normalized * sums[1].view(ctx.shape)
        scale = inverse if weight is None else inverse * weight.to(inverse.dtype)
        grad_input = grad_input * scale.view(ctx.shape)
        return (
            grad_input.to(gradients[0].dtype),
            None if weight is None else grad_weight.to(weight.dtype),
            None if bias is None else grad_bias.to(bias.dtype),
            None, None, None,
        )  # fmt: skip


# torch.compile cannot trace Horovod; it compiles what is around this.
_normalize = torch.compiler.disable(_Normalize.apply)


class SyncLayers(LayerSync):
    """Makes layers of batch normalization synchronous, and undoes it.

    Only the class of a layer changes, for a while. It stays the same object, with its hooks and
    attributes, for all that refer to it.

    Args:
        kind: which layers; nn.SyncBatchNorm for those that the module's author chose.
    """

    def __init__(self, world: World, kind: type[_BatchNorm] = _BatchNorm) -> None:
        self.world, self.kind = world, kind

    @override
    def apply(self, model: nn.Module, refuse: bool = True) -> nn.Module:
        """A layer whose class has its own forward is left as it is, without `refuse`.

        Raises:
            MisconfigurationException: for such a layer, with `refuse`.
        """
        for name, layer in model.named_modules():
            if isinstance(layer, self.kind) and not isinstance(layer, SyncBatchNorm):
                if type(layer).forward not in (_BatchNorm.forward, nn.SyncBatchNorm.forward):
                    if not refuse:
                        continue
                    raise MisconfigurationException(
                        f"sync_batchnorm: {name} is a {type(layer).__name__} with a forward of its "
                        "own, which would be lost: put that into a layer behind it"
                    )
                layer.__class__ = _synchronous(type(layer))  # type: ignore[arg-type]  # has a hash
                vars(layer).update(sync_name=f"batchnorm.{name}", sync_world=self.world)
        return model

    @override
    def revert(self, model: nn.Module) -> nn.Module:
        for layer in model.modules():
            if isinstance(layer, SyncBatchNorm):
                layer.__class__ = type(layer).__bases__[1]
                del layer.sync_name, layer.sync_world
        return model


@cache
def _synchronous(plain: type[_BatchNorm]) -> type[_BatchNorm]:
    return type(f"Sync{plain.__name__}", (SyncBatchNorm, plain), {})

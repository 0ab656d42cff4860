"""How gradients lie in memory: which of them share a bucket, and where in it each is."""

from __future__ import annotations

from collections.abc import Iterable
from dataclasses import dataclass, field

import torch
from torch import Tensor
from torch.nn import Parameter

from .reductions import InFlight

MIB = 2**20


@dataclass
class Bucket:
    """Parameters whose gradients travel together. Its memory is taken when it is first used."""

    name: str
    parameters: list[Parameter]
    buffer: Tensor = field(default_factory=lambda: torch.empty(0))
    views: list[Tensor] = field(default_factory=list)
    trained: bool = True
    missing: int = 0
    unused: list[int] = field(default_factory=list)
    work: InFlight | None = None

    @property
    def sizes(self) -> list[int]:
        return [parameter.numel() for parameter in self.parameters]

    @property
    def flags(self) -> Tensor:
        """One a parameter, then "last batch", then "not the last"."""
        return self.buffer[-len(self.parameters) - 2 :]


def split(parameters: Iterable[tuple[Parameter, object]], bytes_: float) -> list[list[Parameter]]:
    """Consecutive parameters of one kind in groups that end when they reach `bytes_`.

    The first end at 1, 2, 4, ... MiB. At each moment one group of each kind is open.
    """
    groups: list[list[Parameter]] = []
    open_: dict[object, tuple[list[Parameter], int]] = {}
    limit = min(MIB, bytes_)
    for parameter, kind in parameters:
        group, size = open_.pop(kind, ([], 0))
        group.append(parameter)
        size += parameter.numel() * parameter.element_size()
        if size >= limit:
            groups.append(group)
            limit = min(2 * limit, bytes_)
        else:
            open_[kind] = group, size
    return groups + [group for group, _ in open_.values()]


def fill(views: list[Tensor], gradients: list[Tensor], factor: float) -> None:
    """Each view becomes its gradient times the factor; on a CPU in one pass over the memory."""
    if factor != 1 and views[0].is_cpu and views[0].dtype == gradients[0].dtype:
        for view, gradient in zip(views, gradients):
            torch.mul(gradient, factor, out=view)
        return
    torch._foreach_copy_(views, gradients)
    if factor != 1:
        torch._foreach_mul_(views, factor)


def allocate(bucket: Bucket) -> None:
    """Its memory, unless it has it."""
    if bucket.views:
        return
    first, sizes = bucket.parameters[0], bucket.sizes
    # Horovod: bfloat16 is unknown to it, and sums of 16-bit floats lose digits.
    dtype = torch.float64 if first.dtype == torch.float64 else torch.float32
    count = sum(sizes)
    bucket.buffer = torch.zeros(count + len(sizes) + 2, dtype=dtype, device=first.device)
    for parameter, chunk in zip(bucket.parameters, bucket.buffer[:count].split(sizes)):
        bucket.views.append(strided_as(parameter, chunk))


def strided_as(parameter: Parameter, chunk: Tensor) -> Tensor:
    """The memory of `chunk` with the parameter's shape and strides (channels_last, transposed), as
    autograd makes gradients: fused optimizers go through the memory of both alike."""
    strides = torch.empty_like(parameter, device="meta").stride()
    # data: an ordinary tensor to autograd, where a view that is made under no_grad is none.
    return chunk.as_strided(parameter.shape, strides, chunk.storage_offset()).data

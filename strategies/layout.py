"""How gradients lie in memory: which of them share a bucket, and where each lies in it."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass, field

import torch
from torch import Tensor
from torch.nn import Parameter

from .reductions import InFlight

MIB = 2**20


@dataclass
class Bucket:
    """Parameters whose gradients travel together."""

    name: str
    parameters: list[Parameter]
    buffer: Tensor = field(default_factory=lambda: torch.empty(0))  # gradients, then flags
    views: list[Tensor] = field(default_factory=list)  # one for each parameter
    trained: bool = True
    missing: int = 0  # gradients that this backward has yet to make
    unused: list[int] = field(default_factory=list)  # indices of parameters that it did not use
    work: InFlight | None = None

    @property
    def sizes(self) -> list[int]:
        return [parameter.numel() for parameter in self.parameters]

    @property
    def flags(self) -> Tensor:
        """One for each parameter, then "last batch", then "not the last"."""
        return self.buffer[-len(self.parameters) - 2 :]

    def allocate(self) -> None:
        """Take memory, at the first use."""
        if self.views:
            return
        first, sizes = self.parameters[0], self.sizes
        # Horovod: bfloat16 is unknown to it, and sums of 16-bit floats lose digits.
        dtype = torch.float64 if first.dtype == torch.float64 else torch.float32
        count = sum(sizes)
        self.buffer = torch.zeros(count + len(sizes) + 2, dtype=dtype, device=first.device)
        for parameter, chunk in zip(self.parameters, self.buffer[:count].split(sizes)):
            self.views.append(strided_as(parameter, chunk))


def split(
    parameters: Sequence[tuple[Parameter, object]], bytes_: float | None = None
) -> list[list[Parameter]]:
    """Consecutive parameters of one kind in groups that end when they reach `bytes_`.

    None: a sixth of all bytes, but 1 to 4 MiB. The first end at 1, 2, 4, ... MiB. At each moment
    one group of each kind is open.
    """
    if bytes_ is None:
        total = sum(parameter.numel() * parameter.element_size() for parameter, _ in parameters)
        bytes_ = min(max(MIB, total / 6), 4 * MIB)
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


def strided_as(parameter: Parameter, chunk: Tensor) -> Tensor:
    """The memory of `chunk` with the parameter's shape and strides (channels_last, transposed), as
    autograd makes gradients: fused optimizers go through the memory of both alike."""
    strides = torch.empty_like(parameter, device="meta").stride()
    # .data is an ordinary tensor to autograd, which a view made under no_grad is not.
    return chunk.as_strided(parameter.shape, strides, chunk.storage_offset()).data

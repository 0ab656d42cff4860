"""Ways to combine a flat buffer of gradients over all ranks.

Each is a generator: it starts an operation of Horovod, yields its handle, receives its result, and
may start the next; when it ends, the buffer holds the combined gradients. So reductions of several
steps run beside backward as those of a single step do; an `InFlight` drives each.
"""

from __future__ import annotations

from collections.abc import Callable, Generator
from functools import cache
from typing import Any

import horovod.torch as hvd
import torch
from torch import Tensor

from .collectives import World

Steps = Generator[int, Any, None]
PIECE = 4 * 2**20  # numbers, 8 MiB of 16 bits
Reduction = Callable[[Tensor, list[int], str, World], Steps]


class InFlight:
    """A reduction that was started."""

    def __init__(self, steps: Steps) -> None:
        self._steps = steps
        self._handle: int | None = next(steps)

    def rests(self) -> bool:
        """Whether nothing of it is on the wire now."""
        return self._handle is None or hvd.poll(self._handle)

    def advance(self) -> bool:
        """Start the steps whose turn has come; whether all are done."""
        while self._handle is not None and hvd.poll(self._handle):
            try:
                self._handle = self._steps.send(hvd.synchronize(self._handle))
            except StopIteration:
                self._handle = None
        return self._handle is None


def add(buffer: Tensor, sizes: list[int], name: str, world: World) -> Steps:
    """The sum: each rank sends 2 (n - 1) / n of the buffer over a ring of n ranks."""
    yield hvd.allreduce_async_(buffer, name=name, op=hvd.Sum, process_set=world.process_set)


@cache
def cuts_itself() -> bool:
    """Whether Horovod sums in 16 bits over Gloo: that of cluster/wheel.py does."""
    library = hvd.mpi_ops._basics.MPI_LIB_CTYPES
    return hasattr(library, "horovod_sums_in_16_bits") and not hvd.mpi_enabled()


def add_in_16_bits(dtype: torch.dtype) -> Reduction:
    """The sum of values cut to `dtype`, half as many bytes: an all-to-all, and an all-gather.

    Rank i adds the i-th part of all ranks' buffers in float32 and sends the sum to all. So a value
    is rounded twice, whatever the number of ranks, and bfloat16, which Horovod cannot add, works.
    Over Gloo the Horovod of cluster/wheel.py does the same for a name that ends so, and cuts only
    what is sent from host to host.
    """
    ending = "@bf16" if dtype == torch.bfloat16 else "@fp16"

    def steps(buffer: Tensor, sizes: list[int], name: str, world: World) -> Steps:
        if buffer.is_cpu and buffer.dtype == torch.float32 and cuts_itself():
            yield from add(buffer, sizes, name + ending, world)
            return
        # In pieces, so that one of a huge bucket is on the wire while another is converted.
        pieces = buffer.split(PIECE)
        scattered, gathered = [], []
        for index, piece in enumerate(pieces):
            part = -(-piece.numel() // world.size)
            cut = piece.new_zeros(part * world.size, dtype=dtype)
            cut[: piece.numel()] = piece
            splits = torch.full((world.size,), part, dtype=torch.int32)
            # Horovod only moves these bytes, so bfloat16 can travel as float16, which it knows.
            raw = cut.view(torch.float16)
            scatter = f"{name}.{index}.scatter"
            scattered.append(hvd.alltoall_async(raw, splits, scatter, world.process_set))
        for index, handle in enumerate(scattered):
            received, _ = yield handle
            mine = received.view(dtype).view(world.size, -1).sum(0, dtype=torch.float32).to(dtype)
            raw, gather = mine.view(torch.float16), f"{name}.{index}.gather"
            gathered.append(hvd.allgather_async(raw, gather, world.process_set))
        for piece, handle in zip(pieces, gathered):
            whole = yield handle
            piece.copy_(whole.view(dtype)[: piece.numel()])

    return steps


COMPRESSIONS = {
    "none": add,
    "fp16": add_in_16_bits(torch.float16),
    "bf16": add_in_16_bits(torch.bfloat16),
}


def adasum(buffer: Tensor, sizes: list[int], name: str, world: World) -> Steps:
    """Adasum (Maleki et al. 2021, https://arxiv.org/abs/2006.02924), parameter by parameter.

    Gradients that point the same way are averaged, orthogonal ones are added. In log2(n) rounds
    each rank exchanges the whole buffer with one other. The flags behind the gradients are added.
    Horovod's own Adasum needs a build with MPI; this one runs on any.
    """
    end = sum(sizes)
    for distance in (2**k for k in range(world.size.bit_length() - 1)):
        partner = world.rank ^ distance
        splits = torch.zeros(world.size, dtype=torch.int32)
        splits[partner] = buffer.numel()
        theirs, _ = yield hvd.alltoall_async(
            buffer, splits, f"{name}.{distance}", world.process_set
        )
        rest = buffer[end:] + theirs[end:]
        mixed = [_mix(a, b) for a, b in zip(buffer[:end].split(sizes), theirs[:end].split(sizes))]
        buffer.copy_(torch.cat([*mixed, rest]))


def _mix(a: Tensor, b: Tensor) -> Tensor:
    wide_a, wide_b = a.double(), b.double()
    dot = wide_a @ wide_b
    squares = wide_a @ wide_a, wide_b @ wide_b
    # where: an `if` would wait for a GPU.
    of_a, of_b = (torch.where(square > 0, 1 - dot / (2 * square), 1.0) for square in squares)
    return of_a * a + of_b * b

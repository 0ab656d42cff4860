"""Find weights and buffers that differ between ranks: averaged gradients need equal ones."""

from __future__ import annotations

import hashlib
from collections.abc import Iterator, Mapping

import torch
from pytorch_lightning.utilities.rank_zero import rank_zero_warn
from torch import Tensor, nn
from torch.nn.modules.batchnorm import _NormBase

from .collectives import World

PIECE = 2**22  # numbers, 32 MiB of 64 bits
WHOLE = {1: torch.int8, 2: torch.int16, 4: torch.int32, 8: torch.int64}  # by bytes


def warn_of_drift(module: nn.Module, world: World, buffers: bool) -> bool:
    """Name the first parameter that differs between ranks, or else, with `buffers`, the first
    buffer; return whether there is one."""
    if name := _first_apart(_sums(module), world):
        rank_zero_warn(
            f"the parameter {name} differs between ranks, and checkpoints have that of rank 0: "
            "something else than averaged gradients has moved it (a step or gradients of each "
            "rank alone, weights set when training had begun, Embedding(max_norm=))"
        )
        return True
    # Shapes are in the names: shared_buffers() warns of other shapes, and of buffers that are there
    # on some ranks only.
    own = own_buffers(module) if buffers else ()
    digests = {f"{name} {tuple(buffer.shape)}": _digest(buffer) for name, buffer in own}
    if name := _first_apart(digests, world):
        rank_zero_warn(
            f"the buffer {name.partition(' ')[0]} differs between ranks, and checkpoints have that "
            "of rank 0: update it with what all ranks have (self.all_gather), or take "
            "HorovodStrategy(broadcast_buffers=True), in conf/ strategy.broadcast_buffers=true"
        )
    return bool(name)


def own_buffers(module: nn.Module) -> Iterator[tuple[str, Tensor]]:
    """All except running means and variances, which layers in train mode do not read."""
    for prefix, layer in module.named_modules():
        if not isinstance(layer, _NormBase):
            yield from layer.named_buffers(prefix, recurse=False)


def _first_apart(mine: Mapping[str, object], world: World) -> str:
    ranks = world.gather_objects(mine)
    names = dict.fromkeys(name for theirs in ranks for name in theirs)  # on all ranks alike
    return next((n for n in names if len({o[n] for o in ranks if n in o}) > 1), "")


def _sums(module: nn.Module) -> dict[str, int]:
    """For each parameter the sum of its bits, read as integers of its element size."""
    sums = {}
    for name, parameter in module.named_parameters():
        values = parameter.detach()
        values = torch.view_as_real(values) if values.is_complex() else values
        integers = values.view(WHOLE[values.element_size()]).reshape(-1)
        # In pieces, because torch copies them to 64 bits.
        sums[name] = sum(piece.sum(dtype=torch.int64) for piece in integers.split(PIECE))
    return {name: int(total) for name, total in sums.items()}  # a GPU is waited for once


def _digest(buffer: Tensor) -> bytes:
    raw = buffer.detach().cpu().contiguous().reshape(-1).view(torch.uint8)
    return hashlib.sha256(raw.numpy().tobytes()).digest()

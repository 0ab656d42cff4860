"""Buffers of a module that each rank changes for itself in training."""

from __future__ import annotations

import hashlib
from collections.abc import Iterator

import torch
from pytorch_lightning.utilities.rank_zero import rank_zero_warn
from torch import Tensor, nn
from torch.nn.modules.batchnorm import _NormBase

from strategies.collectives import World


def own_buffers(module: nn.Module) -> Iterator[tuple[str, Tensor]]:
    """All but running means and variances, which training does not read."""
    for prefix, layer in module.named_modules():
        if not isinstance(layer, _NormBase):
            yield from layer.named_buffers(prefix, recurse=False)


def warn_of_own_buffers(module: nn.Module, world: World) -> None:
    """Name the first buffer that differs between ranks: a codebook or a centre that each rank
    moves by its own batches, while gradients suppose that all have the same."""
    mine = {
        name: hashlib.sha256(
            buffer.detach().cpu().contiguous().reshape(-1).view(torch.uint8).numpy().tobytes()
        ).digest()
        for name, buffer in own_buffers(module)
    }
    ranks = world.gather_objects(mine)
    for name, digest in mine.items():
        if any(other.get(name, digest) != digest for other in ranks):
            rank_zero_warn(
                f"the buffer {name} differs between ranks, and checkpoints have that of rank 0: "
                "update it with what all ranks have (self.all_gather), or take "
                "HorovodStrategy(broadcast_buffers=True), in conf/ strategy.broadcast_buffers=true"
            )
            return

"""Which buffers ranks share: they get those of rank 0 at the start and before evaluations."""

from __future__ import annotations

import hashlib

import torch
from pytorch_lightning.utilities.rank_zero import rank_zero_warn
from torch import Tensor, nn

from .collectives import World


def shared_buffers(module: nn.Module, world: World) -> list[Tensor]:
    """The buffers that all ranks have with the same shape and dtype; a warning names the others.

    A step may register one on some ranks only, or let it grow with what a rank has seen, such as a
    mask for the longest sequence so far. Horovod would wait for the ranks that lack it, or fail.
    """
    buffers = dict(module.named_buffers())
    mine = {name: (tuple(b.shape), b.dtype, b.stride()) for name, b in buffers.items()}
    digest = int.from_bytes(hashlib.sha256(repr(mine).encode()).digest()[:7], "big")
    # All ranks have the same digest if the smallest is the largest: one collective finds both.
    smallest, largest = world.reduce(torch.tensor([digest, -digest]), "min").tolist()
    if smallest == -largest:
        return list(buffers.values())
    ranks = world.gather_objects(mine)
    alike = sorted(name for name in mine if all(theirs.get(name) == mine[name] for theirs in ranks))
    others = sorted({name for theirs in ranks for name in theirs} - set(alike))
    rank_zero_warn(
        f"the buffers {', '.join(others)} are there on some ranks only, or in other shapes: each "
        "rank evaluates with its own, and checkpoints have rank 0's"
    )
    return [buffers[name] for name in alike]

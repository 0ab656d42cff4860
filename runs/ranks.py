"""Objects of all ranks, gathered under any strategy."""

from __future__ import annotations

import dataclasses
import hashlib
from collections.abc import Iterator, Mapping
from typing import Any, TypeVar

import torch
import torch.distributed
from pytorch_lightning.strategies import Strategy
from torch import Tensor
from torch.utils._pytree import tree_leaves

from strategies import HorovodStrategy

T = TypeVar("T")


def gather_objects(strategy: Strategy, mine: T) -> list[T]:
    """The object of every rank, in the order of ranks. All ranks must call it.

    Objects are pickled, and ranks on other hosts may have another Python: send plain types. A
    tensor that is a view takes all of its storage along: clone it.
    """
    if isinstance(strategy, HorovodStrategy) and strategy.world.has_several_ranks():
        return strategy.world.gather_objects(mine)
    if not torch.distributed.is_initialized():
        return [mine]
    objects: list[Any] = [None] * torch.distributed.get_world_size()
    torch.distributed.all_gather_object(objects, mine)
    return objects


def leaves(batch: Any) -> Iterator[Any]:
    """What a batch holds, in torch's containers, mappings (transformers' BatchEncoding) and
    dataclasses, which Lightning moves to a device, too."""
    for leaf in tree_leaves(batch):
        if isinstance(leaf, Mapping):
            yield from leaves(dict(leaf))
        elif dataclasses.is_dataclass(leaf) and not isinstance(leaf, type):
            yield from leaves(vars(leaf))
        else:
            yield leaf


def same_on_all(strategy: Strategy, batch: Any) -> bool:
    """Whether every rank has this same batch. All ranks must call it."""
    digest = hashlib.sha256()
    for leaf in leaves(batch):
        if isinstance(leaf, Tensor) and leaf.layout is torch.strided:
            raw = leaf.detach().cpu().contiguous().flatten().view(torch.uint8)
            digest.update(raw.numpy().tobytes())
        else:
            digest.update(repr(leaf).encode())
    return len(set(gather_objects(strategy, digest.hexdigest()))) == 1

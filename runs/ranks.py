"""Texts and rows of all ranks, gathered under any strategy."""

from __future__ import annotations

import hashlib
from typing import Any

import torch
from pytorch_lightning.strategies import Strategy
from torch import Tensor
from torch.utils._pytree import tree_leaves


def gather_texts(strategy: Strategy, text: str) -> list[str]:
    """The text of every rank, in the order of ranks. All ranks must call it."""
    encoded = torch.tensor(list(text.encode() + b"\0"), dtype=torch.uint8)
    return bytes(gather_rows(strategy, encoded).tolist()).decode().split("\0")[:-1]


def gather_rows(strategy: Strategy, mine: Tensor) -> Tensor:
    """The rows of every rank one below the other, in the order of ranks, on the CPU.

    Ranks may have different numbers of rows, of one shape and dtype. All ranks must call it.
    """
    device = strategy.root_device
    counts = strategy.all_gather(torch.tensor(len(mine), device=device)).reshape(-1).tolist()
    padded = torch.zeros((max(counts), *mine.shape[1:]), dtype=mine.dtype, device=device)
    padded[: len(mine)] = mine
    parts = strategy.all_gather(padded).reshape(-1, *padded.shape)
    return torch.cat([part[:rows] for part, rows in zip(parts, counts)]).cpu()


def same_on_all(strategy: Strategy, batch: Any) -> bool:
    """Whether every rank has this same batch. All ranks must call it."""
    digest = hashlib.sha256()
    for leaf in tree_leaves(batch):
        if isinstance(leaf, Tensor) and leaf.layout is torch.strided:
            raw = leaf.detach().cpu().contiguous().flatten().view(torch.uint8)
            digest.update(raw.numpy().tobytes())
        else:
            digest.update(repr(leaf).encode())
    return len(set(gather_texts(strategy, digest.hexdigest()))) == 1

"""What all ranks have to say, under any strategy."""

from __future__ import annotations

import torch
from pytorch_lightning.strategies import Strategy


def gather_texts(strategy: Strategy, text: str) -> list[str]:
    """The text of every rank, in order, under any strategy. All ranks must call it."""
    raw = torch.tensor(list(text.encode()), dtype=torch.uint8, device=strategy.root_device)
    longest = torch.tensor(len(raw), device=strategy.root_device)
    most = int(strategy.reduce(longest, reduce_op="max"))
    padded = torch.nn.functional.pad(raw, (0, most - len(raw)))
    if most == 0:
        return []
    rows = strategy.all_gather(padded).reshape(-1, most).tolist()
    return [bytes(row).rstrip(b"\0").decode() for row in rows]

"""What data modules do because there are other ranks: compare files, share cores, draw apart."""

from __future__ import annotations

import os
import socket
from collections.abc import Callable
from functools import partial
from typing import Any

import torch
from PIL import Image
from pytorch_lightning import Trainer
from torch import Tensor

Transform = Callable[[Image.Image], Tensor]
LOCAL_RANKS = ("HOROVOD_LOCAL_SIZE", "LOCAL_WORLD_SIZE", "OMPI_COMM_WORLD_LOCAL_SIZE")


def refuse_other_files(trainer: Trainer | None, where: str, files: Any) -> None:
    """Refuse, on all ranks, files that are not those of rank 0: a number would mean another sample.

    Args:
        where: the key and value by which a user named the files.
        files: their names, a digest of these, or anything else that is equal where files are.

    Raises:
        ValueError: with the hosts that differ, on all ranks.
    """
    if trainer is None:
        return
    strategy, host = trainer.strategy, socket.gethostname()
    same = strategy.broadcast(files) == files
    if strategy.reduce_boolean_decision(same):
        return
    answers = [strategy.broadcast((host, same), src=rank) for rank in range(trainer.world_size)]
    others = ", ".join(sorted({host for host, same in answers if not same}))
    raise ValueError(f"{where}: the files on {others} are not those of rank 0 on {answers[0][0]}")


def workers_of_rank(trainer: Trainer | None) -> int:
    """The cores that a host has for each of its ranks, from 1 to 4.

    Cores are those of the process's affinity, so give num_workers in a container that is limited to
    fewer; torch.get_num_threads() would not do, as it is 1 under torchrun.
    """
    launched = next((int(os.environ[name]) for name in LOCAL_RANKS if name in os.environ), None)
    ranks = launched or (trainer.num_devices if trainer is not None else 1)
    return min(4, max(1, len(os.sched_getaffinity(0)) // ranks))


def draws_of_rank(trainer: Trainer | None, transform: Transform) -> Transform:
    """The transform, drawing other random numbers on each rank.

    In a training process torch's generator is the same on all ranks, so that all would take the
    same part of their images. A single rank needs no change.
    """
    if trainer is None or trainer.world_size == 1:
        return transform
    return partial(_draw, transform, trainer.global_rank)


def _draw(transform: Transform, rank: int, image: Image.Image) -> Tensor:
    seed = int(torch.randint(2**62, ())) + rank  # moves the generator alike on all ranks
    with torch.random.fork_rng(devices=[]):
        torch.default_generator.manual_seed(seed)  # not those of GPUs
        return transform(image)

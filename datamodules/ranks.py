"""What a rank's data has to do with the other ranks: equal files, shared cores, own draws."""

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
from torch.utils.data import get_worker_info

Look = Callable[[Image.Image], Tensor]
LOCAL_RANKS = ("HOROVOD_LOCAL_SIZE", "LOCAL_WORLD_SIZE", "OMPI_COMM_WORLD_LOCAL_SIZE")


def refuse_other_files(trainer: Trainer | None, where: str, files: Any) -> None:
    """Have all ranks end where a host has other files than rank 0: a sample would be another one.

    Args:
        where: the key and value by which a user named them.
        files: what tells them apart; on all ranks equal to that of rank 0.

    Raises:
        ValueError: with the hosts, on all ranks.
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
    """As many as this rank has cores, from 1 to 4: the ranks of a host share those that it has.

    By affinity: give num_workers in a container that is limited to fewer. Not by
    torch.get_num_threads(), which is 1 under torchrun.
    """
    launched = next((int(os.environ[name]) for name in LOCAL_RANKS if name in os.environ), None)
    ranks = launched or (trainer.num_devices if trainer is not None else 1)
    return min(4, max(1, len(os.sched_getaffinity(0)) // ranks))


def draws_of_rank(trainer: Trainer | None, look: Look) -> Look:
    """A view of images that draws other numbers on each rank, where no process loads for it.

    There torch's own generator is the same on all ranks: each would take the same part of its
    image. Loader processes are seeded by rank already. With a single rank all draws stay.
    """
    if trainer is None or trainer.world_size == 1:
        return look
    return partial(_draw, look, trainer.global_rank)


def _draw(look: Look, rank: int, image: Image.Image) -> Tensor:
    if get_worker_info() is not None:
        return look(image)
    seed = int(torch.randint(2**62, ())) + rank  # moves the generator alike on all ranks
    with torch.random.fork_rng(devices=[]):
        torch.default_generator.manual_seed(seed)  # not those of GPUs
        return look(image)

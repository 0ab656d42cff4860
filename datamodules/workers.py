"""How many processes load for a rank where nobody says so."""

from __future__ import annotations

import os

from pytorch_lightning import Trainer

LOCAL_RANKS = ("HOROVOD_LOCAL_SIZE", "LOCAL_WORLD_SIZE", "OMPI_COMM_WORLD_LOCAL_SIZE")


def workers_of_rank(trainer: Trainer | None) -> int:
    """As many as this rank has cores, from 1 to 4: the ranks of a host share those that it has.

    Not by torch.get_num_threads(), which is 1 under torchrun.
    """
    launched = next((int(os.environ[name]) for name in LOCAL_RANKS if name in os.environ), None)
    ranks = launched or (trainer.num_devices if trainer is not None else 1)
    return min(4, max(1, len(os.sched_getaffinity(0)) // ranks))

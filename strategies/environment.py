"""Who takes part: ranks and sizes that horovodrun gave, of all processes or of a part of them."""

from __future__ import annotations

import ctypes
import os
from collections.abc import Sequence

import horovod.torch as hvd
import torch
from pytorch_lightning.plugins.environments import ClusterEnvironment
from pytorch_lightning.utilities.exceptions import MisconfigurationException
from typing_extensions import override

from .collectives import World

# Set before hvd.init() unless the user has set them; figures in benchmarks/NOTES.md. Gradients come
# in buckets, so fusing them would only cost a copy into a fusion buffer and one out of it. With
# nothing to do, Horovod's thread sleeps up to 100 ms instead of asking all ranks each ms; only the
# Horovod that cluster/wheel.py builds knows this, others ignore it.
HOROVOD_DEFAULTS = {"HOROVOD_FUSION_THRESHOLD": "0", "HOROVOD_IDLE_TIME": "100"}
# On GPUs, and again only with the Horovod of cluster/wheel.py: an operation counts as done when it
# is queued, so the program goes on to queue what follows. Not where a reduction takes several
# steps: each would be queued in the midst of backward, which would wait for it. The first strategy
# of a process decides, as Horovod reads it when it starts.
IN_STREAM = "HOROVOD_COMPLETE_IN_STREAM"
# Of glibc's mallopt(3): when freed memory goes back to the system.
M_TRIM_THRESHOLD, M_MMAP_THRESHOLD = -1, -3
# Where other launchers say how many processes they started; Horovod without MPI reads none of them.
OTHER_LAUNCHERS = {
    "WORLD_SIZE": "torchrun", "OMPI_COMM_WORLD_SIZE": "mpirun", "PMI_SIZE": "mpirun",
    "SLURM_STEP_NUM_TASKS": "srun",
}  # fmt: skip


def initialize(
    process_sets: Sequence[Sequence[int]] | None = None, in_stream: bool = True
) -> World:
    """Start Horovod unless it runs; the world is all ranks, or the set that this rank is in.

    Args:
        process_sets: the ranks of each set.
        in_stream: see `IN_STREAM`.

    Raises:
        MisconfigurationException: for sets that do not contain each rank once, for new ones when
            Horovod runs already, and for processes that another launcher started.
    """
    sets = [hvd.ProcessSet(list(ranks)) for ranks in process_sets or []]
    members = sorted(rank for process_set in sets for rank in process_set.ranks)
    if len(sets) == 1:
        sets = []  # all ranks: Horovod has a set of them, and refuses a second one
    if hvd.is_initialized():
        for process_set in sets:
            _find(process_set)
    else:
        for name, value in HOROVOD_DEFAULTS.items():
            os.environ.setdefault(name, value)
        if in_stream:
            os.environ.setdefault(IN_STREAM, "1")
        try:
            hvd.init(process_sets=sets)
        except ValueError as error:  # whatever was wrong with Horovod's start
            if not sets:
                raise
            raise MisconfigurationException(
                f"process_sets={[s.ranks for s in sets]}: Horovod does not start with these: "
                "each of the launched ranks must be in exactly one"
            ) from error
    if hvd.size() == 1 and "HOROVOD_SIZE" not in os.environ:
        _refuse_other_launchers()
    if members and members != list(range(hvd.size())):
        raise MisconfigurationException(
            f"process_sets={[list(ranks) for ranks in process_sets or []]}: each of the "
            f"{hvd.size()} ranks must be in exactly one"
        )
    if not sets:
        return World(hvd.global_process_set)
    return World(next(process_set for process_set in sets if hvd.rank() in process_set.ranks))


def _refuse_other_launchers() -> None:
    for name, launcher in OTHER_LAUNCHERS.items():
        if (count := os.environ.get(name, "1")) != "1":
            raise MisconfigurationException(
                f"{launcher} started {count} processes, each of which would train alone as rank 0: "
                f"start them with horovodrun ({name}={count} in the environment says so)"
            )


def _find(process_set: hvd.ProcessSet) -> None:
    """Give a set the number that it has in a Horovod that runs already."""
    numbers = {
        tuple(ranks): number
        for number, ranks in hvd.mpi_ops._basics._get_process_set_ids_and_ranks().items()
    }
    if (ranks := tuple(process_set.ranks)) in numbers:
        process_set.process_set_id = numbers[ranks]
    else:
        raise MisconfigurationException(
            f"process_sets: Horovod runs already and knows no set {process_set.ranks}; make this "
            "strategy before anything calls hvd.init()"
        )


def own_gpu(local_rank: int, ranks: int) -> torch.device:
    """The GPU whose number is the local rank, or the only one that this process was shown.

    Horovod: a process has one GPU, counted from all visible ones, unless Trainer(devices=[2, 3])
    names one for each rank of the host.

    Args:
        ranks: on this host.
    """
    gpus = torch.cuda.device_count()
    if gpus == 1 and "CUDA_VISIBLE_DEVICES" in os.environ:  # as by HOSTFILE's gpus
        return torch.device("cuda", 0)
    if ranks > gpus:  # which all ranks of the host refuse alike
        raise MisconfigurationException(
            f"{ranks} ranks on {os.uname().nodename}, which has {gpus} GPUs: a rank needs its own; "
            "use fewer ranks (NP=, -np, -H) or accelerator=cpu"
        )
    return torch.device("cuda", local_rank)


class LaunchedEnvironment(ClusterEnvironment):
    """For Lightning: a process that horovodrun started, which decides about ranks and sizes."""

    def __init__(self, size: int, rank: int, local_rank: int, node_rank: int) -> None:
        super().__init__()
        self._size, self._rank = size, rank
        self._local_rank, self._node_rank = local_rank, node_rank

    @property
    @override
    def creates_processes_externally(self) -> bool:
        return True

    @staticmethod
    @override
    def detect() -> bool:
        return "HOROVOD_RANK" in os.environ

    @property
    @override
    def main_address(self) -> str:
        return ""  # of torch.distributed, as is the port: not asked under Horovod

    @property
    @override
    def main_port(self) -> int:
        return 0

    @override
    def world_size(self) -> int:
        return self._size

    @override
    def global_rank(self) -> int:
        return self._rank

    @override
    def local_rank(self) -> int:
        return self._local_rank

    @override
    def node_rank(self) -> int:
        return self._node_rank

    @override
    def set_world_size(self, size: int) -> None:
        """Not Lightning's to decide."""

    @override
    def set_global_rank(self, rank: int) -> None:
        """Not Lightning's to decide."""


def keep_freed_memory() -> None:
    """Have malloc keep what is freed, for the next layer or step: blocks to 32 MiB, 2 GiB in all.

    By default glibc gives large blocks back to the system and takes them again, page by page, which
    is up to a third of a training step on CPUs. Left alone where the user has set MALLOC_*.
    """
    mallopt = getattr(ctypes.CDLL(None), "mallopt", None)
    if mallopt and not any(name.startswith("MALLOC_") for name in os.environ):
        mallopt(M_MMAP_THRESHOLD, 32 * 2**20)  # the most that it takes
        mallopt(M_TRIM_THRESHOLD, 2**31 - 1)

"""Who takes part: ranks and sizes as horovodrun gave them, of all processes or a part of them."""

from __future__ import annotations

import os
import socket
from collections.abc import Sequence

import horovod.torch as hvd
from pytorch_lightning.plugins.environments import ClusterEnvironment
from pytorch_lightning.utilities.exceptions import MisconfigurationException
from typing_extensions import override

from strategies.collectives import World

# Set before hvd.init() unless the user has set them. Gradients come in buckets, so there is nothing
# to wait for that could be fused (a copy into a fusion buffer and one out of it), and little to
# negotiate; see benchmarks/NOTES.md for what each gives.
HOROVOD_DEFAULTS = {"HOROVOD_CYCLE_TIME": "0.5", "HOROVOD_FUSION_THRESHOLD": "0"}


def initialize(process_sets: Sequence[Sequence[int]] | None = None) -> World:
    """Start Horovod unless it runs; the world is all ranks, or the set that this rank is in.

    Raises:
        MisconfigurationException: for sets that do not hold each rank once, and for new ones when
            Horovod runs already.
    """
    sets = [hvd.ProcessSet(list(ranks)) for ranks in process_sets or []]
    if hvd.is_initialized():
        for process_set in sets:
            _find(process_set)
    else:
        for name, value in HOROVOD_DEFAULTS.items():
            os.environ.setdefault(name, value)
        hvd.init(process_sets=sets)
    if not sets:
        return World(hvd.global_process_set)
    members = sorted(rank for process_set in sets for rank in process_set.ranks)
    if members != list(range(hvd.size())):
        raise MisconfigurationException(
            f"process_sets={[list(ranks) for ranks in process_sets or []]}: each of the "
            f"{hvd.size()} ranks must be in exactly one"
        )
    return World(next(process_set for process_set in sets if hvd.rank() in process_set.ranks))


def _find(process_set: hvd.ProcessSet) -> None:
    """Give a set the number by which Horovod, already running, knows its ranks."""
    known = {
        tuple(ranks): number
        for number, ranks in hvd.mpi_ops._basics._get_process_set_ids_and_ranks().items()
    }
    number = known.get(tuple(process_set.ranks))
    if number is None and os.environ.get("HOROVOD_DYNAMIC_PROCESS_SETS") != "1":
        raise MisconfigurationException(
            f"process_sets: Horovod runs already and knows no set {process_set.ranks}; make this "
            "strategy before anything calls hvd.init(), or set HOROVOD_DYNAMIC_PROCESS_SETS=1"
        )
    if number is None:
        hvd.add_process_set(process_set)
    else:
        process_set.process_set_id = number


class HorovodEnvironment(ClusterEnvironment):
    """For Lightning: rank and size in `world`, and an address where its rank 0 can be met."""

    def __init__(self, world: World) -> None:
        super().__init__()
        self.world = world
        self._address: tuple[str, int] | None = None

    @property
    @override
    def creates_processes_externally(self) -> bool:
        return True

    @property
    @override
    def main_address(self) -> str:
        return self._meeting_point()[0]

    @property
    @override
    def main_port(self) -> int:
        return self._meeting_point()[1]

    def _meeting_point(self) -> tuple[str, int]:
        """An address of rank 0 and a free port there; asked for by all ranks together."""
        if self._address is None:
            self._address = self.world.broadcast_object(_own_address())
        return self._address

    @staticmethod
    @override
    def detect() -> bool:
        return "HOROVOD_RANK" in os.environ

    @override
    def world_size(self) -> int:
        return self.world.size

    @override
    def set_world_size(self, size: int) -> None:
        """Horovod decides."""

    @override
    def global_rank(self) -> int:
        return self.world.rank

    @override
    def set_global_rank(self, rank: int) -> None:
        """Horovod decides."""

    @override
    def local_rank(self) -> int:
        return self.world.local_rank

    @override
    def node_rank(self) -> int:
        return hvd.cross_rank()


def _own_address() -> tuple[str, int]:
    """The address by which this host reaches the launcher, which all others reach too."""
    launcher = os.environ.get("HOROVOD_GLOO_RENDEZVOUS_ADDR", "127.0.0.1")
    with socket.socket(socket.AF_INET, socket.SOCK_DGRAM) as probe:
        probe.connect((launcher, 9))  # UDP: looks up the route, sends nothing
        address = probe.getsockname()[0]
    with socket.socket() as listener:
        listener.bind((address, 0))
        return address, listener.getsockname()[1]

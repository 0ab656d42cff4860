"""Lightning's DDP for comparison, started by torchrun or by horovodrun."""

from __future__ import annotations

import atexit
import os
import re
import socket
import time
import urllib.error
import urllib.request
from functools import cached_property
from typing import Any

import torch
import torch.distributed
from lightning_fabric.utilities.types import _PATH
from pytorch_lightning.strategies import DDPStrategy
from pytorch_lightning.trainer.states import TrainerFn
from pytorch_lightning.utilities.exceptions import MisconfigurationException
from torch.utils.data import DataLoader
from typing_extensions import override

from .environment import LaunchedEnvironment, own_gpu
from .samplers import seed_order

# horovodrun's server is one of the job's hosts: no proxy is asked.
DIRECT = urllib.request.build_opener(urllib.request.ProxyHandler({}))


class HorovodrunEnvironment(LaunchedEnvironment):
    """Ranks as horovodrun gave them; Horovod itself does not run and takes no time.

    Rank 0 leaves its address with horovodrun's rendezvous server, where the others find it.
    """

    def __init__(self) -> None:
        names = ("SIZE", "RANK", "LOCAL_RANK", "CROSS_RANK")
        super().__init__(*(int(os.environ[f"HOROVOD_{name}"]) for name in names))

    @property
    @override
    def main_address(self) -> str:
        return self._meeting_point[0]

    @property
    @override
    def main_port(self) -> int:
        return int(self._meeting_point[1])

    @cached_property
    def _meeting_point(self) -> list[str]:
        """Address and port of rank 0."""
        server = os.environ["HOROVOD_GLOO_RENDEZVOUS_ADDR"]
        port = os.environ["HOROVOD_GLOO_RENDEZVOUS_PORT"]
        url = f"http://{server}:{port}/ddp/rank-0"
        if self.global_rank() == 0:
            # Behind the host of our own server there is a secret (cluster/rendezvous.py).
            address = _own_address(re.split("[:/]", server)[0])
            request = urllib.request.Request(url, address.encode(), method="PUT")
            DIRECT.open(request, timeout=30).close()
        return _read(url).split()


def _own_address(launcher: str) -> str:
    """The address by which this host reaches the launcher, as all others do, and a free port."""
    with socket.socket(socket.AF_INET, socket.SOCK_DGRAM) as probe:
        probe.connect((launcher, 9))  # UDP: looks up the route, sends nothing
        address = probe.getsockname()[0]
    with socket.socket() as listener:
        listener.bind((address, 0))
        return f"{address} {listener.getsockname()[1]}"


def _read(url: str) -> str:
    """Wait up to two minutes for what is there: until then the server answers 404."""
    deadline = time.monotonic() + 120
    while True:
        try:
            with DIRECT.open(url, timeout=30) as answer:
                return answer.read().decode()
        except urllib.error.HTTPError as error:
            if error.code != 404 or time.monotonic() > deadline:
                raise
            time.sleep(0.05)


class SeededDDP(DDPStrategy):
    """Draws the orders of samplers and reads checkpoints as HorovodStrategy does."""

    @override
    def process_dataloader(self, dataloader: object) -> object:
        if isinstance(dataloader, DataLoader):
            seed_order(dataloader)
        return super().process_dataloader(dataloader)

    @override
    def load_checkpoint(
        self, checkpoint_path: _PATH, weights_only: bool | None = None
    ) -> dict[str, Any]:
        """Rank 0 reads and the others receive, so they need not see its file system."""
        zero, module = self.is_global_zero, self.lightning_module
        checkpoint = super().load_checkpoint(checkpoint_path, weights_only) if zero else {}
        if module and module.trainer.state.fn != TrainerFn.FITTING:
            checkpoint["optimizer_states"] = []  # Adam's has twice the weights' size
        return self.broadcast(checkpoint) if self.world_size > 1 else checkpoint


class HorovodrunDDP(SeededDDP):
    """DDP over torch.distributed, between the ranks that horovodrun started."""

    def __init__(self, accelerator: str = "auto", **arguments: Any) -> None:
        gpu = accelerator != "cpu" and torch.cuda.is_available()
        ranks = int(os.environ["HOROVOD_LOCAL_SIZE"])
        cpu = torch.device("cpu")
        devices = [own_gpu(rank, ranks) if gpu else cpu for rank in range(ranks)]
        environment = HorovodrunEnvironment()
        super().__init__(cluster_environment=environment, parallel_devices=devices, **arguments)

    @property
    @override
    def distributed_sampler_kwargs(self) -> dict[str, Any]:
        return {"num_replicas": self.world_size, "rank": self.global_rank}


def ddp(accelerator: str = "auto", **arguments: Any) -> DDPStrategy:
    """DDP between the processes that a launcher started, whichever it was.

    Args:
        accelerator: "cpu" keeps it off GPUs that are there.
        arguments: of `pytorch_lightning.strategies.DDPStrategy`.

    Raises:
        MisconfigurationException: under mpirun, which has no place to leave an address.
    """
    atexit.register(leave)
    if HorovodrunEnvironment.detect():
        return HorovodrunDDP(accelerator, **arguments)
    if "OMPI_COMM_WORLD_RANK" in os.environ:
        raise MisconfigurationException("strategy=ddp: use horovodrun or torchrun, not mpirun")
    return SeededDDP(**arguments)


def leave() -> None:
    """End the threads of Gloo while they can still take Python's lock.

    Lightning does so for NCCL only; without it many jobs on CPUs end with "terminate called without
    an active exception" after all their work is done.
    """
    if torch.distributed.is_initialized():
        torch.distributed.destroy_process_group()

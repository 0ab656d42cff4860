"""Lightning's DDP for comparison, started by torchrun or by horovodrun."""

from __future__ import annotations

from typing import Any

import horovod.torch as hvd
import torch
from pytorch_lightning.strategies import DDPStrategy
from typing_extensions import override

from strategies.environment import HorovodEnvironment, initialize


class HorovodrunDDP(DDPStrategy):
    """DDP over torch.distributed, between the ranks that horovodrun started.

    Horovod tells ranks, sizes and where rank 0 is, and moves no tensor.
    """

    def __init__(self, accelerator: str = "auto", **arguments: Any) -> None:
        environment = HorovodEnvironment(initialize())
        gpu = accelerator != "cpu" and torch.cuda.is_available()
        devices = [
            torch.device("cuda", i) if gpu else torch.device("cpu") for i in range(hvd.local_size())
        ]
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
    """
    if HorovodEnvironment.detect():
        return HorovodrunDDP(accelerator, **arguments)
    return DDPStrategy(**arguments)

"""HorovodStrategy: data parallel training of Lightning modules over Horovod.

    horovodrun -np 4 -H node1:2,node2:2 python train.py     with Trainer(strategy="horovod")
    python train.py                                         the same in one process

After n steps the weights are those of one process that sees the batches of all ranks together.
What it does not do yet: Trainer(sync_batchnorm=True), which is refused; sparse gradients.
"""

from __future__ import annotations

import os
import warnings
from collections.abc import Generator
from contextlib import contextmanager
from typing import Any, TypeVar

import horovod.torch as hvd
import pytorch_lightning as pl
import torch
from lightning_fabric.utilities.types import _PATH
from pytorch_lightning.plugins.environments import ClusterEnvironment
from pytorch_lightning.strategies.parallel import ParallelStrategy
from pytorch_lightning.trainer.states import RunningStage, TrainerFn
from pytorch_lightning.utilities.exceptions import MisconfigurationException
from pytorch_lightning.utilities.rank_zero import rank_zero_only, rank_zero_warn
from torch import Tensor
from torch.utils.data import DataLoader, DistributedSampler
from typing_extensions import override

from strategies.buckets import GradientBuckets
from strategies.collectives import (
    broadcast_tensors,
    gather_tensors,
    reduce_tensor,
    synchronize_metrics,
)

T = TypeVar("T")


class HorovodEnvironment(ClusterEnvironment):
    """Ranks and sizes as horovodrun gave them; one process without it."""

    @property
    @override
    def creates_processes_externally(self) -> bool:
        return True

    @property
    @override
    def main_address(self) -> str:
        return os.environ.get("HOROVOD_GLOO_RENDEZVOUS_ADDR", "127.0.0.1")

    @property
    @override
    def main_port(self) -> int:
        return int(os.environ.get("HOROVOD_GLOO_RENDEZVOUS_PORT", "0"))

    @staticmethod
    @override
    def detect() -> bool:
        return "HOROVOD_RANK" in os.environ

    @override
    def world_size(self) -> int:
        return hvd.size()

    @override
    def set_world_size(self, size: int) -> None:
        """Horovod decides."""

    @override
    def global_rank(self) -> int:
        return hvd.rank()

    @override
    def set_global_rank(self, rank: int) -> None:
        """Horovod decides."""

    @override
    def local_rank(self) -> int:
        return hvd.local_rank()

    @override
    def node_rank(self) -> int:
        return hvd.cross_rank()


class HorovodStrategy(ParallelStrategy):
    """Every rank trains a copy of the model on its share of the data; gradients are averaged.

    Horovod is initialized here, so make it before anything that asks for the rank.

    Args:
        bucket_mib: gradients travel in buckets of this many MiB (see `strategies.buckets`).

    Raises:
        MisconfigurationException: for a rank without a GPU of its own, or an argument of the
            Trainer that cannot work with it.
    """

    def __init__(self, bucket_mib: float = 8) -> None:
        if not bucket_mib > 0:
            raise MisconfigurationException(f"bucket_mib={bucket_mib}: a size above 0 is needed")
        hvd.init()
        rank_zero_only.rank = hvd.rank()  # type: ignore[attr-defined]
        super().__init__(cluster_environment=HorovodEnvironment())
        self.bucket_mib = bucket_mib
        self._buckets: GradientBuckets | None = None
        self._average = True
        if "OMP_NUM_THREADS" not in os.environ and hvd.local_size() > 1:
            # The ranks of a host share its cores; torch would start a thread a core in each.
            cores = len(os.sched_getaffinity(0))
            torch.set_num_threads(max(1, cores // hvd.local_size()))

    @property
    def is_distributed(self) -> bool:
        """Asked by Lightning: put in distributed samplers, and let sync_dist=True reduce?"""
        return self.world_size > 1

    @property
    @override
    def root_device(self) -> torch.device:
        devices = self.parallel_devices
        assert devices is not None
        if devices[0].type != "cuda":
            return devices[0]
        # Horovod: a process has one GPU. Those that a host lends are counted from all visible ones,
        # whatever `devices` says, unless each process was shown a single one of its own.
        if torch.cuda.device_count() == 1 and "CUDA_VISIBLE_DEVICES" in os.environ:
            return torch.device("cuda", 0)
        if hvd.local_size() > torch.cuda.device_count():  # told by all ranks of the host alike
            raise MisconfigurationException(
                f"{hvd.local_size()} ranks on {os.uname().nodename}, which has "
                f"{torch.cuda.device_count()} GPUs: a rank needs its own; use fewer ranks (NP=, "
                "-np, -H) or accelerator=cpu"
            )
        return torch.device("cuda", self.local_rank)

    @property
    @override
    def distributed_sampler_kwargs(self) -> dict[str, Any]:
        return {"num_replicas": self.world_size, "rank": self.global_rank}

    @property
    def operations(self) -> str:
        """What Horovod moves this strategy's tensors with: NCCL, MPI or Gloo."""
        if self.root_device.type == "cuda" and hvd.nccl_built():
            return "NCCL"
        return "MPI" if hvd.mpi_built() and hvd.mpi_enabled() else "Gloo"

    @override
    def setup_environment(self) -> None:
        super().setup_environment()
        if self.root_device.type == "cuda" and not hvd.nccl_built():
            rank_zero_warn(
                "HOROVOD HAS NO NCCL: gradients leave the GPU and travel through the CPU, which is "
                "several times slower (horovod#2686). Rebuild it with: make install"
            )
        # Evaluation visits every sample once (see process_dataloader): the warning is not true.
        warnings.filterwarnings("ignore", ".*DistributedSampler.*gets evaluated.*")

    @override
    def setup(self, trainer: pl.Trainer) -> None:
        if self._layer_sync is not None:
            raise MisconfigurationException(
                "sync_batchnorm=True does not work under HorovodStrategy yet; use a larger batch "
                "or another normalization"
            )
        assert self.accelerator is not None and self.lightning_module is not None
        self.accelerator.setup(trainer)
        self.model = self.precision_plugin.convert_module(self.lightning_module)
        self.model_to_device()
        if self.is_distributed:
            module = self.lightning_module
            broadcast_tensors([*module.parameters(), *module.buffers()])
            synchronize_metrics(module)
        if trainer.state.fn == TrainerFn.FITTING:
            self.setup_optimizers(trainer)
            if self.is_distributed:
                parameters = self.lightning_module.parameters()
                self._buckets = GradientBuckets(parameters, self.bucket_mib)
        self.setup_precision_plugin()

    @override
    def setup_optimizers(self, trainer: pl.Trainer) -> None:
        super().setup_optimizers(trainer)
        # Only a state that configure_optimizers loaded is there yet; a checkpoint's comes later.
        states = [o.state_dict() if o.state else None for o in self.optimizers]
        for optimizer, state in zip(self.optimizers, self.broadcast(states)):
            if state is not None:
                optimizer.load_state_dict(state)

    @override
    def model_to_device(self) -> None:
        assert self.model is not None
        self.model.to(self.root_device)

    @override
    def process_dataloader(self, dataloader: object) -> object:
        """Evaluation visits each sample once: no padding to equal shares, as DDP's has.

        So the last rank may have a batch less than the first: a collective in each batch of an
        evaluation, as self.log(on_step=True, sync_dist=True) makes, would wait for it forever.
        """
        assert self.lightning_module is not None
        stage = self.lightning_module.trainer.state.stage
        evaluating = (RunningStage.VALIDATING, RunningStage.TESTING, RunningStage.SANITY_CHECKING)
        sampler = dataloader.sampler if isinstance(dataloader, DataLoader) else None
        if self.is_distributed and stage in evaluating and isinstance(sampler, DistributedSampler):
            samples = len(sampler.dataset)  # type: ignore[arg-type]
            if samples < self.world_size:
                raise MisconfigurationException(
                    f"{samples} samples to evaluate on {self.world_size} ranks: each rank needs "
                    "one; use fewer ranks or more samples"
                )
            sampler.total_size = samples
            sampler.num_samples = len(range(sampler.rank, samples, sampler.num_replicas))
        return dataloader

    @override
    def on_validation_start(self) -> None:
        # Buffers (running means of batch normalization) differ between ranks; a checkpoint has
        # those of rank 0, so they are what is evaluated, as under DDP.
        if self.is_distributed and self._buckets is not None:
            assert self.lightning_module is not None
            broadcast_tensors(self.lightning_module.buffers())

    @override
    def pre_backward(self, closure_loss: Tensor) -> None:
        if self._buckets is not None and self._average:
            self._buckets.start()

    @override
    def post_backward(self, closure_loss: Tensor) -> None:
        if self._buckets is not None and self._average:
            self._buckets.finish()

    @contextmanager
    @override
    def block_backward_sync(self) -> Generator[None, None, None]:
        """Gradients stay local inside: all batches of an accumulation but the last."""
        self._average = False
        try:
            yield
        finally:
            self._average = True

    @override
    def reduce(
        self, tensor: Tensor | Any, group: Any | None = None, reduce_op: Any | None = "mean"
    ) -> Tensor | Any:
        if not isinstance(tensor, Tensor) or not self.is_distributed:
            return tensor
        return reduce_tensor(tensor, str(reduce_op or "mean").rpartition(".")[2].lower())

    @override
    def reduce_boolean_decision(self, decision: bool, all: bool = True) -> bool:
        votes = int(self.reduce(torch.tensor(int(decision)), reduce_op="sum"))
        return votes == self.world_size if all else votes > 0

    @override
    def all_gather(
        self, tensor: Tensor, group: Any | None = None, sync_grads: bool = False
    ) -> Tensor:
        """One tensor of shape (world size, *shape), as under DDP; shapes are equal on all ranks."""
        if not self.is_distributed:
            return tensor
        if sync_grads:
            mine = tensor.unsqueeze(0)
            if mine.requires_grad:
                # Horovod: its backward averages over the ranks where DDP's sums.
                mine.register_hook(lambda gradient: gradient * self.world_size)
            return hvd.allgather(mine)
        return torch.stack(gather_tensors(tensor))

    @override
    def barrier(self, name: str | None = None) -> None:
        # Horovod: join() is no barrier (horovod#3121).
        hvd.barrier()

    @override
    def broadcast(self, obj: T, src: int = 0) -> T:
        # Horovod: without a name it takes the type's, and ranks with other types never meet.
        return hvd.broadcast_object(obj, src, name="object") if self.is_distributed else obj

    @override
    def load_checkpoint(
        self, checkpoint_path: _PATH, weights_only: bool | None = None
    ) -> dict[str, Any]:
        """Rank 0 reads, the others receive: they need not see its file system."""
        checkpoint: dict[str, Any] = {}
        if self.is_global_zero:
            checkpoint = super().load_checkpoint(checkpoint_path, weights_only)
        return self.broadcast(checkpoint)

    @override
    def teardown(self) -> None:
        if self._buckets is not None:
            self._buckets.remove()
            self._buckets = None
        super().teardown()

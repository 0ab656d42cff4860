"""HorovodStrategy: data parallel training of Lightning modules over Horovod.

    horovodrun -np 4 -H node1:2,node2:2 python train.py     with Trainer(strategy=HorovodStrategy())
    python train.py                                         the same in one process

After n steps the weights are those of one process that sees the batches of all ranks together.

Lightning calls the methods below. A step's gradients are combined between `pre_backward` and
`post_backward`: GradientBuckets (buckets.py) fills a bucket as autograd makes gradients, and starts
to reduce it (reductions.py) when it is full; `finish` waits for the rest. GuardedSteps (steps.py)
looks at them once more before the optimizer steps.
"""

from __future__ import annotations

import os
import warnings
from collections.abc import Callable, Generator, Sequence
from contextlib import AbstractContextManager, contextmanager, nullcontext
from functools import partial
from typing import Any, TypeVar

import horovod.torch as hvd
import pytorch_lightning as pl
import torch
from lightning_fabric.utilities.types import _PATH
from pytorch_lightning.core.optimizer import do_nothing_closure
from pytorch_lightning.loops.fetchers import _DataLoaderIterDataFetcher
from pytorch_lightning.plugins.precision import HalfPrecision
from pytorch_lightning.strategies.parallel import ParallelStrategy
from pytorch_lightning.trainer.states import RunningStage, TrainerFn
from pytorch_lightning.utilities.exceptions import MisconfigurationException
from pytorch_lightning.utilities.rank_zero import rank_zero_only
from torch import Tensor, nn
from torch.nn.modules.batchnorm import _BatchNorm
from torch.optim import Optimizer
from torch.utils.data import DataLoader
from typing_extensions import override

from .batchnorm import SyncLayers
from .buckets import Exchange, GradientBuckets, shown_as
from .buffers import shared_buffers
from .collectives import Gather, sendable
from .cores import usable_cores
from .drift import warn_of_drift
from .environment import LaunchedEnvironment, initialize, keep_freed_memory, own_gpu
from .evaluation import Evaluation
from .metrics import (
    compute_the_rest,
    keep_wide,
    leave_metrics,
    read_by_all,
    synchronize_metrics,
    warn_of_own_values,
)
from .randomness import OwnDraws, draw_others
from .reductions import COMPRESSIONS, Reduction, adasum, cuts_itself
from .refusals import (
    refuse_contradictions,
    refuse_options,
    refuse_other_models,
    refuse_own_clock,
    refuse_strangers,
    refuse_unequal,
    warn_of_own_gathers,
)
from .resuming import global_batch_size, resume
from .samplers import each_sample_once, refuse_other_lengths, seed_order
from .steps import GuardedSteps

T = TypeVar("T")

EVALUATING = (RunningStage.VALIDATING, RunningStage.TESTING, RunningStage.SANITY_CHECKING)
SAVED = "horovod"  # key of what this strategy adds to checkpoints; others ignore it


class HorovodStrategy(ParallelStrategy):
    """Every rank trains a copy of the model on its share of the data; gradients are averaged.

    The constructor initializes Horovod: call it before anything that asks for the rank.

    Args:
        bucket_mib: gradients travel in buckets of this many MiB; the first are of 1, 2, ... MiB.
            Smaller ones start earlier and leave less to send when backward ends, larger ones are
            fewer: that helps where messages are slow to start (on many hosts) and where NCCL joins
            GPUs of several hosts (try 16). None: a sixth of the gradients, but 1 to 4 MiB.
        compression: of gradients on the wire: "none", "fp16" or "bf16". Helps where the network is
            the bottleneck: half the bytes. Costs two roundings of each value and, on CPU, the time
            to convert. fp16 has 3 more bits of precision and overflows at 65,504, bf16 does not.
            On CPUs, with the Horovod that cluster/wheel.py builds, it is for several hosts: what
            ranks sum in memory that they share is not cut.
        op: "average" over the ranks. "sum" acts as if the loss were multiplied by their number, for
            losses that are sums over samples. "adasum" averages what gradients have in common and
            adds the rest, so that the learning rate of one rank still works on many. It sends them
            log2(ranks) times, needs a power of two of ranks, and allows several backwards a step
            only by `accumulate_grad_batches`.
        gradient_predivide_factor: f divides gradients by f before they are added and by ranks / f
            afterwards. Helps when 16-bit gradients underflow (smaller f) or overflow (larger f).
            None divides by the number of ranks before, as DDP does.
        broadcast_buffers: all ranks get the buffers of rank 0 before each step of training, as
            under DDP, and not only before an evaluation, which is enough for batch normalization.
            Helps models that update buffers by their batches and read them in training (a codebook,
            a centre, the running means of a teacher in eval mode); costs a broadcast of all buffers
            a step.
        process_sets: all ranks, in groups that train one model each, e.g. [[0, 1], [2, 3]], for
            independent runs under one horovodrun. Rank and world size are then those in the group.
            Each group has a rank 0, which writes files and prepares data: give each its own folders
            (`default_root_dir`, loggers), and prepare data beforehand. End the script with
            hvd.barrier(): when one rank ends, Horovod ends for all.

    Each rank draws its own random numbers from torch in steps (dropout, noise, augmentation after
    the transfer), whatever the seed. A sampler of your own must draw the same on all ranks in
    training, else their shares overlap: what it draws from torch's, NumPy's and Python's generators
    follows from the seed and the epoch; seed a generator of its own alike. Its order is kept, which
    Lightning shuffles again. Gradients are views in buffers that the next backward fills again:
    clone those that you keep.

    Raises:
        MisconfigurationException: for values above that are unknown or do not go together, and,
            later, on all ranks: no GPU for each rank or no NCCL for GPUs, a Trainer's `devices` or
            `num_nodes` that contradict horovodrun's, models, lengths of data sets, numbers of
            batches or learning rates that differ between ranks, and what else refusals.py, steps.py
            and buckets.py refuse.
            A rank that has no batch at all in an epoch after the first is found only when that
            epoch ends. Where batches run out at different steps on GPUs, ranks hang if they call
            `hvd.*` themselves in the next step.
    """

    # Lightning asks this before it puts in distributed samplers and lets sync_dist=True reduce.
    # True for one process too, which then sees samples in the order in which several would.
    is_distributed = True

    def __init__(
        self,
        bucket_mib: float | None = None,
        compression: str = "none",
        op: str = "average",
        gradient_predivide_factor: float | None = None,
        broadcast_buffers: bool = False,
        process_sets: Sequence[Sequence[int]] | None = None,
    ) -> None:
        refuse_options(bucket_mib, compression, op, gradient_predivide_factor)
        in_one_step = op != "adasum" and compression == "none"
        self.world = initialize(process_sets, in_stream=in_one_step)
        if op == "adasum" and self.world.size & (self.world.size - 1):
            raise MisconfigurationException(
                f"op=adasum pairs ranks: it needs a power of two of them, not {self.world.size}"
            )
        rank_zero_only.rank = self.world.rank  # type: ignore[attr-defined]
        if self.world.size > 1:  # webdataset's split_by_node looks here for its share
            os.environ.update(RANK=str(self.world.rank), WORLD_SIZE=str(self.world.size))
        ranks = (self.world.rank, self.world.local_rank, self.world.node_rank)
        super().__init__(cluster_environment=LaunchedEnvironment(self.world.size, *ranks))
        self.bucket_mib = bucket_mib
        self.compression = compression
        self.op = op
        self.gradient_predivide_factor = gradient_predivide_factor
        self.broadcast_buffers = broadcast_buffers
        self.num_nodes = 1  # set by the Trainer, and refused if horovodrun's is another
        self._seed = 0  # of samplers that Lightning puts in
        self._buckets: GradientBuckets | None = None  # only while several ranks train
        self._steps: GuardedSteps | None = None
        self._draws: Callable[[], AbstractContextManager[None]] = nullcontext
        self._combines = True  # gradients; False within block_backward_sync
        self._is_ahead = False  # True on a GPU: the program goes on before gradients are there
        self._drift_checked = self._drift_found = False
        self._evaluation = Evaluation(self.world)
        self._resumed: dict[str, Any] = {}  # what the checkpoint says of the interrupted epoch
        if "OMP_NUM_THREADS" not in os.environ and hvd.local_size() > 1:
            # The ranks of a host share its cores; torch would start a thread per core in each.
            torch.set_num_threads(max(1, usable_cores() // hvd.local_size()))

    @property
    @override
    def root_device(self) -> torch.device:
        assert self.parallel_devices is not None
        chosen, rank, ranks = self.parallel_devices, hvd.local_rank(), hvd.local_size()
        if chosen[0].type != "cuda":
            return chosen[0]
        return chosen[rank] if len(chosen) == ranks else own_gpu(rank, ranks)

    @property
    @override
    def distributed_sampler_kwargs(self) -> dict[str, Any]:
        # Horovod: all ranks share one order, even if they were seeded with seed + rank.
        return {"num_replicas": self.world_size, "rank": self.global_rank, "seed": self._seed}

    @property
    def _module(self) -> pl.LightningModule:
        assert self.lightning_module is not None
        return self.lightning_module

    @property
    def _trainer(self) -> pl.Trainer:
        return self._module.trainer

    # ---------------------------------------------------------------- setting up, and tearing down

    @override
    def setup_environment(self) -> None:
        try:
            super().setup_environment()
        except RuntimeError as error:  # CUDA's
            reason = str(error).partition("\n")[0].rstrip(".")
            raise MisconfigurationException(
                f"{self.root_device} of {os.uname().nodename} cannot be used: {reason}; fix that "
                "(an old driver, a GPU that another process has to itself), or use accelerator=cpu"
            ) from error
        assert self.parallel_devices is not None
        devices = self.parallel_devices
        refuse_contradictions(devices, self.num_nodes, self.root_device, self.world)
        self._seed = self.broadcast(int(os.environ.get("PL_GLOBAL_SEED", 0)))
        if self.root_device.type == "cpu":
            keep_freed_memory()
        # Not true here: evaluation visits every sample once (see process_dataloader), and a resumed
        # epoch goes on where it was, or says that it does not.
        warnings.filterwarnings("ignore", ".*DistributedSampler.*gets evaluated.*")
        warnings.filterwarnings("ignore", ".*ended before the epoch ended and your dataloader is.*")

    @override
    def setup(self, trainer: pl.Trainer) -> None:
        assert self.accelerator is not None
        self.accelerator.setup(trainer)
        module = self._module
        fitting, several = trainer.state.fn == TrainerFn.FITTING, self.world.size > 1
        if fitting and several:
            if not isinstance(self._layer_sync, SyncLayers):
                # Trainer(sync_batchnorm=True) has set Lightning's, which needs torch.distributed.
                kind = nn.SyncBatchNorm if self._layer_sync is None else _BatchNorm
                self._layer_sync = SyncLayers(self.world, kind)
            self._layer_sync.apply(module)
        self.model = self.precision_plugin.convert_module(module)
        if isinstance(self.precision_plugin, HalfPrecision):
            keep_wide(module)
        self.model_to_device()
        if several:
            self._share_model(sent=set())
            self._share_metrics()
            self._draws = OwnDraws(self.world.rank, self.root_device)
        if fitting:
            sent = {*module.parameters(), *module.buffers()}
            self.setup_optimizers(trainer)
            if several:
                refuse_own_clock(trainer)
                warn_of_own_gathers(module)
                self._share_model(sent)  # configure_optimizers may have made more
                self._buckets = self._make_buckets()
                of_all = partial(self.reduce, reduce_op="sum" if self.op == "sum" else "mean")
                self._steps = GuardedSteps(self.optimizers, self._buckets, of_all)
                self._is_ahead = self.root_device.type == "cuda"
                read_by_all(trainer, self.world)
                callbacks = trainer.callbacks  # type: ignore[attr-defined]
                others = [each for each in callbacks if not isinstance(each, Evaluation)]
                callbacks[:] = [*others, self._evaluation]
        self.setup_precision_plugin()

    def _share_model(self, sent: set[Tensor]) -> None:
        """Give all ranks the parameters and buffers of rank 0, except those `sent` before."""
        module = self._module
        refuse_other_models(module, self.world)
        tensors = [*module.parameters(), *shared_buffers(module, self.world)]
        self.world.broadcast([tensor for tensor in tensors if tensor not in sent])

    def _make_buckets(self) -> GradientBuckets:
        module, world = self._module, self.world
        divisor = self.gradient_predivide_factor or world.size
        averaged = self.op == "average"
        before, after = (1 / divisor, divisor / world.size) if averaged else (1.0, 1.0)
        reduction: Reduction = adasum if self.op == "adasum" else COMPRESSIONS[self.compression]
        buckets = GradientBuckets(module, world, reduction, self.bucket_mib, before, after)
        if self.op == "adasum" and buckets.sparse:
            raise MisconfigurationException(
                f"op=adasum mixes dense gradients: make sparse=False of the embedding of "
                f"{next(iter(buckets.sparse.values()))!r}, or use another op"
            )
        return buckets

    @override
    def setup_optimizers(self, trainer: pl.Trainer) -> None:
        super().setup_optimizers(trainer)
        if any(hasattr(optimizer, "skip_synchronize") for optimizer in self.optimizers):
            raise MisconfigurationException(
                "hvd.DistributedOptimizer averages gradients that this strategy averages, too: let "
                "configure_optimizers return the optimizer that it wraps"
            )
        # Empty, unless configure_optimizers loaded one; a checkpoint's comes later.
        states = [o.state_dict() if o.state else None for o in self.optimizers]
        for optimizer, state in zip(self.optimizers, self.broadcast(states)):
            if state is not None:
                optimizer.load_state_dict(state)

    @override
    def model_to_device(self) -> None:
        assert self.model is not None
        self.model.to(self.root_device)

    @override
    def teardown(self) -> None:
        if self._buckets is not None:
            self._buckets.remove()
            self._buckets = None
        if self._steps is not None:
            self._steps.remove()
            self._steps = None
        self.world.deferred_check, self.world.uneven_batch = None, str
        self._drift_checked = self._drift_found = False
        self._evaluation = Evaluation(self.world)
        if self.lightning_module is not None:
            leave_metrics(self.lightning_module, self.world)
            if isinstance(self._layer_sync, SyncLayers):
                self._layer_sync.revert(self.lightning_module)
        super().teardown()

    # ---------------------------------------------------------------- a step, in the order of calls

    @override
    def on_train_start(self) -> None:
        super().on_train_start()
        if isinstance(self._layer_sync, SyncLayers):
            # To copies that hooks have made since setup: those are of plain layers.
            self._layer_sync.apply(self._module, refuse=False)
        self._share_metrics()
        loop = self._trainer.fit_loop
        if self._buckets is not None and loop._data_fetcher is not None:
            # Where the dataset has no length, the first batch is fetched by now.
            refuse_unequal(0 if loop._data_fetcher.done else 1, self.optimizers, self.world)
        loaders = self._resumed.pop("loaders", [])
        resume(loop, self._resumed.get("global_batch_size", 0), self.world.size, loaders)

    @override
    def batch_to_device(
        self, batch: Any, device: torch.device | None = None, dataloader_idx: int = 0
    ) -> Any:
        if batch is None and self._buckets is not None and self._trainer.training:
            raise MisconfigurationException(
                f"the training loader gives rank {self.global_rank} on {os.uname().nodename} None "
                "for a batch: Lightning would skip this step, the other ranks would not; drop "
                "unusable samples in the data set, or replace them by others"
            )
        with self._draws():  # on_after_batch_transfer may augment it
            return super().batch_to_device(batch, device, dataloader_idx)

    @override
    def on_train_batch_start(self, batch: Any, batch_idx: int) -> None:
        if self._buckets is None:
            return
        if batch_idx == 0:
            self._share_metrics()
            # Before the epoch; infinitely many where the number is not known.
            refuse_unequal(self._trainer.num_training_batches, self.optimizers, self.world)
            for optimizer in self.optimizers:
                refuse_strangers(optimizer, self._buckets.known)
        if self.broadcast_buffers and not self._buckets.accumulates:
            self.world.broadcast(shared_buffers(self._module, self.world))

    @override
    def optimizer_step(
        self, optimizer: Optimizer, closure: Callable[[], Any], *args: Any, **kwargs: Any
    ) -> Any:
        if self._steps is not None:
            # Manual optimization: an empty closure, which some optimizers never call.
            if closure is do_nothing_closure:
                self._steps.check(optimizer)
            elif not self._steps.has_hook(optimizer):
                closure = self._steps.then_checked(closure, optimizer)
        return super().optimizer_step(optimizer, closure, *args, **kwargs)

    @override
    def training_step(self, *args: Any, **kwargs: Any) -> Any:
        # Samplers draw within a step that takes dataloader_iter, and must draw alike on all ranks.
        by_iterator = isinstance(self._trainer.fit_loop._data_fetcher, _DataLoaderIterDataFetcher)
        with nullcontext() if by_iterator else self._draws():
            return super().training_step(*args, **kwargs)

    @contextmanager
    @override
    def block_backward_sync(self) -> Generator[None, None, None]:
        """Gradients stay local inside. Accumulation uses it for all batches but the last."""
        self._combines = False
        try:
            yield
        finally:
            self._combines = True

    @override
    def backward(
        self, closure_loss: Tensor, optimizer: Optimizer | None, *args: Any, **kwargs: Any
    ) -> Tensor:
        # Horovod: Lightning's with its last two calls exchanged, as precision_plugin.post_backward
        # calls on_after_backward hooks: these see the gradients of all ranks, as under DDP, which
        # averages within backward.
        with shown_as(f"{type(self).__name__}.backward"):  # profilers do not see manual_backward
            self.pre_backward(closure_loss)
            loss = self.precision_plugin.pre_backward(closure_loss, self._module)
            self.precision_plugin.backward(loss, self._module, optimizer, *args, **kwargs)
            self.post_backward(loss)
            return self.precision_plugin.post_backward(loss, self._module)

    @override
    def pre_backward(self, closure_loss: Tensor) -> None:
        if self._buckets is None:
            return
        self.world.run_deferred_check()  # before this begins what other ranks may never come to
        self._buckets.prepare()
        if self._combines:
            # Where max_steps ends the training, ranks may have batches left.
            is_last_step = self._trainer.global_step + 1 == self._trainer.max_steps
            progress = self._trainer.fit_loop.epoch_loop.batch_progress
            self._buckets.start(last_batch=progress.is_last_batch or is_last_step)

    @override
    def post_backward(self, closure_loss: Tensor) -> None:
        if self._buckets is None:
            return
        if not self._combines:
            self._buckets.leave()
            return
        agreed = self._buckets.finish()
        progress = self._trainer.fit_loop.epoch_loop.batch_progress
        batches = progress.current.ready if progress.is_last_batch else progress.current.ready + 1
        check = partial(self._refuse_other_ends, agreed, batches)
        if self._is_ahead and not progress.is_last_batch:
            self.world.deferred_check = check  # by then the GPU has more to do while this waits
        else:
            check()

    def _refuse_other_ends(self, agreed: Callable[[], bool], batches: int) -> None:
        """Raise unless all ranks agree whether the epoch ends; `batches`: this rank's, at least."""
        if agreed():
            return
        refuse_unequal(batches, self.optimizers, self.world)
        raise MisconfigurationException(
            "for some ranks the epoch ends with this backward, for others it does not: give all "
            "ranks equally many batches, and call backward equally often"
        )

    @override
    def on_train_end(self) -> None:
        self.world.run_deferred_check()
        self._check_drift()

    # ---------------------------------------------------------------- evaluation

    @override
    def process_dataloader(self, dataloader: object) -> object:
        """Evaluation visits each sample once."""
        trainer = self._trainer
        if not isinstance(dataloader, DataLoader):
            return dataloader
        if self.root_device.type == "cpu":
            dataloader.pin_memory = False  # it would take memory of a GPU that is not trained on
        if self.world.size > 1:
            refuse_other_lengths(dataloader, self.world)
        # If the sanity check asks for estimated_stepping_batches, the training loader is made then;
        # the loaders of validation are there already.
        made = trainer.fit_loop.epoch_loop.val_loop._combined_loader is not None
        for_training = trainer.sanity_checking and made
        if for_training or trainer.state.stage == RunningStage.TRAINING:
            seed_order(dataloader)
            return dataloader
        if trainer.state.stage in EVALUATING:
            stage = "test" if trainer.testing else "validate"
            dataloader = each_sample_once(dataloader, self.world, stage)
        self._evaluation.count_batches(dataloader)
        return dataloader

    @override
    def on_validation_start(self) -> None:
        self._share_metrics()
        if not self._drift_checked and self._has_trained:
            self._drift_checked = True
            self._check_drift()

    def _share_metrics(self) -> None:
        """Also those that the module has made in its on_*_start hooks, which come before ours."""
        if self.world.size > 1:
            synchronize_metrics(self._module, self.world)

    on_test_start = on_predict_start = _share_metrics

    @override
    def validation_step(self, *args: Any, **kwargs: Any) -> Any:
        self._evaluation.before_step(self._trainer, *args, **kwargs)
        with self._draws():
            return super().validation_step(*args, **kwargs)

    @override
    def test_step(self, *args: Any, **kwargs: Any) -> Any:
        self._evaluation.before_step(self._trainer, *args, **kwargs)
        with self._draws():
            return super().test_step(*args, **kwargs)

    @override
    def predict_step(self, *args: Any, **kwargs: Any) -> Any:
        self._evaluation.before_step(self._trainer, *args, **kwargs)
        with self._draws():
            return super().predict_step(*args, **kwargs)

    @override
    def on_validation_end(self) -> None:
        warn_of_own_values(self._trainer, self.world)
        if self._trainer.state.fn != TrainerFn.FITTING:
            compute_the_rest(self._module, self.world)

    on_test_end = on_validation_end

    @property
    def _has_trained(self) -> bool:
        return self._trainer.fit_loop.epoch_loop.batch_progress.total.ready > 0

    def _check_drift(self) -> None:
        """In the first validation after a batch, and when training ends; warns once."""
        if self._buckets is not None and self._has_trained and not self._drift_found:
            buffers = not self.broadcast_buffers  # else the next step makes them equal
            self._drift_found = warn_of_drift(self._module, self.world, buffers)

    # ---------------------------------------------------------------- collectives

    @property
    def _by_itself(self) -> bool:
        """Whether to leave collectives out: there is one rank, or this one has failed and others
        wait elsewhere for it to end. Until the Trainer has cleared up, what this rank saves and
        logs because of the error must not wait for them."""
        if self.world.size == 1:
            return True
        trainer = None if self.lightning_module is None else self.lightning_module._trainer
        return trainer is not None and trainer.interrupted and trainer.state.stage is not None

    @override
    def reduce(
        self, tensor: Tensor | Any, group: Any | None = None, reduce_op: Any | None = "mean"
    ) -> Tensor | Any:
        if not isinstance(tensor, Tensor) or self._by_itself:
            return tensor
        return self.world.reduce(tensor, str(reduce_op or "mean").rpartition(".")[2].lower())

    @override
    def reduce_boolean_decision(self, decision: bool, all: bool = True) -> bool:
        if self._by_itself:
            return decision
        votes = int(self.reduce(torch.tensor(int(decision)), reduce_op="sum"))
        return votes == self.world_size if all else votes > 0

    @override
    def all_gather(
        self, tensor: Tensor, group: Any | None = None, sync_grads: bool = False
    ) -> Tensor:
        """One tensor of shape (world size, *shape), as under DDP; ranks have equal shapes."""
        if self.world.size == 1:
            return torch.stack([tensor if sync_grads else tensor.detach()])
        if sync_grads:
            return Gather.apply(tensor, self.world)
        return self.world.stack(tensor)

    @override
    def barrier(self, name: str | None = None) -> None:
        if not self._by_itself:
            self.world.barrier()

    @override
    def broadcast(self, obj: T, src: int = 0) -> T:
        return obj if self._by_itself else self.world.broadcast_object(obj, src)

    # ---------------------------------------------------------------- checkpoints

    @override
    def save_checkpoint(
        self, checkpoint: dict[str, Any], filepath: _PATH, storage_options: Any | None = None
    ) -> None:
        if (trainer := self._module._trainer) is not None:  # None: after strategy.connect alone
            size = global_batch_size(trainer.fit_loop, self.world.size)
            checkpoint[SAVED] = {"global_batch_size": size}
        super().save_checkpoint(checkpoint, filepath, storage_options)

    @override
    def load_checkpoint(
        self, checkpoint_path: _PATH, weights_only: bool | None = None
    ) -> dict[str, Any]:
        """Rank 0 reads and the others receive, so they need not see its file system.

        For ckpt_path="last" they must: Lightning looks for the file on each rank.
        """
        checkpoint: dict[str, Any] = {}
        problem: Exception | None = None
        if self.is_global_zero:
            try:
                checkpoint = super().load_checkpoint(checkpoint_path, weights_only)
                if self._trainer.state.fn != TrainerFn.FITTING and "optimizer_states" in checkpoint:
                    checkpoint["optimizer_states"] = []  # Adam's has twice the weights' size
            except Exception as error:  # whatever it is, the others wait to hear of it
                problem = error
        if received := self.broadcast(sendable(problem)):
            raise problem or received
        checkpoint = self.broadcast(checkpoint)
        step = checkpoint.get("global_step", 0)
        if step and self._trainer.state.fn == TrainerFn.FITTING:
            draw_others(step)  # before loaders are made, whose workers take their seeds then
        states = checkpoint.get("loops", {}).get("fit_loop", {}).get("state_dict", {})
        self._resumed = {**checkpoint.get(SAVED, {}), "loaders": states.get("combined_loader", [])}
        return checkpoint

    # ---------------------------------------------------------------- what reports ask

    @property
    def operations(self) -> str:
        """What Horovod moves this strategy's tensors with: NCCL, MPI or Gloo."""
        if self.root_device.type == "cuda" and hvd.nccl_built():
            return "NCCL"
        return "MPI" if hvd.mpi_built() and hvd.mpi_enabled() else "Gloo"

    def take_exchanges(self) -> list[Exchange]:
        """What it took to combine gradients in each backward since the last call."""
        if self._buckets is None:
            return []
        exchanges = list(self._buckets.exchanges)
        self._buckets.exchanges.clear()
        return exchanges

    def sent_bytes(self, size: int) -> float:
        """How many bytes each rank of a ring sends to combine `size` bytes of gradients, by which
        the bus bandwidth counts; fewer leave a host whose ranks share memory."""
        ranks = self.world.size
        if self.op == "adasum":
            return size * (ranks.bit_length() - 1)
        on_one_host = ranks <= hvd.local_size() and self.root_device.type == "cpu"
        cut = self.compression != "none" and not (on_one_host and cuts_itself())
        return 2 * (ranks - 1) / ranks * size / (2 if cut else 1)

"""Collectives for all tensors of Lightning and torchmetrics, on top of Horovod's.

Horovod's own know eight dtypes (no bfloat16, no bool for sums), want the same number of
dimensions everywhere, and write in place, which fails for tensors made under inference mode.
All ranks must call these, in the same order.
"""

from __future__ import annotations

import io
import os
import pickle
import time
from collections.abc import Callable, Iterable
from functools import cache, cached_property
from typing import Any, TypeVar

import cloudpickle
import horovod.torch as hvd
import torch
from pytorch_lightning.utilities.exceptions import MisconfigurationException
from torch import Tensor

from .cores import usable_cores

T = TypeVar("T")

MOST_DIMENSIONS = 16
LONGEST_SLEEP = 100_000  # µs: then Python looks whether there was a signal, as of Ctrl-C
MOST_BYTES = 2**30  # in one operation: Horovod counts elements in 32 bits
DTYPES = [
    torch.float32, torch.float64, torch.float16, torch.bfloat16, torch.int64, torch.int32,
    torch.int16, torch.int8, torch.uint8, torch.bool, torch.complex64, torch.complex128,
    torch.uint16, torch.uint32, torch.uint64, torch.complex32, torch.float8_e4m3fn,
    torch.float8_e5m2,
]  # fmt: skip
OPERATIONS = {
    "mean": hvd.Sum, "avg": hvd.Sum, "sum": hvd.Sum,  # a mean is divided afterwards
    "min": hvd.Min, "max": hvd.Max, "product": hvd.Product,
}  # fmt: skip


def wait(handle: int) -> Any:
    """The result of an operation, once it is done; raises what Horovod raises."""
    wait_for_operations(lambda: hvd.poll(handle))
    return hvd.synchronize(handle)


def wait_for_operations(done: Callable[[], bool]) -> None:
    """Sleep until `done`, which it may be whenever an operation of Horovod is.

    Horovod: its synchronize() keeps a core busy until then, which its own thread or other ranks of
    the host may need (measured: benchmarks/NOTES.md). The Horovod of cluster/wheel.py wakes us.
    """
    library = hvd.mpi_ops._basics.MPI_LIB_CTYPES
    operations_done = getattr(library, "horovod_operations_done", None)
    if operations_done is None:
        wait_until(done)
        return
    known = operations_done(0, 0)
    while not done():
        known = operations_done(known, LONGEST_SLEEP)


def wait_until(done: Callable[[], bool]) -> None:
    """Ask again and again, with pauses."""
    pause, longest = 2e-5, longest_pause()
    while not done():
        time.sleep(pause)
        pause = min(1.3 * pause, longest)


@cache
def longest_pause() -> float:
    """In seconds: 1e-4 times the ranks that share a core, lest their questions fill it."""
    return 1e-4 * max(1, hvd.local_size() / usable_cores())


def pack(obj: object) -> io.BytesIO:
    file = io.BytesIO()
    # Not torch's protocol 2, for which a FileNotFoundError is an OSError.
    torch.save(obj, file, pickle_module=cloudpickle, pickle_protocol=pickle.HIGHEST_PROTOCOL)
    return file


def unpack(file: io.BytesIO) -> Any:
    file.seek(0)
    return torch.load(file, map_location=on_own_gpu, weights_only=False)


def sendable(error: Exception | None) -> Exception | None:
    """The error, or one that says the same if this one cannot be pickled or unpickled."""
    try:
        unpack(pack(error))
        return error
    except Exception:
        return RuntimeError(f"{type(error).__name__}: {error}")


def on_own_gpu(storage: Any, location: str) -> Any:
    """Puts what another rank had on its GPU on this rank's, not on the one of the same number."""
    return storage.cuda() if location.startswith("cuda") else storage


class World:
    """The ranks that work together: all that were launched, or one of several sets of them."""

    def __init__(self, process_set: hvd.ProcessSet) -> None:
        self.process_set = process_set
        # Names the batch at hand if some ranks do not have it, else "": no collective within it.
        self.uneven_batch: Callable[[], str] = str
        self.deferred_check: Callable[[], None] | None = None  # runs before the next collective
        # Each rank's host, if this world is a part of all ranks: Horovod knows only those of all.
        # Gathered here, as all ranks come here.
        self._hosts = [] if self.size == hvd.size() else self.gather_objects(os.uname().nodename)

    def run_deferred_check(self) -> None:
        if self.deferred_check is not None:
            check, self.deferred_check = self.deferred_check, None
            check()

    def before_collective(self) -> None:
        """Raises RuntimeError where not all ranks would come to this collective."""
        self.run_deferred_check()
        if batch := self.uneven_batch():
            raise RuntimeError(
                f"{batch} is there on some ranks only, because the samples do not divide by "
                "the ranks: no collective (on_step=True with sync_dist=True, all_gather, ...) can "
                "be made in it; do it at the end of the epoch, evaluate batches of 2 or more, or "
                "leave out a batch_sampler of your own"
            )

    def __deepcopy__(self, memo: dict[int, Any]) -> World:
        return self  # callbacks copy modules, whose metrics hold this; Horovod knows only one

    def __getstate__(self) -> dict[str, Any]:
        # Saved with the metrics of a module; what is pending now means nothing in a file.
        return {**vars(self), "deferred_check": None, "uneven_batch": str}

    @cached_property
    def size(self) -> int:
        return self.process_set.size()

    @cached_property
    def rank(self) -> int:
        """In this world; equal to hvd.rank() where the world is all that were launched."""
        return self.process_set.rank()

    @property
    def local_rank(self) -> int:
        """The number of this rank among the ranks of this world on its host."""
        hosts = self._hosts
        return hosts[: self.rank].count(hosts[self.rank]) if hosts else hvd.local_rank()

    @property
    def node_rank(self) -> int:
        """The number of this rank's host among the hosts that have ranks of this world."""
        hosts = self._hosts
        return list(dict.fromkeys(hosts)).index(hosts[self.rank]) if hosts else hvd.cross_rank()

    def reduce(self, tensor: Tensor, operation: str) -> Tensor:
        """The mean, sum, min, max or product over all ranks; a new tensor of the same shape.

        The mean of integers is a float. Cut to an integer, as under DDP, the mean of 5 and 4
        samples would be 4, and an average weighted with it would be wrong. Values travel as int64,
        float32 or float64: Horovod does not know bool and bfloat16, and loses digits of float16.
        """
        self.before_collective()
        if operation not in OPERATIONS:
            raise ValueError(
                f"cannot reduce with {operation!r} over Horovod; there are: {', '.join(OPERATIONS)}"
            )
        if tensor.is_complex():
            raise ValueError("cannot reduce complex numbers over Horovod; torch.view_as_real helps")
        wide = torch.float64 if tensor.dtype == torch.float64 else torch.float32
        with torch.inference_mode(False), torch.no_grad():
            value = tensor.detach().to(
                wide if tensor.is_floating_point() else torch.int64,
                memory_format=torch.contiguous_format, copy=True,
            )  # fmt: skip
            op = OPERATIONS[operation]
            options = {"process_set": self.process_set}
            reduced = wait(hvd.allreduce_async_(value, name="reduce", op=op, **options))
            if operation in ("mean", "avg"):
                reduced = reduced / self.size
            mean_of_integers = reduced.is_floating_point() and not tensor.is_floating_point()
            return reduced if mean_of_integers else reduced.to(tensor.dtype)

    def gather(self, tensor: Tensor, group: Any = None) -> list[Tensor]:
        """Every rank's tensor, in the order of ranks; shapes and dtypes may differ between ranks.

        An empty tensor takes the dtype and trailing shape of the others, so that it can be
        concatenated with theirs. Bytes travel, so any dtype can. torchmetrics passes `group`, which
        is ignored: this world is gathered.
        """
        self.before_collective()
        with torch.inference_mode(False), torch.no_grad():
            tensor = tensor.detach().clone(memory_format=torch.contiguous_format)
            header = torch.zeros(2 + MOST_DIMENSIONS, dtype=torch.int64)
            header[0], header[1] = DTYPES.index(tensor.dtype), tensor.dim()
            header[2 : 2 + tensor.dim()] = torch.tensor(tensor.shape)
            headers = self._allgather(header.unsqueeze(0), "gather.header").tolist()
            kinds = [(DTYPES[head[0]], head[2 : 2 + head[1]]) for head in headers]
            sizes = [torch.Size(shape).numel() * dtype.itemsize for dtype, shape in kinds]

            mine = tensor.reshape(-1).view(torch.uint8)
            share = max(1, MOST_BYTES // self.size)
            parts: list[list[Tensor]] = [[] for _ in sizes]
            for start in range(0, max(*sizes, 1), share):
                piece = self._allgather(mine[start : start + share], "gather.bytes")
                counts = [min(share, max(0, size - start)) for size in sizes]
                for part, chunk in zip(parts, piece.split(counts)):
                    part.append(chunk)

            filled = next(((dtype, shape) for dtype, shape in kinds if 0 not in shape), None)
            gathered = []
            for (dtype, shape), part in zip(kinds, parts):
                if 0 in shape and filled is not None:
                    dtype, shape = filled[0], [0, *filled[1][1:]]
                gathered.append(torch.cat(part).view(dtype).reshape(shape))
            return gathered

    def _allgather(self, tensor: Tensor, name: str) -> Tensor:
        # Horovod: nameless operations are matched by number, and ranks start them in other orders.
        return wait(hvd.allgather_async(tensor, name, self.process_set))

    def gather_objects(self, obj: T) -> list[T]:
        """Every rank's object, in the order of ranks."""
        parts = self.gather(torch.frombuffer(pack(obj).getbuffer(), dtype=torch.uint8))
        return [unpack(io.BytesIO(part.numpy().tobytes())) for part in parts]

    def stack(self, tensor: Tensor) -> Tensor:
        """Shape (size, *shape): every rank's tensor.

        Raises:
            MisconfigurationException: when shapes differ between ranks.
        """
        parts = self.gather(tensor)
        shapes = [tuple(part.shape) for part in parts]
        if len(set(shapes)) > 1:
            raise MisconfigurationException(
                f"all_gather takes one shape, and ranks have {', '.join(map(str, shapes))}: "
                "evaluation repeats no sample, so a rank may have one less; "
                "self.trainer.strategy.world.gather(tensor) gives a list instead"
            )
        return torch.stack(parts)

    def broadcast_object(self, obj: T, root: int = 0) -> T:
        """The object of rank `root`, on all ranks; of any size (Horovod's own ends at 2 GiB)."""
        mine = self.rank == root
        file = pack(obj) if mine else io.BytesIO()
        with torch.inference_mode(False):
            size = torch.tensor(file.getbuffer().nbytes)
            self.broadcast([size], root)
            if not mine:  # the file's own memory receives: no second copy of a checkpoint's bytes
                file.seek(int(size) - 1)
                file.write(b"\0")
            self.broadcast([torch.frombuffer(file.getbuffer(), dtype=torch.uint8)], root)
        return obj if mine else unpack(file)

    def broadcast(self, tensors: Iterable[Tensor], root: int = 0) -> None:
        """Overwrite the tensors of all ranks with those of rank `root`, whatever their dtype."""
        self.before_collective()
        options = {"process_set": self.process_set}
        # Horovod: it counts roots among all ranks, those of other process sets too.
        root = self.process_set.ranks[root]
        sent = []
        for index, tensor in enumerate(tensors):
            for dim, stride in enumerate(tensor.stride()):
                if stride == 0 and tensor.numel():  # expanded: what is there once is written once
                    tensor = tensor.narrow(dim, 0, 1)
            raw = tensor.detach().contiguous().reshape(-1).view(torch.uint8)
            pieces = raw.split(MOST_BYTES) if len(raw) else ()
            handles = [
                hvd.broadcast_async_(piece, root, f"state.{index}.{number}", **options)
                for number, piece in enumerate(pieces)
            ]
            sent.append((tensor, raw, handles))
        with torch.no_grad():
            for tensor, raw, handles in sent:
                for handle in handles:
                    wait(handle)
                if raw.data_ptr() != tensor.data_ptr():
                    tensor.copy_(raw.view(tensor.dtype).reshape(tensor.shape))

    def barrier(self) -> None:
        self.before_collective()
        # Horovod: join() is no barrier (horovod#3121), and barrier() keeps a core busy.
        token = torch.zeros(1, dtype=torch.float32)
        wait(hvd.allreduce_async_(token, name="barrier", op=hvd.Sum, process_set=self.process_set))

    def has_several_ranks(self) -> bool:
        return hvd.is_initialized() and self.size > 1


class Gather(torch.autograd.Function):
    """World.stack; backward adds up all ranks' gradients of this rank's tensor."""

    @staticmethod
    def forward(ctx: Any, tensor: Tensor, world: World) -> Tensor:
        ctx.world = world
        return world.stack(tensor)

    @staticmethod
    def backward(ctx: Any, gradients: Tensor) -> tuple[Tensor, None]:
        # Horovod's own averages where DDP adds, and its operations have no names.
        return SumOfMine.apply(gradients, ctx.world), None


class SumOfMine(torch.autograd.Function):
    """The sum over ranks of this rank's row. Gather and SumOfMine are each other's derivative."""

    @staticmethod
    def forward(ctx: Any, rows: Tensor, world: World) -> Tensor:
        ctx.world = world
        return world.reduce(rows, "sum")[world.rank]

    @staticmethod
    def backward(ctx: Any, gradient: Tensor) -> tuple[Tensor, None]:
        return Gather.apply(gradient, ctx.world), None

"""Combine gradients over all ranks while backward still runs.

Parameters are laid out in flat buckets, in the reverse of the order in which the model names
them, which is about the order in which backward reaches them. As soon as the last gradient of a
bucket is there, one reduction of the whole bucket starts; gradients become views in it. Few
large tensors are what Horovod's negotiation and the wire are good at; the first buckets are small
so that the wire starts early, and has the next when it is done.

Behind its gradients a bucket carries flags. One a parameter: "this rank has a gradient". Where all
are zero, no rank used the parameter, and its gradient stays None: a zero there would let weight
decay and momentum move weights that a single process leaves alone. And two that say whether this
rank's epoch ends with this batch or goes on: where both were raised, some rank would soon wait
for another forever.

The gradients of embeddings with sparse=True are gathered, after backward. It does not handle a
parameter that gets its gradient twice in one backward (as with reentrant activation
checkpointing), which is refused with an error.
"""

from __future__ import annotations

import contextlib
import threading
from collections import defaultdict, deque
from collections.abc import Callable, Iterator
from dataclasses import dataclass
from functools import partial
from itertools import count

import horovod.torch as hvd
import torch
from pytorch_lightning.utilities.exceptions import MisconfigurationException
from torch import Tensor, nn
from torch.autograd.graph import Node, get_gradient_edge
from torch.nn import Parameter
from torch.profiler import record_function

from .clock import Moment, moment
from .collectives import World, wait, wait_until
from .layout import MIB, Bucket, allocate, fill, split, strided_as
from .reductions import InFlight, Reduction, adasum, add

# Of all Trainers that this process has, by process set: what an error has left under way keeps a
# name of its own.
LAYOUTS: defaultdict[int, Iterator[int]] = defaultdict(count)


@dataclass
class Exchange:
    """What it took to combine the gradients of one backward."""

    calls: int  # buckets
    bytes: int  # of gradients in them
    backward: Moment  # when backward was done,
    end: Moment  # and when all gradients were those of the global batch
    # When the last stretch began in which, until `end`, the wire never rested; on a GPU, where it
    # cannot be seen to rest, when the first bucket was there.
    busy: Moment
    busy_bytes: int  # of the buckets that were sent in that stretch


class GradientBuckets:
    """Combines the gradients of a module over all ranks, between `start` and `finish`.

    Args:
        module: its parameters are the same, in the same order, on all ranks.
        world: the ranks.
        reduction: how a bucket is combined.
        bucket_mib: size of a bucket in MiB; a larger one has fewer negotiations, a smaller one
            starts earlier. The first are of 1, 2, ... MiB.
        before: what gradients are multiplied with before the reduction; hooks see them without.
        after: what they are multiplied with after the reduction.

    Attributes:
        exchanges: the last ones; who wants to count all takes them from here in time.
        known: all parameters of the module.
        unprepared: parameters that got a gradient without `prepare`, on this rank alone.
        mixed: those whose gradient of Adasum was added to by a later backward.
        in_backward: whether a backward was prepared and is not over.
    """

    def __init__(
        self, module: nn.Module, world: World, reduction: Reduction,
        bucket_mib: float, before: float, after: float,
    ) -> None:  # fmt: skip
        self.world, self.reduction = world, reduction
        self._in_steps = reduction is not add
        self.bucket_bytes, self.before, self.after = bucket_mib * MIB, before, after
        self.parameters = list(module.parameters())[::-1]
        self.known = set(self.parameters)
        for parameter in self.parameters:
            if parameter.is_complex():
                raise MisconfigurationException(
                    "Horovod adds no complex gradients; split them in two"
                )
        self.sparse: dict[Parameter, str] = {
            layer.weight: name  # type: ignore[misc]  # which is one
            for name, layer in module.named_modules()
            if isinstance(layer, (nn.Embedding, nn.EmbeddingBag))
            and layer.sparse
            and layer.weight in self.known  # not computed of another, as by weight_norm
        }
        # Of a weight that a dense layer has too, autograd adds both gradients up.
        self._tied = {
            parameter
            for layer in module.modules()
            for parameter in layer.parameters(recurse=False)
            if parameter in self.sparse and not getattr(layer, "sparse", False)
        }
        self.buckets: list[Bucket] = []
        self._bucket: dict[Parameter, Bucket] = {}
        self._seen: set[Parameter] = set()
        self._reduced: set[Tensor] = set()
        self._hooks: dict[Parameter, tuple[Node, torch.utils.hooks.RemovableHandle]] = {}
        self.in_backward = False
        self.unprepared: set[Parameter] = set()
        self.mixed: set[Tensor] = set()
        self._together = [""] * len(self.parameters)
        self._trained: list[bool] = []
        self._gathered: list[tuple[Parameter, str]] = []  # sparse ones that are trained
        self._local: list[bool] = []  # trained in backwards since `finish` that stayed local
        self._active = False
        self._last_batch = False
        self.exchanges: deque[Exchange] = deque(maxlen=100)
        self._busy: Moment | None = None
        self._busy_bytes = 0
        self._on_the_wire: deque[InFlight] = deque()
        self._one_at_a_time = threading.Lock()  # autograd has a thread for each GPU of the model
        self._watch()

    def prepare(self) -> None:
        """Before every backward, also one whose gradients stay local."""
        if self.in_backward:
            raise RuntimeError(
                "the backward before this one ended in an error, and what it began to send may be "
                "under way on other ranks: end the run, or go on with a new Trainer"
            )
        self.in_backward = True
        self.unprepared = {p for p in self.unprepared if self.is_unprepared(p)}
        # Gradients that an earlier backward left are equal on all ranks by now: added up again they
        # would count once a rank, so they are scaled down first. Those of an optimizer that is
        # toggled off stay as they are: this backward does not touch them.
        share = 1 / (self.before * self.after * self.world.size)
        self.mixed = {p for p in self.mixed if not p.requires_grad}
        for parameter in self._reduced if abs(share - 1) > 1e-9 else ():  # it is 1 of averages
            if parameter.requires_grad and parameter.grad is not None:
                if self.reduction is adasum and parameter.grad.any():
                    self.mixed.add(parameter)  # no sum, of which each rank could have its part
                parameter.grad.mul_(share)
        self._reduced = {p for p in self._reduced if not p.requires_grad}

    def start(self, last_batch: bool = False) -> None:
        """Before backward: from here on, gradients are combined as they come.

        Args:
            last_batch: whether the epoch ends with this batch, or the training; see `finish`.
        """
        trained = [parameter.requires_grad for parameter in self.parameters]
        if self._local:  # what was frozen since then is still to be combined
            trained = [now or before for now, before in zip(trained, self._local)]
        if trained != self._trained:
            self._lay_out(trained)
        self._active, self._last_batch, self._busy = True, last_batch, None
        self._on_the_wire.clear()
        for bucket in self.buckets:
            bucket.missing, bucket.unused, bucket.work = len(bucket.parameters), [], None
        self._seen.clear()

    def leave(self) -> None:
        """After a backward without `start`, whose gradients stay local for now."""
        self.in_backward = False
        local = self._local or [False] * len(self.parameters)
        self._local = [p.requires_grad or trained for p, trained in zip(self.parameters, local)]

    @property
    def accumulates(self) -> bool:
        """Whether backwards since the last reduction stayed local."""
        return bool(self._local)

    def is_unprepared(self, parameter: Parameter) -> bool:
        """Whether its `.grad` still holds what a plain loss.backward() has left there."""
        if parameter not in self.unprepared or (gradient := parameter.grad) is None:
            return False
        return gradient.is_sparse or bool(gradient.any())  # zero_grad(set_to_none=False) leaves 0

    def finish(self) -> Callable[[], bool]:
        """After backward: when it returns, all gradients are those of the global batch; on a GPU
        they are when it comes to what is queued after this.

        Returns:
            What tells whether all ranks agree on `last_batch`, and on a GPU waits for it. If they
            do not, they have unequal numbers of batches.
        """
        self._active = self.in_backward = False
        self._local = []
        trained = [bucket for bucket in self.buckets if bucket.trained]
        backward = moment(self.parameters[0].device)
        for bucket in trained:
            if bucket.work is None:
                self._launch(bucket)
        votes: Tensor | None = None
        if self._gathered and not trained:  # no bucket that could carry them
            votes = torch.ones(2)
            votes[-1 if self._last_batch else -2] = 0
            votes = self.world.reduce(votes, "sum")
        for parameter, name in self._gathered:
            self._gather(parameter, name)
        for index, bucket in enumerate(trained):
            waiting = trained[index:] if self._in_steps else [bucket]
            with shown_as(f"all-reduce {bucket.name}: wait"):
                wait_until(partial(advance, waiting))
            self._unpack(bucket)
        if trained and self._busy is not None:
            size = sum(bucket.buffer.nbytes for bucket in trained)
            end = moment(self.parameters[0].device)
            busy = self._busy, self._busy_bytes
            self.exchanges.append(Exchange(len(trained), size, backward, end, *busy))
        if votes is not None:
            return partial(agree, votes, moment(votes.device))
        if not trained:
            return lambda: True
        votes = trained[0].flags[-2:].to("cpu", non_blocking=True)
        return partial(agree, votes, moment(trained[0].buffer.device))

    def remove(self) -> None:
        for _, hook in self._hooks.values():
            hook.remove()
        self.buckets, self._hooks, self._bucket = [], {}, {}
        self._reduced = set()

    def _lay_out(self, trained: list[bool]) -> None:
        """Make buckets whose parameters were always trained, or not trained, together.

        They are made anew when a change cuts one: a layer was unfrozen, or an optimizer toggled for
        the first time.
        """
        self._trained = trained
        self._watch()
        is_trained = dict(zip(self.parameters, trained))
        cut = any(len({is_trained[p] for p in bucket.parameters}) > 1 for bucket in self.buckets)
        if not self.buckets or cut:
            self._make_buckets(trained)
        for bucket in self.buckets:
            bucket.trained = is_trained[bucket.parameters[0]]
        self._gathered = [(p, name) for p, name in self.sparse.items() if is_trained[p]]

    def _make_buckets(self, trained: list[bool]) -> None:
        self._together = [f"{past}{int(now)}" for past, now in zip(self._together, trained)]
        dense = [
            (parameter, (parameter.dtype, parameter.device, together))
            for parameter, together in zip(self.parameters, self._together)
            if parameter not in self.sparse
        ]
        number = next(LAYOUTS[self.world.process_set.process_set_id])
        self.buckets = [
            Bucket(f"gradients.{number}.{index}", group)
            for index, group in enumerate(split(dense, self.bucket_bytes))
        ]
        self._bucket = {p: bucket for bucket in self.buckets for p in bucket.parameters}

    def _watch(self) -> None:
        for parameter in self.parameters:
            if parameter.requires_grad and parameter not in self._hooks:
                # Behind the parameter's own hooks, whenever those came: they may change its
                # gradient. The node lives as long as somebody has it.
                node = get_gradient_edge(parameter).node
                hook = node.register_hook(partial(self._gradient_is_there, parameter))
                self._hooks[parameter] = node, hook

    def _gradient_is_there(self, parameter: Parameter, *_: object) -> None:
        if not parameter.requires_grad:
            return  # frozen since forward: autograd comes here all the same, and has added nothing
        if not self._active and not self.in_backward:
            self.unprepared.add(parameter)
        if not self._active or parameter in self.sparse:
            return
        if parameter in self._seen:
            raise RuntimeError(
                "a parameter got a second gradient in one backward, after its first was taken; "
                "with activation checkpointing, pass use_reentrant=False"
            )
        with self._one_at_a_time:
            self._seen.add(parameter)
            bucket = self._bucket[parameter]
            bucket.missing -= 1
            if not bucket.missing:
                self._launch(bucket)
            if self._in_steps:
                advance(self.buckets)

    def _launch(self, bucket: Bucket) -> None:
        """Begin to combine a bucket whose gradients are all there."""
        allocate(bucket)
        self._collect(bucket)
        # Not `= 0`, which on a GPU is a copy from the CPU that waits for all that was queued.
        bucket.flags[-1 if self._last_batch else -2].zero_()
        # A GPU is behind: whether its wire will rest then cannot be told.
        while bucket.buffer.is_cpu and self._on_the_wire and self._on_the_wire[0].rests():
            self._on_the_wire.popleft()
        if not self._on_the_wire:
            # Of one GPU, also for a model on several: times between those of two cannot be told.
            self._busy, self._busy_bytes = moment(self.parameters[0].device), 0
        with shown_as(f"all-reduce {bucket.name}: start"):
            steps = self.reduction(bucket.buffer, bucket.sizes, bucket.name, self.world)
            bucket.work = InFlight(steps)
        self._on_the_wire.append(bucket.work)
        self._busy_bytes += bucket.buffer.nbytes

    def _collect(self, bucket: Bucket) -> None:
        """Gather the bucket's gradients in its buffer, of which they are views from then on."""
        gradients, views = [], []
        bucket.flags.fill_(1)
        for index, (parameter, view) in enumerate(zip(bucket.parameters, bucket.views)):
            gradient = parameter.grad
            if gradient is None:
                bucket.unused.append(index)
                bucket.flags[index].zero_()
                view.zero_()
                continue
            if gradient.is_sparse:
                raise RuntimeError(
                    "a sparse gradient that is not of the weight of an Embedding or EmbeddingBag "
                    "with sparse=True: only those are supported; make it dense"
                )
            if gradient.requires_grad:
                raise RuntimeError(
                    "backward(create_graph=True): averaging over ranks would cut the graph of the "
                    "gradients; use torch.autograd.grad(..., create_graph=True)"
                )
            if gradient.data_ptr() != view.data_ptr() and view.dtype == gradient.dtype:
                if gradient.stride() != view.stride():
                    view = bucket.views[index] = strided_as(parameter, view)
                # Another tensor on the same memory: p.grad.data = ... shall not move the view.
                parameter.grad = view.data
            gradients.append(gradient)
            views.append(view)
        if gradients:
            fill(views, gradients, self.before)

    def _unpack(self, bucket: Bucket) -> None:
        self._reduced.update(bucket.parameters)
        if self.after != 1:
            bucket.buffer[: sum(bucket.sizes)].mul_(self.after)
        if bucket.buffer.dtype == bucket.parameters[0].dtype and not bucket.unused:
            return
        used_somewhere = bucket.flags.tolist()
        for index, (parameter, view) in enumerate(zip(bucket.parameters, bucket.views)):
            if used_somewhere[index]:
                same = view.dtype == parameter.dtype
                parameter.grad = view.data if same else view.to(parameter.dtype)

    def _gather(self, parameter: Tensor, name: str) -> None:
        """All ranks' rows of a sparse gradient; none, where no rank has one."""
        gradient = parameter.grad
        # Also where this rank's step came by the embedding alone.
        dense = parameter in self._tied or (gradient is not None and not gradient.is_sparse)
        if gradient is None:
            rows = parameter.new_empty(0, dtype=torch.int64)
            values = parameter.new_empty(0, *parameter.shape[1:])
        else:
            gradient = gradient if gradient.is_sparse else gradient.to_sparse(1)
            rows, values = gradient._indices()[0], gradient._values()
        with torch.no_grad():
            options = {"process_set": self.world.process_set}
            row_handle = hvd.allgather_async(rows.contiguous(), f"rows.{name}", **options)
            wide = torch.float64 if values.dtype == torch.float64 else torch.float32
            scaled = (values.to(wide) * (self.before * self.after)).contiguous()
            value_handle = hvd.allgather_async(scaled, f"values.{name}", **options)
            rows, values = wait(row_handle), wait(value_handle).to(parameter.dtype)
        if len(rows) or gradient is not None:
            whole = torch.sparse_coo_tensor(rows.unsqueeze(0), values, parameter.shape)
            parameter.grad = whole.to_dense() if dense else whole
        self._reduced.add(parameter)


def agree(votes: Tensor, there: Moment) -> bool:
    """Was one of both raised by no rank?"""
    if isinstance(there, torch.cuda.Event):
        wait_until(there.query)
    return bool((votes == 0).any())


def advance(buckets: list[Bucket]) -> bool:
    """Start the steps whose turn has come, lest the wire be idle; is the first bucket done?"""
    done = [bucket.work is not None and bucket.work.advance() for bucket in buckets]
    return done[0]


def shown_as(name: str) -> contextlib.AbstractContextManager:
    """A range in the trace of torch's profiler, where one runs; else nothing, which costs less."""
    running = torch.autograd._profiler_enabled()
    return record_function(name) if running else contextlib.nullcontext()

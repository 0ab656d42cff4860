"""Combine gradients over all ranks while backward still runs.

Parameters are laid out in flat buckets, in the reverse of the order in which the model names
them, which is about the order in which backward reaches them. As soon as the last gradient of a
bucket is there, one reduction of the whole bucket starts; gradients become views in it. Horovod's
negotiation and the wire work best with few large tensors. The first buckets are small, so that the
wire starts early and has the next bucket when it is done.

After its gradients, a bucket carries flags. One for each parameter says whether this rank has a
gradient. Where all ranks say no, the gradient stays None: a zero there would let weight decay and
momentum move weights that a single process leaves alone. Two more say whether this rank's epoch
ends with this batch or goes on: if both are raised, some rank would soon wait for another forever.

The gradients of embeddings with sparse=True are gathered after backward. A parameter that gets its
gradient twice in one backward (as with reentrant activation checkpointing) is refused.
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
from .collectives import World, wait, wait_for_operations, wait_until
from .layout import MIB, Bucket, fill, split, strided_as
from .reductions import InFlight, Reduction, adasum, add

# Numbers the layouts of all Trainers of this process, by process set: the name of an operation that
# an error left under way is not used again.
LAYOUTS: defaultdict[int, Iterator[int]] = defaultdict(count)
MOST_ELEMENTS = 2**31 - 2**22  # of a bucket on a CPU, with room for its flags


@dataclass
class Exchange:
    """What it took to combine the gradients of one backward."""

    calls: int  # buckets
    bytes: int  # of gradients in them
    backward: Moment  # when backward was done
    end: Moment  # when all gradients were those of the global batch
    # From when on the wire never rested until `end`. On a GPU, where it cannot be seen to rest,
    # when the first bucket was full.
    busy: Moment
    busy_bytes: int  # of the buckets that were sent since then


class GradientBuckets:
    """Combines the gradients of a module over all ranks.

    Call `prepare` before each backward; then `start` before it and `finish` after it, or only
    `leave` after it if gradients are to stay local for now.

    Args:
        module: its parameters are the same, in the same order, on all ranks.
        bucket_mib: size of a bucket in MiB, None: see `split`; the first are of 1, 2, ... MiB.
        before: factor of gradients before the reduction, applied after hooks have seen them.
        after: factor of gradients after the reduction.

    Attributes:
        exchanges: the last 100; take them from here before they are dropped.
        known: all parameters of the module.
        unprepared: parameters that got a gradient without `prepare`, on this rank alone.
        kept: parameters that got one from backwards that stayed local, or whose one these have
            scaled down, since the last reduction.
        mixed: parameters whose result of Adasum a later backward has added to.
        in_backward: whether a backward was prepared and is not over.
    """

    def __init__(
        self, module: nn.Module, world: World, reduction: Reduction,
        bucket_mib: float | None, before: float, after: float,
    ) -> None:  # fmt: skip
        self.world, self.reduction = world, reduction
        self._in_steps = reduction is not add  # of which each waits for the one before
        self.bucket_bytes = None if bucket_mib is None else bucket_mib * MIB
        self.before, self.after = before, after
        self.parameters = list(module.parameters())[::-1]
        self.known = set(self.parameters)
        if any(parameter.is_complex() for parameter in self.parameters):
            raise MisconfigurationException("Horovod adds no complex gradients; split them in two")
        self.sparse: dict[Parameter, str] = {
            layer.weight: name  # type: ignore[misc]  # which is one
            for name, layer in module.named_modules()
            if isinstance(layer, (nn.Embedding, nn.EmbeddingBag))
            and layer.sparse
            and layer.weight in self.known  # not computed from another, as by weight_norm
        }
        # A dense layer has the weight too: autograd adds both gradients up, to a dense one.
        self._tied = {
            parameter
            for layer in module.modules()
            for parameter in layer.parameters(recurse=False)
            if parameter in self.sparse and not getattr(layer, "sparse", False)
        }
        # The layout, which follows from what is trained.
        self.buckets: list[Bucket] = []
        self._bucket: dict[Parameter, Bucket] = {}
        self._trained: list[bool] = []
        self._together = [""] * len(self.parameters)  # all past `_trained`, as "0" and "1"
        self._gathered: list[tuple[Parameter, str]] = []  # the sparse ones that are trained
        self._hooks: dict[Parameter, tuple[Node, torch.utils.hooks.RemovableHandle]] = {}
        # The backward at hand.
        self.in_backward = False
        self._combines = False  # between `start` and `finish`
        self._last_batch = False
        self._seen: set[Parameter] = set()  # whose gradient is there
        self._one_at_a_time = threading.Lock()  # autograd has a thread for each GPU of the model
        # What earlier backwards have left in gradients.
        self._reduced: set[Tensor] = set()  # whose gradient is that of all ranks
        self._local: list[bool] = []  # which were trained by backwards that stayed local
        self.unprepared: set[Tensor] = set()
        self.kept: set[Tensor] = set()
        self.mixed: set[Tensor] = set()
        # When the wire is busy.
        self.exchanges: deque[Exchange] = deque(maxlen=100)
        self._on_the_wire: deque[InFlight] = deque()
        self._busy: Moment | None = None
        self._busy_bytes = 0
        self._watch()

    def remove(self) -> None:
        for _, hook in self._hooks.values():
            hook.remove()

    def is_own(self, parameter: Tensor) -> bool:
        """Whether its `.grad` still holds what this rank alone has, of a plain loss.backward() or
        of a backward that stayed local, or its share of a sum."""
        own = parameter in self.unprepared or parameter in self.kept
        if not own or (gradient := parameter.grad) is None:
            return False
        return bool(gradient.any())  # zero_grad(set_to_none=False) leaves 0

    @property
    def accumulates(self) -> bool:
        """Whether backwards since the last reduction stayed local."""
        return bool(self._local)

    # ---------------------------------------------------------------- one backward

    def prepare(self) -> None:
        """Before every backward, also one whose gradients stay local."""
        if self.in_backward:
            raise RuntimeError(
                "the backward before this one ended in an error, and what it began to send may be "
                "under way on other ranks: end the run, or go on with a new Trainer"
            )
        self.in_backward = True
        self.unprepared = {p for p in self.unprepared if self.is_own(p)}
        # Gradients that an earlier backward left are equal on all ranks by now. Summed again, they
        # would count once per rank, so they are scaled down first. Those of an optimizer that is
        # toggled off stay as they are: this backward does not touch them.
        share = 1 / (self.before * self.after * self.world.size)
        self.mixed = {p for p in self.mixed if not p.requires_grad}
        if abs(share - 1) > 1e-9:  # averages have a share of 1
            for parameter in self._reduced:
                if parameter.requires_grad and parameter.grad is not None:
                    if self.reduction is adasum and parameter.grad.any():
                        self.mixed.add(parameter)  # no sum, of which each rank could have its part
                    parameter.grad.mul_(share)
                    self.kept.add(parameter)  # until it is summed again
        self._reduced = {p for p in self._reduced if not p.requires_grad}

    def start(self, last_batch: bool = False) -> None:
        """Before backward: from here on, gradients are combined as they come.

        Args:
            last_batch: whether the epoch ends with this batch, or the training; see `finish`.
        """
        trained = [parameter.requires_grad for parameter in self.parameters]
        if self._local:  # local gradients of what has been frozen since are combined too
            trained = [now or before for now, before in zip(trained, self._local)]
        if trained != self._trained:
            self._lay_out(trained)
        self._combines, self._last_batch, self._busy = True, last_batch, None
        self._on_the_wire.clear()
        for bucket in self.buckets:
            bucket.missing, bucket.unused, bucket.work = len(bucket.parameters), [], None
        self._seen.clear()

    def _gradient_is_there(self, parameter: Parameter, *_: object) -> None:
        if not parameter.requires_grad:
            return  # frozen since forward: autograd comes here all the same, and has added nothing
        if not self._combines:
            (self.kept if self.in_backward else self.unprepared).add(parameter)
        if not self._combines or parameter in self.sparse:
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
        bucket.allocate()
        self._collect(bucket)
        # Not `= 0`, which on a GPU is a copy from the CPU that waits for all that was queued.
        bucket.flags[-1 if self._last_batch else -2].zero_()
        # Not on a GPU: it comes to this bucket later, and whether the wire rests then is not known.
        while bucket.buffer.is_cpu and self._on_the_wire and self._on_the_wire[0].rests():
            self._on_the_wire.popleft()
        if not self._on_the_wire:
            self._busy, self._busy_bytes = self._now(), 0
        with shown_as(f"all-reduce {bucket.name}: start"):
            steps = self.reduction(bucket.buffer, bucket.sizes, bucket.name, self.world)
            bucket.work = InFlight(steps)
        self._on_the_wire.append(bucket.work)
        self._busy_bytes += bucket.buffer.nbytes

    def _collect(self, bucket: Bucket) -> None:
        """Copy gradients into the bucket's buffer; from then on they are views in it."""
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
                # .data makes another tensor on this memory: p.grad.data = ... must not move ours.
                parameter.grad = view.data
            gradients.append(gradient)
            views.append(view)
        if gradients:
            fill(views, gradients, self.before)

    def finish(self) -> Callable[[], bool]:
        """After backward: all gradients become those of the global batch. On a GPU they may not be
        so on return, but are for all that is queued afterwards.

        Returns:
            A function that tells whether all ranks agree on `last_batch`; it waits for a GPU. If
            they do not, they have unequal numbers of batches.
        """
        self._combines = self.in_backward = False
        self._local = []
        self.kept.clear()
        trained = [bucket for bucket in self.buckets if bucket.trained]
        backward = self._now()
        for bucket in trained:
            if bucket.work is None:  # this rank did not use all of its parameters
                self._launch(bucket)
        votes = None if trained else self._vote()
        for parameter, name in self._gathered:
            self._gather(parameter, name)
        for index, bucket in enumerate(trained):
            waiting = trained[index:] if self._in_steps else [bucket]
            with shown_as(f"all-reduce {bucket.name}: wait"):
                wait_for_operations(partial(advance, waiting))
            self._unpack(bucket)
        if self._busy is not None:
            size = sum(bucket.buffer.nbytes for bucket in trained)
            busy = self._busy, self._busy_bytes
            self.exchanges.append(Exchange(len(trained), size, backward, self._now(), *busy))
        flags = trained[0].flags[-2:] if votes is None else votes
        return partial(agree, flags.to("cpu", non_blocking=True), moment(flags.device))

    def _vote(self) -> Tensor:
        """The flags of `last_batch`, where no bucket carries them; this rank's, if it has nothing
        to exchange at all."""
        votes = torch.ones(2)
        votes[-1 if self._last_batch else -2] = 0
        return self.world.reduce(votes, "sum") if self._gathered else votes

    def _now(self) -> Moment:
        """By one GPU, even for a model on several: times between two of them cannot be told."""
        return moment(self.parameters[0].device)

    def _unpack(self, bucket: Bucket) -> None:
        """Set the gradients that are not views in the bucket yet, or are of another dtype."""
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
        """Make a sparse gradient that of all ranks; None stays where no rank has one."""
        gradient = parameter.grad
        # A tied one is dense on all ranks, even where a rank's step used only the embedding.
        dense = parameter in self._tied or (gradient is not None and not gradient.is_sparse)
        if gradient is None:
            rows = parameter.new_empty(0, dtype=torch.int64)
            values = parameter.new_empty(0, *parameter.shape[1:])
        else:
            gradient = gradient if gradient.is_sparse else gradient.to_sparse(1)
            rows, values = gradient._indices()[0], gradient._values()
        with torch.no_grad():
            options = {"process_set": self.world.process_set}
            row_handle = hvd.allgather_async(rows, f"rows.{name}", **options)
            wide = torch.float64 if values.dtype == torch.float64 else torch.float32
            scaled = (values.to(wide) * (self.before * self.after)).contiguous()
            value_handle = hvd.allgather_async(scaled, f"values.{name}", **options)
            rows, values = wait(row_handle), wait(value_handle).to(parameter.dtype)
        if len(rows) or gradient is not None:
            with torch.sparse.check_sparse_tensor_invariants(enable=False):  # else torch warns
                whole = torch.sparse_coo_tensor(rows.unsqueeze(0), values, parameter.shape)
            parameter.grad = whole.to_dense() if dense else whole
        self._reduced.add(parameter)

    def leave(self) -> None:
        """After a backward without `start`, whose gradients stay local for now."""
        self.in_backward = False
        local = self._local or [False] * len(self.parameters)
        self._local = [p.requires_grad or trained for p, trained in zip(self.parameters, local)]

    # ---------------------------------------------------------------- the layout

    def _lay_out(self, trained: list[bool]) -> None:
        """Make buckets whose parameters were always trained, or not trained, together.

        They are made anew when a change would split one: a layer was unfrozen, or an optimizer
        toggled for the first time.
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
        groups = split(dense, self.bucket_bytes)
        if any(sum(p.numel() for p in group if p.is_cpu) >= MOST_ELEMENTS for group in groups):
            raise MisconfigurationException(
                "Horovod counts the elements of a bucket in 32 bits on CPUs: cut a parameter of "
                "2^31 elements in two, or give a smaller bucket_mib"
            )
        self.buckets = [
            Bucket(f"gradients.{number}.{index}", group) for index, group in enumerate(groups)
        ]
        self._bucket = {p: bucket for bucket in self.buckets for p in bucket.parameters}

    def _watch(self) -> None:
        for parameter in self.parameters:
            if not parameter.requires_grad:
                continue
            # A hook of the node runs after all hooks of the parameter, whenever those were
            # registered; they may change its gradient. We hold the node to keep it alive. A
            # parameter that has moved to another device since (models of several) has a new one.
            node, held = get_gradient_edge(parameter).node, self._hooks.get(parameter)
            if held is None or held[0] is not node:
                hook = node.register_hook(partial(self._gradient_is_there, parameter))
                self._hooks[parameter] = node, hook


def agree(votes: Tensor, there: Moment) -> bool:
    """Whether one of the two flags was raised by no rank."""
    if isinstance(there, torch.cuda.Event):
        wait_until(there.query)
    return bool((votes == 0).any())


def advance(buckets: list[Bucket]) -> bool:
    """Start the steps whose turn has come, lest the wire be idle; whether the first is done."""
    done = [bucket.work is not None and bucket.work.advance() for bucket in buckets]
    return done[0]


def shown_as(name: str) -> contextlib.AbstractContextManager:
    """A range in the trace of torch's profiler, where one runs; else nothing, which costs less."""
    running = torch.autograd._profiler_enabled()
    return record_function(name) if running else contextlib.nullcontext()

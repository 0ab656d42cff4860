"""Average gradients over all ranks while backward still runs.

Parameters are laid out in flat buckets, in the reverse of the order in which the model names
them, which is about the order in which backward reaches them. As soon as the last gradient of a
bucket is there, one all-reduce of the whole bucket starts; gradients become views in it. Few
large tensors are what Horovod's negotiation and the wire are good at; the first bucket is small
so that the wire starts early.

Behind its gradients a bucket carries one flag a parameter: "this rank has a gradient". Where the
sum of a flag is zero, no rank used the parameter, and its gradient stays None: a zero there
would let weight decay and momentum move weights that a single process leaves alone.

It does not handle sparse gradients, nor a parameter that gets its gradient twice in one backward
(reentrant activation checkpointing): both are refused with an error.
"""

from __future__ import annotations

from collections.abc import Iterable
from dataclasses import dataclass, field

import horovod.torch as hvd
import torch
from pytorch_lightning.utilities.exceptions import MisconfigurationException
from torch import Tensor
from torch.nn import Parameter

MIB = 2**20


@dataclass
class Bucket:
    """Parameters whose gradients travel together."""

    name: str
    parameters: list[Parameter]
    buffer: Tensor
    views: list[Tensor]
    ready: int = 0
    handle: int | None = None
    unused: list[int] = field(default_factory=list)

    @property
    def flags(self) -> Tensor:
        return self.buffer[-len(self.parameters) :]

    @property
    def trained(self) -> bool:
        return any(parameter.requires_grad for parameter in self.parameters)


class GradientBuckets:
    """Averages the gradients of `parameters` over all ranks, between `start` and `finish`.

    Args:
        parameters: of the model, in its order, the same on all ranks.
        bucket_mib: size of a bucket in MiB; a larger one has fewer negotiations, a smaller one
            starts earlier. The first is of 1 MiB at most.
    """

    def __init__(self, parameters: Iterable[Parameter], bucket_mib: float = 8) -> None:
        self.buckets: list[Bucket] = []
        self._hooks: list[torch.utils.hooks.RemovableHandle] = []
        self._active = False
        for group in _split(list(parameters)[::-1], bucket_mib * MIB):
            bucket = _allocate(f"gradients.{len(self.buckets)}", group)
            self.buckets.append(bucket)
            for index, parameter in enumerate(group):
                if parameter.requires_grad:
                    self._hook(bucket, index)

    def start(self) -> None:
        """Before backward: from here on, gradients are averaged as they come."""
        self._active = True
        for bucket in self.buckets:
            bucket.ready, bucket.handle, bucket.unused = 0, None, []

    def finish(self) -> None:
        """After backward: when it returns, all gradients are those of the global batch."""
        self._active = False
        trained = [bucket for bucket in self.buckets if bucket.trained]
        for bucket in trained:
            if bucket.handle is None:
                self._launch(bucket)
        for bucket in trained:
            hvd.synchronize(bucket.handle)
            self._unpack(bucket)

    def remove(self) -> None:
        for hook in self._hooks:
            hook.remove()
        self.buckets, self._hooks = [], []

    def _hook(self, bucket: Bucket, index: int) -> None:
        def gradient_is_there(parameter: Parameter) -> None:
            if not self._active:
                return
            if bucket.handle is not None:
                raise RuntimeError(
                    "a parameter got a second gradient in one backward, after its first was sent; "
                    "with activation checkpointing, pass use_reentrant=False"
                )
            _pack(bucket, index)
            bucket.ready += 1
            if bucket.ready == len(bucket.parameters):
                self._launch(bucket)

        parameter = bucket.parameters[index]
        self._hooks.append(parameter.register_post_accumulate_grad_hook(gradient_is_there))

    @staticmethod
    def _launch(bucket: Bucket) -> None:
        bucket.flags.fill_(1)
        for index, parameter in enumerate(bucket.parameters):
            if parameter.grad is None:
                bucket.unused.append(index)
                bucket.views[index].zero_()
                bucket.flags[index] = 0
            else:
                _pack(bucket, index)
        bucket.handle = hvd.allreduce_async_(bucket.buffer, name=bucket.name, op=hvd.Average)

    @staticmethod
    def _unpack(bucket: Bucket) -> None:
        used_somewhere = bucket.flags.tolist() if bucket.unused else []
        for index, (parameter, view) in enumerate(zip(bucket.parameters, bucket.views)):
            if index in bucket.unused and not used_somewhere[index]:
                continue
            if view.dtype == parameter.dtype:
                parameter.grad = view
            else:
                parameter.grad = view.to(parameter.dtype)


def _pack(bucket: Bucket, index: int) -> None:
    """Copy a gradient into its bucket, unless it lives there already."""
    gradient, view = bucket.parameters[index].grad, bucket.views[index]
    assert gradient is not None
    if gradient.is_sparse:
        raise RuntimeError(
            "sparse gradients cannot be averaged over Horovod here; pass sparse=False to the "
            "embedding"
        )
    if gradient.data_ptr() != view.data_ptr():
        view.copy_(gradient)
        if view.dtype == gradient.dtype:
            bucket.parameters[index].grad = view


def _split(parameters: list[Parameter], bytes_: float) -> Iterable[list[Parameter]]:
    """Consecutive parameters that may share a bucket: one dtype and device, frozen ones apart."""
    kinds: dict[tuple[torch.dtype, torch.device, bool], list[Parameter]] = {}
    limit = min(MIB, bytes_)
    for parameter in parameters:
        if parameter.is_complex():
            raise MisconfigurationException("Horovod adds no complex gradients; split them in two")
        kind = (parameter.dtype, parameter.device, parameter.requires_grad)
        group = kinds.setdefault(kind, [])
        group.append(parameter)
        if sum(member.numel() * member.element_size() for member in group) >= limit:
            yield kinds.pop(kind)
            limit = bytes_
    yield from kinds.values()


def _allocate(name: str, parameters: list[Parameter]) -> Bucket:
    first = parameters[0]
    # Horovod: bfloat16 is unknown to it, and sums of 16-bit floats lose digits.
    dtype = torch.float64 if first.dtype == torch.float64 else torch.float32
    sizes = [parameter.numel() for parameter in parameters]
    buffer = torch.zeros(sum(sizes) + len(sizes), dtype=dtype, device=first.device)
    views = []
    for parameter, chunk in zip(parameters, buffer[: sum(sizes)].split(sizes)):
        # A gradient strided as its parameter (channels_last) is what fused optimizers ask for.
        dense = parameter.is_contiguous() or parameter.is_contiguous(
            memory_format=torch.channels_last
        )
        views.append(
            chunk.as_strided(parameter.shape, parameter.stride(), chunk.storage_offset())
            if dense and parameter.dim() == 4
            else chunk.view(parameter.shape)
        )
    return Bucket(name, parameters, buffer, views)

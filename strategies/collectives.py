"""Collectives for the tensors that Lightning and torchmetrics have, on top of Horovod's.

Horovod's own know eight dtypes (no bfloat16, no bool for sums), want the same number of
dimensions everywhere, and write in place, which fails for tensors made under inference mode.
These take what Lightning and torchmetrics hand over. All ranks must call them, in the same order.
"""

from __future__ import annotations

from collections.abc import Iterable
from typing import Any

import horovod.torch as hvd
import torch
from pytorch_lightning import LightningModule
from torch import Tensor
from torchmetrics import Metric

MOST_DIMENSIONS = 16
DTYPES = [
    torch.float32, torch.float64, torch.float16, torch.bfloat16, torch.int64, torch.int32,
    torch.int16, torch.int8, torch.uint8, torch.bool, torch.complex64, torch.complex128,
]  # fmt: skip
OPERATIONS = {
    "mean": hvd.Average, "avg": hvd.Average, "sum": hvd.Sum,
    "min": hvd.Min, "max": hvd.Max, "product": hvd.Product,
}  # fmt: skip


def reduce_tensor(tensor: Tensor, operation: str) -> Tensor:
    """The mean, sum, min, max or product over all ranks of a tensor of one shape; a new tensor.

    The mean of integers is a float: cut to an integer, as under DDP, the mean of 5 and 4 samples
    would be 4, and an average weighted with it wrong. What Horovod cannot add (16-bit floats lose
    digits, bool and bfloat16 are unknown to it) travels as float32 or int64.
    """
    if operation not in OPERATIONS:
        raise ValueError(
            f"cannot reduce with {operation!r} over Horovod; there are: {', '.join(OPERATIONS)}"
        )
    if tensor.is_complex():
        raise ValueError("cannot reduce complex numbers over Horovod; torch.view_as_real helps")
    wide = torch.float64 if tensor.dtype == torch.float64 else torch.float32
    with torch.inference_mode(False), torch.no_grad():
        value = tensor.detach().to(wide if tensor.is_floating_point() else torch.int64, copy=True)
        if operation in ("mean", "avg") and not tensor.is_floating_point():
            return hvd.allreduce(value, op=hvd.Sum) / hvd.size()
        return hvd.allreduce(value, op=OPERATIONS[operation]).to(tensor.dtype)


def gather_tensors(tensor: Tensor, group: Any = None) -> list[Tensor]:
    """Every rank's tensor, in the order of ranks; shapes and dtypes may differ between ranks.

    An empty tensor takes the dtype and trailing shape of the others, so that a rank that saw no
    sample can be concatenated. Bytes travel, so every dtype does. `group` is there because
    torchmetrics passes it; only the world can be gathered.
    """
    with torch.inference_mode(False), torch.no_grad():
        tensor = tensor.detach().clone(memory_format=torch.contiguous_format)
        header = torch.zeros(2 + MOST_DIMENSIONS, dtype=torch.int64)
        header[0], header[1] = DTYPES.index(tensor.dtype), tensor.dim()
        header[2 : 2 + tensor.dim()] = torch.tensor(tensor.shape)
        headers = hvd.allgather(header.unsqueeze(0)).tolist()
        bytes_ = hvd.allgather(tensor.reshape(-1).view(torch.uint8))

        gathered, start = [], 0
        filled = next((head for head in headers if 0 not in head[2 : 2 + head[1]]), headers[0])
        for head in headers:
            dtype, shape = DTYPES[head[0]], head[2 : 2 + head[1]]
            if 0 in shape:
                dtype, shape = DTYPES[filled[0]], [0, *filled[3 : 2 + filled[1]]]
            end = start + torch.Size(shape).numel() * dtype.itemsize
            # clone: a dtype of 8 bytes cannot view memory that begins at an odd place
            gathered.append(bytes_[start:end].clone().view(dtype).reshape(shape))
            start = end
        return gathered


def broadcast_tensors(tensors: Iterable[Tensor], root: int = 0) -> None:
    """Overwrite the tensors of all ranks with those of rank `root`, whatever their dtype."""
    sent = []
    for index, tensor in enumerate(tensors):
        if tensor.numel():
            raw = tensor.detach().contiguous().reshape(-1).view(torch.uint8)
            sent.append((tensor, raw, hvd.broadcast_async_(raw, root, name=f"state.{index}")))
    with torch.no_grad():
        for tensor, raw, handle in sent:
            hvd.synchronize(handle)
            if raw.data_ptr() != tensor.data_ptr():
                tensor.copy_(raw.view(tensor.dtype).reshape(tensor.shape))


def synchronize_metrics(module: LightningModule) -> None:
    """Have every torchmetrics metric of `module` computed over all ranks.

    torchmetrics asks torch.distributed whether there are others, which under Horovod says no:
    each rank would report its own share as everyone's.
    """
    for metric in module.modules():
        if isinstance(metric, Metric) and metric.dist_sync_fn is None:
            metric.dist_sync_fn = gather_tensors
            metric.distributed_available_fn = several_ranks


def several_ranks() -> bool:
    return hvd.is_initialized() and hvd.size() > 1

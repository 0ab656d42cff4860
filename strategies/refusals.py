"""What HorovodStrategy refuses, on all ranks: it would hang, or make their weights differ. And what
it warns of: each rank would train by itself."""

from __future__ import annotations

import hashlib
import os
from collections.abc import Sequence
from itertools import zip_longest
from typing import Any

import horovod.torch as hvd
import pytorch_lightning as pl
import torch
from pytorch_lightning.utilities.exceptions import MisconfigurationException
from pytorch_lightning.utilities.rank_zero import rank_zero_warn
from torch import Tensor, nn
from torch.nn.parameter import is_lazy
from torch.optim import Optimizer

from .collectives import World
from .reductions import COMPRESSIONS

OPS = ("average", "sum", "adasum")


def refuse_options(
    bucket_mib: float | None, compression: str, op: str, predivide: float | None
) -> None:
    """Values that are unknown or cannot work together."""
    problem = ""
    if bucket_mib is not None and not bucket_mib > 0:
        problem = f"bucket_mib={bucket_mib}: a size above 0 is needed"
    elif compression not in COMPRESSIONS:
        problem = f"compression={compression}: there are {', '.join(COMPRESSIONS)}"
    elif op not in OPS:
        problem = f"op={op}: there are {', '.join(OPS)}"
    elif predivide is not None and not predivide > 0:
        problem = f"gradient_predivide_factor={predivide}: a factor above 0 is needed"
    elif predivide is not None and op != "average":
        problem = f"gradient_predivide_factor is of op=average: op={op} divides by no ranks"
    elif compression != "none" and op == "adasum":
        problem = f"compression={compression} would spoil the angles that op=adasum looks at"
    if problem:
        raise MisconfigurationException(problem)


def warn_of_own_gathers(module: nn.Module) -> None:
    """Losses that gather by torch.distributed, as lightly's do, see one process without it."""
    if torch.distributed.is_available() and torch.distributed.is_initialized():
        return
    for name, part in module.named_modules():
        if isinstance(part, pl.LightningModule):  # whose author may gather as we do
            continue
        for flag in ("gather_distributed", "sinkhorn_gather_distributed"):
            if getattr(part, flag, False) is True:
                rank_zero_warn(
                    f"{name}: {flag}=True asks torch.distributed, which is not started: the loss "
                    "would see the samples of one rank alone; gather before it, by "
                    "self.all_gather(..., sync_grads=True).flatten(0, 1), or start it beside "
                    "Horovod"
                )


def refuse_other_models(module: nn.Module, world: World) -> None:
    """Models that differ between ranks would wait for each other, or add unlike gradients."""
    mine = _tensors_of(module)
    digest = hashlib.sha256("\n".join(mine).encode()).digest()
    if len(set(world.gather_objects(digest))) == 1:
        return
    ranks = world.gather_objects((os.uname().nodename, mine))
    _, first = ranks[0]
    for rank, (host, other) in enumerate(ranks):
        if other != first:
            padded = zip_longest(first, other, fillvalue="nothing")
            expected, actual = next(pair for pair in padded if pair[0] != pair[1])
            raise MisconfigurationException(
                f"rank {rank} on {host} has another model than rank 0: {actual} where rank 0 "
                f"has {expected}; make it from the same code and configuration on all ranks"
            )


def _tensors_of(module: nn.Module) -> list[str]:
    """A line for each parameter and buffer; raises for those that Horovod cannot send."""
    lines = []
    caches = {  # non-persistent: not in checkpoints, and steps of some ranks may have grown them
        f"{prefix}.{name}".lstrip(".")
        for prefix, layer in module.named_modules()
        for name in layer._non_persistent_buffers_set
    }
    for name, tensor in [*module.named_parameters(), *module.named_buffers()]:
        if is_lazy(tensor):
            raise MisconfigurationException(
                f"{name} has no shape before the first batch: pass one through the lazy layer in "
                "configure_model or __init__, or give it its sizes"
            )
        if tensor.layout != torch.strided:
            raise MisconfigurationException(
                f"{name} is {tensor.layout}, which Horovod does not send: keep it dense, or in an "
                "attribute that is no buffer"
            )
        strides = "" if tensor.is_contiguous() else f" strided {tensor.stride()}"
        kind = str(tensor.dtype).removeprefix("torch.")
        trained = " trained" if tensor.requires_grad else ""
        if name not in caches:
            lines.append(f"{name} {tuple(tensor.shape)} {kind}{strides}{trained}")
    return lines


def refuse_contradictions(
    devices: Sequence[torch.device], num_nodes: int, device: torch.device, world: World
) -> None:
    """`devices` or `num_nodes` that contradict horovodrun's, GPUs without NCCL, and GPUs that two
    ranks share or only some have.

    Args:
        devices: which the Trainer has for this host; by default one CPU, or all GPUs.
        device: this rank's.
    """
    ranks, cuda = hvd.local_size(), device.type == "cuda"
    if len(devices) not in (1, ranks, torch.cuda.device_count() if cuda else 1):
        raise MisconfigurationException(
            f"Trainer(devices={len(devices)}) on {os.uname().nodename}, where horovodrun started "
            f"{ranks} processes; leave devices out: the slots of -H decide"
        )
    indices = [each.index for each in devices]
    if cuda and len(devices) != ranks and indices != [*range(len(devices))]:
        raise MisconfigurationException(
            f"Trainer(devices={indices}) on {os.uname().nodename}, where horovodrun started "
            f"{ranks} processes: name as many GPUs, or let CUDA_VISIBLE_DEVICES show them"
        )
    if num_nodes > 1:
        hosts = len(set(world.gather_objects(os.uname().nodename)))
        if hosts != num_nodes:
            raise MisconfigurationException(
                f"Trainer(num_nodes={num_nodes}), and these ranks are on {hosts}; leave num_nodes "
                "out: the hosts of -H decide"
            )
    if cuda and not hvd.nccl_built():
        raise MisconfigurationException(
            "HOROVOD HAS NO NCCL: gradients would leave the GPU and travel through the CPU, "
            "several times slower (horovod#2686). Build it again: make install; or use "
            "accelerator=cpu"
        )
    _refuse_others_gpus(device, world)


def _refuse_others_gpus(device: torch.device, world: World) -> None:
    """NCCL needs one for each rank, and its own message names none. Where a driver is broken,
    accelerator=auto takes the CPU, and the other ranks would wait forever."""
    cuda = device.type == "cuda"
    mine = os.uname().nodename, str(torch.cuda.get_device_properties(device).uuid) if cuda else ""
    ranks = world.gather_objects(mine)
    first: dict[tuple[str, str], int] = {}
    for rank, (host, uuid) in enumerate(ranks):
        if bool(uuid) != bool(ranks[0][1]):
            lacks = rank if ranks[0][1] else 0
            raise MisconfigurationException(
                f"rank {lacks} on {ranks[lacks][0]} finds no GPU, others do: fix that (python -c "
                "'import torch; torch.cuda.init()' says why), leave out hosts without, or use "
                "accelerator=cpu"
            )
        other = first.setdefault((host, uuid), rank)
        if uuid and other != rank:
            raise MisconfigurationException(
                f"ranks {other} and {rank} have the same GPU of {host}: a rank needs its own; use "
                "fewer ranks there (NP=, -np, -H), or let CUDA_VISIBLE_DEVICES show more"
            )


def refuse_own_clock(trainer: pl.Trainer) -> None:
    if seconds := getattr(trainer, "_val_check_time_interval", None):  # Lightning 2.6
        raise MisconfigurationException(
            f"a val_check_interval of {seconds:g} s: by its own clock each rank would validate "
            "after another batch, and wait for the others forever; give it in batches"
        )


def refuse_strangers(optimizer: Optimizer, known: set[Any]) -> None:
    """Parameters that are not the module's are neither broadcast nor averaged."""
    for group in optimizer.param_groups:
        for parameter in group["params"]:
            if parameter not in known:
                raise MisconfigurationException(
                    f"{type(optimizer).__name__} has a parameter {tuple(parameter.shape)} that the "
                    "module has not, or not before training: each rank would train its own; make "
                    "it in __init__ or configure_model, in a Module or nn.ModuleList"
                )


def refuse_unequal(batches: float, optimizers: Sequence[Optimizer], world: World) -> None:
    """Numbers of batches and learning rates that differ between ranks."""
    groups = [group for optimizer in optimizers for group in optimizer.param_groups]
    rates = [_number(group.get("lr")) for group in groups]
    ranks = world.gather_objects((batches, rates, os.uname().nodename))
    few, many = (f(count for count, *_ in ranks) for f in (min, max))
    for rank, (count, theirs, host) in enumerate(ranks):
        if count == few < many:
            raise MisconfigurationException(
                f"rank {rank} on {host} has {few} training batches an epoch, others have more: "
                "they would wait for it forever; give all ranks equally many"
                f"{f', as by limit_train_batches={few}' if few else ''}"
            )
        if theirs != ranks[0][1]:
            raise MisconfigurationException(
                f"rank {rank} on {host} has the learning rates {', '.join(theirs)}, rank 0 "
                f"{', '.join(ranks[0][1])}: a scheduler that follows a metric needs the same value "
                "on all ranks, by self.log(..., sync_dist=True)"
            )


def _number(rate: float | Tensor | None) -> str:
    return "none" if rate is None else f"{float(rate):g}"

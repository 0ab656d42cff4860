"""One rank of one variant of benchmarks/step.py: trains when it is told to, and says how long.

It connects to the Unix socket of step.py and says that it is ready. For each line `{"steps": n}` it
then makes n steps and answers with their durations; in between it waits, and is stopped. On a GPU
steps are timed by events in its stream, so that nothing waits for a clock, and computed in
bf16-mixed with images in channels_last.
"""

from __future__ import annotations

import json
import os
import re
import socket
import statistics
import sys
import time
from collections.abc import Callable, Iterator
from contextlib import nullcontext
from itertools import accumulate, pairwise
from pathlib import Path
from typing import Any

import pytorch_lightning as pl
import torch
import torchvision
from torch import Tensor, nn
from torch.nn.parallel import DistributedDataParallel
from torch.utils.data import DataLoader, IterableDataset

RANK, SIZE, LOCAL_RANK, LOCAL_SIZE, CROSS_RANK = (
    int(os.environ[f"HOROVOD_{name}"])
    for name in ("RANK", "SIZE", "LOCAL_RANK", "LOCAL_SIZE", "CROSS_RANK")
)
CLASSES = 10
ROOT = str(Path(__file__).resolve().parent.parent)


def mlp() -> nn.Module:
    """Three layers of 64: nothing but overhead."""
    layers: list[nn.Module] = [nn.Flatten(), nn.Linear(3 * 32 * 32, 64)]
    for _ in range(2):
        layers += [nn.ReLU(), nn.Linear(64, 64)]
    return nn.Sequential(*layers, nn.ReLU(), nn.Linear(64, CLASSES))


def small_vit() -> nn.Module:
    """A vision transformer of 6 layers with 192 features, on patches of 4 x 4."""
    return torchvision.models.VisionTransformer(
        image_size=32, patch_size=4, num_layers=6, num_heads=4, hidden_dim=192, mlp_dim=768,
        num_classes=CLASSES,
    )  # fmt: skip


# Name: how it is made, images a rank, height of the images.
MODELS = {
    "mlp": (mlp, 32, 32),
    "resnet18": (lambda: torchvision.models.resnet18(num_classes=CLASSES), 16, 32),
    "mobilenet_v2": (lambda: torchvision.models.mobilenet_v2(num_classes=CLASSES), 16, 32),
    "vgg11": (lambda: torchvision.models.vgg11(num_classes=CLASSES), 16, 32),
    "small_vit": (small_vit, 16, 32),
    "resnet50": (torchvision.models.resnet50, 64, 224),
}


class Pace:
    """Called after each step: notes the time, and waits once the steps asked for are made."""

    def __init__(self, address: str, device: torch.device) -> None:
        self.socket = socket.socket(socket.AF_UNIX)
        self.socket.connect(address)
        self.lines = self.socket.makefile("r")
        self.on_gpu = device.type == "cuda"
        self.left, self.bytes, self.images = 0, 0, 0
        self.moments: list[Any] = []  # the beginning of the first step, then the ends of all
        self.arrivals: list[tuple[float, int]] = []

    def __call__(self) -> None:
        self.note()
        self.left -= 1
        if self.left <= 0:
            self.wait()

    def note(self) -> None:
        if not self.on_gpu:
            self.moments.append(time.perf_counter())
            return
        event = torch.cuda.Event(enable_timing=True)
        event.record()
        self.moments.append(event)

    def seconds(self) -> list[float]:
        if not self.on_gpu:
            return [end - begin for begin, end in pairwise(self.moments)]
        for moment in self.moments:
            moment.synchronize()
        return [begin.elapsed_time(end) / 1e3 for begin, end in pairwise(self.moments)]

    def wait(self) -> None:
        answer = {
            "pid": os.getpid(), "bytes": self.bytes, "images": self.images,
            "seconds": self.seconds(), "arrivals": self.arrivals, **memory(self.on_gpu),
        }  # fmt: skip
        self.socket.sendall((json.dumps(answer) + "\n").encode())
        order = self.lines.readline()
        if not order:
            os._exit(0)
        self.left, self.moments = json.loads(order)["steps"], []
        self.note()


def memory(on_gpu: bool) -> dict[str, int]:
    """The most that this process, or its GPU, has held so far, and what it holds, in KiB."""
    if on_gpu:
        peak, held = torch.cuda.max_memory_reserved(), torch.cuda.memory_reserved()
        return {"peak_kib": peak // 1024, "resident_kib": held // 1024}
    status = Path("/proc/self/status").read_text()
    matches = [re.search(rf"{name}:\s*(\d+)", status) for name in ("VmHWM", "VmRSS")]
    return dict(zip(("peak_kib", "resident_kib"), (int(match[1]) for match in matches if match)))


def one_batch(batch_size: int, height: int) -> tuple[Tensor, Tensor]:
    generator = torch.Generator().manual_seed(RANK)
    images = torch.randn(batch_size, 3, height, height, generator=generator)
    return images, torch.randint(CLASSES, (batch_size,), generator=generator)


def loss(model: nn.Module, batch: tuple[Tensor, Tensor]) -> Tensor:
    images, labels = batch
    with torch.autocast("cuda", torch.bfloat16) if images.is_cuda else nullcontext():
        return nn.functional.cross_entropy(model(images), labels)


def sgd(model: nn.Module) -> torch.optim.Optimizer:
    return torch.optim.SGD(model.parameters(), lr=1e-3)


def loop(
    model: nn.Module, optimizer: Any, batch: tuple[Tensor, Tensor], pace: Pace,
    backward: Callable[[Tensor], None] = torch.Tensor.backward,
) -> None:  # fmt: skip
    """Training without any framework; ends with the process."""
    pace.wait()
    while True:
        optimizer.zero_grad()
        backward(loss(model, batch))
        optimizer.step()
        pace()


def join_torch_distributed() -> None:
    """Set what torchrun would set; MASTER_ADDR and MASTER_PORT come from step.py."""
    os.environ.update(
        RANK=str(RANK), WORLD_SIZE=str(SIZE), LOCAL_RANK=str(LOCAL_RANK), TORCHELASTIC_RUN_ID="x",
        GROUP_RANK=str(CROSS_RANK), LOCAL_WORLD_SIZE=str(LOCAL_SIZE),
    )  # fmt: skip


def raw_alone(model: nn.Module, batch: tuple[Tensor, Tensor], pace: Pace) -> None:
    pace.arrivals = arrivals(model, sgd(model), batch, pace)
    loop(model, sgd(model), batch, pace)


def arrivals(
    model: nn.Module, optimizer: Any, batch: tuple[Tensor, Tensor], pace: Pace
) -> list[tuple[float, int]]:
    """For gradients in turn the share of a step that is over when they come, and their bytes."""
    sizes: list[int] = []

    def note(parameter: nn.Parameter) -> None:
        pace.note()
        sizes.append(parameter.numel() * parameter.element_size())

    hooks = [p.register_post_accumulate_grad_hook(note) for p in model.parameters()]
    steps = []
    for _ in range(9):
        sizes.clear()
        pace.note()
        optimizer.zero_grad()
        loss(model, batch).backward()
        optimizer.step()
        pace.note()
        *moments, end = accumulate(pace.seconds())
        steps.append([moment / end for moment in moments])
        pace.moments.clear()
    for hook in hooks:
        hook.remove()
    shares: dict[float, int] = {}
    for fractions, size in zip(zip(*steps[2:]), sizes):
        share = round(statistics.median(fractions), 2)
        shares[share] = shares.get(share, 0) + size
    return list(shares.items())


def raw_ddp(model: nn.Module, batch: tuple[Tensor, Tensor], pace: Pace) -> None:
    join_torch_distributed()
    torch.distributed.init_process_group("nccl" if pace.on_gpu else "gloo")
    loop(DistributedDataParallel(model), sgd(model), batch, pace)


def raw_horovod(model: nn.Module, batch: tuple[Tensor, Tensor], pace: Pace) -> None:
    import horovod.torch as hvd

    hvd.init()
    # Horovod takes no other format. (torch 2.14 has the type of this call, torch 2.11 lacks it.)
    model.to(memory_format=torch.contiguous_format)  # type: ignore[call-overload,unused-ignore]
    hvd.broadcast_parameters(model.state_dict(), 0)
    names = model.named_parameters()
    loop(model, hvd.DistributedOptimizer(sgd(model), names), batch, pace)


def raw_buckets(model: nn.Module, batch: tuple[Tensor, Tensor], pace: Pace) -> None:
    """What HorovodStrategy does with gradients, also on one rank, without Lightning around it."""
    from strategies.buckets import GradientBuckets
    from strategies.environment import initialize, keep_freed_memory
    from strategies.reductions import add

    keep_freed_memory()
    world = initialize()
    buckets = GradientBuckets(model, world, add, None, before=1 / world.size, after=1)

    def backward(loss: Tensor) -> None:
        buckets.prepare()
        buckets.start()
        loss.backward()
        buckets.finish()

    loop(model, sgd(model), batch, pace, backward)


class Module(pl.LightningModule):
    def __init__(self, model: nn.Module) -> None:
        super().__init__()
        self.model = model

    def training_step(self, batch: tuple[Tensor, Tensor], batch_idx: int) -> Tensor:
        return nn.functional.cross_entropy(self.model(batch[0]), batch[1])

    def configure_optimizers(self) -> torch.optim.Optimizer:
        return sgd(self)


class Endless(IterableDataset):
    def __init__(self, batch: tuple[Tensor, Tensor]) -> None:
        self.batch = batch

    def __iter__(self) -> Iterator[tuple[Tensor, Tensor]]:
        while True:
            yield self.batch


class Paced(pl.Callback):
    def __init__(self, pace: Pace) -> None:
        self.pace = pace

    def on_train_start(self, *_: Any) -> None:
        self.pace.wait()

    def on_train_batch_end(self, *_: Any) -> None:
        self.pace()


def fit(
    model: nn.Module, batch: tuple[Tensor, Tensor], pace: Pace, strategy: Any, **arguments: Any
) -> None:
    gpu_options = {"accelerator": "gpu", "precision": "bf16-mixed"}
    arguments |= gpu_options if pace.on_gpu else {"accelerator": "cpu"}
    trainer = pl.Trainer(
        strategy=strategy, max_epochs=1, logger=False, callbacks=[Paced(pace)],
        enable_checkpointing=False, enable_progress_bar=False, enable_model_summary=False,
        **arguments,
    )  # fmt: skip
    trainer.fit(Module(model), DataLoader(Endless(batch), batch_size=None))


def lightning_alone(model: nn.Module, batch: tuple[Tensor, Tensor], pace: Pace) -> None:
    fit(model, batch, pace, "auto", devices=[LOCAL_RANK] if pace.on_gpu else 1)


def lightning_ddp(model: nn.Module, batch: tuple[Tensor, Tensor], pace: Pace) -> None:
    join_torch_distributed()
    fit(model, batch, pace, "ddp", devices=LOCAL_SIZE, num_nodes=SIZE // LOCAL_SIZE)


def lightning_horovod(
    model: nn.Module, batch: tuple[Tensor, Tensor], pace: Pace, **options: Any
) -> None:
    from strategies import HorovodStrategy

    fit(model, batch, pace, HorovodStrategy(**options))


VARIANTS = {
    "raw_alone": raw_alone,
    "raw_ddp": raw_ddp,
    "raw_horovod": raw_horovod,
    "raw_buckets": raw_buckets,
    "lightning_alone": lightning_alone,
    "lightning_ddp": lightning_ddp,
    "lightning_horovod": lightning_horovod,
}

if __name__ == "__main__":
    sys.path.insert(0, ROOT)
    from cluster.agent import die_with_parent

    die_with_parent()  # stopped, it would stay so behind a launcher that was killed
    variant, name, address, device_type, batch, options = sys.argv[1:]
    torch.set_num_threads(1)
    torch.manual_seed(0)
    make, batch_size, height = MODELS[name]
    images, labels = one_batch(int(batch) or batch_size, height)
    model = make()
    device = torch.device("cpu")
    if device_type == "cuda":
        device = torch.device("cuda", LOCAL_RANK)
        torch.cuda.set_device(device)
        model = model.to(device, memory_format=torch.channels_last)
        images, labels = images.to(device, memory_format=torch.channels_last), labels.to(device)
    pace = Pace(address, device)
    pace.images = len(images)
    pace.bytes = sum(p.numel() * p.element_size() for p in model.parameters())
    VARIANTS[variant](model, (images, labels), pace, **json.loads(options))

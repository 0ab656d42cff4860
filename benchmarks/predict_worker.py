"""One rank of benchmarks/predict_proof.py: all-reduces, and steps of a stub whose compute sleeps.

The stub's layers sleep in forward and backward, like a process whose GPU works, and leave the cores
to what moves the data. Their gradients are real memory, combined by the strategy's own buckets
while the backward of the next layer still sleeps. How long a rank sleeps differs from step to step:
it is drawn from a normal distribution with the standard deviation given.
"""

from __future__ import annotations

import json
import random
import sys
import time
from typing import Any

import horovod.torch as hvd
import torch
from torch import Tensor, nn

from benchmarks.allreduce_worker import measure
from cluster.exchange import device_of_rank
from strategies.buckets import GradientBuckets
from strategies.environment import initialize
from strategies.reductions import add

ALONE_STEPS = 3  # times as many steps without communication, which are short


class Sleep(torch.autograd.Function):
    """Sleeps in forward and backward as long as its layer says; the gradient is 1 everywhere."""

    @staticmethod
    def forward(ctx: Any, value: Tensor, layer: SleepingLayer, weight: Tensor) -> Tensor:
        ctx.layer = layer
        time.sleep(layer.pace * layer.forward_seconds)
        return value.clone()

    @staticmethod
    def backward(ctx: Any, gradient: Tensor) -> tuple[Tensor, None, Tensor]:
        time.sleep(ctx.layer.pace * ctx.layer.backward_seconds)
        return gradient, None, ctx.layer.ones


class SleepingLayer(nn.Module):
    def __init__(self, bytes_: int, forward_seconds: float, backward_seconds: float) -> None:
        super().__init__()
        self.weight = nn.Parameter(torch.zeros(bytes_ // 4))
        self.register_buffer("ones", torch.ones(bytes_ // 4))
        self.forward_seconds, self.backward_seconds = forward_seconds, backward_seconds
        self.pace = 1.0

    def forward(self, value: Tensor) -> Tensor:
        return Sleep.apply(value, self, self.weight)


def steps(options: dict[str, Any], alone: bool) -> dict[str, list[float]]:
    """Seconds of each step and of its phases, on this rank."""
    world = initialize()
    seconds = [options[phase] / options["layers"] for phase in ("forward", "backward")]
    layers = [SleepingLayer(options["layer_bytes"], *seconds) for _ in range(options["layers"])]
    model = nn.Sequential(*layers)
    buckets = GradientBuckets(model, world, add, bucket_mib=None, before=1.0, after=1.0)
    draw = random.Random(1000 * options["seed"] + hvd.rank())
    times: dict[str, list[float]] = {"step": [], "forward": [], "backward": [], "rest": []}
    last = time.perf_counter()
    for step in range(options["steps"] * (ALONE_STEPS if alone else 1) + options["warmup"]):
        pace = max(0.2, draw.gauss(1, options["deviation"]))
        for layer in layers:
            layer.pace = pace
            layer.weight.grad = None
        begun = time.perf_counter()
        loss = model(torch.zeros(1, requires_grad=True)).sum()
        forward = time.perf_counter()
        if not alone:
            buckets.prepare()
            buckets.start()
        loss.backward()
        backward = time.perf_counter()
        if not alone:
            buckets.finish()
            gradient = layers[0].weight.grad
            if gradient is None or float(gradient[-1]) != world.size:
                raise RuntimeError(f"a sum of ones over {world.size} ranks is wrong")
        time.sleep(options["optimizer"])
        now = time.perf_counter()
        if step >= options["warmup"]:
            times["step"].append(now - last)
            times["forward"].append(forward - begun)
            times["backward"].append(backward - forward)
            times["rest"].append(now - last - (backward - begun))
        last = now
    return times


def main() -> None:
    options: dict[str, Any] = json.loads(sys.argv[1])
    torch.set_num_threads(1)
    initialize()
    alone = hvd.size() == 1
    result: dict[str, Any] = {"ranks": hvd.size()}
    if options["sizes"]:
        device = device_of_rank()
        rows = measure(options["sizes"], options["repeats"], device, options["pause"])
        result["seconds"] = [*zip(*rows)]
    result["steps"] = hvd.allgather_object(steps(options, alone), name="steps")
    if hvd.rank() == 0:
        print(json.dumps(result), flush=True)
    hvd.shutdown()


if __name__ == "__main__":
    main()

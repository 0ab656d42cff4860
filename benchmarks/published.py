"""The cost model against figures that others published of Horovod, as far as they are documented.

    python -m benchmarks.published

There are two sources. The first is the chart of 512 GPUs in Horovod's docs/benchmarks.rst (2018):
128 servers with 4 Pascal GPUs each, 25 Gbit/s RoCE. It names neither the GPUs nor the speed of a
single one; assumed is a P100 in TensorFlow's benchmarks of 2017 (synthetic data, batch 64), and for
ResNet-101 a speed between those of ResNet-50 and ResNet-152, by multiply-adds. The second are
NVIDIA's logs of ResNet-50 in MLPerf Training v0.6 (github.com/mlcommons/training_results_v0.6,
NVIDIA/results/dgx*_mxnet/resnet/, medians of the speeds printed in result_0.txt), trained with
Horovod in 16-bit floats. Their efficiency is against one machine, with a larger batch a GPU.

Layers, their parameters and multiply-adds come from torchvision. What nobody published is taken
from the ranges in `ASSUMED`; the band is what they leave open.
"""

from __future__ import annotations

from dataclasses import dataclass, replace
from functools import cache
from typing import Any

from benchmarks.cost_model import MIB, Job, Network, predict
from benchmarks.files import markdown

GBIT = 125e6  # bytes per second
# At best, most likely, at worst: share of the links' rate, seconds from host to host, and standard
# deviation of a rank's step over its mean.
ASSUMED = ((0.95, 5e-6, 0.0), (0.85, 10e-6, 0.02), (0.70, 20e-6, 0.05))
BACKWARD = 2 / 3  # of the compute: gradients of inputs and of weights, beside one forward
# Images/s. ResNet-101 was not measured: its time for an image is interpolated, by multiply-adds,
# between those of ResNet-50 (219.0 images/s) and ResNet-152 (91.8).
P100 = {"inception_v3": 142.0, "resnet101": 129.4, "vgg16": 154.0}


@dataclass(frozen=True)
class Published:
    """A published figure.

    Attributes:
        images, alone: images a second and GPU, on all ranks and in the base.
        bucket: least bytes that travel together (Horovod's tensor fusion).
        network: with the rated bandwidth of a host's links.
    """

    source: str
    model: str
    ranks: int
    batch: int
    images: float
    alone: float
    bytes_a_number: int
    bucket: float
    network: Network


@cache
def layers(name: str) -> tuple[tuple[int, int], ...]:
    """Parameters of each layer and its multiply-adds for an image, from the loss backwards."""
    import torch
    import torchvision
    from torch import Tensor, nn

    size = 299 if name == "inception_v3" else 224
    options = {"aux_logits": False, "init_weights": False} if name == "inception_v3" else {}
    costs: list[tuple[int, int]] = []

    def note(layer: nn.Module, _: Any, output: Tensor) -> None:
        weight = layer.get_parameter("weight")
        # Each number of the output takes a filter of the weight; biases and norms count as nothing.
        work = output.numel() * weight[0].numel() if weight.dim() > 1 else 0
        costs.append((sum(p.numel() for p in layer.parameters()), work))

    with torch.device("meta"):
        model: nn.Module = getattr(torchvision.models, name)(**options).eval()
        for layer in model.modules():
            if isinstance(layer, (nn.Conv2d, nn.Linear, nn.BatchNorm2d)):
                layer.register_forward_hook(note)
        model(torch.zeros(1, 3, size, size))
    return tuple(costs[::-1])


def job_of(row: Published, deviation: float) -> Job:
    """A rank's step as long as in the base, with layers in proportion to their multiply-adds."""
    compute = row.batch / row.alone
    total = sum(work for _, work in layers(row.model))
    buckets, ready, size, done = [], [], 0.0, 0
    for parameters, work in layers(row.model):
        size, done = size + parameters * row.bytes_a_number, done + work
        if size >= row.bucket:
            buckets.append(size)
            ready.append(done / total)
            size = 0.0
    if size:
        buckets.append(size)
        ready.append(1.0)
    return Job(
        (1 - BACKWARD) * compute, BACKWARD * compute, 0.0, tuple(buckets), deviation * compute,
        tuple(ready),
    )  # fmt: skip


def _horovod(model: str, efficiency: float) -> Published:
    # NCCL 2 of 2017 had rings only; Horovod then looked for work every 5 ms.
    network = Network(
        0.0, 25 * GBIT, 4, 5e-6, 10e9, algorithms=("ring",), controller="tree", asynchronous=True,
        cycle=5e-3,
    )  # fmt: skip
    alone = P100[model]
    return Published(
        "Horovod's docs, 128 x 4 Pascal, 25 Gbit/s", model, 512, 64, efficiency * alone, alone, 4,
        8 * MIB, network,
    )  # fmt: skip


def _mlperf(
    hosts: int, gpus: int, batch: int, images: float, alone: float, cards: int
) -> Published:
    machine = "DGX-2H" if gpus == 16 else "DGX-1"
    network = Network(
        0.0, cards * 100 * GBIT, gpus, 3e-6, 120e9, algorithms=("ring", "tree"),
        controller="tree", asynchronous=True, cycle=1e-4,
    )  # fmt: skip
    ranks = hosts * gpus
    return Published(
        f"MLPerf v0.6, {hosts} x {machine}, {cards} x 100 Gbit/s", "resnet50", ranks, batch,
        images / ranks, alone / gpus, 2, 3.2e6, network,
    )  # fmt: skip


def rows() -> list[dict[str, Any]]:
    """Published efficiencies beside those of the model: likely, at worst and at best."""
    results = []
    for row in (
        _horovod("inception_v3", 0.90),
        _horovod("resnet101", 0.90),
        _horovod("vgg16", 0.68),
        _mlperf(130, 8, 52, 1_147_030, 11_222.4, 4),
        _mlperf(32, 16, 65, 633_233, 24_655.5, 8),  # two of its ten cards are for storage
        _mlperf(96, 16, 39, 1_632_450, 24_655.5, 8),
    ):
        efficiencies = []
        for share, latency, deviation in ASSUMED:
            network = replace(row.network, latency=latency, bandwidth=share * row.network.bandwidth)
            efficiencies.append(predict(job_of(row, deviation), row.ranks, network).efficiency)
        best, likely, worst = efficiencies
        published = row.images / row.alone
        results.append({
            "source": row.source, "model": row.model, "ranks": row.ranks, "batch": row.batch,
            "published": published, "predicted": likely, "worst": worst, "best": best,
            "off_points": 100 * (likely - published),
        })  # fmt: skip
    return results


def table(results: list[dict[str, Any]]) -> str:
    head = ["source", "model", "ranks", "batch"]
    head += ["published", "predicted", "worst - best", "points off"]
    lines = [
        [
            row["source"], row["model"], f"{row['ranks']:,}", str(row["batch"]),
            f"{row['published']:.1%}", f"{row['predicted']:.1%}",
            f"{row['worst']:.1%} - {row['best']:.1%}", f"{row['off_points']:+.1f}",
        ]
        for row in results
    ]  # fmt: skip
    within = sum(row["worst"] <= row["published"] <= row["best"] for row in results)
    largest = max(abs(row["off_points"]) for row in results)
    return (
        "Back-test on published efficiencies (benchmarks/published.py has sources and assumptions; "
        f"the band is what is not known of them):\n\n{markdown(head, lines)}\n\n"
        f"{within} of {len(results)} lie within their band; the most likely value is off by up to "
        f"{largest:.1f} points. The base of the MLPerf rows has 208 images a GPU: that fewer "
        "images are less efficient on a GPU is not in the model."
    )


if __name__ == "__main__":
    print(table(rows()))

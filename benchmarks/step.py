"""The time of a training step: this strategy beside Lightning's DDP, raw loops and no network.

    make bench-step                                 2 ranks on this host, all models
    make bench-step ARGS="--models resnet18 --repeats 9 --batch 64"
    make bench-step NP=1 ARGS="--models resnet50 --batch 256"     on a GPU, if there is one
    sudo make bench-step-slow                       2 hosts of cluster/testbed.py, 500 Mbit/s

How it is measured. All variants of a model run in one command and take turns in blocks of steps:
A B C A B C ... Their processes stay; those whose turn it is not are stopped (SIGSTOP) and take no
time. The first block of each warms up and is left out, as is the first step of each block. A
variant's time is the median of the medians of its blocks, and a ratio is the median of the ratios
of neighbouring blocks. Each rank has one thread, its data in memory, and the same seed: reading
data is not measured. The share of the cores that is idle meanwhile tells whether a step waits for
them or for the network. On GPUs (one for each rank; --device cpu: not on them) all is in bf16-mixed
and channels_last.

Ranks are stopped and started from here, so their hosts are this one, or made of it. A model whose
variants do not fit into memory together is left out, or refused if it was named. Results go to
benchmarks/results/ as JSON and as a Markdown table after each model; Ctrl-C keeps them, and the
same command goes on.
"""

from __future__ import annotations

import argparse
import statistics
import sys
import tempfile
from pathlib import Path
from typing import Any

from benchmarks import load
from benchmarks.files import RESULTS, continued, slug, write_json, write_text
from benchmarks.hardware import hardware
from benchmarks.launching import Parser, ends_in_a_line, say, tells_what_is_kept
from benchmarks.step_ranks import Group, Variant, start
from benchmarks.step_report import ALONE, OURS, RAW, TRAINER, report
from cluster.hostfile import parse
from cluster.hosts import Refusal
from cluster.probe import memory

MODELS = ["mlp", "resnet18", "mobilenet_v2", "small_vit", "vgg11"]
ON_GPU = [*MODELS, "resnet50"]
# What strategies/environment.py sets for itself, to tell its effect from that of the rest.
MALLOC = {"MALLOC_MMAP_THRESHOLD_": str(32 * 2**20), "MALLOC_TRIM_THRESHOLD_": str(2**31 - 1)}
VARIANTS: dict[str, Variant] = {
    RAW: ("raw_alone", {}, {}),
    "torch DDP": ("raw_ddp", {}, {}),
    "Horovod, its defaults": ("raw_horovod", {}, {"HOROVOD_SHARED_MEMORY": "0"}),
    "our buckets, raw loop": ("raw_buckets", {}, {}),
    "Lightning DDP": ("lightning_ddp", {}, {}),
    OURS: ("lightning_horovod", {}, {}),
    ALONE: ("raw_alone", {}, MALLOC),
    "Lightning DDP, our malloc": ("lightning_ddp", {}, MALLOC),
    TRAINER: ("lightning_alone", {}, MALLOC),
    **{
        f"HorovodStrategy, {size} MiB": ("lightning_horovod", {"bucket_mib": size}, {})
        for size in (1, 2, 8)
    },
    "HorovodStrategy, fp16": ("lightning_horovod", {"compression": "fp16"}, {}),
    "HorovodStrategy, bf16": ("lightning_horovod", {"compression": "bf16"}, {}),
}
# MiB that a rank needs for itself: the peaks in results/step_*.json, less the 300 MiB of libraries
# that all processes share. More images need more.
RANK_MIB = {"mlp": 440, "resnet18": 620, "mobilenet_v2": 530, "small_vit": 620, "vgg11": 2000}


def measure(model: str, variants: list[str], arguments: argparse.Namespace) -> dict[str, Any]:
    """The medians of all blocks of each variant in ms, its memory, and how idle the cores were."""
    groups: list[Group] = []
    with tempfile.TemporaryDirectory() as folder:
        try:
            first_steps = []
            for variant in variants:
                if groups and arguments.device == "cpu":  # a full GPU raises an error by itself
                    _check_memory(model, len(variants), groups)
                how = VARIANTS[variant]
                groups.append(start(variant, how, model, arguments, Path(folder)))
                first_steps.append(statistics.median(groups[-1].run(3)))
            # Equally many for all: as many as the slowest makes in a block of the length asked for.
            steps = max(2, round(arguments.block_seconds / max(first_steps)))
            for repeat in range(arguments.repeats + 1):
                for group in groups[repeat % len(groups) :] + groups[: repeat % len(groups)]:
                    seconds = group.run(steps)
                    if repeat:
                        group.blocks.append(seconds)
                say(f"  {model}: block {repeat} of {arguments.repeats}")
        finally:
            for group in groups:
                group.kill()
            for group in groups:
                group.launcher.wait()
    return {
        "steps_per_block": steps,
        "gradient_bytes": groups[0].answer["bytes"],
        "images_a_rank": groups[0].answer["images"],
        "ranks": len(groups[0].ranks),
        "arrivals": next((a for group in groups if (a := group.answer["arrivals"])), []),
        "variants": {
            group.variant: {
                "block_medians_ms": [round(statistics.median(b) * 1e3, 4) for b in group.blocks],
                "deviation_ms": round(deviation(group.blocks) * 1e3, 4),
                "steps": group.steps,
                "idle_share_of_cores": group.idle[-arguments.repeats :],
                "peak_mib": round(group.peak_kib / 1024, 1),
                "resident_mib_at_blocks": [round(kib / 1024, 1) for kib in group.resident_kib[2:]],
            }
            for group in groups
        },
    }


def deviation(blocks: list[list[float]]) -> float:
    """The standard deviation of steps, from their 10th to their 90th percentile; each is taken from
    the median of its block, as the machine's speed drifts."""
    steps = [seconds - statistics.median(block) for block in blocks for seconds in block]
    tenths = statistics.quantiles(steps, n=10)
    return (tenths[-1] - tenths[0]) / (2 * statistics.NormalDist().inv_cdf(0.9))


def lacks_memory(model: str, variants: list[str], ranks: int) -> str:
    """Why these variants do not fit into memory, and which would; "" if they do. _check_memory asks
    for room for one more."""
    each, there = RANK_MIB.get(model, 0) * ranks, memory()
    needed = each * (len(variants) + 1)
    if needed <= there:
        return ""
    by_interest = sorted(variants, key=lambda name: name not in (OURS, "Lightning DDP"))
    fewer = " ".join(f'"{name}"' for name in by_interest[: max(0, there // each - 1)])
    text = f"{model}: {len(variants)} variants need {needed / 1024:.1f} GiB of memory, "
    text += f"{there / 1024:.1f} are there"
    if not fewer:
        return text
    return f"{text}; the same command with ARGS='--models {model} --variants {fewer}' measures it"


def _check_memory(model: str, variants: int, groups: list[Group]) -> None:
    """End unless there is memory for the ranks of one more variant, as the kernel would kill some.
    With --batch, or beside other processes, they may need more than lacks_memory knows."""
    peak_kib = max(group.peak_kib * len(group.ranks) for group in groups)
    if memory() << 10 < 1.2 * peak_kib:
        raise Refusal(
            f"{model}: memory ends at {len(groups)} of {variants} variants, each with "
            f"{peak_kib / 2**20:.1f} GiB; name fewer with --variants"
        )


def options() -> argparse.Namespace:
    parser = Parser(description=__doc__.split("\n\n")[0])
    parser.add_argument("--hosts", default="localhost:2", help="as of horovodrun's -H")
    parser.add_argument("--network", default="loopback", help="what to call it in the results")
    parser.add_argument("--models", nargs="+", choices=ON_GPU, help="all but resnet50; GPUs: all")
    parser.add_argument("--device", choices=["cpu", "cuda"], help="cuda where there is a GPU")
    parser.add_argument("--variants", nargs="+", choices=list(VARIANTS), help="else the first 9")
    parser.add_argument("--batch", type=int, default=0, help="images a rank, else each model's own")
    parser.add_argument("--repeats", type=int, default=7, help="blocks of each variant")
    parser.add_argument("--block-seconds", type=float, default=3)
    parser.add_argument("--out", type=Path, default=RESULTS)
    arguments = parser.parse_args()
    if arguments.batch < 0:
        parser.error(f"--batch {arguments.batch}: give a number of images, 1 or more")
    if arguments.repeats < 1 or arguments.block_seconds <= 0:
        parser.error("--repeats is at least 1, --block-seconds more than 0")
    return arguments


def models_that_fit(arguments: argparse.Namespace, defaults: list[str], ranks: int) -> list[str]:
    """Those asked for; else those of `defaults` that fit into memory.

    Raises:
        Refusal: when one that was asked for does not fit, or none does.
    """
    models = arguments.models or defaults
    if arguments.device == "cuda":  # a full GPU raises an error by itself
        return models
    lacking = {model: lacks_memory(model, arguments.variants, ranks) for model in models}
    reasons = [reason for reason in lacking.values() if reason]
    if reasons and (arguments.models or len(reasons) == len(models)):
        raise Refusal("; ".join(reasons))
    for reason in reasons:
        say(f"left out: {reason}")
    return [model for model in models if not lacking[model]]


@ends_in_a_line
def main() -> int:
    arguments = options()
    facts = hardware()
    gpus = facts["gpus"]
    arguments.device = arguments.device or ("cuda" if gpus else "cpu")
    on_gpu = arguments.device == "cuda"
    # Variants of malloc make no difference on a GPU.
    by_default = [*list(VARIANTS)[:6], TRAINER] if on_gpu else list(VARIANTS)[:9]
    arguments.variants = arguments.variants or by_default
    default_models = ON_GPU if on_gpu else MODELS
    ranks = sum(host.slots for host in parse(arguments.hosts))
    if on_gpu and ranks > len(gpus):
        raise Refusal(
            f"--hosts {arguments.hosts}: a rank needs a GPU of its own, and there are {len(gpus)}; "
            "name fewer slots (make: NP=1), or --device cpu"
        )
    arguments.models = models_that_fit(arguments, default_models, ranks)
    processor = gpus[0] if on_gpu else facts["cpu"]
    other = load.before()
    busy = max(other["busy"], other["gpu_busy"] or 0)
    results = {
        "hosts": arguments.hosts, "network": arguments.network, "device": arguments.device, **facts,
        "busy_before": busy, "batch": arguments.batch, "repeats": arguments.repeats,
        "block_seconds": arguments.block_seconds, "variants": arguments.variants, "models": {},
    }  # fmt: skip
    models = "" if arguments.models == default_models else "-".join(arguments.models) + "_"
    batch = f"batch-{arguments.batch}_" if arguments.batch else ""
    name = f"step_{models}{batch}{slug(arguments.network)}_{slug(processor)}"
    file, results = continued(results, arguments.out, name, "models")
    results["busy_before"] = max(busy, results.get("busy_before", 0))
    with tells_what_is_kept(file):
        for model in arguments.models:
            if model not in results["models"]:
                results["models"][model] = measure(model, arguments.variants, arguments)
                write(results, file)
    results["finished"] = True
    write(results, file)
    print(report(results))
    print(f"written to {file} and .md")
    return 0


def write(results: dict[str, Any], file: Path) -> None:
    write_json(results, file)
    write_text(file.with_suffix(".md"), report(results) + "\n")


if __name__ == "__main__":
    sys.exit(main())

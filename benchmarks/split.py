"""When it pays to split a network over two devices, beside one device and data parallel.

    make bench-split
    make bench-split BATCH=256 ARGS="model.width=64"

Trains experiment=model_parallel with one global batch in several ways, in turns: on one device,
split without and with more and more micro-batches, data parallel on two ranks, and split on two
ranks (not on GPUs, of which that takes four). Measured are the time of a step and samples/s.
Computed, not measured, are two columns: the memory on the fuller device of weights, gradients and
Adam's two moments, 16 bytes a parameter, without activations; and the share of time in which a
device waits for the other, 1 / (m + 1) for m micro-batches (GPipe, arXiv:1811.06965, for halves
that take equally long).

With two GPUs those are the devices. Otherwise both are this CPU, where the halves compute one after
the other: then the times show what a split costs, and not what two devices gain. Results go to
benchmarks/results/; Ctrl-C keeps them, and the same command goes on.
"""

from __future__ import annotations

import statistics
import sys
from collections.abc import Callable
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import torch
from hydra.errors import InstantiationException
from hydra.utils import instantiate

from benchmarks import scaling_plan
from benchmarks.efficiency import spread, spread_in_words
from benchmarks.files import (
    RESULTS,
    continued,
    markdown,
    slug,
    whole_repeats,
    write_json,
    write_text,
)
from benchmarks.hardware import hardware, versions
from benchmarks.launching import Job, Launcher, Parser, ends_in_a_line, say, tells_what_is_kept
from benchmarks.overrides import configuration, refuse_ours, steps_of
from cluster.hosts import Host, Refusal

EXPERIMENT = "experiment=model_parallel"
# What tells the ways apart: given by a user it would make all rows the same, or be ignored.
OURS = {
    **dict.fromkeys(scaling_plan.OURS, "nothing"), "trainer.max_steps": "STEPS=",
    "model.devices": "nothing", "model.micro_batches": "nothing", "data.batch_size": "BATCH=",
}  # fmt: skip
BYTES_A_PARAMETER = 16  # float32: the weight, its gradient, two moments of Adam
WARMUP = 5
Measure = Callable[["Way", int], dict[str, Any]]


@dataclass(frozen=True)
class Way:
    """A way to train: on so many ranks, each on one device or split over two."""

    name: str
    ranks: int
    micro_batches: int  # 0: not split
    pays: str

    def overrides(self, devices: list[str]) -> list[str]:
        if not self.is_split:
            return ["model.devices=null", "model.micro_batches=1"]
        return [f"model.devices=[{','.join(devices)}]", f"model.micro_batches={self.micro_batches}"]

    @property
    def is_split(self) -> bool:
        return self.micro_batches > 0

    @property
    def idle(self) -> float:
        """Share of a step in which a device waits for the other."""
        return 1 / (self.micro_batches + 1) if self.is_split else 0.0


WAYS = [
    Way("one device", 1, 0, "the network and its batch fit, and it is fast enough"),
    Way("data parallel", 2, 0, "they fit, and there are more devices: it leaves none idle"),
    Way("split, in a row", 1, 1, "they do not fit, and a batch cannot be parted"),
    Way("split, 2 micro-batches", 1, 2, "they do not fit"),
    Way("split, 4 micro-batches", 1, 4, "they do not fit, and a quarter still fills a device"),
    Way("split, 8 micro-batches", 1, 8, "they do not fit, and an eighth still fills a device"),
    Way("both: 4 micro-batches", 2, 4, "they do not fit, and there are more pairs of devices"),
]


def ways(devices: list[str]) -> list[Way]:
    """Those that there are devices for: two ranks that are split would share the same two GPUs, but
    NCCL needs a GPU of its own for each rank."""
    return [way for way in WAYS if "cpu" in devices or way.ranks == 1 or not way.is_split]


def memory(model: dict[str, Any]) -> dict[str, float]:
    """MiB of weights, gradients and moments on the fuller device, by whether the network is split
    ("True", "False": keys of JSON)."""
    try:
        network = instantiate({**model, "devices": None})
    except InstantiationException as error:
        raise Refusal(str(error.__cause__)) from None
    halves = [sum(p.numel() for p in half.parameters()) for half in (network.first, network.second)]
    mib = BYTES_A_PARAMETER / 2**20
    return {"True": mib * max(halves), "False": mib * sum(halves)}


def run(results: dict[str, Any], measure: Measure, keep: Callable[[], None]) -> None:
    """All runs that are not there yet: the ways in turns, `keep` after each."""
    possible = ways(results["devices"])
    existing = {(run["repeat"], run["way"]) for run in results["runs"]}
    for repeat in range(results["repeats"]):
        for number, way in enumerate(possible, 1):
            if (repeat, way.name) in existing:
                continue
            measured = measure(way, results["batch"])
            ms = measured["step_ms"]
            results["runs"].append({"way": way.name, "repeat": repeat, "step_ms": ms})
            progress = f"repeat {repeat + 1} of {results['repeats']}, {number} of {len(possible)}"
            say(f"{progress}: {way.name}: {ms:.1f} ms a step")
            keep()
    results["finished"] = True
    keep()


def table(results: dict[str, Any]) -> str:
    times = {
        way: [run["step_ms"] for run in results["runs"] if run["way"] == way.name] for way in WAYS
    }
    lines = []
    for way, steps in times.items():
        if not steps:
            continue
        # Within a repeat, whose runs are neighbours in time.
        speedups = [one / ms for one, ms in zip(times[WAYS[0]], steps)]
        lines.append([
            way.name, str(way.ranks * (1 + way.is_split)),
            f"{results['memory_mib'][str(way.is_split)]:.2f}", f"{way.idle:.0%}",
            spread(steps, 1),
            f"{1e3 * results['batch'] / statistics.median(steps):,.0f}",
            spread(speedups, 2), way.pays,
        ])  # fmt: skip
    head = ["", "devices", "MiB on one", "idle", "ms a step", "samples/s", "times as fast"]
    return markdown([*head, "pays if"], lines)


def device(results: dict[str, Any]) -> str:
    """What computes; a single GPU is not named, as it is not used."""
    on_cpu = "cpu" in results["devices"]
    return f"{results['cpu']}, {results['cores']} cores" if on_cpu else results["gpus"][0]


def description(results: dict[str, Any]) -> str:
    note = ", where both halves compute in turns" if "cpu" in results["devices"] else ""
    job = " ".join([EXPERIMENT, *results["arguments"]])
    return (
        f"`{job}`, global batch {results['batch']}: {device(results)}, a thread a process, devices "
        f"{', '.join(results['devices'])}{note}. {versions(results)}. Medians of "
        f"{results['repeats']} interleaved repeats of {results['steps']} steps; in brackets "
        f"{spread_in_words(results['repeats'])}."
    )


@ends_in_a_line
def main() -> int:
    parser = Parser(prog="python -m benchmarks.split", description=__doc__.partition("\n")[0])
    parser.add_argument("--batch", type=int, default=128, help="of all ranks (%(default)s)")
    parser.add_argument("--steps", type=int, default=60, help="that are measured (%(default)s)")
    parser.add_argument("--repeats", type=int, default=3)
    parser.add_argument("--out", type=Path, default=RESULTS)
    parser.add_argument("overrides", nargs="*", help="of template.py, after --")
    arguments = parser.parse_args()
    if arguments.batch < 2 or arguments.batch % 2:
        parser.error(f"--batch {arguments.batch}: two ranks share it: give an even number")
    if min(arguments.steps, arguments.repeats) < 1:
        parser.error("--steps and --repeats are at least 1")
    gpus = torch.cuda.device_count()
    devices = ["cuda:0", "cuda:1"] if gpus > 1 else ["cpu", "cpu"]
    accelerator = f"trainer.accelerator={'gpu' if gpus > 1 else 'cpu'}"

    def measure(way: Way, batch: int) -> dict[str, Any]:
        job = [EXPERIMENT, *way.overrides(devices), accelerator, *arguments.overrides]
        launcher = Launcher(
            [Host("localhost", way.ranks)], ["-H", f"localhost:{way.ranks}"], job, 1
        )
        length = steps_of(WARMUP, arguments.steps)
        return launcher.run(Job("horovod", way.ranks, batch // way.ranks), length)

    refuse_ours(arguments.overrides, OURS, "make bench-split")
    model = configuration([EXPERIMENT, *arguments.overrides], ["horovod"])["model"]
    results: dict[str, Any] = {
        "benchmark": "split", **hardware(), "arguments": arguments.overrides, "runs": [],
        "batch": arguments.batch, "steps": arguments.steps, "repeats": arguments.repeats,
        "devices": devices, "memory_mib": memory(model),
    }  # fmt: skip
    name = f"split_{slug(device(results))}"
    file, results = continued(results, arguments.out, name, "runs")
    results["runs"] = whole_repeats(results["runs"], len(ways(devices)))
    with tells_what_is_kept(file):
        run(results, measure, lambda: write_json(results, file))
    text = f"{description(results)}\n\n{table(results)}\n"
    write_text(file.with_suffix(".md"), text)
    print(f"{text}\nwritten to {file} and .md")
    return 0


if __name__ == "__main__":
    sys.exit(main())

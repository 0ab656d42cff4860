"""The job of `make predict MODEL=`, from a result of `make bench-step`: how long a model computes,
and when its gradients come, without communication."""

from __future__ import annotations

import os
import statistics
from dataclasses import replace
from itertools import accumulate
from pathlib import Path
from typing import Any

from benchmarks.cost_model import Job, bucket_sizes, predict
from benchmarks.files import RESULTS
from benchmarks.hardware import machine
from benchmarks.load import BUSY_SHARE
from benchmarks.predict_inputs import Measured, of_our_form, read, told
from benchmarks.predict_network import Results, networks
from benchmarks.step_report import ALONE, OURS, RAW, TRAINER
from cluster.hostfile import parse
from cluster.hosts import Refusal


def newest_steps(model: str) -> Path:
    """The newest result on this machine that has what `job_of_steps` takes of a model.

    Raises:
        Refusal: where there is none.
    """
    here, found = machine(), []
    for file in RESULTS.glob("step_*.json"):
        try:
            with of_our_form(str(file)):
                result = read(file, "MODEL")
                job_of_steps(result, model)
                if all(result[key] == here[key] for key in ("cpu", "cores")):
                    found.append((result["date"], file))
        except Refusal:
            continue  # half copied, of before all of this was told, without this model
    if not found:
        raise Refusal(
            f"MODEL={model}: no result of this machine in {RESULTS} tells how long it computes: "
            f"make bench-step ARGS='--models {model}' first, or name one of another by RUN="
        )
    return max(found)[1]


def job_of_steps(result: dict[str, Any], model: str) -> Job:
    """What a rank of the variant without communication did, and what a Trainer adds to it.

    Raises:
        ValueError: when the file does not tell enough.
    """
    if model not in result["models"]:
        raise ValueError(f"MODEL={model}: there are {', '.join(result['models'])}")
    measured = result["models"][model]
    if not measured["arrivals"]:
        raise ValueError("it does not tell when gradients come: measure it again")
    name = ALONE if result["device"] == "cpu" else RAW
    if "deviation_ms" not in (alone := measured["variants"].get(name, {})):
        raise ValueError(f"it does not tell how steps of '{name}' differ: measure it again")
    blocks = alone["block_medians_ms"]
    compute = statistics.median(blocks) / 1e3
    with_trainer = measured["variants"].get(TRAINER, alone)["block_medians_ms"]
    trainer = max(0.0, statistics.median(b - a for a, b in zip(blocks, with_trainer))) / 1e3
    shares, sizes = zip(*measured["arrivals"])
    buckets = bucket_sizes(sizes)
    first, last = shares[0], shares[-1]
    ends = list(accumulate(sizes))  # bytes that are there with each arrival
    full = [
        next(s for s, end in zip(shares, ends) if end >= filled) for filled in accumulate(buckets)
    ]
    return Job(
        first * compute, (last - first) * compute, (1 - last) * compute + trainer, tuple(buckets),
        alone["deviation_ms"] / 1e3,
        ready=tuple((share - first) / (last - first or 1) for share in full),
    )  # fmt: skip


def measured_steps(result: dict[str, Any], model: str, file: Path) -> Measured:
    """A model of a result.

    Raises:
        ValueError: when the file does not tell enough.
    """
    job = job_of_steps(result, model)
    variants, ranks = result["models"][model]["variants"], result["models"][model]["ranks"]
    steps = variants[OURS]["block_medians_ms"] if OURS in variants else []
    hosts = parse(result["hosts"])  # of one machine
    names = {os.uname().nodename if host.name == "localhost" else host.name for host in hosts}
    head = [told(f"{model} of make bench-step", job, file)]
    if result["busy_before"] > BUSY_SHARE:
        head.append(f"take care these steps had other load of {result['busy_before']:.0%} beside")
    if result["device"] == "cpu" and ranks > result["cores"]:
        head.append(
            f"take care {ranks} ranks shared {result['cores']} cores: their compute is not that of "
            "ranks with a core each; start fewer, and measure again"
        )
    return Measured(
        model, job, ranks, max(host.slots for host in hosts),
        statistics.median(steps) / 1e3 if steps else None, head,
        {name: {"cpu": result["cpu"], "cores": result["cores"]} for name in names},
        "Gloo" if result["device"] == "cpu" else "NCCL",
        result["network"] if len(hosts) > 1 else "",
    )  # fmt: skip


def with_burden(found: Measured, all_reduces: Results) -> Measured:
    """The same with all that its step took more than the model explains on the network that these
    all-reduces measured. Without them, or without a step of several ranks, that is not known."""
    if not all_reduces or found.seconds is None or found.ranks == 1:
        return found
    cases, _ = networks(all_reduces, {"operations": found.operations.lower()}, found.slots)
    more = found.seconds - predict(found.job, found.ranks, cases[1]).seconds
    if more <= 0:
        return found
    line = (
        f"kept      {more * 1e3:.1f} ms, which {found.ranks} ranks took more than the model "
        "explains, for any number of ranks: as what communication takes from computing on the same "
        "cores"
    )
    return found._replace(job=replace(found.job, burden=more), head=[*found.head, line])

"""The job of `make predict` from a run: its phases, its gradients, how much its ranks differ."""

from __future__ import annotations

import json
import os
import re
from pathlib import Path
from statistics import NormalDist
from typing import Any

from benchmarks.cost_model import Job, as_many_buckets, median_wait, wire_bytes
from benchmarks.hardware import machine
from benchmarks.predict_inputs import Measured, told
from cluster.environment import ROOT
from cluster.hosts import Refusal

WAITS_SHARE = 0.15  # of a rank's time, for a core; from here on it is warned of


def newest_run() -> Path:
    """The summary of the newest run of several ranks, without those that a profiler made slower.

    Raises:
        Refusal: where there is none.
    """
    files = sorted(ROOT.glob("logs/*/runs/*/summary.json"), key=lambda f: (f.parent.name, f))
    for file in reversed(files):
        try:
            summary = json.loads(file.read_text())
        except (OSError, ValueError):
            continue
        anatomy = isinstance(summary, dict) and summary.get("anatomy")
        if isinstance(anatomy, dict) and anatomy.get("wire") and not profiled(file.parent):
            return file
    raise Refusal("no run in logs/ tells of all-reduces: make train NP=2 first, or give RUN=")


def profiled(folder: Path) -> bool:
    """Whether a profiler made the steps of this run's folder slower."""
    overrides = folder / ".hydra" / "overrides.yaml"
    text = overrides.read_text() if overrides.is_file() else ""
    slow = r"^- (debug=profiler|profiler=(advanced|pytorch|trace))$"
    return re.search(slow, text, re.M) is not None


def measured_run(summary: dict[str, Any], run: Path) -> Measured:
    """A run. Of the hardware of its hosts only this one's is known.

    Raises:
        ValueError: when nothing can be predicted from it.
    """
    if not summary["hosts"]:
        raise ValueError("it lacks what a run writes: no hosts")
    job, model = job_of(summary), summary["model"]
    head = [told(f"{model} on {summary['data']}", job, run), *cautions(summary, job)]
    if profiled(run.parent):
        head.append("take care a profiler made the steps of this run slower: measure without it")
    machines: dict[str, Any] = dict.fromkeys(summary["hosts"])
    if (here := os.uname().nodename) in machines:
        machines[here] = machine()
    return Measured(
        model, job, summary["world_size"], max(summary["hosts"].values()),
        summary["anatomy"]["step_ms"]["median"] / 1e3,
        head, machines, summary.get("operations", "Gloo"),
    )  # fmt: skip


def cautions(summary: dict[str, Any], job: Job) -> list[str]:
    """Warnings of a rank that is always the slowest, which no number of ranks explains, and of
    ranks that shared cores, and so took longer than on cores of their own."""
    anatomy, lines = summary["anatomy"], []
    if job.slowest:
        slow = anatomy["straggler"]
        lines.append(
            f"take care rank {slow['rank']} takes {slow['times']} times as long as the others in "
            f"each step: its {job.slowest * 1e3:.1f} ms are kept as they are for any number of "
            "ranks; fix it, and measure again"
        )
    waits = max((rank.get("waits_for_core", 0.0) for rank in anatomy.get("ranks", [])), default=0.0)
    what = fix = ""
    if anatomy.get("crowded"):
        what, fix = f"{anatomy['crowded']}, and wait for each other", "start fewer there"
    elif waits >= WAITS_SHARE:
        what = f"a rank waited {waits:.0%} of its time for a core, which others had"
        fix = "end other programs, or take fewer loader workers"
    if what:
        lines.append(
            f"take care in this run {what}: its compute and how much ranks differ are not those of "
            f"ranks with a core each; {fix}, and measure again"
        )
    return lines


def job_of(summary: dict[str, Any]) -> Job:
    """The job that a run was.

    Raises:
        ValueError: when the cost model is not for such a run.
    """
    anatomy = summary["anatomy"]
    if summary.get("strategy") != "horovod":
        raise ValueError(f"strategy {summary.get('strategy')}: the model is of horovod's")
    if not anatomy or not anatomy.get("wire"):
        raise ValueError("no all-reduce of gradients was seen in it: make train NP=2")
    if (windows := summary.get("accumulate_grad_batches", 1)) != 1:
        setting = f"trainer.accumulate_grad_batches={windows}"
        raise ValueError(f"{setting}: the model is of an all-reduce in each batch")
    ranks = summary["world_size"]
    return job_of_anatomy(anatomy, ranks, buckets_of(anatomy["wire"], ranks))


def buckets_of(wire: dict[str, Any], ranks: int) -> list[float]:
    """Bytes of the buckets that so many ranks sent: in 16 bits half as many as gradients have.

    Raises:
        ValueError: when gradients were not summed once a batch.
    """
    if (exchanges := wire.get("exchanges", 1)) != 1:
        raise ValueError(
            f"{exchanges:g} all-reduces of gradients a batch, as several backwards make: the model "
            "is of an all-reduce in each batch"
        )
    gradients = wire["payload_bytes"]
    if ranks > 1:
        sent = wire["bytes"] / wire_bytes(1, ranks)
        if not wire.get("compressible", True) and sent > 0.51 * gradients:
            raise ValueError("strategy.op=adasum: the model is of sums on a ring")
        gradients = sent
    return as_many_buckets(gradients, round(wire["calls"]))


def job_of_anatomy(anatomy: dict[str, Any], ranks: int, buckets: list[float]) -> Job:
    """The job of ranks whose step and phases were timed."""
    step_ms = anatomy["step_ms"]
    # The medians of the phases need not add up to the median step: they are scaled to do so.
    scale = step_ms["median"] / 1e3 / sum(anatomy["phases_ms"].values())
    phases = {name: scale * value for name, value in anatomy["phases_ms"].items()}
    deviation = slowest = 0.0
    if anatomy.get("straggler"):
        slowest = phases["straggler"]
    elif ranks > 1:  # a phase is the median over steps
        deviation = phases["straggler"] / median_wait(ranks)
    else:  # from p10 to p90 of its own steps
        deviation = (step_ms["p90"] - step_ms["p10"]) / (2e3 * NormalDist().inv_cdf(0.9))
    rest = phases["data"] + phases["optimizer"] + phases["rest"]
    return Job(
        phases["forward"], phases["backward"], rest, tuple(buckets), deviation, slowest=slowest
    )

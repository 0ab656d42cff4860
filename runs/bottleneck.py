"""What the times of steps on all ranks mean: shares, a straggler, and what limits the speed."""

from __future__ import annotations

import json
import math
import platform
import re
from collections import Counter
from importlib.metadata import version
from pathlib import Path
from typing import Any

import torch
from torch import Tensor

from runs.folders import ROOT

PHASES = ["data", "forward", "backward", "all_reduce", "optimizer", "rest"]
ALL_REDUCE = PHASES.index("all_reduce")
# A straggler's work takes more than SLOWER times that of the others in PERSISTENT of the steps.
SLOWER, PERSISTENT = 1.15, 0.75
# The verdict names a phase that takes at least this share of the step.
BOTTLENECK = {
    "data": 0.15, "all_reduce": 0.15, "straggler": 0.15, "cores": 0.15, "optimizer": 0.3,
    "rest": 0.3,
}  # fmt: skip
STARVED = 0.9  # share of the steps in which a GPU keeps up with the program that queues its work
LATENCY_BOUND = 2**20  # bytes of gradients: with fewer, negotiation takes the time, not the wire


def phases(steps: Tensor) -> dict[str, Tensor]:
    """Seconds of each phase in each step, as means over ranks; "straggler" is waiting for one.

    Args:
        steps: seconds, of shape (ranks, steps, phases).
    """
    seconds = dict(zip(PHASES, steps.mean(0).unbind(1)))
    seconds["all_reduce"] = steps[:, :, ALL_REDUCE].min(0).values
    seconds["straggler"] = steps[:, :, ALL_REDUCE].mean(0) - seconds["all_reduce"]
    return seconds


def shares(steps: Tensor) -> dict[str, float]:
    """The share of each phase in the time of all steps; not of medians, as a loader's waits are
    rare."""
    totals = {phase: float(spent.sum()) for phase, spent in phases(steps).items()}
    return {phase: spent / sum(totals.values()) for phase, spent in totals.items()}


def straggler(steps: Tensor) -> dict[str, Any] | None:
    """The rank that works longer than the others, if there is one.

    Args:
        steps: seconds, of shape (ranks, steps, phases).
    """
    if len(steps) < 2:
        return None
    work = steps.sum(2) - steps[:, :, ALL_REDUCE]
    slow = int(work.median(1).values.argmax())
    others = [rank for rank in range(len(steps)) if rank != slow]
    ratios = work[slow] / work[others].quantile(0.5, dim=0)
    if (ratios > SLOWER).float().mean() < PERSISTENT:
        return None
    excess = (steps[slow] - steps[others].mean(0)).median(0).values
    excess[ALL_REDUCE] = -math.inf
    phase = PHASES[int(excess.argmax())]
    return {"rank": slow, "times": round(float(ratios.median()), 2), "phase": phase}


def late_phase(steps: Tensor) -> str:
    """The phase in which the rank that comes last, now one, now another, exceeds the others most.

    Args:
        steps: seconds, of shape (ranks, steps, phases).
    """
    work = steps.clone()
    work[:, :, ALL_REDUCE] = 0
    last = work.sum(2).argmax(0)
    excess = work[last, torch.arange(work.shape[1])] - work.mean(0)
    return PHASES[int(excess.mean(0).argmax())]


def named(slow: dict[str, Any], hosts: list[str]) -> str:
    return (
        f"rank {slow['rank']} on {hosts[slow['rank']]} works {slow['times']} times as long as the "
        f"others, most of the difference in {slow['phase']}"
    )


def contended(hosts: list[str], waits: list[float]) -> str:
    """What it means that the rank which waits longest for a core waits so long, in words.

    Args:
        hosts: of the ranks.
        waits: the share of each rank's time.
    """
    rank = waits.index(max(waits))
    fewer = ", or try OMP_NUM_THREADS=1" if torch.get_num_threads() > 1 else ""
    if len(waits) > 1:
        fewer = ", or try fewer ranks (NP=, -np, -H)"
    return (
        f"rank {rank} on {hosts[rank]} waits {waits[rank]:.0%} of its time for a core, which other "
        f"programs or loader workers take: run top there{fewer}"
    )


def verdict(found: dict[str, Any], precision: str, hidden: bool, late: str) -> str:
    """What limits the speed, and what to try: the largest of the phases that take too much.

    Args:
        found: "anatomy" of summary.json, but for this.
        precision: the Trainer's.
        hidden: whether backward has an all-reduce in it that cannot be told apart.
        late: as `late_phase` gives it.
    """
    name, share = _costliest(found)
    part = f"{share:.0%} of the step"
    hosts = [rank["host"] for rank in found["ranks"]]
    slow = found["straggler"]
    match name:
        case "data":
            return (
                f"data: {part} is waiting for batches: try data.num_workers where it has them, or "
                "less work a sample"
            )
        case "optimizer":
            return f"optimizer: {part}: try a fused one, or a larger data.batch_size"
        case "straggler" if slow:
            who = named(slow, hosts)
            return f"straggler: {who}; ranks wait {part}: see its load, clock rate and data"
        case _ if crowd := found["crowded"]:
            return f"cores: {crowd}, and wait for each other: start fewer there (NP=, -np, -H)"
        case "cores":
            return f"cores: {contended(hosts, [rank['waits_for_core'] for rank in found['ranks']])}"
        case "straggler":
            try_ = (
                "try more data.num_workers, or faster storage" if late == "data" else
                "look for other load on the hosts, more ranks than cores, batches of unequal cost"
            )  # fmt: skip
            return (
                f"uneven: ranks wait {part} for the slowest, which is not always the same one, "
                f"mostly in its {late}: {try_}"
            )
        case "rest":
            return (
                f"overhead: {part} of {found['step_ms']['mean']:.1f} ms is hooks, logging and "
                "checkpoints: try a larger data.batch_size, a larger trainer.log_every_n_steps, or "
                "fewer checkpoints"
            )
        case "all_reduce":
            return _network(part, found["wire"])
        case _:
            return _compute(part, found["gpu_keeps_up"] or 0.0, precision, hidden)


def _costliest(found: dict[str, Any]) -> tuple[str, float]:
    """Of the phases that take too much the one that takes most, else "compute"; and its share."""
    waits = [rank["waits_for_core"] for rank in found["ranks"]]
    share, slow = found["shares"] | {"cores": max(waits)}, found["straggler"]
    share["compute"] = share["forward"] + share["backward"]
    cost = dict(share)
    if slow and len(waits) > 1 and share["straggler"] >= BOTTLENECK["straggler"]:
        # The mean of its phase has an n-th of a slow rank's excess; the others wait for the rest.
        cost[slow["phase"]] -= share["straggler"] / (len(waits) - 1)
    costly = {phase: cost[phase] for phase, limit in BOTTLENECK.items() if cost[phase] >= limit}
    name = max(costly, key=lambda phase: costly[phase], default="compute")
    return name, share[name]


def _compute(part: str, keeps_up: float, precision: str, hidden: bool) -> str:
    if keeps_up >= STARVED:
        return (
            f"launches: in {keeps_up:.0%} of the steps the GPU waits for the program to queue its "
            "work: try a larger data.batch_size, or a compiled model (model.compile=true where it "
            "has that)"
        )
    if hidden:
        return (
            f"compute or network: forward and backward, with DDP's all-reduce in it, are {part}: "
            "strategy=horovod tells them apart"
        )
    lower = "a lower precision or " if precision in ("64-true", "32-true") else ""
    return (
        f"compute: forward and backward are {part}: try {lower}more ranks, each on a core or GPU "
        "of its own"
    )


def _network(part: str, wire: dict[str, Any] | None) -> str:
    rate, advice = "", ""
    if wire:
        large = wire["payload_bytes"] > LATENCY_BOUND
        best, reached = wire["allreduce_mb_s"], wire["bus_bandwidth_mb_s"]
        note = f", {reached / best:.0%} of what bench-allreduce measured" if best and large else ""
        rate = f", at {reached:,.0f} MB/s" if reached >= 1 else f", at {1e3 * reached:.0f} kB/s"
        rate += (" or more" if wire["pauses_count"] else "") + note
        advice = "strategy.compression=bf16, " if large and wire["compression_helps"] else ""
    return (
        f"network: {part} is all-reduce that backward does not hide{rate}: try {advice}a larger "
        "data.batch_size or trainer.accumulate_grad_batches"
    )


def crowded(ranks: list[tuple[str, list[int]]]) -> str:
    """The first host with more ranks than cores, in words; empty if there is none.

    Args:
        ranks: for each, its host and the cores that it may use.
    """
    for host, count in Counter(host for host, _ in ranks).items():
        cores = {core for other, usable in ranks if other == host for core in usable}
        if count > len(cores):
            return f"{count} ranks share the {len(cores)} cores of {host}"
    return ""


def processor() -> str:
    """Its name, as benchmarks/hardware.py has it."""
    match = re.search(r"model name\s*:\s*(.*)", Path("/proc/cpuinfo").read_text())
    return match[1] if match else platform.machine()


def measured(hosts: list[str], operations: str, size: float) -> float | None:
    """The bus bandwidth in MB/s that `make bench-allreduce` found between the same ranks, if it
    was run: the newest result's, at the size nearest to `size` bytes.

    Results of another processor are left out, whose host may have the same name, and of another
    Horovod, whose bandwidth may be another.
    """
    newest, bandwidth = "", None
    cpu, horovod = processor(), version("horovod")
    for file in (ROOT / "benchmarks" / "results").glob("allreduce_*.json"):
        try:
            result = json.loads(file.read_text())
            same = result["ranks"] == hosts and result["operations"] == operations
            same &= result["cpu"] == cpu and result["versions"]["horovod"] == horovod
            if same and result["date"] > newest:
                nearest = min(result["sizes"], key=lambda row: abs(math.log(row["bytes"] / size)))
                newest, bandwidth = result["date"], float(nearest["bus_mb_s"])
        except (OSError, ValueError, KeyError, TypeError):
            continue  # half copied, or a forker's own: no reason to lose a training's summary
    return bandwidth

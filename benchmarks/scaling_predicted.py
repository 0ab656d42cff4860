"""The predicted curve in the plot of `make bench`.

The job's compute comes from its smallest size, its gradients from what a larger one sent, and the
network from the newest `make bench-allreduce` on these hosts or some of them: nothing else of what
was measured is used. Under strong scaling, forward and backward are taken to need time in
proportion to a rank's batch; small batches need more. Only horovod is predicted, and only at sizes
with a core or GPU for each rank, as benchmarks/cost_model.py covers nothing else.
"""

from __future__ import annotations

import statistics
from collections.abc import Iterable
from dataclasses import replace
from pathlib import Path
from typing import Any

from benchmarks.cost_model import Job, Network
from benchmarks.efficiency import Results, Run, batch_of, interval
from benchmarks.overrides import accumulated
from benchmarks.predict import predictions
from benchmarks.predict_inputs import newest_all_reduces, of_our_form
from benchmarks.predict_network import networks
from benchmarks.predict_runs import buckets_of, job_of_anatomy
from cluster.hosts import Refusal


def predicted(
    results: Results, all_reduces: Iterable[Path]
) -> tuple[list[dict[str, Any]], list[str]]:
    """For each mode and size a step in ms: likely, at best and at worst; and the names of the files
    used. Both are empty where something needed is not known, or only one size was measured.

    From best to worst is from p10 to p90 of the all-reduces, times the interval of the smallest
    size's repeats.

    Args:
        results: of benchmarks/scaling.py.
        all_reduces: files of benchmarks/allreduce.py, of these hosts or others.
    """
    settings = results["settings"]
    measured = newest_all_reduces(
        all_reduces, _machines(results), results["trial"]["operations"], settings["network"]
    )
    sizes = _sizes(results, [len(result["hosts"]) > 1 for result in measured.values()])
    runs = [r for r in results["runs"] if (r["strategy"], r["alone"]) == ("horovod", False)]
    sending = next((run for run in runs if run.get("wire")), None)
    if not (sizes and sending):
        return [], []
    slots = max(host["slots"] for host in settings["hosts"].values())
    curve: list[dict[str, Any]] = []
    try:
        with of_our_form("ALLREDUCE"):
            cases, _ = networks([*measured.values()], {}, slots)
            for mode in settings["modes"]:
                curve += _curve(results, mode, runs, sending, sizes, cases)
    except Refusal:  # no line fits the all-reduces, or the job has several in a batch
        return [], []
    return curve, [file.name for file in measured] if curve else []


def _curve(
    results: Results, mode: str, runs: list[Run], sending: Run, sizes: list[int],
    cases: list[Network],
) -> list[dict[str, Any]]:  # fmt: skip
    """The steps of a mode; none where its smallest size was not measured."""
    batches = {np: batch_of(mode, results["settings"]["batch_size"], np) for np in sizes}
    first = results["settings"]["sizes"][0]
    of_first = batch_of(mode, results["settings"]["batch_size"], first)
    smallest = [run for run in runs if (run["np"], run["batch"]) == (first, of_first)]
    if not smallest:
        return []
    job = _job(smallest, sending)
    times = [run["step_ms"] for run in smallest]
    low, high = (end / statistics.median(times) for end in interval(times))
    steps = []
    for np, batch in batches.items():
        share = batch / of_first  # 1 under weak scaling
        part = replace(
            job, forward=share * job.forward, backward=share * job.backward,
            deviation=share * job.deviation,
        )  # fmt: skip
        (row,) = predictions(part, [np], cases)
        steps.append({
            "mode": mode, "strategy": "horovod", "np": np, "step_ms": 1e3 * row.step.seconds,
            "low_ms": 1e3 * low * row.best.seconds, "high_ms": 1e3 * high * row.worst.seconds,
        })  # fmt: skip
    return steps


def _machines(results: Results) -> dict[str, Any]:
    """The kind of each host, by what it calls itself; None for hosts that call themselves alike, as
    clones do, and are not."""
    machines: dict[str, Any] = {}
    for host in results["hosts"].values():
        kind = {key: host[key] for key in ("cpu", "cores")}
        machines[host["node"]] = kind if machines.get(host["node"], kind) == kind else None
    return machines


def _sizes(results: Results, several: list[bool]) -> list[int]:
    """The sizes that can be predicted; none if only the smallest can.

    Args:
        several: of each all-reduce that was measured, whether it was between hosts.
    """
    settings = results["settings"]
    if accumulated(results["config"]) > 1:
        return []
    if not several or (len(settings["hosts"]) > 1 and not any(several)):
        return []  # nothing was measured, or nothing between hosts
    sizes = [np for np in settings["sizes"] if np not in results["oversubscribed"]]
    if all(several):
        # Ranks that fit on one host are joined otherwise than by the network between hosts.
        slots = max(host["slots"] for host in settings["hosts"].values())
        sizes = [np for np in sizes if np == 1 or np > slots]
    return sizes if {*sizes} - {settings["sizes"][0]} else []


def _job(timed: list[Run], sending: Run) -> Job:
    """Its compute as in the runs `timed`, its gradients as another run sent them."""
    median = statistics.median(run["step_ms"] for run in timed)
    run = min(timed, key=lambda run: abs(run["step_ms"] - median))  # its phases are scaled to it
    anatomy = {
        "step_ms": {**run["quantiles_ms"], "median": median}, "phases_ms": run["phases_ms"]
    }  # fmt: skip
    return job_of_anatomy(anatomy, run["np"], buckets_of(sending["wire"], sending["np"]))

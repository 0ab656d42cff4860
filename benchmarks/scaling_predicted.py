"""The predicted curve in the plot of `make bench`.

The job's compute comes from its smallest size, its gradients from what a larger one sent, and the
network from the newest `make bench-allreduce` on these hosts or some of them: nothing else of what
was measured is used. Only weak scaling under horovod is predicted, and only at sizes with a core or
GPU for each rank, as benchmarks/cost_model.py covers nothing else.
"""

from __future__ import annotations

import statistics
from collections.abc import Iterable
from pathlib import Path
from typing import Any

from benchmarks.efficiency import Results, interval
from benchmarks.overrides import accumulated
from benchmarks.predict import predictions
from benchmarks.predict_inputs import job_of, networks, newest_all_reduces, of_our_form
from cluster.hosts import Refusal


def predicted(
    results: Results, all_reduces: Iterable[Path]
) -> tuple[list[dict[str, Any]], list[str]]:
    """For each size a step in ms: likely, at best and at worst; and the names of the files used.
    Both are empty where something needed is not known, or only one size was measured.

    From best to worst is from p10 to p90 of the all-reduces, times the interval of the smallest
    size's repeats.

    Args:
        results: of benchmarks/scaling.py.
        all_reduces: files of benchmarks/allreduce.py, of these hosts or others.
    """
    settings = results["settings"]
    smallest, slots = settings["sizes"][0], max(h["slots"] for h in settings["hosts"].values())
    job = ("horovod", settings["batch_size"], False)
    runs = [r for r in results["runs"] if (r["strategy"], r["batch"], r["alone"]) == job]
    first = [run for run in runs if run["np"] == smallest]
    wires = [{**run["wire"], "ranks": run["np"]} for run in runs if run.get("wire")]
    measured = newest_all_reduces(
        all_reduces, _machines(results), results["trial"]["operations"], settings["network"]
    )
    several = [len(result["hosts"]) > 1 for result in measured.values()]
    known = first and wires and measured and (any(several) or len(settings["hosts"]) == 1)
    if "weak" not in settings["modes"] or not known:
        return [], []
    sizes = [np for np in settings["sizes"] if np not in results["oversubscribed"]]
    if all(several):
        # Ranks that fit on one host are joined otherwise than by the network between hosts.
        sizes = [np for np in sizes if np == 1 or np > slots]
    if not {*sizes} - {smallest}:
        return [], []
    median = statistics.median(run["step_ms"] for run in first)
    low, high = (end / median for end in interval([run["step_ms"] for run in first]))
    summary = _summary(results, first, median, wires[0])
    try:
        with of_our_form("ALLREDUCE"):
            cases, _ = networks([*measured.values()], {}, slots)
            rows = predictions(job_of(summary, Path()), sizes, cases)
    except Refusal:  # all-reduces that no line fits, or of another form
        return [], []
    return [
        {
            "mode": "weak", "strategy": "horovod", "np": row.ranks,
            "step_ms": 1e3 * row.step.seconds,
            "low_ms": 1e3 * low * row.best.seconds, "high_ms": 1e3 * high * row.worst.seconds,
        }
        for row in rows
    ], [file.name for file in measured]  # fmt: skip


def _machines(results: Results) -> dict[str, Any]:
    """The kind of each host, by what it calls itself; None for hosts that call themselves alike, as
    clones do, and are not."""
    machines: dict[str, Any] = {}
    for host in results["hosts"].values():
        kind = {key: host[key] for key in ("cpu", "cores")}
        machines[host["node"]] = kind if machines.get(host["node"], kind) == kind else None
    return machines


def _summary(
    results: Results, first: list[dict[str, Any]], median: float, wire: dict[str, Any]
) -> dict[str, Any]:
    """What a run's summary.json would say of the smallest size, whose runs are `first`."""
    run = min(first, key=lambda run: abs(run["step_ms"] - median))  # its phases are scaled to it
    step = {**run["quantiles_ms"], "median": median}
    return {
        "strategy": "horovod", "world_size": run["np"],
        "anatomy": {"step_ms": step, "phases_ms": run["phases_ms"], "wire": wire},
        "accumulate_grad_batches": accumulated(results["config"]),
    }  # fmt: skip

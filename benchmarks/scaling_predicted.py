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
    runs = [
        run
        for run in results["runs"]
        if (run["strategy"], run["batch"], run["alone"])
        == ("horovod", settings["batch_size"], False)
    ]
    first = [run for run in runs if run["np"] == settings["sizes"][0]]
    wires = [{**run["wire"], "ranks": run["np"]} for run in runs if run.get("wire")]
    machines: dict[str, Any] = {}
    for host in results["hosts"].values():
        kind = {key: host[key] for key in ("cpu", "cores")}
        # None for hosts that call themselves alike, as clones do, and are not.
        machines[host["node"]] = kind if machines.get(host["node"], kind) == kind else None
    measured = newest_all_reduces(
        all_reduces, machines,
        results["trial"]["operations"], settings["network"],
    )  # fmt: skip
    between = any(len(result["hosts"]) > 1 for result in measured.values())
    sizes = [np for np in settings["sizes"] if np not in results["oversubscribed"]]
    others = set(sizes) - {settings["sizes"][0]}
    enough = others and first and wires and measured and (between or len(settings["hosts"]) == 1)
    if "weak" not in settings["modes"] or not enough:
        return [], []
    median = statistics.median(run["step_ms"] for run in first)
    low, high = (end / median for end in interval([run["step_ms"] for run in first]))
    run = min(first, key=lambda run: abs(run["step_ms"] - median))  # its phases are scaled to it
    step = {**run["quantiles_ms"], "median": median}
    anatomy = {"step_ms": step, "phases_ms": run["phases_ms"], "wire": wires[0]}
    summary = {
        "strategy": "horovod", "world_size": run["np"], "anatomy": anatomy,
        "accumulate_grad_batches": accumulated(results["config"]),
    }  # fmt: skip
    slots = max(host["slots"] for host in settings["hosts"].values())
    if all(len(result["hosts"]) > 1 for result in measured.values()):
        # Ranks that fit on one host are joined otherwise than by the network between hosts.
        sizes = [np for np in sizes if np == 1 or np > slots]
    if not set(sizes) & others:
        return [], []
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

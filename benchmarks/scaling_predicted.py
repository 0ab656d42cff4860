"""The predicted curve in the plot of `make bench`.

The job is what its smallest size measured, its gradients what a larger one sent, the network what
the newest `make bench-allreduce` found on the same hosts: prediction and measurement share nothing
else. For weak scaling under horovod, at sizes with a core or GPU for each rank; the cost model
(benchmarks/cost_model.py) is of no other.
"""

from __future__ import annotations

import statistics
from collections.abc import Iterable
from pathlib import Path
from typing import Any

from benchmarks.efficiency import Results, interval
from benchmarks.predict import predictions
from benchmarks.predict_inputs import ALL_REDUCE_KEYS, job_of, networks, read
from benchmarks.scaling_plan import windows
from cluster.hosts import Refusal

UNNAMED = ("network", "loopback")  # what bench-allreduce calls a network that nobody named


def predicted(
    results: Results, all_reduces: Iterable[Path]
) -> tuple[list[dict[str, Any]], list[str]]:
    """A step at each size, in ms: likely, and in the best and worst case; and the names of the
    files that it comes of. Both are empty if nobody knows, or there is no size but the smallest.

    The range is that of the all-reduces, p10 to p90, and of the smallest size's repeats.

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
    first = [run for run in runs if run["np"] == settings["sizes"][0] and run.get("phases_ms")]
    wires = [{**run["wire"], "ranks": run["np"]} for run in runs if run.get("wire")]
    measured = _of_these_hosts(results, all_reduces)
    sizes = [np for np in settings["sizes"] if np not in results["oversubscribed"]]
    others = set(sizes) - {settings["sizes"][0]}
    if "weak" not in settings["modes"] or not (others and first and wires and measured):
        return [], []
    median = statistics.median(run["step_ms"] for run in first)
    low, high = (end / median for end in interval([run["step_ms"] for run in first]))
    run = min(first, key=lambda run: abs(run["step_ms"] - median))  # its phases are scaled to it
    step = {"p10": median, "p90": median, **(run.get("quantiles_ms") or {}), "median": median}
    anatomy = {"step_ms": step, "phases_ms": run["phases_ms"], "wire": wires[0]}
    summary = {"strategy": "horovod", "world_size": run["np"], "anatomy": anatomy}
    summary["accumulate_grad_batches"] = windows(results["config"])
    slots = max(host["slots"] for host in settings["hosts"].values())
    try:
        cases, _ = networks([content for _, content in measured], {}, slots)
        rows = predictions(job_of(summary, Path()), sizes, cases)
    except (Refusal, KeyError, TypeError):  # all-reduces that no line fits, or of another form
        return [], []
    return [
        {
            "mode": "weak", "strategy": "horovod", "np": row.ranks,
            "step_ms": 1e3 * row.step.seconds,
            "low_ms": 1e3 * low * row.best.seconds, "high_ms": 1e3 * high * row.worst.seconds,
        }
        for row in rows
    ], [name for name, _ in measured]  # fmt: skip


def lacks_all_reduces(results: Results, files: Iterable[Path]) -> bool:
    """Whether `make bench-allreduce` on these hosts is all that a predicted curve needs."""
    settings = results["settings"]
    sizes = set(settings["sizes"][1:]) - set(results["oversubscribed"])
    predictable = sizes and "weak" in settings["modes"] and "horovod" in settings["strategies"]
    wires = [run["wire"] for run in results["runs"] if run.get("wire")]
    once = all(wire.get("exchanges", 1) == 1 for wire in wires) and windows(results["config"]) == 1
    return bool(predictable) and once and not _of_these_hosts(results, files)


def _of_these_hosts(results: Results, files: Iterable[Path]) -> list[tuple[str, dict[str, Any]]]:
    """The newest between all of these hosts, and the newest inside one of them, with the names of
    their files; empty if there is none of what the largest size needs."""
    names = set(results["settings"]["hosts"])
    # What they call themselves, where results say it: every host is a localhost to itself.
    nodes = {host["node"] for host in results["hosts"].values() if "node" in host}
    machines = [(host["cpu"], host["cores"]) for host in results["hosts"].values()]
    network = results["settings"]["network"]
    newest: dict[bool, tuple[str, dict[str, Any]]] = {}
    for file in files:
        try:
            content = read(file, "ALLREDUCE", ALL_REDUCE_KEYS)
            hosts = {host["name"] for host in content["hosts"]}
            kinds = {(host["cpu"], host["cores"]) for host in content.get("machines", [content])}
        except (Refusal, LookupError, TypeError):
            continue  # half copied, or of another form
        if not kinds <= set(machines) or (nodes and not set(content["ranks"]) <= nodes):
            continue
        if content["operations"] != results["trial"]["operations"] or len(content["sizes"]) < 2:
            continue  # a line needs two sizes
        if network and content.get("network", network) not in (network, *UNNAMED):
            continue
        several = len(hosts) > 1
        if not hosts <= names or (several and hosts != names):
            continue
        if several not in newest or content["date"] > newest[several][1]["date"]:
            newest[several] = file.name, content
    return list(newest.values()) if (len(names) > 1) in newest else []

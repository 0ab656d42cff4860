"""The results of benchmarks/losses.py for readers: Markdown and a plot.

The upper panels show the losses in 32 bits, each line over a wider one, as they coincide. The lower
ones show their differences from those of one process: thick in 32 bits, thin in 64.
"""

from __future__ import annotations

import math
from pathlib import Path
from typing import Any

from matplotlib.axes import Axes

from benchmarks.figures import plt, save
from benchmarks.files import markdown, write_text
from benchmarks.hardware import processors, versions

Results = dict[str, Any]
EQUAL = 1e-8  # of a loss, in 64 bits: less than 32 bits can represent (2^-24 = 6e-8)
FLOOR = 1e-18  # where "no difference" is drawn on a log axis
TICKS = [1e-16, 1e-12, 1e-8, 1e-4, 1]
# By Okabe and Ito, for the colour-blind.
COLORS = {"single": "0.75", "horovod": "#0072B2", "ddp": "#D55E00"}
DASHES = {1: "-", 2: "--", 4: ":"}


def differences(job: dict[str, Any], run: dict[str, Any]) -> list[float]:
    """|loss - loss of one process| / loss of one process, at each step of both.

    Raises:
        ValueError: when they were not evaluated at the same steps.
    """
    reference = next(r for r in job["runs"] if r["precision"] == run["precision"])
    if reference["steps"] != run["steps"]:
        raise ValueError(f"{job['name']}: steps {run['steps']} beside {reference['steps']}")
    return [_difference(a, b) for a, b in zip(run["losses"], reference["losses"])]


def _difference(a: float, b: float) -> float:
    """Of a relative to b; infinite where one of them is NaN."""
    if a == b:
        return 0.0
    difference = abs(a - b) / abs(b) if b else math.inf
    return math.inf if math.isnan(difference) else difference


def unequal(results: Results) -> list[str]:
    """The runs that differ by more than rounding, of jobs that are expected to be equal."""
    return [
        f"{job['name']}: {run['strategy']} on {run['np']}, by {max(differences(job, run)):.1e}"
        for job in results["jobs"]
        for run in job["runs"]
        if run["precision"] == "64-true"
        and not job["differs"]
        and max(differences(job, run)) > EQUAL
    ]


def table(results: Results) -> str:
    head = ["job", "strategy", "ranks x batch", "first val/loss", "last val/loss",
            "32 bits: first difference", "largest", "64 bits: largest", ""]  # fmt: skip
    lines = []
    for job in results["jobs"]:
        runs_32 = [run for run in job["runs"] if run["precision"] == "32-true"]
        runs_64 = [run for run in job["runs"] if run["precision"] == "64-true"]
        for run, run_64 in zip(runs_32, runs_64):
            alone = run["strategy"] == "single"
            in_32, in_64 = differences(job, run), max(differences(job, run_64))
            verdict = "equal" if in_64 <= EQUAL else "differs"
            lines.append(
                [job["name"], run["strategy"], f"{run['np']} x {run['batch']}",
                 f"{run['losses'][0]:.7g}", f"{run['losses'][-1]:.7g}",
                 *([""] * 4 if alone else
                   [f"{in_32[0]:.1e}", f"{max(in_32):.1e}", f"{in_64:.1e}", verdict])]
            )  # fmt: skip
    return markdown(head, lines)


def description(results: Results) -> str:
    jobs = "\n".join(
        f"- {job['name']}: `{' '.join(job['arguments'])}` ({job['model']})"
        + (f"; expected to differ: {job['differs']}" if job["differs"] else "")
        + (f"; not under DDP on CPUs: {job['ddp_on_cpu']}" if job["ddp_on_cpu"] else "")
        for job in results["jobs"]
    )
    return (
        f"{processors(results)}; {versions(results)}. {results['steps']} steps; val/loss over all "
        "ranks, and its difference from that of one process as a share of it. Equal: at most "
        f"{EQUAL:.0e} in 64 bits.\n\n{jobs}"
    )


def draw(results: Results, name: Path) -> None:
    """A column of two panels for each job, into name.png and name.svg."""
    jobs = results["jobs"]
    figure, grid = plt.subplots(
        2, len(jobs), squeeze=False, sharex="col", layout="constrained",
        figsize=(max(5, 0.6 + 2.5 * len(jobs)), 4.6),
    )  # fmt: skip
    for job, top, bottom in zip(jobs, *grid):
        top.set_title(job["name"] if len(jobs) > 1 else "")
        for run in job["runs"]:
            _line(job, run, top, bottom)
        bottom.set_xlabel("step")
        top.set_ylim(bottom=0)
        bottom.set_yscale("log")
        bottom.set_ylim(FLOOR / 3, 1)
        bottom.set_yticks([FLOOR, *TICKS], ["0", *(f"{tick:.0e}" for tick in TICKS)])
        bottom.minorticks_off()
        for panel in (top, bottom):
            panel.grid(color="0.9", linewidth=0.6)
            panel.set_axisbelow(True)
    grid[0][0].set_ylabel("val/loss, 32 bits")
    grid[1][0].set_ylabel("relative difference")
    lines, names = grid[0][0].get_legend_handles_labels()
    lines.append(plt.Line2D([], [], color="0.4", linewidth=1.4))
    lines.append(plt.Line2D([], [], color="0.4", linewidth=0.6))
    names += ["32 bits (thick)", "64 bits (thin)"]
    columns = max(3, len(jobs) + 1)
    figure.legend(lines, names, loc="outside lower center", ncols=columns, fontsize=7)
    save(figure, name)


def _line(job: dict[str, Any], run: dict[str, Any], top: Axes, bottom: Axes) -> None:
    strategy, np = run["strategy"], run["np"]
    style: dict[str, Any] = {"color": COLORS[strategy], "linestyle": DASHES.get(np, "-.")}
    exact = run["precision"] == "64-true"
    if not exact:
        width = 5 if strategy == "single" else 1.4
        label = "one process" if strategy == "single" else f"{strategy}, {np}"
        top.plot(run["steps"], run["losses"], linewidth=width, label=label, **style)
    if strategy != "single":
        shown = [max(FLOOR, value) for value in differences(job, run)]
        bottom.plot(run["steps"], shown, linewidth=0.6 if exact else 1.4, **style)


def report(results: Results, name: Path) -> str:
    """Write the table and the plot beside a result; the text to print."""
    body = f"{description(results)}\n\n{table(results)}\n"
    write_text(name.with_name(f"{name.name}.md"), body)
    draw(results, name)
    return f"{body}\nwritten to {name}.json, .md, .png and .svg"

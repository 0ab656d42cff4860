"""How a job that was run would scale: step time and efficiency on up to 4,096 ranks.

    make predict                                           the newest run, the newest all-reduces
    make predict RUN=logs/classifier/runs/.../summary.json NP="2 4 8 64 512"
    make predict ALLREDUCE="benchmarks/results/allreduce_a.json benchmarks/results/allreduce_b.json"
    make predict NETWORK="rate=100gbit latency=5us gpus_per_host=8 inside=nvlink operations=nccl"

The job comes from `anatomy` in the summary of a run on two ranks or more: its compute, its
gradients, how much its ranks differ. The network is fitted to results of `make bench-allreduce`,
those of a single host for what is inside one, those of several for what is between them; or it is
described:

    rate, latency              of the links between hosts, as 25gbit and 20us
    gpus_per_host              ranks of a host
    inside                     a host: pcie, nvlink, or a rate
    operations                 nccl, gloo or mpi; all-reduces of others are left out
    controller_latency         the least time of a hop while they agree, as 20us

Assumed: the batch of a rank, its compute, and the ranks of a host stay as they were. The formulas,
and what they leave out, are in benchmarks/cost_model.py; whether they hold is tried by `make
predict-proof`. The band spans the 10th to the 90th percentile of the all-reduces; for a described
network 0.95 to 0.7 of the rate, and half to twice the latency. Table and plot go beside the summary
as prediction.*, the next ones as prediction_2.*.
"""

from __future__ import annotations

import argparse
import math
import os
import sys
from dataclasses import dataclass
from pathlib import Path
from typing import Any, NamedTuple

from benchmarks import predict_inputs as inputs
from benchmarks import predict_network
from benchmarks.cost_model import Job, Network, Step, predict
from benchmarks.files import RESULTS, markdown, unused, write_text
from benchmarks.hardware import machine
from benchmarks.launching import ends_in_a_line
from benchmarks.load import BUSY_SHARE
from cluster.hosts import Refusal

RANKS = [2**power for power in range(1, 13)]
WAITS_SHARE = 0.15  # of a rank's time, for a core; from here on it is warned of
MOST_RANKS = 4096


@dataclass(frozen=True)
class Prediction:
    """For a number of ranks the likely step, and those at best and at worst."""

    ranks: int
    hosts: int
    step: Step
    best: Step
    worst: Step


def predictions(job: Job, ranks: list[int], cases: list[Network]) -> list[Prediction]:
    rows = []
    for count in ranks:
        steps = [predict(job, count, network) for network in cases]
        best, *_, worst = sorted(steps, key=lambda step: step.seconds)
        hosts = math.ceil(count / cases[1].ranks_per_host)
        rows.append(Prediction(count, hosts, steps[1], best, worst))
    return rows


def table(rows: list[Prediction], measured: dict[int, float]) -> str:
    """A row for each number of ranks; a column of measured steps if there are any."""
    head = [
        "ranks", "hosts", "step, ms (at best - at worst)", "efficiency",
        "of the step: straggler, exposed all-reduce, ms", "measured, ms",
    ]  # fmt: skip
    lines = [
        [
            f"{row.ranks:,}", f"{row.hosts:,}",
            f"{row.step.seconds * 1e3:.1f} "
            f"({row.best.seconds * 1e3:.1f} - {row.worst.seconds * 1e3:.1f})",
            f"{row.step.efficiency:.1%} ({row.worst.efficiency:.1%} - {row.best.efficiency:.1%})",
            f"{row.step.straggler * 1e3:.1f}, {row.step.exposed * 1e3:.1f}",
            f"{measured[row.ranks] * 1e3:.1f}" if row.ranks in measured else "",
        ]
        for row in rows
    ]  # fmt: skip
    return markdown(head, lines)


def as_csv(rows: list[Prediction]) -> str:
    """The same without rounding; times in ms."""
    lines = ["ranks,hosts,step_ms,best_ms,worst_ms,efficiency,straggler_ms,exposed_ms"]
    for row in rows:
        times = (row.step.seconds, row.best.seconds, row.worst.seconds)
        parts = (row.step.straggler, row.step.exposed)
        figures = [*(1e3 * t for t in times), row.step.efficiency, *(1e3 * t for t in parts)]
        lines.append(",".join(map(str, [row.ranks, row.hosts, *figures])))
    return "\n".join(lines) + "\n"


def plot(
    rows: list[Prediction], measured: dict[int, float], job: Job, caption: str, file: Path
) -> None:
    from benchmarks.figures import plt, save, title  # slow to import

    figure, (above, below) = plt.subplots(2, 1, figsize=(5, 5), sharex=True, layout="constrained")
    ranks = [row.ranks for row in rows]
    above.fill_between(
        ranks, [100 * r.worst.efficiency for r in rows], [100 * r.best.efficiency for r in rows],
        alpha=0.2, linewidth=0, label="at worst to at best",
    )  # fmt: skip
    above.plot(ranks, [100 * r.step.efficiency for r in rows], "o-", markersize=4, label="likely")
    above.set_ylim(0, 105)
    above.set_ylabel("efficiency, %")
    above.set_title(title(caption, 5))
    below.fill_between(
        ranks, [1e3 * r.best.seconds for r in rows], [1e3 * r.worst.seconds for r in rows],
        alpha=0.2, linewidth=0,
    )  # fmt: skip
    below.plot(ranks, [1e3 * row.step.seconds for row in rows], "o-", markersize=4)
    for count, seconds in measured.items():
        above.plot(count, 100 * job.compute / seconds, "D", color="C3", label="measured")
        below.plot(count, 1e3 * seconds, "D", color="C3")
    style = {"color": "0.5", "linewidth": 1, "linestyle": ":", "label": "compute alone"}
    below.axhline(1e3 * job.compute, **style)
    below.set_yscale("log", subs=[])
    below.set_ylabel("step, ms")
    below.yaxis.set_major_locator(plt.LogLocator(subs=(1, 1.5, 2, 3, 5)))
    below.yaxis.set_major_formatter("{x:,g}")
    below.tick_params(axis="y", labelsize=8)
    below.set_xscale("log", base=2)
    below.set_xticks(ranks, [f"{count:,}" for count in ranks], size=8, rotation=45, ha="right")
    below.set_xticks([], minor=True)
    below.set_xlabel("ranks")
    above.legend()
    below.legend()
    for axes in (above, below):
        axes.grid(True, alpha=0.3)
    save(figure, file)


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


def disturbed(result: dict[str, Any]) -> str:
    """A warning for an all-reduce's file that was measured beside other load; else empty."""
    busy = result.get("busy_before", 0)
    return f", take care: beside other load of {busy:.0%}" if busy > BUSY_SHARE else ""


def of_job(summary: dict[str, Any], run: Path, job: Job) -> list[str]:
    """What is predicted, and what to take care of; in lines."""
    return [
        f"job       {summary['model']} on {summary['data']}: {job.compute * 1e3:.1f} ms of compute "
        f"a step, {sum(job.buckets) / 1e6:.2f} MB of gradients, buckets: {len(job.buckets)}, "
        f"ranks differ by {job.deviation * 1e3:.2f} ms ({run})",
        *cautions(summary, job),
    ]


def all_reduces_of(summary: dict[str, Any]) -> dict[Path, dict[str, Any]]:
    """The newest of a run's hosts. Of their hardware only this one's is known."""
    machines: dict[str, Any] = dict.fromkeys(summary["hosts"])
    if (here := os.uname().nodename) in machines:
        machines[here] = machine()
    files = sorted(RESULTS.glob("allreduce_*.json"))
    return inputs.newest_all_reduces(files, machines, summary.get("operations", "Gloo"))


class Given(NamedTuple):
    """What is predicted, and from what.

    Attributes:
        cases: the network at best, likely, and at worst.
        measured: the run's own step in seconds, by its ranks; none for another network.
        head: all of it in words.
    """

    run: Path
    model: str
    job: Job
    cases: list[Network]
    measured: dict[int, float]
    head: list[str]


def given(arguments: argparse.Namespace) -> Given:
    """What the arguments name, and the newest files for what they do not.

    Raises:
        Refusal: for files and options that nothing can be predicted from.
    """
    network = predict_network.described(arguments.network)
    run = Path(arguments.run) if arguments.run else inputs.newest_run()
    if run.is_dir():
        run /= "summary.json"
    names = arguments.allreduce  # or one that has blanks in it
    named = [Path(name) for name in ([names] if os.path.isfile(names) else names.split())]
    with inputs.of_our_form(f"RUN={run}"):
        summary = inputs.read(run, "RUN")
        if not summary["hosts"]:
            raise ValueError("it lacks what a run writes: no hosts")
        job, slots = inputs.job_of(summary), max(summary["hosts"].values())
        median = summary["anatomy"]["step_ms"]["median"] / 1e3
        measured = {} if network else {summary["world_size"]: median}
        head = of_job(summary, run, job)
        options = {} if named else {"operations": summary.get("operations", "Gloo").lower()}
        newest = {} if named else all_reduces_of(summary)
    options |= network
    with inputs.of_our_form(f"ALLREDUCE={' '.join(map(str, named or newest))}"):
        results = {file: inputs.read(file, "ALLREDUCE") for file in named} or newest
        if "operations" in network:  # what others took says nothing of these
            wanted = network["operations"]
            results = {f: r for f, r in results.items() if r["operations"].lower() == wanted}
        cases, sources = predict_network.networks([*results.values()], options, slots)
        head += [f"network   {line}" for line in sources]
        head += [
            f"measured  {file}{disturbed(result)}"
            for file, result in results.items()
            if ("inside" if len(result["hosts"]) == 1 else "rate") not in options
        ]
    return Given(run, summary["model"], job, cases, measured, head)


def parse() -> argparse.Namespace:
    parser = argparse.ArgumentParser(
        prog="python -m benchmarks.predict", description=__doc__.partition("\n")[0]
    )
    parser.add_argument(
        "--run", default="", help="a run's folder, or its summary.json; by default the newest"
    )
    parser.add_argument("--allreduce", default="", help="results of make bench-allreduce")
    parser.add_argument("--network", default="", help="rate=25gbit latency=20us ...")
    parser.add_argument("--ranks", type=int, nargs="+", default=RANKS, help="2 4 8 ...")
    return parser.parse_args()


@ends_in_a_line
def main() -> int:
    arguments = parse()
    ranks = sorted({*arguments.ranks})
    if not 1 <= ranks[0] <= ranks[-1] <= MOST_RANKS:
        wrong = " ".join(map(str, ranks))
        raise Refusal(f"NP={wrong}: the model is for 1 to {MOST_RANKS:,} ranks")
    run, model, job, cases, measured, head = given(arguments)
    rows = predictions(job, sorted({*ranks, *measured}), cases)
    text = "\n".join(head) + "\n\n" + table(rows, measured)
    print(text)
    out = unused(run.with_name("prediction.md")).with_suffix("")
    link = cases[1]
    caption = (
        f"{model}; between hosts {link.bandwidth / 1e6:,.0f} MB/s, {link.latency * 1e6:.0f} µs, "
        f"{link.ranks_per_host} rank{'s' * (link.ranks_per_host > 1)} each"
    )
    plot(rows, measured, job, caption, out)
    write_text(out.with_suffix(".csv"), as_csv(rows))
    write_text(out.with_suffix(".md"), text + "\n")
    print(f"\nwritten to {out}.md, .csv, .png, .svg")
    return 0


if __name__ == "__main__":
    sys.exit(main())

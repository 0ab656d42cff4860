"""How a job that was run would scale: step time and efficiency on up to 4,096 ranks.

    make predict                                           the newest run, the newest all-reduces
    make predict RUN=logs/classifier/runs/.../summary.json NP="2 4 8 64 512"
    make predict MODEL=resnet18                            a model of the newest make bench-step
    make predict ALLREDUCE="benchmarks/results/allreduce_a.json benchmarks/results/allreduce_b.json"
    make predict NETWORK="rate=100gbit latency=5us gpus_per_host=8 inside=nvlink operations=nccl"

The job comes from `anatomy` in the summary of a run on two ranks or more: its compute, its
gradients, how much its ranks differ. With MODEL= it comes from the newest result of `make
bench-step` on this machine, or that of RUN=: what a rank without communication computes, how much
that differs, when gradients come, and what the Trainer adds; and by how much its step of several
ranks is longer than the model explains. The network is fitted to results of
`make bench-allreduce`, those of a single host for what is inside one, those of several for what is
between them; or it is described:

    rate, latency              of the links between hosts, as 25gbit and 20us
    gpus_per_host              ranks of a host
    inside                     a host: pcie, nvlink, or a rate
    operations                 nccl, gloo or mpi; all-reduces of others are left out
    controller_latency         the least time of a hop while they agree, as 20us

Assumed: the batch of a rank, its compute, and the ranks of a host stay as they were. The formulas,
and what they leave out, are in benchmarks/cost_model.py; whether they hold is tried by `make
predict-proof`. The band spans the 10th to the 90th percentile of the all-reduces; for a described
network 0.95 to 0.7 of the rate, and half to twice the latency. Table and plot go beside the summary
as prediction.*, or beside bench-step's result as prediction_MODEL.*, the next ones as
prediction_2.* and prediction_MODEL_2.*.
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
from benchmarks.launching import Parser, ends_in_a_line
from benchmarks.load import BUSY_SHARE
from benchmarks.predict_runs import measured_run, newest_run
from benchmarks.predict_steps import measured_steps, newest_steps, with_burden
from cluster.hosts import Refusal

RANKS = [2**power for power in range(1, 13)]
MOST_RANKS = 4096
MUCH = 1.1  # times the predicted step, from where on a measured one is warned of
ASSUMPTIONS = (
    "assumed   batch and compute of a rank stay as they are; at best and at worst differ in the "
    "network alone, not in how far off the model is, which make predict-proof tells; formulas, "
    "sources and what is left out: benchmarks/cost_model.py"
)


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


def beyond(rows: list[Prediction], measured: dict[int, float]) -> list[str]:
    """A warning where a step took much more than the model explains."""
    return [
        f"take care {row.ranks} ranks took {measured[row.ranks] * 1e3:.1f} ms, "
        f"{measured[row.ranks] / row.step.seconds - 1:.0%} more than predicted: the model leaves "
        "out what communication takes from computing on the same cores"
        for row in rows
        if row.ranks > 1 and measured.get(row.ranks, 0.0) > MUCH * row.step.seconds
    ]


def disturbed(result: dict[str, Any]) -> str:
    """A warning for an all-reduce's file that was measured beside other load; else empty."""
    busy = result.get("busy_before", 0)
    return f", take care: beside other load of {busy:.0%}" if busy > BUSY_SHARE else ""


def all_reduces_of(found: inputs.Measured) -> dict[Path, dict[str, Any]]:
    """The newest of the hosts that a job was measured on."""
    files = sorted(RESULTS.glob("allreduce_*.json"))
    return inputs.newest_all_reduces(files, found.machines, found.operations, found.network)


class Given(NamedTuple):
    """What is predicted, and from what.

    Attributes:
        out: where to write the table.
        cases: the network at best, likely, and at worst.
        measured: the job's own step in seconds, by its ranks; none for another network.
        head: all of it in words.
    """

    out: Path
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
    model, source = arguments.model, Path(arguments.run)
    if not arguments.run:
        source = newest_steps(model) if model else newest_run()
    if source.is_dir():
        source /= "summary.json"
    names = arguments.allreduce  # or one that has blanks in it
    named = [Path(name) for name in ([names] if os.path.isfile(names) else names.split())]
    with inputs.of_our_form(f"RUN={source}"):
        content = inputs.read(source, "RUN")
        if model or "models" in content:
            found = measured_steps(content, model, source)
        else:
            found = measured_run(content, source)
        newest = {} if named else all_reduces_of(found)
    options = ({} if named else {"operations": found.operations.lower()}) | network
    with inputs.of_our_form(f"ALLREDUCE={' '.join(map(str, named or newest))}"):
        results = {file: inputs.read(file, "ALLREDUCE") for file in named} or newest
        if model and options.get("operations", "gloo") == "gloo":
            found = with_burden(found, [*results.values()])
        if "operations" in network:  # what others took says nothing of these
            wanted = network["operations"]
            results = {f: r for f, r in results.items() if r["operations"].lower() == wanted}
        cases, sources = predict_network.networks([*results.values()], options, found.slots)
        head = [*found.head, *(f"network   {line}" for line in sources)]
        head += [
            f"measured  {file}{disturbed(result)}"
            for file, result in results.items()
            if ("inside" if len(result["hosts"]) == 1 else "rate") not in options
        ]
        head.append(ASSUMPTIONS)
    measured = {} if network or found.seconds is None else {found.ranks: found.seconds}
    out = source.with_name(f"prediction{f'_{model}' if model else ''}.md")
    return Given(out, found.model, found.job, cases, measured, head)


def parse() -> argparse.Namespace:
    parser = Parser(prog="python -m benchmarks.predict", description=__doc__.partition("\n")[0])
    parser.add_argument(
        "--run", default="", help="a run's folder, or its summary.json; by default the newest"
    )
    parser.add_argument("--model", default="", help="one of make bench-step; RUN= is its result")
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
    out, model, job, cases, measured, head = given(arguments)
    rows = predictions(job, sorted({*ranks, *measured}), cases)
    text = "\n".join([*head, *beyond(rows, measured)]) + "\n\n" + table(rows, measured)
    print(text)
    out = unused(out).with_suffix("")
    link = cases[1]
    unknown = any(f"between hosts: {predict_network.ASSUMED}" in line for line in head)
    caption = (
        f"{model}; between hosts {link.bandwidth / 1e6:,.0f} MB/s, {link.latency * 1e6:.0f} µs"
        f"{' (NOT MEASURED)' * unknown}, "
        f"{link.ranks_per_host} rank{'s' * (link.ranks_per_host > 1)} each"
    )
    plot(rows, measured, job, caption, out)
    write_text(out.with_suffix(".csv"), as_csv(rows))
    write_text(out.with_suffix(".md"), text + "\n")
    print(f"\nwritten to {out}.md, .csv, .png, .svg")
    return 0


if __name__ == "__main__":
    sys.exit(main())

"""Does the cost model predict? Fitted on few ranks and some rates of the links, tried on others.

    sudo make predict-proof            about 6 minutes

Hosts are made of this one (cluster/testbed.py), each with one rank, and links of limited rate. What
trains is a stub (benchmarks/predict_worker.py): its layers sleep in forward and backward, so that 8
ranks do not compete for the cores of one machine; its gradients are real, and combined by the
strategy's own buckets. The network's constants are fitted to all-reduces and the job's to steps of
one rank alone: no step on several ranks is used. Held out are 8 ranks at any rate, and one rate at
any number of ranks, for all-reduces too.

What it does not prove: 8 ranks spend real processor time on TCP here, and the rates are chosen so
that the links, not two cores, are the limit. At 1 Gbit/s that is no longer so, and nothing is
claimed for it. Computing that slows down when ranks compete is not in the stub.
Results, with the back-test on published figures, go to benchmarks/results/predict_*.
Ctrl-C keeps what was measured, and the same command goes on.
"""

from __future__ import annotations

import statistics
import sys
from collections.abc import Callable
from pathlib import Path
from typing import Any

from benchmarks import published
from benchmarks.cost_fit import Fit, Measurement, fit
from benchmarks.cost_model import Job, Network, agreement, all_reduce, bucket_sizes, predict
from benchmarks.files import RESULTS, continued, markdown, slug, write_json, write_text
from benchmarks.hardware import hardware, versions
from benchmarks.launching import Parser, ends_in_a_line, say, tells_what_is_kept
from benchmarks.workers import launched
from cluster.hosts import Refusal
from cluster.testbed import BURST, Testbed, missing

RANKS, HELD_OUT_RANKS = [2, 4], [8]
RATES, HELD_OUT_RATES = [100, 200, 500], [300]  # Mbit/s
SIZES = [2**14, 2**18, 2**20, 2**22]  # bytes
MBIT = 125e3  # bytes per second
BURST_BYTES = int(BURST[1].removesuffix("kb")) * 2**10  # tc(8): kb are kibibytes
STUB: dict[str, Any] = {
    "layers": 16, "layer_bytes": 640 * 2**10, "forward": 0.08, "backward": 0.16,
    "optimizer": 0.005, "deviation": 0.05, "steps": 15, "warmup": 2, "seed": 0,
}  # fmt: skip


def run(ranks: int, rate: int | None, options: dict[str, Any]) -> dict[str, Any]:
    """What the ranks measured, each on a host of its own; rate None: one rank alone."""
    if rate is None:
        return launched("benchmarks.predict_worker", options, ["-np", "1"])
    try:
        with Testbed(ranks, f"{rate}mbit") as hosts:
            names = ",".join(host.name for host in hosts)
            where = ["-np", str(ranks), "-H", names]
            return launched("benchmarks.predict_worker", options, where, hosts[0].command())
    except RuntimeError as error:
        raise Refusal(str(error)) from None


def job_of(steps: dict[str, list[float]], stub: dict[str, Any]) -> Job:
    """The job, from the steps of one rank alone."""
    computing = [f + b for f, b in zip(steps["forward"], steps["backward"])]
    layers = [stub["layer_bytes"]] * stub["layers"]
    return Job(
        statistics.mean(steps["forward"]), statistics.mean(steps["backward"]),
        statistics.median(steps["rest"]), tuple(bucket_sizes(layers)), statistics.stdev(computing),
    )  # fmt: skip


def experiment(results: dict[str, Any], keep: Callable[[], None]) -> None:
    """The measurements that are not there yet, of one rank alone, then of each number of ranks at
    each rate; `keep` after each."""
    stub, rows = results["stub"], results["measured"]
    ranks, rates = RANKS + HELD_OUT_RANKS, sorted(RATES + HELD_OUT_RATES)
    plan = [(1, None)] + [(count, rate) for count in ranks for rate in rates]
    for number, (count, rate) in enumerate(plan[len(rows) :], start=len(rows) + 1):
        held_out = count in HELD_OUT_RANKS or rate in HELD_OUT_RATES
        kind = "alone" if rate is None else f"{rate} Mbit/s, {'held out' if held_out else 'fitted'}"
        say(f"{number} of {len(plan)}: {count} ranks, {kind}")
        fitted = rate is not None and not held_out
        options = stub | {"seed": number, "sizes": SIZES if fitted else []}
        options["repeats"] = results["repeats"]
        # Long enough to fill the token buckets of the links, which a step's forward is too.
        options["pause"] = 1.2 * BURST_BYTES / (rate * MBIT) if rate else 0.0
        result = run(count, rate, options)
        row = {"ranks": count, "rate_mbit": rate, "held_out": held_out, "steps": result["steps"]}
        if fitted:
            row["all_reduce"] = [
                {"bytes": size, "seconds": statistics.median(times)}
                for size, times in zip(SIZES, result["seconds"])
            ]
        rows.append(row)
        keep()


def measurement(ranks: int, bytes_: float, seconds: float, rate: float = 1.0) -> Measurement:
    """Of an all-reduce over Gloo between hosts of one rank."""
    terms = all_reduce(bytes_, ranks, ranks, "ring")
    hops = terms.hops + agreement(ranks, ranks, "dissemination").hops
    return Measurement(ranks, seconds, hops, terms.sent, rate)


def network_of(fitted: Fit, rate_mbit: float) -> Network:
    bandwidth = fitted.share * rate_mbit * MBIT
    return Network(fitted.latency, bandwidth, fixed=fitted.fixed, burst=BURST_BYTES)


def compare(measured: list[dict[str, Any]], stub: dict[str, Any]) -> dict[str, Any]:
    """The fit, and for each row the measured step beside the predicted one."""
    measurements = [
        measurement(row["ranks"], each["bytes"], each["seconds"], row["rate_mbit"] * MBIT)
        for row in measured for each in row.get("all_reduce", [])
    ]  # fmt: skip
    fitted, job = fit(measurements, BURST_BYTES), job_of(measured[0]["steps"][0], stub)
    rows = []
    for row in measured:
        times = [seconds for rank in row["steps"] for seconds in rank["step"]]
        deciles = statistics.quantiles(times, n=10, method="inclusive")
        step = predict(job, row["ranks"], network_of(fitted, row["rate_mbit"] or 1.0))
        median = statistics.median(times)
        rows.append({
            "ranks": row["ranks"], "rate_mbit": row["rate_mbit"], "held_out": row["held_out"],
            "measured": median, "p10": deciles[0], "p90": deciles[-1], "predicted": step.seconds,
            "exposed": step.exposed, "straggler": step.straggler,
            "error": step.seconds / median - 1,
        })  # fmt: skip
    errors = [abs(row["error"]) for row in rows if row["held_out"]]
    return {
        "fit": vars(fitted), "job": vars(job), "rows": rows,
        "held_out_median_error": statistics.median(errors), "held_out_largest_error": max(errors),
    }  # fmt: skip


def table(results: dict[str, Any]) -> str:
    head = [
        "ranks", "link, Mbit/s", "", "measured, ms (p10 - p90)", "predicted, ms",
        "of it exposed all-reduce, straggler", "error",
    ]  # fmt: skip
    lines = [
        [
            str(row["ranks"]), str(row["rate_mbit"] or "none"),
            "held out" if row["held_out"] else "fitted",
            f"{row['measured'] * 1e3:.1f} ({row['p10'] * 1e3:.1f} - {row['p90'] * 1e3:.1f})",
            f"{row['predicted'] * 1e3:.1f}",
            f"{row['exposed'] * 1e3:.1f}, {row['straggler'] * 1e3:.1f}", f"{row['error']:+.1%}",
        ]
        for row in results["rows"]
    ]  # fmt: skip
    return (
        f"{markdown(head, lines)}\n\nHeld out: median error "
        f"{results['held_out_median_error']:.1%}, largest {results['held_out_largest_error']:.1%} "
        "(aim: at most 10 % and 20 %)."
    )


def head(results: dict[str, Any]) -> str:
    fitted, job, stub = results["fit"], results["job"], results["stub"]
    return (
        f"# The cost model, tried\n\n{results['cpu']}, {results['cores']} cores, hosts of "
        f"cluster/testbed.py with a rank each; {versions(results)}. A stub with sleeping compute, "
        f"{stub['layers']} layers of {stub['layer_bytes'] / 2**20:.3g} MiB of gradients; alone it "
        f"takes {(job['forward'] + job['backward'] + job['rest']) * 1e3:.1f} ms a step, standard "
        f"deviation {job['deviation'] * 1e3:.1f} ms. Medians of {stub['steps']} steps on all "
        f"ranks.\n\n"
        f"Fitted to all-reduces on {', '.join(map(str, RANKS))} ranks at "
        f"{', '.join(map(str, RATES))} Mbit/s, and to steps of one rank alone: fixed "
        f"{fitted['fixed'] * 1e6:.0f} µs, latency {fitted['latency'] * 1e6:.0f} µs, "
        f"{fitted['share']:.3f} of the link's rate (median error of the all-reduces "
        f"{fitted['error']:.1%}). The formulas are in benchmarks/cost_model.py."
    )


def plot(results: dict[str, Any], file: Path) -> None:
    """Predicted over measured steps; right predictions lie on the diagonal."""
    from benchmarks.figures import plt, save  # slow to import

    figure, axes = plt.subplots(figsize=(4.4, 4), layout="constrained")
    rows = results["rows"]
    ends = [0.9 * min(r["measured"] for r in rows), 1.15 * max(r["measured"] for r in rows)]
    ends = [end * 1e3 for end in ends]
    axes.fill_between(
        ends, [0.9 * e for e in ends], [1.1 * e for e in ends], color="0.9", label="10 % off"
    )
    axes.plot(ends, ends, color="0.5", linewidth=1)
    markers = {1: "o", 2: "s", 4: "^", 8: "D"}
    for row in rows:
        measured, held_out = row["measured"] * 1e3, row["held_out"]
        axes.errorbar(
            measured, row["predicted"] * 1e3, marker=markers.get(row["ranks"], "x"), markersize=6,
            xerr=[[max(0, measured - row["p10"] * 1e3)], [max(0, row["p90"] * 1e3 - measured)]],
            color="C3" if held_out else "C0", fillstyle="full" if held_out else "none",
            linewidth=0.8, capsize=2,
        )  # fmt: skip
    for count in sorted({row["ranks"] for row in rows}):
        axes.plot([], [], markers.get(count, "x"), color="0.3", fillstyle="none",
                  label=f"{count} rank{'s' if count > 1 else ''}")  # fmt: skip
    axes.plot([], [], "s", color="C0", fillstyle="none", label="fitted")
    axes.plot([], [], "s", color="C3", label="held out")
    axes.set(xscale="log", yscale="log", xlim=ends, ylim=ends)
    ticks = [t for t in (100, 200, 300, 500, 1000, 2000, 3000, 5000) if ends[0] <= t <= ends[1]]
    for axis in (axes.xaxis, axes.yaxis):
        axis.set_ticks(ticks, [f"{t:,}" for t in ticks])
        axis.set_ticks([], minor=True)
    axes.set_xlabel("measured step, ms (p10 to p90)")
    axes.set_ylabel("predicted step, ms")
    axes.legend()
    save(figure, file)


@ends_in_a_line
def main() -> int:
    parser = Parser(
        prog="python -m benchmarks.predict_proof", description=__doc__.partition("\n")[0]
    )
    parser.add_argument("--steps", type=int, default=STUB["steps"], help="of each (%(default)s)")
    parser.add_argument("--repeats", type=int, default=7, help="of all-reduces (%(default)s)")
    parser.add_argument("--out", type=Path, default=RESULTS)
    arguments = parser.parse_args()
    stub = STUB | {"steps": arguments.steps}
    if problem := missing():
        raise Refusal(problem)
    results = {**hardware(), "stub": stub, "repeats": arguments.repeats, "measured": []}
    name = f"predict_{slug(results['cpu'])}"
    file, results = continued(results, arguments.out, name, "measured")
    with tells_what_is_kept(file):
        experiment(results, lambda: write_json(results, file))
    results |= compare(results["measured"], stub)
    results |= {"published": published.rows(), "finished": True}
    write_json(results, file)
    plot(results, file.with_suffix(""))
    text = f"{head(results)}\n\n{table(results)}\n\n{published.table(results['published'])}\n"
    write_text(file.with_suffix(".md"), text)
    print(f"{text}\nwritten to {file}, .md, .png, .svg")
    return 0


if __name__ == "__main__":
    sys.exit(main())

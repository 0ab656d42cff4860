"""The bandwidth of all-reduces between the ranks of some hosts, from 4 KiB to 256 MiB.

    make bench-allreduce                                        2 ranks on this host
    make bench-allreduce HOSTS=node1:4,node2:4 NETWORK=25gbit   others; NETWORK is a name for files
    make bench-allreduce ARGS="--largest 16777216 --repeats 5"

Algorithm bandwidth is bytes / seconds. Bus bandwidth is 2 (n - 1) / n times that: what each link of
a ring of n ranks carries, which can be compared with the link's rate for any n, where hosts have
one rank: those with several send less over Gloo (cluster/shared_memory.h). Sums of float32. A
repetition takes as long as its slowest rank, for which training waits; the table has medians, and
the 10th and 90th percentile. Each all-reduce is timed by itself: overlap with compute is not
measured. What a rank does is in benchmarks/allreduce_worker.py. JSON, a table (Markdown, CSV) and a
plot (PNG, SVG) go to benchmarks/results/, where `make predict` finds them. Ctrl-C keeps the
repetitions that are whole, and the same command goes on.
"""

from __future__ import annotations

import csv
import io
import statistics
import sys
from pathlib import Path
from typing import Any

from benchmarks import load
from benchmarks.files import (
    RESULTS,
    continued,
    markdown,
    measure_alone,
    slug,
    unused,
    write_json,
    write_text,
)
from benchmarks.hardware import software, versions
from benchmarks.launching import Parser, ask, ends_in_a_line, tells_what_is_kept
from benchmarks.workers import launched
from cluster.hostfile import add_arguments, chosen, given
from cluster.hosts import Host, Refusal
from cluster.ranks import used

KIB, MIB = 2**10, 2**20
SIZES = [4 * KIB * 4**n for n in range(11)]  # bytes, to 4 GiB
UNFINISHED = "unfinished-allreduce"  # a file of this name is none for who looks for results


def bandwidths(sizes: list[int], seconds: list[list[float]], count: int) -> list[dict[str, float]]:
    """A row for each size: median and spread of its times, and MB/s at the median."""
    rows = []
    for size, times in zip(sizes, seconds):
        deciles = statistics.quantiles(times, n=10, method="inclusive") if len(times) > 1 else times
        median = statistics.median(times)
        rows.append({
            "bytes": size, "seconds": median, "seconds_p10": deciles[0], "seconds_p90": deciles[-1],
            "algorithm_mb_s": round(size / median / 1e6, 3),
            "bus_mb_s": round(2 * (count - 1) / count * size / median / 1e6, 3),
        })  # fmt: skip
    return rows


def readable(size: int) -> str:
    """As "4 B", "5.06 KiB", "256 MiB"."""
    if size < KIB:
        return f"{size} B"
    number, unit = (size / MIB, "MiB") if size >= MIB else (size / KIB, "KiB")
    return f"{number:.0f} {unit}" if number >= 100 else f"{number:.3g} {unit}"


def table(results: dict[str, Any]) -> str:
    head = ["size", "ms", "p10 - p90", "algorithm MB/s", "bus MB/s"]
    lines = [
        [
            readable(row["bytes"]), f"{row['seconds'] * 1e3:.3f}",
            f"{row['seconds_p10'] * 1e3:.3f} - {row['seconds_p90'] * 1e3:.3f}",
            f"{row['algorithm_mb_s']:.1f}", f"{row['bus_mb_s']:.1f}",
        ]
        for row in results["sizes"]
    ]  # fmt: skip
    return markdown(head, lines)


def head(results: dict[str, Any]) -> str:
    hosts = ",".join(f"{host['name']}:{host['slots']}" for host in results["hosts"])
    kinds = dict.fromkeys(
        f"{results['device'] or machine['cpu']}, {machine['cores']} cores"
        for machine in results["machines"]
    )
    return (
        f"All-reduce of float32 over {results['operations']}, {len(results['ranks'])} ranks on "
        f"{hosts}, {results['network']}: {' + '.join(kinds)}; {versions(results)}. Medians of "
        f"{results['repeats']} repetitions, each the time of its slowest rank."
        f"{load.warning(results.get('busy_before', 0))}"
    )


def plot(results: dict[str, Any], file: Path) -> None:
    from benchmarks.figures import plt, save, title  # slow to import

    figure, axes = plt.subplots(figsize=(5, 3.4), layout="constrained")
    rows = results["sizes"]
    sizes = [row["bytes"] for row in rows]
    # Open squares, in which the points of the bus bandwidth show: on 2 ranks both are equal.
    algorithm = [row["algorithm_mb_s"] for row in rows]
    axes.plot(
        sizes, algorithm, "s--", color="0.45", markersize=8, fillstyle="none", linewidth=1,
        label="algorithm bandwidth",
    )  # fmt: skip
    bus = [row["bus_mb_s"] for row in rows]
    below = [row["bus_mb_s"] * (1 - row["seconds"] / row["seconds_p90"]) for row in rows]
    above = [row["bus_mb_s"] * (row["seconds"] / row["seconds_p10"] - 1) for row in rows]
    axes.errorbar(
        sizes, bus, yerr=[below, above], marker="o", markersize=4, capsize=2.5, linewidth=1.2,
        label="bus bandwidth, p10 to p90",
    )  # fmt: skip
    axes.set_xscale("log", base=2)
    axes.set_yscale("log")
    axes.set_xticks(sizes, [readable(size) for size in sizes], rotation=45, ha="right", size=8)
    axes.set_xlabel("size of the all-reduce")
    axes.set_ylabel("MB/s")
    caption = (
        f"{len(results['ranks'])} ranks, {len(results['hosts'])} "
        f"host{'s' if len(results['hosts']) > 1 else ''}, {results['network']}, "
        f"{results['operations']}, {results['device'] or results['cpu']}"
    )
    axes.set_title(title(caption, 5))
    axes.grid(True, which="major", alpha=0.3)
    axes.legend(loc="lower right")
    save(figure, file)


def file_name(results: dict[str, Any]) -> str:
    hosts = len(results["hosts"])
    label = f"{hosts}-hosts-" if hosts > 1 else ""
    kind = slug(results["device"] or results["cpu"])
    network = slug(results["network"])
    return f"allreduce_{label}{len(results['ranks'])}-ranks_{network}_{kind}_{results['date'][:10]}"


def write(results: dict[str, Any], folder: Path) -> Path:
    file = unused(folder / f"{file_name(results)}.json")
    write_json(results, file)  # first: the other files can be made from it
    plot(results, file.with_suffix(""))
    write_text(file.with_suffix(".md"), f"{head(results)}\n\n{table(results)}\n")
    rows = io.StringIO()
    writer = csv.DictWriter(rows, list(results["sizes"][0]), lineterminator="\n")
    writer.writeheader()
    writer.writerows(results["sizes"])
    write_text(file.with_suffix(".csv"), rows.getvalue())
    return file


def facts(hosts: list[Host]) -> dict[str, Any]:
    """What the times depend on: the hardware of the hosts that take part (this one need not be
    among them), their other load, and the software, which is the same on all. "machines" lists the
    hosts in their order; the top level repeats the first.

    Raises:
        Failed: when a host does not answer.
    """
    hardware = ask(hosts, "benchmarks.hardware").values()
    loads = ask(hosts, "benchmarks.load").values()
    busy = max(max(load["busy"], load["gpu_busy"] or 0) for load in loads)
    keys = ("cpu", "cores", "memory_gib", "gpus")
    machines = [{key: host[key] for key in keys} for host in hardware]
    return {**machines[0], "busy_before": busy, **software(), "machines": machines}


def measure(begun: dict[str, Any], part: Path, where: list[str]) -> None:
    """The repetitions that are not there yet; after each, all of them are written to `part`."""

    def keep(answer: dict[str, Any]) -> None:
        begun["repetitions"].append(answer)
        write_json(begun, part)

    if missing := begun["repeats"] - len(begun["repetitions"]):
        options = {"sizes": begun["bytes"], "repeats": missing}
        launched("benchmarks.allreduce_worker", options, where, each=keep)


def finished(begun: dict[str, Any]) -> dict[str, Any]:
    """The results of all repetitions."""
    results = {**begun, "finished": True}
    sizes, repetitions = results.pop("bytes"), results.pop("repetitions")
    ranks = repetitions[0]["ranks"]
    times = zip(*(repetition["seconds"] for repetition in repetitions))
    return {
        **results, "ranks": ranks, "operations": repetitions[0]["operations"],
        "device": repetitions[0]["device"],
        "sizes": bandwidths(sizes, [*map(list, times)], len(ranks)),
    }  # fmt: skip


@ends_in_a_line
def main() -> int:
    parser = Parser(prog="python -m benchmarks.allreduce", description=__doc__.partition("\n")[0])
    add_arguments(parser)
    parser.add_argument("--network", default="", help="what to call it in the results")
    parser.add_argument("--largest", type=int, default=256 * MIB, help="bytes (%(default)s)")
    parser.add_argument("--repeats", type=int, default=9, help="of each size (%(default)s)")
    parser.add_argument("--out", type=Path, default=RESULTS)
    arguments = parser.parse_args()
    hosts = chosen(arguments)
    used_hosts = used(hosts, arguments.np)
    count = sum(host.slots for host in used_hosts)
    if count < 2:
        raise Refusal("one rank: there is nobody to exchange numbers with; take NP=2 or more")
    if arguments.repeats < 1:
        raise Refusal(f"--repeats {arguments.repeats}: take 1 or more")
    sizes = [size for size in SIZES if size <= arguments.largest]
    if not sizes:
        raise Refusal(f"--largest {arguments.largest}: take {SIZES[0]} bytes or more")
    measure_alone(arguments.out)
    asked = {
        "hosts": [{"name": host.name, "slots": host.slots} for host in used_hosts],
        "network": arguments.network or ("network" if len(used_hosts) > 1 else "loopback"),
        **facts(hosts[: len(used_hosts)]),  # with all their slots, as a job's
        "repeats": arguments.repeats, "bytes": sizes, "repetitions": [],
    }  # fmt: skip
    part, begun = continued(asked, arguments.out, UNFINISHED, "repetitions")
    begun["busy_before"] = max(asked["busy_before"], begun["busy_before"])
    with tells_what_is_kept(part):
        measure(begun, part, given(arguments))
    results = finished(begun)
    file = write(results, arguments.out)
    part.unlink()
    print(f"{head(results)}\n\n{table(results)}\n\nwritten to {file}, .md, .csv, .png, .svg")
    return 0


if __name__ == "__main__":
    sys.exit(main())

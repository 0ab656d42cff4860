"""The results of benchmarks/scaling.py for readers: Markdown, CSV, a plot, the README's table.

    make bench-readme                                  the README's table from the newest result

Nothing is measured here, and no figure is typed.
"""

from __future__ import annotations

import argparse
import csv
import io
import json
import re
import sys
from collections import Counter
from collections.abc import Callable, Iterable
from pathlib import Path
from statistics import median
from typing import Any

from benchmarks import scaling_plot
from benchmarks.efficiency import Results, Row, rows, spread, spread_in_words
from benchmarks.files import RESULTS, markdown, write_json, write_text
from benchmarks.hardware import processors, versions
from benchmarks.overrides import accumulated
from benchmarks.scaling_predicted import predicted
from cluster.environment import ROOT

README = ROOT / "README.md"
BEGIN, END = "<!-- scaling: written by make bench-readme -->", "<!-- scaling: end -->"


def hardware_of(results: Results) -> str:
    """As "2 x 4 NVIDIA H100" or "AMD EPYC, 2 cores"."""
    machines = {host["machine"]: host for host in results["hosts"].values()}
    kinds = Counter(processors(host) for host in machines.values())
    return " + ".join(f"{count} x {kind}" if count > 1 else kind for kind, count in kinds.items())


def duration(seconds: float) -> str:
    """As "40 s", "12 min"."""
    return f"{seconds:.0f} s" if seconds < 100 else f"{seconds / 60:.0f} min"


COLUMNS: dict[str, Callable[[Row], str]] = {
    "scaling": lambda row: row.mode,
    "strategy": lambda row: row.strategy,
    "processes": lambda row: str(row.np),
    "batch a process": lambda row: str(row.batch),
    "ms a step": lambda row: spread(row.step_ms),
    "predicted": lambda row: spread(row.predicted_ms),
    "samples/s": lambda row: spread(row.samples_per_second),
    "s an epoch": lambda row: spread(row.epoch_seconds),
    "speed-up": lambda row: spread(row.speedup, 2),
    "efficiency": lambda row: spread(row.efficiency, 1, 100, " %"),
    "a step with / without communication": lambda row: spread(row.over_alone, 2),
    "take care": lambda row: ", ".join(row.marks),
}


def table(results: Results) -> str:
    return markdown(
        list(COLUMNS), [[show(row) for show in COLUMNS.values()] for row in rows(results)]
    )


def description(results: Results) -> str:
    settings, trial = results["settings"], results["trial"]
    hosts = ", ".join(f"{name}:{host['slots']}" for name, host in settings["hosts"].items())
    machines = {host["machine"] for host in results["hosts"].values()}
    note = " made of one machine" if len(machines) < len(results["hosts"]) else ""
    network = settings["network"] or ("loopback" if len(results["hosts"]) == 1 else _nics(results))
    together, repeats = accumulated(results["config"]), settings["repeats"]
    steps = f" of a batch each, of which {together} accumulate for an update," * (together > 1)
    measured = f"{trial['steps']} steps{steps}"
    if epochs := settings["epochs"]:
        measured = f"{epochs} whole epoch{'s' * (epochs > 1)}"
        measured += f", in steps{steps}" * (together > 1)
    job = " ".join(settings["arguments"]) or "the default job"
    smallest = settings["sizes"][0]
    text = (
        f"`{job}` ({trial['model']}) on {hosts}{note}: {hardware_of(results)}; {network}, "
        f"{trial['operations'] or 'torch.distributed'}; {settings['threads']} "
        f"thread{'s' * (settings['threads'] > 1)} a process. {versions(results)}. Medians of "
        f"{repeats} interleaved repeat{'s' * (repeats > 1)} of {measured} after a warm-up"
    )
    if repeats > 1:
        text += f"; in brackets {spread_in_words(repeats)}"
    if results.get("predicted"):
        source = ", ".join(results.get("predicted_from", [])) or "all-reduces of these hosts"
        text += f"; predicted (at best to at worst) from the smallest size and {source}"
        if any(each["mode"] == "strong" for each in results["predicted"]):
            text += ", under strong scaling with forward and backward in proportion to the batch"
    if smallest != 1:
        text += f"; speed-up and efficiency against {smallest} processes"
    return text + ("." if results["finished"] else "; not all runs are there yet.")


def _nics(results: Results) -> str:
    """The interfaces of all hosts, with their rates where known."""
    rates = {
        f"{name} {rate / 1000:g} Gbit/s" if rate else name
        for host in results["hosts"].values()
        for name, rate in host["nics"].items()
    }
    return ", ".join(sorted(rates))


STATISTICS = ("median", "min", "max")
PREDICTED = ("predicted_ms", "predicted_low_ms", "predicted_high_ms")


def as_csv(results: Results) -> str:
    """A line for each row, not rounded: the median, least and greatest of each quantity."""
    lists = [
        "step_ms", "samples_per_second", "epoch_seconds", "speedup", "efficiency", "over_alone"
    ]  # fmt: skip
    head = ["mode", "strategy", "np", "batch", "repeats"]
    output = io.StringIO()
    writer = csv.writer(output, lineterminator="\n")
    writer.writerow([*head, *(f"{n}_{s}" for n in lists for s in STATISTICS), *PREDICTED, "marks"])
    for row in rows(results):
        cells: list[Any] = [row.mode, row.strategy, row.np, row.batch, len(row.step_ms)]
        for name in lists:
            values = getattr(row, name)
            cells += [median(values), min(values), max(values)] if values else ["", "", ""]
        cells += row.predicted_ms or [""] * len(PREDICTED)
        writer.writerow([*cells, "; ".join(row.marks)])
    return output.getvalue()


def write(results: Results, file: Path) -> str:
    """Write the tables and the plot beside a result file, and then the file; the text to print."""
    curve, sources = predicted(results, RESULTS.glob("allreduce_*.json"))
    if curve:
        results |= {"predicted": curve, "predicted_from": sources}
    results.setdefault("predicted", [])
    body = f"{description(results)}\n\n{table(results)}\n"
    write_text(file.with_suffix(".md"), body)
    write_text(file.with_suffix(".csv"), as_csv(results))
    scaling_plot.draw(results, hardware_of(results), file.with_suffix(""))
    write_json(results, file)
    if not results["predicted"]:
        body += (
            "\nno predicted curve: it needs make bench-allreduce on these hosts (and with the same "
            "NETWORK), and horovod at a larger size with a core or GPU for each rank, "
            "with one all-reduce a batch\n"
        )
    return f"{body}\nwritten to {file.with_suffix('')}.json, .md, .csv, .png and .svg"


def newest(files: Iterable[Path]) -> Path | None:
    """The finished result with the latest date; None without any."""
    finished = {}
    for file in files:
        try:
            results = json.loads(file.read_text())
            if results["finished"]:
                description(results)  # what the README shows of it
                table(results)
                finished[results["date"], file.name] = file
        except (LookupError, TypeError, AttributeError, ValueError):
            continue  # half copied, or of an older form
    return finished[max(finished)] if finished else None


def readme_block(file: Path | None) -> str:
    if file is None:
        return "No result of `make bench` is in `benchmarks/results/` yet."
    results = json.loads(file.read_text())
    image = file.with_suffix(".png").relative_to(ROOT)
    return (
        f"{description(results)}\n\n{table(results)}\n\n"
        f"![Speed-up and efficiency by number of processes]({image})"
    )


def with_block(readme: str, block: str) -> str:
    pattern = re.compile(f"(?<={re.escape(BEGIN)}\n).*?(?={re.escape(END)})", re.S)
    text, count = pattern.subn(lambda _: f"\n{block}\n\n", readme)
    if count != 1:
        raise SystemExit(f"error: README.md: the markers {BEGIN} and {END} must be there once")
    return text


def main() -> None:
    argparse.ArgumentParser(
        prog="python -m benchmarks.scaling_report", description=__doc__.partition("\n")[0]
    ).parse_args()
    file = newest(RESULTS.glob("scaling_*.json"))
    write_text(README, with_block(README.read_text(), readme_block(file)))
    print(f"README.md: from {file.name if file else 'no result'}", file=sys.stderr)


if __name__ == "__main__":
    main()

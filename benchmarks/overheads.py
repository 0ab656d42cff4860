"""What the launcher, the doctor and the collectives cost on more and more ranks, and how it grows.

    make bench-overheads                        2, 4, 8, 16, 32 ranks on this host
    make bench-overheads NP="2 4 8 16" REPEATS=5

The job is a stub (overheads_worker.py) that imports what each rank needs, and calls the strategy's
collectives on little data. Each cost is given the law that fits it best: constant, log p, p,
p log p or p^2, each plus a constant; with fewer than four sizes none, as any law fits two or three.
All ranks share this host's cores, so what each of them computes grows with p here, and would not on
hosts of their own; and no network is between them.

Results go to benchmarks/results/ as JSON and as a Markdown table; Ctrl-C keeps them, and the same
command goes on.
"""

from __future__ import annotations

import json
import math
import os
import statistics
import subprocess
import sys
import time
from collections.abc import Callable
from pathlib import Path
from typing import Any

import numpy as np
from scipy.optimize import nnls

from benchmarks import load
from benchmarks.files import RESULTS, continued, markdown, slug, write_json, write_text
from benchmarks.hardware import hardware, versions
from benchmarks.launching import Failed, Parser, ends_in_a_line, say, tells_what_is_kept
from cluster.environment import ROOT

LAWS: dict[str, Callable[[float], float]] = {
    "log p": math.log2,
    "p": lambda p: p,
    "p log p": lambda p: p * math.log2(p),
    "p^2": lambda p: p * p,
}
WHAT = {
    "launch": "start and end of p processes that do nothing",
    "doctor": "make doctor, all that it checks",
    "lines": "collecting 10,000 lines of output from each rank",
    "import": "torch, Lightning, Horovod and Hydra, until the last rank has them",
    "init": "hvd.init()",
    "negotiation": "an all-reduce of 4 bytes",
    "models": "comparing the models of all ranks by a hash",
    "metric": "gathering the state of a metric, 100 numbers a rank",
    "anatomy": "gathering 200 steps of 6 phases",
    "checkpoint": "broadcast of a checkpoint of 16 MiB",
    "barrier": "a barrier",
    "end": "the end, from what rank 0 prints last to the launcher's exit",
}
BEGUN = "OVERHEADS_BEGUN"  # environment variable of the ranks: when the launcher was started
NOT_FIT = "\nnot fit: "  # a verdict of the doctor, which then leaves some checks out
MIN_SIZES = 4
LINES = 10_000  # enough to take longer than the difference between two launches
WORKER = ROOT / "benchmarks" / "overheads_worker.py"


def law(ranks: list[int], seconds: list[float]) -> str:
    """The one of LAWS whose curve a + b f(p), a, b >= 0, has the least relative error.

    A steeper law is taken only if it halves the squared error of a flatter one, as noise always
    fits some other law a little better. What grows by less than half from the first size to the
    last is called constant; what grows 1.5 times as much as p^2 to the last size, faster than p^2.
    """
    if len(ranks) < MIN_SIZES:
        return "?"
    if seconds[-1] < 1.5 * seconds[0]:
        return "constant"
    if seconds[-1] / seconds[-2] > 1.5 * (ranks[-1] / ranks[-2]) ** 2:
        return "faster than p^2"
    best, least_error = "", math.inf
    for name, f in LAWS.items():
        # Both sides are divided by the time: relative errors.
        matrix = np.array([[1 / took, f(p) / took] for p, took in zip(ranks, seconds)])
        error = nnls(matrix, np.ones(len(ranks)))[1] ** 2
        if error < least_error / 2:
            best, least_error = name, error
    return best


def timed(module: str, ranks: int, *command: str) -> tuple[float, str]:
    """Seconds that a command of cluster/ took on so many ranks, and what it printed.

    Raises:
        Failed: when it did not end well.
    """
    began = time.time()
    where = ["-np", str(ranks), "-H", f"localhost:{ranks}"]
    done = subprocess.run(
        [sys.executable, "-m", f"cluster.{module}", *where, *command], cwd=ROOT, text=True,
        stdout=subprocess.PIPE, stderr=subprocess.STDOUT,
        env={**os.environ, BEGUN: str(began), "PYTHONPATH": str(ROOT), "OMP_NUM_THREADS": "1"},
    )  # fmt: skip
    if done.returncode and NOT_FIT not in done.stdout:
        tail = "\n".join(done.stdout.splitlines()[-15:])
        raise Failed(f"{tail}\nerror: {ranks} ranks: {module} {' '.join(command)} failed")
    return time.time() - began, done.stdout


def measure(ranks: int) -> dict[str, float | None]:
    """Seconds of each of WHAT; None for the doctor where it finds this host unfit for this."""
    launch, _ = timed("horovodrun", ranks, "true")
    doctor, doctor_output = timed("doctor", ranks)
    printing, output = timed(
        "horovodrun", ranks, "sh", "-c", f"yes $(printf %080d 0) | head -{LINES}"
    )
    assert output.count("0" * 80) == LINES * ranks
    _, output = timed("horovodrun", ranks, sys.executable, str(WORKER))
    line = next(line for line in output.splitlines() if '"seconds"' in line)
    result = json.loads(line[line.index("{") :])
    assert result["ranks"] == ranks
    result["seconds"]["end"] = time.time() - result["done"]
    return {
        "launch": launch,
        "doctor": None if NOT_FIT in doctor_output else doctor,
        "lines": max(printing - launch, 1e-3),
        **result["seconds"],
    }


def table(results: dict[str, Any]) -> str:
    sizes = results["ranks"]
    lines = []
    for name, what in WHAT.items():
        times = {p: [run[name] for run in results["runs"][str(p)]] for p in sizes}
        medians = {
            p: statistics.median(seconds) for p, seconds in times.items() if None not in seconds
        }
        cells = [f"{1e3 * medians[p]:,.1f}" if p in medians else "not fit" for p in sizes]
        growth = law(list(medians), list(medians.values()))
        lines.append([what, *cells, growth])
    return markdown(["ms, at ranks", *map(str, sizes), "grows as"], lines)


@ends_in_a_line
def main() -> int:
    parser = Parser(description=__doc__.split("\n\n")[0])
    parser.add_argument("--ranks", type=int, nargs="+", default=[2, 4, 8, 16, 32])
    parser.add_argument("--repeats", type=int, default=3)
    parser.add_argument("--out", type=Path, default=RESULTS)
    arguments = parser.parse_args()
    if arguments.repeats < 1 or min(arguments.ranks) < 1:
        parser.error("--ranks and --repeats are counted from 1")
    results: dict[str, Any] = {
        "ranks": sorted(set(arguments.ranks)), "repeats": arguments.repeats, **hardware(),
    }  # fmt: skip
    results["runs"] = {str(ranks): [] for ranks in results["ranks"]}
    busy = load.before()["busy"]
    name = f"overheads_{slug(results['cpu'])}-{results['cores']}-cores"
    file, results = continued(results, arguments.out, name, "runs")
    results["busy_before"] = max(busy, results.get("busy_before", 0))
    with tells_what_is_kept(file):
        for repeat in range(arguments.repeats):
            for ranks in results["ranks"]:
                runs = results["runs"][str(ranks)]
                if len(runs) <= repeat:
                    say(f"  {ranks} ranks, {repeat + 1} of {arguments.repeats}")
                    runs.append(measure(ranks))
                    write_json(results, file)
    results["finished"] = True
    text = table(results)
    head = (
        f"What our own tools cost, all ranks on one host: {results['cpu']}, {results['cores']} "
        f"cores; {versions(results)}. Medians of {results['repeats']} interleaved repeats."
        f"{load.warning(results['busy_before'])}\n\n"
    )
    write_json(results, file)
    write_text(file.with_suffix(".md"), head + text + "\n")
    print(f"{text}\nwritten to {file} and .md")
    return 0


if __name__ == "__main__":
    sys.exit(main())

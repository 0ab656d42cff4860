"""The time from the launch to the first step, beside plain horovodrun, whose ranks import alone.

    make bench-start                            2, 4, 8 ranks on this host
    make bench-start NP="2 16" REPEATS=3 ARGS="experiment=denoiser"

Each of WAYS trains one step of the job, in turns. The table has the time until rank 0 reports that
step, the processor time of all processes and, where strace is installed, how often a rank looked up
a file, existing or not. Look-ups are counted in a run of their own, as strace slows it down. More
ranks than cores wait for one another. Files are in the page cache: an unused one is not measured.
Results go to benchmarks/results/; Ctrl-C keeps them, and the same command goes on.
"""

from __future__ import annotations

import os
import resource
import shutil
import signal
import statistics
import subprocess
import sys
import tempfile
import time
from collections.abc import Callable
from itertools import product
from operator import itemgetter
from pathlib import Path
from typing import Any

from benchmarks import load
from benchmarks.efficiency import spread, spread_in_words
from benchmarks.files import (
    RESULTS,
    continued,
    markdown,
    slug,
    whole_repeats,
    write_json,
    write_text,
)
from benchmarks.hardware import hardware, versions
from benchmarks.launching import Failed, Parser, ends_in_a_line, say, tells_what_is_kept
from benchmarks.overrides import refuse_ours
from cluster.environment import ROOT

LAUNCHER = [sys.executable, "-m", "cluster.horovodrun"]
WAYS = {  # command, and whether the ranks of a host share their imports
    "horovodrun": ([str(Path(sys.executable).with_name("horovodrun"))], "0"),
    "ours, each rank imports": (LAUNCHER, "0"),
    "ours": (LAUNCHER, "1"),
}
# Set for one step and nothing after it, and for a folder of its own.
ONE_STEP = ("trainer.max_steps", "trainer.max_epochs", "test", "log_dir", "run_dir")
STRACE = ["strace", "-f", "-qq", "-c", "-e", "trace=%file", "-o"]
FIRST_STEP = "epoch 1/"  # runs/progress.py, in the output of rank 0


def start(way: str, ranks: int, overrides: list[str], counts: Path | None) -> dict[str, float]:
    """Seconds to the first step, and of processors.

    Args:
        counts: a file for strace's counts of look-ups; None: without strace.

    Raises:
        Failed: when the job did not end well.
    """
    launcher, preload = WAYS[way]
    trace = [*STRACE, str(counts)] if counts else []
    before = resource.getrusage(resource.RUSAGE_CHILDREN)
    began = time.monotonic()
    with tempfile.TemporaryDirectory(prefix="bench-start-") as logs:
        limits = ["trainer.max_steps=1", "trainer.max_epochs=1", "test=false", f"log_dir='{logs}'"]
        job = [sys.executable, "template.py", *overrides, *limits]
        process = subprocess.Popen(
            [*trace, *launcher, "-np", str(ranks), "-H", f"localhost:{ranks}", *job], cwd=ROOT,
            env={**os.environ, "PRELOAD": preload}, text=True, stdin=subprocess.DEVNULL,
            stdout=subprocess.PIPE, stderr=subprocess.STDOUT, start_new_session=True,
        )  # fmt: skip
        assert process.stdout is not None
        lines, first_step = [], None
        try:
            for line in process.stdout:
                lines.append(line)
                if FIRST_STEP in line:
                    first_step = first_step or time.monotonic() - began
        except BaseException:
            os.killpg(process.pid, signal.SIGTERM)  # strace alone would leave the launcher
            process.wait()
            raise
    if process.wait() or first_step is None:
        raise Failed(f"{''.join(lines[-15:])}error: {way}, {ranks} ranks: no first step")
    after = resource.getrusage(resource.RUSAGE_CHILDREN)
    processors = after.ru_utime + after.ru_stime - before.ru_utime - before.ru_stime
    return {"first_step_s": first_step, "processors_s": processors}


def look_ups(way: str, ranks: int, overrides: list[str]) -> float:
    """System calls that name a file, divided by the number of ranks."""
    with tempfile.TemporaryDirectory(prefix="bench-start-") as folder:
        counts = Path(folder) / "counts"
        start(way, ranks, overrides, counts)
        # % time, seconds, usecs/call, calls, errors (empty where there are none), syscall
        rows = [line.split() for line in counts.read_text().splitlines()]
    calls = [row for row in rows if len(row) > 4 and row[3].isdecimal() and row[-1] != "total"]
    return sum(int(row[3]) for row in calls) / ranks


def run(results: dict[str, Any], keep: Callable[[], None]) -> None:
    """All runs that are not there yet: starts in turns, then look-ups; `keep` after each."""
    repeats, sizes, overrides = results["repeats"], results["ranks"], results["arguments"]
    results["runs"] = whole_repeats(results["runs"], len(sizes) * len(WAYS))
    existing = {(run["repeat"], run["ranks"], run["way"]) for run in results["runs"]}
    ways = list(WAYS)
    planned = [
        (repeat, ranks, ways[(repeat + turn) % len(ways)])  # each repeat begins with another
        for repeat, ranks, turn in product(range(repeats), sizes, range(len(ways)))
    ]
    planned = [turn for turn in planned if turn not in existing]
    if planned:
        start("ours", sizes[0], overrides, None)  # brings the files into the page cache
    for repeat, ranks, way in planned:
        times = start(way, ranks, overrides, None)
        results["runs"].append({"way": way, "ranks": ranks, "repeat": repeat, **times})
        keep()
        label = f"{ranks} ranks, {way}: {times['first_step_s']:.2f} s"
        say(f"repeat {repeat + 1} of {repeats}, {label}")
    for ranks, way in product(sizes, WAYS) if shutil.which("strace") else []:
        if f"{ranks} {way}" not in results["look_ups"]:
            results["look_ups"][f"{ranks} {way}"] = look_ups(way, ranks, overrides)
            keep()
            say(f"files are looked up: {ranks} ranks, {way}")
    results["finished"] = True
    keep()


def table(results: dict[str, Any]) -> str:
    lines = []
    for ranks in results["ranks"]:
        plain = None
        for way in WAYS:
            runs = [r for r in results["runs"] if (r["way"], r["ranks"]) == (way, ranks)]
            if not runs:
                continue
            firsts = [run["first_step_s"] for run in sorted(runs, key=itemgetter("repeat"))]
            plain = plain or firsts
            ratios = [mine / theirs for mine, theirs in zip(firsts, plain)]
            count = results["look_ups"].get(f"{ranks} {way}")
            lines.append([
                str(ranks), way, spread(firsts, 2),
                spread(ratios, 2),
                f"{statistics.median(run['processors_s'] for run in runs):.1f}",
                f"{count:,.0f}" if count else "",
            ])  # fmt: skip
    head = ["ranks", "", "s to the first step", "of horovodrun's", "s of processors"]
    return markdown([*head, "file look-ups a rank"], lines)


def description(results: dict[str, Any]) -> str:
    job = " ".join(["template.py", *results["arguments"]])
    return (
        f"From the launch of `{job}` to its first step, all ranks on one host: {results['cpu']}, "
        f"{results['cores']} cores. {versions(results)}. Medians of {results['repeats']} "
        "interleaved repeats; in "
        f"brackets {spread_in_words(results['repeats'])}; ratios within a repeat; "
        f"look-ups of one run.{load.warning(results.get('busy_before', 0))}"
    )


@ends_in_a_line
def main() -> int:
    parser = Parser(prog="python -m benchmarks.start", description=__doc__.partition("\n")[0])
    parser.add_argument("--np", type=int, nargs="+", default=[2, 4, 8], help="ranks")
    parser.add_argument("--repeats", type=int, default=5)
    parser.add_argument("--out", type=Path, default=RESULTS)
    parser.add_argument("overrides", nargs="*", help="of template.py, after --")
    arguments = parser.parse_args()
    if min(*arguments.np, arguments.repeats) < 1:
        parser.error("--np and --repeats are counted from 1")
    refuse_ours(arguments.overrides, dict.fromkeys(ONE_STEP, "nothing"), "make bench-start")
    results: dict[str, Any] = {
        "benchmark": "start", **hardware(), "arguments": arguments.overrides,
        "ranks": sorted(set(arguments.np)), "repeats": arguments.repeats,
        "runs": [], "look_ups": {},
    }  # fmt: skip
    busy = load.before()["busy"]
    name = f"start_{slug(results['cpu'])}-{results['cores']}-cores"
    file, results = continued(results, arguments.out, name, "runs", "look_ups")
    results["busy_before"] = max(busy, results.get("busy_before", 0))
    with tells_what_is_kept(file):
        run(results, lambda: write_json(results, file))
    text = f"{description(results)}\n\n{table(results)}\n"
    write_text(file.with_suffix(".md"), text)
    print(f"{text}\nwritten to {file} and .md")
    return 0


if __name__ == "__main__":
    sys.exit(main())

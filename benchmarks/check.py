"""Compare two results of `make bench`, and fail on a regression.

    make bench-check OLD=benchmarks/results/scaling_a.json NEW=benchmarks/results/scaling_b.json

A row has regressed when its median step is slower by more than `FLOOR` and chance does not explain
it: the p-value of a one-sided rank test (Mann and Whitney 1947) on the repeats is at most `CHANCE`.
The test leaves out the slowest repeat of OLD where there are five or more, as it may have hung. So
2 or 3 of 100 rows are called slower though nothing changed (simulated, lognormal noise of 7 %).

Exit status 0: no regression; 1: some, and the rows are named; 2: the files cannot be compared,
because one is unfinished, the job, hardware or settings differ, the machine itself has changed
speed, or there are too few repeats to know the noise. Versions, the commit, and keys of the
configuration that only one file has, may differ: they are what is compared.
"""

from __future__ import annotations

import itertools
import json
import math
import statistics
import sys
from pathlib import Path
from typing import Any

from scipy.stats import mannwhitneyu

from benchmarks.efficiency import MIN_REPEATS, Results, Row, rows
from benchmarks.launching import Parser, ends_in_a_line
from benchmarks.load import DRIFT
from benchmarks.scaling_plan import OURS
from cluster.hosts import Refusal

# Two launches of the same job differ by a few percent, in the placement of memory and the order of
# start: by more than the repeats within one file show.
FLOOR = 0.03
# The largest p-value of a regression; the second for fewer than five repeats: three against three
# reach no less than 1 in 20, four against four 1 in 70.
CHANCE, CHANCE_OF_FEW = 0.01, 0.05
# What must be equal for times to be comparable; NEW may have more sizes, strategies and modes.
SAME_SETTINGS = ("network", "threads", "batch_size", "warmup", "epochs")
SAME_HARDWARE = ("cpu", "cores", "memory_gib", "gpus", "nics")


def read(file: Path) -> Results:
    """A result file.

    Raises:
        Refusal: when there is none, or it is of something else.
    """
    try:
        results = json.loads(file.read_text())
    except OSError as error:
        raise Refusal(f"{file}: {error.strerror}; give a file of make bench") from None
    except ValueError:
        raise Refusal(f"{file}: no JSON; give a file of make bench") from None
    if not isinstance(results, dict) or results.get("benchmark") != "scaling":
        raise Refusal(f"{file}: not made by make bench; give one of scaling_*.json")
    if not results.get("finished"):
        raise Refusal(f"{file}: make bench was interrupted; the same command goes on with it")
    return results


def compare(old: Results, new: Results) -> tuple[list[str], list[str]]:
    """A line for each row of OLD, and for those that regressed.

    Raises:
        Refusal: when they cannot be compared.
    """
    for name, before, after in _conditions(old, new):
        if before != after:
            raise Refusal(f"not comparable: {name} was {before} and is {after}")
    _refuse_slower_machines(old, new)
    new_rows = {_name(row): row for row in rows(new)}
    lines, regressed = [], []
    for before in rows(old):
        name = _name(before)
        if name not in new_rows:
            raise Refusal(f"not comparable: {name} was not measured in NEW")
        after = new_rows[name]
        for row, label in ((before, "OLD"), (after, "NEW")):
            if len(row.step_ms) < MIN_REPEATS:
                repeats = f"{len(row.step_ms)} of the {MIN_REPEATS} repeats that tell its noise"
                raise Refusal(f"not comparable: {name} has {repeats} in {label}")
            if not all(0 < ms < math.inf for ms in row.step_ms):  # NaN is not, either
                raise Refusal(f"not comparable: {name} has a step of no measurable time in {label}")
        line, is_regression = _verdict(name, before, after)
        lines.append(line)
        regressed += [line] if is_regression else []
    return lines, regressed


def _verdict(name: str, before: Row, after: Row) -> tuple[str, bool]:
    was, now = statistics.median(before.step_ms), statistics.median(after.step_ms)
    change = now / was - 1
    slow, fast = (after, before) if change > 0 else (before, after)
    chance = _chance(slow.step_ms, fast.step_ms)
    allowed = CHANCE if min(len(slow.step_ms), len(fast.step_ms)) >= 5 else CHANCE_OF_FEW
    differs = abs(change) > FLOOR and chance <= allowed
    verdict = "as before" if not differs else "slower" if change > 0 else "faster"
    marks = "; ".join(
        f"{label}: {', '.join(row.marks)}"
        for label, row in (("OLD", before), ("NEW", after))
        if row.marks
    )
    line = (
        f"{name}: {was:.2f} -> {now:.2f} ms a step, {change:+.1%}; by chance in "
        f"{chance:.1%} of cases: {verdict}{f'  ({marks})' if marks else ''}"
    )
    return line, verdict == "slower"


def _chance(slow: list[float], fast: list[float]) -> float:
    """The p-value: how often repeats of equal speed would look at least as slow."""
    kept = sorted(fast)[:-1] if min(len(slow), len(fast)) >= 5 else fast
    return float(mannwhitneyu(slow, kept, alternative="greater", method="exact").pvalue)


def _name(row: Row) -> str:
    return f"{row.mode} {row.strategy} np={row.np}"


def _conditions(old: Results, new: Results) -> list[tuple[str, Any, Any]]:
    """What must not differ: (name, in OLD, in NEW)."""
    conditions = [(key, old["settings"][key], new["settings"][key]) for key in SAME_SETTINGS]
    conditions.append(("the environment", old["environment"], new["environment"]))
    conditions += _host_conditions(old["settings"], new["settings"])
    for name, host in old["hosts"].items():
        other = new["hosts"].get(name, {})
        conditions += [(f"{key} of {name}", host[key], other.get(key)) for key in SAME_HARDWARE]
    old_config, new_config = _flat(old["config"]), _flat(new["config"])
    # Left out: what the benchmark sets itself, for all runs alike.
    shared_keys = [
        key
        for key in old_config
        if key in new_config and key not in OURS and not key.startswith(("callbacks.", "logger."))
    ]
    return conditions + [(key, old_config[key], new_config[key]) for key in shared_keys]


def _host_conditions(old: dict[str, Any], new: dict[str, Any]) -> list[tuple[str, Any, Any]]:
    """Slots may differ, as NEW may have more sizes, if OLD's ranks are placed alike."""
    was, now = old["hosts"], new["hosts"]
    conditions: list[tuple[str, Any, Any]] = [("the list of hosts", ", ".join(was), ", ".join(now))]
    for name, key in itertools.product(was, ("gpus", "nic")):
        values = [hosts.get(name, {}).get(key) for hosts in (was, now)]
        before, after = ("not given" if value is None else value for value in values)
        conditions.append((f"{key} given for {name}", before, after))
    sizes = old["sizes"]
    return conditions + [
        (f"the place of NP={np}", _places(was, np), _places(now, np)) for np in sizes
    ]


def _places(hosts: dict[str, Any], np: int) -> str:
    """As node1:4,node2:2: hosts are filled in their order."""
    places = []
    for name, host in hosts.items():
        count = min(host["slots"], np)
        places += [f"{name}:{count}"] if count else []
        np -= count
    return ",".join(places)


def _refuse_slower_machines(old: Results, new: Results) -> None:
    for name in old["hosts"]:
        was, now = _arithmetic_ms(old, name), _arithmetic_ms(new, name)
        if abs(now / was - 1) > DRIFT:
            raise Refusal(
                f"not comparable: the same arithmetic took {was:.2f} ms on {name} and takes "
                f"{now:.2f}: the machine has changed; measure both again, one after the other"
            )


def _arithmetic_ms(results: Results, host: str) -> float:
    """The median of all runs of a host: how fast its cores were."""
    states = [run["hosts"][host] for run in results["runs"] if host in run["hosts"]]
    return statistics.median(state["arithmetic_ms"] for state in states)


def _flat(tree: dict[str, Any], prefix: str = "") -> dict[str, Any]:
    """{"data.batch_size": 32, ...}"""
    flat: dict[str, Any] = {}
    for key, value in tree.items():
        inner = isinstance(value, dict) and value
        flat |= _flat(value, f"{prefix}{key}.") if inner else {f"{prefix}{key}": value}
    return flat


@ends_in_a_line
def main() -> int:
    parser = Parser(prog="python -m benchmarks.check", description=__doc__.partition("\n")[0])
    parser.add_argument("old", type=Path, metavar="OLD")
    parser.add_argument("new", type=Path, metavar="NEW")
    arguments = parser.parse_args()
    if arguments.old.resolve() == arguments.new.resolve():
        raise Refusal(f"OLD and NEW are the same file, {arguments.old}: nothing to compare")
    try:
        lines, regressed = compare(read(arguments.old), read(arguments.new))
    except (LookupError, TypeError, AttributeError, ValueError, ArithmeticError) as error:
        raise Refusal(f"a file lacks what make bench writes: {error!r}") from None
    if regressed:
        lines += ["", f"regressed, {len(regressed)} of {len(lines)} rows:", *regressed]
    print("\n".join(lines))
    return 1 if regressed else 0


if __name__ == "__main__":
    sys.exit(main())

"""Compare two results of `make bench`, and fail on a regression.

    make bench-check OLD=benchmarks/results/scaling_a.json NEW=benchmarks/results/scaling_b.json

A row has regressed when its median step is slower by more than the noise of both files together
(benchmarks/efficiency.py says what noise is) and by more than `FLOOR`; or when even its fastest
repeat is slower than the slowest of OLD by more than `FLOOR`. Exit status: 0 without a regression,
1 with one, and the rows are named; 2 for files that cannot be compared: unfinished, another job,
other hardware, other settings, or too few repeats to know the noise. Versions and the commit may
differ: that is what is compared.
"""

from __future__ import annotations

import argparse
import json
import os
import statistics
import sys
from pathlib import Path
from typing import Any

from benchmarks.efficiency import MIN_REPEATS, Results, Row, noise, rows

# Placement of memory and order of start differ between two launches of the same job: by a few
# percent, more than its repeats within one file show.
FLOOR = 0.03
# What must be equal for times to be comparable; sizes, strategies and modes may be more in NEW.
SAME_SETTINGS = ("hosts", "network", "threads", "batch_size", "warmup", "epochs")
SAME_HARDWARE = ("cpu", "cores", "memory_gib", "gpus", "nics")


class Refusal(Exception):
    """Why two files cannot be compared, in one line."""


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
    if not rows(old):
        raise Refusal("not comparable: OLD has no runs")
    after_of = {_name(row): row for row in rows(new)}
    told, regressed = [], []
    for before in rows(old):
        name = _name(before)
        if name not in after_of:
            raise Refusal(f"not comparable: {name} was not measured in NEW")
        after = after_of[name]
        for row, which in ((before, "OLD"), (after, "NEW")):
            if len(row.step_ms) < MIN_REPEATS:
                few = f"{len(row.step_ms)} of the {MIN_REPEATS} repeats that tell its noise"
                raise Refusal(f"not comparable: {name} has {few} in {which}")
        line, is_regression = _verdict(name, before, after)
        told.append(line)
        regressed += [line] if is_regression else []
    return told, regressed


def _verdict(name: str, before: Row, after: Row) -> tuple[str, bool]:
    was, now = statistics.median(before.step_ms), statistics.median(after.step_ms)
    allowed = max(noise(before.step_ms) + noise(after.step_ms), FLOOR * was)
    change = now - was
    # One repeat that hung makes the noise large; the others still tell.
    slower = min(after.step_ms) - max(before.step_ms) > FLOOR * was or change > allowed
    faster = min(before.step_ms) - max(after.step_ms) > FLOOR * was or -change > allowed
    verdict = "slower" if slower else "faster" if faster else "as before"
    marks = "; ".join(
        f"{which}: {', '.join(row.marks)}"
        for which, row in (("OLD", before), ("NEW", after))
        if row.marks
    )
    line = (
        f"{name}: {was:.2f} -> {now:.2f} ms a step, {change / was:+.1%}; "
        f"noise and floor {allowed / was:.1%}: {verdict}{f'  ({marks})' if marks else ''}"
    )
    return line, slower


def _name(row: Row) -> str:
    return f"{row.mode} {row.strategy} np={row.np}"


def _conditions(old: Results, new: Results) -> list[tuple[str, Any, Any]]:
    """What must not differ: (name, in OLD, in NEW)."""
    found = [(key, old["settings"][key], new["settings"][key]) for key in SAME_SETTINGS]
    found.append(("the environment", old["environment"], new["environment"]))
    found.append(("the machines", list(old["hosts"]), list(new["hosts"])))
    for name, host in old["hosts"].items():
        other = new["hosts"].get(name, {})
        found += [(f"{key} of {name}", host[key], other.get(key)) for key in SAME_HARDWARE]
    one, two = _flat(old["config"]), _flat(new["config"])
    found += [(key, one.get(key), two.get(key)) for key in dict.fromkeys([*one, *two])]
    return found


def _flat(tree: dict[str, Any], above: str = "") -> dict[str, Any]:
    """{"data.batch_size": 32, ...}"""
    found: dict[str, Any] = {}
    for key, value in tree.items():
        inner = isinstance(value, dict) and value
        found |= _flat(value, f"{above}{key}.") if inner else {f"{above}{key}": value}
    return found


def main() -> int:
    parser = argparse.ArgumentParser(
        prog="python -m benchmarks.check", description=__doc__.partition("\n")[0]
    )
    parser.add_argument("old", type=Path, metavar="OLD")
    parser.add_argument("new", type=Path, metavar="NEW")
    arguments = parser.parse_args()
    try:
        told, regressed = compare(read(arguments.old), read(arguments.new))
    except Refusal as refusal:
        print(f"error: {refusal}", file=sys.stderr)
        return 2
    except (LookupError, TypeError, AttributeError, ValueError, ArithmeticError) as error:
        print(f"error: a file lacks what make bench writes: {error!r}", file=sys.stderr)
        return 2
    if regressed:
        told += ["", f"regressed, {len(regressed)} of {len(told)} rows:", *regressed]
    try:
        print("\n".join(told), flush=True)
    except BrokenPipeError:
        os.dup2(os.open(os.devnull, os.O_WRONLY), sys.stdout.fileno())  # lest Python fails at exit
        print("error: who reads this went away before its end", file=sys.stderr)
        return 2
    return 1 if regressed else 0


if __name__ == "__main__":
    sys.exit(main())

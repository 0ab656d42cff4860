"""From the runs of benchmarks/scaling.py to the rows of its table: arithmetic, nothing is started.

The step time t of a run is the mean over its measured steps, in ms, without what happens between
two epochs (runs/anatomy.py). A row has one for each repeat.

    samples/s    n x b / t with n processes and b samples a process and step. Where the last batch
                 of an epoch is smaller, the mean of the measured batches replaces n x b: of d
                 samples an epoch has s = ceil(ceil(d / n) / b) steps, and the last of them gets
                 d - (s - 1) x n x b
    speed-up     samples/s on n processes / samples/s on n0, the smallest size measured
    efficiency   speed-up x n0 / n

The same holds under weak scaling (b constant) and strong scaling (n x b constant). Speed-up and
efficiency are ratios within a repeat, whose runs are neighbours in time, so that slow changes of
the machine cancel out; the table has their median. Beside it stands the confidence interval of the
sign test, which assumes nothing about the distribution: it contains the true median with at least
95 % probability. Of up to eight repeats it is the whole range, which cannot do better than 94 % for
five repeats, and 75 % for three.

Where a machine has more ranks than cores, these figures say nothing about communication. Such a
size is marked "oversubscribed", and instead has the ratio of a step with communication to one
without: the same number of processes, each training alone at the same time. It is of median steps,
as those processes do not start together; of mean ones where batches accumulate, as the median batch
sends nothing then.
"""

from __future__ import annotations

import math
import statistics
from dataclasses import dataclass, field
from typing import Any

from scipy.stats import binom

from benchmarks.load import BUSY_SHARE, DRIFT, HEAT_SHARE, STEAL_SHARE
from benchmarks.overrides import accumulated

MIN_REPEATS = 3  # two that happen to agree show no noise
Results = dict[str, Any]
Run = dict[str, Any]


@dataclass
class Row:
    """What was measured at one size; lists have a value for each repeat.

    Attributes:
        mode: weak or strong.
        batch: samples a process takes a step.
        speedup, efficiency: empty at oversubscribed sizes.
        over_alone: a step with communication / without; empty at all other sizes.
        predicted_ms: of a step, from the smallest size (benchmarks/scaling_predicted.py): likely,
            at best, at worst; empty where nothing is predicted.
        marks: what a reader must know before using the figures.
    """

    mode: str
    strategy: str
    np: int
    batch: int
    step_ms: list[float]
    samples_per_second: list[float]
    epoch_seconds: list[float] = field(default_factory=list)
    speedup: list[float] = field(default_factory=list)
    efficiency: list[float] = field(default_factory=list)
    over_alone: list[float] = field(default_factory=list)
    predicted_ms: list[float] = field(default_factory=list)
    marks: list[str] = field(default_factory=list)


def interval(values: list[float]) -> tuple[float, float]:
    """The 95 % confidence interval of the median, by the sign test; of up to eight values the
    range. One value says nothing of its noise (see `MIN_REPEATS`): both ends are that value."""
    count, ordered = len(values), sorted(values)
    # The number of values below the true median is distributed as that of heads among coins.
    excluded = max(0, int(binom.ppf(0.025, count, 0.5)) - 1)
    return ordered[excluded], ordered[count - 1 - excluded]


def spread(
    values: list[float], digits: int | None = None, factor: float = 1, unit: str = ""
) -> str:
    """The median, and the interval in brackets if values differ, as "88.78 (88.36 to 93.66)"; empty
    for no values. `digits` after the point, by default 4 significant ones."""
    if not values:
        return ""
    if digits is None:
        digits = max(0, 3 - math.floor(math.log10(statistics.median(values))))
    middle, *ends = (
        f"{factor * value:,.{digits}f}" for value in (statistics.median(values), *interval(values))
    )
    brackets = f" ({' to '.join(ends)})" if len(set(values)) > 1 else ""
    return f"{middle}{brackets}{unit}"


def spread_in_words(repeats: int) -> str:
    """The brackets of `spread`, described."""
    return "their range" if repeats <= 8 else "the 95 % interval of the median"


def batch_of(mode: str, batch_size: int, np: int) -> int:
    """Samples a process and step: data.batch_size under weak scaling, 1 / np of it under strong."""
    return batch_size if mode == "weak" else batch_size // np


def steps_per_epoch(results: Results, np: int, batch: int) -> int:
    """Batches of each process in an epoch, within trainer.limit_train_batches."""
    steps = _batches(results["trial"], np, batch)
    limit = results["config"].get("trainer", {}).get("limit_train_batches")
    if limit is None:
        return steps
    return min(steps, limit) if isinstance(limit, int) else int(steps * limit)


def _batches(trial: dict[str, Any], np: int, batch: int) -> int:
    """Batches in a process's share of the data; the last may be smaller, or dropped (drop_last)."""
    share = math.ceil(trial["train_samples"] / np)
    return share // batch if trial.get("drop_last") else math.ceil(share / batch)


def runs_of(results: Results, strategy: str, np: int, batch: int, alone: bool) -> dict[int, Run]:
    """The runs of one job, by repeat."""
    wanted = (strategy, np, batch, alone)
    return {
        run["repeat"]: run
        for run in results["runs"]
        if (run["strategy"], run["np"], run["batch"], run["alone"]) == wanted
    }


def samples_per_second(results: Results, run: Run) -> float:
    np, batch, trial = run["np"], run["batch"], results["trial"]
    samples = np * batch
    if trial["train_samples"] and not trial.get("drop_last"):
        steps = steps_per_epoch(results, np, batch)
        if steps == _batches(trial, np, batch):
            missing = steps * samples - trial["train_samples"]  # in the last batch of an epoch
            samples -= missing * _ends_of_epochs(results, steps)
    return samples / run["step_ms"] * 1e3


def _ends_of_epochs(results: Results, steps: int) -> float:
    """The share of the measured batches that are the last of an epoch of `steps` batches."""
    settings = results["settings"]
    if settings["epochs"]:
        return 1 / steps
    first, measured = settings["warmup"], results["trial"]["steps"]
    return ((first + measured) // steps - first // steps) / measured


def rows(results: Results) -> list[Row]:
    """All rows that have a run, in the order of the table."""
    settings, measured = results["settings"], []
    for mode in settings["modes"]:
        for strategy in settings["strategies"]:
            for np in settings["sizes"]:
                row = _row(results, mode, strategy, np)
                measured += [row] if row else []
    return measured


def _row(results: Results, mode: str, strategy: str, np: int) -> Row | None:
    settings = results["settings"]
    batch = batch_of(mode, settings["batch_size"], np)
    runs = runs_of(results, strategy, np, batch, alone=False)
    if not runs:
        return None
    rates = _rates(results, strategy, np, batch)
    times = [run["step_ms"] for run in runs.values()]
    row = Row(mode, strategy, np, batch, times, list(rates.values()))
    if results["trial"]["train_samples"]:
        row.epoch_seconds = [steps_per_epoch(results, np, batch) * time / 1e3 for time in times]
    for each in results.get("predicted", []):
        matches = (each["mode"], each["strategy"], each["np"]) == (mode, strategy, np)
        if matches and np != settings["sizes"][0]:
            row.predicted_ms = [each[key] for key in ("step_ms", "low_ms", "high_ms")]
    alone: dict[int, Run] = {}
    if np in results["oversubscribed"]:
        alone = runs_of(results, "horovod", np, batch, alone=True)
        ms = "step_ms" if accumulated(results["config"]) > 1 else "median_ms"
        row.over_alone = [runs[r][ms] / alone[r][ms] for r in runs if r in alone]
    else:
        smallest = settings["sizes"][0]
        base = _rates(results, strategy, smallest, batch_of(mode, settings["batch_size"], smallest))
        row.speedup = [rates[repeat] / base[repeat] for repeat in rates if repeat in base]
        row.efficiency = [value * smallest / np for value in row.speedup]
    first = settings["strategies"][0]
    first_rates = _rates(results, first, np, batch) if strategy != first else {}
    ratios = [rates[repeat] / first_rates[repeat] for repeat in rates if repeat in first_rates]
    marks = _marks(results, row, list(runs.values()), list(alone.values()))
    row.marks = [*marks, *_unclear(f"as {first}", ratios)]
    return row


def _rates(results: Results, strategy: str, np: int, batch: int) -> dict[int, float]:
    runs = runs_of(results, strategy, np, batch, alone=False)
    return {repeat: samples_per_second(results, run) for repeat, run in runs.items()}


def _marks(results: Results, row: Row, runs: list[Run], alone: list[Run]) -> list[str]:
    """The marks of a row from its runs, and from the runs `alone` that they are compared with."""
    marks = ["oversubscribed"] if row.np in results["oversubscribed"] else []
    if len(runs) < MIN_REPEATS:
        marks.append(f"{len(runs)} repeat" + "s" * (len(runs) > 1))
    hosts = [host for run in [*runs, *alone] for host in run["hosts"].values()]
    on_gpus = any(host["gpus"] for host in results["hosts"].values())
    busy = max(max(host["busy"], (on_gpus and host["gpu_busy"]) or 0) for host in hosts)
    if busy > BUSY_SHARE:
        marks.append(f"other load {busy:.0%}")
    stolen = max(host["stolen"] for host in hosts)
    if stolen > STEAL_SHARE:
        marks.append(f"stolen {stolen:.0%}")
    hot = max((on_gpus and host.get("gpu_slowed")) or 0 for host in hosts)
    if hot > HEAT_SHARE:
        marks.append(f"GPU slowed by heat {hot:.0%}")
    drift = max(_drift(results, run) for run in [*runs, *alone])
    if drift > DRIFT:
        marks.append(f"cores {drift:.0%} slower")
    if row.np != results["settings"]["sizes"][0]:
        marks += _unclear("as ideal", row.efficiency)
    return marks + _unclear("as without communication", row.over_alone)


def _drift(results: Results, run: Run) -> float:
    """By how much the slowest host's arithmetic took longer than at its fastest."""
    fastest = {
        name: min(
            each["hosts"][name]["arithmetic_ms"]
            for each in results["runs"]
            if name in each["hosts"]
        )
        for name in run["hosts"]
    }
    return max(host["arithmetic_ms"] / fastest[name] - 1 for name, host in run["hosts"].items())


def _unclear(what: str, ratios: list[float]) -> list[str]:
    """A mark where the interval contains 1, so that no difference is shown."""
    low, high = interval(ratios) if ratios else (0, 0)
    return [f"{what} within noise"] if low <= 1 <= high and low < high else []

"""The trials of a sweep: how each ended, what it gave, and the tables of all."""

from __future__ import annotations

import csv
import json
import math
import re
from collections.abc import Callable
from dataclasses import dataclass, field
from pathlib import Path

from runs.folders import shown
from runs.refusal import Refusal, guess_metric

LINE_OF_A_RANK = re.compile(r"^\[\d+\]<\w+>:")


@dataclass
class Trial:
    """One training of a sweep.

    Attributes:
        number: from 1.
        changes: the configuration, as on the command line.
        state: waiting, running, done, failed or stopped.
        folder: of its run.
        value: the best of the metric over its epochs.
        tests: the metrics of its test.
        seconds: that it took; None until it has ended.
        exit: status of the launcher.
        reason: why it failed, or has no value.
    """

    number: int
    changes: list[str]
    state: str = "waiting"
    folder: str = ""
    value: float | None = None
    tests: dict[str, float] = field(default_factory=dict)
    seconds: float | None = None
    exit: int | None = None
    reason: str = ""


def judge(trial: Trial, metric: str, mode: str) -> bool:
    """Fill in what a trial gave, by its summary and curves; whether they have the metric.

    Raises:
        Refusal: when they are not on this host, as then those of no trial are.
    """
    folder = Path(trial.folder)
    try:
        metrics = json.loads((folder / "summary.json").read_text())["metrics"]
        # In the summary null stands for what is not finite.
        numbers = {name: v for name, v in metrics.items() if v is not None}
    except FileNotFoundError:
        raise Refusal(
            f"{shown(folder)}/summary.json: trial {trial.number} ended well and left none here: "
            "start the sweep on the host of rank 0, the first of HOSTS"
        ) from None
    except (ValueError, AttributeError, KeyError, TypeError):
        raise Refusal(
            f"{shown(folder)}/summary.json is not a summary of a run: delete it, and trial "
            f"{trial.number} is run again"
        ) from None
    values = {name: [numbers[name]] if name in numbers else [] for name in metrics}
    if (folder / "metrics.csv").exists():
        with (folder / "metrics.csv").open(newline="") as file:
            for row in csv.DictReader(file):
                for name, value in row.items():
                    if value:
                        values.setdefault(name, []).append(float(value))
    finite = [value for value in values.get(metric, ()) if math.isfinite(value)]
    trial.tests = {k: v for k, v in numbers.items() if k.startswith("test/")}
    trial.value = (min if mode == "min" else max)(finite) if finite else None
    trial.reason = "" if finite else f"{metric} was never a finite number"
    if metric not in values:
        names = sorted(values.keys() - {"epoch", "step"})
        trial.reason = f"no {metric}; it has {', '.join(names)}{guess_metric(metric, names)}"
    return metric in values


def best_of(trials: list[Trial], mode: str) -> Trial | None:
    """The best trial, the first among equals; None if none has a value."""
    valued = [trial for trial in trials if trial.value is not None]
    sign = 1 if mode == "min" else -1
    return min(valued, key=lambda trial: sign * (trial.value or 0), default=None)


def reason(output: Path) -> str:
    """The most telling line of a failed trial's output: its last error, else its last line."""
    lines = [
        LINE_OF_A_RANK.sub("", line) for line in output.read_text(errors="replace").split("\n")
    ]
    lines = [line.strip() for line in lines if line.strip()]
    errors = [line for line in lines if re.match(r"(error|[\w.]*(Error|Exception)): ", line)]
    return (errors or lines or ["no output"])[-1][:300]


def write_results(
    folder: Path, trials: list[Trial], keys: list[str], metric: str, mode: str, again: str | None
) -> None:
    """results.csv in the order of the trials, and results.md with the best first."""
    tests = sorted({name for trial in trials for name in trial.tests} - {metric})
    header = ["trial", "state", *keys, metric, *tests, "seconds", "reason", "folder"]
    with (folder / "results.csv").open("w", newline="") as file:
        csv.writer(file).writerows([header, *(_row(trial, keys, tests, str) for trial in trials)])
    sign = 1 if mode == "min" else -1
    ranked = sorted(trials, key=lambda t: sign * t.value if t.value is not None else math.inf)
    table = [header[:-1], ["---"] * len(header[:-1])]
    table += [_row(trial, keys, tests, "{:.4g}".format)[:-1] for trial in ranked]
    lines = [f"| {' | '.join(cell.replace('|', '/') for cell in row)} |" for row in table]
    title = f"Trials by {mode} {metric}: its best value over the epochs of a trial."
    best = ["", "The best again:", "", f"    {again}"] if again else []
    (folder / "results.md").write_text("\n".join([title, "", *lines, *best]) + "\n")


def _row(
    trial: Trial, keys: list[str], tests: list[str], form: Callable[[float], str]
) -> list[str]:
    changes = dict(change.partition("=")[::2] for change in trial.changes)
    numbers = [trial.value, *(trial.tests.get(name) for name in tests), trial.seconds]
    written = ["" if number is None else form(number) for number in numbers]
    start = [str(trial.number), trial.state, *(changes.get(key, "") for key in keys)]
    return [*start, *written, trial.reason, trial.folder]

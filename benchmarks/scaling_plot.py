"""The plot of benchmarks/scaling.py: speed-up and efficiency by number of processes.

Points are medians with the interval of efficiency.py; strategies stand beside each other. Dashed:
the results' "predicted", with its range. Hollow: sizes with more ranks than cores, whose efficiency
is a step without communication over one with it. Made for print: 7 inches wide, the colours of
Okabe and Ito for the colour-blind, another symbol for each strategy. Beneath stands what a reader
must know first, as other load.
"""

from __future__ import annotations

from pathlib import Path
from statistics import median
from typing import Any

from matplotlib.axes import Axes

from benchmarks.efficiency import Results, Row, batch_of, interval, rows
from benchmarks.figures import plt, save, title

STYLES = [("#0072B2", "o"), ("#D55E00", "s"), ("#009E73", "^")]
HOLLOW: dict[str, Any] = {"markerfacecolor": "white", "linestyle": ":"}


def draw(results: Results, hardware: str, name: Path) -> None:
    """A row of two panels for each mode, into name.png and name.svg."""
    settings, cautions = results["settings"], _cautions(results)
    lines = len(cautions.splitlines())
    figure, grid = plt.subplots(
        len(settings["modes"]), 2, squeeze=False, layout="constrained",
        figsize=(7, 0.3 + 2.6 * len(settings["modes"]) + 0.11 * lines),
    )  # fmt: skip
    figure.suptitle(title(f"{results['trial']['model']}, {hardware}", 7), fontsize=9)
    for mode, (left, right) in zip(settings["modes"], grid):
        _panels(results, mode, left, right)
    if cautions:
        figure.supxlabel(cautions, fontsize=6.5, x=0.01, horizontalalignment="left")
    save(figure, name)


def _cautions(results: Results) -> str:
    """The marks of all rows, for who sees the plot alone; "": none."""
    several = len(results["settings"]["modes"]) > 1
    marked = [
        f"{f'{row.mode}, ' if several else ''}{row.strategy}, {row.np}: {', '.join(row.marks)}"
        for row in rows(results)
        if row.marks
    ]
    return title("take care: " + "; ".join(marked), 10) if marked else ""  # in small letters


def _panels(results: Results, mode: str, speedup: Axes, efficiency: Axes) -> None:
    predicted = [each for each in results.get("predicted") or [] if each["mode"] == mode]
    sizes = sorted({*results["settings"]["sizes"], *(each["np"] for each in predicted)})
    ideal = [np / sizes[0] for np in sizes]
    speedup.plot(sizes, ideal, color="0.5", linewidth=1, label="ideal")
    efficiency.axhline(100, color="0.5", linewidth=1, label="ideal")
    for number, strategy in enumerate(results["settings"]["strategies"]):
        color, marker = STYLES[number]
        measured = [row for row in rows(results) if (row.mode, row.strategy) == (mode, strategy)]
        style = {"color": color, "marker": marker, "label": strategy}
        # Strategies are shifted by 3 % of the logarithmic axis, or their bars would overlap.
        aside = (1.2**2 * sizes[-1] / sizes[0]) ** (0.03 * number)
        _points(speedup, [(aside * row.np, row.speedup) for row in measured], style)
        _points(efficiency, [(aside * row.np, _percent(row.efficiency)) for row in measured], style)
        crowded = [(aside * row.np, _percent([1 / v for v in row.over_alone])) for row in measured]
        _points(efficiency, crowded, {**style, **HOLLOW, "label": None})
        _predict(results, predicted, measured, (speedup, efficiency), color)
    if results["oversubscribed"]:  # one entry for all strategies, or the legend has no room
        label = "oversubscribed: a step without /\nwith communication"
        efficiency.plot([], [], color="0.4", marker="o", markersize=5, label=label, **HOLLOW)
    baseline = f"{sizes[0]} process" + "es" * (sizes[0] > 1)
    _finish(speedup, sizes, f"speed-up over {baseline}", mode)
    _finish(efficiency, sizes, "efficiency, %", mode)
    speedup.set_xscale("log", base=2)
    speedup.set_yscale("log", base=2)
    lost = [half for half in (0.125, 0.25, 0.5) if half > speedup.get_ylim()[0]]
    apart = [np / sizes[0] for np in _apart(sizes)]
    beyond = [apart[-1] * 2**n for n in (1, 2, 3) if apart[-1] * 2**n <= speedup.get_ylim()[1]]
    ticks = [*lost, *apart, *beyond]
    speedup.set_yticks(ticks, [f"{value:g}" for value in ticks])
    efficiency.set_xscale("log", base=2)
    for panel in (speedup, efficiency):
        panel.set_xticks(_apart(sizes), [str(np) for np in _apart(sizes)])
        panel.minorticks_off()
    efficiency.set_ylim(0, max(110, efficiency.get_ylim()[1]))


def _apart(sizes: list[int]) -> list[int]:
    """The sizes whose labels fit on an axis, as each takes a tenth of it."""
    tenth = (1.2**2 * sizes[-1] / sizes[0]) ** 0.1
    spaced = sizes[:1]
    for np in sizes:
        spaced += [np] if np / spaced[-1] > tenth else []
    return spaced


def _percent(values: list[float]) -> list[float]:
    return [100 * value for value in values]


def _points(axes: Axes, points: list[tuple[float, list[float]]], style: dict[str, Any]) -> None:
    """Medians with bars that span their intervals."""
    measured = [(np, values) for np, values in points if values]
    if not measured:
        return
    medians = [median(values) for _, values in measured]
    intervals = [interval(values) for _, values in measured]
    below = [center - low for center, (low, _) in zip(medians, intervals)]
    above = [high - center for center, (_, high) in zip(medians, intervals)]
    axes.errorbar(
        [np for np, _ in measured], medians, yerr=[below, above], capsize=3, linewidth=1.2,
        markersize=5, **style,
    )  # fmt: skip


def _predict(
    results: Results, predicted: list[dict[str, Any]], measured: list[Row],
    panels: tuple[Axes, Axes], color: str,
) -> None:  # fmt: skip
    """The curve of predicted steps, relative to the measured step of the smallest size."""
    batch_size, smallest = results["settings"]["batch_size"], results["settings"]["sizes"][0]
    base = next((row for row in measured if row.np == smallest), None)
    if base is None:
        return
    rate = base.np * base.batch / median(base.step_ms)
    lines: dict[int, list[float]] = {}
    for prediction in predicted:
        if prediction["strategy"] == base.strategy:
            samples = prediction["np"] * batch_of(base.mode, batch_size, prediction["np"])
            steps = (prediction["step_ms"], prediction["high_ms"], prediction["low_ms"])
            lines[prediction["np"]] = [samples / ms / rate for ms in steps]
    if not lines:
        return
    sizes = sorted(lines)
    for axes, percent in zip(panels, (False, True)):
        factors = [100 * smallest / np if percent else 1.0 for np in sizes]
        curve, low, high = zip(*[[f * v for v in lines[np]] for np, f in zip(sizes, factors)])
        line = "--x" if len(sizes) == 1 else "--"  # a point alone has none
        axes.plot(sizes, curve, line, color=color, linewidth=1, label=f"{base.strategy}, predicted")
        axes.fill_between(sizes, low, high, color=color, alpha=0.15, linewidth=0)


def _finish(axes: Axes, sizes: list[int], what: str, mode: str) -> None:
    axes.set_title(f"{mode} scaling")
    axes.set_xlabel("processes")
    axes.set_ylabel(what)
    axes.set_xlim(sizes[0] / 1.2, sizes[-1] * 1.2)
    axes.grid(color="0.9", linewidth=0.6)
    axes.set_axisbelow(True)
    axes.legend()

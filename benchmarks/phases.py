"""What the traced steps were spent on: a table for the terminal, a picture of one step.

Each moment of a step counts for the innermost of Lightning's actions around it in the thread that
trains: `[Strategy]....training_step` is forward, and so on (PHASES). "all-reduce" is the wait for
gradients after backward, which includes waiting for slower ranks; the part that backward hides is
in Horovod's row. Under strategy=ddp the wait is part of backward. On GPUs these are times of the
host, which runs ahead of the GPU; the table of operations then has the GPU's time of each. The
profiler takes time itself: shares can be trusted, step times cannot.
"""

from __future__ import annotations

import math
import statistics
from collections import defaultdict
from collections.abc import Iterable
from itertools import pairwise
from pathlib import Path
from typing import Any

from benchmarks.files import whole
from benchmarks.traces import Event, Timeline, Trace, place

PHASES = {
    "data": (".train_dataloader_next", ".batch_to_device"),
    "forward": (".training_step",),
    "backward": (".backward",),
    "all-reduce": (": wait",),
    "optimizer": ("optimizer_step", ".optimizer_zero_grad"),
}
COLOURS = {
    "data": "#e69f00", "forward": "#56b4e9", "backward": "#0072b2", "all-reduce": "#d55e00",
    "optimizer": "#009e73", "rest": "#dddddd", "GPU": "#444444", "negotiation": "#999999",
}  # fmt: skip
EPOCH = ".on_train_epoch_end"
OPERATIONS, HOROVOD_PHASES = 8, 4  # most rows of the table
ON_GPU = ("kernel", "gpu_memcpy", "gpu_memset")  # categories of torch's profiler
MOST_RANKS = 6  # in the table; of more ranks the slowest and the fastest
Segment = tuple[float, float, str]
Amounts = defaultdict[str, float]


def phase(name: str) -> str | None:
    """The phase of one of Lightning's actions or of the strategy's wait; None for other events."""
    return next((phase for phase, ends in PHASES.items() if name.endswith(ends)), None)


def plain_steps(trace: Trace) -> list[Event]:
    """Steps in which no epoch ends, as its validation and checkpoints would count too."""
    epochs = [e["ts"] for e in trace.events if str(e["name"]).endswith(EPOCH)]
    steps = trace.steps
    plain = [s for s in steps if not any(s["ts"] <= t < s["ts"] + s["dur"] for t in epochs)]
    return plain or steps


def overlaps(event: Event, begin: float, end: float) -> bool:
    return event["ts"] < end and event["ts"] + event["dur"] > begin


def segments(trace: Trace, step: Event) -> list[Segment]:
    """The step cut wherever a phase begins or ends: (start, end, phase), in µs, without gaps."""
    begin, end = step["ts"], step["ts"] + step["dur"]
    ranges = [
        (max(e["ts"], begin), min(e["ts"] + e["dur"], end), label)
        for e in trace.events
        if "dur" in e and overlaps(e, begin, end) and place(e) == trace.main
        and (label := phase(str(e["name"])))
    ]  # fmt: skip
    ranges.sort(key=lambda r: (r[0], -r[1]))  # each after those around it
    ranges.insert(0, (begin, end, "rest"))
    cuts = sorted({moment for start, stop, _ in ranges for moment in (start, stop)})
    pieces = []
    for start, stop in pairwise(cuts):
        around = [name for first, last, name in ranges if first <= start and stop <= last]
        pieces.append((start, stop, around[-1]))
    return pieces


def shares(trace: Trace) -> dict[str, float]:
    """ms a step, by phase."""
    steps = plain_steps(trace)
    milliseconds = dict.fromkeys([*PHASES, "rest"], 0.0)
    for step in steps:
        for start, end, name in segments(trace, step):
            milliseconds[name] += (end - start) / 1e3 / len(steps)
    return milliseconds


def inside(events: Iterable[Event], steps: list[Event]) -> list[Event]:
    """The events with a duration that begin in one of the steps."""
    windows = [(step["ts"], step["ts"] + step["dur"]) for step in steps]
    return [e for e in events if "dur" in e and any(a <= e["ts"] < b for a, b in windows)]


def named_by_operation(events: list[Event]) -> list[Event]:
    """What GPUs did, named after the operations that launched it: names of kernels have a hundred
    letters. Horovod's kernels have no such operation, and keep their names."""

    def link(event: Event) -> Any:
        return event.get("args", {}).get("External id")

    names = {link(e): e["name"] for e in events if e.get("cat") == "cpu_op" and link(e)}
    on_gpu = [e for e in events if e.get("cat") in ON_GPU]
    return [{**e, "name": names.get(link(e), e["name"])} for e in on_gpu]


def busy(events: list[Event]) -> float:
    """µs in which at least one of the events was going on."""
    total, until = 0.0, -math.inf  # times may be negative: 0 is the first step of rank 0
    for event in sorted(events, key=lambda e: e["ts"]):
        end = event["ts"] + event["dur"]
        total += max(0.0, end - max(event["ts"], until))
        until = max(until, end)
    return total


def self_times(events: list[Event]) -> tuple[Amounts, Amounts]:
    """µs by operation without those inside it, and calls; if some are on GPUs, only those."""
    on_gpu = [e for e in events if e.get("cat") in ON_GPU]
    threads: defaultdict[object, list[Event]] = defaultdict(list)
    for event in on_gpu or events:
        if event.get("cat") in ("cpu_op", *ON_GPU):
            threads[place(event)].append(event)
    spent: Amounts = defaultdict(float)
    calls: Amounts = defaultdict(float)
    for thread_events in threads.values():
        stack: list[Event] = []
        for event in sorted(thread_events, key=lambda e: (e["ts"], -e["dur"])):
            while stack and stack[-1]["ts"] + stack[-1]["dur"] <= event["ts"]:
                stack.pop()
            if stack and not on_gpu:
                spent[stack[-1]["name"]] -= event["dur"]
            spent[event["name"]] += event["dur"]
            calls[event["name"]] += 1
            stack.append(event)
    return spent, calls


def table(traces: list[Trace], horovod: Timeline) -> str:
    """At most 25 lines: phases of each rank, the slowest rank, operations, Horovod's phases."""
    count = min(len(plain_steps(trace)) for trace in traces)
    uncertainty = max(trace.uncertainty_us for trace in traces)
    lines = [
        f"{_counted(count, 'step')} of {_counted(len(traces), 'rank')}, ms a step as traced; "
        + (f"clocks aligned to {uncertainty / 1e3:.2f} ms" if uncertainty else "one clock")
    ]
    spent = [shares(trace) for trace in traces]
    own = [sum(ms for name, ms in each.items() if name != "all-reduce") for each in spent]
    order = sorted(range(len(traces)), key=lambda index: -own[index])
    half = MOST_RANKS // 2
    shown = order[:half] + order[-half:] if len(traces) > MOST_RANKS else range(len(traces))
    if len(traces) > MOST_RANKS:
        lines[0] += f"; the {half} slowest and the {half} fastest"
    width = max(len(trace.host) for trace in traces)
    names = list(spent[0])
    lines.append(
        f"RANK  {'HOST':<{width}}  {'STEP':>8}" + "".join(f"{n.upper():>12}" for n in names)
    )
    for index in shown:
        total, trace = sum(spent[index].values()), traces[index]
        cells = [f"{ms:6.1f} {100 * ms / total:2.0f}%" for ms in spent[index].values()]
        lines.append(f"{trace.rank:>4}  {trace.host:<{width}}  {total:8.1f}  " + "  ".join(cells))
    if len(traces) > 1 and any(each["all-reduce"] for each in spent):  # not under DDP
        first = traces[order[0]]
        lines.append(
            f"slowest: rank {first.rank} on {first.host}, {own[order[0]]:.1f} ms of its own work, "
            f"the median rank {statistics.median(own):.1f} ms"
        )
    return "\n".join([*lines, *_operations(traces), *_horovod(traces, horovod)])


def _counted(number: int, what: str) -> str:
    return f"{number} {what}{'s' if number != 1 else ''}"


def _operations(traces: list[Trace]) -> list[str]:
    spent: Amounts = defaultdict(float)
    calls: Amounts = defaultdict(float)
    at_work: list[float] = []
    for trace in traces:
        steps, on_gpu = plain_steps(trace), named_by_operation(trace.events)
        events = inside(on_gpu or trace.events, steps)
        if on_gpu:
            at_work.append(busy(events) / sum(step["dur"] for step in steps))
        for total, amounts in zip((spent, calls), self_times(events)):
            for name, number in amounts.items():
                total[name] += number / len(steps) / len(traces)
    if not at_work:
        return _ranked("OPERATION, itself, mean of ranks", spent, calls, OPERATIONS)
    share = f"GPU: at work in {statistics.mean(at_work):.0%} of the steps' time, mean of ranks"
    ranked = _ranked("OPERATION, on the GPU, mean of ranks", spent, calls, OPERATIONS)
    return [share, *ranked]


def _horovod(traces: list[Trace], horovod: Timeline) -> list[str]:
    """Horovod's phases in rank 0's steps; some contain others, as ALLREDUCE does GLOO_ALLREDUCE."""
    steps = plain_steps(traces[0])
    spent: Amounts = defaultdict(float)
    calls: Amounts = defaultdict(float)
    for event in inside(horovod.ranges, steps):
        spent[event["name"]] += event["dur"] / len(steps)
        calls[event["name"]] += 1 / len(steps)
    return _ranked("HOROVOD, as seen by rank 0", spent, calls, HOROVOD_PHASES)


def _ranked(title: str, spent: Amounts, calls: Amounts, most: int) -> list[str]:
    lines = [f"{title:<56}{'MS A STEP':>12}{'CALLS':>10}"]
    for name, us in sorted(spent.items(), key=lambda item: -item[1])[:most]:
        lines.append(f"{name[:54]:<56}{us / 1e3:12.3f}{calls[name]:10.1f}")
    return lines if spent else []


def draw(traces: list[Trace], horovod: Timeline, file: Path) -> None:
    """The median step of rank 0 as a PNG: a row for each rank, below them the GPUs, and Horovod's
    tensors."""
    from matplotlib.patches import Patch

    from benchmarks.figures import plt  # slow to import

    plain = sorted(plain_steps(traces[0]), key=lambda step: step["dur"])
    chosen = plain[len(plain) // 2]
    steps = [step for trace in traces for step in trace.steps if step["name"] == chosen["name"]]
    begin = min(step["ts"] for step in steps)
    end = max(step["ts"] + step["dur"] for step in steps)
    rows = _rows(traces, horovod, begin, end)
    figure, axes = plt.subplots(figsize=(9, 0.32 * len(rows) + 1.3), dpi=110)
    for number, pieces in enumerate(rows.values()):
        bars = [((start - begin) / 1e3, (stop - start) / 1e3) for start, stop, _ in pieces]
        colours = [COLOURS[what] for _, _, what in pieces]
        axes.broken_barh(bars, (number - 0.35, 0.7), color=colours, linewidth=0)
    axes.set_yticks(range(len(rows)), list(rows))
    axes.set_ylim(len(rows) - 0.5, -0.5)  # the first row is the uppermost
    axes.set_xlim(0, (end - begin) / 1e3)
    axes.set_xlabel("ms")
    shown = {what for pieces in rows.values() for _, _, what in pieces}
    handles = [Patch(color=COLOURS[what], label=what) for what in COLOURS if what in shown]
    axes.legend(handles=handles, ncols=len(handles), loc="lower center", bbox_to_anchor=(0.5, 1.0))
    with whole(file) as unfinished:
        figure.savefig(unfinished, bbox_inches="tight")
    plt.close(figure)


def _rows(
    traces: list[Trace], horovod: Timeline, begin: float, end: float
) -> dict[str, list[Segment]]:
    """What the picture shows between two times in µs, by the label of a row."""
    rows: dict[str, list[Segment]] = {}
    for trace in traces:
        steps = [step for step in trace.steps if overlaps(step, begin, end)]
        pieces = [piece for step in steps for piece in segments(trace, step)]
        rows[f"rank {trace.rank} on {trace.host}"] = pieces
    on_gpu = [(trace.rank, e) for trace in traces for e in trace.events if e.get("cat") in ON_GPU]
    ranges = [(f"GPU of rank {rank}", event, "GPU") for rank, event in on_gpu]
    for event in sorted(horovod.ranges, key=lambda e: e["ts"]):
        label = f"Horovod: {event['tensor']}"
        if event["name"].startswith("NEGOTIATE_"):
            ranges.append((label, event, "negotiation"))
        elif event["args"]:  # which only whole operations have
            ranges.append((label, event, "all-reduce"))
    for label, event, what in ranges:
        if overlaps(event, begin, end):
            rows.setdefault(label, []).append((event["ts"], event["ts"] + event["dur"], what))
    return rows

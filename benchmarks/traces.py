"""The traces of all ranks made one: clocks aligned, a row for each rank, below Horovod's timeline.

The files of runs/tracing.py are read; the result opens in https://ui.perfetto.dev and
chrome://tracing. Accuracy: ranks on rank 0's host and Horovod's timeline share one clock. Ranks on
other hosts are off by at most `uncertainty_us`, plus the drift of their clocks from rank 0's during
the traced steps (1 ppm of a second is a microsecond). Horovod notes the zero of its timeline once,
at its start, in microseconds of the system's clock: if that is set later, the row shifts.
"""

from __future__ import annotations

import gzip
import json
import re
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

from benchmarks.files import whole
from cluster.hosts import Refusal

Event = dict[str, Any]
STEP = "ProfilerStep#"  # torch's name for the range of a step
ROWS = 1000  # process ids of the merged trace: (rank + 1) x ROWS + a running number


@dataclass
class Trace:
    """What one rank recorded; `ts` of events in µs since rank 0's first step, on rank 0's clock."""

    rank: int
    host: str
    uncertainty_us: float
    events: list[Event]
    main: tuple[Any, Any] = (0, 0)  # the process and thread that train

    @property
    def steps(self) -> list[Event]:
        ranges = [e for e in self.events if str(e.get("name", "")).startswith(STEP) and "dur" in e]
        return sorted((e for e in ranges if place(e) == self.main), key=lambda e: e["ts"])


@dataclass
class Timeline:
    """Horovod's, as rank 0 saw it: ranges and moments, each with the tensor that it concerns."""

    ranges: list[Event] = field(default_factory=list)
    moments: list[Event] = field(default_factory=list)


def place(event: Event) -> tuple[Any, Any]:
    return event["pid"], event["tid"]


def read(folder: Path, ranks: int) -> tuple[list[Trace], Timeline]:
    """All ranks' traces and Horovod's timeline (empty where there is none), on one clock.

    Raises:
        Refusal: for a file that is missing, cut off, or of another program.
    """
    traces = []
    zero_ns = 0
    for rank in range(ranks):
        file = folder / f"rank-{rank}.json.gz"
        content = _content(file)
        try:
            who, base_ns, events = (
                content["rank"], content["baseTimeNanoseconds"], content["traceEvents"]
            )  # fmt: skip
            trace = Trace(who["rank"], who["host"], who["clock_uncertainty_ns"] / 1e3, events)
            steps = [e for e in events if str(e["name"]).startswith(STEP)]
            first = min(steps, key=lambda e: e["ts"])
        except (KeyError, TypeError, ValueError):
            raise Refusal(f"{file}: no trace of a rank's steps: trace anew") from None
        trace.main = place(first)
        base_ns -= who["clock_ahead_ns"]
        if rank == 0:
            zero_ns = base_ns + round(first["ts"] * 1e3)
        for event in events:
            if "ts" in event:
                event["ts"] += (base_ns - zero_ns) / 1e3
        traces.append(trace)
    if (folder / f"rank-{ranks}.json.gz").exists():
        raise Refusal(f"{folder}: has more ranks than {ranks}: give the -np or -H of that run")
    file = folder / "horovod.json.gz"
    return traces, timeline(_content(file), zero_ns) if file.exists() else Timeline()


def _content(file: Path) -> Any:
    """The parsed JSON; Horovod's list of events may lack its end, where writing was cut off."""
    try:
        with gzip.open(file, "rt") as packed:
            text = packed.read()
    except (OSError, EOFError) as error:
        raise Refusal(f"{file}: {getattr(error, 'strerror', None) or error}") from None
    try:
        return json.loads(text)
    except ValueError:
        for end in [match.end() for match in re.finditer(r"\}(?=,\n?\{)", text)][-2:][::-1]:
            try:
                return json.loads(text[:end] + "]")
            except ValueError:
                continue
    raise Refusal(f"{file}: cut off: trace anew")


def timeline(events: list[Event], zero_ns: int) -> Timeline:
    """Ranges from Horovod's begin and end events. An end without a begin is left out; an operation
    still going on at the end of the timeline lasts as long as the ranges inside it."""
    result = Timeline()
    names: dict[int, str] = {}
    open_events: dict[int, list[Event]] = {}
    start_us = 0.0
    for event in events:
        args, pid = event.get("args", {}), event.get("pid", 0)
        tensor = names.get(pid, "?")
        if "start_time_since_epoch_in_micros" in args:
            start_us = args["start_time_since_epoch_in_micros"] - zero_ns / 1e3
        elif event.get("name") == "process_name":
            names[pid] = args["name"]
        elif event["ph"] == "B":
            open_events.setdefault(pid, []).append(event)
        elif event["ph"] == "E" and open_events.get(pid):
            start = open_events[pid].pop()
            result.ranges.append({
                "ph": "X", "name": start["name"], "tensor": tensor, "args": args,
                "ts": start["ts"] + start_us, "dur": event["ts"] - start["ts"],
            })  # fmt: skip
        elif event["ph"] == "X":  # a moment: a rank, whose number is the name, has the tensor
            name = f"rank {event['name']} is ready"
            result.moments.append(
                {"ph": "i", "s": "t", "name": name, "tensor": tensor, "ts": event["ts"] + start_us}
            )
    for pid, left in open_events.items():
        tensor = names.get(pid, "?")
        for start in reversed(left):
            begin = start["ts"] + start_us
            ends = [
                each["ts"] + each["dur"] for each in result.ranges
                if each["tensor"] == tensor and each["ts"] >= begin
            ]  # fmt: skip
            if ends:
                result.ranges.append({
                    "ph": "X", "name": start["name"], "tensor": tensor,
                    "args": {"end": "cut off"}, "ts": begin, "dur": max(ends) - begin,
                })  # fmt: skip
    return result


def merge(traces: list[Trace], horovod: Timeline) -> list[Event]:
    """The events of one trace: a process for each rank, in their order, then Horovod's."""
    merged: list[Event] = []
    for trace in traces:
        numbers: dict[Any, int] = {trace.main[0]: (trace.rank + 1) * ROWS}
        labels: dict[Any, str] = {}
        for event in trace.events:
            pid = event.get("pid")
            if not isinstance(pid, int) or event["name"] == "process_sort_index":
                continue  # torch's marks on the whole trace
            number = numbers.setdefault(pid, (trace.rank + 1) * ROWS + len(numbers))
            if event["name"] == "process_labels":
                labels[pid] = event["args"]["labels"]
            elif event["name"] != "process_name":
                # Each rank numbers the arrows between events for itself.
                own = {"id": f"{trace.rank}.{event['id']}"} if "id" in event else {}
                merged.append({**event, "pid": number, **own})
        for pid, number in numbers.items():
            label = "" if pid == trace.main[0] else f", {labels.get(pid, pid)}"
            merged += _process(number, f"rank {trace.rank} on {trace.host}{label}")
    tensors: dict[str, int] = {}
    pid = (len(traces) + 1) * ROWS
    for event in [*horovod.ranges, *horovod.moments]:
        thread = tensors.setdefault(event["tensor"], len(tensors) + 1)
        rest = {key: value for key, value in event.items() if key != "tensor"}
        merged.append({**rest, "cat": "horovod", "pid": pid, "tid": thread})
    if tensors:
        merged += _process(pid, "Horovod, rank 0")
    for name, thread in tensors.items():
        named = {"ph": "M", "name": "thread_name", "pid": pid, "tid": thread}
        merged.append({**named, "args": {"name": name}})
    return merged


def _process(number: int, name: str) -> list[Event]:
    metadata = {"process_name": {"name": name}, "process_sort_index": {"sort_index": number}}
    return [
        {"ph": "M", "name": what, "pid": number, "tid": 0, "args": args}
        for what, args in metadata.items()
    ]


def write(events: list[Event], file: Path) -> None:
    with whole(file) as unfinished, gzip.open(unfinished, "wt", compresslevel=6) as packed:
        json.dump({"displayTimeUnit": "ms", "traceEvents": events}, packed)

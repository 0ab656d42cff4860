"""Traces of ranks whose clocks differ become one; the table counts what was planted.

Real jobs: tests/cluster/test_profiling.py.
"""

from __future__ import annotations

import errno
import gzip
import json
import os
import re
import subprocess
import sys
import threading
import time
from collections.abc import Callable
from pathlib import Path
from types import SimpleNamespace
from typing import Any

import pytest
import torch
from torch import Tensor

import runs.tracing
from benchmarks import phases, profiling, traces
from benchmarks.figures import plt
from cluster.hosts import Refusal
from tests.conftest import ROOT, run
from tests.matrix.trainings import Net, loader, trainer

MS = 1000.0  # µs
AHEAD_NS = 7_300_000_000  # rank 1's clock
EPOCH_NS = 1_795_303_000_000_000_000  # a true time
BASES_NS = [1_790_857_026_000_000_000, 1_790_000_000_000_000_000]


def range_(name: str, start: float, end: float, cat: str = "user_annotation") -> dict[str, Any]:
    """In ms of true time since EPOCH_NS."""
    times = {"ts": start * MS, "dur": (end - start) * MS}
    return {"ph": "X", "cat": cat, "name": name, "pid": 77, "tid": 77, **times}


def step(begin: float, wait: float, number: int = 10) -> list[dict[str, Any]]:
    """Data 2 ms, forward 10, backward 20 and then the wait, optimizer 3, the rest 2."""
    ranges = [
        (f"ProfilerStep#{number}", 0, 37 + wait),
        ("[_TrainingEpochLoop].train_dataloader_next", 0, 2),
        ("run_training_batch", 2, 37 + wait),
        ("[LightningModule]Net.optimizer_step", 3, 36 + wait),
        ("[Strategy]Any.training_step", 3, 13),
        ("[Strategy]Any.backward", 13, 33 + wait),
        ("all-reduce gradients.0.0: start", 30, 31),
        ("all-reduce gradients.0.0: wait", 33, 33 + wait),
    ]
    events = [range_(name, begin + start, begin + end) for name, start, end in ranges]
    events.append(range_("aten::outer", begin + 3, begin + 9, "cpu_op"))
    events.append(range_("aten::inner", begin + 4, begin + 8, "cpu_op"))
    return events


def plant(folder: Path, rank: int, events: list[dict[str, Any]], ahead_ns: int = 0) -> None:
    """A file as torch writes it: times since a base, of this rank's clock."""
    base_ns = BASES_NS[rank % 2]
    for event in events:
        event["ts"] += (EPOCH_NS + ahead_ns - base_ns) / 1e3
    arrow = {"cat": "fwdbwd", "name": "fwdbwd", "pid": 77, "tid": 77, "ts": events[0]["ts"]}
    odd: list[dict[str, Any]] = [
        {"ph": "s", "id": 1, **arrow}, {"ph": "f", "id": 1, "bp": "e", **arrow},
        {"ph": "M", "name": "thread_name", "pid": 77, "tid": 77, "args": {"name": "trains"}},
        {"ph": "M", "name": "process_name", "pid": 77, "tid": 0, "args": {"name": "python"}},
        {"ph": "M", "name": "process_labels", "pid": 0, "tid": 0, "args": {"labels": "GPU 0"}},
        {"ph": "X", "cat": "Trace", "name": "PyTorch Profiler (0)", "pid": "Spans", "tid": 0,
         "ts": events[0]["ts"], "dur": 1},
    ]  # fmt: skip
    who = {
        "rank": rank, "host": f"node{rank + 1}", "clock_ahead_ns": ahead_ns,
        "clock_uncertainty_ns": 120_000 * rank,
    }  # fmt: skip
    content = {"rank": who, "baseTimeNanoseconds": base_ns, "traceEvents": [*events, *odd]}
    with gzip.open(folder / f"rank-{rank}.json.gz", "wt") as file:
        json.dump(content, file)


def horovod(folder: Path, start: float, end: float) -> None:
    """As Horovod writes it: since its own start, here 5 s earlier; the end of the file is cut."""
    zero_us = EPOCH_NS // 1000 - 5_000_000
    events = [
        {"name": "process_name", "ph": "M", "pid": 0,
         "args": {"start_time_since_epoch_in_micros": zero_us}},
        {"name": "process_name", "ph": "M", "pid": 4, "args": {"name": "allreduce.gradients.0.0"}},
        {"ph": "E", "ts": 5_000_000 + start * MS - 9, "pid": 4},  # began before the file
        {"ph": "B", "name": "NEGOTIATE_ALLREDUCE", "ts": 5_000_000 + start * MS - 4, "pid": 4},
        {"ph": "X", "name": "1", "ts": 5_000_000 + start * MS - 3, "pid": 4, "dur": 0},
        {"ph": "E", "ts": 5_000_000 + start * MS - 2, "pid": 4},
        {"ph": "B", "name": "ALLREDUCE", "ts": 5_000_000 + start * MS, "pid": 4},
        {"ph": "E", "ts": 5_000_000 + end * MS, "pid": 4, "args": {"shape": "[3]"}},
    ]  # fmt: skip
    text = "[\n" + ",\n".join(json.dumps(event) for event in events) + ',\n{"ph": "B", "na'
    (folder / "horovod.json.gz").write_bytes(gzip.compress(text.encode()))


@pytest.fixture
def planted(tmp_path: Path) -> tuple[list[traces.Trace], traces.Timeline]:
    """Rank 0 waits 5 ms; rank 1 comes 3 ms later, waits 2, and its clock is 7.3 s ahead."""
    plant(tmp_path, 0, step(100, wait=5))
    plant(tmp_path, 1, step(103, wait=2), AHEAD_NS)
    horovod(tmp_path, 136, 138)
    return traces.read(tmp_path, 2)


def named(events: list[dict[str, Any]], name: str) -> dict[str, Any]:
    (match,) = [event for event in events if event["name"] == name]
    return match


def end(event: dict[str, Any]) -> float:
    return event["ts"] + event["dur"]


def test_an_operation_that_the_end_cut_off_lasts_as_long_as_what_is_in_it() -> None:
    """Of another that has nothing in it, nobody knows how long."""
    events: list[dict[str, Any]] = [
        {"name": "process_name", "ph": "M", "pid": tensor, "args": {"name": f"t{tensor}"}}
        for tensor in (4, 5)
    ]
    events += [
        {"ph": "B", "name": "ALLREDUCE", "ts": 100, "pid": 4},
        {"ph": "B", "name": "GLOO_ALLREDUCE", "ts": 103, "pid": 4},
        {"ph": "B", "name": "ALLREDUCE", "ts": 110, "pid": 5},
        {"ph": "E", "ts": 150, "pid": 4},
    ]
    ranges = traces.timeline(events, 0).ranges
    assert [(e["name"], e["ts"], e["dur"]) for e in ranges] == [
        ("GLOO_ALLREDUCE", 103, 47), ("ALLREDUCE", 100, 50)
    ]  # fmt: skip


def test_clocks_are_aligned(planted: tuple[list[traces.Trace], traces.Timeline]) -> None:
    """Both ranks' waits ended at the same true time, 138 ms; zero is rank 0's first step."""
    ranks, timeline = planted
    waits = [named(trace.events, "all-reduce gradients.0.0: wait") for trace in ranks]
    assert [end(wait) for wait in waits] == pytest.approx([38 * MS] * 2, abs=1)
    assert waits[1]["ts"] - waits[0]["ts"] == pytest.approx(3 * MS, abs=1)
    whole = named(timeline.ranges, "ALLREDUCE")
    assert (whole["ts"], end(whole)) == pytest.approx((36 * MS, 38 * MS), abs=1)
    assert [event["name"] for event in timeline.ranges] == ["NEGOTIATE_ALLREDUCE", "ALLREDUCE"]
    assert [event["name"] for event in timeline.moments] == ["rank 1 is ready"]


def test_ranks_are_rows_of_their_own(
    planted: tuple[list[traces.Trace], traces.Timeline], tmp_path: Path
) -> None:
    """Though both had the process id 77, and numbered their arrows from 1."""
    traces.write(traces.merge(*planted), tmp_path / "trace.json.gz")
    events = json.loads(gzip.decompress((tmp_path / "trace.json.gz").read_bytes()))["traceEvents"]
    names = {e["pid"]: e["args"]["name"] for e in events if e["name"] == "process_name"}
    order = {e["args"]["sort_index"]: e["pid"] for e in events if e["name"] == "process_sort_index"}
    rows = ["rank 0 on node1", "rank 0 on node1, GPU 0", "rank 1 on node2"]
    rows += ["rank 1 on node2, GPU 0", "Horovod, rank 0"]
    assert [names[order[index]] for index in sorted(order)] == rows
    steps = [names[e["pid"]] for e in events if e["name"].startswith("ProfilerStep")]
    assert steps == ["rank 0 on node1", "rank 1 on node2"]
    assert len({e["id"] for e in events if e["ph"] in "sf"}) == 2
    assert {e["pid"] for e in events} == set(names)  # none of torch's marks on the whole
    threads = {(names[e["pid"]], e["args"]["name"]) for e in events if e["name"] == "thread_name"}
    assert threads == {
        ("rank 0 on node1", "trains"), ("rank 1 on node2", "trains"),
        ("Horovod, rank 0", "allreduce.gradients.0.0"),
    }  # fmt: skip


def test_phases_of_a_step(planted: tuple[list[traces.Trace], traces.Timeline]) -> None:
    """What lies in the optimizer's closure is not the optimizer's; the wait is not backward's."""
    expected = {"data": 2, "forward": 10, "backward": 20, "optimizer": 3, "rest": 2}
    for trace, wait in zip(planted[0], (5, 2)):
        assert phases.shares(trace) == pytest.approx({**expected, "all-reduce": wait})


def test_the_table_counts_what_was_planted(
    planted: tuple[list[traces.Trace], traces.Timeline],
) -> None:
    lines = phases.table(*planted).splitlines()
    assert lines[0].startswith("1 step of 2 ranks") and "aligned to 0.12 ms" in lines[0]
    shares = "0 node1 42.0 2.0 5% 10.0 24% 20.0 48% 5.0 12% 3.0 7% 2.0 5%"
    assert " ".join(lines[2].split()) == shares
    text = [line.split() for line in lines]
    assert ["aten::inner", "4.000", "1.0"] in text and ["aten::outer", "2.000", "1.0"] in text
    assert ["ALLREDUCE", "2.000", "1.0"] in text


def test_the_table_is_of_a_step_however_many_were_traced(tmp_path: Path) -> None:
    plant(tmp_path, 0, [*step(100, wait=5), *step(200, wait=7, number=11)])
    ranks, _ = traces.read(tmp_path, 1)
    operation = {"ph": "X", "name": "ALLREDUCE", "tensor": "t", "args": {}, "dur": 2 * MS}
    starts = [each["ts"] + 30 * MS for each in ranks[0].steps]
    timeline = traces.Timeline([{**operation, "ts": start} for start in starts])
    lines = [line.split() for line in phases.table(ranks, timeline).splitlines()]
    assert lines[0][:2] == ["2", "steps"] and lines[2][2] == "43.0"
    assert lines[2][-6:-4] == ["6.0", "14%"]
    assert ["aten::inner", "4.000", "1.0"] in lines and ["ALLREDUCE", "2.000", "1.0"] in lines


def test_the_table_names_the_slowest_of_many(tmp_path: Path) -> None:
    for rank in range(12):
        plant(tmp_path, rank, step(100, wait=20 - rank))
    slow = range_("[_TrainingEpochLoop].train_dataloader_next", 140, 141)
    plant(tmp_path, 7, [*step(100, wait=1), slow])
    ranks, _ = traces.read(tmp_path, 12)
    ranks[7].steps[0]["dur"] += 30 * MS
    lines = phases.table(ranks, traces.Timeline()).splitlines()
    assert any(line.startswith("slowest: rank 7 on node8, 67.0 ms") for line in lines)
    assert len(lines) <= 25 - 2 and lines[2].split()[0] == "7"
    assert sum(" node" in line and "%" in line for line in lines) == 6


def test_steps_at_the_end_of_an_epoch_are_left_out(tmp_path: Path) -> None:
    late = [*step(200, wait=500, number=11), range_("[LightningModule]Net.on_train_epoch_end",
            736, 736.1)]  # fmt: skip
    plant(tmp_path, 0, [*step(100, wait=5), *late])
    ranks, _ = traces.read(tmp_path, 1)
    assert phases.shares(ranks[0])["all-reduce"] == pytest.approx(5)


def test_the_picture_is_a_png(
    planted: tuple[list[traces.Trace], traces.Timeline], tmp_path: Path
) -> None:
    phases.draw(*planted, tmp_path / "trace.png")
    assert (tmp_path / "trace.png").read_bytes().startswith(b"\x89PNG")


@pytest.mark.parametrize(
    "content", [b"", gzip.compress(b'{"traceEvents": [')[:-9], b"{}"], ids=["empty", "cut", "other"]
)
def test_a_file_that_is_no_trace_is_named(tmp_path: Path, content: bytes) -> None:
    (tmp_path / "rank-0.json.gz").write_bytes(content)
    with pytest.raises(Refusal, match=r"rank-0\.json\.gz"):
        traces.read(tmp_path, 1)


class Threads:
    """A strategy whose ranks are threads."""

    root_device = torch.device("cpu")
    barrier_ = threading.Barrier(3)
    said: list[Any] = [None] * 3

    def __init__(self, rank: int) -> None:
        self.global_rank = rank

    def barrier(self) -> None:
        self.barrier_.wait()

    def all_gather(self, tensor: torch.Tensor) -> torch.Tensor:
        self.said[self.global_rank] = tensor
        self.barrier_.wait()
        gathered = torch.stack(self.said)
        self.barrier_.wait()
        return gathered

    def reduce(self, tensor: torch.Tensor, reduce_op: str) -> torch.Tensor:
        return self.all_gather(tensor).max()


def test_the_narrowest_bounds_hold() -> None:
    """Round 0 bounds rank 1's clock to 995 - 1011 ahead, round 1 to 997 - 1009."""
    mine, first = torch.tensor([[1005, 1011], [1101, 1109]]), torch.tensor([[0, 10], [100, 104]])
    assert runs.tracing.difference(mine, first) == (1003, 6)


def test_the_clock_of_another_host_is_measured(monkeypatch: pytest.MonkeyPatch) -> None:
    """Of ranks whose clocks are set 3 s ahead and 2 s behind; one on rank 0's host is not asked."""
    ahead = [0, 3_000_000_000, -2_000_000_000]
    now, rank = time.time_ns, threading.local()
    hosts = ["a", "b", "c"]
    monkeypatch.setattr(time, "time_ns", lambda: now() + ahead[getattr(rank, "number", 0)])
    monkeypatch.setattr(runs.tracing, "gather_objects", lambda strategy, host: hosts)
    clocks: dict[int, tuple[int, int]] = {}

    def measure(number: int) -> None:
        rank.number = number
        clocks[number] = runs.tracing.clock(Threads(number))

    for _ in range(2):
        threads = [threading.Thread(target=measure, args=[number]) for number in range(3)]
        for thread in threads:
            thread.start()
        for thread in threads:
            thread.join()
        assert clocks[0] == (0, 0)
        for number in (1, 2):
            measured, uncertainty = clocks[number]
            if hosts[number] == "a":
                assert (measured, uncertainty) == (0, 0)
            else:
                assert 0 < uncertainty < 1_000_000_000
                assert abs(measured - ahead[number]) <= uncertainty
        hosts[2], ahead[2] = "a", 0


@pytest.mark.parametrize(
    ("script", "told"),
    [
        ("import sys; sys.exit('out of luck')", "nothing to show: the job ended with 1"),
        ("print('epoch 1/1')", "nothing to show: training ended before the first traced batch"),
    ],
)
def test_a_job_without_a_trace(tmp_path: Path, script: str, told: str) -> None:
    (tmp_path / "template.py").write_text(script)
    command = [sys.executable, "-m", "benchmarks.profiling", "-np", "1"]
    done = run(command, cwd=tmp_path, PYTHONPATH=str(ROOT))
    assert done.returncode == 2 and "Traceback" not in done.stdout
    assert done.stdout.splitlines()[-1].startswith(f"error: {told}")


def test_a_job_ends_where_nobody_reads_its_output(tmp_path: Path) -> None:
    """make profile | head -1"""
    script = "import time\nfor _ in range(600): print('epoch', flush=True); time.sleep(1)"
    (tmp_path / "template.py").write_text(script)
    command = [sys.executable, "-m", "benchmarks.profiling", "-np", "1"]
    process = subprocess.Popen(
        command, cwd=tmp_path, env={**os.environ, "PYTHONPATH": str(ROOT)}, text=True,
        stdout=subprocess.PIPE, stderr=subprocess.PIPE, start_new_session=True,
    )  # fmt: skip
    assert process.stdout is not None and process.stderr is not None
    while "epoch" not in process.stdout.readline():
        assert process.poll() is None
    process.stdout.close()
    assert process.wait() == 2
    assert "who reads this went away" in process.stderr.read()
    assert not subprocess.run(["pgrep", "-s", str(process.pid)], capture_output=True).stdout


@pytest.mark.parametrize(
    ("arguments", "told"),
    [
        (["profiler=simple"], "make train ARGS=profiler=simple"),
        (["--steps", "0"], "STEPS=0"),
        (["test=true"], "make profile sets test itself"),
    ],
)
def test_what_make_profile_does_not_do(arguments: list[str], told: str) -> None:
    with pytest.raises(Refusal, match=told):
        profiling.job(profiling.parser().parse_args(arguments))


def test_kernels_count_for_the_operations_that_launched_them(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """A GPU works 6 of 20 µs, a while in two streams; one of its kernels is Horovod's."""
    step = {"cat": "user_annotation", "name": "ProfilerStep#1", "pid": 1, "tid": 2, "args": {}}

    def event(category: str, name: str, ts: float, dur: float, link: int, stream: int) -> Any:
        return {
            "cat": category, "name": name, "pid": 1 + stream, "tid": 2 + stream, "ts": ts,
            "dur": dur, "args": {"External id": link} if link else {},
        }  # fmt: skip

    events = [
        {**step, "ts": 0.0, "dur": 20.0},
        event("cpu_op", "aten::conv2d", 1, 9, 7, 0),
        event("cpu_op", "aten::cudnn_convolution", 2, 5, 8, 0),
        event("kernel", "void at::native::f<float>(int)", 10, 3, 8, 1),
        event("gpu_memset", "Memset (Device)", 13, 1, 8, 1),
        event("kernel", "ncclDevKernel", 12, 4, 0, 2),
    ]
    trace = traces.Trace(0, "node1", 0.0, events, (1, 2))
    text = phases.table([trace], traces.Timeline())
    assert "GPU: at work in 30% of the steps' time" in text
    rows = [line.split() for line in text.splitlines() if line.startswith(("aten", "nccl"))]
    assert rows == [
        ["aten::cudnn_convolution", "0.004", "2.0"], ["ncclDevKernel", "0.004", "1.0"],
    ]  # fmt: skip
    drawn: list[Any] = []
    monkeypatch.setattr(plt, "close", drawn.append)
    phases.draw([trace], traces.Timeline(), tmp_path / "trace.png")
    (axes,) = drawn[0].axes
    assert [label.get_text() for label in axes.get_yticklabels()][1:] == ["GPU of rank 0"]
    assert len(axes.collections[1].get_paths()) == 3


class Manual(Net):
    def __init__(self) -> None:
        super().__init__()
        self.automatic_optimization = False

    def training_step(self, batch: list[Tensor], batch_idx: int) -> Tensor:
        loss = super().training_step(batch, batch_idx)
        self.optimizers().zero_grad()
        self.manual_backward(loss)
        self.optimizers().step()
        return loss


def waits() -> list[tuple[list[str], list[str]]]:
    """Of both ways to optimize: phases that are within a backward of the strategy, and all."""
    found = []
    for model in (Net(), Manual()):
        with torch.profiler.profile(activities=[torch.profiler.ProfilerActivity.CPU]) as profiler:
            trainer("horovod", limit_train_batches=2, max_epochs=1).fit(model, loader())
        events = [event for event in profiler.events() if phases.phase(event.name)]
        shown = [event for event in events if event.name == "HorovodStrategy.backward"]
        within = [
            event.name
            for outer in shown
            for event in events
            if outer.time_range.start < event.time_range.start < outer.time_range.end
        ]
        found.append((within, [event.name for event in shown]))
    return found


def test_a_backward_by_hand_is_shown_with_its_wait(launch: Callable) -> None:
    """Lightning has no action around manual_backward."""
    for rank in launch(waits, 2):
        for within, shown in rank:
            assert [phases.phase(name) for name in shown] == ["backward"] * 2
            assert [phases.phase(name) for name in within] == ["all-reduce"] * 2


def test_a_rank_may_begin_before_rank_0() -> None:
    """Whose first step is at 0."""
    assert phases.busy([{"ts": -100.0, "dur": 50.0}, {"ts": -60.0, "dur": 20.0}]) == 60.0


@pytest.mark.parametrize(
    ("full", "file"),
    [("json.dump", "trace.json.gz"), ("matplotlib.figure.Figure.savefig", "trace.png")],
)
def test_a_full_disk_is_told_and_leaves_no_part_of_a_file(
    full: str, file: str, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    (tmp_path / "trace").mkdir()
    plant(tmp_path / "trace", 0, step(100, wait=5))

    def fail(_: object, part: Any, **__: object) -> None:
        if isinstance(part, Path):
            part.touch()
        raise OSError(errno.ENOSPC, os.strerror(errno.ENOSPC))

    monkeypatch.setattr(full, fail)
    options = ["-np", "1", "-H", "localhost:1", "--merge", str(tmp_path / "trace")]
    monkeypatch.setattr("sys.argv", ["profiling", *options])
    with pytest.raises(SystemExit, match=f"^error: {tmp_path}/{file}: No space left on device;"):
        profiling.main()
    left = {file.name for file in tmp_path.iterdir()} - {"trace.json.gz"}
    assert left == {"trace"}


def test_one_rank_is_profiled_without_a_timeline(tmp_path: Path) -> None:
    """Which is what a host with a single GPU gets by itself: Horovod combines nothing there."""
    command = [sys.executable, "-m", "benchmarks.profiling", "-np", "1", "--steps", "3"]
    done = run([*command, f"log_dir={tmp_path}"])
    assert done.returncode == 0, done.stdout
    (folder,) = tmp_path.glob("*/runs/*")
    assert "BACKWARD" in done.stdout and (folder / "trace.png").exists()
    assert not re.search("ERROR:|USDT:", done.stdout)  # torch's, of a GPU that is not there
    assert not list(folder.glob("trace/horovod*"))


@pytest.mark.parametrize("rank", [0, 1])
def test_the_timeline_is_packed_by_rank_0_alone(
    rank: int, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """The others see its file too: two that pack and delete it lose it."""
    (tmp_path / "horovod.json").write_text("[]")
    stopped: list[int] = []
    timeline = SimpleNamespace(
        is_initialized=lambda: True, stop_timeline=lambda: stopped.append(rank)
    )
    monkeypatch.setattr(runs.tracing, "hvd", timeline)
    monkeypatch.setenv("HOROVOD_TIMELINE", "DYNAMIC")
    trace = runs.tracing.StepTrace(str(tmp_path))
    trace._lightning_module = SimpleNamespace(trainer=SimpleNamespace(global_rank=rank))
    trace._timeline(start=False)
    assert stopped == [rank]
    assert (tmp_path / "horovod.json.gz").exists() == (rank == 0)
    assert (tmp_path / "horovod.json").exists() == (rank == 1)


@pytest.mark.parametrize(("batches", "steps"), [(13, "3 steps"), (11, "1 step"), (40, "10 steps")])
def test_training_that_ends_amid_the_steps_ends_the_last_of_them(
    batches: int, steps: str, tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    """Where validation and checkpoints of the last epoch are: it does not count, unless alone."""
    tracing = runs.tracing.StepTrace(str(tmp_path))
    limits = {"limit_train_batches": batches, "max_epochs": 1, "limit_val_batches": 0}
    trainer("horovod", profiler=tracing, **limits).fit(Net(), loader(global_batch=2))
    assert capsys.readouterr().out == f"trace   {tmp_path}: {steps} after 10\n"
    (trace,), _ = traces.read(tmp_path, 1)
    assert len(trace.steps) == int(steps.split()[0])
    left_out = trace.steps[-1:] if batches == 13 else []
    assert phases.plain_steps(trace) == [step for step in trace.steps if step not in left_out]


def test_without_a_wait_of_its_own_no_rank_is_called_slowest(tmp_path: Path) -> None:
    """Under DDP who is fast waits within its backward."""
    for rank in range(2):
        events = [e for e in step(100, wait=rank) if not e["name"].startswith("all-reduce")]
        plant(tmp_path, rank, events)
    ranks, _ = traces.read(tmp_path, 2)
    assert "slowest" not in phases.table(ranks, traces.Timeline())


def test_a_trace_of_more_ranks_is_not_taken_for_one_of_fewer(tmp_path: Path) -> None:
    for rank in range(3):
        plant(tmp_path, rank, step(100, wait=5))
    with pytest.raises(Refusal, match="has more ranks than 2: give the -np or -H"):
        traces.read(tmp_path, 2)

"""`make bench` counts right: known times must give known figures; one launch is real.

No test asserts a time that was measured.
"""

from __future__ import annotations

import csv
import json
import math
import os
import random
import re
import signal
import statistics
import subprocess
import sys
import time
from collections.abc import Callable
from itertools import pairwise
from pathlib import Path
from types import SimpleNamespace
from typing import Any

import pytest

from benchmarks import (
    check,
    files,
    hardware,
    launching,
    load,
    scaling,
    scaling_plan,
    scaling_plot,
    scaling_report,
)
from benchmarks.efficiency import (
    Results,
    Row,
    interval,
    rows,
    spread,
    spread_in_words,
    steps_per_epoch,
)
from benchmarks.launching import Failed, Job, Launcher
from benchmarks.scaling_predicted import lacks_all_reduces, predicted
from cluster.hosts import Host, Refusal, parse
from runs.bottleneck import PHASES
from tests.conftest import ROOT, run

QUIET = {"busy": 0.01, "gpu_busy": None, "arithmetic_ms": 8.0, "stolen": 0.0}
MACHINE = {
    "cpu": "Test CPU", "cores": 4, "memory_gib": 8, "gpus": [], "nics": {"eth0": 10000},
    "machine": 0,
}  # fmt: skip
HERE = ["INSTALL=true", f"PYTHON={sys.executable}"]  # nothing is to be installed
CASES = ("seconds", "seconds_p10", "seconds_p90")
Time = Callable[[Job, int], float]


def results(**settings: Any) -> Results:
    """A benchmark of which nothing has run."""
    asked = {
        "arguments": [], "mode": "weak", "modes": ["weak"], "strategies": ["horovod"],
        "sizes": [1, 2, 4], "repeats": 3, "steps": 100, "epochs": None, "warmup": 10,
        "network": None, "threads": 1, "batch_size": 32,
        "hosts": {"localhost": {"slots": 4, "gpus": None, "nic": None}}, **settings,
    }  # fmt: skip
    config = {"task": None, "model": {"_target_": "models.toy.Toy"}, "data": {"batch_size": 32}}
    return {
        "benchmark": "scaling", "settings": asked, "config": config,
        "hosts": {"localhost": MACHINE}, "environment": {}, "python": "3.11", "changes": None,
        "versions": {"torch": "2.11.0"}, "commit": "abc", "date": "2026-01-02T03:04:05",
        "oversubscribed": [], "trial": None, "finished": False, "runs": [],
    }  # fmt: skip


class Source:
    """Stands for the machine: gives times that are known, and keeps what was asked."""

    def __init__(self, time: Time, samples: int | None = None, **host: Any) -> None:
        self.time, self.samples, self.host = time, samples, {**QUIET, **host}
        self.asked: list[tuple[Job, list[str]]] = []

    def __call__(self, job: Job, length: list[str]) -> dict[str, Any]:
        earlier = sum(one == job for one, _ in self.asked[1:])  # the first does not count
        self.asked.append((job, length))
        ms = self.time(job, earlier)
        asked = dict(override.split("=") for override in length)
        batches = asked.get("callbacks.anatomy.batches")  # none with EPOCHS
        steps = batches and int(batches) - int(asked["callbacks.anatomy.warmup"])
        return {
            "measured_steps": steps,
            "strategy": job.strategy, "np": job.np, "batch": job.batch, "alone": job.alone,
            "step_ms": ms, "median_ms": ms, "hosts": {"localhost": dict(self.host)},
            "model": "toy", "train_samples": self.samples, "drop_last": False, "operations": "Gloo",
        }  # fmt: skip


def measured(source: Source, benchmark: Results | None = None) -> Results:
    benchmark = benchmark or results()
    scaling.run(benchmark, source, lambda: None)
    return benchmark


def by_size(benchmark: Results, **where: str) -> dict[int, Row]:
    return {
        row.np: row
        for row in rows(benchmark)
        if all(getattr(row, key) == value for key, value in where.items())
    }


# ---------------------------------------------------------------------------- figures


def test_weak_scaling_of_known_times() -> None:
    """A step of 10 ms that gets 12.5 and 20: 4 processes train twice as fast as one."""
    times = {1: 10.0, 2: 12.5, 4: 20.0}
    row = by_size(measured(Source(lambda job, _: times[job.np])))
    assert {np: each.speedup for np, each in row.items()} == {
        1: [1, 1, 1], 2: [1.6, 1.6, 1.6], 4: [2, 2, 2],
    }  # fmt: skip
    assert row[2].efficiency == [0.8] * 3 and row[4].efficiency == [0.5] * 3
    assert row[4].samples_per_second == [6400] * 3 and row[1].marks == []


def test_strong_scaling_shares_the_batch() -> None:
    benchmark = results(mode="strong", modes=["strong"])
    source = Source(lambda job, _: {1: 12.0, 2: 6.0, 4: 4.0}[job.np])
    row = by_size(measured(source, benchmark))
    assert {np: each.batch for np, each in row.items()} == {1: 32, 2: 16, 4: 8}
    assert row[2].speedup == [2] * 3 and row[4].speedup == [3] * 3
    assert row[4].efficiency == [0.75] * 3


def test_speedup_is_against_the_smallest_size() -> None:
    row = by_size(measured(Source(lambda job, _: 5.0 * job.np), results(sizes=[2, 4])))
    assert row[4].speedup == [1] * 3 and row[4].efficiency == [0.5] * 3
    assert "against 2 processes" in scaling_report.description(
        measured(Source(lambda job, _: 1.0), results(sizes=[2, 4]))
    )


def test_a_machine_that_gets_slower_all_the_time_has_the_same_speedup() -> None:
    source = Source(lambda job, repeat: {1: 10, 2: 12.5, 4: 20}[job.np] * 2**repeat)
    row = by_size(measured(source))
    assert row[4].speedup == [2] * 3 and row[4].step_ms == [20, 40, 80]


def test_seconds_an_epoch() -> None:
    """100 samples on 3 ranks: 34 each, 5 batches of 8."""
    whole = {"warmup": 13, "steps": 104}  # epochs of 13 and of 4 batches
    benchmark = results(sizes=[1, 4], batch_size=8, **whole) | {"trial": {"train_samples": 100}}
    assert [steps_per_epoch(benchmark, np, 8) for np in (1, 3, 4)] == [13, 5, 4]
    benchmark["trial"] = None
    row = by_size(measured(Source(lambda job, _: 50.0, samples=100), benchmark))
    assert row[1].epoch_seconds == pytest.approx([0.65] * 3)
    assert row[4].epoch_seconds == pytest.approx([0.2] * 3)
    assert row[4].speedup == pytest.approx([3.25] * 3)
    benchmark["trial"]["drop_last"] = True  # each step is of 8 samples a rank
    row = by_size(benchmark)
    assert row[1].epoch_seconds == pytest.approx([0.6] * 3)
    assert row[4].epoch_seconds == pytest.approx([0.15] * 3)
    assert row[4].speedup == pytest.approx([4] * 3)


def test_limit_train_batches_shortens_the_epoch() -> None:
    """100 samples make 13 batches of 8, the last of 4; on 4 ranks each has 4, the last of 1."""
    benchmark = results(sizes=[1, 4], batch_size=8, warmup=13, steps=104)
    source = Source(lambda job, _: 50.0, samples=100)
    for limit, steps in (
        (1.0, (13, 4)),
        (None, (13, 4)),
        (5, (5, 4)),
        (0.5, (6, 2)),
        (99, (13, 4)),
    ):
        benchmark["config"]["trainer"] = {"limit_train_batches": limit}
        benchmark["trial"], benchmark["runs"] = None, []
        row = by_size(measured(source, benchmark))
        for np, count in zip((1, 4), steps):
            assert row[np].epoch_seconds == pytest.approx([count * 0.05] * 3)
            # Batches are whole where the last one is cut off.
            each = np * 8 if count < {1: 13, 4: 4}[np] else 100 / count
            assert row[np].samples_per_second == pytest.approx([each / 0.05] * 3)
    benchmark["config"]["trainer"] = {"limit_train_batches": 2}
    assert by_size(benchmark)[4].speedup == pytest.approx([4] * 3)


@pytest.mark.parametrize("warmup, steps", [(10, 30), (10, 31), (0, 7), (39, 1)])
def test_parts_of_epochs_are_counted_as_they_are(warmup: int, steps: int) -> None:
    """1 ms a sample and nothing else: scaling is ideal, wherever small last batches lie."""
    shares = {ranks: 1256 // ranks for ranks in (1, 2, 4, 8)}

    def time(job: Job, repeat: int) -> float:
        whole, last = divmod(shares[job.np], 32)
        epoch = [32] * whole + [last]
        batches = [epoch[at % len(epoch)] for at in range(warmup, warmup + steps)]
        return sum(batches) / steps

    benchmark = results(sizes=[1, 2, 4, 8], warmup=warmup, steps=steps)
    row = by_size(measured(Source(time, samples=1256), benchmark))
    assert [row[ranks].efficiency for ranks in shares] == [pytest.approx([1.0] * 3)] * 4


def test_oversubscribed_sizes_are_set_against_processes_that_are_alone() -> None:
    benchmark = results(strategies=["horovod", "ddp"]) | {"oversubscribed": [4]}
    source = Source(lambda job, _: 40.0 if job.alone else 50.0)
    row = by_size(measured(source, benchmark), strategy="ddp")
    assert row[4].over_alone == [1.25] * 3 and row[4].marks[0] == "oversubscribed"
    assert row[4].speedup == [] and row[4].efficiency == [] and row[2].over_alone == []
    alone = [job for job, _ in source.asked if job.alone]
    assert alone == [Job("horovod", 4, 32, alone=True)] * 3  # one for both strategies


# ---------------------------------------------------------------------------- marks


@pytest.mark.parametrize(
    "host, mark",
    [
        ({"busy": 2 * load.BUSY_SHARE}, "other load 20%"),
        ({"stolen": 0.04}, "stolen 4%"),
    ],
)
def test_a_disturbed_host_is_marked(host: dict[str, float], mark: str) -> None:
    benchmark = measured(Source(lambda job, _: 1.0, **host))
    assert all(row.marks == [mark] for row in rows(benchmark))


@pytest.mark.parametrize("gpus, marks", [(["A GPU"], ["other load 50%"]), ([], [])])
def test_a_disturbed_gpu_is_marked_where_it_is_used(gpus: list[str], marks: list[str]) -> None:
    benchmark = results() | {"hosts": {"localhost": {**MACHINE, "gpus": gpus}}}
    source = Source(lambda job, _: 1.0, gpu_busy=0.5)
    assert all(row.marks == marks for row in rows(measured(source, benchmark)))


def test_slower_cores_are_marked_where_they_were() -> None:
    benchmark = measured(Source(lambda job, _: 1.0))
    benchmark["runs"][-1]["hosts"]["localhost"]["arithmetic_ms"] = 10.0
    slow = benchmark["runs"][-1]["np"]
    assert {row.np for row in rows(benchmark) if row.marks == ["cores 25% slower"]} == {slow}


def test_a_disturbance_of_the_processes_alone_is_marked_too() -> None:
    """Their runs are a half of the ratio that the row shows; its repeats are counted once."""
    disturbed = {"busy": 0.2, "stolen": 0.04, "arithmetic_ms": 10.0}
    benchmark = results() | {"oversubscribed": [4]}
    source = Source(lambda job, _: 40.0 if job.alone else 50.0)
    for each in measured(source, benchmark)["runs"]:
        each["hosts"]["localhost"] |= disturbed if each["alone"] else {}
    row = by_size(benchmark)
    marks = ["oversubscribed", "other load 20%", "stolen 4%", "cores 25% slower"]
    assert row[4].marks == marks and row[2].marks == []
    benchmark["runs"] = [each for each in benchmark["runs"] if each["repeat"] < 2 or each["alone"]]
    assert by_size(benchmark)[4].marks[:2] == ["oversubscribed", "2 repeats"]


def test_too_few_repeats_are_marked() -> None:
    once = scaling_report.description(measured(Source(lambda job, _: 1.0), results(repeats=1)))
    assert "1 interleaved repeat of 100 steps after a warm-up; not all" in once  # no brackets
    benchmark = measured(Source(lambda job, _: 1.0), results(repeats=2))
    assert all(row.marks == ["2 repeats"] for row in rows(benchmark))


@pytest.mark.parametrize(
    "count, low, high", [(1, 1, 1), (3, 1, 3), (8, 1, 8), (9, 2, 8), (20, 6, 15), (100, 40, 61)]
)
def test_the_interval_of_the_median(count: int, low: float, high: float) -> None:
    """Of 20, the 6th to the 15th, and of 100 the 40th to the 61st, as tables of the sign test."""
    assert interval([float(1 + value) for value in range(count)]) == (low, high)
    assert (spread_in_words(count) == "their range") == ((low, high) == (1, count))


def test_a_spread_has_values_that_were_measured() -> None:
    """The efficiencies of DDP on 2 processes in scaling_denoiser_amd-epyc-2-cores_2026-11-25."""
    values = [0.845, 0.849, 0.861, 0.865, 0.96]
    assert spread(values, 1, 100, " %") == "86.1 (84.5 to 96.0) %"
    assert (spread([2.0]), spread([])) == ("2.000", "")


def test_a_difference_smaller_than_the_noise_is_marked() -> None:
    """2 processes lose 1 % with a noise of 5 %, 4 processes lose half. With one repeat of three far
    off on one side, no difference can be told, as 1 lies between others."""
    factor = {1: 1.0, 2: 1.01, 4: 2.0}

    def time(job: Job, repeat: int) -> float:
        noisy = [0.95, 1.0, 1.05][repeat] if job.np > 1 else 1.0
        return 10 * factor[job.np] * noisy

    row = by_size(measured(Source(time)))
    assert row[2].marks == ["as ideal within noise"] and row[4].marks == []
    aside = [0.98, 1.5, 1.02]
    row = by_size(measured(Source(lambda job, repeat: aside[repeat] if job.np == 2 else 1.0)))
    assert row[2].marks == ["as ideal within noise"]


def test_strategies_that_differ_by_less_than_the_noise_are_marked() -> None:
    def time(job: Job, repeat: int) -> float:
        return 10 * ([0.95, 1.01, 1.05][repeat] if job.strategy == "ddp" and job.np == 2 else 1)

    benchmark = measured(Source(time), results(strategies=["horovod", "ddp"]))
    assert "as horovod within noise" in by_size(benchmark, strategy="ddp")[2].marks
    assert by_size(benchmark, strategy="ddp")[4].marks == []


# ---------------------------------------------------------------------------- the plan


def test_repeats_are_interleaved() -> None:
    source = Source(lambda job, _: 1.0)
    measured(source)
    assert [job.np for job, _ in source.asked] == [4, 1, 2, 4, 2, 4, 1, 4, 1, 2]
    steps = {tuple(length) for _, length in source.asked[1:]}
    assert steps == {
        (
            "trainer.max_epochs=-1", "trainer.max_steps=11000", "callbacks.anatomy.batches=110",
            "callbacks.anatomy.warmup=10",
        )
    }  # fmt: skip


def test_what_weak_and_strong_scaling_share_is_measured_once() -> None:
    benchmark = results(mode="both", modes=["weak", "strong"], sizes=[1, 2])
    planned = scaling_plan.jobs(benchmark["settings"], [])
    assert planned == [Job("horovod", 1, 32), Job("horovod", 2, 32), Job("horovod", 2, 16)]


def test_a_run_has_enough_steps_for_some_seconds() -> None:
    benchmark = results(steps=None)
    scaling.try_out(benchmark, Source(lambda job, _: 2.0))
    assert benchmark["trial"]["steps"] == 500 * scaling.SECONDS
    scaling.try_out(benchmark, Source(lambda job, _: 1e6))
    assert benchmark["trial"]["steps"] == scaling.MIN_STEPS


def test_horovod_is_tried_out_whichever_strategy_is_named_first() -> None:
    """A prediction needs the all-reduces of its operations, which DDP does not tell."""
    for strategies in (["ddp", "horovod"], ["ddp"]):
        source = Source(lambda job, _: 2.0)
        scaling.try_out(results(strategies=strategies), source)
        assert source.asked[0][0].strategy == strategies[-1]


def test_steps_are_batches_also_where_they_are_accumulated() -> None:
    benchmark = results(steps=100)
    benchmark["config"]["trainer"] = {"accumulate_grad_batches": 4}
    source = Source(lambda job, _: 10.0)
    measured(source, benchmark)
    assert {length[2] for _, length in source.asked[1:]} == {"callbacks.anatomy.batches=110"}
    assert source.asked[0][1][2] == "callbacks.anatomy.batches=30"
    assert "steps of a batch each, of which 4 acc" in scaling_report.description(benchmark)
    benchmark["settings"] |= {"epochs": 2}
    assert "2 whole epochs, in steps of a batch each" in scaling_report.description(benchmark)


@pytest.mark.parametrize("together, steps, warmup", [(32, 32, 32), (7, 35, 14), (1, 30, 10)])
def test_whole_updates_are_measured(
    together: int, steps: int, warmup: int, monkeypatch: pytest.MonkeyPatch
) -> None:
    """Of 20 batches none would be sent where 32 are accumulated."""
    trainer = {"accelerator": "cpu", "accumulate_grad_batches": together}
    config = {**results()["config"], "data": {"batch_size": 8}, "trainer": trainer}
    monkeypatch.setattr(scaling_plan, "configuration", lambda *_: config)
    benchmark, _ = scaling_plan.plan(scaling.parse(["--np", "1"]))
    source = Source(lambda job, _: 1e6)
    scaling.try_out(benchmark, source)
    assert benchmark["settings"]["warmup"] == warmup and benchmark["trial"]["steps"] == steps
    measured = int(source.asked[0][1][2].partition("=")[2]) - warmup
    assert measured % together == 0 and measured >= scaling.TRIAL_STEPS


@pytest.mark.parametrize("runs, asked", [(0, 20), (1, 100)])
def test_a_run_that_ends_early_is_no_measurement(runs: int, asked: int) -> None:
    """As by a callback that sets should_stop: 35 steps were told as 600. The trial is one too."""
    source = Source(lambda job, _: 1.0)

    def stopped(job: Job, length: list[str]) -> dict[str, Any]:
        ended = len(source.asked) == runs
        return source(job, length) | ({"measured_steps": 7} if ended else {})

    with pytest.raises(Failed, match=f"np=.*: 7 steps were measured, not {asked}: something els"):
        scaling.run(results(), stopped, lambda: None)


def test_whole_epochs_leave_the_first_one_out() -> None:
    benchmark = results(epochs=2, batch_size=8)
    benchmark["trial"] = {"train_samples": 100}
    benchmark["config"]["trainer"] = {"limit_train_batches": 1.0}
    wanted = ["trainer.max_epochs=3", "trainer.max_steps=-1", "callbacks.anatomy.warmup=5"]
    assert scaling_plan.length(benchmark, 3, 8) == wanted
    benchmark["config"]["trainer"] = {"limit_train_batches": 4}
    assert scaling_plan.length(benchmark, 3, 8)[-1] == "callbacks.anatomy.warmup=4"


def test_sizes_by_default() -> None:
    assert scaling_plan.sizes_of(None, parse("node1:4,node2:2")) == [1, 2, 4, 6]
    assert scaling_plan.sizes_of([4, 1, 4], None) == [1, 4]


@pytest.mark.parametrize(
    "settings, words",
    [
        ({"mode": "strong", "modes": ["strong"], "sizes": [1, 3, 5]}, "is not divisible by NP=3 5"),
        ({"arguments": ["trainer.max_steps=5"]}, "STEPS="),
        ({"arguments": ["strategy=ddp"]}, "STRATEGY="),
        ({"arguments": ["run_dir=mine"]}, "make bench sets run_dir itself"),
        ({"arguments": ["callbacks.anatomy.batches=5"]}, "STEPS="),
    ],
)
def test_what_cannot_be_measured_is_refused(settings: dict[str, Any], words: str) -> None:
    with pytest.raises(Refusal, match=words):
        scaling_plan.check(results(**settings)["settings"], {})


@pytest.mark.parametrize(
    "trainer, words",
    [
        ({"max_time": "00:00:00:30"}, "trainer.max_time=00:00:00:30: it ends runs"),
        ({"overfit_batches": 1}, "trainer.overfit_batches=1"),
        ({"fast_dev_run": True}, "trainer.fast_dev_run=True"),
        ({"accumulate_grad_batches": 32}, "STEPS=100: .*=32 of .*: give STEPS=128"),
    ],
)
def test_a_trainer_whose_steps_cannot_be_counted_is_refused(
    trainer: dict[str, Any], words: str
) -> None:
    settings = results()["settings"]
    none = {"max_time": None, "overfit_batches": 0.0, "fast_dev_run": False}
    scaling_plan.check(settings, {"trainer": none | {"accumulate_grad_batches": 10}})
    with pytest.raises(Refusal, match=words):
        scaling_plan.check(settings, {"trainer": none | trainer})


@pytest.mark.parametrize("data", [{"_target_": "my.Data"}, None, {"batch_size": "${oc.env:HOME}"}])
def test_data_without_a_number_for_its_batch_is_refused(data: dict[str, Any] | None) -> None:
    with pytest.raises(Refusal, match="data.batch_size"):
        scaling_plan.batch_size_of({"data": data})


def test_numbers_of_the_configuration_may_be_interpolations(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    """They are resolved; all else is kept as it is written, as a time or a folder differs from run
    to run, and whoever goes on or compares wants the same text."""
    written = """
task: x_${now:%H%M%S}
size: 8
data: {batch_size: "${oc.decode:'32'}", data_dir: "${data_dir}"}
trainer: {limit_train_batches: "${size}", accumulate_grad_batches: 1}
"""
    monkeypatch.setattr(scaling_plan, "_output", lambda command: written)
    config = scaling_plan.configuration([], ["horovod"])
    assert config["data"] == {"batch_size": 32, "data_dir": "${data_dir}"}
    assert config["trainer"] == {"limit_train_batches": 8, "accumulate_grad_batches": 1}
    assert config["task"] == "x_${now:%H%M%S}"
    written = "data: {batch_size: '${nothing}'}"
    with pytest.raises(Refusal, match="data.batch_size: Interpolation key 'nothing' not found"):
        scaling_plan.configuration([], ["horovod"])


def test_cores_are_counted_on_machines_not_on_hosts() -> None:
    """Two hosts made of one machine share its 4 cores; on two machines there are 8."""
    hosts = parse("node1:4,node2:4")
    one = {"node1": MACHINE, "node2": MACHINE}
    two = {"node1": MACHINE, "node2": {**MACHINE, "machine": 1}}
    cores = scaling_plan.cores_of_a_rank
    assert [cores(hosts, one, np) for np in (1, 2, 4, 8)] == [4, 2, 1, 0]
    assert cores(hosts, two, 8) == 1
    gpu = {"node1": {**MACHINE, "gpus": ["GPU"]}, "node2": MACHINE}
    with pytest.raises(Refusal, match="NP=2: 2 ranks on the 1 GPUs of node1"):
        cores(hosts, gpu, 2)


@pytest.mark.parametrize("how", ["trainer.accelerator", "CUDA_VISIBLE_DEVICES"])
def test_a_measurement_on_cpus_of_a_host_with_a_gpu_is_of_cpus(
    how: str, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    (tmp_path / "nvidia-smi").write_text("#!/bin/sh\necho 0, GPU-a, A GPU\n")
    (tmp_path / "nvidia-smi").chmod(0o755)
    monkeypatch.setenv("PATH", f"{tmp_path}:{os.environ['PATH']}")
    monkeypatch.delenv("CUDA_VISIBLE_DEVICES", raising=False)
    config = {"data": {"batch_size": 8}, "trainer": {"accelerator": "auto"}}
    monkeypatch.setattr(scaling_plan, "configuration", lambda *_: config)
    for visible, names in (("1", []), ("1,0", ["A GPU"]), ("GPU-a", ["A GPU"])):
        monkeypatch.setenv("CUDA_VISIBLE_DEVICES", visible)
        assert hardware.gpus() == names
    monkeypatch.delenv("CUDA_VISIBLE_DEVICES")
    assert hardware.gpus() == ["A GPU"]
    with pytest.raises(Refusal, match="NP=2: 2 ranks on the 1 GPUs of localhost"):
        scaling_plan.plan(scaling.parse(["--np", "2"]))
    if how == "CUDA_VISIBLE_DEVICES":
        monkeypatch.setenv(how, "")
        assert hardware.gpus() == []
    else:
        config["trainer"]["accelerator"] = "cpu"
    benchmark, _ = scaling_plan.plan(scaling.parse(["--np", "2"]))
    assert benchmark["hosts"]["localhost"]["gpus"] == []


@pytest.mark.parametrize(
    "gpus, visible, busy", [(None, None, 0.98), ((0,), "1", 0.5), (None, "GPU-b", 0.98)]
)
def test_the_load_of_other_gpus_is_none(
    gpus: tuple[int, ...] | None, visible: str | None, busy: float,
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch,
) -> None:  # fmt: skip
    rows = "0, GPU-a, 50, 40\n1, GPU-b, 98, 80\n"
    (tmp_path / "nvidia-smi").write_text(f"#!/bin/sh\nprintf '{rows}'\n")
    (tmp_path / "nvidia-smi").chmod(0o755)
    monkeypatch.setenv("PATH", f"{tmp_path}:{os.environ['PATH']}")
    monkeypatch.delenv("CUDA_VISIBLE_DEVICES", raising=False)
    if visible is not None:
        monkeypatch.setenv("CUDA_VISIBLE_DEVICES", visible)
    state = launching.ask([Host("localhost", 1, gpus=gpus)], "benchmarks.load")["localhost"]
    assert state["gpu_busy"] == busy


# ---------------------------------------------------------------------------- the file


def test_what_was_measured_is_kept_and_not_measured_again(
    tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    """Interrupted in the 5th run of 9; the 4th, of the same repeat as the 5th, is measured again
    with it, as they are set against each other. Another command writes its own file."""
    source = Source(lambda job, _: float(job.np))

    def interrupted(job: Job, length: list[str]) -> dict[str, Any]:
        if len(source.asked) == 5:
            raise KeyboardInterrupt
        return source(job, length)

    file, benchmark = scaling.open_file(results(), tmp_path)
    with pytest.raises(KeyboardInterrupt):
        scaling.run(benchmark, interrupted, lambda: files.write_json(benchmark, file))
    assert len(json.loads(file.read_text())["runs"]) == 4
    assert (
        "runs that are kept in" in (message := scaling._kept(benchmark, file))
        and ": 3; the" in message
    )

    named, _ = scaling.open_file(results(network="10 Gbit/s"), tmp_path)
    assert named.name == "scaling_toy_test-cpu-4-cores-10-gbit-s_2026-01-02.json"
    other, _ = scaling.open_file(results(repeats=5), tmp_path)
    assert other.name == file.stem + "_2.json"
    again, resumed = scaling.open_file(results() | {"date": "2026-01-03T00:00:00"}, tmp_path)
    assert again == file and len(resumed["runs"]) == 3
    assert "measured again: 1 run of the repeat that was interrupted" in capsys.readouterr().err
    rest = Source(lambda job, _: float(job.np))
    scaling.run(resumed, rest, lambda: files.write_json(resumed, file))
    assert [job.np for job, _ in rest.asked] == [2, 4, 1, 4, 1, 2]
    done = {(each["np"], each["repeat"]) for each in json.loads(file.read_text())["runs"]}
    assert len(done) == 9
    # All is there, but its report: the same command writes that.
    again, resumed = scaling.open_file(results(), tmp_path)
    assert again == file and len(resumed["runs"]) == 9
    files.write_json(resumed | {"finished": True}, file)
    assert scaling.open_file(results(), tmp_path)[0] == other, "finished files are not overwritten"


def test_an_interrupt_in_the_report_loses_no_measurement(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    benchmark = results()
    monkeypatch.setattr(sys, "argv", ["scaling", "--out", str(tmp_path)])
    launcher = SimpleNamespace(run=Source(lambda job, _: float(job.np)))
    monkeypatch.setattr(scaling, "plan", lambda _: (json.loads(json.dumps(benchmark)), launcher))
    monkeypatch.setattr(scaling_plot, "draw", SimpleNamespace)  # fails: no such arguments
    with pytest.raises(TypeError):
        scaling.main()
    (file,) = tmp_path.glob("*.json")
    kept = json.loads(file.read_text())
    assert len(kept["runs"]) == 9 and not kept["finished"]
    monkeypatch.setattr(scaling_plot, "draw", lambda *_: None)
    count = len(launcher.run.asked)
    assert scaling.main() == 0 and len(launcher.run.asked) == count
    assert json.loads(file.read_text())["finished"]
    assert "not all runs" not in file.with_suffix(".md").read_text()


@pytest.mark.parametrize(
    "changed",
    [
        {"commit": "other"},
        {"changes": "some"},
        {"config": {**results()["config"], "seed": 1}},
        {"hosts": {"localhost": {**MACHINE, "memory_gib": 16}}},
        {"versions": {"torch": "2.12.0"}},
    ],
)
def test_other_code_or_hardware_does_not_continue_a_file(
    tmp_path: Path, changed: dict[str, Any]
) -> None:
    file, benchmark = scaling.open_file(results(), tmp_path)
    files.write_json(benchmark, file)
    assert scaling.open_file(results(), tmp_path)[0] == file
    other, _ = scaling.open_file(results() | changed, tmp_path)
    assert other.name == f"{file.stem}_2.json"


# ---------------------------------------------------------------------------- reports


def both(tmp_path: Path) -> tuple[Results, Path]:
    times = {1: 10.0, 2: 11.0, 4: 14.0}
    benchmark = results(mode="both", modes=["weak", "strong"], strategies=["horovod", "ddp"])
    benchmark["oversubscribed"] = [4]
    source = Source(lambda job, repeat: times[job.np] * (1 + 0.01 * repeat), samples=1024)
    file, benchmark = scaling.open_file(measured(source, benchmark), tmp_path)
    benchmark["predicted"] = [
        {
            "mode": "weak",
            "strategy": "horovod",
            "np": np,
            "step_ms": 11,
            "low_ms": 10,
            "high_ms": 12,
        }
        for np in (1, 2, 4)
    ]
    benchmark["finished"] = True
    files.write_json(benchmark, file)
    return benchmark, file


def test_tables_and_plots_are_written(tmp_path: Path) -> None:
    benchmark, file = both(tmp_path)
    assert "scaling_toy_test-cpu-4-cores_2026-01-02" in scaling_report.write(benchmark, file)
    text = file.with_suffix(".md").read_text()
    assert (
        "| weak | horovod | 2 | 32 | 11.11 (11.00 to 11.22) | 11.00 (10.00 to 12.00) "
        "| 5,761 (5,704 to 5,818) | 0.1778 (0.1760 to 0.1795) | 1.82 (1.82 to 1.82) |" in text
    )
    assert "their range; predicted (at best to at worst) from the smallest size and" in text
    assert "commit abc" in text and "Test CPU, 4 cores" in text and "RTX 2080 Ti" in text
    with file.with_suffix(".csv").open() as lines:
        table = list(csv.DictReader(lines))
    assert len(table) == 12 and table[1]["mode"] == "weak" and float(table[1]["step_ms_min"]) == 11
    assert table[2]["speedup_median"] == "" and float(table[2]["over_alone_median"]) == 1
    assert file.with_suffix(".png").read_bytes().startswith(b"\x89PNG")
    drawn = file.with_suffix(".svg").read_text()
    scaling_report.write(benchmark, file)
    assert file.with_suffix(".svg").read_text() == drawn


@pytest.mark.parametrize("sizes", [[1, 2, 4], list(range(1, 13)), [2**i for i in range(12)]])
def test_a_plot_has_room_for_its_words(sizes: list[int], monkeypatch: pytest.MonkeyPatch) -> None:
    drawn: list[Any] = []
    monkeypatch.setattr(scaling_plot, "save", lambda figure, name: drawn.append(figure))
    benchmark = measured(Source(lambda job, _: 10.0), results(sizes=sizes, repeats=1))
    scaling_plot.draw(
        benchmark, "Intel(R) Xeon(R) Platinum 8480+ CPU @ 2.00GHz, 56 cores " * 2, Path()
    )
    (figure,) = drawn
    figure.draw_without_rendering()
    title = figure._suptitle.get_window_extent()
    assert figure.bbox.x0 <= title.x0 and title.x1 <= figure.bbox.x1
    left, right = figure.axes
    for axis, ends in ((left.xaxis, "x0 x1"), (right.xaxis, "x0 x1"), (left.yaxis, "y0 y1")):
        boxes = [tick.label1.get_window_extent() for tick in axis.get_major_ticks()]
        assert len(boxes) >= 3
        near, far = ends.split()
        assert all(getattr(a, far) <= getattr(b, near) for a, b in pairwise(boxes))


def test_slow_jobs_have_as_many_digits_as_fast_ones() -> None:
    benchmark = measured(Source(lambda job, _: 12345.6 * job.np), results(batch_size=4, sizes=[2]))
    (row,) = rows(benchmark)
    row.predicted_ms = [24691.2] * 3
    shown = {name: show(row) for name, show in scaling_report.COLUMNS.items()}
    assert shown["ms a step"] == shown["predicted"] == "24,691"
    assert shown["samples/s"] == "0.3240"


def all_reduce(folder: Path, name: str, date: str = "2026-01-01", **changed: Any) -> Path:
    """2 ranks, 100 MB/s, and 1 ms that no bytes explain: 4 times the latency."""
    sizes = []
    for size in (2**12, 2**20, 2**24):
        seconds = 1e-3 + size / 1e8
        sizes.append({"bytes": size} | dict.fromkeys(CASES, seconds))
    content = {
        "sizes": sizes, "hosts": [{"name": "localhost", "slots": 4}], "ranks": ["a", "a"],
        "operations": "Gloo", "date": date, "cpu": MACHINE["cpu"], "cores": MACHINE["cores"],
    }  # fmt: skip
    file = folder / f"allreduce_{name}.json"
    files.write_json(content | changed, file)
    return file


def test_the_curve_is_predicted_from_the_smallest_size_and_all_reduces(tmp_path: Path) -> None:
    """A step of 10 ms that ends with an all-reduce of 1 MB: 10 and 15 ms on 2 and 4 ranks for its
    bytes; 1 and 2 ms for latencies, of which half of the 1 ms are taken for one."""
    benchmark = measured(Source(lambda job, _: 10.0), results(sizes=[1, 2, 4, 8]))
    benchmark["oversubscribed"] = [8]
    for each in benchmark["runs"]:
        each["phases_ms"] = {"forward": 4.0, "backward": 4.0, "data": 0.0, "all_reduce": 0.0}
        each["phases_ms"] |= {"optimizer": 1.0, "rest": 1.0, "straggler": 0.0}
        sent = 2 * (each["np"] - 1) / each["np"] * 1e6
        wire = {"payload_bytes": 1e6, "bytes": sent, "calls": 1.0}
        each["wire"] = wire if each["np"] > 1 else None
    right = all_reduce(tmp_path, "right")
    wrong = [
        all_reduce(tmp_path, "older", "2025-01-01", sizes=[]),
        all_reduce(tmp_path, "elsewhere", "2026-02-01", cpu="another"),
        all_reduce(tmp_path, "others", "2026-02-01", hosts=[{"name": "b", "slots": 2}]),
        all_reduce(tmp_path, "mpi", "2026-02-01", operations="MPI"),
        all_reduce(tmp_path, "one", "2026-02-01", sizes=[{"bytes": 8, "seconds": [1e-3]}]),
    ]
    curve, sources = predicted(benchmark, [*wrong, right])
    assert sources == [right.name]
    assert [each["np"] for each in curve] == [1, 2, 4]
    assert [each["step_ms"] for each in curve] == pytest.approx([10, 21, 27])
    assert curve[2]["low_ms"] < 27 < curve[2]["high_ms"]
    assert by_size(benchmark | {"predicted": curve})[4].predicted_ms[0] == pytest.approx(27)
    assert predicted(benchmark, wrong[1:]) == ([], [])
    host = benchmark["hosts"]["localhost"]
    for node, expected in (("a", True), ("b", False)):  # another host that is a localhost to itself
        of_node = benchmark | {"hosts": {"localhost": host | {"node": node}}}
        assert bool(predicted(of_node, [right])[0]) == expected
    settings = benchmark["settings"]
    named = benchmark | {"settings": settings | {"network": "10gbit"}}
    slow = all_reduce(tmp_path, "slow", network="100mbit")
    assert not predicted(named, [slow])[0] and predicted(benchmark, [slow])[0]
    for unnamed in ("loopback", "network", "10gbit"):
        assert predicted(named, [all_reduce(tmp_path, "same", network=unnamed)])[0]
    assert lacks_all_reduces(benchmark, wrong[1:]) and not lacks_all_reduces(benchmark, [right])
    benchmark["config"]["trainer"] = {"accumulate_grad_batches": 2}  # no all-reduce would help
    assert not lacks_all_reduces(benchmark, [])
    del benchmark["config"]["trainer"]
    for exchanges in (2, 1):  # as of a GAN
        for each in benchmark["runs"]:
            each["wire"] = each["wire"] and each["wire"] | {"exchanges": exchanges}
        assert lacks_all_reduces(benchmark, []) == bool(predicted(benchmark, [right])[0])
        assert lacks_all_reduces(benchmark, []) == (exchanges == 1)
    for other in (
        {"sizes": [1]},
        {"sizes": [1, 8]},
        {"modes": ["strong"]},
        {"strategies": ["ddp"]},
    ):
        assert not lacks_all_reduces(benchmark | {"settings": settings | other}, [])
    for alone in ([4], [4, 8]):  # nothing is predicted from itself
        assert predicted(benchmark | {"settings": settings | {"sizes": alone}}, [right]) == ([], [])
    two_hosts = {name: {"slots": 2} for name in ("localhost", "b")}
    apart = benchmark | {"settings": benchmark["settings"] | {"hosts": two_hosts}}
    assert not predicted(apart, [right])[0]  # nothing was measured between them
    strong = benchmark | {"settings": benchmark["settings"] | {"modes": ["strong"]}}
    assert not predicted(strong, [right])[0]


def test_a_prediction_begins_at_the_median_of_an_even_number_of_repeats(tmp_path: Path) -> None:
    benchmark = measured(
        Source(lambda job, repeat: [10.0, 30.0][repeat]), results(sizes=[1, 2], repeats=2)
    )
    for each in benchmark["runs"]:
        each["phases_ms"] = dict.fromkeys([*PHASES, "straggler"], 0.0) | {"forward": 4.0}
        sent = {"payload_bytes": 1e6, "bytes": 1e6, "calls": 1.0}
        each["wire"] = sent if each["np"] > 1 else None
    curve, _ = predicted(benchmark, [all_reduce(tmp_path, "right")])
    assert curve[0]["step_ms"] == pytest.approx(statistics.median(by_size(benchmark)[1].step_ms))
    # The range has the repeats of the smallest size in it.
    assert curve[1]["low_ms"] < curve[1]["step_ms"] / 1.9 < 1.4 * curve[1]["step_ms"]
    assert curve[1]["high_ms"] > 1.4 * curve[1]["step_ms"]


def test_the_published_efficiency_is_that_of_the_published_times() -> None:
    assert "95.1 %, 94.0 %, 92.3 %" in scaling_report.published()


def test_the_readme_has_the_newest_result() -> None:
    """Of those that git has: whoever measures something need not put it there."""
    listed = ["git", "ls-files", "benchmarks/results/scaling_*.json"]
    tracked = subprocess.run(listed, cwd=ROOT, capture_output=True, text=True, check=True).stdout
    readme = (ROOT / "README.md").read_text()
    newest = scaling_report.newest(ROOT / name for name in tracked.split())
    block = scaling_report.readme_block(newest)
    assert scaling_report.with_block(readme, block) == readme, "make bench-readme writes it"


def test_only_the_block_of_the_readme_changes(tmp_path: Path) -> None:
    assert scaling_report.newest([]) is None
    benchmark, file = both(tmp_path)
    unfinished = {**benchmark, "finished": False, "date": "2027-01-01T00:00:00"}
    (tmp_path / "scaling_later.json").write_text(json.dumps(unfinished))
    for name, text in (("half", json.dumps(benchmark)[:-300]), ("list", "[]"), ("empty", "")):
        (tmp_path / f"scaling_{name}.json").write_text(text)
    older = {"finished": True, "date": "2027-01-02T00:00:00"}  # of another form
    (tmp_path / "scaling_older.json").write_text(json.dumps(older))
    assert scaling_report.newest(tmp_path.glob("*.json")) == file
    readme = f"before\n{scaling_report.BEGIN}\nold \\1\n{scaling_report.END}\nafter\n"
    changed = scaling_report.with_block(readme, "new \\1")
    assert changed == f"before\n{scaling_report.BEGIN}\n\nnew \\1\n\n{scaling_report.END}\nafter\n"


def test_a_report_of_no_result_is_refused(tmp_path: Path) -> None:
    (tmp_path / "none.json").write_text("{}")
    older = results() | {"finished": True}
    del older["settings"]
    (tmp_path / "older.json").write_text(json.dumps(older))
    for report, name, message in (
        ("scaling", "none.json", "not made by make bench"),
        ("scaling", "gone.json", "No such file"),
        ("scaling", "older.json", "lacks what make bench writes: KeyError('settings')"),
        ("losses", "gone.json", "No such file"),
        ("losses", "older.json", "KeyError('jobs'); give a file of make bench-losses"),
    ):
        done = run([sys.executable, "-m", f"benchmarks.{report}_report", str(tmp_path / name)])
        assert done.returncode == 1 and done.stdout.startswith("error: ") and message in done.stdout


# ---------------------------------------------------------------------------- bench-check


def compared(tmp_path: Path, old: Results, new: Results) -> subprocess.CompletedProcess[str]:
    for name, benchmark in (("old", old), ("new", new)):
        (tmp_path / name).write_text(json.dumps(benchmark))
    paths = [str(tmp_path / "old"), str(tmp_path / "new")]
    make = ["make", "-s", "bench-check", f"OLD={paths[0]}", f"NEW={paths[1]}"]
    return run([*make, *HERE])


def noisy(factor: float = 1.0, spread: float = 0.02) -> Results:
    """4 processes are slower by `factor`; repeats differ by twice `spread`."""

    def time(job: Job, repeat: int) -> float:
        return 10 * (1 + spread * (repeat - 1)) * (factor if job.np == 4 else 1)

    return measured(Source(time)) | {"finished": True}


def test_a_regression_beyond_the_noise_fails_and_is_named(tmp_path: Path) -> None:
    done = compared(tmp_path, noisy(), noisy(1.10))
    assert done.returncode == 2, done.stdout  # that of make, when a command ended with 1
    assert "Error 1" in done.stdout
    last = done.stdout.split("regressed, 1 of 3 rows:\n")[1]
    assert last.startswith("weak horovod np=4: 10.00 -> 11.00 ms a step, +10.0%")
    assert done.stdout.count("as before") == 2


@pytest.mark.parametrize("factor, spread", [(1.10, 0.06), (1.02, 0.0), (0.8, 0.01)])
def test_what_the_noise_or_the_floor_hides_is_no_regression(factor: float, spread: float) -> None:
    lines, regressed = check.compare(noisy(1.0, spread), noisy(factor, spread))
    assert len(lines) == 3 and regressed == []


def test_what_is_beyond_the_floor_is_told_whichever_way_it_is() -> None:
    assert check.compare(noisy(1.0, 0.0), noisy(1.04, 0.0))[1]
    lines, regressed = check.compare(noisy(1.10), noisy())
    assert lines[2].endswith("faster") and regressed == []


def test_marks_of_both_files_are_told() -> None:
    old, new = noisy(), noisy(1.10)
    assert [old["runs"][place]["np"] for place in (0, -1)] == [1, 2]
    old["runs"][0]["hosts"]["localhost"]["stolen"] = 0.5
    old["runs"][-1]["hosts"]["localhost"]["stolen"] = 0.4
    new["runs"][-1]["hosts"]["localhost"]["busy"] = 0.3
    lines, _ = check.compare(old, new)
    assert lines[0].endswith("as before  (OLD: stolen 50%)")
    assert lines[1].endswith("as before  (OLD: stolen 40%; NEW: other load 30%)")
    assert lines[2].endswith("slower")


@pytest.mark.parametrize("hung", ["OLD", "NEW"])
def test_one_repeat_that_hung_hides_no_regression(hung: str) -> None:
    old, new = (
        measured(Source(lambda job, repeat, f=f: f * (10 + repeat / 10)), results(repeats=5))
        | {"finished": True}
        for f in (1.0, 1.1)
    )
    runs = (old if hung == "OLD" else new)["runs"]
    slowest = max((run for run in runs if run["np"] == 4), key=lambda run: run["step_ms"])
    slowest["step_ms"] *= 3
    _, regressed = check.compare(old, new)
    (line,) = (line for line in regressed if "np=4" in line)
    assert "10.20 -> 11.22 ms a step, +10.0%; by chance in 0.8% of cases: slower" in line


def test_of_four_repeats_all_count() -> None:
    """All of one above all of the other: one of the 70 ways to choose 4 of 8."""
    assert check._chance([5, 6, 7, 8], [1, 2, 3, 4]) == pytest.approx(1 / 70)
    assert check._chance([6, 7, 8, 9, 10], [1, 2, 3, 4, 99]) == pytest.approx(1 / 126)


@pytest.mark.parametrize("repeats, caught", [(3, 0.7), (5, 0.75), (10, 0.97), (20, 0.99)])
def test_more_repeats_see_more_and_cry_wolf_no_more_often(repeats: int, caught: float) -> None:
    """Times whose noise is lognormal, 7 %; a fifth slower, and as before."""
    draw = random.Random(3)

    def share(factor: float, tries: int = 300) -> float:
        count = 0
        for _ in range(tries):
            old, new = ([draw.lognormvariate(0, 0.07) for _ in range(repeats)] for _ in range(2))
            slower = [factor * value for value in new]
            before, after = (Row("weak", "horovod", 2, 1, x, [], []) for x in (old, slower))
            count += check._verdict("", before, after)[1]
        return count / tries

    assert share(1.2) >= caught and share(1.0) <= 0.07


def test_a_machine_that_has_become_slower_is_not_the_code() -> None:
    new = noisy(1.3)
    for each in new["runs"]:
        each["hosts"]["localhost"]["arithmetic_ms"] *= 1.3
    with pytest.raises(check.Refusal, match=r"took 8.00 ms on localhost and takes 10.40: the mach"):
        check.compare(noisy(), new)
    with pytest.raises(check.Refusal, match="took 10.40 ms on localhost and takes 8.00"):
        check.compare(new, noisy())  # nor is one that has become faster


def test_keys_that_one_of_them_does_not_know_are_not_compared() -> None:
    new = noisy()
    new["config"] = {**new["config"], "new": {"key": 1}}
    assert check.compare(noisy(), new)[1] == check.compare(new, noisy())[1] == []


def test_more_sizes_are_compared_where_the_ranks_of_the_others_were_where_they_are() -> None:
    """make bench gives localhost as many slots as the largest size has."""
    new = measured(Source(lambda job, _: 10.0), results(sizes=[1, 2, 4, 8])) | {"finished": True}
    new["settings"]["hosts"] = {"localhost": {"slots": 8, "gpus": None, "nic": None}}
    assert len(check.compare(noisy(), new)[0]) == 3
    one = {"slots": 4, "gpus": None, "nic": None}
    for slots, now in ((2, "node1:2,node2:2"), (3, "node1:3,node2:1"), (8, "")):
        old, new = noisy(), noisy()
        for benchmark, count in ((old, 4), (new, slots)):
            benchmark["settings"]["hosts"] = {"node1": {**one, "slots": count}, "node2": one}
        if now:
            words = f"comparable: the place of NP=4 was node1:4 and is {now}$"
            with pytest.raises(check.Refusal, match=words):
                check.compare(old, new)
        else:
            assert len(check.compare(old, new)[0]) == 3
    for other, words in (
        (
            {"localhost": {**one, "gpus": [1]}},
            "gpus given for localhost was not given and is ",
        ),
        (
            {"localhost": {**one, "nic": "eth1"}},
            "nic given for localhost was not given and is e",
        ),
        ({"b": one}, "the list of hosts was localhost and is b"),
    ):
        new = noisy()
        new["settings"]["hosts"] = other
        with pytest.raises(check.Refusal, match=words):
            check.compare(noisy(), new)


def test_files_that_cannot_be_compared_are_refused() -> None:
    for place, key, value, words in [
        ("config", "data", {"batch_size": 64}, "data.batch_size was 32 and is 64"),
        ("hosts", "localhost", {**MACHINE, "cpu": "Other"}, "cpu of localhost was Test CPU"),
        ("settings", "threads", 2, "threads was 1 and is 2"),
        ("settings", "network", "500mbit", "network was None and is 500mbit"),
        ("environment", "HOROVOD_CYCLE_TIME", "5", "the environment was {} and is"),
    ]:
        new = noisy()
        new[place] = {**new[place], key: value}
        with pytest.raises(check.Refusal, match=words):
            check.compare(noisy(), new)
    # What the benchmark sets itself is of no account.
    new = noisy()
    ours = {"trainer": {"max_epochs": 9}, "callbacks": {"stop": {"patience": 3}}, "test": False}
    old = {"trainer": {"max_epochs": 1}, "callbacks": {"stop": {"patience": 2}}, "test": True}
    new["config"], before = {**new["config"], **ours}, noisy()
    before["config"] = {**before["config"], **old}
    assert check.compare(before, new)[1] == []
    few = measured(Source(lambda job, _: 1.0), results(repeats=2))
    with pytest.raises(check.Refusal, match="2 of the 3 repeats"):
        check.compare(noisy(), few)
    for step_ms in (math.nan, math.inf, -1.0):
        broken = noisy()
        broken["runs"][-1]["step_ms"] = step_ms
        with pytest.raises(check.Refusal, match="a step of no measurable time in NEW"):
            check.compare(noisy(), broken)
    with pytest.raises(check.Refusal, match="np=4 was not measured in NEW"):
        check.compare(noisy(), measured(Source(lambda job, _: 1.0), results(sizes=[1, 2])))


@pytest.mark.parametrize(
    "text, words",
    [
        (None, "No such file"), ("{", "no JSON"), ("[]", "bench"),
        (json.dumps({**results(), "finished": False}), "was interrupted"),
    ],
)  # fmt: skip
def test_what_is_no_result_is_told(tmp_path: Path, text: str | None, words: str) -> None:
    if text is not None:
        (tmp_path / "result.json").write_text(text)
    with pytest.raises(check.Refusal, match=words):
        check.read(tmp_path / "result.json")


@pytest.mark.parametrize(
    "change",
    [
        lambda benchmark: benchmark["runs"][0].update(hosts={}),
        lambda benchmark: benchmark["runs"][0].update(step_ms=0.0),
        lambda benchmark: benchmark.update(runs=[]),
        lambda benchmark: benchmark.pop("trial"),
        lambda benchmark: benchmark["runs"][0].pop("hosts"),
    ],
    ids=["hosts of a run: {}", "step_ms 0", "no rows", "no trial", "a run without hosts"],
)
def test_files_that_lack_something_have_not_regressed(
    change: Callable[[Results], Any], tmp_path: Path, monkeypatch: pytest.MonkeyPatch,
    capsys: pytest.CaptureFixture[str],
) -> None:  # fmt: skip
    """Status 1 is that of a regression."""
    benchmark = noisy()
    change(benchmark)
    (tmp_path / "a.json").write_text(json.dumps(benchmark))
    monkeypatch.setattr(sys, "argv", ["check", *[str(tmp_path / "a.json")] * 2])
    capsys.readouterr()
    assert check.main() == 2
    (line,) = capsys.readouterr().err.splitlines()
    assert line.startswith("error: ")


def test_a_reader_that_goes_away_is_no_regression(tmp_path: Path) -> None:
    (tmp_path / "a.json").write_text(json.dumps(noisy()))
    command = [sys.executable, "-m", "benchmarks.check", *[str(tmp_path / "a.json")] * 2]
    reading, writing = os.pipe()
    os.close(reading)
    done = subprocess.run(command, cwd=ROOT, stdout=writing, stderr=subprocess.PIPE, text=True)
    os.close(writing)
    assert done.returncode == 2 and re.fullmatch("error: .*\n", done.stderr)


# ---------------------------------------------------------------------------- the command


def test_the_line_of_make() -> None:
    asked = ["NP=1 2 4", "HOSTS=a:2,b:2", "STRATEGY=horovod ddp", "MODE=both", "ARGS=model.lr=1"]
    line = run(["make", "-n", "-s", "bench", *asked]).stdout.replace("\\\n", " ").split()
    parsed = scaling.parse(line[line.index("benchmarks.scaling") + 1 :])
    assert (parsed.np, parsed.hosts, parsed.strategy) == ([1, 2, 4], "a:2,b:2", ["horovod", "ddp"])
    assert (parsed.mode, parsed.overrides) == ("both", ["model.lr=1"])
    line = run(["make", "-n", "-s", "bench"]).stdout.replace("\\\n", " ").split()
    parsed = scaling.parse(line[line.index("benchmarks.scaling") + 1 :])
    assert (parsed.np, parsed.hosts, parsed.overrides) == (None, "", [])


@pytest.mark.parametrize(
    "line, words",
    [
        (["--warmup", "-1"], "WARMUP=-1: at least 0"),
        (["--epochs", "2", "--warmup", "5"], "WARMUP=5: with EPOCHS the first epoch is left out"),
        (["--steps", "2", "--epochs", "2"], "STEPS and EPOCHS"),
        (["--repeats", "0"], "REPEATS=0: at least 1"),
    ],
)
def test_a_line_that_contradicts_itself_is_refused(
    line: list[str], words: str, capsys: pytest.CaptureFixture[str]
) -> None:
    with pytest.raises(SystemExit):
        scaling.parse(line)
    assert words in capsys.readouterr().err


def test_what_is_not_given_has_its_default() -> None:
    assert scaling.parse([]).warmup == scaling.parse(["--epochs", "2"]).warmup == scaling.WARMUP
    assert scaling.parse(["--warmup", "0"]).warmup == 0
    twice = scaling.parse(["--strategy", "horovod", "ddp", "horovod"])
    assert twice.strategy == ["horovod", "ddp"]


def test_a_mistake_is_told_in_a_line_before_anything_runs() -> None:
    done = run(["make", "-s", "bench", "ARGS=data.batchsize=3", *HERE])
    assert done.returncode == 2
    assert re.match("error: data.batchsize: data has no key 'batchsize'", done.stdout)


def test_a_measurement_that_is_told_to_end_ends_its_ranks(tmp_path: Path) -> None:
    """As by its terminal that is closed; the ranks are in a session of their own."""
    seconds = f"600.{os.getpid()}"
    script = f"""
import signal, sys
from pathlib import Path
from benchmarks.launching import train
from cluster.signals import interrupt_at_signals
signal.signal(signal.SIGHUP, signal.SIG_DFL)
interrupt_at_signals()
ranks = [sys.executable, "-m", "cluster.horovodrun", "-np", "2", "-H", "localhost:2"]
train([*ranks, "sleep", "{seconds}"], "sleep", Path("{tmp_path / "log"}"), threads=1)
"""
    process = subprocess.Popen([sys.executable, "-c", script], cwd=ROOT, stderr=subprocess.PIPE)
    deadline = time.monotonic() + 60

    def ranks() -> int:
        done = subprocess.run(["pgrep", "-fx", f"sleep {seconds}"], capture_output=True)
        return len(done.stdout.split())

    while ranks() < 2:
        assert process.poll() is None and time.monotonic() < deadline
        time.sleep(0.05)
    process.send_signal(signal.SIGHUP)
    _, stderr = process.communicate(timeout=60)
    assert stderr.endswith(b"KeyboardInterrupt\n")
    assert ranks() == 0


@pytest.fixture(scope="module")
def launched() -> list[dict[str, Any]]:
    """Two ranks, and two processes that are alone, on this host."""
    hosts = parse("localhost:2")
    launcher = Launcher(hosts, ["-H", "localhost:2"], ["data.num_workers=0"], threads=1)
    length = scaling_plan.steps_of(2, 5)
    return [launcher.run(Job("horovod", 2, 16, alone), length) for alone in (False, True)]


def test_a_run_is_the_job_itself(launched: list[dict[str, Any]]) -> None:
    together, alone = launched
    assert together["measured_steps"] == alone["measured_steps"] == 5
    assert together["operations"] == "Gloo" and together["train_samples"] == 1257
    assert together["step_ms"] > 0 and together["phases_ms"] and alone["phases_ms"] is None
    assert set(together["hosts"]["localhost"]) >= set(QUIET)


def test_a_job_that_fails_tells_its_last_words() -> None:
    """The hosts that the launcher is given have too few slots."""
    launcher = Launcher(parse("localhost:2"), ["-H", "localhost:1"], [], threads=1)
    words = "(?s)NP=2 processes on 1 slots.*\nerror: np=2 horovod, batch 16 a process: ended with"
    with pytest.raises(Failed, match=words):
        launcher.run(Job("horovod", 2, 16), scaling_plan.steps_of(2, 5))

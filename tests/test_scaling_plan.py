"""What `make bench` will run, and what it refuses to."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

import pytest

from benchmarks import hardware, launching, load, overrides, scaling, scaling_plan, scaling_report
from benchmarks.launching import Failed, Job
from cluster.hostfile import parse
from cluster.hosts import Host, Refusal
from tests.scaling_source import MACHINE, Source, measured, results


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
    for epochs, words in ((1, "1 whole epoch, "), (2, "2 whole epochs, ")):
        benchmark["settings"] |= {"epochs": epochs}
        assert f"{words}in steps of a batch each" in scaling_report.description(benchmark)


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


def test_an_epoch_of_other_batches_than_were_counted_is_no_measurement() -> None:
    """As of a stream that tells 192 of 240 samples on 2 ranks: alone it has 7 batches, not 6."""
    source = Source(lambda job, _: 1.0, samples=192)

    def stream(job: Job, length: list[str]) -> dict[str, Any]:
        return source(job, length) | ({"measured_steps": 8} if len(source.asked) == 2 else {})

    benchmark = results(sizes=[1, 2], epochs=1)
    benchmark["trial"] = {"steps": 30, "train_samples": 192}
    source.asked.append((Job("horovod", 2, 32), []))  # the trial
    with pytest.raises(Failed, match="np=1 .*: 8 steps were measured, not 6: .* then give STEPS"):
        scaling.run(benchmark, stream, lambda: None)


def test_whole_epochs_leave_the_first_one_out() -> None:
    benchmark = results(epochs=2, batch_size=8)
    benchmark["trial"] = {"train_samples": 100}
    benchmark["config"]["trainer"] = {"limit_train_batches": 1.0}
    wanted = ["trainer.max_epochs=3", "trainer.max_steps=-1", "callbacks.anatomy.warmup=5"]
    assert scaling_plan.length(benchmark, 3, 8) == wanted
    benchmark["config"]["trainer"] = {"limit_train_batches": 4}
    assert scaling_plan.length(benchmark, 3, 8)[-1] == "callbacks.anatomy.warmup=4"


def test_the_epoch_of_a_process_alone_is_of_all_samples() -> None:
    benchmark = results(sizes=[4], epochs=1, batch_size=8) | {"oversubscribed": [4]}
    source = Source(lambda job, _: 1.0, samples=100)
    measured(source, benchmark)
    warmups = {(job.alone, length[-1]) for job, length in source.asked if length}
    warmup = "callbacks.anatomy.warmup="
    assert {(False, f"{warmup}4"), (True, f"{warmup}13")} <= warmups


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
        overrides.batch_size_of({"data": data})


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
    monkeypatch.setattr(overrides, "_output", lambda command: written)
    config = overrides.configuration([], ["horovod"])
    assert config["data"] == {"batch_size": 32, "data_dir": "${data_dir}"}
    assert config["trainer"] == {"limit_train_batches": 8, "accumulate_grad_batches": 1}
    assert config["task"] == "x_${now:%H%M%S}"
    written = "data: {batch_size: '${nothing}'}"
    with pytest.raises(Refusal, match="data.batch_size: Interpolation key 'nothing' not found"):
        overrides.configuration([], ["horovod"])


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


@pytest.mark.parametrize("gpus, oversubscribed", [([], [2]), (["A GPU", "A GPU"], [])])
def test_ranks_that_share_cores_and_no_gpu_are_not_oversubscribed(
    gpus: list[str], oversubscribed: list[int], monkeypatch: pytest.MonkeyPatch
) -> None:
    config = {"data": {"batch_size": 8}, "trainer": {}}
    monkeypatch.setattr(scaling_plan, "configuration", lambda *_: config)
    facts = {"localhost": {**MACHINE, "cores": 1, "gpus": gpus, "boot": "today"}}
    monkeypatch.setattr(scaling_plan, "ask", lambda *_: facts)
    benchmark, _ = scaling_plan.plan(scaling.parse(["--np", "1", "2"]))
    assert benchmark["oversubscribed"] == oversubscribed


@pytest.mark.parametrize("asked, threads", [("", 4), ("3", 3), ("2,1", 4)])
def test_threads_are_those_that_make_train_would_have(
    asked: str, threads: int, monkeypatch: pytest.MonkeyPatch
) -> None:
    config = {"data": {"batch_size": 8}, "trainer": {"accelerator": "cpu"}}
    monkeypatch.setattr(scaling_plan, "configuration", lambda *_: config)
    monkeypatch.setattr(scaling_plan, "cores_of_a_rank", lambda hosts, facts, np: 8 // np)
    monkeypatch.setenv("OMP_NUM_THREADS", asked)
    # At each size those of the largest.
    benchmark, launcher = scaling_plan.plan(scaling.parse(["--np", "1", "2"]))
    assert benchmark["settings"]["threads"] == launcher.threads == threads


@pytest.mark.parametrize("how", ["trainer.accelerator", "CUDA_VISIBLE_DEVICES"])
def test_a_measurement_on_cpus_of_a_host_with_a_gpu_is_of_cpus(
    how: str, fake: Callable, monkeypatch: pytest.MonkeyPatch
) -> None:
    fake("nvidia-smi", "echo 0, GPU-a, A GPU")
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
    fake: Callable, monkeypatch: pytest.MonkeyPatch,
) -> None:  # fmt: skip
    fake("nvidia-smi", "echo 0, GPU-a, 50; echo 1, GPU-b, 98")
    monkeypatch.delenv("CUDA_VISIBLE_DEVICES", raising=False)
    if visible is not None:
        monkeypatch.setenv("CUDA_VISIBLE_DEVICES", visible)
    state = launching.ask([Host("localhost", 1, gpus=gpus)], "benchmarks.load")["localhost"]
    assert state["gpu_busy"] == busy


@pytest.mark.parametrize(
    "answers, share",
    [
        (["echo 0, a, 0, 9; echo 1, b, 5, 7", "echo 0, a, 8, 9; echo 1, b, 5, 3000007"], 0.3),
        (["echo 0, GPU-a, [N/A], [N/A]"] * 2, None),
        (["echo Field is not a valid field to query.; exit 2"] * 2, None),
    ],
)  # fmt: skip
def test_the_time_in_which_heat_slowed_a_gpu_is_counted(
    answers: list[str], share: float | None, fake: Callable, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.delenv("CUDA_VISIBLE_DEVICES", raising=False)
    readings = []
    for clock, answer in zip((100.0, 110.0), answers):
        fake("nvidia-smi", answer)
        readings.append({**load.counters(), "clock": clock})
    assert load.gpu_slowed(*readings) == share

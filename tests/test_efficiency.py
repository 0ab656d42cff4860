"""Known times give known figures, and what disturbs them is marked."""

from __future__ import annotations

import pytest

from benchmarks import load, scaling_report
from benchmarks.efficiency import interval, rows, spread, spread_in_words, steps_per_epoch
from benchmarks.launching import Job
from tests.scaling_source import MACHINE, Source, by_size, measured, results


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


def test_an_epoch_is_timed_by_its_steps_on_each_rank() -> None:
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


@pytest.mark.parametrize(
    "warmup, steps, epochs",
    [(10, 30, None), (10, 31, None), (0, 7, None), (39, 1, None), (10, 30, 2)],
)
def test_parts_of_epochs_are_counted_as_they_are(
    warmup: int, steps: int, epochs: int | None
) -> None:
    """1 ms a sample and nothing else: scaling is ideal, wherever small last batches lie."""
    shares = {ranks: 1256 // ranks for ranks in (1, 2, 4, 8)}

    def time(job: Job, repeat: int) -> float:
        whole, last = divmod(shares[job.np], 32)
        epoch = [32] * whole + [last]
        first, count = (0, len(epoch)) if epochs else (warmup, steps)
        batches = [epoch[at % len(epoch)] for at in range(first, first + count)]
        return sum(batches) / count

    benchmark = results(sizes=[1, 2, 4, 8], warmup=warmup, steps=steps, epochs=epochs)
    row = by_size(measured(Source(time, samples=1256), benchmark))
    assert [row[ranks].efficiency for ranks in shares] == [pytest.approx([1.0] * 3)] * 4
    for ranks in shares:
        assert row[ranks].samples_per_second == pytest.approx([1000 * ranks] * 3)


def test_oversubscribed_sizes_are_set_against_processes_that_are_alone() -> None:
    benchmark = results(strategies=["horovod", "ddp"]) | {"oversubscribed": [4]}
    source = Source(lambda job, _: 40.0 if job.alone else 50.0)
    row = by_size(measured(source, benchmark), strategy="ddp")
    assert row[4].over_alone == [1.25] * 3 and row[4].marks[0] == "oversubscribed"
    assert row[4].speedup == [] and row[4].efficiency == [] and row[2].over_alone == []
    alone = [job for job, _ in source.asked if job.alone]
    assert alone == [Job("horovod", 4, 32, alone=True)] * 3  # one for both strategies


@pytest.mark.parametrize("together, ratio", [(1, 1.0), (4, 2.0)])
def test_communication_counts_where_the_median_batch_sends_nothing(
    together: int, ratio: float
) -> None:
    """Of four batches of 10 ms one has an all-reduce of 40."""
    benchmark = results(sizes=[4]) | {"oversubscribed": [4]}
    benchmark["config"]["trainer"] = {"accumulate_grad_batches": together}
    measured(Source(lambda job, _: 10.0 if job.alone else 20.0), benchmark)
    for run in benchmark["runs"]:
        run["median_ms"] = 10.0
    assert by_size(benchmark)[4].over_alone == [ratio] * 3


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


@pytest.mark.parametrize("gpus, marks", [(["A GPU"], ["GPU slowed by heat 30%"]), ([], [])])
def test_a_hot_gpu_is_marked_where_it_is_used(gpus: list[str], marks: list[str]) -> None:
    benchmark = results() | {"hosts": {"localhost": {**MACHINE, "gpus": gpus}}}
    source = Source(lambda job, _: 1.0, gpu_slowed=0.3)
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

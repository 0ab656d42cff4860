"""`make bench-check` calls slower what is, and compares nothing that differs otherwise."""

from __future__ import annotations

import json
import math
import os
import random
import re
import subprocess
import sys
from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest

from benchmarks import check
from benchmarks.efficiency import Results, Row
from benchmarks.launching import Job
from tests.conftest import ROOT, run
from tests.scaling_source import HERE, MACHINE, Source, measured, results


def compared(tmp_path: Path, old: Results, new: Results) -> subprocess.CompletedProcess[str]:
    for name, benchmark in (("the old", old), ("the new", new)):
        (tmp_path / name).write_text(json.dumps(benchmark))
    make = ["make", "-s", "bench-check", f"OLD={tmp_path}/the old", f"NEW={tmp_path}/the new"]
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
    assert check._chance([6, 7, 8], [1, 2, 3, 4, 5]) == pytest.approx(1 / 56)  # none left out
    for old, new in (([1, 2, 3, 4, 5], [6, 7, 8]), ([1, 2, 3], [4, 5, 6, 7, 8])):
        before, after = (Row("weak", "horovod", 2, 1, times, []) for times in (old, new))
        assert check._verdict("", before, after)[1]


@pytest.mark.parametrize("repeats, caught", [(3, 0.7), (5, 0.75), (10, 0.97), (20, 0.99)])
def test_more_repeats_see_more_and_cry_wolf_no_more_often(repeats: int, caught: float) -> None:
    """Times whose noise is lognormal, 7 %; a fifth slower, and as before."""
    draw = random.Random(3)

    def share(factor: float, tries: int = 300) -> float:
        count = 0
        for _ in range(tries):
            old, new = ([draw.lognormvariate(0, 0.07) for _ in range(repeats)] for _ in range(2))
            slower = [factor * value for value in new]
            before, after = (Row("weak", "horovod", 2, 1, x, []) for x in (old, slower))
            count += check._verdict("", before, after)[1]
        return count / tries

    assert share(1.2) >= caught and share(1.0) <= 0.07


def test_a_core_that_was_fast_for_a_run_is_no_other_machine() -> None:
    old = noisy()
    old["runs"][0]["hosts"]["localhost"]["arithmetic_ms"] = 6.0
    assert not check.compare(old, noisy())[1]


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
        ("hosts", "localhost", {**MACHINE, "cores": 8}, "cores of localhost was 4 and is 8"),
        ("hosts", "localhost", {**MACHINE, "memory_gib": 4}, "memory_gib of localhost was 8"),
        ("hosts", "localhost", {**MACHINE, "gpus": ["A GPU"]}, r"gpus of localhost was \[\] and"),
        ("hosts", "localhost", {**MACHINE, "nics": {}}, "nics of localhost was {'eth0': 10000}"),
        ("settings", "threads", 2, "threads was 1 and is 2"),
        ("settings", "batch_size", 64, "batch_size was 32 and is 64"),
        ("settings", "warmup", 20, "warmup was 10 and is 20"),
        ("settings", "epochs", 2, "epochs was None and is 2"),
        ("settings", "network", "500mbit", "network was None and is 500mbit"),
        ("environment", "HOROVOD_CYCLE_TIME", "5", "the environment was {} and is"),
    ]:
        new = noisy()
        new[place] = {**new[place], key: value}
        with pytest.raises(check.Refusal, match=words):
            check.compare(noisy(), new)
    # What the benchmark sets itself is of no account.
    before, new = noisy(), noisy()
    for benchmark, value in ((before, 1), (new, 2)):
        benchmark["config"] = {
            **benchmark["config"], "trainer": {"max_epochs": value}, "test": value == 1,
            "callbacks": {"stop": {"patience": value}}, "logger": {"csv": {"name": value}},
        }  # fmt: skip
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
    monkeypatch.setattr(sys, "argv", ["check", *written_twice(tmp_path, benchmark)])
    capsys.readouterr()
    assert check.main() == 2
    (line,) = capsys.readouterr().err.splitlines()
    assert line.startswith("error: ")


def written_twice(folder: Path, benchmark: Results) -> list[str]:
    files = [folder / "old.json", folder / "new.json"]
    for file in files:
        file.write_text(json.dumps(benchmark))
    return [str(file) for file in files]


def test_a_file_is_not_compared_with_itself(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    old, new = written_twice(tmp_path, noisy())
    Path(new).unlink()
    Path(new).symlink_to(old)
    monkeypatch.setattr(sys, "argv", ["check", old, new])
    assert check.main() == 2
    assert "OLD and NEW are the same file" in capsys.readouterr().err


def test_a_reader_that_goes_away_is_no_regression(tmp_path: Path) -> None:
    command = [sys.executable, "-m", "benchmarks.check", *written_twice(tmp_path, noisy())]
    reading, writing = os.pipe()
    os.close(reading)
    done = subprocess.run(command, cwd=ROOT, stdout=writing, stderr=subprocess.PIPE, text=True)
    os.close(writing)
    assert done.returncode == 2 and re.fullmatch("error: .*\n", done.stderr)

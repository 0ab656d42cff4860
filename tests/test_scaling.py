"""`make bench` as a command: its line, its file, and a launch; no test asserts a time."""

from __future__ import annotations

import json
import os
import re
import shlex
import signal
import subprocess
import sys
from pathlib import Path
from types import SimpleNamespace
from typing import Any

import pytest

from benchmarks import files, overrides, scaling, scaling_plot
from benchmarks.launching import (
    Failed,
    Job,
    Launcher,
    _measured,
    ends_in_a_line,
    tells_what_is_kept,
)
from benchmarks.scaling import ABOUT
from cluster.hostfile import parse
from cluster.hosts import Refusal
from tests.conftest import ROOT, run, wait_until
from tests.scaling_source import HERE, MACHINE, QUIET, Source, results


@pytest.mark.parametrize("end", [KeyboardInterrupt(), Failed("error: np=2 failed")])
def test_what_was_measured_is_kept_and_not_measured_again(
    end: BaseException, tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    """Interrupted in the 5th run of 9; the 4th, of the same repeat as the 5th, is measured again
    with it, as they are set against each other. Another command writes its own file."""
    source = Source(lambda job, _: float(job.np))

    def interrupted(job: Job, length: list[str]) -> dict[str, Any]:
        if len(source.asked) == 5:
            raise end
        return source(job, length)

    file, benchmark = scaling.open_file(results(), tmp_path)
    told = f"^{end}; what is whole in {re.escape(str(file))} is kept: the same command goes on$"
    with pytest.raises(type(end), match=told), tells_what_is_kept(file):
        scaling.run(benchmark, interrupted, lambda: files.write_json(benchmark, file))
    assert len(json.loads(file.read_text())["runs"]) == 4
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


def test_the_line_of_make() -> None:
    asked = ["NP=1 2 4", "HOSTS=a:2,b:2", "STRATEGY=horovod ddp", "MODE=both", "ARGS=model.lr=1"]
    line = shlex.split(run(["make", "-n", "-s", "bench", *asked]).stdout.replace("\\\n", " "))
    parsed = scaling.parse(line[line.index("benchmarks.scaling") + 1 :])
    assert (parsed.np, parsed.hosts, parsed.strategy) == ([1, 2, 4], "a:2,b:2", ["horovod", "ddp"])
    assert (parsed.mode, parsed.overrides) == ("both", ["model.lr=1"])
    line = shlex.split(run(["make", "-n", "-s", "bench"]).stdout.replace("\\\n", " "))
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
def test_a_line_that_contradicts_itself_is_refused(line: list[str], words: str) -> None:
    with pytest.raises(Refusal, match=words):
        scaling.parse(line)


def test_what_is_not_given_has_its_default() -> None:
    assert scaling.parse([]).warmup == scaling.parse(["--epochs", "2"]).warmup == scaling.WARMUP
    assert scaling.parse(["--warmup", "0"]).warmup == 0
    twice = scaling.parse(["--strategy", "horovod", "ddp", "horovod"])
    assert twice.strategy == ["horovod", "ddp"]


def test_a_mistake_is_told_in_a_line_before_anything_runs() -> None:
    done = run(["make", "-s", "bench", "ARGS=data.batchsize=3", *HERE])
    assert done.returncode == 2
    assert re.match("error: data.batchsize: data has no key 'batchsize'", done.stdout)


@pytest.mark.parametrize(
    "end, status, told",
    [
        (Refusal("NP=0"), 2, "error: NP=0\n"),
        (Failed("last words\nerror: np=2"), 1, "last words\nerror: np=2\n"),
        (KeyboardInterrupt(), 130, "\nstopped\n"),
    ],
)
def test_a_command_ends_in_a_line_and_a_status(
    end: BaseException, status: int, told: str, capsys: pytest.CaptureFixture[str]
) -> None:
    @ends_in_a_line
    def main() -> int:
        raise end

    assert main() == status and capsys.readouterr().err == told


def test_a_measurement_that_is_told_to_end_ends_its_ranks(tmp_path: Path) -> None:
    """As by its terminal that is closed; the ranks are in a session of their own."""
    seconds = f"600.{os.getpid()}"
    script = f"""
import signal, sys
from pathlib import Path
from benchmarks.launching import ends_in_a_line, train
signal.signal(signal.SIGHUP, signal.SIG_DFL)
ranks = [sys.executable, "-m", "cluster.horovodrun", "-np", "2", "-H", "localhost:2"]
log = Path("{tmp_path / "log"}")
main = ends_in_a_line(lambda: train([*ranks, "sleep", "{seconds}"], "sleep", log, threads=1))
sys.exit(main())
"""
    process = subprocess.Popen([sys.executable, "-c", script], cwd=ROOT, stderr=subprocess.PIPE)

    def ranks() -> int:
        done = subprocess.run(["pgrep", "-fx", f"sleep {seconds}"], capture_output=True)
        return len(done.stdout.split())

    wait_until(lambda: ranks() == 2, 60, "two ranks")
    process.send_signal(signal.SIGHUP)
    _, stderr = process.communicate(timeout=60)
    assert (process.returncode, stderr) == (130, b"\nstopped\n")
    assert ranks() == 0


@pytest.fixture(scope="module")
def launched() -> list[dict[str, Any]]:
    """Two ranks, and two processes that are alone, on this host."""
    hosts = parse("localhost:2")
    launcher = Launcher(hosts, ["-H", "localhost:2"], ["data.num_workers=0"], threads=1)
    length = overrides.steps_of(2, 5)
    return [launcher.run(Job("horovod", 2, 16, alone), length) for alone in (False, True)]


def test_a_run_is_the_job_itself(launched: list[dict[str, Any]]) -> None:
    together, alone = launched
    assert together["measured_steps"] == alone["measured_steps"] == 5
    assert together["operations"] == "Gloo" and together["train_samples"] == 1257
    assert together["step_ms"] > 0 and together["phases_ms"] and alone["phases_ms"] is None
    assert set(together["hosts"]["localhost"]) >= set(QUIET)


def test_the_step_of_a_run_is_the_mean_and_of_processes_alone_their_median() -> None:
    summaries = [
        {
            "anatomy": {
                "step_ms": {"mean": mean, "median": 1.0, "p10": 0.5, "p90": 2.0}, "steps": 9,
                "phases_ms": {}, "wire": None,
            },
            **dict.fromkeys(ABOUT),
        }
        for mean in (3.0, 4.0, 9.0)
    ]  # fmt: skip
    assert _measured(Job("horovod", 3, 8), summaries[:1])["step_ms"] == 3
    alone = _measured(Job("horovod", 3, 8, alone=True), summaries)
    assert (alone["step_ms"], alone["median_ms"]) == (4, 1)


def test_a_job_that_fails_tells_its_last_words() -> None:
    """The hosts that the launcher is given have too few slots."""
    launcher = Launcher(parse("localhost:2"), ["-H", "localhost:1"], [], threads=1)
    words = "(?s)NP=2 processes on 1 slots.*\nerror: np=2 horovod, batch 16 a process: ended with"
    with pytest.raises(Failed, match=words):
        launcher.run(Job("horovod", 2, 16), overrides.steps_of(2, 5))

"""`make bench-losses` tells rounding from another computation: made-up curves, no launch."""

from __future__ import annotations

import json
from pathlib import Path
from typing import Any

import pytest

from benchmarks import hardware, losses, losses_report
from benchmarks.losses import Job
from cluster.hosts import Refusal

STEPS = 20


def curve(error: float) -> dict[int, float]:
    return {step: (1 + error) * 2.0 / step for step in range(5, STEPS + 1, 5)}


class Source:
    """Stands for template.py: losses that differ from those of one process by known shares."""

    def __init__(self, in_32: float, in_64: float) -> None:
        self.errors = {"32-true": in_32, "64-true": in_64}
        self.asked: list[tuple[list[str], int]] = []

    def __call__(self, arguments: list[str], np: int) -> dict[str, Any]:
        self.asked.append((arguments, np))
        precision = [a.partition("=")[2] for a in arguments if a.startswith("trainer.precision=")]
        error = self.errors[precision[0]] if precision and np > 1 else 0.0
        return {"train_samples": 100, "model": "toy", "losses": curve(error)}


def results(source: Source, job: Job) -> dict[str, Any]:
    measured = losses.measure(job, 8, [2, 4], STEPS, source)
    return {
        "cpu": "Test CPU", "cores": 2, "gpus": [], "python": "3.11", "versions": {"torch": "2"},
        "commit": "abc", "date": "2026-01-02T03:04:05", "steps": STEPS, "jobs": [measured],
    }  # fmt: skip


def test_rounding_is_equal_and_anything_else_is_told() -> None:
    rounding = results(Source(1e-5, 1e-14), Job("toy"))
    assert losses_report.unequal(rounding) == []
    assert losses_report.table(rounding).count("equal") == 5
    other = results(Source(1e-5, 1e-6), Job("toy"))
    messages = losses_report.unequal(other)
    assert [text.partition(",")[0] for text in messages] == [
        "toy: horovod on 2", "toy: ddp on 2", "toy: horovod on 4", "toy: ddp on 4",
    ]  # fmt: skip
    assert "1.0e-06" in messages[0]
    lines = losses_report.table(other).splitlines()
    assert "| toy | horovod | 2 x 4 | 0.400004 | 0.100001 | 1.0e-05 | 1.0e-05 |" in lines[4]
    assert lines[4].endswith("| 1.0e-06 | differs |")
    assert "by 1.0e+00" in losses_report.unequal(results(Source(0, 1), Job("toy")))[0]  # of one
    assert losses_report.unequal(results(Source(0, float("nan")), Job("toy")))
    late = results(Source(0, 0), Job("toy"))
    late["jobs"][0]["runs"][-1]["losses"][-1] = float("nan")  # and not from the first
    assert [text.partition(",")[0] for text in losses_report.unequal(late)] == ["toy: ddp on 4"]
    assert not losses_report.unequal(results(Source(0, 1), Job("toy", differs="it is so")))


@pytest.mark.parametrize("samples, told", [(None, "unknown"), (7, "7")])
def test_samples_that_make_no_batch_are_refused(samples: int | None, told: str) -> None:
    """A stream may not tell how many it has."""
    first = {"train_samples": samples, "model": "toy"}
    with pytest.raises(Refusal, match=f"toy: {told} samples make no batch of 8"):
        losses.measure(Job("toy"), 8, [2], STEPS, lambda *_: first)


def test_all_share_the_global_batch_and_whole_batches_only() -> None:
    source = Source(0, 0)
    results(source, Job("toy", ["data.batch_size=8"]))
    (first, alone), *rest = source.asked
    assert alone == 1 and "trainer.max_steps=1" in first
    assert [np for _, np in rest] == 2 * [1, 1, 2, 2, 4, 4]
    for arguments, np in rest:
        assert arguments[-1] == f"data.batch_size={8 // np}"  # of two equal keys the last counts
        assert "trainer.limit_train_batches=12" in arguments  # of 100 samples
    assert losses.ALONE in rest[0][0] and losses.ALONE not in rest[1][0]


def test_curves_of_other_steps_are_not_compared() -> None:
    benchmark = results(Source(0, 0), Job("toy"))
    benchmark["jobs"][0]["runs"][1]["steps"] = [1, 2, 3, 4]
    with pytest.raises(ValueError, match="toy: steps"):
        losses_report.table(benchmark)


def test_a_batch_that_ranks_do_not_divide_is_refused() -> None:
    with pytest.raises(Refusal, match="data.batch_size=10 is not divisible by NP=4"):
        losses.batches([Job("toy", ["data.batch_size=10"])], [2, 4])


def test_data_without_a_batch_size_is_refused(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(losses, "configuration", lambda *_: {"data": {"_target_": "my.Data"}})
    with pytest.raises(Refusal, match="data.batch_size"):
        losses.batches([Job("toy")], [2])


def test_losses_are_read_from_the_rows_that_have_them(tmp_path: Path) -> None:
    file = tmp_path / "metrics.csv"
    file.write_text("epoch,step,train/loss,val/loss\n0,4,,2.5\n0,9,1.5,\n0,9,,0.125\n")
    assert losses.read(file) == {5: 2.5, 10: 0.125}


@pytest.mark.parametrize("metrics", [None, "epoch,step,val/acc\n0,4,0.5\n"])
def test_a_model_that_logs_no_val_loss_is_told(
    metrics: str | None, monkeypatch: pytest.MonkeyPatch
) -> None:
    def trained(command: list[str], what: object, log: Path, threads: int) -> None:
        run = log.parent / "runs" / "job" / "runs" / "1"
        run.mkdir(parents=True)
        (run / "summary.json").write_text('{"world_size": 2}')
        if metrics:
            (run / "metrics.csv").write_text(metrics)

    monkeypatch.setattr(losses, "train", trained)
    with pytest.raises(losses.Failed, match="the model logs no val/loss, by which runs are comp"):
        losses.launch([], 2)


@pytest.mark.parametrize("kept", [0, 1])
def test_only_what_is_kept_goes_on(
    kept: int, tmp_path: Path, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    done: list[Any] = []

    def measure(*_: Any) -> dict[str, Any]:
        if len(done) == kept:
            raise KeyboardInterrupt
        done.append({})
        return done[-1]

    monkeypatch.setattr(losses, "batches", lambda jobs, sizes: [8] * len(jobs))
    monkeypatch.setattr(losses, "measure", measure)
    monkeypatch.setattr("sys.argv", ["losses", "--out", str(tmp_path)])
    assert losses.main() == 130
    files = [
        f"; what is whole in {file} is kept: the same command goes on"
        for file in tmp_path.glob("*.json")
    ]
    assert len(files) == kept
    goes_on = "".join(files)
    assert capsys.readouterr().err == f"\nstopped{goes_on}\n"


def test_a_report_follows_from_the_json_alone(tmp_path: Path) -> None:
    name = tmp_path / "losses_x"
    benchmark = results(Source(1e-6, 1e-15), Job("toy"))
    losses_report.report(benchmark, name)
    written = {file.name: file.read_bytes() for file in tmp_path.iterdir()}
    assert sorted(written) == [f"losses_x.{kind}" for kind in ("md", "png", "svg")]
    losses_report.report(json.loads(json.dumps(benchmark)), name)
    assert {file.name: file.read_bytes() for file in tmp_path.iterdir()} == written


def test_what_ends_before_its_plot_goes_on_with_its_losses(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    monkeypatch.setattr(losses, "batches", lambda jobs, sizes: [8] * len(jobs))
    monkeypatch.setattr(losses, "launch", Source(0, 0))
    monkeypatch.setattr("sys.argv", ["losses", "--steps", "20", "--out", str(tmp_path)])

    def interrupted(results: Any, name: Path) -> str:
        raise KeyboardInterrupt

    with monkeypatch.context() as patched:
        patched.setattr(losses_report, "report", interrupted)
        assert losses.main() == 130
    (file,) = tmp_path.glob("*.json")
    kept = json.loads(file.read_text())
    assert len(kept["jobs"]) == len(losses.JOBS) and not kept["finished"]
    monkeypatch.setattr(losses, "launch", None)  # nothing is measured again
    assert losses.main() == 0
    assert json.loads(file.read_text())["finished"] and list(tmp_path.glob("*.png"))


def test_gpus_of_a_kind_are_counted() -> None:
    """As their names go into that of a file."""
    assert hardware.processors({"gpus": ["A", "B", "A"]}) == "2 A, 1 B"
    assert hardware.processors({"gpus": [], "cpu": "C", "cores": 2}) == "C, 2 cores"


def test_losses_that_differ_end_the_command_with_an_error(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    monkeypatch.setattr(losses, "batches", lambda jobs, sizes: [8] * len(jobs))
    monkeypatch.setattr(losses, "launch", Source(0, 1e-6))
    monkeypatch.setattr(losses_report, "report", lambda *_: "")
    monkeypatch.setattr("sys.argv", ["losses", "--steps", "20", "--out", str(tmp_path)])
    assert losses.main() == 1
    errors = [line for line in capsys.readouterr().err.splitlines() if line.startswith("error: ")]
    told = {line.removeprefix("error: not equal: ").partition(": ")[0] for line in errors}
    assert told == {job.name for job in losses.JOBS if not job.differs}


def test_a_number_of_ranks_that_is_given_twice_is_measured_once() -> None:
    assert losses.parse(["--np", "4", "2", "4"]).np == [4, 2]

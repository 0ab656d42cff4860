"""Sweeps: what is tried and refused, what is kept and gone on with, and one of real trainings."""

from __future__ import annotations

import csv
import errno
import fcntl
import importlib.util
import json
import math
import os
import re
import shutil
import signal
import subprocess
import sys
import threading
from pathlib import Path
from typing import Any

import pytest

from runs.refusal import Refusal
from runs.space import Space
from runs.sweep import Launcher, Sweep, _composed, _sweeps_folder, main
from runs.trials import Trial, best_of, judge, reason, write_results
from tests.conftest import ROOT, run, wait_for_words, wait_until

GRID = ["model.lr=0.1,0.01", "seed=1", "data.batch_size=32,64"]


class Fake:
    """In place of trainings: each leaves what a run leaves, but for those told to fail or stop."""

    def __init__(
        self, failing: str = "nothing", stop_after: int = 99, loss: float = 0, status: int = 130
    ) -> None:
        self.failing, self.stop_after, self.loss = failing, stop_after, loss
        self.status = status  # of one that is stopped
        self.stopped = 0
        self.seen: list[list[str]] = []

    def __call__(self, command: list[str], output: Path) -> int:
        changes = dict(word.split("=", 1) for word in command if "=" in word)
        self.seen.append([word for word in command if not word.startswith(("log_dir", "run_dir"))])
        output.write_text("[0]<stdout>:begun\n[1]<stderr>:ValueError: too big\nlauncher: exit 1\n")
        if self.failing in command:
            return 1
        if len(self.seen) == self.stop_after:
            self.stopped = signal.SIGINT
            return self.status
        folder = Path(changes["run_dir"])
        folder.mkdir()
        loss = self.loss or float(changes["model.lr"]) + int(changes["data.batch_size"])
        metrics = {"val/loss": 2 * loss, "test/acc": 1 / loss}
        if math.isnan(loss):
            metrics = dict.fromkeys(metrics)  # so is NaN in JSON
        (folder / "summary.json").write_text(json.dumps({"metrics": metrics}))
        (folder / "metrics.csv").write_text(f"step,val/loss\n1,nan\n2,{loss}\n3,{2 * loss}\n")
        return 0


class LeavesNothing(Fake):
    """As where rank 0 is on another host."""

    def __call__(self, command: list[str], output: Path) -> int:
        self.seen.append(command)
        output.touch()
        return 0


@pytest.fixture
def unchecked(monkeypatch: pytest.MonkeyPatch) -> None:
    """Values are looked at in other tests; here it would only take time."""
    monkeypatch.setattr("runs.space.check", lambda arguments: None)


def sweep(
    logs: Path, *arguments: str, count: int | None = None, metric: str = "val/loss",
    mode: str = "min",
) -> Sweep:  # fmt: skip
    return Sweep(["job"], [*(arguments or GRID), f"log_dir={logs}"], count, metric, mode)


def ran(launch: Fake, logs: Path, *arguments: str, status: int = 0, **options: Any) -> Sweep:
    """A sweep whose process has ended with this status."""
    done = sweep(logs, *arguments, **options)
    assert done.run(launch) == status
    os.close(done.held)
    return done


class TestWhatIsTried:
    def test_a_grid_has_all_combinations(self) -> None:
        assert Space(GRID).grid() == [
            ["model.lr=0.1", "seed=1", "data.batch_size=32"],
            ["model.lr=0.1", "seed=1", "data.batch_size=64"],
            ["model.lr=0.01", "seed=1", "data.batch_size=32"],
            ["model.lr=0.01", "seed=1", "data.batch_size=64"],
        ]

    def test_no_combination_twice(self) -> None:
        """Neither of values that are given twice, nor drawn, also after a trial without a value."""
        assert Space(["seed=1,1,2"]).grid() == [["seed=1"], ["seed=2"]]
        space, tried = Space(GRID, 4), list[tuple[list[str], float | None]]()
        for number in range(1, 5):
            value = None if number == 2 else float(number)
            tried.append((space.draw(tried, number, "min"), value))
        assert sorted(changes for changes, _ in tried) == sorted(space.grid())

    @pytest.mark.usefixtures("unchecked")
    def test_what_takes_the_place_of_a_draw_is_the_same_after_an_interruption(self) -> None:
        space = Space([f"seed={','.join(map(str, range(100)))}", "data.batch_size=1,2,3"], 9)
        drawn = space.draw([], 1, "min")
        (first, second) = (space.draw([(drawn, None)], 1, "min") for _ in range(2))
        assert first == second != drawn

    def test_of_an_interval_with_few_numbers_some_come_again(self) -> None:
        space, tried = Space(["model.width=int(interval(8,9))"], 5), list[tuple[list[str], float]]()
        for number in range(1, 6):
            tried.append((space.draw(tried, number, "min"), 1.0))
        assert {changes[0] for changes, _ in tried} <= {"model.width=8", "model.width=9"}
        only = Space(["model.width=int(interval(8,8))"], 1)
        assert only.draw([], 1, "min") == ["model.width=8"]

    def test_values_are_read_as_hydra_reads_them(self) -> None:
        space = Space(
            [
                "seed=range(1,4)",
                "model=glob(*er)",
                "~callbacks.early_stopping",
                "+a='x y',b",
            ]
        )
        assert space.values["seed"] == ["seed=1", "seed=2", "seed=3"]
        assert {"model=classifier", "model=denoiser"} <= {*space.values["model"]}
        assert space.values["~callbacks.early_stopping"] == ["~callbacks.early_stopping"]
        assert space.values["+a"] == ["+a='x y'", "+a=b"]
        assert space.swept == ["seed", "model", "+a"]

    @pytest.mark.parametrize(
        ("arguments", "trials", "message"),
        [
            (["model.lr=0.1"], None, "nothing to try: give a key several values"),
            ([], 20, "nothing to try"),
            (["model.lr=0.1,0.2", "model.lr=0.5"], None, "nothing to try"),
            (["model.lr=interval(0.1,0.2)", "model.lr=0.5"], 20, "nothing to try"),
            (["model.lr=0.1,fast"], None, "model.lr=fast: a number is expected"),
            (["model.lr=0.1,0.2,fast"], None, "model.lr=fast: a number is expected"),
            (["seed=1,2", "model.lrr=1"], None, "model has no key 'lrr'.*did you mean lr"),
            (["model=classifier,denoisr"], None, "no conf/model/denoisr.yaml"),
            (
                ["model=denoiser,classifier", "model.features=8"],
                None,
                "model has no key 'features'",
            ),
            (["data.batch_size=int(interval(0,9))"], 2, "at least 1 is needed there"),
            (["model.lr=interval(0.1,1)"], None, "model.lr.*how many trials to draw, TRIALS=20"),
            (["model.lr=tag(log,interval(0,1))"], 2, "model.lr: a logarithmic interval begins"),
            (["model.lr=interval(2,1)"], 2, "model.lr: the interval begins above its end"),
            (["seed=1,2"], 3, "TRIALS=3: there are only 2 combinations"),
            (["--multirun", "seed=1,2"], None, "--multirun: a change has the form"),
            (["model.lr=glob(*)"], None, "no value fits"),
        ],
    )
    def test_refused(self, arguments: list[str], trials: int | None, message: str) -> None:
        with pytest.raises(Refusal, match=message):
            Space(arguments, trials)

    def test_draws_go_where_the_best_is_expected(self) -> None:
        space = Space(["model.width=int(interval(1,100))"], 30)
        tried = [([f"model.width={width}"], float(width)) for width in range(1, 100, 5)]
        for mode, low in (("min", True), ("max", False)):
            drawn = [space.draw(tried, number, mode)[0] for number in range(1, 9)]
            mean = sum(int(change.removeprefix("model.width=")) for change in drawn) / 8
            assert (mean < 50) == low, drawn

    def test_draws_avoid_what_gives_no_number(self) -> None:
        space = Space(["model.width=int(interval(1,100))"], 40)
        tried: list[tuple[list[str], float | None]] = [
            ([f"model.width={width}"], None if width > 50 else 1.0) for width in range(1, 100, 5)
        ]
        for mode in ("min", "max"):
            drawn = [space.draw(tried, number, mode)[0] for number in range(1, 21)]
            failing = sum(int(change.removeprefix("model.width=")) > 50 for change in drawn)
            assert failing <= 6, drawn

    def test_four_digits_stay_in_the_interval(self) -> None:
        space = Space(["model.lr=tag(log,interval(0.10001,0.10004))"], 2)
        assert space._distributions()["model.lr"].log
        assert space._write("model.lr", 0.10003) == "model.lr=0.10001"

    def test_without_optuna_it_says_how_to_get_it(self, monkeypatch: pytest.MonkeyPatch) -> None:
        monkeypatch.setattr(importlib.util, "find_spec", lambda name: None)
        with pytest.raises(Refusal, match="-m pip install optuna==5.0.0"):
            Space(["model.lr=interval(0.1,1)"], 2)


@pytest.mark.usefixtures("unchecked")
class TestWhatIsKept:
    def test_the_best_over_the_epochs_wins(self, tmp_path: Path) -> None:
        launch = Fake()
        done = sweep(tmp_path)
        assert done.run(launch) == 0
        assert launch.seen[3] == ["job", "model.lr=0.01", "seed=1", "data.batch_size=64"]
        assert done.folder.parent == tmp_path / "classifier" / "sweeps"
        rows = list(csv.DictReader((done.folder / "results.csv").open()))
        assert [row["val/loss"] for row in rows] == ["32.1", "64.1", "32.01", "64.01"]
        assert rows[1]["model.lr"] == "0.1" and float(rows[1]["test/acc"]) == 1 / 64.1
        best = "job model.lr=0.01 seed=1 data.batch_size=32"
        assert (done.folder / "best.txt").read_text() == f"{best} log_dir={tmp_path}\n"
        table = (done.folder / "results.md").read_text().splitlines()
        assert table[4].startswith("| 3 | done | 0.01 | 32 | 32.01 | ")

    def test_the_best_may_be_the_largest(self, tmp_path: Path) -> None:
        done = sweep(tmp_path, metric="test/acc", mode="max")
        done.run(Fake())
        assert "model.lr=0.01 seed=1 data.batch_size=32" in (done.folder / "best.txt").read_text()
        (header, *_) = csv.reader((done.folder / "results.csv").open())
        swept = ["model.lr", "data.batch_size"]
        assert header == ["trial", "state", *swept, "test/acc", "seconds", "reason", "folder"]

    def test_a_failed_trial_is_told_and_the_others_run(
        self, tmp_path: Path, capsys: pytest.CaptureFixture[str]
    ) -> None:
        launch = Fake(failing="data.batch_size=64")
        done = ran(launch, tmp_path, status=1)
        assert len(launch.seen) == 4
        assert [trial.state for trial in done.trials] == ["done", "failed", "done", "failed"]
        rows = list(csv.DictReader((done.folder / "results.csv").open()))
        assert rows[1]["reason"] == "exit 1: ValueError: too big"
        output = capsys.readouterr().out
        assert "  | launcher: exit 1" in output
        assert "2 done, 2 failed, 0 left; the same command again runs what is not" in output
        again, launch = sweep(tmp_path), Fake()
        assert again.folder == done.folder and again.run(launch) == 0
        assert [changes[3] for changes in launch.seen] == ["data.batch_size=64"] * 2
        assert Path(again.trials[1].folder).name == "trial_2_2"  # what was left before stays

    @pytest.mark.parametrize("status", [130, 0])
    def test_it_goes_on_where_it_was_stopped(
        self, status: int, tmp_path: Path, capsys: pytest.CaptureFixture[str]
    ) -> None:
        """Whatever status the trial ends with that was stopped."""
        begun = sweep(tmp_path)
        assert begun.run(Fake(stop_after=2, status=status)) == 130
        assert [trial.state for trial in begun.trials] == ["done", "stopped", "waiting", "waiting"]
        with pytest.raises(Refusal, match="this sweep runs already"):
            sweep(tmp_path)
        os.close(begun.held)  # as when the process has ended
        launch = Fake()
        assert sweep(tmp_path, "seed=1,2").folder != begun.folder  # another one
        resumed = sweep(tmp_path)
        assert resumed.folder == begun.folder and resumed.run(launch) == 0
        assert len(launch.seen) == 3 and "1 of 4 are done" in capsys.readouterr().out
        os.close(resumed.held)
        anew = sweep(tmp_path)
        assert anew.folder != begun.folder  # nothing is left to do there
        os.close(anew.held)
        assert sweep(tmp_path).folder == anew.folder

    def test_a_metric_that_some_trials_lack_leaves_them_without_a_value(
        self, tmp_path: Path, capsys: pytest.CaptureFixture[str]
    ) -> None:
        """As where model= has several values."""

        class Untested(Fake):
            def __call__(self, command: list[str], output: Path) -> int:
                status = super().__call__(command, output)
                if status == 0 and "data.batch_size=64" in command:
                    folder = next(word[8:] for word in command if word.startswith("run_dir="))
                    (Path(folder) / "summary.json").write_text('{"metrics": {"val/loss": 1}}')
                return status

        begun = ran(Untested(stop_after=4), tmp_path, metric="test/acc", mode="max", status=130)
        whole = sweep(tmp_path, metric="test/acc", mode="max")  # it goes on, too
        assert whole.folder == begun.folder and whole.run(Untested()) == 0
        assert [trial.value for trial in whole.trials] == [1 / 32.1, None, 1 / 32.01, None]
        assert whole.trials[1].reason.startswith("no test/acc; it has val/loss")
        printed = capsys.readouterr().out
        assert "no test/acc; it has val/loss" in printed
        assert "best    trial 3: test/acc 0.03124" in printed

    def test_a_trial_that_fails_when_it_is_run_again_has_no_value(self, tmp_path: Path) -> None:
        first = ran(Fake("data.batch_size=64"), tmp_path, status=1)
        shutil.rmtree(first.trials[0].folder)
        again = sweep(tmp_path)
        assert again.run(Fake("model.lr=0.1")) == 1
        assert [trial.state for trial in again.trials] == ["failed", "failed", "done", "done"]
        assert [trial.value is None for trial in again.trials] == [True, True, False, False]
        assert again.trials[0].tests == {}

    def test_trials_are_judged_as_the_best_checkpoint_is(self, tmp_path: Path) -> None:
        kept = ["callbacks.best_checkpoint.monitor=val/acc", "callbacks.best_checkpoint.mode=max"]
        by_accuracy = sweep(tmp_path, *GRID, *kept, metric="", mode="")
        assert (by_accuracy.metric, by_accuracy.mode) == ("val/acc", "max")
        os.close(by_accuracy.held)
        by_loss = sweep(tmp_path, *GRID, *kept, metric="test/loss", mode="")
        assert (by_loss.metric, by_loss.mode) == ("test/loss", "min")
        with pytest.raises(Refusal, match="METRIC=test/acc: say what is best of it"):
            sweep(tmp_path, *GRID, *kept, metric="test/acc", mode="")

    def test_a_misspelt_metric_ends_it_and_can_be_mended(self, tmp_path: Path) -> None:
        launch = Fake()
        wrong = sweep(tmp_path, metric="test/ac", mode="max")
        with pytest.raises(Refusal, match=r"METRIC=test/ac: trial 1 .*did you mean test/acc"):
            wrong.run(launch)
        os.close(wrong.held)
        fixed = sweep(tmp_path, metric="test/acc", mode="max")
        assert fixed.run(launch) == 0 and len(launch.seen) == 4
        assert [trial.value for trial in fixed.trials][:2] == [1 / 32.1, 1 / 64.1]

    def test_a_trial_whose_folder_was_removed_is_run_again(self, tmp_path: Path) -> None:
        begun = ran(Fake(stop_after=3), tmp_path, status=130)
        shutil.rmtree(begun.trials[0].folder)
        launch = Fake()
        resumed = sweep(tmp_path)
        assert resumed.run(launch) == 0 and len(launch.seen) == 3
        assert [trial.value for trial in resumed.trials] == [32.1, 64.1, 32.01, 64.01]

    @pytest.mark.parametrize("text", ['{"command": [', "[]", '{"trials": 1}'])
    def test_a_file_that_is_damaged_is_named(self, text: str, tmp_path: Path) -> None:
        begun = ran(Fake(stop_after=3), tmp_path, status=130)
        summary = Path(begun.trials[0].folder) / "summary.json"
        summary.write_text(text)
        with pytest.raises(
            Refusal, match=r"trial_1/summary.json is not a summary .* trial 1 is run"
        ):
            sweep(tmp_path)
        kept = (begun.folder / "sweep.json").read_text()
        (begun.folder / "sweep.json").write_text(text if ":" not in text else kept[:-20])
        with pytest.raises(Refusal, match=r"sweep.json is not a sweep: fix it or delete it"):
            sweep(tmp_path)

    def test_what_a_full_disk_does_not_take_leaves_what_was_kept(
        self, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
    ) -> None:
        begun = sweep(tmp_path)
        kept = (begun.folder / "sweep.json").read_text()

        def full(*_: object, **__: object) -> str:
            raise OSError(errno.ENOSPC, os.strerror(errno.ENOSPC))

        monkeypatch.setattr(json, "dumps", full)
        with pytest.raises(Refusal, match=r"sweep.json: cannot be written: No space left"):
            begun.run(Fake())
        assert (begun.folder / "sweep.json").read_text() == kept

    def test_its_lock_is_a_file_that_may_be_written(self, tmp_path: Path) -> None:
        """NFS locks no folder, and alone nothing that is only read."""
        held = sweep(tmp_path).held
        assert os.readlink(f"/proc/self/fd/{held}").endswith("/.lock")
        assert fcntl.fcntl(held, fcntl.F_GETFL) & os.O_ACCMODE == os.O_WRONLY

    def test_its_lock_may_be_another_users(
        self, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
    ) -> None:
        opened = os.open

        def denied(file: Path, flags: int, *mode: int) -> int:
            if flags & os.O_CREAT and str(file).endswith(".lock"):
                raise PermissionError
            return opened(file, flags, *mode)

        os.close(sweep(tmp_path).held)
        monkeypatch.setattr(os, "open", denied)
        assert sweep(tmp_path).held

    def test_more_draws_go_on_where_fewer_ended(self, tmp_path: Path) -> None:
        """Anew, the same would be drawn once more."""
        whole, fewer, rest = Fake(), Fake(), Fake()
        assert sweep(tmp_path / "whole", count=4).run(whole) == 0
        begun = ran(fewer, tmp_path / "parts", count=2)
        grown = sweep(tmp_path / "parts", count=4)
        assert grown.folder == begun.folder and grown.run(rest) == 0
        assert fewer.seen + rest.seen == whole.seen and len(rest.seen) == 2
        os.close(grown.held)
        assert sweep(tmp_path / "parts").folder != begun.folder  # all combinations are another one

    def test_fewer_draws_run_what_was_begun(self, tmp_path: Path) -> None:
        begun = ran(Fake(stop_after=3), tmp_path, count=4, status=130)
        launch = Fake()
        fewer = sweep(tmp_path, count=2)
        assert fewer.folder == begun.folder and fewer.run(launch) == 0
        assert len(fewer.trials) == 3 and len(launch.seen) == 1
        os.close(fewer.held)
        assert sweep(tmp_path, count=2).folder != begun.folder  # nothing is left to do there

    def test_another_command_is_another_sweep(self, tmp_path: Path) -> None:
        begun = ran(Fake(stop_after=2), tmp_path, status=130)
        arguments = [*GRID, f"log_dir={tmp_path}"]
        other = Sweep(["job", "-np", "4"], arguments, None, "val/loss", "min")
        assert other.folder != begun.folder

    def test_trials_that_leave_their_summary_elsewhere_end_it_at_once(self, tmp_path: Path) -> None:
        launch = LeavesNothing()
        with pytest.raises(Refusal, match="1 ended well and left none here: .*host of rank 0"):
            sweep(tmp_path).run(launch)
        assert len(launch.seen) == 1

    def test_the_time_that_is_left(
        self, tmp_path: Path, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
    ) -> None:
        clock = iter([0, 10, 10, 40, 40, 60, 60, 70])  # trials of 10, 30, 20 and 10 seconds
        monkeypatch.setattr("runs.sweep.time.monotonic", lambda: next(clock))
        sweep(tmp_path).run(Fake())
        lines = [line for line in capsys.readouterr().out.splitlines() if "  done" in line]
        assert [line.partition("about ")[2] for line in lines] == [
            "0:00:30 left", "0:00:40 left", "0:00:20 left", ""
        ]  # fmt: skip

    def test_a_loss_that_is_no_number_does_not_win(self, tmp_path: Path) -> None:
        done = sweep(tmp_path)
        done.run(Fake(loss=float("nan")))
        assert {trial.reason for trial in done.trials} == {"val/loss was never a finite number"}
        assert not (done.folder / "best.txt").exists()
        assert done.trials[0].tests == {}

    def test_draws_are_the_same_after_an_interruption(self, tmp_path: Path) -> None:
        drawing = ["model.lr=tag(log,interval(1e-4,1e-1))", "data.batch_size=32,64",
                   "model.width=int(interval(8,64))"]  # fmt: skip
        whole, parts = Fake(), Fake(stop_after=12)
        assert sweep(tmp_path / "whole", *drawing, count=14).run(whole) == 0
        ran(parts, tmp_path / "parts", *drawing, count=14, status=130)
        rest = Fake()
        assert sweep(tmp_path / "parts", *drawing, count=14).run(rest) == 0
        assert parts.seen[:11] + rest.seen == whole.seen and len(rest.seen) == 3
        assert len({tuple(changes) for changes in whole.seen}) == 14
        for job, lr, batch_size, width in whole.seen:
            assert job == "job" and 1e-4 <= float(lr.removeprefix("model.lr=")) <= 1e-1
            assert batch_size in ("data.batch_size=32", "data.batch_size=64")
            assert 8 <= int(width.removeprefix("model.width=")) <= 64


@pytest.mark.parametrize(
    ("text", "told"),
    [
        ("[0]<stderr>:a.BError: out of c\n[0]<stderr>:x\nend", "a.BError: out of c"),
        ("a\nb\n", "b"),
        ("", "no output"),
        ("caf\xe9", "caf\N{REPLACEMENT CHARACTER}"),
    ],
)  # fmt: skip
def test_the_line_that_tells_most(tmp_path: Path, text: str, told: str) -> None:
    (tmp_path / "output").write_text(text, encoding="latin-1")
    assert reason(tmp_path / "output") == told


@pytest.mark.parametrize("mode", ["min", "max"])
def test_of_equals_the_first_is_the_best(mode: str) -> None:
    values = [None, 1.0, 3.0, 1.0, 3.0]
    trials = [Trial(number, [], "done", value=value) for number, value in enumerate(values)]
    best = best_of(trials, mode)
    assert best is not None and best.number == (1 if mode == "min" else 2)
    assert best_of(trials[:1], mode) is None


def test_the_table_has_the_best_first_and_those_without_a_value_last(tmp_path: Path) -> None:
    trials = [
        Trial(1, ["seed=1"], "failed", reason="exit 1: a | b"),
        Trial(2, ["seed=2"], "done", value=-3.0),
        Trial(3, ["seed=3"], "done", value=-2.0),
    ]
    write_results(tmp_path, trials, ["seed"], "score", "max", None)
    table = (tmp_path / "results.md").read_text().splitlines()[4:]
    assert [row.split(" | ")[0] for row in table] == ["| 3", "| 2", "| 1"]
    assert table[2] == "| 1 | failed | 1 |  |  | exit 1: a / b |"


def test_a_loss_of_training_is_no_guess_for_one_of_validation(tmp_path: Path) -> None:
    (tmp_path / "summary.json").write_text(json.dumps({"metrics": {"train/loss": 1.0}}))
    trial = Trial(1, [], "done", str(tmp_path))
    assert not judge(trial, "val/loss", "min") and trial.reason == "no val/loss; it has train/loss"
    assert not judge(trial, "train/los", "min") and "(did you mean train/loss?)" in trial.reason


def test_a_folder_of_logs_may_be_that_of_home() -> None:
    folder = _sweeps_folder(_composed(["log_dir='~/logs'"]))
    assert folder == Path.home() / "logs" / "classifier" / "sweeps"
    folder = _sweeps_folder(_composed(["log_dir='~/logs'", "task=${hydra:job.name}/b"]))
    assert folder == Path.home() / "logs" / "template_b" / "sweeps"


@pytest.mark.usefixtures("handlers")
def test_ctrl_c_reaches_the_trial_once(tmp_path: Path) -> None:
    output = tmp_path / "output"
    trial = "import os, signal, time; count = []; signal.signal(2, lambda *a: count.append(1)); "
    trial += "print('ready', flush=True); time.sleep(0.1)\nwhile not count: time.sleep(0.01)\n"
    trial += (
        "time.sleep(0.3); raise SystemExit(40 + len(count) + 10 * (os.getsid(0) != os.getpid()))"
    )

    def press() -> None:
        wait_until(lambda: output.exists() and "ready" in output.read_text(), 60, "the trial")
        os.kill(os.getpid(), signal.SIGINT)

    launch = Launcher()
    threading.Thread(target=press, daemon=True).start()
    assert launch([sys.executable, "-c", trial], output) == 41
    assert launch.stopped == signal.SIGINT


def test_a_sweep_that_is_killed_leaves_no_trial(tmp_path: Path) -> None:
    output = tmp_path / "output"
    trial = "import time; print('ready', flush=True); time.sleep(60)"
    script = "import sys; from pathlib import Path; from runs.sweep import Launcher; "
    script += "Launcher()([sys.executable, '-c', sys.argv[1]], Path(sys.argv[2]))"
    command = [sys.executable, "-c", script, trial, str(output)]
    with subprocess.Popen(command, cwd=ROOT) as process:
        wait_for_words(process, output, "ready", 60)
        (child,) = Path(f"/proc/{process.pid}/task/{process.pid}/children").read_text().split()
        process.kill()
    line = Path(f"/proc/{child}/cmdline")
    wait_until(lambda: not (line.exists() and line.read_text()), 20, "the end of the trial")


@pytest.mark.usefixtures("handlers")
def test_a_signal_just_before_a_trial_ends_it(tmp_path: Path) -> None:
    launch = Launcher()
    launch.stopped = signal.SIGTERM
    assert launch(["sleep", "60"], tmp_path / "output") == -signal.SIGTERM


@pytest.mark.usefixtures("handlers")
def test_a_signal_that_is_ignored_stays_so() -> None:
    """As under nohup."""
    signal.signal(signal.SIGHUP, signal.SIG_IGN)
    Launcher()
    assert signal.getsignal(signal.SIGHUP) == signal.SIG_IGN
    assert signal.getsignal(signal.SIGTERM) != signal.SIG_DFL


def test_trainings_on_two_ranks(tmp_path: Path) -> None:
    """Two that run and one that is refused by its ranks; what is best is a command that runs."""
    short = "trainer.max_epochs=1 trainer.limit_train_batches=3 trainer.limit_val_batches=2"
    logs = tmp_path / "logs (2)"
    arguments = f"ARGS=data.batch_size=8,16,2000 test=false {short} \"log_dir='{logs}'\""
    done = run(["make", "sweep", f"PYTHON={sys.executable}", "NP=2", arguments])
    assert done.returncode == 2, done.stdout  # make's, for one that failed
    (folder,) = logs.glob("classifier/sweeps/*")
    for number, batch in ((1, 8), (2, 16)):
        summary = json.loads((folder / f"trial_{number}" / "summary.json").read_text())
        assert (summary["world_size"], summary["steps"]) == (2, 3), done.stdout
        assert summary["global_batch_size"] == 2 * batch
    assert not (folder / "trial_3").exists()
    rows = list(csv.DictReader((folder / "results.csv").open()))
    assert [row["state"] for row in rows] == ["done", "done", "failed"]
    assert "data.batch_size=2000: a rank's share is 629 samples" in rows[2]["reason"]
    best = min(rows[:2], key=lambda row: float(row["val/loss"]))
    again = (folder / "best.txt").read_text()
    assert f"template.py data.batch_size={best['data.batch_size']} test=false" in again
    assert "cluster.horovodrun -np 2 -H localhost:2" in again and f"again   {again}" in done.stdout


@pytest.mark.parametrize(
    ("arguments", "message"),
    [
        (["--metric", "test/acc"], "error: METRIC=test/acc: say what is best of it"),
        (["--trials", "many"], "error: TRIALS=many: write how many"),
        (["--trials", "0"], "error: TRIALS=0: write how many"),
        (["--mode", "most"], "error: METRIC=val/loss: say what is best of it"),
        (["--arguments", "task=${oc.env:NO_SUCH} seed=1,2"], "Environment variable 'NO_SUCH' not"),
        (["--arguments", "seed=1,2 task='a"], "error: ARGS=seed=1,2 task='a: No closing quotation"),
    ],
)
def test_refused_before_the_first_trial(
    arguments: list[str], message: str, tmp_path: Path, monkeypatch: pytest.MonkeyPatch,
    capsys: pytest.CaptureFixture[str],
) -> None:  # fmt: skip
    changes = f"seed=1,2 log_dir={tmp_path}"
    line = ["sweep", "--arguments", changes, *arguments, "--", "python", "template.py"]
    monkeypatch.setattr(sys, "argv", line)
    with pytest.raises(SystemExit, match="2"):
        main()
    assert message in capsys.readouterr().err and not list(tmp_path.iterdir())


@pytest.mark.usefixtures("handlers")
def test_a_folder_that_cannot_be_made_is_told(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    (tmp_path / "file").touch()
    changes = f"seed=1,2 log_dir={tmp_path}/file"
    line = ["sweep", "--arguments", changes, "--", "python", "template.py"]
    monkeypatch.setattr(sys, "argv", line)
    with pytest.raises(SystemExit, match="2"):
        main()
    assert re.search("error: .*/file.*: Not a directory", capsys.readouterr().err)

"""The table of `make bench-start`: of made-up times, and in test-slow of real starts."""

from __future__ import annotations

import json
import sys
from pathlib import Path
from typing import Any

import pytest

from benchmarks import start
from tests.conftest import run


def test_known_times_give_known_figures_and_an_interrupted_run_goes_on(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    begun = [
        {"way": way, "ranks": 2, "repeat": repeat, "first_step_s": s, "processors_s": 4.0}
        for repeat, way, s in [
            (0, "ours", 2.0), (0, "horovodrun", 8.0), (0, "ours, each rank imports", 4.0),
            (1, "horovodrun", 99.0),  # interrupted: its neighbours in time are lost
        ]
    ]  # fmt: skip
    results: dict[str, Any] = {
        "repeats": 3, "ranks": [2], "arguments": [], "runs": begun, "look_ups": {}
    }  # fmt: skip
    asked: list[str] = []

    def made_up(way: str, ranks: int, overrides: list[str], counts: Path | None) -> dict:
        asked.append(way)
        return {"first_step_s": 10.0 if way == "horovodrun" else 2.5, "processors_s": 8.0}

    monkeypatch.setattr(start, "start", made_up)
    monkeypatch.setattr(start, "look_ups", lambda way, ranks, overrides: 1234.0)
    monkeypatch.setattr("shutil.which", lambda name: name)
    kept: list[int] = []
    start.run(results, lambda: kept.append(len(results["runs"])))
    first, second, third = start.WAYS
    # The first does not count; each repeat begins with another.
    assert asked == ["ours", second, third, first, third, first, second]
    assert kept[:6] == [4, 5, 6, 7, 8, 9] and results["finished"]
    shown = start.table(results)
    assert "| 2 | horovodrun | 10.00 (8.00 to 10.00) | 1.00 | 8.0 | 1,234 |" in shown
    assert (
        "| 2 | ours, each rank imports | 2.50 (2.50 to 4.00) | 0.25 (0.25 to 0.50) | 8.0 | 1,234 |"
        in shown
    )
    assert "| 2 | ours | 2.50 (2.00 to 2.50) | 0.25 | 8.0 | 1,234 |" in shown


def test_other_load_before_the_starts_is_told(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(start, "run", lambda *_: None)
    monkeypatch.setattr(sys, "argv", ["start", "--np", "2", "--out", str(tmp_path)])
    for share, told in ((0.3, True), (0.02, False)):
        monkeypatch.setattr(start.load, "before", lambda share=share: {"busy": share})
        assert start.main() == 0
        (file,) = tmp_path.glob("start_*.md")
        assert ("other load 30%" in file.read_text()) == told
        for each in tmp_path.glob("start_*"):  # the next is not to go on with it
            each.unlink()


@pytest.mark.slow
def test_all_starts_are_measured(tmp_path: Path) -> None:
    options = ["--np", "2", "--repeats", "1", "--out", str(tmp_path)]
    done = run([sys.executable, "-m", "benchmarks.start", *options], timeout=900)
    assert done.returncode == 0, done.stdout
    (file,) = tmp_path.glob("start_*.json")
    runs = json.loads(file.read_text())["runs"]
    assert [row["way"] for row in runs] == list(start.WAYS)
    assert all(row["processors_s"] > 0 and row["first_step_s"] > 0 for row in runs)

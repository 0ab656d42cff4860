"""The law by which a cost grows is the one that was planted; a real run asks all ranks."""

from __future__ import annotations

import json
import random
import sys
from pathlib import Path

import pytest

from benchmarks import overheads
from tests.conftest import run

RANKS = [2, 4, 8, 16, 32]


@pytest.mark.parametrize("name", overheads.LAWS)
def test_the_planted_law_is_found_under_noise(name: str) -> None:
    noise = random.Random(7)
    f = overheads.LAWS[name]
    costs = [(0.01 + 0.003 * f(p)) * noise.uniform(0.95, 1.05) for p in RANKS]
    assert overheads.law(RANKS, costs) == name


def test_what_does_not_grow_by_half_is_constant() -> None:
    assert overheads.law([2, 4, 8, 32], [0.21, 0.2, 0.21, 0.30]) == "constant"
    assert overheads.law([2, 4, 8, 32], [0.21, 0.21, 0.25, 0.90]) == "p^2"
    assert overheads.law([2, 4, 8, 32], [3.0, 1.0, 1.0, 1.0]) == "constant"  # the first was slow


def test_what_outgrows_all_laws_is_not_called_one_of_them() -> None:
    for p_to in (lambda p: p**3, lambda p: 2**p, lambda p: 1000 + p**3):
        assert overheads.law(RANKS, [p_to(p) for p in RANKS]) == "faster than p^2"


def test_few_sizes_fit_any_law() -> None:
    assert overheads.law([2, 8, 32], [1.0, 3.0, 9.0]) == "?"


def test_a_host_that_the_doctor_refuses_leaves_a_gap() -> None:
    costs: dict[str, float | None] = dict.fromkeys(overheads.WHAT, 0.001)
    fit, unfit = {**costs, "doctor": 7.0}, {**costs, "doctor": None}
    runs = {"2": [fit], "4": [fit], "8": [fit], "16": [fit, unfit]}
    shown = overheads.table({"ranks": [2, 4, 8, 16], "runs": runs})
    assert "| 7,000.0 | 7,000.0 | 7,000.0 | not fit | ? |" in shown
    assert shown.count("| 1.0 | 1.0 | 1.0 | 1.0 | constant |") == len(overheads.WHAT) - 1


def test_what_was_interrupted_goes_on(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    asked: list[int] = []

    def measure(ranks: int) -> dict[str, float | None]:
        asked.append(ranks)
        if len(asked) == 2:
            raise KeyboardInterrupt
        return dict.fromkeys(overheads.WHAT, 0.001)

    monkeypatch.setattr(overheads, "measure", measure)
    shares = iter([0.3, 0.0])  # other programs at the first call alone
    monkeypatch.setattr(overheads.load, "before", lambda: {"busy": next(shares)})
    options = ["--ranks", "2", "4", "--repeats", "2", "--out", str(tmp_path)]
    monkeypatch.setattr(sys, "argv", ["overheads", *options])
    assert (overheads.main(), overheads.main()) == (130, 0)
    assert asked == [2, 4, 4, 2, 4]
    (file,) = tmp_path.glob("*.json")
    assert json.loads(file.read_text())["finished"]
    assert "repeats. Take care: other load 30%." in file.with_suffix(".md").read_text()


@pytest.mark.slow
def test_all_costs_are_measured_on_all_ranks(tmp_path: Path) -> None:
    options = ["--ranks", "2", "1", "--repeats", "1", "--out", str(tmp_path)]
    done = run([sys.executable, "-m", "benchmarks.overheads", *options])
    assert done.returncode == 0, done.stdout
    (file,) = tmp_path.glob("overheads_*.json")
    results = json.loads(file.read_text())
    assert results["ranks"] == [1, 2]
    for ranks in ("1", "2"):
        assert set(results["runs"][ranks][0]) == set(overheads.WHAT)
    assert file.with_suffix(".md").read_text().count(" | ") > 2 * len(overheads.WHAT)

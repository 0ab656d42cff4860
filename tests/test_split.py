"""The table of `make bench-split`: of made-up times, and in test-slow of real trainings."""

from __future__ import annotations

import json
import sys
from pathlib import Path
from typing import Any

import pytest

from benchmarks import split
from models.split import Split
from tests.conftest import run


def test_known_times_give_known_figures() -> None:
    results: dict[str, Any] = {
        "repeats": 3, "batch": 64, "runs": [], "memory_mib": {"True": 2.0, "False": 3.5},
        "devices": ["cpu", "cpu"],
    }  # fmt: skip
    kept: list[int] = []
    asked: list[tuple[str, int]] = []

    def measure(way: split.Way, batch: int) -> dict[str, Any]:
        asked.append((way.name, batch))
        slow = len(asked) // len(split.WAYS) + 1 if way.ranks == 1 else 1
        return {"step_ms": 10.0 * (1 + way.idle) * slow / way.ranks}

    split.run(results, measure, lambda: kept.append(len(results["runs"])))
    assert len(asked) == 3 * len(split.WAYS) and kept[:-1] == list(range(1, len(asked) + 1))
    assert asked[0][0] == asked[len(split.WAYS)][0] == "one device"  # in turns
    shown = split.table(results)
    assert "| one device | 1 | 3.50 | 0% | 20.0 (10.0 to 30.0) | 3,200 | 1.00 |" in shown
    assert "| data parallel | 2 | 3.50 | 0% | 5.0 | 12,800 | 4.00 (2.00 to 6.00) |" in shown
    assert "| split, in a row | 2 | 2.00 | 50% | 30.0 (15.0 to 45.0) |" in shown
    assert "| both: 4 micro-batches | 4 | 2.00 | 20% |" in shown


def test_ranks_do_not_share_a_pair_of_gpus() -> None:
    asked: list[str] = []

    def measure(way: split.Way, batch: int) -> dict[str, Any]:
        asked.append(way.name)
        return {"step_ms": 1.0}

    results = {"repeats": 1, "batch": 64, "runs": [], "devices": ["cuda:0", "cuda:1"]}
    split.run(results, measure, lambda: None)
    assert asked == [way.name for way in split.WAYS[:-1]] and results["finished"]


def test_memory_is_that_of_the_fuller_half() -> None:
    network = Split(width=16, depth=3)
    sizes = [sum(p.numel() for p in half.parameters()) for half in (network.first, network.second)]
    memory = split.memory({"_target_": "models.split.Split", "width": 16, "depth": 3})
    assert memory[False] == pytest.approx(16 * sum(sizes) / 2**20)
    assert memory[True] == pytest.approx(16 * max(sizes) / 2**20)


def test_ways_say_how_the_network_is_placed() -> None:
    alone, *_, both = split.WAYS
    assert alone.overrides(["cpu", "cpu"])[0] == "model.devices=null"
    assert both.overrides(["cuda:0", "cuda:1"]) == [
        "model.devices=[cuda:0,cuda:1]", "model.micro_batches=4",
    ]  # fmt: skip


@pytest.mark.parametrize(
    "key", ["strategy", "model.devices", "model.micro_batches", "data.batch_size"]
)
def test_what_tells_the_ways_apart_is_refused(
    key: str, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    """With it all rows would be of one way, under the names of others."""
    monkeypatch.setattr(sys, "argv", ["split", "--", "model.width=8", f"++{key}=4"])
    monkeypatch.setattr(split, "configuration", lambda *_: pytest.fail("asked too late"))
    assert split.main() == 2
    (line,) = capsys.readouterr().err.splitlines()
    assert line.startswith(f"error: ++{key}=4: make bench-split sets {key} itself")


def test_a_single_gpu_is_not_what_was_measured() -> None:
    results: dict[str, Any] = {"cpu": "A CPU", "cores": 2, "gpus": ["A GPU"]}
    assert split.device({**results, "devices": ["cpu", "cpu"]}) == "A CPU, 2 cores"
    assert split.device({**results, "devices": ["cuda:0", "cuda:1"]}) == "A GPU"


@pytest.mark.slow
def test_all_ways_are_measured(tmp_path: Path) -> None:
    options = ["--batch", "8", "--steps", "3", "--repeats", "1", "--out", str(tmp_path)]
    done = run(
        [sys.executable, "-m", "benchmarks.split", *options, "--", "model.width=8"], timeout=250
    )
    assert done.returncode == 0, done.stdout
    (file,) = tmp_path.glob("split_*.json")
    runs = json.loads(file.read_text())["runs"]
    assert [row["way"] for row in runs] == [way.name for way in split.WAYS]
    assert all(row["step_ms"] > 0 for row in runs)
    assert file.with_suffix(".md").read_text().count("\n| ") == len(split.WAYS) + 2

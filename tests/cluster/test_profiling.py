"""make profile over two hosts that share nothing: one trace, in it both ranks on one clock."""

from __future__ import annotations

import gzip
import json
import re
import shutil
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import pytest

from tests.cluster.conftest import NICS, PYTHON, made
from tests.conftest import run

Events = list[dict[str, Any]]
BUCKET = "all-reduce gradients.0.0"
ROUNDED_US = 1000  # Horovod notes its zero once; see benchmarks/traces.py


@pytest.fixture
def theirs(project: Path, tmp_path: Path) -> Path:
    return Path(shutil.copytree(project, tmp_path / "theirs" / "project"))


@pytest.fixture
def output(project: Path, theirs: Path) -> Iterator[str]:
    for hosts in made(2, NICS[:2]):
        hosts[1].shows(theirs.parent, project.parent)
        target = ["make", f"PYTHON={PYTHON}", "HOSTS=node1:1,node2:1", "STEPS=6", "profile"]
        # Not make's own check of the environment, which is not that of this copy.
        done = run(
            hosts[0].command("env", "-C", str(project), *target, "--assume-old=dev-environment")
        )
        assert done.returncode == 0, done.stdout
        yield done.stdout


def steps(events: Events, rank: str) -> dict[str, dict[str, Any]]:
    """By name, of one rank."""
    return {e["name"]: e for e in of(events, rank) if e["name"].startswith("ProfilerStep#")}


def of(events: Events, process: str) -> Events:
    """The ranges of a process, as it is called in the trace."""
    names = [e for e in events if e["name"] == "process_name"]
    (number,) = [e["pid"] for e in names if e["args"]["name"] == process]
    return [e for e in events if e["pid"] == number and e["ph"] == "X"]


def within(events: Events, step: dict[str, Any], name: str) -> dict[str, Any]:
    """The one range of that name in a step."""
    end = step["ts"] + step["dur"]
    (found,) = [e for e in events if e["name"] == name and step["ts"] <= e["ts"] < end]
    return found


def test_one_trace_has_both_ranks_on_one_clock(output: str, project: Path, theirs: Path) -> None:
    (file,) = project.glob("logs/classifier/runs/*/trace.json.gz")
    events = json.loads(gzip.decompress(file.read_bytes()))["traceEvents"]
    ranks = ["rank 0 on node1", "rank 1 on node2"]
    found = {e["args"]["name"] for e in events if e["name"] == "process_name"}
    assert found == {*ranks, "Horovod, rank 0"}
    uncertainty_us = 0.0
    for rank in (0, 1):
        content = json.loads(
            gzip.decompress((file.parent / f"trace/rank-{rank}.json.gz").read_bytes())
        )
        who = content["rank"]
        # Both hosts are this machine: the true difference is none.
        assert abs(who["clock_ahead_ns"]) <= who["clock_uncertainty_ns"]
        uncertainty_us = who["clock_uncertainty_ns"] / 1e3
    assert 0 < uncertainty_us < 1e6

    rows = [of(events, rank) for rank in ranks]
    by_rank = [steps(events, rank) for rank in ranks]
    assert set(by_rank[0]) == set(by_rank[1]) and len(by_rank[0]) == 6
    horovod = [e for e in of(events, "Horovod, rank 0") if e["name"] == "ALLREDUCE"]
    for name in by_rank[0]:
        pairs = list(zip(rows, (steps[name] for steps in by_rank)))
        starts = [within(row, step, f"{BUCKET}: start") for row, step in pairs]
        waits = [within(row, step, f"{BUCKET}: wait") for row, step in pairs]
        begun = max(start["ts"] for start in starts)
        ended = min(wait["ts"] + wait["dur"] for wait in waits)
        # No rank has the sum before the last has begun, and Horovod makes it in between.
        assert begun <= ended + 2 * uncertainty_us
        ends = [e["ts"] + e["dur"] for e in horovod]
        assert any(
            begun - 2 * uncertainty_us - ROUNDED_US <= end
            <= waits[0]["ts"] + waits[0]["dur"] + ROUNDED_US
            for end in ends
        )  # fmt: skip

    fetched = sorted(path.name for path in (file.parent / "trace").iterdir())
    assert fetched == ["horovod.json.gz", "rank-0.json.gz", "rank-1.json.gz"]
    (left,) = theirs.glob("logs/classifier/runs/*/trace")
    assert [path.name for path in left.iterdir()] == ["rank-1.json.gz"]
    assert file.with_name("trace.png").read_bytes().startswith(b"\x89PNG")
    table = output[output.index("RANK ") :]
    for line in (r" *0  node1 .*%", r" *1  node2 .*%", r"slowest: rank \d on node", r"aten::"):
        assert re.search(f"^{line}", table, re.MULTILINE), line
    assert "ALLREDUCE" in table and "(1 fetched)" in table

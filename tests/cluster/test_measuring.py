"""make bench over two hosts: the same command, on the ranks of both."""

from __future__ import annotations

import json
from pathlib import Path

import pytest

from cluster import testbed
from tests.cluster.conftest import PYTHON
from tests.conftest import ROOT, run


@pytest.mark.slow
def test_a_job_is_measured_on_one_host_and_on_two(hosts: list[testbed.Node], project: Path) -> None:
    """With the all-reduces between them, from which the step on both is predicted."""
    make = ["make", f"PYTHON={PYTHON}", "HOSTS=node1:1,node2:1", "--assume-old=dev-environment"]
    allreduce = "ARGS=--repeats 2 --largest 4194304"  # on a busy machine the small fit no line
    for target in (["bench-allreduce", allreduce], ["bench", "NP=1 2", "REPEATS=1", "STEPS=3"]):
        done = run(hosts[0].command("env", "-C", str(project), *make, *target))
        assert done.returncode == 0, done.stdout
    there = Path("benchmarks", "results")
    before = {file.name for file in (ROOT / there).glob("*")}
    (file,) = [f for f in (project / there).glob("scaling_*.json") if f.name not in before]
    results = json.loads(file.read_text())
    assert [run["np"] for run in results["runs"]] == [1, 2]
    assert results["runs"][1]["wire"]["bytes"] > 0
    assert {host["node"] for host in results["hosts"].values()} == {"node1", "node2"}
    assert [each["np"] for each in results["predicted"]] == [1, 2]

"""Cores that a process may use, in containers that are made up and in one that is real."""

from __future__ import annotations

import os
import subprocess
import sys
from pathlib import Path
from types import ModuleType

import pytest

import cluster.cores
import strategies.cores
from tests.conftest import ROOT

LIMITS = [  # /proc/self/cgroup, file of a limit, what is in it, cores of eight
    ("0::/", "cpu.max", "max 100000", 8),
    ("0::/", "cpu.max", "150000 100000", 2),
    ("0::/a/b", "a/b/cpu.max", "300000 100000", 3),
    ("0::/not/mounted/here", "cpu.max", "50000 100000", 1),
    ("3:cpuset:/\n2:cpu,cpuacct:/a", "cpu/a/cpu.cfs_quota_us", "400000", 4),
    ("2:cpu:/", "cpu/cpu.cfs_quota_us", "-1", 8),
    ("2:cpu:/", "cpu/cpu.cfs_quota_us", "9900000", 8),
]


@pytest.mark.parametrize("cores", [cluster.cores, strategies.cores])
@pytest.mark.parametrize("groups, name, limit, expected", LIMITS)
def test_limits_of_containers_count(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch,
    groups: str, name: str, limit: str, expected: int, cores: ModuleType,
) -> None:  # fmt: skip
    (tmp_path / "groups").write_text(f"{groups}\n")
    file = tmp_path / name
    file.parent.mkdir(parents=True, exist_ok=True)
    file.write_text(f"{limit}\n")
    file.with_name("cpu.cfs_period_us").write_text("100000\n")
    monkeypatch.setattr(cores, "CGROUPS", tmp_path)
    monkeypatch.setattr(cores, "OWN", tmp_path / "groups")
    monkeypatch.setattr(os, "sched_getaffinity", lambda _: set(range(8)))
    assert cores.usable_cores() == expected


def test_a_process_in_a_real_group_of_half_a_core_has_one() -> None:
    group = Path("/sys/fs/cgroup/cpu/cores-of-a-test")
    try:
        group.mkdir()
        (group / "cpu.cfs_quota_us").write_text("50000")
    except OSError as error:
        pytest.skip(f"no group of processes can be made here ({error})")
    code = "from cluster.cores import usable_cores; print(usable_cores())"
    try:
        enter = f"echo $$ > {group}/cgroup.procs && exec {sys.executable} -c '{code}'"
        done = subprocess.run(["sh", "-c", enter], cwd=ROOT, capture_output=True, text=True)
    finally:
        group.rmdir()
    assert done.stdout == "1\n", done.stderr

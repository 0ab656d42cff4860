"""Cores and memory that a process may use: in containers made up, and in one that is real."""

from __future__ import annotations

import io
import os
import subprocess
import sys
from pathlib import Path
from types import ModuleType

import pytest

import strategies.cores
from cluster import probe
from tests.conftest import ROOT

LIMITS = [  # /proc/self/cgroup, file of a limit, what is in it, cores of eight
    ("0::/", "cpu.max", "max 100000", 8),
    ("0::/", "cpu.max", "150000 100000", 2),
    ("0::/a/b", "a/b/cpu.max", "300000 100000", 3),
    ("0::/a/b", "a/cpu.max", "200000 100000", 2),
    ("0::/not/mounted/here", "cpu.max", "50000 100000", 1),
    ("3:cpuset:/\n2:cpu,cpuacct:/a", "cpu/a/cpu.cfs_quota_us", "400000", 4),
    ("2:cpu:/", "cpu/cpu.cfs_quota_us", "-1", 8),
    ("2:cpu:/", "cpu/cpu.cfs_quota_us", "9900000", 8),
]


@pytest.mark.parametrize("cores", [probe, strategies.cores])
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


@pytest.mark.parametrize(
    "own, files, mib",
    [  # of 4 GiB that the host has free
        ("0::/a", {"a/memory.max": "max", "a/memory.current": "5"}, 4096),
        ("0::/a/b", {"a/memory.max": str(3 << 30), "a/memory.current": str(1 << 30)}, 2048),
        (
            "0::/",
            {"memory.max": str(3 << 30), "memory.current": str(2 << 30),
             "memory.stat": f"anon 5\ninactive_file {512 << 20}"},
            1536,
        ),
        (
            "4:memory:/a",
            {"memory/a/memory.limit_in_bytes": str(1 << 30),
             "memory/a/memory.usage_in_bytes": str(1 << 29),
             "memory/a/memory.stat": f"inactive_file 0\ntotal_inactive_file {256 << 20}"},
            768,
        ),
        (
            "4:memory:/",
            {"memory/memory.limit_in_bytes": str((1 << 63) - 4096),
             "memory/memory.usage_in_bytes": "1"},
            4096,
        ),
        ("0::/", {"memory.max": "1000", "memory.current": "2000"}, 0),
    ],
)  # fmt: skip
def test_a_container_may_have_less_memory(
    own: str, files: dict[str, str], mib: int, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    for name, content in {"groups": own, **files}.items():
        (tmp_path / name).parent.mkdir(parents=True, exist_ok=True)
        (tmp_path / name).write_text(f"{content}\n")
    monkeypatch.setattr(probe, "CGROUPS", tmp_path)
    monkeypatch.setattr(probe, "OWN", tmp_path / "groups")
    meminfo = io.StringIO("MemTotal: 9999999 kB\nMemAvailable: 4194304 kB\n")
    monkeypatch.setattr("builtins.open", lambda *_: meminfo)
    assert probe.memory() == mib


def test_a_process_in_a_real_group_of_half_a_core_has_one() -> None:
    """Of control groups of version 1; those of version 2 are made up above."""
    group = Path(f"/sys/fs/cgroup/cpu/cores-of-a-test-{os.getpid()}")
    try:
        group.mkdir()
        (group / "cpu.cfs_quota_us").write_text("50000")
    except OSError as error:
        pytest.skip(f"no group of processes can be made here ({error})")
    code = "from cluster.probe import usable_cores; print(usable_cores())"
    try:
        enter = f"echo $$ > {group}/cgroup.procs && exec {sys.executable} -c '{code}'"
        done = subprocess.run(["sh", "-c", enter], cwd=ROOT, capture_output=True, text=True)
    finally:
        group.rmdir()
    assert done.stdout == "1\n", done.stderr

"""How many cores a process may use: by its affinity, and by the limits of its container."""

from __future__ import annotations

import math
import os
from pathlib import Path

CGROUPS, OWN = Path("/sys/fs/cgroup"), Path("/proc/self/cgroup")


def usable_cores() -> int:
    """Whole cores; a limit of Docker's --cpus or of Kubernetes is rounded up.

    Source: cgroups(7); cpu.max in version 2, cpu.cfs_quota_us in version 1.
    """
    limits = [float(len(os.sched_getaffinity(0)))]
    for folder in _groups():
        quota, _, period = _read(folder / "cpu.max").partition(" ")
        quota = quota or _read(folder / "cpu.cfs_quota_us")
        period = period or _read(folder / "cpu.cfs_period_us")
        if quota.isdecimal() and period.isdecimal():
            limits.append(int(quota) / int(period))
    return max(1, math.ceil(min(limits)))


def _groups() -> list[Path]:
    """This process's control groups and their ancestors; in a container its own may be the root."""
    folders = []
    for line in _read(OWN).splitlines():
        _, controllers, path = line.split(":", 2)
        if not controllers or "cpu" in controllers.split(","):
            root = CGROUPS / "cpu" if controllers else CGROUPS
            own = root / path.strip("/")
            above = [own, *own.parents]
            folders += above[: above.index(root) + 1]
    return folders


def _read(file: Path) -> str:
    try:
        return file.read_text().strip()
    except OSError:
        return ""

"""How many cores a process may use: by its affinity, and by the limit of its container."""

from __future__ import annotations

import math
import os
from pathlib import Path

CGROUPS, OWN = Path("/sys/fs/cgroup"), Path("/proc/self/cgroup")


def usable_cores() -> int:
    """Whole cores; a limit of Docker's --cpus or of Kubernetes is rounded up.

    Source: cgroups(7); cpu.max in version 2, cpu.cfs_quota_us in version 1. cluster/cores.py is the
    same file, as this folder stands alone.
    """
    limits = [float(len(os.sched_getaffinity(0)))]
    for line in _read(OWN).splitlines():
        _, controllers, path = line.split(":", 2)
        for place in (path.strip("/"), ""):  # within a container, its own group may be the root
            if controllers == "":
                text = _read(CGROUPS / place / "cpu.max")
            elif "cpu" in controllers.split(","):
                folder = CGROUPS / "cpu" / place
                text = f"{_read(folder / 'cpu.cfs_quota_us')} {_read(folder / 'cpu.cfs_period_us')}"
            else:
                continue
            quota, _, period = text.strip().partition(" ")
            if quota.isdecimal() and period.isdecimal():
                limits.append(int(quota) / int(period))
    return max(1, math.ceil(min(limits)))


def _read(file: Path) -> str:
    try:
        return file.read_text().strip()
    except OSError:
        return ""

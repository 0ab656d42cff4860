"""What else a host does around a measurement, and how fast its cores are.

    python -m benchmarks.load            before a measurement: takes about 1.3 s, prints JSON
    python -m benchmarks.load --after    after it: only the counters

Nothing of ours may run meanwhile. Only /proc/stat (proc(5)) and nvidia-smi are read.
"""

from __future__ import annotations

import json
import statistics
import sys
import time
from typing import Any

import psutil

from benchmarks.hardware import nvidia_smi

# Disturbances above these are noted beside the figures. An idle host is busy by 1 to 3 %, and its
# times of the arithmetic agree within 2 %. A job that takes a tenth of the cores slows ranks that
# use all of them by about a tenth, which is as much as the differences a scaling table is read for.
BUSY_SHARE = 0.10  # of all cores, or of a GPU's time, before a measurement
STEAL_SHARE = 0.02  # of the time during it, that the hypervisor gave to other machines
DRIFT = 0.05  # of the arithmetic's time, against the fastest in the same file

PIECES, ADDITIONS = 20, 200_000  # about 0.2 s in all


def before() -> dict[str, Any]:
    """Busy shares of cores and GPUs in a second, ms of arithmetic, counters."""
    busy = psutil.cpu_percent(interval=1) / 100
    used = [int(share) for (share,) in nvidia_smi("utilization.gpu") if share.isdecimal()]
    return {
        "busy": round(busy, 3),
        "gpu_busy": max(used) / 100 if used else None,
        "arithmetic_ms": round(arithmetic(), 3),
        "counters": counters(),
    }


def counters() -> dict[str, float]:
    """Seconds of all cores since boot: total, and those stolen by the hypervisor."""
    seconds = psutil.cpu_times()[:8]  # from user to steal; what follows is in user, too
    return {"total": sum(seconds), "steal": seconds[-1]}


def arithmetic() -> float:
    """The median ms of equal pieces of work, which depend on the clock and not on memory."""
    times = []
    for _ in range(PIECES):
        began = time.perf_counter()
        total = 0
        for number in range(ADDITIONS):
            total += number
        times.append(time.perf_counter() - began)
    return statistics.median(times) * 1e3


def stolen(earlier: dict[str, float], later: dict[str, float]) -> float:
    """The share of the time between two readings that the hypervisor took."""
    total = later["total"] - earlier["total"]
    return round((later["steal"] - earlier["steal"]) / total, 4) if total > 0 else 0.0


if __name__ == "__main__":
    print(json.dumps({"counters": counters()} if "--after" in sys.argv else before()))

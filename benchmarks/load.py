"""What else a host does around a measurement, how fast its cores are, and how hot its GPUs.

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
HEAT_SHARE = 0.02  # of the time during it, in which a GPU was slowed down for its temperature

# Microseconds since the driver was loaded; older drivers do not have these.
HEAT = [f"clocks_event_reasons_counters.{kind}_thermal_slowdown" for kind in ("sw", "hw")]

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


def warning(busy: float) -> str:
    """A sentence to stand with figures, of the busy share before them; empty if it is small."""
    return f" Take care: other load {busy:.0%}." if busy > BUSY_SHARE else ""


def counters() -> dict[str, Any]:
    """Seconds since boot: of all cores together, in total and stolen by the hypervisor; of a clock;
    and those of each GPU that was slowed down for its temperature, if the driver counts them."""
    seconds = psutil.cpu_times()[:8]  # from user to steal; what follows is in user, too
    slowed = [
        1e-6 * max(map(int, counts)) for counts in nvidia_smi(*HEAT)
        if all(count.isdecimal() for count in counts)
    ]  # fmt: skip
    clock = time.clock_gettime(time.CLOCK_BOOTTIME)
    return {"total": sum(seconds), "steal": seconds[-1], "clock": clock, "gpus_slowed": slowed}


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


def gpu_slowed(earlier: dict[str, Any], later: dict[str, Any]) -> float | None:
    """The share of the time between two readings in which the hottest GPU was slowed down for its
    temperature; None if no driver counts that."""
    seconds = later["clock"] - earlier["clock"]
    pairs = zip(earlier["gpus_slowed"], later["gpus_slowed"])
    slowed = max((after - before for before, after in pairs), default=None)
    return None if slowed is None or seconds <= 0 else round(slowed / seconds, 4)


def stolen(earlier: dict[str, Any], later: dict[str, Any]) -> float:
    """The share of the time between two readings that the hypervisor took."""
    total = later["total"] - earlier["total"]
    share: float = (later["steal"] - earlier["steal"]) / total if total > 0 else 0.0
    return round(share, 4)


if __name__ == "__main__":
    print(json.dumps({"counters": counters()} if "--after" in sys.argv else before()))

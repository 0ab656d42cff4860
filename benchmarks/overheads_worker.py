"""What a rank of benchmarks/overheads.py does: the strategy's collectives on little data.

Run as a script, not as a module: cluster/preload.py shares only the imports of scripts.
"""

from __future__ import annotations

import json
import os
import statistics
import time
from collections.abc import Callable
from typing import Any

import horovod.torch as hvd
import hydra  # noqa: F401
import pytorch_lightning  # noqa: F401
import torch

from benchmarks.overheads import BEGUN
from strategies import HorovodStrategy

# preload: as in template.py
imported = time.time()


def main() -> None:
    torch.set_num_threads(1)
    hvd.init()
    initialized = time.time()
    strategy = HorovodStrategy()
    world = strategy.world
    moments = world.gather_objects((imported, initialized))
    last_import = max(moment for moment, _ in moments)
    durations = {
        "import": last_import - float(os.environ[BEGUN]),
        # Counted from the last import, before which no rank can be ready.
        "init": max(moment for _, moment in moments) - last_import,
    }
    numbers, small = torch.ones(100), torch.ones(1)
    checkpoint = {"state": torch.ones(4 * 2**20)}
    tasks: dict[str, tuple[int, Callable[[], Any]]] = {
        "negotiation": (50, lambda: strategy.reduce(small, reduce_op="sum")),
        "models": (10, lambda: world.gather_objects(b"0" * 32)),
        "metric": (10, lambda: world.gather(numbers)),
        "anatomy": (10, lambda: strategy.all_gather(torch.ones(200, 6))),
        "checkpoint": (3, lambda: strategy.broadcast(checkpoint)),
        "barrier": (50, strategy.barrier),
    }
    for name, (repeats, task) in tasks.items():
        seconds = []
        for _ in range(repeats + 1):
            strategy.barrier()
            start = time.perf_counter()
            task()
            seconds.append(time.perf_counter() - start)
        # The slowest rank's, for which the others wait sooner or later.
        median = torch.tensor(statistics.median(seconds[1:]))
        durations[name] = float(strategy.reduce(median, reduce_op="max"))
    if hvd.rank() == 0:
        result = {"ranks": hvd.size(), "seconds": durations, "done": time.time()}
        print(json.dumps(result), flush=True)
    hvd.shutdown()


if __name__ == "__main__":
    main()

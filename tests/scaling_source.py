"""In place of the machine: a source of known times for `make bench`."""

from __future__ import annotations

import sys
from collections.abc import Callable
from typing import Any

from benchmarks import scaling
from benchmarks.efficiency import Results, Row, rows
from benchmarks.launching import Job

QUIET = {"busy": 0.01, "gpu_busy": None, "arithmetic_ms": 8.0, "stolen": 0.0}


MACHINE = {
    "cpu": "Test CPU", "cores": 4, "memory_gib": 8, "gpus": [], "nics": {"eth0": 10000},
    "machine": 0, "node": "a",
}  # fmt: skip


HERE = ["INSTALL=true", f"PYTHON={sys.executable}"]  # nothing is to be installed


Time = Callable[[Job, int], float]


def results(**settings: Any) -> Results:
    """A benchmark of which nothing has run."""
    asked = {
        "arguments": [], "mode": "weak", "modes": ["weak"], "strategies": ["horovod"],
        "sizes": [1, 2, 4], "repeats": 3, "steps": 100, "epochs": None, "warmup": 10,
        "network": None, "threads": 1, "batch_size": 32,
        "hosts": {"localhost": {"slots": 4, "gpus": None, "nic": None}}, **settings,
    }  # fmt: skip
    config = {"task": None, "model": {"_target_": "models.toy.Toy"}, "data": {"batch_size": 32}}
    return {
        "benchmark": "scaling", "settings": asked, "config": config,
        "hosts": {"localhost": MACHINE}, "environment": {}, "python": "3.11", "changes": None,
        "versions": {"torch": "2.11.0"}, "commit": "abc", "date": "2026-01-02T03:04:05",
        "oversubscribed": [], "trial": None, "finished": False, "runs": [],
    }  # fmt: skip


class Source:
    """Stands for the machine: gives times that are known, and keeps what was asked."""

    def __init__(self, time: Time, samples: int | None = None, **host: Any) -> None:
        self.time, self.samples, self.host = time, samples, {**QUIET, **host}
        self.asked: list[tuple[Job, list[str]]] = []

    def __call__(self, job: Job, length: list[str]) -> dict[str, Any]:
        earlier = sum(one == job for one, _ in self.asked[1:])  # the first does not count
        self.asked.append((job, length))
        ms = self.time(job, earlier)
        asked = dict(override.split("=") for override in length)
        warmup, batches = int(asked["callbacks.anatomy.warmup"]), "callbacks.anatomy.batches"
        epochs = int(asked["trainer.max_epochs"])
        steps = int(asked[batches]) - warmup if batches in asked else (epochs - 1) * warmup
        return {
            "measured_steps": steps,
            "strategy": job.strategy, "np": job.np, "batch": job.batch, "alone": job.alone,
            "step_ms": ms, "median_ms": ms, "hosts": {"localhost": dict(self.host)},
            "model": "toy", "train_samples": self.samples, "drop_last": False, "operations": "Gloo",
        }  # fmt: skip


def measured(source: Source, benchmark: Results | None = None) -> Results:
    benchmark = benchmark or results()
    scaling.run(benchmark, source, lambda: None)
    return benchmark


def by_size(benchmark: Results, **where: str) -> dict[int, Row]:
    return {
        row.np: row
        for row in rows(benchmark)
        if all(getattr(row, key) == value for key, value in where.items())
    }

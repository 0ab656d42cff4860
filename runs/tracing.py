"""A few training steps of each rank, operation by operation, with clocks that can be compared.

    make profile ARGS=...                  a job with it, then one timeline of all ranks
    python template.py profiler=trace      each rank's part alone, in the run's folder

Rank n writes trace/rank-<n>.json.gz, a trace of torch.profiler in which Lightning's actions are
ranges of their own. It holds the rank's host, and how far its clock is ahead of rank 0's. If
HOROVOD_TIMELINE=DYNAMIC was set when the job started, rank 0 adds Horovod's timeline of the same
steps, trace/horovod.json.gz; the thread that writes it keeps a core of its host busy. On a GPU,
Horovod then has rank 0 wait for each of its operations, which it does not do otherwise.

Times are those of each host's system clock. Clocks that drift apart within the traced steps, or are
set meanwhile, are not noticed.
"""

from __future__ import annotations

import gzip
import json
import os
import time
from pathlib import Path

import horovod.torch as hvd
import pytorch_lightning as pl
import torch
from pytorch_lightning.profilers import Profiler
from pytorch_lightning.strategies import Strategy
from torch.profiler import ProfilerActivity, profile, record_function, schedule

from runs.folders import shown
from runs.ranks import gather_objects

NEXT_BATCH = ".train_dataloader_next"  # the action of Lightning's that a step begins with
ROUNDS = 40  # of the measurement of clocks, 2 ms each
LATE_SECONDS = 5e-4


class StepTrace(Profiler):
    """The profiler of `profiler=trace`.

    Args:
        dirpath: where traces go.
        warmup: batches before the first that is traced; at least 1.
        steps: batches that are traced.
        stop: end the training after them.
    """

    _profile: profile | None = None

    def __init__(self, dirpath: str, warmup: int = 10, steps: int = 10, stop: bool = False) -> None:
        super().__init__(dirpath=dirpath)
        if warmup < 1 or steps < 1:
            raise ValueError(f"warmup={warmup}, steps={steps}: at least 1 batch of each is needed")
        self.warmup, self.steps, self._stop_training = warmup, steps, stop
        self._batches = -1  # how many have begun, less one
        self._ranges: dict[str, record_function] = {}

    def start(self, action_name: str) -> None:
        if action_name.endswith(NEXT_BATCH):
            self._next_step()
        if self._profile is not None and action_name not in self._ranges:
            self._ranges[action_name] = record_function(action_name)
            self._ranges[action_name].__enter__()

    def stop(self, action_name: str) -> None:
        if action_name in self._ranges:
            self._ranges.pop(action_name).__exit__(None, None, None)

    def _next_step(self) -> None:
        """All ranks come here before each batch, in the order of batches."""
        self._batches += 1
        if self._batches == 0:
            cuda = [ProfilerActivity.CUDA] if torch.cuda.is_available() else []
            steps = schedule(wait=self.warmup - 1, warmup=1, active=self.steps, repeat=1)
            self._profile = profile(
                activities=[ProfilerActivity.CPU, *cuda], schedule=steps,
                on_trace_ready=self._write, acc_events=True,  # without it, a warning
            )  # fmt: skip
            self._profile.start()
            return
        if self._profile is None:
            return
        if self._batches == self.warmup:
            self._timeline(start=True)
            self._tell_who_and_when()
        self._profile.step()
        if self._batches == self.warmup + self.steps:
            self._profile.stop()
            self._profile = None
            self._trainer.should_stop |= self._stop_training

    @property
    def _trainer(self) -> pl.Trainer:
        return self._lightning_module.trainer  # type: ignore[attr-defined]  # set by the Trainer

    def _timeline(self, start: bool) -> None:
        """Begin or end Horovod's timeline, which rank 0 writes."""
        if os.environ.get("HOROVOD_TIMELINE") != "DYNAMIC" or not hvd.is_initialized():
            return
        file = Path(str(self.dirpath)) / "horovod.json"
        if start:
            file.parent.mkdir(parents=True, exist_ok=True)
            hvd.start_timeline(str(file))
            return
        hvd.stop_timeline()
        if self._trainer.global_rank == 0 and file.exists():
            if file.stat().st_size:  # it is empty for a single rank
                with gzip.open(f"{file}.gz", "wb") as packed:
                    packed.write(file.read_bytes())
            file.unlink()

    def _tell_who_and_when(self) -> None:
        assert self._profile is not None
        strategy = self._trainer.strategy
        ahead, uncertainty = clock(strategy)
        metadata = {
            "rank": self._trainer.global_rank,
            "host": os.environ.get("HOROVOD_HOSTNAME", os.uname().nodename),
            "clock_ahead_ns": ahead,
            "clock_uncertainty_ns": uncertainty,
        }
        self._profile.add_metadata_json("rank", json.dumps(metadata))

    def _write(self, recorded: profile) -> None:
        self._timeline(start=False)
        folder = Path(str(self.dirpath))
        folder.mkdir(parents=True, exist_ok=True)
        rank = self._trainer.global_rank
        recorded.export_chrome_trace(str(folder / f"rank-{rank}.json.gz"))
        if rank == 0:
            # If training ended amid them, the last has begun, and no other.
            steps = min(self.steps, self._batches + 1 - self.warmup)
            what = "step" if steps == 1 else "steps"
            print(f"trace   {shown(folder)}: {steps} {what} after {self.warmup}", flush=True)

    def teardown(self, stage: str | None) -> None:
        if self._profile is not None:
            self._profile.stop()  # writes what there is, if it has begun
            self._profile = None
            if self._batches < self.warmup and self._trainer.is_global_zero:
                text = f"training ended within profiler.warmup={self.warmup} batches"
                print(f"trace   nothing: {text}", flush=True)
        super().teardown(stage)

    def __del__(self) -> None:
        """After an error: torch's profiler must not outlive Python."""
        if self._profile is not None:
            self._profile.on_trace_ready = None
            self._profile.stop()
            self._profile = None


def clock(strategy: Strategy) -> tuple[int, int]:
    """How many ns this rank's clock is ahead of rank 0's, and how far off that may be at most.

    In each round all ranks note the time before and after a barrier, which nobody leaves before
    all have come. So rank 0's "before" comes before this rank's "after", and the other way round:
    each round bounds the difference from both sides, and the narrowest bounds hold. It is the
    shortest round trip of Cristian (1989, https://doi.org/10.1007/BF01784024), with all ranks at
    once. A bound is narrowest when the one that comes last comes late, so they take turns. Ranks of
    rank 0's host share its clock: nothing to measure.
    """
    hosts = gather_objects(strategy, os.uname().nodename)
    if len(set(hosts)) == 1:
        return 0, 0
    rank = strategy.global_rank  # type: ignore[attr-defined]
    times = []
    for number in range(ROUNDS):
        if (rank == 0) == (number % 2 == 0):
            time.sleep(LATE_SECONDS)
        begun = time.time_ns()
        strategy.barrier()
        times.append([begun, time.time_ns()])
    mine = torch.tensor(times, device=strategy.root_device)
    first = strategy.all_gather(mine)[0]
    return (0, 0) if hosts[rank] == hosts[0] else difference(mine, first)


def difference(mine: torch.Tensor, first: torch.Tensor) -> tuple[int, int]:
    """Of what this rank and rank 0 noted, (rounds, 2) each: the middle of the bounds, and half."""
    least = int((mine[:, 0] - first[:, 1]).max())
    most = int((mine[:, 1] - first[:, 0]).min())
    return (least + most) // 2, abs(most - least + 1) // 2

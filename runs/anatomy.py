"""Where the time of a training step goes, on every rank, and what that means.

Each moment from the end of a batch to the end of the next belongs to one phase:

    data         the loader, and the transfer to the device
    forward      training_step, until it calls backward
    backward     with as much of the gradients' all-reduce as runs beside it
    all_reduce   what is left of it when backward is done
    optimizer    clipping and the optimizer's step
    rest         hooks, callbacks, logging, checkpoints, the Trainer between two batches

A rank that comes late keeps all others in their all-reduce. So what the rank that waits least
spends there is the network's, and what others wait longer is counted as "straggler". Under
strategy=ddp the all-reduce is a part of backward and not told apart.

The figures go to summary.json and to the loggers, and a line at the end names the bottleneck. The
cost is a reading of the clock at each of these moments, two of a file in /proc, and a gather of
some kilobytes every 200 timed steps. After the first 200, only one step is timed in a tenth of a
second or so. It is drawn by lot, as every tenth step might always be the one that waits for the
loader.

On a GPU moments are events in its stream: phases are those of the GPU, not of the program, which
runs ahead. Where the GPU waits for the program they are the program's after all, so the GPU is
asked, when all of backward is queued, whether it has caught up.

Any phase may hold time in which the rank was ready to run and had no core; the kernel counts it.
"""

from __future__ import annotations

import contextlib
import os
import random
import socket
from collections import deque
from collections.abc import Sequence
from io import FileIO
from itertools import compress, pairwise
from pathlib import Path
from statistics import median_low
from typing import Any, NamedTuple

import pytorch_lightning as pl
import torch
from pytorch_lightning.callbacks import Callback, Checkpoint
from pytorch_lightning.strategies import Strategy
from torch import Tensor
from torch.optim import Optimizer
from torch.utils.hooks import RemovableHandle

from runs.bottleneck import (
    PHASES,
    crowded,
    late_phase,
    measured,
    named,
    phases,
    shares,
    straggler,
    verdict,
)
from runs.ranks import gather_objects
from strategies.buckets import Exchange
from strategies.clock import Moment, moment, seconds
from strategies.cores import usable_cores

WINDOW = 200  # timed steps between two looks at all ranks
KEPT = 1000  # the last timed steps, of which medians are made
KEPT_SHARE = 0.1  # at least, of the first timed steps, when fewer are timed from then on
BEHIND = 10  # steps that a GPU may be behind when its clock is read, so that nobody waits for it
HOOKS = (  # of a step
    "on_train_batch_start", "on_before_backward", "on_after_backward", "on_before_optimizer_step",
    "on_train_batch_end",
)  # fmt: skip
SCHEDULED = Path("/proc/thread-self/schedstat")  # nanoseconds on a core, and waiting for one


class Noted(NamedTuple):
    """A step whose moments are known, and not yet the seconds between them."""

    marks: list[tuple[str, Moment]]  # what began when; the last is the step's end
    exchanges: list[Exchange]
    waited: float  # seconds without a core


class Timed:
    """The last of the timed steps, and sums over all of them."""

    def __init__(self) -> None:
        self.steps: deque[list[float]] = deque(maxlen=KEPT)  # seconds of each phase
        # Sums over a step's exchanges, as of `Exchange`: calls, bytes, busy_bytes, seconds from
        # `busy` to `end`, and how many exchanges there were.
        self.wire: deque[list[float]] = deque(maxlen=KEPT)
        self.total = self.weight = 0.0  # seconds, and how many steps took them
        self.waited = 0.0  # seconds without a core

    def add(self, step: list[float], wire: list[float], waited: float) -> None:
        self.steps.append(step)
        self.wire.append(wire)
        self.total += sum(step)
        self.waited += waited
        self.weight += 1

    def thin(self, share: float, kept_share: float, lot: random.Random) -> None:
        """Only a share of the steps is timed from now on: in sums, those so far count as so many.
        Of these themselves as many are kept, by lot, as make a median, and do not outnumber those
        to come for long."""
        kept = [lot.random() < kept_share for _ in self.steps]
        self.steps = deque(compress(self.steps, kept), KEPT)
        self.wire = deque(compress(self.wire, kept), KEPT)
        self.total, self.weight = share * self.total, share * self.weight
        self.waited *= share


class Anatomy(Callback):
    """Times the phases of each training step.

    Args:
        warmup: how many steps at the start are left out.
        every_seconds: in which about one step is timed, as timing adds about 0.1 ms to it; longer
            steps are all timed. 0: all are, for measurements.
        batches: how many to end training after. trainer.max_steps counts the optimizers' steps,
            of which a batch may have several or, with accumulated gradients, none.

    Attributes:
        found: "anatomy" in summary.json, of the steps that were timed; None until training ends.
    """

    def __init__(
        self, warmup: int = 10, every_seconds: float = 0.1, batches: int | None = None
    ) -> None:
        self.warmup, self.every_seconds, self.batches = warmup, every_seconds, batches
        self._timing = False  # whether this step is timed
        self._schedule: FileIO | None = None  # SCHEDULED of the thread that trains, meanwhile
        self.found: dict[str, Any] | None = None

    def setup(self, trainer: pl.Trainer, pl_module: pl.LightningModule, stage: str) -> None:
        # After the other callbacks, so that their work at a batch's end is the rest of a step; only
        # those that keep checkpoints stay last, as Lightning has them.
        all_ = trainer.callbacks  # type: ignore[attr-defined]
        others = [callback for callback in all_ if callback is not self]
        last = [callback for callback in others if isinstance(callback, Checkpoint)]
        trainer.callbacks = [*(c for c in others if c not in last), self, *last]  # type: ignore[attr-defined]

    def on_train_start(self, trainer: pl.Trainer, pl_module: pl.LightningModule) -> None:
        self.found = None
        self._device = trainer.strategy.root_device
        self._take_exchanges = getattr(trainer.strategy, "take_exchanges", list)
        cores = sorted(os.sched_getaffinity(0))[: usable_cores()]
        ranks = gather_objects(trainer.strategy, (socket.gethostname(), cores))
        self._hosts = [host for host, _ in ranks]
        self._crowd = crowded(ranks) if self._device.type == "cpu" else ""
        self._marks: list[tuple[str, Moment]] = []  # of this step: what began when
        self._drawn = 1.0  # the share of steps that are timed
        self._timing, self._ahead = True, 1  # the next one that is timed is so many batches ahead
        self._call(HOOKS, True)
        self._lot = random.Random(0)  # the same on all ranks, which so time the same steps
        with contextlib.suppress(OSError):  # the kernel does not count
            self._schedule = SCHEDULED.open("rb", buffering=0)
        self._began = 0.0  # what `waited` was when this step began
        self._unread: deque[Noted] = deque()
        self._timed = Timed()
        self._batches = self._noted = 0  # all batches, and those that were timed
        self._count = self._logged = 0  # of the timed: those read, and those logged
        self._asked = self._kept_up = 0  # how often a GPU was asked, and how often it had caught up
        self._near: Moment | None = None  # when it came to the last part of backward
        self._told: set[int] = set()  # ranks that were said to be slow
        self._listen(trainer, pl_module)

    def _listen(self, trainer: pl.Trainer, pl_module: pl.LightningModule) -> None:
        """Until training ends, also note what no hook of Lightning's tells: steps of optimizers,
        batches and their fetches, and how far a GPU has come."""
        self._after_optimizer = "rest" if pl_module.automatic_optimization else "forward"
        self._optimizers = [o for o in trainer.optimizers if isinstance(o, Optimizer)]
        # Between a batch's end and the next fetch, loggers write and checkpoints are saved.
        loop = trainer.fit_loop.epoch_loop
        for name in ("_on_before_fetch", "advance"):
            loop.__dict__.pop(name, None)  # of a training that ended in an error
        self._before_fetch, self._train_batch = loop._on_before_fetch, loop.advance
        loop._on_before_fetch = self._on_fetch  # type: ignore[method-assign]
        loop.advance = self._on_batch  # type: ignore[method-assign]
        self._hooks: list[RemovableHandle] = []
        trained = [p for p in pl_module.parameters() if p.requires_grad]
        if self._device.type == "cuda" and len(trained) > 1:
            # Backward comes to the first ones last; this is a few before, to give the GPU time.
            near = trained[max(len(trained) // 10, min(4, len(trained) - 1))]
            self._hooks.append(near.register_post_accumulate_grad_hook(self._note_near))
            self._hooks.append(trained[0].register_post_accumulate_grad_hook(self._ask))

    # ---------------------------------------------------------------- noting moments

    def _begin(self, phase: str) -> None:
        if self._timing:
            self._marks.append((phase, moment(self._device)))

    def _note_near(self, _: Tensor) -> None:
        if self._timing and self._noted >= self.warmup:
            self._near = moment(self._device)

    def _ask(self, _: Tensor) -> None:
        """All of backward is queued: has the GPU come to its last part?"""
        if isinstance(self._near, torch.cuda.Event):
            self._asked += 1
            self._kept_up += self._near.query()
            self._near = None

    def _begin_anew(self) -> None:
        """Start the next step here: what came since the last one, as an evaluation, is in none."""
        self._marks = []
        self._began = waited(self._schedule)
        self._begin("rest")

    def _on_fetch(self) -> None:
        # A training_step that takes dataloader_iter fetches within its forward.
        if self._marks and self._marks[-1][0] == "rest":
            self._begin("data")
        self._before_fetch()

    def _on_batch(self, data_fetcher: Any) -> None:
        if self._timing:
            self._time_batch(data_fetcher)
            return
        self._ahead -= 1
        if self._ahead == 1:
            self._call(HOOKS[-1:], True)
        self._train_batch(data_fetcher)

    def _time_batch(self, data_fetcher: Any) -> None:
        self._ahead = 1  # drawn here for all up to the next, so that those have nothing to do
        while self._lot.random() >= self._drawn:
            self._ahead += 1
        after = self._after_optimizer
        hooks = [o.register_step_post_hook(lambda *_: self._begin(after)) for o in self._optimizers]
        try:
            self._train_batch(data_fetcher)
        finally:
            for hook in hooks:
                hook.remove()

    def _call(self, hooks: Sequence[str], called: bool) -> None:
        """Lightning passes over a hook that is None, where to call one that does nothing takes
        longer than to note a moment."""
        for hook in hooks:
            if called:
                self.__dict__.pop(hook, None)  # the method again
            else:
                self.__dict__[hook] = None

    def on_train_epoch_start(self, trainer: pl.Trainer, pl_module: pl.LightningModule) -> None:
        self._begin_anew()

    def on_validation_end(self, trainer: pl.Trainer, pl_module: pl.LightningModule) -> None:
        self._begin_anew()

    def on_train_batch_start(self, *_: Any) -> None:
        self._begin("forward")

    def on_before_backward(self, *_: Any) -> None:
        self._begin("backward")

    def on_after_backward(self, trainer: pl.Trainer, pl_module: pl.LightningModule) -> None:
        # A training_step that calls backward itself may go on after it.
        self._begin("rest" if pl_module.automatic_optimization else "forward")

    def on_before_optimizer_step(self, *_: Any) -> None:
        self._begin("optimizer")

    def on_train_batch_end(self, trainer: pl.Trainer, *_: Any) -> None:
        self._batches += 1
        if self._batches == self.batches:
            trainer.should_stop = True  # on all ranks: they count alike
        if self._timing:
            self._note_step()
        if self._timing and self._noted % WINDOW == 0:
            self._log(trainer, trainer.fit_loop.epoch_loop._batches_that_stepped)
            if self._timed.steps:
                self._look_at_all(trainer)
        self._timing = self._ahead <= 1
        # Behind a step that is not timed, and before one that is not, there is nothing to note.
        self._call(HOOKS if self.batches is None else HOOKS[:-1], self._timing)
        before_fetch = self._on_fetch if self._timing else self._before_fetch
        trainer.fit_loop._data_fetcher._start_profiler = before_fetch  # type: ignore[union-attr]
        if self._timing:
            self._take_exchanges()  # of steps that were not timed
            self._begin_anew()

    def _note_step(self) -> None:
        self._begin("rest")
        self._noted += 1
        waits = waited(self._schedule) - self._began
        self._unread.append(Noted(self._marks, self._take_exchanges(), waits))
        while len(self._unread) > (BEHIND if self._device.type == "cuda" else 0):
            self._read()

    def _read(self) -> None:
        """Turn the moments of the oldest unread step into seconds."""
        step = self._unread.popleft()
        self._count += 1
        if self._count <= self.warmup:
            return
        spent = dict.fromkeys(PHASES, 0.0)
        for (phase, begun), (_, ended) in pairwise(step.marks):
            spent[phase] += seconds(begun, ended)
        exposed = sum(seconds(exchange.backward, exchange.end) for exchange in step.exchanges)
        spent["backward"], spent["all_reduce"] = max(0.0, spent["backward"] - exposed), exposed
        figures = [
            (e.calls, e.bytes, e.busy_bytes, seconds(e.busy, e.end), 1) for e in step.exchanges
        ]
        wire = [sum(values) for values in zip(*figures)]
        self._timed.add(list(spent.values()), wire, step.waited)

    # ---------------------------------------------------------------- telling

    def on_train_epoch_end(self, trainer: pl.Trainer, pl_module: pl.LightningModule) -> None:
        # At the last step of the epoch, as Lightning logs the epoch's metrics.
        self._log(trainer, trainer.fit_loop.epoch_loop._batches_that_stepped - 1)

    def _log(self, trainer: pl.Trainer, step: int) -> None:
        """Log the mean phases of this rank since the last time, its waiting for slower ranks as
        all_reduce; only rank 0's loggers write."""
        count, self._logged = self._count - self._logged, self._count
        steps = list(self._timed.steps)[-count:] if count else []
        if not steps or not trainer.loggers:
            return
        means = 1e3 * torch.tensor(steps).mean(0)
        metrics = {f"time/{phase}_ms": float(mean) for phase, mean in zip(PHASES, means)}
        metrics["time/step_ms"] = float(means.sum())
        for logger in trainer.loggers:
            logger.log_metrics(metrics, step=step)

    def _gather(self, strategy: Strategy, last: int) -> Tensor:
        """Shape (ranks, steps, phases), in seconds: the last steps of all ranks."""
        mine = torch.tensor(list(self._timed.steps)[-last:], device=self._device)
        return strategy.all_gather(mine).reshape(-1, *mine.shape).cpu()

    def _look_at_all(self, trainer: pl.Trainer) -> None:
        steps = self._gather(trainer.strategy, WINDOW)
        mean = float(steps.sum(2).mean())
        if self._drawn == 1 and mean < self.every_seconds:
            self._drawn = mean / self.every_seconds
            self._timed.thin(self._drawn, max(self._drawn, KEPT_SHARE), self._lot)
        slow = straggler(steps)
        if slow and slow["rank"] not in self._told:
            self._told.add(slow["rank"])
            if trainer.is_global_zero:
                print(f"slow    {named(slow, self._hosts)}", flush=True)

    def on_train_end(self, trainer: pl.Trainer, pl_module: pl.LightningModule) -> None:
        self._timing = False
        for hook in self._hooks:
            hook.remove()
        if self._schedule:
            self._schedule.close()
            self._schedule = None
        loop = trainer.fit_loop.epoch_loop
        del loop._on_before_fetch, loop.advance  # ours; the class has Lightning's
        while self._unread:
            self._read()
        if self._timed.steps:
            self.found = self._results(trainer)

    def _results(self, trainer: pl.Trainer) -> dict[str, Any]:
        """What `found` holds."""
        steps, timed = self._gather(trainer.strategy, KEPT), self._timed
        totals = 1e3 * steps.sum(2).mean(0)
        p10, median, p90 = (round(float(totals.quantile(q)), 4) for q in (0.1, 0.5, 0.9))
        mean = 1e3 * timed.total / timed.weight
        counts = torch.tensor([self._kept_up, self._asked], device=self._device)
        kept_up, asked = trainer.strategy.reduce(counts, reduce_op="sum").tolist()
        keeps_up = kept_up / asked if asked else None
        # A GPU goes on while its program waits for a core.
        share_waited = timed.waited / timed.total if self._device.type == "cpu" else 0.0
        mine = torch.tensor(share_waited, device=self._device)
        waits = trainer.strategy.all_gather(mine).reshape(-1).tolist()
        found = {
            "steps": self._count - self.warmup,
            "step_ms": {"median": median, "mean": round(mean, 4), "p10": p10, "p90": p90},
            "phases_ms": {k: round(1e3 * float(x.median()), 4) for k, x in phases(steps).items()},
            "shares": {phase: round(value, 4) for phase, value in shares(steps).items()},
            "ranks": [
                {"rank": rank, "host": self._hosts[rank]}
                | {k: round(1e3 * float(x), 4) for k, x in zip(PHASES, rows.median(0).values)}
                | {"waits_for_core": round(wait, 4)}
                for rank, (rows, wait) in enumerate(zip(steps, waits))
            ],
            "straggler": straggler(steps),
            "gpu_keeps_up": keeps_up and round(keeps_up, 4),
            "crowded": self._crowd or None,
            "wire": self._on_the_wire(trainer.strategy),
        }
        hidden = len(steps) > 1 and not hasattr(trainer.strategy, "take_exchanges")
        told = verdict(found, str(trainer.precision), hidden, late_phase(steps))
        return {**found, "verdict": told}

    def _on_the_wire(self, strategy: Strategy) -> dict[str, Any] | None:
        """The median of steps that send something; None without an all-reduce that can be seen.

        The bandwidth is that of a step's end, after the last moment at which nothing was on the
        wire, as backward may leave pauses before; on a GPU that moment is unknown, and pauses
        count. It is that of the rank with the highest, which waits least for others. "exchanges" is
        of all steps: several if a batch has several backwards, 0 if most steps send nothing.
        """
        sent = [step for step in self._timed.wire if step]
        if not sent or not hasattr(strategy, "sent_bytes"):
            return None
        columns = torch.tensor(sent, dtype=torch.float64)
        _, _, busy_bytes, busy_seconds, _ = columns.unbind(1)
        rate = (busy_bytes / busy_seconds).median()
        rate = strategy.sent_bytes(float(strategy.reduce(rate, reduce_op="max")))
        calls, size, _, busy, _ = columns.median(0).values.tolist()
        exchanges = median_low(step[-1] if step else 0 for step in self._timed.wire)
        operations = strategy.operations  # type: ignore[attr-defined]
        benchmarked = measured(self._hosts, operations, size / calls)
        compressible = strategy.compression == "none" and strategy.op != "adasum"  # type: ignore[attr-defined]
        # Over Gloo only what leaves a host is cut to 16 bits: strategies/reductions.py.
        leaves_host = operations != "Gloo" or len(set(self._hosts)) > 1
        return {
            "exchanges": exchanges, "calls": calls, "payload_bytes": size,
            "bytes": strategy.sent_bytes(size), "busy_ms": round(1e3 * busy, 4),
            "bus_bandwidth_mb_s": round(rate / 1e6, 3), "allreduce_mb_s": benchmarked,
            "pauses_count": strategy.root_device.type == "cuda",
            "compressible": compressible, "compression_helps": compressible and leaves_host,
        }  # fmt: skip


def waited(schedule: FileIO | None) -> float:
    """Seconds that a thread was ready to run and had no core; 0 if the kernel does not count.

    `schedule` is its open SCHEDULED: to open it anew takes far longer than to read it.
    Source: proc(5), and Documentation/scheduler/sched-stats.rst of Linux.
    """
    return 1e-9 * int(os.pread(schedule.fileno(), 64, 0).split()[1]) if schedule else 0.0

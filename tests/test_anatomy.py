"""The anatomy of a step finds what was planted: a slow rank or loader, a thin link, or nothing.

No test asserts how long something took, only which part of a step took most of it.
"""

from __future__ import annotations

import contextlib
import csv
import json
import os
import random
import socket
import subprocess
import sys
import time
from collections import deque
from collections.abc import Callable
from importlib.metadata import version
from pathlib import Path
from types import SimpleNamespace
from typing import Any

import pytest
import torch
from pytorch_lightning import Trainer
from pytorch_lightning.callbacks import Callback
from pytorch_lightning.loggers import CSVLogger
from pytorch_lightning.strategies import Strategy
from torch import Tensor, nn
from torch.utils.data import DataLoader, Dataset

from cluster import testbed
from runs import anatomy, bottleneck
from runs.anatomy import Anatomy, Timed
from runs.bottleneck import PHASES, phases, shares, straggler, verdict
from runs.curves import Curves
from strategies import HorovodStrategy, clock
from strategies.buckets import Exchange, GradientBuckets
from strategies.collectives import wait_until
from strategies.reductions import add
from tests.conftest import HOROVODRUN, ROOT, run
from tests.matrix.trainings import CLASSES, FEATURES, RANK, Net, loader, samples, trainer

# ------------------------------------------------------------------------------ planted figures


def steps(*ranks: dict[str, float], count: int = 50) -> Tensor:
    """The same step so many times, in which each rank spends the given seconds on each phase."""
    rows = [[spent.get(phase, 0.0) for phase in PHASES] for spent in ranks]
    return torch.tensor(rows).unsqueeze(1).repeat(1, count, 1)


def test_who_waits_least_shows_what_the_network_takes() -> None:
    times = phases(steps({"forward": 3, "all_reduce": 1}, {"forward": 1, "all_reduce": 3}))
    assert {phase: float(x.median()) for phase, x in times.items()} == {
        "data": 0, "forward": 2, "backward": 0, "all_reduce": 1, "straggler": 1, "optimizer": 0,
        "rest": 0,
    }  # fmt: skip


def test_a_loader_that_is_slow_now_and_then_counts() -> None:
    """With 4 workers, three batches are there at once and the fourth is waited for."""
    measured = steps({"forward": 1}, count=40)
    measured[:, ::4, PHASES.index("data")] = 4
    assert shares(measured)["data"] == 0.5
    assert float(phases(measured)["data"].median()) == 0


def test_a_straggler_is_persistent() -> None:
    ranks = [{"forward": 1, "all_reduce": 2}] * 3 + [{"forward": 1, "backward": 1}]
    assert straggler(steps(*ranks)) == {"rank": 3, "times": 2.0, "phase": "backward"}
    unlike = steps({"data": 2}, {"data": 2}, {"data": 3}, {"data": 5})  # of the others the median
    assert straggler(unlike) == {"rank": 3, "times": 2.5, "phase": "data"}
    each_in_turn = steps(*[{"forward": 1.0}] * 4)
    for rank in range(4):
        each_in_turn[rank, rank::4] *= 2
    assert straggler(each_in_turn) is None
    often = steps({"forward": 1}, {"forward": 1})
    often[1, :37] *= 2  # of 50
    assert straggler(often) is None
    often[1, 37] *= 2
    assert straggler(often) == {"rank": 1, "times": 2.0, "phase": "forward"}
    waits_too = steps({"forward": 1, "all_reduce": 1}, {"forward": 2, "all_reduce": 4})
    assert straggler(waits_too) == {"rank": 1, "times": 2.0, "phase": "forward"}
    assert straggler(steps({"forward": 1}, {"forward": 1.1})) is None
    assert straggler(steps({"forward": 1})) is None


def test_what_makes_now_one_now_another_rank_late_is_named() -> None:
    """A loader that stalls on each of 8 ranks in its turn costs little where it stalls."""
    stalls = steps(*[{"data": 0.5, "forward": 9}] * 8)
    for rank in range(8):
        stalls[rank, rank::8, 0] += 10
    assert bottleneck.late_phase(stalls) == "data"
    assert (
        bottleneck.late_phase(steps({"forward": 9, "all_reduce": 9}, {"forward": 10})) == "forward"
    )


SLOW = {"rank": 1, "times": 2.0, "phase": "forward"}


def said(
    slow: dict[str, Any] | None = None, wire: dict[str, Any] | None = None,
    precision: str = "32-true", crowd: str | None = None, keeps_up: float | None = None,
    waits: float = 0.0, hidden: bool = False, late: str = "", **seconds: float,
) -> str:  # fmt: skip
    spent = dict.fromkeys([*PHASES, "straggler"], 0.0) | seconds
    found = {
        "shares": {phase: time / sum(spent.values()) for phase, time in spent.items()},
        "ranks": [{"host": "a", "waits_for_core": 0.0}, {"host": "b", "waits_for_core": waits}],
        "step_ms": {"mean": 10.0}, "straggler": slow, "crowded": crowd, "gpu_keeps_up": keeps_up,
        "wire": wire,
    }  # fmt: skip
    return verdict(found, precision, hidden, late)


def test_the_verdict_names_what_takes_most_of_what_takes_too_much() -> None:
    assert said(forward=6, backward=3, data=1).startswith("compute: forward and backward are 90%")
    assert said(forward=6, data=2, all_reduce=1.9).startswith("data: 20% of the step")
    assert said(forward=6, straggler=2, slow=SLOW).startswith("straggler: rank 1 on b works")
    for phase in ("data", "optimizer", "rest"):  # of 2 ranks, one of which takes 8 more in it
        seconds = {phase: 4.1, "straggler": 4.0, "forward": 2}
        assert said(slow={**SLOW, "phase": phase}, **seconds).startswith("straggler: rank 1 on b")
    of_data = {**SLOW, "phase": "data"}
    assert said(slow=of_data, data=8, straggler=2).startswith("data: 80%")
    assert said(slow=of_data, data=1.7, straggler=1.4, forward=6.9).startswith("data: 17%")
    uneven = said(forward=6, straggler=2, late="forward")
    assert uneven.startswith("uneven: ranks wait 25%") and "mostly in its forward: look" in uneven
    assert "mostly in its data: try more data.num_workers" in said(straggler=1, late="data")
    assert said(forward=6, backward=3, data=1, hidden=True).startswith("compute or network: ")
    assert said(forward=6, optimizer=4).startswith("optimizer: 40%")
    assert said(forward=6, rest=4).startswith("overhead: 40% of the step of 10.0 ms")
    assert "lower precision" in said(forward=1)
    assert "lower precision" not in said(forward=1, precision="bf16-mixed")
    wire: dict[str, Any] = {"payload_bytes": 8e6, "compression_helps": True, "pauses_count": False}
    wire |= {"bus_bandwidth_mb_s": 93.0, "allreduce_mb_s": 100.0}
    network = said(forward=39, all_reduce=61, wire=wire)
    words = "network: 61% of the step is all-reduce that backward does not hide, at 93 MB/s, 93% of"
    assert network.startswith(words)
    assert "compression=bf16" in network
    for other in ({"payload_bytes": 1e5}, {"compression_helps": False}):
        assert "compression" not in said(forward=1, all_reduce=1, wire=wire | other)
    few = said(forward=1, all_reduce=1, wire=wire | {"payload_bytes": 1e5})
    assert "at 93 MB/s: try" in few  # which no benchmark of large ones is like
    slow = said(forward=1, all_reduce=1, wire=wire | {"bus_bandwidth_mb_s": 0.02})
    assert " at 20 kB/s" in slow
    pauses = said(forward=1, all_reduce=1, wire=wire | {"pauses_count": True})
    assert " at 93 MB/s or more, 93% of what" in pauses


def test_of_many_ranks_a_slow_one_is_a_small_part_of_the_mean() -> None:
    """3 ranks, of which the others wait for one twice what it adds to the mean of its phase."""
    spent = {"data": 0.32, "straggler": 0.2, "forward": 0.48}
    measured: dict[str, Any] = {
        "shares": dict.fromkeys([*PHASES, "straggler"], 0.0) | spent,
        "ranks": [{"waits_for_core": 0.0}] * 3, "straggler": {**SLOW, "phase": "data"},
    }  # fmt: skip
    assert bottleneck._costliest(measured) == ("data", 0.32)


def test_a_gpu_that_waits_for_the_program_is_none_that_computes() -> None:
    assert said(keeps_up=0.97, forward=1).startswith("launches: in 97% of the steps the GPU waits")
    assert said(keeps_up=0.5, forward=1).startswith("compute: ")
    # What else takes too much is named: whoever waits for that keeps up, too.
    for phase, begin in {"data": "data: ", "rest": "overhead: ", "all_reduce": "network: "}.items():
        assert said(keeps_up=1, forward=1, **{phase: 1.0}).startswith(begin)


def test_ranks_that_share_cores_are_named() -> None:
    one_each = [("a", [0]), ("a", [1]), ("b", [0, 1]), ("b", [0, 1])]
    assert bottleneck.crowded(one_each) == ""
    crowd = bottleneck.crowded([*one_each, ("b", [0, 1]), ("a", [0])])
    assert crowd == "3 ranks share the 2 cores of a"
    for spent in ({"forward": 9}, {"all_reduce": 9}, {"straggler": 9}, {"rest": 9}):
        text = said(crowd=crowd, **spent)
        assert text.startswith("cores: 3 ranks share the 2 cores of a, and wait")
    assert said(crowd=crowd, data=9).startswith("data: ")
    assert said(crowd=crowd, optimizer=9).startswith("optimizer: ")
    assert said(crowd=crowd, straggler=9, slow=SLOW).startswith("straggler: rank 1")


def test_a_rank_that_waits_for_a_core_is_named(monkeypatch: pytest.MonkeyPatch) -> None:
    """Though it looks like a straggler, or like something to compute."""
    words = "cores: rank 1 on b waits 50% of its time for a core, which other"
    assert said(waits=0.5, forward=1).startswith(words)
    assert said(waits=0.5, forward=6, straggler=4, slow=SLOW).startswith(words)
    assert said(waits=0.5, forward=4, all_reduce=6).startswith("network: 60%")
    assert said(waits=0.14, forward=1).startswith("compute: ")
    assert said(waits=0.5, forward=1).endswith("try fewer ranks (NP=, -np, -H)")
    for threads, advice in ((2, "run top there, or try OMP_NUM_THREADS=1"), (1, "run top there")):
        monkeypatch.setattr(torch, "get_num_threads", lambda threads=threads: threads)
        assert bottleneck.contended(["a"], [0.5]).endswith(advice)


def test_the_all_reduce_benchmark_of_the_same_ranks_is_found(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(bottleneck, "ROOT", tmp_path)
    assert bottleneck.measured(["a", "b"], "Gloo", 1e6) is None
    folder = tmp_path / "benchmarks" / "results"
    folder.mkdir(parents=True)
    sizes = [{"bytes": size, "bus_mb_s": size / 1e4} for size in (2**12, 2**20, 2**26)]
    benchmark = {
        "ranks": ["a", "b"], "operations": "Gloo", "date": "2026-11-22", "sizes": sizes,
        "cpu": bottleneck.processor(), "versions": {"horovod": version("horovod")},
    }  # fmt: skip
    (folder / "allreduce_b.json").write_text(json.dumps(benchmark))
    older = {**benchmark, "date": "2026-11-21", "sizes": [{"bytes": 2**20, "bus_mb_s": 1}]}
    (folder / "allreduce_a.json").write_text(json.dumps(older))
    (folder / "allreduce_c.json").write_text(json.dumps(older))
    (folder / "allreduce_d.json").write_text(json.dumps(benchmark)[:40])
    (folder / "allreduce_e.json").write_text("[]")
    (folder / "allreduce_g.json").write_text("{}")
    for name, other in (("f", {"cpu": "another"}), ("h", {"versions": {"horovod": "0.28.1"}})):
        another = {**benchmark, "date": "2026-11-23", "sizes": older["sizes"], **other}
        (folder / f"allreduce_{name}.json").write_text(json.dumps(another))
    assert bottleneck.measured(["a", "b"], "Gloo", 3e6) == 2**20 / 1e4
    assert bottleneck.measured(["a", "b"], "NCCL", 3e6) is None
    assert bottleneck.measured(["a", "a"], "Gloo", 3e6) is None


class Pauses(torch.autograd.Function):
    """Backward goes on when `until` says so."""

    @staticmethod
    def forward(ctx: Any, x: Tensor, until: Callable[[], Any]) -> Tensor:
        ctx.until = until
        return x.clone()

    @staticmethod
    def backward(ctx: Any, *gradients: Tensor) -> Any:
        ctx.until()
        return gradients[0], None


@pytest.mark.parametrize("rests", [True, False])
def test_pauses_of_backward_are_none_of_the_wire(
    monkeypatch: pytest.MonkeyPatch, rests: bool
) -> None:
    """Of two buckets the second comes when the first is done, or while it is on its way."""
    first, second = nn.Linear(4, 4, bias=False), nn.Linear(64, 4, bias=False)
    model = nn.ModuleList([second, first])
    buckets = GradientBuckets(model, HorovodStrategy().world, add, 1e-5, before=1, after=1)

    def until() -> None:
        if rests:
            wait_until(buckets._on_the_wire[0].rests)
        else:
            monkeypatch.setattr(buckets._on_the_wire[0], "rests", lambda: False)

    loss = first(Pauses.apply(second(torch.ones(1, 64)), until)).sum()
    buckets.prepare()
    buckets.start()
    loss.backward()
    assert buckets.finish()()
    (exchange,) = buckets.exchanges
    sizes = [bucket.buffer.nbytes for bucket in buckets.buckets]
    assert exchange.calls == len(sizes) == 2 and exchange.bytes == sum(sizes)
    assert exchange.busy_bytes == (sizes[1] if rests else sum(sizes))


class Event:
    """Stands for torch's, which needs a GPU: each is a millisecond after the one before."""

    made = 0

    def __init__(self, enable_timing: bool) -> None:
        assert enable_timing
        self.passed = False

    def record(self, stream: str | None = None) -> None:
        assert stream in (None, "stream of cuda:0")
        Event.made += 1
        self.time = Event.made

    def synchronize(self) -> None:
        self.passed = True

    def elapsed_time(self, other: Event) -> float:
        assert other.passed, "asked before the GPU was there"
        return float(other.time - self.time)


def test_on_a_gpu_moments_are_events_in_its_stream(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(torch.cuda, "Event", Event)
    monkeypatch.setattr(torch.cuda, "current_stream", lambda device: f"stream of {device}")
    first, _, third = (clock.moment(torch.device("cuda", 0)) for _ in range(3))
    assert clock.seconds(first, third) == 0.002
    now = clock.moment(torch.device("cpu"))
    assert clock.seconds(now, clock.moment(torch.device("cpu"))) >= 0


@pytest.mark.parametrize("passed", [False, True])
def test_a_gpu_is_asked_whether_it_keeps_up(passed: bool, monkeypatch: pytest.MonkeyPatch) -> None:
    """When all of backward is queued, for the moment of a parameter a little before."""
    asked_when: list[int] = []

    class Near(Event):
        def query(self) -> bool:
            asked_when.append(self.time)
            return passed

    monkeypatch.setattr(torch.cuda, "Event", Near)
    monkeypatch.setattr(torch.cuda, "current_stream", lambda device: f"stream of {device}")
    monkeypatch.setattr(anatomy, "gather_objects", lambda *_: [("host", [0])] * 2)
    device = torch.device("cuda", 0)
    loop = type("Loop", (), {"_on_before_fetch": None, "advance": None})()
    run: Any = SimpleNamespace(
        strategy=SimpleNamespace(root_device=device), optimizers=[],
        fit_loop=SimpleNamespace(epoch_loop=loop),
    )  # fmt: skip
    timed, model = Anatomy(warmup=1), Net()
    timed.on_train_start(run, model)
    assert timed._crowd == ""  # a core that two share does not limit GPUs
    for _ in range(3):
        Event.made = 0
        timed._begin("backward")
        model(torch.ones(1, 12)).sum().backward()
        timed._noted += 1  # the first step warms up
    assert asked_when == [2, 2] and (timed._asked, timed._kept_up) == (2, 2 * passed)


# ------------------------------------------------------------------------------ planted faults


class Sleeps(Net):
    """Each rank's forward takes so many milliseconds, without a core."""

    def __init__(self, *milliseconds: float) -> None:
        super().__init__()
        self.milliseconds = milliseconds[RANK]

    def training_step(self, batch: list[Tensor], batch_idx: int) -> Tensor:
        time.sleep(self.milliseconds / 1e3)
        return super().training_step(batch, batch_idx)


class Twice(Net):
    """Two backwards and two optimizers a batch, as a GAN has."""

    def __init__(self) -> None:
        super().__init__()
        self.automatic_optimization = False

    def training_step(self, batch: list[Tensor], batch_idx: int) -> Tensor:
        for optimizer in self.optimizers():
            optimizer.zero_grad()
            self.manual_backward(super().training_step(batch, batch_idx))
            optimizer.step()
        return torch.zeros(())

    def configure_optimizers(self) -> list[torch.optim.Optimizer]:
        return [torch.optim.SGD(self.parameters(), 0.01) for _ in range(2)]


class Slow(Dataset):
    def __len__(self) -> int:
        return 80

    def __getitem__(self, index: int) -> tuple[Tensor, Tensor]:
        time.sleep(0.02)
        return samples()[index]


class Late(Callback):
    """Validation, checkpoints and the like take time that is no step's."""

    def on_train_epoch_end(self, *_: Any) -> None:
        time.sleep(0.5)


def test_a_backward_of_the_sanity_check_is_in_no_step() -> None:
    timed = Anatomy()
    timed.on_before_backward(None, Net(), torch.zeros(()))  # nothing of it has begun
    timed.on_after_backward(None, Net())  # type: ignore[arg-type]
    assert "_marks" not in vars(timed)


def found(model: Net, data: DataLoader | None = None, **arguments: Any) -> dict[str, Any]:
    timed = Anatomy(warmup=2)
    run = trainer("horovod", callbacks=[timed, Late(), Curves()], max_epochs=2, **arguments)
    run.fit(model, data or loader())
    assert timed.found is not None
    return timed.found


class Ticks(Net):
    """Each part of a step takes seconds that are its own, by a clock that only this moves."""

    now = 0.0

    def __init__(self, automatic: bool) -> None:
        super().__init__()
        self.automatic_optimization = automatic

    def tick(self, seconds: float) -> None:
        Ticks.now += seconds

    def training_step(self, batch: list[Tensor], batch_idx: int) -> Any:
        self.tick(1 + self.current_epoch)
        loss = super().training_step(batch, batch_idx)
        if self.automatic_optimization:
            return loss
        self.manual_backward(loss)
        self.tick(16)
        self.optimizers().step()
        self.tick(32)
        return None

    def backward(self, loss: Tensor) -> None:
        loss.backward()
        self.tick(2)

    def on_before_optimizer_step(self, optimizer: torch.optim.Optimizer) -> None:
        self.tick(4)

    def optimizer_step(self, *arguments: Any) -> None:
        super().optimizer_step(*arguments)
        self.tick(8)

    def validation_step(self, batch: list[Tensor], batch_idx: int) -> None:
        self.tick(1000)

    def on_train_epoch_end(self) -> None:
        self.tick(10_000)


class Works(Callback):
    """Of one's own, that comes behind in the configuration."""

    def on_train_batch_end(self, trainer: Any, pl_module: Any, *_: Any) -> None:
        pl_module.tick(64)


@pytest.mark.parametrize(
    ("automatic", "forward", "rest"), [(True, [1, 2], 8 + 64), (False, [113, 114], 0)]
)
def test_each_second_is_in_its_phase(
    automatic: bool, forward: list[int], rest: int, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """Validations and ends of epochs are in none; half a second of backward waits for gradients."""
    monkeypatch.setattr(anatomy, "moment", lambda device: Ticks.now)
    monkeypatch.setattr(anatomy, "waited", lambda schedule: Ticks.now / 4)
    monkeypatch.setattr(anatomy, "usable_cores", lambda: 1)
    shared: list[Any] = []
    monkeypatch.setattr(anatomy, "crowded", lambda ranks: shared.extend(ranks) or "9 ranks share")
    timed, model = Anatomy(warmup=1), Ticks(automatic)
    run = trainer(
        "single", callbacks=[timed, Works()], logger=CSVLogger(tmp_path, "", ""),
        limit_train_batches=4,
        val_check_interval=2,
    )  # fmt: skip
    exchange = Exchange(1, 8, backward=0.25, end=0.75, busy=0.5, busy_bytes=8)
    run.strategy.take_exchanges = lambda: [exchange]
    run.fit(model, loader(), loader())

    result = timed.found
    assert result is not None and result["steps"] == 7
    expected = {"data": 0, "forward": 1e3 * forward[1], "backward": 1500, "all_reduce": 500}
    expected |= {"optimizer": 4000, "rest": 1e3 * rest}
    assert result["phases_ms"] == {**expected, "straggler": 0}
    (rank,) = result["ranks"]
    assert rank == {"rank": 0, "host": socket.gethostname(), **expected, "waits_for_core": 0.25}
    others = 6 + rest
    first, second = 1e3 * (forward[0] + others), 1e3 * (forward[1] + others)
    step = {"median": second, "mean": (3 * first + 4 * second) / 7, "p10": first, "p90": second}
    assert result["step_ms"] == pytest.approx(step)
    assert result["verdict"].startswith("cores: 9 ranks share, and wait")
    assert result["crowded"] == "9 ranks share"
    ((host, cores),) = shared
    assert host == socket.gethostname() and len(cores) == 1
    rows = list(csv.DictReader((tmp_path / "metrics.csv").open()))
    for name, of_epochs in (("step", [first, second]), ("forward", [1e3 * s for s in forward])):
        logged = [float(row[f"time/{name}_ms"]) for row in rows if row[f"time/{name}_ms"]]
        assert logged == pytest.approx(of_epochs)
    assert [row["step"] for row in rows if row["time/step_ms"]] == ["3", "7"]  # as metrics have
    for optimizer in run.optimizers:
        assert not optimizer._optimizer_step_post_hooks


class Averages(Ticks):
    """The module's own hook comes after those of callbacks; then loggers and checkpoints write."""

    def on_train_batch_end(self, *_: Any) -> None:
        self.tick(128)


def test_what_comes_after_a_batch_is_no_loading(monkeypatch: pytest.MonkeyPatch) -> None:
    """Also in a second training, after one that failed."""
    monkeypatch.setattr(anatomy, "moment", lambda device: Ticks.now)
    timed, model = Anatomy(warmup=1), Averages(automatic=True)
    run = trainer("single", callbacks=[timed], max_epochs=1, limit_train_batches=4)
    with monkeypatch.context() as failing, pytest.raises(ZeroDivisionError):
        failing.setattr(model, "training_step", lambda *_: 1 // 0)
        run.fit(model, loader())
    run.fit(model, loader())
    assert timed.found is not None
    assert timed.found["phases_ms"]["data"] == 0 and timed.found["phases_ms"]["rest"] == 136e3
    run.validate(model, loader(), verbose=False)  # of which nothing is timed
    assert timed.found["steps"] == 3


class Fetches(Ticks):
    def training_step(self, dataloader_iter: Any) -> Tensor:
        (inputs, _), _, _ = next(dataloader_iter)
        self.tick(1)
        loss: Tensor = self.net(inputs).sum()
        return loss


def test_a_forward_that_fetches_its_batch_is_no_loading(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(anatomy, "moment", lambda device: Ticks.now)
    timed = Anatomy(warmup=1)
    run = trainer("single", callbacks=[timed], max_epochs=1, limit_train_batches=4)
    run.fit(Fetches(automatic=True), loader())
    assert timed.found is not None
    assert timed.found["phases_ms"]["data"] == 0 and timed.found["phases_ms"]["forward"] == 1e3


def test_one_process_has_no_all_reduce_within_its_backward(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    """As DDP has it, whose verdict says so."""
    monkeypatch.setattr(anatomy, "waited", lambda schedule: 0.0)
    timed = Anatomy(warmup=0)
    trainer("single", callbacks=[timed], max_epochs=1).fit(Sleeps(10), loader())
    assert timed.found is not None and timed.found["verdict"].startswith("compute: ")


def test_a_slow_rank_is_told_once_by_rank_0(
    monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    monkeypatch.setattr(anatomy, "WINDOW", 4)
    monkeypatch.setattr(anatomy, "gather_objects", lambda *_: [("a", [0]), ("b", [0])])
    times = steps({"forward": 1}, {"forward": 2})
    monkeypatch.setattr(Anatomy, "_gather", lambda *_: times)
    timed = Anatomy(warmup=0)
    trainer("single", callbacks=[timed]).fit(Net(), loader())
    line = "slow    rank 1 on b works 2.0 times as long as the others, "
    line += "most of the difference in forward"
    assert capsys.readouterr().out.splitlines() == [line]
    timed._told.clear()
    timed._look_at_all(SimpleNamespace(strategy=None, is_global_zero=False))
    assert not capsys.readouterr().out


@pytest.mark.parametrize(
    ("compression", "op", "hosts", "compressible", "helps"),
    [
        ("none", "average", "ab", True, True), ("bf16", "average", "ab", False, False),
        ("none", "adasum", "ab", False, False), ("none", "average", "aa", True, False),
    ],
)  # fmt: skip
def test_what_is_on_the_wire(
    compression: str, op: str, hosts: str, compressible: bool, helps: bool,
    monkeypatch: pytest.MonkeyPatch,
) -> None:  # fmt: skip
    """Of an all-reduce of 2 buckets and 4 MB; for the last of these, half a second passed."""
    strategy: Any = SimpleNamespace(
        sent_bytes=lambda size: 1.5 * size, operations="Gloo",
        reduce=lambda rate, reduce_op: {"max": rate}[reduce_op],
        compression=compression, op=op, root_device=torch.device("cuda"),
    )  # fmt: skip
    asked: list[Any] = []
    monkeypatch.setattr(anatomy, "measured", lambda *arguments: asked.append(arguments))
    timed = Anatomy()
    sent = [2, 4e6, 1e6, 0.5, 2]
    timed._hosts, timed._timed = [*hosts], Timed()
    timed._timed.wire = deque([[], sent, sent])
    assert timed._on_the_wire(strategy) == {
        "exchanges": 2, "calls": 2, "payload_bytes": 4e6, "bytes": 6e6, "busy_ms": 500,
        "bus_bandwidth_mb_s": 3, "allreduce_mb_s": None, "pauses_count": True,
        "compressible": compressible, "compression_helps": helps,
    }  # fmt: skip
    assert asked == [([*hosts], "Gloo", 2e6)]
    strategy.operations = "NCCL"  # which cuts what stays on a host, too
    wire = timed._on_the_wire(strategy)
    assert wire is not None and wire["compression_helps"] == compressible


def test_training_ends_after_as_many_batches_as_asked() -> None:
    """In the second epoch, whether a batch is two steps to the optimizer or half of one."""

    batches = len(loader()) + 3
    for model, windows in ((Twice(), 1), (Net(), 2)):
        timed = Anatomy(warmup=2, batches=batches)
        run = trainer(
            "horovod", callbacks=[timed], max_epochs=-1, max_steps=100 * batches,
            accumulate_grad_batches=windows,
        )  # fmt: skip
        run.fit(model, loader())
        assert timed.found is not None and timed.found["steps"] == batches - 2


def test_a_long_warmup_leaves_nothing_to_tell(
    monkeypatch: pytest.MonkeyPatch, capfd: pytest.CaptureFixture[str]
) -> None:
    monkeypatch.setattr(anatomy, "WINDOW", 4)
    for warmup, steps in ((30, None), (9, 1)):
        timed = Anatomy(warmup)
        trainer("horovod", callbacks=[timed], max_epochs=1).fit(Sleeps(0), loader())
        assert (timed.found and timed.found["steps"]) == steps
        assert len(timed._timed.steps) == (steps or 0)
    assert "slow " not in capfd.readouterr().out


class CountsLooks(Anatomy):
    looks = begun = ended = in_vain = 0

    def _begin(self, phase: str) -> None:
        self.in_vain += not self._timing
        super()._begin(phase)

    def on_train_batch_start(self, *arguments: Any) -> None:
        self.begun += 1
        super().on_train_batch_start(*arguments)

    def on_train_batch_end(self, *arguments: Any) -> None:
        self.ended += 1
        super().on_train_batch_end(*arguments)

    def _look_at_all(self, trainer: Trainer) -> None:
        self.looks += 1
        super()._look_at_all(trainer)

    def _gather(self, strategy: Strategy, last: int) -> Tensor:
        steps = super()._gather(strategy, last)
        return steps * 1e-3 / steps.sum(2).mean()  # 1 ms each in the mean, on any machine


def short_steps() -> list[dict[str, Any]]:
    """All steps timed, and some of short ones; the window is longer than an epoch."""
    usual, anatomy.WINDOW = anatomy.WINDOW, len(loader()) + 5
    names = ("looks", "begun", "ended", "in_vain", "_drawn")
    results: list[dict[str, Any]] = []
    for every_seconds in (0, 20e-3):
        timed = CountsLooks(warmup=0, every_seconds=every_seconds)
        trainer("horovod", callbacks=[timed], max_epochs=20).fit(Net(), loader())
        assert timed.found is not None
        counts = {name: getattr(timed, name) for name in names}
        results.append({**timed.found, **counts, "weight": timed._timed.weight})
    anatomy.WINDOW = usual
    return results


def test_of_short_steps_all_ranks_time_the_same_part(launch: Callable) -> None:
    batches = 20 * len(loader())
    ranks = launch(short_steps, 2)
    for all_, part in ranks:
        window = batches // 20 + 5
        assert all_["steps"] == batches and all_["looks"] == batches // window
        # Not after as many steps, most of which were not timed.
        assert part["looks"] == part["steps"] // window
        assert window + 1 < part["steps"] < batches / 2  # drawn ones, too
        # Those of the first window count in part, the others, each of which stands for many, whole.
        assert all_["_drawn"] == 1 and part["_drawn"] == pytest.approx(0.05)
        assert part["weight"] == pytest.approx(part["steps"] - 0.95 * window)
        assert part["begun"] == part["steps"]  # in other steps no hook is called
        assert part["ended"] < 2 * part["steps"]  # but at the end of those before timed ones
        assert part["in_vain"] <= 2 * 20  # at epochs' beginnings and validations' ends
        assert min(part["phases_ms"][phase] for phase in PHASES if phase != "all_reduce") > 0
        assert part["wire"]["calls"] == 1
    assert ranks[0][1]["ranks"] == ranks[1][1]["ranks"]


def test_steps_count_alike_before_and_after_fewer_are_timed() -> None:
    timed = Timed()
    for _ in range(1000):
        timed.add([1.5, 0.5], [1.0], waited=0.5)
    timed.thin(0.01, 0.1, random.Random(0))
    assert 50 < len(timed.steps) < 200 and len(timed.wire) == len(timed.steps)
    assert (timed.total, timed.weight, timed.waited) == pytest.approx((20, 10, 5))


class Spins(Net):
    """Each step needs 20 ms of a core, which rank 0 shares with other programs."""

    def training_step(self, batch: list[Tensor], batch_idx: int) -> Tensor:
        until = time.thread_time() + 0.02
        while time.thread_time() < until:
            pass
        return super().training_step(batch, batch_idx)


def contention() -> dict[str, Any]:
    cores = sorted(os.sched_getaffinity(0))
    os.sched_setaffinity(0, {cores[RANK % len(cores)]})
    others: list[subprocess.Popen] = []
    try:
        for _ in range(0 if RANK else 6):  # more than other tests leave for rank 1
            others.append(subprocess.Popen([sys.executable, "-c", "while True: pass"]))
        return found(Spins())
    finally:
        for other in others:
            other.kill()
            other.wait()
        for thread in os.listdir("/proc/self/task"):  # also of those that began meanwhile
            with contextlib.suppress(ProcessLookupError):
                os.sched_setaffinity(int(thread), set(cores))


@pytest.mark.skipif(not anatomy.SCHEDULED.exists(), reason="this kernel does not count")
@pytest.mark.skipif(len(os.sched_getaffinity(0)) < 2, reason="each rank needs a core")
def test_programs_that_take_a_core_are_named(launch: Callable) -> None:
    (first, _) = launch(contention, 2)
    assert first["verdict"].startswith(f"cores: rank 0 on {socket.gethostname()} waits ")
    assert first["ranks"][0]["waits_for_core"] > 0.3


def planted(folder: str) -> dict[str, Any]:
    logger = CSVLogger(folder, name="", version="", flush_logs_every_n_steps=1)
    slow = DataLoader(Slow(), batch_size=4)
    with pytest.MonkeyPatch.context() as patch:
        patch.setattr(anatomy, "waited", lambda schedule: 0.0)  # other load here is not planted
        return {
            "nothing": found(Sleeps(100, 100), logger=logger, log_every_n_steps=2),
            "rank": found(Sleeps(100, 200)),
            "loader": found(Sleeps(5, 5), slow),
            "accumulated": found(Sleeps(100, 100), accumulate_grad_batches=2),
            "several": found(Twice()),
        }


def test_planted_faults_are_named(launch: Callable, tmp_path: Path) -> None:
    first, second = launch(planted, 2, folder=str(tmp_path / "csv"))
    for name in first:  # all ranks have looked at all ranks
        assert first[name]["ranks"] == second[name]["ranks"]

    nothing = first["nothing"]
    assert nothing["verdict"].startswith("compute: forward and backward are")
    assert nothing["straggler"] is None
    batches = 2 * len(loader())
    assert nothing["steps"] == batches - 2
    assert sum(nothing["shares"].values()) == pytest.approx(1, abs=1e-3)
    parameters = 4 * (
        sum(p.numel() for p in Net().parameters()) + len(list(Net().parameters())) + 2
    )
    wire = nothing["wire"]
    assert (wire["calls"], wire["payload_bytes"]) == (1, parameters)
    assert wire["bytes"] == parameters  # of 2 ranks each sends all of it, in two halves
    assert [rank["rank"] for rank in nothing["ranks"]] == [0, 1]

    assert first["rank"]["straggler"]["rank"] == 1
    assert first["rank"]["straggler"]["phase"] == "forward"
    assert first["rank"]["verdict"].startswith("straggler: rank 1 on ")
    assert first["loader"]["verdict"].startswith("data: ")
    assert first["accumulated"]["wire"]["calls"] == 1
    exchanges = {name: result["wire"]["exchanges"] for name, result in first.items()}
    assert (exchanges["nothing"], exchanges["accumulated"], exchanges["several"]) == (1, 0, 2)
    assert first["accumulated"]["phases_ms"]["forward"] > 100

    rows = (tmp_path / "csv" / "metrics.csv").read_text().splitlines()
    columns = rows[0].split(",")
    assert {"lr", "grad_norm", "time/step_ms", "time/forward_ms"} <= set(columns)
    logged = [float(x) for row in rows[1:] if (x := row.split(",")[columns.index("grad_norm")])]
    assert len(logged) == batches // 2
    assert all(norm > 0 for norm in logged)


def thin_link(folder: str) -> None:
    model = Sleeps(10, 10)
    model.net = nn.Sequential(nn.Linear(FEATURES, 2**17), nn.Linear(2**17, CLASSES))
    (Path(folder) / f"{RANK}.json").write_text(json.dumps(found(model)))


@pytest.mark.slow
def test_a_thin_link_is_named(tmp_path: Path) -> None:
    """9 MB of gradients over 200 Mbit/s."""
    if problem := testbed.missing():
        pytest.skip(f"no test hosts: {problem}")
    code = f"import tests.test_anatomy as t; t.thin_link({str(tmp_path)!r})"
    horovodrun = [HOROVODRUN, "-np", "2", "-H", "node1:1,node2:1", sys.executable, "-c", code]
    with testbed.Testbed(2, rate="200mbit") as hosts:
        command = hosts[0].command(*horovodrun)
        done = run(command, cwd=ROOT)
    assert done.returncode == 0, done.stdout
    results = [json.loads((tmp_path / f"{rank}.json").read_text()) for rank in range(2)]
    assert results[0]["ranks"] == results[1]["ranks"]
    assert results[0]["verdict"].startswith("network: ")
    assert [rank["host"] for rank in results[0]["ranks"]] == ["node1", "node2"]
    assert results[0]["wire"]["bus_bandwidth_mb_s"] < 25  # 200 Mbit/s

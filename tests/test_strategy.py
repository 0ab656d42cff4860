"""HorovodStrategy under real horovodrun: what is not a number to compare (see test_matrix.py)."""

from __future__ import annotations

import io
import os
import re
import runpy
import sys
import time
import urllib.error
import warnings
from collections.abc import Callable
from concurrent.futures import ThreadPoolExecutor
from pathlib import Path
from types import SimpleNamespace
from typing import Any
from unittest.mock import Mock

import horovod.torch as hvd
import pytest
import pytorch_lightning as pl
import torch
from pytorch_lightning.accelerators import CPUAccelerator
from pytorch_lightning.callbacks import Callback, ModelCheckpoint
from pytorch_lightning.plugins.environments import LightningEnvironment
from pytorch_lightning.plugins.io import TorchCheckpointIO
from pytorch_lightning.trainer.states import TrainerFn
from pytorch_lightning.utilities.exceptions import MisconfigurationException
from torch import Tensor, nn
from torch._subclasses.fake_tensor import FakeTensorMode
from torch.utils._python_dispatch import TorchDispatchMode
from torch.utils.data import DataLoader, DistributedSampler
from torchmetrics import MeanMetric, MetricCollection, SumMetric

import strategies
from strategies import HorovodStrategy, buckets, ddp, environment, reductions, refusals
from strategies.buckets import GradientBuckets
from strategies.collectives import on_own_gpu, wait_until
from strategies.cores import usable_cores
from strategies.drift import _digest, _first_apart
from strategies.layout import fill
from strategies.metrics import metrics_of, synchronize_metrics
from strategies.reductions import InFlight, adasum, add
from tests.matrix.checkpoints import Remembers, everyones
from tests.matrix.parameters import LineSearch
from tests.matrix.precision import convolutions
from tests.matrix.trainings import (
    CLASSES,
    FEATURES,
    GLOBAL_BATCH,
    RANK,
    SIZE,
    Measured,
    Net,
    loader,
    make,
    samples,
    trainer,
)
from tests.test_matrix import assert_same


@pytest.mark.parametrize(
    ("name", "launcher"),
    [("WORLD_SIZE", "torchrun"), ("PMI_SIZE", "mpirun"), ("SLURM_STEP_NUM_TASKS", "srun")],
)
def test_processes_of_another_launcher_are_refused(
    name: str, launcher: str, monkeypatch: pytest.MonkeyPatch
) -> None:
    """Horovod takes each for the only one."""
    for variable in environment.OTHER_LAUNCHERS:
        monkeypatch.delenv(variable, raising=False)
    alone = SimpleNamespace(
        is_initialized=lambda: True, size=lambda: 1, global_process_set=hvd.global_process_set
    )
    monkeypatch.setattr(environment, "hvd", alone)
    monkeypatch.setattr(environment, "World", lambda _: None)
    environment.initialize()
    monkeypatch.setenv(name, "1")
    environment.initialize()
    monkeypatch.setenv(name, "2")
    with pytest.raises(MisconfigurationException, match=f"^{launcher} started 2 processes, each"):
        environment.initialize()
    monkeypatch.setenv("HOROVOD_SIZE", "1")  # of horovodrun within them
    environment.initialize()


@pytest.mark.parametrize(
    ("options", "sent"), [({}, 1.5), ({"compression": "fp16"}, 0.75), ({"op": "adasum"}, 2)]
)
def test_what_a_rank_of_four_sends(options: dict[str, Any], sent: float) -> None:
    strategy: Any = HorovodStrategy(**options)
    strategy.world = SimpleNamespace(size=4)
    assert strategy.sent_bytes(1) == sent


def test_on_one_host_nothing_is_cut(monkeypatch: pytest.MonkeyPatch) -> None:
    strategy: Any = HorovodStrategy(compression="fp16")
    strategy.world = SimpleNamespace(size=4)
    strategy.parallel_devices = [torch.device("cpu")]
    monkeypatch.setattr(hvd, "local_size", lambda: 4)
    assert strategy.sent_bytes(1) == 1.5
    monkeypatch.setattr("strategies.horovod.cuts_itself", lambda: False)
    assert strategy.sent_bytes(1) == 0.75


def test_adasum_on_three_ranks_is_refused(monkeypatch: pytest.MonkeyPatch) -> None:
    world = SimpleNamespace(size=3)
    monkeypatch.setattr("strategies.horovod.initialize", lambda *_, **__: world)
    with pytest.raises(MisconfigurationException, match="a power of two of them, not 3"):
        HorovodStrategy(op="adasum")


def threads_of_a_rank() -> int:
    with pytest.MonkeyPatch.context() as patch:
        patch.delenv("OMP_NUM_THREADS", raising=False)
        torch.set_num_threads(7)  # what another strategy of this process chose does not count
        HorovodStrategy()
    return torch.get_num_threads()


def test_the_ranks_of_a_host_share_its_cores(launch: Callable) -> None:
    assert launch(threads_of_a_rank, 2) == [max(1, usable_cores() // 2)] * 2


def test_a_training_on_cpus_keeps_freed_memory(monkeypatch: pytest.MonkeyPatch) -> None:
    """Unless the user has chosen otherwise."""
    for name in [name for name in os.environ if name.startswith("MALLOC_")]:
        monkeypatch.delenv(name)
    chosen: dict[int, int] = {}
    glibc = SimpleNamespace(mallopt=chosen.__setitem__)
    monkeypatch.setattr(environment, "ctypes", SimpleNamespace(CDLL=lambda _: glibc))
    strategy = HorovodStrategy()
    strategy.accelerator = CPUAccelerator()
    strategy.parallel_devices = [torch.device("cpu")]
    strategy.setup_environment()
    assert chosen == {environment.M_MMAP_THRESHOLD: 2**25, environment.M_TRIM_THRESHOLD: 2**31 - 1}
    chosen.clear()
    monkeypatch.setenv("MALLOC_ARENA_MAX", "2")
    strategy.setup_environment()
    assert not chosen


class Warm(Net):
    """Rank 0 brings an optimizer state along; the others must get it."""

    def configure_optimizers(self) -> Any:
        optimizer = super().configure_optimizers()
        if self.global_rank == 0:
            self(torch.ones(2, FEATURES)).sum().backward()
            optimizer.step()
            optimizer.zero_grad()
        return optimizer


def warm_optimizer() -> Any:
    run = trainer("horovod", limit_train_batches=0)
    run.fit(Warm(), loader())
    return run.optimizers[0].state_dict()["state"]


class Codebook(Net):
    """Moves a buffer by its own batches, and keeps what each step begins with."""

    def __init__(self) -> None:
        super().__init__(convolutions(normalization=True))
        self.register_buffer("centre", torch.zeros(FEATURES))
        self.begins: list[Tensor] = []

    def training_step(self, batch: list[Tensor], batch_idx: int) -> Tensor:
        self.begins.append(self.centre.clone())
        self.centre.lerp_(batch[0].mean(0), 0.1)
        return super().training_step(batch, batch_idx)


class MovesItself(Net):
    """A weight that something else than averaged gradients moves, in a step."""

    def __init__(self, step: int) -> None:
        super().__init__()
        self.step = step

    def on_train_batch_end(self, *_: Any) -> None:
        if self.global_step == self.step:
            with torch.no_grad():
                self.net[2].bias[1] += 1e-6 * RANK

    def validation_step(self, batch: list[Tensor], batch_idx: int) -> None:
        """Before which weights are looked at."""


class GathersByItself(Net):
    """Has a loss that gathers by torch.distributed, as lightly's do."""

    def __init__(self) -> None:
        super().__init__()
        self.gather_distributed = True  # by self.all_gather, as it should
        self.criterion = nn.Module()
        self.criterion.gather_distributed = True


def train_apart() -> dict[str, Any]:
    results = {}
    for name, model, options in (
        ("own", Codebook(), {}),
        ("alike", Codebook(), {"broadcast_buffers": True}),
        ("running", Net(convolutions(normalization=True)), {}),
        ("weight", MovesItself(20), {}),  # the last
        ("early weight", MovesItself(1), {}),
        ("gathers", GathersByItself(), {}),
    ):
        validation = DataLoader(samples(16), batch_size=4)
        with warnings.catch_warnings(record=True) as caught:
            warnings.simplefilter("always")  # else Python tells what is alike once
            trainer(HorovodStrategy(**options)).fit(model, loader(), validation)
        messages = [str(warning.message) for warning in caught]
        told = re.compile("differs between ranks|gather_distributed")
        results[f"{name} told"] = [text for text in messages if told.search(text)]
        if isinstance(model, Codebook):
            results[name] = torch.stack(model.begins)
    return results


def test_what_has_gone_apart_is_told_or_rank_0s(launch: Callable) -> None:
    first, second = launch(train_apart, 2)
    assert not torch.equal(first["own"], second["own"])
    assert torch.equal(first["alike"], second["alike"]) and first["alike"][-1].any()
    (text,) = first["own told"]
    assert text.startswith("the buffer centre differs between ranks, and checkpoints have that of")
    for name in ("weight told", "early weight told"):
        (text,) = first[name]
        assert text.startswith("the parameter net.2.bias differs between ranks, and checkpoints ")
    (text,) = first["gathers told"]
    assert text.startswith("criterion: gather_distributed=True asks torch.distributed, which is ")
    assert not first["running told"] and not first["alike told"]
    assert not second["own told"] and not second["weight told"]


def moved_by_accumulated_batches(strategy: str) -> list[Tensor]:
    options = {"broadcast_buffers": True} if strategy == "horovod" else {}
    model = Codebook()
    run = trainer(make(strategy, **options), accumulate_grad_batches=2)
    run.fit(model, loader())
    return [*model.begins, *model.parameters()]


def test_buffers_are_rank_0s_once_a_step_as_under_ddp(
    launch: Callable, launch_anew: Callable
) -> None:
    ours = launch(moved_by_accumulated_batches, 2, strategy="horovod")
    theirs = launch_anew(moved_by_accumulated_batches, 2, strategy="ddp")
    for mine, other in zip(ours, theirs):
        assert len(mine) == len(other)
        for one, same in zip(mine, other):
            assert torch.allclose(one, same, rtol=1e-5, atol=1e-6)
    assert not torch.equal(ours[0][1], ours[1][1]) and torch.equal(ours[0][2], ours[1][2])


def test_what_is_apart_is_found_by_all_ranks_alike() -> None:
    """Else one would wait for the others at the end. Rank 0's has a shape that no other has."""
    ranks = [{"a (2,)": "x"}, {"a (3,)": "x"}, {"a (3,)": "y"}]
    world = SimpleNamespace(gather_objects=lambda _: ranks)
    assert [_first_apart(mine, world) for mine in ranks] == ["a (3,)"] * 3


def test_buffers_of_any_strides_are_compared() -> None:
    assert _digest(torch.arange(6.0)[::2]) == _digest(torch.tensor([0.0, 2.0, 4.0]))


@pytest.mark.parametrize("started", [True, False])
def test_losses_may_gather_by_a_torch_distributed_that_is_started(
    monkeypatch: pytest.MonkeyPatch, started: bool
) -> None:
    monkeypatch.setattr(torch.distributed, "is_initialized", lambda: started)
    loss = nn.Module()
    loss.sinkhorn_gather_distributed = True
    with warnings.catch_warnings(record=True) as caught:
        refusals.warn_of_own_gathers(nn.ModuleDict({"loss": loss}))
    told = [str(warning.message).partition(" asks")[0] for warning in caught]
    assert told == ([] if started else ["loss: sinkhorn_gather_distributed=True"])


def test_an_optimizer_may_have_no_learning_rate() -> None:
    optimizer: Any = SimpleNamespace(param_groups=[{"params": []}])
    refusals.refuse_unequal(1, [optimizer], HorovodStrategy().world)


class Fails(torch.autograd.Function):
    @staticmethod
    def forward(ctx: Any, x: Tensor, fails: bool) -> Tensor:
        ctx.fails = fails
        return x.clone()

    @staticmethod
    def backward(ctx: Any, gradient: Tensor) -> tuple[Tensor, None]:
        if ctx.fails:
            raise ValueError("a loss that has no gradient today")
        return gradient, None


class FailsInBackward(Net):
    """Rank 0 when its second half has begun to travel, the others before."""

    def __init__(self, fails: bool) -> None:
        super().__init__()
        self.fails = fails
        self.more = nn.Linear(CLASSES, 2**18)  # a bucket of its own

    def training_step(self, batch: list[Tensor], batch_idx: int) -> Tensor:
        x = self.more(Fails.apply(self.net(batch[0]), self.fails and RANK == 0))
        return Fails.apply(x, self.fails and RANK > 0).mean()


def go_on_after_an_error() -> Tensor:
    with pytest.raises(ValueError, match="today"):
        trainer(HorovodStrategy(bucket_mib=1)).fit(FailsInBackward(True), loader())
    model = FailsInBackward(False)
    trainer(HorovodStrategy(bucket_mib=1)).fit(model, loader())
    return model.more.bias.detach()


def test_a_new_trainer_after_an_error_on_all_ranks(launch_anew: Callable) -> None:
    first, second = launch_anew(go_on_after_an_error, 2)
    assert torch.equal(first, second)


class Wraps(torch.optim.Optimizer):
    """An optimizer around another, made without Optimizer.__init__, as many are."""

    def __init__(self, inner: torch.optim.Optimizer) -> None:
        self.inner, self.param_groups, self.state = inner, inner.param_groups, inner.state
        self.defaults = inner.defaults

    def step(self, closure: Any = None) -> Any:
        return self.inner.step(closure)

    def zero_grad(self, set_to_none: bool = True) -> None:
        self.inner.zero_grad(set_to_none)


class IsWrapped(Net):
    def configure_optimizers(self) -> Any:
        return Wraps(torch.optim.SGD(self.parameters(), lr=0.05))


def train_wrapped() -> Any:
    model = IsWrapped()
    trainer("horovod").fit(model, loader())
    return model.state_dict()


def test_an_optimizer_around_another(launch: Callable) -> None:
    (alone,) = launch(train_wrapped, 1)
    for rank in launch(train_wrapped, 2):
        assert_same(rank, alone, 1e-6)


def test_optimizer_state_of_rank_0_is_everyones(launch: Callable) -> None:
    first, second = launch(warm_optimizer, 2)
    assert first and first.keys() == second.keys()
    for key in first:
        assert_same(first[key], second[key], 0)


def step_afterwards() -> list[Any]:
    """Whether a step of rank 0 alone asked for a loss, and how many hooks the optimizer has."""
    run = trainer("horovod")
    run.fit(LineSearch(), loader())
    (optimizer,), asked = run.optimizers, []
    if RANK == 0:
        optimizer.step(lambda: asked.append(0) or torch.zeros(()))
    return [len(asked) > 0, len(optimizer._optimizer_step_pre_hooks)]


def test_a_step_after_the_training_is_one_ranks_own(launch: Callable) -> None:
    assert launch(step_afterwards, 2) == [[True, 0], [False, 0]]


class StepsAfterTwo(Net):
    """Two backwards a step, with or without the gradients of the first."""

    def __init__(self, zeroes: bool) -> None:
        super().__init__()
        self.automatic_optimization, self.zeroes = False, zeroes

    def training_step(self, batch: list[Tensor], batch_idx: int) -> None:
        optimizer = self.optimizers()
        for _ in range(2):
            if self.zeroes:
                optimizer.zero_grad(set_to_none=False)
            self.manual_backward(nn.functional.cross_entropy(self(batch[0]), batch[1]))
        optimizer.step()


class StepsAfterAnothers(StepsAfterTwo):
    """The same, with a backward between that leaves alone what is stepped."""

    def training_step(self, batch: list[Tensor], batch_idx: int) -> None:
        for trained in (True, True, False):
            self.net[0].requires_grad_(trained)
            self.manual_backward(nn.functional.cross_entropy(self(batch[0]), batch[1]))
        self.net[0].requires_grad_(True)
        self.optimizers().step()

    def configure_optimizers(self) -> Any:
        return torch.optim.SGD(self.net[0].parameters(), lr=0.05)


def step_after_two_backwards() -> bool:
    trainer(HorovodStrategy(op="adasum")).fit(StepsAfterTwo(True), loader())
    trainer(HorovodStrategy()).fit(StepsAfterTwo(False), loader())
    for model in (StepsAfterTwo(False), StepsAfterAnothers(False)):
        with pytest.raises(MisconfigurationException, match="op=adasum combines one backward a "):
            trainer(HorovodStrategy(op="adasum")).fit(model, loader())
    return True


def test_adasum_takes_one_backward_a_step(launch: Callable) -> None:
    assert launch(step_after_two_backwards, 2) == [True, True]


class Boom(Net):
    def __init__(self, where: str) -> None:
        super().__init__()
        self.where = where

    def training_step(self, batch: list[Tensor], batch_idx: int) -> Tensor:
        self._raise("training", batch_idx == 2)
        return super().training_step(batch, batch_idx)

    def validation_step(self, batch: list[Tensor], batch_idx: int) -> None:
        self.log("val_mean", self(batch[0]).mean(), sync_dist=True)

    def on_validation_epoch_end(self) -> None:
        self._raise("validation", not self.trainer.sanity_checking)

    def _raise(self, where: str, now: bool) -> None:
        if self.global_rank == 1 and (where, now) == (self.where, True):
            raise RuntimeError("boom on rank 1")


def explode(folder: str, where: str) -> None:
    keep = ModelCheckpoint(folder, monitor="val_mean", save_on_exception=True, save_last=True)
    run = trainer("horovod", callbacks=[keep], enable_checkpointing=True)
    run.fit(Boom(where), loader(), DataLoader(samples(16), batch_size=4))


@pytest.mark.parametrize("where", ["training", "validation"])
def test_an_exception_on_one_rank_ends_all(
    launch_anew: Callable, tmp_path: Path, where: str
) -> None:
    """Also where it saves checkpoints, for which ranks wait for each other."""
    with pytest.raises(AssertionError, match="boom on rank 1"):
        launch_anew(explode, 2, folder=str(tmp_path), where=where)


def train_without_a_batch() -> None:
    def collate(batch: list[Any]) -> Any:
        counted.append(1)
        return None if RANK == 1 and len(counted) == 3 else torch.utils.data.default_collate(batch)

    counted: list[int] = []
    trainer("horovod").fit(Net(), DataLoader(samples(), batch_size=4, collate_fn=collate))


def test_a_rank_without_a_batch_is_named(launch_anew: Callable) -> None:
    """Lightning would leave out its step, for which the other rank waits."""
    with pytest.raises(AssertionError, match="the training loader gives rank 1 on .* None for a"):
        launch_anew(train_without_a_batch, 2)


class TestDevices:
    """Which GPU a rank takes, on machines that are made up."""

    def strategy(self, monkeypatch: pytest.MonkeyPatch, gpus: int, local_rank: int) -> Any:
        strategy = HorovodStrategy()
        strategy.parallel_devices = [torch.device("cuda", 0)]  # Trainer(devices=1)
        monkeypatch.delenv("CUDA_VISIBLE_DEVICES", raising=False)
        monkeypatch.setattr(torch.cuda, "device_count", lambda: gpus)
        monkeypatch.setattr(hvd, "local_rank", lambda: local_rank)
        monkeypatch.setattr(hvd, "local_size", lambda: local_rank + 1)
        return strategy

    def test_too_few_are_told(self, monkeypatch: pytest.MonkeyPatch) -> None:
        strategy = self.strategy(monkeypatch, 2, 0)
        monkeypatch.setattr(hvd, "local_size", lambda: 3)
        with pytest.raises(MisconfigurationException, match="3 ranks on .*, which has 2 GPUs"):
            _ = strategy.root_device

    def test_each_rank_takes_its_own(self, monkeypatch: pytest.MonkeyPatch) -> None:
        for rank in range(4):
            strategy = self.strategy(monkeypatch, 4, rank)
            strategy.world._hosts = ["here"]  # as the first of its process set
            assert strategy.root_device == torch.device("cuda", rank)

    def test_or_that_which_was_chosen(self, monkeypatch: pytest.MonkeyPatch) -> None:
        """Trainer(devices=[2, 3]); with other numbers of ranks this is refused."""
        monkeypatch.setattr(hvd, "nccl_built", lambda: True)
        monkeypatch.setattr(refusals, "_refuse_others_gpus", lambda *_: None)
        chosen = [torch.device("cuda", 2), torch.device("cuda", 3)]
        for ranks, devices in ((2, chosen), (1, chosen[:1]), (1, chosen), (2, chosen[1:])):
            strategy = self.strategy(monkeypatch, 4, ranks - 1)
            strategy.parallel_devices = devices
            arguments = devices, 1, strategy.root_device, strategy.world
            if len(devices) == ranks:
                assert strategy.root_device == devices[-1]
                refusals.refuse_contradictions(*arguments)
                continue
            told = r"devices=2\)" if len(devices) > 1 else r"devices=\[3\]\).* as many GPUs"
            with pytest.raises(MisconfigurationException, match=told):
                refusals.refuse_contradictions(*arguments)

    def test_or_the_only_one_that_it_was_shown(self, monkeypatch: pytest.MonkeyPatch) -> None:
        strategy = self.strategy(monkeypatch, 1, 3)
        monkeypatch.setenv("CUDA_VISIBLE_DEVICES", "3")
        assert strategy.root_device == torch.device("cuda", 0)

    def test_ddp_takes_the_gpu_of_its_local_rank(self, monkeypatch: pytest.MonkeyPatch) -> None:
        monkeypatch.setenv("HOROVOD_LOCAL_SIZE", "2")
        monkeypatch.setattr(torch.cuda, "is_available", lambda: True)
        for visible, gpus, expected in ((None, 2, [0, 1]), ("3", 1, [0, 0]), ("1,3", 2, [0, 1])):
            monkeypatch.delenv("CUDA_VISIBLE_DEVICES", raising=False)
            if visible is not None:
                monkeypatch.setenv("CUDA_VISIBLE_DEVICES", visible)
            monkeypatch.setattr(torch.cuda, "device_count", lambda gpus=gpus: gpus)
            monkeypatch.setattr(ddp, "HorovodrunEnvironment", LightningEnvironment)
            devices = ddp.HorovodrunDDP().parallel_devices
            assert devices == [torch.device("cuda", index) for index in expected]
        monkeypatch.setenv("HOROVOD_LOCAL_SIZE", "3")
        with pytest.raises(MisconfigurationException, match="3 ranks on .*, which has 2 GPUs"):
            ddp.HorovodrunDDP()
        assert len(ddp.HorovodrunDDP("cpu").parallel_devices or []) == 3

    def test_ddp_counts_the_ranks_of_all_hosts(self, monkeypatch: pytest.MonkeyPatch) -> None:
        for name, value in {"SIZE": 4, "RANK": 3, "LOCAL_RANK": 1, "CROSS_RANK": 1}.items():
            monkeypatch.setenv(f"HOROVOD_{name}", str(value))
        monkeypatch.setenv("HOROVOD_LOCAL_SIZE", "2")
        share = ddp.HorovodrunDDP("cpu").distributed_sampler_kwargs
        assert share == {"num_replicas": 4, "rank": 3}

    def test_ddp_waits_for_an_address_that_is_not_there_yet(
        self, monkeypatch: pytest.MonkeyPatch
    ) -> None:
        """And for no other answer of the server, as that of another job's."""
        answers = [urllib.error.HTTPError("", code, "", None, None) for code in (404, 404, 403)]
        monkeypatch.setattr(ddp, "DIRECT", Mock(open=Mock(side_effect=answers)))
        with pytest.raises(urllib.error.HTTPError, match="403"):
            ddp._read("http://127.0.0.1:9/ddp/rank-0")

    @pytest.mark.parametrize("task", [TrainerFn.FITTING, TrainerFn.TESTING])
    def test_ddp_sends_states_of_optimizers_to_train_alone(
        self, task: TrainerFn, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
    ) -> None:
        torch.save({"optimizer_states": [1], "state_dict": {}}, tmp_path / "a.ckpt")
        strategy: Any = ddp.SeededDDP(
            accelerator=CPUAccelerator(), checkpoint_io=TorchCheckpointIO()
        )
        strategy._lightning_module = SimpleNamespace(
            trainer=SimpleNamespace(state=SimpleNamespace(fn=task))
        )
        monkeypatch.setattr(ddp.SeededDDP, "is_global_zero", True)
        monkeypatch.setattr(ddp.SeededDDP, "world_size", 2)
        strategy.broadcast = lambda checkpoint: checkpoint
        states = strategy.load_checkpoint(tmp_path / "a.ckpt")["optimizer_states"]
        assert states == ([1] if task == TrainerFn.FITTING else [])

    def test_ddp_under_mpirun_is_refused(self, monkeypatch: pytest.MonkeyPatch) -> None:
        monkeypatch.setenv("OMPI_COMM_WORLD_RANK", "0")
        with pytest.raises(MisconfigurationException, match="use horovodrun or torchrun, not mpi"):
            ddp.ddp()

    def test_what_comes_from_another_ranks_gpu_is_put_on_its_own(self) -> None:
        storage = SimpleNamespace(cuda=lambda: "on mine")
        assert on_own_gpu(storage, "cuda:3") == "on mine" and on_own_gpu(storage, "cpu") is storage

    def test_a_model_on_several_has_one_gradient_at_a_time(
        self, monkeypatch: pytest.MonkeyPatch
    ) -> None:
        """Autograd has a thread for each GPU, and both come to the same operations."""
        now, most = [0], [0]

        def advance(_: Any) -> None:
            now[0] += 1
            most[0] = max(most[0], now[0])
            time.sleep(0.02)
            now[0] -= 1

        monkeypatch.setattr(buckets, "advance", advance)
        model = nn.Sequential(nn.Linear(2, 2), nn.Linear(2, 2))
        reducer = GradientBuckets(model, HorovodStrategy().world, adasum, 4, before=1, after=1)
        monkeypatch.setattr(reducer, "_launch", lambda bucket: None)
        reducer.start()
        with ThreadPoolExecutor(4) as pool:
            list(pool.map(reducer._gradient_is_there, model.parameters()))
        assert most == [1] and reducer._seen == set(model.parameters())

    def test_gradients_of_layers_that_have_moved_are_noticed(
        self, monkeypatch: pytest.MonkeyPatch
    ) -> None:
        """To another device as training begins; autograd makes new nodes for another dtype too."""
        model = nn.Sequential(nn.Linear(2, 2), nn.Linear(2, 2))
        reducer = GradientBuckets(model, HorovodStrategy().world, add, 4, before=1, after=1)
        monkeypatch.setattr(reducer, "_launch", lambda bucket: None)
        model[1].double()
        reducer.start()
        hooks = dict(reducer._hooks)
        model[1](model[0](torch.ones(1, 2)).double()).sum().backward()
        assert reducer._seen == set(model.parameters())
        reducer._watch()
        assert reducer._hooks == hooks  # nothing has moved since

    def test_a_bucket_has_no_more_elements_than_horovod_counts(self) -> None:
        """Their number would be negative there, and memory be overwritten."""
        layer = nn.Module()
        layer.weight = nn.Parameter(torch.zeros(1).expand(2**31))
        reducer = GradientBuckets(layer, HorovodStrategy().world, add, 4, before=1, after=1)
        with pytest.raises(MisconfigurationException, match=r"in 32 bits on CPUs: cut a parameter"):
            reducer.start()

    def test_a_bucket_starts_without_a_wait_for_what_the_gpu_has_to_do(
        self, monkeypatch: pytest.MonkeyPatch
    ) -> None:
        """As a copy of a number from the CPU does: buffer[0] = 0."""
        copies: list[Any] = []

        class Copies(TorchDispatchMode):
            def __torch_dispatch__(
                self, op: Any, types: Any, args: Any = (), kwargs: Any = None
            ) -> Any:
                if op is torch.ops.aten.copy_.default and args[0].device != args[1].device:
                    copies.append(args)
                return op(*args, **(kwargs or {}))

        monkeypatch.setattr(buckets, "moment", lambda device: 0.0)
        # Tensors that are made up have none.
        monkeypatch.setattr(Tensor, "data_ptr", lambda tensor: id(tensor))
        with FakeTensorMode(), Copies():
            model = nn.Linear(2, 3, device="cuda")
            model.weight.grad = torch.ones_like(model.weight)
            world = HorovodStrategy().world
            reducer = GradientBuckets(model, world, lambda *_: iter([0]), 4, before=1, after=1)
            reducer.start(last_batch=True)
            reducer._launch(reducer.buckets[0])
        assert reducer.buckets[0].unused == [0]  # the bias
        assert reducer.buckets[0].buffer.device.type == "cuda" and copies == []

    def test_a_training_on_cpus_pins_no_memory(self, tmp_path: Path) -> None:
        """Which would make a context on the first GPU, in each rank."""
        run = trainer("horovod", max_steps=1)
        batches = DataLoader(samples(), batch_size=2, pin_memory=True)
        run.fit(Net(), batches)
        assert batches.pin_memory and not run.train_dataloader.pin_memory

    def test_why_it_cannot_be_used(self, monkeypatch: pytest.MonkeyPatch) -> None:
        """Lightning and torch count GPUs that CUDA then cannot use."""

        def set_device(device: torch.device) -> None:
            raise RuntimeError("The NVIDIA driver on your system is too old (12040).\nUpdate it.")

        strategy = self.strategy(monkeypatch, 2, 1)
        strategy.accelerator = CPUAccelerator()
        monkeypatch.setattr(strategy.accelerator, "setup_device", set_device)
        with pytest.raises(MisconfigurationException, match=r"cuda:1 of .* too old \(12040\); "):
            strategy.setup_environment()

    def test_gpus_without_nccl_or_of_two_ranks_are_refused(
        self, monkeypatch: pytest.MonkeyPatch
    ) -> None:
        strategy = self.strategy(monkeypatch, 1, 0)
        strategy.accelerator = CPUAccelerator()
        monkeypatch.setattr(strategy.accelerator, "setup_device", lambda device: None)
        gpu = SimpleNamespace(uuid="GPU-a")
        monkeypatch.setattr(torch.cuda, "get_device_properties", lambda device: gpu)
        monkeypatch.setattr(hvd, "nccl_built", lambda: False)
        with pytest.raises(MisconfigurationException, match="HOROVOD HAS NO NCCL"):
            strategy.setup_environment()
        monkeypatch.setattr(hvd, "nccl_built", lambda: True)
        strategy.setup_environment()
        assert strategy.operations == "NCCL"
        other = [("node1", "GPU-a"), ("node2", "GPU-a"), ("node1", "GPU-b")]
        monkeypatch.setattr(strategy.world, "gather_objects", lambda mine: other)
        strategy.setup_environment()
        other.append(("node2", "GPU-a"))
        with pytest.raises(MisconfigurationException, match="ranks 1 and 3 have the same GPU"):
            strategy.setup_environment()


def on_a_gpu(of_rank: int) -> str:
    """What a strategy says to that, which then has no collective that the other rank has not."""
    chosen = HorovodStrategy()
    chosen.accelerator = CPUAccelerator()
    chosen.accelerator.setup_device = lambda device: None
    kind = "cuda" if of_rank == RANK else "cpu"
    chosen.parallel_devices = [torch.device(kind, 0) if kind == "cuda" else torch.device(kind)]
    gpu = SimpleNamespace(uuid="GPU-a")
    fakes = {"device_count": lambda: 2, "get_device_properties": lambda device: gpu}
    with pytest.MonkeyPatch.context() as patch:
        patch.setattr(hvd, "nccl_built", lambda: True)
        for name, function in fakes.items():
            patch.setattr(torch.cuda, name, function)
        with pytest.raises(MisconfigurationException) as error:
            chosen.setup_environment()
    return str(error.value)


@pytest.mark.parametrize("of_rank", [0, 1])
def test_a_gpu_on_some_ranks_only_is_refused(launch: Callable, of_rank: int) -> None:
    """accelerator=auto finds none where the driver is broken; it was a hang."""
    first, second = launch(on_a_gpu, 2, of_rank=of_rank)
    assert first == second
    assert re.match(f"rank {1 - of_rank} on .* finds no GPU, others do", first)


class Adds(pl.LightningModule):
    def __init__(self) -> None:
        super().__init__()
        self.total = SumMetric()

    def validation_step(self, batch: Tensor, batch_idx: int) -> None:
        self.total.update(batch)
        self.log("total", self.total)


class TestOneProcess:
    """Without horovodrun: one process, and options that are refused."""

    def test_metrics_are_those_of_the_newest_strategy(self) -> None:
        module = Measured()
        for _ in range(2):
            world = HorovodStrategy().world
            synchronize_metrics(module, world)
            assert module.auroc.dist_sync_fn == world.gather

    def test_a_metric_that_gathers_by_itself_is_left_alone(self) -> None:
        def gather(tensor: Tensor, group: Any = None) -> list[Tensor]:
            return [tensor]

        module = nn.ModuleList([SumMetric(dist_sync_fn=gather)])
        synchronize_metrics(module, HorovodStrategy().world)
        assert module[0].dist_sync_fn is gather

    def test_metrics_add_up_in_float32_under_bf16_true(self) -> None:
        module, ones = Adds(), DataLoader(torch.ones(1000))
        run = trainer("horovod", precision="bf16-true")
        run.validate(module, ones, verbose=False)
        assert run.callback_metrics["total"] == 1000  # 256 in bf16

    def test_gathers_in_one_shape_on_any_number_of_ranks(self) -> None:
        mine = torch.ones(4, 2, requires_grad=True)
        gathered = HorovodStrategy().all_gather(mine, sync_grads=True)
        assert gathered.shape == (1, 4, 2)
        gathered.sum().backward()
        assert mine.grad is not None and mine.grad.eq(1).all()
        assert not HorovodStrategy().all_gather(mine).requires_grad

    def test_saves_what_is_only_connected(self, tmp_path: Path) -> None:
        """As is done to make a checkpoint of given weights."""
        run, module = trainer("horovod"), Net()
        run.strategy.connect(module)
        run.save_checkpoint(tmp_path / "a.ckpt")
        saved = torch.load(tmp_path / "a.ckpt", weights_only=True)["state_dict"]
        assert saved.keys() == module.state_dict().keys()

    def test_trains_alone(self) -> None:
        run = trainer("horovod", max_epochs=1)
        run.fit(Net(), loader(16))
        assert (run.world_size, run.global_rank, run.global_step) == (1, 0, 2)
        assert run.strategy.operations in ("Gloo", "MPI")

    @pytest.mark.parametrize(
        "options,message",
        [
            ({"bucket_mib": 0}, "bucket_mib=0: a size above 0"),
            ({"compression": "fp8"}, "compression=fp8: there are none, fp16, bf16"),
            ({"op": "mean"}, "op=mean: there are average, sum, adasum"),
            ({"gradient_predivide_factor": 0}, "gradient_predivide_factor=0: a factor above 0"),
            ({"gradient_predivide_factor": 2, "op": "sum"}, "op=sum divides by no ranks"),
            ({"op": "adasum", "compression": "bf16"}, "compression=bf16 would spoil"),
            ({"process_sets": [[0, 1]]}, "knows no set|must be in exactly one"),
        ],
    )
    def test_options_are_checked(self, options: dict[str, Any], message: str) -> None:
        with pytest.raises(MisconfigurationException, match=message):
            HorovodStrategy(**options)

    @pytest.mark.parametrize(
        "arguments,message",
        [({"devices": 3}, r"devices=3\) .* 1 processes"), ({"num_nodes": 2}, r"num_nodes=2\)")],
    )
    def test_trainer_may_not_contradict_horovodrun(
        self, arguments: dict[str, Any], message: str
    ) -> None:
        with pytest.raises(MisconfigurationException, match=message):
            trainer("horovod", **arguments).fit(Net(), loader(16))

    def test_horovod_that_does_not_work(self, monkeypatch: pytest.MonkeyPatch) -> None:
        monkeypatch.setattr("horovod.torch", SimpleNamespace())  # without Horovod's operations
        with pytest.raises(MisconfigurationException, match="Horovod was built without PyTorch"):
            runpy.run_path(str(strategies.__file__))
        monkeypatch.setitem(sys.modules, "horovod.torch", None)  # no longer to be imported
        with pytest.raises(MisconfigurationException, match="Horovod cannot be imported .import"):
            runpy.run_path(str(strategies.__file__))


# ------------------------------------------------------------------- mistakes of several ranks


class Words(Net):
    def __init__(self) -> None:
        super().__init__(convolutions(normalization=True))
        self.words = nn.Embedding(CLASSES, CLASSES, sparse=True)

    def training_step(self, batch: list[Tensor], batch_idx: int) -> Tensor:
        scores = self(batch[0]) + self.words(batch[1])
        return nn.functional.cross_entropy(scores, batch[1])

    def configure_optimizers(self) -> Any:
        return torch.optim.SGD(self.parameters(), lr=0.05)


class TiedWords(Words):
    """A weight of an embedding and a dense layer, which rank 1 leaves out."""

    def __init__(self) -> None:
        super().__init__()
        self.dense = nn.Linear(CLASSES, CLASSES, bias=False)
        self.dense.weight = self.words.weight

    def training_step(self, batch: list[Tensor], batch_idx: int) -> Tensor:
        scores = self.words(batch[1]) + (self.dense(self(batch[0])) if RANK == 0 else 0)
        return nn.functional.cross_entropy(scores, batch[1])

    def configure_optimizers(self) -> Any:
        return torch.optim.Adam(self.parameters(), lr=0.05)  # of dense gradients alone


def train_tied() -> Tensor:
    model = TiedWords()
    torch.set_warn_always(True)  # else once a process
    try:
        with warnings.catch_warnings():
            warnings.filterwarnings("error", "Sparse invariant checks")  # of tensors that we make
            trainer("horovod").fit(model, loader())
    finally:
        torch.set_warn_always(False)
    return model.words.weight.detach()


def test_a_tied_gradient_is_dense_on_all_ranks(launch: Callable) -> None:
    first, second = launch(train_tied, 2)
    assert torch.equal(first, second)


def train_in_16_bits() -> dict[str, Tensor]:
    model = Words()
    trainer("horovod", precision="bf16-true", sync_batchnorm=True).fit(model, loader())
    return model.state_dict()


def test_sparse_gradients_and_statistics_in_16_bits(launch: Callable) -> None:
    first, second = launch(train_in_16_bits, 2)
    assert first["words.weight"].dtype == torch.bfloat16
    assert_same(first, second, 0)


def reduce_gradients(op: str, gradients: list[list[float]]) -> list[float]:
    """One parameter whose gradient is `gradients[rank]`, and what becomes of it."""
    parameter = nn.Linear(len(gradients[0]), 1, bias=False)
    strategy = HorovodStrategy(op=op)
    strategy._lightning_module = parameter
    buckets = strategy._make_buckets()
    loss = parameter(torch.tensor(gradients[RANK])).sum()
    buckets.prepare()
    buckets.start()
    loss.backward()
    assert buckets.finish()()
    return parameter.weight.grad[0].tolist()


def reduce_each(op: str, of_ranks: list[list[list[float]]]) -> list[list[float]]:
    return [reduce_gradients(op, gradients) for gradients in of_ranks]


def test_adasum_adds_what_is_different_and_averages_what_is_alike(launch: Callable) -> None:
    orthogonal = [[3.0, 0, 0, 0], [0, 4.0, 0, 0], [0, 0, 5.0, 0], [0, 0, 0, 6.0]]
    two_pairs = [[2.0, 0], [1.0, 1.0]] * 2
    ranks = launch(reduce_each, 4, op="adasum", of_ranks=[orthogonal, two_pairs])
    assert len(ranks) == 4
    for added, mixed in ranks:
        assert added == [3, 4, 5, 6]
        # (1 - a.b / 2|a|^2) a + (1 - a.b / 2|b|^2) b, of a = (2, 0) and b = (1, 1): 0.75 a + 0.5 b;
        # both pairs get that, and of what is equal the average.
        assert mixed == pytest.approx([0.75 * 2 + 0.5, 0.5])


def reduce_where_one_rank_has_gradients() -> list[float]:
    """By Adasum: of a weight that rank 0 alone uses, and what says so."""
    weights = nn.ParameterList([torch.ones(2), torch.ones(1)])
    buckets = GradientBuckets(weights, HorovodStrategy().world, adasum, None, 1, 1)
    buckets.prepare()
    buckets.start(last_batch=RANK == 0)
    sum(weight.sum() for weight in list(weights)[RANK:]).backward()
    agreed = buckets.finish()()
    return [*weights[0].grad.tolist(), weights[1].grad.item(), agreed]


def test_adasum_takes_what_one_rank_has(launch: Callable) -> None:
    assert launch(reduce_where_one_rank_has_gradients, 2) == [[1, 1, 1, False]] * 2


def reduce_in_64_bits() -> list[float | None]:
    """Gradients of a dense weight, and of embeddings that rank 0 alone uses, and nobody."""
    words = [nn.Embedding(2, 1, sparse=True) for _ in range(2)]
    model = nn.ModuleList([nn.Linear(1, 1, bias=False), *words]).double()
    buckets = GradientBuckets(model, HorovodStrategy().world, add, None, 1, 1)
    buckets.prepare()
    buckets.start()
    x = torch.tensor([1 + 2.0**-40], dtype=torch.float64)
    loss = model[0](x) + (x * model[1](torch.tensor([1])) if RANK == 0 else 0)
    loss.sum().backward()
    assert buckets.finish()()
    gradients = [parameter.grad for parameter in model.parameters()]
    return [None if each is None else each.sum().item() for each in gradients]


def test_gradients_in_64_bits_keep_their_digits(launch: Callable) -> None:
    assert launch(reduce_in_64_bits, 2) == [[2 + 2.0**-39, 1 + 2.0**-40, None]] * 2


def test_gradients_of_16_bits_are_divided_in_32() -> None:
    view, gradient = torch.zeros(1), torch.ones(1, dtype=torch.bfloat16)
    fill([view], [gradient], 1 / 3)
    assert view.item() == pytest.approx(1 / 3, rel=1e-6)


def test_a_sparse_gradient_of_one_rank_may_be_cleared() -> None:
    words = nn.Embedding(2, 2, sparse=True)
    buckets = GradientBuckets(words, HorovodStrategy().world, add, None, 1, 1)
    words(torch.tensor([1])).sum().backward()
    assert buckets.is_own(words.weight)
    torch.optim.SGD(words.parameters()).zero_grad(set_to_none=False)
    assert not buckets.is_own(words.weight)


def test_embeddings_are_dense_unless_they_say_otherwise() -> None:
    """Adasum takes them."""
    world = HorovodStrategy().world
    assert not GradientBuckets(nn.Embedding(2, 2), world, adasum, None, 1, 1).sparse


@pytest.mark.parametrize("kind", ["fp16", "bf16"])
def test_horovod_is_asked_for_the_16_bits_that_were_chosen(
    monkeypatch: pytest.MonkeyPatch, kind: str
) -> None:
    monkeypatch.setattr(reductions, "cuts_itself", lambda: True)
    monkeypatch.setattr(reductions, "add", lambda buffer, sizes, name, world: iter([name]))
    world = HorovodStrategy().world
    steps = reductions.COMPRESSIONS[kind](torch.ones(1), [1], "gradients", world)
    assert [*steps] == [f"gradients@{kind}"]


def two_groups() -> dict[str, Any]:
    """Ranks 0 and 2 train one model, 1 and 3 another: each as two ranks alone would."""
    strategy = HorovodStrategy(process_sets=[[0, 2], [1, 3]])
    run = pl.Trainer(
        strategy=strategy, accelerator="cpu", logger=False, max_epochs=1,
        enable_checkpointing=False, enable_progress_bar=False, enable_model_summary=False,
    )  # fmt: skip
    if run.is_global_zero:
        run.local_rank, run.node_rank  # noqa: B018  # local, as reading a number is
    torch.manual_seed(hvd.rank())
    rank, model = run.global_rank, Measured()
    sampler = DistributedSampler(samples(), run.world_size, rank, shuffle=False)
    run.fit(model, DataLoader(samples(), batch_size=4, sampler=sampler))
    measured = run.validate(model, DataLoader(samples(9), batch_size=4), verbose=False)[0]
    own = strategy.broadcast(hvd.rank(), src=1)
    gathered = strategy.all_gather(torch.tensor(hvd.rank()))
    reduced = {}
    with pytest.MonkeyPatch.context() as patch:
        patch.setattr(reductions, "cuts_itself", lambda: False)
        for name, reduction in {**reductions.COMPRESSIONS, "adasum": adasum}.items():
            numbers = torch.full((3,), float(hvd.rank()))
            wait_until(InFlight(reduction(numbers, [3], name, strategy.world)).advance)
            reduced[name] = numbers.tolist()
    with pytest.MonkeyPatch.context() as patch:  # three hosts, the second with ranks of both groups
        host = SimpleNamespace(nodename=f"node{(hvd.rank() + 1) // 2}")
        patch.setattr(os, "uname", lambda: host)
        there = HorovodStrategy(process_sets=[[0, 2], [1, 3]])
    on_hosts = pl.Trainer(strategy=there, accelerator="cpu", logger=False)
    hvd.barrier()  # when one rank ends, Horovod ends for all
    return {
        "ranks": (run.world_size, rank, strategy.local_rank), "rows": measured["sum"],
        "weight": model.net[0].weight.detach(), "own": own, "all": gathered.tolist(),
        "reduced": reduced, "place": (on_hosts.local_rank, on_hosts.node_rank),
    }  # fmt: skip


def one_group() -> list[int]:
    strategy = HorovodStrategy(process_sets=[list(range(SIZE))])
    return strategy.all_gather(torch.tensor(strategy.global_rank)).tolist()


def test_a_group_of_all_ranks(launch_anew: Callable) -> None:
    assert launch_anew(one_group, 2) == [[0, 1]] * 2
    with pytest.raises(MisconfigurationException, match="each of the 1 ranks must be in exactly"):
        HorovodStrategy(process_sets=[[1]])
    assert HorovodStrategy(process_sets=[[0]]).world_size == 1


def test_process_sets_train_apart(launch_anew: Callable) -> None:
    ranks = launch_anew(two_groups, 4)
    assert [rank["ranks"] for rank in ranks] == [(2, 0, 0), (2, 0, 0), (2, 1, 1), (2, 1, 1)]
    assert [rank["all"] for rank in ranks] == [[0, 2], [1, 3], [0, 2], [1, 3]]
    assert [rank["own"] for rank in ranks] == [2, 3, 2, 3]
    # Each group counts hosts from its own first: Lightning may prepare data where both are 0.
    assert [rank["place"] for rank in ranks] == [(0, 0), (0, 0), (0, 1), (0, 1)]
    for index, rank in enumerate(ranks):
        group = index % 2  # Adasum: of 0 and 2, and (1 - 9 / 6) 1 + (1 - 9 / 54) 3
        sums = {name: [2.0 + 2 * group] * 3 for name in ("none", "fp16", "bf16")}
        assert rank["reduced"] == {**sums, "adasum": pytest.approx([2.0] * 3)}
    assert [rank["rows"] for rank in ranks] == [9] * 4
    assert torch.equal(ranks[0]["weight"], ranks[2]["weight"])
    assert torch.equal(ranks[1]["weight"], ranks[3]["weight"])
    assert not torch.equal(ranks[0]["weight"], ranks[1]["weight"])


class Updates(Net):
    """Metrics that are updated in a test, and asked for when the Trainer has returned."""

    def __init__(self) -> None:
        super().__init__()
        self.count, self.of_rank_1, self.undefined = SumMetric(), SumMetric(), Undefined()
        several = {"first": Undefined(), "mean": MeanMetric(), "sum": SumMetric()}
        self.several = MetricCollection({**several, "total": SumMetric()})

    def test_step(self, batch: list[Tensor], batch_idx: int) -> None:
        self.count.update(len(batch[0]))
        self.several.update(batch[0])
        self.undefined.update(batch[0])
        if RANK == SIZE - 1:
            self.of_rank_1.update(7)

    validation_step = test_step


class Undefined(SumMetric):
    def compute(self) -> Tensor:
        raise ValueError("too few values")


def read_after_evaluations() -> dict[str, list[float]]:
    model, batches, read = Updates(), DataLoader(samples(9), 2), {}
    for name in ("test", "validate"):
        getattr(trainer("horovod"), name)(model, batches)
        metrics = (model.count, model.of_rank_1, *list(model.several.values())[1:])
        # One rank may ask by itself: it waits for nobody.
        read[name] = [float(metric.compute()) for metric in metrics] if RANK == 0 else []
        with pytest.raises(ValueError, match="too few values"):
            model.undefined.compute()
        for metric in (model.count, model.of_rank_1, model.several):
            metric.reset()  # not the one that could not be computed: it goes on
    return read


def test_metrics_that_nobody_has_computed_are_those_of_all_ranks(launch: Callable) -> None:
    read, _ = launch(read_after_evaluations, 2)
    features = samples(9).tensors[0]
    expected = pytest.approx(
        [9, 21, float(features.mean()), *[float(features.sum())] * 2], rel=1e-5
    )
    assert read["test"] == read["validate"] == expected


def share_of_webdataset() -> tuple[Any, ...]:
    from webdataset.utils import pytorch_worker_info

    strategy = HorovodStrategy()
    assert strategy.global_rank == RANK
    return pytorch_worker_info()[:2]


def test_webdataset_finds_its_rank(launch: Callable) -> None:
    """Its split_by_node, which asks the environment; each rank read all shards."""
    assert launch(share_of_webdataset, 2) == [(0, 2), (1, 2)]


class Holds(Net):
    """Metrics where torch does not look for modules."""

    def __init__(self) -> None:
        super().__init__()
        self.held = {"rows": SumMetric(), "more": [MetricCollection({"mean": MeanMetric()})]}
        self.held["itself"] = self.held

    def validation_step(self, batch: list[Tensor], batch_idx: int) -> None:
        self.held["rows"].update(len(batch[1]))
        self.held["more"][0].update(batch[0])

    def on_validation_epoch_end(self) -> None:
        self.log("rows", self.held["rows"].compute())
        self.log_dict(self.held["more"][0].compute())


def measure_held() -> list[tuple[float, float]]:
    model, run = Holds(), trainer("horovod")
    (measured,) = run.validate(model, DataLoader(samples(9), 4), verbose=False)
    left = [metric.dist_sync_fn for metric in metrics_of(model)]
    assert left == [None, None], left  # a single process may go on with it
    return [(measured["rows"], measured["mean"])]


def test_metrics_in_dicts_and_lists_are_those_of_all_ranks(launch: Callable) -> None:
    expected = float(samples(9).tensors[0].mean())
    for ((rows, mean),) in launch(measure_held, 2):
        assert rows == 9 and mean == pytest.approx(expected, rel=1e-6)


class CountsSteps(Measured):
    """For a schedule, say; asked for as early as in the sanity check."""

    def on_validation_epoch_start(self) -> None:
        self.steps = self.trainer.estimated_stepping_batches


def train_counted() -> list[tuple[str, Tensor]]:
    results = []
    for kind in (Measured, CountsSteps):
        run, model = trainer("horovod", num_sanity_val_steps=1), kind()
        pl.seed_everything(1)
        data = DataLoader(samples(9), batch_size=4, shuffle=True)
        run.fit(model, data, DataLoader(samples(8), batch_size=4))
        sampler = type(run.train_dataloader.batch_sampler).__name__
        results.append((sampler, model.net[0].weight.detach()))
    return results


def test_steps_that_are_counted_early_are_those_of_training(launch: Callable) -> None:
    for (sampler, weight), (counted_sampler, counted) in launch(train_counted, 2):
        assert sampler == counted_sampler == "BatchSampler"
        assert torch.equal(weight, counted)


class Saves(Callback):
    """The module after each batch, as where a GPU is behind."""

    def __init__(self) -> None:
        self.pending: list[bool] = []

    def on_train_start(self, run: pl.Trainer, model: pl.LightningModule) -> None:
        run.strategy._is_ahead = True

    def on_train_batch_end(self, run: pl.Trainer, model: pl.LightningModule, *_: Any) -> None:
        self.pending.append(run.strategy.world.deferred_check is not None)
        torch.save(model, io.BytesIO())


def save_between_steps() -> list[bool]:
    saves, model = Saves(), Net()
    model.metric = SumMetric()
    trainer("horovod", callbacks=[saves], max_epochs=1).fit(model, loader())
    return saves.pending


def test_a_module_with_metrics_can_be_saved_between_steps(launch: Callable) -> None:
    for pending in launch(save_between_steps, 2):
        assert any(pending)


def shuffled() -> list[list[float]]:
    """The global batches of Lightning's own sampler, which shuffles."""
    pl.seed_everything(5)
    run, model = trainer("horovod", max_epochs=1), Remembers()
    run.fit(model, DataLoader(samples(), batch_size=GLOBAL_BATCH // SIZE, shuffle=True))
    return [everyones(run, [batch]) for batch in model.seen]


def test_global_batches_do_not_depend_on_the_number_of_ranks(launch: Callable) -> None:
    (one,), two = launch(shuffled, 1), launch(shuffled, 2)
    assert two[0] == two[1] == one
    assert one[0] != sorted(samples().tensors[0][:8, 0].tolist())

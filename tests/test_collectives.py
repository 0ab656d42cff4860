"""World and its collectives on two ranks, and who waits in them."""

from __future__ import annotations

import ctypes
import os
import random
import re
import sys
import threading
import time
from collections.abc import Callable
from pathlib import Path
from types import SimpleNamespace
from typing import Any

import horovod.torch as hvd
import pytest
import torch

from strategies import HorovodStrategy
from strategies.collectives import longest_pause, wait_for_operations, wait_until
from tests.conftest import run


def collectives() -> dict[str, Any]:
    """The strategy's collectives, under inference mode too, with ragged and empty tensors."""
    strategy = HorovodStrategy()
    rank = hvd.rank()
    with torch.inference_mode():
        inference = torch.tensor([1.0, 5.0]) * (rank + 1)
        gathered = strategy.all_gather(inference)
        reduced = {op: strategy.reduce(inference, reduce_op=op) for op in ("mean", "sum", "max")}
    odd = {
        str(dtype): strategy.all_gather(torch.tensor(rank, dtype=dtype))
        for dtype in (torch.bool, torch.bfloat16, torch.int16, torch.float64, torch.uint16,
                      torch.uint32, torch.uint64, torch.float8_e4m3fn, torch.float8_e5m2)
    }  # fmt: skip
    mine = torch.arange(20.0).half() * (rank + 1)
    with pytest.MonkeyPatch.context() as patch:
        patch.setattr("strategies.collectives.MOST_BYTES", 7)
        strategy.world.broadcast([mine], root=1)
        pieces = strategy.broadcast({"mine": mine, "of": f"rank {rank}"}, src=1)
    gradient = torch.ones(2, requires_grad=True)
    (strategy.all_gather(gradient * (rank + 1), sync_grads=True) ** 2).sum().backward()
    strided = torch.ones(2, 3, requires_grad=True)  # whose gradient comes back transposed
    weights = torch.arange(12.0).reshape(2, 2, 3)
    gathered_strided = strategy.all_gather(strided, sync_grads=True)
    (gathered_strided.transpose(0, 1) * weights).sum().backward()
    return {
        "gathered": gathered, "reduced": reduced, "odd": odd, "inference": inference,
        "ragged": strategy.world.gather(torch.full((rank, 2), rank)),
        "empty": [tuple(each.shape) for each in strategy.world.gather(torch.zeros(0, rank + 3))],
        "integer": strategy.reduce(torch.tensor(rank * 3), reduce_op="mean"),
        "digits": [
            strategy.reduce(value, reduce_op="sum").item()
            for value in (torch.tensor(2**40 + 1), torch.tensor(1 + 2**-40, dtype=torch.float64))
        ],
        "broadcast": strategy.broadcast({"from": rank}, src=1),
        "all": strategy.reduce_boolean_decision(rank == 0, all=True),
        "any": strategy.reduce_boolean_decision(rank == 0, all=False),
        "transposed": strategy.reduce(torch.arange(6.0).reshape(2, 3).T, reduce_op="sum"),
        "gradient": gradient.grad, "ranks": [strategy.local_rank, strategy.node_rank],
        "pieces": pieces, "strided": strided.grad,
    }  # fmt: skip


def test_collectives(launch: Callable) -> None:
    ranks = launch(collectives, 2)
    for index, rank in enumerate(ranks):
        assert rank["gathered"].tolist() == [[1, 5], [2, 10]]
        assert rank["inference"].tolist() == [1.0 * (index + 1), 5.0 * (index + 1)]
        reduced = {op: value.tolist() for op, value in rank["reduced"].items()}
        assert reduced == {"mean": [1.5, 7.5], "sum": [3, 15], "max": [2, 10]}
        for dtype, value in rank["odd"].items():
            assert (str(value.dtype), value.double().tolist()) == (dtype, [0, 1])
        assert [t.shape for t in rank["ragged"]] == [(0, 2), (1, 2)]
        assert rank["empty"] == [(0, 3), (0, 4)]
        assert rank["integer"].item() == 1.5
        assert rank["digits"] == [2**41 + 2, 2 + 2**-39]  # which float32 has not
        assert rank["broadcast"] == {"from": 1}
        assert rank["pieces"]["mine"].tolist() == [2.0 * value for value in range(20)]
        assert rank["pieces"]["of"] == "rank 1"
        assert (rank["all"], rank["any"]) == (False, True)
        assert rank["ranks"] == [index, 0]
        # d/dx of the sum over ranks of (x_r (r+1))^2, which both ranks compute: 2 * 2 x (r+1)^2
        assert rank["gradient"].tolist() == [4.0 * (index + 1) ** 2] * 2
        assert rank["transposed"].tolist() == [[0, 6], [2, 8], [4, 10]]
        # Of both ranks, from what stands at this rank's place.
        weights = torch.arange(12.0).reshape(2, 2, 3)
        assert torch.equal(rank["strided"], 2 * weights[:, index])


def sums_in_any_order() -> int:
    """Operations that each rank begins in an order and at times of its own, some of them with other
    shapes than before; how many gave the sum of all ranks."""
    hvd.init()
    rank, size = hvd.rank(), hvd.size()
    draws, right = random.Random(rank), 0
    for step in range(12):
        names = [f"sum {number}" for number in range(70)]  # more than an integer has bits
        handles = {}
        for name in draws.sample(names, len(names)):
            if draws.random() < 0.02:
                time.sleep(0.01 * draws.random())
            mine = torch.full((3 + step // 4,), float(rank + 1))
            handles[name] = hvd.allreduce_async(mine, op=hvd.Sum, name=name)
        total = torch.full((3 + step // 4,), size * (size + 1) / 2)
        right += sum(hvd.synchronize(handles[name]).equal(total) for name in names)
    return right


def test_ranks_agree_on_what_all_of_them_have_begun(launch_anew: Callable) -> None:
    """Also where their number is no power of two: in rounds, in each of which one hears of twice as
    many others (cluster/patches.py)."""
    assert launch_anew(sums_in_any_order, 5) == [12 * 70] * 5


def barrier(file: str) -> bool:
    """Whether rank 1, which comes a second later, has written the file before both leave."""
    strategy = HorovodStrategy()
    if hvd.rank() == 1:
        time.sleep(1)
        Path(file).touch()
    torch.set_default_dtype(torch.bfloat16)  # of which Horovod sends none
    try:
        strategy.barrier()
    finally:
        torch.set_default_dtype(torch.float32)
    return Path(file).exists()


def test_barrier_waits(launch: Callable, tmp_path: Path) -> None:
    assert launch(barrier, 2, file=str(tmp_path / "late")) == [True, True]


def test_who_is_waited_for_is_told() -> None:
    """Also over Gloo, and who is late goes on as if nothing were."""
    code = (
        "import time; from strategies import HorovodStrategy; strategy = HorovodStrategy(); "
        "time.sleep(4 * strategy.global_rank); strategy.barrier()"
    )
    launcher = [sys.executable, "-m", "cluster.horovodrun", "-np", "2", "-H", "localhost:2"]
    done = run([*launcher, sys.executable, "-c", code], HOROVOD_STALL_CHECK_TIME_SECONDS="1")
    message = "Missing ranks:\n[0]<stderr>:1: [allreduce.barrier]"
    assert done.returncode == 0 and message in done.stdout, done.stdout


def wake_ups(**environment: str) -> int:
    """How often Horovod's threads wake up in a second with nothing to do; then some work."""
    os.environ.update(environment)
    strategy = HorovodStrategy()
    strategy.barrier()

    def count() -> int:
        threads = Path("/proc/self/task").glob("[0-9]*")
        others = [thread / "status" for thread in threads if int(thread.name) != os.getpid()]
        matches = [re.search(r"\nvoluntary_ctxt_switches:\s*(\d+)", s.read_text()) for s in others]
        return sum(int(match[1]) for match in matches if match)

    before = count()
    time.sleep(1)
    idle = count() - before
    for _ in range(30):
        time.sleep(0.001)
        strategy.barrier()
    return idle


@pytest.mark.slow
def test_horovod_sleeps_while_there_is_nothing_to_do(launch_anew: Callable) -> None:
    asks_all_the_time = launch_anew(wake_ups, 2, HOROVOD_IDLE_TIME="0")
    # Were a call for work lost, each of the barriers would take ten seconds, and time runs out.
    sleeps = launch_anew(wake_ups, 2, HOROVOD_IDLE_TIME="10000")
    assert 2 * max(sleeps) < min(asks_all_the_time)
    by_default = launch_anew(wake_ups, 2)
    assert 2 * max(by_default) < min(asks_all_the_time)


@pytest.mark.parametrize("ranks, cores, longest", [(1, 4, 1e-4), (4, 4, 1e-4), (32, 2, 1.6e-3)])
def test_who_waits_leaves_a_shared_core_to_others(
    monkeypatch: pytest.MonkeyPatch, ranks: int, cores: int, longest: float
) -> None:
    pauses: list[float] = []
    done = iter([False] * 40 + [True])
    longest_pause.cache_clear()
    with monkeypatch.context() as patch:
        patch.setattr(hvd, "local_size", lambda: ranks)
        patch.setattr(os, "sched_getaffinity", lambda _: set(range(cores)))
        patch.setattr(time, "sleep", pauses.append)
        wait_until(lambda: next(done))
    longest_pause.cache_clear()
    assert len(pauses) == 40
    assert pauses[0] < 1e-4 and max(pauses) == pytest.approx(longest)


def questions(other: bool) -> int:
    """How often this rank asks whether its 30 sums are done, for each of which rank 1 is late.

    Args:
        other: as with a Horovod that is not ours.
    """
    HorovodStrategy()
    library, count = SimpleNamespace(horovod_local_size=lambda: 2), 0

    def done() -> bool:
        nonlocal count
        count += 1
        return bool(hvd.poll(handle))

    for number in range(30):
        time.sleep(0.02 * hvd.rank())
        handle = hvd.allreduce_async(torch.ones(1), name=f"late.{number}", op=hvd.Sum)
        with pytest.MonkeyPatch.context() as patch:
            patch.setattr("strategies.collectives.LONGEST_SLEEP", 60_000_000)
            if other:
                patch.setattr(hvd.mpi_ops._basics, "MPI_LIB_CTYPES", library)
            wait_for_operations(done)
        assert hvd.synchronize(handle) == 2
    return count


def test_who_waits_sleeps_until_an_operation_is_done(launch: Callable) -> None:
    """Was nobody woken, each of the sums would take a minute, and time runs out."""
    assert max(launch(questions, 2, other=False)) <= 2 * 30


def test_of_another_horovod_it_asks_again_and_again(launch: Callable) -> None:
    assert launch(questions, 2, other=True)[0] > 2 * 30


def threads_that_python_met() -> int:
    """Those that Python came to know in 50 reductions, with the one that counts them."""
    HorovodStrategy()
    ids = []
    api = ctypes.pythonapi
    api.PyThreadState_Get.restype = ctypes.c_void_p
    api.PyThreadState_GetID.argtypes = [ctypes.c_void_p]
    api.PyThreadState_GetID.restype = ctypes.c_uint64
    hvd.allreduce(torch.ones(3))
    for _ in range(2):
        thread = threading.Thread(
            target=lambda: ids.append(api.PyThreadState_GetID(api.PyThreadState_Get()))
        )
        thread.start()
        thread.join()
        for _ in range(50):
            hvd.allreduce(torch.ones(3))
    return ids[1] - ids[0]


def test_horovods_thread_is_one_to_python(launch: Callable) -> None:
    """Each time that it was new to Python, a fork could leave a child that never begins."""
    assert launch(threads_that_python_met, 2) == [1, 1]

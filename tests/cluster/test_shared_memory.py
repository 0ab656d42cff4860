"""Ranks of a host sum, and agree, in memory that they share: cluster/shared_memory.h, which Horovod
has."""

from __future__ import annotations

import socket
import subprocess
from pathlib import Path
from typing import Any

import pytest

from cluster import testbed
from tests.cluster.launching import horovodrun, script, told
from tests.conftest import run

MIB = 2**20
# Prints whether the memory is there, what this host's link sent for a sum of 8 MiB, and whether
# sums of some sizes and dtypes (of fewer, with an argument) are right on all ranks, and the same on
# all.
SUM = """
import json, sys
from pathlib import Path
import torch, horovod.torch as hvd
# preload:

def maps():
    return sum("memfd:horovod" in line for line in open("/proc/self/maps"))

def sent():
    file = Path("/sys/class/net/eth0/statistics/tx_bytes")
    return int(file.read_text()) if file.exists() else 0

hvd.init()
ranks, rank = hvd.size(), hvd.rank()
right = True
dtypes = torch.float32, torch.int64, torch.float64, torch.float16, torch.int32
counts = 1, 2**20 + 3, 1000, 2, 7, 3 * 2**20 + 1
few = sys.argv[1:]
for dtype in dtypes[:2] if few else dtypes:
    for count in counts[:3] if few else counts:
        draw = torch.Generator().manual_seed(count)
        parts = torch.randint(0, 9, (ranks, count), generator=draw).to(dtype)
        name = f"{dtype}.{count}"
        right &= torch.equal(hvd.allreduce(parts[rank], op=hvd.Sum, name=name), parts.sum(0))
        most = hvd.allreduce(parts[rank], op=hvd.Max, name=f"max.{name}")
        right &= torch.equal(most, parts.amax(0))
torch.manual_seed(rank)
mixed = hvd.allreduce(torch.randn(300_001), op=hvd.Sum, name="mixed")
right &= len({bytes(t.numpy()) for t in hvd.allgather_object(mixed)}) == 1

numbers = torch.ones(2 * 2**20)
hvd.allreduce_(numbers, op=hvd.Sum, name="link")
hvd.barrier()
before = sent()
hvd.allreduce_(numbers, op=hvd.Sum, name="link")
hvd.barrier()
link, there = sent() - before, maps()
hvd.barrier()  # a rank that shuts down ends Horovod, and so this memory, on all
hvd.shutdown()
print(json.dumps({
    "rank": rank, "ranks": ranks, "right": right, "there": there, "link": link, "left": maps(),
}), flush=True)
"""


def summed(done: subprocess.CompletedProcess[str], ranks: int) -> list[dict[str, Any]]:
    assert done.returncode == 0, done.stdout
    rows = told(done.stdout)
    assert [row["rank"] for row in rows] == list(range(ranks)), done.stdout
    assert all((row["ranks"], row["right"], row["left"]) == (ranks, True, 0) for row in rows), rows
    assert len({row["there"] for row in rows}) == 1, "all ranks have it or none"
    return rows


@pytest.mark.parametrize("ranks", [2, 3])
def test_on_one_host(tmp_path: Path, ranks: int) -> None:
    rows = summed(run(horovodrun("-np", str(ranks), *script(tmp_path, SUM))), ranks)
    assert rows[0]["there"] == 1


def test_a_host_sends_the_buffer_once_whatever_its_ranks(
    hosts: list[testbed.Node], tmp_path: Path
) -> None:
    """A ring of 4 ranks on 2 hosts would send it 1.5 times, one of 8 ranks 1.75 times."""
    command = horovodrun("-H", "node1:2,node2:2", *script(tmp_path, SUM))
    rows = summed(run(hosts[0].command(*command)), 4)
    assert rows[0]["there"] == 1
    assert all(8 * MIB < row["link"] < 9.5 * MIB for row in rows), rows
    rows = summed(run(hosts[0].command(*command, "few"), HOROVOD_SHARED_MEMORY="0"), 4)
    assert rows[0]["there"] == 0
    assert all(12 * MIB < row["link"] < 14 * MIB for row in rows), rows


ALONE = (
    """if [ $HOROVOD_RANK = 1 ]; then exec unshare --pid --fork --mount-proc "$@"; fi; exec "$@" """
)
UNWILLING = """if [ $HOROVOD_RANK = 1 ]; then export HOROVOD_SHARED_MEMORY=0; fi; exec "$@" """


@pytest.mark.parametrize(
    ("where", "first"),
    [
        ("node1:2,node2:1", ""),
        ("node1:1,node2:1", ""),
        ("node1:2", ALONE),
        ("node1:2,node2:2", UNWILLING),
    ],
    ids=["uneven hosts", "a rank a host", "a container a rank", "switched off on one rank"],
)
def test_without_it_ranks_sum_as_ever(
    hosts: list[testbed.Node], tmp_path: Path, where: str, first: str
) -> None:
    job = ["sh", "-c", first, "sh"] if first else []
    command = horovodrun("-H", where, *job, *script(tmp_path, SUM), "few")
    rows = summed(run(hosts[0].command(*command)), sum(int(each[-1]) for each in where.split(",")))
    assert rows[0]["there"] == 0


SETS = """
import json, torch, horovod.torch as hvd
# preload:
sets = [hvd.ProcessSet(ranks) for ranks in ([0, 1], [0, 2], [1, 2, 3])]
hvd.init(process_sets=sets)
rank, sums = hvd.rank(), []
for each in sets:
    if each.included():
        number = torch.full((5,), 2.0**rank)
        sums.append(int(hvd.allreduce(number, op=hvd.Sum, name="sum", process_set=each)[4]))
there = sum("memfd:horovod" in line for line in open("/proc/self/maps"))
hvd.barrier()
print(json.dumps({"rank": rank, "size": hvd.size(), "sums": sums, "there": there}), flush=True)
"""


def test_of_a_set_of_ranks(hosts: list[testbed.Node], tmp_path: Path) -> None:
    """All ranks have such memory, and a set of those of one host; a set with a rank on each host
    needs none, and one with more ranks on a host than on another has none."""
    command = horovodrun("-H", "node1:2,node2:2", *script(tmp_path, SETS))
    done = run(hosts[0].command(*command))
    assert done.returncode == 0, done.stdout
    rows = told(done.stdout)
    assert [(row["size"], row["sums"], row["there"]) for row in rows] == [
        (4, [3, 5], 2), (4, [3, 14], 2), (4, [5, 14], 1), (4, [14], 1),
    ]  # fmt: skip


# Sums of many tensors, whose bits are many numbers, which ranks hand over in orders of their own,
# some late, and later with other sizes; then prints how many frames left for other ranks while they
# agreed on, and summed, one number at a time, and the least bytes that a connection may buffer.
AGREE = """
import contextlib, json, os, random, socket, time
from pathlib import Path
os.environ["HOROVOD_CACHE_CAPACITY"] = "2000"
import torch, horovod.torch as hvd
# preload:

def frames():
    folders = Path("/sys/class/net").glob("*/statistics/tx_packets")
    return sum(int(file.read_text()) for file in folders)

def buffers():
    for file in os.listdir("/proc/self/fd"):
        with contextlib.suppress(OSError), socket.socket(fileno=os.dup(int(file))) as each:
            if each.family == socket.AF_INET and each.type == socket.SOCK_STREAM:
                each.getpeername()
                yield each.getsockopt(socket.SOL_SOCKET, socket.SO_SNDBUF)

hvd.init()
ranks, rank, right = hvd.size(), hvd.rank(), True
order = list(range(1000))
for turn, size in enumerate((1, 1, 2, 1)):
    random.Random(f"{rank} {turn}").shuffle(order)
    handles = {}
    for place, number in enumerate(order):
        if place in (50, 700) and rank == turn % ranks:
            time.sleep(0.2)
        tensor = torch.full((size if number % 100 == 0 else 1,), number + rank)
        handles[number] = hvd.allreduce_async(tensor, op=hvd.Sum, name=f"tensor.{number}")
    for number, handle in handles.items():
        right &= bool((hvd.synchronize(handle) == ranks * number + sum(range(ranks))).all())

one = torch.ones(1)
for turn in range(101):
    hvd.allreduce_(one, op=hvd.Average, name="one")
    if turn == 0:
        before = frames()
row = {"rank": rank, "ranks": ranks, "right": right, "sent": frames() - before}
print(json.dumps({**row, "buffer": min(buffers(), default=-1)}), flush=True)
"""


@pytest.mark.parametrize(
    ("where", "shared", "least", "most"),
    [
        ("node1:3", "1", 0, 100),
        ("node1:3", "0", 600, 1e9),
        ("node1:2,node2:2", "1", 400, 4000),
        ("node1:3,node2:2", "1", 400, 1e9),
    ],
    ids=["one host", "without it", "two hosts", "uneven hosts"],
)
def test_ranks_agree(
    hosts: list[testbed.Node], tmp_path: Path, where: str, shared: str, least: int, most: float
) -> None:
    """On one host without a word to each other; of two, a rank with its like of the other."""
    ranks = sum(int(each[-1]) for each in where.split(","))
    command = horovodrun("-H", where, *script(tmp_path, AGREE))
    done = run(hosts[0].command(*command), HOROVOD_SHARED_MEMORY=shared, timeout=100)
    assert done.returncode == 0, done.stdout
    rows = told(done.stdout)
    assert [(row["rank"], row["ranks"], row["right"]) for row in rows] == [
        (rank, ranks, True) for rank in range(ranks)
    ]
    assert all(least <= row["sent"] <= most for row in rows), rows
    with socket.socket() as fresh:
        as_ever = fresh.getsockopt(socket.SOL_SOCKET, socket.SO_SNDBUF)
    assert all(row["buffer"] >= as_ever for row in rows), rows

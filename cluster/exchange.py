"""Do processes hear each other, and how fast? Messages between two ranks, and timed all-reduces.

    make hello HOSTS=node1:2,node2:2
    horovodrun -np 2 -H node1:1,node2:1 python -m cluster.exchange

Each rank says who it is. Rank 0 sends two messages to the last rank: a blocking one, and a
non-blocking one, during which it has time for other things. At its end rank 0 prints a line of
JSON: what moved the data, and as medians the latency of 4 bytes and the bus bandwidth of 16 MiB
(bytes x 2 (n - 1) / n / seconds).

Horovod has no send and receive. Instead there is an all-to-all in which one rank has something for
another, and no other rank has anything; a message to all is a broadcast. What MPI calls
non-blocking is each operation's ..._async, which returns a handle to poll or to wait for.
"""

from __future__ import annotations

import json
import os
import statistics
import sys
import time
from typing import Any

import horovod.torch as hvd
import torch

SMALL, LARGE = 50, 8  # repetitions of each size, after one that is not counted
LARGE_BYTES = 16 << 20


def device_of_rank() -> str:
    """The device of this rank's data: its GPU where Horovod has NCCL, else the CPU."""
    if not (torch.cuda.is_available() and hvd.nccl_built()):
        return "cpu"
    torch.cuda.set_device(hvd.local_rank() % torch.cuda.device_count())
    return "cuda"


def operations(device: str) -> str:
    if device == "cuda":
        return "NCCL"
    return "MPI" if hvd.mpi_built() and hvd.mpi_enabled() else "Gloo"


def wait(handle: int) -> Any:
    while not hvd.poll(handle):
        time.sleep(1e-5)  # hvd.synchronize alone would occupy a core that others need
    return hvd.synchronize(handle)


def seconds(count: int, repetitions: int, device: str) -> float:
    """Median time of an all-reduce of `count` float32."""
    numbers = torch.ones(count, device=device)
    times = []
    for _ in range(repetitions + 1):
        start = time.perf_counter()
        total = wait(hvd.allreduce_async(numbers, op=hvd.Sum, name=f"sum.{count}"))
        if device != "cpu":
            torch.cuda.synchronize()
        times.append(time.perf_counter() - start)
        assert float(total[0]) == float(total[-1]) == hvd.size()
    return statistics.median(times[1:])


def send(numbers: torch.Tensor, source: int, target: int) -> int:
    """Start a message from one rank to another. All ranks call it; the handle gives what came."""
    splits = torch.zeros(hvd.size(), dtype=torch.int32)
    if hvd.rank() == source:
        splits[target] = len(numbers)
    mine = numbers if hvd.rank() == source else numbers[:0]
    return hvd.alltoall_async(mine, splits, name=f"from {source} to {target}")


def messages(device: str) -> str:
    """Send from rank 0 to the last rank: a small message, blocking, and a large one, not."""
    last = hvd.size() - 1
    received, _ = hvd.synchronize(send(torch.full((4,), 7.0, device=device), 0, last))
    assert received.tolist() == ([7.0] * 4 if hvd.rank() == last else [])
    handle, turns = send(torch.full((LARGE_BYTES // 4,), 8.0, device=device), 0, last), 0
    while not hvd.poll(handle):
        time.sleep(1e-5)  # stands for other work
        turns += 1
    received, _ = hvd.synchronize(handle)
    assert received.sum() == (8 * LARGE_BYTES // 4 if hvd.rank() == last else 0)
    return (
        f"blocking     16 bytes from rank 0 to rank {last}, which waited for them\n"
        f"non-blocking {LARGE_BYTES >> 20} MiB from rank 0 to rank {last}, during which rank 0 had "
        f"{turns} turns for other things"
    )


def shares_gpu(device: str) -> str:
    """Which ranks share a GPU, which NCCL would refuse without naming them; empty if none do."""
    uuid = str(torch.cuda.get_device_properties("cuda").uuid) if device == "cuda" else ""
    first: dict[tuple[str, str], int] = {}
    ranks = hvd.allgather_object((os.uname().nodename, uuid), name="gpus")
    for rank, (host, gpu) in enumerate(ranks):
        other = first.setdefault((host, gpu), rank)
        if gpu and other != rank:
            return (
                f"ranks {other} and {rank} have the same GPU of {host}: a rank needs its own; take "
                "fewer (NP=, HOSTS=), or none: CUDA_VISIBLE_DEVICES= make ..."
            )
    return ""


def main() -> None:
    torch.set_num_threads(1)
    hvd.init()
    rank, size = hvd.rank(), hvd.size()
    device = device_of_rank()
    device_name = torch.cuda.get_device_name() if device == "cuda" else "CPU"
    print(
        f"rank {rank} of {size} is rank {hvd.local_rank()} on {os.uname().nodename}: {device_name}",
        flush=True,
    )
    if shared := shares_gpu(device):
        if rank == 0:
            print(f"error: {shared}", file=sys.stderr, flush=True)
        hvd.shutdown()
        sys.exit(2)
    # There and back: all ranks get rank 0's message, and it gets their answers.
    message = hvd.broadcast_object(
        {"from": os.uname().nodename} if rank == 0 else {}, 0, name="hello"
    )
    answers = hvd.allgather_object([rank, os.uname().nodename, message["from"]], name="answers")
    assert [answer[0] for answer in answers] == list(range(size))
    assert {answer[2] for answer in answers} == {answers[0][1]}
    report = messages(device)
    small, large = seconds(1, SMALL, device), seconds(LARGE_BYTES // 4, LARGE, device)
    if rank == 0:
        results = {
            "operations": operations(device),
            "latency_us": round(small * 1e6),
            "bus_bandwidth_mb_s": round(LARGE_BYTES * 2 * (size - 1) / size / large / 1e6),
            "hosts": [answer[1] for answer in answers],
        }
        print(report)
        print(
            f"all-reduce   {results['operations']}: the sum over {size} ranks is right; latency "
            f"{results['latency_us']:,} µs, bus bandwidth {results['bus_bandwidth_mb_s']:,} MB/s"
        )
        print(json.dumps(results), flush=True)
    hvd.shutdown()


if __name__ == "__main__":
    main()

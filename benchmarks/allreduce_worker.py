"""One rank of benchmarks/allreduce.py: all-reduces of several sizes, timed.

    horovodrun -np 2 -H node1:1,node2:1 python -m benchmarks.allreduce_worker '{"sizes": [4096],
        "repeats": 9}'

Rank 0 prints its progress, and a line of JSON for each repetition. As in training, Horovod is set
up by the strategy, operations are named and in place, and each tensor goes by itself; on GPUs by
NCCL, else by Gloo or MPI.
"""

from __future__ import annotations

import json
import socket
import sys
import time
from collections.abc import Iterator
from typing import Any

import horovod.torch as hvd
import torch

from cluster.exchange import device_of_rank, operations, shares_gpu, wait
from cluster.probe import memory
from strategies.environment import initialize

PROCESS_BYTES = 500 * 2**20  # what a rank needs besides its numbers
# Seconds, two cycles of Horovod: an operation right after another would wait for the next cycle.
PAUSE = 2e-3


def lacking_memory(largest: int, device: str) -> str:
    """Why the numbers of this host's ranks do not fit into memory; empty if they do."""
    available = memory() << 20
    # Beside its numbers a rank on the CPU has only what is on its way, 16 MiB at most.
    needed = hvd.local_size() * (PROCESS_BYTES + (largest if device == "cpu" else 0))
    if device == "cuda":
        free = torch.cuda.mem_get_info()[0]
        if free < 2 * largest:
            return f"a GPU has {free / 2**30:.1f} GiB free, {2 * largest / 2**30:.1f} are needed"
    if available < needed:
        gib = f"{needed / 2**30:.1f} GiB, {available / 2**30:.1f} are free"
        return f"{hvd.local_size()} ranks need {gib}"
    return ""


def once(numbers: torch.Tensor, device: str, pause: float) -> float:
    """Seconds from the start of an all-reduce until this rank has the sum."""
    count = numbers.numel()
    numbers.fill_(1)
    # The ranks begin together: the time of one must not contain another's delay.
    wait(hvd.allreduce_async(torch.zeros(1), name="together", op=hvd.Sum))
    time.sleep(pause)
    if device == "cuda":
        torch.cuda.synchronize()
    begun = time.perf_counter()
    wait(hvd.allreduce_async_(numbers, name=f"sum.{count}", op=hvd.Sum))
    if device == "cuda":
        torch.cuda.synchronize()
    seconds = time.perf_counter() - begun
    if not float(numbers[0]) == float(numbers[-1]) == hvd.size():
        raise RuntimeError(f"a sum of {count} ones over {hvd.size()} ranks is wrong")
    return seconds


def measure(
    sizes: list[int], repeats: int, device: str, pause: float = PAUSE
) -> Iterator[list[float]]:
    """For each repetition the seconds of all sizes, those of the slowest rank.

    The slowest counts because training goes on only when the last rank has the sum. Sizes take
    turns, each repetition begins with another size, and the first repetition is left out. All ranks
    rest for `pause` seconds before each all-reduce.
    """
    numbers = torch.ones(max(sizes) // 4, device=device)
    times = torch.zeros(len(sizes))
    for repetition in range(repeats + 1):
        for turn in range(len(sizes)):
            index = (turn + repetition) % len(sizes)
            times[index] = once(numbers[: sizes[index] // 4], device, pause)
        if hvd.rank() == 0:
            label = "warm-up" if repetition == 0 else f"repetition {repetition} of {repeats}"
            print(f"{label}: {len(sizes)} sizes up to {max(sizes):,} bytes", flush=True)
        slowest = hvd.allreduce(times, name="times", op=hvd.Max)
        if repetition:
            yield [round(seconds, 9) for seconds in slowest.tolist()]


def answers(options: dict[str, Any]) -> Iterator[dict[str, Any]]:
    """What each repetition measured, or the "error" that kept all ranks from it."""
    device = device_of_rank()
    if problem := shares_gpu(device):
        yield {"error": problem}
        return
    shortages = hvd.allgather_object(
        (socket.gethostname(), lacking_memory(max(options["sizes"]), device)), name="memory"
    )
    for host, reason in shortages:
        if reason:
            yield {"error": f"{host}: {reason}: take a smaller --largest"}
            return
    where = {
        "ranks": [host for host, _ in shortages],
        "operations": operations(device),
        "device": torch.cuda.get_device_name() if device == "cuda" else None,
    }
    for seconds in measure(options["sizes"], options["repeats"], device):
        yield {**where, "seconds": seconds}


def main() -> None:
    torch.set_num_threads(1)
    initialize()
    for answer in answers(json.loads(sys.argv[1])):
        if hvd.rank() == 0:
            print(json.dumps(answer), flush=True)
    hvd.shutdown()


if __name__ == "__main__":
    main()

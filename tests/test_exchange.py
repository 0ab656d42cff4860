"""`make hello`: what it says is what Horovod did."""

from __future__ import annotations

import contextlib
import importlib
import io
import json
import re
import sys
from collections.abc import Callable
from types import SimpleNamespace

import horovod.torch as hvd
import pytest
import torch

from cluster import exchange
from tests.conftest import run


def meet(main: str) -> tuple[object, str]:
    """How it ends for a rank, and what it says, where all ranks of the host find a single GPU."""
    gpu = SimpleNamespace(uuid="GPU-a")
    fakes = {
        "is_available": lambda: True, "device_count": lambda: 1, "set_device": lambda index: None,
        "get_device_name": lambda: "A", "get_device_properties": lambda device: gpu,
    }  # fmt: skip
    output, code = io.StringIO(), None
    with pytest.MonkeyPatch.context() as patch:
        patch.setattr(sys, "argv", ["", '{"sizes": [4096], "repeats": 1}'])
        patch.setattr(hvd, "nccl_built", lambda: True)
        patch.setattr(hvd, "shutdown", lambda: None)  # the ranks are others' too
        for name, function in fakes.items():
            patch.setattr(torch.cuda, name, function)
        with contextlib.redirect_stdout(output), contextlib.redirect_stderr(output):
            try:
                importlib.import_module(main).main()
            except SystemExit as end:
                code = end.code
    return code, output.getvalue()


@pytest.mark.parametrize("main", ["cluster.exchange", "benchmarks.allreduce_worker"])
def test_ranks_that_would_share_a_gpu_are_refused(launch: Callable, main: str) -> None:
    """NCCL says "invalid usage" to that."""
    (first, said), (second, silent) = launch(meet, 2, main=main)
    assert first == second == (2 if main == "cluster.exchange" else None)
    assert re.search("error.*ranks 0 and 1 have the same GPU of .*: a rank needs its own", said)
    assert "same GPU" not in silent


def results() -> str:
    """The line of JSON, where an all-reduce of 4 bytes takes 50 µs and one of 16 MiB 40 ms."""
    output = io.StringIO()
    with pytest.MonkeyPatch.context() as patch:
        patch.setattr(hvd, "shutdown", lambda: None)
        patch.setattr(exchange, "seconds", lambda count, *_: {1: 5e-5, 1 << 22: 0.04}[count])
        with contextlib.redirect_stdout(output):
            exchange.main()
    return output.getvalue().splitlines()[-1]


def test_latency_and_bandwidth_are_told_in_their_units(launch: Callable) -> None:
    """2^24 bytes x 2 (2 - 1) / 2 / 0.04 s."""
    told = json.loads(launch(results, 2)[0])
    assert (told["latency_us"], told["bus_bandwidth_mb_s"]) == (50, 419)


def test_hello_on_three_ranks() -> None:
    done = run(["make", "hello", "NP=3", f"PYTHON={sys.executable}"])
    assert done.returncode == 0, done.stdout
    for rank in range(3):
        assert f"[{rank}]<stdout>:rank {rank} of 3 is rank {rank} on " in done.stdout
    lines = [line for line in done.stdout.splitlines() if line.startswith("[0]<stdout>:")][1:]
    assert "blocking" in lines[0] and "16 MiB from rank 0 to rank 2" in lines[1]
    assert re.search("all-reduce   (Gloo|NCCL): the sum over 3 ranks is right", lines[2])
    result = json.loads(lines[3].partition(":")[2])
    assert len(result["hosts"]) == 3 and result["latency_us"] > 0

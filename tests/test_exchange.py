"""`make hello`: what it says is what Horovod did."""

from __future__ import annotations

import json
import sys

from tests.conftest import run


def test_hello_on_three_ranks() -> None:
    done = run(["make", "hello", "NP=3", f"PYTHON={sys.executable}"])
    assert done.returncode == 0, done.stdout
    for rank in range(3):
        assert f"[{rank}]<stdout>:rank {rank} of 3 is rank {rank} on " in done.stdout
    told = [line for line in done.stdout.splitlines() if line.startswith("[0]<stdout>:")][1:]
    assert ["blocking" in told[0], "16 MiB from rank 0 to rank 2" in told[1]] == [True, True]
    assert "all-reduce   Gloo: the sum over 3 ranks is right" in told[2] or "NCCL" in told[2]
    result = json.loads(told[3].partition(":")[2])
    assert len(result["hosts"]) == 3 and result["latency_us"] > 0

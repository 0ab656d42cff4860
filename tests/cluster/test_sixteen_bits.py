"""Sums in 16 bits over Gloo: cluster/sixteen_bits.h, which Horovod has."""

from __future__ import annotations

from pathlib import Path

import pytest

from cluster import testbed
from tests.cluster.launching import horovodrun, script, told
from tests.conftest import ROOT, run

MIB = 2**20
# Prints whether sums are what torch makes of the same numbers, cut where they leave a host, and
# what this host's link sent for a bucket of 8 MiB.
SUM = """
import json
from pathlib import Path
import torch, horovod.torch as hvd
from strategies.collectives import wait_until
from strategies.environment import initialize
from strategies.reductions import COMPRESSIONS, InFlight
# preload:

def sent():
    return int(Path("/sys/class/net/eth0/statistics/tx_bytes").read_text())

hvd.init()
ranks, rank, inside = hvd.size(), hvd.rank(), hvd.local_size()
inside = 1 if ranks == 3 else inside  # ranks of a host, if those sum first
odd = torch.tensor([torch.nan, torch.inf, -torch.inf, 7e4, 3e38, 1e-8, -1e-40, 0, -0.0, 1 + 2**-9])
wrong = []
for dtype, name in ((torch.bfloat16, "bf16"), (torch.float16, "fp16")):
    for count in (1, 2, 10, 1001, 2**18 + 3, 5 * 2**20 + 1):
        draw = torch.Generator().manual_seed(count)
        numbers = torch.randn(ranks, count, generator=draw)
        numbers[:, : len(odd)] = odd[:count]
        if count > 10:
            numbers[0, :3] = 1  # else nan and infinite on all ranks
        cut = lambda values: values.to(dtype).float()
        hosts = numbers.unflatten(0, (-1, inside)).sum(1)
        total = hosts[0] if len(hosts) == 1 else cut(hosts)[0]
        for host in cut(hosts)[1:]:
            total = total + host
        total = total if len(hosts) == 1 else cut(total)
        mine = hvd.allreduce(numbers[rank], op=hvd.Sum, name=f"{count}@{name}")
        if not torch.equal(mine.nan_to_num(7), total.nan_to_num(7)):
            wrong.append((name, count, int((mine != total).sum())))
whole = torch.full((5,), 1 + 2.0**-20, dtype=torch.float64)
assert hvd.allreduce(whole, op=hvd.Sum, name="whole@bf16")[0] == ranks * whole[0]

world, numbers = initialize(), torch.ones(2 * 2**20)
for _ in range(2):
    hvd.barrier()
    before = sent()
    bucket = InFlight(COMPRESSIONS["bf16"](numbers, [2 * 2**20], "bucket", world))
    wait_until(bucket.advance)
    hvd.barrier()
print(json.dumps({"rank": rank, "ranks": ranks, "wrong": wrong, "link": sent() - before}))
"""


@pytest.mark.parametrize(
    ("where", "ranks", "sent"),
    [
        ("node1:1,node2:1", 2, 4), ("node1:2,node2:2", 4, 4), ("node1:2", 2, 0),
        pytest.param("node1:2,node2:1", 3, 16 / 3, marks=pytest.mark.slow),
    ],
)  # fmt: skip
def test_what_leaves_a_host_is_cut(
    hosts: list[testbed.Node], tmp_path: Path, where: str, ranks: int, sent: float
) -> None:
    """`sent` MiB, and the headers of frames, of a buffer of 8."""
    command = horovodrun("-H", where, *script(tmp_path, SUM))
    done = run(hosts[0].command(*command), PYTHONPATH=str(ROOT))
    assert done.returncode == 0, done.stdout
    rows = told(done.stdout)
    assert [(row["rank"], row["ranks"]) for row in rows] == [(n, ranks) for n in range(ranks)]
    assert [row["wrong"] for row in rows] == [[]] * ranks
    assert all(sent * MIB <= row["link"] < (1.1 * sent + 0.2) * MIB for row in rows), rows

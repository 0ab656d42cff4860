"""The same job under mpirun, where Horovod was built with MPI:

make test MPI=1 ARGS=tests/cluster/test_mpi.py
"""

from __future__ import annotations

import json
import shutil
import sys
from pathlib import Path

import horovod.torch as hvd
import pytest

from cluster import testbed
from cluster.hosts import Host, Refusal
from cluster.mpirun import line
from cluster.ranks import ranks
from tests.conftest import run


class TestLine:
    def test_each_host_has_its_own(self, monkeypatch: pytest.MonkeyPatch) -> None:
        monkeypatch.setenv("NCCL_DEBUG", "INFO")
        monkeypatch.setenv("MY_TOKEN", "dummy")
        hosts = [
            Host("127.0.0.1", 2, gpus=(1, 7), nic="eth1"),
            Host("127.0.0.1", 2, gpus=(0, 1), env={"COLOR": "red"}),
        ]
        words = line(ranks(hosts, 3), ["python", "template.py"])
        first, second = " ".join(words).split(" : ")
        assert "-np 2 -H 127.0.0.1:2" in first and "-x CUDA_VISIBLE_DEVICES=1,7" in first
        assert "-np 1 -H 127.0.0.1:1" in second and "-x CUDA_VISIBLE_DEVICES=0" in second
        assert "-x CUDA_DEVICE_ORDER=PCI_BUS_ID" in first and "-x NCCL_SOCKET_IFNAME==eth1" in first
        assert "COLOR" not in first and "-x COLOR=red" in second
        assert "-x NCCL_DEBUG " in first and "dummy" not in first and "MY_TOKEN" not in first
        assert "btl_tcp_if_include eth1" in first
        assert first.endswith("python template.py") and second.endswith("python template.py")

    def test_hosts_of_different_users(self) -> None:
        hosts = [Host("192.0.2.1", 1, user="ada"), Host("192.0.2.2", 1, user="bob")]
        with pytest.raises(Refusal, match="one user, port and ssh options"):
            line(ranks(hosts), ["true"])


@pytest.mark.skipif(
    not hvd.mpi_built() or not shutil.which("mpirun"), reason="Horovod without MPI, or no mpirun"
)
def test_the_template_trains_under_mpirun(hosts: list[testbed.Node], tmp_path: Path) -> None:
    command = [sys.executable, "-m", "cluster.mpirun", "-H", "node1:2,node2:2", sys.executable]
    command += ["template.py", "trainer.max_epochs=2", f"log_dir={tmp_path}"]
    done = run(hosts[0].command(*command))
    assert done.returncode == 0, done.stdout
    assert "ranks   4: 2 on node1, 2 on node2; strategy horovod over MPI" in done.stdout
    (file,) = tmp_path.glob("*/runs/*/summary.json")
    assert json.loads(file.read_text())["world_size"] == 4

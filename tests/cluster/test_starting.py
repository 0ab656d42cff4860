"""A job across hosts starts, and each rank sees what it should."""

from __future__ import annotations

import json
import os
import re
import resource
import time
from pathlib import Path
from types import SimpleNamespace

import pytest

from cluster import testbed
from cluster.agent import Agent
from cluster.horovodrun import Job, main
from cluster.hosts import Host
from cluster.ranks import ranks
from tests.cluster.conftest import NICS, PYTHON, made
from tests.cluster.launching import (
    SLEEP,
    horovodrun,
    nothing_left,  # noqa: F401
    sleepers,
    started,
    told,
)
from tests.conftest import HOROVODRUN, ROOT, run

TELL = (
    "import os, json, horovod.torch as hvd; hvd.init(); "
    "print(json.dumps({'rank': hvd.rank(), 'size': hvd.size(), 'local_rank': hvd.local_rank(), "
    "'local_size': hvd.local_size(), 'cross_size': hvd.cross_size(), 'cwd': os.getcwd(), "
    "'host': os.uname().nodename, 'environment': dict(os.environ)}))"
)


@pytest.mark.parametrize("slots", [2, pytest.param(4, marks=pytest.mark.slow)])
def test_plain_horovodrun_and_ours_compute_the_same(
    hosts: list[testbed.Node], tmp_path: Path, slots: int
) -> None:
    """The command of the README, on two hosts."""
    job = [PYTHON, "template.py", "trainer.max_epochs=1", "data.batch_size=16"]
    losses = []
    for name, launcher in (("plain", [HOROVODRUN]), ("ours", horovodrun())):
        folder = tmp_path / name
        where = ["-np", str(2 * slots), "-H", f"node1:{slots},node2:{slots}"]
        done = run(hosts[0].command(*launcher, *where, *job, f"log_dir={folder}"))
        assert done.returncode == 0, done.stdout
        (file,) = folder.glob("*/runs/*/summary.json")
        summary = json.loads(file.read_text())
        assert (summary["world_size"], summary["strategy"]) == (2 * slots, "horovod")
        assert summary["hosts"] == {"node1": slots, "node2": slots}
        losses.append(summary["metrics"]["test/loss"])
    assert losses[1] == pytest.approx(losses[0], rel=1e-5)


@pytest.mark.parametrize("strategy", ["horovod", pytest.param("ddp", marks=pytest.mark.slow)])
def test_hosts_whose_interfaces_have_other_names(
    odd_hosts: list[testbed.Node], strategy: str, tmp_path: Path
) -> None:
    file = tmp_path / "hosts.yaml"
    file.write_text(
        f"hosts:\n  node1: {{slots: 1, nic: {NICS[0]}}}\n  node2: {{slots: 1, nic: {NICS[1]}}}"
    )
    job = [PYTHON, "template.py", "trainer.max_epochs=2", f"strategy={strategy}"]
    command = horovodrun("--hostfile", str(file), *job, f"log_dir={tmp_path}")
    done = run(odd_hosts[0].command(*command))
    assert done.returncode == 0, done.stdout
    assert f"ranks   2: 1 on node1, 1 on node2; strategy {strategy}" in done.stdout


def test_each_rank_has_its_own(odd_hosts: list[testbed.Node], tmp_path: Path) -> None:
    """GPU, interface, variables and place, before Horovod is initialized."""
    file = tmp_path / "hosts.yaml"
    file.write_text(
        "hosts:\n  node1: {slots: 2, gpus: [1, 2], env: {COLOR: red}}\n"
        f"  node2: {{slots: 2, gpus: [7, 1], nic: {NICS[1]}}}\n"
    )
    command = horovodrun("-np", "4", "--hostfile", str(file), PYTHON, "-c", TELL)
    done = run(odd_hosts[0].command(*command), NCCL_DEBUG="WARN")
    assert done.returncode == 0, done.stdout
    ranks = told(done.stdout)
    assert [rank["size"] for rank in ranks] == [4] * 4
    assert [rank["local_rank"] for rank in ranks] == [0, 1, 0, 1]
    assert [rank["host"] for rank in ranks] == ["node1", "node1", "node2", "node2"]
    variables = [rank["environment"] for rank in ranks]
    assert [of["CUDA_VISIBLE_DEVICES"] for of in variables] == ["1", "2", "7", "1"]
    assert [of.get("COLOR") for of in variables] == ["red", "red", None, None]
    assert {of["NCCL_DEBUG"] for of in variables} == {"WARN"}
    nics = [NICS[0], NICS[0], NICS[1], NICS[1]]
    for name in ("HOROVOD_GLOO_IFACE", "GLOO_SOCKET_IFNAME"):
        assert [of[name] for of in variables] == nics
    assert [of["NCCL_SOCKET_IFNAME"] for of in variables] == [f"={nic}" for nic in nics]
    assert {of["CUDA_DEVICE_ORDER"] for of in variables} == {"PCI_BUS_ID"}
    assert {rank["cwd"] for rank in ranks} == {str(ROOT)}


@pytest.mark.parametrize(
    ("where", "connections"),
    [("node1:3", [2, 2, 2]), ("node1:1,node2:1", [1, 1]), ("node1:2,node2:1", [4, 3, 3])],
)
def test_ranks_are_connected_once(
    hosts: list[testbed.Node], where: str, connections: list[int]
) -> None:
    """And once more among those of a host, or one of each host, unless these are all; each asks
    the rendezvous once for the addresses of all others."""
    code = (
        "import os, sys, torch, horovod.torch as hvd; "
        "links = lambda: sum('socket:' in os.readlink(link) for link in "
        "[f'/proc/self/fd/{fd}' for fd in os.listdir('/proc/self/fd')] if os.path.exists(link)); "
        "before = links(); hvd.init(); after = links(); "
        "total = hvd.allreduce(torch.ones(1), op=hvd.Sum); "
        "sys.stderr.write(f'rank {hvd.rank()} of {int(total)} has {after - before} links\\n')"
    )  # not to stdout, into whose lines Horovod's thread writes its trace
    command = horovodrun("-H", where, PYTHON, "-c", code)
    done = run(hosts[0].command(*command), HOROVOD_LOG_LEVEL="trace")
    assert done.returncode == 0, done.stdout
    for rank, links in enumerate(connections):
        assert f"rank {rank} of {len(connections)} has {links} links" in done.stdout
        assert f"/global/to_{rank}_of_{len(connections)}\n" in done.stdout
    assert not re.search(r"Send GET request to \S+/\d+\n", done.stdout)


def test_ranks_that_were_connected_find_each_other_again(hosts: list[testbed.Node]) -> None:
    """Not by the addresses that they had before."""
    code = (
        "import torch, horovod.torch as hvd\n"
        "for again in range(6):\n"
        "    hvd.init()\n"
        "    total = hvd.allreduce(torch.ones(1), op=hvd.Sum)\n"
        "    hvd.shutdown()\n"
        "print('summed', int(total), 'in turn', again)"
    )
    command = horovodrun("-H", "node1:2,node2:1", PYTHON, "-c", code)
    done = run(hosts[0].command(*command))
    assert done.returncode == 0 and done.stdout.count("summed 3 in turn 5") == 3, done.stdout


def test_as_many_files_as_may_be_open(hosts: list[testbed.Node]) -> None:
    """Each rank has a connection to all others; a login has few files, and may have more."""
    code = "import resource, horovod.torch as hvd; hvd.init(); print('may open', hvd.size(), "
    code += "resource.getrlimit(resource.RLIMIT_NOFILE)[0] > 18)"
    sshd, files = hosts[1].sshd.pid, resource.RLIMIT_NOFILE
    limits = resource.prlimit(sshd, files)
    resource.prlimit(sshd, files, (18, limits[1]))
    try:
        command = horovodrun("-H", "node1:1,node2:3", PYTHON, "-c", code)
        done = run(hosts[0].command("prlimit", "--nofile=12:", *command))
    finally:
        resource.prlimit(sshd, files, limits)
    assert done.returncode == 0, done.stdout
    assert done.stdout.count("may open 4 True") == 4


def test_no_secret_leaves(hosts: list[testbed.Node], tmp_path: Path) -> None:
    """A token of the launcher is in no command line on any host, in no file, in no rank."""
    token = f"dummy-token-{os.getpid()}"
    command = hosts[0].command(*horovodrun("-H", "node2:2", PYTHON, "-c", SLEEP))
    process = started(command, tmp_path / "log", 2, MY_TOKEN=token, WANDB_API_KEY=token)
    try:
        for entry in Path("/proc").glob("[0-9]*/cmdline"):
            try:
                assert token not in entry.read_bytes().decode(errors="replace")
            except (FileNotFoundError, ProcessLookupError):
                continue
        ranks = sleepers()
        assert len(ranks) == 2
        for pid in ranks:
            assert token not in Path(f"/proc/{pid}/environ").read_bytes().decode()
        for file in [*(ROOT / "logs" / "launches").rglob("*"), tmp_path / "log"]:
            assert not file.is_file() or token not in file.read_text()
    finally:
        process.terminate()
        process.wait(timeout=30)


def test_the_rendezvous_is_the_jobs(hosts: list[testbed.Node], tmp_path: Path) -> None:
    """On the interface towards the hosts only; a PUT without the secret is refused."""
    command = hosts[0].command(*horovodrun("-H", "node1:1,node2:1", PYTHON, "-c", SLEEP))
    process = started(command, tmp_path / "log", 2)
    try:
        environ = Path(f"/proc/{sleepers()[0]}/environ").read_bytes().decode()
        place = dict(word.partition("=")[::2] for word in environ.split("\0"))
        port = place["HOROVOD_GLOO_RENDEZVOUS_PORT"]
        put = (
            "import sys, http.client as h; c = h.HTTPConnection(*sys.argv[1:], timeout=5); "
            "c.request('PUT', '/global/0', b'canary'); print(c.getresponse().status)"
        )
        outside = run(hosts[1].command(PYTHON, "-c", put, "10.77.0.1", port))
        assert outside.stdout.strip() == "403"
        elsewhere = run(hosts[0].command(PYTHON, "-c", put, "127.0.0.1", port))
        assert "ConnectionRefusedError" in elsewhere.stdout
    finally:
        process.terminate()
        process.wait(timeout=30)
    assert "refused a request from 10.77.0.2" in (tmp_path / "log").read_text()


def test_a_missing_folder_ends_the_job(project: Path, tmp_path: Path) -> None:
    for hosts in made(2):
        (tmp_path / "nothing").mkdir()
        hosts[1].shows(tmp_path / "nothing", project.parent)
        command = ["env", "-C", str(project), *horovodrun("-H", "node1,node2", "touch", "ran")]
        done = run(hosts[0].command(*command))
        assert done.returncode == 1
        assert f"node2: there is no folder {project}: make sync HOSTS=node2" in done.stdout
        assert not (Path.home() / "ran").exists()


@pytest.mark.parametrize(
    ("arguments", "words"),
    [
        (["-np", "5", "-H", "node1:2,node2:2", "true"], "NP=5 processes on 4 slots"),
        (["-H", "node1:2,node1:2", "true"], "node1 is there twice"),
        (["-H", "node9:2", "true"], "node9: no such host"),
        (["-H", "node1:1,localhost:1", "true"], "localhost is node1: name it once, as node1:2"),
        (["-H", "10.77.0.2,node2", "true"], "node2 is 10.77.0.2: name it once, as 10.77.0.2:2"),
        (["-H", "node1", "--hostfile", "hosts.yaml", "true"], "give one of them"),
    ],
)
def test_mistakes_are_one_line(hosts: list[testbed.Node], arguments: list[str], words: str) -> None:
    done = run(hosts[0].command(*horovodrun(*arguments)))
    assert done.returncode == 2 and words in done.stdout
    assert len(done.stdout.splitlines()) == 1


def test_what_else_ssh_is_configured_to(tmp_path: Path) -> None:
    """A shared connection, a command and a tunnel of the user's own; jobs do not end together.

    The first ssh would be the master, and the second go through it.
    """
    for hosts in made(2):
        config = tmp_path / "config"
        config.write_text(
            run(hosts[0].command("cat", "/etc/ssh/ssh_config")).stdout
            + f"  ControlMaster auto\n  ControlPath {tmp_path}/%n\n  RemoteCommand true\n"
            + "  LocalForward 127.0.0.1:22220 127.0.0.1:22\n  ExitOnForwardFailure yes\n"
        )
        hosts[0].shows(config, Path("/etc/ssh/ssh_config"))
        line = hosts[0].command(*horovodrun("-H", "node2", PYTHON, "-c", SLEEP))
        first, second = (started(line, tmp_path / name, 1) for name in ("first", "second"))
        first.terminate()
        assert first.wait(timeout=30) == 143
        time.sleep(1)
        assert second.poll() is None, (tmp_path / "second").read_text()
        second.terminate()
        assert second.wait(timeout=30) == 143


def test_the_folder_of_logs_stays(project: Path) -> None:
    """Slurm opens its output there when a job begins, which may be later."""
    (project / "logs").mkdir()
    done = run([PYTHON, "-m", "cluster.horovodrun", "true"], cwd=project)
    assert done.returncode == 0 and (project / "logs").is_dir(), done.stdout
    assert not list(project.glob("logs/launches/*"))


def test_logs_that_lead_nowhere_are_refused(project: Path) -> None:
    """As a link to a scratch disk that is not there."""
    (project / "logs").symlink_to("/nowhere/at/all")
    for module in ("cluster.horovodrun", "cluster.jobs"):
        line = [PYTHON, "-m", module, *["launch"] * (module == "cluster.jobs"), "true"]
        done = run(line, cwd=project, timeout=20)
        assert done.returncode == 2, done.stdout
        assert done.stdout == "error: logs is a link to /nowhere/at/all: make that folder\n"


def test_a_program_that_is_not_there(hosts: list[testbed.Node]) -> None:
    done = run(hosts[0].command(*horovodrun("-H", "node1,node2", "nosuchprogram")))
    assert done.returncode == 2 and "nosuchprogram: No such file" in done.stdout


def test_what_the_launcher_says_of_horovod_goes_to_all_hosts(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    """Not what another launcher has left in the environment."""
    monkeypatch.setenv("HOROVOD_CONTROLLER", "mpi")
    monkeypatch.setenv("NCCL_DEBUG", "INFO")
    hosts = [Host("localhost", 1), Host("192.0.2.1", 1)]
    job = Job(ranks(hosts), ["true"], SimpleNamespace(id="x"), 1.0)
    environments = [job._environment(host) for host in hosts]
    assert [each["HOROVOD_CONTROLLER"] for each in environments] == ["gloo", "gloo"]
    assert environments[0]["PYTHONUNBUFFERED"] == "1"  # what ranks print is seen at once
    assert environments[1]["NCCL_DEBUG"] == "INFO"  # the agent here inherits it


def test_an_interface_that_is_only_in_the_environment() -> None:
    done = run(horovodrun("-H", "localhost:2", PYTHON, "-c", TELL), HOROVOD_GLOO_IFACE="none0")
    assert "localhost: no network interface none0; there are lo" in done.stdout
    assert ": unset HOROVOD_GLOO_IFACE, or give nic in HOSTFILE" in done.stdout
    assert done.returncode != 0 and "SIGABRT" not in done.stdout


def test_an_interface_that_the_host_file_makes_up(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("HOROVOD_GLOO_IFACE", "lo")
    job = {"nic": "none0", "environment": {}}
    with pytest.raises(ValueError, match="no network interface none0; .*: fix nic in HOSTFILE"):
        Agent()._environment(job)


@pytest.mark.parametrize("text", ["nan", "inf", "-1", "1e3", "soon"])
def test_seconds_that_are_none_are_refused(
    text: str, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    monkeypatch.setattr("sys.argv", ["horovodrun", f"--stop-seconds={text}", "true"])
    monkeypatch.setattr("cluster.horovodrun.chosen", lambda _: pytest.fail("refused too late"))
    with pytest.raises(SystemExit) as end:
        main()
    assert end.value.code == 2
    assert f"STOP_SECONDS={text}: give seconds" in capsys.readouterr().err

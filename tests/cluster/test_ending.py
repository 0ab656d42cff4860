"""However a job ends, all of it ends, and the cause is told."""

from __future__ import annotations

import json
import os
import signal
import socket
import subprocess
import time
from pathlib import Path
from types import SimpleNamespace
from typing import Any

import psutil
import pytest

from cluster import testbed
from cluster.agent import LIFE_SECONDS, SILENCE_SECONDS, Agent, descendants
from cluster.horovodrun import GLOO_SECONDS, Job
from cluster.hosts import Host
from cluster.record import birth
from tests.cluster.conftest import PYTHON, made
from tests.cluster.launching import SLEEP, STUBBORN, horovodrun, nothing_left, sleepers, started  # noqa: F401
from tests.conftest import ROOT, run, wait_until


@pytest.mark.parametrize(
    ("line", "status", "words"),
    [
        # What a rank leaves behind keeps its pipe, and the agent, busy: by short lines, for
        # which the agent takes longer than to write them.
        ("yes '' & exit 3", 3, "rank 0 on localhost ended with exit code 3"),
        ("kill -40 $$", 128 + 40, "rank 0 on localhost was killed by signal 40"),
    ],
)
def test_ends_that_are_rare(line: str, status: int, words: str, tmp_path: Path) -> None:
    script = f"[ $HOROVOD_RANK = 1 ] && exec sleep 1000; {line}"
    command = horovodrun("-H", "localhost:2", "sh", "-c", script)
    with open(tmp_path / "log", "w") as log:
        done = subprocess.run(command, cwd=ROOT, stdout=log, stderr=log, timeout=60)
    told = (tmp_path / "log").read_bytes()[-1000:].decode()
    assert done.returncode == status and words in told, told


def test_a_process_may_have_any_name() -> None:
    """The kernel cuts it within a letter: agents that did not read it left all others running."""
    rename = "ctypes.CDLL(None).prctl(15, 'messungen-größe'.encode()[:15], 0, 0, 0)"
    script = f"import ctypes; {rename}; print(flush=True); input()"
    command = [PYTHON, "-c", script]
    with subprocess.Popen(command, stdin=subprocess.PIPE, stdout=subprocess.PIPE) as process:
        assert process.stdout is not None and process.stdout.readline()
        assert b"\xc3)" in Path(f"/proc/{process.pid}/stat").read_bytes()
        assert process.pid in descendants()
        born = birth(process.pid)
        assert born is not None and born.isdecimal()
        process.communicate(b"\n")


def test_a_rank_is_killed(hosts: list[testbed.Node], tmp_path: Path) -> None:
    command = hosts[0].command(*horovodrun("-H", "node1:1,node2:1", PYTHON, "-c", SLEEP))
    process = started(command, tmp_path / "log", 2)
    killed = next(
        pid for pid in sleepers()
        if "HOROVOD_RANK=1\0" in Path(f"/proc/{pid}/environ").read_bytes().decode()
    )  # fmt: skip
    os.kill(int(killed), signal.SIGKILL)
    assert process.wait(timeout=60) == 128 + 9
    assert "rank 1 on node2 was killed by SIGKILL" in (tmp_path / "log").read_text()


def test_a_host_is_cut_off(tmp_path: Path) -> None:
    sooner = (
        "import sys; from cluster import horovodrun as h; h.SILENCE_SECONDS = 12; "
        "sys.exit(h.main())"
    )
    for hosts in made(2):
        job = ["-H", "node1:1,node2:1", PYTHON, "-c", SLEEP]
        command = hosts[0].command(PYTHON, "-c", sooner, *job)
        process = started(command, tmp_path / "log", 2)
        down = ["ip", "-n", hosts[1].namespace, "link", "set", "eth0", "down"]
        subprocess.run(down, check=True)
        assert process.wait(timeout=60) == 1
        told = (tmp_path / "log").read_text()
        assert "node2 has not been heard for" in told and "node2 does not answer" not in told
        wait_until(lambda: not sleepers(), 60, "the end of the rank on node2, by its own agent")


def test_a_job_that_is_suspended_goes_on(tmp_path: Path) -> None:
    """As by scontrol suspend: nobody is heard for longer than anybody may be silent."""
    sooner = (
        "import sys; from cluster import horovodrun as h; h.SILENCE_SECONDS = 6; sys.exit(h.main())"
    )
    job = ["-H", "localhost:2", PYTHON, "-c", SLEEP]
    launcher = started([PYTHON, "-c", sooner, *job], tmp_path / "log", 2)
    everyone = [psutil.Process(launcher.pid), *psutil.Process(launcher.pid).children(True)]
    for process in reversed(everyone):
        process.suspend()
    time.sleep(8)
    everyone[0].resume()
    time.sleep(1)  # the launcher looks before the agent can be heard
    for process in everyone:
        process.resume()
    time.sleep(3)
    assert launcher.poll() is None, (tmp_path / "log").read_text()
    launcher.terminate()
    assert launcher.wait(timeout=30) == 143


def test_a_launcher_that_falls_silent_is_told_of() -> None:
    """Before the ranks end, and so before their ends: to whom may hear it again."""
    with socket.create_server(("127.0.0.1", 0)) as rendezvous:
        status, said = agent_says(rendezvous.getsockname()[1])
    assert status == 1
    assert said[0] == {"error": "the launcher was not heard for 0.5 s: all has ended here"}


def test_a_launcher_is_silent_from_its_last_sign_on(monkeypatch: pytest.MonkeyPatch) -> None:
    """Its pauses do not add up."""
    agent, said = Agent(), list[dict[str, Any]]()
    monkeypatch.setattr(agent, "_say", lambda **what: said.append(what))
    hears, reads = iter([False, True] * 3), iter([b"{}\n", b"{}\n", b""])
    waits = SimpleNamespace(register=lambda *_: None, select=lambda timeout: next(hears))
    patched = {
        "selectors": SimpleNamespace(DefaultSelector=lambda: waits, EVENT_READ=1),
        "os": SimpleNamespace(read=lambda *_: next(reads), _exit=lambda _: None),
        "descendants": list,
    }
    for name, value in patched.items():
        monkeypatch.setattr(f"cluster.agent.{name}", value)
    agent._listen(2 * LIFE_SECONDS)
    assert not said and next(reads, None) is None


def test_a_launcher_that_a_host_does_not_reach_is_told_of() -> None:
    """As behind a firewall that lets ssh through alone; its ranks would wait, and say nothing."""
    with socket.create_server(("127.0.0.1", 0)) as rendezvous:
        port = rendezvous.getsockname()[1]
    status, (told,) = agent_says(port)
    assert status == 0
    assert told["error"].startswith(f"does not reach this host at 127.0.0.1, port {port}, ")
    assert "let it through the firewall here" in told["error"]


def test_an_agent_that_nobody_reads_ends_too() -> None:
    with socket.create_server(("127.0.0.1", 0)) as rendezvous:
        agent = agent_of(rendezvous.getsockname()[1], "yes")
        try:
            assert agent.wait(timeout=30) == 1
        finally:
            agent.kill()
            agent.communicate()


def agent_of(port: int, *command: str) -> subprocess.Popen[str]:
    """An agent whose launcher has this port, and says nothing but what to run."""
    job = {"run": "x", "command": command, "ranks": {"0": {}}, "nic": "lo",
           "environment": {"HOROVOD_GLOO_RENDEZVOUS_PORT": str(port)}, "launcher": "127.0.0.1",
           "gpus": [], "preload": False, "silence": 0.5}  # fmt: skip
    agent = subprocess.Popen(
        [PYTHON, "-m", "cluster.agent"], cwd=ROOT, text=True,
        stdin=subprocess.PIPE, stdout=subprocess.PIPE,
    )  # fmt: skip
    assert agent.stdin is not None
    agent.stdin.write(json.dumps(job) + "\n")
    agent.stdin.flush()
    return agent


def agent_says(port: int) -> tuple[int, list[dict[str, Any]]]:
    """How it ends, and its lines."""
    agent = agent_of(port, "sleep", "60")
    assert agent.stdout is not None
    said = [json.loads(line) for line in agent.stdout if line.startswith("{")]
    return agent.wait(timeout=10), [what for what in said if what]


def test_timeouts_outlast_tcps_next_try(monkeypatch: pytest.MonkeyPatch) -> None:
    """TCP tries again after 0.2, 0.4, ... seconds: 25 after the link went, and then 51."""
    assert GLOO_SECONDS > SILENCE_SECONDS > 0.2 * (2**8 - 1)
    timeout = "HOROVOD_GLOO_TIMEOUT_SECONDS"
    job = Job([SimpleNamespace(rank=rank) for rank in range(3)], [], None, stop_seconds=8)
    monkeypatch.delenv(timeout, raising=False)
    hosts = Host("localhost", 2), Host("192.0.2.1", 1)
    sent = {job._environment(host)[timeout] for host in hosts}
    assert sent == {str(GLOO_SECONDS + 3)}
    monkeypatch.setenv(timeout, "7")
    assert {job._environment(host)[timeout] for host in hosts} == {"7"}


def test_a_rank_that_others_wait_for_at_the_start_is_named() -> None:
    code = (
        "import os, time, horovod.torch as hvd; "
        "time.sleep(60 * int(os.environ['HOROVOD_RANK'])); hvd.init()"
    )
    command = horovodrun("-H", "localhost:2", PYTHON, "-c", code)
    done = run(command, HOROVOD_GLOO_TIMEOUT_SECONDS="3")
    assert done.returncode == 128 + signal.SIGABRT and done.stdout.splitlines()[-1] == (
        "horovodrun: rank 1 on localhost did not come to hvd.init(), and rank 0 on localhost "
        "gave up"
    )


def test_the_end_that_explains_most_is_told() -> None:
    """Of equal ones the first: what is killed may end last, as those that miss it fail at once."""
    job = Job([SimpleNamespace(rank=rank) for rank in range(4)], [], None, stop_seconds=8)
    node, told = SimpleNamespace(host=Host("node1", 4)), []
    for rank, code in enumerate((os.EX_TEMPFAIL, 3, 4, -signal.SIGKILL)):
        job._take(node, {"rank": rank, "exit": code})
        assert job._cause is not None
        told.append((job._status, job._cause[1]))
    assert told == [
        (os.EX_TEMPFAIL, "rank 0 on node1 ended as another rank did"),
        *[(3, "rank 1 on node1 ended with exit code 3")] * 2,
        (128 + 9, "rank 3 on node1 was killed by SIGKILL (out of memory? dmesg tells)"),
    ]


@pytest.mark.parametrize(
    ("rank", "words"),
    [
        (0, "node1: its agent was killed by SIGKILL (out of memory? dmesg tells)"),
        (1, "node2: the connection to it was lost"),
    ],
)
def test_an_agent_is_killed(
    hosts: list[testbed.Node], rank: int, words: str, tmp_path: Path
) -> None:
    command = hosts[0].command(*horovodrun("-H", "node1:1,node2:1", PYTHON, "-c", SLEEP))
    process = started(command, tmp_path / "log", 2)
    agent = next(
        psutil.Process(int(pid)).ppid() for pid in sleepers()
        if psutil.Process(int(pid)).environ()["HOROVOD_RANK"] == str(rank)
    )  # fmt: skip
    os.kill(agent, signal.SIGKILL)
    assert process.wait(timeout=60) == 1
    assert words in (tmp_path / "log").read_text()
    assert not sleepers()


def test_an_ssh_is_cut(hosts: list[testbed.Node], tmp_path: Path) -> None:
    command = hosts[0].command(*horovodrun("-H", "node1:1,node2:1", PYTHON, "-c", SLEEP))
    process = started(command, tmp_path / "log", 2)
    subprocess.run(["pkill", "-P", str(process.pid), "-x", "ssh"], check=True)
    assert process.wait(timeout=60) == 1
    assert "node2: the connection to it was lost" in (tmp_path / "log").read_text()


def test_a_rank_that_aborts_before_others_wait_for_it() -> None:
    code = "import os, horovod.torch as hvd; os.environ['HOROVOD_RANK'] == '1' or os.abort(); "
    done = run(horovodrun("-H", "localhost:2", PYTHON, "-c", f"{code} hvd.init()"))
    told = "horovodrun: rank 0 on localhost was killed by SIGABRT before hvd.init() had begun: "
    told += "where its last lines say HTTP request failed, it did not reach this host"
    assert done.stdout.splitlines()[-1] == f"{told} (make doctor)", done.stdout


def test_a_rank_of_ddp_that_aborts_was_not_to_come_to_horovod() -> None:
    code = "import os; from strategies.ddp import HorovodrunEnvironment as E; e = E(); "
    code += "e.main_port; e.global_rank() and os.abort()"
    done = run(horovodrun("-H", "localhost:2", PYTHON, "-c", code))
    told = "horovodrun: rank 1 on localhost was killed by SIGABRT"
    assert done.stdout.splitlines()[-1].startswith(told), done.stdout
    assert "hvd.init()" not in done.stdout


def test_ranks_that_do_not_listen(hosts: list[testbed.Node], tmp_path: Path) -> None:
    line = horovodrun("--stop-seconds", "1", "-H", "node1:1,node2:1", PYTHON, "-c", STUBBORN)
    process = started(hosts[0].command(*line), tmp_path / "log", 2)
    process.terminate()
    assert process.wait(timeout=60) == 143


def test_the_launcher_is_killed(hosts: list[testbed.Node], project: Path, tmp_path: Path) -> None:
    line = horovodrun("-H", "node1:2,node2:2", PYTHON, "-c", STUBBORN)
    command = hosts[0].command("env", "-C", str(project), *line)
    process = started(command, tmp_path / "log", 4)
    process.kill()
    process.wait(timeout=10)
    wait_until(lambda: not sleepers(), 15, "the end of the ranks")
    assert list(project.glob("logs/launches/*"))
    status = ["env", "-C", str(project), PYTHON, "-m", "cluster.jobs", "status"]
    assert "no runs" in run(hosts[0].command(*status)).stdout

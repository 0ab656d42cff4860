"""Several hosts, made of this one: what is named across hosts is run across hosts."""

from __future__ import annotations

import json
import os
import signal
import subprocess
import time
from pathlib import Path

import pytest

from cluster import testbed
from tests.cluster.conftest import PYTHON
from tests.conftest import HOROVODRUN, ROOT, run, wait_until

if problem := testbed.missing():
    pytest.skip(f"no test hosts: {problem}", allow_module_level=True)


def left(prefix: str) -> list[str]:
    """Namespaces, their files and processes of a test cluster that are still there."""
    namespaces = subprocess.run(["ip", "netns", "list"], capture_output=True, text=True).stdout
    files = [str(path) for path in Path("/etc/netns").glob(f"{prefix}*")]
    return [line for line in namespaces.splitlines() if line.startswith(prefix)] + files


def test_a_users_files_are_given_back(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """Not another user's, nor what links lead to, nor those of a checkout that is not theirs."""
    ours, elsewhere = tmp_path / "checkout", tmp_path / "elsewhere"
    for file in (ours / "logs" / "run", ours / "another", elsewhere):
        file.parent.mkdir(parents=True, exist_ok=True)
        file.touch()
    (ours / "link").symlink_to(elsewhere)
    os.chown(ours / "another", 4321, 4321)
    monkeypatch.setenv("SUDO_UID", "1234")
    monkeypatch.setenv("SUDO_GID", "1235")
    testbed.give_back(ours)
    assert (ours / "logs").lstat().st_uid == 0
    os.chown(ours, 1234, 1235)
    testbed.give_back(ours)
    owners = {str(f.relative_to(ours)): f.lstat().st_uid for f in ours.rglob("*")}
    assert owners == {"logs": 1234, "logs/run": 1234, "link": 1234, "another": 4321}
    assert elsewhere.stat().st_uid == 0 and (ours / "logs").stat().st_gid == 1235


class TestHosts:
    def test_have_names_and_let_each_other_in(self, hosts: list[testbed.Node]) -> None:
        for here in hosts:
            for there in hosts:
                done = run(here.command("ssh", there.name, "hostname"))
                assert (done.returncode, done.stdout.strip()) == (0, there.name)

    def test_share_the_cores(
        self, hosts: list[testbed.Node], monkeypatch: pytest.MonkeyPatch
    ) -> None:
        """Ranks of both have as many threads as a host has cores, where that is one."""
        tell = [PYTHON, "-m", "cluster.horovodrun", "-H", "node1:1,node2:1", "sh", "-c"]
        tell.append("echo threads $OMP_NUM_THREADS.")
        for cores, given, threads in ((1, None, "1"), (8, None, ""), (1, "3", "3")):
            monkeypatch.delenv("OMP_NUM_THREADS", raising=False)
            if given:
                monkeypatch.setenv("OMP_NUM_THREADS", given)
            monkeypatch.setattr(hosts[0], "cores", cores)
            done = run(hosts[0].command(*tell))
            assert done.stdout.count(f"threads {threads}.") == 2, done.stdout

    def test_know_themselves(self, hosts: list[testbed.Node]) -> None:
        """Also by a second address, and where the kernel lets everyone bind to any."""
        names = ["localhost", "node1", "10.77.0.9", "node2"]
        ask = f"from cluster.hosts import Host; print([n for n in {names} if Host(n, 1).is_here])"
        allow, second = "/proc/sys/net/ipv4/ip_nonlocal_bind", "address {} 10.77.0.9/24 dev eth0"
        change = f"echo {{}} > {allow}; ip {second}"
        for number, what in ((1, "add"), (0, "delete")):
            assert run(hosts[0].command("sh", "-c", change.format(number, what))).returncode == 0
            done = run(hosts[0].command(PYTHON, "-c", ask))
            assert done.stdout == f"{names[: 2 + number]}\n"

    def test_leave_nothing(self) -> None:
        bed = testbed.Testbed(2, rate="500mbit")
        with bed as made:
            assert left(bed.prefix)
            for space, device in ((made[1].namespace, "eth0"), (bed.switch, "to-node2")):
                shown = run(["tc", "-n", space, "qdisc", "show", "dev", device]).stdout
                assert "tbf" in shown and "rate 500Mbit" in shown, shown  # in both directions
            servers = [host.sshd for host in made]
        assert not left(bed.prefix)
        assert all(server.poll() is not None for server in servers)

    def test_tell_how_the_command_has_ended(self) -> None:
        command = [PYTHON, str(ROOT / "cluster" / "testbed.py"), "--hosts", "1", "--"]
        assert run([*command, "sh", "-c", "exit $(ssh node1 echo 7)"]).returncode == 7

    def test_that_do_not_answer_are_named(self, monkeypatch: pytest.MonkeyPatch) -> None:
        """Also where a login neither ends nor fails."""
        monkeypatch.setattr(testbed, "ANSWER_SECONDS", 1)
        monkeypatch.setattr(testbed.Node, "command", lambda *_: ["sleep", "30"])
        bed = testbed.Testbed(2)
        with pytest.raises(RuntimeError, match="sshd of node1 does not answer"), bed:
            pass
        assert not left(bed.prefix)

    def test_let_what_runs_there_end(self, tmp_path: Path) -> None:
        """Before it is killed, and also what does not listen."""
        listens = f"trap 'touch {tmp_path}/ended; exit 3' TERM; "
        lasts = "echo; while :; do sleep .1; done"
        bed = testbed.Testbed(1)
        with bed as (host,):
            running = [
                subprocess.Popen(host.command("sh", "-c", script), stdout=subprocess.PIPE)
                for script in (f"{listens}{lasts}", f"trap '' TERM; {lasts}")
            ]
            for process in running:
                assert process.stdout is not None and process.stdout.readline() == b"\n"
        assert [process.wait(10) for process in running] == [3, -signal.SIGKILL]
        assert (tmp_path / "ended").exists() and not left(bed.prefix)

    @pytest.mark.parametrize("number", [signal.SIGINT, signal.SIGTERM])
    def test_leave_nothing_when_interrupted(self, number: signal.Signals) -> None:
        command = [PYTHON, str(ROOT / "cluster" / "testbed.py"), "--", "sleep", "600"]
        process = subprocess.Popen(command, start_new_session=True)
        prefix, sleeping = f"testbed{process.pid}", ["pgrep", "-g", str(process.pid), "-x", "sleep"]
        wait_until(lambda: run(sleeping).returncode == 0, 60, "the command")
        os.killpg(process.pid, number)
        time.sleep(0.05)  # impatient
        os.killpg(process.pid, number)
        assert process.wait(timeout=60) in (130, 143)
        assert not left(prefix)
        assert run(sleeping).returncode == 1


def test_the_template_trains_across_hosts_under_ddp(
    hosts: list[testbed.Node], tmp_path: Path
) -> None:
    """One rank a host, each the first of its host, without files that both see. Horovod has
    test_starting.py."""
    ours, theirs = tmp_path / "ours", tmp_path / "theirs"
    for folder in (ours, theirs):
        folder.mkdir()
    hosts[1].shows(theirs, ours)  # only rank 0 sees checkpoints
    command = [HOROVODRUN, "-np", "2", "-H", "node1:1,node2:1", PYTHON, "template.py"]
    for changes in (["trainer.max_epochs=2"], ["trainer.max_epochs=3", "ckpt_path=last"]):
        done = run(hosts[0].command(*command, "strategy=ddp", f"log_dir={ours}", *changes))
        assert done.returncode == 0, done.stdout
        assert "terminate called" not in done.stdout
    files = sorted(ours.glob("*/runs/*/summary.json"))
    summaries = [json.loads(file.read_text()) for file in files]
    assert [summary["world_size"] for summary in summaries] == [2, 2]
    assert set(summaries[0]["hosts"]) == {"node1", "node2"}
    assert "test/acc" in done.stdout and "epoch 3/3" in done.stdout
    assert "epoch 2/3" not in done.stdout
    assert not [*theirs.rglob("*.ckpt")]

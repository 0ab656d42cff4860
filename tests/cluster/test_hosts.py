"""What is said of hosts is understood, or refused in one line before any ssh starts."""

from __future__ import annotations

import contextlib
import errno
import http.client
import os
import selectors
import shlex
import shutil
import socket
import subprocess
import sys
import tempfile
import time
from collections.abc import Callable, Iterator
from concurrent.futures import ThreadPoolExecutor
from pathlib import Path

import pytest
from horovod.runner.common.util.hosts import HostInfo, get_host_assignments
from hypothesis import given
from hypothesis import strategies as draw

from cluster import agent, findings, gpus
from cluster.doctor import refuse_unfit
from cluster.environment import environment_folder, make_command
from cluster.forwarding import addresses, forwarded
from cluster.hostfile import entry, listed, parse, read, typed
from cluster.hosts import Host, Refusal, refuse_one_twice
from cluster.ranks import ranks, used
from cluster.record import birth
from cluster.rendezvous import Rendezvous
from cluster.ssh import diagnose
from tests.conftest import ROOT, run, wait_until


class TestList:
    def test_is_read(self) -> None:
        assert parse("node1:4,node2") == [Host("node1", 4), Host("node2", 1)]

    @pytest.mark.parametrize(
        ("text", "words"),
        [
            ("node1:4,,node2", "'' is not a host"),
            ("node[3-1]:4", "'node[3-1]:4' is not a host"),
            ("node[1-3:4", "'node[1-3:4' is not a host"),
            ("node[1-3],node2", "node2 is there twice"),
            ("node1:[4]", "'node1:[4]' is not a host"),
            ("node1:four", "'node1:four' is not a host"),
            ("node1:0", "'node1:0' is not a host"),
            ("node1:4 node2:4", "is not a host: write name:slots"),
            ("-oProxyCommand=x:1", "is not a host"),
            ("node1:2,node2:1,node1:2", "node1 is there twice"),
        ],
    )
    def test_is_refused(self, text: str, words: str) -> None:
        with pytest.raises(Refusal) as error:
            parse(text)
        assert words in str(error.value) and "\n" not in str(error.value)


class TestFile:
    def file(self, tmp_path: Path, text: str) -> Path:
        (tmp_path / "hosts.yaml").write_text(text)
        return tmp_path / "hosts.yaml"

    def test_is_read(self, tmp_path: Path) -> None:
        file = self.file(
            tmp_path,
            "hosts:\n  node1: {slots: 2, gpus: [1, 7], nic: enp2s0f1}\n"
            "  node2: {slots: 1, user: ada, port: 2222, ssh: [ProxyJump=login], env: {A: 1}}\n",
        )
        first, second = read(file)
        assert first == Host("node1", 2, gpus=(1, 7), nic="enp2s0f1")
        assert second.ssh_options()[-4:] == ["-l", "ada", "-p", "2222"]
        assert "-oProxyJump=login" in second.ssh_options()
        # It asks nothing, and waits for nobody.
        assert {"-oBatchMode=yes", "-oConnectTimeout=10"} <= {*second.ssh_options()}
        places = [member.environment(3) for member in ranks([first, second])]
        assert [place.get("CUDA_VISIBLE_DEVICES") for place in places] == ["1", "7", None]
        assert [place.get("A") for place in places] == [None, None, "1"]

    def test_a_variable_of_the_file_comes_before_ours(self, tmp_path: Path) -> None:
        lent = "{slots: 1, gpus: [1], env: {CUDA_VISIBLE_DEVICES: 5}}"
        (member,) = ranks(read(self.file(tmp_path, f"hosts: {{node1: {lent}}}")))
        assert member.environment(1)["CUDA_VISIBLE_DEVICES"] == "5"

    def test_variables_are_as_they_are_written(self, tmp_path: Path) -> None:
        env = "{A: on, B: , C: 010, D: 2026-02-30, E: 1_000, F: 12:30, G: 'x y', H: 1.50}"
        (host,) = read(self.file(tmp_path, f"hosts: {{node1: {{slots: 1, env: {env}}}}}"))
        written = {"A": "on", "B": "", "C": "010", "D": "2026-02-30", "E": "1_000", "F": "12:30"}
        assert host.env == {**written, "G": "x y", "H": "1.50"}

    def test_what_is_merged_counts(self, tmp_path: Path) -> None:
        """`<<: *name`, of hosts and of what they lend."""
        small = "small: &small {slots: 2, env: {A: on}}\nrack: &rack {node1: 4, node2: *small}\n"
        hosts = "hosts:\n  <<: *rack\n  node3: {<<: *small, slots: 1}\n  no: 4\n"
        found = read(self.file(tmp_path, small + hosts))
        assert {host.name: host.slots for host in found} == {
            "node1": 4, "node2": 2, "node3": 1, "no": 4,
        }  # fmt: skip
        assert [host.env for host in found].count({"A": "on"}) == 2

    @pytest.mark.parametrize(
        ("text", "words"),
        [
            ("hosts: {node1: {slots: 3, gpus: [0, 1]}}", "3 slots and 2 gpus"),
            ("hosts: {node1: {slots: 1, gpus: [0, 0]}}", "each once"),
            ("hosts: {node1: {gpus: [0]}}", "needs its slots"),
            ("hosts: {node1: {slots: 1, gpu: [0]}}", "'gpu' is unknown; there are slots, gpus"),
            ("hosts: {node1: {slot: 2}}", "'slot' is unknown; there are slots, gpus"),
            ("hosts: {node1: 1.5}", "node1: slots=1.5 is no number from 1 to 99999"),
            ("hosts: {node1: }", "node1: slots=: write as 4"),
            ("hosts: {node1: [4]}", "node1: ['4']: write how many processes it may run"),
            ("hosts: {node1: {slots: two}}", "node1: slots=two is no number from 1 to 99999"),
            ("hosts: {node1: {slots: true}}", "slots=true is no number"),
            ("hosts: {node1: {slots: [4]}}", "slots=['4']: write as 4"),
            ("hosts: {node1: {slots: 1, gpus: 0}}", "node1: gpus=0: write as [0, 1]"),
            ("hosts: {node1: {slots: 1, nic: }}", "node1: nic=: write as eth0"),
            ("hosts: {node1: {slots: 1, user: ~}}", "node1: user=~: write as ada"),
            ("hosts: {node1: {slots: 1, ssh: A=b}}", "ssh=A=b: write as ['ProxyJump=login']"),
            ("hosts: {node1: {slots: 1, env: []}}", "env=[]: write as {'NCCL_DEBUG': 'INFO'}"),
            ("hosts: {node1: {slots: 0}}", "slots=0"),
            ("hosts: {node1: {slots: 99999999999}}", "slots=99999999999"),
            ("hosts: {node1: {slots: 1, gpus: [true]}}", "gpus=true is no number from 0 to 99999"),
            ("hosts: {node1: {slots: 1, gpus: [[0]]}}", "gpus=['0'] is no number"),
            ("hosts: {node1: {slots: 1, gpus: [-1]}}", "gpus=-1 is no number"),
            ("hosts: {node1: {slots: 1, slots: 2}}", "line 1: slots is there twice: write it once"),
            ("hosts: {node1: 1}\nenv: {A: b}", "'env' stands beside hosts"),
            ("hosts: {node1: {slots: 1, port: 99999}}", "port=99999 is no number from 1 to 65535"),
            ("hosts: {node1: {slots: 1, ssh: [yes]}}", "is no option"),
            ("hosts: {node1: {slots: 1, env: {'a b': 1}}}", "no name of a variable"),
            ("hosts: {node1: {slots: 1, env: {A: [1]}}}", "env: A=['1'] is no text"),
            ("hosts: {'-oX': {slots: 1}}", "not the name of a host"),
            ("hosts:\n  node1: {slots: 1}\n  node1: {slots: 2}\n", "line 3: node1 is there twice"),
            ("hosts: {node1: 1}\nhosts: {node2: 1}\n", "line 2: hosts is there twice"),
            ("hosts: {node1: {slots: 1, env: {A: b, A: c}}}", "line 1: A is there twice"),
            ("hosts:\n  {{ node1 }}: {slots: 1}\n", "line 2: found unhashable key"),
            ("hosts: {", "line 1: "),
            (
                "node1 slots=2 # a\nnode2 slots=2\n",
                "line 2: write 'hosts:' and below it a line a host",
            ),
            ("hosts: {node1: a\0}", "no YAML: special characters are not allowed"),
            ("nodes: {}", "write 'hosts:'"),
        ],
    )
    def test_is_refused(self, tmp_path: Path, text: str, words: str) -> None:
        with pytest.raises(Refusal) as error:
            read(self.file(tmp_path, text))
        assert words in str(error.value) and "\n" not in str(error.value)

    def test_that_is_missing(self, tmp_path: Path) -> None:
        with pytest.raises(Refusal, match="No such file"):
            read(tmp_path / "none.yaml")


class TestRanks:
    @given(draw.lists(draw.integers(1, 5), min_size=1, max_size=5), draw.data())
    def test_are_counted_as_horovod_counts(self, slots: list[int], data: draw.DataObject) -> None:
        hosts = [Host(f"node{index}", count) for index, count in enumerate(slots)]
        size = data.draw(draw.integers(1, sum(slots)))
        infos = [HostInfo(host.name, host.slots) for host in hosts]
        theirs = get_host_assignments(infos, size, size)
        assert len(theirs) == size
        for mine, their in zip(ranks(hosts, size), theirs):
            assert (mine.host.name, mine.rank) == (their.hostname, their.rank)
            assert (mine.local_rank, mine.local_size) == (their.local_rank, their.local_size)
            assert (mine.cross_rank, mine.cross_size) == (their.cross_rank, their.cross_size)

    @pytest.mark.parametrize("size", [0, 5])
    def test_fit_on_the_slots(self, size: int) -> None:
        with pytest.raises(Refusal, match=f"NP={size} processes on 4 slots"):
            ranks([Host("node1", 4)], size)

    def test_hosts_without_one_are_not_used(self) -> None:
        hosts = [Host("node1", 4), Host("node2", 4), Host("node3", 4)]
        assert used(hosts, 5) == [Host("node1", 4), Host("node2", 1)]
        assert used(hosts, None) == hosts


@pytest.mark.parametrize("name", ["node1..cluster", "n" * 64, "nowhere.invalid"])
def test_a_name_that_leads_nowhere_is_refused(name: str) -> None:
    with pytest.raises(Refusal, match=f"{name}: no such host: no IPv4 address"):
        assert Host(name, 1).address


def test_this_host_needs_no_ssh(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("PATH", "")
    monkeypatch.delenv("SLURM_JOB_ID", raising=False)
    assert Host("localhost", 1).is_here
    with pytest.raises(Refusal, match="ssh is missing here: sudo apt-get install openssh-client"):
        Host("192.0.2.1", 1).command("true")


@pytest.mark.parametrize(
    ("name", "told", "here"),
    [
        ("localhost", "hostname localhost\nport 22", True),
        ("gpu1", "hostname localhost\nport 22", True),
        ("gpu1", "hostname localhost\nport 2222", False),  # a tunnel to it
        ("localhost", "hostname localhost\nport 2222", True),  # where all sshd listen there
        ("gpu1", "hostname 127.0.1.1\nport 22", True),
        ("gpu1", "hostname 198.51.100.1\nport 22", False),
    ],
)
def test_which_host_is_this_one(name: str, told: str, here: bool, fake: Callable) -> None:
    """By what ssh -G says of its name."""
    fake("ssh", f"printf '{told}\\n'")
    assert Host(name, 1).is_here == here
    assert not Host(name, 1, user="ada").is_here and not Host(name, 1, port=22).is_here


def test_what_is_for_a_login_is_left_out(tmp_path: Path) -> None:
    """Of what ssh is configured to."""
    config = tmp_path / "config"
    config.write_text("Host *\n  ForwardX11 yes\n  RemoteCommand true\n  Port 2222\n")
    line = [*Host("node1", 1).ssh_options(), "-F", str(config), "-G", "node1"]
    said = subprocess.run(line, capture_output=True, text=True, check=True).stdout.splitlines()
    assert "port 2222" in said and "forwardx11 no" in said
    assert "clearallforwardings yes" in said and "remotecommand true" not in said


@pytest.mark.parametrize("shell", ["sh", "bash", "tcsh"])
def test_any_login_shell_runs_a_script_of_lines(
    shell: str, monkeypatch: pytest.MonkeyPatch
) -> None:
    """As sshd starts it. csh takes no newline within quotes."""
    monkeypatch.delenv("SLURM_JOB_ID", raising=False)
    line = Host("192.0.2.1", 1).command('read name\necho "it\'s\n$name!" `echo a`\nexit 3')[-1]
    assert "\n" not in line
    if shutil.which(shell) is None:
        pytest.skip(f"there is no {shell}")
    done = subprocess.run([shell, "-c", line], input="Ada\n", capture_output=True, text=True)
    assert (done.returncode, done.stdout, done.stderr) == (3, "it's\nAda! a\n", "")


@pytest.mark.parametrize(
    ("text", "shorter"),
    [
        ("node1:2,node2:2", "node1:2,node2:2"),
        ("node1:2,node2:2,node3:2,node7:2", "node[1-3]:2,node7:2"),
        ("node9:4,node10:4,node11:4,login:1", "node[9-11]:4,login:1"),
        ("n098.x.org:1,n099.x.org:1,n100.x.org:1", "n[098-100].x.org:1"),
        ("r1n1:1,r1n2:1,r1n3:1,r2n1:1,r2n2:1,r2n3:1", "r1n[1-3]:1,r2n[1-3]:1"),
        ("n1:4,n2:4,n3:4,n4:2,n5:2,n6:2", "n[1-3]:4,n[4-6]:2"),
        ("n3:1,n2:1,n1:1", "n3:1,n2:1,n1:1"),
        ("a:1,b:1,c:1", "a:1,b:1,c:1"),
        ("n99998:1,n99999:1,n100000:1,n100001:1", "n99998:1,n99999:1,n100000:1,n100001:1"),
        ("i1234567:1,i1234568:1,i1234569:1", "i12[34567-34569]:1"),
    ],
)
def test_many_hosts_are_listed_as_slurm_does(text: str, shorter: str) -> None:
    """And are read so."""
    hosts = parse(text)
    assert listed({host.name: host.slots for host in hosts}) == shorter
    assert parse(shorter) == hosts
    assert typed(hosts) == f"HOSTS={shlex.quote(shorter)}"


def test_numbers_of_hosts_may_be_any() -> None:
    hosts = [*(Host(f"n{number}-ib", 4) for number in ("1", "2", "07", "9", "10")), Host("a", 1)]
    assert parse("n[1-2,07,9-10]-ib:4, a") == hosts


def test_without_hosts_it_is_this_one() -> None:
    done = run([sys.executable, "-m", "cluster.horovodrun", "-np", "2", "echo", "hi"])
    assert done.returncode == 0
    assert sorted(done.stdout.splitlines()) == ["[0]<stdout>:hi", "[1]<stdout>:hi"]


def test_a_host_file_may_be_a_pipe(tmp_path: Path) -> None:
    file = tmp_path / "hosts.yaml"
    os.mkfifo(file)
    writer = subprocess.Popen(["sh", "-c", f"echo 'hosts: {{localhost: 3}}' > {file}"])
    (host,) = read(file)
    assert writer.wait(timeout=10) == 0 and (host.name, host.slots) == ("localhost", 3)


def test_only_listed_variables_leave_this_host() -> None:
    here = {"NCCL_DEBUG": "INFO", "AWS_SECRET_ACCESS_KEY": "x", "WANDB_API_KEY": "y", "HOME": "/r"}
    here |= {"HOROVOD_TOKEN": "z", "FI_PROVIDER": "efa", "FIND": "x"}
    assert forwarded(here) == {"NCCL_DEBUG": "INFO", "FI_PROVIDER": "efa"}
    assert forwarded(here | {"FORWARD": "MLFLOW_, WANDB_"})["WANDB_API_KEY"] == "y"
    for asked, kept in (("0,1", {}), ("", {"CUDA_VISIBLE_DEVICES": ""})):  # none on any node
        assert forwarded({"CUDA_VISIBLE_DEVICES": asked, "SLURM_JOB_ID": "1"}) == kept
    for asked, there in (("GPU-5d1a,GPU-77c0", False), ("MIG-5d1a", False), ("0,1", True)):
        assert bool(forwarded({"CUDA_VISIBLE_DEVICES": asked})) == there  # UUIDs are of this host


class TestRendezvous:
    """It serves the job, and nobody else."""

    @pytest.fixture
    def server(self) -> Iterator[Rendezvous]:
        server = Rendezvous(["127.0.0.1"])
        yield server
        server.close()

    def ask(
        self, server: Rendezvous, method: str, path: str, body: bytes = b"", size: int = 0
    ) -> tuple[int, bytes]:
        connection = http.client.HTTPConnection("127.0.0.1", server.port, timeout=5)
        length = {"Content-Length": str(size or len(body))}
        connection.request(method, path, body, length)
        answer = connection.getresponse()
        return answer.status, answer.read()

    def test_keeps_what_the_job_puts(
        self, server: Rendezvous, monkeypatch: pytest.MonkeyPatch
    ) -> None:
        monkeypatch.setattr("cluster.rendezvous.WAIT_SECONDS", 0)
        place = server.environment("127.0.0.1")
        address, port = place["HOROVOD_GLOO_RENDEZVOUS_ADDR"], server.port
        path = "/" + f"{address}:{port}/global/0".partition("/")[2]  # as Gloo builds it
        assert self.ask(server, "GET", path)[0] == 404
        assert self.ask(server, "PUT", path, b"here") == (200, b"")
        assert self.ask(server, "GET", path) == (200, b"here")
        assert server.store == {"global/0": b"here"}
        assert self.ask(server, "GET", f"{path[:-1]}to_5_of_1")[0] == 404
        assert self.ask(server, "DELETE", path) == (200, b"")
        assert self.ask(server, "GET", path)[0] == 404

    def test_who_asks_too_early_waits(
        self, server: Rendezvous, monkeypatch: pytest.MonkeyPatch
    ) -> None:
        """And is answered when it is there, also beside those who say nothing."""
        monkeypatch.setattr("cluster.rendezvous.WAIT_SECONDS", 60)
        path = f"/{server.secret}/:1/global/0"
        with contextlib.ExitStack() as silent, ThreadPoolExecutor(3) as pool:
            for _ in range(20):
                silent.enter_context(socket.create_connection(("127.0.0.1", server.port)))
            asked = [pool.submit(self.ask, server, "GET", path) for _ in range(3)]
            wait_until(lambda: len(server.waiting.get("global/0", ())) == 3, 10, "three that ask")
            assert self.ask(server, "PUT", path, b"here") == (200, b"")
            assert [each.result() for each in asked] == [(200, b"here")] * 3
        assert not server.waiting

    def test_picks_the_addresses_of_each_rank(
        self, server: Rendezvous, monkeypatch: pytest.MonkeyPatch
    ) -> None:
        """Out of what all others have put, whoever is the last of them."""
        monkeypatch.setattr("cluster.rendezvous.WAIT_SECONDS", 60)
        path = f"/{server.secret}/:1/global/"
        assert self.ask(server, "GET", f"{path}picks") == (200, b"yes")
        with ThreadPoolExecutor(4) as pool:
            asked = [
                pool.submit(self.ask, server, "GET", f"{path}to_{rank}_of_4") for rank in range(4)
            ]
            for rank, waits_for in (1, 0), (0, 0), (3, 2), (2, 2):
                key = f"global/{waits_for}"
                wait_until(lambda key=key: len(server.waiting.get(key, ())) == 4, 10, "four")
                mine = "".join(f"{rank}{other}" for other in range(4) if other != rank)
                assert self.ask(server, "PUT", f"{path}{rank}", mine.encode()) == (200, b"")
            picked = [b"102030", b"012131", b"021232", b"031323"]
            assert [each.result() for each in asked] == [(200, these) for these in picked]
        assert not server.waiting

    def test_nobody_waits_for_one_that_has_ended(self) -> None:
        server = Rendezvous(["127.0.0.1"])
        with socket.create_connection(("127.0.0.1", server.port), timeout=10) as connection:
            connection.sendall(f"GET /{server.secret}/:1/global/0 HTTP/1.1\r\n\r\n".encode())
            wait_until(lambda: server.waiting, 10, "one that asks")
            server.close()
            assert connection.recv(100) == b""

    def test_a_value_may_come_in_pieces(self, server: Rendezvous) -> None:
        value = os.urandom(1 << 19)
        path = f"/{server.secret}/:1/global/0"
        head = f"PUT {path} HTTP/1.1\r\ncontent-length: {len(value)}\r\n\r\n".encode()
        with socket.create_connection(("127.0.0.1", server.port), timeout=5) as connection:
            for piece in (head[:9], head[9:], value[:1000], value[1000:]):
                connection.sendall(piece)
                time.sleep(0.05)
            assert connection.recv(100).startswith(b"HTTP/1.0 200 OK\r\n")
        assert self.ask(server, "GET", path) == (200, value)

    def test_refuses_others(
        self, server: Rendezvous, capfd: pytest.CaptureFixture[str], tmp_path: Path
    ) -> None:
        canary = tmp_path / "canary"
        pickled = b"cposix\nsystem\n(S'touch " + str(canary).encode() + b"'\ntR."
        for path in ("/global/0", "/runfunc_result/0", f"/{server.secret[:-1]}/:1/global/0"):
            assert self.ask(server, "PUT", path, pickled)[0] == 403
            assert self.ask(server, "GET", path)[0] == 403
        assert not server.store and not canary.exists()
        told, deadline = "", time.monotonic() + 10  # by a thread of its own
        while "refused" not in told and time.monotonic() < deadline:
            time.sleep(0.05)
            told += capfd.readouterr().err
        assert told.count("refused a request from 127.0.0.1") == 1

    def test_takes_no_more_than_addresses(self, server: Rendezvous) -> None:
        path = f"/{server.secret}/:1/global/0"
        assert self.ask(server, "PUT", path, size=2 << 20)[0] == 413
        with socket.create_connection(("127.0.0.1", server.port), timeout=10) as connection:
            connection.sendall(b"PUT /" + b"x" * (1 << 15))  # a request that does not end
            assert connection.recv(100).startswith(b"HTTP/1.0 431 ")

    def test_who_says_nothing_is_left(
        self, server: Rendezvous, monkeypatch: pytest.MonkeyPatch
    ) -> None:
        """And who asks for what is not there and then leaves is forgotten."""
        monkeypatch.setattr("cluster.rendezvous.QUIET_SECONDS", 0.2)
        with socket.create_connection(("127.0.0.1", server.port), timeout=10) as connection:
            assert connection.recv(100) == b""
        with socket.create_connection(("127.0.0.1", server.port), timeout=10) as connection:
            connection.sendall(f"GET /{server.secret}/:1/global/0 HTTP/1.1\r\n\r\n".encode())
            wait_until(lambda: server.waiting.get("global/0"), 10, "one that asks")
        wait_until(lambda: not server.waiting["global/0"], 10, "its end")

    def test_listens_where_it_is_told_to(self) -> None:
        """By one port, as ranks are told one."""
        server = Rendezvous(["127.0.0.2", "127.0.0.3"])
        try:
            for address, there in ("127.0.0.1", False), ("127.0.0.2", True), ("127.0.0.3", True):
                with socket.socket() as probe:
                    assert (probe.connect_ex((address, server.port)) == 0) == there
        finally:
            server.close()


@pytest.mark.parametrize(
    ("status", "said", "words"),
    [
        (255, "ada@node1: Permission denied (publickey).", "ssh-copy-id node1"),
        (255, "Host key verification failed.", "its host key is unknown here"),
        (255, "@ WARNING: REMOTE HOST IDENTIFICATION HAS CHANGED! @\nHost key verification failed.",
         "ssh-keygen -R node1"),
        (255, "ssh: connect to host node1 port 22: Connection refused",
         "no sshd listens there on port 22: on node1: sudo systemctl start ssh, or name its port"),
        (255, "ssh: connect to host node1 port 22: Connection timed out", "no answer within 10 s"),
        (255, "Connection timed out during banner exchange", "said nothing"),
        (255, "ada@login: Permission denied (publickey).\n"
         "kex_exchange_identification: Connection closed by remote host\n"
         "Connection closed by UNKNOWN port 65535",
         "does not lead to it: ada@login: Permission denied (publickey).: ssh node1 to look"),
        (255, "channel 0: open failed: connect failed: refused\nstdio forwarding failed\n"
         "Connection closed by UNKNOWN port 65535", "ProxyCommand does not lead to it: channel 0"),
        (255, "Connection timed out during banner exchange\n"
         "Connection to UNKNOWN port 65535 timed out", "the connection was closed: ssh node1"),
        (97, "", "make sync HOSTS=node1"),
        (1, "", "ended with 1: without a word: ssh node1 to look"),
        (127, "sh: 1: exec: python: not found", "make sync ENV=1"),
    ],
)  # fmt: skip
def test_ssh_troubles_are_told_apart(status: int, said: str, words: str) -> None:
    assert words in str(diagnose(Host("node1", 1), status, said))


def test_a_host_is_looked_at_by_its_way(fake: Callable, monkeypatch: pytest.MonkeyPatch) -> None:
    """What is to be typed has its user, port and options, as ours has."""
    fake("ssh", "printf 'hostname node1.cluster\\nport 2222\\n'")
    proxy = "ProxyCommand=ssh -W %h:%p login"
    host = Host("node1", 1, user="ada", port=2222, ssh=(proxy,))
    way = f"-o '{proxy}' -p 2222 ada@node1"
    assert diagnose(host, 255, "Permission denied").fix == f"ssh-copy-id {way}"
    changed = diagnose(host, 255, "REMOTE HOST IDENTIFICATION HAS CHANGED").fix
    assert changed.endswith(f"ssh-keygen -R '[node1.cluster]:2222', then ssh {way}")
    monkeypatch.delenv("CUDA_VISIBLE_DEVICES", raising=False)
    facts = {"gpus": {"devices": [], "error": "driver", "processes": []}}
    assert findings.gpus(host, facts)[0].fix == f"ssh {way} nvidia-smi"


def test_a_host_of_a_file_is_mended_by_its_file(tmp_path: Path) -> None:
    """Its name alone would lose user, port and the rest."""
    file = tmp_path / "two hosts.yaml"
    file.write_text("hosts: {node1: {slots: 2, gpus: [1, 0], user: ada}, node2: 1}")
    first, second = read(file)
    assert str(diagnose(first, 97, "")).endswith(": " + make_command(f"sync HOSTFILE='{file}'"))
    assert entry(first) == {"slots": 2, "gpus": (1, 0), "user": "ada"}
    assert entry(second) == {"slots": 1}


def test_a_process_is_known_by_its_birth() -> None:
    assert birth(os.getpid()) is not None and birth(2**22 + 1) is None
    ended = subprocess.Popen(["true"])
    os.waitid(os.P_PID, ended.pid, os.WEXITED | os.WNOWAIT)
    assert birth(ended.pid) is None  # also where its parent does not ask how
    ended.wait()


def test_one_host_under_two_names_is_refused() -> None:
    """Before it is asked anything."""
    with pytest.raises(Refusal, match="127.0.0.1 is localhost: name it once, as localhost:3"):
        refuse_unfit([Host("localhost", 1), Host("127.0.0.1", 2)])
    refuse_one_twice([Host("10.77.0.9", 1, port=port) for port in (2201, 2202)])  # of tunnels


def test_a_gpu_is_locked_by_whatever_name(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """By its number or its UUID it is the same one; a part of one (MIG) is one too. Whatever the
    TMPDIR of a job is."""
    for bus, uuid in (("0000:c1:00.0", "GPU-b2"), ("0000:41:00.0", "GPU-a1")):
        (tmp_path / bus).mkdir()
        (tmp_path / bus / "information").write_text(f"Model: \t A\nGPU UUID: \t {uuid}\n")
    for name, place in (
        ("0", "0000:41:00.0"), ("1", "0000:c1:00.0"), ("2", "2"), ("GPU-b2", "0000:c1:00.0"),
        ("GPU-a", "0000:41:00.0"), ("GPU-c", "GPU-c"), ("MIG-a1", "MIG-a1"),
    ):  # fmt: skip
        assert gpus.place_of(name, tmp_path) == place
    monkeypatch.setattr(gpus, "place_of", lambda gpu: f"of {gpu} of {os.getpid()}")  # no real one
    with contextlib.ExitStack() as locks:
        for gpu in ("1", "GPU-b2"):
            file = locks.enter_context(gpus.lock_gpu(gpu, "x"))
            locks.callback(Path(f"/proc/self/fd/{file.fileno()}").resolve().unlink)
            with monkeypatch.context() as other:
                other.setattr(tempfile, "tempdir", str(tmp_path))
                with pytest.raises(ValueError, match=f"GPU {gpu} is in use by run x"):
                    gpus.lock_gpu(gpu, "y")


def test_gpus_that_ranks_use(monkeypatch: pytest.MonkeyPatch) -> None:
    """Those of HOSTFILE, else the first that CUDA_VISIBLE_DEVICES names, if there are any."""
    monkeypatch.setattr(gpus.Path, "glob", lambda path, pattern: iter([path]))  # there are some
    monkeypatch.setattr(gpus.Path, "exists", lambda path: path.name in ("nvidia0", "nvidia2"))
    assert gpus.used_gpus([7, 1], "0", 2) == ["7", "1"]
    assert gpus.used_gpus(None, "1,GPU-b2,MIG-a1", 2) == ["1", "GPU-b2"]
    assert gpus.used_gpus(None, "-1", 2) == gpus.used_gpus(None, "", 2) == []
    assert gpus.used_gpus(None, None, 4) == ["0", "2"]
    monkeypatch.setattr(gpus.Path, "glob", lambda path, pattern: iter([]))
    assert gpus.used_gpus(None, "0,1", 2) == []


def test_another_users_lock_of_a_gpu_is_named(monkeypatch: pytest.MonkeyPatch) -> None:
    """Whoever puts it there keeps it from us; whether it may be opened, or not."""
    uid, place = os.getuid() + 1, f"of {os.getpid()}"
    name = f"horovod-gpu-{os.uname().nodename}-{uid}-{place}"
    monkeypatch.setattr(os, "getuid", lambda: uid)
    monkeypatch.setattr(gpus, "place_of", lambda gpu: place)
    told = f"^/tmp/{name} is another user's, who keeps GPU 3 from you: have it deleted$"

    def denied(*_: object) -> None:
        raise PermissionError(errno.EACCES, os.strerror(errno.EACCES))

    try:
        (Path("/tmp") / name).touch()
        with pytest.raises(ValueError, match=told):
            gpus.lock_gpu("3", "x")
        monkeypatch.setattr(os, "open", denied)
        with pytest.raises(ValueError, match=told):
            gpus.lock_gpu("3", "x")
    finally:
        (Path("/tmp") / name).unlink()


def test_locks_stay_young(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """systemd-tmpfiles deletes what is old in /tmp."""
    watching = agent.Agent()
    with (tmp_path / "lock").open("w") as lock, selectors.DefaultSelector() as nothing:
        os.utime(lock.fileno(), (1, 1))
        watching._locks, watching._ranks = [lock], {1: 0}
        monkeypatch.setattr(watching, "_say", lambda **_: None)
        monkeypatch.setattr(watching, "_reap", lambda _: watching._ranks.clear())
        watching._watch(nothing)
        assert os.fstat(lock.fileno()).st_mtime > 1


def test_a_checkout_may_be_reached_by_a_link(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """As by a /home that is one, from an environment that was activated there."""
    (tmp_path / "link").symlink_to(ROOT)
    monkeypatch.setattr(sys, "prefix", str(tmp_path / "link" / ".venv"))
    assert environment_folder() == ROOT / ".venv"
    assert make_command("doctor") == "make doctor"
    monkeypatch.setattr(sys, "prefix", str(tmp_path))
    assert make_command("doctor") == f"make doctor PYTHON={sys.executable}"


def test_a_second_address_of_an_interface_is_told(monkeypatch: pytest.MonkeyPatch) -> None:
    """Of each the first is looked at."""
    monkeypatch.setattr(agent, "own_address", lambda towards: "10.1.0.2")
    monkeypatch.setattr(agent, "interfaces", lambda: {"eth0": "10.0.0.2"})
    told = r"^10.1.0.2, by which it reaches 10.1.0.1, is the first address of no network interface"
    with pytest.raises(ValueError, match=told):
        agent.interface_towards("10.1.0.1")


def test_a_host_without_a_route_is_named(monkeypatch: pytest.MonkeyPatch) -> None:
    """As where a leading zero makes another address of it."""

    def unreachable(address: str) -> str:
        raise OSError(errno.ENETUNREACH, os.strerror(errno.ENETUNREACH))

    monkeypatch.setattr("cluster.forwarding.own_address", unreachable)
    host = Host("192.0.2.1", 1)
    with pytest.raises(Refusal, match=r"^192.0.2.1: there is no route to 192.0.2.1: Network is"):
        addresses([host])

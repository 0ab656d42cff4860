"""Jobs across hosts: they start, see what they should, and end without leaving a process."""

from __future__ import annotations

import argparse
import contextlib
import datetime
import errno
import json
import os
import pty
import resource
import signal
import subprocess
import sys
import time
from collections.abc import Callable, Iterator
from pathlib import Path
from types import SimpleNamespace

import psutil
import pytest

from cluster import jobs, record, testbed
from cluster.agent import SILENCE_SECONDS, Agent
from cluster.horovodrun import AT_ONCE, GLOO_SECONDS, Job
from cluster.hosts import Host, Refusal, ranks
from cluster.record import birth, place, write
from tests.cluster.conftest import GREETING, NICS, PYTHON, fake_ssh, made
from tests.conftest import HOROVODRUN, ROOT, run

TELL = (
    "import os, json, horovod.torch as hvd; hvd.init(); "
    "print(json.dumps({'rank': hvd.rank(), 'size': hvd.size(), 'local_rank': hvd.local_rank(), "
    "'local_size': hvd.local_size(), 'cross_size': hvd.cross_size(), 'cwd': os.getcwd(), "
    "'host': os.uname().nodename, 'environment': dict(os.environ)}))"
)
# With our id: two suites on one machine must not take each other's ranks for their own.
SLEEP = f"import time; print('ready', flush=True); time.sleep(600)  # of {os.getpid()}"
HOSTS_24 = ",".join(f"h{number}" for number in range(1, 25))
STUBBORN = "import signal; [signal.signal(n, signal.SIG_IGN) for n in (10, 15)]; " + SLEEP


@pytest.fixture(autouse=True)
def nothing_left() -> Iterator[None]:
    yield
    deadline = time.monotonic() + 5
    while found := sleepers():
        if time.monotonic() > deadline:
            for pid in found:  # else each test behind this one would be blamed for them
                with contextlib.suppress(ProcessLookupError):
                    os.kill(int(pid), signal.SIGKILL)
            pytest.fail(f"left behind: {found}")
        time.sleep(0.1)


def sleepers() -> list[str]:
    """The ranks that run SLEEP, on all hosts: they are processes of this machine."""
    found = []
    for entry in Path("/proc").glob("[0-9]*/cmdline"):
        line = command_line(entry)
        if line[1:2] == ["-c"] and line[2] in (SLEEP, STUBBORN):
            found.append(entry.parent.name)
    return found


def command_line(entry: Path) -> list[str]:
    """Of a command line; none of a process that has ended."""
    try:
        return entry.read_bytes().decode(errors="replace").split("\0")[:-1]
    except OSError:
        return []


def horovodrun(*arguments: str) -> list[str]:
    return [PYTHON, "-m", "cluster.horovodrun", *arguments]


def told(output: str) -> list[dict]:
    """What the ranks that ran TELL say, by rank."""
    lines = [line.partition(">:")[2] for line in output.splitlines() if ">:{" in line]
    return sorted((json.loads(line) for line in lines), key=lambda rank: rank["rank"])


def started(command: list[str], log: Path, ranks: int, **environment: str) -> subprocess.Popen:
    """The launcher, once all ranks of SLEEP run."""
    with open(log, "w") as file:
        process = subprocess.Popen(
            command, cwd=ROOT, stdout=file, stderr=file, start_new_session=True,
            env={**os.environ, **environment},
        )  # fmt: skip
    deadline = time.monotonic() + 60
    while log.read_text().count("ready") < ranks:
        assert process.poll() is None and time.monotonic() < deadline, log.read_text()
        time.sleep(0.1)
    return process


def catches(pid: int, number: int) -> bool:
    """Whether a process has a handler for the signal (proc(5))."""
    status = dict(
        line.split(":\t") for line in Path(f"/proc/{pid}/status").read_text().splitlines()
    )
    return bool(int(status["SigCgt"], 16) >> (number - 1) & 1)


class TestStart:
    @pytest.mark.parametrize("slots", [2, pytest.param(4, marks=pytest.mark.slow)])
    def test_the_headline_command(
        self, hosts: list[testbed.Host], tmp_path: Path, slots: int
    ) -> None:
        """By plain horovodrun and by ours: the same numbers."""
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
        self, odd_hosts: list[testbed.Host], strategy: str, tmp_path: Path
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

    def test_each_rank_has_its_own(self, odd_hosts: list[testbed.Host], tmp_path: Path) -> None:
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

    def test_as_many_files_as_may_be_open(self, hosts: list[testbed.Host]) -> None:
        """Each rank has a connection to all others; a login has few files, and may have more."""
        code = "import resource, horovod.torch as hvd; hvd.init(); print('may open', hvd.size(), "
        code += "resource.getrlimit(resource.RLIMIT_NOFILE)[0] > 18)"
        sshd, files = hosts[1].sshd.pid, resource.RLIMIT_NOFILE
        limits = resource.prlimit(sshd, files)
        resource.prlimit(sshd, files, (18, limits[1]))
        try:
            command = horovodrun("-H", "node1:1,node2:3", PYTHON, "-c", code)
            done = run(hosts[0].command("prlimit", "--nofile=18:", *command))
        finally:
            resource.prlimit(sshd, files, limits)
        assert done.returncode == 0, done.stdout
        assert done.stdout.count("may open 4 True") == 4

    def test_no_secret_leaves(self, hosts: list[testbed.Host], tmp_path: Path) -> None:
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

    def test_the_rendezvous_is_the_jobs(self, hosts: list[testbed.Host], tmp_path: Path) -> None:
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
        assert "refused a request of 10.77.0.2" in (tmp_path / "log").read_text()

    def test_a_missing_folder_ends_the_job(self, project: Path, tmp_path: Path) -> None:
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
    def test_mistakes_are_one_line(
        self, hosts: list[testbed.Host], arguments: list[str], words: str
    ) -> None:
        done = run(hosts[0].command(*horovodrun(*arguments)))
        assert done.returncode == 2 and words in done.stdout
        assert len(done.stdout.splitlines()) == 1

    def test_what_else_ssh_is_configured_to(self, tmp_path: Path) -> None:
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

    def test_few_hosts_are_connected_to_at_the_same_time(self, tmp_path: Path) -> None:
        """sshd drops connections beyond 10 that have not logged in (MaxStartups)."""
        counted = f"cd {tmp_path}; touch ssh.$$; ls ssh.* | wc -l >> counts; sleep 0.3; rm ssh.$$"
        # The first that ends would end the job.
        all_came = "until [ $(wc -l < counts) = 24 ]; do sleep 0.1; done"
        fake_ssh(tmp_path, f"{counted}; echo hello; {all_came}; exit 255")
        done = run(horovodrun("-H", HOSTS_24, "true"), PATH=f"{tmp_path}:{os.environ['PATH']}")
        assert done.returncode == 1, done.stdout
        counts = [int(line) for line in (tmp_path / "counts").read_text().split()]
        assert len(counts) == 24 and 1 < max(counts) <= 8, counts

    def test_the_order_is_the_first_that_a_host_hears(self) -> None:
        """However long it takes to write it, while others get their signs of life."""
        slow = (
            "import sys, time, cluster.horovodrun as h; h.LIFE_SECONDS = 0.01; "
            "was = h.Job._environment; "
            "h.Job._environment = lambda *of: (time.sleep(0.5), was(*of))[1]; sys.exit(h.main())"
        )
        done = run([PYTHON, "-c", slow, "-H", "localhost:1", "echo", "hi"])
        assert (done.returncode, done.stdout) == (0, "[0]<stdout>:hi\n")

    def test_a_host_that_takes_no_order_keeps_nobody(self, tmp_path: Path) -> None:
        """One that hangs in its login; the order does not fit into a pipe as it is made."""
        fake_ssh(tmp_path, f"touch {tmp_path}/asked; exec sleep 600")
        process = subprocess.Popen(
            horovodrun("-H", "h1:1", "true", *12 * ["x" * 100_000]),
            cwd=ROOT, stdout=subprocess.PIPE, stderr=subprocess.STDOUT, text=True,
            env={**os.environ, "PATH": f"{tmp_path}:{os.environ['PATH']}"},
        )  # fmt: skip
        try:
            deadline = time.monotonic() + 30
            while not (tmp_path / "asked").exists():
                assert time.monotonic() < deadline
                time.sleep(0.1)
            time.sleep(1)
            process.terminate()
            process.send_signal(AT_ONCE)
            told = process.communicate(timeout=60)[0]
        finally:
            process.kill()
            process.communicate()
        assert "h1 does not answer" in told and process.returncode > 128, told

    def test_no_host_is_connected_to_once_it_ends(self, tmp_path: Path) -> None:
        """By Ctrl-C while the first hosts hang in their logins, or by a host that fails."""
        for failing, status in (("exec sleep 600", 130), ("sleep 1; exit 97", 1)):
            fake_ssh(tmp_path, f"echo >> {tmp_path}/asked; {failing}")
            process = subprocess.Popen(
                horovodrun("-H", HOSTS_24, "true"),
                cwd=ROOT, stdout=subprocess.PIPE, stderr=subprocess.STDOUT, text=True,
                env={**os.environ, "PATH": f"{tmp_path}:{os.environ['PATH']}"},
            )  # fmt: skip
            deadline = time.monotonic() + 30
            asked = tmp_path / "asked"
            while not asked.exists() or asked.read_text().count("\n") < 8:
                assert time.monotonic() < deadline
                time.sleep(0.1)
            for _ in range(2 if status == 130 else 0):
                process.send_signal(signal.SIGINT)
                time.sleep(0.5)
            said = process.communicate(timeout=60)[0]
            assert process.returncode == status, said
            assert asked.read_text().count("\n") < 24, said
            asked.unlink()

    def test_a_login_shell_that_says_something(self, tmp_path: Path) -> None:
        fake_ssh(tmp_path, GREETING + ' eval "$last"')
        path = f"{tmp_path}:{os.environ['PATH']}"
        done = run(horovodrun("-H", "h1", "echo", "here"), PATH=path)
        assert (done.returncode, done.stdout) == (0, "[0]<stdout>:here\n")

    def test_hosts_that_refuse_us_end_it(self, tmp_path: Path) -> None:
        """At once, each of them: before our threads have started to listen."""
        fake_ssh(tmp_path, "echo 'ssh: connect to host: Connection refused' >&2; exit 255")
        names = ",".join(f"h{number}" for number in range(1, 17))
        path = f"{tmp_path}:{os.environ['PATH']}"
        done = run(horovodrun("-H", names, "true"), timeout=60, PATH=path)
        assert done.returncode == 1 and "no sshd listens there" in done.stdout, done.stdout
        assert len(done.stdout.splitlines()) == 1, done.stdout

    def test_the_folder_of_logs_stays(self, project: Path) -> None:
        """Slurm opens its output there when a job begins, which may be later."""
        (project / "logs").mkdir()
        done = run([PYTHON, "-m", "cluster.horovodrun", "true"], cwd=project)
        assert done.returncode == 0 and (project / "logs").is_dir(), done.stdout
        assert not list(project.glob("logs/launches/*"))

    def test_logs_that_lead_nowhere_are_refused(self, project: Path) -> None:
        """As a link to a scratch disk that is not there."""
        (project / "logs").symlink_to("/nowhere/at/all")
        for module in ("cluster.horovodrun", "cluster.jobs"):
            line = [PYTHON, "-m", module, *["launch"] * (module == "cluster.jobs"), "true"]
            done = run(line, cwd=project, timeout=20)
            assert done.returncode == 2, done.stdout
            assert done.stdout == "error: logs is a link to /nowhere/at/all: make that folder\n"

    def test_a_program_that_is_not_there(self, hosts: list[testbed.Host]) -> None:
        done = run(hosts[0].command(*horovodrun("-H", "node1,node2", "nosuchprogram")))
        assert done.returncode == 2 and "nosuchprogram: No such file" in done.stdout


class TestEnd:
    """However a job ends, all of it ends, and the cause is told."""

    def test_a_rank_fails(self, hosts: list[testbed.Host]) -> None:
        fail = (
            f"import os, sys; sys.exit(7) if os.environ['HOROVOD_RANK'] == '3' else None; {SLEEP}"
        )
        done = run(hosts[0].command(*horovodrun("-H", "node1:2,node2:2", PYTHON, "-c", fail)))
        assert done.returncode == 7
        assert "rank 3 on node2 ended with exit code 7" in done.stdout

    @pytest.mark.parametrize(
        ("line", "status", "words"),
        [
            # What a rank leaves behind keeps its pipe, and the agent, busy: by short lines, for
            # which the agent takes longer than to write them.
            ("yes '' & exit 3", 3, "rank 0 on localhost ended with exit code 3"),
            ("kill -40 $$", 128 + 40, "rank 0 on localhost was killed by signal 40"),
        ],
    )
    def test_ends_that_are_rare(self, line: str, status: int, words: str, tmp_path: Path) -> None:
        script = f"[ $HOROVOD_RANK = 1 ] && exec sleep 1000; {line}"
        command = horovodrun("-H", "localhost:2", "sh", "-c", script)
        with open(tmp_path / "log", "w") as log:
            done = subprocess.run(command, cwd=ROOT, stdout=log, stderr=log, timeout=60)
        told = (tmp_path / "log").read_bytes()[-1000:].decode()
        assert done.returncode == status and words in told, told

    def test_a_rank_is_killed(self, hosts: list[testbed.Host], tmp_path: Path) -> None:
        command = hosts[0].command(*horovodrun("-H", "node1:1,node2:1", PYTHON, "-c", SLEEP))
        process = started(command, tmp_path / "log", 2)
        killed = next(
            pid for pid in sleepers()
            if "HOROVOD_RANK=1\0" in Path(f"/proc/{pid}/environ").read_bytes().decode()
        )  # fmt: skip
        os.kill(int(killed), signal.SIGKILL)
        assert process.wait(timeout=60) == 128 + 9
        assert "rank 1 on node2 was killed by SIGKILL" in (tmp_path / "log").read_text()

    def test_a_host_is_cut_off(self, tmp_path: Path) -> None:
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
            begun = time.monotonic()
            assert process.wait(timeout=60) == 1
            assert "node2 has not been heard for" in (tmp_path / "log").read_text()
            while sleepers():  # those on node2 are ended by its own agent
                assert time.monotonic() - begun < 60
                time.sleep(0.2)

    def test_a_job_that_is_suspended_goes_on(self, tmp_path: Path) -> None:
        """As by scontrol suspend: nobody is heard for longer than anybody may be silent."""
        sooner = (
            "import sys; from cluster import horovodrun as h; h.SILENCE_SECONDS = 6; "
            "sys.exit(h.main())"
        )
        job = ["-H", "localhost:2", PYTHON, "-c", SLEEP]
        launcher = started([PYTHON, "-c", sooner, *job], tmp_path / "log", 2)
        everyone = [psutil.Process(launcher.pid), *psutil.Process(launcher.pid).children(True)]
        for number in (signal.SIGSTOP, signal.SIGCONT):
            for process in everyone:
                process.send_signal(number)
            time.sleep(10)
        assert launcher.poll() is None, (tmp_path / "log").read_text()
        launcher.terminate()
        assert launcher.wait(timeout=30) == 143

    def test_an_agent_that_is_asked_to_end_asks_for_a_checkpoint(self, tmp_path: Path) -> None:
        """As Slurm does with the processes of a job that is to end."""
        saves = (
            "import signal, sys, time; "
            "signal.signal(signal.SIGUSR1, lambda *_: (print('saved', flush=True), sys.exit())); "
            "print('ready', flush=True); time.sleep(60)"
        )
        job = horovodrun("-H", "localhost:2", PYTHON, "-c", saves)
        launcher = started(job, tmp_path / "log", 2)
        agents = [
            process for process in psutil.Process(launcher.pid).children(True)
            if "cluster.agent" in process.cmdline()
        ]  # fmt: skip
        for agent in agents:
            agent.terminate()
        assert len(agents) == 1 and launcher.wait(timeout=30) == 143
        told = (tmp_path / "log").read_text()
        assert told.count("saved") == 2 and "stopped by SIGTERM" in told

    def test_what_the_launcher_says_of_horovod_goes_to_all_hosts(
        self, monkeypatch: pytest.MonkeyPatch
    ) -> None:
        """Not what another launcher has left in the environment."""
        monkeypatch.setenv("HOROVOD_CONTROLLER", "mpi")
        monkeypatch.setenv("NCCL_DEBUG", "INFO")
        hosts = [Host("localhost", 1), Host("192.0.2.1", 1)]
        job = Job(ranks(hosts), ["true"], SimpleNamespace(id="x"), 1.0)  # type: ignore[arg-type]
        environments = [job._environment(host) for host in hosts]
        assert [each["HOROVOD_CONTROLLER"] for each in environments] == ["gloo", "gloo"]
        assert environments[1]["NCCL_DEBUG"] == "INFO"  # the agent here inherits it

    def test_a_launcher_that_falls_silent_is_told_of(self) -> None:
        """Before the ranks end, and so before their ends: to whom may hear it again."""
        job = {"run": "x", "command": ["sleep", "60"], "environment": {}, "ranks": {"0": {}},
               "nic": "lo", "launcher": "127.0.0.1", "gpus": [], "preload": False,
               "silence": 0.5}  # fmt: skip
        agent = subprocess.Popen(
            [PYTHON, "-m", "cluster.agent"], cwd=ROOT, text=True,
            stdin=subprocess.PIPE, stdout=subprocess.PIPE,
        )  # fmt: skip
        assert agent.stdin is not None and agent.stdout is not None
        agent.stdin.write(json.dumps(job) + "\n")
        agent.stdin.flush()
        said = [json.loads(line) for line in agent.stdout if line.startswith("{")]
        assert agent.wait(timeout=10) == 1
        said = [what for what in said if what]
        assert said[0] == {"error": "the launcher was not heard for 0.5 s: all has ended here"}

    def test_a_signal_while_ranks_are_forked_reaches_them(self) -> None:
        """The process that forks them has told their numbers, and the agent has not read them."""
        rank = subprocess.Popen([sys.executable, "-c", "input()"], stdin=subprocess.PIPE)
        told = [sys.executable, "-c", f"print('{rank.pid} 0')"]
        forks = subprocess.Popen(told, stdout=subprocess.PIPE)
        assert forks.wait() == 0
        agent = Agent()
        agent._preloading = forks, [0]
        agent._obey({"signal": "SIGUSR1"})
        assert rank.poll() is None
        agent._adopt(forks.pid, 0)
        assert rank.wait(10) == -signal.SIGUSR1 and agent._ranks == {rank.pid: 0}

    def test_a_gap_in_the_network_ends_nothing(self, monkeypatch: pytest.MonkeyPatch) -> None:
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

    def test_a_rank_that_others_wait_for_at_the_start_is_named(self) -> None:
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

    def test_a_connection_that_is_lost_is_not_what_the_login_shell_said(
        self, tmp_path: Path
    ) -> None:
        fake_ssh(tmp_path, 'echo "mkdir: /opt/x: Permission denied" >&2; eval "$last"')
        with open(tmp_path / "log", "w") as log:
            process = subprocess.Popen(
                horovodrun("-H", "h1:1", "sh", "-c", "echo ready; exec sleep 1000"),
                env={**os.environ, "PATH": f"{tmp_path}:{os.environ['PATH']}"}, cwd=ROOT,
                stdout=log, stderr=log,
            )  # fmt: skip
        while "ready" not in (tmp_path / "log").read_text():
            assert process.poll() is None, (tmp_path / "log").read_text()
            time.sleep(0.1)
        subprocess.run(["pkill", "-KILL", "-P", str(process.pid)], check=True)
        assert process.wait(timeout=30) == 1
        assert "h1: the connection to it was lost" in (tmp_path / "log").read_text()

    @pytest.mark.parametrize(
        ("rank", "words"),
        [
            (0, "node1: its agent was killed by SIGKILL (out of memory? dmesg tells)"),
            (1, "node2: the connection to it was lost"),
        ],
    )
    def test_an_agent_is_killed(
        self, hosts: list[testbed.Host], rank: int, words: str, tmp_path: Path
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

    def test_an_ssh_is_cut(self, hosts: list[testbed.Host], tmp_path: Path) -> None:
        command = hosts[0].command(*horovodrun("-H", "node1:1,node2:1", PYTHON, "-c", SLEEP))
        process = started(command, tmp_path / "log", 2)
        subprocess.run(["pkill", "-P", str(process.pid), "-x", "ssh"], check=True)
        assert process.wait(timeout=60) == 1
        assert "node2: the connection to it was lost" in (tmp_path / "log").read_text()

    @pytest.mark.parametrize("number", [signal.SIGINT, signal.SIGTERM, signal.SIGHUP])
    def test_the_launcher_is_stopped(
        self, hosts: list[testbed.Host], number: signal.Signals, tmp_path: Path
    ) -> None:
        command = hosts[0].command(*horovodrun("-H", "node1:2,node2:2", PYTHON, "-c", SLEEP))
        process = started(command, tmp_path / "log", 4)
        os.killpg(process.pid, number)  # as a terminal does
        assert process.wait(timeout=15) == 128 + number
        assert f"stopped by {number.name}" in (tmp_path / "log").read_text()

    def test_nobody_reads_any_more(self, hosts: list[testbed.Host], tmp_path: Path) -> None:
        """As with `| tee log`, which Ctrl-C ends first: the ranks still get their signal."""
        told = tmp_path / "told"
        tell = (
            "import os, signal, sys, time\n"
            "def ask(*_):\n    open(sys.argv[1] + os.environ['HOROVOD_RANK'], 'w'); os._exit(0)\n"
            "signal.signal(signal.SIGUSR1, ask)\n"
            "for _ in range(600): print('ready', flush=True); time.sleep(0.1)"
        )
        command = horovodrun("-H", "node1:1,node2:1", PYTHON, "-c", tell, str(told))
        process = subprocess.Popen(
            hosts[0].command(*command), stdout=subprocess.PIPE, stderr=subprocess.STDOUT, cwd=ROOT
        )
        assert process.stdout is not None
        ready = {f"[{rank}]<stdout>:ready\n".encode() for rank in range(2)}
        while ready:  # one rank may be far ahead of the other
            ready.discard(process.stdout.readline())
        process.stdout.close()
        time.sleep(0.5)
        process.send_signal(signal.SIGTERM)
        assert process.wait(timeout=15) == 143
        assert sorted(path.name for path in tmp_path.glob("told*")) == ["told0", "told1"]

    def test_ranks_wait_for_who_takes_what_they_print(self) -> None:
        """What nobody takes would fill the launcher's memory."""
        endless = ["yes", f"of {os.getpid()}"]
        command = horovodrun("-H", "localhost:1", *endless)
        process = subprocess.Popen(command, cwd=ROOT, stdout=subprocess.PIPE)
        assert process.stdout is not None
        try:
            for _ in range(1000):
                process.stdout.readline()
            (rank,) = (entry.parent for entry in Path("/proc").glob("[0-9]*/cmdline")
                       if command_line(entry) == endless)  # fmt: skip
            written, before, deadline = 0, -1, time.monotonic() + 8
            while written > before:
                assert time.monotonic() < deadline, written
                before = written
                time.sleep(1)
                written = int((rank / "io").read_text().split()[3])  # wchar
            process.send_signal(signal.SIGTERM)
            process.stdout.close()
            assert process.wait(timeout=20) == 143
        finally:
            process.kill()
            process.wait()

    @pytest.mark.parametrize("closed", ["<&-", ">&-", "2>&-", "<&- >&- 2>&-"])
    def test_streams_that_are_closed(self, closed: str, tmp_path: Path) -> None:
        ran = tmp_path / "ran"
        line = horovodrun("-np", "1", "sh", "-c", f"echo out; echo err >&2; echo ran >{ran}")
        done = run(["sh", "-c", f'exec "$@" {closed}', "sh", *line])
        assert (done.returncode, ran.exists()) == (0, True), done.stdout
        assert ("[0]<stdout>:out" in done.stdout) == (">&-" not in closed.split())
        assert ("[0]<stderr>:err" in done.stdout) == ("2>&-" not in closed)

    @pytest.mark.parametrize("ends", ["fails", "stops"])
    def test_a_reader_who_pauses(self, ends: str, tmp_path: Path) -> None:
        """A rank that fails is heard, and so is Ctrl-C; ranks wait meanwhile, but not with their
        checkpoint."""
        full, told = tmp_path / "full", tmp_path / "told"
        prints = (
            "import os, signal, sys\n"
            "def ask(*_):\n"
            f"    os.write(1, b'y' * (1 << 18)); open({str(told)!r}, 'w').close(); os._exit(0)\n"
            "signal.signal(signal.SIGUSR1, ask)\n"
            "while True: print('x' * 500, flush=True)"
        )
        other = (
            f"until [ -e {full} ]; do sleep .1; done; exit 7" if ends == "fails" else "sleep 600"
        )
        script = f'[ $HOROVOD_RANK = 1 ] && {{ {other}; }}; exec "$0" -c "$1"'
        line = ["-H", "localhost:2", "sh", "-c", script, PYTHON, prints]
        command = horovodrun("--stop-seconds", "600", *line)
        process = subprocess.Popen(command, cwd=ROOT, stdout=subprocess.PIPE)
        try:
            launcher, before, now = psutil.Process(process.pid), -1, 0
            deadline = time.monotonic() + 60
            while now < 1 << 20 or now > before:  # until nothing more is taken
                assert process.poll() is None and time.monotonic() < deadline
                before = now
                time.sleep(1)
                now = sum(child.io_counters().write_chars for child in launcher.children(True))
            assert now < 32 << 20
            full.touch()
            if ends == "stops":
                process.send_signal(signal.SIGINT)
                while not told.exists():
                    assert time.monotonic() < deadline
                    time.sleep(0.1)
                process.send_signal(signal.SIGINT)
            assert process.wait(timeout=60) == (7 if ends == "fails" else 130)
        finally:
            process.kill()
            process.wait()

    def test_a_reader_who_is_slow_misses_nothing(self) -> None:
        """Also of a job that fails; its end is told behind what it printed, in order."""
        prints = "import sys; [print(number, 'x' * 500) for number in range(10000)]; sys.exit(3)"
        command = horovodrun("-H", "localhost:1", PYTHON, "-c", prints)
        with subprocess.Popen(
            command, cwd=ROOT, stdout=subprocess.PIPE, stderr=subprocess.STDOUT
        ) as process:
            assert process.stdout is not None
            said = b""
            while data := os.read(process.stdout.fileno(), 1 << 18):
                said += data
                time.sleep(0.05)
        *lines, last = said.decode().splitlines()
        assert [line.split()[0] for line in lines] == [f"[0]<stdout>:{n}" for n in range(10000)]
        assert last == "horovodrun: rank 0 on localhost ended with exit code 3"

    @pytest.mark.parametrize("detached", [False, True])
    def test_a_very_long_line_stays_one(self, detached: bool, tmp_path: Path) -> None:
        """With its characters, which end anywhere in a piece of it."""
        prints = "print('a' + 'ß€😀' * 300000); print('end')"
        kept = ["--record", str(tmp_path)] if detached else []
        done = run(horovodrun(*kept, "-H", "localhost:1", PYTHON, "-c", prints))
        assert done.returncode == 0
        said = (tmp_path / "rank-0.log").read_text("utf-8") if detached else done.stdout
        prefix = "" if detached else "[0]<stdout>:"
        assert said.splitlines() == [f"{prefix}a{'ß€😀' * 300000}", f"{prefix}end"]

    def test_another_line_within_a_long_one(self, capfd: pytest.CaptureFixture[str]) -> None:
        writer = record.Writer(1, "utf-8")
        for begin, text, part in (
            ("0:", "long", True), ("0:", "er", True), ("1:", "short\n", False),
            ("0:", "on", True), ("0:", "\n", False), ("0:", "new\n", False),
        ):  # fmt: skip
            writer.put(begin, text, part)
        writer.close()
        writer.thread.join()
        assert capfd.readouterr().out == "0:longer\n1:short\n0:on\n0:new\n"

    def test_all_that_a_pipe_made_larger_holds_is_told(self) -> None:
        """Of a rank that has ended before its agent reads."""
        prints = (
            "import fcntl, os, signal, subprocess\n"
            "fcntl.fcntl(1, 1031, 1 << 20)  # F_SETPIPE_SZ\n"
            "os.kill(agent := os.getppid(), signal.SIGSTOP)\n"
            "goes_on = ['sh', '-c', f'sleep 1; kill -CONT {agent}']\n"
            "subprocess.Popen(goes_on, stdout=subprocess.DEVNULL, stderr=subprocess.DEVNULL)\n"
            "os.write(1, b'line\\n' * 200000)\n"
            "os._exit(0)"
        )
        done = run(horovodrun("-H", "localhost:1", PYTHON, "-c", prints))
        assert (done.returncode, done.stdout.count("line\n")) == (0, 200000)

    def test_a_progress_bar_moves(self, tmp_path: Path) -> None:
        """With the start of its next state, as with plain horovodrun; not when its line is done."""
        script = (
            f"import os, time; print(end='1%\\r2%\\r3%', flush=True)\n"
            f"seen, end = {str(tmp_path / 'seen')!r}, time.monotonic() + 60\n"
            "while not os.path.exists(seen) and time.monotonic() < end: time.sleep(0.1)\n"
            "print('\\rdone\\r\\nend', flush=True)"
        )
        command = horovodrun("-H", "localhost:1", "python3", "-c", script)
        with subprocess.Popen(command, cwd=ROOT, stdout=subprocess.PIPE) as process:
            try:
                assert process.stdout is not None
                moved = b"[0]<stdout>:1%\r[0]<stdout>:2%\r"
                assert process.stdout.read(len(moved)) == moved
                (tmp_path / "seen").touch()
                rest = b"[0]<stdout>:3%\r[0]<stdout>:done\r\n[0]<stdout>:end\n"
                assert process.stdout.read() == rest
            finally:
                process.kill()

    def test_a_terminal_that_cannot_show_it(self, tmp_path: Path) -> None:
        """The job goes on, and what it keeps in files is as it was printed."""
        ascii_only = {"LC_ALL": "C", "PYTHONUTF8": "0", "PYTHONCOERCECLOCALE": "0"}
        printing = [*["-H", "localhost:1"], "printf", "Stra\\303\\237e\\n"]
        done = run(horovodrun(*printing), **ascii_only)
        assert (done.returncode, done.stdout) == (0, "[0]<stdout>:Stra?e\n")
        assert run(horovodrun("--record", str(tmp_path), *printing), **ascii_only).returncode == 0
        assert (tmp_path / "rank-0.log").read_text(encoding="utf-8") == "Straße\n"

    def test_what_ranks_print_is_read_as_they_write_it(self, tmp_path: Path) -> None:
        """Whatever the encoding of the launcher's own terminal."""
        command = horovodrun("--record", str(tmp_path), "-H", "localhost:1", PYTHON, "-c")
        done = run([*command, r"print('Stra\xdfe')"], PYTHONIOENCODING="latin-1")
        assert done.returncode == 0, done.stdout
        assert (tmp_path / "rank-0.log").read_text(encoding="utf-8") == "Straße\n"

    def test_a_terminal_that_another_program_does_not_wait_for(self) -> None:
        """What we both write to is non-blocking; nothing is lost."""
        reads, writes = os.pipe()
        os.set_blocking(writes, False)
        writer = record.Writer(writes, "utf-8")
        writer.put("", "x" * 500_000)
        time.sleep(0.5)
        assert writer.waiting  # for the pipe, which is full
        said = b""
        while len(said) < 500_000:
            said += os.read(reads, 1 << 16)
        writer.close()
        writer.thread.join()
        os.close(reads)
        os.close(writes)

    def test_a_terminal_that_is_closed_behind_make(self, tmp_path: Path) -> None:
        """Only the first process of its session hears of it, and as make does, waits for us."""
        script = (
            f"trap 'echo asked >{tmp_path}/told; exit' USR1; while :; do echo hi; sleep .1; done"
        )
        command = horovodrun("-H", "localhost:1", "sh", "-c", script)
        leader = (
            "import signal, subprocess, sys; signal.signal(signal.SIGHUP, lambda *_: None); "
            "subprocess.run(sys.argv[1:])"
        )
        pid, terminal = pty.fork()
        if pid == 0:
            os.chdir(ROOT)
            os.execv(PYTHON, [PYTHON, "-c", leader, *command])
        said = b""
        while b"hi" not in said:
            said += os.read(terminal, 1 << 10)
        os.close(terminal)
        deadline = time.monotonic() + 20
        while os.waitpid(pid, os.WNOHANG) == (0, 0):
            assert time.monotonic() < deadline
            time.sleep(0.1)
        assert (tmp_path / "told").read_text() == "asked\n"

    def test_a_terminal_that_closes_may_tell_twice(self, tmp_path: Path) -> None:
        """Its shell and the kernel; the checkpoint is waited for all the same."""
        script = f"trap 'sleep 5; echo saved >{tmp_path}/told; exit' USR1; trap '' TERM; echo hi; "
        script += "while :; do sleep .1; done"
        command = horovodrun("--stop-seconds", "60", "-H", "localhost:1", "sh", "-c", script)
        process = subprocess.Popen(command, cwd=ROOT, stdout=subprocess.PIPE)
        assert process.stdout is not None and b"hi" in process.stdout.readline()
        for _ in range(3):
            process.send_signal(signal.SIGHUP)
            time.sleep(0.3)
        assert process.wait(timeout=50) == 128 + signal.SIGHUP
        assert (tmp_path / "told").read_text() == "saved\n"

    def test_at_once_is_at_once_when_it_comes_first(self) -> None:
        """Of two signals that wait Python takes the one of the lower number, which is this one."""
        lasts = "trap '' TERM USR1; echo hi; while :; do sleep .1; done"
        command = horovodrun("--stop-seconds", "600", "-H", "localhost:1", "sh", "-c", lasts)
        process = subprocess.Popen(command, cwd=ROOT, stdout=subprocess.PIPE)
        assert process.stdout is not None and b"hi" in process.stdout.readline()
        process.send_signal(AT_ONCE)
        assert process.wait(timeout=60) == 128 + AT_ONCE

    @pytest.mark.parametrize("number", [signal.SIGINT, AT_ONCE])
    def test_a_signal_within_the_handler_of_another(
        self, number: int, monkeypatch: pytest.MonkeyPatch
    ) -> None:
        kept = SimpleNamespace(is_behind=lambda: False, tell=print)
        job = Job([SimpleNamespace(rank=0)], [], kept, stop_seconds=600)
        meanwhile = iter([number])

        def monotonic() -> float:
            for number in meanwhile:
                job._on_signal(number, None)
            return time.monotonic()

        monkeypatch.setattr("cluster.horovodrun.time", SimpleNamespace(monotonic=monotonic))
        job._on_signal(signal.SIGTERM, None)
        job._step(wait=0)
        assert "kill" in job._deadlines  # it is in its end, not at its checkpoint

    def test_a_signal_after_the_end_leaves_the_status(self) -> None:
        """Python's own end would be killed by it."""
        code = (
            "import os, signal, sys, cluster.horovodrun as h\n"
            "class Late:\n"
            "    def __del__(self, kill=os.kill, me=os.getpid()): kill(me, 2)\n"
            "late = Late()\n"
            "sys.exit(h.main())"
        )
        done = run([sys.executable, "-c", code, "-H", "localhost:1", "sh", "-c", "exit 3"])
        assert done.returncode == 3, done.stderr

    def test_a_job_that_left_the_foreground_goes_on_without_its_terminal(
        self, monkeypatch: pytest.MonkeyPatch, tmp_path: Path
    ) -> None:
        """By Ctrl-Z, bg and disown."""
        monkeypatch.setattr(record, "FOLDER", tmp_path / "logs")

        write = os.write

        def gone(descriptor: int, data: bytes) -> int:
            if b"is not" in data:
                raise OSError(errno.EIO, "")
            return write(descriptor, data)

        for foreground, signals in (([True, False], []), ([True, True], [signal.SIGHUP])):
            sent: list[int] = []
            with monkeypatch.context() as patched:
                patched.setattr(os, "kill", lambda _, number, sent=sent: sent.append(number))
                patched.setattr(record, "_in_foreground", iter(foreground).__next__)
                patched.setattr(os, "write", gone)
                patched.setattr(os.path, "sameopenfile", lambda *_: True)
                with record.Record(None, [], ["true"], 8) as kept:
                    for line in ("is read", "is not", "is not"):
                        kept.line(0, "stdout", line)
            assert sent == signals

    def test_an_interface_that_is_only_in_the_environment(self) -> None:
        done = run(horovodrun("-H", "localhost:2", PYTHON, "-c", TELL), HOROVOD_GLOO_IFACE="none0")
        assert "localhost: HOROVOD_GLOO_IFACE=none0 in the environment: there are lo" in done.stdout
        assert done.returncode != 0 and "SIGABRT" not in done.stdout

    @pytest.mark.parametrize("detached", [False, True])
    def test_a_run_that_cannot_be_noted_leaves_no_folder(
        self, detached: bool, monkeypatch: pytest.MonkeyPatch, tmp_path: Path
    ) -> None:
        """But for one that was launched: there it is told."""
        monkeypatch.setattr(record, "FOLDER", tmp_path / "logs")
        (folder := tmp_path / "launched").mkdir()

        def full(*_: object) -> None:
            raise OSError(errno.ENOSPC, os.strerror(errno.ENOSPC))

        monkeypatch.setattr(record, "write", full)
        with pytest.raises(Refusal, match=r"runs are noted there: No space left"):
            record.Record(folder if detached else None, [], ["true"], 8)
        assert folder.is_dir() and not list(tmp_path.glob("logs/*"))

    def test_a_rank_that_aborts_before_others_wait_for_it(self) -> None:
        code = "import os, horovod.torch as hvd; os.environ['HOROVOD_RANK'] == '1' or os.abort(); "
        done = run(horovodrun("-H", "localhost:2", PYTHON, "-c", f"{code} hvd.init()"))
        told = "horovodrun: rank 0 on localhost was killed by SIGABRT before hvd.init() had begun: "
        told += "where its last lines say HTTP request failed, it did not reach this host"
        assert done.stdout.splitlines()[-1] == f"{told} (make doctor)", done.stdout

    def test_a_rank_of_ddp_that_aborts_was_not_to_come_to_horovod(self) -> None:
        code = "import os; from strategies.ddp import HorovodrunEnvironment as E; e = E(); "
        code += "e.main_port; e.global_rank() and os.abort()"
        done = run(horovodrun("-H", "localhost:2", PYTHON, "-c", code))
        told = "horovodrun: rank 1 on localhost was killed by SIGABRT"
        assert done.stdout.splitlines()[-1].startswith(told), done.stdout
        assert "hvd.init()" not in done.stdout

    def test_a_stop_hides_no_failure(self, tmp_path: Path) -> None:
        """Ctrl-C while the others of a rank that failed are being ended."""
        ready, ended = tmp_path / "ready", tmp_path / "ended"
        fails = f"until [ -e {ready} ]; do sleep .1; done; exit 3"
        lasts = f"trap 'touch {ended}' TERM; touch {ready}; echo ready; while :; do sleep .1; done"
        script = f"[ $HOROVOD_RANK = 0 ] && {{ {fails}; }}; {lasts}"
        command = horovodrun("-H", "localhost:2", "sh", "-c", script)
        process = started(command, tmp_path / "log", 1)
        deadline = time.monotonic() + 30
        while not ended.exists():  # the failure is known, and rank 1 has some seconds left
            assert time.monotonic() < deadline
            time.sleep(0.02)
        process.send_signal(signal.SIGINT)
        assert process.wait(timeout=30) == 3
        told = (tmp_path / "log").read_text()
        assert told.endswith("horovodrun: rank 0 on localhost ended with exit code 3\n"), told

    @pytest.mark.parametrize(
        ("end", "words"),
        [
            ("exit 1", ", but rank 1 on localhost ended with exit code 1: look whether there is a "
                       "checkpoint\n"),
            ("exit 138", "\n"),  # with one, as by runs/run.py
            ("exit 0", "\n"),
        ],
    )  # fmt: skip
    def test_a_checkpoint_that_fails_at_a_stop(self, end: str, words: str, tmp_path: Path) -> None:
        script = f"trap '[ $HOROVOD_RANK = 0 ] && exit 138; sleep .5; {end}' USR1; echo ready; "
        script += "while :; do sleep .1; done"
        command = horovodrun("-H", "localhost:2", "sh", "-c", script)
        process = started(command, tmp_path / "log", 2)
        process.send_signal(signal.SIGTERM)
        assert process.wait(timeout=30) == 143
        told = (tmp_path / "log").read_text()
        assert told.endswith(f"horovodrun: stopped by SIGTERM{words}"), told

    @pytest.mark.parametrize("text", ["nan", "inf", "-1", "1e3", "soon"])
    def test_seconds_that_are_none_are_refused(self, text: str) -> None:
        done = run(horovodrun(f"--stop-seconds={text}", "true"))
        assert done.returncode == 2 and f"STOP_SECONDS={text}: give seconds" in done.stdout

    def test_a_disk_that_is_full(self, tmp_path: Path) -> None:
        """The job goes on; what it would print is lost."""
        (tmp_path / "rank-0.log").symlink_to("/dev/full")
        line = ["sh", "-c", "echo lost; sleep 1; echo lost; exit $HOROVOD_RANK"]
        done = run(horovodrun("--record", str(tmp_path), "-H", "localhost:1", *line))
        assert done.returncode == 0, done.stdout
        assert json.loads((tmp_path / "run.json").read_text())["state"] == "done"

    def test_ranks_that_do_not_listen(self, hosts: list[testbed.Host], tmp_path: Path) -> None:
        command = hosts[0].command(*horovodrun("-H", "node1:1,node2:1", PYTHON, "-c", STUBBORN))
        process = started(command, tmp_path / "log", 2)
        process.terminate()
        assert process.wait(timeout=15) == 143

    def test_the_launcher_is_killed(
        self, hosts: list[testbed.Host], project: Path, tmp_path: Path
    ) -> None:
        line = horovodrun("-H", "node1:2,node2:2", PYTHON, "-c", STUBBORN)
        command = hosts[0].command("env", "-C", str(project), *line)
        process = started(command, tmp_path / "log", 4)
        process.kill()
        process.wait(timeout=10)
        deadline = time.monotonic() + 15
        while sleepers():
            assert time.monotonic() < deadline
            time.sleep(0.1)
        assert list(project.glob("logs/launches/*"))
        status = ["env", "-C", str(project), PYTHON, "-m", "cluster.jobs", "status"]
        assert "no runs" in run(hosts[0].command(*status)).stdout


class TestDetached:
    """launch, status, logs, stop."""

    On = Callable[..., subprocess.CompletedProcess[str]]

    def state(self, on: On, host: testbed.Host, cwd: Path, run_id: str) -> dict:
        listed = json.loads(on(host, "cluster.jobs", "status", "--json", cwd=cwd).stdout)
        return next(state for state in listed if state["id"] == run_id)

    def launch(self, on: On, host: testbed.Host, cwd: Path, *arguments: str) -> str:
        done = on(host, "cluster.jobs", "launch", *arguments, cwd=cwd)
        assert done.returncode == 0, done.stdout
        return done.stdout.split()[1].rstrip(",")

    def wait(self, on: On, host: testbed.Host, cwd: Path, run_id: str) -> dict:
        deadline = time.monotonic() + 90
        while (state := self.state(on, host, cwd, run_id))["state"] in ("starting", "running"):
            assert time.monotonic() < deadline, state
            time.sleep(0.3)
        return state

    def ready(self, on: On, host: testbed.Host, cwd: Path, ranks: int) -> None:
        deadline = time.monotonic() + 60
        while len(sleepers()) < ranks:
            assert time.monotonic() < deadline
            time.sleep(0.1)

    def test_a_command_of_several_lines_is_a_row(
        self, monkeypatch: pytest.MonkeyPatch, tmp_path: Path, capsys: pytest.CaptureFixture[str]
    ) -> None:
        monkeypatch.setattr(jobs, "FOLDER", tmp_path)
        command = "python -c 'import os\n\nprint(1)\n'"
        state = {
            "id": "run", "command": command, "hosts": {"h1": 1}, "ranks": 1, "detached": True,
            "launcher": "", "state": "failed", "reason": "one\ntwo", "began": "2026-11-26T00:00:00",
            "ended": "2026-11-26T00:00:01",
        }  # fmt: skip
        (tmp_path / "run").mkdir()
        write(tmp_path / "run", state)
        assert jobs.status(argparse.Namespace(json=False)) == 0
        _, row = capsys.readouterr().out.splitlines()
        assert row.endswith("h1:1   python -c 'import os print(1) ' (one two)")
        assert jobs.status(argparse.Namespace(json=True)) == 0
        assert json.loads(capsys.readouterr().out)[0]["command"] == command

    def test_a_run_from_start_to_end(
        self, on: On, hosts: list[testbed.Host], project: Path, tmp_path: Path
    ) -> None:
        train = [PYTHON, "template.py", "trainer.max_epochs=2"]
        run_id = self.launch(on, hosts[0], project, "-H", "node1:1,node2:1", *train)
        state = self.wait(on, hosts[0], project, run_id)
        assert state["state"] == "done", on(hosts[0], "cluster.jobs", "logs", cwd=project).stdout
        assert state["ended"] >= state["began"]
        printed = on(hosts[0], "cluster.jobs", "logs", "--follow", cwd=project).stdout
        assert "ranks   2: 1 on node1, 1 on node2" in printed and "test/acc" in printed
        listed = on(hosts[0], "cluster.jobs", "status", cwd=project).stdout
        assert run_id in listed and "done" in listed and "node1:1,node2:1" in listed
        assert on(hosts[0], "cluster.jobs", "stop", cwd=project).returncode == 2

    def test_a_failure_is_told(self, on: On, hosts: list[testbed.Host], project: Path) -> None:
        fail = (
            "import os, sys, time; rank = int(os.environ['HOROVOD_RANK']); print('bye'); "
            "time.sleep(60 * (1 - rank)); sys.exit(3)"
        )
        run_id = self.launch(on, hosts[0], project, "-H", "node1:1,node2:1", PYTHON, "-c", fail)
        state = self.wait(on, hosts[0], project, run_id)
        assert (state["state"], state["exit"]) == ("failed", 3)
        assert state["reason"] == "rank 1 on node2 ended with exit code 3"
        listed = on(hosts[0], "cluster.jobs", "status", cwd=project).stdout
        assert "sys.exit(3)" in listed and "(rank 1 on node2 ended with exit code 3)" in listed
        assert "bye" in on(hosts[0], "cluster.jobs", "logs", "--rank", "1", cwd=project).stdout
        wrong = on(hosts[0], "cluster.jobs", "logs", "--rank", "2", cwd=project)
        assert wrong.returncode == 2 and "the run has ranks 0 to 1" in wrong.stdout

    def test_stop_leaves_a_checkpoint(
        self, on: On, hosts: list[testbed.Host], project: Path, tmp_path: Path
    ) -> None:
        train = [PYTHON, "template.py", "trainer.max_epochs=100000", f"log_dir={tmp_path}"]
        train.append("callbacks.early_stopping.patience=100000")
        run_id = self.launch(on, hosts[0], project, "-H", "node1:1,node2:1", *train)
        deadline = time.monotonic() + 60
        while "epoch 2" not in on(hosts[0], "cluster.jobs", "logs", cwd=project).stdout:
            assert time.monotonic() < deadline
            time.sleep(0.5)
        stopped = on(hosts[0], "cluster.jobs", "stop", cwd=project)
        assert stopped.returncode == 0, stopped.stdout
        assert self.state(on, hosts[0], project, run_id)["state"] == "stopped"
        (checkpoint,) = tmp_path.glob("*/runs/*/checkpoints/stopped.ckpt")
        again = [PYTHON, "template.py", f"ckpt_path={checkpoint}", "trainer.max_epochs=10"]
        done = run(["env", "-C", str(project), *again, f"log_dir={tmp_path / 'again'}"])
        assert done.returncode == 0, done.stdout

    def test_another_stop_asks_for_the_same(
        self, on: On, hosts: list[testbed.Host], project: Path
    ) -> None:
        """As of who has interrupted the first, or of two people; KILL=1 does not wait."""
        script = "trap 'sleep 8; echo saved; exit' USR1; trap '' TERM; echo hi; "
        script += "while :; do sleep .1; done"
        for kill in ([], ["--kill"]):
            job = ["--stop-seconds", "60", "-H", "node1:1", "sh", "-c", script]
            self.launch(on, hosts[0], project, *job)
            while "hi" not in on(hosts[0], "cluster.jobs", "logs", cwd=project).stdout.splitlines():
                time.sleep(0.2)
            first = [PYTHON, "-m", "cluster.jobs", "stop"]
            stopping = subprocess.Popen(
                hosts[0].command("env", "-C", str(project), *first),
                stdout=subprocess.PIPE, text=True,
            )  # fmt: skip
            assert stopping.stdout is not None
            assert "up to 60 s for a checkpoint" in stopping.stdout.readline()
            time.sleep(1)
            assert on(hosts[0], "cluster.jobs", "stop", *kill, cwd=project).returncode == 0
            assert stopping.wait(timeout=20) == 0
            logs = on(hosts[0], "cluster.jobs", "logs", cwd=project).stdout
            assert ("saved" in logs) == (not kill), logs

    def test_gpus_in_use_are_refused(
        self, on: On, hosts: list[testbed.Host], project: Path, tmp_path: Path
    ) -> None:
        file = tmp_path / "hosts.yaml"
        file.write_text("hosts: {node2: {slots: 1, gpus: [5]}}")
        sleep = ["--hostfile", str(file), PYTHON, "-c", SLEEP]
        first = on(hosts[0], "cluster.jobs", "launch", *sleep, cwd=project)
        assert first.returncode == 2 and "GPU 5 of the host file is not there" in first.stdout
        # Without those checks, as later: the time comes when another run has the GPU.
        with open(tmp_path / "log", "w") as log:
            process = subprocess.Popen(
                hosts[0].command("env", "-C", str(project), *horovodrun(*sleep)),
                stdout=log, stderr=log,
            )  # fmt: skip
        self.ready(on, hosts[0], project, 1)
        (running,) = json.loads(
            on(hosts[0], "cluster.jobs", "status", "--json", cwd=project).stdout
        )
        second = run(hosts[0].command("env", "-C", str(project), *horovodrun(*sleep)))
        assert second.returncode == 2
        assert f"node2: GPU 5 is in use by run {running['id']}" in second.stdout
        killed = on(hosts[0], "cluster.jobs", "stop", "--kill", cwd=project)
        assert killed.returncode == 0, killed.stdout
        assert process.wait(timeout=15) == 143

    def test_later(self, on: On, hosts: list[testbed.Host], project: Path) -> None:
        line = ["-H", "node1:1", "true"]
        run_id = self.launch(on, hosts[0], project, "--at", "2999-01-01 02:00", *line)
        assert self.state(on, hosts[0], project, run_id)["state"] == "waiting"
        stopped = on(hosts[0], "cluster.jobs", "stop", cwd=project)
        assert stopped.returncode == 0
        state = self.state(on, hosts[0], project, run_id)
        assert state["state"] == "stopped" and birth(state["pid"]) is None
        assert state["ended"] >= state["began"]
        zone = datetime.timezone(datetime.timedelta(hours=9))
        there = datetime.datetime(2999, 1, 1, 2, tzinfo=zone)
        assert jobs._start("2999-01-01T02:00+09:00") == there.astimezone().replace(tzinfo=None)
        for at, words in (("25:00", "write a time as 02:00"), ("2001-01-01 02:00", "is past")):
            done = on(hosts[0], "cluster.jobs", "launch", "--at", at, *line, cwd=project)
            assert done.returncode == 2 and words in done.stdout

    @pytest.mark.parametrize(
        ("at", "expected"), [("13:00", "2026-01-31 13:00"), ("02:00", "2026-02-01 02:00")]
    )
    def test_an_hour_that_is_past_is_tomorrows(
        self, at: str, expected: str, monkeypatch: pytest.MonkeyPatch
    ) -> None:
        class Noon(datetime.datetime):
            @classmethod
            def now(cls, tz: datetime.tzinfo | None = None) -> Noon:
                return cls(2026, 1, 31, 12)

        clock = SimpleNamespace(datetime=Noon, timedelta=datetime.timedelta)
        monkeypatch.setattr(jobs, "datetime", clock)
        assert jobs._start(at) == datetime.datetime.fromisoformat(expected)

    def test_one_that_waits_notes_itself_that_it_was_stopped(
        self, on: On, hosts: list[testbed.Host], project: Path
    ) -> None:
        """Else `make status` beside `make stop` may take it for lost."""
        late = ["--at", "2999-01-01 02:00", "-H", "node1:1", "true"]
        run_id = self.launch(on, hosts[0], project, *late)
        pid = self.state(on, hosts[0], project, run_id)["pid"]
        deadline = time.monotonic() + 30
        while not catches(pid, signal.SIGTERM):
            assert time.monotonic() < deadline
            time.sleep(0.1)
        os.kill(pid, signal.SIGTERM)
        while birth(pid) is not None:
            assert time.monotonic() < deadline
            time.sleep(0.1)
        assert self.state(on, hosts[0], project, run_id)["state"] == "stopped"

    def test_what_a_run_notes_in_its_last_moment_stays(
        self, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
    ) -> None:
        state = {"id": "x", "launcher": place(), "pid": os.getpid(), "birth": "1",
                 "state": "running", "detached": True, "began": "2026-01-01T00:00:00"}  # fmt: skip
        (tmp_path / "x").mkdir()
        write(tmp_path / "x", state)

        def ends(_: int) -> None:
            write(tmp_path / "x", state | {"state": "done"})

        monkeypatch.setattr(jobs, "FOLDER", tmp_path)
        monkeypatch.setattr(jobs, "birth", ends)
        assert [run["state"] for run in jobs.runs()] == ["done"]
        assert json.loads((tmp_path / "x" / "run.json").read_text())["state"] == "done"

    def test_what_was_taken_for_lost_is_stopped(
        self, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
    ) -> None:
        """By a `make status` beside it."""
        state = {"id": "x", "launcher": place(), "pid": 1, "birth": "none",
                 "state": "waiting", "detached": True, "began": "2026-01-01T00:00:00"}  # fmt: skip
        (tmp_path / "x").mkdir()
        write(tmp_path / "x", state | {"state": "lost"})
        monkeypatch.setattr(jobs, "FOLDER", tmp_path)
        monkeypatch.setattr(jobs, "_named", lambda *_, **__: state)
        assert jobs.stop(argparse.Namespace(run="x", kill=False)) == 0
        assert json.loads((tmp_path / "x" / "run.json").read_text())["state"] == "stopped"

    def test_a_run_of_another_user_or_host(self, monkeypatch: pytest.MonkeyPatch) -> None:
        state = {"id": "x", "launcher": place(), "pid": os.getpid(),
                 "birth": birth(os.getpid()), "state": "running", "detached": True}  # fmt: skip

        def denied(*_: int) -> None:
            raise PermissionError

        monkeypatch.setattr(jobs, "_named", lambda *_, **__: state)
        monkeypatch.setattr(os, "kill", denied)
        with pytest.raises(Refusal, match="run x is another user's"):
            jobs.stop(argparse.Namespace(run="x", kill=False))
        state["launcher"] = "node9"  # where the number is another process's
        with pytest.raises(Refusal, match="run x was launched on node9: stop it there"):
            jobs.stop(argparse.Namespace(run="x", kill=False))

    def test_a_run_of_another_container_is_not_lost(
        self, monkeypatch: pytest.MonkeyPatch, tmp_path: Path
    ) -> None:
        """One with the name of this host, where its process has another number."""
        monkeypatch.setattr(record, "FOLDER", tmp_path)
        monkeypatch.setattr(jobs, "FOLDER", tmp_path)
        code = "from pathlib import Path; from cluster import record; "
        code += f"record.Record(Path({str(tmp_path / 'x')!r}), [], ['true'], 8)"
        (tmp_path / "x").mkdir()
        there = ["unshare", "--pid", "--fork", "--mount-proc", PYTHON, "-c", code]
        if run(there[:-2] + ["--version"]).returncode:
            pytest.skip("unshare --pid needs root")
        done = run(there)
        assert done.returncode == 0, done.stdout
        assert [state["state"] for state in jobs.runs()] == ["starting"]
        with pytest.raises(Refusal, match=r"run x was launched on .*: stop it there"):
            jobs.stop(argparse.Namespace(run="x", kill=False))

    def test_what_is_refused_when_its_time_comes_is_told(
        self, on: On, hosts: list[testbed.Host], project: Path
    ) -> None:
        done = on(hosts[0], "cluster.jobs", "launch", "-H", "node1:1", cwd=project)
        assert done.returncode == 2 and "the command is missing" in done.stdout
        file = project / "hosts.yaml"
        file.write_text("hosts: {node1: 1}")
        soon = (datetime.datetime.now() + datetime.timedelta(seconds=8)).isoformat()
        where = ["--at", soon, "--hostfile", str(file)]
        run_id = self.launch(on, hosts[0], project, *where, "true")
        file.unlink()
        deadline = time.monotonic() + 60
        while (state := self.state(on, hosts[0], project, run_id))["state"] == "waiting":
            assert time.monotonic() < deadline
            time.sleep(0.5)
        assert state["state"] == "failed" and "No such file" in state["reason"], state

    def test_code_that_changes_until_its_time_is_refused(
        self, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
    ) -> None:
        """Hosts without a shared file system would train with what they have."""

        def other(_: list[Host]) -> None:
            raise Refusal("node2: code: other than here: template.py")

        became: list[list[str]] = []
        monkeypatch.setattr(jobs, "quick", other)
        monkeypatch.setattr(os, "execv", lambda _, line: became.append(line))
        monkeypatch.setattr(signal, "signal", lambda *_: None)  # SIGTERM stays the suite's own
        write(tmp_path, {"state": "waiting"})
        asked = {"record": tmp_path, "np": None, "hosts": "node1,node2", "hostfile": ""}
        asked |= {"stop_seconds": 8, "command": ["true"], "at": "2001-01-01 02:00"}
        with pytest.raises(Refusal):
            jobs.run(argparse.Namespace(**asked))
        assert not became
        state = json.loads((tmp_path / "run.json").read_text())
        assert (state["state"], state["reason"][:24]) == ("failed", "node2: code: other than ")
        asked |= {"at": "", "np": 1}  # just looked at
        jobs.run(argparse.Namespace(**asked))
        assert became[0][-5:] == ["-np", "1", "-H", "node1,node2", "true"]

    def test_a_run_that_cannot_be_noted_is_none(
        self, tmp_path: Path, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
    ) -> None:
        """On a full disk: what was started for it ends, and so does what finds no note."""
        real, made = subprocess.Popen, []

        def start(_: list[str], **how: object) -> subprocess.Popen:
            made.append(real(["sleep", "30"]))
            return made[0]

        def full(*_: object) -> None:
            raise OSError(errno.ENOSPC, "No space left on device", "run.json")

        monkeypatch.chdir(tmp_path)
        monkeypatch.setattr(subprocess, "Popen", start)
        monkeypatch.setattr(jobs, "write", full)
        monkeypatch.setattr(jobs, "quick", lambda _: None)
        monkeypatch.setattr(sys, "argv", ["jobs", "launch", "-H", "node1:1", "true"])
        try:
            assert jobs.main() == 2
            assert made[0].returncode == -signal.SIGKILL
        finally:
            made[0].kill()
            made[0].wait()
        told = capsys.readouterr().err
        assert told == "error: [Errno 28] No space left on device: 'run.json'\n"
        assert not list(tmp_path.glob("logs/launches/*"))
        monkeypatch.setattr(jobs, "NOTE_SECONDS", 0)
        monkeypatch.setattr(sys, "argv", ["jobs", "run", "--record", str(tmp_path), "true"])
        monkeypatch.setattr(os, "execv", lambda *_: pytest.fail("it runs"))
        assert jobs.main() == 2 and "nothing is noted of this run" in capsys.readouterr().err

    def test_what_is_noted_of_a_run_before_its_launcher_runs(
        self, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
    ) -> None:
        """The same as the launcher itself notes."""
        monkeypatch.chdir(tmp_path)
        monkeypatch.setattr(jobs, "quick", lambda _: None)
        monkeypatch.setattr(subprocess, "Popen", lambda *_, **__: SimpleNamespace(pid=os.getpid()))
        monkeypatch.setattr(sys, "argv", ["jobs", "launch", "-H", "node1:2,node2:1", "true"])
        assert jobs.main() == 0
        (file,) = tmp_path.glob("logs/launches/*/run.json")
        launched = json.loads(file.read_text())
        record.Record(file.parent, ranks([Host("node1", 2), Host("node2", 1)]), ["true"], 8.0)
        noted = json.loads(file.read_text())
        assert noted | {"began": launched["began"]} == launched

    def test_logs_are_of_the_newest_whose_output_is_kept(
        self, tmp_path: Path, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
    ) -> None:
        """Not of one in another terminal; and what is no run is passed over."""
        monkeypatch.setattr(jobs, "FOLDER", tmp_path)
        common = {
            "launcher": place(), "pid": os.getpid(), "birth": birth(os.getpid()),
            "state": "running", "ranks": 2, "began": "2026-01-01T00:00:00",
        }  # fmt: skip
        for name, detached in (("1", True), ("2", False)):
            (tmp_path / name).mkdir()
            write(tmp_path / name, {**common, "id": name, "detached": detached})
        (tmp_path / "3").mkdir()
        (tmp_path / "3" / "run.json").write_text('{"something": "else"}')
        (tmp_path / "4").mkdir()
        write(tmp_path / "4", {**common, "id": "4", "detached": True, "began": "long ago"})
        (tmp_path / "1" / "rank-0.log").write_text("moves\r" + "x" * (1 << 21))
        monkeypatch.setattr(sys, "argv", ["jobs", "logs"])
        assert jobs.main() == 0
        said, told = capsys.readouterr()
        assert said.startswith("moves\r") and len(said) == 6 + (1 << 21) and not told
        monkeypatch.setattr(sys, "argv", ["jobs", "logs", "--rank", "1"])
        assert jobs.main() == 0
        assert capsys.readouterr() == ("", "rank-1 has printed nothing yet\n")
        monkeypatch.setattr(sys, "argv", ["jobs", "logs", "2"])
        assert jobs.main() == 2
        assert "prints to the terminal that it was started in" in capsys.readouterr().err

    def test_of_several_that_run_one_has_to_be_named(
        self, tmp_path: Path, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
    ) -> None:
        """All of them are shown, and the last ten of those that ended."""
        monkeypatch.setattr(jobs, "FOLDER", tmp_path)
        common = {
            "launcher": place(), "pid": os.getpid(), "birth": birth(os.getpid()),
            "detached": True, "began": "2026-01-01T00:00:00",
        }  # fmt: skip
        names = [f"{number:02}" for number in range(14)]
        for name in names:
            (tmp_path / name).mkdir()
            state = "running" if name in ("00", "13") else "done"
            write(tmp_path / name, {**common, "id": name, "state": state})
        assert jobs.status(argparse.Namespace(json=True)) == 0
        shown = [state["id"] for state in json.loads(capsys.readouterr().out)]
        assert shown == [*names[3:13], "00", "13"]
        with pytest.raises(Refusal, match="several runs are running: RUN= one of 00, 13$"):
            jobs._named(None, alive=True)  # stop would end this process, if it named one
        assert jobs._named("00", alive=True)["id"] == "00"

    def test_a_killed_launcher_is_told(
        self, on: On, hosts: list[testbed.Host], project: Path
    ) -> None:
        line = ["-H", "node1:1,node2:1", PYTHON, "-c", SLEEP]
        run_id = self.launch(on, hosts[0], project, *line)
        self.ready(on, hosts[0], project, 2)
        os.kill(self.state(on, hosts[0], project, run_id)["pid"], signal.SIGKILL)
        deadline = time.monotonic() + 15
        while sleepers():
            assert time.monotonic() < deadline
            time.sleep(0.1)
        assert self.state(on, hosts[0], project, run_id)["state"] == "lost"
        # So it stands in its record too, for hosts that share it and do not know the launcher.
        kept = json.loads((project / "logs" / "launches" / run_id / "run.json").read_text())
        assert kept["state"] == "lost" and kept["began"] <= kept["ended"]

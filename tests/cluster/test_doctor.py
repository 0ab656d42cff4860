"""The doctor is silent about healthy hosts, and names each planted fault with what fixes it."""

from __future__ import annotations

import ast
import importlib.metadata
import json
import os
import re
import shutil
import signal
import subprocess
import sys
import textwrap
import time
from collections import Counter
from collections.abc import Callable, Iterator
from dataclasses import replace
from pathlib import Path
from typing import Any

import horovod
import pytest

from cluster import doctor, findings, probe, testbed
from cluster.hostfile import read, typed
from cluster.hosts import Host, Refusal
from tests.cluster.conftest import GREETING, PYTHON, made
from tests.conftest import ROOT, program, run, wait_until

On = Callable[..., subprocess.CompletedProcess[str]]
# Just enough of all, for two ranks of 300 on a host.
ENOUGH: dict[str, Any] = {
    "disk": {str(ROOT): 1024}, "memory": 1000, "gpus": {"devices": []}, "cores": 2, "files": 814,
    "infiniband": False, "memlock": -1,
}  # fmt: skip


@pytest.fixture(scope="module")
def many() -> Iterator[list[testbed.Node]]:
    yield from made(6)


def examined(
    on: On, host: testbed.Node, project: Path, hostfile: str, **environment: str
) -> tuple[int, list[dict]]:
    file = project.parent / "hosts.yaml"
    file.write_text(textwrap.dedent(hostfile))
    asked = ["cluster.doctor", "--hostfile", str(file), "--json"]
    done = on(host, *asked, cwd=project, **environment)
    try:
        return done.returncode, json.loads(done.stdout)["findings"]
    except json.JSONDecodeError:
        raise AssertionError(done.stdout) from None


def test_nothing_is_found_on_healthy_hosts(on: On, odd_hosts: list[testbed.Node]) -> None:
    done = on(odd_hosts[0], "cluster.doctor", "-H", "node1:1,node2:1")
    assert done.returncode == 0, done.stdout
    lines = done.stdout.splitlines()
    assert lines[-1] == "fit" and all(line.startswith("ok ") for line in lines[:-1])
    checks = {line.split()[1] for line in lines[:-1]}
    assert checks == {*doctor.ORDER} - {"ssh"}
    assert any("node1-node2" in line and "bus bandwidth" in line for line in lines)


def test_each_trouble_of_ssh_is_told_from_the_others(
    on: On, many: list[testbed.Node], project: Path
) -> None:
    """Refused, wrong key, unknown and changed host key, a hang, an unknown name: told apart."""
    key = project.parent / "key"
    subprocess.run(["ssh-keygen", "-q", "-t", "ed25519", "-N", "", "-f", key], check=True)
    public = " ".join(key.with_suffix(".pub").read_text().split()[:2])
    known = project.parent / "known_hosts"
    known.write_text(f"node5,10.77.0.5 {public}\n")
    mute = "import socket, time; s = socket.create_server(('', 2223)); time.sleep(600)"
    listener = subprocess.Popen(many[5].command(sys.executable, "-c", mute))
    try:
        status, findings = examined(on, many[0], project, f"""
            hosts:
              node1: {{slots: 1}}
              node2: {{slots: 1, port: 2222}}
              node3: {{slots: 1, ssh: [PubkeyAuthentication=no]}}
              node4: {{slots: 1, ssh: [UserKnownHostsFile=/dev/null]}}
              node5: {{slots: 1, ssh: [UserKnownHostsFile={known}]}}
              node6: {{slots: 1, port: 2223}}
              node9: {{slots: 1}}
        """)  # fmt: skip
    finally:
        listener.kill()
        listener.wait()
    assert status == 1
    found = {f["host"]: (f["check"], f["text"], f["fix"]) for f in findings if f["level"] == "FAIL"}
    assert found == {
        "node2": (
            "ssh", "no sshd listens there on port 2222",
            "on node2: sudo systemctl start ssh, or name its port in the host file",
        ),
        "node3": (
            "ssh", "it lets nobody in with our key",
            "ssh-copy-id -o PubkeyAuthentication=no node3",
        ),
        "node4": (
            "ssh", "its host key is unknown here",
            "ssh -o UserKnownHostsFile=/dev/null node4 once, and compare the fingerprint",
        ),
        "node5": (
            "ssh", "its host key is another than the known one",
            "if the host was set up anew: ssh-keygen -R node5, "
            f"then ssh -o UserKnownHostsFile={known} node5",
        ),
        "node6": (
            "ssh", "it took the connection and said nothing for 10 s",
            "on node6: sudo systemctl restart ssh",
        ),
        "node9": (
            "ssh", "no such host: no IPv4 address for it in DNS, /etc/hosts or ~/.ssh/config",
            "write the name that ssh and the other hosts know",
        ),
    }  # fmt: skip


def test_files_that_cannot_be_read(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """Of a file that is root's, a checkout on a disk that fails."""
    assert probe.digest(str(tmp_path / "gone")) == "unreadable: No such file or directory"
    (tmp_path / "large").write_bytes(bytes(probe.MOST_BYTES + 1))
    assert probe.digest(str(tmp_path / "large")) == f"{probe.MOST_BYTES + 1} bytes"
    monkeypatch.setattr(doctor, "PROBE", "import os; os.listdir('/nowhere')")
    with pytest.raises(Refusal, match="this host cannot be looked at: FileNotFoundError"):
        doctor._here(quick=True)


def test_hosts_that_lack_the_same_are_mended_by_one_command() -> None:
    """64 of them with old code would have 64."""
    hosts = [Host("node1", 4), Host("node-2.cluster", 2), Host("node3", 1)]
    facts = {"code": {"template.py": "old"}, "root": True}
    here = {"code": {"template.py": "new"}, "synced": {"template.py"}, "tracked": set()}
    here["hosts"] = typed([*hosts, Host("node4", 1)])
    stale = [finding for host in hosts for finding in findings.checkout(host, facts, here)]
    missing = findings.checkout(Host("node4", 1), {"code": None, "root": False}, here)
    first, second = findings.joined([*stale, *missing])
    assert first.host == "node1,node-2.cluster,node3"
    assert first.fix.startswith("make sync HOSTS=node1:4,node-2.cluster:2,node3:1,node4:1")
    assert second == missing[0]
    facts = ENOUGH | {"memory": 500, "cores": 1}
    twins = [Host("node1", 2), Host("node2", 2)]
    found = findings.joined([line for host in twins for line in findings.room(host, facts, 4)])
    fixes = [(line.check, line.host, line.fix) for line in found if line.fix]
    assert fixes == [(check, "node1,node2", findings.few(1)) for check in ("memory", "cores")]
    # Of two hosts already: each pair has its own.
    pairs = [findings.Finding("FAIL", "all-reduce", a, "x", f"make hello HOSTS={a}") for a in "ab"]
    pairs = [replace(pair, fix=f"{pair.fix}:1,c:1") for pair in pairs]
    assert findings.joined(pairs) == pairs
    alike = [findings.Finding("ok", "clock", f"node{index}", "as here") for index in range(8, 12)]
    assert [line.host for line in findings.joined(alike)] == ["node[8-11]"]


def test_an_all_reduce_that_fails(monkeypatch: pytest.MonkeyPatch, tmp_path: Path) -> None:
    """What to type is what can be typed; what the launcher refuses says by itself what to do."""
    pair = (Host("localhost", 2),)
    with monkeypatch.context() as patched:
        patched.setenv("TORCH_LOGS", "nonsense")  # torch of a rank fails by it
        found = doctor._exchange(pair)
    assert found.level == "FAIL" and "rank " in found.text
    look = "HOROVOD_LOG_LEVEL=debug NCCL_DEBUG=INFO make hello HOSTS=localhost:2"
    assert found.fix in (look, f"{look} PYTHON={PYTHON}")
    (tmp_path / "logs").symlink_to(tmp_path / "nowhere")
    for name in ("cluster", "strategies"):
        (tmp_path / name).symlink_to(ROOT / name)
    monkeypatch.setattr(doctor, "ROOT", tmp_path)
    found = doctor._exchange(pair)
    assert (found.level, found.fix) == ("FAIL", "") and "logs is a link to" in found.text


def test_an_all_reduce_that_hangs(monkeypatch: pytest.MonkeyPatch, tmp_path: Path) -> None:
    """It is ended; its ranks are as the host file says of them."""
    script = f"cd {tmp_path}; cat >hosts.yaml; sleep 20 <&- >&- 2>&- & wait; touch waited"
    monkeypatch.setattr(doctor.sys, "executable", str(program(tmp_path / "python", script)))
    monkeypatch.setattr(doctor, "PAIR_SECONDS", 1)
    way = {"nic": "eth1", "user": "ada", "port": 2222, "ssh": ("ProxyJump=login",)}
    group = Host("node1", 1, gpus=(3,), **way, env={"A": "b"}), Host("node2", 1)
    found = doctor._exchange(group)
    assert (found.level, found.text) == ("FAIL", "no end within 1 s")
    assert not (tmp_path / "waited").exists()
    assert read(tmp_path / "hosts.yaml") == [*group]


def test_a_host_that_falls_silent_reaches_nobody() -> None:
    contact = object.__new__(doctor.Contact)
    pipe = subprocess.PIPE
    contact.process = subprocess.Popen(
        ["true"], text=True, stdin=pipe, stdout=pipe, start_new_session=True
    )
    assert contact.reaches([("node2", "10.0.0.2", 1)]) == {"node2": "no answer"}
    contact.close()


def test_other_code_and_packages_are_named(on: On, project: Path, tmp_path: Path) -> None:
    """A missing and a stale checkout, another version, no environment, a Horovod that fails."""
    (tmp_path / "empty").mkdir()
    with (project / "requirements.txt").open("a") as requirements:
        requirements.write("tqdm\n")  # a fork needs it
    for name in ("models/vocabulary.json", "models/untracked.json", "README.md"):
        (project / name).write_text("older")
    for command in (["init", "-q"], ["add", "models/vocabulary.json", "README.md"]):
        subprocess.run(["git", *command], cwd=project, check=True)
    shutil.copytree(project.parent, tmp_path / "stale")
    (tmp_path / "stale" / "project" / "models" / "classifier.py").write_text("# older")
    for name in ("models/vocabulary.json", "models/untracked.json", "README.md"):
        (project / name).write_text("newer")
    (project / "secrets.yaml").write_text("token: dummy")  # is here only, and stays so
    metadata = importlib.metadata.distribution("tqdm")
    file = Path(str(metadata.locate_file(f"tqdm-{metadata.version}.dist-info/METADATA")))
    other = tmp_path / "METADATA"
    other.write_text(file.read_text().replace(f"Version: {metadata.version}", "Version: 1.0.0", 1))
    for hosts in made(6):
        hosts[1].shows(tmp_path / "empty", project.parent)
        hosts[2].shows(tmp_path / "stale", project.parent)
        hosts[3].shows(other, file)
        hosts[4].shows(tmp_path / "empty", Path(PYTHON).parent)
        hosts[5].shows(tmp_path / "empty", Path(horovod.__file__).parent / "torch")
        names = "\n".join(f"  node{number}: {{slots: 1}}" for number in range(1, 7))
        status, findings = examined(on, hosts[0], project, f"hosts:\n{names}\n")
    assert status == 1
    found = {f["host"]: f for f in findings if f["level"] == "FAIL"}
    assert found.keys() == {f"node{number}" for number in range(2, 7)}
    for number, check, words in (
        (2, "code", f"{project} is missing there"),
        (3, "code", "other than here: models/classifier.py"),
        (4, "packages", f"tqdm 1.0.0, here {metadata.version}"),
        (5, "packages", "does not run there: No such file"),
        (6, "packages", "Horovod does not run there"),
    ):
        finding = found[f"node{number}"]
        assert finding["check"] == check and words in finding["text"], finding
    # Not what no run reads, and not what git does not track unless it is code.
    told = "other than here: models/classifier.py, models/vocabulary.json"
    assert found["node3"]["text"] == told
    assert found["node2"]["fix"].startswith("make sync HOSTFILE=")
    assert "make" in found["node4"]["fix"]


@pytest.mark.parametrize(
    ("apps", "processes"),
    [("1, GPU-a", [{"pid": 1, "gpu": 0, "uid": 0}]), ("[Not Supported]", []), ("", [])],
)
def test_processes_on_gpus_that_are_told_and_those_that_are_not(
    apps: str, processes: list[dict[str, int]], fake: Callable
) -> None:
    row = "0, GPU-a, NVIDIA T4, 580.1, 15000, [N/A]"
    fake("nvidia-smi", f"case $* in *compute-apps*) echo '{apps}';; *) echo '{row}';; esac")
    told = probe.gpus()
    assert told["processes"] == processes and told["devices"][0]["name"] == "NVIDIA T4"


@pytest.mark.slow
def test_what_hosts_lack_is_named(on: On, project: Path, tmp_path: Path) -> None:
    """GPUs, interface, memory, disk and limits."""
    smi = program(tmp_path / "bin" / "nvidia-smi", """
        case $2 in
          *compute-apps*) echo 1, GPU-b;;
          *) echo 0, GPU-a, NVIDIA T4, 580.1, 15000, 900
             echo 1, GPU-b, NVIDIA T4, 580.1, 15000, 14900;;
        esac
    """)  # fmt: skip
    broken = program(tmp_path / "broken" / "nvidia-smi", """
        echo Failed to initialize NVML: Driver/library version mismatch
        exit 18
    """)  # fmt: skip
    none = program(tmp_path / "none" / "nvidia-smi", "")
    for hosts in made(6):
        for host in (hosts[0], hosts[5]):
            host.shows(none.parent, Path("/usr/local/bin"))
        sshd = str(hosts[1].sshd.pid)
        subprocess.run(["prlimit", "--pid", sshd, "--nofile=256:256"], check=True)
        raised = str(hosts[3].sshd.pid)  # by each job
        subprocess.run(["prlimit", "--pid", raised, "--nofile=256:20000"], check=True)
        hosts[2].shows(smi.parent, Path("/usr/local/bin"))
        hosts[3].shows(broken.parent, Path("/usr/local/bin"))
        mount = ["nsenter", "-t", str(hosts[4].sshd.pid), "--mount", "mount", "-t", "tmpfs"]
        subprocess.run([*mount, "-o", "size=20m", "tmpfs", project.parent], check=True)
        put = ["nsenter", "-t", str(hosts[4].sshd.pid), "--mount", "cp", "-a"]
        shutil.copytree(project, tmp_path / "copy")
        subprocess.run([*put, tmp_path / "copy", project], check=True)
        mount = ["nsenter", "-t", str(hosts[2].sshd.pid), "--mount", "mount", "--bind"]
        subprocess.run([*mount, "-o", "ro", project, project], check=True)
        status, findings = examined(on, hosts[0], project, """
            hosts:
              node1: {slots: 9999}
              node2: {slots: 1, nic: ib7}
              node3: {slots: 2}
              node4: {slots: 1}
              node5: {slots: 1}
              node6: {slots: 1, gpus: [3]}
        """, CUDA_VISIBLE_DEVICES="0,1")  # fmt: skip
        few = "hosts: {node3: 9}"
        _, told = examined(on, hosts[0], project, few, CUDA_VISIBLE_DEVICES="1")
        _, hidden = examined(on, hosts[0], project, few, CUDA_VISIBLE_DEVICES="")
    assert status == 1
    (too_few,), (silent,) = ([f for f in x if f["check"] == "GPUs"] for x in (told, hidden))
    assert (too_few["level"], too_few["text"]) == (
        "FAIL", "9 slots and 1 GPUs: a process needs its own"
    )  # fmt: skip
    assert silent["level"] == "ok" and "hidden by CUDA_VISIBLE_DEVICES" in silent["text"]
    (readonly,) = [f for f in told if f["check"] == "disk" and f["level"] == "warn"]
    assert f"{project} cannot be written; rank 0, which runs here," in readonly["text"]
    assert readonly["fix"].endswith(f" ls -ld {project}")  # log_dir= would not be enough
    assert not [f for f in findings if "cannot be written" in f["text"]]  # not the first there
    bad = [(f["level"], f["check"], f["host"], f["text"], f["fix"]) for f in findings if f["fix"]]
    assert not [finding for finding in bad if finding[1:3] == ("limits", "node4")]
    for level, check, host, words, fix in (
        ("FAIL", "memory", "node1", "for 9999 processes", " slots at most"),
        ("warn", "cores", "node1", "9999 processes on", " slots at most"),
        ("FAIL", "network", "node2", "no interface ib7 with an address; there are", "fix nic"),
        ("FAIL", "limits", "node2", "256 open files a process", "raise nofile"),
        ("warn", "GPUs", "node3", "GPU 0 has 900 of 15,000 MiB free", "ssh node3 nvidia-smi"),
        ("warn", "GPUs", "node3", "GPU 1 is used by others: process 1 of user 0", "ssh node3"),
        ("FAIL", "GPUs", "node3", "sees none of them", "update the driver"),
        ("FAIL", "GPUs", "node4", "Driver/library version mismatch", "ssh node4 nvidia-smi"),
        ("FAIL", "disk", "node5", "MiB free in", "ssh node5 du"),
        ("FAIL", "GPUs", "node6", "GPU 3 of the host file is not there; there is none", "fix"),
    ):
        assert any(
            finding[:3] == (level, check, host) and words in finding[3] and fix in finding[4]
            for finding in bad
        ), (words, bad)


def test_hosts_that_do_not_reach_each_other(on: On, project: Path) -> None:
    """Each reaches the launch host; one of them not the other."""
    for hosts in made(3):
        route = ["ip", "-n", hosts[1].namespace, "route", "add", "blackhole", "10.77.0.3/32"]
        subprocess.run(route, check=True)
        done = on(hosts[0], "cluster.doctor", "-H", "node1:1,node2:1,node3:1", cwd=project)
    assert done.returncode == 1
    assert "does not reach node3 at 10.77.0.3" in done.stdout
    assert "fix: on node3: sudo ufw allow from 10.77.0.2" in done.stdout
    assert done.stdout.endswith("not fit: fix what is marked FAIL\n")


def test_a_host_whose_python3_is_old(fake: Callable, monkeypatch: pytest.MonkeyPatch) -> None:
    """RHEL 8 has 3.6: the environment's own is asked, and another only where there is none."""
    old = fake("python3", "echo SyntaxError >&2; exit 1")
    for python in (sys.executable, "/nowhere/bin/python"):
        monkeypatch.setattr(sys, "executable", python)
        contact = doctor.Contact(Host("localhost", 1), "127.0.0.1", quick=True)
        contact.close()
        assert contact.facts, contact.trouble
        old.unlink(missing_ok=True)
    assert contact.facts["versions"] == "No such file or directory"


def test_a_host_without_python3(fake_ssh: Callable) -> None:
    fake_ssh("echo '{}'; echo 'sh: 1: exec: python3: not found' >&2; exit 127")
    contact = doctor.Contact(Host("h1", 1), "127.0.0.1", quick=True)
    assert contact.trouble and contact.trouble.text == "there is no python3", contact.trouble


@pytest.mark.parametrize(
    ("gpus", "nccl", "level"), [(1, False, "FAIL"), (1, True, "ok"), (0, False, "ok")]
)
def test_a_horovod_without_nccl_is_not_for_gpus(gpus: int, nccl: bool, level: str) -> None:
    here = {"versions": {"python": "3.11", "torch": "2.8", "horovod": "0.28.1"}, "hosts": ""}
    build = {"gpus": gpus, "nccl": nccl, "gloo": True, "mpi": False}
    (finding,) = findings.packages(Host("node1", 1), {**here, "build": build}, here)
    told = (finding.level, "and Horovod no NCCL" in finding.text, "make install" in finding.fix)
    assert told == (level, level == "FAIL", level == "FAIL"), finding


def test_what_sync_leaves_there_is_no_code(tmp_path: Path) -> None:
    run_folder = tmp_path / "results" / "first"
    (run_folder / ".hydra").mkdir(parents=True)
    (run_folder / ".gitignore").write_text("*\n")
    for folder in ("", "logs", "data", "multirun", "results", "results/first", "models/logs"):
        (tmp_path / folder).mkdir(parents=True, exist_ok=True)
        (tmp_path / folder / "a.yaml").write_text("a: 1")
    found = sorted(probe.code(str(tmp_path), (".yaml",)))
    assert found == ["a.yaml", "models/logs/a.yaml", "results/a.yaml"]


BOTH = {"a.py": "1", "b.py": "2"}


@pytest.mark.parametrize(
    ("there", "told"),
    [
        ({"code": None, "root": False}, f"{ROOT} is missing there"),
        ({"code": None, "root": True}, f"{ROOT} is not a checkout of this repository"),
        ({"code": {"a.py": "1"}}, "other than here: b.py"),
        ({"code": BOTH, "identity": "a"}, "the same file system"),
        ({"code": BOTH, "identity": "b"}, "a copy, the same"),
    ],
)
def test_the_checkout_of_another_host(there: dict[str, Any], told: str) -> None:
    here = {"code": BOTH, "synced": {*BOTH}, "tracked": set(), "identity": "a", "hosts": ""}
    (finding,) = findings.checkout(Host("node1", 1), there, here)
    assert finding.text == told


def test_a_package_that_another_host_lacks(monkeypatch: pytest.MonkeyPatch) -> None:
    here = {"versions": {"python": "3.11.7", "torch": "2.11.0"}, "hosts": "HOSTS=node1:1"}
    facts = {"versions": {"python": "3.11.7"}}
    (finding,) = findings.packages(Host("node1", 1), facts, here)
    assert finding.text == "torch is missing, here 2.11.0"
    monkeypatch.setattr(findings, "environment_folder", lambda: Path("/opt/env"))  # not copied
    (finding,) = findings.packages(Host("node1", 1), facts, here)
    assert finding.fix == f"on node1: make install PYTHON={PYTHON}"


@pytest.mark.parametrize(("name", "level"), [("old.py", "warn"), ("notes.md", "ok")])
def test_code_that_is_only_there_is_told(name: str, level: str) -> None:
    here = {"code": {"new.py": "1"}, "synced": {"new.py"}, "tracked": {"new.py"}, "identity": "a"}
    here["hosts"] = "HOSTS=node1:1"
    facts = {"code": {"new.py": "1", name: "2"}, "identity": "b"}
    (finding,) = findings.checkout(Host("node1", 1), facts, here)
    told = (finding.level, "has what is not here: old.py" in finding.text)
    assert told == (level, level == "warn"), finding


@pytest.mark.parametrize(
    ("checkout", "logs", "told"),
    [
        (1 << 20, 5, [f"5 MiB free in {ROOT}/logs, where rank 0 writes, which runs here"]),
        (5, 5, []),  # of the checkout's disk, which is told by itself
        (1 << 20, 1 << 20, []),
    ],
)
def test_a_disk_for_logs_alone_that_is_full(checkout: int, logs: int, told: list[str]) -> None:
    facts = {"readonly": "", "logs": logs, "disk": {str(ROOT): checkout}}
    assert [finding.text for finding in findings.writable(Host("node1", 1), facts)] == told
    (finding,) = findings.writable(Host("node1", 1), {**facts, "readonly": "/there"})
    assert finding.text == "/there cannot be written; rank 0, which runs here, writes there"


@pytest.mark.parametrize(
    ("changes", "told"),
    [
        ({}, None),
        ({"disk": {str(ROOT): 1023}}, ("FAIL", "1,023 MiB free in ")),
        ({"memory": 999}, ("FAIL", "999 MiB free for 2 processes; 1,000 are wanted")),
        ({"cores": 1}, ("warn", "2 processes on 1 cores")),
        ({"gpus": {"devices": [{}, {}]}, "cores": 3}, ("warn", "3 cores for 2 GPUs")),
        ({"gpus": {"devices": [{}, {}]}, "cores": 4}, None),
        ({"files": 813}, ("FAIL", "813 open files a process; 814 are wanted")),
        ({"infiniband": True, "memlock": 1 << 16}, ("warn", "memlock is 64 KiB; InfiniBand wan")),
        ({"infiniband": True}, None),
        ({"memlock": 1 << 16}, None),
    ],
)
def test_what_two_ranks_of_300_take(changes: dict[str, Any], told: tuple[str, str] | None) -> None:
    found = findings.room(Host("node1", 2), ENOUGH | changes, 300)
    assert [finding.check for finding in found] == ["disk", "memory", "cores", "limits"]
    lacking = [finding for finding in found if finding.level != "ok"]
    assert len(lacking) == (told is not None)
    for finding in lacking:
        assert finding.level == told[0] and finding.text.startswith(told[1])
    least = findings.room(Host("node1", 2), ENOUGH | {"memory": 5}, 2)[1]
    assert least.fix == findings.few(1)


@pytest.mark.parametrize(
    ("slots", "visible", "changes", "told"),
    [
        (2, None, {}, ("ok", "2 x NVIDIA T4, driver 580.1")),
        (3, None, {}, ("FAIL", "3 slots and 2 GPUs: a process needs its own")),
        (2, "1", {}, ("FAIL", "2 slots and 1 GPUs: a process needs its own")),
        (2, None, {"free": 89}, ("warn", "GPU 1 has 89 of 100 MiB free")),
        (1, None, {"free": 89}, ("ok", "1 x NVIDIA T4, driver 580.1")),  # of the first GPU
        (2, None, {"user": 5}, ("warn", "GPU 1 is used by others: process 7 of user 5")),
        (1, None, {"error": "Driver mismatch"}, ("FAIL", "Driver mismatch")),
        (4, "", {"gpus": 0}, ("ok", "hidden by CUDA_VISIBLE_DEVICES: it uses CPUs")),
        (4, "-1", {"gpus": 0}, ("ok", "hidden by CUDA_VISIBLE_DEVICES: it uses CPUs")),
        (1, None, {"gpus": 0},
         ("FAIL", "torch for CUDA 13.0 sees none of them; the driver is 580.1")),
    ],
)  # fmt: skip
def test_gpus_that_a_host_lends(
    slots: int, visible: str | None, changes: dict[str, Any], told: tuple[str, str],
    monkeypatch: pytest.MonkeyPatch,
) -> None:  # fmt: skip
    monkeypatch.delenv("CUDA_VISIBLE_DEVICES", raising=False)
    if visible is not None:
        monkeypatch.setenv("CUDA_VISIBLE_DEVICES", visible)
    gpu = {"name": "NVIDIA T4", "driver": "580.1", "total": 100, "free": 90}
    second = {**gpu, "index": 1, "free": changes.get("free", 90)}
    used = [{"pid": 7, "gpu": 1, "uid": changes["user"]}] if "user" in changes else []
    answer = {"devices": [{**gpu, "index": 0}, second], "processes": used}
    facts = {"gpus": {**answer, "error": changes.get("error")}}
    if "gpus" in changes:  # which torch sees
        facts["build"] = {"gpus": changes["gpus"], "cuda": "13.0"}
    (finding,) = findings.gpus(Host("node1", slots), facts)
    assert (finding.level, finding.text) == told


@pytest.mark.parametrize(
    ("nic", "towards", "alone", "told"),
    [
        (None, "eth0", False, ("ok", "eth0 10.0.0.1")),
        ("eth0", None, False, ("ok", "eth0 10.0.0.1")),
        (None, None, False, ("FAIL", "no interface leads to this host")),
        ("ib7", "eth0", False, ("FAIL", "no interface ib7 with an address")),
        ("lo", "eth0", False, ("FAIL", "other hosts do not reach its lo")),
        ("lo", "eth0", True, ("ok", "lo 127.0.0.1")),
    ],
)
def test_the_interface_to_other_hosts(
    nic: str | None, towards: str | None, alone: bool, told: tuple[str, str]
) -> None:
    facts = {"interfaces": {"lo": "127.0.0.1", "eth0": "10.0.0.1"}, "towards": towards}
    (finding,) = findings.interface(Host("node1", 1, nic=nic), facts, alone)
    assert finding.level == told[0] and finding.text.startswith(told[1])
    listed = finding.text.endswith("; there are lo 127.0.0.1, eth0 10.0.0.1")
    assert listed == (finding.level == "FAIL")


def test_gpus_that_cuda_cannot_use_do_not_count() -> None:
    """Of an old driver torch.cuda.device_count() says how many it has."""
    old = "import torch; torch.cuda._device_count_nvml = lambda: 8"
    done = run([sys.executable, "-c", f"{old}; assert torch.cuda.device_count() == 8{probe.BUILD}"])
    assert json.loads(done.stdout.splitlines()[-1])["gpus"] == 0, done.stdout


def test_the_probe_is_for_old_pythons_too() -> None:
    """Where there is no environment yet, it is asked by the host's own."""
    tree = ast.parse(doctor.PROBE, feature_version=(3, 6))
    imported = [node.module for node in tree.body if isinstance(node, ast.ImportFrom)]
    assert "__future__" not in imported
    new = {"capture_output", "create_server", "removeprefix"}
    assert not new & set(re.findall(r"\w+", doctor.PROBE))


def test_a_login_shell_that_says_something(fake_ssh: Callable) -> None:
    fake_ssh(GREETING + ' eval "$last"')
    contact = doctor.Contact(Host("h1", 1), "127.0.0.1", quick=True)
    contact.close()
    assert contact.facts, contact.trouble


def test_ctrl_c_waits_for_no_host(fake_ssh: Callable, tmp_path: Path) -> None:
    """One that does not answer."""
    fake_ssh(f"touch {tmp_path}/asked; exec sleep 29.{os.getpid()}")
    sleeping = ["pgrep", "-fx", f"sleep 29.{os.getpid()}"]
    for module, *arguments in (["cluster.doctor"], ["cluster.jobs", "launch"]):
        line = [PYTHON, "-m", module, *arguments, "-H", "h1:1", *["true"] * len(arguments)]
        process = subprocess.Popen(line, cwd=ROOT, stdout=subprocess.PIPE, stderr=subprocess.STDOUT)
        wait_until((tmp_path / "asked").exists, 30, "the call of ssh")
        (tmp_path / "asked").unlink()
        process.send_signal(signal.SIGINT)
        # It would be given up after 12 s, by itself.
        assert process.communicate(timeout=10)[0] == b"" and process.returncode == 130
        wait_until(lambda: run(sleeping).returncode == 1, 5, "the end of ssh")


@pytest.mark.parametrize(("said", "login_seconds"), [("", -1), ("echo '{}'; ", 60)])
def test_what_hangs_with_an_ssh_is_not_waited_for(
    fake_ssh: Callable,
    said: str,
    login_seconds: int,
    tmp_path: Path,
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    """In the login or behind it. A ProxyCommand has the same stderr, and may not notice that its
    ssh is gone."""
    fake_ssh(f"{said}(sleep 20; touch {tmp_path}/waited) & wait")
    monkeypatch.setattr(doctor, "SSH_SECONDS", login_seconds)
    monkeypatch.setattr(doctor, "QUICK_SECONDS", 1)
    contact = doctor.Contact(Host("h1", 1), "127.0.0.1", quick=True)
    assert contact.trouble and "no answer within 1 s" in contact.trouble.text, contact.trouble
    assert not (tmp_path / "waited").exists()


def test_what_an_ssh_leaves_behind_is_not_waited_for(fake_ssh: Callable, tmp_path: Path) -> None:
    """It may hold its stderr."""
    refused = "echo 'ssh: connect to host h1 port 22: Connection refused' >&2; exit 255"
    fake_ssh(f"(sleep 20; touch {tmp_path}/waited) >/dev/null & {refused}")
    contact = doctor.Contact(Host("h1", 1), "127.0.0.1", quick=True)
    assert contact.trouble and contact.trouble.text == "no sshd listens there on port 22", (
        contact.trouble
    )
    assert not (tmp_path / "waited").exists()


def test_a_host_that_cannot_look_at_itself(monkeypatch: pytest.MonkeyPatch) -> None:
    """As where a driver hangs."""
    monkeypatch.setattr(doctor, "PROBE", "import time; time.sleep(20); print('{\"code\": {}}')")
    monkeypatch.setattr(doctor, "QUICK_SECONDS", 1)
    with pytest.raises(Refusal, match="this host says nothing of itself for 1 s"):
        doctor._here(quick=True)
    monkeypatch.setattr(doctor, "QUICK_SECONDS", 60)
    monkeypatch.setattr(doctor, "PROBE", "raise OSError('no disk')")
    with pytest.raises(Refusal, match="this host cannot be looked at: OSError: no disk"):
        doctor._here(quick=True)


FINDS = (
    "import sys; from cluster import doctor; from cluster.findings import Finding; "
    "doctor.examine = lambda _: [Finding('ok', 'all-reduce', 'h1', 'latency 90 µs')]; "
    "sys.exit(doctor.main())"
)


def test_a_locale_without_its_letters() -> None:
    done = run([PYTHON, "-c", FINDS, "-H", "localhost:1"], PYTHONIOENCODING="ascii")
    assert done.returncode == 0 and "latency 90 ?s" in done.stdout, done.stdout


def test_what_reads_it_may_go_away() -> None:
    piped = '"$@" -H localhost:1 | true; exit $PIPESTATUS'
    done = run(["bash", "-c", piped, "bash", PYTHON, "-c", FINDS])
    assert (done.returncode, done.stdout) == (0, "")


def test_many_hosts_are_not_tried_in_all_pairs(
    monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    """Each has two neighbours; few at a time, as each pair has two connections made."""
    busy: set[str] = set()
    most = 0

    def exchange(group: tuple[Host, ...], fabric: set[str]) -> findings.Finding:
        nonlocal most
        assert not fabric and all(host.slots == 1 for host in group)
        names = {host.name for host in group}
        assert not busy & names
        busy.update(names)
        most = max(most, len(busy))
        time.sleep(0.02)
        busy.difference_update(names)
        return findings.Finding("ok", "all-reduce", "-".join(sorted(names)), "")

    monkeypatch.setattr(doctor, "_exchange", exchange)
    for count, expected in ((1, 1), (2, 1), (8, 28), (9, 9), (64, 64)):
        hosts = [Host(f"node{number}", 1) for number in range(count)]
        none: dict[str, Any] = {"gpus": {"devices": []}, "infiniband": True}
        answers = dict.fromkeys(hosts, none)
        tried = [finding.host for finding in doctor._exchanges(answers)]
        assert len(tried) == len({*tried}) == expected
        ends = Counter(name for pair in tried for name in pair.split("-"))
        assert len(ends) == count and len({*ends.values()}) == 1
    assert 2 < most <= 8
    assert capsys.readouterr().err.splitlines()[-1] == "all-reduce: 64 of 64"


def test_the_gpus_of_a_host_are_tried_together(monkeypatch: pytest.MonkeyPatch) -> None:
    """They reach each other by other ways than hosts do; and NCCL is asked which way it went."""
    asked = []

    def exchange(group: tuple[Host, ...], fabric: set[str]) -> findings.Finding:
        asked.append((*(f"{host.name}:{host.slots}" for host in group), *sorted(fabric)))
        return findings.Finding("ok", "all-reduce", "", "")

    monkeypatch.setattr(doctor, "_exchange", exchange)
    hosts = [Host("a", 8), Host("b", 8), Host("c", 3), Host("d", 1)]
    facts = [{"gpus": {"devices": gpus}, "infiniband": name in "acd"}
             for name, gpus in zip("abcd", ([{}], [{}], [], [{}]))]  # fmt: skip
    doctor._exchanges(dict(zip(hosts, facts)))
    pairs = [("a:1", "b:1"), ("a:1", "c:1"), ("a:1", "d:1"), ("b:1", "c:1"), ("b:1", "d:1"),
             ("c:1", "d:1")]  # fmt: skip
    assert sorted(asked) == sorted((*group, "a", "d") for group in [("a:8",), ("b:8",), *pairs])
    for host, slots in ((hosts[0], 8), (hosts[2], 2), (hosts[3], 1)):
        asked.clear()
        doctor._exchanges({host: dict(zip(hosts, facts))[host]})
        assert [group[0] for group in asked] == [f"{host.name}:{slots}"]


@pytest.mark.parametrize("network", ["Socket", "IB"])
def test_infiniband_that_nccl_does_not_take(
    network: str, monkeypatch: pytest.MonkeyPatch, tmp_path: Path
) -> None:
    result = '{"operations": "NCCL", "latency_us": 20, "bus_bandwidth_mb_s": 900}'
    said = f"[0]<stdout>:node1:7:7 [0] NCCL INFO Using network {network}\n[0]<stdout>:{result}"
    words = program(tmp_path / "python", f"[ $NCCL_DEBUG = INFO ] && echo '{said}'")
    monkeypatch.setattr(doctor.sys, "executable", str(words))
    group = Host("node1", 1), Host("node2", 1)
    found = doctor._exchange(group, {"node1", "node2"})
    assert "bus bandwidth 900 MB/s" in found.text and found.host == "node1-node2"
    over_tcp = (found.level, "NCCL goes over TCP" in found.text, "make hello" in found.fix)
    assert over_tcp == (("warn", True, True) if network == "Socket" else ("ok", False, False))


def test_infiniband_counts_where_a_port_is_up(tmp_path: Path) -> None:
    assert not probe.infiniband(str(tmp_path))
    for number, state in ((1, "1: DOWN"), (2, "4: ACTIVE")):
        port = tmp_path / "mlx5_0" / "ports" / str(number)
        port.mkdir(parents=True)
        (port / "state").write_text(f"{state}\n")
        assert probe.infiniband(str(tmp_path)) == (number == 2)


def test_a_clock_that_is_wrong() -> None:
    host = Host("node1", 1)
    contact = object.__new__(doctor.Contact)
    contact.asked_at, contact.answered_at = 1000.0, 1001.0
    for there, level, words in (
        (1000.5, "ok", "as here"),
        (1061.0, "warn", "60 s ahead"),
        (940.0, "warn", "60 s behind"),
    ):
        contact.facts = {"time": there}
        (finding,) = findings.clock(host, doctor._clock(contact))
        assert (finding.level, words in finding.text) == (level, True), finding


def test_a_launch_is_refused_where_hosts_do_not_fit(
    on: On, hosts: list[testbed.Node], project: Path
) -> None:
    done = on(hosts[0], "cluster.jobs", "launch", "-H", "node1:1,node9:1", "true", cwd=project)
    assert done.returncode == 2 and "node9: ssh: no such host" in done.stdout
    assert len(done.stdout.splitlines()) == 1
    assert not (project / "logs").exists()


def test_the_cores_of_a_container_are_told(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.chdir(ROOT)
    monkeypatch.setattr(probe, "usable_cores", lambda: 7)
    monkeypatch.setattr(probe, "memory", lambda: 77)
    monkeypatch.setattr(probe, "free", lambda path: {f"{ROOT}/logs": 7}.get(path, 777))
    monkeypatch.setattr(probe, "ask", lambda *_: {})
    request = {"root": str(ROOT), "python": "", "launcher": "127.0.0.1", "kinds": [".toml"]}
    facts = probe.facts({**request, "packages": [], "quick": True})
    assert (facts["cores"], facts["memory"], facts["logs"]) == (7, 77, 7)

"""Makes test hosts out of this one: each has its own address, name and sshd.

    sudo python3 cluster/testbed.py --hosts 2 --rate 500mbit -- COMMAND ...

runs COMMAND on node1, from where `ssh node2` works; --rate limits the link of each host. The hosts
are network namespaces joined by a bridge in another one, and share this machine's files and cores:
where that leaves one to each, OMP_NUM_THREADS=1 unless it is set. All of it is removed when the
command ends or is interrupted. Under sudo, what is root's in this checkout then becomes its
owner's. Needs root, and Debian's iproute2, openssh-server and util-linux.
"""

from __future__ import annotations

import argparse
import contextlib
import os
import shutil
import signal
import subprocess
import sys
import tempfile
import time
from collections.abc import Sequence
from dataclasses import dataclass
from pathlib import Path

PROGRAMS = {
    "ip": "iproute2", "tc": "iproute2", "sshd": "openssh-server", "ssh-keygen": "openssh-client",
    "nsenter": "util-linux", "unshare": "util-linux",
}  # fmt: skip
ENDS = (signal.SIGINT, signal.SIGTERM, signal.SIGHUP)
ANSWER_SECONDS = 20  # for all hosts together
TERM_SECONDS = 2  # from SIGTERM to SIGKILL, for processes that still run there
BURST = ["burst", "256kb", "latency", "50ms"]  # of the token bucket that limits a link


def missing() -> str | None:
    """Why no hosts can be made here; None if they can."""
    if "/usr/sbin" not in os.environ["PATH"].split(":"):  # as after su
        os.environ["PATH"] += ":/usr/sbin:/sbin"
    for program, package in PROGRAMS.items():
        if shutil.which(program) is None:
            return f"{program} is missing: sudo apt-get install {package}"
    if os.geteuid() != 0:
        return "making network namespaces needs root: sudo"
    probe = subprocess.run(["unshare", "--net", "--uts", "--mount", "true"], capture_output=True)
    return None if probe.returncode == 0 else f"no namespaces here: {probe.stderr.decode().strip()}"


@dataclass
class Node:
    """A test host; `sshd` is a process in its namespaces, `cores` its part of this machine's."""

    name: str
    address: str
    namespace: str
    sshd: subprocess.Popen
    cores: int

    def command(self, *command: str) -> list[str]:
        """The command line that runs `command` on this host."""
        where = ["-t", str(self.sshd.pid), "--net", "--uts", "--mount", f"--wd={os.getcwd()}"]
        one = self.cores == 1 and "OMP_NUM_THREADS" not in os.environ
        return ["nsenter", *where, *(["env", "OMP_NUM_THREADS=1"] if one else []), *command]

    def shows(self, source: Path, target: Path) -> None:
        """Mount `source` over `target`, on this host only."""
        _run("nsenter", "-t", str(self.sshd.pid), "--mount", "mount", "--bind", source, target)


class Testbed:
    """`with Testbed(2) as hosts:` makes test hosts, and removes them at its end.

    Args:
        hosts: how many; they are called node1, node2, ...
        rate: of each host's link, in both directions, as for tc ("500mbit"); None: unlimited.
        interfaces: the name of each host's network interface.

    Raises:
        RuntimeError: with the reason, where they cannot be made.
    """

    __test__ = False  # pytest must not collect it
    _made = 0

    def __init__(
        self, hosts: int, rate: str | None = None, interfaces: Sequence[str] | None = None
    ) -> None:
        self.interfaces = interfaces or ["eth0"] * hosts
        self.names = [f"node{number}" for number in range(1, hosts + 1)]
        self.rate = rate
        Testbed._made += 1
        self.prefix = f"testbed{os.getpid()}-{Testbed._made}"
        self.switch = f"{self.prefix}-switch"
        self.hosts: list[Node] = []

    def __enter__(self) -> list[Node]:
        if problem := missing():
            raise RuntimeError(problem)
        self._folder = Path(tempfile.mkdtemp(prefix="testbed"))
        try:
            self._make()
        except BaseException:
            self._remove()
            raise
        return self.hosts

    def __exit__(self, *_: object) -> None:
        self._remove()

    def _make(self) -> None:
        key, config = self._folder / "key", self._folder / "ssh_config"
        _run("ssh-keygen", "-q", "-t", "ed25519", "-N", "", "-f", str(key))
        config.write_text(
            f"Host *\n  IdentityFile {key}\n  IdentitiesOnly yes\n"
            f"  UserKnownHostsFile {self._folder}/known_hosts\n  GlobalKnownHostsFile none\n"
        )
        Path("/run/sshd").mkdir(exist_ok=True)
        _run("ip", "netns", "add", self.switch)
        _run("ip", "-n", self.switch, "link", "add", "bridge", "type", "bridge")
        _run("ip", "-n", self.switch, "link", "set", "bridge", "up")
        addresses = {name: f"10.77.0.{index}" for index, name in enumerate(self.names, start=1)}
        names = "".join(f"{address} {name}\n" for name, address in addresses.items())
        public = " ".join((self._folder / "key.pub").read_text().split()[:2])
        known_hosts = "".join(f"{name},{address} {public}\n" for name, address in addresses.items())
        (self._folder / "known_hosts").write_text(known_hosts)
        for (name, address), nic in zip(addresses.items(), self.interfaces):
            self.hosts.append(self._make_host(name, address, nic, f"127.0.0.1 localhost\n{names}"))
        deadline = time.monotonic() + ANSWER_SECONDS
        for host in self.hosts:
            probe = self.hosts[0].command("ssh", host.name, "true")
            while not _succeeds(probe, deadline - time.monotonic()):
                if time.monotonic() > deadline:
                    log = (self._folder / f"{host.name}.log").read_text().strip()
                    raise RuntimeError(f"sshd of {host.name} does not answer: {log[-300:]}")
                time.sleep(0.1)

    def _make_host(self, name: str, address: str, nic: str, names: str) -> Node:
        namespace, port = f"{self.prefix}-{name}", f"to-{name}"
        _run("ip", "netns", "add", namespace)
        folder = Path("/etc/netns") / namespace  # what `ip netns exec` shows as /etc
        folder.mkdir(parents=True)
        (folder / "hosts").write_text(names)
        link = ["type", "veth", "peer", "name", port, "netns", self.switch]
        _run("ip", "-n", namespace, "link", "add", nic, *link)
        _run("ip", "-n", namespace, "address", "add", f"{address}/24", "dev", nic)
        _run("ip", "-n", self.switch, "link", "set", port, "master", "bridge", "up")
        for interface in ("lo", nic):
            _run("ip", "-n", namespace, "link", "set", interface, "up")
        if self.rate:
            for space, device in ((namespace, nic), (self.switch, port)):
                limit = ["root", "tbf", "rate", self.rate, *BURST]
                _run("tc", "-n", space, "qdisc", "add", "dev", device, *limit)
        key, config = self._folder / "key", self._folder / "ssh_config"
        sshd = [
            "/usr/sbin/sshd", "-D", "-e", "-f", "/dev/null", "-h", str(key),
            *(f"-o{option}" for option in (
                f"AuthorizedKeysFile={key}.pub", "StrictModes=no", "UsePAM=no", "PidFile=none",
                "PermitRootLogin=yes", "PasswordAuthentication=no", "MaxStartups=200",
                f"ListenAddress={address}", "Subsystem=sftp internal-sftp",
            )),
        ]  # fmt: skip
        # Its own name, and an ssh that knows the key; nobody's ~/.ssh is touched.
        script = f'hostname {name} && mount --bind {config} /etc/ssh/ssh_config && exec "$@"'
        with open(self._folder / f"{name}.log", "w") as log:
            process = subprocess.Popen(
                ["ip", "netns", "exec", namespace, "unshare", "--uts", "--mount", "sh", "-ec",
                 script, "sh", *sshd],
                stdout=log, stderr=log, stdin=subprocess.DEVNULL, start_new_session=True,
            )  # fmt: skip
        cores = max(1, len(os.sched_getaffinity(0)) // len(self.names))
        return Node(name, address, namespace, process, cores)

    def _remove(self) -> None:
        # A second Ctrl-C would leave the rest.
        before = {number: signal.signal(number, signal.SIG_IGN) for number in ENDS}
        namespaces = [*(f"{self.prefix}-{name}" for name in self.names), self.switch]
        start, told = time.monotonic(), set[int]()
        while pids := [pid for namespace in namespaces for pid in _processes(namespace)]:
            past = time.monotonic() - start
            if past > 2 * TERM_SECONDS:
                break
            for pid in set(pids) - (told if past < TERM_SECONDS else set()):
                with contextlib.suppress(ProcessLookupError):
                    os.kill(pid, signal.SIGTERM if past < TERM_SECONDS else signal.SIGKILL)
            told.update(pids)
            time.sleep(0.05)
        for namespace in namespaces:
            subprocess.run(["ip", "netns", "delete", namespace], capture_output=True)
            shutil.rmtree(Path("/etc/netns") / namespace, ignore_errors=True)
        with contextlib.suppress(OSError):
            Path("/etc/netns").rmdir()  # if it was ours
        for host in self.hosts:
            host.sshd.wait()
        self.hosts.clear()
        shutil.rmtree(self._folder, ignore_errors=True)
        for number, handler in before.items():
            signal.signal(number, handler)


def _processes(namespace: str) -> list[int]:
    result = subprocess.run(["ip", "netns", "pids", namespace], capture_output=True)
    return [int(pid) for pid in result.stdout.split()]


def _succeeds(command: list[str], seconds: float) -> bool:
    """Whether the command succeeds within this time; a login may hang."""
    try:
        done = subprocess.run(command, capture_output=True, timeout=max(seconds, 0.1))
    except subprocess.TimeoutExpired:
        return False
    return done.returncode == 0


def _run(*command: str | Path) -> None:
    result = subprocess.run(command, capture_output=True, text=True)
    if result.returncode:
        raise RuntimeError(f"{' '.join(map(str, command))}: {result.stderr.strip()}")


def give_back(folder: Path) -> None:
    """Under sudo, make what is root's in a user's folder that user's, who could not write there."""
    user, group = (int(os.environ.get(f"SUDO_{kind}", 0)) for kind in ("UID", "GID"))
    if user == 0 or folder.stat().st_uid != user:
        return
    for place, folders, files in os.walk(folder):
        for path in (Path(place, name) for name in [*folders, *files]):
            with contextlib.suppress(OSError):  # gone meanwhile, or on a file system without root
                if path.lstat().st_uid == 0:
                    os.lchown(path, user, group)


def main() -> int:
    parser = argparse.ArgumentParser(description=__doc__.split("\n\n")[0])
    parser.add_argument("--hosts", type=int, default=2)
    parser.add_argument("--rate", help="of each host's link, as 500mbit")
    parser.add_argument("command", nargs="+", help="to run on node1")
    arguments = parser.parse_args()
    # So that the hosts are removed. As a script this file cannot import cluster/signals.py.
    for number in ENDS:
        signal.signal(number, signal.default_int_handler)
    try:
        with Testbed(arguments.hosts, arguments.rate) as hosts:
            return subprocess.run(hosts[0].command(*arguments.command)).returncode
    except RuntimeError as error:
        print(f"error: {error}", file=sys.stderr)
        return 2
    except KeyboardInterrupt:
        return 130
    finally:
        give_back(Path(__file__).resolve().parent.parent)


if __name__ == "__main__":
    sys.exit(main())

"""The hosts of a job: which they are, how each is reached, and what the job may use of each.

    HOSTS=node1:4,node2:4                  as horovodrun's -H; also node[1-16]:4
    HOSTFILE=hosts.yaml                    says more about each:

    hosts:
      node1: {slots: 2, gpus: [1, 7], nic: enp2s0f1}
      node2: {slots: 2, gpus: [0, 1], nic: enp1s0f0, user: ada, port: 2222,
              ssh: [ProxyJump=login], env: {NCCL_DEBUG: INFO}}

Everything is checked before any ssh is started. sync, doctor, launch and benchmarks use the same.
"""

from __future__ import annotations

import argparse
import base64
import contextlib
import functools
import itertools
import os
import re
import shlex
import shutil
import socket
import subprocess
import sys
from collections import Counter
from collections.abc import Sequence
from dataclasses import dataclass, field, replace
from pathlib import Path
from typing import Any

import psutil
import yaml

from cluster.environment import ROOT
from cluster.variables import unfolded

NAME = re.compile(r"[A-Za-z0-9]([A-Za-z0-9._-]*[A-Za-z0-9])?")
VARIABLE = re.compile(r"[A-Za-z_][A-Za-z0-9_]*")
EXAMPLES: dict[str, Any] = {  # of what a host file may say of a host
    "slots": "4", "gpus": [0, 1], "nic": "eth0", "user": "ada", "port": "2222",
    "ssh": ["ProxyJump=login"], "env": {"NCCL_DEBUG": "INFO"},
}  # fmt: skip
# Variables of Slurm: how many GPUs the job, or each of its tasks, asked for.
JOB_GPUS = ("SLURM_GPUS", "SLURM_GPUS_PER_TASK", "SLURM_TRES_PER_TASK")
# What each task of the job asked for; our single task on a node has the cores and GPUs of all.
A_TASK = ("SRUN_CPUS_PER_TASK", "SLURM_CPUS_PER_TASK", "SLURM_GPU_BIND", "SLURM_NTASKS_PER_GPU")
MOST_DIGITS = 5  # of a number in node[1-16]
SSH_SECONDS = 10  # that a host may take to answer


class Refusal(Exception):
    """What is wrong with the hosts, where, and what to do, in one line."""


@dataclass(frozen=True)
class Host:
    """One host and what the job may use of it.

    Attributes:
        name: as ssh and the other hosts know it.
        slots: how many processes it may run.
        gpus: numbers of its GPUs, one for each process; None: all, in order.
        nic: network interface for what ranks send each other; None: the one to the launch host.
        user, port, ssh: for ssh; `ssh` are options as after its -o.
        env: variables for the processes on this host.
        file: the host file that says all this; None: HOSTS does.
    """

    name: str
    slots: int
    gpus: tuple[int, ...] | None = None
    nic: str | None = None
    user: str | None = None
    port: int | None = None
    ssh: tuple[str, ...] = ()
    env: dict[str, str] = field(default_factory=dict, hash=False)
    file: Path | None = field(default=None, compare=False)

    @functools.cached_property
    def _known_to_ssh(self) -> tuple[str, int]:
        """Name and port that ssh connects to, which its configuration may change."""
        name, port = self.name, 22
        with contextlib.suppress(FileNotFoundError):  # no ssh: this host alone needs none
            # ssh -G only prints its configuration for this host.
            result = subprocess.run([*self.ssh_options(), "-G", self.name], capture_output=True)
            output = result.stdout.decode(errors="replace")
            if match := re.search(r"^hostname (.+)$", output, re.MULTILINE):
                name = match.group(1).strip()
            if match := re.search(r"^port (\d+)$", output, re.MULTILINE):
                port = int(match.group(1))
        return name, port

    @functools.cached_property
    def address(self) -> str:
        """IPv4 address.

        Raises:
            Refusal: when the name is unknown.
        """
        try:
            results = socket.getaddrinfo(self._known_to_ssh[0], 22, socket.AF_INET)
            return str(results[0][4][0])
        except (OSError, UnicodeError):  # the latter for a..b
            where = "DNS, /etc/hosts or ~/.ssh/config"
            raise Refusal(f"{self.name}: no such host: no IPv4 address for it in {where}") from None

    @functools.cached_property
    def is_here(self) -> bool:
        """Whether this is the host that we are on, which needs no ssh."""
        if self.user is not None or self.port is not None:
            return False
        if not self.address.startswith("127."):
            return self.address in own_addresses()
        # An alias with `HostName localhost` and `Port 2222` is a host at the end of a tunnel.
        return self.ssh_port == 22 or self._known_to_ssh[0] == self.name.lower()

    @property
    def ssh_port(self) -> int:
        return self._known_to_ssh[1]

    @property
    def destination(self) -> str:
        """What a user types behind ssh or ssh-copy-id to get where we do."""
        target = f"{self.user}@{self.name}" if self.user else self.name
        words = [word for option in self.ssh for word in ("-o", option)]
        return shlex.join([*words, *(["-p", str(self.port)] if self.port else []), target])

    @property
    def known_as(self) -> str:
        """Its name in known_hosts, quoted for a shell."""
        name, port = self._known_to_ssh
        return name if port == 22 else f"'[{name}]:{port}'"

    def ssh_options(self) -> list[str]:
        """ssh and its options for this host, without its name."""
        # BatchMode: fail rather than ask. Host keys are checked as ssh is configured to.
        # ControlMaster: an existing master is used, but none is started: it would end with our job,
        # and so would the sessions of others that run through it. RemoteCommand (since OpenSSH 7.6)
        # and forwardings are meant for logins; with X11's, each ssh writes to ~/.Xauthority, and
        # hosts that share a home wait for its lock.
        ours = ["ControlMaster=no", "RemoteCommand=none", "ClearAllForwardings=yes"]
        ours += ["ForwardX11=no"]
        options = ["BatchMode=yes", f"ConnectTimeout={SSH_SECONDS}", *ours, *self.ssh]
        command = ["ssh", *(f"-o{option}" for option in options)]
        command += ["-l", self.user] if self.user else []
        return command + (["-p", str(self.port)] if self.port else [])

    def command(self, script: str) -> list[str]:
        """The command line that runs a line of sh on this host.

        Raises:
            Refusal: without ssh, for another host.
        """
        if self.is_here:
            return ["sh", "-c", script]
        if "SLURM_JOB_ID" in os.environ and shutil.which("srun"):
            # srun reaches the nodes of a job also where ssh is not allowed.
            return [*self._srun(), "sh", "-c", script]
        if shutil.which("ssh") is None:
            raise Refusal("ssh is missing here: sudo apt-get install openssh-client")
        # Whatever the login shell there is, it is sh that reads the script; csh takes no newline.
        if "\n" in script:
            script = f'eval "$(echo {base64.b64encode(script.encode()).decode()} | base64 -d)"'
        return [*self.ssh_options(), "-T", self.name, f"exec sh -c {shlex.quote(script)}"]

    def _srun(self) -> list[str]:
        """srun and its options for one task on this node, with all that the slots may use."""
        srun = ["srun", "--overlap", "--nodes=1", "--ntasks=1", f"--nodelist={self.name}"]
        # As the job's variables stand, srun would give our one task the GPUs of one task, or ask
        # this node for the GPUs of all nodes. Instead we ask for one GPU for each slot.
        requested = {name: os.environ[name] for name in JOB_GPUS if name in os.environ}
        unset = [name for name in A_TASK if name in os.environ]
        if "gpu" in str(requested).lower():  # SLURM_TRES_PER_TASK may name CPUs alone
            unset += requested
            srun.append(f"--gpus-per-node={self.slots}")
        if cores := int(os.environ.get("SLURM_CPUS_PER_TASK", 0)):
            srun.append(f"--cpus-per-task={cores * self.slots}")
        if unset:
            srun = ["env", *(word for name in unset for word in ("-u", name)), *srun]
        return [*srun, "--cpu-bind=none", "--unbuffered"]


def environment_folder() -> Path:
    """The folder of this Python's environment. It may be a link itself; others are resolved."""
    prefix = Path(sys.prefix)
    return prefix.parent.resolve() / prefix.name


def make_command(what: str) -> str:
    """How to type a target of the Makefile: with PYTHON= where this is not our .venv."""
    ours = environment_folder() == ROOT / ".venv"
    return f"make {what}" + ("" if ours else f" PYTHON={sys.executable}")


def typed(hosts: Sequence[Host]) -> str:
    """What to type behind make for these hosts: HOSTS=, or the host file that they are from."""
    if hosts[0].file:
        return f"HOSTFILE={shlex.quote(str(hosts[0].file))}"
    return "HOSTS=" + shlex.quote(listed({host.name: host.slots for host in hosts}))


def listed(hosts: dict[str, int]) -> str:
    """Names and slots as HOSTS= takes them: node[1-8]:4,login:1."""
    groups = [(slots, [*names]) for slots, names in itertools.groupby(hosts, hosts.get)]
    return ",".join(f"{name}:{slots}" for slots, names in groups for name in folded(names))


def folded(names: Sequence[str]) -> list[str]:
    """The names, with three and more that are numbered in order as one: node[1-3]."""
    runs: list[list[str]] = []
    for name in names:
        if runs and name == _following(runs[-1][-1]):
            runs[-1].append(name)
        else:
            runs.append([name])
    texts = []
    for run in runs:
        (begin, first, end), (_, last, _) = _numbered(run[0]), _numbered(run[-1])
        texts += [f"{begin}[{first}-{last}]{end}"] if len(run) > 2 else run
    return texts


def _numbered(name: str) -> tuple[str, str, str]:
    """A name around the last digits in it, at most MOST_DIGITS; there may be none."""
    match = re.fullmatch(rf"(.*?)(\d{{0,{MOST_DIGITS}}})(\D*)", name)
    assert match is not None
    return match[1], match[2], match[3]


def _following(name: str) -> str:
    """The name with the next number, written as wide; empty where there is none."""
    begin, number, end = _numbered(name)
    following = f"{int(number or 0) + 1:0{len(number)}}"
    return f"{begin}{following}{end}" if number and len(following) <= MOST_DIGITS else ""


def own_addresses() -> set[str]:
    """IPv4 addresses of this host's network interfaces."""
    # Not tried by binding, which always works where net.ipv4.ip_nonlocal_bind is set.
    found = [address for each in psutil.net_if_addrs().values() for address in each]
    return {address.address for address in found if address.family == socket.AF_INET}


def parse(text: str) -> list[Host]:
    """Hosts of a list such as `node1:4,node2:4` or `node[1-2]:4`; without a number, of one slot.

    Raises:
        Refusal: when the list is malformed, or names a host twice.
    """
    hosts = []
    for item in unfolded(text):
        name, colon, slots = item.strip().partition(":")
        if not NAME.fullmatch(name) or (colon and not re.fullmatch("[1-9][0-9]{0,4}", slots)):
            raise Refusal(
                f"HOSTS={text}: '{item}' is not a host: write name:slots, as node1:4,node2:4"
            )
        hosts.append(Host(name, int(slots or 1)))
    for name, count in Counter(host.name for host in hosts).items():
        if count > 1:
            raise Refusal(f"HOSTS={text}: {name} is there twice: add up its slots")
    return hosts


class _AsWritten(yaml.SafeLoader):
    """Keeps each value as the text that was written, whatever its tag: "on" and "010", not true and
    8. Refuses equal keys, of which YAML takes the last without a word."""

    yaml_implicit_resolvers = {"<": [("tag:yaml.org,2002:merge", re.compile("<<"))]}  # noqa: RUF012
    yaml_constructors: dict[str, Any] = {}  # noqa: RUF012

    def compose_mapping_node(self, anchor: Any) -> yaml.MappingNode:
        node = super().compose_mapping_node(anchor)
        before: list[Any] = []  # a key may be a list or a mapping
        for key, _ in node.value:
            if key.value in before and key.value != "<<":  # of which there may be several
                problem = f"{key.value} is there twice: write it once"
                raise yaml.MarkedYAMLError(problem=problem, problem_mark=key.start_mark)
            before.append(key.value)
        return node


FORM = "'hosts:' and below it a line a host: node1: {slots: 4}"


def read(file: Path) -> list[Host]:
    """Hosts of a host file, whose format the top of this module shows.

    Raises:
        Refusal: when it cannot be read, is malformed, or contradicts itself.
    """
    where = f"HOSTFILE={file}"
    try:
        content = yaml.load(file.read_text(), _AsWritten)
    except OSError as error:
        raise Refusal(f"{where}: {error.strerror}; give the path of a host file") from None
    except (yaml.YAMLError, UnicodeDecodeError) as error:
        mark = getattr(error, "problem_mark", None)
        place = f"line {mark.line + 1}" if mark else "no YAML"
        reason = getattr(error, "problem", None) or getattr(error, "reason", error)
        if "<document start>" in str(reason):  # as of a host file of horovodrun's
            reason = f"write {FORM}"
        raise Refusal(f"{where}: {place}: {reason}") from None
    hosts = content.get("hosts") if isinstance(content, dict) else None
    if not isinstance(hosts, dict) or not hosts:
        raise Refusal(f"{where}: write {FORM}")
    if misplaced := [key for key in content if key in EXAMPLES]:  # other keys may be for YAML's <<
        raise Refusal(f"{where}: '{misplaced[0]}' stands beside hosts: it belongs to each of them")
    return [_host(name, said, file) for name, said in hosts.items()]


def _host(name: str, said: Any, file: Path) -> Host:
    where = f"HOSTFILE={file}: {name}"
    said = {"slots": said} if isinstance(said, str) else said
    if not isinstance(said, dict):
        raise Refusal(f"{where}: {said}: write how many processes it may run, as {{slots: 4}}")
    if not NAME.fullmatch(name):
        raise Refusal(f"{where}: this is not the name of a host")
    for key, value in said.items():
        if key not in EXAMPLES:
            raise Refusal(f"{where}: '{key}' is unknown; there are {', '.join(EXAMPLES)}")
        if type(value) is not type(EXAMPLES[key]) or value in ("", "~", "null"):
            raise Refusal(f"{where}: {key}={value}: write as {EXAMPLES[key]}")
    if "slots" not in said:
        raise Refusal(f"{where}: it needs its slots, as {{slots: 4}}")
    slots = _number(where, "slots", said["slots"], range(1, 100_000))
    port = _number(where, "port", said["port"], range(1, 65_536)) if "port" in said else None
    gpus, ssh, env = said.get("gpus"), said.get("ssh", []), said.get("env", {})
    if gpus is not None:
        gpus = tuple(_number(where, "gpus", gpu, range(100_000)) for gpu in gpus)
        if len({*gpus}) < len(gpus):
            raise Refusal(f"{where}: gpus={[*gpus]}: write each once, as [0, 1]")
        if slots > len(gpus):
            raise Refusal(
                f"{where}: {slots} slots and {len(gpus)} gpus: a process needs its own; "
                "take fewer slots or leave gpus out"
            )
    for option in ssh:
        if not re.fullmatch(r"\w+[= ].+", str(option)):
            raise Refusal(f"{where}: ssh: '{option}' is no option: write as ProxyJump=login")
    for variable, value in env.items():
        if not VARIABLE.fullmatch(variable):
            raise Refusal(f"{where}: env: '{variable}' is no name of a variable")
        if not isinstance(value, str):
            raise Refusal(f"{where}: env: {variable}={value} is no text: put it in quotes")
    return Host(name, slots, gpus, said.get("nic"), said.get("user"), port, tuple(ssh), env, file)


def _number(where: str, key: str, text: Any, fit: range) -> int:
    if not re.fullmatch("[0-9]{1,5}", str(text)) or int(text) not in fit:
        raise Refusal(f"{where}: {key}={text} is no number from {fit[0]} to {fit[-1]}")
    return int(text)


def refuse_one_twice(hosts: list[Host]) -> None:
    """Refuse two names of one host, which Horovod would take for two hosts.

    Raises:
        Refusal: where two names lead to one host; a name that leads nowhere is passed over.
    """
    by_place: dict[object, Host] = {}
    for host in hosts:
        try:
            place = host.is_here or (host.address, host.ssh_port)
        except Refusal:
            continue
        if (first := by_place.setdefault(place, host)) is not host:
            slots = f"{first.name}:{first.slots + host.slots}"
            raise Refusal(f"{host.name} is {first.name}: name it once, as {slots}")


@dataclass(frozen=True)
class Rank:
    """One process and its place in the job, as Horovod counts."""

    host: Host
    rank: int
    local_rank: int
    local_size: int
    cross_rank: int  # the number of its host, of those that have such a local rank
    cross_size: int  # how many hosts have such a local rank

    def environment(self, size: int) -> dict[str, str]:
        """The variables from which Horovod takes the place of the process."""
        variables = {
            "HOROVOD_HOSTNAME": self.host.name,
            "HOROVOD_RANK": self.rank,
            "HOROVOD_SIZE": size,
            "HOROVOD_LOCAL_RANK": self.local_rank,
            "HOROVOD_LOCAL_SIZE": self.local_size,
            "HOROVOD_CROSS_RANK": self.cross_rank,
            "HOROVOD_CROSS_SIZE": self.cross_size,
        }
        if self.host.gpus is not None:
            variables["CUDA_VISIBLE_DEVICES"] = self.host.gpus[self.local_rank]
        return {name: str(value) for name, value in variables.items()} | self.host.env


def ranks(hosts: list[Host], size: int | None = None) -> list[Rank]:
    """`size` processes, by default as many as there are slots; hosts are filled in their order.

    Raises:
        Refusal: when there are fewer slots.
    """
    slots = sum(host.slots for host in hosts)
    size = slots if size is None else size
    if not 1 <= size <= slots:
        there = listed({host.name: host.slots for host in hosts})
        raise Refusal(f"NP={size} processes on {slots} slots ({there}): take 1 to {slots}")
    local_sizes, left = [], size
    for host in hosts:
        local_sizes.append(min(host.slots, left))
        left -= local_sizes[-1]
    members: list[Rank] = []
    for index, (host, local_size) in enumerate(zip(hosts, local_sizes)):
        for local_rank in range(local_size):
            cross = [other > local_rank for other in local_sizes]
            places = (local_rank, local_size, sum(cross[:index]), sum(cross))
            members.append(Rank(host, len(members), *places))
    return members


def used(hosts: list[Host], size: int | None) -> list[Host]:
    """The hosts that `size` processes run on, each with as many slots as it has processes.

    Raises:
        Refusal: see `ranks`.
    """
    counts = Counter(member.host for member in ranks(hosts, size))
    return [replace(host, slots=count) for host, count in counts.items()]


def add_arguments(parser: argparse.ArgumentParser) -> None:
    """-np, -H and --hostfile; `chosen` reads them."""
    parser.add_argument("-np", type=int, help="number of processes; all slots by default")
    parser.add_argument("-H", "--hosts", default="", help="node1:4,node2:4 or node[1-2]:4")
    parser.add_argument("--hostfile", default="", help="a YAML file that says more of each host")


def chosen(arguments: argparse.Namespace) -> list[Host]:
    """The hosts that the command line names; this host, for all processes, when it names none.

    Raises:
        Refusal: see `parse` and `read`.
    """
    if arguments.hosts and arguments.hostfile:
        raise Refusal("HOSTS and HOSTFILE both name hosts: give one of them")
    if arguments.hostfile:
        return read(Path(arguments.hostfile).expanduser())
    return parse(arguments.hosts or f"localhost:{max(1, arguments.np or 1)}")


def given(arguments: argparse.Namespace) -> list[str]:
    """The options of `add_arguments` again, to pass to another command."""
    line = ["-np", str(arguments.np)] if arguments.np else []
    line += ["-H", arguments.hosts] if arguments.hosts else []
    return line + (["--hostfile", arguments.hostfile] if arguments.hostfile else [])


def entry(host: Host) -> dict[str, Any]:
    """What a host file says of this host, for yaml.safe_dump."""
    said = {key: getattr(host, key) for key in EXAMPLES}
    return {key: value for key, value in said.items() if value}

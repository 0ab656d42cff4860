"""A host of a job: how it is reached, and what the job may use of it.

hostfile.py reads hosts from what a user writes, and ranks.py gives them their processes. sync,
doctor, launch and benchmarks use the same.
"""

from __future__ import annotations

import base64
import contextlib
import functools
import os
import re
import shlex
import shutil
import socket
import subprocess
from dataclasses import dataclass, field
from pathlib import Path

import psutil

# Variables of Slurm: how many GPUs the job, or each of its tasks, asked for.
JOB_GPUS = ("SLURM_GPUS", "SLURM_GPUS_PER_TASK", "SLURM_TRES_PER_TASK")
# What each task of the job asked for; our single task on a node has the cores and GPUs of all.
A_TASK = ("SRUN_CPUS_PER_TASK", "SLURM_CPUS_PER_TASK", "SLURM_GPU_BIND", "SLURM_NTASKS_PER_GPU")
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


def own_addresses() -> set[str]:
    """IPv4 addresses of this host's network interfaces."""
    # Not tried by binding, which always works where net.ipv4.ip_nonlocal_bind is set.
    found = [address for each in psutil.net_if_addrs().values() for address in each]
    return {address.address for address in found if address.family == socket.AF_INET}


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

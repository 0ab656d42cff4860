"""Why an ssh failed, judged by its exit status and its words, and what fixes it."""

from __future__ import annotations

import os
import re
import sys
import threading
from typing import NamedTuple

from cluster.environment import make_command
from cluster.hostfile import typed
from cluster.hosts import SSH_SECONDS, Host

BEHIND_PROXY = re.compile("UNKNOWN port|kex_exchange|banner exchange|stdio forwarding failed")
NO_FOLDER = 97  # exit status of our scripts where the checkout is missing

# Held while connecting: an sshd, as that of a login node before many hosts, starts to drop
# connections when 10 have not logged in yet (MaxStartups 10:30:100).
connecting = threading.Semaphore(8)


class Trouble(NamedTuple):
    """Why a host is not reached, and the command that fixes it."""

    what: str
    fix: str

    def __str__(self) -> str:
        return f"{self.what}: {self.fix}"


def diagnose(host: Host, status: int, stderr: str) -> Trouble:
    """Why an ssh to `host` ended, from its exit status and stderr."""
    login = f"ssh {host.destination}"
    last = " ".join(stderr.strip().splitlines()[-1:])[:200]
    if status == NO_FOLDER:
        return Trouble(f"there is no folder {os.getcwd()}", make_command(f"sync {typed([host])}"))
    if status in (126, 127):
        python = os.path.relpath(sys.executable)
        return Trouble(f"{python} does not run there", make_command(f"sync ENV=1 {typed([host])}"))
    if "No module named cluster" in stderr:
        return Trouble(
            f"{os.getcwd()} is not a checkout of this repository",
            make_command(f"sync {typed([host])}"),
        )
    if status != 255:
        return Trouble(f"ended with {status}: {last or 'without a word'}", f"{login} to look")
    if "UNKNOWN port" in stderr:  # ssh's name for what is behind a proxy
        lines = [line for line in stderr.strip().splitlines() if not BEHIND_PROXY.search(line)]
        why = " ".join(lines[-1:])[:200] or "the connection was closed"
        return Trouble(f"ProxyJump or ProxyCommand does not lead to it: {why}", f"{login} to look")
    on_it = f"on {host.name}: sudo systemctl"
    refused = re.search(r"port [0-9]+(?=: Connection refused)", stderr)
    port = f" on {refused[0]}" if refused else ""
    for words, what, fix in (
        ("REMOTE HOST IDENTIFICATION HAS CHANGED", "its host key is another than the known one",
         f"if the host was set up anew: ssh-keygen -R {host.known_as}, then {login}"),
        ("Host key verification failed", "its host key is unknown here",
         f"{login} once, and compare the fingerprint"),
        ("Permission denied", "it lets nobody in with our key", f"ssh-copy-id {host.destination}"),
        ("Connection refused", f"no sshd listens there{port}",
         f"{on_it} start ssh, or name its port in the host file"),
        ("Could not resolve hostname", "its name is unknown",
         "write the name that ssh and the other hosts know"),
        ("No route to host", "there is no route to it", f"ping {host.name}"),
        ("banner exchange", f"it took the connection and said nothing for {SSH_SECONDS} s",
         f"{on_it} restart ssh"),
        ("timed out", f"no answer within {SSH_SECONDS} s", f"is it up? ping {host.name}"),
    ):  # fmt: skip
        if words in stderr:
            return Trouble(what, fix)
    return Trouble(f"ssh failed: {last or 'without a word'}", f"{login} to look")


def explain(host: Host, status: int, stderr: str) -> str:
    """Why the connection to the agent on `host` ended, in one line."""
    if status not in (NO_FOLDER, 126, 127) and not stderr.strip():
        return "the connection to it was lost"
    return str(diagnose(host, status, stderr))

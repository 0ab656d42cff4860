"""What figures depend on: the machine, its network, the versions and the commit.

    python -m benchmarks.hardware            this host, as JSON

benchmarks/scaling.py and allreduce.py run that command on each host of a job.
"""

from __future__ import annotations

import contextlib
import datetime
import hashlib
import json
import os
import platform
import re
import shutil
import socket
import subprocess
from collections import Counter
from importlib.metadata import PackageNotFoundError, version
from pathlib import Path
from typing import Any

import psutil

from cluster.environment import ROOT
from cluster.probe import usable_cores

PACKAGES = ["torch", "torchvision", "pytorch-lightning", "horovod"]
# Variables that reach all ranks and change how fast they are.
FASTER = ("HOROVOD_", "NCCL_", "GLOO_", "OMP_", "MKL_", "PRELOAD", "MALLOC_")
# What makes a measurement another one when it changes; notes and results do not.
CODE = ["*.py", "*.yaml", "requirements.txt", "pyproject.toml", "Makefile"]
PASSING = re.compile("lo$|veth|docker|br-|virbr")  # loopback, and interfaces of containers


def hardware() -> dict[str, Any]:
    """`machine` and `software`."""
    return {**machine(), **software()}


def machine() -> dict[str, Any]:
    """Processor, memory, and the cores and GPUs that this process may use."""
    cpu = re.search(r"model name\s*:\s*(.*)", Path("/proc/cpuinfo").read_text())
    return {
        "cpu": cpu.group(1) if cpu else platform.machine(),
        "cores": usable_cores(),
        "memory_gib": round(psutil.virtual_memory().total / 2**30),
        "gpus": gpus(),
    }


def processors(machine: dict[str, Any]) -> str:
    """What computes in a `machine`, as "4 NVIDIA H100" or "AMD EPYC, 2 cores"."""
    gpus = ", ".join(f"{count} {name}" for name, count in Counter(machine["gpus"]).items())
    return gpus or f"{machine['cpu']}, {machine['cores']} cores"


def gpus() -> list[str]:
    """The names of those that this process may use."""
    return [name for (name,) in nvidia_smi("name")]


def software() -> dict[str, Any]:
    """Versions of Python and packages, the commit and what differs from it, the environment
    variables that matter, and the time."""
    installed = {}
    for package in PACKAGES:
        with contextlib.suppress(PackageNotFoundError):
            installed[package] = version(package)
    commit = _git("describe", "--always", "--exclude=*").strip()
    changes = _changes()
    return {
        "python": platform.python_version(),
        "versions": installed,
        "commit": commit + ("-dirty" if changes else "") or None,  # None outside a repository
        "changes": changes,
        "environment": {k: v for k, v in sorted(os.environ.items()) if k.startswith(FASTER)},
        "date": datetime.datetime.now().isoformat(timespec="seconds"),
    }


def versions(results: dict[str, Any]) -> str:
    """Those of Python and packages that results were measured with, and the commit and its day."""
    packages = ", ".join(f"{name} {number}" for name, number in results["versions"].items())
    commit = f"commit {results['commit']}, {results['date'][:10]}"
    return f"Python {results['python']}, {packages}; {commit}"


def _changes() -> str | None:
    """A digest of how code and configuration differ from the commit, new files included; None if
    they do not."""
    difference = _git("diff", "HEAD", "--", *CODE)
    names = _git("ls-files", "-z", "--others", "--exclude-standard", "--", *CODE).split("\0")
    for file in (ROOT / name for name in names if name):
        difference += f"{file}\n{file.read_text(errors='replace') if file.is_file() else ''}"
    return hashlib.sha256(difference.encode()).hexdigest()[:12] if difference else None


def _git(*arguments: str) -> str:
    try:
        # safe.directory: in a container the checkout may belong to another user.
        command = ["git", "-c", "safe.directory=*", *arguments]
        done = subprocess.run(command, cwd=ROOT, capture_output=True, text=True, errors="replace")
        return done.stdout
    except OSError:
        return ""


def host() -> dict[str, Any]:
    """`machine`, what it calls itself, its network interfaces, and an identifier of its boot, which
    only hosts made of the same machine share."""
    boot = Path("/proc/sys/kernel/random/boot_id").read_text().strip()
    return {**machine(), "node": os.uname().nodename, "nics": nics(), "boot": boot}


def nics() -> dict[str, int | None]:
    """The rate in Mbit/s (None: unknown) of each interface that is up, except loopback and those of
    containers, which come and go."""
    rates = {}
    for _, name in socket.if_nameindex():
        folder = Path("/sys/class/net") / name
        state = folder / "operstate"
        if not PASSING.match(name) and state.exists() and state.read_text().strip() == "up":
            rates[name] = _number(folder / "speed")
    for port in sorted(Path("/sys/class/infiniband").glob("*/ports/*/rate")):
        rate = _number(port)  # in Gbit/s
        rates[port.parts[-4]] = rate * 1000 if rate else None
    return rates


def _number(file: Path) -> int | None:
    """The number at the beginning of a file of the kernel; None without one."""
    try:
        match = re.match(r"\d+", file.read_text())
    except OSError:
        return None
    return int(match.group()) if match else None


def nvidia_smi(*fields: str) -> list[list[str]]:
    """These fields of each GPU, or of each that CUDA_VISIBLE_DEVICES lists; empty without any."""
    if shutil.which("nvidia-smi") is None:
        return []
    asked = ",".join(("index", "uuid", *fields))
    query = ["nvidia-smi", "--format=csv,noheader,nounits", f"--query-gpu={asked}"]
    try:
        done = subprocess.run(query, capture_output=True, text=True, timeout=20)
    except subprocess.TimeoutExpired:
        return []
    lines = done.stdout.splitlines() if done.returncode == 0 else []
    rows = [[cell.strip() for cell in line.split(",")] for line in lines]
    visible = os.environ.get("CUDA_VISIBLE_DEVICES")
    if visible is not None and "MIG" not in visible:
        listed = visible.split(",")
        rows = [row for row in rows if row[0] in listed or row[1] in listed]
    return [row[2:] for row in rows]


if __name__ == "__main__":
    print(json.dumps(host()))

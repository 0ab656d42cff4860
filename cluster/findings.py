"""What is wrong with a host, judged by its facts (cluster/probe.py), and what fixes it.

`facts` are those of the host, `here` those of this one; `here` also has the files that are copied
("synced"), those that git tracks and a run may read ("tracked"), and what to type behind make for
all hosts ("hosts").
"""

from __future__ import annotations

import functools
import os
import sys
from dataclasses import dataclass, replace
from typing import Any

from cluster.environment import ROOT, environment_folder, make_command
from cluster.hostfile import folded
from cluster.hosts import Host
from cluster.probe import CODE

# What a host needs.
FREE_DISK_MIB = 1024
# A process with torch, Lightning and a small model: 490 MiB (PSS), 120 where ranks share imports.
FREE_MEMORY_MIB = 500
FREE_GPU_SHARE = 0.9
OPEN_FILES = 512  # of a process with torch and its data; its connections come on top
CLOCK_SECONDS = 2.0


@dataclass(frozen=True)
class Finding:
    """One line of the doctor's: the result of a check on a host, and what fixes it."""

    level: str  # ok, warn, FAIL
    check: str
    host: str
    text: str
    fix: str = ""


def joined(findings: list[Finding]) -> list[Finding]:
    """Findings that say the same as one, with all their hosts."""
    hosts: dict[Finding, list[str]] = {}
    for finding in findings:
        hosts.setdefault(replace(finding, host=""), []).append(finding.host)
    return [replace(finding, host=",".join(folded(names))) for finding, names in hosts.items()]


def checkout(host: Host, facts: dict[str, Any], here: dict[str, Any]) -> list[Finding]:
    sync = make_command(f"sync {here['hosts']}")
    if facts["code"] is None:
        what = "is not a checkout of this repository" if facts["root"] else "is missing there"
        return [Finding("FAIL", "code", host.name, f"{ROOT} {what}", sync)]
    # Files that are not copied (.syncignore) may differ, and files that neither are code nor are
    # tracked by git.
    names = {
        name
        for name in here["code"].keys() & here["synced"]
        if name.endswith(CODE) or name in here["tracked"]
    }
    stale = sorted(name for name in names if facts["code"].get(name) != here["code"].get(name))
    if stale:
        summary = ", ".join(stale[:3]) + (f" and {len(stale) - 3} more" if len(stale) > 3 else "")
        return [Finding("FAIL", "code", host.name, f"other than here: {summary}", sync)]
    theirs = {name for name in facts["code"] if name.endswith(CODE)}
    if extra := sorted(theirs - here["code"].keys()):
        text = f"has what is not here: {', '.join(extra[:3])}"
        return [Finding("warn", "code", host.name, text, f"if it is to go: {sync}")]
    shared = facts["identity"] == here["identity"]
    text = "the same file system" if shared else "a copy, the same"
    return [Finding("ok", "code", host.name, text)]


def packages(host: Host, facts: dict[str, Any], here: dict[str, Any]) -> list[Finding]:
    fix = make_command(f"sync ENV=1 {here['hosts']}")
    if environment_folder().parent != ROOT:
        fix = f"on {host.name}: make install PYTHON={sys.executable}"
    fail = functools.partial(Finding, "FAIL", "packages", host.name)
    theirs, ours = facts["versions"], here["versions"]
    if isinstance(theirs, str):
        return [fail(f"{sys.executable} does not run there: {theirs}", fix)]
    for name, version in ours.items():
        if theirs.get(name) != version:
            return [fail(f"{name} {theirs.get(name) or 'is missing'}, here {version}", fix)]
    build = facts.get("build")
    if isinstance(build, str):
        return [fail(f"Horovod does not run there: {build}", fix)]
    versions = f"Python {ours['python']}, torch {ours['torch']}, Horovod {ours['horovod']}"
    if build is None:
        return [Finding("ok", "packages", host.name, versions)]
    kinds = [name for name in ("nccl", "gloo", "mpi") if build[name]]
    if build["gpus"] and not build["nccl"]:
        text = "has GPUs, and Horovod no NCCL: several times slower (horovod#2686)"
        return [fail(text, f"{make_command('install')}, then {fix}")]
    names = {"nccl": "NCCL", "gloo": "Gloo", "mpi": "MPI"}
    versions += f" with {', '.join(names[kind] for kind in kinds)}"
    return [Finding("ok", "packages", host.name, versions)]


def gpus(host: Host, facts: dict[str, Any]) -> list[Finding]:
    ok, warn, fail = (
        functools.partial(Finding, level, "GPUs", host.name) for level in ("ok", "warn", "FAIL")
    )
    answer = facts["gpus"]
    by_index = {gpu["index"]: gpu for gpu in answer["devices"]}
    look = f"ssh {host.destination} nvidia-smi"
    # The launcher passes this on to all ranks; -1 is a common way to name none.
    hidden = os.environ.get("CUDA_VISIBLE_DEVICES") in ("", "-1")
    if hidden and host.gpus is None and (by_index or answer["error"]):
        return [ok("hidden by CUDA_VISIBLE_DEVICES: it uses CPUs")]
    if answer["error"]:
        return [fail(answer["error"][:150], look)]
    if host.gpus is not None and (missing := [gpu for gpu in host.gpus if gpu not in by_index]):
        text = f"GPU {', '.join(map(str, missing))} of the host file is not there; there "
        text += f"are {', '.join(map(str, by_index))}" if by_index else "is none"
        return [fail(text, "fix gpus in the host file")]
    if not by_index:
        return [ok("none: it trains on CPUs")]
    listed = os.environ.get("CUDA_VISIBLE_DEVICES", "").split(",")
    visible = tuple(int(gpu) for gpu in listed if gpu.isdecimal() and int(gpu) in by_index)
    wanted = host.gpus or visible or tuple(sorted(by_index))
    if host.slots > len(wanted):
        text = f"{host.slots} slots and {len(wanted)} GPUs: a process needs its own"
        fix = f"{few(len(wanted))}; to train on CPUs: CUDA_VISIBLE_DEVICES= make ..."
        return [fail(text, fix)]
    lent = [by_index[number] for number in wanted[: host.slots]]
    findings = [warn(text, look) for gpu in lent if (text := _taken(gpu, answer["processes"]))]
    driver, build = lent[0]["driver"], facts.get("build")
    if isinstance(build, dict) and not build["gpus"]:
        text = f"torch for CUDA {build['cuda']} sees none of them; the driver is {driver}"
        why = f"{sys.executable} -c 'import torch; torch.cuda.init()'"
        fix = f"on {host.name}: update the driver, if this does not say otherwise: {why}"
        return [*findings, fail(text, fix)]
    names = " and ".join(sorted({gpu["name"] for gpu in lent}))
    return findings or [ok(f"{host.slots} x {names}, driver {driver}")]


def _taken(gpu: dict[str, Any], processes: list[dict[str, Any]]) -> str:
    """What a rank would share the GPU with; empty if it has it for itself."""
    number = gpu["index"]
    others = [f"{p['pid']} of user {p['uid']}" for p in processes if p["gpu"] == number]
    if others:
        return f"GPU {number} is used by others: process {', '.join(others)}"
    if gpu["free"] < FREE_GPU_SHARE * gpu["total"]:
        return f"GPU {number} has {gpu['free']:,} of {gpu['total']:,} MiB free"
    return ""


def interface(host: Host, facts: dict[str, Any], alone: bool) -> list[Finding]:
    fail = functools.partial(Finding, "FAIL", "network", host.name)
    addresses = ", ".join(f"{name} {address}" for name, address in facts["interfaces"].items())
    there, fix = f"there are {addresses}", "fix nic in the host file"
    nic = host.nic or facts["towards"]
    if nic is None:
        return [fail(f"no interface leads to this host; {there}", "give nic in the host file")]
    if nic not in facts["interfaces"]:
        return [fail(f"no interface {nic} with an address; {there}", fix)]
    if facts["interfaces"][nic].startswith("127.") and not alone:
        return [fail(f"other hosts do not reach its {nic}; {there}", fix)]
    return [Finding("ok", "network", host.name, f"{nic} {facts['interfaces'][nic]}")]


def room(host: Host, facts: dict[str, Any], ranks: int) -> list[Finding]:
    """Disk, memory, cores and limits, for a job of `ranks` processes in all."""
    findings = []
    for path, mib in facts["disk"].items():
        if mib < FREE_DISK_MIB:
            text = f"{mib:,} MiB free in {path}; {FREE_DISK_MIB:,} are wanted"
            fix = f"ssh {host.destination} du -xh -d1 {path} | sort -h"
            findings.append(Finding("FAIL", "disk", host.name, text, fix))
    if not findings:
        summary = f"{facts['disk'][str(ROOT)] >> 10:,} GiB free"
        findings.append(Finding("ok", "disk", host.name, summary))
    available, wanted = facts["memory"], FREE_MEMORY_MIB * host.slots
    if available < wanted:
        text = f"{available:,} MiB free for {host.slots} processes; {wanted:,} are wanted"
        fit = max(1, available // FREE_MEMORY_MIB)
        findings.append(Finding("FAIL", "memory", host.name, text, few(fit)))
    else:
        findings.append(Finding("ok", "memory", host.name, f"{available >> 10} GiB free"))
    cores, has_gpus = facts["cores"], bool(facts["gpus"]["devices"])
    if has_gpus and cores < 2 * host.slots:  # as by Slurm's default, a core for each task
        text = f"{cores} cores for {host.slots} GPUs: a rank, Horovod and loaders share one"
        fix = "ask for more (Slurm: --cpus-per-task), or take fewer slots"
        findings.append(Finding("warn", "cores", host.name, text, fix))
    elif not has_gpus and cores < host.slots:
        text = f"{host.slots} processes on {cores} cores: slower than {cores}"
        findings.append(Finding("warn", "cores", host.name, text, few(cores)))
    else:
        findings.append(Finding("ok", "cores", host.name, f"{cores} cores"))
    files = OPEN_FILES + ranks + host.slots  # Gloo connects it to all, twice within a host
    if facts["files"] < files:
        text = f"{facts['files']:,} open files a process; {files:,} are wanted"
        fix = f"on {host.name}: raise nofile in /etc/security/limits.conf, log in anew"
        findings.append(Finding("FAIL", "limits", host.name, text, fix))
    elif facts["infiniband"] and facts["memlock"] != -1:
        text = f"memlock is {facts['memlock'] >> 10:,} KiB; InfiniBand wants it unlimited"
        fix = f"on {host.name}: set memlock unlimited in /etc/security/limits.conf"
        findings.append(Finding("warn", "limits", host.name, text, fix))
    else:
        findings.append(Finding("ok", "limits", host.name, f"{facts['files']:,} open files"))
    return findings


def few(slots: int) -> str:
    return f"give it {slots} slots at most, by HOSTS=, slots in HOSTFILE, or NP="


def writable(host: Host, facts: dict[str, Any]) -> list[Finding]:
    """Of the first host, whose rank 0 writes the run's folder."""
    if path := facts["readonly"]:
        text = f"{path} cannot be written; rank 0, which runs here, writes there"
        fix = f"see ssh {host.destination} ls -ld {path}"
        return [Finding("warn", "disk", host.name, text, fix)]
    if facts["logs"] < FREE_DISK_MIB <= facts["disk"][str(ROOT)]:  # on a disk of its own
        text = f"{facts['logs']:,} MiB free in {ROOT}/logs, where rank 0 writes, which runs here"
        fix = f"ssh {host.destination} df -h {ROOT}/logs/, or give log_dir= another folder"
        return [Finding("warn", "disk", host.name, text, fix)]
    return []


def clock(host: Host, ahead: float) -> list[Finding]:
    if abs(ahead) > CLOCK_SECONDS:
        text = f"its clock is {abs(ahead):.0f} s {'ahead' if ahead > 0 else 'behind'}"
        fix = f"on {host.name}: sudo timedatectl set-ntp true"
        return [Finding("warn", "clock", host.name, text, fix)]
    return [Finding("ok", "clock", host.name, "as here")]

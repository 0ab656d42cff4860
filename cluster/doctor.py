"""What keeps hosts from training together, and the command that fixes it.

    python -m cluster.doctor -H node1:4,node2:4 [--json]

Prints a line for each check: "FAIL" means that a job would fail or be wrong, "warn" that it may be
slow. All hosts are asked at once and connect to each other. Then the ranks of each host with GPUs,
and each pair of hosts (of more than 8 hosts: each with the next one), exchange messages and
all-reduce. Nothing is changed on any host. The exit status is 0 if they are fit, 1 if not.
"""

from __future__ import annotations

import argparse
import contextlib
import itertools
import json
import os
import shlex
import signal
import subprocess
import sys
import threading
import time
from collections import Counter
from collections.abc import Collection
from concurrent.futures import ThreadPoolExecutor
from dataclasses import asdict, replace
from pathlib import Path
from typing import Any, NoReturn

import yaml

from cluster.environment import ROOT, make_command
from cluster.findings import (
    Finding,
    checkout,
    clock,
    gpus,
    interface,
    joined,
    packages,
    room,
    writable,
)
from cluster.forwarding import addresses
from cluster.hostfile import add_arguments, chosen, entry, typed
from cluster.hosts import SSH_SECONDS, Host, Refusal, refuse_one_twice
from cluster.install import read_pins
from cluster.probe import CODE, CONNECT_SECONDS, own_address
from cluster.ranks import used
from cluster.ssh import connecting, diagnose
from cluster.sync import synced, tracked

PROBE = (Path(__file__).parent / "probe.py").read_text()
MOST_KINDS = 200  # endings of file names that are compared: they go on a command line
QUICK_SECONDS = 40  # for Python from a slow file system, and nvidia-smi of many GPUs
ANSWER_SECONDS = 100  # for torch from there too
PAIR_SECONDS = 90
MOST_PAIRED = 8  # hosts of which all pairs all-reduce; of more, each with the next one
ORDER = (
    "ssh", "code", "packages", "GPUs", "network", "disk", "memory", "cores", "limits", "clock",
    "pairs", "all-reduce",
)  # fmt: skip


asking: list[subprocess.Popen] = []  # one for each host
starting = threading.Lock()  # held while another one is started and noted


def kill(process: subprocess.Popen) -> None:
    """Kill an ssh and its ProxyCommand, which may hang too and keep open what we read."""
    if process.returncode is None:  # not waited for yet: no other process has its id
        os.killpg(process.pid, signal.SIGKILL)


class Contact:
    """A host that is asked; it has `facts` when it has answered, else `trouble`."""

    def __init__(self, host: Host, launcher: str | None, quick: bool) -> None:
        self.host = host
        self.facts: dict[str, Any] | None = None
        self.trouble: Finding | None = None
        request = {**_request(quick), "nic": host.nic}
        try:
            request["launcher"] = launcher or own_address(host.address)
        except Refusal as error:
            self._fail(
                str(error).partition(": ")[2], "write the name that ssh and the other hosts know"
            )
            return
        except OSError as error:
            self._fail(f"no route to it: {error.strerror}", f"ip route get {host.address}")
            return
        # The environment's Python or, where there is none, the host's python3, which may be old.
        python = f"p={shlex.quote(sys.executable)}; \"$p\" -c '' 2>/dev/null || p=python3"
        ask = f'exec "$p" -c {shlex.quote(PROBE)} {shlex.quote(json.dumps(request))}'
        # {} says that the login worked, on a line of its own below what a login shell may print.
        # The answer that follows may take longer.
        script = f"echo; echo '{{}}'; {python}; {ask}"
        limit = SSH_SECONDS + 2  # later than ssh's own limit, as ssh says why
        with connecting:
            self.asked_at = time.time()
            with starting:
                self.process = subprocess.Popen(
                    host.command(script), encoding="utf-8", errors="replace",
                    start_new_session=True,
                    stdin=subprocess.PIPE, stdout=subprocess.PIPE, stderr=subprocess.PIPE,
                )  # fmt: skip
                asking.append(self.process)
            answer = self._line(limit)
        if answer is not None:
            limit = QUICK_SECONDS if quick else ANSWER_SECONDS
            answer = self._line(limit)
        self.answered_at = time.time()
        if answer is None:
            self._fail(*self._why_silent(limit))
        self.facts = answer

    def reaches(self, peers: list[tuple[str, str, int]]) -> dict[str, str | None]:
        """Why the host does not reach each of the others; None where it does."""
        assert self.process.stdin is not None
        with contextlib.suppress(OSError):
            self.process.stdin.write(json.dumps(peers) + "\n")
            self.process.stdin.flush()
        limit = 5 + len(peers) * CONNECT_SECONDS
        return self._line(limit) or {name: "no answer" for name, _, _ in peers}

    def close(self) -> None:
        if hasattr(self, "process"):
            kill(self.process)
            self.process.communicate()

    def _line(self, seconds: float) -> dict[str, Any] | None:
        """The host's next answer; None if it takes longer than this, and then its ssh is killed."""
        assert self.process.stdout is not None
        timer = threading.Timer(seconds, kill, [self.process])
        timer.start()
        try:
            for line in self.process.stdout:
                with contextlib.suppress(ValueError):  # a login shell may greet
                    if line.startswith("{"):
                        return json.loads(line)
            return None
        finally:
            timer.cancel()

    def _why_silent(self, limit: float) -> tuple[str, str]:
        """Why there was no answer, and what fixes that."""
        with contextlib.suppress(subprocess.TimeoutExpired):
            self.process.communicate(timeout=2)
        kill(self.process)  # a process that ssh has left behind may keep its stderr open
        host, errors = self.host, self.process.communicate()[1]
        status = self.process.returncode
        if status == -signal.SIGKILL:  # by us
            return f"no answer within {limit} s", f"look there: ssh {host.destination} uptime"
        if "python3: not found" in errors or status == 127:
            return "there is no python3", f"on {host.name}: sudo apt-get install python3"
        return diagnose(host, status, errors)

    def _fail(self, text: str, fix: str) -> None:
        self.trouble = Finding("FAIL", "ssh", self.host.name, text, fix)


def examine(hosts: list[Host], quick: bool = False) -> list[Finding]:
    """All findings, good ones too, in the order in which to fix them.

    Raises:
        Refusal: where two names lead to one host.
    """
    refuse_one_twice(hosts)
    # Also for this host itself, whose name may lead to its loopback. Where it fails, each says why.
    own_addresses: dict[Host, str] = {}
    with contextlib.suppress(Refusal):
        own_addresses = addresses(hosts)
    pool = ThreadPoolExecutor(max_workers=len(hosts))
    contacts: list[Contact] = []
    try:
        contacts = [*pool.map(lambda host: Contact(host, own_addresses.get(host), quick), hosts)]
        findings = _judged(contacts, quick)
        if not quick and fit(findings):
            findings += _connections(contacts, pool)
    finally:
        for contact in contacts:
            contact.close()
        pool.shutdown(wait=False)  # at Ctrl-C we do not wait for hosts
    if not quick and fit(findings):
        findings += _exchanges({c.host: c.facts for c in contacts if c.facts})
    return sorted(findings, key=lambda finding: ORDER.index(finding.check))


def fit(findings: list[Finding]) -> bool:
    return not any(finding.level == "FAIL" for finding in findings)


def _judged(contacts: list[Contact], quick: bool) -> list[Finding]:
    """What is wrong with each host by itself."""
    here = _here(quick) | {"hosts": typed([c.host for c in contacts])}
    ranks = sum(c.host.slots for c in contacts)
    findings = [c.trouble for c in contacts if c.trouble]
    alone = len(contacts) - len(findings) == 1
    for contact in contacts:
        host, facts = contact.host, contact.facts
        if facts is None:
            continue
        findings += checkout(host, facts, here) + packages(host, facts, here)
        findings += gpus(host, facts) + interface(host, facts, alone)
        if not quick:
            findings += room(host, facts, ranks) + clock(host, _clock(contact))
            findings += writable(host, facts) if contact is contacts[0] else []
    return findings


def _here(quick: bool) -> dict[str, Any]:
    """The facts of this host, with which the others are compared."""
    request = json.dumps({**_request(quick), "nic": None, "launcher": "127.0.0.1"})
    limit = QUICK_SECONDS if quick else ANSWER_SECONDS
    try:
        result = subprocess.run(
            [sys.executable, "-c", PROBE, request],
            capture_output=True, text=True, input="", timeout=limit,
        )  # fmt: skip
    except subprocess.TimeoutExpired:
        why = f"this host says nothing of itself for {limit} s: try nvidia-smi"
        raise Refusal(why) from None
    if result.returncode:
        raise Refusal(f"this host cannot be looked at: {result.stderr.strip().splitlines()[-1]}")
    facts = json.loads(result.stdout.splitlines()[-1])
    facts["synced"] = synced() or facts["code"].keys()
    facts["tracked"] = tracked()
    return facts


def _request(quick: bool) -> dict[str, Any]:
    kinds = Counter(Path(name).suffix or Path(name).name for name in tracked())
    common = {kind for kind, _ in kinds.most_common(MOST_KINDS)}
    return {
        "root": str(ROOT), "python": sys.executable, "quick": quick,
        "kinds": sorted({*CODE, *common}),
        "packages": [name for name, _ in read_pins(ROOT / "requirements.txt")],
    }  # fmt: skip


def _clock(contact: Contact) -> float:
    """Seconds by which the host's clock is ahead of ours (or behind: negative), at least."""
    assert contact.facts is not None
    host_time = contact.facts["time"]
    return max(host_time - contact.answered_at, 0.0) + min(host_time - contact.asked_at, 0.0)


def _connections(contacts: list[Contact], pool: ThreadPoolExecutor) -> list[Finding]:
    """Whether each host reaches every other one, on the interface of the job."""
    if len(contacts) < 2:
        return []
    listening = {c.host.name: tuple((c.facts or {})["listens"]) for c in contacts}

    def ask(contact: Contact) -> dict[str, str | None]:
        peers = [(name, *at) for name, at in listening.items() if name != contact.host.name]
        return contact.reaches(peers)

    findings = []
    for contact, answers in zip(contacts, pool.map(ask, contacts)):
        address = listening[contact.host.name][0]
        for name, problem in answers.items():
            if problem:
                text = f"does not reach {name} at {listening[name][0]}: {problem}"
                fix = f"on {name}: sudo ufw allow from {address}, or give nic in the host file"
                findings.append(Finding("FAIL", "pairs", contact.host.name, text, fix))
    count = len(contacts) * (len(contacts) - 1)
    return findings or [Finding("ok", "pairs", "all", f"{count} ways, each host to each other")]


def _exchanges(answers: dict[Host, dict[str, Any]]) -> list[Finding]:
    """Messages and the speed of an all-reduce: between all ranks of a host with GPUs, which may
    reach each other without the network, and between two ranks on a pair of hosts."""
    hosts = [*answers]
    with_gpus = {host for host in hosts if answers[host]["gpus"]["devices"]}
    inside = [host for host in hosts if host in with_gpus and host.slots > 1]
    if len(hosts) == 1 and not inside:
        inside = [replace(host, slots=min(2, host.slots)) for host in hosts]
    pairs = list(itertools.combinations(hosts, 2))
    if len(hosts) > MOST_PAIRED:  # 64 hosts have 2,016 pairs
        pairs = list(zip(hosts, [*hosts[1:], hosts[0]]))
    groups: list[tuple[Host, ...]] = [(host,) for host in inside]
    groups += [tuple(replace(host, slots=1) for host in pair) for pair in pairs]
    fabric = {host.name for host in with_gpus if answers[host]["infiniband"]}
    findings: list[Finding] = []
    count = len(groups)
    while groups:
        # At the same time only groups that share no host, and so no link.
        busy: set[str] = set()
        current = []
        for group in groups:
            if not busy & {host.name for host in group}:
                busy |= {host.name for host in group}
                current.append(group)
        groups = [group for group in groups if group not in current]
        with ThreadPoolExecutor(max_workers=4) as pool:  # two ssh each: see cluster/ssh.py
            for found in pool.map(lambda group: _exchange(group, fabric), current):
                findings.append(found)
                if count > MOST_PAIRED and len(findings) % MOST_PAIRED == 0:
                    print(f"all-reduce: {len(findings)} of {count}", file=sys.stderr, flush=True)
    return findings


def _exchange(group: tuple[Host, ...], fabric: Collection[str] = ()) -> Finding:
    """Run cluster/exchange.py on these hosts; `fabric` names those with GPUs and InfiniBand."""
    name = "-".join(host.name for host in group)
    if sum(host.slots for host in group) < 2:
        return Finding("ok", "all-reduce", name, "one process: nothing to exchange")
    by_fabric = len(group) > 1 and all(host.name in fabric for host in group)
    debug = {"NCCL_DEBUG": "INFO"} if by_fabric else {}
    # Through a pipe, not in a file: env of the host file may be confidential.
    hostfile = yaml.safe_dump({"hosts": {host.name: entry(host) for host in group}})
    command = [sys.executable, "-m", "cluster.horovodrun", "--hostfile", "/dev/stdin"]
    command += [sys.executable, "-m", "cluster.exchange"]
    process = subprocess.Popen(
        command, cwd=ROOT, encoding="utf-8", errors="replace",
        stdin=subprocess.PIPE, stdout=subprocess.PIPE, stderr=subprocess.PIPE,
        env=os.environ | debug | {"HOROVOD_GLOO_TIMEOUT_SECONDS": str(PAIR_SECONDS // 3)},
    )  # fmt: skip
    try:
        output, errors = process.communicate(hostfile, timeout=PAIR_SECONDS)
    except subprocess.TimeoutExpired:
        process.terminate()
        output, errors = process.communicate()
        errors = f"no end within {PAIR_SECONDS} s"
    look = f"NCCL_DEBUG=INFO {make_command(f'hello {typed(group)}')}"
    results = [line for line in output.splitlines() if line.startswith("[0]<stdout>:{")]
    if process.returncode or not results:
        reason = " ".join(errors.strip().splitlines()[-1:])[:300]
        if reason.startswith("error: "):  # by the launcher, which says what to do
            return Finding("FAIL", "all-reduce", name, reason.removeprefix("error: "))
        return Finding("FAIL", "all-reduce", name, reason, f"HOROVOD_LOG_LEVEL=debug {look}")
    result = json.loads(results[0].partition(":")[2])
    summary = f"{result['operations']}, latency {result['latency_us']:,} µs, "
    summary += f"bus bandwidth {result['bus_bandwidth_mb_s']:,} MB/s"
    if by_fabric and "Using network Socket" in output:  # NCCL says IB or a plugin otherwise
        text = f"there is InfiniBand, and NCCL goes over TCP: {summary}"
        return Finding("warn", "all-reduce", name, text, f"{look}, whose lines with NET say why")
    return Finding("ok", "all-reduce", name, summary)


def table(findings: list[Finding]) -> str:
    """A line for each check; hosts with the same result share one."""
    lines = joined(findings)
    width = max((len(line.host) for line in lines), default=0)
    out = []
    for line in lines:
        out.append(f"{line.level:<4}  {line.check:<10}  {line.host:<{width}}  {line.text}")
        if line.fix:
            out.append(f"{'':<{20 + width}}fix: {line.fix}")
    return "\n".join(out)


def refuse_unfit(hosts: list[Host]) -> None:
    """The checks that take no time, before a job starts.

    Raises:
        Refusal: with what does not fit.
    """
    if len(hosts) == 1 and hosts[0].is_here:
        return
    failures = [finding for finding in examine(hosts, quick=True) if finding.level == "FAIL"]
    if failures:
        messages = (f"{f.host}: {f.check}: {f.text} (fix: {f.fix})" for f in joined(failures))
        raise Refusal("; ".join(messages))


def leave() -> NoReturn:
    """End at Ctrl-C without waiting for hosts, and leave no ssh behind."""
    starting.acquire()  # for good: no further ssh is started
    for process in asking:
        kill(process)
    os._exit(130)


def main() -> int:
    parser = argparse.ArgumentParser(prog="python -m cluster.doctor", description=__doc__)
    parser.formatter_class = argparse.RawDescriptionHelpFormatter
    add_arguments(parser)
    parser.add_argument("--json", action="store_true")
    parser.add_argument("--quick", action="store_true", help="what takes no time; only failures")
    arguments = parser.parse_args()
    os.chdir(ROOT)
    try:
        hosts = used(chosen(arguments), arguments.np)
        if arguments.quick:
            refuse_unfit(hosts)
            return 0
        findings = examine(hosts)
    except Refusal as error:
        print(f"error: {error}", file=sys.stderr)
        return 2
    except KeyboardInterrupt:
        leave()
    is_fit = fit(findings)
    if arguments.json:
        output = json.dumps({"fit": is_fit, "findings": [asdict(f) for f in findings]}, indent=1)
    else:
        output = f"{table(findings)}\n{'fit' if is_fit else 'not fit: fix what is marked FAIL'}"
    if sys.stdout is not None:  # not closed, as by `>&-`
        sys.stdout.reconfigure(errors="replace")  # type: ignore[union-attr]
    try:
        print(output, flush=True)
    except BrokenPipeError:  # make doctor | head
        os.dup2(os.open(os.devnull, os.O_WRONLY), sys.stdout.fileno())
    return int(not is_fit)


if __name__ == "__main__":
    sys.exit(main())

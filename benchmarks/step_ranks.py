"""The processes of one variant of benchmarks/step.py: started, run for some steps, stopped."""

from __future__ import annotations

import argparse
import contextlib
import json
import os
import signal
import socket
import subprocess
import sys
import time
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

import psutil

from benchmarks.launching import Failed
from cluster.environment import ROOT
from cluster.hostfile import parse
from cluster.hosts import Refusal

# A function of step_worker.py, options of HorovodStrategy, environment variables.
Variant = tuple[str, dict[str, Any], dict[str, str]]
# Stopped processes must not take each other for lost.
PATIENCE = {
    "HOROVOD_GLOO_TIMEOUT_SECONDS": "86400", "HOROVOD_STALL_CHECK_DISABLE": "1",
    "TORCH_NCCL_ENABLE_MONITORING": "0",
}  # fmt: skip


@dataclass
class Group:
    """The ranks of one variant."""

    variant: str
    launcher: subprocess.Popen
    log: Path
    ranks: list[socket.socket] = field(default_factory=list)
    pids: list[int] = field(default_factory=list)
    blocks: list[list[float]] = field(default_factory=list)
    idle: list[float] = field(default_factory=list)
    answer: dict[str, Any] = field(default_factory=dict)  # the last of one rank
    steps: int = 0
    peak_kib: int = 0
    resident_kib: list[int] = field(default_factory=list)

    def answers(self) -> list[dict[str, Any]]:
        """What each rank sends after its steps; then all are stopped."""
        answers = []
        for rank in self.ranks:
            with rank.makefile("r") as file:
                line = file.readline()
            if not line:
                raise self.failed()
            answers.append(json.loads(line))
        self.pids = [answer["pid"] for answer in answers]
        self.answer = answers[0]
        self.peak_kib = max(answer["peak_kib"] for answer in answers)
        self.resident_kib.append(max(answer["resident_kib"] for answer in answers))
        for pid in self.pids:
            os.kill(pid, signal.SIGSTOP)
        return answers

    def run(self, steps: int) -> list[float]:
        """Seconds of each of so many steps on all ranks, after one that is left out."""
        psutil.cpu_percent()  # the next call counts from here
        try:
            for pid in self.pids:
                os.kill(pid, signal.SIGCONT)
            for rank in self.ranks:
                rank.sendall((json.dumps({"steps": steps + 1}) + "\n").encode())
        except OSError:
            raise self.failed() from None
        self.steps += steps + 1
        answers = self.answers()
        self.idle.append(round(1 - psutil.cpu_percent() / 100, 3))  # of all cores
        return [seconds for answer in answers for seconds in answer["seconds"][1:]]

    def failed(self) -> Failed:
        self.end()
        output = "\n".join(self.log.read_text().splitlines()[-15:])
        return Failed(f"{output}\nerror: {self.variant}: a rank did not start, or has ended")

    def kill(self) -> None:
        """Without waiting, so that a second Ctrl-C leaves no stopped rank."""
        for pid in self.pids:
            with contextlib.suppress(ProcessLookupError):
                os.kill(pid, signal.SIGKILL)
        self.launcher.terminate()

    def end(self) -> None:
        self.kill()
        self.launcher.wait()


def start(
    variant: str, how: Variant, model: str, arguments: argparse.Namespace, folder: Path
) -> Group:
    """Launch the ranks of a variant, and wait until all have connected."""
    name, options, extra = how
    address = folder / f"{len(list(folder.iterdir()))}.socket"
    with socket.socket(socket.AF_UNIX) as listener:
        listener.bind(str(address))
        listener.listen()
        listener.settimeout(1)
        deadline = time.monotonic() + 120
        worker = [sys.executable, str(ROOT / "benchmarks" / "step_worker.py")]
        horovodrun = Path(sys.executable).parent / "horovodrun"
        hosts = parse(arguments.hosts)
        listed = ",".join(f"{host.name}:{host.slots}" for host in hosts)  # as horovodrun reads it
        ranks = sum(host.slots for host in hosts)
        environment = {
            "OMP_NUM_THREADS": "1", "MASTER_PORT": str(_free_port()),
            "MASTER_ADDR": _address_of_first(arguments.hosts), **PATIENCE, **extra,
        }  # fmt: skip
        log = address.with_suffix(".log")
        output = log.open("w")
        launcher = subprocess.Popen(
            [str(horovodrun), "--gloo", "-np", str(ranks), "-H", listed, *worker, name,
             model, str(address), arguments.device, str(arguments.batch), json.dumps(options)],
            env={**os.environ, **environment}, stdout=output, stderr=output, start_new_session=True,
        )  # fmt: skip
        output.close()
        group = Group(variant, launcher, log)
        try:
            while len(group.ranks) < ranks:
                try:
                    group.ranks.append(listener.accept()[0])
                except TimeoutError:
                    if launcher.poll() is not None or time.monotonic() > deadline:
                        raise group.failed() from None
            group.answers()
        except KeyboardInterrupt:
            group.end()
            raise
    return group


def _address_of_first(hosts: str) -> str:
    host = parse(hosts)[0].name
    try:
        return "127.0.0.1" if host == "localhost" else socket.gethostbyname(host)
    except OSError as error:
        raise Refusal(f"--hosts {hosts}: {host}: {error.strerror}") from None


def _free_port() -> int:
    with socket.socket() as listener:
        listener.bind(("", 0))
        return listener.getsockname()[1]

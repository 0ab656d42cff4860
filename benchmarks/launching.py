"""One run of a benchmark: template.py on some processes, what it measured, and what else ran there.

`cluster.horovodrun` starts it, as in `make train`. The result is read from the summary.json that a
run leaves on the host of rank 0, by ssh if that is another host. Nothing stays behind on the hosts.
"""

from __future__ import annotations

import argparse
import contextlib
import functools
import json
import os
import shlex
import signal
import statistics
import subprocess
import sys
import tempfile
from collections.abc import Callable, Iterator
from dataclasses import dataclass
from pathlib import Path
from typing import Any, NoReturn

from benchmarks import load
from cluster.environment import ROOT
from cluster.forwarding import forwarded
from cluster.horovodrun import AT_ONCE
from cluster.hostfile import typed
from cluster.hosts import Host, Refusal
from cluster.ranks import ranks
from cluster.signals import interrupt_at_signals

# What makes a process one of several ranks (cluster/ranks.py, Rank.environment); without these it
# trains alone.
RANK_VARIABLES = [
    f"HOROVOD_{name}"
    for name in ("RANK", "SIZE", "LOCAL_RANK", "LOCAL_SIZE", "CROSS_RANK", "CROSS_SIZE")
]
# Nothing is evaluated, saved or logged during a measurement.
MEASURED = [
    "test=false", "callbacks=none", "logger=none", "trainer.enable_checkpointing=false",
    "trainer.limit_val_batches=0", "trainer.num_sanity_val_steps=0",
]  # fmt: skip


class Failed(Exception):
    """Why a run gave no result: the last lines of its output, then one with "error: "."""


class Parser(argparse.ArgumentParser):
    """Refuses a mistake in one line, without the list of all options."""

    def error(self, message: str) -> NoReturn:
        raise Refusal(f"{message} (--help lists all options)")


def say(line: str) -> None:
    print(line, file=sys.stderr, flush=True)


def ends_in_a_line(main: Callable[[], int]) -> Callable[[], int]:
    """Decorates the main of a benchmark. SIGTERM and SIGHUP are as Ctrl-C; what is refused ends in
    a line and status 2, a run that failed in status 1, Ctrl-C in 130."""

    @functools.wraps(main)
    def status() -> int:
        interrupt_at_signals()
        try:
            result = main()
            print(end="", flush=True)
            return result
        except BrokenPipeError:  # ... | head
            os.dup2(os.open(os.devnull, os.O_WRONLY), sys.stdout.fileno())  # lest the exit fails
            say("error: who reads this went away before its end")
            return 2
        except Refusal as refusal:
            say(f"error: {refusal}")
            return 2
        except Failed as failed:
            say(str(failed))
            return 1
        except KeyboardInterrupt as stopped:
            say(f"\nstopped{stopped}")
            return 130

    return status


@contextlib.contextmanager
def tells_what_is_kept(file: Path) -> Iterator[None]:
    """What ends a measurement here, Ctrl-C or a run that failed, tells that its file is kept, if
    there is one yet."""
    try:
        yield
    except (Failed, KeyboardInterrupt) as end:
        goes_on = f"; what is whole in {file} is kept: the same command goes on"
        goes_on = goes_on if file.exists() else ""
        raise type(end)(f"{end}{goes_on}") from None


@dataclass(frozen=True)
class Job:
    """What one run measures.

    Attributes:
        np: processes.
        batch: samples a process takes a step.
        alone: each process trains by itself, all at the same time.
    """

    strategy: str
    np: int
    batch: int
    alone: bool = False

    def __str__(self) -> str:
        alone = ", each alone" if self.alone else ""
        return f"np={self.np} {self.strategy}{alone}, batch {self.batch} a process"


@dataclass(frozen=True)
class Launcher:
    """How jobs are started.

    Args:
        hosts: filled in their order.
        where: the launcher's arguments that name them.
        arguments: the user's overrides of template.py.
        threads: of each process.
    """

    hosts: list[Host]
    where: list[str]
    arguments: list[str]
    threads: int

    def run(self, job: Job, length: list[str]) -> dict[str, Any]:
        """Train; what was measured, with the load of the hosts that took part before and after.

        Args:
            length: overrides that say how long the run is, and how much of it is warm-up.

        Raises:
            Failed: when it did not end well.
        """
        # With all their slots, as Slurm is asked for what these need.
        used_hosts = list(dict.fromkeys(member.host for member in ranks(self.hosts, job.np)))
        before = ask(used_hosts, "benchmarks.load")
        with tempfile.TemporaryDirectory(prefix="bench-") as folder:
            runs, writers = f"{folder}/runs", used_hosts if job.alone else used_hosts[:1]
            try:
                command = self.command(job, [*length, f"log_dir='{runs}'"])
                train(command, job, Path(folder) / "output", self.threads)
            finally:  # a run that failed leaves files too, which `collect` removes
                summaries = [summary for host in writers for summary in collect(host, runs)]
        if len(summaries) != (job.np if job.alone else 1):
            names = ", ".join(host.name for host in writers)
            raise Failed(f"error: {job}: {len(summaries)} summary.json on {names}")
        after = ask(used_hosts, "benchmarks.load", "--after")
        for name, state in before.items():
            counters = state.pop("counters"), after[name]["counters"]
            state["stolen"] = load.stolen(*counters)
            state["gpu_slowed"] = load.gpu_slowed(*counters)
        return {**_measured(job, summaries), "hosts": before}

    def command(self, job: Job, overrides: list[str]) -> list[str]:
        """The line that starts it. Ours come last, as Hydra takes the last of two equal keys."""
        launcher = [sys.executable, "-m", "cluster.horovodrun", "-np", str(job.np), *self.where]
        alone = ["env", *(f"-u{name}" for name in RANK_VARIABLES)] if job.alone else []
        ours = [*MEASURED, f"strategy={job.strategy}", f"data.batch_size={job.batch}", *overrides]
        return [*launcher, *alone, sys.executable, "template.py", *self.arguments, *ours]


def train(command: list[str], what: object, log: Path, threads: int) -> None:
    """Wait for the command, whose output goes to the log.

    Raises:
        Failed: when it did not end well, named as `what`.
    """
    environment = {**os.environ, "OMP_NUM_THREADS": str(threads)}
    with log.open("w") as output:
        # In a session of its own, so that Ctrl-C reaches only us, who end it.
        process = subprocess.Popen(
            command, cwd=ROOT, env=environment, stdout=output, stderr=output,
            stdin=subprocess.DEVNULL, start_new_session=True,
        )  # fmt: skip
        try:
            status = process.wait()
        except BaseException:
            for number in (signal.SIGTERM, AT_ONCE):
                process.send_signal(number)
            with contextlib.suppress(subprocess.TimeoutExpired):
                process.wait(timeout=30)
            raise
    if status:
        lines = log.read_text(errors="replace").splitlines()[-15:]
        raise Failed("\n".join([*lines, f"error: {what}: ended with status {status}"]))


def collect(host: Host, folder: str) -> list[dict[str, Any]]:
    """The summaries below a folder of a host; then the folder is removed."""
    quoted, parent = shlex.quote(folder), shlex.quote(str(Path(folder).parent))
    script = f"echo; for f in {quoted}/*/runs/*/summary.json; do tr -d '\\n' < \"$f\"; echo; done"
    script += f"; rm -r {quoted}" + ("" if host.is_here else f"; rmdir {parent}")
    done = subprocess.run(
        host.command(script), capture_output=True, encoding="utf-8", errors="replace"
    )
    return [json.loads(line) for line in done.stdout.splitlines() if line.startswith("{")]


def ask(hosts: list[Host], module: str, *arguments: str) -> dict[str, dict[str, Any]]:
    """The JSON that a module of benchmarks/ prints on each host, by the host's name. It runs on all
    at the same time, and sees the GPUs that a job would have there.

    Raises:
        Failed: when one does not answer.
    """
    call = shlex.join([sys.executable, "-m", module, *arguments])
    processes = {
        host.name: subprocess.Popen(
            # echo: below what a login shell may print
            host.command(f"echo; cd {shlex.quote(str(ROOT))} && {_its_gpus(host)} exec {call}"),
            encoding="utf-8", errors="replace",
            stdin=subprocess.DEVNULL, stdout=subprocess.PIPE, stderr=subprocess.PIPE,
        )
        for host in hosts
    }  # fmt: skip
    answers, ends = {}, [process.communicate() for process in processes.values()]
    for host, (name, process), (output, errors) in zip(hosts, processes.items(), ends):
        lines = [line for line in output.splitlines() if line.startswith("{")]
        if process.returncode or not lines:
            reason = (errors.strip().splitlines() or [f"status {process.returncode}"])[-1]
            raise Failed(f"error: {name}: {module}: {reason}; see make doctor {typed([host])}")
        answers[name] = json.loads(lines[-1])
    return answers


def _its_gpus(host: Host) -> str:
    """CUDA_VISIBLE_DEVICES for a shell: the host file's, else ours, which all ranks get."""
    visible = forwarded(dict(os.environ)).get("CUDA_VISIBLE_DEVICES")
    if host.gpus is not None:
        visible = ",".join(map(str, host.gpus))
    return "" if visible is None else f"CUDA_VISIBLE_DEVICES={shlex.quote(visible)}"


def _measured(job: Job, summaries: list[dict[str, Any]]) -> dict[str, Any]:
    """The result of a run; of several processes that trained alone the median."""
    anatomies = [summary["anatomy"] for summary in summaries if summary.get("anatomy")]
    if len(anatomies) < len(summaries):
        raise Failed(f"error: {job}: no step was measured: more steps than warm-up are needed")
    first = summaries[0]
    return {
        "strategy": job.strategy, "np": job.np, "batch": job.batch, "alone": job.alone,
        "step_ms": statistics.median(anatomy["step_ms"]["mean"] for anatomy in anatomies),
        "median_ms": statistics.median(anatomy["step_ms"]["median"] for anatomy in anatomies),
        "quantiles_ms": None if job.alone else {
            p: anatomies[0]["step_ms"][p] for p in ("p10", "p90")
        },
        "measured_steps": anatomies[0]["steps"],
        "phases_ms": None if job.alone else anatomies[0]["phases_ms"],
        "wire": None if job.alone else anatomies[0]["wire"],
        "model": first["model"],
        "train_samples": first["train_samples"],
        "drop_last": first["drop_last"],
        "operations": first["operations"],
    }  # fmt: skip

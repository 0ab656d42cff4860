"""The batch scripts in a real Slurm: a controller and two nodes, on hosts made of this one."""

from __future__ import annotations

import contextlib
import os
import re
import secrets
import shutil
import subprocess
import sys
import time
from collections.abc import Callable, Iterator
from pathlib import Path

import psutil
import pytest

from cluster import testbed
from cluster.hosts import Host
from cluster.slurm.hosts import hosts as allocation
from runs.config import check
from tests.cluster.conftest import made
from tests.conftest import ROOT, run, wait_until

SLURM = ["slurmctld", "slurmd", "munged"]
CONFIG = """
ClusterName=test
SlurmctldHost=node1(10.77.0.1)
SlurmUser=root
AuthType=auth/munge
AuthInfo=socket={folder}/munge.socket
ProctrackType=proctrack/linuxproc
TaskPlugin=task/none
JobAcctGatherType=jobacct_gather/none
MpiDefault=none
StateSaveLocation={folder}/state
SlurmdSpoolDir={folder}/spool-%n
SlurmctldPidFile={folder}/slurmctld.pid
SlurmdPidFile={folder}/slurmd-%n.pid
SlurmctldLogFile={folder}/slurmctld.log
SlurmdLogFile={folder}/slurmd-%n.log
SelectType=select/cons_tres
SchedulerParameters=batch_sched_delay=1,sched_interval=2,requeue_delay=1
ReturnToService=2
SlurmdParameters=config_overrides
KillWait=20
GresTypes=gpu
NodeName=node1 NodeAddr=10.77.0.1 CPUs=4 RealMemory=4000 Gres=gpu:2
NodeName=node2 NodeAddr=10.77.0.2 CPUs=4 RealMemory=4000 Gres=gpu:2
PartitionName=main Nodes=node1,node2 Default=YES MaxTime=INFINITE State=UP
"""


class TestAllocation:
    """Recorded environments of jobs become hosts."""

    @pytest.mark.parametrize(
        ("nodes", "tasks", "expected"),
        [
            ("node1", "1", "node1:1"),
            ("node[1-2]", "4(x2)", "node1:4,node2:4"),
            ("gpu[01-03,07],login", "2(x4),1", "gpu01:2,gpu02:2,gpu03:2,gpu07:2,login:1"),
            ("taurusi[2045,2050]", "2,1", "taurusi2045:2,taurusi2050:1"),
            ("r[1-2]n[1-2]", "1(x4)", "r1n1:1,r1n2:1,r2n1:1,r2n2:1"),
        ],
    )
    def test_is_read(self, nodes: str, tasks: str, expected: str) -> None:
        job = {"SLURM_JOB_NODELIST": nodes, "SLURM_TASKS_PER_NODE": tasks}
        assert allocation(job) == expected

    def test_a_folder_may_have_any_name(self) -> None:
        scripts = [*Path(allocation.__code__.co_filename).parent.glob("*.sbatch")]
        assert scripts
        for script in scripts:
            (override,) = re.findall(r'"(callbacks\.\S+)"', script.read_text())
            check([override.replace("$PWD", "/home/jürgen/a=b, c").replace("$checkpoint", "x")])

    def test_outside_of_a_job(self) -> None:
        with pytest.raises(ValueError, match="run this in a job of Slurm"):
            allocation({})

    def test_what_is_refused(self) -> None:
        """Slurm names the first part alone; and no secret of the environment is told."""
        job = {"SLURM_JOB_NODELIST": "node[1-2]", "SLURM_TASKS_PER_NODE": "1", "TOKEN": "hidden"}
        with pytest.raises(ValueError, match="2 nodes and tasks for 1: ") as error:
            allocation(job)
        assert "hidden" not in str(error.value)
        with pytest.raises(ValueError, match="heterogeneous"):
            allocation(job | {"SLURM_TASKS_PER_NODE": "1(x2)", "SLURM_HET_SIZE": "2"})


# In place of Python: a job that is signalled, and has left the checkpoint of an epoch until then.
JOB = """#!/bin/bash
case "$*" in *hosts.py) echo node1:1; exit ;; esac
echo "runs $*"
mkdir -p logs/job/runs/1/.hydra logs/job/runs/1/checkpoints
echo "checkpoint: $PWD/logs/slurm-7.ckpt" >logs/job/runs/1/.hydra/config.yaml
touch {when} logs/job/runs/1/checkpoints/last.ckpt
{ends}
trap 'exit {status}' TERM
until (( 0x$(sed -n 's/SigCgt:.//p' /proc/$PPID/status) & 0x200 )); do :; done  # SIGUSR1
kill -USR1 $PPID
while :; do :; done
"""


def batch(folder: Path, *changes: str, job: str = "", **environment: str) -> tuple[int, str]:
    """The script without Slurm: its exit status and what it printed."""
    for name, text in (("python", job), ("scontrol", '#!/bin/sh\necho "scontrol $*"\n')):
        if text:
            (folder / name).write_text(text)
            (folder / name).chmod(0o755)
    environment["PATH"] = f"{folder}:{os.environ['PATH']}"
    script = ["bash", str(ROOT / "cluster" / "slurm" / "horovod.sbatch"), *changes]
    done = run(script, folder, SLURM_JOB_ID="7", PYTHON=f"{folder}/python", **environment)
    return done.returncode, done.stdout


@pytest.mark.parametrize(
    ("when", "ends", "status", "again"),
    [
        ("", "", 143, True), ("-d yesterday", "", 143, False), ("", "", 1, False),
        ("", "touch logs/job/runs/1/summary.json", 143, False),
    ],
)  # fmt: skip
def test_a_job_goes_on_from_its_last_epoch(
    when: str, ends: str, status: int, again: bool, tmp_path: Path
) -> None:
    """Where a validation takes longer than a stop; not without any progress, nor after an error,
    nor when training has ended."""
    code, printed = batch(tmp_path, job=JOB.format(when=when, ends=ends, status=status))
    last = "logs/job/runs/1/checkpoints/last.ckpt"
    assert code == status and (f"go on from {last}\nscontrol requeue 7\n" in printed) == again
    _, printed = batch(
        tmp_path, job=JOB.format(when=when, ends="", status=0), SLURM_RESTART_COUNT="1"
    )
    assert f"template.py ckpt_path='{last}' callbacks.stop" in printed


def test_a_batch_job_says_what_it_lacks(tmp_path: Path) -> None:
    code, printed = batch(tmp_path)
    assert code == 2 and printed.startswith(f"error: there is no {tmp_path}/python: make install")
    code, printed = batch(tmp_path, "seed=1", "run_dir=mine", job="#!/bin/sh\nexit 3\n")
    assert (code, printed.count("\n")) == (2, 1)
    assert printed.startswith("error: run_dir=mine: ") and "give log_dir=" in printed
    for change in ("debug=overfit", "callbacks=none", "~callbacks", "~callbacks.stop"):
        code, printed = batch(tmp_path, "seed=1", change, job="#!/bin/sh\nexit 3\n")
        assert (code, printed.count("\n")) == (2, 1)
        assert printed.startswith(f"error: {change}: leaves no checkpoint to go on from; ")
    _, printed = batch(tmp_path, "~callbacks.early_stopping", job="#!/bin/sh\nexit 3\n")
    assert "leaves no checkpoint" not in printed


@pytest.mark.parametrize(("asked", "gpus"), [("cpu=2,gres/gpu=1", True), ("cpu=2", False)])
def test_a_step_asks_for_gpus_only_where_the_job_did(
    asked: str, gpus: bool, fake: Callable, monkeypatch: pytest.MonkeyPatch
) -> None:
    """As newer versions of Slurm write what a task is to have."""
    fake("srun", "")
    monkeypatch.setenv("SLURM_JOB_ID", "1")
    monkeypatch.setenv("SLURM_TRES_PER_TASK", asked)
    line = Host("192.0.2.1", 4).command("true")
    assert ("--gpus-per-node=4" in line, line[0] == "env") == (gpus, gpus)


def test_a_step_has_the_cores_of_all_tasks(fake: Callable, monkeypatch: pytest.MonkeyPatch) -> None:
    """And the GPUs: it is our one task for all slots of a node."""
    fake("srun", "")
    for name, value in (("JOB_ID", "1"), ("CPUS_PER_TASK", "3"), ("GPU_BIND", "single:1")):
        monkeypatch.setenv(f"SLURM_{name}", value)
    monkeypatch.setenv("SRUN_CPUS_PER_TASK", "3")
    line = Host("192.0.2.1", 4).command("true")
    assert "--cpus-per-task=12" in line
    unset = {line[index + 1] for index, word in enumerate(line) if word == "-u"}
    assert unset == {"SLURM_CPUS_PER_TASK", "SLURM_GPU_BIND", "SRUN_CPUS_PER_TASK"}


@pytest.fixture(scope="module")
def slurm(tmp_path_factory: pytest.TempPathFactory) -> Iterator[tuple[testbed.Node, dict]]:
    """The first node, from where jobs are submitted, and the variables that this takes."""
    for program in SLURM:
        if not shutil.which(program, path=f"{os.environ['PATH']}:/usr/sbin"):
            pytest.skip(f"{program} is missing: sudo apt-get install slurmctld slurmd munge")
    folder = tmp_path_factory.mktemp("slurm")
    (folder / "slurm.conf").write_text(CONFIG.format(folder=folder))
    for number in range(2):
        (folder / f"gpu{number}").touch()
    (folder / "gres.conf").write_text(f"AutoDetect=off\nName=gpu File={folder}/gpu[0-1]\n")
    (folder / "cgroup").mkdir()
    (folder / "cgroup.conf").write_text(
        f"CgroupPlugin=cgroup/v1\nCgroupMountpoint={folder}/cgroup\n"
    )
    (folder / "munge.key").write_bytes(secrets.token_bytes(64))
    (folder / "munge.key").chmod(0o600)
    environment = {"SLURM_CONF": str(folder / "slurm.conf")}
    started: list[subprocess.Popen] = []

    def start(*command: str) -> None:
        with open(folder / "printed.log", "a") as log:
            process = subprocess.Popen(
                command, stdout=log, stderr=log, env={**os.environ, **environment},
                start_new_session=True,
            )  # fmt: skip
        started.append(process)

    for hosts in made(2):
        try:
            start(
                "munged", "--foreground", "--force", f"--socket={folder}/munge.socket",
                f"--key-file={folder}/munge.key", f"--pid-file={folder}/munged.pid",
                f"--log-file={folder}/munged.log", f"--seed-file={folder}/munged.seed",
            )  # fmt: skip
            wait_until((folder / "munge.socket").exists, 20, f"munged, see {folder}/printed.log")
            deadline = time.monotonic() + 60
            start(*hosts[0].command("slurmctld", "-D", "-i"))
            for host in hosts:
                start(*host.command("slurmd", "-D", "-N", host.name))
            ask = hosts[0].command("sinfo", "-h", "-o", "%D %t")
            while "2 idle" not in (shown := run(ask, **environment).stdout):
                assert time.monotonic() < deadline, shown + (folder / "printed.log").read_text()
                time.sleep(0.5)
            yield hosts[0], environment
        finally:
            for process in reversed(started):
                process.terminate()
            for process in started:
                try:
                    process.wait(timeout=10)
                except subprocess.TimeoutExpired:
                    process.kill()
                    process.wait()


def finished(
    host: testbed.Node, environment: dict, output: Path, words: str, seconds: float
) -> str:
    """What a job printed, once these words are in it."""
    deadline = time.monotonic() + seconds
    while not output.exists() or words not in output.read_text():
        queue = run(host.command("squeue"), **environment).stdout
        printed = output.read_text() if output.exists() else "nothing"
        assert time.monotonic() < deadline, printed + queue
        time.sleep(0.5)
    return output.read_text()


@pytest.mark.parametrize("strategy", ["horovod", pytest.param("ddp", marks=pytest.mark.slow)])
def test_a_job_has_its_tasks_on_both_nodes(
    slurm: tuple[testbed.Node, dict], strategy: str, project: Path
) -> None:
    """Two tasks on each of two nodes, without any ssh."""
    host, environment = slurm
    (project / "logs").mkdir()
    sbatch = ["sbatch", "--parsable", f"--chdir={project}", "cluster/slurm/horovod.sbatch"]
    asked = [f"strategy={strategy}", "trainer.max_epochs=2"]
    submit = host.command("env", "-C", str(project), *sbatch, *asked)
    done = run(submit, **environment, PYTHON=sys.executable)
    assert done.returncode == 0, done.stdout
    output = project / "logs" / f"slurm-{done.stdout.strip()}.out"
    printed = finished(host, environment, output, "summary ", 120)
    assert f"ranks   4: 2 on node1, 2 on node2; strategy {strategy}" in printed


def test_srun_alone_is_refused(slurm: tuple[testbed.Node, dict], project: Path) -> None:
    """Each of its processes would train for itself."""
    host, environment = slurm
    job = [sys.executable, "template.py", f"log_dir={project}/logs"]
    done = run(host.command("srun", "-n2", f"--chdir={project}", *job), **environment)
    assert done.returncode != 0
    assert "error: srun started 2 processes, each of which would train alone" in done.stdout
    # srun leaves rank 1 alone, which says the same later, with its name behind it.
    told = [line for line in done.stdout.splitlines() if line.startswith("error: ")]
    assert sum("(rank 1 on node1)" not in line for line in told) == 1, done.stdout
    assert "epoch" not in done.stdout and not [*project.glob("logs/**/runs/*")]


def test_a_step_gets_the_cores_that_the_job_has_for_all_tasks(
    slurm: tuple[testbed.Node, dict], tmp_path: Path
) -> None:
    host, environment = slurm
    job = tmp_path / "job.py"
    job.write_text(
        f"#!{sys.executable}\nimport subprocess, sys\nsys.path.insert(0, {str(ROOT)!r})\n"
        "from cluster.hosts import Host\n"
        "there = Host('node2', 2).command('echo has $SLURM_CPUS_PER_TASK cores; echo ended')\n"
        "subprocess.run(there)\n"
    )
    sbatch = ["sbatch", "--nodes=2", "--ntasks-per-node=2", "--cpus-per-task=2"]
    done = run(host.command(*sbatch, f"--output={tmp_path}/out", str(job)), **environment)
    assert done.returncode == 0, done.stdout
    assert "has 4 cores" in finished(host, environment, tmp_path / "out", "ended", 60)


@pytest.mark.parametrize("asked", ["--gpus-per-task=1", "--gpus=4", "--gpus-per-node=2"])
def test_all_slots_of_a_node_have_its_gpus(
    slurm: tuple[testbed.Node, dict], asked: str, tmp_path: Path
) -> None:
    """In whatever way the job has asked for them."""
    host, environment = slurm
    job = tmp_path / "job.py"
    job.write_text(
        f"#!{sys.executable}\nimport subprocess, sys\nsys.path.insert(0, {str(ROOT)!r})\n"
        "from cluster.hosts import Host\n"
        "there = Host('node2', 2).command('echo $(hostname) has $SLURM_GPUS_ON_NODE, ended')\n"
        "print(subprocess.run(there).returncode, 'ended', flush=True)\n"
    )
    sbatch = ["sbatch", "--nodes=2", "--ntasks-per-node=2", asked, f"--output={tmp_path}/out"]
    done = run(host.command(*sbatch, str(job)), **environment)
    assert done.returncode == 0, done.stdout
    printed = finished(host, environment, tmp_path / "out", "ended", 60)
    assert "node2 has 2, ended" in printed, printed


def start_again_soon(host: testbed.Node, environment: dict, number: str) -> None:
    """A requeued job: Slurm lets it wait two minutes, and nodes refuse it in the second in which it
    was revoked."""
    show = host.command("scontrol", "show", "job", number)
    waits = lambda: "JobState=PENDING" in run(show, **environment).stdout  # noqa: E731
    wait_until(waits, 120, "the requeued job", 1)  # before, Slurm forgets what it is told of it
    soon = host.command("scontrol", "update", f"jobid={number}", "starttime=now+5seconds")
    assert run(soon, **environment).returncode == 0


@pytest.mark.slow
@pytest.mark.parametrize("how", ["killed", "asked"])
def test_a_job_that_slurm_queues_again(
    slurm: tuple[testbed.Node, dict], how: str, project: Path
) -> None:
    """As when a node fails, or another job comes first, for which Slurm sends SIGTERM and waits a
    while: on from the last epoch, or from where it was stopped, not from an older checkpoint."""
    host, environment = slurm
    (project / "logs").mkdir()
    sbatch = ["sbatch", "--parsable", "--ntasks-per-node=1", f"--chdir={project}"]
    job = ["cluster/slurm/horovod.sbatch", "trainer.max_epochs=30"]
    job += ["callbacks.early_stopping.patience=1000", "log_dir=logs/mine", "data.num_workers=1"]
    submit = host.command("env", "-C", str(project), *sbatch, *job)
    number = run(submit, **environment, PYTHON=sys.executable).stdout.strip()
    output = project / "logs" / f"slurm-{number}.out"
    finished(host, environment, output, "epoch 4/30", 90)
    if how == "killed":
        for process in psutil.process_iter(["cmdline"]):
            if f"{project}/logs/slurm-{number}.ckpt" in " ".join(process.info["cmdline"] or []):
                with contextlib.suppress(psutil.NoSuchProcess):
                    process.kill()
        show = host.command("scontrol", "show", "job", number)
        there = lambda: "JobState=RUNNING" in run(show, **environment).stdout  # noqa: E731
        wait_until(lambda: not there(), 60, "the end of the job", 1)
    run(host.command("scontrol", "requeue", number), **environment)
    start_again_soon(host, environment, number)
    finished(host, environment, output, "start number 2", 60)
    second = finished(host, environment, output, "summary ", 240).partition("start number 2")[2]
    assert ("stopped; to go on" in output.read_text()) == (how == "asked")
    assert "epoch 2/30" not in second and "epoch 30/30" in second
    (line,) = re.findall(r"^\S*from .*$", second, re.MULTILINE)
    assert ("last.ckpt" if how == "killed" else f"slurm-{number}.ckpt") in line


@pytest.mark.slow
def test_at_the_time_limit_a_job_is_queued_again_and_goes_on(
    slurm: tuple[testbed.Node, dict], project: Path
) -> None:
    """Slurm's signal before the end: a checkpoint, queued again, and on from there."""
    host, environment = slurm
    (project / "logs").mkdir()
    sbatch = ["sbatch", "--parsable", "--ntasks-per-node=1", f"--chdir={project}"]
    job = ["cluster/slurm/horovod.sbatch", "trainer.max_epochs=30"]
    job.append("callbacks.early_stopping.patience=1000")
    submit = host.command("env", "-C", str(project), *sbatch, *job)
    done = run(submit, **environment, PYTHON=sys.executable)
    number = done.stdout.strip()
    output = project / "logs" / f"slurm-{number}.out"
    finished(host, environment, output, "epoch 3/30", 90)
    # As at the end of the time: to the batch script alone.
    signalled = run(host.command("scancel", "--batch", "--signal=USR1", number), **environment)
    assert signalled.returncode == 0, signalled.stdout
    finished(host, environment, output, "is queued again, to go on from", 60)
    start_again_soon(host, environment, number)
    finished(host, environment, output, "start number 2", 60)
    printed = finished(host, environment, output, "summary ", 240)
    second = printed.partition("start number 2")[2]
    assert "epoch 2/30" not in second and "epoch 30/30" in second

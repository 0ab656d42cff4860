"""make launch, status, logs and stop, on hosts."""

from __future__ import annotations

import datetime
import json
import os
import re
import signal
import subprocess
import time
from collections.abc import Callable
from functools import partial
from pathlib import Path

from cluster import jobs, testbed
from cluster.record import birth
from tests.cluster.conftest import PYTHON
from tests.cluster.launching import SLEEP, horovodrun, nothing_left, sleepers  # noqa: F401
from tests.conftest import run, wait_until


def catches(pid: int, number: int) -> bool:
    """Whether a process has a handler for the signal (proc(5))."""
    status = dict(
        line.split(":\t") for line in Path(f"/proc/{pid}/status").read_text().splitlines()
    )
    return bool(int(status["SigCgt"], 16) >> (number - 1) & 1)


On = Callable[..., subprocess.CompletedProcess[str]]


def state_of(on: On, host: testbed.Node, cwd: Path, run_id: str) -> dict:
    listed = json.loads(on(host, "cluster.jobs", "status", "--json", cwd=cwd).stdout)
    return next(state for state in listed if state["id"] == run_id)


def launched(on: On, host: testbed.Node, cwd: Path, *arguments: str) -> str:
    done = on(host, "cluster.jobs", "launch", *arguments, cwd=cwd)
    assert done.returncode == 0, done.stdout
    return done.stdout.split()[1].rstrip(",")


def ended(on: On, host: testbed.Node, cwd: Path, run_id: str) -> dict:
    deadline = time.monotonic() + 300
    while (state := state_of(on, host, cwd, run_id))["state"] in ("starting", "running"):
        assert time.monotonic() < deadline, state
        time.sleep(0.3)
    return state


def test_a_run_from_start_to_end(
    on: On, hosts: list[testbed.Node], project: Path, tmp_path: Path
) -> None:
    train = [PYTHON, "template.py", "trainer.max_epochs=2"]
    run_id = launched(on, hosts[0], project, "-H", "node1:1,node2:1", *train)
    state = ended(on, hosts[0], project, run_id)
    assert state["state"] == "done", on(hosts[0], "cluster.jobs", "logs", cwd=project).stdout
    assert state["ended"] >= state["began"]
    printed = on(hosts[0], "cluster.jobs", "logs", "--follow", cwd=project).stdout
    assert "ranks   2: 1 on node1, 1 on node2" in printed and "test/acc" in printed
    listed = on(hosts[0], "cluster.jobs", "status", cwd=project).stdout
    assert run_id in listed and "done" in listed and "node1:1,node2:1" in listed
    assert on(hosts[0], "cluster.jobs", "stop", cwd=project).returncode == 2


def test_a_failure_is_told(on: On, hosts: list[testbed.Node], project: Path) -> None:
    fail = (
        "import os, sys, time; rank = int(os.environ['HOROVOD_RANK']); print('bye'); "
        "time.sleep(60 * (1 - rank)); sys.exit(3)"
    )
    run_id = launched(on, hosts[0], project, "-H", "node1:1,node2:1", PYTHON, "-c", fail)
    state = ended(on, hosts[0], project, run_id)
    assert (state["state"], state["exit"]) == ("failed", 3)
    assert state["reason"] == "rank 1 on node2 ended with exit code 3"
    listed = on(hosts[0], "cluster.jobs", "status", cwd=project).stdout
    assert "sys.exit(3)" in listed and "(rank 1 on node2 ended with exit code 3)" in listed
    assert "bye" in on(hosts[0], "cluster.jobs", "logs", "--rank", "1", cwd=project).stdout
    wrong = on(hosts[0], "cluster.jobs", "logs", "--rank", "2", cwd=project)
    assert wrong.returncode == 2 and "the run has ranks 0 to 1" in wrong.stdout


def test_stop_leaves_a_checkpoint(
    on: On, hosts: list[testbed.Node], project: Path, tmp_path: Path
) -> None:
    train = [PYTHON, "template.py", "trainer.max_epochs=100000", f"log_dir={tmp_path}"]
    train.append("callbacks.early_stopping.patience=100000")
    run_id = launched(on, hosts[0], project, "-H", "node1:1,node2:1", *train)
    logs = partial(on, hosts[0], "cluster.jobs", "logs", cwd=project)
    wait_until(lambda: "epoch 2" in logs().stdout, 300, "epoch 2", 0.5)
    stopped = on(hosts[0], "cluster.jobs", "stop", cwd=project)
    assert stopped.returncode == 0, stopped.stdout
    assert state_of(on, hosts[0], project, run_id)["state"] == "stopped"
    (checkpoint,) = tmp_path.glob("*/runs/*/checkpoints/stopped.ckpt")
    on_hosts = "-H node1:1,node2:1"
    to_type = rf"to go on: \S+ -m cluster.jobs launch .*{on_hosts} .*template.py .*ckpt_path="
    assert re.search(to_type, logs().stdout)  # detached again
    again = [PYTHON, "template.py", f"ckpt_path={checkpoint}", "trainer.max_epochs=10"]
    done = run(["env", "-C", str(project), *again, f"log_dir={tmp_path / 'again'}"])
    assert done.returncode == 0, done.stdout


def test_another_stop_asks_for_the_same(
    on: On, hosts: list[testbed.Node], project: Path, tmp_path: Path
) -> None:
    """As of who has interrupted the first, or of two people; KILL=1 does not wait."""
    go = tmp_path / "go"
    save = f"until [ -e {go} ]; do sleep .1; done; sleep 2; echo saved; exit"  # 2 s to be ended in
    script = f"trap '{save}' USR1; echo hi; while :; do sleep .1; done"

    def logs() -> str:
        return on(hosts[0], "cluster.jobs", "logs", cwd=project).stdout

    def stop(*how: str) -> tuple[subprocess.Popen, str]:
        """It, and the first line that it has said."""
        command = ["env", "-C", str(project), PYTHON, "-m", "cluster.jobs", "stop", *how]
        process = subprocess.Popen(hosts[0].command(*command), stdout=subprocess.PIPE, text=True)
        assert process.stdout is not None
        return process, process.stdout.readline()

    for kill in (["--kill"], []):
        job = ["--stop-seconds", "600", "-H", "node1:1", "sh", "-c", script]
        run_id = launched(on, hosts[0], project, *job)
        wait_until(lambda: "hi" in logs().splitlines(), 60, "the job's first line")
        first, said = stop()
        assert "up to 600 s for a checkpoint" in said
        second, said = stop(*kill)
        assert ("stopped" in said) == bool(kill)
        if not kill:
            go.touch()
        assert second.wait(timeout=60) == 0 and first.wait(timeout=60) == 0
        assert ("saved" in logs()) == (not kill)
        assert state_of(on, hosts[0], project, run_id)["reason"] == "stopped by SIGTERM"


def test_gpus_in_use_are_refused(
    on: On, hosts: list[testbed.Node], project: Path, tmp_path: Path
) -> None:
    file = tmp_path / "hosts.yaml"
    file.write_text("hosts: {node2: {slots: 1, gpus: [99]}}")
    sleep = ["--hostfile", str(file), PYTHON, "-c", SLEEP]
    first = on(hosts[0], "cluster.jobs", "launch", *sleep, cwd=project)
    assert first.returncode == 2 and "GPU 99 of the host file is not there" in first.stdout
    # Without those checks, as later: the time comes when another run has the GPU.
    with open(tmp_path / "log", "w") as log:
        process = subprocess.Popen(
            hosts[0].command("env", "-C", str(project), *horovodrun(*sleep)),
            stdout=log, stderr=log,
        )  # fmt: skip
    wait_until(sleepers, 60, "the rank")
    (running,) = json.loads(on(hosts[0], "cluster.jobs", "status", "--json", cwd=project).stdout)
    second = run(hosts[0].command("env", "-C", str(project), *horovodrun(*sleep)))
    assert second.returncode == 2
    assert f"node2: GPU 99 is in use by run {running['id']}" in second.stdout
    killed = on(hosts[0], "cluster.jobs", "stop", "--kill", cwd=project)
    assert killed.returncode == 0, killed.stdout
    assert process.wait(timeout=15) == 143


def test_a_job_for_later_waits_and_can_be_stopped(
    on: On, hosts: list[testbed.Node], project: Path
) -> None:
    line = ["-H", "node1:1", "true"]
    run_id = launched(on, hosts[0], project, "--at", "2999-01-01 02:00", *line)
    state = state_of(on, hosts[0], project, run_id)
    assert state["state"] == "waiting"
    assert os.getsid(state["pid"]) == state["pid"]  # not of our terminal's
    stopped = on(hosts[0], "cluster.jobs", "stop", cwd=project)
    assert stopped.returncode == 0
    state = state_of(on, hosts[0], project, run_id)
    assert state["state"] == "stopped" and birth(state["pid"]) is None
    assert state["ended"] >= state["began"]
    zone = datetime.timezone(datetime.timedelta(hours=9))
    there = datetime.datetime(2999, 1, 1, 2, tzinfo=zone)
    assert jobs._start("2999-01-01T02:00+09:00") == there.astimezone().replace(tzinfo=None)
    for at, words in (("25:00", "write a time as 02:00"), ("2001-01-01 02:00", "is past")):
        done = on(hosts[0], "cluster.jobs", "launch", "--at", at, *line, cwd=project)
        assert done.returncode == 2 and words in done.stdout


def test_a_job_for_later_starts_at_its_time(
    on: On, hosts: list[testbed.Node], project: Path
) -> None:
    """logs FOLLOW=1 waits for it, and shows what it prints and how it ends."""
    start = datetime.datetime.now().replace(microsecond=0) + datetime.timedelta(seconds=12)
    says = ["sh", "-c", "date +%s; sleep 1; date +%s; exit 3"]
    run_id = launched(on, hosts[0], project, "--at", str(start), "-H", "node1:1", *says)
    followed = on(hosts[0], "cluster.jobs", "logs", run_id, "--follow", cwd=project).stdout
    first, second = re.findall(r"^\d+$", followed, re.MULTILINE)
    assert start.timestamp() <= int(first) < int(second), followed
    told = "failed: rank 0 on node1 ended with exit code 3"
    assert followed.splitlines()[-1] == told, followed
    assert state_of(on, hosts[0], project, run_id)["state"] == "failed"


def test_one_that_waits_notes_itself_that_it_was_stopped(
    on: On, hosts: list[testbed.Node], project: Path
) -> None:
    """Else `make status` beside `make stop` may take it for lost."""
    late = ["--at", "2999-01-01 02:00", "-H", "node1:1", "true"]
    run_id = launched(on, hosts[0], project, *late)
    pid = state_of(on, hosts[0], project, run_id)["pid"]
    wait_until(lambda: catches(pid, signal.SIGTERM), 30, "who waits for SIGTERM")
    os.kill(pid, signal.SIGTERM)
    wait_until(lambda: birth(pid) is None, 30, "the end of the launcher")
    assert state_of(on, hosts[0], project, run_id)["state"] == "stopped"


def test_a_launch_without_a_command_is_refused(
    on: On, hosts: list[testbed.Node], project: Path
) -> None:
    done = on(hosts[0], "cluster.jobs", "launch", "-H", "node1:1", cwd=project)
    assert done.returncode == 2 and "the command is missing" in done.stdout


def test_a_killed_launcher_is_told(on: On, hosts: list[testbed.Node], project: Path) -> None:
    line = ["-H", "node1:1,node2:1", PYTHON, "-c", SLEEP]
    run_id = launched(on, hosts[0], project, *line)
    wait_until(lambda: len(sleepers()) == 2, 60, "both ranks")
    os.kill(state_of(on, hosts[0], project, run_id)["pid"], signal.SIGKILL)
    wait_until(lambda: not sleepers(), 15, "the end of the ranks")
    assert state_of(on, hosts[0], project, run_id)["state"] == "lost"
    # So it stands in its record too, for hosts that share it and do not know the launcher.
    kept = json.loads((project / "logs" / "launches" / run_id / "run.json").read_text())
    assert kept["state"] == "lost" and kept["began"] <= kept["ended"]

"""A job that is told to stop asks its ranks for a checkpoint first."""

from __future__ import annotations

import errno
import os
import pty
import signal
import subprocess
import sys
import time
from pathlib import Path
from types import SimpleNamespace

import psutil
import pytest

from cluster import record, testbed
from cluster.agent import Agent
from cluster.horovodrun import AT_ONCE, Job
from cluster.signals import interrupt_at_signals
from tests.cluster.conftest import PYTHON
from tests.cluster.launching import SLEEP, horovodrun, nothing_left, started  # noqa: F401
from tests.conftest import ROOT, run, wait_until


def test_an_agent_that_is_asked_to_end_asks_for_a_checkpoint(tmp_path: Path) -> None:
    """As Slurm does with the processes of a job that is to end."""
    saves = (
        "import signal, sys, time; "
        "signal.signal(signal.SIGUSR1, lambda *_: (print('saved', flush=True), sys.exit())); "
        "print('ready', flush=True); time.sleep(60)"
    )
    job = horovodrun("-H", "localhost:2", PYTHON, "-c", saves)
    launcher = started(job, tmp_path / "log", 2)
    agents = [
        process for process in psutil.Process(launcher.pid).children(True)
        if "cluster.agent" in process.cmdline()
    ]  # fmt: skip
    for agent in agents:
        agent.terminate()
    assert len(agents) == 1 and launcher.wait(timeout=30) == 143
    told = (tmp_path / "log").read_text()
    assert told.count("saved") == 2 and "stopped by SIGTERM" in told


def test_a_signal_while_ranks_are_forked_reaches_them() -> None:
    """The process that forks them has told their numbers, and the agent has not read them."""
    rank = subprocess.Popen([sys.executable, "-c", "input()"], stdin=subprocess.PIPE)
    told = [sys.executable, "-c", f"print('{rank.pid} 0')"]
    forks = subprocess.Popen(told, stdout=subprocess.PIPE)
    assert forks.wait() == 0
    agent = Agent()
    agent._preloading = forks, [0]
    agent._obey({"signal": "SIGUSR1"})
    assert rank.poll() is None
    agent._adopt(forks.pid, 0)
    assert rank.wait(10) == -signal.SIGUSR1 and agent._ranks == {rank.pid: 0}


@pytest.mark.parametrize("number", [signal.SIGINT, signal.SIGTERM, signal.SIGHUP])
def test_the_launcher_is_stopped(
    hosts: list[testbed.Node], number: signal.Signals, tmp_path: Path
) -> None:
    """And all ranks are asked for a checkpoint: of Ctrl-C no agent and no ssh hears by itself."""
    asked = "trap 'echo asked; exit' USR1; echo ready; while :; do sleep .1; done"
    command = hosts[0].command(*horovodrun("-H", "node1:2,node2:2", "sh", "-c", asked))
    process = started(command, tmp_path / "log", 4)
    os.killpg(process.pid, number)  # as a terminal does
    assert process.wait(timeout=15) == 128 + number
    told = (tmp_path / "log").read_text()
    assert f"stopped by {number.name}" in told and told.count(">:asked\n") == 4, told


def test_nobody_reads_any_more(hosts: list[testbed.Node], tmp_path: Path) -> None:
    """As with `| tee log`, which Ctrl-C ends first: the ranks still get their signal."""
    told = tmp_path / "told"
    tell = (
        "import os, signal, sys, time\n"
        "def ask(*_):\n    open(sys.argv[1] + os.environ['HOROVOD_RANK'], 'w'); os._exit(0)\n"
        "signal.signal(signal.SIGUSR1, ask)\n"
        "for _ in range(600): print('ready', flush=True); time.sleep(0.1)"
    )
    command = horovodrun("-H", "node1:1,node2:1", PYTHON, "-c", tell, str(told))
    process = subprocess.Popen(
        hosts[0].command(*command), stdout=subprocess.PIPE, stderr=subprocess.STDOUT, cwd=ROOT
    )
    assert process.stdout is not None
    ready = {f"[{rank}]<stdout>:ready\n".encode() for rank in range(2)}
    while ready:  # one rank may be far ahead of the other
        ready.discard(process.stdout.readline())
    process.stdout.close()
    time.sleep(0.5)
    process.send_signal(signal.SIGTERM)
    assert process.wait(timeout=15) == 143
    assert sorted(path.name for path in tmp_path.glob("told*")) == ["told0", "told1"]


def test_a_terminal_that_is_closed_behind_make(tmp_path: Path) -> None:
    """Only the first process of its session hears of it, and as make does, waits for us."""
    script = f"trap 'echo asked >{tmp_path}/told; exit' USR1; while :; do echo hi; sleep .1; done"
    command = horovodrun("-H", "localhost:1", "sh", "-c", script)
    leader = (
        "import signal, subprocess, sys; signal.signal(signal.SIGHUP, lambda *_: None); "
        "subprocess.run(sys.argv[1:])"
    )
    pid, terminal = pty.fork()
    if pid == 0:
        os.chdir(ROOT)
        os.execv(PYTHON, [PYTHON, "-c", leader, *command])
    said = b""
    while b"hi" not in said:
        said += os.read(terminal, 1 << 10)
    os.close(terminal)
    wait_until(lambda: os.waitpid(pid, os.WNOHANG) != (0, 0), 20, "the end of make")
    assert (tmp_path / "told").read_text() == "asked\n"


def test_a_terminal_that_closes_may_tell_twice(tmp_path: Path) -> None:
    """Its shell and the kernel; the checkpoint is waited for all the same."""
    script = f"trap 'sleep 5; echo saved >{tmp_path}/told; exit' USR1; trap '' TERM; echo hi; "
    script += "while :; do sleep .1; done"
    command = horovodrun("--stop-seconds", "60", "-H", "localhost:1", "sh", "-c", script)
    process = subprocess.Popen(command, cwd=ROOT, stdout=subprocess.PIPE)
    assert process.stdout is not None and b"hi" in process.stdout.readline()
    for _ in range(3):
        process.send_signal(signal.SIGHUP)
        time.sleep(0.3)
    assert process.wait(timeout=50) == 128 + signal.SIGHUP
    assert (tmp_path / "told").read_text() == "saved\n"


def test_at_once_is_at_once_when_it_comes_first() -> None:
    """Of two signals that wait Python takes the one of the lower number, which is this one."""
    lasts = "trap '' TERM USR1; echo hi; while :; do sleep .1; done"
    command = horovodrun("--stop-seconds", "600", "-H", "localhost:1", "sh", "-c", lasts)
    process = subprocess.Popen(command, cwd=ROOT, stdout=subprocess.PIPE)
    assert process.stdout is not None and b"hi" in process.stdout.readline()
    process.send_signal(AT_ONCE)
    assert process.wait(timeout=60) == 128 + AT_ONCE


@pytest.mark.parametrize("number", [signal.SIGINT, AT_ONCE])
def test_a_signal_within_the_handler_of_another(
    number: int, monkeypatch: pytest.MonkeyPatch
) -> None:
    kept = SimpleNamespace(is_behind=lambda: False, tell=print)
    job = Job([SimpleNamespace(rank=0)], [], kept, stop_seconds=600)
    meanwhile = iter([number])

    def monotonic() -> float:
        for number in meanwhile:
            job._on_signal(number, None)
        return time.monotonic()

    monkeypatch.setattr("cluster.horovodrun.time", SimpleNamespace(monotonic=monotonic))
    job._on_signal(signal.SIGTERM, None)
    job._step(wait=0)
    assert "kill" in job._deadlines  # it is in its end, not at its checkpoint


def test_a_signal_while_python_ends_does_not_change_the_exit_status() -> None:
    """By then Python has set all back that had a handler. `make stop KILL=1` sends two signals."""
    code = """if True:
        import os, signal, sys
        from cluster import horovodrun
        class Late:
            kill, me, numbers = os.kill, os.getpid(), (*horovodrun.SIGNALS, horovodrun.AT_ONCE)
            def __del__(self):
                print("late", flush=True)
                for number in self.numbers:
                    Late.kill(self.me, number)
        late = Late()
        sys.exit(horovodrun.main())
    """
    done = run([PYTHON, "-c", code, "-H", "localhost:1", "sh", "-c", "exit 3"], cwd=ROOT)
    assert done.stdout.endswith("late\n") and done.returncode == 3, done


def test_nohup_and_ctrl_z_end_no_job(tmp_path: Path) -> None:
    """A stopped launcher would give no signs of life, and its hosts would end their ranks."""
    command = ["nohup", *horovodrun("-H", "localhost:1", PYTHON, "-c", SLEEP)]
    process = started(command, tmp_path / "log", 1)
    of_process = Path(f"/proc/{process.pid}/status").read_text()
    ignored = int(of_process.partition("SigIgn:")[2].split()[0], 16)
    assert ignored >> (signal.SIGTSTP - 1) & 1
    process.send_signal(signal.SIGHUP)
    process.terminate()
    assert process.wait(timeout=30) == 143, (tmp_path / "log").read_text()


def test_nohup_is_for_what_is_interrupted_too(handlers: None) -> None:
    """As make sync and make install are, by whatever else would end them."""
    signal.signal(signal.SIGHUP, signal.SIG_DFL)
    for hangup in (signal.default_int_handler, signal.SIG_IGN):
        interrupt_at_signals()
        after = signal.getsignal(signal.SIGHUP), signal.getsignal(signal.SIGTERM)
        assert after == (hangup, signal.default_int_handler)
        signal.signal(signal.SIGHUP, signal.SIG_IGN)


def test_a_signal_after_the_end_leaves_the_status() -> None:
    """Python's own end would be killed by it."""
    code = (
        "import os, signal, sys, cluster.horovodrun as h\n"
        "class Late:\n"
        "    def __del__(self, kill=os.kill, me=os.getpid()): kill(me, 2)\n"
        "late = Late()\n"
        "sys.exit(h.main())"
    )
    done = run([sys.executable, "-c", code, "-H", "localhost:1", "sh", "-c", "exit 3"])
    assert done.returncode == 3, done.stderr


def test_a_job_that_left_the_foreground_goes_on_without_its_terminal(
    monkeypatch: pytest.MonkeyPatch, tmp_path: Path
) -> None:
    """By Ctrl-Z, bg and disown."""
    monkeypatch.setattr(record, "FOLDER", tmp_path / "logs")

    write = os.write

    def gone(descriptor: int, data: bytes) -> int:
        if b"is not" in data:
            raise OSError(errno.EIO, "")
        return write(descriptor, data)

    hung_up = [signal.SIGHUP]
    for foreground, signals in (
        ([True, False], []), ([True, True], hung_up), ([True, None], hung_up),
    ):  # fmt: skip
        sent: list[int] = []
        with monkeypatch.context() as patched:
            patched.setattr(os, "kill", lambda _, number, sent=sent: sent.append(number))
            patched.setattr(record, "_in_foreground", iter(foreground).__next__)
            patched.setattr(os, "write", gone)
            patched.setattr(os.path, "sameopenfile", lambda *_: True)
            with record.Record(None, [], ["true"], 8) as kept:
                for line in ("is read", "is not", "is not"):
                    kept.line(0, "stdout", line)
        assert sent == signals


def test_a_stop_hides_no_failure(tmp_path: Path) -> None:
    """Ctrl-C while the others of a rank that failed are being ended."""
    ready, ended = tmp_path / "ready", tmp_path / "ended"
    fails = f"until [ -e {ready} ]; do sleep .1; done; exit 3"
    lasts = f"trap 'touch {ended}' TERM; touch {ready}; echo ready; while :; do sleep .1; done"
    script = f"[ $HOROVOD_RANK = 0 ] && {{ {fails}; }}; {lasts}"
    command = horovodrun("-H", "localhost:2", "sh", "-c", script)
    process = started(command, tmp_path / "log", 1)
    # The failure is known then, and rank 1 has some seconds left.
    wait_until(ended.exists, 30, "rank 1's SIGTERM")
    process.send_signal(signal.SIGINT)
    assert process.wait(timeout=30) == 3
    told = (tmp_path / "log").read_text()
    assert told.endswith("horovodrun: rank 0 on localhost ended with exit code 3\n"), told


@pytest.mark.parametrize(
    ("end", "words"),
    [
        ("exit 1", ", but rank 1 on localhost ended with exit code 1: look whether there is a "
                   "checkpoint\n"),
        ("exit 138", "\n"),  # with one, as by runs/run.py
        ("exit 0", "\n"),
        ("sleep 20", ", but rank 1 had not ended: look whether there is a checkpoint\n"),
    ],
)  # fmt: skip
def test_a_checkpoint_that_fails_at_a_stop(end: str, words: str, tmp_path: Path) -> None:
    seconds = "3" if end == "sleep 20" else "30"
    script = f"trap '[ $HOROVOD_RANK = 0 ] && exit 138; sleep .5; {end}' USR1; echo ready; "
    script += "while :; do sleep .1; done"
    command = horovodrun("-H", "localhost:2", "--stop-seconds", seconds, "sh", "-c", script)
    process = started(command, tmp_path / "log", 2)
    process.send_signal(signal.SIGTERM)
    assert process.wait(timeout=30) == 143
    told = (tmp_path / "log").read_text()
    assert told.endswith(f"horovodrun: stopped by SIGTERM{words}"), told

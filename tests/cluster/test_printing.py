"""What ranks print comes whole and in order, whoever reads it, however slowly."""

from __future__ import annotations

import contextlib
import json
import os
import re
import signal
import subprocess
import time
from pathlib import Path

import psutil
import pytest

from cluster import record
from tests.cluster.conftest import PYTHON
from tests.cluster.launching import command_line, horovodrun
from tests.conftest import ROOT, run, wait_until


def test_ranks_wait_for_who_takes_what_they_print() -> None:
    """What nobody takes would fill the launcher's memory."""
    endless = ["yes", f"of {os.getpid()}"]
    command = horovodrun("-H", "localhost:1", *endless)
    process = subprocess.Popen(command, cwd=ROOT, stdout=subprocess.PIPE)
    assert process.stdout is not None
    try:
        for _ in range(1000):
            process.stdout.readline()
        (rank,) = (entry.parent for entry in Path("/proc").glob("[0-9]*/cmdline")
                   if command_line(entry) == endless)  # fmt: skip
        written, before, deadline = 0, -1, time.monotonic() + 60
        while written > before:
            assert time.monotonic() < deadline, written
            before = written
            time.sleep(1)
            written = int((rank / "io").read_text().split()[3])  # wchar
        process.send_signal(signal.SIGTERM)
        process.stdout.close()
        assert process.wait(timeout=20) == 143
    finally:
        process.kill()
        process.wait()


@pytest.mark.parametrize("closed", ["<&-", ">&-", "2>&-", "<&- >&- 2>&-"])
def test_streams_that_are_closed(closed: str, tmp_path: Path) -> None:
    ran = tmp_path / "ran"
    line = horovodrun("-np", "1", "sh", "-c", f"echo out; echo err >&2; echo ran >{ran}")
    done = run(["sh", "-c", f'exec "$@" {closed}', "sh", *line])
    assert (done.returncode, ran.exists()) == (0, True), done.stdout
    assert ("[0]<stdout>:out" in done.stdout) == (">&-" not in closed.split())
    assert ("[0]<stderr>:err" in done.stdout) == ("2>&-" not in closed)


@pytest.mark.parametrize("ends", ["fails", "stops"])
def test_a_reader_who_pauses(ends: str, tmp_path: Path) -> None:
    """A rank that fails is heard, and so is Ctrl-C; ranks wait meanwhile, but not with their
    checkpoint."""
    full, told = tmp_path / "full", tmp_path / "told"
    prints = (
        "import os, signal, sys\n"
        "def ask(*_):\n"
        f"    os.write(1, b'y' * (1 << 18)); open({str(told)!r}, 'w').close(); os._exit(0)\n"
        "signal.signal(signal.SIGUSR1, ask)\n"
        "while True: print('x' * 500, flush=True)"
    )
    other = f"until [ -e {full} ]; do sleep .1; done; exit 7" if ends == "fails" else "sleep 600"
    script = f'[ $HOROVOD_RANK = 1 ] && {{ {other}; }}; exec "$0" -c "$1"'
    line = ["-H", "localhost:2", "sh", "-c", script, PYTHON, prints]
    command = horovodrun("--stop-seconds", "600", *line)
    process = subprocess.Popen(command, cwd=ROOT, stdout=subprocess.PIPE)
    try:
        launcher, before, now = psutil.Process(process.pid), -1, 0
        deadline = time.monotonic() + 60
        while now < 1 << 20 or now > before:  # until nothing more is taken
            assert process.poll() is None and time.monotonic() < deadline
            before = now
            time.sleep(1)
            now = 0
            for child in launcher.children(True):
                with contextlib.suppress(psutil.NoSuchProcess):  # a sleep that has ended
                    now += child.io_counters().write_chars
        assert now < 32 << 20
        full.touch()
        if ends == "stops":
            process.send_signal(signal.SIGINT)
            wait_until(told.exists, 60, "the rank to be asked for its checkpoint")
            process.send_signal(signal.SIGINT)
        assert process.wait(timeout=60) == (7 if ends == "fails" else 130)
    finally:
        process.kill()
        process.wait()


def test_ctrl_c_ends_the_wait_for_who_reads_what_has_ended() -> None:
    command = horovodrun("-H", "localhost:1", PYTHON, "-c", "print('x' * 200_000)")
    with subprocess.Popen(command, cwd=ROOT, stdout=subprocess.PIPE) as process:
        launcher = psutil.Process(process.pid)
        wait_until(launcher.children, 30, "the agent")
        wait_until(lambda: not launcher.children(), 30, "its end")
        time.sleep(1)
        assert process.poll() is None  # a pipe holds less
        process.send_signal(signal.SIGINT)
        process.wait(timeout=30)


def test_a_reader_who_is_slow_misses_nothing() -> None:
    """Also of a job that fails; its end is told behind what it printed, in order."""
    prints = "import sys; [print(number, 'x' * 500) for number in range(10000)]; sys.exit(3)"
    command = horovodrun("-H", "localhost:1", PYTHON, "-c", prints)
    with subprocess.Popen(
        command, cwd=ROOT, stdout=subprocess.PIPE, stderr=subprocess.STDOUT
    ) as process:
        assert process.stdout is not None
        said = b""
        while data := os.read(process.stdout.fileno(), 1 << 18):
            said += data
            time.sleep(0.05)
    *lines, last = said.decode().splitlines()
    assert [line.split()[0] for line in lines] == [f"[0]<stdout>:{n}" for n in range(10000)]
    assert last == "horovodrun: rank 0 on localhost ended with exit code 3"


def test_the_secret_of_a_job_is_not_told(tmp_path: Path) -> None:
    """Horovod prints it with HOROVOD_LOG_LEVEL=debug."""
    line = ["sh", "-c", "echo $HOROVOD_GLOO_RENDEZVOUS_ADDR | tee -a /dev/stderr"]
    done = run(horovodrun("--record", str(tmp_path), "-H", "localhost:1", *line))
    assert done.returncode == 0, done.stdout
    kept = "".join(file.read_text() for file in tmp_path.glob("*.log"))
    assert re.findall(r":\d+/(.*)/\n", kept) == ["...", "..."]


@pytest.mark.parametrize("detached", [False, True])
def test_a_very_long_line_stays_one(detached: bool, tmp_path: Path) -> None:
    """With its characters, which end anywhere in a piece of it."""
    prints = "print('a' + 'ß€😀' * 300000); print('end')"
    kept = ["--record", str(tmp_path)] if detached else []
    done = run(horovodrun(*kept, "-H", "localhost:1", PYTHON, "-c", prints))
    assert done.returncode == 0
    said = (tmp_path / "rank-0.log").read_text("utf-8") if detached else done.stdout
    prefix = "" if detached else "[0]<stdout>:"
    assert said.splitlines() == [f"{prefix}a{'ß€😀' * 300000}", f"{prefix}end"]


def test_another_line_within_a_long_one(capfd: pytest.CaptureFixture[str]) -> None:
    writer = record.Writer(1, "utf-8")
    for begin, text, part in (
        ("0:", "long", True), ("0:", "er", True), ("1:", "short\n", False),
        ("0:", "on", True), ("0:", "\n", False), ("0:", "new\n", False),
    ):  # fmt: skip
        writer.put(begin, text, part)
    writer.close()
    writer.thread.join()
    assert capfd.readouterr().out == "0:longer\n1:short\n0:on\n0:new\n"


def test_all_that_a_pipe_made_larger_holds_is_told() -> None:
    """Of a rank that has ended before its agent reads."""
    prints = (
        "import fcntl, os, signal, subprocess\n"
        "fcntl.fcntl(1, 1031, 1 << 20)  # F_SETPIPE_SZ\n"
        "os.kill(agent := os.getppid(), signal.SIGSTOP)\n"
        "goes_on = ['sh', '-c', f'sleep 1; kill -CONT {agent}']\n"
        "subprocess.Popen(goes_on, stdout=subprocess.DEVNULL, stderr=subprocess.DEVNULL)\n"
        "os.write(1, b'line\\n' * 200000)\n"
        "os._exit(0)"
    )
    done = run(horovodrun("-H", "localhost:1", PYTHON, "-c", prints))
    assert (done.returncode, done.stdout.count("line\n")) == (0, 200000)


def test_a_progress_bar_moves(tmp_path: Path) -> None:
    """With the start of its next state, as with plain horovodrun; not when its line is done."""
    script = (
        f"import os, time; print(end='1%\\r2%\\r3%', flush=True)\n"
        f"seen, end = {str(tmp_path / 'seen')!r}, time.monotonic() + 60\n"
        "while not os.path.exists(seen) and time.monotonic() < end: time.sleep(0.1)\n"
        "print('\\rdone\\r\\nend', flush=True)"
    )
    command = horovodrun("-H", "localhost:1", "python3", "-c", script)
    with subprocess.Popen(command, cwd=ROOT, stdout=subprocess.PIPE) as process:
        try:
            assert process.stdout is not None
            moved = b"[0]<stdout>:1%\r[0]<stdout>:2%\r"
            assert process.stdout.read(len(moved)) == moved
            (tmp_path / "seen").touch()
            rest = b"[0]<stdout>:3%\r[0]<stdout>:done\r\n[0]<stdout>:end\n"
            assert process.stdout.read() == rest
        finally:
            process.kill()


def test_a_terminal_that_cannot_show_it(tmp_path: Path) -> None:
    """The job goes on, and what it keeps in files is as it was printed."""
    ascii_only = {"LC_ALL": "C", "PYTHONUTF8": "0", "PYTHONCOERCECLOCALE": "0"}
    printing = [*["-H", "localhost:1"], "printf", "Stra\\303\\237e \\377\\n"]  # the last: in none
    done = run(horovodrun(*printing), **ascii_only)
    assert (done.returncode, done.stdout) == (0, "[0]<stdout>:Stra?e ?\n")
    assert run(horovodrun("--record", str(tmp_path), *printing), **ascii_only).returncode == 0
    assert (tmp_path / "rank-0.log").read_text(encoding="utf-8") == "Straße \ufffd\n"


def test_what_ranks_print_is_read_as_they_write_it(tmp_path: Path) -> None:
    """Whatever the encoding of the launcher's own terminal."""
    command = horovodrun("--record", str(tmp_path), "-H", "localhost:1", PYTHON, "-c")
    done = run([*command, r"print('Stra\xdfe')"], PYTHONIOENCODING="latin-1")
    assert done.returncode == 0, done.stdout
    assert (tmp_path / "rank-0.log").read_text(encoding="utf-8") == "Straße\n"


def test_a_terminal_that_another_program_does_not_wait_for() -> None:
    """What we both write to is non-blocking; nothing is lost."""
    reads, writes = os.pipe()
    os.set_blocking(writes, False)
    writer = record.Writer(writes, "utf-8")
    writer.put("", "x" * 500_000)
    time.sleep(0.5)
    assert writer.waiting  # for the pipe, which is full
    said = b""
    while len(said) < 500_000:
        said += os.read(reads, 1 << 16)
    writer.close()
    writer.thread.join()
    os.close(reads)
    os.close(writes)


def test_a_disk_that_is_full(tmp_path: Path) -> None:
    """The job goes on; what it would print is lost."""
    (tmp_path / "rank-0.log").symlink_to("/dev/full")
    line = ["sh", "-c", "echo lost; sleep 1; echo lost; exit $HOROVOD_RANK"]
    done = run(horovodrun("--record", str(tmp_path), "-H", "localhost:1", *line))
    assert done.returncode == 0, done.stdout
    assert json.loads((tmp_path / "run.json").read_text())["state"] == "done"

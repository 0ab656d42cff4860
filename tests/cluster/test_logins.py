"""Logins by ssh: how many at a time, and what one that hangs, fails or talks does to a job."""

from __future__ import annotations

import signal
import subprocess
import time
from collections.abc import Callable
from pathlib import Path

from benchmarks import launching, profiling
from cluster.horovodrun import AT_ONCE
from cluster.hosts import Host
from cluster.ranks import ranks
from tests.cluster.conftest import GREETING, PYTHON
from tests.cluster.launching import horovodrun
from tests.conftest import ROOT, run, wait_for_words, wait_until

HOSTS_24 = ",".join(f"h{number}" for number in range(1, 25))


def test_few_hosts_are_connected_to_at_the_same_time(fake_ssh: Callable, tmp_path: Path) -> None:
    """sshd drops connections beyond 10 that have not logged in (MaxStartups)."""
    counted = f"cd {tmp_path}; touch ssh.$$; ls ssh.* | wc -l >> counts; sleep 0.3; rm ssh.$$"
    # The first that ends would end the job.
    all_came = "until [ $(wc -l < counts) = 24 ]; do sleep 0.1; done"
    fake_ssh(f"{counted}; echo hello; {all_came}; exit 255")
    done = run(horovodrun("-H", HOSTS_24, "true"))
    assert done.returncode == 1, done.stdout
    counts = [int(line) for line in (tmp_path / "counts").read_text().split()]
    assert len(counts) == 24 and 1 < max(counts) <= 8, counts


def test_the_order_is_the_first_that_a_host_hears() -> None:
    """However long it takes to write it, while others get their signs of life."""
    slow = (
        "import sys, time, cluster.horovodrun as h; h.LIFE_SECONDS = 0.01; "
        "was = h.Job._environment; "
        "h.Job._environment = lambda *of: (time.sleep(0.5), was(*of))[1]; sys.exit(h.main())"
    )
    done = run([PYTHON, "-c", slow, "-H", "localhost:1", "echo", "hi"])
    assert (done.returncode, done.stdout) == (0, "[0]<stdout>:hi\n")


def test_a_host_that_takes_no_order_keeps_nobody(fake_ssh: Callable, tmp_path: Path) -> None:
    """One that hangs in its login; the order does not fit into a pipe as it is made."""
    fake_ssh(f"touch {tmp_path}/asked; exec sleep 600")
    process = subprocess.Popen(
        horovodrun("-H", "h1:1", "true", *12 * ["x" * 100_000]),
        cwd=ROOT, stdout=subprocess.PIPE, stderr=subprocess.STDOUT, text=True,
    )  # fmt: skip
    try:
        wait_until((tmp_path / "asked").exists, 30, "the call of ssh")
        time.sleep(1)
        process.terminate()
        process.send_signal(AT_ONCE)
        told = process.communicate(timeout=60)[0]
    finally:
        process.kill()
        process.communicate()
    assert "h1 does not answer" in told and process.returncode > 128, told


def test_no_host_is_connected_to_once_it_ends(fake_ssh: Callable, tmp_path: Path) -> None:
    """By Ctrl-C while the first hosts hang in their logins, or by a host that fails."""
    for failing, status in (("exec sleep 600", 130), ("sleep 1; exit 97", 1)):
        fake_ssh(f"echo >> {tmp_path}/asked; {failing}")
        process = subprocess.Popen(
            horovodrun("-H", HOSTS_24, "true"),
            cwd=ROOT, stdout=subprocess.PIPE, stderr=subprocess.STDOUT, text=True,
        )  # fmt: skip
        asked = tmp_path / "asked"
        wait_for_words(process, asked, "\n", 30, count=8)
        for _ in range(2 if status == 130 else 0):
            process.send_signal(signal.SIGINT)
            time.sleep(0.5)
        said = process.communicate(timeout=60)[0]
        assert process.returncode == status, said
        assert asked.read_text().count("\n") < 24, said
        asked.unlink()


def test_a_login_shell_that_says_something(fake_ssh: Callable) -> None:
    fake_ssh(GREETING + ' eval "$last"')
    done = run(horovodrun("-H", "h1", "--", "echo", "here"))
    assert (done.returncode, done.stdout) == (0, "[0]<stdout>:here\n")


def test_measurements_are_read_below_what_a_login_shell_says(
    fake_ssh: Callable, tmp_path: Path
) -> None:
    trace, summary = tmp_path / "rank-0.json.gz", tmp_path / "bench/runs/net/runs/0/summary.json"
    fake_ssh(f"{GREETING} printf '\\037\\213' > {trace}; eval \"$last\"")
    host = Host("h1", 1)
    assert "cpu" in launching.ask([host], "benchmarks.hardware")["h1"]
    summary.parent.mkdir(parents=True)
    summary.write_text('{"steps": 3}')
    assert launching.collect(host, str(tmp_path / "bench/runs")) == [{"steps": 3}]
    trace.unlink()
    (tmp_path / "horovod.json.gz").touch()  # the trace is all that is fetched
    assert profiling.fetch(tmp_path, ranks([host])) == 1
    assert trace.read_bytes() == b"\037\213"


def test_hosts_that_refuse_us_end_it(fake_ssh: Callable) -> None:
    """At once, each of them: before our threads have started to listen."""
    fake_ssh("echo 'ssh: connect to host: Connection refused' >&2; exit 255")
    names = ",".join(f"h{number}" for number in range(1, 17))
    done = run(horovodrun("-H", names, "true"), timeout=60)
    assert done.returncode == 1 and "no sshd listens there" in done.stdout, done.stdout
    assert len(done.stdout.splitlines()) == 1, done.stdout


def test_a_connection_that_is_lost_is_not_what_the_login_shell_said(
    fake_ssh: Callable, tmp_path: Path
) -> None:
    fake_ssh('echo "mkdir: /opt/x: Permission denied" >&2; eval "$last"')
    with open(tmp_path / "log", "w") as log:
        process = subprocess.Popen(
            horovodrun("-H", "h1:1", "sh", "-c", "echo ready; exec sleep 1000"),
            cwd=ROOT, stdout=log, stderr=log,
        )  # fmt: skip
    wait_for_words(process, tmp_path / "log", "ready", 60)
    subprocess.run(["pkill", "-KILL", "-P", str(process.pid)], check=True)
    assert process.wait(timeout=30) == 1
    assert "h1: the connection to it was lost" in (tmp_path / "log").read_text()

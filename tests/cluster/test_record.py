"""What is noted of runs, and what status, logs and stop make of it; nothing is launched."""

from __future__ import annotations

import argparse
import datetime
import errno
import json
import os
import signal
import subprocess
import sys
import time
from pathlib import Path
from types import SimpleNamespace

import pytest

from cluster import jobs, record
from cluster.hosts import Host, Refusal
from cluster.ranks import ranks
from cluster.record import birth, place, write
from tests.cluster.conftest import PYTHON
from tests.conftest import run


@pytest.mark.parametrize("detached", [False, True])
def test_a_run_that_cannot_be_noted_leaves_no_folder(
    detached: bool, monkeypatch: pytest.MonkeyPatch, tmp_path: Path
) -> None:
    """But for one that was launched: there it is told."""
    monkeypatch.setattr(record, "FOLDER", tmp_path / "logs")
    (folder := tmp_path / "launched").mkdir()

    def full(*_: object) -> None:
        raise OSError(errno.ENOSPC, os.strerror(errno.ENOSPC))

    monkeypatch.setattr(record, "write", full)
    with pytest.raises(Refusal, match=r"runs are noted there: No space left"):
        record.Record(folder if detached else None, [], ["true"], 8)
    assert folder.is_dir() and not list(tmp_path.glob("logs/*"))


def test_a_note_that_cannot_be_removed_does_not_hide_how_a_job_ended(
    monkeypatch: pytest.MonkeyPatch, tmp_path: Path
) -> None:
    """As on a disk that has become read-only meanwhile."""
    monkeypatch.setattr(record, "FOLDER", tmp_path / "logs")

    def read_only(*_: object, **__: object) -> None:
        raise OSError(errno.EROFS, os.strerror(errno.EROFS))

    with record.Record(None, [], ["true"], 8):
        monkeypatch.setattr(Path, "unlink", read_only)


def test_runs_of_the_same_second_have_folders_of_their_own(
    monkeypatch: pytest.MonkeyPatch, tmp_path: Path
) -> None:
    now = SimpleNamespace(now=lambda: datetime.datetime(2026, 1, 31, 12))
    monkeypatch.setattr(record, "datetime", SimpleNamespace(datetime=now))
    monkeypatch.setattr(record, "FOLDER", tmp_path / "logs")
    names = [record.new_folder().name for _ in range(3)]
    assert names == [f"2026-01-31_12-00-00{end}" for end in ("", "_1", "_2")]


def test_what_cannot_be_noted_leaves_what_was_noted(
    monkeypatch: pytest.MonkeyPatch, tmp_path: Path
) -> None:
    def full(*_: object) -> None:
        raise OSError(errno.ENOSPC, os.strerror(errno.ENOSPC))

    write(tmp_path, {"state": "running"})
    monkeypatch.setattr(Path, "replace", full)
    with pytest.raises(OSError, match="No space left"):
        write(tmp_path, {"state": "done"})
    assert [file.name for file in tmp_path.iterdir()] == ["run.json"]
    assert json.loads((tmp_path / "run.json").read_text()) == {"state": "running"}


def test_an_error_of_the_launcher_ends_a_run(tmp_path: Path) -> None:
    with pytest.raises(ZeroDivisionError), record.Record(tmp_path, [], ["true"], 8):
        1 / 0  # noqa: B018
    state = json.loads((tmp_path / "run.json").read_text())
    assert (state["state"], state["reason"]) == ("failed", "division by zero")


def test_a_command_of_several_lines_is_a_row(
    monkeypatch: pytest.MonkeyPatch, tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    monkeypatch.setattr(jobs, "FOLDER", tmp_path)
    command = "python -c 'import os\n\nprint(1)\n'"
    state = {
        "id": "run", "command": command, "hosts": {"h1": 1}, "ranks": 1, "detached": True,
        "launcher": "", "state": "failed", "reason": "one\ntwo", "began": "2026-11-26T00:00:00",
        "ended": "2026-11-26T00:00:01",
    }  # fmt: skip
    (tmp_path / "run").mkdir()
    write(tmp_path / "run", state)
    assert jobs.status(argparse.Namespace(json=False)) == 0
    _, row = capsys.readouterr().out.splitlines()
    assert row.endswith("h1:1   python -c 'import os print(1) ' (one two)")
    assert jobs.status(argparse.Namespace(json=True)) == 0
    assert json.loads(capsys.readouterr().out)[0]["command"] == command
    write(tmp_path / "run", state | {"hosts": {"h1": 1, "h2": 1, "h3": 1, "h7": 2}})
    assert jobs.status(argparse.Namespace(json=False)) == 0
    assert "  h[1-3]:1,h7:2  " in capsys.readouterr().out


@pytest.mark.parametrize(
    ("at", "expected"), [("13:00", "2026-01-31 13:00"), ("02:00", "2026-02-01 02:00")]
)
def test_an_hour_that_is_past_is_tomorrows(
    at: str, expected: str, monkeypatch: pytest.MonkeyPatch
) -> None:
    class Noon(datetime.datetime):
        @classmethod
        def now(cls, tz: datetime.tzinfo | None = None) -> Noon:
            return cls(2026, 1, 31, 12)

    clock = SimpleNamespace(datetime=Noon, timedelta=datetime.timedelta)
    monkeypatch.setattr(jobs, "datetime", clock)
    assert jobs._start(at) == datetime.datetime.fromisoformat(expected)


def test_a_run_that_began_by_a_clock_ahead_of_ours() -> None:
    later = datetime.datetime.now() + datetime.timedelta(hours=1)
    assert jobs._took({"began": later.isoformat()}) == "0:00:00"


def test_what_a_run_notes_in_its_last_moment_stays(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    state = {"id": "x", "launcher": place(), "pid": os.getpid(), "birth": "1",
             "state": "running", "detached": True, "began": "2026-01-01T00:00:00"}  # fmt: skip
    (tmp_path / "x").mkdir()
    write(tmp_path / "x", state)

    def ends(_: int) -> None:
        write(tmp_path / "x", state | {"state": "done"})

    monkeypatch.setattr(jobs, "FOLDER", tmp_path)
    os.utime(tmp_path / "x" / "run.json", (10**9, 10**9))
    (lost,) = jobs.runs()  # its id is another process's
    assert lost["state"] == "lost"
    assert datetime.datetime.fromisoformat(lost["ended"]).timestamp() == 10**9
    write(tmp_path / "x", state)
    monkeypatch.setattr(jobs, "birth", ends)
    assert [run["state"] for run in jobs.runs()] == ["done"]
    assert json.loads((tmp_path / "x" / "run.json").read_text())["state"] == "done"


def test_what_was_taken_for_lost_is_stopped(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """By a `make status` beside it."""
    state = {"id": "x", "launcher": place(), "pid": 1, "birth": "none",
             "state": "waiting", "detached": True, "began": "2026-01-01T00:00:00"}  # fmt: skip
    (tmp_path / "x").mkdir()
    write(tmp_path / "x", state | {"state": "lost"})
    monkeypatch.setattr(jobs, "FOLDER", tmp_path)
    monkeypatch.setattr(jobs, "_named", lambda *_, **__: state)
    monkeypatch.setattr(os, "kill", lambda *_: pytest.fail("its id is another process's"))
    assert jobs.stop(argparse.Namespace(run="x", kill=False)) == 0
    assert json.loads((tmp_path / "x" / "run.json").read_text())["state"] == "stopped"


@pytest.mark.parametrize("detached", [True, False])
def test_a_launcher_that_does_not_end_is_killed(
    detached: bool, monkeypatch: pytest.MonkeyPatch, tmp_path: Path
) -> None:
    """Nothing is kept of one in a terminal."""
    monkeypatch.setattr(jobs, "FOLDER", tmp_path)
    monkeypatch.setattr(jobs, "END_SECONDS", 0)
    deaf = (
        "import signal, time; signal.signal(15, signal.SIG_IGN); print(flush=True); time.sleep(9)"
    )
    with subprocess.Popen([sys.executable, "-c", deaf], stdout=subprocess.PIPE) as launcher:
        assert launcher.stdout is not None and launcher.stdout.readline()
        state = {"id": "x", "launcher": place(), "pid": launcher.pid, "birth": birth(launcher.pid),
                 "state": "running", "stop_seconds": 1, "detached": detached,
                 "began": "2026-01-01T00:00:00"}  # fmt: skip
        (tmp_path / "x").mkdir()
        write(tmp_path / "x", state)
        began = time.monotonic()
        assert jobs.stop(argparse.Namespace(run=None, kill=False)) == 0
        assert time.monotonic() - began > 1  # not before the time for its checkpoint is over
    assert launcher.returncode == -signal.SIGKILL
    assert [run["state"] for run in jobs.runs()] == ["stopped"] * detached
    assert (tmp_path / "x").exists() == detached


def test_a_run_of_another_user_or_host(monkeypatch: pytest.MonkeyPatch) -> None:
    state = {"id": "x", "launcher": place(), "pid": os.getpid(),
             "birth": birth(os.getpid()), "state": "running", "detached": True}  # fmt: skip

    def denied(*_: int) -> None:
        raise PermissionError

    monkeypatch.setattr(jobs, "_named", lambda *_, **__: state)
    monkeypatch.setattr(os, "kill", denied)
    with pytest.raises(Refusal, match="run x is another user's"):
        jobs.stop(argparse.Namespace(run="x", kill=False))
    state["launcher"] = "node9"  # where the number is another process's
    with pytest.raises(Refusal, match="run x was launched on node9: stop it there"):
        jobs.stop(argparse.Namespace(run="x", kill=False))


def test_a_run_that_ends_as_it_is_stopped(
    monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str], tmp_path: Path
) -> None:
    state = {"id": "x", "launcher": place(), "pid": 1, "birth": "7", "state": "running",
             "detached": True, "stop_seconds": 8}  # fmt: skip
    (tmp_path / "x").mkdir()
    monkeypatch.setattr(jobs, "FOLDER", tmp_path)

    def gone(*_: int) -> None:
        write(tmp_path / "x", state | {"state": "done"})
        births.clear()
        raise ProcessLookupError

    births = ["7"]
    monkeypatch.setattr(jobs, "_named", lambda *_, **__: state)
    monkeypatch.setattr(jobs, "birth", lambda _: births[0] if births else None)
    monkeypatch.setattr(os, "kill", gone)
    assert jobs.stop(argparse.Namespace(run="x", kill=False)) == 0
    assert "stopped x after 0 s" in capsys.readouterr().out
    assert json.loads((tmp_path / "x" / "run.json").read_text())["state"] == "done"


def test_a_run_of_another_container_is_not_lost(
    monkeypatch: pytest.MonkeyPatch, tmp_path: Path
) -> None:
    """One with the name of this host, where its process has another number."""
    monkeypatch.setattr(record, "FOLDER", tmp_path)
    monkeypatch.setattr(jobs, "FOLDER", tmp_path)
    code = "from pathlib import Path; from cluster import record; "
    code += f"record.Record(Path({str(tmp_path / 'x')!r}), [], ['true'], 8)"
    (tmp_path / "x").mkdir()
    there = ["unshare", "--pid", "--fork", "--mount-proc", PYTHON, "-c", code]
    if run(there[:-2] + ["--version"]).returncode:
        pytest.skip("unshare --pid needs root")
    done = run(there)
    assert done.returncode == 0, done.stdout
    assert [state["state"] for state in jobs.runs()] == ["starting"]
    with pytest.raises(Refusal, match=r"x was launched on \S+ \(container \d+\): stop it"):
        jobs.stop(argparse.Namespace(run="x", kill=False))


def test_code_that_changes_until_its_time_is_refused(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """Hosts without a shared file system would train with what they have."""

    def other(_: list[Host]) -> None:
        raise Refusal("node2: code: other than here: template.py")

    became: list[list[str]] = []
    monkeypatch.setattr(jobs, "refuse_unfit", other)
    monkeypatch.setattr(os, "execv", lambda _, line: became.append(line))
    monkeypatch.setattr(signal, "signal", lambda *_: None)  # SIGTERM stays the suite's own
    write(tmp_path, {"state": "waiting"})
    asked = {"record": tmp_path, "np": None, "hosts": "node1,node2", "hostfile": ""}
    asked |= {"stop_seconds": 8, "command": ["true"], "at": "2001-01-01 02:00"}
    with pytest.raises(Refusal):
        jobs.run(argparse.Namespace(**asked))
    assert not became
    state = json.loads((tmp_path / "run.json").read_text())
    assert (state["state"], state["reason"][:24]) == ("failed", "node2: code: other than ")
    write(tmp_path, {"state": "waiting"})
    with pytest.raises(Refusal):  # it was there at the launch
        jobs.run(argparse.Namespace(**asked | {"hosts": "", "hostfile": str(tmp_path / "gone")}))
    state = json.loads((tmp_path / "run.json").read_text())
    assert state["state"] == "failed" and "No such file" in state["reason"]
    asked |= {"at": "", "np": 1}  # just looked at
    jobs.run(argparse.Namespace(**asked))
    assert became[0][-5:] == ["-np", "1", "-H", "node1,node2", "true"]
    jobs.run(argparse.Namespace(**asked | {"hosts": "", "hostfile": "h.yaml"}))
    assert became[1][-5:] == ["-np", "1", "--hostfile", "h.yaml", "true"]


def test_a_run_that_cannot_be_noted_is_none(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    """On a full disk: what was started for it ends, and so does what finds no note."""
    real, made = subprocess.Popen, []

    def start(_: list[str], **how: object) -> subprocess.Popen:
        made.append(real(["sleep", "30"]))
        return made[0]

    def full(*_: object) -> None:
        raise OSError(errno.ENOSPC, "No space left on device", "run.json")

    monkeypatch.chdir(tmp_path)
    monkeypatch.setattr(subprocess, "Popen", start)
    monkeypatch.setattr(jobs, "write", full)
    monkeypatch.setattr(jobs, "refuse_unfit", lambda _: None)
    monkeypatch.setattr(sys, "argv", ["jobs", "launch", "-H", "node1:1", "true"])
    try:
        assert jobs.main() == 2
        assert made[0].returncode == -signal.SIGKILL
    finally:
        made[0].kill()
        made[0].wait()
    told = capsys.readouterr().err
    assert told == "error: [Errno 28] No space left on device: 'run.json'\n"
    assert not list(tmp_path.glob("logs/launches/*"))
    monkeypatch.setattr(jobs, "NOTE_SECONDS", 0)
    monkeypatch.setattr(sys, "argv", ["jobs", "run", "--record", str(tmp_path), "true"])
    monkeypatch.setattr(os, "execv", lambda *_: pytest.fail("it runs"))
    assert jobs.main() == 2 and "nothing is noted of this run" in capsys.readouterr().err


def test_what_is_noted_of_a_run_before_its_launcher_runs(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """The same as the launcher itself notes."""
    monkeypatch.chdir(tmp_path)
    monkeypatch.setattr(jobs, "refuse_unfit", lambda _: None)
    monkeypatch.setattr(subprocess, "Popen", lambda *_, **__: SimpleNamespace(pid=os.getpid()))
    monkeypatch.setattr(sys, "argv", ["jobs", "launch", "-H", "node1:2,node2:1", "--", "true"])
    assert jobs.main() == 0
    (file,) = tmp_path.glob("logs/launches/*/run.json")
    launched = json.loads(file.read_text())
    record.Record(file.parent, ranks([Host("node1", 2), Host("node2", 1)]), ["true"], 8.0)
    noted = json.loads(file.read_text())
    assert noted | {"began": launched["began"]} == launched


def test_logs_are_of_the_newest_whose_output_is_kept(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    """Not of one in another terminal; and what is no run is passed over."""
    monkeypatch.setattr(jobs, "FOLDER", tmp_path)
    common = {
        "launcher": place(), "pid": os.getpid(), "birth": birth(os.getpid()),
        "state": "running", "ranks": 2, "began": "2026-01-01T00:00:00",
    }  # fmt: skip
    for name, detached in (("1", True), ("2", False)):
        (tmp_path / name).mkdir()
        write(tmp_path / name, {**common, "id": name, "detached": detached})
    (tmp_path / "3").mkdir()
    (tmp_path / "3" / "run.json").write_text('{"something": "else"}')
    (tmp_path / "4").mkdir()
    write(tmp_path / "4", {**common, "id": "4", "detached": True, "began": "long ago"})
    (tmp_path / "1" / "rank-0.log").write_text("moves\r" + "x" * (1 << 21))
    monkeypatch.setattr(sys, "argv", ["jobs", "logs"])
    assert jobs.main() == 0
    said, told = capsys.readouterr()
    assert said.startswith("moves\r") and len(said) == 6 + (1 << 21) and not told
    monkeypatch.setattr(sys, "argv", ["jobs", "logs", "--rank", "1"])
    assert jobs.main() == 0
    assert capsys.readouterr() == ("", "rank-1 has printed nothing yet\n")
    monkeypatch.setattr(sys, "argv", ["jobs", "logs", "2"])
    assert jobs.main() == 2
    assert "prints to the terminal that it was started in" in capsys.readouterr().err


def test_of_several_that_run_one_has_to_be_named(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    """All of them are shown, and the last ten of those that ended."""
    monkeypatch.setattr(jobs, "FOLDER", tmp_path)
    common = {
        "launcher": place(), "pid": os.getpid(), "birth": birth(os.getpid()),
        "detached": True, "began": "2026-01-01T00:00:00",
    }  # fmt: skip
    names = [f"{number:02}" for number in range(14)]
    for name in names:
        (tmp_path / name).mkdir()
        state = "running" if name in ("00", "13") else "done"
        write(tmp_path / name, {**common, "id": name, "state": state})
    assert jobs.status(argparse.Namespace(json=True)) == 0
    shown = [state["id"] for state in json.loads(capsys.readouterr().out)]
    assert shown == [*names[3:13], "00", "13"]
    with pytest.raises(Refusal, match="several runs are running: RUN= one of 00, 13$"):
        jobs._named(None, alive=True)  # stop would end this process, if it named one
    assert jobs._named("00", alive=True)["id"] == "00"

"""Code comes to hosts that have none, or an old one, and nothing else is touched there."""

from __future__ import annotations

import os
import shlex
import signal
import subprocess
import sys
from collections.abc import Callable, Iterator
from pathlib import Path

import pytest

from cluster import sync, testbed
from cluster.hosts import Host, Refusal
from cluster.record import birth
from tests.cluster.conftest import GREETING, PYTHON, made
from tests.conftest import ROOT, run, wait_until

On = Callable[..., subprocess.CompletedProcess[str]]


@pytest.fixture
def apart(project: Path, tmp_path: Path) -> Iterator[list[testbed.Node]]:
    """Two hosts; the second has another folder where the first has the project's parent."""
    for hosts in made(2):
        (tmp_path / "theirs").mkdir()
        hosts[1].shows(tmp_path / "theirs", project.parent)
        yield hosts


def files(folder: Path) -> dict[str, bytes]:
    return {
        str(path.relative_to(folder)): path.read_bytes()
        for path in folder.rglob("*")
        if path.is_file() and "__pycache__" not in path.parts
    }


def test_a_missing_checkout(
    on: On, apart: list[testbed.Node], project: Path, tmp_path: Path
) -> None:
    look = on(apart[0], "cluster.sync", "-H", "node1,node2", "--dry-run", cwd=project)
    assert look.returncode == 0 and "node2         would be:" in look.stdout, look.stdout
    assert not list((tmp_path / "theirs").iterdir())
    done = on(apart[0], "cluster.sync", "-H", "node1,node2", cwd=project)
    assert done.returncode == 0, done.stdout
    assert f"(there was no {project})" in done.stdout and "node1         this host" in done.stdout
    assert files(tmp_path / "theirs" / "project") == files(project)
    again = on(apart[0], "cluster.sync", "-H", "node2", cwd=project)
    assert "node2         the same" in again.stdout


def test_a_stale_checkout(on: On, apart: list[testbed.Node], project: Path, tmp_path: Path) -> None:
    """What changed, is new or gone; data, logs and secrets stay on both sides."""
    assert on(apart[0], "cluster.sync", "-H", "node2", cwd=project).returncode == 0
    theirs = tmp_path / "theirs" / "project"
    for folder in (project, theirs):
        for name in ("logs", "data", ".git", ".venv"):
            (folder / name).mkdir()
            (folder / name / "own").write_text(str(folder))
        (folder / ".env").write_text(f"TOKEN={folder}")
        (folder / "login.pem").write_text(str(folder))
    (theirs / "models" / "gone.py").write_text("# removed here since")
    (theirs / "template.py").write_text("# an old one")
    (theirs / "Makefile").write_text((theirs / "Makefile").read_text().replace("train", "brain"))
    (project / "models" / "mine.py").write_text("# new")
    (tmp_path / "theirs" / "beside").write_text("not ours")
    run_there = theirs / "results" / "runs" / "first"  # of a log_dir of one's own, as Run makes it
    (run_there / "checkpoints").mkdir(parents=True)
    (run_there / ".gitignore").write_text("*\n")
    (run_there / "checkpoints" / "last.ckpt").write_text("hours of work")
    done = on(apart[0], "cluster.sync", "-H", "node2", cwd=project)
    assert done.returncode == 0, done.stdout
    assert "1 new, 2 changed, 1 deleted" in done.stdout
    # Makefile: of the same size, and only its content tells
    for line in ("+ models/mine.py", "* template.py", "* Makefile", "- models/gone.py"):
        assert line in done.stdout
    for name in ("logs/own", "data/own", ".git/own", ".venv/own", "login.pem"):
        assert (theirs / name).read_text() == str(theirs)
    assert (run_there / "checkpoints" / "last.ckpt").read_text() == "hours of work"
    assert (theirs / ".env").read_text() == f"TOKEN={theirs}"
    assert (tmp_path / "theirs" / "beside").read_text() == "not ours"


def test_what_is_a_link_or_a_file_here_stays_there(
    on: On, apart: list[testbed.Node], project: Path, tmp_path: Path
) -> None:
    """Logs and data on a scratch disk, the .git of a worktree."""
    assert on(apart[0], "cluster.sync", "-H", "node2", cwd=project).returncode == 0
    theirs = tmp_path / "theirs" / "project"
    for name in ("logs", "data", ".venv", "multirun"):
        (project / name).symlink_to(tmp_path)
        (theirs / name).mkdir()
        (theirs / name / "own").write_text("years of work")
    (project / ".git").write_text("gitdir: elsewhere")
    (theirs / ".git").mkdir()
    (theirs / ".git" / "own").write_text("years of work")
    done = on(apart[0], "cluster.sync", "-H", "node2", cwd=project)
    assert done.returncode == 0 and "node2         the same" in done.stdout, done.stdout
    kept = {path.parent.name for path in theirs.glob("*/own")}
    assert kept == {"logs", "data", ".venv", ".git", "multirun"}


def test_what_is_ignored_since_the_last_time_stays_there(
    on: On, apart: list[testbed.Node], project: Path, tmp_path: Path
) -> None:
    assert on(apart[0], "cluster.sync", "-H", "node2", cwd=project).returncode == 0
    theirs = tmp_path / "theirs" / "project"
    (theirs / "outputs").mkdir()
    (theirs / "outputs" / "own.csv").write_text("years of work")
    with (project / ".gitignore").open("a") as file:
        file.write("/outputs\n")
    done = on(apart[0], "cluster.sync", "-H", "node2", cwd=project)
    assert done.returncode == 0 and "* .gitignore" in done.stdout, done.stdout
    assert (theirs / "outputs" / "own.csv").read_text() == "years of work"


def test_a_look_tells_what_goes_and_what_stays(
    on: On, apart: list[testbed.Node], project: Path, tmp_path: Path
) -> None:
    """Where .gitignore has lost a line and gained one, a copy deletes what DRY=1 has shown."""
    (project / ".gitignore").write_text("/outputs\n")
    assert on(apart[0], "cluster.sync", "-H", "node2", cwd=project).returncode == 0
    theirs = tmp_path / "theirs" / "project"
    subprocess.run(["git", "init", "-q"], cwd=project, check=True)
    (project / ".git" / "info" / "exclude").write_text("# of this clone alone\n/notes\n")
    for folder in ("outputs", "results", "notes"):
        (theirs / folder).mkdir()
        (theirs / folder / "own.csv").write_text("years of work")
    (project / ".gitignore").write_text("/results\n")
    look, copy = (
        on(apart[0], "cluster.sync", "-H", "node2", *only, cwd=project).stdout
        for only in (["--dry-run"], [])
    )
    assert look.replace("would be: ", "") == copy and "1 changed\n  * .gitignore\n" in copy
    for folder in ("outputs", "results", "notes"):
        assert (theirs / folder / "own.csv").exists()


def test_what_lies_beside_tracked_files_is_as_it_was(
    on: On, apart: list[testbed.Node], project: Path, tmp_path: Path
) -> None:
    """Folders of links, folders that are links, old code beside the last file of a folder."""
    with (project / ".gitignore").open("a") as file:
        file.write("/outputs\n*.so\n")
    for name in ("ext/a.so", "ext/old.py", "outputs/best.csv"):
        (project / name).parent.mkdir(exist_ok=True)
        (project / name).write_text("here")
    for command in (["init", "-q"], ["add", "-f", "ext", "outputs"]):
        subprocess.run(["git", *command], cwd=project, check=True)
    assert on(apart[0], "cluster.sync", "-H", "node2", cwd=project).returncode == 0
    theirs = tmp_path / "theirs" / "project"
    assert (theirs / "outputs" / "best.csv").exists()
    (theirs / "outputs" / "best.csv").write_text("better there")
    (project / "ext" / "old.py").unlink()
    (project / "outputs").rename(tmp_path / "elsewhere")
    (project / "outputs").symlink_to(tmp_path / "elsewhere")
    (project / "links").mkdir()
    (project / "links" / "dangling").symlink_to("/nowhere/at/all")
    for index in range(3000):  # tracked, and never copied
        (project / f"secrets-{'x' * 40}-{index}").touch()
    subprocess.run(["git", "add", "."], cwd=project, check=True)
    done = on(apart[0], "cluster.sync", "-H", "node2", cwd=project)
    assert done.returncode == 0, done.stdout
    assert (theirs / "outputs" / "best.csv").read_text() == "better there"
    assert (theirs / "ext" / "a.so").exists() and not (theirs / "ext" / "old.py").exists()
    assert "  + links/dangling\n" in done.stdout
    assert os.readlink(theirs / "links" / "dangling") == "/nowhere/at/all"
    assert not list(theirs.glob("secrets-*"))


def test_a_repository_that_git_cannot_read(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """It is told; one of another user can be read, and a hook's is not taken for this one."""
    monkeypatch.setattr(sync, "ROOT", tmp_path)
    assert sync._known_to_git("--cached") == set()  # none
    (tmp_path / "a").touch()
    for command in (["init", "-q"], ["add", "a"]):
        subprocess.run(["git", *command], cwd=tmp_path, check=True)
    monkeypatch.setenv("GIT_DIR", "/nowhere")
    if os.geteuid() == 0:
        for path in (tmp_path, *(tmp_path / ".git").rglob("*")):
            os.chown(path, 12345, 12345)
    assert sync._known_to_git("--cached") == {"a"}
    (tmp_path / ".git" / "index").write_bytes(b"broken")
    with pytest.raises(Refusal, match="index file"):
        sync._known_to_git("--cached")


def test_neither_git_nor_rsync_is_needed_where_nothing_is_copied(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setenv("PATH", str(tmp_path))
    sync.rules.cache_clear()
    assert sync.synced() is None
    assert sync._known_to_git("--cached") == set()


def test_what_a_user_ignores_everywhere_stays_too(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(sync, "ROOT", tmp_path)
    monkeypatch.setenv("HOME", str(tmp_path))
    monkeypatch.delenv("XDG_CONFIG_HOME", raising=False)
    default, own = tmp_path / ".config/git/ignore", tmp_path / "own"
    for file in (default, tmp_path / "xdg/git/ignore", own):
        file.parent.mkdir(parents=True, exist_ok=True)
        file.touch()
    assert sync._patterns() == [default]
    monkeypatch.setenv("XDG_CONFIG_HOME", str(tmp_path / "xdg"))
    assert sync._patterns() == [tmp_path / "xdg/git/ignore"]
    (tmp_path / ".gitconfig").write_text("[core]\nexcludesFile = ~/own\n")
    assert sync._patterns() == [own]


def test_an_environment_elsewhere_is_not_copied_over_another(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    """What is not here would be deleted there, as in a conda of all projects."""
    monkeypatch.setattr(sync, "environment_folder", lambda: Path("/opt/conda"))
    monkeypatch.setattr(sync, "_rsync", lambda *_: pytest.fail("it is copied"))
    with pytest.raises(Refusal, match=f"h1: the environment /opt/conda is outside of {ROOT}: "):
        sync._environment(Host("h1", 1), dry_run=False)


def test_a_git_of_another_language(fake: Callable, monkeypatch: pytest.MonkeyPatch) -> None:
    """What it says is looked at."""
    told = "[ $LC_ALL = C ] && echo 'fatal: not a git repository' || echo 'Schwerwiegend: Kein'"
    fake("git", f"({told}) >&2; exit 128")
    monkeypatch.setenv("LC_ALL", "de_DE.UTF-8")
    assert sync._known_to_git("--cached") == set()


def test_what_git_tracks_is_copied_whatever_is_ignored(
    on: On, apart: list[testbed.Node], project: Path, tmp_path: Path
) -> None:
    """By a `!`, or added all the same; what lies beside it stays on both sides."""
    with (project / ".gitignore").open("a") as file:
        file.write("conf/local/*\n!conf/local/[m]ine.yaml\n/outputs\n")
    for name in ("conf/local/mine.yaml", "conf/local/own", "outputs/kept [1]*.csv", "outputs/own",
                 "tracked.pem"):  # fmt: skip
        (project / name).parent.mkdir(exist_ok=True)
        (project / name).write_text("here")
    for command in (["init", "-q"], ["add", "-f", "outputs/kept [1]*.csv", "tracked.pem"]):
        subprocess.run(["git", *command], cwd=project, check=True)
    assert on(apart[0], "cluster.sync", "-H", "node2", cwd=project).returncode == 0
    theirs = tmp_path / "theirs" / "project"
    copied = {name for name in files(theirs) if name.startswith(("conf/local", "outputs", "tr"))}
    assert copied == {"conf/local/mine.yaml", "outputs/kept [1]*.csv"}
    assert (theirs / "conf" / "config.yaml").exists()
    for name in ("conf/local/own", "outputs/own"):
        (theirs / name).write_text("there")
    done = on(apart[0], "cluster.sync", "-H", "node2", cwd=project)
    assert "node2         the same" in done.stdout, done.stdout
    for name in ("conf/local/own", "outputs/own"):
        assert (theirs / name).read_text() == "there"


def test_why_it_failed_is_told(
    on: On, apart: list[testbed.Node], project: Path, tmp_path: Path
) -> None:
    """By the other side's rsync, whose words get there most of the time."""
    (project / "large").write_bytes(os.urandom(1 << 20))
    full = ["mount", "-t", "tmpfs", "-o", "size=128k", "tmpfs", str(project.parent)]
    subprocess.run(apart[1].command(*full), check=True)
    done = on(apart[0], "cluster.sync", "-H", "node2", cwd=project)
    told = done.stdout.splitlines()[-1]
    hint = f"error: node2: cannot write there, as where a disk is full: ssh node2 df -h {project}"
    assert done.returncode == 1 and ("No space left on device" in told or told == hint), told


def test_a_folder_that_has_become_a_file(
    on: On, apart: list[testbed.Node], project: Path, tmp_path: Path
) -> None:
    """A cache in it goes with it; what is protected holds it, which is told."""
    with (project / ".gitignore").open("a") as file:
        file.write("*.pyc\n")
    assert on(apart[0], "cluster.sync", "-H", "node2", cwd=project).returncode == 0
    theirs = tmp_path / "theirs" / "project"
    for name, own in (("cached", "__pycache__/a.pyc"), ("gone", "__pycache__/a.pyc"),
                      ("held", ".env"), ("stays", "__pycache__/a.pyc")):  # fmt: skip
        (theirs / name / own).parent.mkdir(parents=True)
        (theirs / name / own).write_text("own")
    for name in ("cached", "held"):
        (project / name).write_text("a file")
    (project / "stays").mkdir()
    done = on(apart[0], "cluster.sync", "-H", "node2", cwd=project)
    told = "error: node2: could not make way for new regular file: held: it is a folder there"
    assert done.returncode == 1 and done.stdout.splitlines()[-1].startswith(told), done.stdout
    assert (theirs / "cached").read_text() == "a file" and not (theirs / "gone").exists()
    for own in ("held/.env", "stays/__pycache__/a.pyc"):
        assert (theirs / own).read_text() == "own"


def test_why_it_failed_is_told_where_rsync_does_not(fake: Callable) -> None:
    fake("rsync", "exit 11")
    told = "h1: cannot write there, as where a disk is full: ssh h1 df"
    with pytest.raises(Refusal, match=told) as error:
        sync._rsync(Host("h1", 1), ROOT, [], dry_run=False)
    assert not isinstance(error.value, sync.Disturbed)
    for status in (23, 24):  # where files come and go
        fake("rsync", f"exit {status}")
        with pytest.raises(sync.Disturbed, match=f"h1: ended with {status}"):
            sync._rsync(Host("h1", 1), ROOT, [], dry_run=False)


def test_a_copy_goes_by_the_way_of_the_host_file(fake_ssh: Callable, tmp_path: Path) -> None:
    fake_ssh(f'echo "$*" >{tmp_path}/asked; exit 255')
    host = Host("h1", 1, user="ada", port=2222, ssh=("ProxyJump=login",))
    with pytest.raises(Refusal, match="^h1: "):
        sync._rsync(host, ROOT, [], dry_run=True)
    asked = (tmp_path / "asked").read_text()
    assert asked.startswith(f"{shlex.join(host.ssh_options()[1:])} h1 rsync"), asked


def test_a_greeting_that_disturbs_rsync_is_told(fake_ssh: Callable) -> None:
    fake_ssh("echo Welcome to node1; exec cat >/dev/null")
    with pytest.raises(Refusal, match="h1: its login shell prints, .* ssh h1 true must print"):
        sync._rsync(Host("h1", 1), ROOT, [], dry_run=True)


@pytest.mark.parametrize(
    ("said", "words"),
    [
        ("case $* in *rsync*) echo 'mkdir: cannot create directory /data: Read-only' >&2; "
         "exit 1;; esac; echo missing", "h1: mkdir: cannot create directory /data: Read-only"),
        ("true", "h1: does not run what it is told to"),
        ("echo This is a login for backups.", "h1: does not run what it is told to"),
        ("echo checkout; echo no-rsync", "h1: rsync is missing there"),
    ],
)  # fmt: skip
def test_what_a_host_says_is_told_below_its_banner(
    fake_ssh: Callable, said: str, words: str
) -> None:
    fake_ssh(f"echo 'No such file is to be kept here.' >&2; {said}")
    with pytest.raises(Refusal) as error:
        sync.sync(Host("h1", 1), "Makefile", dry_run=False, env=False)
    assert str(error.value).startswith(words), error.value


def test_a_login_that_hangs_is_told(fake_ssh: Callable, monkeypatch: pytest.MonkeyPatch) -> None:
    fake_ssh("exec sleep 60")
    monkeypatch.setattr(sync, "LOOK_SECONDS", 1)
    with pytest.raises(Refusal, match="h1: no answer within 1 s: look there: ssh h1 uptime"):
        sync.sync(Host("h1", 1), "Makefile", dry_run=True, env=False)


def test_a_checkout_that_cannot_be_written(
    monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    monkeypatch.setattr(sync, "ROOT", Path("/proc"))
    monkeypatch.setattr(sys, "argv", ["sync", "-H", "node1:1"])
    assert sync.main() == 2
    told = capsys.readouterr().err
    assert told.startswith("error: /proc cannot be written: ") and told.count("\n") == 1


def test_what_is_no_checkout_is_left_alone(
    on: On, apart: list[testbed.Node], project: Path, tmp_path: Path
) -> None:
    """And a host that fails keeps no other from its code."""
    other = tmp_path / "theirs" / "project"
    other.mkdir()
    (other / "thesis.tex").write_text("years of work")
    done = on(apart[0], "cluster.sync", "-H", "node9,node2,node1", cwd=project)
    assert done.returncode == 1
    assert "error: node9: no such host" in done.stdout
    assert f"error: node2: {project} holds something else there" in done.stdout
    assert "node1         this host" in done.stdout
    assert files(other) == {"thesis.tex": b"years of work"}


def test_what_reads_it_may_go_away() -> None:
    asked = f"{PYTHON} -m cluster.sync -H localhost:1 --dry-run | true; exit $PIPESTATUS"
    done = run(["bash", "-c", asked])
    assert (done.returncode, done.stdout) == (0, "")


def test_a_path_with_blanks(
    on: On, apart: list[testbed.Node], project: Path, tmp_path: Path
) -> None:
    """Where rsync is older than 3.2.4, as it can be told to behave."""
    here = project.rename(project.with_name("my project"))
    other = tmp_path / "theirs" / "my"
    other.mkdir()
    (other / "thesis.tex").write_text("years of work")
    for _ in range(2):
        done = on(apart[0], "cluster.sync", "-H", "node2", cwd=here, RSYNC_OLD_ARGS="1")
        assert done.returncode == 0, done.stdout
    assert "node2         the same" in done.stdout
    assert files(other) == {"thesis.tex": b"years of work"}
    assert files(tmp_path / "theirs" / "my project") == files(here)


def test_what_rsync_may_not_set_is_told() -> None:
    """Permissions of a colleague's file: its last line only says that something failed."""
    cause = 'rsync: [generator] failed to set permissions on "/p/a": Operation not permitted (1)'
    last = "rsync error: some files/attrs were not transferred (code 23) at main.c(1394)"
    assert sync._rsync_failed(Host("node2", 1), 23, f"{cause}\n{last}\n") == cause


@pytest.mark.parametrize("number", [signal.SIGINT, signal.SIGTERM])
def test_when_told_to_end_it_leaves_nothing(
    fake_ssh: Callable, tmp_path: Path, number: signal.Signals
) -> None:
    """By Ctrl-C, which a terminal tells all its processes, or by a signal for it alone."""
    fake_ssh(f"touch {tmp_path}/asked\nexec sleep 20")
    process = subprocess.Popen(
        [PYTHON, "-m", "cluster.sync", "-H", "h1"], cwd=ROOT,
        stdout=subprocess.PIPE, stderr=subprocess.STDOUT, start_new_session=True,
    )  # fmt: skip
    wait_until((tmp_path / "asked").exists, 30, "the call of ssh")
    found = subprocess.run(["pgrep", "-P", str(process.pid)], capture_output=True, text=True)
    asking = [int(pid) for pid in found.stdout.split()]
    # A terminal does not end it before us, which would pass for a host that failed.
    assert asking and all(os.getsid(pid) == pid for pid in asking)
    (os.killpg if number == signal.SIGINT else os.kill)(process.pid, number)
    assert process.communicate(timeout=10)[0] == b"" and process.returncode == 130
    for pid in asking:
        wait_until(lambda pid=pid: not birth(pid), 5, "the end of ssh")
    assert not list(ROOT.glob(f".sync-{process.pid}-*"))


def test_a_login_shell_that_says_something(fake_ssh: Callable) -> None:
    fake_ssh(GREETING + ' eval "$last"')
    told = sync.sync(Host("h1", 1), "Makefile", dry_run=True, env=False)
    assert told == ["shares this file system: nothing to copy"]


def test_a_shared_file_system(on: On, hosts: list[testbed.Node], project: Path) -> None:
    done = on(hosts[0], "cluster.sync", "-H", "node1,node2", "--env", cwd=project)
    assert done.returncode == 0 and "node2         shares this file system" in done.stdout


@pytest.mark.parametrize("turns", [1, 2])
def test_hosts_that_share_a_folder_have_a_second_turn(
    turns: int, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    tried: list[str] = []

    def disturbed(host: Host, *_: bool) -> list[str]:
        tried.append(host.name)
        if host.name == "node2" and tried.count("node2") <= turns:
            raise sync.Disturbed("node2: ended with 23")
        return ["the same"]

    monkeypatch.setattr(sync, "sync", disturbed)
    monkeypatch.setattr(sys, "argv", ["sync", "-H", "node1:1,node2:1"])
    assert sync.main() == turns - 1
    assert sorted(tried) == ["node1", "node2", "node2"] and tried[-1] == "node2"
    told = capsys.readouterr()
    assert told.out.count("the same") == 3 - turns and told.out.count("FAILED") == turns - 1
    assert told.err == "error: node2: ended with 23\n" * (turns - 1)


def test_the_environment_comes_too(
    apart: list[testbed.Node], on: On, project: Path, tmp_path: Path
) -> None:
    """A small one: what it lacks is told, as it is tried there."""
    subprocess.run([sys.executable, "-m", "venv", "--without-pip", project / ".venv"], check=True)
    site = next((project / ".venv" / "lib").glob("python*/site-packages"))
    for name in ("torch", "hydra", "horovod"):
        (site / name).mkdir()
        (site / name / "__init__.py").touch()
    yaml = next(Path(p) for p in sys.path if (Path(p) / "yaml").is_dir())
    (site / "own.pth").write_text(str(yaml))  # cluster.sync reads hosts with it
    line = [project / ".venv/bin/python", "-m", "cluster.sync", "-H", "node2", "--env"]
    command = apart[0].command("env", "-C", str(project), *map(str, line))
    failed = subprocess.run(command, capture_output=True, text=True)
    assert failed.returncode == 1 and "No module named 'horovod.torch'" in failed.stderr
    (site / "horovod" / "torch.py").touch()
    done = subprocess.run(command, capture_output=True, text=True)
    assert done.returncode == 0, done.stderr
    assert "files copied, it runs" in done.stdout
    theirs = tmp_path / "theirs" / "project" / ".venv"
    assert (theirs / site.relative_to(project / ".venv") / "horovod" / "torch.py").exists()

"""`make new` gives a forker a copy that works, without our results."""

from __future__ import annotations

import os
import re
import subprocess
import sys
from pathlib import Path

import pytest

import new
from runs.refusal import Refusal
from tests.conftest import ROOT, run

SOMEBODY = {
    f"GIT_{role}_{what}": value
    for role in ("AUTHOR", "COMMITTER")
    for what, value in (("NAME", "Ada"), ("EMAIL", "ada@example.org"))
}


@pytest.fixture(scope="module")
def copy(tmp_path_factory: pytest.TempPathFactory) -> Path:
    folder = tmp_path_factory.mktemp("new") / "elsewhere" / "mine"
    done = run(["make", "new", "NAME=my_project", f"DIR={folder}"], **SOMEBODY)
    assert done.returncode == 0 and f"new     {folder}: " in done.stdout, done.stdout
    return folder


def git(folder: Path, *command: str) -> list[str]:
    done = subprocess.run(["git", *command], cwd=folder, capture_output=True, text=True, check=True)
    return done.stdout.splitlines()


def test_it_has_the_code_and_one_commit(copy: Path) -> None:
    (title,) = git(copy, "log", "--format=%an: %s")
    assert title.startswith("Ada: my_project: made from ")
    assert git(copy, "status", "--porcelain") == []
    ours, theirs = set(git(ROOT, "ls-files")), set(git(copy, "ls-files"))
    assert (
        theirs < ours and {"template.py", ".gitignore", "LICENSE", "tests/test_conf.py"} <= theirs
    )
    assert all(name.startswith(new.LEFT_OUT) for name in ours - theirs)
    assert [path.name for path in copy.parent.iterdir()] == ["mine"]


def test_it_has_their_title_and_none_of_our_results(copy: Path) -> None:
    readme = (copy / "README.md").read_text()
    assert readme.startswith("# my_project\n\nMade from *Lightning + Horovod, a template*, ")
    assert "<img" not in readme and "![" not in readme and "ours -->" not in readme
    assert "results/scaling_" not in readme and "## Put your model in" in readme
    assert "No result of `make bench`" in readme
    assert (copy / "CHANGELOG.md").read_text().count("\n- ") == 1
    assert "|" not in (copy / "benchmarks" / "NOTES.md").read_text()


def test_it_works(copy: Path, tmp_path: Path) -> None:
    job = [sys.executable, "template.py", "trainer.fast_dev_run=true", f"log_dir={tmp_path}"]
    done = run(job, cwd=copy)
    assert done.returncode == 0 and "test/acc" in done.stdout, done.stdout


def test_examples_can_be_deleted(copy: Path, tmp_path: Path) -> None:
    """As docs/faq.md says: the tests of the rest are found, and those of conf/ pass."""
    rest = tmp_path / "rest"
    git(tmp_path, "clone", "-q", str(copy), str(rest))
    for command in re.findall(r"^git rm .*", (ROOT / "docs" / "faq.md").read_text(), re.M):
        subprocess.run(["bash", "-c", command], cwd=rest, check=True, stdout=subprocess.DEVNULL)
    left = [name.stem for name in sorted(rest.glob("models/*.py"))]
    assert left == ["__init__", "classifier", "denoiser", "split", "unet"]
    pytest_ = [sys.executable, "-m", "pytest"]
    for command in ([*pytest_, "--collect-only"], [*pytest_, "tests/test_conf.py", "-k", "each"]):
        done = run(command, cwd=rest)
        assert done.returncode == 0, done.stdout
    assert " passed" in done.stdout


@pytest.mark.slow
def test_its_tests_pass(copy: Path) -> None:
    tests = ["tests/test_config.py", "tests/test_conf.py", "tests/test_readme.py"]
    tests += ["tests/test_scaling_report.py"]
    cheap = "test_config or begins_with or can_be_made or exist or short or links or newest"
    done = run([sys.executable, "-m", "pytest", *tests, "-k", cheap], cwd=copy)
    assert done.returncode == 0 and " passed" in done.stdout, done.stdout


@pytest.mark.parametrize(
    ("name", "folder", "message"),
    [
        ("", "there", "NAME=: a letter, then letters"),
        ("my project", "there", "NAME=my project: a letter, then letters"),
        ("../x", "there", "NAME=../x: a letter, then letters"),
        ("mine", ".", "it is there already"),
        ("mine", str(ROOT / "tests" / "mine"), "within the repository itself"),
    ],
)
def test_refused(name: str, folder: str, message: str, tmp_path: Path) -> None:
    with pytest.raises(Refusal, match=message):
        new.new(name, tmp_path / folder)
    assert not list(tmp_path.iterdir())


def test_what_was_deleted_is_left_out(monkeypatch: pytest.MonkeyPatch, tmp_path: Path) -> None:
    for name, value in SOMEBODY.items():
        monkeypatch.setenv(name, value)
    git_here = new._git
    monkeypatch.setattr(
        new, "_git",
        lambda *command, where: git_here(*command, where=where)
        + ("models/gone.py\0" if "ls-files" in command else ""),
    )  # fmt: skip
    new.new("mine", tmp_path / "there")
    kept = git(tmp_path / "there", "ls-files")
    assert "models/classifier.py" in kept and "models/gone.py" not in kept


def test_the_files_of_a_submodule_come_too(monkeypatch: pytest.MonkeyPatch, tmp_path: Path) -> None:
    for name, value in SOMEBODY.items():
        monkeypatch.setenv(name, value)
    library, project = tmp_path / "library", tmp_path / "project"
    library.mkdir()
    (library / "code.py").touch()
    (library / "caf\udce9").touch()  # whose name is no UTF-8
    git(library, "init", "-q")
    git(tmp_path, "clone", "-q", str(ROOT), "project")
    for folder in (library, project):
        if folder == project:
            add = ["submodule", "add", "-q", str(library)]
            git(project, "-c", "protocol.file.allow=always", *add)
        git(folder, "add", "--all")
        git(folder, "commit", "-qm", "made")
    monkeypatch.setattr(new, "ROOT", project)
    new.new("mine", tmp_path / "mine")
    kept = git(tmp_path / "mine", "ls-files")
    assert (tmp_path / "mine" / "library" / "caf\udce9").is_file()
    assert "library/code.py" in kept and ".gitmodules" not in kept
    git(tmp_path, "clone", "-q", "project", "without")  # where its folder is empty
    monkeypatch.setattr(new, "ROOT", tmp_path / "without")
    new.new("bare", tmp_path / "bare")
    assert not [name for name in git(tmp_path / "bare", "ls-files") if "library" in name]


@pytest.mark.skipif(os.geteuid() != 0, reason="gives a folder to another user: needs root")
def test_a_checkout_of_another_user(monkeypatch: pytest.MonkeyPatch, tmp_path: Path) -> None:
    """As in a container."""
    (tmp_path / "a.py").touch()
    git(tmp_path, "init", "-q")
    git(tmp_path, "add", "a.py")
    for path in (tmp_path, tmp_path / ".git"):
        os.chown(path, 12345, 12345)
    monkeypatch.setenv("GIT_CONFIG_COUNT", "0")
    assert new._git("ls-files", where=tmp_path) == "a.py\n"


def test_what_git_does_not_track_is_told(
    monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    monkeypatch.setattr(new, "new", lambda name, folder: 3)
    monkeypatch.setattr(new, "_git", lambda *command, where: "a b.py\nc.py\nd.py\ne.py\n")
    monkeypatch.setattr("sys.argv", ["new.py", "mine"])
    assert new.main() == 0
    assert (
        "left    what git does not track: a b.py, c.py, d.py and 1 more" in capsys.readouterr().out
    )


def test_nothing_is_left_when_git_does_not_know_who_commits(tmp_path: Path) -> None:
    nobody = {"GIT_CONFIG_COUNT": "2", "GIT_CONFIG_KEY_1": "user.useConfigOnly",
              "GIT_CONFIG_VALUE_1": "true"}  # fmt: skip
    for name in SOMEBODY:
        nobody[name] = ""
    done = run(["make", "new", "NAME=mine", f"DIR={tmp_path}/mine"], **nobody)
    assert done.returncode == 2 and "error: git commit: " in done.stdout, done.stdout
    assert "git config --global user.email" in done.stdout and not list(tmp_path.iterdir())

"""Copy this repository into a project of your own, whose git history is one commit.

    make new NAME=my_project                    into ../my_project
    make new NAME=my_project DIR=/data/mine

What git tracks is copied, as it stands here, except tests/test_new.py. Results of this repository
stay behind: pictures, measurements, the entries of the changelog, and of README and docs/ what
stands between `<!-- ours -->` and `<!-- /ours -->`. The license stays, as it asks for. No
environment is copied: `make train` makes one there, with the Horovod that was built here. Needs
Python and git alone.
"""

from __future__ import annotations

import argparse
import os
import re
import shutil
import subprocess
import sys
import tempfile
from pathlib import Path

from runs.refusal import Refusal, refuse

ROOT = Path(__file__).resolve().parent
LEFT_OUT = ("benchmarks/results/", "docs/images/", "tests/test_new.py", ".gitmodules")
MEASURED = re.compile(
    r"(?<=<!-- scaling: written by make bench-readme -->\n).*?(?=<!-- scaling: end -->)", re.S
)
NOTHING = "\nNo result of `make bench` is in `benchmarks/results/` yet.\n\n"
OURS = re.compile(r"<!-- ours -->.*?<!-- /ours -->\n*", re.DOTALL)


def new(name: str, folder: Path) -> int:
    """Make the copy and return the number of its files.

    Raises:
        Refusal: for a bad name, a folder that exists, or when git fails; nothing is left then.
    """
    if not re.fullmatch("[A-Za-z][A-Za-z0-9_-]*", name):
        raise Refusal(
            f"NAME={name}: a letter, then letters, digits, - and _ are needed, as my_project"
        )
    if folder.exists():
        raise Refusal(f"DIR={folder}: it is there already; give the new folder itself, in that one")
    if folder.is_relative_to(ROOT):
        raise Refusal(f"DIR={folder}: this is within the repository itself; give another")
    # The files of a submodule too; one that is not checked out is a folder.
    files = _git("ls-files", "-z", "--recurse-submodules", where=ROOT).split("\0")
    kept = [
        f for f in files
        if f and not f.startswith(LEFT_OUT) and os.path.lexists(ROOT / f)
        if not (ROOT / f).is_dir() or (ROOT / f).is_symlink()
    ]  # fmt: skip
    folder.parent.mkdir(parents=True, exist_ok=True)
    with tempfile.TemporaryDirectory(dir=folder.parent, prefix=f".{name}-") as staged:
        copy = Path(staged) / name
        for file in kept:
            (copy / file).parent.mkdir(parents=True, exist_ok=True)
            shutil.copy2(ROOT / file, copy / file, follow_symlinks=False)
        _make_theirs(copy, name)
        _git("init", "--quiet", where=copy)
        _git("add", "--all", "--force", where=copy)
        _git("commit", "--quiet", "--message", f"{name}: made from {_origin()}", where=copy)
        copy.rename(folder)
    return len(kept)


def _make_theirs(copy: Path, name: str) -> None:
    """Give the copy its owner's title, and take our results out of it."""
    readme = MEASURED.sub(NOTHING, OURS.sub("", (copy / "README.md").read_text()))
    title, _, rest = readme.partition("\n")
    made = f"Made from *{title.removeprefix('# ')}*, {_origin()}. What it is for: say it here.\n"
    (copy / "README.md").write_text(f"# {name}\n\n{made}{rest}")
    for page in (copy / "docs").glob("*.md"):
        page.write_text(OURS.sub("", page.read_text()))
    head = (copy / "CHANGELOG.md").read_text().partition("\n## ")[0]
    (copy / "CHANGELOG.md").write_text(f"{head}\n## Unreleased\n\n- Made from {_origin()}.\n")
    notes = (copy / "benchmarks" / "NOTES.md").read_text().partition("\n## ")[0]
    (copy / "benchmarks" / "NOTES.md").write_text(notes)


def _origin() -> str:
    commit = _git("describe", "--always", "--dirty", where=ROOT).strip()
    return f"{ROOT.name} at {commit}"


def _git(*command: str, where: Path) -> str:
    # safe.directory: in a container the checkout may be another user's.
    line = ["git", "-c", "safe.directory=*", *command]
    try:
        # Names of files may be no UTF-8.
        done = subprocess.run(
            line, cwd=where, capture_output=True, encoding="utf-8", errors="surrogateescape"
        )
    except FileNotFoundError:
        raise Refusal("git is missing: install it") from None
    if done.returncode:
        told = (done.stderr.strip().splitlines() or ["it failed"])[-1]
        who = "; say who you are: git config --global user.email you@example.org, and user.name"
        raise Refusal(f"git {command[0]}: {told}{who if command[0] == 'commit' else ''}")
    return done.stdout


def main() -> int:
    parser = argparse.ArgumentParser(prog="make new", description=__doc__)
    parser.formatter_class = argparse.RawDescriptionHelpFormatter
    parser.add_argument("name", nargs="?", default="")
    parser.add_argument("folder", nargs="?", default="", help="../NAME by default")
    asked = parser.parse_args()
    try:
        folder = Path(asked.folder).expanduser() if asked.folder else ROOT.parent / asked.name
        count = new(asked.name, folder.resolve())
    except Refusal as refusal:
        refuse(str(refusal), a_rank=False)
    except OSError as error:
        refuse(f"{error.filename or 'writing'}: {error.strerror}", a_rank=False)
    print(f"new     {folder}: {count} files, one commit")
    if untracked := _git("ls-files", "--others", "--exclude-standard", where=ROOT).splitlines():
        more = f" and {len(untracked) - 3} more" if len(untracked) > 3 else ""
        print(f"left    what git does not track: {', '.join(untracked[:3])}{more}")
    print("next    there: make train; your model and data as its README says")
    return 0


if __name__ == "__main__":
    sys.exit(main())

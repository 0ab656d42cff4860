"""Copy the code to all hosts, to the path that it has here; what is not here is deleted there.

    python -m cluster.sync -H node1:4,node2:4 [--dry-run] [--env]

Data, runs, .git and secrets are neither copied nor deleted (.syncignore, .gitignore). --env copies
the environment too. All hosts are copied to at once; when one fails the others go on, and it is
named at the end. Hosts that share a folder among them disturb each other; where that happened they
have a second turn, one after the other.
"""

from __future__ import annotations

import argparse
import contextlib
import functools
import os
import re
import shlex
import shutil
import signal
import subprocess
import sys
import tempfile
import threading
from concurrent.futures import ThreadPoolExecutor
from pathlib import Path
from typing import IO, NoReturn

from cluster.agent import descendants
from cluster.environment import ROOT, environment_folder
from cluster.hostfile import add_arguments, chosen
from cluster.hosts import SSH_SECONDS, Host, Refusal
from cluster.signals import interrupt_at_signals
from cluster.ssh import diagnose

SHOWN = 20  # changes that are listed for a host
# Says what is at the path: shared (it has the file that we just made), checkout, empty, missing or
# other.
LOOK = """
echo  # below what a login shell may say
cd {root} 2>/dev/null || {{ [ -e {root} ] && echo other || echo missing; exit 0; }}
if [ -e template.py ] && [ -d strategies ]; then
  [ -e {mark} ] && echo shared || echo checkout
elif [ -z "$(ls -A)" ]; then echo empty; else echo other; fi
command -v rsync >/dev/null || echo no-rsync
"""
LOOK_SECONDS = SSH_SECONDS + 40  # as the doctor's: a login shell on a slow file system
SILENT_SECONDS = 300  # after which an rsync gives up that neither sends nor receives
KINDS = {"+": "new", "*": "changed", "-": "deleted"}
# Files that git may track, but no run reads.
UNREAD = (".md", ".rst", ".png", ".svg", ".jpg", ".pdf")
RESULTS = "benchmarks/results/"
# Not copied, but deleted with their folder (rsync's p). Other ignored files keep it: they may be
# somebody's work.
CACHES = ("__pycache__", ".mypy_cache", ".ruff_cache", ".pytest_cache", ".hypothesis")
leaving = threading.Event()  # from Ctrl-C on: what fails now, fails because we end it


class Disturbed(Refusal):
    """Files came or went during the copy, as where another host has the same folder."""


def sync(host: Host, mark: str, dry_run: bool, env: bool) -> list[str]:
    """Copy to one host; lines that say what changed. `mark` is a file that only this folder has.

    Raises:
        Refusal: with what prevents it, and what to do.
    """
    if host.is_here:
        return ["this host"]
    script = LOOK.format(root=shlex.quote(str(ROOT)), mark=mark)
    words = _run(host.command(script), host, LOOK_SECONDS).split()
    state = next((word for word in reversed(words) if word != "no-rsync"), "")
    if state == "shared":
        return ["shares this file system: nothing to copy"]
    if words[-1:] == ["no-rsync"]:
        raise Refusal(f"{host.name}: rsync is missing there: sudo apt-get install rsync")
    if state == "other":
        raise Refusal(
            f"{host.name}: {ROOT} holds something else there: move it away, to lose nothing"
        )
    if state not in ("checkout", "empty", "missing"):  # as where sshd has a ForceCommand
        look = f"ssh {host.destination} echo hello"
        raise Refusal(f"{host.name}: does not run what it is told to: {look}")
    # By content (--checksum), as an edit may keep size and time.
    options, filters = rules()
    changes = _rsync(host, ROOT, [*options, "--checksum"], dry_run, filters)
    counts = [f"{len(names)} {KINDS[sign]}" for sign, names in changes.items() if names]
    total = (["would be: "] if dry_run and counts else [""])[0] + (", ".join(counts) or "the same")
    lines = [total + (f" (there was no {ROOT})" if state == "missing" else "")]
    items = [f"  {sign} {name}" for sign, names in changes.items() for name in names]
    lines += items[:SHOWN] + ([f"  and {len(items) - SHOWN} more"] if len(items) > SHOWN else [])
    return lines + (_environment(host, dry_run) if env else [])


def synced() -> set[str] | None:
    """What is copied, as `_listed` names it; None where rsync is missing."""
    try:
        return _listed(*rules())
    except FileNotFoundError:
        return None


@functools.cache
def rules() -> tuple[list[str], str]:
    """Options and input of rsync, for what is not copied: what .syncignore names and git ignores.

    rsync does not know `!` in a .gitignore, nor files that were added to git although ignored: the
    input names each file that git tracks or would add and rsync would leave out.
    """
    stays = ["--exclude=/.sync-*", "--exclude-from=.syncignore"]
    # As options they protect files there even before that side has our .gitignore. Where -p does
    # not count, R does, ahead of the same name in a .gitignore.
    ignored = [f"--filter={rule}" for name in CACHES for rule in (f"-p {name}", f"R {name}/***")]
    ignored += [f"--filter=.- {file}" for file in _patterns()] + ["--filter=:- .gitignore"]
    copied = _listed([*stays, *ignored])
    lost = (_known_to_git("--cached", "--others") & _listed(stays)) - copied
    folders = _folders(lost)
    kept = [f"+ /{_literally(name)}" for name in sorted(lost | folders)]
    # A folder is named only to get at such files: nothing else in it is copied.
    kept += [f"- /{_literally(name)}*" for name in sorted(folders - copied)]
    # As input, since they may be too many for a command line.
    return [*stays, "--filter=. -", *ignored], "".join(f"{rule}\n" for rule in kept)


def _listed(options: list[str], filters: str = "") -> set[str]:
    """The files here that rsync would copy, and their folders, which end with a slash."""
    done = subprocess.run(
        ["rsync", "-r8", "--list-only", *options, "./"], input=filters,
        cwd=ROOT, capture_output=True, encoding="utf-8", errors="replace",
    )  # fmt: skip
    # A line: permissions, size, date, time, name.
    lines = [line for line in done.stdout.splitlines() if line[:1] in ("-", "d")]
    return {line.split(None, 4)[4] + "/" * (line[0] == "d") for line in lines}


@functools.cache
def tracked() -> set[str]:
    """The files that git tracks and a run may read; none outside of a repository."""
    names = _known_to_git("--cached")
    return {name for name in names if not name.endswith(UNREAD) and not name.startswith(RESULTS)}


def _patterns() -> list[Path]:
    """The files with what git ignores in all of this checkout: for all, this clone, this user."""
    clone = _git("rev-parse", "--git-path", "info/exclude").strip()
    user = _git("config", "--type=path", "--get", "core.excludesFile").strip()
    config = os.environ.get("XDG_CONFIG_HOME") or "~/.config"
    files = [ROOT / ".gitignore", ROOT / clone, Path(user or f"{config}/git/ignore").expanduser()]
    return [file for file in files if file.is_file()]


def _known_to_git(*which: str) -> set[str]:
    """Files that git tracks (--cached), or would add (--others)."""
    names = _git("ls-files", "-z", *which, "--exclude-standard").split("\0")
    return {name for name in names if name}


def _git(*words: str) -> str:
    """What git prints; nothing where there is no git, or no repository.

    Raises:
        Refusal: for a repository that git cannot read.
    """
    # Without GIT_*, which name another repository when a git hook runs us. safe.directory: it may
    # be another user's checkout, as in a container.
    environment = {name: os.environ[name] for name in os.environ if not name.startswith("GIT_")}
    environment["LC_ALL"] = "C"  # for messages that are not translated
    try:
        done = subprocess.run(
            ["git", "-c", "safe.directory=*", *words],
            cwd=ROOT, env=environment, capture_output=True, encoding="utf-8", errors="replace",
        )  # fmt: skip
    except FileNotFoundError:
        return ""
    if done.returncode and done.stderr and "not a git repository" not in done.stderr:
        raise Refusal(f"{ROOT}: {done.stderr.strip().splitlines()[0]}")
    return done.stdout


def _folders(names: set[str]) -> set[str]:
    return {f"{folder}/" for name in names for folder in list(Path(name).parents)[:-1]}


def _literally(name: str) -> str:
    """A pattern of rsync's that matches this name only."""
    return re.sub(r"([*?\[\\])", r"\\\1", name) if re.search(r"[*?\[]", name) else name


def _environment(host: Host, dry_run: bool) -> list[str]:
    """Copy the environment of this checkout, and try whether it runs there."""
    folder = environment_folder()
    if ROOT not in folder.parents:
        raise Refusal(
            f"{host.name}: the environment {folder} is outside of {ROOT}: make it there by "
            "the same commands as here"
        )
    changes = _rsync(host, folder, [], dry_run)
    count = sum(map(len, changes.values()))
    if dry_run:
        return [f"environment: {count} files would be copied"]
    python = shlex.quote(sys.executable)
    try:
        _run(host.command(f"{python} -c 'import torch, horovod.torch, hydra'"), host)
    except Refusal as error:
        base = os.path.realpath(sys.executable)
        raise Refusal(
            f"{error}; the environment needs Python {sys.version.split()[0]} at {base} there too"
        ) from None
    return [f"environment: {count} files copied, it runs"]


def _rsync(
    host: Host, folder: Path, options: list[str], dry_run: bool, filters: str = ""
) -> dict[str, list[str]]:
    """Run rsync; the files that changed, by the keys of KINDS. A missing folder is made."""
    ssh = shlex.join(host.ssh_options())
    path = shlex.quote(str(folder))
    remote_rsync = "rsync" if dry_run else f"mkdir -p {path} && rsync"
    # -O: only its owner, maybe a colleague, can set a folder's times. -s: else rsync before 3.2.4
    # splits the path at its blanks there, and deletes in part of it.
    output = _run([
        "rsync", "-azs", "-O", "--delete", f"--timeout={SILENT_SECONDS}", "--out-format=%i %n",
        f"--rsync-path={remote_rsync}", "-e", ssh, *options, *(["--dry-run"] if dry_run else []),
        f"{folder}/", f"{host.name}:{folder}/",
    ], host, stdin=filters)  # fmt: skip
    changes: dict[str, list[str]] = {"+": [], "*": [], "-": []}
    for line in output.splitlines():
        flags, _, name = line.partition(" ")
        if name.endswith("/") and not flags.startswith("*deleting"):
            continue  # a folder: what is in it is listed
        if flags.startswith("*deleting"):
            changes["-"].append(name.strip())
        elif flags.startswith(("<f+", "cL+")):
            changes["+"].append(name)
        elif re.match(r"[<c][fL].*[sc+]|[<c]L", flags):
            changes["*"].append(name)  # not where only times differ
    return changes


def _run(command: list[str], host: Host, seconds: float | None = None, stdin: str = "") -> str:
    try:
        done = subprocess.run(
            command, cwd=ROOT, capture_output=True, encoding="utf-8", errors="replace",
            timeout=seconds, input=stdin, start_new_session=True,  # Ctrl-C ends it by _leave
        )  # fmt: skip
    except subprocess.TimeoutExpired:
        raise Refusal(
            f"{host.name}: no answer within {seconds:g} s: "
            f"look there: ssh {host.destination} uptime"
        ) from None
    if done.returncode and command[0] == "rsync":
        kind = Disturbed if done.returncode in (23, 24) else Refusal
        raise kind(f"{host.name}: {_rsync_failed(host, done.returncode, done.stderr)}")
    if done.returncode:
        raise Refusal(f"{host.name}: {diagnose(host, done.returncode, done.stderr)}")
    return done.stdout


def _rsync_failed(host: Host, status: int, errors: str) -> str:
    """Why an rsync failed, and what to do."""
    # Of many lines the first that names a cause; the last one only counts them.
    holds = "could not make way for|cannot delete non-empty"
    cause = rf"^(?:rsync.*(?:failed|No space)|mkdir: |{holds}).*$"
    causes = re.findall(cause, errors, re.MULTILINE)
    if status == 11 and not causes:  # the receiver's words may get lost on the way
        return f"cannot write there, as where a disk is full: ssh {host.destination} df -h {ROOT}"
    if "is your shell clean" in errors:
        why = "its login shell prints, as by an echo in .bashrc, what rsync cannot read: "
        return f"{why}ssh {host.destination} true must print nothing"
    why = causes[0].strip() if causes else str(diagnose(host, status, errors))
    if re.match(holds, why):
        why += ": it is a folder there, with what .syncignore or .gitignore protects"
    return why


def _leave(mark: IO[bytes]) -> NoReturn:
    """End at Ctrl-C without waiting for hosts, and leave no process and no mark behind."""
    leaving.set()
    for pid in descendants():  # each ssh and rsync
        with contextlib.suppress(ProcessLookupError):
            os.kill(pid, signal.SIGTERM)
    mark.close()
    os._exit(130)


def main() -> int:
    parser = argparse.ArgumentParser(prog="python -m cluster.sync", description=__doc__)
    parser.formatter_class = argparse.RawDescriptionHelpFormatter
    add_arguments(parser)
    parser.add_argument("--dry-run", action="store_true", help="only say what would change")
    parser.add_argument("--env", action="store_true", help="the environment too")
    arguments = parser.parse_args()
    interrupt_at_signals()
    failed: list[str] = []
    disturbed: list[Host] = []

    def one(host: Host, alone: bool = False) -> None:
        if leaving.is_set():
            return
        try:
            lines = sync(host, Path(mark.name).name, arguments.dry_run, arguments.env)
        except (Refusal, OSError) as error:
            if leaving.is_set():
                return
            if isinstance(error, Disturbed) and not alone:
                disturbed.append(host)
                return
            failed.append(str(error) if isinstance(error, Refusal) else f"{host.name}: {error}")
            lines = ["FAILED"]
        try:
            print("\n".join([f"{host.name:<12}  {lines[0]}", *lines[1:]]), flush=True)
        except BrokenPipeError:  # make sync | head: the other hosts get their copy all the same
            os.dup2(os.open(os.devnull, os.O_WRONLY), sys.stdout.fileno())

    try:
        hosts = chosen(arguments)
        if shutil.which("rsync") is None:
            raise Refusal("rsync is missing here: sudo apt-get install rsync")
        mark = tempfile.NamedTemporaryFile(dir=ROOT, prefix=f".sync-{os.getpid()}-")  # noqa: SIM115
    except Refusal as error:
        print(f"error: {error}", file=sys.stderr)
        return 2
    except OSError as error:
        why = f"{error.strerror}, where a file is made meanwhile: see ls -ld {ROOT}"
        print(f"error: {ROOT} cannot be written: {why}", file=sys.stderr)
        return 2
    with mark, ThreadPoolExecutor(max_workers=8) as pool:  # see cluster/ssh.py
        try:
            list(pool.map(one, hosts))
            for host in disturbed:
                one(host, alone=True)
        except KeyboardInterrupt:
            _leave(mark)
    for line in failed:
        print(f"error: {line}", file=sys.stderr)
    return int(bool(failed))


if __name__ == "__main__":
    sys.exit(main())

"""Where this checkout is; make, inspect and check a Python environment, run commands with a log.

Standard library only, as cluster/install.py runs before there is anything else.
"""

from __future__ import annotations

import contextlib
import fcntl
import json
import os
import re
import shutil
import subprocess
import sys
import time
from collections.abc import Iterator
from pathlib import Path

ROOT = Path(__file__).resolve().parent.parent
LOG = ROOT / "logs" / "install.log"
PYTHONS = ["3.13", "3.12", "3.11", "3.10"]

# Run by the environment's own interpreter, in 0.1 s: nothing heavy is imported.
INSPECT = """
import importlib.metadata as m, importlib.util, json, platform, re, sys, sysconfig
spec = importlib.util.find_spec("torch")
try:  # a torch whose installation was interrupted counts as missing
    text = open(spec.origin.replace("__init__.py", "version.py")).read()
except (AttributeError, OSError):
    text = ""
cuda = re.search(r"^cuda.*= '([0-9.]+)'", text, re.M)
packages = {  # of two versions, as where a venv sees the system's packages, the first is imported
    re.sub("[-_.]+", "-", d.metadata["Name"]).lower(): d.version
    for d in reversed(list(m.distributions())) if d.metadata["Name"]
}
if not text:
    packages.pop("torch", None)
print(json.dumps({
    "python": platform.python_version(), "prefix": sys.prefix,
    "base": getattr(sys, "_base_executable", sys.executable),
    "externally_managed": sys.prefix == sys.base_prefix and __import__("os").path.exists(
        sysconfig.get_path("stdlib") + "/EXTERNALLY-MANAGED"),
    "site": sysconfig.get_path("purelib"), "include": sysconfig.get_path("include"),
    "cuda": cuda and cuda[1],
    "packages": packages,
}))
"""


class InstallError(Exception):
    """What is missing or went wrong and what to do about it, in one line."""


def environment_folder() -> Path:
    """The folder of this Python's environment. It may be a link itself; others are resolved."""
    prefix = Path(sys.prefix)
    return prefix.parent.resolve() / prefix.name


def make_command(what: str) -> str:
    """How to type a target of the Makefile: with PYTHON= where this is not our .venv."""
    ours = environment_folder() == ROOT / ".venv"
    return f"make {what}" + ("" if ours else f" PYTHON={sys.executable}")


def make_environment(folder: Path) -> None:
    """A virtual environment of this interpreter, or else of the first on the PATH that fits."""
    candidates = [sys.executable, "python3", *(f"python{version}" for version in PYTHONS)]
    for name in candidates:
        python = shutil.which(name)
        with contextlib.suppress(InstallError):  # a name that does not run, as pyenv's may not
            if python and inspect(python)["python"].rsplit(".", 1)[0] in PYTHONS:
                break
    else:
        raise InstallError(
            "no Python from 3.10 to 3.13 on the PATH: sudo apt-get install python3 python3-venv; "
            "where that is newer, uv python install 3.13 (docs.astral.sh/uv)"
        )
    assert python
    folder = folder.resolve()  # venv refuses a link, as of .venv to a larger disk
    if (link := folder / "bin" / "python").is_symlink() and not link.exists():
        raise InstallError(
            f"the Python that {folder} was made with is gone: rm -r {folder}, then make"
        )
    made_here = not folder.exists()
    try:
        result = subprocess.run([python, "-m", "venv", str(folder)], capture_output=True, text=True)
        if result.returncode and "ensurepip" in result.stdout + result.stderr:
            version = inspect(python)["python"].rsplit(".", 1)[0]
            raise InstallError(
                f"{python} cannot make virtual environments: "
                f"sudo apt-get install python3-venv (or python{version}-venv)"
            )
        if result.returncode:
            raise InstallError(f"{python} -m venv {folder}: {last_line(result.stderr)}")
    except BaseException:  # Ctrl-C too
        if made_here:
            shutil.rmtree(folder, ignore_errors=True)
        raise


def inspect(python: str) -> dict:
    """Version, folders and packages of an interpreter's environment: what INSPECT prints."""
    try:
        result = subprocess.run([python, "-c", INSPECT], capture_output=True, text=True)
    except OSError as error:
        raise InstallError(f"PYTHON={python}: {error.strerror}; give an interpreter") from None
    if result.returncode != 0:
        raise InstallError(f"PYTHON={python} does not run: {last_line(result.stderr)}")
    return json.loads(result.stdout)


@contextlib.contextmanager
def locked(file: Path, message: str) -> Iterator[None]:
    """Hold the lock of a file; where another process holds it, print `message` and wait."""
    file.parent.mkdir(parents=True, exist_ok=True)
    with file.open("w") as handle:
        with contextlib.suppress(OSError):  # on a file system without locks we go on without
            try:
                fcntl.flock(handle, fcntl.LOCK_EX | fcntl.LOCK_NB)
            except BlockingIOError:
                print(message, flush=True)
                fcntl.flock(handle, fcntl.LOCK_EX)
        yield


def check_python(info: dict) -> None:
    version = info["python"].rsplit(".", 1)[0]
    if version not in PYTHONS:
        raise InstallError(
            f"Python {info['python']} in {info['prefix']}: the pinned packages need 3.10 to 3.13; "
            "give another with PYTHON="
        )
    if info["externally_managed"]:
        raise InstallError(
            f"{info['prefix']} belongs to the operating system, whose pip installs nothing there; "
            "leave PYTHON= out to get a .venv here, or give the interpreter of an environment"
        )
    site = Path(info["site"])
    if not os.access(next(folder for folder in (site, *site.parents) if folder.exists()), os.W_OK):
        raise InstallError(  # pip would go on in ~/.local, where the build does not find torch
            f"you may not write to {site}: leave PYTHON= out to get a .venv here, made of the "
            "python3 on the PATH, or give the interpreter of an environment of your own"
        )


def check_disk(folder: Path, gigabytes: float, why: str) -> None:
    folder.mkdir(parents=True, exist_ok=True)
    free = shutil.disk_usage(folder).free / 1e9
    if free < gigabytes:
        raise InstallError(
            f"{free:.1f} GB free for {folder}, {gigabytes:.1f} GB needed: {why}; "
            "free some, or put the checkout, WHEELS= or TMPDIR= on a larger disk"
        )


def run_logged(title: str | None, command: list[str], env: dict | None = None) -> str:
    """Run a command with its output in the log, the time so far on the terminal; its output.

    Raises:
        InstallError: with the telling lines of the output, when the command fails.
    """
    started = time.monotonic()
    terminal = sys.stdout.isatty()
    if title:
        print(f"  {title} ...", end="" if terminal else "\n", flush=True)
    with LOG.open("a") as log:
        log.write(f"\n$ {' '.join(command)}\n")
        log.flush()
        start = log.tell()
        process = subprocess.Popen(command, stdout=log, stderr=subprocess.STDOUT, env=env)
        try:
            while True:
                try:
                    code = process.wait(timeout=1)
                    break
                except subprocess.TimeoutExpired:
                    if title and terminal:
                        elapsed = time.monotonic() - started
                        print(f"\r  {title} ... {elapsed:.0f} s", end="", flush=True)
        except KeyboardInterrupt:
            process.terminate()
            process.wait()
            raise
    if title and terminal:
        print(flush=True)
    with LOG.open(errors="replace") as log:
        log.seek(start)
        output = log.read()
    if code != 0:
        raise InstallError(f"{title or Path(command[0]).name + ' ' + command[1]} failed, "
                           f"see {shown(LOG)}:\n" + telling_lines(output))  # fmt: skip
    return output


def telling_lines(output: str) -> str:
    """The last lines of a build's output that name an error, else its last ones; at most 8."""
    lines = [line.rstrip() for line in output.splitlines() if line.strip()]
    telling = [line for line in lines if re.search(r"\berror\b|cannot|No space|Killed", line, re.I)]
    return "\n".join(f"    {line[:300]}" for line in (telling or lines)[-8:])


def last_line(text: str) -> str:
    return (text.strip().splitlines() or ["it ended without a word"])[-1]


def shown(path: Path) -> str:
    """A path as short as possible: relative to this folder, or with ~."""
    if path.is_relative_to(ROOT):
        return str(path.relative_to(ROOT))
    home = Path.home()  # of a container's user without a name it may be /
    return f"~/{path.relative_to(home)}" if home.name and path.is_relative_to(home) else str(path)

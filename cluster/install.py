"""Make an environment in which torch, Lightning and Horovod work together.

    python3 -m cluster.install                     .venv beside this folder, made when missing
    python3 -m cluster.install --python PYTHON     into the environment of this interpreter
    python3 -m cluster.install --dev --mpi         with the development tools; Horovod with MPI too

Horovod 0.28.1, the last release, does not build by itself beside torch 2.1 or newer:
cluster/wheel.py builds it. The wheel is kept in ~/.cache/horovod-wheels, from where every further
environment of this user takes it, also by `pip install -r requirements.txt`. Nothing is installed
that needs root, and no driver or compiler: where one is missing, the message names its package.
For Python 3.10 to 3.13 on Linux x86-64; standard library only.
"""

from __future__ import annotations

import argparse
import contextlib
import platform
import re
import sys
import time
from collections.abc import Iterator
from pathlib import Path

from cluster.environment import (
    LOG,
    ROOT,
    InstallError,
    check_disk,
    check_python,
    inspect,
    locked,
    make_environment,
    run_logged,
    shown,
)
from cluster.signals import interrupt_at_signals
from cluster.wheel import WHEELS, build_wheel, check_compilers, find_wheel, python_tag, wheel_label

ALL_REDUCE = """
import sys, torch, horovod.torch as hvd
hvd.init()
total = hvd.allreduce(torch.full((1000,), float(hvd.rank() + 1)), op=hvd.Sum)
sys.exit(0 if hvd.size() == 2 and bool((total == 3).all()) else 1)
"""


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__.split("\n")[0])
    parser.add_argument("--python", help="interpreter of the environment (default: .venv's)")
    parser.add_argument("--dev", action="store_true", help="install requirements-dev.txt as well")
    parser.add_argument("--mpi", action="store_true", help="build Horovod with MPI as well")
    args = parser.parse_args()
    interrupt_at_signals()
    try:
        install(args.python, args.dev, args.mpi)
    except InstallError as error:
        sys.exit(f"install: {error}")
    except OSError as error:
        sys.exit(f"install: {error.filename or 'writing'}: {error.strerror}")
    except KeyboardInterrupt:
        sys.exit("install: interrupted; run it again to go on")


def install(python: str | None, dev: bool, mpi: bool) -> None:
    if sys.platform != "linux" or platform.machine() != "x86_64":
        raise InstallError(
            f"this is {sys.platform} on {platform.machine()}; the pinned wheels of torch and the "
            "build of Horovod are for Linux on x86-64"
        )
    requirements = [ROOT / "requirements.txt"] + [ROOT / "requirements-dev.txt"] * dev
    pins = {name: version for file in requirements for name, version in read_pins(file)}
    for name in ("torch", "horovod"):
        if not pins.get(name):
            raise InstallError(
                f"requirements.txt: write {name}==VERSION, as Horovod is built for one torch"
            )

    venv = ROOT / ".venv"
    interpreter = python or str(venv / "bin" / "python")
    if (python or Path(interpreter).exists()) and not unmet(inspect(interpreter), pins, mpi):
        return
    with locked(LOG.with_suffix(".lock"), "another installation runs here; waiting for it"):
        if not Path(interpreter).exists() and not python:
            make_environment(venv)
        info = inspect(interpreter)
        if not unmet(info, pins, mpi):
            return
        started = time.monotonic()
        LOG.write_text("")
        print(f"Installing into {info['prefix']} (log: {shown(LOG)})", flush=True)
        check_python(info)
        if "pip" not in info["packages"]:
            if python:
                raise InstallError(f"{info['prefix']} has no pip: {python} -m ensurepip")
            # Its making was interrupted; made again, it gets what it lacks.
            run_logged(None, [info["base"], "-m", "venv", str(venv.resolve())])
        install_packages(interpreter, info, pins, requirements, mpi)
        print(f"Ready in {time.monotonic() - started:.0f} s: {info['prefix']}", flush=True)


def install_packages(
    python: str, info: dict, pins: dict[str, str], requirements: list[Path], mpi: bool
) -> None:
    """torch, then Horovod beside it, then all else; a Horovod that is new is tried."""
    others = [python, "-m", "pip", "install"]
    for file in requirements:
        others += ["-r", str(file)]
    if not {"torch", "horovod"}.intersection(unmet(info, pins, mpi)):
        run_logged("packages that are missing", others)
        return
    if not fits(info["packages"].get("torch"), pins["torch"]):
        check_disk(Path(info["prefix"]), 6, "torch with its CUDA libraries takes 5 GB")
        if not any(WHEELS.glob(f"*/horovod-{pins['horovod']}+*-{python_tag(info)}-*.whl")):
            check_compilers(info)  # before the large download
        run_logged(
            f"torch {pins['torch']} with its CUDA libraries: 1 to 10 minutes, by the network",
            [python, "-m", "pip", "install", f"torch=={pins['torch']}"],
        )
        info = inspect(python)
        if "torch" not in info["packages"]:
            raise InstallError(
                f"{info['prefix']} has half of a torch: remove that folder, then run this again"
            )
    wheel = find_wheel(info, pins["horovod"], mpi)
    if wheel is None:
        wheel = build_wheel(python, info, pins["horovod"], mpi)
    else:
        print(f"  Horovod {pins['horovod']}: built before, {shown(wheel)}", flush=True)
    run_logged("the other packages: about a minute", [*others, str(wheel)])
    try:
        verify(python, inspect(python), mpi)
    except BaseException as error:  # Ctrl-C and SIGTERM too
        # So that neither the next call nor the next environment takes it for good.
        if isinstance(error, InstallError):
            with contextlib.suppress(OSError):  # another user's, which we may only read
                wheel.unlink()
        run_logged(None, [python, "-m", "pip", "uninstall", "-y", "horovod"])
        raise


def read_pins(file: Path) -> Iterator[tuple[str, str]]:
    """The packages of a requirements file, each with the version of `name==version`, else "".

    Options, and lines with a marker (`; python_version < "3.12"`) or without a name, are left out:
    pip deals with them when it installs something else.
    """
    for line in file.read_text().splitlines():
        text = re.sub(r"(^|\s)#.*", "", line).strip()
        match = re.fullmatch(
            r"(\w[\w.-]*)\s*(?:\[.*\])?\s*(?:==\s*([^\s,*;]+)|[@<>=!~][^;]*)?", text
        )
        if match:
            yield re.sub("[-_.]+", "-", match[1]).lower(), match[2] or ""


def fits(version: str | None, pin: str) -> bool:
    """2.11.0+cu130 fits the pins "", 2.11.0 and 2.11.0+cu130."""
    return version is not None and pin in ("", version, version.split("+")[0])


def unmet(info: dict, pins: dict[str, str], mpi: bool) -> list[str]:
    """The packages that this environment lacks, or has in another version than the pinned one."""
    packages = info["packages"]
    wrong = [name for name, pin in pins.items() if not fits(packages.get(name), pin)]
    label = packages.get("horovod", "").partition("+")[2]
    if label.startswith(wheel_label(info)) and (not mpi or "mpi" in label.split(".")):
        return wrong
    return [*wrong, "horovod"]


def verify(python: str, info: dict, mpi: bool) -> None:
    """See that Horovod has what it was built with, and that two processes can add tensors."""
    horovodrun = [python, "-m", "horovod.runner.launch"]
    report = run_logged("checking Horovod", [*horovodrun, "--check-build"])
    for feature in ["PyTorch", "Gloo"] + ["NCCL"] * bool(info["cuda"]) + ["MPI"] * mpi:
        if f"[X] {feature}" not in report:
            raise InstallError(f"horovodrun --check-build shows no {feature}; see {shown(LOG)}")
    run_logged(
        "an all-reduce between 2 processes",
        [*horovodrun, "-np", "2", "-H", "localhost:2", python, "-c", ALL_REDUCE],
    )


if __name__ == "__main__":
    main()

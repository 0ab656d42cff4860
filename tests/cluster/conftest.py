"""Hosts made of this one, and a checkout that they may see differently."""

from __future__ import annotations

import shutil
import subprocess
import sys
from collections.abc import Callable, Iterator
from pathlib import Path

import pytest

from cluster import testbed
from tests.conftest import ROOT, run

PYTHON = sys.executable
NICS = ["enp2s0f1", "enp1s0f0", "ib0", "wan7"]  # no two hosts have one of the same name
CODE = ["benchmarks", "cluster", "conf", "datamodules", "models", "runs", "strategies"]
CODE += ["template.py", "requirements.txt", "Makefile", ".syncignore", ".gitignore"]
# What some login shells say: a title for the terminal, without a newline and in no UTF-8.
GREETING = "printf '\\033]0;Universit\\344t\\007';"


@pytest.fixture
def fake_ssh(fake: Callable[[str, str], Path]) -> Callable[[str], Path]:
    """fake_ssh(script): what is called in place of ssh; h1, h2, ... are aliases of tunnels."""
    last = "for last; do :; done"
    alias = 'echo "hostname 127.0.0.${last#h}"; echo port 2222; exit'
    return lambda script: fake("ssh", f"{last}\ncase $* in *' -G '*) {alias};; esac\n{script}")


@pytest.fixture(scope="module")
def hosts() -> Iterator[list[testbed.Node]]:
    """Two, each with an eth0."""
    yield from made(2)


@pytest.fixture(scope="module")
def odd_hosts() -> Iterator[list[testbed.Node]]:
    """Two whose network interfaces have different names."""
    yield from made(2, NICS[:2])


def made(
    count: int, interfaces: list[str] | None = None, rate: str | None = None
) -> Iterator[list[testbed.Node]]:
    if problem := testbed.missing():
        pytest.skip(f"no test hosts: {problem}")
    with testbed.Testbed(count, rate, interfaces) as hosts:
        yield hosts


@pytest.fixture
def project(tmp_path: Path) -> Path:
    """A copy of what a job needs of this checkout, in a folder of its own."""
    folder = tmp_path / "view" / "project"
    for name in CODE:
        if (ROOT / name).is_dir():
            left_out = shutil.ignore_patterns("__pycache__", ".lock")  # as git ignores them
            shutil.copytree(ROOT / name, folder / name, ignore=left_out)
        else:
            shutil.copy2(ROOT / name, folder)
    return folder


@pytest.fixture
def on(hosts: list[testbed.Node]) -> Callable[..., subprocess.CompletedProcess[str]]:
    """on(host, "cluster.sync", "-H", ...): what that module prints when run on one of the hosts."""

    def on(
        host: testbed.Node, module: str, *arguments: str, cwd: Path = ROOT, **environment: str
    ) -> subprocess.CompletedProcess[str]:
        command = ["env", "-C", str(cwd), PYTHON, "-m", module, *arguments]
        return run(host.command(*command), **environment)

    return on

"""What tests of several processes share: real horovodrun, ended with all it started."""

from __future__ import annotations

import json
import os
import signal
import subprocess
import sys
from collections.abc import Callable, Iterator
from pathlib import Path
from typing import Any

import pytest
import torch

ROOT = Path(__file__).resolve().parent.parent
HOROVODRUN = str(Path(sys.executable).parent / "horovodrun")


def pytest_configure(config: pytest.Config) -> None:
    """Ranks of tests share the CPU; GPUs, of which each needs its own, are for test_gpu.py.

    What `make test ARGS=...` was asked is not for the makes that tests call.
    """
    if config.option.markexpr != "gpu":
        os.environ["CUDA_VISIBLE_DEVICES"] = ""
    for name in ("MAKEFLAGS", "ARGS"):
        os.environ.pop(name, None)


def run(
    command: list[str], cwd: Path = ROOT, timeout: float = 240, **environment: str
) -> subprocess.CompletedProcess[str]:
    """Run a command, and end all processes it started when it takes too long."""
    process = subprocess.Popen(
        command, cwd=cwd, text=True, stdout=subprocess.PIPE, stderr=subprocess.STDOUT,
        start_new_session=True, env={**os.environ, **environment},
    )  # fmt: skip
    try:
        output, _ = process.communicate(timeout=timeout)
    except BaseException:
        os.killpg(process.pid, signal.SIGTERM)
        output, _ = process.communicate(timeout=30)
        print(output)
        raise
    return subprocess.CompletedProcess(command, process.returncode, output)


def horovodrun(ranks: int, *command: str) -> list[str]:
    """The command line that starts `command` on `ranks` processes of this host.

    --gloo is what it takes by itself, after 2 s of importing torch to see that there is no MPI.
    """
    return [HOROVODRUN, "--gloo", "-np", str(ranks), "-H", f"localhost:{ranks}", *command]


def launcher(folder: Path) -> Callable[..., list[Any]]:
    """launch(function, ranks, **arguments): what `function` returned on each rank, in order.

    The function runs in `ranks` processes of horovodrun; that many must have taken part.
    """
    count = 0

    def launch(function: Callable, ranks: int, **arguments: Any) -> list[Any]:
        nonlocal count
        count += 1
        saved_to = folder / f"launch{count}"
        saved_to.mkdir()
        worker = [str(ROOT / "tests" / "worker.py"), str(saved_to)]
        what = [function.__module__, function.__name__, json.dumps(arguments)]
        done = run(horovodrun(ranks, sys.executable, *worker, *what))
        assert done.returncode == 0, done.stdout
        saved = [torch.load(saved_to / f"{r}.pt", weights_only=False) for r in range(ranks)]
        assert [rank["size"] for rank in saved] == [ranks] * ranks
        return [rank["result"] for rank in saved]

    return launch


@pytest.fixture
def launch(tmp_path: Path) -> Callable[..., list[Any]]:
    return launcher(tmp_path)


@pytest.fixture(scope="module")
def launch_once(tmp_path_factory: pytest.TempPathFactory) -> Callable[..., list[Any]]:
    """As `launch`, for what several tests of a module look at."""
    return launcher(tmp_path_factory.mktemp("launches"))


@pytest.fixture
def one_thread() -> Iterator[None]:
    """A single thread in torch: for tiny tensors, several only wait for each other."""
    threads = torch.get_num_threads()
    torch.set_num_threads(1)
    yield
    torch.set_num_threads(threads)

"""What tests of several processes share: real horovodrun, ended with all it started."""

from __future__ import annotations

import contextlib
import json
import os
import signal
import subprocess
import sys
import textwrap
import time
from collections.abc import Callable, Iterator
from functools import cache
from pathlib import Path
from typing import Any

import pytest
import torch
from hypothesis import settings

from cluster.signals import interrupt_at_signals
from cluster.variables import TAKEN

ROOT = Path(__file__).resolve().parent.parent
HOROVODRUN = str(Path(sys.executable).parent / "horovodrun")
# NCCL, and we, refuse several ranks of one host on the same GPU: each passes for a host of its own,
# by a name that is an address of the loopback, as Gloo asks for the address of its host's name.
NAMED = 'echo 127.0.0.$((HOROVOD_RANK + 1)) >/proc/sys/kernel/hostname && exec "$@"'
AS_HOSTS = ["unshare", "--uts", "sh", "-c", NAMED, "sh"]


def pytest_configure(config: pytest.Config) -> None:
    """Ranks of tests share the CPU; GPUs, of which each needs its own, are for test_gpu.py.

    The deafness to Ctrl-C of what a script starts with `&` is not for what tests start.
    """
    clear_environment()
    signal.signal(signal.SIGINT, signal.default_int_handler)
    interrupt_at_signals()  # hosts and processes that fixtures made go with us
    if config.option.markexpr != "gpu":
        os.environ["CUDA_VISIBLE_DEVICES"] = ""
    elif ranks_share_a_gpu():
        os.environ.setdefault("CUDA_VISIBLE_DEVICES", "0")  # each is shown a single one
    settings.register_profile("no deadline", deadline=None)  # an example may wait for the host
    settings.load_profile("no deadline")


def clear_environment() -> None:
    """Leave out what `make test` was asked, and the git, Hydra, Slurm and language of who asks.

    With GIT_DIR, which git sets for hooks, tests would commit to the repository of who asks.
    """
    begins = ("GIT_", "HYDRA_", "SLURM_", "PMI", "OMPI_", "HOROVOD_GLOO")
    ours = {"MAKEFLAGS", "MAKELEVEL", "PYTHON", "MPI", "CXX", "LANGUAGE", *TAKEN}
    for name in [n for n in os.environ if n in ours or n.startswith(begins)]:
        del os.environ[name]
    os.environ |= {
        "GIT_CONFIG_GLOBAL": os.devnull, "GIT_CONFIG_NOSYSTEM": "1",
        # The checkout may be another user's, as in a container.
        "GIT_CONFIG_COUNT": "1", "GIT_CONFIG_KEY_0": "safe.directory", "GIT_CONFIG_VALUE_0": "*",
        "LC_ALL": "C.UTF-8",
    }  # fmt: skip


@cache
def ranks_share_a_gpu() -> bool:
    """Where there is a single one, and we may name hosts (unshare of util-linux, as root)."""
    if torch.cuda.device_count() != 1:
        return False
    named = run([*AS_HOSTS, "true"], HOROVOD_RANK="0")
    return named.returncode == 0


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
        with contextlib.suppress(ProcessLookupError):
            os.killpg(process.pid, signal.SIGTERM)
        try:
            output, _ = process.communicate(timeout=30)
        except subprocess.TimeoutExpired:
            os.killpg(process.pid, signal.SIGKILL)
            output, _ = process.communicate()
        print(output)
        raise
    return subprocess.CompletedProcess(command, process.returncode, output)


def wait_until(
    there: Callable[[], Any], seconds: float, what: str, pause_seconds: float = 0.02
) -> None:
    """AssertionError, which says what was waited for, where it has not come by then."""
    deadline = time.monotonic() + seconds
    while not there():
        assert time.monotonic() < deadline, f"not within {seconds} s: {what}"
        time.sleep(pause_seconds)


def wait_for_words(
    process: subprocess.Popen, output: Path, words: str, seconds: float, count: int = 1
) -> None:
    """Until the output has the words so often; AssertionError, with the output, where the process
    ends before or it takes too long."""
    deadline = time.monotonic() + seconds
    while (text := output.read_text() if output.exists() else "").count(words) < count:
        assert process.poll() is None and time.monotonic() < deadline, text
        time.sleep(0.02)


def program(file: Path, script: str) -> Path:
    """A shell script that can be called as one."""
    file.parent.mkdir(exist_ok=True)
    file.write_text(f"#!/bin/sh\n{textwrap.dedent(script)}\n")
    file.chmod(0o755)
    return file


def horovodrun(ranks: int, *command: str) -> list[str]:
    """The command line that starts `command` on `ranks` processes of this host.

    --gloo is what it takes by itself, after 2 s of importing torch to see that there is no MPI.
    """
    return [HOROVODRUN, "--gloo", "-np", str(ranks), "-H", f"localhost:{ranks}", *command]


def make_train(ranks: int, *command: str) -> list[str]:
    """The same by our launcher, as make train does: its ranks share their imports."""
    ours = [sys.executable, "-m", "cluster.horovodrun"]
    return [*ours, "-np", str(ranks), "-H", f"localhost:{ranks}", *command]


class Ranks:
    """Processes of one launcher that call what they are told to, one function after another."""

    def __init__(self, folder: Path, ranks: int, launcher: Callable[..., list[str]]) -> None:
        self.folder, self.ranks = folder, ranks
        self._orders = 0
        worker = [sys.executable, str(ROOT / "tests" / "worker.py"), str(folder)]
        if ranks_share_a_gpu():
            launcher, worker = horovodrun, [*AS_HOSTS, *worker]
        command = launcher(ranks, *worker)
        with (folder / "output").open("w") as output:
            self._process = subprocess.Popen(
                command, cwd=ROOT, stdout=output, stderr=output, start_new_session=True
            )

    def call(self, function: Callable, **arguments: Any) -> list[Any]:
        """What `function` returned on each rank, in order; AssertionError where ranks ended."""
        target = {"module": function.__module__, "function": function.__name__}
        number = self._order({**target, "arguments": arguments})
        answers = [self.folder / f"{number}.{rank}.pt" for rank in range(self.ranks)]
        deadline = time.monotonic() + 540  # less than pytest's limit, as this shows the output
        while not all(answer.exists() for answer in answers):
            assert self._process.poll() is None, self._output()
            if time.monotonic() > deadline:  # no AssertionError, for which a test may wait
                pytest.fail(f"no end within 540 s\n{self._output()}")
            time.sleep(0.02)
        saved = [torch.load(answer, weights_only=False) for answer in answers]
        assert [rank["size"] for rank in saved] == [self.ranks] * self.ranks
        return [rank["result"] for rank in saved]

    def tell_to_end(self) -> None:
        self._order(None)

    def close(self) -> None:
        """End them; AssertionError where they do not end well."""
        try:
            self.tell_to_end()
            assert self._process.wait(timeout=60) == 0, self._output()
        finally:
            self.kill()

    def kill(self) -> None:
        with contextlib.suppress(ProcessLookupError):
            os.killpg(self._process.pid, signal.SIGTERM)
        self._process.wait(timeout=30)

    def _order(self, order: dict[str, Any] | None) -> int:
        self._orders += 1
        staged = self.folder / "order"
        staged.write_text(json.dumps(order))
        staged.rename(self.folder / f"{self._orders}.json")
        return self._orders

    def _output(self) -> str:
        return (self.folder / "output").read_text()


def assert_reaches(folder: Path, experiment: str, bounds: dict[str, tuple[float, float]]) -> None:
    """Two ranks train an experiment to what its header promises, each metric within its bounds."""
    command = [sys.executable, "template.py", f"experiment={experiment}", f"log_dir={folder}"]
    done = run(horovodrun(2, *command), timeout=850)
    assert done.returncode == 0, done.stdout
    (file,) = folder.glob("*/runs/*/summary.json")
    summary = json.loads(file.read_text())
    assert summary["world_size"] == 2
    for metric, (least, most) in bounds.items():
        assert least <= summary["metrics"][metric] <= most, (metric, summary["metrics"])


@pytest.fixture(scope="session")
def launch(tmp_path_factory: pytest.TempPathFactory) -> Iterator[Callable[..., list[Any]]]:
    """launch(function, ranks, **arguments): what `function` returned on each rank, in order.

    It runs in processes of horovodrun, of which so many must have taken part: the same for all
    launches, until a function fails. To import torch takes them longer than most functions do.
    """
    living: dict[int, Ranks] = {}

    def launch(function: Callable, ranks: int, **arguments: Any) -> list[Any]:
        if ranks not in living:
            living[ranks] = Ranks(tmp_path_factory.mktemp("ranks"), ranks, horovodrun)
        try:
            return living[ranks].call(function, **arguments)
        except BaseException:
            living.pop(ranks).kill()
            raise

    yield launch
    with contextlib.ExitStack() as ends:  # of all, also where one fails
        for ranks in living.values():
            ends.callback(ranks.close)
            ranks.tell_to_end()


@pytest.fixture(scope="module")
def launch_anew(tmp_path_factory: pytest.TempPathFactory) -> Callable[..., list[Any]]:
    """As `launch`, in processes of our launcher that have done nothing else and end after it.

    They share their imports. It is also for functions that fail, for which `launch` would have to
    begin anew.
    """

    def launch(function: Callable, count: int, **arguments: Any) -> list[Any]:
        ranks = Ranks(tmp_path_factory.mktemp("ranks"), count, make_train)
        try:
            result = ranks.call(function, **arguments)
        except BaseException:
            ranks.kill()
            raise
        ranks.close()
        return result

    return launch


@pytest.fixture
def fake(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Callable[[str, str], Path]:
    """fake("git", "exit 1"): what is called in place of git, as the PATH begins with tmp_path."""
    monkeypatch.setenv("PATH", str(tmp_path), prepend=":")
    return lambda name, script: program(tmp_path / name, script)


@pytest.fixture
def one_thread() -> Iterator[None]:
    """A single thread in torch: for tiny tensors, several only wait for each other."""
    threads = torch.get_num_threads()
    torch.set_num_threads(1)
    yield
    torch.set_num_threads(threads)


@pytest.fixture
def handlers() -> Iterator[None]:
    """Those of signals in this process, put back: also a Trainer that ends by an error leaves them
    changed."""
    numbers = (signal.SIGUSR1, signal.SIGINT, signal.SIGTERM, signal.SIGHUP)
    before = {number: signal.getsignal(number) for number in numbers}
    signal.signal(signal.SIGINT, signal.default_int_handler)
    yield
    for number, handler in before.items():
        signal.signal(number, handler)

"""The benchmarks run, with the ranks they name, and count right. No test asserts a time."""

from __future__ import annotations

import contextlib
import errno
import fcntl
import importlib
import itertools
import json
import os
import random
import re
import signal
import socket
import subprocess
import sys
from collections.abc import Callable
from inspect import unwrap
from pathlib import Path
from types import SimpleNamespace
from typing import Any

import psutil
import pytest
import torch
from torch import nn

from benchmarks import (
    allreduce,
    figures,
    files,
    hardware,
    launching,
    predict_proof,
    scaling,
    step,
    step_ranks,
    step_report,
)
from cluster.hosts import Refusal
from tests.conftest import run, wait_until
from tests.scaling_source import results
from tests.test_anatomy import Event

OURS = "Lightning + HorovodStrategy"


def result(**variants: list[float]) -> dict[str, Any]:
    """What was measured, as step.measure gives it."""
    return {
        "steps_per_block": 10, "gradient_bytes": 50_000_000, "ranks": 2,
        "arrivals": [(0.2, 20_000_000), (0.9, 30_000_000)],
        "variants": {
            name: {
                "block_medians_ms": blocks, "steps": 48, "idle_share_of_cores": [0.1, 0.9, 0.2],
                "peak_mib": 900.4, "resident_mib_at_blocks": [800.0, 801.0, 802.0],
            }
            for name, blocks in variants.items()
        },
    }  # fmt: skip


def test_what_make_install_brings_is_enough_where_the_makefile_says_so() -> None:
    """Targets that want `environment`, not `dev-environment`, do without matplotlib."""
    makefile = (hardware.ROOT / "Makefile").read_text()
    recipes = re.findall(r"^[a-z-]+: environment ##.*\n((?:\t.*\n)+)", makefile, re.MULTILINE)
    modules = re.findall(r"-m (benchmarks\.\w+)", "".join(recipes))
    assert {"benchmarks.split", "benchmarks.start", "benchmarks.step"} < set(modules)
    # torchmetrics looks for it too, and goes without.
    hidden = "import pytorch_lightning, sys; sys.modules['matplotlib'] = None"
    done = run([sys.executable, "-c", f"{hidden}; import {', '.join(modules)}"])
    assert done.returncode == 0, done.stdout


def test_ratios_are_of_neighbouring_blocks() -> None:
    """The machine gets slower all the time; the ratio stays."""
    measured = result(a=[10, 20, 40], b=[20, 40, 80])
    assert step_report.ratio(measured, "a", "b") == 0.5
    # The median of ratios, not the ratio of medians.
    assert step_report.ratio(result(a=[10, 40, 20], b=[20, 30, 80]), "a", "b") == 0.5


def test_how_steps_differ_is_told_without_the_drift_of_the_machine() -> None:
    draws = random.Random(0)
    blocks = [[speed + draws.gauss(0, 0.02) for _ in range(400)] for speed in (1, 2, 3)]
    blocks[0][0] = 60.0  # a few long ones do not count
    assert step.deviation(blocks) == pytest.approx(0.02, rel=0.1)


def test_the_table_names_the_range_and_the_memory() -> None:
    measured = {"models": {"mlp": result(**{OURS: [9, 10, 12], "Lightning DDP": [20, 20, 20]})}}
    lines = step_report.table(measured).splitlines()
    assert lines[2] == (
        f"| mlp | {OURS} | 10.00 | 9.00 - 12.00 | 1.000 | 20% | 900 | 15: 800, 48: 802 |"
    )
    assert lines[3].startswith("| mlp | Lightning DDP | 20.00 | 20.00 - 20.00 | 0.500 |")


def test_the_share_of_the_wire() -> None:
    """50 MB between 2 ranks: each sends 50 MB, or half in 16 bits, at 62.5 MB/s with 66 of 1,514
    bytes for headers: 836.5 ms.

    Of 100 ms of computing 20 pass before the first are there, and 10 after the last. Where the
    first are 1 MB, sent by 36.7 ms, the wire has nothing to do until 90.
    """
    alone = "no communication, our malloc"
    variants = {alone: [100], OURS: [1030], "HorovodStrategy, bf16": [830]}
    measured: dict[str, Any] = {"network": "500mbit", "models": {"mlp": result(**variants)}}
    measured["hosts"] = "node1:1,node2:1"
    assert step_report.wire(measured).splitlines()[-2:] == [
        f"| mlp | {OURS} | 836.5 | 30.0 | 866.5 | 0.836 |",
        "| mlp | HorovodStrategy, bf16 | 418.2 | 30.0 | 448.2 | 0.523 |",
    ]
    measured["models"]["mlp"]["arrivals"] = [(0.2, 1_000_000), (0.9, 49_000_000)]
    last = step_report.wire(measured).splitlines()[-2]
    assert last == f"| mlp | {OURS} | 836.5 | 83.3 | 919.7 | 0.884 |"
    assert step_report.wire({**measured, "network": "loopback"}) == ""
    # A ring of 4 ranks sends 1.5 times as much as one of the 2 hosts whose ranks share memory.
    measured["hosts"], measured["models"]["mlp"]["ranks"] = "node1:2,node2:2", 4
    measured["models"]["mlp"]["variants"]["Lightning DDP"] = {"block_medians_ms": [2000]}
    lines = step_report.wire(measured).splitlines()[-3:]
    assert [line.split(" | ")[2] for line in lines] == ["836.5", "418.2", "1254.7"]


def test_on_a_gpu_steps_are_between_events(monkeypatch: pytest.MonkeyPatch) -> None:
    for name in ("RANK", "SIZE", "LOCAL_RANK", "LOCAL_SIZE", "CROSS_RANK"):
        monkeypatch.setenv(f"HOROVOD_{name}", "0")
    monkeypatch.setattr(torch.cuda, "Event", Event)
    worker = importlib.import_module("benchmarks.step_worker")
    pace = worker.Pace.__new__(worker.Pace)
    pace.on_gpu, pace.moments = True, []
    for _ in range(4):
        pace.note()
    assert pace.seconds() == [0.001] * 3
    pace.moments.clear()
    # A millisecond after another: the bias and the weight of the last layer, and those before.
    model = nn.Sequential(nn.Linear(4, 3), nn.Linear(3, worker.CLASSES))
    batch = (torch.ones(2, 4), torch.zeros(2, dtype=torch.long))
    came = worker.arrivals(model, worker.sgd(model), batch, pace)
    assert [share for share, _ in came] == [0.2, 0.4, 0.6, 0.8]
    assert sorted(size for _, size in came[:2]) == [4 * worker.CLASSES, 12 * worker.CLASSES]
    assert not pace.moments  # none of those counts as a step


def test_the_idle_share_is_that_of_a_groups_own_steps(monkeypatch: pytest.MonkeyPatch) -> None:
    """psutil counts from one call to the next."""
    calls: list[str] = []
    told = SimpleNamespace(cpu_percent=lambda: calls.append("cores") or 75.0)
    monkeypatch.setattr(step_ranks, "psutil", told)
    monkeypatch.setattr(step_ranks.Group, "answers", lambda _: calls.append("steps") or [])
    nobody: Any = None
    group = step_ranks.Group("ours", nobody, Path())
    assert group.run(1) == [] and calls == ["cores", "steps", "cores"]
    assert group.idle == [0.25]


def test_the_first_step_of_a_block_is_left_out_on_each_rank(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    ranks = [{"seconds": [9.0, 1.0, 2.0]}, {"seconds": [8.0, 3.0, 4.0]}]
    monkeypatch.setattr(step_ranks.Group, "answers", lambda _: ranks)
    nobody: Any = None
    assert step_ranks.Group("ours", nobody, Path()).run(2) == [1, 2, 3, 4]


def test_a_second_ctrl_c_leaves_no_stopped_rank(monkeypatch: pytest.MonkeyPatch) -> None:
    ended: list[str] = []

    class Stopped:
        def __init__(self, variant: str) -> None:
            self.variant, self.launcher = variant, self

        def run(self, steps: int) -> list[float]:
            return [1.0]

        def kill(self) -> None:
            ended.append(self.variant)

        def wait(self) -> None:
            raise KeyboardInterrupt

    monkeypatch.setattr(step, "start", lambda variant, *_: Stopped(variant))
    monkeypatch.setattr(step, "say", lambda _: os.kill(os.getpid(), signal.SIGINT))
    options: Any = SimpleNamespace(device="cuda", block_seconds=1, repeats=1)
    with pytest.raises(KeyboardInterrupt):
        step.measure("mlp", ["torch DDP", OURS], options)
    assert ended == ["torch DDP", OURS]


@pytest.mark.slow
def test_a_step_is_timed_on_all_ranks(tmp_path: Path) -> None:
    command = [sys.executable, "-m", "benchmarks.step", "--device", "cpu", "--models", "mlp"]
    command += ["--batch", "4"]
    variants = ["--variants", "Lightning DDP", OURS]
    options = ["--repeats", "2", "--block-seconds", "0.05", "--out", str(tmp_path)]
    done = run([*command, *variants, *options])
    assert done.returncode == 0, done.stdout
    (file,) = tmp_path.glob("step_mlp_batch-4_loopback_*.json")
    results = json.loads(file.read_text())
    measured = results["models"]["mlp"]
    assert measured["ranks"] == 2 and measured["images_a_rank"] == 4
    assert list(measured["variants"]) == variants[1:]
    assert all(len(each["block_medians_ms"]) == 2 for each in measured["variants"].values())
    assert all(len(each["idle_share_of_cores"]) == 2 for each in measured["variants"].values())
    report = file.with_suffix(".md").read_text()
    assert report.count("| mlp |") == 2 and "4 images a rank" in report
    assert {"cpu", "cores", "versions", "commit"} <= set(results)


def test_a_stopped_rank_ends_with_what_has_started_it(tmp_path: Path) -> None:
    worker = [sys.executable, hardware.ROOT / "benchmarks" / "step_worker.py", "raw_alone", "mlp"]
    names = {"RANK": "0", "SIZE": "1", "LOCAL_RANK": "0", "LOCAL_SIZE": "1", "CROSS_RANK": "0"}
    environment = {f"HOROVOD_{name}": value for name, value in names.items()}
    with socket.socket(socket.AF_UNIX) as listener:
        listener.bind(str(tmp_path / "socket"))
        listener.listen()
        listener.settimeout(60)
        shell = subprocess.Popen(
            ["sh", "-c", '"$@"; exit', "sh", *worker, tmp_path / "socket", "cpu", "4", "{}"],
            env={**os.environ, **environment},
        )
        with listener.accept()[0] as connection, connection.makefile("r") as lines:
            rank = psutil.Process(json.loads(lines.readline())["pid"])
            try:
                rank.suspend()
                shell.kill()
                shell.wait()
                wait_until(
                    lambda: not rank.is_running() or rank.status() == psutil.STATUS_ZOMBIE,
                    20, "the end of the rank",
                )  # fmt: skip
            finally:
                with contextlib.suppress(psutil.NoSuchProcess):
                    rank.kill()


def test_a_host_that_is_not_there_is_told(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    command = ["step", "--device", "cpu", "--models", "mlp", "--hosts", "no-such-host:2"]
    command += ["--variants", OURS]  # all may be more than memory holds
    monkeypatch.setattr(sys, "argv", [*command, "--out", str(tmp_path)])
    monkeypatch.setattr(step.load, "before", lambda: {"busy": 0.02, "gpu_busy": None})
    assert step.main() == 2
    (line,) = capsys.readouterr().err.splitlines()
    assert line.startswith("error: --hosts no-such-host:2: no-such-host: ")
    assert [file.name for file in tmp_path.iterdir()] == [".lock"]


@pytest.mark.parametrize(
    "wrong, told",
    [
        (["--models", "alexnet"], "invalid choice"),
        (["--variants", "magic"], "invalid choice"),
        (["--batch", "-1"], "1 or more"),
        (["--repeats", "0"], "--repeats is at least 1"),
        (["--device", "cuda", "--hosts", "localhost:999"], "a rank needs a GPU of its own, and"),
        (["--hosts", "localhost:x"], "error: HOSTS=localhost:x: 'localhost:x' is not a host"),
    ],
)
def test_what_cannot_be_timed_is_refused(
    wrong: list[str], told: str, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    monkeypatch.setattr(sys, "argv", ["step", *wrong])
    monkeypatch.setattr(step.load, "before", lambda: pytest.fail("refused too late"))
    with pytest.raises(SystemExit) as end:
        sys.exit(step.main())
    assert end.value.code == 2
    (line,) = capsys.readouterr().err.splitlines()
    assert line.startswith("error: ") and told in line


def test_interfaces_of_containers_are_none_of_the_machine(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    names = ["lo", "eth0", "lowest", "veth1a2b", "docker0", "br-12", "virbr0"]
    for name in names:
        (tmp_path / "sys/class/net" / name).mkdir(parents=True)
        (tmp_path / "sys/class/net" / name / "operstate").write_text("up\n")
        (tmp_path / "sys/class/net" / name / "speed").write_text("10000\n")
    monkeypatch.setattr(hardware, "Path", lambda path: tmp_path / path.lstrip("/"))
    monkeypatch.setattr(hardware.socket, "if_nameindex", lambda: list(enumerate(names)))
    assert hardware.nics() == {"eth0": 10000, "lowest": 10000}


def test_nothing_of_a_run_stays_on_another_host(tmp_path: Path) -> None:
    folder = tmp_path / "my bench" / "runs"
    summary = folder / "m" / "runs" / "1" / "summary.json"
    summary.parent.mkdir(parents=True)
    summary.write_text('{"steps":\n 3}\n')
    host = SimpleNamespace(is_here=False, command=lambda script: ["sh", "-c", script])
    assert launching.collect(host, str(folder)) == [{"steps": 3}]
    assert not list(tmp_path.iterdir())


def test_only_the_same_measurement_goes_on(tmp_path: Path) -> None:
    asked = {"commit": "abc", "sizes": (1, 2), "date": "2026-01-02T10", "runs": []}
    file, yesterdays = tmp_path / "x_2026-01-02.json", tmp_path / "x_2026-01-01.json"
    path, new = files.continued(asked, tmp_path, "x", "runs")
    assert path == file and new["runs"] == []
    begun = {**new, "runs": [1.5], "date": "2026-01-01T10"}
    files.write_json(begun, yesterdays)
    (tmp_path / "x_2025-12-31.json").write_text("")  # half copied
    assert files.continued(asked, tmp_path, "x", "runs") == (yesterdays, begun)
    asked["date"], another = begun["date"], tmp_path / "x_2026-01-01_2.json"
    for other in ({"commit": "def"}, {"sizes": (1, 2, 4)}, {"changes": "of the code"}):
        path, new = files.continued({**asked, **other}, tmp_path, "x", "runs")
        assert path == another and new["runs"] == []  # and nothing is written over
    files.write_json({**begun, "finished": True}, yesterdays)
    assert files.continued(asked, tmp_path, "x", "runs")[0] == another


def test_new_code_and_variables_make_another_measurement(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    run(["git", "init", "-q", str(tmp_path)])
    (tmp_path / ".gitignore").write_text("ignored.py\n")
    for name in ("NOTES.md", "Makefile"):
        (tmp_path / name).write_text("as it was\n")
    run(["git", "-C", str(tmp_path), "add", "."])
    author = ["-c", "user.name=x", "-c", "user.email=x@localhost"]
    run(["git", "-C", str(tmp_path), *author, "commit", "-qm", "first"])
    monkeypatch.setattr(hardware, "ROOT", tmp_path)
    before = hardware.software()
    (tmp_path / "ignored.py").write_text("x = 1\n")
    (tmp_path / "weights.bin").write_text("1")
    (tmp_path / "NOTES.md").write_text("a note of what is measured meanwhile\n")
    assert re.fullmatch("[0-9a-f]+", before["commit"]) and before["changes"] is None
    noted = hardware.software()
    assert (noted["commit"], noted["changes"]) == (before["commit"], None)
    (tmp_path / "Makefile").write_text("changed\n")
    changed = hardware.software()
    assert changed["commit"] == f"{before['commit']}-dirty" and changed["changes"]
    (tmp_path / "Makefile").write_text("as it was\n")
    (tmp_path / "mine.py").write_text("x = 1\n")
    new = hardware.software()
    assert new["commit"] == changed["commit"]  # git does not know the file yet
    (tmp_path / "mine.py").write_text("x = 2\n")
    assert len({before["changes"], new["changes"], hardware.software()["changes"]}) == 3
    monkeypatch.setenv("HOROVOD_CYCLE_TIME", "50")
    assert hardware.software()["environment"] == before["environment"] | {
        "HOROVOD_CYCLE_TIME": "50"
    }


def test_steps_under_other_variables_do_not_go_on_in_one_file(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    calls = itertools.count(1)

    def measure(*_: Any) -> dict[str, Any]:
        if next(calls) % 2:
            return result(**{OURS: [9.0]})
        raise KeyboardInterrupt

    monkeypatch.setattr(step, "measure", measure)
    monkeypatch.setattr(step, "memory", lambda: 22 * 1024)
    loads = iter([0.02, 0.03, 0.98])
    monkeypatch.setattr(step.load, "before", lambda: {"busy": next(loads), "gpu_busy": None})
    models = ["--models", "mlp", "resnet18", "small_vit"]
    models += ["--repeats", "1", "--network", "10/25 Gbit"]
    monkeypatch.setattr(sys, "argv", ["step", "--device", "cpu", *models, "--out", str(tmp_path)])
    for arenas in ("1", "2", "2"):
        monkeypatch.setenv("MALLOC_ARENA_MAX", arenas)
        assert step.main() == 130
    written = [json.loads(file.read_text()) for file in sorted(tmp_path.glob("*.json"))]
    assert [file["environment"]["MALLOC_ARENA_MAX"] for file in written] == ["1", "2"]
    assert [list(file["models"]) for file in written] == [["mlp"], ["mlp", "resnet18"]]
    assert [file["busy_before"] for file in written] == [0.02, 0.98]
    idle, busy = (file.read_text().splitlines()[0] for file in sorted(tmp_path.glob("*.md")))
    assert idle.endswith("one thread a rank; not all models are there yet.")
    assert busy.endswith("; not all models are there yet. Take care: other load 98%.")


def test_models_that_memory_cannot_hold_are_not_begun(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    def main(*options: str) -> tuple[int, str]:
        monkeypatch.setattr(sys, "argv", ["step", "--device", "cpu", *options, *out])
        return step.main(), capsys.readouterr().err

    begun: list[str] = []
    out = ["--repeats", "1", "--out", str(tmp_path)]
    monkeypatch.setattr(step, "memory", lambda: 22 * 1024)
    monkeypatch.setattr(step.load, "before", lambda: {"busy": 0.02, "gpu_busy": None})
    monkeypatch.setattr(
        step, "measure", lambda model, *_: (begun.append(model), result(**{OURS: [9.0]}))[1]
    )
    status, told = main()
    fewer = 'ARGS=\'--models vgg11 --variants "Lightning DDP" "Lightning + HorovodStrategy" "no'
    assert status == 0 and begun == ["mlp", "resnet18", "mobilenet_v2", "small_vit"]
    assert told.startswith("left out: vgg11: 9 variants need 39.1 GiB of memory, 22.0 are there; ")
    assert f"the same command with {fewer} communication" in told and told.count("\n") == 1
    (report,) = tmp_path.glob("step_mlp-resnet18-mobilenet_v2-small_vit_loopback_*.md")
    assert report.read_text().splitlines()[0].endswith("one thread a rank.")
    begun.clear()
    status, told = main("--models", "mlp", "vgg11")
    assert status == 2 and told.startswith("error: vgg11: 9 variants need 39.1 GiB") and not begun
    assert main("--models", "vgg11", "--variants", OURS)[0] == 0 and begun == ["vgg11"]
    monkeypatch.setattr(step, "memory", lambda: 1024)
    status, told = main()
    assert status == 2 and told.startswith("error: mlp: ") and "the same command" not in told


def test_the_lock_of_a_folder_may_be_another_users(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """As root's, who measured between hosts."""
    opened = os.open

    def denied(file: Any, flags: int, *mode: int, **options: Any) -> int:
        if flags & os.O_CREAT and str(file).endswith(".lock"):
            raise PermissionError
        return opened(file, flags, *mode, **options)

    (tmp_path / ".lock").touch()
    monkeypatch.setattr(os, "open", denied)
    files.measure_alone(tmp_path)
    os.close(files._LOCKED.pop(tmp_path))


def test_two_measurements_do_not_write_to_one_folder(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """A lock is of the open file, not of the process: who does not know of it is as another one."""

    def another(measure: Callable[[], object]) -> None:
        monkeypatch.setattr(files, "_LOCKED", {})
        try:
            measure()
        finally:
            os.close(files._LOCKED.pop(tmp_path))

    def goes_on() -> None:
        files.continued({"date": "2026-01-02"}, tmp_path, "x")

    monkeypatch.setattr(files, "_LOCKED", {})
    files.continued({"date": "2026-01-02"}, tmp_path, "y")
    held = files._LOCKED[tmp_path]
    # As if this were root.
    monkeypatch.setattr(predict_proof, "missing", str)
    monkeypatch.setattr(predict_proof, "experiment", lambda *_: pytest.fail("measures"))
    monkeypatch.setattr(allreduce, "facts", lambda _: pytest.fail("measures"))
    for measure, line in (
        (goes_on, ""), (unwrap(predict_proof.main), ""),
        (unwrap(allreduce.main), "-np 2 -H localhost:2"),
    ):  # fmt: skip
        monkeypatch.setattr(sys, "argv", ["", *line.split(), "--out", str(tmp_path)])
        with pytest.raises(Refusal, match="^another measurement writes to"):
            another(measure)
    # NFS locks no folder, and alone nothing that is only read.
    assert fcntl.fcntl(held, fcntl.F_GETFL) & os.O_ACCMODE == os.O_WRONLY
    assert Path(os.readlink(f"/proc/self/fd/{held}")).name == ".lock"
    ignored = ["git", "-C", str(hardware.ROOT), "check-ignore", "-q", str(files.RESULTS / ".lock")]
    assert not (hardware.ROOT / ".git").exists() or run(ignored).returncode == 0
    os.close(held)
    another(goes_on)


def test_a_folder_that_takes_no_results_is_told_before_anything_is_measured(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    (tmp_path / "file").touch()
    monkeypatch.setattr(scaling, "plan", lambda _: (results(), None))
    monkeypatch.setattr(step.load, "before", lambda: {"busy": 0.02, "gpu_busy": None})
    for module, measure in ((scaling, "run"), (step, "measure"), (allreduce, "facts")):
        monkeypatch.setattr(module, measure, lambda *_: pytest.fail("measures"))
    for module, line in (
        (scaling, ""),
        (step, "--device cpu --models resnet50"),
        (allreduce, "-np 2 -H localhost:2"),
    ):
        monkeypatch.setattr(sys, "argv", ["", *line.split(), "--out", f"{tmp_path}/file/results"])
        assert module.main() == 2
        told = f"error: {tmp_path}/file/results: Not a directory: results"
        assert capsys.readouterr().err.startswith(told)


def test_a_full_disk_keeps_what_was_measured(tmp_path: Path, monkeypatch: Any) -> None:
    def full(part: Path, text: str) -> None:
        part.touch()
        raise OSError(errno.ENOSPC, os.strerror(errno.ENOSPC))

    files.write_json({"runs": [1]}, tmp_path / "x.json")
    monkeypatch.setattr(Path, "write_text", full)
    with pytest.raises(SystemExit, match="x.json: No space left on device; what was written"):
        files.write_json({"runs": [1, 2]}, tmp_path / "x.json")
    assert [file.name for file in tmp_path.iterdir()] == ["x.json"]
    assert json.loads((tmp_path / "x.json").read_text()) == {"runs": [1]}


def test_a_plot_on_a_full_disk_leaves_no_part_of_it(tmp_path: Path, monkeypatch: Any) -> None:
    def full(_: object, file: Path, **__: object) -> None:
        file.touch()
        raise OSError(errno.ENOSPC, os.strerror(errno.ENOSPC))

    monkeypatch.setattr(figures.Figure, "savefig", full)
    with pytest.raises(SystemExit, match=f"^error: {tmp_path}/x.png: No space left on device;"):
        figures.save(figures.Figure(), tmp_path / "x")
    assert not list(tmp_path.iterdir())


@pytest.mark.parametrize(
    "module, override",
    [
        ("start", "trainer.max_steps=7"), ("start", "run_dir=mine"),
        ("losses", "trainer.precision=bf16-mixed"), ("losses", "run_dir=mine"),
    ],
)  # fmt: skip
def test_what_a_benchmark_sets_itself_is_refused(
    module: str, override: str, monkeypatch: pytest.MonkeyPatch,
    capsys: pytest.CaptureFixture[str],
) -> None:  # fmt: skip
    monkeypatch.setattr(sys, "argv", [module, "--", override])
    benchmark = importlib.import_module(f"benchmarks.{module}")
    monkeypatch.setattr(benchmark, "continued", lambda *_: pytest.fail("refused too late"))
    assert benchmark.main() == 2
    assert f"{override}: make bench-{module} sets" in capsys.readouterr().err

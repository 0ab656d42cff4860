"""Which checkpoint last and best name, how one is written, and the line that goes on from it."""

from __future__ import annotations

import errno
import glob
import json
import os
import resource
import shlex
import subprocess
import sys
from pathlib import Path
from types import SimpleNamespace
from typing import Any
from unittest.mock import Mock

import fsspec
import pytest
import torch

from runs import checkpoints
from runs.config import parse
from runs.folders import new_folder, whole
from runs.refusal import Refusal
from runs.run import to_go_on


@pytest.mark.timeout(10)  # it tried for ever
def test_no_folder_is_made_behind_a_link_to_what_is_not_there(tmp_path: Path) -> None:
    (tmp_path / "logs").symlink_to(tmp_path / "disk")
    with pytest.raises(FileExistsError, match="logs"):
        new_folder(tmp_path / "logs" / "classifier" / "runs")


def test_the_last_checkpoint_is_the_one_written_last(tmp_path: Path) -> None:
    assert checkpoints.last(tmp_path / "nothing") is None
    written = ["b/checkpoints/last.ckpt", "a/checkpoints/last.ckpt", "a/checkpoints/stopped.ckpt",
               "b/checkpoints/epoch_003.ckpt", "b/last.ckpt"]  # fmt: skip
    for second, name in enumerate(written):
        file = tmp_path / name
        file.parent.mkdir(parents=True, exist_ok=True)
        file.touch()
        os.utime(file, (second, second))
    assert checkpoints.last(tmp_path) == tmp_path / "a/checkpoints/stopped.ckpt"
    (tmp_path / "a/checkpoints/stopped.ckpt").unlink()
    assert checkpoints.last(tmp_path) == tmp_path / "a/checkpoints/last.ckpt"
    (tmp_path / "a" / ".hydra").mkdir()
    (tmp_path / "a" / ".hydra" / "overrides.yaml").write_text("- model.lr=1\n- debug=limit\n")
    assert checkpoints.last(tmp_path) == tmp_path / "b/checkpoints/last.ckpt"


def test_the_best_is_gone_on_from_where_the_last_could_not_be_written(tmp_path: Path) -> None:
    """But not an average, which has weights alone; nor what another run has written."""
    folder = tmp_path / "a[1]" / "checkpoints"
    folder.mkdir(parents=True)
    whole = {"state_dict": {}, "optimizer_states": []}
    contents = {"last": whole, "4-val/loss=1": whole, "averaged": {"state_dict": {}}}
    (folder / "4-val").mkdir()
    for second, (name, content) in enumerate(contents.items()):
        torch.save(content, folder / f"{name}.ckpt")
        os.utime(folder / f"{name}.ckpt", (second, second))
    assert checkpoints.last(tmp_path) == folder / "4-val/loss=1.ckpt"
    (tmp_path / "b" / "checkpoints").mkdir(parents=True)
    (tmp_path / "b" / "checkpoints" / "last.ckpt").touch()
    assert checkpoints.last(tmp_path) == tmp_path / "b" / "checkpoints" / "last.ckpt"
    assert checkpoints.last(tmp_path, glob.escape("a[1]")) == folder / "4-val/loss=1.ckpt"


def test_the_best_is_that_of_the_newest_training_that_has_one(tmp_path: Path) -> None:
    assert checkpoints.best(tmp_path) is None
    ends = {"a": (True, "a.ckpt"), "b": (True, "b.ckpt"), "c": (False, "a.ckpt"), "d": (True, None)}
    for second, (name, (train, checkpoint)) in enumerate(ends.items()):
        file = tmp_path / name / "summary.json"
        file.parent.mkdir()
        file.write_text(json.dumps({"train": train, "checkpoint": checkpoint}))
        os.utime(file, (second, second))
    assert checkpoints.best(tmp_path) == Path("b.ckpt")
    (tmp_path / "b" / ".hydra").mkdir()
    (tmp_path / "b" / ".hydra" / "overrides.yaml").write_text("- debug=overfit\n")
    assert checkpoints.best(tmp_path) == Path("a.ckpt")
    (tmp_path / "b" / ".hydra" / "overrides.yaml").write_text("- profiler=trace\n")
    assert checkpoints.best(tmp_path) == Path("a.ckpt")
    moved = tmp_path / "a" / "checkpoints" / "a.ckpt"
    moved.parent.mkdir()
    moved.touch()
    assert checkpoints.best(tmp_path) == moved
    named_by_metric = "epoch=2-val/loss=0.1.ckpt"
    ends = {"train": True, "checkpoint": f"/gone/checkpoints/{named_by_metric}"}
    (tmp_path / "a" / "summary.json").write_text(json.dumps(ends))
    os.utime(tmp_path / "a" / "summary.json", (0, 0))
    nested = moved.parent / named_by_metric
    nested.parent.mkdir()
    nested.touch()
    assert checkpoints.best(tmp_path) == nested
    for text in ("", "[]", "{}"):
        (tmp_path / "d" / "summary.json").write_text(text)
        with pytest.raises(ValueError, match="d/summary.json is not a summary of a run"):
            checkpoints.best(tmp_path)


@pytest.mark.parametrize("launched", [None, "", "horovodrun -np 2 'my python' -u"])
@pytest.mark.parametrize("name", ["logs/last.ckpt", "my logs/epoch=1,µ.ckpt", "it's/last.ckpt"])
def test_the_line_to_go_on_can_be_pasted(
    name: str, launched: str | None, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    asked = ["model.lr=0.1", "~callbacks.early_stopping", "ckpt_path=last", "run_dir=x"]
    hydra = SimpleNamespace(overrides=SimpleNamespace(task=asked))
    monkeypatch.setattr("runs.run.HydraConfig", SimpleNamespace(get=lambda: hydra))
    monkeypatch.setattr("runs.run.launched_size", lambda: None if launched is None else 2)
    line = f"{launched} template.py model.lr=9" if launched else "mine.sh"
    monkeypatch.setenv("HOROVOD_LAUNCHED", line)
    monkeypatch.setattr("sys.argv", ["template.py"])
    monkeypatch.chdir(tmp_path)
    words = shlex.split(to_go_on(tmp_path / name))
    start = {None: [sys.executable], "": ["..."]}.get(launched) or shlex.split(launched)
    assert words[: len(start)] == start
    typed = words[len(start) :]
    assert typed[:3] == ["template.py", "model.lr=0.1", "~callbacks.early_stopping"]
    command = to_go_on(tmp_path / "my logs" / "a.ckpt")
    assert command.endswith(" \"ckpt_path='my logs/a.ckpt'\"")
    printed = subprocess.run(  # by a shell, which would put HOME there between double quotes
        ["sh", "-c", f"printf '%s\\n' {to_go_on(tmp_path / '$HOME' / 'a.ckpt')}"],
        capture_output=True, text=True, check=True,
    ).stdout  # fmt: skip
    assert printed.splitlines()[-1] == "ckpt_path='$HOME/a.ckpt'"
    assert len(typed) == 4 and parse(typed[3]).value() == name
    assert parse(typed[3]).key_or_group == "ckpt_path"


def test_a_checkpoint_goes_to_storage_that_has_no_folders() -> None:
    checkpoints.WholeFiles().save_checkpoint({"state_dict": {}}, "memory://run/last.ckpt")
    with fsspec.open("memory://run/last.ckpt") as file:
        assert torch.load(file) == {"state_dict": {}}
    assert not Path("memory:").exists()


@pytest.mark.parametrize(
    ("content", "train", "why"),
    [
        ({"state_dict": {}, "optimizer_states": []}, True, ""),
        ({"state_dict": {}}, True, "it has weights alone"),
        ({"state_dict": {}}, False, ""),
        ({"weight": torch.ones(2)}, False, "it has no state_dict"),
        (3, False, "it has no state_dict"),
    ],
)
def test_what_can_be_gone_on_from(tmp_path: Path, content: Any, train: bool, why: str) -> None:
    torch.save(content, tmp_path / "a.ckpt")
    error = checkpoints.unreadable(tmp_path / "a.ckpt", train)
    assert error is None if not why else why in str(error)


def test_a_damaged_checkpoint_is_refused(tmp_path: Path) -> None:
    """torch takes the weights as they come, and raises errors of all kinds for the rest."""
    file = tmp_path / "a.ckpt"
    torch.save({"state_dict": {"weight": torch.full((999,), 7.0)}}, file)
    whole = file.read_bytes()
    weights = whole.index(torch.full((9,), 7.0).numpy().tobytes())
    zeros = whole[:weights] + bytes(512) + whole[weights + 512 :]
    for damaged in (zeros, whole[:-1000], whole.replace(b"state_dict", b"state_\xffict")):
        file.write_bytes(damaged)
        error = checkpoints.unreadable(file, train=False)
        assert error and error.startswith(f"ckpt_path={file}: it ")
    names = whole.index(b"a/data.pkl", whole.index(b"PK\x01\x02"))  # in the list of its parts
    for damaged in (
        whole[:names] + b"\xff" + whole[names + 1 :],
        whole[:-36] + b"\x40" + whole[-35:],  # the number of disks that it spans
    ):
        file.write_bytes(damaged)
        told = f"ckpt_path={file}: it cannot be read as a checkpoint: "
        assert str(checkpoints.unreadable(file, train=False)).startswith(told)


def test_a_checkpoint_without_checksums_can_be_read(tmp_path: Path) -> None:
    torch.serialization.set_crc32_options(False)
    try:
        torch.save({"state_dict": {"weight": torch.ones(9)}}, tmp_path / "a.ckpt")
        assert checkpoints.unreadable(tmp_path / "a.ckpt", train=False) is None
    finally:
        torch.serialization.set_crc32_options(True)


def test_a_checkpoint_that_may_not_be_read_is_called_so(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """As root, who reads all, cannot see it."""
    torch.save({"state_dict": {}}, tmp_path / "a.ckpt")
    denied = PermissionError(errno.EACCES, os.strerror(errno.EACCES))
    monkeypatch.setattr(Path, "open", Mock(side_effect=denied))
    error = checkpoints.unreadable(tmp_path / "a.ckpt", train=False)
    assert error == f"ckpt_path={tmp_path / 'a.ckpt'}: Permission denied"


def test_a_file_is_on_the_disk_before_it_has_its_name(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    file, sync, synced = tmp_path / "a.json", os.fsync, []

    def look(descriptor: int) -> None:
        synced.append((Path(f"/proc/self/fd/{descriptor}").read_text(), file.read_text()))
        sync(descriptor)

    file.write_text("before")
    monkeypatch.setattr(os, "fsync", look)
    with whole(file) as part:
        part.write(b"after")
    assert synced == [("after", "before")] and file.read_text() == "after"
    with pytest.raises(KeyboardInterrupt), whole(file) as part:
        part.write(b"hal")
        raise KeyboardInterrupt
    assert [f.name for f in tmp_path.iterdir()] == ["a.json"] and file.read_text() == "after"


def test_a_checkpoint_that_cannot_be_written_leaves_the_one_before(tmp_path: Path) -> None:
    file, io = tmp_path / "new" / "last.ckpt", checkpoints.WholeFiles()
    io.save_checkpoint({"weights": torch.ones(10)}, file)
    soft, hard = resource.getrlimit(resource.RLIMIT_FSIZE)
    failing: list[tuple[int, Any]] = [(300, torch.ones(10)), (9000, torch.ones(90_000))]
    failing.append((soft, lambda: 0))  # which pickle cannot keep
    try:
        for size, weights in failing:
            resource.setrlimit(resource.RLIMIT_FSIZE, (size, hard))
            expected = AttributeError if size == soft else Refusal
            with pytest.raises(expected, match="lambda|last.ckpt: cannot be written: File too"):
                io.save_checkpoint({"weights": weights}, file)
    finally:
        resource.setrlimit(resource.RLIMIT_FSIZE, (soft, hard))
    assert [f.name for f in file.parent.iterdir()] == ["last.ckpt"]
    assert torch.equal(io.load_checkpoint(file)["weights"], torch.ones(10))
    io.save_checkpoint({"weights": torch.zeros(10)}, file)
    assert not io.load_checkpoint(file)["weights"].any()

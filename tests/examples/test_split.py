"""A network on two devices computes what it does on one; and the table of `make bench-split`."""

from __future__ import annotations

import json
import sys
from contextlib import nullcontext
from pathlib import Path
from typing import Any
from unittest.mock import Mock

import pytest
import torch
from pytorch_lightning import Trainer, __version__
from torch._subclasses.fake_tensor import FakeTensorMode
from torch.utils._python_dispatch import TorchDispatchMode

from benchmarks import split
from cluster.hosts import Refusal
from models.split import Split
from runs import export
from tests.conftest import assert_reaches, run
from tests.test_export import trained
from tests.test_models import assert_measured_over_all_ranks

pytestmark = pytest.mark.usefixtures("one_thread")


def test_known_times_give_known_figures() -> None:
    results: dict[str, Any] = {
        "repeats": 3, "batch": 64, "runs": [], "memory_mib": {"True": 2.0, "False": 3.5},
        "devices": ["cpu", "cpu"],
    }  # fmt: skip
    kept: list[int] = []
    asked: list[tuple[str, int]] = []

    def measure(way: split.Way, batch: int) -> dict[str, Any]:
        asked.append((way.name, batch))
        slow = len(asked) // len(split.WAYS) + 1 if way.ranks == 1 else 1
        return {"step_ms": 10.0 * (1 + way.idle) * slow / way.ranks}

    split.run(results, measure, lambda: kept.append(len(results["runs"])))
    assert len(asked) == 3 * len(split.WAYS) and kept[:-1] == list(range(1, len(asked) + 1))
    assert asked[0][0] == asked[len(split.WAYS)][0] == "one device"  # in turns
    shown = split.table(results)
    assert "| one device | 1 | 3.50 | 0% | 20.0 (10.0 to 30.0) | 3,200 | 1.00 |" in shown
    assert "| data parallel | 2 | 3.50 | 0% | 5.0 | 12,800 | 4.00 (2.00 to 6.00) |" in shown
    assert "| split, in a row | 2 | 2.00 | 50% | 30.0 (15.0 to 45.0) |" in shown
    assert "| both: 4 micro-batches | 4 | 2.00 | 20% |" in shown


def test_ranks_do_not_share_a_pair_of_gpus() -> None:
    asked: list[str] = []

    def measure(way: split.Way, batch: int) -> dict[str, Any]:
        asked.append(way.name)
        return {"step_ms": 1.0}

    results = {"repeats": 1, "batch": 64, "runs": [], "devices": ["cuda:0", "cuda:1"]}
    split.run(results, measure, lambda: None)
    assert asked == [way.name for way in split.WAYS[:-1]] and results["finished"]


def test_memory_is_that_of_the_fuller_half() -> None:
    network = Split(width=16, depth=3)
    sizes = [sum(p.numel() for p in half.parameters()) for half in (network.first, network.second)]
    memory = split.memory({"_target_": "models.split.Split", "width": 16, "depth": 3})
    assert memory["False"] == pytest.approx(16 * sum(sizes) / 2**20)
    assert memory["True"] == pytest.approx(16 * max(sizes) / 2**20)
    with pytest.raises(Refusal, match=r"^micro_batches=1 and depth=2 .* width=3 a multiple of 4$"):
        split.memory({"_target_": "models.split.Split", "width": 3})


def test_ways_say_how_the_network_is_placed() -> None:
    alone, *_, both = split.WAYS
    assert alone.overrides(["cpu", "cpu"])[0] == "model.devices=null"
    assert both.overrides(["cuda:0", "cuda:1"]) == [
        "model.devices=[cuda:0,cuda:1]", "model.micro_batches=4",
    ]  # fmt: skip


@pytest.mark.parametrize(
    "key", ["strategy", "model.devices", "model.micro_batches", "data.batch_size"]
)
def test_what_tells_the_ways_apart_is_refused(
    key: str, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    """With it all rows would be of one way, under the names of others."""
    monkeypatch.setattr(sys, "argv", ["split", "--", "model.width=8", f"++{key}=4"])
    monkeypatch.setattr(split, "configuration", lambda *_: pytest.fail("asked too late"))
    assert split.main() == 2
    (line,) = capsys.readouterr().err.splitlines()
    assert line.startswith(f"error: ++{key}=4: make bench-split sets {key} itself")


def test_a_single_gpu_is_not_what_was_measured() -> None:
    results: dict[str, Any] = {"cpu": "A CPU", "cores": 2, "gpus": ["A GPU"]}
    assert split.device({**results, "devices": ["cpu", "cpu"]}) == "A CPU, 2 cores"
    assert split.device({**results, "devices": ["cuda:0", "cuda:1"]}) == "A GPU"


@pytest.mark.slow
def test_all_ways_are_measured(tmp_path: Path) -> None:
    options = ["--batch", "8", "--steps", "3", "--repeats", "1", "--out", str(tmp_path)]
    done = run(
        [sys.executable, "-m", "benchmarks.split", *options, "--", "model.width=8"], timeout=250
    )
    assert done.returncode == 0, done.stdout
    (file,) = tmp_path.glob("split_*.json")
    runs = json.loads(file.read_text())["runs"]
    assert [row["way"] for row in runs] == [way.name for way in split.WAYS]
    assert all(row["step_ms"] > 0 for row in runs)
    assert file.with_suffix(".md").read_text().count("\n| ") == len(split.WAYS) + 2


class TestSplit:
    @pytest.mark.parametrize("micro_batches", [1, 3])
    def test_loss_and_gradients_are_those_of_the_whole_network(self, micro_batches: int) -> None:
        torch.manual_seed(0)
        whole: Any = Split(depth=1, width=8)
        split: Any = Split(depth=1, width=8, devices=["cpu", "cpu"], micro_batches=micro_batches)
        split.load_state_dict(whole.state_dict())
        split.place()
        batch = torch.randn(8, 1, 8, 8), torch.arange(8)  # three parts: 3, 3 and 2
        passed: list[int] = []
        split.second.register_forward_pre_hook(lambda _, inputs: passed.append(len(inputs[0])))
        losses = []
        for model in (whole, split):
            model.log = lambda *_, **__: None
            losses.append(model.training_step(batch, 0))
            losses[-1].backward()
        assert passed == ([8] if micro_batches == 1 else [3, 3, 2])
        torch.testing.assert_close(*losses)
        for one, other in zip(whole.parameters(), split.parameters()):
            torch.testing.assert_close(one.grad, other.grad)

    def test_a_cpu_waits_for_what_comes_from_a_gpu(self) -> None:
        """On a host with a GPU the Trainer puts batches there, whatever devices= says."""
        copies: list[tuple[str, bool]] = []

        class Copies(TorchDispatchMode):
            def __torch_dispatch__(
                self, op: Any, types: Any, args: Any = (), kwargs: Any = None
            ) -> Any:
                if op is torch.ops.aten._to_copy.default and args[0].is_cuda:
                    copies.append((str(kwargs["device"]), kwargs.get("non_blocking", False)))
                return op(*args, **(kwargs or {}))

        with FakeTensorMode(), Copies():
            model = Split(devices=["cpu", "cpu"], micro_batches=2)
            logits = model(torch.empty(4, 1, 8, 8, device="cuda"))
        assert logits.is_cuda and copies == [("cpu", False)] * 2

    @pytest.mark.parametrize("hook", ["on_fit_start", "on_test_start", "on_predict_start"])
    def test_each_half_lies_on_its_device(self, hook: str) -> None:
        model = Split(devices=["cpu", "meta"])
        getattr(model, hook)()
        assert {parameter.device.type for parameter in model.first.parameters()} == {"cpu"}
        assert {parameter.device.type for parameter in model.second.parameters()} == {"meta"}

    def test_a_restored_optimizer_has_its_state_where_its_parameters_are(self) -> None:
        model: Any = Split(devices=["cpu", "meta"])
        model.place()
        optimizer = model.configure_optimizers()
        for parameter in model.parameters():  # as Lightning restores it
            zeros = torch.zeros(parameter.shape)
            optimizer.state[parameter] = {"step": torch.tensor(3.0), "exp_avg": zeros}
        model.trainer = Mock(spec=Trainer, optimizers=[optimizer])
        model.on_train_start()
        for parameter, state in optimizer.state.items():
            assert state["exp_avg"].device == parameter.device and state["step"].item() == 3

    @pytest.mark.parametrize(
        ("gpus", "local_rank", "told"),
        [
            (0, 0, "process sees: 0;"),
            (1, 0, "process sees: 1;"),
            (2, 1, "two ranks of a host"),
            (2, 0, ""),
        ],
    )
    def test_gpus_that_are_not_there_or_taken_are_told(
        self, gpus: int, local_rank: int, told: str, monkeypatch: pytest.MonkeyPatch
    ) -> None:
        monkeypatch.setattr(torch.cuda, "device_count", lambda: gpus)
        model: Any = Split(devices=["cuda:0", "cuda:1"])
        model.trainer = Mock(spec=Trainer, local_rank=local_rank)
        with pytest.raises(ValueError, match=told) if told else nullcontext():
            model.setup("fit")

    def test_what_gpus_have_trained_is_loaded_without_them(
        self, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
    ) -> None:
        monkeypatch.setattr(torch.cuda, "device_count", lambda: 0)
        trained = Split(devices=["cuda:0", "cuda:1"], micro_batches=2)
        checkpoint = {"hyper_parameters": dict(trained.hparams), "state_dict": trained.state_dict()}
        checkpoint["pytorch-lightning_version"] = __version__
        torch.save(checkpoint, tmp_path / "a.ckpt")
        model = Split.load_from_checkpoint(tmp_path / "a.ckpt")
        images = torch.rand(4, 1, 8, 8)
        torch.testing.assert_close(model(images), model.second(model.first(images)))
        with pytest.raises(ValueError, match="process sees: 0"):  # but not trained
            model.setup("fit")

    def test_what_is_measured_is_that_of_all_ranks(self) -> None:
        batch = torch.rand(2, 1, 8, 8), torch.arange(2)
        assert_measured_over_all_ranks(Split(depth=1, width=8), batch)

    def test_what_two_gpus_have_trained_is_exported_without_them(self, tmp_path: Path) -> None:
        recipe = ["experiment=model_parallel", "model.devices=[cuda:0,cuda:1]"]
        checkpoint, model = trained(tmp_path, *recipe)
        assert export.export(checkpoint, "pt2").endswith("takes float32 (any batch, 1, 8, 8)")
        exported = torch.export.load(checkpoint.with_suffix(".pt2")).module()
        images = torch.rand(5, 1, 8, 8)  # of its parts the last has one
        with torch.no_grad():
            torch.testing.assert_close(exported(images), model(images))


@pytest.mark.slow
@pytest.mark.timeout(900)
def test_it_reaches_its_result(tmp_path: Path) -> None:
    assert_reaches(tmp_path, "model_parallel", {"test/acc": (0.975, 1.0)})

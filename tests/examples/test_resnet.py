"""What a ResNet computes, and how its learning rate goes."""

from __future__ import annotations

import math
from pathlib import Path
from types import SimpleNamespace
from typing import Any

import pytest
import torch
from pytorch_lightning import Callback, Trainer
from pytorch_lightning.callbacks import ModelCheckpoint
from torch import nn
from torch.nn.functional import cross_entropy

from datamodules.fake import Fake
from models.resnet import ResNet, rise_and_fall
from tests.test_models import assert_measured_over_all_ranks

pytestmark = pytest.mark.usefixtures("one_thread")


class TestResNet:
    def test_it_keeps_the_size_of_small_images(self) -> None:
        model = ResNet()
        sizes: list[int] = []
        model.network.layer1.register_forward_hook(lambda *args: sizes.append(args[2].shape[-1]))
        first = model.network.conv1.weight.detach()
        assert float(first.std()) == pytest.approx((2 / (64 * 9)) ** 0.5, rel=0.1)  # by fan-out
        assert model(torch.zeros(2, 3, 32, 32)).shape == (2, 10)
        assert sizes == [32]
        weight = model.network.layer1[0].conv1.weight
        assert weight.is_contiguous(memory_format=torch.channels_last)

    @pytest.mark.parametrize(("depth", "parameters"), [(18, 11_689_512), (50, 25_557_032)])
    def test_large_images_see_the_network_of_the_paper(self, depth: int, parameters: int) -> None:
        model = ResNet(depth=depth, small_images=False, classes=1000)
        assert sum(parameter.numel() for parameter in model.parameters()) == parameters
        sizes: list[int] = []
        for layer in (model.network.conv1, model.network.layer1, model.network.layer4):
            layer.register_forward_hook(lambda *args: sizes.append(args[2].shape[-1]))
        assert model.eval()(torch.zeros(1, 3, 224, 224)).shape == (1, 1000)
        assert sizes == [112, 56, 7]
        last = model.network.layer1[0]
        assert not (last.bn3 if depth == 50 else last.bn2).weight.any()

    def test_it_is_trained_as_asked(self) -> None:
        asked = {"momentum": 0.8, "weight_decay": 0.01}
        model: Any = ResNet(lr=0.3, label_smoothing=0.2, **asked)
        model._trainer = SimpleNamespace(estimated_stepping_batches=9, max_steps=9)
        group = model.configure_optimizers()["optimizer"].param_groups[0]
        expected = {"initial_lr": 0.3, "nesterov": True, **asked}
        assert {name: group[name] for name in expected} == expected
        model.hparams["momentum"] = 0  # with which torch refuses nesterov
        assert not model.configure_optimizers()["optimizer"].param_groups[0]["nesterov"]
        model.network = nn.Sequential(nn.Flatten(), nn.Linear(3 * 8 * 8, 10))
        model.log = lambda *_, **__: None
        images, labels = torch.rand(4, 3, 8, 8), torch.arange(4)
        loss = cross_entropy(model(images), labels, label_smoothing=0.2)
        assert torch.equal(model.training_step((images, labels), 0), loss)

    def test_what_is_measured_is_that_of_all_ranks(self) -> None:
        batch = torch.rand(2, 1, 8, 8), torch.arange(2)
        assert_measured_over_all_ranks(ResNet(channels=1), batch)

    def test_another_depth_or_warm_up_is_refused(self) -> None:
        with pytest.raises(ValueError, match="depth=34: there are 18, 50"):
            ResNet(depth=34)
        with pytest.raises(ValueError, match="warmup=1: a share of all steps"):
            ResNet(warmup=1)

    def test_learning_rate_rises_then_falls(self) -> None:
        assert [rise_and_fall(x, 0.1) for x in (0.05, 0.1, 0.55)] == pytest.approx([0.5, 1, 0.5])
        assert rise_and_fall(1, 0.1) == pytest.approx(0) and rise_and_fall(0, 0) == 1

    @pytest.mark.parametrize("end", [{"max_epochs": 6}, {"max_epochs": -1, "max_steps": 17}])
    def test_learning_rate_is_of_the_step_among_all(
        self, end: dict[str, int], tmp_path: Path
    ) -> None:
        rates = learning_rates(tmp_path, batch_size=8, accumulate_grad_batches=3, **end)
        steps = 18 if end["max_epochs"] > 0 else 17  # 8 batches an epoch are 3 steps
        factors = [rise_and_fall((step + 0.5) / steps, 0.1) for step in range(steps)]
        assert rates == [0.1 * factor for factor in factors]

    @pytest.mark.parametrize("batch_size", [4, 16])
    def test_learning_rate_falls_on_after_a_resume_with_another_batch_size(
        self, batch_size: int, tmp_path: Path
    ) -> None:
        keep = ModelCheckpoint(tmp_path, filename="{epoch}", every_n_epochs=1, save_top_k=-1)
        learning_rates(tmp_path, batch_size=8, max_epochs=4, callbacks=[keep])
        whole = learning_rates(tmp_path, batch_size=batch_size, max_epochs=4)
        checkpoint = tmp_path / "epoch=1.ckpt"
        rest = learning_rates(tmp_path, checkpoint, batch_size=batch_size, max_epochs=4)
        # The first is from the checkpoint: of half a batch of then behind the middle.
        assert rest[1:] == whole[len(whole) // 2 + 1 :]
        assert rest == sorted(rest, reverse=True)

    def test_a_schedule_without_an_end_is_refused(self) -> None:
        model: Any = ResNet()
        model._trainer = SimpleNamespace(estimated_stepping_batches=math.inf)
        with pytest.raises(ValueError, match="max_epochs"):
            model.configure_optimizers()


def learning_rates(
    folder: Path, checkpoint: Path | None = None, *, batch_size: int, callbacks: Any = (),
    **options: Any,
) -> list[float]:  # fmt: skip
    """Of each step of a ResNet, with a layer for its network, on 64 images."""
    rates: list[float] = []

    class Rates(Callback):
        def on_before_optimizer_step(self, *arguments: Any) -> None:
            rates.append(arguments[2].param_groups[0]["lr"])

    model: Any = ResNet()
    model.network = nn.Sequential(nn.Flatten(), nn.Linear(3 * 8 * 8, 10))
    trainer = Trainer(
        accelerator="cpu", logger=False, limit_val_batches=0, enable_progress_bar=False,
        enable_model_summary=False, enable_checkpointing=bool(callbacks),
        default_root_dir=folder, callbacks=[*callbacks, Rates()], **options,
    )  # fmt: skip
    trainer.fit(model, Fake(batch_size, count=64, size=8), ckpt_path=checkpoint)
    return rates

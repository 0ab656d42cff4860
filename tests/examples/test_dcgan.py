"""What the GAN's networks and its judge compute, and that its training makes better digits."""

from __future__ import annotations

import csv
from pathlib import Path
from types import SimpleNamespace
from typing import Any
from unittest import mock

import pytest
import torch
from torch import nn

from datamodules.digits import Digits
from datamodules.fake import Fake
from models import dcgan
from models.dcgan import DCGAN, Judge
from runs import export
from tests.conftest import assert_reaches
from tests.test_export import trained
from tests.test_template import folders, job, summary

pytestmark = pytest.mark.usefixtures("one_thread")


class TestDCGAN:
    @pytest.mark.parametrize(("size", "channels"), [(8, 1), (28, 1), (64, 3)])
    def test_samples_have_the_shape_of_images(self, size: int, channels: int) -> None:
        model = DCGAN(size=size, channels=channels, width=4)
        samples = model(model.latents(2, torch.Generator()))
        assert samples.shape == (2, channels, size, size)
        assert samples.min() >= 0 and samples.max() <= 1
        assert model.opinion(samples).shape == (2,)

    def test_the_discriminator_sees_images_as_the_generator_makes_them(self) -> None:
        """From -1 to 1, by weights that begin with a deviation of 0.02."""
        model = DCGAN(size=8, channels=1)
        assert float(model.discriminator[0].weight.detach().std()) == pytest.approx(0.02, rel=0.1)
        model.discriminator = nn.Sequential(nn.Identity())
        assert model.opinion(torch.tensor([0, 0.5, 1])).tolist() == [-1, 0, 1]

    def test_it_is_trained_as_in_the_paper(self) -> None:
        model = DCGAN(lr=0.3)
        networks = (model.generator, model.discriminator)
        for network, optimizer in zip(networks, model.configure_optimizers(), strict=True):
            (group,) = optimizer.param_groups
            assert list(map(id, group["params"])) == list(map(id, network.parameters()))
            assert (group["lr"], group["betas"]) == (0.3, (0.5, 0.999))
            scales = [layer.weight for layer in network if isinstance(layer, nn.BatchNorm2d)]
            scale = torch.cat(scales).detach()
            assert float(scale.mean()) == pytest.approx(1, abs=0.01)
            assert float(scale.std()) == pytest.approx(0.02, rel=0.2)

    def test_a_step_has_no_gradients_of_the_one_before(self) -> None:
        """The same batch and latents again, at a rate of 0."""
        model: Any = DCGAN(size=8, channels=1, width=4, lr=0)
        optimizers = model.configure_optimizers()
        model._trainer = SimpleNamespace(optimizers=optimizers)
        model.optimizers = lambda: optimizers
        model.manual_backward = lambda loss: loss.backward()
        model.log = lambda *_: None
        images, gradients = torch.rand(4, 1, 8, 8), []
        for _ in range(2):
            model.draws = torch.Generator().manual_seed(0)
            model.training_step((images, None), 0)
            parameters = [*model.generator.parameters(), *model.discriminator.parameters()]
            gradients.append([parameter.grad.clone() for parameter in parameters])
        torch.testing.assert_close(*gradients)
        assert all(gradient.any() for gradient in gradients[0])

    def test_each_rank_draws_other_latents(self) -> None:
        drawn, judged = [], []
        for rank, step in ((0, 0), (1, 0), (0, 30)):  # the last goes on from a checkpoint
            torch.manual_seed(0)
            model: Any = DCGAN(size=8, channels=1, width=4)
            model._trainer = SimpleNamespace(global_rank=rank, world_size=2, global_step=step)
            model.on_train_start()
            drawn.append(model.latents(4, model.draws))
            model.latents = lambda count, draws: judged.append(draws.initial_seed()) or drawn[0]
            model.log = lambda *_: None
            for batch_idx in (0, 1):
                model.validation_step((torch.rand(4, 1, 8, 8), None), batch_idx)
        assert len(torch.stack(drawn).unique(dim=0)) == 3 and len(set(judged)) == 4

    def test_images_that_do_not_fit_are_refused(self) -> None:
        model: Any = DCGAN(size=64, channels=3, width=4)
        model._trainer = SimpleNamespace(datamodule=digits())
        with pytest.raises(ValueError, match=r"1 channels, \[8, 8\] pixels .* model.channels"):
            model.setup("fit")

    def test_images_that_are_normalized_are_refused(self) -> None:
        model: Any = DCGAN(size=8, channels=1, width=4)
        model._trainer = SimpleNamespace(datamodule=Altered(2.0, torch.float32))
        with pytest.raises(ValueError, match=r"values from 0.00 to 2.00, not from 0 to 1"):
            model.setup("fit")

    def test_judge_learns_from_so_many_images_of_any_precision(
        self, monkeypatch: pytest.MonkeyPatch
    ) -> None:
        monkeypatch.setattr(dcgan, "JUDGED", 50)
        model: Any = DCGAN(size=8, channels=1, width=4)
        model._trainer = SimpleNamespace(datamodule=Altered(1.0, torch.bfloat16))
        fit, calls = model.judge.fit, []
        model.judge.fit = lambda *args: calls.append(args) or fit(*args)
        model.setup("fit")
        assert [len(args) for args in calls[0]] == [50, 50]

    def test_judge_makes_its_pixels_once(self, monkeypatch: pytest.MonkeyPatch) -> None:
        pool = mock.Mock(wraps=dcgan.adaptive_avg_pool2d)
        monkeypatch.setattr(dcgan, "adaptive_avg_pool2d", pool)
        Judge(10).fit(torch.rand(20, 3, 16, 16), torch.arange(20) % 10)
        assert pool.call_count == 1

    def test_judge_knows_digits(self) -> None:
        torch.manual_seed(0)
        judge, data = Judge(10), digits()
        images, labels = (torch.cat(parts) for parts in zip(*data.train_dataloader()))
        judge.fit(images, labels)
        images, labels = (torch.cat(parts) for parts in zip(*data.test_dataloader()))
        assert (judge.last(judge(images)).argmax(1) == labels).float().mean() > 0.93
        assert not any(parameter.requires_grad for parameter in judge.parameters())


class Altered(Fake):
    """Images times a factor, of another dtype, as a data module's own hook may give them."""

    def __init__(self, factor: float, dtype: torch.dtype) -> None:
        super().__init__(count=80, size=8, channels=1)
        self.factor, self.dtype = factor, dtype

    def on_after_batch_transfer(self, batch: Any, dataloader_idx: int) -> Any:
        return (batch[0] * self.factor).to(self.dtype), batch[1]


def digits() -> Digits:
    data = Digits()
    data.setup("fit")
    return data


def test_export_takes_latents(tmp_path: Path) -> None:
    """As a model may say what its forward takes."""
    checkpoint, _ = trained(tmp_path, "experiment=dcgan")
    assert export.export(checkpoint, "pt2").endswith("(any batch, 100)")


@pytest.mark.slow
def test_it_makes_better_digits(tmp_path: Path) -> None:
    done = job(
        2, tmp_path, "experiment=dcgan", "trainer.max_epochs=10", "trainer.sync_batchnorm=true"
    )
    assert done.returncode == 0, done.stdout
    (folder,) = folders(tmp_path)
    rows = list(csv.DictReader((folder / "metrics.csv").open()))
    losses = [float(row["val/loss"]) for row in rows if row["val/loss"]]
    assert len(losses) == 10 and 0 < losses[-1] < losses[0] / 2, losses
    assert 0 < summary(tmp_path)["metrics"]["test/loss"] < losses[0] / 2
    assert (folder / "samples.png").read_bytes().startswith(b"\x89PNG")
    assert summary(tmp_path)["world_size"] == 2


@pytest.mark.slow
@pytest.mark.timeout(900)
def test_it_reaches_its_result(tmp_path: Path) -> None:
    assert_reaches(tmp_path, "dcgan", {"val/loss": (0.0, 20.0)})

"""The models' own parts: what scores, networks and schedules compute."""

from __future__ import annotations

from typing import Any

import pytest
import torch
from torch.nn.functional import mse_loss
from torchmetrics import Metric

from models.classifier import Classifier
from models.denoiser import Denoiser
from models.unet import UNet

pytestmark = pytest.mark.usefixtures("one_thread")


def test_a_classifier_drops_the_share_of_features_that_it_is_given() -> None:
    images = torch.rand(2, 1, 8, 8)
    for dropout, dropped in ((1.0, True), (0.0, False)):
        model = Classifier(dropout=dropout)
        nothing = model.network[-1].bias.expand(2, -1)
        assert torch.equal(model(images), nothing) == dropped
        assert not torch.equal(model.eval()(images), nothing)


def assert_measured_over_all_ranks(model: Any, batch: Any) -> None:
    """By a metric that gathers it, or by the mean: else rank 0 logs its own share alone."""
    gathered: dict[str, bool] = {}
    model.eval().log = lambda name, value, sync_dist=False: gathered.update(
        {name: sync_dist or isinstance(value, Metric)}
    )
    model.validation_step(batch, 0)
    model.test_step(batch, 0)
    assert {name.partition("/")[0] for name in gathered} == {"val", "test"}
    assert [name for name, of_all in gathered.items() if not of_all] == []


def test_what_is_measured_is_that_of_all_ranks() -> None:
    images = torch.rand(2, 1, 8, 8)
    assert_measured_over_all_ranks(Classifier(), (images, torch.arange(2)))
    assert_measured_over_all_ranks(Denoiser(depth=3, features=4), (images,) * 3)


class TestDenoiser:
    @pytest.mark.parametrize("network", ["dncnn", "unet"])
    def test_what_the_network_predicts_is_subtracted(self, network: str) -> None:
        model = Denoiser(network=network, depth=3, scales=3, features=4)
        images = torch.rand(2, 1, 13, 18)  # sizes that do not halve evenly
        model.eval()
        torch.testing.assert_close(images - model(images), model.network(images))

    def test_dncnn_is_that_of_the_paper(self) -> None:
        """20 layers of 64 features, with batch normalization behind all but the first and last."""
        ends, middle = (9 * 64 + 64) + (9 * 64 + 1), 9 * 64 * 64 + 2 * 64
        assert sum(p.numel() for p in Denoiser().parameters()) == ends + 18 * middle

    def test_it_learns_from_the_target_and_is_measured_against_the_clean_image(self) -> None:
        model: Any = Denoiser(depth=3, features=4).eval()
        logged: dict[str, Any] = {}
        model.log = lambda name, value, **_: logged.update({name: value})
        noisy, target, clean = batch = tuple(torch.rand(3, 2, 1, 8, 8))
        output = model(noisy)
        for step in (model.training_step, model.validation_step, model.test_step):
            step(batch, 0)
        values = {
            name: float((value.compute() if isinstance(value, Metric) else value).detach())
            for name, value in logged.items()
        }
        psnr = {
            name: -10 * float(mse_loss(images, clean).log10())
            for name, images in (
                ("val/psnr", output), ("test/psnr", output), ("test/psnr_noisy", noisy),
            )
        }  # fmt: skip
        losses = dict.fromkeys(("train/loss", "val/loss"), float(mse_loss(output, target)))
        assert values == pytest.approx({**losses, **psnr})
        assert all(map(torch.equal, model.first_images, (noisy, target, output)))

    def test_a_unet_sees_further_with_more_scales(self) -> None:
        torch.manual_seed(0)
        fields = []
        for scales in (1, 3):
            model = Denoiser(network="unet", scales=scales, features=4).eval()
            image = torch.rand(1, 1, 32, 32, requires_grad=True)
            model(image)[0, 0, 16, 16].backward()
            assert image.grad is not None
            fields.append(int((image.grad != 0).any(dim=2).sum()))
        assert fields[0] == 5 and fields[1] > 10
        assert [block[0].out_channels for block in UNet(1, 4, 3).down] == [4, 8, 16]

    @pytest.mark.parametrize("cut", [slice(0, 4), slice(4, None)], ids=["fine", "coarse"])
    def test_a_unet_sees_both_scales(self, cut: slice) -> None:
        """What is left when one of the two is not heard."""
        network, images = UNet(1, 4, 2).eval(), torch.rand(2, 1, 8, 8)
        with torch.no_grad():
            network.up[0][0].weight[:, cut] = 0
            one, other = network(images)
        assert not torch.equal(one, other)

    def test_an_unknown_network_is_refused(self) -> None:
        with pytest.raises(ValueError, match="network=resnet: there are dncnn, unet"):
            Denoiser(network="resnet")

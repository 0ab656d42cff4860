"""Image denoising by residual learning, from pairs of noisy images.

The network predicts the noise, which is subtracted from its input. It is DnCNN (Zhang et al.,
"Beyond a Gaussian Denoiser", IEEE TIP 2017, https://arxiv.org/abs/1608.03981) or a U-Net, which
sees more of the surroundings (models/unet.py). The target is a second noisy image of the same
thing: as the noise of both is independent with mean zero, the clean image minimizes the squared
error (Lehtinen et al., "Noise2Noise", ICML 2018, https://arxiv.org/abs/1803.04189). Clean images
are used to measure, never to train.

Batches are (noisy, target, clean), each of shape (batch, channels, height, width), values about
0 to 1. Logs train/loss, val/loss, and, of the squared error over all images, val/psnr, test/psnr
and test/psnr_noisy in dB. The test ends with a picture of input, target and output, in the run's
folder (denoised.png) and in TensorBoard.
"""

from __future__ import annotations

from pathlib import Path

import torch
from pytorch_lightning import LightningModule
from pytorch_lightning.loggers import TensorBoardLogger
from torch import Tensor, nn
from torch.nn.functional import mse_loss
from torchmetrics.image import PeakSignalNoiseRatio
from torchvision.utils import make_grid, save_image

from models.unet import UNet

Batch = tuple[Tensor, Tensor, Tensor]


class Denoiser(LightningModule):
    """A network that predicts the noise, which is subtracted from its input.

    Args:
        lr: learning rate of Adam.
        network: "dncnn" (3 x 3 convolutions with batch normalization between them) or "unet".
        depth: number of convolutions of DnCNN, at least 3.
        scales: sizes at which the U-Net sees the image, at least 1.
        features: channels between convolutions; those of the U-Net at its finest scale.
        channels: of the images.
    """

    def __init__(
        self,
        lr: float = 1e-3,
        network: str = "dncnn",
        depth: int = 20,
        scales: int = 4,
        features: int = 64,
        channels: int = 1,
    ) -> None:
        super().__init__()
        if depth < 3:
            raise ValueError(f"depth={depth}: the network has a first, a middle and a last layer")
        if scales < 1:
            raise ValueError(f"scales={scales}: the network sees the image at 1 size or more")
        if network not in ("dncnn", "unet"):
            raise ValueError(f"network={network}: there are dncnn, unet")
        self.save_hyperparameters()
        self.network = (
            dncnn(depth, features, channels)
            if network == "dncnn"
            else UNet(channels, features, scales)
        )
        self.val_psnr = PeakSignalNoiseRatio(data_range=1.0)
        self.test_psnr = PeakSignalNoiseRatio(data_range=1.0)
        self.test_psnr_noisy = PeakSignalNoiseRatio(data_range=1.0)
        self.first_images: Batch | None = None  # input, target, output of the first test batch

    def forward(self, noisy: Tensor) -> Tensor:
        """The denoised images, of the shape of `noisy`."""
        return noisy - self.network(noisy)

    def training_step(self, batch: Batch, batch_idx: int) -> Tensor:
        noisy, target, _ = batch
        loss = mse_loss(self(noisy), target)
        self.log("train/loss", loss)
        return loss

    def validation_step(self, batch: Batch, batch_idx: int) -> None:
        noisy, target, clean = batch
        output = self(noisy)
        self.val_psnr(output, clean)
        self.log("val/loss", mse_loss(output, target), sync_dist=True)
        self.log("val/psnr", self.val_psnr)

    def test_step(self, batch: Batch, batch_idx: int) -> None:
        noisy, target, clean = batch
        output = self(noisy)
        self.test_psnr(output, clean)
        self.test_psnr_noisy(noisy, clean)
        self.log("test/psnr", self.test_psnr)
        self.log("test/psnr_noisy", self.test_psnr_noisy)
        if batch_idx == 0:
            self.first_images = (noisy, target, output)

    @torch.no_grad()
    def on_test_end(self) -> None:
        if self.trainer.is_global_zero and self.first_images is not None:
            rows = zip(*(images[:4].float().cpu() for images in self.first_images))
            grid = make_grid([image for row in rows for image in row], nrow=3, padding=4)
            save_image(grid, Path(self.trainer.default_root_dir) / "denoised.png")
            for logger in self.loggers:
                if isinstance(logger, TensorBoardLogger):
                    logger.experiment.add_image("input, target, output", grid)
        self.first_images = None

    def predict_step(self, batch: Batch, batch_idx: int) -> Tensor:
        """The denoised images."""
        return self(batch[0])

    def configure_optimizers(self) -> torch.optim.Optimizer:
        return torch.optim.Adam(self.parameters(), lr=self.hparams["lr"])


def dncnn(depth: int, features: int, channels: int) -> nn.Sequential:
    layers: list[nn.Module] = [nn.Conv2d(channels, features, 3, padding=1), nn.ReLU()]
    for _ in range(depth - 2):
        layers += [
            nn.Conv2d(features, features, 3, padding=1, bias=False),
            nn.BatchNorm2d(features),
            nn.ReLU(),
        ]
    layers.append(nn.Conv2d(features, channels, 3, padding=1))
    return nn.Sequential(*layers)

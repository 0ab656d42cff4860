"""Image generation with a DCGAN: a generator and a discriminator, two optimizers.

Networks and hyperparameters follow Radford et al., "Unsupervised Representation Learning with Deep
Convolutional Generative Adversarial Networks", ICLR 2016, https://arxiv.org/abs/1511.06434: from 4
x 4 pixels (or what `size` halves to), each layer doubles the image and halves the features.

Batches are (images, labels): images of shape (batch, channels, size, size) with values from 0 to 1,
and labels of shape (batch,), which only the judge uses. A step trains the discriminator, then the
generator; Lightning counts it as two, one for each optimizer. Each rank draws its own latents.

Neither loss tells how good the samples are. To judge them, `setup` trains a small classifier on up
to 2,000 training images, each averaged to 8 x 8 grey pixels. val/loss and test/loss are the Frechet
distance between its features of samples and of real images:
    |m - n|^2 + tr(S + T - 2 (S T)^(1/2)), means m, n, covariances S, T; falls
    (Heusel et al. 2017, https://arxiv.org/abs/1706.08500)
Papers compute it with the Inception network, so compare these figures only with each other. They
say much about digits, little about photographs, of which 8 x 8 pixels keep only the layout, and
nothing about random images. Samples are in samples.png of the run's folder and, for each
validation, in TensorBoard.
"""

from __future__ import annotations

from itertools import pairwise
from pathlib import Path

import torch
from pytorch_lightning import LightningModule
from pytorch_lightning.loggers import TensorBoardLogger
from torch import Tensor, nn
from torch.nn.functional import adaptive_avg_pool2d, binary_cross_entropy_with_logits, cross_entropy
from torchmetrics.image.fid import FrechetInceptionDistance
from torchvision.utils import make_grid, save_image

Batch = tuple[Tensor, Tensor]
SHOWN = 64  # samples in the picture
JUDGED = 2000  # images that the classifier learns from


class DCGAN(LightningModule):
    """Trained in turns: to tell images from samples, and to make samples that are taken for images.

    Args:
        lr: learning rate of both Adams.
        size: height and width of the images in pixels, an even number from 8.
        channels: of the images.
        latent: numbers that a sample is made of.
        width: features after the discriminator's first layer, before the generator's last.
        classes: number of labels.
    """

    def __init__(
        self,
        lr: float = 2e-4,
        size: int = 64,
        channels: int = 3,
        latent: int = 100,
        width: int = 64,
        classes: int = 10,
    ) -> None:
        super().__init__()
        if size < 8 or size % 2:
            raise ValueError(f"size={size}: an even number of pixels from 8")
        self.save_hyperparameters()
        self.automatic_optimization = False
        self.example_input_array = torch.zeros(2, latent)  # make export traces `forward` with it
        self.generator = generator(size, channels, latent, width)
        self.discriminator = discriminator(size, channels, width)
        for network in (self.generator, self.discriminator):
            network.apply(initialize)
        self.judge = Judge(classes).requires_grad_(False)
        self.distance = FrechetInceptionDistance(FeaturesAsTheyAre())

    def forward(self, latents: Tensor) -> Tensor:
        """Samples from 0 to 1, of shape (batch, channels, size, size), of (batch, latent)."""
        return (self.generator(latents[:, :, None, None]) + 1) / 2

    def setup(self, stage: str) -> None:
        if stage != "fit":
            return
        batches, count = [], 0
        data = self.trainer.datamodule  # type: ignore[attr-defined]
        for batch in data.train_dataloader():
            batch = data.on_before_batch_transfer(batch, 0)
            images, labels = data.on_after_batch_transfer(batch, 0)
            batches.append((images, labels))
            count += len(images)
            if count >= JUDGED:
                break
        images, labels = (torch.cat(parts)[:JUDGED] for parts in zip(*batches))
        expected = tuple(self.hparams[key] for key in ("channels", "size", "size"))
        if images.shape[1:] != expected or labels.max() >= self.hparams["classes"]:
            channels, *size = images.shape[1:]
            raise ValueError(
                f"the images have {channels} channels, {size} pixels and labels to {labels.max()}: "
                f"give model.channels, model.size (of squares) and model.classes to match"
            )
        if images.min() < 0 or images.max() > 1:
            raise ValueError(
                f"the images have values from {images.min():.2f} to {images.max():.2f}, not from 0 "
                "to 1 as the samples: take data that is not normalized"
            )
        # Each rank trains one; the strategy then broadcasts that of rank 0.
        self.judge.fit(images.to(self.dtype), labels)

    def on_train_start(self) -> None:
        # Not torch's own generator, which under DDP draws the same on all ranks.
        seed = torch.initial_seed() + self.global_rank + self.trainer.world_size * self.global_step
        self.draws = torch.Generator().manual_seed(seed)

    def latents(self, count: int, draws: torch.Generator) -> Tensor:
        """Normal numbers of shape (count, latent), drawn on the CPU: the same on any device."""
        drawn = torch.randn(count, self.hparams["latent"], generator=draws)
        return drawn.to(next(self.parameters()))

    def training_step(self, batch: Batch, batch_idx: int) -> None:
        images = batch[0]
        of_generator, of_discriminator = self.optimizers()  # type: ignore[attr-defined]
        samples = self(self.latents(len(images), self.draws))

        with self.toggled_optimizer(of_discriminator):
            real, fake = self.opinion(images), self.opinion(samples.detach())
            loss = against(real, 1) + against(fake, 0)
            of_discriminator.zero_grad()
            self.manual_backward(loss)
            of_discriminator.step()
        self.log("train/loss_discriminator", loss)

        with self.toggled_optimizer(of_generator):
            loss = against(self.opinion(samples), 1)
            of_generator.zero_grad()
            self.manual_backward(loss)
            of_generator.step()
        self.log("train/loss_generator", loss)

    def opinion(self, images: Tensor) -> Tensor:
        """The discriminator's logits, high for what it takes for real, of shape (batch,)."""
        return self.discriminator(images * 2 - 1).flatten()

    def validation_step(self, batch: Batch, batch_idx: int) -> None:
        self._judge("val", batch[0], batch_idx)

    def test_step(self, batch: Batch, batch_idx: int) -> None:
        self._judge("test", batch[0], batch_idx)

    def _judge(self, stage: str, images: Tensor, batch_idx: int) -> None:
        """Compare as many samples as there are images: of latents that differ by rank and batch,
        but are the same in each evaluation."""
        seed = batch_idx * self.trainer.world_size + self.global_rank
        samples = self(self.latents(len(images), torch.Generator().manual_seed(seed)))
        self.distance.update(self.judge(images), real=True)
        self.distance.update(self.judge(samples), real=False)
        self.log(f"{stage}/loss", self.distance)

    def _show(self) -> None:
        if not self.trainer.is_global_zero:
            return
        samples = self(self.latents(SHOWN, torch.Generator().manual_seed(0))).float().cpu()
        factor = -(-32 // self.hparams["size"])  # small ones are enlarged, to at least 32 pixels
        grid = make_grid(nn.functional.interpolate(samples, scale_factor=factor))
        save_image(grid, Path(self.trainer.default_root_dir) / "samples.png")
        for logger in self.loggers:
            if isinstance(logger, TensorBoardLogger):
                logger.experiment.add_image("samples", grid, self.global_step)

    on_validation_epoch_end = on_test_epoch_end = _show

    def configure_optimizers(self) -> tuple[torch.optim.Optimizer, torch.optim.Optimizer]:
        lr, betas = self.hparams["lr"], (0.5, 0.999)
        return (
            torch.optim.Adam(self.generator.parameters(), lr, betas),
            torch.optim.Adam(self.discriminator.parameters(), lr, betas),
        )


def against(logits: Tensor, truth: float) -> Tensor:
    """Mean cross entropy of logits against one truth for all: 1 is real, 0 is made."""
    return binary_cross_entropy_with_logits(logits, torch.full_like(logits, truth))


# ---------------------------------------------------------------- the networks


def halvings(size: int) -> tuple[int, int]:
    """How often `size` is halved until it is 4 or odd, and what it is then."""
    count = 0
    while size % 2 == 0 and size > 4:
        size, count = size // 2, count + 1
    return count, size


def generator(size: int, channels: int, latent: int, width: int) -> nn.Sequential:
    """(batch, latent, 1, 1) to (batch, channels, size, size), values -1 to 1."""
    count, start = halvings(size)
    features = [width * 2**i for i in reversed(range(count))]
    layers: list[nn.Module] = [nn.ConvTranspose2d(latent, features[0], start, bias=False)]
    for before, after in pairwise(features):
        layers += [nn.BatchNorm2d(before), nn.ReLU()]
        layers += [nn.ConvTranspose2d(before, after, 4, 2, 1, bias=False)]
    layers += [nn.BatchNorm2d(width), nn.ReLU()]
    return nn.Sequential(*layers, nn.ConvTranspose2d(width, channels, 4, 2, 1), nn.Tanh())


def discriminator(size: int, channels: int, width: int) -> nn.Sequential:
    """(batch, channels, size, size) to one logit, (batch, 1, 1, 1)."""
    count, end = halvings(size)
    features = [width * 2**i for i in range(count)]
    layers: list[nn.Module] = [nn.Conv2d(channels, width, 4, 2, 1), nn.LeakyReLU(0.2)]
    for before, after in pairwise(features):
        layers += [nn.Conv2d(before, after, 4, 2, 1, bias=False)]
        layers += [nn.BatchNorm2d(after), nn.LeakyReLU(0.2)]
    return nn.Sequential(*layers, nn.Conv2d(features[-1], 1, end))


def initialize(layer: nn.Module) -> None:
    """Normal weights of deviation 0.02: around 0, but around 1 for batch normalization."""
    if isinstance(layer, (nn.Conv2d, nn.ConvTranspose2d)):
        nn.init.normal_(layer.weight, 0.0, 0.02)
    elif isinstance(layer, nn.BatchNorm2d):
        nn.init.normal_(layer.weight, 1.0, 0.02)


# ---------------------------------------------------------------- how good samples are


class Judge(nn.Module):
    """A classifier of 8 x 8 grey pixels with a hidden layer, whose outputs are the features."""

    features = 64

    def __init__(self, classes: int) -> None:
        super().__init__()
        self.hidden = nn.Sequential(nn.Linear(64, self.features), nn.ReLU())
        self.last = nn.Linear(self.features, classes)

    def forward(self, images: Tensor) -> Tensor:
        """Features (batch, 64) of images of any shape and size."""
        return self.hidden(grey(images)).float()

    def fit(self, images: Tensor, labels: Tensor) -> None:
        """Learn to tell the labels apart: 200 steps, each on all images."""
        self.requires_grad_(True)
        adam = torch.optim.Adam(self.parameters(), 1e-2)
        # Once: for 2,000 colour images of 64 x 64 it takes longer than the rest of a step.
        pixels = grey(images)
        for _ in range(200):
            adam.zero_grad()
            cross_entropy(self.last(self.hidden(pixels)).float(), labels).backward()
            adam.step()
        self.requires_grad_(False)


def grey(images: Tensor) -> Tensor:
    """Shades of grey of 8 x 8 pixels, of shape (batch, 64)."""
    return adaptive_avg_pool2d(images.mean(1, keepdim=True), 8).flatten(1)


class FeaturesAsTheyAre(nn.Identity):
    """Takes the place of torchmetrics' Inception network: the features are computed already."""

    num_features = Judge.features

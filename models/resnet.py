"""Image classification with ResNet-18 or ResNet-50, for images of 32 x 32 or of 224 x 224 pixels.

The network is torchvision's (He et al., "Deep Residual Learning for Image Recognition", CVPR 2016,
https://arxiv.org/abs/1512.03385). It is made for 224 x 224 pixels and would shrink 32 x 32 to a
single one: for small images its first convolution is 3 x 3 with stride 1, and the pooling after it
is left out. For large images each block begins as the identity, as in Goyal et al. (below). Weights
are channels_last in memory, the layout in which tensor cores compute 16-bit convolutions.

SGD with Nesterov momentum; the learning rate rises linearly (Goyal et al. 2017,
https://arxiv.org/abs/1706.02677), then falls as a cosine (Loshchilov and Hutter 2017,
https://arxiv.org/abs/1608.03983). With more ranks ask for lr_scaling=linear, the rule of the first
of these papers, which needs the warm-up.

Batches are (images, labels): float images of shape (batch, channels, height, width) and int64
labels of shape (batch,). Logs train/loss, val/loss, val/acc, test/loss and test/acc.
"""

from __future__ import annotations

import math
from typing import Any

import torch
from pytorch_lightning import LightningModule
from torch import Tensor, nn
from torch.nn.functional import cross_entropy
from torchmetrics.classification import MulticlassAccuracy
from torchvision.models import resnet18, resnet50

Batch = tuple[Tensor, Tensor]

NETWORKS = {18: resnet18, 50: resnet50}


class ResNet(LightningModule):
    """ResNet of 18 or 50 layers.

    Args:
        lr: learning rate of SGD after the warm-up.
        depth: 18 or 50 layers.
        small_images: whether images have about 32 x 32 pixels; else about 224 x 224.
        classes: number of labels.
        channels: of the images.
        warmup: share of all steps in which the learning rate rises.
        momentum: of SGD.
        weight_decay: of all weights.
        label_smoothing: share of each label that is spread over all classes, in training.
    """

    def __init__(
        self,
        lr: float = 0.1,
        depth: int = 18,
        small_images: bool = True,
        classes: int = 10,
        channels: int = 3,
        warmup: float = 0.1,
        momentum: float = 0.9,
        weight_decay: float = 5e-4,
        label_smoothing: float = 0.0,
    ) -> None:
        super().__init__()
        if not 0 <= warmup < 1:
            raise ValueError(f"warmup={warmup}: a share of all steps, from 0 to below 1")
        if depth not in NETWORKS:
            raise ValueError(f"depth={depth}: there are {', '.join(map(str, NETWORKS))}")
        self.save_hyperparameters()
        self.network = NETWORKS[depth](num_classes=classes, zero_init_residual=not small_images)
        kernel, stride, padding = (3, 1, 1) if small_images else (7, 2, 3)
        self.network.conv1 = nn.Conv2d(channels, 64, kernel, stride, padding, bias=False)
        nn.init.kaiming_normal_(self.network.conv1.weight, mode="fan_out", nonlinearity="relu")
        if small_images:
            self.network.maxpool = nn.Identity()
        self.network.to(memory_format=torch.channels_last)
        self.val_accuracy = MulticlassAccuracy(classes, average="micro")
        self.test_accuracy = MulticlassAccuracy(classes, average="micro")

    def forward(self, images: Tensor) -> Tensor:
        """Logits of shape (batch, classes)."""
        return self.network(images.contiguous(memory_format=torch.channels_last))

    def training_step(self, batch: Batch, batch_idx: int) -> Tensor:
        images, labels = batch
        smoothing = self.hparams["label_smoothing"]
        loss = cross_entropy(self(images), labels, label_smoothing=smoothing)
        self.log("train/loss", loss)
        return loss

    def validation_step(self, batch: Batch, batch_idx: int) -> None:
        images, labels = batch
        logits = self(images)
        self.val_accuracy(logits, labels)
        self.log("val/loss", cross_entropy(logits, labels), sync_dist=True)
        self.log("val/acc", self.val_accuracy)

    def test_step(self, batch: Batch, batch_idx: int) -> None:
        images, labels = batch
        logits = self(images)
        self.test_accuracy(logits, labels)
        self.log("test/loss", cross_entropy(logits, labels), sync_dist=True)
        self.log("test/acc", self.test_accuracy)

    def predict_step(self, batch: Batch, batch_idx: int) -> Tensor:
        """The labels of a batch, of shape (batch,)."""
        return self(batch[0]).argmax(dim=1)

    def configure_optimizers(self) -> Any:
        optimizer = torch.optim.SGD(
            self.parameters(),
            lr=self.hparams["lr"],
            momentum=self.hparams["momentum"],
            weight_decay=self.hparams["weight_decay"],
            nesterov=self.hparams["momentum"] > 0,
        )
        steps, warmup = self.trainer.estimated_stepping_batches, self.hparams["warmup"]
        if math.isinf(steps):
            raise ValueError(
                "the learning rate falls to an end: give trainer.max_epochs or max_steps"
            )
        schedule = torch.optim.lr_scheduler.LambdaLR(
            optimizer, lambda step: rise_and_fall(self._progress(step, int(steps)), warmup)
        )
        return {
            "optimizer": optimizer,
            "lr_scheduler": {"scheduler": schedule, "interval": "step"},
        }

    def _progress(self, step: int, steps: int) -> float:
        """The share of the training that is over after `step` of `steps`.

        Where max_epochs ends it, `step` is counted anew, from the epoch and the batch: a run that
        is resumed with another global batch size has made steps of another size.
        """
        trainer = self.trainer
        if steps != trainer.max_steps:
            in_epoch = steps // max(1, trainer.max_epochs or 1)
            batches = trainer.fit_loop.epoch_loop.batch_progress.current.ready
            step = math.ceil(batches / trainer.accumulate_grad_batches)
            step += trainer.current_epoch * in_epoch
        return min(1.0, (step + 0.5) / steps)  # + 0.5: no step has a learning rate of 0


def rise_and_fall(progress: float, warmup: float) -> float:
    """The factor of the learning rate: linear from 0 to 1 during `warmup`, then a cosine to 0."""
    if progress < warmup:
        return progress / warmup
    return (1 + math.cos(math.pi * (progress - warmup) / (1 - warmup))) / 2

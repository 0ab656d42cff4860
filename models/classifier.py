"""Image classification with a small convolutional network.

Batches are (images, labels): float images of shape (batch, channels, height, width) and int64
labels of shape (batch,). Logs train/loss, val/loss, val/acc, test/loss and test/acc.
"""

from __future__ import annotations

import torch
from pytorch_lightning import LightningModule
from torch import Tensor, nn
from torch.nn.functional import cross_entropy
from torchmetrics.classification import MulticlassAccuracy

Batch = tuple[Tensor, Tensor]


class Classifier(LightningModule):
    """Two convolutions and a linear layer; any image size that can be halved once.

    Args:
        lr: learning rate of Adam.
        classes: number of labels.
        channels: of the images.
        width: features of the first convolution; the second has twice as many.
        dropout: share of features dropped before the linear layer.
    """

    def __init__(
        self,
        lr: float = 2e-3,
        classes: int = 10,
        channels: int = 1,
        width: int = 32,
        dropout: float = 0.25,
    ) -> None:
        super().__init__()
        self.save_hyperparameters()
        self.network = nn.Sequential(
            nn.Conv2d(channels, width, 3, padding=1),
            nn.ReLU(),
            nn.Conv2d(width, 2 * width, 3, padding=1),
            nn.ReLU(),
            nn.MaxPool2d(2),
            nn.AdaptiveAvgPool2d(4),
            nn.Flatten(),
            nn.Dropout(dropout),
            nn.Linear(2 * width * 4 * 4, classes),
        )
        self.val_accuracy = MulticlassAccuracy(classes, average="micro")
        self.test_accuracy = MulticlassAccuracy(classes, average="micro")

    def forward(self, images: Tensor) -> Tensor:
        """Logits of shape (batch, classes)."""
        return self.network(images)

    def training_step(self, batch: Batch, batch_idx: int) -> Tensor:
        images, labels = batch
        loss = cross_entropy(self(images), labels)
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

    def configure_optimizers(self) -> torch.optim.Optimizer:
        return torch.optim.Adam(self.parameters(), lr=self.hparams["lr"])

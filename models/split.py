"""Model parallel training: one network on two devices, in a row or as a pipeline.

The first half computes on one device, the second on another, so that each holds a part of the
weights, of their gradients and of the optimizer's state. With one micro-batch each device waits
while the other computes. With m micro-batches the second device works on one while the first
computes the next; each then idles for 1 / (m + 1) of a step (GPipe, Huang et al. 2019,
https://arxiv.org/abs/1811.06965, which computes activations again in backward; here they are kept).
This needs no scheduler: GPUs queue their operations, so Python runs ahead of both. Copies between
two GPUs are queued as well; they are not non_blocking, with which a CPU would compute before its
part has arrived.

Splitting pays for a network that one device cannot hold. One that fits trains faster with data
parallel ranks, which leave no device idle. Both can be combined: each rank splits its copy. With
GPUs that means one rank per host, as all ranks take the same `devices`. So far it was run on CPUs
only, where both devices may be the same: that shows that the result is right, but is not faster.

There is no batch normalization, whose statistics would be those of micro-batches, so the loss is
the same as that of the whole network on one device (devices=null). Batches are (images, labels):
float images of shape (batch, channels, height, width), int64 labels of shape (batch,). Logs
train/loss, val/loss, val/acc, test/loss and test/acc.
"""

from __future__ import annotations

from itertools import pairwise

import torch
from pytorch_lightning import LightningModule
from torch import Tensor, nn
from torch.nn.functional import cross_entropy
from torchmetrics.classification import MulticlassAccuracy

Batch = tuple[Tensor, Tensor]
GROUPS = 4  # of group normalization


class Split(LightningModule):
    """3 x 3 convolutions in two halves with pooling between them, then a linear layer.

    Args:
        lr: learning rate of Adam.
        devices: of the first and the second half, e.g. ["cuda:0", "cuda:1"]; None: all on one.
        micro_batches: parts of a batch that go through the pipeline one after another.
        classes: number of labels.
        channels: of the images.
        width: features, a multiple of 4.
        depth: convolutions in each half.
    """

    def __init__(
        self,
        lr: float = 2e-3,
        devices: list[str] | None = None,
        micro_batches: int = 1,
        classes: int = 10,
        channels: int = 1,
        width: int = 32,
        depth: int = 2,
    ) -> None:
        super().__init__()
        if devices is not None and len(devices) != 2:
            raise ValueError(f"devices={devices}: two, for two halves; the same twice is fine")
        if min(micro_batches, depth) < 1 or width % GROUPS:
            raise ValueError(
                f"{micro_batches=} and {depth=} are at least 1, {width=} a multiple of {GROUPS}"
            )
        self.save_hyperparameters()
        features = [channels] + [width] * 2 * depth
        blocks = [block(a, b) for a, b in pairwise(features)]
        self.first = nn.Sequential(*blocks[:depth], nn.MaxPool2d(2))
        self.second = nn.Sequential(
            *blocks[depth:], nn.AdaptiveAvgPool2d(4), nn.Flatten(), nn.Linear(width * 16, classes)
        )
        self.val_accuracy = MulticlassAccuracy(classes, average="micro")
        self.test_accuracy = MulticlassAccuracy(classes, average="micro")

    def setup(self, stage: str) -> None:
        # Not in __init__: a model trained on GPUs may be loaded or exported on a host without any.
        devices, gpus = self.hparams["devices"] or [], torch.cuda.device_count()
        numbers = [torch.device(each).index or 0 for each in devices if each.startswith("cuda")]
        if numbers and max(numbers) >= gpus:
            raise ValueError(
                f"devices={devices}: GPUs that this process sees: {gpus}; [cpu,cpu] runs anywhere; "
                "`gpus` of a host file show one to each rank: leave them out"
            )
        if numbers and self.trainer.local_rank > 0:
            raise ValueError(
                f"devices={devices}: two ranks of a host would have the same; start one on each "
                "(NP=1, HOSTS=node1:1,node2:1)"
            )

    def place(self) -> None:
        """Move each half to its device, after Lightning has moved the whole to one."""
        for half, device in zip((self.first, self.second), self.hparams["devices"] or []):
            half.to(device)

    on_fit_start = on_test_start = on_predict_start = place

    def on_train_start(self) -> None:
        """Move what a checkpoint restored of the optimizer, which Lightning moves to one device, to
        those of its parameters."""
        for optimizer in self.trainer.optimizers:
            for parameter, state in optimizer.state.items():
                for key, value in state.items():
                    if isinstance(value, Tensor) and key != "step":  # which Adam has on the CPU
                        state[key] = value.to(parameter.device)

    def forward(self, images: Tensor) -> Tensor:
        """Logits of shape (batch, classes), on the device of the images."""
        if self.hparams["devices"] is None or torch.compiler.is_exporting():
            # An exported graph with micro-batches fails where the last of them is a single image.
            return self.second(self.first(images))
        # Where the halves are: after load_from_checkpoint on the CPU, whatever `devices` says.
        one, other = (next(half.parameters()).device for half in (self.first, self.second))
        logits = [
            self.second(self.first(part.to(one)).to(other))
            for part in images.chunk(self.hparams["micro_batches"])
        ]
        return torch.cat(logits).to(images.device)

    def training_step(self, batch: Batch, batch_idx: int) -> Tensor:
        images, labels = batch
        # Of the whole batch: its backward goes through both halves for each micro-batch.
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


def block(before: int, after: int) -> nn.Sequential:
    return nn.Sequential(
        nn.Conv2d(before, after, 3, padding=1), nn.GroupNorm(GROUPS, after), nn.ReLU()
    )

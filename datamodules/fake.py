"""Random images and labels: to try a model, or to time a job without reading a disk.

There is nothing to learn in them. An image is drawn from its index, so that it is the same in every
epoch, on every rank and with any number of ranks. Batches are (images, labels): float32 of shape
(batch, channels, size, size) from 0 to 1, int64 of shape (batch,).
"""

from __future__ import annotations

import torch
from pytorch_lightning import LightningDataModule
from torch import Tensor
from torch.utils.data import DataLoader, Dataset, Subset


class RandomImages(Dataset):
    """`count` pairs of (image, label)."""

    def __init__(self, count: int, channels: int, size: int, classes: int) -> None:
        self.count, self.classes = count, classes
        self.shape = (channels, size, size)

    def __len__(self) -> int:
        return self.count

    def __getitem__(self, index: int) -> tuple[Tensor, Tensor]:
        generator = torch.Generator().manual_seed(index)
        label = torch.randint(self.classes, (), generator=generator)
        return torch.rand(self.shape, generator=generator), label


class Fake(LightningDataModule):
    """`count` images to train, and an eighth of that (at least 8) to validate and to test each.

    Args:
        batch_size: images per process and step.
        count: images to train with.
        size: height and width in pixels.
        channels: of an image.
        classes: number of labels.
        num_workers: processes that draw; 0: the training process does.
    """

    def __init__(
        self,
        batch_size: int = 64,
        count: int = 1024,
        size: int = 64,
        channels: int = 3,
        classes: int = 10,
        num_workers: int = 0,
    ) -> None:
        super().__init__()
        if min(count, size, channels, classes) < 1:
            raise ValueError(f"{count=}, {size=}, {channels=}, {classes=}: each is at least 1")
        self.save_hyperparameters()
        held_out = max(8, count // 8)
        images = RandomImages(count + 2 * held_out, channels, size, classes)
        ends = [count, count + held_out, count + 2 * held_out]
        self.splits = [Subset(images, range(a, b)) for a, b in zip([0, *ends], ends)]

    def train_dataloader(self) -> DataLoader:
        return self._loader(0, shuffle=True)

    def val_dataloader(self) -> DataLoader:
        return self._loader(1)

    def test_dataloader(self) -> DataLoader:
        return self._loader(2)

    def _loader(self, split: int, shuffle: bool = False) -> DataLoader:
        return DataLoader(
            self.splits[split],
            batch_size=self.hparams["batch_size"],
            shuffle=shuffle,
            num_workers=self.hparams["num_workers"],
            persistent_workers=self.hparams["num_workers"] > 0,
            pin_memory=torch.cuda.is_available(),
        )

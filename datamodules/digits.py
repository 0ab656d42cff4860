"""Handwritten digits: 1,797 real images of 8 x 8 pixels in 10 classes.

They come inside the scikit-learn package (the test set of the UCI data set "Optical Recognition
of Handwritten Digits", https://archive.ics.uci.edu/dataset/80), so that nothing is downloaded.
Batches are (images, labels): float32 of shape (batch, 1, 8, 8) from 0 to 1 and int64 of shape
(batch,).
"""

from __future__ import annotations

import torch
from pytorch_lightning import LightningDataModule
from sklearn.datasets import load_digits
from torch.utils.data import DataLoader, Subset, TensorDataset, random_split


class Digits(LightningDataModule):
    """1,257 images to train, 180 to validate, 360 to test; one fixed split for all ranks.

    Args:
        batch_size: images per process and step.
        num_workers: processes that load; 0: the training process does, best for data this small.
        split_seed: decides which image goes where.
    """

    def __init__(
        self,
        batch_size: int = 32,
        num_workers: int = 0,
        split_seed: int = 0,
    ) -> None:
        super().__init__()
        self.save_hyperparameters()
        self.splits: list[Subset] = []

    def setup(self, stage: str) -> None:
        if not self.splits:
            digits = load_digits()
            images = torch.tensor(digits.images, dtype=torch.float32).unsqueeze(1) / 16
            labels = torch.tensor(digits.target, dtype=torch.int64)
            generator = torch.Generator().manual_seed(self.hparams["split_seed"])
            self.splits = random_split(TensorDataset(images, labels), [1257, 180, 360], generator)

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

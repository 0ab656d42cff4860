"""MNIST: 70,000 handwritten digits of 28 x 28 pixels in 10 classes, from its IDX files.

They lie in `data_dir`/MNIST/raw, where torchvision keeps them, and are downloaded if they are
missing (11 MB, https://yann.lecun.com/exdb/mnist). Batches are (images, labels): float32 of shape
(batch, 1, 28, 28) from 0 to 1, int64 of shape (batch,).

The batch size need not divide anything. In training each rank has equally many images, for which
the sampler draws a few of them (fewer than there are ranks) twice in an epoch; the last batch is
what is left: 55,000 images on 8 ranks with batch 64 are 107 batches of 64 and one of 27 on each
rank. In evaluation each image is seen once.
"""

from __future__ import annotations

from collections.abc import Callable
from pathlib import Path

import torch
from pytorch_lightning import LightningDataModule
from torch import Tensor
from torch.utils.data import DataLoader, Dataset, TensorDataset, random_split
from torchvision.datasets import MNIST
from torchvision.datasets.mnist import read_image_file, read_label_file

from datamodules.downloads import download

FILES = [
    f"{split}-{kind}-ubyte"
    for split in ("train", "t10k")
    for kind in ("images-idx3", "labels-idx1")
]


def read(how: Callable[[str], Tensor], file: Path) -> Tensor:
    """The content of a file; RuntimeError where it is cut off or something else."""
    try:
        return how(str(file))
    except (AssertionError, KeyError, RuntimeError, TypeError, ValueError) as error:
        why = str(error).partition("\n")[0] or "it is something else"  # torchvision does not say
        raise RuntimeError(f"{file} cannot be read: {why}: delete it to download it") from error


class Mnist(LightningDataModule):
    """55,000 images to train, 5,000 to validate, 10,000 to test; one fixed split for all ranks.

    Args:
        data_dir: where MNIST/raw is or will be; each host needs it.
        batch_size: images per process and step.
        num_workers: processes that load; 0: the training process does, as all are in memory.
        split_seed: decides which twelfth of the training files is for validation.

    Raises:
        FileNotFoundError: when the files are missing and cannot be downloaded.
    """

    def __init__(
        self,
        data_dir: str,
        batch_size: int = 64,
        num_workers: int = 0,
        split_seed: int = 0,
    ) -> None:
        super().__init__()
        self.save_hyperparameters()
        self.folder = Path(data_dir) / "MNIST" / "raw"
        self.splits: list[Dataset] = []

    def prepare_data(self) -> None:
        root = Path(self.hparams["data_dir"])
        download("MNIST", root, self.folder, FILES, MNIST)

    def setup(self, stage: str) -> None:
        if self.splits:
            return
        train, test = (
            TensorDataset(
                read(read_image_file, self.folder / images).unsqueeze(1) / 255,
                read(read_label_file, self.folder / labels),
            )
            for images, labels in (FILES[:2], FILES[2:])
        )
        generator = torch.Generator().manual_seed(self.hparams["split_seed"])
        held_out = len(train) // 12
        parts = random_split(train, [len(train) - held_out, held_out], generator)
        self.splits = [*parts, test]

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

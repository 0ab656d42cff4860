"""Images in folders, one a class: `folder`/<class>/<image>.png, as LSUN or ImageNet are unpacked.

Each is cut to its middle square and scaled to `size`. Batches are (images, labels): float32 of
shape (batch, channels, size, size) from 0 to 1, int64 of (batch,), classes in alphabetical order.
Nothing is downloaded, and nothing is augmented.
"""

from __future__ import annotations

from pathlib import Path

import torch
from pytorch_lightning import LightningDataModule
from torch.utils.data import DataLoader, Subset, random_split
from torchvision.datasets import ImageFolder
from torchvision.transforms.v2 import (
    CenterCrop,
    Compose,
    Grayscale,
    Identity,
    Resize,
    ToDtype,
    ToImage,
)


class Folder(LightningDataModule):
    """80 % of the images to train, 10 % to validate, 10 % to test; one fixed split for all ranks.

    Args:
        folder: with a folder for each class in it; each host needs it.
        batch_size: images a process takes a step.
        size: height and width in pixels.
        channels: 3 for colours, 1 for grey.
        num_workers: processes that read; None: as many as this process has cores, at most 4.
        pin_memory: whether batches lie ready for the copy to a GPU; None: when there is one.
        split_seed: decides which image goes where.

    Raises:
        FileNotFoundError: when the folder or images in it are missing.
    """

    def __init__(
        self,
        folder: str,
        batch_size: int = 64,
        size: int = 64,
        channels: int = 3,
        num_workers: int | None = None,
        pin_memory: bool | None = None,
        split_seed: int = 0,
    ) -> None:
        super().__init__()
        if channels not in (1, 3):
            raise ValueError(f"channels={channels}: 3 for colours, 1 for grey")
        self.save_hyperparameters()
        self.splits: list[Subset] = []

    def setup(self, stage: str) -> None:
        if self.splits:
            return
        folder, size = Path(self.hparams["folder"]), self.hparams["size"]
        transform = Compose(
            [
                ToImage(),
                Identity() if self.hparams["channels"] == 3 else Grayscale(),
                Resize(size, antialias=True),
                CenterCrop(size),
                ToDtype(torch.float32, scale=True),
            ]
        )
        try:
            images = ImageFolder(str(folder), transform)
        except FileNotFoundError as error:
            reason = "it holds no images" if folder.is_dir() else "there is no such folder"
            raise FileNotFoundError(
                f"data.folder={folder}: {reason}; images are expected as "
                f"{folder}/<class>/<name>.png or .jpg, with at least one image in each class"
            ) from error
        generator = torch.Generator().manual_seed(self.hparams["split_seed"])
        self.splits = random_split(images, [0.8, 0.1, 0.1], generator)

    def train_dataloader(self) -> DataLoader:
        return self._loader(0, shuffle=True)

    def val_dataloader(self) -> DataLoader:
        return self._loader(1)

    def test_dataloader(self) -> DataLoader:
        return self._loader(2)

    def predict_dataloader(self) -> DataLoader:
        return self._loader(2)

    def _loader(self, split: int, shuffle: bool = False) -> DataLoader:
        workers, pin_memory = self.hparams["num_workers"], self.hparams["pin_memory"]
        if workers is None:
            workers = min(4, torch.get_num_threads())
        return DataLoader(
            self.splits[split],
            batch_size=self.hparams["batch_size"],
            shuffle=shuffle,
            num_workers=workers,
            persistent_workers=workers > 0,
            pin_memory=torch.cuda.is_available() if pin_memory is None else pin_memory,
        )

"""Images in folders, one a class: `folder`/<class>/<image>.png, or with a split that is made.

Where the folder holds train/ and val/, each with a folder for each class, as ImageNet is unpacked,
these are the split; val/ is tested too, for ImageNet's test images have no labels.

Each image is scaled to `size` and cut to its middle square. Batches are (images, labels): float32
of shape (batch, channels, size, size) from 0 to 1, int64 of (batch,), classes in alphabetical
order. Nothing is downloaded.
"""

from __future__ import annotations

import copy
import hashlib
import os
import re
from itertools import chain
from pathlib import Path

import torch
from PIL import Image
from pytorch_lightning import LightningDataModule
from torch.utils.data import DataLoader, Dataset, Subset, random_split
from torchvision.datasets import ImageFolder
from torchvision.datasets.folder import pil_loader
from torchvision.transforms.v2 import (
    CenterCrop,
    Compose,
    Grayscale,
    Identity,
    RandomHorizontalFlip,
    RandomResizedCrop,
    Resize,
    ToDtype,
    ToImage,
)

from datamodules.ranks import draws_of_rank, refuse_other_files, workers_of_rank


class Folder(LightningDataModule):
    """Without train/ and val/: 80 % of the images to train, 10 % to validate, 10 % to test.

    The split is one for all ranks.

    Args:
        folder: with a folder for each class in it; each host needs it.
        batch_size: images a process takes a step.
        size: height and width in pixels.
        channels: 3 for colours, 1 for grey.
        augment: whether training takes a random part of each image, half of them mirrored (see
            `view`); not with overfit_batches.
        num_workers: processes that read; None: as many as this rank has cores, at most 4.
        pin_memory: whether batches lie ready for the copy to a GPU; None: when there is one.
        split_seed: decides which image goes where, where there is no train/ and val/.

    Raises:
        FileNotFoundError: when the folder or images in it are missing.
        ValueError: when train/ and val/ have other classes, or hosts other files.
    """

    def __init__(
        self,
        folder: str,
        batch_size: int = 64,
        size: int = 64,
        channels: int = 3,
        augment: bool = False,
        num_workers: int | None = None,
        pin_memory: bool | None = None,
        split_seed: int = 0,
    ) -> None:
        super().__init__()
        if channels not in (1, 3):
            raise ValueError(f"channels={channels}: 3 for colours, 1 for grey")
        self.save_hyperparameters()
        self.splits: list[Dataset] = []

    def setup(self, stage: str) -> None:
        if self.splits:
            return
        folder, seed = Path(self.hparams["folder"]), self.hparams["split_seed"]
        split = [name for name in ("train", "val") if _holds_folders(folder / name)]
        if len(split) == 1:
            raise FileNotFoundError(
                f"data.folder={folder}: it has {split[0]}/<class>/ alone; train/ and val/ are "
                "expected, each with a folder for each class, or these folders without train/"
            )
        if split:
            train, val = self._images(folder / "train"), self._images(folder / "val")
            if differing := set(train.classes) ^ set(val.classes):
                raise ValueError(
                    f"data.folder={folder}: train/ and val/ need the same classes; only one has "
                    f"{', '.join(sorted(differing)[:3])}"
                )
            self.splits = [train, val, val]
        else:
            val = self._images(folder)
            train = copy.copy(val)
            parts = random_split(val, [0.8, 0.1, 0.1], torch.Generator().manual_seed(seed))
            self.splits = [Subset(train, parts[0].indices), *parts[1:]]
        # A rank takes images by their numbers: of another list they would be others.
        listed = _digest(folder, train, val)
        refuse_other_files(self.trainer, f"data.folder={folder}", listed)
        size, channels, augment = (self.hparams[name] for name in ("size", "channels", "augment"))
        if getattr(self.trainer, "overfit_batches", 0):  # which are to stay the same
            augment = False
        look = view(size, channels, augment)
        train.transform = draws_of_rank(self.trainer, look) if augment else look
        val.transform = view(size, channels, whole=not augment)

    def _images(self, folder: Path) -> ImageFolder:
        try:
            return ImageFolder(str(folder), loader=read)
        except FileNotFoundError as error:
            reason = "it holds no images" if folder.is_dir() else "there is no such folder"
            if match := re.search("Found no valid file for the classes (.+?)[.] ", str(error)):
                reason = f"it holds no images of {match[1]}"
            raise FileNotFoundError(
                f"data.folder={folder}: {reason}; images are expected as "
                f"{folder}/<class>/<name>.png or .jpg, with at least one image in each class"
            ) from error

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
            workers = workers_of_rank(self.trainer)
        return DataLoader(
            self.splits[split],
            batch_size=self.hparams["batch_size"],
            shuffle=shuffle,
            num_workers=workers,
            persistent_workers=workers > 0,
            pin_memory=torch.cuda.is_available() if pin_memory is None else pin_memory,
        )


def _holds_folders(folder: Path) -> bool:
    return folder.is_dir() and any(path.is_dir() for path in folder.iterdir())


def _digest(folder: Path, *images: ImageFolder) -> str:
    """Of the names in the folder, in their order."""
    digest, start = hashlib.sha256(), len(str(folder))
    for path, _ in chain(*(dataset.samples for dataset in images)):
        digest.update(os.fsencode(path[start:]) + b"\0")
    return digest.hexdigest()


def read(path: str) -> Image.Image:
    """The image in a file, in colours.

    Raises:
        RuntimeError: with the path, when it is none.
    """
    try:
        return pil_loader(path)
    except (OSError, SyntaxError, ValueError) as error:  # SyntaxError: of a broken PNG
        raise RuntimeError(f"{path} cannot be read: {error}") from error


def view(size: int, channels: int = 3, augment: bool = False, whole: bool = True) -> Compose:
    """What a model sees of a PIL image: float32 of shape (channels, size, size) from 0 to 1.

    Args:
        size: in pixels.
        channels: 3 for colours, 1 for grey.
        augment: a random part of 8 to 100 % of the area, half of them mirrored, as in Szegedy et
            al. 2014, https://arxiv.org/abs/1409.4842; else the middle square.
        whole: the middle square is of the image's height or width; else of 7/8 of that (224 of
            256 pixels), which suits models that were trained on random parts.
    """
    cut = [Resize(size if whole else size * 8 // 7, antialias=True), CenterCrop(size)]
    if augment:
        cut = [RandomResizedCrop(size, antialias=True), RandomHorizontalFlip()]
    grey = Identity() if channels == 3 else Grayscale()
    return Compose([ToImage(), grey, *cut, ToDtype(torch.float32, scale=True)])

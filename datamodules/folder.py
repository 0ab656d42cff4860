"""Images in one folder for each class: `folder`/<class>/<image>.png.

Where `folder` holds train/ and val/, each with a folder for each class, as ImageNet is unpacked,
these are the split. Unless there is a test/ with these folders, val/ is tested too, as ImageNet's
test images have no labels.

Else 80 % of the images are to train, 10 % to validate and 10 % to test, by a hash of their names:
when images are added later, few of the others change sides.

Each image is scaled to `size` and cut to its middle square. Batches are (images, labels): float32
of shape (batch, channels, size, size) from 0 to 1, int64 of shape (batch,), classes in alphabetical
order. Nothing is downloaded. Names that begin with a dot, as file managers make, are passed over.
"""

from __future__ import annotations

import copy
import hashlib
import os
import re
import warnings
from itertools import chain
from pathlib import Path
from typing import Any

import torch
from pytorch_lightning import LightningDataModule
from pytorch_lightning.trainer.states import TrainerFn
from torch.utils.data import DataLoader, Dataset, Subset
from torchvision.datasets import ImageFolder

from datamodules.pictures import Images, Unlabelled, split_by_name, view
from datamodules.ranks import draws_of_rank, refuse_other_files, workers_of_rank

SPLITS = {"train", "training", "val", "valid", "validation", "test", "testing"}
Split = tuple[ImageFolder, ImageFolder, ImageFolder]  # to train, to validate, to test


class Folder(LightningDataModule):
    """Images to train, to validate and to test; the split is one for all ranks.

    Args:
        folder: with a folder for each class in it; each host needs it.
        batch_size: images per process and step.
        size: height and width in pixels.
        channels: 3 for colours, 1 for grey.
        augment: whether training takes a random part of each image, half of them mirrored (see
            `view`); it never does with overfit_batches.
        num_workers: processes that load; None: as many as this rank has cores, at most 4.
        split_seed: decides which image goes where if there is no train/ and val/.
        predict: a folder of images, in folders or not, to predict in the order of their names;
            None: those to test.

    Raises:
        FileNotFoundError: when the folder or images in it are missing.
        ValueError: when classes differ between the parts of the split or from those of the
            checkpoint, or files between hosts.
    """

    def __init__(
        self,
        folder: str,
        batch_size: int = 64,
        size: int = 64,
        channels: int = 3,
        augment: bool = False,
        num_workers: int | None = None,
        split_seed: int = 0,
        predict: str | None = None,
    ) -> None:
        super().__init__()
        if channels not in (1, 3):
            raise ValueError(f"channels={channels}: 3 for colours, 1 for grey")
        self.save_hyperparameters()
        self.splits: list[Dataset] = []
        self.classes: list[str] = []
        self.listed = ""  # a digest of all names

    def setup(self, stage: str) -> None:
        if self.splits:
            return
        folder = Path(self.hparams["folder"]).expanduser()
        size, channels, augment = (self.hparams[name] for name in ("size", "channels", "augment"))
        parts = [name for name in ("train", "val") if _holds_folders(folder / name)]
        if len(parts) == 1:
            raise FileNotFoundError(
                f"data.folder={folder}: it has {parts[0]}/<class>/ alone; train/ and val/ are "
                "expected, each with a folder for each class, or these folders without train/"
            )
        train, val, test = self._given_split(folder) if parts else self._made_split(folder)
        # A rank takes images by their numbers, which in another list would be of other images.
        self.classes, self.listed = train.classes, _digest(folder, train, val, test)
        refuse_other_files(self.trainer, f"data.folder={folder}", self.listed)
        if getattr(self.trainer, "overfit_batches", 0):  # which are to stay the same
            augment = False
        to_train = view(size, channels, augment)
        train.transform = draws_of_rank(self.trainer, to_train) if augment else to_train
        val.transform = test.transform = view(size, channels, whole=not augment)
        if self.hparams["predict"] is not None:
            folder = Path(self.hparams["predict"]).expanduser()
            new = Unlabelled(folder, val.transform, val.class_to_idx)
            refuse_other_files(self.trainer, f"data.predict={folder}", _digest(folder, new))
            self.splits.append(new)

    def _given_split(self, folder: Path) -> Split:
        train, val = self._images(folder / "train"), self._images(folder / "val")
        test = self._images(folder / "test") if _holds_folders(folder / "test") else val
        for name, images in (("val", val), ("test", test)):
            if differing := set(train.classes) ^ set(images.classes):
                raise ValueError(
                    f"data.folder={folder}: train/ and {name}/ need the same classes; only one "
                    f"has {', '.join(sorted(differing)[:3])}"
                )
        self.splits = [train, val, test]
        return train, val, test

    def _made_split(self, folder: Path) -> Split:
        images = self._images(folder)
        if {name.casefold() for name in images.classes} <= SPLITS:
            raise ValueError(
                f"data.folder={folder}: {', '.join(images.classes)} would be classes; rename "
                "them train and val, and test, if they are the parts of a split"
            )
        if len(images) < 3:
            raise ValueError(f"data.folder={folder}: {len(images)} images; a split needs 3 or more")
        train = copy.copy(images)  # will have another transform
        parts = split_by_name(images, self.hparams["split_seed"])
        self.splits = [Subset(of, part) for of, part in zip((train, images, images), parts)]
        return train, images, images

    def state_dict(self) -> dict[str, Any]:
        return {"classes": self.classes, "files": self.listed}

    def load_state_dict(self, state_dict: dict[str, Any]) -> None:
        if not state_dict or self.trainer is None:
            return
        trained, mine = state_dict["classes"], self.classes
        if self.trainer.state.fn == TrainerFn.PREDICTING:  # the classes of the checkpoint
            images: Any = self.splits[-1]
            images = images.dataset if isinstance(images, Subset) else images
            images.class_to_idx = {name: number for number, name in enumerate(trained)}
            return
        where = f"data.folder={self.hparams['folder']}"
        if trained != mine:
            raise ValueError(
                f"{where}: the checkpoint's classes are {_few(trained)}, these are {_few(mine)}: "
                "labels would mean others"
            )
        if state_dict["files"] != self.listed and isinstance(self.splits[0], Subset):
            warnings.warn(
                f"{where}: other files than the checkpoint was trained with: of those that it "
                "trained, some may be among those to validate and to test now",
                stacklevel=2,
            )

    def _images(self, folder: Path) -> ImageFolder:
        try:
            images = Images(folder)
        except FileNotFoundError as error:
            reason = "it holds no images" if folder.is_dir() else "there is no such folder"
            if match := re.search("Found no valid file for the classes (.+?)[.] ", str(error)):
                reason = f"it holds no images of {match[1]}"
            raise FileNotFoundError(
                f"data.folder={folder}: {reason}; images are expected as "
                f"{folder}/<class>/<name>.png or .jpg, with at least one image in each class"
            ) from error
        if images.left_out:
            kinds = ", ".join(f"{count} {kind}" for kind, count in images.left_out.most_common(5))
            warnings.warn(
                f"data.folder={folder}: files that are no images, by their names, are left out: "
                f"{kinds}",
                stacklevel=2,
            )
        return images

    def train_dataloader(self) -> DataLoader:
        return self._loader(0, shuffle=True)

    def val_dataloader(self) -> DataLoader:
        return self._loader(1)

    def test_dataloader(self) -> DataLoader:
        return self._loader(2)

    def predict_dataloader(self) -> DataLoader:
        return self._loader(-1)

    def _loader(self, split: int, shuffle: bool = False) -> DataLoader:
        workers = self.hparams["num_workers"]
        if workers is None:
            workers = workers_of_rank(self.trainer)
        return DataLoader(
            self.splits[split],
            batch_size=self.hparams["batch_size"],
            shuffle=shuffle,
            num_workers=workers,
            persistent_workers=workers > 0,
            pin_memory=torch.cuda.is_available(),
        )


def _few(classes: list[str]) -> str:
    return ", ".join(classes[:5]) + (f" and {len(classes) - 5} more" if len(classes) > 5 else "")


def _holds_folders(folder: Path) -> bool:
    return folder.is_dir() and any(path.is_dir() for path in folder.iterdir())


def _digest(folder: Path, *images: ImageFolder | Unlabelled) -> str:
    """A digest of the names of images in the folder, in their order."""
    digest, start = hashlib.sha256(), len(str(folder))
    for path, _ in chain(*(dataset.samples for dataset in images)):
        digest.update(os.fsencode(path[start:]) + b"\0")
    return digest.hexdigest()

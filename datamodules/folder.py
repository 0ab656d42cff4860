"""Images in folders, one a class: `folder`/<class>/<image>.png, or with a split that is made.

Where the folder holds train/ and val/, each with a folder for each class, as ImageNet is unpacked,
these are the split; val/ is tested too, for ImageNet's test images have no labels, unless there is
a test/ with these folders.

Else 80 % of the images are to train, 10 % to validate and 10 % to test, by a hash of their names:
where some are added later, few of the others change sides.

Each image is scaled to `size` and cut to its middle square. Batches are (images, labels): float32
of shape (batch, channels, size, size) from 0 to 1, int64 of (batch,), classes in alphabetical
order. Nothing is downloaded. Names that begin with a dot are passed over, as file managers make
them.
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


class Folder(LightningDataModule):
    """Images to train, to validate and to test; the split is one for all ranks.

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
        predict: a folder of images, in folders or not, to predict in the order of their names;
            None: those to test.

    Raises:
        FileNotFoundError: when the folder or images in it are missing.
        ValueError: when train/ and val/ have other classes, or hosts other files, or a checkpoint
            is of other classes.
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
        folder, seed = Path(self.hparams["folder"]), self.hparams["split_seed"]
        size, channels, augment = (self.hparams[name] for name in ("size", "channels", "augment"))
        split = [name for name in ("train", "val") if _holds_folders(folder / name)]
        if len(split) == 1:
            raise FileNotFoundError(
                f"data.folder={folder}: it has {split[0]}/<class>/ alone; train/ and val/ are "
                "expected, each with a folder for each class, or these folders without train/"
            )
        if split:
            train, val = self._images(folder / "train"), self._images(folder / "val")
            test = self._images(folder / "test") if _holds_folders(folder / "test") else val
            for name, images in (("val", val), ("test", test)):
                if differing := set(train.classes) ^ set(images.classes):
                    raise ValueError(
                        f"data.folder={folder}: train/ and {name}/ need the same classes; only one "
                        f"has {', '.join(sorted(differing)[:3])}"
                    )
            self.splits = [train, val, test]
        else:
            test = val = self._images(folder)
            if {name.casefold() for name in val.classes} <= SPLITS:
                raise ValueError(
                    f"data.folder={folder}: {', '.join(val.classes)} would be classes; rename "
                    "them train and val, and test, if they are the parts of a split"
                )
            train = copy.copy(val)
            parts = split_by_name(val, seed)
            self.splits = [Subset(train, parts[0]), Subset(val, parts[1]), Subset(val, parts[2])]
        # A rank takes images by their numbers: of another list they would be others.
        self.classes, self.listed = train.classes, _digest(folder, train, val, test)
        refuse_other_files(self.trainer, f"data.folder={folder}", self.listed)
        if getattr(self.trainer, "overfit_batches", 0):  # which are to stay the same
            augment = False
        look = view(size, channels, augment)
        train.transform = draws_of_rank(self.trainer, look) if augment else look
        val.transform = test.transform = view(size, channels, whole=not augment)
        if self.hparams["predict"] is not None:
            folder = Path(self.hparams["predict"])
            new = Unlabelled(folder, val.transform, val.class_to_idx)
            refuse_other_files(self.trainer, f"data.predict={folder}", _digest(folder, new))
            self.splits.append(new)

    def state_dict(self) -> dict[str, Any]:
        return {"classes": self.classes, "files": self.listed}

    def load_state_dict(self, state_dict: dict[str, Any]) -> None:
        task, where = getattr(self.trainer, "state", None), f"data.folder={self.hparams['folder']}"
        if not state_dict or task is None:
            return
        if task.fn == TrainerFn.PREDICTING:  # what is predicted are the classes of the checkpoint
            images: Any = self.splits[-1]
            images = images.dataset if isinstance(images, Subset) else images
            images.class_to_idx = {
                name: number for number, name in enumerate(state_dict["classes"])
            }
            return
        trained, mine = state_dict["classes"], self.classes
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


def _few(classes: list[str]) -> str:
    return ", ".join(classes[:5]) + (f" and {len(classes) - 5} more" if len(classes) > 5 else "")


def _holds_folders(folder: Path) -> bool:
    return folder.is_dir() and any(path.is_dir() for path in folder.iterdir())


def _digest(folder: Path, *images: ImageFolder | Unlabelled) -> str:
    """Of the names in the folder, in their order."""
    digest, start = hashlib.sha256(), len(str(folder))
    for path, _ in chain(*(dataset.samples for dataset in images)):
        digest.update(os.fsencode(path[start:]) + b"\0")
    return digest.hexdigest()

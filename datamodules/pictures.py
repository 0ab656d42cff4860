"""Images in folders: which files there are, how one is read, and what a model sees of it."""

from __future__ import annotations

import contextlib
import hashlib
import os
from collections import Counter
from itertools import pairwise
from pathlib import Path

import numpy as np
import torch
from PIL import Image, ImageOps
from torch import Tensor
from torch.utils.data import Dataset
from torchvision.datasets import ImageFolder
from torchvision.datasets.folder import IMG_EXTENSIONS
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

from datamodules.ranks import Transform

NOT_MEANT = {"thumbs.db", "desktop.ini"}  # left out without a word
# What Pillow raises for a file that is no image or too large; a broken PNG is a SyntaxError.
UNREADABLE = (OSError, SyntaxError, ValueError, Image.DecompressionBombError)
SIXTEEN = ("PNG", "PPM")  # formats whose 16 bits Pillow may give as 32


def in_colours(image: Image.Image) -> Image.Image:
    """RGB of 8 bits: upright as its EXIF says, 16 bits scaled to 8, white where it is transparent.

    Pillow's own `convert("RGB")` cuts 16 bits off at 255 and shows what transparency hides.

    Raises:
        ValueError: for pixels of 32 bits, for which no value is known to be white.
    """
    sixteen = image.mode.startswith("I;16") or (image.mode == "I" and image.format in SIXTEEN)
    image.load()  # what is damaged in the pixels is an error
    with contextlib.suppress(Exception):  # in the EXIF not: pixels are turned before it is written
        ImageOps.exif_transpose(image, in_place=True)
    if sixteen:
        image = Image.fromarray((np.asarray(image) >> 8).astype(np.uint8))
    if image.mode in ("I", "F"):
        raise ValueError("its pixels have 32 bits; write it with 8 or 16")
    if image.has_transparency_data:
        image = image.convert("RGBA")
        image = Image.alpha_composite(Image.new("RGBA", image.size, "white"), image)
    return image.convert("RGB")


def read(path: str) -> Image.Image:
    """The image in a file, in colours.

    Raises:
        RuntimeError: with the path, where it is no image that can be read.
    """
    try:
        with Image.open(path) as image:
            return in_colours(image)
    except UNREADABLE as error:
        raise RuntimeError(f"{path} cannot be read: {error}") from error


def view(size: int, channels: int = 3, augment: bool = False, whole: bool = True) -> Compose:
    """What a model sees of a PIL image: float32 of shape (channels, size, size) from 0 to 1.

    Args:
        size: in pixels.
        channels: 3 for colours, 1 for grey.
        augment: a random part of 8 to 100 % of the area, half of them mirrored, as in Szegedy et
            al. 2014, https://arxiv.org/abs/1409.4842; else the middle square.
        whole: whether the middle square has the full height or width of the image; else 7/8 of it
            (224 of 256 pixels), which suits models that were trained on random parts.
    """
    cut = [Resize(size if whole else size * 8 // 7, antialias=True), CenterCrop(size)]
    if augment:
        cut = [RandomResizedCrop(size, antialias=True), RandomHorizontalFlip()]
    grey = Identity() if channels == 3 else Grayscale()
    return Compose([ToImage(), grey, *cut, ToDtype(torch.float32, scale=True)])


class Images(ImageFolder):
    """An ImageFolder without names that begin with a dot: .ipynb_checkpoints/, ._IMG_1.jpg.

    Attributes:
        left_out: how many files are no images, by their suffixes.
    """

    def __init__(self, folder: Path) -> None:
        self.left_out: Counter[str] = Counter()
        self.start = len(str(folder))  # of what `folder` holds, in a path
        super().__init__(str(folder), loader=read, is_valid_file=self._is_valid)

    def find_classes(self, directory: str | Path) -> tuple[list[str], dict[str, int]]:
        names = sorted(entry.name for entry in os.scandir(directory) if entry.is_dir())
        classes = [name for name in names if not name.startswith((".", "__MACOSX"))]
        if not classes:
            raise FileNotFoundError(f"no folders in {directory}")
        return classes, {name: index for index, name in enumerate(classes)}

    def _is_valid(self, path: str) -> bool:
        if is_image(path, self.start):
            return True
        if "/." not in path[self.start :] and os.path.basename(path).casefold() not in NOT_MEANT:
            self.left_out[os.path.splitext(path)[1] or "without a suffix"] += 1
        return False


class Unlabelled(Dataset):
    """Images below a folder, in the order of their paths, with the label -1.

    Attributes:
        samples: their paths and labels.
        class_to_idx: the classes that a model was trained on, and their numbers.

    Raises:
        FileNotFoundError: where there are none.
    """

    def __init__(self, folder: Path, transform: Transform, class_to_idx: dict[str, int]) -> None:
        self.transform, self.class_to_idx = transform, class_to_idx
        walked = os.walk(folder, followlinks=True)
        paths = sorted(os.path.join(above, name) for above, _, names in walked for name in names)
        self.samples = [(path, -1) for path in paths if is_image(path, len(str(folder)))]
        if not self.samples:
            raise FileNotFoundError(f"data.predict={folder}: there are no images in it")

    def __len__(self) -> int:
        return len(self.samples)

    def __getitem__(self, index: int) -> tuple[Tensor, int]:
        path, label = self.samples[index]
        return self.transform(read(path)), label


def is_image(path: str, start: int) -> bool:
    """Whether its suffix says so, and no name in the path from `start` on begins with a dot."""
    return path.lower().endswith(IMG_EXTENSIONS) and "/." not in path[start:]


def split_by_name(images: ImageFolder, seed: int) -> list[list[int]]:
    """The indices of images to train, to validate and to test, in ascending order."""
    start = len(str(images.root))
    names = [f"{seed} {path[start:]}" for path, _ in images.samples]
    hashes = [hashlib.sha256(os.fsencode(name)).digest() for name in names]
    order = sorted(range(len(names)), key=hashes.__getitem__)
    held_out = max(1, round(len(order) / 10))
    ends = [0, max(0, len(order) - 2 * held_out), max(0, len(order) - held_out), len(order)]
    return [sorted(order[begin:end]) for begin, end in pairwise(ends)]

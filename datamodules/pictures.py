"""Pictures in folders: which files there are, how one is read, and what a model sees of it."""

from __future__ import annotations

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

from datamodules.ranks import Look

NOT_MEANT = {"thumbs.db", "desktop.ini"}  # left out without a word
# What Pillow raises for a file that is no picture, or too large; SyntaxError: of a broken PNG.
UNREADABLE = (OSError, SyntaxError, ValueError, Image.DecompressionBombError)
SIXTEEN = ("PNG", "PPM")  # formats of which Pillow may give 16 bits in 32


def in_colours(image: Image.Image) -> Image.Image:
    """RGB of 8 bits: upright as its EXIF says, 16 bits scaled to 8, white where it is transparent.

    Pillow's own `convert("RGB")` cuts 16 bits off at 255, and shows what hides behind transparency.

    Raises:
        ValueError: for pixels of 32 bits, of which nobody knows what white is.
    """
    sixteen = image.mode.startswith("I;16") or (image.mode == "I" and image.format in SIXTEEN)
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
    """The image in a file, as `in_colours` says.

    Raises:
        RuntimeError: with the path, when it is none.
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
        whole: the middle square is of the image's height or width; else of 7/8 of that (224 of
            256 pixels), which suits models that were trained on random parts.
    """
    cut = [Resize(size if whole else size * 8 // 7, antialias=True), CenterCrop(size)]
    if augment:
        cut = [RandomResizedCrop(size, antialias=True), RandomHorizontalFlip()]
    grey = Identity() if channels == 3 else Grayscale()
    return Compose([ToImage(), grey, *cut, ToDtype(torch.float32, scale=True)])


class Images(ImageFolder):
    """Without names that begin with a dot: .ipynb_checkpoints/, ._IMG_1.jpg.

    Attributes:
        left_out: how many other files there are, by their suffixes.
    """

    def __init__(self, folder: Path) -> None:
        self.left_out: Counter[str] = Counter()
        start = len(str(folder))
        super().__init__(str(folder), loader=read, is_valid_file=lambda path: self._is(path, start))

    def find_classes(self, directory: str | Path) -> tuple[list[str], dict[str, int]]:
        names = sorted(entry.name for entry in os.scandir(directory) if entry.is_dir())
        classes = [name for name in names if not name.startswith((".", "__MACOSX"))]
        if not classes:
            raise FileNotFoundError(f"no folders in {directory}")
        return classes, {name: index for index, name in enumerate(classes)}

    def _is(self, path: str, start: int) -> bool:
        if is_image(path, start):
            return True
        if "/." not in path[start:] and os.path.basename(path).casefold() not in NOT_MEANT:
            self.left_out[os.path.splitext(path)[1] or "without a suffix"] += 1
        return False


class Unlabelled(Dataset):
    """Images below a folder, in the order of their paths, with the label -1.

    Attributes:
        samples: their paths and labels.
        class_to_idx: of those that were trained.

    Raises:
        FileNotFoundError: without any.
    """

    def __init__(self, folder: Path, look: Look, class_to_idx: dict[str, int]) -> None:
        self.look, self.class_to_idx, start = look, class_to_idx, len(str(folder))
        paths = (os.path.join(*at) for at in _walk(folder))
        self.samples = [(path, -1) for path in sorted(paths) if is_image(path, start)]
        if not self.samples:
            raise FileNotFoundError(f"data.predict={folder}: there are no images in it")

    def __len__(self) -> int:
        return len(self.samples)

    def __getitem__(self, index: int) -> tuple[Tensor, int]:
        path, label = self.samples[index]
        return self.look(read(path)), label


def _walk(folder: Path) -> list[tuple[str, str]]:
    return [
        (above, name) for above, _, names in os.walk(folder, followlinks=True) for name in names
    ]


def is_image(path: str, start: int) -> bool:
    """By its name; from `start` on nothing in it begins with a dot."""
    return path.lower().endswith(IMG_EXTENSIONS) and "/." not in path[start:]


def split_by_name(images: ImageFolder, seed: int) -> list[list[int]]:
    """The indices to train, to validate and to test, each in the order of the images."""
    start = len(str(images.root))
    names = [f"{seed} {path[start:]}" for path, _ in images.samples]
    hashes = [hashlib.sha256(os.fsencode(name)).digest() for name in names]
    order = sorted(range(len(names)), key=hashes.__getitem__)
    held_out = max(1, round(len(order) / 10))
    ends = [0, max(0, len(order) - 2 * held_out), max(0, len(order) - held_out), len(order)]
    return [sorted(order[begin:end]) for begin, end in pairwise(ends)]

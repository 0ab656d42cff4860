"""Pairs of noisy images of the same thing, generated from a seed.

The thing is a picture of overlapping discs and bars in shades of grey. All pictures are drawn once
per host into a file in `data_dir`, which each rank maps into memory. Noise is drawn for each image
from its index, so that an image is the same in every epoch, on every rank and with any number of
ranks. Batches are (noisy, target, clean), float32 of shape (batch, 1, size, size): two independent
noisy images, and the clean one to measure with.
"""

from __future__ import annotations

import os
import socket
from itertools import accumulate, pairwise
from pathlib import Path

import numpy as np
import torch
from pytorch_lightning import LightningDataModule
from torch import Tensor
from torch.utils.data import DataLoader, Dataset, Subset

from datamodules.ranks import workers_of_rank

SHAPES = 24  # in an image


class NoisyPairs(Dataset):
    """(noisy, target, clean) of a file of clean uint8 images, each of shape (1, size, size)."""

    def __init__(self, file: Path, sigma: float, seed: int) -> None:
        self.images = np.load(file, mmap_mode="r")
        self.sigma = sigma
        self.seed = seed

    def __len__(self) -> int:
        return len(self.images)

    def __getitem__(self, index: int) -> tuple[Tensor, Tensor, Tensor]:
        clean = torch.from_numpy(self.images[index].astype(np.float32) / 255).unsqueeze(0)
        generator = torch.Generator().manual_seed(self.seed * len(self) + index)
        noise = self.sigma * torch.randn((2, *clean.shape), generator=generator)
        return clean + noise[0], clean + noise[1], clean


class Noise(LightningDataModule):
    """`count` images to train, and an eighth of that (at least 8) to validate and to test each.

    Args:
        data_dir: folder for the generated file; each host needs it.
        batch_size: images per process and step.
        count: images to train with.
        size: height and width in pixels.
        sigma: standard deviation of the noise, where white is 1.
        seed: of images and noise.
        num_workers: processes that load; None: on GPUs as many as this rank has cores, at most 4,
            else 0.
    """

    things = "noise"  # what the images are of: the file's name begins with it

    def __init__(
        self,
        data_dir: str,
        batch_size: int = 8,
        count: int = 256,
        size: int = 64,
        sigma: float = 0.1,
        seed: int = 0,
        num_workers: int | None = None,
    ) -> None:
        super().__init__()
        if count < 1 or size < 1 or sigma < 0:
            raise ValueError(f"count={count}, size={size} must be at least 1, sigma={sigma} 0")
        self.save_hyperparameters()
        self.counts = [count, max(8, count // 8), max(8, count // 8)]  # of each split
        self.file = Path(data_dir) / f"{self.things}_{count}x{size}x{size}_seed{seed}.npy"
        self.splits: list[Subset] = []

    def prepare_data(self) -> None:
        # Lightning calls this on one rank per host, while the others wait.
        if not self.file.exists():
            self.file.parent.mkdir(parents=True, exist_ok=True)
            unfinished = self.file.with_suffix(f".{socket.gethostname()}.{os.getpid()}")
            images = self.draw()
            try:
                with unfinished.open("wb") as file:
                    np.save(file, images)
                unfinished.rename(self.file)
            finally:
                unfinished.unlink(missing_ok=True)

    def draw(self) -> np.ndarray:
        """The clean images to train, to validate and to test: uint8, (number, size, size)."""
        rng = np.random.default_rng(self.hparams["seed"])
        size = self.hparams["size"]
        return np.stack([draw_shapes(size, rng) for _ in range(sum(self.counts))])

    def setup(self, stage: str) -> None:
        pairs = NoisyPairs(self.file, self.hparams["sigma"], self.hparams["seed"])
        ends = [0, *accumulate(self.counts)]
        self.splits = [Subset(pairs, range(a, b)) for a, b in pairwise(ends)]

    def train_dataloader(self) -> DataLoader:
        return self._loader(0, shuffle=True)

    def val_dataloader(self) -> DataLoader:
        return self._loader(1)

    def test_dataloader(self) -> DataLoader:
        return self._loader(2)

    def _loader(self, split: int, shuffle: bool = False) -> DataLoader:
        workers = self.hparams["num_workers"]
        if workers is None:
            workers = workers_of_rank(self.trainer) if torch.cuda.is_available() else 0
        return DataLoader(
            self.splits[split],
            batch_size=self.hparams["batch_size"],
            shuffle=shuffle,
            num_workers=workers,
            persistent_workers=workers > 0,
            pin_memory=torch.cuda.is_available(),
        )


def draw_shapes(size: int, rng: np.random.Generator) -> np.ndarray:
    """Discs and bars of random place, size and grey over one another: uint8, (size, size)."""
    image = np.full((size, size), rng.integers(0, 256), dtype=np.uint8)
    for _ in range(SHAPES):
        row, column, extent, angle = rng.random(4) * [1, 1, 0.3, np.pi]
        box = tuple(
            slice(max(0, int((center - extent) * size)), int((center + extent) * size) + 1)
            for center in (row, column)
        )
        rows, columns = np.ogrid[0:size, 0:size]
        down, right = rows[box[0]] / size - row, columns[:, box[1]] / size - column
        across = down * np.cos(angle) + right * np.sin(angle)
        along = right * np.cos(angle) - down * np.sin(angle)
        if rng.random() < 0.5:
            inside = across**2 + along**2 < (extent / 2) ** 2
        else:
            inside = (np.abs(across) < extent / 8) & (np.abs(along) < extent)
        image[box][inside] = rng.integers(0, 256)
    return image

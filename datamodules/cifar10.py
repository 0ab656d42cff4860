"""CIFAR-10: 60,000 colour photographs of 32 x 32 pixels in 10 classes, from its Python files.

They lie in `data_dir`/cifar-10-batches-py, where torchvision keeps them, and are downloaded if they
are missing (170 MB, https://www.cs.toronto.edu/~kriz/cifar.html).

All images are in memory as bytes, from which a whole batch is taken at once. Only on the device is
it made float, normalized and, in training, augmented: each image is shifted by up to 4 pixels and
mirrored at random. Done there for the whole batch this takes next to no time, while loader
processes that augment image by image keep a GPU waiting.

Batches are (images, labels): on the device float32 of shape (batch, 3, 32, 32), mean 0 and standard
deviation 1, and int64 of shape (batch,).
"""

from __future__ import annotations

import functools
import io
import pickle
from pathlib import Path
from typing import Any

import numpy as np
import torch
from pytorch_lightning import LightningDataModule
from torch import Tensor
from torch.nn.functional import pad
from torch.utils.data import DataLoader, Dataset, Subset
from torchvision.datasets import CIFAR10

from datamodules.downloads import download

Batch = tuple[Tensor, Tensor]

TRAIN = [f"data_batch_{number}" for number in range(1, 6)]
TEST = ["test_batch"]
# Of each channel of the training images, whose bytes are from 0 to 255.
MEAN, DEVIATION = (125.31, 122.95, 113.87), (62.99, 62.09, 66.70)
SHIFT = 4  # pixels
FOR_ARRAYS = ("_reconstruct", "_frombuffer", "ndarray", "dtype")  # what pickled arrays call


class Arrays(pickle.Unpickler):
    """Reads nothing but arrays: a pickle from elsewhere could run any code."""

    def find_class(self, module: str, name: str) -> Any:
        of_arrays = module.split(".")[0] == "numpy" and name in FOR_ARRAYS
        if not of_arrays and (module, name) != ("_codecs", "encode"):
            raise pickle.UnpicklingError(f"it holds {module}.{name}, and is no file of CIFAR-10")
        return super().find_class(module, name)


def unpickled(file: Path) -> dict[bytes, Any]:
    """The content of a file; RuntimeError where it is cut off or something else."""
    content = io.BytesIO(file.read_bytes())
    try:
        batch = Arrays(content, encoding="bytes").load()
        if len(batch[b"data"]) == len(batch[b"labels"]):
            return batch
        raise ValueError("it has not one label for each image")
    except Exception as error:  # as pickle's documentation says, of many kinds
        raise RuntimeError(f"{file} cannot be read: {error}: delete it to download it") from error


class InMemory(Dataset):
    """Bytes of shape (3, 32, 32) and labels, from pickled files."""

    def __init__(self, files: list[Path]) -> None:
        batches = [unpickled(file) for file in files]
        images = np.concatenate([batch[b"data"] for batch in batches])
        self.images = torch.from_numpy(images).view(-1, 3, 32, 32)
        self.labels = torch.tensor([label for batch in batches for label in batch[b"labels"]])

    def __len__(self) -> int:
        return len(self.labels)

    def __getitem__(self, index: int) -> Batch:
        return self.images[index], self.labels[index]

    def __getitems__(self, indices: list[int]) -> Batch:
        """A whole batch; the loader's collate_fn leaves it as it is."""
        return self.images[indices], self.labels[indices]


class Cifar10(LightningDataModule):
    """45,000 images to train, 5,000 to validate (the last), 10,000 to test.

    Args:
        data_dir: where cifar-10-batches-py is or will be; each host needs it.
        batch_size: images per process and step.
        augment: whether training images are shifted and mirrored; they never are with
            overfit_batches.

    Raises:
        FileNotFoundError: when the files are missing and cannot be downloaded.
    """

    def __init__(
        self,
        data_dir: str,
        batch_size: int = 128,
        augment: bool = True,
    ) -> None:
        super().__init__()
        self.save_hyperparameters()
        self.folder = Path(data_dir) / "cifar-10-batches-py"
        self.splits: list[Dataset] = []

    def prepare_data(self) -> None:
        root = Path(self.hparams["data_dir"])
        download("CIFAR-10", root, self.folder, TRAIN + TEST, CIFAR10)

    def setup(self, stage: str) -> None:
        if not self.splits:
            train, test = (
                InMemory([self.folder / name for name in files]) for files in (TRAIN, TEST)
            )
            kept = len(train) - len(train) // 10
            held_out = Subset(train, range(kept, len(train)))
            self.splits = [Subset(train, range(kept)), held_out, test]

    def on_after_batch_transfer(self, batch: Batch, dataloader_idx: int) -> Batch:
        """Make bytes, which are on the device now, into what the model sees."""
        images, labels = batch
        images = images.float()
        mean, deviation = (per_channel(values, images.device) for values in (MEAN, DEVIATION))
        images = (images - mean) / deviation
        training = self.trainer is not None and self.trainer.training
        overfit = getattr(self.trainer, "overfit_batches", 0)  # which are to stay the same
        if training and self.hparams["augment"] and not overfit:
            images = augmented(images)
        if self.trainer is not None:  # Lightning's own conversion was before this, and of floats
            images = self.trainer.precision_plugin.convert_input(images)
        return images, labels

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
            collate_fn=as_it_is,
            pin_memory=torch.cuda.is_available(),
        )


def as_it_is(batch: Any) -> Any:
    """The data set gave a whole batch already."""
    return batch


@functools.cache
@torch.inference_mode(False)
def per_channel(values: tuple[float, ...], device: torch.device) -> Tensor:
    """One value for each channel of images, copied to the device once."""
    return torch.tensor(values, device=device).view(-1, 1, 1)


def augmented(images: Tensor) -> Tensor:
    """Images (batch, channels, height, width), each shifted (0, grey, comes in), half mirrored."""
    count, _, height, width = images.shape
    draws = torch.randint(2 * SHIFT + 1, (2, count, 1), device=images.device)
    rows = draws[0] + torch.arange(height, device=images.device)
    columns = draws[1] + torch.arange(width, device=images.device)
    mirror = torch.rand(count, 1, device=images.device) < 0.5
    columns = torch.where(mirror, columns.flip(1), columns)
    image = torch.arange(count, device=images.device)
    # Indices of shapes (count, 1, 1), (count, height, 1) and (count, 1, width) are broadcast.
    padded = pad(images, [SHIFT] * 4).movedim(1, -1)
    return padded[image[:, None, None], rows[:, :, None], columns[:, None, :]].movedim(-1, 1)

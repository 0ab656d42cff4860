"""Text to guess the next byte of: the sources of Python's own standard library.

They come with every Python, so that nothing is downloaded. Files are taken in the order of their
names up to a size, one after another with a zero byte between them, and cut into sequences of equal
length ("packed": a sequence may begin in one file and end in the next, and attention crosses from
one to the other). The last twentieth is to test, the one before it to validate.

Rank 0 reads and the others receive from it, so that all have the same bytes, also where hosts have
different Pythons. Different releases of Python have different texts, whose losses are not quite
comparable. Batches are uint8 of shape (batch, length + 1): neighbouring sequences share a byte, the
last target of one and the first input of the next.
"""

from __future__ import annotations

import sysconfig
from pathlib import Path
from typing import Any

import torch
from pytorch_lightning import LightningDataModule
from torch import Tensor
from torch.utils.data import DataLoader

MACHINE = "_sysconfigdata"  # files of this name differ with the machine that built Python


class Text(LightningDataModule):
    """Sequences of bytes.

    Args:
        batch_size: sequences per process and step.
        length: bytes that are guessed in each.
        megabytes: of text in all, at most.
        num_workers: processes that load; 0: the training process does, as all is in memory.
    """

    def __init__(
        self,
        batch_size: int = 16,
        length: int = 128,
        megabytes: float = 4.0,
        num_workers: int = 0,
    ) -> None:
        super().__init__()
        if length < 1 or megabytes <= 0:
            raise ValueError(f"length={length} must be at least 1, megabytes={megabytes} above 0")
        self.save_hyperparameters()
        self.splits: list[Tensor] = []

    def setup(self, stage: str) -> None:
        if self.splits:
            return
        text = b""
        if self.trainer is None or self.trainer.is_global_zero:
            text = read(Path(sysconfig.get_path("stdlib")), int(self.hparams["megabytes"] * 1e6))
        if self.trainer is not None:
            text = self.trainer.strategy.broadcast(text)
        self.splits = [pack(part, self.hparams["length"]) for part in split(text)]

    def train_dataloader(self) -> DataLoader:
        return self._loader(0, shuffle=True)

    def val_dataloader(self) -> DataLoader:
        return self._loader(1)

    def test_dataloader(self) -> DataLoader:
        return self._loader(2)

    def _loader(self, split: int, shuffle: bool = False) -> DataLoader:
        sequences: Any = self.splits[split]  # a tensor has the methods of a map-style data set
        return DataLoader(
            sequences,
            batch_size=self.hparams["batch_size"],
            shuffle=shuffle,
            drop_last=shuffle,  # all training batches have the same size
            num_workers=self.hparams["num_workers"],
            persistent_workers=self.hparams["num_workers"] > 0,
            pin_memory=torch.cuda.is_available(),
        )


def read(folder: Path, size: int) -> bytes:
    """The sources in a folder, up to `size` bytes."""
    text = bytearray()
    for file in sorted(folder.glob("*.py")):
        if not file.name.startswith(MACHINE) and len(text) < size:
            text += file.read_bytes() + b"\0"
    return bytes(text[:size])


def split(text: bytes) -> list[bytes]:
    """The parts to train, to validate and to test."""
    held_out = len(text) // 20
    ends = [len(text) - 2 * held_out, len(text) - held_out, len(text)]
    return [text[start:end] for start, end in zip([0, *ends], ends)]


def pack(text: bytes, length: int) -> Tensor:
    """A view of shape (sequences, length + 1); bytes that fill no sequence at the end are left out.

    Raises:
        ValueError: where there is less text than one sequence.
    """
    if len(text) <= length:
        raise ValueError(
            f"length={length}: {len(text)} bytes of text are less than a sequence; use shorter "
            "ones or more text (megabytes)"
        )
    return torch.frombuffer(bytearray(text), dtype=torch.uint8).unfold(0, length + 1, length)

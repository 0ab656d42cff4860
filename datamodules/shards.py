"""Images in tar files ("shards") of WebDataset's layout, <key>.jpg beside <key>.cls.

For a data set of many small files on a shared file system: a shard is read from start to end.
Batches are (images, labels), like those of `Folder` with augment=True.

Who reads what. An epoch puts the shards in an order drawn from `seed` and the epoch, and cuts the
row of all samples into equal parts, one for each process of each rank's loader. So each reads whole
shards of its own; only one at the border of two parts is read by both, each taking its samples.
Each shuffles its part in a buffer. All ranks have equally many batches, however many samples their
shards hold: in training what is left at the end of the row, less than a global batch, is left out.
In evaluation each sample is seen once; batches differ in size by one.

Going on from a checkpoint. Between two epochs, with any number of ranks. Within an epoch, no sample
comes twice and none is left out if ranks, batch_size, num_workers, buffer and seed are as before;
samples that were trained are read again, but not decoded. If one of these differs, the epoch goes
on in another order, so that some samples come twice and others not at all, after as many samples as
were trained, rounded up to a global batch (the last is trained in any case). A warning tells of
this, and of other shards than before.

The samples of each shard are counted once, from the headers, and the numbers kept in a file beside
the shards, sample_counts.json. A shard that changes while it is trained on, or holds fewer samples
than it says, ends the run with an error. Shards are files: nothing is read from the network.
"""

from __future__ import annotations

import warnings
from collections.abc import Callable
from pathlib import Path
from typing import Any

import torch
from pytorch_lightning import LightningDataModule
from pytorch_lightning.trainer.states import TrainerFn
from torch.utils.data import DataLoader

from datamodules.pictures import view
from datamodules.ranks import Transform, draws_of_rank, refuse_other_files, workers_of_rank
from datamodules.tars import Share, count_samples


class ShareLoader(DataLoader):
    """Asks `begin`, at each start, for the epoch and how many of its batches were trained."""

    dataset: Share

    def __init__(self, share: Share, begin: Callable[[], tuple[int, int]], **options: Any) -> None:
        super().__init__(share, **options)
        self.begin = begin

    def __len__(self) -> int:
        return self.dataset.steps

    def __iter__(self) -> Any:
        # As this is a generator, `begin` is called when the first batch is asked for: Lightning's
        # counters are then those of this epoch. When Lightning calls iter() to go on from a
        # checkpoint they may still be those of the epoch before. Workers start after it.
        self.dataset.epoch, self.dataset.trained = self.begin()
        yield from super().__iter__()


class Shards(LightningDataModule):
    """Shards to train and shards to validate; the latter are tested too, as with ImageNet.

    Args:
        train: pattern of the shards to train, like /data/train-*.tar; each host needs them.
        val: of those to validate and to test.
        batch_size: images per process and step.
        size: height and width in pixels.
        augment: whether training images are random parts, half of them mirrored; they never are
            with overfit_batches.
        buffer: samples that each loader process shuffles together, held as they are in the file.
        num_workers: loader processes of each rank; None: as many as it has cores, at most 4, and
            no more than it has shards.
        seed: of the order of shards and samples.

    Raises:
        FileNotFoundError: when a pattern finds no shards.
        ValueError: when there are too few shards or samples, or hosts have different ones.
    """

    def __init__(
        self,
        train: str,
        val: str,
        batch_size: int = 64,
        size: int = 224,
        augment: bool = True,
        buffer: int = 1024,
        num_workers: int | None = None,
        seed: int = 0,
    ) -> None:
        super().__init__()
        if buffer < 1:
            raise ValueError(f"data.buffer={buffer}: it holds at least 1 sample")
        self.save_hyperparameters()
        self.train: dict[Path, int] = {}
        self.val: dict[Path, int] = {}
        self.resumed: dict[str, Any] = {}
        # Lightning warns that the length may be wrong: here each rank has that many batches.
        warnings.filterwarnings("ignore", ".*Your .IterableDataset. has .__len__. defined.*")
        # HorovodStrategy's, of loaders that repeat what was trained: ShareLoader leaves it out.
        warnings.filterwarnings("ignore", ".*not of this ShareLoader")

    def prepare_data(self) -> None:
        for split in ("train", "val"):  # on one rank per host, while the others wait
            count_samples(split, self.hparams[split])

    def setup(self, stage: str) -> None:
        self.train, self.val = (self._count(split) for split in ("train", "val"))

    def _count(self, split: str) -> dict[Path, int]:
        pattern = self.hparams[split]
        shards = count_samples(split, pattern)
        held = {shard.name: count for shard, count in shards.items()}
        refuse_other_files(self.trainer, f"data.{split}={pattern}", held)
        return shards

    def _ranks(self) -> tuple[int, int]:
        """The number of ranks, and this one's."""
        return (self.trainer.world_size, self.trainer.global_rank) if self.trainer else (1, 0)

    def _workers(self, shards: int) -> int:
        workers = self.hparams["num_workers"]
        if workers is not None:
            return workers
        return min(workers_of_rank(self.trainer), shards // self._ranks()[0])

    # ---------------------------------------------------------------- loaders

    def train_dataloader(self) -> DataLoader:
        (ranks, rank), shards = self._ranks(), len(self.train)
        batch_size, augment = self.hparams["batch_size"], self.hparams["augment"]
        if getattr(self.trainer, "overfit_batches", 0):  # which are to stay the same
            augment = False
        where, workers = f"data.train={self.hparams['train']}", self._workers(shards)
        if shards < ranks * max(1, workers):
            raise ValueError(
                f"{where}: {shards} shards for {ranks} ranks x {max(1, workers)} loader processes, "
                "which need one each; make more of them or set data.num_workers lower"
            )
        transform: Transform = view(self.hparams["size"], augment=augment)
        if augment:
            transform = draws_of_rank(self.trainer, transform)
        buffer, seed = self.hparams["buffer"], self.hparams["seed"]
        share = Share(self.train, batch_size, ranks, rank, transform, buffer, seed)
        if not share.steps:
            raise ValueError(
                f"{where}: {sum(self.train.values())} samples for {ranks} ranks x {batch_size} of "
                "data.batch_size; give a smaller one"
            )
        return self._loader(share, self._begin, workers, batch_size)

    def val_dataloader(self) -> DataLoader:
        ranks, rank = self._ranks()
        if sum(self.val.values()) < ranks:
            raise ValueError(f"data.val={self.hparams['val']}: fewer samples than {ranks} ranks")
        transform = view(self.hparams["size"], whole=not self.hparams["augment"])
        share = Share(self.val, self.hparams["batch_size"], ranks, rank, transform)
        return self._loader(share, lambda: (0, 0), self._workers(len(self.val)), batch_size=None)

    def test_dataloader(self) -> DataLoader:
        return self.val_dataloader()

    def _loader(
        self, share: Share, begin: Callable, workers: int, batch_size: int | None
    ) -> DataLoader:
        return ShareLoader(
            share,
            begin,
            batch_size=batch_size,
            num_workers=workers,
            pin_memory=torch.cuda.is_available(),
        )

    # ---------------------------------------------------------------- going on

    def _begin(self) -> tuple[int, int]:
        """The epoch, and how many of its batches were trained before a checkpoint."""
        if self.trainer is None:
            return 0, 0
        trained = self.trainer.fit_loop.epoch_loop.batch_progress.current.ready
        if trained and self.resumed != self._settings():
            warnings.warn(
                f"the checkpoint is of {self.resumed}, this run of {self._settings()}: the rest "
                "of its epoch is drawn anew, some samples come twice in it and others not",
                stacklevel=2,
            )
        # overfit_batches: the same batch again and again
        overfit = self.trainer.overfit_batches  # type: ignore[attr-defined]
        return 0 if overfit else self.trainer.current_epoch, trained

    def _settings(self) -> dict[str, Any]:
        """What must be as before to go on within an epoch."""
        names = ("batch_size", "buffer", "seed")
        return {
            "ranks": self._ranks()[0],
            "num_workers": self._workers(len(self.train)),
            **{name: self.hparams[name] for name in names},
        }

    def state_dict(self) -> dict[str, Any]:
        shards = {shard.name: held for shard, held in self.train.items()}
        return {**self._settings(), "shards": shards}

    def load_state_dict(self, state_dict: dict[str, Any]) -> None:
        self.resumed = {name: state_dict.get(name) for name in self._settings()}
        if self.trainer is None or self.trainer.state.fn != TrainerFn.FITTING:
            return
        current = self.state_dict()["shards"]
        saved = state_dict.get("shards", current)
        if saved != current:
            warnings.warn(
                f"data.train={self.hparams['train']}: the checkpoint is of other shards: of "
                f"{len(saved)} with {sum(saved.values())} samples, these are {len(current)} with "
                f"{sum(current.values())}",
                stacklevel=2,
            )
        # Changed before Lightning's loops read it: with larger batches they would take the epoch
        # for ended.
        loops = self.trainer._checkpoint_connector._loaded_checkpoint["loops"]
        self._count_anew(loops["fit_loop"]["epoch_loop.batch_progress"])

    def _count_anew(self, progress: dict[str, Any]) -> None:
        """Make Lightning's progress in an epoch one in global batches of this run."""
        then = self.resumed["ranks"] * self.resumed["batch_size"]
        now = self._ranks()[0] * self.hparams["batch_size"]
        if then == now:
            return
        current, steps = progress["current"], sum(self.train.values()) // now
        trained = min(-(-current["ready"] * then // now), steps - 1)
        moved = (steps if progress["is_last_batch"] else trained) - current["ready"]
        for count in current:
            current[count] += moved

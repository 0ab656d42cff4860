"""A rank's share of samples in tar files of WebDataset's layout: <key>.jpg, <key>.cls, ...

`Shards` gives it to a loader; its file explains who reads what. Here samples are read, shuffled and
decoded, and those of each shard counted.
"""

from __future__ import annotations

import contextlib
import io
import json
import os
import random
import re
import socket
import tarfile
import warnings
from collections.abc import Iterator
from itertools import groupby, islice, pairwise
from pathlib import Path
from typing import Any

from PIL import Image
from torch import Tensor
from torch.utils.data import IterableDataset, default_collate, get_worker_info
from webdataset.filters import shuffle
from webdataset.tariterators import base_plus_ext, group_by_keys, tar_file_expander

from datamodules.pictures import UNREADABLE, in_colours
from datamodules.ranks import Transform

Sample = tuple[Tensor, int]
PICTURES = ("jpg", "jpeg", "png")
NO_SAMPLE = re.compile(r"__[^/]*__($|/)")  # names that WebDataset passes over
HIDDEN = re.compile(r"(^|/)\.[^/]*$")  # such as ._name, which macOS puts beside each file


class Share(IterableDataset):
    """What a rank sees of the shards in an epoch: samples in training, batches in evaluation.

    Args:
        shards: the number of samples in each.
        batch_size: of a rank.
        ranks: their number.
        rank: the number of this one.
        transform: makes a tensor of an image.
        buffer: number of samples that are shuffled together; 0: evaluation, in the given order.
        seed: of the order.

    Attributes:
        epoch: decides the order.
        trained: batches of this rank that are left out at the beginning.
        steps: batches of each rank.
        samples: of all ranks in an epoch.
    """

    def __init__(
        self, shards: dict[Path, int], batch_size: int, ranks: int, rank: int,
        transform: Transform, buffer: int = 0, seed: int = 0,
    ) -> None:  # fmt: skip
        self.shards, self.ranks, self.rank = shards, ranks, rank
        self.transform, self.buffer, self.seed = transform, buffer, seed
        self.epoch = self.trained = 0
        self.samples, global_batch = sum(shards.values()), ranks * batch_size
        if buffer:
            self.steps = self.samples // global_batch
            self.samples = self.steps * global_batch
        else:  # no batch is empty, for which with batch_size=1 some are of two
            self.steps = min(-(-self.samples // global_batch), self.samples // ranks)

    def __iter__(self) -> Iterator[Any]:
        info = get_worker_info()
        place, workers = (info.id, info.num_workers) if info else (0, 1)
        # The loader takes a batch from each worker in turn, so that part w of the work is batches
        # w, w + workers, ... It begins with worker 0, which therefore, after t trained batches,
        # takes the part that batch t is in.
        trained = min(self.trained, self.steps)
        part = (place + trained) % workers
        # In the row of samples the batches of a part lie together, behind those of earlier parts.
        counts = [len(range(each, self.steps, workers)) for each in range(workers)]
        first = sum(counts[:part])
        edges = [self._edge(first + batch) for batch in range(counts[part] + 1)]
        rows = self._read(edges[0], edges[-1])
        if self.buffer:
            order = random.Random(f"{self.seed} {self.epoch} {self.rank} {part}")
            rows = shuffle(self.buffer, initial=self.buffer, rng=order)(rows)
        rest = edges[len(range(part, trained, workers)) :]
        samples = map(self._decode, islice(rows, rest[0] - edges[0], None))
        if self.buffer:
            yield from samples
        else:
            for begin, end in pairwise(rest):
                yield default_collate(list(islice(samples, end - begin)))

    def _edge(self, batch: int) -> int:
        """Where, in the row of all samples, a batch of this rank begins."""
        return self.samples * (self.rank * self.steps + batch) // (self.ranks * self.steps)

    def _read(self, begin: int, end: int) -> Iterator[dict[str, Any]]:
        """The samples from `begin` to `end` of the epoch's row, not decoded."""
        row = sorted(self.shards)
        if self.buffer:
            random.Random(f"{self.seed} {self.epoch}").shuffle(row)
        passed = 0
        for shard in row:
            held = self.shards[shard]
            skip, stop = max(0, begin - passed), min(held, end - passed)
            passed += held
            if skip >= stop:
                continue
            count = 0
            with shard.open("rb") as stream:
                files = tar_file_expander(
                    [{"url": str(shard), "stream": stream}],
                    select_files=lambda name: not HIDDEN.search(name),
                )
                try:
                    for sample in islice(group_by_keys(files), skip, stop):
                        count += 1
                        yield sample
                except ValueError as error:  # a name is there twice
                    raise RuntimeError(f"{shard} cannot be read: {error.args[0]}") from error
            if count < stop - skip:
                raise RuntimeError(f"{shard}: fewer than the {held} samples in sample_counts.json")

    def _decode(self, sample: dict[str, Any]) -> Sample:
        name = next((name for name in PICTURES if name in sample), None)
        where = f"{sample['__url__']}: {sample['__key__']}"
        if name is None or "cls" not in sample:
            endings = ", ".join(f".{name}" for name in PICTURES)
            raise RuntimeError(f"{where} cannot be read: it needs .cls and one of {endings}")
        try:
            with Image.open(io.BytesIO(sample[name])) as image:
                return self.transform(in_colours(image)), int(sample["cls"])
        except UNREADABLE as error:
            raise RuntimeError(f"{where} cannot be read: {error}") from error


def count_samples(split: str, pattern: str) -> dict[Path, int]:
    """The number of samples in each shard, from sample_counts.json beside them.

    Shards that are not in it or have changed are counted, and it is written. Where it cannot be, a
    warning says so, and each process counts.

    Args:
        split: "train" or "val", for errors.
        pattern: of the shards' files.

    Raises:
        FileNotFoundError: when there are no shards.
        ValueError: when one is no tar file.
    """
    where = Path(pattern).expanduser()
    shards = sorted(where.parent.glob(where.name))
    if not shards:
        raise FileNotFoundError(
            f"data.{split}={pattern}: there are no shards; give a pattern of tar files"
        )
    index = where.parent / "sample_counts.json"  # webdataset's wids has an index.json of its own
    entries: Any = {}
    with contextlib.suppress(OSError, ValueError):
        entries = json.loads(index.read_text())
    entries = entries if isinstance(entries, dict) else {}
    changed = False
    for shard in shards:
        size, modified = shard.stat().st_size, shard.stat().st_mtime_ns
        entry = entries.get(shard.name, {})
        # The size alone would not tell: that of a tar file goes up in steps of 10 KiB.
        if (entry.get("bytes"), entry.get("modified_ns")) != (size, modified):
            entries[shard.name] = {"bytes": size, "modified_ns": modified, "samples": _count(shard)}
            changed = True
    if changed:
        unfinished = index.with_suffix(f".{socket.gethostname()}.{os.getpid()}")
        try:
            unfinished.write_text(json.dumps(entries, indent=1) + "\n")
            unfinished.rename(index)
        except OSError as error:
            with contextlib.suppress(OSError):
                unfinished.unlink()
            warnings.warn(
                f"data.{split}={pattern}: {index.name} cannot be written there "
                f"({error.strerror}): each process counts the samples anew",
                stacklevel=2,
            )
    return {shard: entries[shard.name]["samples"] for shard in shards}


def _count(shard: Path) -> int:
    try:
        with tarfile.open(shard, "r:") as files:
            names = [
                file.name for file in files if file.isreg()
                and not NO_SAMPLE.match(file.name) and not HIDDEN.search(file.name)
            ]  # fmt: skip
            end = files.offset
        with shard.open("rb") as file:  # tarfile takes a header that is cut off as the end
            file.seek(end)
            if file.read(tarfile.BLOCKSIZE) != bytes(tarfile.BLOCKSIZE):
                raise tarfile.ReadError("it is cut off")
    except tarfile.TarError as error:
        raise ValueError(f"{shard}: it is no uncompressed tar file: {error}") from error
    keys = (base_plus_ext(name)[0] for name in names)
    return sum(1 for _ in groupby(key for key in keys if key is not None))

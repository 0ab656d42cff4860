"""What is refused before the first batch, as it would end a run later or without a result.

In all functions `test` says whether a test is to be made, and `choice` is the file of conf/model
or conf/data that was taken.
"""

from __future__ import annotations

import copy
import io
from collections.abc import Sized
from typing import Any

import pytorch_lightning as pl
import torch
from pytorch_lightning.utilities.model_helpers import is_overridden
from torch.utils.data import (
    BatchSampler,
    DataLoader,
    DistributedSampler,
    IterableDataset,
    Subset,
)

from runs.refusal import Refusal
from runs.resuming import keeping


def refuse_model(
    trainer: pl.Trainer,
    model: pl.LightningModule,
    data: pl.LightningDataModule,
    test: bool,
    choice: str,
) -> None:
    """A test that model or data lack, loaders that would be passed over, or checkpoints that could
    not be read."""
    hooks = ["train_dataloader", "val_dataloader", *(["test_dataloader"] if test else [])]
    if own := [hook for hook in hooks if is_overridden(hook, model)]:
        raise Refusal(
            f"model={choice} has its own {', '.join(own)}, and Lightning would use only those of "
            f"{type(data).__name__}: move its own into a data module, where "
            "self.trainer.lightning_module is the model"
        )
    if test and not is_overridden("test_step", model):
        raise Refusal(f"model={choice}: it has no test_step; give it one, or test=false")
    if test and trainer.limit_test_batches and not is_overridden("test_dataloader", data):
        raise Refusal(f"{type(data).__name__} has no test_dataloader; give it one, or test=false")
    if keeping(trainer):
        _check_hyperparameters(model)
        _check_hyperparameters(data)


def refuse_shares(
    trainer: pl.Trainer, data: pl.LightningDataModule, loader: Any, test: bool, choice: str
) -> None:
    """Ranks without a sample to train, to validate or to test, or without a whole batch.

    Args:
        loader: of training; a stream checks its batches itself.
    """
    ranks = trainer.world_size
    if trainer.limit_val_batches and is_overridden("val_dataloader", data):
        _check_held_out(
            data.val_dataloader(), ranks, choice, "validate", "trainer.limit_val_batches=0"
        )
    tested = test and trainer.limit_test_batches and is_overridden("test_dataloader", data)
    if tested and ranks > 1:
        test_data = copy.copy(data)  # it may hold the data of one stage at a time
        test_data.setup("test")
        _check_held_out(test_data.test_dataloader(), ranks, choice, "test", "test=false")
    if not is_sized(loader):
        return
    # A sampler may draw more than there are; what takes a rank's share itself counts that alone.
    samples = max(len(loader.dataset), samples_of(loader))
    if samples < ranks:
        raise Refusal(
            f"data={choice}: {samples} samples for {ranks} ranks; use at most {samples} (NP=, "
            "-np), or more data"
        )
    share = -(-samples // ranks)
    if loader.batch_size is not None and loader.batch_size > share:
        raise Refusal(
            f"data.batch_size={loader.batch_size}: a rank's share is {share} samples "
            f"({samples} samples on {ranks} ranks); give at most {share}"
        )


def refuse_batch_sampler(trainer: pl.Trainer, loader: Any, choice: str) -> None:
    """A plain BatchSampler, of which Lightning loses the batch size when it makes it anew for a
    rank; not so of a subclass."""
    plain = type(getattr(loader, "batch_sampler", None)) is BatchSampler
    given = plain and loader.batch_size is None
    if given and trainer._data_connector._requires_distributed_sampler(loader):
        raise Refusal(
            f"data={choice}: Lightning would make batches of one sample of a plain BatchSampler: "
            "write DataLoader(data, batch_size=..., sampler=...) instead, which is the same"
        )


def refuse_classes(model: pl.LightningModule, classes: list[str], choice: str) -> None:
    """Classes of the data that the model has no output for."""
    outputs = model.hparams.get("classes")
    if isinstance(outputs, int) and outputs < len(classes):
        raise Refusal(
            f"model.classes={outputs}: data={choice} has {len(classes)} classes; give "
            f"model.classes={len(classes)}"
        )


def refuse_clashes(
    trainer: pl.Trainer, model: pl.LightningModule, data: pl.LightningDataModule
) -> None:
    """A hyperparameter to which model and data give two values: loggers keep one."""
    logs = trainer.loggers and trainer.enable_autolog_hparams
    if not (logs and model._log_hyperparams and data._log_hyperparams):
        return
    ours, theirs = model.hparams_initial, data.hparams_initial
    clashes = [
        f"model.{name}={ours[name]} and data.{name}={theirs[name]}"
        for name in ours
        if name in theirs and (type(ours[name]), ours[name]) != (type(theirs[name]), theirs[name])
    ]
    if clashes:
        raise Refusal(
            f"{', '.join(clashes)}: loggers keep one value of a name; give both the same, or keep "
            "one out: self.save_hyperparameters(ignore=[...])"
        )


def _check_held_out(loader: Any, ranks: int, choice: str, what: str, without: str) -> None:
    if is_sized(loader) and (samples := len(loader.dataset)) < ranks:
        raise Refusal(
            f"data={choice}: {samples} samples to {what} on {ranks} ranks; use fewer ranks, "
            f"more data, or {without}"
        )


def classes_of(loader: Any) -> list[str]:
    """A name for each label, by torchvision's `class_to_idx`; empty without that."""
    dataset = getattr(loader, "dataset", None)
    while isinstance(dataset, Subset):
        dataset = dataset.dataset
    names = {label: name for name, label in (getattr(dataset, "class_to_idx", None) or {}).items()}
    return [str(names.get(label, label)) for label in range(1 + max(names, default=-1))]


def batch_size_of(loader: Any) -> int | None:
    """What a DataLoader has, be it by a batch_sampler; None where neither says it."""
    return getattr(_batches(loader), "batch_size", None)


def drops_last(loader: DataLoader) -> bool:
    """Whether an epoch has whole batches only. The loader itself says so only without a
    batch_sampler."""
    return bool(getattr(_batches(loader), "drop_last", False))


def samples_of(loader: DataLoader) -> int:
    """How many samples an epoch of all ranks has: those that a sampler takes, as of a fold."""
    sampler = getattr(_batches(loader), "sampler", loader.sampler)
    taken = isinstance(sampler, Sized) and not isinstance(sampler, DistributedSampler)
    return len(sampler if taken else loader.dataset)  # type: ignore[arg-type]


def _batches(loader: Any) -> Any:
    """What lists the samples of each batch: with batch_size=None it may be the sampler."""
    batches = getattr(loader, "batch_sampler", None)
    return getattr(loader, "sampler", None) if batches is None else batches


def is_sized(loader: Any) -> bool:
    """Whether it is a DataLoader of a data set of known length, not of a stream."""
    dataset = getattr(loader, "dataset", None)  # a stream may tell the length of its own share
    stream = isinstance(dataset, IterableDataset)
    return isinstance(loader, DataLoader) and isinstance(dataset, Sized) and not stream


def _check_hyperparameters(holder: Any) -> None:
    """Refuse hyperparameters that no Trainer could load from a checkpoint, such as an optimizer."""
    names = [str(name) for name, value in holder.hparams.items() if not _loads(value)]
    if names:
        raise Refusal(
            f"{type(holder).__name__}: checkpoints would hold {', '.join(names)} and not load; "
            f"write save_hyperparameters(ignore={names}), and, as they are not in self.hparams "
            f"then, {'; '.join(f'self.{name} = {name}' for name in names)}"
        )


def _loads(value: Any) -> bool:
    file = io.BytesIO()
    try:
        torch.save(value, file)
        file.seek(0)
        torch.load(file, weights_only=True)
    except Exception:  # whatever pickle says of it
        return False
    return True

"""predict=true: what predict_step returns for each sample, in one file, under any strategy.

    import torch
    labels = torch.load("logs/classifier/runs/.../predictions.pt")     of shape (samples, ...)

Samples are those of predict_dataloader, or of test_dataloader where there is none, in the order
of the data set, each once, whatever the number of ranks. What predict_step returns is a tensor with
the samples of the batch along its first dimension, or a list of as many texts, or a dict, list or
tuple of these; the file holds the same for all samples. Where batches have samples of several
shapes, as texts padded to the longest of theirs, it holds a list with a tensor for each sample.
Every rank holds all predictions for a moment.

Where samples are files, which torchvision's image folders list in `samples`, predictions.csv has a
row for each: the file and, if there is one number a sample, that, with its name if it is a label.
"""

from __future__ import annotations

import copy
import csv
import io
import os
from collections.abc import Mapping, Sequence
from pathlib import Path
from typing import Any

import pytorch_lightning as pl
import torch
from lightning_fabric.utilities.data import _replace_dunder_methods
from pytorch_lightning.callbacks import BasePredictionWriter
from pytorch_lightning.strategies import Strategy
from pytorch_lightning.trainer.states import RunningStage
from pytorch_lightning.utilities import CombinedLoader
from pytorch_lightning.utilities.data import _update_dataloader
from pytorch_lightning.utilities.model_helpers import is_overridden
from torch import Tensor
from torch.utils._pytree import tree_leaves, tree_map, tree_structure, tree_unflatten
from torch.utils.data import DataLoader, Subset

from runs.beforehand import classes_of, is_sized
from runs.folders import whole
from runs.ranks import gather_objects
from runs.refusal import Refusal


class Predictions(BasePredictionWriter):
    """Writes the file on rank 0.

    Attributes:
        file: predictions.pt in the run's folder; None until it is written.
        samples: how many are in it.
        names_files: whether predictions.csv is beside it.
    """

    def __init__(self) -> None:
        super().__init__(write_interval="epoch")
        self.file: Path | None = None
        self.samples = 0
        self.names_files = False
        self._source: str | None = None  # the stage whose data is predicted, once it was checked

    def setup(self, trainer: pl.Trainer, pl_module: pl.LightningModule, stage: str) -> None:
        """Refuse before training what would fail to predict after it."""
        if stage == "test" and self._source:
            return
        data = trainer.datamodule  # type: ignore[attr-defined]
        if not trainer.limit_predict_batches:
            raise Refusal("predict=true: trainer.limit_predict_batches=0 leaves nothing to predict")
        if not is_overridden("predict_step", pl_module):
            raise Refusal(
                f"predict=true: {type(pl_module).__name__} has no predict_step(batch, batch_idx); "
                "give it one that returns the predictions of a batch"
            )
        own = is_overridden("predict_dataloader", data)
        self._source = self._source or ("predict" if own else "test")
        if self._source == "test" and not is_overridden("test_dataloader", data):
            raise Refusal(
                f"predict=true: {type(data).__name__} has neither predict_dataloader nor "
                "test_dataloader"
            )
        if stage != "predict":  # a copy, as a data module may hold the data of one stage at a time
            data = copy.copy(data)
        if stage != self._source:  # Lightning has set it up for `stage`
            data.setup(self._source)
        if self._source == "test":
            data.predict_dataloader = data.test_dataloader
        # Re-create it as Lightning will, which fails if batch_size was given by position.
        with _replace_dunder_methods(DataLoader, "dataset"):
            loader = data.predict_dataloader()
        _check_loader(loader, trainer.world_size)
        _update_dataloader(loader, loader.sampler, RunningStage.PREDICTING)

    def write_on_epoch_end(
        self,
        trainer: pl.Trainer,
        pl_module: pl.LightningModule,
        predictions: Sequence[Any],
        batch_indices: Sequence[Any],
    ) -> None:
        batches = batch_indices[0]
        # A dict of a class of its own, as the output of a model may be, would be one leaf.
        predictions = [dict(p) if isinstance(p, Mapping) else p for p in predictions]
        for prediction, batch in zip(predictions, batches):
            _check(prediction, len(batch))
        forms = {str(tree_map(_kind, prediction, is_leaf=_are_texts)) for prediction in predictions}
        forms = set(_listed(trainer.strategy, sorted(forms)))
        if len(forms) > 1:
            first, second, *_ = sorted(forms)
            raise Refusal(
                f"predict=true: predict_step returned {first} for a batch and {second} for "
                "another: return the same keys and dtypes for each"
            )
        leaves = [tree_leaves(prediction, _are_texts) for prediction in predictions]
        structure = tree_structure(predictions[0], _are_texts)
        seen = torch.tensor([index for batch in batches for index in batch])
        indices, order = torch.cat(gather_objects(trainer.strategy, seen)).sort()
        gathered = [_of_all(trainer.strategy, parts, order) for parts in zip(*leaves)]
        self.samples = len(order)
        if trainer.is_global_zero:
            file = Path(trainer.default_root_dir) / "predictions.pt"
            with whole(file) as part:
                torch.save(tree_unflatten(gathered, structure), part)
            self.file = file
            self._write_files(trainer.predict_dataloaders, indices.tolist(), gathered)

    def _write_files(self, loader: Any, indices: list[int], gathered: list[Any]) -> None:
        assert self.file is not None
        dataset, classes = loader.dataset, classes_of(loader)
        while isinstance(dataset, Subset):
            indices, dataset = [dataset.indices[index] for index in indices], dataset.dataset
        samples: Any = getattr(dataset, "samples", None)
        first = samples[0] if isinstance(samples, list) and samples else None
        if not (isinstance(first, tuple) and first and isinstance(first[0], (str, os.PathLike))):
            return
        rows = [[str(samples[index][0])] for index in indices]
        header, numbers = ["file"], gathered[0]
        if len(gathered) == 1 and isinstance(numbers, Tensor) and numbers.dim() == 1:
            header.append("prediction")
            labels = classes if not numbers.is_floating_point() else []
            header += ["class"] if labels else []
            for row, number in zip(rows, numbers.tolist()):
                name = labels[number] if 0 <= number < len(labels) else ""
                row += [str(number), name] if labels else [str(number)]
        text = io.StringIO(newline="")
        csv.writer(text).writerows([header, *rows])
        with whole(self.file.with_suffix(".csv")) as part:
            part.write(text.getvalue().encode(errors="surrogateescape"))  # as names may be
        self.names_files = True


def _of_all(strategy: Strategy, parts: Sequence[Any], order: Tensor) -> Tensor | list[Any]:
    """What all ranks predicted, in the order of samples.

    Args:
        parts: for each batch of this rank.
    """
    tensors = isinstance(parts[0], Tensor)
    mine = [part.detach().clone() if tensors else [str(text) for text in part] for part in parts]
    batches = _listed(strategy, mine)
    if tensors and len({batch.shape[1:] for batch in batches}) == 1:
        return torch.cat(batches)[order]
    samples = [sample for batch in batches for sample in batch]
    return [samples[place] for place in order.tolist()]


def _listed(strategy: Strategy, mine: list[Any]) -> list[Any]:
    """The lists of all ranks, joined in the order of ranks."""
    return [one for its in gather_objects(strategy, mine) for one in its]


def _check_loader(loader: Any, ranks: int) -> None:
    if isinstance(loader, (list, tuple, dict, CombinedLoader)):
        raise Refusal(
            "predict=true: there are several loaders to predict: return one, as of a ConcatDataset"
        )
    # A stream has no indices to put its samples in order by.
    if not is_sized(loader) or loader.batch_sampler is None:
        raise Refusal(
            "predict=true: one DataLoader with a data set of known length is needed, no stream, as "
            "that of data=shards is; predict=false leaves it out"
        )
    if (samples := len(loader.dataset)) < ranks:
        raise Refusal(
            f"predict=true: {samples} samples to predict on {ranks} ranks; use fewer ranks, or "
            "more data"
        )


def _are_texts(node: Any) -> bool:
    """A list of texts is one leaf, as a tensor is."""
    return isinstance(node, (list, tuple)) and bool(node) and all(isinstance(x, str) for x in node)


def _kind(leaf: Any) -> str:
    return str(leaf.dtype).removeprefix("torch.") if isinstance(leaf, Tensor) else "texts"


def _check(prediction: Any, samples: int) -> None:
    for leaf in tree_leaves(prediction, _are_texts):
        rows = leaf.dim() > 0 if isinstance(leaf, Tensor) else _are_texts(leaf)
        if not rows or len(leaf) != samples:
            what = f"shape {tuple(leaf.shape)}" if isinstance(leaf, Tensor) else f"{leaf!r:.40}"
            raise Refusal(
                f"predict=true: predict_step returned {what} for a batch of {samples} samples; "
                "return tensors with the samples along the first dimension, or a text for each"
            )

"""Cases of samplers, checkpoints and callbacks."""

from __future__ import annotations

import tempfile
from pathlib import Path
from typing import Any

import pytorch_lightning as pl
import torch
from pytorch_lightning.callbacks import (
    EMAWeightAveraging,
    ModelCheckpoint,
    StochasticWeightAveraging,
)
from torch import Tensor
from torch.utils.data import DataLoader, DistributedSampler, IterableDataset

from tests.matrix.cases import case
from tests.matrix.trainings import (
    GLOBAL_BATCH,
    RANK,
    SIZE,
    Measured,
    Net,
    fit,
    loader,
    results,
    samples,
    trainer,
)


class Remembers(Net):
    """Which samples were trained, on which of all ranks does not matter."""

    def __init__(self) -> None:
        super().__init__()
        self.seen: list[Tensor] = []

    def training_step(self, batch: list[Tensor], batch_idx: int) -> Tensor:
        self.seen.append(batch[0][:, 0].detach())
        return super().training_step(batch, batch_idx)


def everyones(run: pl.Trainer, values: list[Tensor]) -> list[float]:
    """What all ranks have seen, sorted."""
    mine = torch.cat(values)
    gathered = run.strategy.all_gather(mine) if SIZE > 1 else mine
    return sorted(gathered.reshape(-1).tolist())


def checkpoints(strategy: str, folder: Path) -> dict[str, Any]:
    """Train 7 of 10 batches of 8, keep a checkpoint, and go on from it in another Trainer."""
    sizes = {"batch_size": GLOBAL_BATCH // SIZE, "shuffle": True}
    pl.seed_everything(3)
    keep = ModelCheckpoint(folder, every_n_train_steps=7, save_last=True, filename="{step}")
    run, model = trainer(strategy, callbacks=[keep], max_steps=7, enable_checkpointing=True), None
    model = Remembers()
    run.fit(model, DataLoader(samples(), **sizes))
    files = sorted(path.name for path in folder.iterdir()) if RANK == 0 else []
    # Rank 0 has written, and only it can read: the others need not see its files.
    path = folder / "last.ckpt" if RANK == 0 else "/nowhere/to/be/found.ckpt"
    resumed, again = trainer(strategy), Remembers()
    resumed.fit(again, DataLoader(samples(), **sizes), ckpt_path=path)
    seen = everyones(resumed, model.seen + again.seen[:3])
    return results(
        resumed, again, files=files if RANK == 0 else None, seen=seen,
        all_once=seen == sorted(samples().tensors[0][:, 0].tolist()), batches=len(again.seen),
    )  # fmt: skip


@case(without_ddp="a resumed epoch begins anew there")
def resume_within_an_epoch(strategy: str) -> dict[str, Any]:
    if strategy == "single":  # so does it; an uninterrupted training is what both must equal
        pl.seed_everything(3)
        run, model = trainer("single"), Remembers()
        sampler = DistributedSampler(samples(), 1, 0, shuffle=True, seed=3)
        run.fit(model, DataLoader(samples(), batch_size=8, sampler=sampler))
        seen = sorted(torch.cat(model.seen[:10]).tolist())
        files = ["last.ckpt", "step=7.ckpt"]
        extra = {"files": files, "seen": seen, "all_once": True, "batches": 13}
        return results(run, model, **extra)
    with tempfile.TemporaryDirectory() as folder:
        result = checkpoints(strategy, Path(folder))
    return result if RANK == 0 else {**result, "files": ["last.ckpt", "step=7.ckpt"]}


@case()
def averaged_weights_swa(strategy: str) -> dict[str, Any]:
    swa = StochasticWeightAveraging(swa_lrs=0.02, swa_epoch_start=1, annealing_epochs=1)
    return fit(strategy, callbacks=[swa], max_epochs=4)


@case()
def averaged_weights_ema(strategy: str) -> dict[str, Any]:
    return fit(strategy, callbacks=[EMAWeightAveraging(decay=0.8)])


@case()
def entry_points(strategy: str) -> dict[str, Any]:
    """All of them with one Trainer, in turns, and then another Trainer."""
    model, run = Measured(), trainer(strategy, max_epochs=1)
    batches = DataLoader(samples(32), batch_size=GLOBAL_BATCH // SIZE)
    before = run.validate(model, batches, verbose=False)[0]
    run.fit(model, loader(), batches)
    tested = run.test(model, batches, verbose=False)[0]
    predicted = everyones(run, [part[:, 0] for part in run.predict(model, batches)])
    run.fit_loop.max_epochs = 2
    run.fit(model, loader(), batches)
    again = trainer(strategy, max_epochs=1)
    again.fit(model, loader(), batches)
    return results(again, model, before=before, tested=tested, predicted=predicted)


class Counting(IterableDataset):
    """Batches without a length; some more on some ranks, if asked."""

    def __init__(self, batches: int) -> None:
        self.batches = batches

    def __iter__(self) -> Any:
        per_rank = GLOBAL_BATCH // SIZE
        inputs, targets = samples().tensors
        for batch in range(self.batches):
            for sample in range(per_rank):
                index = batch * GLOBAL_BATCH + sample * SIZE + RANK
                yield inputs[index], targets[index]


@case()
def data_without_a_length(strategy: str) -> dict[str, Any]:
    run, model = trainer(strategy), Net()
    run.fit(model, DataLoader(Counting(6), batch_size=GLOBAL_BATCH // SIZE))
    return results(run, model)

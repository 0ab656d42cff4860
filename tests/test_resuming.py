"""Checkpoints between strategies and numbers of ranks; no sample twice after a resume."""

from __future__ import annotations

import contextlib
import copy
import warnings
from collections.abc import Callable
from pathlib import Path
from types import SimpleNamespace
from typing import Any

import pytest
import pytorch_lightning as pl
import torch
from lightning_fabric.utilities.distributed import DistributedSamplerWrapper
from pytorch_lightning.callbacks import ModelCheckpoint, OnExceptionCheckpoint
from pytorch_lightning.tuner import Tuner
from pytorch_lightning.utilities.combined_loader import CombinedLoader
from torch import Tensor
from torch.utils.data import (
    BatchSampler,
    DataLoader,
    DistributedSampler,
    IterableDataset,
    SubsetRandomSampler,
    WeightedRandomSampler,
)

from strategies.resuming import WithoutFirst, drawn_anew, global_batch_size, leave_out_trained
from tests.matrix.checkpoints import Counting, Remembers, everyones
from tests.matrix.trainings import (
    GLOBAL_BATCH,
    RANK,
    SIZE,
    Measured,
    Net,
    results,
    samples,
    trainer,
)
from tests.test_matrix import assert_same


def save_and_go_on(strategy: str, folder: str, name: str, others: list[str]) -> list[Any]:
    """Leave a checkpoint after 5 of 10 batches; resume those of others to the second epoch's end.

    Batches are shuffled by a sampler of one's own, which Lightning leaves alone.
    """
    sampler = DistributedSampler(samples(), SIZE, RANK, seed=3)
    batches = DataLoader(samples(), batch_size=GLOBAL_BATCH // SIZE, sampler=sampler)
    keep = ModelCheckpoint(folder, filename=name, every_n_train_steps=5)
    run = trainer(strategy, max_steps=5, callbacks=[keep], enable_checkpointing=True)
    run.fit(Remembers(), batches)
    resumed = []
    for other in others:
        run, model = trainer(strategy, max_epochs=2), Remembers()
        run.fit(model, batches, ckpt_path=f"{folder}/{other}.ckpt")
        resumed.append(results(run, model, rest=everyones(run, model.seen[:5])))
    return resumed


def test_checkpoints_go_from_any_strategy_to_any(
    launch: Callable, launch_anew: Callable, tmp_path: Path
) -> None:
    """Weights, optimizer and schedule; and to Horovod the other half of the epoch's samples."""
    resumed = {}
    for strategy, ranks, others in [
        ("single", 1, []), ("horovod", 2, ["single1"]), ("horovod", 4, ["horovod2"]),
        ("ddp", 2, ["horovod4"]), ("horovod", 1, ["ddp2", "horovod4"]), ("single", 1, ["horovod4"]),
    ]:  # fmt: skip
        name = f"{strategy}{ranks}"
        arguments = {"strategy": strategy, "folder": str(tmp_path), "name": name}
        start = launch_anew if strategy == "ddp" else launch
        for rank in start(save_and_go_on, ranks, others=others, **arguments):
            resumed.update({(other, name): result for other, result in zip(others, rank)})
        saved, one = (
            torch.load(tmp_path / f"{n}.ckpt", weights_only=False) for n in (name, "single1")
        )
        for key in ("state_dict", "optimizer_states", "global_step", "epoch"):
            assert_same(saved[key], one[key], 1e-6, f"{name}.{key}")
        assert saved.keys() - {"horovod"} == one.keys()
    assert len(resumed) == 6
    order = torch.randperm(80, generator=torch.Generator().manual_seed(3))
    rest = sorted(samples().tensors[0][order[40:], 0].tolist())
    for (_, name), result in resumed.items():
        # Lightning's own strategies begin the epoch anew; they do take up all the rest.
        reference = ("single1", "horovod2") if "horovod" in name else ("horovod4", "single1")
        assert_same(result["weights"], resumed[reference]["weights"], 1e-6, name)
        if "horovod" in name:
            assert result["rest"] == pytest.approx(rest)


class Loads(Net):
    def on_load_checkpoint(self, checkpoint: dict[str, Any]) -> None:
        self.optimizers_sent = len(checkpoint["optimizer_states"])

    def test_step(self, batch: list[Tensor], batch_idx: int) -> None:
        self.log("test", self.net(batch[0]).mean(), sync_dist=True)


def what_is_sent(folder: str) -> tuple[int, int, bool]:
    keep = ModelCheckpoint(folder, filename="one", every_n_train_steps=1)
    run = trainer("horovod", max_steps=1, callbacks=[keep], enable_checkpointing=True)
    batches = DataLoader(samples(), batch_size=4)
    run.fit(trained := Net(), batches)
    tested, resumed = Loads(), Loads()
    run.test(tested, batches, ckpt_path=f"{folder}/one.ckpt")
    trainer("horovod", max_steps=2).fit(resumed, batches, ckpt_path=f"{folder}/one.ckpt")
    same = [torch.equal(a, b) for a, b in zip(trained.parameters(), tested.parameters())]
    return tested.optimizers_sent, resumed.optimizers_sent, all(same)


def test_a_test_is_not_sent_the_optimizers(launch: Callable, tmp_path: Path) -> None:
    assert launch(what_is_sent, 2, folder=str(tmp_path)) == [(0, 1, True)] * 2


class Validates(Remembers):
    def __init__(self) -> None:
        super().__init__()
        self.validated: list[int] = []  # after so many epochs
        self.batches = 0  # of the validations

    def on_validation_epoch_end(self) -> None:
        self.validated.append(self.current_epoch)

    def validation_step(self, batch: list[Tensor], batch_idx: int) -> None:
        self.batches += 1


def end_an_epoch(folder: str, resumed: bool) -> dict[str, Any]:
    """One of a number of batches that follows from the number of ranks; a second after a resume."""
    keep = ModelCheckpoint(folder, filename="end", every_n_train_steps=80 // 4 // SIZE)
    saving: dict[str, Any] = {"callbacks": [keep], "enable_checkpointing": True}
    run = trainer(
        "horovod", max_epochs=1 + resumed, num_sanity_val_steps=0, **({} if resumed else saving)
    )
    model, path = Validates(), f"{folder}/end.ckpt" if resumed else None
    batches = DataLoader(samples(), batch_size=4)
    run.fit(model, batches, DataLoader(samples(16), batch_size=4), ckpt_path=path)
    seen = everyones(run, model.seen)
    return {"seen": seen, "validated": model.validated, "steps": run.global_step}


@pytest.mark.parametrize("then,now", [(1, 2), (2, 1)])
def test_a_resume_at_the_end_of_an_epoch_trains_the_next(
    launch: Callable, tmp_path: Path, then: int, now: int
) -> None:
    """On another number of ranks, which have another number of batches."""
    launch(end_an_epoch, then, folder=str(tmp_path), resumed=False)
    expected = sorted(samples().tensors[0][:, 0].tolist())
    for result in launch(end_an_epoch, now, folder=str(tmp_path), resumed=True):
        assert result["seen"] == expected and result["validated"][-1] == 1
        assert result["steps"] == 20 // then + 20 // now


class Fails(Validates):
    def __init__(self, step: int) -> None:
        super().__init__()
        self.step = step

    def on_before_optimizer_step(self, optimizer: torch.optim.Optimizer) -> None:
        if self.global_step == self.step:
            raise ArithmeticError

    def validation_step(self, batch: list[Tensor], batch_idx: int) -> None:
        if self.global_step == self.step == 20 and batch_idx == 1:
            raise ArithmeticError


def go_on_after_an_error(folder: str, step: int) -> dict[str, Any]:
    """An error in a step of the second of two epochs, or its validation, and a resume."""
    saving: Any = {"callbacks": [OnExceptionCheckpoint(folder, "error")]}
    run = trainer("horovod", enable_checkpointing=True, **saving)
    first, second = Fails(step), Validates()
    sizes = {"batch_size": GLOBAL_BATCH // SIZE, "shuffle": True}
    data = DataLoader(samples(), **sizes), DataLoader(samples(16), batch_size=4)
    with contextlib.suppress(ArithmeticError):
        run.fit(first, *data)
    run = trainer("horovod")
    run.fit(second, *data, ckpt_path=f"{folder}/error.ckpt")
    seen = everyones(run, first.seen[10:step] + second.seen)
    told = {"validated": second.validated, "batches": second.batches}
    return {"seen": seen, "steps": run.global_step, **told}


@pytest.mark.parametrize("step", [10, 15, 19, 20])  # of 20
def test_what_failed_within_an_epoch_is_done_after_a_resume(
    launch: Callable, tmp_path: Path, step: int
) -> None:
    """The batch of a step that failed, and all of a validation, whose means are of its batches."""
    for result in launch(go_on_after_an_error, 2, folder=str(tmp_path), step=step):
        assert result["seen"] == sorted(samples().tensors[0][:, 0].tolist())
        assert result["steps"] == 20 and result["validated"] == [1], result
        assert result["batches"] == 2, result


def go_on_among_others(folder: str, resumed: bool) -> list[float]:
    """What is trained in 8 batches of 4 a rank, or in the rest of that epoch."""
    keep = ModelCheckpoint(folder, filename="eight", every_n_train_steps=8)
    saving: dict[str, Any] = {"max_steps": 8, "callbacks": [keep], "enable_checkpointing": True}
    run = trainer("horovod", **({"max_epochs": 1} if resumed else saving))
    model, path = Remembers(), f"{folder}/eight.ckpt" if resumed else None
    run.fit(model, DataLoader(samples(), batch_size=4), ckpt_path=path)
    return everyones(run, model.seen)


@pytest.mark.parametrize("then,now", [(1, 2), (2, 1)])
def test_an_epoch_goes_on_after_its_samples_on_another_number_of_ranks(
    launch: Callable, tmp_path: Path, then: int, now: int
) -> None:
    first, *_ = launch(go_on_among_others, then, folder=str(tmp_path), resumed=False)
    rest, *_ = launch(go_on_among_others, now, folder=str(tmp_path), resumed=True)
    assert sorted(first + rest) == sorted(samples().tensors[0][:, 0].tolist())


class RemembersTwo(Net):
    """Which samples of two loaders were trained."""

    def __init__(self) -> None:
        super().__init__()
        self.seen: list[Tensor] = []

    def training_step(self, batch: dict[str, list[Tensor]], batch_idx: int) -> Tensor:
        self.seen += [batch["many"][0][:, 0], batch["few"][0][:, 0]]
        return super().training_step(batch["many"], batch_idx)


def resume_two_loaders(folder: str) -> tuple[list[float], list[float]]:
    """7 of 10 batches of 4 and of 2 samples a rank, and the rest after a resume."""

    def loaders() -> dict[str, DataLoader]:
        return {
            name: DataLoader(samples(20 * size), batch_size=size)
            for name, size in (("many", 4), ("few", 2))
        }

    keep = ModelCheckpoint(folder, filename="seven", every_n_train_steps=7)
    run = trainer("horovod", max_steps=7, callbacks=[keep], enable_checkpointing=True)
    first, second = RemembersTwo(), RemembersTwo()
    run.fit(first, loaders())
    run = trainer("horovod", max_epochs=1)
    run.fit(second, loaders(), ckpt_path=f"{folder}/seven.ckpt")
    seen = everyones(run, first.seen + second.seen)
    return seen, sorted(x for size in (4, 2) for x in samples(20 * size).tensors[0][:, 0].tolist())


class RemembersShort(Net):
    def __init__(self) -> None:
        super().__init__()
        self.seen: list[Tensor] = []

    def training_step(self, batch: list[list[Tensor]], batch_idx: int) -> Tensor:
        long, short = batch
        if short is not None:
            self.seen.append(short[0][:, 0])
        return super().training_step(long, batch_idx)


def test_a_batch_that_was_trained_in_part_is_left_out() -> None:
    """3 batches of 8, and then batches of 16: the second of these was begun."""
    counts = dict.fromkeys(("ready", "started", "processed", "completed"), 3)
    progress: Any = SimpleNamespace(current=SimpleNamespace(**counts))
    batches = DataLoader(samples(80), batch_size=16)
    leave_out_trained([batches], progress, then=8, now=16, cycles=False)
    assert set(vars(progress.current).values()) == {2}
    assert torch.equal(next(iter(batches))[0], samples(80).tensors[0][32:48])


def resume_in_a_later_round(folder: str, mode: Any) -> dict[str, Any]:
    """After 5 of 10 batches, when a loader of 3 is in its second round, or has ended."""

    def fit(**arguments: Any) -> list[Tensor]:
        pl.seed_everything(3)
        model, path = RemembersShort(), arguments.pop("ckpt_path", None)
        long, short = (
            DataLoader(samples(SIZE * 4 * count), batch_size=4, shuffle=True) for count in (10, 3)
        )
        loaders = CombinedLoader([long, short], mode)
        trainer("horovod", **arguments).fit(model, loaders, ckpt_path=path)
        return model.seen

    keep = ModelCheckpoint(folder, filename="five", every_n_train_steps=5)
    first = fit(max_steps=5, callbacks=[keep], enable_checkpointing=True)
    rest = fit(max_epochs=1, ckpt_path=f"{folder}/five.ckpt")
    return {"whole": torch.cat(fit(max_epochs=1)), "resumed": torch.cat(first + rest)}


@pytest.mark.parametrize("mode", ["max_size_cycle", "max_size"])
def test_a_resume_in_a_later_round_of_a_short_loader(
    launch: Callable, tmp_path: Path, mode: str
) -> None:
    for rank in launch(resume_in_a_later_round, 2, folder=str(tmp_path), mode=mode):
        assert rank["resumed"].tolist() == rank["whole"].tolist()


class AsksForSteps(Remembers):
    """Its loaders are made, and their workers begin, before a checkpoint is read."""

    def configure_optimizers(self) -> Any:
        assert self.trainer.estimated_stepping_batches > 0
        return super().configure_optimizers()


def resume_with_loaders_that_are_there(folder: str, persistent: bool) -> dict[str, Any]:
    """14 batches of two epochs of 10, the rest after a resume, and all without one."""
    sizes: dict[str, Any] = {"batch_size": 4, "shuffle": True, "num_workers": 1}
    sizes["persistent_workers"] = persistent
    pl.seed_everything(3)
    whole = AsksForSteps()
    trainer("horovod").fit(whole, DataLoader(samples(), **sizes))
    keep = ModelCheckpoint(folder, filename="fourteen", every_n_train_steps=14)
    first, second = AsksForSteps(), AsksForSteps()
    run = trainer("horovod", max_steps=14, callbacks=[keep], enable_checkpointing=True)
    run.fit(first, DataLoader(samples(), **sizes))
    trainer("horovod").fit(
        second, DataLoader(samples(), **sizes), ckpt_path=f"{folder}/fourteen.ckpt"
    )
    return {"whole": torch.cat(whole.seen), "resumed": torch.cat(first.seen + second.seen)}


@pytest.mark.parametrize("persistent", [False, True])
def test_a_resume_goes_on_where_loaders_were_made_before_it(
    launch: Callable, persistent: bool, tmp_path: Path
) -> None:
    arguments = {"folder": str(tmp_path), "persistent": persistent}
    for rank in launch(resume_with_loaders_that_are_there, 2, **arguments):
        assert torch.equal(rank["resumed"], rank["whole"])


def test_a_resume_with_two_loaders_sees_each_sample_once(launch: Callable, tmp_path: Path) -> None:
    for seen, expected in launch(resume_two_loaders, 2, folder=str(tmp_path)):
        assert seen == expected


class OwnLoader:
    def __iter__(self) -> Any:
        return iter(DataLoader(samples(20), batch_size=4))


class Shares(IterableDataset):
    """Of 80 samples those of this rank."""

    def __iter__(self) -> Any:
        yield from zip(*(tensor[RANK::SIZE] for tensor in samples().tensors))


class GoesOnByItself(DataLoader):
    """As torchdata's StatefulDataLoader: Lightning hands it a state, for its next iterator."""

    trained, state = 0, 0

    def __iter__(self) -> Any:
        self.trained, self.state = self.state, 0
        for number, batch in enumerate(super().__iter__()):
            if number >= self.trained:
                self.trained = number + 1
                yield batch

    def state_dict(self) -> dict[str, Any]:
        return {"trained": self.trained}

    def load_state_dict(self, state_dict: dict[str, Any]) -> None:
        self.state = state_dict["trained"]


def resume_loaders_that_go_on_by_themselves(strategy: str, folder: str) -> list[list[float]]:
    """What is trained before and after a resume of a stream and of a data set."""
    trained = []
    for name, data in (("stream", Shares()), ("sized", samples())):
        first, second = Remembers(), Remembers()
        keep = ModelCheckpoint(folder, filename=name, every_n_train_steps=4)
        batches = GoesOnByItself(data, batch_size=4)
        run = trainer(strategy, max_steps=4, callbacks=[keep], enable_checkpointing=True)
        run.fit(first, batches)
        run = trainer(strategy, max_epochs=1)
        run.fit(second, batches, ckpt_path=f"{folder}/{name}.ckpt")
        trained.append(everyones(run, first.seen + second.seen))
    return trained


def test_loaders_that_go_on_by_themselves(launch: Callable, tmp_path: Path) -> None:
    """Of a stream Lightning fetches a batch more than it trains, whose state a checkpoint has."""
    expected = sorted(samples().tensors[0][:, 0].tolist())
    for stream, sized in launch(
        resume_loaders_that_go_on_by_themselves, 2, strategy="horovod", folder=str(tmp_path)
    ):
        assert sized == expected
        assert len(stream) == len(set(stream)) == 80 - 2 * 4 and set(stream) < set(expected)


class InItsWay(BatchSampler):
    def __iter__(self) -> Any:
        yield from super().__iter__()


def resume_streams(folder: str) -> dict[str, list[str]]:
    """What is said of loaders none of whose samples can be left out, after 3 of 5 batches."""
    own = torch.Generator().manual_seed(3)
    loaders: dict[str, Any] = {
        "own": OwnLoader(),
        "stream": DataLoader(Counting(5), batch_size=GLOBAL_BATCH // SIZE),
        "stateful": GoesOnByItself(Counting(5), batch_size=GLOBAL_BATCH // SIZE),
        "sized": DataLoader(samples(40), batch_size=4),
        "batches": DataLoader(samples(40), batch_sampler=InItsWay(range(40), 4, False)),
        "drawn": DataLoader(samples(40), 4, sampler=SubsetRandomSampler(range(40), own)),
        "weighted": DataLoader(samples(40), 4, sampler=WeightedRandomSampler([1.0] * 40, 40)),
    }
    messages = {}
    for name, batches in loaders.items():
        keep = ModelCheckpoint(folder, filename=name, every_n_train_steps=3)
        run = trainer("horovod", max_steps=3, callbacks=[keep], enable_checkpointing=True)
        run.fit(Net(), batches)
        with warnings.catch_warnings(record=True) as caught:
            trainer("horovod", max_epochs=1).fit(Net(), batches, ckpt_path=f"{folder}/{name}.ckpt")
        messages[name] = [text for w in caught if "resumed epoch" in (text := str(w.message))]
    return messages


def test_a_resume_says_which_loaders_begin_anew(launch: Callable, tmp_path: Path) -> None:
    first, second = launch(resume_streams, 2, folder=str(tmp_path))
    assert not any(second.values())
    assert not first["stateful"] and not first["sized"] and not first["weighted"]
    assert first["drawn"][0].startswith(
        "the resumed epoch draws its samples anew, by a SubsetRandomSampler"
    )
    assert first["batches"][0].startswith(
        "the resumed epoch leaves out the first batches, of its InIt"
    )
    for name, kind in (("own", "OwnLoader"), ("stream", "DataLoader")):
        (text,) = first[name]
        assert "goes on at batch 3, but with the first samples" in text and f"this {kind}" in text


def resume_an_order_of_ones_own(folder: str) -> dict[str, Any]:
    """14 batches of two epochs of 10, the rest after a resume, and all without one."""
    drawn = DataLoader(samples(), 4, sampler=SubsetRandomSampler(range(80)))
    keep = ModelCheckpoint(folder, filename="own", every_n_train_steps=14)
    whole, first, second = Remembers(), Remembers(), Remembers()
    trainer("horovod").fit(whole, drawn)
    run = trainer("horovod", max_steps=14, callbacks=[keep], enable_checkpointing=True)
    run.fit(first, drawn)
    trainer("horovod").fit(second, drawn, ckpt_path=f"{folder}/own.ckpt")
    return {"whole": torch.cat(whole.seen), "resumed": torch.cat(first.seen + second.seen)}


def test_a_resume_finds_the_order_of_a_sampler_of_ones_own(
    launch: Callable, tmp_path: Path
) -> None:
    for rank in launch(resume_an_order_of_ones_own, 2, folder=str(tmp_path)):
        assert torch.equal(rank["resumed"], rank["whole"])


def test_a_search_for_a_learning_rate_resumes_nothing(
    tmp_path: Path, recwarn: pytest.WarningsRecorder
) -> None:
    drawn = DataLoader(samples(40), 4, sampler=WeightedRandomSampler([1.0] * 40, 40))
    run = trainer("horovod", default_root_dir=tmp_path)
    model = Measured()
    model.lr = 0.1
    Tuner(run).lr_find(model, drawn, num_training=5, early_stop_threshold=None)
    assert not [w for w in recwarn if "resumed epoch" in str(w.message)]


def test_batches_of_a_resumed_epoch_can_be_copied() -> None:
    """As a loader that is evaluated too is."""
    batches = copy.deepcopy(WithoutFirst(BatchSampler(range(8), 2, drop_last=False), 3))
    assert (list(batches), len(batches), batches.batch_size) == ([[6, 7]], 4, 2)


def test_the_global_batch_is_of_the_first_loader_that_tells() -> None:
    for loaders, size in (([OwnLoader(), DataLoader(samples(), 4)], 8), ([OwnLoader()], 0)):
        loop = SimpleNamespace(_combined_loader=CombinedLoader(loaders))
        assert global_batch_size(loop, 2) == size


def test_orders_that_a_resume_finds_again() -> None:
    whole, seeded = samples(40), DistributedSampler(samples(40), 2, 0)
    assert drawn_anew(DataLoader(whole, 4, shuffle=True).batch_sampler) == "RandomSampler"
    assert drawn_anew(DataLoader(whole, 4).batch_sampler) == ""
    assert drawn_anew(DataLoader(whole, 4, sampler=seeded).batch_sampler) == ""
    in_order = DistributedSamplerWrapper(range(40), 2, 0)  # as Lightning puts it around a list
    assert drawn_anew(BatchSampler(in_order, 4, drop_last=False)) == ""


class Grows(pl.LightningDataModule):
    """Batches of 2, and of 8 from the second epoch on."""

    def train_dataloader(self) -> DataLoader:
        first = self.trainer.current_epoch == 0
        return DataLoader(samples(96), batch_size=2 if first else 8, shuffle=True)


def resume_with_larger_batches(folder: str) -> list[float]:
    """What was trained of the second epoch, 3 batches before a resume and the others after it."""
    reload = {"reload_dataloaders_every_n_epochs": 1}
    first, second, small = Remembers(), Remembers(), 96 // 2 // SIZE
    pl.seed_everything(3)
    keep = ModelCheckpoint(folder, filename="grown", every_n_train_steps=small + 3)
    run = trainer(
        "horovod", max_steps=small + 3, callbacks=[keep], enable_checkpointing=True, **reload
    )
    run.fit(first, Grows())
    run = trainer("horovod", **reload)
    run.fit(second, Grows(), ckpt_path=f"{folder}/grown.ckpt")
    return everyones(run, first.seen[small:] + second.seen)


def test_a_resume_counts_in_the_batches_of_its_epoch(launch: Callable, tmp_path: Path) -> None:
    expected = sorted(samples(96).tensors[0][:, 0].tolist())
    assert launch(resume_with_larger_batches, 2, folder=str(tmp_path)) == [expected] * 2

"""Errors that the user can fix are told in a line; all others keep their traceback."""

from __future__ import annotations

import errno
import inspect
import multiprocessing.synchronize
import os
import re
import sys
import threading
import warnings
from collections.abc import Iterator
from multiprocessing.queues import Queue
from pathlib import Path
from pickle import UnpicklingError
from typing import Any

import pytest
import torch
from horovod.common.exceptions import HorovodInternalError
from omegaconf import OmegaConf
from pytorch_lightning import LightningModule, Trainer
from pytorch_lightning.callbacks import TQDMProgressBar
from pytorch_lightning.demos.boring_classes import BoringModel
from pytorch_lightning.loops.optimization import automatic
from pytorch_lightning.plugins.precision import Precision
from pytorch_lightning.strategies import SingleDeviceStrategy
from pytorch_lightning.utilities.data import _get_dataloader_init_args_and_kwargs
from pytorch_lightning.utilities.exceptions import MisconfigurationException
from torch.nn.functional import cross_entropy
from torch.utils.data import (
    BatchSampler,
    DataLoader,
    DistributedSampler,
    IterableDataset,
    Sampler,
    SequentialSampler,
)

from runs.checkpoints import unreadable
from runs.folders import ROOT, shown
from runs.mistakes import batch_of, mistake, no_metric, of_constructor
from runs.progress import Progress
from runs.refusal import Refusal
from runs.report import Report
from runs.run import Run, in_a_line_if_full
from tests.runs.trainings import IsValidated, quiet_trainer


def ending(folder: Path | None = None, started: bool = False, **choices: str) -> Run:
    """A run with what its end looks at."""
    run = Run.__new__(Run)
    run.config, run.folder, run._show = OmegaConf.create({}), folder, warnings.showwarning
    run.report, run.choices = Report(run.config, {}), choices
    run.report.started = started
    return run


@pytest.mark.parametrize("started", [False, True])
def test_a_file_that_cannot_be_read_is_told_in_one_line(started: bool) -> None:
    text = "my images/003.png cannot be read: cannot identify image file"
    of_worker = f"Caught RuntimeError in DataLoader worker process 0.\nOriginal Traceback:\n{text}"
    assert mistake(RuntimeError(text), started) == text
    worker = of_worker.replace(text, f"RuntimeError: {text}").replace("back:", "back (most):")
    assert mistake(RuntimeError(worker), started) == text


def test_an_interval_longer_than_a_ranks_epoch_is_told() -> None:
    trainer = quiet_trainer(val_check_interval=50, num_sanity_val_steps=0)
    ones: Any = DataLoader(torch.ones(13))
    with pytest.raises(ValueError, match="val_check_interval") as caught:
        trainer.fit(IsValidated(), ones, ones)
    told = mistake(caught.value, started=True)
    assert told and told.startswith("trainer.val_check_interval=50: a rank has 13 batches an epoch")


class Kept:
    pass


def test_an_object_that_a_checkpoint_holds_is_told(tmp_path: Path) -> None:
    file = tmp_path / "a.ckpt"
    torch.save({"state_dict": {}, "kept": Kept()}, file)
    with pytest.raises(UnpicklingError) as caught:
        torch.load(file, weights_only=True)
    told = mistake(caught.value, started=True)  # as by a test after training
    for line, start in (
        (told, "the checkpoint cannot be"),
        (unreadable(file, False), "ckpt_path="),
    ):
        assert line and line.startswith(start) and f"it holds a {__name__}.Kept, which" in line
        assert "on_save_checkpoint" in line and "add_safe_globals" in line


def test_srun_gets_the_way_that_this_repository_has(monkeypatch: pytest.MonkeyPatch) -> None:
    text = "srun started 2 processes, each of which would train alone as rank 0: start them with"
    assert mistake(MisconfigurationException(text), started=False) == text
    monkeypatch.setenv("SLURM_STEP_NUM_TASKS", "2")
    told = mistake(MisconfigurationException(text), started=False)
    assert told and "alone: sbatch cluster/slurm/horovod.sbatch" in told
    monkeypatch.delenv("SLURM_STEP_NUM_TASKS")
    torchrun = MisconfigurationException(text.replace("srun", "torchrun"))
    told = mistake(torchrun, started=False)
    assert told and told.startswith("torchrun is for strategy=ddp, with trainer.devices=")


class ForgetsItsHyperparameters(LightningModule):
    def __init__(self, lr: float) -> None:
        super().__init__()

    def forward(self) -> Any:
        return self.hparams.lr

    def configure_optimizers(self) -> Any:
        return torch.optim.SGD(self.parameters(), lr=self.hparams["lr"])

    def read(self, row: dict[str, float]) -> float:
        self.hparams["column"] = "height"
        return row[self.hparams["column"]]


def test_what_one_forgets_in_a_module_is_told() -> None:
    model = ForgetsItsHyperparameters(0.1)
    for call in (model.configure_optimizers, model.forward):
        with pytest.raises((KeyError, AttributeError)) as caught:
            call()
        told = mistake(caught.value, started=False)
        assert told and told.startswith(f"{__file__}, line ")
        assert "the hyperparameters have no 'lr': call self.save_hyperparameters()" in told
    with pytest.raises(KeyError) as other:
        {}["lr"]
    assert mistake(other.value, started=True) is None
    with pytest.raises(KeyError) as column:
        model.read({})
    assert mistake(column.value, started=False) is None  # the hyperparameter is there
    with pytest.raises(RuntimeError) as cut:
        torch.ones(1).sum().backward()
    told = mistake(cut.value, started=True)
    assert told and told.startswith("the loss has no gradient: leave out what cuts it off")
    no_loss = "by returning None in distributed training is not supported"
    assert no_loss in inspect.getsource(automatic)  # Lightning's, where it raises it
    told = mistake(RuntimeError(f"Skipping the `training_step` {no_loss}."), started=True)
    assert told and told.startswith("training_step returned None: it has to return the loss")


def test_a_loss_of_training_is_no_guess_for_one_of_validation() -> None:
    lacks = "nothing is logged by this name; there are: "
    told = no_metric("val/loss", ["train/loss"], {})
    assert told == (
        f'val/loss: {lacks}train/loss; self.log("val/loss", ..., sync_dist=True) in '
        "validation_step does"
    )
    told = no_metric("val_loss", ["train/loss", "val/loss"], {})
    assert told == f"val_loss: {lacks}train/loss, val/loss (did you mean val/loss?)"
    told = no_metric("train_loss", ["train/loss"], {})
    assert told == f"train_loss: {lacks}train/loss (did you mean train/loss?)"


def test_a_label_that_the_model_has_no_output_for_is_told() -> None:
    with pytest.raises(IndexError) as caught:
        cross_entropy(torch.zeros(1, 10), torch.tensor([11]))
    told = mistake(caught.value, started=True)
    assert told and told.startswith("a label is 11, for which the model has no output")
    assert mistake(IndexError("list index out of range"), started=True) is None


def test_a_sampler_that_asks_torch_for_the_ranks_is_told() -> None:
    with pytest.raises(ValueError, match="process group") as caught:
        DistributedSampler(range(3))
    message = mistake(caught.value, started=False)
    assert message and "DistributedSampler(data) asks torch.distributed for the ranks" in message
    other = mistake(RuntimeError(str(caught.value)), started=False)
    assert other is None


def test_a_logger_without_its_service_is_told_in_one_line() -> None:
    class UsageError(Exception):
        pass

    UsageError.__module__ = "wandb.errors.errors"  # as without `wandb login`
    error = UsageError("No API key configured.\n Use `wandb login`")
    assert mistake(error, started=False) == (
        "logger=wandb: No API key configured. Use `wandb login`"
    )
    assert mistake(error, started=True) is None


def test_an_error_in_training_is_no_mistake_to_tell_in_one_line() -> None:
    for error in (ValueError("batch sizes differ"), FileNotFoundError("no such picture")):
        assert mistake(error, started=True) is None  # its traceback says where
        assert mistake(error, started=False) == f"{error} (HYDRA_FULL_ERROR=1 shows where)"
    with pytest.raises(OSError) as missing:
        Path("no such picture").read_text()
    place = r"\(tests/runs/test_mistakes.py, line \d+; HYDRA_FULL_ERROR=1 shows where\)"
    assert re.search(place, str(mistake(missing.value, started=False)))
    with pytest.raises(ValueError, match="literal") as made:
        exec("int('x')")  # in a frame that has no file
    assert re.search(place, str(mistake(made.value, started=False)))


def test_weights_that_a_module_loads_by_itself_are_not_those_of_ckpt_path() -> None:
    with pytest.raises(RuntimeError, match="loading state_dict") as caught:
        torch.nn.Linear(1, 1).load_state_dict({})
    assert mistake(caught.value, started=False) is None


class KeepsAPart(BoringModel):
    def on_save_checkpoint(self, checkpoint: dict[str, Any]) -> None:
        del checkpoint["state_dict"]["layer.bias"]


def test_a_checkpoint_of_a_part_of_the_weights_is_told_also_after_the_training(
    tmp_path: Path,
) -> None:
    trainer, model = quiet_trainer(fast_dev_run=True, default_root_dir=tmp_path), KeepsAPart()
    trainer.fit(model)
    trainer.save_checkpoint(tmp_path / "part.ckpt")
    with pytest.raises(RuntimeError) as caught:
        trainer.test(model, ckpt_path=tmp_path / "part.ckpt")
    told = mistake(caught.value, started=True)
    assert told and told.startswith("ckpt_path: the checkpoint does not fit the model: Missing key")
    assert "layer.bias" in told and told.endswith(
        ", set self.strict_loading = False in the model's __init__"
    )
    model.strict_loading = False
    trainer.test(model, ckpt_path=tmp_path / "part.ckpt")


class Compiles(BoringModel):
    def __init__(self) -> None:
        super().__init__()
        self.layer = torch.compile(self.layer)


class OtherNames(BoringModel):
    def __init__(self) -> None:
        super().__init__()
        self.mine = torch.nn.Linear(32, 2)
        del self.layer


@pytest.mark.parametrize(
    ("made", "advice"),
    [
        (Compiles, "torch.compile adds _orig_mod. to the names of weights: compile the same"),
        (OtherNames, None),
    ],
)
def test_weights_of_other_names_are_no_part_that_may_be_left_untrained(
    made: type[BoringModel], advice: str | None, tmp_path: Path
) -> None:
    trainer = quiet_trainer(fast_dev_run=True, default_root_dir=tmp_path)
    trainer.strategy.connect(BoringModel())
    trainer.save_checkpoint(tmp_path / "plain.ckpt")
    with pytest.raises(RuntimeError) as caught:
        trainer.test(made(), ckpt_path=tmp_path / "plain.ckpt")
    told = mistake(caught.value, started=True)
    assert told and "Missing key" in told and "strict_loading" not in told
    assert advice in told if advice else told.endswith('.bias"')


def test_an_error_of_a_loaders_worker_is_told_by_its_last_line() -> None:
    text = "Caught OSError in DataLoader worker process 0.\nOriginal Traceback (most recent call "
    text += 'last):\n  File "mine.py", line 1, in read\nOSError: cannot identify cat.png\n'
    message = mistake(OSError(text), started=False)
    assert message == "OSError: cannot identify cat.png (HYDRA_FULL_ERROR=1 shows where)"


def test_a_second_progress_bar_is_told(tmp_path: Path) -> None:
    with pytest.raises(MisconfigurationException) as caught:
        Trainer(callbacks=[Progress(), TQDMProgressBar()], default_root_dir=tmp_path)
    assert mistake(caught.value, started=False) == (
        "there are two progress bars: ~callbacks.progress leaves out that of conf/callbacks"
    )


def test_a_search_for_a_batch_size_on_several_ranks_is_told() -> None:
    text = "The Batch size finder is not supported with distributed strategies."
    told = mistake(MisconfigurationException(text), started=False)
    assert told and "in one process without Horovod: python template.py strategy=single" in told


@pytest.mark.parametrize(
    "text",
    [
        "Caught RuntimeError in DataLoader worker process 0.\nOriginal Traceback (most recent ...\n"
        "RuntimeError: unable to allocate shared memory(shm) for file </torch_1>: Resource tem",
        "DataLoader worker (pid 7) is killed by signal: Bus error. It is possible that dataload",
        "unable to write to file </torch_13_1_0>: No space left on device (28)",
    ],
)
def test_a_full_shared_memory_is_told_in_one_line(text: str) -> None:
    other = text.replace("No space left", "Too many open files").replace("Bus error", "Hangup")
    assert mistake(RuntimeError(other.replace("allocate", "map")), started=True) is None
    told = mistake(RuntimeError(text), started=True)
    assert told and told.startswith("/dev/shm is full") and "docker run --shm-size=" in told


def test_no_room_in_shared_memory_for_a_semaphore_is_told(monkeypatch: pytest.MonkeyPatch) -> None:
    """Its error names no file, so that the run's folder was called full."""
    made: dict[str, Any] = {}
    code = "def full(*_):\n    raise OSError(28, 'No space left on device')"  # as of its C function
    exec(compile(code, multiprocessing.synchronize.__file__, "exec"), made)
    monkeypatch.setattr("_multiprocessing.SemLock", made["full"])
    with pytest.raises(OSError, match="No space left") as raised:
        multiprocessing.Event()  # as a loader makes for its workers
    told = mistake(raised.value, started=True)
    assert told and told.startswith("/dev/shm is full")


def test_a_killed_worker_is_told_in_one_line() -> None:
    text = "DataLoader worker (pid 7) is killed by signal: Killed. "
    waiting = RuntimeError("DataLoader worker (pid(s) 7) exited unexpectedly")  # for its batch
    assert mistake(waiting, started=True) is None
    waiting.__cause__ = RuntimeError(text)
    for error in (waiting, waiting.__cause__):
        told = mistake(error, started=True)
        assert told and "the memory is full" in told and "data.num_workers=" in told


def test_a_worker_that_is_killed_amid_a_batch_is_told_too() -> None:
    def _try_get_data() -> None:  # as in a DataLoader
        raise ConnectionResetError(errno.ECONNRESET, "Connection reset by peer")

    with pytest.raises(ConnectionResetError) as caught:
        _try_get_data()
    assert "the memory is full" in str(mistake(caught.value, started=True))
    assert mistake(ConnectionResetError("of a user's own"), started=True) is None


def test_the_traceback_of_a_mistake_can_be_asked_for(
    monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    run = ending()
    mistake = Refusal("no such thing")
    with pytest.raises(SystemExit, match="2"):
        run.__exit__(Refusal, mistake, None)
    assert capsys.readouterr().err == "error: no such thing\n"
    monkeypatch.setenv("HYDRA_FULL_ERROR", "1")
    run.__exit__(Refusal, mistake, None)  # which Python raises then
    assert not capsys.readouterr().err


class TakesPairs(BoringModel):
    def training_step(self, batch: Any, batch_idx: int) -> Any:
        batch = batch["image"]
        raise ValueError("too many to unpack")

    def optimizer_step(self, *args: Any) -> None:  # within which the step is computed
        super().optimizer_step(*args)


def test_the_traceback_ends_with_the_batch_that_a_step_got(tmp_path: Path) -> None:
    """Most often it is of another kind than the model takes."""
    names = [[str(number)] * 3 for number in range(8)]
    batch = {"image": torch.ones(3, 2), "of": [(torch.tensor(1), b""), *names], 1: None}
    trainer = quiet_trainer(max_steps=1, limit_val_batches=0, default_root_dir=tmp_path)
    with pytest.raises(ValueError, match="too many") as caught:
        trainer.fit(TakesPairs(), DataLoader([batch], batch_size=None))
    strings = "[str, str, str]"
    members = ", ".join(["[int64[], bytes]", *[strings] * 5, "..."])
    expected = f"training_step got {{'image': float32[3, 2], 'of': [{members}], 1: NoneType}}"
    assert batch_of(caught.value) == expected
    run = ending(started=True, data="mine")
    run.__exit__(ValueError, caught.value, None)
    if sys.version_info >= (3, 11):
        assert caught.value.__notes__ == [f"{expected}; from data=mine"]
    assert batch_of(ValueError("thrown elsewhere")) is None


class Raises(dict):
    def __getitem__(self, key: str) -> Any:
        raise KeyError(key)


@pytest.mark.parametrize(
    ("batch", "told"),
    [
        (Raises(a=1), None),  # no error of ours in place of the user's
        ({str(number): 0 for number in range(9)}, "training_step got {'0': int, .*'5': int, ...}"),
        ([[[[b""] * 9] * 9] * 9] * 9, r"training_step got \[\[.{498}"),
    ],
)
def test_a_batch_of_any_kind_is_told_in_a_line(batch: Any, told: str | None) -> None:
    strategy: Any = SingleDeviceStrategy()
    strategy._lightning_module = strategy.model = TakesPairs()
    strategy.precision_plugin = Precision()
    with pytest.raises((KeyError, ValueError, TypeError)) as caught:
        strategy.training_step(batch, 0)
    found = batch_of(caught.value)
    assert found == told if told is None else re.fullmatch(told, str(found))


def test_an_error_amid_a_training_says_how_to_go_on(
    monkeypatch: pytest.MonkeyPatch, tmp_path: Path, capsys: pytest.CaptureFixture
) -> None:
    monkeypatch.setattr("runs.run.last", lambda *_: Path("last.ckpt"))
    monkeypatch.setattr("runs.run.to_go_on", str)
    run = ending(tmp_path, started=True)
    for trained in (False, True):
        run.report.trained = trained
        for error in (RuntimeError("broken"), KeyboardInterrupt()):
            run.__exit__(type(error), error, None)
            assert capsys.readouterr().out == "to go on: last.ckpt\n" * trained


@pytest.mark.parametrize(
    ("line", "told"),
    [
        ("raise ValueError('few')", "few (models/gpt.py, line 1)"),
        ("raise ValueError", "models/gpt.py, line 1: ValueError"),
        ("raise TypeError('few')", "models/gpt.py, line 1: TypeError: few"),
        ("shown(None)", None),  # not of the model, but of what it calls
    ],
)
def test_an_error_of_a_constructor_is_told_with_its_place(line: str, told: str | None) -> None:
    with pytest.raises(Exception) as caught:
        exec(compile(line, ROOT / "models" / "gpt.py", "exec"), {"shown": shown})
    assert of_constructor(caught.value) == (told or str(caught.value))


def test_a_rank_that_anothers_end_has_ended_is_not_to_be_blamed(
    capsys: pytest.CaptureFixture,
) -> None:
    run = ending()
    gloo = "[third_party/gloo/gloo/transport/tcp/pair.cc:547] Connection closed by peer [::1]:43750"
    for error, status in (
        (HorovodInternalError("peer closed"), os.EX_TEMPFAIL),
        (HorovodInternalError("ncclAllReduce failed: remote process exited"), os.EX_TEMPFAIL),
        (HorovodInternalError("ncclCommInitRank failed: unhandled system error"), None),
        (HorovodInternalError("CUDA out of memory"), None),
        (RuntimeError(gloo), os.EX_TEMPFAIL),
        (HorovodInternalError("Horovod has been shut down. This was caused by"), os.EX_TEMPFAIL),
        (RuntimeError("mine"), None),
    ):
        code = None
        try:
            run.__exit__(type(error), error, None)
        except SystemExit as end:
            code = end.code
        assert code == status
        told = f"another rank ended ({str(error).partition('. ')[0]})" in capsys.readouterr().err
        assert told == (status is not None)  # else the traceback follows


@pytest.mark.parametrize(
    ("place", "told"),
    [
        ("", "FOLDER: cannot be written: "),
        ("/data/a.bin", "/data/a.bin: cannot be written: "),
        (b"/data/a.bin", "/data/a.bin: cannot be written: "),  # as of TensorBoard
    ],
)
@pytest.mark.parametrize("number", [errno.EDQUOT, errno.EROFS])
def test_a_full_disk_is_told_in_one_line(
    place: str | bytes, told: str, number: int, tmp_path: Path, capsys: pytest.CaptureFixture
) -> None:
    """Wherever it is noticed, and with the error that came of it."""
    run = ending(tmp_path, started=True)
    of_disk = OSError(number, "Quota exceeded", *([place] if place else []))
    error = ValueError("write to closed file")
    error.__context__ = of_disk
    for thrown in (of_disk, error):
        assert mistake(thrown, started=False) is None  # which knows no folder
        with pytest.raises(SystemExit, match="2"):
            run.__exit__(type(thrown), thrown, None)
        expected = told.replace("FOLDER", str(tmp_path))
        assert capsys.readouterr().err == f"error: {expected}Quota exceeded\n"
    other = OSError(errno.EIO, "Input/output error")
    other.__cause__, error.__context__ = error, other  # a ring, of which Python warns nobody
    run.__exit__(OSError, other, None)  # a traceback follows
    assert not capsys.readouterr().err


@pytest.mark.filterwarnings("ignore::pytest.PytestUnhandledThreadExceptionWarning")
def test_a_thread_tells_of_a_full_disk_in_one_line(
    monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture
) -> None:
    monkeypatch.setattr(threading, "excepthook", in_a_line_if_full)

    def throw(error: Exception) -> str:
        def body() -> None:
            raise error

        thread = threading.Thread(target=body)
        thread.start()
        thread.join()
        return capsys.readouterr().err

    assert throw(OSError(errno.ENOSPC, "No space")) == f"OSError: [Errno {errno.ENOSPC}] No space\n"
    assert "Traceback" in throw(OSError(errno.EIO, "Input/output error"))


def test_a_batch_that_a_worker_cannot_hand_over_is_told(
    monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture
) -> None:
    """Without ours, the training waited for it for ever."""
    monkeypatch.setattr(Queue, "_on_queue_feeder_error", print)  # put back behind this test
    run = Run.__new__(Run)
    run.strategy = None
    with run:
        handed_over = DataLoader(
            torch.ones(2), num_workers=1, collate_fn=lambda _: threading.Lock(), timeout=60
        )
        with pytest.raises(TypeError, match="in DataLoader worker process 0") as caught:
            next(iter(handed_over))
        assert "cannot pickle '_thread.lock'" in str(caught.value)
        own: Any = multiprocessing.Queue()
        own.put((0, threading.Lock()))
        own.close()
        own.join_thread()
    assert "cannot pickle '_thread.lock'" in capsys.readouterr().err


def test_a_folder_without_room_for_sockets_of_workers_is_told() -> None:
    text = "Caught OSError in DataLoader worker process 0.\nOriginal Traceback (most recent call "
    text += "last):\nOSError: [Errno 28] No space left on device: '/tmp/pymp-3begfazh'\n"
    told = mistake(OSError(text), started=True)
    assert told and told.startswith("/tmp: No space left on device: the workers of loaders make")
    assert mistake(OSError(text.replace("pymp-", "mine-")), started=True) is None


class Unreadable(IterableDataset):
    def __iter__(self) -> Iterator[Any]:
        raise FileNotFoundError("no such shard")


def test_an_error_of_a_loaders_beginning_is_not_hidden_by_the_end_of_one_that_never_began(
    tmp_path: Path, capsys: pytest.CaptureFixture
) -> None:
    trainer = quiet_trainer(default_root_dir=tmp_path, max_epochs=1)
    with pytest.raises(RuntimeError, match="iter\\(combined_loader\\)") as caught:
        trainer.fit(BoringModel(), DataLoader(Unreadable(), batch_size=None))
    run = ending()
    with pytest.raises(SystemExit):
        run.__exit__(RuntimeError, caught.value, None)
    assert capsys.readouterr().err.startswith("error: no such shard (")
    run.report.started = True  # in a later epoch it keeps its traceback
    with pytest.raises(FileNotFoundError) as alone:
        run.__exit__(RuntimeError, caught.value, None)
    assert alone.value.__suppress_context__


class Pairs(Sampler):
    def __init__(self) -> None: ...

    def __iter__(self) -> Iterator[list[int]]:
        return iter([[0, 1], [2, 3]])

    def __len__(self) -> int:
        return 2


class Lengths(BatchSampler):
    def __init__(self, lengths: list[int]) -> None:
        super().__init__(SequentialSampler(lengths), 2, drop_last=False)


@pytest.mark.parametrize("sampler", [Pairs(), Lengths([3, 3, 2, 1])])
def test_a_batch_sampler_that_lightning_cannot_split_is_told(sampler: Any) -> None:
    loader: DataLoader = DataLoader(range(4), batch_sampler=sampler)
    with pytest.raises(TypeError) as caught:
        _get_dataloader_init_args_and_kwargs(loader, SequentialSampler(range(4)))
    message = mistake(caught.value, started=False)
    assert message and message.startswith("a batch_sampler is split over the ranks only if it is a")


def test_other_optimizers_than_those_of_a_checkpoint() -> None:
    def adam(*sizes: int) -> torch.optim.Adam:
        return torch.optim.Adam([{"params": [torch.zeros(size)]} for size in sizes])

    two = torch.optim.Adam([torch.zeros(1), torch.zeros(2)])
    for other in (adam(1, 2), two):
        with pytest.raises(ValueError, match="parameter group") as caught:
            adam(1).load_state_dict(other.state_dict())
        told = mistake(caught.value, started=False)
        assert told and "ckpt_path= goes on with the same model and optimizers" in told

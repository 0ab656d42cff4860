"""What `with Run(config) as run:` in template.py does around the training.

It makes what conf/ names, has rank 0 make one folder for all ranks, and prints and writes what the
run gave. A mistake found before the first batch ends the run with one line and leaves no folder; an
error in the middle of training keeps its traceback, the folder and what was saved in it.
"""

from __future__ import annotations

import contextlib
import glob
import io
import logging
import os
import re
import shlex
import shutil
import signal
import sys
import tempfile
import threading
import warnings
from multiprocessing.queues import Queue
from pathlib import Path
from traceback import print_exc
from typing import Any

import torch
from hydra.core.hydra_config import HydraConfig
from hydra.errors import HydraException
from omegaconf import DictConfig, OmegaConf
from pytorch_lightning import LightningDataModule, LightningModule, Trainer
from pytorch_lightning.strategies import Strategy
from pytorch_lightning.utilities.exceptions import SIGTERMException
from torch._utils import ExceptionWrapper
from torch.utils.data import get_worker_info

from runs.checkpoints import NAMED, last, unreadable
from runs.config import CONF
from runs.folders import ROOT, new_folder, quoted, shown, task_folder
from runs.hooks import LeavesOutEmptyHooks
from runs.mistakes import (
    MISTAKES,
    batch_of,
    ended_by_another,
    full_disk,
    mistake,
    of_constructor,
    place_of,
    unmasked,
)
from runs.predictions import Predictions
from runs.ranks import gather_objects
from runs.refusal import (
    Refusal,
    launched_rank,
    launched_size,
    let_rank_0_tell,
    of_srun,
    refuse,
    slurm_tasks,
)
from runs.report import Report
from runs.resuming import OF_EACH_RUN, LeavesOutSearches, keeping, save_average
from runs.stopping import Stopped
from runs.targets import OTHER_LIGHTNING, make, misfit, of_other_lightning, with_advice

MADE = {  # the groups of conf/ that make one object each, and its class
    "model": LightningModule, "data": LightningDataModule, "strategy": Strategy, "trainer": Trainer,
}  # fmt: skip
LR_POWERS = {"linear": 1, "sqrt": 0.5}  # of the number of ranks, by lr_scaling
# A socket's path has 107 bytes (unix(7)), of which multiprocessing takes 32 below TMPDIR.
LONGEST_TMPDIR = 75
QUIETED = (  # warnings that tell a user of this template nothing
    ".*Profiler clears events.*",
    ".*LeafSpec.*is deprecated.*",
    ".*does not have many workers.*",
    ".*smaller than the logging interval.*",  # the report says it at the end, where it matters
    ".*Experiment logs directory.*is not empty.*",
)


class Run:
    """One run of the template, from its configuration to its last line.

    Args:
        config: of the whole job; `open` makes its paths absolute.

    Attributes:
        report: the callback that prints the lines at start and end and writes summary.json.
        callbacks: the report, what a resume and a test of averaged weights need, what saves time
            in a step, and predictions when they are asked for.
        choices: which file of each group of conf/ was taken, e.g. {"model": "classifier"}.
        folder: of the run, with its logs, checkpoints and results; None on all ranks but 0.
        strategy: that of the Trainer; None until `open`.
    """

    def __init__(self, config: DictConfig) -> None:
        self.config = config
        self.choices = HydraConfig.get().runtime.choices
        self.report = Report(config, self.choices)
        self.callbacks = [
            self.report,
            *(kind() for kind in OF_EACH_RUN),
            LeavesOutEmptyHooks(),
            *([LeavesOutSearches()] if config.ckpt_path else []),
            *([Predictions()] if config.predict else []),
        ]
        self.folder: Path | None = None
        self.strategy: Strategy | None = None
        self._parents: list[Path] = []  # of the folder: removed with it, if they are empty
        self._warnings: list[str] = []

    def __enter__(self) -> Run:
        # Without Lightning's start-up lines and hints: the report says it in fewer.
        level = logging.ERROR if launched_rank() else logging.WARNING
        for name in ("pytorch_lightning", "lightning_fabric"):
            logging.getLogger(name).setLevel(level)
        if not launched_rank():  # what these say, they were asked for
            for name in ("early_stopping", "model_summary"):
                logging.getLogger(f"pytorch_lightning.callbacks.{name}").setLevel(logging.INFO)
        if not torch.cuda.is_available():  # torch's profilers would say so, as an error
            os.environ.setdefault("KINETO_LOG_LEVEL", "6")  # since 2.14 level 5 tells their starts
        if isinstance(sys.stdout, io.TextIOWrapper):  # a name of a file or class may be no UTF-8
            sys.stdout.reconfigure(errors="backslashreplace")
        for text in QUIETED:
            warnings.filterwarnings("ignore", text)
        self._show = warnings.showwarning
        warnings.showwarning = self._warning  # type: ignore[assignment]
        threading.excepthook = in_a_line_if_full
        Queue._on_queue_feeder_error = in_place_of_a_batch  # type: ignore[attr-defined]
        if len(os.fsencode(tempfile.gettempdir())) > LONGEST_TMPDIR:
            warnings.warn(
                f"TMPDIR={tempfile.gettempdir()} is too long for the sockets that a loader's "
                f"workers make there ({LONGEST_TMPDIR} bytes): this run uses /tmp",
                stacklevel=2,
            )
            tempfile.tempdir = os.environ["TMPDIR"] = "/tmp"
        return self

    def open(self, strategy: Strategy) -> Path:
        """Check what was asked for and make the run's folder, on rank 0, for all ranks.

        `log_dir`, `data_dir`, `run_dir` and `ckpt_path` become absolute paths.
        """
        config = self.config
        self.strategy = strategy
        for key in ("log_dir", "data_dir"):
            config[key] = str(ROOT / Path(str(config[key])).expanduser())
        runs = task_folder(Path(config.log_dir), config.task, self.choices["model"]) / "runs"
        if config.ckpt_path and config.ckpt_path not in NAMED:
            config.ckpt_path = str(Path(str(config.ckpt_path)).expanduser().absolute())
        if not (config.train or config.test or config.predict):
            raise Refusal("train=false test=false: nothing is left to do; give predict=true")
        if not config.ckpt_path and not config.train:
            raise Refusal(
                "train=false: give the checkpoint to test: ckpt_path=best for that of the newest "
                "finished training with one, or a path, as ckpt_path=logs/.../last.ckpt"
            )
        # Rank 0 looks for the checkpoint and makes the folder; the others hear where, or why not.
        requested = ROOT / Path(str(config.run_dir)).expanduser() if config.run_dir else None
        config.run_dir = str(requested or runs)
        problem = self._make_folder(runs, requested) if launched_rank() == 0 else None
        if problem := strategy.broadcast(problem):
            raise Refusal(problem)
        config.run_dir, config.ckpt_path = strategy.broadcast([config.run_dir, config.ckpt_path])
        # Under DDP broadcast does nothing yet, as ranks meet in fit. There rank 0 reads for all:
        # the others need any path.
        if config.ckpt_path in NAMED:
            config.ckpt_path = str(runs / config.ckpt_path)
        return Path(config.run_dir)

    def _find_checkpoint(self, runs: Path) -> str | None:
        """Replace ckpt_path=last or best by a path; why it cannot be, or None."""
        find, what = NAMED[self.config.ckpt_path]
        try:
            checkpoint = find(runs)
        except ValueError as error:
            return f"ckpt_path={self.config.ckpt_path}: {error}"
        if checkpoint is None:
            return f"ckpt_path={self.config.ckpt_path}: no run in {shown(runs)} has {what}"
        self.config.ckpt_path = str(checkpoint)
        return None

    def _make_folder(self, runs: Path, requested: Path | None) -> str | None:
        """Make the folder, with the configuration in .hydra/; why it cannot be, or None."""
        config, hydra = self.config, HydraConfig.get()
        if config.ckpt_path in NAMED and (problem := self._find_checkpoint(runs)):
            return problem
        if config.ckpt_path and (problem := unreadable(Path(config.ckpt_path), config.train)):
            return problem
        try:
            if requested:
                requested.mkdir(parents=True)
            folder = self.folder = requested or new_folder(runs)
            self._parents = [] if requested else [runs, runs.parent]
            config.run_dir = str(folder)
            (folder / ".hydra").mkdir()
            # By it make sync keeps a run that lies in the checkout of another host.
            (folder / ".gitignore").write_text("*\n")
            OmegaConf.save(config, folder / ".hydra" / "config.yaml")
            OmegaConf.save(hydra.overrides.task, folder / ".hydra" / "overrides.yaml")
            OmegaConf.save(OmegaConf.create({"hydra": hydra}), folder / ".hydra" / "hydra.yaml")
        except OSError as error:
            if isinstance(error, FileExistsError) and error.filename == str(requested):
                return f"run_dir={requested}: it exists already; give another, or none"
            key = "run_dir" if requested else "log_dir"
            return (
                f"{key}={config[key]}: the run's folder cannot be written: "
                f"{error.strerror} ({error.filename or 'writing'}); give another"
            )
        return None

    def instantiate(self, group: str, **arguments: Any) -> Any:
        """Make what a group of conf/ names; a list for callbacks and logger; None for none.

        Raises:
            Refusal: with the group and the reason, when it cannot be made.
        """
        config = self.config.get(group)
        try:
            if config and "_target_" not in config and group not in MADE:
                return [make(member) for member in self._members(group, config)]
            if config and group in MADE and (problem := misfit(config)):
                raise Refusal(problem)
            if given := [name for name in arguments if config and name in config]:
                raise Refusal(
                    f"{group}.{given[0]}: template.py sets this itself and would ignore yours: "
                    f"leave it out (strategy, logger, callbacks, profiler are groups of conf/)"
                )
            instance = make(config, **arguments) if config else None
            if of_other_lightning(instance):
                raise Refusal(f"{type(instance).__name__}: {OTHER_LIGHTNING}")
        except MISTAKES as error:
            cause = error.__cause__ if isinstance(error, HydraException) else error
            what = with_advice(of_constructor(cause or error), config)
            typed = " ".join([f"{group}={self.choices.get(group, '')}", *typed_in(group)])
            raise Refusal(f"{typed}: {what}") from error
        if not isinstance(instance, MADE.get(group, object)):
            if (choice := self.choices.get(group)) is None:
                raise Refusal(f"{group}: a run needs one; leave ~{group} out")
            raise Refusal(
                f"{group}={choice}: _target_ in conf/{group}/{choice}.yaml has to name a "
                f"{MADE[group].__name__}"
            )
        return instance

    def _members(self, group: str, config: DictConfig) -> list[DictConfig]:
        """Those of callbacks or logger that are to be made."""
        members = []
        for name, member in config.items():
            if isinstance(member, DictConfig) and "_target_" in member:
                members.append(member)
            # An experiment's settings are left over of a logger that was not chosen, and of all
            # callbacks with callbacks=none, as of debug=.
            elif group == "logger" and (CONF / group / f"{name!s}.yaml").is_file():
                continue
            elif member and self.choices.get(group) != "none":
                raise Refusal(
                    f"{group}.{name!s}: there is no such member of it, and no _target_ for one"
                )
        return members

    def check_ranks(self, ranks: int) -> None:
        """Refuse a strategy that leaves out some of the launched processes: they would train alone.

        Args:
            ranks: the Trainer's world size.
        """
        launched = launched_size()
        if launched in (None, ranks):
            return
        if launched == slurm_tasks():
            raise Refusal(of_srun(launched))
        raise Refusal(
            f"strategy={self.choices['strategy']}: {launched} processes were launched, and it runs "
            f"on {ranks}; launch that many (NP=, -np)"
        )

    def scale_learning_rate(self, ranks: int) -> None:
        """Multiply model.lr as lr_scaling asks; what refers to it by ${model.lr} follows."""
        scaling, model = self.config.lr_scaling, self.config.model
        if scaling == "none":
            return
        if model.get("lr") is None:
            raise Refusal(
                f"lr_scaling={scaling}: model={self.choices['model']} has no lr to scale; give it "
                "one, and write ${model.lr} where an optimizer made by Hydra takes it"
            )
        model.lr *= ranks ** LR_POWERS[scaling]

    def checkpoint(self, trainer: Trainer) -> str | None:
        """The checkpoint to evaluate: after training the average (SWA), else the best, else None,
        which is the weights as they are; without training, that of ckpt_path."""
        if not self.config.train:
            return self.config.ckpt_path
        if average := save_average(trainer):
            return average
        checkpointer = keeping(trainer)
        return (checkpointer and checkpointer.best_model_path) or None

    def __exit__(self, kind: Any, error: BaseException | None, traceback: Any) -> None:
        warnings.showwarning = self._show
        threading.excepthook = threading.__excepthook__
        if error is None:
            self._tell_warnings_of_other_ranks()
            return
        if isinstance(error, Stopped):
            if launched_rank() == 0:
                print(f"stopped; to go on: {to_go_on(Path(error.args[0]))}", flush=True)
            sys.exit(128 + error.args[1])
        if not self.report.started:
            self._remove_folder()
        self._tell_how_to_go_on()
        masking, error = error, unmasked(error)
        rank = f"rank {launched_rank()} on {os.uname().nodename}"
        if isinstance(error, SIGTERMException):  # a SystemExit, of status 0
            print(f"{rank}: ended by SIGTERM, without a checkpoint", file=sys.stderr, flush=True)
            sys.exit(128 + signal.SIGTERM)
        if os.environ.get("HYDRA_FULL_ERROR"):
            return
        callbacks = self.config.get("callbacks")
        line = mistake(error, started=self.report.started, callbacks=callbacks)
        if full := full_disk(error):
            where = os.fsdecode(full.filename or place_of(full) or self.folder or "a file")
            line = line or f"{where}: cannot be written: {full.strerror}"
        if line:
            refuse(line)
        if ended_by_another(error):  # that rank prints the cause
            if not self.report.started:  # by a mistake, in one line: no line of each other rank
                let_rank_0_tell()
            reason = str(error).splitlines()[0].partition(". ")[0][:150]
            print(f"{rank}: another rank ended ({reason})", file=sys.stderr, flush=True)
            sys.exit(os.EX_TEMPFAIL)  # for the launcher: not the one to be blamed
        if isinstance(error, Exception):
            let_rank_0_tell()
            if sys.version_info >= (3, 11) and (told := batch_of(error)):
                error.add_note(f"{told}; from data={self.choices.get('data')}")
        if error is not masking:
            raise error from error.__cause__

    def _tell_how_to_go_on(self) -> None:
        """On rank 0, amid a training."""
        if self.folder is None or not self.report.trained or self.report.steps:
            return
        if checkpoint := last(self.folder.parent, glob.escape(self.folder.name)):
            print(f"to go on: {to_go_on(checkpoint)}", flush=True)

    def _remove_folder(self) -> None:
        if self.folder is not None:
            shutil.rmtree(self.folder, ignore_errors=True)
            for parent in self._parents:
                with contextlib.suppress(OSError):  # other runs are there
                    parent.rmdir()

    def _warning(self, message: Warning, category: type, *place: Any, **named: Any) -> None:
        """Rank 0 shows a warning at once; the others keep theirs until the end."""
        text = f"{category.__name__}: {' '.join(str(message).split())}"
        if text not in self._warnings:
            self._warnings.append(text)
            if launched_rank() == 0:
                self._show(message, category, *place, **named)

    def _tell_warnings_of_other_ranks(self) -> None:
        if self.strategy is None:
            return
        printed = set(self._warnings)
        for rank, texts in enumerate(gather_objects(self.strategy, self._warnings)):
            for text in texts:
                if text not in printed and launched_rank() == 0:
                    print(f"warning of rank {rank}: {text}", flush=True)
                printed.add(text)


def in_a_line_if_full(thrown: threading.ExceptHookArgs) -> None:
    """Tell in one line that a disk is full, where that ends a thread such as TensorBoard's. The
    training goes on until it writes something itself."""
    if full := full_disk(thrown.exc_value):
        print(f"{thrown.exc_type.__name__}: {full}", file=sys.stderr, flush=True)
    else:
        threading.__excepthook__(thrown)


def in_place_of_a_batch(queue: Any, error: Exception, item: Any) -> None:
    """Have a loader's worker hand over why it cannot hand over a batch, as of an object that cannot
    be pickled. Python prints that and goes on: the training would wait for the batch for ever."""
    worker = get_worker_info()
    if worker and isinstance(item, tuple) and isinstance(item[0], int):  # the batch's number
        where = f"in DataLoader worker process {worker.id}"
        queue.put((item[0], ExceptionWrapper(where=where)))  # as torch does with other errors
    else:
        print_exc()


def typed_in(group: str) -> list[str]:
    """The changes to a group of conf/ that were given on the command line."""
    changes = HydraConfig.get().overrides.task if HydraConfig.initialized() else []
    return [change for change in changes if re.match(rf"[+~]*{group}\.", change)]


def to_go_on(checkpoint: Path) -> str:
    """The command to type: this run's changes and its checkpoint, quoted for Hydra and the shell.

    Another launcher than ours is written as "...": the run goes on with any number of ranks.
    """
    here = Path.cwd()
    path = checkpoint.relative_to(here) if checkpoint.is_relative_to(here) else checkpoint
    changes = [
        change
        for change in HydraConfig.get().overrides.task
        if change.partition("=")[0] not in ("ckpt_path", "run_dir")  # run_dir has to be a new one
    ]
    launcher = shlex.quote(sys.executable)
    if launched_size():
        typed = shlex.split(os.environ.get("HOROVOD_LAUNCHED", ""))  # by cluster/horovodrun.py
        ours = sys.argv[0] in typed
        launcher = shlex.join(typed[: typed.index(sys.argv[0])]) if ours else "..."
    changes = [sys.argv[0], *changes, f"ckpt_path={quoted(path)}"]
    return f"{launcher} {' '.join(map(_for_the_shell, changes))}"


def _for_the_shell(word: str) -> str:
    """Like shlex.quote, but a word with Hydra's quotes in it stays readable."""
    double = "'" in word and not re.search(r'["$`\\!]', word)
    return f'"{word}"' if double else shlex.quote(word)

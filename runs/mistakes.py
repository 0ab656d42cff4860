"""Errors that a user can fix, told in one line; all others keep their traceback."""

from __future__ import annotations

import contextlib
import errno
import re
from collections.abc import Mapping
from itertools import islice
from pathlib import Path
from traceback import extract_tb, walk_tb
from typing import Any

from hydra.errors import HydraException
from omegaconf import DictConfig
from omegaconf.errors import OmegaConfBaseException
from pytorch_lightning.strategies import Strategy
from pytorch_lightning.utilities.exceptions import MisconfigurationException
from torch import Tensor

from runs.checkpoints import HELD, OBJECT
from runs.config import LOGGERS
from runs.folders import ROOT, shown
from runs.refusal import Refusal, guess_metric, of_srun, slurm_tasks

KILLED_WORKER = (
    "a worker of a loader was killed, most often because the memory is full (dmesg tells): try "
    "fewer of them (data.num_workers=) or ranks"
)
FULL_SHM = (
    "/dev/shm is full, through which the workers of loaders hand over their batches: give it more "
    "(docker run --shm-size=8g), or data.num_workers=0"
)
MISTAKES = (Refusal, MisconfigurationException, HydraException, OmegaConfBaseException)
NO_METRIC = re.compile(  # Lightning's errors of what watches a metric, with those that there are
    r"(?:Early stopping conditioned on metric `|`ModelCheckpoint\(monitor=')(.+?)[`']"
    r".*?: (.*?)(?:\. HINT|$)"
)
# Of self.hparams["NAME"], and of self.hparams.NAME, which is looked up a frame further in.
NO_HYPERPARAMETER = re.compile(
    r"(?:KeyError: |AttributeError: 'AttributeDict' object has no attribute )'(\w+)'"
)
ALONE = "each of which would train alone"  # HorovodStrategy's, of other launchers
# What an error says, and what to tell the user instead; {} is what the brackets match.
ADVICE = {
    # Lightning, which makes each loader anew for a rank's share
    r"more than one `__init__` argument": (
        "Lightning re-creates a DataLoader, as to predict, and cannot if batch_size was passed by "
        "position: write DataLoader(data, batch_size=...) in the data module"
    ),
    # Lightning, of training
    r"by returning None in distributed training is not supported": (
        "training_step returned None: it has to return the loss, of each batch on each rank"
    ),
    r"(?s)^\s*`?val_check_interval`? \((\d+)\) must be less than or equal to .*?\((\d+)\)": (
        "trainer.val_check_interval={}: a rank has {} batches an epoch: give at most that, or "
        "count over epochs with trainer.check_val_every_n_epoch=null"
    ),
    r"multiple progress bar callbacks": (
        "there are two progress bars: ~callbacks.progress leaves out that of conf/callbacks"
    ),
    r"Batch size finder is not supported with distributed strategies": (
        "a BatchSizeFinder searches in one process without Horovod: python template.py "
        "strategy=single ...; then give what it finds, data.batch_size="
    ),
    # torch, of a OneCycleLR
    r"^Tried to step \d+ times. The specified number of total steps is (\d+)": (
        "the schedule of the learning rate has {0} steps, and this training makes more: make it "
        "for self.trainer.estimated_stepping_batches; that of a checkpoint keeps its steps: give "
        "trainer.max_steps={0}, or the global batch size and epochs of before"
    ),
    # torch, of the loss, and of a label on a CPU
    r"does not require grad and does not have a grad_fn": (
        "the loss has no gradient: leave out what cuts it off (detach, item, no_grad), and let a "
        "parameter be trained"
    ),
    r"^Target (-?\d+) is out of bounds": (
        "a label is {}, for which the model has no output: labels count from 0 to model.classes - 1"
    ),
    # torch, of the batches that a loader's workers hand over
    r"unable to (?:allocate shared memory|.*</torch_.*No space left)|killed by signal: Bus error": (
        FULL_SHM
    ),
    r"^DataLoader worker .*is killed by signal: Killed": KILLED_WORKER,
    # Python, of the sockets by which they do so
    r"^OSError: \[Errno \d+\] (.+): '(.+)/pymp-\w+'\Z": (
        "{1}: {0}: the workers of loaders make sockets there, to hand over their batches: make "
        "room, or give another folder as TMPDIR=, or data.num_workers=0"
    ),
    # torch, of an object in a checkpoint
    OBJECT: f"the checkpoint cannot be loaded: {HELD}",
    # torch, of the optimizers in a checkpoint
    r"state dict (?:has a different number of|contains a) parameter group": (
        "the checkpoint's optimizers have other parameters than the model's: ckpt_path= goes on "
        "with the same model and optimizers; to take its weights alone, load them in the model's "
        "__init__: torch.load(FILE)['state_dict']"
    ),
    # HorovodStrategy
    rf"^torchrun.*{ALONE}": (
        "torchrun is for strategy=ddp, with trainer.devices= its processes a host; for "
        "strategy=horovod it is make train, or horovodrun"
    ),
    # datamodules/, of a file
    r"^(?:RuntimeError: )?(.+ cannot be read: .+)\Z": "{}",
}
# Of torch.distributed where another rank is gone.
PEER_ENDED = re.compile(r"gloo/transport/.*(closed by peer|reset by peer|Read error|Broken pipe)")
# Horovod: a HorovodInternalError that begins so was caused on this rank, not by another's end.
OWN = re.compile(r"Mismatched|CUDA|cuda\w+ failed|GPU Error|nccl\w+ failed: (?!remote process)")

MOST, MOST_LETTERS = 6, 500  # members of a batch that are described, and letters of it
FULL = (errno.ENOSPC, errno.EDQUOT, errno.EROFS)  # Linux makes a failing disk read-only

# Where an error comes through, but is seldom to be fixed.
RUNS_THEM = ("template.py", "runs", "strategies", "cluster")
SEMAPHORE = "multiprocessing/synchronize.py"  # a file in /dev/shm, which its error does not name
SAMPLER = "torch/utils/data/distributed.py"  # asks torch.distributed for what it is not given
BATCHES = "pytorch_lightning/utilities/data.py"  # makes a batch_sampler anew, of a rank's sampler


def mistake(error: BaseException, started: bool, callbacks: DictConfig | None = None) -> str | None:
    """One line for an error that the user can fix; None for any other, which keeps its traceback.

    Args:
        started: whether a batch was trained or evaluated: from then on fewer errors are the
            configuration's.
        callbacks: the group of the configuration.
    """
    if match := NO_METRIC.match(str(error)):
        return no_metric(match[1], re.findall(r"[`'](.+?)[`']", match[2]), callbacks or {})
    told = _of_sampler(error) or _of_hyperparameter(error) or _of_weights(error)
    told = told or _of_advice(error) or _of_half_a_batch(error)
    return told or (None if started else _of_configuration(error))


def _of_half_a_batch(error: BaseException) -> str | None:
    """A loader's worker that was killed as it handed over a batch."""
    names = [frame.f_code.co_name for frame, _ in walk_tb(error.__traceback__)]
    cut_off = isinstance(error, ConnectionResetError) and "_try_get_data" in names  # DataLoader's
    return KILLED_WORKER if cut_off else None


def unmasked(error: BaseException) -> BaseException:
    """The error of making a loader's iterator, where Lightning hides it: it then ends an epoch that
    has not begun, which is an error of its own."""
    hidden = error.__context__ if "call `iter(combined_loader)` first" in str(error) else None
    return hidden or error


def _of_sampler(error: BaseException) -> str | None:
    files = [frame.filename for frame in extract_tb(error.__traceback__)]
    if isinstance(error, TypeError) and files and files[-1].endswith(BATCHES):
        return (
            "a batch_sampler is split over the ranks only if it is a subclass of "
            "torch.utils.data.BatchSampler that takes sampler, batch_size and drop_last: make it "
            "one, and build its batches from what `sampler` yields; one that takes a rank's share "
            "itself goes with +trainer.use_distributed_sampler=false"
        )
    if not any(file.endswith(SAMPLER) for file in files):
        return None
    return (
        "DistributedSampler(data) asks torch.distributed for the ranks: leave it out, as each rank "
        "gets its share by itself, or give it num_replicas=trainer.world_size and "
        "rank=trainer.global_rank"
    )


def _of_hyperparameter(error: BaseException) -> str | None:
    if not (match := NO_HYPERPARAMETER.match(f"{type(error).__name__}: {error}")):
        return None
    name, frames = match[1], extract_tb(error.__traceback__)
    by_key = isinstance(error, KeyError)
    # Not TABLE[self.hparams["column"]], where it is TABLE that lacks something.
    asked = rf"self\.hparams\[['\"]{name}['\"]\]" if by_key else rf"self\.hparams\.{name}\b"
    for frame in frames[-1:] if by_key else frames[-2:-1]:
        if re.search(asked, frame.line or ""):
            return (
                f"{frame.filename}, line {frame.lineno}: the hyperparameters have no {name!r}: "
                "call self.save_hyperparameters() in __init__, which takes it; where that ignores "
                f"it, write self.{name}"
            )
    return None


def _of_weights(error: BaseException) -> str | None:
    text, frames = str(error), extract_tb(error.__traceback__)
    restored = any(frame.name == "load_model_state_dict" for frame in frames)  # by the strategy
    if not restored or "loading state_dict" not in text:
        return None
    first, *others = [line.strip(" \t.") for line in text.splitlines()[1:]] or [""]
    advice = ""
    if "Missing key" in first and not any("Unexpected key" in other for other in others):
        advice = (
            "; if it keeps a part of them, set self.strict_loading = False in the model's __init__"
        )
    elif any(("_orig_mod." in first) != ("_orig_mod." in other) for other in others):
        advice = (
            "; torch.compile adds _orig_mod. to the names of weights: compile the same modules as "
            "the training that wrote it"
        )
    return f"ckpt_path: the checkpoint does not fit the model: {first}{advice}"


def _of_advice(error: BaseException) -> str | None:
    frames = extract_tb(full.__traceback__) if (full := full_disk(error)) else []
    if frames and frames[-1].filename.endswith(SEMAPHORE):
        return FULL_SHM
    text = _text(error)
    if ALONE in text and (tasks := slurm_tasks()):
        return of_srun(tasks)
    for pattern, advice in ADVICE.items():
        if match := re.search(pattern, text):
            return advice.format(*match.groups())
    return text if isinstance(error, MISTAKES) else None


def _of_configuration(error: BaseException) -> str | None:
    """Of an error before the first batch."""
    text = _text(error)
    if (package := type(error).__module__.split(".")[0]) in LOGGERS:  # no account, no connection
        return f"logger={package}: {' '.join(text.split())}"
    if isinstance(error, (ValueError, OSError)) and not full_disk(error):
        where = f"{place}; " if (place := place_of(error)) else ""
        return f"{text} ({where}HYDRA_FULL_ERROR=1 shows where)"
    return None


def _text(error: BaseException) -> str:
    """What it says; of an error in a loader's worker the last line, of a worker's end its cause."""
    ended = "DataLoader worker" in str(error) and "exited unexpectedly" in str(error)
    text = str(error.__cause__ if ended and error.__cause__ else error)
    return text.strip().splitlines()[-1] if "Original Traceback" in text else text


def full_disk(error: BaseException | None) -> OSError | None:
    """That of a full or read-only disk, or a used-up quota, behind an error, if there is one."""
    seen: list[BaseException] = []  # it may be a ring: `raise error from what_came_of_it`
    while error and not any(error is other for other in seen):
        if isinstance(error, OSError) and error.errno in FULL:
            return error
        seen.append(error)
        error = error.__cause__ or error.__context__
    return None


def place_of(error: BaseException) -> str:
    """The last line of this repository that it came through; "" if that is one of RUNS_THEM, and
    none of a model, of data or the like."""
    place = ""
    for frame in extract_tb(error.__traceback__):
        path = Path(frame.filename).resolve()  # or <string>, as of a dataclass, which is no file
        if path.is_file() and path.is_relative_to(ROOT) and "site-packages" not in path.parts:
            runs_them = path.relative_to(ROOT).parts[0] in RUNS_THEM
            place = "" if runs_them else f"{shown(path)}, line {frame.lineno}"
    return place


def batch_of(error: BaseException) -> str | None:
    """The batch that the model's step got, if the error came through one, else None: most often a
    step that fails takes another kind of batch."""
    for frame, _ in walk_tb(error.__traceback__):
        step, given = frame.f_code.co_name, frame.f_locals
        # As the strategy passed it on: the model's own variable may hold something else by now.
        if step.endswith("_step") and isinstance(given.get("self"), Strategy) and given.get("args"):
            with contextlib.suppress(Exception):  # a batch may be anything
                return f"{step} got {_kind(given['args'][0])[:MOST_LETTERS]}"
    return None


def _kind(value: Any) -> str:
    """As `[float32[64, 1, 8, 8], int64[64]]`."""
    if isinstance(value, Tensor):
        return f"{str(value.dtype).removeprefix('torch.')}{list(value.shape)}"
    if isinstance(value, Mapping):
        kinds = [f"{key!r}: {_kind(value[key])}" for key in islice(value, MOST)]
        return "{" + ", ".join(kinds + ["..."] * (len(value) > MOST)) + "}"
    if type(value) in (list, tuple):
        kinds = [_kind(member) for member in value[:MOST]] + ["..."] * (len(value) > MOST)
        return f"[{', '.join(kinds)}]"
    return type(value).__name__


def of_constructor(error: BaseException) -> str:
    """What it says, where, and of which kind, as "'relu'" alone would say little."""
    place = place_of(error)
    if not place or isinstance(error, MISTAKES):
        return str(error)
    if str(error) and isinstance(error, (ValueError, OSError)):
        return f"{error} ({place})"
    return f"{place}: {type(error).__name__}: {error}".removesuffix(": ")


def ended_by_another(error: BaseException) -> bool:
    """Whether it is the end of another rank, in the middle of a collective, that ended this one."""
    text = str(error)
    if type(error).__name__ == "HorovodInternalError" and not OWN.match(text):
        return True
    return bool(PEER_ENDED.search(text))


def no_metric(metric: str, logged: list[str], callbacks: Any) -> str:
    """That nothing logs it, with all that watch it: each would end a run of its own."""
    watching = [
        f"callbacks.{name}.monitor={metric}"
        for name, member in callbacks.items()
        if isinstance(member, DictConfig) and member.get("monitor") == metric
    ]
    names = [name for name in dict.fromkeys(logged) if name not in ("epoch", "step")]  # Lightning's
    of_loader = f"{metric}/dataloader_idx_0"  # several loaders have a metric each
    close = f" (did you mean {of_loader}?)" if of_loader in names else guess_metric(metric, names)
    if not close and metric.startswith("val"):
        close = f'; self.log("{metric}", ..., sync_dist=True) in validation_step does'
    return (
        f"{' '.join(watching) or metric}: nothing is logged by this name; there are: "
        f"{', '.join(names) or 'none'}{close}"
    )

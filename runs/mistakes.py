"""What an error says that the user can mend, in one line; others keep their traceback."""

from __future__ import annotations

import re
from traceback import extract_tb
from typing import Any

from hydra.errors import HydraException
from omegaconf import DictConfig
from omegaconf.errors import OmegaConfBaseException
from pytorch_lightning.utilities.exceptions import MisconfigurationException

from runs.refusal import Refusal, guess, of_srun, slurm_tasks

MISTAKES = (Refusal, MisconfigurationException, HydraException, OmegaConfBaseException)
# In Lightning's, where it cannot make a batch sampler anew for a rank's share.
OWN_BATCHES = "can't inject a (distributed) sampler into your batch sampler"
NO_METRIC = re.compile(  # Lightning's errors of what watches a metric, with those that there are
    r"(?:Early stopping conditioned on metric `|`ModelCheckpoint\(monitor=')(.+?)[`']"
    r".*?: (.*?)(?:\. HINT|$)"
)
# In Lightning's error where it cannot make a loader anew, whose arguments were given by position.
BY_POSITION = "more than one `__init__` argument"
UNREADABLE = re.compile(r"(?:RuntimeError: )?(.+ cannot be read: .+)")  # of datamodules/, a file
TOO_LONG = re.compile(  # Lightning's, of what a rank trains in an epoch
    r"\s*`?val_check_interval`? \((\d+)\) must be less than or equal to .*?\((\d+)\)", re.DOTALL
)
ALONE = "each of which would train alone"  # HorovodStrategy's, of other launchers
NO_OUTPUT = re.compile(r"Target (-?\d+) is out of bounds")  # torch's, of a label, on a CPU
NO_LOSS = "by returning None in distributed training is not supported"  # Lightning's
NO_GRADIENT = "does not require grad and does not have a grad_fn"  # torch's, of the loss
SERVICES = ("wandb", "mlflow")  # no account, no connection
SAMPLER = "torch/utils/data/distributed.py"  # asks torch.distributed for what it is not given


def mistake(error: BaseException, started: bool, callbacks: DictConfig | None = None) -> str | None:
    """One line for an error that the user can mend in the configuration; None for any other."""
    if match := NO_METRIC.match(str(error)):
        return no_metric(match[1], re.findall(r"[`'](.+?)[`']", match[2]), callbacks or {})
    if isinstance(error, MisconfigurationException) and BY_POSITION in str(error):
        return (
            "Lightning re-creates a DataLoader, as to predict, and cannot if batch_size was "
            "passed by position: write DataLoader(data, batch_size=...) in the data module"
        )
    if isinstance(error, TypeError) and OWN_BATCHES in str(error):
        return (
            "a batch_sampler is split over the ranks only if it is a subclass of "
            "torch.utils.data.BatchSampler that takes sampler, batch_size and drop_last: make it "
            "one, and build its batches from what `sampler` yields"
        )
    if any(frame.filename.endswith(SAMPLER) for frame in extract_tb(error.__traceback__)):
        return (
            "DistributedSampler(data) asks torch.distributed for the ranks: leave it out, as each "
            "rank gets its share by itself, or give it num_replicas=trainer.world_size and "
            "rank=trainer.global_rank"
        )
    if "Original Traceback" in str(error):  # of a loader's worker: its last line says it
        error = type(error)(str(error).strip().splitlines()[-1])
    if ALONE in str(error) and (tasks := slurm_tasks()):
        return of_srun(tasks)
    if ALONE in str(error) and str(error).startswith("torchrun"):
        return (
            "torchrun is for strategy=ddp, with trainer.devices= its processes a host; for "
            "strategy=horovod it is make train, or horovodrun"
        )
    if isinstance(error, MISTAKES):
        return str(error)
    if match := UNREADABLE.fullmatch(str(error)):
        return match[1]
    if NO_LOSS in str(error):
        return "training_step returned None: it has to return the loss, of each batch on each rank"
    if NO_GRADIENT in str(error):
        return (
            "the loss has no gradient: leave out what cuts it off (detach, item, no_grad), and let "
            "a parameter be trained"
        )
    last = extract_tb(error.__traceback__)[-1:]
    if isinstance(error, KeyError) and last and "self.hparams[" in (last[0].line or ""):
        return (
            f"{last[0].filename}, line {last[0].lineno}: the hyperparameters have no {error}: call "
            "self.save_hyperparameters() in __init__, which takes it"
        )
    if match := TOO_LONG.match(str(error)):
        return (
            f"trainer.val_check_interval={match[1]}: a rank has {match[2]} batches an epoch: give "
            "at most that, or count over epochs with trainer.check_val_every_n_epoch=null"
        )
    if match := NO_OUTPUT.match(str(error)):
        return (
            f"a label is {match[1]}, for which the model has no output: labels count from 0 to "
            "model.classes - 1"
        )
    if started:
        return None
    if (package := type(error).__module__.split(".")[0]) in SERVICES:
        return f"logger={package}: {' '.join(str(error).split())}"
    if isinstance(error, RuntimeError) and "loading state_dict" in str(error):
        lines = str(error).splitlines()
        return f"ckpt_path: the checkpoint does not fit the model: {' '.join(lines[1:2])}"
    if isinstance(error, (ValueError, OSError)):
        return f"{error} (HYDRA_FULL_ERROR=1 shows where)"
    return None


def no_metric(metric: str, logged: list[str], callbacks: Any) -> str:
    """That nothing logs it, with all that watch it: each would end a run of its own."""
    watching = [
        f"callbacks.{name}.monitor={metric}"
        for name, member in callbacks.items()
        if isinstance(member, DictConfig) and member.get("monitor") == metric
    ]
    names = [name for name in dict.fromkeys(logged) if name not in ("epoch", "step")]  # Lightning's
    of_loader = f"{metric}/dataloader_idx_0"  # of several, each of which has its own
    # To keep the best by a loss of training is no way out.
    alike = [name for name in names if name.startswith("val") or not metric.startswith("val")]
    close = f" (did you mean {of_loader}?)" if of_loader in names else guess(metric, alike)
    if not close and metric.startswith("val"):
        close = f'; self.log("{metric}", ..., sync_dist=True) in validation_step does'
    return (
        f"{' '.join(watching) or metric}: nothing is logged by this name; there are: "
        f"{', '.join(names) or 'none'}{close}"
    )

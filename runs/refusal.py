"""How a user's mistake ends a run: with one line, printed once, however many ranks made it."""

from __future__ import annotations

import difflib
import os
import sys
import time
from collections.abc import Iterable
from typing import Any

RANK_VARIABLES = ["HOROVOD_RANK", "OMPI_COMM_WORLD_RANK", "PMI_RANK", "RANK", "LOCAL_RANK"]
SIZE_VARIABLES = ["HOROVOD_SIZE", "OMPI_COMM_WORLD_SIZE", "PMI_SIZE", "WORLD_SIZE"]
TELL_SECONDS = 10


class Refusal(Exception):
    """What was wrong, where, and what to do about it, in one line."""


def guess(word: Any, known: Iterable[str]) -> str:
    """What was meant, to put behind a message; empty if no known word is close."""
    names = {name.lower(): name for name in known}
    close = difflib.get_close_matches(str(word).lower(), list(names), n=1)
    return f" (did you mean {names[close[0]]}?)" if close else ""


def guess_metric(metric: str, known: Iterable[str]) -> str:
    """The same of a metric: a loss of training is no replacement for one of validation."""
    return guess(metric, [n for n in known if n.startswith("val") or not metric.startswith("val")])


def launched_rank() -> int:
    """The rank that a launcher gave this process; 0 without one. It is known from the start."""
    names = [*RANK_VARIABLES, "SLURM_PROCID"] if slurm_tasks() else RANK_VARIABLES
    return int(next((os.environ[name] for name in names if name in os.environ), 0))


def launched_size() -> int | None:
    """How many processes a launcher started; None without one."""
    sizes = (int(os.environ[name]) for name in SIZE_VARIABLES if name in os.environ)
    return next(sizes, slurm_tasks())


def slurm_tasks() -> int | None:
    """How many processes `srun` started with this one; None if it is alone."""
    # Not SLURM_NTASKS, which a batch script sees too.
    tasks = int(os.environ.get("SLURM_STEP_NUM_TASKS", 1))
    return tasks if tasks > 1 else None


def of_srun(tasks: int) -> str:
    return (
        f"srun started {tasks} processes, each of which would train alone: sbatch "
        "cluster/slurm/horovod.sbatch, or within a job, without srun, "
        "make train HOSTS=$(.venv/bin/python cluster/slurm/hosts.py)"
    )


def let_rank_0_tell() -> None:
    """On other ranks, wait before an error is printed: mostly rank 0 has the same one, and its end
    ends them meanwhile. Only an error of their own is still theirs to print."""
    if launched_rank() > 0:
        time.sleep(TELL_SECONDS)


def refuse(message: str, a_rank: bool = True) -> None:
    """Print one line and end this process with status 2.

    Args:
        a_rank: False before a launch: a rank in the environment is then another launcher's.
    """
    line = " ".join(message.split())
    rank = launched_rank() if a_rank else 0
    if rank > 0:
        let_rank_0_tell()
        line = f"{line} (rank {rank} on {os.uname().nodename})"
    print(f"error: {line}", file=sys.stderr, flush=True)
    sys.exit(2)

"""How benchmarks configure template.py: the user's overrides, and their own."""

from __future__ import annotations

import subprocess
import sys
from typing import Any

import yaml
from omegaconf import OmegaConf
from omegaconf.errors import OmegaConfBaseException

from benchmarks.launching import MEASURED
from cluster.environment import ROOT
from cluster.hosts import Refusal

# Keys whose values are needed here; they may be written as ${oc.decode:...} or ${another.key}.
COUNTED = (
    "data.batch_size", "trainer.limit_train_batches", "trainer.accumulate_grad_batches",
    "trainer.accelerator", "trainer.max_time", "trainer.overfit_batches", "trainer.fast_dev_run",
)  # fmt: skip


def refuse_ours(arguments: list[str], ours: dict[str, str], command: str) -> None:
    """Raises Refusal for an override of what the command sets itself.

    Args:
        ours: keys that it sets, and for each the variable of make that changes it.
    """
    for argument in arguments:
        key = argument.partition("=")[0].lstrip("+~")
        if key in ours:
            raise Refusal(f"{argument}: {command} sets {key} itself ({ours[key]} changes it)")


def configuration(arguments: list[str], strategies: list[str]) -> dict[str, Any]:
    """The configuration of the job as template.py has it. `COUNTED` keys are resolved; all others
    stay as they are written, so that ${now:} and ${rank:} do not differ from run to run.

    Raises:
        Refusal: for overrides that template.py would refuse.
    """
    for strategy in strategies:
        overrides = [*arguments, *MEASURED, f"strategy={strategy}"]
        _output([sys.executable, "-m", "runs.config", *overrides])
    config = yaml.safe_load(_output([sys.executable, "template.py", *arguments, "--cfg", "job"]))
    unresolved = OmegaConf.create(config)
    for key in COUNTED:
        group, name = key.split(".")
        try:
            if name in (config.get(group) or {}):
                config[group][name] = OmegaConf.select(unresolved, key)
        except OmegaConfBaseException as error:
            raise Refusal(f"{key}: {str(error).splitlines()[0]}") from None
    return config


def batch_size_of(config: dict[str, Any]) -> int:
    """data.batch_size of a configuration.

    Raises:
        Refusal: where it is missing or not a whole number.
    """
    batch = (config.get("data") or {}).get("batch_size")
    if not isinstance(batch, int):
        raise Refusal(
            f"data.batch_size is {'missing' if batch is None else batch}: a whole number is needed "
            "here; write the key in conf/data/, and take it as an argument of the data module"
        )
    return batch


def accumulated(config: dict[str, Any]) -> int:
    """Batches that are accumulated for an update of the weights."""
    return config.get("trainer", {}).get("accumulate_grad_batches") or 1


def steps_of(warmup: int, steps: int) -> list[str]:
    """Overrides for a run of so many batches, however many of them the optimizer accumulates."""
    batches = warmup + steps
    return [
        "trainer.max_epochs=-1",
        # Never reached; schedules need an end, and for the Trainer a batch may be several steps.
        f"trainer.max_steps={100 * batches}",
        f"callbacks.anatomy.batches={batches}",
        f"callbacks.anatomy.warmup={warmup}",
    ]


def _output(command: list[str]) -> str:
    done = subprocess.run(command, cwd=ROOT, capture_output=True, text=True)
    if done.returncode:
        lines = done.stderr.strip().splitlines() or [f"{command[1:3]}: status {done.returncode}"]
        raise Refusal(lines[-1].removeprefix("error: "))
    return done.stdout

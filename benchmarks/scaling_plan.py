"""What benchmarks/scaling.py measures: sizes, jobs, their order and length; and what it refuses."""

from __future__ import annotations

import argparse
import itertools
import subprocess
import sys
from collections import Counter
from typing import Any

import yaml
from omegaconf import OmegaConf
from omegaconf.errors import OmegaConfBaseException

from benchmarks.efficiency import Results, batch_of, steps_per_epoch
from benchmarks.hardware import ROOT, gpus, software
from benchmarks.launching import MEASURED, Job, Launcher, ask
from cluster.hosts import Host, Refusal, chosen, ranks

# Set for the measurement; what a user gives for them would be lost without a word.
OURS = {
    "strategy": "STRATEGY=", "trainer.max_steps": "STEPS=", "trainer.max_epochs": "EPOCHS=",
    "log_dir": "nothing", "run_dir": "nothing", "callbacks.anatomy.warmup": "WARMUP=",
    "callbacks.anatomy.batches": "STEPS=",
    **{setting.partition("=")[0]: "nothing" for setting in MEASURED},
}  # fmt: skip

# What is calculated with; it may be written as ${oc.decode:...} or ${another.key}.
COUNTED = (
    "data.batch_size", "trainer.limit_train_batches", "trainer.accumulate_grad_batches",
    "trainer.accelerator", "trainer.max_time", "trainer.overfit_batches", "trainer.fast_dev_run",
)  # fmt: skip
# End a run, or shorten its epochs, where neither steps nor epochs say so.
SHORTEN = ("max_time", "overfit_batches", "fast_dev_run")


def sizes_of(sizes: list[int] | None, hosts: list[Host] | None) -> list[int]:
    """How many processes; by default 1, 2, 4, ... to all slots; without hosts to all GPUs, or 2."""
    if sizes:
        return sorted(set(sizes))
    slots = sum(host.slots for host in hosts) if hosts else len(gpus()) or 2
    return sorted({2**power for power in range(slots.bit_length())} | {slots})


def jobs(settings: dict[str, Any], oversubscribed: list[int]) -> list[Job]:
    """All that is measured in a repeat; what weak and strong scaling share, once."""
    planned = []
    for mode, strategy, np in itertools.product(
        settings["modes"], settings["strategies"], settings["sizes"]
    ):
        batch = batch_of(mode, settings["batch_size"], np)
        planned.append(Job(strategy, np, batch))
        if np in oversubscribed:
            planned.append(Job("horovod", np, batch, alone=True))
    return list(dict.fromkeys(planned))


def turns(planned: list[Job], repeats: int) -> list[tuple[int, Job]]:
    """All runs in their order: repeats outermost, each beginning with another job."""
    return [
        (repeat, job)
        for repeat in range(repeats)
        for job in planned[repeat % len(planned) :] + planned[: repeat % len(planned)]
    ]


def check(settings: dict[str, Any], config: dict[str, Any]) -> None:
    """Whether settings can be measured as they are asked for.

    Args:
        config: of the job.

    Raises:
        Refusal: when not, before anything has run.
    """
    refuse_ours(settings["arguments"], OURS, "make bench")
    for name in SHORTEN:
        if value := config.get("trainer", {}).get(name):
            raise Refusal(
                f"trainer.{name}={value}: it ends runs or epochs early, whose steps could not be "
                "counted: leave it out; STEPS= or EPOCHS= say how long a run is"
            )
    steps, together = settings["steps"], windows(config)
    if steps and steps % together:
        raise Refusal(
            f"STEPS={steps}: a step is a batch, trainer.accumulate_grad_batches={together} of them "
            f"an update, and whole updates are measured: give STEPS={whole(steps, together)}"
        )
    batch = settings["batch_size"]
    wrong = [str(np) for np in settings["sizes"] if batch % np]
    if "strong" in settings["modes"] and wrong:
        raise Refusal(
            f"MODE={settings['mode']}: data.batch_size={batch} is not divisible by NP="
            f"{' '.join(wrong)}: strong scaling shares it; change one of the two"
        )


def refuse_ours(arguments: list[str], ours: dict[str, str], command: str) -> None:
    """Raises Refusal for an override of what the command sets itself.

    Args:
        ours: what is set, and what changes it.
    """
    for argument in arguments:
        key = argument.partition("=")[0].lstrip("+~")
        if key in ours:
            raise Refusal(f"{argument}: {command} sets {key} itself ({ours[key]} changes it)")


def cores_of_a_rank(hosts: list[Host], facts: dict[str, dict[str, Any]], np: int) -> int:
    """Whole cores for each rank on the fullest machine, 0 where they do not suffice; hosts made of
    one machine share its cores.

    Raises:
        Refusal: when ranks would have to share a GPU.
    """
    machines: Counter[int] = Counter()
    cores = {}
    for name, count in Counter(member.host.name for member in ranks(hosts, np)).items():
        devices = len(facts[name]["gpus"])
        if devices and count > devices:
            raise Refusal(f"NP={np}: {count} ranks on the {devices} GPUs of {name}: take fewer")
        machines[facts[name]["machine"]] += count
        cores[facts[name]["machine"]] = facts[name]["cores"]
    return min(cores[machine] // count for machine, count in machines.items())


def length(results: Results, np: int, batch: int) -> list[str]:
    """Overrides that say how long a run is, and how much of it is warm-up."""
    settings, trial = results["settings"], results["trial"]
    if not settings["epochs"]:
        return steps_of(settings["warmup"], trial["steps"])
    if not trial["train_samples"]:
        raise Refusal(f"EPOCHS={settings['epochs']}: this data set does not tell its size; STEPS=")
    steps = steps_per_epoch(results, np, batch)
    epochs = settings["epochs"] + 1
    return [
        f"trainer.max_epochs={epochs}", "trainer.max_steps=-1", f"callbacks.anatomy.warmup={steps}"
    ]  # fmt: skip


def steps_of(warmup: int, steps: int) -> list[str]:
    """Of a batch each, whatever that is to the optimizer."""
    batches = warmup + steps
    return [
        "trainer.max_epochs=-1",
        # Never reached: schedules ask for an end, and a batch may be several steps to the Trainer.
        f"trainer.max_steps={100 * batches}",
        f"callbacks.anatomy.batches={batches}",
        f"callbacks.anatomy.warmup={warmup}",
    ]


def windows(config: dict[str, Any]) -> int:
    """Batches that are accumulated for a step of the optimizer."""
    return config.get("trainer", {}).get("accumulate_grad_batches") or 1


def whole(steps: int, together: int) -> int:
    """So many or a few more: whole updates, of so many batches together."""
    return -(-steps // together) * together


def configuration(arguments: list[str], strategies: list[str]) -> dict[str, Any]:
    """The whole configuration of the job, as template.py has it: of `COUNTED` the values, all else
    as it is written, which is the same whenever it is read (${now:} and ${rank:} are not).

    Raises:
        Refusal: for overrides that it would refuse.
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
        Refusal: where there is no such number.
    """
    batch = (config.get("data") or {}).get("batch_size")
    if not isinstance(batch, int):
        raise Refusal(
            f"data.batch_size is {'missing' if batch is None else batch}: a whole number is needed "
            "here; write the key in conf/data/, and take it as an argument of the data module"
        )
    return batch


def _output(command: list[str]) -> str:
    done = subprocess.run(command, cwd=ROOT, capture_output=True, text=True)
    if done.returncode:
        lines = done.stderr.strip().splitlines() or [f"{command[1:3]}: status {done.returncode}"]
        raise Refusal(lines[-1].removeprefix("error: "))
    return done.stdout


def plan(arguments: argparse.Namespace) -> tuple[Results, Launcher]:
    """What is to be measured and with what, before anything has run."""
    named = bool(arguments.hosts or arguments.hostfile)
    hosts = chosen(arguments) if named else None
    sizes = sizes_of(arguments.np, hosts)
    hosts = hosts or [Host("localhost", max(1, sizes[-1]))]
    for np in sizes:
        ranks(hosts, np)
    config = configuration(arguments.overrides, arguments.strategy)
    settings = {
        "arguments": arguments.overrides, "mode": arguments.mode, "strategies": arguments.strategy,
        "modes": ["weak", "strong"] if arguments.mode == "both" else [arguments.mode],
        "sizes": sizes, "repeats": arguments.repeats, "steps": arguments.steps,
        "epochs": arguments.epochs, "warmup": whole(arguments.warmup, windows(config)),
        "network": arguments.network,
        "batch_size": batch_size_of(config),
        "hosts": {host.name: {"slots": host.slots, "gpus": host.gpus, "nic": host.nic}
                  for host in hosts},
    }  # fmt: skip
    check(settings, config)
    facts = ask(hosts, "benchmarks.hardware")
    boots = [host.pop("boot") for host in facts.values()]
    on_cpu = config["trainer"]["accelerator"] == "cpu"
    for host, boot in zip(facts.values(), boots):
        host["machine"] = boots.index(boot)
        host["gpus"] = [] if on_cpu else host["gpus"]
    cores = {np: cores_of_a_rank(hosts, facts, np) for np in sizes}
    # The same at each size, so that a rank is the same worker.
    settings["threads"] = max(1, min(cores.values()))
    results = {
        "benchmark": "scaling", **software(), "settings": settings,
        "config": config, "hosts": facts,
        "oversubscribed": [np for np in sizes if cores[np] < 1],
        "trial": None, "finished": False, "runs": [],
    }  # fmt: skip
    where = ["--hostfile", arguments.hostfile] if arguments.hostfile else []
    where = where or ["-H", ",".join(f"{host.name}:{host.slots}" for host in hosts)]
    return results, Launcher(hosts, where, arguments.overrides, settings["threads"])

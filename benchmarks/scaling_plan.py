"""What benchmarks/scaling.py measures: sizes, jobs, their order and length, and what is refused."""

from __future__ import annotations

import argparse
import itertools
import os
from collections import Counter
from typing import Any

from benchmarks.efficiency import Results, batch_of, steps_per_epoch
from benchmarks.hardware import gpus, software
from benchmarks.launching import MEASURED, Job, Launcher, ask
from benchmarks.overrides import (
    accumulated,
    batch_size_of,
    configuration,
    refuse_ours,
    steps_of,
)
from cluster.hostfile import chosen
from cluster.hosts import Host, Refusal
from cluster.ranks import ranks

# Set for the measurement, so refused: what a user gives for them would be ignored silently.
OURS = {
    "strategy": "STRATEGY=", "trainer.max_steps": "STEPS=", "trainer.max_epochs": "EPOCHS=",
    "log_dir": "nothing", "run_dir": "nothing", "callbacks.anatomy.warmup": "WARMUP=",
    "callbacks.anatomy.batches": "STEPS=",
    **{setting.partition("=")[0]: "nothing" for setting in MEASURED},
}  # fmt: skip

# Keys of trainer that end a run or shorten its epochs, whatever number of them is asked for.
SHORTEN = ("max_time", "overfit_batches", "fast_dev_run")


def sizes_of(sizes: list[int] | None, hosts: list[Host] | None) -> list[int]:
    """Numbers of processes; by default 1, 2, 4, ... to all slots (no hosts: GPUs, or 2)."""
    if sizes:
        return sorted(set(sizes))
    slots = sum(host.slots for host in hosts) if hosts else len(gpus()) or 2
    return sorted({2**power for power in range(slots.bit_length())} | {slots})


def jobs(settings: dict[str, Any], oversubscribed: list[int]) -> list[Job]:
    """All that is measured in a repeat; what weak and strong scaling share only once."""
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
    """All runs in their order: repeats outermost, each of which begins with another job."""
    return [
        (repeat, job)
        for repeat in range(repeats)
        for job in planned[repeat % len(planned) :] + planned[: repeat % len(planned)]
    ]


def check(settings: dict[str, Any], config: dict[str, Any]) -> None:
    """Refuse what cannot be measured as asked for, before anything has run.

    Raises:
        Refusal: for settings that do not fit the job's configuration.
    """
    refuse_ours(settings["arguments"], OURS, "make bench")
    for name in SHORTEN:
        if value := config.get("trainer", {}).get(name):
            raise Refusal(
                f"trainer.{name}={value}: it ends runs or epochs early, whose steps could not be "
                "counted: leave it out; STEPS= or EPOCHS= say how long a run is"
            )
    steps, together = settings["steps"], accumulated(config)
    if steps and steps % together:
        raise Refusal(
            f"STEPS={steps}: a step is a batch, trainer.accumulate_grad_batches={together} of them "
            "an update, and whole updates are measured: give "
            f"STEPS={whole_updates(steps, together)}"
        )
    batch = settings["batch_size"]
    wrong = [str(np) for np in settings["sizes"] if batch % np]
    if "strong" in settings["modes"] and wrong:
        raise Refusal(
            f"MODE={settings['mode']}: data.batch_size={batch} is not divisible by NP="
            f"{' '.join(wrong)}: strong scaling shares it; change one of the two"
        )


def cores_of_a_rank(hosts: list[Host], facts: dict[str, dict[str, Any]], np: int) -> int:
    """Whole cores for each rank on the fullest machine, 0 where there are fewer cores than ranks;
    hosts made of one machine share its cores.

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
    """Overrides that set the length of a run and of its warm-up, in steps or in epochs."""
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


def whole_updates(batches: int, together: int) -> int:
    """So many batches, or the few more that make whole updates of `together` batches."""
    return -(-batches // together) * together


def plan(arguments: argparse.Namespace) -> tuple[Results, Launcher]:
    """The results without any run, and what makes the runs."""
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
        "epochs": arguments.epochs,
        "warmup": whole_updates(arguments.warmup, accumulated(config)),
        "network": arguments.network,
        "batch_size": batch_size_of(config),
        "hosts": {host.name: {"slots": host.slots, "gpus": host.gpus, "nic": host.nic}
                  for host in hosts},
    }  # fmt: skip
    check(settings, config)
    facts = ask(hosts, "benchmarks.hardware")
    boots = [host.pop("boot") for host in facts.values()]
    on_cpu = config["trainer"].get("accelerator") == "cpu"
    for host, boot in zip(facts.values(), boots):
        host["machine"] = boots.index(boot)
        host["gpus"] = [] if on_cpu else host["gpus"]
    on_gpus = any(host["gpus"] for host in facts.values())
    cores = {np: cores_of_a_rank(hosts, facts, np) for np in sizes}
    # The same at each size, so that a rank computes equally fast.
    asked = os.environ.get("OMP_NUM_THREADS", "")
    own = int(asked) if asked.isdecimal() else 0
    settings["threads"] = own or max(1, min(cores.values()))
    results = {
        "benchmark": "scaling", **software(), "settings": settings,
        "config": config, "hosts": facts,
        # With GPUs, ranks that train alone would all take the first.
        "oversubscribed": [np for np in sizes if cores[np] < 1 and not on_gpus],
        "trial": None, "finished": False, "runs": [],
    }  # fmt: skip
    where = ["--hostfile", arguments.hostfile] if arguments.hostfile else []
    where = where or ["-H", ",".join(f"{host.name}:{host.slots}" for host in hosts)]
    return results, Launcher(hosts, where, arguments.overrides, settings["threads"])

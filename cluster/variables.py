"""Check the variables that make was given, and say where its processes run.

    python3 -m cluster.variables OVERRIDES LEVEL GOALS        called by the Makefile

make takes any variable without a word: HOST=node1:2, model.lr=0.1, or STEPS=3 for a target that has
no steps. So this looks at them before anything is installed. It prints the arguments that say where
processes run, as `-np 2 -H localhost:2`, or a line that begins with "error: ". Standard library
only.
"""

from __future__ import annotations

import os
import re
import shlex
import subprocess
import sys
from collections.abc import Iterator
from fnmatch import fnmatchcase

from cluster.slurm.hosts import names

WHERE = "NP HOSTS HOSTFILE"
TAKES = {  # each target, beside ANYWHERE; targets of your own are not checked without a line here
    "install": "",
    "train": f"{WHERE} LAUNCHER STOP_SECONDS ARGS",
    "sweep": f"{WHERE} TRIALS METRIC MODE LAUNCHER STOP_SECONDS ARGS",
    "hello": WHERE,
    "doctor": f"{WHERE} JSON",
    "sync": f"{WHERE} ENV DRY",
    "launch": f"{WHERE} AT STOP_SECONDS ARGS",
    "status": "JSON",
    "logs": "RUN RANK FOLLOW",
    "stop": "RUN KILL",
    "profile": f"{WHERE} STEPS ARGS",
    "new": "NAME DIR",
    "test": "ARGS",
    "test-slow": "ARGS",
    "test-gpu": "ARGS",
    "test-mutations": "ARGS",
    "check": "",
    "bench": f"{WHERE} STRATEGY MODE REPEATS STEPS EPOCHS WARMUP NETWORK ARGS",
    "bench-check": "OLD NEW",
    "bench-readme": "",
    "bench-step": "NP HOSTS REPEATS ARGS",
    "bench-step-slow": "REPEATS ARGS",
    "bench-overheads": "NP REPEATS ARGS",
    "bench-allreduce": f"{WHERE} NETWORK ARGS",
    "bench-split": "BATCH STEPS REPEATS ARGS",
    "bench-start": "NP REPEATS ARGS",
    "bench-losses": "NP STEPS ARGS",
    "predict": "NP RUN MODEL ALLREDUCE NETWORK ARGS",
    "predict-proof": "ARGS",
    "export": "CKPT FORMAT",
    "tensorboard": "ARGS",
    "clean": "",
}
TAKEN = {name for takes in TAKES.values() for name in takes.split()}
ANYWHERE = ["PYTHON", "INSTALL", "MPI"]
# What make, the installer and ranks read from the environment; shells that complete set the last.
ENVIRONMENT = [
    "WHEELS", "FORWARD", "PRELOAD", "HOROVOD_*", "NCCL_*", "GLOO_*", "UCX_*", "CUDA_*", "OMP_*",
    "MKL_*", "OPENBLAS_*", "TORCH*", "PYTORCH_*", "PL_*", "HYDRA_*", "PIP_*", "CXX", "SHELL",
    "MAKEFLAGS", "__BASH_MAKE_COMPLETION__",
]  # fmt: skip
START = {target for target, takes in TAKES.items() if "HOSTFILE" in takes} - {"bench"}
OTHERS = {"help", "environment", "dev-environment"}
HOST = r"[A-Za-z0-9._-]+(:[0-9]+)?"
NUMBERS = "[0-9]{1,5}(-[0-9]{1,5})?"
QUOTED = r"""\\.|'[^']*'|"(?:\\.|[^"\\])*\""""  # for a shell
SEVERAL = re.compile(rf"[^\[\]:]*\[{NUMBERS}(,{NUMBERS})*\][^\[\]]*")


def of_command_line(overrides: str) -> dict[str, str]:
    """The variables of make's command line, by its MAKEOVERRIDES, which escape blanks and $."""
    words = re.findall(r"(?:\\.|[^\\ ])+", overrides, re.DOTALL)
    plain = [re.sub(r"\\(.)", r"\1", word, flags=re.DOTALL).replace("$$", "$") for word in words]
    pairs = [text.partition("=") for text in plain]
    return {name.rstrip(":+?!"): value for name, _, value in pairs}


def in_environment() -> dict[str, str]:
    """The variables that make takes from there; others of our names mean other things there."""
    names = [*WHERE.split(), "ARGS"]
    return {name: os.environ[name] for name in names if os.environ.get(name)}


def taken_by(goals: list[str]) -> set[str]:
    """What these targets take together; all, with one that is not ours."""
    if {*goals} - TAKES.keys() - OTHERS:
        return TAKEN
    return {name for goal in goals for name in TAKES.get(goal, "").split()}


def is_known(name: str) -> bool:
    patterns = [*TAKEN, *ANYWHERE, *ENVIRONMENT]
    return any(fnmatchcase(name, pattern) for pattern in patterns)


def mistakes(given: dict[str, str], goals: list[str]) -> Iterator[str]:
    """What is wrong with the variables of the command line, for these targets, a line each."""
    for name, value in given.items():
        if not is_known(name):
            yield (
                f"{name}={value}: no variable of this Makefile, see make help; changes to conf/ go "
                'into ARGS="key=value ...", variables for the environment before make'
            )
    if {"train", "launch", "sweep", "profile"} & {*goals} and "STRATEGY" in given:
        strategy = given["STRATEGY"]
        yield f'STRATEGY={strategy}: it is of make bench; here write ARGS="strategy={strategy}"'
    taken = taken_by(goals)
    for name, value in given.items():
        if name in TAKEN - taken and goals:
            yield f"{name}={value}: make {goals[0]} takes {TAKES.get(goals[0]) or 'nothing'}"

    all_ = {**{name: v for name, v in in_environment().items() if name in taken}, **given}
    for name, value in all_.items():
        if "$" in value.replace("$$", ""):
            yield (
                f'{name} has a $, which make would take: {name}="..." has your shell fill a '
                "variable in; for Hydra, within single quotes, it is '$${seed}'"
            )
    if any(word.endswith(";") for word in all_.get("ARGS", "").split()):
        yield f"ARGS={all_['ARGS']}: write changes with blanks between, not semicolons"
    changes = all_.get("ARGS", "") if {"train", "launch", "profile"} & {*goals} else ""
    if match := re.search(r"[()<>&|]", re.sub(QUOTED, "", changes)):
        yield (
            f"ARGS={all_['ARGS']}: a shell would take its {match[0]}: write such a change within "
            "single quotes too, ARGS=\"'key=f(1)'\"; interval() and choice() are for make sweep"
        )
    np, hosts = all_.get("NP", "1"), all_.get("HOSTS", "localhost")
    if not re.fullmatch(r"( *[1-9][0-9]*)+ *", np):
        yield f"NP={np}: give a number of processes, as NP=2"
    if len(np.split()) > 1 and {*START, "bench-step"} & {*goals}:
        yield f'NP="{np}": give one number of processes; several are for make bench'
    if not all(re.fullmatch(HOST, host) for host in unfolded(hosts)):
        yield f"HOSTS={hosts}: write name:slots, with commas between, as node1:4,node2:4"
    if "bench-step" in goals and {"NP", "HOSTS"} <= all_.keys():
        yield f"NP={np}: HOSTS={hosts} says how many processes make bench-step starts"
    if given.get("LAUNCHER", "mpi") not in ("mpi", ""):
        yield f"LAUNCHER={given['LAUNCHER']}: there is mpi; leave it out for our own"
    if given.get("LAUNCHER") == "mpi" and given.get("STOP_SECONDS"):
        yield f"STOP_SECONDS={given['STOP_SECONDS']}: mpirun gives no time for a checkpoint"
    if "export" in goals and not given.get("CKPT"):
        yield "CKPT=: give a checkpoint, as CKPT=logs/.../checkpoints/last.ckpt"
    if "bench-check" in goals and not (given.get("OLD") and given.get("NEW")):
        old, new = given.get("OLD", ""), given.get("NEW", "")
        yield f"OLD={old} NEW={new}: give two files of benchmarks/results/"


def unfolded(hosts: str) -> list[str]:
    """Each host of a list, in which several may be written as Slurm does: node[1-3,7]:4."""
    found = []
    for host in re.split(r", *(?![^\[]*\])", hosts.strip()):
        several = [*names(host)] if SEVERAL.fullmatch(host) else []
        found += several or [host]  # as it was written, where it is none or [9-1]
    return found


def default_size() -> int:
    """Two processes; one on a host that shows a single GPU, as each process needs its own."""
    try:
        listed = subprocess.run(["nvidia-smi", "-L"], capture_output=True, text=True).stdout
    except OSError:
        return 2
    # Below a GPU are its parts (MIG), of which a process sees one.
    gpus = sum(line.startswith("GPU") for line in listed.splitlines())
    if "CUDA_VISIBLE_DEVICES" in os.environ:
        visible = os.environ["CUDA_VISIBLE_DEVICES"].split(",")
        gpus = min(gpus, sum(bool(name) and not name.startswith("-") for name in visible))
    return 1 if gpus == 1 else 2


def where(given: dict[str, str]) -> str:
    """The arguments that say where processes run, for a shell."""
    np, hosts = given.get("NP"), given.get("HOSTS", "").replace(" ", "")
    if given.get("HOSTFILE"):
        size = f"-np {np} " if np else ""
        also = f" -H {shlex.quote(hosts)}" if hosts else ""  # which is refused there
        return f'{size}--hostfile "{given["HOSTFILE"]}"{also}'
    if not hosts:
        np = np or str(default_size())
        hosts = f"localhost:{np}"
    slots = [int(host.partition(":")[2] or 1) for host in unfolded(hosts)]
    return f"-np {np or sum(slots)} -H {shlex.quote(hosts)}"


def main(overrides: str, level: str, goals: str) -> None:
    given, targets = of_command_line(overrides), goals.split()
    if level != "0":  # a Makefile that calls this one hands on variables of its own
        known = {name for name in given if is_known(name)} - (TAKEN - taken_by(targets))
        given = {name: given[name] for name in known}
    for mistake in mistakes(given, targets):
        print("error:", mistake)
        return
    # Not for others: nvidia-smi takes seconds, or for ever where a driver hangs.
    if {*targets} & START or {*targets} - TAKES.keys() - OTHERS:
        print(where({**in_environment(), **given}))


if __name__ == "__main__":
    main(*sys.argv[1:])

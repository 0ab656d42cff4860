"""The hosts of a Slurm allocation, as HOSTS: `node1:4,node2:4`.

    make train HOSTS=$(.venv/bin/python cluster/slurm/hosts.py)

A node has as many slots as the job has tasks on it (--ntasks-per-node).
"""

from __future__ import annotations

import itertools
import os
import re
import sys
from collections.abc import Iterator, Mapping


def names(nodes: str) -> Iterator[str]:
    """The nodes of a list as Slurm writes it: `gpu[01-02,7],login` is gpu01, gpu02, gpu7, login."""
    for entry in re.findall(r"(?:[^,\[]|\[[^\]]*\])+", nodes):
        parts = re.split(r"\[([^\]]*)\]", entry)  # text and numbers in turn
        choices = [_numbers(part) if index % 2 else [part] for index, part in enumerate(parts)]
        for words in itertools.product(*choices):
            yield "".join(words)


def _numbers(text: str) -> Iterator[str]:
    for part in text.split(","):
        first, _, last = part.partition("-")
        for number in range(int(first), int(last or first) + 1):
            yield str(number).zfill(len(first))


def tasks(counts: str) -> Iterator[int]:
    """The counts of SLURM_TASKS_PER_NODE: `2(x3),1` is 2, 2, 2, 1."""
    for count, times in re.findall(r"(\d+)(?:\(x(\d+)\))?", counts):
        yield from [int(count)] * int(times or 1)


def hosts(environment: Mapping[str, str]) -> str:
    """The allocation that the variables of a batch job describe.

    Raises:
        ValueError: outside of a job, in a heterogeneous one, or when the lists differ in length.
    """
    # The variables describe only its first part, and steps on others need srun --het-group.
    if "SLURM_HET_SIZE" in environment:
        raise ValueError("a heterogeneous job of Slurm: submit one part, without ':' or hetjob")
    try:
        listed = environment["SLURM_JOB_NODELIST"], environment["SLURM_TASKS_PER_NODE"]
        nodes, slots = list(names(listed[0])), list(tasks(listed[1]))
    except KeyError as error:
        raise ValueError(f"{error.args[0]} is not set: run this in a job of Slurm") from None
    if len(nodes) != len(slots) or not nodes:
        raise ValueError(f"{len(nodes)} nodes and tasks for {len(slots)}: {' and '.join(listed)}")
    return ",".join(f"{node}:{count}" for node, count in zip(nodes, slots))


if __name__ == "__main__":
    try:
        print(hosts(os.environ))
    except ValueError as error:
        sys.exit(f"error: {error}")

"""The ranks of a host share their imports: one process makes them, then it is forked.

    python -m cluster.preload script.py arguments ...       by cluster/agent.py; who runs, on stdin

Each rank then runs the script as `python script.py arguments ...` would, in a session of its own,
with its variables and output. A host's processor time and file look-ups for torch and Lightning
are those of one process, however many ranks it has. What the script imports is read from its first
level; what goes wrong with that, each rank tells itself. Ranks import for themselves where a fork
is not as good as a new process: when an import has started a thread or opened a GPU.
"""

from __future__ import annotations

import ast
import builtins
import contextlib
import importlib
import json
import os
import sys
import threading
import time
import types
from pathlib import Path

from cluster.agent import die_with_parent


def imported(source: bytes) -> list[str]:
    """The modules that the first level of a script imports, in its order."""
    found = []
    for statement in ast.parse(source).body:
        if isinstance(statement, ast.Import):
            found += [alias.name for alias in statement.names]
        elif isinstance(statement, ast.ImportFrom) and statement.module:
            found.append(statement.module)
    return found


def can_fork() -> bool:
    torch = sys.modules.get("torch")
    return threading.active_count() == 1 and not (torch and torch.cuda.is_initialized())


def become_rank(outputs: list[int], variables: dict[str, str], parent: int, agent: int) -> None:
    """In the new process: what the agent gives to one that it starts itself."""
    os.setsid()
    for number, descriptor in zip((1, 2), outputs):
        os.dup2(descriptor, number)
    os.environ.update(variables)
    # The agent adopts us when our parent has ended; from then on its end is ours.
    while os.getppid() == parent:
        time.sleep(0.001)
    die_with_parent()
    if os.getppid() != agent:
        os._exit(1)


def run(script: str, source: bytes) -> None:
    """As the interpreter does; returns or raises as the script does."""
    main = types.ModuleType("__main__")
    main.__dict__.update(__file__=script, __builtins__=builtins)
    sys.modules["__main__"] = main
    exec(compile(source, script, "exec"), main.__dict__)


def main() -> None:
    job = json.load(sys.stdin)
    sys.argv = sys.argv[1:]
    script = sys.argv[0]
    source = Path(script).read_bytes()
    sys.path[0] = str(Path(script).resolve().parent)
    pids = os.dup(1)
    os.dup2(2, 1)  # what an import prints
    nothing = os.open(os.devnull, os.O_RDONLY)
    os.dup2(nothing, 0)
    os.close(nothing)
    with contextlib.suppress(Exception):  # each rank comes to it again, and tells
        for name in imported(source):
            importlib.import_module(name)
    for stream in (sys.stdout, sys.stderr):
        stream.flush()  # here, and not in each rank
    forked, parent, agent = can_fork(), os.getpid(), os.getppid()
    outputs = [descriptor for pair in job["outputs"].values() for descriptor in pair]
    for rank, variables in job["ranks"].items():
        pid = os.fork()
        if pid == 0:
            become_rank(job["outputs"][rank], variables, parent, agent)
            for descriptor in [*outputs, pids]:
                os.close(descriptor)
            if not forked:
                os.execv(sys.executable, [sys.executable, *sys.argv])
            return run(script, source)
        os.write(pids, f"{pid} {rank}\n".encode())
    os._exit(0)


if __name__ == "__main__":
    main()

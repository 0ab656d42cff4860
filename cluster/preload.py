"""The ranks of a host share their imports: one process makes them, then it is forked.

    python -m cluster.preload script.py arguments ...       by cluster/agent.py; who runs, on stdin

It is for scripts with a line that begins with MARK. What stands above it is run once; then each
rank runs the whole script as `python script.py arguments ...` would, in a session of its own, with
its variables and output. So a host's processor time and file look-ups for torch and Lightning are
those of one process, however many ranks it has. Above the line there is no rank yet: HOROVOD_RANK
is not set. What goes wrong there, each rank tells itself. Ranks import for themselves where a fork
is not as good as a new process: after a Python thread was started, or CUDA asked for its devices.
"""

from __future__ import annotations

import atexit
import builtins
import contextlib
import ctypes
import functools
import gc
import json
import os
import re
import sys
import threading
import time
import types
import warnings
from pathlib import Path

from cluster.agent import MARK, die_with_parent

PAUSE_HARD = 2  # omp_pause_resource_t of OpenMP 5.0


def run_head(script: str, source: bytes) -> None:
    """What stands above the mark."""
    head = source.partition(b"\n" + MARK)[0]
    gc.disable()  # it walks what imports make again and again, a quarter of their time
    with contextlib.suppress(Exception):  # each rank comes to it again, and tells
        code = compile(head, script, "exec", dont_inherit=True)
        exec(code, {"__name__": "__preload__", "__file__": script})
    freeze()
    gc.enable()
    for stream in (sys.stdout, sys.stderr):
        stream.flush()  # here, and not in each rank
    # A rank would wait for OpenMP threads that only its parent had.
    for library in set(re.findall(r"/\S*libgomp\S*", Path("/proc/self/maps").read_text())):
        with contextlib.suppress(OSError, AttributeError):  # there is none before version 9
            ctypes.CDLL(library).omp_pause_resource_all(PAUSE_HARD)


def freeze() -> None:
    """What there is by now, ranks do not walk: their writes to it would copy its pages."""
    gc.freeze()
    # An extension made with nanobind (triton's, with torch 2.15) tells of what is still frozen at
    # the end as leaked.
    if any(kind.__module__ == "nanobind" for kind in type.__subclasses__(type)):
        atexit.register(gc.unfreeze)


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
    sys.excepthook = functools.partial(tell, script)
    if "numpy.random" in sys.modules:
        sys.modules["numpy.random"].seed()  # Python's own is: not the same numbers on all ranks
    exec(compile(source, script, "exec", dont_inherit=True), main.__dict__)


def tell(
    script: str, kind: type[BaseException], error: BaseException,
    traceback: types.TracebackType | None,
) -> None:  # fmt: skip
    """The traceback from the script on, without us."""
    inner = traceback
    while inner and inner.tb_frame.f_code.co_filename != script:
        inner = inner.tb_next
    if inner or isinstance(error, SyntaxError):  # which has no line that was run
        traceback = inner
    sys.__excepthook__(kind, error.with_traceback(traceback), traceback)


def main() -> None:
    job = json.load(sys.stdin)
    sys.argv = sys.argv[1:]
    script = os.path.join(os.getcwd(), sys.argv[0])  # as the interpreter does for __file__
    source = Path(script).read_bytes()
    sys.path[0] = str(Path(script).resolve().parent)
    for name in ("cluster", "cluster.agent"):  # the script may have a package of that name
        del sys.modules[name]
    pids = os.dup(1)
    os.dup2(2, 1)  # what an import prints
    devnull = os.open(os.devnull, os.O_RDONLY)
    os.dup2(devnull, 0)
    os.close(devnull)
    run_head(script, source)
    threads, parent, agent = threading.active_count(), os.getpid(), os.getppid()
    outputs = [descriptor for pair in job["outputs"].values() for descriptor in pair]
    for rank, variables in job["ranks"].items():
        with warnings.catch_warnings():
            # Python 3.12 counts the threads of NumPy's OpenBLAS, which can be forked.
            warnings.simplefilter("ignore", DeprecationWarning)
            pid = os.fork()
        if pid == 0:
            become_rank(job["outputs"][rank], variables, parent, agent)
            for descriptor in [*outputs, pids]:
                os.close(descriptor)
            torch = sys.modules.get("torch")
            if threads > 1 or (torch and torch.cuda._is_in_bad_fork()):
                os.execv(sys.executable, [sys.executable, *sys.argv])
            return run(script, source)
        os.write(pids, f"{pid} {rank}\n".encode())
    os._exit(0)


if __name__ == "__main__":
    main()

"""The ranks of a host share their imports: one process makes them and is then forked.

    python -m cluster.preload script.py arguments ...   started by cluster/agent.py; ranks on stdin

It is for scripts with a line that begins with MARK. What stands above that line is run once; then
each rank runs the whole script as `python script.py arguments ...` would, in a session of its own,
with its own variables and output. So a host imports torch and Lightning once, however many ranks it
has. Above the line HOROVOD_RANK is not set, as there is no rank yet. Ranks import for themselves
where a fork is not as good as a new process: when the imports failed (a second attempt would meet
what the first has left half made), started a Python thread, or asked CUDA for its devices.
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
import shutil
import sys
import threading
import time
import types
import warnings
from pathlib import Path

from cluster.agent import MARK, die_with_parent

PAUSE_HARD = 2  # omp_pause_resource_t of OpenMP 5.0


def run_head(script: str, source: bytes) -> bool:
    """Run what stands above the mark; whether it came to its end."""
    head = source.partition(b"\n" + MARK)[0]
    gc.disable()  # it takes a quarter of the time of imports, walking again what they have made
    complete = False
    with contextlib.suppress(Exception):  # each rank comes to it again, and reports it
        code = compile(head, script, "exec", dont_inherit=True)
        exec(code, {"__name__": "__preload__", "__file__": script})
        complete = True
    freeze()
    gc.enable()
    for stream in (sys.stdout, sys.stderr):
        stream.flush()  # here, and not in each rank
    # Ends OpenMP's threads: a rank would wait for them, but only its parent has them.
    for library in set(re.findall(rb"/.*libgomp.*", Path("/proc/self/maps").read_bytes())):
        with contextlib.suppress(OSError, AttributeError):  # new in GCC 9
            ctypes.CDLL(os.fsdecode(library)).omp_pause_resource_all(PAUSE_HARD)
    return complete


def freeze() -> None:
    """Keep garbage collection off all objects so far: its writes in each rank would copy pages."""
    gc.freeze()
    # An extension made with nanobind (triton's, with torch 2.15) reports as leaked what is still
    # frozen at the end.
    if any(kind.__module__ == "nanobind" for kind in type.__subclasses__(type)):
        atexit.register(gc.unfreeze)


def become_rank(outputs: list[int], variables: dict[str, str], parent: int, agent: int) -> None:
    """In the new process: get all that the agent gives to a rank that it starts itself."""
    os.setsid()
    for number, descriptor in zip((1, 2), outputs):
        os.dup2(descriptor, number)
    os.environ.update(variables)
    # The agent adopts us when our parent has ended; from then on we die with the agent.
    while os.getppid() == parent:
        time.sleep(0.001)
    die_with_parent()
    if os.getppid() != agent:
        os._exit(1)


def run(script: str, source: bytes) -> None:
    """Run the script as the interpreter would; returns or raises as the script does."""
    main = types.ModuleType("__main__")
    main.__dict__.update(__file__=script, __builtins__=builtins)
    sys.modules["__main__"] = main
    sys.excepthook = functools.partial(tell, script)
    if "numpy.random" in sys.modules:
        # Else all ranks draw the same numbers; Python seeds its own generator anew after a fork.
        sys.modules["numpy.random"].seed()
    exec(compile(source, script, "exec", dont_inherit=True), main.__dict__)


def tell(
    script: str, kind: type[BaseException], error: BaseException,
    traceback: types.TracebackType | None,
) -> None:  # fmt: skip
    """Print the traceback from the script on, without ours."""
    inner = traceback
    while inner and inner.tb_frame.f_code.co_filename != script:
        inner = inner.tb_next
    if inner or isinstance(error, SyntaxError):  # of the script itself: no line of it was run
        traceback = inner
    sys.__excepthook__(kind, error.with_traceback(traceback), traceback)


def main() -> None:
    job = json.load(sys.stdin)
    sys.argv = sys.argv[1:]
    script = os.path.join(os.getcwd(), sys.argv[0])  # as the interpreter does for __file__
    source = Path(script).read_bytes()
    sys.path[0] = str(Path(script).resolve().parent)
    for name in [name for name in sys.modules if name.partition(".")[0] == "cluster"]:
        del sys.modules[name]  # the script may have such a package
    pids = os.dup(1)
    os.dup2(2, 1)  # for what an import prints
    devnull = os.open(os.devnull, os.O_RDONLY)
    os.dup2(devnull, 0)
    os.close(devnull)
    complete = run_head(script, source)
    threads, parent, agent = threading.active_count(), os.getpid(), os.getppid()
    outputs = [descriptor for pair in job["outputs"].values() for descriptor in pair]
    for number, (rank, variables) in enumerate(job["ranks"].items()):
        with warnings.catch_warnings():
            # Python 3.12 warns of threads of NumPy's OpenBLAS, with which a fork is safe.
            warnings.simplefilter("ignore", DeprecationWarning)
            pid = os.fork()
        if pid == 0:
            become_rank(job["outputs"][rank], variables, parent, agent)
            for descriptor in [*outputs, pids]:
                os.close(descriptor)
            torch = sys.modules.get("torch")
            if not complete or threads > 1 or (torch and torch.cuda._is_in_bad_fork()):
                os.execv(sys.executable, [sys.executable, *sys.argv])
            if number:  # one removes what imports made for their time, as matplotlib may
                atexit.unregister(shutil.rmtree)
            return run(script, source)
        os.write(pids, f"{pid} {rank}\n".encode())
    os._exit(0)


if __name__ == "__main__":
    main()

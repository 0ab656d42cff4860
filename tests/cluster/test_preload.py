"""Ranks that share their imports are as ranks that do not: in what they see and how they end."""

from __future__ import annotations

import os
import shutil
import signal
import subprocess
import time
from collections.abc import Iterator
from pathlib import Path

import pytest
import torch

from cluster.agent import shares_imports
from tests.cluster.conftest import PYTHON
from tests.cluster.launching import told
from tests.conftest import ROOT, run, wait_until

RENDEZVOUS = ("HOROVOD_GLOO_RENDEZVOUS_ADDR", "HOROVOD_GLOO_RENDEZVOUS_PORT")  # each job's own
COUNTS = """\
from pathlib import Path
with open(Path(__file__).with_name("log"), "a") as log:
    log.write("x")
"""
SLEEPS = COUNTS + "import time; time.sleep(600)\n"
OPENMP = (  # from a folder whose name has a blank
    COUNTS
    + """\
import ctypes
library = ctypes.CDLL(str(Path(__file__).with_name("a b") / "libgomp.so"))
function = ctypes.CFUNCTYPE(None, ctypes.c_void_p)(lambda _: None)
def compute():
    library.GOMP_parallel(function, None, 2, 0)
compute()
"""
)
THREAD = COUNTS + "import threading, time; threading.Thread(target=time.sleep, args=[3]).start()\n"
FORKS = (
    COUNTS
    + """\
import os, subprocess, time
left = subprocess.check_output("sleep .1 >&2 & echo $!", shell=True, text=True).strip()
while os.path.exists(f"/proc/{left}"):
    time.sleep(0.02)
if os.fork() == 0:
    time.sleep(100)
    os._exit(0)
"""
)
SCRIPT = """\
import gc, json, multiprocessing, os, sys
import planted
# preload: these

def noted(number: int):
    pass

def child():
    return __name__

def tell():
    with multiprocessing.get_context("spawn").Pool(1) as pool:
        name = pool.apply(child)
    ignored = [line for line in open("/proc/self/status") if line.startswith("SigIgn")]
    return {
        "rank": int(os.environ["HOROVOD_RANK"]), "environment": dict(os.environ), "child": name,
        "argv": sys.argv, "file": __file__, "path": sys.path[0], "name": __name__,
        "stdin": sys.stdin.read(), "files": sorted(os.listdir("/proc/self/fd")),
        "noted": str(noted.__annotations__), "ignored": ignored,
        "leads": os.getsid(0) == os.getpid(), "collects": gc.isenabled(),
    }

if __name__ == "__main__":
    print(json.dumps(tell()))
    print("error of", os.environ["HOROVOD_RANK"], file=sys.stderr)
"""


@pytest.fixture
def script(tmp_path: Path) -> Iterator[Path]:
    """A script that imports a planted module; nothing of it may be left."""
    (tmp_path / "planted.py").write_text(COUNTS)
    (tmp_path / "script.py").write_text(SCRIPT)
    yield tmp_path / "script.py"
    nothing_is_left(tmp_path / "script.py")


def running(script: Path) -> dict[int, int]:
    """Processes that run it, without the launcher: their parents."""
    found = {}
    for entry in Path("/proc").glob("[0-9]*"):
        try:
            words = (entry / "cmdline").read_bytes().decode(errors="replace").split("\0")
            state, parent, *_ = (entry / "stat").read_text().rpartition(")")[2].split()
        except OSError:
            continue
        if str(script) in words and "cluster.horovodrun" not in words and state not in "ZX":
            found[int(entry.name)] = int(parent)
    return found


def nothing_is_left(script: Path) -> None:
    wait_until(lambda: not running(script), 30, "the end of all processes")


def launched(script: Path, ranks: int = 3) -> list[str]:
    where = ["-np", str(ranks), "-H", f"localhost:{ranks}"]
    return [PYTHON, "-m", "cluster.horovodrun", *where, PYTHON, str(script), "a=1", "b"]


def imports(script: Path) -> int:
    """Processes that imported the planted module."""
    log = script.with_name("log")
    count = len(log.read_text()) if log.exists() else 0
    log.unlink(missing_ok=True)
    return count


def test_a_rank_sees_what_it_would_see_alone(script: Path) -> None:
    seen = []
    for preload, count in (("1", 1), ("0", 3)):
        done = run(launched(script), PRELOAD=preload)
        assert done.returncode == 0, done.stdout
        assert imports(script) == count + 3  # of those that ranks spawn, each for itself
        ranks = told(done.stdout)
        assert [rank["rank"] for rank in ranks] == [0, 1, 2]
        for rank in ranks:
            assert rank["leads"] and rank["child"] == "__mp_main__"
            (ignored,) = rank["ignored"]
            assert not int(ignored.split()[1], 16) & 0b11  # SIGHUP and SIGINT, unlike the agent
            assert f"[{rank['rank']}]<stderr>:error of {rank['rank']}\n" in done.stdout
            for name in ("PRELOAD", *RENDEZVOUS):
                del rank["environment"][name]
        seen.append(ranks)
    assert seen[0] == seen[1]


def test_a_relative_path_becomes_absolute_as_without(script: Path, tmp_path: Path) -> None:
    """And modules are found beside a script, not beside a link to it."""
    (tmp_path / "links").mkdir()
    (tmp_path / "links" / "script.py").symlink_to(script)
    relative = os.path.relpath(tmp_path / "links" / "script.py", ROOT)
    command = [relative if word == str(script) else word for word in launched(script)]
    seen = [told(run(command, PRELOAD=preload).stdout) for preload in ("1", "0")]
    assert [len(ranks) for ranks in seen] == [3, 3] and imports(script) == (1 + 3) + (3 + 3)
    for one, other in zip(*seen):
        for what in ("file", "argv", "path"):
            assert one[what] == other[what]
        assert os.path.isabs(one["file"]) and not os.path.isabs(one["argv"][0])


def test_after_a_thread_ranks_import_for_themselves(script: Path) -> None:
    script.with_name("planted.py").write_text(THREAD)
    done = run(launched(script))
    assert done.returncode == 0, done.stdout
    assert imports(script) == 1 + 3 + 3
    assert [rank["rank"] for rank in told(done.stdout)] == [0, 1, 2]


def test_our_scripts_have_the_mark() -> None:
    for script in ("template.py", "benchmarks/overheads_worker.py"):
        assert shares_imports([PYTHON, str(ROOT / script)])


def test_scripts_without_the_mark_import_for_themselves(script: Path) -> None:
    script.write_text(SCRIPT.replace("# preload", "# not preload"))
    assert run(launched(script)).returncode == 0
    assert imports(script) == 3 + 3


def test_ranks_compute_with_openmp_after_an_import_that_did(script: Path) -> None:
    """Its threads are its parent's: a rank would wait for them, for ever."""
    (library,) = Path(torch.__file__).parent.glob("lib/libgomp*")
    (script.parent / "a b").mkdir()
    shutil.copy(library, script.parent / "a b" / "libgomp.so")
    (script.parent / "planted.py").write_text(OPENMP)
    script.write_text("import planted\n# preload: it\nplanted.compute()\nprint('computed')\n")
    done = run(launched(script), timeout=60)
    assert done.stdout.count("computed") == 3 and imports(script) == 1


def test_what_an_import_forks_keeps_nobody_waiting(script: Path) -> None:
    """It holds the pipes of the process that forks the ranks. And what it left behind, which ends
    as a child of the agent, is not that process."""
    script.with_name("planted.py").write_text(FORKS)
    script.write_text("import planted\n# preload: it\nprint('here', flush=True)\n")
    done = run(launched(script), timeout=60)  # before what was forked ends by itself
    assert imports(script) == 1
    assert done.returncode == 0 and done.stdout.count(">:here\n") == 3, done.stdout


def test_the_head_is_run_in_its_order_and_with_the_hosts_variables(
    script: Path, tmp_path: Path
) -> None:
    """A package of the script's may be called as ours; numbers drawn differ between ranks."""
    (tmp_path / "cluster").mkdir()
    (tmp_path / "cluster" / "__init__.py").write_text("import os; SEEN = os.environ['SET']")
    for module in ("gpus", "probe", "agent"):
        (tmp_path / "cluster" / f"{module}.py").write_text(f"MINE = {module!r}")
    prints = "import os, sys\nsys.stdout = open(1, 'w', closefd=False)\nprint('told once')\n"
    (tmp_path / "planted.py").write_text(prints + "COLOR = os.environ['COLOR']\n" + COUNTS)
    script.write_text(
        "import os\nos.environ['SET'] = 'before'\nimport numpy, torch\nimport cluster, planted\n"
        "torch.ones(2**23).sum()\n# preload: all that\n"
        "from cluster import agent, gpus, probe\nprint(agent.MINE, gpus.MINE, probe.MINE)\n"
        "print([cluster.SEEN, planted.COLOR, torch.ones(2**23).sum().item()], flush=True)\n"
        "print('drawn', numpy.random.rand(), flush=True)\nraise SystemError('planted')\n"
    )
    (tmp_path / "hosts.yaml").write_text("hosts: {localhost: {slots: 2, env: {COLOR: red}}}")
    where = ["--hostfile", str(tmp_path / "hosts.yaml")]
    command = [PYTHON, "-m", "cluster.horovodrun", *where, PYTHON, str(script)]
    done = run(command, timeout=60, OMP_NUM_THREADS="2")
    assert imports(script) == 1
    assert done.stdout.count("['before', 'red', 8388608.0]") == 2, done.stdout
    assert done.stdout.count("agent gpus probe\n") == 2, done.stdout
    assert done.stdout.count("told once\n") == 1, done.stdout  # not what is left in a buffer
    assert len({line.split(">:")[1] for line in done.stdout.splitlines() if "drawn" in line}) == 2
    assert "SystemError: planted" in done.stdout
    assert "preload.py" not in done.stdout and "runpy" not in done.stdout  # no frames of ours


def test_ranks_take_back_at_the_end_what_nanobind_would_call_leaked(script: Path) -> None:
    """And nothing else, which would take them a second."""
    script.write_text("import planted\n# preload: it\n")
    frozen = "import atexit, gc\natexit.register(lambda: print('frozen', gc.get_freeze_count()))\n"
    for kind, left in (("nanobind", False), ("other", True)):
        planted = f"class Kind(type):\n    __module__ = {kind!r}\n"
        script.with_name("planted.py").write_text(COUNTS + frozen + planted)
        done = run(launched(script, 2))
        assert imports(script) == 1 and done.returncode == 0, done.stdout
        counts = [int(line.split()[1]) for line in done.stdout.splitlines() if "frozen" in line]
        assert [count > 1000 for count in counts] == [left] * 2, done.stdout


def test_a_mistake_in_an_import_is_told_by_ranks(script: Path) -> None:
    script.with_name("planted.py").write_text("import no_such_module\n")
    done = run(launched(script, 2))
    assert done.returncode == 1
    assert "No module named 'no_such_module'" in done.stdout
    assert "horovodrun: rank " in done.stdout and "ended with exit code 1" in done.stdout


def test_imports_that_failed_are_made_anew_by_each_rank(script: Path) -> None:
    """What they left half made may fail otherwise the second time."""
    once = "import sys\nassert not hasattr(sys, 'planted'), 'made before'\nsys.planted = True\n"
    script.with_name("planted.py").write_text(once + "raise KeyError('the cause')\n")
    done = run(launched(script, 2))
    assert done.returncode == 1 and "made before" not in done.stdout, done.stdout
    assert "KeyError: 'the cause'" in done.stdout


def test_a_folder_for_the_time_of_the_imports_is_removed_once(script: Path, tmp_path: Path) -> None:
    """As that of matplotlib, where HOME cannot be written."""
    (tmp_path / "theirs").mkdir()
    removes = f"import atexit, shutil\natexit.register(shutil.rmtree, {str(tmp_path / 'theirs')!r})"
    script.with_name("planted.py").write_text(f"{COUNTS}{removes}\n")
    script.write_text("import planted\n# preload: it\n")
    done = run(launched(script))
    assert imports(script) == 1 and done.returncode == 0, done.stdout
    assert not (tmp_path / "theirs").exists() and "FileNotFoundError" not in done.stdout


def test_a_mistake_in_the_script_is_told_without_frames_of_ours(script: Path) -> None:
    script.write_text("import planted\n# preload: it\nthis is no Python\n")
    done = run(launched(script, 2))
    assert done.returncode == 1 and "SyntaxError" in done.stdout
    assert "preload.py" not in done.stdout and "runpy" not in done.stdout, done.stdout


def test_a_rank_that_ends_is_told(script: Path) -> None:
    script.write_text(
        "import os, planted\n# preload: it\nraise SystemExit(7 * int(os.environ['HOROVOD_RANK']))\n"
    )
    done = run(launched(script, 2))
    assert imports(script) == 1
    assert done.returncode == 7
    assert "horovodrun: rank 1 on localhost ended with exit code 7" in done.stdout


def begun(script: Path, log: Path, ready: str, count: int) -> subprocess.Popen:
    """The launcher, once what it started has come so far."""
    with open(log, "w") as file:
        process = subprocess.Popen(
            launched(script, 2), cwd=ROOT, stdout=file, stderr=file, start_new_session=True
        )
    deadline = time.monotonic() + 30
    seen = script.with_name("log")
    while (seen.read_text() if seen.exists() else "").count(ready) < count:
        assert process.poll() is None and time.monotonic() < deadline, log.read_text()
        time.sleep(0.05)
    return process


def test_the_rank_to_blame_is_told_though_another_ended_before_it(tmp_path: Path) -> None:
    """As a rank does that waits for one that has raised, and is still writing its traceback."""
    code = (
        "import os, pathlib, sys, time\n"
        f"there = pathlib.Path({str(tmp_path / 'there')!r})\n"
        "if os.environ['HOROVOD_RANK'] == '1':\n"
        "    there.touch(); time.sleep(0.3); sys.exit(3)\n"
        "while not there.exists(): time.sleep(0.01)\n"
        "sys.exit(os.EX_TEMPFAIL)\n"
    )
    launcher = [PYTHON, "-m", "cluster.horovodrun", "-np", "2", "-H", "localhost:2"]
    done = run([*launcher, PYTHON, "-c", code])
    assert done.returncode == 3, done.stdout
    assert done.stdout.splitlines()[-1] == "horovodrun: rank 1 on localhost ended with exit code 3"


def test_a_rank_that_left_the_others_without_an_error_is_named() -> None:
    code = (
        "import horovod.torch as hvd, sys, torch; hvd.init(); "
        "hvd.rank() or sys.exit(); hvd.allreduce(torch.ones(1), name='sum')"
    )
    launcher = [PYTHON, "-m", "cluster.horovodrun", "-np", "2", "-H", "localhost:2"]
    done = run([*launcher, PYTHON, "-c", code])
    assert done.returncode == 1 and done.stdout.splitlines()[-1] == (
        "horovodrun: rank 1 on localhost ended with exit code 1; rank 0 on localhost ended without "
        "an error"
    )


def test_killed_or_told_to_stop_within_the_imports(script: Path, tmp_path: Path) -> None:
    script.with_name("planted.py").write_text(SLEEPS)
    process = begun(script, tmp_path / "out", "x", 1)
    (preloading,) = running(script)
    os.kill(preloading, signal.SIGKILL)
    assert process.wait(20) == 128 + signal.SIGKILL
    assert "was killed by SIGKILL" in (tmp_path / "out").read_text()

    imports(script)
    process = begun(script, tmp_path / "out", "x", 1)
    process.send_signal(signal.SIGTERM)
    assert process.wait(20) == 128 + signal.SIGTERM
    assert "horovodrun: stopped by SIGTERM" in (tmp_path / "out").read_text()


def test_ranks_end_with_their_agent(script: Path, tmp_path: Path) -> None:
    """They are its children by adoption."""
    log = f"open({str(tmp_path / 'log')!r}, 'a').write('r')"
    script.write_text(f"import planted\n# preload: it\n{log}\n{SLEEPS}")
    process = begun(script, tmp_path / "out", "r", 2)
    agents = set(running(script).values())
    assert len(agents) == 1
    os.kill(agents.pop(), signal.SIGKILL)
    assert process.wait(20) != 0
    nothing_is_left(script)

"""make takes the variables that a target uses, and refuses all others before it installs."""

from __future__ import annotations

import re
import sys
from collections.abc import Callable
from pathlib import Path

import pytest

from cluster.variables import TAKEN, TAKES, mistakes, where
from tests.conftest import ROOT, run


def test_make_leaves_out_variables_that_mean_other_things() -> None:
    done = run(["make", "--eval=probe:;@env", "probe", f"PYTHON={sys.executable}"], RANK="0")
    assert done.returncode == 0 and "RANK=" not in done.stdout
    # As a site's module or another build may set.
    theirs = {"MPI": "openmpi", "FOLLOW": "1", "PYTHON": "/nothing"}
    commands = run(["make", "-n", "install", "logs"], **theirs).stdout
    assert not re.search("--mpi|--follow|/nothing", commands) and ".venv/bin/python" in commands
    assert "--mpi" in run(["make", "-n", "install", "MPI=1"], **theirs).stdout


@pytest.mark.parametrize("where", [["make", "HOSTS=a:1, b:2"], ["env", "HOSTS=a:1, b:2", "make"]])
def test_make_takes_hosts_with_blanks_between(where: list[str]) -> None:
    done = run([*where, "-n", "hello"])
    assert done.returncode == 0 and " -np 3 -H a:1,b:2 " in done.stdout, done.stdout


def test_make_takes_hosts_as_slurm_lists_them() -> None:
    """And keeps the shell from reading a pattern of file names."""
    done = run(["make", "-n", "hello", "HOSTS=node[1-3,7]:2"])
    assert done.returncode == 0 and " -np 8 -H 'node[1-3,7]:2' " in done.stdout, done.stdout
    done = run(["make", "-n", "hello", "HOSTS=node[3-1]:2"])
    assert done.returncode == 2 and "HOSTS=node[3-1]:2: write name:slots" in done.stdout


def test_a_host_file_comes_with_all_else_that_was_given() -> None:
    """Hosts beside it too, for the launcher to refuse."""
    assert where({"HOSTFILE": "my hosts.yaml", "NP": "3"}) == '-np 3 --hostfile "my hosts.yaml"'
    assert where({"HOSTFILE": "x.yaml", "HOSTS": "a:1"}) == '--hostfile "x.yaml" -H a:1'


def test_what_surrounds_make_test_is_kept_from_tests(tmp_path: Path) -> None:
    """A hook's repository, a git that signs, an allocation, variables of make and Hydra."""
    outside = {"GIT_CONFIG_KEY_0": "commit.gpgsign", "GIT_DIR": "a", "GIT_WORK_TREE": "a"}
    outside |= {"SLURM_JOB_ID": "1", "SLURM_STEP_NUM_TASKS": "2", "HYDRA_FULL_ERROR": "1"}
    outside |= {"HOSTS": "a:2", "PYTHON": "/nothing", "MAKEFLAGS": "n", "LC_ALL": "de_DE.UTF-8"}
    (tmp_path / "test_it.py").write_text("import os\ndef test_it(): print(*os.environ.items())")
    plugin = ["-p", "tests.conftest", "-s", str(tmp_path / "test_it.py")]
    done = run([sys.executable, "-m", "pytest", *plugin], **outside)
    assert done.returncode == 0 and "('LC_ALL', 'C.UTF-8')" in done.stdout, done.stdout
    assert not [pair for pair in outside.items() if str(pair) in done.stdout], done.stdout


def test_targets_of_a_fork_start_where_they_are_told() -> None:
    mine = ["make", "-n", "--eval=mine: ; @echo $(WHERE)", "mine", "HOSTS=a:2,b:2 "]
    assert "echo -np 4 -H a:2,b:2\n" in run(mine).stdout
    done = run(["make", "-n", "--eval=all: hello", "all", "NP=3", "INSTALL=true"])
    assert " -np 3 -H localhost:3 " in done.stdout, done.stdout


@pytest.mark.parametrize("runs", ["python3.11", None])
def test_make_takes_the_first_python_that_is_new_enough(
    runs: str | None, fake: Callable, tmp_path: Path
) -> None:
    """A login node's python3 may be 3.6, which cannot even read the code."""
    for name in ("python3", "python3.13", "python3.12", "python3.11", "python3.10"):
        line = f'exec {sys.executable} "$@"' if name == runs else "exit 1"
        fake(name, line)
    makefile = ["-f", f"{ROOT}/Makefile"]
    done = run(["make", "-n", *makefile, "train", "new"], cwd=tmp_path, PYTHONPATH=str(ROOT))
    if runs:
        assert f"\n{runs} new.py" in done.stdout and "-np 2 -H" in done.stdout, done.stdout
        assert done.stdout.startswith(f"{runs} -m cluster.install \n"), done.stdout
    else:
        assert done.returncode == 2 and "no Python of 3.9 or newer runs here" in done.stdout


def test_make_leaves_a_python_that_is_not_there_to_the_installer() -> None:
    done = run(["make", "hello", "PYTHON=/nothing"])
    assert done.returncode == 2
    assert done.stdout.startswith("install: PYTHON=/nothing: No such file"), done.stdout


def test_make_takes_a_checkpoint_with_blanks() -> None:
    done = run(["make", "-n", "export", "CKPT=my logs/last.ckpt", "INSTALL=true"])
    assert ' -m runs.export  "my logs/last.ckpt"\n' in done.stdout, done.stdout


@pytest.mark.parametrize("target", ["train", "sweep"])
def test_make_takes_arguments_on_several_lines(target: str) -> None:
    probe = ["--eval=probe:;@env", "probe"] if target == "sweep" else ["-n", "train"]
    done = run(["make", *probe, "ARGS=seed=1\nmodel.lr=2\n"])
    match = re.search("^ARGS=.*" if target == "sweep" else r"exec .* seed=.*", done.stdout, re.M)
    assert match and match[0].endswith("seed=1 model.lr=2 "), done.stdout


def test_make_takes_0_for_no() -> None:
    for value, flags in (("0", 0), ("1", 2)):
        asked = [f"{name}={value}" for name in ("ENV", "DRY")]
        done = run(["make", "-n", "sync", *asked, "HOSTFILE=my hosts.yaml"])
        assert done.stdout.count(" --env") + done.stdout.count(" --dry-run") == flags
        assert ' --hostfile "my hosts.yaml" ' in done.stdout


@pytest.mark.parametrize(
    ("gpus", "parts", "visible", "ranks"),
    [
        (0, 0, None, 2), (1, 0, None, 1), (4, 0, None, 2), (4, 0, "1", 1), (4, 0, "0,1", 2),
        (4, 0, "", 2), (1, 2, None, 1), (4, 7, "1", 1), (4, 0, "-1", 2),
        (1, 0, "0,1", 1),
    ],
)  # fmt: skip
def test_make_takes_a_rank_a_gpu(
    gpus: int, parts: int, visible: str | None, ranks: int, fake: Callable, tmp_path: Path
) -> None:
    mig = "echo '  MIG 1g.5gb Device 0: (UUID: MIG-GPU-1/1/0)'\n" * parts
    smi = "".join(f"echo GPU {number}\n{mig}" for number in range(gpus))
    fake("nvidia-smi", f"echo asked >> {tmp_path}/log\n{smi}")
    command = ["env", "-u", "CUDA_VISIBLE_DEVICES"]
    command += [] if visible is None else [f"CUDA_VISIBLE_DEVICES={visible}"]
    done = run([*command, "make", "-n", "hello"])
    assert f" -np {ranks} -H localhost:{ranks} " in done.stdout, done.stdout
    assert (tmp_path / "log").read_text().split() == ["asked"]  # it can take a second


def test_make_asks_for_gpus_only_where_ranks_start(fake: Callable, tmp_path: Path) -> None:
    """Which hangs where a driver does."""
    fake("nvidia-smi", f"touch {tmp_path}/asked")
    for goal, asks in (("stop", False), ("help", False), ("hello", True)):
        assert run(["make", "-n", goal]).returncode == 0
        assert (tmp_path / "asked").exists() == asks


@pytest.mark.parametrize("target", ["status", "logs", "stop"])
def test_where_nothing_is_installed_it_is_told(target: str) -> None:
    """As in a fresh clone; these make no environment."""
    done = run(["make", target, "PYTHON=.missing/bin/python"])
    assert done.returncode == 2 and "cluster.jobs" not in done.stdout
    assert "error: .missing/bin/python: nothing is installed; make install does it\n" in done.stdout


def test_make_lets_be_what_is_no_mistake() -> None:
    """What make itself, the installer, or a shell that completes sets; another Makefile's."""
    for variable in (
        "CXX=ccache g++",
        "MAKEFLAGS=",
        "__BASH_MAKE_COMPLETION__=1",
        "UCX_TLS=tcp",
    ):
        done = run(["make", "-n", "hello", variable])
        assert done.returncode == 0 and "cluster.exchange" in done.stdout, done.stdout
    for handed_on in ("VERBOSE=1", "ENV=prod"):
        assert run(["make", "-n", "hello", handed_on], MAKELEVEL="1").returncode == 0
    assert "show this" in run(["make", "NP=2"]).stdout
    assert run(["make", "-n", "check"], HOSTS="/etc/hosts", NP="many").returncode == 0
    assert run(["make", "-n", "hello", "INSTALL=true"], NP="").returncode == 0
    assert run(["make", "-n", "hello", "VERBOSE=1"]).returncode == 2


def uses(text: str) -> set[str]:
    """The variables for its caller that a text of the Makefile uses, itself or by others."""
    content = (ROOT / "Makefile").read_text()
    found = set()
    for name in re.findall(r"\$\(([A-Z_]+)\)|\$\$([A-Z_]+)", text):
        name = "".join(name)
        if name == "WHERE":
            found |= {"NP", "HOSTS", "HOSTFILE"}
        elif name in TAKEN:
            found.add(name)
        elif made := re.search(rf"^{name} = (.*)", content, re.M):  # JOB, STOP
            found |= uses(made[1])
    return found


RECIPES = dict(
    re.findall(r"^([a-z-]+):.*##.*\n((?:\t.*\n)+)", (ROOT / "Makefile").read_text(), re.MULTILINE)
)


@pytest.mark.parametrize("target", RECIPES)
def test_what_a_target_takes_is_what_its_recipe_uses(target: str) -> None:
    assert uses(RECIPES[target]) == {*TAKES.get(target, "").split()}


@pytest.mark.parametrize(
    ("target", "message"),
    [
        (["doctor", "HOSTS=a:1;true"], "HOSTS=a:1;true: write name:slots, with commas"),
        (["bench", "NP=2 0"], "NP=2 0: give a number of processes"),
        (["train", "model.lr=0.1"], "model.lr=0.1: no variable of this Makefile, see make"),
        (["export"], "CKPT=: give a checkpoint"),
        (["bench-readme", "RUN=a"], "RUN=a: make bench-readme takes nothing"),
        (["train", "ARGS=data_dir=$HOME/x"], "ARGS has a $, which make would take"),
        (
            ["train", "ARGS=model.lr=interval(1,2)"],
            "interval(1,2): a shell would take its (: write",
        ),
    ],
)
def test_make_says_what_it_lacks(target: list[str], message: str) -> None:
    done = run(["make", *target, "INSTALL=echo installs"])
    assert done.returncode == 2 and message in done.stdout, done.stdout
    assert "usage" not in done.stdout and "installs" not in done.stdout


@pytest.mark.parametrize(
    ("target", "given", "message"),
    [
        ("train", ["NP="], "NP=: give a number of processes"),
        ("train", ["HOSTS=a:2 b:2"], "HOSTS=a:2 b:2: write name:slots, with commas between"),
        ("train", ["HOSTS="], "HOSTS=: write name:slots"),
        ("train", ["NP=two"], "NP=two: give a number of processes"),
        ("sync", ["DRY_RUN=1"], "DRY_RUN=1: no variable of this Makefile"),
        ("doctor", ["HOST=node1:2"], "HOST=node1:2: no variable of this Makefile"),
        ("train", ["np=4"], "np=4: no variable of this Makefile"),
        ("launch", ["STRATEGY=ddp"], 'here write ARGS="strategy=ddp"'),
        ("train", ["LAUNCHER=openmpi"], "LAUNCHER=openmpi: there is mpi"),
        ("train", ["LAUNCHER=mpi", "STOP_SECONDS=9"], "STOP_SECONDS=9: mpirun gives no time"),
        ("launch", ["LAUNCHER=mpi"], "LAUNCHER=mpi: make launch takes NP HOSTS HOSTFILE AT"),
        ("bench-step", ["NP=2", "HOSTS=a:2"], "NP=2: HOSTS=a:2 says how many processes"),
        ("bench-step", ["NP=2 1"], 'NP="2 1": give one number of processes'),
        ("bench-check", ["OLD=a"], "OLD=a NEW=: give two files"),
        ("sweep", ["ARGS=a=1; b=2"], "ARGS=a=1; b=2: write changes with blanks between, not"),
        ("launch", ["ARGS=task='a(b)' seed=1&"], "seed=1&: a shell would take its &: write such"),
        ("train", ["AT=02:00"], "AT=02:00: make train takes"),
        ("stop", ["KILL=1", "NP=2"], "NP=2: make stop takes RUN KILL"),
    ],
)
def test_variables_that_are_mistakes(target: str, given: list[str], message: str) -> None:
    told = [*mistakes(dict(each.split("=", 1) for each in given), [target])]
    assert told and message in told[0]


def test_who_has_no_name_is_given_one(fake: Callable) -> None:
    """In a container torch may find none."""
    show = ["make", "-s", "--eval", "show: ; @echo user=$$USER", "show"]
    name = run(["id", "-un"]).stdout.strip()
    assert run(show, USER="", LOGNAME="").stdout == f"user={name}\n"
    assert run(show, USER="", LOGNAME="ada").stdout == "user=\n"
    assert run(show, USER="ada", LOGNAME="").stdout == "user=ada\n"
    fake("id", "echo 54321; [ $1 != -un ]")  # as of a nameless user
    assert run(show, USER="", LOGNAME="").stdout == "user=54321\n"


def test_options_of_python_do_not_keep_make_from_its_modules() -> None:
    options = {"PYTHONSAFEPATH": "1", "PYTHONOPTIMIZE": "2"}
    done = run(["make", "-s", "--eval", "probe: ; @env", "probe"], **options)
    assert done.returncode == 0, done.stdout
    assert not re.search("SAFEPATH|OPTIMIZE", done.stdout)


def test_of_the_environment_make_takes_four_variables() -> None:
    taken = {"NP", "HOSTS", "HOSTFILE", "ARGS"}
    others = re.search("^OURS := (.*)", (ROOT / "Makefile").read_text(), re.M)
    assert others and {*others[1].split()} == TAKEN - taken | {"MPI", "PYTHON"}


def test_hosts_in_the_environment_are_not_for_each_target() -> None:
    done = run(["make", "-n", "bench-step", "INSTALL=true"], HOSTFILE="x.yaml")
    assert done.returncode == 0 and '--hosts "localhost:2"' in done.stdout, done.stdout
    done = run(["make", "-n", "bench-step", "NP=1", "INSTALL=true"], HOSTS="a:2")
    assert done.returncode == 2 and "NP=1: HOSTS=a:2 says how many" in done.stdout
    done = run(["make", "-n", "predict", "INSTALL=true"], HOSTS="a:2", STEPS="3", ARGS="")
    assert done.returncode == 0 and "benchmarks.predict" in done.stdout, done.stdout


@pytest.mark.parametrize(
    "line",
    [
        "bench bench-readme NP=2 STEPS=9 ARGS=seed=1", "stop train RUN=a NP=2",
        "sync predict HOSTS=a:1 RUN=b", "sweep TRIALS=2 METRIC=a MODE=max LAUNCHER=mpi",
        "launch AT=02:00 STOP_SECONDS=9 HOSTFILE=a", "bench-check OLD=a NEW=b", "logs RUN=a",
        "predict NP=2 RUN=a ALLREDUCE=b NETWORK=c ARGS=d", "profile NP=2 STEPS=9",
        "train ARGS='model.lr=$${seed}'", "train ARGS='f(1)'", "sweep ARGS=seed=range(1,3)",
        r'train ARGS="{\"a\":\"f(1)\"}"',
    ],
)  # fmt: skip
def test_make_takes_what_one_of_its_targets_uses(line: str) -> None:
    done = run(["make", "-n", *line.split(), "INSTALL=true"])
    assert done.returncode == 0, done.stdout

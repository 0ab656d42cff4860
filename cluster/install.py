"""Make an environment in which torch, Lightning and Horovod work together.

    python3 cluster/install.py                     .venv beside this folder, made when missing
    python3 cluster/install.py --python PYTHON     into the environment of this interpreter
    python3 cluster/install.py --dev --mpi         with the development tools; Horovod with MPI too

Horovod 0.28.1, the last release, does not build beside any torch since 2.1 by itself: it asks for
C++14 and C++11 where torch's headers need C++17, for a CUDA toolkit and an NCCL of the system, and
for a CMake policy that CMake 4 dropped (horovod#3996, #4014, #3941). Here it is built from pip
packages alone, with a compiler wrapper and settings; PATCHES are for speed alone. Whether it gets
NCCL is decided by torch, not by this machine: a login node without a GPU builds for the whole
cluster.

The wheel is kept in ~/.cache/horovod-wheels under a name that says all it depends on, so that
every further environment of this user takes it from there, `pip install -r requirements.txt`
included. It does not install drivers, compilers or anything that needs root: what is missing is
named with the package that brings it. Python 3.10 to 3.13, Linux x86-64; standard library only.
"""

from __future__ import annotations

import argparse
import contextlib
import fcntl
import json
import os
import platform
import re
import shutil
import subprocess
import sys
import tempfile
import time
from collections.abc import Iterator
from contextlib import contextmanager
from pathlib import Path

ROOT = Path(__file__).resolve().parent.parent
WHEELS = Path(os.environ.get("WHEELS") or "~/.cache/horovod-wheels").expanduser()
LOG = ROOT / "logs" / "install.log"
PYTHONS = ["3.13", "3.12", "3.11", "3.10"]

# What the build needs beside torch; it lives in a throw-away environment. setuptools 82 is without
# the pieces that Horovod's setup.py expects; the CUDA compiler is the one of torch's own CUDA 13.0.
BUILD_TOOLS = ["setuptools<81", "wheel", "cmake", "cffi"]
BUILD_TOOLS += ["cloudpickle", "psutil", "pyyaml", "packaging"]
CUDA_TOOLS = [
    "nvidia-cuda-nvcc==13.0.88",
    "nvidia-cuda-crt==13.0.88",
    "nvidia-nvvm==13.0.88",
    "nvidia-cuda-cccl==13.0.85",
]

# Horovod's CMake files, its gloo and its CUDA kernels ask for these; torch's headers need C++17.
# Without -g, that they ask for too, the build takes 0.8 of the time and the wheel 1.5 of 21 MB.
CXX_WRAPPER = """#!/bin/sh
for arg do
    shift
    case $arg in -std=c++11|-std=c++14|-std=gnu++11|-std=gnu++14) arg=-std=c++17 ;; esac
    set -- "$@" "$arg"
done
exec {cxx} "$@" -g0
"""

# What is changed in Horovod's sources: a file, a text that it has once, and what comes instead; the
# figures are in benchmarks/NOTES.md. PATCH goes into the names of wheels.
#
# Horovod's thread asks all ranks once a cycle (1 ms) what is ready, also where nothing is, and so
# takes 5 % of a core from training. With HOROVOD_IDLE_TIME=ms in the environment it
# sleeps for that long, or until this rank hands it something; without, all is as it was.
#
# Gloo sends to a rank before it tells that rank that it may send. Both go through one connection,
# in which the permission waits behind the data: one direction after the other, half the speed.
#
# At its start each rank asks the rendezvous for all others: for the host's name, which then nothing
# reads, for the address until it is there, and once more for the address; one question is enough.
# And before it connects it waits for Gloo's thread, which sleeps for 10 ms; now that is woken.
PATCH = "p2"
NOTIFY = "  added_.notify_one();\n"
QUEUE, GLOO = "horovod/common/tensor_queue", "third_party/gloo/gloo"
STORE = "horovod/common/gloo/http_store"
SEND = "sendRank, slot, inOffsetPerRank[sendRank], inLengthPerRank[sendRank]"
PATCHES = [
    (f"{QUEUE}.h", "#include <mutex>\n",
     "#include <chrono>\n#include <condition_variable>\n#include <mutex>\n"),
    (f"{QUEUE}.h", "protected:\n", """\
  // Returns when there are tensors to work on, or after so long.
  void WaitForTensors(std::chrono::microseconds most);

protected:
  std::condition_variable added_;
"""),
    (f"{QUEUE}.cc", "Status TensorQueue::AddToTensorQueue(", """\
void TensorQueue::WaitForTensors(std::chrono::microseconds most) {
  std::unique_lock<std::mutex> lock(mutex_);
  added_.wait_for(lock, most, [this] {
    return !tensor_table_.empty() || !message_queue_.empty();
  });
}

Status TensorQueue::AddToTensorQueue("""),
    (f"{QUEUE}.cc", "  message_queue_.push(std::move(message));\n  return",
     f"{NOTIFY}  message_queue_.push(std::move(message));\n  return"),
    (f"{QUEUE}.cc", "    message_queue_.push(std::move(messages[i]));\n",
     f"    message_queue_.push(std::move(messages[i]));\n{NOTIFY}"),
    ("horovod/common/operations.cc",
     "  state.last_cycle_start = std::chrono::steady_clock::now();\n\n  if", """\
  static const auto idle_time = std::chrono::milliseconds(
      std::getenv("HOROVOD_IDLE_TIME") ? std::atol(std::getenv("HOROVOD_IDLE_TIME")) : 0);
  // With several sets of processes, each cycle of one waits for the others'.
  if (idle_time.count() > 0 && !state.dynamic_process_sets &&
      state.process_set_table.Ids().size() == 1) {
    state.process_set_table.Get(0).tensor_queue.WaitForTensors(idle_time);
  }
  state.last_cycle_start = std::chrono::steady_clock::now();

  if"""),
    (f"{GLOO}/alltoallv.cc", f"    in->send(\n        {SEND});\n", ""),
    (f"{GLOO}/alltoallv.cc", "  for (int i = 1; i < worldSize; i++) {\n    in->waitSend", f"""\
  for (int i = 1; i < worldSize; i++) {{
    int sendRank = (myRank + i) % worldSize;
    in->send({SEND});
  }}
  for (int i = 1; i < worldSize; i++) {{
    in->waitSend"""),
    (f"{GLOO}/allgatherv.cc", """\
      out->send(sendRank, slot, byteOffsets[sendIndex], byteCounts[sendIndex]);
      out->recv(recvRank, slot, byteOffsets[recvIndex], byteCounts[recvIndex]);
""", """\
      out->recv(recvRank, slot, byteOffsets[recvIndex], byteCounts[recvIndex]);
      out->send(sendRank, slot, byteOffsets[sendIndex], byteCounts[sendIndex]);
"""),
    (f"{STORE}.h", "  int rank_;\n",
     "  int rank_;\n  std::string found_key_;\n  std::vector<char> found_;\n"),
    (f"{STORE}.cc", "  std::vector<char> result;\n  HTTP_GET(key", """\
  if (key == found_key_) {
    return found_;
  }
  std::vector<char> result;
  HTTP_GET(key"""),
    (f"{STORE}.cc", "      return false;\n    }\n  }\n", """\
      return false;
    }
    found_key_ = key;
    found_ = result;
  }
"""),
    (f"{GLOO}/rendezvous/context.cc",
     "  store.set(localKey, value);\n\n  for (int i = 0; i < size; i++) {\n",
     "  for (int i = rank; i < size; i++) {\n"),
    (f"{GLOO}/transport/tcp/loop.cc", "    cv_.wait(lock);\n",
     "    defer([] {});\n    cv_.wait(lock);\n"),
    (f"{GLOO}/transport/tcp/loop.cc", "    cv_.notify_all();\n",
     "    std::unique_lock<std::mutex>(m_).unlock();  // who is about to wait, waits\n"
     "    cv_.notify_all();\n"),
]  # fmt: skip

# Run by the environment's own interpreter, in 0.1 s: nothing heavy is imported.
PROBE = """
import importlib.metadata as m, importlib.util, json, platform, re, sys, sysconfig
spec = importlib.util.find_spec("torch")
text = open(spec.origin.replace("__init__.py", "version.py")).read() if spec else ""
cuda = re.search(r"^cuda.*= '([0-9.]+)'", text, re.M)
print(json.dumps({
    "python": platform.python_version(), "prefix": sys.prefix,
    "externally_managed": sys.prefix == sys.base_prefix and __import__("os").path.exists(
        sysconfig.get_path("stdlib") + "/EXTERNALLY-MANAGED"),
    "site": sysconfig.get_path("purelib"), "include": sysconfig.get_path("include"),
    "cuda": cuda and cuda[1],
    "packages": {
        re.sub("[-_.]+", "-", d.metadata["Name"]).lower(): d.version for d in m.distributions()
    },
}))
"""

ALL_REDUCE = """
import sys, torch, horovod.torch as hvd
hvd.init()
total = hvd.allreduce(torch.full((1000,), float(hvd.rank() + 1)), op=hvd.Sum)
sys.exit(0 if hvd.size() == 2 and bool((total == 3).all()) else 1)
"""


class InstallError(Exception):
    """What is missing or went wrong and what to do about it, in one line."""


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__.split("\n")[0])
    parser.add_argument("--python", help="interpreter of the environment (default: .venv's)")
    parser.add_argument("--dev", action="store_true", help="install requirements-dev.txt as well")
    parser.add_argument("--mpi", action="store_true", help="build Horovod with MPI as well")
    args = parser.parse_args()
    try:
        install(args.python, args.dev, args.mpi)
    except InstallError as error:
        sys.exit(f"install: {error}")
    except KeyboardInterrupt:
        sys.exit("install: interrupted; run it again to go on")


def install(python: str | None, dev: bool, mpi: bool) -> None:
    if sys.platform != "linux" or platform.machine() != "x86_64":
        raise InstallError(
            f"this is {sys.platform} on {platform.machine()}; the pinned wheels of torch and the "
            "build of Horovod are for Linux on x86-64"
        )
    requirements = [ROOT / "requirements.txt"] + [ROOT / "requirements-dev.txt"] * dev
    pins = {name: version for file in requirements for name, version in read_pins(file)}

    if python is None:
        python = str(ROOT / ".venv" / "bin" / "python")
        if not Path(python).exists():
            make_environment(ROOT / ".venv")
    info = probe(python)
    if not unmet(info, pins, mpi):
        return

    started = time.monotonic()
    LOG.parent.mkdir(exist_ok=True)
    LOG.write_text("")
    print(f"Installing into {info['prefix']} (log: {shown(LOG)})", flush=True)
    check_python(info)
    if info["packages"].get("torch", "").split("+")[0] != pins["torch"]:
        check_disk(Path(info["prefix"]), 6, "torch with its CUDA libraries takes 5 GB")
        if not any(WHEELS.glob(f"*/horovod-{pins['horovod']}+*-{python_tag(info)}-*.whl")):
            check_compilers(info)  # before the large download
        run_logged(
            f"torch {pins['torch']} with its CUDA libraries: 1 to 10 minutes, by the network",
            [python, "-m", "pip", "install", f"torch=={pins['torch']}"],
        )
        info = probe(python)
    wheel = find_wheel(info, pins["horovod"], mpi)
    if wheel is None:
        wheel = build_wheel(python, info, pins["horovod"], mpi)
    else:
        print(f"  Horovod {pins['horovod']}: built before, {shown(wheel)}", flush=True)
    files = [argument for file in requirements for argument in ("-r", str(file))]
    run_logged(
        "the other packages: about a minute",
        [python, "-m", "pip", "install", str(wheel), *files],
    )
    try:
        verify(python, probe(python), mpi)
    except InstallError:
        # Not to be taken for done by the next call, nor by the next environment.
        wheel.unlink()
        run_logged(None, [python, "-m", "pip", "uninstall", "-y", "horovod"])
        raise
    print(f"Ready in {time.monotonic() - started:.0f} s: {info['prefix']}", flush=True)


def read_pins(file: Path) -> Iterator[tuple[str, str]]:
    """The `name==version` lines of a requirements file that apply to this Python."""
    for line in file.read_text().splitlines():
        match = re.match(r"([A-Za-z0-9_.-]+)==([^\s;#]+)", line)
        if match:
            yield re.sub("[-_.]+", "-", match[1]).lower(), match[2]


def make_environment(folder: Path) -> None:
    """A virtual environment of the first fitting interpreter on the PATH."""
    candidates = ["python3", *(f"python{version}" for version in PYTHONS)]
    for name in candidates:
        found = shutil.which(name)
        with contextlib.suppress(InstallError):  # one that does not run, as pyenv's may
            if found and probe(found)["python"].rsplit(".", 1)[0] in PYTHONS:
                break
    else:
        raise InstallError(
            "no Python from 3.10 to 3.13 on the PATH: sudo apt-get install python3 python3-venv"
        )
    assert found
    try:
        result = subprocess.run([found, "-m", "venv", str(folder)], capture_output=True, text=True)
    except KeyboardInterrupt:
        shutil.rmtree(folder, ignore_errors=True)
        raise
    if result.returncode != 0:
        shutil.rmtree(folder, ignore_errors=True)
        version = probe(found)["python"].rsplit(".", 1)[0]
        if "ensurepip" in result.stdout + result.stderr:
            raise InstallError(
                f"{found} cannot make virtual environments: "
                f"sudo apt-get install python3-venv (or python{version}-venv)"
            )
        raise InstallError(f"{found} -m venv {folder}: {last_line(result.stderr)}")


def probe(python: str) -> dict:
    """Version, folders and packages of an interpreter's environment."""
    try:
        result = subprocess.run([python, "-c", PROBE], capture_output=True, text=True)
    except OSError as error:
        raise InstallError(f"PYTHON={python}: {error.strerror}; give an interpreter") from None
    if result.returncode != 0:
        raise InstallError(f"PYTHON={python} does not run: {last_line(result.stderr)}")
    return json.loads(result.stdout)


def unmet(info: dict, pins: dict[str, str], mpi: bool) -> list[str]:
    """The pinned packages that this environment lacks or has in another version."""
    packages = info["packages"]
    wrong = [name for name, pin in pins.items() if packages.get(name, "").split("+")[0] != pin]
    label = packages.get("horovod", "").partition("+")[2].split(".")
    if ".".join(label).startswith(".".join(wheel_label(info))) and (not mpi or "mpi" in label):
        return wrong
    return [*wrong, "horovod"]


def wheel_label(info: dict) -> list[str]:
    """What a Horovod wheel is tied to: the local part of its version, e.g.
    torch2.11.0.cu130.nccl2.28.9. Python's and glibc's versions are in the wheel's tags."""
    torch = info["packages"].get("torch", "none").split("+")[0]
    if not info["cuda"]:
        return f"torch{torch}.cpu.{PATCH}".split(".")
    nccl = info["packages"].get(f"nvidia-nccl-cu{info['cuda'].split('.')[0]}", "none")
    return f"torch{torch}.cu{info['cuda'].replace('.', '')}.nccl{nccl}.{PATCH}".split(".")


def wheel_folder(info: dict) -> Path:
    """One folder for each build of torch; requirements.txt names the one of its pin."""
    torch = info["packages"]["torch"].split("+")[0]
    return (
        WHEELS / f"torch{torch}+{'cu' + info['cuda'].replace('.', '') if info['cuda'] else 'cpu'}"
    )


def wheel_name(info: dict, horovod: str, mpi: bool) -> str:
    label = wheel_label(info) + ["mpi"] * mpi
    architectures = os.environ.get("HOROVOD_BUILD_CUDA_CC_LIST", "")
    label += [f"sm{architecture}" for architecture in architectures.split(",") if architecture]
    tag = python_tag(info)
    return f"horovod-{horovod}+{'.'.join(label)}-{tag}-{tag}-{platform_tag()}.whl"


def python_tag(info: dict) -> str:
    return "cp" + "".join(info["python"].split(".")[:2])


def platform_tag() -> str:
    """The wheel runs on this glibc and newer ones; so tagged, pip refuses it on an older one."""
    return "manylinux_" + platform.libc_ver()[1].replace(".", "_") + "_x86_64"


def find_wheel(info: dict, horovod: str, mpi: bool) -> Path | None:
    wheel = wheel_folder(info) / wheel_name(info, horovod, mpi)
    return wheel if wheel.exists() else None


def check_python(info: dict) -> None:
    version = info["python"].rsplit(".", 1)[0]
    if version not in PYTHONS:
        raise InstallError(
            f"Python {info['python']} in {info['prefix']}: the pinned packages need 3.10 to 3.13; "
            "give another with PYTHON="
        )
    if info["externally_managed"]:
        raise InstallError(
            f"{info['prefix']} belongs to the operating system, whose pip installs nothing there; "
            "leave PYTHON= out to get a .venv here, or give the interpreter of an environment"
        )


def check_compilers(info: dict) -> None:
    for program in ("g++", "make"):
        if shutil.which(os.environ.get("CXX", program) if program == "g++" else program) is None:
            raise InstallError(
                f"{program} is missing, which compiles Horovod: sudo apt-get install {program}"
            )
    if not has_headers(info) and shutil.which("apt-get") is None:
        raise InstallError(no_headers(info))


def has_headers(info: dict) -> bool:
    return (Path(info["include"]) / "Python.h").exists()


def no_headers(info: dict) -> str:
    version = info["python"].rsplit(".", 1)[0]
    return (
        f"Python.h is missing in {info['include']}, which Horovod is compiled with: "
        f"sudo apt-get install python{version}-dev (or python3-dev)"
    )


def fetch_headers(build: Path, info: dict) -> str:
    """Python's headers from the distribution's package, unpacked, not installed: needs no root.

    Returns:
        The folders to search for headers, as the compiler's CPATH wants them.
    """
    version = info["python"].rsplit(".", 1)[0]
    name = f"libpython{version}-dev"
    command = f"cd {build} && apt-get download {name} && dpkg -x {name}_*.deb headers"
    try:
        run_logged(None, ["sh", "-c", command])
    except InstallError:
        raise InstallError(no_headers(info)) from None
    return f"{build}/headers/usr/include/python{version}:{build}/headers/usr/include"


def check_disk(folder: Path, gigabytes: float, why: str) -> None:
    folder.mkdir(parents=True, exist_ok=True)
    free = shutil.disk_usage(folder).free / 1e9
    if free < gigabytes:
        raise InstallError(
            f"{free:.1f} GB free for {folder}, {gigabytes:.1f} GB needed: {why}; "
            "free some, or put the checkout (or WHEELS=) on a larger disk"
        )


def build_jobs() -> int:
    """As many compilers at once as there are cores and memory for (1.5 GB each)."""
    meminfo = Path("/proc/meminfo").read_text()
    available = int(re.search(r"MemAvailable:\s+(\d+)", meminfo)[1]) / 1e6  # type: ignore[index]
    if available < 1.5:
        raise InstallError(
            f"{available:.1f} GB of memory available, 1.5 GB needed to compile Horovod: "
            "end other programs, or build on another host that shares this home"
        )
    return max(1, min(len(os.sched_getaffinity(0)), int(available / 1.5)))


@contextmanager
def locked(file: Path) -> Iterator[None]:
    """One build of the same wheel at a time; a second one waits, and then finds it done."""
    file.parent.mkdir(parents=True, exist_ok=True)
    with file.open("w") as handle:
        try:
            fcntl.flock(handle, fcntl.LOCK_EX | fcntl.LOCK_NB)
        except OSError:
            print("  another installation builds Horovod; waiting for it", flush=True)
            fcntl.flock(handle, fcntl.LOCK_EX)
        yield


def build_wheel(python: str, info: dict, horovod: str, mpi: bool) -> Path:
    """Compile Horovod in a throw-away environment that sees the torch of `python`'s."""
    folder = wheel_folder(info)
    check_compilers(info)
    check_disk(folder, 0.1, "the wheel is kept there")
    check_disk(Path(tempfile.gettempdir()), 2, "the build of Horovod takes 1.5 GB while it runs")
    if mpi and shutil.which("mpicxx") is None:
        raise InstallError(
            "MPI=1: mpicxx is missing: sudo apt-get install libopenmpi-dev openmpi-bin"
        )
    if info["cuda"] and not info["cuda"].startswith("13.0"):
        raise InstallError(
            f"torch in {info['prefix']} is built for CUDA {info['cuda']}; the compiler pinned in "
            f"{shown(Path(__file__))} is for 13.0: install the torch of requirements.txt"
        )
    jobs = build_jobs()
    with locked(folder / ".lock"), tempfile.TemporaryDirectory(prefix="horovod-") as temporary:
        if wheel := find_wheel(info, horovod, mpi):
            return wheel
        build = Path(temporary)
        build_python = str(build / "env" / "bin" / "python")
        run_logged("the tools that build Horovod", [python, "-m", "venv", str(build / "env")])
        site = Path(probe(build_python)["site"])
        (site / "torch-of-the-environment.pth").write_text(info["site"] + "\n")
        pip = [build_python, "-m", "pip"]
        tools = BUILD_TOOLS + (CUDA_TOOLS if info["cuda"] else [])
        run_logged(None, [*pip, "install", "--ignore-installed", *tools])

        environment = build_settings(build, site, info, mpi, jobs)
        if not has_headers(info):
            environment["CPATH"] = fetch_headers(build, info)
        run_logged(None, [
            *pip, "download", "--no-cache-dir", "--no-deps", "--no-build-isolation",
            "--no-binary=horovod", "--dest", str(build), f"horovod=={horovod}",
        ])  # fmt: skip
        source = build / f"horovod-{horovod}"
        shutil.unpack_archive(f"{source}.tar.gz", build)
        patch(source)
        name = wheel_name(info, horovod, mpi)
        environment["HOROVOD_LOCAL_VERSION"] = name.split("-")[1].partition("+")[2]
        with_what = ", ".join(["Gloo"] + ["NCCL"] * bool(info["cuda"]) + ["MPI"] * mpi)
        run_logged(
            f"Horovod {horovod} with {with_what}, {jobs} compilers: about {4 if jobs < 4 else 2} "
            "minutes, once for this user",
            [*pip, "wheel", "-v", "--no-cache-dir", "--no-deps", "--no-build-isolation",
             "--wheel-dir", str(build), str(source)],
            environment,
        )  # fmt: skip
        staged = folder / f".{name}.{os.getpid()}"
        shutil.move(build / name, staged)
        staged.rename(folder / name)
    return folder / name


def patch(source: Path) -> None:
    """Make the changes of PATCHES in Horovod's sources."""
    for name, old, new in PATCHES:
        file = source / name
        text = file.read_text()
        if text.count(old) != 1:
            raise InstallError(f"{name} of {source.name} has changed: PATCHES does not fit it")
        file.write_text(text.replace(old, new))


def build_settings(build: Path, site: Path, info: dict, mpi: bool, jobs: int) -> dict[str, str]:
    """The environment variables of Horovod's build."""
    compiler = build / "c++17"
    compiler.write_text(CXX_WRAPPER.format(cxx=os.environ.get("CXX", "g++")))
    compiler.chmod(0o755)
    wheel_settings = build / "wheel.cfg"
    wheel_settings.write_text(f"[bdist_wheel]\nplat_name = {platform_tag()}\n")
    settings = {
        **{name: value for name, value in os.environ.items() if not name.startswith("HOROVOD_")},
        "PATH": f"{build}/env/bin:{os.environ['PATH']}",
        "CXX": str(compiler),
        "MAKEFLAGS": f"-j{jobs}",
        "CMAKE_POLICY_VERSION_MINIMUM": "3.5",
        "DIST_EXTRA_CONFIG": str(wheel_settings),
        "HOROVOD_WITH_PYTORCH": "1",
        "HOROVOD_WITHOUT_TENSORFLOW": "1",
        "HOROVOD_WITHOUT_MXNET": "1",
        "HOROVOD_WITH_GLOO": "1",
        "HOROVOD_WITH_MPI" if mpi else "HOROVOD_WITHOUT_MPI": "1",
    }
    if info["cuda"]:
        cuda, nccl = stage_cuda(build, site, Path(info["site"]))
        settings.update({
            "PATH": f"{cuda}/bin:{settings['PATH']}",
            "CUDA_HOME": str(cuda),
            "CUDACXX": f"{cuda}/bin/nvcc",
            "LIBRARY_PATH": f"{cuda}/lib64",
            "NVCC_APPEND_FLAGS": "-std=c++17",
            "HOROVOD_CUDA_HOME": str(cuda),
            "HOROVOD_GPU_OPERATIONS": "NCCL",
            "HOROVOD_NCCL_LINK": "SHARED",
            "HOROVOD_NCCL_HOME": str(nccl),
        })  # fmt: skip
        if "HOROVOD_BUILD_CUDA_CC_LIST" in os.environ:
            settings["HOROVOD_BUILD_CUDA_CC_LIST"] = os.environ["HOROVOD_BUILD_CUDA_CC_LIST"]
    return settings


def stage_cuda(build: Path, tools: Path, packages: Path) -> tuple[Path, Path]:
    """CUDA's and NCCL's folders as a compiler expects them, linked together from pip's packages.

    Args:
        build: the folder to make them in.
        tools: site-packages with nvcc, its headers and nvvm.
        packages: site-packages of torch, with the CUDA runtime and NCCL.
    """
    cuda, nccl = build / "cuda", build / "nccl"
    for folder in (cuda / "bin", cuda / "include", cuda / "lib64", nccl / "lib"):
        folder.mkdir(parents=True)
    for source in (packages / "nvidia" / "cu13", tools / "nvidia" / "cu13"):
        link_tree(source / "include", cuda / "include")
        link_tree(source / "bin", cuda / "bin")
        link_tree(source / "lib", cuda / "lib64")
        link_tree(source / "nvvm", cuda / "nvvm")
    (cuda / "lib64" / "libcudart.so").symlink_to("libcudart.so.13")
    (nccl / "include").symlink_to(packages / "nvidia" / "nccl" / "include")
    (nccl / "lib" / "libnccl.so").symlink_to(packages / "nvidia" / "nccl" / "lib" / "libnccl.so.2")
    return cuda, nccl


def link_tree(source: Path, target: Path) -> None:
    """Link every file of `source` to the same place in `target`."""
    for file in source.rglob("*"):
        if not file.is_dir():
            place = target / file.relative_to(source)
            place.parent.mkdir(parents=True, exist_ok=True)
            if not place.exists():
                place.symlink_to(file)


def verify(python: str, info: dict, mpi: bool) -> None:
    """Horovod says that it has what it was built with, and two processes add two tensors."""
    horovodrun = str(Path(python).absolute().parent / "horovodrun")
    if not Path(horovodrun).exists():
        horovodrun = str(Path(info["prefix"]) / "bin" / "horovodrun")
    report = run_logged("checking Horovod", [horovodrun, "--check-build"])
    for feature in ["PyTorch", "Gloo"] + ["NCCL"] * bool(info["cuda"]) + ["MPI"] * mpi:
        if f"[X] {feature}" not in report:
            raise InstallError(f"horovodrun --check-build shows no {feature}; see {shown(LOG)}")
    run_logged(
        "an all-reduce between 2 processes",
        [horovodrun, "-np", "2", "-H", "localhost:2", python, "-c", ALL_REDUCE],
    )


def run_logged(title: str | None, command: list[str], env: dict | None = None) -> str:
    """Run a command with its output in the log, the time so far on the terminal; return it.

    Raises:
        InstallError: with the telling lines of the output, when the command fails.
    """
    started = time.monotonic()
    terminal = sys.stdout.isatty()
    if title:
        print(f"  {title} ...", end="" if terminal else "\n", flush=True)
    with LOG.open("a") as log:
        log.write(f"\n$ {' '.join(command)}\n")
        log.flush()
        start = log.tell()
        process = subprocess.Popen(command, stdout=log, stderr=subprocess.STDOUT, env=env)
        try:
            while True:
                try:
                    code = process.wait(timeout=1)
                    break
                except subprocess.TimeoutExpired:
                    if title and terminal:
                        elapsed = time.monotonic() - started
                        print(f"\r  {title} ... {elapsed:.0f} s", end="", flush=True)
        except KeyboardInterrupt:
            process.terminate()
            process.wait()
            raise
    if title and terminal:
        print(flush=True)
    with LOG.open(errors="replace") as log:
        log.seek(start)
        output = log.read()
    if code != 0:
        raise InstallError(f"{title or Path(command[0]).name + ' ' + command[1]} failed, "
                           f"see {shown(LOG)}:\n" + telling_lines(output))  # fmt: skip
    return output


def telling_lines(output: str, most: int = 8) -> str:
    """The lines of a build's output that name an error, else its last ones."""
    lines = [line.rstrip() for line in output.splitlines() if line.strip()]
    telling = [line for line in lines if re.search(r"\berror\b|cannot|No space|Killed", line, re.I)]
    return "\n".join(f"    {line[:300]}" for line in (telling or lines)[-most:])


def last_line(text: str) -> str:
    return (text.strip().splitlines() or ["it ended without a word"])[-1]


def shown(path: Path) -> str:
    """A path as short as it can be said."""
    try:
        return str(path.relative_to(ROOT))
    except ValueError:
        return str(path).replace(str(Path.home()), "~", 1)


if __name__ == "__main__":
    main()

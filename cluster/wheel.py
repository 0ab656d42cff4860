"""The wheel of Horovod: its name, which says all it depends on, and its build from pip packages.

Horovod asks for C++14 and C++11 where torch's headers need C++17 or C++20, for a CUDA toolkit and
an NCCL of the system, and for a CMake policy that CMake 4 dropped (horovod#3996, #4014, #3941). The
build gives it a compiler wrapper, settings, and folders linked together from pip's packages. Torch
decides whether it gets NCCL, not this machine: a login node without a GPU builds for the whole
cluster.
"""

from __future__ import annotations

import os
import platform
import re
import shlex
import shutil
import subprocess
import tempfile
from pathlib import Path

from cluster.environment import InstallError, check_disk, inspect, locked, run_logged, shown
from cluster.patches import PATCH, patch
from cluster.probe import memory, usable_cores

WHEELS = Path(os.environ.get("WHEELS") or "~/.cache/horovod-wheels").expanduser()

# Of the source of Horovod 0.28.1 on PyPI: no other may be compiled and run.
SOURCE_SHA256 = "92a43f5a94c43907a56805bad15f19700c62ffc83b7ca483f9e104e229f67ef0"

# What the build needs beside torch, in a throw-away environment. setuptools 82 lacks pieces that
# Horovod's setup.py expects; the CUDA compiler is that of torch's own CUDA.
BUILD_TOOLS = ["setuptools<81", "wheel", "cmake", "cffi"]
BUILD_TOOLS += ["cloudpickle", "psutil", "pyyaml", "packaging"]
CUDA_TOOLS = {
    "13.0": ["nvidia-cuda-nvcc==13.0.88", "nvidia-cuda-crt==13.0.88",
             "nvidia-nvvm==13.0.88", "nvidia-cuda-cccl==13.0.85"],
    "13.2": ["nvidia-cuda-nvcc==13.2.86", "nvidia-cuda-crt==13.2.86",
             "nvidia-nvvm==13.2.86", "nvidia-cuda-cccl==13.2.86"],
}  # fmt: skip

# Horovod's CMake files, its gloo and its CUDA kernels ask for the older standards; torch's headers
# need more. Without -g, which they ask for too, the build takes 0.8 of the time and the wheel 1.5
# of 21 MB. The sources forget to include cstdint and stdexcept, which the headers of newer g++
# (seen: 13, 14, 16) no longer include for them.
CXX_WRAPPER = """#!/bin/sh
for arg do
    shift
    case $arg in -std=c++11|-std=c++14|-std=gnu++11|-std=gnu++14) arg=-std={standard} ;; esac
    case $arg in *.cc) set -- "$@" -include cstdint -include stdexcept ;; esac
    set -- "$@" "$arg"
done
exec {cxx} "$@" -g0
"""


def cuda_tag(info: dict) -> str:
    return "cu" + info["cuda"].replace(".", "") if info["cuda"] else "cpu"


def wheel_label(info: dict) -> str:
    """What a Horovod wheel is tied to: the local part of its version, e.g.
    torch2.11.0.cu130.nccl2.28.9.p97. Python's and glibc's versions are in the wheel's tags."""
    torch = info["packages"].get("torch", "none").split("+")[0]
    label = f"torch{torch}.{cuda_tag(info)}"
    if info["cuda"]:
        nccl = info["packages"].get(f"nvidia-nccl-cu{info['cuda'].split('.')[0]}", "none")
        label += f".nccl{nccl}"
    return f"{label}.{PATCH}"


def wheel_folder(info: dict) -> Path:
    """One folder for each build of torch; requirements.txt names the one of its pin."""
    return WHEELS / f"torch{info['packages']['torch'].split('+')[0]}+{cuda_tag(info)}"


def wheel_name(info: dict, horovod: str, mpi: bool) -> str:
    label = wheel_label(info) + ".mpi" * mpi
    architectures = os.environ.get("HOROVOD_BUILD_CUDA_CC_LIST", "")
    label += "".join(f".sm{number}" for number in architectures.split(",") if number)
    tag = python_tag(info)
    return f"horovod-{horovod}+{label}-{tag}-{tag}-{platform_tag()}.whl"


def python_tag(info: dict) -> str:
    return "cp" + "".join(info["python"].split(".")[:2])


def platform_tag() -> str:
    """The wheel runs on this glibc and newer ones; by this tag pip refuses it on an older one."""
    return "manylinux_" + platform.libc_ver()[1].replace(".", "_") + "_x86_64"


def find_wheel(info: dict, horovod: str, mpi: bool) -> Path | None:
    wheel = wheel_folder(info) / wheel_name(info, horovod, mpi)
    return wheel if wheel.exists() else None


def cxx() -> str:
    """The compiler that was asked for, which may be several words, as "ccache g++"."""
    return os.environ.get("CXX") or "g++"


def check_compilers(info: dict) -> None:
    for program in (cxx(), "make"):
        if shutil.which(shlex.split(program)[0]) is None:
            package = "make" if program == "make" else "g++"
            raise InstallError(
                f"{program} is missing, which compiles Horovod: sudo apt-get install {package}"
            )
    if (version := gcc_version()) and version < 9:  # torch's c10/util/C++17.h
        raise InstallError(
            f"{cxx()} is of GCC {version}, and torch's headers need 9 or newer: module load gcc, "
            "or name another one that is there: CXX=g++-12 make install"
        )
    if not has_headers(info) and shutil.which("apt-get") is None:
        raise InstallError(no_headers(info))
    temporary = tempfile.gettempdir()
    if os.statvfs(temporary).f_flag & os.ST_NOEXEC:
        raise InstallError(
            f"{temporary} is mounted noexec, and the build runs its compilers there: "
            "mkdir -p ~/tmp, then TMPDIR=~/tmp make install"
        )


def gcc_version() -> int | None:
    """The major version of the compiler; None for another, as clang is, which claims to be 4."""
    command = [*shlex.split(cxx()), "-dM", "-E", "-x", "c++", "/dev/null"]
    defined = subprocess.run(command, capture_output=True, text=True).stdout
    version = re.search(r"^#define __GNUC__ (\d+)", defined, re.M)
    return int(version[1]) if version and "__clang__" not in defined else None


def has_headers(info: dict) -> bool:
    return (Path(info["include"]) / "Python.h").exists()


def no_headers(info: dict) -> str:
    version = info["python"].rsplit(".", 1)[0]
    return (
        f"Python.h is missing in {info['include']}, which Horovod is compiled with: "
        f"sudo apt-get install python{version}-dev (or python3-dev)"
    )


def fetch_headers(build: Path, info: dict) -> str:
    """Python's headers from the distribution's package, unpacked but not installed, without root.

    Returns:
        The folders to search for headers, as the compiler's CPATH wants them.
    """
    version = info["python"].rsplit(".", 1)[0]
    name = f"libpython{version}-dev"
    command = (
        f"cd {shlex.quote(str(build))} && apt-get download {name} && dpkg -x {name}_*.deb headers"
    )
    try:
        run_logged(None, ["sh", "-c", command])
    except InstallError:
        raise InstallError(no_headers(info)) from None
    return f"{build}/headers/usr/include/python{version}:{build}/headers/usr/include"


def build_jobs() -> int:
    """As many compilers at once as there are cores and memory for (1.5 GB each)."""
    available = memory() * 2**20 / 1e9
    if available < 1.5:
        raise InstallError(
            f"{available:.1f} GB of memory available, 1.5 GB needed to compile Horovod: "
            "end other programs, or build on another host that shares this home"
        )
    return max(1, min(usable_cores(), int(available / 1.5)))


def check_build(folder: Path, info: dict, mpi: bool) -> None:
    """Refuse a build that would fail after minutes."""
    check_compilers(info)
    check_disk(folder, 0.1, "the wheel is kept there")
    check_disk(Path(tempfile.gettempdir()), 2, "the build of Horovod takes 1.5 GB while it runs")
    if mpi and shutil.which("mpicxx") is None:
        raise InstallError(
            "MPI=1: mpicxx is missing: sudo apt-get install libopenmpi-dev openmpi-bin"
        )
    if info["cuda"] and info["cuda"] not in CUDA_TOOLS:
        raise InstallError(
            f"torch in {info['prefix']} is built for CUDA {info['cuda']}; the compilers pinned in "
            f"{shown(Path(__file__))} are for {' and '.join(CUDA_TOOLS)}: install the torch of "
            "requirements.txt"
        )


def build_wheel(python: str, info: dict, horovod: str, mpi: bool) -> Path:
    """Compile Horovod in a throw-away environment that sees the torch of `python`."""
    folder = wheel_folder(info)
    check_build(folder, info, mpi)
    jobs = build_jobs()
    message = "  another installation builds Horovod; waiting for it"
    temporary_folder = tempfile.TemporaryDirectory(prefix="horovod-")
    with locked(folder / ".lock", message), temporary_folder as temporary:
        if wheel := find_wheel(info, horovod, mpi):
            return wheel
        build = Path(temporary)
        build_python = str(build / "env" / "bin" / "python")
        run_logged("the tools that build Horovod", [python, "-m", "venv", str(build / "env")])
        site = Path(inspect(build_python)["site"])
        (site / "torch-of-the-environment.pth").write_text(info["site"] + "\n")
        pip = [build_python, "-m", "pip"]
        tools = BUILD_TOOLS + CUDA_TOOLS.get(info["cuda"], [])
        run_logged(None, [*pip, "install", "--ignore-installed", *tools])

        environment = build_settings(build, site, info, mpi, jobs)
        if not has_headers(info):
            environment["CPATH"] = fetch_headers(build, info)
        pinned = build / "horovod.txt"
        pinned.write_text(f"horovod=={horovod} --hash=sha256:{SOURCE_SHA256}\n")
        run_logged(None, [
            *pip, "download", "--no-cache-dir", "--no-deps", "--no-build-isolation",
            "--no-binary=horovod", "--dest", str(build), "-r", str(pinned),
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


def build_settings(build: Path, site: Path, info: dict, mpi: bool, jobs: int) -> dict[str, str]:
    """The environment variables of Horovod's build."""
    compiler = build / "c++"
    standard = cxx_standard(Path(info["site"]))
    compiler.write_text(CXX_WRAPPER.format(cxx=cxx(), standard=standard))
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
            # nvcc knows g++ up to 15; all that it compiles are kernels of a few lines.
            "NVCC_APPEND_FLAGS": f"-std={standard} -allow-unsupported-compiler",
            "HOROVOD_CUDA_HOME": str(cuda),
            "HOROVOD_GPU_OPERATIONS": "NCCL",
            "HOROVOD_NCCL_LINK": "SHARED",
            "HOROVOD_NCCL_HOME": str(nccl),
        })  # fmt: skip
        if "HOROVOD_BUILD_CUDA_CC_LIST" in os.environ:
            settings["HOROVOD_BUILD_CUDA_CC_LIST"] = os.environ["HOROVOD_BUILD_CUDA_CC_LIST"]
    return settings


def cxx_standard(packages: Path) -> str:
    """What torch's headers in site-packages need: c++17 for torch 2.11, c++20 for 2.14."""
    header = packages / "torch/include/torch/csrc/api/include/torch/all.h"
    needed = re.search(r"#error C\+\+(\d+) or later", header.read_text())
    return f"c++{needed[1] if needed else 17}"


def stage_cuda(build: Path, tools: Path, packages: Path) -> tuple[Path, Path]:
    """Folders of CUDA and NCCL as a compiler expects them, linked together from pip's packages.

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
    declare_as_glibc(cuda / "include" / "crt" / "math_functions.h")
    (cuda / "lib64" / "libcudart.so").symlink_to("libcudart.so.13")
    (nccl / "include").symlink_to(packages / "nvidia" / "nccl" / "include")
    (nccl / "lib" / "libnccl.so").symlink_to(packages / "nvidia" / "nccl" / "lib" / "libnccl.so.2")
    return cuda, nccl


def declare_as_glibc(header: Path) -> None:
    """Declare CUDA's rsqrt and rsqrtf as not throwing, as glibc 2.42 does with functions of those
    names: C++ wants both declarations to agree.

    CUDA 13.0 has done so for the functions that came with glibc 2.41.
    """
    text = header.read_text()
    header.unlink()  # a link to pip's file, which stays as it is
    declared = r"(__device_builtin__ \w+ +rsqrtf?\(\w+ x\));"
    header.write_text(re.sub(declared, "\\1\n#if __GLIBC_PREREQ(2, 42)\n__THROW\n#endif\n;", text))


def link_tree(source: Path, target: Path) -> None:
    """Link every file of `source` to the same place in `target`."""
    for file in source.rglob("*"):
        if not file.is_dir():
            place = target / file.relative_to(source)
            place.parent.mkdir(parents=True, exist_ok=True)
            if not place.exists():
                place.symlink_to(file)

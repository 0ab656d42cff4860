"""The installer's decisions, without installing; the set-up itself is what every test runs in."""

from __future__ import annotations

import errno
import hashlib
import os
import shutil
import subprocess
import sys
import tempfile
from contextlib import nullcontext
from pathlib import Path
from types import SimpleNamespace
from typing import Any

import horovod
import pytest
import torch
from packaging.version import Version

from cluster import environment, install, patches, wheel
from cluster.environment import InstallError
from tests.conftest import ROOT, program

# An interpreter that makes environments without their pip, which takes seconds.
PYTHON = f'[ "$1" = -m ] && set -- "$@" --without-pip; exec {sys.executable} "$@"'


def needs(program: str) -> pytest.MarkDecorator:
    return pytest.mark.skipif(not shutil.which(program), reason=f"needs {program}")


def info(**changes: Any) -> dict[str, Any]:
    packages = {"torch": "2.11.0", "nvidia-nccl-cu13": "2.28.9", "hydra-core": "1.3.8"}
    return {
        "python": "3.12.4", "prefix": "/env", "externally_managed": False, "site": "/env/site",
        "include": "/usr/include", "cuda": "13.0", "packages": packages, **changes,
    }  # fmt: skip


class TestWheel:
    def test_its_name_says_all_it_depends_on(self, monkeypatch: pytest.MonkeyPatch) -> None:
        monkeypatch.delenv("HOROVOD_BUILD_CUDA_CC_LIST", raising=False)
        tag = wheel.platform_tag()
        name = wheel.wheel_name(info(), "0.28.1", mpi=False)
        assert name == f"horovod-0.28.1+torch2.11.0.cu130.nccl2.28.9.p97-cp312-cp312-{tag}.whl"
        monkeypatch.setenv("HOROVOD_BUILD_CUDA_CC_LIST", "80,90")
        label = wheel.wheel_name(info(), "0.28.1", mpi=True).split("-")[1]
        assert label == "0.28.1+torch2.11.0.cu130.nccl2.28.9.p97.mpi.sm80.sm90"
        label = wheel.wheel_name(info(cuda=None), "0.28.1", mpi=False).split("-")[1]
        assert label.startswith("0.28.1+torch2.11.0.cpu.p97")

    def test_requirements_look_in_its_folder(self, monkeypatch: pytest.MonkeyPatch) -> None:
        pins = dict(install.read_pins(ROOT / "requirements.txt"))
        packages = {"torch": pins["torch"]}
        folder = wheel.wheel_folder(info(packages=packages, cuda=torch.version.cuda))
        text = (ROOT / "requirements.txt").read_text()
        assert f"--find-links ${{HOME}}/.cache/horovod-wheels/{folder.name}\n" in text


@needs("g++")
@pytest.mark.parametrize(
    ("needed", "defined"), [("C++17", "__cplusplus 201703L"), ("C++20", "__cplusplus 202002L")]
)
def test_the_compiler_is_given_the_standard_of_torchs_headers(
    tmp_path: Path, needed: str, defined: str, monkeypatch: pytest.MonkeyPatch
) -> None:
    """Whatever Horovod's own files ask for."""
    site, build = tmp_path / "site", tmp_path / "build"
    header = site / "torch/include/torch/csrc/api/include/torch/all.h"
    header.parent.mkdir(parents=True)
    header.write_text(f"#error {needed} or later compatible compiler is required to use PyTorch.")
    build.mkdir()
    monkeypatch.setenv("HOROVOD_WITH_MPI", "1")  # of who builds Horovod by other ways
    settings = wheel.build_settings(build, site, info(site=str(site), cuda=None), False, 1)
    assert "HOROVOD_WITH_MPI" not in settings and settings["HOROVOD_WITHOUT_MPI"] == "1"
    command = [settings["CXX"], "-std=c++14", "-x", "c++", "-dM", "-E", "/dev/null"]
    assert defined in subprocess.run(command, capture_output=True, text=True, check=True).stdout


def test_what_is_built_is_the_known_source_and_built_once(
    monkeypatch: pytest.MonkeyPatch, tmp_path: Path
) -> None:
    ran: list[list[str]] = []

    def run_logged(_: str | None, command: list[str], environment: object = None) -> None:
        ran.append(command)
        if "download" in command:
            pinned = Path(command[-1]).read_text()
            assert pinned == f"horovod==0.28.1 --hash=sha256:{wheel.SOURCE_SHA256}\n"
        if "--wheel-dir" in command:
            (Path(command[-2]) / wheel.wheel_name(info(), "0.28.1", mpi=False)).touch()

    fakes = {
        "WHEELS": tmp_path, "run_logged": run_logged, "check_build": lambda *_: None,
        "build_jobs": lambda: 1, "build_settings": lambda *_: {}, "has_headers": lambda _: True,
        "inspect": lambda _: {"site": str(tmp_path)}, "patch": lambda _: None,
    }  # fmt: skip
    for name, fake in fakes.items():
        monkeypatch.setattr(wheel, name, fake)
    monkeypatch.setattr(wheel.shutil, "unpack_archive", lambda *_: None)
    built = wheel.build_wheel("python", info(), "0.28.1", mpi=False)
    assert built.is_file() and any("download" in command for command in ran)
    ran.clear()
    assert wheel.build_wheel("python", info(), "0.28.1", mpi=False) == built and not ran


def test_compilers_fit_into_the_memory(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(wheel, "usable_cores", lambda: 4)
    for mib, jobs in ((100_000, 4), (4_000, 2), (1_500, 1)):
        monkeypatch.setattr(wheel, "memory", lambda mib=mib: mib)
        assert wheel.build_jobs() == jobs
    monkeypatch.setattr(wheel, "memory", lambda: 1_400)
    with pytest.raises(InstallError, match="1.5 GB needed to compile Horovod"):
        wheel.build_jobs()


def test_a_horovod_without_nccl_is_not_taken(monkeypatch: pytest.MonkeyPatch) -> None:
    report = "[X] PyTorch\n[X] Gloo\n[ ] NCCL\n[ ] MPI\n"
    monkeypatch.setattr(install, "run_logged", lambda *_: report)
    install.verify("python", info(cuda=None), mpi=False)
    for asked, mpi, missing in ((info(), False, "NCCL"), (info(cuda=None), True, "MPI")):
        with pytest.raises(InstallError, match=f"--check-build shows no {missing}"):
            install.verify("python", asked, mpi)


class TestUnmet:
    PINS = {"torch": "2.11.0", "hydra-core": "1.3.8", "horovod": "0.28.1"}  # noqa: RUF012

    def environment(self, horovod: str, **versions: str) -> dict[str, Any]:
        return info(packages={**info()["packages"], "horovod": horovod, **versions})

    @pytest.mark.parametrize(
        ("horovod", "mpi", "expected"),
        [
            ("0.28.1+torch2.11.0.cu130.nccl2.28.9.p97", False, []),
            ("0.28.1+torch2.11.0.cu130.nccl2.28.9.p97.mpi", False, []),
            ("0.28.1+torch2.11.0.cu130.nccl2.28.9.p97", True, ["horovod"]),
            ("0.28.1+torch2.10.0.cu130.nccl2.28.9.p97", False, ["horovod"]),
            ("0.28.1+torch2.11.0.cpu.p97", False, ["horovod"]),
            ("0.28.1", False, ["horovod"]),
        ],
    )
    def test_horovod_must_be_built_for_this_torch(
        self, horovod: str, mpi: bool, expected: list[str]
    ) -> None:
        assert install.unmet(self.environment(horovod), self.PINS, mpi) == expected

    def test_other_versions_are_seen(self) -> None:
        good = "0.28.1+torch2.11.0.cu130.nccl2.28.9.p97"
        environment = self.environment(good, **{"hydra-core": "1.3.2"})
        assert install.unmet(environment, self.PINS, False) == ["hydra-core"]

    def test_what_a_forker_adds_is_seen(self, tmp_path: Path) -> None:
        """With or without a version; what only pip can tell is left to it."""
        file = tmp_path / "requirements.txt"
        file.write_text(
            "# a comment\n--find-links x\n\ntorch==2.11.0  # tensors; autograd\ntimm\n"
            "Py_YAML>=6,<7\npeft[all] == 0.21.2\nmine @ git+https://host/mine@main\nx==1.*\n"
            'tomli>=2; python_version < "3.11"\ntomli==2.0; python_version < "3.11"\n'
            "git+https://host/other\n./a.whl\n-e .\n"
        )
        pins = dict(install.read_pins(file))
        assert pins == {
            "torch": "2.11.0", "timm": "", "py-yaml": "", "peft": "0.21.2", "mine": "", "x": ""
        }  # fmt: skip
        environment = self.environment(
            "0.28.1+torch2.11.0.cu130.nccl2.28.9.p97",
            **{"torch": "2.11.0+cu130", "timm": "1.0", "peft": "0.21.1", "mine": "3", "x": "1.2"},
        )
        assert install.unmet(environment, pins, False) == ["py-yaml", "peft"]

    @pytest.mark.parametrize("built_for", ["2.11.0", "2.10.0"])
    def test_a_horovod_that_fits_is_left_alone(
        self, built_for: str, monkeypatch: pytest.MonkeyPatch
    ) -> None:
        """It was tried when it was installed, and its wheel may be gone."""
        environment = self.environment(f"0.28.1+torch{built_for}.cu130.nccl2.28.9.p97")
        pins, steps = {**self.PINS, "timm": ""}, []
        monkeypatch.setattr(install, "run_logged", lambda _, command: steps.append(command))
        monkeypatch.setattr(install, "inspect", lambda python: environment)
        monkeypatch.setattr(install, "find_wheel", lambda *_: Path("/horovod.whl"))
        monkeypatch.setattr(install, "verify", lambda *_: steps.append("verified"))
        install.install_packages("python", environment, pins, [Path("r.txt")], False)
        pip = ["python", "-m", "pip", "install", "-r", "r.txt"]
        assert steps == ([pip] if built_for == "2.11.0" else [[*pip, "/horovod.whl"], "verified"])

    def test_what_the_build_lacks_is_told_before_torch_is_downloaded(
        self, monkeypatch: pytest.MonkeyPatch, tmp_path: Path
    ) -> None:
        """Unless there is a wheel; and Horovod is for the torch that has come."""
        steps: list[Any] = []
        monkeypatch.setattr(install, "WHEELS", tmp_path)
        for name in ("check_disk", "check_compilers"):
            monkeypatch.setattr(install, name, lambda *_, name=name: steps.append(name))
        monkeypatch.setattr(install, "run_logged", lambda _, command: steps.append(command[-1]))
        monkeypatch.setattr(install, "inspect", lambda _: info())
        monkeypatch.setattr(install, "find_wheel", lambda *of: steps.append(of[0]) or Path("w.whl"))
        monkeypatch.setattr(install, "verify", lambda *_: None)
        for checked in (["check_compilers"], []):
            steps.clear()
            install.install_packages("python", info(packages={}), self.PINS, [], mpi=False)
            assert steps == ["check_disk", *checked, "torch==2.11.0", info(), "w.whl"]
            (tmp_path / "torch2.11.0+cu130").mkdir(exist_ok=True)
            (tmp_path / "torch2.11.0+cu130" / "horovod-0.28.1+x-cp312-cp312-y.whl").touch()
        monkeypatch.setattr(install, "inspect", lambda _: info(packages={}))
        with pytest.raises(InstallError, match="has half of a torch: remove that folder"):
            install.install_packages("python", info(packages={}), self.PINS, [], mpi=False)

    def test_torch_and_horovod_need_a_version(
        self, monkeypatch: pytest.MonkeyPatch, tmp_path: Path
    ) -> None:
        (tmp_path / "requirements.txt").write_text("torch>=2.11\nhorovod==0.28.1\n")
        monkeypatch.setattr(install, "ROOT", tmp_path)
        with pytest.raises(InstallError, match="requirements.txt: write torch==VERSION"):
            install.install(None, dev=False, mpi=False)


class TestPatch:
    def sources(self, folder: Path) -> Path:
        """Files that have nothing but the places that are to be changed."""
        for name, old, _ in patches.PATCHES + patches.FAULTS:
            (folder / name).parent.mkdir(parents=True, exist_ok=True)
            with (folder / name).open("a") as file:
                file.write(f"{old};\n")
        return folder

    def test_is_made_at_each_place(self, tmp_path: Path) -> None:
        patches.patch(self.sources(tmp_path))
        for name, _, new in patches.PATCHES + patches.FAULTS:
            assert f"{new};\n" in (tmp_path / name).read_text()
        for header in patches.HEADERS:
            copy = tmp_path / "horovod/common/gloo" / header.name
            assert copy.read_text() == header.read_text()

    def test_has_a_number_of_its_own(self) -> None:
        """Wheels of other patches have other names: count PATCH up with each change."""
        changes = [repr(patches.PATCHES)] + [header.read_text() for header in patches.HEADERS]
        digest = hashlib.sha256("".join(changes).encode()).hexdigest()[:12]
        assert (patches.PATCH, digest) == ("p97", "ad77484a4252")
        # pip compares them as text, by which p10 would be older than p9: p90 came after it.
        assert Version(f"0+{patches.PATCH}") > Version("0+p9")

    @needs("readelf")
    def test_the_library_looks_in_no_folder_of_its_own(self) -> None:
        """That of its build was in /tmp; torch has loaded all that it needs."""
        (library,) = (Path(horovod.__file__).parent / "torch").glob("mpi_lib_v2.*.so")
        done = subprocess.run(["readelf", "-d", library], capture_output=True, text=True)
        assert "libtorch_cpu.so" in done.stdout and "RUNPATH" not in done.stdout

    def test_is_refused_where_the_sources_are_others(self, tmp_path: Path) -> None:
        sources = self.sources(tmp_path)
        (sources / "horovod/common/tensor_queue.cc").write_text("// another release\n")
        with pytest.raises(InstallError, match=r"tensor_queue\.cc .* PATCHES"):
            patches.patch(sources)


class TestNewerSystems:
    """What the sources of 2023 and CUDA 13.0 lack under g++ 16 and glibc 2.43."""

    @needs("g++")
    def test_the_compiler_brings_what_files_forget_to_ask_for(self, tmp_path: Path) -> None:
        compiler = tmp_path / "c++"
        compiler.write_text(wheel.CXX_WRAPPER.format(cxx="g++", standard="c++17"))
        compiler.chmod(0o755)
        code = 'std::uint8_t one() { throw std::logic_error(""); }\n'
        code += "static_assert(__cplusplus == 201703);\n"
        for name, status in (("gloo.cc", 0), ("preprocessed.cpp", 1)):
            (tmp_path / name).write_text(code)
            command = [compiler, "-std=c++11", "-c", tmp_path / name, "-o", tmp_path / "out.o"]
            done = subprocess.run(command, capture_output=True, text=True)
            assert done.returncode == status, done.stderr
        assert "uint8_t" in done.stderr and "static assertion" not in done.stderr

    def test_cudas_functions_are_declared_as_those_of_glibc(self, tmp_path: Path) -> None:
        ours, theirs = tmp_path / "math_functions.h", tmp_path / "theirs.h"
        declared = "extern __device_builtin__ double    rsqrt(double x);"
        theirs.write_text(f"{declared}\n * - rsqrt(x);\n")
        ours.symlink_to(theirs)
        wheel.declare_as_glibc(ours)
        assert theirs.read_text().startswith(declared)  # of the package, as it was
        assert ours.read_text() == (
            "extern __device_builtin__ double    rsqrt(double x)\n"
            "#if __GLIBC_PREREQ(2, 42)\n__THROW\n#endif\n;\n * - rsqrt(x);\n"
        )


class TestMissing:
    """One line, with the package that brings it."""

    @pytest.mark.parametrize("name", ["g++", "make"])
    def test_program(self, monkeypatch: pytest.MonkeyPatch, tmp_path: Path, name: str) -> None:
        monkeypatch.setenv("CXX", "")  # as if it were not set
        for other in {"g++", "make"} - {name}:
            program(tmp_path / other, "")
        monkeypatch.setenv("PATH", str(tmp_path))
        expected = f"{name} is missing.*sudo apt-get install {name.replace('+', '.')}"
        with pytest.raises(InstallError, match=expected.replace("g++", "g..")):
            wheel.check_compilers(info())

    def test_a_compiler_of_several_words(
        self, monkeypatch: pytest.MonkeyPatch, tmp_path: Path
    ) -> None:
        monkeypatch.setenv("CXX", "ccache -v g++")
        monkeypatch.setenv("PATH", str(tmp_path))
        with pytest.raises(InstallError, match=r"ccache -v g\+\+ is missing"):
            wheel.check_compilers(info())
        for name in ("ccache", "make"):
            program(tmp_path / name, "")
        with pytest.raises(InstallError, match="Python.h is missing"):  # which comes next
            wheel.check_compilers(info())

    @pytest.mark.parametrize(("defined", "refused"), [("", True), ("#define __clang__ 1", False)])
    def test_a_compiler_that_is_too_old(
        self, defined: str, refused: bool, monkeypatch: pytest.MonkeyPatch, tmp_path: Path
    ) -> None:
        """As that of RHEL 8; told before the download of torch. Clang only claims to be GCC 4."""
        program(tmp_path / "c++", f"echo '#define __GNUC__ 8'; echo '{defined}'")
        monkeypatch.setenv("CXX", f"{tmp_path}/c++ -m64")
        monkeypatch.setattr(wheel, "has_headers", lambda info: True)
        expected = r"c\+\+ -m64 is of GCC 8, .* need 9 .*CXX=g\+\+-12 make install"
        with pytest.raises(InstallError, match=expected) if refused else nullcontext():
            wheel.check_compilers(info())

    def test_headers(self, monkeypatch: pytest.MonkeyPatch, tmp_path: Path) -> None:
        monkeypatch.setattr(environment, "LOG", tmp_path / "log")
        with pytest.raises(InstallError, match=r"Python\.h .*apt-get install python3.99-dev"):
            wheel.fetch_headers(tmp_path, info(include=str(tmp_path), python="3.99.1"))

    @pytest.mark.parametrize(
        ("end", "anothers", "stays"),
        [
            (KeyboardInterrupt, False, True),
            (InstallError, False, False),
            (InstallError, True, True),
        ],
    )
    def test_a_wheel_whose_check_does_not_end_well_is_uninstalled(
        self, end: type[BaseException], anothers: bool, stays: bool,
        monkeypatch: pytest.MonkeyPatch, tmp_path: Path,
    ) -> None:  # fmt: skip
        """And deleted if it failed, unless it may only be read; why it failed is told."""

        class Anothers(type(Path())):
            def unlink(self, missing_ok: bool = False) -> None:
                raise PermissionError(errno.EACCES, os.strerror(errno.EACCES), str(self))

        def ends(*_: Any) -> None:
            raise end("an all-reduce between 2 processes failed")

        ran: list[list[str]] = []
        built = (Anothers if anothers else Path)(tmp_path / "horovod.whl")
        built.touch()
        monkeypatch.setattr(install, "find_wheel", lambda *_: built)
        monkeypatch.setattr(install, "run_logged", lambda _, command: ran.append(command))
        monkeypatch.setattr(install, "inspect", lambda _: info())
        monkeypatch.setattr(install, "verify", ends)
        pins = {"torch": "2.11.0", "horovod": "0.28.1"}
        with pytest.raises(end, match="an all-reduce between 2 processes failed"):
            install.install_packages("python", info(), pins, [], mpi=False)
        assert ran[-1][-3:] == ["uninstall", "-y", "horovod"] and built.exists() == stays

    def test_python(self) -> None:
        with pytest.raises(InstallError, match="Python 3.9.1 .* need 3.10 to 3.13"):
            environment.check_python(info(python="3.9.1"))

    @pytest.mark.parametrize("site", ["", "lib/site-packages"])
    def test_a_python_that_may_only_be_read(
        self, site: str, monkeypatch: pytest.MonkeyPatch, tmp_path: Path
    ) -> None:
        """As that of a site's module; what is not there yet goes by the folder above it."""
        environment.check_python(info(site=str(tmp_path / site)))
        monkeypatch.setattr(os, "access", lambda path, mode: path != tmp_path)
        with pytest.raises(InstallError, match=f"not write to {tmp_path}.*leave PYTHON= out"):
            environment.check_python(info(site=str(tmp_path / site)))

    @pytest.mark.parametrize("files", [["torch/__init__.py"], ["x-1.0.dist-info/RECORD"]])
    def test_what_an_interrupted_installation_leaves(
        self, monkeypatch: pytest.MonkeyPatch, tmp_path: Path, files: list[str]
    ) -> None:
        """It counts as missing, and is installed again."""
        for name in files:
            (tmp_path / name).parent.mkdir()
            (tmp_path / name).write_text("")
        monkeypatch.setenv("PYTHONPATH", str(tmp_path))
        result = environment.inspect(sys.executable)
        half = "torch/__init__.py" in files
        assert ("torch" in result["packages"], result["cuda"] is None) == (not half, half)

    def test_of_a_package_that_is_there_twice_the_imported_one_counts(
        self, monkeypatch: pytest.MonkeyPatch, tmp_path: Path
    ) -> None:
        """As where an environment sees the system's packages too."""
        (tmp_path / "hydra_core-0.0.1.dist-info").mkdir()
        text = "Metadata-Version: 2.1\nName: hydra-core\nVersion: 0.0.1\n"
        (tmp_path / "hydra_core-0.0.1.dist-info" / "METADATA").write_text(text)
        monkeypatch.setenv("PYTHONPATH", str(tmp_path))
        assert environment.inspect(sys.executable)["packages"]["hydra-core"] == "0.0.1"

    @pytest.mark.parametrize("given", [False, True])
    def test_an_environment_without_pip(
        self, given: bool, monkeypatch: pytest.MonkeyPatch, tmp_path: Path
    ) -> None:
        """Ours was interrupted when it was made; somebody else's is theirs to change."""
        subprocess.run(
            [sys.executable, "-m", "venv", "--without-pip", tmp_path / "disk"], check=True
        )
        (tmp_path / ".venv").symlink_to("disk")
        (tmp_path / ".venv" / "bin" / "activate").unlink()
        installed: list[dict[str, Any]] = []
        monkeypatch.setattr(install, "ROOT", tmp_path)
        for module in (install, environment):
            monkeypatch.setattr(module, "LOG", tmp_path / "logs" / "log")
        pins = {"torch": "2.11.0", "horovod": "0.28.1"}
        monkeypatch.setattr(install, "read_pins", lambda file: pins.items())
        monkeypatch.setattr(
            install, "install_packages", lambda _, info, *__: installed.append(info)
        )
        python = str(tmp_path / ".venv" / "bin" / "python")
        if given:
            with pytest.raises(InstallError, match=f"has no pip: {python} -m ensurepip"):
                install.install(python, dev=False, mpi=False)
            return
        install.install(None, dev=False, mpi=False)
        assert len(installed) == 1 and "pip" in environment.inspect(python)["packages"]
        assert (tmp_path / ".venv" / "bin" / "activate").exists()

    @pytest.mark.parametrize("there", [True, False])
    def test_an_environment_that_is_a_link(
        self, there: bool, monkeypatch: pytest.MonkeyPatch, tmp_path: Path
    ) -> None:
        """To a larger disk, where a home is small."""
        monkeypatch.setattr(sys, "executable", str(program(tmp_path / "python3", PYTHON)))
        link, disk = tmp_path / ".venv", tmp_path / "scratch" / "venv"
        link.symlink_to(disk)
        if there:
            disk.mkdir(parents=True)
        environment.make_environment(link)
        assert link.is_symlink() and (disk / "bin" / "python").exists()

    def test_an_environment_whose_python_is_gone(self, tmp_path: Path) -> None:
        """As after an upgrade: venv would leave the link as it is."""
        (tmp_path / "bin").mkdir()
        (tmp_path / "bin" / "python").symlink_to("/usr/bin/python2.9")
        with pytest.raises(InstallError, match=f"is gone: rm -r {tmp_path}, then make$"):
            environment.make_environment(tmp_path)

    def test_two_at_once_take_turns(self, tmp_path: Path) -> None:
        """The second waits, and says so; the first is in until its input ends."""
        code = (
            "import sys; from pathlib import Path; from cluster.environment import locked\n"
            "with locked(Path(sys.argv[1]), 'waiting'): print('in', flush=True); sys.stdin.read()"
        )
        command = [sys.executable, "-c", code, str(tmp_path / "folder" / "lock")]
        pipes: Any = {"stdin": subprocess.PIPE, "stdout": subprocess.PIPE, "text": True}
        with (
            subprocess.Popen(command, cwd=ROOT, **pipes) as first,
            subprocess.Popen(["sh", "-c", 'read go; exec "$@" < /dev/null', "", *command],
                             cwd=ROOT, **pipes) as second,
        ):  # fmt: skip
            assert first.stdout and first.stdin and second.stdout and second.stdin
            assert first.stdout.readline() == "in\n"
            second.stdin.write("go\n")
            second.stdin.flush()
            assert second.stdout.readline() == "waiting\n"
            first.stdin.close()
            assert second.stdout.readline() == "in\n"
        assert first.returncode == second.returncode == 0

    def test_a_python_that_does_not_run_is_passed_over(
        self, monkeypatch: pytest.MonkeyPatch, tmp_path: Path
    ) -> None:
        """And one of the operating system, whose pip installs nothing, makes environments."""
        programs = tmp_path / "bin"
        for name, line in (("python3", "exit 127"), ("python3.12", PYTHON)):
            program(programs / name, line)
        monkeypatch.setenv("PATH", str(programs))
        inspect = environment.inspect
        managed = {"externally_managed": True}
        monkeypatch.setattr(environment, "inspect", lambda python: inspect(python) | managed)
        monkeypatch.setattr(sys, "executable", str(programs / "python3"))
        environment.make_environment(tmp_path / "env")
        assert (tmp_path / "env" / "bin" / "python").exists()
        (programs / "python3.12").unlink()
        with pytest.raises(InstallError, match="no Python from 3.10 to 3.13 on the PATH"):
            environment.make_environment(tmp_path / "another")

    def test_the_python_that_installs_is_that_of_the_environment(
        self, monkeypatch: pytest.MonkeyPatch, tmp_path: Path
    ) -> None:
        """`python3.13 -m cluster.install`, where python3 is another one."""
        monkeypatch.setattr(environment, "inspect", lambda python: {"python": "3.11.2"})
        interpreters = []

        def run(command: list[str], **_: Any) -> subprocess.CompletedProcess[str]:
            interpreters.append(command[0])
            return subprocess.CompletedProcess(command, 0, "", "")

        monkeypatch.setattr(environment.subprocess, "run", run)
        monkeypatch.setattr(sys, "executable", "/opt/python3.13/bin/python3")
        monkeypatch.setattr(environment.shutil, "which", lambda name: name)
        environment.make_environment(tmp_path / "env")
        assert interpreters == ["/opt/python3.13/bin/python3"]

    def test_a_folder_that_cannot_be_made(
        self, monkeypatch: pytest.MonkeyPatch, tmp_path: Path
    ) -> None:
        (tmp_path / "file").write_text("")

        def fails(*_: Any) -> None:
            (tmp_path / "file" / "wheels").mkdir()

        monkeypatch.setattr(install, "install", fails)
        monkeypatch.setattr(sys, "argv", ["install"])
        with pytest.raises(SystemExit, match="install: .*/file/wheels: Not a directory"):
            install.main()

    def test_a_folder_where_nothing_may_run(
        self, monkeypatch: pytest.MonkeyPatch, tmp_path: Path
    ) -> None:
        """As administrators mount /tmp; told before the download of torch."""
        flags = SimpleNamespace(f_flag=os.ST_NOSUID | os.ST_NOEXEC)
        monkeypatch.setattr(wheel.shutil, "which", lambda program: program)
        monkeypatch.setattr(wheel, "has_headers", lambda info: True)
        monkeypatch.setattr(wheel, "gcc_version", lambda: None)
        monkeypatch.setattr(tempfile, "tempdir", str(tmp_path))
        monkeypatch.setattr(os, "statvfs", lambda path: {str(tmp_path): flags}[path])
        with pytest.raises(InstallError, match=f"{tmp_path} is mounted noexec.*TMPDIR=~/tmp make"):
            wheel.check_compilers(info())

    def test_disk(self, tmp_path: Path) -> None:
        with pytest.raises(InstallError, match="GB free for .*1000000.0 GB needed: why"):
            environment.check_disk(tmp_path, 1e6, "why")

    def test_mpi(self, monkeypatch: pytest.MonkeyPatch, tmp_path: Path) -> None:
        monkeypatch.setattr(wheel, "WHEELS", tmp_path)
        monkeypatch.setattr(wheel, "check_compilers", lambda info: None)
        monkeypatch.setenv("PATH", "")
        with pytest.raises(InstallError, match="apt-get install libopenmpi-dev"):
            wheel.build_wheel("python", info(), "0.28.1", mpi=True)

    def test_interpreter(self) -> None:
        command = [sys.executable, "-m", "cluster.install", "--python", "/nowhere/python"]
        done = subprocess.run(command, cwd=ROOT, capture_output=True, text=True)
        assert done.returncode == 1 and done.stdout == ""
        assert done.stderr.startswith("install: PYTHON=/nowhere/python: No such file")


def test_a_failing_command_names_log_and_telling_lines(
    monkeypatch: pytest.MonkeyPatch, tmp_path: Path
) -> None:
    monkeypatch.setattr(environment, "LOG", tmp_path / "log")
    script = "print('fine'); print('x.cc:3: error: no such header'); raise SystemExit(3)"
    with pytest.raises(InstallError) as caught:
        environment.run_logged("compiling", [sys.executable, "-c", script])
    assert str(caught.value).splitlines()[0] == f"compiling failed, see {tmp_path}/log:"
    assert "x.cc:3: error: no such header" in str(caught.value) and "fine" not in str(caught.value)


def test_done_again_it_installs_nothing() -> None:
    command = [sys.executable, "-m", "cluster.install", "--python", sys.executable]
    done = subprocess.run(command, cwd=ROOT, capture_output=True, text=True)
    assert (done.returncode, done.stdout, done.stderr) == (0, "", "")


def test_a_path_is_shown_from_home_where_there_is_one(monkeypatch: pytest.MonkeyPatch) -> None:
    for home, shown in (("/home/ada", "~/env/bin"), ("/home/a", "/home/ada/env/bin")):
        monkeypatch.setattr(Path, "home", lambda home=home: Path(home))
        assert environment.shown(Path("/home/ada/env/bin")) == shown
    monkeypatch.setattr(Path, "home", lambda: Path("/"))  # as of a user without a name
    assert environment.shown(Path("/opt/env")) == "/opt/env"
    assert environment.shown(environment.ROOT / "logs") == "logs"

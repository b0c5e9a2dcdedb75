"""Builds qao's libraries with CMake and Ninja; everything else about the package is in pyproject.toml.

Environment variables:
    QAO_CUDA: AUTO (default: CUDA kernels where nvcc is found), ON, OFF. A GPU is never needed to build.
    QAO_CUDA_ARCHS, or TORCH_CUDA_ARCH_LIST: GPU architectures of the portable kernels, default "80;90".
    QAO_PYBIND: ON, OFF (no qao._host; the wheel then fits every Python 3), AUTO (default: ON where Python.h is).
    QAO_ARCH: aarch64 builds for it on another machine, with what tools/aarch64/environment.py put into build/aarch64;
        without qao._host and CUDA kernels. Default: this machine's.
    QAO_REPOSITORY: the address of the repository, for the metadata's links. Default: that of the checkout's "origin".
    QAO_SBOM: ON writes a software bill of materials into the wheel (tools/sbom.py); OFF, the default, does not.
    SOURCE_DATE_EPOCH: the time of all files in wheels and source distributions. make sets that of the commit.
    MAX_JOBS: parallel compiler processes, default one a CPU.
    CMAKE_ARGS: more arguments for CMake.
"""

from __future__ import annotations

import gzip
import hashlib
import importlib.util
import os
import platform
import re
import runpy
import shlex
import shutil
import subprocess
import sys
import sysconfig
import tarfile
import time
from pathlib import Path

from setuptools import Extension, setup
from setuptools.command.bdist_wheel import bdist_wheel
from setuptools.command.build_ext import build_ext
from setuptools.command.sdist import sdist

# Before 3.10.6, CPython refuses the functions torch.compile generates for models with thousands of parameters.
if sys.version_info < (3, 10, 6):
    sys.exit(f"qao needs Python 3.10.6 or newer; this is {sys.version.split()[0]} ({sys.executable}).")

if sys.platform != "linux":
    sys.exit(f"qao only runs on Linux; this is {sys.platform}. On Windows use WSL 2, on macOS a Linux container.")

ROOT = Path(__file__).resolve().parent
ARCH = os.environ.get("QAO_ARCH") or platform.machine()
CROSS = platform.machine() != ARCH
if CROSS and not (ROOT / "tools" / ARCH / "toolchain.cmake").exists():
    sys.exit(f"QAO_ARCH={ARCH}: this {platform.machine()} machine builds for itself and aarch64.")


def pybind_wanted() -> bool:
    """Whether qao._host is built. Debian's python3 comes without the headers it needs."""
    choice = os.environ.get("QAO_PYBIND", "AUTO").upper()
    if choice not in ("AUTO", "ON", "OFF"):
        sys.exit(f"QAO_PYBIND={choice} is not one of AUTO, ON, OFF.")
    if CROSS:
        if choice == "ON":
            sys.exit(f"QAO_PYBIND=ON, but there is no Python for {ARCH} to build qao._host with.")
        return False
    header = Path(sysconfig.get_path("include"), "Python.h")
    if choice != "OFF" and not header.exists():
        text = f"{header} is missing (Debian and Ubuntu: apt install python3-dev)"
        if choice == "ON":
            sys.exit(f"QAO_PYBIND=ON, but {text}.")
        print(f"qao: building without qao._host: {text}. The operators do not need it.")
        return False
    return choice != "OFF"


# Of a processor: for a source file on average, and for the largest one.
SECONDS_OF_CPP, SECONDS_OF_CUDA, SECONDS_OF_LARGEST = 1.7, 20, 100

PYBIND = pybind_wanted()
SBOM = os.environ.get("QAO_SBOM", "OFF").upper()
if SBOM not in ("ON", "OFF"):
    sys.exit(f"QAO_SBOM={SBOM} is not one of ON, OFF.")


def find_tool(name: str) -> str:
    """Path of a program, preferably one that pip installed for this Python: the system's may be older."""
    path = os.pathsep.join([str(Path(sys.executable).parent), os.environ.get("PATH", os.defpath)])
    tool = shutil.which(name, path=path)
    if tool is None:
        sys.exit(f"qao: building needs {name}. Install it: pip install {name}")
    return tool


def package_dir(name: str) -> Path:
    """The directory of an installed package, found without the cost of importing it."""
    spec = importlib.util.find_spec(name)
    if spec is None or not spec.submodule_search_locations:
        sys.exit(f"qao: building needs {name}, which {sys.executable} does not have. Install it: pip install {name}")
    return Path(spec.submodule_search_locations[0])


def write_commit(package: Path) -> None:
    """The commit of this checkout, for ``qao.__commit__``; a source distribution holds it already."""
    held = ROOT / "python" / "qao" / "_commit.txt"
    source = runpy.run_path(str(ROOT / "python" / "qao" / "_version.py"))
    commit = held.read_text() if held.exists() else source["of_checkout"](ROOT)
    if commit:
        (package / "_commit.txt").write_text(commit)


def repository() -> str | None:
    """https://... of the repository; None where nothing says."""
    address = os.environ.get("QAO_REPOSITORY")
    if address is None and (ROOT / ".git").exists():
        command = ["git", "-C", str(ROOT), "remote", "get-url", "origin"]
        try:
            address = subprocess.run(command, capture_output=True, text=True).stdout.strip()
        except OSError:  # no git
            return None
    address = re.sub(r"^git@([^:]+):", r"https://\1/", address or "").removesuffix(".git").rstrip("/")
    public = re.fullmatch(r"https://[\w.-]+(?::\d+)?/[\w./-]+", address)  # no password
    return address if public else None


def description(readme: str, address: str | None, version: str) -> str:
    """README.md for an index of packages, where no file lies next to it: links lead into the repository.

    Without its address, links become their text, and images are left out.
    """

    def replace(link: re.Match[str]) -> str:
        image, text, target = link.groups()
        if re.match(r"[a-z]+:|#", target):
            return link[0]
        if address is None:
            return "" if image else text
        return f"{image}[{text}]({address}/{'raw' if image else 'blob'}/v{version}/{target})"

    return re.sub(r"(!?)\[([^\]]*)\]\(([^()\s]+)\)", replace, readme)


def run(command: list[str]) -> None:
    """Runs a step of the build; exits if it fails."""
    if subprocess.run(command).returncode != 0:
        sys.exit("qao: the build failed; the reason is in the messages above.")


def announce(build_dir: Path, jobs: int) -> None:
    """Prints what a configured build compiles and about how long that takes; nothing if all objects exist."""
    rules = (build_dir / "build.ninja").read_text()
    targets = r"^build (CMakeFiles/(?:qao_cpu|qao_plan|qao_cuda_\w+|_C|_host)\.dir/\S+\.o):(.*?)^$"
    missing = {name: rule for name, rule in re.findall(targets, rules, re.M | re.S) if not (build_dir / name).exists()}
    if not missing:
        return
    cuda = sum(name.endswith(".cu.o") for name in missing)
    seconds = (SECONDS_OF_CPP * (len(missing) - cuda) + SECONDS_OF_CUDA * cuda) / jobs
    seconds = max(seconds, SECONDS_OF_LARGEST) if cuda else seconds
    time = f"{seconds / 60:.0f} minutes" if seconds > 90 else f"{seconds:.0f} seconds"
    codes = sorted(set(re.findall(r"code=\[.*?(sm_\w+)", rules)))  # of all files, also those that exist
    alone = "CPUs only" if CROSS else "CPUs only (QAO_CUDA=ON: for GPUs too)"
    what = f"CPUs and GPUs ({', '.join(codes)} and PTX)" if codes else alone
    files = f"{len(missing) - cuda} C++ and {cuda} CUDA files" if cuda else f"{len(missing)} C++ files"
    print(f"qao: building for {what}: {files}, about {time} with {jobs} jobs, less with ccache", flush=True)


class CMakeBuild(build_ext):
    """All extensions in one CMake build, in one directory for each Python and set of options."""

    components: Path  # written by CMake: the contents of the libraries

    def get_ext_filename(self, fullname: str) -> str:
        # _C holds nothing of Python, so its name carries no Python version either.
        if fullname.split(".")[-1] == "_C":
            return os.path.join(*fullname.split(".")) + ".so"
        return str(super().get_ext_filename(fullname))

    def build_extensions(self) -> None:
        options = {
            "CMAKE_BUILD_TYPE": "Debug" if self.debug else "Release",
            "QAO_CUDA": "OFF" if CROSS else os.environ.get("QAO_CUDA", "AUTO").upper(),
            "QAO_CUDA_ARCHS": os.environ.get("QAO_CUDA_ARCHS") or os.environ.get("TORCH_CUDA_ARCH_LIST") or "80;90",
            "QAO_PYBIND": "ON" if PYBIND else "OFF",
        }
        key = hashlib.sha256(f"{ROOT} {sorted(options.items())}".encode()).hexdigest()[:8]
        build_dir = ROOT / "build" / f"cmake-{ARCH if CROSS else sys.implementation.cache_tag}-{key}"
        # Paths stay out of the key: those of pip's isolated builds change every time.
        options["CMAKE_MAKE_PROGRAM"] = find_tool("ninja")
        if CROSS:
            options["CMAKE_TOOLCHAIN_FILE"] = str(ROOT / "tools" / ARCH / "toolchain.cmake")
            options["TORCH_ROOT"] = str(ROOT / "build" / ARCH / "site" / "torch")
        else:
            options["TORCH_ROOT"] = str(package_dir("torch"))
        if PYBIND:
            options["Python_EXECUTABLE"] = sys.executable
            options["pybind11_DIR"] = str(package_dir("pybind11") / "share" / "cmake" / "pybind11")
        jobs = os.environ.get("MAX_JOBS") or str(len(os.sched_getaffinity(0)))

        cmake = find_tool("cmake")
        package = Path(self.build_lib, "qao")
        for stale in package.glob("*.so"):
            stale.unlink()
        definitions = [f"-D{name}={value}" for name, value in options.items()]
        definitions += shlex.split(os.environ.get("CMAKE_ARGS", ""))
        run([cmake, "--log-level=NOTICE", "-G", "Ninja", "-S", str(ROOT), "-B", str(build_dir), *definitions])
        announce(build_dir, int(jobs))
        run([cmake, "--build", str(build_dir), "--parallel", jobs])
        run([cmake, "--install", str(build_dir), "--prefix", str(package.parent), "--strip"])
        self.components = build_dir / "components.txt"
        if not self.inplace:
            write_commit(package)
        cache = (build_dir / "CMakeCache.txt").read_text()
        if not CROSS and options["QAO_CUDA"] == "AUTO" and "QAO_NVCC:FILEPATH=QAO_NVCC-NOTFOUND" in cache:
            text = "nvcc was not found: this build runs on CPUs only. For GPUs, install a CUDA toolkit of 12.4 or newer"
            print(f"\nqao: WARNING: {text}, set CUDA_HOME to it, and build again with QAO_CUDA=ON.\n", file=sys.stderr)


class SourceDistribution(sdist):
    """Equal bytes from equal sources: the archive has no users, no times but one, and no modes of a umask."""

    def make_release_tree(self, base_dir: str, files: list[str]) -> None:
        super().make_release_tree(base_dir, files)
        write_commit(Path(base_dir, "python", "qao"))

    def make_archive(self, base_name: str, format: str, *args: object, base_dir: str, **options: object) -> str:
        if format != "gztar":
            sys.exit(f"setup.py sdist --formats={format}: source distributions of qao are gztar.")
        now = int(os.environ.get("SOURCE_DATE_EPOCH") or time.time())

        def plain(member: tarfile.TarInfo) -> tarfile.TarInfo:
            member.uid = member.gid = 0
            member.uname = member.gname = ""
            member.mtime = now
            member.mode = 0o755 if member.isdir() or member.mode & 0o100 else 0o644
            return member

        path = f"{base_name}.tar.gz"
        Path(path).parent.mkdir(parents=True, exist_ok=True)
        with (
            open(path, "wb") as file,
            gzip.GzipFile("", "wb", fileobj=file, mtime=now) as compressed,
            tarfile.open(fileobj=compressed, mode="w", format=tarfile.PAX_FORMAT) as archive,
        ):
            archive.add(base_dir, filter=plain)  # folders in the order of names
        return path


class Wheel(bdist_wheel):
    """Without _host nothing in the wheel depends on the version of Python."""

    def get_tag(self) -> tuple[str, str, str]:
        python, abi, tag = super().get_tag()
        tag = f"linux_{ARCH}" if CROSS else tag
        return (python, abi, tag) if PYBIND else ("py3", "none", tag)

    def write_wheelfile(self, wheelfile_base: str, *args: object, **options: object) -> None:
        """The last step before the archive, which stores the modes of the files."""
        super().write_wheelfile(wheelfile_base, *args, **options)
        if SBOM == "ON":
            components = self.get_finalized_command("build_ext").components
            bill = runpy.run_path(str(ROOT / "tools" / "sbom.py"))["bill"](VERSION, components)
            folder = Path(wheelfile_base, "sboms")  # PEP 770
            folder.mkdir()
            (folder / "qao.cdx.json").write_text(bill, encoding="utf-8")
        for path in Path(self.bdist_dir).rglob("*"):
            path.chmod(0o755 if path.is_dir() or path.suffix == ".so" else 0o644)


VERSION = runpy.run_path(str(ROOT / "python" / "qao" / "_version.py"))["__version__"]
HOME = repository()
LINKS = {"Source": HOME, "Documentation": f"{HOME}/tree/v{VERSION}/docs", "Issues": f"{HOME}/issues"} if HOME else {}

setup(
    long_description=description((ROOT / "README.md").read_text(encoding="utf-8"), HOME, VERSION),
    long_description_content_type="text/markdown",
    project_urls=LINKS,
    ext_modules=[Extension("qao._C", []), *([Extension("qao._host", [])] if PYBIND else [])],
    cmdclass={"build_ext": CMakeBuild, "bdist_wheel": Wheel, "sdist": SourceDistribution},
)

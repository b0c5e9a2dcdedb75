"""Runs aarch64 tests under the emulator with the wheel in dist/: test.py [pytest's arguments].

Adds qao._host, which the wheel omits so as to fit every Python 3. By default it runs the tests that depend on CPU
kernels, against float64: those marked every_isa at each forced level of QAO_CPU_ISA, and those of operators alone at
the highest. It runs as many levels in parallel as there are CPUs. torch.compile is excluded, since its compiler would
be this machine's.
"""

from __future__ import annotations

import importlib.util
import os
import shutil
import subprocess
import sys
import zipfile
from concurrent.futures import ThreadPoolExecutor
from pathlib import Path

from environment import PYTHON, SITE, SYSTEM

ROOT = Path(__file__).resolve().parents[2]
HOME = ROOT / "build" / "aarch64"
LEVELS = ("neon", "neon_dotprod", "neon_i8mm", "neon_bf16")
EVERY_ISA = ("mm", "outliers", "determinism", "threads_isa")
ONCE = ("host", "scaled_mm", "quantize_ops", "quantize_weight", "int4_pack", "embedding_ops")
AARCH64 = 183  # e_machine of an ELF file


def unpack_wheel(package: Path) -> None:
    """The newest wheel; its name must match its contents."""
    wheels = sorted((ROOT / "dist").glob("qao-*_aarch64.whl"), key=lambda path: path.stat().st_mtime)
    if not wheels:
        sys.exit("There is no wheel for aarch64 in dist/. Build it: make wheel ARCH=aarch64")
    if "-py3-none-manylinux_2_" not in wheels[-1].name:
        sys.exit(f"{wheels[-1].name} is not for every Python 3 on manylinux.")
    shutil.rmtree(package, ignore_errors=True)
    with zipfile.ZipFile(wheels[-1]) as wheel:
        wheel.extractall(package)
    libraries = list(package.rglob("*.so"))
    machines = {int.from_bytes(library.read_bytes()[18:20], "little") for library in libraries}
    if [library.name for library in libraries] != ["_C.so"] or machines != {AARCH64}:
        sys.exit(f"{wheels[-1].name} holds {libraries} for the machines {machines}, not _C.so for {AARCH64}.")


def build_host(package: Path) -> None:
    pybind11 = importlib.util.find_spec("pybind11")
    if pybind11 is None or not pybind11.submodule_search_locations:
        sys.exit(f"{sys.executable} has no pybind11. Install it: pip install pybind11")
    suffix = f".cpython-{PYTHON.replace('.', '')}-aarch64-linux-gnu.so"
    options = {
        "CMAKE_TOOLCHAIN_FILE": ROOT / "tools" / "aarch64" / "toolchain.cmake",
        "CMAKE_CXX_FLAGS": f"-idirafter {SYSTEM}/usr/include",  # where Debian's Python.h finds pyconfig.h
        "TORCH_ROOT": SITE / "torch",
        "QAO_CUDA": "OFF",
        "QAO_PYBIND": "ON",
        "Python_EXECUTABLE": sys.executable,
        "Python_INCLUDE_DIR": SYSTEM / "usr" / "include" / f"python{PYTHON}",
        "PYTHON_MODULE_EXTENSION": suffix,
        "pybind11_DIR": Path(pybind11.submodule_search_locations[0]) / "share" / "cmake" / "pybind11",
    }
    build = HOME / "host"
    path = os.pathsep.join([str(Path(sys.executable).parent), os.environ.get("PATH", os.defpath)])
    cmake = shutil.which("cmake", path=path) or "cmake"
    for command in (
        [cmake, "-S", str(ROOT), "-B", str(build), *(f"-D{name}={value}" for name, value in options.items())],
        [cmake, "--build", str(build), "--target", "_host", "--parallel"],
    ):
        if subprocess.run(command, stdout=subprocess.DEVNULL).returncode != 0:
            sys.exit("qao._host could not be built; the reason is in the messages above.")
    shutil.copy(build / f"_host{suffix}", package / "qao")


def pytest(package: Path, arguments: list[str], isa: str, log: Path | None) -> int:
    environment = {
        **os.environ,
        "PYTHONPATH": str(package),
        "PYTHONDONTWRITEBYTECODE": "1",
        "QAO_CPU_ISA": isa,
        "OMP_NUM_THREADS": "1",  # the tests of threads set their own
    }
    options = ["-p", "no:cacheprovider", "--durations=10", "-k", "not cuda and not test_compile"]
    command = [str(HOME / "python"), "-m", "pytest", *options, *arguments]
    if log is None:
        return subprocess.run(command, cwd=ROOT, env=environment).returncode
    with log.open("w") as output:
        return subprocess.run(command, cwd=ROOT, env=environment, stdout=output, stderr=output).returncode


def main(arguments: list[str]) -> int:
    package = HOME / "package"
    unpack_wheel(package)
    build_host(package)
    if arguments:
        return pytest(package, arguments, "", None)
    runs = {"once": ("", [f"tests/test_{name}.py" for name in ONCE])}
    runs |= {isa: (isa, ["-m", "every_isa", *(f"tests/test_{name}.py" for name in EVERY_ISA)]) for isa in LEVELS}

    def run(name: str) -> int:
        isa, of = runs[name]
        log = HOME / f"test-{name}.log"
        code = pytest(package, of, isa, log)
        print(f"{name}: {log.read_text().strip().splitlines()[-1]} ({log.relative_to(ROOT)})", flush=True)
        return code

    with ThreadPoolExecutor(len(os.sched_getaffinity(0))) as pool:
        return max(pool.map(run, runs))


if __name__ == "__main__":
    sys.exit(main(sys.argv[1:]))

"""Environment to build and test for aarch64 on another machine, in build/aarch64; created once.

    python tools/aarch64/environment.py programs   # the cross compiler, from the system's packages
    python tools/aarch64/environment.py torch      # and torch's own wheel for aarch64, to link with
    python tools/aarch64/environment.py test       # and qemu-user, Python for aarch64 and what tests import

``build/aarch64/python`` is then a Python for aarch64 that runs here, under the emulator. Its torch is the wheel that
`pip install torch` gives on such a machine. That one needs CUDA's libraries; empty ones take their place, and all
their functions report that there is no device.
"""

from __future__ import annotations

import os
import shutil
import subprocess
import sys
import zipfile
from pathlib import Path

ROOT = Path(__file__).resolve().parents[2]
HOME = ROOT / "build" / "aarch64"
SYSTEM = HOME / "system"  # Debian's files
SITE = HOME / "site"  # packages of PyPI
TORCH = "torch==2.13.0"
PYTHON = "3.11"  # of Debian 12
PACKAGES = (
    *("pytest", "iniconfig", "pluggy", "packaging", "pygments", "numpy", "safetensors", "tqdm", "setuptools<82"),
    *("typing_extensions", "filelock", "sympy", "mpmath", "networkx", "jinja2", "markupsafe", "fsspec"),
)
DEBIAN = (
    *("libc6", "libgcc-s1", "libstdc++6", f"python{PYTHON}", f"python{PYTHON}-minimal", "zlib1g", "libexpat1"),
    *(
        f"libpython{PYTHON}-minimal",
        f"libpython{PYTHON}-stdlib",
        f"libpython{PYTHON}-dev",
        "libffi8",
        "libssl3",
        "libbz2-1.0",
        "liblzma5",
    ),
    *("libsqlite3-0", "libuuid1", "libcrypt1", "libtinfo6", "libncursesw6", "libreadline8"),
)
EMULATOR = "qemu-aarch64-static"
NO_DEVICE = 100  # cudaErrorNoDevice


def run(*command: str | Path, **options: object) -> str:
    result = subprocess.run([str(part) for part in command], stdout=subprocess.PIPE, text=True, **options)  # type: ignore[call-overload]
    if result.returncode != 0:
        sys.exit(f"{' '.join(map(str, command))}: exit status {result.returncode}")
    return str(result.stdout)


def install(program: str, package: str) -> None:
    if shutil.which(program):
        return
    as_root = [] if os.geteuid() == 0 else ["sudo", "-n"]
    run(*as_root, "apt-get", "update", "-qq")
    run(*as_root, "apt-get", "install", "-y", "-qq", "--no-install-recommends", package)


def unpack_wheels(*requirements: str) -> None:
    wheels = HOME / "wheels"
    platforms = [f"--platform={name}_aarch64" for name in ("manylinux_2_28", "manylinux_2_17", "manylinux2014")]
    pip = [sys.executable, "-m", "pip", "download", "-q", "--no-deps", "--only-binary=:all:", *platforms]
    run(*pip, f"--python-version={PYTHON}", "-d", wheels, *requirements)
    for wheel in wheels.glob("*.whl"):
        with zipfile.ZipFile(wheel) as archive:
            archive.extractall(SITE)
        wheel.unlink()


def unpack_debian() -> None:
    """Use apt with this machine's sources but separate lists, so that its packages stay unchanged."""
    apt = HOME / "apt"
    for folder in ("lists/partial", "archives/partial"):
        (apt / folder).mkdir(parents=True, exist_ok=True)
    (apt / "status").touch()
    (apt / "apt.conf").write_text(
        f'APT::Architecture "arm64"; APT::Architectures {{ "arm64"; }};\n'
        f'Dir::State "{apt}"; Dir::State::status "{apt}/status"; Dir::Cache "{apt}";\n'
    )
    environment = {**os.environ, "APT_CONFIG": str(apt / "apt.conf")}
    run("apt-get", "update", "-qq", env=environment)
    run("apt-get", "download", "-qq", *DEBIAN, env=environment, cwd=apt)
    for package in apt.glob("*.deb"):
        run("dpkg", "-x", package, SYSTEM)
    shutil.rmtree(apt)


def symbols(library: Path, kind: str) -> set[str]:
    lines = run("aarch64-linux-gnu-nm", "-D", kind, library).splitlines()
    return {line.split()[-1].split("@")[0] for line in lines}


def needed(library: Path) -> set[str]:
    lines = run("aarch64-linux-gnu-readelf", "-d", library).splitlines()
    return {line.split("[")[1].rstrip("]") for line in lines if "(NEEDED)" in line}


def replace_cuda() -> None:
    """Empty libraries under the names that torch's wheel needs, and one with all their functions."""
    folder = SITE / "torch" / "lib"
    functions_of_all = "libno_cuda.so"
    for path in folder.glob("*.so*"):  # of a run before
        if path.name == functions_of_all or functions_of_all in needed(path):
            path.unlink()
    torch = sorted(folder.glob("*.so*"))
    system = {path.name: path for path in (SYSTEM / "lib").rglob("*.so*")}
    system |= {path.name: path for path in (SYSTEM / "usr" / "lib").rglob("*.so.*")}
    everything = set().union(*map(needed, torch)) - {path.name for path in torch}
    there = [*torch, *(system[name] for name in everything if name in system)]
    missing = set().union(*(symbols(path, "--undefined-only") for path in torch))
    missing -= set().union(*(symbols(path, "--defined-only") for path in there))
    functions = sorted(name for name in missing if name.startswith(("cu", "nccl", "nv", "__cuda")))
    source = "".join(f".globl {name}\n.type {name}, %function\n{name}:\n" for name in functions)

    def link(name: str, *inputs: str | Path) -> None:
        compiler = ("aarch64-linux-gnu-gcc", "-shared", "-nostdlib", "-Wl,--no-as-needed", "-Wl,-rpath,$ORIGIN")
        run(*compiler, f"-Wl,-soname,{name}", "-o", folder / name, *inputs)

    assembly = HOME / "no_cuda.s"
    assembly.write_text(f".text\n{source}mov w0, #{NO_DEVICE}\nret\n")
    # The loader checks versions against the library of a name, so the functions must lie in one of another name.
    link(functions_of_all, assembly)
    empty = HOME / "empty.s"
    empty.write_text("")
    for name in sorted(everything - set(system)):
        link(name, empty, folder / functions_of_all)


def write_cpu() -> None:
    """Linux's CPU information: the emulator shows files below its -L folder in place of this machine's."""
    features = "fp asimd aes pmull sha1 sha2 crc32 atomics fphp asimdhp asimdrdm asimddp i8mm bf16"
    text = f"Features\t: {features}\nCPU implementer\t: 0x41\nCPU architecture: 8\nCPU variant\t: 0x0\n"
    text += "CPU part\t: 0xd49\nCPU revision\t: 0\n"
    cpus = range(os.cpu_count() or 1)
    (SYSTEM / "proc").mkdir(exist_ok=True)
    (SYSTEM / "proc" / "cpuinfo").write_text("".join(f"processor\t: {i}\n{text}\n" for i in cpus))
    for i in cpus:
        registers = SYSTEM / "sys" / "devices" / "system" / "cpu" / f"cpu{i}" / "regs" / "identification"
        registers.mkdir(parents=True, exist_ok=True)
        (registers / "midr_el1").write_text("0x00000000410fd490\n")  # Neoverse N2


def write_python() -> None:
    """As a script, so that tests start more of it by sys.executable."""
    script = HOME / "python"
    emulator = f'{EMULATOR} -cpu max,sve=off -0 "{script}" -E PYTHONHOME="{SYSTEM}/usr" -L "{SYSTEM}"'
    path = f'PYTHONPATH="${{PYTHONPATH:+$PYTHONPATH:}}{SITE}"'
    script.write_text(f'#!/bin/sh\n{path} exec {emulator} "{SYSTEM}/usr/bin/python{PYTHON}" "$@"\n')
    script.chmod(0o755)


def once(name: str, *steps: object) -> None:
    """Runs the steps unless they were run before with this very file."""
    stamp = HOME / f"made-{name}"
    recipe = Path(__file__).read_text()
    if stamp.exists() and stamp.read_text() == recipe:
        return
    for step in steps:
        step()  # type: ignore[operator]
    HOME.mkdir(parents=True, exist_ok=True)
    stamp.write_text(recipe)


def main(target: str) -> None:
    if target not in ("programs", "torch", "test"):
        sys.exit(__doc__)
    install("aarch64-linux-gnu-g++", "g++-aarch64-linux-gnu")
    if target in ("torch", "test"):
        once("torch", lambda: unpack_wheels(TORCH))
    if target == "test":
        install(EMULATOR, "qemu-user-static")
        once("test", lambda: unpack_wheels(*PACKAGES), unpack_debian, replace_cuda, write_cpu, write_python)


if __name__ == "__main__":
    main(sys.argv[1] if len(sys.argv) == 2 else "")

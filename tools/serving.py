"""Download of vLLM's and SGLang's Python sources for their tests: ``python tools/serving.py FOLDER [--all]``.

pip downloads their wheels (375 MB, some seconds), and the Python files are kept (140 MB). Neither package is installed:
no test needs their gigabytes of dependencies, which also conflict with versions that the tests use.
"""

from __future__ import annotations

import subprocess
import sys
import tempfile
from pathlib import Path
from zipfile import ZipFile

# The versions that qao is tested with. The first is that of `make test`; tools/engines.py runs all. SGLang 0.5.16 is
# the newest that is built for torch 2.11.
SOURCES = {
    "vllm": ("0.33.0", "0.32.0", "0.31.0", "0.30.0"),
    "sglang": ("0.5.23", "0.5.22", "0.5.21", "0.5.20", "0.5.16"),
}
# The oldest Python these run on.
PYTHON = (3, 11)


# Whatever this machine is: the Python files are the same in all wheels.
WHEELS = (
    *("--platform", "manylinux_2_34_x86_64", "--platform", "manylinux_2_28_x86_64"),
    *("--python-version", "3.11", "--implementation", "cp", "--abi", "cp311", "--abi", "abi3"),
)


def fetch(package: str, version: str, folder: Path) -> None:
    target = folder / f"{package}-{version}"
    if target.exists():
        return
    with tempfile.TemporaryDirectory(dir=folder) as here:
        pip = [sys.executable, "-m", "pip", "download", "-q", "--no-deps", "--only-binary=:all:", *WHEELS, "-d", here]
        subprocess.run([*pip, f"{package}=={version}"], check=True)
        (wheel,) = Path(here).glob("*.whl")
        unpacked = Path(here, "unpacked")
        with ZipFile(wheel) as archive:
            for name in archive.namelist():
                Path(unpacked, name).parent.mkdir(parents=True, exist_ok=True)  # SGLang looks whether some are there
                if name.endswith((".py", "/METADATA")):
                    archive.extract(name, unpacked)
        unpacked.rename(target)


def main(folder: Path, every: bool) -> None:
    if sys.version_info < PYTHON:
        print(f"vLLM and SGLang need Python {'.'.join(map(str, PYTHON))}: their tests are left out")
        return
    folder.mkdir(parents=True, exist_ok=True)
    for package, versions in SOURCES.items():
        for version in versions if every else versions[:1]:
            fetch(package, version, folder)


if __name__ == "__main__":
    main(Path(sys.argv[1]), "--all" in sys.argv[2:])

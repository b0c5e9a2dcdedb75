"""Runs tests for aarch64 under the emulator, with the wheel in dist/: tools/aarch64/test.py [pytest's arguments].

By default the share of the suite that sees CPU kernels: every operator at every instruction set that the emulator has,
against float64.
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
NAMES = ("mm", "scaled_mm", "outliers", "quantize_ops", "quantize_weight", "int4_pack", "embedding_ops", "threads_isa")
TESTS = [f"tests/test_{name}.py" for name in NAMES]


def main(arguments: list[str]) -> int:
    wheels = sorted((ROOT / "dist").glob("qao-*_aarch64.whl"), key=lambda path: path.stat().st_mtime)
    if not wheels:
        sys.exit("There is no wheel for aarch64 in dist/. Build it: make wheel ARCH=aarch64")
    package = HOME / "package"
    shutil.rmtree(package, ignore_errors=True)
    with zipfile.ZipFile(wheels[-1]) as wheel:
        wheel.extractall(package)
    environment = {**os.environ, "PYTHONPATH": str(package), "PYTHONDONTWRITEBYTECODE": "1"}
    command = [str(HOME / "python"), "-m", "pytest", "-p", "no:cacheprovider", *(arguments or TESTS)]
    return subprocess.run(command, cwd=ROOT, env=environment).returncode


if __name__ == "__main__":
    sys.exit(main(sys.argv[1:]))

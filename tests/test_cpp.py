"""Builds and runs the C++ tests (tests/cpp): the packed layout and the plans, without a GPU."""

from __future__ import annotations

import os
import shutil
import subprocess
import sys
import warnings
from pathlib import Path

import pytest
import torch

ROOT = Path(__file__).resolve().parents[1]
BUILD = ROOT / "build" / "cpp-tests"


def run(*command: str | Path) -> str:
    result = subprocess.run(command, capture_output=True, text=True)
    output = result.stdout + result.stderr
    if "doctestConfig.cmake" in output and not os.environ.get("CI"):
        reason = "doctest, the C++ test framework, is not installed (Debian and Ubuntu: apt install doctest-dev)"
        warnings.warn(f"C++ tests skipped: {reason}", stacklevel=2)  # pytest shows warnings, but not why it skipped
        pytest.skip(reason)
    assert result.returncode == 0, output
    return output


def test_cpp() -> None:
    path = os.pathsep.join([str(Path(sys.executable).parent), os.environ.get("PATH", os.defpath)])
    cmake, ninja = shutil.which("cmake", path=path), shutil.which("ninja", path=path)
    assert cmake and ninja, "the C++ tests need cmake and ninja: pip install cmake ninja"
    options = {
        "CMAKE_MAKE_PROGRAM": ninja,
        "TORCH_ROOT": Path(torch.__file__).parent,
        "QAO_TESTS": "ON",
        "QAO_CUDA": "OFF",
    }
    run(cmake, "-G", "Ninja", "-S", ROOT, "-B", BUILD, *(f"-D{name}={value}" for name, value in options.items()))
    run(cmake, "--build", BUILD, "--target", "qao_tests")
    assert "Status: SUCCESS" in run(BUILD / "tests" / "cpp" / "qao_tests")

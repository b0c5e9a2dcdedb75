"""Runs smaller GPU tests of the operators under compute-sanitizer: ``python tests/gpu_sanitize.py memcheck racecheck``.

Needs a GPU, compute-sanitizer and pytest-xdist. The tools slow kernels down a hundredfold, so every nth test is run
(``--every``); only the kernels of qao are looked at, and each tensor is an allocation of its own, so that memcheck sees
what passes its end. Exit status 1 if a tool found an error or a test failed.
"""

from __future__ import annotations

import argparse
import os
import re
import subprocess
import sys
import tempfile
from pathlib import Path
from typing import Any

TESTS = Path(__file__).resolve().parent
FILES = ("test_mm.py", "test_scaled_mm.py", "test_quantize_ops.py", "test_int4_pack.py", "test_determinism.py")
TOOLS = ("memcheck", "racecheck", "initcheck", "synccheck")
_LARGE = re.compile(r"m(1000|4096)-|graph")  # a graph cannot be captured where each tensor is allocated on its own
_EVERY = "QAO_SANITIZE_EVERY"  # for the plugin in the worker processes
_SUMMARY = re.compile(r"(?:ERROR SUMMARY: (\d+) error|RACECHECK SUMMARY: (\d+) hazard)")


def pytest_collection_modifyitems(items: list[Any]) -> None:
    """As a pytest plugin: keeps every nth of the smaller tests that run on a GPU."""
    small = [item for item in items if "cuda" in item.nodeid and not _LARGE.search(item.nodeid)]
    items[:] = small[:: int(os.environ[_EVERY])]


def run(tool: str, every: int, workers: int) -> bool:
    """Whether the tool found nothing and all tests passed; prints both."""
    with tempfile.TemporaryDirectory() as folder:
        sanitizer = ["compute-sanitizer", "--tool", tool, "--target-processes", "all", "--kernel-regex", "kns=qao"]
        pytest = [
            sys.executable,
            "-m",
            "pytest",
            "-q",
            "-p",
            "gpu_sanitize",
            "-p",
            "no:cacheprovider",
            "-n",
            str(workers),
        ]
        paths = os.pathsep.join((str(TESTS), os.environ.get("PYTHONPATH", "")))
        environment = os.environ | {"PYTHONPATH": paths, "PYTORCH_NO_CUDA_MEMORY_CACHING": "1", _EVERY: str(every)}
        command = [*sanitizer, "--log-file", f"{folder}/%p", *pytest, *(str(TESTS / file) for file in FILES)]
        tests = subprocess.run(command, env=environment, capture_output=True, text=True)
        logs = [log.read_text() for log in sorted(Path(folder).iterdir())]
    found = [int(one or other) for log in logs for one, other in _SUMMARY.findall(log)]
    last = tests.stdout.strip().rpartition("\n")[2]
    print(f"{tool}: {sum(found)} errors in {len(found)} processes; {last}", flush=True)
    if any(found):
        print(next(log for log in logs if any(int(a or b) for a, b in _SUMMARY.findall(log)))[:4000])
    return bool(found) and not any(found) and tests.returncode == 0


def main() -> int:
    parser = argparse.ArgumentParser(description=__doc__.splitlines()[0] if __doc__ else None)
    parser.add_argument("tools", nargs="*", choices=TOOLS, default=TOOLS)
    parser.add_argument("--every", type=int, default=8, metavar="N", help="run every Nth test; default 8")
    parser.add_argument("--workers", type=int, default=os.cpu_count(), metavar="N", help="processes")
    arguments = parser.parse_args()
    return 0 if all([run(tool, arguments.every, arguments.workers) for tool in arguments.tools]) else 1


if __name__ == "__main__":
    sys.exit(main())

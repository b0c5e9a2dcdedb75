"""Runs smaller GPU tests of the operators under compute-sanitizer: ``python tests/gpu_sanitize.py memcheck racecheck``.

Needs a GPU and compute-sanitizer. The tools slow kernels down a hundredfold, so a tool runs as many tests as its time
allows (``--seconds``), in an order shuffled by ``--seed``, in several processes side by side. Only the kernels of qao
are looked at, except by initcheck, which must see who writes; each tensor is an allocation of its own, so that memcheck
sees what passes its end. Exit status 1 if a tool found an error or a test failed.
"""

from __future__ import annotations

import argparse
import os
import random
import re
import subprocess
import sys
import tempfile
import time
from pathlib import Path
from typing import Any

import pytest

TESTS = Path(__file__).resolve().parent
FILES = ("test_mm.py", "test_scaled_mm.py", "test_quantize_ops.py", "test_int4_pack.py", "test_determinism.py")
TOOLS = ("memcheck", "racecheck", "initcheck", "synccheck")
_LARGE = re.compile(r"m(1000|4096)-|graph")  # a graph cannot be captured where each tensor is allocated on its own
_SHARE = "QAO_SANITIZE_SHARE"  # "first:step:seed:end": the tests of a process, and when it is to end
_SUMMARY = re.compile(r"(?:ERROR SUMMARY: (\d+) error|RACECHECK SUMMARY: (\d+) hazard)")
_TESTS = re.compile(r"(\d+) passed")
_NAMES = re.compile(r"^\S+::.*(?:PASSED|FAILED|ERROR).*$", re.MULTILINE)


def pytest_collection_modifyitems(items: list[Any]) -> None:
    """As a pytest plugin: keeps this process's share of the smaller tests that run on a GPU."""
    first, step, seed, _ = map(int, os.environ[_SHARE].split(":"))
    smaller = [item for item in items if "cuda" in item.nodeid and not _LARGE.search(item.nodeid)]
    random.Random(seed).shuffle(smaller)
    items[:] = smaller[first::step]


def pytest_runtest_setup() -> None:
    """As a pytest plugin: starts no test past the end."""
    if time.time() > int(os.environ[_SHARE].split(":")[3]):
        pytest.skip("out of time")


def run(tool: str, arguments: argparse.Namespace) -> bool:
    """Whether the tool found nothing and all tests passed; prints both."""
    workers, end = arguments.workers, int(time.time()) + arguments.seconds
    command = ["compute-sanitizer", "--tool", tool, "--print-limit", "3", "--show-backtrace", "no"]
    command += ["--racecheck-report", "all"] if tool == "racecheck" else []
    command += ["--kernel-name", "kns=qao"] if tool != "initcheck" else []
    tests = [sys.executable, "-m", "pytest", "-vv", "-p", "gpu_sanitize", "-p", "no:cacheprovider"]
    tests += ["-k", arguments.k] if arguments.k else []
    paths = os.pathsep.join((str(TESTS), os.environ.get("PYTHONPATH", "")))
    environment = os.environ | {"PYTHONPATH": paths, "PYTORCH_NO_CUDA_MEMORY_CACHING": "1"}
    with tempfile.TemporaryDirectory() as folder:
        processes = [
            subprocess.Popen(
                [*command, "--log-file", f"{folder}/{worker}", *tests, *(str(TESTS / file) for file in FILES)],
                env=environment | {_SHARE: f"{worker}:{workers}:{arguments.seed}:{end}"},
                stdout=subprocess.PIPE,
                stderr=subprocess.STDOUT,
                text=True,
            )
            for worker in range(workers)
        ]
        outputs = [process.communicate()[0] for process in processes]
        files = [Path(folder) / str(worker) for worker in range(workers)]
        logs = [file.read_text() if file.exists() else "" for file in files]
    passed = sum(int(count) for output in outputs for count in _TESTS.findall(output))
    # A log without a summary is a process that did not get to its end.
    found = [sum(int(one or other) for one, other in _SUMMARY.findall(log) or [("1", "")]) for log in logs]
    print(f"{tool}: {sum(found)} errors; {passed} tests passed in {workers} processes", flush=True)
    failed = [output for output, process in zip(outputs, processes, strict=True) if process.returncode]
    for log, output, errors in zip(logs, outputs, found, strict=True):
        if errors:
            print(f"{errors} errors in", *_NAMES.findall(output), log[-4000:], sep="\n", flush=True)
            break
    for output in failed[:1]:
        print(output[-4000:], flush=True)
    return bool(passed) and not any(found) and not failed


def main() -> int:
    parser = argparse.ArgumentParser(description=__doc__.splitlines()[0] if __doc__ else None)
    parser.add_argument("tools", nargs="*", choices=TOOLS, default=TOOLS)
    parser.add_argument("--seconds", type=int, default=120, metavar="N", help="of each tool; default 120")
    parser.add_argument("--seed", type=int, default=0, metavar="N", help="of the order of tests; default 0")
    parser.add_argument("-k", metavar="EXPRESSION", help="only tests that pytest's -k would choose")
    parser.add_argument("--workers", type=int, default=8, metavar="N", help="processes; default 8")
    arguments = parser.parse_args()
    return 0 if all([run(tool, arguments) for tool in arguments.tools]) else 1


if __name__ == "__main__":
    sys.exit(main())

"""Runner of GPU tests under compute-sanitizer: ``python tests/gpu_sanitize.py memcheck racecheck``.

Needs a GPU and compute-sanitizer. The tools slow kernels down a hundredfold, so only the smaller tests run, as many as
fit into ``--seconds``, in an order shuffled by ``--seed`` and in parallel processes. Each tensor has its own
allocation, so that memcheck detects accesses past its end. The exit status is 1 if a tool found an error or a test
failed.
"""

from __future__ import annotations

import argparse
import os
import random
import re
import subprocess
import sys
import time
from pathlib import Path
from typing import Any, NamedTuple

TESTS = Path(__file__).resolve().parent
FILES = (
    "test_mm.py",
    "test_norm_product.py",
    "test_scaled_mm.py",
    "test_quantize_ops.py",
    "test_int4_pack.py",
    "test_embedding_ops.py",
    "test_determinism.py",
    "test_grouped_ops.py",
    "test_quantize_in_place.py",
    "test_quantize_weight.py",
)
TOOLS = ("memcheck", "racecheck", "initcheck", "synccheck")
_LARGE = re.compile(r"m(1000|4096)-|graph")  # a graph cannot be captured where each tensor is allocated on its own
# initcheck must see who writes, racecheck fails in kernels that it left alone.
_ONLY_QAO = ("memcheck", "synccheck")
_SHARE = "QAO_SANITIZE_SHARE"  # "first:step:seed:end": the tests of a process, and when it is to end
_TESTS = re.compile(r"(\d+) passed")
_REPORT = re.compile(r"^=+ (?!Error: process).*(?:Invalid|Uninit|hazard detected|Barrier error|Internal|Error:)")
_SUMMARY = re.compile(r"^=+ (?:ERROR|RACECHECK) SUMMARY: (\d+)")
_SPLIT_K = re.compile(r"qao::gemm::sm80_mma::.*Tile<((?:\(int\)\d+(?:, )?)+)>")  # warps along N, M and K first
_THREAD = re.compile(r"(?:Read|Write) Thread \((\d+),0,0\)")


def share() -> list[int]:
    return [int(number) for number in os.environ[_SHARE].split(":")]


def pytest_collection_modifyitems(items: list[Any]) -> None:
    """Pytest plugin: keeps this process's share of the smaller GPU tests."""
    first, step, seed, _ = share()
    smaller = [item for item in items if "cuda" in item.nodeid and not _LARGE.search(item.nodeid)]
    random.Random(seed).shuffle(smaller)
    items[:] = smaller[first::step]


def pytest_runtest_protocol() -> bool | None:
    """Pytest plugin: tests that would begin after the end of the time neither run nor appear in the report."""
    return True if time.time() > share()[3] else None


def run(tool: str, arguments: argparse.Namespace) -> bool:
    """Whether the tool found nothing and all tests passed; prints both."""
    workers, end = arguments.workers, int(time.time()) + arguments.seconds
    command = ["compute-sanitizer", "--tool", tool, "--print-limit", "100000", "--show-backtrace", "no"]
    command += ["--racecheck-report", "hazard"] if tool == "racecheck" else []
    command += ["--kernel-name", "kns=qao"] if tool in _ONLY_QAO else []
    tests = [sys.executable, "-m", "pytest", "-vv", "-p", "gpu_sanitize", "-p", "no:cacheprovider"]
    tests += ["-k", arguments.k] if arguments.k else []
    paths = os.pathsep.join((str(TESTS), os.environ.get("PYTHONPATH", "")))
    environment = os.environ | {
        "PYTHONPATH": paths,
        "PYTHONUNBUFFERED": "1",
        "PYTORCH_NO_CUDA_MEMORY_CACHING": "1",
    }
    processes = [
        subprocess.Popen(
            [*command, *tests, *(str(TESTS / file) for file in FILES)],
            env=environment | {_SHARE: f"{worker}:{workers}:{arguments.seed}:{end}"},
            stdout=subprocess.PIPE,
            stderr=subprocess.STDOUT,
            text=True,
        )
        for worker in range(workers)
    ]
    outputs = [process.communicate()[0].splitlines() for process in processes]
    passed = sum(int(count) for lines in outputs for line in lines for count in _TESTS.findall(line))
    verdicts = [judge(tool, lines) for lines in outputs]
    errors, known = sum(verdict.errors for verdict in verdicts), sum(verdict.known for verdict in verdicts)
    print(f"{tool}: {errors} errors ({known} known to be none); {passed} tests passed in {workers} processes")
    for lines, process, verdict in zip(outputs, processes, verdicts, strict=True):
        if verdict.errors or process.returncode:
            print(
                *(line for report in verdict.reports[:2] for line in report), "...", *lines[-12:], sep="\n", flush=True
            )
    return bool(passed) and not errors and not any(process.returncode for process in processes)


class Verdict(NamedTuple):
    errors: int
    known: int  # number of known false positives
    reports: list[list[str]]  # of errors


def judge(tool: str, lines: list[str]) -> Verdict:
    """Verdict on a process from its output. One without a summary did not finish, which counts as an error."""
    found = reports_of(lines)
    reports = [report for report in found if counts(tool, report)]
    known = len(found) - len(reports)
    summary = [int(match[1]) for match in map(_SUMMARY.match, lines) if match]
    if not summary:
        return Verdict(len(reports) + 1, known, reports)
    # What the tool counted, where it is not known to be wrong: a report of a new kind may look different.
    return Verdict(len(reports) if known else max(len(reports), *summary), known, reports)


def reports_of(lines: list[str]) -> list[list[str]]:
    """The tool's reports, each with the test in which it appeared."""
    reports, test = [], ""
    for i, line in enumerate(lines):
        before, mark, said = line.partition("=========")  # pytest's line may be unfinished
        test = before.strip() if ".py::" in before else test
        if _REPORT.match(mark + said):
            block = lines[i + 1 : i + 12]
            end = next((n for n, below in enumerate(block) if below.strip() == "========="), len(block))
            reports.append([test, mark + said, *block[:end]])
    return reports


def counts(tool: str, report: list[str]) -> bool:
    """Whether a report is of qao's kernels and not a known false positive of the tool.

    initcheck does not see cuBLAS's TMA writes, which torch's kernels then read in the tests. racecheck reports hazards
    inside cuBLAS's kernels (nvjet), and loses a __syncthreads if barriers of a part of the CTA are also used, as by the
    K slices of the portable tiles, which synchronize nowhere else (docs/kernels/lessons.md, tools).
    """
    text = "\n".join(report)
    if tool == "initcheck":
        return "Uninit" not in text or "qao::" in text
    if "hazard" in text and "nvjet" in text and "qao::" not in text:
        return False
    tile, threads = _SPLIT_K.search(text), [int(thread) for thread in _THREAD.findall(text)]
    if tool != "racecheck" or tile is None or len(threads) != 2:
        return True
    warps_n, warps_m, warps_k = (int(number) for number in re.findall(r"\)(\d+)", tile[1])[:3])
    slice_threads = 32 * warps_n * warps_m
    return warps_k == 1 or slice_threads == 32 or threads[0] // slice_threads == threads[1] // slice_threads


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

"""Runner of GPU tests under compute-sanitizer: ``python tests/gpu_sanitize.py`` writes tests/gpu_sanitize.json.

Needs a GPU and compute-sanitizer; ``memcheck racecheck`` runs these two tools only. The tools slow kernels down a
hundredfold, so only the smaller tests run, as many as fit into ``--seconds``, in an order shuffled by ``--seed`` that
begins with every operator. All tools run at the same time, each in ``--workers`` processes. Each tensor has its own
allocation, so that memcheck detects accesses past its end. The exit status is 1 if a tool found an error, a test
failed, or no test called an operator that has CUDA kernels. ``--check`` says whether all of that is in the file; it
needs neither torch nor a GPU.
"""

from __future__ import annotations

import argparse
import json
import os
import re
import signal
import subprocess
import sys
import tempfile
import time
from collections import Counter
from collections.abc import Sequence
from pathlib import Path
from typing import Any, NamedTuple

TESTS = Path(__file__).resolve().parent
SUMMARY = TESTS / "gpu_sanitize.json"
sys.path.insert(0, str(TESTS.parent))

from bench.meta import describe, source_hash  # noqa: E402

FILES = (
    "test_gpu_sanitize.py",
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
    "test_attention.py",
    "test_token_attention.py",
    "test_expert_rows.py",
    "test_expert_topk.py",
    "test_gated_experts.py",
    "test_norm_silu.py",
    "test_swiglu.py",
    "test_rotation.py",
    "test_calibrate_gptq.py",
)
TOOLS = ("memcheck", "racecheck", "initcheck", "synccheck")
# initcheck must see who writes, racecheck fails in kernels that it left alone.
_ONLY_QAO = ("memcheck", "synccheck")
SHARE = "QAO_SANITIZE_SHARE"  # for sanitize_plugin.py
MORE_SECONDS = 20  # for tests that have begun
_START = 150  # seconds of imports, and of the tool's summary
_PORTS = range(49152, 65536, 10)  # compute-sanitizer tries ten from the first one on
_NO_TESTS = 5  # pytest's exit status of an empty share
_REPORT = re.compile(r"^=+ (?!Error: process).*(?:Invalid|Uninit|hazard detected|Barrier error|Internal|Error:)")
_SUMMARY = re.compile(r"^=+ (?:ERROR|RACECHECK) SUMMARY: (\d+)")
_SPLIT_K = re.compile(r"qao::gemm::sm80_mma::.*Tile<((?:\(int\)\d+(?:, )?)+)>")  # warps along N, M and K first
_THREAD = re.compile(r"(?:Read|Write) Thread \((\d+),0,0\)")


class Share(NamedTuple):
    """The tests of a process."""

    first: int
    step: int
    seed: int
    seconds: float
    file: str  # for the results


def workers_of(tool: str, arguments: argparse.Namespace) -> int:
    return arguments.workers * (2 if tool == "racecheck" else 1)  # the slowest


def start(tool: str, worker: int, arguments: argparse.Namespace, folder: Path) -> subprocess.Popen[bytes]:
    workers = workers_of(tool, arguments)
    command = ["compute-sanitizer", "--tool", tool, "--print-limit", "100000", "--show-backtrace", "no"]
    command += ["--port", str(_PORTS[TOOLS.index(tool) * 2 * arguments.workers + worker])]
    command += ["--racecheck-report", "hazard"] if tool == "racecheck" else []
    command += ["--kernel-name", "kns=qao"] if tool in _ONLY_QAO else []
    command += [sys.executable, "-m", "pytest", "-vv", "-p", "sanitize_plugin", "-p", "no:cacheprovider"]
    command += ["-k", arguments.k] if arguments.k else []
    file = folder / f"{tool}-{worker}"
    share = Share(worker, workers, arguments.seed, arguments.seconds, f"{file}.json")
    environment = os.environ | {
        SHARE: json.dumps(share),
        "OMP_NUM_THREADS": "1",
        "PYTHONPATH": os.pathsep.join((str(TESTS), os.environ.get("PYTHONPATH", ""))),
        "PYTHONUNBUFFERED": "1",
        "PYTORCH_NO_CUDA_MEMORY_CACHING": "1",
    }
    paths = [str(TESTS / name) for name in FILES]
    with open(f"{file}.txt", "wb") as output:  # a pipe would block until the other processes have ended
        options: dict[str, Any] = {"stdout": output, "stderr": subprocess.STDOUT, "start_new_session": True}
        return subprocess.Popen([*command, *paths], env=environment, **options)


def ended(process: subprocess.Popen[bytes], end: float) -> int:
    """The exit status; a process that still runs at the time ``end`` is killed, with all that it started."""
    try:
        return process.wait(max(end - time.monotonic(), 0))
    except subprocess.TimeoutExpired:
        os.killpg(process.pid, signal.SIGKILL)
        return process.wait()


Entry = dict[str, Any]  # of a tool


def entry_of(tool: str, statuses: Sequence[int], folder: Path, operators: Sequence[str]) -> Entry:
    """What the processes of a tool found; prints it."""
    entry: Entry = {"errors": 0, "known": 0, "passed": 0, "failed": [], "processes": len(statuses)}
    calls: Counter[str] = Counter()
    for worker, status in enumerate(0 if status == _NO_TESTS else status for status in statuses):
        lines = (folder / f"{tool}-{worker}.txt").read_text(errors="replace").splitlines()
        file, verdict = folder / f"{tool}-{worker}.json", judge(tool, lines)
        results: Entry = {"passed": 0, "failed": [], "operators": {}}
        results |= json.loads(file.read_text()) if file.exists() else {}
        calls += Counter(results["operators"])
        entry["errors"] += verdict.errors
        entry["known"] += verdict.known
        entry["passed"] += results["passed"]
        entry["failed"] += results["failed"]
        if status and not results["failed"]:
            entry["failed"].append(f"process {worker}, which ended with status {status}")
        if verdict.errors or status:
            print(*(line for report in verdict.reports[:2] for line in report), "...", *lines[-12:], sep="\n")
    entry |= {"operators": dict(sorted(calls.items())), "not_called": sorted(set(operators) - calls.keys())}
    called = f"called {len(operators) - len(entry['not_called'])} of {len(operators)} operators"
    passed = f"{entry['passed']} tests passed in {len(statuses)} processes and {called}"
    print(f"{tool}: {entry['errors']} errors ({entry['known']} known to be none); {passed}", flush=True)
    if entry["not_called"]:
        print(f"{tool}: not called: {', '.join(entry['not_called'])}", flush=True)
    return entry


def run(arguments: argparse.Namespace) -> int:
    from sanitize_plugin import cuda_operators

    meta, operators = describe("cuda"), cuda_operators()
    with tempfile.TemporaryDirectory() as name:
        folder = Path(name)
        processes = {
            tool: [start(tool, worker, arguments, folder) for worker in range(workers_of(tool, arguments))]
            for tool in arguments.tools
        }
        end = time.monotonic() + arguments.seconds + MORE_SECONDS + _START
        statuses = {tool: [ended(process, end) for process in of_tool] for tool, of_tool in processes.items()}
        tools = {tool: entry_of(tool, of_tool, folder, operators) for tool, of_tool in statuses.items()}
    if arguments.k:  # only a part of the tests: not for the file
        return 1 if any(problem_of(entry | {"not_called": []}) for entry in tools.values()) else 0
    old = json.loads(SUMMARY.read_text()) if SUMMARY.exists() else None
    new = meta | {"seed": arguments.seed, "seconds": arguments.seconds, "tools": tools}
    SUMMARY.write_text(json.dumps(merged(old, new), indent=2) + "\n")
    print(f"wrote {SUMMARY.relative_to(TESTS.parent)}")
    return 1 if any(map(problem_of, tools.values())) else 0


def merged(old: dict[str, Any] | None, new: dict[str, Any]) -> dict[str, Any]:
    """The new summary with the old one's entries of the other tools, if the sources are the same."""
    kept = old["tools"] if old and old["source_hash"] == new["source_hash"] else {}
    tools = kept | new["tools"]
    return new | {"tools": {tool: tools[tool] for tool in TOOLS if tool in tools}}


def problem_of(entry: Entry) -> str | None:
    """Why a tool's entry does not show that it found nothing in all operators; None if it does."""
    if entry["errors"]:
        return f"{entry['errors']} errors"
    if entry["failed"]:
        return f"{len(entry['failed'])} failed: {', '.join(entry['failed'][:5])}"
    if not entry["passed"]:
        return "no test passed"
    return f"not called: {', '.join(entry['not_called'])}" if entry["not_called"] else None


def problem(summary: dict[str, Any]) -> str | None:
    """Why a summary does not show that for every tool; None if it does."""
    for tool in TOOLS:
        if tool not in summary["tools"]:
            return f"{tool} did not run"
        if reason := problem_of(summary["tools"][tool]):
            return f"{tool}: {reason}"
    return None


def check() -> int:
    if not SUMMARY.exists():
        print(f"compute-sanitizer: {SUMMARY.relative_to(TESTS.parent)} is missing. Run `python tests/gpu_sanitize.py`.")
        return 1
    summary = json.loads(SUMMARY.read_text())
    made_from, now = summary["source_hash"], source_hash()
    sources = f"sources {made_from[:12]}, " + ("the present ones" if made_from == now else f"now {now[:12]}")
    if reason := problem(summary):
        print(f"compute-sanitizer: {reason} ({sources}). Run `python tests/gpu_sanitize.py` on a machine with a GPU.")
        return 1
    passed = ", ".join(f"{tool} in {summary['tools'][tool]['passed']} tests" for tool in TOOLS)
    print(f"compute-sanitizer: no errors in any operator on {summary['device']}: {passed} ({sources}).")
    return 0


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
    inside the kernels of cuBLAS and others, and loses a __syncthreads if barriers of a part of the CTA are also used,
    as by the K slices of the portable tiles, which synchronize nowhere else (docs/kernels/lessons.md, tools).
    """
    text = "\n".join(report)
    if tool == "initcheck":
        return "Uninit" not in text or "qao::" in text
    if "hazard" in text and "qao::" not in text:
        return False
    tile, threads = _SPLIT_K.search(text), [int(thread) for thread in _THREAD.findall(text)]
    if tool != "racecheck" or tile is None or len(threads) != 2:
        return True
    warps_n, warps_m, warps_k = (int(number) for number in re.findall(r"\)(\d+)", tile[1])[:3])
    slice_threads = 32 * warps_n * warps_m
    return warps_k == 1 or slice_threads == 32 or threads[0] // slice_threads == threads[1] // slice_threads


def main() -> int:
    parser = argparse.ArgumentParser(description=__doc__.splitlines()[0] if __doc__ else None)
    parser.add_argument("tools", nargs="*", choices=(*TOOLS, "all"), default="all")
    parser.add_argument("--seconds", type=int, default=120, metavar="N", help="in which tests begin; default 120")
    parser.add_argument("--seed", type=int, default=0, metavar="N", help="of the order of tests; default 0")
    parser.add_argument("-k", metavar="EXPRESSION", help="only tests that pytest's -k would choose; writes no file")
    parser.add_argument(
        "--workers",
        type=int,
        default=3,
        metavar="N",
        help="processes of each tool, twice as many of racecheck; default 3",
    )
    parser.add_argument("--check", action="store_true", help="verify tests/gpu_sanitize.json")
    arguments = parser.parse_args()
    arguments.tools = [tool for tool in TOOLS if tool in arguments.tools or "all" in arguments.tools]
    return check() if arguments.check else run(arguments)


if __name__ == "__main__":
    sys.exit(main())

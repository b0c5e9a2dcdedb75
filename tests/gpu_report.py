"""Runs the whole test suite on a GPU and records the result with a hash of the sources it ran on.

``python tests/gpu_report.py`` writes tests/gpu_report.json, ``-n 16`` with so many workers of pytest-xdist. What each
test did is in build/gpu_progress.jsonl at once: after a run that was cut short, or in which tests failed, ``--resume``
runs the others, and those that failed, of the same sources, and reports on all; it names what it ran again.
``--gpu-only`` leaves out the cases of device "cpu" and tests marked cpu or packaging, which CI runs, and says so in the
report. After the run it prints the files that took most of the workers' time.
``--check`` says whether the report is one of the present sources and nothing failed (exit status 1 and the reason when
not). The check needs neither torch nor a GPU.
"""

from __future__ import annotations

import argparse
import json
import os
import sys
import tempfile
from collections import Counter
from collections.abc import Iterable, Sequence
from pathlib import Path
from typing import Any, TextIO

ROOT = Path(__file__).resolve().parents[1]
REPORT = ROOT / "tests" / "gpu_report.json"
PROGRESS = ROOT / "build" / "gpu_progress.jsonl"  # the sources, then RUN and the tests of each run
RUN = '"run"'
OUTCOMES = ("passed", "skipped", "failed")
_LONGEST = 15  # files to print
LEFT_OUT = 'the cases of device "cpu" and tests marked cpu or packaging'
sys.path.insert(0, str(ROOT))

from bench.meta import describe, source_hash  # noqa: E402


class Recorder:
    """A pytest plugin that records outcomes and prints failures at once, for runs that may be interrupted."""

    def __init__(self, file: TextIO) -> None:
        self.file = file
        self.seconds: Counter[str] = Counter()  # of workers, by file
        self.failures: list[str] = []

    def pytest_runtest_logreport(self, report: Any) -> None:
        self.seconds[report.nodeid.split("::")[0]] += report.duration
        if report.failed:
            self.failures.append(f"\nFAILED {report.nodeid} ({report.when})\n{report.longreprtext}")
            print(self.failures[-1], flush=True)
        if report.failed or report.skipped or report.when == "call":
            print(json.dumps([report.nodeid, report.outcome]), file=self.file, flush=True)


Outcomes = dict[str, str]  # "passed", "skipped" or "failed" by test


def outcomes(lines: Iterable[str]) -> Outcomes:
    """Outcomes of one run: a test that failed in any phase has failed."""
    found: Outcomes = {}
    for test, outcome in map(json.loads, lines):
        found[test] = "failed" if found.get(test) == "failed" else outcome
    return found


def earlier_runs() -> list[Outcomes]:
    """Of the present sources."""
    header, *lines = PROGRESS.read_text().splitlines() if PROGRESS.exists() else ["null"]
    if json.loads(header) != source_hash():
        return []
    starts = [i for i, line in enumerate(lines) if line == RUN] + [len(lines)]
    return [outcomes(lines[begin + 1 : end]) for begin, end in zip(starts, starts[1:], strict=False)]


def merged(runs: Sequence[Outcomes]) -> tuple[Outcomes, list[str]]:
    """The last outcome of each test, and the tests that had an earlier one."""
    last: Outcomes = {}
    again = set()
    for run in runs:
        again |= last.keys() & run.keys()
        last |= run
    return last, sorted(again)


def without_gone(last: Outcomes, this: Outcomes) -> Outcomes:
    """Drops failed tests that a rerun of all failed tests did not find: they no longer exist."""
    return {test: outcome for test, outcome in last.items() if outcome != "failed" or test in this}


def sees_gpu() -> bool:
    import torch

    if not torch.cuda.is_available():
        print(f"no GPU: torch {torch.__version__} sees no CUDA device. Run this on a machine with one.")
    return bool(torch.cuda.is_available())


def run(workers: int, resume: bool, gpu_only: bool) -> int:
    """Run the whole suite or the remaining tests; the exit status is pytest's."""
    import pytest
    import torch

    if not sees_gpu():
        return 1
    # The compiler builds a header on its first use: once here, not in every worker of pytest-xdist at the same time.
    torch.compile(torch.sin)(torch.ones(8))
    os.environ.setdefault("OMP_WAIT_POLICY", "passive")  # workers times threads are more than CPUs
    options = ["-n", str(workers), "--dist", "worksteal"] if workers else []
    before = earlier_runs() if resume else []
    PROGRESS.parent.mkdir(exist_ok=True)
    if not before:
        PROGRESS.write_text(json.dumps(source_hash()) + "\n")
    with tempfile.NamedTemporaryFile("w", suffix=".txt") as done, PROGRESS.open("a") as file:
        done.writelines(f"{test}\n" for test, outcome in merged(before)[0].items() if outcome != "failed")
        done.flush()
        os.environ["QAO_TESTS_DONE"] = done.name  # for conftest.py, as is the next
        os.environ |= {"QAO_TESTS_OF_GPU": "1"} if gpu_only else {}
        print(RUN, file=file, flush=True)
        recorder = Recorder(file)
        status = int(pytest.main([str(ROOT / "tests"), *options], plugins=[recorder]))
    print(*(f"{seconds:7.0f} s  {name}" for name, seconds in recorder.seconds.most_common(_LONGEST)), sep="\n")
    print(*recorder.failures, sep="\n")  # again, behind pytest's pages of warnings
    if status == pytest.ExitCode.NO_TESTS_COLLECTED and before:
        status = int(pytest.ExitCode.OK)  # all was done
    runs = earlier_runs()
    last, again = merged(runs)
    if status in (pytest.ExitCode.OK, pytest.ExitCode.TESTS_FAILED):
        last = without_gone(last, runs[-1])
    of = {outcome: [test for test, what in last.items() if what == outcome] for outcome in OUTCOMES}
    counts: dict[str, Any] = {"passed": len(of["passed"]), "cuda_passed": sum("cuda" in test for test in of["passed"])}
    counts |= {"skipped": len(of["skipped"]), "failed": of["failed"], "exit_status": status}
    counts |= {"left_out": LEFT_OUT} if gpu_only else {}
    write(describe("cuda") | counts | ({"run_again": again} if again else {}))
    return status


def write(report: dict[str, Any]) -> None:
    REPORT.write_text(json.dumps(report, indent=2) + "\n")
    print(f"wrote {REPORT.relative_to(ROOT)}")


def foreign() -> str | None:
    """Why the report on disk is not about the present sources; None if it is."""
    if not REPORT.exists():
        return f"{REPORT.relative_to(ROOT)} is missing"
    made_from = json.loads(REPORT.read_text())["source_hash"]
    if made_from != source_hash():
        return f"it was made from other sources ({made_from[:12]}, now {source_hash()[:12]})"
    return None


def stale() -> str | None:
    """Why the report on disk does not approve the present sources; None if it does."""
    if reason := foreign():
        return reason
    report = json.loads(REPORT.read_text())
    if report["failed"]:
        return f"{len(report['failed'])} tests failed on {report['device']}: {', '.join(report['failed'][:5])}"
    if report["exit_status"] != 0:
        return f"no test failed on {report['device']}, but pytest ended with status {report['exit_status']}"
    if report["cuda_passed"] == 0:
        return "no test ran on the GPU"
    return None


def main() -> int:
    parser = argparse.ArgumentParser(description=__doc__.splitlines()[0] if __doc__ else None)
    parser.add_argument("--check", action="store_true", help="compare tests/gpu_report.json with the present sources")
    parser.add_argument("--resume", action="store_true", help="run what a former run left, and what failed in it")
    parser.add_argument("--gpu-only", action="store_true", help=f"leave out {LEFT_OUT}")
    parser.add_argument("-n", type=int, default=0, metavar="WORKERS", help="of pytest-xdist; default: none")
    arguments = parser.parse_args()
    if not arguments.check:
        return run(arguments.n, arguments.resume, arguments.gpu_only)
    reason = stale()
    if reason:
        print(f"GPU report: {reason}. Run `make gpu-test PYTHON=python3 VENV=` on a machine with a GPU.")
        return 1
    report = json.loads(REPORT.read_text())
    again = f", {', '.join(report['run_again'])} when run again" if report.get("run_again") else ""
    but = f", without {report['left_out']}" if report.get("left_out") else ""
    print(f"GPU report: {report['passed']} tests passed on {report['device']} with the present sources{but}{again}.")
    return 0


if __name__ == "__main__":
    sys.exit(main())

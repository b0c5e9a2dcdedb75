"""Runs the whole test suite on a GPU and records the result with a hash of the sources it ran on.

``python tests/gpu_report.py`` writes tests/gpu_report.json, ``-n 16`` with so many workers of pytest-xdist. Where a
command may not last as long as the suite, ``--part 1/2`` and ``--part 2/2`` run its files in two shares, whose results
are added up: the report says nothing good before the last. ``--failed`` runs what failed in the report of the present
sources again, by itself, and names it there. ``--check`` says whether the report is one of the present sources and
nothing failed (exit status 1 and the reason when not). The check needs neither torch nor a GPU.
"""

from __future__ import annotations

import argparse
import json
import os
import sys
from pathlib import Path
from typing import Any, NamedTuple

ROOT = Path(__file__).resolve().parents[1]
REPORT = ROOT / "tests" / "gpu_report.json"
sys.path.insert(0, str(ROOT))

from bench.meta import describe, source_hash  # noqa: E402


class Counter:
    """A pytest plugin that counts outcomes and collects the ids of failed tests; it tells of one when it fails, so that
    a run that is cut short does too."""

    def __init__(self) -> None:
        self.passed = 0
        self.skipped = 0
        self.cuda_passed = 0
        self.failed: list[str] = []

    def pytest_runtest_logreport(self, report: Any) -> None:
        if report.failed:
            self.failed.append(f"{report.nodeid} ({report.when})")
            print(f"\nFAILED {self.failed[-1]}\n{report.longreprtext}", flush=True)
        elif report.skipped:
            self.skipped += 1
        elif report.when == "call":
            self.passed += 1
            self.cuda_passed += "cuda" in report.nodeid


def sees_gpu() -> bool:
    import torch

    if not torch.cuda.is_available():
        print(f"no GPU: torch {torch.__version__} sees no CUDA device. Run this on a machine with one.")
    return bool(torch.cuda.is_available())


class Part(NamedTuple):
    """A share of the test files: number ``number``, from 1 on, of ``of``."""

    number: int
    of: int

    @classmethod
    def parse(cls, text: str) -> Part:
        number, _, of = text.partition("/")
        part = cls(int(number), int(of))
        if not 1 <= part.number <= part.of:
            raise ValueError(text)
        return part

    def files(self) -> list[str]:
        return [str(path) for path in sorted((ROOT / "tests").glob("test_*.py"))[self.number - 1 :: self.of]]


WHOLE = Part(1, 1)


def run(workers: int, part: Part) -> int:
    """Runs the suite here, or a part of it; the exit status is pytest's."""
    import pytest
    import torch

    if not sees_gpu():
        return 1
    # The compiler builds a header on its first use: once here, not in every worker of pytest-xdist at the same time.
    torch.compile(torch.sin)(torch.ones(8))
    counter = Counter()
    options = []
    if workers:  # they share the CPUs
        options = ["-n", str(workers), "--dist", "worksteal"]
        share = str(max((os.cpu_count() or 1) // workers, 1))
        for name in ("OMP_NUM_THREADS", "TORCHINDUCTOR_COMPILE_THREADS"):
            os.environ.setdefault(name, share)
    status = int(pytest.main([*part.files(), *options], plugins=[counter]))
    counts = {"passed": counter.passed, "cuda_passed": counter.cuda_passed, "skipped": counter.skipped}
    parts = {"parts": [part.number], "of": part.of}
    report = describe("cuda") | counts | {"failed": counter.failed, "exit_status": status} | parts
    write(added(report, before(part)))
    return status


def before(part: Part) -> dict[str, Any]:
    """The report on disk if it is of other parts of the same suite and the same sources; else nothing."""
    if foreign():
        return {}
    report = json.loads(REPORT.read_text())
    return report if report.get("of", 1) == part.of and part.number not in report.get("parts", [1]) else {}


def added(report: dict[str, Any], earlier: dict[str, Any]) -> dict[str, Any]:
    """One report of the parts of both."""
    if earlier:
        for name in ("passed", "cuda_passed", "skipped", "failed", "parts"):
            report[name] = earlier[name] + report[name]
        report["exit_status"] = max(earlier["exit_status"], report["exit_status"])
    return report


def run_failed() -> int:
    """Runs the failed tests of the report again, where it is one of the present sources and of a whole run."""
    import pytest

    if reason := foreign():
        print(f"GPU report: {reason}. Run the whole suite.")
        return 1
    ended = pytest.ExitCode.OK, pytest.ExitCode.TESTS_FAILED  # not interrupted, nor by an error
    report = json.loads(REPORT.read_text())
    if report["exit_status"] not in ended:
        print("GPU report: its run did not come to an end. Run the whole suite.")
        return 1
    if not report["failed"]:
        print("no test failed")
        return int(report["exit_status"])
    if not sees_gpu():
        return 1
    counter = Counter()
    names = sorted({name.rpartition(" (")[0] for name in report["failed"]})
    status = int(pytest.main([str(ROOT / name) for name in names], plugins=[counter]))
    if status not in ended:  # the report stays as it was
        return status
    for count in ("passed", "cuda_passed", "skipped"):
        report[count] += getattr(counter, count)
    report["run_again"] = report.get("run_again", []) + names
    write(report | {"failed": counter.failed, "exit_status": status})
    return status


def write(report: dict[str, Any]) -> None:
    REPORT.write_text(json.dumps(report, indent=2) + "\n")
    print(f"wrote {REPORT.relative_to(ROOT)}")


def foreign() -> str | None:
    """Why the report on disk is not one of the present sources; None if it is."""
    if not REPORT.exists():
        return f"{REPORT.relative_to(ROOT)} is missing"
    made_from = json.loads(REPORT.read_text())["source_hash"]
    if made_from != source_hash():
        return f"it was made from other sources ({made_from[:12]}, now {source_hash()[:12]})"
    return None


def stale() -> str | None:
    """Why the report on disk says nothing good about the present sources; None if it does."""
    if reason := foreign():
        return reason
    report = json.loads(REPORT.read_text())
    if missing := set(range(1, report.get("of", 1) + 1)) - set(report.get("parts", [1])):
        return f"of {report['of']} parts {sorted(missing)} did not run"
    if report["exit_status"] != 0 or report["failed"]:
        return f"{len(report['failed'])} tests failed on {report['device']}: {', '.join(report['failed'][:5])}"
    if report["cuda_passed"] == 0:
        return "no test ran on the GPU"
    return None


def main() -> int:
    parser = argparse.ArgumentParser(description=__doc__.splitlines()[0] if __doc__ else None)
    parser.add_argument("--check", action="store_true", help="compare tests/gpu_report.json with the present sources")
    parser.add_argument("--failed", action="store_true", help="run only what failed in the report, and add to it")
    parser.add_argument("--part", type=Part.parse, default=WHOLE, metavar="K/N", help="only this share of the files")
    parser.add_argument("-n", type=int, default=0, metavar="WORKERS", help="of pytest-xdist; default: none")
    arguments = parser.parse_args()
    if arguments.failed:
        return run_failed()
    if not arguments.check:
        return run(arguments.n, arguments.part)
    reason = stale()
    if reason:
        print(f"GPU report: {reason}. Run `make gpu-test PYTHON=python3 VENV=` on a machine with a GPU.")
        return 1
    report = json.loads(REPORT.read_text())
    again = f", {', '.join(report['run_again'])} when run again" if report.get("run_again") else ""
    print(f"GPU report: {report['passed']} tests passed on {report['device']} with the present sources{again}.")
    return 0


if __name__ == "__main__":
    sys.exit(main())

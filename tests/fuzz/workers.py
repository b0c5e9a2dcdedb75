"""Processes that run the cases of a fuzzer: a crash, a hang or too much memory is a finding with its case.

Case i of seed S is drawn from ``random.Random(f"{S}/{i}")`` alone, so that any part of a run can be repeated.
"""

from __future__ import annotations

import contextlib
import importlib
import json
import mmap
import os
import random
import resource
import shlex
import signal
import struct
import subprocess
import sys
import tempfile
import time
import traceback
import warnings
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

from .finding import Finding

SECONDS_OF_A_CASE = 20  # of the processor
WAITING = 15  # times as long for a case that waits, for something that never happens or for other processes
MEMORY = 3 << 30  # bytes of address space that a worker may take after its start
_PLACE = struct.Struct("<QQ")  # the case that runs, and problems so far


@dataclass
class Outcome:
    """Counts of a run, and its findings by case."""

    cases: int = 0
    problems: int = 0
    findings: list[tuple[dict[str, Any], str]] = field(default_factory=list)


def case_of(fuzzer: str, seed: int, index: int) -> dict[str, Any]:
    drawn: dict[str, Any] = importlib.import_module(f"fuzz.{fuzzer}").draw(random.Random(f"{seed}/{index}"))
    return drawn


def command_of(fuzzer: str, case: dict[str, Any], level: str) -> str:
    """The line that repeats a case."""
    return f"python -m fuzz {fuzzer} --level {level} --case {shlex.quote(json.dumps(case))}"


def attempt(fuzzer: str, case: dict[str, Any], device: str) -> tuple[int, str | None]:
    """Run a case in this process: its number of problems, and an error."""
    try:
        return importlib.import_module(f"fuzz.{fuzzer}").run(case, device), None
    except Finding as error:
        return 0, str(error)
    except Exception as error:
        frames = [f"{Path(f.filename).name}:{f.lineno}" for f in traceback.extract_tb(error.__traceback__)[-3:]]
        return 0, f"{type(error).__name__}: {str(error)[:600]} (at {', '.join(frames)})"


def watch(seconds: float = SECONDS_OF_A_CASE) -> None:
    """End the process, unless this is called again in time: the default action of both signals. 0: never."""
    signal.setitimer(signal.ITIMER_PROF, seconds)
    signal.setitimer(signal.ITIMER_REAL, seconds * WAITING)


def shortened(fuzzer: str, case: dict[str, Any], wrong: str, device: str) -> tuple[dict[str, Any], str]:
    """The case without the steps that something is wrong without as well."""
    for i in reversed(range(len(case.get("steps", ())))):
        fewer = {**case, "steps": case["steps"][:i] + case["steps"][i + 1 :]}
        watch()
        if (other := attempt(fuzzer, fewer, device)[1]) is not None:
            case, wrong = fewer, other
    watch(0)
    return case, wrong


def work(fuzzer: str, level: str, seed: int, first: int, count: int, end: float, place: str) -> None:
    """The worker: prints a line for each finding, and one at the end. ``end`` is a time of ``time.monotonic``."""
    warnings.simplefilter("ignore")
    importlib.import_module(f"fuzz.{fuzzer}")
    device = "cuda" if level == "cuda" else "cpu"
    if device == "cpu":
        _limit_memory()
    else:
        _multiply_exactly()
    parent = os.getppid()
    with open(place, "r+b") as file, mmap.mmap(file.fileno(), _PLACE.size) as shared:
        problems, index = 0, first
        while index < first + count and time.monotonic() < end and os.getppid() == parent:
            _PLACE.pack_into(shared, 0, index, problems)
            watch()
            done, wrong = attempt(fuzzer, case_of(fuzzer, seed, index), device)
            problems += done
            if wrong is not None:
                case, wrong = shortened(fuzzer, case_of(fuzzer, seed, index), wrong, device)
                print(json.dumps({"case": case, "wrong": wrong}), flush=True)
            index += 1
        watch(0)
        _PLACE.pack_into(shared, 0, index, problems)
    print(json.dumps({"end": index}), flush=True)


def _multiply_exactly() -> None:
    """Plain torch measures the tolerance of products: no TF32, no 16-bit reduction."""
    import torch

    matmul = torch.backends.cuda.matmul
    matmul.allow_tf32 = matmul.allow_bf16_reduced_precision_reduction = False
    matmul.allow_fp16_reduced_precision_reduction = False


def _limit_memory() -> None:
    pages = int(Path("/proc/self/statm").read_text().split()[0])
    limit = pages * mmap.PAGESIZE + MEMORY
    resource.setrlimit(resource.RLIMIT_AS, (limit, limit))
    resource.setrlimit(resource.RLIMIT_CORE, (0, 0))


def run(fuzzer: str, level: str, seed: int, first: int, count: int, seconds: float, most: int = 20) -> Outcome:
    """Run cases in workers until the count, the time or ``most`` findings is reached."""
    outcome, index, end = Outcome(), first, time.monotonic() + seconds
    environment = {**os.environ, "OMP_NUM_THREADS": "1"}
    environment["PYTHONPATH"] = os.pathsep.join([str(Path(__file__).parents[1]), environment.get("PYTHONPATH", "")])
    if level not in ("default", "cuda"):
        environment["QAO_CPU_ISA"] = level
    with tempfile.NamedTemporaryFile() as place:
        while index < first + count and time.monotonic() < end and len(outcome.findings) < most:
            place.seek(0)
            place.write(_PLACE.pack(index, 0))
            place.flush()
            numbers = seed, index, first + count - index, end
            command = [sys.executable, "-m", "fuzz", "--worker", fuzzer, level, *map(str, numbers), place.name]
            result = subprocess.run(command, env=environment, capture_output=True, text=True)
            at, problems = _PLACE.unpack(Path(place.name).read_bytes())
            outcome.problems += problems
            ended = False
            for line in result.stdout.splitlines():
                with contextlib.suppress(ValueError):
                    said = json.loads(line)
                    ended |= "end" in said
                    if "wrong" in said:
                        outcome.findings.append((said["case"], said["wrong"]))
            if not ended:
                outcome.findings.append((case_of(fuzzer, seed, at), _death(result)))
                at += 1
            outcome.cases += at - index
            index = at
    return outcome


def _death(result: subprocess.CompletedProcess[str]) -> str:
    code = -result.returncode
    if code == signal.SIGPROF:
        return f"it takes more than {SECONDS_OF_A_CASE} s"
    if code == signal.SIGALRM:
        return f"it waits for more than {SECONDS_OF_A_CASE * WAITING} s"
    how = f"signal {signal.Signals(code).name}" if code > 0 else f"exit code {result.returncode}"
    return f"the process ended: {how}; {result.stderr[-800:]}"

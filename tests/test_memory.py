"""docs/ops.md on memory: no operator takes more than it says."""

from __future__ import annotations

import json
import os
import platform
import re
import subprocess
import sys
from pathlib import Path
from typing import Any

import memory_support
import pytest
import torch
from qao.diagnostics import operator_checks
from qao.schemes import SCHEMES

SECTION = (Path(__file__).resolve().parents[1] / "docs" / "ops.md").read_text().partition("\n## Memory\n")[2]
GPUS = {"A100": (80, 108, 166912), "L40S": (89, 142, 101376), "H100": (90, 132, 232448), "RTX 5090": (120, 170, 101376)}


def documented(pattern: str) -> int:
    """A number in the section."""
    found = re.search(pattern, SECTION.partition("\n## ")[0])
    assert found, pattern
    return int(found[1])


def excess(calls: list[dict[str, Any]], fixed: int) -> dict[str, int]:
    """Bytes above the documented ones, for operators with any."""
    per_value = documented(r"at most (\d+) bytes for each value of x")
    above = {call["operator"]: call["above"] - per_value * call["x"] - fixed for call in calls}
    return {operator: more for operator, more in above.items() if more > 0}


@pytest.mark.skipif(platform.machine() != "x86_64", reason="an emulator may run it, with memory for itself")
@pytest.mark.skipif(not memory_support.REFERENCES.exists(), reason="the kernel keeps no peak that can be reset")
def test_no_operator_takes_more_on_a_cpu() -> None:
    """In a process with one thread, in which freed memory returns to the system at once."""
    environment = os.environ | {"OMP_NUM_THREADS": "1", "MALLOC_MMAP_THRESHOLD_": "65536", "CUDA_VISIBLE_DEVICES": ""}
    command = [sys.executable, memory_support.__file__]
    done = subprocess.run(command, env=environment, capture_output=True, text=True, timeout=300)
    assert done.returncode == 0, done.stderr
    first, *calls = (call for line in done.stdout.splitlines() for call in json.loads(line))
    if abs(first["above"] - memory_support.WRITTEN) > memory_support.NOISE:
        pytest.skip("the kernel does not count the peak of a process")
    assert {call["operator"] for call in calls} >= operator_checks.OPERATORS.keys()
    assert max(call["above"] for call in calls) > memory_support.NOISE  # scratch memory is seen
    fixed, row = documented(r"(\d+) KiB and"), documented(r"and (\d+) KiB for each row")
    rows = max(memory_support.SIZES["cpu"]["_TOKENS"])
    assert not excess(calls, ((fixed + row * rows) << 10) + memory_support.NOISE)


@pytest.mark.skipif(not torch.cuda.is_available(), reason="torch sees no GPU")
def test_no_operator_takes_more_on_a_gpu() -> None:
    checks = {name: check for name, check in operator_checks.OPERATORS.items() if name not in operator_checks.OF_CPU}
    calls = [call for check in dict.fromkeys(checks.values()) for call in memory_support.measured(check, "cuda")]
    assert {call["operator"] for call in calls} >= checks.keys()
    assert not excess(calls, documented(r"split-K, at most (\d+) MiB") << 20)


@pytest.mark.parametrize("gpu", GPUS)
def test_plans_of_gpus_take_no_more(gpu: str) -> None:
    host = pytest.importorskip("qao._host")
    capability, sms, shared = GPUS[gpu]
    chip = host.Gpu(compute_capability=capability, num_sms=sms, shared_bytes_per_cta=shared)
    limit, largest = documented(r"split-K, at most (\d+) MiB") << 20, 0
    for word, kind in SCHEMES.items():
        for dtype in ("bfloat16", "float32"):
            for m in (1, 16, 64, 256, 512, 4096):
                for n, k in ((256, 14336), (1024, 4096), (4096, 4096), (28672, 4096)):
                    scales = "bfloat16" if word.endswith("4") else "float32"
                    problem = kind()._problem(m=m, n=n, k=k, x_dtype=dtype, scale_dtype=scales, batch_invariant=False)
                    taken = host.plan(problem, chip)["workspace_bytes"]
                    if dtype == "float32":  # the parts of x, and the sums of its groups
                        taken -= 6 * m * k + 4 * m * -(-k // 32)
                    allowed = max(limit, 4 * m * n) if dtype == "float32" else limit
                    assert taken <= allowed, f"{word}, {dtype}, {m} x {n} x {k}"
                    largest = max(largest, taken)
    assert largest > 0

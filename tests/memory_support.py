"""Peak memory of every call of an operator in the checks of ``qao doctor``. As a program: on the CPU, as JSON lines.

On a GPU torch's allocator counts. On a CPU the resident size of the process counts, because kernels keep scratch memory
outside torch. Threads keep it between calls, so each check runs in a fork.
"""

from __future__ import annotations

import json
import os
from collections.abc import Callable, Iterator
from functools import partial
from pathlib import Path
from typing import Any

import torch
from qao.diagnostics import operator_checks
from torch import Tensor
from torch.utils._python_dispatch import TorchDispatchMode
from torch.utils._pytree import tree_leaves

# W in 16 bits is larger than what an operator may take.
SIZES = {"cpu": {"_N": 1536, "_K": 768, "_TOKENS": (1, 192)}, "cuda": {"_N": 4096, "_K": 4096, "_TOKENS": (1, 64)}}
NOISE = 2 * max(32, 2 * (os.cpu_count() or 1)) * os.sysconf("SC_PAGE_SIZE")  # of a CPU's counter of resident pages
STATUS, REFERENCES = Path("/proc/self/status"), Path("/proc/self/clear_refs")


class Peaks(TorchDispatchMode):
    """Measures calls of qao's operators. ``seen``: name, bytes above the results; the elements of x."""

    def __init__(self, device: str) -> None:
        super().__init__()
        self.device = device
        self.seen: list[dict[str, Any]] = []

    def __torch_dispatch__(self, func: Any, types: Any, args: Any = (), kwargs: Any = None) -> Any:
        keywords = kwargs or {}
        if func.namespace != "qao":
            return func(*args, **keywords)
        given = dict(zip((argument.name for argument in func._schema.arguments), args, strict=False)) | keywords
        for argument in func._schema.arguments:
            if argument.alias_info and argument.alias_info.is_write and argument.name in given:
                given[argument.name].view(torch.uint8).add_(0)  # its pages may not exist yet
        before = self._begin()
        result = func(*args, **keywords)
        peak = self._peak() - before
        results = sum(tensor.nbytes for tensor in tree_leaves(result) if isinstance(tensor, Tensor))
        x = given.get("x")
        values = x.numel() if isinstance(x, Tensor) else 0
        self.seen.append({"operator": func._schema.name.removeprefix("qao::"), "above": peak - results, "x": values})
        return result

    def _begin(self) -> int:
        if self.device != "cpu":
            torch.cuda.reset_peak_memory_stats()
            return torch.cuda.memory_allocated()
        REFERENCES.write_text("5")  # the peak starts at the present size
        return _status("VmRSS")

    def _peak(self) -> int:
        return torch.cuda.max_memory_allocated() if self.device != "cpu" else _status("VmHWM")


WRITTEN = 1 << 20


def _written() -> int:
    """What the kernel counts of WRITTEN bytes that are written and freed. Some sandboxes count nothing."""
    REFERENCES.write_text("5")
    before = _status("VmRSS")
    torch.ones(WRITTEN, dtype=torch.uint8)
    return _status("VmHWM") - before


def _status(name: str) -> int:
    """Bytes."""
    return next(int(line.split()[1]) * 1024 for line in STATUS.read_text().splitlines() if line.startswith(name))


def measured(check: Callable[[str], float], device: str) -> list[dict[str, Any]]:
    """The calls in a check, after a run with small tensors, which loads code."""
    with Peaks(device):
        check(device)
    sizes = SIZES[device]
    before = {key: getattr(operator_checks, key) for key in sizes}
    try:
        vars(operator_checks).update(sizes)
        with Peaks(device) as peaks:
            check(device)
    finally:
        vars(operator_checks).update(before)
    return peaks.seen


def in_forks() -> Iterator[list[dict[str, Any]]]:
    """The calls of each check; first, as a call of no operator, what the kernel counts of memory that was written."""
    yield _forked(lambda: [{"operator": "", "above": _written(), "x": 0}])
    checks = dict.fromkeys(operator_checks.OPERATORS.values())  # some operators share one
    for check in checks:  # imports happen before the forks
        with Peaks("cpu"):
            check("cpu")
    for check in checks:
        yield _forked(partial(measured, check, "cpu"))


def _forked(measure: Callable[[], list[dict[str, Any]]]) -> list[dict[str, Any]]:
    reader, writer = os.pipe()
    if not os.fork():
        os.write(writer, json.dumps(measure()).encode())
        os._exit(0)
    os.close(writer)
    with open(reader) as answer:
        text = answer.read()
    os.wait()
    return json.loads(text or "[]")  # type: ignore[no-any-return]


if __name__ == "__main__":
    os.sched_setaffinity(0, {min(os.sched_getaffinity(0))})  # each CPU counts pages by itself
    for calls in in_forks():
        print(json.dumps(calls))

"""Slowdown by another process that keeps one core busy: quantizing a layer, and its GEMM.

As many threads as available cores. Contenders alternate, first alone, then next to the busy process. Times are means:
next to it a call takes its normal time or some extra slices of 4 ms, and a median shows only one of these.
"""

from __future__ import annotations

import contextlib
import os
import subprocess
import sys
from collections.abc import Callable, Iterator, Sequence
from functools import partial
from pathlib import Path
from statistics import mean
from typing import Any

import torch
from qao import QuantLinear
from qao.schemes import SCHEMES
from torch import nn

from .markdown import caption, table
from .meta import describe, warn_if_busy
from .result_files import write
from .timing import interleaved

SIZE = 4096  # N and K
TOKENS = (1, 16, 256)
LINEAR = "F.linear"
WEIGHTS_BAR = 40e6  # minimum per second and core, alone
SLOWDOWN_BAR = 1.5  # maximum, of quantizing
RATIO_BAR = 2.0  # maximum of a GEMM's time over F.linear's, both next to the busy process
_SPIN = "while True: pass"

Calls = dict[str, Callable[[], object]]


def add_arguments(command: Any) -> None:
    command.add_argument("--seconds", type=float, default=1.0, help="per contender, alone and next to the process")
    command.add_argument("--m", nargs="+", type=int, default=TOKENS, metavar="M", help="tokens")


@torch.inference_mode()
def run(seconds: float, tokens: Sequence[int], path: Path) -> list[dict[str, Any]]:
    """Measure, print one line per contender and write the results."""
    cores = len(os.sched_getaffinity(0))
    before = torch.get_num_threads()
    meta = describe("cpu") | {"threads": cores, "layer": (SIZE, SIZE)}
    warn_if_busy(meta)
    linear = nn.Linear(SIZE, SIZE, bias=False, dtype=torch.bfloat16)
    layers = {word: QuantLinear.from_linear(linear, kind()) for word, kind in SCHEMES.items()}
    torch.set_num_threads(cores)
    try:
        rows = _rows(None, quantize_calls(linear), seconds)
        for row in rows:
            row["weights_s_core"] = linear.weight.numel() / (row["us"] * 1e-6 * cores)
        for m in tokens:
            rows += _rows(m, product_calls(linear, layers, m), seconds)
    finally:
        torch.set_num_threads(before)
    write({"meta": meta, "rows": rows}, path)
    return rows


def quantize_calls(linear: nn.Linear) -> Calls:
    """Quantize ``linear`` with every scheme and its default method."""
    return {word: partial(QuantLinear.from_linear, linear, kind()) for word, kind in SCHEMES.items()}


def product_calls(linear: nn.Linear, layers: dict[str, QuantLinear], m: int) -> Calls:
    x = torch.randn(m, linear.in_features).to(linear.weight.dtype)
    return {name: partial(layer, x) for name, layer in {LINEAR: linear, **layers}.items()}


def misses(rows: list[dict[str, Any]]) -> tuple[list[str], int]:
    """As bars.misses."""
    lines, compared = [], 0
    for row in rows:
        if row["M"] is None:
            cells = {"M weights a second and core": (row["weights_s_core"] / 1e6, row["weights_s_core"] >= WEIGHTS_BAR)}
            cells["times slower"] = row["slowdown"], row["slowdown"] <= SLOWDOWN_BAR
        elif row["scheme"] == LINEAR:
            continue
        else:
            cells = {f"times {LINEAR}": (row["ratio"], row["ratio"] <= RATIO_BAR)}
        compared += len(cells)
        what = "quantizing" if row["M"] is None else f"M = {row['M']}"
        lines += [f"{row['scheme']}, {what}: {value:.2f} {key}" for key, (value, good) in cells.items() if not good]
    return lines, compared


def render(results: dict[str, Any]) -> str:
    """Markdown of one results file: one line per scheme."""
    rows, meta = results["rows"], results["meta"]
    tokens = list(dict.fromkeys(row["M"] for row in rows if row["M"] is not None))
    lines = []
    for name in dict.fromkeys(row["scheme"] for row in rows if row["M"] is not None):
        here = {row["M"]: row for row in rows if row["scheme"] == name}
        line = [name] + ["–"] * 3 if name == LINEAR else [f"`{name}`", *_quantizing(here[None])]
        lines.append([*line, *(f"{here[m]['busy_us']:.0f}, {here[m]['ratio']:.2f}" for m in tokens)])
    header = ["", "million weights a second and core", "ms", "busy, ms", *(f"M = {m}" for m in tokens)]
    n, k = meta["layer"]
    note = (
        f"{caption(meta)}; {n} × {k}, bfloat16. Quantization alone and next to a busy process (times slower); "
        f"GEMMs next to it: µs, and times as long as `F.linear`. Means."
    )
    return f"{note}\n\n{table(header, lines)}"


def _quantizing(row: dict[str, Any]) -> list[str]:
    busy = f"{row['busy_us'] / 1e3:.1f} ({row['slowdown']:.2f})"
    return [f"{row['weights_s_core'] / 1e6:.0f}", f"{row['us'] / 1e3:.1f}", busy]


def _rows(m: int | None, calls: Calls, seconds: float) -> list[dict[str, Any]]:
    alone = times(calls, seconds)
    with busy_process():
        busy = times(calls, seconds)
    rows = []
    for name in calls:
        row = {"scheme": name, "M": m, "us": alone[name] * 1e6, "busy_us": busy[name] * 1e6}
        row["slowdown"] = busy[name] / alone[name]
        if m is not None:
            row["ratio"] = busy[name] / busy[LINEAR]
        rows.append(row)
        what = "quantizing" if m is None else f"M={m}"
        print(f"{what} {name}: {row['us']:.0f} us, busy {row['busy_us']:.0f} us", end="")
        print(f", {row['ratio']:.2f} of {LINEAR}" if m is not None else f", {row['slowdown']:.2f} times", flush=True)
    return rows


def times(calls: Calls, seconds: float) -> dict[str, float]:
    """Seconds of each contender."""
    return dict(zip(calls, interleaved(list(calls.values()), seconds, average=mean), strict=True))


@contextlib.contextmanager
def busy_process() -> Iterator[None]:
    """A process that keeps one core busy."""
    process = subprocess.Popen([sys.executable, "-S", "-c", _SPIN])
    try:
        yield
    finally:
        process.kill()
        process.wait()

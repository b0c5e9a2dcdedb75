"""Cost of ``qao.ops.batch_invariant()``: a layer inside and outside the mode, interleaved in one process."""

from __future__ import annotations

import argparse
import statistics
from collections.abc import Callable
from functools import partial
from pathlib import Path
from typing import Any

import qao
import torch
from torch import Tensor, nn

from .markdown import caption, table
from .meta import describe
from .result_files import write
from .schemes import layer_in_turns
from .timing import Graph, interleaved, replayed

SCHEMES: dict[str, qao.Scheme] = {
    "int4": qao.Int4WeightOnly(),
    "int8": qao.Int8WeightOnly(),
    "fp8": qao.Float8WeightOnly(),
    "fp4": qao.Fp4WeightOnly(),
    "int8_int8": qao.Int8DynamicActivationInt8Weight(),
    "int8_int4": qao.Int8DynamicActivationInt4Weight(symmetric=True),
    "fp8_fp8": qao.Float8DynamicActivationFloat8Weight(),
    "fp8_int4": qao.Float8DynamicActivationInt4Weight(symmetric=True),
}
LAYERS = ((4096, 4096), (28672, 4096), (4096, 14336))
TOKENS = {"cuda": (1, 16, 64, 256, 1024, 4096), "cpu": (1, 4, 16, 64)}


def measure(scheme: qao.Scheme, n: int, k: int, tokens: tuple[int, ...], device: str, seconds: float) -> list[Any]:
    """Microseconds outside and inside, for each number of tokens."""
    linear = nn.Linear(k, n, bias=False, device=device, dtype=torch.bfloat16)
    layer = qao.QuantLinear.from_linear(linear, scheme)
    copies, mm = layer_in_turns(layer, device)
    rows = []
    for m in tokens:
        x = torch.randn(m, k, device=device, dtype=torch.bfloat16)
        calls = [partial(_call, mm, x, invariant) for invariant in (False, True)]
        if device == "cuda":
            floor = max(layer.qweight.nbytes / 4.8e12, 2 * m * n * k / 1.5e15)
            times = replayed([Graph(call, copies, floor) for call in calls], seconds)
        else:
            times = interleaved(calls, seconds)
        plain, inside = (time * 1e6 for time in times)
        rows.append({"n": n, "k": k, "m": m, "plain_us": plain, "invariant_us": inside, "ratio": inside / plain})
    return rows


def _call(mm: Callable[[Tensor], Tensor], x: Tensor, invariant: bool) -> None:
    with qao.ops.batch_invariant(invariant), torch.no_grad():
        mm(x)


def add_arguments(command: argparse.ArgumentParser) -> None:
    command.add_argument("--seconds", type=float, default=0.1, help="for each cell and way")
    command.add_argument("--schemes", nargs="+", choices=SCHEMES, default=list(SCHEMES), metavar="SCHEME")


def run(arguments: argparse.Namespace, path: Path) -> None:
    rows: list[dict[str, Any]] = []
    for word in arguments.schemes:
        for n, k in LAYERS:
            of_layer = measure(SCHEMES[word], n, k, TOKENS[arguments.device], arguments.device, arguments.seconds)
            rows += [{"scheme": word, **row} for row in of_layer]
            ratios = " ".join(f"M={row['m']} {row['plain_us']:.1f} {row['ratio']:.2f}" for row in of_layer)
            print(f"{word} {n}x{k}: {ratios}", flush=True)
            write({"meta": describe(arguments.device), "rows": rows}, path)


def render(results: dict[str, Any]) -> str:
    """Markdown of one results file: per scheme, the geometric mean and the largest ratio over layers."""
    rows = results["rows"]
    tokens = list(dict.fromkeys(row["m"] for row in rows))
    lines = []
    for word in dict.fromkeys(row["scheme"] for row in rows):
        of_m = [[row["ratio"] for row in rows if row["scheme"] == word and row["m"] == m] for m in tokens]
        lines.append([f"`{word}`", *(f"{statistics.geometric_mean(some):.2f}, {max(some):.2f}" for some in of_m)])
    layers = ", ".join(dict.fromkeys(f"{row['n']} × {row['k']}" for row in rows))
    text = f"Time in the context over time outside, geometric mean and largest of {layers}. {caption(results['meta'])}."
    return f"{text}\n\n{table(['scheme', *(f'M={m}' for m in tokens)], lines)}"

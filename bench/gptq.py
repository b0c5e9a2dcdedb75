"""Throughput of calibration in float weights per second, without the model's forward passes.

A layer of an 8B decoder, with H from random correlated inputs. Also measured: the sums x xᵀ over 512 tokens, which the
passes over the data compute once per sample.
"""

from __future__ import annotations

from typing import Any

import qao
import torch
from qao.calibration.choice import quantized
from torch import Tensor

from .markdown import caption, table
from .meta import describe, warn_if_busy
from .timing import interleaved

LAYERS = {"q, o": (4096, 4096), "gate, up": (14336, 4096), "gate and up": (28672, 4096), "down": (4096, 14336)}
SMALL = {"a layer of a small model": (1536, 576)}  # for a CPU
SCHEMES: dict[str, qao.Scheme] = {
    "int4 g128": qao.Int4WeightOnly(),
    "int4 g128, symmetric": qao.Int4WeightOnly(symmetric=True),
    "fp8_fp8": qao.Float8DynamicActivationFloat8Weight(),
}
TOKENS = 512
_CELL_S = 1.0


def run(device: str) -> dict[str, Any]:
    """Measure, print one line per layer and scheme, and return the content of the results file."""
    meta = describe(device) | {"tokens": TOKENS}
    warn_if_busy(meta)
    rows = []
    for layer, (n, k) in (LAYERS if device == "cuda" else SMALL).items():
        weight, hessian, x = _problem(n, k, device)
        (sums_s,) = interleaved([lambda x=x: x.float().t() @ x.float()], _CELL_S / 4, device, 3)
        for name, scheme in SCHEMES.items():

            def call(weight: Tensor = weight, hessian: Tensor = hessian, scheme: qao.Scheme = scheme) -> object:
                return quantized([weight], hessian, scheme, 0.01, ["weight"])

            call()
            (seconds,) = interleaved([call], _CELL_S, device, 3)
            row = {"layer": layer, "N": n, "K": k, "scheme": name, "seconds": seconds, "hessian_seconds": sums_s}
            row |= {"gb_s": weight.nbytes / seconds / 1e9}
            print(f"{layer:<24} {n:>6} x {k:<6} {name:<22} {seconds:8.3f} s {row['gb_s']:7.3f} GB/s", flush=True)
            rows.append(row)
    return {"meta": meta, "rows": rows}


def _problem(n: int, k: int, device: str) -> tuple[Tensor, Tensor, Tensor]:
    generator = torch.Generator(device).manual_seed(0)
    weight = torch.randn(n, k, generator=generator, device=device).mul_(0.02).bfloat16()
    x = torch.randn(TOKENS, k, generator=generator, device=device)
    x = x * torch.linspace(-2, 2, k, device=device).exp() + x.roll(1, 1)
    return weight, x.t() @ x / TOKENS, x.bfloat16()


def render(results: dict[str, Any]) -> str:
    """The Markdown of one results file."""
    rows = results["rows"]
    schemes = list(dict.fromkeys(row["scheme"] for row in rows))
    lines = []
    for layer in dict.fromkeys(row["layer"] for row in rows):
        cells = {row["scheme"]: row for row in rows if row["layer"] == layer}
        first = next(iter(cells.values()))
        times = [f"{cells[name]['seconds'] * 1e3:.0f} ms, {cells[name]['gb_s']:.2f} GB/s" for name in schemes]
        sums = f"{first['hessian_seconds'] * 1e3:.2f} ms"
        lines.append([f"{layer} ({first['N']} × {first['K']})", *times, sums])
    header = ["layer", *schemes, f"x xᵀ of {results['meta']['tokens']} tokens"]
    return f"{caption(results['meta'])}; bfloat16 weights.\n\n{table(header, lines)}"

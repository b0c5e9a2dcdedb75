"""Activation quantizers and fused producers: bandwidth compared with a plain copy of the same size."""

from __future__ import annotations

from collections.abc import Callable
from functools import partial
from typing import Any, NamedTuple

import torch
from torch import Tensor

from .markdown import caption, table
from .meta import describe, warn_if_busy
from .timing import Graph, copies_of, interleaved, replayed, rotation, settle_clocks

qao = torch.ops.qao
_INT8, _FP8 = torch.int8, torch.float8_e4m3fn


class Case(NamedTuple):
    name: str
    inputs: int  # number of matrices [M, K]
    call: Callable[..., tuple[Tensor, ...]]
    weight: bool = False  # whether the first argument is the norm's weight [K]
    passes: int = 1  # over the inputs; a per-tensor scale needs two


CASES = (
    Case("int8_quantize", 1, lambda x: qao.int8_quantize(x, True)),
    Case("int8_quantize asymmetric", 1, lambda x: qao.int8_quantize(x, False)),
    Case("fp8_quantize per row", 1, lambda x: qao.fp8_quantize(x, None, -1)),
    Case("fp8_quantize per 128 columns", 1, lambda x: qao.fp8_quantize(x, None, 128)),
    Case("fp8_quantize per tensor", 1, lambda x: qao.fp8_quantize(x, None, 0), passes=2),
    Case("rms_norm_quantize int8", 1, lambda w, x: qao.rms_norm_quantize(x, w, 1e-6, _INT8), weight=True),
    Case("rms_norm_quantize fp8", 1, lambda w, x: qao.rms_norm_quantize(x, w, 1e-6, _FP8), weight=True),
    Case("add_rms_norm_quantize int8", 2, lambda w, *x: qao.add_rms_norm_quantize(*x, w, 1e-6, _INT8), weight=True),
    Case("add_rms_norm", 2, lambda w, *x: qao.add_rms_norm(*x, w, 1e-6), weight=True),
    Case("silu_mul_quantize int8", 2, lambda gate, up: qao.silu_mul_quantize(gate, up, _INT8)),
    Case("silu_mul_quantize fp8", 2, lambda gate, up: qao.silu_mul_quantize(gate, up, _FP8)),
    Case("silu_mul", 2, lambda gate, up: (qao.silu_mul(gate, up),)),
)
SHAPES = {
    "cpu": ((1, 4096), (16, 4096), (512, 4096)),
    "cuda": ((1, 4096), (16, 4096), (256, 4096), (4096, 8192)),
}
_CELL_S = {"cpu": 0.5, "cuda": 0.05}
_GPU_BYTES_PER_S = 3e12  # approximate; determines the number of calls per graph


@torch.inference_mode()
def run(device: str, shapes: tuple[tuple[int, int], ...] | None = None) -> dict[str, Any]:
    """Measure, print one line per case and shape, and return the content of the results file."""
    meta = describe(device)
    warn_if_busy(meta)
    if device == "cuda":
        settle_clocks()
    rows = [_row(case, m, k, device) for m, k in shapes or SHAPES[device] for case in CASES]
    return {"meta": meta, "rows": rows}


def _row(case: Case, m: int, k: int, device: str) -> dict[str, Any]:
    inputs = tuple(torch.randn(m, k, device=device).bfloat16() for _ in range(case.inputs))
    call = partial(case.call, torch.rand(k, device=device).bfloat16()) if case.weight else case.call
    moved = sum(t.nbytes for t in (*inputs, *call(*inputs)))
    source = torch.randint(0, 256, (moved // 2,), dtype=torch.uint8, device=device)
    ours = partial(_next, call, rotation(inputs, copies_of(moved, device)))
    copy = partial(_next, lambda a, b: b.copy_(a), rotation((source, source.clone()), copies_of(moved, device)))
    if device == "cuda":
        graphs = [Graph(call, copies_of(moved, device), moved / _GPU_BYTES_PER_S) for call in (ours, copy)]
        ours_s, copy_s = replayed(graphs, _CELL_S[device])
    else:
        ours_s, copy_s = interleaved([ours, copy], _CELL_S[device])
    row = {
        **{"op": case.name, "M": m, "K": k, "dtype": "bfloat16", "passes": case.passes},
        **{
            "us": ours_s * 1e6,
            "copy_us": copy_s * 1e6,
            "gb_s": moved / ours_s / 1e9,
            "copy_gb_s": moved / copy_s / 1e9,
        },
    }
    print(f"{m:>5} x {k:<6} {case.name:<30} {row['us']:9.1f} us {row['gb_s']:7.1f} GB/s", end="")
    print(f"  {copy_s / ours_s:4.0%} of a copy", flush=True)
    return row


def _next(call: Callable[..., object], tensors: Any) -> object:
    return call(*next(tensors))


def render(results: dict[str, Any]) -> str:
    """The Markdown of one results file."""
    rows = results["rows"]
    shapes = list(dict.fromkeys((row["M"], row["K"]) for row in rows))
    lines = []
    for name in dict.fromkeys(row["op"] for row in rows):
        cells = {(row["M"], row["K"]): row for row in rows if row["op"] == name}
        line = [cells[shape] for shape in shapes]
        lines.append([name, *(f"{r['us']:.1f} µs, {r['gb_s']:.0f} GB/s, {r['copy_us'] / r['us']:.0%}" for r in line)])
    header = ["operator", *(f"{m} × {k}" for m, k in shapes)]
    return f"{caption(results['meta'])}; bfloat16 inputs.\n\n{table(header, lines)}"

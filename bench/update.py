"""In-place update of quantized layers: GB/s of ``load_float_``, ``update_`` and a copy.

Bytes are those of the bfloat16 weight, read once, and of the packed one, written once, regardless of actual traffic; a
copy reads and writes as many as the weight has. Clipping is not searched. "kernel" is ``quantize_weight_`` alone, in a
CUDA graph. Weights alternate, so that the next one is not cached.
"""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

import qao
import torch
from torch import Tensor, nn

from .markdown import caption, table
from .meta import describe
from .timing import Graph, copies_of, interleaved, replayed, rotation

SHAPES = {"4096x4096": (4096, 4096), "14336x4096": (14336, 4096), "28672x4096": (28672, 4096)}
# Linear layers of two blocks of Llama 3.1 8B, for ``update_``.
MODEL = [(6144, 4096), (4096, 4096), (28672, 4096), (4096, 14336)] * 2
SCHEMES: dict[str, qao.Scheme] = {
    "int4": qao.Int4WeightOnly(clip_search=False),
    "int4 g32": qao.Int4WeightOnly(group_size=32, clip_search=False),
    "int4 rows": qao.Int4WeightOnly(group_size=-1, clip_search=False),
    "int4 symmetric": qao.Int4WeightOnly(symmetric=True, clip_search=False),
    "int8": qao.Int8WeightOnly(clip_search=False),
    "fp8": qao.Float8WeightOnly(),
    "fp8 tensor": qao.Float8WeightOnly(granularity="tensor"),
    "fp8 block": qao.Float8WeightOnly(granularity="block"),
    "mxfp4": qao.Fp4WeightOnly(),
    "nvfp4": qao.Fp4WeightOnly(format="nvfp4"),
    "int8_int8 asymmetric": qao.Int8DynamicActivationInt8Weight(symmetric_activations=False, clip_search=False),
}
SECONDS = {"cpu": 0.3, "cuda": 0.05}


def _layer(weight: Tensor, scheme: qao.Scheme) -> qao.QuantLinear:
    n, k = weight.shape
    return qao.QuantLinear(k, n, scheme, scheme.quantize(weight), None, weight.dtype)


def _kernel(weights: Any, copies: int, layer: qao.QuantLinear, floor: float) -> float | None:
    """Seconds of the kernel, if the scheme has one."""
    one_pass = layer.scheme.one_pass(layer.out_features, layer.in_features)
    if one_pass is None:
        return None
    fault = torch.zeros(1, dtype=torch.int32, device="cuda")
    q, scales = layer.qweight, layer.scales
    graph = Graph(lambda: qao.ops.quantize_weight_(next(weights)[0], q, scales, fault, None, *one_pass), copies, floor)
    return replayed([graph], SECONDS["cuda"])[0]


def _of_layers(device: str, shape: str) -> list[dict[str, Any]]:
    n, k = SHAPES[shape]
    weight, rows = torch.randn(n, k, device=device, dtype=torch.bfloat16), []
    copies = copies_of(weight.nbytes, device)
    weights, target = rotation((weight,), copies), torch.empty_like(weight)
    for name, scheme in SCHEMES.items():
        layer = _layer(weight, scheme)
        moved = weight.nbytes + sum(one.nbytes for one in layer.parameters())
        taken, copy = interleaved(
            [lambda layer=layer: layer.load_float_(next(weights)[0]), lambda: target.copy_(next(weights)[0])],
            SECONDS[device],
            device,
        )
        rows.append(_row(name, shape, "load_float_", taken, moved, copy, 2 * weight.nbytes))
        floor = moved / (2 * weight.nbytes) * copy
        if device == "cuda" and (kernel := _kernel(weights, copies, layer, floor)) is not None:
            rows.append(_row(name, shape, "kernel", kernel, moved, copy, 2 * weight.nbytes))
    return rows


def _of_model(device: str) -> list[dict[str, Any]]:
    with torch.device(device):
        floats = nn.ModuleList(nn.Linear(k, n, bias=False, dtype=torch.bfloat16) for n, k in MODEL)
    state, rows = floats.state_dict(), []
    size = sum(one.nbytes for one in state.values())
    targets = [torch.empty_like(one) for one in state.values()]
    for name, scheme in SCHEMES.items():
        model = nn.ModuleList(_layer(weight, scheme) for weight in state.values())
        moved = size + sum(one.nbytes for one in model.parameters())
        taken, copy = interleaved(
            [
                lambda model=model: qao.update_(model, state),
                lambda: [to.copy_(one) for to, one in zip(targets, state.values(), strict=True)],
            ],
            SECONDS[device],
            device,
        )
        rows.append(_row(name, "model", "update_", taken, moved, copy, 2 * size))
    return rows


def _row(scheme: str, shape: str, call: str, taken: float, moved: int, copy: float, copied: int) -> dict[str, Any]:
    rates = {"gb_s": moved / taken / 1e9, "copy_gb_s": copied / copy / 1e9}
    row = {"scheme": scheme, "shape": shape, "call": call, "us": 1e6 * taken, **rates}
    row["copy_ratio"] = row["gb_s"] / row["copy_gb_s"]
    print(
        f"{scheme:<20} {shape:<10} {call:<11} {1e6 * taken:9.1f} us {row['gb_s']:7.0f} GB/s {row['copy_ratio']:6.1%}",
        flush=True,
    )
    return row


def run(device: str, shapes: list[str] | None, save: Callable[[dict[str, Any]], object]) -> None:
    """``save`` gets partial results after every shape."""
    rows: list[dict[str, Any]] = []
    parts = [lambda shape=shape: _of_layers(device, shape) for shape in shapes or SHAPES]
    for part in [*parts, *([] if shapes else [lambda: _of_model(device)])]:
        rows += part()
        save({"meta": describe(device), "rows": rows})


def render(results: dict[str, Any]) -> str:
    """Microseconds, and the share of a copy's bandwidth, by scheme."""
    rows = results["rows"]
    columns = list(dict.fromkeys((row["shape"], row["call"]) for row in rows))
    cells = {(row["scheme"], row["shape"], row["call"]): row for row in rows}
    lines = []
    for scheme in dict.fromkeys(row["scheme"] for row in rows):
        found = (cells.get((scheme, *column)) for column in columns)
        lines.append(
            [scheme, *("–" if one is None else f"{one['us']:.0f} µs, {one['copy_ratio']:.0%}" for one in found)]
        )
    header = ["scheme", *(f"{shape.replace('x', ' × ')}: {call}" for shape, call in columns)]
    return f"{caption(results['meta'])}; bfloat16 weights.\n\n{table(header, lines)}"

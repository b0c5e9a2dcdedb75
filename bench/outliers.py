"""Accuracy of GEMM kernels and of their schemes, with and without outlier channels in x.

In language models, some channels of a layer's x are much larger, and the matching columns of W are small, so that y is
balanced. The kernel's error is measured in float64 against its own operands: dequantized W and quantized x. The
scheme's error is that of these operands against the float layer. Both are relative Frobenius errors of y. Plain torch,
F.linear on the same W in x's dtype, is measured in the same way.
"""

from __future__ import annotations

from typing import Any

import qao
import torch
from qao.ops import hadamard, reference
from qao.ops.rotation import rotated
from torch import Tensor, nn
from torch.nn import functional

from .markdown import caption, table
from .meta import describe

N, K = 1024, 4096
TOKENS = (1, 16, 512)  # these use different kernels; the largest error counts
SCHEMES: dict[str, qao.Scheme] = {
    **{word: kind() for word, kind in qao.schemes.SCHEMES.items()},
    "int8_int8, rotation 64": qao.Int8DynamicActivationInt8Weight(rotation=64),
    "int4, groups of 32": qao.Int4WeightOnly(group_size=32),
    "fp4, nvfp4": qao.Fp4WeightOnly("nvfp4"),
    "fp8_fp8, blocks": qao.Float8DynamicActivationFloat8Weight(granularity="block"),
}
# Number of outlier channels and their factor.
OUTLIERS = {"none": (0, 1), "six, 100 times": (6, 100), "one, 10000 times": (1, 10000)}


@torch.inference_mode()
def run(device: str) -> dict[str, Any]:
    """Measure, print a line each, and return the content of the results file."""
    rows = []
    for name, scheme in SCHEMES.items():
        for outliers, (count, size) in OUTLIERS.items():
            weight, tokens = _operands(count, size, device)
            layer = qao.QuantLinear.from_linear(_linear(weight), scheme)
            found = [_errors(layer, weight, x) for x in tokens]
            row = {"scheme": name, "outliers": outliers}
            row |= {key: max(one[key] for one in found) for key in found[0]}
            print(f"{name:<20} {outliers:<14}", *(f"{key} {row[key]:.2e}" for key in found[0]), flush=True)
            rows.append(row)
    return {"meta": describe(device) | {"N": N, "K": K, "tokens": list(TOKENS)}, "rows": rows}


def _operands(count: int, size: float, device: str) -> tuple[Tensor, list[Tensor]]:
    """W in float32, and x in bfloat16 for each number of tokens."""
    random = torch.Generator().manual_seed(count)
    weight = torch.randn(N, K, generator=random) * 0.02
    large = torch.randperm(K, generator=random)[:count]
    weight[:, large] /= size
    tokens = []
    for m in TOKENS:
        x = torch.randn(m, K, generator=random)
        x[:, large] *= size
        tokens.append(x.bfloat16().to(device))
    return weight.to(device), tokens


def _linear(weight: Tensor) -> nn.Linear:
    layer = nn.Linear(K, N, bias=False, device="meta")
    layer.weight = nn.Parameter(weight, requires_grad=False)
    return layer


def _errors(layer: qao.QuantLinear, weight: Tensor, x: Tensor) -> dict[str, float]:
    dense = layer.scheme.dequantize(layer.qweight, layer.scales, N, K, torch.float32)
    seen = _seen(layer.scheme, x).to(x.device)
    exact = seen @ dense.double().t()
    return {
        "kernel_error": _distance(layer(x), exact),
        "torch_error": _distance(functional.linear(x, dense.to(x.dtype)), x.double() @ dense.double().t()),
        "quantization_error": _distance(exact, x.double() @ weight.double().t()),
    }


def _seen(scheme: qao.Scheme, x: Tensor) -> Tensor:
    """float64: the activations that the GEMM reads."""
    if scheme.word.startswith("int8_"):
        seen = reference.dequantize_activation(
            *reference.quantize_activation_int8(rotated(x, scheme.rotation), symmetric=True)
        )
        return seen if not scheme.rotation else _turned_back(seen, scheme.rotation)
    if scheme.word.startswith("fp8_"):
        size = 128 if getattr(scheme, "granularity", "") == "block" else -1
        return reference.dequantize_activation(*reference.quantize_activation_fp8(x, size))
    return x.double()


def _turned_back(seen: Tensor, size: int) -> Tensor:
    """The activations before the rotation, in float64."""
    block = hadamard(torch.eye(size, device=seen.device), size).sign().double() / size**0.5
    return (seen.view(len(seen), -1, size) @ block).flatten(1)


def _distance(y: Tensor, exact: Tensor) -> float:
    error, size = (y.double() - exact).norm().item(), exact.norm().item()
    return error / size if size else float(error != 0)  # int8 with a channel of factor 10000: all others become 0


def render(results: dict[str, Any]) -> str:
    """The Markdown of one results file."""
    meta, rows = results["meta"], results["rows"]
    lines = []
    for name in dict.fromkeys(row["scheme"] for row in rows):
        cells = [next(r for r in rows if (r["scheme"], r["outliers"]) == (name, kind)) for kind in OUTLIERS]
        shares = (
            f"{cell['kernel_error']:.2%} ({cell['torch_error']:.2%}), {cell['quantization_error']:.1%}"
            for cell in cells
        )
        lines.append([name, *shares])
    header = ["scheme", *(f"channels far larger: {kind}" for kind in OUTLIERS)]
    size = f"{meta['N']} × {meta['K']}, bfloat16 x of {', '.join(map(str, meta['tokens']))} tokens, the largest error"
    return f"{caption(meta)}; {size}.\n\n{table(header, lines)}"

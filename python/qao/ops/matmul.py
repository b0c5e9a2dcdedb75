"""Differentiable dense GEMMs by weight format, the functions that layers and users call.

``qao.ops`` documents the common arguments and the result.
"""

from __future__ import annotations

from collections.abc import Callable

import torch
from torch import Tensor

from . import library  # noqa: F401  # loads the operators
from .autograd import differentiable, product
from .dequantize import dense_fp4, dense_int4, dequantize_fp8, dequantize_int8
from .gguf import gguf_embedding
from .signature import check_order
from .weight_ops import int4_embedding, int8_embedding

__all__ = [
    "EMBEDDINGS",
    "FP4",
    "FP8",
    "FP8_FP8",
    "FP8_INT4",
    "INT4",
    "INT8",
    "INT8_INT4",
    "INT8_INT8",
    "fp4_mm",
    "fp8_fp8_mm",
    "fp8_int4_mm",
    "fp8_mm",
    "int4_mm",
    "int8_int4_mm",
    "int8_int8_mm",
    "int8_mm",
]

# Operators that layers pass to ``product``. Modules that ``qao.ops`` imports later iterate over DENSE.
INT4 = differentiable(torch.ops.qao.int4_mm.default, dense_int4)
INT8 = differentiable(torch.ops.qao.int8_mm.default, dequantize_int8)
FP8 = differentiable(torch.ops.qao.fp8_mm.default, dequantize_fp8)
FP4 = differentiable(torch.ops.qao.fp4_mm.default, dense_fp4)
INT8_INT8 = differentiable(torch.ops.qao.int8_int8_mm.default, dequantize_int8)
INT8_INT4 = differentiable(torch.ops.qao.int8_int4_mm.default, dense_int4)
FP8_FP8 = differentiable(torch.ops.qao.fp8_fp8_mm.default, dequantize_fp8)
FP8_INT4 = differentiable(torch.ops.qao.fp8_int4_mm.default, dense_int4)

torch.fx.wrap("product")  # one node in fx.symbolic_trace: it selects the autograd path at run time

# ---- rows of W, by format: (ids [...], weight, scales, *constants, dtype) -> [..., K] --------------------------------

EMBEDDINGS: dict[str, Callable[..., Tensor]] = {
    "int4": int4_embedding,
    "int8": int8_embedding,
    "gguf": lambda ids, weight, scales, qtype, dtype: gguf_embedding(ids, weight, qtype, dtype),
}

# ---- differentiable GEMMs, with the arguments of the raw operators ---------------------------------------------------


def int4_mm(
    x: Tensor,
    weight: Tensor,
    scales: Tensor,
    bias: Tensor | None,
    out_features: int = 0,
    in_features: int = 0,
    group_size: int = 0,
    batch_invariant: bool = False,
) -> Tensor:
    """y = x · Wᵀ + bias with an int4 weight."""
    constants = out_features, in_features, group_size, batch_invariant
    return product(INT4, constants, x, weight, scales, bias)


def int8_mm(
    x: Tensor,
    weight: Tensor,
    scales: Tensor,
    bias: Tensor | None,
    batch_invariant: bool = False,
) -> Tensor:
    """y = x · Wᵀ + bias with an int8 weight."""
    return product(INT8, (batch_invariant,), x, weight, scales, bias)


def fp8_mm(
    x: Tensor,
    weight: Tensor,
    scales: Tensor,
    bias: Tensor | None,
    batch_invariant: bool = False,
) -> Tensor:
    """y = x · Wᵀ + bias with an fp8 weight."""
    return product(FP8, (batch_invariant,), x, weight, scales, bias)


def fp4_mm(
    x: Tensor,
    weight: Tensor,
    scales: Tensor,
    bias: Tensor | None,
    out_features: int = 0,
    in_features: int = 0,
    group_size: int = 0,
    batch_invariant: bool = False,
) -> Tensor:
    """y = x · Wᵀ + bias with an fp4 weight: ``group_size`` 32 is MXFP4, 16 NVFP4."""
    constants = out_features, in_features, group_size, batch_invariant
    return product(FP4, constants, x, weight, scales, bias)


def int8_int8_mm(
    x: Tensor,
    weight: Tensor,
    scales: Tensor,
    bias: Tensor | None,
    weight_sums: Tensor | None = None,
    batch_invariant: bool = False,
    x_rotation: int = 0,
) -> Tensor:
    """y = x̂ · Wᵀ + bias with an int8 weight and x̂ = x quantized to int8, with one scale per token.

    ``weight_sums``: float32 [N], sums over k of the dequantized W. It selects asymmetric quantization of x, with a zero
    point per token; None: symmetric. ``x_rotation``: block size of a Hadamard rotation; the operator quantizes
    ``hadamard(x, x_rotation)``, and the columns of W are rotated in the same way; 0: no rotation.
    """
    return product(INT8_INT8, (batch_invariant, x_rotation), x, weight, scales, bias, weight_sums)


def int8_int4_mm(
    x: Tensor,
    weight: Tensor,
    scales: Tensor,
    bias: Tensor | None,
    weight_sums: Tensor | None = None,
    row_scales: Tensor | None = None,
    out_features: int = 0,
    in_features: int = 0,
    group_size: int = 0,
    batch_invariant: bool = False,
    x_rotation: int = 0,
) -> Tensor:
    """y = x̂ · Wᵀ + bias with an int4 weight; x̂, ``weight_sums`` and ``x_rotation`` as for ``int8_int8_mm``.

    ``row_scales``: float32 [N] of two-level scales: each scale of a symmetric W is a nonzero integer from -15 to 16
    times its row's scale. The result is the same except for rounding, and on Hopper the GEMM of many tokens needs no
    scaling per group. Other ratios give wrong results there.
    """
    check_order("int8_int4_mm", row_scales=row_scales)
    constants = out_features, in_features, group_size, batch_invariant, x_rotation
    return product(INT8_INT4, constants, x, weight, scales, bias, weight_sums, row_scales)


def fp8_fp8_mm(
    x: Tensor,
    weight: Tensor,
    scales: Tensor,
    bias: Tensor | None,
    x_scale: Tensor | None = None,
    x_group_size: int = -1,
    fast_accum: bool = False,
    batch_invariant: bool = False,
) -> Tensor:
    """y = x̂ · Wᵀ + bias with an fp8 weight and x̂ = x quantized to e4m3.

    ``x_group_size``: granularity of the scales of x: -1 per token, 128 per block of columns (with block-scaled W),
    0 per tensor. ``x_scale``: float32 [1], the static per-tensor scale. ``fast_accum``: GPUs may accumulate more than
    128 columns in the tensor core's short accumulator.
    """
    constants = x_group_size, fast_accum, batch_invariant
    return product(FP8_FP8, constants, x, weight, scales, bias, x_scale)


def fp8_int4_mm(
    x: Tensor,
    weight: Tensor,
    scales: Tensor,
    bias: Tensor | None,
    row_scales: Tensor | None = None,
    out_features: int = 0,
    in_features: int = 0,
    group_size: int = 0,
    batch_invariant: bool = False,
    fast_accum: bool = False,
) -> Tensor:
    """y = x̂ · Wᵀ + bias with an int4 weight and x̂ = x quantized to e4m3, with one scale per token.

    ``row_scales``: float32 [N] of two-level scales as in ``int8_int4_mm``, with powers of two from 2^-14 to 32, of
    either sign, as factors. ``fast_accum``: with these, or one group per row, GPUs may accumulate more than
    128 columns in the tensor core's short accumulator.
    """
    check_order("fp8_int4_mm", row_scales=row_scales)
    constants = out_features, in_features, group_size, batch_invariant, fast_accum
    return product(FP8_INT4, constants, x, weight, scales, bias, row_scales)

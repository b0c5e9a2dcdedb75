"""Differentiable grouped GEMMs by weight format; grouped_autograd.py defines arguments and result."""

from __future__ import annotations

import torch
from torch import Tensor

from .. import _moved
from .grouped_autograd import Gate, grouped_product
from .signature import check_order

_qao = torch.ops.qao

__all__ = [
    "fp4_grouped_mm",
    "fp8_fp8_grouped_mm",
    "fp8_grouped_mm",
    "fp8_int4_grouped_mm",
    "gguf_grouped_mm",
    "int4_grouped_mm",
    "int8_grouped_mm",
    "int8_int4_grouped_mm",
    "int8_int8_grouped_mm",
]

# Operators that the experts' modules pass to ``grouped_product``.
INT4 = _qao.int4_grouped_mm.default
FP4 = _qao.fp4_grouped_mm.default
INT8 = _qao.int8_grouped_mm.default
FP8 = _qao.fp8_grouped_mm.default
INT8_INT8 = _qao.int8_int8_grouped_mm.default
INT8_INT4 = _qao.int8_int4_grouped_mm.default
FP8_FP8 = _qao.fp8_fp8_grouped_mm.default
FP8_INT4 = _qao.fp8_int4_grouped_mm.default
GGUF = _qao.gguf_grouped_mm.default


@_moved.renamed
def int4_grouped_mm(
    x: Tensor,
    weight: Tensor,
    scales: Tensor,
    bias: Tensor | None,
    offsets: Tensor,
    row_index: Tensor | None,
    router_weights: Tensor | None,
    out_features: int = 0,
    in_features: int = 0,
    group_size: int = 0,
    batch_invariant: bool = False,
    gate: Gate | None = None,
) -> Tensor:
    """Grouped GEMM of ``qao.ops.int4_mm``."""
    constants = out_features, in_features, group_size, batch_invariant
    return grouped_product(INT4, constants, x, weight, scales, bias, offsets, row_index, router_weights, gate=gate)


@_moved.renamed
def fp4_grouped_mm(
    x: Tensor,
    weight: Tensor,
    scales: Tensor,
    bias: Tensor | None,
    offsets: Tensor,
    row_index: Tensor | None,
    router_weights: Tensor | None,
    out_features: int = 0,
    in_features: int = 0,
    group_size: int = 0,
    batch_invariant: bool = False,
    gate: Gate | None = None,
) -> Tensor:
    """Grouped GEMM of ``qao.ops.fp4_mm``."""
    constants = out_features, in_features, group_size, batch_invariant
    return grouped_product(FP4, constants, x, weight, scales, bias, offsets, row_index, router_weights, gate=gate)


@_moved.renamed
def int8_grouped_mm(
    x: Tensor,
    weight: Tensor,
    scales: Tensor,
    bias: Tensor | None,
    offsets: Tensor,
    row_index: Tensor | None,
    router_weights: Tensor | None,
    batch_invariant: bool = False,
    gate: Gate | None = None,
) -> Tensor:
    """Grouped GEMM of ``qao.ops.int8_mm``."""
    arguments = INT8, (batch_invariant,), x, weight, scales, bias, offsets, row_index, router_weights
    return grouped_product(*arguments, gate=gate)


@_moved.renamed
def fp8_grouped_mm(
    x: Tensor,
    weight: Tensor,
    scales: Tensor,
    bias: Tensor | None,
    offsets: Tensor,
    row_index: Tensor | None,
    router_weights: Tensor | None,
    batch_invariant: bool = False,
    gate: Gate | None = None,
) -> Tensor:
    """Grouped GEMM of ``qao.ops.fp8_mm``."""
    arguments = FP8, (batch_invariant,), x, weight, scales, bias, offsets, row_index, router_weights
    return grouped_product(*arguments, gate=gate)


@_moved.renamed
def int8_int8_grouped_mm(
    x: Tensor,
    weight: Tensor,
    scales: Tensor,
    bias: Tensor | None,
    offsets: Tensor,
    row_index: Tensor | None,
    router_weights: Tensor | None,
    weight_sums: Tensor | None = None,
    batch_invariant: bool = False,
    x_rotation: int = 0,
    gate: Gate | None = None,
) -> Tensor:
    """Grouped GEMM of ``qao.ops.int8_int8_mm``."""
    constants = batch_invariant, x_rotation
    arguments = INT8_INT8, constants, x, weight, scales, bias, offsets, row_index, router_weights, weight_sums
    return grouped_product(*arguments, gate=gate)


@_moved.renamed
def int8_int4_grouped_mm(
    x: Tensor,
    weight: Tensor,
    scales: Tensor,
    bias: Tensor | None,
    offsets: Tensor,
    row_index: Tensor | None,
    router_weights: Tensor | None,
    weight_sums: Tensor | None = None,
    row_scales: Tensor | None = None,
    out_features: int = 0,
    in_features: int = 0,
    group_size: int = 0,
    batch_invariant: bool = False,
    x_rotation: int = 0,
    gate: Gate | None = None,
) -> Tensor:
    """Grouped GEMM of ``qao.ops.int8_int4_mm``; ``row_scales`` is [E, N]."""
    check_order("int8_int4_grouped_mm", row_scales=row_scales)
    constants = out_features, in_features, group_size, batch_invariant, x_rotation
    routing, others = (offsets, row_index, router_weights), (weight_sums, row_scales)
    return grouped_product(INT8_INT4, constants, x, weight, scales, bias, *routing, *others, gate=gate)


@_moved.renamed
def fp8_fp8_grouped_mm(
    x: Tensor,
    weight: Tensor,
    scales: Tensor,
    bias: Tensor | None,
    offsets: Tensor,
    row_index: Tensor | None,
    router_weights: Tensor | None,
    x_scale: Tensor | None = None,
    x_group_size: int = -1,
    fast_accum: bool = False,
    batch_invariant: bool = False,
    gate: Gate | None = None,
) -> Tensor:
    """Grouped GEMM of ``qao.ops.fp8_fp8_mm``; all experts share ``x_scale``, float32 [1]."""
    constants = x_group_size, fast_accum, batch_invariant
    arguments = FP8_FP8, constants, x, weight, scales, bias, offsets, row_index, router_weights, x_scale
    return grouped_product(*arguments, gate=gate)


@_moved.renamed
def fp8_int4_grouped_mm(
    x: Tensor,
    weight: Tensor,
    scales: Tensor,
    bias: Tensor | None,
    offsets: Tensor,
    row_index: Tensor | None,
    router_weights: Tensor | None,
    row_scales: Tensor | None = None,
    out_features: int = 0,
    in_features: int = 0,
    group_size: int = 0,
    batch_invariant: bool = False,
    fast_accum: bool = False,
    gate: Gate | None = None,
) -> Tensor:
    """Grouped GEMM of ``qao.ops.fp8_int4_mm``; ``row_scales`` is [E, N]."""
    check_order("fp8_int4_grouped_mm", row_scales=row_scales)
    constants = out_features, in_features, group_size, batch_invariant, fast_accum
    arguments = FP8_INT4, constants, x, weight, scales, bias, offsets, row_index, router_weights, row_scales
    return grouped_product(*arguments, gate=gate)


def gguf_grouped_mm(
    x: Tensor,
    weight: Tensor,
    bias: Tensor | None,
    offsets: Tensor,
    row_index: Tensor | None,
    router_weights: Tensor | None,
    qtype: int,
    batch_invariant: bool = False,
    gate: Gate | None = None,
) -> Tensor:
    """Grouped GEMM of ``qao.ops.gguf_mm``; ``weight`` is uint8 [E, N, row_bytes]. CPU only."""
    constants = qtype, batch_invariant
    return grouped_product(GGUF, constants, x, weight, None, bias, offsets, row_index, router_weights, gate=gate)

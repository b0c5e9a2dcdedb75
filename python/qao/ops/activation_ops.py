"""Activation quantization, its fusions with norms and gates, and its GEMMs, without gradients.

Sizes: M tokens, N = out_features, K = in_features. x is [..., K] in float32, float16 or bfloat16 ("a float dtype"),
with any strides; results are contiguous. weight_ops.py documents packed weights.

All raise RuntimeError if a shape, dtype, device or alignment does not fit; the message lists all operands and the
remedy.
"""

from __future__ import annotations

import torch
from torch import Tensor

from .batch_invariant import MODE
from .signature import check_order

_qao = torch.ops.qao

# ---- quantization of activations -------------------------------------------------------------------------------------


def hadamard(x: Tensor, size: int) -> Tensor:
    """x [..., K] with every block of ``size`` columns multiplied by the orthogonal Hadamard matrix, in x's dtype.

    ``size``: 16, 32, 64, 128 or 256, a divisor of K. Sums are float32. Applied twice it gives x except for rounding.
    """
    return _qao.hadamard.default(x, size)  # type: ignore[no-any-return]


def int8_quantize(x: Tensor, symmetric: bool, rotation: int = 0) -> tuple[Tensor, Tensor, Tensor]:
    """x ≈ (q - zero) * scale per row: q int8 [..., K], scales float32 [..., 1] and zeros int32 [..., 1].

    ``symmetric``: zeros are 0 and q is in -127..127. A row with NaN or an infinity has scale NaN and q = 0.
    ``rotation``: quantizes ``hadamard(x, rotation)`` without rounding it in between; 0 for x itself.
    """
    return _qao.int8_quantize.default(x, symmetric, rotation)  # type: ignore[no-any-return]


def fp8_quantize(x: Tensor, scale: Tensor | None, group_size: int) -> tuple[Tensor, Tensor]:
    """x ≈ q * scale: q float8_e4m3fn [..., K] and scales float32.

    Args:
        x: the activations.
        scale: float32 [1], a static scale for ``group_size`` 0; values beyond its range saturate. Otherwise None.
        group_size: granularity of the scales: -1 per row (scales [..., 1]), 128 per 128 columns of a row (scales
            [..., ceil(K / 128)]), 0 per tensor (scales [1]).
    """
    return _qao.fp8_quantize.default(x, scale, group_size)  # type: ignore[no-any-return]


def rms_norm_quantize(x: Tensor, weight: Tensor | None, eps: float, dtype: torch.dtype) -> tuple[Tensor, Tensor]:
    """Quantizes x / sqrt(mean(x²) + eps) * weight per row: q of ``dtype`` [..., K] and scales float32 [..., 1].

    Args:
        x: the input of the norm.
        weight: [K] in a float dtype, contiguous; None for ones.
        eps: added to the mean square.
        dtype: torch.int8, symmetric, or torch.float8_e4m3fn.
    """
    return _qao.rms_norm_quantize.default(x, weight, eps, dtype)  # type: ignore[no-any-return]


def add_rms_norm_quantize(
    x: Tensor, residual: Tensor | None, weight: Tensor | None, eps: float, dtype: torch.dtype
) -> tuple[Tensor, Tensor, Tensor]:
    """``rms_norm_quantize`` of h = x + residual, and h [..., K] in x's dtype as the third result.

    ``residual`` has the shape and dtype of x, or is None for zeros.
    """
    return _qao.add_rms_norm_quantize.default(x, residual, weight, eps, dtype)  # type: ignore[no-any-return]


def silu_mul_quantize(gate: Tensor, up: Tensor, dtype: torch.dtype) -> tuple[Tensor, Tensor]:
    """Quantizes silu(gate) * up as ``rms_norm_quantize`` does. gate and up are [..., K] with the same dtype."""
    return _qao.silu_mul_quantize.default(gate, up, dtype)  # type: ignore[no-any-return]


def swiglu_quantize(
    x: Tensor, alpha: float, limit: float, shift: float, interleaved: bool, dtype: torch.dtype
) -> tuple[Tensor, Tensor]:
    """Quantizes ``qao.ops.swiglu`` of x [..., 2 K] as ``rms_norm_quantize`` does."""
    return _qao.swiglu_quantize.default(x, alpha, limit, shift, interleaved, dtype)  # type: ignore[no-any-return]


# ---- GEMMs -----------------------------------------------------------------------------------------------------------


def int8_scaled_mm(
    x: Tensor,
    x_scales: Tensor,
    x_zeros: Tensor | None,
    weight: Tensor,
    scales: Tensor,
    bias: Tensor | None,
    weight_sums: Tensor | None,
    out_dtype: torch.dtype,
    batch_invariant: bool = False,
) -> Tensor:
    """``int8_int8_mm`` of quantized activations: [..., N] in ``out_dtype``, a float dtype.

    Args:
        x, x_scales, x_zeros: as ``int8_quantize`` returned them; x_zeros is None for a symmetric x.
        weight: int8 [N, K].
        scales: float32 [N] or [1].
        bias: [N] in a float dtype, or None.
        weight_sums: float32 [N], sums over k of the dequantized W; given if and only if x_zeros is given.
        out_dtype: of the result.
        batch_invariant: a row of the result depends on its row of x and W alone.
    """
    operands = x, x_scales, x_zeros, weight, scales, bias, weight_sums
    mode = batch_invariant or MODE.on
    return _qao.int8_scaled_mm.default(*operands, out_dtype, mode)  # type: ignore[no-any-return]


def fp8_scaled_mm(
    x: Tensor,
    x_scales: Tensor,
    weight: Tensor,
    scales: Tensor,
    bias: Tensor | None,
    out_dtype: torch.dtype,
    fast_accum: bool,
    batch_invariant: bool = False,
) -> Tensor:
    """``fp8_fp8_mm`` of quantized activations: [..., N] in ``out_dtype``, a float dtype.

    Args:
        x, x_scales: as ``fp8_quantize`` returned them, with group_size 128 for a block-scaled W.
        weight: float8_e4m3fn [N, K], or its bytes as int8.
        scales: float32 [N], [N, 1], [1] or one per 128 x 128 block, [ceil(N / 128), ceil(K / 128)].
        bias: [N] in a float dtype, or None.
        out_dtype: of the result.
        fast_accum: GPUs may accumulate more than 128 columns in the tensor core's short accumulator.
        batch_invariant: a row of the result depends on its row of x and W alone.
    """
    operands = x, x_scales, weight, scales, bias
    mode = batch_invariant or MODE.on
    return _qao.fp8_scaled_mm.default(*operands, out_dtype, fast_accum, mode)  # type: ignore[no-any-return]


def add_rms_norm_int4_mm(
    x: Tensor,
    residual: Tensor | None,
    norm_weight: Tensor | None,
    weight: Tensor,
    scales: Tensor,
    bias: Tensor | None,
    eps: float,
    out_features: int,
    in_features: int,
    group_size: int,
    gated: bool,
) -> tuple[Tensor, Tensor]:
    """y = norm · Wᵀ + bias and h, where (norm, h) = ``add_rms_norm(x, residual, norm_weight, eps)`` and W is int4.

    ``gated``: W has the rows of a gate projection, then those of its up projection, and y is silu(gate) * up.

    Returns:
        y [..., N], or [..., N / 2] if gated, and h [..., K], in x's dtype.
    """
    check_order("add_rms_norm_int4_mm", weight=weight)
    numbers = eps, out_features, in_features, group_size, gated
    return _qao.add_rms_norm_int4_mm.default(x, residual, norm_weight, weight, scales, bias, *numbers)  # type: ignore[no-any-return]

"""Operators on weights: quantization, int4 packing, dequantization and embedding lookup.

Sizes: N = out_features, K = in_features; "a float dtype" is float32, float16 or bfloat16. A packed int4 weight is
``weight``, int8 [ceil(N / 16), ceil(K / 64), 512], and ``scales``, [ceil(N / 16), G, P, 16] in a float dtype:
G = ceil(K / group_size) groups per row, 1 for -1; P = 1 for scales only, 2 with zero points.

All raise RuntimeError if a shape, dtype, device or alignment does not fit; the message lists all operands and the
remedy.
"""

from __future__ import annotations

from collections.abc import Sequence

import torch
from torch import Tensor

_qao = torch.ops.qao

# ---- quantization of a float weight ----------------------------------------------------------------------------------


def quantize_groups(
    weight: Tensor,
    importance: Tensor | None,
    group_size: int,
    dtype: torch.dtype,
    symmetric: bool,
    scale_dtype: torch.dtype,
    factors: Sequence[float],
    whole_zeros: bool = False,
    rounds: int = 0,
) -> tuple[Tensor, Tensor, Tensor, Tensor]:
    """W ≈ (q - zero) * scale per group: q of ``dtype`` [N, K], scales and zeros of ``scale_dtype`` [N, G],
    and float64 [2], the sums of squares of the error and of W, which are nonfinite if a value of W is nonfinite.

    Args:
        weight: W [N, K] in a float dtype, with any strides.
        importance: float32 [K], contiguous, >= 0: weights of the columns' squared errors in the search; None: equal
            weights.
        group_size: 32, 64, 128, 256, or K, or -1 for K.
        dtype: torch.uint8 for 0..15, or torch.int8 for -127..127, which is symmetric.
        symmetric: zeros are 8 (uint8) or 0 (int8).
        scale_dtype: a float dtype; scales are rounded to it before q is computed.
        factors: positive, at most 64 on a GPU; candidates of a search that multiplies a group's range by each and
            keeps the first factor with the least weighted error.
        whole_zeros: zeros are integers 0..15; otherwise a group with values on a grid of sixteen steps keeps that grid.
        rounds: maximum number of least-squares refinements of scale and zero for the other groups.
    """
    return _qao.quantize_groups.default(  # type: ignore[no-any-return]
        weight, importance, group_size, dtype, symmetric, scale_dtype, factors, whole_zeros, rounds
    )


def quantize_blocks(weight: Tensor, rows: int, columns: int) -> tuple[Tensor, Tensor, Tensor]:
    """W ≈ q * scale per block, on the CPU: q float8_e4m3fn [N, K], scales float32 [ceil(N / rows), ceil(K / columns)]
    that map the largest magnitude of a block to 448, and sums of squares as from ``quantize_groups``.

    Args:
        weight: W [N, K] in a float dtype, with any strides.
        rows, columns: of a block; 1 and K for per-row scales, N and K for one scale. Larger numbers count as N and K.
    """
    return _qao.quantize_blocks.default(weight, rows, columns)  # type: ignore[no-any-return]


def quantize_fp4(weight: Tensor, group_size: int) -> tuple[Tensor, Tensor, Tensor, Tensor]:
    """W ≈ code * (scale / divisor), on the CPU: e2m1 codes in uint8 [N, K], scales bfloat16 [N, ceil(K / group_size)],
    divisor float32 [1], and sums of squares as from ``quantize_groups``. Each group keeps the better of two scales.

    Args:
        weight: W [N, K] in a float dtype, with any strides.
        group_size: 32 for MXFP4, with power-of-two scales and a divisor of 1; 16 for NVFP4, with e4m3 scales and a
            divisor that maps the largest one to 448.
    """
    return _qao.quantize_fp4.default(weight, group_size)  # type: ignore[no-any-return]


def quantize_weight_(
    weight: Tensor,
    q: Tensor,
    scales: Tensor,
    fault: Tensor,
    largest: Tensor | None,
    dtype: torch.dtype,
    rows: int,
    columns: int,
    symmetric: bool,
    whole_zeros: bool,
) -> None:
    """Quantizes W in place into a layer's packed tensors, without a search. On every device the bits equal those of
    ``quantize_groups`` with factors [1.0] and ``pack_int4``, of ``quantize_fp4`` and ``pack_fp4``, or of
    ``quantize_blocks``.

    Args:
        weight: W [N, K] in a float dtype, with any strides.
        q: packed: as ``pack_int4`` or ``pack_fp4`` returns it; otherwise int8 [N, K], also for the bytes of e4m3.
        scales: packed: as those return them; int8: float32 [N]; e4m3: float32 [ceil(N / rows),
            ceil(K / columns)].
        fault: int32 [1], set to 1 if a value of W or a scale is nonfinite, and otherwise unchanged. Values beyond 1e19
            may count as nonfinite. If it is already 1, nothing is written.
        largest: ``largest_magnitude(weight)``, if it is known.
        dtype: torch.uint8 for packed int4, torch.float4_e2m1fn_x2 for packed four-bit floats, torch.int8 for -127..127,
            or torch.float8_e4m3fn.
        rows, columns: block that shares a scale. uint8: 1 and 32, 64, 128, 256 or K; e2m1: 1 and 32 (MXFP4) or
            16 (NVFP4); int8: 1 and K; e4m3: 1 and K, N and K, or 128 and 128.
        symmetric: for uint8, no zero points; True for the others.
        whole_zeros: for uint8, as in ``quantize_groups``.
    """
    _qao.quantize_weight_.default(weight, q, scales, fault, largest, dtype, rows, columns, symmetric, whole_zeros)


def load_weight_(
    weight: Tensor,
    q: Tensor,
    scales: Tensor,
    dtype: torch.dtype,
    rows: int,
    columns: int,
    symmetric: bool,
    whole_zeros: bool,
    limit: float,
) -> Tensor:
    """``quantize_weight_`` unless a magnitude of W exceeds ``limit`` or is NaN: then q and scales are unchanged.
    Returns an int32 [1] on the CPU: 1, or 0 if nothing was written.

    On a GPU it synchronizes with the check of W, not with the write of q. Other arguments are those of
    ``quantize_weight_``.
    """
    return _qao.load_weight_.default(  # type: ignore[no-any-return]
        weight, q, scales, dtype, rows, columns, symmetric, whole_zeros, limit
    )


def largest_magnitude(weight: Tensor) -> Tensor:
    """float32 [1]: the largest magnitude in W [N, K], a float dtype with any strides; NaN if a value is NaN.

    On a CPU it is NaN also if a value is infinite.
    """
    return _qao.largest_magnitude.default(weight)  # type: ignore[no-any-return]


def gptq_columns(
    weight: Tensor, moved: Tensor, scales: Tensor, zeros: Tensor | None, ratios: Tensor, dtype: torch.dtype
) -> tuple[Tensor, Tensor, Tensor]:
    """GPTQ inner loop: quantizes up to 128 columns of W in sequence with error feedback from earlier columns. Returns
    codes of ``dtype``, errors W - Ŵ and residuals W + moved - Ŵ with the final ``moved``, float32; all [B, N].

    Args:
        weight: columns of W, float32 [B, N]; all tensors are contiguous.
        moved: float32 [B, N], the update from columns before this block, added to W before rounding.
        scales, zeros: float32 [B, N], per value: Ŵ = (code - zero) * scale; zeros None for 0 (required for e4m3).
        ratios: float32 [B, B]; the error of column i times [i, j] is added to ``moved`` of column j > i.
        dtype: torch.uint8 for 0..15, torch.int8 for -127..127, or torch.float8_e4m3fn.
    """
    return _qao.gptq_columns.default(weight, moved, scales, zeros, ratios, dtype)  # type: ignore[no-any-return]


# ---- packed int4 -----------------------------------------------------------------------------------------------------


def pack_int4(q: Tensor, scales: Tensor, zeros: Tensor | None, group_size: int) -> tuple[Tensor, Tensor]:
    """Packs unpacked int4 codes, W = (q - zero) * scale. Returns the packed weight and its scales.

    Args:
        q: uint8 [N, K] of 0..15, contiguous; larger values raise on the CPU and are not checked on a GPU.
        scales: [N, G] in a float dtype, contiguous.
        zeros: [N, G] in the dtype of scales, contiguous, integer or not; None for 8 everywhere (symmetric).
        group_size: 32, 64, 128, 256, or K, or -1 for K.
    """
    return _qao.pack_int4.default(q, scales, zeros, group_size)  # type: ignore[no-any-return]


def unpack_int4(
    weight: Tensor, scales: Tensor, out_features: int, in_features: int, group_size: int
) -> tuple[Tensor, Tensor, Tensor]:
    """The inverse of ``pack_int4``, bit for bit: q uint8 [N, K], scales [N, G] and zeros [N, G], 8 if symmetric."""
    return _qao.unpack_int4.default(weight, scales, out_features, in_features, group_size)  # type: ignore[no-any-return]


def dequantize_int4(
    weight: Tensor, scales: Tensor, out_features: int, in_features: int, group_size: int, dtype: torch.dtype
) -> Tensor:
    """W [N, K] in a float dtype, computed in float32 and rounded once."""
    return _qao.dequantize_int4.default(weight, scales, out_features, in_features, group_size, dtype)  # type: ignore[no-any-return]


# ---- embedding lookup ------------------------------------------------------------------------------------------------


def int4_embedding(
    ids: Tensor,
    weight: Tensor,
    scales: Tensor,
    num_embeddings: int,
    embedding_dim: int,
    group_size: int,
    dtype: torch.dtype,
) -> Tensor:
    """Rows ``ids`` [...] (int32 or int64, 0..N - 1) of a packed int4 W [N, K]: [..., K] in ``dtype``, a float dtype.

    Args:
        ids: row indices.
        weight, scales: as ``pack_int4`` returned them, with the same ``group_size``.
        num_embeddings, embedding_dim: N and K.
        group_size: 32, 64, 128, 256, or K, or -1 for K.
        dtype: of the result.
    """
    sizes = num_embeddings, embedding_dim, group_size
    return _qao.int4_embedding.default(ids, weight, scales, *sizes, dtype)  # type: ignore[no-any-return]


def int8_embedding(ids: Tensor, weight: Tensor, scales: Tensor, dtype: torch.dtype) -> Tensor:
    """Rows ``ids`` [...] of W int8 [N, K] with scales float32 [N] or [1]: [..., K] in ``dtype``, a float dtype."""
    return _qao.int8_embedding.default(ids, weight, scales, dtype)  # type: ignore[no-any-return]

"""The operators on weights alone as functions: to quantise, pack and restore one, and its rows.

Sizes: N = out_features, K = in_features; "a float dtype" is float32, float16 or bfloat16. A packed int4 weight is
``weight``, int8 [ceil(N / 16), ceil(K / 64), 512], and ``scales``, [ceil(N / 16), G, P, 16] in a float dtype:
G = ceil(K / group_size) groups in a row, 1 for -1; P = 1 for scales alone, 2 with zero points.

All raise RuntimeError where a shape, dtype, device or alignment does not fit; the message lists all and the remedy.
"""

from __future__ import annotations

from collections.abc import Sequence

import torch
from torch import Tensor

_qao = torch.ops.qao

# ---- to quantise a float weight --------------------------------------------------------------------------------------


def quantize_groups(
    weight: Tensor,
    group_size: int,
    dtype: torch.dtype,
    symmetric: bool,
    scale_dtype: torch.dtype,
    factors: Sequence[float],
    importance: Tensor | None = None,
    whole_zeros: bool = False,
    rounds: int = 0,
) -> tuple[Tensor, Tensor, Tensor, Tensor]:
    """W ≈ (q - zero) * scale by groups: q of ``dtype`` [N, K], scales and zeros of ``scale_dtype`` [N, G],
    and float64 [2], the sums of squares of the error and of W, which are not finite where a value of W is not.

    Args:
        weight: W [N, K] in a float dtype, of any strides.
        group_size: 32, 64, 128, 256, or K, or -1 for K.
        dtype: torch.uint8 for 0..15, or torch.int8 for -127..127, which is symmetric.
        symmetric: zeros are 8 (uint8) or 0 (int8).
        scale_dtype: a float dtype; scales are rounded to it before q is chosen.
        factors: positive, on a GPU 64 at most; a group's range is multiplied by each, and the first of least weighted
            error is kept.
        importance: float32 [K], contiguous, >= 0: weights of the squared errors of columns in these choices; None: all
            alike.
        whole_zeros: zeros are whole numbers 0..15; else a group that is a grid of sixteen steps keeps it.
        rounds: how often the others get scale and zero by least squares, at most.
    """
    return _qao.quantize_groups.default(  # type: ignore[no-any-return]
        weight, group_size, dtype, symmetric, scale_dtype, factors, importance, whole_zeros, rounds
    )


def quantize_blocks(weight: Tensor, rows: int, columns: int) -> tuple[Tensor, Tensor, Tensor]:
    """W ≈ q * scale by blocks, on the CPU: q float8_e4m3fn [N, K], scales float32 [ceil(N / rows), ceil(K / columns)]
    that map the largest magnitude of a block to 448, and squares as ``quantize_groups`` has them.

    Args:
        weight: W [N, K] in a float dtype, of any strides.
        rows, columns: of a block; 1 and K for a scale a row, N and K for one. Larger ones count as N and K.
    """
    return _qao.quantize_blocks.default(weight, rows, columns)  # type: ignore[no-any-return]


def quantize_fp4(weight: Tensor, group_size: int) -> tuple[Tensor, Tensor, Tensor, Tensor]:
    """W ≈ code * (scale / divisor), on the CPU: e2m1 codes in uint8 [N, K], scales bfloat16 [N, ceil(K / group_size)],
    divisor float32 [1], and squares as ``quantize_groups`` has them. Of two scales a group gets the better one.

    Args:
        weight: W [N, K] in a float dtype, of any strides.
        group_size: 32 for MXFP4, scales that are powers of two and a divisor of 1; 16 for NVFP4, scales in e4m3, of
            which the divisor makes the largest 448.
    """
    return _qao.quantize_fp4.default(weight, group_size)  # type: ignore[no-any-return]


def quantize_weight_(
    weight: Tensor,
    dtype: torch.dtype,
    rows: int,
    columns: int,
    symmetric: bool,
    whole_zeros: bool,
    q: Tensor,
    scales: Tensor,
    fault: Tensor,
    largest: Tensor | None = None,
) -> None:
    """Quantises W without a search into tensors that products read, which are written over: bit for bit as
    ``quantize_groups`` with factors [1.0] and ``pack_int4`` do, ``quantize_fp4`` and ``pack_fp4``, or
    ``quantize_blocks``, on every device.

    Args:
        weight: W [N, K] in a float dtype, of any strides.
        dtype: torch.uint8 for packed int4, torch.float4_e2m1fn_x2 for packed four-bit floats, torch.int8 for -127..127,
            or torch.float8_e4m3fn.
        rows, columns: that share a scale. uint8: 1 and 32, 64, 128, 256 or K; e2m1: 1 and 32 (MXFP4) or 16 (NVFP4);
            int8: 1 and K; e4m3: 1 and K, N and K, or 128 and 128.
        symmetric: of uint8, no zero points; True for the others.
        whole_zeros: of uint8, as in ``quantize_groups``.
        q: packed: as ``pack_int4`` or ``pack_fp4`` returns it; else int8 [N, K], the bytes of e4m3 as well.
        scales: packed: as those return them; int8: float32 [N]; e4m3: float32 [ceil(N / rows),
            ceil(K / columns)].
        fault: int32 [1], set to 1 where a value of W or a scale is not finite, and otherwise left as it is. Values
            beyond 1e19 may count as such. Where it is 1 already, nothing is written.
        largest: ``largest_magnitude(weight)``, if it is known.
    """
    _qao.quantize_weight_.default(weight, dtype, rows, columns, symmetric, whole_zeros, q, scales, fault, largest)


def load_weight_(
    weight: Tensor,
    dtype: torch.dtype,
    rows: int,
    columns: int,
    symmetric: bool,
    whole_zeros: bool,
    q: Tensor,
    scales: Tensor,
    limit: float,
) -> Tensor:
    """``quantize_weight_``, unless a magnitude of W is above ``limit`` or no number: then q and scales stay as they
    are. Returns an int32 [1] on the CPU: 1, or 0 where nothing was written.

    Waits for a GPU to have looked at W, and not for it to have written q. Other arguments are those of
    ``quantize_weight_``.
    """
    return _qao.load_weight_.default(  # type: ignore[no-any-return]
        weight, dtype, rows, columns, symmetric, whole_zeros, q, scales, limit
    )


def largest_magnitude(weight: Tensor) -> Tensor:
    """float32 [1]: the largest magnitude in W [N, K], of a float dtype and any strides; NaN if one is NaN.

    On a CPU it is NaN where one is infinite, too.
    """
    return _qao.largest_magnitude.default(weight)  # type: ignore[no-any-return]


def gptq_columns(
    weight: Tensor, moved: Tensor, scales: Tensor, zeros: Tensor | None, ratios: Tensor, dtype: torch.dtype
) -> tuple[Tensor, Tensor, Tensor]:
    """Rounds up to 128 columns of W one after the other, each beside the errors of those before it: codes of ``dtype``,
    errors W - Ŵ and rests W + moved - Ŵ, where moved counts those errors, float32; all [B, N].

    Args:
        weight: columns of W, float32 [B, N], contiguous as all are.
        moved: float32 [B, N], what columns before these add to the values to be rounded.
        scales, zeros: float32 [B, N], of every value: Ŵ = (code - zero) * scale; zeros None for 0 (e4m3 takes none).
        ratios: float32 [B, B]; an error of column i times [i, j] is added to what moved is of column j > i.
        dtype: torch.uint8 for 0..15, torch.int8 for -127..127, or torch.float8_e4m3fn.
    """
    return _qao.gptq_columns.default(weight, moved, scales, zeros, ratios, dtype)  # type: ignore[no-any-return]


# ---- packed int4 -----------------------------------------------------------------------------------------------------


def pack_int4(q: Tensor, scales: Tensor, zeros: Tensor | None, group_size: int) -> tuple[Tensor, Tensor]:
    """Plain four-bit values, W = (q - zero) * scale, to the packed weight and its scales.

    Args:
        q: uint8 [N, K] of 0..15, contiguous; larger values raise on the CPU and are not looked for on a GPU.
        scales: [N, G] in a float dtype, contiguous.
        zeros: [N, G] in the dtype of scales, contiguous, whole numbers or not; None for 8 everywhere (symmetric).
        group_size: 32, 64, 128, 256, or K, or -1 for K.
    """
    return _qao.pack_int4.default(q, scales, zeros, group_size)  # type: ignore[no-any-return]


def unpack_int4(
    weight: Tensor, scales: Tensor, out_features: int, in_features: int, group_size: int
) -> tuple[Tensor, Tensor, Tensor]:
    """The inverse of ``pack_int4``, bit for bit: q uint8 [N, K], scales [N, G] and zeros [N, G], 8 where symmetric."""
    return _qao.unpack_int4.default(weight, scales, out_features, in_features, group_size)  # type: ignore[no-any-return]


def dequantize_int4(
    weight: Tensor, scales: Tensor, out_features: int, in_features: int, group_size: int, dtype: torch.dtype
) -> Tensor:
    """W [N, K] in a float dtype, computed in float32 and rounded once."""
    return _qao.dequantize_int4.default(weight, scales, out_features, in_features, group_size, dtype)  # type: ignore[no-any-return]


# ---- rows of a weight ------------------------------------------------------------------------------------------------


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
        ids: which rows.
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

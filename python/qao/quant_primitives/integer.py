"""Weight quantization to int4 and int8: round-to-nearest with a search for the best clipping range."""

from __future__ import annotations

import math
from collections.abc import Iterator
from typing import NamedTuple

import torch
from torch import Tensor

from ..ops import weight_ops
from ..ops.serial import serial_parts
from .importance import checked_importance, estimate_importance

# Factors of a group's range in the clipping search, 1.09 to 0.52. Below 1 the group's tails are clipped and the steps
# are finer; slightly above 1 the steps may coincide with the values.
_CLIP_FACTORS = tuple(1 + 0.03 * step for step in range(3, -17, -1))
# The same for int4: with estimated importance a longer search is less accurate (docs/numerics.md).
_CLIP_FACTORS_INT4 = (1.0, 0.97, 0.94, 0.91, 0.88, 0.85)
# Least-squares refinements of int4 scales and zero points: more barely help (docs/numerics.md).
_ROUNDS_INT4 = 8
# Elements per chunk. On a CPU, a chunk and its scratch fit in a core's L2 cache. A GPU needs more work per launch; its
# scratch is limited to a few hundred megabytes.
_CHUNK_ELEMENTS = {"cpu": 1 << 17, "cuda": 1 << 24}


class Codes(NamedTuple):
    """Range of integer codes; ``middle`` is the zero point of a symmetric weight."""

    dtype: torch.dtype
    lowest: int
    highest: int
    middle: int


class QuantizedWeight(NamedTuple):
    """W ≈ (q - zero) * scale."""

    q: Tensor  # [N, K]: uint8 0..15, int8 -127..127, or float8_e4m3fn
    scales: Tensor  # int4 [N, ceil(K / group_size)], of either sign; int8 [N]; fp8: see fp8.py
    zeros: Tensor | None  # shape of scales, integer or not; None: 8 for int4, 0 otherwise
    relative_error: float  # ‖W - Ŵ‖ / ‖W‖, Frobenius; 0 for an all-zero weight


_INT4 = Codes(torch.uint8, 0, 15, 8)
_INT8 = Codes(torch.int8, -127, 127, 0)


def check_finite(weight: Tensor, name: str) -> float:
    """The largest magnitude in ``weight``; raises ValueError if it is NaN or Inf."""
    largest = torch.stack(torch.aminmax(weight.detach())).abs().max().item() if weight.numel() else 0.0
    if not math.isfinite(largest):
        raise ValueError(
            f"{name}: the weight {list(weight.shape)} ({weight.dtype}) holds NaN or Inf and cannot be quantized. Check "
            "the checkpoint, or leave this layer out with a scheme of None."
        )
    return largest


def quantize_int4(
    weight: Tensor,
    group_size: int,
    *,
    symmetric: bool,
    scale_dtype: torch.dtype,
    clip_search: bool = True,
    whole_zeros: bool = False,
    importance: Tensor | None = None,
    name: str = "weight",
) -> QuantizedWeight:
    """Quantizes a float weight [N, K] to int4 on the weight's device.

    Every group of ``group_size`` columns (-1: the whole row; the last may be short) gets a scale and, unless
    ``symmetric``, a zero point. A symmetric scale is negative if the value of largest magnitude in its group is
    positive, because codes reach one step further below the zero point 8 than above. ``clip_search`` tries a few fixed
    factors of the group's range and keeps the one with the least squared error, weighted per column by ``importance``,
    such as the mean square of its activations: float [K], >= 0, on any device; None uses
    ``importance.estimate_importance``. A least-squares fit then refines scale and zero point, so zero points can have a
    fraction. A group with values already on a grid of sixteen steps keeps that grid. With ``whole_zeros`` zero points
    are integers 0..15, without the fit and the grid. Scales are rounded to ``scale_dtype`` before q is computed, so the
    search minimizes the error of the stored weight. Computed in float32.

    Raises:
        ValueError: ``importance`` is not as above, the weight holds NaN or Inf, or a scale overflows ``scale_dtype``;
            the message begins with ``name``.
    """
    return _quantize_groups(
        weight, group_size, _INT4, symmetric, scale_dtype, clip_search, importance, name, whole_zeros
    )


def quantize_int8(
    weight: Tensor, *, clip_search: bool = True, importance: Tensor | None = None, name: str = "weight"
) -> QuantizedWeight:
    """Quantizes a float weight [N, K] to -127..127 with a positive float32 scale per row, else as quantize_int4."""
    result = _quantize_groups(weight, -1, _INT8, True, torch.float32, clip_search, importance, name)
    return result._replace(scales=result.scales.flatten())


def as_stored(name: str, values: Tensor, shape: tuple[int, ...], dtype: torch.dtype, scheme: str) -> Tensor:
    """Checks scales or zero points and converts them to the dtype and shape of the stored layout."""
    if [size for size in values.shape if size != 1] != [size for size in shape if size != 1]:
        raise ValueError(f"{scheme}: {name} must have shape {list(shape)}, not {list(values.shape)}")
    if name == "scales" and not values.is_floating_point():
        raise ValueError(f"{scheme}: scales must have a float dtype, not {values.dtype}")
    stored = values.detach().reshape(shape).to(dtype).contiguous()
    if not stored.is_meta and not _all_finite(stored):
        raise ValueError(f"{scheme}: {name} hold values that are not finite in {dtype}. Use a wider scale_dtype.")
    return stored


def row_sums(q: Tensor, scales: Tensor, zeros: Tensor | int, group_size: int) -> Tensor:
    """float32 [N]: sums over k of (q - zero) * scale, for integer q [N, K], scales and zeros [N, G]."""
    n, k = q.shape
    size = k if group_size == -1 else group_size
    whole = k // size * size
    plain = q.is_cuda and q.dtype == torch.int8 and not hasattr(q, "device_mesh")
    if plain and size == k and n > 16 and k % 8 == 0 and k < 1 << 24:
        # torch.sum would first convert q to int64, eight times its bytes.
        sums = torch._int_mm(q.contiguous(), torch.ones(8, k, dtype=torch.int8, device=q.device).t())[:, :1].long()
    else:
        sums = q[:, :whole].reshape(n, whole // size, size).sum(-1, dtype=torch.int64)
    if whole < k:
        sums = torch.cat((sums, q[:, whole:].sum(-1, keepdim=True, dtype=torch.int64)), 1)
    lengths = torch.arange(0, k, size, device=q.device).neg_().add_(k).clamp_(max=size)
    zeros = zeros.double() if isinstance(zeros, Tensor) else zeros
    return ((sums - lengths * zeros) * scales.double().view(n, -1)).sum(1).float()


def chunks(weight: Tensor, multiple: int = 1) -> Iterator[tuple[slice, Tensor]]:
    """Chunks of rows, a multiple of ``multiple`` long, with float32 copies that the caller may overwrite."""
    n, k = weight.shape
    elements = _CHUNK_ELEMENTS.get(weight.device.type, _CHUNK_ELEMENTS["cpu"])
    step = -(-max(1, elements // k) // multiple) * multiple
    for first in range(0, n, step):
        rows = slice(first, min(first + step, n))
        yield rows, weight.detach()[rows].to(torch.float32, copy=True, memory_format=torch.contiguous_format)


def quotient(values: Tensor, by: float) -> Tensor:
    """values / by, rounded once. With a Python number torch multiplies by its reciprocal on GPUs."""
    return values / torch.full((), by, dtype=values.dtype, device=values.device)


def check_values(squares: Tensor, weight: Tensor, name: str) -> None:
    """Raises ValueError for NaN and Inf in W. A nonfinite sum of squares alone may come from values beyond 1e19."""
    if not squares[1].isfinite():
        check_finite(weight, name)


def check_scales(scales: Tensor, weight: Tensor, name: str) -> None:
    if not _all_finite(scales):
        wide = scales.dtype == torch.float32
        remedy = (
            "Leave this layer out with a scheme of None"
            if wide
            else "Use a wider scale_dtype, for example torch.float32"
        )
        raise ValueError(
            f"{name}: a scale of the weight {list(weight.shape)} ({weight.dtype}) overflows {scales.dtype}. {remedy}."
        )


def _all_finite(values: Tensor) -> bool:
    return all(bool(part.isfinite().all()) for part in serial_parts(values))


def relative_error(squares: Tensor) -> float:
    error, norm = squares.sqrt().tolist()
    return error / norm if norm else 0.0


def _quantize_groups(
    weight: Tensor,
    group_size: int,
    codes: Codes,
    symmetric: bool,
    scale_dtype: torch.dtype,
    clip_search: bool,
    importance: Tensor | None,
    name: str,
    whole_zeros: bool = False,
) -> QuantizedWeight:
    factors = (_CLIP_FACTORS_INT4 if codes is _INT4 else _CLIP_FACTORS) if clip_search else (1.0,)
    rounds = _ROUNDS_INT4 if clip_search and codes is _INT4 and not (symmetric or whole_zeros) else 0
    if importance is None and clip_search and codes is _INT4:
        importance = estimate_importance(weight)
    elif importance is not None:
        importance = checked_importance(importance, weight, name)
    values = weight.detach()
    values = values.float() if values.dtype == torch.float64 else values
    q, scales, zeros, squares = weight_ops.quantize_groups(
        values, importance, group_size, codes.dtype, symmetric, scale_dtype, factors, whole_zeros, rounds
    )
    check_values(squares, weight, name)
    check_scales(scales, weight, name)
    return QuantizedWeight(q, scales, None if symmetric else zeros, relative_error(squares))

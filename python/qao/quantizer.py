"""Float weights to four bits: round-to-nearest with a per-group search for the best clipping range."""

from __future__ import annotations

from typing import NamedTuple

import torch
from torch import Tensor
from torch.nn import functional

# Multiples of a group's range that the search tries, 1.09 to 0.52. Below 1 the tails of the group are clipped and the
# rest gets finer steps; a little above 1 the steps may happen to fall on the values.
_CLIP_FACTORS = tuple(1 + 0.03 * step for step in range(3, -17, -1))
# Elements quantised at a time. A CPU core's second-level cache holds such a chunk and its scratch; a GPU needs more
# work per launch, and memory stays bounded by a few hundred megabytes.
_CHUNK_ELEMENTS = {"cpu": 1 << 17, "cuda": 1 << 24}


class QuantizedWeight(NamedTuple):
    """W ≈ (q - zero) * scale, group by group along K."""

    q: Tensor  # uint8 [N, K], values 0..15
    scales: Tensor  # [N, ceil(K / group_size)], of either sign
    zeros: Tensor | None  # like scales, whole numbers 0..15; None: 8 everywhere (symmetric)
    relative_error: float  # ‖W - Ŵ‖ / ‖W‖, Frobenius; 0 for an all-zero weight


def check_finite(weight: Tensor, name: str) -> None:
    """Raises ValueError if ``weight`` holds NaN or Inf."""
    if weight.numel() and not torch.stack(torch.aminmax(weight.detach())).isfinite().all():
        raise ValueError(
            f"{name}: the weight {list(weight.shape)} ({weight.dtype}) holds NaN or Inf and cannot be quantised. Check "
            "the checkpoint, or leave this layer out with a scheme of None."
        )


def quantize_int4(
    weight: Tensor,
    group_size: int,
    *,
    symmetric: bool,
    scale_dtype: torch.dtype,
    clip_search: bool = True,
    name: str = "weight",
) -> QuantizedWeight:
    """Quantises a float weight [N, K] to four bits, on the device it is on.

    Every group of ``group_size`` columns (-1: the whole row; the last may be short) gets a scale and, unless
    ``symmetric``, a whole-number zero point. A symmetric scale is negative where the largest value of its group is
    positive: codes reach one step further below the zero point 8 than above. With ``clip_search`` the group's range is
    multiplied by a few fixed factors and the one of least squared error is kept. Scales are rounded to ``scale_dtype``
    before q is chosen: the error that is minimised is the one the layer will have. Computed in float32, a chunk of
    rows at a time.

    Raises:
        ValueError: the weight holds NaN or Inf, or a scale overflows ``scale_dtype``; the message begins with ``name``.
    """
    check_finite(weight, name)
    rows, columns = weight.shape
    size = columns if group_size == -1 else group_size
    groups = (columns + size - 1) // size
    q = torch.empty(rows, columns, dtype=torch.uint8, device=weight.device)
    scales = torch.empty(rows, groups, dtype=scale_dtype, device=weight.device)
    zeros = None if symmetric else torch.empty_like(scales)
    squares = torch.zeros(2, dtype=torch.float64, device=weight.device)  # of the error and of the weight

    step = max(1, _CHUNK_ELEMENTS.get(weight.device.type, _CHUNK_ELEMENTS["cpu"]) // columns)
    for first in range(0, rows, step):
        chunk = slice(first, min(first + step, rows))
        values = weight.detach()[chunk].float()
        squares[1] += values.square().sum(dtype=torch.float64)
        codes, scale, zero, error = _quantize_rows(values, size, symmetric, scale_dtype, clip_search)
        del values  # before the next chunk is made
        q[chunk] = codes[:, :columns]
        scales[chunk] = scale.to(scale_dtype)
        if zeros is not None:
            zeros[chunk] = zero.to(scale_dtype)
        squares[0] += error
    if not scales.isfinite().all():
        raise ValueError(
            f"{name}: a scale of the weight {list(weight.shape)} ({weight.dtype}) overflows {scale_dtype}. Use a wider "
            "scale_dtype, for example torch.float32."
        )
    error, norm = squares.sqrt().tolist()
    return QuantizedWeight(q, scales, zeros, error / norm if norm else 0.0)


def _quantize_rows(
    values: Tensor, size: int, symmetric: bool, scale_dtype: torch.dtype, clip_search: bool
) -> tuple[Tensor, Tensor, Tensor, Tensor]:
    """q uint8 [rows, groups * size], scale and zero [rows, groups], and the squared error of all."""
    rows, columns = values.shape
    # Zeros pad the last group: they are exact under every scale and change neither its range nor its error.
    grouped = functional.pad(values, (0, -columns % size)).view(rows, -1, size)
    scale, zero, error = _search(grouped, symmetric, scale_dtype, _CLIP_FACTORS if clip_search else (1.0,))
    codes = grouped.div(scale).round_().add_(zero).clamp_(0, 15).view(rows, -1).to(torch.uint8)
    return codes, scale.squeeze(-1), zero.squeeze(-1), error.sum(dtype=torch.float64)


def _search(
    values: Tensor, symmetric: bool, scale_dtype: torch.dtype, factors: tuple[float, ...]
) -> tuple[Tensor, Tensor, Tensor]:
    """The best (scale, zero, squared error), each [rows, groups, 1], for values [rows, groups, size]."""
    low, high = torch.aminmax(values, dim=-1, keepdim=True)
    low, high = low.clamp_(max=0), high.clamp_(min=0)
    full = torch.where(-low >= high, low, high) / -8 if symmetric else (high - low) / 15
    # Groups of zeros, too, need a scale to divide by.
    info = torch.finfo(scale_dtype)
    smallest = max(info.tiny * info.eps, torch.finfo(torch.float32).tiny)

    best: tuple[Tensor, Tensor, Tensor] | None = None
    scratch = torch.empty_like(values)
    for factor in factors:
        scale = full * factor
        scale = torch.where(scale.abs() < smallest, smallest, scale).to(scale_dtype).float()
        zero = torch.full_like(scale, 8) if symmetric else (low * -factor / scale).round_().clamp_(0, 15)
        torch.div(values, scale, out=scratch).round_()
        torch.clamp(scratch, -zero, 15 - zero, out=scratch)
        torch.addcmul(values, scratch, scale, value=-1, out=scratch)
        candidate = scale, zero, scratch.square_().sum(-1, keepdim=True)
        if best is None:
            best = candidate
        else:
            better = candidate[2] < best[2]
            best = (
                torch.where(better, scale, best[0]),
                torch.where(better, zero, best[1]),
                torch.where(better, candidate[2], best[2]),
            )
    assert best is not None
    return best

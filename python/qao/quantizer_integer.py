"""Scales of two levels for four-bit weights: those of a row's groups are whole numbers times one scale of the row.

An int8 product then multiplies codes by whole numbers, sums along all of K in integers, and scales once
(docs/kernels/wgmma.md). Source of the idea: Lin et al., QServe, arXiv:2405.04532.
"""

from __future__ import annotations

import torch
from torch import Tensor
from torch.nn import functional

from .importance import estimate_importance
from .quantizer import QuantizedWeight, check_scales, check_values, chunks, quantize_int4, relative_error

LOWEST, HIGHEST = -15, 16  # whole numbers by which the codes -8..7 stay in int8
# A row's scale has so many significant bits, so that 16 bits hold a whole number times it: those are of four as well.
_BITS = 4
_LAST_BIT = 1 << (24 - _BITS)  # of a float32's bits read as an integer, where they end
_TRIED = range(-1, 5)  # scales of a row, in steps of their last bit from the one that has room for its largest group


def row_scales(scales: Tensor, name: str) -> Tensor:
    """float32 [N]: a scale of each row of which its ``scales`` [N, G] are whole numbers, -15 to 16.

    Raises:
        ValueError: a row has none; the message begins with ``name``.
    """
    n = scales.shape[0]
    if scales.is_meta:
        return torch.empty(n, dtype=torch.float32, device="meta")
    exact = scales.double()
    largest = exact.abs().amax(1, keepdim=True)
    result = torch.full_like(largest, float("nan"))
    for whole in range(1, HIGHEST + 1):
        unit = (largest / whole).float().double()
        times = (exact / unit).round()
        fits = ((times * unit == exact) & (times >= LOWEST) & (times <= HIGHEST) & (times != 0)).all(1, keepdim=True)
        result = torch.where(result.isnan() & fits, unit, result)
    if (missing := result.isnan().flatten()).any():
        row = int(missing.nonzero()[0])
        raise ValueError(
            f"{name}: the scales of row {row} of {n} are no whole numbers from {LOWEST} to {HIGHEST} times one scale, "
            "as integer_scales asks for. Quantise the float weight with this scheme, or take integer_scales=False."
        )
    return result.float().flatten()


def quantize_int4_integer(
    weight: Tensor,
    group_size: int,
    *,
    scale_dtype: torch.dtype,
    clip_search: bool = True,
    importance: Tensor | None = None,
    name: str = "weight",
) -> QuantizedWeight:
    """``quantize_int4`` of a symmetric weight with such scales, without rounding in any ``scale_dtype``.

    The scales that ``quantize_int4`` finds become whole numbers times the one of a few scales of their row that brings
    them nearest. With ``clip_search`` a group takes the better of the two whole numbers about its scale, by the squared
    error of the codes that they give, weighed by ``importance`` as there.

    Raises:
        ValueError: as ``quantize_int4``.
    """
    if importance is None and clip_search:
        importance = estimate_importance(weight)
    options = {"clip_search": clip_search, "importance": importance, "name": name}
    wide = quantize_int4(weight, group_size, symmetric=True, scale_dtype=torch.float32, **options)  # type: ignore[arg-type]
    k = weight.shape[1]
    size = k if group_size == -1 else group_size
    weights = None if importance is None else functional.pad(importance.to(weight.device).float(), (0, -k % size))
    q, scales = torch.empty_like(wide.q), torch.empty_like(wide.scales, dtype=scale_dtype)
    squares = torch.zeros(2, dtype=torch.float64, device=weight.device)  # of the error and of the weight
    for rows, values in chunks(weight):
        squares[1] += values.square().sum(dtype=torch.float64)
        groups = functional.pad(values, (0, -k % size)).view(len(values), -1, size)
        of_groups = None if weights is None else weights.view(-1, size)
        scale = _search(groups, wide.scales[rows], scale_dtype, of_groups, clip_search)
        codes = _codes(groups, scale[:, :, None])
        squares[0] += torch.addcmul(groups, codes, scale[:, :, None], value=-1).square_().sum(dtype=torch.float64)
        q[rows] = codes.add_(8).view(len(values), -1)[:, :k].to(q.dtype)
        scales[rows] = scale.to(scale_dtype)
    check_values(squares, weight, name)
    check_scales(scales, weight, name)
    return QuantizedWeight(q, scales, None, relative_error(squares))


def nearest_multiple(scales: Tensor, unit: Tensor) -> Tensor:
    """The scale a group may have that is next to each of ``scales``, and of its sign; ``unit``: their row's."""
    return _whole(scales, unit).mul_(unit)


def _whole(scales: Tensor, unit: Tensor) -> Tensor:
    whole = (scales / unit).round_().clamp_(LOWEST, HIGHEST)
    return torch.where(whole == 0, torch.where(scales < 0, -1.0, 1.0), whole)


def _codes(groups: Tensor, scale: Tensor) -> Tensor:
    return groups.div(scale).round_().clamp_(-8, 7)


def _search(groups: Tensor, wanted: Tensor, dtype: torch.dtype, weights: Tensor | None, by_error: bool) -> Tensor:
    """Scales [rows, G] for values [rows, G, size] that would have those ``wanted``."""
    full = wanted.abs().amax(1, keepdim=True) / HIGHEST
    # The last bits of small numbers of float16 lie at 2^-24.
    smallest = 2.0**-21 if dtype == torch.float16 else 2.0**-100
    bits = full.clamp(smallest).view(torch.int32).add(_LAST_BIT - 1).div(_LAST_BIT, rounding_mode="floor")
    best, unit = torch.full_like(full, float("inf")), full
    for step in _TRIED:
        tried = (bits + step).mul_(_LAST_BIT).view(torch.float32).clamp(smallest)
        squares = (nearest_multiple(wanted, tried) - wanted).square_()  # what a code of one adds to the error
        cost = (squares if weights is None else squares.mul_(weights.sum(-1))).sum(1, keepdim=True)
        best, unit = torch.minimum(cost, best), torch.where(cost < best, tried, unit)
    near = _whole(wanted, unit)
    if not by_error:
        return near * unit
    other = near + torch.where(wanted / unit < near, -1.0, 1.0)
    other = torch.where((other == 0) | (other < LOWEST) | (other > HIGHEST), near, other)
    better = _errors(groups, other * unit, weights) < _errors(groups, near * unit, weights)
    return torch.where(better, other, near) * unit


def _errors(groups: Tensor, scale: Tensor, weights: Tensor | None) -> Tensor:
    codes = _codes(groups, scale[:, :, None])
    squares = torch.addcmul(groups, codes, scale[:, :, None], value=-1, out=codes).square_()
    return (squares if weights is None else squares.mul_(weights)).sum(-1)

"""Scales and zero points of groups of a weight, by torch: what csrc/cpu/quantize_group.h does on a CPU."""

from __future__ import annotations

from typing import NamedTuple

import torch
from torch import Tensor

# Steps by which values may miss a grid of sixteen, and its zero point a whole number: as in quantize_group.h.
_GRID_TOLERANCE, _WHOLE_TOLERANCE = 2.0**-4, 2.0**-12
_LARGEST_ZERO = 64.0  # magnitude of a zero point that is no whole number


class Codes(NamedTuple):
    """The whole numbers a value may become; ``middle`` is the zero point of a symmetric weight."""

    dtype: torch.dtype
    lowest: int
    highest: int
    middle: int


def find_grids(values: Tensor, codes: Codes, scale_dtype: torch.dtype) -> tuple[Tensor, Tensor, Tensor]:
    """Which groups are grids of sixteen steps from their lowest to their highest value; their scales and zero points.

    A grid whose zero point is a whole number is none here: ``search`` finds it.
    """
    low, high = torch.aminmax(values, dim=-1, keepdim=True)
    scale = quotient(high - low, codes.highest - codes.lowest).to(scale_dtype).float()
    zero = (-low / scale).to(scale_dtype).float()
    found = torch.div(values, scale).add_(zero)
    distance = found.round().clamp_(codes.lowest, codes.highest).sub_(found).abs_().amax(-1, keepdim=True)
    is_grid = (scale > smallest_scale(scale_dtype)) & (zero.abs() < _LARGEST_ZERO)
    is_grid &= (distance < _GRID_TOLERANCE) & ((zero - zero.round()).abs() >= _WHOLE_TOLERANCE)
    return is_grid, scale, zero


def quotient(values: Tensor, by: float) -> Tensor:
    """Rounded once, where torch multiplies by the reciprocal of a number on GPUs."""
    return values / torch.full((), by, dtype=values.dtype, device=values.device)


def smallest_scale(dtype: torch.dtype) -> float:
    """Groups of zeros, too, need a scale to divide by."""
    info = torch.finfo(dtype)
    return max(info.tiny * info.eps, torch.finfo(torch.float32).tiny)


def search(
    values: Tensor,
    codes: Codes,
    symmetric: bool,
    scale_dtype: torch.dtype,
    factors: tuple[float, ...],
    weights: Tensor | None = None,
) -> tuple[Tensor, Tensor]:
    """The best (scale, zero), each [rows, groups, 1], for values [rows, groups, size] and weights [groups, size]."""
    low, high = torch.aminmax(values, dim=-1, keepdim=True)
    low, high = low.clamp_(max=0), high.clamp_(min=0)
    if not symmetric:
        full = quotient(high - low, codes.highest - codes.lowest)
    elif codes.middle - codes.lowest == codes.highest - codes.middle:
        full = quotient(torch.maximum(-low, high), codes.highest - codes.middle)
    else:  # one code more below the middle: the sign of the scale gives it to the larger side
        full = torch.where(-low >= high, low, high) / (codes.lowest - codes.middle)
    smallest = smallest_scale(scale_dtype)

    best: tuple[Tensor, Tensor, Tensor] | None = None
    scratch = torch.empty_like(values)
    for factor in factors:
        scale = full * factor
        scale = torch.where(scale.abs() < smallest, smallest, scale).to(scale_dtype).float()
        if symmetric:
            zero = torch.full_like(scale, codes.middle)
        else:
            zero = (low * -factor / scale).round_().add_(codes.lowest).clamp_(codes.lowest, codes.highest)
        torch.div(values, scale, out=scratch).round_()
        torch.clamp(scratch, codes.lowest - zero, codes.highest - zero, out=scratch)
        torch.addcmul(values, scratch, scale, value=-1, out=scratch)
        scratch.square_()
        if weights is not None:
            scratch.mul_(weights)
        candidate = scale, zero, scratch.sum(-1, keepdim=True)
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
    return best[:2]


def refit(
    values: Tensor,
    scale: Tensor,
    zero: Tensor,
    codes: Codes,
    scale_dtype: torch.dtype,
    rounds: int,
    weights: Tensor,
) -> tuple[Tensor, Tensor]:
    """Scales and zero points by least squares under the codes nearest, then those codes anew, by turns.

    Each group goes on as long as that takes its error down, columns weighed as in ``search``. Shapes are those of
    ``search``; zero points come out as numbers that are not whole.
    """
    smallest = smallest_scale(scale_dtype)
    ones = weights.sum(-1, keepdim=True)
    best_scale, best_zero = scale, zero
    least = torch.full_like(scale, torch.inf)
    for turn in range(rounds + 1):
        steps = torch.div(values, scale).add_(zero).round_().clamp_(codes.lowest, codes.highest).sub_(zero)
        off = torch.addcmul(values, steps, scale, value=-1)
        weighed = off * weights
        loss = off.mul_(weighed).sum(-1, keepdim=True)  # four copies of ``values``, no fifth
        better = loss < least
        best_scale, best_zero = torch.where(better, scale, best_scale), torch.where(better, zero, best_zero)
        least = torch.where(better, loss, least)
        if turn == rounds:
            break
        errors, products = weighed.sum(-1, keepdim=True), weighed.mul_(steps).sum(-1, keepdim=True)
        torch.mul(steps, weights, out=off)
        step, square = off.sum(-1, keepdim=True), off.mul_(steps).sum(-1, keepdim=True)
        slope = (ones * products - step * errors) / (ones * square - step * step)
        after = (scale + slope).to(scale_dtype).float()
        # What rounding the scale leaves over is the zero point's as well.
        moved = (zero - (errors + (scale - after) * step) / (after * ones)).to(scale_dtype).float()
        # One that got no better stays at its best, from where it would come the same way again.
        usable = better & (after > smallest) & after.isfinite() & (moved.abs() < _LARGEST_ZERO)
        scale, zero = torch.where(usable, after, best_scale), torch.where(usable, moved, best_zero)
    return best_scale, best_zero

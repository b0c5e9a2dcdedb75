"""Reference of ``quantize_groups`` in plain torch, with another order of accumulation."""

from __future__ import annotations

import torch
from qao.quant_primitives.integer import Codes, chunks, quotient
from torch import Tensor
from torch.nn import functional

# Tolerances in steps: of values from a grid of sixteen, and of its zero point from an integer, as in quantize_group.h.
_GRID_TOLERANCE, _WHOLE_TOLERANCE = 2.0**-4, 2.0**-12
_LARGEST_ZERO = 64.0  # magnitude of a float zero point


def find_grids(values: Tensor, codes: Codes, scale_dtype: torch.dtype) -> tuple[Tensor, Tensor, Tensor]:
    """Find groups that are grids of sixteen steps from lowest to highest value; their scales and zero points.

    Grids with an integer zero point are excluded: ``search`` finds them.
    """
    low, high = torch.aminmax(values, dim=-1, keepdim=True)
    scale = quotient(high - low, codes.highest - codes.lowest).to(scale_dtype).float()
    zero = (-low / scale).to(scale_dtype).float()
    found = torch.div(values, scale).add_(zero)
    distance = found.round().clamp_(codes.lowest, codes.highest).sub_(found).abs_().amax(-1, keepdim=True)
    is_grid = (scale > smallest_scale(scale_dtype)) & (zero.abs() < _LARGEST_ZERO)
    is_grid &= (distance < _GRID_TOLERANCE) & ((zero - zero.round()).abs() >= _WHOLE_TOLERANCE)
    return is_grid, scale, zero


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
    """Alternate least-squares scales and zero points with rounding to the nearest codes.

    Each group continues while its error decreases, with columns weighted as in ``search``. Shapes are those of
    ``search``; zero points are floats.
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
        # A group that did not improve keeps its best: another step from there would repeat.
        usable = better & (after > smallest) & after.isfinite() & (moved.abs() < _LARGEST_ZERO)
        scale, zero = torch.where(usable, after, best_scale), torch.where(usable, moved, best_zero)
    return best_scale, best_zero


_Groups = tuple[Tensor, Tensor, Tensor, Tensor]  # q, scales, zeros; squares of the error and of the weight, float64 [2]


def groups_by_torch(
    weight: Tensor,
    group_size: int,
    codes: Codes,
    symmetric: bool,
    scale_dtype: torch.dtype,
    factors: tuple[float, ...],
    importance: Tensor | None = None,
    whole_zeros: bool = False,
    rounds: int = 0,
) -> _Groups:
    n, k = weight.shape
    size = k if group_size == -1 else group_size
    q = torch.empty(n, k, dtype=codes.dtype, device=weight.device)
    scales = torch.empty(n, (k + size - 1) // size, dtype=scale_dtype, device=weight.device)
    zeros = torch.empty_like(scales)
    squares = torch.zeros(2, dtype=torch.float64, device=weight.device)  # of the error and of the weight
    importance = weight.new_ones(k, dtype=torch.float32) if importance is None else importance
    weights = functional.pad(importance, (0, -k % size)).view(-1, size)
    for rows, values in chunks(weight):
        squares[1] += values.square().sum(dtype=torch.float64)
        # Zeros pad the last group: they do not change its range, and their errors do not count.
        padded = functional.pad(values, (0, -k % size)) if k % size else values
        groups = padded.view(len(values), -1, size)
        del values, padded  # a chunk is large: each copy of it lives as briefly as it can
        scale, zero = search(groups, codes, symmetric, scale_dtype, factors, weights)
        if not symmetric and not whole_zeros:
            _free_zeros(groups, scale, zero, codes, scale_dtype, weights, rounds, k // size)
        steps = groups.div(scale)
        is_whole, chosen = zero == zero.round(), steps.round().add_(zero)
        torch.where(is_whole, chosen, steps.add_(zero).round_(), out=chosen).clamp_(codes.lowest, codes.highest)
        del steps
        q[rows] = chosen.view(len(groups), -1)[:, :k].to(codes.dtype)
        scales[rows] = scale.squeeze(-1).to(scale_dtype)
        zeros[rows] = zero.squeeze(-1).to(scale_dtype)
        groups.addcmul_(chosen.sub_(zero), scale, value=-1).square_()
        squares[0] += groups.view(len(groups), -1)[:, :k].sum(dtype=torch.float64)
        del groups, chosen
    return q, scales, zeros, squares


def _free_zeros(
    groups: Tensor,
    scale: Tensor,
    zero: Tensor,
    codes: Codes,
    scale_dtype: torch.dtype,
    weights: Tensor,
    rounds: int,
    whole_groups: int,
) -> None:
    """Other scales and zero points, in place. Zeros may pad the last group, which then is taken for no grid."""
    if rounds:
        better = refit(groups, scale, zero, codes, scale_dtype, rounds, weights)
        scale.copy_(better[0]), zero.copy_(better[1])
    if groups.shape[-1] % 16 == 0:
        whole = slice(0, whole_groups)
        on_grid, grid_scale, grid_zero = find_grids(groups[:, whole], codes, scale_dtype)
        scale[:, whole] = torch.where(on_grid, grid_scale, scale[:, whole])
        zero[:, whole] = torch.where(on_grid, grid_zero, zero[:, whole])

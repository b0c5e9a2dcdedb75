"""Refinement of a weight after GPTQ: coordinate descent that alternates between scales and codes."""

from __future__ import annotations

from dataclasses import replace

import torch
from torch import Tensor

from .grid import Grid

_BLOCK = 128  # columns with an update after each column; later columns get one GEMM per block


def refined(
    weight: Tensor, hessian: Tensor, grid: Grid, codes: Tensor, *, rounds: int, dtype: torch.dtype
) -> tuple[Tensor, Grid]:
    """Codes [N, K] and scales that do not increase tr((W - Ŵ) H (W - Ŵ)ᵀ).

    A round updates the scales, then each column of codes; a final step updates the scales again. GPTQ does not revisit
    columns and fixes scales before codes; this refines both. Zero points are unchanged.

    Args:
        weight: float32 [N, K].
        hessian: [K, K], positive definite (``gptq.damped``).
        grid: an integer grid with scales per row.
        codes: float32, of ``grid``; overwritten.
        rounds: each costs about as much as GPTQ.
        dtype: stored dtype of scales; new scales are exact in it.
    """
    hessian = hessian.float()
    for _ in range(rounds):
        grid = _scales(weight, hessian, grid, codes, dtype)
        _codes(weight, hessian, grid, codes)
    return codes, _scales(weight, hessian, grid, codes, dtype)


def _scales(weight: Tensor, hessian: Tensor, grid: Grid, codes: Tensor, dtype: torch.dtype) -> Grid:
    """Least-squares update of the scale of each group in sequence."""
    scales = grid.scales.clone()
    slope = (weight - grid.dequantize(codes)) @ hessian  # -1/2 times the derivative with respect to Ŵ
    for group in range(scales.shape[1]):
        begin, end = group * grid.size, min((group + 1) * grid.size, weight.shape[1])
        values, before = codes[:, begin:end], scales[:, group]
        if grid.zeros is not None:
            values = values - grid.zeros[:, group, None]
        slopes = (values * slope[:, begin:end]).sum(1)
        curvature = ((values @ hessian[begin:end, begin:end]) * values).sum(1)
        after = before + slopes / curvature.clamp(min=torch.finfo(torch.float32).tiny)
        after = grid.stored_scales(after, dtype)
        change = after - before
        # Accept only scales that are better after rounding to their dtype, and neither zero nor of the other sign.
        better = (after * before > 0) & after.isfinite() & (change * (change * curvature - 2 * slopes) < 0)
        scales[:, group] = torch.where(better, after, before)
        change = torch.where(better, change, 0)
        slope[:, end:].addmm_(values * change[:, None], hessian[begin:end, end:], alpha=-1)
    return replace(grid, scales=scales)


def _codes(weight: Tensor, hessian: Tensor, grid: Grid, codes: Tensor) -> None:
    """The best codes of each column in sequence, in place."""
    assert grid.limits is not None
    k = weight.shape[1]
    # [K, N]: columns of W are contiguous.
    slope = hessian @ (weight - grid.dequantize(codes)).t()
    scales = grid.columns(torch.arange(k, device=weight.device))[0]
    steps = (scales * hessian.diagonal()[:, None]).reciprocal_()
    columns = codes.t().contiguous()
    moved = torch.empty(min(_BLOCK, k), len(weight), device=weight.device)
    for begin in range(0, k, _BLOCK):
        end = min(begin + _BLOCK, k)
        local, inner = slope[begin:end], hessian[begin:end, begin:end]
        for i in range(end - begin):
            column = columns[begin + i]
            found = torch.addcmul(column, local[i], steps[begin + i]).round_().clamp_(*grid.limits)
            torch.sub(found, column, out=moved[i]).mul_(scales[begin + i])
            columns[begin + i] = found
            local[i + 1 :].addr_(inner[i, i + 1 :], moved[i], alpha=-1)
        slope[end:].addmm_(hessian[end:, begin:end], moved[: end - begin], alpha=-1)
    codes.copy_(columns.t())

"""GPTQ: codes of a weight, chosen column by column, where later columns make up for the errors of earlier ones.

Source: Frantar, Ashkboos, Hoefler, Alistarh: GPTQ, arXiv:2210.17323.
"""

from __future__ import annotations

import torch
from torch import Tensor

from .grid import Grid

_BLOCK = 128  # columns whose mutual updates are made one by one; those behind them get one matrix product


def gptq(weight: Tensor, hessian: Tensor, grid: Grid, *, damping: float = 0.01) -> Tensor:
    """Codes [N, K] of ``grid`` for a weight [N, K], such that tr((W - Ŵ) H (W - Ŵ)ᵀ) is small.

    Columns are visited from the largest diagonal entry of H to the smallest, while codes and scales keep the order of
    the weight: a layer costs nothing more at run time. No step waits for the device.

    Args:
        weight: float, all of whose rows have inputs with this H; layers with one input can be stacked.
        hessian: float [K, K], the sum or mean of x xᵀ. Columns that no input reached are rounded to nearest.
        grid: scales and zero points, chosen beforehand.
        damping: is added to the diagonal of H, as a share of its mean.

    Returns:
        float32 codes, see ``Grid.codes``.

    Raises:
        torch.linalg.LinAlgError: H plus damping is not positive definite.
    """
    n, k = weight.shape
    order = hessian.diagonal().argsort(descending=True, stable=True)
    ratios = _ratios(hessian[order][:, order], damping)
    # [K, N]: a column of W is a run of memory.
    rest = weight.detach().t()[order].float()
    codes = torch.empty(k, n, dtype=torch.float32, device=weight.device)
    errors = torch.empty(min(_BLOCK, k), n, dtype=torch.float32, device=weight.device)
    for begin in range(0, k, _BLOCK):
        end = min(begin + _BLOCK, k)
        scales, zeros = grid.columns(order[begin:end])
        values, local = rest[begin:end], ratios[begin:end, begin:end]
        rows, scale, zero = (
            values.unbind(),
            scales.unbind(),
            [None] * (end - begin) if zeros is None else zeros.unbind(),
        )
        for i in range(end - begin):
            grid.round(rows[i], scale[i], zero[i], codes=codes[begin + i], errors=errors[i])
            values[i + 1 :].addr_(local[i, i + 1 :], errors[i], alpha=-1)
        rest[end:].addmm_(ratios[begin:end, end:].t(), errors[: end - begin], alpha=-1)
    back = torch.empty_like(order)
    back[order] = torch.arange(k, device=order.device)
    return codes[back].t().contiguous()


def damped(hessian: Tensor, damping: float) -> Tensor:
    """H in float64 with ``damping`` times its mean diagonal on the diagonal, which is never 0."""
    result = hessian.double()
    diagonal = result.diagonal()
    mean = diagonal.mean()
    shift = torch.where(mean > 0, mean * damping, torch.ones_like(mean))
    diagonal += torch.where(diagonal > 0, shift, torch.maximum(mean, shift))
    return result


def _ratios(hessian: Tensor, damping: float) -> Tensor:
    """float32 [K, K]: U with its rows divided by its diagonal, where U is upper triangular and UᵀU = H⁻¹."""
    # A Cholesky factor of H in reverse order is an upper one R of H = R Rᵀ, and U is its inverse. float64: the small
    # eigenvalues that damping leaves would drown in the rounding of float32.
    upper = torch.linalg.cholesky(damped(hessian, damping).flip(0, 1)).flip(0, 1)
    inverse = torch.linalg.solve_triangular(
        upper, torch.eye(len(upper), dtype=upper.dtype, device=upper.device), upper=True
    )
    ratios: Tensor = inverse / inverse.diagonal()[:, None]
    return ratios.float()

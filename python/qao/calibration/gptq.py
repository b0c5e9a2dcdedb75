"""GPTQ: quantization of a weight column by column, with error feedback into later columns.

Source: Frantar, Ashkboos, Hoefler, Alistarh: GPTQ, arXiv:2210.17323.
"""

from __future__ import annotations

import torch
from torch import Tensor

from ..ops import weight_ops
from .grid import Grid

_BLOCK = 128  # columns per call of the operator
_WIDE = 8 * _BLOCK  # columns with a GEMM update after each block; later columns get one GEMM per _WIDE columns


def gptq(weight: Tensor, hessian: Tensor, grid: Grid, *, damping: float = 0.01) -> tuple[Tensor, Tensor]:
    """Codes [N, K] of ``grid`` for a weight [N, K] that minimize tr((W - Ŵ) H (W - Ŵ)ᵀ), and that error by row.

    Columns are visited from the largest diagonal entry of H to the smallest (act-order), but codes and scales keep the
    order of the weight, so there is no cost at run time. Only the factorization synchronizes with the device.

    With H = R Rᵀ, R upper triangular in the visiting order, the error is ‖(W - Ŵ) R‖². Column j of (W - Ŵ) R is R_jj
    times the rounding error of w_j + Σ_i<j (w_i - ŵ_i) R_ij / R_jj. These are the values of the paper, which computes
    them from the inverse of H.

    Args:
        weight: float; all rows have inputs with this H, so layers with a common input can be stacked.
        hessian: float [K, K], the sum or mean of x xᵀ. Columns without input are rounded to nearest.
        grid: fixed scales and zero points.
        damping: added to the diagonal of H, as a fraction of its mean.

    Returns:
        float32 codes of ``grid``, and float64 [N], which sum to tr((W - Ŵ) H (W - Ŵ)ᵀ) without damping.

    Raises:
        torch.linalg.LinAlgError: H plus damping is not positive definite.
    """
    n, k = weight.shape
    order = hessian.diagonal().argsort(descending=True, stable=True)
    ratios, squares = _factor(hessian, order, damping)
    shift = damping_of(hessian, damping)[order].float()
    # [K, N]: columns of W are contiguous.
    columns = weight.detach().t()[order].float()
    moved = torch.zeros_like(columns)
    codes = torch.empty(k, n, dtype=grid.dtype, device=weight.device)
    total = torch.zeros(n, dtype=torch.float64, device=weight.device)
    scales, zeros = grid.columns(order)
    for first in range(0, k, _WIDE):
        last = min(first + _WIDE, k)
        errors = torch.empty(last - first, n, device=weight.device)
        for begin in range(first, last, _BLOCK):
            end = min(begin + _BLOCK, last)
            block, behind, found = slice(begin, end), slice(end, last), slice(begin - first, end - first)
            local = ratios[block, block].contiguous()
            of_zeros = None if zeros is None else zeros[block]
            codes[block], errors[found], rests = weight_ops.gptq_columns(
                columns[block], moved[block], scales[block], of_zeros, local, grid.dtype
            )
            moved[behind].addmm_(ratios[block, behind].t(), errors[found])
            total += squares[block] @ rests.square_() - shift[block] @ errors[found].square()
        moved[last:].addmm_(ratios[first:last, last:].t(), errors)
    back = torch.empty_like(order)
    back[order] = torch.arange(k, device=order.device)
    return codes.view(torch.uint8)[back].t().contiguous().view(grid.dtype).float(), total.clamp_(min=0)


def damping_of(hessian: Tensor, damping: float) -> Tensor:
    """Damping of the diagonal of H, float64 [K]: ``damping`` times its mean, and more where the diagonal is 0."""
    diagonal = hessian.diagonal().double()
    mean = diagonal.mean()
    shift = torch.where(mean > 0, mean * damping, torch.ones_like(mean))
    return torch.where(diagonal > 0, shift, torch.maximum(mean, shift))


def _factor(hessian: Tensor, order: Tensor, damping: float) -> tuple[Tensor, Tensor]:
    """float32 [K, K] and [K]: the columns of R divided by its diagonal, and the squares of the diagonal.

    R is upper triangular, and R Rᵀ is the damped H in this order.
    """
    # R is the reversed Cholesky factor of H in reverse order. float64, because float32 rounding would exceed the small
    # eigenvalues that damping leaves.
    visits = order.flip(0)
    regular = hessian[visits][:, visits].double()
    regular.diagonal().add_(damping_of(hessian, damping)[visits])
    lower = torch.linalg.cholesky(regular)
    diagonal = lower.diagonal().clone()
    return lower.div_(diagonal).float().flip(0, 1), diagonal.square_().float().flip(0)

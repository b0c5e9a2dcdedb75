"""GPTQ: codes of a weight, chosen column by column, where later columns make up for the errors of earlier ones.

Source: Frantar, Ashkboos, Hoefler, Alistarh: GPTQ, arXiv:2210.17323.
"""

from __future__ import annotations

import torch
from torch import Tensor

from ..ops import weight_ops
from .grid import Grid

_BLOCK = 128  # columns that one call of the operator rounds
_WIDE = 8 * _BLOCK  # columns that get a matrix product after each block; those behind them get one for all of these


def gptq(weight: Tensor, hessian: Tensor, grid: Grid, *, damping: float = 0.01) -> tuple[Tensor, Tensor]:
    """Codes [N, K] of ``grid`` for a weight [N, K], such that tr((W - Ŵ) H (W - Ŵ)ᵀ) is small, and its parts by row.

    Columns are visited from the largest diagonal entry of H to the smallest, while codes and scales keep the order of
    the weight: a layer costs nothing more at run time. No step but the factorisation waits for the device.

    With H = R Rᵀ, R upper triangular in the order of visits, the sum is ‖(W - Ŵ) R‖². Column j of that is R_jj times
    what rounding leaves of w_j + Σ_i<j (w_i - ŵ_i) R_ij / R_jj: the values of the paper, which has them from the
    inverse of H.

    Args:
        weight: float, all of whose rows have inputs with this H; layers with one input can be stacked.
        hessian: float [K, K], the sum or mean of x xᵀ. Columns that no input reached are rounded to nearest.
        grid: scales and zero points, chosen beforehand.
        damping: is added to the diagonal of H, as a share of its mean.

    Returns:
        float32 codes, see ``Grid.codes``, and float64 [N], which add up to tr((W - Ŵ) H (W - Ŵ)ᵀ) without damping.

    Raises:
        torch.linalg.LinAlgError: H plus damping is not positive definite.
    """
    n, k = weight.shape
    order = hessian.diagonal().argsort(descending=True, stable=True)
    ratios, squares = _factor(hessian, order, damping)
    shift = damping_of(hessian, damping)[order].float()
    # [K, N]: a column of W is a run of memory.
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
    """What to add to the diagonal of H, float64 [K]: ``damping`` times its mean, and never so little that a 0 stays."""
    diagonal = hessian.diagonal().double()
    mean = diagonal.mean()
    shift = torch.where(mean > 0, mean * damping, torch.ones_like(mean))
    return torch.where(diagonal > 0, shift, torch.maximum(mean, shift))


def damped(hessian: Tensor, damping: float) -> Tensor:
    """H in float64 with ``damping_of`` it on the diagonal."""
    result = hessian.to(torch.float64, copy=True)
    result.diagonal().add_(damping_of(hessian, damping))
    return result


def _factor(hessian: Tensor, order: Tensor, damping: float) -> tuple[Tensor, Tensor]:
    """float32 [K, K] and [K]: columns of R divided by its diagonal, and that diagonal's squares.

    R is upper triangular, R Rᵀ the damped H in this order.
    """
    # R is a Cholesky factor of H in reverse order, read from its end. float64: the small eigenvalues that damping
    # leaves would drown in the rounding of float32.
    visits = order.flip(0)
    regular = hessian[visits][:, visits].double()
    regular.diagonal().add_(damping_of(hessian, damping)[visits])
    lower = torch.linalg.cholesky(regular)
    diagonal = lower.diagonal().clone()
    return lower.div_(diagonal).float().flip(0, 1), diagonal.square_().float().flip(0)

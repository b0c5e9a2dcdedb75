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
    columns = _Columns(grid, rest[:_BLOCK])
    for begin in range(0, k, _BLOCK):
        end = min(begin + _BLOCK, k)
        scales, zeros = grid.columns(order[begin:end])
        codes[begin:end], errors = columns.round(rest[begin:end], scales, zeros, ratios[begin:end, begin:end])
        rest[end:].addmm_(ratios[begin:end, end:].t(), errors, alpha=-1)
    back = torch.empty_like(order)
    back[order] = torch.arange(k, device=order.device)
    return codes[back].t().contiguous()


class _Columns:
    """The columns of a block one after the other, in memory of its own.

    On a GPU they are captured once and replayed for every block: hundreds of small kernels, which take longer to launch
    than to run.
    """

    def __init__(self, grid: Grid, like: Tensor) -> None:
        self._grid = grid
        self._values, self._scales = torch.empty_like(like), torch.ones_like(like)
        self._codes, self._errors = torch.empty_like(like), torch.empty_like(like)
        self._local = like.new_empty(len(like), len(like))
        self._graph = self._captured() if like.is_cuda and len(like) == _BLOCK else None

    def round(self, values: Tensor, scales: Tensor, zeros: Tensor | None, local: Tensor) -> tuple[Tensor, Tensor]:
        """Codes and errors of columns [B, N], in memory that the next block overwrites; ``local``: ratios [B, B]."""
        count = len(values)
        if zeros is None:
            self._values[:count] = values
        else:  # what is subtracted from a column is the same with its zero point taken off before
            torch.addcmul(values, zeros, scales, out=self._values[:count])
        self._scales[:count], self._local[:count, :count] = scales, local
        if self._graph is not None and count == _BLOCK:
            self._graph.replay()
        else:
            self._run(count)
        return self._codes[:count], self._errors[:count]

    def _run(self, count: int) -> None:
        values, local = self._values[:count], self._local
        for i in range(count):
            self._grid.round(values[i], self._scales[i], codes=self._codes[i], errors=self._errors[i])
            values[i + 1 :].addr_(local[i, i + 1 : count], self._errors[i], alpha=-1)

    def _captured(self) -> torch.cuda.CUDAGraph:
        device = self._values.device
        graph, stream = torch.cuda.CUDAGraph(), torch.cuda.Stream(device)
        stream.wait_stream(torch.cuda.current_stream(device))
        with torch.cuda.device(device), torch.cuda.stream(stream):
            graph.capture_begin(capture_error_mode="thread_local")
            try:
                self._run(_BLOCK)
            finally:
                graph.capture_end()
        torch.cuda.current_stream(device).wait_stream(stream)
        return graph


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

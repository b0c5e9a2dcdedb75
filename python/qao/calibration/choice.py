"""Weights under a scheme for given inputs: their scales, then their codes, then how far outputs are off."""

from __future__ import annotations

from collections.abc import Sequence

import torch
from torch import Tensor

from ..formats import PackedWeight, Scheme
from .gptq import damped, gptq
from .grid import Grid


def quantized(
    weights: Sequence[Tensor], hessian: Tensor, scheme: Scheme, damping: float, names: Sequence[str]
) -> list[tuple[PackedWeight, float]]:
    """Quantises float weights [N, K] of layers with one input, whose mean of x xᵀ is ``hessian`` [K, K].

    Scales are those of the scheme, with the damped diagonal of H as the importance of columns; codes are those of
    GPTQ, for the rows of all weights at once. Where rounding to nearest has the smaller error under H, its codes stay.

    Returns:
        Of each its packed weight, and ‖(W - Ŵ) X‖ / ‖W X‖ over the inputs X.

    Raises:
        ValueError: as ``Scheme.quantize``; the message begins with the name of the weight.
    """
    importance = damped(hessian, damping).diagonal().float()
    nearest = [scheme._quantize(w.detach(), name, importance) for w, name in zip(weights, names, strict=True)]
    grids = [Grid.of(one, scheme, *weight.shape) for one, weight in zip(nearest, weights, strict=True)]
    floats = [weight.detach().float() for weight in weights]
    stacked = gptq(torch.cat(floats), hessian, grids[0].stacked(grids[1:]), damping=damping)
    results = []
    parts = stacked.split([len(weight) for weight in weights])
    for weight, one, grid, codes in zip(floats, nearest, grids, parts, strict=True):
        before, after = weight - grid.dequantize(one.q.float()), weight - grid.dequantize(codes)
        errors = [_squares(difference, hessian) for difference in (before, after, weight)]
        better = errors[1] < errors[0]
        packed = scheme.pack(grid.stored(codes) if better else one.q, one.scales, one.zeros)
        norm, error = weight.double().norm().item(), (after if better else before).double().norm().item()
        packed = packed._replace(relative_error=error / norm if norm else 0.0)
        results.append((packed, (min(errors[:2]) / errors[2]) ** 0.5 if errors[2] else 0.0))
    return results


def _squares(difference: Tensor, hessian: Tensor) -> float:
    """tr(D H Dᵀ): the mean over tokens of ‖D x‖²."""
    return max(0.0, ((difference @ hessian) * difference).sum(dtype=torch.float64).item())

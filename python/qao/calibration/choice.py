"""Calibrated quantization of layers with a common input: scales, codes and output error."""

from __future__ import annotations

from collections.abc import Sequence
from typing import NamedTuple

import torch
from torch import Tensor

from ..ops.rotation import rotated, rotated_hessian
from ..schemes import PackedWeight, Scheme
from .gptq import damping_of, gptq
from .grid import Grid


class Choice(NamedTuple):
    """A quantized weight with its output error ‖(W - Ŵ) X‖ / ‖W X‖ over the inputs X of its layer."""

    packed: PackedWeight
    output_error: float
    output_error_nearest: float  # of round-to-nearest


def quantized(
    weights: Sequence[Tensor], hessian: Tensor, scheme: Scheme, damping: float, names: Sequence[str]
) -> list[Choice]:
    """Quantizes float weights [N, K] of layers with a common input; ``hessian`` [K, K] is the mean of x xᵀ.

    Scales come from the scheme's search, with the damped diagonal of H as column importance. Codes come from GPTQ on
    the rows of all weights at once. A weight keeps round-to-nearest if that has the smaller error under H.

    Raises:
        ValueError: as ``Scheme.quantize``; the message begins with the name of the weight.
    """
    size = scheme.rotation_of(weights[0].shape[1])
    if size:  # from here on, weights and inputs are rotated
        scheme = scheme.with_scales_of(weights[0].dtype)
        weights, hessian = [rotated(weight.detach(), size) for weight in weights], rotated_hessian(hessian, size)
    importance = (hessian.diagonal() + damping_of(hessian, damping)).float()
    nearest = [scheme._quantize(w.detach(), name, importance) for w, name in zip(weights, names, strict=True)]
    grids = [Grid.of(one, scheme, *weight.shape) for one, weight in zip(nearest, weights, strict=True)]
    floats = [weight.detach().float() for weight in weights]
    found, errors_under_h = gptq(torch.cat(floats), hessian, grids[0].stacked(grids[1:]), damping=damping)
    products = _for_products(hessian)
    results, rows = [], [len(weight) for weight in weights]
    parts = zip(found.split(rows), errors_under_h.split(rows), strict=True)
    for weight, one, grid, (codes, after) in zip(floats, nearest, grids, parts, strict=True):
        before = _squares(weight - grid.dequantize(one.q.float()), products).sum()
        whole = _squares(weight, products).sum()
        errors = torch.stack((before, after.sum(), whole)).clamp_(min=0).tolist()
        better = errors[1] < errors[0]
        packed = scheme.pack(codes.to(grid.dtype) if better else one.q, one.scales, one.zeros)
        if better:
            off = torch.linalg.vector_norm(weight - grid.dequantize(codes), dtype=torch.float64).item()
            norm = torch.linalg.vector_norm(weight, dtype=torch.float64).item()
            packed = packed._replace(relative_error=off / norm if norm else 0.0)
        else:
            packed = packed._replace(relative_error=one.relative_error)
        of_nearest, of_gptq = ((error / errors[2]) ** 0.5 if errors[2] else 0.0 for error in errors[:2])
        results.append(Choice(packed, min(of_nearest, of_gptq), of_nearest))
    return results


def _for_products(hessian: Tensor) -> Tensor:
    """H for ``_squares`` of weights and of round-to-nearest errors, in bfloat16 on a GPU.

    These sums do not cancel, unlike those of GPTQ's errors, which GPTQ returns itself.
    """
    return hessian.bfloat16() if hessian.is_cuda else hessian


def _squares(difference: Tensor, hessian: Tensor) -> Tensor:
    """tr(D H Dᵀ) split by row, float64 [N]: means over tokens of (D x)²."""
    return ((difference.to(hessian.dtype) @ hessian) * difference).sum(1, dtype=torch.float64)

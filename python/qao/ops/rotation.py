"""Hadamard rotation of activations: W x = (W Rᵀ) (R x), with a smaller quantization error of R x.

R is block-diagonal with orthogonal Hadamard matrices, which spread an outlier of x over the columns of its block. The
layer stores W Rᵀ, and the GEMM operator multiplies x by R before it quantizes x. Every block is its own inverse.

Source: Ashkboos et al.: QuaRot, arXiv:2404.00456; here each rotation stays inside one layer.
"""

from __future__ import annotations

from torch import Tensor

from . import activation_ops

SIZES = (16, 32, 64, 128, 256)  # columns per block


def rotated(values: Tensor, size: int) -> Tensor:
    """[..., K] with every block of ``size`` columns rotated in float32; 0: unchanged. Twice is the identity."""
    return activation_ops.hadamard(values.float(), size) if size else values


def rotated_hessian(hessian: Tensor, size: int) -> Tensor:
    """R H Rᵀ: the mean of x xᵀ for rotated x."""
    return rotated(rotated(hessian, size).t(), size).t().contiguous() if size else hessian

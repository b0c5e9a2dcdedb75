"""Dequantization of packed weights: W [N, K] in a float dtype, computed in float32 and rounded once."""

from __future__ import annotations

import torch
from torch import Tensor

from .fp4 import dequantize_fp4
from .packed_shape import SCALE_BLOCK, fp4_sizes, int4_sizes


def dequantize_int8(weight: Tensor, scales: Tensor, dtype: torch.dtype) -> Tensor:
    """weight int8 [N, K] times scales float32 [N] or [1]."""
    return (weight.float() * scales.view(-1, 1)).to(dtype)


def dequantize_fp8(weight: Tensor, scales: Tensor, dtype: torch.dtype) -> Tensor:
    """weight float8_e4m3fn [N, K], or its bytes as int8, times scales float32 of any of the shapes ``fp8_mm`` takes."""
    n, k = weight.shape
    if scales.dim() < 2 or scales.shape in ((n, 1), (1, 1)):
        scales = scales.reshape(-1, 1)
    else:
        scales = scales.repeat_interleave(SCALE_BLOCK, 0)[:n].repeat_interleave(SCALE_BLOCK, 1)[:, :k]
    return (weight.view(torch.float8_e4m3fn).float() * scales).to(dtype)


# ---- packed formats: (weight, scales, dtype, *sizes) -> W; N, K and group_size are inferred if they are omitted ----


def dense_int4(weight: Tensor, scales: Tensor, dtype: torch.dtype, *sizes: int) -> Tensor:
    n, k, group_size = sizes or int4_sizes(weight, scales)
    return torch.ops.qao.dequantize_int4.default(weight, scales, n, k, group_size, dtype)  # type: ignore[no-any-return]


def dense_fp4(weight: Tensor, scales: Tensor, dtype: torch.dtype, *sizes: int) -> Tensor:
    n, k, group_size = sizes or fp4_sizes(weight, scales)
    return dequantize_fp4(weight, scales, n, k, group_size, dtype)

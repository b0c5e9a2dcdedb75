"""Slow, obvious float64 truth. Tests compare kernels and quantiser with it; it calls no operator of qao.

Plain (unpacked) tensors throughout: q uint8 [N, K] of values 0..15, scales and zeros [N, ceil(K / group_size)].
"""

from __future__ import annotations

import torch
from torch import Tensor

SYMMETRIC_ZERO = 8


def quantize_int4(weight: Tensor, group_size: int, *, symmetric: bool) -> tuple[Tensor, Tensor, Tensor]:
    """Round-to-nearest without clipping: (q, scales, zeros), the last two float64.

    Each row is cut into groups of ``group_size`` columns (-1: the whole row), the last of which may be short. Symmetric
    groups map the value of largest magnitude to code 0, eight steps from the zero point 8, so their scale has the sign
    that does so; asymmetric ones map the range of the group, extended to hold 0, to 0..15.
    """
    rows, columns = weight.shape
    size = columns if group_size == -1 else group_size
    groups = (columns + size - 1) // size
    q = torch.empty(rows, columns, dtype=torch.uint8)
    scales = torch.empty(rows, groups, dtype=torch.float64)
    zeros = torch.empty(rows, groups, dtype=torch.float64)
    for row in range(rows):
        for group in range(groups):
            columns_of_group = slice(group * size, (group + 1) * size)
            values = weight[row, columns_of_group].double()
            low, high = values.min().clamp(max=0), values.max().clamp(min=0)
            scale = (low if -low >= high else high) / -8 if symmetric else (high - low) / 15
            if scale == 0:  # an all-zero group: any scale gives zeros
                scale = torch.ones_like(scale)
            zero = torch.full_like(scale, SYMMETRIC_ZERO) if symmetric else (-low / scale).round()
            q[row, columns_of_group] = (values / scale + zero).round().clamp(0, 15).to(torch.uint8)
            scales[row, group], zeros[row, group] = scale, zero
    return q, scales, zeros


def dequantize(q: Tensor, scales: Tensor, zeros: Tensor | None, group_size: int) -> Tensor:
    """W [N, K] = (q - zero) * scale in float64; ``zeros`` None stands for 8 everywhere."""
    columns = q.shape[1]
    size = columns if group_size == -1 else group_size

    def per_column(values: Tensor) -> Tensor:
        return values.double().repeat_interleave(size, dim=1)[:, :columns]

    zero = SYMMETRIC_ZERO if zeros is None else per_column(zeros)
    return (q.double() - zero) * per_column(scales)


def int4_mm(x: Tensor, q: Tensor, scales: Tensor, zeros: Tensor | None, bias: Tensor | None, group_size: int) -> Tensor:
    """y [..., N] = x [..., K] · Wᵀ + bias in float64."""
    y = x.double() @ dequantize(q, scales, zeros, group_size).T
    return y if bias is None else y + bias.double()

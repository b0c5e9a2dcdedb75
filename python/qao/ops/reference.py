"""Slow, simple float64 reference for tests of kernels and quantization. It calls no operator of qao.

A scheme's y is ``mm(x̂, Ŵ, bias)`` with the dequantized activations x̂ and weight Ŵ, both float64:

    Ŵ: ``dequantize`` (int4), ``dequantize_8bit`` (int8, fp8), ``dequantize_fp4``
    x̂: x itself (weight-only), or ``dequantize_activation(*quantize_activation_int8(x, ...))``, or the same for fp8

All tensors are unpacked. int4: q uint8 [N, K] of values 0..15, scales and zeros [N, ceil(K / group_size)].
"""

from __future__ import annotations

import torch
from torch import Tensor
from torch.nn import functional

SYMMETRIC_ZERO = 8
BLOCK = 128  # rows and columns of a weight block, or columns of a token's block, that share a scale
SMALLEST = 2.0**-100  # lower bound of the largest magnitude from which activation scales are computed


def quantize_int4(weight: Tensor, group_size: int, *, symmetric: bool) -> tuple[Tensor, Tensor, Tensor]:
    """Round-to-nearest without clipping: (q, scales, zeros), the last two float64.

    Each row is split into groups of ``group_size`` columns (-1: the whole row); the last group may be short. Symmetric
    groups map the value of largest magnitude to code 0, eight steps below the zero point 8, so their scale can be
    negative. Asymmetric groups map the range of the group, extended to include 0, to 0..15.
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
    """W [N, K] = (q - zero) * scale in float64; ``zeros`` None: 8 everywhere."""
    columns = q.shape[1]
    size = columns if group_size == -1 else group_size

    def per_column(values: Tensor) -> Tensor:
        return values.double().repeat_interleave(size, dim=1)[:, :columns]

    zero = SYMMETRIC_ZERO if zeros is None else per_column(zeros)
    return (q.double() - zero) * per_column(scales)


FP4_VALUES = (0.0, 0.5, 1.0, 1.5, 2.0, 3.0, 4.0, 6.0)  # of the codes 0..7; bit 3 is the sign


def dequantize_fp4(q: Tensor, scales: Tensor, divisor: Tensor | None, group_size: int) -> Tensor:
    """W [N, K] = value of q * (scale / divisor) in float64, q e2m1 codes; divisor [N] or [N, 1], None: 1."""
    values = torch.tensor([*FP4_VALUES, *(-value for value in FP4_VALUES)], dtype=torch.float64, device=q.device)
    of_groups = scales.double() / (1 if divisor is None else divisor.double().reshape(-1, 1))
    return values[q.long()] * of_groups.repeat_interleave(group_size, dim=1)[:, : q.shape[1]]


def dequantize_8bit(q: Tensor, scales: Tensor) -> Tensor:
    """W [N, K] = q * scale in float64, q int8 or e4m3; scales [N], [N, 1], [1], [1, 1] or one per 128 x 128 block."""
    n, k = q.shape
    if scales.dim() < 2 or scales.shape in ((n, 1), (1, 1)):
        return q.double() * scales.double().reshape(-1, 1)
    by_row = scales.double().repeat_interleave(BLOCK, 0)[:n]
    return q.double() * by_row.repeat_interleave(BLOCK, 1)[:, :k]


def quantize_activation_int8(x: Tensor, *, symmetric: bool) -> tuple[Tensor, Tensor, Tensor]:
    """x [M, K] to int8 with one scale and zero point per row: (q, scales [M, 1], zeros [M, 1]), x ≈ (q - zero) * scale.

    As the operators define it, in float32: q = round(x * (1 / scale)) + zero, ties to even. Symmetric: the largest
    magnitude maps to 127; otherwise the range, extended to include 0, maps to -128..127. A row with a nonfinite value
    has scale NaN and q = 0.
    """
    x = x.float()
    finite = x.isfinite().all(1, keepdim=True)
    x = x.where(finite, 0)
    low, high = x.amin(1, keepdim=True).clamp(max=0), x.amax(1, keepdim=True).clamp(min=0)
    scales = torch.maximum(-low, high).clamp(min=SMALLEST) / 127
    zeros = torch.zeros_like(scales)
    if not symmetric:
        scales = (high / 255 - low / 255).clamp(min=SMALLEST)
        zeros = (-128 - low * (1 / scales)).round().clamp(-128, 127)
    q = ((x * (1 / scales)).round() + zeros).clamp(-127 if symmetric else -128, 127)
    q, zeros = q.where(finite, 0), zeros.where(finite, 0)
    return q.to(torch.int8), scales.where(finite, torch.nan), zeros.to(torch.int32)


def quantize_activation_fp8(x: Tensor, group_size: int, scale: Tensor | None = None) -> tuple[Tensor, Tensor]:
    """x [M, K] to float8_e4m3fn: (q, scales), x ≈ q * scale. The largest magnitude of each scale maps to 448.

    ``group_size``: -1, scales [M, 1]; 128, one per 128 columns, [M, ceil(K / 128)]; 0, one per tensor, [1], which
    ``scale`` can fix. As the operators define it, in float32: q = e4m3(x * (1 / scale)), saturated at 448. A group with
    a nonfinite value has scale NaN and q = 0; with a static scale NaN stays NaN.
    """
    rows, columns = x.shape
    size = BLOCK if group_size == BLOCK else columns
    x = functional.pad(x.float(), (0, -columns % size)).view(rows, -1, size)
    if scale is None:
        over = (0, 1, 2) if group_size == 0 else (2,)
        finite = x.isfinite().all() if group_size == 0 else x.isfinite().all(2, keepdim=True)
        x = x.where(finite, 0)
        scale = x.abs().amax(over, keepdim=True).clamp(min=SMALLEST) / 448
    else:
        finite, scale = torch.ones((), dtype=torch.bool, device=x.device), scale.view(1, 1, 1)
    q = (x * (1 / scale)).clamp(-448, 448).to(torch.float8_e4m3fn).view(rows, -1)[:, :columns]
    scales = scale.where(finite, torch.nan)
    return q, scales.view(1) if group_size == 0 else scales.squeeze(2)


def dequantize_activation(q: Tensor, scales: Tensor, zeros: Tensor | None = None) -> Tensor:
    """x̂ [M, K] = (q - zero) * scale in float64."""
    values = q.double() if zeros is None else q.double() - zeros
    if scales.dim() == 2 and scales.shape[1] > 1:
        return values * scales.double().repeat_interleave(BLOCK, 1)[:, : q.shape[1]]
    return values * scales.double()


def rms_norm(x: Tensor, weight: Tensor | None, eps: float) -> Tensor:
    """x [..., K] / sqrt(mean(x²) + eps) * weight [K] in float64."""
    x = x.double()
    y = x / (x.square().mean(-1, keepdim=True) + eps).sqrt()
    return y if weight is None else y * weight.double()


def silu_mul(gate: Tensor, up: Tensor) -> Tensor:
    """gate * sigmoid(gate) * up in float64."""
    gate = gate.double()
    return gate * gate.sigmoid() * up.double()


def swiglu(x: Tensor, alpha: float, limit: float, shift: float, interleaved: bool) -> Tensor:
    """g sigmoid(alpha g) (u + shift) in float64, with g = min(gate, limit) and u = up clamped to ±limit."""
    gate, up = (x[..., ::2], x[..., 1::2]) if interleaved else x.chunk(2, -1)
    gate, up = gate.double().clamp(max=limit), up.double().clamp(-limit, limit)
    return gate * (alpha * gate).sigmoid() * (up + shift)


def mm(x: Tensor, weight: Tensor, bias: Tensor | None = None) -> Tensor:
    """y [..., N] = x [..., K] · weight [N, K]ᵀ + bias in float64."""
    y = x.double() @ weight.double().T
    return y if bias is None else y + bias.double()

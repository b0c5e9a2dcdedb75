"""Weight quantization to e4m3 with scales per row, tensor or 128 x 128 block."""

from __future__ import annotations

import torch
from torch import Tensor
from torch.nn import functional

from ..ops import weight_ops
from ..ops.packed_shape import SCALE_BLOCK
from .integer import QuantizedWeight, check_scales, check_values, chunks, quotient, relative_error

LARGEST_FP8 = 448.0  # of e4m3


def _largest(values: Tensor, height: int, width: int) -> Tensor:
    """The largest magnitude in each block of height x width; blocks at the edges may be smaller."""
    rows, columns = values.shape
    padded = functional.pad(values.abs_(), (0, -columns % width, 0, -rows % height))
    blocks: Tensor = padded.view(padded.shape[0] // height, height, -1, width)
    return blocks.amax((1, 3))


def quantize_fp8(weight: Tensor, granularity: str, *, name: str = "weight") -> QuantizedWeight:
    """Quantizes a float weight [N, K] to float8_e4m3fn on the weight's device.

    Each float32 scale maps the largest magnitude of its row, tensor or block to 448, the largest e4m3 number; nothing
    overflows to NaN. ``granularity``: "row", scales [N, 1]; "tensor", [1, 1]; "block", one per 128 x 128 block,
    [ceil(N / 128), ceil(K / 128)].

    Raises:
        ValueError: the weight holds NaN, Inf or values beyond float32; the message begins with ``name``.
    """
    quantize = _blocks_on_cpu if weight.device.type == "cpu" else _blocks_by_torch
    q, scales, squares = quantize(weight.detach(), granularity)
    check_values(squares, weight, name)
    check_scales(scales, weight, name)
    return QuantizedWeight(q, scales, None, relative_error(squares))


def _blocks_on_cpu(weight: Tensor, granularity: str) -> tuple[Tensor, Tensor, Tensor]:
    weight = weight.float() if weight.dtype == torch.float64 else weight
    n, k = weight.shape
    rows, columns = {"row": (1, k), "tensor": (n, k), "block": (SCALE_BLOCK, SCALE_BLOCK)}[granularity]
    return weight_ops.quantize_blocks(weight, rows, columns)


def _blocks_by_torch(weight: Tensor, granularity: str) -> tuple[Tensor, Tensor, Tensor]:
    """q, scales, and the sums of squares of the error and of the weight, float64 [2]."""
    n, k = weight.shape
    height, width = (SCALE_BLOCK, SCALE_BLOCK) if granularity == "block" else (1, k)
    largest = torch.cat([_largest(values, height, width) for _, values in chunks(weight, height)])
    if granularity == "tensor":
        largest = largest.amax(0, keepdim=True)
    scales = quotient(largest, LARGEST_FP8).clamp_(min=torch.finfo(torch.float32).tiny)
    every = scales.expand(n, 1) if granularity == "tensor" else scales  # one per `height` rows
    q = torch.empty(n, k, dtype=torch.float8_e4m3fn, device=weight.device)
    squares = torch.zeros(2, dtype=torch.float64, device=weight.device)
    for rows, values in chunks(weight, height):
        scale = every[rows.start // height : -(-rows.stop // height)]
        scale = scale.repeat_interleave(height, 0)[: len(values)].repeat_interleave(width, 1)[:, :k]
        q[rows] = (values / scale).clamp_(-LARGEST_FP8, LARGEST_FP8).to(q.dtype)
        squares[0] += (q[rows].float() * scale - values).square_().sum(dtype=torch.float64)
        squares[1] += values.square_().sum(dtype=torch.float64)
    return q, scales, squares

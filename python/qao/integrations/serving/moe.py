"""Fused experts of a serving engine: MoE forward pass, and weights loaded by the engine.

Gate and up are one matrix, gate before up, followed by SiLU · up. Down is the other matrix.
"""

from __future__ import annotations

from collections.abc import Callable, Iterable

from torch import Tensor

from ... import ops
from ...ops.packed_shape import SCALE_BLOCK
from ...schemes import PackedWeight, Scheme, stacked
from . import common

Plain = tuple[Tensor, Tensor, Tensor | None]  # q, scales and zeros of one expert, as common.integers takes them


def through(
    x: Tensor,
    chosen: Tensor,
    weights: Tensor,
    count: int,
    up: Callable[[Tensor, Tensor, Tensor], Tensor],
    down: Callable[[Tensor, Tensor], Tensor],
) -> Tensor:
    """MoE forward pass: the sum over each token's experts of their outputs times the router weights.

    Args:
        x: [T, K].
        chosen: [T, k], the experts of each token. Numbers outside 0..count - 1 contribute zero: those experts are on
            other ranks, or the row is padding.
        weights: [T, k], the router's weights.
        up: grouped GEMM of gate and up with the fused gate: takes x, offsets and row_index.
        down: grouped GEMM of down: takes the output rows of ``up``, and offsets.
    """
    offsets, row_index, places = ops.expert_sort(chosen.contiguous(), count)
    rows = down(up(x, offsets, row_index), offsets)
    return ops.expert_sum(rows, places, weights.contiguous())


def integers(each: Iterable[Plain], count: int, given: int, bits: int, k: int) -> tuple[Scheme, PackedWeight]:
    """Pack weights [N, k]: 4 bits in groups of ``given`` columns (-1: the row), or 8 bits with per-row scales."""
    scheme: Scheme | None = None

    def packed() -> Iterable[PackedWeight]:
        nonlocal scheme
        for q, scales, zeros in each:
            scheme = common.integer_scheme(bits, given, k, symmetric=zeros is None)
            yield common.integers(scheme, q, scales, zeros, given, bits=bits)

    whole = stacked(packed(), count)
    assert scheme is not None
    return scheme, whole


def unsupported_integers(
    bits: int, given: int, hidden: int, width: int, full_width: int, zero_points: bool
) -> str | None:
    """Why qao cannot compute ``width`` of ``full_width`` rows of gate and up, and columns of down; None if it can."""
    sizes = (hidden, hidden), (width, full_width)
    reasons = (common.unsupported_integers(bits, given, k, full_k, zero_points) for k, full_k in sizes)
    return next(filter(None, reasons), None)


def unsupported_blocks(width: int) -> str | None:
    """``unsupported_integers`` for e4m3 weights with per-block scales."""
    if width % SCALE_BLOCK:
        return f"gate and up of {width} rows, which share a block of {SCALE_BLOCK} rows where they are joined"
    return None

"""Fused experts of a serving engine: the way of tokens through them, and their weights as an engine has loaded them.

Gate and up are one matrix, gate before up, with SiLU · up behind it; down is the other.
"""

from __future__ import annotations

from collections.abc import Callable, Iterable

from torch import Tensor

from ... import ops
from ...ops.packed_shape import SCALE_BLOCK
from ...schemes import PackedWeight, Scheme, stacked
from . import common

Plain = tuple[Tensor, Tensor, Tensor | None]  # q, scales and zeros of one expert, as served.integers takes them


def through(
    x: Tensor,
    chosen: Tensor,
    weights: Tensor,
    count: int,
    up: Callable[[Tensor, Tensor, Tensor], Tensor],
    down: Callable[[Tensor, Tensor], Tensor],
) -> Tensor:
    """The sum over each token's experts of their outputs times their weights.

    Args:
        x: [T, K].
        chosen: [T, k], the experts of each token. Numbers that are none of 0..count - 1 count as zero: they are on
            other processes, or of no token.
        weights: [T, k], the router's.
        up: of x, offsets and row_index as grouped products take them, gate and up with the gate behind.
        down: of the rows that ``up`` gave, and offsets.
    """
    offsets, row_index, places = ops.expert_sort(chosen.contiguous(), count)
    rows = down(up(x, offsets, row_index), offsets)
    return ops.expert_sum(rows, places, weights.contiguous())


def integers(each: Iterable[Plain], count: int, given: int, bits: int, k: int) -> tuple[Scheme, PackedWeight]:
    """Weights [N, k] of four bits in groups of ``given`` columns (-1: the row), or of eight in rows."""
    scheme: Scheme | None = None

    def packed() -> Iterable[PackedWeight]:
        nonlocal scheme
        for q, scales, zeros in each:
            scheme = common.integer_scheme(bits, given, k, symmetric=zeros is None)
            yield common.integers(scheme, q, scales, zeros, given, bits=bits)

    whole = stacked(packed(), count)
    assert scheme is not None
    return scheme, whole


def integers_obstacle(bits: int, given: int, hidden: int, width: int, full_width: int, zero_points: bool) -> str | None:
    """Why qao cannot multiply ``width`` of ``full_width`` rows of gate and up, and columns of down; None if it can."""
    sizes = (hidden, hidden), (width, full_width)
    reasons = (common.integers_obstacle(bits, given, k, full_k, zero_points) for k, full_k in sizes)
    return next(filter(None, reasons), None)


def blocks_obstacle(width: int) -> str | None:
    """The same of e4m3 with a scale per block."""
    if width % SCALE_BLOCK:
        return f"gate and up of {width} rows, which share a block of {SCALE_BLOCK} where they are joined"
    return None

"""Grouped GEMM test helpers: stacked weights of experts, and routings."""

from __future__ import annotations

import math
from dataclasses import dataclass
from typing import Any

import accuracy
import pytest
import qao
import torch
from ops_schemes import FP8_INT4, INT8_INT4, PRODUCTS, Format, Int4Format, Scheme, Weight
from ops_schemes import generator as seeded
from torch import Tensor

# One scheme per word with a grouped GEMM.
SCHEMES = [
    qao.Int4WeightOnly(group_size=32),
    qao.Fp4WeightOnly(),
    qao.Int8WeightOnly(),
    qao.Float8WeightOnly(),
    qao.Int8DynamicActivationInt8Weight(symmetric_activations=False),
    qao.Int8DynamicActivationInt4Weight(group_size=32, symmetric_activations=False),
    qao.Int8DynamicActivationInt4Weight(group_size=32, symmetric=True, integer_scales=True),
    qao.Float8DynamicActivationFloat8Weight(),
    qao.Float8DynamicActivationInt4Weight(group_size=32),
    qao.Float8DynamicActivationInt4Weight(group_size=32, symmetric=True, power_of_two_scales=True),
]


@dataclass(frozen=True)
class Experts:
    """Weights of one format, and the operands of all."""

    scheme: Scheme
    weights: tuple[Weight, ...]
    bias: Tensor | None = None  # [E, N]

    @property
    def op(self) -> Any:
        return getattr(torch.ops.qao, f"{self.scheme.word}_grouped_mm").default

    @property
    def operands(self) -> tuple[Tensor, Tensor]:
        weight, scales = (torch.stack(parts) for parts in zip(*(w.operands for w in self.weights), strict=True))
        return weight, scales

    @property
    def arguments(self) -> tuple[Any, ...]:
        each = zip(*(w.arguments for w in self.weights), strict=True)
        static = self.scheme.word == "fp8_fp8"  # its scale is that of all experts
        return tuple(
            torch.stack(values) if isinstance(values[0], Tensor) and not static else values[0] for values in each
        )

    def all_arguments(
        self, x: Tensor, offsets: Tensor, row_index: Tensor | None = None, row_scale: Tensor | None = None
    ) -> tuple[Any, ...]:
        return (x, *self.operands, self.bias, offsets, row_index, row_scale, *self.arguments)

    def mm(self, *routed: Any, **options: Any) -> Tensor:
        y: Tensor = self.op(*self.all_arguments(*routed, **options))
        return y

    def truth(self, x: Tensor, counts: list[int], row_index: Tensor | None) -> tuple[Tensor, Tensor]:
        """The float64 result of each row's expert, and the tolerance of y."""
        seen = self.weights[0].activation.seen(x)
        index = torch.arange(x.shape[0], device=x.device) if row_index is None else row_index.long()
        expected, allowed, begin = [], [], 0
        for weight, bias, count in zip(self.weights, self.biases(), counts, strict=True):
            rows = index[begin : begin + count]
            begin += count
            if count > 0:
                tolerance = accuracy.tolerance(x[rows], weight.dense, bias, seen[rows], weight.slack(x[rows]))
                expected.append(accuracy.truth(seen[rows], weight.dense, bias))
                allowed.append(tolerance.elements)
        return torch.cat(expected), torch.cat(allowed)

    def check(
        self, y: Tensor, x: Tensor, counts: list[int], row_index: Tensor | None, row_scale: Tensor | None
    ) -> None:
        """``truth``, with zeros in rows that belong to no expert."""
        rows = sum(counts)
        assert rows <= y.shape[0] and not y[rows:].any()
        if rows == 0:
            return
        expected, allowed = self.truth(x, counts, row_index)
        factor = torch.ones(rows, 1, device=x.device) if row_scale is None else row_scale[:rows, None]
        factor = factor.double()
        assert ((y[:rows].double() - expected * factor).abs() <= allowed * factor.abs()).all()

    def biases(self) -> list[Tensor | None]:
        return [None] * len(self.weights) if self.bias is None else list(self.bias)


def make_experts(
    scheme: Scheme,
    count: int,
    n: int,
    k: int,
    fmt: Format | None = None,
    bias_dtype: torch.dtype | None = None,
    device: str = "cpu",
) -> Experts:
    weights = tuple(scheme.make_weight(n, k, fmt, device, seed=seed) for seed in range(count))
    generator = torch.Generator().manual_seed(5)
    bias = None if bias_dtype is None else torch.randn(count, n, generator=generator).to(device, bias_dtype)
    return Experts(scheme, weights, bias)


def ends(counts: list[int], device: str = "cpu") -> Tensor:
    """Offsets for so many rows of each expert."""
    return torch.tensor(counts).cumsum(0, dtype=torch.int32).to(device)


def few_formats(scheme: Scheme) -> tuple[Format, ...]:
    """With row_scales where they are taken, and one group a row."""
    if scheme not in (INT8_INT4, FP8_INT4):
        return scheme.few_formats
    zeros = "rows" if scheme is INT8_INT4 else "powers"
    one, other = (fmt.activation for fmt in scheme.few_formats)
    rows = Int4Format(64, zeros, torch.bfloat16, one), Int4Format(128, zeros, torch.float32, other)
    return *scheme.few_formats, *rows, Int4Format(-1, zeros, torch.float16, one)


SILU, GPT_OSS = (1.0, math.inf, 0.0, False), (1.702, 7.0, 1.0, True)  # gates
FEW = [pytest.param(scheme, fmt, id=f"{scheme.word}-{fmt}") for scheme in PRODUCTS for fmt in few_formats(scheme)]


def bits(y: Tensor) -> Tensor:
    return y.view(torch.int32 if y.dtype == torch.float32 else torch.int16)


def gathered(rows: int, of: int, dtype: torch.dtype = torch.int64, device: str = "cpu") -> Tensor:
    return torch.randint(0, of, (rows,), generator=seeded(3), dtype=dtype).to(device)


def poison(device: str) -> None:
    """Fill a GPU's free memory with NaN, so that unwritten results show."""
    if device == "cuda":
        for size in (2**12, 2**16, 2**19, 2**20):
            torch.full((size,), torch.nan, device=device)


def nearest(offsets: list[int], rows: int) -> list[int]:
    """The row counts that a GPU computes from any offsets."""
    end, counts = 0, []
    for offset in offsets:
        last, end = end, max(end, min(offset, rows))
        counts.append(end - last)
    return counts


HOSTILE = [
    [2, 1, 6, 70],
    [70, 3, -9, 2],
    [-1, -5, 40, 39],
    [2**31 - 1, 0, 0, 0],
    [-(2**31), 2**31 - 1, -(2**31), 9],
    [0, 0, 0, -1],
]

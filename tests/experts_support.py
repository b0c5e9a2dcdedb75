"""Grouped products as the tests see them: stacked weights of experts, and routings."""

from __future__ import annotations

from dataclasses import dataclass
from typing import Any

import accuracy
import qao
import torch
from ops_schemes import Format, Scheme, Weight
from torch import Tensor

# One of each word that has products of experts.
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

    def check(
        self, y: Tensor, x: Tensor, counts: list[int], row_index: Tensor | None, row_scale: Tensor | None
    ) -> None:
        """Row by row the float64 product of its expert, and zeros where there is none."""
        seen = self.weights[0].activation.seen(x)
        index = torch.arange(x.shape[0], device=x.device) if row_index is None else row_index.long()
        begin = 0
        for weight, bias, count in zip(self.weights, self.biases(), counts, strict=True):
            rows = slice(begin, begin + count)
            begin += count
            if count == 0:
                continue
            own = x[index[rows]]
            tolerance = accuracy.tolerance(own, weight.dense, bias, seen[index[rows]], weight.slack(own))
            expected = accuracy.truth(seen[index[rows]], weight.dense, bias)
            factor = torch.ones(count, 1, device=x.device) if row_scale is None else row_scale[rows, None]
            factor = factor.double()
            error = (y[rows].double() - expected * factor).abs()
            assert (error <= tolerance.elements * factor.abs()).all()
        assert begin <= y.shape[0] and not y[begin:].any()

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

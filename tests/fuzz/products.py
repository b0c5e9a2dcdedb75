"""Random problems of every GEMM and grouped GEMM against float64, within the tolerance of ``accuracy``.

A case is a weight, rows of x and a bias with their float64 result; its problems are calls with some of these rows in
one of several layouts. All results of a case are compared at once, so that a problem costs about 20 µs.
"""

from __future__ import annotations

import math
import random
from dataclasses import dataclass, replace
from typing import Any

import accuracy
import torch
from experts_support import GPT_OSS, SILU, Experts
from ops_schemes import DTYPES, Format, Scheme, Weight
from torch import Tensor

from .draw import described, equal, guarded, layouts, product_sizes, size, values
from .finding import Finding, check

CALLS = 384  # of a case
ROTATIONS = (16, 32, 64, 128, 256)


def dense(scheme: Scheme, rng: random.Random, device: str) -> int:
    """Problems of one weight. Returns their number."""
    case = _Dense.drawn(rng, scheme, device)
    try:
        return case.run(rng)
    except Finding as error:
        raise Finding(f"{case}: {error}") from None


def _cut(weight: Weight, x: Tensor, bias: Tensor | None, seen_of: Tensor) -> tuple[Tensor, Tensor]:
    """The float64 result of finite rows x [M, K], and the tolerance of each element; ``seen_of`` is x rotated.

    ``accuracy`` takes partial sums to grow like sqrt(k), as those of values without a mean. With one they grow to the
    result: K roundings of up to 2^-24 of it, most of them smaller, with both signs.
    """
    seen = weight.activation.seen(seen_of)
    expected = accuracy.truth(seen, weight.dense, bias)
    slack = weight.slack(seen_of) + 2.0**-24 * x.shape[1] ** 0.5 * expected.abs()
    return expected, accuracy.tolerance(x, weight.dense, bias, seen, slack).elements


@dataclass
class _Dense:
    scheme: Scheme
    fmt: Format
    weight: Weight
    x: Tensor  # [M, K]
    bad: Tensor  # [M]: rows that are not finite
    bias: Tensor | None
    rotation: int

    def __str__(self) -> str:
        what = described(x=self.x.dtype, bias=None if self.bias is None else self.bias.dtype, rotation=self.rotation)
        sizes = "x".join(map(str, (*self.x.shape, self.weight.n)))
        return f"{self.scheme.word}_mm {self.fmt} rows x K x N {sizes} on {self.x.device.type}, {what}"

    @classmethod
    def drawn(cls, rng: random.Random, scheme: Scheme, device: str) -> _Dense:
        m, n, k = product_sizes(rng)
        fmt = rng.choice(scheme.formats)
        weight = scheme.make_weight(n, k, fmt, device, seed=rng.getrandbits(48))
        if rng.random() < 0.25:
            first, second = (guarded(part, rng.random() < 0.5) for part in weight.operands)
            weight = replace(weight, operands=(first, second))
        x, bad = values(rng, m, k, rng.choice(DTYPES))
        activation = fmt.activation
        if not activation.keeps_rows_apart:  # a scale of all rows: infinity saturates, or all of x is not finite
            x, bad = x.nan_to_num(0, 1, -1), torch.zeros_like(bad)
        bias_dtype = rng.choice((None, *DTYPES))
        g = torch.Generator().manual_seed(rng.getrandbits(48))
        bias = None if bias_dtype is None else torch.randn(n, generator=g).to(device, bias_dtype)
        fitting = [size for size in ROTATIONS if k % size == 0] if activation.format == "int8" else []
        rotation = rng.choice(fitting) if fitting and rng.random() < 0.3 else 0
        return cls(scheme, fmt, weight, x.to(device), bad.to(device), bias, rotation)

    @property
    def scales_by_row(self) -> bool:
        """Whether rows of y do not depend on other rows of x."""
        activation = self.weight.activation
        return activation.keeps_rows_apart or activation.static_scale is not None

    def truth(self, x: Tensor, bias: Tensor | None) -> tuple[Tensor, Tensor]:
        rotated = torch.ops.qao.hadamard(x.float(), self.rotation) if self.rotation else x
        return _cut(self.weight, x, bias, rotated)

    def run(self, rng: random.Random) -> int:
        m, apart = self.x.shape[0], self.scales_by_row
        finite = self.x.masked_fill(self.bad[:, None], 0)
        expected = {with_bias: self.truth(finite, self.bias if with_bias else None) for with_bias in (False, True)}
        views, operands, arguments = layouts(rng, self.x), self.weight.operands, self.weight.arguments
        rotation = {"x_rotation": self.rotation} if self.rotation else {}
        places, n, dtype, op = torch.arange(m, device=self.x.device), self.weight.n, self.x.dtype, self.scheme.op
        found: dict[tuple[bool, bool], list[tuple[Tensor, Tensor]]] = {}
        calls = CALLS if apart and m * self.weight.dense.numel() < 200_000 else 12
        for _ in range(calls):
            count = 1 + int(rng.random() * min(m, 9)) if rng.random() < 0.7 else int(rng.random() * (m + 1))
            if not apart:
                count = m
            begin = int(rng.random() * (m - count + 1))
            with_bias = self.bias is not None and rng.random() < 0.5
            invariant = apart and rng.random() < 0.25
            rows = views[int(rng.random() * len(views))][begin : begin + count]
            options = {**rotation, "batch_invariant": True} if invariant else rotation
            y = op(rows, *operands, self.bias if with_bias else None, *arguments, **options)
            if y.shape != (count, n) or y.dtype is not dtype:
                raise Finding(f"y is {y.dtype}{list(y.shape)} for {count} rows")
            found.setdefault((with_bias, invariant), []).append((places[begin : begin + count], y))
        for (with_bias, invariant), results in found.items():
            self.compare(results, *expected[with_bias], invariant)
        return calls

    def compare(self, results: list[tuple[Tensor, Tensor]], expected: Tensor, allowed: Tensor, invariant: bool) -> None:
        y = torch.cat([y for _, y in results])
        rows = torch.cat([rows for rows, _ in results])
        wrong = ~((y.double() - expected[rows]).abs() <= allowed[rows])
        wrong = torch.where(self.bad[rows, None], y.isfinite(), wrong)
        if wrong.any():
            at, column = wrong.nonzero()[0].tolist()
            row, sizes = int(rows[at]), [len(y) for _, y in results]
            count = next(size for i, size in enumerate(sizes) if at < sum(sizes[: i + 1]))
            raise Finding(
                f"{int(wrong.sum())} elements are wrong, the first in a call with {count} rows, for row {row} of x: "
                f"y[{column}] is {y[at, column].item()}, expected {expected[row, column].item()} within "
                f"{allowed[row, column].item():.3g}{', batch invariant' if invariant else ''}"
            )
        if invariant:  # equal rows have equal bits, in any call
            first = torch.full((len(self.x),), len(rows)).to(y.device)
            first.scatter_reduce_(0, rows, torch.arange(len(rows), device=y.device), "amin")
            check(equal(y, y[first[rows]]), "a batch invariant row has other bits in another call")


def grouped(scheme: Scheme, rng: random.Random, device: str) -> int:
    """Problems of several experts. Returns their number."""
    experts, x, bad = _drawn_experts(rng, scheme, device)
    weight = experts.weights[0]
    sizes = "x".join(map(str, (len(experts.weights), *x.shape, weight.n)))
    bias = None if experts.bias is None else experts.bias.dtype
    what = f"{scheme.word}_grouped_mm experts x T x K x N {sizes} on {device}, {described(x=x.dtype, bias=bias)}"
    try:
        return _grouped(rng, experts, x, bad)
    except Finding as error:
        raise Finding(f"{what}, activation {weight.activation}: {error}") from None


def _drawn_experts(rng: random.Random, scheme: Scheme, device: str) -> tuple[Experts, Tensor, Tensor]:
    count, (t, n, k), fmt = size(rng, 3.5, 1, 2, 3, 8), product_sizes(rng), rng.choice(scheme.formats)
    while count * t * n * k > 500_000:
        count, (t, n, k) = size(rng, 3), product_sizes(rng)
    n += n % 2  # for gates
    weights = tuple(scheme.make_weight(n, k, fmt, device, seed=rng.getrandbits(48)) for _ in range(count))
    g = torch.Generator().manual_seed(rng.getrandbits(48))
    bias = torch.randn(count, n, generator=g).to(device, rng.choice(DTYPES)) if rng.random() < 0.5 else None
    x, bad = values(rng, t, k, rng.choice(DTYPES))
    if not fmt.activation.keeps_rows_apart:
        x, bad = x.nan_to_num(0, 1, -1), torch.zeros_like(bad)
    return Experts(scheme, weights, bias), x.to(device), bad.to(device)


def _grouped(rng: random.Random, experts: Experts, x: Tensor, bad: Tensor) -> int:
    finite = x.masked_fill(bad[:, None], 0)
    each = [_cut(w, finite, b, finite) for w, b in zip(experts.weights, experts.biases(), strict=True)]
    expected, allowed = (torch.stack(parts) for parts in zip(*each, strict=True))  # [E, T, N]
    operands, arguments, views = experts.operands, experts.arguments, layouts(rng, x)
    # Slices of these have any alignment.
    indices = torch.randint(0, len(x), (256,), generator=_g(rng)).to(x.device)
    all_picks = {torch.int64: indices, torch.int32: indices.int()}
    scales = {dtype: torch.randn(256, generator=_g(rng)).to(x.device, dtype) for dtype in DTYPES}
    results, routings, again = [], CALLS // 32, 8
    for _ in range(routings):
        counts = [rng.choice((0, 1, 1, 2, rng.randint(0, 9))) for _ in experts.weights]
        used, tail = sum(counts), rng.choice((0, 0, 3))
        rows = used + tail
        offsets = torch.tensor([0, *counts] if rng.random() < 0.2 else counts).cumsum(0, dtype=torch.int32).to(x.device)
        expert = torch.arange(len(counts)).repeat_interleave(torch.tensor(counts)).to(x.device)
        for _ in range(again):
            begin = int(rng.random() * (256 - rows))
            index_dtype = rng.choice((None, torch.int32, torch.int64)) if rows == len(x) else torch.int64
            picks = torch.arange(rows, device=x.device) if index_dtype is None else indices[begin : begin + rows]
            index = None if index_dtype is None else all_picks[index_dtype][begin : begin + rows]
            scale = scales[rng.choice(DTYPES)][begin : begin + rows] if rng.random() < 0.5 else None
            call = (rng.choice(views), *operands, experts.bias, offsets, index, scale, *arguments)
            y = experts.op(*call)
            if y.shape != (rows, expected.shape[2]) or y.dtype != x.dtype:
                raise Finding(f"y is {y.dtype}{list(y.shape)} for {rows} rows")
            if tail and y[used:].any():
                raise Finding(f"rows outside all experts are not zero: {counts} of {rows} rows")
            results.append((y[:used], expert, picks[:used], None if scale is None else scale[:used].double()))
            if scale is None and rng.random() < 0.1:
                _check_gate(rng, experts, call, y)
                _check_bits(rng, experts, x, y, counts, picks)
    y, expert, picks = (torch.cat([result[i] for result in results]) for i in range(3))  # type: ignore[arg-type]
    factor = torch.cat([torch.ones(len(r[0]), device=x.device) if r[3] is None else r[3] for r in results])[:, None]
    factor = factor.double()
    slack = torch.finfo(x.dtype).smallest_normal
    wrong = ~((y.double() - expected[expert, picks] * factor).abs() <= allowed[expert, picks] * factor.abs() + slack)
    wrong = torch.where(bad[picks, None], y.isfinite(), wrong)
    if wrong.any():
        at, column = wrong.nonzero()[0].tolist()
        raise Finding(
            f"{int(wrong.sum())} elements are wrong, the first for row {int(picks[at])} of x and expert "
            f"{int(expert[at])}: y[{column}] is {y[at, column].item()}, expected "
            f"{(expected[expert[at], picks[at], column] * factor[at]).item()}, row_scale {factor[at].item()}"
        )
    return len(results)


def _g(rng: random.Random) -> torch.Generator:
    return torch.Generator().manual_seed(rng.getrandbits(48))


def _check_gate(rng: random.Random, experts: Experts, call: tuple[Any, ...], y: Tensor) -> None:
    """Without row_scale, a gate is ``swiglu`` of the result."""
    gate = rng.choice((SILU, GPT_OSS, (1.0, 10.0, 0.0, True), (1.0, math.inf, 0.0, True)))
    gated = experts.op(*call, gate=[float(number) for number in gate])
    check(equal(gated, torch.ops.qao.swiglu(y, *gate)), f"gate {gate} is not swiglu of the result without a gate")


def _check_bits(rng: random.Random, experts: Experts, x: Tensor, y: Tensor, counts: list[int], picks: Tensor) -> None:
    """On a CPU, rows of an expert are those of the dense operator."""
    expert = rng.randrange(len(counts))
    weight = experts.weights[expert]
    if x.is_cuda or not counts[expert] or not weight.activation.keeps_rows_apart:
        return
    begin = sum(counts[:expert])
    rows = slice(begin, begin + counts[expert])
    dense = experts.scheme.mm(x[picks[rows]], weight, experts.biases()[expert])
    check(equal(dense, y[rows]), f"expert {expert} of {counts}: other bits than the dense operator")

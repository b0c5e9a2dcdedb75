"""Random problems of every GEMM and grouped GEMM against float64, within the tolerance of ``accuracy``.

A case is a weight, rows of x and a bias with their float64 result; its problems are calls with some of these rows in
one of several layouts. All results of a case are compared at once, so that a problem costs about 20 µs.
"""

from __future__ import annotations

import math
import random
from collections.abc import Sequence
from dataclasses import dataclass, replace
from functools import cached_property
from itertools import accumulate
from typing import Any

import accuracy
import torch
from experts_support import GPT_OSS, SILU, Experts
from ops_schemes import DTYPES, Format, Scheme, Weight
from torch import Tensor

from .draw import described, equal, guarded, layouts, product_sizes, rows_of, size, values
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


Bounds = tuple[Tensor, Tensor]  # the float64 result, and the tolerance of each element


def _cut(weight: Weight, x: Tensor, biases: Sequence[Tensor | None], seen_of: Tensor) -> list[Bounds]:
    """The results of finite rows x [M, K] with each of the biases; ``seen_of`` is x rotated.

    ``accuracy`` takes partial sums to grow like sqrt(k), as those of values without a mean. With one they grow to the
    result: K roundings of up to 2^-24 of it, most of them smaller, with both signs.
    """
    seen = weight.activation.seen(seen_of)
    found = accuracy.tolerances(x, weight.dense, biases, seen, weight.slack(seen_of))
    growing = 2.0**-24 * x.shape[1] ** 0.5
    return [(one.truth, one.elements + growing * one.truth.abs()) for one in found]


Results = list[tuple[int, Tensor]]  # first row of x, and y


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

    @cached_property
    def any_bad(self) -> bool:
        return bool(self.bad.any())

    @property
    def scales_by_row(self) -> bool:
        """Whether rows of y do not depend on other rows of x."""
        activation = self.weight.activation
        return activation.keeps_rows_apart or activation.static_scale is not None

    def truths(self, x: Tensor) -> dict[bool, Bounds]:
        """By whether a bias is added."""
        rotated = torch.ops.qao.hadamard(x.float(), self.rotation) if self.rotation else x
        kinds = (False,) if self.bias is None else (False, True)
        return dict(zip(kinds, _cut(self.weight, x, (None, self.bias)[: len(kinds)], rotated), strict=True))

    def run(self, rng: random.Random) -> int:
        m, apart = self.x.shape[0], self.scales_by_row
        expected = self.truths(self.x.masked_fill(self.bad[:, None], 0))
        views, operands, arguments = layouts(rng, self.x), self.weight.operands, self.weight.arguments
        rotation = {"x_rotation": self.rotation} if self.rotation else {}
        invariants = {False: rotation, True: {**rotation, "batch_invariant": True}}
        n, dtype, op, draw = self.weight.n, self.x.dtype, self.scheme.op, rng.random
        results: dict[tuple[bool, bool], Results] = {}
        calls = CALLS if apart and m * self.weight.dense.numel() < 200_000 else 12
        for _ in range(calls):
            count = 1 + int(draw() * min(m, 9)) if draw() < 0.7 else int(draw() * (m + 1))
            if not apart:
                count = m
            begin = int(draw() * (m - count + 1))
            with_bias = self.bias is not None and draw() < 0.5
            invariant = apart and draw() < 0.25
            rows = views[int(draw() * len(views))][begin : begin + count]
            y = op(rows, *operands, self.bias if with_bias else None, *arguments, **invariants[invariant])
            if y.shape != (count, n) or y.dtype is not dtype:
                raise Finding(f"y is {y.dtype}{list(y.shape)} for {count} rows")
            results.setdefault((with_bias, invariant), []).append((begin, y))
        for (with_bias, invariant), found in results.items():
            self.compare(found, *expected[with_bias], invariant)
        return calls

    def compare(self, results: Results, expected: Tensor, allowed: Tensor, invariant: bool) -> None:
        y = torch.cat([y for _, y in results])
        rows = rows_of([slice(begin, begin + len(part)) for begin, part in results], y.device)
        error = y.double().sub_(expected[rows]).abs_()
        wrong = ~(error <= allowed[rows])  # so that NaN is wrong
        if self.any_bad:
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
    each = [_cut(w, finite, (b,), finite)[0] for w, b in zip(experts.weights, experts.biases(), strict=True)]
    expected, allowed = (torch.stack(parts) for parts in zip(*each, strict=True))  # [E, T, N]
    operands, arguments, views, op = experts.operands, experts.arguments, layouts(rng, x), experts.op
    # Slices of these have any alignment.
    indices = torch.randint(0, len(x), (256,), generator=_g(rng)).to(x.device)
    all_picks = {torch.int64: indices, torch.int32: indices.int()}
    scales = {dtype: torch.randn(256, generator=_g(rng)).to(x.device, dtype) for dtype in DTYPES}
    all_scales = {dtype: of_dtype.tolist() for dtype, of_dtype in scales.items()}
    every, listed = list(range(x.shape[0])), indices.tolist()
    results: list[Tensor] = []
    expert_of: list[int] = []  # of each row of the results, with its row of x and its scale
    row_of: list[int] = []
    scale_of: list[float] = []
    for _ in range(CALLS // 16):
        counts = [rng.choice((0, 1, 1, 2, rng.randint(0, 9))) for _ in experts.weights]
        used, tail = sum(counts), rng.choice((0, 0, 3))
        rows = used + tail
        ends = list(accumulate([0, *counts] if rng.random() < 0.2 else counts))
        offsets = torch.tensor(ends, dtype=torch.int32, device=x.device)
        expert = [i for i, count in enumerate(counts) for _ in range(count)]
        for _ in range(8):
            begin = int(rng.random() * (256 - rows))
            index_dtype = rng.choice((None, torch.int32, torch.int64)) if rows == len(every) else torch.int64
            picks = every if index_dtype is None else listed[begin : begin + rows]
            index = None if index_dtype is None else all_picks[index_dtype][begin : begin + rows]
            scale_dtype = rng.choice(DTYPES) if rng.random() < 0.5 else None
            scale = None if scale_dtype is None else scales[scale_dtype][begin : begin + rows]
            call = (rng.choice(views), *operands, experts.bias, offsets, index, scale, *arguments)
            y = op(*call)
            if y.shape != (rows, expected.shape[2]) or y.dtype != x.dtype:
                raise Finding(f"y is {y.dtype}{list(y.shape)} for {rows} rows")
            if tail and y[used:].any():
                raise Finding(f"rows outside all experts are not zero: {counts} of {rows} rows")
            results.append(y[:used])
            expert_of += expert
            row_of += picks[:used]
            scale_of += [1.0] * used if scale_dtype is None else all_scales[scale_dtype][begin : begin + used]
            if scale is None and rng.random() < 0.1:
                _check_gate(rng, experts, call, y)
                _check_bits(rng, experts, x, y, counts, torch.tensor(picks, device=x.device))
    y, which = torch.cat(results), torch.tensor(expert_of, device=x.device)
    picked = torch.tensor(row_of, device=x.device)
    factor = torch.tensor(scale_of, dtype=torch.float64, device=x.device)[:, None]
    slack = torch.finfo(x.dtype).smallest_normal
    error = y.double().sub_(expected[which, picked].mul_(factor)).abs_()
    wrong = ~(error <= allowed[which, picked].mul_(factor.abs()).add_(slack))  # so that NaN is wrong
    if bad.any():
        wrong = torch.where(bad[picked, None], y.isfinite(), wrong)
    if wrong.any():
        at, column = wrong.nonzero()[0].tolist()
        expert_at, row = expert_of[at], row_of[at]
        raise Finding(
            f"{int(wrong.sum())} elements are wrong, the first for row {row} of x and expert {expert_at}: y[{column}] "
            f"is {y[at, column].item()}, expected {expected[expert_at, row, column].item() * scale_of[at]}, row_scale "
            f"{scale_of[at]}"
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

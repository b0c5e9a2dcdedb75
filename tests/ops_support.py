"""What the operator tests share: schemes, cases, views of x.

A scheme is an object with the attributes of :class:`Int4`; the generic tests run over ``SCHEMES``, so another scheme
joins them by being appended there.
"""

from __future__ import annotations

import ctypes
import mmap
import random
from collections.abc import Callable, Iterator
from dataclasses import dataclass

import qao.ops
import torch
from qao.reference import dequantize
from torch import Tensor

DTYPES = (torch.bfloat16, torch.float16, torch.float32)
SHORT = {torch.bfloat16: "bf16", torch.float16: "fp16", torch.float32: "fp32", None: "none"}


def generator(seed: int) -> torch.Generator:
    return torch.Generator().manual_seed(seed)


def randn(*shape: int, dtype: torch.dtype, device: str, seed: int = 0) -> Tensor:
    return torch.randn(shape, generator=generator(seed)).to(device, dtype)


# ---- weights ---------------------------------------------------------------------------------------------------------


@dataclass(frozen=True)
class Weight:
    """A quantised weight: what the op takes, and the numbers it stands for."""

    operands: tuple[Tensor, ...]  # the op's tensors after x
    arguments: tuple[int, ...]  # the op's integers
    dense: Tensor  # [N, K] float64, exactly what the operands mean

    @property
    def n(self) -> int:
        return self.dense.shape[0]

    @property
    def k(self) -> int:
        return self.dense.shape[1]


@dataclass(frozen=True)
class Int4Format:
    """How an int4 weight is quantised; ``zeros`` is "none" (symmetric), "integer" or "float"."""

    group_size: int = 128
    zeros: str = "none"
    scale_dtype: torch.dtype = torch.float32

    def __str__(self) -> str:
        return f"g{self.group_size}-{self.zeros}-s_{SHORT[self.scale_dtype]}"


@dataclass(frozen=True)
class Int4Parts:
    """The plain tensors ``pack_int4`` takes."""

    q: Tensor  # [N, K] uint8, 0..15
    scales: Tensor  # [N, G]
    zeros: Tensor | None  # [N, G]
    group_size: int

    def dense(self) -> Tensor:
        """[N, K] float64."""
        return dequantize(self.q, self.scales, self.zeros, self.group_size)

    def pack(self) -> Weight:
        packed = torch.ops.qao.pack_int4(self.q, self.scales, self.zeros, self.group_size)
        return Weight(packed, (*self.q.shape, self.group_size), self.dense())


class Int4:
    """torch.ops.qao.int4_mm as the generic tests use it."""

    word = "int4"
    op = torch.ops.qao.int4_mm.default
    differentiable = staticmethod(qao.ops.int4_mm)
    formats = tuple(
        Int4Format(group_size, zeros, scale_dtype)
        for group_size in (32, 64, 128, 256, -1)
        for zeros in ("none", "integer", "float")
        for scale_dtype in DTYPES
    )
    # Two formats that between them use every part of the op, for tests about something other than formats.
    few_formats = (Int4Format(), Int4Format(32, "float", torch.bfloat16))

    @staticmethod
    def parts(n: int, k: int, fmt: Int4Format = Int4Format(), device: str = "cpu", seed: int = 0) -> Int4Parts:
        g = generator(seed)
        groups = 1 if fmt.group_size == -1 else -(-k // fmt.group_size)
        q = torch.randint(0, 16, (n, k), generator=g, dtype=torch.uint8)
        scales = (torch.rand(n, groups, generator=g) * 0.02 + 0.01).to(fmt.scale_dtype)
        zeros = None
        if fmt.zeros == "integer":
            zeros = torch.randint(0, 16, (n, groups), generator=g).to(fmt.scale_dtype)
        elif fmt.zeros == "float":
            zeros = (torch.rand(n, groups, generator=g) * 15).to(fmt.scale_dtype)
        return Int4Parts(q.to(device), scales.to(device), None if zeros is None else zeros.to(device), fmt.group_size)

    @classmethod
    def make_weight(cls, n: int, k: int, fmt: Int4Format = Int4Format(), device: str = "cpu", seed: int = 0) -> Weight:
        return cls.parts(n, k, fmt, device, seed).pack()

    @classmethod
    def mm(cls, x: Tensor, weight: Weight, bias: Tensor | None = None) -> Tensor:
        return cls.op(x, *weight.operands, bias, *weight.arguments)

    @classmethod
    def mm_with_grad(cls, x: Tensor, weight: Weight, bias: Tensor | None = None) -> Tensor:
        return cls.differentiable(x, *weight.operands, bias, *weight.arguments)


SCHEMES = (Int4(),)


# ---- cases -----------------------------------------------------------------------------------------------------------

M_VALUES = (*range(18), 31, 32, 33, 63, 64, 65, 127, 128, 129, 1000, 4096)
N_VALUES = (1, 15, 16, 17, 33, 100, 1000)
K_VALUES = (1, 31, 64, 65, 100, 896, 4096 + 32)
CPU_PRODUCTS = 4_000_000  # largest M * N * K a case of the sweep may have, for the sake of the scalar CPU kernel


@dataclass(frozen=True)
class Case:
    """One call: sizes, weight format, dtypes."""

    m: int
    n: int
    k: int
    fmt: Int4Format
    x_dtype: torch.dtype
    bias_dtype: torch.dtype | None

    def __str__(self) -> str:
        return f"m{self.m}-n{self.n}-k{self.k}-{self.fmt}-x_{SHORT[self.x_dtype]}-b_{SHORT[self.bias_dtype]}"

    def tensors(self, scheme: Int4, device: str) -> tuple[Tensor, Weight, Tensor | None]:
        """x [M, K], the weight, bias [N] or None."""
        weight = scheme.make_weight(self.n, self.k, self.fmt, device, seed=self.n + self.k)
        x = randn(self.m, self.k, dtype=self.x_dtype, device=device, seed=self.m)
        bias = None if self.bias_dtype is None else randn(self.n, dtype=self.bias_dtype, device=device, seed=7)
        return x, weight, bias


def _fitting(rng: random.Random, m: int, n: int | None = None, k: int | None = None) -> tuple[int, int]:
    pairs = [(a, b) for a in N_VALUES for b in K_VALUES if n in (None, a) and k in (None, b)]
    return rng.choice([(a, b) for a, b in pairs if m * a * b <= CPU_PRODUCTS] or pairs[:1])


def sweep(scheme: Int4) -> list[Case]:
    """Every M with every x dtype, every N with every K, every format with every x dtype; the rest drawn at random."""
    rng = random.Random(0)
    biases = (None, *DTYPES)
    cases = []
    for m in M_VALUES:
        for x_dtype in DTYPES:
            cases.append(Case(m, *_fitting(rng, m), rng.choice(scheme.formats), x_dtype, rng.choice(biases)))
    for n in N_VALUES:
        for k in K_VALUES:
            m = rng.choice([m for m in M_VALUES[1:] if m * n * k <= CPU_PRODUCTS] or [1])
            cases.append(Case(m, n, k, rng.choice(scheme.formats), rng.choice(DTYPES), rng.choice(biases)))
    for fmt in scheme.formats:
        for x_dtype in DTYPES:
            m = rng.choice((1, 2, 5, 16, 17, 64))
            cases.append(Case(m, *_fitting(rng, m), fmt, x_dtype, rng.choice(biases)))
    return cases


def fuzz(scheme: Int4, count: int, seed: int) -> Iterator[Case]:
    """Random sizes, most of them small and odd."""
    rng = random.Random(seed)
    while count:
        m, n, k = (int(2 ** rng.uniform(0, top)) for top in (9, 9, 12))
        if m * n * k > CPU_PRODUCTS:
            continue
        count -= 1
        yield Case(m, n, k, rng.choice(scheme.formats), rng.choice(DTYPES), rng.choice((None, *DTYPES)))


# ---- views of x ------------------------------------------------------------------------------------------------------


def _between_nans(x: Tensor, before: int, after: int) -> Tensor:
    """x [M, K] as columns of a wider matrix of NaN, ending where its allocation ends if after is 0."""
    wide = x.new_full((x.shape[0], before + x.shape[1] + after), float("nan"))
    wide[:, before : before + x.shape[1]] = x
    return wide[:, before : before + x.shape[1]]


def _offset(x: Tensor) -> Tensor:
    """One element after an aligned address."""
    flat = x.new_full((x.numel() + 1,), float("nan"))
    flat[1:] = x.flatten()
    return flat[1:].view_as(x)


def _every_other(x: Tensor, dim: int) -> Tensor:
    return (
        torch.stack((x, torch.full_like(x, float("nan"))), dim + 1)
        .flatten(dim, dim + 1)
        .unflatten(dim, (x.shape[dim], 2))
        .select(dim + 1, 0)
    )


# Each turns x [M, K] into a view with unusual strides or alignment and NaN around it; values and dimensions may change.
VIEWS: dict[str, Callable[[Tensor], Tensor]] = {
    "contiguous": lambda x: x,
    "offset by one element": _offset,
    "odd row stride": lambda x: _between_nans(x, 0, 3),
    "odd row stride and offset": lambda x: _between_nans(x, 1, 2),
    "ends with the allocation": lambda x: _between_nans(x, 5, 0),
    "aligned row stride": lambda x: _between_nans(x, 64, 64),
    "every other row": lambda x: _every_other(x, 0),
    "every other column": lambda x: _every_other(x, 1),
    "transposed": lambda x: x.t().contiguous().t(),
    "expanded rows": lambda x: x[:1].expand(x.shape),
    "expanded columns": lambda x: x[:, :1].expand(x.shape),
    "overlapping rows": lambda x: x.flatten().as_strided(x.shape, (1, 1)),
    "first row of many": lambda x: _between_nans(x, 3, 5)[:1],
    "last row, ends with the allocation": lambda x: _between_nans(x, 3, 0)[-1:],
    "one dimension": lambda x: x[0],
    "one dimension, strided": lambda x: x.t().contiguous().t()[0],
    "3-D": lambda x: torch.stack((x, x * 2)),
    "3-D, batch expanded": lambda x: x.expand(3, *x.shape),
    "3-D, permuted": lambda x: torch.stack((x, x * 2)).transpose(0, 1).contiguous().transpose(0, 1),
    "3-D, rows expanded": lambda x: x[:, None].expand(-1, 2, -1),
    "4-D, odd strides": lambda x: torch.stack((_between_nans(x, 1, 2),) * 2)[None, :, 1:],
    "empty batch": lambda x: x.expand(2, *x.shape)[:0],
    "empty middle": lambda x: x.expand(2, *x.shape)[:, :0],
}


def before_guard_page(x: Tensor) -> Tensor:
    """A copy of a CPU tensor whose last byte is followed by a page that may not be touched."""
    size = -(-x.nbytes // mmap.PAGESIZE) * mmap.PAGESIZE
    memory = mmap.mmap(-1, size + mmap.PAGESIZE)
    start = torch.frombuffer(memory, dtype=torch.uint8).data_ptr()
    if ctypes.CDLL(None, use_errno=True).mprotect(ctypes.c_void_p(start + size), mmap.PAGESIZE, 0):
        raise OSError(ctypes.get_errno(), "mprotect")
    copy = torch.frombuffer(memory, dtype=x.dtype, count=x.numel(), offset=size - x.nbytes).view(x.shape)
    return copy.copy_(x)


def bits(x: Tensor) -> Tensor:
    """The bit pattern, so that equality is exact and holds for NaN and signed zeros."""
    return x.contiguous().view({2: torch.int16, 4: torch.int32}[x.element_size()])

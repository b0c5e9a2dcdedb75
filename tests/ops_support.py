"""What the operator tests share: cases, views of x, and the comparison with float64."""

from __future__ import annotations

import ctypes
import mmap
import random
from collections.abc import Callable, Iterator
from dataclasses import dataclass

import accuracy
import torch
from ops_schemes import DTYPES, SHORT, Format, Scheme, Weight, generator
from torch import Tensor


def randn(*shape: int, dtype: torch.dtype, device: str, seed: int = 0) -> Tensor:
    return torch.randn(shape, generator=generator(seed)).to(device, dtype)


def check_product(y: Tensor, x: Tensor, weight: Weight, bias: Tensor | None = None) -> None:
    """Check that y is the GEMM of the quantized x [..., K] and the dequantized weight."""
    rows = x.detach().reshape(-1, weight.k)
    if y.numel() == 0:
        accuracy.check_metadata(y, x, weight.n)
        return
    seen, slack = weight.activation.seen(rows), weight.slack(rows)
    accuracy.check_close(y, x, weight.dense, bias, seen, slack)


# ---- cases -----------------------------------------------------------------------------------------------------------

M_VALUES = (*range(18), 31, 32, 33, 63, 64, 65, 127, 128, 129, 1000, 4096)
N_VALUES = (1, 15, 16, 17, 33, 100, 1000)
K_VALUES = (1, 31, 64, 65, 100, 896, 4096 + 32)
CPU_PRODUCTS = 2_000_000  # largest M * N * K a case of the sweep may have, for the sake of the scalar CPU kernel


@dataclass(frozen=True)
class Case:
    """One call: sizes, weight format, dtypes."""

    m: int
    n: int
    k: int
    fmt: Format
    x_dtype: torch.dtype
    bias_dtype: torch.dtype | None

    def __str__(self) -> str:
        return f"m{self.m}-n{self.n}-k{self.k}-{self.fmt}-x_{SHORT[self.x_dtype]}-b_{SHORT[self.bias_dtype]}"

    def tensors(self, scheme: Scheme, device: str) -> tuple[Tensor, Weight, Tensor | None]:
        """x [M, K], the weight, bias [N] or None."""
        weight = scheme.make_weight(self.n, self.k, self.fmt, device, seed=self.n + self.k)
        x = randn(self.m, self.k, dtype=self.x_dtype, device=device, seed=self.m)
        bias = None if self.bias_dtype is None else randn(self.n, dtype=self.bias_dtype, device=device, seed=7)
        return x, weight, bias


def _fitting(rng: random.Random, m: int, n: int | None = None, k: int | None = None) -> tuple[int, int]:
    pairs = [(a, b) for a in N_VALUES for b in K_VALUES if n in (None, a) and k in (None, b)]
    return rng.choice([(a, b) for a, b in pairs if m * a * b <= CPU_PRODUCTS] or pairs[:1])


def sweep(scheme: Scheme) -> list[Case]:
    """Every M, every N, every K, every format, each several times; the rest drawn at random."""
    rng = random.Random(scheme.word)

    def case(m: int, n: int, k: int, fmt: Format | None = None) -> Case:
        return Case(m, n, k, fmt or rng.choice(scheme.formats), rng.choice(DTYPES), rng.choice((None, *DTYPES)))

    cases = [case(m, *_fitting(rng, m)) for m in M_VALUES]
    for n, k in (*((n, rng.choice(K_VALUES)) for n in N_VALUES), *((rng.choice(N_VALUES), k) for k in K_VALUES)):
        cases.append(case(rng.choice([m for m in M_VALUES[1:] if m * n * k <= CPU_PRODUCTS] or [1]), n, k))
    for fmt in scheme.formats:
        m = rng.choice((1, 2, 5, 16, 17, 64))
        cases.append(case(m, *_fitting(rng, m), fmt))
    return cases


def fuzz(scheme: Scheme, count: int, seed: int) -> Iterator[Case]:
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
    """A copy of a CPU tensor that ends at an inaccessible page."""
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


def check_chain_in_a_graph(chain: Callable[[], Tensor], source: Tensor) -> None:
    """A captured `chain` of kernels, starting at `source`, replays to its result outside the graph."""
    original = source.clone()
    chain()
    graph = torch.cuda.CUDAGraph()
    with torch.cuda.graph(graph):
        result = chain()
    for i in range(20):
        source.copy_(original * (1 + i % 3))
        graph.replay()
        replayed = result.clone()
        torch.cuda.synchronize()
        expected = []
        for _ in range(2):
            expected.append(chain())
            torch.cuda.synchronize()
        assert torch.equal(replayed, expected[0]) and torch.equal(*expected) and not replayed.isnan().any()

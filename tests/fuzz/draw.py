"""What the fuzzers of operators draw: sizes, values, views."""

from __future__ import annotations

import random
from collections.abc import Callable

import torch
from ops_schemes import DTYPES, generator
from test_bounds import beside_guards
from torch import Tensor

LARGEST_PRODUCT = 3_000_000  # M * N * K of a case, for the sake of the scalar kernels


def size(rng: random.Random, top: float, *near: int) -> int:
    """1 to 2^top, most of them small: a power of two or a size of a tile, one off, or anything."""
    if rng.random() < 0.5:
        return max(1, min(int(2**top), rng.choice(near or (1, 16, 32, 64, 128)) + rng.choice((-1, 0, 0, 0, 1))))
    return int(2 ** rng.uniform(0, top))


def product_sizes(rng: random.Random) -> tuple[int, int, int]:
    """Rows of x, N and K. One case in 64 is large."""
    tops = (9, 12, 14) if rng.random() < 1 / 64 else (5, 7, 9)
    while True:
        m = size(rng, tops[0], 1, 2, 4, 8, 16, 17, 32)
        n = size(rng, tops[1], 1, 16, 32, 48, 64, 100, 128)
        k = size(rng, tops[2], 1, 31, 32, 64, 96, 128, 256, 300, 512)
        if m * n * k <= LARGEST_PRODUCT:
            return m, n, k


def values(rng: random.Random, rows: int, columns: int, dtype: torch.dtype) -> tuple[Tensor, Tensor]:
    """x [rows, columns] and which of its rows are not finite."""
    g = generator(rng.getrandbits(48))
    x = torch.randn(rows, columns, generator=g)
    kind = rng.choice(("normal", "normal", "magnitudes", "mean", "outlier", "integers", "zeros", "not finite"))
    bad = torch.zeros(rows, dtype=torch.bool)
    if kind == "magnitudes":
        reach = 4 if dtype == torch.float16 else 12
        x *= 2.0 ** torch.randint(-reach, reach + 1, (rows, 1), generator=g)
    elif kind == "mean":
        x += rng.uniform(-3, 3)
    elif kind == "outlier":
        x[:, rng.randrange(columns)] *= 100
    elif kind == "integers":
        x = torch.randint(-7, 8, (rows, columns), generator=g).float()
    elif kind == "zeros":
        x *= torch.rand(rows, columns, generator=g) < 0.1
        x[rng.randrange(rows)] = 0
    elif kind == "not finite":
        for _ in range(rng.randint(1, max(1, rows // 2))):
            row = rng.randrange(rows)
            x[row, rng.randrange(columns)] = rng.choice((float("nan"), float("inf"), -float("inf")))
            bad[row] = True
    return x.to(dtype), bad


def _around(x: Tensor) -> float:
    return float("nan") if x.is_floating_point() else 77


def _wide(x: Tensor, before: int, after: int) -> Tensor:
    wide = x.new_full((x.shape[0], before + x.shape[1] + after), _around(x))
    wide[:, before : before + x.shape[1]] = x
    return wide[:, before : before + x.shape[1]]


def _offset(x: Tensor) -> Tensor:
    flat = x.new_full((x.numel() + 1,), _around(x))
    flat[1:] = x.flatten()
    return flat[1:].view_as(x)


# Views of x [M, K] with its values, of which any rows can be taken.
LAYOUTS: dict[str, Callable[[Tensor], Tensor]] = {
    "contiguous": lambda x: x,
    "offset": _offset,
    "odd rows": lambda x: _wide(x, 0, 3),
    "odd rows and offset": lambda x: _wide(x, 1, 2),
    "ends with the allocation": lambda x: _wide(x, 5, 0),
    "aligned rows": lambda x: _wide(x, 64, 64),
    "transposed": lambda x: x.t().contiguous().t(),
    "every other column": lambda x: x.repeat_interleave(2, 1)[:, ::2],
    "before a guard page": lambda x: guarded(x, True),
}


def guarded(x: Tensor, at_end: bool) -> Tensor:
    """A copy next to a page that ends the process when it is read. Only of CPU tensors."""
    return x if x.is_cuda or not x.numel() else beside_guards(x, at_end)  # type: ignore[no-any-return]


def layouts(rng: random.Random, x: Tensor, count: int = 3) -> list[Tensor]:
    return [LAYOUTS[name](x) for name in rng.sample(list(LAYOUTS), count)]


def float_dtype(rng: random.Random) -> torch.dtype:
    return rng.choice(DTYPES)


def randn(rng: random.Random, *shape: int, dtype: torch.dtype = torch.float32) -> Tensor:
    return torch.randn(shape, generator=generator(rng.getrandbits(48))).to(dtype)


def described(**what: object) -> str:
    return ", ".join(f"{name} {value}".replace("torch.", "") for name, value in what.items() if value is not None)


def rows_of(parts: list[slice], device: torch.device) -> Tensor:
    """Numbers of the rows of all parts, maybe none."""
    numbers = [row for part in parts for row in range(part.start, part.stop)]
    return torch.tensor(numbers, dtype=torch.int64, device=device)


def equal(a: Tensor, b: Tensor) -> bool:
    """The same bits, where a NaN equals any other."""
    if a.shape != b.shape or a.dtype != b.dtype:
        return False
    if a.is_floating_point() and a.element_size() > 1:
        nan = a.isnan()
        return torch.equal(nan, b.isnan()) and torch.equal(a.masked_fill(nan, 0), b.masked_fill(nan, 0))
    return torch.equal(a.view(torch.uint8), b.view(torch.uint8)) if a.element_size() == 1 else torch.equal(a, b)

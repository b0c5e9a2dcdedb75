"""Search over x rows with widely different magnitudes, with W reading all or only the smaller values.

Each y is measured relative to its terms, |x| · |W|ᵀ, with a tolerance of twice plain torch's error.
"""

from __future__ import annotations

from collections.abc import Iterator

import pytest
import torch
import torch.nn.functional as F
from accuracy import PLAIN_ROWS, truth
from ops_schemes import DTYPES, FLOAT, FP8, FP8_INT4, INT4, Int4Format, Scheme, generator
from test_outliers import by_terms, with_columns_of_zero
from torch import Tensor

K, N = 512, 64
LARGEST = 2.0**12  # of x: float16 has room above it


def kinds() -> Iterator[tuple[str, Tensor, list[float]]]:
    """A name, x [K], and shares of columns, the largest of x, that W does not see."""
    draw = generator(3)
    order = torch.randperm(K, generator=draw)
    even = (1 + torch.rand(K, generator=draw)) * (torch.randint(0, 2, (K,), generator=draw) * 2 - 1)
    normal = torch.randn(K, generator=draw)
    for distance in range(21):
        for large in (1, 5, 51, 128, 256):
            gains = torch.ones(K)
            gains[order[:large]] = 2.0**distance
            for base, name in ((even, "even"), (normal, "normal")):
                yield f"{large} of {name} values 2^{distance} apart", base * gains, [large / K]
    for span in range(1, 31):
        exponents = -torch.linspace(0, span, K)[order]
        yield f"spread over 2^{span}", even * 2.0**exponents, [0.0, 0.25, 0.5]
        yield f"a ladder of 2^{span}", even * 2.0 ** exponents.round(), [0.0, 0.25, 0.5]
    for sigma in (0.5, 1.0, 2.0, 3.0, 5.0):
        gains = torch.exp(torch.randn(K, generator=draw) * sigma)
        yield f"channels of exp({sigma} normal)", normal * gains, [0.0, 0.05, 0.25]
        inputs = torch.randn(K, generator=draw) * 2 * sigma
        yield f"gelu, {2 * sigma}", F.gelu(inputs), [0.0, 0.25, 0.5]
        yield f"silu, {2 * sigma}", F.silu(inputs), [0.0, 0.25, 0.5]
        yield f"gated, {2 * sigma}", F.silu(inputs) * normal, [0.0, 0.25, 0.5]


@pytest.fixture
def one_thread() -> Iterator[None]:
    before = torch.get_num_threads()
    torch.set_num_threads(1)
    yield
    torch.set_num_threads(before)


@pytest.mark.every_isa
@pytest.mark.parametrize("x_dtype", DTYPES, ids=str)
@pytest.mark.parametrize("scheme", [INT4, FP8_INT4], ids=lambda scheme: scheme.word)
def test_kinds_of_rows(scheme: Scheme, x_dtype: torch.dtype, one_thread: None) -> None:
    activation = FP8 if scheme is FP8_INT4 else FLOAT
    formats = [Int4Format(group_size, "none", torch.float32, activation) for group_size in (128, 32, 64, 256)]
    some_parts = [scheme.parts(N, K, fmt) for fmt in formats]
    signs = torch.randint(0, 2, (PLAIN_ROWS, K), generator=generator(1)) * 2.0 - 1
    wrong = []
    for i, (name, row, unseen_shares) in enumerate(kinds()):
        parts = some_parts[i % len(formats)]
        x = (row * min(1.0, LARGEST / row.abs().max().item()) * signs[:4]).to(x_dtype)
        for share in unseen_shares:
            unseen = row.abs().topk(round(share * K)).indices
            weight = scheme.pack(with_columns_of_zero(parts, unseen), activation)
            seen = weight.activation.seen(x)
            lost = (seen[0] == 0) & (x[0] != 0)  # e4m3 reaches no further
            if lost.sum() > (K - len(unseen)) // 4:
                continue
            sample = (seen[:1].abs() * signs).to(x_dtype)
            plain = F.linear(sample, weight.dense.to(x_dtype)).double() - truth(sample, weight.dense)
            plain_error = by_terms(plain, sample, weight.dense).abs().max()
            for some in (slice(0, 1), slice(1, 4)):  # kernels of one row, and of some
                error = scheme.mm(x[some], weight).double() - truth(seen[some], weight.dense)
                times = (by_terms(error, seen[some], weight.dense).abs().max() / plain_error).item()
                if not times <= 2:
                    wrong.append(f"{name}, {share} unseen, {parts.group_size}: {times:.1f} times plain torch's error")
    assert not wrong, "\n".join(wrong)


@pytest.mark.every_isa
@pytest.mark.parametrize("x_dtype", DTYPES, ids=str)
def test_words_of_a_row_are_its_own(x_dtype: torch.dtype, one_thread: None) -> None:
    """Rows of every kind give the bits in a batch that they give in another order, with any number of threads."""
    weight = INT4.make_weight(64, K)
    rows = torch.stack([row * min(1.0, LARGEST / row.abs().max().item()) for _, row, _ in kinds()]).to(x_dtype)
    for m in (3, 7, 14):
        for start in range(0, len(rows) - m, 61):
            x = rows[start : start + m]
            torch.set_num_threads(1)
            y = INT4.mm(x, weight)
            torch.set_num_threads(3)
            assert torch.equal(INT4.mm(x.flip(0), weight), y.flip(0))

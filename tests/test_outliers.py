"""Outliers in x, and integer sums beyond 32 bits due to large K.

`accuracy.row_scale` includes outliers of x, so it hides their effect on the other values. Here W is 0 in the outliers'
columns: y and the scale of its error depend only on the rest of x.
"""

from __future__ import annotations

from dataclasses import replace

import pytest
import torch
import torch.nn.functional as F
from accuracy import check_close, truth
from ops_schemes import (
    DTYPES,
    FLOAT,
    FP4,
    FP8,
    FP8_INT4,
    INT4,
    INT8,
    INT8_ASYMMETRIC,
    INT8_INT4,
    PRODUCTS,
    Activation,
    Int4Format,
    Parts,
    Scheme,
    Weight,
)
from ops_support import bits, randn
from torch import Tensor

M_KINDS = (1, 2, 5, 40)  # each of them may be another kernel
OUTLIERS = {"one": 1, "six": 6, "one in eight": 38}
K = 300

every_scheme = pytest.mark.parametrize("scheme", PRODUCTS, ids=lambda scheme: scheme.word)
every_m = pytest.mark.parametrize("m", M_KINDS)
every_dtype = pytest.mark.parametrize("x_dtype", DTYPES, ids=str)


def with_columns_of_zero(parts: Parts, columns: Tensor) -> Parts:
    """The same weight, but exactly 0 in `columns`; zero points become integers."""
    if parts.group_size is None:
        q = parts.q.view(torch.int8).clone()
        q[:, columns] = 0
        return replace(parts, q=q.view(parts.q.dtype))
    if parts.is_float:
        q = parts.q.clone()
        q[:, columns] = 0
        return replace(parts, q=q)
    zeros = None if parts.zeros is None else parts.zeros.round()
    q, k = parts.q.clone(), parts.q.shape[1]
    width = k if parts.group_size == -1 else parts.group_size
    zero = torch.full_like(q, 8) if zeros is None else zeros.repeat_interleave(width, 1)[:, :k].to(q.dtype)
    q[:, columns] = zero[:, columns]
    return replace(parts, q=q, zeros=zeros)


def some_columns(k: int, count: int) -> Tensor:
    return torch.randperm(k, generator=torch.Generator().manual_seed(count))[:count]


def of_bytes(x: Tensor, scale: Tensor) -> Tensor:
    """[M, N]: possible int4 error of Hopper's decode kernels next to outliers; 0 elsewhere. scale [N]: largest.

    They sum x times bytes of W as subnormal numbers and subtract zero points afterwards. The tensor cores add products
    of eight columns, 16 times per K-step, and truncate each 24 bits below the largest exponent, which for a subnormal
    is that of the smallest normal number: 2^7 or 2^8 steps in bfloat16, 2^10 in float16. A scale is 16 such steps; a
    truncation loses half a unit on average.
    docs/kernels/lessons.md (decode kernels) has the cost of the alternative.
    """
    hopper = x.is_cuda and torch.cuda.get_device_capability() == (9, 0)
    if not hopper or x.shape[0] > 16 or x.dtype == torch.float32:
        return torch.zeros((), device=x.device)
    steps = 2.0**8 if x.dtype == torch.bfloat16 else 2.0**10
    return 16 * (8 / 2) * 2.0**-23 * steps / 16 * x.double().abs().sum(1)[:, None] * scale.double()


def check_beside(scheme: Scheme, weight: Weight, x: Tensor, columns: Tensor, scale: Tensor | None = None) -> None:
    """The result, with a tolerance that ignores x[:, columns]."""
    rest, seen = x.clone(), weight.activation.seen(x)
    rest[:, columns], seen[:, columns] = 0, 0
    slack = weight.slack(rest if weight.activation == FLOAT else x)
    if scale is not None:
        slack = slack + of_bytes(x, scale)
    check_close(scheme.mm(x, weight), rest, weight.dense, seen=seen, slack=slack)


@pytest.mark.every_isa
@every_dtype
@every_m
@pytest.mark.parametrize("count", OUTLIERS.values(), ids=OUTLIERS)
@every_scheme
def test_beside_outliers(scheme: Scheme, count: int, m: int, x_dtype: torch.dtype, device: str) -> None:
    columns = some_columns(K, count).to(device)
    for fmt in scheme.few_formats:
        parts = with_columns_of_zero(scheme.parts(37, K, fmt, device), columns)
        weight = scheme.pack(parts, fmt.activation)
        x = randn(m, K, dtype=x_dtype, device=device)
        x[:, columns] = 30000 if fmt.activation == FLOAT else 100  # 100 stays within the steps of quantized x
        check_beside(scheme, weight, x, columns, parts.scales.amax(1) if scheme is INT4 else None)


@pytest.mark.every_isa
@every_dtype
@every_m
@pytest.mark.parametrize("group_size", [32, 64, 128, 256, -1])
def test_beside_outliers_of_every_size(group_size: int, m: int, x_dtype: torch.dtype, device: str) -> None:
    """Outliers a few times and 2^14 times the size of the other values."""
    columns = some_columns(K, 20).to(device)
    fmt = Int4Format(group_size, "integer", torch.bfloat16)
    parts = with_columns_of_zero(INT4.parts(37, K, fmt, device), columns)
    weight = INT4.pack(parts)
    for exponent in range(2, 15, 2):
        x = randn(m, K, dtype=torch.float32, device=device)
        x[:, columns] *= 2.0**exponent
        check_beside(INT4, weight, x.to(x_dtype), columns, parts.scales.amax(1))


@pytest.mark.every_isa
@every_dtype
@every_m
def test_ladder(m: int, x_dtype: torch.dtype, device: str) -> None:
    """27 magnitudes, 2^12 down to 2^-14, in one chunk; each product sees but one of them."""
    k = 64
    x = torch.zeros(m, k, device=device)
    x[:, 5:32] = 2.0 ** torch.arange(12, -15, -1, device=device)
    x = (x * (1 + torch.rand(m, k, generator=torch.Generator().manual_seed(1)).to(device) * 0.99)).to(x_dtype)
    q = torch.full((k, k), 8, dtype=torch.uint8, device=device)
    q.fill_diagonal_(15)
    scales = torch.full((k, 1), 0.125, device=device)
    weight = INT4.pack(Parts(q, scales, None, 64))
    y, expected = INT4.mm(x, weight).double(), truth(x, weight.dense)
    info = torch.finfo(x_dtype)  # one rounding of x, one of y
    allowed = info.eps * expected.abs() + info.smallest_normal * info.eps + of_bytes(x, scales[:, 0])
    assert ((y - expected).abs() <= allowed).all()


def by_terms(error: Tensor, x: Tensor, dense: Tensor) -> Tensor:
    """error [M, N] / (|x| · |W|ᵀ): each element relative to the size of its terms."""
    return (error / (x.double().abs() @ dense.abs().T)).nan_to_num(nan=0.0)


@pytest.mark.every_isa
@every_dtype
@every_m
@pytest.mark.parametrize("scheme", [INT4, FP8_INT4, FP4], ids=lambda scheme: scheme.word)
def test_rows_of_ladders(scheme: Scheme, m: int, x_dtype: torch.dtype) -> None:
    """Magnitudes spread evenly over many powers of two, all along K. W sees all of them, or not the largest half or
    quarter of these powers; y is as good as plain torch's, element by element."""
    k, columns = 512, torch.arange(512)
    signs = torch.randint(0, 2, (128, k), generator=torch.Generator().manual_seed(1)) * 2.0 - 1
    for span in (16, 20, 30):
        exponents = -torch.linspace(0, span, k)[some_columns(k, k)]
        x = (randn(m, k, dtype=torch.float32, device="cpu").sign() * 1.5 * 2.0**exponents).to(x_dtype)
        for fmt in scheme.few_formats:
            for unseen in (0.0, 0.25, 0.5):
                parts = with_columns_of_zero(scheme.parts(64, k, fmt), columns[exponents > -span * unseen])
                weight = scheme.pack(parts, fmt.activation)
                seen, dense = weight.activation.seen(x), weight.dense
                sample = seen[:1] * signs
                plain = F.linear(sample.to(x_dtype), dense.to(x_dtype)).double() - truth(sample, dense)
                error = by_terms(scheme.mm(x, weight).double() - truth(seen, dense), seen, dense)
                assert error.abs().max() <= 2 * by_terms(plain, sample, dense).abs().max(), (span, str(fmt), unseen)


@pytest.mark.every_isa
@every_dtype
@every_m
@pytest.mark.parametrize("scheme", [INT4, FP8_INT4, FP4], ids=lambda scheme: scheme.word)
def test_rows_of_magnitudes_of_two_kinds(scheme: Scheme, m: int, x_dtype: torch.dtype) -> None:
    """A share of x is 2^8 and more times as large as the rest, which alone W sees: as good as plain torch's.

    In the last case half of that share lies halfway."""
    k = 512
    draw = torch.Generator().manual_seed(1)
    signs = torch.randint(0, 2, (128, k), generator=draw) * 2.0 - 1
    for share, distance in ((0.5, 8), (0.75, 8), (0.25, 8), (0.6, 11), (0.8, 14), (0.66, 13)):
        distance += x_dtype == torch.bfloat16 and distance == 8  # 2^8 below, fixed point has 7 of its 8 bits
        large = some_columns(k, int(share * k))
        halfway = large[: len(large) // 2 if distance == 13 else 0]
        x = (1 + torch.rand(m, k, generator=draw)) * (torch.randint(0, 2, (m, k), generator=draw) * 2 - 1)
        x[:, large] *= 2.0**distance
        x[:, halfway] *= 2.0 ** (-distance / 2)
        x = x.to(x_dtype)
        for fmt in scheme.few_formats:
            weight = scheme.pack(with_columns_of_zero(scheme.parts(64, k, fmt), large), fmt.activation)
            seen, dense = weight.activation.seen(x), weight.dense
            sample = seen[:1] * signs
            plain = F.linear(sample.to(x_dtype), dense.to(x_dtype)).double() - truth(sample, dense)
            error = by_terms(scheme.mm(x, weight).double() - truth(seen, dense), seen, dense)
            assert error.abs().max() <= 2 * by_terms(plain, sample, dense).abs().max(), (share, distance, str(fmt))


def test_one_of_500_beside_halves(device: str) -> None:
    """Hopper gave 98 for 124.5 from 17 tokens on."""
    q = torch.full((16, 250), 9, dtype=torch.uint8, device=device)
    q[:, 7] = 8
    weight = FP8_INT4.pack(Parts(q, torch.ones(16, 1, device=device), None, -1), FP8)
    for m in (1, 8, 17, 64, 256, 512):
        x = torch.full((m, 250), 0.5, dtype=torch.bfloat16, device=device)
        x[:, 7] = 500
        check_close(FP8_INT4.mm(x, weight), x, weight.dense, seen=weight.activation.seen(x))


@every_dtype
@pytest.mark.parametrize("m", [1, 8, 17, 64, 256, 512])
@pytest.mark.parametrize("group_size", [32, 128, -1])
@pytest.mark.parametrize("zeros", ["none", "integer"])
def test_fp8_int4_is_as_good_beside_outliers(
    zeros: str, group_size: int, m: int, x_dtype: torch.dtype, device: str
) -> None:
    """As accurate element by element as without outliers: e4m3 holds small numbers next to large ones.

    Otherwise as accurate as e4m3 sums on Hopper: an addend loses up to 2^-13 of the largest. Up to 16 tokens, codes
    there are not centered; the float32 error due to an outlier's products stays below that.
    """
    columns = some_columns(1024, 6).to(device)
    fmt = Int4Format(group_size, zeros, torch.float32, FP8)
    weight = FP8_INT4.pack(with_columns_of_zero(FP8_INT4.parts(128, 1024, fmt, device), columns), FP8)
    x = randn(m, 1024, dtype=x_dtype, device=device)

    def worst(times: float) -> float:
        x[:, columns] = times
        seen = weight.activation.seen(x)
        error = FP8_INT4.mm(x, weight).double() - truth(seen, weight.dense)
        return by_terms(error, seen, weight.dense).abs().max().item()

    without = max(worst(0), 2.0**-13 if x.is_cuda else 2.0**-23)
    for times in (30, 1000, 4000):
        assert worst(times) <= 2 * without, times


@pytest.mark.every_isa
@every_dtype
def test_a_ladder_stays_in_its_row(x_dtype: torch.dtype) -> None:
    """Its row is computed in another way, the others as usual, with any number of threads."""
    weight = INT4.make_weight(37, K)
    before = torch.get_num_threads()
    try:
        for m in (3, 7):
            x = randn(m, K, dtype=x_dtype, device="cpu")
            plain = INT4.mm(x, weight)
            ladder = 2.0 ** -torch.linspace(0, 24, K)[some_columns(K, K)]
            x[1] = x[m - 1] = ladder
            results = []
            for threads in (1, 2, 5):
                torch.set_num_threads(threads)
                results.append(bits(INT4.mm(x, weight)))
            assert all(torch.equal(result, results[0]) for result in results)
            assert torch.equal(results[0][0], bits(plain)[0])
            assert torch.equal(results[0][2:-1], bits(plain)[2:-1])
            assert torch.equal(results[0][1], results[0][-1])
    finally:
        torch.set_num_threads(before)


@pytest.mark.every_isa
@every_dtype
def test_outliers_stay_in_their_row(x_dtype: torch.dtype, device: str) -> None:
    """Rows without outliers keep their bits when other rows have some; rows with outliers are accurate, too."""
    weight = INT4.make_weight(37, K, device=device)
    for m in (2, 5, 40):
        x = randn(m, K, dtype=x_dtype, device=device)
        before = INT4.mm(x, weight)
        x[0, 7], x[0, 100], x[1, 299] = 30000, -20000, 30000
        y = INT4.mm(x, weight)
        assert torch.equal(bits(y[2:]), bits(before[2:]))
        check_close(y, x, weight.dense, slack=weight.slack(x))


@pytest.mark.every_isa
@every_dtype
def test_threads_with_outliers(x_dtype: torch.dtype) -> None:
    weight = INT4.make_weight(100, K)
    before = torch.get_num_threads()
    try:
        for m in (1, 7, 40):
            x = randn(m, K, dtype=x_dtype, device="cpu")
            x[:, some_columns(K, 6)] = 30000
            results = []
            for threads in (1, 2, 5):
                torch.set_num_threads(threads)
                results.append(bits(INT4.mm(x, weight)))
            assert all(torch.equal(result, results[0]) for result in results)
    finally:
        torch.set_num_threads(before)


@pytest.mark.every_isa
@pytest.mark.parametrize("zeros", ["none", "integer"])
@pytest.mark.parametrize("group_size", [32, 64, 128, 256, -1])
@pytest.mark.parametrize("m", [1, 3, 17])
def test_asymmetric_x_with_an_outlier(m: int, group_size: int, zeros: str) -> None:
    """All of x lies near one end of its range: sums of q * x are a thousand times the result.

    W has no mean. A float32 sum of sections is off by 2^-24 of its running value per addition, and these errors grow
    like sqrt(sections). Lanes accumulate separately, for which the bound has a factor of 4.
    """
    n, k = 16, 16384
    size = k if group_size == -1 else group_size
    groups = randn(n, k, dtype=torch.float32, device="cpu").view(n, k // size, size)
    low, high = (groups.amin(2), groups.amax(2)) if zeros == "integer" else (None, groups.abs().amax(2))
    scales = high / 7 if low is None else (high - low) / 15
    zero = None if low is None else (-low / scales).round()
    offset = torch.tensor(8.0) if zero is None else zero[..., None]
    q = (groups / scales[..., None] + offset).round().clamp(0, 15).to(torch.uint8).view(n, k)
    weight = INT8_INT4.pack(Parts(q, scales, zero, group_size), INT8_ASYMMETRIC)
    x = randn(m, k, dtype=torch.float32, device="cpu") * 0.5
    x[:, 7] = 1000
    codes, x_scales, x_zeros = INT8_ASYMMETRIC.quantize(x)
    products = codes.double()[:, None] * weight.dense  # [M, N, K]
    running = products.view(m, n, -1, 32).sum(3).cumsum(2).abs().amax(2)
    offsets = x_zeros.double().view(m, 1) * weight.dense.sum(1)
    bound = 4 * 2.0**-24 * (k / 32) ** 0.5 * (running + offsets.abs()) * x_scales.double().view(m, 1)
    error = (INT8_INT4.mm(x, weight).double() - truth(weight.activation.seen(x), weight.dense)).abs()
    assert (error <= bound).all(), (error / bound).max()


def with_mean(mean: float, n: int, k: int, form: str, group_size: int | None, draw: torch.Generator) -> Parts:
    """A normal weight with that mean, rounded to int8 or to int4: symmetric ("none"), with whole zero points
    ("integer"), or with scales that are integers times one scale of their row ("rows")."""
    if group_size is None:
        w = torch.randn(n, k, generator=draw) + mean
        scales = w.abs().amax(1) / 127
        return Parts((w / scales[:, None]).round().to(torch.int8), scales)
    size = k if group_size == -1 else group_size
    groups = F.pad(torch.randn(n, k, generator=draw), (0, -k % size)).view(n, -1, size) + mean
    low, high = (groups.amin(2), groups.amax(2)) if form == "integer" else (None, groups.abs().amax(2))
    scales = high / 7 if low is None else (high - low) / 15
    zero = None if low is None else (-low / scales).round()
    rows = scales.amax(1) / 16 if form == "rows" else None
    if rows is not None:
        rows = 2.0 ** rows.log2().ceil()  # the product with an integer is exact
        scales = (scales / rows[:, None]).round().clamp(1, 16) * rows[:, None]
    offset = torch.tensor(8.0) if zero is None else zero[..., None]
    q = (groups / scales[..., None] + offset).round().clamp(0, 15).to(torch.uint8).view(n, -1)[:, :k].contiguous()
    return Parts(q, scales, zero, group_size, row_scales=rows)


INT8_INT8 = next(scheme for scheme in PRODUCTS if scheme.word == "int8_int8")
WHOLE_WEIGHTS = [("int8", None), *((form, g) for form in ("none", "integer", "rows") for g in (32, 64, 128, 256, -1))]


@pytest.mark.every_isa
@pytest.mark.parametrize("form, group_size", WHOLE_WEIGHTS, ids=lambda value: str(value))
@pytest.mark.parametrize("m", [1, 2, 3, 5, 17, 70, 300])
def test_asymmetric_x_loses_nothing_to_its_zero_point(m: int, form: str, group_size: int | None) -> None:
    """All of x lies near one end of its range, so sums of its bytes are thousands of times the result.

    As accurate as plain float32 sums of the same operands, or as three roundings: of a section, of their sum and of y.
    W is 0 in the outlier's column, unless zero points lie outside of 0 to 15.
    """
    scheme = INT8_INT8 if group_size is None else INT8_INT4
    n, k = 21, 4096 + 48
    draw = torch.Generator().manual_seed(1)
    for mean in (0.0, 2.0):  # of W: sums of its rows are small, or large
        parts = with_mean(mean, n, k, form, group_size, draw)
        check_beside_zero_point(scheme, parts, m, draw, "cpu")


@pytest.mark.every_isa
@pytest.mark.parametrize("m", [1, 7, 20])
def test_zero_points_beyond_32_bits(m: int) -> None:
    """The same where sums of products less their zero points may leave 32 bits."""
    draw = torch.Generator().manual_seed(1)
    check_beside_zero_point(INT8_INT8, with_mean(2.0, 5, 70000, "int8", None, draw), m, draw, "cpu")


def check_beside_zero_point(scheme: Scheme, parts: Parts, m: int, draw: torch.Generator, device: str) -> None:
    tensors = {name: getattr(parts, name) for name in ("q", "scales", "zeros", "row_scales")}
    parts = replace(parts, **{name: t if t is None else t.to(device) for name, t in tensors.items()})
    if parts.zeros is None or parts.zeros.amin() >= 0:
        parts = with_columns_of_zero(parts, torch.tensor([7], device=device))
    weight = scheme.pack(parts, INT8_ASYMMETRIC)
    for outlier in (30, -30, 100):
        x = torch.randn(m, weight.k, generator=draw) * 0.5
        x[:, 7] = outlier
        x = x.to(device)
        seen = weight.activation.seen(x)
        expected = truth(seen, weight.dense)
        plain = F.linear(seen[:1].float().cpu(), weight.dense.float().cpu()).double() - expected[:1].cpu()
        bar = max(2 * by_terms(plain, seen[:1].cpu(), weight.dense.cpu()).abs().max().item(), 3 * 2.0**-24)
        error = by_terms(scheme.mm(x, weight).double() - expected, seen, weight.dense).abs().max().item()
        assert error <= bar, (outlier, error, bar)


@pytest.mark.every_isa
@pytest.mark.parametrize("m", [1, 7])
@pytest.mark.parametrize("activation", [INT8, INT8_ASYMMETRIC], ids=str)
@pytest.mark.parametrize("group_size", [None, 128, -1], ids=str)
def test_integer_sums_beyond_32_bits(group_size: int | None, activation: Activation, m: int, device: str) -> None:
    """K above 65536; all products of one sign and maximal, then random ones."""
    n, k = 3, 2 * 65536 + 1024 + 37
    scheme = INT8_INT4 if group_size is not None else INT8_INT8
    for largest in (True, False):
        parts = scheme.parts(n, k, Int4Format(group_size) if group_size is not None else None, device)
        if largest:
            parts.q.fill_(15 if group_size is not None else -128)
        weight = scheme.pack(parts, activation)
        x = randn(m, k, dtype=torch.float32, device=device)
        if largest:
            x = 1 + x.abs() * 0.001
        seen = weight.activation.seen(x)
        error = (scheme.mm(x, weight).double() - truth(seen, weight.dense)).abs()
        accumulation = 2.0**-24 * k**0.5  # as in accuracy.tolerance; a sum that wraps is off by more than a third
        assert (error <= accumulation * (seen.abs() @ weight.dense.abs().T) + weight.slack(x)).all()

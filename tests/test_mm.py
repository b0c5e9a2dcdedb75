"""Every GEMM operator against float64: sizes, formats, dtypes, views of x, special values."""

from __future__ import annotations

from dataclasses import replace

import pytest
import torch
from accuracy import check_metadata, tolerance, truth
from ops_schemes import (
    DTYPES,
    FLOAT,
    FP4,
    FP8_INT4,
    INT4,
    INT4_SCHEMES,
    INT8_INT4,
    PRODUCTS,
    Format,
    Int4Format,
    Scheme,
)
from ops_support import VIEWS, Case, before_guard_page, bits, check_product, fuzz, randn, sweep

M_KINDS = (1, 2, 5, 16, 40, 130)  # each of them may be another kernel
# and so may each of these: every M, every dtype, not every pair
KINDS = tuple(zip((1, 1, 1, 2, 5, 16, 16, 40, 130), 3 * DTYPES, strict=True))

every_scheme = pytest.mark.parametrize("scheme", PRODUCTS, ids=lambda scheme: scheme.word)
every_int4 = pytest.mark.parametrize("scheme", INT4_SCHEMES, ids=lambda scheme: scheme.word)
every_m = pytest.mark.parametrize("m", M_KINDS)
every_kind = pytest.mark.parametrize("m,x_dtype", KINDS)


def symmetric_formats(scheme: Scheme) -> list[Format]:
    """Without sums that cancel: x̂ and W are integers times a scale."""
    return [fmt for fmt in scheme.few_formats if fmt.activation.symmetric]


def of_every_scheme(cases: dict[Scheme, list[Case]]) -> pytest.MarkDecorator:
    pairs = [
        pytest.param(scheme, case, id=f"{scheme.word}-{case}") for scheme, of_it in cases.items() for case in of_it
    ]
    return pytest.mark.parametrize("scheme,case", pairs)


def check(scheme: Scheme, case: Case, device: str) -> None:
    x, weight, bias = case.tensors(scheme, device)
    check_product(scheme.mm(x, weight, bias), x, weight, bias)


@of_every_scheme({scheme: sweep(scheme) for scheme in PRODUCTS})
def test_sweep(scheme: Scheme, case: Case, device: str) -> None:
    check(scheme, case, device)


@of_every_scheme({scheme: list(fuzz(scheme, count=30, seed=1)) for scheme in PRODUCTS})
def test_random_sizes(scheme: Scheme, case: Case, device: str) -> None:
    check(scheme, case, device)


@pytest.mark.every_isa
@of_every_scheme({scheme: list(fuzz(scheme, count=15, seed=2)) for scheme in PRODUCTS})
def test_random_sizes_at_every_isa(scheme: Scheme, case: Case, device: str) -> None:
    check(scheme, case, device)


@pytest.mark.every_isa
@every_kind
@every_scheme
def test_medium_size(scheme: Scheme, m: int, x_dtype: torch.dtype, device: str) -> None:
    for fmt in scheme.few_formats:
        check(scheme, Case(m, 40, 700, fmt, x_dtype, x_dtype), device)


@pytest.mark.parametrize("x_dtype", (torch.bfloat16, torch.float16), ids=str)
@pytest.mark.parametrize("m, n", [(20, 25300), (32, 33000), (50, 25300), (64, 33000)])
def test_tall_tiles(m: int, n: int, x_dtype: torch.dtype, device: str) -> None:
    """Layers with many rows, for which Hopper has tiles of 192 and 256."""
    for zeros, scale_dtype in (("float", torch.bfloat16), ("none", torch.float32), ("integer", torch.float16)):
        check(INT4, Case(m, n, 384, Int4Format(128, zeros, scale_dtype), x_dtype, torch.float32), device)


@pytest.mark.parametrize("group_size", [32, 64, 128])
@pytest.mark.parametrize("m, n, k", [(130, 12000, 512), (300, 12690, 300)])
@pytest.mark.parametrize("scheme", (INT8_INT4, FP8_INT4), ids=lambda scheme: scheme.word)
def test_tall_tiles_of_w4a8(scheme: Scheme, m: int, n: int, k: int, group_size: int, device: str) -> None:
    """Sizes for which Hopper has tiles of 192 rows, where helper warps prepare the group parameters."""
    plain, other = (fmt.activation for fmt in scheme.few_formats)
    for zeros, scale_dtype, activation in (
        ("float", torch.bfloat16, plain), ("none", torch.float32, other), ("integer", torch.float16, plain)
    ):  # fmt: skip
        fmt = Int4Format(group_size, zeros, scale_dtype, activation)
        check(scheme, Case(m, n, k, fmt, torch.bfloat16, torch.bfloat16), device)


@pytest.mark.parametrize("x_dtype", (torch.bfloat16, torch.float16), ids=str)
@pytest.mark.parametrize("m, n", [(17, 100), (32, 512), (50, 1026), (100, 64)])
def test_long_k(m: int, n: int, x_dtype: torch.dtype, device: str) -> None:
    """Layers with few rows and many columns, where Hopper sums slices of K by a second kernel."""
    for scheme, formats in (
        (INT4, (Int4Format(128, "float"), Int4Format(32, "none", torch.float32))),
        (FP4, FP4.formats),
    ):
        if scheme is FP4 and x_dtype is not torch.bfloat16:
            continue
        for fmt, bias in zip(formats, (torch.bfloat16, None), strict=False):
            check(scheme, Case(m, n, 7296, fmt, x_dtype, bias), device)


@every_kind
@every_scheme
def test_error_of_quantizing_x(scheme: Scheme, m: int, x_dtype: torch.dtype, device: str) -> None:
    """End to end, against x itself: no further off than a step of its quantization allows, by definition."""
    for fmt in scheme.formats[:: -(-len(scheme.formats) // 5)]:
        weight = scheme.make_weight(33, 300, fmt, device)
        x = randn(m, 300, dtype=x_dtype, device=device)
        error = (scheme.mm(x, weight).double() - truth(x, weight.dense)).abs()
        step = weight.activation.step(x) @ weight.dense.abs().T
        slack = weight.slack(x)
        assert (error <= step * (1 + torch.finfo(x_dtype).eps) + tolerance(x, weight.dense, slack=slack).elements).all()


@pytest.mark.every_isa
@pytest.mark.parametrize("m,x_dtype", [(1, DTYPES[0]), (16, DTYPES[1]), (200, DTYPES[0]), (200, DTYPES[2])])
@every_scheme
def test_one_hot_rows_select_columns(scheme: Scheme, m: int, x_dtype: torch.dtype, device: str) -> None:
    """x = a one in each row gives columns of W: each product has one term, so an element out of place shows exactly."""
    fmt = symmetric_formats(scheme)[-1]
    for k in (33, 200, 320):
        weight = scheme.make_weight(37, k, fmt, device)
        for start in range(0, k, max(m, 50)):
            columns = torch.arange(start, start + m, device=device) % k
            x = torch.zeros(m, k, dtype=x_dtype, device=device)
            x[torch.arange(m, device=device), columns] = 1
            y, expected = scheme.mm(x, weight).double(), weight.dense[:, columns].T
            # W may be rounded to x's dtype before the product, and q * scale - zero * scale may cancel in float32.
            bound = torch.finfo(x_dtype).eps * expected.abs() + 2.0**-23 * 15 * weight.dense.abs().max()
            bound = bound + torch.finfo(x_dtype).smallest_normal * torch.finfo(x_dtype).eps
            assert ((y - expected).abs() <= bound).all()


@pytest.mark.parametrize("view", VIEWS, ids=lambda name: name.replace(" ", "_"))
@pytest.mark.parametrize("x_dtype", [torch.bfloat16, torch.float32], ids=str)
@every_scheme
def test_views_of_x(scheme: Scheme, view: str, x_dtype: torch.dtype, device: str) -> None:
    for m, k, fmt in zip((5, 5, 40, 40), (100, 128, 65, 256), 2 * scheme.few_formats, strict=True):
        weight = scheme.make_weight(33, k, fmt, device)
        x = VIEWS[view](randn(m, k, dtype=x_dtype, device=device))
        before = x.clone()
        check_product(scheme.mm(x, weight), x, weight)
        assert torch.equal(x, before)


@pytest.mark.every_isa
@every_kind
@every_scheme
def test_memory_behind_x_is_not_read_into_y(scheme: Scheme, m: int, x_dtype: torch.dtype, device: str) -> None:
    weight = scheme.make_weight(33, 77, scheme.few_formats[1], device)
    buffer = torch.full((m + 1, 128), float("nan"), dtype=x_dtype, device=device)
    x = buffer[:m, :77].copy_(randn(m, 77, dtype=x_dtype, device=device))
    check_product(scheme.mm(x, weight), x, weight)


@pytest.mark.parametrize("shape", [(0, 64), (0, 3, 64), (3, 0, 64), (2, 0, 5, 64)], ids=str)
@pytest.mark.parametrize("with_bias", [False, True], ids=["plain", "bias"])
@every_scheme
def test_no_tokens(scheme: Scheme, shape: tuple[int, ...], with_bias: bool, device: str) -> None:
    bias = randn(33, dtype=torch.float32, device=device) if with_bias else None
    x = torch.empty(shape, dtype=torch.bfloat16, device=device)
    one = randn(1, 64, dtype=torch.bfloat16, device=device)
    for fmt in scheme.few_formats:
        weight = scheme.make_weight(33, 64, fmt, device)
        check_metadata(scheme.mm(x, weight, bias), x, 33)
        check_product(scheme.mm(one, weight, bias), one, weight, bias)  # the empty call left no error behind


@pytest.mark.every_isa
@every_kind
@every_scheme
def test_nothing_is_read_past_an_allocation(scheme: Scheme, m: int, x_dtype: torch.dtype) -> None:
    """Every operand ends at an inaccessible page (x in padded rows): out-of-bounds reads crash."""
    for k in (1, 33, 128, 300):
        weight = scheme.make_weight(33, k, scheme.few_formats[1])
        at_the_end = replace(
            weight,
            operands=tuple(before_guard_page(t) for t in weight.operands),
            arguments=tuple(before_guard_page(a) if isinstance(a, torch.Tensor) else a for a in weight.arguments),
        )
        bias = before_guard_page(randn(33, dtype=x_dtype, device="cpu"))
        wide = before_guard_page(randn(m, k + 7, dtype=x_dtype, device="cpu"))
        x = wide[:, 7:]
        check_product(scheme.mm(x, at_the_end, bias), x, weight, bias)


@pytest.mark.parametrize("offset", [1, 3, 8])
@every_scheme
def test_weights_at_any_address(scheme: Scheme, offset: int, device: str) -> None:
    """8-bit weights need no alignment; packed ones refuse it by name (test_errors.py)."""
    if scheme in INT4_SCHEMES or scheme is FP4:
        pytest.skip("packed weights are aligned")
    for m, k in ((1, 128), (5, 100), (40, 256)):
        weight = scheme.make_weight(33, k, scheme.few_formats[1], device)
        q = weight.operands[0]
        moved = torch.empty(q.numel() + offset, dtype=torch.int8, device=device)[offset:].view(q.dtype).view(q.shape)
        at_offset = replace(weight, operands=(moved.copy_(q), weight.operands[1]))
        x = randn(m, k, dtype=torch.bfloat16, device=device)
        check_product(scheme.mm(x, at_offset), x, weight)


@pytest.mark.parametrize("word", ["fp8", "fp8_fp8"])
def test_e4m3_weights_by_their_own_dtype(word: str, device: str) -> None:
    """Elsewhere they are int8 tensors of the same bytes, as in layers."""
    scheme = next(scheme for scheme in PRODUCTS if scheme.word == word)
    for fmt in scheme.formats:
        weight = scheme.make_weight(33, 300, fmt, device)
        x = randn(5, 300, dtype=torch.bfloat16, device=device)
        typed = replace(weight, operands=(weight.operands[0].view(torch.float8_e4m3fn), weight.operands[1]))
        assert torch.equal(bits(scheme.mm(x, typed)), bits(scheme.mm(x, weight)))


# ---- special values --------------------------------------------------------------------------------------------------


@pytest.mark.every_isa
@every_kind
@every_scheme
def test_nan_and_inf_stay_in_their_row(scheme: Scheme, m: int, x_dtype: torch.dtype, device: str) -> None:
    """A row that is quantized becomes NaN as a whole, for an infinity too."""
    row = m // 2
    others = torch.arange(m, device=device) != row
    for fmt in scheme.few_formats:
        weight = scheme.make_weight(40, 300, fmt, device)
        x = randn(m, 300, dtype=x_dtype, device=device)
        clean = scheme.mm(x, weight)
        for value in (float("nan"), float("inf"), float("-inf")):
            x[row, 131] = value
            y = scheme.mm(x, weight)
            all_nan = value != value or fmt.activation != FLOAT
            assert (torch.isnan(y[row]) if all_nan else ~torch.isfinite(y[row])).all()
            assert torch.equal(bits(y[others]), bits(clean[others]))


@pytest.mark.every_isa
@every_kind
@every_scheme
def test_zero_rows_of_x_give_the_bias(scheme: Scheme, m: int, x_dtype: torch.dtype, device: str) -> None:
    for fmt in scheme.few_formats:
        weight = scheme.make_weight(40, 200, fmt, device)
        bias = randn(40, dtype=torch.float32, device=device)
        x = randn(m, 200, dtype=x_dtype, device=device)
        x[m // 2] = 0
        y = scheme.mm(x, weight, bias)
        assert torch.equal(y[m // 2], bias.to(x_dtype))
        check_product(y, x, weight, bias)


@pytest.mark.every_isa
@every_kind
@every_scheme
def test_zero_scales_of_the_weight(scheme: Scheme, m: int, x_dtype: torch.dtype, device: str) -> None:
    """Rows and groups that are zero throughout."""
    for fmt in scheme.few_formats:
        parts = scheme.parts(40, 200, fmt, device)
        if parts.has_row_scales:
            parts.scales[7] = 0
        if parts.scales.dim() == 2 and parts.scales.shape[1] > 1:
            parts.scales[:, 1] = 0
        weight = scheme.pack(parts, fmt.activation)
        x = randn(m, 200, dtype=x_dtype, device=device)
        y = scheme.mm(x, weight)
        assert not parts.has_row_scales or (y[:, 7] == 0).all()
        check_product(y, x, weight)


@pytest.mark.every_isa
@pytest.mark.parametrize(
    "x_dtype,exponent",
    [(torch.bfloat16, 100), (torch.bfloat16, -90), (torch.float32, 100), (torch.float32, -90)]
    + [(torch.float16, 8), (torch.float16, -12)],
    ids=str,
)
@every_scheme
def test_large_and_small_x(scheme: Scheme, x_dtype: torch.dtype, exponent: int, device: str) -> None:
    """Nothing overflows or vanishes on the way; float16 at 2^-12 is partly subnormal."""
    for fmt in scheme.few_formats:
        weight = scheme.make_weight(40, 300, fmt, device)
        for m in M_KINDS:
            x = (randn(m, 300, dtype=torch.float32, device=device) * 2.0**exponent).to(x_dtype)
            check_product(scheme.mm(x, weight), x, weight)


@pytest.mark.every_isa
@every_kind
@every_scheme
def test_outlier_channels(scheme: Scheme, m: int, x_dtype: torch.dtype, device: str) -> None:
    """Language models have channels a thousand times larger than the rest; the rest must not drown."""
    weight = scheme.make_weight(200, 512, scheme.few_formats[1], device)
    x = randn(m, 512, dtype=x_dtype, device=device)
    x[:, [3, 300]] *= 1000
    check_product(scheme.mm(x, weight), x, weight)


@pytest.mark.every_isa
@every_kind
@every_scheme
def test_rows_of_the_weight_of_very_different_size(scheme: Scheme, m: int, x_dtype: torch.dtype, device: str) -> None:
    """Each column of y is accurate by its own measure: scaling a row of W by a power of two scales its column."""
    factors = 2.0 ** (torch.arange(40, device=device) % 9 - 4)
    for fmt in scheme.few_formats:
        parts = scheme.parts(40, 300, fmt, device)
        if not parts.has_row_scales:
            continue
        weight = scheme.pack(parts, fmt.activation)
        scaled = scheme.pack(parts.with_rows_times(factors), fmt.activation)
        x = randn(m, 300, dtype=x_dtype, device=device)
        check_product((scheme.mm(x, scaled) / factors).to(x_dtype), x, weight)


@pytest.mark.every_isa
@every_kind
@every_scheme
def test_overflow_is_infinite(scheme: Scheme, m: int, x_dtype: torch.dtype, device: str) -> None:
    """All terms of one sign and a sum past the dtype's range: infinite, as in float arithmetic."""
    signs = torch.ones(40, 300, dtype=torch.int8, device=device)
    signs[20:] = -1
    for fmt in symmetric_formats(scheme):
        weight = scheme.pack(scheme.parts(40, 300, fmt, device).of_integers(7 * signs), fmt.activation)
        x = torch.full((m, 300), torch.finfo(x_dtype).max / 16, dtype=x_dtype, device=device)
        y = scheme.mm(x, weight)
        assert (truth(x, weight.dense).abs() > 2 * torch.finfo(x_dtype).max).all()
        assert (y[:, :20] == float("inf")).all()
        assert (y[:, 20:] == float("-inf")).all()


@pytest.mark.every_isa
@every_kind
@every_scheme
def test_subnormal_x(scheme: Scheme, m: int, x_dtype: torch.dtype, device: str) -> None:
    """float16 subnormals are numbers like any other; those of the 8-bit exponents may count as 0 (bf16 units do so)."""
    smallest_normal = torch.finfo(x_dtype).smallest_normal
    x = (torch.rand(m, 300, generator=torch.Generator().manual_seed(0)) * smallest_normal).to(device, x_dtype)
    for fmt in scheme.few_formats:
        weight = scheme.make_weight(40, 300, fmt, device)
        y = scheme.mm(x, weight)
        if x_dtype == torch.float16:
            check_product(y, x, weight)
        else:
            error = (y.double() - truth(x, weight.dense)).abs()
            bound = smallest_normal * (1 + weight.dense.abs().sum(1)) + weight.slack(x)
            assert (error <= bound).all()


@pytest.mark.every_isa
@every_m
@every_int4
def test_zero_points_far_from_the_middle(scheme: Scheme, m: int, device: str) -> None:
    """A zero point outside 0..15 is legal; the products then cancel and only exact handling survives."""
    fmt = Int4Format(64, "float", activation=scheme.few_formats[1].activation)
    parts = scheme.parts(40, 300, fmt, device)
    assert parts.zeros is not None
    parts.zeros[::2] = -20.0
    parts.zeros[1::2] = 35.0
    weight = scheme.pack(parts, fmt.activation)
    x = randn(m, 300, dtype=torch.bfloat16, device=device)
    check_product(scheme.mm(x, weight), x, weight)

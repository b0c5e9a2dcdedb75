"""int4_mm against float64: sizes, formats, dtypes, views of x, special values."""

from __future__ import annotations

import pytest
import torch
from accuracy import check_close, check_metadata, truth
from ops_support import DTYPES, VIEWS, Case, Int4, Int4Format, Int4Parts, before_guard_page, bits, fuzz, randn, sweep

FORMATS = Int4.few_formats
M_KINDS = (1, 2, 5, 16, 40, 130)  # each of them may be another kernel


def check(case: Case, device: str) -> None:
    x, weight, bias = case.tensors(Int4(), device)
    check_close(Int4.mm(x, weight, bias), x, weight.dense, bias)


@pytest.mark.parametrize("case", sweep(Int4()), ids=str)
def test_sweep(case: Case, device: str) -> None:
    check(case, device)


@pytest.mark.parametrize("case", list(fuzz(Int4(), count=80, seed=1)), ids=str)
def test_random_sizes(case: Case, device: str) -> None:
    check(case, device)


@pytest.mark.every_isa
@pytest.mark.parametrize("case", list(fuzz(Int4(), count=40, seed=2)), ids=str)
def test_random_sizes_at_every_isa(case: Case, device: str) -> None:
    check(case, device)


@pytest.mark.every_isa
@pytest.mark.parametrize("x_dtype", DTYPES, ids=str)
@pytest.mark.parametrize("fmt", FORMATS, ids=str)
@pytest.mark.parametrize("m", M_KINDS)
def test_medium_size(m: int, fmt: Int4Format, x_dtype: torch.dtype, device: str) -> None:
    check(Case(m, 40, 700, fmt, x_dtype, x_dtype), device)


@pytest.mark.every_isa
@pytest.mark.parametrize("x_dtype", DTYPES, ids=str)
@pytest.mark.parametrize("k", [33, 200, 320])
@pytest.mark.parametrize("m", [1, 3, 16, 200])
def test_one_hot_rows_select_columns(m: int, k: int, x_dtype: torch.dtype, device: str) -> None:
    """x = a one in each row gives columns of W: each product has one term, so an element out of place shows exactly."""
    weight = Int4.make_weight(37, k, Int4Format(64, "float", torch.float16), device)
    for start in range(0, k, max(m, 50)):
        columns = torch.arange(start, start + m, device=device) % k
        x = torch.zeros(m, k, dtype=x_dtype, device=device)
        x[torch.arange(m, device=device), columns] = 1
        y, expected = Int4.mm(x, weight).double(), weight.dense[:, columns].T
        # W may be rounded to x's dtype before the product, and q * scale - zero * scale may cancel in float32.
        bound = torch.finfo(x_dtype).eps * expected.abs() + 2.0**-23 * 15 * weight.dense.abs().max()
        assert ((y - expected).abs() <= bound).all()


@pytest.mark.parametrize("fmt", FORMATS, ids=str)
@pytest.mark.parametrize("view", VIEWS, ids=lambda name: name.replace(" ", "_"))
@pytest.mark.parametrize("m,k", [(5, 100), (5, 128), (40, 65), (40, 256)])
@pytest.mark.parametrize("x_dtype", [torch.bfloat16, torch.float32], ids=str)
def test_views_of_x(view: str, m: int, k: int, fmt: Int4Format, x_dtype: torch.dtype, device: str) -> None:
    weight = Int4.make_weight(33, k, fmt, device)
    x = VIEWS[view](randn(m, k, dtype=x_dtype, device=device))
    before = x.clone()
    check_close(Int4.mm(x, weight), x, weight.dense)
    assert torch.equal(x, before)


@pytest.mark.every_isa
@pytest.mark.parametrize("x_dtype", DTYPES, ids=str)
@pytest.mark.parametrize("m", M_KINDS)
def test_memory_behind_x_is_not_read_into_y(m: int, x_dtype: torch.dtype, device: str) -> None:
    weight = Int4.make_weight(33, 77, Int4Format(32, "float"), device)
    buffer = torch.full((m + 1, 128), float("nan"), dtype=x_dtype, device=device)
    x = buffer[:m, :77].copy_(randn(m, 77, dtype=x_dtype, device=device))
    check_close(Int4.mm(x, weight), x, weight.dense)


@pytest.mark.parametrize("shape", [(0, 64), (0, 3, 64), (3, 0, 64), (2, 0, 5, 64)], ids=str)
@pytest.mark.parametrize("with_bias", [False, True], ids=["plain", "bias"])
def test_no_tokens(shape: tuple[int, ...], with_bias: bool, device: str) -> None:
    weight = Int4.make_weight(33, 64, device=device)
    bias = randn(33, dtype=torch.float32, device=device) if with_bias else None
    x = torch.empty(shape, dtype=torch.bfloat16, device=device)
    check_metadata(Int4.mm(x, weight, bias), x, 33)
    one = randn(1, 64, dtype=torch.bfloat16, device=device)
    check_close(Int4.mm(one, weight, bias), one, weight.dense, bias)  # the empty call left no error behind


@pytest.mark.every_isa
@pytest.mark.parametrize("x_dtype", DTYPES, ids=str)
@pytest.mark.parametrize("k", [1, 33, 128, 300])
@pytest.mark.parametrize("m", M_KINDS)
def test_nothing_is_read_past_an_allocation(m: int, k: int, x_dtype: torch.dtype) -> None:
    """Every operand ends at a page that may not be touched (x in rows whose stride is not K): an over-read crashes."""
    weight = Int4.make_weight(33, k, Int4Format(64, "float", torch.bfloat16))
    operands = tuple(before_guard_page(t) for t in weight.operands)
    bias = before_guard_page(randn(33, dtype=x_dtype, device="cpu"))
    wide = before_guard_page(randn(m, k + 7, dtype=x_dtype, device="cpu"))
    x = wide[:, 7:]
    check_close(Int4.op(x, *operands, bias, *weight.arguments), x, weight.dense, bias)


# ---- special values --------------------------------------------------------------------------------------------------


@pytest.mark.every_isa
@pytest.mark.parametrize("fmt", FORMATS, ids=str)
@pytest.mark.parametrize("x_dtype", DTYPES, ids=str)
@pytest.mark.parametrize("value", [float("nan"), float("inf"), float("-inf")], ids=str)
@pytest.mark.parametrize("m", M_KINDS)
def test_nan_and_inf_stay_in_their_row(
    m: int, value: float, x_dtype: torch.dtype, fmt: Int4Format, device: str
) -> None:
    weight = Int4.make_weight(40, 300, fmt, device)
    x = randn(m, 300, dtype=x_dtype, device=device)
    clean = Int4.mm(x, weight)
    row = m // 2
    x[row, 131] = value
    y = Int4.mm(x, weight)
    assert torch.isnan(y[row]).all() if value != value else (~torch.isfinite(y[row])).all()
    others = torch.arange(m, device=device) != row
    assert torch.equal(bits(y[others]), bits(clean[others]))


@pytest.mark.every_isa
@pytest.mark.parametrize("x_dtype", DTYPES, ids=str)
@pytest.mark.parametrize("m", M_KINDS)
def test_zero_rows_of_x_give_the_bias(m: int, x_dtype: torch.dtype, device: str) -> None:
    for fmt in FORMATS:
        weight = Int4.make_weight(40, 200, fmt, device)
        bias = randn(40, dtype=torch.float32, device=device)
        x = randn(m, 200, dtype=x_dtype, device=device)
        x[m // 2] = 0
        y = Int4.mm(x, weight, bias)
        assert torch.equal(y[m // 2], bias.to(x_dtype))
        check_close(y, x, weight.dense, bias)


@pytest.mark.every_isa
@pytest.mark.parametrize("x_dtype", DTYPES, ids=str)
@pytest.mark.parametrize("zeros", ["none", "float"])
@pytest.mark.parametrize("m", M_KINDS)
def test_zero_rows_and_groups_of_the_weight(m: int, zeros: str, x_dtype: torch.dtype, device: str) -> None:
    parts = Int4.parts(40, 200, Int4Format(64, zeros), device)
    parts.scales[7] = 0  # a row
    parts.scales[:, 1] = 0  # a group
    weight = parts.pack()
    x = randn(m, 200, dtype=x_dtype, device=device)
    y = Int4.mm(x, weight)
    assert (y[:, 7] == 0).all()
    check_close(y, x, weight.dense)


@pytest.mark.every_isa
@pytest.mark.parametrize("fmt", FORMATS, ids=str)
@pytest.mark.parametrize("m", M_KINDS)
@pytest.mark.parametrize(
    "x_dtype,exponent",
    [(torch.bfloat16, 100), (torch.bfloat16, -90), (torch.float32, 100), (torch.float32, -90)]
    + [(torch.float16, 8), (torch.float16, -12)],
    ids=str,
)
def test_large_and_small_x(x_dtype: torch.dtype, exponent: int, m: int, fmt: Int4Format, device: str) -> None:
    """Nothing overflows or vanishes on the way; float16 at 2^-12 is partly subnormal."""
    weight = Int4.make_weight(40, 300, fmt, device)
    x = (randn(m, 300, dtype=torch.float32, device=device) * 2.0**exponent).to(x_dtype)
    check_close(Int4.mm(x, weight), x, weight.dense)


@pytest.mark.every_isa
@pytest.mark.parametrize("x_dtype", DTYPES, ids=str)
@pytest.mark.parametrize("m", M_KINDS)
def test_outlier_channels(m: int, x_dtype: torch.dtype, device: str) -> None:
    """Language models have channels a thousand times larger than the rest; the rest must not drown."""
    weight = Int4.make_weight(200, 512, Int4Format(128, "float"), device)
    x = randn(m, 512, dtype=x_dtype, device=device)
    x[:, [3, 300]] *= 1000
    check_close(Int4.mm(x, weight), x, weight.dense)


@pytest.mark.every_isa
@pytest.mark.parametrize("x_dtype", DTYPES, ids=str)
@pytest.mark.parametrize("m", M_KINDS)
def test_rows_of_the_weight_of_very_different_size(m: int, x_dtype: torch.dtype, device: str) -> None:
    """Each column of y is accurate by its own measure: scaling a row of W by a power of two scales its column."""
    parts = Int4.parts(40, 300, Int4Format(64, "float"), device)
    factors = 2.0 ** (torch.arange(40, device=device) % 9 - 4)
    parts.scales.mul_(factors[:, None])
    weight = parts.pack()
    x = randn(m, 300, dtype=x_dtype, device=device)
    check_close((Int4.mm(x, weight) / factors).to(x_dtype), x, weight.dense / factors[:, None])


@pytest.mark.every_isa
@pytest.mark.parametrize("x_dtype", DTYPES, ids=str)
@pytest.mark.parametrize("m", M_KINDS)
def test_overflow_is_infinite(m: int, x_dtype: torch.dtype, device: str) -> None:
    """All terms of one sign and a sum past the dtype's range: infinite, as in float arithmetic."""
    parts = Int4.parts(40, 300, Int4Format(64, "none"), device)
    q = torch.full_like(parts.q, 15)
    q[20:] = 1  # W < 0
    weight = Int4Parts(q, torch.ones_like(parts.scales), None, 64).pack()
    x = torch.full((m, 300), torch.finfo(x_dtype).max / 16, dtype=x_dtype, device=device)
    y = Int4.mm(x, weight)
    assert (truth(x, weight.dense).abs() > 2 * torch.finfo(x_dtype).max).all()
    assert (y[:, :20] == float("inf")).all()
    assert (y[:, 20:] == float("-inf")).all()


@pytest.mark.every_isa
@pytest.mark.parametrize("x_dtype", DTYPES, ids=str)
@pytest.mark.parametrize("m", M_KINDS)
def test_subnormal_x(m: int, x_dtype: torch.dtype, device: str) -> None:
    """float16 subnormals are numbers like any other; those of the 8-bit exponents may count as 0 (bf16 units do so)."""
    weight = Int4.make_weight(40, 300, Int4Format(64, "float"), device)
    smallest_normal = torch.finfo(x_dtype).smallest_normal
    x = (torch.rand(m, 300, generator=torch.Generator().manual_seed(0)) * smallest_normal).to(device, x_dtype)
    y = Int4.mm(x, weight)
    if x_dtype == torch.float16:
        check_close(y, x, weight.dense)
    else:
        error = (y.double() - truth(x, weight.dense)).abs()
        assert (error <= smallest_normal * (1 + weight.dense.abs().sum(1))).all()


@pytest.mark.every_isa
@pytest.mark.parametrize("m", M_KINDS)
def test_zero_points_far_from_the_middle(m: int, device: str) -> None:
    """A zero point outside 0..15 is legal; the products then cancel and only exact handling survives."""
    parts = Int4.parts(40, 300, Int4Format(64, "float"), device)
    assert parts.zeros is not None
    parts.zeros[::2] = -20.0
    parts.zeros[1::2] = 35.0
    weight = parts.pack()
    x = randn(m, 300, dtype=torch.bfloat16, device=device)
    check_close(Int4.mm(x, weight), x, weight.dense)

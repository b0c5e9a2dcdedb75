"""int8_quantize, fp8_quantize and the quantizing producers against their definitions."""

from __future__ import annotations

import pytest
import torch
from ops_support import DTYPES, VIEWS, before_guard_page, randn
from qao.ops.reference import rms_norm, silu_mul
from torch import Tensor

OPS = torch.ops.qao
FP8 = torch.float8_e4m3fn
UTILITIES = ("test_schema", "test_autograd_registration", "test_faketensor", "test_aot_dispatch_dynamic")
SHAPES = ((1, 1), (3, 7), (5, 31), (2, 127), (4, 128), (3, 129), (7, 1000), (1, 4096), (300, 264), (2, 9001))
SMALLEST = 2.0**-100  # a row below counts as this large
LARGEST = {torch.int8: 127.0, FP8: 448.0}
pytestmark = pytest.mark.every_isa


def fp8_quantize(x: Tensor, group_size: int, scale: Tensor | None = None) -> tuple[Tensor, Tensor]:
    return OPS.fp8_quantize(x, scale, group_size)


def nan_where(condition: Tensor, values: Tensor) -> Tensor:
    return values.masked_fill(condition, float("nan"))


def bits(x: Tensor) -> Tensor:
    """The bit pattern as integers, so that equality holds for NaN and signed zeros too."""
    return x.contiguous().view({1: torch.uint8, 2: torch.int16, 4: torch.int32}[x.element_size()]).cpu()


def same(a: Tensor, b: Tensor) -> bool:
    return torch.equal(bits(a), bits(b))


# ---- the definitions, in float32: every step is exact or one IEEE rounding, so the operators match bit by bit --------


def int8_definition(x: Tensor, symmetric: bool) -> tuple[Tensor, Tensor, Tensor]:
    x = x.cpu().float()
    finite = x.isfinite().all(-1, keepdim=True)
    low, high = x.amin(-1, keepdim=True).clamp(max=0), x.amax(-1, keepdim=True).clamp(min=0)
    scale = torch.maximum(high, -low).clamp(min=SMALLEST) / 127
    zero = torch.zeros_like(scale)
    if not symmetric:
        scale = (high / 255 - low / 255).clamp(min=SMALLEST)
        zero = (-128 - low * (1 / scale)).round().clamp(-128, 127)
    q = ((x * (1 / scale)).round() + zero).clamp(-127 if symmetric else -128, 127)
    q, zero = (torch.where(finite, values, 0) for values in (q, zero))
    return q.to(torch.int8), nan_where(~finite, scale), zero.to(torch.int32)


def fp8_definition(x: Tensor, group_size: int) -> tuple[Tensor, Tensor]:
    x = x.cpu().float()
    if group_size == 0:
        q, scale = fp8_definition(x.reshape(1, -1), -1)
        return q.view(x.shape), scale.view(1)
    if group_size > 0:
        parts = [fp8_definition(part, -1) for part in x.split(group_size, -1)]
        return torch.cat([q for q, _ in parts], -1), torch.cat([scale for _, scale in parts], -1)
    finite = x.isfinite().all(-1, keepdim=True)
    scale = nan_where(~finite, x.abs().amax(-1, keepdim=True).clamp(min=SMALLEST) / 448)
    return torch.where(finite, x * (1 / scale), 0).clamp(-448, 448).to(FP8), scale


# ---- values ----------------------------------------------------------------------------------------------------------


@pytest.mark.parametrize("symmetric", (True, False))
@pytest.mark.parametrize("x_dtype", DTYPES, ids=str)
@pytest.mark.parametrize("shape", SHAPES, ids=str)
def test_int8(shape: tuple[int, int], x_dtype: torch.dtype, symmetric: bool, device: str) -> None:
    x = randn(*shape, dtype=x_dtype, device=device) + (0 if symmetric else 0.7)
    for result, expected in zip(OPS.int8_quantize(x, symmetric), int8_definition(x, symmetric), strict=True):
        assert result.device == x.device and result.is_contiguous() and result.dtype == expected.dtype
        assert result.shape == expected.shape and same(result, expected)


@pytest.mark.parametrize("group_size", (-1, 0, 128))
@pytest.mark.parametrize("x_dtype", DTYPES, ids=str)
@pytest.mark.parametrize("shape", SHAPES, ids=str)
def test_fp8(shape: tuple[int, int], x_dtype: torch.dtype, group_size: int, device: str) -> None:
    x = randn(*shape, dtype=x_dtype, device=device)
    for result, expected in zip(fp8_quantize(x, group_size), fp8_definition(x, group_size), strict=True):
        assert result.device == x.device and result.is_contiguous() and result.dtype == expected.dtype
        assert result.shape == expected.shape and same(result, expected)


@pytest.mark.parametrize("symmetric", (True, False))
def test_int8_error_is_half_a_step(symmetric: bool, device: str) -> None:
    x = randn(40, 500, dtype=torch.float32, device=device) * torch.logspace(-20, 20, 40, device=device)[:, None]
    q, scales, zeros = OPS.int8_quantize(x, symmetric)
    steps = ((q.double() - zeros) * scales.double() - x.double()).abs() / scales.double()
    # Float32 rounds the quotient, and the zero point moves both ends by up to half a step, which q's range may cut.
    assert steps.max() <= (0.5 if symmetric else 1) + 1e-4
    assert q.amax() == 127 and q.abs().amax() >= 127


def test_fp8_error_is_half_a_spacing(device: str) -> None:
    x = randn(40, 500, dtype=torch.float32, device=device) * torch.logspace(-20, 20, 40, device=device)[:, None]
    q, scales = fp8_quantize(x, -1)
    scaled = x.double() / scales
    spacing = 2.0 ** (scaled.abs().clamp(min=2.0**-6).log2().floor() - 3)
    assert ((q.double() - scaled).abs() <= spacing * (0.5 + 1e-5)).all()
    assert q.float().abs().amax(1).eq(448).all()


def test_every_fp8_rounding(device: str) -> None:
    """All sixteen-bit floats against torch's own conversion, saturated."""
    x = torch.arange(-(2**15), 2**15, dtype=torch.int32).to(torch.int16).view(torch.bfloat16)
    x = x[x.isfinite()][None].to(device)
    one = torch.ones(1, device=device)
    q, scale = fp8_quantize(x, 0, one)
    assert same(q, x.cpu().float().clamp(-448, 448).to(FP8)) and same(scale, one)


def test_static_scale(device: str) -> None:
    x = randn(5, 300, dtype=torch.bfloat16, device=device)
    scale = torch.tensor([0.003], device=device)  # saturates the larger ones
    q, returned = fp8_quantize(x, 0, scale)
    assert same(q, (x.cpu().float() * (1 / scale.cpu())).clamp(-448, 448).to(FP8))
    assert same(returned, scale) and returned.data_ptr() != scale.data_ptr()
    assert q.float().abs().amax() == 448


# ---- unusual values --------------------------------------------------------------------------------------------------


@pytest.mark.parametrize("k", (7, 264, 5000))
@pytest.mark.parametrize("x_dtype", DTYPES, ids=str)
def test_zeros(x_dtype: torch.dtype, k: int, device: str) -> None:
    """Rows and columns of zeros, and of negative zeros: scales are positive, q is the zero point."""
    x = randn(4, k, dtype=x_dtype, device=device)
    x[1], x[2], x[:, 3] = 0, -0.0, 0
    for symmetric in (True, False):
        q, scales, zeros = OPS.int8_quantize(x, symmetric)
        assert (scales > 0).all() and scales.isfinite().all()
        assert (q[1:3] == zeros[1:3]).all() and (q[:, 3:4] == zeros).all()
        assert same(q, int8_definition(x, symmetric)[0])
    for group_size in (-1, 0, 128):
        q, scales = fp8_quantize(x, group_size)
        assert (scales > 0).all() and scales.isfinite().all() and (q.float()[1:3] == 0).all()


@pytest.mark.parametrize("value", (float("nan"), float("inf"), float("-inf")))
@pytest.mark.parametrize("k", (1, 9, 264, 5000))
def test_nonfinite_rows(k: int, value: float, device: str) -> None:
    """A row with NaN or infinity gets the scale NaN and q = 0; its neighbors are not affected."""
    x = randn(4, k, dtype=torch.float32, device=device)
    x[1, k // 2], x[2, k - 1] = value, value
    for symmetric in (True, False):
        result = OPS.int8_quantize(x, symmetric)
        assert all(same(a, b) for a, b in zip(result, int8_definition(x, symmetric), strict=True))
        assert (result[0][1:3] == 0).all() and (result[2][1:3] == 0).all()
        assert result[1].isnan().flatten().tolist() == [False, True, True, False]
    for group_size in (-1, 0, 128):
        q, scales = fp8_quantize(x, group_size)
        expected_q, expected_scales = fp8_definition(x, group_size)
        assert same(q, expected_q) and torch.equal(scales.isnan().cpu(), expected_scales.isnan())
        assert torch.equal(scales.cpu().nan_to_num(), expected_scales.nan_to_num())


def test_extreme_magnitudes(device: str) -> None:
    """From denormal rows to the largest float: no scale overflows, none is zero."""
    rows = [1e-45, 1e-38, 1e-31, 1e-30, 1e-20, 1e20, 3.4e38]
    x = randn(len(rows), 200, dtype=torch.float32, device=device).clamp(-1, 1)
    x = x * torch.tensor(rows, device=device)[:, None]
    for symmetric in (True, False):
        result = OPS.int8_quantize(x, symmetric)
        assert all(same(a, b) for a, b in zip(result, int8_definition(x, symmetric), strict=True))
    q, scales = fp8_quantize(x, -1)
    assert all(same(a, b) for a, b in zip((q, scales), fp8_definition(x, -1), strict=True))


# ---- shapes, strides -------------------------------------------------------------------------------------------------


@pytest.mark.parametrize("k", (97, 264))
@pytest.mark.parametrize("x_dtype", (torch.bfloat16, torch.float32), ids=str)
@pytest.mark.parametrize("view", VIEWS)
def test_views(view: str, x_dtype: torch.dtype, k: int, device: str) -> None:
    x = VIEWS[view](randn(9, k, dtype=x_dtype, device=device))
    plain = x.clone(memory_format=torch.contiguous_format)
    weight = randn(x.shape[-1], dtype=x_dtype, device=device, seed=1)
    for op, arguments in (
        (OPS.int8_quantize, (False,)),
        (fp8_quantize, (-1,)),
        (fp8_quantize, (128,)),
        (fp8_quantize, (0,)),
        (OPS.rms_norm_quantize, (weight, 1e-6, torch.int8)),
    ):
        result, expected = op(x, *arguments), op(plain, *arguments)
        assert all(
            a.shape == b.shape and torch.equal(a.float(), b.float()) for a, b in zip(result, expected, strict=True)
        )
        assert result[0].shape == x.shape and not any(t.float().isnan().any() for t in result)
    result, expected = OPS.silu_mul_quantize(x, x, FP8), OPS.silu_mul_quantize(plain, plain, FP8)
    assert all(torch.equal(a.float(), b.float()) for a, b in zip(result, expected, strict=True))


@pytest.mark.parametrize("k", (1, 5, 16, 33, 64, 100))
@pytest.mark.parametrize("x_dtype", DTYPES, ids=str)
def test_reads_nothing_past_the_end(x_dtype: torch.dtype, k: int) -> None:
    x = before_guard_page(randn(3, k, dtype=x_dtype, device="cpu"))
    assert same(OPS.int8_quantize(x, True)[0], int8_definition(x, True)[0])
    assert same(fp8_quantize(x, 128)[0], fp8_definition(x, 128)[0])
    OPS.rms_norm_quantize(x, x[-1], 1e-6, FP8)
    OPS.silu_mul_quantize(x, x, torch.int8)


@pytest.mark.parametrize("shape", ((0, 8), (2, 0, 8), (0, 3, 300)), ids=str)
def test_no_rows(shape: tuple[int, ...], device: str) -> None:
    x = torch.empty(shape, dtype=torch.bfloat16, device=device)
    q, scales, zeros = OPS.int8_quantize(x, False)
    assert q.shape == x.shape and scales.shape == zeros.shape == (*shape[:-1], 1)
    for group_size, expected in ((-1, (*shape[:-1], 1)), (0, (1,)), (128, (*shape[:-1], -(-shape[-1] // 128)))):
        q, scales = fp8_quantize(x, group_size)
        assert q.shape == x.shape and scales.shape == expected
    for result in (OPS.rms_norm_quantize(x, None, 1e-6, FP8), OPS.silu_mul_quantize(x, x, FP8)):
        assert result[0].shape == x.shape and result[1].shape == (*shape[:-1], 1)


@pytest.mark.parametrize("shape", ((1, 120_000), (3, 200_000), (20_000, 16)), ids=str)
def test_long_rows_and_many(shape: tuple[int, int], device: str) -> None:
    x = randn(*shape, dtype=torch.bfloat16, device=device)
    assert all(same(a, b) for a, b in zip(OPS.int8_quantize(x, False), int8_definition(x, False), strict=True))
    for group_size in (-1, 0, 128):
        result, expected = fp8_quantize(x, group_size), fp8_definition(x, group_size)
        assert all(same(a, b) for a, b in zip(result, expected, strict=True))
    check_producer(OPS.rms_norm_quantize(x, None, 1e-6, torch.int8), rms_norm(x, None, 1e-6))


# ---- fused producers -------------------------------------------------------------------------------------------------


def check_producer(result: tuple[Tensor, Tensor], exact: Tensor) -> None:
    """q and scale of `exact` up to float32 arithmetic: a few roundings of 2^-24 in the values."""
    q, scales, exact = result[0].cpu(), result[1].cpu(), exact.cpu()
    slack = 2e-6
    expected = exact.abs().amax(-1, keepdim=True).clamp(min=SMALLEST) / LARGEST[q.dtype]
    assert ((scales.double() - expected).abs() <= slack * expected).all()
    scaled = exact / expected
    half = 0.5
    if q.dtype == FP8:
        half = 0.5 * 2.0 ** (scaled.abs().clamp(min=2.0**-6).log2().floor() - 3)
    # Where the exact value lies a rounding below a power of two, the spacing above it applies.
    assert ((q.double() - scaled).abs() <= half * (1 + slack) + slack * scaled.abs() * 2).all()


@pytest.mark.parametrize("dtype", (torch.int8, FP8), ids=str)
@pytest.mark.parametrize("weight_dtype", (None, *DTYPES), ids=str)
@pytest.mark.parametrize("x_dtype", DTYPES, ids=str)
@pytest.mark.parametrize("shape", SHAPES, ids=str)
def test_rms_norm(
    shape: tuple[int, int], x_dtype: torch.dtype, weight_dtype: torch.dtype | None, dtype: torch.dtype, device: str
) -> None:
    x = randn(*shape, dtype=x_dtype, device=device)
    weight = None if weight_dtype is None else randn(shape[1], dtype=weight_dtype, device=device, seed=1)
    check_producer(OPS.rms_norm_quantize(x, weight, 1e-5, dtype), rms_norm(x, weight, float(torch.tensor(1e-5))))


@pytest.mark.parametrize("with_residual", (True, False))
@pytest.mark.parametrize("dtype", (torch.int8, FP8), ids=str)
@pytest.mark.parametrize("x_dtype", DTYPES, ids=str)
@pytest.mark.parametrize("shape", SHAPES, ids=str)
def test_add_rms_norm(
    shape: tuple[int, int], x_dtype: torch.dtype, dtype: torch.dtype, with_residual: bool, device: str
) -> None:
    x, residual = (randn(*shape, dtype=x_dtype, device=device, seed=seed) for seed in (0, 1))
    h = x + residual if with_residual else x
    weight = randn(shape[1], dtype=x_dtype, device=device, seed=2)
    *result, total = OPS.add_rms_norm_quantize(x, residual if with_residual else None, weight, 1e-5, dtype)
    check_producer(tuple(result), rms_norm(h, weight, float(torch.tensor(1e-5))))
    assert same(total, h) and total.data_ptr() != x.data_ptr()


@pytest.mark.parametrize("dtype", (torch.int8, FP8), ids=str)
@pytest.mark.parametrize("x_dtype", DTYPES, ids=str)
@pytest.mark.parametrize("shape", SHAPES, ids=str)
def test_silu_mul(shape: tuple[int, int], x_dtype: torch.dtype, dtype: torch.dtype, device: str) -> None:
    gate, up = (randn(*shape, dtype=x_dtype, device=device, seed=seed) * 3 for seed in (0, 1))
    check_producer(OPS.silu_mul_quantize(gate, up, dtype), silu_mul(gate, up))


def test_rms_norm_far_from_one(device: str) -> None:
    """Rows with squares outside float32's range, at both ends."""
    x = randn(5, 300, dtype=torch.float32, device=device)
    x = x * torch.tensor([1e-30, 1e-22, 1.0, 1e22, 1e30], device=device)[:, None]
    check_producer(OPS.rms_norm_quantize(x, None, 0.0, torch.int8), rms_norm(x, None, 0.0))


def test_silu_of_large_values(device: str) -> None:
    """An overflow of e^-x in float32 gives no NaN: silu is 0 there, and x on the other side."""
    gate = torch.tensor([[-1e30, -200.0, -89.0, 0.0, 1.0, 200.0, 1e30], [-300.0, -200, -150, -120, -110, -1, 0]])
    gate = gate.to(device)
    check_producer(
        OPS.silu_mul_quantize(gate, torch.ones_like(gate), torch.int8), silu_mul(gate, torch.ones_like(gate))
    )


@pytest.mark.parametrize("dtype", (torch.int8, FP8), ids=str)
def test_producers_of_nonfinite_rows(dtype: torch.dtype, device: str) -> None:
    x = randn(4, 100, dtype=torch.float32, device=device)
    x[1, 5], x[2, 7] = float("nan"), float("inf")
    for q, scales in (OPS.rms_norm_quantize(x, None, 1e-6, dtype), OPS.silu_mul_quantize(x, x, dtype)):
        assert scales.isnan().flatten().tolist() == [False, True, True, False]
        assert (q.float()[1:3] == 0).all() and (q.float()[::3] != 0).any(1).all()


# ---- the rest --------------------------------------------------------------------------------------------------------


def test_runs_repeat(device: str) -> None:
    x, weight = randn(130, 3000, dtype=torch.bfloat16, device=device), randn(3000, dtype=torch.bfloat16, device=device)
    calls = (
        lambda: fp8_quantize(x, 0),
        lambda: OPS.int8_quantize(x, False),
        lambda: OPS.rms_norm_quantize(x, weight, 1e-6, torch.int8),
        lambda: OPS.silu_mul_quantize(x, x, FP8),
    )
    for call in calls:
        first = call()
        for _ in range(10):
            assert all(same(a, b) for a, b in zip(first, call(), strict=True))


def test_rows_do_not_depend_on_each_other(device: str) -> None:
    """The same bits alone, among few and among many rows, however these are spread over threads."""
    x, weight = randn(400, 2048, dtype=torch.bfloat16, device=device), randn(2048, dtype=torch.bfloat16, device=device)
    many, alone = OPS.int8_quantize(x, False), OPS.int8_quantize(x[7], False)
    assert all(same(a[7], b) for a, b in zip(many, alone, strict=True))
    if device == "cpu":
        normed, one = OPS.rms_norm_quantize(x, weight, 1e-6, FP8), OPS.rms_norm_quantize(x[7], weight, 1e-6, FP8)
        assert all(same(a[7], b) for a, b in zip(normed, one, strict=True))


@pytest.mark.parametrize("shape", ((5, 100), (0, 100), (100,), (2, 3, 100)), ids=str)
def test_opcheck(shape: tuple[int, ...], device: str) -> None:
    x, weight = randn(*shape, dtype=torch.bfloat16, device=device), randn(100, dtype=torch.float32, device=device)
    for op, arguments in (
        (OPS.int8_quantize, (x, True)),
        (OPS.fp8_quantize, (x, None, -1)),
        (OPS.fp8_quantize, (x, None, 128)),
        (OPS.fp8_quantize, (x, None, 0)),
        (OPS.fp8_quantize, (x, torch.ones(1, device=device), 0)),
        (OPS.rms_norm_quantize, (x, weight, 1e-6, torch.int8)),
        (OPS.rms_norm_quantize, (x, None, 1e-6, FP8)),
        (OPS.add_rms_norm_quantize, (x, x, weight, 1e-6, torch.int8)),
        (OPS.add_rms_norm_quantize, (x, None, None, 1e-6, FP8)),
        (OPS.silu_mul_quantize, (x, x, FP8)),
    ):
        torch.library.opcheck(op.default, arguments, test_utils=UTILITIES)


def test_errors(device: str) -> None:
    x = randn(3, 8, dtype=torch.bfloat16, device=device)
    one = torch.ones(1, device=device)
    for call, message in (
        (lambda: OPS.int8_quantize(x.int(), True), "int8_quantize"),
        (lambda: OPS.int8_quantize(x[0, 0], True), r"x must have shape \[..., K\]"),
        (lambda: OPS.int8_quantize(x[:, :0], True), "K at least 1"),
        (lambda: fp8_quantize(x, 64), "group size"),
        (lambda: fp8_quantize(x, -1, one), "a given scale is for the whole tensor"),
        (lambda: fp8_quantize(x, 0, torch.ones(2, device=device)), "one float32"),
        (lambda: OPS.rms_norm_quantize(x, one, 1e-6, torch.int8), r"weight must be contiguous of shape \[K\]"),
        (lambda: OPS.rms_norm_quantize(x, None, 1e-6, torch.uint8), "dtype must be int8 or float8_e4m3fn"),
        (lambda: OPS.silu_mul_quantize(x, x[:2], torch.int8), "up must have the shape"),
        (lambda: OPS.silu_mul_quantize(x, x.float(), torch.int8), "up must have the shape"),
    ):
        with pytest.raises(RuntimeError, match=message):
            call()

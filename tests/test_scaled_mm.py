"""int8_scaled_mm and fp8_scaled_mm: GEMM with activations quantized by the caller."""

from __future__ import annotations

from typing import Any

import pytest
import torch
from accuracy import check_close
from ops_schemes import DTYPES, SCHEMES, Format, Scheme
from ops_support import before_guard_page, randn
from torch import Tensor

UTILITIES = ("test_schema", "test_autograd_registration", "test_faketensor", "test_aot_dispatch_dynamic")
FORMATS = [
    pytest.param(scheme, fmt, id=f"{scheme.word}-{fmt}")
    for scheme in SCHEMES
    if scheme.word in ("int8_int8", "fp8_fp8")
    for fmt in scheme.formats
]
every_format = pytest.mark.parametrize("scheme,fmt", FORMATS)


def operands(
    scheme: Scheme, fmt: Format, x: Tensor, n: int = 33
) -> tuple[Any, tuple[Any, ...], tuple[Any, ...], Tensor, Tensor]:
    """The op, its arguments before and after bias, W and x̂ in float64, the latter of x [..., K]."""
    weight = scheme.make_weight(n, x.shape[-1], fmt, str(x.device))
    quantized = weight.activation.quantize(x)
    seen = weight.activation.seen(x.reshape(-1, x.shape[-1]))
    if scheme.word == "fp8_fp8":
        return torch.ops.qao.fp8_scaled_mm.default, (*quantized, *weight.operands), (), weight.dense, seen
    q, scales, zeros = quantized
    (sums,) = weight.arguments
    before = (q, scales, None if sums is None else zeros, *weight.operands)
    return torch.ops.qao.int8_scaled_mm.default, before, (sums,), weight.dense, seen


def call(op: Any, before: tuple[Any, ...], after: tuple[Any, ...], bias: Tensor | None, dtype: torch.dtype) -> Tensor:
    return op(*before, bias, *after, dtype, *([False] if "fp8" in str(op) else []))


@every_format
@pytest.mark.parametrize("out_dtype", DTYPES, ids=str)
@pytest.mark.parametrize("shape", [(1, 300), (5, 256), (2, 3, 129), (40, 300), (0, 64)], ids=str)
def test_products(shape: tuple[int, ...], out_dtype: torch.dtype, scheme: Scheme, fmt: Format, device: str) -> None:
    x = randn(*shape, dtype=out_dtype, device=device)
    op, before, after, dense, seen = operands(scheme, fmt, x)
    bias = randn(33, dtype=torch.float32, device=device)
    y = call(op, before, after, bias, out_dtype)
    check_close(y, x, dense, bias, seen, fmt.activation.slack(x.reshape(-1, shape[-1]), dense) if x.numel() else None)


@every_format
def test_the_dynamic_product_is_both_steps(scheme: Scheme, fmt: Format, device: str) -> None:
    """Up to the last bit of float32: another kernel may sum in another order."""
    x = randn(7, 300, dtype=torch.float32, device=device)
    weight = scheme.make_weight(33, 300, fmt, device)
    op, before, after, dense, _ = operands(scheme, fmt, x)
    at_once, in_steps = scheme.mm(x, weight), call(op, before, after, None, torch.float32)
    slack = fmt.activation.slack(x, dense).max() + 2.0**-20 * at_once.abs().max()
    assert (at_once.double() - in_steps).abs().max() <= slack


@pytest.mark.every_isa
@every_format
@pytest.mark.parametrize("dtype", DTYPES, ids=str)
def test_a_cpu_rounds_alike_in_both_ways(dtype: torch.dtype, scheme: Scheme, fmt: Format) -> None:
    """To the bit, at ties and below the smallest normal e4m3 too: the first columns make scales of e4m3 1."""
    torch.manual_seed(0)
    x = (16 + torch.randint(0, 16, (70, 300))) * torch.exp2(torch.randint(-19, 3, (70, 300)).float())
    x *= torch.where(torch.rand(70, 300) < 0.5, -1, 1)
    x[:, ::128] = 448 if scheme.word == "fp8_fp8" else 127
    x[3], x[5, 7], x[6, 200] = 0, float("inf"), float("nan")
    for m in (1, 5, 70):
        op, before, after, _, _ = operands(scheme, fmt, x[:m].to(dtype))
        at_once = scheme.mm(x[:m].to(dtype), scheme.make_weight(33, 300, fmt, "cpu"))
        in_steps = call(op, before, after, None, dtype)
        assert torch.equal(at_once.isnan(), in_steps.isnan())
        assert torch.equal(at_once.nan_to_num(), in_steps.nan_to_num())


@every_format
@pytest.mark.parametrize("m", range(1, 9))
def test_few_tokens_are_quantized_alike(m: int, scheme: Scheme, fmt: Format, device: str) -> None:
    """On a GPU the product quantizes few tokens itself. Sums of int8 are exact here, so a single other q would show."""
    for i, k in enumerate((8, 31, 129, 300, 1000, 1024)):
        x = randn(m, k, dtype=DTYPES[i % 3], device=device, seed=k)
        x[0] *= 100
        if m > 1:
            x[-1, k // 2] = (float("nan"), float("inf"))[i % 2]
        if m > 2:
            x[1] = 0
        op, before, after, dense, _ = operands(scheme, fmt, x)
        weight = scheme.make_weight(33, k, fmt, device)
        bias = randn(33, dtype=torch.float32, device=device)
        at_once, in_steps = scheme.mm(x, weight, bias), call(op, before, after, bias, x.dtype)
        if scheme.word == "int8_int8":
            assert torch.equal(at_once.isnan(), in_steps.isnan())
            assert torch.equal(at_once.nan_to_num(), in_steps.nan_to_num())
            continue
        finite = in_steps.isfinite().all(dim=1)
        assert torch.equal(at_once.isnan(), in_steps.isnan())
        if finite.any():
            largest = in_steps[finite].abs().max()
            slack = (
                fmt.activation.slack(x[finite], dense).max()
                + 2.0 ** (-20 if x.dtype == torch.float32 else -7) * largest
            )
            assert (at_once[finite].double() - in_steps[finite]).abs().max() <= slack


@every_format
def test_views_of_quantized_activations(scheme: Scheme, fmt: Format, device: str) -> None:
    """Rows at any distance and address, in memory that ends behind the last."""
    for m, k in ((1, 77), (5, 128), (40, 65)):
        x = randn(m, k, dtype=torch.bfloat16, device=device)
        op, (q, *rest), after, _, _ = operands(scheme, fmt, x)
        expected = call(op, (q, *rest), after, None, torch.bfloat16)
        wide = torch.zeros(m, k + 3, dtype=torch.int8, device=device)
        wide = (wide if device == "cuda" else before_guard_page(wide)).view(q.dtype)
        wide[:, 3:].view(torch.int8).copy_(q.view(torch.int8))
        slack = 2.0**-7 * expected.abs().max()  # a rounding to bfloat16
        for view in (wide[:, 3:], q.view(torch.int8).t().contiguous().t().view(q.dtype)):
            y = call(op, (view, *rest), after, None, torch.bfloat16)
            assert (y - expected).abs().max() <= slack


@every_format
def test_opcheck(scheme: Scheme, fmt: Format, device: str) -> None:
    for shape in ((1, 100), (5, 300), (0, 100), (2, 3, 100)):
        x = randn(*shape, dtype=torch.float32, device=device)
        op, before, after, _, _ = operands(scheme, fmt, x)
        bias = randn(33, dtype=torch.float16, device=device)
        fp8 = "fp8" in str(op)
        # torch's test_schema compares the arguments before and after, and torch cannot compare e4m3 tensors.
        utilities = UTILITIES[1:] if fp8 else UTILITIES
        torch.library.opcheck(
            op, (*before, bias, *after, torch.bfloat16, *([False] if fp8 else [])), test_utils=utilities
        )


def test_fast_accumulation_is_near(device: str) -> None:
    """The tensor cores' short accumulator keeps 13 bits: over 4096 columns of one sign, 32 to an instruction."""
    scheme = next(scheme for scheme in SCHEMES if scheme.word == "fp8_fp8")
    x = randn(5, 4096, dtype=torch.bfloat16, device=device)
    op, before, after, dense, seen = operands(scheme, scheme.formats[0], x)
    exact, fast = (op(*before, None, *after, torch.float32, flag).double() for flag in (False, True))
    bound = 4096 / 32 * 2.0**-13 * (seen.abs() @ dense.abs().T)
    assert ((fast - exact).abs() <= bound).all()

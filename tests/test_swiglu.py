"""swiglu and swiglu_quantize, the gates of experts, against float64."""

from __future__ import annotations

import math

import pytest
import qao.ops
import torch
from ops_support import DTYPES, VIEWS, before_guard_page, randn
from qao.ops.reference import swiglu
from torch import Tensor

OPS = torch.ops.qao
FP8 = torch.float8_e4m3fn
UTILITIES = ("test_schema", "test_autograd_registration", "test_faketensor", "test_aot_dispatch_dynamic")
WIDTHS = ((1, 1), (3, 7), (2, 127), (5, 128), (7, 1000), (1, 2880), (300, 264), (2, 9001))
GPT_OSS = (1.702, 7.0, 1.0, True)
GATES = (GPT_OSS, (1.702, 7.0, 1.0, False), (1.0, 10.0, 0.0, True), (1.0, math.inf, 0.0, False), (0.3, 0.5, -2.0, True))
pytestmark = pytest.mark.every_isa


def rounded(gate: tuple[float, float, float, bool]) -> tuple[float, float, float, bool]:
    """The numbers that float32 holds."""
    alpha, limit, shift = (float(torch.tensor(number)) for number in gate[:3])
    return alpha, limit, shift, gate[3]


def lost(x: Tensor, gate: tuple[float, float, float, bool]) -> Tensor:
    """float32 error of swiglu [..., K]: alpha g is rounded, and so is u + shift; five further roundings."""
    alpha, limit, shift, interleaved = rounded(gate)
    g, u = (x[..., ::2], x[..., 1::2]) if interleaved else x.chunk(2, -1)
    g, u = g.double().clamp(max=limit), u.double().clamp(-limit, limit)
    whole = g.abs() * (alpha * g).sigmoid() * (u.abs() + abs(shift))
    return 2.0**-24 * (5 + 2 * (alpha * g).abs().clamp(max=110)) * 2 * whole + 110 * 2.0**-126 * (u.abs() + abs(shift))


@pytest.mark.parametrize("gate", GATES, ids=str)
@pytest.mark.parametrize("x_dtype", DTYPES, ids=str)
@pytest.mark.parametrize("shape", WIDTHS, ids=str)
def test_values(
    shape: tuple[int, int], x_dtype: torch.dtype, gate: tuple[float, float, float, bool], device: str
) -> None:
    x = randn(shape[0], 2 * shape[1], dtype=x_dtype, device=device) * 6
    y, exact = OPS.swiglu(x, *gate), swiglu(x, *rounded(gate))
    info = torch.finfo(x_dtype)
    half = torch.maximum(exact.abs(), torch.tensor(info.tiny, dtype=torch.float64)) * info.eps / 2
    assert y.dtype == x_dtype and y.shape == shape and y.is_contiguous()
    assert ((y.double() - exact).abs() <= half + lost(x, gate)).all()


@pytest.mark.parametrize("gate", GATES, ids=str)
@pytest.mark.parametrize("dtype", (torch.int8, FP8), ids=str)
@pytest.mark.parametrize("x_dtype", DTYPES, ids=str)
@pytest.mark.parametrize("shape", WIDTHS, ids=str)
def test_quantized(
    shape: tuple[int, int],
    x_dtype: torch.dtype,
    dtype: torch.dtype,
    gate: tuple[float, float, float, bool],
    device: str,
) -> None:
    x = randn(shape[0], 2 * shape[1], dtype=x_dtype, device=device) * 6
    (q, scales), exact = OPS.swiglu_quantize(x, *gate, dtype), swiglu(x, *rounded(gate))
    largest = exact.abs().amax(-1, keepdim=True)
    slack = (lost(x, gate) / largest).amax(-1, keepdim=True)
    expected = largest / (448 if dtype == FP8 else 127)
    assert q.shape == shape and scales.shape == (shape[0], 1)
    assert ((scales.double() - expected).abs() <= (slack + 2.0**-22) * expected).all()
    scaled = exact / expected
    half: Tensor | float = 0.5
    if dtype == FP8:
        half = 0.5 * 2.0 ** (scaled.abs().clamp(min=2.0**-6).log2().floor() - 3)
    allowed = half * (1 + 2.0**-20) + (slack + 2.0**-20) * (448 if dtype == FP8 else 127)
    assert ((q.double() - scaled).abs() <= allowed).all()


def test_far_from_one_and_not_finite(device: str) -> None:
    """Limits hold of infinity, NaN stays, an exponential beyond float32 is a gate of zero."""
    inf, nan = math.inf, math.nan
    x = torch.tensor([[inf, 1.0, 1e30, -2.0, -1e30, 1.0, -200.0, 1.0], [nan, 1.0, 1.0, nan, 1.0, inf, 1.0, -inf]])
    y = OPS.swiglu(x.to(device), *GPT_OSS).cpu()
    torch.testing.assert_close(y[1:], swiglu(x[1:], *GPT_OSS).float(), equal_nan=True)
    torch.testing.assert_close(y[:1], swiglu(x[:1], *GPT_OSS).float(), rtol=1e-5, atol=1e-30)
    q, scales = OPS.swiglu_quantize(x.to(device), *GPT_OSS, torch.int8)
    assert scales.isnan().flatten().tolist() == [False, True] and not q[1].any() and q[0, 0] != 0


@pytest.mark.parametrize("view", VIEWS)
def test_strides(view: str, device: str) -> None:
    x = VIEWS[view](randn(6, 64, dtype=torch.bfloat16, device=device))
    for gate in GATES:
        assert torch.equal(OPS.swiglu(x, *gate), OPS.swiglu(x.contiguous(), *gate))


@pytest.mark.parametrize("k", (1, 5, 16, 33, 64, 100))
@pytest.mark.parametrize("x_dtype", DTYPES, ids=str)
def test_reads_nothing_past_the_end(x_dtype: torch.dtype, k: int) -> None:
    x = before_guard_page(randn(3, 2 * k, dtype=x_dtype, device="cpu"))
    for gate in (GPT_OSS, GATES[1]):
        assert OPS.swiglu(x, *gate).isfinite().all()


@pytest.mark.parametrize("gate", GATES, ids=str)
def test_gradients(gate: tuple[float, float, float, bool], device: str) -> None:
    torch._dynamo.reset()  # the gates are constants of the compiled code
    x = randn(2, 3, 50, dtype=torch.float32, device=device) * 6
    grad = randn(2, 3, 25, dtype=torch.float32, device=device, seed=1)
    truth = x.double().requires_grad_()
    swiglu(truth, *gate).backward(grad.double())
    assert truth.grad is not None
    for call in (qao.ops.swiglu, torch.compile(qao.ops.swiglu, fullgraph=True, backend="aot_eager")):
        own = x.clone().requires_grad_()
        call(own, *gate).backward(grad)
        assert own.grad is not None
        torch.testing.assert_close(own.grad.double(), truth.grad, rtol=1e-5, atol=1e-5)
    _, tangent = torch.func.jvp(lambda x: qao.ops.swiglu(x, *gate), (x,), (torch.ones_like(x),))
    _, expected = torch.func.jvp(lambda x: swiglu(x, *gate), (x.double(),), (torch.ones_like(x).double(),))
    torch.testing.assert_close(tangent.double(), expected, rtol=1e-5, atol=1e-5)


@pytest.mark.parametrize("shape", ((5, 100), (0, 100), (100,), (2, 3, 100)), ids=str)
def test_opcheck_and_repeats(shape: tuple[int, ...], device: str) -> None:
    x = randn(*shape, dtype=torch.bfloat16, device=device)
    torch.library.opcheck(OPS.swiglu.default, (x, *GPT_OSS), test_utils=UTILITIES)
    torch.library.opcheck(OPS.swiglu_quantize.default, (x, *GPT_OSS, torch.int8), test_utils=UTILITIES)
    assert torch.equal(OPS.swiglu(x, *GPT_OSS), OPS.swiglu(x, *GPT_OSS))
    assert torch.equal(torch.vmap(lambda x: OPS.swiglu(x, *GPT_OSS))(x[None]), OPS.swiglu(x, *GPT_OSS)[None])


def test_errors(device: str) -> None:
    x = randn(3, 8, dtype=torch.bfloat16, device=device)
    for call, message in (
        (lambda: OPS.swiglu(x.int(), *GPT_OSS), "swiglu"),
        (lambda: OPS.swiglu(x[:, :7], *GPT_OSS), "even number of columns"),
        (lambda: OPS.swiglu(x[0, 0], *GPT_OSS), r"x must have shape \[..., K\]"),
        (lambda: OPS.swiglu(x, 0.0, 7.0, 1.0, True), "alpha must be a positive number"),
        (lambda: OPS.swiglu(x, math.inf, 7.0, 1.0, True), "alpha must be a positive number"),
        (lambda: OPS.swiglu(x, 1.0, math.nan, 1.0, True), "limit must be positive"),
        (lambda: OPS.swiglu(x, 1.0, 7.0, math.inf, True), "shift a number"),
        (lambda: OPS.swiglu_quantize(x, *GPT_OSS, torch.uint8), "dtype must be int8 or float8_e4m3fn"),
    ):
        with pytest.raises(RuntimeError, match=message):
            call()

"""add_rms_norm and silu_mul, the operators between linear layers, against float64."""

from __future__ import annotations

import pytest
import qao.ops
import torch
from ops_schemes import INT4, Int4Format
from ops_support import DTYPES, VIEWS, before_guard_page, check_chain_in_a_graph, randn
from qao.ops.reference import rms_norm, silu_mul
from torch import Tensor

OPS = torch.ops.qao
UTILITIES = ("test_schema", "test_autograd_registration", "test_faketensor", "test_aot_dispatch_dynamic")
SHAPES = (
    (1, 1),
    (3, 7),
    (5, 31),
    (2, 127),
    (4, 128),
    (3, 129),
    (7, 1000),
    (1, 4096),
    (300, 264),
    (2, 9001),
    (2, 40000),
)
EPS = float(torch.tensor(1e-5))
FLOAT32 = 2e-6  # relative: a few roundings of 2^-24, the exponential among them
pytestmark = pytest.mark.every_isa


def check(y: Tensor, exact: Tensor, lost: float = 0) -> None:
    """y is `exact` up to float32 arithmetic, one rounding to its dtype (absolute if subnormal) and `lost`."""
    info = torch.finfo(y.dtype)
    half = torch.maximum(exact.abs(), torch.tensor(info.tiny, dtype=torch.float64)) * info.eps / 2
    assert y.is_contiguous() and y.shape == exact.shape
    assert ((y.double() - exact).abs() <= half + FLOAT32 * exact.abs() + lost).all()


# ---- values ----------------------------------------------------------------------------------------------------------


@pytest.mark.parametrize("with_residual", (True, False))
@pytest.mark.parametrize("weight_dtype", (None, *DTYPES), ids=str)
@pytest.mark.parametrize("x_dtype", DTYPES, ids=str)
@pytest.mark.parametrize("shape", SHAPES, ids=str)
def test_add_rms_norm(
    shape: tuple[int, int], x_dtype: torch.dtype, weight_dtype: torch.dtype | None, with_residual: bool, device: str
) -> None:
    x, residual = (randn(*shape, dtype=x_dtype, device=device, seed=seed) for seed in (0, 1))
    weight = None if weight_dtype is None else randn(shape[1], dtype=weight_dtype, device=device, seed=2)
    expected = x + residual if with_residual else x
    y, h = OPS.add_rms_norm(x, residual if with_residual else None, weight, 1e-5)
    assert y.dtype == h.dtype == x_dtype and torch.equal(h, expected) and h.data_ptr() != x.data_ptr()
    check(y, rms_norm(h, weight, EPS))


@pytest.mark.parametrize("x_dtype", DTYPES, ids=str)
@pytest.mark.parametrize("shape", SHAPES, ids=str)
def test_silu_mul(shape: tuple[int, int], x_dtype: torch.dtype, device: str) -> None:
    gate, up = (randn(*shape, dtype=x_dtype, device=device, seed=seed) * 3 for seed in (0, 1))
    y = OPS.silu_mul(gate, up)
    assert y.dtype == x_dtype
    check(y, silu_mul(gate, up))


def test_far_from_one(device: str) -> None:
    """Rows with squares outside float32's range, and gates with such exponentials."""
    x = randn(5, 300, dtype=torch.float32, device=device)
    x = x * torch.tensor([1e-30, 1e-22, 1.0, 1e22, 1e30], device=device)[:, None]
    for residual in (None, x):
        y, h = OPS.add_rms_norm(x, residual, None, 0.0)
        check(y, rms_norm(h, None, 0.0))
    gate = torch.tensor([[-1e30, -200.0, -89.0, 0.0, 1.0, 200.0, 1e30]], device=device)
    # From e^87 on the denominator may count as infinite.
    check(OPS.silu_mul(gate, torch.ones_like(gate)), silu_mul(gate, torch.ones_like(gate)), lost=89 * 2.0**-126)


@pytest.mark.parametrize("x_dtype", DTYPES, ids=str)
def test_nonfinite_rows(x_dtype: torch.dtype, device: str) -> None:
    """NaN and infinity behave as in float64, and only in their row."""
    x = randn(5, 100, dtype=x_dtype, device=device)
    x[1, 5], x[2, 7], x[3] = float("nan"), float("inf"), 0
    y, h = OPS.add_rms_norm(x, None, None, 1e-6)
    torch.testing.assert_close(h, x, rtol=0, atol=0, equal_nan=True)
    assert torch.equal(y.isnan(), rms_norm(x, None, 1e-6).isnan()) and (y[3] == 0).all()
    product = OPS.silu_mul(x, torch.ones_like(x))
    assert torch.equal(product.isnan(), silu_mul(x, torch.ones_like(x)).isnan())
    check(y[4], rms_norm(x[4], None, 1e-6))
    check(product[4], silu_mul(x[4], torch.ones_like(x[4])))


# ---- shapes, strides -------------------------------------------------------------------------------------------------


@pytest.mark.parametrize("k", (97, 264))
@pytest.mark.parametrize("x_dtype", (torch.bfloat16, torch.float32), ids=str)
@pytest.mark.parametrize("view", VIEWS)
def test_views(view: str, x_dtype: torch.dtype, k: int, device: str) -> None:
    x, other = (VIEWS[view](randn(9, k, dtype=x_dtype, device=device, seed=seed)) for seed in (0, 1))
    plain, plain_other = (t.clone(memory_format=torch.contiguous_format) for t in (x, other))
    for result, expected in zip(
        (
            *OPS.add_rms_norm(x, other, None, 1e-6),
            *OPS.add_rms_norm(x, plain_other, None, 1e-6),
            OPS.silu_mul(x, other),
        ),
        (*OPS.add_rms_norm(plain, plain_other, None, 1e-6) * 2, OPS.silu_mul(plain, plain_other)),
        strict=True,
    ):
        assert result.is_contiguous() and torch.equal(result, expected) and not result.isnan().any()


@pytest.mark.parametrize("k", (1, 8, 200, 4096))
@pytest.mark.parametrize("rows", (1, 5, 300))
def test_halves_of_one_tensor(rows: int, k: int, device: str) -> None:
    both = randn(rows, 2 * k, dtype=torch.bfloat16, device=device)
    gate, up = both.chunk(2, -1)
    check(OPS.silu_mul(gate, up), silu_mul(gate, up))


@pytest.mark.parametrize("k", (1, 5, 16, 33, 64, 100))
@pytest.mark.parametrize("x_dtype", DTYPES, ids=str)
def test_reads_nothing_past_the_end(x_dtype: torch.dtype, k: int) -> None:
    x = before_guard_page(randn(3, k, dtype=x_dtype, device="cpu"))
    OPS.add_rms_norm(x, x, x[-1], 1e-6)
    OPS.silu_mul(x, x)


@pytest.mark.parametrize("shape", ((0, 8), (2, 0, 8), (0, 3, 300)), ids=str)
def test_no_rows(shape: tuple[int, ...], device: str) -> None:
    x = torch.empty(shape, dtype=torch.bfloat16, device=device)
    assert all(t.shape == x.shape for t in (*OPS.add_rms_norm(x, x, None, 1e-6), OPS.silu_mul(x, x)))


# ---- gradients -------------------------------------------------------------------------------------------------------


@pytest.mark.parametrize("with_residual", (True, False))
@pytest.mark.parametrize("with_weight", (True, False))
def test_gradients_of_add_rms_norm(with_weight: bool, with_residual: bool, device: str) -> None:
    leaves = [randn(2, 3, 50, dtype=torch.float32, device=device, seed=seed) for seed in (0, 1)]
    leaves.append(randn(50, dtype=torch.float32, device=device, seed=2))
    ours, exact = ([t.detach().to(dtype).requires_grad_() for t in leaves] for dtype in (torch.float32, torch.float64))
    grads = [randn(2, 3, 50, dtype=torch.float32, device=device, seed=seed) for seed in (3, 4)]

    def arguments(x: Tensor, residual: Tensor, weight: Tensor) -> tuple[Tensor, Tensor | None, Tensor | None]:
        return x, residual if with_residual else None, weight if with_weight else None

    torch.autograd.backward(qao.ops.add_rms_norm(*arguments(*ours), 1e-5), grads)
    x, residual, weight = arguments(*exact)
    h = x if residual is None else x + residual
    torch.autograd.backward((rms_norm(h, weight, EPS), h * 1), [grad.double() for grad in grads])
    for a, b in zip(arguments(*ours), arguments(*exact), strict=True):
        if a is not None and b is not None:
            assert a.grad is not None and b.grad is not None
            torch.testing.assert_close(a.grad.double(), b.grad, rtol=1e-5, atol=1e-5)


def test_gradients_of_silu_mul(device: str) -> None:
    leaves = [randn(2, 3, 50, dtype=torch.float32, device=device, seed=seed) * 3 for seed in (0, 1)]
    ours, exact = ([t.detach().to(dtype).requires_grad_() for t in leaves] for dtype in (torch.float32, torch.float64))
    grad = randn(2, 3, 50, dtype=torch.float32, device=device, seed=2)
    qao.ops.silu_mul(*ours).backward(grad)
    silu_mul(*exact).backward(grad.double())
    for a, b in zip(ours, exact, strict=True):
        assert a.grad is not None and b.grad is not None
        torch.testing.assert_close(a.grad.double(), b.grad, rtol=1e-5, atol=1e-5)


# ---- among other kernels ---------------------------------------------------------------------------------------------


@pytest.mark.skipif(not torch.cuda.is_available(), reason="torch sees no GPU")
@pytest.mark.parametrize("m", (1, 16, 300))
def test_chains_in_a_graph(m: int) -> None:
    """Kernels that start before the previous one ends (PDL) read nothing too early, also after torch's own."""
    k = 2048
    source, weight = (randn(*shape, dtype=torch.bfloat16, device="cuda") for shape in ((m, k), (k,)))
    packed = INT4.make_weight(2 * k, k, Int4Format(128), "cuda")

    def chain() -> Tensor:
        h = source * 2
        for _ in range(5):
            y, h = OPS.add_rms_norm(h, source, weight, 1e-6)
            gate, up = INT4.mm(y, packed).chunk(2, -1)
            q, scales, h = OPS.add_rms_norm_quantize(OPS.silu_mul(gate, up), h, weight, 1e-6, torch.int8)
            h = h + (q * scales).bfloat16()
        return h.clone()

    check_chain_in_a_graph(chain, source)


# ---- the rest --------------------------------------------------------------------------------------------------------


def test_compiles_whole(device: str) -> None:
    def block(x: Tensor, residual: Tensor, weight: Tensor) -> tuple[Tensor, Tensor]:
        y, h = qao.ops.add_rms_norm(x, residual, weight, 1e-6)
        gate, up = y.chunk(2, -1)
        return qao.ops.silu_mul(gate, up), h

    arguments = [randn(5, 128, dtype=torch.bfloat16, device=device, seed=seed) for seed in (0, 1)]
    arguments.append(randn(128, dtype=torch.bfloat16, device=device, seed=2))
    compiled = torch.compile(block, fullgraph=True, backend="aot_eager")
    with torch.no_grad():
        assert all(torch.equal(a, b) for a, b in zip(compiled(*arguments), block(*arguments), strict=True))
    for argument in arguments:
        argument.requires_grad_()
    compiled(*arguments)[0].sum().backward()
    assert all(argument.grad is not None for argument in arguments)


@pytest.mark.parametrize("shape", ((5, 100), (0, 100), (100,), (2, 3, 100)), ids=str)
def test_opcheck(shape: tuple[int, ...], device: str) -> None:
    x, weight = randn(*shape, dtype=torch.bfloat16, device=device), randn(100, dtype=torch.float32, device=device)
    for op, arguments in (
        (OPS.add_rms_norm, (x, x, weight, 1e-6)),
        (OPS.add_rms_norm, (x, None, None, 1e-6)),
        (OPS.silu_mul, (x, x)),
    ):
        torch.library.opcheck(op.default, arguments, test_utils=UTILITIES)


def test_runs_repeat(device: str) -> None:
    x, weight = (randn(*shape, dtype=torch.bfloat16, device=device) for shape in ((130, 3000), (3000,)))
    for call in (lambda: OPS.add_rms_norm(x, x, weight, 1e-6), lambda: (OPS.silu_mul(x, x),)):
        first = call()
        for _ in range(10):
            assert all(torch.equal(a, b) for a, b in zip(first, call(), strict=True))


def test_errors(device: str) -> None:
    x = randn(3, 8, dtype=torch.bfloat16, device=device)
    for call, message in (
        (lambda: OPS.add_rms_norm(x.int(), None, None, 1e-6), "add_rms_norm"),
        (lambda: OPS.add_rms_norm(x[0, 0], None, None, 1e-6), r"x must have shape \[..., K\]"),
        (lambda: OPS.add_rms_norm(x, x[:2], None, 1e-6), "residual must have the shape"),
        (lambda: OPS.add_rms_norm(x, x.float(), None, 1e-6), "residual must have the shape"),
        (lambda: OPS.add_rms_norm(x, None, x[0, :7], 1e-6), r"weight must be contiguous of shape \[K\]"),
        (lambda: OPS.add_rms_norm_quantize(x, x[:, :7], None, 1e-6, torch.int8), "residual must have the shape"),
        (lambda: OPS.silu_mul(x, x[:2]), "up must have the shape"),
        (lambda: OPS.silu_mul(x, x.float()), "up must have the shape"),
    ):
        with pytest.raises(RuntimeError, match=message):
            call()

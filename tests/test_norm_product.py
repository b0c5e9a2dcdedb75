"""add_rms_norm_int4_mm, GEMMs with RMSNorm before and SiLU-multiply after them, also of several weights."""

from __future__ import annotations

import accuracy
import pytest
import torch
from ops_schemes import INT4, Int4Format, Weight
from ops_support import DTYPES, VIEWS, check_chain_in_a_graph, randn
from qao.ops.reference import rms_norm, silu_mul
from torch import Tensor

OPS = torch.ops.qao
UTILITIES = ("test_schema", "test_autograd_registration", "test_faketensor", "test_aot_dispatch_dynamic")
EPS = float(torch.tensor(1e-5))
# M, N, K, group size; up to 8 tokens and K a multiple of 128 are one kernel on Hopper
SHAPES = (
    (1, 2, 1, 32),
    (3, 34, 100, 32),
    (1, 64, 128, 64),
    (2, 1184, 896, 128),
    (3, 96, 384, 32),
    (4, 4224, 128, -1),
    (5, 352, 512, -1),
    (7, 288, 640, 256),
    (8, 160, 256, 128),
    (2, 40, 256, 64),
    (9, 160, 256, 128),
    (33, 96, 384, 128),
)


def call(
    x: Tensor,
    residual: Tensor | None,
    norm: Tensor | None,
    weight: Weight,
    bias: Tensor | None = None,
    gated: bool = False,
) -> tuple[Tensor, Tensor]:
    return OPS.add_rms_norm_int4_mm(x, residual, norm, *weight.operands, bias, 1e-5, *weight.arguments, gated)


def call_parts(
    x: Tensor,
    residual: Tensor | None,
    norm: Tensor | None,
    weight: Weight,
    bias: Tensor | None,
    rows: list[int],
    gated: bool = False,
) -> tuple[Tensor, Tensor]:
    """The same from parts of the weight of ``rows`` rows each, multiples of 16 but for the last."""
    tiles = [-(-n // 16) for n in rows]
    operands = ([part.contiguous() for part in operand.split(tiles)] for operand in weight.operands)
    biases = [None] * len(rows) if bias is None else [part.contiguous() for part in bias.split(rows)]
    _, k, group_size = weight.arguments
    *ys, h = OPS._merged_add_rms_norm_int4_mm(x, residual, norm, *operands, biases, 1e-5, rows, k, group_size, gated)
    return torch.cat(ys, -1), h


def check(y: Tensor, h: Tensor, norm: Tensor | None, weight: Weight, bias: Tensor | None, gated: bool) -> None:
    """Check that y is the GEMM of rms_norm(h), which may first be rounded to the dtype of h."""
    seen = rms_norm(h, norm, EPS)
    eps = torch.finfo(h.dtype).eps
    # Roundings of x are spread evenly in half an eps: 1.5 eps is five times the deviation of their sum.
    slack = 1.5 * eps * (seen**2 @ (weight.dense**2).T).sqrt() + weight.slack(seen)
    if not gated:
        accuracy.check_close(y, h, weight.dense, bias, seen, slack)
        return
    gate, up = accuracy.truth(seen, weight.dense, bias).chunk(2, -1)
    of_gate, of_up = accuracy.tolerance(h, weight.dense, bias, seen, slack).elements.chunk(2, -1)
    exact = silu_mul(gate, up)
    assert y.shape == exact.shape and y.dtype == h.dtype and y.is_contiguous()
    # The slope of SiLU is at most 1.1, and its own magnitude at most that of its argument.
    # Subnormal numbers, of float16, are rounded by up to half of this.
    of_y = (eps + 1e-6) * exact.abs() + eps * torch.finfo(h.dtype).smallest_normal
    allowed = 1.1 * of_gate * (up.abs() + of_up) + gate.abs() * of_up + of_y + 1e-30
    assert ((y.double() - exact).abs() <= allowed).all()


@pytest.mark.parametrize("gated", (False, True))
@pytest.mark.parametrize("option", range(4))
@pytest.mark.parametrize("x_dtype", DTYPES, ids=str)
@pytest.mark.parametrize("shape", SHAPES, ids=str)
def test_values(shape: tuple[int, int, int, int], x_dtype: torch.dtype, option: int, gated: bool, device: str) -> None:
    m, n, k, group_size = shape
    fmt = Int4Format(group_size, ("none", "integer", "float")[option % 3], DTYPES[option % 3])
    weight = INT4.make_weight(n, k, fmt, device)
    x, other = (randn(m, k, dtype=x_dtype, device=device, seed=seed) for seed in (0, 1))
    residual = None if option == 1 else other
    norm = None if option == 2 else randn(k, dtype=(x_dtype, torch.float32)[option == 3], device=device, seed=2)
    bias = randn(n, dtype=DTYPES[option - 1], device=device, seed=3) if option else None
    y, h = call(x, residual, norm, weight, bias, gated)
    assert torch.equal(h, x if residual is None else x + residual) and h.data_ptr() != x.data_ptr()
    check(y, h, norm, weight, bias, gated)


# M, rows of the weights, K, group size; the first three are one kernel on Hopper, the third with several passes per
# CTA, and from 17 tokens on one kernel with wgmma: weights that end inside tiles, split K, several tiles per CTA
SEVERAL = (
    (1, (128, 32, 37), 256, 128),
    (3, (48, 48), 384, 32),
    (1, (4224, 16, 16896, 33), 256, 256),
    (8, (80, 80), 256, 64),
    (5, (176, 176), 512, 512),
    (4, (2112, 2112), 128, 128),
    (2, (50,), 256, 128),
    (2, (32, 50), 100, 32),
    (9, (80, 80), 256, 128),
    (17, (128, 32, 37), 256, 128),
    (32, (16896, 4224, 33), 384, 32),
    (40, (80, 80), 512, 512),
    (64, (1040, 16, 48, 130), 1024, 64),
    (100, (2112, 2112), 1024, 128),
    (128, (8448, 272), 320, 256),
)


@pytest.mark.parametrize("option", range(3))
@pytest.mark.parametrize("x_dtype", DTYPES, ids=str)
@pytest.mark.parametrize("shape", SEVERAL, ids=str)
def test_several_weights(
    shape: tuple[int, tuple[int, ...], int, int], x_dtype: torch.dtype, option: int, device: str
) -> None:
    m, rows, k, group_size = shape
    n = sum(rows)
    fmt = Int4Format(group_size, ("float", "none", "integer")[option], torch.float16 if option == 2 else torch.bfloat16)
    weight = INT4.make_weight(n, k, fmt, device)
    x, other = (randn(m, k, dtype=x_dtype, device=device, seed=seed) for seed in (0, 1))
    residual, norm = (None if option == 1 else other), (None if option == 2 else other[0].clone())
    bias = randn(n, dtype=torch.bfloat16, device=device, seed=3) if option else None
    for gated in (False, True):
        if not gated or (len(rows) == 2 and rows[0] == rows[1]):
            y, h = call_parts(x, residual, norm, weight, bias, list(rows), gated)
            assert torch.equal(h, x if residual is None else x + residual) and h.data_ptr() != x.data_ptr()
            check(y.contiguous(), h, norm, weight, bias, gated)
            if gated or residual is None:
                continue
        # Without the norm
        tiles = [-(-part // 16) for part in rows]
        operands = (list(operand.split(tiles)) for operand in weight.operands)
        biases = [None] * len(rows) if bias is None else list(bias.split(rows))
        ys = OPS._merged_int4_mm(x, *operands, biases, list(rows), k, group_size)
        assert [y.shape[-1] for y in ys] == list(rows)
        seen = x.double()
        accuracy.check_close(torch.cat(ys, -1), x, weight.dense, bias, seen, weight.slack(seen))


@pytest.mark.parametrize("parts", ([64], [32, 32]))
@pytest.mark.parametrize("gated", (False, True))
def test_far_from_one(gated: bool, parts: list[int], device: str) -> None:
    """Rows with squares, or products with the norm's weight, outside the accumulator's range; and a row of zeros."""
    weight = INT4.make_weight(64, 256, Int4Format(64), device)
    x = randn(5, 256, dtype=torch.bfloat16, device=device)
    x = x * torch.tensor([1e-18, 1.0, 0.0, 1e15, 1e30], device=device, dtype=x.dtype)[:, None]
    norm = randn(256, dtype=torch.bfloat16, device=device, seed=1) * 1e3
    if len(parts) > 1:
        y, h = call_parts(x, x, norm, weight, None, parts, gated)
    else:
        y, h = call(x, x, norm, weight, gated=gated)
    check(y, h, norm, weight, None, gated)


def test_nonfinite_rows(device: str) -> None:
    weight = INT4.make_weight(64, 256, Int4Format(64), device)
    x = randn(4, 256, dtype=torch.bfloat16, device=device)
    x[1, 5], x[2, 7] = float("nan"), float("inf")
    y, h = call(x, None, None, weight)
    torch.testing.assert_close(h, x, rtol=0, atol=0, equal_nan=True)
    assert y[1:3].isnan().all()
    check(y[::3].contiguous(), h[::3], None, weight, None, False)


@pytest.mark.parametrize("k", (100, 256))
@pytest.mark.parametrize("view", VIEWS)
def test_views(view: str, k: int, device: str) -> None:
    weight = INT4.make_weight(96, k, Int4Format(32, "float"), device)
    x, other = (VIEWS[view](randn(7, k, dtype=torch.bfloat16, device=device, seed=seed)) for seed in (0, 1))
    y, h = call(x, other, None, weight, gated=True)
    assert y.shape == (*x.shape[:-1], 48) and torch.equal(h, x + other) and h.is_contiguous()
    if y.numel():
        check(y.reshape(-1, 48), h.reshape(-1, k), None, weight, None, True)


@pytest.mark.skipif(not torch.cuda.is_available(), reason="torch sees no GPU")
@pytest.mark.parametrize("m", (4, 5))
def test_many_rows(m: int) -> None:
    """x too large for one round of a CTA's threads, of an odd number of K-steps; compared with the parts of it."""
    n, k = 16896, 3200
    weight = torch.randint(-128, 128, (n // 16, k // 64, 512), dtype=torch.int8, device="cuda")
    scales = torch.rand(n // 16, k // 128, 1, 16, device="cuda") * 0.01
    x, residual = (randn(m, k, dtype=torch.bfloat16, device="cuda", seed=seed) for seed in (0, 1))
    y, h = OPS.add_rms_norm_int4_mm(x, residual, None, weight, scales, None, 1e-5, n, k, 128, True)
    norm, expected_h = OPS.add_rms_norm(x, residual, None, 1e-5)
    gate, up = OPS.int4_mm(norm.float(), weight, scales, None, n, k, 128).chunk(2, -1)
    expected = OPS.silu_mul(gate, up)
    assert torch.equal(h, expected_h)
    assert (y.float() - expected).norm() <= 2.0**-7 * expected.norm()  # two roundings to bfloat16, of x and of y


@pytest.mark.skipif(not torch.cuda.is_available(), reason="torch sees no GPU")
@pytest.mark.parametrize("m", (1, 8, 40))
def test_chains_in_a_graph(m: int) -> None:
    """Kernels that start before the previous one ends (PDL) read nothing too early."""
    k = 1024
    source = randn(m, k, dtype=torch.bfloat16, device="cuda")
    norm = randn(k, dtype=torch.bfloat16, device="cuda", seed=1)
    up, down = (INT4.make_weight(n, k, Int4Format(128), "cuda", seed=n) for n in (2 * k, k))

    def chain() -> Tensor:
        x, h = source * 2, source
        for i in range(5):
            y, h = call_parts(x, h, norm, up, None, [k, k], True) if i % 2 else call(x, h, norm, up, gated=True)
            x = INT4.mm(y, down)
        return x + h

    check_chain_in_a_graph(chain, source)


@pytest.mark.parametrize("shape", ((5, 128), (0, 128), (128,), (2, 3, 128)), ids=str)
@pytest.mark.parametrize("gated", (False, True))
def test_opcheck(shape: tuple[int, ...], gated: bool, device: str) -> None:
    weight = INT4.make_weight(64, 128, Int4Format(64), device)
    x, norm = (randn(*s, dtype=torch.bfloat16, device=device) for s in (shape, (128,)))
    arguments = x, x, norm, *weight.operands, None, 1e-6, *weight.arguments, gated
    torch.library.opcheck(OPS.add_rms_norm_int4_mm.default, arguments, test_utils=UTILITIES)


def test_runs_repeat(device: str) -> None:
    weight = INT4.make_weight(512, 1024, Int4Format(128), device)
    x = randn(4, 1024, dtype=torch.bfloat16, device=device)
    first = call(x, x, None, weight, gated=True)
    for _ in range(10):
        assert all(torch.equal(a, b) for a, b in zip(first, call(x, x, None, weight, gated=True), strict=True))


def test_errors(device: str) -> None:
    x = randn(3, 64, dtype=torch.bfloat16, device=device)
    weight, odd = (INT4.make_weight(n, 64, Int4Format(64), device) for n in (32, 33))
    for arguments, message in (
        ((x.int(), None, None, weight), "qao::add_rms_norm_int4_mm: x"),
        ((x, x[:2], None, weight), "residual must have the shape"),
        ((x, None, x[0, :7], weight), r"norm_weight must be contiguous of shape \[K\]"),
        ((x[:, :32], None, None, weight), r"x must have shape \[..., in_features\]"),
        ((x, None, None, weight, x[0]), "bias"),
        ((x, None, None, odd, None, True), "even number of rows"),
    ):
        with pytest.raises(RuntimeError, match=message):
            call(*arguments)
    with pytest.raises(RuntimeError, match=r"_merged_add_rms_norm_int4_mm: gated needs two weights with equally many"):
        call_parts(x, None, None, odd, None, [16, 17], True)
    with pytest.raises(RuntimeError, match=r"_merged_add_rms_norm_int4_mm: residual must have the shape"):
        call_parts(x, x[:2], None, weight, None, [16, 16])

"""gguf_mm, gguf_grouped_mm, dequantize_gguf and gguf_embedding against float64 and the gguf package."""

from __future__ import annotations

import itertools
import math
import re
from typing import Any

import numpy
import pytest
import qao.ops
import torch
from qao.ops.gguf import BLOCKS
from torch import Tensor

gguf: Any = pytest.importorskip("gguf")

QTYPES = sorted(BLOCKS)
DTYPES = (torch.float32, torch.float16, torch.bfloat16)
# Bytes of a block's float16 numbers.
HALVES = {2: [0], 3: [0, 2], 6: [0], 7: [0, 2], 8: [0], 20: [0], 10: [80, 82], 11: [108], 12: [0, 2], 13: [0, 2],
          14: [208], 23: [0]}  # fmt: skip
qtypes = pytest.mark.parametrize("qtype", QTYPES, ids=lambda value: gguf.GGMLQuantizationType(value).name)
dtypes = pytest.mark.parametrize("dtype", DTYPES, ids=str)


def random_weight(qtype: int, n: int, blocks: int, seed: int = 0) -> Tensor:
    """Random blocks: every code and scale occurs. float16 numbers are of both signs, a tenth of them subnormal."""
    rng = numpy.random.default_rng(seed)
    data = rng.integers(0, 256, (n, blocks, BLOCKS[qtype][1]), dtype=numpy.uint8)
    for at in HALVES[qtype]:
        d = rng.normal(0, 0.01, (n, blocks)).astype(numpy.float16)
        d = numpy.where(rng.random((n, blocks)) < 0.1, d.dtype.type(5e-6), d)
        data[..., at : at + 2] = d[..., None].view(numpy.uint8)
    return torch.from_numpy(data.reshape(n, -1).copy())


def definition(weight: Tensor, qtype: int) -> Tensor:
    return torch.from_numpy(gguf.quants.dequantize(weight.numpy(), gguf.GGMLQuantizationType(qtype)))


@pytest.mark.every_isa
@qtypes
def test_dequantization_is_that_of_the_definition(qtype: int) -> None:
    weight = random_weight(qtype, 5, 11 if BLOCKS[qtype][0] == 32 else 3)
    dense = definition(weight, qtype)
    for dtype in DTYPES:
        ours = qao.ops.dequantize_gguf(weight, qtype, dtype)
        assert ours.dtype == dtype and torch.equal(ours, dense.to(dtype))
    ids = torch.tensor([[4, 0], [2, 4]], dtype=torch.int32)
    assert torch.equal(qao.ops.gguf_embedding(ids, weight, qtype, torch.float16), dense[ids.long()].half())


def bound(x: Tensor, dense: Tensor) -> Tensor:
    """[M, N]: twice the error that rounding W, x · Wᵀ and y to the dtype of x may have, and float32 sums.

    K roundings of a partial sum, which is at most |x| · |W|ᵀ, add up like a random walk.
    """
    eps, least = torch.finfo(x.dtype).eps, torch.finfo(x.dtype).smallest_normal
    x, dense = x.double(), dense.double()
    y = (x @ dense.t()).abs().clamp(min=least) * eps
    return (
        (x**2 @ (dense**2).t()).sqrt() * 4 * eps + y + x.abs() @ dense.abs().t() * 2.0**-24 * max(8, x.shape[1] ** 0.5)
    )


@pytest.mark.parametrize("m", (1, 3, 9, 130))
@dtypes
@qtypes
def test_mm(qtype: int, dtype: torch.dtype, m: int) -> None:
    for n, blocks in ((1, 1), (37, 3)):
        weight = random_weight(qtype, n, blocks, seed=m)
        dense = definition(weight, qtype)
        generator = torch.Generator().manual_seed(m)
        x = torch.randn(m, dense.shape[1], generator=generator).to(dtype)
        bias = torch.randn(n, generator=generator)
        y = qao.ops.gguf_mm(x, weight, bias, qtype)
        assert y.dtype == dtype and y.shape == (m, n)
        error = (y.double() - (x.double() @ dense.double().t() + bias.double())).abs()
        assert (error <= bound(x, dense) + bias.abs().double() * torch.finfo(dtype).eps).all()


@pytest.mark.every_isa
@qtypes
def test_many_rows(qtype: int) -> None:
    """Rows of W that no tile divides, columns that no chunk does, rows of x apart, and any number of threads."""
    weight = random_weight(qtype, 83, 11 if BLOCKS[qtype][0] == 32 else 2)
    dense, before = definition(weight, qtype), torch.get_num_threads()
    generator = torch.Generator().manual_seed(qtype)
    for dtype, m in itertools.product(DTYPES, (5, 19, 130)):
        x = torch.randn(m, 2, dense.shape[1], generator=generator).to(dtype)[:, 1]
        try:
            y, other = [(torch.set_num_threads(n), qao.ops.gguf_mm(x, weight, None, qtype))[1] for n in (1, 2)]
        finally:
            torch.set_num_threads(before)
        assert torch.equal(y, other)
        assert ((y.double() - x.double() @ dense.double().t()).abs() <= bound(x, dense)).all()


@pytest.mark.every_isa
@pytest.mark.parametrize("blocks", range(1, 18))
@pytest.mark.parametrize("qtype", [qtype for qtype in QTYPES if BLOCKS[qtype][0] == 32])
def test_rows_that_end_inside_a_chunk(qtype: int, blocks: int) -> None:
    """Kernels may read beyond a row, but nothing there counts: rows in between have NaN as scales."""
    weight = random_weight(qtype, 9, blocks, seed=blocks)
    dense = definition(weight, qtype)
    nan = weight.clone()
    nan[1::2].view(torch.float16)[:] = float("nan")
    for dtype, m in itertools.product(DTYPES, (1, 4)):
        x = torch.randn(m, dense.shape[1], generator=torch.Generator().manual_seed(m)).to(dtype)
        y, rows = (qao.ops.gguf_mm(x, each, None, qtype) for each in (weight, nan))
        assert ((y.double() - x.double() @ dense.double().t()).abs() <= bound(x, dense)).all()
        assert torch.equal(rows[:, ::2], y[:, ::2]) and rows[:, 1::2].isnan().all()


def test_several_weights_of_one_x() -> None:
    """The bits of separate calls, for x of any range, and errors that name the weight."""
    weights, biases = [random_weight(12, n, 2, seed=n) for n in (33, 16, 100)], [None, torch.ones(16), None]
    for m, value in itertools.product((0, 1, 4, 40), (1.0, 1e30, float("inf"))):
        x = torch.randn(m, 512, generator=torch.Generator().manual_seed(m)).bfloat16()
        x[: m // 2 + 1, 5] = value
        ys = torch.ops.qao._merged_gguf_mm(x, weights, biases, 12)
        expected = [qao.ops.gguf_mm(x, weight, bias, 12) for weight, bias in zip(weights, biases, strict=True)]
        torch.testing.assert_close(ys, expected, rtol=0, atol=0, equal_nan=True)
    with pytest.raises(RuntimeError, match=r"qao::_merged_gguf_mm: bias must .*index of the weight: 1"):
        torch.ops.qao._merged_gguf_mm(x, weights, [None, torch.ones(17), None], 12)
    with pytest.raises(RuntimeError, match=r"qao::_merged_gguf_mm: the lists of tensors must have one length"):
        torch.ops.qao._merged_gguf_mm(x, weights, [None], 12)


@pytest.mark.parametrize("m", (1, 20))
@pytest.mark.parametrize("value", (float("inf"), float("nan")))
@qtypes
def test_nonfinite_values_reach_their_rows(qtype: int, value: float, m: int) -> None:
    weight = random_weight(qtype, 18, 2)
    x = torch.randn(m, BLOCKS[qtype][0] * 2, dtype=torch.bfloat16)
    clean = qao.ops.gguf_mm(x, weight, None, qtype)
    x[0, 33] = value
    y = qao.ops.gguf_mm(x, weight, None, qtype)
    expected = x[:1].float() @ definition(weight, qtype).t()
    assert torch.equal(y[0].isnan(), expected[0].isnan()) and not y[0].isfinite().any()
    assert torch.equal(y[1:], clean[1:])


@pytest.mark.parametrize("scale", (2.0**100, 2.0**-100))
def test_any_range_of_x(scale: float) -> None:
    weight = random_weight(12, 20, 2)
    dense = definition(weight, 12)
    x = torch.randn(2, 512, generator=torch.Generator().manual_seed(0)) * scale
    x[:, 7] *= 1e6
    y = qao.ops.gguf_mm(x, weight, None, 12)
    assert ((y.double() - x.double() @ dense.double().t()).abs() <= bound(x, dense)).all()


@pytest.mark.parametrize("qtype", (8, 12))
def test_rows_are_batch_invariant(qtype: int) -> None:
    weight = random_weight(qtype, 33, 2)
    x = torch.randn(40, BLOCKS[qtype][0] * 2, dtype=torch.bfloat16)
    with qao.ops.batch_invariant():
        y = qao.ops.gguf_mm(x, weight, None, qtype)
        assert torch.equal(torch.cat([qao.ops.gguf_mm(row[None], weight, None, qtype) for row in x]), y)


def test_threads_and_repetitions_do_not_matter() -> None:
    weight, x, before = random_weight(12, 300, 2), torch.randn(3, 512), torch.get_num_threads()
    try:
        results = [(torch.set_num_threads(count), qao.ops.gguf_mm(x, weight, None, 12))[1] for count in (1, 2, 2, 3)]
    finally:
        torch.set_num_threads(before)
    assert all(torch.equal(result, results[0]) for result in results)


def test_views_of_x() -> None:
    weight, x = random_weight(14, 17, 1), torch.randn(4, 6, 256)
    y = qao.ops.gguf_mm(x, weight, None, 14)
    assert y.shape == (4, 6, 17)
    assert torch.equal(qao.ops.gguf_mm(x.transpose(0, 1), weight, None, 14), y.transpose(0, 1))
    assert torch.equal(qao.ops.gguf_mm(x[1:3, ::2], weight, None, 14), y[1:3, ::2])
    assert qao.ops.gguf_mm(x[:0], weight, None, 14).shape == (0, 6, 17)


def test_gradients_vmap_and_compile() -> None:
    weight = random_weight(13, 5, 1)
    dense = definition(weight, 13)
    x, bias = torch.randn(3, 256, requires_grad=True), torch.randn(5, requires_grad=True)
    qao.ops.gguf_mm(x, weight, bias, 13).square().sum().backward()
    y = x.detach() @ dense.t() + bias.detach()
    expected = 2 * y @ dense
    torch.testing.assert_close(x.grad, expected, rtol=1e-4, atol=1e-5 * expected.abs().max().item())
    torch.testing.assert_close(bias.grad, 2 * y.sum(0), rtol=1e-4, atol=1e-4)
    batch = torch.randn(2, 3, 256)
    product = torch.func.vmap(lambda rows: qao.ops.gguf_mm(rows, weight, None, 13))
    assert torch.equal(product(batch), qao.ops.gguf_mm(batch, weight, None, 13))
    tangent = torch.func.jvp(lambda rows: qao.ops.gguf_mm(rows, weight, None, 13), (batch,), (batch,))[1]
    torch.testing.assert_close(tangent, batch @ dense.t(), rtol=1e-4, atol=1e-4)
    torch.library.opcheck(torch.ops.qao.gguf_mm.default, (batch, weight, None, 13))
    torch.library.opcheck(torch.ops.qao.dequantize_gguf.default, (weight, 13, torch.float16))
    torch.library.opcheck(torch.ops.qao.gguf_embedding.default, (torch.tensor([1]), weight, 13, torch.float16))


@dtypes
@qtypes
def test_grouped_rows_are_those_of_their_expert(qtype: int, dtype: torch.dtype) -> None:
    """The bits of gguf_mm for experts with 0, 1, 5 and 21 rows, gathered, and the last rows of no expert."""
    weight, counts = random_weight(qtype, 4 * 34, 2).view(4, 34, -1), (5, 0, 21, 1)
    generator = torch.Generator().manual_seed(qtype)
    x = torch.randn(9, 2 * BLOCKS[qtype][0], generator=generator).mul(0.05).to(dtype)  # no gate overflows float16
    index = torch.randint(9, (sum(counts) + 2,), generator=generator)
    bias = torch.randn(4, 34, generator=generator)
    offsets = torch.tensor(counts).cumsum(0, dtype=torch.int32)
    y = qao.ops.gguf_grouped_mm(x, weight, bias, offsets, index, None, qtype)
    rows = index.split([*counts, 2])
    expected = [qao.ops.gguf_mm(x[rows[e]], weight[e], bias[e], qtype) for e in range(4)]
    assert y.dtype == dtype and torch.equal(y, torch.cat((*expected, torch.zeros(2, 34, dtype=dtype))))

    scales = torch.rand(len(index), generator=generator)
    gated = qao.ops.gguf_grouped_mm(x, weight, bias, offsets, index, scales, qtype, gate=(1.0, math.inf, 0.0, False))
    unscaled = qao.ops.silu_mul(*y.chunk(2, -1))
    wanted = unscaled.double() * scales[:, None]
    assert ((gated.double() - wanted).abs() <= wanted.abs() * 2 * torch.finfo(dtype).eps + 1e-6).all()


@pytest.mark.parametrize("gate", (None, (1.0, math.inf, 0.0, False)), ids=("plain", "gated"))
def test_grouped_gradients_and_graphs(gate: Any) -> None:
    weight, offsets = random_weight(14, 2 * 8, 1).view(2, 8, -1), torch.tensor([3, 5], dtype=torch.int32)
    dense = definition(weight.flatten(0, 1), 14).view(2, 8, 256)
    x, scales = torch.randn(5, 256, requires_grad=True), torch.rand(5, requires_grad=True)

    def product(x: Tensor, scales: Tensor) -> Tensor:
        return qao.ops.gguf_grouped_mm(x, weight, None, offsets, None, scales, 14, gate=gate)

    def plain(x: Tensor, scales: Tensor) -> Tensor:
        y = torch.cat((x[:3] @ dense[0].t(), x[3:] @ dense[1].t()))
        if gate is not None:
            y = torch.nn.functional.silu(y[:, :4]) * y[:, 4:]
        return y * scales[:, None]

    for call in (product, torch.compile(product, fullgraph=True)):
        ours, expected = (torch.autograd.grad(one(x, scales).square().sum(), (x, scales)) for one in (call, plain))
        for gradient, right in zip(ours, expected, strict=True):
            torch.testing.assert_close(gradient, right, rtol=1e-4, atol=1e-5 * right.abs().max().item())
    arguments = x.detach(), weight, None, offsets, None, None, 14, False, gate
    torch.library.opcheck(torch.ops.qao.gguf_grouped_mm.default, arguments)
    with qao.ops.batch_invariant():
        y = product(x, scales)
        assert torch.equal(y[:1], qao.ops.gguf_grouped_mm(x[:1], weight, None, offsets.clamp(max=1), None, scales[:1],
                                                          14, gate=gate))  # fmt: skip


def test_errors_name_the_operator_and_the_remedy() -> None:
    weight, x = random_weight(12, 4, 1), torch.randn(2, 256)
    for message, arguments in {
        "qtype must be ggml's number": (x, weight, None, 1),
        "rows of weight must hold whole blocks of 210 bytes": (x, weight, None, 14),
        "x must have shape": (x[:, :32], weight, None, 12),
        "weight must be uint8": (x, weight.to(torch.int8), None, 12),
    }.items():
        with pytest.raises(RuntimeError, match=rf"^qao::gguf_mm: {re.escape(message)}.* Got x: .*qtype"):
            torch.ops.qao.gguf_mm(*arguments)
    experts, offsets = torch.stack((weight, weight)), torch.tensor([1, 2], dtype=torch.int32)
    for message, arguments in {
        "qtype must be ggml's number": (x, experts, None, offsets, None, None, 1),
        "x must have shape": (x[:, :32], experts, None, offsets, None, None, 12),
        "weight, scales, bias, weight_sums and row_scales must have a dimension of experts": (
            *(x, experts, torch.ones(4), offsets, None, None, 12),
        ),
        "offsets must not decrease": (x, experts, None, offsets.flip(0), None, None, 12),
    }.items():
        with pytest.raises(RuntimeError, match=rf"^qao::gguf_grouped_mm: {re.escape(message)}.* Got x: .*qtype"):
            torch.ops.qao.gguf_grouped_mm(*arguments)
    with pytest.raises(RuntimeError, match=r"^qao::gguf_embedding: ids must be in 0\.\.3.* is 4"):
        qao.ops.gguf_embedding(torch.tensor([0, 4]), weight, 12, torch.float32)

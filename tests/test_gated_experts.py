"""Grouped GEMM with a fused gate, against float64 and bit for bit against separate operators."""

from __future__ import annotations

import math
from typing import Any

import pytest
import qao
import torch
from experts_support import FEW, GPT_OSS, HOSTILE, SILU, Experts, bits, ends, gathered, make_experts, nearest, poison
from ops_schemes import DTYPES, PRODUCTS, SHORT, Format, Int4Format, Scheme, generator
from ops_support import randn
from qao.ops.reference import swiglu
from test_swiglu import lost, rounded
from torch import Tensor
from torch.utils.flop_counter import FlopCounterMode

GATES = [SILU, GPT_OSS, (1.702, 7.0, 1.0, False), (1.0, 0.25, -2.0, True)]
COUNTS, TAIL = [0, 1, 40, 0, 3, 17, 2, 0], 5  # rows of experts, then rows without an expert
on_gpu = pytest.mark.skipif(not torch.cuda.is_available(), reason="torch sees no GPU")


def gated(experts: Experts, gate: Any, *routed: Any) -> Tensor:
    y: Tensor = experts.op(*experts.all_arguments(*routed), gate=gate)
    return y


def in_turn(experts: Experts, gate: Any, *routed: Any) -> Tensor:
    y = experts.mm(*routed)
    return qao.ops.silu_mul(*y.chunk(2, -1)) if gate == SILU else qao.ops.swiglu(y, *gate)


def check(y: Tensor, experts: Experts, gate: Any, x: Tensor, counts: list[int], index: Any, scale: Any) -> None:
    """The gate of the float64 products. Of the gate's halves g and u, y changes with g by at most 1.1 |u + shift|, the
    largest derivative of g sigmoid(alpha g), and with u by |g sigmoid(alpha g)|."""
    rows = sum(counts)
    product, allowed = experts.truth(x, counts, index)
    expected = swiglu(product, *rounded(gate))
    _, limit, shift, interleaved = gate
    halves = [(t[:, ::2], t[:, 1::2]) if interleaved else t.chunk(2, -1) for t in (product, allowed)]
    (g, u), (of_g, of_u) = halves
    wide = u.abs().clamp(max=limit) + of_u + abs(shift)
    error = 1.1 * of_g * wide + (g.clamp(max=limit).abs() + of_g) * of_u + lost(product, gate) * 2
    factor = 1 if scale is None else scale[:rows, None].double()
    info = torch.finfo(y.dtype)
    error = error + info.eps * (expected.abs() + error)
    assert ((y[:rows].double() - expected * factor).abs() <= error * abs(factor) + info.tiny).all()
    assert y.shape == (y.shape[0], product.shape[1] // 2) and y.is_contiguous() and not y[rows:].any()


@pytest.mark.every_isa
@pytest.mark.parametrize("x_dtype", DTYPES, ids=SHORT.get)
@pytest.mark.parametrize(("scheme", "fmt"), FEW)
def test_rows_are_those_of_their_expert(scheme: Scheme, fmt: Format, x_dtype: torch.dtype, device: str) -> None:
    experts = make_experts(scheme, len(COUNTS), 100, 300, fmt, x_dtype, device)
    rows = sum(COUNTS) + TAIL
    x, few = (randn(count, 300, dtype=x_dtype, device=device, seed=count) for count in (rows, 11))
    index, scale = gathered(rows, 11, device=device), randn(rows, dtype=torch.float32, device=device)
    offsets = ends(COUNTS, device)
    for gate in GATES:
        poison(device)
        y = gated(experts, gate, x, offsets)
        assert y.dtype == x_dtype and y.device == x.device
        check(y, experts, gate, x, COUNTS, None, None)
        assert torch.equal(y, in_turn(experts, gate, x, offsets))
        poison(device)
        check(gated(experts, gate, few, offsets, index, scale), experts, gate, few, COUNTS, index, scale)


FOUR_BITS = [param for param in FEW if param.values[0].word in ("int4", "fp4")]
# More parameters in a K-step than lanes fetch at once.
LARGE = pytest.param(PRODUCTS[0], Int4Format(32, "float", torch.float32), id="int4-large")


@pytest.mark.parametrize("n", [32, 96, 2112])
@pytest.mark.parametrize(("scheme", "fmt"), [*FOUR_BITS, LARGE])
def test_few_rows_of_bfloat16(scheme: Scheme, fmt: Format, n: int, device: str) -> None:
    """Hopper's stream body: K-steps past the end of K, x that no 16-byte load can read, numbers that are not finite."""
    for k in (512, 200):
        experts = make_experts(scheme, 6, n, k, fmt, torch.bfloat16, device)
        x = randn(12, k + 1, dtype=torch.bfloat16, device=device)
        for counts in ([1, 1, 1, 1, 1, 1], [0, 0, 17, 0, 0, 1], [9, 2, 8, 0, 1, 0]):
            rows = sum(counts) + 2
            index, scale = gathered(rows, 12, device=device), randn(rows, dtype=torch.float32, device=device)
            for own, gate in ((x[:, 1:], SILU), (x[:, :k].contiguous(), GATES[2]), (x[:, :k], GPT_OSS)):
                poison(device)
                y = gated(experts, gate, own, ends(counts, device), index)
                assert torch.equal(y, in_turn(experts, gate, own, ends(counts, device), index))
                check(
                    gated(experts, gate, own, ends(counts, device), index, scale),
                    experts,
                    gate,
                    own,
                    counts,
                    index,
                    scale,
                )
        large = x[:, :k].contiguous()
        large[0, 0], large[1, 3], large[2, 5] = 2.0**40, torch.inf, torch.nan
        offsets = ends([3, 2, 3, 1, 2, 1], device)
        for gate in GATES:
            y, other = gated(experts, gate, large, offsets), in_turn(experts, gate, large, offsets)
            torch.testing.assert_close(y, other, rtol=0, atol=0, equal_nan=True)
            assert y[3:].isfinite().all() and not y[2].isfinite().all()


def test_numbers_of_threads_and_rows_alone() -> None:
    counts = [1, 0, 300, 1, 1, 2, 64]
    before = torch.get_num_threads()
    for scheme in PRODUCTS:
        experts = make_experts(scheme, len(counts), 520, 512)
        x = randn(9, 512, dtype=torch.bfloat16, device="cpu")
        index, scale = gathered(sum(counts), 9, torch.int32), randn(sum(counts), dtype=torch.bfloat16, device="cpu")
        results = []
        try:
            for threads in (1, 2, 5):
                torch.set_num_threads(threads)
                results.append(bits(gated(experts, GPT_OSS, x, ends(counts), index, scale)))
        finally:
            torch.set_num_threads(before)
        assert all(torch.equal(result, results[0]) for result in results)


@pytest.mark.parametrize("scheme", PRODUCTS, ids=lambda scheme: scheme.word)
def test_a_row_has_the_same_bits_alone(scheme: Scheme, device: str) -> None:
    if not scheme.few_formats[0].activation.keeps_rows_apart:
        pytest.skip("one scale for all of x")
    experts = make_experts(scheme, 3, 64, 128, device=device)
    x = randn(30, 128, dtype=torch.bfloat16, device=device)
    function = getattr(qao.ops, f"{scheme.word}_grouped_mm")
    with qao.ops.batch_invariant():
        y = function(*experts.all_arguments(x, ends([20, 0, 10], device)), gate=SILU)
        alone = function(*experts.all_arguments(x[25:26], ends([0, 0, 1], device)), gate=SILU)
    assert torch.equal(bits(y[25:26]), bits(alone))


@pytest.mark.parametrize(
    ("n", "gate", "what"),
    [
        (33, SILU, "a gated weight must have an even number of rows"),
        (32, (1.0, math.inf, 0.0), "gate must be four numbers: alpha, limit, shift, interleaved"),
        (32, (), "gate must be four numbers"),
        (32, (0.0, math.inf, 0.0, 0.0), "alpha must be a positive number"),
        (32, (1.0, -1.0, 0.0, 0.0), "limit must be positive and shift a number"),
        (32, (1.0, math.inf, math.nan, 0.0), "limit must be positive and shift a number"),
        (32, (1.0, math.inf, 0.0, 0.5), "the last number of gate, interleaved, must be 0 or 1"),
    ],
)
def test_mistakes(n: int, gate: tuple[float, ...], what: str, device: str) -> None:
    for scheme in PRODUCTS:
        experts, x = make_experts(scheme, 2, n, 64, device=device), randn(6, 64, dtype=torch.bfloat16, device=device)
        with pytest.raises(RuntimeError, match=f"^qao::{scheme.word}_grouped_mm: {what}"):
            gated(experts, gate, x, ends([2, 4], device))


@pytest.mark.parametrize("offsets", [[2, 1, 6], [2, 4, 7], [-1, 4, 6]])
def test_hostile_offsets(offsets: list[int]) -> None:
    for scheme in PRODUCTS:
        experts, x = make_experts(scheme, 3, 32, 64), randn(6, 64, dtype=torch.bfloat16, device="cpu")
        with pytest.raises(RuntimeError, match="offsets must not decrease and lie in 0..6"):
            gated(experts, SILU, x, torch.tensor(offsets, dtype=torch.int32))


# ---- torch -----------------------------------------------------------------------------------------------------------


@pytest.mark.parametrize("compiled", [False, True])
@pytest.mark.parametrize("gate", [SILU, GPT_OSS], ids=str)
@pytest.mark.parametrize("scheme", PRODUCTS, ids=lambda scheme: scheme.word)
def test_gradients(scheme: Scheme, gate: Any, compiled: bool, device: str) -> None:
    """Through float64 pieces of the rows that the operator made, which rounding x to eight bits has moved."""
    counts = [3, 0, 9, 4]
    experts = make_experts(scheme, 4, 48, 96, None, torch.float32, device)
    assert experts.bias is not None
    given = (
        randn(8, 96, dtype=torch.float32, device=device).requires_grad_(),
        experts.bias.clone().requires_grad_(),
        randn(20, dtype=torch.float32, device=device, seed=2).requires_grad_(),
    )
    index, grad = gathered(20, 8, device=device), randn(20, 24, dtype=torch.float32, device=device, seed=4)
    offsets, rows = ends(counts, device), sum(counts)

    def function(x: Tensor, bias: Tensor, scale: Tensor) -> Tensor:
        call = getattr(qao.ops, f"{scheme.word}_grouped_mm")
        y: Tensor = call(x, *experts.operands, bias, offsets, index, scale, *experts.arguments, gate=gate)
        return y

    call = function
    if compiled:
        torch._dynamo.reset()
        call = torch.compile(function, fullgraph=True, backend="aot_eager")
    y = call(*given)
    x, bias, scale = (t.detach().double().requires_grad_() for t in given)
    parts, begin = [], 0
    for weight, own, count in zip(experts.weights, bias, counts, strict=True):
        parts.append(x[index[begin : begin + count]] @ weight.dense.T + own)
        begin += count
    product = torch.cat(parts)
    with torch.no_grad():
        made = experts.mm(given[0].detach(), offsets, index)[:rows].double()
        moved = made - product
    expected = scale[:rows, None] * swiglu(product + moved, *rounded(gate))
    assert (y[:rows].double() - expected).abs().max() <= 2.0**-18 * expected.abs().max()
    truth = torch.autograd.grad(expected, (x, bias, scale), grad[:rows].double())
    for own, exact in zip(torch.autograd.grad(y, given, grad), truth, strict=True):
        # float32 sums of up to 96 terms of any sign, of what some roundings made: each at most 2^-24 of the largest.
        assert (own.double() - exact).abs().max() <= 2.0**-18 * exact.abs().max()


def test_flops_are_those_of_the_product() -> None:
    experts, x = make_experts(PRODUCTS[0], 2, 48, 128), randn(6, 128, dtype=torch.float32, device="cpu")
    for gate in (None, SILU, [1, 7.0, 0, 0]):
        with FlopCounterMode(display=False) as counter:
            qao.ops.int4_grouped_mm(*experts.all_arguments(x, ends([4, 2])), gate=gate)
            gated(experts, gate, x, ends([4, 2]))
        assert counter.get_total_flops() == 2 * 2 * 6 * 128 * 48


def test_forward_mode_and_func() -> None:
    scheme = PRODUCTS[0]
    experts = make_experts(scheme, 3, 48, 128)
    x, grad = randn(9, 128, dtype=torch.float32, device="cpu"), randn(9, 24, dtype=torch.float32, device="cpu", seed=1)

    def loss(x: Tensor) -> Tensor:
        return (qao.ops.int4_grouped_mm(*experts.all_arguments(x, ends([4, 0, 5])), gate=SILU) * grad).sum()

    own = x.clone().requires_grad_()
    (expected,) = torch.autograd.grad(loss(own), own)
    torch.testing.assert_close(torch.func.grad(loss)(x), expected, rtol=1e-5, atol=1e-6)


# ---- on a GPU, without synchronization -------------------------------------------------------------------------------


@on_gpu
@pytest.mark.parametrize("gate", [SILU, GPT_OSS], ids=str)
@pytest.mark.parametrize(("scheme", "fmt"), FEW)
def test_hostile_routings_are_harmless(scheme: Scheme, fmt: Format, gate: Any) -> None:
    experts = make_experts(scheme, 4, 96, 320, fmt, torch.float32, "cuda")
    x, scale = randn(40, 320, dtype=torch.bfloat16, device="cuda"), randn(40, dtype=torch.float32, device="cuda")
    for count in (40, 12):
        for offsets in HOSTILE:
            given = torch.tensor(offsets, dtype=torch.int32, device="cuda")
            counts = nearest(offsets, count)
            poison("cuda")
            y = gated(experts, gate, x[:count], given, None, scale[:count])
            right = gated(experts, gate, x[:count], ends(counts, "cuda"), None, scale[:count])
            assert torch.equal(bits(y), bits(right)) and not y[sum(counts) :].any()


@on_gpu
@pytest.mark.parametrize("rows", [24, 640])
@pytest.mark.parametrize(("scheme", "fmt"), FEW)
def test_graphs_replay_with_other_routings_and_nobody_waits(scheme: Scheme, fmt: Format, rows: int) -> None:
    experts = make_experts(scheme, 8, 160, 512, fmt, torch.bfloat16, "cuda")
    x, index = randn(16, 512, dtype=torch.bfloat16, device="cuda"), gathered(rows, 16, device="cuda")
    offsets = ends([rows // 8] * 8, "cuda")
    arguments = experts.all_arguments(x, offsets, index)
    experts.op(*arguments, gate=SILU)
    torch.cuda.synchronize()
    torch.cuda.set_sync_debug_mode("error")
    try:
        experts.op(*arguments, gate=SILU)
    finally:
        torch.cuda.set_sync_debug_mode("default")
    graph = torch.cuda.CUDAGraph()
    with torch.cuda.graph(graph):
        y = experts.op(*arguments, gate=SILU)
    for seed in range(3):
        counts = torch.rand(8, generator=generator(seed)).pow(3)
        counts = (counts / counts.sum() * (rows - seed)).int()
        offsets.copy_(counts.cumsum(0))
        x.copy_(randn(16, 512, dtype=torch.bfloat16, device="cuda", seed=seed))
        y.fill_(torch.nan)
        graph.replay()
        check(y, experts, SILU, x, counts.tolist(), index, None)
        assert torch.equal(y, in_turn(experts, SILU, x, offsets, index))

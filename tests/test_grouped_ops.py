"""Grouped GEMM: rows of their experts for any routing; hostile routings; opcheck."""

from __future__ import annotations

import re
from typing import Any

import pytest
import torch
from experts_support import (
    FEW,
    GPT_OSS,
    HOSTILE,
    SILU,
    Experts,
    bits,
    ends,
    few_formats,
    gathered,
    make_experts,
    nearest,
    poison,
)
from ops_schemes import DTYPES, PRODUCTS, SHORT, Format, Int4Format, Scheme, generator
from ops_support import randn
from qao.ops.grouped_autograd import GROUPED
from qao.ops.grouped_backward import by_experts, by_tiles
from torch import Tensor

FORMATS = [
    pytest.param(scheme, fmt, id=f"{scheme.word}-{fmt}")
    for scheme in PRODUCTS
    for fmt in (scheme.formats if len(scheme.formats) < 9 else few_formats(scheme))
]
ONE_SCALE = [param for param in FORMATS if not param.values[1].activation.keeps_rows_apart]  # for all rows of x
COUNTS = [0, 1, 40, 0, 3, 17, 2, 0]  # rows of experts, some of none
TAIL = 5  # rows that no expert has


@pytest.mark.every_isa
@pytest.mark.parametrize("x_dtype", DTYPES, ids=SHORT.get)
@pytest.mark.parametrize(("scheme", "fmt"), FORMATS)
def test_rows_are_those_of_their_expert(scheme: Scheme, fmt: Format, x_dtype: torch.dtype, device: str) -> None:
    experts = make_experts(scheme, len(COUNTS), 100, 300, fmt, x_dtype, device)
    rows = sum(COUNTS) + TAIL
    x = randn(rows, 300, dtype=x_dtype, device=device)
    poison(device)
    y = experts.mm(x, ends(COUNTS, device))
    experts.check(y, x, COUNTS, None, None)
    assert y.dtype == x_dtype and y.is_contiguous() and y.device == x.device
    few = randn(11, 300, dtype=x_dtype, device=device, seed=1)
    index, scale = gathered(rows, 11, device=device), randn(rows, dtype=torch.float32, device=device)
    experts.check(experts.mm(few, ends(COUNTS, device), index, scale), few, COUNTS, index, scale)


# Rows an expert, on average and at most, that kernels have tiles for; and more experts than a warp has lanes, and than
# it looks at together.
ROUTINGS = {
    "few": [1, 0, 2, 9, 1, 0, 3],
    "some": [8, 0, 17, 5, 8, 1],
    "more": [16, 33, 7, 0, 20],
    "many": [130, 0, 64, 1],
    "of many experts": [3 * (i % 9 == 2) for i in range(40)],
    "of more experts": [2 * (i % 29 == 2) for i in range(300)],
}


@pytest.mark.parametrize("counts", ROUTINGS.values(), ids=ROUTINGS)
@pytest.mark.parametrize(("scheme", "fmt"), [*FEW, *ONE_SCALE])
def test_tiles(scheme: Scheme, fmt: Format, counts: list[int], device: str) -> None:
    """Full and partial tiles, aligned rows, with and without rows outside all experts."""
    for n, k, x_dtype in ((48, 320, torch.bfloat16), (132, 1024, torch.float16), (200, 64, torch.float32)):
        experts = make_experts(scheme, len(counts), n, k, fmt, x_dtype, device)
        x = randn(37, k, dtype=x_dtype, device=device)
        for rows in (sum(counts), sum(counts) + 70):
            index, scale = gathered(rows, 37, torch.int32, device), randn(rows, dtype=x_dtype, device=device)
            poison(device)
            experts.check(experts.mm(x, ends(counts, device), index, scale), x, counts, index, scale)


@pytest.mark.every_isa
@pytest.mark.parametrize("x_dtype", DTYPES, ids=SHORT.get)
@pytest.mark.parametrize(("scheme", "fmt"), FEW)
def test_bits_are_those_of_the_dense_operator(scheme: Scheme, fmt: Format, x_dtype: torch.dtype) -> None:
    """Also of values that kernels leave out of their arithmetic: outliers, ladders, Inf and NaN stay in their rows."""
    experts = make_experts(scheme, len(COUNTS), 72, 320, fmt, torch.float32)
    few = randn(23, 320, dtype=x_dtype, device="cpu")
    few[3, 7], few[5, 9], few[11, 0] = 3e4, torch.inf, torch.nan
    few[9] = 2.0 ** -torch.linspace(0, 24, 320)[torch.randperm(320, generator=generator(0))]
    index = gathered(sum(COUNTS), 23)
    y = experts.mm(few, ends(COUNTS), index)
    begin = 0
    for weight, bias, count in zip(experts.weights, experts.biases(), COUNTS, strict=True):
        rows = slice(begin, begin + count)
        begin += count
        if weight.activation.keeps_rows_apart:
            assert torch.equal(bits(y[rows]), bits(scheme.mm(few[index[rows]], weight, bias)))
    assert torch.equal(bits(experts.mm(few[index], ends(COUNTS))), bits(y))
    powers = 2.0 ** torch.randint(0, 4, (len(index),), generator=generator(0))
    normal = y.isfinite() & (y.abs() >= torch.finfo(x_dtype).smallest_normal)
    scaled = experts.mm(few, ends(COUNTS), index, powers)
    assert torch.equal(scaled[normal], (y.double() * powers[:, None]).to(x_dtype)[normal])


@pytest.mark.parametrize("scheme", PRODUCTS, ids=lambda scheme: scheme.word)
def test_numbers_of_threads_and_repetitions(scheme: Scheme) -> None:
    counts = [1, 0, 300, 1, 1, 2, 64]
    experts = make_experts(scheme, len(counts), 520, 512)
    x = randn(9, 512, dtype=torch.bfloat16, device="cpu")
    index, scale = gathered(sum(counts), 9, torch.int32), randn(sum(counts), dtype=torch.bfloat16, device="cpu")
    before = torch.get_num_threads()
    results = []
    try:
        for threads in (1, 2, 2, 5):
            torch.set_num_threads(threads)
            results.append(bits(experts.mm(x, ends(counts), index, scale)))
    finally:
        torch.set_num_threads(before)
    assert all(torch.equal(result, results[0]) for result in results)


@pytest.mark.parametrize("x_dtype", DTYPES, ids=SHORT.get)
def test_more_rows_than_are_packed_at_a_time(x_dtype: torch.dtype) -> None:
    scheme, counts = PRODUCTS[0], [2500, 700, 1, 2300]
    experts = make_experts(scheme, 4, 16, 2048)
    x = randn(64, 2048, dtype=x_dtype, device="cpu")
    index = gathered(sum(counts), 64)
    y = experts.mm(x, ends(counts), index, torch.ones(sum(counts)))
    begin = 0
    for weight, count in zip(experts.weights, counts, strict=True):
        rows = slice(begin, begin + count)
        begin += count
        assert torch.equal(bits(y[rows]), bits(scheme.mm(x[index[rows]], weight)))


def test_offsets_may_begin_with_the_first_row(device: str) -> None:
    import qao

    for scheme in PRODUCTS:
        experts = make_experts(scheme, 3, 24, 64, device=device)
        x, counts = randn(9, 64, dtype=torch.bfloat16, device=device).requires_grad_(), [2, 0, 5]
        function = getattr(qao.ops, f"{scheme.word}_grouped_mm")
        short = ends(counts, device)
        long = torch.cat((short.new_zeros(1), short))
        results = [function(*experts.all_arguments(x, offsets)) for offsets in (short, long)]
        assert torch.equal(*map(bits, results))
        assert torch.equal(*(torch.autograd.grad(y, x, torch.ones_like(y))[0] for y in results))


BF16_FEW = [param for param in FEW if param.values[0].word == "int4"]


@pytest.mark.parametrize(("n", "k"), [(1000, 512), (48, 2880), (2064, 1024), (17, 200)])
@pytest.mark.parametrize(("scheme", "fmt"), BF16_FEW)
def test_few_rows_of_bfloat16(scheme: Scheme, fmt: Format, n: int, k: int, device: str) -> None:
    """Cases of a dedicated Hopper kernel.

    One row per expert, an expert with all rows, steps that end past K, rows that no 16-byte load can read, and sums
    that exceed a byte as a subnormal number.
    """
    experts = make_experts(scheme, 6, n, k, fmt, torch.bfloat16, device)
    x = randn(12, k + 1, dtype=torch.bfloat16, device=device)
    for counts in ([1, 1, 1, 1, 1, 1], [0, 0, 29, 0, 0, 1], [9, 2, 8, 0, 1, 0]):
        rows = sum(counts) + 2
        index, scale = gathered(rows, 12, device=device), randn(rows, dtype=torch.float32, device=device)
        for own in (x[:, :k], x[:, 1:], x[:, :k].contiguous()):
            poison(device)
            experts.check(experts.mm(own, ends(counts, device), index, scale), own, counts, index, scale)
    check_what_is_not_finite(experts, x[:, :k].contiguous(), [3, 2, 3, 1, 2, 1])


SOME = [Int4Format(128, zeros, dtype) for zeros, dtype in (("none", torch.bfloat16), ("float", torch.float16))]


@pytest.mark.parametrize(("n", "k"), [(200, 256), (1000, 2048), (72, 4096), (48, 4224), (100, 4992)])
@pytest.mark.parametrize("fmt", [*SOME, Int4Format(-1, "none", torch.float16)], ids=str)
def test_some_rows_of_bfloat16(fmt: Int4Format, n: int, k: int, device: str) -> None:
    """7 and 8 rows an expert on average, of which Hopper keeps x in shared memory: tiles of 16 rows, and of 12 where x
    has too many columns for that; an expert that has all rows; one group a row."""
    experts = make_experts(PRODUCTS[0], 6, n, k, fmt, torch.bfloat16, device)
    x = randn(30, k, dtype=torch.bfloat16, device=device)
    for counts in ([17, 0, 12, 1, 13, 3], [0, 0, 45, 0, 0, 0], [8, 8, 8, 8, 8, 7]):
        rows = sum(counts) + 1
        index, scale = gathered(rows, 30, device=device), randn(rows, dtype=torch.float32, device=device)
        poison(device)
        y = experts.mm(x, ends(counts, device), index, scale)
        experts.check(y, x, counts, index, scale)
        assert torch.equal(bits(y), bits(experts.mm(x, ends(counts, device), index, scale)))
    check_what_is_not_finite(experts, x, [17, 0, 11, 1, 9, 4])


@pytest.mark.parametrize("each", [1, 8])
@pytest.mark.parametrize(("scheme", "fmt"), [*BF16_FEW, pytest.param(PRODUCTS[0], SOME[0], id="int4-some")])
def test_more_experts_than_ctas(scheme: Scheme, fmt: Format, each: int, device: str) -> None:
    """Few and some rows of bfloat16, of more experts than two CTAs for each SM: some take more than one."""
    counts = [each - i % 2 for i in range(620)]
    experts = make_experts(scheme, len(counts), 32, 256, fmt, torch.bfloat16, device)
    x = randn(30, 256, dtype=torch.bfloat16, device=device)
    index = gathered(sum(counts) + 3, 30, device=device)
    poison(device)
    experts.check(experts.mm(x, ends(counts, device), index), x, counts, index, None)


def check_what_is_not_finite(experts: Experts, x: Tensor, counts: list[int]) -> None:
    """A sum that overflows, Inf and NaN, as in the dense operator."""
    x[0, 0], x[1, 3], x[2, 5] = 2.0**40, torch.inf, torch.nan
    rows = sum(counts)
    index = torch.arange(rows, device=x.device).roll(3) % len(x)
    y = experts.mm(x, ends(counts, str(x.device)), index)
    dense = torch.empty(y.shape, device=x.device)
    begin = 0
    for weight, bias, count in zip(experts.weights, experts.biases(), counts, strict=True):
        rows_of = slice(begin, begin + count)
        begin += count
        dense[rows_of] = experts.scheme.mm(x[index[rows_of]], weight, bias).float()
    assert torch.equal(y.isfinite(), dense.isfinite()) and torch.equal(y.isnan(), dense.isnan())
    difference = (y.float() - dense).nan_to_num(0, 0, 0).abs()
    assert (difference <= 2.0**-6 * dense.nan_to_num(0, 0, 0).abs().amax(1, keepdim=True)).all()


def test_no_rows_and_one_expert(device: str) -> None:
    for scheme in PRODUCTS:
        experts = make_experts(scheme, 1, 24, 64, device=device)
        x = randn(6, 64, dtype=torch.bfloat16, device=device)
        none = ends([0], device)
        assert experts.mm(x[:0], none).shape == (0, 24)
        assert experts.mm(x, none, gathered(0, 6, device=device)).shape == (0, 24)
        assert not experts.mm(x, none).any()
        experts.check(experts.mm(x.t().contiguous().t(), ends([6], device)), x, [6], None, None)


# ---- mistakes --------------------------------------------------------------------------------------------------------

INT4, INT8 = PRODUCTS[0], PRODUCTS[3]


@pytest.mark.parametrize(
    ("offsets", "what"),
    [
        ([2, 1, 6], "offsets must not decrease and lie in 0..6, the rows of the result: 1 of expert 1 follows 2"),
        ([2, 4, 7], "7 of expert 2 follows 4"),
        ([-1, 4, 6], "-1 of expert 0 follows 0"),
        ([2, 2**31 - 1, 6], "2147483647 of expert 1 follows 2"),
        ([2, 4], "offsets must be int32 of shape [experts]"),
        ([0, 0, 2, 4, 6], "offsets must be int32 of shape [experts]"),
        ([1, 2, 4, 6], "the first of [experts + 1] offsets must be 0, where the first expert begins: 1"),
    ],
)
@pytest.mark.parametrize("scheme", PRODUCTS, ids=lambda scheme: scheme.word)
def test_hostile_offsets(scheme: Scheme, offsets: list[int], what: str) -> None:
    experts, x = make_experts(scheme, 3, 32, 64), randn(6, 64, dtype=torch.bfloat16, device="cpu")
    with pytest.raises(RuntimeError, match=f"^qao::{scheme.word}_grouped_mm: .*{re.escape(what)}") as error:
        experts.mm(x, torch.tensor(offsets, dtype=torch.int32))
    assert "x: bfloat16[6, 64] on cpu" in str(error.value) and "offsets: int32" in str(error.value)


def _changed(experts: Experts, given: Tensor, changes: dict[str, Any]) -> Tensor:
    names = [argument.name for argument in experts.op._schema.arguments]
    arguments = dict(zip(names, experts.all_arguments(given, ends([2, 4])), strict=False))  # the last has a default
    y: Tensor = experts.op(*(arguments | changes).values())
    return y


@pytest.mark.parametrize(
    ("scheme", "changes", "what"),
    [
        (INT8, {"offsets": torch.tensor([2, 6])}, "offsets must be int32"),
        (INT8, {"row_index": torch.tensor([0, 1, 2, 3, 4, 6])}, "row_index must hold rows of x: it is 6 at 5"),
        (INT8, {"row_index": torch.tensor([0, -1, 2, 3, 4, 5])}, "row_index must hold rows of x: it is -1 at 1"),
        (INT8, {"row_index": torch.zeros(6)}, "row_index must be int64 or int32 of one dimension"),
        (INT8, {"row_scale": torch.ones(5)}, "row_scale must have one number for each row of the result"),
        (INT8, {"row_scale": torch.ones(6, dtype=torch.int64)}, "row_scale must be float32, float16 or bfloat16"),
        (INT8, {"x": torch.ones(2, 3, 64)}, "x must have shape [rows, in_features]"),
        (INT8, {"x": torch.ones(6, 63)}, "x must have shape [..., in_features] (shapes are of one expert"),
        (INT8, {"weight": torch.ones(2, 32, 64)}, "weight must be int8 of shape [N, K] (shapes are of one"),
        (
            INT8,
            {"weight": torch.ones(64, dtype=torch.int8)},
            "weight, scales, bias, weight_sums and row_scales must have",
        ),
        (INT8, {"weight": torch.ones(0, 32, 64, dtype=torch.int8)}, "there must be at least one expert"),
        (
            INT8,
            {"scales": torch.ones(3, 32)},
            "weight, scales, bias, weight_sums and row_scales must have the same number of experts",
        ),
        (
            INT8,
            {"bias": torch.ones(3, 32)},
            "weight, scales, bias, weight_sums and row_scales must have the same number of experts",
        ),
        (INT8, {"bias": torch.ones(2, 31)}, "bias must have shape [out_features] (shapes are of one expert"),
        (INT8, {"weight": torch.ones(2, 64, 32, dtype=torch.int8).mT}, "weight must be contiguous"),
        (INT8, {"weight": torch.ones(2, 40, 64, dtype=torch.int8)[:, :32]}, "weight must be contiguous"),
        (INT4, {"group_size": 64}, "scales must have shape"),
        (INT4, {"group_size": 63}, "group_size must be 32, 64, 128, 256"),
    ],
)
def test_mistakes(scheme: Scheme, changes: dict[str, Any], what: str) -> None:
    experts, x = make_experts(scheme, 2, 32, 512), randn(6, 512, dtype=torch.bfloat16, device="cpu")
    if scheme is INT8:
        experts, x = make_experts(scheme, 2, 32, 64), randn(6, 64, dtype=torch.bfloat16, device="cpu")
    with pytest.raises(RuntimeError, match=f"^qao::{scheme.word}_grouped_mm: {re.escape(what)}"):
        _changed(experts, x, changes)


# ---- on a GPU, without synchronization -------------------------------------------------------------------------------

on_gpu = pytest.mark.skipif(not torch.cuda.is_available(), reason="torch sees no GPU")


@on_gpu
@pytest.mark.parametrize(("scheme", "fmt"), FEW)
def test_hostile_routings_are_harmless(scheme: Scheme, fmt: Format) -> None:
    experts = make_experts(scheme, 4, 72, 320, fmt, torch.float32, "cuda")
    x, scale = randn(40, 320, dtype=torch.bfloat16, device="cuda"), randn(40, dtype=torch.float32, device="cuda")
    for offsets in HOSTILE:
        right = ends(nearest(offsets, 40), "cuda")
        poison("cuda")
        y = experts.mm(x, torch.tensor(offsets, dtype=torch.int32, device="cuda"), None, scale)
        assert torch.equal(bits(y), bits(experts.mm(x, right, None, scale)))
    experts.check(y, x, nearest(offsets, 40), None, scale)
    index = torch.tensor([-1, 40, 2**31 - 1, -(2**31), 3, 39] * 5, dtype=torch.int32, device="cuda")
    right = ends([7, 0, 20, 3], "cuda")
    for rows in (index, index.long() * 2**20):
        y = experts.mm(x, right, rows)
        assert torch.equal(bits(y), bits(experts.mm(x, right, rows.clamp(0, 39))))
        experts.check(y, x, [7, 0, 20, 3], rows.clamp(0, 39), None)


@on_gpu
@pytest.mark.parametrize("rows", [24, 640])
@pytest.mark.parametrize(("scheme", "fmt"), FEW)
def test_graphs_replay_with_other_routings(scheme: Scheme, fmt: Format, rows: int) -> None:
    experts = make_experts(scheme, 8, 136, 512, fmt, torch.bfloat16, "cuda")
    x, scale = randn(16, 512, dtype=torch.bfloat16, device="cuda"), torch.ones(rows, device="cuda")
    index, offsets = gathered(rows, 16, device="cuda"), ends([rows // 8] * 8, "cuda")
    arguments = experts.all_arguments(x, offsets, index, scale)
    experts.op(*arguments)
    graph = torch.cuda.CUDAGraph()
    torch.cuda.synchronize()
    with torch.cuda.graph(graph):
        y = experts.op(*arguments)
    for seed in range(3):
        counts = torch.rand(8, generator=generator(seed)).pow(3)
        counts = (counts / counts.sum() * (rows - seed)).int()
        offsets.copy_(counts.cumsum(0))
        index.copy_(torch.randint(0, 16, (rows,), generator=generator(seed)))
        scale.copy_(torch.rand(rows, generator=generator(seed)))
        x.copy_(randn(16, 512, dtype=torch.bfloat16, device="cuda", seed=seed))
        y.fill_(torch.nan)
        graph.replay()
        experts.check(y, x, counts.tolist(), index, scale)
        assert torch.equal(bits(y), bits(experts.op(*arguments)))


@on_gpu
@pytest.mark.parametrize("scheme", PRODUCTS, ids=lambda scheme: scheme.word)
def test_nobody_waits_and_every_run_gives_the_same_bits(scheme: Scheme) -> None:
    counts = [1, 0, 300, 1, 1, 2, 64]
    experts = make_experts(scheme, len(counts), 520, 512, device="cuda")
    x = randn(9, 512, dtype=torch.bfloat16, device="cuda")
    index, scale = gathered(sum(counts), 9, torch.int32, "cuda"), randn(369, dtype=torch.bfloat16, device="cuda")
    arguments = experts.all_arguments(x, ends(counts, "cuda"), index, scale)
    experts.op(*arguments)
    torch.cuda.synchronize()
    torch.cuda.set_sync_debug_mode("error")
    try:
        results = [bits(experts.op(*arguments)) for _ in range(20)]
    finally:
        torch.cuda.set_sync_debug_mode("default")
    assert all(torch.equal(result, results[0]) for result in results)


# ---- torch -----------------------------------------------------------------------------------------------------------


@pytest.mark.parametrize("gate", [{}, {"gate": GPT_OSS}], ids=["", "gate"])
@pytest.mark.parametrize("gather", [False, True])
@pytest.mark.parametrize(("scheme", "fmt"), FEW)
def test_opcheck(scheme: Scheme, fmt: Format, gather: bool, gate: dict[str, Any], device: str) -> None:
    experts = make_experts(scheme, 3, 40, 96, fmt, torch.float32, device)
    x, index = randn(7, 96, dtype=torch.float16, device=device), gathered(12, 7, device=device)
    scale = torch.rand(12, device=device)
    routed = (x, ends([4, 0, 6], device), index, scale) if gather else (x, ends([4, 0, 2], device), None, None)
    utilities = ("test_schema", "test_faketensor", "test_aot_dispatch_dynamic")
    torch.library.opcheck(experts.op, experts.all_arguments(*routed), gate, test_utils=utilities)


@pytest.mark.parametrize("gate", [{}, {"gate": SILU}], ids=["", "gate"])
@pytest.mark.parametrize("scheme", PRODUCTS, ids=lambda scheme: scheme.word)
def test_one_graph_for_every_routing(scheme: Scheme, gate: dict[str, Any], device: str) -> None:
    import qao

    experts = make_experts(scheme, 4, 48, 64, device=device)
    function = getattr(qao.ops, f"{scheme.word}_grouped_mm")
    torch._dynamo.reset()
    compiled = torch.compile(function, fullgraph=True, backend="aot_eager")
    x, index = randn(8, 64, dtype=torch.bfloat16, device=device), gathered(16, 8, device=device)
    for i, counts in enumerate(([16, 0, 0, 0], [1, 2, 3, 4], [0, 0, 0, 0], [4, 4, 4, 4])):
        arguments = experts.all_arguments(x, ends(counts, device), index)
        with torch._dynamo.config.patch(error_on_recompile=i > 0):
            assert torch.equal(bits(compiled(*arguments, **gate)), bits(experts.op(*arguments, **gate)))


def expected_gradients(
    experts: Experts, x: Tensor, counts: list[int], index: Tensor, scale: Tensor, bias: Tensor, grad: Tensor
) -> tuple[Tensor, Tensor, Tensor]:
    x64, scale64, bias64 = (t.detach().double().requires_grad_() for t in (x, scale, bias))
    parts, begin = [], 0
    for weight, own, count in zip(experts.weights, bias64, counts, strict=True):
        rows = slice(begin, begin + count)
        begin += count
        parts.append(scale64[rows, None] * (x64[index[rows]] @ weight.dense.T + own))
    (torch.cat(parts) * grad[:begin].double()).sum().backward()
    assert x64.grad is not None and scale64.grad is not None and bias64.grad is not None
    return x64.grad, scale64.grad, bias64.grad


@pytest.mark.parametrize("compiled", [False, True])
@pytest.mark.parametrize(("scheme", "fmt"), FEW)
def test_gradients(scheme: Scheme, fmt: Format, compiled: bool, device: str) -> None:
    import qao

    counts = [3, 0, 9, 4]
    experts = make_experts(scheme, 4, 48, 96, fmt, torch.float32, device)
    x = randn(8, 96, dtype=torch.float32, device=device).requires_grad_()
    index, rows = gathered(20, 8, device=device), 20
    scale = randn(rows, dtype=torch.float32, device=device, seed=2).requires_grad_()
    assert experts.bias is not None
    bias = experts.bias.clone().requires_grad_()
    function = getattr(qao.ops, f"{scheme.word}_grouped_mm")
    if compiled:
        torch._dynamo.reset()
        function = torch.compile(function, fullgraph=True, backend="aot_eager")
    grad = randn(rows, 48, dtype=torch.float32, device=device, seed=4)

    def gradients() -> tuple[Tensor, ...]:
        y = function(x, *experts.operands, bias, ends(counts, device), index, scale, *experts.arguments)
        return torch.autograd.grad(y, (x, scale, bias), grad)

    given, again = gradients(), gradients()
    expected = expected_gradients(experts, x, counts, index, scale, bias, grad)
    for own, other, exact in zip(given, again, expected, strict=True):
        assert torch.equal(own, other)
        # float32 sums of up to 96 terms of any sign: each of the roundings is at most 2^-24 of the largest sum.
        assert (own.double() - exact).abs().max() <= 2.0**-19 * exact.abs().max()


OFFSETS = [[0, 1, 1, 40, 90, 90, 91, 200], [200] * 8, [0] * 8, [0, 0, 0, 0, 0, 0, 0, 7], [5, 2, 80, -4, 300, 9, 9, 9]]


@pytest.mark.parametrize(("scheme", "fmt"), FEW)
def test_rows_of_gradients_need_no_look_at_the_offsets(scheme: Scheme, fmt: Format, device: str) -> None:
    """Gradients as a GPU computes them, against a loop over experts; n is not a multiple of the packing."""
    experts = make_experts(scheme, 8, 40, 96, fmt, torch.float32, device)
    dense = GROUPED[experts.op]
    sizes = list(experts.arguments[-3:]) if experts.operands[0].dim() == 4 else []  # of packed weights
    weight, scales = experts.operands
    for rows in (200, 5):
        grad = randn(rows, 40, dtype=torch.float32, device=device, seed=7)
        for offsets in OFFSETS:
            given = torch.tensor(offsets, dtype=torch.int32, device=device)
            arguments = grad, weight, scales, given, dense, 96, sizes
            loop = by_experts(*arguments)
            exact = torch.zeros(rows, 96, dtype=torch.float64, device=device)
            begin = 0
            for expert, count in enumerate(nearest(offsets, rows)):
                own = slice(begin, begin + count)
                exact[own] = grad[own].double() @ experts.weights[expert].dense.double()
                begin += count
            for made in (loop, by_tiles(*arguments)):
                # float32 sums of 40 terms of any sign: each of the roundings is at most 2^-24 of the largest sum.
                assert (made.double() - exact).abs().max() <= 2.0**-19 * max(1.0, exact.abs().max().item())
                assert not made[begin:].any()


@on_gpu
@pytest.mark.parametrize("scheme", PRODUCTS, ids=lambda scheme: scheme.word)
def test_graphs_hold_the_backward_pass(scheme: Scheme) -> None:
    import qao

    experts = make_experts(scheme, 8, 136, 512, None, torch.float32, "cuda")
    assert experts.bias is not None
    x = randn(16, 512, dtype=torch.float32, device="cuda").requires_grad_()
    scale, bias = torch.ones(64, device="cuda").requires_grad_(), experts.bias.clone().requires_grad_()
    index, offsets = gathered(64, 16, device="cuda"), ends([8] * 8, "cuda")
    grad = randn(64, 136, dtype=torch.float32, device="cuda", seed=4)
    function = getattr(qao.ops, f"{scheme.word}_grouped_mm")

    def gradients() -> tuple[Tensor, ...]:
        y = function(x, *experts.operands, bias, offsets, index, scale, *experts.arguments)
        return torch.autograd.grad(y, (x, scale, bias), grad)

    side = torch.cuda.Stream()
    side.wait_stream(torch.cuda.current_stream())
    with torch.cuda.stream(side):
        gradients()
    torch.cuda.current_stream().wait_stream(side)
    graph = torch.cuda.CUDAGraph()
    with torch.cuda.graph(graph):
        captured = gradients()
    for counts in ([64, 0, 0, 0, 0, 0, 0, 0], [0, 3, 30, 1, 0, 20, 2, 5]):
        offsets.copy_(ends(counts))
        graph.replay()
        expected = expected_gradients(experts, x, counts, index, scale, bias, grad)
        for own, again, exact in zip(captured, gradients(), expected, strict=True):
            assert torch.equal(own, again)
            assert (own.double() - exact).abs().max() <= 2.0**-19 * exact.abs().max()


def test_gradient_of_a_sorted_x_alone() -> None:
    import qao

    experts = make_experts(INT4, 3, 48, 128)
    x = randn(10, 128, dtype=torch.bfloat16, device="cpu").requires_grad_()
    y = qao.ops.int4_grouped_mm(x, *experts.operands, None, ends([4, 0, 5]), None, None, *experts.arguments)
    grad = randn(10, 48, dtype=torch.bfloat16, device="cpu", seed=4)
    (of_x,) = torch.autograd.grad(y, x, grad)
    dense = [weight.dense.bfloat16() for weight in experts.weights]
    assert torch.equal(of_x, torch.cat((grad[:4] @ dense[0], grad[4:9] @ dense[2], torch.zeros_like(x[:1]))))

    def loss(x: Tensor) -> Tensor:
        arguments = experts.all_arguments(x, ends([4, 0, 5]))
        return (qao.ops.int4_grouped_mm(*arguments) * grad).sum()

    assert torch.equal(torch.func.grad(loss)(x.detach()), of_x)

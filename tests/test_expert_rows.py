"""expert_sort and expert_sum: MoE permute and unpermute, against torch's sort and float64."""

from __future__ import annotations

import pytest
import qao
import torch
from ops_schemes import DTYPES, SHORT, generator
from ops_support import randn
from torch import Tensor

OPS = torch.ops.qao
UTILITIES = ("test_schema", "test_autograd_registration", "test_faketensor", "test_aot_dispatch_dynamic")
# tokens, choices of each, experts
SIZES = [(1, 1, 1), (1, 8, 128), (3, 2, 5), (9, 4, 32), (33, 8, 128), (7, 3, 700), (500, 8, 60), (2100, 6, 256)]


def routing(tokens: int, top_k: int, experts: int, dtype: torch.dtype = torch.int64) -> Tensor:
    """Some numbers belong to no expert."""
    return torch.randint(-1, experts + 2, (tokens, top_k), generator=generator(tokens), dtype=dtype)


def check_sort(chosen: Tensor, experts: int, offsets: Tensor, row_index: Tensor, places: Tensor) -> None:
    flat = chosen.flatten().long().cpu()
    flat = torch.where((flat < 0) | (flat >= experts), experts, flat)
    order = flat.sort(stable=True)
    assert offsets.dtype == row_index.dtype == places.dtype == torch.int32 and places.shape == chosen.shape
    assert torch.equal(offsets.cpu(), torch.bincount(flat, minlength=experts + 1).cumsum(0)[:experts].int())
    assert torch.equal(row_index.cpu().long(), order.indices // max(1, chosen.shape[1]))
    assert torch.equal(places.cpu().flatten().long()[order.indices], torch.arange(len(flat)))


@pytest.mark.parametrize("dtype", (torch.int64, torch.int32))
@pytest.mark.parametrize("sizes", SIZES, ids=str)
def test_sort_is_torchs_stable_one(sizes: tuple[int, int, int], dtype: torch.dtype, device: str) -> None:
    chosen, experts = routing(*sizes, dtype).to(device), sizes[2]
    check_sort(chosen, experts, *OPS.expert_sort(chosen, experts))
    check_sort(chosen.t(), experts, *OPS.expert_sort(chosen.t(), experts))  # strides
    one = torch.full_like(chosen, experts - 1)
    check_sort(one, experts, *OPS.expert_sort(one, experts))


@pytest.mark.parametrize("experts", (1, 383, 384, 3000))
def test_many_experts_and_slots(experts: int, device: str) -> None:
    """More than warps have room to count for at a time, and numbers far out of range."""
    chosen = routing(5000, 8, experts).to(device)
    chosen[3, 1], chosen[4, 2] = 2**62, -(2**62)
    check_sort(chosen, experts, *OPS.expert_sort(chosen, experts))


@pytest.mark.parametrize("columns", (1, 7, 8, 200, 2048, 5001))
@pytest.mark.parametrize("weights_dtype", DTYPES, ids=SHORT.get)
@pytest.mark.parametrize("dtype", DTYPES, ids=SHORT.get)
def test_sum(dtype: torch.dtype, weights_dtype: torch.dtype, columns: int, device: str) -> None:
    for tokens, top_k in ((1, 8), (5, 1), (33, 6), (3, 11)):
        rows = randn(tokens * top_k, columns, dtype=dtype, device=device)
        places = torch.randperm(tokens * top_k, generator=generator(0)).int().view(tokens, top_k).to(device)
        weights = randn(tokens, top_k, dtype=weights_dtype, device=device, seed=1)
        y = OPS.expert_sum(rows, places, weights)
        each = rows[places.long()].double() * weights.double().unsqueeze(2)
        # one rounding to the dtype; top_k of 2^-24 of float32 sums no larger than the sum of magnitudes
        allowed = torch.finfo(dtype).eps / 2 * each.sum(1).abs() + (top_k + 1) * 2.0**-24 * each.abs().sum(1)
        assert y.dtype == dtype and ((y.double() - each.sum(1)).abs() <= allowed + torch.finfo(dtype).tiny).all()
        assert torch.equal(y, OPS.expert_sum(rows, places, weights))


def test_there_and_back(device: str) -> None:
    """Each token's rows are its own: with weights that add up to one, sums of gathered rows are x again."""
    x = torch.arange(50.0, device=device).unsqueeze(1).expand(-1, 24).contiguous()
    _, row_index, places = qao.ops.expert_sort(routing(50, 4, 9).to(device), 9)
    assert torch.equal(qao.ops.expert_sum(x[row_index], places, torch.full((50, 4), 0.25, device=device)), x)


@pytest.mark.parametrize("dtype", DTYPES, ids=SHORT.get)
def test_gradients(dtype: torch.dtype, device: str) -> None:
    _, _, places = qao.ops.expert_sort(routing(9, 3, 5).to(device), 5)
    rows, weights = randn(27, 40, dtype=dtype, device=device), randn(9, 3, dtype=torch.float32, device=device, seed=1)
    grad = randn(9, 40, dtype=dtype, device=device, seed=2)
    ours, exact = ([t.detach().to(to).requires_grad_() for t in (rows, weights)] for to in (dtype, torch.float64))
    ours[1] = weights.clone().requires_grad_()
    compiled = torch.compile(qao.ops.expert_sum, fullgraph=True, backend="aot_eager")
    (exact[0][places.long()] * exact[1].unsqueeze(2)).sum(1).backward(grad.double())
    for call in (qao.ops.expert_sum, compiled):
        for own, truth in zip(torch.autograd.grad(call(ours[0], places, ours[1]), ours, grad), exact, strict=True):
            assert truth.grad is not None and own.dtype in (dtype, torch.float32)
            scale = truth.grad.abs() + (40 if own.shape == weights.shape else 0)  # a sum over 40 columns
            info = torch.finfo(own.dtype)
            allowed = (info.eps + 2.0**-22) * scale + info.tiny * info.eps
            assert ((own.double() - truth.grad).abs() <= allowed).all()


def test_no_tokens_and_no_choices(device: str) -> None:
    for shape in ((0, 4), (3, 0)):
        offsets, row_index, places = OPS.expert_sort(torch.empty(shape, dtype=torch.int64, device=device), 5)
        assert not offsets.any() and len(row_index) == 0 and places.shape == shape
        y = OPS.expert_sum(torch.empty(0, 8, device=device), places, torch.empty(shape, device=device))
        assert y.shape == (shape[0], 8) and not y.any()


def test_opcheck(device: str) -> None:
    chosen = routing(5, 2, 4).to(device)
    torch.library.opcheck(OPS.expert_sort.default, (chosen, 4), test_utils=UTILITIES)
    places, weights = OPS.expert_sort(chosen, 4)[2], torch.rand(5, 2, device=device)
    torch.library.opcheck(OPS.expert_sum.default, (torch.rand(10, 8, device=device), places, weights))


def test_errors(device: str) -> None:
    chosen, rows = routing(5, 2, 4).to(device), torch.rand(10, 8, device=device)
    places, weights = OPS.expert_sort(chosen, 4)[2], torch.rand(5, 2, device=device)
    for call, message in (
        (lambda: OPS.expert_sort(chosen.float(), 4), "experts must be int64 or int32"),
        (lambda: OPS.expert_sort(chosen[0], 4), "experts must be int64 or int32"),
        (lambda: OPS.expert_sort(chosen, 0), "num_experts must be from 1"),
        (lambda: OPS.expert_sum(rows[0], places, weights), r"rows must have shape \[places, columns\]"),
        (lambda: OPS.expert_sum(rows, places.long(), weights), "places must be int32"),
        (lambda: OPS.expert_sum(rows, places, weights[:2]), "weights must have the shape of places"),
        (lambda: OPS.expert_sum(rows.t(), places, weights), "rows must be contiguous"),
        (lambda: OPS.expert_sum(rows.int(), places, weights), "rows"),
    ):
        with pytest.raises(RuntimeError, match=message):
            call()
    for wrong in (10, -1, 2**31 - 1):
        hostile = places.clone()
        hostile[1, 1] = wrong
        if device == "cpu":
            with pytest.raises(RuntimeError, match=f"places must be rows: {wrong} of token 1"):
                OPS.expert_sum(rows, hostile, weights)
        else:  # counts as zeros
            without = weights.clone()
            without[1, 1] = 0
            assert torch.equal(OPS.expert_sum(rows, hostile, weights), OPS.expert_sum(rows, places, without))


@pytest.mark.skipif(not torch.cuda.is_available(), reason="torch sees no GPU")
def test_graphs_replay_with_other_routings() -> None:
    chosen, weights = routing(64, 8, 128).cuda(), torch.rand(64, 8, device="cuda")
    rows = randn(512, 2048, dtype=torch.bfloat16, device="cuda")
    graph = torch.cuda.CUDAGraph()
    OPS.expert_sort(chosen, 128)
    with torch.cuda.graph(graph):
        sorted_rows = OPS.expert_sort(chosen * 1, 128)
        y = OPS.expert_sum(rows * 1, sorted_rows[2], weights)
    for seed in range(3):
        chosen.copy_(torch.randint(0, 129, (64, 8), generator=generator(seed)))
        graph.replay()
        check_sort(chosen, 128, *sorted_rows)
        assert torch.equal(y, OPS.expert_sum(rows, OPS.expert_sort(chosen, 128)[2], weights))

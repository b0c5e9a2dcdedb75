"""expert_topk: the experts that a router chooses, and their weights, against float64."""

from __future__ import annotations

import math
from typing import Any

import pytest
import qao
import torch
from ops_schemes import DTYPES, SHORT, generator
from ops_support import randn
from torch import Tensor

OPS = torch.ops.qao
UTILITIES = ("test_schema", "test_autograd_registration", "test_faketensor", "test_aot_dispatch_dynamic")
# tokens, experts, top_k, groups, top_groups
SIZES = [
    (1, 1, 1, 1, 1),
    (3, 5, 5, 1, 1),
    (1, 128, 8, 1, 1),
    (33, 8, 2, 1, 1),
    (300, 128, 8, 1, 1),
    (7, 256, 8, 8, 4),
    (500, 60, 4, 6, 2),
    (4, 1000, 22, 1, 1),
    (5, 32, 3, 32, 7),
]


def computed(experts: int) -> float:
    """Relative error of a score: an exponential of up to 2^-22, and sums over the experts of 32 lanes."""
    return 2.0**-21 + (experts / 32 + 5) * 2.0**-24


def scores_of(logits: Tensor, sigmoid: bool) -> Tensor:
    return logits.double().sigmoid() if sigmoid else logits.double().softmax(-1)


def check(
    result: tuple[Tensor, Tensor],
    logits: Tensor,
    bias: Tensor | None,
    top_k: int,
    sigmoid: bool,
    normalized: bool,
    factor: float,
    groups: int,
    top_groups: int,
) -> None:
    """Weights are those of the chosen; the chosen are best up to rounding, in order, and none of them twice."""
    chosen, weights = result
    tokens, experts = logits.shape
    error = computed(experts)
    assert chosen.dtype == torch.int64 and weights.dtype == torch.float32
    assert chosen.shape == weights.shape == (tokens, top_k) and ((chosen >= 0) & (chosen < experts)).all()
    scores = scores_of(logits, sigmoid)
    exact = scores.gather(1, chosen)
    if normalized:
        exact = exact / (exact.sum(1, keepdim=True) + 1e-20)
    assert ((weights.double() - exact * factor).abs() <= (2 * error + 2.0**-22) * abs(factor) * exact).all()
    biased = scores if bias is None else scores + bias.double()
    slack = error * (scores + biased.abs()).amax(1, keepdim=True)
    own = biased.gather(1, chosen)
    assert (own[:, 1:] <= own[:, :-1] + slack).all()
    assert (chosen.sort(1).values.diff(dim=1) > 0).all()
    size = experts // groups
    ranks = biased.view(tokens, groups, size).topk(min(2, size)).values.sum(-1)
    used = torch.zeros_like(ranks, dtype=torch.bool).scatter(1, chosen // size, True)
    assert (used.sum(1) <= top_groups).all()
    least = ranks.topk(top_groups).values[:, -1:]
    assert (ranks.where(used, math.inf) >= least - 2 * slack).all()
    # Of groups that surely are among the best, no expert is left out that is better than the last one chosen.
    surely = ranks > ranks.topk(min(groups, top_groups + 1)).values[:, -1:] + 4 * slack if top_groups < groups else used
    left = biased.scatter(1, chosen, -math.inf).view(tokens, groups, size)
    left = left.where((surely | used)[..., None], -math.inf).flatten(1)
    assert (left <= own[:, -1:] + slack).all()


@pytest.mark.parametrize("normalized", (False, True))
@pytest.mark.parametrize("with_bias", (False, True))
@pytest.mark.parametrize("sigmoid", (False, True))
@pytest.mark.parametrize("dtype", DTYPES, ids=SHORT.get)
@pytest.mark.parametrize("sizes", SIZES, ids=str)
def test_the_best(
    sizes: tuple[int, ...], dtype: torch.dtype, sigmoid: bool, with_bias: bool, normalized: bool, device: str
) -> None:
    tokens, experts, top_k, *groups = sizes
    logits = randn(tokens, experts, dtype=dtype, device=device) * 3
    bias = randn(experts, dtype=dtype, device=device, seed=1) * 0.1 if with_bias else None
    rest: tuple[Any, ...] = (bias, top_k, sigmoid, normalized, 2.5, *groups)
    result = OPS.expert_topk(logits, *rest)
    check(result, logits, *rest)
    assert all(torch.equal(a, b) for a, b in zip(result, OPS.expert_topk(logits, *rest), strict=True))
    padded = torch.nn.functional.pad(logits, (0, 3))[:, :experts]  # strides
    assert all(torch.equal(a, b) for a, b in zip(result, OPS.expert_topk(padded, *rest), strict=True))


@pytest.mark.parametrize("sigmoid", (False, True))
def test_of_equals_the_lowest_comes_first(sigmoid: bool, device: str) -> None:
    logits = torch.randint(0, 3, (200, 64), generator=generator(0)).float().to(device)
    chosen, _ = OPS.expert_topk(logits, None, 20, sigmoid, True, 1.0)
    assert torch.equal(chosen, logits.sort(stable=True, descending=True).indices[:, :20])
    chosen, _ = OPS.expert_topk(torch.zeros(3, 64, device=device), None, 10, sigmoid, True, 1.0, 8, 3)
    assert torch.equal(chosen, torch.arange(10, device=device).expand(3, -1))


def test_not_finite_numbers_and_vanishing_sums(device: str) -> None:
    logits = torch.zeros(5, 40)
    logits[0, 7], logits[1, 9], logits[2], logits[3, 2] = math.nan, math.inf, -1e30, -math.inf
    chosen, weights = (t.cpu() for t in OPS.expert_topk(logits.to(device), None, 3, True, True, 1.0))
    assert chosen.tolist() == [[7, 0, 1], [9, 0, 1], [0, 1, 2], [0, 1, 3], [0, 1, 2]]
    assert weights[0].isnan().all() and weights[1:].isfinite().all() and not weights[2].any()
    torch.testing.assert_close(weights[1], torch.tensor([0.5, 0.25, 0.25]))
    chosen, weights = (t.cpu() for t in OPS.expert_topk(logits.to(device), None, 3, False, True, 1.0))
    assert weights[:2].isnan().all() and weights[2:].isfinite().all() and (chosen < 40).all() and (chosen >= 0).all()


def test_as_models_route(device: str) -> None:
    """Qwen3-MoE, GPT-OSS and DeepSeek-V3 as they write it, of numbers without near ties."""
    logits = torch.stack([torch.randperm(64, generator=generator(s)) for s in range(50)]).float().to(device) / 8 - 4
    chosen, weights = OPS.expert_topk(logits, None, 6, False, True, 1.0)
    values, indices = logits.softmax(-1).topk(6)
    assert torch.equal(chosen, indices)
    torch.testing.assert_close(weights, values / values.sum(-1, keepdim=True))
    torch.testing.assert_close(weights, logits.topk(6).values.softmax(-1))  # GPT-OSS
    bias = torch.linspace(0.5, 1, 64, device=device)
    chosen, weights = OPS.expert_topk(logits, bias, 6, True, True, 2.5, 8, 4)
    scores = logits.sigmoid()
    choice = scores + bias
    kept = choice.view(-1, 8, 8).topk(2).values.sum(-1).topk(4).indices
    mask = torch.zeros(50, 8, device=device).scatter(1, kept, 1).repeat_interleave(8, 1)
    indices = choice.masked_fill(mask == 0, 0.0).topk(6).indices
    assert torch.equal(chosen, indices)
    values = scores.gather(1, indices)
    torch.testing.assert_close(weights, values / (values.sum(-1, keepdim=True) + 1e-20) * 2.5)


@pytest.mark.parametrize("normalized", (False, True))
@pytest.mark.parametrize("sigmoid", (False, True))
def test_gradients(sigmoid: bool, normalized: bool, device: str) -> None:
    logits = randn(9, 40, dtype=torch.float32, device=device)
    grad = randn(9, 4, dtype=torch.float32, device=device, seed=1)

    def route(logits: Tensor) -> Tensor:
        chosen, weights = qao.ops.expert_topk(logits, None, 4, sigmoid, normalized, 2.5)
        return weights + 0 * chosen

    truth = logits.double().requires_grad_()
    some = scores_of(truth, sigmoid).gather(1, OPS.expert_topk(logits, None, 4, sigmoid, normalized, 2.5)[0])
    ((some / some.sum(1, keepdim=True) if normalized else some) * 2.5).backward(grad.double())
    assert truth.grad is not None
    for call in (route, torch.compile(route, fullgraph=True, backend="aot_eager")):
        own = logits.clone().requires_grad_()
        call(own).backward(grad)
        assert own.grad is not None
        torch.testing.assert_close(own.grad.double(), truth.grad, rtol=1e-5, atol=1e-6)


def test_opcheck(device: str) -> None:
    bias = torch.rand(32, device=device)
    for tokens in (0, 5):
        arguments = (randn(tokens, 32, dtype=torch.bfloat16, device=device), bias, 4, True, True, 2.5, 8, 4)
        torch.library.opcheck(OPS.expert_topk.default, arguments, test_utils=UTILITIES)


def test_errors(device: str) -> None:
    logits, rest = torch.rand(5, 32, device=device), (True, True, 1.0)
    for call, message in (
        (lambda: OPS.expert_topk(logits.int(), None, 4, *rest), "logits"),
        (lambda: OPS.expert_topk(logits[0], None, 4, *rest), r"logits must have shape \[tokens, experts\]"),
        (lambda: OPS.expert_topk(logits, None, 0, *rest), "top_k must be from 1"),
        (lambda: OPS.expert_topk(logits, None, 33, *rest), "top_k must be from 1"),
        (lambda: OPS.expert_topk(logits, None, 9, *rest, 8, 2), "top_k must be from 1"),
        (lambda: OPS.expert_topk(logits, None, 4, *rest, 5, 1), "as many in each of up to 32 groups"),
        (lambda: OPS.expert_topk(logits, None, 4, *rest, 8, 9), "top_groups are chosen"),
        (lambda: OPS.expert_topk(logits, logits[0, :7], 4, True, True, 1.0), "bias must have one number"),
    ):
        with pytest.raises(RuntimeError, match=message):
            call()

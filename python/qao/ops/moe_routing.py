"""MoE routing: ``expert_topk`` selects experts, ``expert_sort`` permutes, ``expert_sum`` unpermutes."""

from __future__ import annotations

from typing import Any

import torch
from torch import Tensor
from torch.autograd.function import once_differentiable

from .autograd import traced, transformed
from .grouped_autograd import added

_LEAST_SUM = 1e-20  # the same as in the operator
_sort = torch.ops.qao.expert_sort.default
_sum = torch.ops.qao.expert_sum.default
_topk = torch.ops.qao.expert_topk.default


def expert_sort(experts: Tensor, num_experts: int) -> tuple[Tensor, Tensor, Tensor]:
    """MoE permutation: a stable sort of the routed (token, expert) pairs by expert.

    Args:
        experts: int64 or int32 [T, k], the experts of each token. Numbers outside 0..E - 1 sort last, into rows after
            those of all experts.
        num_experts: E.

    Returns:
        int32 ``offsets`` [E] and ``row_index`` [T * k], arguments of the grouped GEMMs, and ``places`` [T, k]: the row
        of each pair.

    Raises:
        RuntimeError: A shape, dtype or device does not fit; the message lists all operands and the remedy.
    """
    return _sort(experts, num_experts)  # type: ignore[no-any-return]


def _scores(logits: Tensor, sigmoid: bool) -> Tensor:
    return logits.float().sigmoid() if sigmoid else logits.float().softmax(-1)


class _TopK(torch.autograd.Function):
    @staticmethod
    def forward(
        ctx: Any, logits: Tensor, bias: Tensor | None, top_k: int, sigmoid: bool, *rest: Any
    ) -> tuple[Tensor, Tensor]:
        chosen, weights = _topk(logits, bias, top_k, sigmoid, *rest)
        ctx.save_for_backward(logits, chosen)
        ctx.mark_non_differentiable(chosen)
        ctx.normalized, ctx.factor, *_ = rest
        ctx.sigmoid = sigmoid
        return chosen, weights

    @staticmethod
    @once_differentiable
    def backward(ctx: Any, *grads: Any) -> tuple[Tensor | None, ...]:
        logits, chosen = ctx.saved_tensors
        scores = _scores(logits, ctx.sigmoid)
        grad = grads[1] * ctx.factor
        if ctx.normalized:
            some = scores.gather(1, chosen)
            total = some.sum(1, keepdim=True) + _LEAST_SUM
            grad = (grad - (grad * some / total).sum(1, keepdim=True)) / total
        grad = torch.zeros_like(scores).scatter(1, chosen, grad)
        if ctx.sigmoid:
            grad = grad * scores * (1 - scores)
        else:
            grad = scores * (grad - (grad * scores).sum(1, keepdim=True))
        return grad.to(logits.dtype), *(None for _ in ctx.needs_input_grad[1:])


def expert_topk(
    logits: Tensor,
    bias: Tensor | None,
    top_k: int,
    sigmoid: bool,
    normalized: bool,
    factor: float,
    groups: int = 1,
    top_groups: int = 1,
) -> tuple[Tensor, Tensor]:
    """Top-k routing: the experts of each token and their weights, which are differentiable in logits.

    Scores are softmax or sigmoid of the logits, in float32. ``top_k`` experts with the largest scores plus bias are
    selected within the best ``top_groups`` groups (runs of E / groups experts). A group ranks by the sum of its two
    largest scores plus bias. The lowest number wins ties; NaN counts as the largest.

    Args:
        logits: [T, E] in a float dtype.
        bias: [E] in a float dtype, contiguous, for the selection only; None for zeros.
        normalized: Scores of a token's experts are divided by their sum, plus 1e-20.
        factor: Multiplies the weights.
        groups, top_groups: 1 and 1 to select among all experts; at most 32 groups.

    Returns:
        int64 [T, top_k], the best first, and their weights, float32 [T, top_k], without bias.

    Raises:
        RuntimeError: A shape, dtype, device or number does not fit; the message lists all operands and the remedy.
    """
    arguments = logits, bias, top_k, sigmoid, normalized, factor, groups, top_groups
    if isinstance(logits, Tensor) and logits.requires_grad and torch.is_grad_enabled():
        if torch.compiler.is_dynamo_compiling():
            return _traced_topk(*arguments)  # type: ignore[no-any-return]
        return _TopK.apply(*arguments)  # type: ignore[no-untyped-call, no-any-return]
    return _topk(*arguments)  # type: ignore[no-any-return]


class _Sum(torch.autograd.Function):
    @staticmethod
    def forward(ctx: Any, rows: Tensor, places: Tensor, weights: Tensor) -> Tensor:
        ctx.save_for_backward(rows, places, weights)
        return _sum(rows, places, weights)  # type: ignore[no-any-return]

    @staticmethod
    @once_differentiable
    def backward(ctx: Any, *grads: Any) -> tuple[Tensor | None, ...]:
        rows, places, weights = ctx.saved_tensors
        grad = grads[0].float().unsqueeze(1)
        grad_rows = grad_weights = None
        if ctx.needs_input_grad[0]:
            each = (grad * weights.float().unsqueeze(2)).flatten(0, 1)
            grad_rows = added(each, places.flatten(), rows.shape).to(rows.dtype)
        if ctx.needs_input_grad[2]:
            chosen = rows[places.long().clamp(0, rows.shape[0] - 1)]
            grad_weights = (chosen.float() * grad).sum(2).to(weights.dtype)
        return grad_rows, None, grad_weights


def _plain_sum(rows: Tensor, places: Tensor, weights: Tensor) -> Tensor:
    return (rows[places.long()].float() * weights.float().unsqueeze(2)).sum(1).to(rows.dtype)


def expert_sum(rows: Tensor, places: Tensor, weights: Tensor) -> Tensor:
    """MoE unpermute and combine: y[t] = Σ_j weights[t, j] * rows[places[t, j]], summed in float32 and rounded once.

    Differentiable.

    Args:
        rows: [S, N] in a float dtype, contiguous: the result of the experts' last GEMM.
        places: int32 [T, k] from ``expert_sort``. An index outside 0..S - 1 raises on the CPU and counts as a row of
            zeros on a GPU.
        weights: [T, k] in a float dtype, the routing weights.

    Returns:
        [T, N] in the dtype of rows.

    Raises:
        RuntimeError: A shape, dtype or device does not fit; the message lists all operands and the remedy.
    """
    if transformed():
        return _plain_sum(rows, places, weights)
    wanted = any(isinstance(t, Tensor) and t.requires_grad for t in (rows, weights))
    if wanted and torch.is_grad_enabled():
        if torch.compiler.is_dynamo_compiling():
            return _traced_sum(rows, places, weights)  # type: ignore[no-any-return]
        return _Sum.apply(rows, places, weights)  # type: ignore[no-untyped-call, no-any-return]
    return _sum(rows, places, weights)  # type: ignore[no-any-return]


_traced_sum = traced(_sum, expert_sum)
_traced_topk = traced(_topk, expert_topk)

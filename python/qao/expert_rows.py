"""The way of tokens to their experts and back: ``expert_sort`` and ``expert_sum``, around the grouped products."""

from __future__ import annotations

from typing import Any

import torch
from torch import Tensor
from torch.autograd.function import once_differentiable

from .gradients import traced, transformed
from .grouped import added

_sort = torch.ops.qao.expert_sort.default
_sum = torch.ops.qao.expert_sum.default


def expert_sort(experts: Tensor, num_experts: int) -> tuple[Tensor, Tensor, Tensor]:
    """Which rows of the products of experts are whose: choices sorted by expert, those of one expert as they were.

    Args:
        experts: int64 or int32 [T, k], the experts that each token goes to. Numbers that are none of 0..E - 1 come
            last, in rows that no expert has.
        num_experts: E.

    Returns:
        int32 ``offsets`` [E] and ``row_index`` [T * k] as the grouped products take them, and ``places`` [T, k]: the
        row of each choice.

    Raises:
        RuntimeError: A shape, dtype or device does not fit; the message lists all and the remedy.
    """
    return _sort(experts, num_experts)  # type: ignore[no-any-return]


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
    """y[t] = Σ_j weights[t, j] * rows[places[t, j]], summed in float32 and rounded once; differentiable.

    Args:
        rows: [S, N] in a float dtype, contiguous: what the last product of the experts gave.
        places: int32 [T, k] of ``expert_sort``. One that is no row is an error on the CPU; on a GPU it counts as zeros.
        weights: [T, k] in a float dtype, the router's.

    Returns:
        [T, N] in the dtype of rows.

    Raises:
        RuntimeError: A shape, dtype or device does not fit; the message lists all and the remedy.
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

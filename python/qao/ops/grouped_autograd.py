"""Grouped GEMMs of E experts and their autograd. Each row of y belongs to one expert.

The weight tensors of the dense operator are stacked: weight, scales and ``weight_sums`` have a leading dimension E,
bias is [E, N] or None. For GGUF weights ``grouped_product`` takes None as scales. Sizes: T rows of x, S rows of y;
x [T, K], y [S, N] in x's dtype,

    y[s] = router_weights[s] * (x[row_index[s]] · W[e]ᵀ + bias[e])   for expert e with offsets[e - 1] <= s < offsets[e],
    y[s] = 0                                                         for rows past all experts, s >= offsets[E - 1].

    offsets: int32 [E] on the device of x, cumulative token counts, the end of each expert's rows, as in torch's
        grouped_mm; or [E + 1] with a leading 0. Experts may be empty.
    row_index: int64 or int32 [S], the row of x for each row of y; None: the same row, S = T.
    router_weights: [S] in a float dtype, ``row_scale`` of the operators: applied to float32 sums before y is rounded;
        None: 1.
    gate: alpha, limit, shift and interleaved of ``qao.ops.swiglu``, applied to x · Wᵀ + bias rounded to x's dtype:
        y is [S, N / 2], and router_weights applies after the gate. None: no gate.

On the CPU, without router_weights, a row has the same bits as the dense operator's result for the rows of its expert.
x is quantized once, even if several rows of y read it (a per-tensor scale covers all rows of x). Only the result
depends on the values in offsets; launches and sizes do not. The result is deterministic. On the CPU, offsets that
decrease or exceed S and a row_index outside x raise RuntimeError. GPU kernels clamp them without a synchronization: an
expert begins at the end of the previous one and ends there or later, at S at most.

Gradients go to x, bias and router_weights. As for dense GEMMs, quantization of x counts as the identity. A CUDA graph
can capture the backward pass.
"""

from __future__ import annotations

import math
from collections.abc import Callable, Sequence
from typing import Any

import torch
from torch import Tensor
from torch.autograd import Function
from torch.autograd.function import once_differentiable

from .autograd import DENSE, traced, transformed
from .batch_invariant import MODE
from .gguf import dequantize_gguf
from .grouped_backward import bounds_of, define_rows
from .norm_act import silu_mul, swiglu
from .rotation import rotated
from .signature import SIGNATURES, invariant, note_signature, rotation_among, sizes_among

_qao = torch.ops.qao

Gate = Sequence[float]  # alpha, limit, shift, interleaved
SILU_MUL: Gate = (1.0, math.inf, 0.0, False)

# Each grouped operator with the function that dequantizes one expert's W [N, K] from (weight, scales, dtype, *sizes).
_NAMES = {op._schema.name.removeprefix("qao::").removesuffix("mm") + "grouped_mm": w for op, w in DENSE.items()}
GROUPED: dict[Any, Callable[..., Tensor]] = {
    getattr(_qao, name).default: dense for name, dense in _NAMES.items() if hasattr(_qao, name)
}
GROUPED[_qao.gguf_grouped_mm.default] = lambda weight, _, dtype, qtype: dequantize_gguf(weight, qtype, dtype)
for _operator in GROUPED:
    note_signature(_operator)
define_rows({operator._schema.name: dense for operator, dense in GROUPED.items()})


def _operands(operator: Any, weight: Tensor, scales: Tensor | None, bias: Tensor | None) -> tuple[Tensor | None, ...]:
    """Those that the operator takes, in order."""
    return (weight, scales, bias) if SIGNATURES[operator].has_scales else (weight, bias)


class _Grouped(Function):
    @staticmethod
    def forward(
        x: Tensor, bias: Any, router_weights: Any, weight: Any, scales: Any, operator: Any, *rest: Any
    ) -> Tensor:
        offsets, row_index, *others = rest
        operands = _operands(operator, weight, scales, bias)
        return operator(x, *operands, offsets, row_index, router_weights, *others)  # type: ignore[no-any-return]

    @staticmethod
    def setup_context(ctx: Any, inputs: tuple[Any, ...], output: Any) -> None:
        x, bias, router_weights, weight, scales, operator, offsets, row_index, *others = inputs
        ctx.save_for_backward(
            x if router_weights is not None else None, bias, router_weights, weight, scales, offsets, row_index
        )
        numbers = tuple(others[SIGNATURES[operator].others :])
        ctx.operator, ctx.sizes = operator._schema.name, sizes_among(operator, numbers)
        ctx.rotation = rotation_among(operator, numbers)
        ctx.x_shape, ctx.x_dtype = x.shape, x.dtype

    @staticmethod
    @once_differentiable
    def backward(ctx: Any, grad: Tensor) -> tuple[Tensor | None, ...]:
        x, bias, router_weights, weight, scales, offsets, row_index = ctx.saved_tensors
        offsets = offsets[offsets.shape[0] - weight.shape[0] :]
        wants_x, wants_bias, wants_scale, *frozen = ctx.needs_input_grad
        grad_x = grad_bias = grad_scale = None
        factor = None if router_weights is None else router_weights.float().unsqueeze(1)
        if wants_x or wants_scale:
            rows = torch.ops.qao_with_grad.grouped_rows(
                grad.contiguous(), weight, scales, offsets, ctx.operator, ctx.x_shape[-1], ctx.sizes
            )
            rows = rotated(rows, ctx.rotation).to(rows.dtype)
        if wants_x:
            grad_x = rows if factor is None else rows * factor
            if row_index is not None:
                grad_x = added(grad_x.float(), row_index, ctx.x_shape)
            grad_x = grad_x.to(ctx.x_dtype)
        if wants_scale:
            grad_scale = (rows.float() * (x if row_index is None else x[row_index]).float()).sum(1)
            if bias is not None:
                grad_scale += (grad.float() * (_members(grad, offsets) @ bias.float())).sum(1)
            grad_scale = grad_scale.to(router_weights.dtype)
        if wants_bias:
            weighted = grad.float() if factor is None else grad.float() * factor
            grad_bias = (_members(grad, offsets).t() @ weighted).to(bias.dtype)
        return grad_x, grad_bias, grad_scale, *(None for _ in frozen)


def added(rows: Tensor, row_index: Tensor, shape: torch.Size) -> Tensor:
    """Deterministic scatter-add of rows [S, K] to the rows ``row_index`` of a zero tensor of ``shape``."""
    zeros = rows.new_zeros(shape)
    if not rows.is_cuda:
        return zeros.index_add(0, row_index, rows)
    # index_add is nondeterministic on a GPU; index_put sorts the indices
    return zeros.index_put((row_index.long().clamp(0, shape[0] - 1),), rows, accumulate=True)


def _members(grad: Tensor, offsets: Tensor) -> Tensor:
    """float32 [S, E]: 1 where row s belongs to expert e."""
    rows = torch.arange(grad.shape[0], device=grad.device, dtype=offsets.dtype).unsqueeze(1)
    begins, ends = bounds_of(offsets, grad.shape[0])
    return ((rows >= begins) & (rows < ends)).float()


def _traced(operator: Any) -> Any:
    tensors, _, has_scales, names, _ = SIGNATURES[operator]
    last = tensors + len(names) - 1  # gate

    def impl(*arguments: Any) -> Tensor:
        given = list(arguments[:tensors])
        if not has_scales:
            given.insert(2, None)  # behind x and weight
        gate = arguments[last] if len(arguments) > last else None
        return grouped_product(operator, arguments[tensors:last], *given, gate=gate)

    return traced(operator, impl)


TRACED: dict[Any, Any] = {operator: _traced(operator) for operator in GROUPED}


def through_gate(rows: Tensor, gate: Gate) -> Tensor:
    """The operators' gate on [S, N]: [S, N / 2], differentiable."""
    alpha, limit, shift, interleaved = gate
    if tuple(gate) == SILU_MUL:
        return silu_mul(*rows.chunk(2, -1))
    return swiglu(rows, alpha, limit, shift, bool(interleaved))


def _in_pieces(product: Callable[[Tensor | None], Tensor], router_weights: Tensor | None, gate: Gate) -> Tensor:
    """Grouped GEMM, gate and router_weights as separate differentiable steps. ``product`` takes router_weights."""
    y = through_gate(product(None), gate)
    return y if router_weights is None else (y.float() * router_weights.float().unsqueeze(1)).to(y.dtype)


def grouped_product(
    operator: Callable[..., Tensor],
    constants: tuple[Any, ...],
    x: Tensor,
    weight: Tensor,
    scales: Tensor | None,
    bias: Tensor | None,
    offsets: Tensor,
    row_index: Tensor | None,
    router_weights: Tensor | None,
    *others: Any,
    gate: Gate | None = None,
) -> Tensor:
    """Differentiable ``operator(x, weight, scales, bias, offsets, row_index, router_weights, *others, *constants,
    gate=gate)``, an operator of GROUPED; ``others`` as for ``product``."""
    if MODE.on:
        others, constants = invariant(operator, others, constants)
    wanted = torch.is_grad_enabled() and any(
        isinstance(tensor, Tensor) and tensor.requires_grad for tensor in (x, bias, router_weights)
    )
    differentiated = wanted or transformed()
    if differentiated and not torch.compiler.is_dynamo_compiling():

        def apply(router_weights: Tensor | None) -> Tensor:
            arguments = (x, bias, router_weights, weight, scales, operator, offsets, row_index, *others, *constants)
            return _Grouped.apply(*arguments)  # type: ignore[no-untyped-call, no-any-return]

        return apply(router_weights) if gate is None else _in_pieces(apply, router_weights, gate)
    operands = _operands(operator, weight, scales, bias)
    called: Any = TRACED[operator] if differentiated else operator
    gated = {} if gate is None else {"gate": gate}
    return called(x, *operands, offsets, row_index, router_weights, *others, *constants, **gated)  # type: ignore[no-any-return]


torch.fx.wrap("grouped_product")  # one node in fx.symbolic_trace: it selects the autograd path at run time

"""Operators of GGUF weights: GEMM with gradients, dequantization and embedding lookup.

``weight`` is uint8 [N, row_bytes], contiguous: rows exactly as a GGUF file holds them. ``qtype`` is ggml's number of
their block type: Q4_0 2, Q4_1 3, Q5_0 6, Q5_1 7, Q8_0 8, Q2_K 10, Q3_K 11, Q4_K 12, Q5_K 13, Q6_K 14, IQ4_NL 20,
IQ4_XS 23. K follows from both. CPU only. grouped_mm.py has the grouped GEMM.
"""

from __future__ import annotations

from typing import Any

import torch
from torch import Tensor
from torch.autograd import Function

from . import library  # noqa: F401  # loads the operators
from .autograd import batched, traced, transformed
from .batch_invariant import MODE

_qao = torch.ops.qao

# Columns and bytes of a block, by qtype.
BLOCKS = {
    **{2: (32, 18), 3: (32, 20), 6: (32, 22), 7: (32, 24), 8: (32, 34), 20: (32, 18)},
    **{10: (256, 84), 11: (256, 110), 12: (256, 144), 13: (256, 176), 14: (256, 210), 23: (256, 136)},
}


def columns_of(weight: Tensor, qtype: int) -> Any:
    """K of a weight, an int or a SymInt."""
    columns, size = BLOCKS.get(qtype, (0, 0))
    if size == 0:
        raise ValueError(f"qtype {qtype} has no kernels")
    return weight.shape[1] // size * columns


class _Product(Function):
    """Supports backward, jvp and vmap and their compositions."""

    @staticmethod
    def forward(x: Tensor, bias: Tensor | None, weight: Tensor, qtype: int, batch_invariant: bool) -> Tensor:
        return _qao.gguf_mm.default(x, weight, bias, qtype, batch_invariant)  # type: ignore[no-any-return]

    @staticmethod
    def setup_context(ctx: Any, inputs: tuple[Any, ...], output: Any) -> None:
        _, bias, weight, ctx.qtype, _ = inputs
        ctx.save_for_backward(weight)
        ctx.save_for_forward(weight)
        ctx.bias_dtype = None if bias is None else bias.dtype
        ctx.dtype, ctx.shape = output.dtype, output.shape

    @staticmethod
    def backward(ctx: Any, *grads: Any) -> tuple[Tensor | None, ...]:
        (grad,), (weight,) = grads, ctx.saved_tensors
        wants_x, wants_bias, *_ = ctx.needs_input_grad
        grad_x = grad @ dequantize_gguf(weight, ctx.qtype, grad.dtype) if wants_x else None
        grad_bias = grad.sum_to_size(grad.shape[-1:]).to(ctx.bias_dtype) if wants_bias else None
        return grad_x, grad_bias, None, None, None

    @staticmethod
    def jvp(ctx: Any, *tangents: Any) -> Tensor:
        (weight,), (of_x, of_bias, *_) = ctx.saved_tensors, tangents
        parts = [of_x @ dequantize_gguf(weight, ctx.qtype, ctx.dtype).t()] if of_x is not None else []
        if of_bias is not None:
            parts.append(of_bias.to(ctx.dtype).expand(ctx.shape))
        tangent: Tensor = sum(parts[1:], start=parts[0])
        return tangent

    @staticmethod
    def vmap(info: Any, in_dims: tuple[Any, ...], *arguments: Any) -> tuple[Tensor, int]:
        x, bias, weight, *rest = arguments
        of_x, of_bias, of_weight, *of_rest = in_dims
        return over_batch(gguf_mm, info, (of_x, of_weight, of_bias, *of_rest), x, weight, bias, *rest)


def over_batch(call: Any, info: Any, in_dims: tuple[Any, ...], *arguments: Any) -> tuple[Tensor, int]:
    """vmap of ``call``, gguf_mm or its operator."""
    x, weight, bias, *rest = arguments
    of_x, of_weight, of_bias, *of_rest = in_dims

    def multiply(x: Tensor, weight: Tensor, _: None, bias: Tensor | None, *rest: Any) -> Tensor:
        return call(x, weight, bias, *rest)  # type: ignore[no-any-return]

    dims = of_x, of_weight, None, of_bias, *of_rest
    return batched(multiply, _qao.gguf_mm.default, info.batch_size, dims, x, weight, None, bias, *rest)


def gguf_mm(x: Tensor, weight: Tensor, bias: Tensor | None, qtype: int, batch_invariant: bool = False) -> Tensor:
    """y = x · Wᵀ + bias with a GGUF weight. x and bias have gradients."""
    batch_invariant = batch_invariant or MODE.on
    wanted = torch.is_grad_enabled() and (x.requires_grad or (bias is not None and bias.requires_grad))
    if transformed() or wanted:
        if torch.compiler.is_dynamo_compiling():
            return TRACED(x, weight, bias, qtype, batch_invariant)  # type: ignore[no-any-return]
        return _Product.apply(x, bias, weight, qtype, batch_invariant)  # type: ignore[no-untyped-call, no-any-return]
    return _qao.gguf_mm.default(x, weight, bias, qtype, batch_invariant)  # type: ignore[no-any-return]


TRACED = traced(_qao.gguf_mm.default, gguf_mm)


def dequantize_gguf(weight: Tensor, qtype: int, dtype: torch.dtype) -> Tensor:
    """W [N, K] in a float dtype, computed in float32 as the formats define it, bit for bit, and rounded once."""
    return _qao.dequantize_gguf.default(weight, qtype, dtype)  # type: ignore[no-any-return]


def gguf_embedding(ids: Tensor, weight: Tensor, qtype: int, dtype: torch.dtype) -> Tensor:
    """Rows ``ids`` [...] (int32 or int64, 0..N - 1) of W: [..., K] in ``dtype``, a float dtype."""
    return _qao.gguf_embedding.default(ids, weight, qtype, dtype)  # type: ignore[no-any-return]

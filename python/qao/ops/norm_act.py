"""Differentiable ``add_rms_norm``, ``silu_mul`` and ``swiglu``, used between linear layers.

The raw operators of the same names (``torch.ops.qao``) have no gradients. On Hopper the kernels use programmatic
dependent launch (PDL) with the preceding kernel and with qao's following GEMM.
"""

from __future__ import annotations

from typing import Any

import torch
from torch import Tensor

from .autograd import traced, transformed

_add_rms_norm = torch.ops.qao.add_rms_norm.default
_silu_mul = torch.ops.qao.silu_mul.default
_swiglu = torch.ops.qao.swiglu.default
_DTYPES = torch.float32, torch.float16, torch.bfloat16


class _AddRmsNorm(torch.autograd.Function):
    @staticmethod
    def forward(
        ctx: Any, x: Tensor, residual: Tensor | None, weight: Tensor | None, eps: float
    ) -> tuple[Tensor, Tensor]:
        y, h = _add_rms_norm(x, residual, weight, eps)
        ctx.save_for_backward(h, weight)
        ctx.eps = eps
        return y, h

    @staticmethod
    def backward(ctx: Any, *grads: Any) -> tuple[Tensor | None, ...]:
        grad_y, grad_h = (grad.float() for grad in grads)
        h, weight = ctx.saved_tensors
        factor = (h.float().square().mean(-1, keepdim=True) + ctx.eps).rsqrt()
        normal = h.float() * factor
        grad_normal = grad_y if weight is None else grad_y * weight.float()
        along = (grad_normal * normal).mean(-1, keepdim=True)
        grad_x = (grad_h + factor * (grad_normal - normal * along)).to(h.dtype)
        grad_weight = None
        if ctx.needs_input_grad[2]:
            grad_weight = (grad_y * normal).reshape(-1, h.shape[-1]).sum(0).to(weight.dtype)
        return grad_x, grad_x if ctx.needs_input_grad[1] else None, grad_weight, None


class _SiluMul(torch.autograd.Function):
    @staticmethod
    def forward(ctx: Any, gate: Tensor, up: Tensor) -> Tensor:
        ctx.save_for_backward(gate, up)
        return _silu_mul(gate, up)  # type: ignore[no-any-return]

    @staticmethod
    def backward(ctx: Any, *grads: Any) -> tuple[Tensor, ...]:
        gate, up = (t.float() for t in ctx.saved_tensors)
        grad, sigmoid = grads[0].float(), gate.sigmoid()
        grad_gate = grad * up * sigmoid * (1 + gate * (1 - sigmoid))
        return grad_gate.to(grads[0].dtype), (grad * gate * sigmoid).to(grads[0].dtype)


class _Swiglu(torch.autograd.Function):
    @staticmethod
    def forward(ctx: Any, x: Tensor, alpha: float, limit: float, shift: float, interleaved: bool) -> Tensor:
        ctx.save_for_backward(x)
        ctx.gate = alpha, limit, shift, interleaved
        return _swiglu(x, alpha, limit, shift, interleaved)  # type: ignore[no-any-return]

    @staticmethod
    def backward(ctx: Any, *grads: Any) -> tuple[Tensor | None, ...]:
        (x,) = ctx.saved_tensors
        alpha, limit, shift, interleaved = ctx.gate
        grad, (gate, up) = grads[0].float(), _gate_and_up(x.float(), interleaved)
        g, u = gate.clamp(max=limit), up.clamp(-limit, limit) + shift
        sigmoid = (alpha * g).sigmoid()
        grad_gate = (grad * u * sigmoid * (1 + alpha * g * (1 - sigmoid))).where(gate <= limit, 0)
        grad_up = (grad * g * sigmoid).where(up.abs() <= limit, 0)
        both = torch.stack((grad_gate, grad_up), -1).flatten(-2) if interleaved else torch.cat((grad_gate, grad_up), -1)
        return both.to(x.dtype), None, None, None, None


def _gate_and_up(x: Tensor, interleaved: bool) -> tuple[Tensor, Tensor]:
    gate, up = (x[..., ::2], x[..., 1::2]) if interleaved else x.chunk(2, -1)
    return gate, up


def _wants_gradient(*tensors: Tensor | None) -> bool:
    return torch.is_grad_enabled() and any(isinstance(t, Tensor) and t.requires_grad for t in tensors)


# ---- forward-mode and torch.func: torch operators, which have all derivatives ----------------------------------------


def _plain_add_rms_norm(x: Tensor, residual: Tensor | None, weight: Tensor | None, eps: float) -> tuple[Tensor, Tensor]:
    _check("add_rms_norm", x, residual)
    h = x.clone() if residual is None else x + residual
    y = h.float() * (h.float().square().mean(-1, keepdim=True) + eps).rsqrt()
    return (y if weight is None else y * weight.float()).to(h.dtype), h


def _plain_silu_mul(gate: Tensor, up: Tensor) -> Tensor:
    _check("silu_mul", gate, up)
    return (torch.nn.functional.silu(gate.float()) * up.float()).to(gate.dtype)


def plain_swiglu(x: Tensor, alpha: float, limit: float, shift: float, interleaved: bool) -> Tensor:
    gate, up = _gate_and_up(x.float(), interleaved)
    gate, up = gate.clamp(max=limit), up.clamp(-limit, limit)
    return (gate * (alpha * gate).sigmoid() * (up + shift)).to(x.dtype)


def _check(name: str, x: Tensor, other: Tensor | None) -> None:
    other = x if other is None else other
    if x.dtype not in _DTYPES or (x.dtype, x.shape) != (other.dtype, other.shape):
        raise RuntimeError(
            f"qao::{name}: both tensors must have one shape and one dtype (float32, float16 or bfloat16). Got "
            f"{x.dtype}{list(x.shape)} and {other.dtype}{list(other.shape)}. Cast or reshape them."
        )


def add_rms_norm(x: Tensor, residual: Tensor | None, weight: Tensor | None, eps: float) -> tuple[Tensor, Tensor]:
    """The residual stream and its RMSNorm: h = x + residual, y = h / sqrt(mean(h²) + eps) * weight; returns (y, h).

    Args:
        x: [..., K], float32, float16 or bfloat16; any strides.
        residual: Shape and dtype of x, or None for zeros; h is then a copy of x.
        weight: [K] in a float dtype, contiguous; None for ones.
        eps: Added to the mean square.

    Returns:
        y and h, [..., K], contiguous, in x's dtype. h is rounded to that dtype before the norm, which is computed in
        float32 and rounded once.

    Raises:
        RuntimeError: A shape, dtype or device does not fit; the message lists all operands and the remedy.
    """
    if transformed():
        return _plain_add_rms_norm(x, residual, weight, eps)
    if _wants_gradient(x, residual, weight):
        if torch.compiler.is_dynamo_compiling():
            return _traced_add_rms_norm(x, residual, weight, eps)  # type: ignore[no-any-return]
        return _AddRmsNorm.apply(x, residual, weight, eps)  # type: ignore[no-untyped-call, no-any-return]
    return _add_rms_norm(x, residual, weight, eps)  # type: ignore[no-any-return]


def silu_mul(gate: Tensor, up: Tensor) -> Tensor:
    """gate * sigmoid(gate) * up, computed in float32 and rounded once.

    Args:
        gate, up: [..., K], float32, float16 or bfloat16, the same shape and dtype; any strides, such as the halves of
            one tensor.

    Returns:
        [..., K], contiguous, in the dtype of gate.

    Raises:
        RuntimeError: A shape, dtype or device does not fit; the message lists all operands and the remedy.
    """
    if transformed():
        return _plain_silu_mul(gate, up)
    if _wants_gradient(gate, up):
        if torch.compiler.is_dynamo_compiling():
            return _traced_silu_mul(gate, up)  # type: ignore[no-any-return]
        return _SiluMul.apply(gate, up)  # type: ignore[no-untyped-call, no-any-return]
    return _silu_mul(gate, up)  # type: ignore[no-any-return]


def swiglu(x: Tensor, alpha: float, limit: float, shift: float, interleaved: bool) -> Tensor:
    """g sigmoid(alpha g) (u + shift), in float32, rounded once; g = min(gate, limit), u = up clamped to ±limit.

    GPT-OSS uses 1.702, 7.0, 1.0, True.

    Args:
        x: [..., 2 K], float32, float16 or bfloat16; any strides.
        alpha, limit: Positive; ``limit`` may be infinite.
        interleaved: Columns of gate and up alternate, gate first. Otherwise gate is the first half.

    Returns:
        [..., K], contiguous, in x's dtype.

    Raises:
        RuntimeError: A shape, dtype or number does not fit; the message lists all operands and the remedy.
    """
    if transformed():
        return plain_swiglu(x, alpha, limit, shift, interleaved)
    if _wants_gradient(x):
        if torch.compiler.is_dynamo_compiling():
            return _traced_swiglu(x, alpha, limit, shift, interleaved)  # type: ignore[no-any-return]
        arguments = x, alpha, limit, shift, interleaved
        return _Swiglu.apply(*arguments)  # type: ignore[no-untyped-call, no-any-return]
    return _swiglu(x, alpha, limit, shift, interleaved)  # type: ignore[no-any-return]


_traced_add_rms_norm = traced(_add_rms_norm, add_rms_norm)
_traced_silu_mul = traced(_silu_mul, silu_mul)
_traced_swiglu = traced(_swiglu, swiglu)

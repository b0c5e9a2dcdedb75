"""Patterns of ATen operators that the passes replace: RMSNorm with a residual, and SiLU gates.

Another program that names its norms in another way passes its own function of the type ``FindNorm`` to the passes.
"""

from __future__ import annotations

from collections.abc import Callable, Iterator
from typing import Any, NamedTuple

import torch
from torch.fx import Node

from .nodes import alike, aten, is_call, is_input, value

_cast = torch.ops.prims.convert_element_type.default
_mul, _add = aten.mul.Tensor, aten.add.Tensor
_16_BITS = torch.bfloat16, torch.float16


class Norm(NamedTuple):
    """RMSNorm of ``x``, or of x + residual: y = h / sqrt(mean(h²) + eps) * weight."""

    x: Node
    residual: Node | None
    weight: Node | None
    eps: float
    total: Node | None  # x + residual
    last: Node  # behind which x and residual exist

    @property
    def weights(self) -> list[Node]:
        """The weight, if there is one."""
        return [] if self.weight is None else [self.weight]


class Gate(NamedTuple):
    """SiLU(gate) * up."""

    gate: Node
    up: Node


FindNorm = Callable[[Node], Norm | None]  # the norm that makes a node; None if none does


def rms_norm(y: Node) -> Norm | None:
    """The norm that makes ``y``: weight * normalized.to(dtype), as Llama has it, or (weight * normalized).to(dtype)."""
    if is_call(y, _cast):
        pairs = ((_uncast(weight) or weight, normalized) for weight, normalized in _either(y.args[0], _mul))
    else:
        pairs = ((weight, _uncast(normalized)) for weight, normalized in _either(y, _mul))
    for weight, normalized in pairs:
        found = _normalized(normalized)
        if found is None or not is_input(weight):
            continue
        x, eps = found
        if suits(weight, x) and value(weight).dtype == value(x).dtype == value(y).dtype:
            summands = _summands(x)
            first, residual = summands or (x, None)
            return Norm(first, residual, weight, eps, x if summands else None, x)
    return None


def suits(weight: Node, x: Node) -> bool:
    """Whether qao's operators take the weight of a norm of ``x``."""
    return value(weight).shape == value(x).shape[-1:] and value(weight).is_contiguous()


def silu_gate(y: Any) -> Gate | None:
    """The gate that makes ``y`` of two tensors of one shape and dtype."""
    for up, silu in _either(y, _mul):
        gate = _silu(silu)
        if isinstance(gate, Node) and isinstance(up, Node) and alike(gate, up, y):
            return Gate(gate, up)
    return None


def _either(node: Any, target: Any) -> Iterator[tuple[Any, Any]]:
    """Both orders of the operands of a commutative operator."""
    if is_call(node, target) and len(node.args) == 2 and not node.kwargs:
        yield node.args
        yield node.args[::-1]


def _uncast(node: Any) -> Any:
    return node.args[0] if is_call(node, _cast) else None


def _normalized(node: Any) -> tuple[Node, float] | None:
    """x and eps of x * rsqrt(mean(x²) + eps) in float32, of a 16-bit x."""
    for wide, factor in _either(node, _mul):
        x = _uncast(wide)
        if x is None or value(x).dtype not in _16_BITS or not is_call(factor, aten.rsqrt.default):
            continue
        for mean, eps in _either(factor.args[0], _add):
            if not isinstance(eps, float) or not is_call(mean, aten.mean.dim):
                continue
            square, dims, *keep = mean.args
            last = [value(x).dim() - 1]
            if is_call(square, aten.pow.Tensor_Scalar) and square.args == (wide, 2) and keep == [True]:
                if dims in ([-1], last):
                    return x, eps
    return None


def _summands(node: Node) -> tuple[Node, Node] | None:
    """Both operands of an addition of two tensors of one shape and dtype."""
    for residual, x in _either(node, _add):
        if isinstance(x, Node) and isinstance(residual, Node):
            return (x, residual) if alike(x, residual, node) else None
    return None


def _silu(node: Any) -> Any:
    """x of (x / (1 + exp(-x))).to(dtype) in float32, which is what SiLU is decomposed to."""
    ratio = _uncast(node)
    if not is_call(ratio, aten.div.Tensor):
        return None
    wide, below = ratio.args
    for exponential, one in _either(below, _add):
        if one == 1 and is_call(exponential, aten.exp.default) and is_call(exponential.args[0], aten.neg.default):
            return _uncast(wide) if exponential.args[0].args[0] is wide else None
    return None

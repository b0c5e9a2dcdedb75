"""Sizes inferred from packed 4-bit weights, so that calls can omit them."""

from __future__ import annotations

from typing import Any

import pytest
import qao
import torch
from ops_schemes import FP4, INT4_SCHEMES, Scheme, Weight
from ops_support import check_product, randn
from qao.ops import packed_shape as tiles
from torch import Tensor, nn

PACKED = (*INT4_SCHEMES, FP4)
every_packed = pytest.mark.parametrize("scheme", PACKED, ids=lambda scheme: scheme.word)


def without_sizes(weight: Weight) -> tuple[Any, ...]:
    """The arguments, less N, K and group_size, which come last."""
    return weight.arguments[:-3]


@pytest.mark.parametrize("n, k", [(16, 64), (48, 192), (32, 320), (64, 1024)])
@every_packed
def test_the_same_bits(n: int, k: int, scheme: Scheme, device: str) -> None:
    for fmt in scheme.formats:
        weight = scheme.make_weight(n, k, fmt, device)
        arguments = without_sizes(weight)
        for m in (1, 5, 70):
            x = randn(m, k, dtype=torch.bfloat16, device=device)
            bias = randn(n, dtype=torch.float32, device=device)
            y = scheme.op(x, *weight.operands, bias, *arguments)
            check_product(y, x, weight, bias)
            size = k if fmt.group_size == -1 else fmt.group_size
            if scheme is FP4 or tiles.group_size_of(k, -(-k // size)) == size:
                assert torch.equal(y, scheme.mm(x, weight, bias))
            fake = scheme.op(*(t.to("meta") for t in (x, *weight.operands, bias)), *_on_meta(arguments))
            assert fake.shape == y.shape and fake.dtype == y.dtype


def _on_meta(arguments: tuple[Any, ...]) -> tuple[Any, ...]:
    return tuple(value.to("meta") if isinstance(value, Tensor) else value for value in arguments)


def derivatives(scheme: Scheme, weight: Weight, arguments: tuple[Any, ...], device: str) -> list[Tensor]:
    """By backward, by torch.func, batch-invariant, and compiled."""
    x = randn(3, 256, dtype=torch.float32, device=device).requires_grad_()

    def loss(x: Tensor) -> Tensor:
        return scheme.differentiable(x, *weight.operands, None, *arguments).square().sum()

    found = [torch.autograd.grad(loss(x), x)[0], torch.func.grad(loss)(x.detach())]
    with qao.ops.batch_invariant():
        found.append(torch.autograd.grad(loss(x), x)[0])
    torch._dynamo.reset()
    compiled = torch.compile(loss, backend="aot_eager", fullgraph=True)
    return [*found, torch.autograd.grad(compiled(x), x)[0]]


@every_packed
def test_derivatives(scheme: Scheme, device: str) -> None:
    for fmt in scheme.few_formats:
        weight = scheme.make_weight(48, 256, fmt, device)
        given, left_out = (derivatives(scheme, weight, a, device) for a in (weight.arguments, without_sizes(weight)))
        assert all(torch.equal(a, b) for a, b in zip(left_out, given, strict=True))


@every_packed
def test_other_sizes_must_be_passed(scheme: Scheme, device: str) -> None:
    weight = scheme.make_weight(40, 100, device=device)
    x = randn(3, 100, dtype=torch.float32, device=device)
    with pytest.raises(RuntimeError, match=r"x must have shape \[..., in_features\]. .*in_features: 128"):
        scheme.op(x, *weight.operands, None, *without_sizes(weight))
    with pytest.raises(RuntimeError, match="weight must have 3 dimensions and scales 4"):
        scheme.op(x, weight.operands[0][0], weight.operands[1], None, *without_sizes(weight))


@pytest.mark.parametrize("scheme", [qao.Int4WeightOnly(), qao.Int8DynamicActivationInt4Weight(), qao.Fp4WeightOnly()])
def test_layers_tell_what_is_needed(scheme: qao.Scheme, device: str) -> None:
    for n, k, count in ((64, 128, 0), (40, 128, 3), (64, 100, 3)):
        layer = qao.QuantLinear.from_linear(nn.Linear(k, n).to(device), scheme)
        graph = torch.fx.symbolic_trace(nn.Sequential(layer)).graph
        (call,) = (node for node in graph.nodes if node.op == "call_function")
        assert len(call.args[1]) == count
        x = torch.randn(3, k, device=device)
        given = scheme.mm(x, layer._parameters, scheme.sizes(n, k))
        assert torch.equal(layer(x), given)

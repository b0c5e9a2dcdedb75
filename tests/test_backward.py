"""Changes between forward and backward of a layer: the results and errors of nn.Linear."""

from __future__ import annotations

import copy
from collections.abc import Callable
from typing import Any

import pytest
import qao
import torch
from torch import Tensor, nn
from torch._dynamo import compiled_autograd
from torch.utils.checkpoint import checkpoint

SCHEMES = [qao.Int4WeightOnly(), qao.Int8DynamicActivationInt8Weight(), qao.Float8WeightOnly()]
pytestmark = pytest.mark.parametrize("scheme", SCHEMES, ids=str)


def make(scheme: qao.Scheme, device: str) -> tuple[qao.QuantLinear, Tensor]:
    torch.manual_seed(0)
    layer = qao.QuantLinear.from_linear(nn.Linear(64, 48).to(device), scheme)
    return layer, torch.randn(3, 64, device=device, requires_grad=True)


def gradient(layer: nn.Module, x: Tensor) -> Tensor:
    return torch.autograd.grad(layer(x).square().sum(), x)[0]


def test_backward_runs_again_if_the_graph_is_kept(scheme: qao.Scheme, device: str) -> None:
    layer, x = make(scheme, device)
    expected, loss = gradient(layer, x), layer(x).square().sum()
    for _ in range(2):
        assert torch.equal(torch.autograd.grad(loss, x, retain_graph=True)[0], expected)


def test_backward_does_not_run_again_otherwise(scheme: qao.Scheme, device: str) -> None:
    layer, x = make(scheme, device)
    loss = layer(x).sum()  # which needs nothing that is freed
    loss.backward()
    with pytest.raises(RuntimeError, match="backward through the graph a second time"):
        loss.backward()


def test_x_and_y_may_change(scheme: qao.Scheme, device: str) -> None:
    """Neither is needed for a gradient of a frozen weight; nn.Linear saves neither."""
    layer, x = make(scheme, device)
    expected = torch.autograd.grad(layer(x).sum(), x)[0]
    inner = x * 1
    y = layer(inner)
    with torch.no_grad():
        inner.zero_()
    y.mul_(1)
    assert torch.equal(torch.autograd.grad(y.sum(), x)[0], expected)


CHANGES: dict[str, Callable[[qao.QuantLinear], object]] = {
    "weight": lambda layer: layer.qweight.view(torch.int8).copy_(layer.qweight.view(torch.int8).clone()),
    "scales": lambda layer: layer.scales.mul_(1),
    "load_state_dict": lambda layer: layer.load_state_dict(layer.state_dict()),
}


@pytest.mark.parametrize("change", CHANGES.values(), ids=CHANGES)
@pytest.mark.parametrize("twice", [False, True], ids=["gradient", "second derivative"])
def test_the_weight_may_not_change(change: Any, twice: bool, scheme: qao.Scheme, device: str) -> None:
    layer, x = make(scheme, device)
    y = layer(x)
    with torch.no_grad():
        change(layer)
    with pytest.raises(
        RuntimeError, match=rf"qao::{scheme.word}_mm: .* modified by an inplace operation .* Run it again"
    ):
        torch.autograd.grad(y.square().sum(), x, create_graph=twice)
    gradient(layer, x)


def test_the_weight_may_be_replaced(scheme: qao.Scheme, device: str) -> None:
    """The gradient is that of the weight used in forward."""
    layer, x = make(scheme, device)
    expected, loss = gradient(layer, x), layer(x).square().sum()
    layer.set_packed(layer.requantize(torch.zeros(48, 64, device=device)))
    assert torch.equal(torch.autograd.grad(loss, x)[0], expected)


@pytest.mark.parametrize("use_reentrant", [False, True])
def test_checkpointing_looks_too(use_reentrant: bool, scheme: qao.Scheme, device: str) -> None:
    """Forward runs again in backward with the weight's value at that time, as nn.Linear's does."""
    layer, x = make(scheme, device)
    expected = gradient(layer, x)
    loss = checkpoint(layer, x, use_reentrant=use_reentrant).square().sum()
    loss.backward()
    assert torch.equal(x.grad, expected)  # type: ignore[arg-type]


def test_a_second_derivative(scheme: qao.Scheme, device: str) -> None:
    """Second derivative, of ‖dx‖² for loss = Σ y³ / 3, against the float layer with the same y."""
    layer, x = make(scheme, device)
    y = layer(x)
    (dx,) = torch.autograd.grad((y**3 / 3).sum(), x, create_graph=True)
    (actual,) = torch.autograd.grad(dx.square().sum(), x)
    w = layer.dequantize(torch.float64)
    y64 = y.detach().double()
    # dx = y² W, and d‖dx‖² / dx = ((2 dx Wᵀ) · 2 y) W
    expected = ((2 * (y64**2 @ w) @ w.T) * 2 * y64) @ w
    assert (actual - expected).norm() <= 1e-5 * expected.norm()


def test_compiled_autograd(scheme: qao.Scheme, device: str) -> None:
    layer, x = make(scheme, device)
    expected, loss = gradient(layer, x), layer(x).square().sum()
    torch._dynamo.reset()
    with compiled_autograd._enable(torch.compile(backend="eager", fullgraph=True)):
        loss.backward()
    assert torch.equal(x.grad, expected)  # type: ignore[arg-type]


def test_weights_of_inference_mode(scheme: qao.Scheme, device: str) -> None:
    layer, _ = make(scheme, device)
    with torch.inference_mode():
        layer = copy.deepcopy(layer)
    x = torch.randn(3, 64, device=device, requires_grad=True)
    with torch.no_grad():
        expected = layer(x)
    with pytest.raises(RuntimeError, match=rf"qao::{scheme.word}_mm: .* inference tensors.* copy.deepcopy"):
        layer(x)
    copied = copy.deepcopy(layer)
    assert torch.equal(copied(x), expected)
    gradient(copied, x)

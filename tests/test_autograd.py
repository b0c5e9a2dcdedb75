"""Gradients of x and bias against float64; weights are frozen."""

from __future__ import annotations

from dataclasses import replace
from typing import Any

import pytest
import torch
from accuracy import check_close, tolerance, truth
from ops_schemes import DTYPES, FLOAT, PRODUCTS, Scheme
from ops_support import check_product, randn
from torch import Tensor
from torch.utils.checkpoint import checkpoint

pytestmark = pytest.mark.parametrize("scheme", PRODUCTS, ids=lambda scheme: scheme.word)


def check_bias_gradient(grad: Tensor, dy: Tensor, bias: Tensor) -> None:
    """Column sums of dy [M, N]: as a product with a row of ones."""
    assert grad.dtype == bias.dtype
    ones = torch.ones(1, dy.shape[0], dtype=dy.dtype, device=dy.device)
    sums = dy.double().T
    # The sum is made in dy's dtype and then rounded to the bias's.
    rounding = torch.finfo(bias.dtype).eps * sums.sum(1).abs()
    assert ((grad.double() - sums.sum(1)).abs() <= tolerance(ones, sums).elements[0] + rounding).all()


@pytest.mark.parametrize("m", [1, 3, 40])
@pytest.mark.parametrize("bias_dtype", [None, *DTYPES], ids=str)
@pytest.mark.parametrize("x_dtype", DTYPES, ids=str)
def test_gradients(x_dtype: torch.dtype, bias_dtype: torch.dtype | None, m: int, scheme: Scheme, device: str) -> None:
    for fmt in scheme.few_formats:
        weight = scheme.make_weight(100, 200, fmt, device)
        x = randn(m, 200, dtype=x_dtype, device=device).requires_grad_()
        bias = None if bias_dtype is None else randn(100, dtype=bias_dtype, device=device).requires_grad_()
        y = scheme.mm_with_grad(x, weight, bias)
        check_product(y.detach(), x.detach(), weight, None if bias is None else bias.detach())
        dy = randn(m, 100, dtype=x_dtype, device=device, seed=3)
        y.backward(dy)
        assert x.grad is not None
        check_close(x.grad, dy, weight.dense.T)
        if bias is not None:
            assert bias.grad is not None
            check_bias_gradient(bias.grad, dy, bias.detach())


@pytest.mark.parametrize("shape", [(200,), (2, 3, 200), (2, 0, 200), (0, 200)], ids=str)
def test_gradient_has_the_shape_of_x(shape: tuple[int, ...], scheme: Scheme, device: str) -> None:
    weight = scheme.make_weight(50, 200, device=device)
    x = randn(*shape, dtype=torch.float32, device=device).requires_grad_()
    bias = randn(50, dtype=torch.float32, device=device).requires_grad_()
    y = scheme.mm_with_grad(x, weight, bias)
    dy = randn(*y.shape, dtype=torch.float32, device=device, seed=3)
    y.backward(dy)
    assert x.grad is not None and bias.grad is not None
    check_close(x.grad, dy, weight.dense.T)
    assert bias.grad.shape == (50,)
    if dy.numel():
        check_bias_gradient(bias.grad, dy.reshape(-1, 50), bias.detach())
    else:
        assert (bias.grad == 0).all()


def test_directional_derivative(scheme: Scheme, device: str) -> None:
    """y is linear in x: its difference along v, in float32, is the inner product of the gradient and v."""
    if scheme.few_formats[0].activation != FLOAT:
        pytest.skip("rounding x to eight bits is not linear; its gradient is the identity's")
    for fmt in scheme.few_formats:
        weight = scheme.make_weight(60, 130, fmt, device)
        x, v = (randn(7, 130, dtype=torch.float32, device=device, seed=s).requires_grad_() for s in (0, 1))
        dy = randn(7, 60, dtype=torch.float32, device=device, seed=2)
        (dx,) = torch.autograd.grad(scheme.mm_with_grad(x, weight), x, dy)
        x, v = x.detach(), v.detach()
        plus, minus = x + v, x - v
        difference = ((scheme.mm(plus, weight).double() - scheme.mm(minus, weight)) / 2 * dy).sum()
        step = (plus.double() - minus) / 2  # what float32 made of v
        allowed = (tolerance(plus, weight.dense).elements + tolerance(minus, weight.dense).elements) / 2 * dy.abs()
        allowed_dx = tolerance(dy, weight.dense.T).elements * step.abs()
        assert abs(difference - (dx.double() * step).sum()) <= allowed.sum() + allowed_dx.sum()


def test_only_what_wants_a_gradient_gets_one(scheme: Scheme, device: str) -> None:
    weight = scheme.make_weight(50, 200, device=device)
    for x_wants, bias_wants in ((True, False), (False, True), (False, False)):
        x = randn(3, 200, dtype=torch.float32, device=device).requires_grad_(x_wants)
        bias = randn(50, dtype=torch.float32, device=device).requires_grad_(bias_wants)
        y = scheme.mm_with_grad(x, weight, bias)
        assert y.requires_grad == (x_wants or bias_wants)
        if y.requires_grad:
            y.sum().backward()
        assert (x.grad is not None) == x_wants
        assert (bias.grad is not None) == bias_wants


def test_frozen_operands_get_no_gradient(scheme: Scheme, device: str) -> None:
    """Even scales with requires_grad=True, which checkpoint loaders may set."""
    weight = scheme.make_weight(50, 200, device=device)
    scales = weight.operands[1].requires_grad_()
    x = randn(3, 200, dtype=torch.float32, device=device).requires_grad_()
    scheme.mm_with_grad(x, weight).sum().backward()
    assert scales.grad is None
    assert x.grad is not None


def test_hooks_of_saved_tensors_get_no_weight(scheme: Scheme, device: str) -> None:
    """save_on_cpu, for one, would copy it in every forward."""
    weight = scheme.make_weight(50, 200, device=device)
    x = randn(3, 200, dtype=torch.float32, device=device).requires_grad_()
    saved: list[torch.Tensor] = []
    with torch.autograd.graph.saved_tensors_hooks(lambda tensor: saved.append(tensor), lambda nothing: nothing):
        y = scheme.mm_with_grad(x, weight)
    (grad,) = torch.autograd.grad(y.sum(), x)
    assert not saved
    assert grad.shape == x.shape


def test_no_weight_is_the_operators_error(scheme: Scheme, device: str) -> None:
    weight = scheme.make_weight(50, 200, device=device)
    x = randn(3, 200, dtype=torch.float32, device=device).requires_grad_()
    nothing = replace(weight, operands=(None, *weight.operands[1:]))
    with pytest.raises(RuntimeError, match=f"{scheme.word}_mm.*weight must be a tensor, not None"):
        scheme.mm_with_grad(x, nothing)


@pytest.mark.parametrize("context", [torch.no_grad, torch.inference_mode])
def test_without_grad_mode_nothing_is_recorded(context: Any, scheme: Scheme, device: str) -> None:
    weight = scheme.make_weight(50, 200, device=device)
    x = randn(3, 200, dtype=torch.float32, device=device).requires_grad_()
    with context():
        y = scheme.mm_with_grad(x, weight)
        assert not y.requires_grad
        check_product(y, x.detach(), weight)


@pytest.mark.parametrize("use_reentrant", [False, True])
def test_checkpointing(use_reentrant: bool, scheme: Scheme, device: str) -> None:
    up, down = scheme.make_weight(96, 64, device=device), scheme.make_weight(64, 96, device=device)

    def block(x: Tensor) -> Tensor:
        return scheme.mm_with_grad(torch.relu(scheme.mm_with_grad(x, up)), down)

    x = randn(5, 64, dtype=torch.float32, device=device).requires_grad_()
    (expected,) = torch.autograd.grad(block(x).square().sum(), x)
    checkpoint(block, x, use_reentrant=use_reentrant).square().sum().backward()
    assert x.grad is not None
    assert torch.equal(x.grad, expected)


def test_a_weight_used_twice(scheme: Scheme, device: str) -> None:
    weight = scheme.make_weight(128, 128, device=device)
    x = randn(5, 128, dtype=torch.float32, device=device).requires_grad_()
    y = scheme.mm_with_grad(scheme.mm_with_grad(x, weight), weight)
    dy = randn(5, 128, dtype=torch.float32, device=device, seed=3)
    y.backward(dy)
    assert x.grad is not None
    inner = scheme.mm(x.detach(), weight)
    check_product(y.detach(), inner, weight)
    plain = dy @ weight.dense.float()
    check_close(x.grad, plain, weight.dense.T)


def test_second_derivative(scheme: Scheme, device: str) -> None:
    """dx is linear in dy, with W again as its derivative."""
    weight = scheme.make_weight(50, 200, device=device)
    x = randn(3, 200, dtype=torch.float32, device=device).requires_grad_()
    dy = randn(3, 50, dtype=torch.float32, device=device).requires_grad_()
    (dx,) = torch.autograd.grad(scheme.mm_with_grad(x, weight), x, dy, create_graph=True)
    v = randn(3, 200, dtype=torch.float32, device=device, seed=4)
    (ddy,) = torch.autograd.grad(dx, dy, v)
    check_close(ddy, v, weight.dense)


def test_the_raw_op_warns_that_it_has_no_gradient(scheme: Scheme, device: str) -> None:
    """torch.ops.qao.*_mm have no autograd formula, and torch warns when one is differentiated."""
    weight = scheme.make_weight(50, 200, device=device)
    x = randn(3, 200, dtype=torch.float32, device=device).requires_grad_()
    with pytest.warns(UserWarning, match=f"qao::{scheme.word}_mm: an autograd kernel was not registered"):
        scheme.mm(x, weight).sum().backward()
    assert x.grad is None


def test_the_gradient_of_a_loss(scheme: Scheme, device: str) -> None:
    """A loss that depends on y: the gradient propagates the error of y and adds none."""
    weight = scheme.make_weight(50, 200, device=device)
    x = randn(3, 200, dtype=torch.float32, device=device).requires_grad_()
    seen, slack = weight.activation.seen(x.detach()), weight.slack(x.detach())
    x64 = seen.clone().requires_grad_()
    scheme.mm_with_grad(x, weight).square().sum().backward()
    truth(x64, weight.dense).square().sum().backward()
    assert x.grad is not None and x64.grad is not None
    dy = 2 * truth(seen, weight.dense)
    allowed_dy = 2 * tolerance(x.detach(), weight.dense, None, seen, slack).elements
    allowed = allowed_dy @ weight.dense.abs() + tolerance(dy.float(), weight.dense.T).elements
    assert ((x.grad.double() - x64.grad).abs() <= allowed).all()

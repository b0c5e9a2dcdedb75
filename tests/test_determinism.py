"""Determinism: the same call with the same number of threads gives the same bits."""

from __future__ import annotations

import pytest
import torch
from ops_schemes import DTYPES, PRODUCTS, Scheme
from ops_support import bits, randn

pytestmark = pytest.mark.parametrize("scheme", PRODUCTS, ids=lambda scheme: scheme.word)


@pytest.mark.every_isa
@pytest.mark.parametrize("x_dtype", DTYPES, ids=str)
@pytest.mark.parametrize("m", [1, 3, 16, 40, 130])
def test_a_hundred_runs(m: int, x_dtype: torch.dtype, scheme: Scheme, device: str) -> None:
    weight = scheme.make_weight(17, 640, scheme.few_formats[1], device)
    x = randn(m, 640, dtype=x_dtype, device=device)
    bias = randn(17, dtype=torch.float32, device=device)
    first = bits(scheme.mm(x, weight, bias))
    for _ in range(100):
        assert torch.equal(bits(scheme.mm(x, weight, bias)), first)


def test_other_calls_in_between(scheme: Scheme, device: str) -> None:
    weights = [scheme.make_weight(n, k, fmt, device) for n, k in ((33, 100), (100, 640)) for fmt in scheme.few_formats]
    sizes = zip(weights, (1, 40, 5, 17), (*DTYPES, torch.bfloat16), strict=True)
    inputs = [randn(m, w.k, dtype=dtype, device=device) for w, m, dtype in sizes]
    first = [bits(scheme.mm(x, w)) for x, w in zip(inputs, weights, strict=True)]
    for _ in range(20):
        for x, w, y in zip(inputs, weights, first, strict=True):
            assert torch.equal(bits(scheme.mm(x, w)), y)


@pytest.mark.parametrize("x_dtype", DTYPES, ids=str)
def test_gradients(x_dtype: torch.dtype, scheme: Scheme, device: str) -> None:
    weight = scheme.make_weight(100, 640, device=device)
    x = randn(17, 640, dtype=x_dtype, device=device).requires_grad_()
    dy = randn(17, 100, dtype=x_dtype, device=device)
    gradients = [torch.autograd.grad(scheme.mm_with_grad(x, weight), x, dy)[0] for _ in range(20)]
    assert all(torch.equal(bits(g), bits(gradients[0])) for g in gradients)

"""opcheck and torch.compile: one graph, no recompilation when M changes, in every inference mode."""

from __future__ import annotations

from collections.abc import Callable, Iterator
from contextlib import AbstractContextManager, nullcontext
from typing import Any

import pytest
import torch
from ops_schemes import DTYPES, FLOAT, INT4, PRODUCTS, Int4Format, Scheme, Weight
from ops_support import check_product, randn
from torch import Tensor
from torch._dynamo.testing import CompileCounterWithBackend

UTILITIES = ("test_schema", "test_autograd_registration", "test_faketensor", "test_aot_dispatch_dynamic")
scheme_parameter = pytest.mark.parametrize("scheme", PRODUCTS, ids=lambda scheme: scheme.word)


@pytest.fixture(autouse=True)
def fresh_dynamo() -> Iterator[None]:
    torch._dynamo.reset()
    yield
    torch._dynamo.reset()


# ---- opcheck ---------------------------------------------------------------------------------------------------------

X_SHAPES = ((1, 100), (5, 100), (0, 100), (100,), (2, 3, 100))


@pytest.mark.parametrize("shape", X_SHAPES, ids=str)
@pytest.mark.parametrize("x_dtype", DTYPES, ids=str)
@scheme_parameter
def test_opcheck_mm(scheme: Scheme, x_dtype: torch.dtype, shape: tuple[int, ...], device: str) -> None:
    for fmt, bias_dtype in zip(scheme.few_formats, (None, torch.float32), strict=True):
        weight = scheme.make_weight(33, 100, fmt, device)
        bias = None if bias_dtype is None else randn(33, dtype=bias_dtype, device=device)
        x = randn(*shape, dtype=x_dtype, device=device)
        torch.library.opcheck(scheme.op, (x, *weight.operands, bias, *weight.arguments), test_utils=UTILITIES)


@scheme_parameter
def test_opcheck_mm_of_views(scheme: Scheme, device: str) -> None:
    weight = scheme.make_weight(33, 100, device=device)
    x = randn(4, 200, dtype=torch.float32, device=device)
    for view in (x[:, :100], x[:, 1::2], x.view(8, 100).t().contiguous().t(), x[:1, :100].expand(3, 100), x[::2, 100:]):
        torch.library.opcheck(scheme.op, (view, *weight.operands, None, *weight.arguments), test_utils=UTILITIES)


@pytest.mark.parametrize("n,k", [(1, 1), (16, 64), (33, 100)])
@pytest.mark.parametrize("fmt", [Int4Format(32), Int4Format(128, "float", torch.float16), Int4Format(-1)], ids=str)
def test_opcheck_layout(fmt: Int4Format, n: int, k: int, device: str) -> None:
    parts = INT4.parts(n, k, fmt, device)
    packed = (*parts.operands(), n, k, fmt.group_size)
    ops = torch.ops.qao
    torch.library.opcheck(
        ops.pack_int4.default, (parts.q, parts.scales, parts.zeros, fmt.group_size), test_utils=UTILITIES
    )
    torch.library.opcheck(ops.unpack_int4.default, packed, test_utils=UTILITIES)
    for dtype in DTYPES:
        torch.library.opcheck(ops.dequantize_int4.default, (*packed, dtype), test_utils=UTILITIES)


# ---- compile ---------------------------------------------------------------------------------------------------------

M_CHANGES = (5, 7, 64, 2, 130)


def two_layers(scheme: Scheme, device: str) -> tuple[Callable[[Tensor], Tensor], Callable[[Tensor], Tensor]]:
    """A function to compile, and the same in plain torch on the dequantized weights and activations."""
    up, down = scheme.make_weight(96, 64, device=device), scheme.make_weight(64, 96, device=device, seed=1)
    bias = randn(96, dtype=torch.float32, device=device)

    def quantized(x: Tensor) -> Tensor:
        return scheme.mm_with_grad(torch.relu(scheme.mm_with_grad(x, up, bias)), down)

    def product(x: Tensor, weight: Weight) -> Tensor:
        rounded = x + (weight.activation.seen(x.detach()).float() - x.detach())  # to its gradient, the identity
        return rounded @ weight.dense.float().T

    def plain(x: Tensor) -> Tensor:
        return product(torch.relu(product(x, up) + bias), down)

    return quantized, plain


def check_same(scheme: Scheme, actual: Tensor, expected: Tensor, plain: Tensor) -> None:
    """Compiled, eager and plain torch agree up to float32 roundings, of sums of at most 96 terms in two layers.

    Where activations are quantized, such a rounding may carry an activation between the layers across a tie, by a step
    of at most an eighth of its size, and plain torch then differs by its share of a sum.
    """
    bound = 2.0**-18 * plain.abs().max()
    assert (actual - expected).abs().max() <= bound
    if scheme.few_formats[0].activation != FLOAT:
        bound = 2.0**-5 * plain.abs().max()
    assert (actual - plain).abs().max() <= bound


@pytest.mark.parametrize("backend", ["eager", "aot_eager", "inductor"])
@scheme_parameter
def test_changing_m_does_not_recompile(scheme: Scheme, backend: str, device: str) -> None:
    """dynamic=True: one graph for every M ≥ 2."""
    quantized, plain = two_layers(scheme, device)
    counter = CompileCounterWithBackend(backend)
    compiled = torch.compile(quantized, backend=counter, fullgraph=True, dynamic=True)
    for m in M_CHANGES:
        x = randn(m, 64, dtype=torch.float32, device=device, seed=m)
        check_same(scheme, compiled(x), quantized(x), plain(x))
    assert counter.frame_count == 1


@scheme_parameter
def test_one_token_and_none(scheme: Scheme, device: str) -> None:
    """torch specializes sizes 0 and 1: one graph more for each, and no further one."""
    quantized, plain = two_layers(scheme, device)
    counter = CompileCounterWithBackend("aot_eager")
    compiled = torch.compile(quantized, backend=counter, fullgraph=True, dynamic=True)
    for m in (1, 2, 7, 64, 0, 1, 0, 3):
        x = randn(m, 64, dtype=torch.float32, device=device, seed=m)
        y = compiled(x)
        assert y.shape == (m, 64)
        if m:
            check_same(scheme, y, quantized(x), plain(x))
    assert counter.frame_count <= 3


@scheme_parameter
def test_automatic_dynamic_compiles_twice(scheme: Scheme, device: str) -> None:
    """Without dynamic=True: the first M, then one graph for all others but 1."""
    quantized, plain = two_layers(scheme, device)
    counter = CompileCounterWithBackend("aot_eager")
    compiled = torch.compile(quantized, backend=counter, fullgraph=True)
    for m in (1, 2, 7, 64, 3, 1, 1000):
        x = randn(m, 64, dtype=torch.float32, device=device, seed=m)
        check_same(scheme, compiled(x), quantized(x), plain(x))
    assert counter.frame_count <= 2


@scheme_parameter
def test_mark_dynamic(scheme: Scheme, device: str) -> None:
    """mark_dynamic raises if anything in the graph would fix M."""
    quantized, plain = two_layers(scheme, device)
    counter = CompileCounterWithBackend("aot_eager")
    compiled = torch.compile(quantized, backend=counter, fullgraph=True)
    for m in M_CHANGES:
        x = randn(m, 64, dtype=torch.float32, device=device, seed=m)
        torch._dynamo.mark_dynamic(x, 0)
        check_same(scheme, compiled(x), quantized(x), plain(x))
    assert counter.frame_count == 1


MODES: dict[str, Callable[[str], AbstractContextManager[Any]]] = {
    "grad": lambda device: nullcontext(),
    "no_grad": lambda device: torch.no_grad(),
    "inference_mode": lambda device: torch.inference_mode(),
    "autocast": lambda device: torch.autocast(device, torch.bfloat16),
}


@pytest.mark.parametrize("mode", MODES)
@scheme_parameter
def test_modes(scheme: Scheme, mode: str, device: str) -> None:
    quantized, plain = two_layers(scheme, device)
    counter = CompileCounterWithBackend("aot_eager")
    compiled = torch.compile(quantized, backend=counter, fullgraph=True, dynamic=True)
    with MODES[mode](device):
        for m in M_CHANGES:
            x = randn(m, 64, dtype=torch.float32, device=device, seed=m)
            y = compiled(x)
            assert y.dtype == torch.float32  # the ops keep x's dtype; casting is the layer's affair
            with torch.autocast(device, enabled=False):
                check_same(scheme, y, quantized(x), plain(x))
    assert counter.frame_count == 1


@pytest.mark.parametrize("backend", ["aot_eager", "inductor"])
@scheme_parameter
def test_training_step(scheme: Scheme, backend: str, device: str) -> None:
    """Forward and backward in one graph each, with x dynamic."""
    quantized, plain = two_layers(scheme, device)
    counter = CompileCounterWithBackend(backend)
    compiled = torch.compile(quantized, backend=counter, fullgraph=True, dynamic=True)
    for m in (5, 7, 64):
        x = randn(m, 64, dtype=torch.float32, device=device, seed=m).requires_grad_()
        gradients = [torch.autograd.grad(f(x).square().sum(), x)[0] for f in (compiled, quantized, plain)]
        check_same(scheme, *gradients)
    assert counter.frame_count == 1


@scheme_parameter
def test_two_layers_of_different_sizes_share_no_state(scheme: Scheme, device: str) -> None:
    """A function of the weight recompiles for another N and K, and then gives that weight's result."""
    compiled = torch.compile(scheme.mm, backend="aot_eager", fullgraph=True, dynamic=True)
    for n, k in ((33, 100), (64, 200), (33, 100), (17, 1)):
        for fmt in scheme.few_formats:
            weight = scheme.make_weight(n, k, fmt, device)
            x = randn(5, k, dtype=torch.bfloat16, device=device)
            check_product(compiled(x, weight), x, weight)


def test_packing_compiles(device: str) -> None:
    def round_trip(q: Tensor, scales: Tensor, zeros: Tensor | None, group_size: int) -> tuple[Tensor, ...]:
        weight, packed_scales = torch.ops.qao.pack_int4(q, scales, zeros, group_size)
        n, k = q.shape
        dense = torch.ops.qao.dequantize_int4(weight, packed_scales, n, k, group_size, torch.float32)
        return (*torch.ops.qao.unpack_int4(weight, packed_scales, n, k, group_size), dense)

    compiled = torch.compile(round_trip, backend="aot_eager", fullgraph=True, dynamic=True)
    for n, k in ((33, 100), (64, 256), (5, 31)):
        for fmt in (Int4Format(32, "float"), Int4Format(-1)):
            parts = INT4.parts(n, k, fmt, device)
            arguments = (parts.q, parts.scales, parts.zeros, fmt.group_size)
            for actual, expected in zip(compiled(*arguments), round_trip(*arguments), strict=True):
                assert torch.equal(actual, expected)


@scheme_parameter
def test_export(scheme: Scheme, device: str) -> None:
    """torch.export keeps the op as one node, with M dynamic."""
    quantized, plain = two_layers(scheme, device)

    class Model(torch.nn.Module):
        def forward(self, x: Tensor) -> Tensor:
            return quantized(x)

    example = randn(5, 64, dtype=torch.float32, device=device)
    with torch.no_grad():
        program = torch.export.export(Model(), (example,), dynamic_shapes={"x": {0: torch.export.Dim("m", min=2)}})
    assert sum(node.target == scheme.op for node in program.graph.nodes) == 2
    for m in M_CHANGES:
        x = randn(m, 64, dtype=torch.float32, device=device, seed=m)
        check_same(scheme, program.module()(x), quantized(x), plain(x))

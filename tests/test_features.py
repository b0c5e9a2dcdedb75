"""torch's features on quantized layers: torch.func, forward-mode, fx, nested tensors, counters."""

from __future__ import annotations

import copy
import json
import os
import subprocess
import sys
from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest
import qao
import torch
from accuracy import check_close
from ops_schemes import PRODUCTS, Scheme, Weight
from ops_support import check_product, randn
from qao.ops import norm_act as norm_silu
from torch import Tensor, nn
from torch.autograd import forward_ad
from torch.nn.utils import parametrize, prune
from torch.utils.flop_counter import FlopCounterMode

every_scheme = pytest.mark.parametrize("scheme", PRODUCTS, ids=lambda scheme: scheme.word)


def values(*shape: int, device: str, seed: int = 0) -> Tensor:
    return randn(*shape, dtype=torch.float32, device=device, seed=seed)


def made(scheme: Scheme, device: str) -> list[tuple[Weight, Callable[..., Tensor]]]:
    """Weights [40, 70] in both formats that use every part of the operator, and the GEMM of x with each."""
    weights = [scheme.make_weight(40, 70, fmt, device) for fmt in scheme.few_formats]
    return [(w, lambda x, bias=None, w=w: scheme.mm_with_grad(x, w, bias)) for w in weights]


def same(actual: Tensor, expected: Tensor) -> None:
    """Equal but for the order in which float32 sums were made."""
    assert actual.shape == expected.shape
    assert (actual.double() - expected.double()).abs().max() <= 2.0**-16 * expected.abs().max()


# ---- forward-mode, torch.func ----------------------------------------------------------------------------------------


@every_scheme
def test_tangents(scheme: Scheme, device: str) -> None:
    x, dx = values(5, 70, device=device), values(5, 70, device=device, seed=1)
    bias, dbias = values(40, device=device, seed=2), values(40, device=device, seed=3)
    for weight, mm in made(scheme, device):
        y, dy = torch.func.jvp(mm, (x, bias), (dx, dbias))
        check_product(y, x, weight, bias)
        check_close(dy, dx, weight.dense, dbias)
        same(torch.func.jvp(lambda b, mm=mm: mm(x, b), (bias,), (dbias,))[1], dbias.expand(5, 40))
        with forward_ad.dual_level(), torch.no_grad():
            dual = mm(forward_ad.make_dual(x, dx))
            check_close(forward_ad.unpack_dual(dual).tangent, dx, weight.dense)


@every_scheme
def test_jacobians_and_hessians(scheme: Scheme, device: str) -> None:
    x = values(70, device=device)
    for weight, mm in made(scheme, device):
        for jacobian in (torch.func.jacfwd, torch.func.jacrev):
            same(jacobian(mm)(x), weight.dense)

        def loss(x: Tensor, mm: Any = mm) -> Tensor:
            return mm(x).square().sum()

        expected = 2 * weight.dense.T @ weight.dense
        for outer in (torch.func.jacfwd, torch.func.jacrev):
            for inner in (torch.func.jacfwd, torch.func.jacrev):
                same(outer(inner(loss))(x), expected)
        same(torch.autograd.functional.hessian(loss, x), expected)


@every_scheme
def test_vmap(scheme: Scheme, device: str) -> None:
    x, biases = values(3, 5, 70, device=device), values(3, 40, device=device, seed=2)
    for weight, mm in made(scheme, device):
        each = torch.stack([mm(part) for part in x])
        same(torch.vmap(mm)(x), each)
        same(torch.vmap(mm, in_dims=2, out_dims=1)(x.permute(1, 2, 0)), each.transpose(0, 1))
        same(torch.vmap(torch.vmap(mm))(x), torch.stack([torch.stack([mm(row) for row in part]) for part in x]))
        same(torch.vmap(mm)(x, biases), each + biases[:, None])
        same(torch.vmap(mm, in_dims=(None, 0))(x[0], biases), each[0] + biases[:, None])
        same(torch.vmap(lambda x, w=weight: scheme.mm(x, w))(x), each)  # the raw operator


@every_scheme
def test_gradients_of_samples(scheme: Scheme, device: str) -> None:
    x, bias = values(3, 5, 70, device=device), values(40, device=device, seed=2)
    for weight, mm in made(scheme, device):
        dense = weight.dense.float()

        def loss(x: Tensor, bias: Tensor, mm: Any = mm) -> Tensor:
            return mm(x, bias).square().sum()

        dy = 2 * torch.stack([mm(part, bias) for part in x])
        of_x, of_bias = torch.vmap(torch.func.grad(loss, (0, 1)), in_dims=(0, None))(x, bias)
        same(of_x, dy @ dense)
        same(of_bias, dy.sum(1))
        of_all = torch.func.grad(lambda x, mm=mm: torch.vmap(mm, (0, None))(x, bias).square().sum())(x)
        same(of_all, dy @ dense)
        leaf = x.clone().requires_grad_()
        torch.vmap(mm)(leaf).sum().backward()
        assert leaf.grad is not None
        same(leaf.grad, torch.ones(3, 5, 40, device=device) @ dense)


@every_scheme
def test_vmap_over_a_weight_is_refused(scheme: Scheme, device: str) -> None:
    weight, x = scheme.make_weight(40, 70, device=device), values(5, 70, device=device)
    scales = torch.stack([weight.operands[1]] * 2)
    for op in (scheme.op, scheme.differentiable):
        with pytest.raises(RuntimeError, match=rf"qao::{scheme.word}_mm: vmap over a quantized weight.*scales: 0"):
            torch.vmap(lambda s, op=op: op(x, weight.operands[0], s, None, *weight.arguments))(scales)


def test_functional_call(device: str) -> None:
    layer = qao.QuantLinear.from_linear(nn.Linear(70, 40), qao.Int4WeightOnly()).to(device)
    x, biases = values(5, 70, device=device), values(3, 40, device=device)

    def call(bias: Tensor) -> Tensor:
        return torch.func.functional_call(layer, {"bias": bias}, (x,))

    same(torch.vmap(call)(biases), torch.stack([call(bias) for bias in biases]))
    same(torch.func.jacrev(call)(biases[0]), torch.eye(40, device=device).expand(5, 40, 40))


def test_torch_func_in_a_compiled_function(device: str) -> None:
    """A graph cannot contain it; a missing gradient is always an error."""
    layer = qao.QuantLinear.from_linear(nn.Linear(70, 40), qao.Int8WeightOnly()).to(device)
    x, dense = values(5, 70, device=device), layer.dequantize()
    torch._dynamo.reset()

    def tangent(x: Tensor) -> Tensor:
        return torch.func.jvp(layer, (x,), (x,))[1]

    gradient = torch.func.grad(lambda x: layer(x).square().sum())
    same(torch.compile(gradient, backend="aot_eager")(x), 2 * layer(x) @ dense)
    same(torch.compile(tangent, backend="aot_eager")(x), x @ dense.T)
    torch._dynamo.reset()
    with pytest.raises(Exception, match="a graph cannot contain torch.func or forward-mode around a quantized layer"):
        torch.compile(tangent, backend="aot_eager", fullgraph=True)(x)


def test_norm_silu(device: str) -> None:
    """Against formulas in float64, of which torch has every derivative."""
    x, residual = (values(3, 8, device=device, seed=s) for s in (0, 1))

    def plain_norm(x: Tensor, residual: Tensor) -> Tensor:
        h = x + residual
        return (h * (h.square().mean(-1, keepdim=True) + 1e-5).rsqrt()).pow(3).sum() + h.square().sum()

    def norm(x: Tensor, residual: Tensor) -> Tensor:
        y, h = norm_silu.add_rms_norm(x, residual, None, 1e-5)
        return y.pow(3).sum() + h.square().sum()

    def plain_silu(gate: Tensor, up: Tensor) -> Tensor:
        return (nn.functional.silu(gate) * up).square().sum()

    def silu(gate: Tensor, up: Tensor) -> Tensor:
        return norm_silu.silu_mul(gate, up).square().sum()

    for function, plain in ((norm, plain_norm), (silu, plain_silu)):
        for which in (0, 1):
            same(
                torch.func.hessian(function, which)(x, residual),
                torch.func.hessian(plain, which)(x.double(), residual.double()),
            )
        expected = torch.func.grad(plain)(x.double(), residual.double())
        same(torch.func.grad(function)(x, residual), expected)
        twice = torch.autograd.functional.hessian(function, (x, residual))
        for rows, wanted in zip(
            twice, torch.autograd.functional.hessian(plain, (x.double(), residual.double())), strict=True
        ):
            for actual, truth in zip(rows, wanted, strict=True):
                same(actual, truth)
    with pytest.raises(RuntimeError, match="qao::silu_mul: both tensors must have one shape"):
        torch.func.grad(silu)(x, residual[:1])


def test_vmap_of_rows(device: str) -> None:
    """Operators of one row after the other."""
    x, up = (values(4, 3, 8, device=device, seed=s) for s in (0, 1))
    assert torch.equal(torch.vmap(torch.ops.qao.silu_mul)(x, up), torch.ops.qao.silu_mul(x, up))
    y, h = torch.vmap(torch.ops.qao.add_rms_norm, in_dims=(0, None, None, None))(x, up[0], None, 1e-5)
    expected = torch.ops.qao.add_rms_norm(x, up[:1].expand(x.shape).contiguous(), None, 1e-5)
    assert torch.equal(y, expected[0]) and torch.equal(h, expected[1])
    with pytest.raises(RuntimeError, match="qao::add_rms_norm: vmap over a weight"):
        torch.vmap(torch.ops.qao.add_rms_norm, in_dims=(None, None, 0, None))(x[0], None, up[0], 1e-5)
    ids = torch.tensor([[3, 1], [0, 3]], device=device)
    for scheme in (qao.Int8WeightOnly(), qao.Int4WeightOnly(group_size=32)):
        layer = qao.nn.QuantEmbedding.from_embedding(nn.Embedding(10, 64), scheme).to(device)
        assert torch.equal(torch.vmap(layer)(ids), layer(ids))


# ---- fx, nested tensors, counters ------------------------------------------------------------------------------------


@pytest.mark.parametrize("scheme", [qao.Int4WeightOnly(), qao.Int8DynamicActivationInt8Weight()], ids=str)
def test_fx(scheme: qao.Scheme, device: str) -> None:
    model = nn.Sequential(nn.Linear(70, 40), nn.ReLU(), nn.Linear(40, 50)).to(device)
    qao.quantize_(model, scheme)
    graph = torch.fx.symbolic_trace(model)
    assert sum(node.target is qao.ops.product for node in graph.graph.nodes) == 2
    x = values(5, 70, device=device).requires_grad_()
    for traced in (graph, copy.deepcopy(graph)):
        assert torch.equal(traced(x), model(x))
        actual, expected = (torch.autograd.grad(f(x).square().sum(), x)[0] for f in (traced, model))
        assert torch.equal(actual, expected)


@pytest.mark.parametrize("compiled", [False, True], ids=["eager", "compiled"])
@every_scheme
def test_jagged(scheme: Scheme, compiled: bool, device: str) -> None:
    weight = scheme.make_weight(40, 70, device=device)
    parts = [values(n, 70, device=device, seed=n) for n in (3, 1, 5)]
    x = torch.nested.nested_tensor(parts, layout=torch.jagged, requires_grad=True)
    bias = values(40, device=device).requires_grad_()
    torch._dynamo.reset()
    mm = torch.compile(scheme.mm_with_grad, backend="aot_eager", fullgraph=True) if compiled else scheme.mm_with_grad
    y = mm(x, weight, bias)
    assert y.is_nested and y.layout == torch.jagged and y.shape == (3, x.shape[1], 40)
    check_product(y.values().detach(), torch.cat(parts), weight, bias.detach())
    dy = values(9, 40, device=device, seed=3)
    y.values().backward(dy)
    assert x.grad is not None and x.grad.shape == x.shape and bias.grad is not None
    check_close(x.grad.values(), dy, weight.dense.T)
    same(bias.grad, dy.sum(0))
    with torch.no_grad():
        assert torch.equal(mm(x, weight, bias).values(), y.values())


@every_scheme
def test_strided_nested_tensors(scheme: Scheme, device: str) -> None:
    weight = scheme.make_weight(40, 70, device=device)
    parts = [values(n, 2, 70, device=device, seed=n) for n in (3, 1, 5)]
    x = torch.nested.nested_tensor(parts, requires_grad=True)
    bias = values(40, device=device).requires_grad_()
    y = scheme.mm_with_grad(x, weight, bias)
    assert y.is_nested and y.layout == torch.strided
    rows = torch.cat([part.view(-1, 70) for part in parts])
    assert [part.shape for part in y.unbind()] == [(n, 2, 40) for n in (3, 1, 5)]
    check_product(torch.cat([part.view(-1, 40) for part in y.unbind()]).detach(), rows, weight, bias.detach())
    dy = [values(n, 2, 40, device=device, seed=10 + n) for n in (3, 1, 5)]
    y.backward(torch.nested.as_nested_tensor(dy))
    dy_rows = torch.cat([part.view(-1, 40) for part in dy])
    assert x.grad is not None and x.grad.is_nested
    check_close(torch.cat([part.view(-1, 70) for part in x.grad.unbind()]), dy_rows, weight.dense.T)
    same(bias.grad, dy_rows.sum(0))
    scales = torch.nested.nested_tensor([weight.operands[1].flatten()])
    with pytest.raises(RuntimeError, match=rf"qao::{scheme.word}_mm: only x may be a nested tensor. Got scales. "):
        scheme.op(x.detach()[0], weight.operands[0], scales, None, *weight.arguments)


def test_the_jagged_dimension_is_not_that_of_features(device: str) -> None:
    weight = PRODUCTS[0].make_weight(40, 70, device=device)
    x = torch.nested.nested_tensor([values(70, n, device=device).T for n in (2, 3)], layout=torch.jagged)
    with pytest.raises(RuntimeError, match=r"qao::int4_mm: only x may be a jagged .* Got jagged"):
        PRODUCTS[0].mm(x.transpose(1, 2), weight)


@every_scheme
def test_flops(scheme: Scheme, device: str) -> None:
    """2 · M · N · K a product, and as many for the gradient of x."""
    weight = scheme.make_weight(40, 70, device=device)
    x = values(2, 5, 70, device=device).requires_grad_()
    with FlopCounterMode(display=False) as counter:
        y = scheme.mm_with_grad(x, weight)
    assert counter.get_total_flops() == 2 * 10 * 40 * 70
    with FlopCounterMode(display=False) as counter:
        y.sum().backward()
    assert counter.get_total_flops() == 2 * 10 * 40 * 70


def test_the_counter_is_not_imported() -> None:
    code = "import qao, sys; print('torch.utils.flop_counter' in sys.modules)"
    assert run(code) == "False"


# ---- the cache of compiled graphs ------------------------------------------------------------------------------------


def run(code: str, **environment: str) -> str:
    path = os.pathsep.join((str(Path(__file__).parent), *sys.path))
    command = [sys.executable, "-W", "ignore", "-c", code]
    result = subprocess.run(
        command, env=os.environ | {"PYTHONPATH": path} | environment, capture_output=True, text=True, timeout=300
    )
    assert result.returncode == 0, result.stderr
    return result.stdout.strip()


TRAIN = """
import json, qao, torch
from torch import nn
from torch._dynamo.utils import counters

torch.manual_seed(0)
model = nn.Sequential(nn.Linear(64, 64), nn.Linear(64, 64)).requires_grad_(False)
qao.quantize_(model, {"0": qao.Int4WeightOnly(), "1": qao.Int8DynamicActivationInt8Weight()})
model[0].bias.requires_grad_()

def forward(x):
    y, h = qao.ops.add_rms_norm(model(x), None, None, 1e-5)
    return qao.ops.silu_mul(y, h)

x = torch.randn(3, 64, requires_grad=True)
expected, = torch.autograd.grad(forward(x).sum(), x)
actual, = torch.autograd.grad(torch.compile(forward, fullgraph=True)(x).sum(), x)
assert (actual - expected).abs().max() <= 1e-4 * expected.abs().max()
print(json.dumps({name: count for name, count in counters["aot_autograd"].items() if "cache" in name}))
"""


@pytest.mark.extended
def test_training_starts_warm(tmp_path: Path) -> None:
    """A second process finds the graphs of forward and backward that the first one compiled."""
    cold, warm = (json.loads(run(TRAIN, TORCHINDUCTOR_CACHE_DIR=str(tmp_path))) for _ in range(2))
    assert cold == {"autograd_cache_miss": 1, "autograd_cache_saved": 1}
    assert warm == {"autograd_cache_hit": 1}


# ---- float64 ---------------------------------------------------------------------------------------------------------


def test_float64_is_refused_and_says_what_to_do(device: str) -> None:
    """No kernel supports it, and float32 accuracy under that name would be surprising."""
    layer = qao.QuantLinear.from_linear(nn.Linear(70, 40), qao.Int4WeightOnly()).to(device).double()
    assert layer.dtype == torch.float64
    with pytest.raises(RuntimeError, match=r"qao::int4_mm: x must be float32.* Got x: float64.* Convert it"):
        layer(values(5, 70, device=device).double())
    layer.float()(values(5, 70, device=device))


class Doubled(nn.Module):
    def forward(self, values: Tensor) -> Tensor:
        return 2 * values


def test_a_bias_is_pruned_and_parametrised() -> None:
    linear = nn.Linear(64, 48)
    layer = qao.QuantLinear.from_linear(linear, qao.Int8WeightOnly())
    x, bias = values(3, 64, device="cpu"), linear.bias.detach().clone()
    without = layer(x) - bias
    prune.l1_unstructured(layer, "bias", amount=24)
    assert (layer.bias == 0).sum() == 24
    same(layer(x) - layer.bias, without)
    prune.remove(layer, "bias")
    same(layer(x) - layer.bias, without)
    other = qao.QuantLinear.from_linear(linear, qao.Int8WeightOnly())
    parametrize.register_parametrization(other, "bias", Doubled())
    other.parametrizations.bias.original.requires_grad_()
    y = other(x)
    same(y - 2 * bias, without)
    y.sum().backward()
    assert torch.equal(other.parametrizations.bias.original.grad, torch.full((48,), 6.0))


@pytest.mark.parametrize(
    "change",
    [
        lambda layer: setattr(layer, "weight", nn.Parameter(torch.zeros(48, 64))),
        lambda layer: setattr(layer, "weight", torch.zeros(48, 64)),
    ],
    ids=["Parameter", "Tensor"],
)
def test_the_weight_is_not_set(change: Callable[[nn.Module], object]) -> None:
    layer = qao.QuantLinear.from_linear(nn.Linear(64, 48), qao.Int8WeightOnly())
    with pytest.raises(AttributeError, match="cannot be set. .* layer.load_float_.* qao.dequantize_"):
        change(layer)
    assert layer(values(3, 64, device="cpu")).shape == (3, 48)


def test_torchscript_traces_and_does_not_script() -> None:
    model = nn.Sequential(nn.Linear(64, 48), nn.ReLU())
    qao.quantize_(model, qao.Int8WeightOnly())
    x = values(3, 64, device="cpu")
    with pytest.raises(RuntimeError, match="QuantLinear: torch.jit.script does not support it: use torch.export or"):
        torch.jit.script(model)
    assert torch.equal(torch.jit.trace(model, x)(x), model(x))

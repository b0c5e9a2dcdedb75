"""The backend "qao" of torch.compile: which graph passes fire, and that results stay those of the eager model."""

from __future__ import annotations

import copy
from collections.abc import Iterator
from typing import Any

import ops_support
import pytest
import qao
import torch
from qao.inductor import attention, report
from test_compile_schemes import SCHEMES
from torch import Tensor, nn
from torch.fx.experimental.proxy_tensor import make_fx


def randn(*size: int, seed: int, device: str = "cpu", dtype: torch.dtype = torch.float32) -> Tensor:
    return ops_support.randn(*size, seed=seed, dtype=dtype, device=device)


@pytest.fixture(autouse=True)
def fresh() -> Iterator[None]:
    """The same weights in any order of tests, and no graph from a cache: it would skip the passes."""
    torch._dynamo.reset()
    torch.manual_seed(0)
    with torch.compiler.config.patch(force_disable_caches=True):
        yield
    torch._dynamo.reset()


class Projections(nn.Module):
    """Three layers of one x; the third has other rows and a bias."""

    def __init__(self, sizes: tuple[int, ...] = (32, 48, 16), k: int = 64) -> None:
        super().__init__()
        self.layers = nn.ModuleList(nn.Linear(k, n, bias=n == sizes[-1]) for n in sizes)

    def forward(self, x: Tensor) -> list[Tensor]:
        return [layer(x) for layer in self.layers]


def compiled(model: Any, *inputs: Any, **kwargs: Any) -> tuple[Any, report.Report]:
    with report.collected() as seen, torch.inference_mode():
        y = qao.compile(model, fullgraph=True, **kwargs)(*inputs)
    return y, seen


def is_hopper() -> bool:
    return torch.cuda.get_device_capability() >= (9, 0)


def places(seen: report.Report) -> list[str]:
    return [place for places in seen.replaced.values() for place in places]


# ---- products of one x -----------------------------------------------------------------------------------------------


def test_layers_of_one_input_are_one_product_with_the_same_bits(device: str) -> None:
    """Every scheme, with K and N that are no multiples of a tile for some."""
    models = nn.ModuleDict()
    for name, scheme in SCHEMES.items():
        block = "block" in name
        models[name] = Projections((256, 384, 128) if block else (32, 48, 17), 256 if block else 80)
        qao.quantize_(models[name], scheme, progress=False)
    models = models.to(device, torch.bfloat16)
    inputs = [randn(3, 256 if "block" in name else 80, seed=1, device=device, dtype=torch.bfloat16) for name in SCHEMES]

    class All(nn.Module):
        def __init__(self) -> None:
            super().__init__()
            self.models = models

        def forward(self, *inputs: Tensor) -> list[list[Tensor]]:
            return [model(x) for model, x in zip(self.models.values(), inputs, strict=True)]

    model = All()
    with torch.inference_mode():
        expected = model(*inputs)
    actual, seen = compiled(model, *inputs)
    for name, one, other in zip(SCHEMES, actual, expected, strict=True):
        assert [a.shape for a in one] == [b.shape for b in other], name
        if device == "cuda" and name.startswith("int4"):  # one kernel, which adds in another order
            for a, b in zip(one, other, strict=True):
                assert (a - b).abs().max() <= torch.finfo(torch.bfloat16).eps * b.abs().max(), name
        else:
            assert all(map(torch.equal, one, other)), name
    left = ["fp8_fp8_static"]  # layers with static scales of x may have different ones
    if device == "cuda":
        left += ["int8", "fp8", "fp8_block", *(["int4", "int4_symmetric"] if not is_hopper() else [])]
    assert sorted(places(seen)) == sorted(f"models.{name}.layers.(0, 1, 2)" for name in SCHEMES if name not in left)


def test_layers_of_different_forms_are_merged_by_form() -> None:
    model = Projections((32, 32, 32, 32, 16))
    qao.quantize_(
        model,
        {
            "re:layers.[01]": qao.Int4WeightOnly(group_size=32),
            "layers.2": qao.Int4WeightOnly(group_size=64),
            "re:layers.[34]": qao.Int8WeightOnly(),
        },
        progress=False,
    )
    x = randn(2, 64, seed=1)
    with torch.inference_mode():
        expected = model(x)
    actual, seen = compiled(model, x)
    assert all(map(torch.equal, actual, expected))
    assert places(seen) == ["layers.(0, 1)", "layers.(3, 4)"]


@pytest.mark.every_isa
@pytest.mark.parametrize("tokens", [0, 1, 40, 300])
def test_merged_products_of_any_number_of_tokens(tokens: int) -> None:
    model = Projections((256, 48))
    qao.quantize_(model, qao.Int8DynamicActivationInt4Weight(group_size=32), progress=False)
    arguments = [[layer.qweight for layer in model.layers], [layer.scales for layer in model.layers]]
    biases = [layer.bias for layer in model.layers]
    x = randn(tokens, 64, seed=1)
    x[tokens // 2 :, 3] = float("inf")
    with torch.inference_mode():
        actual = torch.ops.qao._merged_int8_int4_mm(x, *arguments, biases, [None, None])
        expected = model(x)
    torch.testing.assert_close(actual, expected, rtol=0, atol=0, equal_nan=True)


@pytest.mark.parametrize("value", [1e30, float("inf"), float("nan")])
def test_merged_products_of_values_far_apart(value: float) -> None:
    """Outliers, Inf and NaN leave the kernels' fixed-point x, in every weight."""
    model = Projections((256, 48), 512).bfloat16()
    qao.quantize_(model, qao.Int4WeightOnly(group_size=32), progress=False)
    x = randn(2, 512, seed=1).bfloat16()
    x[1, 7], x[0, 5] = value, 1e-3
    first, second = model.layers
    with torch.inference_mode():
        actual = torch.ops.qao._merged_int4_mm(
            x, [first.qweight, second.qweight], [first.scales, second.scales], [first.bias, second.bias]
        )
        torch.testing.assert_close(actual, model(x), rtol=0, atol=0, equal_nan=True)


def test_an_error_of_a_merged_product_names_its_weight() -> None:
    model = Projections((32, 48))
    qao.quantize_(model, qao.Int4WeightOnly(group_size=32), progress=False)
    weights, scales = ([getattr(layer, name) for layer in model.layers] for name in ("qweight", "scales"))
    x = randn(2, 64, seed=1)
    with pytest.raises(RuntimeError, match=r"qao::_merged_int4_mm: bias must .*index of the weight: 1"):
        torch.ops.qao._merged_int4_mm(x, weights, scales, [None, torch.zeros(47)])
    with pytest.raises(RuntimeError, match=r"qao::_merged_int4_mm: the lists of tensors must have one length"):
        torch.ops.qao._merged_int4_mm(x, weights, scales, [None])
    with pytest.raises(RuntimeError, match=r"qao::_merged_int4_mm: out_features must have one number per weight"):
        torch.ops.qao._merged_int4_mm(x, weights, scales, [None, None], [32], 64, 32)


# ---- the backend -----------------------------------------------------------------------------------------------------


@pytest.mark.parametrize(
    "kwargs", [{"mode": "reduce-overhead"}, {"dynamic": True}, {"options": {"max_autotune": False}}], ids=str
)
def test_other_arguments_of_compile(device: str, kwargs: dict[str, Any]) -> None:
    model = Projections()
    qao.quantize_(model, qao.Int8WeightOnly(), progress=False)
    model = model.to(device)
    function = torch.compile(model, backend="qao", fullgraph=True, **kwargs)
    for tokens in (3, 5, 1):
        x = randn(tokens, 64, seed=tokens, device=device)
        with torch.inference_mode():
            assert all(map(torch.equal, function(x), model(x)))


def test_options_for_inductor_itself() -> None:
    model = Projections()
    qao.quantize_(model, qao.Int8WeightOnly(), progress=False)
    x = randn(3, 64, seed=1)
    with report.collected() as seen, torch.inference_mode():
        y = torch.compile(model, options=qao.inductor_options())(x)
        assert all(map(torch.equal, y, model(x)))
    assert places(seen) == ["layers.(0, 1, 2)"]


def test_a_graph_with_gradients_stays_as_it_is() -> None:
    model = Projections()
    qao.quantize_(model, qao.Int4WeightOnly(group_size=32), progress=False)
    x = randn(3, 64, seed=1).requires_grad_()
    with report.collected() as seen:
        y = qao.compile(model, fullgraph=True)(x)
        torch.cat(y, -1).square().sum().backward()
    own = x.detach().clone().requires_grad_()
    torch.cat(model(own), -1).square().sum().backward()
    assert not places(seen) and x.grad is not None
    torch.testing.assert_close(x.grad, own.grad)


def test_arguments_that_cannot_be_combined() -> None:
    with pytest.raises(ValueError, match=r"^qao.compile: backend='inductor' is not possible"):
        qao.compile(nn.Linear(2, 2), backend="inductor")
    with pytest.raises(ValueError, match=r"post_grad_custom_pre_pass.* is already the place of qao's graph passes"):
        qao.compile(nn.Linear(2, 2), options=qao.inductor_options())


def test_a_float_model_compiles_too() -> None:
    model, x = nn.Sequential(nn.Linear(8, 8), nn.ReLU()), randn(2, 8, seed=1)
    y, seen = compiled(model, x)
    assert not places(seen)
    torch.testing.assert_close(y, model(x))


# ---- attention -------------------------------------------------------------------------------------------------------


class CachedAttention(nn.Module):
    """Grouped queries over a static cache, as the attention of transformers' models."""

    def __init__(self, repeat: str, dtype: torch.dtype, device: str) -> None:
        super().__init__()
        self.repeat = repeat
        self.k, self.v = (nn.Buffer(randn(2, 2, 60, 16, seed=seed, dtype=dtype, device=device)) for seed in (1, 2))

    def forward(self, q: Tensor, position: Tensor) -> Tensor:
        k, v = self.k, self.v
        mask = torch.arange(60, device=q.device) <= (torch.arange(q.shape[2], device=q.device) + position)[:, None]
        if self.repeat == "expand":
            k, v = (each[:, :, None].expand(2, 2, 3, 60, 16).reshape(2, 6, 60, 16) for each in (k, v))
        y = nn.functional.scaled_dot_product_attention(q, k, v, attn_mask=mask, enable_gqa=self.repeat == "enable_gqa")
        return y.transpose(1, 2).flatten(2)


@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16], ids=str)
@pytest.mark.parametrize("repeat", ["expand", "enable_gqa"])
def test_attention_of_few_tokens_reads_the_cache_once(repeat: str, dtype: torch.dtype, device: str) -> None:
    model = CachedAttention(repeat, dtype, device)
    for tokens in (1, 16, 17):
        q = randn(2, 6, tokens, 16, seed=3, dtype=dtype, device=device)
        position = torch.tensor(20, device=device)
        torch._dynamo.reset()
        y, seen = compiled(model, q, position, dynamic=False)
        expected = model.double()(q.double(), position)
        model.to(dtype)
        assert (y.double() - expected).abs().max() <= torch.finfo(dtype).eps * 4 * expected.abs().max()
        if device == "cuda" and repeat == "enable_gqa":
            continue  # torch may choose products and a softmax, which no pass knows
        passes = ["decode_attention"] if tokens < 17 else []
        if device == "cuda" and (dtype == torch.float32 or torch.cuda.get_device_capability()[0] != 9):
            passes = []
        if device == "cuda" and tokens == 17 and dtype != torch.float32:
            passes = ["causal attention of a prompt"]
        assert (list(seen.replaced), bool(seen.left)) == (passes, not passes)


def test_attention_without_groups_mask_or_cache(device: str) -> None:
    def scaled(q: Tensor, k: Tensor) -> Tensor:
        return nn.functional.scaled_dot_product_attention(q, k, k, scale=0.3)

    q, k = (randn(1, 4, n, 8, seed=n, device=device, dtype=torch.bfloat16) for n in (2, 9))
    y, seen = compiled(scaled, q, k)
    expected = scaled(q.double(), k.double())
    assert (y.double() - expected).abs().max() <= torch.finfo(y.dtype).eps * 4 * expected.abs().max()
    if device == "cpu" or torch.cuda.get_device_capability()[0] == 9:
        assert list(seen.replaced) == ["decode_attention"]


@pytest.mark.parametrize("name", ["cudnn", "efficient", "flash"])
def test_each_attention_of_a_gpu_is_known(name: str, monkeypatch: pytest.MonkeyPatch) -> None:
    """In graphs on the meta device, which needs no GPU."""
    monkeypatch.setattr(torch.cuda, "get_device_capability", lambda device: (9, 0))
    monkeypatch.setattr(attention, "build_info", lambda: {"cuda": "13.0"})

    def repeated(q: Tensor, k: Tensor, mask: Tensor) -> Tensor:
        each = k[:, :, None].expand(2, 2, 3, 60, 64).reshape(2, 6, 60, 64)
        more = () if name == "flash" else (mask.expand(2, 6, 4, 60), False)
        operator = getattr(torch.ops.aten, f"_scaled_dot_product_{name}_attention")
        return operator(q, each, each, *more, scale=0.3)[0].transpose(1, 2)

    def run(dtype: torch.dtype) -> tuple[report.Report, torch.fx.Graph]:
        q = torch.empty(2, 4, 6, 64, device="meta", dtype=dtype).transpose(1, 2)
        k, mask = (torch.empty(*size, device="meta", dtype=dtype) for size in ((2, 2, 60, 64), (2, 1, 4, 60)))
        graph = make_fx(repeated, tracing_mode="fake")(q, k, mask).graph
        seen = report.Report()
        attention.replace_attention(graph, seen)
        graph.lint()
        return seen, graph

    seen, graph = run(torch.bfloat16)
    (node,) = graph.find_nodes(op="call_function", target=torch.ops.qao.decode_attention.default)
    q, k, mask = graph.find_nodes(op="placeholder")
    assert node.args == (q, k, k, None if name == "flash" else mask, 0.3)
    assert list(seen.replaced) == ["decode_attention"] and not seen.left
    seen, graph = run(torch.float32)
    assert list(seen.left) == ["attention: float32 on a GPU"]


def test_causal_attention_without_a_mask_stays() -> None:
    """torch counts from the first key: one query sees one key."""

    def causal(q: Tensor, k: Tensor) -> Tensor:
        return nn.functional.scaled_dot_product_attention(q, k, k, is_causal=True)

    q, k = randn(1, 4, 1, 8, seed=1), randn(1, 4, 9, 8, seed=2)
    y, seen = compiled(causal, q, k)
    torch.testing.assert_close(y, causal(q, k))
    assert list(seen.left) == ["attention: a causal mask without a tensor"]


def test_attention_of_a_dynamic_number_of_tokens_stays() -> None:
    model = CachedAttention("expand", torch.float32, "cpu")
    q = randn(2, 6, 5, 16, seed=3)
    y, seen = compiled(model, q, torch.tensor(20), dynamic=True)
    torch.testing.assert_close(y, model(q, torch.tensor(20)))
    assert not seen.replaced and "dynamic" in next(iter(seen.left))


# ---- norms and gates -------------------------------------------------------------------------------------------------


class Norm(nn.Module):
    def __init__(self, size: int, wide_weight: bool) -> None:
        super().__init__()
        self.weight = nn.Parameter(randn(size, seed=9))
        self.wide_weight = wide_weight

    def forward(self, x: Tensor) -> Tensor:
        h = x.float()
        h = h * torch.rsqrt(h.pow(2).mean(-1, keepdim=True) + 1e-5)
        return (self.weight * h).to(x.dtype) if self.wide_weight else self.weight * h.to(x.dtype)


class NormedBlock(nn.Module):
    """Three layers of one norm, then a gate of the next, as a decoder block has them."""

    def __init__(self, wide_weight: bool, up_first: bool) -> None:
        super().__init__()
        self.norms = nn.ModuleList(Norm(128, wide_weight) for _ in range(2))
        self.q, self.k, self.v = (nn.Linear(128, n, bias=n == 32) for n in (128, 32, 32))
        self.gate_proj, self.up_proj = (nn.Linear(128, 96, bias=False) for _ in range(2))
        self.down = nn.Linear(96, 128, bias=False)
        self.up_first = up_first

    def forward(self, x: Tensor) -> tuple[Tensor, Tensor]:
        h = self.norms[0](x)
        q, k, v = self.q(h), self.k(h), self.v(h)
        x = x + q * torch.cat((k, v, k, v), -1)
        h = self.norms[1](x)
        if self.up_first:
            up = self.up_proj(h)
            y = nn.functional.silu(self.gate_proj(h)) * up
        else:
            y = nn.functional.silu(self.gate_proj(h)) * self.up_proj(h)
        return x + self.down(y), x


@pytest.mark.parametrize("up_first", [False, True])
@pytest.mark.parametrize("wide_weight", [False, True])
def test_norms_and_gates_become_part_of_the_products(
    wide_weight: bool, up_first: bool, device: str, monkeypatch: pytest.MonkeyPatch
) -> None:
    model = NormedBlock(wide_weight, up_first).bfloat16()
    qao.quantize_(model, qao.Int4WeightOnly(group_size=32), progress=False)
    model = model.to(device)
    if device == "cpu":  # where the operator is right but not faster
        monkeypatch.setattr("qao.inductor.norms.on_hopper", lambda node: True)
    x = randn(2, 128, seed=1, dtype=torch.bfloat16, device=device)
    (y, h), seen = compiled(model, x)
    fused = {
        "one product of several weights (int4_mm)": 2,
        "one operator of RMSNorm, 3 products (int4_mm)": 1,
        "one operator of RMSNorm, 2 products, SiLU gate (int4_mm)": 1,
    }
    assert {what: len(at) for what, at in seen.replaced.items()} == (fused if device == "cpu" or is_hopper() else {})
    with torch.inference_mode():
        exact = NormedBlock.forward(qao.dequantize_(copy.deepcopy(model)).double(), x.double())
        eager = model(x)
    for one, other, right in zip((y, h), eager, exact, strict=True):
        error, of_eager = ((each.double() - right).norm() for each in (one, other))
        assert error <= 1.2 * of_eager and of_eager < 0.02 * right.norm()


@pytest.mark.parametrize("gate_first", [False, True])
def test_a_gate_of_one_weight(gate_first: bool, device: str, monkeypatch: pytest.MonkeyPatch) -> None:
    """Phi-3's form. An operator of one weight has the gate in the first half."""
    norm, linear = Norm(128, False), nn.Sequential(nn.Linear(128, 64))
    model = nn.ModuleList([norm, linear]).bfloat16()
    qao.quantize_(model, qao.Int4WeightOnly(group_size=32), progress=False)
    model = model.to(device)
    if device == "cpu":
        monkeypatch.setattr("qao.inductor.norms.on_hopper", lambda node: True)

    def gated(x: Tensor) -> Tensor:
        gate, up = linear(norm(x)).chunk(2, -1)[:: 1 if gate_first else -1]
        return nn.functional.silu(gate) * up

    x = randn(1, 128, seed=1, dtype=torch.bfloat16, device=device)
    y, seen = compiled(gated, x)
    what = "RMSNorm, 1 product, SiLU gate" if gate_first else "RMSNorm, 1 product"
    fires = device == "cpu" or is_hopper()
    assert list(seen.replaced) == ([f"one operator of {what} (int4_mm)"] if fires else [])
    expected = gated(x).float()
    assert (y.float() - expected).norm() < 0.02 * expected.norm()


def test_norms_with_other_users_stay(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr("qao.inductor.norms.on_hopper", lambda node: True)
    norm, linear = Norm(64, False).bfloat16(), nn.Sequential(nn.Linear(64, 32)).bfloat16()
    qao.quantize_(linear, qao.Int4WeightOnly(group_size=32), progress=False)
    x = randn(1, 64, seed=1).bfloat16()

    def both(x: Tensor) -> tuple[Tensor, Tensor]:
        h = norm(x)
        return linear(h), h

    (y, h), seen = compiled(both, x)
    assert not places(seen)
    torch.testing.assert_close(y, linear(h), rtol=0, atol=0)
    many = randn(129, 64, seed=1).bfloat16()
    _, seen = compiled(lambda x: linear(norm(x)), many)
    assert not places(seen)


QUANTIZED = {
    "int8_int8": (qao.Int8DynamicActivationInt8Weight(), 3),
    "fp8_fp8": (qao.Float8DynamicActivationFloat8Weight(), 3),
    "asymmetric x": (qao.Int8DynamicActivationInt8Weight(symmetric_activations=False), 0),
    "blocks": (qao.Float8DynamicActivationFloat8Weight(granularity="block"), 0),
    "int8": (qao.Int8WeightOnly(), 0),
}


@pytest.mark.parametrize(("case", "dynamic"), [*((case, False) for case in QUANTIZED), ("int8_int8", True)])
def test_norms_and_gates_quantize(case: str, dynamic: bool, device: str, monkeypatch: pytest.MonkeyPatch) -> None:
    scheme, count = QUANTIZED[case]
    model = NormedBlock(False, False).bfloat16()
    qao.quantize_(model, scheme, progress=False)
    model = model.to(device)
    monkeypatch.setattr("qao.inductor.quantizers.on_gpu", lambda node: True)
    x = randn(19, 128, seed=1, dtype=torch.bfloat16, device=device)
    (y, h), seen = compiled(model, x, dynamic=dynamic)
    fused = {f"one operator of {made} and quantization": at for made, at in (("RMSNorm", 2), ("SiLU gate", 1))}
    found = {what: len(at) for what, at in seen.replaced.items() if "quantization" in what}
    assert found == (fused if count else {})
    with torch.inference_mode():
        exact = NormedBlock.forward(qao.dequantize_(copy.deepcopy(model)).double(), x.double())
        eager = model(x)
    for one, other, right in zip((y, h), eager, exact, strict=True):
        error, of_eager = ((each.double() - right).norm() for each in (one, other))
        assert error <= 1.2 * of_eager and of_eager < 0.05 * right.norm()


def test_a_norm_that_is_read_elsewhere_quantizes_by_itself(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr("qao.inductor.quantizers.on_gpu", lambda node: True)
    norm, linear = Norm(64, False).bfloat16(), nn.Sequential(nn.Linear(64, 32)).bfloat16()
    qao.quantize_(linear, qao.Int8DynamicActivationInt8Weight(), progress=False)
    x = randn(3, 64, seed=1).bfloat16()

    def both(x: Tensor) -> tuple[Tensor, Tensor]:
        h = norm(x)
        return linear(h), h

    (y, h), seen = compiled(both, x)
    assert not seen.replaced and "RMSNorm and quantization" in next(iter(seen.left))
    torch.testing.assert_close(y, linear(h), rtol=0, atol=0)


def test_a_sum_is_read_in_front_of_its_norm(monkeypatch: pytest.MonkeyPatch) -> None:
    """A weight that is made behind the sum: what reads the sum before keeps it."""
    monkeypatch.setattr("qao.inductor.quantizers.on_gpu", lambda node: True)
    norm, linear = Norm(64, False).bfloat16(), nn.Sequential(nn.Linear(64, 32)).bfloat16()
    qao.quantize_(linear, qao.Int8DynamicActivationInt8Weight(), progress=False)
    x, residual = randn(3, 64, seed=1).bfloat16(), randn(3, 64, seed=2).bfloat16()

    def block(x: Tensor, residual: Tensor) -> tuple[Tensor, Tensor, Tensor]:
        total = x + residual
        before = total.sin()
        return linear(norm(total)), before, total * 2

    found, seen = compiled(block, x, residual)
    assert list(seen.replaced) == ["one operator of RMSNorm and quantization"]
    for one, other in zip(found, block(x, residual), strict=True):
        torch.testing.assert_close(one.float(), other.float(), rtol=0.02, atol=0.02)

"""quantize_ and its report: sharing, excluded layers, and errors."""

from __future__ import annotations

import copy
import json
import warnings
from collections.abc import Callable
from importlib.util import find_spec
from typing import Any

import pytest
import qao
import torch
from qao import Int4WeightOnly, QuantLinear, quantize_
from qao.quant_primitives.importance import importance_part, inferred_importance
from qao.quantization.report import Report
from torch import Tensor, nn

SCHEME = Int4WeightOnly(group_size=32)
COARSE = Int4WeightOnly(group_size=64, symmetric=True)

# Models here are so small that every weight in them is a big one.
pytestmark = pytest.mark.filterwarnings("ignore:quantize_. these big weights stay")


class Block(nn.Module):
    def __init__(self) -> None:
        super().__init__()
        self.up = nn.Linear(64, 96)
        self.down = nn.Linear(96, 64, bias=False)

    def forward(self, x: Tensor) -> Tensor:
        return x + self.down(self.up(x).relu())


class Model(nn.Module):
    def __init__(self, blocks: int = 2) -> None:
        super().__init__()
        torch.manual_seed(0)
        self.embed = nn.Embedding(50, 64)
        self.blocks = nn.ModuleList(Block() for _ in range(blocks))
        self.norm = nn.LayerNorm(64)
        self.head = nn.Linear(64, 50)

    def forward(self, tokens: Tensor) -> Tensor:
        x = self.embed(tokens)
        for block in self.blocks:
            x = block(x)
        return self.head(self.norm(x))


def quantized(model: nn.Module) -> dict[str, str]:
    """name -> scheme of every QuantLinear."""
    return {name: str(m.scheme) for name, m in model.named_modules() if isinstance(m, QuantLinear)}


def notes(report: Report) -> dict[str, str | None]:
    return {row.name: row.note for row in report.rows if row.status in ("left", "untouched")}


# ---- replacing -------------------------------------------------------------------------------------------------------


def test_every_linear_is_replaced_and_the_model_computes_with_the_dequantized_weights(device: str) -> None:
    model = Model().to(device).eval()
    plain = copy.deepcopy(model)
    report = quantize_(model, SCHEME)
    assert list(quantized(model)) == ["blocks.0.up", "blocks.0.down", "blocks.1.up", "blocks.1.down", "head"]
    assert all(not module.training for module in model.modules())
    for row in report.rows:
        layer, linear = model.get_submodule(row.name), plain.get_submodule(row.name)
        assert isinstance(layer, QuantLinear) and isinstance(linear, nn.Linear)
        error = (linear.weight - layer.dequantize()).norm() / linear.weight.norm()
        assert row.relative_error == pytest.approx(error.item(), rel=1e-4)
        with torch.no_grad():
            linear.weight.copy_(layer.dequantize())
    tokens = torch.randint(0, 50, (2, 7), device=device)
    # Both are float32 computations of the same numbers in another order, a handful of layers deep.
    torch.testing.assert_close(model(tokens), plain(tokens), rtol=1e-4, atol=1e-5)


@pytest.mark.parametrize("dtype", [torch.float32, torch.float16, torch.bfloat16, torch.float64])
def test_weights_of_any_float_dtype(dtype: torch.dtype) -> None:
    model = Model().to(dtype)
    report = quantize_(model, SCHEME)
    assert all(row.status == "quantized" for row in report.rows)
    head = model.head
    assert isinstance(head, QuantLinear) and head.scales.dtype == (torch.float32 if dtype == torch.float64 else dtype)


def test_another_scheme_for_a_quantized_model_is_never_silent(recwarn: pytest.WarningsRecorder) -> None:
    model = Model()
    quantize_(model, {"blocks": SCHEME})
    state = {name: t.clone() for name, t in model.blocks.state_dict().items()}
    with pytest.warns(UserWarning, match=r"keep their scheme:\n  blocks\.0\.up: .*requested as int8, but already"):
        report = quantize_(model, qao.Int8WeightOnly())
    rows = {row.name: row for row in report.rows}
    assert rows["head"].status == "quantized" and rows["head"].note is None
    assert rows["blocks.0.up"].status == "already quantized" and rows["blocks.0.up"].scheme == str(SCHEME)
    assert "requested as int8" in (rows["blocks.0.up"].note or "") and "requested as int8" in str(report)
    for scheme in (qao.Int4WeightOnly(256), {"blocks": qao.Int8WeightOnly()}, lambda module, name: COARSE):
        with pytest.raises(ValueError, match="already quantized keep their scheme.*(?s:.)*dequantize_"):
            quantize_(model, scheme)
    assert all(torch.equal(tensor, state[name]) for name, tensor in model.blocks.state_dict().items())
    recwarn.clear()
    quantize_(model, {"blocks": SCHEME, "head": qao.Int8WeightOnly()})
    quantize_(model, {"blocks": qao.Int8WeightOnly(), "head": None}, filter_fn=lambda module, fqn: fqn == "head")
    assert not [one for one in recwarn if "keep their scheme" in str(one.message)]


def test_again_changes_nothing() -> None:
    model = Model()
    first = quantize_(model, SCHEME)
    modules, state = list(model.modules()), {name: t.clone() for name, t in model.state_dict().items()}
    second = quantize_(model, SCHEME)
    assert list(model.modules()) == modules
    assert all(torch.equal(tensor, state[name]) for name, tensor in model.state_dict().items())
    assert {row.status for row in second.rows} == {"already quantized"}
    assert second.parameters == first.parameters and second.coverage == first.coverage
    assert second.bytes_before == second.bytes_after == first.bytes_after


def test_the_state_dict_loads_into_a_model_quantized_alike() -> None:
    model, other = Model(), Model()
    quantize_(model, SCHEME)
    with torch.device("meta"):
        empty = Model()
    quantize_(empty, SCHEME)
    quantize_(other, SCHEME)
    assert all(parameter.is_meta for parameter in empty.parameters())
    other.load_state_dict(model.state_dict())
    empty.load_state_dict(model.state_dict(), assign=True)
    tokens = torch.arange(10)
    assert torch.equal(other(tokens), model(tokens)) and torch.equal(empty(tokens), model(tokens))


def test_meta_reports_no_error_and_refuses_a_device() -> None:
    with torch.device("meta"):
        model, other = Model(), Model()
    assert {row.relative_error for row in quantize_(model, SCHEME).rows} == {None}
    with pytest.raises(ValueError, match=r"embed is on meta and has no data to quantize on cpu"):
        quantize_(other, SCHEME, device="cpu")
    assert not quantized(other)


def test_device(device: str) -> None:
    model, there = Model(), Model().to(device)
    report, expected = quantize_(model, SCHEME, device=device), quantize_(there, SCHEME)
    assert {parameter.device.type for parameter in model.parameters()} == {device}
    for (name, got), wanted in zip(model.state_dict().items(), there.state_dict().values(), strict=True):
        assert torch.equal(got, wanted), name
    assert report.to_dict() == expected.to_dict()
    model(torch.arange(5, device=device))


def test_peak_memory_is_one_layer_and_the_result(device: str) -> None:
    if device == "cpu":
        pytest.skip("torch counts the bytes of a GPU only")
    model = nn.Sequential(*(nn.Linear(4096, 4096, bias=False, dtype=torch.bfloat16) for _ in range(8)))
    torch.cuda.empty_cache()
    torch.cuda.reset_peak_memory_stats()
    before = torch.cuda.memory_allocated()
    report = quantize_(model, Int4WeightOnly(), device=device)
    layer = 4096 * 4096
    # One layer: 2 bytes of weight, 1 of q, half of packed, five float32 copies of a chunk, which is the layer here.
    assert torch.cuda.max_memory_allocated() - before <= report.bytes_after + layer * (2 + 1 + 0.5 + 5 * 4)


def test_hundreds_of_layers_compile() -> None:
    torch._dynamo.reset()
    model = nn.Sequential(*(nn.Linear(32, 32) for _ in range(120)))
    quantize_(model, SCHEME)
    x = torch.randn(2, 32)
    assert torch.equal(torch.compile(model, fullgraph=True, backend="aot_eager")(x), model(x))


# ---- choosing --------------------------------------------------------------------------------------------------------


@pytest.mark.parametrize(
    "scheme, expected",
    [
        ({"head": COARSE}, {"head": str(COARSE)}),
        ({"blocks.1": SCHEME}, {"blocks.1.up": str(SCHEME), "blocks.1.down": str(SCHEME)}),
        ({"blocks.1.up": None, "blocks.1": SCHEME}, {"blocks.1.down": str(SCHEME)}),  # the first match wins
        ({r"re:.*\.up": COARSE}, {"blocks.0.up": str(COARSE), "blocks.1.up": str(COARSE)}),
        ({"re:blocks": SCHEME}, {}),  # a pattern matches whole names
        ({"head": None, "re:.*down": COARSE}, {"blocks.0.down": str(COARSE), "blocks.1.down": str(COARSE)}),
        (
            lambda module, name: COARSE if module.in_features == 96 and "1" in name else None,
            {"blocks.1.down": str(COARSE)},
        ),
    ],
)
def test_schemes_by_module(scheme: Any, expected: dict[str, str]) -> None:
    model = Model()
    report = quantize_(model, scheme)
    assert quantized(model) == expected
    assert {row.name for row in report.rows if row.status == "quantized"} == set(expected)
    assert {row.status for row in report.rows if row.name not in expected} <= {"excluded"}
    assert not report.problems


def test_filter() -> None:
    model = Model()
    report = quantize_(model, SCHEME, filter_fn=lambda module, fqn: fqn != "head" and isinstance(module, nn.Linear))
    assert "head" not in quantized(model) and len(quantized(model)) == 4
    assert [(row.status, row.note) for row in report.rows if row.name == "head"] == [("excluded", "by the filter")]


@pytest.mark.parametrize(
    "scheme, error, message",
    [
        (Int4WeightOnly, TypeError, r"did you mean Int4WeightOnly\(\)\?"),
        ("int4", TypeError, "scheme must be a scheme such as"),
        ({"haed": SCHEME}, ValueError, "no module of the model matches 'haed'"),
        ({"re:.*proj": None}, ValueError, "no module of the model matches 're:.*proj'"),
        ({"head": "int4"}, TypeError, "the scheme for head must be a Scheme or None, not 'int4'"),
        (lambda module, name: True, TypeError, "must be a Scheme or None, not True"),
    ],
)
def test_schemes_that_make_no_sense(scheme: Any, error: type[Exception], message: str) -> None:
    model = Model()
    with pytest.raises(error, match=message):
        quantize_(model, scheme)
    assert not quantized(model)


@pytest.mark.parametrize("build", [lambda: nn.Linear(64, 32), lambda: nn.Linear(64, 32, device="meta")])
def test_a_lone_linear_cannot_replace_itself(build: Callable[[], nn.Module]) -> None:
    with pytest.raises(TypeError, match=r"is itself a Linear.*QuantLinear\.from_linear"):
        quantize_(build(), SCHEME)


def test_nan_stops_before_anything_is_changed() -> None:
    model = Model()
    with torch.no_grad():
        model.head.weight[3, 4] = float("nan")
    with pytest.raises(ValueError, match=r"^head: the weight \[50, 64\].*NaN or Inf"):
        quantize_(model, SCHEME)
    assert not quantized(model)
    quantize_(model, {"head": None, "re:.*": SCHEME})
    assert len(quantized(model)) == 4


# ---- sharing ---------------------------------------------------------------------------------------------------------


def test_shared_modules_stay_one_module() -> None:
    model = nn.Sequential(nn.Linear(64, 64), nn.ReLU(), Block())
    model.append(model[0])
    model.append(model[2])
    report = quantize_(model, SCHEME)
    assert isinstance(model[0], QuantLinear) and model[0] is model[3] and model[2] is model[4]
    assert isinstance(model[2].up, QuantLinear)
    assert [(row.name, row.aliases) for row in report.rows] == [("0", ["3"]), ("2.up", []), ("2.down", [])]
    assert report.parameters == sum(p.numel() for p in nn.Sequential(nn.Linear(64, 64), Block()).parameters())


class HoldsALayerTwice(nn.Module):
    """As in MaskFormer's heads: the called module is not a child, but an item of a plain list."""

    def __init__(self) -> None:
        super().__init__()
        self.first, self.second = nn.Linear(32, 32), nn.Linear(32, 32)
        self.by_name = {"second": self.second, "other": 1}
        self.layers = [self.first, torch.relu]

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        for layer in self.layers:
            x = layer(x)
        return self.by_name["second"](x)


def test_a_layer_in_a_plain_list_is_replaced_there_too() -> None:
    model = nn.Sequential(HoldsALayerTwice())
    held = model[0]
    x = torch.randn(3, 32)
    before = model(x)
    qao.quantize_(model, qao.Int8WeightOnly())
    assert held.layers[0] is held.first and held.by_name["second"] is held.second
    assert isinstance(held.first, qao.QuantLinear)
    assert not torch.equal(model(x), before)  # it is what was quantized that is called
    assert model.to(torch.bfloat16)(x.bfloat16()).dtype == torch.bfloat16
    qao.dequantize_(model)
    assert held.layers[0] is held.first and held.by_name["second"] is held.second
    assert type(held.first) is nn.Linear and held.layers[1] is torch.relu and held.by_name["other"] == 1


def test_tied_linears_share_their_quantized_weight() -> None:
    model = Model()
    model.blocks[1].up.weight = model.blocks[0].up.weight
    report = quantize_(model, SCHEME)
    first, second = model.blocks[0].up, model.blocks[1].up
    assert isinstance(first, QuantLinear) and isinstance(second, QuantLinear) and first is not second
    assert first.qweight is second.qweight and first.scales is second.scales and first.bias is not second.bias
    rows = {row.name: row for row in report.rows}
    assert rows["blocks.1.up"].note == "shares its weight with blocks.0.up"
    assert (rows["blocks.1.up"].bytes_before, rows["blocks.1.up"].bytes_after) == (0, 0)
    assert rows["blocks.1.up"].relative_error == rows["blocks.0.up"].relative_error
    assert report.parameters_quantized == 2 * 96 * 64 + 96 * 64 + 50 * 64
    assert quantize_(model, SCHEME).parameters_quantized == report.parameters_quantized
    copied = copy.deepcopy(model)
    assert copied.blocks[0].up.qweight is copied.blocks[1].up.qweight


@pytest.mark.parametrize(
    "scheme",
    [
        {"blocks.0.up": SCHEME},
        {"blocks.0.up": SCHEME, "blocks.1.up": COARSE},
    ],
)
def test_tied_linears_that_cannot_go_together_are_left(scheme: Any) -> None:
    model = Model()
    model.blocks[1].up.weight = model.blocks[0].up.weight
    report = quantize_(model, scheme)
    assert not quantized(model) and model.blocks[0].up.weight is model.blocks[1].up.weight
    assert notes(report)["blocks.0.up"] == "its weight is also that of blocks.1.up"


def test_a_head_tied_to_the_embedding_is_left() -> None:
    model = Model()
    model.head.weight = model.embed.weight
    report = quantize_(model, SCHEME)
    assert len(quantized(model)) == 4 and model.head.weight is model.embed.weight
    assert notes(report) == {"head": "its weight is also that of embed; embeddings=True quantizes both"}


# ---- weights that are read -------------------------------------------------------------------------------------------


class Eva(nn.Module):
    """The attention of EVA-02 in timm: one product, and a bias made of two."""

    def __init__(self) -> None:
        super().__init__()
        self.qkv = nn.Linear(64, 192, bias=False)
        self.q_bias, self.v_bias = nn.Parameter(torch.randn(64)), nn.Parameter(torch.randn(64))

    def forward(self, x: Tensor) -> Tensor:
        bias = torch.cat((self.q_bias, torch.zeros_like(self.v_bias), self.v_bias))
        return nn.functional.linear(x, weight=self.qkv.weight, bias=bias)


class Swin(nn.Module):
    """Attention of Swin V2 in torchvision: the bias of k is zero, and a weight is transposed before use."""

    def __init__(self) -> None:
        super().__init__()
        self.qkv, self.proj = nn.Linear(64, 192), nn.Linear(64, 64)

    def forward(self, x: Tensor) -> Tensor:
        bias = self.qkv.bias.clone()
        bias[64:128].zero_()
        q, k, v = nn.functional.linear(x, self.qkv.weight, bias).chunk(3, -1)
        return (q + k + v) @ self.proj.weight.t() + (self.proj.weight @ x.t()).t()


@pytest.mark.filterwarnings("ignore:The weight .* of a quantized layer was read")
@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16])
@pytest.mark.parametrize("kind", [Eva, Swin])
def test_modules_that_read_a_weight_read_the_dequantized_one(
    kind: type[nn.Module], dtype: torch.dtype, device: str
) -> None:
    model = kind().to(device, dtype)
    quantize_(model, SCHEME)
    assert quantized(model)
    plain = qao.dequantize_(copy.deepcopy(model))
    x = torch.randn(3, 64, device=device, dtype=dtype)
    assert torch.equal(model(x), plain(x))  # identical computations


@pytest.mark.parametrize("bias", [True, False])
@pytest.mark.parametrize("scheme", [SCHEME, qao.Int8WeightOnly(), qao.Float8DynamicActivationFloat8Weight()], ids=str)
def test_the_first_parameter_of_a_layer_is_no_integer(scheme: qao.Scheme, bias: bool, device: str) -> None:
    """Swin V2 of transformers casts coordinates to ``next(mlp.parameters()).dtype``, AuraFlow of diffusers an embedding
    of time."""
    mlp = nn.Sequential(nn.Linear(64, 48, bias=bias)).to(device, torch.bfloat16)
    quantize_(mlp, scheme)
    for model in (mlp, copy.deepcopy(mlp), mlp.to(device)):
        dtype = next(model.parameters()).dtype
        assert dtype == torch.bfloat16 if bias else dtype in (torch.bfloat16, torch.float32)


@pytest.mark.parametrize("kind", [Eva, Swin])
@pytest.mark.parametrize("scheme", [SCHEME, qao.Int8DynamicActivationInt8Weight(), qao.Float8WeightOnly()], ids=str)
def test_they_are_traced_by_fx(scheme: qao.Scheme, kind: type[nn.Module], device: str) -> None:
    """As in torchvision's feature extractor, which outputs an intermediate node."""
    model = kind().to(device)
    quantize_(model, scheme)
    graph = torch.fx.symbolic_trace(model)
    x = torch.randn(3, 64, device=device)
    expected = qao.dequantize_(copy.deepcopy(model))(x)
    for traced in (graph, copy.deepcopy(graph)):
        assert torch.equal(traced(x), expected)
    product = next(node for node in graph.graph.nodes if node.target is nn.functional.linear)
    graph.graph.erase_node(next(node for node in graph.graph.nodes if node.op == "output"))
    graph.graph.output(product)
    graph.graph.eliminate_dead_code()
    graph.recompile()
    assert graph(x).shape == (3, 192)


# ---- layers left in float --------------------------------------------------------------------------------------------


def test_layers_with_hooks_are_left_and_keep_working() -> None:
    model, seen = Model(), []
    model.head.register_forward_hook(lambda *_: seen.append("forward"))
    nn.utils.parametrizations.weight_norm(model.blocks[0].up)
    report = quantize_(model, SCHEME)
    assert set(quantized(model)) == {"blocks.0.down", "blocks.1.up", "blocks.1.down"}
    assert set(notes(report)) == {"head", "blocks.0.up"}
    model(torch.arange(5))
    assert seen == ["forward"]


@pytest.mark.filterwarnings("ignore:.*weight_norm.*deprecated")
def test_the_old_weight_norm_and_spectral_norm_are_left() -> None:
    model = nn.Sequential(nn.utils.weight_norm(nn.Linear(64, 64)), nn.utils.spectral_norm(nn.Linear(64, 64)))
    report = quantize_(model, SCHEME)
    assert not quantized(model) and {"0", "1"} <= set(notes(report))
    model(torch.randn(2, 64))


def test_attention_of_torch_keeps_the_weights_it_reads() -> None:
    torch.manual_seed(0)
    model = nn.Sequential(nn.TransformerEncoderLayer(64, 4, 128, batch_first=True), nn.Linear(64, 32)).eval()
    plain = copy.deepcopy(model)
    report = quantize_(model, SCHEME)
    assert list(quantized(model)) == ["1"]
    assert set(notes(report)) == {"0.self_attn.out_proj", "0.self_attn.in_proj_weight", "0.linear1", "0.linear2"}
    x = torch.randn(2, 5, 64)
    with torch.no_grad():  # the fused path
        assert torch.equal(model[0](x), plain[0](x))


def test_the_decoder_layer_of_torch_calls_its_linears() -> None:
    model = nn.TransformerDecoderLayer(64, 4, 128, batch_first=True).eval()
    quantize_(model, SCHEME)
    assert list(quantized(model)) == ["linear1", "linear2"]
    model(torch.randn(2, 5, 64), torch.randn(2, 3, 64))


def test_lora_adapters_stay_trainable() -> None:
    class Lora(nn.Module):
        def __init__(self) -> None:
            super().__init__()
            self.base_layer = nn.Linear(64, 64)
            self.lora_A = nn.ModuleDict({"default": nn.Linear(64, 8, bias=False)})
            self.lora_B = nn.ModuleDict({"default": nn.Linear(8, 64, bias=False)})

    model = nn.Sequential(Lora())
    report = quantize_(model, SCHEME, strict=True)
    assert list(quantized(model)) == ["0.base_layer"]
    assert {row.name for row in report.rows if row.status == "excluded"} == {"0.lora_A.default", "0.lora_B.default"}


class Experts(nn.Module):
    def __init__(self) -> None:
        super().__init__()
        self.gate_up_proj = nn.Parameter(torch.randn(4, 64, 32))


class Mixture(nn.Module):
    def __init__(self) -> None:
        super().__init__()
        self.embed = nn.Embedding(1000, 64)
        self.experts = Experts()
        self.projection = nn.Parameter(torch.randn(64, 64))
        self.small = nn.Parameter(torch.randn(2, 2))
        self.linear = nn.Linear(64, 64)


@pytest.mark.filterwarnings("error")
def test_fused_experts_and_other_big_weights_are_said_loudly() -> None:
    model = Mixture()
    with pytest.warns(UserWarning, match=r"(?s)these big weights.*projection.*experts\.gate_up_proj.*fused expert"):
        report = quantize_(model, SCHEME)
    untouched = {row.name for row in report.rows if row.status == "untouched"}
    # neither the embedding nor the small one
    assert untouched == {"experts.gate_up_proj", "projection"}
    assert "fused expert tensor" in str(report)


def test_small_experts_in_a_big_model_are_found_too() -> None:
    model = nn.ModuleList([nn.Embedding(50_000, 64), Experts()])
    assert list(notes(quantize_(model, SCHEME))) == ["1.gate_up_proj"]


@pytest.mark.filterwarnings("error")
def test_what_was_not_asked_for_is_reported_in_silence() -> None:
    model = Mixture()
    report = quantize_(model, {"linear": SCHEME})
    assert not report.problems
    assert {row.name: row.status for row in report.rows} == {
        "linear": "quantized",
        "projection": "excluded",
        "experts.gate_up_proj": "excluded",
    }
    with pytest.warns(UserWarning, match="experts"):
        quantize_(Mixture(), {"experts": SCHEME})


def test_strict_raises_before_anything_is_changed() -> None:
    model = Mixture()
    with pytest.raises(ValueError, match=r"(?s)strict.*experts\.gate_up_proj.*The model is unchanged"):
        quantize_(model, SCHEME, strict=True)
    assert not quantized(model)
    quantize_(model, {"linear": SCHEME, "re:.*": None}, strict=True)
    assert list(quantized(model)) == ["linear"]
    hooked = Model()
    hooked.head.register_forward_pre_hook(lambda *_: None)
    with pytest.raises(ValueError, match=r"(?s)strict.*head \[50, 64\]: it has forward_pre_hooks"):
        quantize_(hooked, SCHEME, strict=True)
    assert not quantized(hooked)


# ---- the report ------------------------------------------------------------------------------------------------------


def test_report_numbers() -> None:
    model = Model()
    parameters = sum(parameter.numel() for parameter in model.parameters())
    weights = {name: m.weight.numel() for name, m in model.named_modules() if isinstance(m, nn.Linear)}
    report = quantize_(model, {"head": None, "re:.*": SCHEME})
    del weights["head"]
    assert report.parameters == parameters and report.parameters_quantized == sum(weights.values())
    assert report.coverage == pytest.approx(sum(weights.values()) / parameters)
    assert report.bytes_before == 4 * sum(weights.values())
    after = 0
    for row in report.rows:
        if row.status == "quantized":
            layer = model.get_submodule(row.name)
            assert isinstance(layer, QuantLinear) and row.shape == (layer.out_features, layer.in_features)
            size = sum(t.numel() * t.element_size() for t in (layer.qweight, layer.scales))
            assert row.bytes_after == size and row.bytes_before == 4 * weights[row.name]
            assert row.scheme == str(SCHEME) and 0 < (row.relative_error or 0) < 0.2
            after += size
    assert report.bytes_after == after < report.bytes_before / 4


def test_report_as_json() -> None:
    model = Model()
    data = json.loads(json.dumps(quantize_(model, SCHEME).to_dict()))
    assert [row["name"] for row in data["rows"]] == list(quantized(model))
    assert data["rows"][0]["shape"] == [96, 64] and data["parameters"] > data["parameters_quantized"] > 0


def test_report_as_table() -> None:
    model = Model()
    model.head.register_forward_hook(lambda *_: None)
    text = str(quantize_(model, SCHEME))
    lines = text.splitlines()
    kernel = ["kernel,"] if find_spec("qao._host") else []  # without it no kernel is named
    assert lines[0].split() == ["layer", "shape", "scheme", "MiB", "before", "after", "error", *kernel, "note"]
    assert any(line.startswith("blocks.0.up") and "96x64" in line and str(SCHEME) in line for line in lines)
    assert any(line.startswith("head") and "forward_hooks" in line for line in lines)
    assert "4 of 5 layers quantized" in text


def test_a_long_table_joins_alike_layers() -> None:
    report = quantize_(Model(blocks=30), {"blocks.7.up": COARSE, "re:.*": SCHEME})
    assert len(report.rows) == 61
    lines = str(report).splitlines()
    assert [line.split()[0] for line in lines[2:6]] == [
        "blocks.{0..29}.up",
        "blocks.{0..29}.down",
        "blocks.7.up",
        "head",
    ]
    assert "x29" in lines[2] and "x30" in lines[3]


def test_kernel_names() -> None:
    host = pytest.importorskip("qao._host")
    report = quantize_(Model(), SCHEME)
    for row in report.rows:
        n, k = row.shape
        facts = {"weight": "int4", "n": n, "k": k, "group_size": 32, "has_zeros": True, "x_dtype": "float32"}
        names = [host.cpu_kernel(host.Problem(m=m, **facts)) for m in (1, 512)]
        assert row.kernel == " / ".join(dict.fromkeys(names))


def test_without_host_module_kernels_have_no_names(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(qao.schemes.base, "_host", None)
    assert {row.kernel for row in quantize_(Model(), SCHEME).rows} == {None}


def test_progress_is_silent_when_it_is_quick_or_unwanted(capfd: pytest.CaptureFixture[str]) -> None:
    with warnings.catch_warnings():
        warnings.simplefilter("error")
        for progress in (True, False):
            quantize_(Model(), SCHEME, progress=progress)
    assert capfd.readouterr() == ("", "")


def test_values_tell_of_queries_and_keys(device: str) -> None:
    """Importance inferred from a value layer also applies to columns that queries read."""
    attention = torch.nn.Module()
    generator = torch.Generator().manual_seed(0)
    for name, k in (("q_proj", 64), ("k_proj", 32), ("v_proj", 64)):
        layer = torch.nn.Linear(k, 48, bias=False)
        layer.weight.data = torch.randn(48, k, generator=generator) * torch.logspace(-2, 0, k).roll(k // 2)
        setattr(attention, name, layer.to(device))
    attention.q_proj.weight.data = attention.q_proj.weight.data.flip(1)
    weights = {name: layer.weight.detach().clone() for name, layer in attention.named_children()}
    scheme = Int4WeightOnly(group_size=32)
    quantize_(attention, scheme, progress=False)
    importance = inferred_importance([importance_part(weights["v_proj"], "q_proj")], 64)
    inferred = {name: scheme.quantize(weights[name], importance=importance) for name in ("q_proj", "v_proj")}
    alone = {name: scheme.quantize(weight) for name, weight in weights.items()}
    assert not torch.equal(inferred["q_proj"].scales, alone["q_proj"].scales)
    for name, expected in (inferred | {"k_proj": alone["k_proj"]}).items():
        layer = getattr(attention, name)
        assert torch.equal(layer.scales, expected.scales) and torch.equal(layer.qweight, expected.qweight)


def test_gate_and_up_tell_of_down(device: str) -> None:
    """Columns of down read large activations where the rows of gate and up are large."""
    mlp, generator = torch.nn.Module(), torch.Generator().manual_seed(0)
    for name, (n, k) in {"down_proj": (48, 64), "gate_proj": (64, 96), "up_proj": (64, 96)}.items():
        layer = torch.nn.Linear(k, n, bias=False)
        rows = torch.logspace(-1, 1, n).roll(n // 3)[:, None] if k == 96 else 1
        layer.weight.data = torch.randn(n, k, generator=generator) * rows
        setattr(mlp, name, layer.to(device))
    weight = mlp.down_proj.weight.detach().clone()
    makers = [layer.weight.detach().clone() for layer in (mlp.gate_proj, mlp.up_proj)]
    sizes = [maker.double().square().mean(1) for maker in makers]
    expected = (sizes[0] / sizes[0].mean() + 1e-4) * (sizes[1] / sizes[1].mean() + 1e-4)
    importance = inferred_importance([importance_part(maker, "down_proj") for maker in makers], 64)
    assert importance is not None
    torch.testing.assert_close(importance.double(), expected, rtol=1e-5, atol=0)
    scheme = Int4WeightOnly(group_size=32)
    quantize_(mlp, scheme, progress=False)
    inferred, alone = scheme.quantize(weight, importance=importance), scheme.quantize(weight)
    assert torch.equal(mlp.down_proj.scales, inferred.scales) and torch.equal(mlp.down_proj.qweight, inferred.qweight)
    errors = [
        ((scheme.dequantize(*packed[:2], 48, 64, torch.float32) - weight).double().square() @ expected).sum()
        for packed in (inferred, alone)
    ]
    assert errors[0] < 0.8 * errors[1]

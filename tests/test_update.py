"""New float weights for quantized layers in place: ``load_float_`` and ``update_``."""

from __future__ import annotations

import copy
from typing import Any

import pytest
import qao
import torch
from torch import Tensor, nn

SCHEMES = [
    qao.Int4WeightOnly(group_size=32),
    qao.Int4WeightOnly(group_size=-1, symmetric=True, scale_dtype=torch.float16),
    qao.Int8WeightOnly(),
    qao.Float8WeightOnly(granularity="block"),
    qao.Int8DynamicActivationInt8Weight(symmetric_activations=False),
    qao.Int8DynamicActivationInt4Weight(group_size=32, symmetric_activations=False),
    qao.Float8StaticActivationFloat8Weight(granularity="tensor", activation_scale=0.02),
    qao.Float8DynamicActivationInt4Weight(group_size=32),
]
# Those that one kernel quantizes.
ONE_PASS = [
    qao.Int4WeightOnly(group_size=32, clip_search=False),
    qao.Int4WeightOnly(group_size=128, clip_search=False, whole_zeros=True),
    qao.Int4WeightOnly(group_size=-1, symmetric=True, clip_search=False, scale_dtype=torch.float16),
    qao.Int8WeightOnly(clip_search=False),
    qao.Float8WeightOnly(granularity="row"),
    qao.Int8DynamicActivationInt8Weight(symmetric_activations=False, clip_search=False),
    qao.Int8DynamicActivationInt4Weight(group_size=64, symmetric_activations=False, clip_search=False),
    qao.Float8DynamicActivationInt4Weight(group_size=256, clip_search=False),
]
INT4 = SCHEMES[0]


def tensors(module: nn.Module) -> dict[str, Tensor]:
    return {name: p.detach().clone() for name, p in module.named_parameters(remove_duplicate=False)}


def same(got: nn.Module, expected: nn.Module) -> None:
    for (name, a), (_, b) in zip(tensors(got).items(), tensors(expected).items(), strict=True):
        assert a.dtype == b.dtype and torch.equal(a, b), name


class Attention(nn.Module):
    """Layer names by which one weight's importance is inferred from another, and a norm."""

    def __init__(self, seed: int, tied: bool = True) -> None:
        super().__init__()
        torch.manual_seed(seed)
        self.embed_tokens = nn.Embedding(48, 64)
        self.norm = nn.LayerNorm(64)
        self.q_proj, self.v_proj = nn.Linear(64, 32), nn.Linear(64, 32)
        self.out = nn.Linear(32, 64, bias=False)
        self.lm_head = nn.Linear(64, 48, bias=False)
        nn.init.normal_(self.norm.weight)
        if tied:
            self.lm_head.weight = self.embed_tokens.weight

    def forward(self, ids: Tensor) -> Tensor:
        x = self.norm(self.embed_tokens(ids))
        return self.lm_head(self.out(torch.tanh(self.q_proj(x)) * self.v_proj(x)))


@pytest.mark.parametrize("scheme", [*SCHEMES, *ONE_PASS], ids=lambda s: f"{s}{', no search' * (s in ONE_PASS)}")
def test_a_layer_gets_another_weight_in_place(scheme: qao.Scheme, device: str) -> None:
    torch._dynamo.reset()  # a scheme a case, and each is compiled anew
    torch.manual_seed(0)
    old, new = nn.Linear(96, 40).to(device), nn.Linear(96, 40).to(device)
    layer = qao.QuantLinear.from_linear(old, scheme)
    expected = qao.QuantLinear.from_linear(new, scheme)
    expected.bias = layer.bias
    compiled = torch.compile(layer, fullgraph=True, dynamic=False, backend="eager")
    x = torch.randn(3, 96, device=device)
    assert torch.equal(compiled(x), layer(x))
    before = {name: (p, p.data_ptr(), p._version) for name, p in layer.named_parameters()}
    with torch._dynamo.config.patch(error_on_recompile=True):
        layer.load_float_(new.weight)
        assert torch.equal(compiled(x), expected(x))
    same(layer, expected)
    for name, parameter in layer.named_parameters():
        own, address, version = before[name]
        assert parameter is own and parameter.data_ptr() == address
        assert (parameter._version > version) == (name not in ("bias", "activation_scale"))
    parts = new.weight.detach().split([8, 32])
    layer.load_float_(old.weight)
    layer.load_float_(parts)  # of a merged layer
    same(layer, expected)


def test_backward_of_what_was_computed_with_the_old_weight_is_an_error() -> None:
    layer = qao.QuantLinear.from_linear(nn.Linear(64, 32), INT4)
    y = layer(torch.randn(2, 64, requires_grad=True)).sum()
    layer.load_float_(torch.randn(32, 64))
    with pytest.raises(RuntimeError, match="modified by an inplace operation"):
        y.backward()


@pytest.mark.parametrize(
    "weight, kind, words",
    [
        (torch.ones(64, 32), ValueError, r"head: the weight is \[64, 32\], but this QuantLinear has \[32, 64\]"),
        (torch.ones(32, 64, dtype=torch.int8), TypeError, "head: .*torch.int8.*float32"),
        (torch.full((32, 64), float("nan")), ValueError, "head: .*NaN"),
        (torch.ones(32, 64, device="meta"), ValueError, "head: the new weight is on meta"),
        (torch.full((32, 64), 3e38), ValueError, "head: .*overflows torch.float16"),
    ],
)
def test_a_wrong_weight_changes_nothing(weight: Tensor, kind: type[Exception], words: str) -> None:
    scheme = qao.Int4WeightOnly(group_size=32, scale_dtype=torch.float16)
    layer = qao.QuantLinear.from_linear(nn.Linear(64, 32), scheme)
    before = copy.deepcopy(layer)
    with pytest.raises(kind, match=words):
        layer.load_float_(weight, name="head")
    same(layer, before)


@pytest.mark.parametrize("scheme", [INT4, SCHEMES[5], ONE_PASS[0], ONE_PASS[5]], ids=str)
@pytest.mark.parametrize("tied", [True, False])
def test_a_model_becomes_what_quantizing_the_new_floats_gives(scheme: qao.Scheme, tied: bool, device: str) -> None:
    torch._dynamo.reset()  # a scheme a case, and each is compiled anew
    model, floats = Attention(0, tied).to(device), Attention(1, tied).to(device)
    expected = copy.deepcopy(floats)
    for some in (model, expected):
        qao.quantize_(some, scheme, embeddings=tied)
    ids = torch.arange(7, device=device)
    compiled = torch.compile(model, fullgraph=True, dynamic=False, backend="eager")
    compiled(ids)
    state = floats.state_dict()
    if tied:
        del state["lm_head.weight"]
    addresses = [p.data_ptr() for p in model.parameters()]
    with torch._dynamo.config.patch(error_on_recompile=True):
        updated = qao.update_(compiled, {f"_orig_mod.{name}": value for name, value in state.items()})
        assert torch.equal(compiled(ids), expected(ids))
    same(model, expected)
    assert addresses == [p.data_ptr() for p in model.parameters()]
    assert {"q_proj", "v_proj", "out"} < set(updated)


@pytest.mark.parametrize("scheme", [INT4, *ONE_PASS], ids=lambda s: f"{s}{', no search' * (s in ONE_PASS)}")
def test_a_captured_graph_goes_on(scheme: qao.Scheme) -> None:
    if not torch.cuda.is_available():
        pytest.skip("needs a GPU")
    torch.manual_seed(0)
    model, floats = (nn.Sequential(nn.Linear(512, 256), nn.Linear(256, 512)).cuda() for _ in range(2))
    expected = copy.deepcopy(floats)
    for some in (model, expected):
        qao.quantize_(some, scheme)
    x = torch.randn(3, 512, device="cuda")
    with torch.no_grad():
        model(x)
        graph = torch.cuda.CUDAGraph()
        with torch.cuda.graph(graph):
            y = model(x)
        qao.update_(model, floats.state_dict())
        graph.replay()
        assert torch.equal(y, expected(x))


def test_not_all_names_at_once() -> None:
    model, floats = Attention(0), Attention(1)
    expected = copy.deepcopy(floats)
    for some in (model, expected):
        qao.quantize_(some, INT4)
    state = floats.state_dict()
    first = {name: state.pop(name) for name in ("q_proj.weight", "v_proj.weight")}
    assert qao.update_(model, first, strict=False) == ["q_proj", "v_proj"]
    assert qao.update_(model, state, strict=False) == ["out"]
    same(model, expected)


def spoilt(**changes: Any) -> dict[str, Tensor]:
    state = Attention(1).state_dict()
    state.update({name.replace("__", "."): value for name, value in changes.items()})
    return {name: value for name, value in state.items() if value is not None}


@pytest.mark.parametrize(
    "state, words",
    [
        (
            spoilt(out__weight=None, q_proj__bias=None),
            "missing: out.weight\n  missing: q_proj.bias",
        ),
        (spoilt(other__weight=torch.ones(2)), "unexpected: other.weight"),
        (spoilt(out__qweight=torch.ones(2)), "unexpected: out.qweight"),
        (spoilt(norm__weight=torch.ones(63)), r"norm.weight: \[63\], but the model has \[64\]"),
        (spoilt(out__weight=torch.ones(64, 31)), r"out.weight: the weight is \[64, 31\]"),
        (spoilt(v_proj__weight=torch.full((32, 64), float("inf"))), "v_proj.weight: .*Inf"),
        (
            spoilt(lm_head__weight=torch.ones(48, 64)),
            "it differs from",
        ),
        (spoilt(lm_head__weight=None, embed_tokens__weight=None), "missing: .*embed_tokens.weight"),
    ],
)
def test_a_wrong_state_changes_nothing(state: dict[str, Tensor], words: str) -> None:
    model = Attention(0)
    qao.quantize_(model, INT4, embeddings=True)
    before = copy.deepcopy(model)
    with pytest.raises(ValueError, match=words):
        qao.update_(model, state)
    same(model, before)


def test_conv1d_of_transformers() -> None:
    utils = pytest.importorskip("transformers.pytorch_utils")
    torch.manual_seed(0)
    model, floats = (nn.Sequential(utils.Conv1D(32, 64)) for _ in range(2))
    expected = copy.deepcopy(floats)
    for some in (model, expected):
        qao.quantize_(some, INT4)
    assert qao.update_(model, floats.state_dict()) == ["0"]
    same(model, expected)

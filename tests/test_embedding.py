"""QuantEmbedding, and quantize_(embeddings=True): one quantized weight for input embedding and head."""

from __future__ import annotations

import copy
import io
import pickle
from collections.abc import Callable
from typing import Any

import pytest
import torch
from qao import (
    Float8DynamicActivationInt4Weight,
    Float8WeightOnly,
    Int4WeightOnly,
    Int8DynamicActivationInt4Weight,
    Int8DynamicActivationInt8Weight,
    Int8WeightOnly,
    QuantLinear,
    Scheme,
    quantize_,
)
from qao.nn import QuantEmbedding
from torch import Tensor, nn

N, K = 90, 72
INT4 = Int4WeightOnly(group_size=32, clip_search=False)
SCHEMES = (
    INT4,
    Int4WeightOnly(group_size=-1, symmetric=True, scale_dtype=torch.float16, clip_search=False),
    Int8WeightOnly(clip_search=False),
    Int8DynamicActivationInt8Weight(symmetric_activations=False, clip_search=False),
    Int8DynamicActivationInt4Weight(clip_search=False),
    Float8DynamicActivationInt4Weight(clip_search=False),
)
all_schemes = pytest.mark.parametrize("scheme", SCHEMES, ids=str)
pytestmark = pytest.mark.filterwarnings("ignore:quantize_. these big weights stay", "ignore:The weight .* was read")


class Model(nn.Module):
    """Tied embedding and head."""

    def __init__(self) -> None:
        super().__init__()
        self.embed = nn.Embedding(N, K, padding_idx=0)
        self.up = nn.Linear(K, K)
        self.head = nn.Linear(K, N, bias=False)
        self.head.weight = self.embed.weight

    def forward(self, ids: Tensor) -> Tensor:
        return self.head(torch.relu(self.up(self.embed(ids))))


def make(device: str = "cpu") -> Model:
    torch.manual_seed(0)
    return Model().to(device)


def tied(model: Any) -> bool:
    embed, head = model.embed, model.head
    assert isinstance(embed, QuantEmbedding) and isinstance(head, QuantLinear)
    return embed.qweight is head.qweight and embed.scales is head.scales


def ids_of(*shape: int, device: str = "cpu") -> Tensor:
    return torch.randint(0, N, shape, generator=torch.Generator().manual_seed(1)).to(device)


# ---- the module ------------------------------------------------------------------------------------------------------


@pytest.mark.parametrize("dtype", (torch.float32, torch.float16, torch.bfloat16, torch.float64), ids=str)
@all_schemes
def test_from_embedding(scheme: Scheme, dtype: torch.dtype, device: str) -> None:
    torch.manual_seed(0)
    embedding = nn.Embedding(N, K, padding_idx=3, dtype=dtype, device=device).eval()
    layer = QuantEmbedding.from_embedding(embedding, scheme)
    assert (layer.num_embeddings, layer.embedding_dim, layer.padding_idx) == (N, K, 3) and not layer.training
    assert not any(parameter.requires_grad for parameter in layer.parameters())
    assert set(dict(layer.named_parameters())) == {"qweight", "scales"}
    rows, dense = layer(ids_of(2, 5, device=device)), layer.dequantize(torch.float32)
    assert rows.dtype == (torch.float32 if dtype == torch.float64 else dtype)
    assert torch.equal(rows, dense[ids_of(2, 5, device=device)].to(rows.dtype))
    assert torch.equal(layer.weight + 0, dense.to(rows.dtype))
    # Half a step of the largest magnitude of a row, 4 or 8 bits wide, and what scales lose in 16 bits.
    half_step = embedding.weight.abs().amax(1, keepdim=True) / (7 if scheme.weights == "int4" else 127)
    assert ((dense - embedding.weight).abs() <= half_step * 1.02).all() and embedding.weight.dtype == dtype
    assert str(scheme) in repr(layer) and "90, 72, padding_idx=3" in repr(layer)


def test_dtype_follows_the_model(device: str) -> None:
    layer = QuantEmbedding.from_embedding(nn.Embedding(N, K, device=device), INT4)
    before = [parameter.clone() for parameter in layer.parameters()]
    for cast, dtype in (
        (layer.half, torch.float16),
        (layer.bfloat16, torch.bfloat16),
        (layer.float, torch.float32),
        (lambda: layer.to(torch.float16), torch.float16),
    ):
        cast()
        assert layer(ids_of(3, device=device)).dtype == layer.weight.dtype == dtype
        assert all(torch.equal(a, b) for a, b in zip(before, layer.parameters(), strict=True))
        assert all(a.dtype == b.dtype for a, b in zip(before, layer.parameters(), strict=True))


def test_gradients_begin_behind_it(device: str) -> None:
    layer = QuantEmbedding.from_embedding(nn.Embedding(N, K, device=device), INT4)
    assert not layer(ids_of(3, device=device)).requires_grad
    layer.register_forward_hook(lambda module, args, output: output.requires_grad_(True))
    linear = nn.Linear(K, 5, device=device)
    linear(layer(ids_of(3, device=device))).sum().backward()
    assert linear.weight.grad is not None and all(p.grad is None for p in layer.parameters())
    assert layer.requires_grad_(False) is layer
    with pytest.raises(RuntimeError, match="frozen and cannot be trained"):
        layer.requires_grad_(True)


def test_what_cannot_be_quantized() -> None:
    class Own(nn.Embedding):
        def forward(self, ids: Tensor) -> Tensor:
            return super().forward(ids) + 1

    hooked = nn.Embedding(N, K)
    hooked.register_forward_hook(lambda *_: None)
    cases: list[tuple[nn.Module, Scheme, str]] = [
        (Own(N, K), INT4, "Own is a subclass of nn.Embedding with its own forward"),
        (nn.Embedding(N, K, max_norm=1.0), INT4, "max_norm"),
        (nn.Embedding(N, K, sparse=True), INT4, "sparse"),
        (nn.Embedding(N, K, scale_grad_by_freq=True), INT4, "scale_grad_by_freq"),
        (hooked, INT4, "forward_hooks"),
        (nn.Embedding(N, K), Float8WeightOnly(), "quantized to int4 or int8, but fp8 has fp8 weights"),
        (nn.Embedding(0, K), INT4, "empty"),
    ]
    for embedding, scheme, message in cases:
        with pytest.raises(ValueError, match=message):
            QuantEmbedding.from_embedding(embedding, scheme, name="here")
    with pytest.raises(TypeError, match="must be an nn.Embedding, not Linear"):
        QuantEmbedding.from_embedding(nn.Linear(3, 3), INT4)
    with pytest.raises(TypeError, match="must be a Scheme"):
        QuantEmbedding.from_embedding(nn.Embedding(3, 3), Int4WeightOnly)  # type: ignore[arg-type]
    with torch.device("meta"), pytest.raises(ValueError, match="on meta"):
        QuantEmbedding.from_embedding(nn.Embedding(3, 3), INT4, device="cpu")


# ---- quantize_ -------------------------------------------------------------------------------------------------------


@all_schemes
def test_one_weight_for_both(scheme: Scheme, device: str) -> None:
    model = make(device)
    plain, float_weight = copy.deepcopy(model), model.embed.weight
    report = quantize_(model, scheme, embeddings=True)
    assert tied(model)
    packed = QuantLinear.from_linear(plain.head, scheme).packed
    assert torch.equal(model.head.qweight, packed.qweight) and torch.equal(model.head.scales, packed.scales)
    rows = {row.name: row for row in report.rows}
    assert rows["embed"].status == rows["head"].status == "quantized" and not report.problems
    assert rows["embed"].note == "shares its weight with head" and rows["head"].note == "shares its weight with embed"
    assert rows["embed"].bytes_before == rows["embed"].bytes_after == 0
    assert rows["head"].bytes_before == float_weight.nbytes and rows["head"].bytes_after < float_weight.nbytes / 2
    assert rows["embed"].kernel == f"{scheme.weights}_embedding"
    assert report.parameters_quantized == N * K + K * K and report.parameters == N * K + K * K + K
    assert "3 of 3 layers quantized" in str(report)
    ids = ids_of(2, 7, device=device)
    with torch.no_grad():
        expected = model.head(torch.relu(model.up(model.head.dequantize(torch.float32)[ids])))
    assert torch.equal(model(ids), expected)


def test_without_it_both_stay_and_the_report_says_so() -> None:
    model = make()
    weight = model.embed.weight
    report = quantize_(model, INT4)
    assert model.head.weight is model.embed.weight is weight
    rows = {row.name: (row.status, row.note) for row in report.rows}
    assert rows["head"] == ("left", "its weight is also that of embed; embeddings=True quantizes both")
    assert rows["embed"] == ("kept", "shares its weight with head; embeddings=True quantizes both")
    assert [row.name for row in report.problems] == ["head"] and "1 of 2 layers quantized" in str(report)


@pytest.mark.parametrize(
    "change, scheme, note",
    [
        (lambda m: setattr(m.embed, "max_norm", 1.0), INT4, "it has max_norm, which rewrites rows"),
        (lambda m: m.embed.register_forward_hook(lambda *_: None), INT4, "it has forward_hooks, which would be lost"),
        (lambda m: setattr(m, "embed", torch.compile(m.embed)), INT4, "torch.compile was called on it and keeps it"),
        (lambda m: None, Float8WeightOnly(), "embeddings are quantized to int4 or int8, but fp8 has fp8 weights"),
    ],
)
def test_what_stands_against_it_is_said(change: Callable[[Model], Any], scheme: Scheme, note: str) -> None:
    model = make()
    change(model)
    report = quantize_(model, scheme, embeddings=True)
    assert model.head.weight is model.embed.weight and not isinstance(model.head, QuantLinear)
    head, embed = (next(row for row in report.rows if row.name.startswith(name)) for name in ("head", "embed"))
    assert head.status == "left" and f"its weight is also that of {embed.name}; {note}" in str(head.note)
    assert embed.status == "kept" and embed.note == f"shares its weight with head; {str(head.note).split('; ', 1)[1]}"
    with pytest.raises(ValueError, match="strict"):
        quantize_(model, scheme, embeddings=True, strict=True)


def test_the_linear_decides() -> None:
    model = make()
    report = quantize_(model, {"head": None, "re:.*": INT4}, embeddings=True)
    assert model.head.weight is model.embed.weight and isinstance(model.up, QuantLinear)
    rows = {row.name: (row.status, row.note) for row in report.rows}
    assert rows["embed"] == ("kept", "no quantized linear layer shares its weight") and rows["head"][0] == "excluded"
    quantize_(model, {"head": SCHEMES[2]}, embeddings=True)
    assert tied(model) and model.embed.scheme == SCHEMES[2]


def test_other_embeddings_stay() -> None:
    model = nn.Sequential(nn.Embedding(N, K), nn.Linear(K, N))
    report = quantize_(model, INT4, embeddings=True)
    assert type(model[0]) is nn.Embedding and isinstance(model[1], QuantLinear)
    assert {row.name: row.status for row in report.rows} == {"0": "kept", "1": "quantized"} and not report.problems
    assert {row.name for row in quantize_(model, INT4).rows} == {"1"}


def test_a_reader_that_is_no_embedding_keeps_all_as_they_are() -> None:
    model = make()
    model.other = nn.ParameterList([model.embed.weight])
    report = quantize_(model, INT4, embeddings=True)
    assert model.head.weight is model.embed.weight is model.other[0]
    assert "its weight is also that of embed, other" in str(report)


def test_several_of_each() -> None:
    model = make()
    model.embed_too, model.head_too = nn.Embedding(N, K), nn.Linear(K, N)
    model.embed_too.weight = model.head_too.weight = model.embed.weight
    report = quantize_(model, INT4, embeddings=True)
    modules = [model.embed, model.embed_too, model.head, model.head_too]
    assert len({id(module.qweight) for module in modules}) == 1
    assert sum(row.bytes_after for row in report.rows if row.name != "up") == sum(
        tensor.nbytes for tensor in (model.head.qweight, model.head.scales)
    )


def test_again_changes_nothing() -> None:
    model = make()
    first = quantize_(model, INT4, embeddings=True)
    modules = list(model.modules())
    for embeddings in (True, False):
        second = quantize_(model, INT4, embeddings=embeddings)
        assert list(model.modules()) == modules and tied(model)
        assert {row.name: row.status for row in second.rows} == dict.fromkeys(
            ("up", "head", "embed"), "already quantized"
        )
        assert second.bytes_after == first.bytes_after
        assert second.parameters_quantized == first.parameters_quantized and second.parameters == first.parameters


# ---- one weight stays one --------------------------------------------------------------------------------------------


def test_sharing_survives_moves_copies_and_pickles(device: str) -> None:
    model = make()
    quantize_(model, INT4, embeddings=True)
    expected = model(ids_of(5))
    for changed in (
        copy.deepcopy(model),
        pickle.loads(pickle.dumps(model)),
        copy.deepcopy(model).to(device),
        copy.deepcopy(model).to(torch.bfloat16).float(),
        copy.deepcopy(model).to("meta"),
    ):
        if changed.head.qweight.is_meta:
            assert changed.embed(ids_of(5, device="meta")).shape == (5, K)
            continue
        assert tied(changed) and changed.head.qweight is not model.head.qweight
        if changed.head.qweight.device.type == "cpu":
            assert torch.allclose(changed(ids_of(5)), expected, atol=0.05)
    assert tied(quantize_and_move(device))


def quantize_and_move(device: str) -> Model:
    model = make()
    quantize_(model, INT4, embeddings=True, device=device)
    return model


@pytest.mark.parametrize("assign", (False, True))
@all_schemes
def test_state_dict(scheme: Scheme, assign: bool, device: str) -> None:
    model, file = make(device), io.BytesIO()
    quantize_(model, scheme, embeddings=True)
    torch.save(model.state_dict(), file)
    file.seek(0)
    with torch.device("meta" if assign else device):
        other = Model()
    quantize_(other, scheme, embeddings=True)
    assert tied(other)
    other.load_state_dict(torch.load(file, weights_only=True), assign=assign)
    assert tied(other) and not other.head.qweight.requires_grad
    assert torch.equal(other(ids_of(5, device=device)), model(ids_of(5, device=device)))


def test_models_that_are_assigned_one_state_share_no_parameters() -> None:
    model = make()
    quantize_(model, INT4, embeddings=True)
    state, others = model.state_dict(), []
    for _ in range(2):
        with torch.device("meta"):
            other = Model()
        quantize_(other, INT4, embeddings=True)
        other.load_state_dict(state, assign=True)
        assert tied(other)
        others.append(other)
    assert others[0].head.qweight is not others[1].head.qweight


def test_float_checkpoints_are_refused_and_floats_refuse_these_without_qao() -> None:
    model, plain = make(), make()
    quantize_(model, INT4, embeddings=True)
    with pytest.raises(RuntimeError, match="embed"):
        model.load_state_dict(plain.state_dict())
    as_without_qao: Any = nn.Module.load_state_dict.__wrapped__  # type: ignore[attr-defined]
    with pytest.raises(RuntimeError, match="embed.pip_install_qao"):
        as_without_qao(plain, model.state_dict())
    with pytest.raises(RuntimeError, match="size mismatch for embed.weight"):
        as_without_qao(plain, model.state_dict(), strict=False)


def test_weight_can_be_set_to_itself_alone() -> None:
    """What tie_weights of transformers 4 does."""
    model = make()
    quantize_(model, INT4, embeddings=True)
    model.head.weight = model.embed.weight
    assert tied(model)
    for wrong in (torch.zeros(N, K), make().embed.weight.detach(), QuantLinear.from_linear(make().head, INT4).weight):
        with pytest.raises(AttributeError, match="QuantLinear.weight is computed from qweight and cannot be set"):
            model.head.weight = wrong


@pytest.mark.parametrize("scheme", (INT4, SCHEMES[2]), ids=str)
def test_compile(scheme: Scheme, device: str) -> None:
    torch._dynamo.reset()
    model = make(device)
    quantize_(model, scheme, embeddings=True)
    compiled = torch.compile(model, fullgraph=True)
    for count in (4, 9):
        ids = ids_of(2, count, device=device)
        torch.testing.assert_close(compiled(ids), model(ids), rtol=1e-4, atol=1e-4)


@pytest.mark.parametrize("scheme", (INT4, SCHEMES[2]), ids=str)
def test_without_data_it_has_no_rows(scheme: Scheme) -> None:
    """Real ids with a meta weight must not reach the fake kernel, which returns uninitialized memory."""
    with torch.device("meta"):
        layer = QuantEmbedding.from_embedding(nn.Embedding(N, K), scheme)
    assert layer(ids_of(3, device="meta")).is_meta
    with pytest.raises(RuntimeError, match="_embedding: operands are on different devices"):
        layer(ids_of(3))

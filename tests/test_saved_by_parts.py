"""State dicts of quantized models and their parts, loaded into float models as libraries do it."""

from __future__ import annotations

import copy
import warnings
from pathlib import Path
from typing import Any

import pytest
import qao
import torch
from torch import Tensor, nn

SCHEMES = [*(kind() for kind in qao.schemes.SCHEMES.values()), qao.Int8DynamicActivationInt4Weight(32, rotation=16)]
every_scheme = pytest.mark.parametrize("scheme", SCHEMES, ids=str)
INT4, INT8 = qao.Int4WeightOnly(group_size=32), qao.Int8WeightOnly()


def make(dtype: torch.dtype = torch.float32, seed: int = 0) -> nn.Sequential:
    torch.manual_seed(seed)
    return nn.Sequential(nn.Linear(96, 40), nn.ReLU(), nn.Linear(40, 24, bias=False)).to(dtype)


def quantized(scheme: qao.Scheme, dtype: torch.dtype = torch.float32) -> nn.Sequential:
    model = make(dtype)
    qao.quantize_(model, scheme)
    return model


def some(dtype: torch.dtype = torch.float32) -> Tensor:
    return torch.randn(3, 96, generator=torch.Generator().manual_seed(1)).to(dtype)


def floats_of(model: nn.Module) -> dict[str, Tensor]:
    return {name: tensor.clone() for name, tensor in model.state_dict().items()}


def linear_of(sequential: nn.Module) -> Any:
    """The first layer, float or quantized."""
    return sequential.get_submodule("0")


def assert_unchanged(model: nn.Module, before: dict[str, Tensor]) -> None:
    after = model.state_dict()
    assert before.keys() == after.keys() and all(torch.equal(before[name], after[name]) for name in before)


@every_scheme
@pytest.mark.parametrize("strict", [True, False])
@pytest.mark.parametrize("assign", [True, False])
def test_a_float_model_takes_quantized_layers(scheme: qao.Scheme, assign: bool, strict: bool) -> None:
    model, other = quantized(scheme, torch.bfloat16), make(torch.bfloat16, seed=1)
    result = other.load_state_dict(model.state_dict(), strict=strict, assign=assign)
    assert not result.missing_keys and not result.unexpected_keys
    assert torch.equal(other(some(torch.bfloat16)), model(some(torch.bfloat16)))
    assert isinstance(linear_of(other), qao.QuantLinear) and not linear_of(other).qweight.is_meta
    assert (linear_of(other).scheme.word, linear_of(other).dtype) == (scheme.word, torch.bfloat16)
    other.load_state_dict(model.state_dict())  # the quantized model takes it as before


def test_dtypes_are_those_of_the_model_or_with_assign_of_the_state_dict() -> None:
    state = quantized(INT4, torch.bfloat16).state_dict()
    for assign, dtype in ((False, torch.float32), (True, torch.bfloat16)):
        other = make()
        other.load_state_dict(state, assign=assign)
        assert linear_of(other).dtype == dtype and linear_of(other).bias.dtype == dtype
        assert (
            torch.equal(linear_of(other).scales, state["0.scales"]) and linear_of(other).scales.dtype == torch.bfloat16
        )


def test_on_meta_with_assign() -> None:
    model = quantized(INT8)
    with torch.device("meta"):
        other = make()
    other.load_state_dict(model.state_dict(), assign=True)
    assert torch.equal(other(some()), model(some()))


def test_a_layer_that_hangs_at_two_places_and_in_a_list() -> None:
    class Net(nn.Module):
        def __init__(self) -> None:
            super().__init__()
            self.a = nn.Linear(96, 96)
            self.b = self.a
            self.all = [self.a]

        def forward(self, x: Tensor) -> Tensor:
            return self.all[0](self.b(self.a(x)))  # type: ignore[no-any-return]

    model, other = Net(), Net()
    qao.quantize_(model, INT8)
    other.load_state_dict(model.state_dict())
    assert other.a is other.b is other.all[0] and torch.equal(other(some()), model(some()))


class Tied(nn.Module):
    def __init__(self) -> None:
        super().__init__()
        self.embed, self.middle = nn.Embedding(50, 64), nn.Linear(64, 64)
        self.head = nn.Linear(64, 50, bias=False)
        self.head.weight = self.embed.weight

    def forward(self, ids: Tensor) -> Tensor:
        return self.head(self.middle(self.embed(ids)))  # type: ignore[no-any-return]


@pytest.mark.parametrize("how", ["state_dict", "assign", "load_file", "load_file assign", "load_model"])
def test_shared_weights_stay_shared(how: str, tmp_path: Path) -> None:
    safetensors = pytest.importorskip("safetensors.torch")
    model, other = Tied(), Tied()
    qao.quantize_(model, INT4, embeddings=True)
    file = tmp_path / "x.bin"  # safetensors reads files of any suffix
    safetensors.save_model(model, str(file))  # it holds a shared tensor under one name
    if how == "load_model":
        missing, unexpected = safetensors.load_model(other, str(file))
        assert not missing and not unexpected
    else:
        state = safetensors.load_file(file) if "load_file" in how else model.state_dict()
        other.load_state_dict(state, assign="assign" in how)
    ids = torch.arange(9)
    assert torch.equal(other(ids), model(ids))
    assert isinstance(other.embed, qao.nn.QuantEmbedding) and other.head.qweight is other.embed.qweight


def test_parts_of_a_model() -> None:
    transformers = pytest.importorskip("transformers")
    sizes = {"hidden_size": 64, "intermediate_size": 128, "num_hidden_layers": 2, "num_attention_heads": 4}
    config = transformers.BertConfig(vocab_size=60, **sizes)
    model, other = transformers.BertModel(config).eval(), transformers.BertModel(config).eval()
    qao.quantize_(model, INT4)
    other.encoder.load_state_dict(model.encoder.state_dict())
    other.embeddings.load_state_dict(model.embeddings.state_dict())
    other.pooler.load_state_dict(model.pooler.state_dict())
    ids = torch.arange(5)[None]
    assert torch.equal(other(ids).pooler_output, model(ids).pooler_output)


@pytest.mark.parametrize("strict", [True, False])
def test_a_class_of_the_hub(strict: bool, tmp_path: Path) -> None:
    hub = pytest.importorskip("huggingface_hub")

    class Net(nn.Module, hub.PyTorchModelHubMixin):  # type: ignore[misc, name-defined]
        def __init__(self) -> None:
            super().__init__()
            self.a = nn.Linear(96, 64)

        def forward(self, x: Tensor) -> Any:
            return self.a(x)

    model = Net()
    qao.quantize_(model, INT8)
    model.save_pretrained(tmp_path)
    other: Any = Net.from_pretrained(tmp_path, strict=strict)
    assert torch.equal(other(some()), model(some()))


def test_a_whole_module_in_a_pickle(tmp_path: Path) -> None:
    model = quantized(INT4)
    torch.save(model, tmp_path / "x.pt")
    other = torch.load(tmp_path / "x.pt", weights_only=False)
    assert torch.equal(other(some()), model(some()))


def test_a_bias_that_is_missing_stays() -> None:
    state = {name: tensor for name, tensor in quantized(INT8).state_dict().items() if name != "0.bias"}
    for assign in (False, True):
        other = make(seed=1)
        bias = linear_of(other).bias.detach().clone()
        assert other.load_state_dict(state, strict=False, assign=assign).missing_keys == ["0.bias"]
        assert torch.equal(linear_of(other).bias, bias) and isinstance(linear_of(other), qao.QuantLinear)


@pytest.mark.parametrize("assign", [True, False])
@pytest.mark.parametrize("gone", ["scales", "qweight", "weight_sums"])
def test_a_tensor_that_is_missing_is_an_error(gone: str, assign: bool) -> None:
    state = quantized(qao.Int8DynamicActivationInt8Weight(symmetric_activations=False)).state_dict()
    del state[f"0.{gone}"]
    other = make(seed=1)
    before = floats_of(other)
    with pytest.raises(RuntimeError, match=rf"0\.pip_install_qao: .*no 0\.{gone}"):
        other.load_state_dict(state, strict=False, assign=assign)
    assert_unchanged(other, before)


def hooked() -> nn.Module:
    model = make()
    model[0].register_forward_hook(lambda *_: None)
    return model


@pytest.mark.parametrize("strict", [True, False])
@pytest.mark.parametrize(
    "other,message",
    [
        (nn.Sequential(nn.Linear(96, 41), nn.ReLU(), nn.Linear(41, 24, bias=False)), r"0: .*\[40, 96\].*\[41, 96\]"),
        (nn.Sequential(nn.Linear(96, 40), nn.ReLU(), nn.ReLU()), "2: .*but the model has a ReLU"),
        (hooked(), "0: .*cannot be replaced: it has forward_hooks"),
    ],
)
def test_a_model_that_cannot_take_it_is_unchanged(other: nn.Module, message: str, strict: bool) -> None:
    before = floats_of(other)
    with pytest.raises(RuntimeError, match=f"Error.s. in loading state_dict for Sequential:\\n\t{message}"):
        other.load_state_dict(quantized(INT4).state_dict(), strict=strict)
    assert_unchanged(other, before)


def test_a_later_error_leaves_the_float_layers() -> None:
    state = {**quantized(INT4).state_dict(), "3.weight": torch.zeros(2)}
    other = make()
    with pytest.raises(RuntimeError, match=r"Unexpected key.*3\.weight"):
        other.load_state_dict(state)
    assert type(linear_of(other)) is nn.Linear and type(other[2]) is nn.Linear


def test_one_layer_alone_names_the_layer_to_make() -> None:
    layer = quantized(INT4, torch.bfloat16)[0]
    with pytest.raises(RuntimeError, match="a Linear cannot become one in place") as raised:
        nn.Linear(96, 40).load_state_dict(layer.state_dict())
    code = str(raised.value).split("layer = ")[1].split(", then ")[0]
    made = eval(code, {"qao": qao, "torch": torch})
    made.load_state_dict(layer.state_dict())
    assert torch.equal(made(some(torch.bfloat16)), layer(some(torch.bfloat16)))


@pytest.mark.parametrize("prefix", ["module.", "_orig_mod.", "base_model.model."])
def test_names_with_a_prefix(prefix: str) -> None:
    state = quantized(INT4).state_dict()
    longer = {prefix + name: tensor for name, tensor in state.items()}
    with pytest.raises(RuntimeError, match=rf"'{prefix}0'.*in the state dict begin with '{prefix}'"):
        make().load_state_dict(longer)
    with pytest.warns(UserWarning, match=rf"'{prefix}0'.*in the state dict begin with '{prefix}'.*were not loaded"):
        make().load_state_dict(longer, strict=False)
    wrapped = make()
    for part in reversed(prefix.strip(".").split(".")):
        wrapped = nn.ModuleDict({part: wrapped})  # type: ignore[assignment]
    with pytest.raises(RuntimeError, match=f"of the model begin with '{prefix}'"):
        wrapped.load_state_dict(state)
    wrapped.load_state_dict(longer)
    assert torch.equal(wrapped.get_submodule(prefix.strip("."))(some()), quantized(INT4)(some()))


def test_a_head_that_the_model_does_not_have_is_said() -> None:
    with pytest.warns(UserWarning, match="holds quantized layers '2', but this Sequential has no modules"):
        make()[:1].load_state_dict(quantized(INT4).state_dict(), strict=False)


@pytest.mark.parametrize("codes", [torch.int8, torch.float8_e4m3fn])
def test_codes_are_not_taken_for_weights(codes: torch.dtype) -> None:
    """compressed-tensors and fp8 checkpoints, which have no marker."""
    state = {"0.weight": torch.ones(40, 96).to(codes), "0.weight_scale": torch.ones(40, 1)}
    other = make()
    before = floats_of(other)
    with pytest.raises(RuntimeError, match=r"0\.weight: .*codes.*qao\.from_pretrained"):
        other.load_state_dict(state, strict=False)
    assert_unchanged(other, before)


def test_other_state_dicts_load_as_ever() -> None:
    model, other = make(), make(seed=1)
    with warnings.catch_warnings():
        warnings.simplefilter("error")
        assert not other.load_state_dict(model.state_dict()).missing_keys
        assert other.load_state_dict({}, strict=False).missing_keys == ["0.weight", "0.bias", "2.weight"]
    assert torch.equal(other(some()), model(some()))
    with pytest.raises(TypeError, match="Expected state_dict to be dict-like"):
        other.load_state_dict([1])  # type: ignore[arg-type]


def test_what_others_record_of_a_state_dict_stays() -> None:
    """``_metadata`` has the versions of modules, by which they load old entries."""
    seen: list[Any] = []

    class Versioned(nn.Module):
        _version = 3

        def __init__(self) -> None:
            super().__init__()
            self.linear = nn.Linear(64, 64)

        def _load_from_state_dict(self, state: Any, prefix: str, metadata: Any, *others: Any) -> None:
            seen.append(metadata.get("version"))
            super()._load_from_state_dict(state, prefix, metadata, *others)

    model = Versioned()
    qao.quantize_(model, INT8)
    copy.deepcopy(Versioned()).load_state_dict(model.state_dict())
    assert seen == [3]

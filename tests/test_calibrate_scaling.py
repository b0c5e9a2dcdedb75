"""Scaling folded into norms and linear layers: the same function, on structures of real models."""

from __future__ import annotations

import copy
from typing import Any

import pytest
import qao
import torch
from qao.calibration.scaling import smooth
from qao.calibration.stream import evaluating, samples_of
from qao.quantization import quantize
from torch import Tensor, nn

transformers = pytest.importorskip("transformers")

SIZES = {
    "hidden_size": 64,
    "intermediate_size": 128,
    "num_hidden_layers": 2,
    "num_attention_heads": 4,
    "vocab_size": 90,
}
INT8 = qao.Int8DynamicActivationInt8Weight()


def causal(name: str, **sizes: Any) -> nn.Module:
    config = getattr(transformers, f"{name}Config")(**{**SIZES, **sizes})
    kind = "LMHeadModel" if name == "GPT2" else "ForCausalLM"
    return getattr(transformers, f"{name}{kind}")(config)  # type: ignore[no-any-return]


def bert() -> nn.Module:
    return transformers.BertModel(transformers.BertConfig(**SIZES))  # type: ignore[no-any-return]


# Of one block: how many groups of linear layers are scaled. qkv and gate/up by norms, o by v, down by up.
MODELS = {
    "Llama": (lambda: causal("Llama"), 4),
    "Qwen2, fewer heads of keys": (lambda: causal("Qwen2", num_key_value_heads=2), 3),
    "Mistral": (lambda: causal("Mistral", num_key_value_heads=4), 4),
    "Gemma, norms of 1 + w": (lambda: causal("Gemma", num_key_value_heads=4, head_dim=16), 4),
    "GPT-2": (lambda: causal("GPT2", n_embd=64, n_layer=2, n_head=4), 2),
    "OPT": (lambda: causal("OPT", ffn_dim=128, word_embed_proj_dim=64), 4),
    "BERT, norms in the residual": (bert, 0),
}


@pytest.fixture
def data() -> list[Tensor]:
    g = torch.Generator().manual_seed(1)
    return [torch.randint(0, 90, (1, 24), generator=g) for _ in range(4)]


def outlying(model: nn.Module) -> nn.Module:
    """Norms that differ from column to column, as those of trained models do."""
    g = torch.Generator().manual_seed(2)
    with torch.no_grad():
        for parameter in model.parameters():
            if parameter.dim() == 1:
                parameter += torch.randn(parameter.shape, generator=g) * 0.2
                parameter[::17] += 15.0
    return model.eval()


def output(model: nn.Module, ids: Tensor) -> Tensor:
    with torch.no_grad():
        return model(ids)[0].double()  # type: ignore[no-any-return]


@pytest.mark.parametrize("name", MODELS)
def test_folded_models_compute_the_same(name: str, data: list[Tensor], device: str) -> None:
    torch.manual_seed(0)
    make, groups = MODELS[name]
    model = outlying(make()).to(device)
    before, reference = copy.deepcopy(model.state_dict()), copy.deepcopy(model)
    planned = quantize.plan(
        model, {"lm_head": None, "re:.*": INT8} if hasattr(model, "lm_head") else INT8, None, False, None, False
    )
    folded: list[Any] = []
    with evaluating(model):
        smooth(model, samples_of(data, model), quantize.units_of(planned.pending), folded)
    changed = {key for key, value in model.state_dict().items() if not torch.equal(value, before[key])}
    blocks = {key.split(".self_attn.")[0] for key in changed}
    if groups == 0:
        assert len(folded) <= 4  # v to o alone
    else:
        assert len(folded) >= 2 * groups - 1 and blocks
    for ids in data:
        expected = output(reference, ids.to(device))
        assert (output(model, ids.to(device)) - expected).norm() <= 1e-5 * expected.norm()
    for restore in reversed(folded):
        restore()
    assert all(torch.equal(value, before[key]) for key, value in model.state_dict().items())


def test_better_than_without(data: list[Tensor], device: str) -> None:
    torch.manual_seed(0)
    model = outlying(causal("Llama")).to(device)
    rules = {"lm_head": None, "re:.*": INT8}
    reference, plain = copy.deepcopy(model), copy.deepcopy(model)
    qao.quantize_(plain, rules)
    qao.calibrate(model, data, rules, method="smoothquant")
    ids = data[0].to(device)
    expected = output(reference, ids)
    assert (output(model, ids) - expected).norm() < 0.7 * (output(plain, ids) - expected).norm()


def test_schemes_with_float_activations_are_not_scaled(data: list[Tensor]) -> None:
    torch.manual_seed(0)
    model = outlying(causal("Llama"))
    norm = model.model.layers[0].input_layernorm.weight.clone()
    qao.calibrate(model, data, {"lm_head": None, "re:.*": qao.Int8WeightOnly()}, method="smoothquant")
    assert torch.equal(model.model.layers[0].input_layernorm.weight, norm)


def test_adapters_are_refused(data: list[Tensor]) -> None:
    model = outlying(causal("Llama"))
    model.model.layers[0].self_attn.lora_a = nn.Linear(64, 4)
    with pytest.raises(ValueError, match="LoRA"):
        qao.calibrate(model, data, INT8, method="smoothquant")

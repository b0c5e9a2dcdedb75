"""Every PEFT method on quantized layers: the results of an equal float model, or a clear error."""

from __future__ import annotations

import copy
import dataclasses
import os
import pickle
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import pytest
import qao
import torch
from qao import quantize_
from torch import Tensor, nn

peft = pytest.importorskip("peft")
transformers = pytest.importorskip("transformers")

from peft.mapping import PEFT_TYPE_TO_CONFIG_MAPPING, PEFT_TYPE_TO_TUNER_MAPPING  # noqa: E402

IDS = torch.tensor([[1, 5, 9, 33, 2, 7], [4, 5, 6, 60, 61, 3]])
INT8, INT4 = qao.Int8WeightOnly(), qao.Int4WeightOnly(group_size=32)

OPTIONS: dict[str, dict[str, Any]] = {
    "ADALORA": {"total_step": 10},
    "ADAPTION_PROMPT": {"adapter_len": 4, "adapter_layers": 2, "target_modules": None},
    "C3A": {"block_size": 16},
    "CPT": {"cpt_token_ids": [1, 2, 3], "cpt_tokens_type_mask": [1, 2, 2], "num_virtual_tokens": None},
    "IA3": {"feedforward_modules": ["down_proj"]},
    "LN_TUNING": {"target_modules": ["input_layernorm"]},
    "MULTITASK_PROMPT_TUNING": {"num_tasks": 2},
    "P_TUNING": {"encoder_hidden_size": 32},
    "TRAINABLE_TOKENS": {"target_modules": ["embed_tokens"], "token_indices": [5, 60]},
    "VBLORA": {"vector_length": 8, "num_vectors": 10},
}
REFUSED = {"GLORA"}
ELSEWHERE = {
    "ADAMSS": "needs scikit-learn",
    "SHADOW": "fails on this float model too",
    "XLORA": "made of saved adapters, test_mixtures_of_lora",
}
TASKS = {"MULTITASK_PROMPT_TUNING", "POLY"}
METHODS = [kind.value for kind in PEFT_TYPE_TO_TUNER_MAPPING if kind.value not in ELSEWHERE]


@pytest.fixture(autouse=True)
def compilers() -> Iterator[None]:
    """BOFT leaves CC and CXX set to gcc, with which Inductor links C++ without its library."""
    before = {name: os.environ.pop(name, None) for name in ("CC", "CXX")}
    yield
    for name, value in before.items():
        os.environ.pop(name, None)
        if value is not None:
            os.environ[name] = value


def llama(scheme: qao.Scheme | None = INT8, **options: Any) -> Any:
    torch.manual_seed(0)
    config = transformers.LlamaConfig(
        hidden_size=64,
        intermediate_size=128,
        num_hidden_layers=2,
        num_attention_heads=4,
        num_key_value_heads=2,
        vocab_size=96,
        pad_token_id=0,
        **{"tie_word_embeddings": True, **options},
    )
    model = transformers.LlamaForCausalLM(config)
    if scheme is not None:
        quantize_(model, scheme, embeddings=True, progress=False)
    return model


def config_of(method: str, **options: Any) -> Any:
    kind = PEFT_TYPE_TO_CONFIG_MAPPING[method]
    known = {field.name for field in dataclasses.fields(kind)}
    given: dict[str, Any] = {
        "task_type": "CAUSAL_LM",
        "target_modules": ["q_proj", "down_proj"],
        "num_virtual_tokens": 4,
        **OPTIONS.get(method, {}),
        **options,
    }
    return kind(**{name: value for name, value in given.items() if name in known and value is not None})


def adapted(model: Any, config: Any) -> Any:
    """With adapters that do something, the same on every model."""
    torch.manual_seed(1)
    model = peft.get_peft_model(model, config)
    generator = torch.Generator().manual_seed(2)
    with torch.no_grad():
        for _, parameter in sorted(model.named_parameters()):
            if parameter.requires_grad:
                parameter += 0.05 * torch.randn(parameter.shape, generator=generator)
    return model.eval()


def outputs(model: Any, method: str = "") -> Tensor:
    tasks = {"task_ids": torch.zeros(len(IDS), dtype=torch.long)} if method in TASKS else {}
    # CPT computes another loss, and asks for labels.
    labels = {"labels": IDS, "input_type_mask": torch.full_like(IDS, 4)} if method == "CPT" else {}
    return model(input_ids=IDS, attention_mask=torch.ones_like(IDS), **tasks, **labels).logits


def assert_unchanged(model: nn.Module, before: dict[str, Tensor], modules: list[str]) -> None:
    assert [name for name, _ in model.named_modules()] == modules
    after = model.state_dict()
    assert before.keys() == after.keys() and all(torch.equal(before[key], after[key]) for key in before)


@pytest.mark.parametrize("method", METHODS)
def test_a_method_computes_what_it_does_on_floats_or_is_refused(method: str) -> None:
    quantized, floats = llama(), qao.dequantize_(llama())
    config = config_of(method)
    before, modules = copy.deepcopy(quantized.state_dict()), [name for name, _ in quantized.named_modules()]
    if method in REFUSED:
        with pytest.raises(TypeError, match=rf"{method} cannot adapt model\.layers\.0.*QuantLinear.*quantize_\(model"):
            peft.get_peft_model(quantized, config)
        assert_unchanged(quantized, before, modules)
        return
    quantized, floats = adapted(quantized, config), adapted(floats, copy.deepcopy(config_of(method)))
    trained = {name for name, p in quantized.named_parameters() if p.requires_grad}
    assert trained and trained == {name for name, p in floats.named_parameters() if p.requires_grad}
    results = [outputs(model, method) for model in (quantized, floats)]
    torch.testing.assert_close(*results, rtol=1e-4, atol=1e-4)
    assert not torch.allclose(results[0][:, -6:], outputs(llama()), atol=1e-3)  # the adapter does something
    for logits in results:
        logits.square().mean().backward()
    grads = [{n: p.grad for n, p in model.named_parameters() if p.grad is not None} for model in (quantized, floats)]
    assert grads[0].keys() == grads[1].keys() and grads[0]
    for name in grads[0]:
        torch.testing.assert_close(
            grads[0][name], grads[1][name], rtol=2e-3, atol=2e-4, msg=lambda text, n=name: f"{n}: {text}"
        )


# What these methods cannot merge on float layers either.
UNMERGED = {"BEFT": "no bias", "LILY": "not supported", "POLY": "", "OSF": "do not support unmerging"}


@pytest.mark.filterwarnings("ignore:Merging")
@pytest.mark.parametrize(
    "raised",
    [torch.OutOfMemoryError("CUDA out of memory"), AttributeError("no attribute x"), NotImplementedError("no kernel")],
    ids=lambda error: type(error).__name__,
)
def test_errors_that_are_not_of_the_layer_stay_as_they_are(raised: Exception, monkeypatch: pytest.MonkeyPatch) -> None:
    """And those of a wrong config: a float model gives the same."""
    model = llama()
    before, modules = copy.deepcopy(model.state_dict()), [name for name, _ in model.named_modules()]
    with pytest.raises(TypeError, match="^'<=' not supported between instances of 'str' and 'int'$"):
        peft.get_peft_model(model, config_of("LORA", r="a"))

    def fail(*args: Any, **kwargs: Any) -> None:
        raise raised

    monkeypatch.setattr(nn.init, "kaiming_uniform_", fail)
    with pytest.raises(type(raised)) as caught:
        peft.get_peft_model(model, config_of("LORA"))
    assert caught.value is raised
    assert_unchanged(model, before, modules)


@pytest.mark.parametrize("method", [method for method in METHODS if method not in REFUSED])
def test_merging_quantizes_again_and_unmerging_is_exact(method: str) -> None:
    model = adapted(llama(), config_of(method))
    if not hasattr(model, "merge_adapter"):
        pytest.skip("prompts are not merged")
    unmerged, before = outputs(model, method).detach(), copy.deepcopy(model.state_dict())
    if method in UNMERGED:
        with pytest.raises((ValueError, NotImplementedError), match=UNMERGED[method]):
            model.merge_adapter()
            model.unmerge_adapter()
        return
    model.merge_adapter()
    merged = outputs(model, method).detach()
    assert 0 <= (merged - unmerged).norm() < 0.03 * unmerged.norm()
    assert method == "LN_TUNING" or not torch.equal(merged, unmerged)
    model.unmerge_adapter()
    after = model.state_dict()
    assert all(torch.equal(before[key], after[key]) for key in before if key.endswith(("qweight", "scales")))
    assert torch.equal(outputs(model, method), unmerged)


@pytest.mark.filterwarnings("ignore:Merging")
def test_a_merged_weight_is_the_sum_of_adapters_quantized_once() -> None:
    model = adapted(llama(), config_of("LOHA"))
    model.add_adapter("second", config_of("LOHA", init_weights=False))
    model.base_model.set_adapter(["default", "second"])
    layer = model.get_submodule("base_model.model.model.layers.0.self_attn.q_proj")
    weight = layer.base_layer.dequantize(torch.float32)
    for name in ("default", "second"):
        weight = weight + layer.get_delta_weight(name)
    model.merge_adapter(["default"])
    model.merge_adapter(["second"])
    linear = nn.Linear(64, 64, bias=False)
    linear.weight = nn.Parameter(weight.detach())
    expected = qao.QuantLinear.from_linear(linear, INT8)
    assert torch.equal(layer.base_layer.qweight, expected.qweight)
    assert torch.equal(layer.base_layer.scales, expected.scales)


def test_merging_nan_changes_nothing() -> None:
    model = adapted(llama(), config_of("VERA"))
    layer = model.get_submodule("base_model.model.model.layers.0.self_attn.q_proj")
    before = copy.deepcopy(layer.base_layer.state_dict())
    layer.vera_lambda_b["default"].data.fill_(float("nan"))
    with pytest.raises(ValueError, match="adapter default: the merged weight.*NaN"):
        layer.merge()
    after = layer.base_layer.state_dict()
    assert not layer.merged and all(torch.equal(before[key], after[key]) for key in before)


def test_layers_stay_what_they_were() -> None:
    model = adapted(llama(), config_of("VERA"))
    kinds = {type(module) for module in model.modules() if hasattr(module, "qweight")}
    assert kinds == {qao.QuantLinear, qao.nn.QuantEmbedding}
    again = pickle.loads(pickle.dumps(model))
    assert torch.equal(outputs(again), outputs(model)) and torch.equal(outputs(copy.deepcopy(model)), outputs(model))


@pytest.mark.parametrize("method", ["IA3", "VERA", "HRA", "LN_TUNING", "TRAINABLE_TOKENS", "PROMPT_TUNING"])
@pytest.mark.parametrize("scheme", [INT4, INT8], ids=str)
def test_a_saved_adapter_gives_the_same_numbers(method: str, scheme: qao.Scheme, tmp_path: Path) -> None:
    model = adapted(llama(scheme), config_of(method))
    model.save_pretrained(tmp_path)
    again = peft.PeftModel.from_pretrained(llama(scheme), tmp_path).eval()
    assert torch.equal(outputs(again), outputs(model))


@pytest.mark.filterwarnings("ignore:Merging", "ignore:The embedding and the head")
@pytest.mark.parametrize("tied", [True, False])
@pytest.mark.parametrize(
    "options",
    [
        {"trainable_token_indices": [5, 60]},
        {"trainable_token_indices": {"embed_tokens": [5]}},
        {"target_modules": ["q_proj", "embed_tokens"]},
        {"target_modules": ["q_proj", "lm_head"]},
        {"target_modules": ["embed_tokens", "lm_head"], "ensure_weight_tying": True},
        {"target_modules": ["embed_tokens"], "use_dora": True},
    ],
    ids=str,
)
def test_lora_at_the_ends_of_a_model(tied: bool, options: dict[str, Any], tmp_path: Path) -> None:
    def config() -> Any:
        return config_of("LORA", r=4, **{"target_modules": ["q_proj"], **options})

    quantized, floats = llama(tie_word_embeddings=tied), qao.dequantize_(llama(tie_word_embeddings=tied))
    quantized, floats = adapted(quantized, config()), adapted(floats, config())
    unmerged = outputs(quantized).detach()
    torch.testing.assert_close(unmerged, outputs(floats), rtol=1e-4, atol=1e-4)
    quantized.save_pretrained(tmp_path / "adapter")
    again = peft.PeftModel.from_pretrained(llama(tie_word_embeddings=tied), tmp_path / "adapter").eval()
    assert torch.equal(outputs(again), unmerged)
    merged = quantized.merge_and_unload()
    assert (outputs(merged) - unmerged).norm() < 0.01 * unmerged.norm()
    ends = merged.get_input_embeddings(), merged.get_output_embeddings()
    assert merged.config.tie_word_embeddings is (getattr(ends[0], "qweight", 0) is getattr(ends[1], "qweight", 1))
    merged.save_pretrained(tmp_path / "merged")
    assert torch.equal(outputs(transformers.AutoModelForCausalLM.from_pretrained(tmp_path / "merged")), outputs(merged))


def test_trainable_tokens_train_alone() -> None:
    model = peft.get_peft_model(llama(), config_of("TRAINABLE_TOKENS"))
    outputs(model).square().mean().backward()
    (delta,) = (p for p in model.parameters() if p.requires_grad)
    assert delta.shape == (2, 64) and delta.grad is not None and delta.grad.abs().min(1).values.gt(0).all()


def test_the_weight_of_an_adapted_layer_is_the_dequantized_one() -> None:
    layer = adapted(llama(), config_of("LORA")).base_model.model.model.layers[0].self_attn.q_proj
    assert layer.weight.dtype == torch.float32 and torch.equal(layer.weight.clone(), layer.base_layer.dequantize())


@pytest.mark.parametrize(
    "options",
    [
        {"modules_to_save": ["lm_head"]},
        {"modules_to_save": ["embed_tokens"]},
        {"target_parameters": ["q_proj.weight"]},
        {"target_modules": None, "target_parameters": ["model.layers.1.mlp.up_proj.weight"]},
        {"init_lora_weights": "pissa"},
    ],
    ids=str,
)
def test_what_is_refused_changes_nothing(options: dict[str, Any]) -> None:
    model = llama()
    before, modules = copy.deepcopy(model.state_dict()), [name for name, _ in model.named_modules()]
    trained = {name for name, p in model.named_parameters() if p.requires_grad}
    with pytest.raises((TypeError, ValueError), match="quanti[sz]e"):
        peft.get_peft_model(model, config_of("LORA", **options))
    assert_unchanged(model, before, modules)
    assert not hasattr(model, "peft_config")
    assert trained == {name for name, p in model.named_parameters() if p.requires_grad}
    adapted(model, config_of("LORA"))


def test_target_parameters_of_quantized_experts_are_refused() -> None:
    config = transformers.MixtralConfig(
        hidden_size=64, intermediate_size=64, num_hidden_layers=1, num_attention_heads=4, num_key_value_heads=2,
        vocab_size=64, num_local_experts=4,
    )  # fmt: skip
    model = transformers.MixtralForCausalLM(config)
    quantize_(model, INT8, progress=False)
    if not any(type(module).__name__ == "QuantExperts" for module in model.modules()):
        pytest.skip("this version of transformers has no fused experts")
    lora = config_of("LORA", target_modules=["q_proj"], target_parameters=["experts.down_proj"])
    with pytest.raises(TypeError, match=r"LORA cannot adapt model\.layers\.0\.mlp\.experts\.down_proj, a quantized"):
        peft.get_peft_model(model, lora)
    with pytest.raises(TypeError, match="LORA cannot adapt .*QuantProjection"):
        peft.get_peft_model(model, config_of("LORA", target_modules=["down"]))


@pytest.mark.parametrize("method", ["IA3", "VERA", "HRA", "LORA", "FOURIERFT"])
def test_methods_on_a_conv1d_that_was_quantized(method: str) -> None:
    def gpt2() -> Any:
        torch.manual_seed(0)
        sizes = {"n_embd": 64, "n_layer": 1, "n_head": 4, "vocab_size": 96, "n_positions": 32}
        model = transformers.GPT2LMHeadModel(transformers.GPT2Config(**sizes))
        quantize_(model, {"re:.*c_attn": INT8}, progress=False)
        return model

    options = {"target_modules": ["c_attn"], "feedforward_modules": [], "fan_in_fan_out": True}
    quantized = adapted(gpt2(), config_of(method, **options))
    unmerged = outputs(quantized).detach()
    floats = gpt2()
    attention = floats.transformer.h[0].attn
    attention.c_attn = linear = nn.Linear(64, 192)
    linear.weight, linear.bias = (
        nn.Parameter(gpt2().transformer.h[0].attn.c_attn.dequantize()),
        nn.Parameter(gpt2().transformer.h[0].attn.c_attn.bias.clone()),
    )
    floats = adapted(floats, config_of(method, **options | {"fan_in_fan_out": False}))
    torch.testing.assert_close(unmerged, outputs(floats), rtol=1e-4, atol=1e-4)


def test_mixtures_of_lora(tmp_path: Path) -> None:
    model = adapted(llama(), config_of("LORA", r=4))
    model.save_pretrained(tmp_path / "one")
    base = llama(use_cache=False)
    adapters = {"0": str(tmp_path / "one")}
    config = peft.XLoraConfig(task_type="CAUSAL_LM", hidden_size=64, xlora_depth=1, adapters=adapters)
    mixture = peft.get_peft_model(base, config).eval()
    again = qao.dequantize_(llama(use_cache=False))
    torch.manual_seed(4)
    floats = peft.get_peft_model(again, peft.XLoraConfig(**config.to_dict())).eval()
    floats.base_model.internal_xlora_classifier.load_state_dict(
        mixture.base_model.internal_xlora_classifier.state_dict()
    )
    torch.testing.assert_close(outputs(mixture), outputs(floats), rtol=1e-4, atol=1e-4)


@pytest.mark.filterwarnings("ignore:Merging")
def test_mixed_adapters() -> None:
    from peft import PeftMixedModel

    models = [llama(), qao.dequantize_(llama())]
    results = []
    for model in models:
        torch.manual_seed(3)
        mixed = PeftMixedModel(model, config_of("LORA", r=4, init_lora_weights=False), "first")
        mixed.add_adapter("second", config_of("LOHA", r=4, init_weights=False))
        mixed.set_adapter(["first", "second"])
        results.append(outputs(mixed.eval()))
    torch.testing.assert_close(*results, rtol=1e-4, atol=1e-4)


@pytest.mark.parametrize("scheme", [INT8, INT4, qao.Int8DynamicActivationInt8Weight()], ids=str)
@pytest.mark.parametrize("embeddings", [True, False])
@pytest.mark.parametrize("tied", [True, False])
def test_counts_are_those_of_the_float_model(scheme: qao.Scheme, embeddings: bool, tied: bool) -> None:
    floats, model = llama(None, tie_word_embeddings=tied), llama(None, tie_word_embeddings=tied)
    if embeddings and scheme.word not in ("int4", "int8"):
        embeddings = False
    quantize_(model, scheme, embeddings=embeddings, progress=False)
    for options in ({}, {"exclude_embeddings": True}):
        assert model.num_parameters(**options) == floats.num_parameters(**options) > 0
    stored = {id(t): t.numel() * t.element_size() for t in (*model.parameters(), *model.buffers())}
    assert model.get_memory_footprint() == sum(stored.values()) < 0.7 * floats.get_memory_footprint()
    counted = [peft.get_peft_model(each, config_of("LORA")).get_nb_trainable_parameters() for each in (floats, model)]
    assert counted[0] == counted[1]
    status = peft.get_model_status(model.base_model if hasattr(model, "peft_type") else model)
    assert (status.trainable_params, status.total_params) == counted[0]
    trainable = sum(p.numel() for p in model.parameters() if p.requires_grad)
    assert model.num_parameters(only_trainable=True) == trainable == counted[0][0]

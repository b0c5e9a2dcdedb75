"""LoRA by PEFT on quantized layers: creation, training, saving, reloading and merging."""

from __future__ import annotations

import importlib.util
import subprocess
import sys
from pathlib import Path
from typing import Any

import pytest
import qao
import torch
from qao import Int4WeightOnly, QuantLinear, quantize_
from torch import Tensor, nn

peft = pytest.importorskip("peft")
transformers = pytest.importorskip("transformers")

pytestmark = [
    pytest.mark.filterwarnings("ignore:quantize_. these big weights stay"),
    pytest.mark.filterwarnings("ignore:.*gradient_checkpointing:FutureWarning"),
    pytest.mark.filterwarnings("ignore:torch.utils.checkpoint"),
]

SCHEME = Int4WeightOnly(group_size=32)
IDS = torch.arange(24).view(2, 12)
KINDS = {
    "int4": SCHEME,
    "int8": qao.Int8WeightOnly(),
    "fp8": qao.Float8WeightOnly(),
    "int8_int4": qao.Int8DynamicActivationInt4Weight(group_size=32, symmetric_activations=False),
    "fp8_fp8": qao.Float8DynamicActivationFloat8Weight(),
}


def llama(scheme: qao.Scheme = SCHEME, dtype: torch.dtype = torch.float32) -> Any:
    torch.manual_seed(0)
    config = transformers.LlamaConfig(
        hidden_size=64,
        intermediate_size=96,
        num_hidden_layers=2,
        num_attention_heads=4,
        num_key_value_heads=2,
        vocab_size=64,
        tie_word_embeddings=False,
        attention_bias=True,
    )
    model = transformers.LlamaForCausalLM(config).to(dtype)
    quantize_(model, scheme, progress=False)
    return model


def adapted(model: nn.Module, **options: Any) -> Any:
    options = {"r": 4, "target_modules": "all-linear", "task_type": "CAUSAL_LM", **options}
    return peft.get_peft_model(model, peft.LoraConfig(**options))


def train(model: nn.Module, steps: int = 8) -> list[float]:
    model.train()
    optimizer = torch.optim.AdamW([p for p in model.parameters() if p.requires_grad], lr=1e-2)
    losses = []
    for _ in range(steps):
        optimizer.zero_grad()
        loss = model(input_ids=IDS, labels=IDS).loss
        loss.backward()
        optimizer.step()
        losses.append(loss.item())
    model.eval()
    return losses


@torch.no_grad()
def logits(model: nn.Module) -> Tensor:
    return model(input_ids=IDS).logits


def base_state(model: nn.Module) -> dict[str, Tensor]:
    packed = ("qweight", "scales", "weight_sums", "activation_scale", "bias")
    return {
        f"{name}.{key}": tensor.clone()
        for name, module in model.named_modules()
        if isinstance(module, QuantLinear)
        for key in packed
        if (tensor := getattr(module, key)) is not None
    }


def assert_same(before: dict[str, Tensor], after: dict[str, Tensor]) -> None:
    assert before.keys() == after.keys() and all(torch.equal(before[key], after[key]) for key in before)


# ---- made, trained, saved --------------------------------------------------------------------------------------------


@pytest.mark.filterwarnings("error:Unsupported layer type")
def test_targets_by_name_and_all_linear() -> None:
    everything, some = adapted(llama()), adapted(llama(), target_modules=["q_proj", "v_proj"])
    of = [n for n, m in everything.named_modules() if type(m).__name__ == "LoraQuantLinear"]
    assert len(of) == 2 * 7 and not any("lm_head" in name for name in of)
    assert [n.split(".")[-1] for n, m in some.named_modules() if type(m).__name__ == "LoraQuantLinear"] == [
        "q_proj",
        "v_proj",
    ] * 2
    again = peft.get_peft_model(llama(), peft.LoraConfig(r=4, target_modules="all-linear"))
    again.add_adapter("second", peft.LoraConfig(r=2, target_modules="all-linear"))
    assert len([n for n, m in again.named_modules() if type(m).__name__ == "LoraQuantLinear"]) == 14


@pytest.mark.parametrize("scheme", KINDS.values(), ids=KINDS)
def test_it_trains_saves_and_reloads_bit_for_bit(scheme: qao.Scheme, tmp_path: Path) -> None:
    model = adapted(llama(scheme))
    before = base_state(model)
    assert torch.equal(logits(model), logits(llama(scheme)))  # B is zero
    losses = train(model)
    assert losses[-1] < 0.9 * losses[0]
    assert_same(before, base_state(model))
    expected = logits(model)
    model.save_pretrained(tmp_path)
    assert {path.name for path in tmp_path.iterdir()} >= {"adapter_config.json", "adapter_model.safetensors"}
    reloaded = peft.PeftModel.from_pretrained(llama(scheme), tmp_path)
    assert torch.equal(logits(reloaded), expected)
    with reloaded.disable_adapter():
        assert torch.equal(logits(reloaded), logits(llama(scheme)))


def run(code: str) -> str:
    done = subprocess.run([sys.executable, "-W", "ignore", "-c", code], capture_output=True, text=True, check=False)
    assert done.returncode == 0, done.stderr
    return done.stdout


def test_peft_may_be_imported_first() -> None:
    code = """
import peft, qao
from torch import nn
model = nn.Sequential(nn.Linear(64, 64))
qao.quantize_(model, qao.Int8WeightOnly())
print(type(peft.get_peft_model(model, peft.LoraConfig(r=4, target_modules=["0"])).base_model.model[0]).__name__)
"""
    assert run(code) == "LoraQuantLinear\n"


def test_qao_alone_imports_no_other_library() -> None:
    assert run("import sys, qao; print({'peft', 'accelerate', 'transformers'} & sys.modules.keys())") == "set()\n"


def test_a_registration_that_fails_leaves_the_import_alone(monkeypatch: pytest.MonkeyPatch) -> None:
    from qao.integrations.imports import when_imported

    def fails() -> None:
        raise AttributeError("moved elsewhere")

    with pytest.warns(UserWarning, match=r"qao does not work with this version of peft \(.*moved elsewhere"):
        when_imported("peft", fails)
    calls: list[str] = []
    sys.modules.pop("wave", None)
    when_imported("wave", lambda: calls.append("wave"))
    assert importlib.util.find_spec("wave") is not None and not calls  # asked for, and not imported
    import wave

    assert calls == ["wave"] and wave.Error


@pytest.mark.parametrize("dtype", [torch.bfloat16, torch.float16], ids=str)
def test_prepare_for_kbit_training_spares_the_scales_and_checkpoints(dtype: torch.dtype) -> None:
    model = llama(dtype=dtype)
    before = base_state(model)
    assert peft.prepare_model_for_kbit_training(model) is model
    after = base_state(model)
    scales = [key for key in before if not key.endswith("bias")]
    assert_same({key: before[key] for key in scales}, {key: after[key] for key in scales})
    assert {after[key].dtype for key in scales} == {torch.int8, dtype}
    assert model.model.norm.weight.dtype == torch.float32 and model.model.layers[0].gradient_checkpointing
    assert not hasattr(model, "is_loaded_in_4bit")
    checkpointed = adapted(model)
    losses = train(checkpointed)
    assert losses[-1] < 0.9 * losses[0]


def test_checkpointing_with_inputs_that_require_grad_changes_no_gradient() -> None:
    grads = []
    for checkpointed in (False, True):
        model = adapted(llama())
        torch.manual_seed(1)
        for name, parameter in model.named_parameters():
            if "lora_B" in name:
                nn.init.normal_(parameter, std=0.1)
        if checkpointed:
            model.enable_input_require_grads()
            model.gradient_checkpointing_enable({"use_reentrant": True})
        model.train()
        model(input_ids=IDS, labels=IDS).loss.backward()
        grads.append({n: p.grad for n, p in model.named_parameters() if p.grad is not None})
    assert len(grads[0]) == 2 * 14
    assert_same(*grads)


def test_dora_trains_and_reloads(tmp_path: Path) -> None:
    model = adapted(llama(), use_dora=True)
    losses = train(model)
    assert losses[-1] < 0.9 * losses[0]
    expected = logits(model)
    model.save_pretrained(tmp_path)
    assert torch.equal(logits(peft.PeftModel.from_pretrained(llama(), tmp_path)), expected)


@pytest.mark.parametrize("init", ["pissa", "pissa_niter_2", "olora"])
def test_an_init_that_changes_the_base_weight_is_refused(init: str) -> None:
    model = llama()
    before = base_state(model)
    with pytest.raises(ValueError, match="takes a part of the weight out of the base layer"):
        adapted(model, init_lora_weights=init)
    assert_same(before, base_state(model))


def test_modules_to_save_of_a_quantized_layer_is_refused() -> None:
    with pytest.raises(TypeError, match="modules_to_save names a quantized layer"):
        adapted(llama(), modules_to_save=["lm_head"])
    model = llama()
    model.lm_head = nn.Linear(64, 64)
    assert train(adapted(model, modules_to_save=["lm_head"]))[-1] < 3.5


def test_a_conv1d_of_gpt2_that_was_quantized() -> None:
    config = transformers.GPT2Config(n_embd=64, n_layer=1, n_head=4, vocab_size=64, n_positions=32)
    model = transformers.GPT2LMHeadModel(config)
    quantize_(model, {"re:.*c_attn": qao.Int8WeightOnly()}, progress=False)
    model = adapted(model, target_modules=["c_attn"], fan_in_fan_out=True)
    assert train(model)[-1] < 4.2
    unmerged = logits(model)
    with pytest.warns(UserWarning, match="Merging quantizes"):
        model.merge_adapter()
    torch.testing.assert_close(logits(model), unmerged, rtol=0, atol=0.05)


def test_the_example_runs(monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]) -> None:
    """On a tiny model with random weights and repetitive text."""
    monkeypatch.syspath_prepend(str(Path(__file__).parents[1] / "examples"))
    finetune = importlib.import_module("finetune")
    text = IDS[0].repeat(10, 1)
    monkeypatch.setattr(finetune, "smollm2", lambda: (qao.dequantize_(llama()), None))
    monkeypatch.setattr(finetune, "manual", lambda tokenizer: (text[:-2], text[-2:]))
    before, after = finetune.main(steps=20)
    assert after < 0.95 * before
    assert "14 of 15 layers quantized" in (said := capsys.readouterr().out) and "the same loss" in said


# ---- merged ----------------------------------------------------------------------------------------------------------


def merged_weights(model: nn.Module) -> dict[str, Tensor]:
    """W + ΔW of every adapted layer in float32, as its definition says, one adapter after the other: a sum of the
    adapters first would round otherwise, and codes differ."""
    layers = {n: m for n, m in model.named_modules() if type(m).__name__ == "LoraQuantLinear"}
    return {
        name: sum(
            (layer.get_delta_weight(a) for a in layer.active_adapters), layer.base_layer.dequantize(torch.float32)
        )
        for name, layer in layers.items()
    }


@pytest.mark.parametrize("scheme", KINDS.values(), ids=KINDS)
def test_merge_quantizes_again_and_unmerge_is_exact(scheme: qao.Scheme) -> None:
    model = adapted(llama(scheme))
    train(model)
    before, unmerged, wanted = base_state(model), logits(model), merged_weights(model)
    with pytest.warns(
        UserWarning, match=r"Merging quantizes the weights again\. Their relative error is about 0\.\d+,"
    ):
        model.merge_adapter()
    for name, weight in wanted.items():
        layer = model.get_submodule(name).base_layer
        expected = QuantLinear.from_linear(linear_of(weight), scheme)
        assert torch.equal(layer.qweight, expected.qweight) and torch.equal(layer.scales, expected.scales)
        assert (layer.weight_sums is None) == (expected.weight_sums is None)
        if layer.weight_sums is not None:
            assert torch.equal(layer.weight_sums, expected.weight_sums)
    merged = logits(model)
    assert not torch.equal(merged, unmerged)
    model.unmerge_adapter()
    assert_same(before, base_state(model))
    assert torch.equal(logits(model), unmerged)
    with pytest.warns(UserWarning, match="Merging"):
        plain = model.merge_and_unload()
    assert isinstance(plain.model.layers[0].self_attn.q_proj, QuantLinear) and torch.equal(logits(plain), merged)


def linear_of(weight: Tensor) -> nn.Linear:
    linear = nn.Linear(weight.shape[1], weight.shape[0], bias=False)
    linear.weight = nn.Parameter(weight.detach())
    return linear


@pytest.mark.filterwarnings("ignore:Merging")
def test_a_second_adapter_is_merged_with_the_first_in_one_rounding() -> None:
    model = adapted(llama())
    model.add_adapter("second", peft.LoraConfig(r=2, target_modules="all-linear", init_lora_weights=False))
    model.set_adapter("default")
    train(model)
    model.base_model.set_adapter(["default", "second"])
    wanted, before = merged_weights(model), base_state(model)
    model.merge_adapter(["default"])
    model.merge_adapter(["second"])
    for name, weight in wanted.items():
        expected = QuantLinear.from_linear(linear_of(weight), SCHEME)
        assert torch.equal(model.get_submodule(name).base_layer.qweight, expected.qweight)
    model.unmerge_adapter()
    assert_same(before, base_state(model))


@pytest.mark.filterwarnings("error:Merging")
def test_merging_an_adapter_that_adds_nothing_changes_nothing() -> None:
    model = adapted(llama())
    before = base_state(model)
    model.merge_adapter()
    assert_same(before, base_state(model))


@pytest.mark.filterwarnings("ignore:Merging")
def test_the_scales_of_a_merged_layer_keep_their_dtype_and_a_tied_layer_its_weight() -> None:
    model = nn.Sequential(nn.Linear(64, 64), nn.Linear(64, 64)).to(torch.bfloat16)
    model[1].weight = model[0].weight
    quantize_(model, SCHEME)
    tied = model[1].qweight
    wrapped = peft.get_peft_model(model, peft.LoraConfig(r=4, target_modules=["0"], init_lora_weights=False))
    merged = wrapped.merge_and_unload()
    assert merged[0].scales.dtype == torch.bfloat16 and merged[0].qweight is not tied and merged[1].qweight is tied


def test_merge_refuses_nan_and_changes_nothing() -> None:
    model = adapted(llama(), init_lora_weights=False)
    layer = model.base_model.model.model.layers[0].self_attn.q_proj
    layer.lora_B["default"].weight.data[0, 0] = float("nan")
    before = base_state(model)
    with pytest.raises(ValueError, match="adapter default: the merged weight.*NaN"):
        layer.merge()
    assert_same(before, base_state(model))
    assert not layer.merged


@pytest.mark.filterwarnings("ignore:Merging")
def test_lora_bias_and_dora_merge() -> None:
    for options in ({"lora_bias": True}, {"use_dora": True}):
        model = adapted(llama(qao.Int8WeightOnly()), target_modules=["q_proj", "v_proj"], **options)
        train(model)
        before, unmerged = base_state(model), logits(model)
        model.merge_adapter()
        # int8 rounds W to one part in 254 of the largest of a row.
        torch.testing.assert_close(logits(model), unmerged, rtol=0, atol=0.05)
        model.unmerge_adapter()
        assert_same(before, base_state(model))
        assert torch.equal(logits(model), unmerged)


def test_dequantized_first_merging_is_exact() -> None:
    model = adapted(llama())
    train(model)
    wanted = merged_weights(model)
    unmerged = logits(model)
    qao.dequantize_(model)
    plain = model.merge_and_unload()
    for name, weight in wanted.items():
        torch.testing.assert_close(plain.get_submodule(name.removeprefix("base_model.model.")).weight, weight)
    torch.testing.assert_close(logits(plain), unmerged, rtol=1e-4, atol=1e-4)

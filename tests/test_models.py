"""Small quantized transformers models against float models with the dequantized weights."""

from __future__ import annotations

import copy
import json
from collections.abc import Callable
from typing import Any

import pytest
import torch
from qao import (
    Float8DynamicActivationFloat8Weight,
    Float8WeightOnly,
    Int4WeightOnly,
    Int8DynamicActivationInt8Weight,
    Int8WeightOnly,
    QaoConfig,
    QuantLinear,
    Scheme,
    dequantize_,
    quantize_,
)
from qao.nn.packed_module import PackedModule
from torch import Tensor, nn

transformers: Any = pytest.importorskip("transformers")

SCHEME = Int4WeightOnly(group_size=64, clip_search=False)  # which weights they are matters nothing here: the quick ones
# Weight formats; activation handling is tested operator by operator.
SCHEMES = (SCHEME, Int8WeightOnly(clip_search=False), Float8WeightOnly("block"))
DYNAMIC = (Int8DynamicActivationInt8Weight(clip_search=False), Float8DynamicActivationFloat8Weight())
# Models here are so small that every weight in them is a big one.
pytestmark = pytest.mark.filterwarnings("ignore:quantize_. these big weights stay")

DECODER = {
    "vocab_size": 120,
    "hidden_size": 128,
    "intermediate_size": 200,  # no multiple of the group size
    "num_hidden_layers": 2,
    "num_attention_heads": 4,
    "num_key_value_heads": 2,
    "max_position_embeddings": 64,
    "pad_token_id": 0,
    "bos_token_id": 1,
    "eos_token_id": 2,
}


def llama() -> nn.Module:
    return transformers.LlamaForCausalLM(transformers.LlamaConfig(**DECODER))


def mistral() -> nn.Module:
    return transformers.MistralForCausalLM(transformers.MistralConfig(**DECODER, sliding_window=16))


def phi() -> nn.Module:
    return transformers.PhiForCausalLM(transformers.PhiConfig(**DECODER))


def qwen2() -> nn.Module:
    """The width of Qwen2-0.5B, K = 896: seven groups of 128, biases in the attention, a head tied to the embedding."""
    sizes = {"hidden_size": 896, "num_attention_heads": 14, "intermediate_size": 128, "tie_word_embeddings": True}
    return transformers.Qwen2ForCausalLM(transformers.Qwen2Config(**{**DECODER, **sizes}))


def gpt2() -> nn.Module:
    config = transformers.GPT2Config(vocab_size=120, n_positions=64, n_embd=96, n_layer=2, n_head=4)
    return transformers.GPT2LMHeadModel(config)


def opt() -> nn.Module:
    config = transformers.OPTConfig(
        vocab_size=120,
        hidden_size=96,
        ffn_dim=160,
        num_hidden_layers=2,
        num_attention_heads=4,
        max_position_embeddings=64,
        word_embed_proj_dim=80,  # with project_in and project_out
    )
    return transformers.OPTForCausalLM(config)


def bert() -> nn.Module:
    config = transformers.BertConfig(
        vocab_size=120, hidden_size=96, num_hidden_layers=2, num_attention_heads=4, intermediate_size=160
    )
    return transformers.BertForMaskedLM(config)


def t5() -> nn.Module:
    config = transformers.T5Config(
        vocab_size=120, d_model=96, d_kv=24, d_ff=160, num_layers=2, num_heads=4, decoder_start_token_id=0
    )
    return transformers.T5ForConditionalGeneration(config)


def vit() -> nn.Module:
    config = transformers.ViTConfig(
        hidden_size=96,
        num_hidden_layers=2,
        num_attention_heads=4,
        intermediate_size=160,
        image_size=32,
        patch_size=8,
        num_labels=10,
    )
    return transformers.ViTForImageClassification(config)


def mixtral() -> nn.Module:
    config = transformers.MixtralConfig(**DECODER, num_local_experts=4, num_experts_per_tok=2)
    return transformers.MixtralForCausalLM(config)


def falcon() -> nn.Module:
    """Its FalconLinear overrides forward."""
    sizes = {"vocab_size": 120, "hidden_size": 96, "num_hidden_layers": 2, "num_attention_heads": 4}
    return transformers.FalconForCausalLM(transformers.FalconConfig(**sizes))


STATE_SPACE = {"vocab_size": 120, "hidden_size": 64, "num_hidden_layers": 2, "state_size": 8}


def mamba() -> nn.Module:
    """Reads the weight of dt_proj."""
    return transformers.MambaForCausalLM(transformers.MambaConfig(**STATE_SPACE))


def falcon_mamba() -> nn.Module:
    return transformers.FalconMambaForCausalLM(transformers.FalconMambaConfig(**STATE_SPACE))


def mamba2() -> nn.Module:
    """Reads the dtype of the weight of in_proj."""
    sizes = {"head_dim": 16, "num_heads": 8, "n_groups": 1, "chunk_size": 8}
    return transformers.Mamba2ForCausalLM(transformers.Mamba2Config(**STATE_SPACE, **sizes))


def jamba() -> nn.Module:
    layers = {"attn_layer_period": 2, "attn_layer_offset": 1}
    sizes = {"num_experts": 1, "num_experts_per_tok": 1, "mamba_d_state": 8, "use_mamba_kernels": False}
    return transformers.JambaForCausalLM(transformers.JambaConfig(**{**DECODER, **layers, **sizes}))


def rwkv() -> nn.Module:
    """Divides the weights of some layers in place before its first forward, by 2 in the second block."""
    sizes = {"vocab_size": 120, "hidden_size": 64, "attention_hidden_size": 64, "num_hidden_layers": 2}
    return transformers.RwkvForCausalLM(transformers.RwkvConfig(**sizes, context_length=64, rescale_every=1))


def switch() -> nn.Module:
    sizes = {"vocab_size": 120, "d_model": 64, "d_kv": 16, "d_ff": 96, "num_heads": 4, "num_experts": 4}
    layers = {"num_layers": 2, "num_decoder_layers": 2, "num_sparse_encoder_layers": 1, "num_sparse_decoder_layers": 1}
    config = transformers.SwitchTransformersConfig(**sizes, **layers, decoder_start_token_id=0)
    return transformers.SwitchTransformersForConditionalGeneration(config)


def inputs(build: Callable[[], nn.Module], device: str) -> dict[str, Tensor]:
    generator = torch.Generator().manual_seed(0)
    if build is vit:
        return {"pixel_values": torch.randn(2, 3, 32, 32, generator=generator).to(device)}
    tokens = torch.randint(3, 120, (2, 11), generator=generator).to(device)
    return {"input_ids": tokens} | ({"decoder_input_ids": tokens[:, :5]} if build in (t5, switch) else {})


def make(build: Callable[[], nn.Module], device: str) -> nn.Module:
    torch.manual_seed(0)
    return build().eval().to(device)


def with_dequantized_weights(plain: nn.Module, quantized: nn.Module) -> nn.Module:
    """``plain`` with the weights that the layers of ``quantized`` multiply with."""
    with torch.no_grad():
        for name, layer in quantized.named_modules():
            if isinstance(layer, QuantLinear):
                linear = plain.get_submodule(name)
                weight = layer.dequantize(torch.float32)
                linear.weight.copy_(weight if isinstance(linear, nn.Linear) else weight.t())
    return plain


@torch.no_grad()
def logits(model: nn.Module, arguments: dict[str, Tensor]) -> Tensor:
    return model(**arguments).logits


def as_double(arguments: dict[str, Tensor]) -> dict[str, Tensor]:
    return {name: value.double() if value.is_floating_point() else value for name, value in arguments.items()}


@pytest.mark.parametrize(
    "build, layers",
    [
        (llama, 2 * 7 + 1),
        (mistral, 2 * 7 + 1),
        (phi, 2 * 6 + 1),
        (qwen2, 2 * 7),
        (gpt2, 2 * 4),
        (opt, 2 * 6 + 2),
        (bert, 2 * 6 + 1),
        (t5, 2 * 6 + 2 * 10),
        (vit, 2 * 6 + 1),
        (falcon, 2 * 4),
        (mamba, 2 * 4),
        (falcon_mamba, 2 * 4),
        (mamba2, 2 * 2 + 1),
        (jamba, 4 + 4 + 2 * 3 + 1),
        (rwkv, 2 * (7 - 2) + 1),
        (switch, 2 * (4 + 8 + 2 + 4 * 2)),
    ],
    ids=lambda value: getattr(value, "__name__", ""),
)
def test_logits(build: Callable[[], nn.Module], layers: int, device: str) -> None:
    model = make(build, device)
    plain = copy.deepcopy(model)
    report = quantize_(model, SCHEME)
    assert sum(row.status == "quantized" for row in report.rows) == layers
    arguments = inputs(build, device)
    with_dequantized_weights(plain, model)
    got, same = logits(model, arguments), logits(plain, arguments)
    truth = logits(plain.double(), as_double(arguments))

    def error(values: Tensor) -> float:
        return (values.double() - truth).norm().item() / truth.norm().item()

    # Twice the error of the same float32 computation with plain layers, and a rounding of the result.
    assert error(got) <= 2 * error(same) + torch.finfo(torch.float32).eps


@pytest.mark.parametrize("dtype", [torch.bfloat16, torch.float16])
@pytest.mark.parametrize("build", [llama, gpt2, bert, t5], ids=lambda build: build.__name__)
@pytest.mark.parametrize("scheme", SCHEMES, ids=lambda scheme: scheme.word)
def test_logits_in_16_bits(scheme: Scheme, build: Callable[[], nn.Module], dtype: torch.dtype, device: str) -> None:
    """T5 asks for ``wo.weight.dtype`` and casts its activations to it, unless it is int8."""
    model = make(build, device).to(dtype)
    plain = copy.deepcopy(model)
    quantize_(model, scheme)
    arguments = inputs(build, device)
    with_dequantized_weights(plain.float(), model)
    truth, same = logits(copy.deepcopy(plain).double(), arguments), logits(plain.to(dtype), arguments)
    got = logits(model, arguments)
    assert got.dtype == same.dtype == dtype

    def error(values: Tensor) -> float:
        return (values.double() - truth).norm().item() / truth.norm().item()

    assert error(got) <= 2 * error(same) + torch.finfo(dtype).eps


@pytest.mark.parametrize("dtype", [torch.bfloat16, torch.float32])
@pytest.mark.parametrize("build", [llama, gpt2, bert, t5, vit], ids=lambda build: build.__name__)
@pytest.mark.parametrize("scheme", DYNAMIC, ids=lambda scheme: scheme.word)
def test_activations_in_eight_bits(
    scheme: Scheme, build: Callable[[], nn.Module], dtype: torch.dtype, device: str
) -> None:
    """Every linear runs on eight-bit activations and the model computes nearly the same.

    Each layer adds a relative error of at most 2^-4, that of a rounding to e4m3; they are independent, so those of a
    model's few dozen layers make less than a third.
    """
    model = make(build, device).to(dtype)
    plain = copy.deepcopy(model)
    report = quantize_(model, scheme)
    assert any(row.status == "quantized" for row in report.rows)
    arguments = {n: v.to(dtype) if v.is_floating_point() else v for n, v in inputs(build, device).items()}
    with_dequantized_weights(plain, model)
    got, expected = logits(model, arguments), logits(plain, arguments)
    assert got.dtype == dtype and got.isfinite().all()
    assert (got - expected).double().norm() <= expected.double().norm() / 3


def test_conv1d_of_gpt2_is_a_linear_with_its_weight_transposed() -> None:
    model = make(gpt2, "cpu")
    expected = {
        name: (module.weight.shape[1], module.weight.shape[0])
        for name, module in model.named_modules()
        if type(module).__name__ == "Conv1D"
    }
    report = quantize_(model, {"transformer": SCHEME})
    assert {row.name: row.shape for row in report.rows if row.status == "quantized"} == expected


@pytest.mark.parametrize("build", [qwen2, gpt2, opt, bert, t5], ids=lambda build: build.__name__)
def test_tied_embeddings_stay_tied(build: Callable[[], nn.Module]) -> None:
    model = make(build, "cpu")
    quantize_(model, SCHEME)
    assert model.get_output_embeddings().weight is model.get_input_embeddings().weight
    assert any(isinstance(module, QuantLinear) for module in model.modules())


def test_experts_are_quantized(device: str) -> None:
    """Version 4 of transformers has them in modules of linear layers, version 5 fused (test_experts.py)."""
    assert quantize_(make(mixtral, device), SCHEME).coverage > 0.8


def test_the_convolution_of_wav2vec2_is_no_expert() -> None:
    sizes = {"vocab_size": 32, "hidden_size": 64, "num_hidden_layers": 1, "num_attention_heads": 4}
    layers = {"conv_dim": (16,), "conv_stride": (5,), "conv_kernel": (10,), "num_feat_extract_layers": 1}
    config = transformers.Wav2Vec2Config(**sizes, **layers, intermediate_size=96, num_conv_pos_embedding_groups=4)
    report = quantize_(transformers.Wav2Vec2ForCTC(config), SCHEME)
    notes = [row.note for row in report.rows if "pos_conv_embed" in row.name]
    assert notes == ["weight of ParametrizedConv1d, not a linear layer"]
    assert not any("expert" in (row.note or "") for row in report.rows)


def test_routers_of_experts_stay(device: str) -> None:
    model = make(switch, device)
    report = quantize_(model, SCHEME)
    routers = [row for row in report.rows if row.name.endswith("router.classifier")]
    assert len(routers) == 2 and all("a router: " in (row.note or "") for row in routers)
    report = quantize_(model, {r"re:.*\.router\.classifier": SCHEME})
    assert all(row.status == "quantized" for row in report.rows if row.name.endswith("router.classifier"))


@pytest.mark.parametrize("build", [qwen2, t5], ids=lambda build: build.__name__)
def test_the_dtype_of_a_model_is_not_that_of_its_scales(build: Callable[[], nn.Module], device: str) -> None:
    """Eight-bit weights have float32 scales, and here they are the first float tensors of the model."""
    model = make(build, device).bfloat16()
    quantize_(model, Int8WeightOnly(clip_search=False), embeddings=True)
    assert next(p for p in model.parameters() if p.is_floating_point()).dtype == torch.float32
    assert model.dtype == torch.bfloat16
    assert model.half().dtype == torch.float16
    assert model.float().dtype == torch.float32
    model.bfloat16()
    arguments = inputs(build, device)
    expected = logits(model, arguments)
    assert expected.dtype == torch.bfloat16
    if build is t5:  # its forward reads the dtype of a weight
        torch._dynamo.reset()
        compiled = torch.compile(model, backend="eager", fullgraph=True)
        # Its cache copies the configuration deeply, which the Dynamo of torch 2.11 does not trace.
        assert torch.equal(logits(compiled, arguments | {"use_cache": False}), expected)
    plain = make(build, device)  # without quantized layers
    assert plain.dtype == torch.float32 and plain.bfloat16().dtype == torch.bfloat16


@pytest.mark.parametrize("build", [gpt2, t5, falcon], ids=lambda build: build.__name__)
def test_a_model_that_is_dequantized_is_saved_as_floats(build: Callable[[], nn.Module], tmp_path: Any) -> None:
    """GPT-2's Conv1D has a transposed weight, and a square one would load silently."""
    model = make(build, "cpu")
    names = {name: type(module) for name, module in model.named_modules() if not name.endswith("lm_head")}
    quantize_(model, Int8WeightOnly(clip_search=False), embeddings=True)
    assert model.hf_quantizer is not None
    dequantize_(model)
    assert not any(isinstance(module, PackedModule) for module in model.modules())
    assert model.get_output_embeddings().weight is model.get_input_embeddings().weight
    if build is gpt2:
        assert {name: type(module) for name, module in model.named_modules() if name in names} == names
    model.save_pretrained(tmp_path)
    assert "quantization_config" not in json.loads((tmp_path / "config.json").read_text())
    loaded = type(model).from_pretrained(tmp_path).eval()
    state = model.state_dict()
    assert all(torch.equal(tensor, state[name]) for name, tensor in loaded.state_dict().items())


def test_a_quantized_falcon_is_loaded_again(tmp_path: Any) -> None:
    """Not as compressed-tensors: its loader matches layers by the class name Linear."""
    model = make(falcon, "cpu")
    model.save_pretrained(tmp_path / "float")
    expected = type(model).from_pretrained(tmp_path / "float").eval()
    quantize_(expected, SCHEME)
    expected.save_pretrained(tmp_path / "quantized")
    config = QaoConfig(SCHEME)
    while_loading = type(model).from_pretrained(tmp_path / "float", quantization_config=config).eval()
    again = type(model).from_pretrained(tmp_path / "quantized").eval()
    arguments = inputs(falcon, "cpu")
    for loaded in (while_loading, again):
        assert sum(isinstance(module, QuantLinear) for module in loaded.modules()) == 2 * 4
        assert torch.equal(logits(loaded, arguments), logits(expected, arguments))


def test_generation(device: str) -> None:
    """With a cache: one token at a time after the prompt."""
    model = make(llama, device)
    plain = copy.deepcopy(model)
    quantize_(model, SCHEME)
    with_dequantized_weights(plain, model)
    prompt = inputs(llama, device)["input_ids"]
    options = {"max_new_tokens": 8, "do_sample": False, "attention_mask": torch.ones_like(prompt)}
    assert torch.equal(model.generate(prompt, **options), plain.generate(prompt, **options))


def test_compile(device: str) -> None:
    torch._dynamo.reset()
    model = make(llama, device)
    quantize_(model, SCHEME)
    arguments = inputs(llama, device)
    expected = logits(model, arguments)
    got = logits(torch.compile(model, fullgraph=True), arguments)
    # The same operators on our side; the compiler fuses and reorders the float32 arithmetic between them.
    torch.testing.assert_close(got, expected, rtol=1e-4, atol=1e-4 * expected.abs().max().item())


def test_save_and_load(tmp_path: Any) -> None:
    model, other = make(llama, "cpu"), make(llama, "cpu")
    quantize_(model, SCHEME)
    torch.save(model.state_dict(), tmp_path / "model.pt")
    quantize_(other, SCHEME)
    other.load_state_dict(torch.load(tmp_path / "model.pt", weights_only=True))
    arguments = inputs(llama, "cpu")
    assert torch.equal(logits(other, arguments), logits(model, arguments))

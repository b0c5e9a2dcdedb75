"""Architectures of GGUF files: names of the package gguf, metadata of llama.cpp, logits of the float model."""

from __future__ import annotations

import re
from collections.abc import Mapping
from pathlib import Path
from typing import Any

import numpy as np
import pytest
import qao
import torch
from qao.checkpoints import CheckpointError, open_checkpoint
from qao.cli import main
from torch import Tensor, nn

gguf: Any = pytest.importorskip("gguf")
transformers: Any = pytest.importorskip("transformers")

HIDDEN, HEADS, KV_HEADS, HEAD, FFN, VOCAB, EXPERTS = 64, 4, 2, 16, 96, 40, 4
SIZES = {
    "vocab_size": VOCAB,
    "hidden_size": HIDDEN,
    "intermediate_size": FFN,
    "num_hidden_layers": 4,
    "num_attention_heads": HEADS,
    "num_key_value_heads": KV_HEADS,
    "head_dim": HEAD,
    "max_position_embeddings": 128,
    "initializer_range": 0.1,
    "rope_theta": 5000.0,
    "bos_token_id": 1,
    "eos_token_id": 2,
    "pad_token_id": None,
    "tie_word_embeddings": False,
}
ROUTED = {"num_experts": EXPERTS, "num_experts_per_tok": 2}
MOE = {**ROUTED, "moe_intermediate_size": 32}
GRANITE = {"attention_multiplier": 0.2, "embedding_multiplier": 3.0, "residual_multiplier": 0.5, "logits_scaling": 4.0}
YARN = {"rope_type": "yarn", "factor": 2.0, "original_max_position_embeddings": 64}
GEMMA3 = {"tie_word_embeddings": True, "sliding_window": 8, "query_pre_attn_scalar": HEAD, "num_hidden_layers": 7}
LONG = {"rope_type": "longrope", "short_factor": [1.5] * 8, "long_factor": [3.0] * 8}
# Model type of transformers: architecture of llama.cpp, changes of config.json.
MODELS: dict[str, tuple[str, dict[str, Any]]] = {
    "llama yarn": ("llama", {"rope_scaling": YARN}),
    "mixtral": ("llama", {"num_local_experts": EXPERTS, "num_experts_per_tok": 2}),
    "qwen2_moe": ("qwen2moe", {**MOE, "shared_expert_intermediate_size": 48}),
    "qwen3_moe": ("qwen3moe", {**MOE, "norm_topk_prob": True}),
    "gemma": ("gemma", {"tie_word_embeddings": True}),
    "gemma2": ("gemma2", {"tie_word_embeddings": True, "sliding_window": 8, "query_pre_attn_scalar": HEAD}),
    "gemma3_text": ("gemma3", GEMMA3),
    "gemma3_text linear": ("gemma3", {**GEMMA3, "rope_scaling": {"rope_type": "linear", "factor": 8.0}}),
    "phi3": ("phi3", {}),
    "phi3 longrope": ("phi3", {"rope_scaling": LONG, "original_max_position_embeddings": 64}),
    "glm4": ("glm4", {"attention_bias": True, "partial_rotary_factor": 0.5}),
    "gpt_oss": ("gpt-oss", {"num_local_experts": EXPERTS, "num_experts_per_tok": 2, "sliding_window": 8}),
    "granite": ("granite", GRANITE),
    "olmo2": ("olmo2", {}),
    "olmoe": ("olmoe", {**ROUTED, "norm_topk_prob": False, "intermediate_size": 32}),
    "cohere": ("command-r", {"tie_word_embeddings": True, "logit_scale": 0.5, "use_qk_norm": True}),
    "cohere2": ("cohere2", {"tie_word_embeddings": True, "logit_scale": 0.5, "sliding_window": 8}),
    "smollm3": ("smollm3", {"use_sliding_window": False}),
    "starcoder2": ("starcoder2", {"use_bias": True, "sliding_window": None}),
    "seed_oss": ("seed_oss", {"attention_bias": True}),
}
PERMUTED = ("llama", "granite", "smollm3")
# Keys of the metadata by names in config.json, as llama.cpp's conversion writes them.
KEYS = {
    "num_hidden_layers": "block_count",
    "max_position_embeddings": "context_length",
    "hidden_size": "embedding_length",
    "intermediate_size": "feed_forward_length",
    "num_attention_heads": "attention.head_count",
    "num_key_value_heads": "attention.head_count_kv",
    "rms_norm_eps": "attention.layer_norm_rms_epsilon",
    "layer_norm_eps": "attention.layer_norm_epsilon",
    "norm_epsilon": "attention.layer_norm_epsilon",
    "num_experts": "expert_count",
    "num_local_experts": "expert_count",
    "num_experts_per_tok": "expert_used_count",
    "moe_intermediate_size": "expert_feed_forward_length",
    "shared_expert_intermediate_size": "expert_shared_feed_forward_length",
    "sliding_window": "attention.sliding_window",
    "attn_logit_softcapping": "attn_logit_softcapping",
    "final_logit_softcapping": "final_logit_softcapping",
    "attention_multiplier": "attention.scale",
    "embedding_multiplier": "embedding_scale",
    "residual_multiplier": "residual_scale",
    "logits_scaling": "logit_scale",
    "logit_scale": "logit_scale",
    "original_max_position_embeddings": "rope.scaling.original_context_length",
}


def float_model(name: str, changes: Mapping[str, Any]) -> nn.Module:
    """Small, with random weights, norms and biases."""
    torch.manual_seed(0)
    config = transformers.AutoConfig.for_model(name.split()[0], **SIZES | dict(changes))
    model: nn.Module = transformers.AutoModelForCausalLM.from_config(config).eval()
    with torch.no_grad():
        for key, parameter in model.named_parameters():
            if key.endswith(("norm.weight", "bias", "layernorm.weight")):
                parameter.add_(torch.randn_like(parameter) * 0.2)
    return model


def plain_tensors(model: nn.Module, architecture: str) -> dict[str, Tensor]:
    """Tensors of the model by name in the file, as llama.cpp converts them."""
    layers = model.config.num_hidden_layers  # type: ignore[union-attr]
    arch = next(key for key, value in gguf.MODEL_ARCH_NAMES.items() if value == architecture)
    names, made = gguf.get_tensor_name_map(arch, layers), {}
    for name, tensor in model.state_dict().items():
        if name == "lm_head.weight" and model.config.tie_word_embeddings:  # type: ignore[union-attr]
            continue
        module, _, kind = name.rpartition(".")
        found = re.fullmatch(r"model\.layers\.(\d+)\.mlp\.experts\.(gate_up_proj|down_proj)", name)
        if found and architecture != "gpt-oss":
            halves = tensor.chunk(2, 1) if found[2] == "gate_up_proj" else [tensor]
            stems = ("gate", "up") if found[2] == "gate_up_proj" else ("down",)
            made |= {f"blk.{found[1]}.ffn_{s}_exps.weight": half for s, half in zip(stems, halves, strict=True)}
            continue
        if found := re.fullmatch(r"model\.layers\.(\d+)\.mlp\.experts\.(gate_up|down)_proj(_bias)?", name):
            kind = "bias" if found[3] else "weight"
            rows = tensor if found[3] else tensor.mT  # of GPT-OSS
            parts = {"gate": rows[:, ::2], "up": rows[:, 1::2]} if found[2] == "gate_up" else {"down": rows}
            made |= {f"blk.{found[1]}.ffn_{stem}_exps.{kind}": part.contiguous() for stem, part in parts.items()}
            continue
        stored = names.get_name(name if name.endswith("sinks") else module)
        kind = "weight" if name.endswith("sinks") else kind
        assert stored is not None, name
        if architecture in PERMUTED and stored.endswith(("attn_q", "attn_k")):
            heads = HEADS if stored.endswith("q") else KV_HEADS
            halves = tensor.reshape(heads, 2, -1, *tensor.shape[1:])
            tensor = halves.swapaxes(1, 2).reshape(tensor.shape)
        if architecture.startswith("gemma") and stored.endswith("norm"):
            tensor = tensor + 1
        made[f"{stored}.{kind}"] = tensor.squeeze()
    return made


def write(path: Path, model: nn.Module, architecture: str, kind: str = "F32", up: str | None = None) -> Path:
    """``kind``: the type of tensors of two and three dimensions; ``up``: that of the up projections of experts."""
    config: Any = model.config
    writer = gguf.GGUFWriter(path, architecture)
    for name, key in KEYS.items():
        value = getattr(config, name, None)
        if value is not None and not (name == "sliding_window" and architecture in ("llama", "qwen2moe", "smollm3")):
            add = writer.add_uint32 if isinstance(value, int) else writer.add_float32
            add(f"{architecture}.{key}", value)
    for key in ("key_length", "value_length"):
        writer.add_uint32(f"{architecture}.attention.{key}", HEAD)
    rope = config.rope_parameters
    inner = rope.get("full_attention", rope)
    share = inner.get("partial_rotary_factor", 1.0)
    writer.add_rope_dimension_count(int(HEAD * share))
    writer.add_rope_freq_base(inner["rope_theta"])
    if inner["rope_type"] == "yarn":
        writer.add_rope_scaling_type(gguf.RopeScalingType.YARN)
        writer.add_rope_scaling_factor(inner["factor"])
        writer.add_rope_scaling_orig_ctx_len(inner["original_max_position_embeddings"])
    if inner["rope_type"] == "linear":
        writer.add_rope_scaling_type(gguf.RopeScalingType.LINEAR)
        writer.add_rope_scaling_factor(inner["factor"])
    if inner["rope_type"] == "longrope":
        for length in ("short", "long"):
            writer.add_tensor(f"rope_factors_{length}.weight", np.array(inner[f"{length}_factor"], np.float32))
    for name, tensor in plain_tensors(model, architecture).items():
        matrix = name.endswith("weight") and tensor.dim() > (2 if kind == "MXFP4" else 1) and "_inp" not in name
        of = gguf.GGMLQuantizationType[(up if up and "up_exps" in name else kind) if matrix else "F32"]
        writer.add_tensor(name, gguf.quantize(tensor.float().contiguous().numpy(), of), raw_dtype=of)
    writer.write_header_to_file()
    writer.write_kv_data_to_file()
    writer.write_tensors_to_file()
    writer.close()
    return path


@pytest.mark.filterwarnings("ignore::UserWarning")
@pytest.mark.parametrize("name", MODELS)
def test_architectures(name: str, tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    architecture, changes = MODELS[name]
    model: Any = float_model(name, changes)
    path = write(tmp_path / "model.gguf", model, architecture)
    ours = qao.from_pretrained(path, dequantize=True)
    assert type(ours) is type(model)
    ids = torch.randint(0, VOCAB, (2, 24), generator=torch.Generator().manual_seed(1))
    with torch.inference_mode():
        expected, logits = model(ids).logits, ours(ids).logits
    assert expected.std() > 0.01
    assert (logits - expected).abs().max() <= 1e-5 * expected.abs().max()

    model.save_pretrained(tmp_path / "model")
    made = main(["convert", str(tmp_path / "model"), str(tmp_path / "ours.gguf"), "--quiet"])
    if architecture == "gpt-oss":
        assert made == 1 and "fused experts" in capsys.readouterr().err
        return
    assert made == 0
    theirs, written = (gguf.GGUFReader(tmp_path / file) for file in ("model.gguf", "ours.gguf"))
    expected, tensors = ({one.name: one.data for one in reader.tensors} for reader in (theirs, written))
    assert expected.keys() == tensors.keys()
    assert all(np.array_equal(expected[name], tensors[name]) for name in expected)
    for key, field in theirs.fields.items():
        if key.startswith(f"{architecture}."):
            assert written.fields[key].contents() == pytest.approx(field.contents()), key


def test_sliding_windows(tmp_path: Path) -> None:
    """llama.cpp writes 0 for none; a window that the model would ignore is refused."""
    model = float_model("phi3", {})
    model.config.sliding_window = 0
    assert "sliding_window" not in open_checkpoint(write(tmp_path / "phi.gguf", model, "phi3")).config
    model = float_model("olmo2", {})
    model.config.sliding_window = 8  # OLMo 3
    with pytest.raises(CheckpointError, match="olmo2 with a sliding window is not supported"):
        open_checkpoint(write(tmp_path / "olmo.gguf", model, "olmo2"))

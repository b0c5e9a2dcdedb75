"""GGUF files for the tests, written with the package gguf as llama.cpp's conversion writes them."""

from __future__ import annotations

import copy
import re
from collections.abc import Callable, Collection, Mapping
from pathlib import Path
from typing import Any

import numpy as np
import pytest
import torch
from gguf_configs import FFN, HEAD, HEADS, HIDDEN, KV_HEADS, PERMUTED, SIZES, VOCAB
from torch import Tensor, nn

gguf: Any = pytest.importorskip("gguf")
transformers: Any = pytest.importorskip("transformers")

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
    "norm_eps": "attention.layer_norm_rms_epsilon",
    "clip_qkv": "attention.clamp_kqv",
    "conv_L_cache": "shortconv.l_cache",
    "num_dense_layers": "leading_dense_block_count",
    "interleave_moe_layer_step": "interleave_moe_layer_step",
    "shared_intermediate_size": "expert_shared_feed_forward_length",
    "n_routed_experts": "expert_count",
    "n_shared_experts": "expert_shared_count",
    "n_group": "expert_group_count",
    "topk_group": "expert_group_used_count",
    "first_k_dense_replace": "leading_dense_block_count",
    "routed_scaling_factor": "expert_weights_scale",
}


def rope_parameters(config: Any) -> dict[str, Any]:
    """As transformers 5 has them; version 4 spreads them over the configuration."""
    if hasattr(config, "rope_parameters"):
        return config.rope_parameters  # type: ignore[no-any-return]
    scaling = getattr(config, "rope_scaling", None) or {}
    if not hasattr(config, "rope_theta"):
        return {}
    flat = {"rope_type": scaling.get("type", "default"), "rope_theta": config.rope_theta, **scaling}
    names = ("partial_rotary_factor", "original_max_position_embeddings")
    return flat | {name: getattr(config, name) for name in names if hasattr(config, name) and name not in flat}


def scores(config: Any) -> dict[str, Any]:
    return {"expert_gating_func": 2, "expert_weights_norm": config.norm_topk_prob}


def mla_keys(config: Any) -> dict[str, Any]:
    latent, rope = config.kv_lora_rank, config.qk_rope_head_dim
    keys = {"attention.head_count_kv": 1, "attention.key_length": latent + rope, "attention.value_length": latent}
    keys |= {
        "attention.key_length_mla": config.qk_nope_head_dim + rope,
        "attention.value_length_mla": config.v_head_dim,
    }
    keys |= {"attention.kv_lora_rank": latent, "attention.q_lora_rank": config.q_lora_rank}
    keys |= scores(config) if config.model_type == "deepseek_v3" else {"expert_gating_func": 1}
    if "mscale_all_dim" in (scaling := rope_parameters(config)):
        keys["rope.scaling.yarn_log_multiplier"] = 0.1 * scaling["mscale_all_dim"]
    return keys


# llama.cpp leaves frequencies unrotated that no section holds.
SECTIONS = {"rope.dimension_sections": [3, 3, 2, 0]}


def linear_keys(config: Any) -> dict[str, Any]:
    values = config.linear_num_value_heads * config.linear_value_head_dim
    keys = {"ssm.conv_kernel": config.linear_conv_kernel_dim, "ssm.state_size": config.linear_key_head_dim}
    keys |= {"ssm.group_count": config.linear_num_key_heads, "ssm.time_step_rank": config.linear_num_value_heads}
    keys |= {"ssm.inner_size": values, "full_attention_interval": 3}
    return keys if config.model_type == "qwen3_next" else keys | SECTIONS


def gemma4_keys(config: Any) -> dict[str, Any]:
    sliding = [one == "sliding_attention" for one in config.layer_types]
    count, shared = config.num_hidden_layers, config.num_kv_shared_layers
    keys = {"attention.shared_kv_layers": shared, "attention.sliding_window_pattern": sliding}
    keys |= {"embedding_length_per_layer_input": config.hidden_size_per_layer_input, "attention.key_length": 32}
    keys |= {"attention.value_length": 32, "attention.key_length_swa": HEAD, "attention.value_length_swa": HEAD}
    keys |= {"rope.dimension_count_swa": HEAD, "rope.freq_base_swa": 3000.0}
    if config.use_double_wide_mlp:
        keys["feed_forward_length"] = [FFN if block < count - shared else 2 * FFN for block in range(count)]
    if config.attention_k_eq_v:
        keys["attention.head_count_kv"] = [2 if one else 1 for one in sliding]
    if config.enable_moe_block:
        keys["expert_used_count"] = config.top_k_experts
    return keys


def mistral3_keys(config: Any) -> dict[str, Any]:
    rope = rope_parameters(config)
    if config.model_type != "ministral3":  # Mistral Small 3
        return {}
    scale, temperature = rope["mscale_all_dim"], rope["llama_4_scaling_beta"]
    return {"rope.scaling.yarn_log_multiplier": scale, "attention.temperature_scale": temperature}


def llama4_keys(config: Any) -> dict[str, Any]:
    return {
        "feed_forward_length": config.intermediate_size_mlp,
        "expert_feed_forward_length": config.intermediate_size,
        "attention.head_count_kv": config.num_key_value_heads,
    }


def ernie_keys(config: Any) -> dict[str, Any]:
    keys = {"expert_shared_count": config.moe_num_shared_experts, "leading_dense_block_count": 1}
    keys |= {"interleave_moe_layer_step": 1}
    return keys | {"expert_shared_feed_forward_length": config.intermediate_size // config.num_key_value_heads}


def window_keys(config: Any) -> dict[str, Any]:
    if not getattr(config, "sliding_window", None):
        return {}
    local = rope_parameters(config).get("sliding_attention")
    theta = {"rope.freq_base_swa": local["rope_theta"]} if local else {}
    return theta | {"attention.sliding_window_pattern": [one == "sliding_attention" for one in config.layer_types]}


def hunyuan_keys(config: Any) -> dict[str, Any]:
    size = config.intermediate_size
    keys = {"expert_shared_feed_forward_length": size, "expert_feed_forward_length": size, "expert_shared_count": 1}
    return keys | {"expert_used_count": config.moe_topk}


def lfm2_keys(config: Any) -> dict[str, Any]:
    keys = {"attention.head_count_kv": [KV_HEADS if one in ATTENDS else 0 for one in config.layer_types]}
    return keys | ({"expert_gating_func": 2} if config.model_type == "lfm2_moe" else {})


def xielu_keys(config: Any) -> dict[str, Any]:
    """Of values that float_model gives them."""
    values = {"alpha_p": 0.3, "alpha_n": -0.4, "beta": 0.5, "eps": -1e-6}
    counts = range(config.num_hidden_layers)
    return {f"/xielu.{name}": [value + 0.1 * block for block in counts] for name, value in values.items()}


def gpt_keys(config: Any) -> dict[str, Any]:
    keys = {"attention.layer_norm_epsilon": config.layer_norm_epsilon, "feed_forward_length": 4 * HIDDEN}
    keys |= {"attention.key_length": None, "attention.value_length": None, "context_length": 128}
    return keys | {"attention.head_count_kv": getattr(config, "num_key_value_heads", HEADS)}


def shared_keys(config: Any) -> dict[str, Any]:
    keys = {"expert_shared_count": config.num_shared_experts, "expert_gating_func": 2, "expert_weights_norm": True}
    scale = getattr(config, "route_scale", None) or config.routed_scaling_factor
    return keys | {"expert_weights_scale": scale}


def mamba_keys(config: Any) -> dict[str, Any]:
    inner = config.mamba_n_heads * config.mamba_d_head
    keys = {"ssm.conv_kernel": config.mamba_d_conv, "ssm.state_size": config.mamba_d_state, "ssm.inner_size": inner}
    keys |= {"ssm.group_count": config.mamba_n_groups, "ssm.time_step_rank": config.mamba_n_heads}
    if config.model_type == "granitemoehybrid":
        attention = [one in ATTENDS for one in config.layer_types]
        keys |= {"attention.head_count_kv": [KV_HEADS if one else 0 for one in attention]}
        keys |= {"rope.scaling.finetuned": True, "attention.key_length": None, "attention.value_length": None}
        if not config.num_local_experts:
            keys |= {"expert_shared_feed_forward_length": None, "expert_used_count": None}
    else:
        keys |= {"embedding_scale": None, "attention.scale": None}
    return keys


def nemotron_keys(config: Any) -> dict[str, Any]:
    kinds, moe = config.hybrid_override_pattern, config.hybrid_override_pattern.count("E") > 0
    size = config.moe_intermediate_size if moe else FFN
    inner = config.mamba_num_heads * config.mamba_head_dim
    keys = {"ssm.conv_kernel": 4, "ssm.state_size": 16, "ssm.group_count": 2, "ssm.time_step_rank": 8}
    epsilon = config.layer_norm_epsilon
    keys |= {"attention.layer_norm_rms_epsilon": epsilon, "attention.layer_norm_epsilon": epsilon}
    keys["ssm.inner_size"] = inner
    keys |= {"feed_forward_length": [size if one in "E-" else 0 for one in kinds]}
    keys |= {"attention.head_count_kv": [KV_HEADS if one == "*" else 0 for one in kinds]}
    if not moe:
        names = ("num_local_experts", "num_experts_per_tok", "n_routed_experts", "n_shared_experts", "n_group")
        names = (*names, "topk_group", "routed_scaling_factor", "moe_intermediate_size")
        return keys | {KEYS[name]: None for name in names}
    shared = {"expert_shared_feed_forward_length": config.moe_shared_expert_intermediate_size}
    latent = {"moe_latent_size": config.moe_latent_size} if config.moe_latent_size else {}
    return keys | scores(config) | shared | latent


# Keys that llama.cpp's conversion computes from config.json; None: left out.
COMPUTED: dict[str, Callable[[Any], dict[str, Any]]] = {
    "deepseek2": mla_keys,
    "gpt-oss": lambda config: {"expert_feed_forward_length": config.intermediate_size},
    "qwen3next": linear_keys,
    "mistral3": mistral3_keys,
    "llama4": llama4_keys,
    "olmo": lambda config: {"attention.layer_norm_epsilon": 1e-5},
    "olmo2": window_keys,
    "exaone4": window_keys,
    "ernie4_5-moe": ernie_keys,
    "hunyuan-moe": hunyuan_keys,
    "lfm2": lfm2_keys,
    "lfm2moe": lfm2_keys,
    "nemotron": lambda config: {
        "attention.layer_norm_epsilon": config.norm_eps,
        "attention.layer_norm_rms_epsilon": None,
    },
    "minimax-m2": lambda config: {"expert_feed_forward_length": config.intermediate_size, "expert_gating_func": 2},
    "qwen35": linear_keys,
    "gemma4": gemma4_keys,
    "qwen35moe": linear_keys,
    "glm4moe": scores,
    "dots1": scores,
    "bailingmoe2": scores,
    "apertus": xielu_keys,
    "afmoe": shared_keys,
    "exaone-moe": shared_keys,
    "falcon-h1": mamba_keys,
    "minicpm3": lambda config: {
        "attention.key_length": config.qk_nope_head_dim + config.qk_rope_head_dim,
        "attention.value_length": None,
        "attention.kv_lora_rank": config.kv_lora_rank,
        "attention.q_lora_rank": config.q_lora_rank,
    },
    "nemotron_h": nemotron_keys,
    "nemotron_h_moe": nemotron_keys,
    "granitehybrid": mamba_keys,
    **dict.fromkeys(("qwen2vl", "qwen3vl", "qwen3vlmoe"), lambda _: SECTIONS),
    "gptneox": lambda config: {"use_parallel_residual": config.use_parallel_residual},
    "falcon": lambda config: {**gpt_keys(config), "attention.head_count_kv": config.num_kv_heads},
    "gpt2": lambda config: gpt_keys(config) | {"feed_forward_length": config.n_inner},
    "starcoder": lambda config: gpt_keys(config) | {"feed_forward_length": config.n_inner},
    "bloom": gpt_keys,
    "mpt": lambda config: gpt_keys(config) | {"attention.max_alibi_bias": 8.0, "attention.clamp_kqv": 0.4},
}


def split_kv(name: str, tensor: Tensor, config: Any) -> dict[str, Tensor]:
    """DeepSeek's heads: keys are transposed, so that the latent vector need not be expanded."""
    if not name.endswith("kv_b_proj.weight"):
        return {name: tensor}
    heads = tensor.view(config.num_attention_heads, -1, config.kv_lora_rank)
    k, v = heads.split([config.qk_nope_head_dim, config.v_head_dim], 1)
    return {name.replace("kv_b", "k_b"): k.transpose(1, 2), name.replace("kv_b", "v_b"): v}


def delta_net(name: str, tensor: Tensor, config: Any) -> dict[str, Tensor]:
    groups, heads = config.linear_num_key_heads, config.linear_num_value_heads
    if name.endswith("A_log"):
        tensor = -tensor.exp()
    if name.endswith("norm.weight") and not name.endswith("linear_attn.norm.weight"):
        tensor = tensor + 1
    if name.endswith("in_proj_qkvz.weight"):
        k, v = config.linear_key_head_dim, config.linear_value_head_dim * heads // groups
        parts = [part.flatten(0, 1) for part in tensor.view(groups, -1, HIDDEN).split([k, k, v, v], 1)]
        return {name.replace("qkvz", "qkv"): torch.cat(parts[:3]), name.replace("qkvz", "z"): parts[3]}
    if "linear_attn" in name and config.model_type != "qwen3_next" and not name.endswith("norm.weight"):
        dim = 1 if name.endswith("out_proj.weight") else 0
        kept = 0
        if "in_proj_qkv" in name or "conv1d" in name:
            kept = 2 * groups * config.linear_key_head_dim
        keys, values = tensor.split([kept, tensor.shape[dim] - kept], dim)
        values = values.unflatten(dim, (groups, heads // groups, -1)).swapaxes(dim, dim + 1).flatten(dim, dim + 2)
        tensor = torch.cat((keys, values), dim)
    return {name.replace("dt_bias", "dt_proj.bias"): tensor}


def scalars(name: str, tensor: Tensor, config: Any) -> dict[str, Tensor]:
    if name.endswith(("layer_scalar", "experts.gate_up_proj", "experts.down_proj")):
        name = f"{name}.weight"
    made = {name: tensor}
    if config.num_kv_shared_layers and re.search(r"\.([kv]_proj|k_norm)\.", name):  # unused ones, which the model omits
        made |= {re.sub(r"layers\.(\d)", lambda found: f"layers.{int(found[1]) + 2}", name): tensor}
    return made


def llama4_experts(name: str, tensor: Tensor, config: Any) -> dict[str, Tensor]:
    if name.endswith("experts.down_proj"):
        return {f"{name}.weight": tensor.mT}
    if not name.endswith("experts.gate_up_proj"):
        return {name: tensor}
    gate, up = tensor.mT.chunk(2, 1)
    return {name.replace("gate_up_proj", "gate_proj.weight"): gate, name.replace("gate_up_proj", "up_proj.weight"): up}


def granite_experts(name: str, tensor: Tensor, config: Any) -> dict[str, Tensor]:
    shared = name.endswith("shared_mlp.input_linear.weight")
    if shared or name.endswith("experts.gate_up_proj"):
        block = name.split(".")[2]
        stems = [f"blk.{block}.ffn_{one}_{'sh' if shared else ''}exp{'' if shared else 's'}" for one in ("gate", "up")]
        return dict(zip((f"{one}.weight" for one in stems), tensor.chunk(2, 0 if shared else 1), strict=True))
    return {name.replace("experts.down_proj", "output_linear.weight").replace("router", "router.layer"): tensor}


def lfm2_bias(name: str, tensor: Tensor, config: Any) -> dict[str, Tensor]:
    return {name.replace("expert_bias", "expert_bias.bias"): tensor}


def heads_of_three(name: str, tensor: Tensor, config: Any) -> dict[str, Tensor]:
    if "query_key_value" in name:
        tensor = tensor.unflatten(0, (HEADS, 3, HEAD)).transpose(0, 1).flatten(0, 2)
    return {name.removeprefix("transformer.") if config.model_type == "bloom" else name: tensor}


def falcon_groups(name: str, tensor: Tensor, config: Any) -> dict[str, Tensor]:
    if "query_key_value" not in name:
        return {name: tensor}
    groups = tensor.unflatten(0, (config.num_kv_heads, -1, HEAD))
    return {name: torch.cat([part.flatten(0, 2) for part in (groups[:, :-2], groups[:, -2:-1], groups[:, -1:])])}


def gpt2_linears(name: str, tensor: Tensor, config: Any) -> dict[str, Tensor]:
    return {name: tensor.t() if re.search(r"c_(attn|proj|fc)\.weight", name) else tensor}


def mamba_tensors(name: str, tensor: Tensor, config: Any) -> dict[str, Tensor]:
    if name.endswith("A_log"):
        tensor = -tensor.exp()
    if name.endswith("mamba.norm.weight"):
        tensor = tensor.view(config.mamba_n_groups, -1)
    if config.model_type == "falcon_h1":
        tensor = tensor * falcon_h1_factor(name, tensor, config)
    elif "shared_mlp" in name and not config.num_local_experts:
        block = name.split(".")[2]
        parts = tensor.chunk(2) if "input" in name else [tensor]
        stems = ("gate", "up") if "input" in name else ("down",)
        return {f"blk.{block}.ffn_{stem}.weight": part for stem, part in zip(stems, parts, strict=True)}
    elif "mamba" not in name:
        return granite_experts(name, tensor, config)
    return {name.replace("dt_bias", "dt_proj.bias"): tensor}


def falcon_h1_factor(name: str, tensor: Tensor, config: Any) -> Any:
    """llama.cpp's conversion multiplies weights by the factors."""
    inner, states = config.mamba_d_ssm, config.mamba_n_groups * config.mamba_d_state
    sizes = torch.tensor([inner, inner, states, states, config.mamba_n_heads])
    rows = torch.tensor(config.ssm_multipliers).repeat_interleave(sizes)[:, None]
    inside, gate, down = config.attention_in_multiplier, *config.mlp_multipliers
    factors = {
        **{"lm_head": config.lm_head_multiplier, "embed_tokens": config.embedding_multiplier},
        **{"q_proj": inside, "k_proj": inside * config.key_multiplier, "v_proj": inside},
        **{"o_proj": config.attention_out_multiplier, "out_proj": config.ssm_out_multiplier},
        **{"in_proj": rows * config.ssm_in_multiplier, "gate_proj": gate, "down_proj": down},
    }
    return factors.get(name.split(".")[-2], 1.0)


def nemotron_tensors(name: str, tensor: Tensor, config: Any) -> dict[str, Tensor]:
    if found := re.fullmatch(r"model\.layers\.(\d+)\.mixer\.experts\.(up|down)_proj", name):
        return {f"blk.{found[1]}.ffn_{found[2]}_exps.weight": tensor}
    if name.endswith("A_log"):
        tensor = -tensor.exp()
    if name.endswith("mixer.norm.weight"):
        tensor = tensor.view(config.n_groups, -1)
    return {name.replace("model.", "backbone.", 1).replace("dt_bias", "dt.bias"): tensor}


CHANGED: dict[str, Callable[[str, Tensor, Any], dict[str, Tensor]]] = {
    "deepseek2": split_kv,
    "qwen3next": delta_net,
    "llama4": llama4_experts,
    "granitemoe": granite_experts,
    "lfm2moe": lfm2_bias,
    "ernie4_5-moe": lambda name, tensor, config: {name.replace("gate.moe_statics", "moe_statics"): tensor},
    "nemotron": lambda name, tensor, config: {name: tensor + name.endswith("norm.weight")},
    "qwen35": delta_net,
    "gemma4": scalars,
    "qwen35moe": delta_net,
    "apertus": lambda name, tensor, config: {} if "act_fn" in name else {name: tensor},
    "falcon-h1": mamba_tensors,
    "nemotron_h": nemotron_tensors,
    "nemotron_h_moe": nemotron_tensors,
    "granitehybrid": mamba_tensors,
    "afmoe": lfm2_bias,
    "gptneox": heads_of_three,
    "bloom": heads_of_three,
    "falcon": falcon_groups,
    "gpt2": gpt2_linears,
}


ATTENDS = ("attention", "full_attention")  # types of blocks, by version of transformers
FUSED = ("bailingmoe2",)


def float_model(name: str, changes: Mapping[str, Any]) -> nn.Module:
    """Small, with random weights, norms and biases."""
    if name.split()[0] not in transformers.CONFIG_MAPPING:
        pytest.skip(f"transformers {transformers.__version__} has no {name.split()[0]}")
    if "rope_parameters" in changes and transformers.__version__ < "5":
        pytest.skip("transformers 4 has one kind of rotary embeddings")
    if name == "granite minicpm4" and transformers.__version__ < "5":
        pytest.skip("transformers 4 computes factors of long contexts only with a ratio of lengths")
    if "qk_layernorm" in changes and name.startswith("stablelm") and transformers.__version__ < "5":
        pytest.skip("transformers 4 cannot initialize norms of heads, which have no bias")
    torch.manual_seed(0)
    settings = copy.deepcopy(SIZES | dict(changes))  # transformers changes dictionaries in them
    settings = {name: value for name, value in settings.items() if value is not ...}
    config = transformers.AutoConfig.for_model(name.split()[0], **settings)
    model: nn.Module = transformers.AutoModelForCausalLM.from_config(config).eval()
    with torch.no_grad():
        for key, parameter in model.state_dict().items():
            if key.endswith(
                ("norm.weight", "bias", "layernorm.weight", "scale", "scalar", "norm_1.weight", "norm_2.weight")
            ):
                parameter.add_(torch.randn_like(parameter) * 0.2)
        for block, layer in enumerate(model.model.layers if name == "apertus" else ()):
            for key, values in xielu_keys(config).items():
                getattr(layer.mlp.act_fn, key.removeprefix("/xielu.")).fill_(values[block])
    return model


def fused_qkv(state: Mapping[str, Tensor]) -> dict[str, Tensor]:
    """Rows of keys and values after those of queries, in one tensor."""
    made = {}
    for name, tensor in state.items():
        if found := re.fullmatch(r"(.*layers\.(\d+)\.self_attn)\.q_proj\.(weight|bias)", name):
            rows = [tensor, *(state[f"{found[1]}.{one}_proj.{found[3]}"] for one in "kv")]
            made[f"blk.{found[2]}.attn_qkv.{found[3]}"] = torch.cat(rows)
        elif not re.search(r"self_attn\.[kv]_proj", name):
            made[name] = tensor
    return made


def stacked(state: Mapping[str, Tensor]) -> dict[str, Tensor]:
    """Experts as transformers 5 has them; version 4 has a module for each, and other names for Granite's."""
    made: dict[str, Tensor] = {}
    experts: dict[str, dict[str, list[Tensor]]] = {}
    norms: dict[str, list[Tensor]] = {}
    for name, tensor in state.items():
        found = re.fullmatch(r"(.*\.experts)\.\d+\.(\w+)\.weight", name)
        if heads := re.fullmatch(r"model\.layers\.(\d+)\.self_attn\.([qk])_layernorm\.norms\.\d+\.weight", name):
            norms.setdefault(f"blk.{heads[1]}.attn_{heads[2]}_norm.weight", []).append(tensor)
        elif found:
            stem = {"gate_proj": "w1", "up_proj": "w3", "down_proj": "w2"}.get(found[2], found[2])
            experts.setdefault(found[1], {}).setdefault(stem, []).append(tensor)
        else:
            granite = name.replace("block_sparse_moe.input_linear.weight", "block_sparse_moe.experts.gate_up_proj")
            granite = granite.replace("block_sparse_moe.output_linear.weight", "block_sparse_moe.experts.down_proj")
            made[granite.replace("router.layer.", "router.")] = tensor
    made |= {name: torch.stack(parts) for name, parts in norms.items()}
    for name, parts in experts.items():
        gate, up, down = (torch.stack(parts[one]) for one in ("w1", "w3", "w2"))
        made |= {f"{name}.gate_up_proj": torch.cat((gate, up), 1), f"{name}.down_proj": down}
    return made


def plain_tensors(model: nn.Module, architecture: str) -> dict[str, Tensor]:
    """Tensors of the model by name in the file, as llama.cpp converts them."""
    layers = model.config.num_hidden_layers + 1  # type: ignore[union-attr, operator]
    arch = next(key for key, value in gguf.MODEL_ARCH_NAMES.items() if value == architecture)
    names, made = gguf.get_tensor_name_map(arch, layers), {}
    change = CHANGED.get(architecture, lambda name, tensor, config: {name: tensor})
    state = fused_qkv(model.state_dict()) if architecture in FUSED else model.state_dict()
    changed = [change(name, tensor, model.config) for name, tensor in stacked(state).items()]
    for name, tensor in (pair for one in changed for pair in one.items()):
        if name == "lm_head.weight" and model.config.tie_word_embeddings:  # type: ignore[union-attr]
            continue
        name = name.replace("e_score_correction_bias", "e_score_correction.bias")
        module, _, kind = name.rpartition(".")
        if name.startswith("blk."):
            made[name] = tensor
            continue
        found = re.fullmatch(r"model\.layers\.(\d+)\.\w+\.experts\.(gate_up_proj|down_proj)", name)
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
        if found := re.fullmatch(r"model\.layers\.(\d+)\.router\.(per_expert_)?scale", name):
            made[f"blk.{found[1]}.ffn_{'down_exps' if found[2] else 'gate_inp'}.scale"] = tensor
            continue
        whole = name.endswith(("sinks", "A_log", "mamba.D", "mixer.D"))
        stored = names.get_name(name if whole or "pre_ff_layernorm" in name else module)
        assert stored is not None, name
        if name.endswith(("A_log", "mamba.D", "mixer.D", "pre_ff_layernorm.weight")):
            made[stored] = tensor if "linear_attn" in name or "norm" in name else tensor[:, None]
            continue
        kind = "weight" if whole else kind
        if architecture in PERMUTED and stored.endswith(("attn_q", "attn_k")):
            heads = HEADS if stored.endswith("q") else KV_HEADS
            halves = tensor.reshape(heads, 2, -1, *tensor.shape[1:])
            tensor = halves.swapaxes(1, 2).reshape(tensor.shape)
        if architecture in ("gemma", "gemma2", "gemma3") and stored.endswith("norm"):
            tensor = tensor + 1
        made[f"{stored}.{kind}"] = tensor.squeeze() if tensor.numel() > 1 else tensor
    return made


def write(
    path: Path,
    model: nn.Module,
    architecture: str,
    kind: str = "F32",
    up: str | None = None,
    floats: Collection[str] = (),
    left_out: str | None = None,
) -> Path:
    """``kind``: the type of tensors of two and three dimensions, but for ``floats`` and, with ``up``, up_exps."""
    config: Any = copy.deepcopy(model.config)
    config.allow_global_per_layer_attribute_access = True  # Gemma 4: head_dim is that of blocks with a sliding window
    writer = gguf.GGUFWriter(path, architecture)
    head = getattr(config, "head_dim", HEAD)
    keys: dict[str, Any] = {"vocab_size": VOCAB, "attention.key_length": head, "attention.value_length": head}
    for name, key in KEYS.items():
        value = getattr(config, name, None)
        if value is not None and not (name == "sliding_window" and architecture in ("llama", "qwen2moe", "smollm3")):
            keys[key] = value
    for key, value in (keys | COMPUTED.get(architecture, lambda config: {})(config)).items():
        add = {bool: writer.add_bool, int: writer.add_uint32, float: writer.add_float32}.get(type(value))
        key = key[1:] if key.startswith("/") else f"{architecture}.{key}"
        if add is not None:
            add(key, value)
        elif value is not None:
            writer.add_array(key, value)
    writer.add_tokenizer_model("none")
    rope = rope_parameters(config)
    inner = rope.get("full_attention", rope) or {"rope_type": "none"}
    share = inner.get("partial_rotary_factor", 1.0)
    if inner["rope_type"] == "proportional":
        writer.add_rope_dimension_count(2 * HEAD)
        divisors = np.array([1.0] * 4 + [1e30] * 12, np.float32)
        writer.add_tensor("rope_freqs.weight", divisors)
    else:
        writer.add_rope_dimension_count(int(head * share))
    if "rope_theta" in inner:
        writer.add_rope_freq_base(inner["rope_theta"])
    if inner["rope_type"] == "yarn":
        writer.add_rope_scaling_type(gguf.RopeScalingType.YARN)
        writer.add_rope_scaling_factor(inner["factor"])
        writer.add_rope_scaling_orig_ctx_len(inner["original_max_position_embeddings"])
        for end in ("fast", "slow"):
            if architecture != "gpt-oss" and f"beta_{end}" in inner:
                getattr(writer, f"add_rope_scaling_yarn_beta_{end}")(inner[f"beta_{end}"])
    if inner["rope_type"] == "linear":
        writer.add_rope_scaling_type(gguf.RopeScalingType.LINEAR)
        writer.add_rope_scaling_factor(inner["factor"])
    if inner["rope_type"] == "llama3":
        lengths = 2 * np.pi * inner["rope_theta"] ** (np.arange(0, head, 2) / head)
        turns = inner["original_max_position_embeddings"] / lengths
        low, high, factor = (inner[name] for name in ("low_freq_factor", "high_freq_factor", "factor"))
        smooth = (turns - low) / (high - low or 1.0)
        smooth = 1 / ((1 - smooth) / factor + smooth)
        divisors = np.where(turns > high, 1.0, np.where(turns < low, factor, smooth))
        writer.add_tensor("rope_freqs.weight", divisors.astype(np.float32))
    if inner["rope_type"] == "longrope":
        if architecture.startswith("minicpm"):
            writer.add_rope_scaling_type(gguf.RopeScalingType.LONGROPE)
            writer.add_rope_scaling_orig_ctx_len(inner["original_max_position_embeddings"])
        for length in ("short", "long"):
            writer.add_tensor(f"rope_factors_{length}.weight", np.array(inner[f"{length}_factor"], np.float32))
    for name, tensor in plain_tensors(model, architecture).items():
        if name == left_out:
            continue
        matrix = name.endswith("weight") and tensor.dim() > (2 if kind == "MXFP4" else 1)
        matrix = matrix and "_inp" not in name and "conv" not in name and "_norm" not in name and name not in floats
        of = gguf.GGMLQuantizationType[(up if up and "up_exps" in name else kind) if matrix else "F32"]
        writer.add_tensor(name, gguf.quantize(tensor.float().contiguous().numpy(), of), raw_dtype=of)
    writer.write_header_to_file()
    writer.write_kv_data_to_file()
    writer.write_tensors_to_file()
    writer.close()
    return path

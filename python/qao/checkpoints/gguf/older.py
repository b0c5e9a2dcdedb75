"""Architectures from before Llama in GGUF files: LayerNorm with biases, and queries, keys and values in one tensor."""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import replace
from typing import Any

import torch
from torch import Tensor

from .rows import ATTENTION, DENSE, FUSED_QKV, Architecture, Made, Metadata, Sizes, Stem, without


def _sizes(config: Mapping[str, Any], block: int) -> dict[str, int]:
    return {"3h": 3 * config["hidden_size"], "ctx": config["max_position_embeddings"]}


def _by_head(sizes: Sizes) -> Tensor:
    """Each head's query, key and value are together in transformers."""
    return torch.arange(3 * sizes["h"], device="cpu").view(3, sizes["n"], -1).transpose(0, 1).flatten()


def _by_group(sizes: Sizes) -> Tensor:
    """Falcon has the queries of a key, the key and its value together."""
    q, k, groups = sizes["q"], sizes["k"], sizes["m"]
    parts = torch.arange(q + 2 * k, device="cpu").split([q, k, k])
    return torch.cat([part.view(groups, -1) for part in parts], 1).flatten()


def _transposed(sizes: Sizes, tensor: Tensor) -> Tensor:
    return tensor.t()


def _conv1d(module: str, shape: str) -> Stem:
    """GPT-2's linear layers, [K, N] in transformers."""
    return Stem(module, shape, made=Made(" ".join(reversed(shape.split(" "))), _transposed))


def _top(embedding: str, norm: str, **more: Stem) -> dict[str, Stem]:
    return {"token_embd": Stem(embedding, "v h"), "output_norm": Stem(norm, "h"), **more}


def _stablelm(file: Metadata) -> dict[str, Any]:
    return {"use_parallel_residual": not file.has_tensor("blk.0.ffn_norm.weight")}


def _check_heads(file: Metadata) -> None:
    """Rows of queries, keys and values are those of the embedding."""
    hidden, heads = file.number("embedding_length"), file.number("attention.head_count")
    if hidden % heads or file.number("attention.head_count_kv", heads) != heads:
        raise file.error(f"{heads} heads do not fit an embedding of {hidden}, or share keys")


def _neox(file: Metadata) -> dict[str, Any]:
    _check_heads(file)
    size = file.number("embedding_length") // file.number("attention.head_count")
    return {
        "use_parallel_residual": file.number("use_parallel_residual", True, bool),
        "rotary_pct": file.number("rope.dimension_count", size) / size,
        "rotary_emb_base": file.number("rope.freq_base", 10000.0, float),
    }


def _falcon(file: Metadata) -> dict[str, Any]:
    """Falcon-7B has one norm and one key; 40B two norms, and groups of queries; Falcon2-11B groups and one norm."""
    heads, groups = file.number("attention.head_count"), file.number("attention.head_count_kv", 1)
    two = file.has_tensor("blk.0.attn_norm_2.weight")
    if heads % groups:
        raise file.error(f"{heads} heads do not fit {groups} groups")
    return {
        "num_kv_heads": groups,
        "new_decoder_architecture": groups > 1,
        "multi_query": groups == 1,
        "num_ln_in_parallel_attn": 2 if two else 1 if groups > 1 else None,
        "ffn_hidden_size": file.number("feed_forward_length", 4 * file.number("embedding_length")),
        "num_attention_heads": heads,
    }


def _inner(file: Metadata) -> dict[str, Any]:
    return {"n_inner": file.number("feed_forward_length")}


def _gpt2(file: Metadata) -> dict[str, Any]:
    _check_heads(file)
    return _inner(file)


def _starcoder(file: Metadata) -> dict[str, Any]:
    if file.number("attention.head_count_kv", 1) != 1:
        raise file.error("only models with one key head are supported")
    return _inner(file)


def _alibi(file: Metadata) -> dict[str, Any]:
    """MPT without rotary embeddings; llama.cpp writes 0 for no biases of positions."""
    bias = file.number("attention.max_alibi_bias", kind=float)
    clip = file.number("attention.clamp_kqv", kind=float) if file.has_key("attention.clamp_kqv") else None
    inner, hidden = file.number("feed_forward_length"), file.number("embedding_length")
    _check_heads(file)
    if inner != 4 * hidden or bias != int(bias):
        raise file.error(f"feed-forward layers of {inner} rows, or positions with a bias of {bias}, are not supported")
    attention = {"alibi": True, "alibi_bias_max": int(bias), "clip_qkv": clip}
    return {"attn_config": attention, "max_seq_len": file.number("context_length"), "expansion_ratio": 4}


def _bloom(file: Metadata) -> dict[str, Any]:
    _check_heads(file)
    if file.number("feed_forward_length") != 4 * file.number("embedding_length"):
        raise file.error("only feed-forward layers of four times the embedding are supported")
    return {}


def _inner_keys(config: Any) -> dict[str, Any]:
    return {"feed_forward_length": config.n_inner or 4 * config.hidden_size}


def _bloom_keys(config: Any) -> dict[str, Any]:
    """Positions are unlimited; the length is a note, and if there is none llama.cpp's converter writes this one."""
    lengths = (getattr(config, name, None) for name in ("max_position_embeddings", "seq_length", "hidden_size"))
    return {"feed_forward_length": 4 * config.hidden_size, "context_length": next(filter(None, lengths))}


def _alibi_keys(config: Any) -> dict[str, Any]:
    attention = config.attn_config
    keys = {"feed_forward_length": config.expansion_ratio * config.hidden_size, "context_length": config.max_seq_len}
    clip = {"attention.clamp_kqv": float(attention.clip_qkv)} if attention.clip_qkv else {}
    bias = float(attention.alibi_bias_max) if attention.alibi else 0.0
    return {**keys, **clip, "attention.max_alibi_bias": bias}


_NEOX = {
    "attn_norm": Stem("input_layernorm", "h"),
    "attn_qkv": Stem("attention.query_key_value", "3h h", made=Made("3h h", rows=_by_head)),
    "attn_output": Stem("attention.dense", "h h"),
    "ffn_norm": Stem("post_attention_layernorm", "h"),
    "ffn_up": Stem("mlp.dense_h_to_4h", "f h"),
    "ffn_down": Stem("mlp.dense_4h_to_h", "h f"),
}
_GPT2 = {
    "attn_norm": Stem("ln_1", "h"),
    "attn_qkv": _conv1d("attn.c_attn", "3h h"),
    "attn_output": _conv1d("attn.c_proj", "h h"),
    "ffn_norm": Stem("ln_2", "h"),
    "ffn_up": _conv1d("mlp.c_fc", "f h"),
    "ffn_down": _conv1d("mlp.c_proj", "h f"),
}
_WPE = Stem("transformer.wpe", "ctx h")
_GPT = Architecture(
    "gpt2",
    "GPT2LMHeadModel",
    _GPT2,
    epsilon="layer_norm_epsilon",
    layer_norm=True,
    norm_bias=True,
    present={},
    layers="transformer.h",
    top=_top("transformer.wte", "transformer.ln_f", position_embd=_WPE),
    configure=_gpt2,
    sizes=_sizes,
    written=False,
)
OLDER: dict[str, Architecture] = {
    "stablelm": Architecture(
        "stablelm",
        "StableLmForCausalLM",
        DENSE
        | FUSED_QKV
        | {
            "attn_q_norm": Stem("self_attn.q_layernorm.norms.{}", "n d"),
            "attn_k_norm": Stem("self_attn.k_layernorm.norms.{}", "m d"),
        },
        epsilon="layer_norm_eps",
        layer_norm=True,
        norm_bias=True,
        present={"use_qkv_bias": "attn_q.bias", "qk_layernorm": "attn_q_norm.weight"},
        partial_rotary=True,
        configure=_stablelm,
    ),
    "phi2": Architecture(
        "phi",
        "PhiForCausalLM",
        without(ATTENTION, "attn_output")
        | FUSED_QKV
        | {
            "attn_output": Stem("self_attn.dense", "h q"),
            "ffn_up": Stem("mlp.fc1", "f h"),
            "ffn_down": Stem("mlp.fc2", "h f"),
        },
        epsilon="layer_norm_eps",
        layer_norm=True,
        norm_bias=True,
        present={},
        partial_rotary=True,
        top={"output_norm": Stem("model.final_layernorm", "h")},
    ),
    "gptneox": Architecture(
        "gpt_neox",
        "GPTNeoXForCausalLM",
        _NEOX,
        epsilon="layer_norm_eps",
        layer_norm=True,
        norm_bias=True,
        present={"attention_bias": "attn_qkv.bias"},
        partial_rotary=True,
        layers="gpt_neox.layers",
        top=_top("gpt_neox.embed_in", "gpt_neox.final_layer_norm", output=Stem("embed_out", "v h")),
        configure=_neox,
        sizes=_sizes,
        keys=lambda config: {"use_parallel_residual": bool(config.use_parallel_residual)},
    ),
    "falcon": Architecture(
        "falcon",
        "FalconForCausalLM",
        {
            "attn_norm": Stem("input_layernorm", "h"),
            "attn_qkv": Stem("self_attention.query_key_value", "q+2k h", made=Made("q+2k h", rows=_by_group)),
            "attn_output": Stem("self_attention.dense", "h q"),
            "ffn_up": Stem("mlp.dense_h_to_4h", "f h"),
            "ffn_down": Stem("mlp.dense_4h_to_h", "h f"),
        },
        epsilon="layer_norm_epsilon",
        layer_norm=True,
        norm_bias=True,
        fixed={"parallel_attn": True, "alibi": False},
        omitted=("head_dim",),
        present={"bias": "attn_qkv.bias"},
        layers="transformer.h",
        top=_top("transformer.word_embeddings", "transformer.ln_f"),
        configure=_falcon,
        written=False,
    ),
    "gpt2": _GPT,
    "starcoder": replace(
        _GPT,
        model_type="gpt_bigcode",
        cls="GPTBigCodeForCausalLM",
        stems={
            "attn_norm": Stem("ln_1", "h"),
            "attn_qkv": Stem("attn.c_attn", "q+2k h"),
            "attn_output": Stem("attn.c_proj", "h q"),
            "ffn_norm": Stem("ln_2", "h"),
            "ffn_up": Stem("mlp.c_fc", "f h"),
            "ffn_down": Stem("mlp.c_proj", "h f"),
        },
        fixed={"multi_query": True},
        configure=_starcoder,
        keys=lambda config: {**_inner_keys(config), "attention.head_count_kv": 1},
        written=True,
    ),
    "bloom": Architecture(
        "bloom",
        "BloomForCausalLM",
        _NEOX
        | {
            "attn_qkv": _NEOX["attn_qkv"]._replace(module="self_attention.query_key_value"),
            "attn_output": _NEOX["attn_output"]._replace(module="self_attention.dense"),
        },
        epsilon="layer_norm_epsilon",
        layer_norm=True,
        norm_bias=True,
        present={},
        layers="transformer.h",
        top=_top(
            "transformer.word_embeddings",
            "transformer.ln_f",
            token_embd_norm=Stem("transformer.word_embeddings_layernorm", "h"),
        ),
        configure=_bloom,
        sizes=_sizes,
        keys=_bloom_keys,
    ),
    "mpt": Architecture(
        "mpt",
        "MptForCausalLM",
        {
            "attn_norm": Stem("norm_1", "h"),
            "attn_qkv": Stem("attn.Wqkv", "3h h", ("weight",)),
            "attn_output": Stem("attn.out_proj", "h h", ("weight",)),
            "ffn_norm": Stem("norm_2", "h"),
            "ffn_up": Stem("ffn.up_proj", "f h", ("weight",)),
            "ffn_down": Stem("ffn.down_proj", "h f", ("weight",)),
        },
        epsilon="layer_norm_epsilon",
        layer_norm=True,
        present={},
        layers="transformer.blocks",
        top=_top("transformer.wte", "transformer.norm_f"),
        configure=_alibi,
        sizes=_sizes,
        keys=_alibi_keys,
    ),
}
FALCON_40B = replace(
    OLDER["falcon"],
    stems={**OLDER["falcon"].stems, "attn_norm": Stem("ln_mlp", "h"), "attn_norm_2": Stem("ln_attn", "h")},
)

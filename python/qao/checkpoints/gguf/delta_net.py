"""Qwen3-Next and Qwen3.5 in GGUF files: gated delta nets, and rows in other orders."""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import replace
from typing import Any

import torch
from torch import Tensor

from .rows import (
    ATTENTION,
    EXPERTS,
    MLP,
    MOE,
    QK_NORMS,
    SHARED_EXPERT,
    SHARED_SIZE,
    Architecture,
    Made,
    Metadata,
    Sizes,
    Stem,
    without,
)


def _linear_attention(file: Metadata) -> dict[str, Any]:
    """Gated delta nets, with full attention in some blocks."""
    v, groups, inner = (file.number(f"ssm.{name}") for name in ("time_step_rank", "group_count", "inner_size"))
    if v % groups or inner % v:
        raise file.error(f"{v} heads of values do not fit {groups} groups and {inner} values")
    if file.has_key("attention.recurrent_layers"):
        linear = file.per_block("attention.recurrent_layers")
    else:
        interval = file.number("full_attention_interval", 4)
        linear = [(block + 1) % interval for block in range(file.blocks)]
    return {
        "layer_types": ["linear_attention" if one else "full_attention" for one in linear],
        "linear_conv_kernel_dim": file.number("ssm.conv_kernel"),
        "linear_key_head_dim": file.number("ssm.state_size"),
        "linear_num_key_heads": groups,
        "linear_num_value_heads": v,
        "linear_value_head_dim": inner // v,
    }


def _linear_sizes(config: Mapping[str, Any], block: int) -> dict[str, int]:
    groups, heads = (config[f"linear_num_{one}_heads"] for one in ("key", "value"))
    key, value = (config[f"linear_{one}_head_dim"] for one in ("key", "value"))
    keys, values = groups * key, heads * value
    return {
        **{"groups": groups, "heads": heads, "2heads": 2 * heads, "key": key, "value": value, "values": values},
        **{"qkv": 2 * keys + values, "qkvz": 2 * keys + 2 * values, "c": config["linear_conv_kernel_dim"]},
        "2q": 2 * config["num_attention_heads"] * config["head_dim"],
    }


def _by_group(sizes: Sizes) -> Tensor:
    """Qwen3-Next has queries, keys, values and gates of a group of heads together."""
    keys = sizes["groups"] * sizes["key"]
    parts = torch.arange(sizes["qkvz"], device="cpu").split([keys, keys, sizes["values"], sizes["values"]])
    return torch.cat([part.view(sizes["groups"], -1) for part in parts], 1).flatten()


def _value_heads(sizes: Sizes, size: int = 1) -> Tensor:
    """The file of Qwen3.5 has the first value heads of all groups first, then the second ones, …"""
    rows = torch.arange(sizes["heads"] * size, device="cpu")
    return rows.view(-1, sizes["groups"], size).transpose(0, 1).flatten()


def _values(sizes: Sizes) -> Tensor:
    return _value_heads(sizes, sizes["value"])


def _values_after_keys(sizes: Sizes) -> Tensor:
    keys = sizes["qkv"] - sizes["values"]
    return torch.cat((torch.arange(keys, device="cpu"), keys + _values(sizes)))


def _columns(sizes: Sizes, weight: Tensor) -> Tensor:
    return weight[:, _values(sizes)]


def _decay(sizes: Sizes, a: Tensor) -> Tensor:
    return (-a).log()


def _reordered_decay(sizes: Sizes, a: Tensor) -> Tensor:
    return (-a).log()[_value_heads(sizes)]


_GATED_ATTENTION = {
    **ATTENTION,
    **QK_NORMS,
    "attn_q": Stem("self_attn.q_proj", "2q h"),
    "post_attention_norm": Stem("post_attention_layernorm", "h"),
}
_DELTA_NET = {
    "attn_qkv": Stem("linear_attn.in_proj_qkvz", "qkv h", made=Made("qkvz h", None, ("attn_gate",), _by_group)),
    "attn_gate": Stem("linear_attn.in_proj_qkvz", "values h", ()),
    "ssm_in": Stem("linear_attn.in_proj_qkvz", "qkvz h"),  # of the first files
    "ssm_ba": Stem("linear_attn.in_proj_ba", "2heads h"),
    "ssm_conv1d": Stem("linear_attn.conv1d", "qkv 1 c"),
    "ssm_dt": Stem("linear_attn", "heads", ("", "dt_bias")),
    "ssm_a": Stem("linear_attn", "heads", ("A_log",), Made("heads", _decay)),
    "ssm_norm": Stem("linear_attn.norm", "value"),
    "ssm_out": Stem("linear_attn.out_proj", "h values"),
}
_REORDERED_DELTA_NET = {
    "attn_qkv": Stem("linear_attn.in_proj_qkv", "qkv h", made=Made("qkv h", rows=_values_after_keys)),
    "attn_gate": Stem("linear_attn.in_proj_z", "values h", made=Made("values h", rows=_values)),
    "ssm_alpha": Stem("linear_attn.in_proj_a", "heads h", made=Made("heads h", rows=_value_heads)),
    "ssm_beta": Stem("linear_attn.in_proj_b", "heads h", made=Made("heads h", rows=_value_heads)),
    "ssm_conv1d": Stem("linear_attn.conv1d", "qkv 1 c", made=Made("qkv 1 c", rows=_values_after_keys)),
    "ssm_dt": Stem("linear_attn", "heads", ("", "dt_bias"), Made("heads", rows=_value_heads)),
    "ssm_a": Stem("linear_attn", "heads", ("A_log",), Made("heads", _reordered_decay)),
    "ssm_norm": Stem("linear_attn.norm", "value"),
    "ssm_out": Stem("linear_attn.out_proj", "h values", made=Made("h values", _columns)),
}
QWEN35 = Architecture(
    "qwen3_5_text",
    "Qwen3_5ForCausalLM",
    _GATED_ATTENTION | _REORDERED_DELTA_NET | without(MLP, "ffn_norm"),
    norm_offset=1.0,
    partial_rotary=True,
    configure=_linear_attention,
    sizes=_linear_sizes,
    written=False,
)
QWEN35_MOE = replace(
    QWEN35,
    model_type="qwen3_5_moe_text",
    cls="Qwen3_5MoeForCausalLM",
    stems=_GATED_ATTENTION | _REORDERED_DELTA_NET | EXPERTS | SHARED_EXPERT,
    entries=(*MOE, SHARED_SIZE),
)
QWEN3_NEXT = replace(
    QWEN35_MOE,
    model_type="qwen3_next",
    cls="Qwen3NextForCausalLM",
    stems=_GATED_ATTENTION | _DELTA_NET | EXPERTS | SHARED_EXPERT,
    fixed={"norm_topk_prob": True, "decoder_sparse_step": 1, "mlp_only_layers": []},
)

"""Mamba 2 in GGUF files, and Falcon-H1, which has it and attention in every block."""

from __future__ import annotations

from collections.abc import Mapping
from typing import Any

from torch import Tensor

from .rows import ATTENTION, FUSED_QKV, Architecture, Made, Metadata, Sizes, Stem


def _decay(sizes: Sizes, a: Tensor) -> Tensor:
    return (-a).log().flatten()


def _flat(sizes: Sizes, tensor: Tensor) -> Tensor:
    return tensor.flatten()


MAMBA2 = {
    "ssm_in": Stem("mamba.in_proj", "ssm h"),
    "ssm_conv1d": Stem("mamba.conv1d", "conv 1 c"),
    "ssm_dt": Stem("mamba", "t", ("", "dt_bias")),
    "ssm_a": Stem("mamba", "t 1", ("A_log",), Made("t", _decay)),
    "ssm_d": Stem("mamba", "t 1", ("D",), Made("t", _flat)),
    "ssm_norm": Stem("mamba.norm", "g i/g", made=Made("i", _flat)),
    "ssm_out": Stem("mamba.out_proj", "h i"),
}


def mamba2(file: Metadata) -> dict[str, Any]:
    inner, heads, groups = (file.number(f"ssm.{name}") for name in ("inner_size", "time_step_rank", "group_count"))
    if inner % heads or inner % groups or heads % groups:
        raise file.error(f"an inner size of {inner} does not fit {heads} heads and {groups} groups")
    block = next((one for one in range(file.blocks) if file.has_tensor(f"blk.{one}.ssm_in.weight")), 0)
    return {
        "mamba_n_heads": heads,
        "mamba_d_head": inner // heads,
        "mamba_n_groups": groups,
        "mamba_d_state": file.number("ssm.state_size"),
        "mamba_d_conv": file.number("ssm.conv_kernel"),
        "mamba_conv_bias": file.has_tensor(f"blk.{block}.ssm_conv1d.bias"),
        "mamba_proj_bias": file.has_tensor(f"blk.{block}.ssm_in.bias"),
    }


def mamba2_sizes(config: Mapping[str, Any], block: int) -> dict[str, int]:
    heads, groups = config["mamba_n_heads"], config["mamba_n_groups"]
    inner = heads * config["mamba_d_head"]
    conv = inner + 2 * groups * config["mamba_d_state"]
    sizes = {"t": heads, "g": groups, "i": inner, "i/g": inner // groups, "c": config["mamba_d_conv"]}
    return sizes | {"conv": conv, "ssm": inner + conv + heads}


def _falcon_h1(file: Metadata) -> dict[str, Any]:
    """llama.cpp multiplies weights by the factors of config.json."""
    return {
        **mamba2(file),
        "mamba_d_ssm": file.number("ssm.inner_size"),
        "mamba_rms_norm": file.has_tensor("blk.0.ssm_norm.weight"),
        "projectors_bias": file.has_tensor("blk.0.ssm_out.bias"),
        "mlp_multipliers": [1.0, 1.0],
        "ssm_multipliers": [1.0] * 5,
    }


_FACTORS = ("lm_head", "embedding", "key", "attention_in", "attention_out", "ssm_in", "ssm_out")
FALCON_H1 = Architecture(
    "falcon_h1",
    "FalconH1ForCausalLM",
    ATTENTION
    | FUSED_QKV
    | MAMBA2
    | {
        "ffn_norm": Stem("pre_ff_layernorm", "h"),
        "ffn_gate": Stem("feed_forward.gate_proj", "f h"),
        "ffn_up": Stem("feed_forward.up_proj", "f h"),
        "ffn_down": Stem("feed_forward.down_proj", "h f"),
    },
    fixed={"mamba_norm_before_gate": False, **{f"{name}_multiplier": 1.0 for name in _FACTORS}},
    present={"attention_bias": "attn_q.bias", "mlp_bias": "ffn_up.bias"},
    top={"output_norm": Stem("model.final_layernorm", "h")},
    configure=_falcon_h1,
    sizes=mamba2_sizes,
    written=False,
)

"""Nemotron-H and Nemotron 3 in GGUF files: a block is Mamba 2, attention, a feed-forward layer or experts."""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import replace
from typing import Any

from .mamba import MAMBA2, mamba2, mamba2_sizes
from .rows import ATTENTION, COUNTS, GROUPS, NORM, SHARED_KEY, SIGMOID, Architecture, Entry, Metadata, Stem

# Names of Mamba 2's sizes in mamba.py and here.
_SIZES = {
    "mamba_n_heads": "mamba_num_heads",
    "mamba_d_head": "mamba_head_dim",
    "mamba_n_groups": "n_groups",
    "mamba_d_state": "ssm_state_size",
    "mamba_d_conv": "conv_kernel",
}


def _blocks(file: Metadata) -> dict[str, Any]:
    """Blocks without heads of keys and without feed-forward rows are Mamba 2."""
    heads, rows = file.per_block("attention.head_count_kv"), file.per_block("feed_forward_length")
    wide = "E" if file.has_key("expert_count") else "-"
    if any(one and other for one, other in zip(heads, rows, strict=True)):
        raise file.error("a block with attention and a feed-forward layer is not supported")
    kinds = ["*" if one else wide if other else "M" for one, other in zip(heads, rows, strict=True)]
    found = mamba2(file)
    dense = next((block for block, kind in enumerate(kinds) if kind == "-"), 0)
    return {
        "hybrid_override_pattern": "".join(kinds),
        **{own: found[name] for name, own in _SIZES.items()},
        "use_conv_bias": found["mamba_conv_bias"],
        "use_bias": found["mamba_proj_bias"],
        "mlp_bias": file.has_tensor(f"blk.{dense}.ffn_up.bias"),
    }


def _sizes(config: Mapping[str, Any], block: int) -> dict[str, int]:
    sizes = mamba2_sizes({name: config[own] for name, own in _SIZES.items()}, block)
    shared = config.get("moe_shared_expert_intermediate_size", 0)
    return sizes | {"s": shared, "l": config.get("moe_latent_size") or config["hidden_size"]}


NEMOTRON_H = Architecture(
    "nemotron_h",
    "NemotronHForCausalLM",
    {name: stem._replace(module=stem.module.replace("self_attn", "mixer")) for name, stem in ATTENTION.items()}
    | {name: stem._replace(module=stem.module.replace("mamba", "mixer")) for name, stem in MAMBA2.items()}
    | {
        "attn_norm": Stem("norm", "h"),
        "ffn_up": Stem("mixer.up_proj", "f h"),
        "ffn_down": Stem("mixer.down_proj", "h f"),
    },
    epsilon="layer_norm_epsilon",
    permuted=True,
    arrays=("attention.head_count_kv", "feed_forward_length"),
    top={"token_embd": Stem("model.embeddings", "v h"), "output_norm": Stem("model.norm_f", "h")},
    configure=_blocks,
    sizes=_sizes,
    present={},
    written=False,
)
NEMOTRON_H_MOE = replace(
    NEMOTRON_H,
    stems={
        **NEMOTRON_H.stems,
        "ffn_gate_inp": Stem("mixer.gate", "e h"),
        "exp_probs_b": Stem("mixer.gate", "e", ("", "e_score_correction_bias")),
        "ffn_latent_down": Stem("mixer.fc1_latent_proj", "l h"),
        "ffn_latent_up": Stem("mixer.fc2_latent_proj", "h l"),
        "ffn_up_exps": Stem("mixer.experts.{}.up_proj", "e x l"),
        "ffn_down_exps": Stem("mixer.experts.{}.down_proj", "e l x"),
        "ffn_up_shexp": Stem("mixer.shared_experts.up_proj", "s h"),
        "ffn_down_shexp": Stem("mixer.shared_experts.down_proj", "h s"),
    },
    entries=(
        Entry("n_routed_experts", "expert_count"),
        Entry("moe_intermediate_size", "expert_feed_forward_length"),
        Entry("moe_shared_expert_intermediate_size", SHARED_KEY),
        Entry("moe_latent_size", "moe_latent_size", optional=True),
        Entry("n_shared_experts", "expert_shared_count"),
        Entry("routed_scaling_factor", "expert_weights_scale", float, 1.0),
        *COUNTS,
        *GROUPS,
        NORM,
    ),
    constants=SIGMOID,
)

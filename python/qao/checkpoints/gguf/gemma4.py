"""Gemma 4 in GGUF files: blocks of two kinds, and embeddings of each block."""

from __future__ import annotations

from collections.abc import Mapping
from typing import Any

from .rows import DENSE, QK_NORMS, SANDWICH, STACKED, WINDOW, Architecture, Entry, Made, Metadata, Stem, unchanged


def _gemma4(file: Metadata) -> dict[str, Any]:
    """Heads of blocks with full attention, the "global" ones, differ from those with a sliding window."""
    whole, local = file.number("attention.key_length"), file.number("attention.key_length_swa")
    sizes = {"attention.value_length": whole, "attention.value_length_swa": local, "rope.dimension_count": whole}
    for key, value in sizes.items():
        if file.number(key, value) != value:
            raise file.error(f"{key} is {file.number(key)}, but heads have {value}")
    divisors = file.divisors("rope_freqs.weight", whole)
    rotated = int((divisors == 1).sum())
    if not ((divisors[:rotated] == 1).all() and (divisors[rotated:] >= 1e29).all()):
        raise file.error("rope_freqs.weight is neither 1 nor infinite")
    sliding = [bool(one) for one in file.per_block("attention.sliding_window_pattern")]
    if all(sliding) or sliding[-1]:
        raise file.error("the last block must have full attention")
    kv, ffn = file.per_block("attention.head_count_kv"), file.per_block("feed_forward_length")
    shared = file.number("attention.shared_kv_layers", 0, least=0)
    first = len(ffn) - shared
    wide = ffn[-1] != ffn[0]
    alike = not file.has_tensor(f"blk.{sliding.index(False)}.attn_v.weight")
    heads = {one: {count for slides, count in zip(sliding, kv, strict=True) if slides == one} for one in (True, False)}
    if any(len(counts) > 1 for counts in heads.values()) or (heads[True] | heads[False] != heads[False] and not alike):
        raise file.error(f"key heads of blocks, {kv}, are not supported")
    if ffn != [ffn[0] * (2 if wide and block >= first else 1) for block in range(len(ffn))]:
        raise file.error(f"feed-forward sizes of blocks, {ffn}, are not supported")
    experts = file.has_tensor("blk.0.ffn_gate_inp.weight")
    per_layer = "per_layer_token_embd.weight"
    made = {
        "layer_types": ["sliding_attention" if one else "full_attention" for one in sliding],
        "global_head_dim": whole,
        "num_key_value_heads": max(heads[True] or heads[False]),
        "num_global_key_value_heads": max(heads[False]),
        "attention_k_eq_v": alike,
        "intermediate_size": ffn[0],
        "use_double_wide_mlp": wide,
        "num_kv_shared_layers": shared,
        "enable_moe_block": experts,
        "vocab_size_per_layer_input": file.rows(per_layer) if file.has_tensor(per_layer) else 1,
        "rope_parameters": {
            "sliding_attention": {"rope_type": "default", "rope_theta": file.number("rope.freq_base_swa", 1e4, float)},
            "full_attention": {
                "rope_type": "proportional",
                "partial_rotary_factor": 2 * rotated / whole,
                "rope_theta": file.number("rope.freq_base", 1e6, float),
            },
        },
    }
    if experts:
        names = ("num_experts", "top_k_experts", "moe_intermediate_size")
        keys = ("expert_count", "expert_used_count", "expert_feed_forward_length")
        made |= {name: file.number(key) for name, key in zip(names, keys, strict=True)}
    return made


def _gemma4_sizes(config: Mapping[str, Any], block: int) -> dict[str, int]:
    whole = config["layer_types"][block] == "full_attention"
    d = config["global_head_dim" if whole else "head_dim"]
    m = config["num_global_key_value_heads" if whole else "num_key_value_heads"]
    blocks = config["num_hidden_layers"]
    wide = config["use_double_wide_mlp"] and block >= blocks - config["num_kv_shared_layers"]
    x, per_layer = config.get("moe_intermediate_size", 0), config["hidden_size_per_layer_input"]
    return {
        **{"d": d, "q": config["num_attention_heads"] * d, "k": m * d, "x": x, "2x": 2 * x},
        **{
            "f": config["intermediate_size"] * (1 + wide),
            "p": per_layer,
            "bp": blocks * per_layer,
        },
        "vp": config["vocab_size_per_layer_input"],
    }


def _shares_keys(file: Metadata, block: int, name: str) -> bool:
    """Whether these are keys of a block that takes those of an earlier one."""
    first = file.blocks - file.number("attention.shared_kv_layers", 0, least=0)
    return block >= first and name in ("attn_k", "attn_v", "attn_k_norm")


_GEMMA4_MOE = {
    "ffn_gate_inp": Stem("router.proj", "e h"),
    "ffn_gate_inp.scale": Stem("router", "h", ("scale",)),
    "ffn_down_exps.scale": Stem("router", "e", ("per_expert_scale",)),
    "ffn_gate_up_exps": Stem("experts", "e 2x h", ("gate_up_proj",), Made("e 2x h", unchanged, stacked=True)),
    "ffn_gate_exps": Stem("experts", "e x h", ("gate_up_proj",), STACKED),
    "ffn_up_exps": Stem("experts", "e x h", ()),
    "ffn_down_exps": Stem("experts", "e h x", ("down_proj",), Made("e h x", unchanged, stacked=True)),
    "pre_ffw_norm_2": Stem("pre_feedforward_layernorm_2", "h"),
    "post_ffw_norm_1": Stem("post_feedforward_layernorm_1", "h"),
    "post_ffw_norm_2": Stem("post_feedforward_layernorm_2", "h"),
}
GEMMA4 = Architecture(
    "gemma4_text",
    "Gemma4ForCausalLM",
    DENSE
    | SANDWICH
    | QK_NORMS
    | _GEMMA4_MOE
    | {
        "layer_output_scale": Stem("", "1", ("layer_scalar",)),
        "inp_gate": Stem("per_layer_input_gate", "p h"),
        "proj": Stem("per_layer_projection", "h p"),
        "post_norm": Stem("post_per_layer_input_norm", "h"),
    },
    entries=(
        WINDOW,
        Entry("hidden_size_per_layer_input", "embedding_length_per_layer_input", default=0, least=0),
        Entry("final_logit_softcapping", "final_logit_softcapping", float, optional=True),
    ),
    present={},
    head_dim="attention.key_length_swa",
    rotated="rope.dimension_count_swa",
    arrays=("attention.head_count_kv", "feed_forward_length"),
    top={
        "per_layer_token_embd": Stem("model.embed_tokens_per_layer", "vp bp"),
        "per_layer_model_proj": Stem("model.per_layer_model_projection", "bp h"),
        "per_layer_proj_norm": Stem("model.per_layer_projection_norm", "p"),
    },
    configure=_gemma4,
    sizes=_gemma4_sizes,
    skipped=_shares_keys,
    written=False,
)

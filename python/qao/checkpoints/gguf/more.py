"""Ling 2, Trinity, K-EXAONE, Phi-3.5-MoE, Apertus, Jais 2 and GLM-4-9B in GGUF files."""

from __future__ import annotations

from typing import Any

import torch
from torch import Tensor

from .rows import (
    ATTENTION,
    BIASED,
    CORRECTION,
    COUNTS,
    EXPERTS,
    FUSED_MLP,
    FUSED_QKV,
    GROUPS,
    MAY_SLIDE,
    MLP,
    MOE,
    NORM,
    QK_NORMS,
    ROUTED,
    SHARED_EXPERTS,
    SIGMOID,
    SPARSE_EXPERTS,
    WINDOW,
    Architecture,
    Entry,
    Metadata,
    Stem,
    expert_stems,
    without,
)

_QKV = ATTENTION | FUSED_QKV
_HIDDEN_ACT = {"alpha_p": "xielu.alpha_p", "alpha_n": "xielu.alpha_n", "beta": "xielu.beta", "eps": "xielu.eps"}


def _phimoe(file: Metadata) -> dict[str, Any]:
    """Of long contexts, files do not hold the factors of attention: they are those of Phi-3.5-MoE."""
    scale = 1.243163121016122
    made: dict[str, Any] = {"lm_head_bias": file.has_tensor("output.bias")}
    if file.has_tensor("rope_factors_long.weight"):
        original = file.number("rope.scaling.original_context_length")
        made["rope_scaling"] = {
            **{"rope_type": "longrope", "short_mscale": scale, "long_mscale": scale},
            "original_max_position_embeddings": original,
        }
    return made


def _xielu(file: Metadata) -> dict[str, Tensor]:
    """Parameters of Apertus's activation, one of each for a block."""
    made = {}
    for name, key in _HIDDEN_ACT.items():
        for block, value in enumerate(file.floats(key)):
            shape = [1] if name.startswith("alpha") else []
            made[f"model.layers.{block}.mlp.act_fn.{name}"] = torch.full(shape, value, device="cpu")
    return made


def every_fourth(file: Metadata) -> list[str]:
    """Types of blocks: three of four have a sliding window, unless the file says which do."""
    sliding: list[Any] = [(block + 1) % 4 for block in range(file.blocks)]
    if file.has_key("attention.sliding_window_pattern"):
        sliding = file.per_block("attention.sliding_window_pattern")
    return ["sliding_attention" if one else "full_attention" for one in sliding]


def _afmoe(file: Metadata) -> dict[str, Any]:
    """llama.cpp multiplies all embeddings by the root of their size."""
    if not file.number("expert_weights_norm", True, bool):
        raise file.error("scores of experts that are not normalized are not supported")
    return {"layer_types": every_fourth(file), "mup_enabled": True}


def _exaone_moe(file: Metadata) -> dict[str, Any]:
    dense = file.number("leading_dense_block_count", 0, least=0)
    kinds = ["dense" if block < dense else "sparse" for block in range(file.blocks)]
    return {"layer_types": every_fourth(file), "mlp_layer_types": kinds}


MORE: dict[str, Architecture] = {
    "bailingmoe2": Architecture(  # Ling 2 and Ring; transformers has it as GLM-4.5
        "glm4_moe",
        "Glm4MoeForCausalLM",
        _QKV | QK_NORMS | MLP | EXPERTS | SHARED_EXPERTS | CORRECTION,
        entries=(*ROUTED, *GROUPS, NORM),
        fixed={"num_nextn_predict_layers": 0},
        present={**BIASED, "use_qk_norm": "attn_q_norm.weight"},
        partial_rotary=True,
        constants=SIGMOID,
        written=False,
    ),
    "afmoe": Architecture(
        "afmoe",
        "AfmoeForCausalLM",
        _QKV
        | QK_NORMS
        | MLP
        | SHARED_EXPERTS
        | expert_stems("mlp.router.gate", *(f"mlp.experts.{{}}.{one}_proj" for one in ("gate", "up", "down")))
        | {
            "attn_gate": Stem("self_attn.gate_proj", "q h"),
            "post_attention_norm": Stem("post_attention_layernorm", "h"),
            "ffn_norm": Stem("pre_mlp_layernorm", "h"),
            "post_ffw_norm": Stem("post_mlp_layernorm", "h"),
            "exp_probs_b": Stem("mlp", "e", ("", "expert_bias")),
        },
        entries=(
            *MOE,
            Entry("num_dense_layers", "leading_dense_block_count", default=0, least=0),
            Entry("num_shared_experts", "expert_shared_count", default=0, least=0),
            Entry("route_scale", "expert_weights_scale", float, 1.0),
            WINDOW,
        ),
        fixed={"global_attn_every_n_layers": 4},
        constants=SIGMOID,
        configure=_afmoe,
        keys=lambda config: {"expert_weights_norm": True},
    ),
    "exaone-moe": Architecture(
        "exaone_moe",
        "ExaoneMoeForCausalLM",
        _QKV
        | QK_NORMS
        | MLP
        | EXPERTS
        | SHARED_EXPERTS
        | {"exp_probs_b": Stem("mlp", "e", ("", "e_score_correction_bias"))},
        entries=(
            *MOE,
            Entry("first_k_dense_replace", "leading_dense_block_count", default=0, least=0),
            Entry("num_shared_experts", "expert_shared_count", default=0, least=0),
            Entry("routed_scaling_factor", "expert_weights_scale", float, 1.0),
            *GROUPS,
            NORM,
            WINDOW,
        ),
        present={},
        constants=SIGMOID,
        configure=_exaone_moe,
        patterned=True,
    ),
    "chatglm": Architecture(
        "glm",
        "GlmForCausalLM",
        _QKV | {"ffn_norm": MLP["ffn_norm"]} | FUSED_MLP,
        partial_rotary=True,
    ),
    "jais2": Architecture(
        "jais2",
        "Jais2ForCausalLM",
        _QKV | without(MLP, "ffn_gate"),
        epsilon="layer_norm_eps",
        layer_norm=True,
        norm_bias=True,
        present={**BIASED, "mlp_bias": "ffn_up.bias"},
    ),
    "phimoe": Architecture(
        "phimoe",
        "PhimoeForCausalLM",
        _QKV | {"ffn_norm": MLP["ffn_norm"]} | SPARSE_EXPERTS,
        norm_bias=True,
        entries=(
            Entry("num_local_experts", "expert_count"),
            *COUNTS,
            MAY_SLIDE,
        ),
        configure=_phimoe,
    ),
    "apertus": Architecture(
        "apertus",
        "ApertusForCausalLM",
        _QKV
        | QK_NORMS
        | without(MLP, "ffn_gate")
        | {"attn_norm": Stem("attention_layernorm", "h"), "ffn_norm": Stem("feedforward_layernorm", "h")},
        computed=_xielu,
        written=False,
    ),
}

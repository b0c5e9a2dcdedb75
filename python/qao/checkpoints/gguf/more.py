"""Ling 2, Phi-3.5-MoE and Apertus in GGUF files: rows of several modules in one tensor, numbers of activations."""

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
    FUSED_QKV,
    GROUPS,
    MLP,
    NORM,
    QK_NORMS,
    ROUTED,
    SHARED_EXPERTS,
    SIGMOID,
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
            **{"short_mscale": scale, "long_mscale": scale},
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
    "phimoe": Architecture(
        "phimoe",
        "PhimoeForCausalLM",
        _QKV
        | {"ffn_norm": MLP["ffn_norm"]}
        | expert_stems(
            "block_sparse_moe.gate", *(f"block_sparse_moe.experts.{{}}.{one}" for one in ("w1", "w3", "w2"))
        ),
        norm_bias=True,
        entries=(
            Entry("num_local_experts", "expert_count"),
            *COUNTS,
            Entry("sliding_window", "attention.sliding_window", optional=True),
        ),
        configure=_phimoe,
        written=False,
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

"""Granite in GGUF files: scales, experts in few tensors, and Granite 4 with Mamba 2. MiniCPM has the same scales."""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import replace
from typing import Any

import torch
from torch import Tensor

from .mamba import MAMBA2, mamba2, mamba2_sizes
from .rows import (
    ATTENTION,
    COUNTS,
    DENSE,
    MLP,
    SHARED_KEY,
    STACKED,
    Architecture,
    Entry,
    Made,
    Metadata,
    Sizes,
    Stem,
    stacks_experts,
    unchanged,
    whole_context,
)

_SCALES = (
    Entry("attention_multiplier", "attention.scale", float),
    Entry("embedding_multiplier", "embedding_scale", float, 1.0),
    Entry("residual_multiplier", "residual_scale", float, 1.0),
    Entry("logits_scaling", "logit_scale", float, 1.0),
)


def _expert_sizes(config: Mapping[str, Any], block: int) -> dict[str, int]:
    x, s = config["intermediate_size"], config.get("shared_intermediate_size", 0)
    return {"2x": 2 * x, "s": s, "2s": 2 * s}


def _in_order(sizes: Sizes) -> Tensor:
    return torch.arange(sizes["2s"], device="cpu")


_MOE = {
    **ATTENTION,
    "ffn_norm": MLP["ffn_norm"],
    "ffn_gate_inp": Stem("block_sparse_moe.router", "e h"),
    "ffn_gate_exps": Stem("block_sparse_moe.experts", "e x h", ("gate_up_proj",), STACKED),
    "ffn_up_exps": Stem("block_sparse_moe.experts", "e x h", ()),
    "ffn_down_exps": Stem("block_sparse_moe.experts", "e h x", ("down_proj",), Made("e h x", unchanged, stacked=True)),
}
_MOE_4 = {  # names of transformers 4
    "ffn_gate_inp": Stem("block_sparse_moe.router.layer", "e h"),
    "ffn_gate_exps": Stem("block_sparse_moe.input_linear", "e x h", ("weight",), STACKED),
    "ffn_up_exps": Stem("block_sparse_moe.input_linear", "e x h", ()),
    "ffn_down_exps": Stem(
        "block_sparse_moe.output_linear", "e h x", ("weight",), Made("e h x", unchanged, stacked=True)
    ),
}
GRANITE_MOE = Architecture(
    "granitemoe",
    "GraniteMoeForCausalLM",
    _MOE,
    entries=(*_SCALES, Entry("num_local_experts", "expert_count"), *COUNTS),
    permuted=True,
    sizes=_expert_sizes,
    written=False,
)
GRANITE_MOE_SHARED = Architecture(  # "granitemoe" with shared experts
    "granitemoeshared",
    "GraniteMoeSharedForCausalLM",
    _MOE
    | {
        "ffn_gate_shexp": Stem(
            "shared_mlp.input_linear", "s h", ("weight",), Made("2s h", None, ("ffn_up_shexp",), _in_order)
        ),
        "ffn_up_shexp": Stem("shared_mlp.input_linear", "s h", ()),
        "ffn_down_shexp": Stem("shared_mlp.output_linear", "h s"),
    },
    entries=(*GRANITE_MOE.entries, Entry("shared_intermediate_size", SHARED_KEY)),
    permuted=True,
    sizes=_expert_sizes,
    written=False,
)


def _of_version(row: Architecture) -> Architecture:
    """The row with the names of the installed transformers."""
    return row if stacks_experts() else replace(row, stems={**row.stems, **_MOE_4})


def granite_moe(file: Metadata) -> Architecture:
    return _of_version(GRANITE_MOE_SHARED if file.has_key(SHARED_KEY) else GRANITE_MOE)


def _minicpm(file: Metadata) -> dict[str, Any]:
    size = file.number("embedding_length") // file.number("attention.head_count")
    return {"attention_multiplier": size**-0.5, **whole_context(file)}


GRANITE = Architecture("granite", "GraniteForCausalLM", DENSE, entries=_SCALES, permuted=True)
MINICPM = Architecture(  # transformers has its scales in Granite
    "granite",
    "GraniteForCausalLM",
    DENSE,
    entries=tuple(one._replace(default=None) for one in _SCALES[1:]),
    permuted=True,
    configure=_minicpm,
    written=False,
)


def _hybrid(file: Metadata) -> dict[str, Any]:
    """Blocks without heads of keys have Mamba 2 instead of attention."""
    heads = file.per_block("attention.head_count_kv")
    inner, hidden = file.number("ssm.inner_size"), file.number("embedding_length")
    if inner % hidden:
        raise file.error(f"ssm.inner_size {inner} is not a multiple of embedding_length {hidden}")
    return {
        **mamba2(file),
        "mamba_expand": inner // hidden,
        "layer_types": ["attention" if count else "mamba" for count in heads],
        "position_embedding_type": "rope" if file.number("rope.scaling.finetuned", False, bool) else "nope",
        "shared_intermediate_size": file.number(SHARED_KEY if file.has_key(SHARED_KEY) else "feed_forward_length"),
    }


def _hybrid_sizes(config: Mapping[str, Any], block: int) -> dict[str, int]:
    return mamba2_sizes(config, block) | _expert_sizes(config, block)


_SHARED = {
    "ffn_gate": Stem("shared_mlp.input_linear", "s h", ("weight",), Made("2s h", None, ("ffn_up",), _in_order)),
    "ffn_up": Stem("shared_mlp.input_linear", "s h", ()),
    "ffn_down": Stem("shared_mlp.output_linear", "h s"),
}
GRANITE_HYBRID = Architecture(
    "granitemoehybrid",
    "GraniteMoeHybridForCausalLM",
    {**GRANITE_MOE_SHARED.stems, **MAMBA2, **_SHARED},
    entries=(
        *_SCALES,
        Entry("num_local_experts", "expert_count", default=0, least=0),
        Entry("num_experts_per_tok", "expert_used_count", default=0, least=0),
    ),
    permuted=True,
    present={},
    arrays=("attention.head_count_kv",),
    configure=_hybrid,
    sizes=_hybrid_sizes,
    written=False,
)


def granite_hybrid(file: Metadata) -> Architecture:
    return _of_version(GRANITE_HYBRID)

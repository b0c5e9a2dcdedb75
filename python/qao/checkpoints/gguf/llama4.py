"""Llama 4 in GGUF files: transposed stacks of experts."""

from __future__ import annotations

from collections.abc import Mapping
from typing import Any

from torch import Tensor

from .rows import ATTENTION, COUNTS, MLP, Architecture, Entry, Made, Metadata, Sizes, Stem, gate_up


def _llama4(file: Metadata) -> dict[str, Any]:
    """Sizes of the experts and of dense blocks. Chunks and temperatures of attention are constants of llama.cpp."""
    return {
        "intermediate_size": file.number("expert_feed_forward_length"),
        "intermediate_size_mlp": file.number("feed_forward_length"),
        "use_qk_norm": file.number("expert_count") != 128,
    }


def _llama4_sizes(config: Mapping[str, Any], block: int) -> dict[str, int]:
    x = config["intermediate_size"]
    return {"x": x, "2x": 2 * x, "f": config["intermediate_size_mlp"]}


def _transposed(sizes: Sizes, weight: Tensor) -> Tensor:
    return weight.transpose(1, 2)


def _transposed_gate_up(sizes: Sizes, gate: Tensor, up: Tensor) -> Tensor:
    return gate_up(sizes, gate, up).transpose(1, 2)


LLAMA4 = Architecture(
    "llama4_text",
    "Llama4ForCausalLM",
    ATTENTION
    | {
        "ffn_norm": MLP["ffn_norm"],
        "ffn_gate": Stem("feed_forward.gate_proj", "f h"),
        "ffn_up": Stem("feed_forward.up_proj", "f h"),
        "ffn_down": Stem("feed_forward.down_proj", "h f"),
        "ffn_gate_inp": Stem("feed_forward.router", "e h"),
        "ffn_gate_exps": Stem(
            "feed_forward.experts",
            "e x h",
            ("gate_up_proj",),
            Made("e h 2x", _transposed_gate_up, ("ffn_up_exps",)),
        ),
        "ffn_up_exps": Stem("feed_forward.experts", "e x h", ()),
        "ffn_down_exps": Stem("feed_forward.experts", "e h x", ("down_proj",), Made("e x h", _transposed)),
        "ffn_gate_shexp": Stem("feed_forward.shared_expert.gate_proj", "x h"),
        "ffn_up_shexp": Stem("feed_forward.shared_expert.up_proj", "x h"),
        "ffn_down_shexp": Stem("feed_forward.shared_expert.down_proj", "h x"),
    },
    entries=(
        Entry("num_local_experts", "expert_count"),
        *COUNTS,
        Entry("interleave_moe_layer_step", "interleave_moe_layer_step"),
    ),
    fixed={
        **{"attention_chunk_size": 8192, "floor_scale": 8192, "attn_scale": 0.1, "attn_temperature_tuning": True},
        "no_rope_layer_interval": 4,
    },
    present={},
    configure=_llama4,
    sizes=_llama4_sizes,
    high_frequency=(4.0, 1.0),
    written=False,
)

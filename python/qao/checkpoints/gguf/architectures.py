"""Architectures of llama.cpp in terms of transformers: tensor names and shapes, metadata keys, config.json.

The source is llama.cpp's conversion of these models (gguf-py/gguf/tensor_mapping.py, convert_hf_to_gguf.py) and its
graphs (src/models). Mistral's and Mixtral's models have the architecture "llama" there.
"""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass, field
from typing import Any, NamedTuple


class Stem(NamedTuple):
    """A tensor of a block.

    ``shape``: symbols of its dimensions, see ``Model.sizes``. "e": the file stacks experts, each of which is a module
    with its number for ``{}``; or, without ``{}``, transformers stacks their transposes and interleaves gate and up.
    """

    module: str
    shape: str
    names: tuple[str, ...] = ("weight", "bias")  # in transformers of the file's tensors with these endings


class Entry(NamedTuple):
    """A number of config.json and its key in the metadata, behind "<architecture>."."""

    name: str
    key: str
    kind: type[int] | type[float] = int
    default: Any = None  # of an absent key; None: the key is required
    optional: bool = False  # left out of config.json if the key is absent


_BIASED = {"attention_bias": "attn_q.bias"}


@dataclass(frozen=True)
class Architecture:
    model_type: str
    cls: str
    stems: Mapping[str, Stem]
    epsilon: str = "rms_norm_eps"
    entries: tuple[Entry, ...] = ()
    fixed: Mapping[str, Any] = field(default_factory=dict)  # entries of config.json that no file holds
    permuted: bool = False  # llama.cpp interleaves the halves of rotary pairs in rows of q and k
    norm_offset: float = 0.0  # added to the weights of norms in the file
    present: Mapping[str, str] = field(default_factory=lambda: _BIASED)  # entries that say whether block 0 has a tensor
    yarn: Mapping[str, Any] = field(default_factory=dict)  # parameters of YaRN that no file holds
    partial_rotary: bool = False  # whether a head may be rotated in part


_ATTENTION = {
    "attn_norm": Stem("input_layernorm", "h"),
    "attn_q": Stem("self_attn.q_proj", "q h"),
    "attn_k": Stem("self_attn.k_proj", "k h"),
    "attn_v": Stem("self_attn.v_proj", "k h"),
    "attn_output": Stem("self_attn.o_proj", "h q"),
}
_MLP = {
    "ffn_norm": Stem("post_attention_layernorm", "h"),
    "ffn_gate": Stem("mlp.gate_proj", "f h"),
    "ffn_up": Stem("mlp.up_proj", "f h"),
    "ffn_down": Stem("mlp.down_proj", "h f"),
}
_DENSE = _ATTENTION | _MLP
_QK_NORMS = {"attn_q_norm": Stem("self_attn.q_norm", "d"), "attn_k_norm": Stem("self_attn.k_norm", "d")}
_WIDE_QK_NORMS = {"attn_q_norm": Stem("self_attn.q_norm", "q"), "attn_k_norm": Stem("self_attn.k_norm", "k")}
_SANDWICH = {  # Gemma: norms before and after each half
    "post_attention_norm": Stem("post_attention_layernorm", "h"),
    "ffn_norm": Stem("pre_feedforward_layernorm", "h"),
    "post_ffw_norm": Stem("post_feedforward_layernorm", "h"),
}
_FUSED_MLP = {"ffn_up": Stem("mlp.gate_up_proj", "2f h"), "ffn_down": Stem("mlp.down_proj", "h f")}


def _without(stems: Mapping[str, Stem], *names: str) -> dict[str, Stem]:
    return {name: stem for name, stem in stems.items() if name not in names}


def _experts(router: str, gate: str, up: str, down: str) -> dict[str, Stem]:
    return {
        "ffn_gate_inp": Stem(router, "e h"),
        "ffn_gate_exps": Stem(gate, "e x h"),
        "ffn_up_exps": Stem(up, "e x h"),
        "ffn_down_exps": Stem(down, "e h x"),
    }


_EXPERTS = _experts("mlp.gate", "mlp.experts.{}.gate_proj", "mlp.experts.{}.up_proj", "mlp.experts.{}.down_proj")
_SHARED_EXPERT = {
    "ffn_gate_inp_shexp": Stem("mlp.shared_expert_gate", "1 h"),
    "ffn_gate_shexp": Stem("mlp.shared_expert.gate_proj", "s h"),
    "ffn_up_shexp": Stem("mlp.shared_expert.up_proj", "s h"),
    "ffn_down_shexp": Stem("mlp.shared_expert.down_proj", "h s"),
}
_COUNTS = (Entry("num_experts_per_tok", "expert_used_count"),)
_MOE = (Entry("num_experts", "expert_count"), Entry("moe_intermediate_size", "expert_feed_forward_length"), *_COUNTS)
_SOFTCAPS = (
    Entry("attn_logit_softcapping", "attn_logit_softcapping", float, 50.0),
    Entry("final_logit_softcapping", "final_logit_softcapping", float, 30.0),
)
_WINDOW = Entry("sliding_window", "attention.sliding_window")

LLAMA = Architecture(
    "llama",
    "LlamaForCausalLM",
    _DENSE,
    permuted=True,
    present={**_BIASED, "mlp_bias": "ffn_up.bias"},
)
MIXTRAL = Architecture(  # "llama" with experts
    "mixtral",
    "MixtralForCausalLM",
    _ATTENTION
    | {"ffn_norm": _MLP["ffn_norm"]}
    | _experts(
        "block_sparse_moe.gate",
        *(f"block_sparse_moe.experts.{{}}.{one}" for one in ("w1", "w3", "w2")),
    ),
    entries=(Entry("num_local_experts", "expert_count"), *_COUNTS),
    fixed={"sliding_window": None},
    present={},
    permuted=True,
)

ARCHITECTURES: dict[str, Architecture] = {
    "llama": LLAMA,
    "qwen2": Architecture("qwen2", "Qwen2ForCausalLM", _DENSE, present={}),  # q, k and v always have biases
    "qwen2moe": Architecture(
        "qwen2_moe",
        "Qwen2MoeForCausalLM",
        _ATTENTION | {"ffn_norm": _MLP["ffn_norm"]} | _EXPERTS | _SHARED_EXPERT,
        entries=(*_MOE, Entry("shared_expert_intermediate_size", "expert_shared_feed_forward_length")),
        fixed={"norm_topk_prob": False, "decoder_sparse_step": 1, "mlp_only_layers": []},
        present={},
    ),
    "qwen3": Architecture("qwen3", "Qwen3ForCausalLM", _DENSE | _QK_NORMS),
    "qwen3moe": Architecture(
        "qwen3_moe",
        "Qwen3MoeForCausalLM",
        _ATTENTION | _QK_NORMS | {"ffn_norm": _MLP["ffn_norm"]} | _EXPERTS,
        entries=_MOE,
        fixed={"norm_topk_prob": True, "decoder_sparse_step": 1, "mlp_only_layers": []},
    ),
    "gemma": Architecture("gemma", "GemmaForCausalLM", _DENSE, norm_offset=1.0),
    "gemma2": Architecture(
        "gemma2",
        "Gemma2ForCausalLM",
        _DENSE | _SANDWICH,
        entries=(*_SOFTCAPS, _WINDOW),
        norm_offset=1.0,
    ),
    "gemma3": Architecture(
        "gemma3_text",
        "Gemma3ForCausalLM",
        _DENSE | _SANDWICH | _QK_NORMS,
        entries=(_WINDOW,),
        fixed={"rope_local_base_freq": 10000.0},
        norm_offset=1.0,
    ),
    "phi3": Architecture(
        "phi3",
        "Phi3ForCausalLM",
        {
            "attn_norm": _ATTENTION["attn_norm"],
            "attn_qkv": Stem("self_attn.qkv_proj", "q+2k h"),
            "attn_output": _ATTENTION["attn_output"],
            "ffn_norm": _MLP["ffn_norm"],
            **_FUSED_MLP,
        },
        entries=(
            Entry("sliding_window", "attention.sliding_window", optional=True),
            Entry("original_max_position_embeddings", "rope.scaling.original_context_length", optional=True),
        ),
        partial_rotary=True,
    ),
    "glm4": Architecture(
        "glm4",
        "Glm4ForCausalLM",
        _ATTENTION
        | _FUSED_MLP
        | {
            "post_attention_norm": Stem("post_self_attn_layernorm", "h"),
            "ffn_norm": Stem("post_attention_layernorm", "h"),
            "post_ffw_norm": Stem("post_mlp_layernorm", "h"),
        },
        partial_rotary=True,
    ),
    "gpt-oss": Architecture(
        "gpt_oss",
        "GptOssForCausalLM",
        _ATTENTION
        | {
            "attn_sinks": Stem("self_attn", "n", ("sinks",)),
            "post_attention_norm": Stem("post_attention_layernorm", "h"),
            "ffn_gate_inp": Stem("mlp.router", "e h"),
            "ffn_gate_exps": Stem("mlp.experts", "e x h", ("gate_up_proj", "gate_up_proj_bias")),
            "ffn_up_exps": Stem("mlp.experts", "e x h", ()),  # read with ffn_gate_exps
            "ffn_down_exps": Stem("mlp.experts", "e h x", ("down_proj", "down_proj_bias")),
        },
        entries=(Entry("num_local_experts", "expert_count"), *_COUNTS, _WINDOW),
        yarn={"beta_fast": 32.0, "beta_slow": 1.0, "truncate": False},
    ),
    "granite": Architecture(
        "granite",
        "GraniteForCausalLM",
        _DENSE,
        entries=(
            Entry("attention_multiplier", "attention.scale", float),
            Entry("embedding_multiplier", "embedding_scale", float, 1.0),
            Entry("residual_multiplier", "residual_scale", float, 1.0),
            Entry("logits_scaling", "logit_scale", float, 1.0),
        ),
        permuted=True,
    ),
    "olmo2": Architecture(
        "olmo2",
        "Olmo2ForCausalLM",
        _without(_DENSE | _WIDE_QK_NORMS | _SANDWICH, "attn_norm", "ffn_norm"),
    ),
    "olmoe": Architecture(
        "olmoe",
        "OlmoeForCausalLM",
        _ATTENTION | _WIDE_QK_NORMS | {"ffn_norm": _MLP["ffn_norm"]} | _EXPERTS,
        entries=(Entry("num_experts", "expert_count"), *_COUNTS),
        fixed={"norm_topk_prob": False},
    ),
    "command-r": Architecture(
        "cohere",
        "CohereForCausalLM",
        _without(_DENSE, "ffn_norm")
        | {"attn_q_norm": Stem("self_attn.q_norm", "n d"), "attn_k_norm": Stem("self_attn.k_norm", "m d")},
        present={**_BIASED, "use_qk_norm": "attn_q_norm.weight"},
        epsilon="layer_norm_eps",
        entries=(Entry("logit_scale", "logit_scale", float),),
    ),
    "cohere2": Architecture(
        "cohere2",
        "Cohere2ForCausalLM",
        _without(_DENSE, "ffn_norm"),
        epsilon="layer_norm_eps",
        entries=(Entry("logit_scale", "logit_scale", float), _WINDOW),
    ),
    "smollm3": Architecture(
        "smollm3", "SmolLM3ForCausalLM", _DENSE, fixed={"use_sliding_window": False}, permuted=True
    ),
    "starcoder2": Architecture(
        "starcoder2",
        "Starcoder2ForCausalLM",
        _ATTENTION
        | {
            "ffn_norm": _MLP["ffn_norm"],
            "ffn_up": Stem("mlp.c_fc", "f h"),
            "ffn_down": Stem("mlp.c_proj", "h f"),
        },
        epsilon="norm_epsilon",
        fixed={"use_bias": True, "sliding_window": None},
    ),
    "seed_oss": Architecture(
        "seed_oss",
        "SeedOssForCausalLM",
        _without(_DENSE, "ffn_norm") | {"post_attention_norm": Stem("post_attention_layernorm", "h")},
        present={**_BIASED, "attention_out_bias": "attn_output.bias", "mlp_bias": "ffn_up.bias"},
    ),
}
TOP = {
    "token_embd": Stem("model.embed_tokens", "v h"),
    "output_norm": Stem("model.norm", "h"),
    "output": Stem("lm_head", "v h"),
}

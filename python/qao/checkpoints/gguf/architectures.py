"""Architectures of llama.cpp in terms of transformers: tensor names and shapes, metadata keys, config.json.

The source is llama.cpp's conversion of these models (gguf-py/gguf/tensor_mapping.py, convert_hf_to_gguf.py) and its
graphs (src/models). Mistral's and Mixtral's models have the architecture "llama" there.
"""

from __future__ import annotations

from collections.abc import Callable, Mapping
from dataclasses import replace
from typing import Any

from .deepseek import DEEPSEEK_V2, DEEPSEEK_V3, MINICPM3, is_sigmoid
from .delta_net import QWEN3_NEXT, QWEN35, QWEN35_MOE
from .gemma4 import GEMMA4
from .granite import GRANITE, GRANITE_HYBRID, GRANITE_MOE, GRANITE_MOE_SHARED, MINICPM, granite_hybrid, granite_moe
from .llama4 import LLAMA4
from .mamba import FALCON_H1
from .more import MORE
from .nemotron_h import NEMOTRON_H, NEMOTRON_H_MOE
from .older import FALCON_40B, OLDER
from .rows import (
    ATTENTION,
    BIASED,
    CORRECTION,
    COUNTS,
    DENSE,
    EXPERTS,
    FUSED_MLP,
    GROUPS,
    MAY_SLIDE,
    MLP,
    MOE,
    NORM,
    QK_NORMS,
    ROUTED,
    SANDWICH,
    SHARED_EXPERT,
    SHARED_EXPERTS,
    SHARED_SIZE,
    SIGMOID,
    SOFTCAPS,
    SPARSE_EXPERTS,
    WIDE_QK_NORMS,
    WINDOW,
    Architecture,
    Entry,
    Metadata,
    Stem,
    expert_stems,
    without,
)

LLAMA = Architecture(
    "llama",
    "LlamaForCausalLM",
    DENSE,
    permuted=True,
    present={**BIASED, "mlp_bias": "ffn_up.bias"},
)


def _temperature(file: Metadata) -> dict[str, Any]:
    """Ministral 3 scales queries by their position."""
    scale = file.number("rope.scaling.yarn_log_multiplier", kind=float, least=0)
    temperature = file.number("attention.temperature_scale", kind=float, least=0)
    return {"rope_scaling": {"mscale": 1.0, "mscale_all_dim": scale, "llama_4_scaling_beta": temperature}}


def _temperature_keys(config: Any) -> dict[str, Any]:
    rope = getattr(config, "rope_parameters", None) or config.rope_scaling
    scale, temperature = rope["mscale_all_dim"], rope["llama_4_scaling_beta"]
    return {"rope.scaling.yarn_log_multiplier": float(scale), "attention.temperature_scale": float(temperature)}


MINISTRAL3 = Architecture(  # "mistral3" with a temperature; without one, it is Mistral
    "ministral3",
    "Ministral3ForCausalLM",
    DENSE,
    permuted=True,
    present={},
    configure=_temperature,
    keys=_temperature_keys,
)
MIXTRAL = Architecture(  # "llama" with experts
    "mixtral",
    "MixtralForCausalLM",
    ATTENTION | {"ffn_norm": MLP["ffn_norm"]} | SPARSE_EXPERTS,
    entries=(Entry("num_local_experts", "expert_count"), *COUNTS),
    fixed={"sliding_window": None},
    present={},
    permuted=True,
)


def _without_sections(file: Metadata) -> dict[str, Any]:
    if file.has_key("rope.dimension_sections"):
        raise file.error("the language model of GLM-4V, with another order of rows, is not supported")
    return {}


def _windows(file: Metadata) -> dict[str, Any]:
    """Three blocks of four have a sliding window, unless the file says which do."""
    sliding = [(block + 1) % 4 != 0 for block in range(file.blocks)]
    if file.has_key("attention.sliding_window_pattern"):
        sliding = file.per_block("attention.sliding_window_pattern")
    return {"layer_types": ["sliding_attention" if one else "full_attention" for one in sliding]}


def _exaone4(file: Metadata) -> dict[str, Any]:
    if file.has_key("attention.sliding_window"):
        return _windows(file)
    return {"sliding_window": None, "layer_types": ["full_attention"] * file.blocks}


_POST_NORMS = without(DENSE | SANDWICH, "attn_norm", "ffn_norm")
OLMO2 = Architecture("olmo2", "Olmo2ForCausalLM", _POST_NORMS | WIDE_QK_NORMS)
OLMO3 = Architecture(  # "olmo2" with sliding windows
    "olmo3",
    "Olmo3ForCausalLM",
    _POST_NORMS | WIDE_QK_NORMS,
    entries=(WINDOW,),
    configure=_windows,
    local_theta=500000.0,
    patterned=True,
)


def _convolutions(file: Metadata) -> dict[str, Any]:
    """LFM2: blocks without heads of keys have a convolution instead of attention."""
    heads = file.per_block("attention.head_count_kv")
    return {"layer_types": ["full_attention" if count else "conv" for count in heads]}


def _lfm2_sizes(config: Mapping[str, Any], block: int) -> dict[str, int]:
    return {"3h": 3 * config["hidden_size"], "c": config["conv_L_cache"]}


def _convolution_keys(config: Any) -> dict[str, Any]:
    attention = [one == "full_attention" for one in config.layer_types]
    return {"attention.head_count_kv": [config.num_key_value_heads if one else 0 for one in attention]}


def _hunyuan_keys(config: Any) -> dict[str, Any]:
    """llama.cpp has one number of each for all blocks, and one shared expert."""
    size = config.intermediate_size
    sizes = {"expert_shared_feed_forward_length": size, "expert_feed_forward_length": size}
    return {**sizes, "expert_shared_count": 1, "expert_used_count": config.moe_topk}


def _ernie_keys(config: Any) -> dict[str, Any]:
    shared = config.moe_num_shared_experts
    return {"expert_shared_feed_forward_length": config.moe_intermediate_size * shared} if shared else {}


_LFM2 = {
    "attn_norm": Stem("operator_norm", "h"),
    **{name: ATTENTION[name] for name in ("attn_q", "attn_k", "attn_v")},
    "attn_output": Stem("self_attn.out_proj", "h q"),
    "attn_q_norm": Stem("self_attn.q_layernorm", "d"),
    "attn_k_norm": Stem("self_attn.k_layernorm", "d"),
    "shortconv.in_proj": Stem("conv.in_proj", "3h h"),
    "shortconv.conv": Stem("conv.conv", "h 1 c"),
    "shortconv.out_proj": Stem("conv.out_proj", "h h"),
    "ffn_norm": Stem("ffn_norm", "h"),
    "ffn_gate": Stem("feed_forward.w1", "f h"),
    "ffn_up": Stem("feed_forward.w3", "f h"),
    "ffn_down": Stem("feed_forward.w2", "h f"),
}
_LFM2_TOP = {
    "token_embd_norm": Stem("model.embedding_norm", "h"),  # llama.cpp's name of the last norm
    "output_norm": Stem("model.embedding_norm", "h"),
}
_HUNYUAN = {
    "attn_q_norm": Stem("self_attn.query_layernorm", "d"),
    "attn_k_norm": Stem("self_attn.key_layernorm", "d"),
}
_CACHE = Entry("conv_L_cache", "shortconv.l_cache")
_ERNIE_BIAS = {"use_bias": "attn_q.bias"}


QWEN2 = Architecture("qwen2", "Qwen2ForCausalLM", DENSE, present={})  # q, k and v always have biases
QWEN3 = Architecture("qwen3", "Qwen3ForCausalLM", DENSE | QK_NORMS)
QWEN3_MOE = Architecture(
    "qwen3_moe",
    "Qwen3MoeForCausalLM",
    ATTENTION | QK_NORMS | {"ffn_norm": MLP["ffn_norm"]} | EXPERTS,
    entries=MOE,
    fixed={"norm_topk_prob": True, "decoder_sparse_step": 1, "mlp_only_layers": []},
)
# Rows for files of one architecture that are different models of transformers.
VARIANTS: dict[str, Callable[[Metadata], Architecture]] = {
    "llama": lambda file: MIXTRAL if file.has_key("expert_count") else LLAMA,
    "mistral3": lambda file: MINISTRAL3 if file.has_key("attention.temperature_scale") else LLAMA,
    "granitemoe": granite_moe,
    "granitehybrid": granite_hybrid,
    "olmo2": lambda file: OLMO3 if file.has_key(WINDOW.key) else OLMO2,
    "falcon": lambda file: FALCON_40B if file.has_tensor("blk.0.attn_norm_2.weight") else OLDER["falcon"],
    "deepseek2": lambda file: DEEPSEEK_V3 if is_sigmoid(file) else DEEPSEEK_V2,
}
ARCHITECTURES: dict[str, Architecture] = {
    **MORE,
    **OLDER,
    "internlm2": replace(LLAMA, written=False),
    "xverse": replace(LLAMA, written=False),
    "exaone": replace(LLAMA, permuted=False, written=False),
    "minicpm": MINICPM,
    "minicpm3": MINICPM3,
    "qwen2vl": replace(QWEN2, written=False),  # the language models of Qwen-VL, which read text as these do
    "qwen3vl": replace(QWEN3, written=False),
    "qwen3vlmoe": replace(QWEN3_MOE, written=False),
    "llama": LLAMA,
    "mistral3": MINISTRAL3,
    "deepseek2": DEEPSEEK_V3,
    "glm4moe": Architecture(
        "glm4_moe",
        "Glm4MoeForCausalLM",
        without(ATTENTION | QK_NORMS | MLP | EXPERTS | SHARED_EXPERTS | CORRECTION, "ffn_norm")
        | {"post_attention_norm": Stem("post_attention_layernorm", "h")},
        entries=(*ROUTED, *GROUPS, NORM),
        fixed={"num_nextn_predict_layers": 0},
        present={**BIASED, "use_qk_norm": "attn_q_norm.weight"},
        partial_rotary=True,
        constants=SIGMOID,
    ),
    "dots1": Architecture(
        "dots1",
        "Dots1ForCausalLM",
        ATTENTION | QK_NORMS | MLP | EXPERTS | SHARED_EXPERTS | CORRECTION,
        entries=(*ROUTED, *GROUPS, NORM),
        fixed={"sliding_window": None},
        constants=SIGMOID,
    ),
    "qwen2": QWEN2,
    "qwen2moe": Architecture(
        "qwen2_moe",
        "Qwen2MoeForCausalLM",
        ATTENTION | {"ffn_norm": MLP["ffn_norm"]} | EXPERTS | SHARED_EXPERT,
        entries=(*MOE, SHARED_SIZE),
        fixed={"norm_topk_prob": False, "decoder_sparse_step": 1, "mlp_only_layers": []},
        present={},
    ),
    "qwen3": QWEN3,
    "qwen3moe": QWEN3_MOE,
    "qwen3next": QWEN3_NEXT,
    "qwen35": QWEN35,
    "qwen35moe": QWEN35_MOE,
    "gemma": Architecture("gemma", "GemmaForCausalLM", DENSE, norm_offset=1.0),
    "gemma2": Architecture(
        "gemma2",
        "Gemma2ForCausalLM",
        DENSE | SANDWICH,
        entries=(*SOFTCAPS, WINDOW),
        norm_offset=1.0,
    ),
    "gemma3": Architecture(
        "gemma3_text",
        "Gemma3ForCausalLM",
        DENSE | SANDWICH | QK_NORMS,
        entries=(WINDOW,),
        fixed={"rope_local_base_freq": 10000.0},
        norm_offset=1.0,
    ),
    "gemma4": GEMMA4,
    "phi3": Architecture(
        "phi3",
        "Phi3ForCausalLM",
        {
            "attn_norm": ATTENTION["attn_norm"],
            "attn_qkv": Stem("self_attn.qkv_proj", "q+2k h"),
            "attn_output": ATTENTION["attn_output"],
            "ffn_norm": MLP["ffn_norm"],
            **FUSED_MLP,
        },
        entries=(
            MAY_SLIDE,
            Entry("original_max_position_embeddings", "rope.scaling.original_context_length", optional=True),
        ),
        partial_rotary=True,
    ),
    "glm4": Architecture(
        "glm4",
        "Glm4ForCausalLM",
        ATTENTION
        | FUSED_MLP
        | {
            "post_attention_norm": Stem("post_self_attn_layernorm", "h"),
            "ffn_norm": Stem("post_attention_layernorm", "h"),
            "post_ffw_norm": Stem("post_mlp_layernorm", "h"),
        },
        partial_rotary=True,
        configure=_without_sections,
    ),
    "gpt-oss": Architecture(
        "gpt_oss",
        "GptOssForCausalLM",
        ATTENTION
        | {
            "attn_sinks": Stem("self_attn", "n", ("sinks",)),
            "post_attention_norm": Stem("post_attention_layernorm", "h"),
            "ffn_gate_inp": Stem("mlp.router", "e h"),
            "ffn_gate_exps": Stem("mlp.experts", "e x h", ("gate_up_proj", "gate_up_proj_bias")),
            "ffn_up_exps": Stem("mlp.experts", "e x h", ()),  # read with ffn_gate_exps
            "ffn_down_exps": Stem("mlp.experts", "e h x", ("down_proj", "down_proj_bias")),
        },
        entries=(Entry("num_local_experts", "expert_count"), *COUNTS, WINDOW),
        yarn={"beta_fast": 32.0, "beta_slow": 1.0, "truncate": False},
        written=False,
    ),
    "granite": GRANITE,
    "granitemoe": GRANITE_MOE,
    "granitehybrid": GRANITE_HYBRID,
    "falcon-h1": FALCON_H1,
    "nemotron_h": NEMOTRON_H,
    "nemotron_h_moe": NEMOTRON_H_MOE,
    "olmo": Architecture(
        "olmo",
        "OlmoForCausalLM",
        without(DENSE, "attn_norm", "ffn_norm"),
        epsilon="layer_norm_eps",
        layer_norm=True,
        entries=(Entry("clip_qkv", "attention.clamp_kqv", float, optional=True),),
        permuted=True,
    ),
    "olmo2": OLMO2,
    "olmoe": Architecture(
        "olmoe",
        "OlmoeForCausalLM",
        ATTENTION | WIDE_QK_NORMS | {"ffn_norm": MLP["ffn_norm"]} | EXPERTS,
        entries=(Entry("num_experts", "expert_count"), *COUNTS),
        fixed={"norm_topk_prob": False},
    ),
    "command-r": Architecture(
        "cohere",
        "CohereForCausalLM",
        without(DENSE, "ffn_norm")
        | {"attn_q_norm": Stem("self_attn.q_norm", "n d"), "attn_k_norm": Stem("self_attn.k_norm", "m d")},
        present={**BIASED, "use_qk_norm": "attn_q_norm.weight"},
        epsilon="layer_norm_eps",
        layer_norm=True,
        entries=(Entry("logit_scale", "logit_scale", float),),
    ),
    "cohere2": Architecture(
        "cohere2",
        "Cohere2ForCausalLM",
        without(DENSE, "ffn_norm"),
        epsilon="layer_norm_eps",
        layer_norm=True,
        entries=(Entry("logit_scale", "logit_scale", float), WINDOW),
    ),
    "smollm3": Architecture("smollm3", "SmolLM3ForCausalLM", DENSE, fixed={"use_sliding_window": False}, permuted=True),
    "starcoder2": Architecture(
        "starcoder2",
        "Starcoder2ForCausalLM",
        ATTENTION
        | {
            "ffn_norm": MLP["ffn_norm"],
            "ffn_up": Stem("mlp.c_fc", "f h"),
            "ffn_down": Stem("mlp.c_proj", "h f"),
        },
        epsilon="norm_epsilon",
        layer_norm=True,
        norm_bias=True,
        fixed={"use_bias": True, "sliding_window": None},
    ),
    "seed_oss": Architecture(
        "seed_oss",
        "SeedOssForCausalLM",
        without(DENSE, "ffn_norm") | {"post_attention_norm": Stem("post_attention_layernorm", "h")},
        present={**BIASED, "attention_out_bias": "attn_output.bias", "mlp_bias": "ffn_up.bias"},
    ),
    "llama4": LLAMA4,
    "ernie4_5": Architecture("ernie4_5", "Ernie4_5ForCausalLM", DENSE, present=_ERNIE_BIAS),
    "ernie4_5-moe": Architecture(
        "ernie4_5_moe",
        "Ernie4_5_MoeForCausalLM",
        DENSE
        | EXPERTS
        | SHARED_EXPERTS
        | {"exp_probs_b": Stem("mlp.moe_statics", "1 e", ("", "e_score_correction_bias"))},
        entries=(
            Entry("moe_num_experts", "expert_count"),
            Entry("moe_k", "expert_used_count"),
            Entry("moe_intermediate_size", "expert_feed_forward_length"),
            Entry("moe_num_shared_experts", "expert_shared_count", default=0, least=0),
            Entry("moe_layer_start_index", "leading_dense_block_count", default=0, least=0),
            Entry("moe_layer_interval", "interleave_moe_layer_step"),
        ),
        fixed={"moe_layer_end_index": -1},
        present=_ERNIE_BIAS,
        keys=_ernie_keys,
    ),
    "exaone4": Architecture(
        "exaone4",
        "Exaone4ForCausalLM",
        _POST_NORMS | QK_NORMS,
        entries=(MAY_SLIDE,),
        present={},
        configure=_exaone4,
        patterned=True,
    ),
    "hunyuan-dense": Architecture("hunyuan_v1_dense", "HunYuanDenseV1ForCausalLM", DENSE | _HUNYUAN),
    "hunyuan-moe": Architecture(
        "hunyuan_v1_moe",
        "HunYuanMoEV1ForCausalLM",
        ATTENTION
        | _HUNYUAN
        | {"ffn_norm": MLP["ffn_norm"]}
        | expert_stems("mlp.gate.wg", *(f"mlp.experts.{{}}.{one}_proj" for one in ("gate", "up", "down")))
        | {
            "ffn_gate_shexp": Stem("mlp.shared_mlp.gate_proj", "f h"),
            "ffn_up_shexp": Stem("mlp.shared_mlp.up_proj", "f h"),
            "ffn_down_shexp": Stem("mlp.shared_mlp.down_proj", "h f"),
        },
        entries=(Entry("num_experts", "expert_count"), Entry("moe_topk", "expert_used_count")),
        keys=_hunyuan_keys,
    ),
    "lfm2": Architecture(
        "lfm2",
        "Lfm2ForCausalLM",
        _LFM2,
        epsilon="norm_eps",
        entries=(_CACHE,),
        fixed={"block_auto_adjust_ff_dim": False},
        present={"conv_bias": "shortconv.in_proj.bias"},
        arrays=("attention.head_count_kv",),
        top=_LFM2_TOP,
        configure=_convolutions,
        sizes=_lfm2_sizes,
        keys=_convolution_keys,
    ),
    "lfm2moe": Architecture(
        "lfm2_moe",
        "Lfm2MoeForCausalLM",
        _LFM2
        | expert_stems("feed_forward.gate", *(f"feed_forward.experts.{{}}.{one}" for one in ("w1", "w3", "w2")))
        | {"exp_probs_b": Stem("feed_forward", "e", ("", "expert_bias"))},
        epsilon="norm_eps",
        entries=(
            *MOE,
            Entry("num_dense_layers", "leading_dense_block_count", default=0, least=0),
            Entry("routed_scaling_factor", "expert_weights_scale", float, 1.0),
            _CACHE,
        ),
        fixed={"norm_topk_prob": True, "use_expert_bias": True},
        present={"conv_bias": "shortconv.in_proj.bias"},
        constants=SIGMOID,
        arrays=("attention.head_count_kv",),
        top=_LFM2_TOP,
        configure=_convolutions,
        sizes=_lfm2_sizes,
        keys=_convolution_keys,
    ),
    "nemotron": Architecture(
        "nemotron",
        "NemotronForCausalLM",
        without(DENSE, "ffn_gate"),
        epsilon="norm_eps",
        layer_norm=True,
        norm_bias=True,
        norm_offset=1.0,
        present={**BIASED, "mlp_bias": "ffn_up.bias"},
        partial_rotary=True,
    ),
    "arcee": Architecture(
        "arcee",
        "ArceeForCausalLM",
        without(DENSE, "ffn_gate"),
        permuted=True,
        present={**BIASED, "mlp_bias": "ffn_up.bias"},
    ),
    "minimax-m2": Architecture(
        "minimax_m2",
        "MiniMaxM2ForCausalLM",
        ATTENTION
        | WIDE_QK_NORMS
        | {"ffn_norm": MLP["ffn_norm"], "exp_probs_b": Stem("block_sparse_moe", "e", ("", "e_score_correction_bias"))}
        | SPARSE_EXPERTS,
        entries=(
            Entry("num_local_experts", "expert_count"),
            *COUNTS,
            Entry("rotary_dim", "rope.dimension_count"),
        ),
        present={},
        partial_rotary=True,
        constants=SIGMOID,
        keys=lambda config: {"expert_feed_forward_length": config.intermediate_size},
    ),
}
TOP = {
    "token_embd": Stem("model.embed_tokens", "v h"),
    "output_norm": Stem("model.norm", "h"),
    "output": Stem("lm_head", "v h"),
}
# Every row, by the type of the model in transformers, with its name in llama.cpp.
ROWS: dict[str, tuple[str, Architecture]] = {about.model_type: (arch, about) for arch, about in ARCHITECTURES.items()}
ROWS |= {"mixtral": ("llama", MIXTRAL), "deepseek_v2": ("deepseek2", DEEPSEEK_V2), "olmo3": ("olmo2", OLMO3)}
ROWS |= {"granitemoeshared": ("granitemoe", GRANITE_MOE_SHARED)}

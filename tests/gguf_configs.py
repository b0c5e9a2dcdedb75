"""Small models of each architecture of GGUF files: configurations for the tests."""

from __future__ import annotations

from typing import Any

HIDDEN, HEADS, KV_HEADS, HEAD, FFN, VOCAB, EXPERTS = 64, 4, 2, 16, 96, 40, 4
SIZES = {
    "vocab_size": VOCAB,
    "hidden_size": HIDDEN,
    "intermediate_size": FFN,
    "num_hidden_layers": 4,
    "num_attention_heads": HEADS,
    "num_key_value_heads": KV_HEADS,
    "head_dim": HEAD,
    "max_position_embeddings": 128,
    "initializer_range": 0.1,
    "rope_theta": 5000.0,
    "bos_token_id": 1,
    "eos_token_id": 2,
    "pad_token_id": None,
    "tie_word_embeddings": False,
}
ROUTED = {"num_experts": EXPERTS, "num_experts_per_tok": 2}
MOE = {**ROUTED, "moe_intermediate_size": 32}
GRANITE = {"attention_multiplier": 0.2, "embedding_multiplier": 3.0, "residual_multiplier": 0.5, "logits_scaling": 4.0}
YARN = {"rope_type": "yarn", "factor": 2.0, "original_max_position_embeddings": 64}
MINISTRAL = {
    **{"rope_type": "yarn", "factor": 4.0, "original_max_position_embeddings": 8, "beta_fast": 32.0, "beta_slow": 1.0},
    **{"mscale": 1.0, "mscale_all_dim": 1.0, "llama_4_scaling_beta": 0.3},
}
LOCAL = {
    "full_attention": {**YARN, "rope_theta": 5000.0},
    "sliding_attention": {"rope_type": "default", "rope_theta": 3000.0},
}
GEMMA3 = {"tie_word_embeddings": True, "sliding_window": 8, "query_pre_attn_scalar": HEAD, "num_hidden_layers": 7}
LONG = {"type": "longrope", "short_factor": [1.5] * 8, "long_factor": [3.0] * 8}
PHIMOE = {"num_local_experts": EXPERTS, "num_experts_per_tok": 2, "attention_bias": True, "lm_head_bias": True}
PHIMOE_ROPE = {
    **{"rope_type": "longrope", "short_factor": [1.5] * 8, "long_factor": [3.0] * 8},
    **{"short_mscale": 1.243163121016122, "long_mscale": 1.243163121016122, "original_max_position_embeddings": 64},
}
FOURTH = ["sliding_attention"] * 3 + ["full_attention"]
TRINITY = {
    **{"num_dense_layers": 1, "num_shared_experts": 2, "route_scale": 2.5, "mup_enabled": True, "sliding_window": 8}
}
K_EXAONE = {
    **{"first_k_dense_replace": 1, "num_shared_experts": 1, "routed_scaling_factor": 2.5, "norm_topk_prob": True},
    **{"mlp_layer_types": ["dense"] + ["sparse"] * 3, "sliding_window": 8, "n_group": 1, "topk_group": 1},
}
MAMBA = {
    **{"mamba_n_heads": 6, "mamba_n_groups": 2, "mamba_d_state": 16, "mamba_d_conv": 4, "mamba_conv_bias": True},
    "mamba_norm_before_gate": False,
}
FACTORS = {
    **{"lm_head_multiplier": 0.5, "embedding_multiplier": 2.0, "key_multiplier": 0.8, "ssm_in_multiplier": 1.5},
    **{"attention_in_multiplier": 0.9, "attention_out_multiplier": 1.1, "ssm_out_multiplier": 0.7},
    **{"mlp_multipliers": [0.6, 1.2], "ssm_multipliers": [0.5, 0.75, 1.25, 1.5, 2.0]},
}
NEMOTRON_H = {
    **{"mamba_num_heads": 8, "mamba_head_dim": 16, "n_groups": 2, "ssm_state_size": 16, "conv_kernel": 4},
    **{"rope_theta": 10000.0, "num_hidden_layers": 4},
}
NEMOTRON_3 = {
    **{"n_routed_experts": 8, "num_experts_per_tok": 2, "moe_intermediate_size": 32, "n_shared_experts": 1},
    **{"moe_shared_expert_intermediate_size": 64, "routed_scaling_factor": 2.5, "n_group": 2, "topk_group": 1},
    "hybrid_override_pattern": "ME*E",
}
GRANITE4 = {
    **{"mamba_n_heads": 8, "mamba_d_head": 16, "mamba_expand": 2, "shared_intermediate_size": 48},
    **{"layer_types": ["mamba", "attention"] * 2, "position_embedding_type": "rope"},
}
WHOLE = {"short_factor": [1.5] * 8, "long_factor": [3.0] * 8, "original_max_position_embeddings": 128}
FOUR = {"rope_type": "longrope", "short_factor": [1.5] * 4, "long_factor": [3.0] * 4}
EVERY_HEAD = {"num_key_value_heads": HEADS}
FALCON = {"head_dim": ..., "intermediate_size": 4 * HIDDEN, "rope_theta": 10000.0}
DEEPSEEK = {
    **{"n_routed_experts": 8, "num_experts_per_tok": 3, "moe_intermediate_size": 32, "n_shared_experts": 2},
    **{"first_k_dense_replace": 1, "routed_scaling_factor": 2.5, "n_group": 4, "topk_group": 2},
}
MLA = {
    **{"num_key_value_heads": HEADS, "head_dim": 8, "kv_lora_rank": 32, "q_lora_rank": 64},
    **{"qk_rope_head_dim": 8, "qk_nope_head_dim": 32, "v_head_dim": 16},
}
MSCALE = {**YARN, "beta_fast": 16.0, "beta_slow": 2.0, "mscale": 0.7, "mscale_all_dim": 0.7}
LITE = {"q_lora_rank": None, "n_group": 1, "topk_group": 1, "num_hidden_layers": 27}
LINEAR = {
    **{"linear_num_key_heads": 2, "linear_num_value_heads": 4, "linear_key_head_dim": 32, "linear_value_head_dim": 32},
    **{"partial_rotary_factor": 0.5, "head_dim": 32, "full_attention_interval": 3},
}
GEMMA4 = {
    **{"tie_word_embeddings": True, "sliding_window": 8, "global_head_dim": 32, "final_logit_softcapping": 20.0},
    **{"layer_types": ["sliding_attention", "full_attention"] * 2, "hidden_size_per_layer_input": 0},
    **{"num_key_value_heads": 2, "num_global_key_value_heads": 1, "attention_k_eq_v": True},
    "rope_parameters": {
        "sliding_attention": {"rope_type": "default", "rope_theta": 3000.0},
        "full_attention": {"rope_type": "proportional", "partial_rotary_factor": 0.25, "rope_theta": 50000.0},
    },
}
PER_LAYER = {
    **{"hidden_size_per_layer_input": 32, "vocab_size_per_layer_input": VOCAB, "num_kv_shared_layers": 2},
    **{"use_double_wide_mlp": True, "attention_k_eq_v": False, "num_global_key_value_heads": None},
}
LLAMA3 = {
    **{"rope_type": "llama3", "factor": 8.0, "low_freq_factor": 1.0, "high_freq_factor": 4.0},
    "original_max_position_embeddings": 8192,
}
LLAMA4 = {
    **{"num_local_experts": EXPERTS, "num_experts_per_tok": 1, "interleave_moe_layer_step": 2},
    **{"intermediate_size": 48, "intermediate_size_mlp": FFN},
}
ERNIE = {
    **{"moe_num_experts": EXPERTS, "moe_k": 2, "moe_intermediate_size": 24, "moe_num_shared_experts": 2},
    **{"moe_layer_start_index": 1, "moe_layer_interval": 1},
}
LFM2 = {
    **{"layer_types": ["conv", "full_attention", "conv", "full_attention"], "conv_L_cache": 3, "norm_eps": 1e-5},
    **{"block_auto_adjust_ff_dim": False, "num_attention_heads": HEADS},
}
# Model type of transformers: architecture of llama.cpp, changes of config.json.
MODELS: dict[str, tuple[str, dict[str, Any]]] = {
    "llama yarn": ("llama", {"rope_scaling": YARN}),
    "ministral3": ("mistral3", {"rope_scaling": MINISTRAL}),
    "mixtral": ("llama", {"num_local_experts": EXPERTS, "num_experts_per_tok": 2}),
    "qwen2_moe": ("qwen2moe", {**MOE, "shared_expert_intermediate_size": 48}),
    "qwen3_moe": ("qwen3moe", {**MOE, "norm_topk_prob": True}),
    "gemma": ("gemma", {"tie_word_embeddings": True}),
    "gemma2": ("gemma2", {"tie_word_embeddings": True, "sliding_window": 8, "query_pre_attn_scalar": HEAD}),
    "gemma3_text": ("gemma3", GEMMA3),
    "gemma3_text linear": ("gemma3", {**GEMMA3, "rope_scaling": {"rope_type": "linear", "factor": 8.0}}),
    "gemma4_text": ("gemma4", GEMMA4),
    "gemma4_text per layer": ("gemma4", {**GEMMA4, **PER_LAYER}),
    "gemma4_text experts": ("gemma4", {**GEMMA4, "enable_moe_block": True, **MOE, "top_k_experts": 2}),
    "phi3": ("phi3", {}),
    "phi3 longrope": ("phi3", {"rope_scaling": LONG, "original_max_position_embeddings": 64}),
    "glm4": ("glm4", {"attention_bias": True, "partial_rotary_factor": 0.5}),
    "gpt_oss": ("gpt-oss", {"num_local_experts": EXPERTS, "num_experts_per_tok": 2, "sliding_window": 8}),
    "granite": ("granite", GRANITE),
    "olmo2": ("olmo2", {}),
    "olmoe": ("olmoe", {**ROUTED, "norm_topk_prob": False, "intermediate_size": 32}),
    "cohere": ("command-r", {"tie_word_embeddings": True, "logit_scale": 0.5, "use_qk_norm": True}),
    "cohere2": ("cohere2", {"tie_word_embeddings": True, "logit_scale": 0.5, "sliding_window": 8}),
    "smollm3": ("smollm3", {"use_sliding_window": False}),
    "starcoder2": ("starcoder2", {"use_bias": True, "sliding_window": None}),
    "seed_oss": ("seed_oss", {"attention_bias": True}),
    "deepseek_v2": ("deepseek2", {**DEEPSEEK, **MLA, **LITE, "rope_scaling": MSCALE}),
    "deepseek_v2 groups": ("deepseek2", {**DEEPSEEK, **MLA, "topk_method": "group_limited_greedy"}),
    "deepseek_v3": ("deepseek2", {**DEEPSEEK, **MLA, "rope_scaling": {**MSCALE, "mscale": 1.0, "mscale_all_dim": 1.0}}),
    "qwen3_next": ("qwen3next", {**LINEAR, **MOE, "shared_expert_intermediate_size": 64}),
    "qwen3_5_text": ("qwen35", {**LINEAR, "linear_num_value_heads": 6}),
    "qwen3_5_moe_text": ("qwen35moe", {**LINEAR, **MOE, "shared_expert_intermediate_size": 48}),
    "glm4_moe": ("glm4moe", {**DEEPSEEK, "attention_bias": True, "use_qk_norm": True, "norm_topk_prob": True}),
    "llama4_text": ("llama4", {**LLAMA4, "rope_scaling": {**LLAMA3, "factor": 16.0, "high_freq_factor": 1.0}}),
    "granitemoe": ("granitemoe", {**GRANITE, "num_local_experts": EXPERTS, "num_experts_per_tok": 2}),
    "granitemoeshared": (
        "granitemoe",
        {**GRANITE, "num_local_experts": EXPERTS, "num_experts_per_tok": 2, "shared_intermediate_size": 48},
    ),
    "olmo": ("olmo", {"clip_qkv": 0.4}),
    "olmo3": ("olmo2", {"sliding_window": 8, "rope_scaling": YARN, "rope_theta": 500000.0}),
    "olmo3 thetas": (
        "olmo2",
        {"sliding_window": 8, "rope_parameters": {"full_attention": {**YARN, "rope_theta": 5000.0}, **LOCAL}},
    ),
    "ernie4_5": ("ernie4_5", {}),
    "ernie4_5_moe": ("ernie4_5-moe", ERNIE),
    "exaone4": ("exaone4", {"sliding_window": None, "rope_scaling": LLAMA3, "layer_types": ["full_attention"] * 4}),
    "exaone4 windows": ("exaone4", {"sliding_window": 8, "num_hidden_layers": 64}),
    "hunyuan_v1_dense": ("hunyuan-dense", {}),
    "hunyuan_v1_moe": ("hunyuan-moe", {"num_experts": EXPERTS, "moe_topk": 2}),
    "lfm2": ("lfm2", LFM2),
    "lfm2_moe": (
        "lfm2moe",
        {**LFM2, "tie_word_embeddings": True, **MOE, "num_dense_layers": 1, "norm_topk_prob": True},
    ),
    "nemotron": ("nemotron", {"partial_rotary_factor": 0.5}),
    "arcee": ("arcee", {}),
    "minimax_m2": ("minimax-m2", {"num_local_experts": EXPERTS, "num_experts_per_tok": 2, "rotary_dim": 8}),
    "dots1": ("dots1", {**DEEPSEEK, "norm_topk_prob": True, "sliding_window": None}),
}
# Of architectures that share a model of transformers with others, or have rows in other places.
MODELS |= {
    "glm4_moe bailing": (
        "bailingmoe2",
        {**DEEPSEEK, "use_qk_norm": True, "norm_topk_prob": True, "partial_rotary_factor": 0.5},
    ),
    "phimoe": ("phimoe", PHIMOE),
    "phimoe longrope": ("phimoe", {**PHIMOE, "rope_scaling": PHIMOE_ROPE}),
    "apertus": ("apertus", {"rope_scaling": LLAMA3}),
    "afmoe": ("afmoe", {**MOE, **TRINITY, "layer_types": FOURTH}),
    "exaone_moe": ("exaone-moe", {**MOE, **K_EXAONE, "layer_types": FOURTH}),
    "glm": ("chatglm", {"attention_bias": True, "partial_rotary_factor": 0.5}),
    "falcon_h1": ("falcon-h1", {**MAMBA, "mamba_d_ssm": 96, "mamba_d_head": 16}),
    "falcon_h1 norm": (
        "falcon-h1",
        {**MAMBA, **FACTORS, "mamba_d_ssm": 96, "mamba_d_head": 16, "mamba_rms_norm": True},
    ),
    "granitemoehybrid": (
        "granitehybrid",
        {**GRANITE, **MAMBA, **GRANITE4, "num_local_experts": EXPERTS, "num_experts_per_tok": 2},
    ),
    "granitemoehybrid dense": (
        "granitehybrid",
        {**GRANITE, **MAMBA, **GRANITE4, "num_local_experts": 0, "shared_intermediate_size": FFN},
    ),
    "nemotron_h": ("nemotron_h", {**NEMOTRON_H, "hybrid_override_pattern": "M-*M"}),
    "nemotron_h experts": ("nemotron_h_moe", {**NEMOTRON_H, **NEMOTRON_3}),
    "nemotron_h latent": ("nemotron_h_moe", {**NEMOTRON_H, **NEMOTRON_3, "moe_latent_size": 32}),
    "llama internlm2": ("internlm2", {}),
    "llama exaone": ("exaone", {"rope_scaling": LLAMA3}),
    "llama xverse": ("xverse", {}),
    "granite minicpm": ("minicpm", {**GRANITE, "attention_multiplier": HEAD**-0.5}),
    "granite minicpm4": (
        "minicpm",
        {**GRANITE, "attention_multiplier": HEAD**-0.5, "rope_scaling": {**WHOLE, "rope_type": "longrope"}},
    ),
    "minicpm3": (
        "minicpm3",
        {
            **MLA,
            "scale_emb": 12,
            "scale_depth": 1.4,
            "dim_model_base": 256,
            "rope_scaling": {**WHOLE, **FOUR, "factor": 1.0},
        },
    ),
    "jais2": ("jais2", {"attention_bias": True, "mlp_bias": True}),
    "qwen2 vl": ("qwen2vl", {}),
    "qwen3 vl": ("qwen3vl", {}),
    "qwen3_moe vl": ("qwen3vlmoe", {**MOE, "norm_topk_prob": True}),
    "stablelm": ("stablelm", {"use_qkv_bias": True, "partial_rotary_factor": 0.5}),
    "stablelm parallel": (
        "stablelm",
        {"use_parallel_residual": True, "qk_layernorm": True, "partial_rotary_factor": 0.5},
    ),
    "phi": ("phi2", {"partial_rotary_factor": 0.5}),
    "gpt_neox": ("gptneox", {**EVERY_HEAD, "rotary_pct": 0.5, "rotary_emb_base": 5000.0}),
    "falcon": ("falcon", {**FALCON, "num_kv_heads": 1, "multi_query": True}),
    "falcon groups": ("falcon", {**FALCON, "num_kv_heads": 2, "new_decoder_architecture": True}),
    "falcon one norm": (
        "falcon",
        {**FALCON, "num_kv_heads": 2, "new_decoder_architecture": True, "num_ln_in_parallel_attn": 1},
    ),
    "gpt2": ("gpt2", {**EVERY_HEAD, "n_inner": FFN, "tie_word_embeddings": True}),
    "gpt_bigcode": ("starcoder", {"n_inner": FFN, "tie_word_embeddings": True, "num_key_value_heads": 1}),
    "bloom": ("bloom", {**EVERY_HEAD, "intermediate_size": 4 * HIDDEN, "tie_word_embeddings": True}),
    "mpt": (
        "mpt",
        {
            **EVERY_HEAD,
            "intermediate_size": 4 * HIDDEN,
            "tie_word_embeddings": True,
            "max_seq_len": 128,
            "attn_config": {"clip_qkv": 0.4},
        },
    ),
}
NOT_WRITTEN = ("gpt-oss", "deepseek2", "qwen3next", "qwen35", "qwen35moe", "gemma4", "llama4", "granitemoe")
NOT_WRITTEN += ("minicpm3", "nemotron_h", "nemotron_h_moe", "falcon-h1", "granitehybrid", "apertus", "falcon", "gpt2")
# Their models are written as files of another architecture.
ALIASES = ("bailingmoe2", "internlm2", "exaone", "xverse", "minicpm", "qwen2vl", "qwen3vl", "qwen3vlmoe")
PERMUTED = ("llama", "mistral3", "granite", "granitemoe", "granitehybrid", "smollm3", "olmo", "arcee")
PERMUTED += ("nemotron_h", "nemotron_h_moe", "internlm2", "xverse", "minicpm")

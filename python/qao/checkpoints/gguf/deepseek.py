"""DeepSeek-V2 and V3 in GGUF files: latent attention and groups of experts. MiniCPM3 has such attention, too."""

from __future__ import annotations

from collections.abc import Mapping
from typing import Any

import torch
from torch import Tensor

from .rows import (
    ATTENTION,
    CORRECTION,
    EXPERTS,
    MLP,
    NORM,
    ROUTED,
    SHARED_EXPERTS,
    Architecture,
    Made,
    Metadata,
    Sizes,
    Stem,
    whole_context,
)


def _kv_b(sizes: Sizes, k: Tensor, v: Tensor) -> Tensor:
    """DeepSeek's heads: keys, which the file transposes, and values."""
    return torch.cat((k.transpose(1, 2), v), 1).flatten(0, 1)


_MLA = {
    "attn_norm": ATTENTION["attn_norm"],
    "attn_q": Stem("self_attn.q_proj", "q h"),
    "attn_q_a": Stem("self_attn.q_a_proj", "l h"),
    "attn_q_a_norm": Stem("self_attn.q_a_layernorm", "l"),
    "attn_q_b": Stem("self_attn.q_b_proj", "q l"),
    "attn_kv_a_mqa": Stem("self_attn.kv_a_proj_with_mqa", "r+p h"),
    "attn_kv_a_norm": Stem("self_attn.kv_a_layernorm", "r"),
    "attn_kv_b": Stem("self_attn.kv_b_proj", "kv r"),  # before 2025
    "attn_k_b": Stem("self_attn.kv_b_proj", "n r nope", ("weight",), Made("kv r", _kv_b, ("attn_v_b",))),
    "attn_v_b": Stem("self_attn.kv_b_proj", "n w r", ()),
    "attn_output": Stem("self_attn.o_proj", "h o"),
}


def _mla_sizes(config: Mapping[str, Any], block: int) -> dict[str, int]:
    n, rope, rank = (config[name] for name in ("num_attention_heads", "qk_rope_head_dim", "kv_lora_rank"))
    nope, v = config["qk_nope_head_dim"], config["v_head_dim"]
    return {
        **{"q": n * (nope + rope), "l": config["q_lora_rank"] or 0, "r": rank, "r+p": rank + rope},
        **{"nope": nope, "w": v, "kv": n * (nope + v), "o": n * v},
    }


def _mla(file: Metadata) -> dict[str, Any]:
    if file.has_key("attention.temperature_scale"):
        raise file.error("attention with a temperature is not supported")
    rope = file.number("rope.dimension_count")
    split = "_mla" if file.has_key("attention.key_length_mla") else ""  # the other keys are of the compressed heads
    size = file.number(f"attention.key_length{split}")
    if size <= rope:
        raise file.error(f"heads of keys have {size} elements, of which {rope} are rotated")
    made = {
        "num_key_value_heads": file.number("attention.head_count"),
        "q_lora_rank": file.number("attention.q_lora_rank") if file.has_tensor("blk.0.attn_q_a.weight") else None,
        "kv_lora_rank": file.number("attention.kv_lora_rank"),
        "qk_rope_head_dim": rope,
        "qk_nope_head_dim": size - rope,
        "v_head_dim": file.number(f"attention.value_length{split}"),
    }
    if file.has_key("rope.scaling.yarn_log_multiplier"):
        scale = round(10 * file.number("rope.scaling.yarn_log_multiplier", kind=float, least=0), 6)
        made["rope_scaling"] = {"mscale": scale, "mscale_all_dim": scale}
    return made


def _groups(file: Metadata, count: int, used: int) -> tuple[int, int]:
    """Groups of experts. Files have had these keys since 2025. ``count``, ``used``: of the large model before that."""
    large = file.number("expert_count") == (160 if used == 3 else 256)
    default = (count, used) if large else (1, 1)
    keys = ("expert_group_count", "expert_group_used_count")
    groups, chosen = (file.number(key, one) for key, one in zip(keys, default, strict=True))
    return groups, chosen


def _deepseek_v2(file: Metadata) -> dict[str, Any]:
    if file.number("expert_weights_norm", False, bool):
        raise file.error("softmax over experts, normalized over the chosen ones, is not supported")
    groups, used = _groups(file, 8, 3)
    method = "group_limited_greedy" if groups > 1 else "greedy"
    return _mla(file) | {"n_group": groups, "topk_group": used, "topk_method": method}


def _deepseek_v3(file: Metadata) -> dict[str, Any]:
    groups, used = _groups(file, 8, 4)
    return _mla(file) | {"n_group": groups, "topk_group": used}


DEEPSEEK_V2 = Architecture(
    "deepseek_v2",
    "DeepseekV2ForCausalLM",
    _MLA | MLP | EXPERTS | SHARED_EXPERTS,
    entries=ROUTED,
    fixed={"norm_topk_prob": False},
    present={},
    head_dim="rope.dimension_count",
    configure=_deepseek_v2,
    sizes=_mla_sizes,
    written=False,
)
DEEPSEEK_V3 = Architecture(  # "deepseek2" with sigmoids of experts: also Kimi K2, Moonlight, GLM-4.7 Flash
    "deepseek_v3",
    "DeepseekV3ForCausalLM",
    _MLA | MLP | EXPERTS | SHARED_EXPERTS | CORRECTION,
    entries=(*ROUTED, NORM),
    fixed={"num_nextn_predict_layers": 0},
    present={},
    head_dim="rope.dimension_count",
    configure=_deepseek_v3,
    sizes=_mla_sizes,
    written=False,
)


def _minicpm3(file: Metadata) -> dict[str, Any]:
    """Scales are constants of llama.cpp, and values have the heads' share of the embedding."""
    rope, size = file.number("rope.dimension_count"), file.number("attention.key_length")
    heads = file.number("attention.head_count")
    if size <= rope:
        raise file.error(f"heads of keys have {size} elements, of which {rope} are rotated")
    return {
        "num_key_value_heads": heads,
        "q_lora_rank": file.number("attention.q_lora_rank") if file.has_tensor("blk.0.attn_q_a.weight") else None,
        "kv_lora_rank": file.number("attention.kv_lora_rank"),
        "qk_rope_head_dim": rope,
        "qk_nope_head_dim": size - rope,
        "v_head_dim": file.number("embedding_length") // heads,
        **whole_context(file),
    }


MINICPM3 = Architecture(
    "minicpm3",
    "MiniCPM3ForCausalLM",
    _MLA | MLP,
    fixed={"scale_emb": 12, "scale_depth": 1.4, "dim_model_base": 256},
    present={},
    head_dim="rope.dimension_count",
    configure=_minicpm3,
    sizes=_mla_sizes,
    written=False,
)


def is_sigmoid(file: Metadata) -> bool:
    """Whether a sigmoid scores experts. Old files do not say so, but only such models correct the scores."""
    dense = file.number("leading_dense_block_count", 0, least=0)
    corrected = file.has_tensor(f"blk.{dense}.exp_probs_b.bias")
    return bool(file.number("expert_gating_func", 1 + corrected) == 2)

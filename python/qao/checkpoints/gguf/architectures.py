"""Architectures of llama.cpp in terms of transformers: tensor names and shapes, metadata keys, config.json.

The source is llama.cpp's conversion of these models (gguf-py/gguf/tensor_mapping.py, convert_hf_to_gguf.py) and its
graphs (src/models). Mistral's and Mixtral's models have the architecture "llama" there.
"""

from __future__ import annotations

from collections.abc import Callable, Mapping
from dataclasses import dataclass, field
from typing import Any, NamedTuple, Protocol

import torch
from torch import Tensor

Sizes = Mapping[str, int]


class Made(NamedTuple):
    """A tensor of transformers that is made from tensors of a block, which are the row's own and ``sources``.

    ``function``: takes the sizes, and the file's tensors in float32. Without it, ``rows`` are the numbers of rows of
    the file's tensors, one after the other, and blocks of quantized ones are kept. ``stacked``: for experts, the rows
    of each are those of the file's tensors, one after the other.
    """

    shape: str
    function: Callable[..., Tensor] | None = None
    sources: tuple[str, ...] = ()
    rows: Callable[[Sizes], Tensor] | None = None
    stacked: bool = False


class Stem(NamedTuple):
    """A tensor of a block.

    ``shape``: symbols of its dimensions, see ``Model.sizes``. "e": the file stacks experts, each of which is a module
    with its number for ``{}``; or, without ``{}``, transformers stacks their transposes and interleaves gate and up.
    """

    module: str
    shape: str
    names: tuple[str, ...] = ("weight", "bias")  # in transformers of these endings; (): read with another tensor
    made: Made | None = None


class Entry(NamedTuple):
    """A number of config.json and its key in the metadata, behind "<architecture>."."""

    name: str
    key: str
    kind: type[int] | type[float] | type[bool] = int
    default: Any = None  # of an absent key; None: the key is required
    optional: bool = False  # left out of config.json if the key is absent
    least: int = 1


class Metadata(Protocol):
    """What a row may ask of a file. Keys are behind "<architecture>."."""

    blocks: int

    def number(self, key: str, default: Any = None, kind: Any = int, least: int = 1) -> Any: ...
    def per_block(self, key: str, default: Any = None) -> list[Any]: ...
    def has_key(self, key: str) -> bool: ...
    def has_tensor(self, name: str) -> bool: ...
    def rows(self, name: str) -> int: ...
    def divisors(self, name: str, rotated: int) -> Tensor: ...
    def error(self, what: str) -> Exception: ...


_BIASED = {"attention_bias": "attn_q.bias"}


@dataclass(frozen=True)
class Architecture:
    model_type: str
    cls: str
    stems: Mapping[str, Stem]
    epsilon: str = "rms_norm_eps"
    layer_norm: bool = False  # or RMSNorm
    norm_bias: bool = False  # whether norms have biases
    entries: tuple[Entry, ...] = ()
    fixed: Mapping[str, Any] = field(default_factory=dict)  # entries of config.json that no file holds
    permuted: bool = False  # llama.cpp interleaves the halves of rotary pairs in rows of q and k
    norm_offset: float = 0.0  # added to the weights of norms in the file
    present: Mapping[str, str] = field(default_factory=lambda: _BIASED)  # entries that say whether block 0 has a tensor
    yarn: Mapping[str, Any] = field(default_factory=dict)  # parameters of YaRN that no file holds
    partial_rotary: bool = False  # whether a head may be rotated in part
    head_dim: str = "attention.key_length"  # key of config.json's head_dim
    rotated: str = "rope.dimension_count"  # key of the rotated part of such a head
    skipped: Callable[[Metadata, int, str], bool] | None = None  # tensors of a block that transformers leaves out
    top: Mapping[str, Stem] = field(default_factory=dict)  # tensors outside of blocks, besides TOP
    arrays: tuple[str, ...] = ()  # keys that may have a number for each block; config.json has the largest
    configure: Callable[[Metadata], dict[str, Any]] | None = None  # more entries of config.json
    sizes: Callable[[Mapping[str, Any], int], dict[str, int]] | None = None  # more symbols, from config.json and block
    constants: Mapping[str, int] = field(default_factory=dict)  # numbers of files that may not differ
    high_frequency: tuple[float, ...] = (4.0,)  # what may be high_freq_factor of Llama 3's rotary embeddings
    local_theta: float | None = None  # rope_theta that transformers gives blocks with a sliding window by default
    patterned: bool = False  # whether files say which blocks have a sliding window
    written: bool = True  # whether the table suffices to write files


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
_SHARED_EXPERTS = {
    "ffn_gate_shexp": Stem("mlp.shared_experts.gate_proj", "s h"),
    "ffn_up_shexp": Stem("mlp.shared_experts.up_proj", "s h"),
    "ffn_down_shexp": Stem("mlp.shared_experts.down_proj", "h s"),
}
_CORRECTION = {"exp_probs_b": Stem("mlp.gate", "e", ("", "e_score_correction_bias"))}
_COUNTS = (Entry("num_experts_per_tok", "expert_used_count"),)
_MOE = (Entry("num_experts", "expert_count"), Entry("moe_intermediate_size", "expert_feed_forward_length"), *_COUNTS)
_ROUTED = (  # DeepSeek's: dense blocks first, shared experts, experts in groups
    Entry("n_routed_experts", "expert_count"),
    Entry("moe_intermediate_size", "expert_feed_forward_length"),
    *_COUNTS,
    Entry("first_k_dense_replace", "leading_dense_block_count", default=0, least=0),
    Entry("n_shared_experts", "expert_shared_count"),
    Entry("routed_scaling_factor", "expert_weights_scale", float, 1.0),
)
_GROUPS = (Entry("n_group", "expert_group_count", default=1), Entry("topk_group", "expert_group_used_count", default=1))
_SIGMOID = {"expert_gating_func": 2}
_NORM = Entry("norm_topk_prob", "expert_weights_norm", bool, False)
_SHARED_KEY = "expert_shared_feed_forward_length"
_SHARED_SIZE = Entry("shared_expert_intermediate_size", _SHARED_KEY)
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


def _temperature(file: Metadata) -> dict[str, Any]:
    """Ministral 3 scales queries by their position."""
    scale = file.number("rope.scaling.yarn_log_multiplier", kind=float, least=0)
    temperature = file.number("attention.temperature_scale", kind=float, least=0)
    return {"rope_scaling": {"mscale": 1.0, "mscale_all_dim": scale, "llama_4_scaling_beta": temperature}}


MINISTRAL3 = Architecture(  # "mistral3" with a temperature; without one, it is Mistral
    "ministral3",
    "Ministral3ForCausalLM",
    _DENSE,
    permuted=True,
    present={},
    configure=_temperature,
    written=False,
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


def _kv_b(sizes: Sizes, k: Tensor, v: Tensor) -> Tensor:
    """DeepSeek's heads: keys, which the file transposes, and values."""
    return torch.cat((k.transpose(1, 2), v), 1).flatten(0, 1)


_MLA = {
    "attn_norm": _ATTENTION["attn_norm"],
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
    _MLA | _MLP | _EXPERTS | _SHARED_EXPERTS,
    entries=_ROUTED,
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
    _MLA | _MLP | _EXPERTS | _SHARED_EXPERTS | _CORRECTION,
    entries=(*_ROUTED, _NORM),
    fixed={"num_nextn_predict_layers": 0},
    present={},
    head_dim="rope.dimension_count",
    configure=_deepseek_v3,
    sizes=_mla_sizes,
    written=False,
)


def _is_sigmoid(file: Metadata) -> bool:
    """Whether a sigmoid scores experts. Old files do not say so, but only such models correct the scores."""
    dense = file.number("leading_dense_block_count", 0, least=0)
    corrected = file.has_tensor(f"blk.{dense}.exp_probs_b.bias")
    return bool(file.number("expert_gating_func", 1 + corrected) == 2)


def _without_sections(file: Metadata) -> dict[str, Any]:
    if file.has_key("rope.dimension_sections"):
        raise file.error("the language model of GLM-4V, with another order of rows, is not supported")
    return {}


def _linear_attention(file: Metadata) -> dict[str, Any]:
    """Gated delta nets, with full attention in some blocks."""
    v, groups, inner = (file.number(f"ssm.{name}") for name in ("time_step_rank", "group_count", "inner_size"))
    if v % groups or inner % v:
        raise file.error(f"{v} heads of values do not fit {groups} groups and {inner} values")
    if file.has_key("attention.recurrent_layers"):
        linear = file.per_block("attention.recurrent_layers")
    else:
        interval = file.number("full_attention_interval", 4)
        linear = [(block + 1) % interval for block in range(file.blocks)]
    return {
        "layer_types": ["linear_attention" if one else "full_attention" for one in linear],
        "linear_conv_kernel_dim": file.number("ssm.conv_kernel"),
        "linear_key_head_dim": file.number("ssm.state_size"),
        "linear_num_key_heads": groups,
        "linear_num_value_heads": v,
        "linear_value_head_dim": inner // v,
    }


def _linear_sizes(config: Mapping[str, Any], block: int) -> dict[str, int]:
    groups, heads = (config[f"linear_num_{one}_heads"] for one in ("key", "value"))
    key, value = (config[f"linear_{one}_head_dim"] for one in ("key", "value"))
    keys, values = groups * key, heads * value
    return {
        **{"groups": groups, "heads": heads, "2heads": 2 * heads, "key": key, "value": value, "values": values},
        **{"qkv": 2 * keys + values, "qkvz": 2 * keys + 2 * values, "c": config["linear_conv_kernel_dim"]},
        "2q": 2 * config["num_attention_heads"] * config["head_dim"],
    }


def _by_group(sizes: Sizes) -> Tensor:
    """Qwen3-Next has queries, keys, values and gates of a group of heads together."""
    keys = sizes["groups"] * sizes["key"]
    parts = torch.arange(sizes["qkvz"], device="cpu").split([keys, keys, sizes["values"], sizes["values"]])
    return torch.cat([part.view(sizes["groups"], -1) for part in parts], 1).flatten()


def _value_heads(sizes: Sizes, size: int = 1) -> Tensor:
    """The file of Qwen3.5 has the first value heads of all groups first, then the second ones, …"""
    rows = torch.arange(sizes["heads"] * size, device="cpu")
    return rows.view(-1, sizes["groups"], size).transpose(0, 1).flatten()


def _values(sizes: Sizes) -> Tensor:
    return _value_heads(sizes, sizes["value"])


def _values_after_keys(sizes: Sizes) -> Tensor:
    keys = sizes["qkv"] - sizes["values"]
    return torch.cat((torch.arange(keys, device="cpu"), keys + _values(sizes)))


def _columns(sizes: Sizes, weight: Tensor) -> Tensor:
    return weight[:, _values(sizes)]


def _decay(sizes: Sizes, a: Tensor) -> Tensor:
    return (-a).log()


def _reordered_decay(sizes: Sizes, a: Tensor) -> Tensor:
    return (-a).log()[_value_heads(sizes)]


_GATED_ATTENTION = {
    **_ATTENTION,
    **_QK_NORMS,
    "attn_q": Stem("self_attn.q_proj", "2q h"),
    "post_attention_norm": Stem("post_attention_layernorm", "h"),
}
_DELTA_NET = {
    "attn_qkv": Stem("linear_attn.in_proj_qkvz", "qkv h", made=Made("qkvz h", None, ("attn_gate",), _by_group)),
    "attn_gate": Stem("linear_attn.in_proj_qkvz", "values h", ()),
    "ssm_in": Stem("linear_attn.in_proj_qkvz", "qkvz h"),  # of the first files
    "ssm_ba": Stem("linear_attn.in_proj_ba", "2heads h"),
    "ssm_conv1d": Stem("linear_attn.conv1d", "qkv 1 c"),
    "ssm_dt": Stem("linear_attn", "heads", ("", "dt_bias")),
    "ssm_a": Stem("linear_attn", "heads", ("A_log",), Made("heads", _decay)),
    "ssm_norm": Stem("linear_attn.norm", "value"),
    "ssm_out": Stem("linear_attn.out_proj", "h values"),
}
_REORDERED_DELTA_NET = {
    "attn_qkv": Stem("linear_attn.in_proj_qkv", "qkv h", made=Made("qkv h", rows=_values_after_keys)),
    "attn_gate": Stem("linear_attn.in_proj_z", "values h", made=Made("values h", rows=_values)),
    "ssm_alpha": Stem("linear_attn.in_proj_a", "heads h", made=Made("heads h", rows=_value_heads)),
    "ssm_beta": Stem("linear_attn.in_proj_b", "heads h", made=Made("heads h", rows=_value_heads)),
    "ssm_conv1d": Stem("linear_attn.conv1d", "qkv 1 c", made=Made("qkv 1 c", rows=_values_after_keys)),
    "ssm_dt": Stem("linear_attn", "heads", ("", "dt_bias"), Made("heads", rows=_value_heads)),
    "ssm_a": Stem("linear_attn", "heads", ("A_log",), Made("heads", _reordered_decay)),
    "ssm_norm": Stem("linear_attn.norm", "value"),
    "ssm_out": Stem("linear_attn.out_proj", "h values", made=Made("h values", _columns)),
}


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


def _same(sizes: Sizes, tensor: Tensor) -> Tensor:
    return tensor


def _gate_up(sizes: Sizes, gate: Tensor, up: Tensor) -> Tensor:
    return torch.cat((gate, up), 1)


_STACKED = Made("e 2x h", _gate_up, ("ffn_up_exps",), stacked=True)
_GEMMA4_MOE = {
    "ffn_gate_inp": Stem("router.proj", "e h"),
    "ffn_gate_inp.scale": Stem("router", "h", ("scale",)),
    "ffn_down_exps.scale": Stem("router", "e", ("per_expert_scale",)),
    "ffn_gate_up_exps": Stem("experts", "e 2x h", ("gate_up_proj",), Made("e 2x h", _same, stacked=True)),
    "ffn_gate_exps": Stem(
        "experts", "e x h", ("gate_up_proj",), Made("e 2x h", _gate_up, ("ffn_up_exps",), stacked=True)
    ),
    "ffn_up_exps": Stem("experts", "e x h", ()),
    "ffn_down_exps": Stem("experts", "e h x", ("down_proj",), Made("e h x", _same, stacked=True)),
    "pre_ffw_norm_2": Stem("pre_feedforward_layernorm_2", "h"),
    "post_ffw_norm_1": Stem("post_feedforward_layernorm_1", "h"),
    "post_ffw_norm_2": Stem("post_feedforward_layernorm_2", "h"),
}


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
    return torch.cat((gate, up), 1).transpose(1, 2)


LLAMA4 = Architecture(
    "llama4_text",
    "Llama4ForCausalLM",
    _ATTENTION
    | {
        "ffn_norm": _MLP["ffn_norm"],
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
        *_COUNTS,
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


_POST_NORMS = _without(_DENSE | _SANDWICH, "attn_norm", "ffn_norm")
OLMO2 = Architecture("olmo2", "Olmo2ForCausalLM", _POST_NORMS | _WIDE_QK_NORMS)
OLMO3 = Architecture(  # "olmo2" with sliding windows
    "olmo3",
    "Olmo3ForCausalLM",
    _POST_NORMS | _WIDE_QK_NORMS,
    entries=(_WINDOW,),
    configure=_windows,
    local_theta=500000.0,
    patterned=True,
)


_GRANITE = (
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


_GRANITE_MOE = {
    **_ATTENTION,
    "ffn_norm": _MLP["ffn_norm"],
    "ffn_gate_inp": Stem("block_sparse_moe.router", "e h"),
    "ffn_gate_exps": Stem("block_sparse_moe.experts", "e x h", ("gate_up_proj",), _STACKED),
    "ffn_up_exps": Stem("block_sparse_moe.experts", "e x h", ()),
    "ffn_down_exps": Stem("block_sparse_moe.experts", "e h x", ("down_proj",), Made("e h x", _same, stacked=True)),
}
GRANITE_MOE = Architecture(
    "granitemoe",
    "GraniteMoeForCausalLM",
    _GRANITE_MOE,
    entries=(*_GRANITE, Entry("num_local_experts", "expert_count"), *_COUNTS),
    permuted=True,
    sizes=_expert_sizes,
    written=False,
)
GRANITE_MOE_SHARED = Architecture(  # "granitemoe" with shared experts
    "granitemoeshared",
    "GraniteMoeSharedForCausalLM",
    _GRANITE_MOE
    | {
        "ffn_gate_shexp": Stem(
            "shared_mlp.input_linear", "s h", ("weight",), Made("2s h", None, ("ffn_up_shexp",), _in_order)
        ),
        "ffn_up_shexp": Stem("shared_mlp.input_linear", "s h", ()),
        "ffn_down_shexp": Stem("shared_mlp.output_linear", "h s"),
    },
    entries=(*GRANITE_MOE.entries, Entry("shared_intermediate_size", _SHARED_KEY)),
    permuted=True,
    sizes=_expert_sizes,
    written=False,
)


def _convolutions(file: Metadata) -> dict[str, Any]:
    """LFM2: blocks without heads of keys have a convolution instead of attention."""
    heads = file.per_block("attention.head_count_kv")
    return {"layer_types": ["full_attention" if count else "conv" for count in heads]}


def _lfm2_sizes(config: Mapping[str, Any], block: int) -> dict[str, int]:
    return {"3h": 3 * config["hidden_size"], "c": config["conv_L_cache"]}


_LFM2 = {
    "attn_norm": Stem("operator_norm", "h"),
    **{name: _ATTENTION[name] for name in ("attn_q", "attn_k", "attn_v")},
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


# Rows for files of one architecture that are different models of transformers.
VARIANTS: dict[str, Callable[[Metadata], Architecture]] = {
    "llama": lambda file: MIXTRAL if file.has_key("expert_count") else LLAMA,
    "mistral3": lambda file: MINISTRAL3 if file.has_key("attention.temperature_scale") else LLAMA,
    "granitemoe": lambda file: GRANITE_MOE_SHARED if file.has_key(_SHARED_KEY) else GRANITE_MOE,
    "olmo2": lambda file: OLMO3 if file.has_key(_WINDOW.key) else OLMO2,
    "deepseek2": lambda file: DEEPSEEK_V3 if _is_sigmoid(file) else DEEPSEEK_V2,
}
ARCHITECTURES: dict[str, Architecture] = {
    "llama": LLAMA,
    "mistral3": MINISTRAL3,
    "deepseek2": DEEPSEEK_V3,
    "glm4moe": Architecture(
        "glm4_moe",
        "Glm4MoeForCausalLM",
        _without(_ATTENTION | _QK_NORMS | _MLP | _EXPERTS | _SHARED_EXPERTS | _CORRECTION, "ffn_norm")
        | {"post_attention_norm": Stem("post_attention_layernorm", "h")},
        entries=(*_ROUTED, *_GROUPS, _NORM),
        fixed={"num_nextn_predict_layers": 0},
        present={**_BIASED, "use_qk_norm": "attn_q_norm.weight"},
        partial_rotary=True,
        constants=_SIGMOID,
    ),
    "dots1": Architecture(
        "dots1",
        "Dots1ForCausalLM",
        _ATTENTION | _QK_NORMS | _MLP | _EXPERTS | _SHARED_EXPERTS | _CORRECTION,
        entries=(*_ROUTED, *_GROUPS, _NORM),
        fixed={"sliding_window": None},
        constants=_SIGMOID,
    ),
    "qwen2": Architecture("qwen2", "Qwen2ForCausalLM", _DENSE, present={}),  # q, k and v always have biases
    "qwen2moe": Architecture(
        "qwen2_moe",
        "Qwen2MoeForCausalLM",
        _ATTENTION | {"ffn_norm": _MLP["ffn_norm"]} | _EXPERTS | _SHARED_EXPERT,
        entries=(*_MOE, _SHARED_SIZE),
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
    "qwen3next": Architecture(
        "qwen3_next",
        "Qwen3NextForCausalLM",
        _GATED_ATTENTION | _DELTA_NET | _EXPERTS | _SHARED_EXPERT,
        entries=(*_MOE, _SHARED_SIZE),
        fixed={"norm_topk_prob": True, "decoder_sparse_step": 1, "mlp_only_layers": []},
        norm_offset=1.0,
        partial_rotary=True,
        configure=_linear_attention,
        sizes=_linear_sizes,
        written=False,
    ),
    "qwen35": Architecture(
        "qwen3_5_text",
        "Qwen3_5ForCausalLM",
        _GATED_ATTENTION | _REORDERED_DELTA_NET | _without(_MLP, "ffn_norm"),
        norm_offset=1.0,
        partial_rotary=True,
        configure=_linear_attention,
        sizes=_linear_sizes,
        written=False,
    ),
    "qwen35moe": Architecture(
        "qwen3_5_moe_text",
        "Qwen3_5MoeForCausalLM",
        _GATED_ATTENTION | _REORDERED_DELTA_NET | _EXPERTS | _SHARED_EXPERT,
        entries=(*_MOE, _SHARED_SIZE),
        norm_offset=1.0,
        partial_rotary=True,
        configure=_linear_attention,
        sizes=_linear_sizes,
        written=False,
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
    "gemma4": Architecture(
        "gemma4_text",
        "Gemma4ForCausalLM",
        _DENSE
        | _SANDWICH
        | _QK_NORMS
        | _GEMMA4_MOE
        | {
            "layer_output_scale": Stem("", "1", ("layer_scalar",)),
            "inp_gate": Stem("per_layer_input_gate", "p h"),
            "proj": Stem("per_layer_projection", "h p"),
            "post_norm": Stem("post_per_layer_input_norm", "h"),
        },
        entries=(
            _WINDOW,
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
        configure=_without_sections,
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
        written=False,
    ),
    "granite": Architecture("granite", "GraniteForCausalLM", _DENSE, entries=_GRANITE, permuted=True),
    "granitemoe": GRANITE_MOE,
    "olmo": Architecture(
        "olmo",
        "OlmoForCausalLM",
        _without(_DENSE, "attn_norm", "ffn_norm"),
        epsilon="layer_norm_eps",
        layer_norm=True,
        entries=(Entry("clip_qkv", "attention.clamp_kqv", float, optional=True),),
        permuted=True,
    ),
    "olmo2": OLMO2,
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
        layer_norm=True,
        entries=(Entry("logit_scale", "logit_scale", float),),
    ),
    "cohere2": Architecture(
        "cohere2",
        "Cohere2ForCausalLM",
        _without(_DENSE, "ffn_norm"),
        epsilon="layer_norm_eps",
        layer_norm=True,
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
        layer_norm=True,
        norm_bias=True,
        fixed={"use_bias": True, "sliding_window": None},
    ),
    "seed_oss": Architecture(
        "seed_oss",
        "SeedOssForCausalLM",
        _without(_DENSE, "ffn_norm") | {"post_attention_norm": Stem("post_attention_layernorm", "h")},
        present={**_BIASED, "attention_out_bias": "attn_output.bias", "mlp_bias": "ffn_up.bias"},
    ),
    "llama4": LLAMA4,
    "ernie4_5": Architecture("ernie4_5", "Ernie4_5ForCausalLM", _DENSE, present=_ERNIE_BIAS),
    "ernie4_5-moe": Architecture(
        "ernie4_5_moe",
        "Ernie4_5_MoeForCausalLM",
        _DENSE
        | _EXPERTS
        | _SHARED_EXPERTS
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
        written=False,
    ),
    "exaone4": Architecture(
        "exaone4",
        "Exaone4ForCausalLM",
        _POST_NORMS | _QK_NORMS,
        entries=(Entry("sliding_window", "attention.sliding_window", optional=True),),
        present={},
        configure=_exaone4,
        patterned=True,
    ),
    "hunyuan-dense": Architecture("hunyuan_v1_dense", "HunYuanDenseV1ForCausalLM", _DENSE | _HUNYUAN),
    "hunyuan-moe": Architecture(
        "hunyuan_v1_moe",
        "HunYuanMoEV1ForCausalLM",
        _ATTENTION
        | _HUNYUAN
        | {"ffn_norm": _MLP["ffn_norm"]}
        | _experts("mlp.gate.wg", *(f"mlp.experts.{{}}.{one}_proj" for one in ("gate", "up", "down")))
        | {
            "ffn_gate_shexp": Stem("mlp.shared_mlp.gate_proj", "f h"),
            "ffn_up_shexp": Stem("mlp.shared_mlp.up_proj", "f h"),
            "ffn_down_shexp": Stem("mlp.shared_mlp.down_proj", "h f"),
        },
        entries=(Entry("num_experts", "expert_count"), Entry("moe_topk", "expert_used_count")),
        written=False,
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
        written=False,
    ),
    "lfm2moe": Architecture(
        "lfm2_moe",
        "Lfm2MoeForCausalLM",
        _LFM2
        | _experts("feed_forward.gate", *(f"feed_forward.experts.{{}}.{one}" for one in ("w1", "w3", "w2")))
        | {"exp_probs_b": Stem("feed_forward", "e", ("", "expert_bias"))},
        epsilon="norm_eps",
        entries=(*_MOE, Entry("num_dense_layers", "leading_dense_block_count", default=0, least=0), _CACHE),
        fixed={"norm_topk_prob": True, "use_expert_bias": True, "routed_scaling_factor": 1.0},
        present={"conv_bias": "shortconv.in_proj.bias"},
        constants=_SIGMOID,
        arrays=("attention.head_count_kv",),
        top=_LFM2_TOP,
        configure=_convolutions,
        sizes=_lfm2_sizes,
        written=False,
    ),
    "nemotron": Architecture(
        "nemotron",
        "NemotronForCausalLM",
        _without(_DENSE, "ffn_gate"),
        epsilon="norm_eps",
        layer_norm=True,
        norm_bias=True,
        norm_offset=1.0,
        present={**_BIASED, "mlp_bias": "ffn_up.bias"},
        partial_rotary=True,
    ),
    "arcee": Architecture(
        "arcee",
        "ArceeForCausalLM",
        _without(_DENSE, "ffn_gate"),
        permuted=True,
        present={**_BIASED, "mlp_bias": "ffn_up.bias"},
    ),
    "minimax-m2": Architecture(
        "minimax_m2",
        "MiniMaxM2ForCausalLM",
        _ATTENTION
        | _WIDE_QK_NORMS
        | {"ffn_norm": _MLP["ffn_norm"], "exp_probs_b": Stem("block_sparse_moe", "e", ("", "e_score_correction_bias"))}
        | _experts(
            "block_sparse_moe.gate",
            *(f"block_sparse_moe.experts.{{}}.{one}" for one in ("w1", "w3", "w2")),
        ),
        entries=(
            Entry("num_local_experts", "expert_count"),
            *_COUNTS,
            Entry("rotary_dim", "rope.dimension_count"),
        ),
        present={},
        partial_rotary=True,
        constants=_SIGMOID,
        written=False,
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

"""Rows of the table of architectures: their types, and tensors and numbers that several share."""

from __future__ import annotations

from collections.abc import Callable, Mapping
from dataclasses import dataclass, field
from functools import cache
from importlib.metadata import PackageNotFoundError, version
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
    ``split``: rows of the tensors of the file with these names, one after the other, each a module of transformers.
    """

    module: str
    shape: str
    names: tuple[str, ...] = ("weight", "bias")  # in transformers of these endings; (): read with another tensor
    made: Made | None = None
    split: tuple[str, ...] = ()


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
    def floats(self, key: str) -> list[float]: ...
    def divisors(self, name: str, rotated: int) -> Tensor: ...
    def error(self, what: str) -> Exception: ...


@cache  # reads the files of an installed package
def stacks_experts() -> bool:
    """Whether models hold all experts of a layer in one tensor, as those of transformers 5 do."""
    try:
        return int(version("transformers").partition(".")[0]) >= 5
    except PackageNotFoundError:
        return True


BIASED = {"attention_bias": "attn_q.bias"}


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
    present: Mapping[str, str] = field(default_factory=lambda: BIASED)  # entries that say whether block 0 has a tensor
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
    keys: Callable[[Any], dict[str, Any]] | None = None  # more numbers of a file that is written, from a configuration
    written: bool = True  # whether the table suffices to write files
    omitted: tuple[str, ...] = ()  # entries that transformers computes from others, and does not take
    layers: str = "model.layers"  # the module of blocks
    computed: Callable[[Metadata], dict[str, Tensor]] | None = None  # tensors of transformers from the metadata


ATTENTION = {
    "attn_norm": Stem("input_layernorm", "h"),
    "attn_q": Stem("self_attn.q_proj", "q h"),
    "attn_k": Stem("self_attn.k_proj", "k h"),
    "attn_v": Stem("self_attn.v_proj", "k h"),
    "attn_output": Stem("self_attn.o_proj", "h q"),
}
FUSED_QKV = {"attn_qkv": Stem("", "q+2k h", split=("attn_q", "attn_k", "attn_v"))}
MLP = {
    "ffn_norm": Stem("post_attention_layernorm", "h"),
    "ffn_gate": Stem("mlp.gate_proj", "f h"),
    "ffn_up": Stem("mlp.up_proj", "f h"),
    "ffn_down": Stem("mlp.down_proj", "h f"),
}
DENSE = ATTENTION | MLP
QK_NORMS = {"attn_q_norm": Stem("self_attn.q_norm", "d"), "attn_k_norm": Stem("self_attn.k_norm", "d")}
WIDE_QK_NORMS = {"attn_q_norm": Stem("self_attn.q_norm", "q"), "attn_k_norm": Stem("self_attn.k_norm", "k")}
SANDWICH = {  # Gemma: norms before and after each half
    "post_attention_norm": Stem("post_attention_layernorm", "h"),
    "ffn_norm": Stem("pre_feedforward_layernorm", "h"),
    "post_ffw_norm": Stem("post_feedforward_layernorm", "h"),
}
FUSED_MLP = {"ffn_up": Stem("mlp.gate_up_proj", "2f h"), "ffn_down": Stem("mlp.down_proj", "h f")}


def without(stems: Mapping[str, Stem], *names: str) -> dict[str, Stem]:
    return {name: stem for name, stem in stems.items() if name not in names}


def expert_stems(router: str, gate: str, up: str, down: str) -> dict[str, Stem]:
    return {
        "ffn_gate_inp": Stem(router, "e h"),
        "ffn_gate_exps": Stem(gate, "e x h"),
        "ffn_up_exps": Stem(up, "e x h"),
        "ffn_down_exps": Stem(down, "e h x"),
    }


EXPERTS = expert_stems("mlp.gate", "mlp.experts.{}.gate_proj", "mlp.experts.{}.up_proj", "mlp.experts.{}.down_proj")
SPARSE_EXPERTS = expert_stems(
    "block_sparse_moe.gate", *(f"block_sparse_moe.experts.{{}}.{one}" for one in ("w1", "w3", "w2"))
)
SHARED_EXPERT = {
    "ffn_gate_inp_shexp": Stem("mlp.shared_expert_gate", "1 h"),
    "ffn_gate_shexp": Stem("mlp.shared_expert.gate_proj", "s h"),
    "ffn_up_shexp": Stem("mlp.shared_expert.up_proj", "s h"),
    "ffn_down_shexp": Stem("mlp.shared_expert.down_proj", "h s"),
}
SHARED_EXPERTS = {
    "ffn_gate_shexp": Stem("mlp.shared_experts.gate_proj", "s h"),
    "ffn_up_shexp": Stem("mlp.shared_experts.up_proj", "s h"),
    "ffn_down_shexp": Stem("mlp.shared_experts.down_proj", "h s"),
}
CORRECTION = {"exp_probs_b": Stem("mlp.gate", "e", ("", "e_score_correction_bias"))}
COUNTS = (Entry("num_experts_per_tok", "expert_used_count"),)
MOE = (Entry("num_experts", "expert_count"), Entry("moe_intermediate_size", "expert_feed_forward_length"), *COUNTS)
ROUTED = (  # DeepSeek's: dense blocks first, shared experts, experts in groups
    Entry("n_routed_experts", "expert_count"),
    Entry("moe_intermediate_size", "expert_feed_forward_length"),
    *COUNTS,
    Entry("first_k_dense_replace", "leading_dense_block_count", default=0, least=0),
    Entry("n_shared_experts", "expert_shared_count"),
    Entry("routed_scaling_factor", "expert_weights_scale", float, 1.0),
)
GROUPS = (Entry("n_group", "expert_group_count", default=1), Entry("topk_group", "expert_group_used_count", default=1))
SIGMOID = {"expert_gating_func": 2}
NORM = Entry("norm_topk_prob", "expert_weights_norm", bool, False)
SHARED_KEY = "expert_shared_feed_forward_length"
SHARED_SIZE = Entry("shared_expert_intermediate_size", SHARED_KEY)
SOFTCAPS = (
    Entry("attn_logit_softcapping", "attn_logit_softcapping", float, 50.0),
    Entry("final_logit_softcapping", "final_logit_softcapping", float, 30.0),
)
WINDOW = Entry("sliding_window", "attention.sliding_window")
MAY_SLIDE = Entry("sliding_window", "attention.sliding_window", optional=True)


def unchanged(sizes: Sizes, tensor: Tensor) -> Tensor:
    return tensor


def gate_up(sizes: Sizes, gate: Tensor, up: Tensor) -> Tensor:
    return torch.cat((gate, up), 1)


STACKED = Made("e 2x h", gate_up, ("ffn_up_exps",), stacked=True)


def whole_context(file: Metadata) -> dict[str, Any]:
    """Parameters of rotary embeddings with factors for long contexts, if the model was trained on its whole context."""
    if not file.has_tensor("rope_factors_long.weight"):
        return {}
    length = file.number("context_length")  # and a factor of 1, which MiniCPM3 needs in transformers 5.17
    return {"rope_scaling": {"rope_type": "longrope", "original_max_position_embeddings": length, "factor": 1.0}}

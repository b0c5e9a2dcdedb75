"""The raw operators, ``torch.ops.qao``, without gradients. `python tools/stubs.py` wrote this file."""

from collections.abc import Sequence

import torch
from torch import Tensor

def add_rms_norm(
    x: Tensor,
    residual: Tensor | None,
    weight: Tensor | None,
    eps: float,
) -> tuple[Tensor, Tensor]: ...
def add_rms_norm_int4_mm(
    x: Tensor,
    residual: Tensor | None,
    norm_weight: Tensor | None,
    weight: Tensor,
    scales: Tensor,
    bias: Tensor | None,
    eps: float,
    out_features: int,
    in_features: int,
    group_size: int,
    gated: bool,
) -> tuple[Tensor, Tensor]: ...
def add_rms_norm_quantize(
    x: Tensor,
    residual: Tensor | None,
    weight: Tensor | None,
    eps: float,
    dtype: torch.dtype,
) -> tuple[Tensor, Tensor, Tensor]: ...
def decode_attention(
    q: Tensor,
    k: Tensor,
    v: Tensor,
    mask: Tensor | None,
    scale: float,
) -> Tensor: ...
def dequantize_gguf(
    weight: Tensor,
    qtype: int,
    dtype: torch.dtype,
) -> Tensor: ...
def dequantize_int4(
    weight: Tensor,
    scales: Tensor,
    out_features: int,
    in_features: int,
    group_size: int,
    dtype: torch.dtype,
) -> Tensor: ...
def expert_sort(
    experts: Tensor,
    num_experts: int,
) -> tuple[Tensor, Tensor, Tensor]: ...
def expert_sum(
    rows: Tensor,
    places: Tensor,
    weights: Tensor,
) -> Tensor: ...
def expert_topk(
    logits: Tensor,
    bias: Tensor | None,
    top_k: int,
    sigmoid: bool,
    normalized: bool,
    factor: float,
    groups: int = 1,
    top_groups: int = 1,
) -> tuple[Tensor, Tensor]: ...
def fp4_grouped_mm(
    x: Tensor,
    weight: Tensor,
    scales: Tensor,
    bias: Tensor | None,
    offsets: Tensor,
    row_index: Tensor | None,
    row_scale: Tensor | None,
    out_features: int = 0,
    in_features: int = 0,
    group_size: int = 0,
    batch_invariant: bool = False,
    gate: Sequence[float] | None = None,
) -> Tensor: ...
def fp4_mm(
    x: Tensor,
    weight: Tensor,
    scales: Tensor,
    bias: Tensor | None,
    out_features: int = 0,
    in_features: int = 0,
    group_size: int = 0,
    batch_invariant: bool = False,
) -> Tensor: ...
def fp8_fp8_grouped_mm(
    x: Tensor,
    weight: Tensor,
    scales: Tensor,
    bias: Tensor | None,
    offsets: Tensor,
    row_index: Tensor | None,
    row_scale: Tensor | None,
    x_scale: Tensor | None = None,
    x_group_size: int = -1,
    fast_accum: bool = False,
    batch_invariant: bool = False,
    gate: Sequence[float] | None = None,
) -> Tensor: ...
def fp8_fp8_mm(
    x: Tensor,
    weight: Tensor,
    scales: Tensor,
    bias: Tensor | None,
    x_scale: Tensor | None = None,
    x_group_size: int = -1,
    fast_accum: bool = False,
    batch_invariant: bool = False,
) -> Tensor: ...
def fp8_grouped_mm(
    x: Tensor,
    weight: Tensor,
    scales: Tensor,
    bias: Tensor | None,
    offsets: Tensor,
    row_index: Tensor | None,
    row_scale: Tensor | None,
    batch_invariant: bool = False,
    gate: Sequence[float] | None = None,
) -> Tensor: ...
def fp8_int4_grouped_mm(
    x: Tensor,
    weight: Tensor,
    scales: Tensor,
    bias: Tensor | None,
    offsets: Tensor,
    row_index: Tensor | None,
    row_scale: Tensor | None,
    row_scales: Tensor | None = None,
    out_features: int = 0,
    in_features: int = 0,
    group_size: int = 0,
    batch_invariant: bool = False,
    fast_accum: bool = False,
    gate: Sequence[float] | None = None,
) -> Tensor: ...
def fp8_int4_mm(
    x: Tensor,
    weight: Tensor,
    scales: Tensor,
    bias: Tensor | None,
    row_scales: Tensor | None = None,
    out_features: int = 0,
    in_features: int = 0,
    group_size: int = 0,
    batch_invariant: bool = False,
    fast_accum: bool = False,
) -> Tensor: ...
def fp8_mm(
    x: Tensor,
    weight: Tensor,
    scales: Tensor,
    bias: Tensor | None,
    batch_invariant: bool = False,
) -> Tensor: ...
def fp8_quantize(
    x: Tensor,
    scale: Tensor | None,
    group_size: int,
) -> tuple[Tensor, Tensor]: ...
def fp8_scaled_mm(
    x: Tensor,
    x_scales: Tensor,
    weight: Tensor,
    scales: Tensor,
    bias: Tensor | None,
    out_dtype: torch.dtype,
    fast_accum: bool,
    batch_invariant: bool = False,
) -> Tensor: ...
def gguf_embedding(
    ids: Tensor,
    weight: Tensor,
    qtype: int,
    dtype: torch.dtype,
) -> Tensor: ...
def gguf_grouped_mm(
    x: Tensor,
    weight: Tensor,
    bias: Tensor | None,
    offsets: Tensor,
    row_index: Tensor | None,
    row_scale: Tensor | None,
    qtype: int,
    batch_invariant: bool = False,
    gate: Sequence[float] | None = None,
) -> Tensor: ...
def gguf_mm(
    x: Tensor,
    weight: Tensor,
    bias: Tensor | None,
    qtype: int,
    batch_invariant: bool = False,
) -> Tensor: ...
def gptq_columns(
    weight: Tensor,
    moved: Tensor,
    scales: Tensor,
    zeros: Tensor | None,
    ratios: Tensor,
    dtype: torch.dtype,
) -> tuple[Tensor, Tensor, Tensor]: ...
def hadamard(
    x: Tensor,
    size: int,
) -> Tensor: ...
def int4_embedding(
    ids: Tensor,
    weight: Tensor,
    scales: Tensor,
    num_embeddings: int,
    embedding_dim: int,
    group_size: int,
    dtype: torch.dtype,
) -> Tensor: ...
def int4_grouped_mm(
    x: Tensor,
    weight: Tensor,
    scales: Tensor,
    bias: Tensor | None,
    offsets: Tensor,
    row_index: Tensor | None,
    row_scale: Tensor | None,
    out_features: int = 0,
    in_features: int = 0,
    group_size: int = 0,
    batch_invariant: bool = False,
    gate: Sequence[float] | None = None,
) -> Tensor: ...
def int4_mm(
    x: Tensor,
    weight: Tensor,
    scales: Tensor,
    bias: Tensor | None,
    out_features: int = 0,
    in_features: int = 0,
    group_size: int = 0,
    batch_invariant: bool = False,
) -> Tensor: ...
def int8_embedding(
    ids: Tensor,
    weight: Tensor,
    scales: Tensor,
    dtype: torch.dtype,
) -> Tensor: ...
def int8_grouped_mm(
    x: Tensor,
    weight: Tensor,
    scales: Tensor,
    bias: Tensor | None,
    offsets: Tensor,
    row_index: Tensor | None,
    row_scale: Tensor | None,
    batch_invariant: bool = False,
    gate: Sequence[float] | None = None,
) -> Tensor: ...
def int8_int4_grouped_mm(
    x: Tensor,
    weight: Tensor,
    scales: Tensor,
    bias: Tensor | None,
    offsets: Tensor,
    row_index: Tensor | None,
    row_scale: Tensor | None,
    weight_sums: Tensor | None = None,
    row_scales: Tensor | None = None,
    out_features: int = 0,
    in_features: int = 0,
    group_size: int = 0,
    batch_invariant: bool = False,
    x_rotation: int = 0,
    gate: Sequence[float] | None = None,
) -> Tensor: ...
def int8_int4_mm(
    x: Tensor,
    weight: Tensor,
    scales: Tensor,
    bias: Tensor | None,
    weight_sums: Tensor | None = None,
    row_scales: Tensor | None = None,
    out_features: int = 0,
    in_features: int = 0,
    group_size: int = 0,
    batch_invariant: bool = False,
    x_rotation: int = 0,
) -> Tensor: ...
def int8_int8_grouped_mm(
    x: Tensor,
    weight: Tensor,
    scales: Tensor,
    bias: Tensor | None,
    offsets: Tensor,
    row_index: Tensor | None,
    row_scale: Tensor | None,
    weight_sums: Tensor | None = None,
    batch_invariant: bool = False,
    x_rotation: int = 0,
    gate: Sequence[float] | None = None,
) -> Tensor: ...
def int8_int8_mm(
    x: Tensor,
    weight: Tensor,
    scales: Tensor,
    bias: Tensor | None,
    weight_sums: Tensor | None = None,
    batch_invariant: bool = False,
    x_rotation: int = 0,
) -> Tensor: ...
def int8_mm(
    x: Tensor,
    weight: Tensor,
    scales: Tensor,
    bias: Tensor | None,
    batch_invariant: bool = False,
) -> Tensor: ...
def int8_quantize(
    x: Tensor,
    symmetric: bool,
    rotation: int = 0,
) -> tuple[Tensor, Tensor, Tensor]: ...
def int8_scaled_mm(
    x: Tensor,
    x_scales: Tensor,
    x_zeros: Tensor | None,
    weight: Tensor,
    scales: Tensor,
    bias: Tensor | None,
    weight_sums: Tensor | None,
    out_dtype: torch.dtype,
    batch_invariant: bool = False,
) -> Tensor: ...
def largest_magnitude(
    weight: Tensor,
) -> Tensor: ...
def load_weight_(
    weight: Tensor,
    q: Tensor,
    scales: Tensor,
    dtype: torch.dtype,
    rows: int,
    columns: int,
    symmetric: bool,
    whole_zeros: bool,
    limit: float,
) -> Tensor: ...
def pack_int4(
    q: Tensor,
    scales: Tensor,
    zeros: Tensor | None,
    group_size: int,
) -> tuple[Tensor, Tensor]: ...
def quantize_blocks(
    weight: Tensor,
    rows: int,
    columns: int,
) -> tuple[Tensor, Tensor, Tensor]: ...
def quantize_fp4(
    weight: Tensor,
    group_size: int,
) -> tuple[Tensor, Tensor, Tensor, Tensor]: ...
def quantize_groups(
    weight: Tensor,
    importance: Tensor | None,
    group_size: int,
    dtype: torch.dtype,
    symmetric: bool,
    scale_dtype: torch.dtype,
    factors: Sequence[float],
    whole_zeros: bool = False,
    rounds: int = 0,
) -> tuple[Tensor, Tensor, Tensor, Tensor]: ...
def quantize_weight_(
    weight: Tensor,
    q: Tensor,
    scales: Tensor,
    fault: Tensor,
    largest: Tensor | None,
    dtype: torch.dtype,
    rows: int,
    columns: int,
    symmetric: bool,
    whole_zeros: bool,
) -> None: ...
def rms_norm_quantize(
    x: Tensor,
    weight: Tensor | None,
    eps: float,
    dtype: torch.dtype,
) -> tuple[Tensor, Tensor]: ...
def silu_mul(
    gate: Tensor,
    up: Tensor,
) -> Tensor: ...
def silu_mul_quantize(
    gate: Tensor,
    up: Tensor,
    dtype: torch.dtype,
) -> tuple[Tensor, Tensor]: ...
def swiglu(
    x: Tensor,
    alpha: float,
    limit: float,
    shift: float,
    interleaved: bool,
) -> Tensor: ...
def swiglu_quantize(
    x: Tensor,
    alpha: float,
    limit: float,
    shift: float,
    interleaved: bool,
    dtype: torch.dtype,
) -> tuple[Tensor, Tensor]: ...
def unpack_int4(
    weight: Tensor,
    scales: Tensor,
    out_features: int,
    in_features: int,
    group_size: int,
) -> tuple[Tensor, Tensor, Tensor]: ...

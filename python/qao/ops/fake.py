"""Fake kernels: shape, dtype, stride and device of every operator's result, for tracing and meta."""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any

import torch
from torch import Tensor

from .autograd import DENSE
from .fake_kernel import fake_kernel
from .gguf import columns_of
from .merged_mm import MERGED
from .packed_shape import TILE_BYTES, TILE_K, TILE_N


def _like_x(x: Tensor, last: int | torch.SymInt, dtype: torch.dtype | None = None) -> Tensor:
    # torch.empty costs half of x.new_empty under tracing, and a compilation runs this five times per layer.
    return torch.empty((*x.shape[:-1], last), dtype=dtype or x.dtype, device=x.device)


def _groups(k: int, group_size: int) -> int:
    return 1 if group_size <= 0 else (k + group_size - 1) // group_size  # the operator itself rejects invalid sizes


def _register_product(name: str) -> None:
    """Fake kernel of a GEMM, by its schema: y [..., N], or [S, N] and with a gate [S, N / 2] if it is grouped."""
    arguments = getattr(torch.ops.qao, name).default._schema.arguments
    places = {argument.name: place for place, argument in enumerate(arguments)}
    packed, grouped = "out_features" in places, "offsets" in places

    @fake_kernel(name)
    def _(*given: Any) -> Tensor:
        def argument(name: str) -> Any:  # trailing defaults may be left out
            return given[places[name]] if name in places and places[name] < len(given) else None

        x, n = given[0], argument("out_features")
        if n is None or n == 0:  # inferred from the weight
            n = argument("weight").shape[1 if grouped else 0] * (TILE_N if packed else 1)
        if not grouped:
            return _like_x(x, n, argument("out_dtype"))
        rows, gate = argument("row_index"), argument("gate")
        count = (x if rows is None else rows).shape[0]
        return torch.empty((count, n if gate is None else n // 2), dtype=x.dtype, device=x.device)


for _dense in DENSE:
    _word = _dense._schema.name.removeprefix("qao::").removesuffix("_mm")
    _register_product(f"{_word}_mm")
    _register_product(f"{_word}_grouped_mm")
for _word in ("int8_scaled_mm", "fp8_scaled_mm", "gguf_mm", "gguf_grouped_mm"):
    _register_product(_word)


def _register_merged(operator: Any) -> None:
    """Fake kernel of GEMMs of several weights: one result per weight."""
    names = [argument.name for argument in operator._schema.arguments]
    rows = names.index("out_features") if "out_features" in names else None

    @fake_kernel(operator._schema.name.removeprefix("qao::"))
    def _(*given: Any) -> list[Tensor]:
        x, weights = given[:2]
        if rows is not None and len(given) > rows and given[rows]:
            return [_like_x(x, n) for n in given[rows]]
        return [_like_x(x, weight.shape[0] * (1 if rows is None else TILE_N)) for weight in weights]


for _merged in MERGED.values():
    _register_merged(_merged)


@fake_kernel("_merged_add_rms_norm_int4_mm")
def _(
    x: Tensor,
    residual: Tensor | None,
    norm_weight: Tensor | None,
    weight: list[Tensor],
    scales: list[Tensor],
    bias: list[Tensor | None],
    eps: float,
    out_features: Sequence[int] = (),
    in_features: int = 0,
    group_size: int = 0,
    gated: bool = False,
) -> list[Tensor]:
    sizes = out_features or [each.shape[0] * TILE_N for each in weight]
    return [*(_like_x(x, n) for n in sizes[: 1 if gated else None]), _like_x(x, x.shape[-1])]


@fake_kernel("decode_attention")
def _(q: Tensor, k: Tensor, v: Tensor, mask: Tensor | None, scale: float) -> Tensor:
    batch, heads, queries, _ = q.shape
    return torch.empty((batch, queries, heads, v.shape[-1]), dtype=q.dtype, device=q.device)


@fake_kernel("_key_range")
def _(mask: Tensor) -> Tensor:
    return mask.new_empty((mask.shape[0], 4), dtype=torch.int32)


@fake_kernel("_token_attention")
def _(q: Tensor, *rest: Any) -> Tensor:
    batch, heads, _, size = q.shape
    return torch.empty((batch, 1, heads, size), dtype=q.dtype, device=q.device)


@fake_kernel("add_rms_norm_int4_mm")
def _(
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
) -> tuple[Tensor, Tensor]:
    n = out_features or weight.shape[0] * TILE_N
    return _like_x(x, n // 2 if gated else n), _like_x(x, x.shape[-1])


@fake_kernel("expert_sort")
def _(experts: Tensor, num_experts: int) -> tuple[Tensor, Tensor, Tensor]:
    tokens, top_k = experts.shape
    sizes = (num_experts,), (tokens * top_k,), (tokens, top_k)
    offsets, row_index, places = (torch.empty(s, dtype=torch.int32, device=experts.device) for s in sizes)
    return offsets, row_index, places


@fake_kernel("expert_topk")
def _(logits: Tensor, bias: Tensor | None, top_k: int, *rest: Any) -> tuple[Tensor, Tensor]:
    shape = logits.shape[0], top_k
    return logits.new_empty(shape, dtype=torch.int64), logits.new_empty(shape, dtype=torch.float32)


@fake_kernel("expert_sum")
def _(rows: Tensor, places: Tensor, weights: Tensor) -> Tensor:
    return torch.empty((places.shape[0], rows.shape[1]), dtype=rows.dtype, device=rows.device)


@fake_kernel("int8_quantize")
def _(x: Tensor, symmetric: bool, rotation: int = 0) -> tuple[Tensor, Tensor, Tensor]:
    return _like_x(x, x.shape[-1], torch.int8), _like_x(x, 1, torch.float32), _like_x(x, 1, torch.int32)


@fake_kernel("hadamard")
def _(x: Tensor, size: int) -> Tensor:
    return _like_x(x, x.shape[-1])


@fake_kernel("fp8_quantize")
def _(x: Tensor, scale: Tensor | None, group_size: int) -> tuple[Tensor, Tensor]:
    q = _like_x(x, x.shape[-1], torch.float8_e4m3fn)
    if group_size == 0:
        return q, x.new_empty(1, dtype=torch.float32) if scale is None else torch.empty_like(scale)
    return q, _like_x(x, _groups(x.shape[-1], group_size), torch.float32)


@fake_kernel("add_rms_norm")
def _(x: Tensor, residual: Tensor | None, weight: Tensor | None, eps: float) -> tuple[Tensor, Tensor]:
    return _like_x(x, x.shape[-1]), _like_x(x, x.shape[-1])


@fake_kernel("silu_mul")
def _(gate: Tensor, up: Tensor) -> Tensor:
    return _like_x(gate, gate.shape[-1])


@fake_kernel("rms_norm_quantize")
def _(x: Tensor, weight: Tensor | None, eps: float, dtype: torch.dtype) -> tuple[Tensor, Tensor]:
    return _like_x(x, x.shape[-1], dtype), _like_x(x, 1, torch.float32)


@fake_kernel("add_rms_norm_quantize")
def _(
    x: Tensor, residual: Tensor | None, weight: Tensor | None, eps: float, dtype: torch.dtype
) -> tuple[Tensor, Tensor, Tensor]:
    return _like_x(x, x.shape[-1], dtype), _like_x(x, 1, torch.float32), _like_x(x, x.shape[-1])


@fake_kernel("silu_mul_quantize")
def _(gate: Tensor, up: Tensor, dtype: torch.dtype) -> tuple[Tensor, Tensor]:
    return _like_x(gate, gate.shape[-1], dtype), _like_x(gate, 1, torch.float32)


@fake_kernel("swiglu")
def _(x: Tensor, alpha: float, limit: float, shift: float, interleaved: bool) -> Tensor:
    return _like_x(x, x.shape[-1] // 2)


@fake_kernel("swiglu_quantize")
def _(
    x: Tensor, alpha: float, limit: float, shift: float, interleaved: bool, dtype: torch.dtype
) -> tuple[Tensor, Tensor]:
    return _like_x(x, x.shape[-1] // 2, dtype), _like_x(x, 1, torch.float32)


@fake_kernel("quantize_groups")
def _(
    weight: Tensor,
    importance: Tensor | None,
    group_size: int,
    dtype: torch.dtype,
    symmetric: bool,
    scale_dtype: torch.dtype,
    factors: Sequence[float],
    whole_zeros: bool = False,
    rounds: int = 0,
) -> tuple[Tensor, Tensor, Tensor, Tensor]:
    n, k = weight.shape
    scales = weight.new_empty((n, _groups(k, group_size)), dtype=scale_dtype)
    squares = weight.new_empty(2, dtype=torch.float64)
    return weight.new_empty((n, k), dtype=dtype), scales, torch.empty_like(scales), squares


@fake_kernel("quantize_blocks")
def _(weight: Tensor, rows: int, columns: int) -> tuple[Tensor, Tensor, Tensor]:
    n, k = weight.shape
    scales = weight.new_empty((-(-n // max(1, rows)), -(-k // max(1, columns))), dtype=torch.float32)
    q = weight.new_empty((n, k), dtype=torch.float8_e4m3fn)
    return q, scales, weight.new_empty(2, dtype=torch.float64)


@fake_kernel("quantize_fp4")
def _(weight: Tensor, group_size: int) -> tuple[Tensor, Tensor, Tensor, Tensor]:
    n, k = weight.shape
    q = weight.new_empty((n, k), dtype=torch.uint8)
    scales = weight.new_empty((n, _groups(k, group_size)), dtype=torch.bfloat16)
    return q, scales, weight.new_empty(1, dtype=torch.float32), weight.new_empty(2, dtype=torch.float64)


@fake_kernel("quantize_weight_")
def _(
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


@fake_kernel("load_weight_")
def _(
    weight: Tensor,
    q: Tensor,
    scales: Tensor,
    dtype: torch.dtype,
    rows: int,
    columns: int,
    symmetric: bool,
    whole_zeros: bool,
    limit: float,
) -> Tensor:
    return torch.empty(1, dtype=torch.int32, device="cpu")


@fake_kernel("largest_magnitude")
def _(weight: Tensor) -> Tensor:
    return weight.new_empty(1, dtype=torch.float32)


@fake_kernel("gptq_columns")
def _(
    weight: Tensor, moved: Tensor, scales: Tensor, zeros: Tensor | None, ratios: Tensor, dtype: torch.dtype
) -> tuple[Tensor, Tensor, Tensor]:
    return weight.new_empty(weight.shape, dtype=dtype), torch.empty_like(weight), torch.empty_like(weight)


@fake_kernel("pack_int4")
def _(q: Tensor, scales: Tensor, zeros: Tensor | None, group_size: int) -> tuple[Tensor, Tensor]:
    n, k = q.shape
    tiles_n, tiles_k = (n + TILE_N - 1) // TILE_N, (k + TILE_K - 1) // TILE_K
    weight = q.new_empty((tiles_n, tiles_k, TILE_BYTES), dtype=torch.int8)
    return weight, scales.new_empty((tiles_n, _groups(k, group_size), 1 if zeros is None else 2, TILE_N))


@fake_kernel("unpack_int4")
def _(
    weight: Tensor, scales: Tensor, out_features: int, in_features: int, group_size: int
) -> tuple[Tensor, Tensor, Tensor]:
    shape = (out_features, _groups(in_features, group_size))
    q = weight.new_empty((out_features, in_features), dtype=torch.uint8)
    return q, scales.new_empty(shape), scales.new_empty(shape)


@fake_kernel("dequantize_int4")
def _(
    weight: Tensor, scales: Tensor, out_features: int, in_features: int, group_size: int, dtype: torch.dtype
) -> Tensor:
    return scales.new_empty((out_features, in_features), dtype=dtype)


@fake_kernel("int4_embedding")
def _(
    ids: Tensor,
    weight: Tensor,
    scales: Tensor,
    num_embeddings: int,
    embedding_dim: int,
    group_size: int,
    dtype: torch.dtype,
) -> Tensor:
    return torch.empty((*ids.shape, embedding_dim), dtype=dtype, device=weight.device)


@fake_kernel("int8_embedding")
def _(ids: Tensor, weight: Tensor, scales: Tensor, dtype: torch.dtype) -> Tensor:
    return torch.empty((*ids.shape, weight.shape[1]), dtype=dtype, device=weight.device)


@fake_kernel("dequantize_gguf")
def _(weight: Tensor, qtype: int, dtype: torch.dtype) -> Tensor:
    return torch.empty((weight.shape[0], columns_of(weight, qtype)), dtype=dtype, device=weight.device)


@fake_kernel("gguf_embedding")
def _(ids: Tensor, weight: Tensor, qtype: int, dtype: torch.dtype) -> Tensor:
    return torch.empty((*ids.shape, columns_of(weight, qtype)), dtype=dtype, device=weight.device)

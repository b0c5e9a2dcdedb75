"""Fake kernels: shape, dtype, stride and device of every operator's result, for tracing and for the meta device."""

from __future__ import annotations

import torch
from torch import Tensor

TILE_N, TILE_K, TILE_BYTES = 16, 64, 512  # of a packed int4 weight; checked against the C++ layout by the tests


def _like_x(x: Tensor, last: int | torch.SymInt, dtype: torch.dtype | None = None) -> Tensor:
    # torch.empty is half the work of x.new_empty when traced, and a compilation runs this five times a layer.
    return torch.empty((*x.shape[:-1], last), dtype=dtype or x.dtype, device=x.device)


def _groups(k: int, group_size: int) -> int:
    return 1 if group_size <= 0 else (k + group_size - 1) // group_size  # a bad one is refused when the op runs


@torch.library.register_fake("qao::int4_mm")
@torch.library.register_fake("qao::fp8_int4_mm")
def _(
    x: Tensor, weight: Tensor, scales: Tensor, bias: Tensor | None, out_features: int, in_features: int, group_size: int
) -> Tensor:
    return _like_x(x, out_features)


@torch.library.register_fake("qao::add_rms_norm_int4_mm")
def _(
    x: Tensor,
    residual: Tensor | None,
    norm_weight: Tensor | None,
    eps: float,
    weight: Tensor,
    scales: Tensor,
    bias: Tensor | None,
    out_features: int,
    in_features: int,
    group_size: int,
    gated: bool,
) -> tuple[Tensor, Tensor]:
    return _like_x(x, out_features // 2 if gated else out_features), _like_x(x, x.shape[-1])


@torch.library.register_fake("qao::int8_mm")
@torch.library.register_fake("qao::fp8_mm")
def _(x: Tensor, weight: Tensor, scales: Tensor, bias: Tensor | None) -> Tensor:
    return _like_x(x, weight.shape[0])


@torch.library.register_fake("qao::int8_int8_mm")
def _(x: Tensor, weight: Tensor, scales: Tensor, bias: Tensor | None, weight_sums: Tensor | None) -> Tensor:
    return _like_x(x, weight.shape[0])


@torch.library.register_fake("qao::int8_int4_mm")
def _(
    x: Tensor,
    weight: Tensor,
    scales: Tensor,
    bias: Tensor | None,
    weight_sums: Tensor | None,
    out_features: int,
    in_features: int,
    group_size: int,
) -> Tensor:
    return _like_x(x, out_features)


@torch.library.register_fake("qao::fp8_fp8_mm")
def _(
    x: Tensor,
    weight: Tensor,
    scales: Tensor,
    bias: Tensor | None,
    x_scale: Tensor | None,
    x_group_size: int,
    fast_accum: bool,
) -> Tensor:
    return _like_x(x, weight.shape[0])


@torch.library.register_fake("qao::int8_scaled_mm")
def _(
    x: Tensor,
    x_scales: Tensor,
    x_zeros: Tensor | None,
    weight: Tensor,
    scales: Tensor,
    bias: Tensor | None,
    weight_sums: Tensor | None,
    out_dtype: torch.dtype,
) -> Tensor:
    return _like_x(x, weight.shape[0], out_dtype)


@torch.library.register_fake("qao::fp8_scaled_mm")
def _(
    x: Tensor,
    x_scales: Tensor,
    weight: Tensor,
    scales: Tensor,
    bias: Tensor | None,
    out_dtype: torch.dtype,
    fast_accum: bool,
) -> Tensor:
    return _like_x(x, weight.shape[0], out_dtype)


@torch.library.register_fake("qao::int8_quantize")
def _(x: Tensor, symmetric: bool) -> tuple[Tensor, Tensor, Tensor]:
    return _like_x(x, x.shape[-1], torch.int8), _like_x(x, 1, torch.float32), _like_x(x, 1, torch.int32)


@torch.library.register_fake("qao::fp8_quantize")
def _(x: Tensor, group_size: int, scale: Tensor | None) -> tuple[Tensor, Tensor]:
    q = _like_x(x, x.shape[-1], torch.float8_e4m3fn)
    if group_size == 0:
        return q, x.new_empty(1, dtype=torch.float32) if scale is None else torch.empty_like(scale)
    return q, _like_x(x, _groups(x.shape[-1], group_size), torch.float32)


@torch.library.register_fake("qao::add_rms_norm")
def _(x: Tensor, residual: Tensor | None, weight: Tensor | None, eps: float) -> tuple[Tensor, Tensor]:
    return _like_x(x, x.shape[-1]), _like_x(x, x.shape[-1])


@torch.library.register_fake("qao::silu_mul")
def _(gate: Tensor, up: Tensor) -> Tensor:
    return _like_x(gate, gate.shape[-1])


@torch.library.register_fake("qao::rms_norm_quantize")
def _(x: Tensor, weight: Tensor | None, eps: float, dtype: torch.dtype) -> tuple[Tensor, Tensor]:
    return _like_x(x, x.shape[-1], dtype), _like_x(x, 1, torch.float32)


@torch.library.register_fake("qao::add_rms_norm_quantize")
def _(
    x: Tensor, residual: Tensor | None, weight: Tensor | None, eps: float, dtype: torch.dtype
) -> tuple[Tensor, Tensor, Tensor]:
    return _like_x(x, x.shape[-1], dtype), _like_x(x, 1, torch.float32), _like_x(x, x.shape[-1])


@torch.library.register_fake("qao::silu_mul_quantize")
def _(gate: Tensor, up: Tensor, dtype: torch.dtype) -> tuple[Tensor, Tensor]:
    return _like_x(gate, gate.shape[-1], dtype), _like_x(gate, 1, torch.float32)


@torch.library.register_fake("qao::pack_int4")
def _(q: Tensor, scales: Tensor, zeros: Tensor | None, group_size: int) -> tuple[Tensor, Tensor]:
    n, k = q.shape
    tiles_n, tiles_k = (n + TILE_N - 1) // TILE_N, (k + TILE_K - 1) // TILE_K
    weight = q.new_empty((tiles_n, tiles_k, TILE_BYTES), dtype=torch.int8)
    return weight, scales.new_empty((tiles_n, _groups(k, group_size), 1 if zeros is None else 2, TILE_N))


@torch.library.register_fake("qao::unpack_int4")
def _(
    weight: Tensor, scales: Tensor, out_features: int, in_features: int, group_size: int
) -> tuple[Tensor, Tensor, Tensor]:
    shape = (out_features, _groups(in_features, group_size))
    q = weight.new_empty((out_features, in_features), dtype=torch.uint8)
    return q, scales.new_empty(shape), scales.new_empty(shape)


@torch.library.register_fake("qao::dequantize_int4")
def _(
    weight: Tensor, scales: Tensor, out_features: int, in_features: int, group_size: int, dtype: torch.dtype
) -> Tensor:
    return scales.new_empty((out_features, in_features), dtype=dtype)

"""Loads the operator library; gives every operator a fake kernel and, where there is one, a gradient.

``torch.ops.qao.*`` are the raw operators, without autograd; layers call the functions of this module.
Sizes everywhere: M tokens, N = out_features, K = in_features; x [..., K], weight [N, K], y [..., N].
"""

from __future__ import annotations

from pathlib import Path
from typing import Any

import torch
from torch import Tensor

TILE_N, TILE_K, TILE_BYTES = 16, 64, 512  # checked against the C++ layout by tests/test_layout.py


def _load() -> None:
    library = Path(__file__).with_name("_C.so")
    if not library.exists():
        raise ImportError(
            f"qao's operator library is missing ({library}). In a source checkout, build it with "
            "`pip install --no-build-isolation -e .`; otherwise reinstall qao."
        )
    try:
        torch.ops.load_library(str(library))
    except OSError as error:
        raise ImportError(
            f"qao's operator library does not load with torch {torch.__version__}: {error}. qao needs torch >= 2.11; "
            "upgrade torch or reinstall qao."
        ) from error


_load()

_int4_mm = torch.ops.qao.int4_mm.default
_dequantize_int4 = torch.ops.qao.dequantize_int4.default


# ---- fake kernels: shape, dtype, stride and device of every result --------------------------------------------------


def _groups(k: int, group_size: int) -> int:
    return 1 if group_size <= 0 else (k + group_size - 1) // group_size  # a bad one is refused when the op runs


@torch.library.register_fake("qao::int4_mm")
def _(
    x: Tensor, weight: Tensor, scales: Tensor, bias: Tensor | None, out_features: int, in_features: int, group_size: int
) -> Tensor:
    return x.new_empty((*x.shape[:-1], out_features))


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


# ---- gradients: outside the operator, entered only when somebody wants one -------------------------------------------


class _Int4Mm(torch.autograd.Function):
    """d/dx and d/dbias of int4_mm; weight and scales are frozen."""

    @staticmethod
    def forward(
        ctx: Any,
        x: Tensor,
        weight: Tensor,
        scales: Tensor,
        bias: Tensor | None,
        out_features: int,
        in_features: int,
        group_size: int,
    ) -> Tensor:
        ctx.save_for_backward(weight, scales)
        ctx.sizes = (out_features, in_features, group_size)
        ctx.bias_dtype = None if bias is None else bias.dtype
        return _int4_mm(x, weight, scales, bias, out_features, in_features, group_size)  # type: ignore[no-any-return]

    @staticmethod
    def backward(ctx: Any, *grads: Any) -> tuple[Tensor | None, ...]:
        (grad,) = grads
        grad_x = grad_bias = None
        if ctx.needs_input_grad[0]:
            weight, scales = ctx.saved_tensors
            grad_x = grad @ _dequantize_int4(weight, scales, *ctx.sizes, grad.dtype)
        if ctx.needs_input_grad[3]:
            grad_bias = grad.reshape(-1, grad.shape[-1]).sum(0).to(ctx.bias_dtype)
        return grad_x, None, None, grad_bias, None, None, None


def int4_mm(
    x: Tensor, weight: Tensor, scales: Tensor, bias: Tensor | None, out_features: int, in_features: int, group_size: int
) -> Tensor:
    """y = x · Wᵀ + bias with W in four bits, differentiable in x and bias.

    Args:
        x: [..., K], float32, float16 or bfloat16; any strides.
        weight: int8 [ceil(N/16), ceil(K/64), 512] and
        scales: [ceil(N/16), ceil(K/group_size), 1 or 2, 16], both as ``pack_int4`` returned them.
        bias: [N] in a float dtype, or None.
        out_features, in_features: N and K of the weight that was packed.
        group_size: 32, 64, 128, 256, or -1 (one group per row): as given to ``pack_int4``.

    Returns:
        [..., N], contiguous, in x's dtype; accumulated in float32.

    Raises:
        RuntimeError: a shape, dtype, device or alignment does not fit; the message lists all of them and the remedy.
    """
    if torch.is_grad_enabled() and (x.requires_grad or (bias is not None and bias.requires_grad)):
        return _Int4Mm.apply(x, weight, scales, bias, out_features, in_features, group_size)  # type: ignore[no-untyped-call, no-any-return]
    return _int4_mm(x, weight, scales, bias, out_features, in_features, group_size)  # type: ignore[no-any-return]

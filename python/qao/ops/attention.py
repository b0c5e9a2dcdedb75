"""Attention of few tokens over a key-value cache, without gradients."""

from __future__ import annotations

import torch
from torch import Tensor

from . import library  # noqa: F401  # loads the operators


def decode_attention(q: Tensor, k: Tensor, v: Tensor, mask: Tensor | None, scale: float) -> Tensor:
    """softmax(scale · q · kᵀ + mask) · v, made for up to 16 queries and correct for any number.

    Sums are float32, and y is rounded once; a GPU also rounds e^(score - largest score) to the dtype. Repeated calls
    give the same bits. On a CPU neither the number of threads nor other sequences of the batch change them.
    The contents of keys that the mask excludes for every query do not matter.

    Args:
        q: [B, heads, Q, D] in float32, float16 or bfloat16; any strides. On a GPU: not float32, and D and D' are
            multiples of 8 up to 256.
        k, v: [B, kv_heads, S, D] and [B, kv_heads, S, D'] in the dtype of q; any strides. ``kv_heads`` divides
            ``heads``: query head h reads head h // (heads / kv_heads).
        mask: broadcasts to [B, heads, Q, S]. bool: True keys count; in a float dtype: added to the scores, where values
            below -1e30 (float16: the least one) exclude a key unless they cover a whole row. None: every key counts.
        scale: factor of the scores.

    Returns:
        y [B, Q, heads, D'], contiguous, in the dtype of q. A query without a key gives zeros, as in torch.

    Raises:
        RuntimeError: A shape, dtype or device does not fit; the message lists all operands and the remedy.
    """
    return torch.ops.qao.decode_attention.default(q, k, v, mask, scale)  # type: ignore[no-any-return]

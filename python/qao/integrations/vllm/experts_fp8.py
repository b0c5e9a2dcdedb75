"""Fused e4m3 experts of vLLM on qao's grouped GEMM, with per-block or per-row and per-token scales.

vLLM's patched selection of a backend calls qao first (oracles.py), as in experts.py.
"""

from __future__ import annotations

from typing import Any

import torch
from torch import Tensor

from ...ops.grouped_autograd import SILU_MUL
from ...ops.grouped_mm import fp8_fp8_grouped_mm
from ...ops.packed_shape import SCALE_BLOCK
from ..serving import moe
from .grouped_experts import GroupedExperts, unsupported_experts


class QaoFp8Experts(GroupedExperts):
    """e4m3 experts: weight scales per 128 x 128 block with activation scales per 128 columns, or per row and token."""

    @staticmethod
    def _supports_quant_scheme(weight_key: Any, activation_key: Any) -> bool:
        return _kind(weight_key, activation_key) is not None

    def _product(
        self, second: bool, x: Tensor, weight: Tensor, offsets: Tensor, row_index: Tensor | None, n: int
    ) -> Tensor:
        scales, bias = (self.w2_scale, self.w2_bias) if second else (self.w1_scale, self.w1_bias)
        group = SCALE_BLOCK if self.block_shape is not None else -1
        gate = None if second else SILU_MUL
        return fp8_fp8_grouped_mm(x, weight, scales, bias, offsets, row_index, None, None, group, False, gate=gate)


def _kind(weight_key: Any, activation_key: Any) -> str | None:
    """ "block" or "row" if qao computes exactly what the checkpoint specifies, else None."""
    if weight_key is None or activation_key is None or activation_key.scale.static:
        return None
    if weight_key.dtype != torch.float8_e4m3fn or activation_key.dtype != torch.float8_e4m3fn:
        return None
    shape, x_shape = weight_key.scale.group_shape, activation_key.scale.group_shape
    if (shape.row, shape.col) == (SCALE_BLOCK, SCALE_BLOCK) and (x_shape.row, x_shape.col) == (1, SCALE_BLOCK):
        return "block"
    return "row" if shape.is_per_channel() and x_shape.is_per_token() else None


def unsupported_reason(config: Any, weight_key: Any, activation_key: Any) -> str | None:
    """Why these experts are left to vLLM; None if qao computes them."""
    kind = _kind(weight_key, activation_key)
    if kind is None:
        return f"weights of {weight_key} with activations of {activation_key}"
    if kind == "block" and (reason := moe.unsupported_blocks(config.intermediate_size_per_partition)):
        return reason
    return unsupported_experts(QaoFp8Experts, config, weight_key, activation_key)

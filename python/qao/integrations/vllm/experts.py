"""Fused experts of vLLM on qao's grouped GEMM, for 4-bit checkpoints that vLLM reads.

The formats are compressed-tensors, GPTQ (symmetric, as vLLM takes it) and AWQ. Patched functions of vLLM call qao first
(oracles.py). ``unsupported_reason`` rejects, with a reason, everything that would not be computed exactly as the
checkpoint specifies; vLLM then uses its own list.
"""

from __future__ import annotations

from typing import Any, NamedTuple

from compressed_tensors.quantization import QuantizationArgs
from torch import Tensor

from ...checkpoints.awq import values_of
from ...checkpoints.plain import group_size_of
from ...ops.grouped_autograd import SILU_MUL
from ...ops.grouped_mm import int4_grouped_mm
from ..serving import common, moe
from .adapter import rows_first
from .grouped_experts import GroupedExperts, unsupported_experts


class QaoExperts(GroupedExperts):
    """Fused experts with 4-bit weights in groups and float activations."""

    @staticmethod
    def _supports_quant_scheme(weight_key: Any, activation_key: Any) -> bool:
        return activation_key is None  # the weight is checked in unsupported_reason()

    def _product(
        self, second: bool, x: Tensor, weight: Tensor, offsets: Tensor, row_index: Tensor | None, n: int
    ) -> Tensor:
        scales, bias = (self.w2_scale, self.w2_bias) if second else (self.w1_scale, self.w1_bias)
        k = x.shape[-1]
        size = group_size_of(self.block_shape[1], k)  # columns per group, as in the checkpoint
        assert size is not None  # checked in unsupported_reason()
        gate = None if second else SILU_MUL
        return int4_grouped_mm(x, weight, scales, bias, offsets, row_index, None, n, k, size, gate=gate)


def unsupported_reason(config: Any, weight_key: Any, quant_config: Any) -> str | None:
    """Why these experts are left to vLLM; None if qao computes them."""
    layout = _layout(quant_config)
    if layout is None:
        return "experts in a layout other than those of compressed-tensors, GPTQ and AWQ"
    if layout.bits != 4 or layout.strategy != "group":
        return f"{layout.bits} bits by {layout.strategy}; qao supports four bits in groups here"
    if layout.own_order:
        return "reordered columns (act-order)"
    if reason := unsupported_experts(QaoExperts, config, weight_key, None):
        return reason
    sizes = config.hidden_dim, config.intermediate_size_per_partition, config.intermediate_size
    return moe.unsupported_integers(4, quant_config.group_size, *sizes, not layout.symmetric)


class _Layout(NamedTuple):
    bits: int
    strategy: str
    own_order: bool  # whether the order of columns differs from that of x
    symmetric: bool


def _layout(quant_config: Any) -> _Layout | None:
    """Layout from vLLM's description of a checkpoint; None for other types.

    Classes are matched by name to avoid heavy imports.
    """
    if isinstance(quant_config, QuantizationArgs):
        bits, strategy = quant_config.num_bits, str(getattr(quant_config.strategy, "value", quant_config.strategy))
        strategy = strategy if quant_config.type == "int" else f"{quant_config.type} {strategy}"
        return _Layout(bits, strategy, quant_config.actorder == "group", quant_config.symmetric)
    strategy = "channel" if getattr(quant_config, "group_size", -1) == -1 else "group"
    if type(quant_config).__name__ == "AutoGPTQConfig":
        return _Layout(quant_config.weight_bits, strategy, quant_config.desc_act, quant_config.is_sym)
    if _is_awq(quant_config):
        return _Layout(quant_config.weight_bits, strategy, False, not quant_config.zero_point)
    return None


def _is_awq(quant_config: Any) -> bool:
    return type(quant_config).__name__ == "AutoAWQConfig"


def packed(words: Tensor, scales: Tensor, zeros: Tensor | None, quant_config: Any) -> tuple[Tensor, Tensor]:
    """Packed weight and scales of experts for the grouped GEMM, from int32 words.

    AWQ words are [E, K, N / 8], others [E, N, K / 8].
    """
    awq = _is_awq(quant_config)

    def plain(expert: int) -> moe.Plain:
        own = None if zeros is None else zeros[expert]
        if awq:
            return values_of(words[expert]), scales[expert].t(), None if own is None else values_of(own)
        q = common.rows(words[expert], 4, packed_dim=1, output_dim=0)
        return q, scales[expert], None if own is None else common.rows(own, 4, packed_dim=0, output_dim=0)

    k = words.shape[1] if awq else 8 * words.shape[2]
    each = map(plain, range(len(words)))
    _, together = moe.integers(each, len(words), quant_config.group_size, 4, k)
    return together.qweight, together.scales


def converted(given: dict[str, Any]) -> tuple[Any, ...]:
    """Result of vLLM's ``convert_to_wna16_moe_kernel_format`` for these keyword arguments."""
    config, found = given["quant_config"], {}
    layout = _layout(config)
    assert layout is not None  # checked in unsupported_reason()
    if not _is_awq(config):
        given = rows_first(given)
    for name in ("w13", "w2"):
        zeros = None if layout.symmetric else given[f"{name}_qzeros"]
        found[name] = packed(given[name], given[f"{name}_scale"], zeros, config)
    (w13, w13_scales), (w2, w2_scales) = found["w13"], found["w2"]
    zeros = given.get("w13_qzeros"), given.get("w2_qzeros")  # now part of the scales
    return w13, w2, w13_scales, w2_scales, *zeros, None, None, given.get("w13_bias"), given.get("w2_bias")

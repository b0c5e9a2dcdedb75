"""Fused experts in SGLang: conversion of loaded parameters to operands of the grouped GEMM.

``of_…`` returns a converter for the experts that SGLang's method ``own`` creates, or why they are left to SGLang. The
parameters do not exist at that time. Those of gate and up start with "w13_", those of down with "w2_".
"""

from __future__ import annotations

from collections.abc import Callable
from typing import Any, NamedTuple

import torch
from sglang.srt.layers.quantization.awq.schemes import AWQIntelAMXMoEScheme, AWQMoEScheme
from sglang.srt.layers.quantization.compressed_tensors.schemes import (
    CompressedTensorsW8A8Fp8MoE,
    CompressedTensorsWNA16MoE,
    CompressedTensorsWNA16TritonMoE,
)
from sglang.srt.layers.quantization.gptq.schemes import GPTQIntelAMXMoEScheme, GPTQMarlinMoEScheme
from torch import Tensor, nn

from ...checkpoints.plain import nibbles
from ...schemes import (
    Float8DynamicActivationFloat8Weight,
    Float8StaticActivationFloat8Weight,
    Int8DynamicActivationInt8Weight,
    PackedWeight,
    Scheme,
)
from ..serving import moe
from .adapter import scheme_of
from .kernels import awq_values, gptq_values, online, unsupported_blocks, unsupported_fp8

Values = Callable[[Tensor, Tensor, "Tensor | None", int], moe.Plain]


class ExpertSizes(NamedTuple):
    """Sizes of the experts on this rank: ``width`` of ``full_width`` rows of gate and of up."""

    hidden: int
    width: int
    full_width: int


class Weights:
    operator_name: str

    def packed(self, own: dict[str, Tensor], n: int, k: int) -> tuple[Scheme, PackedWeight]:
        """Pack a projection W [E, n, k]. ``own``: its parameters, named without "w13_" or "w2_"."""
        raise NotImplementedError


class Integers(Weights):
    """4-bit weights in groups or rows, 8-bit weights in rows; float activations.

    Args:
        values: unpacks weight, scales and zeros of one expert with a number of bits.
        names: parameter names of weight, scales and zeros.
    """

    def __init__(self, values: Values, names: str, bits: int, group_size: int, symmetric: bool) -> None:
        self.values, self.names, self.bits, self.group_size = values, names.split(), bits, group_size
        self.symmetric = symmetric
        self.operator_name = f"int{bits}_grouped_mm"

    def packed(self, own: dict[str, Tensor], n: int, k: int) -> tuple[Scheme, PackedWeight]:
        weights, scales, zeros = (own.get(name) for name in self.names)
        assert weights is not None and scales is not None
        none: list[None] = [None] * len(weights)
        each = zip(weights, scales, none if self.symmetric or zeros is None else zeros, strict=True)
        plain = (self._cut(*self.values(*one, self.bits), k) for one in each)
        return moe.integers(plain, len(weights), self.group_size, self.bits, k)

    def _cut(self, q: Tensor, scales: Tensor, zeros: Tensor | None, k: int) -> moe.Plain:
        """Drop unused groups: some methods allocate the groups of all ranks and load the local ones first."""
        groups = 1 if self.group_size == -1 else -(-k // self.group_size)
        return q, scales[:, :groups], None if zeros is None else zeros[:, :groups]


class EightBits(Weights):
    """int8 or e4m3 weights with scales per row, matrix or block; 8-bit activations.

    Args:
        scales: parameter name of the scales.
        static: all activations use the largest loaded scale; otherwise scales are dynamic.
    """

    def __init__(self, scheme: Scheme, scales: str, static: bool = False) -> None:
        self.scheme, self.scales, self.static = scheme, scales, static
        self.operator_name = f"{scheme.word}_grouped_mm"

    def packed(self, own: dict[str, Tensor], n: int, k: int) -> tuple[Scheme, PackedWeight]:
        weight, scales = own["weight"].contiguous(), own[self.scales].float().contiguous()
        if self.scheme == _FP8_BLOCKS:
            return self.scheme, PackedWeight(weight.view(torch.int8), scales)
        scales = scales.reshape(len(weight), -1)  # gate and up may have one each
        scales = scales.repeat_interleave(n // scales.shape[1], 1)
        if self.scheme.weights == "int8":
            return self.scheme, PackedWeight(weight, scales)
        made = PackedWeight(weight.view(torch.int8), scales.unsqueeze(2))
        if not self.static:
            return self.scheme, made
        scale = own["input_scale"].max().reshape(1).clone()
        scheme = Float8StaticActivationFloat8Weight(activation_scale=scale.item())
        return scheme, made._replace(activation_scale=scale)


_FP8_ROWS, _FP8_BLOCKS = (Float8DynamicActivationFloat8Weight(granularity) for granularity in ("row", "block"))


def of_compressed_tensors(own: Any, layer: nn.Module, sizes: ExpertSizes) -> Weights | str:
    scheme: Any = layer.scheme
    kind = type(scheme)
    if kind in (CompressedTensorsWNA16MoE, CompressedTensorsWNA16TritonMoE):
        if scheme.actorder == "group":
            return "columns reordered into groups (actorder)"
        if not scheme.sym:
            return "zero points, which SGLang does not load into experts as compressed-tensors stores them"
        group_size = -1 if scheme.strategy == "channel" else scheme.group_size
        names = "weight_packed weight_scale weight_zero_point"
        return _integers(gptq_values, names, scheme.num_bits, group_size, True, sizes)
    if kind is CompressedTensorsW8A8Fp8MoE:
        return _fp8("weight_scale", scheme.weight_block_size, scheme.static_input_scales, sizes)
    return f"weights of {kind.__name__}"


def of_gptq(own: Any, layer: nn.Module, sizes: ExpertSizes) -> Weights | str:
    config, scheme = own.quant_config, scheme_of(layer)
    if scheme is not None and type(scheme) not in (GPTQMarlinMoEScheme, GPTQIntelAMXMoEScheme):
        return f"weights of {type(scheme).__name__}"
    if config.desc_act:
        return "columns reordered into groups (desc_act)"
    if getattr(config, "checkpoint_format", "") not in ("", "gptq"):
        return f"the format {config.checkpoint_format} of GPTQ"
    symmetric = getattr(config, "is_sym", False)
    return _integers(gptq_values, _AUTO, config.weight_bits, config.group_size, symmetric, sizes)


def of_awq(own: Any, layer: nn.Module, sizes: ExpertSizes) -> Weights | str:
    if type(layer.scheme) not in (AWQMoEScheme, AWQIntelAMXMoEScheme):
        return f"weights of {type(layer.scheme).__name__}"
    return _integers(awq_values, _AUTO, own.quant_config.weight_bits, own.quant_config.group_size, False, sizes)


def of_moe_wna16(own: Any, layer: nn.Module, sizes: ExpertSizes) -> Weights | str:
    config = own.quant_config
    if config.linear_quant_method == "gptq":
        if config.has_zp:
            return "zero points of GPTQ, to which SGLang adds one with a carry into the next"
        if config.full_config.get("desc_act"):
            return "columns reordered into groups (desc_act)"
    group_size = config.group_size
    while group_size > 32 and (sizes.width % group_size or sizes.hidden % group_size):
        group_size //= 2  # as SGLang does, which repeats the scales
    return _integers(_values_of_bytes, _AUTO, config.weight_bits, group_size, not config.has_zp, sizes)


def of_fp8(own: Any, layer: nn.Module, sizes: ExpertSizes) -> Weights | str:
    if own.is_fp4_expert:
        return "weights of four-bit floats"
    blocks = own.quant_config.weight_block_size
    scales = "weight_scale" if blocks is None else "weight_scale_inv"
    return unsupported_fp8(own) or _fp8(scales, blocks, own.quant_config.activation_scheme == "static", sizes)


def of_modelopt_fp8(own: Any, layer: nn.Module, sizes: ExpertSizes) -> Weights | str:
    return online(own.quant_config) or _fp8("weight_scale", None, True, sizes)


def of_w8a8_fp8(own: Any, layer: nn.Module, sizes: ExpertSizes) -> Weights | str:
    return online(own.quant_config) or _fp8("weight_scale", None, False, sizes)


def of_w8a8_int8(own: Any, layer: nn.Module, sizes: ExpertSizes) -> Weights | str:
    return EightBits(Int8DynamicActivationInt8Weight(), "weight_scale")


_AUTO = "qweight scales qzeros"


def _values_of_bytes(
    weight: Tensor, scales: Tensor, zeros: Tensor | None, bits: int
) -> tuple[Tensor, Tensor, Tensor | None]:
    """As ``gptq_values``, for bytes [N, K * bits / 8], scales [N, G] and zeros [N / 2, G]."""
    q = weight if bits == 8 else nibbles(weight)
    return q, scales, None if zeros is None else nibbles(zeros.t()).t()


def _integers(
    values: Values, names: str, bits: int, group_size: int, symmetric: bool, sizes: ExpertSizes
) -> Weights | str:
    reason = moe.unsupported_integers(bits, group_size, *sizes, not symmetric)
    return reason or Integers(values, names, bits, group_size, symmetric)


def _fp8(scales: str, blocks: list[int] | None, static: bool, sizes: ExpertSizes) -> Weights | str:
    if blocks is None:
        return EightBits(_FP8_ROWS, scales, static)
    reason = unsupported_blocks(blocks) or moe.unsupported_blocks(sizes.width)
    return reason or EightBits(_FP8_BLOCKS, scales)

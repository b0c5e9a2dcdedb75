"""Linear layers in SGLang: conversion of loaded weights to operands of qao's operators.

``of_…`` returns the kernel of a layer with parameters from SGLang's method ``own``, or why qao has no kernel.
"""

from __future__ import annotations

from typing import Any, NamedTuple

from sglang.srt.layers.quantization.compressed_tensors.schemes import (
    CompressedTensorsW8A8Fp8,
    CompressedTensorsW8A8Int8,
    CompressedTensorsW8A16Fp8,
    CompressedTensorsWNA16,
)
from sglang.srt.layers.quantization.fp8_utils import get_fp8_gemm_runner_backend
from sglang.srt.utils import get_bool_env_var
from torch import Tensor, nn

from ... import ops
from ...checkpoints.awq import values_of
from ...ops.packed_shape import SCALE_BLOCK
from ...schemes import Int8DynamicActivationInt8Weight
from ..serving import common
from .adapter import is_weight_only


class Share(NamedTuple):
    """The part of a weight on this rank: rows of the joined matrices, and columns of ``full_k``."""

    parts: list[int]
    k: int
    full_k: int


class Kernel:
    operator_name: str

    def load(self, layer: nn.Module) -> None:
        """Convert the loaded parameters to those of the operator."""
        raise NotImplementedError

    def apply(self, layer: nn.Module, x: Tensor, bias: Tensor | None) -> Tensor:
        raise NotImplementedError


def _put(layer: nn.Module, name: str, tensor: Tensor | None) -> None:
    """Replace a loaded parameter; None removes it."""
    layer._parameters[name] = None if tensor is None else nn.Parameter(tensor, requires_grad=False)


class Integers(Kernel):
    """4-bit weights in groups or rows, 8-bit weights in rows; float activations."""

    weight, scales, zeros = "qweight", "scales", "qzeros"
    others: tuple[str, ...] = ()  # further tensors of the checkpoint

    def __init__(self, bits: int, group_size: int, symmetric: bool, share: Share) -> None:
        self.bits, self.group_size = bits, group_size
        self.scheme = common.integer_scheme(bits, group_size, share.k, symmetric=symmetric)
        self.operator = common.OPERATORS[self.scheme.word]
        self.operator_name = f"{self.scheme.word}_mm"
        self.rest = self.scheme.constants(sum(share.parts), share.k)
        self.symmetric = symmetric

    def plain(self, layer: nn.Module) -> tuple[Tensor, Tensor, Tensor | None]:
        """Unpack to uint8 q [N, K], scales [N, G] and zeros [N, G]."""
        raise NotImplementedError

    def load(self, layer: nn.Module) -> None:
        q, scales, zeros = self.plain(layer)
        made = common.integers(self.scheme, q, scales, zeros, self.group_size, bits=self.bits)
        loaded = layer._parameters[self.weight]
        copies = [name for name, one in layer._parameters.items() if one is loaded]  # models may register aliases
        for name in (*copies, self.zeros, *self.others):
            layer._parameters.pop(name, None)
        _put(layer, self.weight, made.qweight)
        _put(layer, self.scales, made.scales)

    def apply(self, layer: nn.Module, x: Tensor, bias: Tensor | None) -> Tensor:
        weight, scales = layer._parameters[self.weight], layer._parameters[self.scales]
        return common.multiply(self.operator, x, weight, scales, bias, *self.rest)


class PackQuantized(Integers):
    weight, scales, zeros = "weight_packed", "weight_scale", "weight_zero_point"
    others = ("weight_shape", "weight_g_idx")

    def plain(self, layer: nn.Module) -> tuple[Tensor, Tensor, Tensor | None]:
        own: Any = layer._parameters
        q = common.rows(own[self.weight].data, self.bits, packed_dim=1, output_dim=0)
        zeros = None if self.symmetric else common.rows(own[self.zeros].data, 4, packed_dim=0, output_dim=0)
        return q, own[self.scales].data, zeros


class Gptq(Integers):
    others = ("g_idx",)

    def plain(self, layer: nn.Module) -> tuple[Tensor, Tensor, Tensor | None]:
        own: Any = layer._parameters
        zeros = None if self.symmetric else own[self.zeros].data
        return gptq_values(own[self.weight].data, own[self.scales].data, zeros, self.bits)


class Awq(Integers):
    def plain(self, layer: nn.Module) -> tuple[Tensor, Tensor, Tensor | None]:
        own: Any = layer._parameters
        return awq_values(own[self.weight].data, own[self.scales].data, own[self.zeros].data, self.bits)


def gptq_values(words: Tensor, scales: Tensor, zeros: Tensor | None, bits: int) -> tuple[Tensor, Tensor, Tensor | None]:
    """uint8 q [N, K], scales [N, G], zeros [N, G] from words [K * bits / 32, N], scales [G, N] and words of zeros."""
    q = common.rows(words, bits, packed_dim=0, output_dim=1)
    if zeros is not None:  # stored minus one
        zeros = common.rows(zeros, 4, packed_dim=1, output_dim=1) + 1 & 15
    return q, scales.t(), zeros


def awq_values(words: Tensor, scales: Tensor, zeros: Tensor | None, bits: int) -> tuple[Tensor, Tensor, Tensor | None]:
    """As ``gptq_values``, for AWQ's 4-bit words [K, N / 8]."""
    return values_of(words), scales.t(), None if zeros is None else values_of(zeros)


class Int8(Kernel):
    """W8A8 int8: weight scales per row or matrix; activation scale (and zero point) per token."""

    operator_name = "int8_int8_mm"

    def __init__(self, symmetric_activations: bool, share: Share) -> None:
        self.scheme = Int8DynamicActivationInt8Weight(symmetric_activations=symmetric_activations)
        self.parts = share.parts

    def load(self, layer: nn.Module) -> None:
        own: Any = layer._parameters
        made = self.scheme.pack(own["weight"].data, common.row_scales(own["weight_scale"], self.parts))
        _put(layer, "weight", made.qweight)
        _put(layer, "weight_scale", made.scales)
        _put(layer, "weight_sums", made.weight_sums)

    def apply(self, layer: nn.Module, x: Tensor, bias: Tensor | None) -> Tensor:
        own = layer._parameters
        return common.multiply(ops.INT8_INT8, x, own["weight"], own["weight_scale"], bias, own["weight_sums"])


class Fp8(Kernel):
    """e4m3 weights with scales per row, matrix or block.

    Args:
        activations: number of columns of x that share a scale: 128, -1 (per token) or 0 (static, per tensor); None: x
            stays in float.
    """

    def __init__(self, scales: str, blocks: bool, activations: int | None, share: Share) -> None:
        self.scales, self.blocks, self.activations, self.parts = scales, blocks, activations, share.parts
        self.operator_name = "fp8_mm" if activations is None else "fp8_fp8_mm"

    def load(self, layer: nn.Module) -> None:
        own: Any = layer._parameters
        if not self.blocks:
            _put(layer, self.scales, common.row_scales(own[self.scales].data, self.parts))
        scale = own.get("input_scale")
        static = self.activations == 0 and scale is not None
        _put(layer, "input_scale", scale.data.max().reshape(1) if static else None)  # joined matrices share one x

    def apply(self, layer: nn.Module, x: Tensor, bias: Tensor | None) -> Tensor:
        own = layer._parameters
        if self.activations is None:
            return common.multiply(ops.FP8, x, own["weight"], own[self.scales], bias)
        args = own["weight"], own[self.scales], bias, own["input_scale"], self.activations, False
        return common.multiply(ops.FP8_FP8, x, *args)


def of_compressed_tensors(own: Any, layer: nn.Module, share: Share) -> Kernel | str:
    scheme: Any = layer.scheme
    kind = type(scheme)
    if kind is CompressedTensorsWNA16:
        bits = 32 // scheme.pack_factor
        if scheme.has_g_idx:
            return "columns reordered into groups (actorder)"
        return _integers(PackQuantized, bits, scheme.group_size, scheme.symmetric, share)
    if kind is CompressedTensorsW8A8Int8:
        return common.STATIC_INT8 if scheme.is_static_input_scheme else Int8(scheme.input_symmetric, share)
    if kind is CompressedTensorsW8A16Fp8:
        return _fp8("weight_scale", None, False, share, weight_only=True)
    if kind is CompressedTensorsW8A8Fp8:
        return _fp8("weight_scale", scheme.weight_block_size, scheme.is_static_input_scheme, share)
    return f"weights of {kind.__name__}"


def of_gptq(own: Any, layer: nn.Module, share: Share) -> Kernel | str:
    config = own.quant_config
    if config.desc_act and config.group_size not in (-1, share.full_k):
        return "columns reordered into groups (desc_act)"
    if getattr(config, "checkpoint_format", "") not in ("", "gptq"):
        return f"the format {config.checkpoint_format} of GPTQ"
    symmetric = getattr(config, "is_sym", False)  # zero points are read unless the config says symmetric
    return _integers(Gptq, config.weight_bits, config.group_size, symmetric, share)


def of_awq(own: Any, layer: nn.Module, share: Share) -> Kernel | str:
    config = own.quant_config  # zero points in the config are ignored: all checkpoints have them
    return _integers(Awq, config.weight_bits, config.group_size, False, share)


def of_fp8(own: Any, layer: nn.Module, share: Share) -> Kernel | str:
    blocks = own.quant_config.weight_block_size
    scales = "weight_scale" if blocks is None else "weight_scale_inv"
    static = layer._parameters.get("input_scale") is not None
    return unsupported_fp8(own) or _fp8(scales, blocks, static, share, own.use_marlin)


def unsupported_fp8(own: Any) -> str | None:
    """Why layers of SGLang's method "fp8" are left to it, regardless of the layer; None if they are not."""
    if own.use_mxfp8 or getattr(own.quant_config, "scale_fmt", None) == "ue8m0":
        return "activations with scales that are powers of two (mxfp8, ue8m0)"
    return online(own.quant_config)


def of_modelopt_fp8(own: Any, layer: nn.Module, share: Share) -> Kernel | str:
    return online(own.quant_config) or _fp8("weight_scale", None, True, share, is_weight_only(own))


def of_w8a8_fp8(own: Any, layer: nn.Module, share: Share) -> Kernel | str:
    return online(own.quantization_config) or _fp8("weight_scale", None, False, share)


def of_w8a8_int8(own: Any, layer: nn.Module, share: Share) -> Kernel | str:
    return Int8(True, share)


def online(config: Any) -> str | None:
    if config.is_checkpoint_fp8_serialized:
        return None
    return "a float checkpoint, which SGLang quantizes to fp8 while it loads"


def _integers(kind: type[Integers], bits: int, group_size: int, symmetric: bool, share: Share) -> Kernel | str:
    reason = common.unsupported_integers(bits, group_size, share.k, share.full_k, not symmetric)
    return reason or kind(bits, group_size, symmetric, share)


def _fp8(scales: str, blocks: list[int] | None, static: bool, share: Share, weight_only: bool = False) -> Kernel | str:
    backend = get_fp8_gemm_runner_backend()
    if not backend.is_auto() or get_bool_env_var("SGLANG_FORCE_FP8_MARLIN"):
        return f"another backend was requested: {'marlin' if backend.is_auto() else backend.value}"
    if reason := unsupported_blocks(blocks):
        return reason
    dynamic = -1 if blocks is None else SCALE_BLOCK
    return Fp8(scales, blocks is not None, None if weight_only else 0 if static else dynamic, share)


def unsupported_blocks(blocks: list[int] | None) -> str | None:
    """Why qao does not support these scale blocks; None if it does, or there are no blocks."""
    if blocks is None or list(blocks) == [SCALE_BLOCK, SCALE_BLOCK]:
        return None
    return f"blocks of {blocks[0]} x {blocks[1]}; qao supports {SCALE_BLOCK} x {SCALE_BLOCK}"

"""Schemes: how a linear layer is stored and computed. One class a scheme; nothing else asks which one it has.

A scheme is a weight format, which says how to quantize, store and restore W, and what is done with the activation,
which is one call of the scheme's operator:

    weight       activations as they come   int8, a scale per token               e4m3
    int4         Int4WeightOnly             Int8DynamicActivationInt4Weight       Float8DynamicActivationInt4Weight
    int8         Int8WeightOnly             Int8DynamicActivationInt8Weight
    e4m3         Float8WeightOnly                                                 Float8DynamicActivationFloat8Weight
    e2m1         Fp4WeightOnly
"""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass, fields
from typing import Any, ClassVar

import torch
from torch import Tensor

from .. import ops
from ..ops.rotation import with_row_scales
from .fp8_dynamic import Float8Operands
from .rotation import RotatedActivations
from .two_level import IntegerScaledInt4Weight, PowerScaledInt4Weight
from .weight_formats import Float8Weight, Fp4Weight, Int4Weight, Int8Weight, Scheme

__all__ = [
    "SCHEMES",
    "Float8DynamicActivationFloat8Weight",
    "Float8DynamicActivationInt4Weight",
    "Float8WeightOnly",
    "Fp4WeightOnly",
    "Int4WeightOnly",
    "Int8DynamicActivationInt4Weight",
    "Int8DynamicActivationInt8Weight",
    "Int8WeightOnly",
    "scheme_from_dict",
]

Layer = Mapping[str, Any]  # the tensors of a QuantLinear by name


@dataclass(frozen=True)
class Int4WeightOnly(Int4Weight):
    """Weights in four bits, activations as they come (float32, float16 or bfloat16).

    Args:
        group_size: columns of W that share a scale: 32, 64, 128, 256, or -1 for one group per row. Smaller groups are
            more accurate and cost more: a scale and, unless symmetric, a zero point per group and row. "auto":
            ``quantize_`` and ``calibrate`` choose one for each layer.
        symmetric: no zero points: W = (q - 8) * scale instead of (q - zero) * scale. A little smaller and faster, less
            accurate.
        scale_dtype: dtype of scales and zero points; None takes that of the layer's weight (float64: float32).
        clip_search: try several clipping ranges per group, keep the one of least squared error, and fit scale and zero
            point from there, columns weighed by what the weight tells of its activations (docs/numerics.md); False
            takes the full range.
        budget_bits: with "auto", how many bits a weight may take on average over all layers of this scheme, scales and
            zero points included.
        whole_zeros: zero points are whole numbers 0..15, as checkpoints of compressed-tensors, AWQ and GPTQ hold them:
            less accurate. They need not be whole otherwise, which is no slower.

    Raises:
        ValueError, TypeError: an argument is none of the above.
    """

    word: ClassVar[str] = "int4"

    @staticmethod
    def mm(x: Tensor, layer: Layer, constants: tuple[Any, ...]) -> Tensor:
        return ops.product(ops.INT4, constants, x, layer["qweight"], layer["scales"], layer["bias"])


@dataclass(frozen=True)
class Int8WeightOnly(Int8Weight):
    """Weights in eight bits with a scale per row, activations as they come (float32, float16 or bfloat16).

    Args:
        clip_search: try several clipping ranges per row and keep the one of least squared error; False takes the full
            range.

    Raises:
        TypeError: an argument is none of the above.
    """

    word: ClassVar[str] = "int8"

    @staticmethod
    def mm(x: Tensor, layer: Layer, constants: tuple[Any, ...]) -> Tensor:
        return ops.product(ops.INT8, (), x, layer["qweight"], layer["scales"], layer["bias"])


@dataclass(frozen=True)
class Float8WeightOnly(Float8Weight):
    """Weights in e4m3, activations as they come (float32, float16 or bfloat16).

    Args:
        granularity: what shares a scale: "row" of W, "tensor" (all of W), or "block" of 128 x 128.

    Raises:
        ValueError: an argument is none of the above.
    """

    word: ClassVar[str] = "fp8"

    @staticmethod
    def mm(x: Tensor, layer: Layer, constants: tuple[Any, ...]) -> Tensor:
        return ops.product(ops.FP8, (), x, layer["qweight"], layer["scales"], layer["bias"])


@dataclass(frozen=True)
class Fp4WeightOnly(Fp4Weight):
    """Weights in four-bit floats (e2m1), activations as they come (float32, float16 or bfloat16). For checkpoints that
    have such weights.

    Args:
        format: "mxfp4": groups of 32 columns with a power of two each. "nvfp4": groups of 16 with an e4m3 scale each,
            and a float32 number by which all are divided.

    Raises:
        ValueError: an argument is none of the above.
    """

    word: ClassVar[str] = "fp4"

    @staticmethod
    def mm(x: Tensor, layer: Layer, constants: tuple[Any, ...]) -> Tensor:
        return ops.product(ops.FP4, constants, x, layer["qweight"], layer["scales"], layer["bias"])


@dataclass(frozen=True)
class Int8DynamicActivationInt8Weight(RotatedActivations, Int8Weight):
    """Weights in eight bits with a scale per row; every token is rounded to eight bits with a scale of its own.

    Args:
        symmetric_activations: False gives every token a zero point too: more accurate where activations are of one
            sign, a little slower.
        clip_search: as in ``Int8WeightOnly``.
        rotation: 16, 32, 64, 128 or 256 columns that a Hadamard matrix mixes before tokens are rounded: outliers cost
            less then (docs/numerics.md). Of a layer the largest up to it that divides K; 0: none.

    Raises:
        ValueError, TypeError: an argument is none of the above.
    """

    symmetric_activations: bool = True

    word: ClassVar[str] = "int8_int8"
    activations: ClassVar[str] = "int8"

    @staticmethod
    def mm(x: Tensor, layer: Layer, constants: tuple[Any, ...]) -> Tensor:
        weight, scales, bias, weight_sums = layer["qweight"], layer["scales"], layer["bias"], layer["weight_sums"]
        if weight_sums is None and not constants:  # a call with *() in it takes 0.06 µs more
            return ops.product(ops.INT8_INT8, (), x, weight, scales, bias)
        return ops.product(ops.INT8_INT8, constants, x, weight, scales, bias, weight_sums)


@dataclass(frozen=True)
class Int8DynamicActivationInt4Weight(RotatedActivations, IntegerScaledInt4Weight):
    """Weights in four bits; every token is rounded to eight bits with a scale of its own.

    Args:
        group_size, symmetric, scale_dtype, clip_search, budget_bits, whole_zeros: as in ``Int4WeightOnly``.
        symmetric_activations, rotation: as in ``Int8DynamicActivationInt8Weight``.
        integer_scales: with symmetric weights, a row's scales are whole numbers times one scale of the row, and Hopper
            need not scale the sums of each group of many tokens; a little less accurate (docs/numerics.md). One group
            a row stays as it is.

    Raises:
        ValueError, TypeError: an argument is none of the above.
    """

    symmetric_activations: bool = True

    word: ClassVar[str] = "int8_int4"
    activations: ClassVar[str] = "int8"

    @staticmethod
    def mm(x: Tensor, layer: Layer, constants: tuple[Any, ...]) -> Tensor:
        weight, scales, bias, weight_sums = layer["qweight"], layer["scales"], layer["bias"], layer["weight_sums"]
        constants = with_row_scales(constants, layer["row_scales"])
        if weight_sums is None and not constants:
            return ops.product(ops.INT8_INT4, (), x, weight, scales, bias)
        return ops.product(ops.INT8_INT4, constants, x, weight, scales, bias, weight_sums)


@dataclass(frozen=True)
class Float8DynamicActivationFloat8Weight(Float8Operands):
    """Weights in e4m3; activations are rounded to e4m3.

    Args:
        granularity: what shares a scale: "row": a row of W, a token; "tensor": all of W, all of x; "block": 128 x 128
            of W, 128 columns of a token.
        activation_scale: one scale for every activation, known beforehand (its largest magnitude / 448), instead of
            one found in each; larger values saturate. None: dynamic. A layer holds it as a float32 of that name.
        fast_accum: let GPUs sum more than 128 columns in the tensor core's short accumulator: faster, less accurate.

    Raises:
        ValueError, TypeError: an argument is none of the above, or ``activation_scale`` with "block".
    """

    word: ClassVar[str] = "fp8_fp8"
    activations: ClassVar[str] = "fp8"

    @staticmethod
    def mm(x: Tensor, layer: Layer, constants: tuple[Any, ...]) -> Tensor:
        weight, scales, bias, x_scale = layer["qweight"], layer["scales"], layer["bias"], layer["activation_scale"]
        if x_scale is None and not constants:
            return ops.product(ops.FP8_FP8, (), x, weight, scales, bias)
        return ops.product(ops.FP8_FP8, constants, x, weight, scales, bias, x_scale)


@dataclass(frozen=True)
class Float8DynamicActivationInt4Weight(PowerScaledInt4Weight):
    """Weights in four bits; every token is rounded to e4m3 with a scale of its own.

    Args:
        group_size, symmetric, scale_dtype, clip_search, budget_bits, whole_zeros: as in ``Int4WeightOnly``.
        power_of_two_scales: with symmetric weights, a row's scales are powers of two times one scale of the row, and
            Hopper need not scale the sums of each group of many tokens; less accurate (docs/numerics.md). One group a
            row stays as it is.
        fast_accum: with these, or with one group a row, let GPUs sum more than 128 columns in the tensor core's short
            accumulator: faster, less accurate.

    Raises:
        ValueError, TypeError: an argument is none of the above.
    """

    word: ClassVar[str] = "fp8_int4"
    activations: ClassVar[str] = "fp8"

    @staticmethod
    def mm(x: Tensor, layer: Layer, constants: tuple[Any, ...]) -> Tensor:
        constants = with_row_scales(constants, layer["row_scales"])
        return ops.product(ops.FP8_INT4, constants, x, layer["qweight"], layer["scales"], layer["bias"])


# Every scheme class by its word.
SCHEMES: dict[str, type[Scheme]] = {
    kind.word: kind
    for kind in (
        Int4WeightOnly,
        Int8WeightOnly,
        Float8WeightOnly,
        Fp4WeightOnly,
        Int8DynamicActivationInt8Weight,
        Int8DynamicActivationInt4Weight,
        Float8DynamicActivationFloat8Weight,
        Float8DynamicActivationInt4Weight,
    )
}


def scheme_from_dict(content: Mapping[str, Any]) -> Scheme:
    """The scheme that ``Scheme.to_dict`` described; a ValueError if it names none, or a field that it does not have."""
    word = content.get("scheme")
    kind = SCHEMES.get(word) if isinstance(word, str) else None
    if kind is None:
        raise ValueError(f"scheme_from_dict: {word!r} is no scheme; there are {', '.join(SCHEMES)}")
    known = {f.name for f in fields(kind)}  # type: ignore[arg-type]
    arguments = {name: value for name, value in content.items() if name != "scheme"}
    if unknown := sorted(arguments.keys() - known):
        raise ValueError(f"scheme_from_dict: {word} has no {', '.join(unknown)}; it has {', '.join(sorted(known))}")
    dtype = arguments.get("scale_dtype")
    if isinstance(dtype, str):
        arguments["scale_dtype"] = getattr(torch, dtype, dtype)
    try:
        return kind(**arguments)
    except TypeError as error:
        raise ValueError(f"scheme_from_dict: {error}") from error

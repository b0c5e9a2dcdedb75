"""Scheme classes. Other code uses their interface and does not check for a class.

A scheme combines a weight format, which quantizes, packs and dequantizes W, with an activation format, which the
scheme's operator applies:

    weight       weight-only                int8 activations, per token           e4m3 activations
    int4         Int4WeightOnly             Int8DynamicActivationInt4Weight       Float8DynamicActivationInt4Weight
    int8         Int8WeightOnly             Int8DynamicActivationInt8Weight
    e4m3         Float8WeightOnly                                                 Float8DynamicActivationFloat8Weight
                                                                                  Float8StaticActivationFloat8Weight
    e2m1         Fp4WeightOnly
"""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass, field, fields
from typing import Any, ClassVar

import torch
from torch import Tensor

from .. import _moved, ops
from .fp8_activations import Float8Operands
from .gguf import GgufWeightOnly
from .rotation import RotatedActivations
from .two_level import IntegerScaledInt4Weight, PowerScaledInt4Weight
from .weight_formats import Float8Weight, Fp4Weight, Int4Weight, Int8Weight, Scheme

__all__ = [
    "SCHEMES",
    "Float8DynamicActivationFloat8Weight",
    "Float8DynamicActivationInt4Weight",
    "Float8StaticActivationFloat8Weight",
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
    """W4A16: int4 weights, unquantized activations (float32, float16 or bfloat16).

    Args:
        group_size: columns of W that share a scale: 32, 64, 128, 256, or -1 for one group per row. Smaller groups are
            more accurate and cost more: a scale and, unless symmetric, a zero point per group and row.
        symmetric: no zero points: W = (q - 8) * scale instead of (q - zero) * scale. A little smaller and faster, less
            accurate.
        scale_dtype: dtype of scales and zero points; None takes that of the layer's weight (float64: float32).
        clip_search: try several clipping ranges per group, keep the one with the least squared error, and refine scale
            and zero point by least squares, with columns weighted by estimated importance (docs/numerics.md); False
            uses the full range.
        whole_zeros: zero points are integers 0..15, as in checkpoints of compressed-tensors, AWQ and GPTQ: less
            accurate. Otherwise zero points are floats, at the same speed.

    Raises:
        ValueError, TypeError: an argument is not as above.
    """

    word: ClassVar[str] = "int4"

    @staticmethod
    def mm(x: Tensor, layer: Layer, constants: tuple[Any, ...]) -> Tensor:
        return ops.product(ops.INT4, constants, x, layer["qweight"], layer["scales"], layer["bias"])


@dataclass(frozen=True)
class Int8WeightOnly(Int8Weight):
    """W8A16: int8 weights with one scale per row, unquantized activations (float32, float16 or bfloat16).

    Args:
        clip_search: try several clipping ranges per row and keep the one with the least squared error; False uses the
            full range.

    Raises:
        TypeError: an argument is not as above.
    """

    word: ClassVar[str] = "int8"

    @staticmethod
    def mm(x: Tensor, layer: Layer, constants: tuple[Any, ...]) -> Tensor:
        return ops.product(ops.INT8, (), x, layer["qweight"], layer["scales"], layer["bias"])


@dataclass(frozen=True)
class Float8WeightOnly(Float8Weight):
    """e4m3 weights, unquantized activations (float32, float16 or bfloat16).

    Args:
        granularity: of the scales: "row" of W, "tensor", or "block" of 128 x 128.

    Raises:
        ValueError: an argument is not as above.
    """

    word: ClassVar[str] = "fp8"

    @staticmethod
    def mm(x: Tensor, layer: Layer, constants: tuple[Any, ...]) -> Tensor:
        return ops.product(ops.FP8, (), x, layer["qweight"], layer["scales"], layer["bias"])


@dataclass(frozen=True)
class Fp4WeightOnly(Fp4Weight):
    """fp4 (e2m1) weights, unquantized activations (float32, float16 or bfloat16). For MXFP4 and NVFP4 checkpoints.

    Args:
        format: "mxfp4": groups of 32 columns with a power-of-two scale. "nvfp4": groups of 16 with an e4m3 scale, and
            one float32 divisor of all scales.

    Raises:
        ValueError: an argument is not as above.
    """

    word: ClassVar[str] = "fp4"

    @staticmethod
    def mm(x: Tensor, layer: Layer, constants: tuple[Any, ...]) -> Tensor:
        return ops.product(ops.FP4, constants, x, layer["qweight"], layer["scales"], layer["bias"])


@dataclass(frozen=True)
class Int8DynamicActivationInt8Weight(RotatedActivations, Int8Weight):
    """W8A8: int8 weights with one scale per row, dynamic int8 activations with one scale per token.

    Args:
        symmetric_activations: False adds a zero point per token: more accurate for activations of one sign, slightly
            slower.
        clip_search: as in ``Int8WeightOnly``.
        rotation: block size of a Hadamard rotation before quantization, 16, 32, 64, 128 or 256: reduces the error from
            outliers (docs/numerics.md). A layer uses the largest size up to it that divides K; 0: no rotation.

    Raises:
        ValueError, TypeError: an argument is not as above.
    """

    symmetric_activations: bool = True

    word: ClassVar[str] = "int8_int8"
    activations: ClassVar[str] = "int8"
    operands: ClassVar[tuple[str, ...]] = ("weight_sums",)

    @staticmethod
    def mm(x: Tensor, layer: Layer, constants: tuple[Any, ...]) -> Tensor:
        weight, scales, bias, weight_sums = layer["qweight"], layer["scales"], layer["bias"], layer["weight_sums"]
        if weight_sums is None and not constants:  # unpacking an empty tuple would take 0.06 µs more
            return ops.product(ops.INT8_INT8, (), x, weight, scales, bias)
        return ops.product(ops.INT8_INT8, constants, x, weight, scales, bias, weight_sums)


@dataclass(frozen=True)
class Int8DynamicActivationInt4Weight(RotatedActivations, IntegerScaledInt4Weight):
    """W4A8: int4 weights, dynamic int8 activations with one scale per token.

    Args:
        group_size, symmetric, scale_dtype, clip_search, whole_zeros: as in ``Int4WeightOnly``.
        symmetric_activations, rotation: as in ``Int8DynamicActivationInt8Weight``.
        integer_scales: with symmetric weights, two-level scales: a row's scales are integers times one scale of the
            row, and Hopper's GEMM of many tokens needs no scaling per group; slightly less accurate
            (docs/numerics.md). No effect with one group per row.

    Raises:
        ValueError, TypeError: an argument is not as above.
    """

    symmetric_activations: bool = True

    word: ClassVar[str] = "int8_int4"
    activations: ClassVar[str] = "int8"
    operands: ClassVar[tuple[str, ...]] = ("weight_sums", "row_scales")

    @staticmethod
    def mm(x: Tensor, layer: Layer, constants: tuple[Any, ...]) -> Tensor:
        weight, scales, bias, weight_sums = layer["qweight"], layer["scales"], layer["bias"], layer["weight_sums"]
        row_scales = layer["row_scales"]
        if weight_sums is None and row_scales is None and not constants:
            return ops.product(ops.INT8_INT4, (), x, weight, scales, bias)
        return ops.product(ops.INT8_INT4, constants, x, weight, scales, bias, weight_sums, row_scales)


@dataclass(frozen=True)
class Float8DynamicActivationFloat8Weight(Float8Operands):
    """fp8 W8A8: e4m3 weights, dynamic e4m3 activations.

    Args:
        granularity: of the scales: "row": per row of W and per token; "tensor": per tensor for W and x; "block":
            128 x 128 of W and 128 columns of a token.
        fast_accum: let GPUs accumulate more than 128 columns in the tensor core's short accumulator: faster, less
            accurate.
        activation_scale: deprecated; use ``Float8StaticActivationFloat8Weight``.

    Raises:
        ValueError, TypeError: an argument is not as above.
    """

    def __post_init__(self) -> None:
        super().__post_init__()
        if self.activation_scale is not None:
            self._check_scale()
            _moved.warn("Float8DynamicActivationFloat8Weight(activation_scale=...)", stacklevel=4)


@dataclass(frozen=True)
class Float8StaticActivationFloat8Weight(Float8Operands):
    """fp8 W8A8: e4m3 weights, e4m3 activations with one scale for all of them that is fixed beforehand.

    Args:
        granularity: of the scales of W: "row" or "tensor".
        activation_scale: the largest magnitude of the activations / 448; larger values saturate. A layer stores it as a
            float32 tensor of that name.
        fast_accum: as in ``Float8DynamicActivationFloat8Weight``.

    Raises:
        ValueError, TypeError: an argument is not as above.
    """

    activation_scale: float = field(kw_only=True)

    def __post_init__(self) -> None:
        super().__post_init__()
        self._check_scale()


@dataclass(frozen=True)
class Float8DynamicActivationInt4Weight(PowerScaledInt4Weight):
    """fp8 W4A8: int4 weights, dynamic e4m3 activations with one scale per token.

    Args:
        group_size, symmetric, scale_dtype, clip_search, whole_zeros: as in ``Int4WeightOnly``.
        power_of_two_scales: with symmetric weights, two-level scales: a row's scales are powers of two times one scale
            of the row, and Hopper's GEMM of many tokens needs no scaling per group; less accurate (docs/numerics.md).
            No effect with one group per row.
        fast_accum: with ``power_of_two_scales``, or with one group per row, let GPUs accumulate more than 128 columns
            in the tensor core's short accumulator: faster, less accurate.

    Raises:
        ValueError, TypeError: an argument is not as above.
    """

    word: ClassVar[str] = "fp8_int4"
    activations: ClassVar[str] = "fp8"
    operands: ClassVar[tuple[str, ...]] = ("row_scales",)

    @staticmethod
    def mm(x: Tensor, layer: Layer, constants: tuple[Any, ...]) -> Tensor:
        weight, scales, bias, row_scales = layer["qweight"], layer["scales"], layer["bias"], layer["row_scales"]
        if row_scales is None and not constants:
            return ops.product(ops.FP8_INT4, (), x, weight, scales, bias)
        return ops.product(ops.FP8_INT4, constants, x, weight, scales, bias, row_scales)


# A scheme class for each word. GgufWeightOnly is not among them: it comes from files only.
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
    """The inverse of ``Scheme.to_dict``. Raises ValueError for an unknown scheme or field."""
    word = content.get("scheme")
    known_words: dict[str, type[Scheme]] = {**SCHEMES, GgufWeightOnly.word: GgufWeightOnly}
    kind = known_words.get(word) if isinstance(word, str) else None
    if kind is None:
        raise ValueError(f"scheme_from_dict: {word!r} is not a scheme; use one of {', '.join(known_words)}")
    if kind is Float8DynamicActivationFloat8Weight and content.get("activation_scale") is not None:
        kind = Float8StaticActivationFloat8Weight
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

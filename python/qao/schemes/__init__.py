"""Quantization schemes, one class each: weight format, activation format and options."""

from __future__ import annotations

from .base import (
    FLOAT_DTYPES,
    OnePass,
    PackedWeight,
    Scheme,
    stacked,
)
from .configs import (
    SCHEMES,
    Float8DynamicActivationFloat8Weight,
    Float8DynamicActivationInt4Weight,
    Float8StaticActivationFloat8Weight,
    Float8WeightOnly,
    Fp4WeightOnly,
    Int4WeightOnly,
    Int8DynamicActivationInt4Weight,
    Int8DynamicActivationInt8Weight,
    Int8WeightOnly,
    scheme_from_dict,
)
from .gguf import GgufWeightOnly
from .weight_formats import (
    GROUP_SIZES,
    Float8Weight,
    Fp4Weight,
    Granularity,
    Int4Weight,
    Int8Weight,
)

__all__ = [
    "FLOAT_DTYPES",
    "Float8DynamicActivationFloat8Weight",
    "Float8DynamicActivationInt4Weight",
    "Float8StaticActivationFloat8Weight",
    "Float8Weight",
    "Float8WeightOnly",
    "Fp4Weight",
    "Fp4WeightOnly",
    "GROUP_SIZES",
    "GgufWeightOnly",
    "Granularity",
    "Int4Weight",
    "Int4WeightOnly",
    "Int8DynamicActivationInt4Weight",
    "Int8DynamicActivationInt8Weight",
    "Int8Weight",
    "Int8WeightOnly",
    "OnePass",
    "PackedWeight",
    "SCHEMES",
    "Scheme",
    "scheme_from_dict",
    "stacked",
]

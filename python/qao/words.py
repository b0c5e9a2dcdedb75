"""Words of the command line that stand for schemes and methods; they are known before torch is imported."""

from __future__ import annotations

# The class in qao.schemes of each word.
SCHEMES = {
    "int4": "Int4WeightOnly",
    "int8": "Int8WeightOnly",
    "fp8": "Float8WeightOnly",
    "fp4": "Fp4WeightOnly",
    "int8_int8": "Int8DynamicActivationInt8Weight",
    "int8_int4": "Int8DynamicActivationInt4Weight",
    "fp8_fp8": "Float8DynamicActivationFloat8Weight",
    "fp8_int4": "Float8DynamicActivationInt4Weight",
}
# Of qao.calibrate.
METHODS = ("gptq", "smoothquant")

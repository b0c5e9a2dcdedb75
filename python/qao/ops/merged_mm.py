"""GEMMs of several weights and one x, which graph passes put in place of layers with the same input.

The operators are private: their names begin with an underscore, and they have no gradients.
"""

from __future__ import annotations

from typing import Any

import torch

from . import library  # noqa: F401  # loads the operators

# By the operator of one weight.
MERGED: dict[Any, Any] = {
    getattr(torch.ops.qao, name).default: getattr(torch.ops.qao, f"_merged_{name}").default
    for name in (
        "int4_mm",
        "int8_mm",
        "fp8_mm",
        "fp4_mm",
        "int8_int8_mm",
        "int8_int4_mm",
        "fp8_fp8_mm",
        "fp8_int4_mm",
        "gguf_mm",
    )
}
# RMSNorm(x + residual), products of it with several int4 weights, and optionally SiLU(first) * second; then that sum.
FUSED: Any = torch.ops.qao._merged_add_rms_norm_int4_mm.default

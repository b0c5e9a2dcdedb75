"""torch.utils.flop_counter: FlopCounterMode counts 2 · M · N · K per GEMM; M is the rows of y."""

from __future__ import annotations

from math import prod
from typing import Any

import torch


def register() -> None:
    from torch.utils.flop_counter import register_flop_formula

    qao = torch.ops.qao
    products = (
        *(qao.int4_mm, qao.int8_mm, qao.fp8_mm, qao.fp4_mm),
        *(qao.int8_int8_mm, qao.int8_int4_mm, qao.fp8_fp8_mm, qao.fp8_int4_mm),
        *(qao.int8_scaled_mm, qao.fp8_scaled_mm, qao.gguf_mm),
    )
    register_flop_formula(products)(_product)
    register_flop_formula(qao.add_rms_norm_int4_mm)(_fused)
    register_flop_formula(
        (
            *(qao.int4_grouped_mm, qao.int8_grouped_mm, qao.fp8_grouped_mm, qao.int8_int8_grouped_mm),
            *(qao.int8_int4_grouped_mm, qao.fp8_fp8_grouped_mm, qao.fp8_int4_grouped_mm, qao.fp4_grouped_mm),
            qao.gguf_grouped_mm,
        )
    )(_grouped)


def _product(x: Any, *_: Any, out_shape: Any, **__: Any) -> int:
    return 2 * int(prod(x)) * int(out_shape[-1])


def _grouped(x: Any, *arguments: Any, out_shape: Any, gate: Any = None, **_: Any) -> int:
    """``gate``, the only list of numbers that is not a shape, halves the output but not the GEMM."""
    lists = [value for value in (*arguments, gate) if isinstance(value, (list, tuple))]
    gated = any(type(number) is float for numbers in lists for number in numbers)
    return 2 * int(x[-1]) * int(prod(out_shape)) * (2 if gated else 1)


def _fused(x: Any, *arguments: Any, out_shape: Any, **_: Any) -> int:
    """``gated`` halves the output but not the GEMM."""
    return 2 * int(prod(x)) * int(arguments[6])

"""Hadamard rotation of activations: W x = (W Rᵀ) (R x), with a smaller quantization error of R x.

R is block-diagonal with orthogonal Hadamard matrices, which spread an outlier of x over the columns of its block. The
layer stores W Rᵀ, and the GEMM operator multiplies x by R before it quantizes x. Every block is its own inverse.

Source: Ashkboos et al.: QuaRot, arXiv:2404.00456; here each rotation stays inside one layer.
"""

from __future__ import annotations

from typing import Any

from torch import Tensor

from . import activation_ops

SIZES = (16, 32, 64, 128, 256)  # columns per block


def rotated(values: Tensor, size: int) -> Tensor:
    """[..., K] with every block of ``size`` columns rotated in float32; 0: unchanged. Twice is the identity."""
    return activation_ops.hadamard(values.float(), size) if size else values


def rotated_hessian(hessian: Tensor, size: int) -> Tensor:
    """R H Rᵀ: the mean of x xᵀ for rotated x."""
    return rotated(rotated(hessian, size).t(), size).t().contiguous() if size else hessian


_POSITIONS: dict[Any, int] = {}  # index of x_rotation among an operator's arguments


def note_rotation(operator: Any) -> None:
    """Registers a GEMM operator for ``rotation_among``."""
    names = [argument.name for argument in operator._schema.arguments]
    if "x_rotation" in names:
        _POSITIONS[operator] = names.index("x_rotation")


def rotation_among(operator: Any, arguments: tuple[Any, ...]) -> int:
    """``x_rotation`` among the arguments of a GEMM, from weight on; 0 if it has none."""
    position = _POSITIONS.get(operator, 0) - 1  # arguments start after x
    return arguments[position] if 0 < position < len(arguments) else 0


def with_row_scales(constants: tuple[Any, ...], row_scales: Tensor | None) -> tuple[Any, ...]:
    """``constants`` of an int8_int4 GEMM with ``row_scales`` inserted."""
    return constants if row_scales is None else (*(constants[:3] or (0, 0, 0)), row_scales, *constants[4:])

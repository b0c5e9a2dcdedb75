"""A Hadamard rotation of what a layer reads: W x = (W Rᵀ) (R x), where rounding R x costs less than rounding x.

R is block-diagonal, of orthogonal Hadamard matrices, which spread an outlier of x over the columns of its block. The
layer holds W Rᵀ, the product's operator multiplies x by R before it rounds it. Every block is its own inverse.

Source: Ashkboos et al.: QuaRot, arXiv:2404.00456; here rotations stay inside a layer, so that no other one changes.
"""

from __future__ import annotations

from typing import Any

from torch import Tensor

from . import activation_ops

SIZES = (16, 32, 64, 128, 256)  # columns of a block


def rotated(values: Tensor, size: int) -> Tensor:
    """[..., K] with every block of ``size`` columns rotated, or rotated back, in float32; 0: as it is."""
    return activation_ops.hadamard(values.float(), size) if size else values


def rotated_hessian(hessian: Tensor, size: int) -> Tensor:
    """R H Rᵀ: the mean of x xᵀ where x is rotated."""
    return rotated(rotated(hessian, size).t(), size).t().contiguous() if size else hessian


_PLACES: dict[Any, int] = {}  # of x_rotation among the arguments of the operators that have it


def note_rotation(operator: Any) -> None:
    """Makes a product known to ``rotation_among``."""
    names = [argument.name for argument in operator._schema.arguments]
    if "x_rotation" in names:
        _PLACES[operator] = names.index("x_rotation")


def rotation_among(operator: Any, arguments: tuple[Any, ...]) -> int:
    """``x_rotation`` among the arguments of a product, from weight on; 0 where it has none."""
    place = _PLACES.get(operator, 0) - 1  # behind x
    return arguments[place] if 0 < place < len(arguments) else 0


def with_row_scales(constants: tuple[Any, ...], row_scales: Tensor | None) -> tuple[Any, ...]:
    """``constants`` of an int8_int4 product with its scales of rows in their place among them."""
    return constants if row_scales is None else (*(constants[:3] or (0, 0, 0)), row_scales, *constants[4:])

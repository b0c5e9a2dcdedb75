"""A Hadamard rotation of what a layer reads: W x = (W Rᵀ) (R x), where rounding R x costs less than rounding x.

R is block-diagonal, of orthogonal Hadamard matrices, which spread an outlier of x over the columns of its block. The
layer holds W Rᵀ, the product's operator multiplies x by R before it rounds it. Every block is its own inverse.

Source: Ashkboos et al.: QuaRot, arXiv:2404.00456; here rotations stay inside a layer, so that no other one changes.
"""

from __future__ import annotations

from dataclasses import dataclass, field, replace
from typing import Any

import torch
from torch import Tensor

from . import activation_operators
from .scheme import PackedWeight, Scheme, _host

SIZES = (16, 32, 64, 128, 256)  # columns of a block


def rotated(values: Tensor, size: int) -> Tensor:
    """[..., K] with every block of ``size`` columns rotated, or rotated back, in float32; 0: as it is."""
    return activation_operators.hadamard(values.float(), size) if size else values


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


@dataclass(frozen=True)
class RotatedActivations(Scheme):
    """What a scheme has of int8 activations that may be rotated; before the class of its weight format."""

    rotation: int = field(default=0, kw_only=True)

    def __post_init__(self) -> None:
        super().__post_init__()  # type: ignore[misc]
        if type(self.rotation) is not int or self.rotation not in (0, *SIZES):
            self._reject("rotation", "16, 32, 64, 128, 256, or 0 for none")

    def rotation_of(self, k: int) -> int:
        size = min(self.rotation, k & -k)
        return size if size in SIZES else 0

    def fitted(self, k: int) -> Scheme:
        return replace(self, rotation=self.rotation_of(k))

    def to_dict(self) -> dict[str, Any]:
        content = super().to_dict()
        if not self.rotation:  # as before there was the choice
            del content["rotation"]
        return content

    def __str__(self) -> str:
        return super().__str__() + (f", rotation {self.rotation}" if self.rotation else "")

    def quantize(self, weight: Tensor, name: str = "weight", importance: Tensor | None = None) -> PackedWeight:
        size = self.rotation_of(weight.shape[1])
        if not size:
            return super().quantize(weight, name, importance)
        # Squares of rotated columns, where those of x do not go together: the mean over a block.
        if importance is not None and importance.shape == weight.shape[1:]:
            importance = importance.float().view(-1, size).mean(1).repeat_interleave(size)
        return Scheme.quantize(self.with_scales_of(weight.dtype), rotated(weight.detach(), size), name, importance)

    def dequantize(self, weight: Tensor, scales: Tensor, n: int, k: int, dtype: torch.dtype) -> Tensor:
        size = self.rotation_of(k)
        if not size:
            return super().dequantize(weight, scales, n, k, dtype)  # type: ignore[safe-super]
        dense = super().dequantize(weight, scales, n, k, torch.float32)  # type: ignore[safe-super]
        return rotated(dense, size).to(dtype)

    def constants(self, n: int, k: int) -> tuple[Any, ...]:
        size, constants = self.rotation_of(k), super().constants(n, k)
        if not size:
            return constants
        return (*constants, None, False, size) if constants else (False, size)  # row_scales, batch_invariant

    def needed_constants(self, n: int, k: int) -> tuple[Any, ...]:
        return self.constants(n, k) if self.rotation_of(k) else super().needed_constants(n, k)

    def _problem(self, **facts: Any) -> _host.Problem:
        return super()._problem(x_rotation=self.rotation_of(facts["k"]), **facts)

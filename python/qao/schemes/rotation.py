"""Optional Hadamard rotation of schemes with int8 activations; see ``qao.ops.rotation``."""

from __future__ import annotations

from dataclasses import dataclass, field, replace
from typing import Any

import torch
from torch import Tensor

from ..ops.rotation import SIZES, rotated
from .base import PackedWeight, Scheme, _host


@dataclass(frozen=True)
class RotatedActivations(Scheme):
    """Mixin for schemes with optionally rotated int8 activations. It precedes the weight format in the bases."""

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
        if not self.rotation:  # omitted if off, for readers of older versions
            del content["rotation"]
        return content

    def __str__(self) -> str:
        return super().__str__() + (f", rotation {self.rotation}" if self.rotation else "")

    def quantize(self, weight: Tensor, name: str = "weight", importance: Tensor | None = None) -> PackedWeight:
        size = self.rotation_of(weight.shape[1])
        if not size:
            return super().quantize(weight, name, importance)
        # Expected squares of rotated columns, for uncorrelated columns of x: the mean over a block.
        if importance is not None and importance.shape == weight.shape[1:]:
            importance = importance.float().view(-1, size).mean(1).repeat_interleave(size)
        return Scheme.quantize(self.with_scales_of(weight.dtype), rotated(weight.detach(), size), name, importance)

    def dequantize(self, weight: Tensor, scales: Tensor, n: int, k: int, dtype: torch.dtype) -> Tensor:
        size = self.rotation_of(k)
        if not size:
            return super().dequantize(weight, scales, n, k, dtype)  # type: ignore[safe-super]
        dense = super().dequantize(weight, scales, n, k, torch.float32)  # type: ignore[safe-super]
        return rotated(dense, size).to(dtype)

    def options(self, k: int) -> tuple[Any, ...]:
        size = self.rotation_of(k)
        return (False, size) if size else ()  # batch_invariant, x_rotation

    def _problem(self, **facts: Any) -> _host.Problem:
        return super()._problem(x_rotation=self.rotation_of(facts["k"]), **facts)

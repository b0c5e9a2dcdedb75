"""e4m3 weights with e4m3 activations: dynamic or static activation scales and their granularity."""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass
from typing import Any, ClassVar

import torch
from torch import Tensor

from .. import ops
from ..ops.packed_shape import SCALE_BLOCK
from .weight_formats import Float8Weight, _host


@dataclass(frozen=True)
class Float8Operands(Float8Weight):
    """e4m3 W and x. The granularity of x's scales follows W's, or is per tensor with a static ``activation_scale``.
    ``fast_accum`` selects the accumulation."""

    activation_scale: float | None = None
    fast_accum: bool = False

    word: ClassVar[str] = "fp8_fp8"
    activations: ClassVar[str] = "fp8"
    operands: ClassVar[tuple[str, ...]] = ("activation_scale",)

    def __post_init__(self) -> None:
        super().__post_init__()
        self._check_bool("fast_accum")

    def _check_scale(self) -> None:
        scale = self.activation_scale
        # Kernels read it as float32: a smaller one would be 0 or subnormal, a larger one infinite.
        bounds = torch.finfo(torch.float32)
        number = isinstance(scale, (int, float)) and not isinstance(scale, bool)
        if not (number and bounds.tiny <= scale <= bounds.max):  # type: ignore[operator]
            self._reject("activation_scale", f"a number from {bounds.tiny:.4g} to {bounds.max:.4g} (float32)")
        if self.granularity == "block":
            self._reject("granularity", '"row" or "tensor" with a static activation_scale')

    def _x_granularity(self) -> str:
        return self.granularity if self.activation_scale is None else "tensor"

    def __str__(self) -> str:
        notes = (", static activations" if self.activation_scale is not None else "") + (
            ", fast accumulation" if self.fast_accum else ""
        )
        return super().__str__() + notes

    def options(self, k: int) -> tuple[Any, ...]:
        x_group_size = {"row": -1, "tensor": 0, "block": SCALE_BLOCK}[self._x_granularity()]
        return (x_group_size, self.fast_accum) if x_group_size != -1 or self.fast_accum else ()

    def _problem(self, **facts: Any) -> _host.Problem:
        return super()._problem(
            x_scaling=self._x_granularity(),
            static_scale=self.activation_scale is not None,
            fast_accum=self.fast_accum,
            **facts,
        )

    @staticmethod
    def mm(x: Tensor, layer: Mapping[str, Any], constants: tuple[Any, ...]) -> Tensor:
        weight, scales, bias, x_scale = layer["qweight"], layer["scales"], layer["bias"], layer["activation_scale"]
        if x_scale is None and not constants:
            return ops.product(ops.FP8_FP8, (), x, weight, scales, bias)
        return ops.product(ops.FP8_FP8, constants, x, weight, scales, bias, x_scale)

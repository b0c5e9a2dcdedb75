"""e4m3 weights with e4m3 activations: dynamic or static activation scales and their granularity."""

from __future__ import annotations

from dataclasses import dataclass
from typing import Any, ClassVar

import torch

from ..ops.packed_shape import SCALE_BLOCK
from .weight_formats import Float8Weight, _host


@dataclass(frozen=True)
class Float8Operands(Float8Weight):
    """e4m3 W and x. The granularity of x's scales follows W's, or is per tensor with a static ``activation_scale``.
    ``fast_accum`` selects the accumulation."""

    activation_scale: float | None = None
    fast_accum: bool = False

    default_constants: ClassVar[tuple[int, ...]] = (-1, False)

    def __post_init__(self) -> None:
        super().__post_init__()
        self._check_bool("fast_accum")
        scale = self.activation_scale
        if scale is not None:
            # Kernels read it as float32: a smaller one would be 0 or subnormal, a larger one infinite.
            bounds = torch.finfo(torch.float32)
            number = isinstance(scale, (int, float)) and not isinstance(scale, bool)
            if not (number and bounds.tiny <= scale <= bounds.max):
                expected = f"a number from {bounds.tiny:.4g} to {bounds.max:.4g} (float32), or None for a scale found"
                self._reject("activation_scale", f"{expected} in each activation")
            if self.granularity == "block":
                self._reject("activation_scale", 'None with granularity "block"')

    def _x_granularity(self) -> str:
        return self.granularity if self.activation_scale is None else "tensor"

    def __str__(self) -> str:
        notes = (", static activations" if self.activation_scale is not None else "") + (
            ", fast accumulation" if self.fast_accum else ""
        )
        return super().__str__() + notes

    def constants(self, n: int, k: int) -> tuple[int, ...]:
        return {"row": -1, "tensor": 0, "block": SCALE_BLOCK}[self._x_granularity()], self.fast_accum

    def _problem(self, **facts: Any) -> _host.Problem:
        return super()._problem(
            x_scaling=self._x_granularity(),
            static_scale=self.activation_scale is not None,
            fast_accum=self.fast_accum,
            **facts,
        )

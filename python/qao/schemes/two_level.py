"""int4 weights with optional two-level scales."""

from __future__ import annotations

from dataclasses import dataclass, field
from typing import Any, ClassVar

from torch import Tensor

from ..quant_primitives.integer import QuantizedWeight
from ..quant_primitives.two_level import POWERS_OF_TWO, WHOLE_NUMBERS, Factors, quantize_int4_two_levels
from .weight_formats import Int4Weight, OnePass, _host


@dataclass(frozen=True)
class TwoLevelInt4Weight(Int4Weight):
    """int4 with optional two-level scales; ``factors`` names the option and defines the allowed factors."""

    factors: ClassVar[Factors]

    @property
    def _two_levels(self) -> bool:
        return bool(getattr(self, self.factors.option))

    def __post_init__(self) -> None:
        super().__post_init__()
        self._check_bool(self.factors.option)
        if self._two_levels and not self.symmetric:
            self._reject(self.factors.option, "False unless symmetric=True: zero points need sums of each group")

    def to_dict(self) -> dict[str, Any]:
        content = super().to_dict()
        if not self._two_levels:  # omitted if off, for readers of older versions
            del content[self.factors.option]
        return content

    def __str__(self) -> str:
        return super().__str__() + (f", {self.factors.option.replace('_', ' ')}" if self._two_levels else "")

    def _quantize(self, weight: Tensor, name: str, importance: Tensor | None = None) -> QuantizedWeight:
        if not self._has_row_scales(weight.shape[1]):
            return super()._quantize(weight, name, importance)
        dtype = self.scale_dtype_of(weight.dtype)
        options: Any = {"clip_search": self.clip_search, "importance": importance, "name": name}
        return quantize_int4_two_levels(weight, self.group_size, self.factors, scale_dtype=dtype, **options)

    def one_pass(self, n: int, k: int) -> OnePass | None:
        return None if self._has_row_scales(k) else super().one_pass(n, k)

    def _has_row_scales(self, k: int) -> bool:
        return self._two_levels and 0 < self.group_size < k

    def _row_scales(self, scales: Tensor) -> Tensor | None:
        return self.factors.row_scales(scales, str(self)) if self._two_levels and scales.shape[1] > 1 else None

    def _problem(self, **facts: Any) -> _host.Problem:
        return super()._problem(row_scales=self._has_row_scales(facts["k"]), **facts)


@dataclass(frozen=True)
class IntegerScaledInt4Weight(TwoLevelInt4Weight):
    """int4 with the option of scales that are integers times their row's scale."""

    integer_scales: bool = field(default=False, kw_only=True)

    factors: ClassVar[Factors] = WHOLE_NUMBERS


@dataclass(frozen=True)
class PowerScaledInt4Weight(TwoLevelInt4Weight):
    """int4 with the options of scales that are powers of two times their row's scale, and of fast accumulation."""

    power_of_two_scales: bool = field(default=False, kw_only=True)
    fast_accum: bool = field(default=False, kw_only=True)

    factors: ClassVar[Factors] = POWERS_OF_TWO

    def __post_init__(self) -> None:
        super().__post_init__()
        self._check_bool("fast_accum")
        if self.fast_accum and not (self.power_of_two_scales or (self.symmetric and self.group_size == -1)):
            one_scale = "power_of_two_scales=True, or symmetric=True and group_size=-1"
            self._reject("fast_accum", f"False unless {one_scale}: sums of each group are added in float32")

    def to_dict(self) -> dict[str, Any]:
        content = super().to_dict()
        if not self.fast_accum:  # omitted if off, for readers of older versions
            del content["fast_accum"]
        return content

    def __str__(self) -> str:
        return super().__str__() + (", fast accumulation" if self.fast_accum else "")

    def options(self, k: int) -> tuple[Any, ...]:
        return (False, True) if self.fast_accum else ()  # batch_invariant, fast_accum

    def _problem(self, **facts: Any) -> _host.Problem:
        return super()._problem(fast_accum=self.fast_accum, **facts)

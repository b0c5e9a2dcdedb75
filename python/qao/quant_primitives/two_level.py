"""Two-level scales for int4 weights: a group's scale is a small factor times the scale of its row.

The tensor core operand holds code times factor exactly. A GEMM then accumulates over all of K without scaling per group
and scales once in the epilogue (docs/kernels/sm90_ws.md). Source of the idea: Lin et al., QServe, arXiv:2405.04532.
"""

from __future__ import annotations

from abc import ABC, abstractmethod

import torch
from torch import Tensor
from torch.nn import functional

from .importance import estimate_importance
from .integer import QuantizedWeight, check_scales, check_values, chunks, quantize_int4, relative_error

# Significant bits of a row's scale. A 16-bit float then holds factor times scale: integer factors also have four.
_BITS = 4
_LAST_BIT = 1 << (24 - _BITS)  # the last of these bits in a float32's bit pattern
_TRIED = range(-1, 5)  # candidates of a row's scale, in steps of _LAST_BIT from the least that covers its groups


class Factors(ABC):
    """The set of factors that groups may have."""

    option: str  # the scheme's option that selects it
    allowed: str  # description for messages

    def row_scales(self, scales: Tensor, name: str) -> Tensor:
        """float32 [N]: a scale for each row, such that the row's ``scales`` [N, G] are allowed factors times it.

        Raises:
            ValueError: a row has no such scale; the message begins with ``name``.
        """
        if scales.is_meta:
            return torch.empty(scales.shape[0], dtype=torch.float32, device="meta")
        found = self._row_scales(scales)
        if (missing := found.isnan()).any():
            row = int(missing.nonzero()[0])
            raise ValueError(
                f"{name}: the scales of row {row} of {len(missing)} are not {self.allowed} times one scale, as "
                f"{self.option} requires. Quantize the float weight with this scheme, or use {self.option}=False."
            )
        return found

    @abstractmethod
    def _row_scales(self, scales: Tensor) -> Tensor:
        """The same with NaN for rows without such a scale."""

    @abstractmethod
    def search(
        self, groups: Tensor, wanted: Tensor, dtype: torch.dtype, weights: Tensor | None, by_error: bool
    ) -> Tensor:
        """Allowed scales [rows, G], exact in ``dtype``, for values [rows, G, size] with unconstrained scales
        ``wanted``; ``by_error`` minimizes the squared error of the codes, weighted by ``weights`` [G, size]."""


class _WholeNumbers(Factors):
    """Integers from -15 to 16: codes -8..7 times a factor fit in int8."""

    lowest, highest = -15, 16
    option = "integer_scales"
    allowed = "integers from -15 to 16"

    def _row_scales(self, scales: Tensor) -> Tensor:
        exact = scales.double()
        largest = exact.abs().amax(1, keepdim=True)
        result = torch.full_like(largest, float("nan"))
        for whole in range(1, self.highest + 1):
            unit = (largest / whole).float().double()
            times = (exact / unit).round()
            fits = (times * unit == exact) & (times >= self.lowest) & (times <= self.highest) & (times != 0)
            result = torch.where(result.isnan() & fits.all(1, keepdim=True), unit, result)
        return result.float().flatten()

    def _whole(self, scales: Tensor, unit: Tensor) -> Tensor:
        whole = (scales / unit).round_().clamp_(self.lowest, self.highest)
        return torch.where(whole == 0, torch.where(scales < 0, -1.0, 1.0), whole)

    def search(
        self, groups: Tensor, wanted: Tensor, dtype: torch.dtype, weights: Tensor | None, by_error: bool
    ) -> Tensor:
        """Takes the row's scale with the least distance from ``wanted``; with ``by_error`` each group then takes the
        better of the two integers around its scale."""
        full = wanted.abs().amax(1, keepdim=True) / self.highest
        # float16 subnormals are multiples of 2^-24.
        smallest = 2.0**-21 if dtype == torch.float16 else 2.0**-100
        bits = full.clamp(smallest).view(torch.int32).add(_LAST_BIT - 1).div(_LAST_BIT, rounding_mode="floor")
        best, unit = torch.full_like(full, float("inf")), full
        for step in _TRIED:
            tried = (bits + step).mul_(_LAST_BIT).view(torch.float32).clamp(smallest)
            squares = (self._whole(wanted, tried).mul_(tried) - wanted).square_()  # error per squared code
            cost = (squares if weights is None else squares.mul_(weights.sum(-1))).sum(1, keepdim=True)
            best, unit = torch.minimum(cost, best), torch.where(cost < best, tried, unit)
        near = self._whole(wanted, unit)
        if not by_error:
            return near * unit
        other = near + torch.where(wanted / unit < near, -1.0, 1.0)
        other = torch.where((other == 0) | (other < self.lowest) | (other > self.highest), near, other)
        better = _errors(groups, other * unit, weights) < _errors(groups, near * unit, weights)
        return torch.where(better, other, near) * unit


class _PowersOfTwo(Factors):
    """Powers of two from 2^-14 to 1 times a row's largest scale: codes -8..7 times a factor are normal e5m2 numbers."""

    option = "power_of_two_scales"
    allowed = "powers of two from 2^-14 to 1"
    lowest, highest = 2.0**-10, 2.0**4  # relative to a scale near the row's largest, with margin on both sides

    def _row_scales(self, scales: Tensor) -> Tensor:
        exact = scales.float()
        largest = exact.abs().amax(1, keepdim=True)
        times = exact.abs() / largest
        fits = (times == _power_of(times)) & (times >= 2.0**-14) & (exact == scales)
        return torch.where(fits.all(1), largest.flatten(), float("nan"))

    def _power(self, scales: Tensor, unit: Tensor) -> Tensor:
        return _power_of((scales / unit).abs_().mul_(2**0.5)).clamp_(self.lowest, self.highest).copysign_(scales)

    def search(
        self, groups: Tensor, wanted: Tensor, dtype: torch.dtype, weights: Tensor | None, by_error: bool
    ) -> Tensor:
        """Takes the row's scale with the least error among eight candidates, which cover one octave. With ``by_error``
        each group takes the better of the two powers of two around its scale."""
        smallest = 2.0**-21 if dtype == torch.float16 else 2.0**-100
        octave = _power_of(wanted.abs().amax(1, keepdim=True).clamp_(smallest))
        lowest = (smallest / octave).clamp_(self.lowest)
        best, scale = torch.full_like(octave, float("inf")), wanted
        for step in range(1 << (_BITS - 1)):
            unit = (octave.view(torch.int32) + step * _LAST_BIT).view(torch.float32)
            power = self._power(wanted, unit)
            power = power.abs().maximum(lowest).copysign_(power)
            if by_error:
                other = torch.where((power * unit).abs() > wanted.abs(), power / 2, power * 2)
                other = torch.where(other.abs() < lowest, power, other)
                errors, others = _errors(groups, power * unit, weights), _errors(groups, other * unit, weights)
                power, errors = torch.where(others < errors, other, power), torch.minimum(errors, others)
            else:  # error per squared code
                errors = (power * unit - wanted).square_().mul_(1 if weights is None else weights.sum(-1))
            cost = errors.sum(1, keepdim=True)
            best, scale = torch.minimum(cost, best), torch.where(cost < best, power * unit, scale)
        return scale


def _power_of(values: Tensor) -> Tensor:
    """The largest power of two not above each value, for positive float32."""
    return values.view(torch.int32).bitwise_and(0xFF << 23).view(torch.float32)


WHOLE_NUMBERS, POWERS_OF_TWO = _WholeNumbers(), _PowersOfTwo()


def quantize_int4_two_levels(
    weight: Tensor,
    group_size: int,
    factors: Factors,
    *,
    scale_dtype: torch.dtype,
    clip_search: bool = True,
    importance: Tensor | None = None,
    name: str = "weight",
) -> QuantizedWeight:
    """``quantize_int4`` of a symmetric weight with two-level scales, which are exact in ``scale_dtype``.

    It starts from the scales of ``quantize_int4`` and maps them to scales that ``factors`` allows. ``clip_search``
    chooses these by the squared error of the codes, weighted by ``importance`` as in ``quantize_int4``.

    Raises:
        ValueError: as ``quantize_int4``.
    """
    if importance is None and clip_search:
        importance = estimate_importance(weight)
    options = {"clip_search": clip_search, "importance": importance, "name": name}
    wide = quantize_int4(weight, group_size, symmetric=True, scale_dtype=torch.float32, **options)  # type: ignore[arg-type]
    k = weight.shape[1]
    size = k if group_size == -1 else group_size
    weights = None if importance is None else functional.pad(importance.to(weight.device).float(), (0, -k % size))
    q, scales = torch.empty_like(wide.q), torch.empty_like(wide.scales, dtype=scale_dtype)
    squares = torch.zeros(2, dtype=torch.float64, device=weight.device)  # sums of squares of the error and of W
    for rows, values in chunks(weight):
        squares[1] += values.square().sum(dtype=torch.float64)
        groups = functional.pad(values, (0, -k % size)).view(len(values), -1, size)
        of_groups = None if weights is None else weights.view(-1, size)
        scale = factors.search(groups, wide.scales[rows], scale_dtype, of_groups, clip_search)
        codes = _codes(groups, scale[:, :, None])
        squares[0] += torch.addcmul(groups, codes, scale[:, :, None], value=-1).square_().sum(dtype=torch.float64)
        q[rows] = codes.add_(8).view(len(values), -1)[:, :k].to(q.dtype)
        scales[rows] = scale.to(scale_dtype)
    check_values(squares, weight, name)
    check_scales(scales, weight, name)
    return QuantizedWeight(q, scales, None, relative_error(squares))


def _codes(groups: Tensor, scale: Tensor) -> Tensor:
    return groups.div(scale).round_().clamp_(-8, 7)


def _errors(groups: Tensor, scale: Tensor, weights: Tensor | None) -> Tensor:
    codes = _codes(groups, scale[:, :, None])
    squares = torch.addcmul(groups, codes, scale[:, :, None], value=-1, out=codes).square_()
    return (squares if weights is None else squares.mul_(weights)).sum(-1)

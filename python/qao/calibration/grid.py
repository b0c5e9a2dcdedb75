"""The values a quantised weight may have: scales and zero points, and rounding to them."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass

import torch
from torch import Tensor

from ..formats import Float8Weight, Int4Weight, Scheme
from ..quantizer import QuantizedWeight
from ..quantizer_fp8 import LARGEST_FP8, SCALE_BLOCK


@dataclass(frozen=True)
class Grid:
    """W = (q - zero) * scale, with scale and zero of float32 [N, G] and column j in group j // size.

    ``limits``: the smallest and the largest whole number q may be; None: q is e4m3.
    """

    scales: Tensor
    zeros: Tensor | None  # None: 0
    size: int
    limits: tuple[int, int] | None

    @classmethod
    def of(cls, quantized: QuantizedWeight, scheme: Scheme, n: int, k: int) -> Grid:
        """That of a weight [n, k] as a scheme quantised it."""
        scales = quantized.scales.float()
        if isinstance(scheme, Int4Weight):
            zeros = torch.full_like(scales, 8) if quantized.zeros is None else quantized.zeros.float()
            return cls(scales, zeros, k if scheme.size == -1 else scheme.size, (0, 15))
        if not isinstance(scheme, Float8Weight):
            return cls(scales.view(n, 1), None, k, (-127, 127))
        if scheme.granularity == "block":
            return cls(scales.repeat_interleave(SCALE_BLOCK, 0)[:n], None, SCALE_BLOCK, None)
        return cls(scales.expand(n, 1), None, k, None)

    def stacked(self, others: Sequence[Grid]) -> Grid:
        """One for the rows of several weights of one scheme."""
        grids = [self, *others]
        zeros = None if self.zeros is None else torch.cat([grid.zeros for grid in grids if grid.zeros is not None])
        return Grid(torch.cat([grid.scales for grid in grids]), zeros, self.size, self.limits)

    def split(self, rows: Sequence[int]) -> list[Grid]:
        """The inverse of ``stacked``."""
        scales = self.scales.split(list(rows))
        zeros: Sequence[Tensor | None] = [None] * len(rows) if self.zeros is None else self.zeros.split(list(rows))
        return [Grid(one, zero, self.size, self.limits) for one, zero in zip(scales, zeros, strict=True)]

    def columns(self, which: Tensor) -> tuple[Tensor, Tensor | None]:
        """Scales and zero points [columns, N] of these columns."""
        groups = which // self.size
        zeros = None if self.zeros is None else self.zeros.t()[groups]
        return self.scales.t()[groups], zeros

    def round(self, values: Tensor, scales: Tensor, *, codes: Tensor, errors: Tensor) -> None:
        """Writes the nearest codes of ``values``, W + zero * scale, and values less what those stand for.

        It runs once a column: on a GPU, time is the number of kernels.
        """
        torch.div(values, scales, out=codes)
        if self.limits is None:
            codes.copy_(codes.clamp_(-LARGEST_FP8, LARGEST_FP8).to(torch.float8_e4m3fn))
        else:
            codes.round_().clamp_(*self.limits)
        torch.addcmul(values, codes, scales, value=-1, out=errors)

    def dequantize(self, codes: Tensor) -> Tensor:
        """W [N, K] of codes [N, K]."""
        scales, zeros = self.columns(torch.arange(codes.shape[1], device=codes.device))
        return (codes if zeros is None else codes - zeros.t()) * scales.t()

    def stored(self, codes: Tensor) -> Tensor:
        """Codes in the dtype that ``Scheme.pack`` takes."""
        if self.limits is None:
            return codes.to(torch.float8_e4m3fn)
        return codes.to(torch.int8 if self.limits[0] < 0 else torch.uint8)

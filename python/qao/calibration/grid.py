"""Quantization grid of a weight: expanded scales, zero points and code limits."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass

import torch
from torch import Tensor

from ..ops.packed_shape import SCALE_BLOCK
from ..quant_primitives.integer import QuantizedWeight
from ..schemes import Float8Weight, Int4Weight, Scheme


@dataclass(frozen=True)
class Grid:
    """W = (q - zero) * scale, with float32 [N, G] scales and zeros, and column j in group j // size.

    ``limits``: the smallest and the largest integer code; None: q is e4m3.
    """

    scales: Tensor
    zeros: Tensor | None  # None: 0
    size: int
    limits: tuple[int, int] | None

    @property
    def dtype(self) -> torch.dtype:
        """Dtype of codes for ``Scheme.pack``."""
        if self.limits is None:
            return torch.float8_e4m3fn
        return torch.int8 if self.limits[0] < 0 else torch.uint8

    @classmethod
    def of(cls, quantized: QuantizedWeight, scheme: Scheme, n: int, k: int) -> Grid:
        """The grid of a weight [n, k] quantized by a scheme."""
        scales = quantized.scales.float()
        if isinstance(scheme, Int4Weight):
            zeros = torch.full_like(scales, 8) if quantized.zeros is None else quantized.zeros.float()
            return cls(scales, zeros, k if scheme.group_size == -1 else scheme.group_size, (0, 15))
        if not isinstance(scheme, Float8Weight):
            return cls(scales.view(n, 1), None, k, (-127, 127))
        if scheme.granularity == "block":
            return cls(scales.repeat_interleave(SCALE_BLOCK, 0)[:n], None, SCALE_BLOCK, None)
        return cls(scales.expand(n, 1), None, k, None)

    def stacked(self, others: Sequence[Grid]) -> Grid:
        """One grid for the stacked rows of several weights of one scheme."""
        grids = [self, *others]
        zeros = None if self.zeros is None else torch.cat([grid.zeros for grid in grids if grid.zeros is not None])
        return Grid(torch.cat([grid.scales for grid in grids]), zeros, self.size, self.limits)

    def columns(self, which: Tensor) -> tuple[Tensor, Tensor | None]:
        """Scales and zero points [columns, N] of the given columns."""
        groups = which // self.size
        zeros = None if self.zeros is None else self.zeros.t()[groups]
        return self.scales.t()[groups], zeros

    def dequantize(self, codes: Tensor) -> Tensor:
        """W [N, K] from codes [N, K]."""
        scales, zeros = (
            None if t is None else t.repeat_interleave(self.size, 1)[:, : codes.shape[1]]
            for t in (self.scales, self.zeros)
        )
        assert scales is not None
        return (codes if zeros is None else codes - zeros) * scales

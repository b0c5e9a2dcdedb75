"""Random quantized weights, one class per type of scale. All contenders of a cell use the same W."""

from __future__ import annotations

from abc import ABC, abstractmethod
from dataclasses import dataclass

import torch
from torch import Tensor


class Weight(ABC):
    """A matrix W [N, K] in few bits."""

    @abstractmethod
    def dequantize(self) -> Tensor:
        """W, bfloat16 [N, K]."""


@dataclass(frozen=True)
class GroupedWeight(Weight):
    """4 bits: W = (q - zeros) * scales, one scale and zero point per ``group_size`` columns.

    q: uint8 [N, K], values 0..15. scales: bfloat16 [N, K / group_size]. zeros: the same, integers; None: all 8.
    """

    q: Tensor
    scales: Tensor
    zeros: Tensor | None
    group_size: int

    @classmethod
    def random(cls, n: int, k: int, group_size: int, symmetric: bool, device: str) -> GroupedWeight:
        generator = _generator(n, k, device)
        groups = (n, k // group_size)
        q = torch.randint(0, 16, (n, k), dtype=torch.uint8, device=device, generator=generator)
        scales = _scales(groups, generator).bfloat16()
        zeros = torch.randint(5, 11, groups, device=device, generator=generator).bfloat16()
        return cls(q, scales, None if symmetric else zeros, group_size)

    def dequantize(self) -> Tensor:
        zeros = torch.full_like(self.scales, 8) if self.zeros is None else self.zeros
        grouped = self.q.view(*self.scales.shape, self.group_size).to(torch.bfloat16)
        return ((grouped - zeros[..., None]) * self.scales[..., None]).flatten(1)


@dataclass(frozen=True)
class RowWeight(Weight):
    """8 bits: W = q * scales. q: int8 or float8_e4m3fn [N, K]; scales: float32 [N]."""

    q: Tensor
    scales: Tensor

    @classmethod
    def random_int8(cls, n: int, k: int, device: str) -> RowWeight:
        generator = _generator(n, k, device)
        q = torch.randint(-127, 128, (n, k), dtype=torch.int8, device=device, generator=generator)
        return cls(q, _scales((n,), generator))

    @classmethod
    def random_fp8(cls, n: int, k: int, device: str) -> RowWeight:
        generator = _generator(n, k, device)
        q = torch.randn(n, k, device=device, generator=generator).mul_(100).clamp_(-448, 448)
        return cls(q.to(torch.float8_e4m3fn), _scales((n,), generator))

    @classmethod
    def nearest_int8(cls, weight: Weight) -> RowWeight:
        values = weight.dequantize().float()
        scales = values.abs().amax(dim=1) / 127
        return cls((values / scales[:, None]).round_().to(torch.int8), scales)

    def dequantize(self) -> Tensor:
        return (self.q.float() * self.scales[:, None]).bfloat16()


def _generator(n: int, k: int, device: str) -> torch.Generator:
    return torch.Generator(device).manual_seed(n + k)


def _scales(shape: tuple[int, ...], generator: torch.Generator) -> Tensor:
    return torch.rand(shape, device=generator.device, generator=generator).add_(0.5).mul_(0.01)

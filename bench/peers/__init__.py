"""What a layer is timed against. One file a peer; each computes y = x · Wᵀ for the same weight."""

from __future__ import annotations

from abc import ABC, abstractmethod
from dataclasses import dataclass
from typing import ClassVar

import torch
import torch.nn.functional as F
from torch import Tensor


@dataclass(frozen=True)
class GroupedWeight:
    """A 4-bit weight: W = (q - zeros) * scales, one scale and zero point per ``group_size`` columns.

    q: uint8 [N, K], values 0..15. scales: bfloat16 [N, K / group_size]. zeros: the same, integers; None: all 8.
    """

    q: Tensor
    scales: Tensor
    zeros: Tensor | None
    group_size: int

    @classmethod
    def random(cls, n: int, k: int, group_size: int, symmetric: bool, device: str) -> GroupedWeight:
        generator = torch.Generator(device).manual_seed(n + k)
        groups = (n, k // group_size)
        q = torch.randint(0, 16, (n, k), dtype=torch.uint8, device=device, generator=generator)
        scales = torch.rand(groups, device=device, generator=generator).add_(0.5).mul_(0.01).bfloat16()
        zeros = torch.randint(5, 11, groups, device=device, generator=generator).bfloat16()
        return cls(q, scales, None if symmetric else zeros, group_size)

    def dequantize(self) -> Tensor:
        """W, bfloat16 [N, K]."""
        zeros = torch.full_like(self.scales, 8) if self.zeros is None else self.zeros
        grouped = self.q.view(*self.scales.shape, self.group_size).to(torch.bfloat16)
        return ((grouped - zeros[..., None]) * self.scales[..., None]).flatten(1)


class Peer(ABC):
    """One implementation of one linear layer.

    ``tensors`` hold the weight in the peer's own layout; the bench clones them to rotate over cold copies.
    """

    name: ClassVar[str]
    max_m: ClassVar[int] = 1 << 30  # above, it is recorded as not run: slower than anyone would wait for
    may_fail: ClassVar[bool] = True  # a failure is recorded; without this it ends the bench
    tensors: tuple[Tensor, ...]

    @staticmethod
    def unavailable(device: str) -> str | None:
        """Why it cannot run on this machine; None if it can."""
        return None

    @abstractmethod
    def __init__(self, weight: GroupedWeight) -> None: ...

    @abstractmethod
    def run(self, x: Tensor, *tensors: Tensor) -> Tensor:
        """x: bfloat16 [M, K]; returns bfloat16 [M, N]."""


class Bf16(Peer):
    """The unquantised layer: F.linear, which is cuBLAS on a GPU and oneDNN on a CPU."""

    name = "bf16"
    may_fail = False

    def __init__(self, weight: GroupedWeight) -> None:
        self.tensors = (weight.dequantize(),)

    def run(self, x: Tensor, *tensors: Tensor) -> Tensor:
        return F.linear(x, *tensors)

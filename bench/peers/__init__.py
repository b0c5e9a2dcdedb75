"""Peers: baselines of a layer. Each computes y = x · Wᵀ for the same weight."""

from __future__ import annotations

import importlib.util
from abc import ABC, abstractmethod
from typing import ClassVar

import torch.nn.functional as F
from torch import Tensor

from ..weights import Weight


class Peer(ABC):
    """One implementation of one linear layer.

    ``tensors`` hold the weight in the peer's own layout; the bench clones them to rotate over cold copies.
    """

    name: ClassVar[str]
    max_m: ClassVar[int] = 1 << 30  # larger M is recorded as not run: too slow
    may_fail: ClassVar[bool] = True  # failures are recorded; if False, they end the benchmark
    tensors: tuple[Tensor, ...]

    @staticmethod
    def unavailable(device: str) -> str | None:
        """Why the peer cannot run on this machine; None if it can."""
        return None

    @abstractmethod
    def __init__(self, weight: Weight) -> None: ...

    @abstractmethod
    def run(self, x: Tensor, *tensors: Tensor) -> Tensor:
        """x: bfloat16 [M, K]; returns bfloat16 [M, N]."""


class Bf16(Peer):
    """The unquantized layer: F.linear, which is cuBLAS on a GPU and oneDNN on a CPU."""

    name = "bf16"
    may_fail = False

    def __init__(self, weight: Weight) -> None:
        self.tensors = (weight.dequantize(),)

    def run(self, x: Tensor, *tensors: Tensor) -> Tensor:
        return F.linear(x, *tensors)


def why_not_installed(module: str, package: str | None = None) -> str | None:
    """For ``Peer.unavailable``: None if ``module`` can be imported; ``package``: its name for pip."""
    return None if importlib.util.find_spec(module) else f"not installed: pip install {package or module}"

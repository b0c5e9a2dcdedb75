"""gemlite: Triton kernels. The first call at a shape autotunes.

This takes up to a minute on a GPU without a tuning table.
"""

from __future__ import annotations

from abc import abstractmethod
from typing import Any

import torch
from torch import Tensor

from ..weights import GroupedWeight, RowWeight, Weight
from . import Peer, why_not_installed


class _Gemlite(Peer):
    name = "gemlite"

    @staticmethod
    def unavailable(device: str) -> str | None:
        return why_not_installed("gemlite") if device == "cuda" else "CUDA only"

    def __init__(self, weight: Weight) -> None:
        from gemlite import helper

        layer = self.layer(helper, weight)
        self.tensors, self.meta = tuple(layer.get_tensor_args()), layer.get_meta_args()

    @staticmethod
    @abstractmethod
    def layer(helper: Any, weight: Any) -> Any:
        """A GemLiteLinear made by ``gemlite.helper``."""

    def run(self, x: Tensor, *tensors: Tensor) -> Tensor:
        from gemlite import forward_functional

        return forward_functional(x, None, list(tensors), self.meta)


class GemliteInt4(_Gemlite):
    @staticmethod
    def layer(helper: Any, weight: GroupedWeight) -> Any:
        packer = helper.A16W4_HQQ_INT(device=weight.q.device, dtype=torch.bfloat16)
        return packer.from_weights(weight.q, weight.scales, _zeros(weight))


class GemliteInt8Int8(_Gemlite):
    @staticmethod
    def layer(helper: Any, weight: RowWeight) -> Any:
        packer = helper.A8W8_int8_dynamic(device=weight.q.device, dtype=torch.bfloat16)
        return packer.from_weights(weight.q, scales=weight.scales[:, None])


class GemliteFp8Fp8(_Gemlite):
    @staticmethod
    def layer(helper: Any, weight: RowWeight) -> Any:
        packer = helper.A8W8_fp8_dynamic(device=weight.q.device, dtype=torch.bfloat16)
        return packer.from_weights(weight.q, scales=weight.scales[:, None])


class GemliteFp8Int4(_Gemlite):
    @staticmethod
    def layer(helper: Any, weight: GroupedWeight) -> Any:
        packer = helper.A8W4_HQQ_INT_dynamic(device=weight.q.device, dtype=torch.bfloat16)
        return packer.from_weights(weight.q, weight.scales, _zeros(weight))


def _zeros(weight: GroupedWeight) -> Tensor:
    """Zero points: gemlite has no symmetric format."""
    return torch.full_like(weight.scales, 8) if weight.zeros is None else weight.zeros

"""PyTorch's int4 operators: tinygemm on CUDA, its namesake on the CPU."""

from __future__ import annotations

import torch
from torch import Tensor

from ..weights import GroupedWeight
from . import Peer

_INNER_K_TILES = 8  # the widest loads of the CUDA kernel; the CPU one ignores it


def _scales_and_zeros(weight: GroupedWeight) -> Tensor:
    """[K / group_size, N, 2]: torch computes (q - 8) * scale + zero, so its zero is (8 - ours) * scale."""
    zeros = torch.zeros_like(weight.scales) if weight.zeros is None else (8 - weight.zeros) * weight.scales
    return torch.stack([weight.scales, zeros], dim=-1).transpose(0, 1).contiguous()


class TinyGemm(Peer):
    """``torch.ops.aten._weight_int4pack_mm``."""

    name = "tinygemm"
    max_m = 256

    @staticmethod
    def unavailable(device: str) -> str | None:
        return None if device == "cuda" else "CUDA only"

    def __init__(self, weight: GroupedWeight) -> None:
        pairs = weight.q[:, ::2] << 4 | weight.q[:, 1::2]
        packed = torch.ops.aten._convert_weight_to_int4pack(pairs, _INNER_K_TILES)
        self.tensors = (packed, _scales_and_zeros(weight))
        self.group_size = weight.group_size

    def run(self, x: Tensor, *tensors: Tensor) -> Tensor:
        packed, scales_and_zeros = tensors
        return torch.ops.aten._weight_int4pack_mm(x, packed, self.group_size, scales_and_zeros)


class TorchInt4(Peer):
    """``torch.ops.aten._weight_int4pack_mm_for_cpu``."""

    name = "torch_int4"
    max_m = 128

    @staticmethod
    def unavailable(device: str) -> str | None:
        return None if device == "cpu" else "CPU only"

    def __init__(self, weight: GroupedWeight) -> None:
        packed = torch.ops.aten._convert_weight_to_int4pack_for_cpu(weight.q.int(), _INNER_K_TILES)
        self.tensors = (packed, _scales_and_zeros(weight))
        self.group_size = weight.group_size

    def run(self, x: Tensor, *tensors: Tensor) -> Tensor:
        packed, scales_and_zeros = tensors
        return torch.ops.aten._weight_int4pack_mm_for_cpu(x, packed, self.group_size, scales_and_zeros)

"""torchao: tensor subclasses compiled by Inductor, with 8-bit weights only.

Its int4 with bfloat16 activations is ``tinygemm``, which torch4.py times; with 8-bit activations it needs further
packages or computes in bfloat16.
"""

from __future__ import annotations

from abc import abstractmethod
from typing import Any

import torch
import torch.nn.functional as F
from torch import Tensor, nn

from ..weights import RowWeight
from . import Peer, why_not_installed


class _TorchAo(Peer):
    name = "torchao"

    @staticmethod
    def unavailable(device: str) -> str | None:
        return why_not_installed("torchao") if device == "cuda" else "CUDA only"

    def __init__(self, weight: RowWeight) -> None:
        from torchao.quantization import quantize_

        n, k = weight.q.shape
        linear = nn.Linear(k, n, bias=False, device=weight.q.device, dtype=torch.bfloat16)
        quantize_(linear, self.config())
        self.like = linear.weight.data
        names, self.context = self.like.__tensor_flatten__()
        parts = {name: getattr(self.like, name) for name in names}
        parts |= {"qdata": weight.q, "scale": weight.scales[:, None]}
        self.names, self.tensors = tuple(parts), tuple(parts.values())
        # One graph for every M and layer exceeds Dynamo's default limit.
        torch._dynamo.config.recompile_limit = 1 << 10
        self.linear = torch.compile(F.linear, fullgraph=True, dynamic=False, mode="max-autotune-no-cudagraphs")

    @staticmethod
    @abstractmethod
    def config() -> Any:
        """The argument of ``quantize_``."""

    def run(self, x: Tensor, *tensors: Tensor) -> Tensor:
        parts = dict(zip(self.names, tensors, strict=True))
        like = self.like
        weight = type(like).__tensor_unflatten__(parts, self.context, like.size(), like.stride())
        return self.linear(x, weight)


class TorchAoInt8Int8(_TorchAo):
    @staticmethod
    def config() -> Any:
        from torchao.quantization import Int8DynamicActivationInt8WeightConfig

        return Int8DynamicActivationInt8WeightConfig()


class TorchAoFp8Fp8(_TorchAo):
    @staticmethod
    def config() -> Any:
        from torchao.quantization import Float8DynamicActivationFloat8WeightConfig, PerRow

        return Float8DynamicActivationFloat8WeightConfig(granularity=PerRow())

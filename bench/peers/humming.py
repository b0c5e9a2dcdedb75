"""humming: JIT-compiled kernels for any mix of operands. Tiles come from tables, without autotuning.

Its layers use bfloat16 scales, so scales of 8-bit weights are rounded here.
"""

from __future__ import annotations

from typing import Any, ClassVar

import torch
from torch import Tensor

from ..weights import GroupedWeight, RowWeight, Weight
from . import Peer, why_not_installed

_WEIGHT_TYPES = {torch.uint8: "uint4", torch.int8: "uint8", torch.float8_e4m3fn: "float8e4m3"}


class Humming(Peer):
    """``HummingLayer``, bfloat16 activations."""

    name = "humming"
    activations: ClassVar[str | None] = None  # format of quantized activations, one scale per token

    @staticmethod
    def unavailable(device: str) -> str | None:
        return why_not_installed("humming", "humming-kernels") if device == "cuda" else "CUDA only"

    def __init__(self, weight: Weight) -> None:
        from humming.layer import HummingLayer

        assert isinstance(weight, GroupedWeight | RowWeight)
        n, k = weight.q.shape
        config: dict[str, Any] = {"dtype": _WEIGHT_TYPES[weight.q.dtype]}
        if isinstance(weight, GroupedWeight):
            config |= {"group_size": weight.group_size, "has_zero_point": weight.zeros is not None}
        inputs = {"dtype": self.activations} if self.activations else None
        layer = HummingLayer(n, k, config, inputs, torch_dtype=torch.bfloat16).to(weight.q.device)
        layer.load_from_tensors(_checkpoint(weight))
        layer.transform()
        parameters = dict(layer.named_parameters())
        self.layer, self.names, self.tensors = layer, tuple(parameters), tuple(p.data for p in parameters.values())

    def run(self, x: Tensor, *tensors: Tensor) -> Tensor:
        from humming.forward import humming_forward

        given = dict(zip(self.names, tensors, strict=True))
        return humming_forward(self.layer.humming_config, x, locks=self.layer.locks, **given)


class HummingInt8(Humming):
    activations = "int8"


class HummingFp8(Humming):
    activations = "float8e4m3"


def _checkpoint(weight: GroupedWeight | RowWeight) -> dict[str, Tensor]:
    """Tensors of a stored layer: unsigned integers packed into int32 along K, zero points along N."""
    from humming.ops import pack_weight

    if isinstance(weight, RowWeight):
        codes = weight.q.int() + 128 if weight.q.dtype == torch.int8 else weight.q.view(torch.uint8).int()
        return {"weight": pack_weight(codes, 8), "weight_scale": weight.scales.bfloat16()[:, None]}
    tensors = {"weight": pack_weight(weight.q.int(), 4), "weight_scale": weight.scales}
    if weight.zeros is not None:
        tensors["zero_point"] = pack_weight(weight.zeros.int().T.contiguous(), 4).T.contiguous()
    return tensors

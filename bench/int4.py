"""The int4 operator and what it is measured against."""

from __future__ import annotations

import torch
from qao import ops
from torch import Tensor

from .peers import GroupedWeight, Peer
from .peers.aten import TinyGemm, TorchInt4


class Int4(Peer):
    """``torch.ops.qao.int4_mm``, called as a layer calls it."""

    name = "qao"
    may_fail = False

    def __init__(self, weight: GroupedWeight) -> None:
        n, k = weight.q.shape
        self.tensors = torch.ops.qao.pack_int4(weight.q, weight.scales, weight.zeros, weight.group_size)
        self.sizes = (n, k, weight.group_size)

    def run(self, x: Tensor, *tensors: Tensor) -> Tensor:
        packed, scales = tensors
        return ops.int4_mm(x, packed, scales, None, *self.sizes)


PEERS: tuple[type[Peer], ...] = (TinyGemm, TorchInt4)

"""The seven operators, called as a layer calls them, and the peers of each."""

from __future__ import annotations

import dataclasses
from collections.abc import Callable
from itertools import cycle
from typing import NamedTuple

import qao
import torch
from qao import ops, schemes
from torch import Tensor, nn

from .peers import Peer
from .peers.gemlite import GemliteFp8Fp8, GemliteFp8Int4, GemliteInt4, GemliteInt8Int8
from .peers.humming import Humming, HummingFp8, HummingInt8
from .peers.torch4 import TinyGemm, TorchInt4
from .peers.torch8 import IntMm, QLinear, ScaledMm, TorchInt8
from .peers.torchao import TorchAoFp8Fp8, TorchAoInt8Int8
from .timing import copies_of
from .weights import GroupedWeight, RowWeight, Weight


class _FourBits(Peer):
    may_fail = False

    def __init__(self, weight: GroupedWeight) -> None:
        self.tensors = torch.ops.qao.pack_int4(weight.q, weight.scales, weight.zeros, weight.group_size)
        self.sizes = (*weight.q.shape, weight.group_size)


class _EightBits(Peer):
    may_fail = False

    def __init__(self, weight: Weight) -> None:
        rows = weight if isinstance(weight, RowWeight) else RowWeight.nearest_int8(weight)
        self.tensors = (rows.q, rows.scales)


class Int4(_FourBits):
    name = "qao_int4"

    def run(self, x: Tensor, *tensors: Tensor) -> Tensor:
        return ops.int4_mm(x, *tensors, None, *self.sizes)


class Int8(_EightBits):
    name = "qao_int8"

    def run(self, x: Tensor, *tensors: Tensor) -> Tensor:
        return ops.int8_mm(x, *tensors, None)


class Fp8(_EightBits):
    name = "qao_fp8"

    def run(self, x: Tensor, *tensors: Tensor) -> Tensor:
        return ops.fp8_mm(x, *tensors, None)


class Int8Int8(_EightBits):
    name = "qao_int8_int8"

    def run(self, x: Tensor, *tensors: Tensor) -> Tensor:
        return ops.int8_int8_mm(x, *tensors, None, None)


class Int8Int4(_FourBits):
    name = "qao_int8_int4"

    def run(self, x: Tensor, *tensors: Tensor) -> Tensor:
        return ops.int8_int4_mm(x, *tensors, None, None, None, *self.sizes)


class Fp8Fp8(_EightBits):
    name = "qao_fp8_fp8"

    def run(self, x: Tensor, *tensors: Tensor) -> Tensor:
        return ops.fp8_fp8_mm(x, *tensors, None, None, -1, False)


class Fp8Int4(_FourBits):
    name = "qao_fp8_int4"

    def run(self, x: Tensor, *tensors: Tensor) -> Tensor:
        return ops.fp8_int4_mm(x, *tensors, None, None, *self.sizes)


class Scheme(NamedTuple):
    """The subject of one command-line word."""

    ours: type[Peer]
    peers: tuple[type[Peer], ...]
    random_weight: Callable[..., Weight]  # (n, k, device); for GroupedWeight (n, k, group_size, symmetric, ...)
    # ‖y - ref‖ / ‖ref‖ of a right result stays below this; a wrong layout is far above. Rounding x to eight bits costs
    # about 1 % in int8 and 2.5 % in e4m3.
    max_error: float = 0.02

    @property
    def grouped(self) -> bool:
        return self.random_weight == GroupedWeight.random


SCHEMES = {
    "int4": Scheme(Int4, (TinyGemm, TorchInt4, Humming, GemliteInt4), GroupedWeight.random),
    "int8": Scheme(Int8, (TorchInt8, Humming), RowWeight.random_int8),
    "fp8": Scheme(Fp8, (Humming,), RowWeight.random_fp8),
    "int8_int8": Scheme(
        Int8Int8, (IntMm, QLinear, HummingInt8, GemliteInt8Int8, TorchAoInt8Int8), RowWeight.random_int8
    ),
    "int8_int4": Scheme(Int8Int4, (Int4, Int8Int8, HummingInt8), GroupedWeight.random),
    "fp8_fp8": Scheme(
        Fp8Fp8, (ScaledMm, HummingFp8, GemliteFp8Fp8, TorchAoFp8Fp8), RowWeight.random_fp8, max_error=0.05
    ),
    "fp8_int4": Scheme(Fp8Int4, (Int4, HummingFp8, GemliteFp8Int4), GroupedWeight.random, max_error=0.05),
}

# The public schemes with their defaults, as in layers, by the same words.
LAYER_SCHEMES: dict[str, qao.Scheme] = {
    word: kind() for word, kind in schemes.SCHEMES.items() if "cuda" in kind.devices
}


def layer_in_turns(layer: qao.QuantLinear, device: str) -> tuple[int, Callable[[Tensor], Tensor]]:
    """The number of weight copies that calls rotate over, to defeat caches, and the call."""
    copies = copies_of(layer.qweight.nbytes, device)
    tensors = [{**layer._parameters} for _ in range(copies)]
    for own in tensors[1:]:
        own["qweight"] = nn.Parameter(layer.qweight.clone(), requires_grad=False)
    turns = cycle(tensors)
    return copies, lambda x: layer._mm(x, next(turns), layer._constants)


def without_search(scheme: qao.Scheme) -> qao.Scheme:
    """The scheme without clipping search, which gains nothing on random weights."""
    return dataclasses.replace(scheme, clip_search=False) if hasattr(scheme, "clip_search") else scheme  # type: ignore[type-var]

"""Quantization of fused experts of transformers 5, and their replacement by QuantExperts."""

from __future__ import annotations

from collections.abc import Iterable
from typing import Any

import torch
from torch import Tensor, nn

from ..nn.eligibility import projections_of
from ..nn.experts import QuantExperts, QuantProjection, expert_sizes, quantize_projection
from ..nn.linear import kernel_bias
from ..schemes import PackedWeight, Scheme
from .module_swap import put_module
from .walk import Layer


def pack(layer: Layer, weight: Tensor, device: torch.device | str | None) -> PackedWeight:
    """Quantizes the weight of a projection, in the layout of the float experts."""
    assert layer.scheme is not None
    origin: Any = layer.module
    return quantize_projection(weight, layer.scheme, origin.is_transposed, device, layer.row.name)


def replace(unit: list[Layer], device: torch.device | str | None) -> None:
    """Quantizes the experts of one layer and replaces them."""
    put(unit, {layer.key: pack(layer, layer.weight, device) for layer in unit})


def put(unit: list[Layer], packed: dict[str, PackedWeight]) -> None:
    """Replaces one layer's experts by QuantExperts with these weights, by projection name."""
    # Each projection has its own scheme, because the size of its rotation depends on its number of columns.
    schemes = {layer.key: layer.scheme for layer in unit if layer.scheme is not None}
    experts = assemble(unit[0].module, {key: (schemes[key], weights) for key, weights in packed.items()})
    for layer in unit:
        layer.row.relative_error = packed[layer.key].relative_error
        layer.module = experts.projections()[layer.key]
    for parent, attribute in unit[0].places:
        put_module(parent, attribute, experts)


def assemble(origin: Any, packed: dict[str, tuple[Scheme, PackedWeight]]) -> QuantExperts:
    """QuantExperts from weights by projection name, with the biases of ``origin``."""
    made = {}
    for key in projections_of(origin):
        scheme, weights = packed[key]
        weight = origin._parameters[key]
        count, n, k = expert_sizes(origin, weight)
        bias: Tensor | None = kernel_bias(origin._parameters.get(f"{key}_bias"), weights.qweight.device)
        made[key] = QuantProjection(count, n, k, scheme, weights, bias, weight.dtype)
    return QuantExperts(origin, *made.values())


class Arriving:
    """Experts of a model that is loaded tensor by tensor. Each projection is quantized when it arrives, so at most one
    is in float; the experts are replaced when both projections and their biases have arrived.

    Attributes:
        pending: projections that have not arrived, by the names of their Parameters.
    """

    def __init__(self, units: Iterable[list[Layer]] = ()) -> None:
        self._units = [unit for unit in units if all(layer.scheme is not None for layer in unit)]
        self.pending = {layer.row.name: layer for unit in self._units for layer in unit}
        self._packed: dict[str, PackedWeight] = {}

    def take(self, name: str, value: Tensor) -> None:
        layer = self.pending.pop(name)
        if value.shape != layer.weight.shape:
            expected = list(layer.weight.shape)
            raise ValueError(f"{name}: {list(value.shape)} in the checkpoint, but {expected} in the model")
        self._packed[name] = pack(layer, value, None)
        kept = nn.Parameter(torch.empty_like(value, device="meta"), requires_grad=False)  # keeps the shape and dtype
        kept._is_hf_initialized = True  # type: ignore[attr-defined]  # transformers would initialize it
        layer.module._parameters[layer.key] = kept

    def finish(self) -> None:
        """Replaces the experts; raises ValueError if only one projection of a layer arrived."""
        for unit in self._units:
            come = [layer for layer in unit if layer.row.name in self._packed]
            if come and len(come) < len(unit):
                missing = next(layer.row.name for layer in unit if layer not in come)
                raise ValueError(f"{missing}: missing in the checkpoint, which has {come[0].row.name}")
            if come:
                put(unit, {layer.key: self._packed.pop(layer.row.name) for layer in unit})
        self._units, self.pending = [], {}

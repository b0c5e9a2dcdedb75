"""Quantization of fused experts of transformers 5: checks, decisions and replacement by QuantExperts."""

from __future__ import annotations

from collections.abc import Callable, Iterable
from typing import Any

import torch
from torch import Tensor, nn

from ..nn.eligibility import is_fused, projections_of, unsupported_reason
from ..nn.experts import (
    QuantExperts,
    QuantProjection,
    expert_sizes,
    has_grouped_product,
    quantize_projection,
)
from ..nn.linear import kernel_bias
from ..quant_primitives.integer import check_finite
from ..schemes import PackedWeight, Scheme
from .auto_group_size import is_auto
from .module_swap import places_of, put_module
from .report import Row
from .rules import Selection
from .targets import COMPILED, Layer, byte_count, is_compiled, packed_bytes


def find(
    model: nn.Module,
    select: Selection,
    filter_fn: Callable[[nn.Module, str], bool] | None,
) -> list[list[Layer]]:
    """The two projections of each layer's experts, with the decision for them."""
    return [
        _decided(name, module, model, select, filter_fn)
        for name, module in model.named_modules()
        if is_fused(module) or isinstance(module, QuantExperts)
    ]


def _decided(
    name: str,
    module: Any,
    model: nn.Module,
    select: Selection,
    filter_fn: Callable[[nn.Module, str], bool] | None,
) -> list[Layer]:
    places = places_of(model, module)
    if isinstance(module, QuantExperts):
        return [_quantized(f"{name}.{key}", child, places) for key, child in module.projections().items()]
    layers = []
    for key in projections_of(module):
        weight = module._parameters.get(key)
        if weight is None:
            continue
        shape = expert_sizes(module, weight) if weight.dim() == 3 else tuple(weight.shape)
        row = Row(f"{name}.{key}", shape, "", bytes_before=byte_count(weight))
        layers.append(Layer("experts", module, row, places, elements=weight.numel(), x_dtype=weight.dtype))
    scheme = select(name, module)
    unsupported = unsupported_reason(module)
    for layer in layers:
        if scheme is None:
            layer.leave("excluded", "no scheme for it")
        elif filter_fn is not None and not filter_fn(module, name):
            layer.leave("excluded", "by the filter")
        elif unsupported is not None:
            layer.leave("untouched", unsupported.reason)
        elif not has_grouped_product(scheme):
            layer.leave("left", f"{scheme.word} has no grouped GEMM for experts: give them another scheme by name")
        elif is_auto(scheme):
            layer.leave("left", "group sizes are not chosen for experts: give them a scheme with a fixed one by name")
        elif is_compiled(layer):
            layer.leave("left", COMPILED)
        else:
            layer.scheme = scheme.fitted(layer.row.shape[-1])
            layer.row.status, layer.row.scheme = "quantized", str(layer.scheme)
    return layers


def _quantized(name: str, module: QuantProjection, places: list[tuple[nn.Module, str]]) -> Layer:
    row = Row(name, module.shape, "already quantized", str(module.scheme), bytes_before=packed_bytes(module))
    return Layer("experts", module, row, places, elements=torch.Size(module.shape).numel(), x_dtype=module.dtype)


def check(unit: list[Layer], device: torch.device | str | None) -> None:
    """Raises the errors of quantization up front."""
    for layer in unit:
        assert layer.scheme is not None
        origin: Any = layer.module
        weight = origin._parameters[_key(layer)]
        if not weight.is_meta:
            largest = check_finite(weight.detach(), layer.row.name)
            if largest > torch.finfo(layer.scheme.scale_dtype_of(weight.dtype)).max / 4:  # only a trial shows it
                quantize_projection(weight, layer.scheme, origin.is_transposed, device, layer.row.name)


def _key(layer: Layer) -> str:
    return layer.row.name.rpartition(".")[2]


def replace(unit: list[Layer], device: torch.device | str | None) -> None:
    """Quantizes the experts of one layer and replaces them."""
    put(unit, {_key(layer): _quantized_weight(layer, device) for layer in unit})


def _quantized_weight(layer: Layer, device: torch.device | str | None) -> PackedWeight:
    origin: Any = layer.module
    weight = origin._parameters[_key(layer)]
    assert layer.scheme is not None
    return quantize_projection(weight, layer.scheme, origin.is_transposed, device, layer.row.name)


def put(unit: list[Layer], packed: dict[str, PackedWeight]) -> None:
    """Replaces one layer's experts by QuantExperts with these weights, by projection name."""
    # Each projection has its own scheme, because the size of its rotation depends on its number of columns.
    schemes = {_key(layer): layer.scheme for layer in unit if layer.scheme is not None}
    experts = assemble(unit[0].module, {key: (schemes[key], weights) for key, weights in packed.items()})
    for layer in unit:
        layer.row.relative_error = packed[_key(layer)].relative_error
    for layer in unit:
        layer.module = experts.projections()[_key(layer)]
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
        assert layer.scheme is not None
        origin: Any = layer.module
        skeleton = origin._parameters[_key(layer)]
        if value.shape != skeleton.shape:
            raise ValueError(f"{name}: {list(value.shape)} in the checkpoint, but {list(skeleton.shape)} in the model")
        self._packed[name] = quantize_projection(value, layer.scheme, origin.is_transposed, None, name)
        kept = nn.Parameter(torch.empty_like(value, device="meta"), requires_grad=False)  # keeps the shape and dtype
        kept._is_hf_initialized = True  # type: ignore[attr-defined]  # transformers would initialize it
        origin._parameters[_key(layer)] = kept

    def finish(self) -> None:
        """Replaces the experts; raises ValueError if only one projection of a layer arrived."""
        for unit in self._units:
            come = [layer for layer in unit if layer.row.name in self._packed]
            if come and len(come) < len(unit):
                missing = next(layer.row.name for layer in unit if layer not in come)
                raise ValueError(f"{missing}: missing in the checkpoint, which has {come[0].row.name}")
            if come:
                put(unit, {_key(layer): self._packed.pop(layer.row.name) for layer in unit})
        self._units, self.pending = [], {}

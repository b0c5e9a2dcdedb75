"""The walk of a model: one traversal makes a record of each linear layer, embedding and projection of experts."""

from __future__ import annotations

import math
from collections import defaultdict
from collections.abc import Iterator, Mapping
from dataclasses import dataclass, field
from itertools import groupby
from typing import Any

import torch
from torch import Tensor, nn
from torch.nn.parameter import is_lazy

from ..nn.eligibility import Kind, Unsupported, kind_of, projections_of, unsupported_place, unsupported_reason
from ..nn.embedding import QuantEmbedding
from ..nn.experts import QuantExperts, expert_sizes
from ..nn.linear import QuantLinear
from ..nn.packed_module import PackedModule
from ..schemes import Scheme
from .excluded import reason_to_exclude
from .report import Row


@dataclass
class Layer:
    """A linear layer, an embedding or a projection of experts: what the walk found, and the decision for it."""

    kind: Kind  # also after the replacement
    module: nn.Module  # of a float projection: the experts
    row: Row
    places: list[tuple[nn.Module, str]]  # (parent, attribute)
    elements: int = 0  # of the float weight; 0 if counted in tied_to
    x_dtype: torch.dtype = torch.float32  # expected dtype of activations
    excluded: str | None = None  # why it is excluded by default
    unsupported: Unsupported | None = None  # why the module cannot be replaced anywhere
    unsupported_here: Unsupported | None = None  # why it cannot be replaced at its places
    scheme: Scheme | None = None  # set if it is to be quantized
    tied_to: Layer | None = None  # an earlier layer with the same weight

    @property
    def is_linear(self) -> bool:
        return self.kind in ("linear", "conv1d")

    @property
    def already_quantized(self) -> bool:
        return self.row.status == "already quantized"

    @property
    def name(self) -> str:
        """The name of the module, which for a projection is that of the experts."""
        return self.row.name.rpartition(".")[0] if self.kind == "experts" else self.row.name

    @property
    def key(self) -> str:
        """The name of a projection's Parameter in the experts."""
        return self.row.name.rpartition(".")[2]

    @property
    def weight(self) -> Tensor:
        """The float weight, [N, K] for linear layers; for a projection, in the layout of the experts."""
        weight: Tensor = getattr(self.module, self.key if self.kind == "experts" else "weight").detach()
        return weight.t() if self.kind == "conv1d" else weight

    def leave(self, status: str, note: str | None = None) -> None:
        self.scheme, self.row.status, self.row.scheme, self.row.note = None, status, None, note


@dataclass
class Walk:
    """The modules of a model in its order, and the layers among them."""

    modules: dict[str, nn.Module] = field(default_factory=dict)  # by all of their names
    parameters: list[tuple[str, str, nn.Parameter]] = field(default_factory=list)  # (module's name, key, Parameter)
    layers: list[Layer] = field(default_factory=list)

    @property
    def linears(self) -> list[Layer]:
        return [layer for layer in self.layers if layer.is_linear]

    @property
    def embeddings(self) -> list[Layer]:
        return [layer for layer in self.layers if layer.kind == "embedding"]

    @property
    def experts(self) -> list[list[Layer]]:
        """Projections, grouped by module."""
        projections = (layer for layer in self.layers if layer.kind == "experts")
        return [[*unit] for _, unit in groupby(projections, key=lambda layer: layer.name)]


def walk(model: nn.Module) -> Walk:
    """Meets every module of ``model`` once; a shared module has the first of its names."""
    found, met, in_fsdp = Walk(), set[int](), set[int]()  # ids of modules
    places: dict[int, list[tuple[nn.Module, str]]] = defaultdict(list)  # by the id of the child
    names: dict[int, list[str]] = defaultdict(list)  # the names of these places
    for name, module in model.named_modules(remove_duplicate=False):
        parent = found.modules.get(name.rpartition(".")[0])
        # By name: torch.distributed.fsdp is not available in every build.
        if id(parent) in in_fsdp or type(module).__name__ == "FullyShardedDataParallel":
            in_fsdp.add(id(module))
        found.modules[name] = module
        if id(module) in met:
            continue
        met.add(id(module))
        for attribute, child in module._modules.items():
            places[id(child)].append((module, attribute))
            names[id(child)].append(f"{name}.{attribute}" if name else attribute)
        found.parameters += [(name, key, value) for key, value in module._parameters.items() if value is not None]
        found.layers += _layers(name, module, places[id(module)], found.modules)
    for layer in found.layers:
        layer.unsupported_here = unsupported_place(layer.places, id(layer.module) in in_fsdp)
        if layer.kind != "experts":
            layer.row.aliases = [other for other in names[id(layer.module)] if other != layer.row.name]
    return found


def _layers(
    name: str, module: Any, places: list[tuple[nn.Module, str]], modules: Mapping[str, nn.Module]
) -> Iterator[Layer]:
    if isinstance(module, QuantExperts):
        for key, projection in module.projections().items():
            yield _quantized("experts", f"{name}.{key}", projection, places)
    elif isinstance(module, (QuantLinear, QuantEmbedding)):
        yield _quantized("linear" if isinstance(module, QuantLinear) else "embedding", name, module, places)
    elif kind := kind_of(module):
        unsupported = unsupported_reason(module)
        rows = [name]
        if kind == "experts":
            rows = [f"{name}.{key}" for key in projections_of(module) if module._parameters.get(key) is not None]
        for row in rows:
            layer = Layer(kind, module, Row(row, (), ""), places, unsupported=unsupported)
            _measure(layer, modules)
            yield layer


def _quantized(kind: Kind, name: str, module: PackedModule, places: list[tuple[nn.Module, str]]) -> Layer:
    row = Row(name, module.shape, "already quantized", str(module.scheme), bytes_before=packed_bytes(module))
    return Layer(kind, module, row, places, math.prod(module.shape), module.dtype)


def _measure(layer: Layer, modules: Mapping[str, nn.Module]) -> None:
    """Fills in what follows from the weight of a float layer."""
    module: Any = layer.module
    row, own = layer.row, module._parameters.get("weight")  # None if computed, and in experts
    if layer.kind == "embedding":
        row.shape = module.num_embeddings, module.embedding_dim
        row.bytes_before = 0 if own is None else byte_count(own)
        layer.leave("kept", "no quantized linear layer shares its weight")
    elif layer.kind == "experts" or not is_lazy(module.weight):
        weight = layer.weight
        stacked = layer.kind == "experts" and weight.dim() == 3
        row.shape = expert_sizes(module, weight) if stacked else tuple(weight.shape)
        row.bytes_before, layer.elements, layer.x_dtype = byte_count(weight), weight.numel(), weight.dtype
        if own is not None:
            layer.excluded = reason_to_exclude(row.name, row.shape, modules)


def byte_count(*tensors: Tensor) -> int:
    return sum(tensor.numel() * tensor.element_size() for tensor in tensors)


def packed_bytes(layer: PackedModule) -> int:
    return byte_count(*(tensor for tensor in layer.packed.tensors().values() if tensor is not None))

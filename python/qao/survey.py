"""What a model holds: its linear layers, what becomes of each, and the big weights that no linear layer owns."""

from __future__ import annotations

import re
from collections import defaultdict
from collections.abc import Callable, Iterator, Mapping
from dataclasses import dataclass, field

import torch
from torch import Tensor, nn

from .formats import Scheme
from .linear import QuantLinear, is_linear, linear_weight, obstacle
from .report import Row

Select = Callable[[str, nn.Module], Scheme | None]

BIG = 0.01  # share of the model's parameters from which a weight that stays as it is deserves a warning

# Parents whose own code reads the weight of these children instead of calling them.
_READ_BY_PARENT: dict[type[nn.Module], tuple[str, ...]] = {
    nn.MultiheadAttention: ("out_proj",),
    nn.TransformerEncoderLayer: ("linear1", "linear2"),
}


@dataclass
class Layer:
    """A linear module, every place where it hangs in the model, and what becomes of it."""

    module: nn.Module
    row: Row
    places: list[tuple[nn.Module, str]] = field(default_factory=list)  # (parent, attribute)
    scheme: Scheme | None = None  # set if it is to be quantised
    tied_to: Layer | None = None  # an earlier layer with the same weight
    elements: int = 0  # of the float weight; 0 if counted in tied_to
    x_dtype: torch.dtype = torch.float32  # that the layer will probably see

    def leave(self, status: str, note: str | None = None) -> None:
        self.scheme, self.row.status, self.row.scheme, self.row.note = None, status, None, note


def find_layers(model: nn.Module) -> list[Layer]:
    layers = {
        id(module): Layer(module, Row(name, (), ""))
        for name, module in model.named_modules()
        if is_linear(module) or isinstance(module, QuantLinear)
    }
    for parent_name, parent in model.named_modules():
        for attribute, child in parent._modules.items():
            layer = layers.get(id(child))
            if layer is None:
                continue
            layer.places.append((parent, attribute))
            name = f"{parent_name}.{attribute}" if parent_name else attribute
            if name != layer.row.name:
                layer.row.aliases.append(name)
    return list(layers.values())


def selector(model: nn.Module, scheme: Scheme | Mapping[str, Scheme | None] | Select) -> Select:
    """``scheme`` in its three forms as one function, which checks what it returns."""
    if isinstance(scheme, type) or not (isinstance(scheme, (Scheme, Mapping)) or callable(scheme)):
        hint = f"; did you mean {scheme.__name__}()?" if isinstance(scheme, type) else ""
        raise TypeError(
            "quantize_: scheme must be a scheme such as qao.Int4WeightOnly(), a dict of module names to schemes, or a "
            f"function of name and module, not {scheme!r}{hint}"
        )
    if isinstance(scheme, Scheme):
        return lambda name, module: scheme
    if isinstance(scheme, Mapping):
        names = [name for name, _ in model.named_modules(remove_duplicate=False)]
        for key in scheme:
            if not any(_matches(key, name) for name in names):
                raise ValueError(f"quantize_: no module of the model matches {key!r}. See model.named_modules().")

    def select(name: str, module: nn.Module) -> Scheme | None:
        if isinstance(scheme, Mapping):
            chosen = next((value for key, value in scheme.items() if _matches(key, name)), None)
        else:
            chosen = scheme(name, module)
        if chosen is not None and not isinstance(chosen, Scheme):
            raise TypeError(f"quantize_: the scheme of {name} must be a Scheme or None, not {chosen!r}")
        return chosen

    return select


def _matches(key: str, name: str) -> bool:
    if key.startswith("re:"):
        return re.fullmatch(key[3:], name) is not None
    return name == key or name.startswith(f"{key}.")


def decide(
    layer: Layer,
    select: Select,
    filter: Callable[[str, nn.Module], bool] | None,
) -> None:
    """Sets what becomes of a layer, as far as the layer and its parents tell."""
    module, row = layer.module, layer.row
    if isinstance(module, QuantLinear):
        row.shape = (module.out_features, module.in_features)
        row.status, row.scheme = "already quantized", str(module.scheme)
        row.bytes_before = packed_bytes(module)
        layer.elements, layer.x_dtype = module.out_features * module.in_features, module.dtype
        return
    weight = linear_weight(module)
    row.shape, row.bytes_before = tuple(weight.shape), byte_count(weight)
    layer.elements, layer.x_dtype = weight.numel(), weight.dtype
    scheme = select(row.name, module)
    reader = next((p for p, attribute in layer.places if attribute in _read_by(p)), None)
    reason = obstacle(module)
    if scheme is None:
        layer.leave("excluded", "no scheme for it")
    elif filter is not None and not filter(row.name, module):
        layer.leave("excluded", "by the filter")
    elif any(part.startswith("lora_") for part in row.name.split(".")):
        layer.leave("excluded", "a LoRA adapter, which is there to be trained")
    elif reader is not None:
        layer.leave("left", f"{type(reader).__name__} reads its weight itself instead of calling it")
    elif any(type(parent).__name__ == "OptimizedModule" for parent, _ in layer.places):
        layer.leave("left", "torch.compile was called on it and keeps it: quantise first, then compile")
    elif reason is not None:
        layer.leave("left", reason)
    else:
        layer.scheme, row.status, row.scheme = scheme, "quantized", str(scheme)


def _read_by(parent: nn.Module) -> tuple[str, ...]:
    return next((names for kind, names in _READ_BY_PARENT.items() if isinstance(parent, kind)), ())


def resolve_tied_weights(model: nn.Module, layers: list[Layer]) -> None:
    """Linears with one weight are quantised together, or not at all if anything else uses that weight."""
    users: dict[int, list[str]] = defaultdict(list)
    for name, module in model.named_modules():
        for parameter in module._parameters.values():
            if parameter is not None:
                users[id(parameter)].append(name)
    groups: dict[int, list[Layer]] = defaultdict(list)
    for layer in layers:
        tensors = layer.module._parameters
        weight = tensors.get("qweight", tensors.get("weight"))
        if weight is not None:
            groups[id(weight)].append(layer)
    for key, tied in groups.items():
        if len(users[key]) < 2:
            continue
        together = len(tied) == len(users[key]) and len({layer.scheme for layer in tied}) == 1
        for layer in tied:
            others = ", ".join(name for name in users[key] if name != layer.row.name)
            if layer.scheme is not None and not together:
                layer.leave("left", f"its weight is also that of {others}")
            layer.row.note = layer.row.note or f"shares its weight with {others}"
        for layer in tied[1:]:
            layer.tied_to, layer.elements, layer.row.bytes_before = tied[0], 0, 0


def find_untouched(model: nn.Module, layers: list[Layer], asked: Select | None) -> Iterator[Row]:
    """Fused expert tensors, and every other weight of at least 1 % of the parameters that is no embedding."""
    big = BIG * count_parameters(model)
    seen = {id(parameter) for layer in layers for parameter in layer.module.parameters()}
    for name, module in model.named_modules():
        for key, weight in module._parameters.items():
            if weight is None or id(weight) in seen or weight.dim() < 2 or not weight.is_floating_point():
                continue
            seen.add(id(weight))
            convolution = isinstance(module, nn.modules.conv._ConvNd)
            fused = weight.dim() == 3 and weight.shape[0] > 1 and not convolution
            if "Embedding" in type(module).__name__ or not (fused or weight.numel() >= big):
                continue
            note = "fused expert tensor" if fused else f"weight of {type(module).__name__}, not a linear layer"
            row = Row(f"{name}.{key}" if name else key, tuple(weight.shape), "untouched", note=note)
            row.bytes_before = byte_count(weight)
            if asked is not None and asked(name, module) is None:
                row.status = "excluded"
            yield row


def byte_count(*tensors: Tensor) -> int:
    return sum(tensor.numel() * tensor.element_size() for tensor in tensors)


def packed_bytes(layer: QuantLinear) -> int:
    return byte_count(*(tensor for tensor in layer.packed.tensors().values() if tensor is not None))


def count_parameters(model: nn.Module) -> int:
    """Elements of all parameters, each counted once; of a quantised weight, those of the float weight."""
    counts: dict[int, int] = {}
    for module in model.modules():
        counts.update((id(p), p.numel()) for p in module._parameters.values() if p is not None)
        if isinstance(module, QuantLinear):
            counts.update((id(tensor), 0) for tensor in module.packed.tensors().values())
            counts[id(module.qweight)] = module.out_features * module.in_features
    return sum(counts.values())

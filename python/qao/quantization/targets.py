"""Linear layers, embeddings and other big weights of a model, and the decision for each."""

from __future__ import annotations

import math
import re
from collections import defaultdict
from collections.abc import Callable, Iterator
from dataclasses import dataclass, field
from typing import Literal

import torch
from torch import Tensor, nn
from torch.nn.parameter import is_lazy

from ..nn.eligibility import SHARDED, is_embedding, is_linear, unsupported_for_embeddings, unsupported_reason
from ..nn.embedding import QuantEmbedding
from ..nn.linear import QuantLinear, linear_weight
from ..nn.packed_module import PackedModule
from ..schemes import Scheme
from .excluded import ROUTER, is_router
from .report import Row
from .rules import Select, Selection

BIG = 0.01  # fraction of the model's parameters from which an unquantized weight causes a warning

COMPILED = "torch.compile was called on it and keeps it: quantize first, then compile"

# Parents that read the weight of these children instead of calling them.
_READ_BY_PARENT: dict[type[nn.Module], tuple[str, ...]] = {
    nn.MultiheadAttention: ("out_proj",),
    nn.TransformerEncoderLayer: ("linear1", "linear2"),
}
# The same by class name, because the library is optional: RWKV rescales these weights in place.
_WRITTEN_BY_MODEL = {"RwkvSelfAttention": ("output",), "RwkvFeedForward": ("value",)}


@dataclass
class Layer:
    """A linear layer, an embedding or a projection of experts, its places in the model, and the decision for it."""

    kind: Literal["linear", "embedding", "experts"]  # also after the replacement
    module: nn.Module
    row: Row
    places: list[tuple[nn.Module, str]] = field(default_factory=list)  # (parent, attribute)
    scheme: Scheme | None = None  # set if it is to be quantized
    tied_to: Layer | None = None  # an earlier layer with the same weight
    elements: int = 0  # of the float weight; 0 if counted in tied_to
    x_dtype: torch.dtype = torch.float32  # expected dtype of activations
    in_fsdp: bool = False  # the weight is part of a flat parameter of FullyShardedDataParallel

    def leave(self, status: str, note: str | None = None) -> None:
        self.scheme, self.row.status, self.row.scheme, self.row.note = None, status, None, note


def find_layers(model: nn.Module) -> list[Layer]:
    return _find(model, "linear", lambda module: is_linear(module) or isinstance(module, QuantLinear))


def find_embeddings(model: nn.Module) -> list[Layer]:
    """All embeddings; those that are not quantized yet have the status "kept"."""
    embeddings = _find(model, "embedding", lambda module: is_embedding(module) or isinstance(module, QuantEmbedding))
    for layer in embeddings:
        module, row = layer.module, layer.row
        if isinstance(module, QuantEmbedding):
            _already_quantized(layer, module)
            continue
        row.shape = (module.num_embeddings, module.embedding_dim)  # type: ignore[assignment]
        row.bytes_before = byte_count(*(p for p in (module._parameters.get("weight"),) if p is not None))
        layer.leave("kept", "no quantized linear layer shares its weight")
    return embeddings


def _find(model: nn.Module, kind: Literal["linear", "embedding"], belongs: Callable[[nn.Module], bool]) -> list[Layer]:
    # By name: torch.distributed.fsdp is not available in every build.
    wrapped = (module for module in model.modules() if type(module).__name__ == "FullyShardedDataParallel")
    flat = {id(module) for wrapper in wrapped for module in wrapper.modules()}
    found = ((name, module) for name, module in model.named_modules() if belongs(module))
    layers = {id(module): Layer(kind, module, Row(name, (), "")) for name, module in found}
    for parent_name, parent in model.named_modules():
        for attribute, child in parent._modules.items():
            layer = layers.get(id(child))
            if layer is None:
                continue
            layer.places.append((parent, attribute))
            layer.in_fsdp = id(child) in flat
            name = f"{parent_name}.{attribute}" if parent_name else attribute
            if name != layer.row.name:
                layer.row.aliases.append(name)
    return list(layers.values())


def decide(
    layer: Layer,
    select: Selection,
    filter_fn: Callable[[nn.Module, str], bool] | None,
) -> None:
    """Decides on a layer from the layer itself and its parents."""
    module, row = layer.module, layer.row
    if isinstance(module, QuantLinear):
        _already_quantized(layer, module)
        return
    scheme = select(row.name, module)
    reader = next((p for p, attribute in layer.places if attribute in _read_by(p)), None)
    unsupported = unsupported_reason(module)
    if not is_lazy(module.weight):  # type: ignore[arg-type]
        weight = linear_weight(module)
        row.shape, row.bytes_before = tuple(weight.shape), byte_count(weight)
        layer.elements, layer.x_dtype = weight.numel(), weight.dtype
    if scheme is None:
        layer.leave("excluded", "no scheme for it")
    elif filter_fn is not None and not filter_fn(module, row.name):
        layer.leave("excluded", "by the filter")
    elif row.name in select.excluded:
        layer.leave("excluded", select.excluded[row.name])
    elif any(part.startswith("lora_") for part in row.name.split(".")):
        layer.leave("excluded", "a LoRA adapter, which must stay trainable")
    elif reader is not None:
        layer.leave("left", f"{type(reader).__name__} reads or writes its weight itself")
    elif layer.in_fsdp:
        layer.leave("left", SHARDED)
    elif is_compiled(layer):
        layer.leave("left", COMPILED)
    elif unsupported is not None:
        layer.leave("left", unsupported.reason)
    else:
        layer.scheme = scheme.fitted(row.shape[1])
        row.status, row.scheme = "quantized", str(layer.scheme)


def _already_quantized(layer: Layer, module: PackedModule) -> None:
    row = layer.row
    row.shape, row.status, row.scheme = module._sizes, "already quantized", str(module.scheme)
    row.bytes_before = packed_bytes(module)
    layer.elements, layer.x_dtype = math.prod(row.shape), module.dtype


def is_compiled(layer: Layer) -> bool:
    return any(type(parent).__name__ == "OptimizedModule" for parent, _ in layer.places)


def _read_by(parent: nn.Module) -> tuple[str, ...]:
    named = _WRITTEN_BY_MODEL.get(type(parent).__name__, ())
    return next((names for kind, names in _READ_BY_PARENT.items() if isinstance(parent, kind)), named)


def resolve_tied_weights(model: nn.Module, layers: list[Layer], embeddings: list[Layer], with_embeddings: bool) -> None:
    """Linear layers that share a weight are quantized together, or not at all if another module uses that weight.

    An embedding that uses it is quantized with them if ``with_embeddings`` is set and the embedding supports it.
    """
    users: dict[int, list[str]] = defaultdict(list)
    for name, module in model.named_modules():
        for parameter in module._parameters.values():
            if parameter is not None:
                users[id(parameter)].append(name)
    groups: dict[int, list[Layer]] = defaultdict(list)
    for layer in (*layers, *embeddings):
        tensors = layer.module._parameters
        weight = tensors.get("qweight", tensors.get("weight"))
        if weight is not None:
            groups[id(weight)].append(layer)
    for key, tied in groups.items():
        readers = [layer for layer in tied if layer.kind == "embedding"]
        linears = tied[: len(tied) - len(readers)]
        if len(users[key]) < 2 or not linears:
            continue
        scheme, others_read = linears[0].scheme, len(tied) < len(users[key])
        together = not others_read and all(layer.scheme == scheme for layer in linears)
        reason = ""
        if readers and together and scheme is not None:
            reason = _embedding_reason(linears, readers, scheme, with_embeddings)
        for layer in linears:
            others = _others(users[key], layer)
            if layer.scheme is not None and (reason or not together):
                layer.leave("left", f"its weight is also that of {others}{reason}")
            layer.row.note = layer.row.note or f"shares its weight with {others}"
        for layer in readers:
            if linears[0].scheme is not None:
                layer.scheme, layer.row.status, layer.row.scheme = scheme, "quantized", str(scheme)
            if layer.scheme is not None or layer.row.status != "kept" or reason:
                layer.row.note = f"shares its weight with {_others(users[key], layer)}{reason}"
        for layer in (*linears, *readers):
            if layer is not linears[0]:
                layer.tied_to, layer.elements, layer.row.bytes_before = linears[0], 0, 0


def _others(names: list[str], layer: Layer) -> str:
    return ", ".join(name for name in names if name != layer.row.name)


def _embedding_reason(linears: list[Layer], readers: list[Layer], scheme: Scheme, with_embeddings: bool) -> str:
    """Why embeddings keep the float weight that they share with linear layers of this scheme; "" if they do not."""
    reasons: list[object] = [unsupported_reason(layer.module) for layer in readers]
    reasons += [COMPILED for layer in readers if is_compiled(layer)]
    reasons += ["a linear layer uses it transposed" for layer in linears if not isinstance(layer.module, nn.Linear)]
    reason = next(filter(None, [*reasons, unsupported_for_embeddings(scheme)]), None)
    if reason is not None:
        return f"; {reason}"
    return "" if with_embeddings else "; embeddings=True quantizes both"


def find_untouched(model: nn.Module, layers: list[Layer], asked: Select | None) -> Iterator[Row]:
    """Fused expert tensors, and other weights, except embeddings, of at least 1 % of the parameters."""
    big = BIG * count_parameters(model)
    seen = {id(parameter) for layer in layers for parameter in layer.module.parameters()}
    modules = dict(model.named_modules())
    for name, module in modules.items():
        owner = modules[name.partition(".parametrizations.")[0]]  # the module itself, or the owner of a parametrization
        convolution = isinstance(owner, nn.modules.conv._ConvNd)
        for key, weight in module._parameters.items():
            if weight is None or is_lazy(weight) or id(weight) in seen:
                continue
            if weight.dim() < 2 or not weight.is_floating_point():
                continue
            seen.add(id(weight))
            three = weight.dim() == 3 and min(weight.shape) > 1 and not convolution
            if "Embedding" in type(owner).__name__ or not (three or weight.numel() >= big):
                continue
            kind = type(owner).__name__
            fused = three and re.search("expert|moe", f"{name}.{kind}", re.IGNORECASE)
            note = "fused expert tensor" if fused else f"weight of {kind}, not a linear layer"
            row = Row(f"{name}.{key}" if name else key, tuple(weight.shape), "untouched", note=note)
            row.bytes_before = byte_count(weight)
            if asked is not None and asked(name, module) is None:
                row.status = "excluded"
            elif is_router(name, row.shape, modules):
                row.status, row.note = "excluded", ROUTER
            yield row


def check_device(model: nn.Module, device: torch.device | str | None) -> None:
    """Raises ValueError if quantization on ``device`` needs missing data or would drop data."""
    if device is None:
        return
    to_meta = torch.empty(0, device=device).is_meta  # raises if the device does not exist
    for name, tensor in (*model.named_parameters(), *model.named_buffers()):
        if tensor.is_meta and not to_meta:
            name = name.removesuffix(".weight")
            raise ValueError(
                f"quantize_: {name} is on meta and has no data to quantize on {device}. Load the model first."
            )
        if to_meta and not tensor.is_meta:
            raise ValueError(f"quantize_: {name} has data, which device='meta' would drop. Use model.to('meta') first.")


def byte_count(*tensors: Tensor) -> int:
    return sum(tensor.numel() * tensor.element_size() for tensor in tensors)


def packed_bytes(layer: PackedModule) -> int:
    return byte_count(*(tensor for tensor in layer.packed.tensors().values() if tensor is not None))


def count_parameters(model: nn.Module) -> int:
    """Elements of all parameters, each counted once; a quantized weight counts as its float weight."""
    return sum(p.numel() for p in model.parameters() if not is_lazy(p)) + uncounted(model)


def uncounted(model: nn.Module, without_embeddings: bool = False) -> int:
    """Elements of quantized weights minus those of their packed tensors, to correct sums over ``parameters()``.

    ``without_embeddings``: weights of embeddings, including tied heads, count as zero.
    """
    counts: dict[int, int] = {}
    stored: dict[int, int] = {}
    embeddings: set[int] = set()
    for module in model.modules():
        if isinstance(module, PackedModule):
            stored.update((id(t), t.numel()) for t in module.packed.tensors().values() if t is not None)
            counts[id(module.qweight)] = math.prod(module.shape)
            if isinstance(module, QuantEmbedding):
                embeddings.add(id(module.qweight))
    if without_embeddings:
        counts.update(dict.fromkeys(embeddings, 0))
    return sum(counts.values()) - sum(stored.values())

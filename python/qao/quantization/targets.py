"""Decisions for the layers of a model, for those that share a weight, and for other big weights."""

from __future__ import annotations

import math
import re
from collections import defaultdict
from collections.abc import Callable, Iterable, Iterator

import torch
from torch import nn
from torch.nn.parameter import is_lazy

from ..nn.eligibility import unsupported_for_embeddings
from ..nn.embedding import QuantEmbedding
from ..nn.experts import has_grouped_product
from ..nn.packed_module import PackedModule
from ..schemes import Scheme
from .excluded import ROUTER, is_router
from .report import Row
from .rules import Select, Selection
from .walk import Layer, Walk, byte_count

BIG = 0.01  # fraction of the model's parameters from which an unquantized weight causes a warning


def decide(found: Walk, select: Selection, filter_fn: Callable[[nn.Module, str], bool] | None) -> None:
    """Decides on linear layers, then on experts, from each layer itself and its places."""
    for unit in (*([layer] for layer in found.linears), *found.experts):
        if unit[0].already_quantized:
            continue
        name, module = unit[0].name, unit[0].module
        scheme = select(name, module)
        for layer in unit:
            if scheme is None:
                layer.leave("excluded", "no scheme for it")
            elif filter_fn is not None and not filter_fn(module, name):
                layer.leave("excluded", "by the filter")
            elif name in select.excluded:
                layer.leave("excluded", select.excluded[name])
            elif any(part.startswith("lora_") for part in name.split(".")):
                layer.leave("excluded", "a LoRA adapter, which must stay trainable")
            else:
                _accept(layer, scheme)


def _accept(layer: Layer, scheme: Scheme) -> None:
    """Selects the layer for this scheme, or leaves it with the reason why it cannot be replaced."""
    experts = layer.kind == "experts"
    if experts and layer.unsupported is not None:
        layer.leave("untouched", layer.unsupported.reason)
    elif experts and not has_grouped_product(scheme):
        layer.leave("left", f"{scheme.word} has no grouped GEMM for experts: give them another scheme by name")
    elif unsupported := layer.unsupported_here or layer.unsupported:
        layer.leave("left", unsupported.reason)
    else:
        layer.scheme = scheme.fitted(layer.row.shape[-1])
        layer.row.status, layer.row.scheme = "quantized", str(layer.scheme)


def resolve_tied_weights(found: Walk, with_embeddings: bool) -> None:
    """Linear layers that share a weight are quantized together, or not at all if another module uses that weight.

    An embedding that uses it is quantized with them if ``with_embeddings`` is set and the embedding supports it.
    """
    layers = {layer.row.name: layer for layer in (*found.linears, *found.embeddings)}
    users: dict[int, list[str]] = defaultdict(list)
    groups: dict[int, list[Layer]] = defaultdict(list)
    for name, attribute, parameter in found.parameters:
        users[id(parameter)].append(name)
        if name in layers and attribute in ("weight", "qweight"):
            groups[id(parameter)].append(layers[name])
    for key, tied in groups.items():
        readers = [layer for layer in tied if layer.kind == "embedding"]
        linears = [layer for layer in tied if layer.is_linear]
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
    reasons: list[object] = [layer.unsupported for layer in readers]
    reasons += [layer.unsupported_here for layer in readers]
    reasons += ["a linear layer uses it transposed" for layer in linears if layer.kind == "conv1d"]
    reason = next(filter(None, [*reasons, unsupported_for_embeddings(scheme)]), None)
    if reason is not None:
        return f"; {reason}"
    return "" if with_embeddings else "; embeddings=True quantizes both"


def find_untouched(found: Walk, asked: Select | None) -> Iterator[Row]:
    """Fused expert tensors, and other weights, except embeddings, of at least 1 % of the parameters."""
    big = BIG * count_parameters(found)
    layers = (layer.module for layer in found.layers if layer.kind != "embedding")
    seen = {id(parameter) for module in layers for parameter in module.parameters()}
    for name, key, weight in found.parameters:
        if id(weight) in seen or is_lazy(weight) or weight.dim() < 2 or not weight.is_floating_point():
            continue
        seen.add(id(weight))
        # the module itself, or the owner of a parametrization
        owner = found.modules[name.partition(".parametrizations.")[0]]
        three = weight.dim() == 3 and min(weight.shape) > 1 and not isinstance(owner, nn.modules.conv._ConvNd)
        kind = type(owner).__name__
        if "Embedding" in kind or not (three or weight.numel() >= big):
            continue
        fused = three and re.search("expert|moe", f"{name}.{kind}", re.IGNORECASE)
        note = "fused expert tensor" if fused else f"weight of {kind}, not a linear layer"
        row = Row(f"{name}.{key}" if name else key, tuple(weight.shape), "untouched", note=note)
        row.bytes_before = byte_count(weight)
        if asked is not None and asked(name, found.modules[name]) is None:
            row.status = "excluded"
        elif is_router(name, row.shape, found.modules):
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


def count_parameters(found: Walk) -> int:
    """Elements of all parameters, each counted once; a quantized weight counts as its float weight."""
    sizes = {id(value): value.numel() for _, _, value in found.parameters if not is_lazy(value)}
    return sum(sizes.values()) + uncounted(found.modules.values())


def uncounted(modules: Iterable[nn.Module], without_embeddings: bool = False) -> int:
    """Elements of quantized weights minus those of their packed tensors, to correct sums over ``parameters()``.

    ``without_embeddings``: weights of embeddings, including tied heads, count as zero.
    """
    counts: dict[int, int] = {}
    stored: dict[int, int] = {}
    embeddings: set[int] = set()
    for module in modules:
        if isinstance(module, PackedModule):
            stored.update((id(t), t.numel()) for t in module.packed.tensors().values() if t is not None)
            counts[id(module.qweight)] = math.prod(module.shape)
            if isinstance(module, QuantEmbedding):
                embeddings.add(id(module.qweight))
    if without_embeddings:
        counts.update(dict.fromkeys(embeddings, 0))
    return sum(counts.values()) - sum(stored.values())

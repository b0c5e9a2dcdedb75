"""quantize_: in-place replacement of a model's linear layers by quantized layers."""

from __future__ import annotations

import math
import warnings
from collections.abc import Callable, Mapping
from dataclasses import dataclass

import torch
from torch import Tensor, nn

from ..nn.attributes import lost_attributes
from ..nn.eligibility import is_linear
from ..nn.embedding import QuantEmbedding, rename_ties
from ..nn.experts import QuantProjection
from ..nn.linear import QuantLinear, pack_weight
from ..nn.model_check import check_module
from ..nn.packed_module import PackedModule, Sharded
from ..ops import modes
from ..quant_primitives.importance import importance_part, importance_sources, inferred_importance
from ..quant_primitives.integer import check_finite
from ..schemes import Int4Weight, PackedWeight, Scheme
from . import fused_experts, listeners, targets
from .callbacks import layer_filter
from .module_swap import put_module
from .report import Report, Row
from .rules import Selection, alike, selector
from .walk import Layer, Walk, packed_bytes, walk


@modes.neutral()
def quantize_(
    model: nn.Module,
    scheme: Scheme | Mapping[str, Scheme | None] | Callable[..., Scheme | None],
    *,
    filter_fn: Callable[[nn.Module, str], bool] | None = None,
    embeddings: bool = False,
    device: torch.device | str | None = None,
    progress: bool = True,
    strict: bool = False,
    filter: Callable[..., bool] | None = None,
) -> Report:
    """Replaces the linear layers of ``model`` by QuantLinear, and fused experts by QuantExperts, in place.

    Layers that cannot be replaced without changing the model's behavior stay in float and are reported: layers with
    hooks or parametrizations, subclasses of nn.Linear with a forward that does more, weights tied to an embedding,
    layers with a parent that reads the weight directly. Expert routers (docs/quantize.md defines them) and layers with
    one output are excluded unless a scheme selects them explicitly. Already quantized layers are unchanged, with a
    warning if ``scheme`` has another scheme for them. Shared modules and tied weights stay shared. All errors below are
    checked before the first change.

    If it is interrupted (Ctrl-C, out of memory), every layer is either quantized or unchanged, a warning reports how
    many, and the model works. Another call with the same arguments quantizes the rest.

    Args:
        model: any module that contains linear layers (nn.Linear, or the Conv1D of transformers). Layers on meta become
            QuantLinear on meta, ready for ``load_state_dict(..., assign=True)``.
        scheme: one scheme for all layers; or a dict from names to schemes, or a function that returns a scheme or None.
            In a dict, a name selects that module and all modules inside it, ``"re:<pattern>"`` every module with a full
            match of its name, None excludes, the first match wins, and layers without a match are excluded (a router or
            a layer with one output needs a key that matches no other linear layers). Functions take a layer's module
            (of fused experts: the experts module) and its fully qualified name, as ``filter_fn``.
        filter_fn: function of a layer's module and its fully qualified name, in this order as in torchao; layers with
            a false result are excluded.
        embeddings: also quantize embeddings that share the weight of a linear layer with int4 or int8 weights (the tied
            head of many language models), as QuantEmbedding with one weight for both. False leaves such linear layers
            in float. Other embeddings always stay in float.
        device: quantize on this device, one layer at a time, and finally move the whole model there: for a model in
            host memory and a GPU that holds the result but not the float weights. None: each layer on its device.
        progress: show a progress bar after two seconds.
        strict: raise instead of warning if a requested layer cannot be quantized.
        filter: deprecated alias of ``filter_fn``.

    Returns:
        A Report with a row for every linear layer, every embedding that is quantized or affected by ``embeddings``, and
        every other big weight.

    Raises:
        TypeError: ``model`` is itself a linear layer, which cannot be replaced in place; ``scheme`` has another type;
            or ``filter_fn`` or a function as scheme takes (name, module).
        ValueError: a key of the dict matches no module; no layer is left to quantize, and layers are already quantized
            with another scheme; a weight holds NaN, Inf or values beyond the range of its scales; a weight on meta
            would go to a device, or the reverse; or ``strict`` is set and a requested layer cannot be quantized.
        RuntimeError, AssertionError: ``device`` does not exist.
    """
    filter_fn = layer_filter(filter_fn, filter, "quantize_")
    planned = plan(model, scheme, filter_fn, embeddings, device, strict)
    importance = importance_of(planned.layers)
    try:
        _replace([*units_of(planned.pending), *planned.experts], importance, device, progress)
    finally:
        planned.settle()
    if device is not None:
        model.to(device)
    return planned.finished()


@dataclass
class Plan:
    """Decisions for each layer of a model, before any change."""

    model: nn.Module
    layers: list[Layer]  # with their report rows
    pending: list[Layer]  # to be quantized
    experts: list[list[Layer]]  # projections of experts to be quantized, grouped by module
    report: Report

    def settle(self) -> None:
        """Renames ties and calls the listeners for the layers quantized so far, also after an interruption."""
        if any(isinstance(layer.module, PackedModule) for layer in self.layers):
            rename_ties(self.model)
            for listener in listeners.quantized:
                listener(self.model)

    def finished(self) -> Report:
        for layer in self.layers:
            _finish_row(layer)
        quantized = (layer for layer in self.layers if isinstance(layer.module, PackedModule))
        self.report.parameters_quantized = sum(layer.elements for layer in quantized)
        return self.report


def plan(
    model: nn.Module,
    scheme: Scheme | Mapping[str, Scheme | None] | Callable[..., Scheme | None],
    filter_fn: Callable[[nn.Module, str], bool] | None,
    embeddings: bool,
    device: torch.device | str | None,
    strict: bool,
) -> Plan:
    """Raises and warns as ``quantize_`` does, without changing the model."""
    check_module(model, "quantize_")
    if is_linear(model):
        raise TypeError(
            f"quantize_: the model is itself a {type(model).__name__} and cannot replace itself in place. Use "
            "`model = qao.QuantLinear.from_linear(model, scheme)`."
        )
    found = walk(model)
    select = selector(found, scheme)
    targets.decide(found, select, filter_fn)
    targets.resolve_tied_weights(found, embeddings)
    # A function handles only linear layers, so it is not called for other weights.
    asked = select if isinstance(scheme, Mapping) else None
    untouched = list(targets.find_untouched(found, asked))

    again = _asked_again(found, select, filter_fn)
    parameters = targets.count_parameters(found)
    readers, experts = found.embeddings, found.experts
    pending = [layer for layer in (*found.linears, *readers) if layer.scheme is not None]
    layers = [*found.linears, *(layer for unit in experts for layer in unit)]
    layers += [layer for layer in readers if embeddings or layer.row.status != "kept" or _was_asked_for(layer.tied_to)]
    report = Report(parameters, 0, [*(layer.row for layer in layers), *untouched])
    targets.check_device(model, device)
    for layer in pending:
        if layer.tied_to is None:
            _check_weight(layer, device)
    experts = [unit for unit in experts if all(layer.scheme is not None for layer in unit)]
    _complain_of_other_schemes(again, bool(pending or experts) and not strict)
    for unit in experts:
        for layer in unit:
            _check_weight(layer, device)
    _complain(report, strict)
    return Plan(model, layers, pending, experts, report)


def units_of(pending: list[Layer]) -> list[list[Layer]]:
    """Layers that share a weight, which are replaced together or not at all; the first of each list owns it."""
    units = {id(layer): [layer] for layer in pending if layer.tied_to is None}
    for layer in pending:
        if layer.tied_to is not None:
            units[id(layer.tied_to)].append(layer)
    return list(units.values())


def put(unit: list[Layer], packed: PackedWeight) -> None:
    """Replaces layers that share a weight by quantized ones."""
    first, *others = unit
    assert first.scheme is not None
    head = QuantLinear.from_packed(first.module, first.scheme, packed)
    made: list[QuantLinear | QuantEmbedding] = [head]
    for layer in others:
        kind = QuantEmbedding if layer.kind == "embedding" else QuantLinear
        made.append(kind.from_packed(layer.module, first.scheme, head.packed))
        made[-1].tie(head)
    for layer, module in zip(unit, made, strict=True):
        if isinstance(layer.module, Sharded):
            from ..distributed.styles import adopt  # here, because it imports torch.distributed

            adopt(module, layer.module)
    # Each float module is freed when its replacement exists, so memory never holds two models.
    for layer, module in zip(unit, made, strict=True):
        layer.row.relative_error = packed.relative_error
        if lost := lost_attributes(layer.module, module):
            note = f"a quantized layer has its own {', '.join(lost)}: the float layer's is not kept"
            layer.row.note = note if layer.row.note is None else f"{layer.row.note}; {note}"
        layer.module = module
        for parent, attribute in layer.places:
            put_module(parent, attribute, module)


def _asked_again(
    found: Walk,
    select: Selection,
    filter_fn: Callable[[nn.Module, str], bool] | None,
) -> list[Row]:
    """Rows of already quantized layers for which ``select`` has a scheme of another kind; adds a note to them."""
    rows = []
    for layer in (*found.linears, *(layer for unit in found.experts for layer in unit)):
        row, module = layer.row, layer.module
        if not isinstance(module, PackedModule):
            continue
        owner = found.modules[layer.name]
        scheme = select(layer.name, owner)
        if scheme is None or alike(module.scheme, scheme.fitted(row.shape[-1])):
            continue
        if filter_fn is None or filter_fn(owner, layer.name):
            row.note = f"requested as {scheme}, but already quantized"
            rows.append(row)
    return rows


def _complain_of_other_schemes(rows: list[Row], others: bool) -> None:
    """``others``: other layers can be quantized as requested."""
    if not rows:
        return
    text = "".join(f"\n  {row.name}: {row.scheme}, {row.note}" for row in rows[:5])
    text += f"\n  and {len(rows) - 5} more" if len(rows) > 5 else ""
    message = (
        f"quantize_: layers that are already quantized keep their scheme:{text}\nTo quantize them differently, reload "
        "the float model; qao.dequantize_(model) returns them to float with their rounding errors."
    )
    if not others:
        raise ValueError(f"{message} The model is unchanged.")
    warnings.warn(message, stacklevel=5)


def _was_asked_for(layer: Layer | None) -> bool:
    return layer is not None and layer.row.status == "left"


def _check_weight(layer: Layer, device: torch.device | str | None) -> None:
    """Raises the errors of quantization up front."""
    assert layer.scheme is not None
    weight = layer.weight
    if weight.is_meta:
        return
    largest = check_finite(weight, layer.row.name)
    # No scale exceeds the largest weight. If that is near the limit of scales, only a trial shows an overflow.
    if largest > torch.finfo(layer.scheme.scale_dtype_of(weight.dtype)).max / 4:
        if layer.kind == "experts":
            fused_experts.pack(layer, weight, device)
        else:
            pack_weight(weight, layer.scheme, device, layer.row.name)


def _complain(report: Report, strict: bool) -> None:
    problems = report.problems
    if not strict:
        problems = [
            row
            for row in problems
            if row.status == "untouched" or math.prod(row.shape) >= targets.BIG * report.parameters
        ]
    text = "".join(f"\n  {row.name} {list(row.shape)}: {row.note}" for row in problems)
    if problems and strict:
        raise ValueError(
            f"quantize_: strict, and these weights cannot be quantized:{text}\nLeave them out explicitly, for example "
            f"with {{{problems[0].name!r}: None, 're:.*': scheme}}. The model is unchanged."
        )
    messages = [f"these big weights stay as they are:{text}"] if problems else []
    if not any(row.status in ("quantized", "already quantized") for row in report.rows):
        text = "".join(f"\n  {reason}" for reason in report.reasons)
        messages.append(f"no layer was quantized.{text or ' The model has no linear layers.'}")
    if messages:
        warnings.warn("quantize_: " + "\n".join(messages), stacklevel=5)


def importance_of(layers: list[Layer]) -> dict[str, Tensor]:
    """Importance of int4 layers, estimated from other layers' float weights before these are quantized, by name."""
    named = {layer.row.name: layer for layer in layers if layer.is_linear and layer.scheme is not None}
    found = {}
    for layer in layers:
        name, others = layer.row.name, importance_sources(layer.row.name)
        weights = [named[other].weight for other in others if other in named]
        searched = isinstance(layer.scheme, Int4Weight) and layer.scheme.clip_search
        if not (searched and weights) or len(weights) < len(others) or any(weight.is_meta for weight in weights):
            continue
        parts = [importance_part(weight, name) for weight in weights]
        found[name] = inferred_importance(parts, layer.weight.shape[1])
    return {name: importance for name, importance in found.items() if importance is not None}


def _replace(
    units: list[list[Layer]],
    importance: Mapping[str, Tensor],
    device: torch.device | str | None,
    progress: bool,
) -> None:
    from tqdm import tqdm  # type: ignore[import-untyped]  # here, to keep `import qao` light

    done = 0
    try:
        for unit in tqdm(units, desc="quantize_", unit="layer", delay=2, disable=not progress):
            first = unit[0]
            assert first.scheme is not None
            name = first.row.name
            if first.kind == "experts":
                fused_experts.replace(unit, device)
            else:
                put(unit, pack_weight(first.weight, first.scheme, device, name, importance.get(name)))
            done += len(unit)
    except BaseException as error:
        warnings.warn(
            f"quantize_: {type(error).__name__} in {unit[0].row.name}: {done} of {sum(map(len, units))} layers are "
            "quantized, the others are unchanged. Call quantize_ again with the same arguments for the rest.",
            stacklevel=4,
        )
        raise


def _finish_row(layer: Layer) -> None:
    module, row = layer.module, layer.row
    if not isinstance(module, PackedModule):
        return
    row.bytes_after = 0 if layer.tied_to else packed_bytes(module)
    if isinstance(module, QuantEmbedding):
        row.kernel = f"{module.scheme.weights}_embedding"
        return
    experts = module.experts if isinstance(module, QuantProjection) and module.qweight.is_cuda else 0
    x_dtype = torch.float32 if layer.x_dtype == torch.float64 else layer.x_dtype
    kernels = [
        module.scheme.kernel(
            m,
            *module._sizes,
            x_dtype=x_dtype,
            scale_dtype=module.scales.dtype,
            device=module.qweight.device,
            experts=experts,
        )
        for m in (1, 512 * max(1, experts))
    ]
    row.kernel = " / ".join(dict.fromkeys(name for name in kernels if name)) or None

"""Output of ``save_pretrained`` for a quantized model: tensors, metadata, and quantization_config."""

from __future__ import annotations

import re
from collections.abc import Collection
from typing import Any

from torch import Tensor, nn

from ...checkpoints.native import header
from ...checkpoints.offloading import onloaded
from ...checkpoints.save_load import unshared
from ...nn import marker
from ...nn.eligibility import is_linear
from ...nn.linear import QuantLinear
from ...nn.packed_module import PackedModule, Sharded
from ...quantization.skeleton import describe
from .config import QaoConfig


def files_of(model: nn.Module) -> tuple[dict[str, Tensor], dict[str, str], Any]:
    """Tensors by name, metadata and quantization_config, in compressed-tensors if possible, else qao's format."""
    with onloaded(model):
        return _files_of(model)


def _files_of(model: nn.Module) -> tuple[dict[str, Tensor], dict[str, str], Any]:
    state: dict[str, Tensor] = dict(model.state_dict())
    sharded = any(isinstance(module, Sharded) for module in model.modules())
    if sharded:
        _gather(state)
    written = None if sharded else _compressed_tensors(model, state)
    _drop_conversions(model, state if written is None else written[0])
    if written is not None:
        return written[0], {}, written[1]
    quantized = {
        f"{name}.{key}"
        for name, module in model.named_modules()
        if isinstance(module, PackedModule)
        for key in module.packed.tensors()
    }
    _, aliases = unshared({name: tensor for name, tensor in state.items() if name in quantized})
    kept = {name: tensor for name, tensor in state.items() if name not in aliases}
    return kept, header(aliases), QaoConfig.of(model)


def _gather(state: dict[str, Any]) -> None:
    """Gather DTensors on every rank, as transformers does for float models. Shared tensors stay shared."""
    known: dict[tuple[int, Any], Tensor] = {}
    for name, tensor in state.items():
        if hasattr(tensor, "full_tensor"):
            key = tensor.to_local().data_ptr(), tensor.placements
            if key not in known:
                known[key] = tensor.full_tensor()
            state[name] = known[key]


def _drop_conversions(model: nn.Module, names: Collection[str]) -> None:
    """Remove conversions after which transformers 5 would not find the tensors of quantized layers again.

    On saving, it joins the float weights of q, k and v (Molmo2), and reads either form. It also renames tensors by
    patterns, some of which match only names of float weights in one direction (Inkling 2): then all tensors keep the
    names that the model has, which it reads too.
    """
    try:
        from transformers.conversion_mapping import get_model_conversion_mapping
        from transformers.core_model_loading import PrefixChange, WeightConverter, WeightRenaming, apply_renamings
    except ImportError:  # version 4, which converts nothing
        return
    conversions = getattr(model, "_weight_conversions", None)
    if conversions is None:  # the default of transformers for a model not loaded from files
        every = get_model_conversion_mapping(model, add_legacy=False)
        conversions = [one for one in every if not isinstance(one, PrefixChange)]
    layers = {name for name, module in model.named_modules() if isinstance(module, PackedModule)}
    packed = [name for name in names if name.rpartition(".")[0] in layers]

    def joins(conversion: Any) -> bool:
        if not isinstance(conversion, WeightConverter):
            return False
        back = conversion.reverse_transform()
        return any(back.rename_source_key(name)[1] is not None for name in packed)

    left = [one for one in conversions if not joins(one)]
    saving = [one.reverse_transform() for one in reversed(left) if isinstance(one, WeightRenaming)]
    loading = [one for one in get_model_conversion_mapping(model) if isinstance(one, WeightRenaming)]

    def returns(name: str) -> bool:
        stored: str = apply_renamings(name, saving)
        found: str = apply_renamings(stored, loading)
        return name == (stored if stored in names and found not in names else found)  # as transformers decides

    if not all(map(returns, packed)):
        left = []
    if len(left) < len(conversions):
        model._weight_conversions = left  # type: ignore[assignment]


def _compressed_tensors(model: nn.Module, state: dict[str, Tensor]) -> tuple[dict[str, Tensor], dict[str, Any]] | None:
    from ...checkpoints.compressed_tensors import write

    modules = dict(model.named_modules())
    layers = {name: module for name, module in modules.items() if isinstance(module, PackedModule)}
    tensors = dict(state)
    weights: set[int] = set()
    for name, layer in layers.items():
        # Loaders match modules of a class named Linear. They would skip a Conv1D, or a subclass such as FalconLinear,
        # and leave its weight random.
        if not isinstance(layer, QuantLinear) or layer.stands_for != "Linear" or layer.qweight.is_meta:
            return None
        if id(layer.qweight) in weights:  # a shared weight would be written once, under one of its names
            return None
        weights.add(id(layer.qweight))
        if write.can_write(layer.scheme, layer.in_features) or write.unread_by_engines(layer.scheme):
            return None
        for key in (*layer.packed.tensors(), marker.TRIPWIRE, marker.MARKER):
            tensors.pop(f"{name}.{key}", None)
        try:
            tensors.update({f"{name}.{key}": tensor for key, tensor in write.layer_tensors(layer).items()})
        except ValueError:  # GGUF has float zero points
            return None
    prefix = getattr(model, "base_model_prefix", "")
    schemes = {_target(name, prefix): scheme for name, scheme in describe(model).items()}
    floats = [_target(name, prefix) for name, module in modules.items() if is_linear(module)]
    return tensors, write.quantization_config(schemes, floats)


def _target(name: str, prefix: str) -> str:
    """Target pattern of a module for compressed-tensors, valid for the whole model and for its headless base."""
    inner = name.removeprefix(f"{prefix}.") if prefix else name
    return name if inner == name else rf"re:(.*\.)?{re.escape(inner)}$"

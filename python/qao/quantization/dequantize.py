"""dequantize_: replacement of quantized layers by float layers."""

from __future__ import annotations

import torch
from torch import nn

from ..nn.eligibility import unsupported_reason
from ..nn.embedding import rename_ties
from ..nn.experts import QuantExperts, QuantProjection
from ..nn.model_check import check_module
from ..nn.packed_module import PackedModule, Sharded
from ..ops import modes
from . import listeners
from .module_swap import put_module


@modes.neutral()
def dequantize_(model: nn.Module) -> nn.Module:
    """Replaces every quantized layer of ``model`` by a float layer with the dequantized weight, in place.

    A QuantLinear becomes an nn.Linear in its dtype (or the original Conv1D of transformers), a QuantEmbedding an
    nn.Embedding, QuantExperts the original fused experts. Models of transformers and diffusers are saved as float
    models again. Shared modules and weights stay shared. The quantization error of weights remains; activations are no
    longer quantized. All parameters start frozen. If it is interrupted (Ctrl-C, out of memory), every layer is either
    unchanged or in float, and another call converts the rest.

    Returns:
        ``model``.

    Raises:
        TypeError: ``model`` is itself a quantized layer, which cannot be replaced in place.
        ValueError: a layer has hooks, which would be lost, or is sharded (qao.distributed). The model is unchanged.
    """
    check_module(model, "dequantize_")
    if isinstance(model, PackedModule):
        raise TypeError(
            f"dequantize_: the model is itself a {type(model).__name__} and cannot replace itself in place. Use "
            "`model = model.to_float()`."
        )
    layers = {module: name for name, module in model.named_modules() if isinstance(module, PackedModule)}
    for layer, name in layers.items():
        if isinstance(layer, Sharded):
            raise ValueError(
                f"dequantize_: {name} is sharded ({layer.layout}). Dequantize before sharding. The model is unchanged."
            )
        if unsupported := unsupported_reason(layer):
            raise ValueError(f"dequantize_: {name}: {unsupported}. The model is unchanged.")
    experts = [module for module in model.modules() if isinstance(module, QuantExperts)]
    places = [(parent, key, child) for parent in model.modules() for key, child in parent._modules.items()]
    units: dict[tuple[nn.Parameter, torch.dtype], list[PackedModule]] = {}  # layers that share a weight
    for layer in layers:
        if isinstance(layer, QuantProjection):
            continue
        units.setdefault((layer.qweight, layer.dtype), []).append(layer)
    try:
        for unit in units.values():
            floats: dict[PackedModule, nn.Module] = {}
            weight: nn.Parameter | None = None
            for layer in unit:
                floats[layer] = layer.to_float(weight)
                weight = floats[layer].weight  # type: ignore[assignment]
            for parent, attribute, child in places:
                if child in floats:
                    put_module(parent, attribute, floats[child])
        for some in experts:
            made = some.to_float()
            for parent, attribute, child in places:
                if child is some:
                    put_module(parent, attribute, made)
    finally:
        rename_ties(model)
    for listener in listeners.dequantized:
        listener(model)
    return model

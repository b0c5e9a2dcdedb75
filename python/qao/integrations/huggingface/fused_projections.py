"""diffusers' ``fuse_qkv_projections`` of quantized layers: the joined layer holds their codes and scales."""

from __future__ import annotations

import sys
import warnings
from collections.abc import Sequence
from typing import Any

import torch
from torch import Tensor, nn

from ...nn.linear import QuantLinear
from ..wrapping import wrap

# The layers that diffusers makes, and the layers that each of them joins.
_JOINED = {
    "to_qkv": ("to_q", "to_k", "to_v"),
    "to_kv": ("to_k", "to_v"),
    "to_added_qkv": ("add_q_proj", "add_k_proj", "add_v_proj"),
    "to_added_kv": ("add_k_proj", "add_v_proj"),
}


def register() -> None:
    """Called after diffusers has defined an attention class; subclasses may replace the method."""
    for module, name in (("attention", "AttentionModuleMixin"), ("attention_processor", "Attention")):
        base: Any = getattr(sys.modules.get(f"diffusers.models.{module}"), name, None)
        if base is None:
            continue
        base.__init_subclass__ = classmethod(_wrap_own)
        for kind in (base, *base.__subclasses__()):
            _wrap_own(kind)


def _wrap_own(kind: Any, /, **_: Any) -> None:
    if "fuse_projections" in vars(kind):
        wrap(kind, "fuse_projections", _joining)


def _joining(upstream: Any) -> Any:
    @torch.no_grad()
    def fuse_projections(self: Any, *args: Any, **options: Any) -> None:
        children, parts = self._modules, {name for names in _JOINED.values() for name in names}
        own = {name: children[name] for name in parts if children.get(name) is not None}
        if not any(type(layer) is QuantLinear for layer in own.values()):
            upstream(self, *args, **options)
            return
        # It reads weights, which would dequantize them: layers without data show which ones it joins.
        children.update({name: _without_data(layer) for name, layer in own.items()})
        try:
            upstream(self, *args, **options)
        finally:
            children.update(own)
        for name, names in _JOINED.items():
            made = children.get(name)
            if made is not None and made.weight.is_meta:
                children[name] = _join([own[part] for part in names], name).train(self.training)

    return fuse_projections


def _without_data(layer: Any) -> nn.Linear:
    dtype = layer.dtype if isinstance(layer, QuantLinear) else layer.weight.dtype
    return nn.Linear(layer.in_features, layer.out_features, layer.bias is not None, device="meta", dtype=dtype)


def _join(layers: Sequence[Any], name: str) -> nn.Module:
    """One layer with the rows of all: quantized and equal bit for bit, or else in float, with a warning."""
    biases = None if layers[0].bias is None else torch.cat([layer.bias for layer in layers])
    first = layers[0]
    if all(type(layer) is QuantLinear and layer.scheme == first.scheme for layer in layers):
        unpacked = [layer.scheme.unpack(layer.qweight, layer.scales, *layer.shape) for layer in layers]
        if all(len(scales) == len(q) for q, scales, _ in unpacked):
            q, scales, zeros = (_rows(tensors) for tensors in zip(*unpacked, strict=True))
            return QuantLinear.from_quantized(q, scales, zeros, biases, scheme=first.scheme, dtype=first.dtype)  # type: ignore[arg-type]
    warnings.warn(
        f"fuse_projections: {name} stays in float, because the layers it joins have different schemes or scales for "
        "several rows. Call it before quantize_.",
        stacklevel=4,
    )
    floats = [layer.dequantize(layer.dtype) if isinstance(layer, QuantLinear) else layer.weight for layer in layers]
    made = nn.Linear(first.in_features, sum(map(len, floats)), biases is not None, device="meta")
    made.weight = nn.Parameter(torch.cat(floats), requires_grad=False)
    made.bias = None if biases is None else nn.Parameter(biases, requires_grad=False)  # type: ignore[assignment]
    return made


def _rows(tensors: Sequence[Tensor | None]) -> Tensor | None:
    given = [tensor for tensor in tensors if tensor is not None]
    return torch.cat(given) if given else None

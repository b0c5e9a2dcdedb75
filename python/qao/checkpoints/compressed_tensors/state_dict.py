"""Translation of compressed-tensors entries in a state dict that a quantized layer loads.

``save_pretrained`` writes most schemes in that layout, and trainers pass it to ``load_state_dict``.
"""

from __future__ import annotations

from dataclasses import replace
from pathlib import Path
from typing import Any

import torch
from torch import Tensor

from ...nn import marker
from ...schemes import Int4Weight
from ..base import CheckpointError
from ..files import HeldTensors
from ..settings import Settings
from .config import groups_of
from .read import read_layer
from .write import can_write, quantization_config

__all__ = ["translate"]


def translate(layer: Any, state_dict: dict[str, Any], prefix: str) -> None:
    """Replace the compressed-tensors entries under ``prefix`` with those of ``layer``, a PackedModule.

    Raises:
        ValueError: the entries have another scheme or size, or are incomplete or damaged.
    """
    name, scheme = prefix.removesuffix(".") or "layer", layer.scheme
    keys = [key for key in state_dict if key.startswith(f"{prefix}weight") or key.startswith(f"{prefix}input_")]
    tensors = {f"{name}.{key.removeprefix(prefix)}": state_dict[key] for key in keys}
    reason = can_write(scheme)
    if reason is not None or any(type(one) not in (Tensor, torch.nn.Parameter) for one in tensors.values()):
        raise ValueError(
            f"{name}: the checkpoint holds entries of compressed-tensors, and this {layer._label()} "
            f"cannot load them: {reason or 'they are sharded'}. Use the model that the checkpoint was made from."
        )
    config = Settings(quantization_config({name: scheme}, []), f"{name} ({scheme})")
    found = read_layer(HeldTensors(Path("state dict"), tensors), name, groups_of(config)[0])
    stored = marker.Marker(scheme.to_dict(), found.out_features, found.in_features, layer.dtype)
    marker.check(stored, layer._marker(), name, layer._label())
    plain = found.read()
    if isinstance(scheme, Int4Weight):
        scheme = replace(scheme, scale_dtype=plain.scales.dtype)
    if found.scheme.activation_scale is not None:
        scheme = found.scheme
    try:
        packed = scheme.pack(*plain)
    except (ValueError, RuntimeError) as error:
        raise CheckpointError(f"{name}: {error}") from error
    for key in keys:
        del state_dict[key]
    state_dict.update({prefix + key: tensor for key, tensor in packed.tensors().items() if tensor is not None})

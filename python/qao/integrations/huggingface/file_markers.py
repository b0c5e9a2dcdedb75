"""Markers of quantized layers in files or in a state dict before a library loads them."""

from __future__ import annotations

import os
from collections.abc import Iterable, Mapping
from typing import Any

import torch
from torch import Tensor

from ...nn import marker
from ...nn.marker import Marker

__all__ = ["in_files", "in_state_dict"]


def in_state_dict(state: Mapping[str, Any]) -> dict[str, Marker]:
    """Markers by layer name.

    Raises:
        ValueError: a marker is unreadable or from a newer qao.
    """
    layers = ((marker.layer_of(key), key) for key in state)
    return {layer: marker.decode(state[key], key) for layer, key in layers if layer is not None}


def in_files(files: Iterable[str | os.PathLike[str]]) -> dict[str, Marker]:
    """As ``in_state_dict``, for safetensors and ``torch.save`` files. Reads only the markers."""
    found: dict[str, Marker] = {}
    for file in files:
        if os.fspath(file).endswith(".safetensors"):
            found.update(in_state_dict(_in_safetensors(file)))
        else:
            state = torch.load(file, map_location="cpu", weights_only=True, mmap=True)
            found.update(in_state_dict(state))
    return found


def _in_safetensors(file: str | os.PathLike[str]) -> dict[str, Tensor]:
    from safetensors import safe_open

    with safe_open(file, framework="pt") as opened:
        return {key: opened.get_tensor(key) for key in opened.keys() if marker.layer_of(key) is not None}  # noqa: SIM118

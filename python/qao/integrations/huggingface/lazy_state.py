"""State dict of an open checkpoint in the form that transformers' loaders take."""

from __future__ import annotations

from typing import Any

import torch
from torch import Tensor

from ...nn import marker

__all__ = ["LazyValue", "lazy_state"]


def lazy_state(checkpoint: Any) -> dict[str, Any]:
    """The tensors of a ``qao.checkpoints`` checkpoint, read lazily, and the marker of each layer."""
    state: dict[str, Any] = {name: LazyValue(tensor) for name, tensor in checkpoint.state_dict().items()}
    for name, layer in checkpoint.layers.items():
        state.update(_entries(name, layer))
    return state


def _entries(name: str, layer: Any) -> dict[str, Tensor]:
    """State dict entries of a layer, including sizes that packed tensors do not show."""
    stored = marker.Marker(layer.scheme.to_dict(), layer.out_features, layer.in_features, torch.float32, layer.experts)
    return {f"{name}.{marker.MARKER}": marker.encode(stored), f"{name}.{marker.TRIPWIRE}": marker.tripwire()}


class LazyValue:
    """A lazy tensor for transformers' loaders: version 5 uses ``[...]``, version 4 ``.to``."""

    def __init__(self, lazy: Any) -> None:
        self._lazy = lazy
        self.shape: torch.Size = lazy.shape
        self.dtype: torch.dtype = lazy.dtype
        self.device = torch.device("cpu")

    def __getitem__(self, index: Any) -> Tensor:
        return self._lazy[index]  # type: ignore[no-any-return]

    def to(self, *args: Any, **kwargs: Any) -> Tensor:
        tensor: Tensor = self._lazy.load()
        return tensor.to(*args, **kwargs)

    def get_shape(self) -> list[int]:  # part of the safetensors slice interface
        return list(self.shape)

    def is_floating_point(self) -> bool:
        return self.dtype.is_floating_point

    def numel(self) -> int:
        return self.shape.numel()

"""torch.distributed.checkpoint: compares the markers of quantized layers before ``dcp.load`` writes into the model.

``dcp.load`` copies into the tensors of a state dict, which are those of the model. It compares shapes, which are equal
for packed weights of several sizes, so ``load_state_dict`` would find the difference only after the weights are lost.
"""

from __future__ import annotations

import inspect
from typing import Any

import torch
from torch import Tensor
from torch.distributed.checkpoint import state_dict_loader
from torch.distributed.checkpoint._nested_dict import flatten_state_dict
from torch.distributed.checkpoint.default_planner import DefaultLoadPlanner
from torch.distributed.checkpoint.metadata import TensorStorageMetadata

from ...nn import marker
from ..wrapping import wrap


def register() -> None:
    """Called after torch.distributed.checkpoint.state_dict_loader is imported."""
    wrap(state_dict_loader, "_load_state_dict", _checked)


def _checked(upstream: Any) -> Any:
    parameters = inspect.signature(upstream)

    def load_state_dict(*args: Any, **options: Any) -> None:
        given = parameters.bind(*args, **options).arguments
        own = _markers(given["state_dict"])
        if own:
            rest = {name: value for name, value in given.items() if name not in ("state_dict", "planner")}
            _check(own, upstream, rest)
        upstream(*args, **options)

    return load_state_dict


def _markers(state: dict[str, Any]) -> dict[str, Tensor]:
    """Entries of live layers in a state dict, nested ones by the names that checkpoints give them."""
    flat, _ = flatten_state_dict(state)
    return {name: one for name, one in flat.items() if isinstance(one, Tensor) and one in marker.of_layers}


class _Stored(DefaultLoadPlanner):
    """Loads the entries that the checkpoint has, in its shapes, into the state dict given to ``dcp.load``."""

    def set_up_planner(self, state_dict: Any, metadata: Any = None, is_coordinator: bool = False) -> None:
        for name in list(state_dict):
            stored = metadata.state_dict_metadata.get(name)
            if isinstance(stored, TensorStorageMetadata):
                state_dict[name] = torch.empty(stored.size, dtype=stored.properties.dtype)
            else:
                del state_dict[name]
        super().set_up_planner(state_dict, metadata, is_coordinator)


def _check(own: dict[str, Tensor], load: Any, options: dict[str, Any]) -> None:
    """Raises ValueError if the checkpoint has the weight of another scheme or size."""
    found = dict(own)
    load(state_dict=found, planner=_Stored(), **options)
    for name, tensor in found.items():
        marker.check(marker.decode(tensor, name), marker.decode(own[name], name), name)

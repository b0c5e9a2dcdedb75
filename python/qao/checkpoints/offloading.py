"""Values of tensors that accelerate offloads, for reading.

A hook of accelerate keeps offloaded tensors in memory or in files, and leaves tensors on meta in the module.
"""

from __future__ import annotations

from collections.abc import Iterator, Mapping
from contextlib import contextmanager
from pathlib import Path
from typing import Any

import torch
from torch import Tensor, nn

from ..nn.offloading import offloading_hooks
from ..nn.packed_module import aligned


@contextmanager
def onloaded(model: nn.Module) -> Iterator[None]:
    """Temporarily puts the values of offloaded tensors into their modules, on the CPU, to be read.

    Tensors in memory are shared, and files are mapped, so that a model larger than memory can be read layer by layer.
    """
    replaced: list[tuple[dict[str, Any], str, Tensor]] = []
    known: dict[tuple[Any, ...], Tensor] = {}  # tied modules share a Parameter
    try:
        for tensors, key, own, weights, name in _offloaded(model):
            value = aligned(_value(weights, name))
            view = (value.data_ptr(), value.dtype, value.shape, value.stride(), type(own))
            if isinstance(own, nn.Parameter):
                value = nn.Parameter(value, requires_grad=own.requires_grad)
            replaced.append((tensors, key, own))
            tensors[key] = known.setdefault(view, value) if value.numel() else value
        yield
    finally:
        for tensors, key, own in replaced:
            tensors[key] = own


def _offloaded(model: nn.Module) -> Iterator[tuple[dict[str, Any], str, Tensor, Mapping[str, Tensor], str]]:
    """For each offloaded tensor: its dict in the module, its key, the tensor on meta, and its map and name there."""
    for module in model.modules():
        for hook in offloading_hooks(module):
            for path, owner in module.named_modules() if hook.place_submodules else [("", module)]:
                for tensors in (owner._parameters, owner._buffers):
                    for key, own in list(tensors.items()):
                        if own is not None and own.is_meta:
                            yield tensors, key, own, hook.weights_map, f"{path}.{key}".lstrip(".")


def _value(weights: Any, name: str) -> Tensor:
    while hasattr(weights, "prefix"):  # PrefixedDataset
        weights, name = weights.dataset, weights.prefix + name
    entry = getattr(weights, "index", {}).get(name)
    if entry is None or "shape" not in entry or 0 in entry["shape"] or name in weights.state_dict:
        value: Tensor = weights[name]  # from memory, or from a safetensors file, which accelerate maps
        return value
    # OffloadedWeightsLoader would copy this file into memory.
    shape = torch.Size(entry["shape"])
    file = Path(weights.save_folder) / f"{name}.dat"
    return torch.from_file(str(file), size=shape.numel(), dtype=getattr(torch, entry["dtype"])).view(shape)

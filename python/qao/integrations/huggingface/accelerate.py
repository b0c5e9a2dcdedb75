"""accelerate: tensor-by-tensor loading of quantized checkpoints. Importing this needs accelerate.

With a device_map, ``load_checkpoint_in_model`` and ``load_checkpoint_and_dispatch`` do not call ``load_state_dict``.
They set and optionally cast one tensor at a time. ``register`` patches the setter to do what ``PackedModule`` does in
``load_state_dict``, and both loaders to replace float layers as integrations/torch/state_dicts.py does.
"""

from __future__ import annotations

import functools
import json
import os
import sys
from collections.abc import Iterable, Mapping
from pathlib import Path
from typing import Any

import torch
from accelerate import big_modeling, hooks
from accelerate.utils import modeling
from torch import Tensor, nn

from ...checkpoints.native import entries
from ...nn import marker
from ...nn.packed_module import PackedModule, aligned
from ..torch.state_dicts import completed, names_of_layers, prepared


def register() -> None:
    """Called after accelerate is imported."""
    set_tensor = modeling.set_module_tensor_to_device

    @functools.wraps(set_tensor)
    def set_module_tensor_to_device(
        module: nn.Module, tensor_name: str, device: Any, value: Any = None, dtype: Any = None, **others: Any
    ) -> None:
        path, _, key = tensor_name.rpartition(".")
        layer = functools.reduce(getattr, path.split("."), module) if path else module
        if isinstance(layer, PackedModule):
            if key in (marker.MARKER, marker.TRIPWIRE):
                _check_entry(layer, key, value, tensor_name)
                return
            own = layer.packed.tensors().get(key)
            if own is not None:
                dtype = None  # keep the stored dtype
                value = aligned(value) if isinstance(value, Tensor) else value
                if isinstance(value, Tensor) and (value.dtype, value.shape) != (own.dtype, own.shape):
                    raise ValueError(
                        f"{tensor_name}: the checkpoint holds {value.dtype}{list(value.shape)}, but this "
                        f"{type(layer).__name__} ({layer.extra_repr()}) needs {own.dtype}{list(own.shape)}. Quantize "
                        "the model with the scheme the checkpoint was made with (group_size, symmetric, scale_dtype)."
                    )
        set_tensor(module, tensor_name, device, value, dtype, **others)

    for user in (modeling, hooks, big_modeling):
        if getattr(user, "set_module_tensor_to_device", None) is set_tensor:
            user.set_module_tensor_to_device = set_module_tensor_to_device
    for function in (modeling.load_checkpoint_in_model, big_modeling.load_checkpoint_and_dispatch):
        _prepare_layers_before(function)


def _prepare_layers_before(upstream: Any) -> None:
    @functools.wraps(upstream)
    def load(model: nn.Module, checkpoint: str | os.PathLike[str], *args: Any, **options: Any) -> Any:
        _prepare_layers(model, Path(checkpoint), options.get("dtype"))
        return upstream(model, checkpoint, *args, **options)

    users: list[Any] = [module for name, module in sys.modules.items() if name.partition(".")[0] == "accelerate"]
    for user in users:
        if user.__dict__.get(upstream.__name__) is upstream:
            setattr(user, upstream.__name__, load)


def _prepare_layers(model: nn.Module, checkpoint: Path, dtype: Any) -> None:
    state: dict[str, Any] = {}
    places: dict[str, Path] = {}
    for file in _files(checkpoint):
        found = entries(file)
        state |= found
        places |= dict.fromkeys(found, file)
    _check_unmarked(model, state, places)
    _, fresh = prepared(model, state, names_of_layers(state), False)
    completed(fresh, state)
    if isinstance(dtype, torch.dtype):
        for layer in fresh.values():
            layer.dtype = dtype


def _check_unmarked(model: nn.Module, state: Mapping[str, Any], places: Mapping[str, Path]) -> None:
    """Raise ValueError if the tensors of a layer without a marker are of another scheme or size.

    Accelerate sets tensors one by one, and only qweight and scales together show their size.
    """
    for name, layer in model.named_modules(remove_duplicate=False):
        prefix = f"{name}." if name else ""
        if not isinstance(layer, PackedModule) or prefix + marker.MARKER in state:
            continue
        stored = [key for key in ("qweight", "scales") if prefix + key in state]
        layer.check_given({key: _tensor(prefix + key, state, places) for key in stored}, prefix)


def _tensor(name: str, state: Mapping[str, Any], places: Mapping[str, Path]) -> Tensor:
    value = state[name]
    if isinstance(value, Tensor):  # from a file of torch.save
        return value
    from safetensors import safe_open

    with safe_open(places[name], framework="pt") as content:
        return content.get_tensor(name)  # type: ignore[no-any-return]


def _files(checkpoint: Path) -> Iterable[Path]:
    """The files that accelerate reads; empty where accelerate raises an error."""
    if checkpoint.is_dir():
        whole = [checkpoint / name for name in ("pytorch_model.bin", "model.safetensors")]
        indexes = [path for path in checkpoint.iterdir() if path.name.endswith(".index.json")]
        found = next((path for path in whole if path.exists()), indexes[0] if len(indexes) == 1 else None)
        if found is None:
            return []
        checkpoint = found
    if not checkpoint.is_file():
        return []
    if checkpoint.suffix != ".json":
        return [checkpoint]
    index = json.loads(checkpoint.read_text())
    files = {checkpoint.parent / name for name in index.get("weight_map", index).values()}
    return [path for path in sorted(files) if path.is_file()]


def _check_entry(layer: PackedModule, key: str, value: Any, name: str) -> None:
    """Check a marker or tripwire entry. Neither is stored, but a mismatch must raise an error."""
    if not isinstance(value, Tensor):
        return  # offloaded to disk, checked before
    if key == marker.MARKER:
        layer.check_marker(value, name)
    elif not torch.equal(value.cpu(), marker.tripwire()):
        raise ValueError(
            f"{name}: the checkpoint holds {value.dtype}{list(value.shape)}, a weight that is not quantized. Load it "
            "before quantizing, or make the checkpoint from the quantized model."
        )

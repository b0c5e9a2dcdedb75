"""accelerate: checkpoints of quantised layers that it loads tensor by tensor; importing this module needs accelerate.

``load_checkpoint_in_model`` and ``load_checkpoint_and_dispatch`` do not call ``load_state_dict`` where they are given
a device_map: they set one tensor after the other, and cast it if they are asked to. ``register`` teaches the function
that does so what ``PackedModule`` does in ``load_state_dict``.
"""

from __future__ import annotations

import functools
from typing import Any

import torch
from accelerate import big_modeling, hooks
from accelerate.utils import modeling
from torch import Tensor, nn

from .. import marker
from ..packed import PackedModule, aligned


def register() -> None:
    """Called once accelerate is imported."""
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
                dtype = None  # never cast
                value = aligned(value) if isinstance(value, Tensor) else value
                if isinstance(value, Tensor) and (value.dtype, value.shape) != (own.dtype, own.shape):
                    raise ValueError(
                        f"{tensor_name}: the checkpoint holds {value.dtype}{list(value.shape)}, but this "
                        f"{type(layer).__name__} ({layer.extra_repr()}) needs {own.dtype}{list(own.shape)}. Quantise "
                        "the model with the scheme the checkpoint was made with (group_size, symmetric, scale_dtype)."
                    )
        set_tensor(module, tensor_name, device, value, dtype, **others)

    for user in (modeling, hooks, big_modeling):
        if getattr(user, "set_module_tensor_to_device", None) is set_tensor:
            user.set_module_tensor_to_device = set_module_tensor_to_device


def _check_entry(layer: PackedModule, key: str, value: Any, name: str) -> None:
    """Of the two entries beside the tensors: there is nothing to set, but a foreign one must not go unseen."""
    if not isinstance(value, Tensor):
        return  # a tensor that goes to the disk, seen before
    if key == marker.MARKER:
        layer.check_marker(value, name)
    elif not torch.equal(value.cpu(), marker.tripwire()):
        raise ValueError(
            f"{name}: the checkpoint holds {value.dtype}{list(value.shape)}, a weight that is not quantised. Load it "
            "before quantising, or make the checkpoint from the quantised model."
        )

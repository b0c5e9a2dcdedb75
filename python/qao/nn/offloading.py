"""Hooks of accelerate that offload tensors of a module, and the way to remove them."""

from __future__ import annotations

from collections.abc import Iterator
from typing import Any

from torch import nn


def offloading_hooks(module: nn.Module) -> Iterator[Any]:
    """Hooks that leave tensors on meta in ``module`` and keep the values elsewhere."""
    hook = vars(module).get("_hf_hook")
    for one in getattr(hook, "hooks", [hook]):  # SequentialHook
        if getattr(one, "offload", False) and getattr(one, "weights_map", None) is not None:
            yield one


def remedy(module: nn.Module) -> str:
    """The way to free a module from hooks of accelerate, for error messages."""
    # Removing a hook gives tensors the devices that they had, which was meta if the loader of the model offloaded them.
    if any(device.type == "meta" for hook in offloading_hooks(module) for device in hook.original_devices.values()):
        return "load the model without offloading it (device_map)"
    return "call accelerate.hooks.remove_hook_from_module(model, recurse=True) first, and dispatch the model after it"

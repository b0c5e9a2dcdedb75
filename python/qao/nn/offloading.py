"""Hooks of accelerate that offload tensors of a module."""

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

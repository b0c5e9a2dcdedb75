"""Check that a function of qao gets a model, not a pipeline, a path or a state dict."""

from __future__ import annotations

from collections.abc import Mapping
from typing import Any

from torch import nn


def check_module(model: Any, function: str) -> None:
    """Raises TypeError if ``model`` is not an nn.Module; the error names its parts that are."""
    if isinstance(model, nn.Module):
        return
    held = {} if isinstance(model, Mapping) else getattr(model, "__dict__", {})
    parts = [f".{name}" for name, value in held.items() if isinstance(value, nn.Module)]
    kind = type(model).__name__
    remedy = f"Pass one of its models: {', '.join(parts)}" if parts else "Load the model first"
    raise TypeError(f"{function}: the model must be an nn.Module, not {kind}. {remedy}.")

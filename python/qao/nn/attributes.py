"""Attributes that users and libraries set on a layer, carried over to the layer that replaces it."""

from __future__ import annotations

from types import MethodType

from torch import nn

# Accelerate leaves the bound forward of the class on an instance. Scaled embeddings give their factor separately.
_HANDLED = frozenset((*vars(nn.Module()), "forward", "embed_scale"))
_OF_QUANTIZED = frozenset(
    ("scheme", "dtype", "stands_for", "in_features", "out_features", "_sizes", "_tied", "_mm", "_constants")
)


def carry_attributes(source: nn.Module, target: nn.Module) -> None:
    """Sets the attributes of ``source`` that ``target`` does not have; a method bound to ``source`` is rebound."""
    for name, value in vars(source).items():
        if name in _HANDLED or name in _OF_QUANTIZED or hasattr(target, name):
            continue
        bound = isinstance(value, MethodType) and value.__self__ is source
        vars(target)[name] = MethodType(value.__func__, target) if bound else value


def lost_attributes(source: nn.Module, target: nn.Module) -> list[str]:
    """Attributes of a float layer that ``carry_attributes`` cannot set, because a quantized layer has its own."""
    common = _HANDLED | set(getattr(source, "__constants__", ()))  # sizes and options, which the target has too
    own = _OF_QUANTIZED | set(dir(type(target)))
    return [name for name in vars(source) if name not in common and name in own]

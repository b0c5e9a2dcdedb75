"""Ring order of the sliding layers of a static cache, for the decoding loop of ``generate()``.

transformers keeps the last W tokens of a layer with a window of W in their order: every token moves all keys and values
by one place, and Python integers choose between three graphs. In ring order token t is in place t mod W, so that a step
writes one place, in one graph. Attention does not depend on the order, since keys are rotated before they are stored.
"""

from __future__ import annotations

from collections.abc import Iterator
from contextlib import contextmanager
from functools import cache
from typing import Any

from torch import Tensor


def sliding_layers(of: Any) -> list[Any]:
    """The layers of a ``StaticCache`` that hold the last tokens alone."""
    from transformers.cache_utils import StaticSlidingWindowLayer

    return [layer for layer in of.layers if isinstance(layer, StaticSlidingWindowLayer)]


def window_of(layers: list[Any]) -> int | None:
    """Tokens that every one of these layers holds; None if they differ or hold none yet."""
    widths = {layer.keys.shape[2] if layer.is_initialized else None for layer in layers}
    return widths.pop() if len(widths) == 1 else None


@contextmanager
def ring_order(layers: list[Any], column: Tensor) -> Iterator[None]:
    """Store tokens in the place ``column`` [1] mod W instead of the last one, beginning with the next token.

    The layers keep this order: whoever made the cache resets it before the next sequence.
    """
    kinds: list[Any] = [type(layer) for layer in layers]
    token = int(column) if layers else 0
    for layer, kind in zip(layers, kinds, strict=True):
        if token > layer.keys.shape[2]:
            for tensor in (layer.keys, layer.values):
                tensor.copy_(tensor.roll(token % tensor.shape[2], 2))
        layer.column = column
        layer.__class__ = _ring(kind)
    try:
        yield
    finally:
        for layer, kind in zip(layers, kinds, strict=True):
            layer.__class__ = kind
            del layer.column


@cache
def _ring(kind: Any) -> Any:
    """The class of a layer of this kind in ring order."""

    class Ring(kind):  # type: ignore[misc]
        def update(self, key_states: Tensor, value_states: Tensor, *args: Any, **kwargs: Any) -> tuple[Tensor, Tensor]:
            place = self.column % self.keys.shape[2]
            self.keys.index_copy_(2, place, key_states)
            self.values.index_copy_(2, place, value_states)
            return self.keys, self.values

    return Ring

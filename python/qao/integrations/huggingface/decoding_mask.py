"""Attention mask of one new token over a static cache, made by one kernel per step of ``generate()``.

transformers makes the four-dimensional mask from index comparisons: some thirty kernels and 0.3 ms of Python per token.
With one query behind all others, and layers that attend to everything before, it equals the two-dimensional mask of the
sequence padded to the cache, and without one, the places up to the query's position. The first step with a cache
compares both with transformers' mask; later steps make only ours.
"""

from __future__ import annotations

from contextvars import ContextVar
from typing import Any
from weakref import WeakKeyDictionary

import torch
from torch import Tensor

from .loop_masks import FULL, types_of

# Whether the last generate() that compiled did so for a quantized model.
compiles: ContextVar[bool] = ContextVar("compiles", default=False)


class _Mask:
    """bool [B, 1, 1, W] over a cache of length W, written in place at every step.

    ``of``: the two-dimensional mask [B, columns], or the positions [B, 1] of the queries.
    """

    def __init__(self, of: Tensor, width: int, layer_type: str | None) -> None:
        self.whole = torch.zeros(of.shape[0], 1, 1, width, dtype=torch.bool, device=of.device)
        self._places = torch.arange(width, device=of.device)
        self._columns = 0  # of the mask that were copied; zeros follow
        self._layer_type = layer_type  # key of the dictionary that transformers returns, if it does

    def fits(self, of: Tensor) -> bool:
        same = (
            self.whole.device == of.device and self.whole.shape[0] == of.shape[0] and of.shape[1] <= len(self._places)
        )
        return same and self.whole.is_inference() == torch.is_inference_mode_enabled()

    def copy(self, given: Tensor) -> Any:
        if given.shape[1] != self._columns + 1:  # another sequence
            self.whole.zero_()
        self._columns = given.shape[1]
        self.whole[:, 0, 0, : self._columns].copy_(given)
        return self._result()

    def compare(self, positions: Tensor) -> Any:
        torch.le(self._places, positions[:, None, None], out=self.whole)
        return self._result()

    def _result(self) -> Any:
        return self.whole if self._layer_type is None else {self._layer_type: self.whole}


# By cache, for steps with a two-dimensional mask (True) and without; None: transformers' mask differs.
_masks: WeakKeyDictionary[Any, dict[bool, _Mask | None]] = WeakKeyDictionary()


def with_decoding_mask(upstream: Any) -> Any:
    """Wrapper of ``create_masks_for_generate``, which ``generate`` calls for every step with a static cache."""

    def create_masks_for_generate(*args: Any, **kwargs: Any) -> Any:
        cache, given = kwargs.get("cache", kwargs.get("past_key_values")), kwargs.get("attention_mask")
        of = kwargs.get("position_ids") if given is None else given
        if args or cache is None or not isinstance(of, Tensor) or of.dim() != 2 or not _one_token(kwargs):
            return upstream(*args, **kwargs)
        by_kind = _masks.setdefault(cache, {})
        kind = given is not None
        mask = by_kind.get(kind)
        if mask is not None and mask.fits(of):
            return mask.copy(of) if kind else mask.compare(of)
        made = upstream(*args, **kwargs)
        if mask is not None or kind not in by_kind:
            # Within a window, masks look like those of other layers at first.
            by_kind[kind] = _checked(made, of, kind) if types_of(kwargs["config"]) == {FULL} else None
        return made

    return create_masks_for_generate


def _one_token(arguments: dict[str, Any]) -> bool:
    """Whether one token is decoded under a mask without further conditions."""
    embeds = arguments.get("inputs_embeds", arguments.get("input_embeds"))
    others = ("or_mask_function", "and_mask_function", "block_sequence_ids")
    return (
        compiles.get()
        and isinstance(embeds, Tensor)
        and embeds.shape[1] == 1
        and all(arguments.get(name) is None for name in others)
    )


def _checked(made: Any, of: Tensor, kind: bool) -> _Mask | None:
    """The mask of the next steps, if ours of this step equals ``made``."""
    layer_type = None
    if isinstance(made, dict):
        if len(made) != 1:
            return None
        ((layer_type, made),) = made.items()
    if not isinstance(made, Tensor) or made.dtype != torch.bool or made.dim() != 4:
        return None
    mask = _Mask(of, made.shape[-1], layer_type)
    if not mask.fits(of):
        return None
    (mask.copy if kind else mask.compare)(of)
    return mask if torch.equal(mask.whole, made) else None

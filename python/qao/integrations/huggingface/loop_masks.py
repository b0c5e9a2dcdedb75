"""Attention masks of the decoding loop: those of every step from one mask of all tokens."""

from __future__ import annotations

from typing import Any, NamedTuple

import torch
from torch import Tensor

from .ring_cache import sliding_layers, window_of

# Types of layers. The last ones keep a state, and take no mask for one token.
FULL, SLIDING, STATES = "full_attention", "sliding_attention", ("linear_attention", "conv")
_WIDTH_STEP = 256  # of a mask that no layer takes whole


class Masks(NamedTuple):
    """How a model takes its masks: by type of layer, or (``named`` is False) the one of its only type."""

    dtypes: dict[str, torch.dtype | None]  # by type of layer: bool, that of zeros and least values to be added, or none
    named: bool
    window: int | None  # tokens that sliding layers hold

    @classmethod
    def as_in(cls, given: Any, types: set[str], cache: Any, batch: int, longest: int) -> Masks | None:
        """The form of the argument ``given`` of one step; None if it is unknown.

        Args:
            types: of the model's layers.
            cache: a ``StaticCache``.
            batch: sequences.
            longest: tokens of the longest sequence to come.
        """
        sliding = sliding_layers(cache)
        masks = cls._by_type(given, sliding=bool(sliding))
        window = window_of(sliding) if sliding else None
        if masks.keys() != types or (SLIDING in types) != (window is not None):
            return None
        for name, mask in masks.items():
            if name in STATES and mask is None:
                continue
            if not isinstance(mask, Tensor) or mask.dim() != 4 or mask.shape[:3] != (batch, 1, 1):
                return None
            if mask.dtype != torch.bool and not mask.is_floating_point():
                return None
            # The last token is not computed with.
            if mask.shape[3] != window if name == SLIDING else mask.shape[3] < longest - 1:
                return None
        dtypes = {name: None if mask is None else mask.dtype for name, mask in masks.items()}
        return cls(dtypes, isinstance(given, dict), window)

    def make(self, whole: Tensor, column: Tensor) -> Any:
        """The argument of a step, from ``whole`` [B, 1, 1, L] in bool and the number ``column`` [1] of its token."""
        masks: dict[str, Tensor | None] = {}
        for name, dtype in self.dtypes.items():
            if dtype is None:
                masks[name] = None
                continue
            mask = _in_window(whole, column, self.window) if name == SLIDING and self.window else whole
            if dtype.is_floating_point:
                mask = torch.zeros_like(mask, dtype=dtype).masked_fill_(~mask, torch.finfo(dtype).min)
            masks[name] = mask
        return masks if self.named else next(iter(masks.values()))

    def whole(self, given: Any, prompt: Tensor, longest: int) -> Tensor | None:
        """bool [B, 1, 1, L]: what the next token attends to; None if that cannot be said.

        Args:
            given: the argument that has this form.
            prompt: what transformers knows of the prompt, its mask or its tokens [B, T].
            longest: tokens of the longest sequence to come.
        """
        masks = self._by_type(given, sliding=self.window is not None)
        if FULL in masks:
            return _attended(masks[FULL])
        (batch, tokens), width = prompt.shape, longest + -longest % _WIDTH_STEP
        if not 0 < tokens < longest:
            return None
        whole = torch.zeros(batch, 1, 1, width, dtype=torch.bool, device=prompt.device)
        whole[:, 0, 0, : tokens + 1] = torch.nn.functional.pad(prompt.bool(), (0, 1), value=True)
        return whole

    def agree(self, whole: Tensor, column: Tensor, given: Any) -> bool:
        """Whether the mask of a window counts as many tokens as the one in ``given``, maybe in another order."""
        if self.window is None:  # then ``whole`` is what was given, or there are no masks
            return True
        theirs = self._by_type(given, sliding=True)[SLIDING]
        return torch.equal(_in_window(whole, column, self.window).sum(-1), _attended(theirs).sum(-1))

    @staticmethod
    def _by_type(given: Any, *, sliding: bool) -> dict[str, Any]:
        return given if isinstance(given, dict) else {SLIDING if sliding else FULL: given}


def types_of(config: Any) -> set[str]:
    """Types of the layers of a model."""
    config = config.get_text_config()
    if (types := getattr(config, "layer_types", None)) is not None:
        return set(types)
    if getattr(config, "attention_chunk_size", None) is not None:
        return {"chunked_attention"}
    return {FULL if getattr(config, "sliding_window", None) is None else SLIDING}


def _attended(mask: Tensor) -> Tensor:
    return mask if mask.dtype == torch.bool else mask == 0


def _in_window(whole: Tensor, column: Tensor, window: int) -> Tensor:
    """bool [B, 1, 1, W]: which places of a layer in ring order are attended to."""
    places = torch.arange(window, device=whole.device)
    tokens = column - (column - places) % window  # the last one in each place
    return whole.index_select(-1, tokens.clamp(min=0)) & (tokens >= 0)

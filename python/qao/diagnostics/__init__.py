"""What a model does and how well: kernels of each layer, perplexity, sensitivity, the state of an installation."""

from __future__ import annotations

from .explain import (
    Explanation,
    explain,
)

__all__ = [
    "Explanation",
    "explain",
]

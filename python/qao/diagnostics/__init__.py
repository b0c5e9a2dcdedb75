"""Diagnostics: kernels of layers, torch.compile, perplexity, sensitivity, installation checks."""

from __future__ import annotations

from .explain import Explanation, explain

__all__ = ["Explanation", "explain"]

"""Quantized layers: modules that hold packed weights and call one operator."""

from __future__ import annotations

from .embedding import QuantEmbedding
from .experts import QuantExperts
from .linear import QuantLinear
from .update import update_

__all__ = [
    "QuantEmbedding",
    "QuantExperts",
    "QuantLinear",
    "update_",
]

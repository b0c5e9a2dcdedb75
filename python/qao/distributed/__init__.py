"""Tensor parallelism for quantized layers: styles for torch's ``parallelize_module``."""

from __future__ import annotations

from .styles import Colwise, Rowwise

__all__ = ["Colwise", "Rowwise"]

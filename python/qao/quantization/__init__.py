"""quantize_ and dequantize_: which layers of a model are replaced, by what, and the report."""

from __future__ import annotations

from .dequantize import dequantize_
from .quantize import quantize_
from .report import (
    Report,
    Row,
)

__all__ = [
    "Report",
    "Row",
    "dequantize_",
    "quantize_",
]

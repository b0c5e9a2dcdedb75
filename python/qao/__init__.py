"""qao: quantised linear layers for PyTorch.

report = qao.quantize_(model, qao.Int4WeightOnly())
"""

from __future__ import annotations

from ._version import __version__
from .linear import QuantLinear
from .quantize import quantize_
from .report import Report, Row
from .schemes import Int4WeightOnly, Scheme

__all__ = ["Int4WeightOnly", "QuantLinear", "Report", "Row", "Scheme", "__version__", "quantize_"]

"""qao: quantised linear layers for PyTorch.

report = qao.quantize_(model, qao.Int4WeightOnly())
"""

from __future__ import annotations

from typing import Any

from . import _early  # noqa: F401  # first: before torch is imported
from ._version import __version__
from .calibration import calibrate
from .checkpoint import load, save
from .dequantize import dequantize_
from .embedding import QuantEmbedding
from .experts import QuantExperts
from .explain import Explanation, explain
from .formats import PackedWeight, Scheme
from .integrations.config import QaoConfig
from .integrations.imports import install as _install
from .integrations.pretrained import from_pretrained
from .invariance import batch_invariant
from .linear import QuantLinear
from .quantize import quantize_
from .report import Report, Row
from .schemes import (
    SCHEMES,
    Float8DynamicActivationFloat8Weight,
    Float8DynamicActivationInt4Weight,
    Float8WeightOnly,
    Fp4WeightOnly,
    Int4WeightOnly,
    Int8DynamicActivationInt4Weight,
    Int8DynamicActivationInt8Weight,
    Int8WeightOnly,
    scheme_from_dict,
)
from .update import update_

__all__ = [
    "SCHEMES",
    "Explanation",
    "Float8DynamicActivationFloat8Weight",
    "Float8DynamicActivationInt4Weight",
    "Float8WeightOnly",
    "Fp4WeightOnly",
    "Int4WeightOnly",
    "Int8DynamicActivationInt4Weight",
    "Int8DynamicActivationInt8Weight",
    "Int8WeightOnly",
    "PackedWeight",
    "QaoConfig",
    "QuantEmbedding",
    "QuantExperts",
    "QuantLinear",
    "Report",
    "Row",
    "Scheme",
    "__version__",
    "batch_invariant",
    "calibrate",
    "dequantize_",
    "explain",
    "from_pretrained",
    "load",
    "quantize_",
    "save",
    "scheme_from_dict",
    "update_",
]

_install()


def __getattr__(name: str) -> Any:
    """``qao.distributed``, once it is used: it imports torch.distributed.tensor, which takes a second."""
    if name == "distributed":
        import importlib

        return importlib.import_module("qao.distributed")
    raise AttributeError(f"module 'qao' has no attribute {name!r}")

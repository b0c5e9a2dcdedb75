"""qao: quantized linear layers for PyTorch.

report = qao.quantize_(model, qao.Int4WeightOnly())
"""

from __future__ import annotations

from typing import TYPE_CHECKING, Any

from . import (
    _early,  # noqa: F401  # first: before torch is imported
    _moved,
)
from ._version import __version__ as __version__
from .calibration import calibrate
from .checkpoints.save_load import load, save
from .diagnostics.explain import explain
from .inductor.backend import compile
from .inductor.backend import inductor_options as inductor_options
from .integrations.huggingface.config import QaoConfig
from .integrations.huggingface.from_pretrained import from_pretrained
from .integrations.imports import install as _install
from .nn.linear import QuantLinear
from .nn.update import update_
from .quantization.dequantize import dequantize_
from .quantization.quantize import quantize_
from .schemes import (
    Float8DynamicActivationFloat8Weight,
    Float8DynamicActivationInt4Weight,
    Float8StaticActivationFloat8Weight,
    Float8WeightOnly,
    Fp4WeightOnly,
    Int4WeightOnly,
    Int8DynamicActivationInt4Weight,
    Int8DynamicActivationInt8Weight,
    Int8WeightOnly,
)
from .schemes import Scheme as Scheme

__all__ = [
    "Float8DynamicActivationFloat8Weight",
    "Float8DynamicActivationInt4Weight",
    "Float8StaticActivationFloat8Weight",
    "Float8WeightOnly",
    "Fp4WeightOnly",
    "Int4WeightOnly",
    "Int8DynamicActivationInt4Weight",
    "Int8DynamicActivationInt8Weight",
    "Int8WeightOnly",
    "QaoConfig",
    "QuantLinear",
    "calibrate",
    "compile",
    "dequantize_",
    "explain",
    "from_pretrained",
    "load",
    "quantize_",
    "save",
    "update_",
]

# The documented packages.
_PACKAGES = ("diagnostics", "distributed", "nn", "ops", "quantization", "schemes")

_install()
_moved.install()


if TYPE_CHECKING:
    from . import diagnostics as diagnostics
    from . import distributed as distributed
    from . import nn as nn
    from . import ops as ops
    from . import quantization as quantization
    from . import schemes as schemes

    # deprecated: _moved.NAMES
    from .diagnostics import Explanation as Explanation
    from .nn import QuantEmbedding as QuantEmbedding
    from .nn import QuantExperts as QuantExperts
    from .ops import batch_invariant as batch_invariant
    from .quantization.report import Report as Report
    from .quantization.report import Row as Row
    from .schemes import SCHEMES as SCHEMES
    from .schemes import PackedWeight as PackedWeight
    from .schemes import scheme_from_dict as scheme_from_dict

    __commit__: str | None
else:
    # A type checker that saw this function would accept every misspelled attribute.
    def __getattr__(name: str) -> Any:
        """``qao.distributed``, which takes a second to import, and deprecated names."""
        import importlib

        if name == "distributed":
            return importlib.import_module("qao.distributed")
        if name == "__commit__":
            return importlib.import_module("qao._version").commit()
        if name in _moved.NAMES:
            return _moved.get(name)
        raise AttributeError(_unknown(name))


def __dir__() -> list[str]:
    """The public names and the documented packages."""
    return sorted({*__all__, *_PACKAGES, *(name for name in globals() if name.startswith("__"))})


def _unknown(name: str) -> str:
    """The message for an unknown name, with the public name that was probably meant."""
    import difflib

    public = [*__all__, *_PACKAGES]
    by_letters = {word.lower().replace("_", ""): word for word in public}
    known = _OF_OTHERS.get(name) or by_letters.get(name.lower().replace("_", ""))
    near = [known] if known else difflib.get_close_matches(name, public, n=1, cutoff=0.75)
    return f"module 'qao' has no attribute {name!r}" + (f"; did you mean qao.{near[0]}?" if near else "")


# Equivalents of these names in other packages.
_OF_OTHERS = {
    "quantise": "quantize_",
    "quantise_": "quantize_",
    "quantize_model": "quantize_",
    "dequantise_": "dequantize_",
    "Linear": "QuantLinear",
    "Linear4bit": "QuantLinear",
    "Linear8bitLt": "QuantLinear",
    "load_model": "load",
    "save_model": "save",
    "save_pretrained": "save",
    "Int4WeightOnlyConfig": "Int4WeightOnly",
    "Int8WeightOnlyConfig": "Int8WeightOnly",
    "Float8WeightOnlyConfig": "Float8WeightOnly",
    "Int8DynamicActivationInt8WeightConfig": "Int8DynamicActivationInt8Weight",
    "Int8DynamicActivationInt4WeightConfig": "Int8DynamicActivationInt4Weight",
    "Float8DynamicActivationFloat8WeightConfig": "Float8DynamicActivationFloat8Weight",
    "Float8DynamicActivationInt4WeightConfig": "Float8DynamicActivationInt4Weight",
    "Float8StaticActivationFloat8WeightConfig": "Float8StaticActivationFloat8Weight",
}

"""Every deprecated name: of modules, which pickles of whole models contain, of what ``qao`` exported, and of arguments.

TABLE lists them. A name works for two minor versions and warns with DeprecationWarning (docs/policy.md).
"""

from __future__ import annotations

import functools
import importlib
import sys
import warnings
from collections.abc import Callable, Sequence
from importlib.abc import Loader, MetaPathFinder
from importlib.machinery import ModuleSpec
from types import ModuleType
from typing import Any, TypeVar

_PACKAGES = {
    "checkpoints": {"checkpoint": "save_load"},
    "diagnostics": {"evaluate": "perplexity", "sensitivity": "sensitivity"},
    "integrations.huggingface": {"integrations.config": "config"},
    "nn": {
        "embedding": "embedding",
        "experts": "experts",
        "linear": "linear",
        "packed": "packed_module",
        "update": "update",
        "weight": "dequantized_weight",
    },
    "ops": {"fp4": "fp4", "grouped": "grouped_autograd", "invariance": "batch_invariant", "reference": "reference"},
    "quantization": {"dequantize": "dequantize", "quantize": "quantize", "report": "report"},
    "schemes": {
        "formats": "weight_formats",
        "formats_fp8": "fp8_activations",
        "formats_two_levels": "two_level",
        "rotation": "rotation",
        "scheme": "base",
    },
}
# Names that ``qao`` itself exported, and the modules that export them now.
NAMES = {
    "Explanation": "qao.diagnostics",
    "PackedWeight": "qao.schemes",
    "QuantEmbedding": "qao.nn",
    "QuantExperts": "qao.nn",
    "Report": "qao.quantization.report",
    "Row": "qao.quantization.report",
    "SCHEMES": "qao.schemes",
    "batch_invariant": "qao.ops",
    "scheme_from_dict": "qao.schemes",
}
_GROUPED = ("int4", "int8", "fp8", "fp4", "int8_int8", "int8_int4", "fp8_fp8", "fp8_int4")
# Functions with renamed keyword arguments: the present name by the old one. ``renamed`` decorates them.
_ARGUMENTS = {
    **{function: {"module": "model"} for function in ("save", "load")},
    **{f"{word}_grouped_mm": {"row_scale": "router_weights"} for word in _GROUPED},
}
_FILTERED = ("quantize_", "calibrate", "diagnostics.sensitivity.by_layer")
_STATIC = "activation_scale=..."
F = TypeVar("F", bound=Callable[..., Any])
_MOVED = {f"qao.{old}": f"qao.{package}.{new}" for package, of in _PACKAGES.items() for old, new in of.items()}
# The version that deprecated names; for each, its successor.
TABLE = {
    "0.2": {
        **_MOVED,
        **{f"qao.{name}": f"{module}.{name}" for name, module in NAMES.items()},
        **{f"{function}({old}=...)": f"{new}=..." for function, of in _ARGUMENTS.items() for old, new in of.items()},
        **{f"qao.{function}(filter=...)": "filter_fn(module, fqn)" for function in _FILTERED},
        f"Float8DynamicActivationFloat8Weight({_STATIC})": f"Float8StaticActivationFloat8Weight({_STATIC})",
    },
}


class _Alias(ModuleType):
    """A module under its old name."""

    def __getattr__(self, name: str) -> Any:
        return getattr(importlib.import_module(_MOVED[self.__name__]), name)


class _Finder(MetaPathFinder, Loader):
    def find_spec(
        self, fullname: str, path: Sequence[str] | None = None, target: ModuleType | None = None
    ) -> ModuleSpec | None:
        return ModuleSpec(fullname, self) if fullname in _MOVED else None

    def create_module(self, spec: ModuleSpec) -> ModuleType:
        return _Alias(spec.name)

    def exec_module(self, module: ModuleType) -> None:
        warn(module.__name__, stacklevel=3)


def removal(since: str) -> str:
    """The version that removes what ``since`` deprecated."""
    major, minor = since.split(".")
    return f"{major}.{int(minor) + 2}"


def warn(old: str, stacklevel: int) -> None:
    """Warn of a name in TABLE. ``stacklevel``: as for ``warnings.warn``; 2 is the caller of this function."""
    since, new = next((since, names[old]) for since, names in TABLE.items() if old in names)
    message = f"{old} is now {new}; the old name will be removed in qao {removal(since)}"
    warnings.warn(message, DeprecationWarning, stacklevel=stacklevel)


def renamed(function: F) -> F:
    """Decorator of a function that also takes keyword arguments under the old names in _ARGUMENTS."""
    names = _ARGUMENTS[function.__name__]

    @functools.wraps(function)
    def call(*args: Any, **keywords: Any) -> Any:
        for old in names.keys() & keywords.keys():
            warn(f"{function.__name__}({old}=...)", stacklevel=3)
            if names[old] in keywords:
                raise TypeError(f"{function.__name__}: {old} is the old name of {names[old]}; pass only that")
            keywords[names[old]] = keywords.pop(old)
        return function(*args, **keywords)

    return call  # type: ignore[return-value]


def get(name: str) -> Any:
    """The value of one of NAMES; called by ``qao.__getattr__``."""
    warn(f"qao.{name}", stacklevel=4)
    return getattr(importlib.import_module(NAMES[name]), name)


def install() -> None:
    """Called by ``import qao``. These names are looked up after all others."""
    sys.meta_path.append(_Finder())

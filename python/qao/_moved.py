"""Aliases for old module names, which pickles of whole models contain, and for names that ``qao`` itself exported.

Each warns with DeprecationWarning and will be removed in qao 0.4.
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
F = TypeVar("F", bound=Callable[..., Any])
_MOVED = {f"qao.{old}": f"qao.{package}.{new}" for package, of in _PACKAGES.items() for old, new in of.items()}


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
        new = _MOVED[module.__name__]
        warn(module.__name__, new, stacklevel=3)


def warn(old: str, new: str, stacklevel: int) -> None:
    """``stacklevel``: as for ``warnings.warn``; 2 is the caller of this function."""
    message = f"{old} is now {new}; the old name will be removed in qao 0.4"
    warnings.warn(message, DeprecationWarning, stacklevel=stacklevel)


def renamed(**names: str) -> Callable[[F], F]:
    """Decorator of a function that also takes keyword arguments under old names; ``names`` maps old to new."""

    def decorate(function: F) -> F:
        @functools.wraps(function)
        def call(*args: Any, **keywords: Any) -> Any:
            for old in names.keys() & keywords.keys():
                warn(f"{function.__name__}({old}=...)", f"{names[old]}=...", stacklevel=3)
                if names[old] in keywords:
                    raise TypeError(f"{function.__name__}: {old} is the old name of {names[old]}; pass only that")
                keywords[names[old]] = keywords.pop(old)
            return function(*args, **keywords)

        return call  # type: ignore[return-value]

    return decorate


def get(name: str) -> Any:
    """The value of one of NAMES; called by ``qao.__getattr__``."""
    warn(f"qao.{name}", f"{NAMES[name]}.{name}", stacklevel=4)
    return getattr(importlib.import_module(NAMES[name]), name)


def install() -> None:
    """Called by ``import qao``. These names are looked up after all others."""
    sys.meta_path.append(_Finder())

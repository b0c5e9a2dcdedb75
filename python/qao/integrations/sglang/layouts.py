"""SGLang's configs for third-party checkpoint layouts, with layers computed by qao's operators.

SGLang has no kernel table, but a table of configs by method name. A subclass replaces each of METHODS there and
overrides only the choice for linear layers and fused experts. As in config.py, it is registered while that table is
imported, so dependencies on SGLang's layers are imported later.
"""

from __future__ import annotations

import importlib
import os
import sys
from collections.abc import Callable
from functools import cache
from typing import Any

from sglang.srt.layers import quantization
from torch import nn

from ..serving import common
from ..serving.interface import function_of
from . import WITHOUT

METHODS = (
    *("compressed-tensors", "fp8", "gptq", "gptq_marlin", "awq", "awq_marlin"),
    *("w8a8_int8", "w8a8_fp8", "modelopt", "modelopt_fp8"),
    *("moe_wna16", "auto-round"),  # their linear layers are those of gptq and awq
)
LEFT_OUT = "QAO_SGLANG_DISABLED_METHODS"  # names of METHODS, or "all"


class ServedByQao:
    """Mixin in front of a config class of SGLang."""

    def get_quant_method(self, layer: nn.Module, prefix: str) -> Any:
        method = super().get_quant_method(layer, prefix)  # type: ignore[misc]
        for module in ("method", "experts"):
            choose = _choice(module)
            method = method if choose is None else choose(method, layer, prefix)
        return method


@cache
def _choice(module: str) -> Callable[[Any, nn.Module, str], Any] | None:
    """qao's choice of methods; None if this SGLang lacks what it needs.

    In that case an error is logged and SGLang uses its own kernels.
    """
    try:
        found = importlib.import_module(f".{module}", __package__)
    except Exception as error:
        common.warn_failed("sglang", WITHOUT[module], error)
        return None
    return found.choose  # type: ignore[no-any-return]


def _class_of(config: type) -> type:
    """``config`` with qao's choice of methods. Pickle finds it by its name in this module."""
    name = f"Qao{config.__name__}"
    made = getattr(sys.modules[__name__], name, None)
    if made is None or config not in made.__bases__:
        made = type(name, (ServedByQao, config), {"__module__": __name__, "__doc__": config.__doc__})
        setattr(sys.modules[__name__], name, made)
    return made


def register() -> None:
    """Put the subclasses into SGLang's tables. Idempotent."""
    tables = quantization.QUANTIZATION_METHODS, quantization.CPU_QUANTIZATION_METHODS
    for config in filter(None, (table.get(name) for table in tables for name in METHODS)):
        function_of(config, "get_quant_method", "layer", "prefix")
    left_out = {name.strip() for name in os.environ.get(LEFT_OUT, "").split(",")}
    for table in tables:
        for name in METHODS:
            config = table.get(name)
            if config is not None and not left_out & {name, "all"} and not issubclass(config, ServedByQao):
                table[name] = _class_of(config)

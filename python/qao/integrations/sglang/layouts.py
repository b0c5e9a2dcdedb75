"""Checkpoints in the layouts of others in SGLang: its configs of them, whose linear layers qao's operators multiply.

SGLang has no table of kernels, but one of configs, by the name of a checkpoint's method. A subclass takes the place of
each of METHODS there; all but its choice for linear layers is SGLang's. As config.py, it is registered while that table
is imported: what it needs of SGLang's layers comes later.
"""

from __future__ import annotations

import os
import sys
from collections.abc import Callable
from functools import cache
from typing import Any

from sglang.srt.layers import quantization
from torch import nn

from ..serving import common

METHODS = (
    *("compressed-tensors", "fp8", "gptq", "gptq_marlin", "awq", "awq_marlin"),
    *("w8a8_int8", "w8a8_fp8", "modelopt", "modelopt_fp8"),
    *("moe_wna16", "auto-round"),  # whose linear layers are those of gptq and awq
)
LEFT_OUT = "QAO_SGLANG_DISABLED_METHODS"  # names of METHODS, or "all"


class ServedByQao:
    """In front of a config class of SGLang."""

    def get_quant_method(self, layer: nn.Module, prefix: str) -> Any:
        own = super().get_quant_method(layer, prefix)  # type: ignore[misc]
        beside = _choice()
        return own if beside is None else beside(own, layer, prefix)


@cache
def _choice() -> Callable[[Any, nn.Module, str], Any] | None:
    """None in an SGLang that qao does not fit: an error in its log says so, and SGLang runs its own kernels."""
    try:
        from .method import beside
    except Exception as error:
        common.say_failed("sglang", "linear layers", error)
        return None
    return beside


def _class_of(config: type) -> type:
    """``config`` with qao's choice; found by its name in this module, by which it pickles."""
    name = f"Qao{config.__name__}"
    made = getattr(sys.modules[__name__], name, None)
    if made is None or config not in made.__bases__:
        made = type(name, (ServedByQao, config), {"__module__": __name__, "__doc__": config.__doc__})
        setattr(sys.modules[__name__], name, made)
    return made


def register() -> None:
    """Puts the subclasses in SGLang's tables; another call changes nothing."""
    left_out = {name.strip() for name in os.environ.get(LEFT_OUT, "").split(",")}
    for table in (quantization.QUANTIZATION_METHODS, quantization.CPU_QUANTIZATION_METHODS):
        for name in METHODS:
            config = table.get(name)
            if config is not None and not left_out & {name, "all"} and not issubclass(config, ServedByQao):
                table[name] = _class_of(config)

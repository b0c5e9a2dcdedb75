"""Log line of vLLM that counts the layers of a loaded model served by qao."""

from __future__ import annotations

import logging
import sys
from collections import Counter
from functools import wraps
from typing import Any

from torch import nn

from ..._version import __version__
from ..serving.interface import function_of
from .process import replace_functions

_UTILS = "vllm.model_executor.model_loader.utils"
_OURS = f"{__name__.rpartition('.')[0]}."


def kernel_of(layer: nn.Module) -> tuple[str, bool] | None:
    """The kernel class of a quantized layer of vLLM, and whether it is qao's; None for other modules."""
    method = getattr(layer, "quant_method", None)
    name = type(method).__name__
    if method is None or name.startswith("Unquantized") or name.endswith("KVCacheMethod"):
        return None
    classes = [type(method)]
    for owner in (method, getattr(layer, "scheme", None)):
        held = getattr(owner, "__dict__", {})
        found = [held[one] for one in _HOLDERS if held.get(one) is not None]
        classes += [one if isinstance(one, type) else type(one) for one in found]
    ours = next((one for one in reversed(classes) if one.__module__.startswith(_OURS)), None)
    return (classes[-1] if ours is None else ours).__name__, ours is not None


# Attributes in which vLLM's methods and schemes store their kernel.
_HOLDERS = ("kernel", "fp8_linear", "linear_kernel", "experts_cls")


def summary(model: nn.Module) -> str:
    """ "qao 0.2.0 serves 8 of 9 quantized layers: 8 QaoMixedPrecisionKernel; vLLM serves 1: …" """
    counts = Counter(filter(None, map(kernel_of, model.modules())))
    if not counts:
        return f"qao {__version__} serves no layer: the model has no quantized ones"
    ours, upstream = (
        ", ".join(f"{n} {name}" for (name, own), n in counts.items() if own is one) for one in (True, False)
    )
    served = sum(n for (_, own), n in counts.items() if own)
    line = f"qao {__version__} serves {served} of {counts.total()} quantized layers"
    line += f": {ours}" if ours else ""
    return line + (f"; vLLM's own kernels serve the others: {upstream}" if upstream else "")


def register() -> None:
    """Make vLLM log ``summary`` at the end of loading. Idempotent."""
    utils: Any = sys.modules[_UTILS]
    process = function_of(utils, "process_weights_after_loading", "model")
    if getattr(process, "patched_by_qao", False):
        return

    @wraps(process)
    def process_weights_after_loading(model: nn.Module, *args: Any, **kwargs: Any) -> Any:
        result = process(model, *args, **kwargs)
        logging.getLogger("vllm.qao").info(summary(model))
        return result

    process_weights_after_loading.patched_by_qao = True  # type: ignore[attr-defined]
    replace_functions(_UTILS, {"process_weights_after_loading": process_weights_after_loading})

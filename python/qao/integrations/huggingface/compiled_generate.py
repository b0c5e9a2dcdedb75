"""The backend of ``generate()`` with a static cache, which transformers compiles by itself on a GPU.

A quantized model without a ``compile_config`` gets the backend "qao". A given ``compile_config`` stays as it is, and
so does the generation config, which ``save_pretrained`` writes. decoding_loop.py decodes with the compiled step.
Options that it leaves to transformers' loop get the mask of decoding_mask.py, and on a GPU that loop tests one step
late whether all sequences have ended, so that the host prepares a step while the GPU computes the one before. The
length of a static cache is rounded up, so that few longer sequences compile again.
"""

from __future__ import annotations

import sys
from dataclasses import replace
from typing import Any

import torch

from ...nn.packed_module import PackedModule
from .compiled_step import CompiledStep, takes
from .decoding_loop import waiting
from .decoding_mask import compiles

_CACHE_STEP = 256  # tokens
_SECONDS = 0.15  # per quantized layer, without Inductor's cache. SmolLM2-135M on one core of a CPU: 35 to 50 for 211.


def with_backend(upstream: Any) -> Any:
    """Wrapper of ``PreTrainedModel.get_compiled_call``, which ``generate`` calls when it is going to compile."""

    def get_compiled_call(self: Any, compile_config: Any) -> Any:
        layers = sum(isinstance(module, PackedModule) for module in self.modules())
        compiles.set(layers > 0)
        step, first = vars(self).get("_compiled_call"), not hasattr(self, "_compiled_call")
        config: Any = compile_config or (_default(self) if layers else None)
        if layers and takes(config):
            if not isinstance(step, CompiledStep) or not step.fits(self, config):
                self._compiled_call, self._last_compile_config = CompiledStep(self, config), config
        elif not first and (step is None or isinstance(step, CompiledStep)):  # None: of a copied model
            del self._compiled_call
        call = upstream(self, config)
        if layers and first and call is vars(self).get("_compiled_call"):  # transformers never compiles some models
            _announce(type(self).__name__, layers, config.backend)
        return call

    return get_compiled_call


def with_rounded_cache(upstream: Any) -> Any:
    """Wrapper of the method by which ``generate`` makes a static cache.

    The compiled graph is one of a cache length. transformers takes that of the longest sequence so far, so that every
    longer prompt would compile again. Lengths of a quantized model are multiples of 256.
    """

    def make(self: Any, *args: Any, **kwargs: Any) -> Any:
        if "max_cache_len" in kwargs and any(isinstance(module, PackedModule) for module in self.modules()):
            kwargs["max_cache_len"] += -kwargs["max_cache_len"] % _CACHE_STEP
        return upstream(self, *args, **kwargs)

    return make


def with_deferred_stop(upstream: Any) -> Any:
    """Wrapper of ``DeferredStopCheck.is_supported``, which ``generate`` calls after ``get_compiled_call``.

    transformers defers its test on MPS alone. Its code is the same for every device.
    """

    def is_supported(device: torch.device, *args: Any, **kwargs: Any) -> bool:
        if compiles.get() and waiting() is None and device.type == "cuda":
            device = torch.device("mps")
        return upstream(device, *args, **kwargs)  # type: ignore[no-any-return]

    return is_supported


def _default(model: Any) -> Any:
    """transformers' default, with the backend "qao" instead of Inductor. Some devices have a backend of their own."""
    from transformers import CompileConfig

    # Version 4 and the first of version 5 have no such method.
    default = model._default_compile_config() if hasattr(model, "_default_compile_config") else CompileConfig()
    return replace(default, backend="qao") if default.backend == "inductor" else default


def _announce(name: str, layers: int, backend: Any) -> None:
    """Say in a terminal what takes the time. ``disable_progress_bar()`` of transformers turns it off."""
    from transformers.utils.logging import is_progress_bar_enabled

    if sys.stderr.isatty() and is_progress_bar_enabled():
        what = f"the decoding step of {name}, {layers} quantized layers, with backend {backend!r}"
        seconds = max(5, round(layers * _SECONDS, -1))
        print(f"qao: generate() compiles {what}: about {seconds:.0f} s, less with a warm cache", file=sys.stderr)

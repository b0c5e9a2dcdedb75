"""vLLM plugin: an entry point of the group ``vllm.general_plugins``, called by each process.

kernels.py puts qao's operators before vLLM's linear kernels, for checkpoints that vLLM reads. oracles.py does the same
for fused experts (experts.py, experts_fp8.py). batch_invariance.py does it where vLLM bypasses its kernels. config.py,
linear.py and own_experts.py add the quantization method "qao" for checkpoints in qao's own format. grouped_experts.py
is shared by all experts. fusion.py fuses norms and gates with qao's operators in the graphs that vLLM compiles,
cache_key.py separates these graphs from those without qao, loaded.py logs which layers qao serves, and adapter.py has
the differences between versions of vLLM.

Nothing here imports vLLM. Each part patches one module of vLLM after any code imports that module, in any order: a part
may import the patched module and modules that it has imported. Everything else is imported when vLLM calls it.
"""

from __future__ import annotations

import logging
from functools import partial

from ..imports import register_part, when_imported
from ..serving import common

__all__ = ["PARTS", "WITHOUT", "failed_parts", "register", "warn_failed"]

# A module of vLLM, and the module and function of this package to call after its import.
PARTS = {
    "vllm.config.vllm": "cache_key.register",
    "vllm.compilation.backends": "fusion.register",
    "vllm.model_executor.kernels.linear": "kernels.register",
    "vllm.model_executor.layers.fused_moe.oracle.int_wna16": "oracles.register_int4",
    "vllm.model_executor.layers.fused_moe.oracle.fp8": "oracles.register_fp8",
    "vllm.model_executor.layers.quantization": "config.register",
    "vllm.model_executor.layers.quantization.compressed_tensors.schemes.compressed_tensors_wNa16": (
        "batch_invariance.register_w4a16"
    ),
    "vllm.model_executor.model_loader.utils": "loaded.register",
}

# What happens if a part fails.
WITHOUT = {
    "cache_key.register": "vLLM runs without qao, because the key of its compile cache cannot include qao",
    "fusion.register": "norms and gates run by themselves in front of qao's operators",
    "kernels.register": "linear layers use vLLM's own kernels",
    "oracles.register_int4": "fused experts of four bits use vLLM's own kernels",
    "oracles.register_fp8": "fused experts in fp8 use vLLM's own kernels",
    "config.register": "checkpoints in qao's own format cannot be served",
    "batch_invariance.register_w4a16": "with VLLM_BATCH_INVARIANT, vLLM dequantizes W4A16 weights in each call",
    "loaded.register": "no line in the log counts the layers that qao serves",
}
_KEY = PARTS["vllm.config.vllm"]
_failed: set[str] = set()


def failed_parts() -> set[str]:
    """The members of PARTS that failed in this process."""
    return set(_failed)


def _register(part: str) -> None:
    if _KEY in _failed and part != _KEY:  # its compile cache would mix graphs with and without qao
        _failed.add(part)
        return
    module, _, function = part.partition(".")
    register_part(f"{__name__}.{module}", function)
    _failed.discard(part)


def warn_failed(part: str, module: str, error: Exception) -> None:
    """Log that vLLM continues without a member of PARTS."""
    _failed.add(part)
    common.warn_failed("vllm", WITHOUT[part], error)


def register() -> None:
    """Register qao with vLLM. Idempotent.

    Every version of vLLM is tried. If it lacks what a part needs, one error is logged and vLLM continues without that
    part, or without qao if that part is the key of its compile cache.
    """
    if common.is_off("vllm"):
        logging.getLogger("vllm.qao").info("%s is set: vLLM runs without qao", common.switch("vllm"))
        return
    for module, part in PARTS.items():
        when_imported(module, partial(_register, part), partial(warn_failed, part))

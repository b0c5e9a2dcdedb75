"""vLLM plugin: an entry point of the group ``vllm.general_plugins``, called by each process.

kernels.py puts qao's operators before vLLM's linear kernels, for checkpoints that vLLM reads. oracles.py does the same
for fused experts (experts.py, experts_fp8.py). config.py, linear.py and own_experts.py add the quantization method
"qao" for checkpoints in qao's own format. grouped_experts.py is shared by all experts. cache_key.py separates what vLLM
compiles with and without qao, and loaded.py logs which layers qao serves.

Nothing here imports vLLM. Each part patches one module of vLLM after any code imports that module, in any order: a part
may import the patched module and modules that it has imported. Everything else is imported when vLLM calls it.
"""

from __future__ import annotations

import logging
from functools import partial

from ..imports import register_part, when_imported
from ..serving import common

__all__ = ["PARTS", "VERSIONS", "failed_parts", "register"]

VERSIONS = ("0.33",)  # vLLM versions used in the tests; the patched interfaces change between versions

# A module of vLLM, and the module and function of this package to call after its import.
PARTS = {
    "vllm.config.vllm": "cache_key.register",
    "vllm.model_executor.kernels.linear": "kernels.register",
    "vllm.model_executor.layers.fused_moe.oracle.int_wna16": "oracles.register_int4",
    "vllm.model_executor.layers.fused_moe.oracle.fp8": "oracles.register_fp8",
    "vllm.model_executor.layers.quantization": "config.register",
    "vllm.model_executor.model_loader.utils": "loaded.register",
}

# What vLLM lacks if a part fails.
_WHAT = {
    "cache_key.register": "the key of its compile cache",
    "kernels.register": "linear layers",
    "oracles.register_int4": "fused experts of four bits",
    "oracles.register_fp8": "fused experts in fp8",
    "config.register": "checkpoints in qao's own format",
    "loaded.register": "the line that counts qao's layers",
}
_KEY = PARTS["vllm.config.vllm"]
_failed: set[str] = set()


def failed_parts() -> set[str]:
    """The members of PARTS that failed in this process."""
    return set(_failed)


def _register(part: str) -> None:
    common.check_version("vllm", VERSIONS)
    if _KEY in _failed and part != _KEY:
        raise RuntimeError("vLLM's compile cache cannot distinguish graphs with qao from graphs without it")
    module, _, function = part.partition(".")
    register_part(f"{__name__}.{module}", function)
    _failed.discard(part)


def _warn_failed(part: str, module: str, error: Exception) -> None:
    _failed.add(part)
    common.warn_failed("vllm", _WHAT[part], error)


def register() -> None:
    """Register qao with vLLM. Idempotent.

    With another version of vLLM, or if a part fails, an error is logged and vLLM continues without that part.
    """
    if common.is_off("vllm"):
        logging.getLogger("vllm.qao").info("%s is set: vLLM runs without qao", common.switch("vllm"))
        return
    for module, part in PARTS.items():
        when_imported(module, partial(_register, part), partial(_warn_failed, part))

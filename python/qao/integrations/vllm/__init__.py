"""vLLM: an entry point of the group ``vllm.general_plugins``, which each of its processes calls when it starts.

kernels.py puts qao's operators before vLLM's own linear kernels, for the checkpoints that vLLM reads, and oracles.py
those of experts.py and experts_fp8.py before its kernels of fused experts; config.py, linear.py and own_experts.py make
the quantization method "qao" known, for checkpoints in qao's own format; grouped_experts.py is what experts share.
cache_key.py keeps apart what vLLM compiles with qao and without it, and loaded.py says in the log what qao serves.

Nothing here imports vLLM. Each part changes one module of vLLM, once that module is imported, whoever imports it and
whatever else is imported by then: a part may import the module that it changes and what that has imported itself. All
else it imports when vLLM calls it.
"""

from __future__ import annotations

import logging
from functools import partial

from ..imports import register_part, when_imported
from ..serving import common

__all__ = ["PARTS", "VERSIONS", "failed_parts", "register"]

VERSIONS = ("0.33",)  # of vLLM, that the tests ran with; between two of them, what these modules rest on changes

# A module of vLLM, and a module of this folder and the function of it that is to be called once that is imported.
PARTS = {
    "vllm.config.vllm": "cache_key.register",
    "vllm.model_executor.kernels.linear": "kernels.register",
    "vllm.model_executor.layers.fused_moe.oracle.int_wna16": "oracles.register_int4",
    "vllm.model_executor.layers.fused_moe.oracle.fp8": "oracles.register_fp8",
    "vllm.model_executor.layers.quantization": "config.register",
    "vllm.model_executor.model_loader.utils": "loaded.register",
}

# What vLLM does without where a part fails.
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
    """Those of PARTS that failed in this process."""
    return set(_failed)


def _register(part: str) -> None:
    common.check_version("vllm", VERSIONS)
    if _KEY in _failed and part != _KEY:
        raise RuntimeError("vLLM's compile cache cannot tell graphs with qao from graphs without it")
    module, _, function = part.partition(".")
    register_part(f"{__name__}.{module}", function)
    _failed.discard(part)


def _say_failed(part: str, module: str, error: Exception) -> None:
    _failed.add(part)
    common.say_failed("vllm", _WHAT[part], error)


def register() -> None:
    """Makes qao known to vLLM; another call changes nothing.

    In another version of vLLM, or where a part fails, it logs an error, and vLLM goes on without that part.
    """
    if common.is_off("vllm"):
        logging.getLogger("vllm.qao").info("%s is set: vLLM runs without qao", common.switch("vllm"))
        return
    for module, part in PARTS.items():
        when_imported(module, partial(_register, part), partial(_say_failed, part))

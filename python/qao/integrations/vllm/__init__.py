"""vLLM: an entry point of the group ``vllm.general_plugins``, which each of its processes calls when it starts.

kernels.py puts qao's operators before vLLM's own linear kernels, for the checkpoints that vLLM reads, and experts.py
and experts_fp8.py before its kernels of fused experts; config.py, linear.py and own_experts.py make the quantisation
method "qao" known, for checkpoints in qao's own format; grouped_experts.py is what experts share. Nothing here imports
vLLM: what is to be told to one of its modules is told once that module is imported, by whomever.
"""

from __future__ import annotations

from functools import partial

from ..imports import when_imported
from ..served import register_beside

__all__ = ["VERSIONS", "register"]

VERSIONS = ("0.33",)  # of vLLM, that the tests ran with; between two of them, what these modules rest on changes

# A module of vLLM, and the one of this folder whose ``register`` is to be called once it is imported.
_PARTS = {
    "vllm.model_executor.kernels.linear": "kernels",
    "vllm.model_executor.layers.fused_moe.oracle.int_wna16": "experts",
    "vllm.model_executor.layers.fused_moe.oracle.fp8": "experts_fp8",
    "vllm.model_executor.layers.quantization": "config",
}


def register() -> None:
    """Makes qao known to vLLM; calling it again changes nothing. Beside another vLLM it warns, and does nothing."""
    for module, part in _PARTS.items():
        when_imported(module, partial(register_beside, "vllm", VERSIONS, f"{__name__}.{part}"))

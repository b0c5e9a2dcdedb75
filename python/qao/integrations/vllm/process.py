"""Availability of qao's kernels in a vLLM process, and patching of vLLM's functions."""

from __future__ import annotations

import sys
from typing import Any

from vllm import envs
from vllm.platforms import current_platform

from ..serving import common


def missing(compute_capability: int | None = None) -> str | None:
    """Why no qao kernel runs in this process; None if kernels run."""
    follow_batch_invariance()
    if current_platform.is_cpu():
        return None
    if not current_platform.is_cuda():
        return "qao runs on CUDA and on CPUs"
    return common.unsupported_gpu(compute_capability)


def follow_batch_invariance() -> None:
    """Make qao's operators batch-invariant if vLLM is. Called before a layer of qao is created."""
    common.follow_batch_invariance(envs.VLLM_BATCH_INVARIANT)


def replace_functions(module: str, made: dict[str, Any]) -> None:
    """Replace functions of a module, and references to them that other vLLM modules imported.

    Raises:
        AttributeError: the module lacks a function of that name. Then nothing is replaced.
    """
    own = {id(getattr(sys.modules[module], name)): name for name in made}
    for name, other in list(sys.modules.items()):
        if name.partition(".")[0] == "vllm":
            taken = [(key, own[id(value)]) for key, value in list(vars(other).items()) if id(value) in own]
            for key, function in taken:
                setattr(other, key, made[function])

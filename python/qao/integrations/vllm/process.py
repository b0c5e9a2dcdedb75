"""Whether qao's kernels run in a process of vLLM, and how functions of vLLM are replaced there."""

from __future__ import annotations

import sys
from typing import Any

from vllm import envs
from vllm.platforms import current_platform

from ..serving import common


def missing(compute_capability: int | None = None) -> str | None:
    """Why no kernel of qao runs in this process; None if they do."""
    if envs.VLLM_BATCH_INVARIANT:
        return "VLLM_BATCH_INVARIANT: qao chooses its kernels by the number of tokens"
    if current_platform.is_cpu():
        return None
    if not current_platform.is_cuda():
        return "qao runs on CUDA and on CPUs"
    return common.gpu_obstacle(compute_capability)


def replace_functions(module: str, made: dict[str, Any]) -> None:
    """Puts functions in the place of a module's, and of the same ones that modules of vLLM took from it before.

    Raises:
        AttributeError: the module has no function of such a name. Then none is replaced.
    """
    own = {id(getattr(sys.modules[module], name)): name for name in made}
    for name, other in list(sys.modules.items()):
        if name.partition(".")[0] == "vllm":
            taken = [(key, own[id(value)]) for key, value in list(vars(other).items()) if id(value) in own]
            for key, function in taken:
                setattr(other, key, made[function])

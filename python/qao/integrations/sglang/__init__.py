"""SGLang plugin: an entry point of the group ``sglang.srt.plugins``, called by each process.

config.py and linear.py add the quantization method "qao" for checkpoints in qao's own format. layouts.py puts qao's
choice of kernels before SGLang's, for linear layers (method.py, kernels.py) and fused experts (experts.py) of
checkpoints that SGLang reads. adapter.py has the differences between versions. Nothing here imports SGLang: its table
of methods is patched after any code imports that module.
"""

from __future__ import annotations

import logging
from functools import partial

from ..imports import register_part, when_imported
from ..serving import common

__all__ = ["WITHOUT", "register"]

# A module of this package, and what happens if it fails.
WITHOUT = {
    "config": "checkpoints in qao's own format cannot be served",
    "layouts": "linear layers and fused experts use SGLang's own kernels",
    "method": "linear layers use SGLang's own kernels",
    "experts": "fused experts use SGLang's own kernels",
}


def _warn_failed(part: str, module: str, error: Exception) -> None:
    common.warn_failed("sglang", WITHOUT[part], error)


def register() -> None:
    """Register qao with SGLang. Idempotent.

    Every version of SGLang is tried. If it lacks what a part needs, one error is logged and SGLang continues without
    that part.
    """
    if common.is_off("sglang"):
        logging.getLogger("sglang.qao").info("%s is set: SGLang runs without qao", common.switch("sglang"))
        return
    for part in ("config", "layouts"):
        register_this = partial(register_part, f"{__name__}.{part}")
        when_imported("sglang.srt.layers.quantization", register_this, partial(_warn_failed, part))

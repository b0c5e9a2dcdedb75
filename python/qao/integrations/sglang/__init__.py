"""SGLang plugin: an entry point of the group ``sglang.srt.plugins``, called by each process.

config.py and linear.py add the quantization method "qao" for checkpoints in qao's own format. layouts.py puts qao's
choice of kernels (method.py, kernels.py) before SGLang's, for linear layers of checkpoints that SGLang reads. Nothing
here imports SGLang: its table of methods is patched after any code imports that module.
"""

from __future__ import annotations

import logging
from functools import partial

from ..imports import register_part, when_imported
from ..serving import common

__all__ = ["VERSIONS", "register"]

VERSIONS = ("0.5",)  # SGLang versions used in the tests, first two numbers

# A module of this package, and what SGLang lacks if it fails.
_PARTS = {"config": "checkpoints in qao's own format", "layouts": "linear layers"}


def _register(part: str) -> None:
    common.check_version("sglang", VERSIONS)
    register_part(f"{__name__}.{part}")


def _warn_failed(part: str, module: str, error: Exception) -> None:
    common.warn_failed("sglang", _PARTS[part], error)


def register() -> None:
    """Register qao with SGLang. Idempotent.

    With another version of SGLang, or if a part fails, an error is logged and SGLang continues without that part.
    """
    if common.is_off("sglang"):
        logging.getLogger("sglang.qao").info("%s is set: SGLang runs without qao", common.switch("sglang"))
        return
    for part in _PARTS:
        when_imported("sglang.srt.layers.quantization", partial(_register, part), partial(_warn_failed, part))

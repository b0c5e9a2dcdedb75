"""SGLang: an entry point of the group ``sglang.srt.plugins``, which each of its processes calls when it starts.

config.py and linear.py make the quantization method "qao" known, for checkpoints in qao's own format; layouts.py puts
qao's choice of kernels (method.py, kernels.py) before SGLang's own, for linear layers of checkpoints that SGLang reads.
Nothing here imports SGLang: its table of methods is told once that module is imported, by whomever.
"""

from __future__ import annotations

import logging
from functools import partial

from ..imports import register_part, when_imported
from ..serving import common

__all__ = ["VERSIONS", "register"]

VERSIONS = ("0.5",)  # of SGLang: the first two numbers, of the ones that the tests ran with

# A module of this folder, and what SGLang does without where it fails.
_PARTS = {"config": "checkpoints in qao's own format", "layouts": "linear layers"}


def _register(part: str) -> None:
    common.check_version("sglang", VERSIONS)
    register_part(f"{__name__}.{part}")


def _say_failed(part: str, module: str, error: Exception) -> None:
    common.say_failed("sglang", _PARTS[part], error)


def register() -> None:
    """Makes qao known to SGLang; another call changes nothing.

    In another version of SGLang, or where a part fails, it logs an error, and SGLang goes on without that part.
    """
    if common.is_off("sglang"):
        logging.getLogger("sglang.qao").info("%s is set: SGLang runs without qao", common.switch("sglang"))
        return
    for part in _PARTS:
        when_imported("sglang.srt.layers.quantization", partial(_register, part), partial(_say_failed, part))

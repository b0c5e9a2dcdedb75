"""SGLang: an entry point of the group ``sglang.srt.plugins``, which each of its processes calls when it starts.

config.py and linear.py make the quantisation method "qao" known, for checkpoints in qao's own format; layouts.py puts
qao's choice of kernels (method.py, kernels.py) before SGLang's own, for linear layers of checkpoints that SGLang reads.
Nothing here imports SGLang: its table of methods is told once that module is imported, by whomever.
"""

from __future__ import annotations

from functools import partial

from ..imports import when_imported
from ..served import register_beside

__all__ = ["VERSIONS", "register"]

VERSIONS = ("0.5",)  # of SGLang: the first two numbers, of the ones that the tests ran with


def register() -> None:
    """Makes qao known to SGLang; calling it again changes nothing. Beside another SGLang it warns, and does nothing."""
    for part in ("config", "layouts"):
        tell = partial(register_beside, "sglang", VERSIONS, f"{__name__}.{part}")
        when_imported("sglang.srt.layers.quantization", tell)

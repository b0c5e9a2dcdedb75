"""Warning for a CPU-only build of qao on a machine with GPUs."""

from __future__ import annotations

import warnings
from functools import cache

import torch

from .._words import counted
from ..ops.library import build_info


def problem() -> str | None:
    """The problem and its remedy; None if the build has CUDA kernels or no GPU exists."""
    if torch.version.cuda is None or build_info()["cuda"]:
        return None
    count = torch.cuda.device_count()  # by NVML, without a CUDA context
    if not count:
        return None
    return (
        f"torch sees {counted(count, 'GPU')}, but this build of qao has no CUDA kernels and runs on CPUs only. Install "
        "a CUDA toolkit of 12.4 or newer, set CUDA_HOME to it, and build qao again with QAO_CUDA=ON"
    )


@cache
def warn_once() -> None:
    """Emits a UserWarning for the first layer that is created."""
    if (text := problem()) is not None:
        warnings.warn(f"qao: {text}.", stacklevel=2)

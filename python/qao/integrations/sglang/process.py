"""Process-wide state in SGLang: availability of qao's kernels, and log messages."""

from __future__ import annotations

import logging

import torch
from sglang.srt.batch_invariant_ops import is_batch_invariant_mode_enabled
from sglang.srt.utils import is_cuda

from ..serving import common
from .adapter import settings

logger = logging.getLogger(__name__)


def missing(device: torch.device) -> str | None:
    """Why no qao kernel runs in this process; None if kernels run."""
    follow_batch_invariance()
    if is_cuda():
        major, minor = torch.cuda.get_device_capability()
        return common.unsupported_gpu(10 * major + minor)
    return None if device.type == "cpu" else "qao runs on CUDA and on CPUs"


def follow_batch_invariance() -> None:
    """Make qao's operators batch-invariant if SGLang is. Called before a layer of qao is created."""
    common.follow_batch_invariance(is_batch_invariant_mode_enabled() or _deterministic())


def _deterministic() -> bool:
    try:
        return bool(settings("exec.deterministic").enable_deterministic_inference)
    except ValueError:  # no server arguments set
        return False


_logged: set[str] = set()


def _once(key: str, message: str, *of: object) -> None:
    if key not in _logged:
        _logged.add(key)
        logger.info(message, *of)


def log_served(operator: str, name: str) -> None:
    """Log once that layers of this operator use qao."""
    _once(operator, "qao serves layers such as %s with %s", name, operator)


def log_unsupported(reason: str, name: str) -> None:
    """Log once that layers are left to SGLang for this reason."""
    _once(reason, "qao leaves layers such as %s to SGLang: %s", name, reason)

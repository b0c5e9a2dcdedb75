"""qao's contribution to the key of vLLM's compilation caches.

All that vLLM keeps between runs (torch.compile graphs and artifacts, ahead of time or not, Inductor's and Triton's
caches in their folders, memory plans) is stored under ``VllmConfig.compute_hash``. A graph with qao's kernels takes
qao's packed weights, so a run without qao, or with another build of qao, must not read it.
"""

from __future__ import annotations

import hashlib
import os
import sys
from functools import cache
from pathlib import Path
from typing import Any

from ..._version import __version__
from ...ops.library import build_info
from ..serving.interface import function_of
from ..wrapping import wrap
from . import PARTS, failed_parts


@cache
def _sources() -> str:
    """A digest of qao's Python files and of the size of its library, since builds may share a version."""
    package = Path(__file__).parents[2]
    digest = hashlib.sha256()
    for path in sorted(package.rglob("*.py")):
        digest.update(str(path.relative_to(package)).encode() + b"\0" + path.read_bytes())
    for path in sorted(package.glob("_C*.so")):
        digest.update(f"{path.name} {path.stat().st_size}".encode())
    return digest.hexdigest()


def factors() -> list[str]:
    """qao's version and build, its active parts, and its switches in this process."""
    build = sorted(build_info().items())
    parts = sorted({*PARTS.values()} - failed_parts())
    switches = sorted(f"{name}={value}" for name, value in os.environ.items() if name.startswith("QAO_"))
    return [f"qao {__version__}", _sources(), str(build), *parts, *switches]


def register() -> None:
    """Make ``VllmConfig.compute_hash`` include ``factors()``. Idempotent."""
    config: Any = sys.modules["vllm.config.vllm"].VllmConfig
    function_of(config, "compute_hash", "self")
    wrap(config, "compute_hash", _with_factors)


def _with_factors(own: Any) -> Any:
    def compute_hash(self: Any, *args: Any, **kwargs: Any) -> str:
        found = own(self, *args, **kwargs)
        return hashlib.sha256("\n".join([found, *factors()]).encode()).hexdigest()[: len(found)]

    return compute_hash

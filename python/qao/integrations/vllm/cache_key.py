"""What qao changes in vLLM, as a part of the key by which vLLM finds what it compiled before.

All that vLLM keeps between runs (graphs and artifacts of torch.compile, ahead of time or not, Inductor's and Triton's
caches inside their folders, plans of memory) lies under ``VllmConfig.compute_hash``. A graph that qao's kernels are in
takes weights as qao packs them, so no run without qao, and none with another qao, may read it.
"""

from __future__ import annotations

import hashlib
import os
import sys
from functools import cache, wraps
from pathlib import Path
from typing import Any

from ..._version import __version__
from ...schemes.base import _host
from . import PARTS, failed_parts


@cache
def _sources() -> str:
    """A digest of qao's Python files and of the size of its library: builds may share a version."""
    package = Path(__file__).parents[2]
    digest = hashlib.sha256()
    for path in sorted(package.rglob("*.py")):
        digest.update(str(path.relative_to(package)).encode() + b"\0" + path.read_bytes())
    for path in sorted(package.glob("_C*.so")):
        digest.update(f"{path.name} {path.stat().st_size}".encode())
    return digest.hexdigest()


def factors() -> list[str]:
    """Of the key, what qao adds in this process: its version and build, its parts that run, and its switches."""
    build = sorted(_host.build_info().items()) if _host is not None else []
    parts = sorted({*PARTS.values()} - failed_parts())
    switches = sorted(f"{name}={value}" for name, value in os.environ.items() if name.startswith("QAO_"))
    return [f"qao {__version__}", _sources(), str(build), *parts, *switches]


def register() -> None:
    """Makes ``VllmConfig.compute_hash`` add ``factors()``; another call changes nothing."""
    config: Any = sys.modules["vllm.config.vllm"].VllmConfig
    own = config.compute_hash
    if getattr(own, "knows_qao", False):
        return

    @wraps(own)
    def compute_hash(self: Any, *args: Any, **kwargs: Any) -> str:
        found = own(self, *args, **kwargs)
        return hashlib.sha256("\n".join([found, *factors()]).encode()).hexdigest()[: len(found)]

    compute_hash.knows_qao = True  # type: ignore[attr-defined]
    config.compute_hash = compute_hash

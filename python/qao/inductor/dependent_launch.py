"""Waits of Inductor's Triton kernels under programmatic dependent launch.

Inductor (``triton.enable_pdl``) launches a kernel before the one in front of it ends, and lets it wait behind its first
loads, or in front of a load of that kernel's results. To find these it compares names of buffers, and misses a buffer
that is written in place under another name: the copy of a static cache read keys that the kernel in front had not
written yet, and ``generate()`` chose wrong tokens. A kernel without loads never waits, so that the kernel behind it,
which waits for that one alone, may read too early. To wait before anything else is right for every kernel.
"""

from __future__ import annotations

import functools
from typing import Any


def wait_first() -> None:
    """Make every Triton kernel that Inductor generates for programmatic dependent launch begin with the wait."""
    from torch._inductor.codegen.triton import TritonKernel

    upstream = getattr(TritonKernel, "_filter_pdl", None)
    if upstream is not None and not hasattr(upstream, "__wrapped__"):
        TritonKernel._filter_pdl = _with_wait(upstream)  # type: ignore[method-assign]


def _with_wait(upstream: Any) -> Any:
    @functools.wraps(upstream)
    def _filter_pdl(kernel: Any, code: Any) -> None:
        upstream(kernel, code)  # keeps the last of the signals to the kernel behind
        if kernel._enable_pdl_codegen():
            code._lines = [kernel.GDC_WAIT, *(line for line in code._lines if kernel.GDC_WAIT not in str(line))]

    return _filter_pdl

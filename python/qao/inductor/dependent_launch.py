"""Waits of Triton kernels that load nothing, where Inductor launches a kernel before the one in front of it ends.

Inductor (``triton.enable_pdl``) lets a kernel wait for the one in front of it behind a load, or before it overwrites
what that one reads or writes. A kernel that does neither never waits. It may end first, and the kernel behind it, which
waits for it alone, then reads results that are not written yet.
"""

from __future__ import annotations

import functools
from typing import Any


def wait_without_loads() -> None:
    """Make every Triton kernel that Inductor generates for programmatic dependent launch wait at least once."""
    from torch._inductor.codegen.triton import TritonKernel

    upstream = getattr(TritonKernel, "_filter_pdl", None)
    if upstream is not None and not hasattr(upstream, "__wrapped__"):
        TritonKernel._filter_pdl = _with_wait(upstream)  # type: ignore[method-assign]


def _with_wait(upstream: Any) -> Any:
    @functools.wraps(upstream)
    def _filter_pdl(kernel: Any, code: Any) -> None:
        upstream(kernel, code)
        if kernel._enable_pdl_codegen() and not any(kernel.GDC_WAIT in str(line) for line in code._lines):
            code._lines.insert(0, kernel.GDC_WAIT)

    return _filter_pdl

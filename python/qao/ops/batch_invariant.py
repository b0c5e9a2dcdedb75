"""``batch_invariant()``: a mode in which the bits of a row of y do not depend on the other rows of x.

The GEMM operators have an argument of that name. Layers set it from the mode in which they are called or traced, so a
graph keeps the mode of its capture.
"""

from __future__ import annotations

from types import TracebackType


class _Mode:
    on = False


MODE = _Mode()


class batch_invariant:  # noqa: N801  # used as a function, as torch.no_grad is
    """A context in which the forward of quantized layers is batch-invariant: y[i] depends on x[i] and W alone.

    Kernel selection then ignores the number of rows, which costs time (docs/numerics.md). The context applies to the
    process, not to a thread. Graphs keep the mode in which they were traced; torch.compile retraces if it changes.

    Args:
        enabled: False restores the default inside an outer context.
    """

    def __init__(self, enabled: bool = True) -> None:
        self.enabled = enabled
        self.before = False

    def __enter__(self) -> None:
        self.before = MODE.on
        MODE.on = self.enabled

    def __exit__(
        self, kind: type[BaseException] | None, error: BaseException | None, trace: TracebackType | None
    ) -> None:
        MODE.on = self.before

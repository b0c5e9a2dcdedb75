"""Single-threaded CPU loops over small parts: waiting for a thread pool is slow on a busy machine."""

from __future__ import annotations

from collections.abc import Sequence

from torch import Tensor

SERIAL_VALUES = 1 << 15  # torch runs elementwise operations of this size on the calling thread


def serial_parts(values: Tensor) -> Sequence[Tensor]:
    """All values, in parts of SERIAL_VALUES on a CPU, in one part on other devices."""
    return values.flatten().split(SERIAL_VALUES) if values.device.type == "cpu" else (values,)

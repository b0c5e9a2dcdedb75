"""What the calling thread does alone on a CPU: each wait for others beside a busy process takes slices of its time."""

from __future__ import annotations

from collections.abc import Sequence

from torch import Tensor

SERIAL_VALUES = 1 << 15  # of which torch gives none to another thread


def serial_parts(values: Tensor) -> Sequence[Tensor]:
    """All values, in parts so small on a CPU; in one elsewhere."""
    return values.flatten().split(SERIAL_VALUES) if values.device.type == "cpu" else (values,)

"""Helpers shared by all parts of the demo."""

from __future__ import annotations

from collections.abc import Sequence

import qao
from torch import nn

# Every scheme with its defaults, by word.
SCHEMES: dict[str, qao.Scheme] = {
    scheme.word: scheme
    for scheme in (
        qao.Int4WeightOnly(),
        qao.Int8WeightOnly(),
        qao.Float8WeightOnly(),
        qao.Int8DynamicActivationInt8Weight(),
        qao.Int8DynamicActivationInt4Weight(),
        qao.Float8DynamicActivationFloat8Weight(),
        qao.Float8DynamicActivationInt4Weight(),
    )
}


def linear_bytes(model: nn.Module) -> int:
    """Bytes of the parameters of all linear layers, including biases."""
    layers = (module for module in model.modules() if isinstance(module, (nn.Linear, qao.QuantLinear)))
    return sum(parameter.nbytes for layer in layers for parameter in layer.parameters())


def mebibytes(size: int) -> str:
    return f"{size / 2**20:.1f} MiB"


def print_table(header: Sequence[str], rows: Sequence[Sequence[str]]) -> None:
    """A table with the first column left-aligned, the others right-aligned."""
    widths = [max(len(line[i]) for line in [header, *rows]) for i in range(len(header))]
    print()
    for line in [header, ["-" * width for width in widths], *rows]:
        first, *others = (cell.rjust(width) for cell, width in zip(line, widths, strict=True))
        print("  ".join([line[0].ljust(len(first)), *others]))
    print()

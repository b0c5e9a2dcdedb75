"""Functions of other packages that quantize_ and dequantize_ call with a model that they have changed."""

from __future__ import annotations

from collections.abc import Callable

from torch import nn

quantized: list[Callable[[nn.Module], None]] = []
dequantized: list[Callable[[nn.Module], None]] = []

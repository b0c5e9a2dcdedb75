"""Callbacks of integrations, called by quantize_ and dequantize_ with the changed model."""

from __future__ import annotations

from collections.abc import Callable

from torch import nn

quantized: list[Callable[[nn.Module], None]] = []
dequantized: list[Callable[[nn.Module], None]] = []

"""Weights of qao as blocks of GGUF: int4 as Q4_0 or Q4_1, int8 as Q8_0, GGUF's own unchanged. Codes stay as they are.

Blocks of 32 columns share float16 numbers d and m, see read.py. A scale of more columns is repeated. Q4_1's m is
-zero * scale. What float16 cannot hold exactly is rounded; the error is reported in steps of the codes.
"""

from __future__ import annotations

import torch
from torch import Tensor

from ...schemes import GgufWeightOnly, Int4Weight, Int8Weight
from ..base import CheckpointError, Plain, QuantizedLayer

_BLOCK = 32
_LARGEST_ERROR = 0.5  # in steps: a code would be another


def type_of(layer: QuantizedLayer) -> str:
    """The type of a layer's weight in the file.

    Raises:
        CheckpointError: no type holds its codes.
    """
    scheme, k = layer.scheme, layer.in_features
    remedy = "quantize the float model with int4 (any group size) or int8 instead, or write it in float"
    reason = (
        f"blocks have {_BLOCK} columns, and in_features {k} is not a multiple"
        if k % _BLOCK
        else "the weight is rotated"
        if scheme.rotation_of(k)
        else None
    )
    if isinstance(scheme, GgufWeightOnly):
        return scheme.qtype
    if reason is None and isinstance(scheme, Int4Weight):
        return "Q4_0" if scheme.symmetric else "Q4_1"
    if reason is None and isinstance(scheme, Int8Weight):
        return "Q8_0"
    reason = reason or f"Q4_0, Q4_1 and Q8_0 hold int4 and int8, not {scheme.weights}"
    raise CheckpointError(f"GGUF cannot hold {layer.name} ({scheme}): {reason}; {remedy}")


def encoded(layer: QuantizedLayer, part: int = 0, parts: int = 1) -> tuple[Tensor, float]:
    """uint8 [N, bytes per row], and the largest change of a value in steps of its block.

    Experts: [E, N / parts, bytes per row], of rows ``part`` N / parts and following of every expert.

    Raises:
        CheckpointError: scales are outside the range of float16.
    """
    plain, kind = layer.read(), type_of(layer)
    stacked = layer.experts is not None
    if isinstance(layer.scheme, GgufWeightOnly):
        return (plain.q.chunk(parts, 1)[part] if stacked else plain.q), 0.0
    *experts, n, k = plain.q.shape
    if stacked:
        plain = Plain(*(None if one is None else one.chunk(parts, 1)[part].flatten(0, 1) for one in plain))  # type: ignore[arg-type]
        n = plain.q.shape[0]
    scales = _by_block(plain.scales, n, k)
    d = scales.half()
    largest = {"Q4_0": 8, "Q4_1": 15, "Q8_0": 127}[kind]
    step = torch.where(scales == 0, 1.0, scales).abs()
    error = largest * (d.double() - scales).abs() / step
    fields = [_bytes(d)]
    if plain.zeros is not None:
        minima = -_by_block(plain.zeros, n, k) * scales
        m = minima.half()
        error = error + (m.double() - minima).abs() / step
        fields.append(_bytes(m))
    worst = float(error.nan_to_num(torch.inf).max())
    if worst >= _LARGEST_ERROR:
        raise CheckpointError(
            f"GGUF cannot hold {layer.name} ({layer.scheme}): its scales or minima are outside the range of float16: a "
            f"value would move by {worst:.3g} steps. Quantize the float model with int8, or write it in float"
        )
    blocks = torch.cat([*fields, _codes(plain, kind)], -1).flatten(1)
    return blocks.unflatten(0, (*experts, -1)), worst


def _by_block(values: Tensor, n: int, k: int) -> Tensor:
    """float64 [N, blocks], from one value per row or per group of columns."""
    groups = values.double().reshape(n, -1)
    size = -(-k // groups.shape[1] // _BLOCK)  # blocks of a group; the last one may be shorter
    blocks: Tensor = groups.repeat_interleave(size, 1)[:, : k // _BLOCK]
    return blocks


def _codes(plain: Plain, kind: str) -> Tensor:
    blocks: Tensor = plain.q.unflatten(1, (-1, _BLOCK))
    if kind == "Q8_0":
        return blocks.contiguous().view(torch.uint8)
    low, high = blocks.chunk(2, -1)
    return low | high << 4


def _bytes(halves: Tensor) -> Tensor:
    pairs: Tensor = halves.contiguous().view(torch.uint8).unflatten(-1, (-1, 2))
    return pairs

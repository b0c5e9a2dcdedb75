"""Shared unpacking helpers: 32-bit words, supported group sizes, and 8-bit weights."""

from __future__ import annotations

import torch
from torch import Tensor

from ..ops.packed_shape import SCALE_BLOCK
from .base import Plain
from .files import FLOATS, TensorFiles

__all__ = ["fp8_scale_shapes", "group_size_of", "nibbles", "packed_nibbles", "read_fp8", "regroup", "unpack"]

_GROUPS = (256, 128, 64, 32)


def unpack(words: Tensor, bits: int) -> Tensor:
    """Unpack int32 [R, C] to uint8 [R, 32 / bits · C], for 4 or 8 bits: the lowest bits of a word come first."""
    # Clone: a transposed single column counts as contiguous with any stride and keeps it.
    values = words.clone(memory_format=torch.contiguous_format).view(torch.uint8)
    return values if bits == 8 else nibbles(values)


def nibbles(pairs: Tensor) -> Tensor:
    """Unpack uint8 [..., C] to uint8 [..., 2 C] of 0..15: low nibbles come first."""
    return torch.stack((pairs & 15, pairs >> 4), dim=-1).flatten(-2)


def packed_nibbles(values: Tensor) -> Tensor:
    """The inverse of ``unpack`` with 4 bits: int32 [R, ceil(C / 8)] from uint8 [R, C], padded with 0."""
    pairs = torch.nn.functional.pad(values, (0, -values.shape[1] % 8)).view(len(values), -1, 2)
    return (pairs[..., 0] | pairs[..., 1] << 4).contiguous().view(torch.int32)


def group_size_of(given: int, k: int) -> int | None:
    """A supported group size equivalent to groups of ``given`` columns (-1: the row); None if there is none."""
    if given in _GROUPS:
        return given
    if given == -1 or given >= k:
        return -1
    return next((size for size in _GROUPS if given % size == 0), None)


def regroup(scales: Tensor, given: int, k: int) -> Tensor:
    """Repeat scales or zeros [N, ceil(K / given)] for ``group_size_of(given, k)``. Exact."""
    size = group_size_of(given, k)
    if size is None or size in (given, -1):
        return scales
    return scales.repeat_interleave(given // size, 1)[:, : -(-k // size)]


def grouping(files: TensorFiles, name: str, given: int, k: int) -> tuple[int, str | None]:
    """``group_size_of``, with a note if it differs from the stored one. Raises CheckpointError if there is none."""
    size = group_size_of(given, k)
    if given == 0 or size is None:
        raise files.error(
            name, f"has groups of {given} columns; qao supports groups of 32, 64, 128, 256 and their multiples"
        )
    return size, None if size in (given, -1) else f"groups of {given} columns as groups of {size}"


def fp8_scale_shapes(granularity: str, n: int, k: int) -> tuple[tuple[int, ...], ...]:
    """The valid shapes of the scales of an e4m3 weight [n, k]."""
    if granularity == "block":
        return ((-(-n // SCALE_BLOCK), -(-k // SCALE_BLOCK)),)
    return ((n, 1), (n,)) if granularity == "row" else ((), (1,), (1, 1))


FP8_SCALES = (*FLOATS, torch.float8_e8m0fnu)


def read_fp8(files: TensorFiles, weight: str, scale: str, rows: int | None = None) -> Plain:
    """An e4m3 weight and its scales, free of NaN. ``rows``: repeat a per-tensor scale for that many rows."""
    q, scales = files.read(weight), files.finite(scale)
    if ((q.view(torch.uint8) & 0x7F) == 0x7F).any():
        raise files.error(weight, "holds NaN: the file is damaged")
    scales = scales.reshape(1, 1) if scales.numel() == 1 else scales.reshape(len(scales), -1)
    return Plain(q, scales if rows is None else scales.expand(rows, 1).contiguous())


def four_bits(files: TensorFiles, name: str, values: Tensor) -> Tensor:
    """Shift int8 -8..7 to uint8 0..15."""
    lowest, highest = (int(one) for one in torch.aminmax(values))
    if lowest < -8 or highest > 7:
        raise files.error(name, f"holds {lowest if lowest < -8 else highest}; four-bit values are -8..7")
    return (values + 8).view(torch.uint8)


def check_layer_name(files: TensorFiles, key: str, suffix: str) -> str:
    """The module name of the tensor ``key``."""
    name = key.removesuffix(suffix)
    if not name or name.endswith("."):
        raise files.error(key, "no module has this name")
    return name

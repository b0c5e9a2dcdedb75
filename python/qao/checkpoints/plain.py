"""Plain values out of words of 32 bits, groups that qao has kernels for, and weights of eight bits."""

from __future__ import annotations

import torch
from torch import Tensor

from ..ops.packed_shape import SCALE_BLOCK
from .base import CheckpointError, Plain
from .files import FLOATS, TensorFiles

__all__ = ["as_bytes", "fp8_scale_shapes", "group_size_of", "nibbles", "packed_nibbles", "read_fp8", "regroup"]

_GROUPS = (256, 128, 64, 32)


def nibbles(words: Tensor) -> Tensor:
    """uint8 [R, 8 C] of 0..15 from int32 [R, C]: nibble i of a word is column 8 c + i."""
    pairs = as_bytes(words)
    return torch.stack((pairs & 15, pairs >> 4), dim=-1).view(len(words), -1)


def as_bytes(words: Tensor) -> Tensor:
    """uint8 [R, 4 C], the bytes of int32 [R, C]."""
    # A clone, since a single column that was transposed counts as contiguous whatever its stride, and keeps it.
    return words.clone(memory_format=torch.contiguous_format).view(torch.uint8)


def packed_nibbles(values: Tensor) -> Tensor:
    """The inverse: int32 [R, ceil(C / 8)] from uint8 [R, C]; what is missing is 0."""
    pairs = torch.nn.functional.pad(values, (0, -values.shape[1] % 8)).view(len(values), -1, 2)
    return (pairs[..., 0] | pairs[..., 1] << 4).contiguous().view(torch.int32)


def group_size_of(given: int, k: int) -> int | None:
    """The group size of qao that says the same as groups of ``given`` columns (-1: the row); None if there is none."""
    if given in _GROUPS:
        return given
    if given == -1 or given >= k:
        return -1
    return next((size for size in _GROUPS if given % size == 0), None)


def regroup(scales: Tensor, given: int, k: int) -> Tensor:
    """Scales or zeros [N, ceil(K / given)] repeated for ``group_size_of(given, k)``: exact."""
    size = group_size_of(given, k)
    if size is None or size in (given, -1):
        return scales
    return scales.repeat_interleave(given // size, 1)[:, : -(-k // size)]


def grouping(files: TensorFiles, name: str, given: int, k: int) -> tuple[int, str | None]:
    """``group_size_of``, with a note where it is not as stored; CheckpointError where there is none."""
    size = group_size_of(given, k)
    if given == 0 or size is None:
        raise files.error(
            name, f"has groups of {given} columns; qao has kernels for groups of 32, 64, 128, 256 and multiples of them"
        )
    return size, None if size in (given, -1) else f"groups of {given} columns as groups of {size}"


def fp8_scale_shapes(granularity: str, n: int, k: int) -> tuple[tuple[int, ...], ...]:
    """Shapes that the scales of an e4m3 weight [n, k] may have."""
    if granularity == "block":
        return ((-(-n // SCALE_BLOCK), -(-k // SCALE_BLOCK)),)
    return ((n, 1), (n,)) if granularity == "row" else ((), (1,), (1, 1))


FP8_SCALES = (*FLOATS, torch.float8_e8m0fnu)


def read_fp8(files: TensorFiles, weight: str, scale: str, rows: int | None = None) -> Plain:
    """An e4m3 weight and its scales, free of NaN. ``rows``: one scale for all of W is repeated for that many."""
    q, scales = files.read(weight), files.finite(scale)
    if ((q.view(torch.uint8) & 0x7F) == 0x7F).any():
        raise files.error(weight, "holds NaN: the file is damaged")
    scales = scales.reshape(1, 1) if scales.numel() == 1 else scales.reshape(len(scales), -1)
    return Plain(q, scales if rows is None else scales.expand(rows, 1).contiguous())


def four_bits(files: TensorFiles, name: str, values: Tensor) -> Tensor:
    """uint8 0..15 from int8 -8..7."""
    lowest, highest = (int(one) for one in torch.aminmax(values))
    if lowest < -8 or highest > 7:
        raise files.error(name, f"holds {lowest if lowest < -8 else highest}; values of four bits are -8..7")
    return (values + 8).view(torch.uint8)


def check_layer_name(key: str, suffix: str) -> str:
    """The name of the module whose tensor ``key`` is."""
    name = key.removesuffix(suffix)
    if not name or name.endswith("."):
        raise CheckpointError(f"{key}: this name belongs to no module")
    return name

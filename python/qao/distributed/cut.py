"""Partition of a weight among ranks, and one rank's part of it, without collectives."""

from __future__ import annotations

from typing import NamedTuple

import torch
from torch import Tensor

from ..schemes import Fp4Weight, Int4Weight, PackedWeight, Scheme

_TILE = 16, 64  # rows and columns of a packed int4 tile (cuda/layout/int4.h)


class Cut(NamedTuple):
    """One rank's part [begin, end) of one dimension of a weight, split as in ``torch.chunk`` and DTensor."""

    dim: int  # of W [N, K]: 0 rows, 1 columns
    size: int  # of the whole dimension
    begin: int
    end: int
    rank: int
    world: int

    def of(self, tensor: Tensor, unit: int = 1) -> Tensor:
        """The part of a tensor with one entry per ``unit`` rows or columns; a tensor with a single entry is whole."""
        if tensor.dim() <= self.dim or tensor.shape[self.dim] == 1:
            return tensor
        first, last = self.begin // unit, -(-self.end // unit)
        return tensor.narrow(self.dim, first, last - first)


def units(scheme: Scheme, sizes: tuple[int, int]) -> tuple[int, int]:
    """Rows and columns of a weight that must stay on one rank: they share a scale or a rotation block."""
    rows, columns = scheme.units(*sizes)
    return rows, max(columns, scheme.rotation_of(sizes[1]))


def cut(sizes: tuple[int, int], dim: int, units: tuple[int, int], rank: int, world: int, what: str) -> Cut:
    """The part of ``rank``.

    Raises:
        ValueError: the split would separate rows or columns that share a scale, or leave a rank empty. The message
            begins with ``what`` and lists the numbers of ranks that work.
    """
    size, unit = sizes[dim], units[dim]
    if not _works(size, unit, world):
        fit = [n for n in range(1, min(4096, -(-size // unit)) + 1) if _works(size, unit, n)]
        shown = ", ".join(map(str, fit[:16])) + (", …" if len(fit) > 16 else "")
        name = ("rows (out_features)", "columns (in_features)")[dim]
        why = f"in units of {unit} that share a scale or a rotation" if unit > 1 else "and every rank must get some"
        raise ValueError(
            f"{what}: its weight {list(sizes)} cannot be divided among {world} ranks: {size} {name}, {why}. Numbers of "
            f"ranks that work: {shown}. Others need a smaller group_size or rotation, granularity 'row', or this layer "
            "left whole."
        )
    chunk = -(-size // world)
    return Cut(dim, size, chunk * rank, min(size, chunk * (rank + 1)), rank, world)


def _works(size: int, unit: int, world: int) -> bool:
    chunk = -(-size // world)
    return chunk * (world - 1) < size and (world == 1 or chunk % unit == 0)


def part(scheme: Scheme, packed: PackedWeight, sizes: tuple[int, int], cut: Cut) -> PackedWeight:
    """One rank's part of a quantized weight, repacked: the same codes and scales, sums over the rank's columns."""
    q, scales, zeros = scheme.unpack(packed.qweight, packed.scales, *sizes)
    unit = scheme.units(*sizes)[cut.dim]
    zeros = None if zeros is None else cut.of(zeros, unit)
    made = scheme.pack(cut.of(q).contiguous(), cut.of(scales, unit), zeros)
    return made._replace(
        qweight=local(made.qweight),
        scales=local(made.scales),
        activation_scale=packed.activation_scale,
        row_scales=None if packed.row_scales is None else local(cut.of(packed.row_scales)),  # the same on all ranks
    )


def joins(scheme: Scheme, sizes: tuple[int, int], cut: Cut) -> bool:
    """Whether the concatenated parts of all ranks form the packed whole weight."""
    chunk = -(-sizes[cut.dim] // cut.world)
    if isinstance(scheme, Fp4Weight) and scheme.format == "nvfp4" and cut.dim == 1:
        return cut.world == 1  # the scales of each part end with the divisor of its rows
    tile = _TILE[cut.dim] if isinstance(scheme, (Fp4Weight, Int4Weight)) else 1
    return cut.world == 1 or (chunk % tile == 0 and chunk % scheme.units(*sizes)[cut.dim] == 0)


def is_cut(key: str, scheme: Scheme | None, sizes: tuple[int, int], dim: int) -> bool:
    """Whether a tensor of a layer is split along its dimension ``dim`` or replicated on every rank."""
    if key in ("weight", "qweight"):
        return True
    if key in ("bias", "weight_sums", "row_scales"):
        return dim == 0
    if key != "scales" or scheme is None:
        return False
    shape = scheme._plain(*sizes)[1]
    return len(shape) > dim and shape[dim] > 1


def local(tensor: Tensor) -> Tensor:
    """A copy, so that the memory of the whole tensor can be freed."""
    return tensor.detach().clone(memory_format=torch.contiguous_format)

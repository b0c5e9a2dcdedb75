"""dgrad of a grouped GEMM: each row of dy times W of its expert.

It is an operator, so that graphs contain no loop over experts. On the CPU it reads the offsets and runs one GEMM per
expert. On a GPU it does not synchronize: it splits the rows into tiles of one expert each, with an upper bound on the
number of tiles that holds for any offsets, and runs batched GEMMs (bmm) of tiles and their dequantized weights. The
indices of rows and weights stay on the device.
"""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

import torch
from torch import Tensor

from .autograd import _library
from .dequantize import dense_int4
from .packed_shape import int4_sizes

Dense = Callable[..., Tensor]
_TILE_ROWS = 16, 256  # minimum and maximum per tile
_BATCH_BYTES = 2**26  # limit of dequantized W per bmm; at least one expert
_PACKED_ROWS = 16  # rows of a packed int4 tile


def define_rows(dense_of: dict[str, Dense]) -> None:
    """Defines ``qao_with_grad::grouped_rows``. ``dense_of``: operator name to its dequantization of one expert's W."""
    if hasattr(torch.ops.qao_with_grad, "grouped_rows"):  # defined by an earlier import of the package
        return

    def rows(
        grad: Tensor,
        weight: Tensor,
        scales: Tensor | None,
        offsets: Tensor,
        operator: str,
        in_features: int,
        sizes: list[int],
    ) -> Tensor:
        if scales is None:  # dequantization of such a weight ignores them
            scales = weight
        multiply = by_tiles if grad.is_cuda else by_experts
        return multiply(grad, weight, scales, offsets, dense_of[operator], in_features, sizes)

    _library.define(
        "grouped_rows(Tensor grad, Tensor weight, Tensor? scales, Tensor offsets, str operator, int in_features, "
        "int[] sizes) -> Tensor"
    )
    _library.impl("grouped_rows", rows, "CompositeExplicitAutograd")
    torch.library.register_fake(
        "qao_with_grad::grouped_rows",
        lambda grad, weight, scales, offsets, operator, in_features, sizes: grad.new_empty(
            (grad.shape[0], in_features)
        ),
    )


def by_experts(
    grad: Tensor, weight: Tensor, scales: Tensor, offsets: Tensor, dense: Dense, in_features: int, sizes: list[int]
) -> Tensor:
    """[S, K]: row s of ``grad`` [S, N] times W of its expert, 0 for rows without an expert."""
    rows = grad.new_zeros((grad.shape[0], in_features))
    begin = 0
    for expert, end in enumerate(offsets.clamp(max=grad.shape[0]).tolist()):
        if end > begin:
            torch.mm(grad[begin:end], dense(weight[expert], scales[expert], grad.dtype, *sizes), out=rows[begin:end])
            begin = end
    return rows


def by_tiles(
    grad: Tensor, weight: Tensor, scales: Tensor, offsets: Tensor, dense: Dense, in_features: int, sizes: list[int]
) -> Tensor:
    """The same with a number of steps and sizes that do not depend on the offsets."""
    count, n = grad.shape
    if count == 0:
        return grad.new_zeros((0, in_features))
    experts, places = _tiles(offsets, count)
    batch = max(1, _BATCH_BYTES // (n * in_features * grad.element_size()))
    rows = grad.new_zeros((count + 1, in_features))  # the last row receives the padding of tiles
    for chosen, at in zip(experts.split(batch), places.split(batch), strict=True):
        w = _stacked(weight[chosen], scales[chosen], grad.dtype, n, dense, sizes)
        products = torch.bmm(grad[at.clamp(max=count - 1)], w)
        rows.index_copy_(0, at.flatten(), products.flatten(0, 1))
    return rows[:count]


def bounds_of(offsets: Tensor, rows: int) -> tuple[Tensor, Tensor]:
    """Begin and end of each expert's rows, clamped as in the kernels."""
    ends = offsets.clamp(0, rows).cummax(0).values
    return torch.cat((ends.new_zeros(1), ends[:-1])), ends


def _tiles(offsets: Tensor, rows: int) -> tuple[Tensor, Tensor]:
    """The expert of each tile and the tile's row indices [tiles, rows of a tile]; padding has the index ``rows``."""
    filled = min(len(offsets), rows)
    fewest, most = _TILE_ROWS
    tile = min(max(1 << (-(-rows // filled) - 1).bit_length(), fewest), most)
    begins, ends = (bounds.long() for bounds in bounds_of(offsets, rows))
    tiles_of = (ends - begins + tile - 1) // tile
    last = tiles_of.cumsum(0)
    # Each expert may have one partial tile. Tiles past the last one lie past the last expert's rows.
    numbers = torch.arange((rows + (tile - 1) * filled) // tile, device=offsets.device)
    expert = torch.searchsorted(last, numbers, right=True).clamp(max=len(offsets) - 1)
    first = begins[expert] + (numbers - (last - tiles_of)[expert]) * tile
    place = first.unsqueeze(1) + torch.arange(tile, device=offsets.device)
    return expert, torch.where(place < ends[expert].unsqueeze(1), place, rows)


def _stacked(weight: Tensor, scales: Tensor, dtype: torch.dtype, n: int, dense: Dense, sizes: list[int]) -> Tensor:
    """W [B, N, K] of B experts."""
    if dense is not dense_int4:
        return torch.stack([dense(w, s, dtype, *sizes) for w, s in zip(weight, scales, strict=True)])
    rows = weight.shape[1] * _PACKED_ROWS  # packed rows of several experts form one larger weight
    _, k, group_size = sizes or int4_sizes(weight[0], scales[0])
    together: Any = dense(weight.flatten(0, 1), scales.flatten(0, 1), dtype, len(weight) * rows, k, group_size)
    return together.view(len(weight), rows, -1)[:, :n]  # type: ignore[no-any-return]

"""The gradient of a grouped product for the rows of x: each row of y's gradient times W of its expert.

It is an operator, so that graphs hold no loop over experts. The CPU reads the offsets and multiplies expert by expert.
A GPU is not waited for: rows are cut into tiles of one expert each, of which there are at most so many for any offsets,
and a batch of tiles is multiplied by as many weights. Which rows and which weights these are, only the GPU knows.
"""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

import torch
from torch import Tensor

from .autograd import _library
from .dequantize import dense_int4

Dense = Callable[..., Tensor]
_TILE_ROWS = 16, 256  # the fewest and the most of a tile
_BATCH_BYTES = 2**26  # of W in a float dtype, one expert's at least
_PACKED_ROWS = 16  # of int4's tiles


def define_rows(dense_of: dict[str, Dense]) -> None:
    """``qao_with_grad::grouped_rows`` for the operators of these names, and how each makes W of an expert."""
    if hasattr(torch.ops.qao_with_grad, "grouped_rows"):  # a package that is imported again finds its own there
        return

    def rows(
        grad: Tensor, weight: Tensor, scales: Tensor, offsets: Tensor, operator: str, in_features: int, sizes: list[int]
    ) -> Tensor:
        multiply = by_tiles if grad.is_cuda else by_experts
        return multiply(grad, weight, scales, offsets, dense_of[operator], in_features, sizes)

    _library.define(
        "grouped_rows(Tensor grad, Tensor weight, Tensor scales, Tensor offsets, str operator, int in_features, "
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
    """[S, K]: row s of ``grad`` [S, N] times W of its expert, 0 where it has none."""
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
    """The same, in steps and sizes that depend on no offset."""
    count, n = grad.shape
    if count == 0:
        return grad.new_zeros((0, in_features))
    experts, places = _tiles(offsets, count)
    batch = max(1, _BATCH_BYTES // (n * in_features * grad.element_size()))
    rows = grad.new_zeros((count + 1, in_features))  # the last takes what is of nobody
    for chosen, at in zip(experts.split(batch), places.split(batch), strict=True):
        w = _stacked(weight[chosen], scales[chosen], grad.dtype, n, dense, sizes)
        products = torch.bmm(grad[at.clamp(max=count - 1)], w)
        rows.index_copy_(0, at.flatten(), products.flatten(0, 1))
    return rows[:count]


def bounds_of(offsets: Tensor, rows: int) -> tuple[Tensor, Tensor]:
    """The first row of each expert and the one after its last, as kernels take any ``offsets``."""
    ends = offsets.clamp(0, rows).cummax(0).values
    return torch.cat((ends.new_zeros(1), ends[:-1])), ends


def _tiles(offsets: Tensor, rows: int) -> tuple[Tensor, Tensor]:
    """The expert of each tile, and its rows [tiles, rows of a tile]; ``rows`` for those that do not exist."""
    filled = min(len(offsets), rows)
    fewest, most = _TILE_ROWS
    tile = min(max(1 << (-(-rows // filled) - 1).bit_length(), fewest), most)
    begins, ends = (bounds.long() for bounds in bounds_of(offsets, rows))
    tiles_of = (ends - begins + tile - 1) // tile
    last = tiles_of.cumsum(0)
    # Every expert may leave one unfilled; tiles past the last one are past the last expert's rows, too.
    numbers = torch.arange((rows + (tile - 1) * filled) // tile, device=offsets.device)
    expert = torch.searchsorted(last, numbers, right=True).clamp(max=len(offsets) - 1)
    first = begins[expert] + (numbers - (last - tiles_of)[expert]) * tile
    place = first.unsqueeze(1) + torch.arange(tile, device=offsets.device)
    return expert, torch.where(place < ends[expert].unsqueeze(1), place, rows)


def _stacked(weight: Tensor, scales: Tensor, dtype: torch.dtype, n: int, dense: Dense, sizes: list[int]) -> Tensor:
    """W [B, N, K] of B experts."""
    if dense is not dense_int4:
        return torch.stack([dense(w, s, dtype, *sizes) for w, s in zip(weight, scales, strict=True)])
    rows = weight.shape[1] * _PACKED_ROWS  # packed rows of several experts are those of one larger weight
    together: Any = dense(weight.flatten(0, 1), scales.flatten(0, 1), dtype, len(weight) * rows, *sizes[-2:])
    return together.view(len(weight), rows, -1)[:, :n]  # type: ignore[no-any-return]

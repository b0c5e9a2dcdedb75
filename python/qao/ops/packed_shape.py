"""The sizes that a packed weight of four bits tells of itself, where they are those of whole tiles."""

from __future__ import annotations

from torch import Tensor

TILE_N, TILE_K, TILE_BYTES = 16, 64, 512  # checked against the C++ layout by the tests
_GROUP_SIZES = (128, 64, 32, 256)
SCALE_BLOCK = 128  # rows and columns of a weight, columns of an activation, that share an fp8 scale


def group_size_of(k: int, groups: int) -> int:
    """Columns that share a scale, K for all: the first that makes so many groups. Of two or more, no other does."""
    return next((size for size in _GROUP_SIZES if -(-k // size) == groups), k)


def tell(weights: str, n: int, k: int, group_size: int) -> bool:
    """Whether the tensors of a packed weight [n, k], "int4" or "fp4", tell all three."""
    size = k if group_size == -1 else group_size
    is_known = weights == "fp4" or group_size_of(k, -(-k // size)) == size
    return n % TILE_N == 0 and k % TILE_K == 0 and is_known


def int4_sizes(weight: Tensor, scales: Tensor) -> tuple[int, int, int]:
    """N, K and group_size as operators take them that are told none."""
    k = weight.shape[1] * TILE_K
    return weight.shape[0] * TILE_N, k, group_size_of(k, scales.shape[1])


def fp4_sizes(weight: Tensor, scales: Tensor) -> tuple[int, int, int]:
    k = weight.shape[1] * TILE_K
    return weight.shape[0] * TILE_N, k, 32 if scales.shape[1] == k // 32 else 16

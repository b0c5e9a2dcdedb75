"""Sizes inferred from a packed four-bit weight, for N and K that are multiples of the tile."""

from __future__ import annotations

from torch import Tensor

TILE_N, TILE_K, TILE_BYTES = 16, 64, 512  # tests compare these with the C++ layout
_GROUP_SIZES = (128, 64, 32, 256)
SCALE_BLOCK = 128  # rows and columns of a weight, columns of an activation, that share an fp8 scale


def group_size_of(k: int, groups: int) -> int:
    """Group size for this many groups in a row, or K if no group size fits. It is unique for two or more groups."""
    return next((size for size in _GROUP_SIZES if -(-k // size) == groups), k)


def determines_sizes(weights: str, n: int, k: int, group_size: int) -> bool:
    """Whether N, K and group size follow from the tensors of a packed weight [n, k] ("int4" or "fp4")."""
    size = k if group_size == -1 else group_size
    is_known = weights == "fp4" or group_size_of(k, -(-k // size)) == size
    return n % TILE_N == 0 and k % TILE_K == 0 and is_known


def int4_sizes(weight: Tensor, scales: Tensor) -> tuple[int, int, int]:
    """N, K and group_size as operators infer them if the caller omits them."""
    k = weight.shape[1] * TILE_K
    return weight.shape[0] * TILE_N, k, group_size_of(k, scales.shape[1])


def fp4_sizes(weight: Tensor, scales: Tensor) -> tuple[int, int, int]:
    k = weight.shape[1] * TILE_K
    return weight.shape[0] * TILE_N, k, 32 if scales.shape[1] == k // 32 else 16

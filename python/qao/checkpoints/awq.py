"""AWQ checkpoints in the "gemm" layout (AutoAWQ), four bits with zero points.

    qweight  int32 [K, N/8]   nibble i of word j is column 8j + (0, 2, 4, 6, 1, 3, 5, 7)[i]
    scales   float16 [G, N]
    qzeros   int32 [G, N/8]   in the order of qweight

W = (q - zero) · scale.
"""

from __future__ import annotations

from functools import partial

import torch
from torch import Tensor

from ..schemes import Int4WeightOnly
from .base import CheckpointError, Plain, QuantizedLayer
from .files import FLOATS, TensorFiles
from .plain import check_layer_name, grouping, regroup
from .settings import Settings

__all__ = ["layer", "read"]

_NIBBLE_OF_COLUMN = (0, 4, 1, 5, 2, 6, 3, 7)


def read(files: TensorFiles, settings: Settings) -> list[QuantizedLayer]:
    """The layers of an AWQ checkpoint.

    Raises:
        CheckpointError: also for layouts other than "gemm", bits other than 4, and weights without zero points.
    """
    names = [check_layer_name(files, key, ".qweight") for key in files.names if key.endswith(".qweight")]
    return [layer(files, name, settings) for name in names]


def layer(files: TensorFiles, name: str, settings: Settings) -> QuantizedLayer:
    """Read one AWQ layer."""
    bits = settings.integer("bits", settings.integer("w_bit", 4), low=1, high=32)
    given = settings.integer("group_size", settings.integer("q_group_size", 128))
    if bits != 4:
        raise CheckpointError(f"{settings.where}: AWQ with {bits} bits is not supported, only 4")
    for key in ("version", "format", "checkpoint_format"):  # GPTQModel writes the latter two
        version = settings.text(key, "gemm")
        if version != "gemm":
            raise CheckpointError(f'{settings.where}: the layout "{version}" is for one kernel; qao supports "gemm"')
    qweight, scales, qzeros = keys = (f"{name}.qweight", f"{name}.scales", f"{name}.qzeros")
    k, words = files.matrix(qweight, torch.int32)
    n = 8 * words
    if given == -1 or given > k:
        given = k
    group_size, note = grouping(files, qweight, given, k)
    groups = -(-k // given)
    files.check(scales, FLOATS, (groups, n))
    files.check(qzeros, (torch.int32,), (groups, words))
    scheme = Int4WeightOnly(group_size=group_size, scale_dtype=files.dtype(scales))
    return QuantizedLayer(name, scheme, n, k, keys, partial(_read, files, keys, given), note)


def _read(files: TensorFiles, keys: tuple[str, str, str], given: int) -> Plain:
    qweight, scales, qzeros = keys
    q, zeros = values_of(files.read(qweight)), values_of(files.read(qzeros))
    k = q.shape[1]
    return Plain(q, regroup(files.finite(scales).t(), given, k), regroup(zeros, given, k))


def values_of(words: Tensor) -> Tensor:
    """Unpack int32 [R, C] into uint8 [8 C, R]."""
    words = words.t().contiguous()
    columns = [(words >> 4 * nibble & 15).to(torch.uint8) for nibble in _NIBBLE_OF_COLUMN]
    return torch.stack(columns, dim=1).view(-1, words.shape[1])

"""Checkpoints with fused experts in MXFP4 ("mxfp4", as GPT-OSS), dequantized to bfloat16.

X_blocks   uint8 [E, N, G, 16]: two e2m1 codes per byte, the even column in the lower half; groups of 32 columns
X_scales   uint8 [E, N, G]: exponents (e8m0)
X          bfloat16 [E, 32 G, N], the transpose of W: code * scale, exactly

No grouped GEMM takes such weights, so the reader returns floats, and the loader quantizes them again to a scheme with a
grouped kernel.
"""

from __future__ import annotations

from typing import Any

import torch
from torch import Tensor

from ..ops.fp4 import MX_GROUP, values_of
from .files import SafetensorsCheckpoint, TensorFiles
from .plain import nibbles

__all__ = ["Mxfp4Checkpoint"]

_BLOCKS, _SCALES = "_blocks", "_scales"


class Mxfp4Checkpoint(SafetensorsCheckpoint):
    """``others`` lists experts under the names of their float weights. A layer is dequantized on reading.

    Raises:
        CheckpointError: blocks without scales, or a wrong shape or dtype.
    """

    def __init__(self, config: dict[str, Any], files: TensorFiles) -> None:
        self._sizes: dict[str, tuple[int, int, int]] = {}
        stored = []
        for blocks in files.names:
            if not blocks.endswith(_BLOCKS):
                continue
            name = blocks.removesuffix(_BLOCKS)
            shape = files.shape(blocks)
            if len(shape) != 4 or 0 in shape or shape[3] != MX_GROUP // 2 or name in files:
                raise files.error(blocks, f"must be uint8 [E, N, G, 16] in the place of {name}, not {list(shape)}")
            files.check(blocks, (torch.uint8,))
            files.check(name + _SCALES, (torch.uint8, torch.float8_e8m0fnu), shape[:3])
            self._sizes[name] = shape[0], shape[2] * MX_GROUP, shape[1]
            stored += [blocks, name + _SCALES]
        notes = [f"MXFP4 weights of experts ({len(self._sizes)} tensors) are read as bfloat16, exactly"]
        super().__init__("mxfp4", config, files, (), stored, notes)
        self.others = (*self.others, *self._sizes)
        self._others = frozenset(self.others)

    def tensor(self, name: str) -> Tensor:
        return self._dequantized(name, ...) if name in self._sizes else super().tensor(name)

    def part(self, name: str, index: Any) -> Tensor:
        if name not in self._sizes:
            return super().part(name, index)
        experts, *rest = index if isinstance(index, tuple) else (index,)
        if not isinstance(experts, slice):  # slice only along experts before dequantization
            return self._dequantized(name, ...)[index]
        inner = (slice(None), *rest)
        return self._dequantized(name, experts)[inner]

    def shape_dtype(self, name: str) -> tuple[tuple[int, ...], torch.dtype]:
        return (self._sizes[name], torch.bfloat16) if name in self._sizes else super().shape_dtype(name)

    def _dequantized(self, name: str, experts: Any) -> Tensor:
        scales = self._files.finite(name + _SCALES)[experts]
        blocks = self._files.part(name + _BLOCKS, experts)
        _, k, n = self._sizes[name]
        made = torch.empty(len(blocks), k, n, dtype=torch.bfloat16)
        for to, pairs, of_groups in zip(made, blocks, scales, strict=True):  # one at a time: float32 doubles the size
            to.copy_((values_of(nibbles(pairs)) * of_groups[..., None]).view(n, k).t())
        if not made.isfinite().all():
            raise self._files.error(name + _SCALES, "weights beyond bfloat16: the file is damaged")
        return made

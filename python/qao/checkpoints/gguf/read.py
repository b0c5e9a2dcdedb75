"""GGUF reader (llama.cpp): Q4_0 and Q4_1 become int4 exactly, Q8_0 becomes int8, other types float.

Blocks of 32 columns share float16 scale factors d and m (ggml-common.h of ggml):

    Q4_0   (q - 8) d      int4, groups of 32, symmetric, float16 scales: exact
    Q4_1   q d + m        int4, groups of 32, float32 scales d and float zero points -m / d: exact up to float32
                          rounding
    Q8_0   q d            int8 has per-row scales: requantized, unless ``dequantize``

In the bytes of Q4_0 and Q4_1, low nibbles are columns 0..15 of a block, high nibbles 16..31.
"""

from __future__ import annotations

import math
from collections import Counter
from collections.abc import Callable
from functools import partial
from pathlib import Path

import torch
from torch import Tensor

from ...quant_primitives.integer import quantize_int8
from ...schemes import Int4WeightOnly, Int8WeightOnly, Scheme
from ..base import Checkpoint, CheckpointError, Plain, QuantizedLayer
from .file import TYPES, TensorInfo, open_gguf
from .model import Model, Part

_FLOATS = {"F32": torch.float32, "F16": torch.float16, "BF16": torch.bfloat16}
_BLOCK = 32
# GPU kernels in float16 hold q - zero in float16. A block beyond this limit is constant to 15 / 32768 of its magnitude.
_LARGEST_ZERO = 32768.0


class GgufCheckpoint(Checkpoint):
    """A language model in a GGUF file or its parts. Architectures: the table in architectures.py.

    Linear layers in Q4_0 and Q4_1 become int4 with the values of the file. All other types that the package ``gguf``
    can dequantize (Q6_K, Q4_K, IQ4_XS …) are read exactly as float32 and listed in ``notes``.

    Args:
        path: the file, or one part of a split model (``-00001-of-00003.gguf``).
        dequantize: True reads linear layers in Q8_0 as float32 too. False requantizes them with per-row scales.

    Attributes:
        linears: names of the linear layers that are read as float.
        float_linears: number of these that are quantized in the file, by format.
        dequantized: number of tensors of any kind, by format.
        rounded: number of linear layers in Q8_0 that are requantized.
        mxfp4: whether there are experts in MXFP4, which ``Fp4WeightOnly`` represents exactly.

    Raises:
        CheckpointError: not a GGUF file, a damaged one, an unknown architecture, formats that the package ``gguf``
            cannot dequantize, or any other than F32, F16, BF16, Q4_0, Q4_1 and Q8_0 if the package is not installed.
    """

    format = "gguf"

    def __init__(self, path: str | Path, *, dequantize: bool = False) -> None:
        self._file = open_gguf(path)
        self._model = Model(self._file)
        self.config = self._model.config
        self.layers: dict[str, QuantizedLayer] = {}
        self.float_linears: Counter[str] = Counter()
        self.dequantized: Counter[str] = Counter()
        self.rounded = 0
        self.mxfp4 = False
        linears = []
        self._others: dict[str, Part] = {}
        known = {kind for kind, _, _ in TYPES.values()}
        for part in self._model.parts:
            module, info = part.module, self._file.tensors[part.stored]
            linear = self._model.is_linear(part)
            made = _LINEAR.get(info.type) if linear else None
            if made is not None and not (dequantize and info.type == "Q8_0"):
                scheme, decode, note = made
                n, k = info.shape
                read = partial(self._read_linear, part, decode)
                self.layers[module] = QuantizedLayer(module, scheme, n, k, (info.name,), read, note)
                self.rounded += note is not None
                continue
            self._others[part.name] = part
            expert = part.expert is not None or (bool(part.fused) and part.kind.endswith("proj"))
            linear = linear or expert
            self.mxfp4 = self.mxfp4 or (expert and info.type == "MXFP4")
            linears += [module] if linear else []
            if part.expert:  # the rest is counted with the first expert
                continue
            if info.type not in known:
                _check_known(info, self._where(info))
            if info.type not in known or made is not None or (expert and info.type not in _FLOATS):
                self.dequantized[info.type] += 1
                self.float_linears[info.type] += linear
        self.linears = tuple(linears)
        self.float_linears = +self.float_linears
        self.others = tuple(self._others)
        listed = ", ".join(f"{count} of {kind}" for kind, count in sorted(self.dequantized.items()))
        if self.dequantized:
            self.notes = (f"dequantized to float32, to be quantized again: {listed}",)

    def tensor(self, name: str) -> Tensor:
        part = self._others[name]
        if part.fused:
            return self._fused(part)
        offset = self._model.norm_offset(part.stored)
        plain = self._plain(self._file.tensors[part.stored], self._blocks(part), self._model.shape(part))
        return plain - offset if offset else plain.clone()

    def _fused(self, part: Part) -> Tensor:
        """Experts as GPT-OSS has them: transposed, with gate and up in turn."""
        read = []
        for info in (self._file.tensors[name] for name in part.fused):
            rows = self._file.bytes_of(info).view(math.prod(info.shape[:-1]), -1)
            read.append(self._plain(info, rows, info.shape))
        joined = torch.stack(read, 2).flatten(1, 2)  # [E, N, K], or [E, N]
        return joined.transpose(1, 2).contiguous() if joined.dim() == 3 else joined

    def _plain(self, info: TensorInfo, values: Tensor, shape: tuple[int, ...]) -> Tensor:
        """A tensor as floats of ``shape``, from its rows of bytes."""
        if info.type in _FLOATS:
            return values.view(_FLOATS[info.type]).view(shape)
        if info.type in _DECODERS:
            return _dequantize(_DECODERS[info.type](values, self._where(info))).view(shape)
        import numpy as np
        from gguf import GGMLQuantizationType, dequantize

        with np.errstate(all="ignore"):
            plain = torch.from_numpy(dequantize(values.numpy(), GGMLQuantizationType[info.type])).view(shape)
        if not plain.isfinite().all():
            raise CheckpointError(
                f"{self._where(info)} has a block with a scale that is NaN or infinite. Download the file again"
            )
        return plain

    def shape_dtype(self, name: str) -> tuple[tuple[int, ...], torch.dtype]:
        part = self._others[name]
        return self._model.shape(part), _FLOATS.get(self._file.tensors[part.stored].type, torch.float32)

    def stored(self, name: str) -> tuple[str, int]:
        """Type and bytes in the file of a layer's weight, or of one of ``others``."""
        part = self._others.get(name)
        info = self._file.tensors[self.layers[name].keys[0] if part is None else part.stored]
        return info.type, info.nbytes if part is None or part.expert is None else info.nbytes // info.shape[0]

    def _read_linear(self, part: Part, decode: Callable[[Tensor, str], Plain]) -> Plain:
        return decode(self._blocks(part), self._where(self._file.tensors[part.stored]))

    def _blocks(self, part: Part) -> Tensor:
        """uint8 [N, bytes per row], rows in the order of transformers."""
        info = self._file.tensors[part.stored]
        stored = self._file.bytes_of(info)
        if part.expert is not None:
            stored = stored.view(info.shape[0], -1)[part.expert]
        rows = stored.view(self._model.shape(part)[0], -1)
        order = self._model.row_order(info.name)
        return rows if order is None else rows[order]

    def _where(self, info: TensorInfo) -> str:
        return f"{self._file.path}: tensor {info.name}"


def _check_known(info: TensorInfo, where: str) -> None:
    """Raise CheckpointError unless the package gguf can dequantize the tensor. Called before any read."""
    try:
        import numpy as np
        from gguf import GGML_QUANT_SIZES, GGMLQuantizationType, dequantize
    except ImportError:
        raise CheckpointError(f"{where} is {info.type}: `pip install gguf` to dequantize it") from None
    kind = GGMLQuantizationType[info.type]
    try:
        dequantize(np.zeros((1, GGML_QUANT_SIZES[kind][1]), np.uint8), kind)
    except NotImplementedError:
        raise CheckpointError(
            f"{where} is {info.type}, which the package gguf cannot dequantize. Quantize the float model instead"
        ) from None


def _halves(blocks: Tensor, at: int, where: str) -> Tensor:
    """float32 [N, blocks]: the float16 at byte ``at`` of every block."""
    values = blocks[..., at : at + 2].contiguous().view(torch.float16).squeeze(-1).float()
    if not values.isfinite().all():
        raise CheckpointError(f"{where} has a block with a scale that is NaN or infinite. Download the file again")
    return values


def _nibbles(blocks: Tensor) -> Tensor:
    """uint8 [N, blocks, 16] -> [N, blocks, 32]."""
    return torch.cat((blocks & 15, blocks >> 4), -1)


def _q4_0(rows: Tensor, where: str) -> Plain:
    blocks = rows.unflatten(1, (-1, 18))
    return Plain(_nibbles(blocks[..., 2:]).flatten(1), _halves(blocks, 0, where).half())


def _q4_1(rows: Tensor, where: str) -> Plain:
    blocks = rows.unflatten(1, (-1, 20))
    scales, minima = _halves(blocks, 0, where), _halves(blocks, 2, where)
    constant = scales == 0  # every value is m: (8 - 7) m
    q = _nibbles(blocks[..., 4:]).masked_fill(constant.unsqueeze(-1), 8)
    zeros = torch.where(constant, 7.0, -minima / scales)
    scales = minima.where(constant, scales)
    if zeros.abs().max() > _LARGEST_ZERO:
        raise CheckpointError(
            f"{where} has a block with a minimum more than {_LARGEST_ZERO:.0f} steps away from 0, which no "
            "kernel supports. Quantize the float model instead"
        )
    return Plain(q.flatten(1), scales, zeros)


def _q8_0(rows: Tensor, where: str) -> Plain:
    blocks = rows.unflatten(1, (-1, 34))
    return Plain(blocks[..., 2:].contiguous().view(torch.int8).flatten(1), _halves(blocks, 0, where))


def _per_row(rows: Tensor, where: str) -> Plain:
    return Plain(*quantize_int8(_dequantize(_q8_0(rows, where)), clip_search=False, name=where)[:2])


def _dequantize(plain: Plain) -> Tensor:
    """float32 [N, K]; Q4_0 and Q8_0 exactly."""
    zeros = (8.0 if plain.q.dtype == torch.uint8 else 0.0) if plain.zeros is None else plain.zeros.unsqueeze(-1)
    blocks = plain.q.unflatten(1, (-1, _BLOCK)).float()
    values: Tensor = (blocks - zeros) * plain.scales.float().unsqueeze(-1)
    return values.flatten(1)


_DECODERS: dict[str, Callable[[Tensor, str], Plain]] = {"Q4_0": _q4_0, "Q4_1": _q4_1, "Q8_0": _q8_0}
_LINEAR: dict[str, tuple[Scheme, Callable[[Tensor, str], Plain], str | None]] = {
    "Q4_0": (Int4WeightOnly(group_size=32, symmetric=True, scale_dtype=torch.float16), _q4_0, None),
    "Q4_1": (Int4WeightOnly(group_size=32, scale_dtype=torch.float32), _q4_1, None),
    "Q8_0": (Int8WeightOnly(), _per_row, "Q8_0's blocks of 32 columns requantized with one scale per row"),
}

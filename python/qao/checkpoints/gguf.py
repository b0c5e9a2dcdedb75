"""GGUF, the format of llama.cpp: Q4_0 and Q4_1 become int4 exactly as stored, Q8_0 becomes int8.

Blocks of 32 columns share what scales them, float16 numbers d and m (ggml-common.h of ggml):

    Q4_0   (q - 8) d      int4, groups of 32, symmetric, float16 scales: the same numbers
    Q4_1   q d + m        int4, groups of 32, float32 scales d and zero points -m / d, which are no whole numbers: the
                          same numbers to within a rounding of float32
    Q8_0   q d            int8 has a scale per row: requantised, unless ``dequantize``

In int4's bytes, low nibbles are columns 0..15 of a block, high ones 16..31.
"""

from __future__ import annotations

from collections.abc import Callable
from functools import partial
from pathlib import Path

import torch
from torch import Tensor

from ..formats import Scheme
from ..quantizer import quantize_int8
from ..schemes import Int4WeightOnly, Int8WeightOnly
from .base import Checkpoint, CheckpointError, Plain, QuantizedLayer
from .gguf_file import TYPES, GgufFile, TensorInfo
from .gguf_model import Model

_FLOATS = {"F32": torch.float32, "F16": torch.float16, "BF16": torch.bfloat16}
_BLOCK = 32
# float16 kernels on a GPU hold q - zero in float16. A block beyond is constant to 15 / 32768 of its magnitude.
_LARGEST_ZERO = 32768.0


class GgufCheckpoint(Checkpoint):
    """A language model in one GGUF file: of architecture llama (Mistral's models too), qwen2 or qwen3.

    Args:
        path: the file.
        dequantize: True reads linear layers of a format that int4 and int8 do not hold exactly as float32 tensors:
            Q8_0, and all others, for which the package ``gguf`` is needed. ``notes`` lists them. False requantises Q8_0
            with a scale per row and refuses the others.

    Raises:
        CheckpointError: no GGUF file, a damaged one, an unknown architecture, or formats that are refused.
    """

    format = "gguf"

    def __init__(self, path: str | Path, *, dequantize: bool = False) -> None:
        self._file = GgufFile(path)
        self._model = Model(self._file)
        self.config = self._model.config
        self.layers: dict[str, QuantizedLayer] = {}
        self._others: dict[str, TensorInfo] = {}
        dequantized: dict[str, int] = {}
        known = {kind for kind, _, _ in TYPES.values()}
        for name, (module, kind) in self._model.modules.items():
            info = self._file.tensors[name]
            made = _LINEAR.get(info.type) if self._model.is_linear(name) else None
            if made is not None and not (dequantize and info.type == "Q8_0"):
                scheme, decode, note = made
                n, k = info.shape
                read = partial(self._read_linear, info, decode)
                self.layers[module] = QuantizedLayer(module, scheme, n, k, (name,), read, note)
                continue
            self._others[f"{module}.{kind}"] = info
            if info.type not in known or made is not None:
                dequantized[info.type] = dequantized.get(info.type, 0) + 1
        self.others = tuple(self._others)
        listed = ", ".join(f"{count} of {kind}" for kind, count in sorted(dequantized.items()))
        if dequantized and not dequantize:
            raise CheckpointError(
                f"{path}: tensors of formats that qao has no kernels for: {listed}. It has them for Q4_0, Q4_1 and "
                "Q8_0. qao.checkpoints.gguf.GgufCheckpoint(path, dequantize=True) reads these tensors as float32"
            )
        if dequantized:
            self.notes = (f"dequantised to float32, to be quantised anew: {listed}",)

    def tensor(self, name: str) -> Tensor:
        info = self._others[name]
        values = self._blocks(info)
        if info.type in _FLOATS:
            return values.view(_FLOATS[info.type]).view(info.shape).clone()
        if info.type in _DECODERS:
            return _dequantize(_DECODERS[info.type](values, self._where(info)))
        try:
            from gguf import GGMLQuantizationType, dequantize
        except ImportError:
            raise CheckpointError(f"{self._where(info)} is {info.type}: `pip install gguf` to dequantise it") from None
        plain = dequantize(values.numpy(), GGMLQuantizationType[info.type])
        return torch.from_numpy(plain).view(info.shape)

    def shape_dtype(self, name: str) -> tuple[tuple[int, ...], torch.dtype]:
        info = self._others[name]
        return info.shape, _FLOATS.get(info.type, torch.float32)

    def _read_linear(self, info: TensorInfo, decode: Callable[[Tensor, str], Plain]) -> Plain:
        return decode(self._blocks(info), self._where(info))

    def _blocks(self, info: TensorInfo) -> Tensor:
        """uint8 [N, bytes of a row], rows in the order of transformers."""
        rows = self._file.bytes_of(info).view(info.shape[0], -1)
        order = self._model.row_order(info.name)
        return rows if order is None else rows[order]

    def _where(self, info: TensorInfo) -> str:
        return f"{self._file.path}: tensor {info.name}"


def _halves(blocks: Tensor, at: int, where: str) -> Tensor:
    """float32 [N, blocks]: the float16 at byte ``at`` of every block."""
    values = blocks[..., at : at + 2].contiguous().view(torch.float16).squeeze(-1).float()
    if not values.isfinite().all():
        raise CheckpointError(f"{where} has a block whose scale is NaN or infinite. Download the file again")
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
            f"{where} has a block whose minimum is more than {_LARGEST_ZERO:.0f} of its steps away from 0, which no "
            "kernel holds. Quantise the float model instead"
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
    "Q8_0": (Int8WeightOnly(), _per_row, "Q8_0's blocks of 32 columns requantised with one scale per row"),
}

"""GGUF reader (llama.cpp): quantized tensors stay in the file's blocks, or become layers of schemes with GPU kernels.

    native     ``GgufWeightOnly``, the bytes of the file
    otherwise  Q4_0 and Q4_1 of linear layers become int4, Q8_0 int8; all other types are read as float32

Blocks of 32 columns share float16 scale factors d and m (ggml-common.h of ggml):

    Q4_0   (q - 8) d      int4, groups of 32, symmetric, float16 scales: exact
    Q4_1   q d + m        int4, groups of 32, float32 scales d and float zero points -m / d: exact up to float32
                          rounding
    Q8_0   q d            int8 has per-row scales: requantized

In the bytes of Q4_0 and Q4_1, low nibbles are columns 0..15 of a block, high nibbles 16..31.
"""

from __future__ import annotations

import math
from collections import Counter
from collections.abc import Callable, Collection
from dataclasses import replace
from functools import partial
from pathlib import Path
from typing import Any

import torch
from torch import Tensor

from ... import ops
from ...quant_primitives.integer import quantize_int8
from ...schemes import Fp4WeightOnly, GgufWeightOnly, Int4WeightOnly, Int8WeightOnly, Scheme
from ...schemes.gguf import GGUF_NUMBERS
from ..base import Checkpoint, CheckpointError, Plain, QuantizedLayer
from .file import TensorInfo, open_gguf
from .model import Model, Part

_FLOATS = {"F32": torch.float32, "F16": torch.float16, "BF16": torch.bfloat16}
# Bytes of a block at which float16 numbers are, if not only at 0.
_SCALES: dict[str, tuple[int, ...]] = {"Q2_K": (80, 82), "Q3_K": (108,), "Q6_K": (208,)}
_SCALES |= dict.fromkeys(("Q4_1", "Q5_1", "Q4_K", "Q5_K"), (0, 2))
# GPU kernels in float16 hold q - zero in float16. A block beyond this limit is constant to 15 / 32768 of its magnitude.
_LARGEST_ZERO = 32768.0


class GgufCheckpoint(Checkpoint):
    """A language model in a GGUF file or its parts. Architectures: the table in architectures.py.

    Types that qao has no kernels for (IQ2_XS …) are read as float32, by the package ``gguf``. So are experts, unless
    they are ``stacked``.

    Args:
        path: the file, or one part of a split model (``-00001-of-00003.gguf``).
        dequantize: True reads linear layers in Q8_0 as float32 too, and is not native.
        native: types of which blocks of the file are kept in linear layers. Only CPUs have kernels for them. With any,
            embeddings and stacked experts keep blocks of every type.
        stacked: whether experts are layers ``….experts.up`` and ``….experts.down``, as transformers 5 has them, if the
            file has them in blocks with kernels; where blocks are not kept, in Q4_0, Q4_1, Q8_0 or MXFP4.

    Attributes:
        linears: names of the linear layers that are read as float.
        float_linears: number of these that are quantized in the file, by format.
        dequantized: number of tensors of any kind, by format.
        rounded: number of linear layers in Q8_0 that are requantized.
        native: types of which blocks are kept.
        mxfp4: whether there are experts in MXFP4, which ``Fp4WeightOnly`` represents exactly.

    Raises:
        CheckpointError: not a GGUF file, a damaged one, an unknown architecture, or a type that the package ``gguf`` is
            needed for and cannot dequantize.
    """

    format = "gguf"

    def __init__(
        self,
        path: str | Path,
        *,
        dequantize: bool = False,
        native: Collection[str] = tuple(GGUF_NUMBERS),
        stacked: bool = False,
    ) -> None:
        self.native = () if dequantize else native
        self._file = open_gguf(path)
        self._model = Model(self._file)
        omitted = self._model.architecture.omitted
        self.config = {name: value for name, value in self._model.config.items() if name not in omitted}
        self.layers: dict[str, QuantizedLayer] = {}
        self.float_linears: Counter[str] = Counter()
        self.dequantized: Counter[str] = Counter()
        self.rounded = 0
        self.mxfp4 = False
        linears = []
        self._others: dict[str, Part] = {}
        self._spans: dict[str, tuple[int, int]] = {}  # rows of layers that share a tensor of the file
        stacks = self._stacks() if stacked and not dequantize else {}
        for part in self._model.parts:
            info = self._file.tensors[part.stored]
            if part.stored in stacks:
                stack = stacks[part.stored]
                self.rounded += stack.note is not None and stack.name not in self.layers
                self.layers[stack.name] = stack
                continue
            weight = part.stored.replace(".bias", ".weight")
            if part.fused and weight in stacks:
                self._others[f"{stacks[weight].name}.bias"] = part
                continue
            made = self._quantized(part, info)
            if made is not None and not (dequantize and info.type == "Q8_0"):
                self.layers[made.name] = made
                self.rounded += made.note is not None
                self._spans |= {} if part.span is None else {made.name: part.span}
                continue
            if len(self._model.shape(part)) == 1 and info.type not in _FLOATS:
                raise CheckpointError(f"{self._where(info)} is {info.type}, but vectors are floats. Download it again")
            self._others[part.name] = part
            one_of = part.expert is not None and "_exps." in part.stored
            expert = one_of or (bool(part.fused) and part.kind.endswith("proj"))
            linear = self._model.is_linear(part) or expert
            self.mxfp4 = self.mxfp4 or (expert and info.type == "MXFP4")
            linears += [part.module] if linear else []
            if info.type in _FLOATS or part.expert:  # other experts are counted with the first
                continue
            if info.type not in GGUF_NUMBERS:
                _check_known(info, self._where(info))
            if linear or info.type not in _LINEAR:  # embeddings in these types lose nothing
                self.dequantized[info.type] += 1
                self.float_linears[info.type] += linear
        embedding = next((one for one in self.layers.values() if one.keys == ("token_embd.weight",)), None)
        if embedding is not None and self.config["tie_word_embeddings"]:
            self.layers["lm_head"] = replace(embedding, name="lm_head", shares=embedding.name)
        self.linears = tuple(linears)
        self.float_linears = +self.float_linears
        self.others = (*self._others, *self._model.computed)
        listed = ", ".join(f"{count} of {kind}" for kind, count in sorted(self.dequantized.items()))
        if self.dequantized:
            self.notes = (f"dequantized to float32, to be quantized again: {listed}",)

    def _quantized(self, part: Part, info: TensorInfo) -> QuantizedLayer | None:
        """The layer of a part; None if it is read as float."""
        if part.made is not None:
            return None
        linear, embedding = self._model.is_linear(part), part.stored.endswith("token_embd.weight")
        plain = _LINEAR.get(info.type) if linear else None
        if info.type in (self.native if linear else GGUF_NUMBERS if embedding and self.native else ()):
            own = GgufWeightOnly(info.type)
            plain = own, partial(_checked, own), None
        if plain is None:
            return None
        scheme, decode, note = plain
        read = partial(self._read_layer, part, decode)
        n, k = self._model.shape(part)
        return QuantizedLayer(part.module, scheme, n, k, (info.name,), read, note)

    def _stacks(self) -> dict[str, QuantizedLayer]:
        """Experts that stay quantized, by the names of their tensors in the file."""
        made: dict[str, QuantizedLayer] = {}
        known = GGUF_NUMBERS.keys() if self.native else _EXPERTS.keys()
        for part in self._model.parts:
            whole = part.stacked or bool(part.fused)
            if not (part.expert == 0 or whole) or not part.stored.endswith(".ffn_down_exps.weight"):
                continue
            names = (part.stored.replace("ffn_down", f"ffn_{one}") for one in ("gate", "up", "gate_up"))
            up = [self._file.tensors[name] for name in names if name in self._file.tensors]
            down = [self._file.tensors[part.stored]]
            kinds = [{info.type for info in infos} for infos in (up, down)]
            if all(len(kind) == 1 and kind <= known for kind in kinds):
                experts = part.module if whole else part.module.rpartition(".experts.")[0] + ".experts"
                for name, infos in (("up", up), ("down", down)):
                    layer = self._stack(f"{experts}.{name}", infos, in_turn=bool(part.fused))
                    made.update(dict.fromkeys((info.name for info in infos), layer))
        return made

    def _stack(self, name: str, infos: list[TensorInfo], in_turn: bool) -> QuantizedLayer:
        """One projection of all experts, with the rows of several tensors [E, N, K], in turn or one after the other."""
        _, n, k = infos[0].shape
        own = GgufWeightOnly(infos[0].type) if self.native else None
        scheme, decode, note = _EXPERTS[infos[0].type] if own is None else (own, partial(_checked, own), None)
        read = partial(self._read_experts, infos, decode, in_turn)
        keys = tuple(info.name for info in infos)
        return QuantizedLayer(name, scheme, n * len(infos), k, keys, read, note, infos[0].shape[0])

    def _read_experts(self, infos: list[TensorInfo], decode: Callable[[Tensor, str], Plain], in_turn: bool) -> Plain:
        """q [E, N, K], and scales and zeros with the same dimension of experts."""
        count = infos[0].shape[0]
        made: list[list[Any]] = []
        stacks = [(self._file.bytes_of(info).view(count, info.shape[1], -1), self._where(info)) for info in infos]
        for expert in range(count):
            plain = zip(*(decode(rows[expert], where) for rows, where in stacks), strict=True)
            made.append([None if one[0] is None else _together(one, in_turn) for one in plain])
        parts: Any = (None if one[0] is None else torch.stack(one) for one in zip(*made, strict=True))
        return Plain(*parts)

    def tensor(self, name: str) -> Tensor:
        if name in self._model.computed:
            return self._model.computed[name]
        part = self._others[name]
        if part.made is not None:
            return part.made(*map(self._whole, part.sources)).contiguous()
        if part.fused:
            return self._fused(part)
        offset = self._model.norm_offset(part.stored)
        plain = self._plain(self._file.tensors[part.stored], self._blocks(part), self._model.shape(part))
        return plain - offset if offset else plain.clone()

    def _whole(self, name: str) -> Tensor:
        """A tensor of the file in float32."""
        info = self._file.tensors[name]
        rows = self._file.bytes_of(info).view(math.prod(info.shape[:-1]), -1)
        return self._plain(info, rows, info.shape).float()

    def _fused(self, part: Part) -> Tensor:
        """Experts as GPT-OSS has them: transposed, with gate and up in turn."""
        infos = [self._file.tensors[name] for name in part.fused]
        read = [
            self._plain(info, self._file.bytes_of(info).view(math.prod(info.shape[:-1]), -1), info.shape)
            for info in infos
        ]
        rows = torch.stack(read, 2).flatten(1, 2)  # [E, N, K], or [E, N]
        return rows.transpose(1, 2).contiguous() if rows.dim() == 3 else rows

    def _plain(self, info: TensorInfo, values: Tensor, shape: tuple[int, ...]) -> Tensor:
        """A tensor as floats of ``shape``, from its rows of bytes."""
        if info.type in _FLOATS:
            return values.view(_FLOATS[info.type]).view(shape)
        if info.type in GGUF_NUMBERS:
            scheme = GgufWeightOnly(info.type)
            blocks = _checked(scheme, values, self._where(info)).q
            return ops.dequantize_gguf(blocks, scheme.number, torch.float32).view(shape)
        import numpy as np
        from gguf import GGMLQuantizationType, dequantize

        with np.errstate(all="ignore"):
            plain = torch.from_numpy(dequantize(values.numpy(), GGMLQuantizationType[info.type])).view(shape)
        if not plain.isfinite().all():
            raise _not_finite(self._where(info))
        return plain

    def shape_dtype(self, name: str) -> tuple[tuple[int, ...], torch.dtype]:
        if name in self._model.computed:
            return tuple(self._model.computed[name].shape), torch.float32
        part = self._others[name]
        return self._model.shape(part), _FLOATS.get(self._file.tensors[part.stored].type, torch.float32)

    def stored(self, name: str) -> tuple[str, int]:
        """Type and bytes in the file of a layer's weight, or of one of ``others``."""
        if name in self._model.computed:
            return "F32", self._model.computed[name].nbytes
        part = self._others.get(name)
        keys = self.layers[name].keys if part is None else part.fused or part.sources or (part.stored,)
        infos = [self._file.tensors[key] for key in keys]
        count = 1 if part is None or part.expert is None else infos[0].shape[0]
        size = sum(info.nbytes for info in infos) // count
        span = part.span if part is not None else self._spans.get(name)
        return infos[0].type, size if span is None else size * (span[1] - span[0]) // infos[0].shape[0]

    def _read_layer(self, part: Part, decode: Callable[[Tensor, str], Plain]) -> Plain:
        return decode(self._blocks(part), self._where(self._file.tensors[part.stored]))

    def _blocks(self, part: Part) -> Tensor:
        """uint8 [N, bytes per row], rows in the order of transformers."""
        info = self._file.tensors[part.stored]
        stored = self._file.bytes_of(info)
        if part.expert is not None:
            stored = stored.view(info.shape[0], -1)[part.expert]
        if len(part.sources) > 1:
            stored = torch.cat([self._file.bytes_of(self._file.tensors[name]) for name in part.sources])
        if part.span is not None:
            stored = stored.view(info.shape[0], -1)[slice(*part.span)]
        rows = stored.reshape(self._model.shape(part)[0], -1)
        order = self._model.row_order(info.name, part.like)
        return rows if order is None else rows[order]

    def _where(self, info: TensorInfo) -> str:
        return f"{self._file.path}: tensor {info.name}"


def _together(rows: tuple[Tensor, ...], in_turn: bool) -> Tensor:
    """The rows of several tensors."""
    if rows[0].shape == (1,):  # the scale of a whole layer
        return rows[0]
    return torch.stack(rows, 1).flatten(0, 1) if in_turn else torch.cat(rows)


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
        raise _not_finite(where)
    return values


def _not_finite(where: str) -> CheckpointError:
    return CheckpointError(f"{where} has a block with a scale that is NaN or infinite. Download the file again")


def _checked(scheme: GgufWeightOnly, rows: Tensor, where: str) -> Plain:
    """Rows of whole blocks with finite scales."""
    blocks = rows.unflatten(1, (-1, scheme.block[1]))
    for at in _SCALES.get(scheme.qtype, (0,)):
        _halves(blocks, at, where)
    return Plain(rows.clone(), torch.ones(1))


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


def _per_row(rows: Tensor, where: str) -> Plain:
    scheme = GgufWeightOnly("Q8_0")
    weight = ops.dequantize_gguf(_checked(scheme, rows, where).q, scheme.number, torch.float32)
    return Plain(*quantize_int8(weight, clip_search=False, name=where)[:2])


def _mxfp4(rows: Tensor, where: str) -> Plain:
    blocks = rows.unflatten(1, (-1, 17))
    scales = blocks[..., 0].contiguous()
    if (scales == 255).any():
        raise _not_finite(where)
    return Plain(_nibbles(blocks[..., 1:]).flatten(1), scales.view(torch.float8_e8m0fnu).float())


_LINEAR: dict[str, tuple[Scheme, Callable[[Tensor, str], Plain], str | None]] = {
    "Q4_0": (Int4WeightOnly(group_size=32, symmetric=True, scale_dtype=torch.float16), _q4_0, None),
    "Q4_1": (Int4WeightOnly(group_size=32, scale_dtype=torch.float32), _q4_1, None),
    "Q8_0": (Int8WeightOnly(), _per_row, "Q8_0's blocks of 32 columns requantized with one scale per row"),
}
_EXPERTS = _LINEAR | {"MXFP4": (Fp4WeightOnly(), _mxfp4, None)}

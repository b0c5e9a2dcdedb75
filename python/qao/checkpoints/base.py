"""Interface of an open checkpoint: quantized layers, other tensors, and a lazy state dict of both.

Opening reads and checks names, shapes and dtypes. Values are read and checked layer by layer on request. Files are
untrusted: a mismatch raises CheckpointError before anything large is allocated.
"""

from __future__ import annotations

import os
import threading
from abc import ABC, abstractmethod
from collections.abc import Callable, Iterator, Mapping
from dataclasses import dataclass
from typing import Any, NamedTuple

import torch
from torch import Tensor

from ..schemes import GgufWeightOnly, PackedWeight, Scheme, stacked

__all__ = ["Checkpoint", "CheckpointError", "LazyTensor", "Plain", "QuantizedLayer", "try_open"]


_LONGEST = 2000  # characters of a message: names and values in a file have any length


class CheckpointError(ValueError):
    """A file is damaged, inconsistent, or in a format without a qao kernel. The message names file and tensor."""

    def __init__(self, message: str) -> None:
        cut = f"{message[: _LONGEST // 2]} [...] {message[-_LONGEST // 4 :]}"
        super().__init__(message if len(message) <= _LONGEST else cut)


def try_open(file: str | os.PathLike[str]) -> None:
    """Raise the OSError for a file that cannot be opened. safetensors reports each as a file that does not exist."""
    with open(file, "rb"):
        pass


class Plain(NamedTuple):
    """A quantized weight W = (q - zero) * scale [N, K] on the CPU, as ``Scheme.pack`` takes it. Experts: [E, N, K]."""

    q: Tensor
    scales: Tensor
    zeros: Tensor | None = None


@dataclass(frozen=True)
class QuantizedLayer:
    """One quantized linear layer of a checkpoint and a function that reads it."""

    name: str  # module name: "model.layers.0.self_attn.q_proj"
    scheme: Scheme  # scheme of the QuantLinear; int4 includes its scale_dtype, so the reader infers nothing
    out_features: int
    in_features: int
    keys: tuple[str, ...]  # names of the layer's tensors in the file, without the bias
    read: Callable[[], Plain]  # raises CheckpointError
    note: str | None = None  # how the layer differs from the file: "static input scales dropped"
    experts: int | None = None  # number of fused experts with these sizes
    shares: str | None = None  # name of the layer with the same tensors in the file: a tied head
    where: str = ""  # the file, for errors

    def pack(self) -> dict[str, Tensor]:
        """Read the layer and pack it. Returns the parameters of a QuantLinear by name, without the bias.

        Raises:
            CheckpointError: the values cannot be read, or the scheme cannot hold them.
        """
        plain = self.read()
        try:
            packed = self._pack(plain)
            if packed.weight_sums is not None and not packed.weight_sums.isfinite().all():
                raise ValueError("sums of rows of its weight overflow float32: the file is damaged")
        except (ValueError, RuntimeError) as error:
            raise CheckpointError(": ".join(filter(None, (self.where, self.name, str(error))))) from error
        return {name: tensor for name, tensor in packed.tensors().items() if tensor is not None}

    def _pack(self, plain: Plain) -> PackedWeight:
        if self.experts is None or isinstance(self.scheme, GgufWeightOnly):  # which takes all experts together
            return self.scheme.pack(*plain)
        q, scales, zeros = plain
        each = zip(q, scales, [None] * self.experts if zeros is None else zeros, strict=True)
        return stacked((self.scheme.pack(*one) for one in each), self.experts)

    def meta(self) -> dict[str, Tensor]:
        """Meta tensors with the shapes and dtypes that ``pack`` returns. Reads no values."""
        sizes = self.out_features, self.in_features
        packed = self.scheme.empty(*sizes, dtype=torch.float32, device="meta", experts=self.experts)
        return {name: tensor for name, tensor in packed.tensors().items() if tensor is not None}


class LazyTensor:
    """A tensor that is read on request: ``load()``, or ``[...]`` for a slice."""

    def __init__(
        self,
        shape: tuple[int, ...],
        dtype: torch.dtype,
        load: Callable[[], Tensor],
        part: Callable[[Any], Tensor] | None = None,
    ) -> None:
        self.shape = torch.Size(shape)
        self.dtype = dtype
        self.load = load
        self._part = part

    def __getitem__(self, index: Any) -> Tensor:
        return self.load()[index] if self._part is None or index is ... else self._part(index)

    def __repr__(self) -> str:
        return f"LazyTensor({self.dtype}{list(self.shape)})"


class Checkpoint(ABC):
    """An open checkpoint.

    Attributes:
        format: "compressed-tensors", "gptq", "awq", "fp8", "fbgemm_fp8", "torchao", "gguf", "qao", "float", or
            "mxfp4". "mxfp4" is also read as float: its experts are dequantized on reading.
        config: the content of config.json without ``quantization_config``; {} without such a file.
        layers: quantized linear layers by module name.
        others: names of the tensors outside quantized layers: embeddings, norms, biases, float linears.
        notes: parts of the checkpoint that are ignored as a whole, such as KV cache scales.
    """

    format: str
    config: dict[str, Any]
    layers: dict[str, QuantizedLayer]
    others: tuple[str, ...]
    notes: tuple[str, ...] = ()

    @abstractmethod
    def tensor(self, name: str) -> Tensor:
        """Read one of ``others``.

        Raises:
            KeyError: no such name.
            CheckpointError: the file is damaged there.
        """

    @abstractmethod
    def shape_dtype(self, name: str) -> tuple[tuple[int, ...], torch.dtype]:
        """Shape and dtype of one of ``others``, without reading its values."""

    def part(self, name: str, index: Any) -> Tensor:
        """``tensor(name)[index]``. Formats that support slicing read only the slice."""
        return self.tensor(name)[index]

    def is_zero_bias(self, name: str) -> bool:
        """Whether this is a quantized layer's bias of zeros, which GPTQ tools write where the model has none."""
        layer, _, last = name.rpartition(".")
        return last == "bias" and layer in self.layers and name in self.others and not self.tensor(name).any()

    def state_dict(self) -> Mapping[str, LazyTensor]:
        """Lazy state dict with qao's names (``<layer>.qweight``, ``<layer>.scales``, …, and ``others``).

        A layer is read once for all its tensors and released when each of them has been taken.
        """
        return _StateDict(self)


class _StateDict(Mapping[str, LazyTensor]):
    def __init__(self, checkpoint: Checkpoint) -> None:
        self._tensors: dict[str, LazyTensor] = {}
        for layer in checkpoint.layers.values():
            once = _Once(layer)
            for name, meta in layer.meta().items():
                load = _bound(once.take, name)
                self._tensors[f"{layer.name}.{name}".lstrip(".")] = LazyTensor(tuple(meta.shape), meta.dtype, load)
        for name in checkpoint.others:
            shape, dtype = checkpoint.shape_dtype(name)
            load, part = _bound(checkpoint.tensor, name), _bound(checkpoint.part, name)
            self._tensors[name] = LazyTensor(shape, dtype, load, part)

    def __getitem__(self, name: str) -> LazyTensor:
        return self._tensors[name]

    def __iter__(self) -> Iterator[str]:
        return iter(self._tensors)

    def __len__(self) -> int:
        return len(self._tensors)


class _Once:
    """Packed tensors of one layer, read when the first is taken. Thread-safe: loaders use several threads."""

    def __init__(self, layer: QuantizedLayer) -> None:
        self._layer = layer
        self._left: dict[str, Tensor] = {}
        self._lock = threading.Lock()

    def take(self, name: str) -> Tensor:
        with self._lock:
            if name not in self._left:
                self._left = self._layer.pack()
            return self._left.pop(name)


def _bound(function: Callable[..., Tensor], name: str) -> Callable[..., Tensor]:
    return lambda *index: function(name, *index)

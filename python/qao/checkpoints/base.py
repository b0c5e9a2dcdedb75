"""What every checkpoint of others is, once opened: quantised layers, other tensors, and a lazy state dict of both.

Opening reads names, shapes and dtypes and checks them. The numbers are read, and checked, layer by layer when they are
asked for. Everything in a file is untrusted: what does not fit raises a CheckpointError before anything large is
allocated.
"""

from __future__ import annotations

import threading
from abc import ABC, abstractmethod
from collections.abc import Callable, Iterator, Mapping
from dataclasses import dataclass
from typing import Any, NamedTuple

import torch
from torch import Tensor

from ..schemes import Scheme

__all__ = ["Checkpoint", "CheckpointError", "LazyTensor", "Plain", "QuantizedLayer"]


class CheckpointError(ValueError):
    """A file that is damaged, contradicts itself, or holds what no kernel of qao multiplies; names file and tensor."""


class Plain(NamedTuple):
    """A quantised weight W = (q - zero) * scale [N, K] as ``Scheme.pack`` takes it, on the CPU."""

    q: Tensor
    scales: Tensor
    zeros: Tensor | None = None


@dataclass(frozen=True)
class QuantizedLayer:
    """One linear layer of a checkpoint, and how to read it."""

    name: str  # of the module: "model.layers.0.self_attn.q_proj"
    scheme: Scheme  # of the QuantLinear it becomes; of int4 with its scale_dtype, so that nothing is left to the reader
    out_features: int
    in_features: int
    keys: tuple[str, ...]  # names in the file of the tensors it is made of; the bias is a tensor of its own
    read: Callable[[], Plain]  # raises CheckpointError
    note: str | None = None  # what is not exactly as stored: "static input scales dropped"
    experts: int | None = None  # of fused experts: how many weights of these sizes it is

    def pack(self) -> dict[str, Tensor]:
        """Reads the layer and packs it: the parameters of a QuantLinear by name, without the bias.

        Raises:
            CheckpointError: the numbers cannot be read, or are none that the scheme can hold.
        """
        plain = self.read()
        try:
            packed = self.scheme.pack(*plain)
        except (ValueError, RuntimeError) as error:
            raise CheckpointError(f"{self.name}: {error}") from error
        return {name: tensor for name, tensor in packed.tensors().items() if tensor is not None}

    def meta(self) -> dict[str, Tensor]:
        """What ``pack`` returns, on meta: shapes and dtypes of tensors that need not be read for it."""
        sizes = self.out_features, self.in_features
        packed = self.scheme.empty(*sizes, dtype=torch.float32, device="meta", experts=self.experts)
        return {name: tensor for name, tensor in packed.tensors().items() if tensor is not None}


class LazyTensor:
    """A tensor that is read when it is asked for: ``load()``, or ``[...]`` for a part of it."""

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
            "mxfp4", which is floats as well: experts that are dequantised when they are read.
        config: the content of config.json without ``quantization_config``; {} without such a file.
        layers: quantised linear layers by the name of their module.
        others: names of the tensors that belong to no quantised layer: embeddings, norms, biases, float linears.
        notes: what of the checkpoint is left out as a whole, such as scales of a KV cache.
    """

    format: str
    config: dict[str, Any]
    layers: dict[str, QuantizedLayer]
    others: tuple[str, ...]
    notes: tuple[str, ...] = ()

    @abstractmethod
    def tensor(self, name: str) -> Tensor:
        """One of ``others``, read.

        Raises:
            KeyError: no such name.
            CheckpointError: the file is damaged there.
        """

    @abstractmethod
    def shape_dtype(self, name: str) -> tuple[tuple[int, ...], torch.dtype]:
        """Shape and dtype of one of ``others``, without reading it."""

    def part(self, name: str, index: Any) -> Tensor:
        """``tensor(name)[index]``; formats that can, read no more than that."""
        return self.tensor(name)[index]

    def state_dict(self) -> Mapping[str, LazyTensor]:
        """qao's own names (``<layer>.qweight``, ``<layer>.scales``, …, and ``others``), read lazily.

        A layer is read once for all its tensors, and let go when each of them was taken.
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
    """The packed tensors of a layer, read when the first is taken. Loaders take them from several threads."""

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

"""Weights in the types of GGUF files, quantized by ggml's own code in the package llama-cpp-python.

K-quants and IQ4_XS have blocks of 256 weights. In a row of another length, blocks go on into the next rows, so that a
type has its bits. llama.cpp itself falls back on a larger type for such rows, as ``whole_rows`` does.
"""

from __future__ import annotations

import ctypes
import math
from collections.abc import Callable
from functools import cache
from typing import Any

import numpy
import torch
from torch import Tensor, nn

MIXES = {"Q4_K_M": ("Q4_K", "Q6_K"), "Q5_K_M": ("Q5_K", "Q6_K")}  # of most layers, and of some
_FALLBACKS = {"Q4_K": "Q5_0", "Q5_K": "Q5_1", "Q6_K": "Q8_0", "IQ4_XS": "IQ4_NL"}


def quantized(weight: Tensor, name: str, importance: Tensor | None = None) -> tuple[Tensor, float]:
    """The stored values of a weight [N, K] in a type, and its bits. ``importance``: float [K]."""
    import gguf

    kind = gguf.GGMLQuantizationType[name]
    block, size = gguf.GGML_QUANT_SIZES[kind]
    length = math.lcm(weight.shape[1], block)
    values = weight.detach().to("cpu", torch.float32).contiguous().view(-1, length)
    blocks = numpy.empty((values.shape[0], length // block * size), numpy.uint8)
    factors = None if importance is None else importance.float().repeat(length // weight.shape[1])
    sizes = [ctypes.c_int64(one) for one in (0, *values.shape)]
    pointers = [ctypes.c_void_p(one) for one in (values.data_ptr(), blocks.ctypes.data)]
    _quantize_chunk()(int(kind), *pointers, *sizes, ctypes.c_void_p(0 if factors is None else factors.data_ptr()))
    stored = torch.from_numpy(numpy.ascontiguousarray(gguf.quants.dequantize(blocks, kind)))
    return stored.view(weight.shape), 8 * blocks.nbytes


@cache
def _quantize_chunk() -> Any:
    from llama_cpp._ggml import libggml

    return libggml.ggml_quantize_chunk


def rounding(name: str) -> Callable[[Tensor], tuple[Tensor, float]]:
    return lambda weight: quantized(weight, name)


def quantizing(name: str, whole_rows: bool = False) -> Callable[[nn.Module, list[Tensor], Any], float]:
    """Quantizes the linear layers of a Llama in place, except those named in the rules; returns bits per weight.

    Takes an importance matrix from the data, if there is any. ``whole_rows``: with the types of llama.cpp's file.
    """

    def applied(model: nn.Module, data: list[Tensor], rules: Any) -> float:
        linears = {one: layer for one, layer in model.named_modules() if isinstance(layer, nn.Linear)}
        linears = {one: layer for one, layer in linears.items() if one not in rules}
        importance = mean_squares(model, linears, data) if data else {}
        blocks = 1 + max(int(one.split(".")[2]) for one in linears)
        bits = 0.0
        for one, layer in linears.items():
            kind = type_of(one, name, blocks) if name in MIXES else name
            kind = _FALLBACKS[kind] if whole_rows and layer.in_features % 256 else kind
            values, taken = quantized(layer.weight, kind, importance.get(one))
            layer.weight.data.copy_(values)
            bits += taken
        return bits / sum(layer.weight.numel() for layer in linears.values())

    return applied


def type_of(layer: str, mix: str, blocks: int) -> str:
    """The type of ``model.layers.{index}.….{kind}`` in a mix of llama.cpp."""
    plain, fine = MIXES[mix]
    index, kind = int(layer.split(".")[2]), layer.rpartition(".")[2]
    eighth = blocks // 8
    chosen = index < eighth or index >= 7 * blocks // 8 or (index - eighth) % 3 == 2
    return fine if chosen and kind in ("v_proj", "down_proj") else plain


@torch.no_grad()
def mean_squares(model: nn.Module, layers: dict[str, nn.Module], data: list[Tensor]) -> dict[str, Tensor]:
    """An importance matrix as llama.cpp computes it: the mean square of every input of every layer over the tokens."""
    sums: dict[str, Tensor] = {}
    tokens = 0

    def hook(name: str) -> Callable[[nn.Module, tuple[Tensor, ...]], None]:
        def add(_: nn.Module, inputs: tuple[Tensor, ...]) -> None:
            squares = inputs[0].detach().float().flatten(0, -2).square().sum(0)
            sums[name] = sums[name] + squares if name in sums else squares

        return add

    hooks = [layer.register_forward_pre_hook(hook(name)) for name, layer in layers.items()]
    for ids in data:
        model(ids)
        tokens += ids.numel()
    for one in hooks:
        one.remove()
    return {name: squares / tokens for name, squares in sums.items()}

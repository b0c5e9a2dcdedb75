"""Helpers shared by the checkpoint tests."""

from __future__ import annotations

import json
from dataclasses import replace
from pathlib import Path
from typing import Any

import qao
import torch
from qao.checkpoints import Checkpoint
from safetensors.torch import save_file
from torch import Tensor

# Columns of eight numbers in a word of GPTQ and AWQ, from the lowest bits on.
ORDERS = {"gptq": list(range(8)), "awq": [0, 2, 4, 6, 1, 3, 5, 7]}


def words(values: Tensor, order: list[int]) -> Tensor:
    """int32 [R, C / n] of int64 values [R, C]: of n in a word, the lowest bits first, the i-th is column order[i]."""
    n = len(order)
    total = torch.zeros(values.shape[0], values.shape[1] // n, dtype=torch.int64)
    for i in range(n):
        total += values[:, order[i] :: n] << (32 // n * i)
    return torch.where(total >= 1 << 31, total - (1 << 32), total).to(torch.int32)


# Every scheme, with every option that changes the stored tensors.
SCHEMES = [
    *(qao.Int4WeightOnly(size, symmetric) for size in (32, 64, 128, 256, -1) for symmetric in (False, True)),
    *(qao.Int4WeightOnly(128, scale_dtype=dtype) for dtype in (torch.float16, torch.bfloat16)),
    qao.Int8WeightOnly(),
    *(qao.Float8WeightOnly(granularity) for granularity in ("row", "tensor", "block")),
    *(qao.Int8DynamicActivationInt8Weight(symmetric_activations=symmetric) for symmetric in (True, False)),
    qao.Int8DynamicActivationInt4Weight(32, True, torch.bfloat16),
    qao.Int8DynamicActivationInt4Weight(-1, symmetric_activations=False),
    *(qao.Float8DynamicActivationFloat8Weight(granularity) for granularity in ("row", "tensor", "block")),
    qao.Float8StaticActivationFloat8Weight("row", activation_scale=0.1),
    qao.Float8StaticActivationFloat8Weight("tensor", activation_scale=0.1, fast_accum=True),
    qao.Float8DynamicActivationInt4Weight(128, True),
    qao.Float8DynamicActivationInt4Weight(64),
    qao.Fp4WeightOnly(),
    qao.Fp4WeightOnly("nvfp4"),
]


def with_whole_zeros(scheme: qao.Scheme) -> qao.Scheme:
    """The same, of four bits with zero points that other formats can hold."""
    return replace(scheme, whole_zeros=True) if isinstance(scheme, qao.schemes.Int4Weight) else scheme


def write(directory: Path, tensors: dict[str, Tensor], config: dict[str, Any], **metadata: str) -> None:
    """A checkpoint of one file, as Hugging Face lays it out."""
    copies = {name: tensor.contiguous().clone() for name, tensor in tensors.items()}
    save_file(copies, directory / "model.safetensors", metadata={"format": "pt", **metadata})
    (directory / "config.json").write_text(json.dumps(config))


def layer_of(checkpoint: Checkpoint, name: str) -> qao.QuantLinear:
    """A layer of a checkpoint, and a check that the lazy state dict holds the same under its names."""
    layer = checkpoint.layers[name]
    linear = qao.QuantLinear.from_quantized(*layer.read(), scheme=layer.scheme)
    assert (linear.out_features, linear.in_features) == (layer.out_features, layer.in_features)
    state = checkpoint.state_dict()
    for part, expected in linear.packed.tensors().items():
        lazy = state.get(f"{name}.{part}")
        assert (lazy is None) == (expected is None)
        if lazy is not None:
            assert (lazy.shape, lazy.dtype) == (expected.shape, expected.dtype)
            assert torch.equal(lazy.load(), expected)
    return linear


def assert_same_layer(one: qao.QuantLinear, other: qao.QuantLinear) -> None:
    for (name, a), b in zip(one.packed.tensors().items(), other.packed.tensors().values(), strict=True):
        assert (a is None) == (b is None), name
        assert a is None or (a.dtype == b.dtype and torch.equal(a, b)), name

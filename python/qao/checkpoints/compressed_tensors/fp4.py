"""Four-bit float weights of compressed-tensors: nvfp4-pack-quantized and mxfp4-pack-quantized."""

from __future__ import annotations

from functools import partial
from typing import Any

import torch
from torch import Tensor

from ...ops.fp4 import GROUPS
from ...schemes import Fp4WeightOnly
from ..base import Plain, QuantizedLayer
from ..files import TensorFiles
from ..plain import nibbles
from .config import FP4_ARGS, Group, layer_scheme

__all__ = ["fp4_args", "fp4_layer", "fp4_tensors"]


def fp4_layer(files: TensorFiles, name: str, group: Group) -> QuantizedLayer:
    """Read the layer ``name`` of a checkpoint.

    Raises:
        CheckpointError: a tensor is missing, or its shape or dtype does not match the format.
    """
    packed, scale, divisor = (f"{name}.weight_{part}" for part in ("packed", "scale", "global_scale"))
    n, half = files.matrix(packed, torch.uint8)
    k = 2 * half
    scheme, about = layer_scheme(group, -1, torch.bfloat16, None)
    assert isinstance(scheme, Fp4WeightOnly)
    groups = -(-k // GROUPS[scheme.format])
    if scheme.format == "nvfp4":
        files.check(scale, (torch.float8_e4m3fn,), (n, groups))
        files.check(divisor, (torch.float32,), (1,), ())
    else:
        files.check(scale, (torch.uint8, torch.float8_e8m0fnu), (n, groups))
        divisor = ""
    others = (divisor, f"{name}.input_global_scale")
    keys = (packed, scale, *(key for key in others if key and key in files))
    load = partial(_read, files, packed, scale, divisor)
    return QuantizedLayer(name, scheme, n, k, keys, load, "; ".join(about) or None)


def _read(files: TensorFiles, packed: str, scale: str, divisor: str) -> Plain:
    q = nibbles(files.read(packed))
    if not divisor:
        return Plain(q, files.finite(scale))
    scales = files.read(scale).float()
    if scales.isnan().any():
        raise files.error(scale, "holds NaN: the file is damaged")
    return Plain(q, scales, files.finite(divisor).reshape(1))


def fp4_tensors(q: Tensor, scales: Tensor, divisor: Tensor | None) -> dict[str, Tensor]:
    """The inverse of reading: takes codes uint8 [N, K] with K even, scales [N, G] and their divisor [N, 1]."""
    packed = (q[:, ::2] | q[:, 1::2] << 4).contiguous()
    if divisor is None:
        return {"weight_packed": packed, "weight_scale": scales.to(torch.float8_e8m0fnu).view(torch.uint8)}
    if (divisor != divisor[0]).any():
        raise ValueError("compressed-tensors: NVFP4 has one global scale, but rows of this layer differ")
    scale = scales.to(torch.float8_e4m3fn)
    return {"weight_packed": packed, "weight_scale": scale, "weight_global_scale": divisor[0].clone()}


def fp4_args(format: str) -> tuple[str, dict[str, Any]]:
    """The format of a group, and its QuantizationArgs other than number of bits and type."""
    strategy, group_size, dtype = FP4_ARGS[format]
    return f"{format}-pack-quantized", {"strategy": strategy, "group_size": group_size, "scale_dtype": dtype}

"""Checkpoints of NVIDIA's Model Optimizer ("modelopt"): e4m3, NVFP4, int8, by hf_quant_config.json.

FP8                        weight e4m3 [N, K], weight_scale [], input_scale [] unless activations stay in float
FP8_PER_CHANNEL_PER_TOKEN  weight e4m3 [N, K], weight_scale [N]; per-token activation scales
FP8_PB_WO                  weight e4m3 [N, K], weight_scale per 128 x 128: [N/128, K/128] or [N/128, 1, K/128, 1]
NVFP4, NVFP4_AWQ           weight uint8 [N, K/2] of e2m1, lower nibble first, weight_scale e4m3 [N, K/16],
                           weight_scale_2 []
W8A16                      weight int8 [N, K], weight_scale [N]

W = weight · scale; for NVFP4 e2m1 · weight_scale · weight_scale_2. MIXED_PRECISION specifies a format per layer.
"""

from __future__ import annotations

from collections.abc import Callable
from fnmatch import fnmatchcase
from functools import partial
from typing import Any

import torch

from ..ops.packed_shape import SCALE_BLOCK
from ..schemes import (
    Float8DynamicActivationFloat8Weight,
    Float8StaticActivationFloat8Weight,
    Float8WeightOnly,
    Fp4WeightOnly,
    Granularity,
    Int8WeightOnly,
    Scheme,
)
from .base import CheckpointError, Plain, QuantizedLayer
from .compressed_tensors.read import KV_CACHE, Contents
from .files import FLOATS, TensorFiles
from .plain import FP8_SCALES, check_layer_name, fp8_scale_shapes, nibbles, read_fp8
from .settings import Settings

__all__ = ["read"]

_NV_GROUP = 16
_MIXED = "MIXED_PRECISION"


def read(files: TensorFiles, settings: Settings) -> Contents:
    """The layers of a Model Optimizer checkpoint.

    Raises:
        CheckpointError: also for algorithms other than those above, and for activations that need scaling before the
            GEMM (``pre_quant_scale``).
    """
    scaled = next((key for key in files.names if key.endswith(".pre_quant_scale")), None)
    if scaled is not None:
        raise files.error(
            scaled,
            "activations must be multiplied by it before the GEMM (AWQ, SmoothQuant), which no kernel of qao "
            "does. Use an FP8 or NVFP4 checkpoint without it, or quantize the float model: scheme=",
        )
    layers = []
    for key in files.names:
        if key.endswith(".weight_scale"):
            name = check_layer_name(files, key, ".weight_scale")
            layers.append(_layer(files, name, _of_layer(settings, name)))
    dropped = [key for key in files.names if key.endswith(KV_CACHE)]
    declared = any(settings.values.get(key) for key in ("kv_cache_quant_algo", "kv_cache_scheme"))
    notes = [f"quantization of the KV cache is ignored ({len(dropped)} scales)"] if dropped or declared else []
    return Contents(layers, dropped, notes)


def _of_layer(settings: Settings, name: str) -> Settings:
    """The settings of one layer."""
    excluded = [*settings.texts("exclude_modules"), *settings.texts("ignore")]
    if any(fnmatchcase(name, pattern) or name.startswith(f"{pattern}.") for pattern in excluded):
        raise CheckpointError(f"{settings.where}: {name} is excluded, but its tensors are quantized")
    if settings.text("quant_algo", "").upper() != _MIXED:
        return settings
    found = settings.children("quantized_layers").get(name)
    if found is None:
        raise CheckpointError(f"{settings.where}: {name} is quantized, but quantized_layers does not list it")
    return found


def _layer(files: TensorFiles, name: str, settings: Settings) -> QuantizedLayer:
    algorithm = settings.text("quant_algo", "none").upper()
    if algorithm not in _READERS:
        raise CheckpointError(
            f"{settings.where}: {name}: the quant_algo {algorithm!r:.40} of Model Optimizer is not supported; "
            f"{', '.join(_READERS)} are. Quantize the float model instead: scheme="
        )
    return _READERS[algorithm](files, name, settings)


def _fp8(files: TensorFiles, name: str, settings: Settings, granularity: Granularity) -> QuantizedLayer:
    weight, scale, static = f"{name}.weight", f"{name}.weight_scale", f"{name}.input_scale"
    n, k = files.matrix(weight, torch.float8_e4m3fn)
    shapes = fp8_scale_shapes(granularity, n, k)
    if granularity == "block":
        rows, columns = shapes[0]
        if settings.integer("group_size", SCALE_BLOCK) not in (0, SCALE_BLOCK):
            raise settings.fail("group_size", f"{SCALE_BLOCK} with FP8_PB_WO")
        shapes = (*shapes, (rows, 1, columns, 1))
    files.check(scale, FP8_SCALES, *shapes)
    keys: tuple[str, ...] = (weight, scale)
    scheme: Scheme = Float8WeightOnly(granularity)
    if granularity == "row":
        scheme = Float8DynamicActivationFloat8Weight("row")
    elif granularity == "tensor" and static in files:
        scheme = Float8StaticActivationFloat8Weight("tensor", activation_scale=files.scalar(static))
        keys += (static,)
    return QuantizedLayer(name, scheme, n, k, keys, partial(read_fp8, files, weight, scale))


def _nvfp4(files: TensorFiles, name: str, settings: Settings) -> QuantizedLayer:
    weight, scale, factor = f"{name}.weight", f"{name}.weight_scale", f"{name}.weight_scale_2"
    n, half = files.matrix(weight, torch.uint8)
    if settings.integer("group_size", _NV_GROUP) != _NV_GROUP:
        raise settings.fail("group_size", f"{_NV_GROUP} with NVFP4")
    files.check(scale, (torch.float8_e4m3fn,), (n, -(-2 * half // _NV_GROUP)))
    files.check(factor, (torch.float32,), (), (1,))
    static = f"{name}.input_scale"
    keys = (weight, scale, factor, *([static] if static in files else ()))
    note = "activations are not quantized: with e2m1 weights they keep their dtype" if static in files else None
    load = partial(_read_nvfp4, files, weight, scale, factor)
    return QuantizedLayer(name, Fp4WeightOnly("nvfp4"), n, 2 * half, keys, load, note)


def _read_nvfp4(files: TensorFiles, weight: str, scale: str, factor: str) -> Plain:
    q = nibbles(files.read(weight))
    scales = files.read(scale).float()
    if scales.isnan().any():
        raise files.error(scale, "holds NaN: the file is damaged")
    # qao divides by a float32. Among the values closest to 1 / factor, choose one that reproduces the factor, if any.
    wanted = torch.tensor(files.scalar(factor), dtype=torch.float32)
    near = (1 / wanted).float()
    candidates = torch.stack([near, *(torch.nextafter(near, near * side) for side in (0.5, 2.0))])
    best = (1 / candidates - wanted).abs().argmin()
    return Plain(q, scales, candidates[best].reshape(1))


def _int8(files: TensorFiles, name: str, settings: Settings) -> QuantizedLayer:
    weight, scale = f"{name}.weight", f"{name}.weight_scale"
    n, k = files.matrix(weight, torch.int8)
    files.check(scale, FLOATS, (n,), (n, 1))
    return QuantizedLayer(name, Int8WeightOnly(), n, k, (weight, scale), partial(_read_int8, files, weight, scale))


def _read_int8(files: TensorFiles, weight: str, scale: str) -> Plain:
    return Plain(files.read(weight), files.finite(scale).reshape(-1, 1))


_Reader = Callable[[TensorFiles, str, Settings], QuantizedLayer]
_READERS: dict[str, _Reader] = {
    "FP8": partial(_fp8, granularity="tensor"),
    "FP8_PER_CHANNEL_PER_TOKEN": partial(_fp8, granularity="row"),
    "FP8_PB_WO": partial(_fp8, granularity="block"),
    "NVFP4": _nvfp4,
    "NVFP4_AWQ": _nvfp4,
    "W8A16": _int8,
}


def settings_of(content: dict[str, Any], where: str) -> Settings:
    """Settings from hf_quant_config.json."""
    outer = Settings(content, where)
    inner = outer.child("quantization")
    if inner is None:
        raise CheckpointError(f'{where} has no "quantization": Model Optimizer did not write it')
    return Settings({**inner.values, "quant_method": "modelopt"}, inner.where)

"""torchao's safetensors checkpoints: plain tensors ``<module>._weight_<part>`` and JSON in the header.

    Int8Tensor                 qdata int8 [N, K], scale [N, 1] or one
    Float8Tensor               qdata e4m3 [N, K], scale [N, 1], [1, 1] or per block of 128 x 128
    IntxUnpackedToInt8Tensor   qdata int8 [N, K], scale [N, G], zero_point int8 [N, G]; 4 and 8 bits
    Int4Tensor                 qdata int8 [N, K/2], low nibble first, two's complement; scale [G, N];
                               zero_point [G, N], added to the weight; only 0 is supported

W = (q - zero) · scale. Kernel-specific packings (TILE_PACKED_TO_4D and others) are rejected.
"""

from __future__ import annotations

import json
from functools import partial
from typing import Any

import torch

from ..schemes import (
    Float8DynamicActivationFloat8Weight,
    Float8DynamicActivationInt4Weight,
    Float8WeightOnly,
    Granularity,
    Int4WeightOnly,
    Int8DynamicActivationInt4Weight,
    Int8DynamicActivationInt8Weight,
    Int8WeightOnly,
    Scheme,
)
from .base import Plain, QuantizedLayer
from .files import FLOATS, TensorFiles
from .plain import FP8_SCALES, check_layer_name, four_bits, fp8_scale_shapes, grouping, read_fp8, regroup, unpack
from .settings import Settings

__all__ = ["is_torchao", "read"]


def is_torchao(metadata: dict[str, str]) -> bool:
    """Whether the header of a safetensors file is torchao's."""
    return "tensor_names" in metadata


def read(files: TensorFiles, settings: Settings) -> list[QuantizedLayer]:
    """The layers of a torchao checkpoint.

    Raises:
        CheckpointError: also for kernel-specific packings, MX and NVFP4, and activation scales that a model applies
            before its layers (``act_pre_scale``).
    """
    layers = []
    for name, text in files.metadata.items():
        where = f"{files.directory}: header: {name}"
        try:
            about = Settings(json.loads(text), where) if text.startswith("{") else None
        except (ValueError, RecursionError) as error:
            raise files.error(name, f"its description in the header is not JSON: {error}") from error
        kind = None if about is None else about.values.get("_type")
        if about is None or kind is None or kind == "Tensor":
            continue
        make = _KINDS.get(kind) if isinstance(kind, str) else None
        if make is None:
            raise files.error(name, f"is a {kind!r:.40}; qao supports {', '.join(_KINDS)}")
        if not name.endswith(".weight"):
            raise files.error(name, "is quantized, but is not the weight of a linear layer")
        module = check_layer_name(files, name, ".weight")
        if f"{module}._weight_act_pre_scale" in files:
            raise files.error(name, "has act_pre_scale, a factor for activations, which qao does not support")
        layers.append(make(files, module, about.child("_data") or Settings({}, where)))
    return layers


def _block(files: TensorFiles, name: str, data: Settings, n: int, k: int) -> list[int]:
    block = data.values.get("block_size") or [n, k]
    if not (isinstance(block, list) and len(block) == 2 and all(type(one) is int and one > 0 for one in block)):
        raise data.fail("block_size", "two positive integers")
    return block


def _tagged(data: Settings, name: str) -> Any:
    """Decode an attribute: {"_type": ..., "_data": value}, or the plain value."""
    value = data.values.get(name)
    return value.get("_data") if isinstance(value, dict) else value


def _granularity(kwargs: Settings) -> str:
    granularity = kwargs.child("granularity")
    kind = granularity.values.get("_type") if granularity is not None else "PerRow"
    if kind not in ("PerRow", "PerTensor"):
        raise kwargs.fail("granularity", "PerRow or PerTensor")
    return "row" if kind == "PerRow" else "tensor"


def _activations(data: Settings) -> Settings | None:
    kwargs = data.child("act_quant_kwargs")
    return None if kwargs is None else kwargs.child("_data") or Settings({}, kwargs.where)


def _int8(files: TensorFiles, name: str, data: Settings) -> QuantizedLayer:
    qdata, scale, zero = (f"{name}._weight_{part}" for part in ("qdata", "scale", "zero_point"))
    n, k = files.matrix(qdata, torch.int8)
    if _block(files, name, data, n, k) not in ([1, k], [n, k]):
        raise data.fail("block_size", f"[1, {k}] or [{n}, {k}]: qao supports int8 with one scale per row")
    files.check(scale, FLOATS, (n, 1), (n,), (), (1,), (1, 1))
    keys = [qdata, scale]
    if zero in files:
        files.check(zero, (torch.int8, *FLOATS), files.shape(scale))
        if files.read(zero).any():
            raise files.error(zero, "zero points in eight bits; qao supports only symmetric weights there")
        keys.append(zero)
    kwargs = _activations(data)
    note = None
    scheme: Scheme = Int8WeightOnly()
    if kwargs is not None:
        scheme = Int8DynamicActivationInt8Weight(symmetric_activations=_tagged(kwargs, "mapping_type") != "ASYMMETRIC")
        static = [f"{name}._weight_{part}" for part in ("act_quant_scale", "act_quant_zero_point")]
        static = [key for key in static if key in files]
        keys += static
        if static or _granularity(kwargs) == "tensor":
            note = "activations are quantized token by token, not with one scale for all"

    def load() -> Plain:
        return Plain(files.read(qdata), files.finite(scale).reshape(-1).expand(n).contiguous())

    return QuantizedLayer(name, scheme, n, k, tuple(keys), load, note)


def _float8(files: TensorFiles, name: str, data: Settings) -> QuantizedLayer:
    qdata, scale = f"{name}._weight_qdata", f"{name}._weight_scale"
    n, k = files.matrix(qdata, torch.float8_e4m3fn)
    block = _block(files, name, data, n, k)
    kinds: dict[tuple[int, ...], Granularity] = {(n, k): "tensor", (1, k): "row", (128, 128): "block"}
    weights = kinds.get(tuple(block))
    if weights is None:
        raise data.fail("block_size", f"[1, {k}], [{n}, {k}] or [128, 128]")
    files.check(scale, FP8_SCALES, *fp8_scale_shapes(weights, n, k))
    kwargs = _activations(data)
    note, rows = None, None
    scheme: Scheme = Float8WeightOnly(weights)
    if kwargs is not None:
        config = data.child("mm_config")
        fast = (config and (config.child("_data") or config)) or Settings({}, data.where)
        notes = []
        if weights != "block":
            inputs = _granularity(kwargs)
            if weights == "tensor" and inputs == "row":
                weights, rows = "row", n
            elif weights == "row" and inputs == "tensor":
                notes.append("activations are quantized token by token, not with one scale for all")
        if kwargs.values.get("hp_value_ub") is not None or kwargs.values.get("hp_value_lb") is not None:
            notes.append("activations are not clipped at hp_value_lb and hp_value_ub")
        note = "; ".join(notes) or None
        scheme = Float8DynamicActivationFloat8Weight(weights, fast_accum=fast.flag("use_fast_accum", False))
    return QuantizedLayer(name, scheme, n, k, (qdata, scale), partial(read_fp8, files, qdata, scale, rows), note)


def _unpacked(files: TensorFiles, name: str, data: Settings) -> QuantizedLayer:
    qdata, scale, zero = keys = tuple(f"{name}._weight_{part}" for part in ("qdata", "scale", "zero_point"))
    n, k = files.matrix(qdata, torch.int8)
    bits = {"int4": 4, "int8": 8}.get(str(_tagged(data, "target_dtype")))
    block = _block(files, name, data, n, k)
    if bits is None or block[0] != 1:
        raise files.error(
            name, f"{_tagged(data, 'target_dtype')!r:.20} in blocks of {block}; qao supports int4, and int8 by row"
        )
    groups = -(-k // block[1])
    files.check(scale, FLOATS, (n, groups))
    files.check(zero, (torch.int8, *FLOATS), (n, groups))
    zeros = files.read(zero)
    inputs = _tagged(data, "activation_quantization")
    if inputs not in (None, "INT8_ASYM_PER_TOKEN", "int8_asym_per_token"):
        raise data.fail("activation_quantization", "null or INT8_ASYM_PER_TOKEN")
    symmetric = not zeros.any()
    if bits == 8:
        if groups > 1 or not symmetric:
            raise files.error(qdata, "eight bits with groups or zero points; qao supports int8 with one scale per row")
        scheme8 = Int8WeightOnly() if inputs is None else Int8DynamicActivationInt8Weight(symmetric_activations=False)
        return QuantizedLayer(name, scheme8, n, k, keys, lambda: Plain(files.read(qdata), files.finite(scale)))
    if not torch.equal(zeros, zeros.to(torch.int8).to(zeros.dtype)):
        raise files.error(zero, "holds zero points that are not integers")
    size, note = grouping(files, qdata, block[1], k)
    scheme = (
        Int4WeightOnly(size, symmetric, files.dtype(scale))
        if inputs is None
        else Int8DynamicActivationInt4Weight(size, symmetric, files.dtype(scale), symmetric_activations=False)
    )

    def load() -> Plain:
        whole = None if symmetric else regroup(four_bits(files, zero, zeros.to(torch.int8)), block[1], k)
        return Plain(four_bits(files, qdata, files.read(qdata)), regroup(files.finite(scale), block[1], k), whole)

    return QuantizedLayer(name, scheme, n, k, keys, load, note)


def _int4(files: TensorFiles, name: str, data: Settings) -> QuantizedLayer:
    qdata, scale, zero = keys = tuple(f"{name}._weight_{part}" for part in ("qdata", "scale", "zero_point"))
    n, k = files.matrix(qdata, torch.int8, torch.uint8)
    k *= 2
    block = _block(files, name, data, n, k)
    size, note = grouping(files, qdata, block[1], k)
    files.check(scale, FLOATS, (-(-k // block[1]), n))
    files.check(zero, FLOATS, (-(-k // block[1]), n))
    if files.read(zero).any():
        raise files.error(zero, "is added to the weight, but is not an integer number of steps; no kernel supports it")
    by_token = str(_tagged(data, "activation_dtype")) == "float8_e4m3fn"
    kind = Float8DynamicActivationInt4Weight if by_token else Int4WeightOnly

    def load() -> Plain:
        q = unpack(files.read(qdata), 4) ^ 8
        return Plain(q, regroup(files.finite(scale).t(), block[1], k))

    return QuantizedLayer(name, kind(size, True, files.dtype(scale)), n, k, keys, load, note)


_KINDS = {"Int8Tensor": _int8, "Float8Tensor": _float8, "IntxUnpackedToInt8Tensor": _unpacked, "Int4Tensor": _int4}

"""Reader of compressed-tensors checkpoints (llm-compressor, vLLM).

pack-quantized    weight_packed int32 [N, ceil(K·b/32)], value i of a word is k = 32/b·j + i, stored q + 2^(b-1);
                  weight_shape int64 [2]; asymmetric: weight_zero_point int32 [ceil(N·b/32), G], packed along N like q
int-, float-,     weight int8 (4-bit values too) or e4m3 [N, K]; asymmetric: weight_zero_point int8 [N, G]
naive-quantized
all of these      weight_scale: per group [N, G], per channel [N, 1], per tensor [1],
                  per block [ceil(N/128), ceil(K/128)]; input_scale [1] for static activations
nvfp4-, mxfp4-    weight_packed uint8 [N, K / 2], e2m1, lower nibble first; weight_scale [N, G]: groups of 16: e4m3,
pack-quantized    divided by weight_global_scale [1]; groups of 32: exponents + 127 in uint8

W = (q - zero) · scale, or e2m1 · (scale / global scale). The tensors show which layers are quantized, ``config_groups``
in which format.
"""

from __future__ import annotations

from functools import partial
from typing import NamedTuple

import torch
from torch import Tensor

from ...schemes import Scheme
from ..base import Plain, QuantizedLayer
from ..files import FLOATS, TensorFiles
from ..plain import FP8_SCALES, check_layer_name, four_bits, fp8_scale_shapes, grouping, read_fp8, regroup, unpack
from ..settings import Settings
from .config import Args, Group, group_of, groups_of, layer_scheme
from .fp4 import fp4_layer

__all__ = ["KV_CACHE", "Contents", "read", "read_layer"]

KV_CACHE = (".k_scale", ".v_scale", ".q_scale", ".k_zero_point", ".v_zero_point", ".output_scale")


class Contents(NamedTuple):
    layers: list[QuantizedLayer]
    dropped: list[str]
    notes: list[str]


def read(files: TensorFiles, settings: Settings) -> Contents:
    """The layers of a compressed-tensors checkpoint.

    Raises:
        CheckpointError: also for formats without a qao kernel, see docs/formats.md.
    """
    groups = groups_of(settings)
    layers: dict[str, QuantizedLayer] = {}
    for key in files.names:
        for suffix in (".weight_packed", ".weight_scale"):
            if key.endswith(suffix) and (name := check_layer_name(files, key, suffix)) not in layers:
                layers[name] = read_layer(files, name, group_of(groups, settings, name))
    notes = []
    dropped = [key for key in files.names if key.endswith(KV_CACHE)]
    if dropped or settings.child("kv_cache_scheme"):
        notes.append(f"quantization of the KV cache is ignored ({len(dropped)} scales)")
    return Contents(list(layers.values()), dropped, notes)


def read_layer(files: TensorFiles, name: str, group: Group) -> QuantizedLayer:
    """Read one layer."""
    args, inputs = group.weights, group.inputs
    if args.kind == "float" and args.bits == 4:
        return fp4_layer(files, name, group)
    packed, weight, scale = f"{name}.weight_packed", f"{name}.weight", f"{name}.weight_scale"
    main = packed if packed in files else weight
    if main == weight:
        n, k = files.matrix(weight, torch.float8_e4m3fn if args.kind == "float" else torch.int8)
    elif args.kind == "int":
        n, k = _packed_shape(files, name, args.bits)
    else:
        raise files.error(packed, f"float weights of {args.bits} bits; qao supports e4m3")
    given = args.group_size if args.strategy == "group" else -1
    size, note = (-1, None) if given == -1 else grouping(files, main, given, k)
    _check_parameters(files, name, args, (n, k), 1 if given == -1 else -(-k // given))
    _check_order(files, f"{name}.weight_g_idx", k, given)
    static = None
    if inputs is not None and inputs.static and inputs.kind == "float" and args.kind == "float":
        static = files.scalar(f"{name}.input_scale")
    scheme, about = layer_scheme(group, size, files.dtype(scale), static)
    others = ("weight_shape", "weight_zero_point", "weight_g_idx", "input_scale", "input_zero_point")
    keys = (main, scale, *(f"{name}.{part}" for part in others if f"{name}.{part}" in files))
    load = partial(_read, files, name, args, scheme, (n, k))
    return QuantizedLayer(name, scheme, n, k, keys, load, "; ".join(filter(None, [note, *about])) or None)


def _check_parameters(files: TensorFiles, name: str, args: Args, shape: tuple[int, int], groups: int) -> None:
    """Check shapes and dtypes of scales and zero points."""
    n, k = shape
    scale, zero, packed = (f"{name}.weight_{part}" for part in ("scale", "zero_point", "packed"))
    if args.kind == "float":
        files.check(scale, FP8_SCALES, *fp8_scale_shapes(args.granularity, n, k))
    elif args.strategy == "tensor":
        files.check(scale, FLOATS, (), (1,), (1, 1))
    else:
        files.check(scale, FLOATS, (n, groups), *([(n,)] if groups == 1 else []))
    if args.kind == "int" and args.bits == 8 and groups > 1:
        raise files.error(scale, f"eight bits with {groups} groups per row; qao supports int8 with one scale per row")
    if args.symmetric:
        if zero in files:
            _check_unused(files, zero)
    elif packed in files and args.strategy != "tensor":
        files.check(zero, (torch.int32,), (-(-n * args.bits // 32), groups))
    else:
        files.check(zero, (torch.int8,), files.shape(scale))


def _check_order(files: TensorFiles, g_idx: str, k: int, given: int) -> None:
    if g_idx in files:
        files.check(g_idx, (torch.int32, torch.int64), (k,))
        if not torch.equal(files.read(g_idx).long(), torch.arange(k) // (given if given > 0 else k)):
            raise files.error(g_idx, "columns are reordered into groups (act-order), for which qao has no kernel")


def _check_unused(files: TensorFiles, zero: str) -> None:
    """Check the redundant zero points that some versions of the package store for symmetric weights."""
    stored = files.read(zero)
    middle = -0x77777778 if stored.dtype == torch.int32 else 0  # packed nibbles of 8
    if not (stored.double() == middle).all():
        raise files.error(zero, "has zero points other than 0, but the config says that the weight is symmetric")


def _packed_shape(files: TensorFiles, name: str, bits: int) -> tuple[int, int]:
    packed, stated = f"{name}.weight_packed", f"{name}.weight_shape"
    rows, words = files.matrix(packed, torch.int32)
    files.check(stated, (torch.int64, torch.int32), (2,))
    n, k = (int(one) for one in files.read(stated))
    if n != rows or k < 1 or -(-k * bits // 32) != words:
        raise files.error(stated, f"says [{n}, {k}], which does not fit weight_packed int32[{rows}, {words}]")
    return n, k


def _read(files: TensorFiles, name: str, args: Args, scheme: Scheme, shape: tuple[int, int]) -> Plain:
    n, k = shape
    packed, weight, scale = f"{name}.weight_packed", f"{name}.weight", f"{name}.weight_scale"
    if args.kind == "float":
        expand = args.granularity == "tensor" and getattr(scheme, "granularity", "") == "row"
        return read_fp8(files, weight, scale, n if expand else None)
    if packed in files:
        q = unpack(files.read(packed), args.bits)[:, :k]
        q = q if args.bits == 4 else (q ^ 0x80).view(torch.int8)
    else:
        q = files.read(weight) if args.bits == 8 else four_bits(files, weight, files.read(weight))
    scales = files.finite(scale)
    if scales.numel() == 1 and n > 1:
        scales = scales.reshape(1, 1).expand(n, 1)
    scales = scales.reshape(n, -1)
    given = args.group_size if args.strategy == "group" else -1
    if args.bits == 8:
        return Plain(q.contiguous(), scales.contiguous())
    zeros = None if args.symmetric else _zeros(files, f"{name}.weight_zero_point", n).expand(scales.shape)
    return Plain(q, regroup(scales, given, k), None if zeros is None else regroup(zeros, given, k))


def _zeros(files: TensorFiles, name: str, n: int) -> Tensor:
    """Unpack zero points to uint8 0..15 [N, G] or [1, 1]."""
    stored = files.read(name)
    if stored.dtype == torch.int32:
        return unpack(stored.t(), 4).t()[:n]
    zeros = four_bits(files, name, stored)
    return zeros.reshape(1, 1) if zeros.numel() == 1 else zeros.reshape(n, -1)

"""Layers of qao in the layout of compressed-tensors, which vLLM, transformers and others load.

scheme      tensors                                             format
int4        weight_packed, weight_scale, weight_shape           pack-quantized
            and weight_zero_point unless symmetric
fp8_int4    as int4, since vLLM reads it packed                 pack-quantized
int8        weight_packed, weight_scale, weight_shape           pack-quantized
int8_int8   weight int8, weight_scale                           int-quantized
int8_int4   weight int8 of -8..7, weight_scale                  int-quantized
            and weight_zero_point unless symmetric
fp8         weight e4m3, weight_scale                           naive-quantized
fp8_fp8     the same, and input_scale of static activations     float-quantized
fp4         weight_packed, weight_scale                         mxfp4-pack-quantized
            and weight_global_scale                             nvfp4-pack-quantized
"""

from __future__ import annotations

import re
from collections.abc import Mapping
from typing import Any

import torch
from torch import Tensor

from ...nn.linear import QuantLinear
from ...schemes import Float8Weight, Fp4Weight, Int4Weight, Scheme
from ..plain import packed_nibbles
from .fp4 import fp4_args, fp4_tensors

__all__ = ["can_write", "layer_tensors", "quantization_config", "unread_by_engines"]

_FLOAT_STRATEGY = {"row": "channel", "tensor": "tensor", "block": "block"}


def can_write(scheme: Scheme, in_features: int | None = None) -> str | None:
    """Why a layer of this scheme (and K) cannot be written as compressed-tensors; None if it can."""
    if type(scheme).word not in ("int4", "int8", "fp8", "fp4", "int8_int8", "int8_int4", "fp8_fp8", "fp8_int4"):
        return f"compressed-tensors has no name for {scheme}"
    if scheme.rotation:
        return f"compressed-tensors cannot hold the rotation of {scheme}: save it in qao's own format"
    if isinstance(scheme, (Fp4Weight, Int4Weight)) and scheme.group_size > 0 and in_features is not None:
        if in_features % scheme.group_size:
            return f"in_features {in_features} is not a multiple of the group size {scheme.group_size}"
    return None


def unread_by_engines(scheme: Scheme) -> str | None:
    """Why vLLM and SGLang do not load a layer of this scheme in compressed-tensors, although it can be written."""
    if isinstance(scheme, Int4Weight) and scheme.activations != "float" and not scheme.symmetric:
        return f"vLLM does not support zero points with {scheme.activations} activations ({scheme})"
    return None


def layer_tensors(layer: QuantLinear) -> dict[str, Tensor]:
    """The weight of a layer under the names of compressed-tensors, without the layer's name and the bias.

    Returns:
        See the table above. Scales keep their dtype. q and zero points are those of the layer.

    Raises:
        ValueError: the layer cannot be written: see ``can_write``; also float zero points, and fp4 rows with different
            divisors.
    """
    scheme, n, k = layer.scheme, layer.out_features, layer.in_features
    reason = can_write(scheme, k)
    if reason is not None:
        raise ValueError(f"compressed-tensors: {reason}")
    qweight, scales = layer.qweight.detach(), layer.scales.detach()
    if isinstance(scheme, Int4Weight):
        return _int4(scheme, qweight, scales, n, k)
    if isinstance(scheme, Fp4Weight):
        return fp4_tensors(*scheme.unpack(qweight, scales, n, k))
    if isinstance(scheme, Float8Weight):
        one = scheme.granularity == "tensor"
        tensors = {"weight": qweight.view(torch.float8_e4m3fn), "weight_scale": scales.reshape(1) if one else scales}
        if layer.activation_scale is not None:
            tensors["input_scale"] = layer.activation_scale.detach()
        return tensors
    scales = scales.reshape(n, 1)
    if _is_packed(scheme):
        words = torch.nn.functional.pad(qweight.view(torch.uint8) ^ 0x80, (0, -k % 4)).contiguous()
        return {"weight_packed": words.view(torch.int32), "weight_scale": scales, "weight_shape": torch.tensor([n, k])}
    return {"weight": qweight, "weight_scale": scales}


def _int4(scheme: Int4Weight, qweight: Tensor, scales: Tensor, n: int, k: int) -> dict[str, Tensor]:
    q, plain, zeros = torch.ops.qao.unpack_int4(qweight, scales, n, k, scheme.group_size)
    whole = zeros.to(torch.uint8)
    if not torch.equal(whole.to(zeros.dtype), zeros) or (whole > 15).any():
        raise ValueError("compressed-tensors: zero points of this layer are not integers 0..15")
    if _is_packed(scheme):
        tensors = {
            "weight_packed": packed_nibbles(q),
            "weight_scale": plain,
            "weight_shape": torch.tensor([n, k]),
        }
        zero = packed_nibbles(whole.t().contiguous()).t().contiguous()
    else:
        tensors = {"weight": (q - 8).view(torch.int8), "weight_scale": plain}
        zero = (whole - 8).view(torch.int8)
    return tensors if scheme.symmetric else {**tensors, "weight_zero_point": zero}


def quantization_config(layers: Mapping[str, Scheme], ignore: list[str]) -> dict[str, Any]:
    """The entry ``quantization_config`` of config.json.

    Args:
        layers: the scheme of every quantized layer by name, at least one.
        ignore: names of the float linear layers.

    Returns:
        If all layers have one scheme, one group that targets heads by name, then "Linear". Otherwise groups that name
        their layers. qao's own settings are stored under "qao".

    Raises:
        ValueError: no layers, or a scheme that cannot be written.
    """
    if not layers:
        raise ValueError("compressed-tensors: no layer is quantized")
    groups: list[tuple[dict[str, Any], dict[str, Any], list[str]]] = []
    for name, scheme in layers.items():
        reason = can_write(scheme)
        if reason is not None:
            raise ValueError(f"compressed-tensors: {name}: {reason}")
        args, own = _group(scheme), _own(scheme)
        for known, known_own, names in groups:
            if known == args and known_own == own:
                names.append(name)
                break
        else:
            groups.append((args, own, [name]))
    # Target modules outside numbered blocks by name, above all the head, which is no "Linear" in vLLM. Names come
    # first: compressed-tensors stops at the first target that matches a module and warns of targets without a match.
    heads = [name for name in layers if not any(part.isdigit() for part in re.split(r"\\?\.", name))]
    formats = {args["format"] for args, _, _ in groups}
    config: dict[str, Any] = {
        "quant_method": "compressed-tensors",
        "format": formats.pop() if len(formats) == 1 else "mixed-precision",
        "quantization_status": "compressed",
        "config_groups": {
            f"group_{i}": {"targets": [*heads, "Linear"] if len(groups) == 1 else names, **args}
            for i, (args, _, names) in enumerate(groups)
        },
        "ignore": list(ignore),
        "kv_cache_scheme": None,
        "global_compression_ratio": None,
    }
    beyond = {f"group_{i}": own for i, (_, own, _) in enumerate(groups) if own}
    return {**config, "qao": beyond} if beyond else config


def _is_packed(scheme: Scheme) -> bool:
    """Whether integer weights are packed in 32-bit words rather than one value per byte."""
    return scheme.activations != "int8"


def _own(scheme: Scheme) -> dict[str, Any]:
    fast = getattr(scheme, "fast_accum", False)
    whole = isinstance(scheme, Int4Weight) and scheme.whole_zeros
    return {name: True for name, says in (("fast_accum", fast), ("whole_zeros", whole)) if says}


def _group(scheme: Scheme) -> dict[str, Any]:
    format = "pack-quantized" if _is_packed(scheme) else "int-quantized"
    if isinstance(scheme, Float8Weight):
        format = "naive-quantized" if scheme.activations == "float" else "float-quantized"
        strategy = _FLOAT_STRATEGY[scheme.granularity]
        weights = _args(8, "float", strategy)
        if strategy == "block":
            weights["block_structure"] = [128, 128]
    elif isinstance(scheme, Fp4Weight):
        format, changes = fp4_args(scheme.format)
        weights = _args(4, "float", "") | changes
    elif isinstance(scheme, Int4Weight):
        by_row = scheme.group_size == -1
        weights = _args(4, "int", "channel" if by_row else "group", symmetric=scheme.symmetric)
        weights["group_size"] = None if by_row else scheme.group_size
    else:
        weights = _args(8, "int", "channel")
    return {"weights": weights, "input_activations": _inputs(scheme), "output_activations": None, "format": format}


def _inputs(scheme: Scheme) -> dict[str, Any] | None:
    if scheme.activations == "float":
        return None
    if scheme.activations == "int8":
        return _args(8, "int", "token", symmetric=scheme.symmetric_activations, dynamic=True)
    if scheme.activation_scale is not None:
        return _args(8, "float", "tensor")
    granularity = scheme.granularity if isinstance(scheme, Float8Weight) else "row"
    if granularity == "block":
        return {**_args(8, "float", "group", dynamic=True), "group_size": 128}
    return _args(8, "float", "token" if granularity == "row" else "tensor", dynamic=True)


def _args(bits: int, kind: str, strategy: str, *, symmetric: bool = True, dynamic: bool = False) -> dict[str, Any]:
    return {
        "num_bits": bits,
        "type": kind,
        "symmetric": symmetric,
        "strategy": strategy,
        "group_size": None,
        "dynamic": dynamic,
    }

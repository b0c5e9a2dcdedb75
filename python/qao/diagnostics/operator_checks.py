"""Error of every operator against its reference on a device, for ``qao doctor``."""

from __future__ import annotations

import math
from collections.abc import Callable

import torch
from torch import Tensor

from .. import ops, schemes
from ..nn.experts import QuantProjection, quantize_projection
from ..ops import reference
from ..ops.merged_mm import FUSED
from ..quant_primitives.fp4 import _by_torch as fp4_by_torch
from ..schemes import Scheme

_N, _K, _GROUP_SIZE = 80, 192, 64  # more than one tile in each dimension, the last one partial
_TOKENS = (1, 33)  # few tokens and many select different kernels

qao = torch.ops.qao


def _distance(actual: Tensor, expected: Tensor) -> float:
    value = ((actual.double() - expected.double()).norm() / expected.double().norm()).item()
    return math.inf if math.isnan(value) else value


def _random(*shape: int, device: str) -> Tensor:
    return torch.randn(shape, generator=torch.Generator().manual_seed(sum(shape))).to(device, torch.bfloat16)


def _seen(scheme: Scheme, x: Tensor) -> Tensor:
    """x̂, the activations that the GEMM uses under this scheme."""
    if scheme.activations == "int8":
        return reference.dequantize_activation(
            *reference.quantize_activation_int8(x, symmetric=scheme.symmetric_activations)
        )
    return (
        reference.dequantize_activation(*reference.quantize_activation_fp8(x, -1)) if scheme.activations == "fp8" else x
    )


def _product(scheme: Scheme) -> Callable[[str], float]:
    def error(device: str) -> float:
        packed = scheme.quantize(_random(_N, _K, device=device))
        tensors = packed.tensors() | {"bias": _random(_N, device=device)}
        dense = scheme.dequantize(packed.qweight, packed.scales, _N, _K, torch.float32)
        errors = []
        for tokens in _TOKENS:
            x = _random(tokens, _K, device=device)
            expected = reference.mm(_seen(scheme, x), dense, tensors["bias"])
            errors.append(_distance(scheme.mm(x, tensors, scheme.constants(_N, _K)), expected))
        return max(errors)

    return error


def _grouped_product(scheme: Scheme) -> Callable[[str], float]:
    def error(device: str) -> float:
        weight, x = _random(2, _N, _K, device=device), _random(33, _K, device=device)
        packed = quantize_projection(weight, scheme, False, None, "weight")
        projection = QuantProjection(2, _N, _K, scheme, packed, None, torch.bfloat16)
        dense, seen = projection.dequantize(torch.float32), _seen(scheme, x)
        expected = torch.cat([reference.mm(seen[:1], dense[0]), reference.mm(seen[1:], dense[1])])
        return _distance(projection(x, torch.tensor([1, 33], dtype=torch.int32, device=device)), expected)

    return error


def _merged_product(scheme: Scheme) -> Callable[[str], float]:
    def error(device: str) -> float:
        sizes, x = (_N, 2 * _N), _random(33, _K, device=device)
        quantized = (scheme.quantize(_random(n, _K, device=device)).tensors() for n in sizes)
        tensors = [each | {"bias": _random(n, device=device)} for n, each in zip(sizes, quantized, strict=True)]
        operator = ops.MERGED[getattr(qao, f"{scheme.word}_mm").default]
        lists = {"weight": "qweight", "scales": "scales", "bias": "bias", "weight_sums": "weight_sums"}
        names = [argument.name for argument in operator._schema.arguments]
        given = {name: [each.get(key) for each in tensors] for name, key in lists.items() if name in names}
        separate = [
            scheme.mm(x, each, scheme.constants(rows, _K)) for each, rows in zip(tensors, (_N, 2 * _N), strict=True)
        ]
        return max(map(_distance, operator(x, **given), separate))

    return error


def _decode_attention(device: str) -> float:
    q, k, v = (_random(2, heads, 33, 64, device=device) for heads in (4, 2, 2))
    keep = torch.ones(3, 33, dtype=torch.bool, device=device).tril(30)
    y = qao.decode_attention(q[:, :, :3], k, v, keep, 0.125)
    keys, values = (tensor.double().repeat_interleave(2, 1) for tensor in (k, v))
    scores = q[:, :, :3].double() @ keys.transpose(-1, -2) * 0.125
    weights = torch.softmax(scores.masked_fill(~keep, -math.inf), -1)
    return _distance(y, (weights @ values).transpose(1, 2))


def _token_attention(device: str) -> float:
    if device == "cuda" and torch.cuda.get_device_capability() < (9, 0):
        return 0.0  # the kernel is for Hopper
    q, k, v = (_random(2, heads, 1, 64, device=device) for heads in (4, 2, 2))
    keys, values = (_random(2, 2, 33, 64 + extra, device=device)[..., :64] for extra in (0, 8))
    position = torch.tensor([20], device=device)
    mask = (torch.arange(33, device=device) <= 20)[None, None, None]
    y = qao._token_attention(q, k, v, None, None, position, keys, values, mask, qao._key_range(mask), 0.125)
    return _distance(y, qao.decode_attention(q, keys, values, mask, 0.125))


def _int8_scaled_mm(device: str) -> float:
    x, q = _random(33, _K, device=device), _random(_N, _K, device=device).mul(40).to(torch.int8)
    scales = torch.full((_N,), 0.01, device=device)
    y = qao.int8_scaled_mm(*qao.int8_quantize(x, False), q, scales, None, q.sum(1) * scales, torch.float32)
    return _distance(y, reference.mm(x, reference.dequantize_8bit(q, scales)))


def _fp8_scaled_mm(device: str) -> float:
    x, w = (_random(rows, _K, device=device).to(torch.float8_e4m3fn) for rows in (33, _N))
    one = torch.ones(1, device=device)
    y = qao.fp8_scaled_mm(x, one, w, one, None, torch.float32, False)
    return _distance(y, reference.mm(x, w))


def _int8_quantize(device: str) -> float:
    x = _random(33, _K, device=device)
    expected = reference.dequantize_activation(*reference.quantize_activation_int8(x, symmetric=False))
    return _distance(reference.dequantize_activation(*qao.int8_quantize(x, False)), expected)


def _hadamard(device: str) -> float:
    x, size = _random(33, 192, device=device), 64
    matrix = torch.ones(1, 1, dtype=torch.float64, device=device)
    while len(matrix) < size:
        matrix = torch.cat((torch.cat((matrix, matrix), 1), torch.cat((matrix, -matrix), 1)))
    return _distance(qao.hadamard(x, size), reference.mm(x.view(-1, size), matrix / size**0.5).view(x.shape))


def _fp8_quantize(device: str) -> float:
    x = _random(33, _K, device=device)
    expected = reference.dequantize_activation(*reference.quantize_activation_fp8(x, 128))
    return _distance(reference.dequantize_activation(*qao.fp8_quantize(x, None, 128)), expected)


def _in_int8(x: Tensor) -> Tensor:
    return reference.dequantize_activation(*reference.quantize_activation_int8(x, symmetric=True))


def _rms_norm_quantize(device: str) -> float:
    x, weight = _random(33, _K, device=device), _random(_K, device=device)
    expected = _in_int8(reference.rms_norm(x, weight, 1e-6))
    return _distance(reference.dequantize_activation(*qao.rms_norm_quantize(x, weight, 1e-6, torch.int8)), expected)


def _add_rms_norm_quantize(device: str) -> float:
    x, residual = _random(33, _K, device=device), _random(34, _K, device=device)[1:]
    expected = _in_int8(reference.rms_norm(x + residual, None, 1e-6))
    q, scales, _ = qao.add_rms_norm_quantize(x, residual, None, 1e-6, torch.int8)
    return _distance(reference.dequantize_activation(q, scales), expected)


def _silu_mul_quantize(device: str) -> float:
    gate, up = _random(33, _K, device=device), _random(34, _K, device=device)[1:]
    expected = _in_int8(reference.silu_mul(gate, up))
    return _distance(reference.dequantize_activation(*qao.silu_mul_quantize(gate, up, torch.int8)), expected)


def _add_rms_norm(device: str) -> float:
    x, residual = _random(33, _K, device=device), _random(34, _K, device=device)[1:]
    return _distance(qao.add_rms_norm(x, residual, None, 1e-6)[0], reference.rms_norm(x + residual, None, 1e-6))


def _add_rms_norm_int4_mm(device: str) -> float:
    scheme = schemes.Int4WeightOnly()
    packed = scheme.quantize(_random(_N, _K, device=device))
    dense = scheme.dequantize(packed.qweight, packed.scales, _N, _K, torch.float32)
    errors = []
    for tokens in _TOKENS:
        x, residual = _random(tokens, _K, device=device), _random(tokens + 1, _K, device=device)[1:]
        expected = reference.mm(reference.rms_norm(x + residual, None, 1e-6), dense)
        weight, sizes = (packed.qweight, packed.scales, None), scheme.sizes(_N, _K)
        errors.append(_distance(qao.add_rms_norm_int4_mm(x, residual, None, *weight, 1e-6, *sizes, False)[0], expected))
    return max(errors)


def _merged_add_rms_norm_int4_mm(device: str) -> float:
    scheme = schemes.Int4WeightOnly()
    packed = [scheme.quantize(_random(_N, _K, device=device)) for _ in range(2)]
    dense = [scheme.dequantize(each.qweight, each.scales, _N, _K, torch.float32) for each in packed]
    weights = [each.qweight for each in packed], [each.scales for each in packed], [None, None]
    errors = []
    for tokens in _TOKENS:
        x, residual = (_random(tokens, _K, device=device) for _ in range(2))
        normed = reference.rms_norm(x + residual, None, 1e-6)
        y, _ = FUSED(x, residual, None, *weights, 1e-6, [_N, _N], *scheme.sizes(_N, _K)[1:], True)
        errors.append(_distance(y, reference.silu_mul(*(reference.mm(normed, each) for each in dense))))
    return max(errors)


def _expert_rows(device: str) -> float:
    """MoE permute and unpermute with weights that sum to one."""
    x, chosen = _random(33, _K, device=device), torch.arange(132, device=device).view(33, 4) * 7 % 9
    _, row_index, places = qao.expert_sort(chosen, 8)
    return _distance(qao.expert_sum(x[row_index], places, torch.full((33, 4), 0.25, device=device)), x.double())


def _silu_mul(device: str) -> float:
    gate, up = _random(33, _K, device=device), _random(34, _K, device=device)[1:]
    return _distance(qao.silu_mul(gate, up), reference.silu_mul(gate, up))


def _swiglu(device: str) -> float:
    x, gate = _random(33, 2 * _K, device=device), (1.5, 2.0, 1.0, True)
    exact = reference.swiglu(x, *gate)
    quantized = reference.dequantize_activation(*qao.swiglu_quantize(x, *gate, torch.int8))
    return max(_distance(qao.swiglu(x, *gate), exact), _distance(quantized, _in_int8(exact)))


def _expert_topk(device: str) -> float:
    logits = _random(33, 64, device=device)
    _, weights = qao.expert_topk(logits, None, 4, False, False, 1.0)
    return _distance(weights, logits.double().softmax(-1).topk(4).values)


def _int4_parts(device: str) -> tuple[Tensor, Tensor, Tensor]:
    q = (_random(_N, _K, device=device).abs() * 5).clamp(max=15).to(torch.uint8)
    scales = _random(_N, _K // _GROUP_SIZE, device=device).float().abs() + 0.1
    return q, scales, torch.full_like(scales, 7)


def _quantize_groups(device: str) -> float:
    weight, size = _random(_N, _K, device=device), _GROUP_SIZE
    q, scales, zeros, _ = qao.quantize_groups(weight, None, size, torch.uint8, False, torch.float32, [1.0])
    expected = reference.quantize_int4(weight.cpu(), size, symmetric=False)
    return _distance(
        reference.dequantize(q.cpu(), scales.cpu(), zeros.cpu(), size), reference.dequantize(*expected, size)
    )


def _quantize_blocks(device: str) -> float:
    weight = _random(_N, _K, device=device)
    q, scales, _ = qao.quantize_blocks(weight, 1, _K)
    expected = reference.dequantize_activation(*reference.quantize_activation_fp8(weight, -1))
    return _distance(reference.dequantize_8bit(q, scales), expected)


def _quantize_fp4(device: str) -> float:
    weight = _random(_N, _K, device=device)
    got, expected = (quantize(weight, 32)[:3] for quantize in (qao.quantize_fp4, fp4_by_torch))
    return 0.0 if all(torch.equal(a, b) for a, b in zip(got, expected, strict=True)) else math.inf


def _quantize_weight(device: str) -> float:
    weight = _random(_N, _K, device=device)
    q = torch.empty(_N, _K, dtype=torch.int8, device=device)
    scales, fault = torch.empty(_N, 1, device=device), torch.zeros(1, dtype=torch.int32, device=device)
    qao.quantize_weight_(weight, q, scales, fault, None, torch.float8_e4m3fn, 1, _K, True, False)
    expected = reference.dequantize_activation(*reference.quantize_activation_fp8(weight, -1))
    return _distance(reference.dequantize_8bit(q.view(torch.float8_e4m3fn), scales), expected)


def _load_weight(device: str) -> float:
    weight = _random(_N, _K, device=device)
    q, scales = torch.empty(_N, _K, dtype=torch.int8, device=device), torch.empty(_N, 1, device=device)
    kind = torch.float8_e4m3fn, 1, _K, True, False
    largest = qao.largest_magnitude(weight)
    loaded = bool(qao.load_weight_(weight, q, scales, *kind, largest.item()))
    refused = not qao.load_weight_(2 * weight, q, scales, *kind, largest.item())
    expected = reference.dequantize_activation(*reference.quantize_activation_fp8(weight, -1))
    distance = _distance(reference.dequantize_8bit(q.view(torch.float8_e4m3fn), scales), expected)
    right = loaded and refused and torch.equal(largest, weight.abs().amax().float().reshape(1))
    return distance if right else math.inf


def _gptq_columns(device: str) -> float:
    weight = _random(_K, _N, device=device)[:100].float()
    ratios = _random(100, 100, device=device).float() * 0.01
    scales, moved = torch.full_like(weight, 0.25), torch.zeros_like(weight)
    codes, errors, rests = qao.gptq_columns(weight, moved, scales, None, ratios, torch.int8)
    expected = weight.double() + ratios.double().triu(1).t() @ (weight - codes * scales).double()
    return max(_distance(codes * scales + rests, expected), _distance(codes * scales + errors, weight.double()))


def _pack_and_unpack(device: str) -> float:
    parts = _int4_parts(device)
    packed = qao.pack_int4(*parts, _GROUP_SIZE)
    back = qao.unpack_int4(*packed, _N, _K, _GROUP_SIZE)
    return 0.0 if all(torch.equal(a, b) for a, b in zip(parts, back, strict=True)) else math.inf


def _dequantize_int4(device: str) -> float:
    parts = _int4_parts(device)
    dense = qao.dequantize_int4(*qao.pack_int4(*parts, _GROUP_SIZE), _N, _K, _GROUP_SIZE, torch.float32)
    return _distance(dense, reference.dequantize(*parts, _GROUP_SIZE))


def _embedding(device: str, scheme: Scheme) -> float:
    packed, ids = scheme.quantize(_random(_N, _K, device=device)), torch.arange(_N - 1, -1, -3, device=device)
    rows = ops.EMBEDDINGS[scheme.weights](ids, *packed[:2], *scheme.sizes(_N, _K), torch.float32)
    return _distance(rows, scheme.dequantize(*packed[:2], _N, _K, torch.float32)[ids])


def _gguf(device: str) -> float:
    """Blocks of Q8_0, the type 8: a float16 scale, then 32 codes."""
    codes = _random(_N, _K // 32, 32, device=device).mul(40).to(torch.int8)
    scales = _random(_N, _K // 32, 1, device=device).half()
    weight = torch.cat((scales.view(torch.uint8), codes.view(torch.uint8)), -1).flatten(1)
    dense, x, ids = (scales.float() * codes).flatten(1), _random(3, _K, device=device), torch.tensor([7, 0, 79])
    rows = qao.gguf_embedding(ids, weight, 8, torch.float32)
    exact = torch.equal(qao.dequantize_gguf(weight, 8, torch.float32), dense) and torch.equal(rows, dense[ids])
    merged = torch.ops.qao._merged_gguf_mm(x, [weight, weight[:17]], [None, None], 8)
    offsets = torch.tensor([0, 3], dtype=torch.int32)  # the second of two experts
    grouped = qao.gguf_grouped_mm(x, torch.stack((weight, weight)), None, offsets, None, None, 8)
    ys, expected = torch.cat([qao.gguf_mm(x, weight, None, 8), *merged, grouped], -1), reference.mm(x, dense)
    return _distance(ys, torch.cat((expected, expected, expected[:, :17], expected), -1)) if exact else math.inf


# Operator name to its error against the reference on a device.
OPERATORS: dict[str, Callable[[str], float]] = {
    **{f"{scheme.word}_mm": _product(scheme()) for scheme in schemes.SCHEMES.values()},
    **{f"_merged_{scheme.word}_mm": _merged_product(scheme()) for scheme in schemes.SCHEMES.values()},
    **{f"{word}_grouped_mm": _grouped_product(scheme()) for word, scheme in schemes.SCHEMES.items()},
    "decode_attention": _decode_attention,
    "_key_range": _token_attention,
    "_token_attention": _token_attention,
    "expert_sort": _expert_rows,
    "expert_sum": _expert_rows,
    "expert_topk": _expert_topk,
    "int8_scaled_mm": _int8_scaled_mm,
    "fp8_scaled_mm": _fp8_scaled_mm,
    "hadamard": _hadamard,
    "int8_quantize": _int8_quantize,
    "fp8_quantize": _fp8_quantize,
    "rms_norm_quantize": _rms_norm_quantize,
    "add_rms_norm_quantize": _add_rms_norm_quantize,
    "silu_mul_quantize": _silu_mul_quantize,
    "add_rms_norm": _add_rms_norm,
    "add_rms_norm_int4_mm": _add_rms_norm_int4_mm,
    "_merged_add_rms_norm_int4_mm": _merged_add_rms_norm_int4_mm,
    "silu_mul": _silu_mul,
    "swiglu": _swiglu,
    "swiglu_quantize": _swiglu,
    "quantize_groups": _quantize_groups,
    "quantize_blocks": _quantize_blocks,
    "quantize_fp4": _quantize_fp4,
    "quantize_weight_": _quantize_weight,
    "load_weight_": _load_weight,
    "largest_magnitude": _load_weight,
    "gptq_columns": _gptq_columns,
    "pack_int4": _pack_and_unpack,
    "unpack_int4": _pack_and_unpack,
    "dequantize_int4": _dequantize_int4,
    "int4_embedding": lambda device: _embedding(device, schemes.Int4WeightOnly()),
    "gguf_mm": _gguf,
    "gguf_grouped_mm": _gguf,
    "_merged_gguf_mm": _gguf,
    "dequantize_gguf": _gguf,
    "gguf_embedding": _gguf,
    "int8_embedding": lambda device: _embedding(device, schemes.Int8WeightOnly()),
}
# Operators without CUDA kernels.
OF_CPU = (
    *("_merged_gguf_mm", "dequantize_gguf", "gguf_embedding", "gguf_grouped_mm", "gguf_mm"),
    *("quantize_blocks", "quantize_fp4"),
)

"""Random problems of every operator, by name: ``OPERATORS``.

``products.py`` has the GEMMs, ``weights.py`` the weight quantizers; here are the quantizers of activations, norms,
gates, routing and rows. References and bounds are those of the operators' own tests.
"""

from __future__ import annotations

import math
import random
from collections.abc import Callable
from functools import partial
from itertools import accumulate
from typing import Any

import accuracy
import qao
import test_attention
import test_expert_rows
import test_expert_topk
import test_gguf_ops
import test_norm_product
import test_norm_silu
import test_quantize_ops
import test_rotation
import test_swiglu
import test_token_attention
import torch
from ops_schemes import INT4, PRODUCTS, Int4Format, generator
from qao import ops
from qao.ops import reference
from qao.schemes import SCHEMES
from test_quantize_ops import FP8
from torch import Tensor, nn

from . import products, weights
from .draw import described, equal, float_dtype, layouts, product_sizes, randn, rows_of, size, values
from .finding import Finding, check

OPS = torch.ops.qao
Fuzzer = Callable[[random.Random, str], int]  # makes a case's problems on a device, and returns their number
_EPS = float(torch.tensor(1e-5))


def _rows(rng: random.Random, device: str, *, finite: bool = False, even: bool = False) -> tuple[Tensor, list[Tensor]]:
    """x [M, K], and views with its values."""
    k = size(rng, 13 if rng.random() < 1 / 16 else 9, 1, 16, 32, 64, 128, 256)
    k += k % 2 if even else 0
    x, bad = values(rng, size(rng, 6, 1, 2, 4, 16), k, float_dtype(rng))
    if finite and bad.any():
        x = x.nan_to_num(0, 1, -1)
    x = x.to(device)
    return x, layouts(rng, x)


def _parts(rng: random.Random, rows: int, count: int) -> list[slice]:
    """Runs of rows, all of them first."""
    begins = [rng.randrange(rows) for _ in range(count)]
    return [slice(0, rows), *(slice(begin, rng.randint(begin, rows)) for begin in begins)]


def _same(results: Any, expected: Any, what: str) -> None:
    for i, (result, wanted) in enumerate(zip(results, expected, strict=True)):
        check(equal(result.cpu(), wanted.cpu()), f"result {i} differs: {what}")


def _bounded(assertion: Callable[[], object], what: str) -> None:
    """A check of the tests with the description of the call."""
    try:
        assertion()
    except AssertionError as error:
        raise Finding(f"{what}: {str(error)[:300] or 'outside the bound of the tests'}") from error


def int8_quantize(rng: random.Random, device: str) -> int:
    x, views = _rows(rng, device)
    symmetric = rng.random() < 0.5
    rotation = rng.choice([0, *(block for block in products.ROTATIONS if x.shape[1] % block == 0)])
    plain = test_rotation.by_stages(x, rotation) if rotation else x
    expected = test_quantize_ops.int8_definition(plain, symmetric)
    parts = _parts(rng, len(x), 30)
    for rows in parts:
        result = OPS.int8_quantize(rng.choice(views)[rows], symmetric, rotation)
        _same(result, [part[rows] for part in expected], described(x=x.dtype, k=x.shape[1], rotation=rotation))
    return len(parts)


def fp8_quantize(rng: random.Random, device: str) -> int:
    x, views = _rows(rng, device)
    group_size = rng.choice((-1, 0, 128))
    what = described(x=x.dtype, shape=list(x.shape), group_size=group_size)
    if group_size == 0:
        if rng.random() < 0.5:
            scale = torch.rand(1, generator=generator(rng.getrandbits(48))).to(device) + 2.0**-10
            finite = x.nan_to_num(0, 1, -1)
            q, _ = reference.quantize_activation_fp8(finite, 0, scale)
            _same(OPS.fp8_quantize(rng.choice(layouts(rng, finite)), scale, 0), (q, scale), what)
        else:
            _same(OPS.fp8_quantize(rng.choice(views), None, 0), test_quantize_ops.fp8_definition(x, 0), what)
        return 1
    expected = test_quantize_ops.fp8_definition(x, group_size)
    parts = _parts(rng, len(x), 30)
    for rows in parts:
        result = OPS.fp8_quantize(rng.choice(views)[rows], None, group_size)
        _same(result, [part[rows] for part in expected], what)
    return len(parts)


def hadamard(rng: random.Random, device: str) -> int:
    block = rng.choice(products.ROTATIONS)
    x, _ = values(rng, size(rng, 5), block * size(rng, 3), float_dtype(rng))
    x = x.to(device)
    expected, views = test_rotation.by_stages(x, block).to(x.dtype), layouts(rng, x)
    parts = _parts(rng, len(x), 30)
    for rows in parts:
        what = described(x=x.dtype, shape=list(x.shape), size=block)
        _same((OPS.hadamard(rng.choice(views)[rows], block),), (expected[rows],), what)
    return len(parts)


def _norm_operands(rng: random.Random, device: str) -> tuple[Tensor, Tensor | None, Tensor | None, str]:
    x, views = _rows(rng, device, finite=True)
    residual = randn(rng, *x.shape, dtype=x.dtype).to(device) if rng.random() < 0.5 else None
    weight = randn(rng, x.shape[1], dtype=float_dtype(rng)).to(device) if rng.random() < 0.5 else None
    what = described(x=x.dtype, shape=list(x.shape), weight=None if weight is None else weight.dtype)
    return rng.choice(views), residual, weight, what + (", residual" if residual is not None else "")


def add_rms_norm(rng: random.Random, device: str) -> int:
    x, residual, weight, what = _norm_operands(rng, device)
    y, h = OPS.add_rms_norm(x, residual, weight, 1e-5)
    check(equal(h, (x if residual is None else x + residual).contiguous()), f"h is not the sum: {what}")
    _bounded(lambda: test_norm_silu.check(y, reference.rms_norm(h, weight, _EPS)), what)
    return 1


def rms_norm_quantize(rng: random.Random, device: str) -> int:
    x, _, weight, what = _norm_operands(rng, device)
    result = OPS.rms_norm_quantize(x, weight, 1e-5, rng.choice((torch.int8, FP8)))
    _bounded(lambda: test_quantize_ops.check_producer(result, reference.rms_norm(x, weight, _EPS)), what)
    return 1


def add_rms_norm_quantize(rng: random.Random, device: str) -> int:
    x, residual, weight, what = _norm_operands(rng, device)
    *result, h = OPS.add_rms_norm_quantize(x, residual, weight, 1e-5, rng.choice((torch.int8, FP8)))
    check(equal(h, (x if residual is None else x + residual).contiguous()), f"h is not the sum: {what}")
    _bounded(lambda: test_quantize_ops.check_producer(tuple(result), reference.rms_norm(h, weight, _EPS)), what)
    return 1


def silu_mul(rng: random.Random, device: str) -> int:
    gate, views = _rows(rng, device, finite=True)
    up = randn(rng, *gate.shape, dtype=gate.dtype).to(device)
    exact, what = reference.silu_mul(gate, up), described(x=gate.dtype, shape=list(gate.shape))
    parts, others = _parts(rng, len(gate), 10), layouts(rng, up)
    for rows in parts:
        y = OPS.silu_mul(rng.choice(views)[rows], rng.choice(others)[rows])
        _bounded(lambda y=y, rows=rows: test_norm_silu.check(y, exact[rows], 89 * 2.0**-126), what)
    return len(parts)


def silu_mul_quantize(rng: random.Random, device: str) -> int:
    gate, views = _rows(rng, device, finite=True)
    up = randn(rng, *gate.shape, dtype=gate.dtype).to(device)
    result = OPS.silu_mul_quantize(rng.choice(views), up, rng.choice((torch.int8, FP8)))
    what = described(x=gate.dtype, shape=list(gate.shape))
    _bounded(lambda: test_quantize_ops.check_producer(result, reference.silu_mul(gate, up)), what)
    return 1


def _gate(rng: random.Random) -> tuple[float, float, float, bool]:
    limit = rng.choice((math.inf, 7.0, rng.uniform(0.1, 10)))
    return rng.choice((1.0, 1.702, rng.uniform(0.1, 3))), limit, rng.choice((0.0, 1.0, -2.0)), rng.random() < 0.5


def swiglu(rng: random.Random, device: str) -> int:
    x, views = _rows(rng, device, finite=True, even=True)
    gate = _gate(rng)
    exact, lost = reference.swiglu(x, *test_swiglu.rounded(gate)), test_swiglu.lost(x, gate)
    what = described(x=x.dtype, shape=list(x.shape), gate=gate)
    parts = _parts(rng, len(x), 10)
    for rows in parts:
        y = OPS.swiglu(rng.choice(views)[rows], *gate)
        _bounded(lambda y=y, rows=rows: test_norm_silu.check(y, exact[rows], lost[rows]), what)
    return len(parts)


def swiglu_quantize(rng: random.Random, device: str) -> int:
    """The same codes as of ``swiglu`` in float32, up to one step where its error crosses a tie."""
    x, views = _rows(rng, device, finite=True, even=True)
    gate, dtype = _gate(rng), rng.choice((torch.int8, FP8))
    q, scales = OPS.swiglu_quantize(rng.choice(views), *gate, dtype)
    exact, lost = reference.swiglu(x, *test_swiglu.rounded(gate)), test_swiglu.lost(x, gate)
    what = described(x=x.dtype, shape=list(x.shape), gate=gate, dtype=dtype)
    highest = 448 if dtype == FP8 else 127
    expected = exact.abs().amax(-1, keepdim=True).clamp(min=2.0**-100) / highest
    slack = lost.amax(-1, keepdim=True) / expected  # in steps
    check(bool(((scales.double() - expected).abs() <= (slack / highest + 2.0**-22) * expected).all()), f"scale: {what}")
    scaled = exact / expected
    half = 0.5 * 2.0 ** (scaled.abs().clamp(min=2.0**-6).log2().floor() - 3) if dtype == FP8 else 0.5
    allowed = half * (1 + 2.0**-20 + slack / highest) + 2 * slack + 2.0**-20 * highest
    check(bool(((q.double() - scaled).abs() <= allowed).all()), f"codes: {what}")
    return 1


def add_rms_norm_int4_mm(rng: random.Random, device: str, several: bool = False) -> int:
    _, n, k = product_sizes(rng)
    n, gated = n + n % 2, rng.random() < 0.5
    if several:  # weights but the last have whole tiles of 16 rows
        n = max(n, 32) if not gated else max(n // 32, 1) * 32
        cut = n // 2 if gated else rng.randrange(16, n, 16)
    formats = [fmt for fmt in INT4.formats if isinstance(fmt, Int4Format)]
    weight = INT4.make_weight(n, k, rng.choice(formats), device, seed=rng.getrandbits(48))
    x = randn(rng, size(rng, 5, 1, 2, 8), k, dtype=float_dtype(rng)).to(device)
    residual = randn(rng, *x.shape, dtype=x.dtype).to(device) if rng.random() < 0.5 else None
    norm = randn(rng, k, dtype=float_dtype(rng)).to(device) if rng.random() < 0.5 else None
    bias = randn(rng, n, dtype=float_dtype(rng)).to(device) if rng.random() < 0.5 else None
    x = rng.choice(layouts(rng, x))
    if several:
        y, h = test_norm_product.call_parts(x, residual, norm, weight, bias, [cut, n - cut], gated)
    else:
        y, h = test_norm_product.call(x, residual, norm, weight, bias, gated)
    check(equal(h, x if residual is None else x + residual), "h is not the sum")
    what = described(x=x.dtype, shape=list(x.shape), n=n, gated=gated)
    _bounded(lambda: test_norm_product.check(y, h, norm, weight, bias, gated), what)
    return 1


def _scaled(word: str, rng: random.Random, device: str) -> int:
    """A product of quantized activations: the float64 product of exactly these."""
    scheme = next(scheme for scheme in PRODUCTS if scheme.word == word)
    m, n, k = product_sizes(rng)
    fmt = rng.choice(scheme.formats)
    weight = scheme.make_weight(n, k, fmt, device, seed=rng.getrandbits(48))
    x = randn(rng, m, k, dtype=float_dtype(rng)).to(device)
    quantized, activation = weight.activation.quantize(x), weight.activation
    bounds = accuracy.tolerance(x, weight.dense, None, activation.seen(x), activation.slack(x, weight.dense))
    expected, allowed = bounds.truth, bounds.elements
    invariant, parts, results = rng.random() < 0.3, _parts(rng, m, 100), []
    views = layouts(rng, quantized[0]) if word == "int8_int8" else [quantized[0]]
    for rows in parts:
        q = rng.choice(views)[rows]
        scales = quantized[1] if activation.format == "fp8" and activation.group_size == 0 else quantized[1][rows]
        if word == "fp8_fp8":
            y = OPS.fp8_scaled_mm(q, scales, *weight.operands, None, x.dtype, False, invariant)
        else:
            (sums,) = weight.arguments
            zeros = None if sums is None else quantized[2][rows]
            y = OPS.int8_scaled_mm(q, scales, zeros, *weight.operands, None, sums, x.dtype, invariant)
        check(y.shape == (rows.stop - rows.start, n), f"y is {list(y.shape)} for {rows}")
        results.append(y)
    wrong = _outside(results, parts, expected, allowed)
    if wrong is not None:
        at, elements = wrong
        raise Finding(f"{elements} are wrong: {fmt} of {at} of {m} rows, N {n}, K {k}, to {x.dtype}")
    return len(parts)


def _outside(results: list[Tensor], parts: list[slice], expected: Tensor, allowed: Tensor) -> tuple[slice, int] | None:
    """The first call with a result outside of the bound, and the number of such elements."""
    rows = rows_of(parts, expected.device)
    wrong = ~((torch.cat(results).double() - expected[rows]).abs() <= allowed[rows])
    if not wrong.any():
        return None
    at = int(wrong.nonzero()[0, 0])
    first = next(part for part, end in zip(parts, accumulate(map(len, results)), strict=True) if at < end)
    return first, int(wrong.sum())


def expert_topk(rng: random.Random, device: str) -> int:
    groups = rng.choice((1, 1, 1, 2, 4, 8))
    experts = groups * size(rng, 7, 1, 2, 8, 16, 64)
    top_groups = rng.randint(1, groups)
    top_k = rng.randint(1, min(experts // groups * top_groups, 16))
    logits = randn(rng, size(rng, 6), experts, dtype=float_dtype(rng)).to(device) * 3
    bias = randn(rng, experts, dtype=float_dtype(rng)).to(device) * 0.1 if rng.random() < 0.5 else None
    rest = (bias, top_k, rng.random() < 0.5, rng.random() < 0.5, rng.choice((1.0, 2.5)), groups, top_groups)
    result = OPS.expert_topk(rng.choice(layouts(rng, logits)), *rest)
    what = described(logits=list(logits.shape), rest=rest[1:])
    _bounded(lambda: test_expert_topk.check(result, logits, *rest), what)
    return 1


def expert_sort(rng: random.Random, device: str) -> int:
    experts, shape = size(rng, 9), (size(rng, 8), rng.randint(1, 9))
    chosen = torch.randint(-1, experts + 2, shape, generator=generator(rng.getrandbits(48)))
    chosen = chosen.to(device, rng.choice((torch.int32, torch.int64)))
    result = OPS.expert_sort(chosen, experts)
    _bounded(lambda: test_expert_rows.check_sort(chosen, experts, *result), described(shape=shape, experts=experts))
    return 1


def expert_sum(rng: random.Random, device: str) -> int:
    tokens, top_k, columns = size(rng, 6), rng.randint(1, 11), size(rng, 9, 1, 8, 16, 32, 64)
    rows = randn(rng, tokens * top_k, columns, dtype=float_dtype(rng)).to(device)
    places = torch.randint(0, tokens * top_k, (tokens, top_k), generator=generator(rng.getrandbits(48)))
    given = randn(rng, tokens, top_k, dtype=float_dtype(rng)).to(device)
    y = OPS.expert_sum(rows, places.int().to(device), given)
    each = rows[places.to(device)].double() * given.double().unsqueeze(2)
    eps = torch.finfo(rows.dtype)
    allowed = eps.eps / 2 * each.sum(1).abs() + (top_k + 1) * 2.0**-24 * each.abs().sum(1) + eps.tiny
    what = described(rows=rows.dtype, shape=list(rows.shape), top_k=top_k, weights=given.dtype)
    check(bool(((y.double() - each.sum(1)).abs() <= allowed).all()), f"wrong sums: {what}")
    return 1


def decode_attention(rng: random.Random, device: str) -> int:
    kv_heads, group, queries = rng.randint(1, 3), rng.randint(1, 5), rng.randint(1, 17)
    keys = rng.choice((1, 127, 128, 129, rng.randint(1, 600)))
    shape = (rng.randint(1, 3), kv_heads * group, kv_heads, queries, keys, rng.randint(1, 130), rng.randint(1, 130))
    dtype = float_dtype(rng)
    if device == "cuda":  # what the kernel takes
        shape = (*shape[:5], *(-(-size // 8) * 8 for size in shape[5:]))
        dtype = rng.choice((torch.bfloat16, torch.float16))
    views = (lambda x: x, lambda x: x.transpose(1, 2).contiguous().transpose(1, 2), lambda x: x.mT.contiguous().mT)
    q, k, v = (rng.choice(views)(tensor) for tensor in test_attention.operands(shape, dtype, device))
    name, mask = rng.choice([*test_attention.masks(shape, dtype, device).items()])
    _bounded(lambda: test_attention.check(q, k, v, mask), described(shape=list(shape), dtype=dtype, mask=name))
    return 1


def token_attention(rng: random.Random, device: str) -> int:
    """With _key_range of the same mask."""
    kv_heads, group, batch = rng.randint(1, 3), rng.randint(1, 8), rng.randint(1, 3)
    keys = rng.choice((1, 127, 128, 129, rng.randint(1, 600)))
    dtype, head = float_dtype(rng), 2 * rng.randint(1, 65)
    if device == "cuda":  # what the kernel takes
        dtype, head = rng.choice((torch.bfloat16, torch.float16)), rng.choice((64, 128))
    mask, rotates = rng.choice(test_token_attention.MASKS), rng.random() < 0.5
    shape = (batch, kv_heads * group, kv_heads, keys, head)
    given = test_token_attention.operands(shape, dtype, device, mask, rotates)
    what = described(shape=list(shape), dtype=dtype, mask=mask, rotates=rotates)
    _bounded(lambda: test_token_attention.check(given), what)
    return 2


def merged(word: str, rng: random.Random, device: str) -> int:
    """Several weights: the bits of separate calls, with any rows of x."""
    scheme, k = SCHEMES[word](), 16 * rng.randint(1, 12)
    layers = [nn.Linear(k, rng.randint(1, 70), bias=rng.random() < 0.5) for _ in range(rng.randint(1, 4))]
    quantized = [qao.QuantLinear.from_linear(layer, scheme) for layer in layers]
    x, _ = values(rng, size(rng, 6, 1, 16, 33), k, float_dtype(rng))
    operator = ops.MERGED[getattr(OPS, f"{word}_mm").default]
    fields = {"weight": "qweight", "scales": "scales", "bias": "bias", "weight_sums": "weight_sums"}
    names = {argument.name for argument in operator._schema.arguments}
    given: dict[str, Any] = {
        name: [getattr(layer, field, None) for layer in quantized] for name, field in fields.items() if name in names
    }
    if "out_features" in names:
        given |= {"out_features": [layer.out_features for layer in quantized], "in_features": k}
        given["group_size"] = scheme.group_size
    parts, views = _parts(rng, len(x), 15), layouts(rng, x)
    with torch.inference_mode():
        for rows in parts:
            part = rng.choice(views)[rows]
            what = described(x=x.dtype, shape=list(part.shape), stride=part.stride())
            _same(operator(part, **given), [layer(part) for layer in quantized], what)
    return len(layers) * len(parts)


def gguf_mm(rng: random.Random, device: str) -> int:
    """With the other operators of the same weight. On a CPU, whatever the device."""
    qtype, n = rng.choice(test_gguf_ops.QTYPES), rng.randint(1, 70)
    blocks = rng.randint(1, 1024 // test_gguf_ops.BLOCKS[qtype][0])
    weight = test_gguf_ops.random_weight(qtype, n, blocks, rng.getrandbits(31))
    dense, dtype = test_gguf_ops.definition(weight, qtype), float_dtype(rng)
    x, _ = values(rng, size(rng, 6, 1, 16, 33), dense.shape[1], dtype)
    x = x.nan_to_num(0, 1, -1)
    what = described(qtype=qtype, shape=[len(x), n, dense.shape[1]], dtype=dtype)
    check(equal(OPS.dequantize_gguf(weight, qtype, dtype), dense.to(dtype)), f"wrong weight: {what}")
    ids = torch.tensor([rng.randrange(n) for _ in range(rng.randint(0, 5))], dtype=torch.int64)
    check(equal(OPS.gguf_embedding(ids, weight, qtype, dtype), dense[ids].to(dtype)), f"wrong rows: {what}")
    y, exact = OPS.gguf_mm(x, weight, None, qtype), x.double() @ dense.double().t()
    merged = OPS._merged_gguf_mm(x, [weight, weight[: n // 2 + 1]], [None, None], qtype)
    check(equal(merged[0], y) and equal(merged[1], y[:, : n // 2 + 1]), f"other bits of several weights: {what}")
    first = rng.randint(0, len(x))  # rows of the first of two experts
    offsets = torch.tensor([first, len(x)], dtype=torch.int32)
    grouped = OPS.gguf_grouped_mm(x, torch.stack((weight, weight.flip(0))), None, offsets, None, None, qtype)
    experts = [OPS.gguf_mm(x[:first], weight, None, qtype), OPS.gguf_mm(x[first:], weight.flip(0), None, qtype)]
    check(equal(grouped, torch.cat(experts)), f"other bits of experts: {what}")
    parts, views = _parts(rng, len(x), 16), layouts(rng, x)
    y = torch.cat([y, *(OPS.gguf_mm(rng.choice(views)[rows], weight, None, qtype) for rows in parts)])
    rows_of_y = rows_of([slice(0, len(x)), *parts], y.device)
    exact, allowed = exact[rows_of_y], test_gguf_ops.bound(x, dense)[rows_of_y]
    right = (y.double() - exact).abs() <= allowed
    check(bool((right | ~y.isfinite() & (exact.abs() > torch.finfo(dtype).max / 2)).all()), f"wrong product: {what}")
    return 6 + len(parts)


OPERATORS: dict[str, Fuzzer] = {
    **dict.fromkeys(("gguf_mm", "_merged_gguf_mm", "gguf_grouped_mm", "dequantize_gguf", "gguf_embedding"), gguf_mm),
    **{f"_merged_{word}_mm": partial(merged, word) for word in SCHEMES},
    **dict.fromkeys(("_token_attention", "_key_range"), token_attention),
    "_merged_add_rms_norm_int4_mm": partial(add_rms_norm_int4_mm, several=True),
    **{f"{scheme.word}_mm": partial(products.dense, scheme) for scheme in PRODUCTS},
    **{f"{scheme.word}_grouped_mm": partial(products.grouped, scheme) for scheme in PRODUCTS},
    **{f"{word}_scaled_mm": partial(_scaled, f"{word}_{word}") for word in ("int8", "fp8")},
    **{
        fuzzer.__name__: fuzzer
        for fuzzer in (
            *(int8_quantize, fp8_quantize, hadamard, add_rms_norm, rms_norm_quantize, add_rms_norm_quantize),
            *(silu_mul, silu_mul_quantize, swiglu, swiglu_quantize, add_rms_norm_int4_mm),
            *(expert_topk, expert_sort, expert_sum, decode_attention),
        )
    },
    **weights.OPERATORS,
}


def draw(rng: random.Random) -> dict[str, Any]:
    """Half of the cases are GEMMs, which run most."""
    names = sorted(OPERATORS)
    chosen = [name for name in names if name.endswith("_mm")] if rng.random() < 0.5 else names
    return {"op": rng.choice(chosen), "seed": rng.getrandbits(48)}


def run(case: dict[str, Any], device: str) -> int:
    """Make the calls of a case. Returns their number."""
    try:
        return OPERATORS[case["op"]](random.Random(case["seed"]), device)
    except Finding as error:
        raise Finding(f"{case['op']}: {error}") from error

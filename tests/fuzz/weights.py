"""Random problems of the operators that quantize, pack, unpack and look up weights."""

from __future__ import annotations

import random
from collections.abc import Callable
from functools import partial

import qao.ops
import torch
from groups_by_torch import groups_by_torch
from ops_schemes import INT4, PRODUCTS, Int4Format, generator
from qao.quant_primitives import fp4, fp8
from qao.quant_primitives.integer import _INT4, _INT8
from torch import Tensor

from .draw import described, equal, float_dtype, layouts, randn, size
from .finding import check

OPS = torch.ops.qao
F8 = torch.float8_e4m3fn
INT8 = next(scheme for scheme in PRODUCTS if scheme.word == "int8")


def _weight(rng: random.Random, columns: int | None = None) -> Tensor:
    """W [N, K], of values far apart, on a grid, or zero in places."""
    n, k = size(rng, 6, 1, 16, 32), columns or size(rng, 9, 1, 31, 32, 64, 128, 256)
    weight, kind = randn(rng, n, k) * 0.02, rng.choice(("normal", "outlier", "rows", "columns", "grid", "zeros"))
    if kind == "outlier":
        weight[rng.randrange(n), rng.randrange(k)] = rng.choice((3.0, -100.0))
    elif kind == "rows":
        weight *= torch.logspace(-12, 4, n)[:, None]
    elif kind == "columns":
        weight *= torch.logspace(-12, 2, k)
    elif kind == "grid":
        codes = torch.randint(0, 16, (n, k), generator=generator(rng.getrandbits(48)))
        weight = (codes - rng.choice((8, 7.4, 0))) * (torch.rand(n, 1, generator=generator(rng.getrandbits(48))) + 0.1)
    elif kind == "zeros":
        weight[rng.randrange(n)] = 0
    return weight.to(float_dtype(rng))


def _view(rng: random.Random, weight: Tensor, device: str) -> Tensor:
    return rng.choice(layouts(rng, weight.to(device)))


def _same(results: tuple[Tensor, ...], expected: tuple[Tensor, ...], count: int, what: str) -> None:
    for i in range(count):
        check(equal(results[i].cpu().contiguous(), expected[i].contiguous()), f"result {i} differs: {what}")


def quantize_groups(rng: random.Random, device: str) -> int:
    """Round to nearest has the bits of torch; a search is no worse than it, and its sums are those of its result."""
    weight = _weight(rng)
    group_size, scale_dtype = rng.choice((32, 64, 128, 256, -1)), float_dtype(rng)
    codes, symmetric = rng.choice(((_INT4, True), (_INT4, False), (_INT8, True)))
    what = described(w=weight.dtype, shape=list(weight.shape), group_size=group_size, symmetric=symmetric)
    what += f", codes {codes.dtype}, scales {scale_dtype}"
    plain = OPS.quantize_groups(
        _view(rng, weight, device), None, group_size, codes.dtype, symmetric, scale_dtype, [1.0]
    )
    expected = groups_by_torch(weight, group_size, codes, symmetric, scale_dtype, (1.0,), None)
    _same(plain, expected, 3, what)
    factors = [1.0, *(rng.uniform(0.6, 1.0) for _ in range(rng.randint(1, 7)))]
    searched = OPS.quantize_groups(
        _view(rng, weight, device), None, group_size, codes.dtype, symmetric, scale_dtype, factors
    )
    error = _squares(weight, searched, group_size)
    bound = _squares(weight, plain, group_size) * (1 + 1e-5) + 2.0**-46 * weight.double().square().sum()
    check(bool(error <= bound), f"the search is worse than round to nearest: {what}")
    # Each difference has a rounding or two of 2^-24 of its value; sums are float64, their terms float32.
    difference, norm = (error - searched[3][0].cpu()).abs(), weight.double().square().sum()
    check(bool(difference <= 2.0**-22 * ((error * norm).sqrt() + error) + 2.0**-44 * norm), f"sum of squares: {what}")
    return 2


def _squares(weight: Tensor, result: tuple[Tensor, ...], group_size: int) -> Tensor:
    q, scales, zeros = (part.cpu() for part in result[:3])
    size = weight.shape[1] if group_size == -1 else group_size
    columns = torch.arange(weight.shape[1]) // size
    dense = (q.double() - zeros.double()[:, columns]) * scales.double()[:, columns]
    return (weight.double() - dense).square().sum()


def quantize_blocks(rng: random.Random, device: str) -> int:
    weight, granularity = _weight(rng), rng.choice(("row", "tensor", "block"))
    result = fp8._blocks_on_cpu(rng.choice(layouts(rng, weight)), granularity)
    what = described(w=weight.dtype, shape=list(weight.shape), granularity=granularity)
    _same(result, fp8._blocks_by_torch(weight, granularity), 2, what)
    return 1


def quantize_fp4(rng: random.Random, device: str) -> int:
    weight, group_size = _weight(rng), rng.choice((16, 32))
    result = OPS.quantize_fp4(rng.choice(layouts(rng, weight)), group_size)
    what = described(w=weight.dtype, shape=list(weight.shape), group_size=group_size)
    _same(result, fp4._by_torch(weight, group_size), 3, what)
    return 1


def _operands(rng: random.Random, weight: Tensor, device: str) -> tuple[tuple[object, ...], tuple[Tensor, Tensor], str]:
    """A format's arguments of quantize_weight_ after the weight, and what it must write, by the other operators."""
    n, k = weight.shape
    kind = rng.choice(("int4", "fp4", "int8", "fp8"))
    source, symmetric, whole = weight.to(device), True, False
    if kind == "int4":
        group, symmetric, whole = rng.choice((32, 64, 128, 256, k)), rng.random() < 0.5, rng.random() < 0.5
        whole = whole and not symmetric
        scale_dtype = float_dtype(rng)
        made = OPS.quantize_groups(source, None, group, torch.uint8, symmetric, scale_dtype, [1.0], whole)
        written = OPS.pack_int4(*(part.contiguous() for part in made[:2]), None if symmetric else made[2], group)
        block: tuple[object, ...] = torch.uint8, 1, group
    elif kind == "fp4":
        group = rng.choice((16, 32))
        codes, scales, divisor, _ = (part.to(device) for part in OPS.quantize_fp4(weight, group))
        written = qao.ops.pack_fp4(codes, scales.float(), None if group == 32 else divisor, group)
        block = torch.float4_e2m1fn_x2, 1, group
    elif kind == "int8":
        made = OPS.quantize_groups(source, None, -1, torch.int8, True, torch.float32, [1.0])
        written, block = (made[0], made[1].reshape(n).contiguous()), (torch.int8, 1, k)
    else:
        block = F8, *rng.choice(((1, k), (n, k), (128, 128)))
        q, scales, _ = OPS.quantize_blocks(weight, *block[1:])
        written = q.view(torch.int8).to(device), scales.to(device)
    return (*block, symmetric, whole), written, f"{kind} {block[1:]}, symmetric {symmetric}, whole {whole}"


def _in_place(loads: bool, rng: random.Random, device: str) -> int:
    """quantize_weight_ or load_weight_ writes what the quantizers give."""
    weight = _weight(rng)
    arguments, written, what = _operands(rng, weight, device)
    q, scales = (torch.zeros_like(part) for part in written)
    what += f", W {weight.dtype}{list(weight.shape)}"
    view = _view(rng, weight, device)
    if loads:
        loaded = OPS.load_weight_(view, q, scales, *arguments, 1e30)
        check(loaded.item() == 1, f"not loaded: {what}")
    else:
        fault = torch.zeros(1, dtype=torch.int32, device=device)
        OPS.quantize_weight_(view, q, scales, fault, None, *arguments)
        check(fault.item() == 0, f"a fault: {what}")
    _same((q, scales), tuple(part.cpu() for part in written), 2, what)
    return 1


def largest_magnitude(rng: random.Random, device: str) -> int:
    weight = _weight(rng)
    result = OPS.largest_magnitude(_view(rng, weight, device))
    expected = weight.float().abs().amax().reshape(1)
    check(equal(result.cpu(), expected), f"{result.item()} for {expected.item()}: {weight.dtype}{list(weight.shape)}")
    return 1


def gptq_columns(rng: random.Random, device: str) -> int:
    """Codes are nearest to the compensated values, which follow from the results."""
    columns, n = rng.randint(1, 128), size(rng, 6)
    dtype = rng.choice((torch.uint8, torch.int8, F8))
    g = generator(rng.getrandbits(48))
    weight, moved = (torch.randn(columns, n, generator=g) for _ in range(2))
    scales = torch.rand(columns, n, generator=g) + 0.1
    zeros = torch.rand(columns, n, generator=g) * 15 if dtype == torch.uint8 else None
    ratios = torch.randn(columns, columns, generator=g) * 0.1
    given = [None if t is None else t.to(device) for t in (weight, moved, scales, zeros, ratios)]
    codes, errors, rests = (t.cpu() for t in OPS.gptq_columns(*given, dtype))
    shift = 0 if zeros is None else zeros.double()
    stood = (codes.double() - shift) * scales.double()
    exact_moved = moved.double() + ratios.double().triu(1).t() @ (weight.double() - stood)
    value = weight.double() + exact_moved
    bound = 1e-5 * (1 + value.abs().max() + (weight.double() - stood).abs().max())
    what = described(columns=columns, n=n, dtype=dtype)
    check(bool((errors - (weight - stood)).abs().max() < bound), f"errors: {what}")
    check(bool((rests - (value - stood)).abs().max() < bound), f"rests: {what}")
    lowest, highest = {torch.uint8: (0, 15), torch.int8: (-127, 127), F8: (-448, 448)}[dtype]
    exact = (value / scales + shift).clamp(lowest, highest)
    step = (exact.abs() * 2**-4).clamp(min=2**-10) if dtype == F8 else 0.5
    near = 1e-4 * exact.abs() + bound / scales
    check(bool(((codes.double() - exact).abs() <= step * (1 + 1e-4) + near).all()), f"codes: {what}")
    return 1


def _packed(rng: random.Random, device: str) -> tuple[Int4Format, object, tuple[Tensor, Tensor], int, int]:
    fmt = rng.choice([fmt for fmt in INT4.formats if isinstance(fmt, Int4Format)])
    n, k = size(rng, 6, 1, 16, 32), size(rng, 9, 1, 31, 64, 128, 256)
    parts = INT4.parts(n, k, fmt, device, rng.getrandbits(48))
    return fmt, parts, OPS.pack_int4(parts.q, parts.scales, parts.zeros, parts.group_size), n, k


def int4_packing(rng: random.Random, device: str) -> int:
    """pack_int4, unpack_int4 and dequantize_int4 are inverse, and exact up to one rounding."""
    fmt, parts, packed, n, k = _packed(rng, device)
    what = f"{fmt} {n} x {k}"
    q, scales, zeros = OPS.unpack_int4(*packed, n, k, fmt.group_size)
    plain = torch.full_like(scales, 8) if parts.zeros is None else parts.zeros
    _same((q, scales, zeros), tuple(part.cpu() for part in (parts.q, parts.scales, plain)), 3, what)
    dtype = float_dtype(rng)
    dense = OPS.dequantize_int4(*packed, n, k, fmt.group_size, dtype)
    size = k if fmt.group_size == -1 else fmt.group_size
    columns = torch.arange(k, device=device) // size
    exact = (q.float() - plain.float()[:, columns]) * scales.float()[:, columns]
    check(equal(dense, exact.to(dtype)), f"dequantized to {dtype}: {what}")
    return 3


def int4_embedding(rng: random.Random, device: str) -> int:
    fmt, _, packed, n, k = _packed(rng, device)
    dtype = float_dtype(rng)
    dense = OPS.dequantize_int4(*packed, n, k, fmt.group_size, dtype)
    for _ in range(8):
        ids = _ids(rng, n, device)
        rows = OPS.int4_embedding(ids, *packed, n, k, fmt.group_size, dtype)
        check(equal(rows, dense[ids.long()]), f"{fmt} {n} x {k} to {dtype}, ids {list(ids.shape)}")
    return 8


def int8_embedding(rng: random.Random, device: str) -> int:
    n, k, dtype = size(rng, 6), size(rng, 9), float_dtype(rng)
    q, scales = INT8.make_weight(n, k, rng.choice(INT8.formats), device, seed=rng.getrandbits(48)).operands
    dense = (q.float() * scales.reshape(-1, 1)).to(dtype)
    for _ in range(8):
        ids = _ids(rng, n, device)
        rows = OPS.int8_embedding(ids, q, scales, dtype)
        check(equal(rows, dense[ids.long()]), f"{n} x {k} to {dtype}, ids {list(ids.shape)}")
    return 8


def _ids(rng: random.Random, n: int, device: str) -> Tensor:
    shape = [rng.randint(0, 5) for _ in range(rng.randint(0, 3))]
    ids = torch.randint(0, n, shape, generator=generator(rng.getrandbits(48)))
    ids = ids.to(device, rng.choice((torch.int32, torch.int64)))
    return ids.transpose(0, -1) if ids.dim() > 1 and rng.random() < 0.5 else ids


OPERATORS: dict[str, Callable[..., int]] = {
    **{name: int4_packing for name in ("pack_int4", "unpack_int4", "dequantize_int4")},
    **{name: partial(_in_place, name == "load_weight_") for name in ("quantize_weight_", "load_weight_")},
    **{
        fuzzer.__name__: fuzzer
        for fuzzer in (
            *(quantize_groups, quantize_blocks, quantize_fp4, largest_magnitude, gptq_columns),
            *(int4_embedding, int8_embedding),
        )
    },
}

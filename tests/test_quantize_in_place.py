"""quantize_weight_: bit for bit equal to the quantizers of plain tensors and pack_int4."""

from __future__ import annotations

import itertools
from typing import Any

import pytest
import qao
import torch
from ops_schemes import DTYPES
from qao import ops
from qao.ops import weight_ops
from qao.ops.fp4 import codes_of, values_of
from torch import Tensor

OPS = torch.ops.qao
F8 = torch.float8_e4m3fn
SHAPES = [(1, 1), (16, 128), (5, 77), (37, 300), (48, 512), (130, 1056), (3, 20000)]


def random_weight(n: int, k: int, dtype: torch.dtype = torch.float32) -> Tensor:
    """With rows of zeros, of one sign, of sixteen steps and of every magnitude, zeros of either sign and an outlier."""
    generator = torch.Generator().manual_seed(n * k)
    weight = torch.randn(n, k, generator=generator) * 0.02
    weight[n // 3] = 0
    weight[n // 2, k // 2] = 3
    weight[n // 4] = weight[n // 4].abs() + 0.01
    weight[n // 5] = (torch.randint(0, 16, (k,), generator=generator) - 7.4) * 0.25
    weight[n - 1] *= torch.logspace(-12, 2, k)
    weight[:, k // 3] *= -0.0
    return weight.to(dtype)


def int4(weight: Tensor, group: int, symmetric: bool, whole: bool, scale_dtype: torch.dtype) -> tuple[Tensor, Tensor]:
    q, scales, zeros, _ = weight_ops.quantize_groups(
        weight, None, group, torch.uint8, symmetric, scale_dtype, [1.0], whole_zeros=whole
    )
    return weight_ops.pack_int4(q, scales, None if symmetric else zeros, group)


def in_place(weight: Tensor, like: tuple[Tensor, ...], *one_pass: Any) -> tuple[Tensor, Tensor, Tensor]:
    """q, scales and fault, from tensors that held other numbers."""
    q, scales = (torch.full_like(one.view(torch.int8) if one.dtype == F8 else one, 77) for one in like)
    fault = torch.zeros(1, dtype=torch.int32)
    out = tuple(one.to(weight.device) for one in (q, scales, fault))
    weight_ops.quantize_weight_(weight, *out, None, *one_pass)
    return out


def same(got: tuple[Tensor, ...], expected: tuple[Tensor, ...]) -> bool:
    pairs = zip(got, expected, strict=True)
    return all(torch.equal(a.cpu().view(torch.uint8), b.view(torch.uint8)) for a, b in pairs)


@pytest.mark.parametrize("n, k", SHAPES)
@pytest.mark.parametrize("group", [32, 64, 128, 256, -1])
def test_int4(n: int, k: int, group: int, device: str) -> None:
    kinds = [(True, False), (False, False), (False, True)]
    for dtype, scale_dtype, (symmetric, whole) in itertools.product(DTYPES, DTYPES, kinds):
        weight = random_weight(n, k, dtype)
        expected = int4(weight, group, symmetric, whole, scale_dtype)
        *got, fault = in_place(weight.to(device), expected, torch.uint8, 1, group, symmetric, whole)
        assert same(tuple(got), expected), (dtype, scale_dtype, symmetric, whole)
        assert not fault.item()


@pytest.mark.parametrize("n, k", SHAPES)
@pytest.mark.parametrize("dtype", DTYPES, ids=str)
def test_bytes(n: int, k: int, dtype: torch.dtype, device: str) -> None:
    weight = random_weight(n, k, dtype)
    q, scales, _, _ = weight_ops.quantize_groups(weight, None, k, torch.int8, True, torch.float32, [1.0])
    expected = q, scales.flatten()
    *got, fault = in_place(weight.to(device), expected, torch.int8, 1, k, True, False)
    assert same(tuple(got), expected) and not fault.item()
    for rows, columns in ((1, k), (n, k), (128, 128)):
        expected = weight_ops.quantize_blocks(weight, rows, columns)[:2]
        *got, fault = in_place(weight.to(device), expected, F8, rows, columns, True, False)
        assert same(tuple(got), expected) and not fault.item(), (rows, columns)


@pytest.mark.parametrize("dtype, exponents", [(torch.bfloat16, range(-2, 4)), (torch.float16, range(-1, 4))], ids=str)
def test_every_quotient(dtype: torch.dtype, exponents: range, device: str) -> None:
    """Codes of every value of 16 bits by scales of every mantissa, halfway between two steps and next to that."""
    bits = {torch.bfloat16: 7, torch.float16: 10}[dtype]
    mantissas = 1 + torch.arange(2**bits) / 2**bits
    scales = mantissas[:: 1 if dtype == torch.bfloat16 else 31]
    values = torch.cat([mantissas * 2.0**e for e in exponents])
    values = torch.nn.functional.pad(values[values < 8], (0, -(values < 8).sum().item() % 31)).view(-1, 31)
    # Each group of 32 ends with its largest magnitude, 8; the scale is an eighth of that.
    whole = torch.nn.functional.pad(values, (0, 1), value=-8).flatten()
    weight = (scales[:, None].to(dtype) * 2**-4).float() * (whole / mantissas[1])
    weight = torch.cat([(whole * 2**-4).expand(len(scales), -1), weight]).to(dtype)
    weight[:, 31::32] = torch.cat([scales, scales])[:, None].to(dtype) * -0.5  # in any case exact
    for scale_dtype in (dtype, torch.float32):
        expected = int4(weight, 32, True, False, scale_dtype)
        assert same(in_place(weight.to(device), expected, torch.uint8, 1, 32, True, False)[:2], expected), scale_dtype
        expected = int4(-weight, 32, False, False, scale_dtype)
        assert same(in_place(-weight.to(device), expected, torch.uint8, 1, 32, False, False)[:2], expected)


@pytest.mark.parametrize("scale", [2.0**-130, 2.0**-120, 2.0**-90, 2.0**60])
@pytest.mark.parametrize("group", [32, 128, 256])
def test_scales_of_every_size(scale: float, group: int, device: str) -> None:
    """Also with subnormal remainders of quotients, and next to groups of ordinary size."""
    for dtype in (torch.float32, torch.bfloat16):
        weight = random_weight(37, 512, torch.float32)
        weight[::3] *= scale / 0.02
        weight[5, :32] = 0
        weight = weight.to(dtype)
        for symmetric in (True, False):
            expected = int4(weight, group, symmetric, False, dtype)
            got = in_place(weight.to(device), expected, torch.uint8, 1, group, symmetric, False)[:2]
            assert same(got, expected), (dtype, symmetric)


def fp4_in_place(weight: Tensor, size: int, device: str) -> None:
    q, scales, divisor, _ = OPS.quantize_fp4(weight, size)
    expected = ops.pack_fp4(q, scales, divisor if size == 16 else None, size)
    *got, fault = in_place(weight.to(device), expected, torch.float4_e2m1fn_x2, 1, size, True, False)
    assert same(tuple(got), expected) and not fault.item()


@pytest.mark.parametrize("n, k", SHAPES)
@pytest.mark.parametrize("size", [32, 16])
@pytest.mark.parametrize("dtype", DTYPES, ids=str)
def test_fp4(n: int, k: int, size: int, dtype: torch.dtype, device: str) -> None:
    """Of weights small, large, zero of either sign, on a grid of sixteen steps, and of rows far apart."""
    made = random_weight(n, k)
    grid = torch.randint(-8, 9, (n, k), generator=torch.Generator().manual_seed(n)) / 4
    for weight in (
        *(made * scale for scale in (1, 1e-38, 1e-42, 1e18)),
        *(grid, -torch.zeros(n, k), made * torch.logspace(-30, 0, n)[:, None]),
    ):
        if weight.to(dtype).isfinite().all():
            fp4_in_place(weight.to(dtype), size, device)


def even_errors() -> Tensor:
    """MXFP4 groups with errors under both scales that differ only by rounding, so that the order of sums matters."""
    groups = torch.rand(60000, 32, dtype=torch.float64, generator=torch.Generator().manual_seed(1)) * 7
    groups[:, 0], groups[:, 31] = 7.2, 0
    first, second = ((values_of(codes_of((groups / step).float())) * step - groups) for step in (1, 2))
    more = (first.square() - second.square()).sum(1)
    groups[:, 31] = 0.25 + more  # its errors are 0.5 less that, and that
    return groups[(more > 0) & (more < 0.25)].float()


def halves(largest: float) -> Tensor:
    """Groups of NVFP4 with every scale, of values halfway between two codes but for roundings."""
    one = torch.tensor([6, 0.25, 0.75, 1.25, 1.75, 2.5, 3.5, 5])
    divisor = torch.tensor([largest]).reciprocal() * 2688
    scales = torch.arange(1, 127, dtype=torch.uint8).view(F8).float()
    weight = (scales / divisor)[:, None] * torch.cat([one, -one])
    weight[-1] = largest
    return weight.clamp(-largest, largest)


def test_fp4_where_roundings_tell(device: str) -> None:
    weight = even_errors()
    assert len(weight) > 1000
    fp4_in_place(weight, 32, device)
    for i in range(40):
        fp4_in_place(halves(0.3 + i / 37), 16, device)


def test_what_is_refused(device: str) -> None:
    """Nothing is written if fault is set beforehand or by load_weight_; other weights are loaded."""
    weight = random_weight(40, 300, torch.bfloat16).to(device)
    largest = weight_ops.largest_magnitude(weight)
    assert largest.item() == weight.abs().amax().item() and largest.shape == (1,) and largest.dtype == torch.float32
    kinds: list[tuple[Any, ...]] = [
        *((torch.uint8, 1, group, False, False) for group in (32, 128, 256, 300)),
        *((torch.float4_e2m1fn_x2, 1, size, True, False) for size in (32, 16)),
        (torch.int8, 1, 300, True, False),
        *((F8, *block, True, False) for block in ((1, 300), (40, 300), (128, 128))),
    ]
    schemes = [
        *(qao.Int4WeightOnly(group_size=group, clip_search=False) for group in (32, 128, 256, -1)),
        *(qao.Fp4WeightOnly(format) for format in ("mxfp4", "nvfp4")),
        qao.Int8WeightOnly(clip_search=False),
        *(qao.Float8WeightOnly(granularity) for granularity in ("row", "tensor", "block")),
    ]
    for kind, scheme in zip(kinds, schemes, strict=True):
        packed = scheme.quantize(weight)
        q, scales = torch.full_like(packed.qweight, 77), torch.full_like(packed.scales, 77)
        fault = torch.ones(1, dtype=torch.int32, device=device)
        before = q.clone(), scales.clone()
        weight_ops.quantize_weight_(weight, q, scales, fault, None, *kind)
        assert same((q, scales), tuple(one.cpu() for one in before)), kind
        for spoilt in (weight * 1.01, weight.clone().fill_(float("nan")), weight.clone().fill_(-float("inf"))):
            assert not weight_ops.load_weight_(spoilt, q, scales, *kind, largest.item())
            assert same((q, scales), tuple(one.cpu() for one in before)), kind
        assert weight_ops.load_weight_(weight, q, scales, *kind, largest.item())
        assert same((q, scales), (packed.qweight.cpu(), packed.scales.cpu())), kind
        fault.zero_(), q.fill_(77)
        weight_ops.quantize_weight_(weight, q, scales, fault, largest, *kind)
        assert same((q, scales), (packed.qweight.cpu(), packed.scales.cpu())) and not fault.item(), kind


def test_loading_is_no_part_of_a_graph() -> None:
    if not torch.cuda.is_available():
        pytest.skip("needs a GPU")
    weight = random_weight(40, 256).cuda()
    q, scales = (one.cuda() for one in int4(weight.cpu(), 32, False, False, torch.float32))
    with pytest.raises(RuntimeError, match=r"load_weight_: it waits for the GPU.*quantize_weight_"):
        with torch.cuda.graph(torch.cuda.CUDAGraph()):
            weight_ops.load_weight_(weight, q, scales, torch.uint8, 1, 32, False, False, 1e30)
    fault, graph = torch.zeros(1, dtype=torch.int32, device="cuda"), torch.cuda.CUDAGraph()
    with torch.cuda.graph(graph):
        weight_ops.quantize_weight_(weight, q, scales, fault, None, torch.uint8, 1, 32, False, False)
    other = random_weight(40, 256) * 3
    weight.copy_(other)
    graph.replay()
    assert same((q, scales), int4(other, 32, False, False, torch.float32))


def test_rows_apart(device: str) -> None:
    """Rows that do not lie one after the other, at addresses of no alignment, and columns that do."""
    whole = random_weight(64, 300, torch.bfloat16)
    for part in (whole[:, 3:131], whole[::2, 8:264], whole.t()):
        weight = part.to(device) if part is not whole.t() else whole.to(device).t()
        n, k = weight.shape
        expected = int4(part.contiguous(), 32, False, False, torch.bfloat16)
        assert same(in_place(weight, expected, torch.uint8, 1, 32, False, False)[:2], expected)
        expected = weight_ops.quantize_blocks(part.contiguous(), 1, k)[:2]
        assert same(in_place(weight, expected, F8, 1, k, True, False)[:2], expected)


@pytest.mark.parametrize("value", [float("nan"), float("inf"), -float("inf"), 3e38])
def test_faults(value: float, device: str) -> None:
    """NaN and infinities always, 3e38 where no scale of the dtype holds it."""
    weight = random_weight(40, 256)
    weight[23, 200] = value
    fails = value != 3e38
    plain = weight.nan_to_num(0)
    for group in (64, 256):
        for symmetric, scale_dtype in itertools.product((True, False), (torch.float32, torch.float16)):
            like = int4(plain, group, symmetric, False, scale_dtype)
            fault = in_place(weight.to(device), like, torch.uint8, 1, group, symmetric, False)[2]
            assert fault.item() or not (fails or scale_dtype == torch.float16)
    for rows, columns in ((1, 256), (40, 256), (128, 128)):
        like = weight_ops.quantize_blocks(plain, rows, columns)[:2]
        assert in_place(weight.to(device), like, F8, rows, columns, True, False)[2].item() or not fails
    assert in_place(weight.to(device), (plain.to(torch.int8), plain[:, 0]), torch.int8, 1, 256, True, False)[
        2
    ].item() or (not fails)


def test_opcheck(device: str) -> None:
    weight = random_weight(20, 96).to(device)
    q, scales = (one.to(device) for one in int4(weight.cpu(), 32, False, False, torch.bfloat16))
    fault = torch.zeros(1, dtype=torch.int32, device=device)
    arguments = (weight, q, scales, fault, None, torch.uint8, 1, 32, False, False)
    utilities = ("test_schema", "test_faketensor", "test_aot_dispatch_dynamic")
    torch.library.opcheck(OPS.quantize_weight_.default, arguments, test_utils=utilities)


@pytest.mark.parametrize(
    "changes, words",
    [
        ({"dtype": torch.int16}, "dtype must be uint8"),
        ({"columns": 48}, "group_size must be 32"),
        ({"rows": 2}, "rows must be 1"),
        ({"symmetric": True}, "zero points unless symmetric"),
        ({"q": torch.zeros(2, 2, 512, dtype=torch.uint8)}, "packed int4 in an int8 tensor"),
        ({"fault": torch.zeros(1)}, "fault must be int32"),
        ({"weight": torch.zeros(0, 96)}, "weight must have shape"),
        ({"dtype": torch.int8}, "a scale a row"),
        ({"dtype": F8, "columns": 96}, "symmetric"),
        ({"dtype": F8, "columns": 96, "symmetric": True}, r"scales must have shape"),
        ({"dtype": torch.float4_e2m1fn_x2}, "four-bit floats are symmetric"),
        ({"dtype": torch.float4_e2m1fn_x2, "symmetric": True}, "scales must have shape .* groups of 16"),
        ({"largest": torch.ones(2)}, r"largest must be float32 \[1\]"),
    ],
)
def test_errors(changes: dict[str, Any], words: str) -> None:
    q, scales = int4(random_weight(20, 96), 32, False, False, torch.bfloat16)
    fault = torch.zeros(1, dtype=torch.int32)
    given = {
        **dict(weight=random_weight(20, 96), dtype=torch.uint8, rows=1, columns=32, symmetric=False),
        **dict(whole_zeros=False, q=q, scales=scales, fault=fault, largest=None),
        **changes,
    }
    with pytest.raises(RuntimeError, match=f"quantize_weight_: .*{words}"):
        weight_ops.quantize_weight_(**given)

"""pack_int4, unpack_int4, dequantize_int4 against the layout in cuda/layout/int4.h."""

from __future__ import annotations

import pytest
import torch
from ops_schemes import DTYPES, INT4, Int4Format, Parts
from ops_support import bits
from torch import Tensor

SHAPES = [(1, 1), (1, 64), (15, 31), (16, 64), (17, 65), (33, 100), (100, 896), (1000, 33), (48, 4128)]
FORMATS = [
    Int4Format(group_size, zeros) for group_size in (32, 64, 128, 256, -1) for zeros in ("none", "integer", "float")
]


def draw_layout(q: Tensor) -> Tensor:
    """The picture of layout.h, byte by byte: q [N, K] uint8 -> int8 [ceil(N/16), ceil(K/64), 512]."""
    n, k = q.shape
    tiles_n, tiles_k = -(-n // 16), -(-k // 64)
    padded = torch.full((tiles_n * 16, tiles_k * 64), 8, dtype=torch.uint8)
    padded[:n, :k] = q.cpu()
    tiles = padded.view(tiles_n, 16, tiles_k, 64).transpose(1, 2)
    packed = torch.empty(tiles_n, tiles_k, 512, dtype=torch.uint8)
    for lane in range(32):
        g, t = divmod(lane, 4)
        for step in range(4):
            for byte, column in enumerate((2 * t, 2 * t + 8, 2 * t + 1, 2 * t + 9)):
                low, high = tiles[:, :, g, 16 * step + column], tiles[:, :, g + 8, 16 * step + column]
                packed[:, :, 16 * lane + 4 * step + byte] = low | high << 4
    return packed.view(torch.int8).to(q.device)


def draw_scales(parts: Parts) -> Tensor:
    """[ceil(N/16), G, 1 or 2, 16]: scales 0 and zero points 8 past N."""
    n, groups = parts.scales.shape
    planes = [(parts.scales, 0.0)] + ([] if parts.zeros is None else [(parts.zeros, 8.0)])
    packed = parts.scales.new_empty(-(-n // 16), groups, len(planes), 16)
    for plane, (values, padding) in enumerate(planes):
        padded = values.new_full((packed.shape[0] * 16, groups), padding)
        padded[:n] = values
        packed[:, :, plane] = padded.view(-1, 16, groups).transpose(1, 2)
    return packed


@pytest.mark.parametrize("fmt", FORMATS, ids=str)
@pytest.mark.parametrize("n,k", SHAPES)
def test_pack_follows_the_picture(n: int, k: int, fmt: Int4Format, device: str) -> None:
    parts = INT4.parts(n, k, fmt, device)
    weight, scales = torch.ops.qao.pack_int4(parts.q, parts.scales, parts.zeros, fmt.group_size)
    expected = draw_layout(parts.q)
    assert weight.dtype == torch.int8
    assert torch.equal(weight, expected)
    assert scales.dtype == parts.scales.dtype
    assert torch.equal(scales, draw_scales(parts))
    assert weight.is_contiguous() and scales.is_contiguous()


@pytest.mark.parametrize("scale_dtype", DTYPES, ids=str)
@pytest.mark.parametrize("fmt", FORMATS, ids=str)
@pytest.mark.parametrize("n,k", SHAPES)
def test_round_trip(n: int, k: int, fmt: Int4Format, scale_dtype: torch.dtype, device: str) -> None:
    parts = INT4.parts(n, k, Int4Format(fmt.group_size, fmt.zeros, scale_dtype), device)
    weight, scales = torch.ops.qao.pack_int4(parts.q, parts.scales, parts.zeros, fmt.group_size)
    q, plain_scales, zeros = torch.ops.qao.unpack_int4(weight, scales, n, k, fmt.group_size)
    assert q.dtype == torch.uint8 and torch.equal(q, parts.q)
    assert torch.equal(bits(plain_scales), bits(parts.scales))
    assert torch.equal(bits(zeros), bits(torch.full_like(parts.scales, 8) if parts.zeros is None else parts.zeros))


@pytest.mark.parametrize("scale_dtype", DTYPES, ids=str)
@pytest.mark.parametrize("fmt", FORMATS, ids=str)
@pytest.mark.parametrize("n,k", SHAPES)
def test_dequantize(n: int, k: int, fmt: Int4Format, scale_dtype: torch.dtype, device: str) -> None:
    """(q - zero) * scale in float32, rounded once: the same bits as torch computes."""
    parts = INT4.parts(n, k, Int4Format(fmt.group_size, fmt.zeros, scale_dtype), device)
    weight = INT4.pack(parts)
    group_of = torch.arange(k, device=device) // (k if fmt.group_size == -1 else fmt.group_size)
    zeros = torch.full_like(parts.scales, 8) if parts.zeros is None else parts.zeros
    expected = (parts.q.float() - zeros.float()[:, group_of]) * parts.scales.float()[:, group_of]
    for dtype in DTYPES:
        out = torch.ops.qao.dequantize_int4(*weight.operands, *weight.arguments, dtype)
        assert out.is_contiguous()
        assert out.dtype == dtype
        assert torch.equal(out, expected.to(dtype))


def test_every_nibble_in_every_place(device: str) -> None:
    """Tile i has another value at its element i only: one byte of it changes, in the nibble of that element's row."""
    elements = torch.arange(16 * 64, device=device)
    tiles = torch.full((16 * 64, 16, 64), 8, dtype=torch.uint8, device=device)
    tiles.view(16 * 64, -1)[elements, elements] = (elements % 8).to(torch.uint8)  # never 8
    q = tiles.transpose(0, 1).reshape(16, -1)
    weight, _ = torch.ops.qao.pack_int4(q, torch.ones(16, 1, device=device), None, -1)
    tile, byte = (weight[0].view(torch.uint8) != 0x88).nonzero().T
    assert torch.equal(tile, elements)
    high = elements // 64 >= 8
    expected = torch.where(high, elements % 8 << 4 | 8, 8 << 4 | elements % 8)
    assert torch.equal(weight[0].view(torch.uint8)[tile, byte].long(), expected)
    assert len(set(zip(byte.tolist(), high.tolist(), strict=True))) == elements.numel()


@pytest.mark.parametrize("n,k", SHAPES)
def test_bytes_per_weight(n: int, k: int) -> None:
    """Half a byte a weight, and no padding beyond whole tiles of 16 x 64."""
    weight, scales = INT4.make_weight(n, k, Int4Format(128, "none", torch.bfloat16)).operands
    assert weight.nbytes * 2 == -(-n // 16) * 16 * -(-k // 64) * 64
    assert scales.nbytes == -(-n // 16) * 16 * -(-k // 128) * 2


@pytest.mark.parametrize("fmt", [Int4Format(64), Int4Format(128, "float")], ids=str)
def test_shards_are_slices(fmt: Int4Format, device: str) -> None:
    """Rows: a slice of dimension 0 of both tensors. Columns: of dimension 1, at multiples of 64 and of the group."""
    parts = INT4.parts(100, 896, fmt, device)
    weight, scales = parts.operands()

    rows = Parts(
        parts.q[32:80].contiguous(),
        parts.scales[32:80].contiguous(),
        None if parts.zeros is None else parts.zeros[32:80].contiguous(),
        fmt.group_size,
    ).operands()
    assert torch.equal(weight[2:5], rows[0])
    assert torch.equal(scales[2:5], rows[1])

    first, last = 256 // fmt.group_size, 640 // fmt.group_size
    columns = Parts(
        parts.q[:, 256:640].contiguous(),
        parts.scales[:, first:last].contiguous(),
        None if parts.zeros is None else parts.zeros[:, first:last].contiguous(),
        fmt.group_size,
    ).operands()
    assert torch.equal(weight[:, 4:10], columns[0])
    assert torch.equal(scales[:, first:last], columns[1])


@pytest.mark.parametrize("fmt", FORMATS, ids=str)
def test_one_layout_for_cpu_and_cuda(fmt: Int4Format) -> None:
    if not torch.cuda.is_available():
        pytest.skip("torch sees no GPU")
    parts = INT4.parts(100, 200, fmt)
    on_gpu = INT4.parts(100, 200, fmt, "cuda")
    for cpu, cuda in zip(parts.operands(), on_gpu.operands(), strict=True):
        assert torch.equal(bits(cpu.float()), bits(cuda.cpu().float()))


def test_inputs_are_left_alone(device: str) -> None:
    parts = INT4.parts(33, 100, Int4Format(32, "float"), device)
    before = [t.clone() for t in (parts.q, parts.scales, parts.zeros) if t is not None]
    weight = INT4.pack(parts)
    packed = [t.clone() for t in weight.operands]
    torch.ops.qao.unpack_int4(*weight.operands, *weight.arguments)
    torch.ops.qao.dequantize_int4(*weight.operands, *weight.arguments, torch.float16)
    assert all(torch.equal(a, b) for a, b in zip(before, (parts.q, parts.scales, parts.zeros), strict=True))
    assert all(torch.equal(a, b) for a, b in zip(packed, weight.operands, strict=True))

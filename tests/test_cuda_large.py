"""More than 2^31 elements, which only a GPU handles in reasonable time: indices must be 64 bits wide."""

from __future__ import annotations

from collections.abc import Iterator

import pytest
import torch
from accuracy import check_close
from ops_schemes import PRODUCTS, Scheme
from ops_support import check_product, randn

pytestmark = [
    pytest.mark.skipif(not torch.cuda.is_available(), reason="torch sees no GPU"),
    pytest.mark.usefixtures("free_memory_afterwards"),
]
scheme_parameter = pytest.mark.parametrize("scheme", PRODUCTS, ids=lambda scheme: scheme.word)


def need_memory(gigabytes: int) -> None:
    torch.cuda.empty_cache()
    free, _ = torch.cuda.mem_get_info()
    if free < gigabytes << 30:
        pytest.skip(f"needs {gigabytes} GiB of free GPU memory, {free >> 30} are")


@pytest.fixture
def free_memory_afterwards() -> Iterator[None]:
    yield
    torch.cuda.empty_cache()


def near(boundary: int, size: int, count: int = 48) -> list[slice]:
    """The first, the last and the rows around `boundary`, in multiples of 16."""
    middle = min(boundary, size - count) // 16 * 16
    return [slice(0, count), slice(middle - count, middle + count), slice(size // 16 * 16 - count, size)]


@scheme_parameter
def test_x_of_more_than_2_31_elements(scheme: Scheme) -> None:
    need_memory(12)
    m, k = 2**19 + 5, 4128
    assert m * k > 2**31
    weight = scheme.make_weight(40, k, scheme.few_formats[1], "cuda")
    x = torch.randn(m, k, dtype=torch.bfloat16, device="cuda")
    y = scheme.mm(x, weight)
    for rows in near(2**31 // k, m):
        check_product(y[rows], x[rows], weight)


@scheme_parameter
def test_row_stride_of_more_than_2_31(scheme: Scheme) -> None:
    need_memory(12)
    weight = scheme.make_weight(40, 256, scheme.few_formats[1], "cuda")
    memory = torch.empty(2**31 + 64 + 256, dtype=torch.bfloat16, device="cuda")
    x = memory.as_strided((2, 256), (2**31 + 64, 1)).copy_(randn(2, 256, dtype=torch.bfloat16, device="cuda"))
    check_product(scheme.mm(x, weight), x, weight)


@scheme_parameter
def test_y_of_more_than_2_31_elements(scheme: Scheme) -> None:
    need_memory(12)
    m, n = 70_001, 32_784
    assert m * n > 2**31
    weight = scheme.make_weight(n, 64, scheme.few_formats[1], "cuda")
    x = torch.randn(m, 64, dtype=torch.bfloat16, device="cuda")
    y = scheme.mm(x, weight)
    for rows in near(2**31 // n, m):
        check_product(y[rows], x[rows], weight)


@pytest.mark.parametrize("m", [1, 3, 40, 200])
def test_int4_weight_of_more_than_2_31_bytes(m: int) -> None:
    need_memory(16)
    n, k, group_size = 2**20 + 33, 4128, 128
    tiles_n, tiles_k, groups = -(-n // 16), -(-k // 64), -(-k // group_size)
    assert tiles_n * tiles_k * 512 > 2**31
    packed = torch.randint(-128, 128, (tiles_n, tiles_k, 512), dtype=torch.int8, device="cuda")
    scales = torch.rand(tiles_n, groups, 2, 16, device="cuda").add_(0.5).bfloat16()
    x = torch.randn(m, k, dtype=torch.bfloat16, device="cuda")
    y = torch.ops.qao.int4_mm(x, packed, scales, None, n, k, group_size)
    for rows in near(2**32 // k, n):
        tiles = slice(rows.start // 16, -(-rows.stop // 16))
        sizes = (rows.stop - rows.start, k, group_size)
        dense = torch.ops.qao.dequantize_int4(packed[tiles], scales[tiles], *sizes, torch.float32)
        check_close(y[:, rows].contiguous(), x, dense.double())


def test_packing_more_than_2_31_elements() -> None:
    need_memory(24)
    n, k, group_size = 2**19 + 33, 4128, 128
    assert n * k > 2**31
    q = torch.randint(0, 16, (n, k), dtype=torch.uint8, device="cuda")
    scales, zeros = (torch.rand(n, -(-k // group_size), device="cuda").bfloat16() for _ in range(2))
    packed = torch.ops.qao.pack_int4(q, scales, zeros, group_size)
    unpacked = torch.ops.qao.unpack_int4(*packed, n, k, group_size)
    assert all(torch.equal(a, b) for a, b in zip(unpacked, (q, scales, zeros), strict=True))
    del unpacked
    dense = torch.ops.qao.dequantize_int4(*packed, n, k, group_size, torch.bfloat16)
    for rows in near(2**31 // k, n):
        part = torch.ops.qao.pack_int4(q[rows], scales[rows], zeros[rows], group_size)
        tiles = slice(rows.start // 16, -(-rows.stop // 16))
        assert all(torch.equal(whole[tiles], p) for whole, p in zip(packed, part, strict=True))
        sizes = (rows.stop - rows.start, k, group_size)
        assert torch.equal(dense[rows], torch.ops.qao.dequantize_int4(*part, *sizes, torch.bfloat16))

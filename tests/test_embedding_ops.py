"""int4_embedding and int8_embedding against float64 and, bit for bit, the dequantized weight."""

from __future__ import annotations

import re
from collections.abc import Callable
from typing import Any

import pytest
import torch
from ops_schemes import DTYPES, INT4, SCHEMES, ByteFormat, Scheme, Weight, generator
from ops_support import before_guard_page, bits
from torch import Tensor

INT8 = next(scheme for scheme in SCHEMES if scheme.word == "int8")
FORMATS: list[tuple[Scheme, Any]] = [
    *((INT4, fmt) for fmt in INT4.formats),
    *((INT8, ByteFormat(torch.int8, granularity)) for granularity in ("row", "tensor")),
]
FEW = [(INT4, fmt) for fmt in INT4.few_formats] + [(INT8, INT8.few_formats[0])]
SHAPES = [(1, 1), (15, 31), (16, 64), (17, 65), (33, 100), (100, 576), (40, 1028)]
UTILITIES = ("test_schema", "test_faketensor", "test_aot_dispatch_dynamic")


def gather(ids: Tensor, weight: Weight, dtype: torch.dtype = torch.float32) -> Tensor:
    op = torch.ops.qao.int4_embedding if weight.operands[0].dim() == 3 else torch.ops.qao.int8_embedding
    return op(ids, *weight.operands, *weight.arguments, dtype)


def dequantized(weight: Weight, dtype: torch.dtype) -> Tensor:
    if weight.operands[0].dim() == 3:
        return torch.ops.qao.dequantize_int4(*weight.operands, *weight.arguments, dtype)
    q, scales = weight.operands
    return (q.float() * scales.view(-1, 1)).to(dtype)


def random_ids(n: int, *shape: int, device: str, dtype: torch.dtype = torch.int64) -> Tensor:
    return torch.randint(0, n, shape, generator=generator(n)).to(device, dtype)


few_formats = pytest.mark.parametrize("scheme,fmt", FEW, ids=lambda value: getattr(value, "word", str(value)))


@pytest.mark.parametrize("dtype", DTYPES, ids=str)
@pytest.mark.parametrize("scheme,fmt", FORMATS, ids=lambda value: getattr(value, "word", str(value)))
def test_rows(scheme: Scheme, fmt: Any, dtype: torch.dtype, device: str) -> None:
    for i, (n, k) in enumerate(SHAPES):
        weight = scheme.make_weight(n, k, fmt, device, seed=i)
        every = torch.arange(n, device=device)
        rows = gather(every, weight, dtype)
        assert rows.dtype == dtype and rows.shape == (n, k) and rows.is_contiguous() and str(rows.device.type) == device
        assert torch.equal(bits(rows), bits(dequantized(weight, dtype)))
        # Rounded to float32 and then to dtype: a little more than half a last bit, or than half of the smallest number.
        info = torch.finfo(dtype)
        slack = weight.dense.abs() * (0.51 * info.eps + 2.0**-23) + info.smallest_normal * info.eps
        assert ((rows.double() - weight.dense).abs() <= slack).all()
        ids = random_ids(n, 3, 7, device=device)
        assert torch.equal(bits(gather(ids, weight, dtype)), bits(rows[ids]))


IDS: dict[str, Callable[[Tensor], Tensor]] = {
    "[12, 9]": lambda ids: ids,
    "one": lambda ids: ids[0, 0],
    "a row": lambda ids: ids[0],
    "a column": lambda ids: ids[:, 1],
    "transposed": lambda ids: ids.t(),
    "every other": lambda ids: ids[::2, 1::2],
    "expanded": lambda ids: ids[:, :1].expand(-1, 5),
    "offset": lambda ids: ids.flatten()[1:],
    "3-D": lambda ids: ids.view(3, 4, 9).permute(2, 0, 1),
    "15-D": lambda ids: ids.view(12, *(1,) * 13, 9),
    "none": lambda ids: ids[:0],
    "none of some": lambda ids: ids[:, :0],
}


@pytest.mark.parametrize("ids_dtype", (torch.int32, torch.int64), ids=str)
@pytest.mark.parametrize("view", IDS.values(), ids=IDS.keys())
@few_formats
def test_ids_of_any_shape(
    scheme: Scheme, fmt: Any, view: Callable[[Tensor], Tensor], ids_dtype: torch.dtype, device: str
) -> None:
    weight = scheme.make_weight(50, 100, fmt, device)
    ids = view(random_ids(50, 12, 9, device=device, dtype=ids_dtype))
    rows = gather(ids, weight, torch.bfloat16)
    assert rows.shape == (*ids.shape, 100) and rows.is_contiguous()
    assert torch.equal(rows, dequantized(weight, torch.bfloat16)[ids.long()])


@pytest.mark.parametrize("k", (100, 2048))
@few_formats
def test_threads_do_not_matter(scheme: Scheme, fmt: Any, k: int) -> None:
    weight, before = scheme.make_weight(64, k, fmt), torch.get_num_threads()
    ids = random_ids(64, 2000, device="cpu")
    try:
        results = [(torch.set_num_threads(count), gather(ids, weight))[1] for count in (1, 2, 5)]
    finally:
        torch.set_num_threads(before)
    assert all(torch.equal(result, dequantized(weight, torch.float32)[ids]) for result in results)


@few_formats
def test_nothing_is_read_past_an_operand(scheme: Scheme, fmt: Any) -> None:
    for n, k in ((33, 100), (16, 64), (17, 65)):
        weight = scheme.make_weight(n, k, fmt)
        guarded = Weight(
            tuple(before_guard_page(t) for t in weight.operands), weight.arguments, weight.dense, weight.activation
        )
        ids = torch.tensor([n - 1, 0, n - 1])
        assert torch.equal(gather(before_guard_page(ids), guarded), gather(ids, weight))


@pytest.mark.parametrize("wrong", (-1, 33, 2**31 - 1, -(2**31)))
@pytest.mark.parametrize("ids_dtype", (torch.int32, torch.int64), ids=str)
@few_formats
def test_an_id_out_of_range(scheme: Scheme, fmt: Any, ids_dtype: torch.dtype, wrong: int, device: str) -> None:
    """An error on the CPU; on a GPU, where only the kernel sees it, a row of NaN. Row 32 is the last of 33."""
    weight = scheme.make_weight(33, 100, fmt, device)
    ids = torch.tensor([3, wrong, 32], dtype=ids_dtype, device=device)
    if device == "cpu":
        message = rf"embedding: ids must be in 0..32 \(num_embeddings 33\), but element 1 is {wrong}\. Got ids: int"
        with pytest.raises(RuntimeError, match=message):
            gather(ids, weight)
        return
    rows = gather(ids, weight)
    assert rows[1].isnan().all() and torch.equal(rows[::2], dequantized(weight, torch.float32)[[3, 32]])


def test_ids_of_64_bits_are_not_cut(device: str) -> None:
    weight, ids = INT8.make_weight(33, 64, device=device), torch.tensor([2**32 + 1], device=device)
    if device == "cpu":
        with pytest.raises(RuntimeError, match="element 0 is 4294967297"):
            gather(ids, weight)
    else:
        assert gather(ids, weight).isnan().all()


def test_bad_arguments(device: str) -> None:
    ids, ops = torch.zeros(3, dtype=torch.int64, device=device), torch.ops.qao
    int4, int8 = INT4.make_weight(33, 100, device=device), INT8.make_weight(33, 100, device=device)
    (w4, s4), (w8, s8), f32 = int4.operands, int8.operands, torch.float32
    cases: list[tuple[Callable[[], Tensor], str]] = [
        (lambda: ops.int4_embedding(ids.float(), w4, s4, 33, 100, 128, f32), "ids must be int32 or int64"),
        (lambda: ops.int8_embedding(ids.to(torch.uint8), w8, s8, f32), "ids must be int32 or int64"),
        (lambda: ops.int4_embedding(ids, w4.view(torch.uint8), s4, 33, 100, 128, f32), "packed int4 in an int8"),
        (lambda: ops.int4_embedding(ids, w4, s4, 49, 100, 128, f32), r"shape \[ceil\(N / 16\)"),
        (lambda: ops.int4_embedding(ids, w4, s4, 33, 200, 128, f32), r"shape \[ceil\(N / 16\)"),
        (lambda: ops.int4_embedding(ids, w4, s4, 0, 100, 128, f32), "num_embeddings and embedding_dim must be"),
        (lambda: ops.int4_embedding(ids, w4, s4, 33, 100, 48, f32), "group_size must be"),
        (lambda: ops.int4_embedding(ids, w4, s4, 33, 100, 32, f32), "scales must have shape"),
        (lambda: ops.int4_embedding(ids, w4, s4.double(), 33, 100, 128, f32), "scales must be float32"),
        (lambda: ops.int4_embedding(ids, w4, s4, 33, 100, 128, torch.float64), "dtype must be"),
        (lambda: ops.int8_embedding(ids, w8, s8, torch.int8), "dtype must be"),
        (lambda: ops.int8_embedding(ids, w8.float(), s8, f32), r"weight must be int8 of shape \[N, K\]"),
        (lambda: ops.int8_embedding(ids, w8[0], s8, f32), r"weight must be int8 of shape \[N, K\]"),
        (lambda: ops.int8_embedding(ids, w8.t(), s8, f32), "scales must have shape|weight must be contiguous"),
        (lambda: ops.int8_embedding(ids, w8, s8[:7], f32), r"scales must have shape \[N\] or \[1\]"),
        (lambda: ops.int8_embedding(ids, w8, s8.half(), f32), "scales must be float32"),
        (lambda: ops.int8_embedding(ids.view(3, *(1,) * 15), w8, s8, f32), "16 dimensions"),
    ]
    for call, message in cases:
        with pytest.raises(RuntimeError, match=message):
            call()
    if device != "cpu":
        with pytest.raises(RuntimeError, match="different devices"):
            ops.int8_embedding(ids.cpu(), w8, s8, f32)
    with pytest.raises(RuntimeError) as caught:
        ops.int4_embedding(ids, w4, s4, 33, 100, 48, f32)
    assert re.search(r"num_embeddings: 33, embedding_dim: 100, group_size: 48\. Repack", str(caught.value))


@pytest.mark.parametrize("ids_dtype", (torch.int32, torch.int64), ids=str)
@few_formats
def test_opcheck(scheme: Scheme, fmt: Any, ids_dtype: torch.dtype, device: str) -> None:
    weight = scheme.make_weight(33, 100, fmt, device)
    op = torch.ops.qao.int4_embedding if scheme is INT4 else torch.ops.qao.int8_embedding
    for shape, dtype in (((5,), torch.bfloat16), ((2, 3), torch.float16), ((), torch.float32), ((0, 4), torch.float32)):
        arguments = (random_ids(33, *shape, device=device, dtype=ids_dtype), *weight.operands, *weight.arguments, dtype)
        torch.library.opcheck(op.default, arguments, test_utils=UTILITIES)


@few_formats
def test_compile(scheme: Scheme, fmt: Any, device: str) -> None:
    """One graph for every number of ids."""
    torch._dynamo.reset()
    weight = scheme.make_weight(33, 100, fmt, device)
    compiled = torch.compile(lambda ids: gather(ids, weight, torch.bfloat16) * 2, fullgraph=True, dynamic=True)
    for count in (5, 7, 2, 130):
        ids = random_ids(33, count, device=device)
        assert torch.equal(compiled(ids), gather(ids, weight, torch.bfloat16) * 2)


@pytest.mark.skipif(not torch.cuda.is_available(), reason="torch sees no GPU")
@few_formats
def test_in_a_cuda_graph(scheme: Scheme, fmt: Any) -> None:
    """No host synchronization: ids are read when the graph is replayed."""
    weight, ids = scheme.make_weight(50, 100, fmt, "cuda"), random_ids(50, 9, device="cuda")
    gather(ids, weight)
    graph = torch.cuda.CUDAGraph()
    with torch.cuda.graph(graph):
        rows = gather(ids, weight)
    for i in range(5):
        ids.copy_(torch.arange(9) * (i + 1))
        graph.replay()
        assert torch.equal(rows, dequantized(weight, torch.float32)[ids])

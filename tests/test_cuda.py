"""Features of GPUs: graphs, streams, several devices, layers of full size."""

from __future__ import annotations

import threading
from dataclasses import replace

import pytest
import qao
import torch
from ops_schemes import DTYPES, INT4, PRODUCTS, SCHEMES, Format, Int4Format, Scheme, Weight
from ops_support import bits, check_product, randn
from torch import Tensor

pytestmark = pytest.mark.skipif(not torch.cuda.is_available(), reason="torch sees no GPU")
scheme_parameter = pytest.mark.parametrize("scheme", PRODUCTS, ids=lambda scheme: scheme.word)
BY_WORD = {scheme.word: scheme for scheme in SCHEMES}
M_KINDS = (1, 4, 16, 33, 64, 300)
KINDS = tuple(zip(M_KINDS, 2 * DTYPES, strict=True))


def poison() -> list[Tensor]:
    """Blocks of 0xFF bytes (NaN in every float dtype, -1 as a counter) that fill what torch's allocator has free.

    It keeps blocks up to 1 MiB and larger ones in separate pools and takes the smallest block that fits, so the large
    sizes make room and the smaller ones fill the gaps between live tensors.
    """
    sizes = [32 << 20] * 4 + [3 << 19] * 40 + [1 << 19] * 64 + [1 << 15] * 64 + [1 << 11] * 128 + [1 << 9] * 64
    return [torch.full((size,), 0xFF, dtype=torch.uint8, device="cuda") for size in sizes]


def big_layer(scheme: Scheme, n: int = 4096, k: int = 4096, seed: int = 0, device: str = "cuda") -> Weight:
    return scheme.make_weight(n, k, scheme.few_formats[1], device, seed)


# ---- size ------------------------------------------------------------------------------------------------------------


@pytest.mark.parametrize("x_dtype", DTYPES, ids=str)
@pytest.mark.parametrize("n,k", [(4096, 4096), (14336, 4096), (4096, 14336), (1000, 9216), (6144, 4064)])
@scheme_parameter
def test_full_size_layers(scheme: Scheme, n: int, k: int, x_dtype: torch.dtype) -> None:
    weight = scheme.make_weight(n, k, scheme.few_formats[DTYPES.index(x_dtype) % 2], "cuda")
    bias = randn(n, dtype=x_dtype, device="cuda")
    for m in (1, 8, 17, 64, 256, 500, 1000):
        x = randn(m, k, dtype=x_dtype, device="cuda", seed=m)
        check_product(scheme.mm(x, weight, bias), x, weight, bias)


hopper = pytest.mark.skipif(
    torch.cuda.is_available() and torch.cuda.get_device_capability() != (9, 0),
    reason="a kernel of compute capability 9.0",
)


def check_ping_pong(scheme: qao.Scheme, m: int, n: int, k: int, x_dtype: torch.dtype) -> None:
    plan = scheme.plan(m, n, k, x_dtype=x_dtype, scale_dtype=torch.float32, device=torch.device("cuda", 0))
    assert plan is not None and "ping-pong" in plan["text"]


@hopper
@pytest.mark.parametrize("x_dtype", DTYPES, ids=str)
@pytest.mark.parametrize(
    "m,n,k",
    [
        (4090, 5128, 1088),  # the last tiles of rows and of tokens are cut; a last K-tile of 64 columns
        (5000, 12292, 960),  # y that TMA cannot store
    ],
)
@pytest.mark.parametrize("fmt", BY_WORD["int8_int8"].formats, ids=str)
def test_ping_pong_tiles(m: int, n: int, k: int, x_dtype: torch.dtype, fmt: Format) -> None:
    check_ping_pong(qao.Int8DynamicActivationInt8Weight(), m, n, k, x_dtype)
    scheme = BY_WORD["int8_int8"]
    weight = scheme.make_weight(n, k, fmt, "cuda")
    x, bias = randn(m, k, dtype=x_dtype, device="cuda"), randn(n, dtype=torch.float32, device="cuda")
    y = scheme.mm(x, weight, bias)
    check_product(y, x, weight, bias)
    assert bits(scheme.mm(x, weight, bias)).equal(bits(y))


@hopper
@pytest.mark.parametrize("rows", [40, 63, 95, 100])
def test_ping_pong_experts_end_inside_a_tile(rows: int) -> None:
    """A chunk must not be overwritten while TMA still reads it, even if no later chunk was issued."""
    scheme, counts, (n, k) = BY_WORD["int8_int8"], [rows, 168 - rows] * 16, (5760, 2880)
    weights = [scheme.make_weight(n, k, None, "cuda", seed=seed) for seed in range(4)] * 8
    x = randn(sum(counts), k, dtype=torch.bfloat16, device="cuda")
    _host = pytest.importorskip("qao._host")
    problem = _host.Problem(m=len(x), n=n, k=k, x="int8", weight="int8")
    gpu = _host.Gpu(compute_capability=90, num_sms=132, shared_bytes_per_cta=232448)
    assert _host.plan(problem, gpu, experts=len(counts))["tile_m"] == 128
    operands = [torch.stack(of) for of in zip(*(weight.operands for weight in weights), strict=True)]
    ends = torch.tensor(counts, device="cuda").cumsum(0, dtype=torch.int32)
    expected = torch.cat([scheme.mm(part, weight) for part, weight in zip(x.split(counts), weights, strict=True)])
    for _ in range(5):
        y = torch.ops.qao.int8_int8_grouped_mm(x, *operands, None, ends, None, None, None)
        assert bits(y).equal(bits(expected))


@hopper
def test_fast_sums_of_ping_pong() -> None:
    """The tensor cores' short accumulator keeps 13 bits, and adds 32 columns at a time."""
    m, n, k = 4090, 5128, 1088
    check_ping_pong(qao.Float8DynamicActivationFloat8Weight(fast_accum=True), m, n, k, torch.bfloat16)
    scheme = BY_WORD["fp8_fp8"]
    weight = scheme.make_weight(n, k, None, "cuda")
    x = randn(m, k, dtype=torch.float32, device="cuda")
    exact, fast = (scheme.op(x, *weight.operands, None, *weight.arguments[:2], flag).double() for flag in (False, True))
    seen = x.double().abs() * (1 + 2.0**-4)  # in eight bits
    assert ((fast - exact).abs() <= k / 32 * 2.0**-13 * (seen @ weight.dense.double().abs().T)).all()
    assert not fast.equal(exact)


FEW_TOKENS_FORMATS = (  # every group size; every dtype of parameters with zero points and without
    Int4Format(32, "float", torch.bfloat16),
    Int4Format(64, "none", torch.float16),
    Int4Format(128, "float", torch.float16),
    Int4Format(128, "none", torch.bfloat16),
    Int4Format(256, "integer", torch.float32),
    Int4Format(-1, "none", torch.float32),
)


@pytest.mark.parametrize("fmt", FEW_TOKENS_FORMATS, ids=str)
@pytest.mark.parametrize("x_dtype", (torch.bfloat16, torch.float16), ids=str)
@pytest.mark.parametrize("n,k", [(12000, 4096), (1000, 9000)])  # several passes over row tiles; a last K-step
def test_few_tokens_of_large_layers(n: int, k: int, x_dtype: torch.dtype, fmt: Int4Format) -> None:
    """int4 kernels for few tokens are specialized for x and the parameters, and only run for large layers."""
    weight = INT4.make_weight(n, k, fmt, "cuda")
    bias = randn(n, dtype=x_dtype, device="cuda")
    for m in (1, 2, 3, 4, 8, 9, 13, 16):
        x = randn(m, k, dtype=x_dtype, device="cuda", seed=m)
        if x_dtype == torch.bfloat16:
            x[-1] *= 2.0**90  # past what these kernels have room for: computed once more
        check_product(INT4.mm(x, weight, bias), x, weight, bias)


@pytest.mark.parametrize("row_tiles", (*range(1, 10), 14))
@scheme_parameter
def test_few_tokens_of_every_run_of_row_tiles(scheme: Scheme, row_tiles: int) -> None:
    """A CTA walks its row tiles of 16 in passes of one to four, the last one short, for the others with one less."""
    multiprocessors = torch.cuda.get_device_properties().multi_processor_count
    n, k = 16 * (multiprocessors * (row_tiles - 1) + multiprocessors // 2) + 5, 1104
    for fmt in scheme.few_formats:
        weight = scheme.make_weight(n, k, fmt, "cuda")
        bias = randn(n, dtype=torch.bfloat16, device="cuda")
        for m in (1, 2, 3, 4, 5, 8, 12, 16):
            x = randn(m, k, dtype=torch.bfloat16, device="cuda", seed=m)
            check_product(scheme.mm(x, weight, bias), x, weight, bias)


# ---- determinism, memory ---------------------------------------------------------------------------------------------


@pytest.mark.parametrize("m,x_dtype", KINDS)
@pytest.mark.parametrize("n,k", [(4096, 4096), (100, 16384)])
@scheme_parameter
def test_a_hundred_runs_in_poisoned_memory(scheme: Scheme, n: int, k: int, m: int, x_dtype: torch.dtype) -> None:
    """Results and workspaces come out of memory full of NaN; sums over split K keep their order."""
    weight = big_layer(scheme, n, k)
    x = randn(m, k, dtype=x_dtype, device="cuda")
    torch.cuda.empty_cache()
    blocks = poison()
    freed = [range(block.data_ptr(), block.data_ptr() + block.nbytes) for block in blocks]
    del blocks
    first = scheme.mm(x, weight)
    assert any(first.data_ptr() in addresses for addresses in freed), "the result is not in poisoned memory"
    check_product(first, x, weight)
    different = torch.zeros((), dtype=torch.bool, device="cuda")
    for i in range(100):
        if i % 10 == 0:
            poison()
        different |= (bits(scheme.mm(x, weight)) != bits(first)).any()
    assert not different


@scheme_parameter
def test_no_memory_is_kept(scheme: Scheme) -> None:
    weight = big_layer(scheme)
    for m in M_KINDS:
        x = randn(m, 4096, dtype=torch.bfloat16, device="cuda")
        scheme.mm(x, weight)
        before = torch.cuda.memory_allocated()
        for _ in range(20):
            scheme.mm(x, weight)
        assert torch.cuda.memory_allocated() == before


# ---- order: the op runs on the current stream, after earlier work and before later work -----------------------------


@pytest.mark.parametrize("m", M_KINDS)
@scheme_parameter
def test_operands_written_directly_before(scheme: Scheme, m: int) -> None:
    """A kernel that fetches its weights early must still see what the previous kernel wrote."""
    sources = [big_layer(scheme, 512, 1024, seed) for seed in (0, 1)]
    x_sources = [randn(m, 1024, dtype=torch.bfloat16, device="cuda", seed=seed) for seed in (0, 1)]
    expected = [bits(scheme.mm(x, source)) for x, source in zip(x_sources, sources, strict=True)]
    target = replace(
        sources[0],
        operands=tuple(torch.empty_like(t) for t in sources[0].operands),
        arguments=tuple(torch.empty_like(a) if isinstance(a, Tensor) else a for a in sources[0].arguments),
    )
    x = torch.empty_like(x_sources[0])

    def write_and_call(i: int) -> Tensor:
        for t, source in zip(target.tensors(), sources[i].tensors(), strict=True):
            t.copy_(source)
        x.copy_(x_sources[i])
        y = scheme.mm(x, target)
        for t in (*target.tensors(), x):
            t.zero_()  # the op must have read them
        return (bits(y) != expected[i]).any()

    different = torch.zeros((), dtype=torch.bool, device="cuda")
    for i in range(1000):
        different |= write_and_call(i % 2)
    assert not different

    graph = torch.cuda.CUDAGraph()
    with torch.cuda.graph(graph):
        for i in range(10):
            different |= write_and_call(i % 2)
    for _ in range(100):
        graph.replay()
    assert not different


@pytest.mark.parametrize("m,x_dtype", KINDS)
@scheme_parameter
def test_graph_replays(scheme: Scheme, m: int, x_dtype: torch.dtype) -> None:
    """100 replays with new x each time; every replay leaves the graph's freed memory, and y, full of 0xFF."""
    weight = big_layer(scheme, 1000, 4096)
    x = randn(m, 4096, dtype=x_dtype, device="cuda")
    bias = randn(1000, dtype=torch.float32, device="cuda")
    scheme.mm(x, weight, bias)
    graph = torch.cuda.CUDAGraph()
    with torch.cuda.graph(graph):
        y = scheme.mm(x, weight, bias)
        poison()  # takes the workspace the op gave back
    different = torch.zeros((), dtype=torch.bool, device="cuda")
    for seed in range(100):
        x.copy_(randn(m, 4096, dtype=x_dtype, device="cuda", seed=seed % 7))
        y.fill_(float("nan"))
        graph.replay()
        different |= (bits(y) != bits(scheme.mm(x, weight, bias))).any()
    assert not different
    check_product(y, x, weight, bias)


@scheme_parameter
def test_graphs_and_calls_on_several_streams_at_once(scheme: Scheme) -> None:
    """Four streams with separate x and weight, half of them replaying a graph: no workspace is shared."""
    weights = [big_layer(scheme, 1024, 2048, seed) for seed in range(4)]
    for m in M_KINDS:
        inputs = [randn(m, 2048, dtype=torch.bfloat16, device="cuda", seed=seed) for seed in range(4)]
        expected = [scheme.mm(x, weight) for x, weight in zip(inputs, weights, strict=True)]
        graphs = [torch.cuda.CUDAGraph() for _ in range(2)]
        results: list[Tensor] = []
        for graph, x, weight in zip(graphs, inputs, weights, strict=False):
            with torch.cuda.graph(graph):
                results.append(scheme.mm(x, weight))
        streams = [torch.cuda.Stream() for _ in range(4)]
        different = [torch.zeros((), dtype=torch.bool, device="cuda") for _ in range(4)]
        torch.cuda.synchronize()
        for _ in range(20):
            for i, stream in enumerate(streams):
                with torch.cuda.stream(stream):
                    if i < 2:
                        graphs[i].replay()
                    y = results[i] if i < 2 else scheme.mm(inputs[i], weights[i])
                    different[i] |= (bits(y) != bits(expected[i])).any()
        torch.cuda.synchronize()
        assert not any(different), m


def test_packing_in_a_graph() -> None:
    parts = INT4.parts(100, 200, Int4Format(32, "float"), "cuda")
    other = INT4.parts(100, 200, Int4Format(32, "float"), "cuda", seed=1)
    arguments = (100, 200, 32)
    graph = torch.cuda.CUDAGraph()
    with torch.cuda.graph(graph):
        packed = torch.ops.qao.pack_int4(parts.q, parts.scales, parts.zeros, 32)
        unpacked = torch.ops.qao.unpack_int4(*packed, *arguments)
        dense = torch.ops.qao.dequantize_int4(*packed, *arguments, torch.float32)
    for target, source in zip((parts.q, parts.scales, parts.zeros), (other.q, other.scales, other.zeros), strict=True):
        assert target is not None and source is not None
        target.copy_(source)
    graph.replay()
    assert all(torch.equal(a, b) for a, b in zip(unpacked, (other.q, other.scales, other.zeros), strict=True))
    assert torch.equal(dense, torch.ops.qao.dequantize_int4(*other.operands(), *arguments, torch.float32))


@scheme_parameter
def test_runs_on_the_current_stream(scheme: Scheme) -> None:
    """x is written late on a side stream: only an op on that stream sees it."""
    weight = big_layer(scheme, 512, 1024)
    for m in M_KINDS:
        source = randn(m, 1024, dtype=torch.bfloat16, device="cuda")
        x = torch.zeros_like(source)
        side = torch.cuda.Stream()
        side.wait_stream(torch.cuda.current_stream())
        with torch.cuda.stream(side):
            torch.cuda._sleep(50_000_000)
            x.copy_(source)
            y = scheme.mm(x, weight)
        side.synchronize()
        check_product(y, source, weight)


@scheme_parameter
def test_returns_before_the_gpu_is_done(scheme: Scheme) -> None:
    weight = big_layer(scheme)
    for m in M_KINDS:
        x = randn(m, 4096, dtype=torch.bfloat16, device="cuda")
        scheme.mm(x, weight)
        torch.cuda.synchronize()
        torch.cuda._sleep(1_000_000_000)
        scheme.mm(x, weight)
        assert not torch.cuda.current_stream().query(), "the op waited for the GPU"
        torch.cuda.synchronize()


@scheme_parameter
def test_two_threads_with_their_own_streams(scheme: Scheme) -> None:
    results: dict[int, bool] = {}

    def work(index: int) -> None:
        with torch.cuda.stream(torch.cuda.Stream()):
            weight = big_layer(scheme, 1024, 2048, seed=index)
            x = randn(1 + 20 * index, 2048, dtype=DTYPES[index], device="cuda")
            first = scheme.mm(x, weight)
            check_product(first, x, weight)
            results[index] = all(torch.equal(bits(scheme.mm(x, weight)), bits(first)) for _ in range(200))

    threads = [threading.Thread(target=work, args=(index,)) for index in range(2)]
    for thread in threads:
        thread.start()
    for thread in threads:
        thread.join()
    assert results == {0: True, 1: True}


@pytest.mark.parametrize("m", M_KINDS)
@scheme_parameter
def test_tensors_on_another_device_than_the_current(scheme: Scheme, m: int) -> None:
    if torch.cuda.device_count() < 2:
        pytest.skip("needs two GPUs")
    with torch.cuda.device(0):
        for index in (0, 1):
            device = f"cuda:{index}"
            weight = big_layer(scheme, 1000, 4096, device=device)
            x = randn(m, 4096, dtype=torch.bfloat16, device=device)
            check_product(scheme.mm(x, weight), x, weight)
            assert torch.cuda.current_device() == 0


@scheme_parameter
def test_compile_with_cuda_graphs(scheme: Scheme) -> None:
    """mode="reduce-overhead": Inductor's own CUDA graphs around the op."""
    up, down = big_layer(scheme, 1024, 512), big_layer(scheme, 512, 1024, seed=1)

    def block(x: Tensor) -> Tensor:
        return x + scheme.mm(torch.relu(scheme.mm(x, up)), down)

    compiled = torch.compile(block, mode="reduce-overhead", fullgraph=True)
    for m in (1, 16, 1, 16, 1):
        for seed in range(5):
            x = randn(m, 512, dtype=torch.float32, device="cuda", seed=seed)
            expected = block(x)
            torch.compiler.cudagraph_mark_step_begin()
            assert (compiled(x) - expected).abs().max() <= 2.0**-20 * expected.abs().max()
    torch._dynamo.reset()

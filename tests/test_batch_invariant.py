"""Batch-invariant GEMM: a row of y has the same bits whatever the number and content of other rows."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

import pytest
import qao
import torch
from ops_schemes import DTYPES, PRODUCTS, Scheme, Weight
from ops_support import bits, check_product, randn
from qao.ops.batch_invariant import MODE
from torch import Tensor, nn

every_scheme = pytest.mark.parametrize("scheme", PRODUCTS, ids=lambda scheme: scheme.word)
# Rows of x; on a CPU with a slow scalar kernel, only as far as its kernels differ.
COUNTS = {"cpu": (1, 2, 3, 7, 9, 17, 33), "cuda": (1, 2, 3, 7, 8, 9, 16, 17, 31, 33, 64, 65, 130, 257)}


def product(scheme: Scheme, x: Tensor, weight: Weight, bias: Tensor | None) -> Tensor:
    return scheme.op(x, *weight.operands, bias, *weight.arguments, batch_invariant=True)


def rows_apart(weight: Weight) -> bool:
    return weight.activation.keeps_rows_apart or weight.activation.static_scale is not None


@pytest.mark.every_isa
@pytest.mark.parametrize("x_dtype", DTYPES, ids=str)
@pytest.mark.parametrize("n,k", [(48, 640), (37, 203), (33, 1024)], ids=str)
@every_scheme
def test_rows_alone_and_together(scheme: Scheme, n: int, k: int, x_dtype: torch.dtype, device: str) -> None:
    for fmt in scheme.few_formats:
        weight = scheme.make_weight(n, k, fmt, device)
        if not rows_apart(weight):
            continue
        *counts, all_rows = COUNTS[device]
        x = randn(all_rows, k, dtype=x_dtype, device=device)
        bias = randn(n, dtype=torch.float32, device=device)
        y = product(scheme, x, weight, bias)
        check_product(y, x, weight, bias)
        for m in counts:
            assert torch.equal(bits(product(scheme, x[:m], weight, bias)), bits(y[:m])), m
            first = all_rows - m
            assert torch.equal(bits(product(scheme, x[first:], weight, bias)), bits(y[first:])), m


@every_scheme
def test_many_rows(scheme: Scheme, device: str) -> None:
    """Which threads and batches share."""
    weight = scheme.make_weight(100, 320, scheme.few_formats[1], device)
    if not rows_apart(weight):
        return
    x = randn(700, 320, dtype=torch.bfloat16, device=device)
    y = product(scheme, x, weight, None)
    for first, last in ((0, 1), (699, 700), (5, 133), (128, 700), (300, 650)):
        assert torch.equal(bits(product(scheme, x[first:last], weight, None)), bits(y[first:last]))


@pytest.mark.skipif(not torch.cuda.is_available(), reason="torch sees no GPU")
@every_scheme
def test_rows_of_a_large_layer(scheme: Scheme) -> None:
    """Where plans choose among many tiles, and would split K."""
    for fmt in scheme.few_formats:
        weight = scheme.make_weight(2560, 2048, fmt, "cuda")
        if not rows_apart(weight):
            continue
        x = randn(1500, 2048, dtype=torch.bfloat16, device="cuda")
        y = product(scheme, x, weight, None)
        for m in (1, 5, 16, 32, 48, 100, 128, 200, 256, 400, 777):
            assert torch.equal(bits(product(scheme, x[:m], weight, None)), bits(y[:m])), m


@every_scheme
def test_where_rows_lie_does_not_matter(scheme: Scheme, device: str) -> None:
    for k in (136, 128):
        weight = scheme.make_weight(40, k, scheme.few_formats[0], device)
        if not rows_apart(weight):
            continue
        wide = randn(20, k + 3, dtype=torch.bfloat16, device=device)
        y = product(scheme, wide[:, :k].contiguous(), weight, None)
        assert torch.equal(bits(product(scheme, wide[:, :k], weight, None)), bits(y))
        for i in range(4):
            assert torch.equal(bits(product(scheme, wide[i : i + 1, :k], weight, None)), bits(y[i : i + 1]))


@pytest.mark.parametrize("n,k", [(48, 640), (37, 203), (33, 1024), (80, 4864), (2560, 2048)], ids=str)
@pytest.mark.parametrize("bias_dtype", [None, torch.float32, torch.bfloat16], ids=str)
def test_whole_sums_need_no_mode(bias_dtype: torch.dtype | None, n: int, k: int, device: str) -> None:
    """int8_int8 adds integers exactly, however K is split, and rounds their sum once: all plans give the same rows."""
    if device == "cpu" and n * k > 500_000:
        return
    (scheme,) = (scheme for scheme in PRODUCTS if scheme.word == "int8_int8")
    for fmt in (scheme.formats[0], scheme.formats[-1]):
        weight = scheme.make_weight(n, k, fmt, device)
        *counts, all_rows = COUNTS[device]
        x = randn(all_rows, k, dtype=torch.float32, device=device)  # y, too: no rounding hides a bit
        bias = None if bias_dtype is None else randn(n, dtype=bias_dtype, device=device)
        y = scheme.mm(x, weight, bias)
        assert torch.equal(bits(product(scheme, x, weight, bias)), bits(y))
        for m in counts:
            assert torch.equal(bits(scheme.mm(x[:m], weight, bias)), bits(y[:m])), m
            assert torch.equal(bits(scheme.mm(x[all_rows - m :], weight, bias)), bits(y[all_rows - m :])), m


def test_without_it_rows_differ() -> None:
    """Or the tests above could not fail."""
    (scheme,) = (scheme for scheme in PRODUCTS if scheme.word == "int8")
    weight, x = scheme.make_weight(64, 1024), randn(130, 1024, dtype=torch.float32, device="cpu")
    assert not torch.equal(scheme.mm(x, weight)[:1], scheme.mm(x[:1], weight))


def test_a_scale_of_all_rows_is_refused(device: str) -> None:
    weight = torch.ones(32, 64, dtype=torch.int8, device=device)
    x, scales = torch.randn(3, 64, device=device), torch.ones(32, device=device)
    message = (
        "fp8_fp8_mm: with batch_invariant, x may not have one scale for all rows.*Pass x_scale, or x_group_size=-1"
    )
    with pytest.raises(RuntimeError, match=message):
        torch.ops.qao.fp8_fp8_mm(x, weight, scales, None, None, 0, False, True)


@pytest.mark.every_isa
@pytest.mark.parametrize("scheme", PRODUCTS, ids=lambda scheme: scheme.word)
def test_experts(scheme: Scheme, device: str) -> None:
    """The rows of one expert, as the only rows of the call."""
    weights = [scheme.make_weight(40, 256, scheme.few_formats[0], device, seed=e) for e in range(3)]
    if not rows_apart(weights[0]):
        return
    operator = getattr(torch.ops.qao, f"{scheme.word}_grouped_mm").default
    operands = [torch.stack(parts) for parts in zip(*(w.operands for w in weights), strict=True)]
    rest = [
        torch.stack(a) if isinstance(a[0], Tensor) else a[0] for a in zip(*(w.arguments for w in weights), strict=True)
    ]
    x = randn(200, 256, dtype=torch.bfloat16, device=device)

    def of(rows: Tensor, ends: list[int]) -> Tensor:
        offsets = torch.tensor(ends, dtype=torch.int32, device=device)
        return operator(rows, *operands, None, offsets, None, None, *rest, batch_invariant=True)

    y = of(x, [100, 101, 200])
    assert torch.equal(bits(of(x[100:101], [0, 1, 1])), bits(y[100:101]))
    for m in (1, 3, 17, 60):
        assert torch.equal(bits(of(x[:m], [m, m, m])), bits(y[:m]))
        assert torch.equal(bits(of(x[101 : 101 + m], [0, 0, m])), bits(y[101 : 101 + m]))


# ---- the mode --------------------------------------------------------------------------------------------------------

SCHEME = qao.Int8WeightOnly()


def layer_of(device: str) -> qao.QuantLinear:
    torch.manual_seed(0)
    return qao.QuantLinear.from_linear(nn.Linear(512, 64, device=device), SCHEME)


def test_layers_in_the_context(device: str) -> None:
    layer, x = layer_of(device), torch.randn(130, 512, device=device)
    with qao.ops.batch_invariant():
        inside = layer(x)
        assert all(torch.equal(layer(x[:m]), inside[:m]) for m in (1, 5, 40))
        with qao.ops.batch_invariant(False):
            assert not MODE.on
        assert MODE.on
    assert not MODE.on
    with pytest.raises(ValueError, match="out"), qao.ops.batch_invariant():
        raise ValueError("out")
    assert not MODE.on


def captured(function: Any, *arguments: Any) -> list[tuple[Any, ...]]:
    """The arguments of the GEMMs in the graph of torch.compile."""
    calls: list[tuple[Any, ...]] = []

    def backend(graph: torch.fx.GraphModule, _: Any) -> Any:
        calls.extend(node.args for node in graph.graph.nodes if "int8_mm" in str(node.target))
        return graph.forward

    torch.compile(function, backend=backend, fullgraph=True)(*arguments)
    return calls


def test_graphs_hold_the_mode() -> None:
    layer, x = layer_of("cpu"), torch.randn(5, 512)

    def within(x: Tensor) -> Tensor:
        with qao.ops.batch_invariant():
            return layer(x)

    with torch.no_grad():
        assert captured(within, x)[0][-1] is True
        assert len(captured(layer, x)[0]) == 4
        with qao.ops.batch_invariant():
            assert captured(layer, x)[0][-1] is True
            program = torch.export.export(layer, (x,))
        assert "True" in program.graph_module.code
        graphs = []

        def backend(graph: torch.fx.GraphModule, example: list[Tensor]) -> Callable[..., Any]:
            graphs.append(graph)
            return graph.forward

        compiled = torch.compile(layer, backend=backend, fullgraph=True)
        for _ in range(2):  # a graph for either, and no more
            assert torch.equal(compiled(x), layer(x))
            with qao.ops.batch_invariant():
                assert torch.equal(compiled(x), layer(x))
        assert ["True" in graph.code for graph in graphs] == [False, True]


def test_gradients_and_transforms(device: str) -> None:
    layer, x = layer_of(device), torch.randn(6, 512, device=device)
    with qao.ops.batch_invariant():
        y = layer(x)
        assert torch.equal(torch.vmap(layer)(x), y)
        assert torch.equal(torch.func.vmap(torch.func.vmap(layer))(x.view(2, 3, 512)), y.view(2, 3, -1))
        wanted = x.clone().requires_grad_()
        assert torch.equal(layer(wanted), y)
        layer(wanted).sum().backward()
        jvp, _ = torch.func.jvp(layer, (x,), (x,))
        assert torch.equal(jvp, y)
    assert wanted.grad is not None and wanted.grad.shape == x.shape


@every_scheme
def test_opcheck(scheme: Scheme) -> None:
    weight = scheme.make_weight(40, 64, scheme.few_formats[0])
    arguments = torch.randn(3, 64), *weight.operands, None, *weight.arguments
    utilities = "test_schema", "test_faketensor"
    torch.library.opcheck(scheme.op, arguments, {"batch_invariant": True}, test_utils=utilities)


# ---- plans -----------------------------------------------------------------------------------------------------------

FORMATS = [("float", "int4"), ("float", "int8"), ("float", "fp8"), ("float", "fp4"), ("int8", "int4"), ("fp8", "fp8"),
           ("fp8", "int4")]  # fmt: skip
GPUS = [(80, 108, 166912), (89, 128, 101376), (90, 132, 232448)]


def chip_of(gpu: tuple[int, ...]) -> Any:
    names = "compute_capability", "num_sms", "shared_bytes_per_cta"
    return pytest.importorskip("qao._host").Gpu(**dict(zip(names, gpu, strict=True)))


@pytest.mark.parametrize("gpu", GPUS, ids=lambda gpu: f"sm{gpu[0]}")
def test_whole_sums_have_the_plans_of_others(gpu: tuple[int, ...]) -> None:
    _host, chip = pytest.importorskip("qao._host"), chip_of(gpu)
    for m, n, k in ((1, 4096, 4096), (16, 1024, 8192), (300, 1024, 131071), (17, 64, 131072), (5000, 28672, 4096)):
        texts = []
        for invariant in (False, True):
            problem = _host.Problem(m=m, n=n, k=k, x="int8", weight="int8", batch_invariant=invariant)
            texts.append(_host.plan(problem, chip)["text"])
        assert (texts[0] == texts[1]) == (k <= 131071), (m, n, k)


@pytest.mark.parametrize("gpu", GPUS, ids=lambda gpu: f"sm{gpu[0]}")
@pytest.mark.parametrize("x,weight", FORMATS)
def test_one_body_serves_any_number_of_rows(x: str, weight: str, gpu: tuple[int, ...]) -> None:
    _host, chip = pytest.importorskip("qao._host"), chip_of(gpu)
    for n, k in ((4096, 4096), (28672, 4096), (1024, 8192), (100, 72)):
        plans = []
        for m in (1, 8, 17, 64, 300, 5000):
            group_size = 32 if weight == "fp4" else 64
            problem = _host.Problem(m=m, n=n, k=k, x=x, weight=weight, group_size=group_size, batch_invariant=True,
                                    weight_aligned=k % 16 == 0, scale_dtype="bfloat16")  # fmt: skip
            plans.append(_host.plan(problem, chip))
        assert len({plan["family"] for plan in plans}) == 1
        assert {plan["split_k"] for plan in plans} == {1}
        assert not any("splits_last" in plan["text"] or "quantizes_x yes" in plan["text"] for plan in plans)
        if plans[0]["family"] != "sm90_ws":
            assert len({plan["config"] for plan in plans}) == 1

"""Graph passes of argmax, counters and outer products.

They are for GPUs. On a CPU, where results are the same, they are forced.
"""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

import pytest
import qao
import torch
from qao.inductor import report
from qao.inductor.outer import multiply_outer_products
from test_inductor import compiled, fresh, places, randn  # noqa: F401  # a fixture of every test
from torch import Tensor
from torch.fx import Graph
from torch.fx.experimental.proxy_tensor import make_fx

aten: Any = torch.ops.aten
SPLIT = "argmax in two steps"


@pytest.fixture(autouse=True)
def on_gpu(monkeypatch: pytest.MonkeyPatch) -> None:
    for name in ("argmax", "counters", "outer"):
        monkeypatch.setattr(f"qao.inductor.{name}.on_gpu", lambda node: True)


# ---- argmax ----------------------------------------------------------------------------------------------------------


def logits(rows: int, columns: int, dtype: torch.dtype, device: str) -> list[Tensor]:
    """Rows with one maximum or many, with Inf and NaN in some columns, in the last one, and in all."""
    plain = randn(rows, columns, seed=rows, dtype=dtype)
    some = torch.rand(rows, columns, generator=torch.Generator().manual_seed(rows)) < 3e-4
    inf, nan = float("inf"), float("nan")
    cases = [plain, (plain > 0).to(dtype)]
    cases += [plain.masked_fill(some, value) for value in (9, inf, -inf, nan)]
    cases += [torch.full_like(plain, value) for value in (0, -inf, nan)]
    cases += [plain.index_fill(-1, torch.tensor([columns - 1]), value) for value in (inf, nan)]
    cases += [plain.index_fill(-1, torch.tensor([columns - 1]), nan).masked_fill(some, inf)]
    return [case.to(device) for case in cases]


@pytest.mark.parametrize("columns", [128256, 151936, 49152, 32000, 16411])
def test_argmax_of_few_rows(columns: int, device: str) -> None:
    """The index that torch returns. A prime number of columns stays in one step."""

    def both(inputs: tuple[Tensor, ...]) -> list[Tensor]:
        return [x.argmax(-1, keepdim=keepdim) for x in inputs for keepdim in (False, True)]

    dtypes = torch.float32, torch.bfloat16
    kinds = [logits(rows, columns, dtype, device) for rows in (1, 4) for dtype in dtypes]
    function = qao.compile(both, fullgraph=True, dynamic=False)
    with report.collected() as seen, torch.inference_mode():
        for number, inputs in enumerate(zip(*kinds, strict=True)):
            torch.testing.assert_close(function(inputs), both(inputs), rtol=0, atol=0, msg=f"case {number}")
    if columns == 16411:
        assert not seen.replaced
        assert list(seen.left) == ["argmax: no number of 256 to 2048 divides 16411 columns"]
    else:
        assert {what: len(at) for what, at in seen.replaced.items()} == {SPLIT: 8} and not seen.left


def test_argmax_of_other_shapes(device: str) -> None:
    """Other dimensions, one dimension, and rows that are not contiguous."""

    def chosen(x: Tensor, y: Tensor) -> list[Tensor]:
        return [x[:, -1].argmax(-1), x[:, -1:].argmax(2), x[0, 0].argmax(0), x[0, 0].argmax(-1, True), y.t().argmax(1)]

    x, y = randn(2, 3, 16384, seed=1, device=device), randn(32768, 2, seed=2, device=device)
    found, seen = compiled(chosen, x, y)
    torch.testing.assert_close(found, chosen(x, y), rtol=0, atol=0)
    assert {what: len(at) for what, at in seen.replaced.items()} == {SPLIT: 5}


def test_argmax_that_stays(device: str) -> None:
    """Many rows, few columns, another dimension or all, float64."""

    def chosen(x: Tensor) -> list[Tensor]:
        few = x[:2]
        return [x.argmax(-1), few[:, :16376].argmax(-1), few.argmax(0), few.argmax(), few.double().argmax(-1)]

    x = randn(65, 16384, seed=1, device=device)
    found, seen = compiled(chosen, x)
    torch.testing.assert_close(found, chosen(x), rtol=0, atol=0)
    assert not places(seen) and not seen.left


def test_argmax_of_dynamic_sizes_stays() -> None:
    x = randn(3, 16384, seed=1)
    found, seen = compiled(lambda x: x.argmax(-1), x, dynamic=True)
    assert torch.equal(found, x.argmax(-1)) and not places(seen)


# ---- counters --------------------------------------------------------------------------------------------------------


def counts(function: Callable[..., Any], device: str, *counters: Tensor) -> tuple[list[Any], dict[str, int], Graph]:
    """What four compiled steps return, the counts of what was replaced, and the graph. Counters are those of eager."""
    graphs: list[Graph] = []
    step = qao.compile(function, fullgraph=True, options={"post_grad_custom_post_pass": graphs.append})
    eager, ours = ([counter.to(device, copy=True) for counter in counters] for _ in range(2))
    with report.collected() as seen, torch.inference_mode():
        found, expected = ([each(values) for _ in range(4)] for each, values in ((step, ours), (function, eager)))
    torch.testing.assert_close((found, ours), (expected, eager), rtol=0, atol=0)
    (graph,) = graphs
    return found, {what: len(at) for what, at in seen.replaced.items()}, graph


def test_counters_of_a_step_are_one_kernel(device: str) -> None:
    """One for each amount. Counters of later layers are read behind the increments of earlier ones."""

    def step(counters: list[Tensor]) -> list[Tensor]:
        read = []
        for index, counter in enumerate(counters):
            read.append(torch.arange(3, device=device) + counter)
            counter.add_(1 if index < 3 else 5)
        return read

    counters = [torch.tensor(7), torch.tensor([8]), torch.tensor(9), torch.tensor(10), torch.tensor(11)]
    _, replaced, graph = counts(step, device, *counters)
    assert replaced == {"one increment of 3 counters": 3, "one increment of 2 counters": 2}
    in_place = graph.find_nodes(op="call_function", target=aten._foreach_add_.Scalar)
    assert [len(node.args[0]) for node in in_place] == [3, 2]
    assert not graph.find_nodes(op="call_function", target=aten.copy_.default)


def test_increments_that_stay(device: str) -> None:
    """One of its kind, of several elements, of float counters, and those that something else reads."""

    def step(counters: list[Tensor]) -> Tensor:
        first, second, narrow, wide, wider, *floats = counters
        for counter in (narrow, wide, wider, *floats):
            counter.add_(1)
        first.add_(2)
        y = first + second
        second.add_(2)
        return y

    counters = [torch.tensor(n) for n in (1, 2)] + [torch.tensor(3, dtype=torch.int32)]
    counters += [torch.tensor([4, 5])] * 2 + [torch.tensor(6.0)] * 2
    _, replaced, graph = counts(step, device, *counters)
    assert not replaced and not graph.find_nodes(op="call_function", target=aten._foreach_add.Scalar)


def test_tokens_with_a_static_cache(device: str) -> None:
    transformers: Any = pytest.importorskip("transformers")
    from test_compiled_generate import quantized

    if not isinstance(getattr(transformers.cache_utils.StaticLayer(1), "cumulative_length", None), Tensor):
        pytest.skip("this transformers has no counters in a static cache")
    model = quantized("llama", device)
    ids = torch.randint(96, (1, 9), generator=torch.Generator().manual_seed(1)).to(device)
    graphs: list[Graph] = []

    def step(token: Tensor, cache: Any) -> Tensor:
        return model(token, past_key_values=cache).logits[:, -1:].argmax(-1)  # type: ignore[no-any-return]

    def generate(step: Callable[..., Tensor]) -> tuple[list[int], list[int]]:
        cache = transformers.StaticCache(config=model.config, max_cache_len=32)
        tokens = [model(ids, past_key_values=cache).logits[:, -1:].argmax(-1)]
        for _ in range(5):
            tokens.append(step(tokens[-1], cache).clone())
        return torch.cat(tokens).flatten().tolist(), [int(layer.cumulative_length) for layer in cache.layers]

    with torch.inference_mode(), report.collected() as seen:
        expected = generate(step)
        found = generate(qao.compile(step, fullgraph=True, options={"post_grad_custom_post_pass": graphs.append}))
    assert found == expected and found[1] == [14, 14] and len(set(found[0])) > 1
    assert seen.replaced["one increment of 2 counters"] == [f"model.layers.{i}.self_attn" for i in range(2)]
    assert [len(graph.find_nodes(op="call_function", target=aten._foreach_add_.Scalar)) for graph in graphs] == [1]


# ---- outer products --------------------------------------------------------------------------------------------------


def test_outer_products_are_multiplied(device: str) -> None:
    """With the bits of the product. Other products stay. On a CPU Inductor replaces them itself."""

    def products(frequencies: Tensor, positions: Tensor) -> list[Tensor]:
        return [frequencies[:, :, None] @ positions[:, None], frequencies.T @ positions, frequencies @ positions.T]

    given = [randn(1, 7, seed=seed, device=device) for seed in (1, 2)]
    module, seen = make_fx(products, tracing_mode="fake")(*given), report.Report()
    multiply_outer_products(module.graph, seen)
    module.recompile()
    assert len(seen.replaced["multiplication of an outer product"]) == 2
    assert len(module.graph.find_nodes(op="call_function", target=aten.mm.default)) == 1
    for got, expected in zip(module(*given), products(*given), strict=True):
        assert torch.equal(got, expected)

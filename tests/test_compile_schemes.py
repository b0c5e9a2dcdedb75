"""torch.compile over layers of every scheme: one graph, no break, no extra compilations.

All schemes stand side by side in one model, so that a mode or dtype costs one compilation. Counted with
``torch._dynamo.utils.counters``. A compilation that hangs ends the run with a traceback.
"""

from __future__ import annotations

import copy
import faulthandler
import json
import os
import subprocess
import sys
from collections.abc import Callable, Iterator
from contextlib import AbstractContextManager, nullcontext
from pathlib import Path
from typing import Any

import pytest
import qao
import torch
from ops_support import DTYPES, SHORT, randn
from torch import Tensor, nn
from torch._dynamo.utils import counters

WATCHDOG_S = 300
MODES = ("default", "reduce-overhead", "max-autotune", "max-autotune-no-cudagraphs")
SCHEMES: dict[str, qao.Scheme] = {
    "int4": qao.Int4WeightOnly(),
    "int4_symmetric": qao.Int4WeightOnly(group_size=32, symmetric=True),
    "int8": qao.Int8WeightOnly(),
    "fp8": qao.Float8WeightOnly(),
    "fp8_block": qao.Float8WeightOnly(granularity="block"),
    "int8_int8": qao.Int8DynamicActivationInt8Weight(),
    "int8_int8_asymmetric": qao.Int8DynamicActivationInt8Weight(symmetric_activations=False),
    "int8_int4": qao.Int8DynamicActivationInt4Weight(group_size=32),
    "int8_int4_asymmetric": qao.Int8DynamicActivationInt4Weight(symmetric_activations=False),
    "fp8_fp8": qao.Float8DynamicActivationFloat8Weight(),
    "fp8_fp8_tensor": qao.Float8DynamicActivationFloat8Weight(granularity="tensor"),
    "fp8_fp8_block": qao.Float8DynamicActivationFloat8Weight(granularity="block"),
    "fp8_fp8_static": qao.Float8StaticActivationFloat8Weight(activation_scale=0.02),
    "fp8_int4": qao.Float8DynamicActivationInt4Weight(),
}
ONE_OF_EACH = ("int4", "int8", "fp8", "int8_int8", "int8_int4_asymmetric", "fp8_fp8", "fp8_int4")


@pytest.fixture(autouse=True)
def fresh_dynamo() -> Iterator[None]:
    torch._dynamo.reset()
    counters.clear()
    faulthandler.dump_traceback_later(WATCHDOG_S, exit=True)
    yield
    faulthandler.cancel_dump_traceback_later()
    torch._dynamo.reset()


class Mlp(nn.Module):
    def __init__(self, scheme: qao.Scheme | None) -> None:
        super().__init__()
        with torch.random.fork_rng():
            torch.manual_seed(0)
            self.up, self.down = nn.Linear(64, 96), nn.Linear(96, 64, bias=False)
        if scheme is not None:
            qao.quantize_(self, scheme, progress=False)

    def forward(self, x: Tensor) -> Tensor:
        return x + self.down(torch.relu(self.up(x)))


class SideBySide(nn.Module):
    """The same block under every scheme."""

    def __init__(self) -> None:
        super().__init__()
        self.blocks = nn.ModuleDict({name: Mlp(scheme) for name, scheme in SCHEMES.items()})

    def forward(self, x: Tensor) -> dict[str, Tensor]:
        return {name: block(x) for name, block in self.blocks.items()}


@pytest.fixture(scope="module")
def on_cpu() -> SideBySide:
    return SideBySide()


@pytest.fixture
def model(on_cpu: SideBySide, device: str) -> SideBySide:
    return on_cpu.to(device)


def check_same(actual: dict[str, Tensor], expected: dict[str, Tensor]) -> None:
    """The operators get the same inputs; the compiled addition between them is rounded once."""
    for name, y in expected.items():
        assert actual[name].dtype == y.dtype and actual[name].shape == y.shape, name
        bound = torch.finfo(y.dtype).eps * y.abs().max() if y.numel() else 0
        assert ((actual[name] - y).abs() <= bound).all(), name


def check_counts(most: int) -> None:
    """Graphs compiled since the test began; none of them because of a break."""
    assert not counters["graph_break"], dict(counters["graph_break"])
    assert 1 <= counters["stats"]["unique_graphs"] <= most


def x_of(m: int, device: str, dtype: torch.dtype = torch.float32) -> Tensor:
    return randn(m, 64, dtype=dtype, device=device, seed=m)


# ---- modes, dtypes, contexts -----------------------------------------------------------------------------------------

CONTEXTS: dict[str, Callable[[str], AbstractContextManager[Any]]] = {
    "no_grad": lambda device: torch.no_grad(),
    "inference_mode": lambda device: torch.inference_mode(),
    "autocast": lambda device: torch.autocast(device, torch.bfloat16),
    "grad": lambda device: nullcontext(),
}
# Every mode with every dtype and every context, though not every triple.
COVERING = [
    (mode, dtype, list(CONTEXTS)[(i + j) % len(CONTEXTS)])
    for i, mode in enumerate(MODES)
    for j, dtype in enumerate(DTYPES)
]


@pytest.mark.parametrize("mode, dtype, context", COVERING, ids=lambda value: SHORT.get(value, value))
def test_a_changing_m_costs_one_more_graph(
    mode: str, dtype: torch.dtype, context: str, model: SideBySide, device: str
) -> None:
    if device == "cpu" and mode != MODES[0] and dtype is not DTYPES[MODES.index(mode) % len(DTYPES)]:
        pytest.skip("modes differ on a GPU only: one dtype each")
    compiled = torch.compile(model, mode=mode, fullgraph=True)
    with CONTEXTS[context](device):
        for m in (5, 7, 64, 2, 130):
            x = x_of(m, device, dtype)
            check_same(compiled(x), model(x))
    check_counts(2)


@pytest.mark.parametrize("precision", ["highest", "high"])
def test_tf32_changes_nothing(precision: str, model: SideBySide, device: str) -> None:
    before = torch.get_float32_matmul_precision()
    x = x_of(33, device)
    with torch.no_grad():
        expected = model(x)
        try:
            torch.set_float32_matmul_precision(precision)
            check_same(torch.compile(model, fullgraph=True)(x), expected)
        finally:
            torch.set_float32_matmul_precision(before)
    check_counts(1)


def test_between_channels_last_convolutions(model: SideBySide, device: str) -> None:
    convolution = nn.Conv2d(8, 64, 1).to(device, memory_format=torch.channels_last)

    def forward(image: Tensor) -> dict[str, Tensor]:
        blocks = model(convolution(image).permute(0, 2, 3, 1))  # contiguous again: channels were last
        return {name: y.permute(0, 3, 1, 2) for name, y in blocks.items()}

    image = randn(2, 8, 4, 4, dtype=torch.float32, device=device).to(memory_format=torch.channels_last)
    with torch.no_grad():
        actual, expected = torch.compile(forward, fullgraph=True)(image), forward(image)
    for name, y in expected.items():
        # The convolution may be computed by another algorithm when compiled, and activations then cross a tie.
        assert (actual[name] - y).abs().max() <= 2.0**-5 * y.abs().max(), name
        assert actual[name].is_contiguous(memory_format=torch.channels_last), name
    check_counts(1)


# ---- sizes of M ------------------------------------------------------------------------------------------------------


def test_mark_dynamic(model: SideBySide, device: str) -> None:
    compiled = torch.compile(model, fullgraph=True)
    with torch.no_grad():
        for m in (5, 7, 2, 130):
            x = x_of(m, device)
            torch._dynamo.mark_dynamic(x, 0)
            check_same(compiled(x), model(x))
    check_counts(1)


def test_no_size_is_special_if_torch_makes_none_so(model: SideBySide, device: str) -> None:
    """torch compiles graphs for sizes 0 and 1 by default. With this disabled, one graph serves every M."""
    compiled = torch.compile(model, fullgraph=True, backend="aot_eager")
    with torch.no_grad():
        for m in (5, 0, 1, 2, 130):
            x = x_of(m, device)
            torch._dynamo.decorators.mark_unbacked(x, 0)
            check_same(compiled(x), model(x))
    check_counts(1)


@pytest.mark.parametrize("dynamic", [None, True])
def test_as_many_graphs_as_plain_linear_layers(dynamic: bool | None, model: SideBySide, device: str) -> None:
    def graphs(module: nn.Module) -> int:
        torch._dynamo.reset()
        counters.clear()
        compiled = torch.compile(module, fullgraph=True, dynamic=dynamic, backend="aot_eager")
        with torch.no_grad():
            for m in (1, 2, 7, 0, 1, 1000, 3, 0):
                compiled(x_of(m, device))
        check_counts(4)
        return counters["stats"]["unique_graphs"]

    plain = nn.Sequential(nn.Linear(64, 96), nn.ReLU(), nn.Linear(96, 64)).to(device)
    assert graphs(model) == graphs(plain)


# ---- before or after quantize_ ---------------------------------------------------------------------------------------


@pytest.mark.parametrize("in_place", [False, True], ids=["torch.compile", "Module.compile"])
def test_a_compiled_model_is_quantized_inside(in_place: bool, device: str) -> None:
    """Even after a call: the new layers are compiled at the next one."""
    model = Mlp(None).to(device)
    if in_place:
        model.compile(backend="aot_eager", fullgraph=True)
    compiled = model if in_place else torch.compile(model, backend="aot_eager", fullgraph=True)
    x = x_of(3, device)
    with torch.no_grad():
        before = compiled(x)
        report = qao.quantize_(compiled, qao.Int4WeightOnly(), progress=False)
        assert [row.status for row in report.rows] == ["quantized"] * 2
        after = compiled(x)
        assert torch.equal(after, model.forward(x)) and not torch.equal(after, before)
    check_counts(2)


@pytest.mark.parametrize("inside", [False, True])
def test_a_linear_compiled_by_itself_is_left_and_says_so(inside: bool) -> None:
    """torch.compile keeps the module it was given: a replacement would never run."""
    compiled = torch.compile(nn.Linear(64, 64), backend="aot_eager")
    model = nn.Sequential(compiled) if inside else compiled
    with pytest.warns(UserWarning, match="quantize first, then compile"):
        (row,) = qao.quantize_(model, qao.Int8WeightOnly(), progress=False).rows
    assert row.status == "left" and isinstance(compiled._orig_mod, nn.Linear)


# ---- big models ------------------------------------------------------------------------------------------------------


class Layer(nn.Module):
    """A Llama-shaped decoder layer: eight tensors of norms and rotations next to seven linear layers."""

    def __init__(self, width: int, heads: int) -> None:
        super().__init__()
        self.heads = heads
        self.q, self.k, self.v, self.o = (nn.Linear(width, width, bias=False) for _ in range(4))
        self.gate, self.up = (nn.Linear(width, 3 * width, bias=False) for _ in range(2))
        self.down = nn.Linear(3 * width, width, bias=False)
        self.attention_norm, self.mlp_norm = nn.RMSNorm(width), nn.RMSNorm(width)

    def forward(self, x: Tensor) -> Tensor:
        normal = self.attention_norm(x)
        q, k, v = (f(normal).unflatten(-1, (self.heads, -1)).transpose(1, 2) for f in (self.q, self.k, self.v))
        y = nn.functional.scaled_dot_product_attention(q, k, v, is_causal=True)
        x = x + self.o(y.transpose(1, 2).flatten(2))
        normal = self.mlp_norm(x)
        return x + self.down(nn.functional.silu(self.gate(normal)) * self.up(normal))


def decoder(layers: int, width: int = 64, scheme: qao.Scheme | None = None) -> nn.Sequential:
    model = nn.Sequential(*(Layer(width, 2) for _ in range(layers))).bfloat16()
    if scheme is not None:
        qao.quantize_(model, scheme, progress=False)
    return model


def compile_seconds(model: nn.Module, x: Tensor) -> float:
    """CPU time of a first call, with no help from caches, that of the compilers it starts included."""
    torch._dynamo.reset()
    before = os.times()
    with torch.no_grad(), torch._inductor.utils.fresh_cache():
        torch.compile(model, fullgraph=True)(x)
    return sum(os.times()[:4]) - sum(before[:4])


def in_fresh_process(code: str) -> str:
    """The output of ``code`` without pytest, which listens to torch's trace and so causes it to be written."""
    environment = os.environ | {"PYTHONPATH": os.pathsep.join((str(Path(__file__).parent), *sys.path))}
    command = [sys.executable, "-c", code]
    result = subprocess.run(command, env=environment, capture_output=True, text=True, timeout=1200, check=False)
    assert result.returncode == 0, result.stderr
    return result.stdout


def check_costs(costs: dict[str, float], most: float) -> None:
    """As a multiple of the float model's."""
    ratios = {word: cost / costs["float"] for word, cost in costs.items() if word != "float"}
    print(", ".join(f"{word} {ratio:.3f}" for word, ratio in ratios.items()))
    assert len(ratios) == 7 and max(ratios.values()) <= most, ratios


COMPILE_COSTS = """
import json, os
os.environ["TORCHINDUCTOR_COMPILE_THREADS"] = "1"  # compilers are children of this process, which can read their time
from test_compile_schemes import *

words = ("float", "int4", "int8", "fp8", "int8_int8", "int8_int4", "fp8_fp8", "fp8_int4")
x = randn(1, 8, 64, dtype=torch.bfloat16, device="cpu")
for word in words:  # what a process does once
    compile_seconds(decoder(1, scheme=SCHEMES.get(word)), x)
"""


@pytest.mark.slow
def test_compiles_no_slower_than_the_float_model() -> None:
    """32 layers, in CPU time; the minimum of three alternating runs, since load only adds time."""
    faulthandler.dump_traceback_later(4 * WATCHDOG_S, exit=True)
    code = """
seconds = dict.fromkeys(words, 1e9)
for _ in range(3):
    for word in words:
        seconds[word] = min(seconds[word], compile_seconds(decoder(32, scheme=SCHEMES.get(word)), x))
print(json.dumps(seconds))
"""
    check_costs(json.loads(in_fresh_process(COMPILE_COSTS + code)), 1.0)


@pytest.mark.slow
def test_compiling_takes_fewer_calls_than_of_the_float_model() -> None:
    """The number of Python and C function calls, which does not depend on the machine's load."""
    code = """
import cProfile
calls = {}
for word in words:
    model, profile = decoder(4, scheme=SCHEMES.get(word)), cProfile.Profile()
    profile.runcall(compile_seconds, model, x)
    calls[word] = sum(entry.callcount for entry in profile.getstats())
print(json.dumps(calls))
"""
    check_costs(json.loads(in_fresh_process(COMPILE_COSTS + code)), 0.97)


@pytest.mark.parametrize("name", SCHEMES)
def test_graph_inputs_of_a_layer(name: str) -> None:
    layer = Mlp(SCHEMES[name]).up
    seen: list[int] = []

    def backend(graph: torch.fx.GraphModule, inputs: Any) -> Any:
        seen.append(sum(node.op == "placeholder" for node in graph.graph.nodes) - 1)  # all but x
        return graph

    with torch.no_grad():
        torch.compile(layer, backend=backend, fullgraph=True)(x_of(3, "cpu"))
    assert seen == [len(list(layer.parameters()))] and seen[0] <= 4


@pytest.mark.extended
def test_more_than_3000_parameters() -> None:
    """780 layers of four tensors."""
    layer = Mlp(SCHEMES["int8_int8_asymmetric"]).up
    model = nn.ModuleList(copy.deepcopy(layer) for _ in range(780))
    assert sum(1 for _ in model.parameters()) > 3000

    def forward(x: Tensor) -> Tensor:
        y = x
        for each in model:
            y = each(y)[..., :64]
        return y

    x = x_of(3, "cpu")
    with torch.no_grad():
        y = torch.compile(forward, fullgraph=True, backend="aot_eager")(x)
        assert torch.equal(y, forward(x))
    check_counts(1)


@pytest.mark.slow
def test_80_layers_at_the_default_recursion_limit() -> None:
    code = """
import sys, torch, qao
assert sys.getrecursionlimit() == 1000
from test_compile_schemes import SCHEMES, check_counts, decoder
model = decoder(80, scheme=SCHEMES["int8_int4_asymmetric"])
x = torch.randn(1, 8, 64).bfloat16()
with torch.no_grad():
    assert torch.compile(model, fullgraph=True)(x).isfinite().all()
check_counts(1)
"""
    in_fresh_process(code)

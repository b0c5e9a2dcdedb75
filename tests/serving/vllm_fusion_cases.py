"""qao's graph passes on graphs of vLLM's operators; run by tests/test_vllm.py in a separate process."""

from __future__ import annotations

import copy
from typing import Any

import vllm_support  # noqa: F401  # first: it makes vLLM importable

# isort: split

import pytest
import qao
import torch
import vllm.compilation.backends as backends
from fused_support import on_amx
from qao.inductor.report import Report
from qao.integrations.vllm import fusion
from torch import Tensor, nn
from torch._inductor.custom_graph_pass import CustomGraphPass
from vllm import ir

K, N = 128, 192
ops: Any = torch.ops.qao


def randn(*size: int, seed: int) -> Tensor:
    return torch.randn(*size, generator=torch.Generator().manual_seed(seed)).bfloat16()


class _Passes(CustomGraphPass):
    def __init__(self) -> None:
        self.report = Report()

    def __call__(self, graph: torch.fx.Graph) -> None:
        fusion.run(graph, self.report)

    def uuid(self) -> Any:
        return None


class Block(nn.Module):
    """Part of a decoder between two attentions: norms in vLLM's operators, joined weights of gate and up."""

    def __init__(self, scheme: Any, weight: bool, plain: bool) -> None:
        super().__init__()
        self.o, self.qkv = nn.Linear(K, K, bias=False), nn.Linear(K, 3 * K)
        self.gate_up, self.down = nn.Linear(K, 2 * N, bias=False), nn.Linear(N, K, bias=False)
        weights = [randn(K, seed=seed) for seed in (1, 2)] if weight else [None, None]
        self.weights, self.plain = weights, plain
        for parameter in self.parameters():
            nn.init.normal_(parameter, std=0.1)
        self.bfloat16()
        qao.quantize_(self, scheme, progress=False)

    def norm(self, x: Tensor, residual: Tensor, index: int) -> tuple[Tensor, Tensor]:
        if self.plain:
            total = x + residual
            return ir.ops.rms_norm(total, self.weights[index], 1e-5), total
        return ir.ops.fused_add_rms_norm(x, residual, self.weights[index], 1e-5)

    def forward(self, x: Tensor, residual: Tensor) -> tuple[Tensor, Tensor]:
        h, residual = self.norm(self.o(x), residual, 0)
        both = self.gate_up(h)
        h = nn.functional.silu(both[..., :N]) * both[..., N:]
        h, residual = self.norm(self.down(h), residual, 1)
        return self.qkv(h), residual


def fused(block: Any, *calls: tuple[Tensor, ...]) -> tuple[list[Any], dict[str, int]]:
    """The results of calls of one compiled graph, and what the passes replaced in it."""
    torch._dynamo.reset()
    passes = _Passes()
    compiled = torch.compile(block, options={"post_grad_custom_post_pass": passes}, dynamic=True, fullgraph=True)
    with torch.inference_mode(), torch._inductor.config.patch(force_disable_caches=True):
        results = [compiled(*inputs) for inputs in calls]
    return results, {what: len(places) for what, places in passes.report.replaced.items()}


QUANTIZED = {"one operator of RMSNorm and quantization": 2, "one operator of SiLU gate and quantization": 1}
CASES = {
    "int8_int8": (qao.Int8DynamicActivationInt8Weight(), QUANTIZED),
    "fp8_fp8": (qao.Float8DynamicActivationFloat8Weight(), QUANTIZED),
    "blocks": (qao.Float8DynamicActivationFloat8Weight(granularity="block"), {}),
    "int8": (qao.Int8WeightOnly(), {}),
    "int4": (
        qao.Int4WeightOnly(group_size=32),
        {
            "one operator of RMSNorm, 1 product, SiLU gate (int4_mm)": 1,
            "one operator of RMSNorm, 1 product (int4_mm)": 1,
        },
    ),
}


@pytest.fixture(autouse=True)
def on_a_gpu(monkeypatch: pytest.MonkeyPatch) -> None:
    """The operators are right on a CPU too, where vLLM's graphs stay as they are."""
    for place in ("quantizers.on_gpu", "norms.on_hopper"):
        monkeypatch.setattr(f"qao.inductor.{place}", lambda node: True)


@pytest.mark.parametrize(
    ("case", "weight", "plain"),
    [*((case, True, False) for case in CASES), ("int8_int8", False, True), ("int4", False, True), ("int4", True, True)],
)
def test_norms_and_gates_become_part_of_the_operators(case: str, weight: bool, plain: bool) -> None:
    scheme, expected = CASES[case]
    torch.manual_seed(0)
    block = Block(scheme, weight, plain)
    calls = [(randn(tokens, K, seed=3), randn(tokens, K, seed=4)) for tokens in (3, 40)]
    results, found = fused(block, *calls)
    assert found == expected
    for (x, residual), result in zip(calls, results, strict=True):
        with torch.inference_mode():
            eager = block(x, residual)
            exact = qao.dequantize_(copy.deepcopy(block)).double()(x.double(), residual.double())
        assert result[0].shape == eager[0].shape and result[0].dtype == eager[0].dtype
        for one, other, right in zip(result, eager, exact, strict=True):
            error, of_eager = ((each.double() - right).norm() for each in (one, other))
            assert error <= (1.3 if on_amx() else 1.2) * of_eager and of_eager < 0.1 * right.norm()


def test_a_norm_that_a_router_reads_too_stays() -> None:
    linear = nn.Sequential(nn.Linear(K, N)).bfloat16()
    qao.quantize_(linear, qao.Int8DynamicActivationInt8Weight(), progress=False)
    router = randn(8, K, seed=5)

    def both(x: Tensor, residual: Tensor) -> tuple[Tensor, Tensor, Tensor]:
        h, residual = ir.ops.fused_add_rms_norm(x, residual, None, 1e-5)
        return linear(h), h @ router.t(), residual

    inputs = randn(3, K, seed=1), randn(3, K, seed=2)
    (found,), replaced = fused(both, inputs)
    assert not replaced
    for one, other in zip(found, both(*inputs), strict=True):
        torch.testing.assert_close(one, other, rtol=0.02, atol=0.02)


def test_the_norm_of_a_part_of_x_stays() -> None:
    linear = nn.Sequential(nn.Linear(K, N)).bfloat16()
    qao.quantize_(linear, qao.Int8WeightOnly(), progress=False)
    _, replaced = fused(lambda x: linear(ir.ops.rms_norm(x, None, 1e-5, 64)), (randn(3, K, seed=1),))
    assert not replaced


def test_each_compiled_model_with_operators_of_qao_runs_the_passes() -> None:
    assert getattr(backends.VllmBackend.configure_post_pass, "_of_qao", False)

    class Backend:
        def __init__(self, function: Any) -> None:
            self.graph = torch.fx.symbolic_trace(function)
            self.pass_manager, self.inductor_config = backends.PostGradPassManager(), {}

    configure = fusion._with_passes(lambda self: None)
    ours, others = Backend(lambda x, w, s: ops.int8_mm(x, w, s, None)), Backend(lambda x, w, s: x @ w * s)
    configure(ours)
    configure(others)
    (added,) = ours.pass_manager.passes
    assert isinstance(added.uuid(), str) and added.uuid() == fusion._pass().uuid()
    assert not others.pass_manager.passes and not others.inductor_config

"""QuantExperts of fused experts decorated as in transformers, on a CPU and on a GPU."""

from __future__ import annotations

from typing import Any

import pytest
import qao
import torch
import torch.nn.functional as F
from experts_support import SCHEMES
from ops_schemes import generator
from qao.nn import QuantExperts
from torch import Tensor, nn

E, K, INNER, TOP = 6, 128, 96, 2


class Fused(nn.Module):
    """What ``use_experts_implementation`` of transformers 5 leaves of a class."""

    def __init__(self, device: str, dtype: torch.dtype) -> None:
        super().__init__()
        self.has_gate, self.has_bias, self.is_transposed, self.is_concatenated = True, False, False, True
        self.num_experts, self.act_fn = E, nn.SiLU()
        for name, shape in (("gate_up_proj", (E, 2 * INNER, K)), ("down_proj", (E, K, INNER))):
            weight = torch.randn(shape, generator=generator(len(name))) * 0.1
            self.register_parameter(name, nn.Parameter(weight.to(device, dtype)))

    def _apply_gate(self, gate_up: Tensor) -> Tensor:
        gate, up = gate_up.chunk(2, -1)
        return F.silu(gate) * up


def quantized(scheme: Any, device: str, dtype: torch.dtype = torch.float32) -> tuple[Any, Any]:
    model = nn.ModuleDict({"experts": Fused(device, dtype)})
    report = qao.quantize_(model, scheme, progress=False)
    assert [row.status for row in report.rows] == ["quantized"] * 2 and report.coverage == 1 and not report.problems
    assert isinstance(model["experts"], QuantExperts) and model["experts"].up.qweight.device.type == device
    return model["experts"], report


def routed(device: str, tokens: int = 9, seed: int = 0) -> tuple[Tensor, Tensor, Tensor]:
    """x, experts and their weights; the last number belongs to an expert of another rank."""
    g = generator(seed)
    x, weights = torch.randn(tokens, K, generator=g), torch.rand(tokens, TOP, generator=g)
    index = torch.rand(tokens, E + 1, generator=g).topk(TOP).indices
    return x.to(device), index.to(device), weights.to(device)


def exact(experts: Any, x: Tensor, index: Tensor, weights: Tensor) -> Tensor:
    """In float64, of the dequantized weights."""
    up, down = (p.dequantize(torch.float64) for p in (experts.up, experts.down))
    chosen = F.one_hot(index, E + 1)[..., :E].double()  # [T, k, E]
    gate, value = torch.einsum("enk,tk->ten", up, x.double()).chunk(2, -1)
    each = torch.einsum("ekn,ten->tek", down, F.silu(gate) * value)
    return torch.einsum("tje,tj,tek->tk", chosen, weights.double(), each)


def distance(a: Tensor, b: Tensor) -> float:
    return ((a.double() - b).norm() / b.norm()).item()


def allowed(scheme: Any, device: str) -> float:
    """Of two products, relative to the norm. A GPU's tensor cores cut off float32 sums, by up to 2^-21 of the largest
    term in each of some ten steps. Rounding x to e4m3 is an error of up to 2^-4 in each product, 0.036 on average; to
    int8 at most 0.015 here."""
    if scheme.activations == "float":
        return 1e-6 if device == "cpu" else 2.0**-18
    return 0.072 if scheme.activations == "fp8" else 0.03


@pytest.mark.parametrize("scheme", SCHEMES, ids=str)
def test_they_compute_what_their_dequantized_weights_do(scheme: Any, device: str) -> None:
    experts, _ = quantized(scheme, device)
    for tokens in (1, 9, 200):
        x, index, weights = routed(device, tokens)
        with torch.no_grad():
            y = experts(x, index, weights)
            assert distance(y, exact(experts, x, index, weights)) < allowed(scheme, device)
            assert not experts(x, torch.full_like(index, E), weights).any()


@pytest.mark.parametrize("scheme", SCHEMES, ids=str)
def test_gradients_reach_x_and_weights_and_are_the_same_in_every_run(scheme: Any, device: str) -> None:
    experts, _ = quantized(scheme, device)
    x, index, weights = routed(device)
    x.requires_grad_(), weights.requires_grad_()
    grad = torch.randn(x.shape, generator=generator(3)).to(device)

    def gradients(y: Tensor) -> tuple[Tensor, ...]:
        return torch.autograd.grad(y, (x, weights), grad.to(y.dtype))

    first, second = (gradients(experts(x, index, weights)) for _ in range(2))
    for own, again, truth in zip(first, second, gradients(exact(experts, x, index, weights)), strict=True):
        assert torch.equal(own, again)
        # The gate passes on the error of the first GEMM; the derivative of SiLU is at most 1.1.
        assert distance(own, truth.double()) < 4 * allowed(scheme, device)


class Clamped(Fused):
    """A gate that differs from the standard one far from zero, with an unnamed constant."""

    def _apply_gate(self, gate_up: Tensor) -> Tensor:
        gate, up = gate_up.chunk(2, -1)
        return F.silu(gate.clamp(max=50.0)) * up.clamp(-50.0, 50.0)


class Limited(Fused):
    """DeepSeek-V4's and HY-V4's."""

    def __init__(self, device: str, dtype: torch.dtype) -> None:
        super().__init__(device, dtype)
        self.swiglu_limit = 10.0

    def _apply_gate(self, gate_up: Tensor) -> Tensor:
        gate, up = gate_up.chunk(2, -1)
        return F.silu(gate.clamp(max=self.swiglu_limit)) * up.clamp(-self.swiglu_limit, self.swiglu_limit)


class GptOss(Fused):
    def __init__(self, device: str, dtype: torch.dtype) -> None:
        super().__init__(device, dtype)
        self.alpha, self.limit = 1.702, 7.0

    def _apply_gate(self, gate_up: Tensor) -> Tensor:
        gate, up = gate_up[..., ::2].clamp(max=self.limit), gate_up[..., 1::2].clamp(-self.limit, self.limit)
        return (up + 1) * gate * torch.sigmoid(self.alpha * gate)


class MiniMaxM3(GptOss):
    def _apply_gate(self, gate_up: Tensor) -> Tensor:
        gate, up = gate_up.chunk(2, -1)
        gate, up = gate.clamp(max=self.limit), up.clamp(-self.limit, self.limit)
        return (up + 1) * gate * torch.sigmoid(self.alpha * gate)


class Step(GptOss):
    """Limits of what SiLU gives."""

    def _apply_gate(self, gate_up: Tensor) -> Tensor:
        gate, up = gate_up.chunk(2, -1)
        return F.silu(gate).clamp(max=self.limit) * up.clamp(-self.limit, self.limit)


class Gelu(Fused):
    def _apply_gate(self, gate_up: Tensor) -> Tensor:
        gate, up = gate_up.chunk(2, -1)
        return F.gelu(gate) * up


KNOWN = (Fused, Limited, GptOss, MiniMaxM3)


@pytest.mark.parametrize("kind", [Fused, Clamped, Limited, GptOss, MiniMaxM3, Step, Gelu])
def test_a_call_is_four_operators_and_other_gates_are_the_models_own(kind: Any, device: str) -> None:
    model = nn.ModuleDict({"experts": kind(device, torch.float32)})
    qao.quantize_(model, SCHEMES[0], progress=False)
    x, index, weights = routed(device)
    with torch.no_grad(), torch.profiler.profile(activities=[torch.profiler.ProfilerActivity.CPU]) as profile:
        model["experts"](x, index, weights)
    called = {event.key: event.count for event in profile.key_averages() if event.key.startswith("qao::")}
    assert called == {"qao::expert_sort": 1, "qao::int4_grouped_mm": 2, "qao::expert_sum": 1}
    own = [event for event in profile.events() if event.name in ("aten::silu", "aten::sigmoid", "aten::gelu")]
    assert bool(own) == (kind not in KNOWN)
    with torch.no_grad():  # gates past 50
        y = model["experts"](1e3 * x, index, weights)
        floats = model["experts"].to_float()
        rows = torch.einsum("enk,tk->ten", floats.gate_up_proj, 1e3 * x)
        each = torch.einsum("ekn,ten->tek", floats.down_proj, floats._apply_gate(rows)).double()
        truth = torch.einsum("tje,tj,tek->tk", F.one_hot(index, E + 1)[..., :E].double(), weights.double(), each)
    assert distance(y, truth) < 2.0**-16


def test_a_model_moves_to_a_gpu_and_back() -> None:
    if not torch.cuda.is_available():
        pytest.skip("torch sees no GPU")
    experts, _ = quantized(SCHEMES[0], "cpu")
    state = {name: tensor.clone() for name, tensor in experts.state_dict().items()}
    x, index, weights = routed("cuda")
    with torch.no_grad():
        y = experts.cuda()(x, index, weights)
        assert distance(y, exact(experts, x, index, weights)) < allowed(SCHEMES[0], "cuda")
    assert all(torch.equal(tensor, state[name]) for name, tensor in experts.cpu().state_dict().items())


@pytest.mark.skipif(not torch.cuda.is_available(), reason="torch sees no GPU")
@pytest.mark.parametrize("scheme", SCHEMES, ids=str)
def test_a_call_takes_memory_for_its_rows_alone(scheme: Any) -> None:
    """Of S = tokens * top_k rows: those of both products and of the gate, the gathered x, x in eight bits with its sums
    and scales; never weights, and nothing that grows with the number of experts but routing."""
    experts, _ = quantized(scheme, "cuda", torch.bfloat16)
    for tokens in (1, 64, 3000):
        x, index, weights = (t.bfloat16() if t.is_floating_point() else t for t in routed("cuda", tokens))
        rows = tokens * TOP
        values = rows * (2 * INNER + INNER + K) + tokens * K  # up, gate, down; the sum
        gathered = rows * (max(K, INNER) + 64 + max(K, INNER) // 32 * 2 + 8)
        with torch.no_grad():
            experts(x, index, weights)
            torch.cuda.synchronize()
            torch.cuda.reset_peak_memory_stats()
            before = torch.cuda.memory_allocated()
            experts(x, index, weights)
            took = torch.cuda.max_memory_allocated() - before
        # 512 bytes are the allocator's unit; a routing is three tensors and the counts of up to 64 CTAs
        assert took <= 2 * (values + gathered) + 4 * (2 * rows + 65 * (E + 1)) + 16 * 512


@pytest.mark.skipif(not torch.cuda.is_available(), reason="torch sees no GPU")
@pytest.mark.parametrize("scheme", SCHEMES, ids=str)
def test_on_a_gpu_nobody_waits_and_graphs_replay(scheme: Any) -> None:
    experts, report = quantized(scheme, "cuda", torch.bfloat16)
    hopper = torch.cuda.get_device_capability() == (9, 0)  # few rows an expert / many of them
    assert all(("sm90_ws_" if hopper else "_mma_") in str(row.kernel) for row in report.rows)
    static = [tensor.bfloat16() if tensor.is_floating_point() else tensor for tensor in routed("cuda")]
    with torch.no_grad():
        experts(*static)
        torch.cuda.synchronize()
        torch.cuda.set_sync_debug_mode("error")
        try:
            experts(*static)
        finally:
            torch.cuda.set_sync_debug_mode("default")
        graph = torch.cuda.CUDAGraph()
        with torch.cuda.graph(graph):
            y = experts(*static)
        for seed in range(1, 5):
            for tensor, new in zip(static, routed("cuda", seed=seed), strict=True):
                tensor.copy_(new)
            graph.replay()
            assert torch.equal(y, experts(*static))
            assert distance(y, exact(experts, *static)) < 0.01 + allowed(scheme, "cuda")  # bfloat16 between the GEMMs

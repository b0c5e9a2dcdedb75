"""SGLang's own fused experts with qao's grouped GEMM; run by tests/test_sglang.py."""

from __future__ import annotations

import itertools
from collections.abc import Callable
from typing import Any

import sglang_support  # noqa: F401  # first: it makes SGLang importable

# isort: split
import pytest
import torch
from fused_support import (
    DTYPE,
    SHARDS,
    STATIC,
    WIDTH,
    E,
    K,
    State,
    auto_checkpoint,
    check,
    check_rounded,
    checkpoint,
    fp8_checkpoint,
    routing,
)
from layouts import E4M3, E4M3_BLOCK, INT8
from ops_schemes import Activation
from qao.integrations.sglang import experts as qaos
from qao.integrations.sglang import layouts
from sglang.srt.layers import quantization
from sglang.srt.layers.quantization.awq.awq import AWQCPUConfig
from sglang.srt.layers.quantization.gptq import CPUGPTQConfig
from sglang_support import Experts
from torch import Tensor

TENSOR = {key: Activation("fp8", group_size=0, static_scale=scale) for key, scale in STATIC.items()}


def added(method: str, config: dict[str, Any], states: list[State], given: Any, ranks: int, **options: Any) -> Tensor:
    """The sum over processes of the results of their parts of the experts."""
    y = torch.zeros(len(given[0]), K, dtype=torch.float64)
    for rank in range(ranks):
        experts = Experts(method, config, rank, ranks, **options)
        assert experts.served
        try:
            experts.load(states)
        except RuntimeError as error:
            if method != "gptq_marlin" or "exceeds dimension size" not in str(error):
                raise
            pytest.skip("this version fails to load shards of such experts")
        part = experts(*given)
        assert part.dtype == given[0].dtype
        y += part.double()
    return y


def rounded(what: Activation) -> Callable[[Tensor], Tensor]:
    return lambda row: what.seen(row[None].to(DTYPE))[0].double()


@pytest.mark.parametrize("ranks", [1, 3])
@pytest.mark.parametrize("tokens", [1, 9])
@pytest.mark.parametrize("case", ["W4A16", "W4A16 channel", "W8A16 channel"])
def test_compressed_tensors(case: str, tokens: int, ranks: int) -> None:
    torch.manual_seed(tokens)
    config, states, dense = checkpoint(case)
    given = routing(tokens)
    check(added("compressed-tensors", config, states, given, ranks), dense, *given)


def with_order(states: list[State], group: int) -> list[State]:
    """GPTQ checkpoints state the group of each column."""
    orders = {
        key: torch.arange(k, dtype=torch.int32) // (k if group == -1 else group) for key, (_, _, k) in SHARDS.items()
    }
    return [{key: {**one, "g_idx": orders[key]} for key, one in state.items()} for state in states]


@pytest.mark.parametrize("ranks", [1, 3])
@pytest.mark.parametrize(
    ("method", "group"),
    [
        *itertools.product(["gptq_marlin", "awq_marlin", "moe_wna16 gptq", "moe_wna16 awq", "auto-round"], [32, 128]),
        ("gptq_marlin", -1),
    ],
)
def test_gptq_and_awq(method: str, group: int, ranks: int) -> None:
    kind = "awq" if "awq" in method else "gptq"
    torch.manual_seed(group)
    config, states, dense = auto_checkpoint(kind, group, packing_format="auto_round:auto_gptq")
    states = with_order(states, group) if kind == "gptq" else states
    given = routing(9)
    check(added(method.split()[0], config, states, given, ranks), dense, *given)


@pytest.mark.parametrize("ranks", [1, 3])
def test_gptq_of_eight_bits(ranks: int) -> None:
    torch.manual_seed(8)
    config, states, dense = auto_checkpoint("gptq", -1, bits=8)
    given = routing(9)
    check(added("gptq_marlin", config, with_order(states, -1), given, ranks), dense, *given)


@pytest.mark.parametrize("kind", ["gptq", "awq"])
def test_groups_that_sglang_halves_for_narrow_shares(kind: str) -> None:
    torch.manual_seed(1)
    config, states, dense = auto_checkpoint(kind, 128)
    given = routing(9)
    check(added("moe_wna16", config, states, given, 6), dense, *given)  # WIDTH / 6 = 64


@pytest.mark.parametrize("ranks", [1, 3])
@pytest.mark.parametrize("kind", ["gptq", "awq"])
def test_layouts_of_cpus(kind: str, ranks: int, monkeypatch: pytest.MonkeyPatch) -> None:
    """On CPUs SGLang also reads GPTQ with zero points."""
    monkeypatch.setitem(quantization.QUANTIZATION_METHODS, kind, {"gptq": CPUGPTQConfig, "awq": AWQCPUConfig}[kind])
    layouts.register()
    torch.manual_seed(2)
    config, states, dense = auto_checkpoint(kind, 64, zero_points=True)
    states = with_order(states, 64) if kind == "gptq" else states
    given = routing(9)
    check(added(kind, config, states, given, ranks), dense, *given)


# Of what activations become before the first and the second product, and whether parts find the same scales.
EIGHT_BITS: dict[str, tuple[str, str, tuple[Activation, Activation], bool]] = {
    "compressed-tensors block": ("compressed-tensors", "FP8_BLOCK", (E4M3_BLOCK, E4M3_BLOCK), True),
    "compressed-tensors channel": ("compressed-tensors", "FP8_DYNAMIC", (E4M3, E4M3), False),
    "compressed-tensors static": ("compressed-tensors", "FP8", (TENSOR["w1"], TENSOR["w2"]), True),
    "fp8 block": ("fp8", "block", (E4M3_BLOCK, E4M3_BLOCK), True),
    "fp8 dynamic": ("fp8", "dynamic", (E4M3, E4M3), False),
    "fp8 static": ("fp8", "static", (TENSOR["w1"], TENSOR["w2"]), True),
    "modelopt_fp8": ("modelopt_fp8", "static", (TENSOR["w1"], TENSOR["w2"]), True),
    "w8a8_fp8": ("w8a8_fp8", "FP8_DYNAMIC", (E4M3, E4M3), False),
    "w8a8_int8": ("w8a8_int8", "W8A8", (INT8, INT8), False),
}


def eight_bits(method: str, case: str) -> tuple[dict[str, Any], list[State], list[dict[str, Tensor]]]:
    config, states, dense = checkpoint(case) if case[0].isupper() else fp8_checkpoint(case)
    if case == "FP8":
        for number, key in itertools.product(range(E), SHARDS):
            states[number][key]["input_scale"] = torch.tensor([STATIC[key] / (1 + number)])
    config = {"quant_method": "modelopt", "quant_algo": "FP8"} if method.startswith("modelopt") else config
    return {"quant_method": method} if method.startswith("w8a8") else config, states, dense


@pytest.mark.parametrize("ranks", [1, 3])
@pytest.mark.parametrize("name", EIGHT_BITS)
def test_eight_bits(name: str, ranks: int) -> None:
    """Gate and up keep separate scales if they have them."""
    torch.manual_seed(ranks)
    method, case, activations, same = EIGHT_BITS[name]
    config, states, dense = eight_bits(method, case)
    given = routing(9)
    y = added(method, config, states, given, ranks)
    check_rounded(y, dense, given, *map(rounded, activations), same=same or ranks == 1)


@pytest.mark.parametrize("case", ["W4A16", "FP8_BLOCK"])
def test_experts_of_other_processes(case: str) -> None:
    """Expert parallelism: each process has one of five experts."""
    torch.manual_seed(3)
    config, states, dense = checkpoint(case)
    given = routing(9)
    y = added("compressed-tensors", config, states, given, E, ep=True)
    if case == "W4A16":
        check(y, dense, *given)
    else:
        check_rounded(y, dense, given, rounded(E4M3_BLOCK))


def loaded(case: str = "W4A16", **options: Any) -> tuple[Experts, list[dict[str, Tensor]]]:
    config, states, dense = checkpoint(case)
    experts = Experts("compressed-tensors", config, **options)
    experts.load(states)
    return experts, dense


def test_choices_that_are_no_expert_count_as_zero() -> None:
    """SGLang's mark of padding."""
    torch.manual_seed(4)
    experts, dense = loaded()
    x, weights, ids = routing(9)
    ids[3:5], ids[7, 1] = -1, -1
    check(experts(x, weights, ids), dense, x, weights * (ids >= 0), ids.clamp(min=0))


@pytest.mark.parametrize("gpu", [True, False])
def test_the_factor_of_routed_experts(gpu: bool, monkeypatch: pytest.MonkeyPatch) -> None:
    """Models apply the factor themselves where there is no GPU."""
    torch.manual_seed(5)
    experts, dense = loaded(routed_scaling_factor=2.5)
    assert not experts.layer.should_fuse_routed_scaling_factor_in_topk
    monkeypatch.setattr(qaos, "is_cuda", lambda: gpu)
    x, weights, ids = routing(9)
    check(experts(x, weights, ids), dense, x, weights * (2.5 if gpu else 1), ids)


def test_router_weights_that_multiply_the_input() -> None:
    """Router weights of a token's only expert (Llama 4)."""
    torch.manual_seed(6)
    experts, dense = loaded(apply_router_weight_on_input=True, top_k=1)
    x, weights, ids = routing(9)
    weights, ids = weights[:, :1], ids[:, :1]
    check(experts(x, weights, ids), dense, x.double() * weights, torch.ones_like(weights), ids)


def test_the_input_stays_as_it_is() -> None:
    experts, _ = loaded()
    x, weights, ids = routing(3)
    before = x.clone()
    experts(x, weights, ids)
    assert torch.equal(x, before)


def test_no_tokens() -> None:
    experts, _ = loaded()
    x, weights, ids = routing(1)
    assert experts(x[:0], weights[:0], ids[:0]).shape == (0, K)


@pytest.mark.parametrize("case", ["W4A16", "FP8_DYNAMIC"])
def test_weights_are_held_once(case: str) -> None:
    experts, _ = loaded(case)
    held = {name: p.numel() * p.element_size() for name, p in experts.layer.named_parameters()}
    assert set(held) == {f"{one}.{name}" for one in ("up", "down") for name in ("qweight", "scales")}
    bits = 4 if case == "W4A16" else 8
    assert sum(size for name, size in held.items() if "qweight" in name) == 3 * E * K * WIDTH * bits // 8


@pytest.mark.parametrize("case", ["W4A16", "FP8_DYNAMIC"])
def test_other_weights(case: str) -> None:
    """They arrive at the addresses of the first ones, which CUDA graphs hold."""
    torch.manual_seed(0)
    experts, _ = loaded(case)
    places = {name: one.data_ptr() for name, one in experts.layer.named_parameters()}
    config, states, _ = checkpoint(case)
    other = Experts("compressed-tensors", config)
    other.load(states)
    for _ in range(2):
        experts.layer.quant_method.restore_weights_before_loading(experts.layer)
        experts.load(states)
    x, weights, ids = routing(5)
    assert torch.equal(experts(x, weights, ids), other(x, weights, ids))
    assert {name: one.data_ptr() for name, one in experts.layer.named_parameters()} == places

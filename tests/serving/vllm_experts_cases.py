"""vLLM's own fused experts with qao's grouped GEMM; run by tests/test_vllm.py in a separate process."""

from __future__ import annotations

from typing import Any

import vllm_support  # noqa: F401  # first: it makes vLLM importable

# isort: split

from unittest import mock

import pytest
import torch
from checkpoint_support import ORDERS
from fused_support import (
    DTYPE,
    PREFIX,
    SHARDS,
    TOP,
    WIDTH,
    E,
    K,
    State,
    auto_checkpoint,
    check,
    check_rounded,
    checkpoint,
    rounding_of,
    routing,
)
from qao.integrations.serving import common
from qao.integrations.vllm.adapter import rows_first
from qao.integrations.vllm.experts import QaoExperts
from torch import Tensor
from vllm.model_executor.layers.fused_moe import FusedMoEFactory
from vllm.model_executor.layers.fused_moe import config as fused_config
from vllm.model_executor.layers.fused_moe.oracle import int_wna16
from vllm.model_executor.layers.quantization.auto_awq import AutoAWQConfig
from vllm.model_executor.layers.quantization.auto_gptq import AutoGPTQConfig
from vllm.model_executor.layers.quantization.compressed_tensors.compressed_tensors import CompressedTensorsConfig
from vllm.model_executor.layers.quantization.fp8 import Fp8Config
from vllm.utils.torch_utils import set_default_torch_dtype
from vllm_support import engine

CONFIGS: dict[str, Any] = {
    "compressed-tensors": CompressedTensorsConfig,
    "gptq": AutoGPTQConfig,
    "awq": AutoAWQConfig,
    "fp8": Fp8Config,
}


def load(config: dict[str, Any], states: list[State], rank: int = 0, size: int = 1, **options: Any) -> Any:
    """vLLM's experts with these tensors, as one of ``size`` processes has them."""
    ranks = mock.patch.object(fused_config, "get_tensor_model_parallel_rank", lambda: rank)
    with set_default_torch_dtype(DTYPE), ranks:
        options["tp_size"] = size
        own = CONFIGS[config["quant_method"]].from_config(config)
        runner = FusedMoEFactory(E, TOP, K, WIDTH, prefix=PREFIX, quant_config=own, **options)
    experts = runner.routed_experts
    parameters = dict(experts.named_parameters())
    for number, state in enumerate(states):
        for key, tensors in state.items():
            for name, tensor in tensors.items():
                target = parameters[f"{'w2' if key == 'w2' else 'w13'}_{name}"]
                target.weight_loader(target, tensor, f"{SHARDS[key][0]}.{name}", shard_id=key, expert_id=number)
    experts.quant_method.process_weights_after_loading(experts)
    return experts


def is_qaos(experts: Any, name: str = "QaoExperts") -> bool:
    return type(experts.quant_method.moe_kernel.fused_experts).__name__ == name


def run(experts: Any, x: Tensor, weights: Tensor, ids: Tensor) -> Tensor:
    with torch.no_grad():
        return experts.quant_method.apply(experts, x, weights, ids, None, None)


@pytest.mark.parametrize("case", ["W4A16", "W4A16 asym", "W4A16 g32"])
@pytest.mark.parametrize("tokens", [1, 7, 40])
def test_experts(case: str, tokens: int) -> None:
    torch.manual_seed(tokens)
    config, states, dense = checkpoint(case)
    with engine(DTYPE):
        experts = load(config, states)
        assert is_qaos(experts)
        given = routing(tokens)
        y = run(experts, *given)
    assert y.dtype == DTYPE
    check(y, dense, *given)


@pytest.mark.parametrize("case", ["W4A16", "W4A16 g32"])
def test_tensor_parallel(case: str) -> None:
    """The sum over processes that each have a part of the width of every expert."""
    torch.manual_seed(0)
    config, states, dense = checkpoint(case)
    given, y = routing(9), torch.zeros(9, K, dtype=torch.float64)
    for rank in range(3):
        with engine(DTYPE):
            experts = load(config, states, rank, 3)
            assert is_qaos(experts) and experts.moe_config.intermediate_size_per_partition == WIDTH // 3
            y += run(experts, *given).double()
    check(y, dense, *given)


@pytest.mark.parametrize("kind", list(ORDERS))
@pytest.mark.parametrize("group", [32, 128])
@pytest.mark.parametrize("tokens", [1, 9])
def test_experts_of_gptq_and_awq(kind: str, group: int, tokens: int) -> None:
    torch.manual_seed(group + tokens)
    config, states, dense = auto_checkpoint(kind, group)
    given = routing(tokens)
    with engine(DTYPE):
        experts = load(config, states)
        assert is_qaos(experts)
        y = run(experts, *given)
    check(y, dense, *given)


@pytest.mark.parametrize("kind", list(ORDERS))
def test_tensor_parallel_of_gptq_and_awq(kind: str) -> None:
    torch.manual_seed(0)
    config, states, dense = auto_checkpoint(kind, 32)
    given, y = routing(9), torch.zeros(9, K, dtype=torch.float64)
    for rank in range(3):
        with engine(DTYPE):
            experts = load(config, states, rank, 3)
            assert is_qaos(experts)
            y += run(experts, *given).double()
    check(y, dense, *given)


def test_experts_of_other_processes_count_as_zero() -> None:
    torch.manual_seed(0)
    config, states, dense = checkpoint("W4A16")
    x, weights, ids = routing(9)
    here = torch.tensor([0, 1, -1, 2, -1])  # of five experts three are here, the first, second and fourth
    with engine(DTYPE):
        experts = load(config, [states[0], states[1], states[3], *states[:2]])
        kernel = experts.quant_method.moe_kernel
        with torch.no_grad():
            y = kernel.apply(
                x,
                experts.w13_weight,
                experts.w2_weight,
                topk_weights=weights,
                topk_ids=ids,
                activation=experts.activation,
                global_num_experts=E,
                expert_map=here,
                apply_router_weight_on_input=False,
                shared_experts=None,
                shared_experts_input=None,
            )
    check(y, dense, x, torch.where(here[ids.long()] >= 0, weights, 0), ids)


@pytest.mark.parametrize(("case", "group_size"), [("FP8_BLOCK", 128), ("fp8", 128), ("FP8_DYNAMIC", -1)])
@pytest.mark.parametrize("ranks", [1, 3])
def test_experts_of_fp8(case: str, group_size: int, ranks: int) -> None:
    """Whole, and as parts."""
    torch.manual_seed(ranks)
    config, states, dense = checkpoint("FP8_BLOCK" if case == "fp8" else case)
    if case == "fp8":  # as DeepSeek's checkpoints have it
        config = {"quant_method": "fp8", "activation_scheme": "dynamic", "weight_block_size": [128, 128]}
        names = {"weight": "weight", "weight_scale": "weight_scale_inv"}
        states = [{key: {names[n]: t for n, t in one.items()} for key, one in state.items()} for state in states]
    given, y = routing(9), torch.zeros(9, K, dtype=torch.float64)
    for rank in range(ranks):
        with engine(DTYPE):
            experts = load(config, states, rank, ranks)
            assert is_qaos(experts, "QaoFp8Experts")
            y += run(experts, *given).double()
    check_rounded(y, dense, given, rounding_of(group_size), same=ranks == 1 or group_size == 128)


@pytest.mark.parametrize(
    ("case", "options", "words"),
    [
        ("W4A16 channel", {}, "4 bits by channel"),
        ("W8A16 channel", {}, "8 bits by channel"),
        ("W4A16", {"activation": "gelu"}, "the gate gelu"),
        ("W4A16", {"swiglu_limit": 7.0}, "the gate silu with limit 7.0"),
    ],
)
def test_what_is_left_to_vllm(case: str, options: dict[str, Any], words: str) -> None:
    """The reason is in vLLM's log; vLLM itself has no kernels for this CPU."""
    config, states, _ = checkpoint(case)
    said = mock.Mock()
    with engine(DTYPE), mock.patch.object(int_wna16.logger, "debug_once", said), pytest.raises(NotImplementedError):
        load(config, states, **options)
    assert any(words in str(call.args[-1]) for call in said.call_args_list), said.call_args_list


def test_new_methods_of_vllms_experts(caplog: pytest.LogCaptureFixture, monkeypatch: pytest.MonkeyPatch) -> None:
    """Of a vLLM of the future. qao leaves the experts to it, with one line in the log."""
    config, states, _ = checkpoint("W4A16")
    monkeypatch.setattr(common, "_warned", set())
    monkeypatch.setattr(QaoExperts, "__abstractmethods__", frozenset({"route"}))
    for _ in range(2):
        with engine(DTYPE), pytest.raises(NotImplementedError):
            load(config, states)
    [record] = [record for record in caplog.records if record.name == "vllm.qao"]
    assert "fused experts of four bits use vLLM's own kernels" in record.getMessage()
    assert "FusedMoEExpertsModular has a new method route" in record.getMessage()


def test_weights_of_an_unknown_layout(monkeypatch: pytest.MonkeyPatch) -> None:
    config, states, _ = checkpoint("W4A16")
    with engine(DTYPE):
        experts = load(config, states)
        given = {"layer": experts, "w13": torch.empty(E, 3, 4), "w2": torch.empty(E, 5, 6)}
        with pytest.raises(ValueError, match="packed weights .*VLLM_DISABLED_KERNELS=QaoExperts"):
            rows_first(given)


def test_left_out_by_name() -> None:
    config, states, _ = checkpoint("W4A16")
    named = mock.patch.dict("os.environ", VLLM_DISABLED_KERNELS="QaoExperts")
    with engine(DTYPE), named, pytest.raises(NotImplementedError):
        load(config, states)

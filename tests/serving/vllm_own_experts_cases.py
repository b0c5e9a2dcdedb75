"""Experts in qao's own format in vLLM's own layer; run by tests/test_vllm.py in a separate process."""

from __future__ import annotations

import inspect
from collections.abc import Callable, Iterable
from types import SimpleNamespace
from typing import Any
from unittest import mock

import vllm_support  # noqa: F401  # first: it makes vLLM importable

# isort: split
import pytest
import qao
import torch
from experts_support import SCHEMES
from fused_support import DTYPE, PREFIX, TOP, WIDTH, E, K, check, routing
from native_experts import EXPERT_SCHEMES, check_parts, checkpoint
from qao.schemes import Scheme
from torch import Tensor, nn
from vllm.config import get_current_vllm_config
from vllm.model_executor.layers.fused_moe import FusedMoEFactory, RoutedExperts
from vllm.model_executor.layers.fused_moe import config as fused_config
from vllm.model_executor.layers.quantization import get_quantization_config
from vllm.model_executor.models.gpt_oss import GptOssModel, GptOssRoutedExperts
from vllm.model_executor.models.utils import AutoWeightsLoader
from vllm.utils.torch_utils import set_default_torch_dtype
from vllm_experts_cases import run
from vllm_support import engine

NO_PARAMETERS = ("pip_install_qao", ".weight")  # state dict entries that are no Parameters
GPT_OSS = {"activation": "swigluoai", "has_bias": True, "routed_experts_cls": GptOssRoutedExperts}


def make(config: dict[str, Any], rank: int = 0, size: int = 1, ep: bool = False, **options: Any) -> Any:
    """vLLM's runner of experts, as one of ``size`` processes has it: a part of all, or (``ep``) some of them."""
    ranks = mock.patch.object(fused_config, "get_tensor_model_parallel_rank", lambda: rank)
    parallel = mock.patch.object(get_current_vllm_config().parallel_config, "enable_expert_parallel", ep)
    get_current_vllm_config().compilation_config.static_forward_context.clear()  # layers of another process
    with set_default_torch_dtype(DTYPE), ranks, parallel:
        own = get_quantization_config("qao").from_config(config)
        runner = FusedMoEFactory(E, TOP, K, WIDTH, prefix=PREFIX, quant_config=own, tp_size=size, **options)
    runner.quant_config = own
    return runner


def model_of(runner: Any) -> nn.Module:
    """A model with these experts at PREFIX."""
    model = runner
    for name in reversed(PREFIX.split(".")):
        outer = nn.Module()
        outer.add_module(name, model)
        model = outer
    model.quant_config = runner.quant_config
    return model


def load(config: dict[str, Any], tensors: dict[str, Tensor], *place: int, **options: Any) -> Any:
    """vLLM's experts, loaded by its model loader."""
    runner = make(config, *place, **options)
    loaded = AutoWeightsLoader(model_of(runner)).load_weights(tensors.items())
    # Before vLLM 0.33, runners return the names of their child.
    prefix = "routed_experts." if inspect.isgeneratorfunction(type(runner).load_weights) else ""
    assert loaded == {name.replace("experts.", f"experts.{prefix}") for name in tensors}
    experts = runner.routed_experts
    experts.quant_method.process_weights_after_loading(experts)
    return experts


def results(
    config: dict[str, Any], tensors: dict[str, Tensor], given: Iterable[Tensor], size: int, **options: Any
) -> list[Tensor]:
    """Of each process."""
    with engine(DTYPE):
        return [run(load(config, tensors, rank, size, **options), *given).double() for rank in range(size)]


@pytest.mark.parametrize(
    ("scheme", "size"),
    [*((scheme, size) for scheme in EXPERT_SCHEMES for size in (1, 3)), *((scheme, 2) for scheme in SCHEMES)],
    ids=str,
)
def test_experts(scheme: Scheme, size: int) -> None:
    torch.manual_seed(size)
    config, tensors, dense = checkpoint(scheme)
    given = routing(9)
    check_parts(results(config, tensors, given, size), scheme, dense, given)


@pytest.mark.parametrize("size", [2, E])
def test_experts_of_other_processes(size: int) -> None:
    """Three of five and two, or one each."""
    torch.manual_seed(size)
    config, tensors, dense = checkpoint(SCHEMES[0])
    given = routing(9)
    with engine(DTYPE):
        parts = [load(config, tensors, rank, size, ep=True) for rank in range(size)]
        assert [one.up.experts for one in parts] == ([3, 2] if size == 2 else [1] * E)
        check(sum(run(one, *given).double() for one in parts), dense, *given)


def clamped(alpha: float, limit: float, shift: float) -> Callable[[Tensor, Tensor], Tensor]:
    """The gate of GPT-OSS, and others."""

    def gated(gate: Tensor, up: Tensor) -> Tensor:
        gate = gate.clamp(max=limit)
        return gate * torch.sigmoid(alpha * gate) * (up.clamp(-limit, limit) + shift)

    return gated


@pytest.mark.parametrize(
    ("activation", "numbers", "gated"),
    [
        ("silu", (None, 1.0, None), clamped(1.0, 1.0, 0.0)),
        ("swigluoai_uninterleave", (1.5, 2.0, 0.5), clamped(1.5, 2.0, 0.5)),
        ("swigluoai_uninterleave", (None, 2.0, None), clamped(1.0, 2.0, 0.0)),
    ],
)
def test_gates_with_limits(activation: str, numbers: tuple[float | None, ...], gated: Any) -> None:
    torch.manual_seed(0)
    alpha, limit, beta = numbers
    config, tensors, dense = checkpoint(SCHEMES[0])
    given = routing(9)
    options = {"activation": activation, "swiglu_limit": limit, "swiglu_alpha": alpha, "swiglu_beta": beta}
    check(sum(results(config, tensors, given, 2, **options)), dense, *given, gated=gated)


@pytest.mark.parametrize(("size", "ep"), [(1, False), (3, False), (2, True)])
@pytest.mark.parametrize("scheme", [SCHEMES[0], SCHEMES[1]], ids=str)
def test_experts_of_gpt_oss(scheme: Scheme, size: int, ep: bool) -> None:
    """Alternating gate and up rows, clamped at 7, with biases; the bias of down is added on one rank only."""
    torch.manual_seed(size)
    config, tensors, dense = checkpoint(scheme, spread=0.5, gpt_oss=True)
    given = routing(9)
    check(sum(results(config, tensors, given, size, ep=ep, **GPT_OSS)), dense, *given, gated=clamped(1.702, 7.0, 1.0))


def test_a_loader_of_a_model_s_own() -> None:
    """GPT-OSS's loader finds parameters by name, and skips unknown names."""
    config, tensors, _ = checkpoint(SCHEMES[0], gpt_oss=True)
    with engine(DTYPE):
        runner = make(config, **GPT_OSS)
        model, stacked = model_of(runner), []
        model.config = SimpleNamespace(num_local_experts=E, intermediate_size=WIDTH)
        model.parallel_config = SimpleNamespace(enable_expert_parallel=False)
        model._try_load_streamed_expert = lambda *args: False
        named = runner.quant_config.get_checkpoint_weight_mapper().apply(tensors.items())
        numbers = [0] * (len(inspect.signature(GptOssModel._load_weights_other).parameters) - 3)  # of ranks and heads
        GptOssModel._load_weights_other(model, *numbers, named, stacked)
        runner.routed_experts.quant_method.process_weights_after_loading(runner.routed_experts)
        held = dict(runner.routed_experts.named_parameters())
    assert {f"{PREFIX}.{name}" for name in held} == {name for name in tensors if not name.endswith(NO_PARAMETERS)}
    assert all(torch.equal(one, tensors[f"{PREFIX}.{name}"]) for name, one in held.items())


def test_cuts_within_what_shares_a_scale() -> None:
    config, _, _ = checkpoint(qao.Int4WeightOnly(group_size=128))
    with (
        engine(DTYPE),
        pytest.raises(ValueError, match="experts.down: .* gets 192 columns .* int4 g128 .* work: 1, 3."),
    ):
        make(config, 0, 2)


def test_another_checkpoint_than_the_config_says() -> None:
    config, _, _ = checkpoint(SCHEMES[0])
    _, tensors, _ = checkpoint(qao.Int4WeightOnly(group_size=64))
    with engine(DTYPE), pytest.raises(ValueError, match="experts.* the config says int4 g32.* Save the model again"):
        load(config, tensors)


def test_tensors_that_do_not_come() -> None:
    config, tensors, _ = checkpoint(SCHEMES[0])
    some = {name: one for name, one in tensors.items() if not name.endswith("down.scales")}
    with engine(DTYPE):
        runner = make(config)
        AutoWeightsLoader(model_of(runner)).load_weights(some.items())
        experts = runner.routed_experts
        with pytest.raises(ValueError, match="experts.down: vLLM has not loaded scales into it"):
            experts.quant_method.process_weights_after_loading(experts)


def test_packed_experts_take_no_other_weights() -> None:
    config, tensors, _ = checkpoint(SCHEMES[0])
    with engine(DTYPE):
        experts = load(config, tensors)
        with pytest.raises(ValueError, match="up.qweight cannot be loaded. .* restart it"):
            list(experts.load_weights([("up.qweight", tensors[f"{PREFIX}.up.qweight"])]))


@pytest.mark.parametrize(
    ("options", "words"),
    [
        ({"activation": "gelu"}, "the gate gelu with limit None"),
        ({"activation": "swigluoai", "swiglu_limit": 5.0}, "the gate swigluoai with limit 5.0"),
        ({"routed_experts_cls": type("Others", (RoutedExperts,), {})}, "an unknown kind of layer .Others"),
    ],
)
def test_what_nobody_can_compute(options: dict[str, Any], words: str) -> None:
    config, _, _ = checkpoint(SCHEMES[0])
    with engine(DTYPE), pytest.raises(NotImplementedError, match=f"experts: experts in qao's own format: {words}"):
        make(config, **options)

"""Fused experts that qao leaves to SGLang; run by tests/test_sglang.py in a separate process."""

from __future__ import annotations

import logging
from collections.abc import Callable
from contextlib import AbstractContextManager, ExitStack
from typing import Any

import sglang_support  # noqa: F401  # first: it makes SGLang importable

# isort: split
import pytest
import torch
from fused_support import PREFIX, auto_checkpoint, checkpoint
from qao.integrations.sglang import experts as qaos
from qao.integrations.sglang import process
from qao.integrations.sglang.adapter import has_paged_experts
from qao.integrations.sglang.expert_weights import ExpertSizes, of_compressed_tensors
from qao.ops.batch_invariant import MODE
from sglang.srt.layers.moe.ep_moe.layer import DeepEPMoE
from sglang.srt.layers.moe.utils import MoeA2ABackend, MoeRunnerBackend
from sglang.srt.layers.quantization.fp8 import Fp8Config, Fp8MoEMethod
from sglang.srt.layers.quantization.unquant import UnquantizedFusedMoEMethod
from sglang.srt.runtime_context import get_flags
from sglang_support import UE8M0, Experts, override

GPTQ, AWQ = (auto_checkpoint(kind, 128)[0] for kind in ("gptq", "awq"))
FP8 = {"quant_method": "fp8", "activation_scheme": "dynamic"}
BLOCKS = {**FP8, "weight_block_size": [128, 128]}


@pytest.fixture(autouse=True)
def nothing_logged(monkeypatch: pytest.MonkeyPatch, caplog: pytest.LogCaptureFixture) -> None:
    monkeypatch.setattr(process, "_logged", set())
    caplog.set_level(logging.INFO, logger=process.__name__)


def logged(caplog: pytest.LogCaptureFixture) -> list[str]:
    return [record.getMessage() for record in caplog.records if record.name == process.__name__]


# Checkpoints: the method, its config, and the log message.
CHECKPOINTS = [
    ("compressed-tensors", checkpoint("W4A16 asym")[0], "zero points, which SGLang does not load into experts"),
    ("gptq_marlin", {**GPTQ, "desc_act": True}, "columns reordered into groups (desc_act)"),
    ("gptq_marlin", {**GPTQ, "bits": 8}, "eight bits in groups of 128 columns"),
    ("moe_wna16", {**GPTQ, "sym": False}, "zero points of GPTQ, to which SGLang adds one with a carry"),
    ("moe_wna16", {**AWQ, "group_size": 16}, "groups of 16 columns; qao supports groups of 32"),
    ("fp8", {**BLOCKS, "weight_block_size": [64, 128]}, "blocks of 64 x 128; qao supports 128 x 128"),
    pytest.param("fp8", {**BLOCKS, "scale_fmt": "ue8m0"}, "scales that are powers of two", marks=UE8M0),
    ("fp8", {**FP8, "quant_method": "none"}, "a float checkpoint, which SGLang quantizes"),
]


@pytest.mark.parametrize(("method", "config", "reason"), CHECKPOINTS)
def test_checkpoints(method: str, config: dict[str, Any], reason: str, caplog: pytest.LogCaptureFixture) -> None:
    for _ in range(2):
        assert type(Experts(method, config).layer.quant_method).__module__.startswith("sglang.")
    (message,) = logged(caplog)
    assert message.startswith(f"qao leaves layers such as {PREFIX} to SGLang: fused experts: ") and reason in message


# Layers: the model's requirements, and the log message.
LAYERS: list[tuple[dict[str, Any], str]] = [
    ({"activation": "gelu"}, "a gate other than SiLU"),
    ({"is_gated": False}, "a gate other than SiLU"),
    ({"swiglu_limit": 10.0}, "with limits or factors"),
    ({"gemm1_alpha": 1.702, "gemm1_clamp_limit": 7.0}, "with limits or factors"),
    ({"with_bias": True}, "biases"),
    ({"apply_router_weight_on_input": True}, "router weights that multiply the input of more than one expert"),
    ({"no_combine": True, "inplace": False}, "rows that the model adds itself"),
]


@pytest.mark.parametrize(("options", "reason"), LAYERS, ids=[str(options) for options, _ in LAYERS])
def test_layers(options: dict[str, Any], reason: str, caplog: pytest.LogCaptureFixture) -> None:
    assert type(Experts("fp8", BLOCKS, **options).layer.quant_method) is Fp8MoEMethod
    assert reason in caplog.text


# Servers: the flags, and the resulting reason.
PARTLY = "experts that are partly in CPU memory"
PAGED = pytest.mark.skipif(not has_paged_experts(), reason="this version has no paged experts")
SERVERS = [
    (lambda: get_flags().moe.override(runner_backend=MoeRunnerBackend.TRITON), "another backend was requested: triton"),
    (lambda: get_flags().moe.override(a2a_backend=MoeA2ABackend.DEEPEP), "tokens that deepep exchanges"),
    (lambda: override("lora", enable_lora=True), "LoRA"),
    (lambda: override("lora", lora_paths=["a"]), "LoRA"),
    pytest.param(lambda: override("exec.moe", enable_paged_experts=True), PARTLY, marks=PAGED),
    (lambda: override("exec.moe", kt_weight_path="a"), PARTLY),
]


@pytest.mark.parametrize(("asked", "reason"), SERVERS)
def test_servers(asked: Callable[[], AbstractContextManager[Any]], reason: str) -> None:
    experts = Experts("fp8", BLOCKS)
    assert experts.served
    with experts.process(), ExitStack() as stack:
        assert qaos.unsupported_reason(experts.layer) is None
        stack.enter_context(asked())
        assert qaos.unsupported_reason(experts.layer) == reason


def test_layers_of_their_own_kind() -> None:
    """Models' own experts multiply their weights themselves."""
    experts = Experts("fp8", BLOCKS)
    experts.layer.__class__ = DeepEPMoE
    with experts.process():
        assert qaos.unsupported_reason(experts.layer) == "an unknown kind of layer (DeepEPMoE)"


def test_deterministic_inference(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(MODE, "on", False)
    monkeypatch.setattr(process, "is_batch_invariant_mode_enabled", lambda: True)
    experts = Experts("fp8", BLOCKS)
    assert type(experts.layer.quant_method) is not Fp8MoEMethod and MODE.on


def test_weights_of_four_bit_floats(caplog: pytest.LogCaptureFixture) -> None:
    own = Fp8MoEMethod(Fp8Config(is_checkpoint_fp8_serialized=True, weight_block_size=[128, 128]))
    own.is_fp4_expert = True
    experts = Experts("fp8", BLOCKS)
    with experts.process():
        assert qaos.choose(own, experts.layer, PREFIX) is own
    assert "fused experts: weights of four-bit floats" in caplog.text


def test_reordered_columns_of_compressed_tensors() -> None:
    layer = Experts("compressed-tensors", checkpoint("W4A16")[0]).layer
    sizes = ExpertSizes(256, 384, 384)
    assert not isinstance(of_compressed_tensors(None, layer, sizes), str)
    layer.scheme.actorder = "group"
    assert of_compressed_tensors(None, layer, sizes) == "columns reordered into groups (actorder)"


def test_shares_that_end_within_groups(caplog: pytest.LogCaptureFixture) -> None:
    """SGLang would give each of two processes one and a half groups."""
    layer = Experts("gptq_marlin", GPTQ, ranks=2).layer
    assert "a shard of 192 columns, which groups of 128 do not divide" in caplog.text
    assert type(layer.quant_method).__module__.startswith("sglang.")


def test_zero_points_of_compressed_tensors_fail_in_sglang() -> None:
    config, states, _ = checkpoint("W4A16 asym")
    experts = Experts("compressed-tensors", config)
    with pytest.raises(RuntimeError, match="size of tensor|dimension size"):
        experts.load(states)


def test_experts_in_floats_stay_so(caplog: pytest.LogCaptureFixture) -> None:
    layer = Experts("fp8", {**BLOCKS, "ignored_layers": [PREFIX]}).layer
    assert type(layer.quant_method) is UnquantizedFusedMoEMethod and not logged(caplog)


def test_what_is_served_is_logged_once(caplog: pytest.LogCaptureFixture) -> None:
    for _ in range(2):
        assert Experts("gptq_marlin", GPTQ).served
    assert logged(caplog) == [f"qao serves layers such as {PREFIX} with int4_grouped_mm"]


def test_a_method_that_is_not_known() -> None:
    own, layer = type("AnExpertsMethod", (), {})(), torch.nn.Module()
    assert qaos._weights_of(own, layer) == "weights of AnExpertsMethod"

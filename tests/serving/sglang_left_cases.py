"""Layers that qao leaves to SGLang, log messages, registration; run by tests/test_sglang.py."""

from __future__ import annotations

import logging
import pickle
import sys
from types import SimpleNamespace
from typing import Any
from unittest import mock

import sglang_support  # noqa: F401  # first: it makes SGLang importable

# isort: split
import pytest
import qao.integrations.sglang
import torch
from layouts import check_rows_alone, states_of
from loaded import N
from qao.integrations.serving import common as served
from qao.integrations.sglang import adapter, experts, kernels, layouts, method, process
from qao.ops.batch_invariant import MODE
from sglang.srt.layers import quantization
from sglang.srt.layers.linear import LinearBase
from sglang.srt.layers.moe.fused_moe_triton import FusedMoE
from sglang.srt.layers.quantization.awq import AWQConfig
from sglang.srt.layers.quantization.awq.awq import AWQLinearMethod
from sglang.srt.layers.quantization.compressed_tensors.schemes import CompressedTensorsWNA16
from sglang.srt.layers.quantization.fp8 import Fp8Config, Fp8LinearMethod
from sglang.srt.layers.quantization.fp8_utils import Fp8GemmRunnerBackend
from sglang.srt.layers.quantization.unquant import UnquantizedLinearMethod
from sglang_support import UE8M0, load, make

SHARE = kernels.Share([N], 192, 384)


@pytest.fixture(autouse=True)
def nothing_logged(monkeypatch: pytest.MonkeyPatch, caplog: pytest.LogCaptureFixture) -> None:
    monkeypatch.setattr(process, "_logged", set())
    caplog.set_level(logging.INFO, logger=process.__name__)


# Layers left to SGLang: the method, its config, the tensors, and the log message.
def left_int8_static() -> tuple[str, dict[str, Any]]:
    config, _, _ = states_of("W8A8", "column", torch.bfloat16)
    inputs = {**config["config_groups"]["group_0"]["input_activations"], "strategy": "tensor", "dynamic": False}
    config["config_groups"]["group_0"]["input_activations"] = inputs
    return "compressed-tensors", config


GPTQ = {"bits": 4, "group_size": 128, "desc_act": False, "sym": True}
AWQ = {"bits": 4, "group_size": 128, "zero_point": True}
FP8 = {"quant_method": "fp8", "activation_scheme": "dynamic"}
BLOCKS = {"weight_block_size": [128, 128]}
LEFT = [
    (*left_int8_static(), "static scales of int8 activations"),
    ("gptq_marlin", {**GPTQ, "desc_act": True}, "columns reordered into groups (desc_act)"),
    ("gptq_marlin", {**GPTQ, "bits": 8}, "eight bits in groups of 128 columns"),
    ("awq", {**AWQ, "group_size": 16}, "groups of 16 columns; qao supports groups of 32"),
    ("fp8", {**FP8, "weight_block_size": [64, 128]}, "blocks of 64 x 128; qao supports 128 x 128"),
    pytest.param("fp8", {**FP8, **BLOCKS, "scale_fmt": "ue8m0"}, "scales that are powers of two", marks=UE8M0),
    ("fp8", {**FP8, "quant_method": "none"}, "a float checkpoint, which SGLang quantizes"),
]


@pytest.mark.parametrize(("name", "config", "reason"), LEFT)
def test_what_is_left_to_sglang(
    name: str, config: dict[str, Any], reason: str, caplog: pytest.LogCaptureFixture
) -> None:
    for _ in range(2):
        loaded = make(name, config)
        assert type(loaded.layer.quant_method).__module__.startswith("sglang.")
    logged = [record.getMessage() for record in caplog.records if record.name == process.__name__]
    assert len(logged) == 1
    assert logged[0].startswith("qao leaves layers such as model.layers.0.mlp.fc1 to SGLang: ") and reason in logged[0]


def test_what_is_served_is_logged_once(caplog: pytest.LogCaptureFixture) -> None:
    for _ in range(2):
        assert make("awq", AWQ).served
    logged = [record.getMessage() for record in caplog.records if record.name == process.__name__]
    assert logged == ["qao serves layers such as model.layers.0.mlp.fc1 with int4_mm"]


def test_a_shard_that_ends_within_a_group() -> None:
    own = SimpleNamespace(quant_config=AWQConfig(4, 128, True))
    made = kernels.of_awq(own, torch.nn.Module(), SHARE)
    assert made == "a shard of 192 columns, which groups of 128 do not divide"


def test_reordered_columns_of_compressed_tensors() -> None:
    """Older checkpoints have such columns."""
    layer = torch.nn.Module()
    layer.scheme = CompressedTensorsWNA16("group", 4, 64)
    assert isinstance(kernels.of_compressed_tensors(None, layer, SHARE), kernels.PackQuantized)
    layer.scheme.has_g_idx = True
    assert kernels.of_compressed_tensors(None, layer, SHARE) == "columns reordered into groups (actorder)"


@pytest.mark.parametrize("asked", ["--fp8-gemm-backend triton", "SGLANG_FORCE_FP8_MARLIN"])
def test_another_backend_can_be_asked_for(asked: str, monkeypatch: pytest.MonkeyPatch) -> None:
    if asked.startswith("-"):
        monkeypatch.setattr(kernels, "get_fp8_gemm_runner_backend", lambda: Fp8GemmRunnerBackend.TRITON)
    else:
        monkeypatch.setenv(asked, "1")
    assert type(make("fp8", FP8).layer.quant_method) is Fp8LinearMethod


@pytest.mark.parametrize("asked", ["batch_invariant_ops", "--enable-deterministic-inference"])
def test_deterministic_inference(asked: str, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(MODE, "on", False)
    if asked.startswith("-"):
        found = {"exec.deterministic": SimpleNamespace(enable_deterministic_inference=True)}
        monkeypatch.setattr(process, "settings", found.get)
    else:
        monkeypatch.setattr(process, "is_batch_invariant_mode_enabled", lambda: True)
    config, states, _ = states_of("W4A16", "column", torch.bfloat16)
    loaded = load("compressed-tensors", "column", config, states)
    assert loaded.served
    check_rows_alone(loaded)


@pytest.mark.parametrize("capability", [(7, 5), (8, 0)])
def test_older_gpus(capability: tuple[int, int], monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(process, "is_cuda", lambda: True)
    monkeypatch.setattr(torch.cuda, "get_device_capability", lambda: capability)
    reason = process.missing(torch.device("cuda"))
    assert ("needs compute capability 80, this is 75" in str(reason)) == (capability < (8, 0))


def test_other_platforms() -> None:
    assert process.missing(torch.device("xpu")) == "qao runs on CUDA and on CPUs"
    assert process.missing(torch.device("cpu")) is None


def test_a_weight_that_a_model_reads_itself() -> None:
    """DeepSeek-V4 sets this attribute of some layers after creating them."""
    layer = make("fp8", {**FP8, "weight_block_size": [128, 128]}).layer
    layer.keep_plain_weight_layout = True
    with mock.patch.object(Fp8LinearMethod, "process_weights_after_loading") as own:
        layer.quant_method.process_weights_after_loading(layer)
    own.assert_called_once()
    assert type(layer.quant_method) is Fp8LinearMethod


def test_models_find_what_sglangs_own_method_has() -> None:
    """DeepSeek's loader reads the block size from the method, or else from the config."""
    blocks = {**FP8, "weight_block_size": [128, 128]}
    found = make("fp8", blocks).layer.quant_method
    assert found.weight_block_size == [128, 128] and found.quant_config.get_name() == "fp8"
    assert not hasattr(make("awq", AWQ).layer.quant_method, "weight_block_size")


def test_layers_in_floats_stay_so() -> None:
    config = quantization.QUANTIZATION_METHODS["fp8"].from_config({**FP8, "ignored_layers": ["lm_head"]})
    assert type(config.get_quant_method(LinearBase.__new__(LinearBase), "lm_head")) is UnquantizedLinearMethod


def test_experts_are_left_to_sglang(caplog: pytest.LogCaptureFixture) -> None:
    own = type("AnExpertsMethod", (), {})()
    assert experts.choose(own, FusedMoE.__new__(FusedMoE), "model.layers.0.mlp.experts") is own
    assert "experts to SGLang: fused experts: weights of AnExpertsMethod" in caplog.text


@pytest.mark.parametrize("name", [name for name in layouts.METHODS if name != "gptq"])  # which is there on CPUs alone
def test_registers_in_its_place_and_once(name: str) -> None:
    names = list(quantization.QUANTIZATION_METHODS)
    before = quantization.QUANTIZATION_METHODS[name]
    qao.integrations.sglang.register()
    assert quantization.QUANTIZATION_METHODS[name] is before and list(quantization.QUANTIZATION_METHODS) == names
    assert issubclass(before, layouts.ServedByQao) and not issubclass(before.__bases__[1], layouts.ServedByQao)
    assert pickle.loads(pickle.dumps(before)) is before
    assert quantization.QUANTIZATION_METHODS["mxfp8"] is Fp8Config


def test_what_has_gone_is_named_and_sglang_goes_on(
    monkeypatch: pytest.MonkeyPatch, caplog: pytest.LogCaptureFixture
) -> None:
    monkeypatch.setattr(served, "_warned", set())
    monkeypatch.setitem(sys.modules, method.__name__, None)
    layouts._choice.cache_clear()
    config = quantization.QUANTIZATION_METHODS["fp8"].from_config(FP8)
    assert type(config.get_quant_method(LinearBase.__new__(LinearBase), "a")) is Fp8LinearMethod
    [record] = [record for record in caplog.records if record.name == "sglang.qao"]
    assert ": linear layers use SGLang's own kernels. ModuleNotFoundError" in record.getMessage()
    assert "tested with, sglang 0.5.16 and 0.5.20 to 0.5.23" in record.getMessage()
    assert "QAO_DISABLE_SGLANG=1" in record.getMessage()
    assert layouts._choice("experts") is experts.choose
    layouts._choice.cache_clear()


def check_said(caplog: pytest.LogCaptureFixture, what: str, cause: str) -> None:
    """There is one line that qao does not fit."""
    [record] = [record for record in caplog.records if record.name == "sglang.qao"]
    assert f": {what}. {cause}" in record.getMessage() and record.exc_info is None


def test_a_property_that_has_gone(monkeypatch: pytest.MonkeyPatch, caplog: pytest.LogCaptureFixture) -> None:
    """In an SGLang of the future. Such layers are left to it, with one line in the log."""
    monkeypatch.setattr(served, "_warned", set())
    monkeypatch.setattr(kernels, "online", lambda config: config.was_renamed)
    for _ in range(2):
        assert type(make("fp8", FP8).layer.quant_method) is Fp8LinearMethod
    check_said(
        caplog, "linear layers use SGLang's own kernels", "AttributeError: 'QaoFp8Config' object has no attribute"
    )


def test_a_setting_that_has_gone(monkeypatch: pytest.MonkeyPatch, caplog: pytest.LogCaptureFixture) -> None:
    monkeypatch.setattr(served, "_warned", set())
    gone = SimpleNamespace(deterministic=SimpleNamespace())
    monkeypatch.setattr(adapter, "runtime_context", SimpleNamespace(get_exec=lambda: gone))
    assert type(make("awq", AWQ).layer.quant_method) is AWQLinearMethod
    check_said(caplog, "linear layers use SGLang's own kernels", "AttributeError: 'types.SimpleNamespace' object")


def test_a_choice_with_other_parameters(monkeypatch: pytest.MonkeyPatch, caplog: pytest.LogCaptureFixture) -> None:
    """All or none of the methods are registered."""
    monkeypatch.setattr(served, "_warned", set())
    monkeypatch.setitem(quantization.QUANTIZATION_METHODS, "fp8", Fp8Config)
    monkeypatch.setattr(AWQConfig, "get_quant_method", lambda self, layer: None)
    monkeypatch.setitem(quantization.QUANTIZATION_METHODS, "awq", AWQConfig)
    qao.integrations.sglang.register()
    what = "linear layers and fused experts use SGLang's own kernels"
    check_said(caplog, what, "InterfaceError: AWQConfig.get_quant_method has no parameter prefix")
    assert quantization.QUANTIZATION_METHODS["fp8"] is Fp8Config


@pytest.mark.parametrize("left_out", ["fp8", "all"])
def test_a_method_can_be_left_out(left_out: str, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("QAO_SGLANG_DISABLED_METHODS", left_out)
    for name in ("fp8", "awq"):
        monkeypatch.setitem(quantization.QUANTIZATION_METHODS, name, {"fp8": Fp8Config, "awq": AWQConfig}[name])
    layouts.register()
    assert quantization.QUANTIZATION_METHODS["fp8"] is Fp8Config
    assert (quantization.QUANTIZATION_METHODS["awq"] is AWQConfig) == (left_out == "all")

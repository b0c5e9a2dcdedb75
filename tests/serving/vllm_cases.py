"""vLLM's own layers with qao's kernels; run by tests/test_vllm.py in a separate process."""

from __future__ import annotations

import dataclasses
import inspect
import logging
from collections.abc import Iterator
from functools import partial
from pathlib import Path
from typing import Any
from unittest import mock

import vllm_support  # noqa: F401  # first: it makes vLLM importable

# isort: split

import layouts
import pytest
import qao
import qao.integrations.vllm
import torch
import vllm.plugins
from layouts import (
    DTYPES,
    E4M3,
    E4M3_ALL,
    E4M3_BLOCK,
    E4M3_STATIC,
    FLOAT,
    INT8,
    INT8_ASYM,
    LAYERS,
    Checkpoint,
    add_bias,
    check,
    check_rows_alone,
    fp8_checkpoint,
)
from loaded import KINDS, K, N, installed
from ops_schemes import Activation
from qao.integrations.serving import common as served
from qao.integrations.vllm import cache_key
from qao.ops.batch_invariant import MODE
from test_checkpoints_gptq_awq import Weight
from vllm import envs
from vllm.compilation.caching import aot_compile_hash_factors
from vllm.config import VllmConfig
from vllm.model_executor.kernels import linear
from vllm.model_executor.kernels.linear import MPLinearKernel, MPLinearLayerConfig
from vllm.model_executor.layers.fused_moe.oracle import fp8, int_wna16
from vllm.model_executor.layers.quantization import auto_gptq
from vllm.model_executor.layers.quantization.auto_awq import AutoAWQConfig
from vllm.model_executor.layers.quantization.auto_gptq import AutoGPTQConfig
from vllm.model_executor.layers.quantization.compressed_tensors.compressed_tensors import CompressedTensorsConfig
from vllm.model_executor.layers.quantization.fp8 import Fp8Config
from vllm.model_executor.model_loader import utils as loader_utils
from vllm.platforms import PlatformEnum
from vllm.scalar_type import scalar_types
from vllm_support import Loaded, engine, kernels, log_lines

# A case of compressed-tensors, the kernel that is to run it, what becomes of x.
COMPRESSED = {
    "W4A16": ("QaoMixedPrecisionKernel", FLOAT),
    "W4A16 asym": ("QaoMixedPrecisionKernel", FLOAT),
    "W4A16 g32": ("QaoMixedPrecisionKernel", FLOAT),
    "W4A16 channel": ("QaoMixedPrecisionKernel", FLOAT),
    "W4A16 channel asym": ("QaoMixedPrecisionKernel", FLOAT),
    "W8A16 channel": ("QaoMixedPrecisionKernel", FLOAT),
    "W8A8": ("QaoInt8Kernel", INT8),
    "W8A8 asym": ("QaoInt8Kernel", INT8_ASYM),
    "W8A8 tensor": ("QaoInt8Kernel", INT8),
    "W4A8": ("QaoMixedPrecisionKernel", INT8),
    "W4AFP8 packed": ("QaoMixedPrecisionKernel", Activation("fp8", beside_int4=True)),
    "FP8_DYNAMIC": ("QaoFp8Kernel", E4M3),
    "FP8_BLOCK": ("QaoFp8BlockKernel", E4M3_BLOCK),
    "FP8": ("QaoFp8Kernel", E4M3_STATIC),
    "FP8 channel, static": ("QaoFp8Kernel", E4M3_STATIC),
    "FP8 tensor by token": ("QaoFp8Kernel", E4M3),
    "FP8 weights": ("QaoFp8WeightOnlyKernel", FLOAT),
}


def is_fp8_by_token(weight: Any, x: Any) -> bool:
    """Whether a layer is W4AFP8, which vLLM has for Hopper alone. vLLM 0.30 does not look at the type of x."""
    return CompressedTensorsConfig._is_fp8_w4a8(weight, x) and x.type == "float"


# those of matrices that are joined, vLLM quantizes again with the largest scale
states_of = partial(layouts.states_of, one_scale=True)


@pytest.mark.parametrize(("kind", "size", "dtype"), LAYERS)
@pytest.mark.parametrize("case", COMPRESSED)
def test_compressed_tensors(case: str, kind: str, size: int, dtype: str) -> None:
    torch.manual_seed(len(case))
    kernel, what = COMPRESSED[case]
    config, states, dense = states_of(case, kind, DTYPES[dtype])
    biases = add_bias(kind, states, DTYPES[dtype])
    hopper = mock.patch.object(CompressedTensorsConfig, "_is_fp8_w4a8_sm90", staticmethod(is_fp8_by_token))
    with engine(DTYPES[dtype]), hopper:
        for rank in range(size):
            loaded = Loaded(kind, CompressedTensorsConfig.from_config(config), states, rank, size)
            assert type(loaded.kernel).__name__ == kernel
            check(loaded, dense, biases, what, DTYPES[dtype])


@pytest.mark.parametrize(("kind", "size", "dtype"), LAYERS)
@pytest.mark.parametrize(("bits", "group_size"), [(4, 32), (4, 128), (4, -1), (8, -1)])
def test_gptq(bits: int, group_size: int, kind: str, size: int, dtype: str) -> None:
    torch.manual_seed(bits + group_size)
    made = Checkpoint(kind, DTYPES[dtype], group_size, bits=bits, zero=1 << bits - 1)
    states = made.states(("qweight", "qzeros", "scales"), Weight.gptq)
    biases = add_bias(kind, states, DTYPES[dtype])
    config = {"bits": bits, "group_size": group_size, "desc_act": False, "sym": True}
    config["modules_in_block_to_quantize"] = [name for name, _, _ in KINDS[kind]]  # as vLLM reads from the files
    # Before any kernel is asked, vLLM asks whether Marlin can, which has no eight bits on a CPU.
    with engine(DTYPES[dtype]), mock.patch.object(auto_gptq, "verify_marlin_supported"):
        for rank in range(size):
            loaded = Loaded(kind, AutoGPTQConfig.from_config(config), states, rank, size)
            assert type(loaded.kernel) is kernels.QaoMixedPrecisionKernel
            check(loaded, made.dense, biases, FLOAT, DTYPES[dtype])


@pytest.mark.parametrize(("kind", "size", "dtype"), LAYERS)
@pytest.mark.parametrize("group_size", [32, 128, 256])
def test_awq(group_size: int, kind: str, size: int, dtype: str) -> None:
    torch.manual_seed(group_size)
    made = Checkpoint(kind, DTYPES[dtype], group_size)
    states = made.states(("qweight", "qzeros", "scales"), Weight.awq)
    biases = add_bias(kind, states, DTYPES[dtype])
    config = {"bits": 4, "group_size": group_size, "zero_point": True}
    with engine(DTYPES[dtype]):
        for rank in range(size):
            loaded = Loaded(kind, AutoAWQConfig.from_config(config), states, rank, size)
            assert type(loaded.kernel) is kernels.QaoMixedPrecisionKernel
            check(loaded, made.dense, biases, FLOAT, DTYPES[dtype])


@pytest.mark.parametrize("size", [1, 2])
@pytest.mark.parametrize("kind", KINDS)
@pytest.mark.parametrize("scheme", ["block", "dynamic", "static"])
def test_fp8(scheme: str, kind: str, size: int) -> None:
    """The layouts of Hugging Face and of DeepSeek."""
    torch.manual_seed(size)
    config, states, dense = fp8_checkpoint(kind, scheme)
    biases = add_bias(kind, states, torch.bfloat16)
    what = {"block": E4M3_BLOCK, "dynamic": E4M3_ALL, "static": E4M3_STATIC}[scheme]
    with engine(torch.bfloat16):
        for rank in range(size):
            loaded = Loaded(kind, Fp8Config.from_config(config), states, rank, size)
            expected = kernels.QaoFp8BlockKernel if scheme == "block" else kernels.QaoFp8Kernel
            assert type(loaded.kernel) is expected
            check(loaded, dense, biases, what, torch.bfloat16)


@pytest.mark.parametrize("case", ["W4A16 asym", "W8A8 asym", "FP8_DYNAMIC", "FP8_BLOCK", "FP8 weights"])
def test_compiles_into_one_graph(case: str) -> None:
    config, states, _ = states_of(case, "qkv", torch.bfloat16)
    with engine(torch.bfloat16):
        loaded = Loaded("qkv", CompressedTensorsConfig.from_config(config), states)
        x = torch.randn(3, K, dtype=torch.bfloat16)
        compiled = torch.compile(lambda x: loaded.layer(x)[0], fullgraph=True, backend="aot_eager")
        with torch.no_grad():
            assert torch.equal(compiled(x), loaded(x))


def test_weights_are_held_once() -> None:
    """No tensor of the checkpoint is kept next to the packed weight."""
    config, states, _ = states_of("W4A16 asym", "qkv", torch.bfloat16)
    with engine(torch.bfloat16):
        loaded = Loaded("qkv", CompressedTensorsConfig.from_config(config), states)
    held = sum(p.numel() * p.element_size() for p in loaded.layer.parameters())
    rows = sum(part[2] for part in KINDS["qkv"])
    packed = qao.Int4WeightOnly(128).empty(rows, K, dtype=torch.bfloat16, device="meta")
    wanted = sum(t.numel() * t.element_size() for t in packed.tensors().values() if t is not None)
    assert held == wanted + 16  # weight_shape


@pytest.mark.parametrize("case", ["FP8", "FP8_DYNAMIC", "FP8_BLOCK"])
def test_loading_passes_nothing_to_fp8_kernels(case: str) -> None:
    """vLLM may hand them weights that another process loaded (weights_already_processed)."""
    config, states, _ = states_of(case, "column", torch.bfloat16)
    with engine(torch.bfloat16):
        loaded = Loaded("column", CompressedTensorsConfig.from_config(config), states)
        x = torch.randn(3, K, dtype=torch.bfloat16)
        before, old = loaded(x), loaded.kernel
        names = {"layer_param_names": old.layer_param_names} if hasattr(old, "layer_param_names") else {}
        loaded.layer.scheme.fp8_linear = type(old)(old.config, **names)
        assert torch.equal(loaded(x), before)


def mixed(kind: Any, group_size: int = 128, zero_points: bool = False, k: int = K, full: int = K, **more: Any) -> Any:
    values = {"act_type": torch.bfloat16, **more}
    return MPLinearLayerConfig((full, N), (k, N), kind, values["act_type"], group_size, zero_points)


@pytest.mark.parametrize(
    ("config", "reason"),
    [
        (mixed(scalar_types.uint8b128), "eight bits in groups of 128"),
        (mixed(scalar_types.uint8, -1, True), "weights of type uint8"),
        (mixed(scalar_types.uint3b4), "weights of type uint3b4"),
        (mixed(scalar_types.uint4, 48, True), "groups of 48 columns"),
        (mixed(scalar_types.uint4, 16, True), "groups of 16 columns"),
        (mixed(scalar_types.uint4b8, 128, k=192, full=384), "a shard of 192 columns, which groups of 128 do not"),
        (mixed(scalar_types.uint4, 128, False), "without zero points"),
        (mixed(scalar_types.uint4b8, act_type=torch.int32), "activations of type torch.int32"),
    ],
)
def test_refuses_with_a_reason(config: Any, reason: str) -> None:
    answer, why = kernels.QaoMixedPrecisionKernel.can_implement(config)
    assert not answer and reason in why


def test_static_int8_activations_are_left_to_vllm() -> None:
    with engine(torch.bfloat16):
        assert type(linear.init_int8_linear_kernel(True, False, True, "test")) is kernels.QaoInt8Kernel
        assert "vllm." in type(linear.init_int8_linear_kernel(True, True, True, "test")).__module__
    answer, why = kernels.QaoInt8Kernel.can_implement(linear.Int8ScaledMMLinearLayerConfig(True, True, True))
    assert not answer and "static scales of int8 activations" in why


@pytest.mark.parametrize("case", ["W4A16", "W8A8", "W4A8", "FP8_DYNAMIC", "FP8_BLOCK", "FP8", "FP8 weights"])
def test_batch_invariance(case: str, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(MODE, "on", False)
    monkeypatch.setenv("VLLM_BATCH_INVARIANT", "1")
    config, states, _ = states_of(case, "qkv", torch.bfloat16)
    with engine(torch.bfloat16):
        loaded = Loaded("qkv", CompressedTensorsConfig.from_config(config), states)
    assert type(loaded.kernel).__name__ == COMPRESSED[case][0]
    check_rows_alone(loaded)


def test_batch_invariance_needs_scales_by_token(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(MODE, "on", True)
    config, states, _ = fp8_checkpoint("qkv", "dynamic")
    with engine(torch.bfloat16):
        loaded = Loaded("qkv", Fp8Config.from_config(config), states)
    assert "vllm." in type(loaded.kernel).__module__
    answer, why = kernels.QaoFp8Kernel.can_implement(loaded.kernel.config)
    assert not answer and "a scale for all tokens depends on the batch" in why


def test_vllms_own_can_be_asked_for(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("VLLM_DISABLED_KERNELS", "QaoInt8Kernel")
    with engine(torch.bfloat16):
        assert "vllm." in type(linear.init_int8_linear_kernel(True, False, True, "test")).__module__


def test_registers_in_front_and_once() -> None:
    qao.integrations.vllm.register()
    qao.integrations.vllm.register()
    for table, kernel in kernels._KERNELS:
        for platform in (PlatformEnum.CUDA, PlatformEnum.CPU):
            names = [one.__name__ for one in getattr(linear, table)[platform]]
            assert names[0] == kernel.__name__ and names.count(kernel.__name__) == 1


def test_vllm_finds_it_by_its_entry_point(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.syspath_prepend(installed(tmp_path, "vllm.general_plugins"))
    monkeypatch.setattr(vllm.plugins, "plugins_loaded", False)
    monkeypatch.setattr(linear, "_POSSIBLE_KERNELS", {PlatformEnum.CPU: [], PlatformEnum.CUDA: []})
    vllm.plugins.load_general_plugins()
    assert linear._POSSIBLE_KERNELS[PlatformEnum.CUDA] == [kernels.QaoMixedPrecisionKernel]


def tables() -> list[Any]:
    return [(table, {**getattr(linear, table, {})}) for table, _ in kernels._KERNELS]


@pytest.fixture
def said(monkeypatch: pytest.MonkeyPatch) -> Iterator[list[logging.LogRecord]]:
    """Messages of qao's logger in a vLLM of the future, with the record of earlier messages and failures cleared."""
    monkeypatch.setattr(served, "_warned", set())
    monkeypatch.setattr(qao.integrations.vllm, "_failed", set())
    monkeypatch.setattr(vllm, "__version__", "0.40.1.dev7+g0a1b2c3")
    with log_lines() as records:
        yield records


def check_said(said: list[logging.LogRecord], what: str, cause: str) -> None:
    """There is one line, with both versions, the part, the cause and the remedy."""
    [record] = said
    message = record.getMessage()
    assert record.levelname == "ERROR" and "\n" not in message and record.exc_info is None
    assert message.startswith(f"qao {qao.__version__} does not fit vllm 0.40.1.dev7+g0a1b2c3: {what}")
    assert cause in message and "Install a version that qao is tested with, vllm 0.30 to 0.33" in message
    assert "QAO_DISABLE_VLLM=1" in message


def test_an_unknown_version_is_tried(monkeypatch: pytest.MonkeyPatch, said: list[logging.LogRecord]) -> None:
    monkeypatch.setattr(linear, "_POSSIBLE_KERNELS", {PlatformEnum.CPU: [], PlatformEnum.CUDA: []})
    qao.integrations.vllm.register()
    assert linear._POSSIBLE_KERNELS[PlatformEnum.CUDA] == [kernels.QaoMixedPrecisionKernel]
    assert said == [] and qao.integrations.vllm.failed_parts() == set()


def renamed(weights: Any, *args: Any) -> None:
    """A function with other parameters."""


def of_three(oracle: Any, name: str) -> Any:
    """A function that returns three values."""
    own = inspect.unwrap(getattr(oracle, name))

    def function(*args: Any, **kwargs: Any) -> tuple[int, int, int]:
        raise NotImplementedError

    parameters = inspect.signature(own).replace(return_annotation=tuple[int, int, int])
    function.__signature__ = parameters  # type: ignore[attr-defined]
    return function


def more(self: Any, layer: Any, x: Any, bias: Any, more: Any) -> None:
    """A method with a parameter more."""


CONVERT, MAKE = "convert_to_wna16_moe_kernel_format", "make_wna16_moe_kernel"
SELECT = "select_fp8_moe_backend"
# Parts that fail, where vLLM differs, the name there, its new value (None: it has gone), the cause in the log.
DIFFERENCES: list[tuple[str, Any, str, Any, str]] = [
    ("kernels.register", linear, "_POSSIBLE_FP8_BLOCK_KERNELS", None, "no attribute '_POSSIBLE_FP8_BLOCK_KERNELS'"),
    ("kernels.register", MPLinearKernel, "apply_weights", None, "MPLinearKernel.apply_weights is missing"),
    ("kernels.register", MPLinearKernel, "apply_weights", more, "apply_weights has a new parameter more"),
    ("oracles.register_int4", int_wna16, MAKE, None, f"{MAKE} is missing"),
    ("oracles.register_int4", int_wna16, CONVERT, renamed, f"{CONVERT} has no parameter backend or w13 or w2"),
    ("oracles.register_int4", int_wna16, CONVERT, of_three(int_wna16, CONVERT), "returns 3 values, not 10"),
    ("oracles.register_fp8", fp8, SELECT, renamed, f"{SELECT} has no parameter config or weight_key or activation_key"),
    ("loaded.register", loader_utils, "process_weights_after_loading", renamed, "has no parameter model"),
]


@pytest.mark.parametrize(("part", "where", "name", "value", "cause"), DIFFERENCES)
def test_what_differs_is_named_and_the_rest_stays(
    part: str, where: Any, name: str, value: Any, cause: str, monkeypatch: pytest.MonkeyPatch, said: Any
) -> None:
    """No function of that part is replaced, and no other part changes."""
    if value is None:
        monkeypatch.delattr(where, name)
    else:
        monkeypatch.setattr(where, name, value)
    monkeypatch.setattr(where, "patched_by_qao", False, raising=False)
    before = tables(), {**vars(where)}
    for _ in range(2):
        qao.integrations.vllm.register()
    check_said(said, qao.integrations.vllm.WITHOUT[part], cause)
    assert (tables(), {**vars(where)}) == before
    assert qao.integrations.vllm.failed_parts() == {part}


def test_abstract_methods_that_are_new(monkeypatch: pytest.MonkeyPatch, said: list[logging.LogRecord]) -> None:
    monkeypatch.setattr(kernels.QaoFp8Kernel, "__abstractmethods__", frozenset({"quantize"}))
    before = tables()
    qao.integrations.vllm.register()
    check_said(said, "linear layers use vLLM's own kernels", "FP8ScaledMMLinearKernel has a new method quantize")
    assert tables() == before


def test_nothing_registers_without_the_key_of_the_compile_cache(
    monkeypatch: pytest.MonkeyPatch, said: list[logging.LogRecord]
) -> None:
    monkeypatch.delattr(VllmConfig, "compute_hash")
    monkeypatch.setattr(linear, "_POSSIBLE_KERNELS", {PlatformEnum.CPU: [], PlatformEnum.CUDA: []})
    qao.integrations.vllm.register()
    check_said(said, "vLLM runs without qao", "VllmConfig.compute_hash is missing")
    assert linear._POSSIBLE_KERNELS == {PlatformEnum.CPU: [], PlatformEnum.CUDA: []}
    assert qao.integrations.vllm.failed_parts() == {*qao.integrations.vllm.PARTS.values()}


def test_layers_with_properties_that_are_unknown(said: list[logging.LogRecord]) -> None:
    """They may ask for something else; a property that has gone is logged."""
    config = mixed(scalar_types.uint4b8)
    values = vars(config)
    new = dataclasses.make_dataclass("Config", [("outliers", Any, None)], bases=(type(config),))
    can_implement = kernels.QaoMixedPrecisionKernel.can_implement
    assert can_implement(new(**values)) == (True, None)
    assert can_implement(new(**values, outliers=3)) == (False, "an unknown property of the layer (outliers)")
    assert said == []
    less = dataclasses.make_dataclass("Config", ["weight_type"])(scalar_types.uint4b8)
    assert not can_implement(less)[0] and not can_implement(less)[0]
    check_said(said, "linear layers use vLLM's own kernels", "AttributeError: 'Config' object has no attribute")


def test_it_can_be_turned_off(monkeypatch: pytest.MonkeyPatch, said: list[logging.LogRecord]) -> None:
    monkeypatch.setenv("QAO_DISABLE_VLLM", "1")
    monkeypatch.setattr(linear, "_POSSIBLE_KERNELS", {PlatformEnum.CPU: [], PlatformEnum.CUDA: []})
    qao.integrations.vllm.register()
    assert linear._POSSIBLE_KERNELS[PlatformEnum.CPU] == []
    assert [record.getMessage() for record in said] == ["QAO_DISABLE_VLLM is set: vLLM runs without qao"]


def plain_key(config: Any) -> str:
    return type(config).compute_hash.__wrapped__(config)  # type: ignore[no-any-return]


def test_the_compile_cache_distinguishes_qao(monkeypatch: pytest.MonkeyPatch) -> None:
    """Both cache keys of vLLM's compiled graphs differ with qao, without it, and with another qao."""
    monkeypatch.setattr(envs, "compile_factors", dict)
    config = VllmConfig()
    folders = {"qao": aot_compile_hash_factors(config), "key": [config.compute_hash()]}
    assert config.compute_hash() == folders["key"][0] != plain_key(config)
    assert len(config.compute_hash()) == len(plain_key(config))
    assert config.compute_hash(include_version=False) != folders["key"][0]
    changes: list[tuple[Any, str, Any]] = [
        (cache_key, "__version__", "0.0.1"),
        (cache_key, "_sources", lambda: "another build of the same version"),
        (cache_key, "failed_parts", lambda: {"kernels.register"}),
    ]
    seen = {plain_key(config), config.compute_hash()}
    for where, name, value in changes:
        with monkeypatch.context() as patch:
            patch.setattr(where, name, value)
            seen.add(config.compute_hash())
            assert aot_compile_hash_factors(config) != folders["qao"]
    with monkeypatch.context() as patch:
        patch.setenv("QAO_CPU_ISA", "avx2")
        seen.add(config.compute_hash())
    assert len(seen) == 2 + len(changes) + 1
    assert config.compute_hash() == folders["key"][0]


def test_the_key_is_of_another_config_too() -> None:
    one, other = VllmConfig(), VllmConfig(additional_config={"a": 1})
    assert one.compute_hash() != other.compute_hash()

"""Third-party checkpoint layouts in SGLang's own layers; run by tests/test_sglang.py in a process."""

from __future__ import annotations

from typing import Any
from unittest import mock

import sglang_support  # noqa: F401  # first: it makes SGLang importable

# isort: split
import pytest
import qao
import torch
from accuracy import check_close
from layouts import (
    DTYPES,
    E4M3,
    E4M3_BLOCK,
    E4M3_STATIC,
    FLOAT,
    INT8,
    INT8_ASYM,
    LAYERS,
    Checkpoint,
    add_bias,
    check,
    fp8_checkpoint,
    states_of,
)
from loaded import KINDS, K, N
from ops_schemes import Activation
from qao.integrations.sglang import layouts
from qao.integrations.sglang.method import QaoLayoutMethod
from sglang.srt.layers import quantization
from sglang.srt.layers.linear import ReplicatedLinear
from sglang.srt.layers.quantization.fp8 import Fp8LinearMethod
from sglang.srt.layers.quantization.gptq import CPUGPTQConfig
from sglang.srt.layers.quantization.unquant import UnquantizedEmbeddingMethod
from sglang.srt.layers.vocab_parallel_embedding import ParallelLMHead
from sglang.srt.runtime_context import get_parallel
from sglang_support import Loaded, engine, load, no_triton, shard
from test_checkpoints_gptq_awq import Weight

BF16 = torch.bfloat16

# What becomes of x, by case of compressed-tensors.
COMPRESSED: dict[str, Activation] = {
    "W4A16": FLOAT,
    "W4A16 asym": FLOAT,
    "W4A16 g32": FLOAT,
    "W4A16 actorder": FLOAT,
    "W4A16 channel": FLOAT,
    "W4A16 channel asym": FLOAT,
    "W8A16 channel": FLOAT,
    "W8A8": INT8,
    "W8A8 asym": INT8_ASYM,
    "W8A8 tensor": INT8,
    "FP8_DYNAMIC": E4M3,
    "FP8_BLOCK": E4M3_BLOCK,
    "FP8": E4M3_STATIC,
    "FP8 channel, static": E4M3_STATIC,
    "FP8 tensor by token": E4M3,
    "FP8 weights": FLOAT,
}


@pytest.mark.parametrize(("kind", "size", "dtype"), LAYERS)
@pytest.mark.parametrize("case", COMPRESSED)
def test_compressed_tensors(case: str, kind: str, size: int, dtype: str) -> None:
    torch.manual_seed(len(case))
    config, states, dense = states_of(case, kind, DTYPES[dtype])
    biases = add_bias(kind, states, DTYPES[dtype])
    for rank in range(size):
        loaded = load("compressed-tensors", kind, config, states, rank, size, DTYPES[dtype])
        assert loaded.served
        check(loaded, dense, biases, COMPRESSED[case], DTYPES[dtype])


@pytest.mark.parametrize(("kind", "size", "dtype"), LAYERS)
@pytest.mark.parametrize(("bits", "group_size"), [(4, 32), (4, 128), (4, -1), (8, -1)])
def test_gptq(bits: int, group_size: int, kind: str, size: int, dtype: str) -> None:
    torch.manual_seed(bits + group_size)
    made = Checkpoint(kind, DTYPES[dtype], group_size, bits=bits, zero=1 << bits - 1)
    states = made.states(("qweight", "qzeros", "scales", "g_idx"), Weight.gptq)
    biases = add_bias(kind, states, DTYPES[dtype])
    config = {"bits": bits, "group_size": group_size, "desc_act": False, "sym": True}
    for rank in range(size):
        loaded = load("gptq_marlin", kind, config, states, rank, size, DTYPES[dtype])
        assert loaded.served
        check(loaded, made.dense, biases, FLOAT, DTYPES[dtype])


@pytest.mark.parametrize("size", [1, 2])
@pytest.mark.parametrize("kind", KINDS)
def test_gptq_with_zero_points(kind: str, size: int, monkeypatch: pytest.MonkeyPatch) -> None:
    """SGLang reads them on CPUs only."""
    monkeypatch.setitem(quantization.QUANTIZATION_METHODS, "gptq", CPUGPTQConfig)
    layouts.register()
    torch.manual_seed(size)
    made = Checkpoint(kind, BF16, 64)
    states = made.states(("qweight", "qzeros", "scales", "g_idx"), Weight.gptq)
    biases = add_bias(kind, states, BF16)
    for rank in range(size):
        loaded = load("gptq", kind, {"bits": 4, "group_size": 64, "desc_act": False}, states, rank, size)
        assert loaded.served
        check(loaded, made.dense, biases, FLOAT, BF16)


@pytest.mark.parametrize(("kind", "size", "dtype"), LAYERS)
@pytest.mark.parametrize(("method", "group_size"), [("awq", 32), ("awq", 256), ("awq_marlin", 64), ("awq_marlin", 128)])
def test_awq(method: str, group_size: int, kind: str, size: int, dtype: str) -> None:
    torch.manual_seed(group_size)
    made = Checkpoint(kind, DTYPES[dtype], group_size)
    states = made.states(("qweight", "qzeros", "scales"), Weight.awq)
    biases = add_bias(kind, states, DTYPES[dtype])
    config = {"bits": 4, "group_size": group_size, "zero_point": True}
    for rank in range(size):
        loaded = load(method, kind, config, states, rank, size, DTYPES[dtype])
        assert loaded.served
        check(loaded, made.dense, biases, FLOAT, DTYPES[dtype])


@pytest.mark.parametrize("size", [1, 2])
@pytest.mark.parametrize("kind", KINDS)
@pytest.mark.parametrize("scheme", ["block", "dynamic", "static"])
def test_fp8(scheme: str, kind: str, size: int) -> None:
    """Matrices that are joined keep their scales."""
    torch.manual_seed(size)
    config, states, dense = fp8_checkpoint(kind, scheme, (0.004, 0.001, 0.02))
    biases = add_bias(kind, states, BF16)
    what = {"block": E4M3_BLOCK, "dynamic": E4M3, "static": E4M3_STATIC}[scheme]
    for rank in range(size):
        loaded = load("fp8", kind, config, states, rank, size)
        assert loaded.served
        check(loaded, dense, biases, what, BF16)


@pytest.mark.parametrize("scheme", ["block", "dynamic", "static"])
def test_fp8_weights_alone(scheme: str, monkeypatch: pytest.MonkeyPatch) -> None:
    """As SGLang multiplies them on GPUs before 8.9."""
    torch.manual_seed(1)
    init = Fp8LinearMethod.__init__

    def of_an_older_gpu(self: Any, *args: Any) -> None:
        init(self, *args)
        self.use_marlin = True

    monkeypatch.setattr(Fp8LinearMethod, "__init__", of_an_older_gpu)
    config, states, dense = fp8_checkpoint("qkv", scheme, (0.004, 0.001, 0.02))
    loaded = load("fp8", "qkv", config, states)
    assert loaded.layer.quant_method.kernel.operator_name == "fp8_mm"
    check(loaded, dense, [], FLOAT, BF16)


@pytest.mark.parametrize("size", [1, 2])
@pytest.mark.parametrize("kind", KINDS)
def test_modelopt_fp8(kind: str, size: int) -> None:
    torch.manual_seed(size)
    _, states, dense = fp8_checkpoint(kind, "static", (0.004, 0.001, 0.02))
    biases = add_bias(kind, states, BF16)
    for rank in range(size):
        loaded = load("modelopt_fp8", kind, {"quant_method": "modelopt", "quant_algo": "FP8"}, states, rank, size)
        assert loaded.served
        check(loaded, dense, biases, E4M3_STATIC, BF16)


@pytest.mark.parametrize("size", [1, 2])
@pytest.mark.parametrize("kind", KINDS)
@pytest.mark.parametrize("method", ["w8a8_int8", "w8a8_fp8"])
def test_w8a8(method: str, kind: str, size: int) -> None:
    """Formats that SGLang reads in this way, from compressed-tensors or others."""
    torch.manual_seed(size)
    case, what = ("W8A8", INT8) if method == "w8a8_int8" else ("FP8_DYNAMIC", E4M3)
    _, states, dense = states_of(case, kind, BF16)
    biases = add_bias(kind, states, BF16)
    for rank in range(size):
        loaded = load(method, kind, {"quant_method": method}, states, rank, size)
        assert loaded.served
        check(loaded, dense, biases, what, BF16)


@pytest.mark.parametrize("case", ["W4A16", "W8A8", "FP8", "FP8_BLOCK"])
def test_a_replicated_layer(case: str) -> None:
    torch.manual_seed(4)
    config, states, dense = states_of(case, "column", BF16)
    made = quantization.QUANTIZATION_METHODS["compressed-tensors"].from_config(config)
    with engine(), shard(0, 1):
        layer = ReplicatedLinear(K, N, bias=False, quant_config=made, prefix="model.layers.0.mlp.gate")
        for name, parameter in layer.named_parameters():
            parameter.weight_loader(parameter, states[0][name])
        layer.quant_method.process_weights_after_loading(layer)
    x, what = torch.randn(3, K, dtype=BF16), COMPRESSED[case]
    check_close(layer(x)[0], x, dense[0], None, what.seen(x), what.slack(x, dense[0]))


def test_a_weight_with_two_names_is_held_once() -> None:
    """DeepSeek's layers have them."""
    config, states, dense = states_of("W4A16", "column", BF16)
    with mock.patch.object(Loaded, "load"):
        loaded = load("compressed-tensors", "column", config, states)
    loaded.layer.weight = loaded.layer.weight_packed
    loaded.load(states)
    assert {name for name, _ in loaded.layer.named_parameters()} == {"weight_packed", "weight_scale"}
    check(loaded, dense, [], FLOAT, BF16)


def test_a_checkpoint_may_join_matrices_itself() -> None:
    """Then one scale serves all of them."""
    torch.manual_seed(2)
    config, states, dense = fp8_checkpoint("gate_up", "static")
    joined = {**states[0], "weight": torch.cat([state["weight"] for state in states])}
    with engine(), mock.patch.dict("loaded.KINDS", {"gate_up": [("", None, 2 * N)]}):
        loaded = Loaded("gate_up", quantization.QUANTIZATION_METHODS["fp8"].from_config(config), [joined])
    check(loaded, dense, [], E4M3_STATIC, BF16)


def test_a_head() -> None:
    torch.manual_seed(3)
    config, states, dense = states_of("FP8_DYNAMIC", "column", BF16)
    config["config_groups"]["group_0"]["targets"] = ["re:.*lm_head"]
    made = quantization.QUANTIZATION_METHODS["compressed-tensors"].from_config(config)
    with engine(), get_parallel().override(tp_rank=0, tp_size=1, tp_group=None):
        head = ParallelLMHead(N, K, quant_config=made, prefix="lm_head")
    if type(head.quant_method) is UnquantizedEmbeddingMethod:
        pytest.skip("this version leaves heads of compressed-tensors in floats")
    assert type(head.quant_method) is QaoLayoutMethod
    for name, parameter in head.named_parameters():
        parameter.weight_loader(parameter, states[0][name])
    head.quant_method.process_weights_after_loading(head)
    x = torch.randn(3, K, dtype=BF16)
    check_close(head.quant_method.apply(head, x), x, dense[0], None, E4M3.seen(x), E4M3.slack(x, dense[0]))


def test_no_tokens() -> None:
    for case in ("W4A16", "W8A8", "FP8_DYNAMIC", "FP8_BLOCK"):
        config, states, _ = states_of(case, "column", BF16)
        loaded = load("compressed-tensors", "column", config, states)
        assert loaded(torch.empty(0, K, dtype=BF16)).shape == (0, N)


@pytest.mark.parametrize("case", ["W4A16 asym", "W8A8 asym", "FP8_DYNAMIC", "FP8_BLOCK", "FP8 weights"])
def test_compiles_into_one_graph(case: str) -> None:
    config, states, _ = states_of(case, "qkv", BF16)
    loaded = load("compressed-tensors", "qkv", config, states)
    x = torch.randn(3, K, dtype=BF16)
    compiled = torch.compile(lambda x: loaded.layer(x)[0], fullgraph=True, backend="aot_eager")
    with torch.no_grad(), no_triton():
        assert torch.equal(compiled(x), loaded(x))


@pytest.mark.parametrize("method", ["compressed-tensors", "gptq_marlin", "awq"])
def test_weights_are_held_once(method: str) -> None:
    """No tensor of the checkpoint is kept next to the packed weight."""
    if method == "compressed-tensors":
        config, states, _ = states_of("W4A16 asym", "qkv", BF16)
    else:
        make = Weight.awq if method == "awq" else Weight.gptq
        made = Checkpoint("qkv", BF16, 128, zero=8)
        names = ("qweight", "qzeros", "scales") if method == "awq" else ("qweight", "qzeros", "scales", "g_idx")
        states = made.states(names, make)
        config = {"bits": 4, "group_size": 128, "zero_point": True, "desc_act": False, "sym": True}
    loaded = load(method, "qkv", config, states)
    held = sum(p.numel() * p.element_size() for p in loaded.layer.parameters())
    rows = sum(part[2] for part in KINDS["qkv"])
    scheme = qao.Int4WeightOnly(128, symmetric=method == "gptq_marlin")
    packed = scheme.empty(rows, K, dtype=BF16, device="meta").tensors()
    assert held == sum(t.numel() * t.element_size() for t in packed.values() if t is not None)


@pytest.mark.parametrize("name", ["moe_wna16", "auto-round"])
@pytest.mark.parametrize("of", ["gptq", "awq"])
def test_methods_that_pass_layers_on(of: str, name: str) -> None:
    torch.manual_seed(5)
    made = Checkpoint("gate_up", BF16, 64, zero=8)
    names = ("qweight", "qzeros", "scales", *(("g_idx",) if of == "gptq" else ()))
    states = made.states(names, Weight.awq if of == "awq" else Weight.gptq)
    config = {"quant_method": of, "bits": 4, "group_size": 64, "sym": True, "desc_act": False, "zero_point": True}
    loaded = load(name, "gate_up", {**config, "packing_format": f"auto_round:auto_{of}"}, states)
    assert loaded.served
    check(loaded, made.dense, [], FLOAT, BF16)


RELOADED = ["W4A16", "W4A16 asym", "W8A16 channel", "W8A8", "W8A8 asym", "FP8", "FP8_DYNAMIC", "FP8_BLOCK"]


@pytest.mark.parametrize("kind", ["qkv", "row"])
@pytest.mark.parametrize("case", RELOADED)
def test_other_weights(case: str, kind: str) -> None:
    """They arrive at the addresses of the first ones, which CUDA graphs hold."""
    torch.manual_seed(0)
    config, states, _ = states_of(case, kind, BF16)
    loaded = load("compressed-tensors", kind, config, states, 1, 2)
    places = {name: one.data_ptr() for name, one in loaded.layer.named_parameters()}
    _, states, _ = states_of(case, kind, BF16)
    expected = load("compressed-tensors", kind, config, states, 1, 2)
    x = torch.randn(5, K, dtype=BF16)
    for _ in range(2):
        with engine(BF16), loaded.shard(1, 2):
            loaded.layer.quant_method.restore_weights_before_loading(loaded.layer)
            loaded.load(states)
        assert torch.equal(loaded(x), expected(x))
        assert {name: one.data_ptr() for name, one in loaded.layer.named_parameters()} == places


@pytest.mark.parametrize("method", ["gptq_marlin", "awq_marlin"])
def test_other_weights_of_gptq_and_awq(method: str) -> None:
    torch.manual_seed(0)
    gptq = method == "gptq_marlin"
    config: dict[str, Any] = {"bits": 4, "group_size": 128, "zero_point": True}
    config |= {"desc_act": False, "sym": True} if gptq else {}
    names = ("qweight", "qzeros", "scales", "g_idx") if gptq else ("qweight", "qzeros", "scales")
    made = [Checkpoint("qkv", BF16, 128, **({"bits": 4, "zero": 8} if gptq else {})) for _ in range(2)]
    first, second = (one.states(names, Weight.gptq if gptq else Weight.awq) for one in made)
    loaded, expected = (load(method, "qkv", config, states) for states in (first, second))
    x = torch.randn(5, K, dtype=BF16)
    with engine(BF16), loaded.shard(0, 1):
        loaded.layer.quant_method.restore_weights_before_loading(loaded.layer)
        loaded.load(second)
    assert torch.equal(loaded(x), expected(x))


@pytest.mark.parametrize("case", ["W4A16", "FP8_DYNAMIC"])
def test_a_layer_without_other_weights_keeps_its_own(case: str) -> None:
    """An update of only some tensors of a layer is an error."""
    config, states, _ = states_of(case, "qkv", BF16)
    loaded = load("compressed-tensors", "qkv", config, states)
    method, layer, x = loaded.layer.quant_method, loaded.layer, torch.randn(5, K, dtype=BF16)
    expected = loaded(x)
    method.restore_weights_before_loading(layer)
    method.process_weights_after_loading(layer)
    assert torch.equal(loaded(x), expected)
    method.restore_weights_before_loading(layer)
    scale = dict(layer.named_parameters())["weight_scale"]
    scale.weight_loader(scale, states[0]["weight_scale"], "q")
    with pytest.raises(RuntimeError, match="only some of this layer's tensors"):
        method.process_weights_after_loading(layer)

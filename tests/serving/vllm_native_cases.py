"""Checkpoints in qao's own format in vLLM's own layers; run by tests/test_vllm.py."""

from __future__ import annotations

import sys
from typing import Any

import vllm_support  # noqa: F401  # first: it makes vLLM importable

# isort: split
import pytest
import qao
import qao.integrations.vllm
import torch
from accuracy import check_close
from checkpoint_support import SCHEMES
from loaded import KINDS, K
from native import DTYPE, JOINED_CASES, check, check_joined, checkpoint, exact
from qao.nn import marker
from qao.schemes import Scheme
from torch import Tensor, nn
from vllm.model_executor.layers.fused_moe import RoutedExperts
from vllm.model_executor.layers.linear import (
    KimiK3MergedQKVGateLinear,
    MinimaxM3QKVParallelLinearWithIndexer,
    UnquantizedLinearMethod,
)
from vllm.model_executor.layers.quantization import QUANTIZATION_METHODS, get_quantization_config
from vllm.model_executor.layers.vocab_parallel_embedding import ParallelLMHead, VocabParallelEmbedding
from vllm_support import _MAKE, Loaded, engine, shard


def load(kind: str, content: dict[str, Any], states: list[dict[str, Tensor]], rank: int = 0, size: int = 1) -> Loaded:
    return Loaded(kind, get_quantization_config("qao").from_config(content), states, rank, size)


@pytest.mark.parametrize(("kind", "size"), [*((kind, 2) for kind in KINDS), ("qkv", 1)])
@pytest.mark.parametrize("scheme", SCHEMES, ids=str)
def test_layers(scheme: Scheme, kind: str, size: int) -> None:
    torch.manual_seed(size)
    content, states, dense = checkpoint(kind, scheme)
    with engine(DTYPE):
        for rank in range(size):
            loaded = load(kind, content, states, rank, size)
            check(loaded, scheme, states, dense)


@pytest.mark.parametrize(("kind", "size"), JOINED_CASES)
@pytest.mark.parametrize("scheme", SCHEMES, ids=str)
def test_layers_that_a_checkpoint_has_joined(scheme: Scheme, kind: str, size: int) -> None:
    with engine(DTYPE):
        check_joined(load, kind, size, scheme)


@pytest.mark.parametrize("scheme", [SCHEMES[0], qao.Float8DynamicActivationFloat8Weight("tensor")], ids=str)
def test_compiles_into_one_graph(scheme: Scheme) -> None:
    content, states, _ = checkpoint("qkv", scheme)
    with engine(DTYPE), torch.no_grad():
        loaded = load("qkv", content, states)
        x = torch.randn(3, K, dtype=DTYPE)
        compiled = torch.compile(lambda x: loaded.layer(x)[0], fullgraph=True, backend="aot_eager")
        assert torch.equal(compiled(x), loaded(x))


def test_the_name_is_known_once() -> None:
    qao.integrations.vllm.register()
    assert QUANTIZATION_METHODS.count("qao") == 1


def test_what_is_not_quantized_stays_in_floats() -> None:
    content, _, _ = checkpoint("column", SCHEMES[0])
    with engine(DTYPE):
        layer = _MAKE["row"](quant_config=get_quantization_config("qao").from_config(content), bias=False)
        assert type(layer.quant_method) is UnquantizedLinearMethod


def test_a_quantized_head() -> None:
    linear = nn.Linear(K, 96, bias=False, dtype=DTYPE)
    made = qao.QuantLinear.from_linear(linear, SCHEMES[0])
    content = qao.QaoConfig(layers={"lm_head": exact(SCHEMES[0])}).to_dict()
    with engine(DTYPE):
        head = ParallelLMHead(
            96,
            K,
            params_dtype=DTYPE,
            quant_config=get_quantization_config("qao").from_config(content),
            prefix="lm_head",
        )
        parameters = dict(head.named_parameters())
        for name, tensor in made.state_dict().items():
            parameters[name].weight_loader(parameters[name], tensor)
        head.quant_method.process_weights_after_loading(head)
        x = torch.randn(4, K, dtype=DTYPE)
        y = head.quant_method.apply(head, x)
        check_close(y[:, :96].contiguous(), x, made.dequantize(torch.float64))


def test_layers_that_are_joined_must_be_quantized_alike() -> None:
    content, states, _ = checkpoint("qkv", SCHEMES[0])
    content["layers"][0]["modules"].pop()
    with engine(DTYPE), pytest.raises(ValueError, match="qkv_proj joins .*v_proj: not quantized. Give them one scheme"):
        load("qkv", content, states)


@pytest.mark.parametrize(
    ("scheme", "kind", "size", "message"),
    [
        (qao.Int4WeightOnly(256), "row", 4, "gets 128 columns, but int4 g256 .* at multiples of 256 columns. Choose"),
        (qao.Int4WeightOnly(-1), "row", 16, "gets 32 columns, .* at multiples of 64 columns"),
        (qao.Int4WeightOnly(32), "column", 32, r"gets matrices of \[8\] rows, .* at multiples of 16 rows"),
        (qao.Fp4WeightOnly("nvfp4"), "row", 16, "gets 32 columns, but fp4 nvfp4 .* at multiples of 64 columns"),
        (qao.Fp4WeightOnly(), "gate_up", 32, r"gets matrices of \[8, 8\] rows, .* at multiples of 16 rows"),
        (qao.Float8WeightOnly("block"), "gate_up", 4, r"gets matrices of \[64, 64\] rows, .* at multiples of 128 rows"),
    ],
)
def test_cuts_within_what_shares_a_scale(scheme: Scheme, kind: str, size: int, message: str) -> None:
    content, states, _ = checkpoint(kind, scheme)
    with engine(DTYPE), pytest.raises(ValueError, match=message):
        load(kind, content, states, 0, size)


def test_a_checkpoint_that_is_another_than_its_config() -> None:
    content, _, _ = checkpoint("column", qao.Int4WeightOnly(128))
    _, states, _ = checkpoint("column", qao.Int4WeightOnly(128, True))
    with (
        engine(DTYPE),
        pytest.raises(ValueError, match="config says int4 g128 asymmetric, but .* Save the model again"),
    ):
        load("column", content, [dict(reversed(states[0].items()))])


@pytest.mark.parametrize("size", [1, 2])
@pytest.mark.parametrize("kind", ["column", "row", "qkv", "gate_up"])
def test_a_weight_of_another_size(kind: str, size: int) -> None:
    """Four-bit weights [124, K] and [128, K] have tensors of one shape: only the marker knows."""
    content, states, _ = checkpoint(kind, qao.Int4WeightOnly(64))
    name = marker.MARKER
    found = marker.decode(states[-1][name], name)
    states[-1][name] = marker.encode(found._replace(out_features=found.out_features - 4))
    with (
        engine(DTYPE),
        pytest.raises(ValueError, match=f"weight is .{found.out_features}, .* but the checkpoint holds"),
    ):
        load(kind, content, states, 0, size)


def test_more_ranks_than_heads_of_k_and_v() -> None:
    content, states, _ = checkpoint("qkv", qao.Int8WeightOnly())
    with engine(DTYPE):
        for rank in range(8):
            load("qkv", content, states, rank, 8)


def test_matrices_that_every_rank_holds() -> None:
    """Subclasses of vLLM's merged layers give some matrices to every rank, or name more matrices than q, k and v."""
    scheme = qao.Int8WeightOnly()
    config = get_quantization_config("qao").from_config(qao.QaoConfig(layers={"fused": scheme}).to_dict())
    with engine(DTYPE), shard(1, 2):
        options: dict[str, Any] = {"quant_config": config, "prefix": "fused", "bias": False}
        merged = KimiK3MergedQKVGateLinear(K, 32, 48, 16, 4, 16, **options)
        indexed = MinimaxM3QKVParallelLinearWithIndexer(K, 16, 4, 2, 2, 32, **options)
        sizes = {"q": 64, "k": 32, "v": 32, "index_q": 64, "index_k": 32}
        for layer, rows in ((merged, {0: 32, 1: 64, 2: 64}), (indexed, sizes)):
            target = layer.pip_install_qao
            for part, n in rows.items():
                target.weight_loader(target, marker.encode(marker.Marker(scheme.to_dict(), n, K, DTYPE)), part)
                other = marker.encode(marker.Marker(scheme.to_dict(), n + 4, K, DTYPE))
                with pytest.raises(ValueError, match=f"fused: the model's weight is .*{n}.* holds a weight .{n + 4},"):
                    target.weight_loader(target, other, part)


def test_a_matrix_that_does_not_come() -> None:
    content, states, _ = checkpoint("qkv", SCHEMES[0])
    states[2] = {}
    with engine(DTYPE), pytest.raises(ValueError, match="qkv_proj: vLLM has loaded 2 of 3 weights into it"):
        load("qkv", content, states)


def test_numbers_that_are_made_up() -> None:
    """With --load-format dummy nothing is loaded into any layer."""
    content, states, _ = checkpoint("qkv", SCHEMES[0])
    with engine(DTYPE):
        load("qkv", content, [{"bias": state["bias"]} for state in states])


def test_experts_and_embeddings_are_refused() -> None:
    names = {"model.layers.0.mlp.experts.0.up_proj": SCHEMES[0], "model.embed_tokens": SCHEMES[0]}
    config = get_quantization_config("qao").from_config(qao.QaoConfig(layers=names).to_dict())
    experts, embedding = RoutedExperts.__new__(RoutedExperts), VocabParallelEmbedding.__new__(VocabParallelEmbedding)
    with pytest.raises(NotImplementedError, match="model.layers.0.mlp.experts: experts quantized by qao .1 layers"):
        config.get_quant_method(experts, "model.layers.0.mlp.experts")
    with pytest.raises(NotImplementedError, match="model.embed_tokens: vLLM does not serve a quantized embedding"):
        config.get_quant_method(embedding, "model.embed_tokens")
    with pytest.raises(NotImplementedError, match="model.embed_tokens: vLLM does not serve"):
        config.get_quant_method(embedding, "")  # as Llama is made
    assert config.get_quant_method(embedding, "model.embed_positions") is None


def test_an_interface_that_has_gone(monkeypatch: pytest.MonkeyPatch) -> None:
    """In a vLLM of the future, which has no kernels for such layers."""
    content, states, _ = checkpoint("column", SCHEMES[0])
    monkeypatch.setitem(sys.modules, "qao.integrations.vllm.linear", None)
    message = "does not fit vllm .*: checkpoints in qao's own format cannot be served. Mod.* Install a version that"
    with engine(DTYPE), pytest.raises(RuntimeError, match=message):
        load("column", content, states)


def test_a_model_that_is_yet_to_be_quantized_is_refused() -> None:
    content = qao.QaoConfig(qao.Int4WeightOnly()).to_dict()
    with pytest.raises(ValueError, match="vLLM serves models that are already quantized"):
        get_quantization_config("qao").from_config(content)

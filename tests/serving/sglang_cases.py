"""Checkpoints in qao's own format in SGLang's own layers; run by tests/test_sglang.py in a process."""

from __future__ import annotations

import sys
from pathlib import Path
from typing import Any

import sglang_support  # noqa: F401  # first: it makes SGLang importable

# isort: split
import pytest
import qao
import qao.integrations.sglang
import sglang
import torch
from checkpoint_support import SCHEMES
from loaded import KINDS, installed
from native import JOINED_CASES, check, check_joined, checkpoint
from qao.integrations.serving import common as served
from qao.schemes import Scheme
from sglang.srt import plugins
from sglang.srt.layers import quantization
from sglang.srt.layers.linear import LinearBase
from sglang.srt.layers.moe.fused_moe_triton import FusedMoE
from sglang.srt.layers.quantization.unquant import UnquantizedLinearMethod
from sglang.srt.layers.vocab_parallel_embedding import VocabParallelEmbedding
from sglang_support import Loaded
from torch import Tensor


def load(kind: str, content: dict[str, Any], states: list[dict[str, Tensor]], rank: int = 0, size: int = 1) -> Loaded:
    return Loaded(kind, quantization.get_quantization_config("qao").from_config(content), states, rank, size)


@pytest.mark.parametrize(("kind", "size"), [*((kind, 2) for kind in KINDS), ("qkv", 1)])
@pytest.mark.parametrize("scheme", SCHEMES, ids=str)
def test_layers(scheme: Scheme, kind: str, size: int) -> None:
    torch.manual_seed(size)
    content, states, dense = checkpoint(kind, scheme)
    for rank in range(size):
        loaded = load(kind, content, states, rank, size)
        check(loaded, scheme, states, dense)


@pytest.mark.parametrize(("kind", "size"), JOINED_CASES)
@pytest.mark.parametrize("scheme", SCHEMES, ids=str)
def test_layers_that_a_checkpoint_has_joined(scheme: Scheme, kind: str, size: int) -> None:
    check_joined(load, kind, size, scheme)


def config(*names: str) -> Any:
    content = qao.QaoConfig(layers=dict.fromkeys(names, SCHEMES[0])).to_dict()
    return quantization.get_quantization_config("qao").from_config(content)


def test_layers_that_are_joined_must_be_quantized_alike() -> None:
    """Also in models that do not declare the joined layers."""
    made = config("model.layers.0.self_attn.q_proj", "model.layers.0.self_attn.k_proj")
    with pytest.raises(ValueError, match="qkv_proj joins .*v_proj: not quantized. Give them one scheme"):
        made.get_quant_method(LinearBase.__new__(LinearBase), "model.layers.0.self_attn.qkv_proj")


def test_what_is_not_quantized_stays_in_floats() -> None:
    method = config("model.layers.0.mlp.fc1").get_quant_method(LinearBase.__new__(LinearBase), "model.layers.1.mlp.fc1")
    assert type(method) is UnquantizedLinearMethod


def test_cuts_within_what_shares_a_scale() -> None:
    content, states, _ = checkpoint("row", qao.Int4WeightOnly(256))
    with pytest.raises(ValueError, match="gets 128 columns, but int4 g256 .* at multiples of 256 columns. Choose"):
        load("row", content, states, 0, 4)


def test_a_matrix_that_does_not_come() -> None:
    content, states, _ = checkpoint("qkv", SCHEMES[0])
    states[2] = {}
    with pytest.raises(ValueError, match="qkv_proj: SGLang has loaded 2 of 3 weights into it"):
        load("qkv", content, states)


def test_experts_and_embeddings_are_refused() -> None:
    made = config("model.layers.0.mlp.experts.0.up_proj", "model.embed_tokens")
    with pytest.raises(NotImplementedError, match="model.layers.0.mlp.experts: experts quantized by qao .*in SGLang"):
        made.get_quant_method(FusedMoE.__new__(FusedMoE), "model.layers.0.mlp.experts")
    with pytest.raises(NotImplementedError, match="model.embed_tokens: SGLang does not serve a quantized embedding"):
        made.get_quant_method(VocabParallelEmbedding.__new__(VocabParallelEmbedding), "model.embed_tokens")


def test_sglang_finds_it_by_its_entry_point(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.syspath_prepend(installed(tmp_path, "sglang.srt.plugins"))
    monkeypatch.setattr(plugins, "_plugins_loaded", False)
    monkeypatch.delitem(quantization.QUANTIZATION_METHODS, "qao")
    plugins.load_plugins()
    assert "qao" in quantization.QUANTIZATION_METHODS


def test_an_unknown_version_is_tried(monkeypatch: pytest.MonkeyPatch, caplog: pytest.LogCaptureFixture) -> None:
    monkeypatch.setattr(served, "_warned", set())
    monkeypatch.setattr(sglang, "__version__", "0.6.1.dev3+g0a1b2c3", raising=False)
    monkeypatch.delitem(quantization.QUANTIZATION_METHODS, "qao")
    qao.integrations.sglang.register()
    assert "qao" in quantization.QUANTIZATION_METHODS and not caplog.records


def test_an_unknown_version_without_what_a_part_needs(
    monkeypatch: pytest.MonkeyPatch, caplog: pytest.LogCaptureFixture
) -> None:
    """Its own kernels remain, and one line for each part names both versions and the remedy."""
    monkeypatch.setattr(served, "_warned", set())
    monkeypatch.setattr(sglang, "__version__", "0.6.1.dev3+g0a1b2c3", raising=False)
    monkeypatch.delattr(quantization, "CPU_QUANTIZATION_METHODS")
    before = dict(quantization.QUANTIZATION_METHODS)
    for _ in range(2):
        qao.integrations.sglang.register()
    assert quantization.QUANTIZATION_METHODS == before
    for record, part in zip(caplog.records, ("config", "layouts"), strict=True):
        message = record.getMessage()
        assert record.levelname == "ERROR" and record.name.startswith("sglang.") and "\n" not in message
        what = qao.integrations.sglang.WITHOUT[part]
        assert message.startswith(f"qao {qao.__version__} does not fit sglang 0.6.1.dev3+g0a1b2c3: {what}. Attr")
        assert "Install a version that qao is tested with, sglang 0.5.16 and 0.5.20 to 0.5.23" in message


def test_an_interface_that_has_gone(monkeypatch: pytest.MonkeyPatch) -> None:
    """In an SGLang of the future, which has no kernels for such layers."""
    monkeypatch.setitem(sys.modules, "qao.integrations.sglang.linear", None)
    message = "does not fit sglang .*: checkpoints in qao's own format cannot be served. Mod.* Install a version that"
    with pytest.raises(RuntimeError, match=message):
        config("a").get_quant_method(LinearBase.__new__(LinearBase), "a")


def test_it_can_be_turned_off(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("QAO_DISABLE_SGLANG", "1")
    monkeypatch.delitem(quantization.QUANTIZATION_METHODS, "qao")
    qao.integrations.sglang.register()
    assert "qao" not in quantization.QUANTIZATION_METHODS

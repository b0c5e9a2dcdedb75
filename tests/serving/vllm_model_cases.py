"""Models written by ``save_pretrained`` in vLLM's own loader; run by tests/test_vllm.py."""

from __future__ import annotations

import logging
from collections.abc import Iterator
from pathlib import Path
from typing import Any
from unittest import mock

import vllm_support  # noqa: F401  # first: it makes vLLM importable

# isort: split
import pytest
import qao
import torch
import transformers
from accuracy import check_close
from native import DTYPE, activation
from qao.nn.experts import QuantExperts
from safetensors.torch import load_file, save_file
from transformers import LlamaConfig, LlamaForCausalLM
from vllm.config import DeviceConfig, LoadConfig, ModelConfig, VllmConfig, set_current_vllm_config
from vllm.model_executor.layers.fused_moe import RoutedExperts
from vllm.model_executor.model_loader import get_model
from vllm.model_executor.models import registry
from vllm_support import engine, log_lines

# vLLM's layers, by the last part of their names, and the layers they join.
LAYERS = {
    "qkv_proj": ["q_proj", "k_proj", "v_proj"],
    "o_proj": ["o_proj"],
    "gate_up_proj": ["gate_proj", "up_proj"],
    "down_proj": ["down_proj"],
}


def llama(intermediate_size: int) -> Any:
    torch.manual_seed(0)
    sizes = {"hidden_size": 128, "num_attention_heads": 4, "num_key_value_heads": 2, "vocab_size": 320}
    config = LlamaConfig(intermediate_size=intermediate_size, num_hidden_layers=2, max_position_embeddings=64, **sizes)
    config.tie_word_embeddings = False
    return LlamaForCausalLM(config).to(DTYPE)


@pytest.fixture
def without_processes(monkeypatch: pytest.MonkeyPatch) -> Iterator[None]:
    """Avoid processes and GPU calls of vLLM.

    vLLM queries the capabilities of a model class in a separate process without the stand-ins, and empties a GPU cache.
    """
    monkeypatch.setattr(registry, "_run_in_subprocess", lambda function: function())
    with mock.patch.object(torch.accelerator, "empty_cache"):
        yield


@pytest.fixture
def logged() -> Iterator[list[logging.LogRecord]]:
    """qao's lines in the log of vLLM."""
    with log_lines() as records:
        yield records


def load(folder: Path) -> tuple[Any, str]:
    """vLLM's model, and the quantization it detects."""
    config = ModelConfig(model=str(folder), skip_tokenizer_init=True, dtype="bfloat16", max_model_len=32)
    devices, files = DeviceConfig(device="cpu"), LoadConfig(load_format="safetensors")
    whole = VllmConfig(model_config=config, load_config=files, device_config=devices)
    with engine(DTYPE), set_current_vllm_config(whole):
        return get_model(vllm_config=whole), config.quantization


@pytest.mark.parametrize(
    ("scheme", "intermediate_size", "method"),
    [
        (qao.Int4WeightOnly(128, whole_zeros=True), 256, "compressed-tensors"),
        (qao.Int4WeightOnly(128), 256, "qao"),  # zero points that are not whole
        (qao.Int8DynamicActivationInt8Weight(), 256, "compressed-tensors"),
        (qao.Float8DynamicActivationFloat8Weight("row"), 256, "compressed-tensors"),
        (qao.Int4WeightOnly(128), 192, "qao"),  # a group that is short, which compressed-tensors cannot say
        (qao.Int8DynamicActivationInt4Weight(128, symmetric_activations=False), 192, "qao"),
    ],
    ids=str,
)
def test_a_saved_model(
    scheme: qao.schemes.Scheme,
    intermediate_size: int,
    method: str,
    tmp_path: Path,
    without_processes: None,
    logged: list[logging.LogRecord],
) -> None:
    ours = llama(intermediate_size)
    qao.quantize_(ours, scheme)
    ours.save_pretrained(tmp_path)
    theirs, found = load(tmp_path)
    assert found == method
    [record] = logged
    assert record.levelname == "INFO" and record.getMessage().startswith(
        f"qao {qao.__version__} serves 9 of 9 quantized layers: 9 Qao"
    )
    modules, what = dict(theirs.named_modules()), activation(scheme)
    for path in ("model.layers.0", "model.layers.1"):
        for name, joined in LAYERS.items():
            block = "self_attn" if name in ("qkv_proj", "o_proj") else "mlp"
            parts = [ours.get_submodule(f"{path}.{block}.{one}") for one in joined]
            dense = torch.cat([part.dequantize(torch.float64) for part in parts])
            x = torch.randn(5, dense.shape[1], dtype=DTYPE)
            y = modules[f"{path}.{block}.{name}"](x)[0].detach()
            check_close(y, x, dense, None, what.seen(x), what.slack(x, dense))
    x, dense = torch.randn(5, 128, dtype=DTYPE), ours.lm_head.dequantize(torch.float64)
    y = theirs.lm_head.quant_method.apply(theirs.lm_head, x).detach()
    check_close(y, x, dense, None, what.seen(x), what.slack(x, dense))
    assert torch.equal(modules["model.embed_tokens"].weight, ours.model.embed_tokens.weight)


def test_a_layer_that_is_not_in_the_files(tmp_path: Path, without_processes: None) -> None:
    ours = llama(192)
    qao.quantize_(ours, qao.Int4WeightOnly(128))
    ours.save_pretrained(tmp_path)
    [file] = tmp_path.glob("*.safetensors")
    tensors = {name: one for name, one in load_file(file).items() if "layers.1.mlp.down_proj" not in name}
    save_file(tensors, file, metadata={"format": "pt"})
    with pytest.raises(ValueError, match="layers.1.mlp.down_proj: vLLM has loaded 0 of 1 weights into it"):
        load(tmp_path)


def test_a_head_that_vllm_makes_in_floats(tmp_path: Path, without_processes: None) -> None:
    """vLLM then has no place for its tensors."""
    torch.manual_seed(0)
    config = transformers.GptOssConfig(**(SIZES | MIXTURES["GptOss"]))
    ours = transformers.GptOssForCausalLM(config).to(DTYPE)
    qao.quantize_(ours, qao.Int4WeightOnly(32))
    ours.save_pretrained(tmp_path)
    with (
        pytest.warns(UserWarning, match="qao: vLLM has made no quantized layer for 1 quantized ones, such as lm_head"),
        pytest.raises(ValueError, match="lm_head.pip_install_qao"),
    ):
        load(tmp_path)


SIZES = {"hidden_size": 128, "num_hidden_layers": 2, "num_attention_heads": 4, "vocab_size": 320}
SIZES |= {"max_position_embeddings": 64, "num_key_value_heads": 2, "num_experts_per_tok": 2, "intermediate_size": 128}
MIXTURES: dict[str, dict[str, Any]] = {
    "Qwen3Moe": {"num_experts": 4, "moe_intermediate_size": 64, "head_dim": 32},
    "Mixtral": {"num_local_experts": 4},  # transformers and the checkpoints name its experts differently
    "Phimoe": {"num_local_experts": 4},  # by vLLM's backend for models that only transformers has
    "GptOss": {"num_local_experts": 4, "head_dim": 32},  # vLLM makes its head in floats
    "DeepseekV3": {
        **{"n_routed_experts": 4, "n_shared_experts": 1, "n_group": 1, "topk_group": 1, "first_k_dense_replace": 1},
        **{"moe_intermediate_size": 64, "q_lora_rank": 64, "kv_lora_rank": 64, "num_key_value_heads": 4},
        **{"qk_rope_head_dim": 32, "qk_nope_head_dim": 32, "v_head_dim": 32, "topk_method": "noaux_tc"},
    },
}


@pytest.mark.parametrize("family", list(MIXTURES))
def test_a_saved_mixture(family: str, tmp_path: Path, without_processes: None, logged: list[logging.LogRecord]) -> None:
    """vLLM's experts give the same results as transformers' with the same weights and operators."""
    torch.manual_seed(0)
    config = getattr(transformers, f"{family}Config")(**(SIZES | MIXTURES[family]))
    ours = getattr(transformers, f"{family}ForCausalLM")(config).to(DTYPE)
    for name, parameter in ours.named_parameters():
        if name.endswith("_bias"):
            torch.nn.init.normal_(parameter)
    qao.quantize_(ours, qao.Int4WeightOnly(32), filter_fn=lambda module, fqn: fqn != "lm_head")
    ours.save_pretrained(tmp_path)
    theirs, found = load(tmp_path)
    assert found == "qao"
    of_ours = [one for one in ours.modules() if isinstance(one, QuantExperts)]
    of_theirs = [one for one in theirs.modules() if isinstance(one, RoutedExperts)]
    assert f"{len(of_theirs)} QaoOwnExpertsMethod" in logged[0].getMessage()
    for own, served in zip(of_ours, of_theirs, strict=True):
        x, weights = torch.randn(9, 128, dtype=DTYPE), torch.rand(9, 2)
        chosen = torch.stack([torch.randperm(4)[:2] for _ in range(9)])
        with engine(DTYPE), torch.no_grad():
            y = served.quant_method.apply(served, x, weights, chosen.int(), None, None)
            assert y.std() > 0 and torch.equal(y, own(x, chosen, weights))

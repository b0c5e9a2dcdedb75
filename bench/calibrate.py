"""Calibration of a real language model: nats per token above float32, and seconds.

SmolLM2-135M-Instruct as in bench/language.py, evaluated on Python's language reference and calibrated on other text,
the docstrings of Python's standard library. Its weights are 4-bit grids in groups of 32, which such groups reproduce
exactly. Such schemes are therefore measured on an equivalent model with other weights: "off its grid".
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
from qao.diagnostics.perplexity import compare, perplexity

from .language import HEAD, WINDOW, WINDOWS, load_text
from .markdown import caption, table
from .meta import describe
from .result_files import read, read_rows, write

OFF_GRID = "off its grid"
# Name to scheme and method (None: without data).
CASES: dict[str, tuple[qao.Scheme, str | None]] = {
    "int4 g128": (qao.Int4WeightOnly(), "gptq"),
    "int8_int8, smoothquant": (qao.Int8DynamicActivationInt8Weight(), "smoothquant"),
    "fp8_fp8": (qao.Float8DynamicActivationFloat8Weight(), "gptq"),
    "int8_int4 g128": (qao.Int8DynamicActivationInt4Weight(), "gptq"),
    f"int4 g32, {OFF_GRID}": (qao.Int4WeightOnly(group_size=32), "gptq"),
    f"int4 g64, {OFF_GRID}": (qao.Int4WeightOnly(group_size=64, scale_dtype=torch.float16), "gptq"),
    "int8_int4 g128, smoothquant": (qao.Int8DynamicActivationInt4Weight(), "smoothquant"),
    "int8_int8": (qao.Int8DynamicActivationInt8Weight(), "gptq"),
    "fp8_int4 g128": (qao.Float8DynamicActivationInt4Weight(), "gptq"),
    "int8": (qao.Int8WeightOnly(), "gptq"),
    "fp8": (qao.Float8WeightOnly(), "gptq"),
}


def add_arguments(command: argparse.ArgumentParser) -> None:
    command.add_argument("--samples", type=int, default=128, help=f"texts of {WINDOW} tokens to calibrate on (128)")
    command.add_argument("--only", choices=list(CASES), action="append", help="these cases, added to those in the file")
    command.add_argument("--add", type=Path, metavar="FILE", help="measure nothing: join the results of another run")


def run(arguments: argparse.Namespace, path: Path) -> None:
    """Measure one case at a time and write the results file after each."""
    if arguments.add:
        write(joined(read(path), read(arguments.add)), path)
        return
    gguf, ids, num_bytes, tokenizer = load_text()
    device = arguments.device
    ids = ids.to(device)
    float32 = qao.dequantize_(qao.from_pretrained(gguf, dtype=torch.float32, device=device))
    data = samples(tokenizer, arguments.samples)
    reference = perplexity(float32, ids, window=WINDOW, num_bytes=num_bytes)
    kept = read_rows(path) if arguments.only else []
    rows = {row["model"]: row for row in kept if row["model"] in CASES}
    rows = {"fp32": {"model": "fp32", "nats_per_token": reference.nats_per_token}, **rows}
    for name in arguments.only or CASES:
        scheme, method = CASES[name]
        model = copy.deepcopy(float32)
        if name.endswith(OFF_GRID):
            off_grid(model)
        plain = copy.deepcopy(model)
        rules = {HEAD: None, "re:.*": scheme}
        wall, processor = time.perf_counter(), time.process_time()
        report = qao.calibrate(model, data, rules, method=method or "gptq", progress=False)
        wall, processor = time.perf_counter() - wall, time.process_time() - processor
        cost = compare(perplexity(model, ids, window=WINDOW, num_bytes=num_bytes), reference)
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
        write({"meta": meta, "rows": list(rows.values())}, path)


def joined(before: dict[str, Any], other: dict[str, Any]) -> dict[str, Any]:
    """Rows of both, from the other where both have one, in the order of CASES. Both share a reference."""
    assert abs(before["rows"][0]["nats_per_token"] - other["rows"][0]["nats_per_token"]) < 1e-4
    rows = {row["model"]: row for row in (*before["rows"], *other["rows"])}
    return {"meta": other["meta"], "rows": [other["rows"][0], *(rows[name] for name in CASES if name in rows)]}


def off_grid(model: Any, spread: float = 0.1) -> None:
    """Rescale channels between pairs of Llama layers: other weights, the same function."""
    random, width = torch.Generator().manual_seed(0), model.model.layers[0].self_attn.head_dim
    repeats = model.config.num_attention_heads // model.config.num_key_value_heads

    def sizes(like: torch.Tensor) -> torch.Tensor:
        return torch.randn(len(like), generator=random).mul(spread).exp().to(like.device)

    with torch.no_grad():
        for block in model.model.layers:
            attention, mlp = block.self_attn, block.mlp
            for norm, readers in (
                (block.input_layernorm, (attention.q_proj, attention.k_proj, attention.v_proj)),
                (block.post_attention_layernorm, (mlp.gate_proj, mlp.up_proj)),
            ):
                size = sizes(norm.weight)
                norm.weight.div_(size)
                for linear in readers:
                    linear.weight.mul_(size)
            size = sizes(attention.v_proj.weight)
            attention.v_proj.weight.mul_(size[:, None])
            attention.o_proj.weight.div_(size.view(-1, 1, width).expand(-1, repeats, -1).reshape(-1))
            size = sizes(mlp.up_proj.weight)
            mlp.up_proj.weight.mul_(size[:, None])
            mlp.down_proj.weight.div_(size)


@torch.no_grad()
def permuted(model: Any) -> None:
    """Give a Llama's channels another order: the same function, and groups of weights that were not groups before."""
    random, core = torch.Generator().manual_seed(0), model.model
    width = core.layers[0].self_attn.head_dim

    def reorder(tensor: torch.Tensor, order: torch.Tensor, dim: int) -> None:
        tensor.copy_(tensor.index_select(dim, order.to(tensor.device)))

    hidden = torch.randperm(model.config.hidden_size, generator=random)
    tied = model.lm_head.weight is core.embed_tokens.weight
    for one in (core.embed_tokens,) if tied else (core.embed_tokens, model.lm_head):
        reorder(one.weight, hidden, 1)
    reorder(core.norm.weight, hidden, 0)
    for block in core.layers:
        attention, mlp = block.self_attn, block.mlp
        for reader in (attention.q_proj, attention.k_proj, attention.v_proj, mlp.gate_proj, mlp.up_proj):
            reorder(reader.weight, hidden, 1)
        for one in (attention.o_proj, mlp.down_proj, block.input_layernorm, block.post_attention_layernorm):
            reorder(one.weight, hidden, 0)
        inner = torch.randperm(mlp.up_proj.out_features, generator=random)
        for linear, dim in ((mlp.gate_proj, 0), (mlp.up_proj, 0), (mlp.down_proj, 1)):
            reorder(linear.weight, inner, dim)
        head = torch.randperm(width, generator=random)
        for linear, dim in ((attention.v_proj, 0), (attention.o_proj, 1)):
            begins = torch.arange(0, linear.weight.shape[dim], width)
            reorder(linear.weight, (begins[:, None] + head).flatten(), dim)


def samples(tokenizer: Any, count: int) -> list[torch.Tensor]:
    """Windows int64 [1, WINDOW], spread evenly over the standard library's docstrings longer than a line."""
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
    """Markdown of one results file."""
    meta, (first, *rows) = results["meta"], results["rows"]
    nats = first["nats_per_token"]

    def share(row: dict[str, Any], suffix: str = "") -> str:
        return f"{row['nats_above' + suffix] / nats:+.2%} ± {row['standard_error' + suffix] / nats:.2%}"

    lines = [
        [
            row["model"],
            share(row, "_without"),
            share(row),
            f"{row['samples']}",
            f"{row['processor_seconds']:.0f}",
        ]
        for row in rows
    ]
    header = ["scheme", "nats above fp32, no data", "calibrated", "texts", "processor seconds"]
    text = f"{caption(meta)}; {meta['windows']} windows of {meta['window']} tokens, fp32 {nats:.3f} nats a token."
    return f"{text}\n\n{table(header, lines)}"

"""Accuracy of a language model under every scheme and by other packages, against the same model in bfloat16.

Perplexity and the Kullback-Leibler divergence of the predictions on a text, and tasks of lm-evaluation-harness. Every
method quantizes the same linear layers, all but the head; a checkpoint given by its path is evaluated as it is.
Without a model, SmolLM2 of the demo "off its grid" (see calibrate.py), because its file has four bits.
"""

from __future__ import annotations

import argparse
import copy
import gc
import hashlib
import importlib.util
import json
from collections.abc import Callable, Iterator
from functools import partial
from pathlib import Path
from typing import Any

import qao
import torch
from qao.cli import eval as cli
from qao.cli.model import load_model, load_tokenizer
from qao.diagnostics.perplexity import windows
from torch import Tensor, nn

from . import four_bits
from .calibrate import off_grid
from .divergence import Reference, compared
from .language import demo_model
from .markdown import caption, table
from .meta import describe
from .result_files import read, write

TASKS = ("arc_easy", "arc_challenge", "hellaswag", "winogrande", "piqa")
REFERENCE = "bf16"
WIKITEXT = "wikitext-2"
_OF_TRANSFORMERS = ("bitsandbytes", "hqq")  # checkpoints that qao does not read
SCHEMES: dict[str, qao.Scheme] = {
    **{f"qao {word}": kind() for word, kind in qao.schemes.SCHEMES.items()},
    "qao int4 g32": qao.Int4WeightOnly(group_size=32),
}
# Package and rounding of weights.
PEERS: dict[str, tuple[str, four_bits.Rounding]] = {
    "bitsandbytes nf4": ("bitsandbytes", four_bits.bitsandbytes),
    "torchao int4 g128": ("torchao", four_bits.torchao(128)),
    "HQQ int4 g64": ("hqq", four_bits.hqq(64)),
    "llama.cpp Q4_0": ("gguf", four_bits.gguf("Q4_0")),
}
METHODS = (*SCHEMES, *PEERS)


def add_arguments(command: argparse.ArgumentParser) -> None:
    command.add_argument(
        "model", nargs="?", metavar="MODEL", help="a directory, a .gguf file, or owner/name on the hub"
    )
    command.add_argument(
        "--text",
        metavar="FILE",
        help=f"a text in UTF-8, or {WIKITEXT}, which needs datasets (default: help of Python)",
    )
    command.add_argument("--windows", type=int, default=20, metavar="N", help="at most N windows (20)")
    command.add_argument("--window", type=int, default=512, metavar="TOKENS", help="length of a window (512)")
    command.add_argument("--methods", nargs="*", choices=METHODS, metavar="NAME", help="these, added to the file")
    command.add_argument(
        "--checkpoint", action="append", default=[], metavar="NAME=PATH", help="also MODEL by GPTQ, AWQ, HQQ, llama.cpp"
    )
    command.add_argument("--tasks", nargs="*", metavar="TASK", help=f"needs lm-eval; without TASK: {', '.join(TASKS)}")
    command.add_argument("--limit", type=int, metavar="N", help="documents of each task, instead of all")


def run(arguments: argparse.Namespace, path: Path) -> None:
    """Measure one method at a time and write the results file after each."""
    checkpoints = dict(_named(text) for text in arguments.checkpoint)
    chosen = [name for name in METHODS if name in (METHODS if arguments.methods is None else arguments.methods)]
    chosen = [name for name in chosen if name not in PEERS or importlib.util.find_spec(PEERS[name][0])]
    name, text = _text(arguments.text)
    source, demo = (arguments.model, False) if arguments.model else (str(demo_model()), True)
    dtype = "float32" if demo else "bfloat16"
    options = argparse.Namespace(
        revision=None, trust_remote_code=False, device=arguments.device, dtype=dtype, quiet=True, parser=None
    )
    tokenizer = load_tokenizer(options, source)
    tokens, _ = cli.tokens_of(tokenizer, text, arguments.windows * arguments.window)
    model = _float(load_model(options, source), demo)
    options.dtype = "bfloat16"  # of checkpoints
    pieces = windows(model, tokens, arguments.window)
    if len(pieces) < 2:
        raise SystemExit(f"{len(tokens)} tokens are one window of {arguments.window}: a standard error needs two")
    meta = describe(arguments.device) | {"windows": len(pieces), "window": arguments.window, "text": name}
    del meta["command"]  # it holds paths
    meta["tokens_sha256"] = hashlib.sha256(json.dumps(tokens).encode()).hexdigest()
    meta |= {"model": "SmolLM2-135M-Instruct, off its grid" if demo else Path(source).name}
    rows, reference = _kept(path, meta), Reference(model, pieces)
    makers: dict[str, Callable[[], tuple[Any, float]]] = {REFERENCE: lambda: (model, _bytes(model))}
    makers |= {one: partial(_quantized, model, one) for one in chosen}
    makers |= {one: partial(_checkpoint, options, file) for one, file in checkpoints.items()}
    for method, make in makers.items():
        contender, size = make()
        row = {"method": method, "bytes": round(size)} | compared(contender, reference)
        if arguments.tasks is not None:
            row["tasks"] = tasks(contender, tokenizer, arguments.tasks or TASKS, arguments.limit)
        rows[method] = row
        print(json.dumps(row), flush=True)
        order = [REFERENCE, *(one for one in METHODS if one in rows), *rows]
        write({"meta": meta, "rows": [rows[one] for one in dict.fromkeys(order)]}, path)
        del contender
        gc.collect()  # free memory for the next model


def tasks(model: Any, tokenizer: Any, names: tuple[str, ...], limit: int | None) -> dict[str, float]:
    """Accuracy in each task, normalized by length where the task does so."""
    from lm_eval import simple_evaluate
    from lm_eval.models.huggingface import HFLM

    judged = HFLM(pretrained=model, tokenizer=tokenizer, batch_size=8)
    found = simple_evaluate(model=judged, tasks=list(names), limit=limit, bootstrap_iters=0)["results"]
    return {name: found[name].get("acc_norm,none", found[name].get("acc,none")) for name in names}


def render(results: dict[str, Any]) -> str:
    """The Markdown of one results file."""
    meta, rows = results["meta"], results["rows"]
    names = list(dict.fromkeys(name for row in rows for name in row.get("tasks", ())))
    text = f"{meta['model']}: {meta['windows']} windows of {meta['window']} tokens of {meta['text']}. {caption(meta)}."
    lines = [
        [
            row["method"],
            f"{row['bytes'] / 2**20:.0f}",
            f"{row['perplexity']:.3f}",
            f"{row['nats_above']:+.4f} ± {row['nats_error']:.4f}",
            f"{row['divergence']:.4f} ± {row['divergence_error']:.4f}",
            f"{row['same_top']:.1%}",
            *(f"{row['tasks'][name]:.1%}" if name in row.get("tasks", ()) else "" for name in names),
        ]
        for row in rows
    ]
    header = ["method", "MiB", "perplexity", "nats above bf16", "KL divergence, nats", "same first choice", *names]
    return f"{text}\n\n{table(header, lines)}"


def _named(text: str) -> tuple[str, str]:
    name, found, path = text.partition("=")
    if not found or not Path(path).exists():
        raise SystemExit(f"--checkpoint {text}: must be NAME=PATH, with an existing path")
    return name, path


def _text(source: str | None) -> tuple[str, str]:
    """Name and content of the text."""
    if source != WIKITEXT:
        file = Path(source) if source else None
        return file.name if file else "Python help", cli.text_of(file)
    if importlib.util.find_spec("datasets") is None:
        raise SystemExit(f"--text {WIKITEXT} needs the package datasets and access to the hub: pip install datasets")
    from datasets import load_dataset

    return WIKITEXT, "\n\n".join(load_dataset("Salesforce/wikitext", "wikitext-2-raw-v1", split="test")["text"])


def _float(model: Any, demo: bool) -> Any:
    """The reference in bfloat16."""
    model = qao.dequantize_(model)
    if demo:
        off_grid(model.float())
    for parameter in model.parameters():  # not the buffers: models keep the frequencies of positions in float32
        parameter.data = parameter.data.bfloat16()
    return model


def _quantized(model: Any, method: str) -> tuple[Any, float]:
    """A quantized copy and the bytes that it takes, in the package of the method."""
    quantized, head = copy.deepcopy(model), "lm_head"
    for name, module in model.named_modules():
        head = name if module is model.get_output_embeddings() else head
    if method in SCHEMES:
        qao.quantize_(quantized, SCHEMES[method], filter_fn=lambda _, fqn: fqn != head, progress=False)
        return quantized, _bytes(quantized)
    bits, elements = four_bits.apply(PEERS[method][1], quantized, {head})
    return quantized, _bytes(model) - 2 * elements + bits / 8


def _checkpoint(options: argparse.Namespace, path: str) -> tuple[Any, float]:
    config = Path(path) / "config.json"
    settings = json.loads(config.read_text()) if config.exists() else {}
    if (settings.get("quantization_config") or {}).get("quant_method") in _OF_TRANSFORMERS:
        from transformers import AutoModelForCausalLM

        kind: Any = AutoModelForCausalLM
        model = kind.from_pretrained(path, dtype=torch.bfloat16, device_map={"": options.device}).eval()
    else:
        model = load_model(options, path)
    return model, _bytes(model)


def _bytes(model: nn.Module) -> int:
    """Bytes of all parameters and buffers, each once."""
    return sum({tensor.data_ptr(): tensor.nbytes for tensor in _tensors(model)}.values())


def _tensors(model: nn.Module) -> Iterator[Tensor]:
    yield from model.parameters()
    yield from model.buffers()


def _kept(path: Path, meta: dict[str, Any]) -> dict[str, dict[str, Any]]:
    """Rows of a file about the same model and text, by method."""
    if not path.exists():
        return {}
    before = read(path)
    same = ("model", "tokens_sha256", "window", "device", "torch")
    if any(before["meta"].get(key) != meta[key] for key in same):
        raise SystemExit(f"{path} holds another model, text, device or torch: choose another folder with --out")
    return {row["method"]: row for row in before["rows"]}

"""``qao quantize --calibrate``: loads a model, calibrates it on a text or on random tokens, and saves it."""

from __future__ import annotations

import argparse
import time
import warnings
from pathlib import Path
from typing import Any

import torch

from .._words import default_method
from ..checkpoints import open_checkpoint
from ..schemes import Scheme
from .common import Failure, Output, counted, memory, read_text, size
from .model import load_model, load_tokenizer
from .readers import layout_text
from .staging import staged
from .transfer import copy_others


def run(args: argparse.Namespace, scheme: Scheme) -> int:
    from .. import calibrate, dequantize_

    output = Output(args)
    if args.to is not None and args.reader is None:
        args.parser.error(
            "--to: with calibration the layout is compressed-tensors if that can hold the result, otherwise qao"
        )
    data = None
    if args.calibrate is not None:
        data = samples(load_tokenizer(args, str(args.model)), args.calibrate, args.samples, args.window)
    method = args.method or default_method(data is not None)
    with staged(args.out, args.model, args.force) as directory:
        model = load_model(args, str(args.model), dequantize=args.model.suffix == ".gguf")
        if args.requantize:
            dequantize_(model)
        begun = time.monotonic()
        # The last pattern differs from any that users write, so that equal keys do not collide.
        rules: Any = {**dict.fromkeys(args.exclude), "re:(?:.*)": scheme} if args.exclude else scheme
        options: dict[str, Any] = {"method": method, "embeddings": args.embeddings, "progress": not args.quiet}
        report = calibrate(model, data, rules, **options)
        if not any(row.status == "quantized" for row in report.rows):
            raise Failure(f"{args.model} has no layers to quantize: {'; '.join(report.reasons)}")
        seconds = time.monotonic() - begun
        model.save_pretrained(directory, max_shard_size=f"{args.shard_size}GB")
        format = open_checkpoint(directory).format
        if args.to not in (None, format):
            raise Failure(f"--for {args.reader}: compressed-tensors cannot hold the result; {format} can")
        copy_others(args.model, directory)
    texts = 0 if data is None else len(data)
    figures = {"seconds": seconds, "samples": texts, "tokens": texts * args.window, "memory": memory()["peak"]}
    source = "random tokens" if data is None else f"{counted(texts, 'text')} of {args.window} tokens"
    output.say(
        f"{report}\n{method} on {source} in {seconds:.1f} s, peak memory {size(figures['memory'])}\n"
        f"{args.out}: {layout_text(format)}"
    )
    output.result({"out": str(args.out), "format": format, "method": method, **figures, **report.to_dict()})
    return 0


def samples(tokenizer: Any, file: Path, count: int, window: int) -> list[torch.Tensor]:
    """Windows of ids int64 [1, window], spread evenly over the text of a file."""
    text = read_text(file)
    ids = torch.tensor(tokenizer(text, add_special_tokens=False, verbose=False)["input_ids"], dtype=torch.int64)
    whole = ids[: ids.numel() // window * window].view(-1, 1, window)
    if not len(whole):
        raise Failure(f"{file} has {ids.numel()} tokens, fewer than one text of {window}; give more, or --window")
    if len(whole) < count:
        warnings.warn(f"{file} has {counted(len(whole), 'text')} of {window} tokens, not {count}", stacklevel=2)
    return [whole[index] for index in torch.linspace(0, len(whole) - 1, min(count, len(whole))).long()]

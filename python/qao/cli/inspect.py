"""``qao inspect``: the contents of a checkpoint."""

from __future__ import annotations

import argparse
from pathlib import Path
from typing import Any

from .common import Failure, Output, add_source_options, command, local_path

_DESCRIPTION = """
Lists layers, schemes, bytes and bits per weight, parts in float, and irregularities: layers that differ from their
counterparts in other blocks, large matrices in float, parts that are ignored. Reads names and sizes only; --check and
--against read every number. The exit status is 1 if a number is NaN or Inf, or a layer cannot be read.
"""
_EXAMPLES = """
qao inspect Qwen3-8B-AWQ
qao inspect model-q4_0.gguf --json
qao inspect Qwen3-8B-int4 --against Qwen3-8B
"""


def add(commands: Any) -> None:
    parser = command(commands, "inspect", run, "show what a checkpoint holds", _DESCRIPTION, _EXAMPLES)
    parser.add_argument("model", type=Path, metavar="PATH", help="a directory, a .safetensors or a .gguf file")
    add_source_options(parser)
    parser.add_argument("--check", action="store_true", help="read every number")
    parser.add_argument("--against", type=Path, metavar="MODEL", help="the float model: each layer's relative error")


def run(args: argparse.Namespace) -> int:
    from ..checkpoints import open_checkpoint
    from .contents import Contents, FloatModel, check

    output = Output(args)
    checkpoint = open_checkpoint(local_path(args.model, args.revision))
    against = None
    if args.against:
        if not checkpoint.layers:
            raise Failure(f"--against: {args.model} has no quantized layers to compare with {args.against}")
        against = FloatModel(open_checkpoint(local_path(args.against)), args.trust_remote_code)
    contents = Contents.of(checkpoint)
    problems = list(check(checkpoint, contents, against)) if args.check or against is not None else []
    output.say(str(contents))
    for problem in problems:
        output.say(f"PROBLEM: {problem}")
    output.result({"path": str(args.model), **contents.to_dict(), "problems": problems})
    return 1 if problems else 0

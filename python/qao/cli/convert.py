"""``qao convert``: a quantized checkpoint of any format to one for transformers, vLLM and qao."""

from __future__ import annotations

import argparse
import warnings
from collections.abc import Callable
from functools import partial
from pathlib import Path
from typing import TYPE_CHECKING, Any

from .common import Failure, Output, add_source_options, command, counted, local_path, memory, progress
from .quantize import FORMATS, add_output_options
from .readers import check_reader, layout_for, layout_text

if TYPE_CHECKING:
    from ..checkpoints.base import Checkpoint

_DESCRIPTION = """
IN is a quantized model in safetensors (compressed-tensors, GPTQ, AutoRound, AWQ, fp8, ModelOpt, torchao, qao), or a
.gguf file. The weights keep their values, except where the report says otherwise. The layers are read and written one
after the other. OUT appears when it is complete; a command that stops early leaves nothing behind.

With --to gguf, or an OUT that ends in .gguf, the result is one file for llama.cpp: int4 as Q4_0 or Q4_1, int8 as Q8_0,
the rest and float models in float. It needs `pip install qao[gguf]`.
"""
_EXAMPLES = """
qao convert Qwen3-8B-GPTQ Qwen3-8B-w4a16
qao convert model-q4_0.gguf model-int4 --to qao
qao convert Qwen3-8B-int4 Qwen3-8B-Q4_1.gguf
"""


def add(commands: Any) -> None:
    parser = command(commands, "convert", run, "change the layout of a quantized checkpoint", _DESCRIPTION, _EXAMPLES)
    parser.add_argument("model", type=Path, metavar="IN", help="a directory, a file, or owner/name on the hub")
    parser.add_argument("out", type=Path, metavar="OUT", help="a new directory, or a .gguf file")
    add_source_options(parser)
    add_output_options(parser, (*FORMATS, "gguf"))


def _unsupported_reason(source: Any) -> str | None:
    """Why compressed-tensors cannot hold the layers, for reasons other than their schemes."""
    from ..schemes import Int4Weight

    experts = next((layer.name for layer in source.layers.values() if layer.experts is not None), None)
    if experts is not None:
        return f"{experts} is a projection of fused experts"
    for layer in source.layers.values():
        scheme = layer.scheme
        if not isinstance(scheme, Int4Weight) or scheme.symmetric or scheme.whole_zeros:
            continue
        if source.format == "gguf":
            return "zero points of Q4_1 are not integers"
        if source.format == "qao":  # only the values show it: they may come from GPTQ
            zeros = layer.read().zeros
            if zeros is not None and not zeros.equal(zeros.round()):
                return f"zero points of {layer.name} are not integers (qao quantize --for vllm rounds them)"
    return None


def run(args: argparse.Namespace) -> int:
    from torch import Tensor

    from ..schemes import PackedWeight
    from .contents import float_dtype, float_linears, packed_bytes
    from .names import modules_of
    from .readable import reading_problems
    from .transfer import Step, choose_format, config_of, copies, encode, transfer

    output = Output(args)
    if args.to is None and args.out.suffix == ".gguf":
        args.to = "gguf"
    layout_for(args)
    args.model = local_path(args.model, args.revision)
    reopen = partial(_opened, args.model, args.to)
    source = reopen()
    if args.to == "gguf":
        return _to_gguf(args, source, reopen, output)
    if not source.layers:
        raise Failure(f"{args.model} is a float model; use qao quantize")
    layers = {name: layer.scheme for name, layer in source.layers.items()}
    check_reader(args.reader, dict.fromkeys(layers.values()))
    widths = {name: layer.in_features for name, layer in source.layers.items()}
    format = choose_format(args.to, layers, widths, _unsupported_reason(source))
    problems = reading_problems(source, trust=args.trust_remote_code)
    if problems:
        more = f" (and {len(problems) - 1} more)" if len(problems) > 1 else ""
        if format == "qao":
            raise Failure(f"{args.model}: no library could load this in qao's layout: {problems[0]}{more}")
        warnings.warn(f"qao cannot load {args.model} or {args.out}, but vLLM may: {problems[0]}{more}", stacklevel=2)
    dtype = float_dtype(source)

    def layer(name: str) -> Step:
        def make(source: Checkpoint) -> dict[str, Tensor]:
            layer = source.layers[name]
            sizes = layer.out_features, layer.in_features
            tensors: Any = layer.pack()
            return encode(format, name, layer.scheme, *sizes, PackedWeight(**tensors), dtype, layer.experts)

        return Step(packed_bytes(source.layers[name]), make)

    steps = copies(source, source.others) + [layer(name) for name in source.layers]
    named = dict(zip(modules_of(source, args.trust_remote_code), layers.values(), strict=True))
    config = config_of(format, source.config, named, float_linears(source, args.trust_remote_code), None)
    figures = transfer(args, reopen, steps, config, named, known=problems)
    notes = sorted({layer.note for layer in source.layers.values() if layer.note} | set(source.notes))
    for note in notes:
        output.say(f"note: {note}")
    output.say(f"{counted(len(layers), 'layer')}, from {source.format} to {layout_text(format)}\n{figures}")
    result = {"out": str(args.out), "from": source.format, "format": format, "layers": len(layers), "notes": notes}
    output.result({**result, **figures.to_dict()})
    return 0


def _opened(path: Path, to: str | None) -> Checkpoint:
    """A GGUF file becomes GGUF with its own blocks; other layouts must run on GPUs, which have no kernels for these."""
    from ..checkpoints import open_checkpoint
    from ..checkpoints.gguf.read import GgufCheckpoint
    from ..checkpoints.gguf.rows import stacks_experts

    if path.suffix != ".gguf":
        return open_checkpoint(path)
    if to == "gguf":
        return GgufCheckpoint(path, stacked=True)
    return GgufCheckpoint(path, native=(), stacked=stacks_experts())


def _to_gguf(args: argparse.Namespace, source: Checkpoint, reopen: Callable[[], Checkpoint], output: Output) -> int:
    import time

    from ..checkpoints.gguf.tokenizer import tokenizer_metadata
    from ..checkpoints.gguf.write import plan, write
    from .staging import staged_file
    from .transfer import Figures

    if args.out.suffix != ".gguf":
        raise Failure(f"--to gguf: OUT is a file that ends in .gguf, not {args.out}")
    begun = time.monotonic()
    try:
        with staged_file(args.out, args.model, args.force) as path:
            planned = plan(source, path, args.out.stem)
            tokenizer = tokenizer_metadata(args.model, planned.tensors["token_embd.weight"].shape[0])
            planned.metadata |= tokenizer
            total = sum(tensor.nbytes for tensor in planned.tensors.values())
            with progress(args, total, args.command) as bar:
                made = write(planned, source, reopen, bar.update)
    except ImportError as error:
        raise Failure(f"--to gguf needs more packages ({error}): pip install qao[gguf]") from error
    notes = sorted({layer.note for layer in source.layers.values() if layer.note} | set(source.notes))
    if not tokenizer:
        notes.append(f"{args.model} has no tokenizer, and neither has the file: llama.cpp needs one")
    if made.worst:
        notes.append(f"scales and minima rounded to float16: values moved by at most {made.worst:.2g} of a step")
    for note in notes:
        output.say(f"note: {note}")
    kinds = ", ".join(f"{count} of {kind}" for kind, count in made.types.most_common())
    figures = Figures(total, made.bytes, time.monotonic() - begun, memory()["peak"])
    output.say(f"{counted(len(planned.tensors), 'tensor')} ({kinds}), from {source.format} to GGUF\n{figures}")
    result = {"out": str(args.out), "from": source.format, "format": "gguf", "layers": len(source.layers)}
    output.result({**result, "types": dict(made.types), "notes": notes, **figures.to_dict()})
    return 0

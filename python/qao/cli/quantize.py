"""``qao quantize``: quantizes a float model on disk without holding the whole model in memory."""

from __future__ import annotations

import argparse
from functools import partial
from pathlib import Path
from typing import TYPE_CHECKING, Any

from .._words import METHODS
from .common import (
    DTYPES,
    Failure,
    Output,
    add_scheme_options,
    add_source_options,
    command,
    device_of,
    dtype_of,
    local_path,
    scheme_of,
)
from .readers import READERS, check_reader, layout_text, scheme_for

if TYPE_CHECKING:
    from ..checkpoints.base import Checkpoint

_DESCRIPTION = """
MODEL is a Hugging Face directory (config.json and safetensors), a float .safetensors file, or a .gguf file. It is read,
quantized and written layer by layer: memory holds a few layers, never the whole model. The command quantizes the same
layers as qao.quantize_ in Python: linear layers, but not embeddings, routers, other modules that are not a plain
nn.Linear, or heads tied to an embedding (--embeddings quantizes both).

OUT is a directory in the layout of compressed-tensors, which vLLM and transformers load with or without qao. If that
cannot hold the result, the layout is qao's own, which they load where qao is installed. An example is int4 with its
default float zero points: --for vllm rounds them to integers, at some loss. Tokenizer, chat template, code, adapters
and other files are copied. OUT appears when it is complete; a command that stops early leaves nothing behind.

In a .gguf file, layers in Q4_0 and Q4_1 keep their values, as in qao.from_pretrained, and the other layers get the
scheme; --requantize quantizes all of them, at a further loss.

With --calibrate TEXT, transformers loads the model, and its layers are quantized to do well on that text. Errors become
smaller at the same size and speed. This takes minutes, and memory for both the float and the quantized model. With
--random-tokens it takes seconds and no text, for a part of the gain.
"""
_EXAMPLES = r"""
qao quantize Qwen3-8B Qwen3-8B-int4 --scheme int4
qao quantize Qwen3-8B Qwen3-8B-int4 --scheme int4 --for vllm
qao quantize Qwen3-8B Qwen3-8B-int4 --scheme int4 --group-size 32 --symmetric --device cuda
qao quantize Llama-3-70B Llama-3-70B-fp8 --scheme fp8_fp8 --granularity block --dtype bfloat16
qao quantize Qwen3-8B Qwen3-8B-int4 --scheme int4 --calibrate texts.txt --device cuda
qao quantize Qwen3-8B Qwen3-8B-int4 --scheme int4 --random-tokens --device cuda
qao quantize model out --scheme int8 --exclude lm_head --exclude 're:.*\.down_proj' --set clip_search=false
"""
FORMATS = ("compressed-tensors", "qao")


def add(commands: Any) -> None:
    parser = command(commands, "quantize", run, "quantize a float model, file to file", _DESCRIPTION, _EXAMPLES)
    parser.add_argument("model", type=Path, metavar="MODEL", help="a directory, a file, or owner/name on the hub")
    parser.add_argument("out", type=Path, metavar="OUT", help="a new directory")
    add_source_options(parser)
    add_scheme_options(parser, required=True)
    parser.add_argument(
        "--exclude",
        action="append",
        default=[],
        metavar="PATTERN",
        help="keep a module and its children in float; re:<pattern> matches whole names; repeatable",
    )
    parser.add_argument("--embeddings", action="store_true", help="quantize tied heads together with their embeddings")
    parser.add_argument(
        "--requantize", action="store_true", help="in a .gguf file, also quantize layers that have four bits"
    )
    parser.add_argument("--dtype", choices=DTYPES, help="dtype of parts that stay in float (default: as in the file)")
    group = parser.add_argument_group("calibration")
    group.add_argument(
        "--calibrate", type=Path, metavar="TEXT", help="a text in UTF-8 that is typical of the model's input"
    )
    group.add_argument(
        "--random-tokens", action="store_true", help="instead of a text: 512 random tokens, for the method importance"
    )
    group.add_argument(
        "--method",
        choices=METHODS,
        help="gptq (default with a text), smoothquant followed by gptq, or importance, which only weights columns",
    )
    group.add_argument("--samples", type=int, default=128, metavar="N", help="at most N pieces of text (default: 128)")
    group.add_argument("--window", type=int, default=512, metavar="TOKENS", help="length of a piece (default: 512)")
    parser.add_argument(
        "--device", help="device that quantizes: cuda, cuda:1 or cpu (default; with calibration, a GPU if there is one)"
    )
    add_output_options(parser)


def add_output_options(parser: argparse.ArgumentParser, formats: tuple[str, ...] = FORMATS) -> None:
    parser.add_argument("--to", choices=formats, help="layout of the result (default: compressed-tensors if possible)")
    parser.add_argument(
        "--for",
        dest="reader",
        choices=READERS,
        help="library that must load the result without qao; fails if it cannot. With qao, any layout is allowed",
    )
    parser.add_argument("--force", action="store_true", help="replace OUT if it is a directory that holds a model")
    parser.add_argument(
        "--shard-size", type=float, default=5.0, metavar="GB", help="maximum size of an output file (default: 5)"
    )


def run(args: argparse.Namespace) -> int:
    from ..checkpoints.opening import open_to_quantize
    from .plan import Plan
    from .transfer import choose_format, config_of, transfer

    output, scheme, device = Output(args), scheme_for(args, scheme_of(args)), device_of(args)
    if args.samples < 1 or args.window < 1:
        args.parser.error("--samples and --window must be at least 1")
    args.model = local_path(args.model, args.revision)
    if (args.model / "model_index.json").exists() and not (args.model / "config.json").exists():
        raise Failure(
            f"{args.model} is a diffusers pipeline. Use Python: DiffusionPipeline.from_pretrained(MODEL, "
            "quantization_config=PipelineQuantizationConfig(quant_mapping={...: qao.QaoConfig(scheme)}))"
        )
    source = open_to_quantize(args.model)
    if args.model.is_dir() and not source.config:
        raise Failure(
            f"{args.model} has no config.json, which names the model's architecture. If it is a folder of weights "
            "alone, name the .safetensors file: every matrix in it counts as a linear layer"
        )
    check_source(args, source)
    if args.random_tokens and (args.calibrate is not None or args.method not in (None, "importance")):
        args.parser.error("--random-tokens takes the place of a text, and only serves --method importance")
    if args.calibrate is not None or args.random_tokens:
        from .calibrated import run as calibrated

        return calibrated(args, scheme)
    dtype = dtype_of(args)
    options: dict[str, Any] = {"exclude": args.exclude, "embeddings": args.embeddings, "dtype": dtype}
    plan = Plan(source, scheme, device=device, trust=args.trust_remote_code, requantize=args.requantize, **options)
    check_reader(args.reader, dict.fromkeys(plan.layers.values()))
    format = choose_format(args.to, plan.layers, plan.in_features, plan.unsupported_reason)
    config = config_of(format, source.config, plan.layers, plan.linears, dtype)
    aliases = plan.aliases if format == "qao" else {}
    steps = plan.steps(source, format)
    figures = transfer(args, partial(open_to_quantize, args.model), steps, config, plan.layers, aliases, plan.problems)
    output.say(f"{plan.report}\n{figures}\n{args.out}: {layout_text(format)}")
    output.result({"out": str(args.out), "format": format, **figures.to_dict(), **plan.report.to_dict()})
    return 0


def check_source(args: argparse.Namespace, source: Checkpoint) -> None:
    """Raise Failure if there is nothing left to quantize."""
    from ..checkpoints.opening import is_for_a_scheme

    if args.requantize and source.format != "gguf":
        args.parser.error(f"--requantize is for .gguf files, and {args.model} is not one")
    if not args.requantize and not is_for_a_scheme(source, args.embeddings):
        more = ", and --requantize quantizes its layers again" if source.format == "gguf" else ""
        raise Failure(f"{args.model} is already quantized ({source.format}); qao convert changes its layout{more}")

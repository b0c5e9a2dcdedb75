"""Command line of the benchmarks: ``bench int4`` measures, ``bench table`` updates the documents."""

from __future__ import annotations

import argparse
import sys
from pathlib import Path
from typing import Any

import torch

from . import (
    accuracy,
    bars,
    busy,
    calibrate,
    diffusion,
    experts,
    experts_block,
    four_bits,
    generate,
    gguf,
    gptq,
    host,
    invariance,
    language,
    linear,
    llama,
    numerics,
    outliers,
    plans,
    plots,
    prefill,
    quantize,
    reports,
    rotation,
    table,
    threads,
    tune,
    update,
    weights_only,
)
from .meta import RESULTS, device_slug
from .result_files import read, write
from .runner import LAYERS, TOKENS, Run, run
from .schemes import SCHEMES
from .serving import run as serving
from .serving.process import ENGINES
from .timing import ceilings

_OF_QUALITY = (
    "accuracy",
    "numerics",
    "weights_only",
    "language",
    "calibrate",
    "four_bits",
    "rotation",
)  # the same on every CPU but for rounding


def make_parser() -> argparse.ArgumentParser:
    parser = argparse.ArgumentParser(prog="python -m bench", description=__doc__)
    commands = parser.add_subparsers(dest="command", required=True)
    for word in (*SCHEMES, "all"):
        _add_products(commands.add_parser(word, help=f"time {f'torch.ops.qao.{word}_mm' if word != 'all' else 'all'}"))
    for name, text in (
        ("quantize", "bandwidth of the activation quantizers and of the fused producers"),
        ("numerics", "accuracy of every scheme on the demo's model"),
        ("outliers", "error of the GEMMs compared with that of their schemes, with and without outlier channels"),
        ("weights_only", "accuracy of int4 weights rounded without data, on the demo's models"),
        ("gptq", "float weights a second that calibration quantizes"),
        ("host", "host time of one eager call of a layer"),
    ):
        command = commands.add_parser(name, help=text)
        _add_common(command)
        if name not in ("numerics", "outliers", "weights_only", "gptq"):
            _add_check(command)
    spoken = commands.add_parser("language", help="what every scheme costs a language model, and its tokens per second")
    _add_common(spoken)
    language.add_arguments(spoken)
    judged = commands.add_parser("accuracy", help="perplexity and divergence from bfloat16 of every scheme and others")
    _add_common(judged)
    accuracy.add_arguments(judged)
    calibrated = commands.add_parser("calibrate", help="what calibration gives a language model, and what it takes")
    _add_common(calibrated)
    calibrate.add_arguments(calibrated)
    updated = commands.add_parser("update", help="bandwidth of new float weights in place")
    _add_common(updated)
    updated.add_argument("--shapes", nargs="+", choices=update.SHAPES, metavar="N x K", help="only these layers")
    invariant = commands.add_parser("invariance", help="what batch-invariant products cost")
    _add_common(invariant)
    invariance.add_arguments(invariant)
    chosen = commands.add_parser("plans", help="plan()'s choices against every other plan, on random layers")
    _add_out(chosen)
    plans.add_arguments(chosen)
    chosen.set_defaults(device="cuda")
    prompts = commands.add_parser("prefill", help="many tokens against bfloat16 and the kernels of serving engines")
    _add_out(prompts)
    prompts.add_argument("--check", action="store_true", help="exit 1 if a cell misses its bar")
    prefill.add_arguments(prompts)
    prompts.set_defaults(device="cuda")
    turned = commands.add_parser("rotation", help="what a Hadamard rotation of activations would give a language model")
    _add_common(turned)
    rotation.add_arguments(turned)
    four = commands.add_parser(
        "four_bits", help="quality of four bits by qao, by other packages and by llama.cpp, where installed"
    )
    four.add_argument("--out", type=Path, metavar="FOLDER", help="for the results, instead of bench/results/cpu")
    four_bits.add_arguments(four)
    four.set_defaults(device="cpu")
    grouped = commands.add_parser("experts", help="grouped GEMMs against loops of dense ones and bfloat16")
    _add_common(grouped)
    grouped.add_argument("--models", nargs="+", choices=experts.MODELS, metavar="NAME")
    grouped.add_argument("--m", nargs="+", type=int, metavar="M", help="tokens")
    grouped.add_argument("--routings", nargs="+", choices=experts.ROUTINGS, default=experts.ROUTINGS, metavar="NAME")
    grouped.add_argument("--schemes", nargs="+", choices=experts.SCHEMES, default=experts.SCHEMES, metavar="NAME")
    grouped.add_argument("--quick", action="store_true", help="a quarter of the time a cell: rougher medians")
    _add_check(grouped)
    block = commands.add_parser("experts_block", help="a whole block of a mixture, compiled; needs transformers")
    _add_common(block)
    block.add_argument("--m", nargs="+", type=int, default=experts_block.TOKENS, metavar="M", help="tokens")
    block.add_argument(
        "--schemes", nargs="+", choices=experts_block.CONTENDERS, default=experts_block.SCHEMES, metavar="NAME"
    )
    whole = commands.add_parser("llama", help="tokens per second of whole decoders; needs transformers")
    _add_common(whole)
    llama.add_arguments(whole)
    _add_check(whole)
    asked = commands.add_parser("generate", help="tokens per second of an unmodified transformers model's generate()")
    _add_common(asked)
    generate.add_arguments(asked)
    denoising = commands.add_parser("diffusion", help="a step of a diffusion transformer; needs diffusers")
    _add_common(denoising)
    diffusion.add_arguments(denoising)
    filed = commands.add_parser("gguf", help="tokens per second of GGUF files on the CPU, by qao and by llama.cpp")
    _add_out(filed)
    gguf.add_arguments(filed)
    filed.set_defaults(device="cpu")
    for engine in ENGINES:
        served = commands.add_parser(engine, help="tokens per second of this serving engine with and without qao")
        _add_out(served)
        serving.add_arguments(served, engine)
    shapes = commands.add_parser("linear", help="every scheme against F.linear on CPU layers of many shapes")
    _add_out(shapes)
    linear.add_arguments(shapes)
    _add_check(shapes)
    shapes.set_defaults(device="cpu")
    scaling = commands.add_parser("threads", help="what more threads of a CPU give, and what a busy process costs")
    _add_out(scaling)
    threads.add_arguments(scaling)
    _add_check(scaling)
    scaling.set_defaults(device="cpu")
    shared = commands.add_parser("busy", help="quantization and GEMMs of a CPU while another process keeps a core busy")
    _add_out(shared)
    busy.add_arguments(shared)
    _add_check(shared)
    shared.set_defaults(device="cpu")
    tables = commands.add_parser("table", help="write results and kernel table into README.md and docs/")
    tables.add_argument("--check", action="store_true", help="change nothing; exit 1 if a document is out of date")
    commands.add_parser("plots", help="draw the pictures of README into docs/plots; needs matplotlib")
    commands.add_parser("documents", help="plots and table: all of the documents that is made from results")
    accepted = commands.add_parser("accept", help="check contributed reports and add them to bench/results/contributed")
    accepted.add_argument("files", nargs="+", type=Path, metavar="FILE", help="of qao doctor --share, or accuracy.csv")
    tuner = commands.add_parser("tune", help="measure this GPU's costs of plans into the table that is compiled in")
    tuner.add_argument("operands", nargs="*", metavar="OPERANDS", help=f"of {', '.join(tune.OPERANDS)}; none: all")
    tuner.add_argument("--sweep", type=Path, metavar="PROGRAM", help="qao_sweep, instead of building it")
    return parser


def main() -> int:
    parser = make_parser()
    arguments = parser.parse_args()
    if arguments.command == "table":
        return table.update(arguments.check)
    if arguments.command == "accept":
        return reports.accept_all(arguments.files, reports.FOLDER)
    if arguments.command in ("plots", "documents"):
        plots.draw_tracked()
        return table.update(check=False) if arguments.command == "documents" else 0
    if arguments.command == "tune":
        if unknown := set(arguments.operands) - set(tune.OPERANDS):
            parser.error(f"no operands {', '.join(sorted(unknown))}; there are {', '.join(tune.OPERANDS)}")
        if not torch.cuda.is_available():
            parser.error(f"tune: torch {torch.__version__} sees no GPU")
        kinds, gpu = arguments.operands or tune.OPERANDS, torch.cuda.get_device_name()
        return 0 if tune.run(kinds, arguments.sweep, gpu, ceilings("cuda")[0] / 1e6) else 1
    joined = {"generate": generate, "vllm": serving, "sglang": serving}  # the others join in their own runs
    if arguments.command in joined and arguments.add:
        if arguments.out is None:
            parser.error("--add needs --out, the folder of the results")
        joined[arguments.command].add(arguments, arguments.out / f"{arguments.command}.csv")
        return 0
    if arguments.device == "cuda" and not torch.cuda.is_available():
        parser.error(f"--device cuda: torch {torch.__version__} sees no GPU")
    of_any_cpu = arguments.device == "cpu" and arguments.command in _OF_QUALITY
    folder = arguments.out or RESULTS / ("cpu" if of_any_cpu else device_slug(arguments.device))
    if arguments.command == "weights_only":
        write(weights_only.run(arguments.device), folder / "weights_only.csv")
        return 0
    if arguments.command == "numerics":
        write(numerics.run(arguments.device), folder / "numerics.csv")
        return 0
    if arguments.command == "outliers":
        write(outliers.run(arguments.device), folder / "outliers.csv")
        return 0
    if arguments.command == "gptq":
        write(gptq.run(arguments.device), folder / "gptq.csv")
        return 0
    if arguments.command == "update":
        update.run(arguments.device, arguments.shapes, lambda results: write(results, folder / "update.csv"))
        return 0
    if arguments.command == "language":
        language.run(arguments, folder / "language.csv")
        return 0
    if arguments.command == "accuracy":
        accuracy.run(arguments, folder / "accuracy.csv")
        return 0
    if arguments.command == "calibrate":
        calibrate.run(arguments, folder / "calibrate.csv")
        return 0
    if arguments.command == "invariance":
        invariance.run(arguments, folder / "invariance.csv")
        return 0
    if arguments.command == "plans":
        return 0 if plans.run(arguments, folder / "plans.csv") else 1
    if arguments.command == "prefill":
        rows = prefill.run(arguments, folder / "prefill.csv")
        return _report(*prefill.misses(rows)) if arguments.check else 0
    if arguments.command == "rotation":
        rotation.run(arguments, folder / "rotation.csv")
        return 0
    if arguments.command == "linear":
        rows = linear.run(arguments, folder / "linear.csv")
        return _report(*linear.misses(rows)) if arguments.check else 0
    if arguments.command == "threads":
        rows = threads.run(arguments.seconds, arguments.m, arguments.threads, folder / "threads.csv")
        return _report(*threads.misses(rows)) if arguments.check else 0
    if arguments.command == "busy":
        rows = busy.run(arguments.seconds, arguments.m, folder / "busy.csv")
        return _report(*busy.misses(rows)) if arguments.check else 0
    if arguments.command == "four_bits":
        four_bits.run(arguments, folder / "four_bits.csv")
        return 0
    if arguments.command == "experts":
        choice = arguments.models, arguments.m, arguments.routings, arguments.schemes
        results = experts.run(arguments.device, *choice, quick=arguments.quick)
        write(results, folder / "experts.csv")
        return _report(*experts.misses(results["rows"])) if arguments.check else 0
    if arguments.command == "experts_block":
        path = folder / "experts_block.csv"
        experts_block.run(arguments.device, arguments.m, arguments.schemes, lambda results: write(results, path))
        return 0
    if arguments.command == "quantize":
        results = quantize.run(arguments.device)
        write(results, folder / "quantize.csv")
        return _report(*bars.quantize_misses(results["rows"])) if arguments.check else 0
    if arguments.command == "host":
        results = host.run(arguments.device)
        write(results, folder / "host.csv")
        return _report(*host.misses(results["rows"], arguments.device)) if arguments.check else 0
    if arguments.command == "generate":
        generate.run(arguments, folder / "generate.csv")
        return 0
    if arguments.command == "diffusion":
        diffusion.run(arguments, folder / "diffusion.csv")
        return 0
    if arguments.command == "gguf":
        gguf.run(arguments, folder / "gguf.csv")
        return 0
    if arguments.command in ENGINES:
        serving.run(arguments, folder / f"{arguments.command}.csv")
        return 0
    if arguments.command == "llama":
        path = folder / ("llama_head.csv" if arguments.head else "llama.csv")
        before = read(path) if arguments.add and path.exists() else None
        results = llama.run(
            llama.from_arguments(arguments),
            save=lambda results: write(llama.add(before, results) if before else results, path),
        )
        return _report(*bars.decoder_misses(results["rows"])) if arguments.check else 0
    words = list(SCHEMES) if arguments.command == "all" else [arguments.command]
    known = {peer.name for word in words for peer in SCHEMES[word].peers}
    if unknown := set(arguments.peers or ()) - known:
        parser.error(f"no peer {', '.join(sorted(unknown))}; there are {', '.join(sorted(known))}")
    return max([_products(parser, arguments, word, folder) for word in words])


def _add_out(command: argparse.ArgumentParser) -> None:
    command.add_argument(
        "--out", type=Path, metavar="FOLDER", help="for the results, instead of bench/results/<device>"
    )


def _add_common(command: argparse.ArgumentParser) -> None:
    command.add_argument("--device", choices=["cpu", "cuda"], default="cuda" if torch.cuda.is_available() else "cpu")
    _add_out(command)


def _add_products(command: argparse.ArgumentParser) -> None:
    _add_common(command)
    command.add_argument(
        "--peers", nargs="*", metavar="NAME", help="also time these other operators, without a NAME all found here"
    )
    command.add_argument("--quick", action="store_true", help="a quarter of the time a cell: rougher medians")
    command.add_argument("--layers", nargs="+", metavar="NAME", help="only these layers")
    command.add_argument("--m", nargs="+", type=int, metavar="M", help="only these numbers of tokens")
    groups = [32, 64, 128, 256]
    command.add_argument("--group-size", type=int, default=128, choices=groups, help="of weights in four bits")
    command.add_argument("--symmetric", action="store_true", help="weights in four bits: no zero points")
    _add_check(command)


def _add_check(command: argparse.ArgumentParser) -> None:
    command.add_argument("--check", action="store_true", help="exit 1 if a cell misses its bar")


def _report(lines: list[str], compared: int) -> int:
    print(f"\n{compared - len(lines)} of {compared} cells reach their bar", *lines, sep="\n  ")
    return 1 if lines else 0


def _products(parser: argparse.ArgumentParser, arguments: argparse.Namespace, word: str, folder: Path) -> int:
    device, scheme = arguments.device, SCHEMES[word]
    known = {layer.name: layer for layer in LAYERS[device]}
    if unknown := set(arguments.layers or ()) - set(known):
        parser.error(f"no layer {', '.join(sorted(unknown))} on {device}; there are {', '.join(known)}")
    layers = [known[name] for name in arguments.layers or known]
    grouping: dict[str, Any] = {}
    if scheme.grouped:
        grouping = {"group_size": arguments.group_size, "symmetric": arguments.symmetric}
        if odd := [layer.name for layer in layers if layer.k % arguments.group_size]:
            parser.error(
                f"--group-size {arguments.group_size} does not divide K of {', '.join(odd)}: choose other --layers"
            )
    if arguments.peers is None and not arguments.check:
        scheme = scheme._replace(peers=())
    elif arguments.peers:
        scheme = scheme._replace(peers=tuple(peer for peer in scheme.peers if peer.name in arguments.peers))
    tokens = arguments.m or TOKENS[device]
    request = Run(scheme, device, layers, tokens, quick=arguments.quick, **grouping)
    results = run(request, save=lambda results: write(results, folder / f"{word}.csv"))
    return _report(*bars.misses(results["rows"], device, bars.BARS[word])) if arguments.check else 0


if __name__ == "__main__":
    sys.exit(main())

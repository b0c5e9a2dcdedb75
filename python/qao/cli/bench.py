"""``qao bench``: QuantLinear of every scheme compared with F.linear in bfloat16, on this machine."""

from __future__ import annotations

import argparse
from pathlib import Path
from typing import Any

from ..quantization.report import table
from .common import Failure, Output, command, counted, device_of, local_path, scheme_word

_DESCRIPTION = """
Times every scheme (with its defaults) and F.linear on random numbers. Calls are interleaved, so that a busy machine or
a hot GPU slows all of them alike. As in a model, weights are read from memory, not from a cache: the calls cycle
through many copies of each weight. Times are medians per call. On a GPU they exclude the host overhead, as in a CUDA
graph.
"""
_EXAMPLES = """
qao bench --layer 4096x4096
qao bench --layer 14336x4096 --layer 4096x14336 --tokens 1,16,512 --device cuda
qao bench Qwen3-8B --scheme int4 --scheme int8
"""


def add(commands: Any) -> None:
    parser = command(commands, "bench", run, "time the layers of a model on this machine", _DESCRIPTION, _EXAMPLES)
    parser.add_argument("model", nargs="?", type=Path, metavar="MODEL", help="time layers of the sizes in this model")
    parser.add_argument(
        "--layer",
        action="append",
        default=[],
        type=_layer,
        metavar="NxK",
        help="out_features x in_features; repeatable",
    )
    parser.add_argument(
        "--tokens", type=_tokens, default=[1, 16, 512], metavar="M,M,…", help="numbers of tokens (default: 1,16,512)"
    )
    parser.add_argument(
        "--scheme", action="append", type=scheme_word, metavar="SCHEME", help="repeatable (default: all)"
    )
    parser.add_argument("--device", help="cpu (default), cuda or cuda:1")


def _layer(text: str) -> tuple[int, int]:
    try:
        n, k = (int(part) for part in text.lower().split("x"))
        if n < 1 or k < 1:
            raise ValueError
    except ValueError:
        raise argparse.ArgumentTypeError(f"{text!r} must be NxK, such as 4096x4096") from None
    return n, k


def _tokens(text: str) -> list[int]:
    try:
        tokens = [int(part) for part in text.split(",")]
        if min(tokens) < 1:
            raise ValueError
    except ValueError:
        raise argparse.ArgumentTypeError(f"{text!r} must be numbers of tokens, such as 1,16,512") from None
    return tokens


def run(args: argparse.Namespace) -> int:
    import torch

    from ..schemes import SCHEMES
    from .timing import copies_of_layers, seconds_of_calls

    if not args.layer and args.model is None:
        args.parser.error("give a MODEL, or --layer NxK")
    output, device = Output(args), device_of(args)
    sizes = dict.fromkeys(args.layer)
    if args.model is not None:
        sizes.update(dict.fromkeys(_sizes_of(args.model)))
    words = args.scheme or [word for word, kind in SCHEMES.items() if device.type in kind.devices]
    name = (
        torch.cuda.get_device_name(device)
        if device.type == "cuda"
        else f"CPU, {counted(torch.get_num_threads(), 'thread')}"
    )
    output.say(f"{name}; median µs per call (speedup over F.linear in bfloat16)")
    rows: list[dict[str, Any]] = []
    cells: list[tuple[str, ...]] = []
    for n, k in sizes:
        layers = copies_of_layers(n, k, words, device)
        columns = []
        for m in args.tokens:
            times = seconds_of_calls(layers, torch.randn(m, k, device=device).bfloat16())
            rows += [{"n": n, "k": k, "m": m, "name": name, "seconds": seconds} for name, seconds in times.items()]
            columns.append([_cell(word, times) for word in times])
        cells += [(f"{n}x{k}", *row) for row in zip(layers, *columns, strict=True)]
    for line in table(("layer", "scheme", *(f"M={m}" for m in args.tokens)), cells):
        output.say(line)
    output.result({"device": name, "times": rows})
    return 0


def _cell(word: str, times: dict[str, float]) -> str:
    speedup = "" if word == "F.linear" else f" ({times['F.linear'] / times[word]:.2f}x)"
    return f"{1e6 * times[word]:.1f}{speedup}"


def _sizes_of(path: Path) -> list[tuple[int, int]]:
    from ..checkpoints import open_checkpoint
    from ..nn.eligibility import is_linear
    from ..nn.linear import linear_weight
    from .skeleton import skeleton

    checkpoint = open_checkpoint(local_path(path))
    found = [(layer.out_features, layer.in_features) for layer in checkpoint.layers.values()]
    if not found:
        weights = (linear_weight(module) for module in skeleton(checkpoint).modules() if is_linear(module))
        found = [(weight.shape[0], weight.shape[1]) for weight in weights]
    if not found:
        raise Failure(f"{path} has no linear layers")
    return found

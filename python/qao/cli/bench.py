"""``qao bench``: QuantLinear of every scheme beside F.linear in bfloat16, on this machine."""

from __future__ import annotations

import argparse
import math
import statistics
import time
from collections.abc import Callable
from pathlib import Path
from typing import Any

import torch
from torch import Tensor, nn

from ..linear import QuantLinear
from ..report import table
from ..schemes import SCHEMES
from .common import Failure, Output, command, device_of

_DESCRIPTION = """
Times every scheme (with its defaults) and F.linear on random numbers, all by turns, so that a busy machine or a hot GPU
slows all of them alike. Weights are read from memory, as in a model: each is there in many copies, used one after the
other. Shown is the median time of a call; on a GPU without the time that Python takes, as in a CUDA graph.
"""
_EXAMPLES = """
qao bench --layer 4096x4096
qao bench --layer 14336x4096 --layer 4096x14336 --tokens 1,16,512 --device cuda
qao bench Qwen3-8B --scheme int4 --scheme int8
"""
_CPU_BYTES = 128 << 20  # of copies of one weight; more than the caches of most
_ROUNDS = 7
_ROUND_SECONDS = 0.02


def add(commands: Any) -> None:
    parser = command(commands, "bench", run, "time the layers of a model on this machine", _DESCRIPTION, _EXAMPLES)
    parser.add_argument("model", nargs="?", type=Path, metavar="MODEL", help="take the sizes of its linear layers")
    parser.add_argument("--layer", action="append", default=[], type=_layer, metavar="NxK", help="out x in features")
    parser.add_argument("--tokens", type=_tokens, default=[1, 16, 512], metavar="M,M,…", help="(1,16,512)")
    parser.add_argument("--scheme", action="append", choices=list(SCHEMES), help="again for more (all)")
    parser.add_argument("--device", help="cpu (default), cuda, cuda:1")


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
    if not args.layer and args.model is None:
        args.parser.error("give a MODEL, or --layer NxK")
    output, device = Output(args), device_of(args)
    sizes = dict.fromkeys(args.layer)
    if args.model is not None:
        sizes.update(dict.fromkeys(_sizes_of(args.model)))
    words = args.scheme or list(SCHEMES)
    name = torch.cuda.get_device_name(device) if device.type == "cuda" else f"CPU, {torch.get_num_threads()} threads"
    output.say(f"{name}; median µs of a call, and how many times as fast as F.linear in bfloat16")
    rows, cells = [], []
    for n, k in sizes:
        layers = _layers(n, k, words, device)
        for m in args.tokens:
            times = _times(layers, torch.randn(m, k, device=device).bfloat16())
            rows += [{"n": n, "k": k, "m": m, "name": name, "seconds": seconds} for name, seconds in times.items()]
            base = times["F.linear"]
            fast = [f"{1e6 * times[word]:.1f} ({base / times[word]:.2f}x)" for word in words]
            cells.append((f"{n}x{k}", str(m), f"{1e6 * base:.1f}", *fast))
    for line in table(("layer", "M", "F.linear", *words), cells):
        output.say(line)
    output.result({"device": name, "times": rows})
    return 0


def _sizes_of(path: Path) -> list[tuple[int, int]]:
    from ..checkpoints import open_checkpoint
    from ..linear import is_linear, linear_weight
    from .skeleton import skeleton

    checkpoint = open_checkpoint(path)
    found = [(layer.out_features, layer.in_features) for layer in checkpoint.layers.values()]
    if not found:
        weights = (linear_weight(module) for module in skeleton(checkpoint).modules() if is_linear(module))
        found = [(weight.shape[0], weight.shape[1]) for weight in weights]
    if not found:
        raise Failure(f"{path} has no linear layers")
    return found


def _layers(n: int, k: int, words: list[str], device: torch.device) -> dict[str, list[nn.Module]]:
    """By name, copies of a layer; together larger than what the device's cache holds."""
    wanted = _CPU_BYTES
    if device.type == "cuda":  # with fewer, a part of W would still be in the cache when its turn comes again
        wanted = 10 * torch.cuda.get_device_properties(device).L2_cache_size
    linear = nn.Linear(k, n, bias=False, device=device, dtype=torch.bfloat16).requires_grad_(False)
    made: dict[str, nn.Module] = {"F.linear": linear}
    made |= {word: QuantLinear.from_linear(linear, SCHEMES[word]()) for word in words}
    result = {}
    for name, module in made.items():
        tensors = [tensor for tensor in module.state_dict().values() if isinstance(tensor, Tensor)]
        count = min(math.ceil(wanted / sum(tensor.nbytes for tensor in tensors)), 256)
        result[name] = [module, *(_copy(module) for _ in range(count - 1))]
    return result


def _copy(module: nn.Module) -> nn.Module:
    if not isinstance(module, QuantLinear):
        n, k = module.weight.shape  # type: ignore[misc]
        copied = nn.Linear(int(k), int(n), bias=False, device="meta")
        copied.weight = nn.Parameter(module.weight.detach().clone(), requires_grad=False)  # type: ignore[operator]
        return copied
    tensors = {name: None if tensor is None else tensor.clone() for name, tensor in module.packed.tensors().items()}
    packed = type(module.packed)(**tensors)  # type: ignore[arg-type]
    return QuantLinear(module.in_features, module.out_features, module.scheme, packed, None, module.dtype)


def _times(layers: dict[str, list[nn.Module]], x: Tensor) -> dict[str, float]:
    """Median seconds of a call, by name; the names take turns."""
    runs = {name: _runner(copies, x) for name, copies in layers.items()}
    counts = {name: max(1, math.ceil(_ROUND_SECONDS / _measure(run, 1, x.device))) for name, run in runs.items()}
    seen: dict[str, list[float]] = {name: [] for name in runs}
    for _ in range(_ROUNDS):
        for name, run in runs.items():
            seen[name].append(_measure(run, counts[name], x.device) / (counts[name] * run.calls))
    return {name: statistics.median(times) for name, times in seen.items()}


class _Runner:
    """Calls each copy of a layer in turn, ``calls`` at a time."""

    def __init__(self, copies: list[nn.Module], x: Tensor) -> None:
        self._copies, self._x, self._next = copies, x, 0
        self.calls = 1

    def __call__(self) -> None:
        self._copies[self._next](self._x)
        self._next = (self._next + 1) % len(self._copies)


class _Graph(_Runner):
    """All copies in one CUDA graph."""

    def __init__(self, copies: list[nn.Module], x: Tensor) -> None:
        super().__init__(copies, x)
        self.calls = len(copies)
        stream = torch.cuda.Stream()
        stream.wait_stream(torch.cuda.current_stream())
        with torch.cuda.stream(stream):
            for layer in copies[:2]:
                layer(x)
        torch.cuda.current_stream().wait_stream(stream)
        self._graph = torch.cuda.CUDAGraph()
        with torch.cuda.graph(self._graph):
            for layer in copies:
                layer(x)

    def __call__(self) -> None:
        self._graph.replay()


def _runner(copies: list[nn.Module], x: Tensor) -> _Runner:
    with torch.inference_mode():
        return _Graph(copies, x) if x.is_cuda else _Runner(copies, x)


@torch.inference_mode()
def _measure(run: Callable[[], None], count: int, device: torch.device) -> float:
    """Seconds of ``count`` runs, after one that is not counted."""
    run()
    if device.type == "cuda":
        begin, end = (torch.cuda.Event(enable_timing=True) for _ in range(2))
        begin.record()
        for _ in range(count):
            run()
        end.record()
        end.synchronize()
        return float(begin.elapsed_time(end)) / 1e3
    begun = time.perf_counter()
    for _ in range(count):
        run()
    return time.perf_counter() - begun

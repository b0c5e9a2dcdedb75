"""Interleaved timing of layers of every scheme and of F.linear in bfloat16."""

from __future__ import annotations

import math
import statistics
import time
from collections.abc import Callable

import torch
from torch import Tensor, nn

from ..nn.linear import QuantLinear
from ..schemes import SCHEMES

CPU_BYTES = 128 << 20  # all copies of one weight; larger than most caches
ROUNDS = 7
ROUND_SECONDS = 0.02


def copies_of_layers(
    n: int, k: int, words: list[str], device: torch.device, bytes_each: int | None = None
) -> dict[str, list[nn.Module]]:
    """Copies of each layer and of F.linear, by name: ``bytes_each`` together, or more than the device's cache."""
    wanted = bytes_each or CPU_BYTES
    if bytes_each is None and device.type == "cuda":  # with fewer copies, part of W would stay in the cache
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


def seconds_of_calls(layers: dict[str, list[nn.Module]], x: Tensor, rounds: int | None = None) -> dict[str, float]:
    """Median seconds per call over this number of rounds, by name. The layers alternate."""
    runs = {name: _runner(copies, x) for name, copies in layers.items()}
    counts = {name: max(1, math.ceil(ROUND_SECONDS / _measure(run, 1, x.device))) for name, run in runs.items()}
    seen: dict[str, list[float]] = {name: [] for name in runs}
    for _ in range(rounds or ROUNDS):
        for name, run in runs.items():
            seen[name].append(_measure(run, counts[name], x.device) / (counts[name] * run.calls))
    return {name: statistics.median(times) for name, times in seen.items()}


class _Runner:
    """Calls the copies of a layer in rotation, ``calls`` at a time."""

    def __init__(self, copies: list[nn.Module], x: Tensor) -> None:
        self._copies, self._x, self._next = copies, x, 0
        self.calls = 1

    def __call__(self) -> None:
        self._copies[self._next](self._x)
        self._next = (self._next + 1) % len(self._copies)


class _Graph(_Runner):
    """Calls all copies in one CUDA graph."""

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
    """Seconds for ``count`` runs, after a warm-up run."""
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

"""Timing methods: medians of alternating calls on a CPU, of alternating CUDA graph replays on a GPU.

Benchmarks use random data and rotate over copies of the weight, so that the next copy is not cached.
"""

from __future__ import annotations

import math
import time
from collections.abc import Callable, Iterator, Sequence
from itertools import cycle
from statistics import median

import torch
from torch import Tensor

Call = Callable[[], object]

# A sample repeats its call until it is long compared with the timer resolution or a GPU synchronization, but no longer:
# on a busy CPU, short samples are less often interrupted.
_SHORTEST_SAMPLE_S = {"cpu": 2e-4, "cuda": 2e-3}
_SHORTEST_WARM_SAMPLE_S = 0.02
_GRAPH_S = 500e-6  # device time of one graph, long compared with the gap between replays
_SLOW_CALL_S = 5e-3  # a longer call gets a separate graph, since the L2 has no effect on it
_MAX_GRAPH_CALLS = 512
# With few copies, an L2 that evicts new lines first keeps part of them between rounds, unlike in a model.
_L2S_OF_COPIES = 10
_CPU_COPIES_BYTES = 256 << 20  # far beyond L2; an L3 may be larger, but on a server it is shared


def copies_of(size: int, device: str) -> int:
    """The number of copies of ``size`` bytes, at least 3, that far exceeds the L2 of the device."""
    cold = _L2S_OF_COPIES * torch.cuda.get_device_properties().L2_cache_size if device == "cuda" else _CPU_COPIES_BYTES
    return min(max(3, math.ceil(cold / size)), _MAX_GRAPH_CALLS)


def rotation(tensors: tuple[Tensor, ...], copies: int) -> Iterator[tuple[Tensor, ...]]:
    """``tensors`` and ``copies - 1`` clones of them, cycled."""
    return cycle([tensors, *(tuple(t.clone() for t in tensors) for _ in range(copies - 1))])


def seconds_of(call: Call, repeats: int, device: str) -> float:
    """Seconds of a call, including synchronization."""
    synchronize = torch.cuda.synchronize if device == "cuda" else lambda: None
    synchronize()
    start = time.perf_counter()
    for _ in range(repeats):
        call()
    synchronize()
    return (time.perf_counter() - start) / repeats


def interleaved(
    calls: Sequence[Call],
    seconds: float,
    device: str = "cpu",
    min_rounds: int = 5,
    warm: bool = False,
    average: Callable[[Sequence[float]], float] = median,
) -> list[float]:
    """Median seconds of each call. Calls alternate for about ``seconds`` each, so that disturbances affect all.

    ``warm``: samples are many calls after an untimed one, so that the caches hold as much of the weight as they can.
    """

    def sample(call: Call, repeats: int) -> float:
        if warm:
            call()
        return seconds_of(call, repeats, device)

    first = [min(sample(call, 1), sample(call, 1)) for call in calls]
    shortest = _SHORTEST_WARM_SAMPLE_S if warm else _SHORTEST_SAMPLE_S[device]
    repeats = [max(1, math.ceil(shortest / t)) for t in first]
    samples: list[list[float]] = [[] for _ in calls]
    end = time.perf_counter() + seconds * len(calls)
    while len(samples[-1]) < min_rounds or time.perf_counter() < end:
        for call, repeat, times in zip(calls, repeats, samples, strict=True):
            times.append(sample(call, repeat))
    return [average(times) for times in samples]


def capture(call: Call, calls: int = 1) -> torch.cuda.CUDAGraph:
    """A CUDA graph of ``calls`` consecutive calls."""
    side = torch.cuda.Stream()
    side.wait_stream(torch.cuda.current_stream())
    with torch.cuda.stream(side):  # lazy setup (cuBLAS workspaces, module loads) must not happen during capture
        call()
    torch.cuda.current_stream().wait_stream(side)
    graph = torch.cuda.CUDAGraph()
    with torch.cuda.graph(graph):
        for _ in range(calls):
            call()
    return graph


class Graph:
    """A graph of enough calls to be timed, in whole rotations over the copies of the weight."""

    def __init__(self, call: Call, copies: int, floor_s: float) -> None:
        turns = math.ceil(min(_MAX_GRAPH_CALLS, _GRAPH_S / floor_s) / copies)
        once = min(seconds_of(call, 1, "cuda"), seconds_of(call, 1, "cuda"))  # a busy host may delay one
        self.calls = 1 if once > _SLOW_CALL_S else turns * copies
        self.graph = capture(call, self.calls)

    def sample(self) -> tuple[torch.cuda.Event, torch.cuda.Event]:
        start, end = torch.cuda.Event(enable_timing=True), torch.cuda.Event(enable_timing=True)
        start.record()
        self.graph.replay()
        end.record()
        return start, end


def replayed(graphs: Sequence[Graph], seconds: float, min_rounds: int = 5) -> list[float]:
    """Median seconds per call of each graph. Replays alternate for about ``seconds`` per graph."""
    for graph in graphs:  # warm-up
        graph.sample()
    torch.cuda.synchronize()
    samples: list[list[float]] = [[] for _ in graphs]
    end = time.perf_counter() + seconds * len(graphs)
    while len(samples[-1]) < min_rounds or time.perf_counter() < end:
        events = [graph.sample() for graph in graphs]
        torch.cuda.synchronize()
        for graph, times, (start, stop) in zip(graphs, samples, events, strict=True):
            times.append(start.elapsed_time(stop) * 1e-3 / graph.calls)
    return [median(times) for times in samples]


def settle_clocks() -> None:
    """Keep the GPU busy until two consecutive equal batches agree to 1 %, 3 seconds at most."""
    a = torch.randn(8192, 8192, device="cuda", dtype=torch.bfloat16)
    before = math.inf
    for _ in range(60):
        (now,) = interleaved([lambda: a @ a], 0.05, "cuda")
        if abs(now / before - 1) < 0.01:
            return
        before = now


def ceilings(device: str) -> tuple[float, float]:
    """Measured limits of this device: bytes/s of memory reads, and FLOP/s of a bfloat16 GEMM."""
    size, side = (1 << 31, 8192) if device == "cuda" else (1 << 28, 2048)
    data = torch.randn(size // 4, device=device)
    target = torch.empty_like(data)
    a, b = (torch.randn(side, side, device=device).bfloat16() for _ in range(2))
    read, copy, product = interleaved([data.sum, lambda: target.copy_(data), lambda: a @ b], 0.3, device)
    return max(size / read, 2 * size / copy), 2 * side**3 / product

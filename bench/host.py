"""Host time of one eager layer call: QuantLinear under every scheme, nn.Linear, F.linear and peers.

One token, and a layer so small that the device is not the bottleneck. On a GPU calls are queued without
synchronization. On a CPU the layer is tiny and runs on one thread, since waking others would dominate.
"""

from __future__ import annotations

import gc
import importlib.util
import time
from collections.abc import Callable, Iterator
from functools import partial
from statistics import median
from typing import Any

import qao
import torch
import torch.nn.functional as F
from torch import Tensor, nn

from .markdown import caption, table
from .meta import describe, warn_if_busy
from .schemes import LAYER_SCHEMES

SIZES = {"cpu": (16, 64), "cuda": (1024,)}  # K = N
GRADIENT = "gradient of x"
MODES: dict[str, Callable[[], Any]] = {
    "inference_mode": torch.inference_mode,
    "no_grad": torch.no_grad,
    GRADIENT: torch.enable_grad,  # the forward call without backward
}
BAR = {"cpu": 1.1, "cuda": 1.0}  # maximum ratio to nn.Linear
GRADIENT_BAR = 1.0  # the same, if W consists of whole tiles: not 16 x 16
BASELINE = "nn.Linear"

_CALLS = 100  # consecutive calls, fewer than the GPU queue holds
_ROUNDS = {"cpu": 60, "cuda": 40}

Call = Callable[[], object]


def run(device: str) -> dict[str, Any]:
    """Measure, print one line per contender, and return the content of the results file."""
    threads = torch.get_num_threads()
    if device == "cpu":
        torch.set_num_threads(1)
    try:
        meta = describe(device)
        warn_if_busy(meta)
        rows = [row for size in SIZES[device] for mode in MODES for row in _rows(device, size, mode)]
    finally:
        torch.set_num_threads(threads)
    return {"meta": meta, "rows": rows}


def misses(rows: list[dict[str, Any]], device: str) -> tuple[list[str], int]:
    """As bars.misses: every scheme against nn.Linear."""
    ours = [row for row in rows if row["is_qao"]]
    bars = [GRADIENT_BAR if row["mode"] == GRADIENT and row["size"] >= 64 else BAR[device] for row in ours]
    lines = [
        f"{row['name']}, {row['size']} x {row['size']}, {row['mode']}: {row['ratio']:.2f}, the bar is {bar}"
        for row, bar in zip(ours, bars, strict=True)
        if row["ratio"] > bar
    ]
    return lines, len(ours)


def render(results: dict[str, Any]) -> str:
    """The Markdown of one results file."""
    rows = results["rows"]
    columns = list(dict.fromkeys((row["size"], row["mode"]) for row in rows))
    lines = []
    for name in dict.fromkeys(row["name"] for row in rows):
        cells = {(row["size"], row["mode"]): row for row in rows if row["name"] == name}
        found = [cells.get(column) for column in columns]
        lines.append([name, *(f"{row['us']:.2f} µs, {row['ratio']:.2f}" if row else "–" for row in found)])
    header = ["layer", *(f"{size} × {size}, {mode}" for size, mode in columns)]
    note = f"{caption(results['meta'])}; bfloat16, M = 1. µs a call, and as a multiple of {BASELINE}'s."
    return f"{note}\n\n{table(header, lines)}"


def _rows(device: str, size: int, mode: str) -> Iterator[dict[str, Any]]:
    calls = dict(_contenders(device, size, mode == GRADIENT))
    with MODES[mode]():
        seconds = _host_seconds(calls, device)
    print(f"{size} x {size}, {mode}")
    for name, value in seconds.items():
        ratio = value / seconds[BASELINE]
        print(f"  {name:<24} {value * 1e6:7.2f} us  {ratio:5.2f} x {BASELINE}", flush=True)
        yield {
            **{"name": name, "is_qao": name in LAYER_SCHEMES, "size": size, "mode": mode, "dtype": "bfloat16", "M": 1},
            **{"us": value * 1e6, "ratio": ratio},
        }


def _contenders(device: str, size: int, trains: bool) -> Iterator[tuple[str, Call]]:
    linear = nn.Linear(size, size, device=device, dtype=torch.bfloat16)
    x = torch.randn(1, size, device=device).bfloat16().requires_grad_(trains)
    yield BASELINE, partial(linear, x)
    yield "F.linear", partial(F.linear, x, linear.weight, linear.bias)
    for word, scheme in LAYER_SCHEMES.items():
        yield word, partial(qao.QuantLinear.from_linear(linear, scheme), x)
    yield from _torchao(linear, x)
    yield from _bitsandbytes(linear, x)


def _torchao(linear: nn.Linear, x: Tensor) -> Iterator[tuple[str, Call]]:
    if importlib.util.find_spec("torchao") is None:
        return
    from torchao.quantization import Int8DynamicActivationInt8WeightConfig, Int8WeightOnlyConfig, quantize_

    for config in (Int8WeightOnlyConfig(), Int8DynamicActivationInt8WeightConfig()):
        model = nn.Sequential(nn.Linear(linear.in_features, linear.out_features).to(x.device, x.dtype))
        quantize_(model, config)
        yield f"torchao {type(config).__name__.removesuffix('Config')}", partial(model[0], x)


def _bitsandbytes(linear: nn.Linear, x: Tensor) -> Iterator[tuple[str, Call]]:
    if importlib.util.find_spec("bitsandbytes") is None or not x.is_cuda:
        return
    import bitsandbytes

    layer = bitsandbytes.nn.Linear4bit(linear.in_features, linear.out_features, compute_dtype=x.dtype).to(x.device)
    yield "bitsandbytes Linear4bit", partial(layer, x)


def _host_seconds(calls: dict[str, Call], device: str) -> dict[str, float]:
    """Median seconds per call, in rounds. On a GPU the queue is drained between samples, not within one."""
    synchronize = torch.cuda.synchronize if device == "cuda" else lambda: None
    samples: dict[str, list[float]] = {name: [] for name in calls}
    gc.collect()
    gc.disable()
    try:
        for round_ in range(-2, _ROUNDS[device]):  # two to warm up
            for name, call in calls.items():
                synchronize()
                start = time.perf_counter()
                for _ in range(_CALLS):
                    call()
                if round_ >= 0:
                    samples[name].append((time.perf_counter() - start) / _CALLS)
                else:
                    synchronize()
    finally:
        gc.enable()
    return {name: median(times) for name, times in samples.items()}

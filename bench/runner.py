"""Times a scheme on linear layers of real models: every layer at every M, against bfloat16 and peers."""

from __future__ import annotations

from collections.abc import Callable, Collection, Iterator, Sequence
from dataclasses import dataclass
from functools import partial
from typing import Any, NamedTuple

import torch
from torch import Tensor

from .meta import describe, warn_if_busy
from .peers import Bf16, Peer
from .schemes import Scheme
from .timing import Graph, ceilings, copies_of, interleaved, replayed, rotation, settle_clocks
from .weights import Weight


class Layer(NamedTuple):
    name: str
    n: int  # out_features
    k: int  # in_features
    cached: bool = False  # one copy of the weight, which the last-level cache may hold, instead of rotating copies


# o, qkv, gate_up and down of an 8B Llama, o and down of a 70B one; K = 896 is Qwen2.5-0.5B.
LAYERS: dict[str, tuple[Layer, ...]] = {
    "cpu": (
        Layer("o", 4096, 4096),
        Layer("up", 14336, 4096),
        Layer("up_0.5b", 4864, 896),
        Layer("o_cached", 4096, 4096, cached=True),
        Layer("up_cached", 14336, 4096, cached=True),
    ),
    "cuda": (
        Layer("o", 4096, 4096),
        Layer("qkv", 6144, 4096),
        Layer("gate_up", 28672, 4096),
        Layer("down", 4096, 14336),
        Layer("o70", 8192, 8192),
        Layer("down70", 8192, 28672),
    ),
}
TOKENS: dict[str, tuple[int, ...]] = {
    "cpu": (1, 4, 16, 128, 512, 2048),
    "cuda": (1, 4, 16, 32, 64, 128, 256, 512, 1024, 4096, 8192),
}

_CELL_S = {"cpu": 1.0, "cuda": 0.05}  # timing budget of one contender in one cell
_QUICK = 4  # --quick divides the budget


@dataclass(frozen=True)
class Run:
    """Settings of a run."""

    scheme: Scheme
    device: str
    layers: Sequence[Layer]
    tokens: Sequence[int]
    group_size: int | None = None  # 4-bit weights only
    symmetric: bool | None = None
    quick: bool = False

    def weight(self, layer: Layer) -> Weight:
        grouping = (self.group_size, self.symmetric) if self.scheme.grouped else ()
        return self.scheme.random_weight(layer.n, layer.k, *grouping, self.device)


class Contender(NamedTuple):
    peer: Peer
    weights: Iterator[tuple[Tensor, ...]]  # rotating copies of the peer's tensors

    def run(self, x: Tensor) -> Tensor:
        return self.peer.run(x, *next(self.weights))


def run(request: Run, save: Callable[[dict[str, Any]], None] = lambda results: None) -> dict[str, Any]:
    """Measure, print one line per cell, and return the content of the results file.

    ``save`` gets it after every layer, so that an interrupted run keeps its results.
    """
    meta = describe(request.device)
    if request.device == "cuda":
        settle_clocks()
    bytes_per_s, flop_per_s = ceilings(request.device)
    meta |= {"read_gb_s": bytes_per_s / 1e9, "bf16_tflop_s": flop_per_s / 1e12}
    print(f"{meta['device']}, torch {meta['torch']}: reads {bytes_per_s / 1e9:.0f} GB/s, ", end="")
    print(f"multiplies bfloat16 matrices at {flop_per_s / 1e12:.1f} TFLOP/s")
    warn_if_busy(meta)
    results: dict[str, Any] = {"meta": meta, "rows": []}
    for layer in request.layers:
        results["rows"] += _layer_rows(request, layer, bytes_per_s, flop_per_s)
        save(results)
    return results


@torch.inference_mode()
def _layer_rows(request: Run, layer: Layer, bytes_per_s: float, flop_per_s: float) -> Iterator[dict[str, Any]]:
    device, scheme = request.device, request.scheme
    weight = request.weight(layer)
    reference = weight.dequantize().float()
    kinds = (scheme.ours, Bf16, *scheme.peers)
    contenders = {kind.name: _contender(kind, weight, device, layer.cached) for kind in kinds}
    ours = contenders[scheme.ours.name]
    assert isinstance(ours, Contender), ours
    weight_bytes = sum(t.nbytes for t in ours.peer.tensors)
    print(f"\n{scheme.ours.name}, {layer.name}: N={layer.n}, K={layer.k}")
    absent = {name: why for name, why in contenders.items() if isinstance(why, str)}
    for name, why in absent.items():
        print(f"  without {name}: {why}")

    for m in request.tokens:
        x = torch.randn(m, layer.k, device=device).bfloat16()
        moved = weight_bytes + x.nbytes + m * layer.n * x.itemsize
        flop = 2 * m * layer.n * layer.k
        floor = max(moved / bytes_per_s, flop / flop_per_s)
        outcome = _cell(request, contenders, x, reference, floor, layer.cached)
        seconds = {name: value for name, value in outcome.items() if isinstance(value, float)}
        ours_s, bf16_s = seconds.pop(scheme.ours.name), seconds.pop(Bf16.name)
        row = {
            **{"layer": layer.name, "N": layer.n, "K": layer.k, "M": m, "cached": layer.cached},
            **{"group_size": request.group_size, "symmetric": request.symmetric, "dtype": "bfloat16"},
            **{"us": ours_s * 1e6, "bf16_us": bf16_s * 1e6, "floor_us": floor * 1e6},
            **{"gb_s": moved / ours_s / 1e9, "tflop_s": flop / ours_s / 1e12},
            "peers": {name: s * 1e6 for name, s in seconds.items()},
            "not_run": {name: why for name, why in outcome.items() if isinstance(why, str)},
        }
        _print_row(row, absent)
        yield row


def _contender(kind: type[Peer], weight: Weight, device: str, cached: bool) -> Contender | str:
    """A contender with rotating copies, or the reason why it cannot run."""
    if reason := kind.unavailable(device):
        return reason
    try:
        peer = kind(weight)
    except Exception as error:  # failures of other libraries are results
        return _reason(kind, error)
    return Contender(peer, rotation(peer.tensors, 1 if cached else _copies(peer, device)))


def _cell(
    request: Run, contenders: dict[str, Contender | str], x: Tensor, reference: Tensor, floor: float, cached: bool
) -> dict[str, float | str]:
    """Seconds per call by contender, or the reason why it did not run."""
    timed: dict[str, Any] = {}
    outcome: dict[str, float | str] = {}
    for name, contender in contenders.items():
        if isinstance(contender, str):
            outcome[name] = contender
        elif x.shape[0] > contender.peer.max_m:
            outcome[name] = f"M > {contender.peer.max_m}"
        else:
            try:
                timed[name] = _ready(contender, x, reference, floor, request.scheme.max_error)
            except Exception as error:
                outcome[name] = _reason(type(contender.peer), error)
    seconds = _CELL_S[request.device] / (_QUICK if request.quick else 1)
    measure = replayed if request.device == "cuda" else partial(interleaved, warm=cached)
    return outcome | dict(zip(timed, measure(list(timed.values()), seconds), strict=True))


def _ready(contender: Contender, x: Tensor, reference: Tensor, floor: float, max_error: float) -> Any:
    """A graph or a call for the timer of x's device. Checks the result first."""
    peer = contender.peer
    expected = x[-16:].float() @ reference.T
    error = (peer.run(x, *peer.tensors)[-16:].float() - expected).norm() / expected.norm()
    if not error < max_error:
        raise RuntimeError(f"wrong result: relative error {error:.3g} at x {list(x.shape)}")
    call = partial(contender.run, x)
    return Graph(call, _copies(peer, "cuda"), floor) if x.is_cuda else call


def _copies(peer: Peer, device: str) -> int:
    return copies_of(sum(t.nbytes for t in peer.tensors), device)


def _reason(kind: type[Peer], error: Exception) -> str:
    """One line for the results. Only peers may fail."""
    if not kind.may_fail:
        raise error
    return f"{type(error).__name__}: {str(error).partition(chr(10))[0]}"[:200]


def _print_row(row: dict[str, Any], absent: Collection[str]) -> None:
    us = row["us"]
    against = {"bf16": row["bf16_us"], **row["peers"]}
    times = "  ".join(f"{name} {t:9.1f} ({t / us:5.2f}x)" for name, t in against.items())
    failed = "".join(f"  {name}: {why}" for name, why in row["not_run"].items() if name not in absent)
    print(f"  M={row['M']:<5} {us:9.1f} us  {row['floor_us'] / us:4.0%} of roofline  {times}{failed}", flush=True)

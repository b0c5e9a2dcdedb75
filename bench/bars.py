"""Performance bars of the project: minimum speedup over a peer by scheme, device and M."""

from __future__ import annotations

from typing import Any, NamedTuple

from .ratios import BEST_PEER, BF16, mean_ratio, ratio


class Bar(NamedTuple):
    device: str
    min_m: int
    max_m: int
    peer: str  # a peer's name, BF16 or BEST_PEER
    ratio: float  # minimum of the peer's time divided by ours
    layers: tuple[str, ...] = ()  # only these layers; empty: every layer of at least MIN_K
    mean: bool = False  # whether the bar applies to the geometric mean over cells or to each cell


_ANY = 1 << 30
MIN_K = 4096  # smaller layers are measured but have no bar
# CPU bars apply to a single copy of the weight, so that kernels can use the caches. Rotating copies are measured too,
# but there memory bandwidth dominates at small M.

_LARGE = ("gate_up", "o70")
_CPU = Bar("cpu", 1, _ANY, BF16, 1.0)
_CUDA = Bar("cuda", 1, _ANY, BF16, 1.0)
_CUDA_LARGE = (Bar("cuda", 1, 16, BF16, 1.3, _LARGE), Bar("cuda", 4096, 4096, BF16, 0.6, _LARGE))


def _best_peers(few: float, some: float, many: float) -> tuple[Bar, ...]:
    """Bars for means over all layers: up to 16, 32 to 128, and more tokens."""
    at = {(1, 16): few, (32, 128): some, (256, _ANY): many}
    return tuple(Bar("cuda", *tokens, BEST_PEER, ratio, mean=True) for tokens, ratio in at.items())


_CUDA_MM8 = (_CUDA, *_CUDA_LARGE, *_best_peers(1.2, 1.1, 1.0), Bar("cuda", 1, _ANY, BEST_PEER, 0.93))


def _faster_than_torch_int8(peer: str) -> tuple[Bar, ...]:
    at = {(1, 1): 1.5, (4, 16): 1.3, (128, 512): 1.2}
    return tuple(Bar("cpu", *tokens, peer, ratio) for tokens, ratio in at.items())


BARS: dict[str, tuple[Bar, ...]] = {
    "int4": (
        Bar("cpu", 1, 4, "torch_int4", 2.0),
        Bar("cpu", 16, 16, BF16, 2.5),
        Bar("cpu", 128, 128, BF16, 1.4),
        Bar("cpu", 512, 512, BF16, 1.25),
        Bar("cpu", 2048, 2048, BF16, 1.05),
        Bar("cuda", 1, 4, "tinygemm", 1.0),
        Bar("cuda", 16, _ANY, "tinygemm", 3.0),
        Bar("cuda", 1, 128, BF16, 1.0),
        Bar("cuda", 129, _ANY, BF16, 0.97),
        *_best_peers(1.5, 1.1, 0.98),
    ),
    "int8": (_CPU, _CUDA, *_CUDA_LARGE),
    "fp8": (_CPU._replace(max_m=16), _CUDA, *_CUDA_LARGE),
    "int8_int8": (_CPU, *_CUDA_MM8, *_faster_than_torch_int8("int_mm"), *_faster_than_torch_int8("qlinear")),
    "int8_int4": (
        _CPU,
        *_CUDA_LARGE,
        Bar("cpu", 1, 1, "qao_int4", 1.0),
        Bar("cpu", 16, _ANY, "qao_int8_int8", 0.9),
    ),
    "fp8_fp8": (_CPU, *_CUDA_MM8),
    "fp8_int4": (_CPU, *_CUDA_LARGE),
}


# One pass over at least 4096 x 8192 values on a GPU: share of the bandwidth of a copy.
_QUANTIZE_VALUES = 4096 * 8192
_QUANTIZE_OF_COPY = 0.8


def misses(rows: list[dict[str, Any]], device: str, bars: tuple[Bar, ...]) -> tuple[list[str], int]:
    """One line for each cell or mean below its bar, and the number of comparisons. Peers that did not run have none."""
    lines, compared = [], 0
    for bar in bars:
        for what, value in _ratios(rows, bar) if bar.device == device else ():
            compared += 1
            if value < bar.ratio:
                lines.append(f"{what}: {value:.2f}x {bar.peer}, the bar is {bar.ratio}x")
    return lines, compared


def _ratios(rows: list[dict[str, Any]], bar: Bar) -> list[tuple[str, float]]:
    """The cells of a bar, or their mean, each with the speedup over the peer."""
    cells = [
        row
        for row in rows
        if row["K"] >= MIN_K
        and row["cached"] == (bar.device == "cpu")
        and bar.min_m <= row["M"] <= bar.max_m
        and (not bar.layers or row["layer"] in bar.layers)
    ]
    if bar.mean:
        tokens = sorted({row["M"] for row in cells})
        mean = mean_ratio(cells, bar.peer)
        return [] if mean is None else [(f"mean of M={tokens[0]}..{tokens[-1]}", mean)]
    return [(f"{row['layer']} M={row['M']}", value) for row in cells if (value := ratio(row, bar.peer)) is not None]


def quantize_misses(rows: list[dict[str, Any]]) -> tuple[list[str], int]:
    """``misses`` for the results of bench/quantize.py."""
    large = [row for row in rows if row["M"] * row["K"] >= _QUANTIZE_VALUES and row["passes"] == 1]
    shares = [(row["op"], row["copy_us"] / row["us"]) for row in large]
    lines = [
        f"{op}: {share:.0%} of a copy, the bar is {_QUANTIZE_OF_COPY:.0%}"
        for op, share in shares
        if share < _QUANTIZE_OF_COPY
    ]
    return lines, len(large)


class DecoderBar(NamedTuple):
    """Minimum tokens per second relative to bfloat16, each in its faster block arrangement."""

    model: str
    phase: str
    batch: int
    way: str  # "eager" or "compiled"
    schemes: tuple[str, ...]
    ratio: float


_EIGHT_BITS = ("int8_int8", "fp8_fp8")
_BATCHES = (1, 8, 32)
DECODER_BARS = (
    DecoderBar("llama-3.1-8b", "decode", 1, "compiled", ("int4",), 2.3),
    *(DecoderBar("llama-3.1-8b", "decode", batch, "eager", ("int4",), 1.0) for batch in _BATCHES),
    DecoderBar("llama-3.1-8b", "decode", 32, "compiled", (*_EIGHT_BITS, "int8", "fp8"), 1.5),
    DecoderBar("llama-3.1-8b", "prefill", 1, "compiled", _EIGHT_BITS, 1.45),
    *(
        DecoderBar("qwen2.5-0.5b", "decode", batch, way, ("int4",), 1.0)
        for batch in _BATCHES
        for way in ("eager", "compiled")
    ),
)


def decoder_misses(rows: list[dict[str, Any]]) -> tuple[list[str], int]:
    """``misses`` for the results of bench/llama.py on a GPU."""
    best: dict[tuple[Any, ...], float] = {}
    for row in rows:
        for way in ("eager", "compiled"):
            cell = row["model"], row["phase"], row["batch"], way, row["scheme"]
            best[cell] = max(best.get(cell, 0.0), row[f"{way}_tokens_s"])
    lines, compared = [], 0
    for bar in DECODER_BARS:
        for scheme in bar.schemes:
            ours, bf16 = (best.get((*bar[:4], name)) for name in (scheme, "bf16"))
            if ours is None or bf16 is None:
                continue
            compared += 1
            if ours / bf16 < bar.ratio:
                case = f"{bar.model}, {bar.phase} {bar.batch}, {bar.way}, {scheme}"
                lines.append(f"{case}: {ours / bf16:.2f}x bf16, the bar is {bar.ratio}x")
    return lines, compared

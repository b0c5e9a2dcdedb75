"""What the project promises: how many times faster than a peer, by scheme, device and M."""

from __future__ import annotations

from typing import Any, NamedTuple


class Bar(NamedTuple):
    device: str
    min_m: int
    max_m: int
    peer: str  # a peer's name, or "bf16"
    ratio: float  # peer's time / ours, at least
    layers: tuple[str, ...] = ()  # only these; none: every layer of at least _MIN_K


_ANY = 1 << 30
_MIN_K = 4096  # smaller layers are measured, nothing is promised for them
# A CPU's bars are for one copy of the weight: what a kernel makes of the caches. Copies in turns are measured as well,
# but there the memory of the machine decides at small M.

_LARGE = ("gate_up", "o70")
_MM8_CUDA = (Bar("cuda", 1, 16, "bf16", 1.3, _LARGE), Bar("cuda", 4096, 4096, "bf16", 0.6, _LARGE))
_MM8 = (Bar("cpu", 1, _ANY, "bf16", 1.0), *_MM8_CUDA)


def _faster_than_torch_int8(peer: str) -> tuple[Bar, ...]:
    at = {(1, 1): 1.5, (4, 16): 1.3, (128, 512): 1.2}
    return tuple(Bar("cpu", *tokens, peer, ratio) for tokens, ratio in at.items())


BARS: dict[str, tuple[Bar, ...]] = {
    "int4": (
        Bar("cpu", 1, 4, "torch_int4", 2.0),
        Bar("cpu", 16, 16, "bf16", 2.5),
        Bar("cpu", 128, 128, "bf16", 1.4),
        Bar("cpu", 512, 512, "bf16", 1.25),
        Bar("cpu", 2048, 2048, "bf16", 1.05),
        Bar("cuda", 1, 4, "tinygemm", 1.0),
        Bar("cuda", 16, _ANY, "tinygemm", 3.0),
        Bar("cuda", 1, _ANY, "bf16", 0.5),
    ),
    "int8": _MM8,
    "fp8": (Bar("cpu", 1, 16, "bf16", 1.0), *_MM8_CUDA),
    "int8_int8": (*_MM8, *_faster_than_torch_int8("int_mm"), *_faster_than_torch_int8("qlinear")),
    "int8_int4": (*_MM8, Bar("cpu", 1, 1, "qao_int4", 1.0), Bar("cpu", 16, _ANY, "qao_int8_int8", 0.9)),
    "fp8_fp8": _MM8,
    "fp8_int4": _MM8,
}


# Quantising at least 4096 x 8192 values per row on a GPU, in one pass: share of the bandwidth of a copy.
_QUANTIZE_VALUES = 4096 * 8192
_QUANTIZE_OF_COPY = 0.8


def misses(rows: list[dict[str, Any]], device: str, bars: tuple[Bar, ...]) -> tuple[list[str], int]:
    """One line for each cell below its bar, and the number of cells compared. A peer that did not run has no bar."""
    lines, compared = [], 0
    for row in rows:
        if row["K"] < _MIN_K or row["cached"] != (device == "cpu"):
            continue
        times = {"bf16": row["bf16_us"], **row["peers"]}
        for bar in bars:
            if bar.device != device or not bar.min_m <= row["M"] <= bar.max_m or bar.peer not in times:
                continue
            if bar.layers and row["layer"] not in bar.layers:
                continue
            compared += 1
            ratio = times[bar.peer] / row["us"]
            if ratio < bar.ratio:
                lines.append(f"{row['layer']} M={row['M']}: {ratio:.2f}x {bar.peer}, the bar is {bar.ratio}x")
    return lines, compared


def quantize_misses(rows: list[dict[str, Any]]) -> tuple[list[str], int]:
    """The same for the results of bench/quantize.py."""
    large = [row for row in rows if row["M"] * row["K"] >= _QUANTIZE_VALUES and row["passes"] == 1]
    shares = {row["op"]: row["copy_us"] / row["us"] for row in large}
    lines = [
        f"{op}: {share:.0%} of a copy, the bar is {_QUANTIZE_OF_COPY:.0%}"
        for op, share in shares.items()
        if share < _QUANTIZE_OF_COPY
    ]
    return lines, len(shares)

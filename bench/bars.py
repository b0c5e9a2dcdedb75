"""What the project promises: how many times faster than a peer, by device and M."""

from __future__ import annotations

from typing import Any, NamedTuple


class Bar(NamedTuple):
    device: str
    min_m: int
    max_m: int
    peer: str  # a peer's name, or "bf16"
    ratio: float  # peer's time / ours, at least


_ANY = 1 << 30
_MIN_K = 4096  # smaller layers are measured, nothing is promised for them
# A CPU's bars are for one copy of the weight: what a kernel makes of the caches. Copies in turns are measured as well,
# but there the memory of the machine decides at small M.

INT4 = (
    Bar("cpu", 1, 4, "torch_int4", 2.0),
    Bar("cpu", 16, 16, "bf16", 2.5),
    Bar("cpu", 128, 128, "bf16", 1.4),
    Bar("cpu", 512, 512, "bf16", 1.25),
    Bar("cpu", 2048, 2048, "bf16", 1.05),
    Bar("cuda", 1, 4, "tinygemm", 1.0),
    Bar("cuda", 16, _ANY, "tinygemm", 3.0),
    Bar("cuda", 1, _ANY, "bf16", 0.5),
)


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
            compared += 1
            ratio = times[bar.peer] / row["us"]
            if ratio < bar.ratio:
                lines.append(f"{row['layer']} M={row['M']}: {ratio:.2f}x {bar.peer}, the bar is {bar.ratio}x")
    return lines, compared

"""Speedups over bf16, over a named peer, or over the best peer of every cell."""

from __future__ import annotations

from statistics import geometric_mean
from typing import Any

BF16 = "bf16"
BEST_PEER = "best peer"

_TIMES = {
    BF16: lambda row: row["bf16_us"],
    BEST_PEER: lambda row: min(row["peers"].values(), default=None),
}


def ratio(row: dict[str, Any], against: str) -> float | None:
    """The peer's time divided by ours in one cell; None: it did not run there."""
    us = _TIMES[against](row) if against in _TIMES else row["peers"].get(against)
    return None if us is None else us / row["us"]


def means(rows: list[dict[str, Any]]) -> str:
    """Geometric means as text: speedup over bfloat16, share of the roofline."""
    if not rows:
        return "–"
    return f"{mean_ratio(rows, BF16):.2f}, {geometric_mean(row['floor_us'] / row['us'] for row in rows):.0%}"


def mean_ratio(rows: list[dict[str, Any]], against: str) -> float | None:
    """The geometric mean over the cells in which the peer ran; None: there are no such cells."""
    known = [value for row in rows if (value := ratio(row, against)) is not None]
    return geometric_mean(known) if known else None

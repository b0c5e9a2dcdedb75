"""Thread scaling on a CPU: a layer under every scheme and in bfloat16, also next to a busy process.

Contenders alternate in one process. The cores are those that the process may use (``taskset -c 0-15`` for 16).
"""

from __future__ import annotations

import os
from collections.abc import Callable, Iterator, Sequence
from functools import partial
from pathlib import Path
from typing import Any

import torch

from .busy import busy_process
from .markdown import caption, table
from .meta import describe, warn_if_busy
from .peers import Bf16, Peer
from .result_files import write
from .schemes import SCHEMES
from .timing import interleaved

LAYER = (14336, 4096)  # N, K
TOKENS = (64, 256, 1024)
BUSY_TOKENS = 256
BAR = 0.8  # minimum efficiency
BUSY_BAR = 2.0  # maximum slowdown by a busy process relative to bfloat16's

Calls = dict[str, Callable[[], object]]


def add_arguments(command: Any) -> None:
    command.add_argument("--seconds", type=float, default=0.3, help="for each contender in each cell")
    command.add_argument("--m", nargs="+", type=int, default=TOKENS, metavar="M", help="tokens")
    command.add_argument("--threads", nargs="+", type=int, metavar="N", help="instead of 1, 2, 4, ... to all cores")


@torch.inference_mode()
def run(seconds: float, tokens: Sequence[int], counts: Sequence[int] | None, path: Path) -> list[dict[str, Any]]:
    """Measure, print one line per cell and write the results after each."""
    cores = len(os.sched_getaffinity(0))
    counts = counts or [1 << i for i in range(cores.bit_length())]
    before = torch.get_num_threads()
    meta = describe("cpu") | {"threads": max(counts), "cores": cores, "layer": LAYER}
    warn_if_busy(meta)
    peers = dict(_peers())
    rows: list[dict[str, Any]] = []
    try:
        for m in tokens:
            calls = _calls(peers, m)
            alone: dict[str, float] = {}
            for count in counts:
                times = _times(calls, count, seconds)
                alone = alone or {name: us * count for name, us in times.items()}
                rows += [
                    {"scheme": name, "M": m, "threads": count, "busy": False, "us": us}
                    | {"efficiency": alone[name] / (us * count)}
                    for name, us in times.items()
                ]
                _print(rows[-len(times) :], f"M={m} {count} threads, efficiency", "efficiency")
                write({"meta": meta, "rows": rows}, path)
        calls = _calls(peers, BUSY_TOKENS)
        times = _times(calls, max(counts), seconds)
        with busy_process():
            busy = _times(calls, max(counts), seconds)
        rows += [
            {"scheme": name, "M": BUSY_TOKENS, "threads": max(counts), "busy": True, "us": us}
            | {"slowdown": us / times[name]}
            for name, us in busy.items()
        ]
        _print(
            rows[-len(times) :], f"M={BUSY_TOKENS} {max(counts)} threads next to a busy process, slowdown", "slowdown"
        )
        write({"meta": meta, "rows": rows}, path)
    finally:
        torch.set_num_threads(before)
    return rows


def misses(rows: list[dict[str, Any]]) -> tuple[list[str], int]:
    """As bars.misses."""
    bf16 = next((row["slowdown"] for row in rows if row["busy"] and row["scheme"] == Bf16.name), 1.0)
    ours = [row for row in rows if row["scheme"] != Bf16.name]
    lines = [
        f"{row['scheme']}, M = {row['M']}, {row['threads']} threads: efficiency {row['efficiency']:.2f}"
        for row in ours
        if not row["busy"] and row["efficiency"] < BAR
    ]
    lines += [
        f"{row['scheme']} next to a busy process: {row['slowdown']:.2f} times slower, bfloat16 {bf16:.2f}"
        for row in ours
        if row["busy"] and row["slowdown"] > BUSY_BAR * bf16
    ]
    return lines, len(ours)


def render(results: dict[str, Any]) -> str:
    """Markdown of one results file: one line per scheme and M."""
    rows, meta = results["rows"], results["meta"]
    counts = sorted({row["threads"] for row in rows if not row["busy"]})
    lines = []
    for m in dict.fromkeys(row["M"] for row in rows):
        for word in dict.fromkeys(row["scheme"] for row in rows):
            here = [row for row in rows if row["M"] == m and row["scheme"] == word]
            cells = {row["threads"]: f"{row['efficiency']:.2f}" for row in here if not row["busy"]}
            busy = [f"{row['slowdown']:.2f}" for row in here if row["busy"]]
            first = next(row["us"] for row in here)
            name = word if word == Bf16.name else f"`{word}`"
            lines.append([name, str(m), f"{first:.0f}", *(cells.get(n, "–") for n in counts[1:]), *(busy or ["–"])])
    header = ["scheme", "M", f"µs, {counts[0]} thread", *(f"{count} threads" for count in counts[1:]), "busy"]
    layer = " × ".join(map(str, meta["layer"]))
    note = (
        f"{caption(meta)}; {meta['cores']} cores, {layer}, bfloat16 activations. Time of one thread over the time of "
        f"n, divided by n; busy: times slower with {max(counts)} threads next to a process that keeps a core busy."
    )
    return f"{note}\n\n{table(header, lines)}"


def _peers() -> Iterator[tuple[str, Peer]]:
    n, k = LAYER
    for word, scheme in SCHEMES.items():
        weight = scheme.random_weight(n, k, *((128, False) if scheme.grouped else ()), "cpu")
        if word == "int4":
            yield Bf16.name, Bf16(weight)
        yield word, scheme.ours(weight)


def _calls(peers: dict[str, Peer], m: int) -> Calls:
    """One copy of each weight: with so many tokens, GEMMs reuse W."""
    x = torch.randn(m, LAYER[1]).bfloat16()
    return {name: partial(peer.run, x, *peer.tensors) for name, peer in peers.items()}


def _times(calls: Calls, threads: int, seconds: float) -> dict[str, float]:
    """Microseconds of each call."""
    torch.set_num_threads(threads)
    times = interleaved(list(calls.values()), seconds, min_rounds=3)
    return {name: time * 1e6 for name, time in zip(calls, times, strict=True)}


def _print(rows: list[dict[str, Any]], what: str, key: str) -> None:
    print(f"{what}: " + " ".join(f"{row['scheme']} {row[key]:.2f}" for row in rows), flush=True)

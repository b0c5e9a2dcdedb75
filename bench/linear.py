"""Every scheme against ``F.linear`` in the dtype of x, on CPU layers of many shapes, interleaved.

With ``QAO_CPU_ISA`` kernels are limited to an instruction set, and results go to a separate folder. They record the
limits of torch (``ONEDNN_MAX_CPU_ISA``, ``MKL_ENABLE_INSTRUCTIONS``).
"""

from __future__ import annotations

import argparse
from collections.abc import Callable, Iterator
from functools import partial
from pathlib import Path
from typing import Any

import torch
import torch.nn.functional as F
from torch import Tensor

from .markdown import caption, table
from .meta import describe, source_hash, warn_if_busy
from .result_files import read, write
from .schemes import SCHEMES
from .timing import copies_of, interleaved, rotation

LAYERS = ("4096x4096", "14336x4096", "4096x14336", "1536x384", "384x1536", "896x4864", "576x1536")  # N x K
TOKENS = (1, 4, 16, 64, 256, 1024, 2048)
DTYPES = {"bfloat16": torch.bfloat16, "float32": torch.float32}
# Minimum of F.linear's time over ours: by dtype, then for each scheme, from a number of tokens on.
_ANY = dict.fromkeys(SCHEMES, ((1, 1.0),))
BARS: dict[str, dict[str, tuple[tuple[int, float], ...]]] = {
    "bfloat16": {
        **{word: ((1, 1.0), (64, 1.05)) for word in SCHEMES},
        **dict.fromkeys(("fp8_fp8", "fp8_int4"), ((1, 1.0),)),
        **dict.fromkeys(("int8_int8", "int8_int4"), ((1, 1.0), (64, 1.6))),
    },
    "float32": _ANY | dict.fromkeys(("int8_int8", "int8_int4"), ((1, 1.0), (16, 1.5))),
}


def add_arguments(command: argparse.ArgumentParser) -> None:
    command.add_argument("--layers", nargs="+", default=LAYERS, metavar="NxK", help="such as 4096x14336")
    command.add_argument("--m", nargs="+", type=int, default=TOKENS, metavar="M", help="tokens")
    command.add_argument("--dtype", choices=DTYPES, default="bfloat16", help="of x and of F.linear's weight")
    command.add_argument("--seconds", type=float, default=0.2, help="for each contender in each cell")
    command.add_argument("--add", action="store_true", help="keep the other cells of the file, if of the same sources")


@torch.inference_mode()
def run(arguments: argparse.Namespace, path: Path) -> list[dict[str, Any]]:
    """Measure, print one line per cell and write the results after each."""
    meta = describe("cpu")
    warn_if_busy(meta)
    rows: list[dict[str, Any]] = []
    if arguments.add and path.exists():
        before = read(path)
        if before["meta"]["source_hash"] == source_hash():
            rows = before["rows"]
    for layer in arguments.layers:
        n, k = map(int, layer.split("x"))
        contenders = dict(_contenders(n, k, DTYPES[arguments.dtype]))
        for m in arguments.m:
            x = torch.randn(m, k).to(DTYPES[arguments.dtype])
            calls = [partial(call, x) for call in contenders.values()]
            times = interleaved(calls, arguments.seconds)
            us = {name: seconds * 1e6 for name, seconds in zip(contenders, times, strict=True)}
            linear = us.pop("linear")
            cell = {"layer": layer, "M": m, "dtype": arguments.dtype}
            rows = [row for row in rows if any(row[key] != value for key, value in cell.items())]
            rows += [
                {**cell, "scheme": word, "us": t, "linear_us": linear, "ratio": linear / t} for word, t in us.items()
            ]
            print(
                f"{layer} M={m} F.linear {linear:.0f} us", *(f"{w} {linear / t:.2f}" for w, t in us.items()), flush=True
            )
            write({"meta": meta, "rows": rows}, path)
    return rows


def misses(rows: list[dict[str, Any]]) -> tuple[list[str], int]:
    """As bars.misses."""
    lines = [
        f"{row['scheme']}, {row['layer']}, M = {row['M']}: {row['ratio']:.2f}, the bar is {_bar(row)}"
        for row in rows
        if row["ratio"] < _bar(row)
    ]
    return lines, len(rows)


def render(results: dict[str, Any]) -> str:
    """Markdown of one results file: one line per layer and M, cells below their bar in brackets."""
    rows = results["rows"]
    words = list(dict.fromkeys(row["scheme"] for row in rows))
    cells = list(dict.fromkeys((row["layer"], row["M"], row["dtype"]) for row in rows))
    cells.sort(key=lambda cell: (LAYERS.index(cell[0]), cell[1]))
    lines = []
    for layer, m, dtype in cells:
        here = {row["scheme"]: row for row in rows if (row["layer"], row["M"], row["dtype"]) == (layer, m, dtype)}
        linear = next(iter(here.values()))["linear_us"]
        lines.append([layer.replace("x", " × "), str(m), f"{linear:.0f}", *(_cell(here.get(word)) for word in words)])
    dtypes = " and ".join(dict.fromkeys(row["dtype"] for row in rows))
    note = (
        f"{caption(results['meta'])}; {dtypes} x, groups of 128 with zero points. Time of `F.linear` in that "
        "dtype over ours, quantization of x included; in brackets: below the bar."
    )
    return f"{note}\n\n{table(['N × K', 'M', '`F.linear`, µs', *(f'`{word}`' for word in words)], lines)}"


def _cell(row: dict[str, Any] | None) -> str:
    if row is None:
        return "–"
    return f"{row['ratio']:.2f}" if row["ratio"] >= _bar(row) else f"({row['ratio']:.2f})"


def _bar(row: dict[str, Any]) -> float:
    return next(bar for least, bar in reversed(BARS[row["dtype"]][row["scheme"]]) if row["M"] >= least)


def _contenders(n: int, k: int, dtype: torch.dtype) -> Iterator[tuple[str, Callable[[Tensor], Tensor]]]:
    """Contenders that rotate over copies of their weights."""
    linear = (torch.randn(n, k).to(dtype),)
    copies = copies_of(linear[0].nbytes, "cpu")
    yield "linear", partial(_call, F.linear, rotation(linear, copies))
    for word, scheme in SCHEMES.items():
        peer = scheme.ours(scheme.random_weight(n, k, *((128, False) if scheme.grouped else ()), "cpu"))
        yield word, partial(_call, peer.run, rotation(peer.tensors, copies))


def _call(run: Callable[..., Tensor], weights: Iterator[tuple[Tensor, ...]], x: Tensor) -> Tensor:
    return run(x, *next(weights))

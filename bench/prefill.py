"""Prefill on a GPU: every scheme against bfloat16 and serving engines' kernels, interleaved.

Layers of well-known models, and as many random ones that nothing was tuned on. Contenders alternate within four
families, so that clocks and temperature affect all of a family alike. Times include quantization of x.
"""

from __future__ import annotations

import argparse
from collections.abc import Callable, Iterator
from functools import partial
from pathlib import Path
from statistics import geometric_mean
from typing import Any, NamedTuple

import qao
import torch
import torch.nn.functional as F
from torch import Tensor, nn

from . import plans
from .markdown import caption, table
from .meta import describe
from .peers import engines
from .result_files import earlier, write
from .schemes import layer_in_turns, without_search
from .timing import Graph, copies_of, replayed, rotation, settle_clocks

KNOWN = (
    (4096, 4096),
    (28672, 4096),
    (4096, 14336),
    (8192, 8192),
    (6144, 4096),
    (9216, 3072),
    (5120, 2880),
    (20480, 2560),
)
MOST_WEIGHTS = 2e8  # limit for random layers
TOKENS = (256, 300, 512, 1024, 2048, 4096, 8192)  # 300 ends inside a tile, as prompts do
BF16 = "bf16"

_I8, _F8 = qao.Int8DynamicActivationInt8Weight(), qao.Float8DynamicActivationFloat8Weight()
_I84, _F84 = qao.Int8DynamicActivationInt4Weight, qao.Float8DynamicActivationInt4Weight

Schemes = dict[str, qao.Scheme]
Peers = Callable[[Tensor, frozenset[str]], Iterator[tuple[str, engines.Made]]]


class Bar(NamedTuple):
    name: str
    against: tuple[str, ...]  # compare with the fastest of these
    mean: float  # minimum ratio of its time to ours: geometric mean and least
    least: float


class Family(NamedTuple):
    ours: Schemes
    peers: Peers
    bars: tuple[Bar, ...]


def _four_bits(kind: type[Any], rows: str) -> Schemes:
    """Schemes by name: ``rows`` is the option for row scales."""
    return {
        "g128 rows": kind(128, True, **{rows: True}),
        "g64 rows": kind(64, True, **{rows: True}),
        "g32 rows": kind(32, True, **{rows: True}),
        "g128": kind(128, True),
        "g128 zeros": kind(128, False),
        "channel": kind(-1, True),
    }


def _as_fast(word: str, name: str) -> tuple[Bar, ...]:
    bars = {"g128 rows": 1.08, "g64 rows": 1.08, "g32 rows": 1.2, "g128": 1.08, "g128 zeros": 1.15, "channel": 1.08}
    return tuple(Bar(f"{word} {kind}", (name,), 1 / most, 1 / most) for kind, most in bars.items())


FAMILIES = {
    "int8": Family(
        {"int8_int8": _I8} | {f"int8_int4 {name}": s for name, s in _four_bits(_I84, "integer_scales").items()},
        engines.int8,
        (Bar("int8_int8", ("vLLM int8",), 1.05, 0.97), *_as_fast("int8_int4", "int8_int8")),
    ),
    "fp8": Family(
        {"fp8_fp8": _F8, "fp8_fp8 fast_accum": qao.Float8DynamicActivationFloat8Weight(fast_accum=True)}
        | {f"fp8_int4 {name}": s for name, s in _four_bits(_F84, "power_of_two_scales").items()}
        | {"fp8_int4 g128 rows fast_accum": _F84(128, True, power_of_two_scales=True, fast_accum=True)},
        engines.fp8,
        (
            Bar("fp8_fp8", ("vLLM fp8", "SGLang fp8"), 1.05, 0.97),
            Bar("fp8_fp8 fast_accum", ("vLLM fp8", "SGLang fp8"), 1.05, 0.97),
            *_as_fast("fp8_int4", "fp8_fp8"),
            Bar("fp8_int4 g128 rows fast_accum", ("fp8_fp8",), 1 / 1.08, 1 / 1.08),
            Bar("fp8_int4 g128 rows fast_accum", ("vLLM fp8 x int4",), 1.0, 0.97),
        ),
    ),
    "blocks": Family(
        {"fp8_fp8 block": qao.Float8DynamicActivationFloat8Weight(granularity="block")},
        engines.blocks,
        (Bar("fp8_fp8 block", ("DeepGEMM",), 1.05, 0.97),),
    ),
    "weight-only": Family(
        {
            "int4": qao.Int4WeightOnly(),
            "fp4": qao.Fp4WeightOnly(),
            "int8": qao.Int8WeightOnly(),
            "fp8": qao.Float8WeightOnly(),
        },
        engines.four_bits,
        tuple(Bar(word, (BF16,), 0.97, 0.97) for word in ("int4", "fp4", "int8", "fp8")),
    ),
}


def add_arguments(command: argparse.ArgumentParser) -> None:
    command.add_argument("--drawn", type=int, default=8, metavar="COUNT", help="layers drawn from the seed")
    command.add_argument("--known", type=int, default=len(KNOWN), metavar="COUNT", help="layers of well-known models")
    command.add_argument("--seed", type=int, default=0)
    command.add_argument("--m", nargs="+", type=int, default=TOKENS, metavar="M", help="tokens")
    command.add_argument("--families", nargs="+", choices=FAMILIES, default=list(FAMILIES))
    command.add_argument("--seconds", type=float, default=0.04, help="for each contender in each cell")
    command.add_argument(
        "--resume", action="store_true", help="go on with the results file of a run that was cut short"
    )


def drawn(seed: int, count: int) -> list[tuple[int, int]]:
    """N, K."""
    return [(n, k) for n, k in plans.layers(seed, 8 * count + 8) if n * k <= MOST_WEIGHTS][:count]


@torch.inference_mode()
def run(arguments: argparse.Namespace, path: Path) -> list[dict[str, Any]]:
    """Measure, print one line per cell and write the results after every layer."""
    meta = describe("cuda") | {"engines": sorted(engines.load()), "seed": arguments.seed}
    rows = earlier(path, meta) if arguments.resume else []
    done = {(row["n"], row["k"]) for row in rows}
    layers = [*KNOWN[: arguments.known], *drawn(arguments.seed, arguments.drawn)]
    settle_clocks()
    for n, k in layers:
        if (n, k) in done:
            continue
        weight = torch.randn(n, k, device="cuda", dtype=torch.bfloat16) * 0.02
        for name in arguments.families:
            rows += _measure(name, weight, arguments)
        write({"meta": meta, "rows": rows}, path)
    return rows


def _measure(name: str, weight: Tensor, arguments: argparse.Namespace) -> Iterator[dict[str, Any]]:
    (n, k), family = weight.shape, FAMILIES[name]
    calls = {BF16: _rotated(weight.nbytes, (weight,), F.linear)}
    for word, scheme in family.ours.items():
        calls[word] = _layer(weight, scheme)
    there = engines.load()
    for word, (tensors, mm) in family.peers(weight, there):
        calls[word] = _rotated(tensors[0].nbytes, tensors, mm)
    for m in arguments.m:
        x = torch.randn(m, k, device="cuda", dtype=torch.bfloat16)
        floor = 2 * m * n * k / 1.5e15
        graphs = [Graph(partial(call, x), copies, floor) for copies, call in calls.values()]
        us = {w: t * 1e6 for w, t in zip(calls, replayed(graphs, arguments.seconds), strict=True)}
        print(f"{n}x{k} M={m} {name}:", *(f"{word} {t:.1f}" for word, t in us.items()), flush=True)
        yield {"family": name, "n": n, "k": k, "m": m, "us": us}


def _rotated(size: int, tensors: tuple[Tensor, ...], mm: Callable[..., Tensor]) -> tuple[int, Callable[..., Tensor]]:
    copies = copies_of(size, "cuda")
    turns = rotation(tensors, copies)
    return copies, lambda x: mm(x, *next(turns))


def _layer(weight: Tensor, scheme: qao.Scheme) -> tuple[int, Callable[..., Tensor]]:
    linear = nn.Linear(*reversed(weight.shape), bias=False, device="meta")
    linear.weight = nn.Parameter(weight)
    return layer_in_turns(qao.QuantLinear.from_linear(linear, without_search(scheme)), "cuda")


def ratios(rows: list[dict[str, Any]], family: str, bar: Bar) -> list[tuple[float, dict[str, Any]]]:
    """The fastest peer's time over ours, and the row, where both ran."""
    found = []
    for row in rows:
        others = [row["us"][name] for name in bar.against if name in row["us"]]
        if row["family"] == family and others and bar.name in row["us"]:
            found.append((min(others) / row["us"][bar.name], row))
    return found


def _each_bar(rows: list[dict[str, Any]]) -> Iterator[tuple[Family, Bar, list[tuple[float, dict[str, Any]]]]]:
    """Every bar with measured contenders, and its ratios."""
    for name, family in FAMILIES.items():
        for bar in family.bars:
            if found := ratios(rows, name, bar):
                yield family, bar, found


def misses(rows: list[dict[str, Any]]) -> tuple[list[str], int]:
    """As bars.misses."""
    lines, compared = [], 0
    for _, bar, found in _each_bar(rows):
        compared += len(found)
        others = " and ".join(bar.against)
        lines += [
            f"{bar.name} against {others}, {row['n']} x {row['k']}, M = {row['m']}: {r:.2f} of {bar.least:.2f}"
            for r, row in found
            if r < bar.least
        ]
        if (mean := geometric_mean(r for r, _ in found)) < bar.mean:
            lines.append(f"{bar.name} against {others}: {mean:.2f}, the bar is {bar.mean:.2f}")
    return lines, compared


def _means(found: list[tuple[float, dict[str, Any]]], tokens: list[int]) -> list[str]:
    of_m = [[ratio for ratio, row in found if row["m"] == m] for m in tokens]
    return [f"{geometric_mean(some):.2f}" if some else "–" for some in of_m]


def render_others(results: dict[str, Any]) -> str:
    """qao against other libraries' kernels: geometric means over the layers."""
    rows = results["rows"]
    tokens = list(dict.fromkeys(row["m"] for row in rows))
    lines = [
        [f"`{bar.name}` / {' or '.join(bar.against)}", *_means(found, tokens)]
        for family, bar, found in _each_bar(rows)
        if not {*bar.against} & {BF16, *family.ours}
    ]
    count = len({(row["n"], row["k"]) for row in rows})
    note = f"{caption(results['meta'])}; {count} layers, quantization of x included, geometric means."
    return f"{note}\n\n{table(['qao / the other', *(f'M={m}' for m in tokens)], lines)}"


def render(results: dict[str, Any]) -> str:
    """Markdown of one results file: one line per bar, columns by M, means and minimum."""
    rows = results["rows"]
    tokens = list(dict.fromkeys(row["m"] for row in rows))
    lines = []
    for _, bar, found in _each_bar(rows):
        below = sum(r < bar.least for r, _ in found)
        worst, row = min(found, key=lambda pair: pair[0])
        mean = geometric_mean(r for r, _ in found)
        lines.append(
            [f"{bar.name} / {' or '.join(bar.against)}", f"{bar.mean:.2f}, {bar.least:.2f}", f"{mean:.2f}"]
            + _means(found, tokens)
            + [f"{worst:.2f} ({row['n']} × {row['k']}, M = {row['m']})", f"{below} of {len(found)}"]
        )
    layers = {(row["n"], row["k"]) for row in rows}
    count = f"{len(layers)} layers, {len(layers - {*KNOWN})} of them drawn from a seed"
    means = "The other's time over ours, geometric means; bars for the mean and for each cell"
    note = f"{caption(results['meta'])}; {count}. {means}."
    header = ["ours / the other", "bars", "all", *(f"M = {m}" for m in tokens), "least", "below"]
    return f"{note}\n\n{table(header, lines)}"

"""``python -m bench tune``: measures what plan() goes by, and writes it into the table that is compiled in.

``qao_sweep`` (bench/sweep.cpp) times every plan that could run a problem. To each row of cuda/mm8/sm90_costs.inc, which
is one kind of operands with one tile of tokens, belong the microseconds that explain its times best. Then plan()'s
choices are compared with the best of the sweep, also on layers that had no part in the fit.
"""

from __future__ import annotations

import json
import re
import subprocess
from collections.abc import Iterable, Sequence
from itertools import combinations
from pathlib import Path
from statistics import geometric_mean
from typing import NamedTuple

import torch

from .meta import ROOT
from .runner import LAYERS, TOKENS

TABLE = ROOT / "cuda" / "mm8" / "sm90_costs.inc"
OPERANDS = ("float_int4", "float_int8", "float_fp8", "int8_int8", "int8_int4", "fp8_fp8", "fp8_int4")
UNSEEN = ((5120, 5120), (13824, 5120), (2560, 9728), (3584, 18944))  # N, K of layers that no cost is fitted to
UNSEEN_TOKENS = (2, 12, 24, 48, 100, 200, 700, 3000)
NEAR = 1.1  # times the best plan's time, at most, on unseen layers

_ROW = re.compile(r"^QAO_COST\((\w+), (\d+), (.*)\)$")

Row = tuple[str, int]  # kind of operands, tokens of a tile
Costs = dict[Row, tuple[float, ...]]


class Timing(NamedTuple):
    """One candidate plan of one problem."""

    problem: tuple[int, int, int]  # M, N, K
    row: Row | None  # of the table; None: no cost decides on it
    counts: tuple[float, ...]
    us: float
    chosen: bool  # by the plan() that the sweep was built with


def parse(lines: Iterable[str]) -> list[Timing]:
    """What qao_sweep prints."""
    found = []
    for entry in map(json.loads, lines):
        row = (entry["operands"], entry["tile_m"]) if entry["operands"] else None
        problem = (entry["m"], entry["n"], entry["k"])
        found.append(Timing(problem, row, tuple(entry["counts"]), entry["us"], entry["chosen"]))
    return found


def fit(timings: Sequence[Timing]) -> Costs:
    """Costs of each row, none negative, of least squared relative error. Plans far from the best of their problem weigh
    less: nothing depends on them."""
    best = _best(timings)
    rows = {timing.row for timing in timings if timing.row is not None}
    costs = {}
    for row in sorted(rows):
        mine = [timing for timing in timings if timing.row == row]
        weights = torch.tensor([best[t.problem] / t.us for t in mine], dtype=torch.float64)
        counts = torch.tensor([t.counts for t in mine], dtype=torch.float64)
        relative = counts / torch.tensor([t.us for t in mine], dtype=torch.float64)[:, None]
        costs[row] = _non_negative(relative * weights[:, None], weights)
    return costs


def _non_negative(a: torch.Tensor, b: torch.Tensor) -> tuple[float, ...]:
    """x >= 0 of least ‖a x - b‖: the best of the solutions with some of x fixed at zero. a: [plans, terms]."""
    terms = a.shape[1]
    least, answer = float(b.norm()), torch.zeros(terms, dtype=a.dtype)
    for size in range(1, terms + 1):
        for free in map(list, combinations(range(terms), size)):
            x = torch.zeros_like(answer)
            x[free] = torch.linalg.lstsq(a[:, free], b[:, None], driver="gelsd").solution[:, 0]
            error = float((a @ x - b).norm())
            if error < least and bool((x >= 0).all()):
                least, answer = error, x
    return tuple(round(value, 4) for value in answer.tolist())


def losses(timings: Sequence[Timing], costs: Costs) -> dict[tuple[int, int, int], float]:
    """By problem: time of the plan of least cost divided by that of the best one in the table's reach."""
    priced = [timing for timing in timings if timing.row in costs]
    best = _best(priced)
    cheapest: dict[tuple[int, int, int], tuple[float, float]] = {}
    for timing in priced:
        cost = sum(n * c for n, c in zip(timing.counts, costs[timing.row], strict=True))
        cheapest[timing.problem] = min(cheapest.get(timing.problem, (cost, timing.us)), (cost, timing.us))
    return {problem: us / best[problem] for problem, (_, us) in cheapest.items()}


def chosen_losses(timings: Sequence[Timing]) -> dict[tuple[int, int, int], float]:
    """The same for the plan() that the sweep was built with, against every plan of the sweep."""
    best = _best(timings)
    return {timing.problem: timing.us / best[timing.problem] for timing in timings if timing.chosen}


def read_table(path: Path = TABLE) -> Costs:
    matches = filter(None, map(_ROW.match, path.read_text().splitlines()))
    return {(m[1], int(m[2])): tuple(map(float, m[3].split(", "))) for m in matches}


def write_table(costs: Costs, gpu: str, path: Path = TABLE) -> None:
    """Rows that were not measured stay as they are, and so does the order."""
    lines = []
    for line in path.read_text().splitlines():
        match = _ROW.match(line)
        row = (match[1], int(match[2])) if match else None
        if row in costs:
            line = f"QAO_COST({row[0]}, {row[1]}, {', '.join(f'{value:g}' for value in costs[row])})"
        lines.append(re.sub(r"^(// Written by `python -m bench tune`).*", rf"\1 on an {gpu}.", line))
    path.write_text("\n".join(lines) + "\n")


def build() -> Path:
    """qao_sweep, by the build that made python/qao/_C.so."""
    caches = sorted(ROOT.glob("build/cmake-*/CMakeCache.txt"), key=lambda cache: cache.stat().st_mtime)
    if not caches:
        raise SystemExit("build qao with its CUDA kernels first: QAO_CUDA=ON python setup.py build_ext --inplace")
    subprocess.run(["cmake", "--build", caches[-1].parent, "--target", "qao_sweep"], check=True)
    return caches[-1].parent / "qao_sweep"


def sweep(program: Path, operands: str, shapes: Iterable[tuple[int, int]], tokens: Sequence[int]) -> list[Timing]:
    problems = "".join(f"{m} {n} {k}\n" for n, k in shapes for m in tokens)
    done = subprocess.run([program, operands], input=problems, stdout=subprocess.PIPE, text=True, check=True)
    return parse(done.stdout.splitlines())


def run(operands: Sequence[str], program: Path | None, gpu: str, table: Path = TABLE) -> bool:
    """Sweeps, fits, writes the table, reports. Whether every unseen problem comes near its best."""
    program = program or build()
    seen = [(layer.n, layer.k) for layer in LAYERS["cuda"]]
    near = True
    for kind in operands:
        known, unseen = sweep(program, kind, seen, TOKENS["cuda"]), sweep(program, kind, UNSEEN, UNSEEN_TOKENS)
        costs = fit(known)
        print(f"\n{kind}: {len(known) + len(unseen)} plans timed")
        _report("plan() as built, every plan", chosen_losses(known + unseen))
        _report("the new table, tuned layers", losses(known, costs))
        worst = _report("the new table, unseen layers", losses(unseen, costs))
        near = near and worst <= NEAR
        write_table(costs, gpu, table)
    print(f"\nwrote {table}: build again")
    return near


def _report(title: str, found: dict[tuple[int, int, int], float]) -> float:
    """Prints how far from the best; returns the worst."""
    if not found:
        return 1.0
    worst = sorted(found, key=lambda problem: -found[problem])[:3]
    text = ", ".join(f"M={m} N={n} K={k} {found[m, n, k]:.2f}" for m, n, k in worst)
    print(f"  {title}: {geometric_mean(found.values()):.3f} times the best on average; most at {text}")
    return max(found.values())


def _best(timings: Iterable[Timing]) -> dict[tuple[int, int, int], float]:
    best: dict[tuple[int, int, int], float] = {}
    for timing in timings:
        best[timing.problem] = min(best.get(timing.problem, timing.us), timing.us)
    return best

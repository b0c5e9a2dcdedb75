"""``python -m bench tune``: fits the cost model of plan() and writes the compiled-in table.

``qao_sweep`` (bench/sweep.cpp) times every valid plan of a problem. Each row of cuda/gemm/sm90_ws/cost_model.inc
stands for one kind of operands with one token tile. It gets the microseconds that best explain its times in the model
of qao/cost.h, adjusted so that plan() chooses faster plans (tune_choices.py). Then plan()'s choices are compared with
the best plans of the sweep, also on layers excluded from the fit.
"""

from __future__ import annotations

import json
import math
import re
import subprocess
from collections.abc import Iterable, Sequence
from itertools import combinations, product
from pathlib import Path
from statistics import geometric_mean
from typing import NamedTuple

import torch

from .meta import ROOT
from .runner import LAYERS, TOKENS
from .tune_choices import refine

TABLE = ROOT / "cuda" / "gemm" / "sm90_ws" / "cost_model.inc"
OPERANDS = (
    *("float_int4", "float_int8", "float_fp8"),
    *("int8_int8", "int8_int4", "int8_int4_symmetric", "int8_int4_rows"),
    *("fp8_fp8", "fp8_fp8_fast", "fp8_fp8_blocks", "fp8_int4", "fp8_int4_rows", "fp8_int4_rows_fast"),
)
SHARING = (("float_int8", "float_fp8"), ("fp8_fp8", "fp8_fp8_fast"))  # rows of the table
UNSEEN = ((5120, 5120), (13824, 5120), (2560, 9728), (3584, 18944))  # N, K of layers excluded from the fit
UNSEEN_TOKENS = (2, 12, 24, 48, 100, 200, 700, 3000)
BETWEEN = (192, 300, 777)  # tokens that end inside a tile, as prompts do
NEAR = 1.1  # maximum ratio to the best plan's time, on unseen layers

_ROW = re.compile(r"^QAO_COST\((\w+), (\d+), (.*)\)$")
_MEMORY = re.compile(r"^QAO_MEMORY\((.*)\)$")
_READ_SHARES = (0.75, 0.8, 0.85, 0.9, 0.95, 1.0)  # candidate shares of the read bandwidth that a GEMM may reach
_ROUNDS = 20
_OVERLAPS = (0.0, 0.1, 0.17, 0.25, 0.35)

Row = tuple[str, int]  # kind of operands, tokens per tile
Costs = dict[Row, tuple[float, ...]]
Problem = tuple[int, int, int]  # M, N, K


class Memory(NamedTuple):
    bytes_per_us: float
    overlap: float


class Timing(NamedTuple):
    """One candidate plan of one problem."""

    problem: Problem
    row: Row | None  # of the table; None: no cost decides on it
    counts: tuple[float, ...]
    bytes: float  # bytes of W
    us: float
    chosen: bool  # by the plan() compiled into the sweep
    final: bool = False  # timed again, interleaved with the other fastest plans
    plan: str = ""
    before: float = 0.0  # part of `us` spent on quantizing x


def expected(timing: Timing, costs: Costs, memory: Memory) -> float:
    """Microseconds predicted by the cost model of plan()."""
    assert timing.row is not None
    work = sum(count * cost for count, cost in zip(timing.counts, costs[timing.row], strict=True))
    reading = timing.bytes / memory.bytes_per_us
    return max(work, reading) + memory.overlap * min(work, reading) + timing.before


def parse(lines: Iterable[str]) -> list[Timing]:
    """Parse the output of qao_sweep."""
    found = []
    for entry in map(json.loads, lines):
        row = (entry["operands"], entry["tile_m"]) if entry["operands"] else None
        problem = (entry["m"], entry["n"], entry["k"])
        numbers = tuple(entry["counts"]), entry["bytes"], entry["us"]
        before = entry.get("before_us", 0.0)
        found.append(Timing(problem, row, *numbers, entry["chosen"], entry["final"], entry["plan"], before))
    return found


def fit(timings: Sequence[Timing], memory: Memory) -> Costs:
    """Nonnegative costs of each row with the least squared relative error.

    Plans far from the best of their problem weigh less, since nothing depends on them.
    """
    best = _best(timings)
    costs = {}
    for row in sorted({timing.row for timing in timings if timing.row is not None}):
        mine = [timing for timing in timings if timing.row == row]
        us, reading, weights = (
            torch.tensor(values, dtype=torch.float64)
            for values in zip(
                *((t.us - t.before, t.bytes / memory.bytes_per_us, best[t.problem] / t.us) for t in mine), strict=True
            )
        )
        counts = torch.tensor([t.counts for t in mine], dtype=torch.float64)
        hidden = torch.zeros_like(us, dtype=torch.bool)  # compute hidden behind reads in the last iteration
        for _ in range(_ROUNDS):
            slope = torch.where(hidden, memory.overlap, 1.0)
            rest = torch.where(hidden, reading, memory.overlap * reading)
            scale = weights / us
            found = _non_negative(counts * (slope * scale)[:, None], (us - rest) * scale)
            before, hidden = hidden, counts @ found < reading
            if torch.equal(before, hidden):
                break
        costs[row] = tuple(round(value, 4) for value in found.tolist())
    return costs


def fit_memory(timings: Sequence[Timing], bytes_per_us: float) -> Memory:
    """Read bandwidth and overlap that explain the timings best. ``bytes_per_us``: rate of a plain read."""

    def error(memory: Memory) -> float:
        costs, best = fit(timings, memory), _best(timings)
        ratios = ((t, expected(t, costs, memory) / t.us - 1) for t in timings if t.row is not None)
        return sum((best[t.problem] / t.us * ratio) ** 2 for t, ratio in ratios)

    return min(
        (Memory(bytes_per_us * share, overlap) for share, overlap in product(_READ_SHARES, _OVERLAPS)), key=error
    )


def _non_negative(a: torch.Tensor, b: torch.Tensor) -> torch.Tensor:
    """x >= 0 minimizing ‖a x - b‖, found over all subsets of x fixed at zero. a: [plans, terms]."""
    terms = a.shape[1]
    least, answer = float(b.norm()), torch.zeros(terms, dtype=a.dtype)
    for size in range(1, terms + 1):
        for free in map(list, combinations(range(terms), size)):
            x = torch.zeros_like(answer)
            x[free] = torch.linalg.lstsq(a[:, free], b[:, None], driver="gelsd").solution[:, 0]
            error = float((a @ x - b).norm())
            if error < least and bool((x >= 0).all()):
                least, answer = error, x
    return answer


def losses(timings: Sequence[Timing], costs: Costs, memory: Memory) -> dict[Problem, float]:
    """By problem: time of the plan with the least predicted time over that of the best plan the table covers."""
    priced = [timing for timing in timings if timing.row in costs]
    best = _best(priced)
    cheapest: dict[Problem, tuple[float, float]] = {}
    for timing in priced:
        entry = (expected(timing, costs, memory), timing.us)
        cheapest[timing.problem] = min(cheapest.get(timing.problem, entry), entry)
    return {problem: us / best[problem] for problem, (_, us) in cheapest.items()}


def chosen_losses(timings: Sequence[Timing]) -> dict[Problem, float]:
    """``losses`` of the plan() compiled into the sweep, against every plan of the sweep."""
    best = _best(timings)
    return {timing.problem: timing.us / best[timing.problem] for timing in timings if timing.chosen}


def read_table(path: Path = TABLE) -> tuple[Costs, Memory]:
    costs, memory = {}, Memory(math.inf, 0)
    for line in path.read_text().splitlines():
        if match := _ROW.match(line):
            costs[match[1], int(match[2])] = tuple(map(float, match[3].split(", ")))
        elif match := _MEMORY.match(line):
            memory = Memory(*map(float, match[1].split(", ")))
    return costs, memory


def write_table(costs: Costs, memory: Memory, gpu: str, path: Path = TABLE) -> None:
    """Write the table. Unmeasured rows and the order stay unchanged."""
    lines = []
    for line in path.read_text().splitlines():
        match = _ROW.match(line)
        row = (match[1], int(match[2])) if match else None
        if row in costs:
            line = f"QAO_COST({row[0]}, {row[1]}, {', '.join(f'{value:g}' for value in costs[row])})"
        elif _MEMORY.match(line):
            line = f"QAO_MEMORY({memory.bytes_per_us:g}, {memory.overlap:g})"
        lines.append(re.sub(r"^(// Written by `python -m bench tune`).*", rf"\1 on an {gpu}.", line))
    path.write_text("\n".join(lines) + "\n")


def build() -> Path:
    """Build qao_sweep in the build tree of python/qao/_C.so."""
    caches = sorted(ROOT.glob("build/cmake-*/CMakeCache.txt"), key=lambda cache: cache.stat().st_mtime)
    if not caches:
        raise SystemExit("build qao with its CUDA kernels first: QAO_CUDA=ON python setup.py build_ext --inplace")
    subprocess.run(["cmake", "--build", caches[-1].parent, "--target", "qao_sweep"], check=True)
    return caches[-1].parent / "qao_sweep"


def sweep(program: Path, operands: str, problems: Iterable[Problem]) -> list[Timing]:
    lines = "".join(f"{m} {n} {k}\n" for m, n, k in problems)
    done = subprocess.run([program, operands], input=lines, stdout=subprocess.PIPE, text=True, check=True)
    return parse(done.stdout.splitlines())


def _all(shapes: Iterable[tuple[int, int]], tokens: Sequence[int]) -> list[Problem]:
    return [(m, n, k) for n, k in shapes for m in tokens]


def run(operands: Sequence[str], program: Path | None, gpu: str, bytes_per_us: float, table: Path = TABLE) -> bool:
    """Sweep, fit, write the table and report. Returns whether every unseen problem comes near its best plan.

    Read costs are fitted only together with all operands, which share them.
    """
    program = program or build()
    seen = [(layer.n, layer.k) for layer in LAYERS["cuda"]]
    known = {kind: sweep(program, kind, _all(seen, sorted({*TOKENS["cuda"], *BETWEEN}))) for kind in operands}
    unseen = {kind: sweep(program, kind, _all(UNSEEN, UNSEEN_TOKENS)) for kind in operands}
    memory = read_table(table)[1]
    if set(operands) >= set(OPERANDS):
        memory = fit_memory([timing for timings in known.values() for timing in timings], bytes_per_us)
    near = True
    costs = {row: found for kind in operands for row, found in fit(known[kind], memory).items()}
    alone = [(kind,) for kind in operands if not any(kind in kinds for kinds in SHARING)]
    for kinds in [*alone, *SHARING]:
        costs |= refine([known[kind] for kind in kinds if kind in known], costs, memory)
    write_table(costs, memory, gpu, table)
    for kind in operands:
        print(f"\n{kind}: {len(known[kind]) + len(unseen[kind])} plans timed")
        _report("plan() as built, every plan", chosen_losses(known[kind] + unseen[kind]))
        _report("the new table, tuned layers", losses(known[kind], costs, memory))
        near = _report("the new table, unseen layers", losses(unseen[kind], costs, memory)) <= NEAR and near
    print(f"\nwrote {table}: build again")
    return near


def _report(title: str, found: dict[Problem, float]) -> float:
    """Print the distance from the best plan; returns the worst."""
    if not found:
        return 1.0
    worst = sorted(found, key=lambda problem: -found[problem])[:3]
    text = ", ".join(f"M={m} N={n} K={k} {found[m, n, k]:.2f}" for m, n, k in worst)
    print(f"  {title}: {geometric_mean(found.values()):.3f} times the best on average; most at {text}")
    return max(found.values())


def _best(timings: Iterable[Timing]) -> dict[Problem, float]:
    best: dict[Problem, float] = {}
    for timing in timings:
        best[timing.problem] = min(best.get(timing.problem, timing.us), timing.us)
    return best

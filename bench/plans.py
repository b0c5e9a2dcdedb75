"""plan()'s choice against every other valid plan, on random layers that no cost model is fitted to."""

from __future__ import annotations

import argparse
import math
import random
import re
from pathlib import Path
from statistics import geometric_mean
from typing import Any

from . import tune
from .markdown import caption, table
from .meta import describe
from .result_files import write

LEAST, MOST, STEP = 1024, 37888, 128  # range of N and K, log-uniform
TOKENS = (1, 2, 4, 8, 16, 24, 32, 48, 64, 96, 128, 192, 256, 512, 1024, 2048, 4096, 8192)
MOST_PRODUCTS = 2.5e11  # limit of M · N · K: larger problems, 0.3 ms and more, would take most of the time
BARS = (1.05, 1.10)  # times the best plan's time: geometric mean, maximum


def layers(seed: int, count: int) -> list[tuple[int, int]]:
    """N, K."""
    draw = random.Random(seed)

    def size() -> int:
        return STEP * round(math.exp(draw.uniform(math.log(LEAST), math.log(MOST))) / STEP)

    return [(size(), size()) for _ in range(count)]


def problems(shapes: list[tuple[int, int]], each: int, seed: str) -> list[tuple[int, int, int]]:
    """M, N, K: ``each`` numbers of tokens per layer, among those up to MOST_PRODUCTS."""
    draw = random.Random(seed)
    found = []
    for n, k in shapes:
        found += [(m, n, k) for m in draw.sample([m for m in TOKENS if m * n * k <= MOST_PRODUCTS], each)]
    return found


def measure(program: Path, kind: str, some: list[tuple[int, int, int]]) -> list[dict[str, Any]]:
    """Microseconds of the chosen and of the best plan for each problem, interleaved with others."""
    timings = tune.sweep(program, kind, some)
    rows = []
    for problem in dict.fromkeys(some):
        own = [timing for timing in timings if timing.problem == problem]
        (choice,) = (timing for timing in own if timing.chosen)
        best = min((timing for timing in own if timing.final), key=lambda timing: timing.us)
        m, n, k = problem
        row = {"operands": kind, "m": m, "n": n, "k": k, "us": choice.us, "best_us": best.us, "plans": len(own)}
        rows.append(row | {"plan": _short(choice.plan)})
        if best.plan != choice.plan:
            rows[-1]["best_plan"] = _short(best.plan)
    return rows


def _short(plan: str) -> str:
    """The plan without number of CTAs, workspace and reason."""
    return re.sub(r" ctas \d+| workspace .*", "", plan)


def add_arguments(command: argparse.ArgumentParser) -> None:
    command.add_argument("--seed", type=int, default=22)
    command.add_argument("--layers", type=int, default=40)
    command.add_argument("--each", type=int, default=2, help="numbers of tokens for a layer")
    command.add_argument(
        "--operands", nargs="+", choices=tune.OPERANDS, default=list(tune.OPERANDS), metavar="OPERANDS"
    )
    command.add_argument("--sweep", type=Path, metavar="PROGRAM", help="qao_sweep, instead of building it")


def run(arguments: argparse.Namespace, path: Path) -> bool:
    """Whether the choices are within BARS."""
    program = arguments.sweep or tune.build()
    shapes = layers(arguments.seed, arguments.layers)
    rows: list[dict[str, Any]] = []
    for kind in arguments.operands:
        rows += measure(program, kind, problems(shapes, arguments.each, f"{arguments.seed} {kind}"))
        write({"meta": {**describe("cuda"), "seed": arguments.seed}, "rows": rows}, path)
        print(f"{kind}: " + ", ".join(_line(rows, kind)[1:]), flush=True)
    ratios = [row["us"] / row["best_us"] for row in rows]
    return geometric_mean(ratios) <= BARS[0] and max(ratios) <= BARS[1]


def _line(rows: list[dict[str, Any]], kind: str) -> list[str]:
    own = sorted((row for row in rows if row["operands"] == kind), key=lambda row: row["best_us"] / row["us"])
    ratios = [row["us"] / row["best_us"] for row in own]
    worst = "; ".join(
        f"{ratio:.2f} {row['n']} × {row['k']}, M = {row['m']}" for ratio, row in zip(ratios[:3], own, strict=False)
    )
    above = sum(ratio > BARS[1] for ratio in ratios)
    return [f"`{kind}`", str(len(own)), f"{geometric_mean(ratios):.3f}", str(above), worst]


def render(results: dict[str, Any]) -> str:
    rows = results["rows"]
    kinds = dict.fromkeys(row["operands"] for row in rows)
    text = (
        f"Time of plan()'s choice over the best plan's, layers of seed {results['meta']['seed']}. "
        f"{caption(results['meta'])}."
    )
    heads = ["operands", "problems", "geometric mean", f"above {BARS[1]}", "most"]
    return f"{text}\n\n{table(heads, [_line(rows, kind) for kind in kinds])}"

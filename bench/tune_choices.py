"""Random search for costs that make plan() choose fast plans.

Costs that best explain all times may choose worse plans, since the model of qao/cost.h is coarse and only the cheapest
plan counts. Starting at the fitted costs, the search reduces the chosen plan's time relative to the best plan's. It
stays close to the fit and moves only for a gain.
"""

from __future__ import annotations

import math
import random
from collections.abc import Sequence
from typing import TYPE_CHECKING, NamedTuple

import torch
from torch import Tensor

if TYPE_CHECKING:
    from .tune import Costs, Memory, Row, Timing

ROUNDS = 4000
_NOTHING = 1e-3  # mean loss too small to move for
_SPREAD = 0.03  # plans with closer predicted times may rank either way
_TETHER = 0.01  # minimum gain of costs e times as large: a hundredth of the time
_UNIT = 0.1  # distance of a zero cost from one, in microseconds


def _least(values: Tensor, problem: Tensor, problems: int) -> Tensor:
    """For each plan the least value over its problem's plans."""
    least = torch.full((problems,), math.inf, dtype=values.dtype)
    return least.scatter_reduce(0, problem, values, "amin")[problem]


class _Kind(NamedTuple):
    """Timings of one kind of operands as tensors, one entry per plan."""

    row: Tensor  # row of the costs
    counts: Tensor
    reading: Tensor
    before: Tensor
    problem: Tensor
    problems: int
    loss: Tensor  # logarithm of its time over the best plan's

    def expected_loss(self, costs: Tensor, overlap: float, spread: float = _SPREAD) -> float:
        work = (self.counts * costs[self.row]).sum(1)
        time = torch.maximum(work, self.reading) + overlap * torch.minimum(work, self.reading) + self.before
        chance = torch.exp(-torch.log(time / _least(time, self.problem, self.problems)) / spread)
        sums = torch.zeros(2, self.problems, dtype=time.dtype)
        sums.index_add_(1, self.problem, torch.stack([chance * self.loss, chance]))
        return float((sums[0] / sums[1]).mean())


def _kind(timings: Sequence[Timing], rows: list[Row], memory: Memory) -> _Kind:
    index = {problem: i for i, problem in enumerate(sorted({timing.problem for timing in timings}))}
    problem = torch.tensor([index[t.problem] for t in timings])
    us, reading, before = torch.tensor(
        [(t.us, t.bytes / memory.bytes_per_us, t.before) for t in timings], dtype=torch.float64
    ).T
    row = torch.tensor([rows.index(t.row) for t in timings if t.row])
    counts = torch.tensor([t.counts for t in timings], dtype=torch.float64)
    return _Kind(row, counts, reading, before, problem, len(index), torch.log(us / _least(us, problem, len(index))))


def refine(kinds: Sequence[Sequence[Timing]], costs: Costs, memory: Memory, rounds: int = ROUNDS) -> Costs:
    """Refine the rows of these kinds of operands. Kinds that share rows must be passed together."""
    priced = [[timing for timing in timings if timing.row in costs] for timings in kinds]
    rows = sorted({timing.row for timings in priced for timing in timings if timing.row})
    tensors = [_kind(timings, rows, memory) for timings in priced if timings]
    start = torch.tensor([costs[row] for row in rows], dtype=torch.float64)
    if sum(kind.expected_loss(start, memory.overlap, spread=1e-6) for kind in tensors) <= _NOTHING * len(tensors):
        return {row: costs[row] for row in rows}

    def objective(table: Tensor) -> float:
        moved = torch.log((table + _UNIT) / (start + _UNIT)).abs().mean()
        return sum(kind.expected_loss(table, memory.overlap) for kind in tensors) + _TETHER * float(moved)

    generator = random.Random(0)
    table, least = start.clone(), objective(start)
    for _ in range(rounds):
        trial, row = table.clone(), generator.randrange(len(rows))
        if generator.random() < 0.3:  # scale a whole row
            trial[row] *= math.exp(generator.gauss(0, 0.08))
        else:  # change one cost; all but the k-tile cost may start or end at zero
            term = generator.randrange(trial.shape[1])
            step = generator.gauss(0, 0.05) if term > 0 else 0.0
            trial[row, term] = max(0.0, float(trial[row, term]) * math.exp(generator.gauss(0, 0.2)) + step)
        if (reached := objective(trial)) < least:
            table, least = trial, reached
    return {row: tuple(round(value, 4) for value in values) for row, values in zip(rows, table.tolist(), strict=True)}

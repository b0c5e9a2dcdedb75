"""Distance of two engines' log-probabilities on the same prompts."""

from __future__ import annotations

import random
from typing import Any, NamedTuple

LIKELIEST = 32  # tokens compared per position
PROMPTS = ((16, 8), (100, 8), (700, 4))  # tokens, prompts: kernels of decoding, of both, of prefill


class Distance(NamedTuple):
    """Absolute differences of log-probabilities, and how many greedy choices agree."""

    mean: float
    p99: float
    same_choice: float  # share of positions


def prompts(vocabulary: int, sizes: tuple[tuple[int, int], ...] = PROMPTS, seed: int = 0) -> list[list[int]]:
    draw = random.Random(seed)
    return [[draw.randrange(vocabulary) for _ in range(length)] for length, count in sizes for _ in range(count)]


def distance(one: dict[str, Any], other: dict[str, Any]) -> Distance:
    """Of two answers of ``generate``: positions up to the first at which the greedy tokens differ."""
    differences: list[float] = []
    same = positions = 0
    for a, b, tokens_a, tokens_b in zip(
        one["logprobs"], other["logprobs"], one["tokens"], other["tokens"], strict=True
    ):
        for step_a, step_b, token_a, token_b in zip(a, b, tokens_a, tokens_b, strict=True):
            common = sorted(step_a.keys() & step_b.keys(), key=lambda token: -step_a[token])[:LIKELIEST]
            differences += [abs(step_a[token] - step_b[token]) for token in common]
            positions += 1
            same += token_a == token_b
            if token_a != token_b:
                break
    differences.sort()
    if not differences:
        raise ValueError("the two answers have no token in common among their likeliest")
    mean = sum(differences) / len(differences)
    return Distance(mean, differences[int(len(differences) * 0.99)], same / positions)


def same_tokens(one: dict[str, Any], other: dict[str, Any]) -> float:
    """Share of equal greedy tokens, up to the first that differs in each answer."""
    same = total = 0
    for a, b in zip(one["tokens"], other["tokens"], strict=True):
        equal = next((i for i, (x, y) in enumerate(zip(a, b, strict=True)) if x != y), len(a))
        same, total = same + equal, total + min(equal + 1, len(a))
    return same / total

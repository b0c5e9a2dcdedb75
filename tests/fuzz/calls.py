"""Hostile calls of every operator: wrong dtypes, shapes, strides, sizes, values, and things that are no tensors.

A call may work, or raise an error that names its operator (``abuse_support``). A case is twenty calls.
"""

from __future__ import annotations

import random
from typing import Any

import abuse_support

from .finding import Finding

_CALLS = 20


def draw(rng: random.Random) -> dict[str, Any]:
    return {"seed": rng.getrandbits(48)}


def run(case: dict[str, Any], device: str) -> int:
    for line in abuse_support.abuse(case["seed"], _CALLS):
        if line.startswith("BAD"):
            raise Finding(line)
    return _CALLS

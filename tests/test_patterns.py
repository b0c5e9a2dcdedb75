"""Regular expressions of configs: as ``re`` matches them, but in bounded time."""

from __future__ import annotations

import random
import re
import time
import warnings
from pathlib import Path

import pytest
import torch
from checkpoint_support import write
from qao.checkpoints import CheckpointError, open_checkpoint, patterns

ATOMS = ["a", "b", ".", "[ab]", "[^a]", r"\.", r"\w", r"\b", "^", "$", "x", "(?<=a)", "(?<!b)", "]", "{", "{}", "[]a]"]
GROUPS = ["(", "(?:", "(?P<name>", "(?=", "(?!"]
TIMES = ["*", "+", "?", "*?", "+?", "{2}", "{0,2}", "{1,}", "{,2}", "??"]


def random_pattern(rng: random.Random, depth: int) -> str:
    parts = []
    for _ in range(rng.randint(0, 4)):
        kind = rng.random() if depth else 0
        part = rng.choice(ATOMS)
        if kind > 0.8:
            part = f"({random_pattern(rng, depth - 1)}|{random_pattern(rng, depth - 1)})"
        elif kind > 0.55:
            part = f"{rng.choice(GROUPS)}{random_pattern(rng, depth - 1)})"
        parts.append(part + (rng.choice(TIMES) if rng.random() < 0.35 else ""))
    return "".join(parts)


@pytest.mark.parametrize("few", [0, patterns._FEW], ids=["sets", "as in use"])
def test_random_patterns_match_as_re_says(few: int, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(patterns, "_FEW", few)
    warnings.simplefilter("ignore", FutureWarning)
    rng, compared = random.Random(few), 0
    while compared < 2000:
        pattern = ("(?i)" if rng.random() < 0.1 else "") + random_pattern(rng, 3)
        try:
            compiled = re.compile(pattern)
        except re.error:
            continue
        text = "".join(rng.choice("abA.x1]{}") for _ in range(rng.randint(0, 7)))
        assert patterns.matches_start(pattern, text) == (compiled.match(text) is not None), (pattern, text)
        found = patterns.matches_start(pattern, text, whole=True)
        assert found == (compiled.fullmatch(text) is not None), (pattern, text)
        compared += 1


@pytest.mark.parametrize(
    "pattern", ["(a+)+x", "(a|a)*x", "((a?){400}){400}x", "(a*)*(a*)*(a*)*x", "(?=.*(?=.*(?=.*x)))"]
)
def test_no_pattern_takes_long(pattern: str) -> None:
    begin = time.process_time()
    try:
        assert not patterns.matches_start(pattern, "a" * 400)
    except re.error as error:
        assert "too many steps" in str(error)
    assert time.process_time() - begin < 5


@pytest.mark.parametrize("pattern", [r"(a)\1", "(?P<n>a)(?P=n)", "(?i:a)", "(?x)a", "a" * 5000, "["])
def test_what_is_not_supported(pattern: str) -> None:
    with pytest.raises(re.error):
        patterns.matches_start(pattern, "aa")


def test_a_config_cannot_hang_a_reader(tmp_path: Path) -> None:
    name = "a" * 60
    tensors = {f"{name}.weight": torch.ones(16, 64, dtype=torch.int8), f"{name}.weight_scale": torch.ones(16, 1)}
    channels = {"num_bits": 8, "type": "int", "symmetric": True, "strategy": "channel"}
    settings = {"quant_method": "compressed-tensors", "format": "int-quantized"}
    for target, error in (("re:(a+)+$", None), ("re:(a+)+x", "no group"), (r"re:(a)\1", "is not a regular expression")):
        groups = {"group_0": {"targets": [target], "weights": channels}}
        write(tmp_path, tensors, {"quantization_config": settings | {"config_groups": groups}})
        if error is None:
            assert set(open_checkpoint(tmp_path).layers) == {name}
            continue
        with pytest.raises(CheckpointError, match=error):
            open_checkpoint(tmp_path)

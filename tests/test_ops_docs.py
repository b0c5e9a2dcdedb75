"""docs/ops.md: its examples run, its schemas are the registered ones, its error is the one raised."""

from __future__ import annotations

import re
from pathlib import Path
from typing import Any

import pytest
import torch
from ops_schemes import INT4, Int4Format

PAGE = (Path(__file__).parents[1] / "docs" / "ops.md").read_text()
LIBRARY = (Path(__file__).parents[1] / "csrc" / "library.cpp").read_text()
OPS = sorted(set(re.findall(r'm\.impl\("(\w+)"', LIBRARY)))


def blocks(language: str) -> list[str]:
    return re.findall(rf"^```{language}\n(.*?)^```", PAGE, re.MULTILINE | re.DOTALL)


def test_examples() -> None:
    """In the order of the page, in one namespace: later ones use what earlier ones made."""
    namespace: dict[str, Any] = {}
    assert all(f"torch.ops.qao.{op}(" in "".join(blocks("python")) for op in OPS)
    for block in blocks("python"):
        exec(block, namespace)


@pytest.mark.parametrize("op", OPS)
def test_schemas(op: str) -> None:
    schema = str(getattr(torch.ops.qao, op).default._schema).removeprefix("qao::")
    assert schema in [block.strip() for block in blocks("text")]


def test_error_message() -> None:
    weight = INT4.make_weight(16, 64, Int4Format(64))
    with pytest.raises(RuntimeError) as caught:
        INT4.mm(torch.zeros(3, 65, dtype=torch.bfloat16), weight)
    (documented,) = (block.strip() for block in blocks("text") if block.startswith("qao::"))
    assert documented in str(caught.value)

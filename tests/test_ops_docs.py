"""docs/ops.md: its examples run, its schemas are the registered ones, its error is the one raised."""

from __future__ import annotations

import re
from pathlib import Path
from typing import Any

import pytest
import torch
from ops_schemes import INT4, Int4Format

PAGE = (Path(__file__).parents[1] / "docs" / "ops.md").read_text()
OPS = ("int4_mm", "pack_int4", "unpack_int4", "dequantize_int4")


def blocks(language: str) -> list[str]:
    return re.findall(rf"^```{language}\n(.*?)^```", PAGE, re.MULTILINE | re.DOTALL)


def test_examples() -> None:
    """In the order of the page, in one namespace: later ones use what earlier ones made."""
    namespace: dict[str, Any] = {}
    assert len(blocks("python")) >= len(OPS)
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

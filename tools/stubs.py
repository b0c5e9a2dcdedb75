"""Writes python/qao/ops/raw.pyi, the types of the raw operators, from their schemas: `python tools/stubs.py`."""

from __future__ import annotations

from pathlib import Path
from typing import Any

import qao  # noqa: F401  # registers the operators
import torch

STUB = Path(__file__).parents[1] / "python" / "qao" / "ops" / "raw.pyi"
_HEADER = '''"""The raw operators, ``torch.ops.qao``, without gradients. `python tools/stubs.py` wrote this file."""

from collections.abc import Sequence

import torch
from torch import Tensor
'''
_TYPES = {
    "Tensor": "Tensor",
    "Optional[Tensor]": "Tensor | None",
    "int": "int",
    "bool": "bool",
    "float": "float",
    "ScalarType": "torch.dtype",
    "List[float]": "Sequence[float]",
    "Optional[List[float]]": "Sequence[float] | None",
}


def text() -> str:
    schemas = [schema for schema in torch._C._jit_get_all_schemas() if schema.name.startswith("qao::")]
    public = [schema for schema in schemas if not schema.name.startswith("qao::_")]
    return _HEADER + "\n" + "".join(map(_function, sorted(public, key=lambda schema: schema.name)))


def _function(schema: Any) -> str:
    arguments = "".join(f"    {_argument(argument)},\n" for argument in schema.arguments)
    return f"def {schema.name.removeprefix('qao::')}(\n{arguments}) -> {_result(schema.returns)}: ...\n"


def _argument(argument: Any) -> str:
    default = f" = {argument.default_value!r}" if argument.has_default_value() else ""
    return f"{argument.name}: {_TYPES[str(argument.real_type)]}{default}"


def _result(returns: Any) -> str:
    types = [_TYPES[str(one.real_type)] for one in returns]
    return types[0] if len(types) == 1 else f"tuple[{', '.join(types)}]" if types else "None"


if __name__ == "__main__":
    STUB.write_text(text())

"""The raw operators, ``torch.ops.qao``, which have no gradients. ``raw.pyi`` has their types, from their schemas."""

from __future__ import annotations

from typing import Any

import torch

from . import library  # noqa: F401  # registers them


def __getattr__(name: str) -> Any:
    return getattr(torch.ops.qao, name)


def __dir__() -> list[str]:
    schemas = torch._C._jit_get_all_schemas()
    return sorted(schema.name.removeprefix("qao::") for schema in schemas if schema.name.startswith("qao::"))

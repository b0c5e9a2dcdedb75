"""Kernel tables made from ``qao._host.kernels()``, which queries the kernel selection itself."""

from __future__ import annotations

import platform
from typing import Any

from .markdown import table
from .schemes import SCHEMES

_X86 = {
    "scalar": "any x86-64",
    "avx2": "AVX2",
    "avx_vnni": "AVX-VNNI",
    "avx512": "AVX-512 VNNI",
    "avx512_bf16": "AVX-512 BF16",
    "amx": "AMX",
}
_ARM = {
    "scalar": "any aarch64, forced",
    "neon": "NEON",
    "neon_dotprod": "dot product",
    "neon_i8mm": "I8MM",
    "neon_bf16": "BF16",
}
_ISAS = _ARM if platform.machine() == "aarch64" else _X86


def render() -> str:
    """A table for CPUs and one for GPUs: schemes by hardware, cells name the matrix instructions."""
    from qao import _host

    rows = _host.kernels()
    capabilities = sorted({row["compute_capability"] for row in rows if row["device"] == "cuda"})
    gpus = {capability: f"{capability // 10}.{capability % 10}" for capability in capabilities}
    return "\n\n".join(
        [_table("CPU", _ISAS, "isa", rows), _table("compute capability", gpus, "compute_capability", rows)]
    )


def _table(title: str, names: dict[Any, str], key: str, rows: list[dict[str, Any]]) -> str:
    """Hardware with identical cells shares a column."""
    columns: dict[tuple[str, ...], list[str]] = {}
    for hardware, name in names.items():
        there = [row for row in rows if row.get(key) == hardware]
        cells = (_instructions([row for row in there if row["op"] == f"{word}_mm"]) for word in SCHEMES)
        columns.setdefault(tuple(cells), []).append(name)
    lines = [[f"`{word}`", *(cells[i] for cells in columns)] for i, word in enumerate(SCHEMES)]
    return table([title, *(", ".join(alike) for alike in columns.values())], lines)


def _instructions(rows: list[dict[str, Any]]) -> str:
    """ "mma.sync bf16", "mma.sync f16" and "wgmma f16" become `mma.sync` bf16, f16; `wgmma` f16."""
    types: dict[str, dict[str, None]] = {}
    for row in rows:
        unit, _, kind = row["instruction"].partition(" ")
        types.setdefault(unit, {})[kind] = None
    return "; ".join(f"`{unit}` {', '.join(kinds)}".strip() for unit, kinds in types.items()) or "none"

"""The table of what runs where, made from ``qao._host.kernels()``: what the choices of kernels themselves answer."""

from __future__ import annotations

from .markdown import table
from .schemes import SCHEMES

_ISAS = {
    "scalar": "any x86-64",
    "avx2": "AVX2",
    "avx512": "AVX-512 VNNI",
    "avx512_bf16": "AVX-512 BF16",
    "amx": "AMX",
}
_NONE = "none"


def render() -> str:
    """Schemes by hardware; cells name the instructions that multiply. Neighbours that are alike share a column."""
    from qao import _host

    rows = _host.kernels()
    columns: list[tuple[str, list[str]]] = []
    for device, where, name in _hardware(rows):
        cells = []
        for word in SCHEMES:
            there = [row for row in rows if row["op"] == f"{word}_mm" and row["device"] == device]
            used = dict.fromkeys(row["instruction"] for row in there if where in (row.get("isa"), _capability(row)))
            cells.append(", ".join(f"`{instruction}`" for instruction in used) or _NONE)
        if columns and columns[-1][1] == cells and columns[-1][0].startswith("GPU") == name.startswith("GPU"):
            columns[-1] = (f"{columns[-1][0]}, {name.removeprefix('GPU ')}", cells)
        else:
            columns.append((name, cells))
    lines = [[f"`{word}`", *(cells[i] for _, cells in columns)] for i, word in enumerate(SCHEMES)]
    return table(["scheme", *(name for name, _ in columns)], lines)


def _capability(row: dict[str, object]) -> object:
    return row.get("compute_capability")


def _hardware(rows: list[dict[str, int]]) -> list[tuple[str, str | int, str]]:
    capabilities = sorted({row["compute_capability"] for row in rows if row["device"] == "cuda"})
    gpus = [("cuda", capability, f"GPU {capability // 10}.{capability % 10}") for capability in capabilities]
    return [("cpu", isa, name) for isa, name in _ISAS.items()] + gpus

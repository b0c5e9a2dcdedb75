"""Tables of docs/kernels/: measurements of each GPU kernel family over the cells it runs."""

from __future__ import annotations

from typing import Any

from .markdown import caption, table
from .ratios import means

# A page of docs/kernels, and the beginnings of the names of its kernel families.
PAGES = {"sm90_skinny": ("sm90_skinny",), "sm90_ws": ("sm90_ws",), "sm80_mma": ("sm90_mma", "sm89_mma", "sm80_mma")}
_GPUS = {"NVIDIA H200": (90, 232448)}  # compute capability, shared memory per CTA


def render(page: str, results: dict[str, dict[str, Any]]) -> str:
    """Schemes by tokens, or layers if there is one scheme; ``results`` by word."""
    cells = {
        word: [row for row in result["rows"] if _runs(page, word, row, result)] for word, result in results.items()
    }
    cells = {word: rows for word, rows in cells.items() if rows}
    if not cells:
        return "No cell of the benchmark."
    tokens = sorted({row["M"] for rows in cells.values() for row in rows})
    if len(cells) == 1:
        ((word, rows),) = cells.items()
        what = f"`{word}`: microseconds, and how many times as fast as bfloat16 `F.linear`"
        lines = [[name, *(_time(rows, name, m) for m in tokens)] for name in dict.fromkeys(map(_layer, rows))]
    else:
        what = "Geometric mean over the layers: times as fast as bfloat16 `F.linear`, and the share of the roofline"
        lines = [[f"`{word}`", *(_mean(rows, m) for m in tokens)] for word, rows in cells.items()]
    measured = "; ".join(sorted({caption(results[word]["meta"]) for word in cells}))
    header = ["N × K" if len(cells) == 1 else "scheme", *(f"M={m}" for m in tokens)]
    return f"{what}. {measured}.\n\n{table(header, lines)}"


def _runs(page: str, word: str, row: dict[str, Any], result: dict[str, Any]) -> bool:
    """Whether plan() selects the page's kernel family for the cell."""
    from qao import _host

    meta = result["meta"]
    capability, shared_bytes = _GPUS[meta["device"]]
    gpu = _host.Gpu(compute_capability=capability, num_sms=meta["sms"], shared_bytes_per_cta=shared_bytes)
    x, _, weight = word.rpartition("_")
    facts = {"m": row["M"], "n": row["N"], "k": row["K"], "x": x or "float", "weight": weight}
    if row["group_size"] is not None:
        facts |= {"group_size": row["group_size"], "has_zeros": not row["symmetric"], "scale_dtype": "bfloat16"}
    name: str = _host.plan(_host.Problem(**facts), gpu)["family"]
    return name.startswith(PAGES[page])


def _layer(row: dict[str, Any]) -> str:
    return f"{row['N']} × {row['K']}"


def _time(rows: list[dict[str, Any]], layer: str, m: int) -> str:
    found = [row for row in rows if _layer(row) == layer and row["M"] == m]
    return " ".join(f"{row['us']:.1f} ({row['bf16_us'] / row['us']:.2f})" for row in found) or "–"


def _mean(rows: list[dict[str, Any]], m: int) -> str:
    return means([row for row in rows if row["M"] == m])

"""Markdown of the results of serving engines: speed, and agreement of the answers."""

from __future__ import annotations

from typing import Any

from ..markdown import table
from ..result_files import runs_of
from .checkpoints import OWN, SMALL
from .run import OWN_KERNELS, QAO, REFERENCE, Row

Results = dict[str, Any]


def render(results: Results) -> str:
    """Tokens per second with qao, and in relation to the engine's own kernels, by checkpoint and requests."""
    rows = [row for row in results["rows"] if row["model"] not in SMALL and row["measure"] != "feature"]
    parts = []
    for model, layers, gpus in dict.fromkeys((row["model"], row["layers"], row["gpus"]) for row in rows):
        mine = [row for row in rows if (row["model"], row["layers"], row["gpus"]) == (model, layers, gpus)]
        cells = {(row["checkpoint"], row["contender"], _cell(row)): row for row in mine if "tokens_s" in row}
        columns = list(dict.fromkeys(cell for *_, cell in cells))
        lines = [
            [f"`{checkpoint}`", *(_ratio(cells, checkpoint, column) for column in columns)]
            for checkpoint in dict.fromkeys(row["checkpoint"] for row in mine)
        ]
        machine = f"{gpus} {results['meta']['device']}{'s' if gpus > 1 else ''}"
        parts.append(
            f"{model}, {layers} layers, {machine}, {_versions(mine)}: tokens/s with qao (times without)\n\n"
            + table(["checkpoint", *columns], lines)
        )
    return "\n\n".join(parts)


def speedups(results: Results) -> dict[str, dict[str, list[tuple[int, float]]]]:
    """By model and checkpoint: numbers of requests, and tokens per second of decoding over those without qao."""
    rows = [row for row in results["rows"] if row["measure"] == "decode" and row["model"] not in SMALL]
    speeds = {(row["model"], row["checkpoint"], row["contender"], row["requests"]): row["tokens_s"] for row in rows}
    found: dict[str, dict[str, list[tuple[int, float]]]] = {}
    for (model, checkpoint, contender, requests), speed in speeds.items():
        base = speeds.get((model, checkpoint, OWN_KERNELS, requests))
        if contender == QAO and base is not None:
            found.setdefault(model, {}).setdefault(checkpoint, []).append((requests, speed / base))
    return found


def render_layouts(results: Results) -> str:
    """Mean difference of log-probabilities from a bfloat16 model of the same values, by kernel and checkpoint."""
    rows = [row for row in results["rows"] if row["model"] in SMALL]
    if not rows:
        return "No answers were compared."
    by_kernel: dict[str, list[str]] = {}
    for model, checkpoint in dict.fromkeys((row["model"], row["checkpoint"]) for row in rows):
        mine = [row for row in rows if row["model"] == model]
        ours, theirs = (_difference(mine, checkpoint, name) for name in (QAO, OWN_KERNELS))
        if ours is not None:
            kernels = (_kernels(mine, checkpoint, QAO) or "Layers") if model == "small-llama" else "Experts"
            if checkpoint in OWN:
                kernels = f"{'Layers' if model == 'small-llama' else 'Experts'} in qao's own format"
            said = f"`{checkpoint}` {ours:.4f}" + ("" if theirs is None else f" ({theirs:.4f})")
            by_kernel.setdefault(kernels, []).append(said)
    lines = [f"- {kernel}: {', '.join(said)}" for kernel, said in by_kernel.items()]
    return "\n".join(
        [f"{results['meta']['device']}, {_versions(rows)}: with qao (with the engine's own kernels)\n", *lines]
    )


def _versions(rows: list[Row]) -> str:
    engine = {"vllm": "vLLM", "sglang": "SGLang"}[rows[0]["engine"]]
    version = next((row["version"] for row in rows if "version" in row), "")
    return f"{engine} {version}, {runs_of(rows)}"


def _cell(row: Row) -> str:
    return f"{row['requests']}" if row["measure"] == "decode" else f"{row['requests']} × {row['tokens']}"


def _ratio(cells: dict[Any, Row], checkpoint: str, column: str) -> str:
    ours, theirs = (cells.get((checkpoint, name, column)) for name in (QAO, OWN_KERNELS))
    if ours is None:
        return "–"
    return f"{ours['tokens_s']:,.0f}" + (f" ({ours['tokens_s'] / theirs['tokens_s']:.2f})" if theirs else "")


def _kernels(rows: list[Row], checkpoint: str, contender: str) -> str:
    """Names of the classes, without their number of layers and the ending that all have."""
    for row in rows:
        if (row["checkpoint"], row["contender"], row["measure"]) == (checkpoint, contender, "start"):
            names = (part.partition(" ")[2] for part in row.get("kernels", "").split(", ") if part)
            return ", ".join(
                name.removesuffix("Kernel").removesuffix("Linear").removesuffix("ScaledMM") for name in names
            )
    return ""


def _difference(rows: list[Row], checkpoint: str, contender: str) -> float | None:
    wanted = checkpoint, contender, f"logprobs against {REFERENCE}"
    found = (row for row in rows if (row["checkpoint"], row["contender"], row["measure"]) == wanted)
    return next((row["mean"] for row in found), None)

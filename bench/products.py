"""GEMM results as Markdown: every cell of one scheme, or one layer under every scheme."""

from __future__ import annotations

from typing import Any

from .bars import MIN_K
from .markdown import caption, table
from .ratios import means
from .schemes import SCHEMES

# The layer of the summary: 28672 x 4096 on a GPU, 14336 x 4096 on a CPU.
SUMMARY_LAYERS = ("gate_up", "up")


def render(results: dict[str, Any]) -> str:
    """Every cell, one table per layer."""
    meta, rows = results["meta"], results["rows"]
    if rows[0]["group_size"] is None:
        weights = "weights with a scale per row"
    else:
        weights = f"{'symmetric' if rows[0]['symmetric'] else 'asymmetric'} groups of {rows[0]['group_size']}"
    text = (
        f"{caption(meta)}; {rows[0]['dtype']} activations, {weights}; "
        f"memory reads {meta['read_gb_s']:.0f} GB/s, bfloat16 matrices multiply at {meta['bf16_tflop_s']:.1f} TFLOP/s."
    )
    layers = dict.fromkeys(row["layer"] for row in rows)
    return "\n\n".join([text, *(_layer(name, [row for row in rows if row["layer"] == name]) for name in layers)])


def render_summary(results: dict[str, dict[str, Any]]) -> str:
    """Times of bfloat16 divided by ours, schemes by tokens, for one layer; ``results`` by word."""
    metas = {caption(result["meta"]) for result in results.values()}
    rows = {
        word: [row for row in results[word]["rows"] if row["layer"] in SUMMARY_LAYERS and not row["cached"]]
        for word in SCHEMES
        if word in results
    }
    tokens = sorted({row["M"] for cells in rows.values() for row in cells})
    lines = []
    for word, cells in rows.items():
        ratio = {row["M"]: f"{row['bf16_us'] / row['us']:.2f}" for row in cells}
        lines.append([f"`{word}`", *(ratio.get(m, "–") for m in tokens)])
    n, k = next((row["N"], row["K"]) for cells in rows.values() for row in cells)
    return f"{'; '.join(sorted(metas))}. N = {n}, K = {k}.\n\n{table(['scheme', *(f'M={m}' for m in tokens)], lines)}"


def large_layers(results: dict[str, dict[str, Any]]) -> dict[str, list[dict[str, Any]]]:
    """The rows of large layers with rotating copies of the weight, by scheme."""
    return {
        word: [row for row in results[word]["rows"] if row["K"] >= MIN_K and not row["cached"]]
        for word in SCHEMES
        if word in results
    }


def render_means(results: dict[str, dict[str, Any]]) -> str:
    """Schemes by tokens, over large layers: speedup over bfloat16, share of the roofline; ``results`` by word."""
    captions: dict[str, list[str]] = {}
    for word, result in results.items():
        captions.setdefault(caption(result["meta"]), []).append(f"`{word}`")
    measured = "; ".join(captions)
    if len(captions) > 1:
        measured = "; ".join(f"{', '.join(words)}: {text}" for text, words in captions.items())
    rows = large_layers(results)
    tokens = sorted({row["M"] for cells in rows.values() for row in cells})
    lines = [
        [f"`{word}`", *(means([row for row in cells if row["M"] == m]) for m in tokens)] for word, cells in rows.items()
    ]
    return f"{measured}.\n\n{table(['scheme', *(f'M={m}' for m in tokens)], lines)}"


def _layer(name: str, rows: list[dict[str, Any]]) -> str:
    peers = sorted({peer for row in rows for peer in row["peers"]})
    header = ["M", "µs", "of roofline", "GB/s", "TFLOP/s", "bf16 µs", "× bf16"]
    lines = []
    for row in rows:
        us = row["us"]
        line = [str(row["M"]), f"{us:.1f}", f"{row['floor_us'] / us:.0%}", f"{row['gb_s']:.0f}"]
        line += [f"{row['tflop_s']:.2f}", f"{row['bf16_us']:.1f}", f"{row['bf16_us'] / us:.2f}"]
        line += [f"{row['peers'][peer] / us:.2f}" if peer in row["peers"] else "–" for peer in peers]
        lines.append(line)
    cached = ", one copy of the weight" if rows[0]["cached"] else ""
    title = f"**{name}**: N = {rows[0]['N']}, K = {rows[0]['K']}{cached}"
    return f"{title}\n\n{table(header + [f'× {peer}' for peer in peers], lines)}"

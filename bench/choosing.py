"""Tables of docs/choosing.md: size and accuracy of each scheme, speed by tokens and in a decoder."""

from __future__ import annotations

from typing import Any

import torch

from . import numerics
from .llama import BASELINE, case_of, title_of
from .markdown import caption, table
from .products import large_layers
from .ratios import BF16, mean_ratio

_SIZE = 4096  # side of the square layer used to count bits


def render_formats(results: dict[str, Any]) -> str:
    """From bench/results/cpu/numerics.csv, with bits counted over a layer's tensors."""
    lines = []
    for row in results["rows"]:
        packed = numerics.SCHEMES[row["scheme"]].empty(_SIZE, _SIZE, dtype=torch.bfloat16, device="meta")
        bits = sum(8 * tensor.nbytes for tensor in packed.tensors().values() if tensor is not None) / _SIZE**2
        accuracy = f"{row['output_error']:.1%}", f"{row['cosine_mean']:.4f}", f"{row['cosine_worst']:.4f}"
        lines.append([row["scheme"], f"{bits:.2f}", *accuracy])
    header = ["scheme", "bits a weight", "output error", "cosine: mean", "worst"]
    text = f"Bits with bfloat16 scales at K = {_SIZE}. Accuracy: {caption(results['meta'])}."
    return f"{text}\n\n{table(header, lines)}"


def render_tokens(results: dict[str, dict[str, Any]]) -> str:
    """Mean times of bfloat16 divided by ours, tokens by schemes; ``results`` by word."""
    rows = large_layers(results)
    lines = []
    for m in sorted({row["M"] for cells in rows.values() for row in cells}):
        means = [mean_ratio([row for row in cells if row["M"] == m], BF16) for cells in rows.values()]
        shown = ["–" if mean is None else f"{mean:.2f}" for mean in means]
        best = max(shown, key=lambda text: 0.0 if text == "–" else float(text))
        lines.append([str(m), *(f"**{text}**" if text == best else text for text in shown)])
    measured = "; ".join(sorted({caption(result["meta"]) for result in results.values()}))
    layers = sorted({f"{row['N']} × {row['K']}" for cells in rows.values() for row in cells})
    text = f"{measured}; layers {', '.join(layers)}."
    return f"{text}\n\n{table(['tokens M', *(f'`{word}`' for word in rows)], lines)}"


def render_decoders(results: dict[str, Any]) -> str:
    """From llama.csv: compiled, in the block arrangement that all schemes have."""
    meta, rows = results["meta"], [row for row in results["rows"] if row["variant"] == "fused"]
    parts = [f"{caption(meta)}; {meta['context']} tokens of context, compiled, fused blocks."]
    for model in dict.fromkeys(row["model"] for row in rows):
        mine = [row for row in rows if row["model"] == model]
        cases = list(dict.fromkeys(map(case_of, mine)))
        cells = {(row["scheme"], *case_of(row)): row for row in mine}
        lines = []
        for scheme in dict.fromkeys(row["scheme"] for row in mine):
            weights = next(row["weights_mib"] for row in mine if row["scheme"] == scheme)
            speeds = [_speed(cells.get((scheme, *case)), cells[(BASELINE, *case)]) for case in cases]
            lines.append([f"`{scheme}`", f"{weights / 1024:.1f}", *speeds])
        header = ["scheme", "weights GiB", *map(title_of, cases)]
        parts.append(f"**{model}**: tokens/s (times {BASELINE})\n\n{table(header, lines)}")
    return "\n\n".join(parts)


def _speed(row: dict[str, Any] | None, base: dict[str, Any]) -> str:
    if row is None:
        return "–"
    return f"{row['compiled_tokens_s']:.0f} ({row['compiled_tokens_s'] / base['compiled_tokens_s']:.2f})"

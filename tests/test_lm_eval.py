"""lm-eval's HFLM on quantized models, with a task and a text of our own: no network."""

from __future__ import annotations

import json
from pathlib import Path
from typing import Any

import pytest
import qao
import torch
from test_cli import load, save_llama

pytest.importorskip("transformers")
lm_eval = pytest.importorskip("lm_eval")

QUESTIONS = [
    {"question": f"{i} and {j} make", "choices": [f" {i + j}", f" {i * j + 7}", " many"], "answer": (i + j) % 3}
    for i in range(3)
    for j in range(2, 5)
]


@pytest.fixture(scope="module")
def llama(tmp_path_factory: pytest.TempPathFactory) -> Path:
    return save_llama(tmp_path_factory.mktemp("lm_eval") / "llama")


def own(model: Any, tokenizer: Any, context: str, text: str) -> float:
    """ln p(text | context) by the model itself."""
    before, after = (tokenizer(part, add_special_tokens=False)["input_ids"] for part in (context, context + text))
    ids = torch.tensor([after])
    with torch.no_grad():
        log_p = model(ids).logits[0, :-1].float().log_softmax(-1)
    return log_p.gather(1, ids[0, 1:, None])[len(before) - 1 :].sum().item()


@pytest.mark.parametrize("saved", [False, True])
def test_a_local_task(saved: bool, llama: Path, tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """Each answer's likelihood is the model's, and the accuracy follows; of a saved model as of one in memory."""
    from lm_eval.models.huggingface import HFLM
    from transformers import AutoTokenizer

    monkeypatch.setenv("HF_DATASETS_OFFLINE", "1")
    monkeypatch.setenv("HF_DATASETS_CACHE", str(tmp_path / "cache"))
    model, tokenizer = load(llama).float(), AutoTokenizer.from_pretrained(llama)
    qao.quantize_(model, {"lm_head": None, "re:.*": qao.Int4WeightOnly(32)})
    if saved:
        model.save_pretrained(tmp_path / "int4")
        tokenizer.save_pretrained(tmp_path / "int4")
        model = qao.from_pretrained(tmp_path / "int4", dtype=torch.float32)
    (tmp_path / "questions.jsonl").write_text("\n".join(map(json.dumps, QUESTIONS)))
    task = {
        "task": "sums",
        "dataset_path": "json",
        "dataset_kwargs": {"data_files": {"test": str(tmp_path / "questions.jsonl")}},
        "test_split": "test",
        "output_type": "multiple_choice",
        "doc_to_text": "{{question}}",
        "doc_to_choice": "{{choices}}",
        "doc_to_target": "answer",
        "target_delimiter": "",
        "metric_list": [{"metric": "acc"}],
    }
    lm = HFLM(pretrained=model, tokenizer=tokenizer, batch_size=4)
    results = lm_eval.simple_evaluate(model=lm, tasks=[task], log_samples=True, bootstrap_iters=0)
    assert sum(isinstance(module, qao.QuantLinear) for module in model.modules()) == 14
    right = 0
    for sample in results["samples"]["sums"]:
        doc = sample["doc"]
        expected = [own(model, tokenizer, doc["question"], choice) for choice in doc["choices"]]
        found = [float(answer[0]) for answer in sample["filtered_resps"]]
        assert found == pytest.approx(expected, abs=1e-3)
        right += max(range(3), key=lambda i, e=expected: e[i]) == doc["answer"]
    assert len(results["samples"]["sums"]) == len(QUESTIONS)
    assert results["results"]["sums"]["acc,none"] == pytest.approx(right / len(QUESTIONS))
